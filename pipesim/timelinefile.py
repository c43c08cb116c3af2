"""Runs as JSON files. What is read may be damaged or hostile: it becomes a run that could be, or a ScheduleError."""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.dataflow import messages
from pipesim.errors import LARGEST, ScheduleError
from pipesim.files import read_limited, write_atomically
from pipesim.formats import csv_text, parse_csv
from pipesim.linkuse import route_count
from pipesim.memory import CATEGORIES, Footprint, moves
from pipesim.network import Links
from pipesim.op import Kind
from pipesim.schedule import Schedule
from pipesim.traffic import Traffic

if TYPE_CHECKING:
    from pipesim.timeline import Timeline

__all__ = ["TIMES", "TRAFFIC_TIMES", "read_run", "write_run"]

Floats = NDArray[np.float64]

# columns of a Timeline; those of its traffic are in a table of their own
TIMES = ("start", "end", "sent", "departed", "arrived", "offload_start", "offload_end")
TRAFFIC_TIMES = ("traffic_start", "traffic_end")

_FORMAT, _VERSION = "pipesim-timeline", 2
_READ = (1, 2)  # 1 has no traffic and no links
_MOST_OPS = 10**8  # a file says "all the same" in one number, so its size is no limit to what it unfolds to
# what the parts of a file are that hold others; columns are looked at one by one
_TYPES: dict[str, Any] = {
    "schedule": dict,
    "schedule.rows": list,
    "schedule.graph": list | None,
    "schedule.offload_to": list,
    "footprint": dict,
    "footprint.static": dict,
    "capacity": list,
    "info": dict,
    "traffic": dict | None,
    "traffic.rows": list | None,
    "traffic.kind": list,
    "links": dict | None,
    "links.names": list,
    "links.resource": list,
}
_TRAFFIC_KINDS = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B, Kind.REDUCE_GRAD, Kind.UNSHARD)


# -- writing -----------------------------------------------------------------------------------------------------------


def write_run(timeline: Timeline, target: str | os.PathLike[str]) -> None:
    """Writes a run as JSON, compressed where the name ends in ``.gz``; the same run is the same file.

    Raises:
        OSError: The file cannot be written. Nothing half-written is left.
    """
    schedule, footprint = timeline.schedule, timeline.footprint
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "schedule": {
            "name": schedule.name,
            "weights": schedule.weights,
            "graph": schedule.graph,
            "offload_to": [[device, target] for device, target in schedule.offload_to.items()],
            "rows": csv_text(schedule).splitlines(),
        },
        "unit": timeline.unit,
        "barrier": timeline.barrier,
        "blocking": timeline.blocking,
        "source": timeline.source,
        "info": dict(timeline.info),
        "steps": timeline.steps,
        **{name: _packed(getattr(timeline, name)) for name in TIMES},
        "footprint": {
            "kept": _packed(footprint.kept),
            "freed_by_input_grad": _packed(footprint.freed_by_input_grad),
            "rebuilt": _packed(footprint.rebuilt),
            "message": _packed(footprint.message),
            "static": {category: _packed(values) for category, values in footprint.static.items()},
        },
        "capacity": [None if math.isinf(value) else value for value in timeline.capacity.tolist()],
        "traffic": _packed_traffic(timeline),
        "links": _packed_links(timeline.links),
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # mtime=0: the same run is the same file
    write_atomically(target, gzip.compress(text.encode(), mtime=0) if str(target).endswith(".gz") else text)


def _packed(array: Floats) -> Any:
    """The numbers of an array in a row; one number where all are the same."""
    flat = np.ravel(array)
    return float(flat[0]) if len(flat) and (flat == flat[0]).all() else flat.tolist()


def _packed_traffic(timeline: Timeline) -> dict[str, Any] | None:
    traffic = timeline.traffic
    if not len(traffic):
        return None
    names = [kind.name for kind in Kind]
    return {
        "rows": None if traffic.schedule == timeline.schedule else csv_text(traffic.schedule).splitlines(),
        "kind": [names[kind] for kind in traffic.kind.tolist()],
        **{name: getattr(traffic, name).tolist() for name in ("device", "stage", "microbatch", "peer", "row", "message")},
        "size": _packed(traffic.size),
        "start": _packed(timeline.traffic_start),
        "end": _packed(timeline.traffic_end),
    }


def _packed_links(links: Links | None) -> dict[str, Any] | None:
    if links is None:
        return None
    return {"names": list(links.names), **{name: getattr(links, name).tolist() for name in ("capacity", "latency", "first", "resource", "load")}}


# -- reading -----------------------------------------------------------------------------------------------------------


