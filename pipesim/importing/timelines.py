"""Ranks' traces become one Timeline: which iterations there are, what the schedule was, when messages came."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipesim.cluster import Unit
from pipesim.dataflow import Messages, messages
from pipesim.errors import ScheduleError
from pipesim.importing.clocks import Clocks, LocalClock, about_clocks
from pipesim.importing.kineto import read_ranks
from pipesim.importing.ranks import Found, RankTrace
from pipesim.importing.transfers import align_ranks, own_transfers
from pipesim.memory import Footprint
from pipesim.op import Kind, Op, Pair, Slot
from pipesim.schedule import Schedule
from pipesim.timeline import Timeline

__all__ = ["Imported", "import_traces", "read_traces"]

Floats = NDArray[np.float64]

_SHOWN = 10  # problems that a Timeline's info names
StepKey = tuple[int, int]
Steps = dict[StepKey, list[Found]]


@dataclass(frozen=True, eq=False)
class Imported:
    """What traces became.

    Attributes:
        timeline: The run.
        problems: What was malformed and not imported, with file and index.
        notes: What else to know: where ranks, clocks, iterations and the schedule are from.
        clocks: How the clocks of ranks were aligned; None where there is one clock.
    """

    timeline: Timeline
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    clocks: Clocks | None


def read_traces(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], schedule: Schedule | None = None) -> Timeline:
    """Reads a measured run from traces of torch.profiler, one file per rank, or from a trace that pipesim wrote.

    Args:
        paths: Files (``.json``, ``.json.gz``), or folders of them.
        schedule: What ran. Without it, it is what the ranks did, in their order.

    Returns:
        The run, ``source="measured"``; times are seconds (slots for a trace that pipesim wrote of a run in slots). Its ``info``
        says what was read, how clocks were aligned, and what was malformed.

    Raises:
        ScheduleError: There is no trace, none holds labelled ops, no iteration is complete, or the ranks do not fit together.
        OSError: A file cannot be read.

    Examples:
        >>> import pathlib, tempfile
        >>> from pipesim import UniformCosts, generate, simulate
        >>> from pipesim.viz.trace import write_trace
        >>> run = simulate(generate("1f1b", 2, 4), UniformCosts(forward=1, backward=2, latency=0.25))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_trace(run, pathlib.Path(folder, "trace.json"))
        ...     again = read_traces(pathlib.Path(folder, "trace.json"))
        >>> again.makespan == run.makespan, again.schedule == run.schedule
        (True, True)
    """
    return import_traces(paths, schedule).timeline


def import_traces(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], schedule: Schedule | None = None) -> Imported:
    """The same as :func:`read_traces`, with what was malformed and what to know as lists."""
    ranks = read_ranks(_files(paths))
    problems = [problem for rank in ranks for problem in rank.problems]
    notes = [note for rank in ranks for note in rank.notes]
    try:
        return _assembled(ranks, schedule, problems, notes)
    except ScheduleError as error:
        if not problems:
            raise
        raise ScheduleError(f"{error}\nmalformed, and so not imported: {_listed(problems)}") from None


def _files(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The files, those of a folder by name; numbers in names count as numbers, so that rank10 comes after rank9."""
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    result: list[Path] = []
    for path in map(Path, given):
        if path.is_dir():
            inside = [file for file in path.iterdir() if file.name.lower().endswith((".json", ".json.gz")) and file.is_file()]
            if not inside:
                raise ScheduleError(f"{path} holds no .json or .json.gz file")
            result += sorted(inside, key=_natural)
        else:
            result.append(path)
    if not result:
        raise ScheduleError("there is no trace to read; give one file per rank, or a folder of them")
    return result


def _natural(path: Path) -> list[int | str]:
    # texts stand at even places and numbers at odd ones, so that like is compared with like
    return [int(part[:18]) if place % 2 else part for place, part in enumerate(re.split("([0-9]+)", path.name))]


