"""Configurations: what a sweep runs, each a dict of plain values."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pipesim import registry
from pipesim.cluster import Cluster
from pipesim.costs import CostModel, UniformCosts, read_costs
from pipesim.engine import simulate
from pipesim.errors import ScheduleError, did_you_mean, require_count
from pipesim.schedule import Schedule
from pipesim.timeline import Timeline

__all__ = ["Configuration", "configuration_ids", "grid", "simulated"]

Configuration = dict[str, Any]

# what UniformCosts takes: times, sizes and links, and the rest, which are no such numbers
_OTHER = ("tied", "buckets", "reduce_every_microbatch")
_NUMBERS = tuple(field.name for field in fields(UniformCosts) if field.name not in (*_OTHER, "unit", "name", "microbatches"))
_PROFILE = ("cuts", "weight_grad_share", "optimizer_bytes")
_RUN = (*_OTHER, "costs", *_PROFILE, "cluster", "capacity", "steps", "barrier", "unit")
_COUNTS = ("devices", "microbatches", "stages", "steps", "buckets")
_TYPES: dict[str, tuple[type, str]] = {
    "costs": (str, "names"),
    "cluster": (str, "names"),
    "unit": (str, "'slot' or 's'"),
    "barrier": (bool, "True or False"),
    "tied": (str, "groups of stages such as '0+3'"),
    "reduce_every_microbatch": (bool, "True or False"),
}

_LARGEST = 10**6  # configurations; their dicts alone take about a GB


def grid(schedules: Any, devices: Any = (), microbatches: Any = (), **axes: Any) -> list[Configuration]:
    """Returns every combination of the values of some axes, the last axis fastest.

    An axis is one value or a list of them; in a list, a list stands for one value per stage. An axis applies only to
    schedules that know it: ``chunks`` leaves ``1f1b`` alone, and ``devices`` a file, without a row being there twice.

    Args:
        schedules: Names, files, ``module:function``: all that :func:`pipesim.generate` and the command line take.
        devices: Numbers of devices.
        microbatches: Numbers of microbatches.
        **axes: Numbers of :class:`pipesim.UniformCosts` (``forward``, ``latency``, ``unit``, ...), ``costs`` (names of
            cost files), ``cluster`` (names of clusters), ``capacity`` of every device, ``steps``, ``barrier``, and options
            of the schedules. A generator that has an option of the name of a cost gets it too: orders may depend on costs.

    Raises:
        ScheduleError: A name is wrong, an axis is no schedule's, a value cannot be right for any schedule, or there are more
            than a million combinations. What is wrong with one combination only is recorded when it runs.

    Examples:
        >>> found = grid(["1f1b", "hanayo"], devices=4, microbatches=[4, 8], waves=[1, 2])
        >>> [(c["schedule"], c["microbatches"], c.get("waves")) for c in found]
        [('1f1b', 4, None), ('1f1b', 8, None), ('hanayo', 4, 1), ('hanayo', 4, 2), ('hanayo', 8, 1), ('hanayo', 8, 2)]
    """
    given = {"devices": devices, "microbatches": microbatches, **axes}
    values = {name: _values(name, value) for name, value in given.items()}
    names: list[str] = list(dict.fromkeys(_values("schedules", schedules)))
    if not names:
        raise ScheduleError("schedules has no values; give at least one name")
    own = {name: _options(name) for name in names}
    known = [*_NUMBERS, *_RUN]
    for axis in axes:
        if axis not in known and not any(axis in options for options in own.values()):
            options = sorted({option for options in own.values() for option in options})
            raise ScheduleError(f"there is no axis {axis!r}{did_you_mean(axis, [*known, *options]) or '; none of the schedules has such an option'}")
    result: dict[str, Configuration] = {}
    for name in names:
        axes_here = {axis: choices for axis, choices in values.items() if axis in known or axis in own[name]}
        missing = [size for size in ("devices", "microbatches") if size in own[name] and not axes_here[size]]
        if missing:
            raise ScheduleError(f"schedule {name!r} wants {' and '.join(missing)}, such as devices = 4, microbatches = 8")
        axes_here = {axis: choices for axis, choices in axes_here.items() if choices}
        if len(result) + math.prod(map(len, axes_here.values())) > _LARGEST:
            raise ScheduleError(f"the sweep has more than {_LARGEST} configurations; take fewer values, or several sweeps")
        for combination in itertools.product(*axes_here.values()):
            configuration = {"schedule": name, **dict.fromkeys(values), **dict(zip(axes_here, combination, strict=True))}
            result.setdefault(_text(configuration), configuration)
    return _with_units(list(result.values()))


def _values(name: str, value: Any) -> list[Any]:
    """The values of an axis, whole numbers and floats as such."""
    value = value.tolist() if hasattr(value, "tolist") else value
    listed = list(value) if isinstance(value, list | tuple | range) else [value]
    if not listed and name not in ("devices", "microbatches", "schedules"):
        raise ScheduleError(f"{name} has no values")
    if name in _COUNTS:
        return [require_count(name, one) for one in listed]
    result = [_value(name, one) for one in listed]
    if name == "schedules" and not all(isinstance(one, str) for one in result):
        raise ScheduleError(f"schedules must be names, got {value!r:.80}")
    return result


def _value(name: str, value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        return [_value(name, one) for one in value]
    if isinstance(value, str) and (value.splitlines() not in ([], [value]) or not value.isprintable()):
        raise ScheduleError(f"{name} {value!r:.80} is not one line of text")
    if value is not None and not isinstance(value, str | int | float | bool):
        raise ScheduleError(f"{name} must hold numbers, texts or truth values, got {value!r:.80}")
    kind, right = _TYPES.get(name, (object, ""))
    if value is not None and not isinstance(value, kind):
        raise ScheduleError(f"{name} must be {right}, got {value!r:.80}")
    if name == "capacity" and (isinstance(value, str | bool)):
        raise ScheduleError(f"capacity must be a number of bytes (or units), got {value!r:.80}")
    return float(value) if name in (*_NUMBERS, "capacity") and isinstance(value, int) and not isinstance(value, bool) else value


def _options(name: str) -> Collection[str]:
    """The axes that only some schedules have: sizes and options of a generator, nothing of a file."""
    if registry.is_file(name):
        return ()
    return ("devices", "microbatches", *registry.options_of(registry.find(name)))


def _text(configuration: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in sorted(configuration.items()) if value is not None})


def _with_units(configurations: Sequence[Configuration]) -> list[Configuration]:
    """Adds the unit of time, and refuses costs and clusters that no schedule could use, before anything runs."""
    units: dict[str, str] = {}
    for configuration in configurations:
        part = {name: value for name, value in configuration.items() if name in (*_NUMBERS, *_RUN, "microbatches")}
        key = _text(part)
        if key not in units:
            costs = _costs(part)
            cluster = _cluster({**part, "unit": costs.unit})
            if cluster is not None and cluster.unit != costs.unit:
                raise ScheduleError(f"the cluster {part.get('cluster')!r} is physical and the costs are in slots; give times with unit 's'")
            units[key] = costs.unit
        configuration["unit"] = units[key]
    return list(configurations)


def configuration_ids(configurations: Sequence[Configuration]) -> list[str]:
    """A hash of each configuration, and of the contents of the files that it names: 16 hexadecimal digits."""
    digests: dict[str, str] = {}

    def digest(name: str) -> str:
        if name not in digests:
            path = Path(name.rpartition(":")[0] or name)
            digests[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        return digests[name]

    def one(configuration: Configuration) -> str:
        files = [digest(configuration[name]) for name in ("schedule", "costs", "cluster") if configuration.get(name) is not None]
        return hashlib.sha256("\n".join([_text(configuration), *files]).encode()).hexdigest()[:16]

    return [one(configuration) for configuration in configurations]


# -- running one -------------------------------------------------------------------------------------------------------


def _costs(values: Mapping[str, Any]) -> CostModel:
    numbers = {name: values[name] for name in (*_NUMBERS, *_OTHER) if values.get(name) is not None}
    profile = {name: values[name] for name in _PROFILE if values.get(name) is not None}
    if values.get("costs") is None:
        if profile:
            raise ScheduleError(f"{', '.join(profile)} belongs to costs, the name of a layer profile")
        return UniformCosts(**numbers, microbatches=values.get("microbatches") if "stages" in numbers else None, unit=values.get("unit") or "slot")
    if numbers:
        raise ScheduleError(f"costs names a file that gives the costs already; leave out {', '.join(numbers)}")
    costs = read_costs(values["costs"], **profile)
    if isinstance(costs, UniformCosts) and costs.stages is not None:
        return replace(costs, microbatches=values.get("microbatches"))
    return costs


def _cluster(values: Mapping[str, Any]) -> Cluster | None:
    cluster = None if values.get("cluster") is None else Cluster.load(values["cluster"])
    if values.get("capacity") is None:
        return cluster
    return (Cluster(unit=values["unit"], name="none") if cluster is None else cluster).with_memory(values["capacity"])


def _schedule(values: Mapping[str, Any]) -> Schedule:
    if registry.is_file(values["schedule"]):
        return registry.read_file(values["schedule"])
    return registry.generate(values["schedule"], values["devices"], values["microbatches"], **values["options"])


def _known_options(values: Mapping[str, Any]) -> Collection[str]:
    return () if registry.is_file(values["schedule"]) else tuple(registry.options_of(registry.find(values["schedule"])))


def _own_options(configuration: Configuration, known: Collection[str], costs: CostModel) -> dict[str, Any]:
    """The options of the schedule, with those times that its order may depend on: the same that it is then run with."""
    options = {name: configuration[name] for name in known if configuration.get(name) is not None}
    times = costs.stage_times() if isinstance(costs, UniformCosts) else {}
    return options | {name: time.tolist() for name, time in times.items() if name in known}


def simulated(configuration: Configuration, engine: Any, shared: dict[Any, Any]) -> Timeline:
    """Runs one configuration. Those of a batch differ little, so what several need is made once and *shared*."""

    def once(make: Callable[[Mapping[str, Any]], Any], names: Sequence[str], **more: Any) -> Any:
        values = {**{name: configuration.get(name) for name in names}, **more}
        key = make, _text(values)
        if key not in shared:
            shared[key] = make(values)
        return shared[key]

    costs = once(_costs, (*_NUMBERS, *_OTHER, *_PROFILE, "costs", "unit", "microbatches"))
    cluster = once(_cluster, ("cluster", "capacity"), unit=costs.unit)
    options = _own_options(configuration, once(_known_options, ("schedule",)), costs)
    schedule = once(_schedule, ("schedule", "devices", "microbatches"), options=options)
    barrier = configuration.get("barrier") is not False
    return simulate(schedule, costs, cluster=cluster, steps=configuration.get("steps") or 1, barrier=barrier, engine=engine)