def read_run(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads what :func:`write_run` wrote, as the fields of a Timeline.

    Raises:
        ScheduleError: The file is no such run, or a column does not fit its schedule.
        OSError: It cannot be read.
    """
    path = Path(source)
    text = read_limited(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ScheduleError(f'{path} is not a run that pipesim saved (its "format" is not {_FORMAT!r})')
    version = data.get("version")
    if isinstance(version, bool) or version not in _READ:
        raise ScheduleError(f"{path} has version {version!r} of the format; this pipesim reads versions {' and '.join(map(str, _READ))}")
    try:
        return _unpacked({"blocking": False, "traffic": None, "links": None, **data} if version == 1 else data, str(path))
    except ScheduleError as error:
        raise ScheduleError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ScheduleError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def _unpacked(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    _refuse_types(data, where)
    about = data["schedule"]
    graph = None if about["graph"] is None else _pairs(about["graph"], "graph", where)
    offload = dict(_pairs(about["offload_to"], "offload_to", where))
    more: dict[str, Any] = {"name": str(about["name"]), "graph": graph, "weights": about["weights"], "offload_to": offload}
    schedule = _schedule(about["rows"], where, more)
    steps = data["steps"]
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 10**6:
        raise ScheduleError(f"{where}: steps is {steps!r}; right is a whole number of at least 1")
    if data["unit"] not in ("s", "slot") or not isinstance(data["barrier"], bool) or not isinstance(data["blocking"], bool):
        raise ScheduleError(f"{where}: unit must be 's' or 'slot', and barrier and blocking true or false")
    _refuse_more(steps, len(schedule), where)
    slots, edges, table = schedule.num_slots, len(messages(schedule)), (schedule.num_stages, schedule.num_microbatches)
    counts = dict.fromkeys(TIMES, edges)
    counts["start"] = counts["end"] = slots
    counts["offload_start"] = counts["offload_end"] = len(moves(schedule))
    times = {name: _column(data[name], (steps, counts[name]), name, where) for name in TIMES}
    _check_times(times, schedule, where)
    stored = data["footprint"]
    kept, freed, rebuilt = (_sizes(stored[name], table, name, where) for name in ("kept", "freed_by_input_grad", "rebuilt"))
    footprint = Footprint(
        kept,
        freed,
        rebuilt,
        {str(category): _sizes(values, (schedule.num_devices,), str(category), where) for category, values in stored["static"].items()},
        _sizes(stored["message"], (edges,), "message", where),
    )
    unknown = sorted(footprint.static.keys() - set(CATEGORIES))
    if unknown:
        raise ScheduleError(f"{where}: unknown category of memory {unknown[0]!r}; known: {', '.join(CATEGORIES)}")
    capacity = _sizes([LARGEST if value is None else value for value in data["capacity"]], (schedule.num_devices,), "capacity", where)
    capacity[capacity == LARGEST] = math.inf
    traffic = {} if data["traffic"] is None else _traffic(data["traffic"], schedule, steps, where, more)
    return {
        "schedule": schedule,
        **times,
        "footprint": footprint,
        "capacity": capacity,
        "unit": data["unit"],
        "barrier": data["barrier"],
        "blocking": data["blocking"],
        "source": str(data["source"]),
        "info": {str(key): str(value) for key, value in data["info"].items()},
        "links": None if data["links"] is None else _links(data["links"], schedule, where),
        **traffic,
    }


def _refuse_types(data: Mapping[str, Any], where: str) -> None:
    """Refuses a file in which something is missing or no list or object that must be one."""
    for path, kind in _TYPES.items():
        outer, _, name = path.rpartition(".")
        holder = data[outer] if outer else data
        if holder is None:
            continue
        if name not in holder:
            raise ScheduleError(f"{where} is damaged: {path} is missing")
        if not isinstance(holder[name], kind):
            raise ScheduleError(f"{where} is damaged: {path} is {holder[name]!r:.40}; right is {'a list' if isinstance([], kind) else 'an object'}")


def _pairs(value: Any, name: str, where: str) -> list[tuple[int, int | None]]:
    try:
        return [(int(a), None if b is None else int(b)) for a, b in value]
    except (TypeError, ValueError, OverflowError):
        raise ScheduleError(f"{where} is damaged: {name} of the schedule holds what is no pair of whole numbers") from None


def _schedule(rows: Any, where: str, more: Mapping[str, Any]) -> Schedule:
    return parse_csv("\n".join(str(row) for row in rows), f"{where}, schedule", **more).check()


def _refuse_more(steps: int, ops: int, where: str) -> None:
    if steps * ops > _MOST_OPS:
        raise ScheduleError(f"{where}: {steps} steps of {ops} ops are more than the {_MOST_OPS} that pipesim reads")


def _column(value: Any, shape: tuple[int, ...], name: str, where: str) -> Floats:
    """Numbers of this shape, finite; one number stands for all."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ScheduleError(f"{where}: {name} holds something that is no number") from None
    if array.ndim == 0:
        array = np.broadcast_to(array, shape).copy()
    if array.size != math.prod(shape):
        raise ScheduleError(f"{where}: {name} has {array.size} numbers and its schedule wants {math.prod(shape)}")
    if not (np.abs(array) <= LARGEST).all():  # false for NaN, too
        raise ScheduleError(f"{where}: {name} holds a number that is not finite, or above {LARGEST:g}")
    return array.reshape(shape)


def _sizes(value: Any, shape: tuple[int, ...], name: str, where: str) -> Floats:
    array = _column(value, shape, name, where)
    if (array < 0).any():
        raise ScheduleError(f"{where}: {name} holds {array.min():g} bytes; right is at least 0")
    return array


def _check_times(times: Mapping[str, Floats], schedule: Schedule, where: str) -> None:
    """Refuses times that no run can have."""
    if (times["end"] < times["start"]).any() or (times["offload_end"] < times["offload_start"]).any():
        raise ScheduleError(f"{where}: an op ends before it starts")
    same_device = schedule.slot_device[1:] == schedule.slot_device[:-1]
    if (times["start"][:, 1:] < times["end"][:, :-1])[:, same_device].any():
        raise ScheduleError(f"{where}: an op starts before the one before it on its device ends")
    if (times["departed"] < times["sent"]).any() or (times["arrived"] < times["departed"]).any():
        raise ScheduleError(f"{where}: a message leaves before it is sent, or arrives before it leaves")


def _traffic(data: Mapping[str, Any], schedule: Schedule, steps: int, where: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """The traffic and its times; everything in it must be of the schedule."""
    listing = schedule if data["rows"] is None else _schedule(data["rows"], where, more)
    if listing is not schedule and listing.without_communication() != schedule.without_communication():
        raise ScheduleError(f"{where}: the traffic is of another schedule than the run")
    codes = {kind.name: int(kind) for kind in _TRAFFIC_KINDS}
    wrong = [name for name in data["kind"] if not isinstance(name, str) or name not in codes]
    if wrong:
        raise ScheduleError(f"{where}: {wrong[0]!r:.40} is no kind of traffic; right is one of {', '.join(codes)}")
    kind = np.array([codes[name] for name in data["kind"]], dtype=np.int8)
    _refuse_more(steps, len(kind), where)
    bounds = {
        "device": (0, schedule.num_devices),
        "stage": (0, schedule.num_stages),
        "microbatch": (-1, max(schedule.num_microbatches, len(schedule))),  # of a reduction the number of an update
        "peer": (-1, schedule.num_devices),
        "row": (-1, len(listing)),
        "message": (-1, len(messages(schedule))),
    }
    columns: dict[str, Any] = {}
    for name, (lowest, end) in bounds.items():
        numbers = _whole(data[name], len(kind), lowest, end, f"traffic {name}", where)
        columns[name] = numbers if name in ("row", "message") else numbers.astype(np.int32)
    if ((columns["peer"] < 0) != np.isin(kind, [int(Kind.REDUCE_GRAD), int(Kind.UNSHARD)])).any():
        raise ScheduleError(f"{where}: a collective of the traffic has a peer, or a SEND or RECV has none")
    size = _sizes(data["size"], (len(kind),), "traffic size", where)
    start, end_ = (_column(data[name], (steps, len(kind)), f"traffic {name}", where) for name in ("start", "end"))
    if (end_ < start).any():
        raise ScheduleError(f"{where}: an op of the traffic ends before it starts")
    return {"traffic": Traffic(listing, kind, size=size, **columns), "traffic_start": start, "traffic_end": end_}


def _links(data: Mapping[str, Any], schedule: Schedule, where: str) -> Links:
    """The links; there must be a route for every ordered pair of devices that exchange something."""
    names = tuple(str(name) for name in data["names"])
    pairs = route_count(schedule)
    latency, capacity = _sizes(data["latency"], (pairs,), "links latency", where), _sizes(data["capacity"], (len(names),), "links capacity", where)
    if (capacity <= 0).any():
        raise ScheduleError(f"{where}: links capacity holds what is not above 0")
    first = _whole(data["first"], pairs + 1, 0, _MOST_OPS, "links first", where)
    crossings = int(first[-1])
    if first[0] != 0 or (np.diff(first) < 0).any() or len(data["resource"]) != crossings:
        raise ScheduleError(f"{where}: links first holds what are no bounds of its {len(data['resource'])} crossings")
    resource = _whole(data["resource"], crossings, 0, len(names), "links resource", where)
    return Links(names, capacity, latency, first, resource, _sizes(data["load"], (crossings,), "links load", where))


def _whole(value: Any, count: int, lowest: int, end: int, name: str, where: str) -> NDArray[np.int64]:
    """*count* whole numbers from *lowest* to *end* - 1."""
    numbers = _column(value, (count,), name, where)
    if ((numbers % 1 != 0) | (numbers < lowest) | (numbers >= end)).any():
        raise ScheduleError(f"{where}: {name} holds what is no whole number from {lowest} to {end - 1}")
    return numbers.astype(np.int64)