def _listed(problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more


def _assembled(ranks: list[RankTrace], schedule: Schedule | None, problems: list[str], notes: list[str]) -> Imported:
    own = ranks[0].own
    steps = [_steps(rank) for rank in ranks]
    keys = _common(ranks, steps, notes)
    if schedule is None:
        schedule = _inferred(ranks, steps, keys)
        notes.append("schedule: the ops of each rank in their order; communication is not listed")
    else:
        schedule = _playable(schedule, ranks, notes)
        ranks, steps = _in_order_of_devices(schedule, ranks, steps, keys)
    streams = [[slot for slot in stream if isinstance(slot, Pair) or slot.kind <= Kind.U] for stream in schedule.streams]
    chosen, rows = _complete(ranks, steps, keys, streams, notes)

    clock = LocalClock(ranks)
    slot_device = schedule.slot_device
    times = {
        name: np.array([[clock.time(device, getattr(found, name)) for device, founds in enumerate(row) for found in founds] for row in rows])
        for name in ("start", "end", "asked")
    }
    found = messages(schedule)
    if own is not None:
        transfers, clocks = own_transfers(ranks, found, times, clock, chosen), None
    else:
        transfers, clocks = align_ranks(ranks, found, times, clock, rows)
        for name in times:
            times[name] = times[name] + clocks.shift[slot_device]
        notes += about_clocks(ranks, clocks)
    first = float(times["start"].min())
    sent, departed, arrived = (column - first for column in transfers.columns(found, times, notes))
    start, end = times["start"] - first, times["end"] - first

    unit: Unit = "slot" if own is not None and "slot" in str(own.get("time")) else "s"
    source = str(own.get("source")) if own is not None and own.get("source") in ("simulated", "measured") else "measured"
    info = {
        "imported": "a trace that pipesim wrote" if own is not None else f"torch.profiler traces of {len(ranks)} ranks",
        "files": ", ".join(dict.fromkeys(rank.path.name for rank in ranks)),
        "ranks from": ", ".join(dict.fromkeys(rank.rank_from for rank in ranks)),
        "times": "pipesim's"
        if own is not None
        else "GPU annotations"
        if all(rank.gpu for rank in ranks)
        else "CPU annotations"
        if not any(rank.gpu for rank in ranks)
        else "GPU annotations, of some ranks CPU annotations",
        "notes": "; ".join(notes),
    }
    if problems:
        info["malformed"] = f"{len(problems)} not imported: {_listed(problems)}"
    timeline = Timeline(
        schedule,
        start,
        end,
        sent,
        departed,
        arrived,
        footprint=_no_bytes(schedule, found),
        capacity=np.full(schedule.num_devices, np.inf),
        unit=unit,
        barrier=_barrier(start, end, own),
        source=source,
        info=info,
        offload_start=np.zeros((len(start), 0)),
        offload_end=np.zeros((len(start), 0)),
    )
    return Imported(timeline, tuple(problems), tuple(notes), clocks)


def _barrier(start: Floats, end: Floats, own: Mapping[str, object] | None) -> bool:
    """Whether no rank began an iteration before all had ended the one before."""
    if own is not None and isinstance(own.get("barrier"), bool):
        return bool(own["barrier"])
    return bool((start[1:].min(axis=1, initial=np.inf) >= end[:-1].max(axis=1, initial=-np.inf)).all())


def _no_bytes(schedule: Schedule, found: Messages) -> Footprint:
    """A trace says no bytes of activations, so memory is 0, which stands for unknown."""
    table, devices = np.zeros((schedule.num_stages, schedule.num_microbatches)), np.zeros(schedule.num_devices)
    return Footprint(table, table, table, dict.fromkeys(("weights", "gradients", "optimizer", "weight versions"), devices), np.zeros(len(found)))


# -- iterations --------------------------------------------------------------------------------------------------------


def _steps(rank: RankTrace) -> Steps:
    """(ProfilerStep, how-manieth iteration in it) to ops: a new one begins with a new ProfilerStep, or where an op comes again."""
    result: Steps = {}
    seen: set[Slot] = set()
    key = (-1, -1)
    for found in rank.compute:
        if found.step != key[0] or key[1] < 0:
            key, seen = (found.step, 0), set()
        elif found.slot in seen:
            key, seen = (key[0], key[1] + 1), set()
        seen.add(found.slot)
        result.setdefault(key, []).append(found)
    return result


def _common(ranks: Sequence[RankTrace], steps: list[Steps], notes: list[str]) -> list[StepKey]:
    """The iterations that all ranks have; where not all traces say their numbers, the first is the first."""
    for rank, own in zip(ranks, steps, strict=True):
        if not own and rank.own is None:
            raise ScheduleError(f"{rank.path} has no label of computation (F, B, I, W)")
    used = [place for place, own in enumerate(steps) if own]
    if not all(rank.has_steps for rank in ranks):
        counts = [len(steps[place]) for place in used]
        if len(set(counts)) > 1:
            raise ScheduleError(
                f"the ranks have different numbers of iterations, {counts}, and no ProfilerStep annotations say which belong together; "
                "call profiler.step() after every iteration"
            )
        for place in used:
            steps[place] = {(0, number): own for number, own in enumerate(steps[place].values())}
    keys = sorted(set.intersection(*(set(steps[place]) for place in used)))
    if any(key[0] >= 0 for key in keys):
        keys = [key for key in keys if key[0] >= 0]  # what comes before the first ProfilerStep is no whole iteration
    everything = set.union(*(set(steps[place]) for place in used))
    if not keys:
        raise ScheduleError(
            f"no iteration is in the traces of all ranks: they have {[sorted(steps[place])[:5] for place in used[:8]]} (ProfilerStep, number)"
        )
    if len(everything) > len(keys):
        notes.append(f"{len(everything) - len(keys)} iterations are not in the traces of all ranks, and left out")
    return keys


def _complete(
    ranks: Sequence[RankTrace], steps: Sequence[Steps], keys: Sequence[StepKey], streams: Sequence[list[Slot]], notes: list[str]
) -> tuple[list[StepKey], list[list[list[Found]]]]:
    """The iterations in which every rank did just what its stream says, and per iteration and device its ops."""
    chosen, rows, wrong = [], [], []
    for key in keys:
        row = [_filled(rank, own.get(key, []), stream) for rank, own, stream in zip(ranks, steps, streams, strict=True)]
        bad = next((device for device, founds in enumerate(row) if [found.slot for found in founds] != streams[device]), None)
        if bad is None:
            chosen.append(key)
            rows.append(row)
        else:
            wrong.append(f"{_iteration(key)}, rank {ranks[bad].rank} {_difference([found.slot for found in row[bad]], streams[bad])}")
    if not chosen:
        raise ScheduleError(f"no iteration is complete: {'; '.join(wrong[:3])}")
    if wrong:
        notes.append(f"{len(wrong)} of {len(keys)} iterations left out: {'; '.join(wrong[:3])}{'; ...' if len(wrong) > 3 else ''}")
    return chosen, rows


def _filled(rank: RankTrace, founds: list[Found], stream: Sequence[Slot]) -> list[Found]:
    """Ops that take no time have no slice in pipesim's traces: they stand where the op before them ends."""
    if rank.own is None or not rank.own.get("ops_without_duration_left_out") or len(founds) == len(stream):
        return founds
    result: list[Found] = []
    left = iter(founds)
    following = next(left, None)
    time = founds[0].start if founds else 0.0
    for slot in stream:
        if following is not None and following.slot == slot:
            result.append(following)
            time, following = following.end, next(left, None)
        else:
            result.append(Found(slot, time, time, -1, 0, time))
    return result if following is None else founds


def _iteration(key: StepKey) -> str:
    return f"ProfilerStep#{key[0]}" + (f", iteration {key[1]} in it" if key[1] else "") if key[0] > 0 else f"iteration {key[1]}"


def _difference(done: Sequence[Slot], wanted: Sequence[Slot]) -> str:
    did, should = set(done), set(wanted)
    lacks = [str(slot) for slot in wanted if slot not in did]
    more = [str(slot) for slot in done if slot not in should]
    if lacks or more:
        parts = [f"{what} {', '.join(ops[:5])}{', ...' if len(ops) > 5 else ''}" for what, ops in (("lacks", lacks), ("also has", more)) if ops]
        return " and ".join(parts)
    place = next((number for number, (a, b) in enumerate(zip(done, wanted, strict=False)) if a != b), min(len(done), len(wanted)))
    return f"has another order: {done[place] if place < len(done) else 'nothing'} where {wanted[place] if place < len(wanted) else 'nothing'} is expected"


# -- the schedule ------------------------------------------------------------------------------------------------------


def _inferred(ranks: Sequence[RankTrace], steps: Sequence[Steps], keys: Sequence[StepKey]) -> Schedule:
    """What the ranks did in the iteration with the most ops, the first of those that tie."""
    fullest = max(keys, key=lambda key: sum(len(own.get(key, [])) for own in steps))
    streams = [[found.slot for found in own.get(fullest, [])] for own in steps]
    owner: dict[Op, int] = {}
    for rank, stream in zip(ranks, streams, strict=True):
        for slot in stream:
            for op in slot if isinstance(slot, Pair) else (slot,):
                if op.kind is not Kind.U and (other := owner.setdefault(op, rank.rank)) != rank.rank:
                    raise ScheduleError(
                        f"ranks {other} and {rank.rank} both ran {op}: they are copies (data parallel); give the traces of one pipeline"
                    )
    own = ranks[0].own or {}
    name = own.get("schedule")
    graph, weights = own.get("graph"), own.get("weights", "flush")
    try:
        edges = None if graph is None else [(int(a), int(b)) for a, b in graph]
    except (TypeError, ValueError, OverflowError):
        raise ScheduleError(f"{ranks[0].path}: graph is no list of edges") from None
    try:
        schedule = Schedule.from_streams(streams, name=name if isinstance(name, str) else "imported", graph=edges, weights=weights).check()
    except ScheduleError as error:
        raise ScheduleError(f"what the ranks did in {_iteration(fullest)} is no schedule: {error}") from None
    _refuse_cut_off(schedule, ranks)
    return schedule


def _refuse_cut_off(schedule: Schedule, ranks: Sequence[RankTrace]) -> None:
    """The first stages alone look like a whole pipeline, but for the messages to the stage that is missing."""
    for rank in ranks if ranks[0].own is None else ():
        for op in rank.transfers:
            if op.kind in (Kind.SEND_F, Kind.RECV_B) and op.stage + 1 == schedule.num_stages:
                raise ScheduleError(
                    f"rank {rank.rank} has {op}, and no trace has an op of stage {op.stage + 1} at the other end: give the traces of all ranks of the pipeline"
                )


def _playable(schedule: Schedule, ranks: Sequence[RankTrace], notes: list[str]) -> Schedule:
    """The schedule without what traces do not show."""
    schedule.check()
    unseen = {int(Kind.OFFLOAD), int(Kind.RELOAD)}
    if not any(isinstance(found.slot, Op) and found.slot.kind is Kind.U for rank in ranks for found in rank.compute):
        unseen.add(int(Kind.U))
    lost = np.isin(schedule.kind, sorted(unseen)) & ~schedule.joined
    if not lost.any():
        return schedule
    notes.append(
        "the schedule's " + ", ".join(sorted({Kind(int(kind)).name for kind in schedule.kind[lost]})) + " ops are not in the traces, and left out"
    )
    devices = []
    for device in range(schedule.num_devices):
        rows = np.flatnonzero(~lost & (schedule.device == device))
        devices.append((schedule.stage[rows], schedule.kind[rows], schedule.microbatch[rows], schedule.joined[rows]))
    weights = schedule.weights if not lost[schedule.kind == int(Kind.U)].any() else "flush"
    return Schedule.from_columns(devices, name=schedule.name, graph=schedule.graph, weights=weights).check()


def _in_order_of_devices(
    schedule: Schedule, ranks: list[RankTrace], steps: list[Steps], keys: Sequence[StepKey]
) -> tuple[list[RankTrace], list[Steps]]:
    """The ranks by the device of the schedule whose ops they ran."""
    if len(ranks) != schedule.num_devices:
        raise ScheduleError(f"the schedule has {schedule.num_devices} devices, and there are traces of {len(ranks)} ranks")
    owned = [set(stages) for stages in schedule.device_stages]
    ran = [
        {op.stage for key in keys for found in own.get(key, []) for op in (found.slot if isinstance(found.slot, Pair) else (found.slot,))}
        for own in steps
    ]
    if ran == owned or all(a <= b for a, b in zip(ran, owned, strict=True)):
        return ranks, steps
    places = []
    for device, stages in enumerate(owned):
        place = next((number for number, stages_ran in enumerate(ran) if stages_ran and stages_ran <= stages and number not in places), None)
        if place is None:
            raise ScheduleError(
                f"no rank ran the stages of device {device} ({', '.join(map(str, sorted(stages)))}): ranks ran {[sorted(one) for one in ran[:16]]}"
            )
        places.append(place)
    return [ranks[place] for place in places], [steps[place] for place in places]
