"""What is wrong with a schedule, as far as it can be said without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from pipesim import jit, loops
from pipesim.columns import distinct
from pipesim.dataflow import dependency_edges, messages
from pipesim.errors import ScheduleError
from pipesim.op import Kind
from pipesim.schedule import Schedule

__all__ = ["check_placement", "check_schedule"]


def check_schedule(schedule: Schedule) -> None:
    """Raises ScheduleError for the first fault found; see :meth:`Schedule.check`."""
    if not len(schedule):
        raise ScheduleError("the schedule lists no op at all; it wants one row of ops per device, such as 0F0,0B0")
    if not _is_sound(schedule):
        _check_rows(schedule)
        _check_graph(schedule)
        _check_counts(schedule)
        _check_devices(schedule)
        _check_order(schedule)
    _check_updates(schedule)
    _check_reductions(schedule)
    _check_communication(schedule)
    _check_offloads(schedule)


def _is_sound(schedule: Schedule) -> bool:
    """A quick yes, where one can be had, to what the checks up to the order would say; they say where a fault is."""
    if not jit.is_loaded() or schedule.graph is not None or not schedule.num_microbatches:
        return False
    if schedule.kind_counts[Kind.F] != schedule.num_stages * schedule.num_microbatches:  # before any table of that size is made
        return False
    columns = schedule.device, schedule.stage, schedule.kind, schedule.microbatch, schedule.joined
    return bool(jit.call(loops.sound, *columns, *schedule.placed))


def check_placement(schedule: Schedule, placement: Mapping[int, int | Sequence[int]]) -> None:
    """Raises ScheduleError if an op stands on a device that does not own its stage; see :meth:`Schedule.check_placement`."""
    for stage, devices in sorted(schedule.placement.items()):
        if stage not in placement:
            raise ScheduleError(f"stage {stage} is listed on device {devices[0]}, and the expected placement has no place for it")
        expected = placement[stage]
        expected = tuple(expected) if isinstance(expected, Sequence) else (expected,)
        foreign = sorted(set(devices) - set(expected))
        if foreign:
            row = int(np.flatnonzero((schedule.stage == stage) & (schedule.device == foreign[0]))[0])
            owners = ", ".join(map(str, expected))
            _fail(schedule, row, f"stage {stage} belongs to device {owners}, not to device {foreign[0]}")


def _fail(schedule: Schedule, row: int, what: str) -> NoReturn:
    from pipesim.formats import excerpt

    raise ScheduleError(f"{schedule.where(row)}: {what}\n{excerpt(schedule, row)}")


def _name(schedule: Schedule, row: int) -> str:
    return f"{schedule.op(row)} (device {int(schedule.device[row])})"


def _check_rows(schedule: Schedule) -> None:
    """Pairs are two compute ops; every kind that belongs to a microbatch has one."""
    joined = np.flatnonzero(schedule.joined)
    if len(joined):
        starts = np.isin(joined, schedule.device_rows[:-1])
        before = np.maximum(joined - 1, 0)
        compute = (schedule.kind[joined] <= int(Kind.U)) & (schedule.kind[before] <= int(Kind.U))
        bad = starts | ~compute | schedule.joined[before]
        if bad.any():
            _fail(schedule, int(joined[bad][0]), "a pair is two compute ops of one device, the second joined to the first")
    missing = np.flatnonzero(schedule.microbatch < 0)
    if len(missing):
        missing = missing[~np.isin(schedule.kind[missing], [int(Kind.UNSHARD), int(Kind.RESHARD), int(Kind.REDUCE_GRAD)])]
    if len(missing):
        _fail(schedule, int(missing[0]), "the op lacks its microbatch")


def _check_graph(schedule: Schedule) -> None:
    """Every stage is listed, every predecessor is known, and there is no way round."""
    listed = distinct(schedule.stage)
    for before, after in schedule.graph or ():
        for stage in (before, after):
            position = int(np.searchsorted(listed, stage))
            if position == len(listed) or listed[position] != stage:
                raise ScheduleError(f"the stage graph has an edge {before} -> {after}, and no op of stage {stage} is listed on any device")
    gap = _first_gap(listed)
    if gap is not None:
        raise ScheduleError(
            f"stage {gap} is missing: stages count from 0, the highest listed is {int(listed[-1])}, and no device lists an op of stage {gap}"
        )
    if schedule.graph is not None:
        cycle = _find_cycle(schedule.graph)
        if cycle:
            raise ScheduleError(f"the stage graph has a cycle: {' -> '.join(map(str, cycle))}; an activation would wait for itself")


def _first_gap(values: NDArray[np.integer]) -> int | None:
    """The smallest number from 0 that the sorted distinct values skip."""
    skipped = np.flatnonzero(values != np.arange(len(values)))
    return int(skipped[0]) if len(skipped) else None


def _find_cycle(edges: Sequence[tuple[int, int]]) -> list[int]:
    """A cycle as [a, b, ..., a], or an empty list. Depth first, without recursion: chains may be long."""
    successors: dict[int, list[int]] = {}
    for before, after in edges:
        successors.setdefault(before, []).append(after)
    done: set[int] = set()
    for root in successors:
        path, waiting = [], [(root, iter(successors.get(root, ())))]
        if root in done:
            continue
        on_path = {root}
        path.append(root)
        while waiting:
            stage, rest = waiting[-1]
            following = next(rest, None)
            if following is None:
                waiting.pop()
                path.pop()
                on_path.discard(stage)
                done.add(stage)
            elif following in on_path:
                return [*path[path.index(following) :], following]
            elif following not in done:
                path.append(following)
                on_path.add(following)
                waiting.append((following, iter(successors.get(following, ()))))
    return []


def _check_counts(schedule: Schedule) -> None:
    """F, B, I, W, R: each (stage, microbatch) once; a stage with any backward has all of them."""
    if not schedule.has(Kind.F, Kind.B, Kind.I, Kind.W, Kind.R):
        raise ScheduleError("the schedule lists no forward at all, so there is nothing to run")
    belongs = schedule.kind <= int(Kind.R)
    gap = _first_gap(distinct(schedule.microbatch if belongs.all() else schedule.microbatch[belongs]))
    if gap is not None:
        raise ScheduleError(f"microbatch {gap} is missing: microbatches count from 0, the highest listed is {schedule.num_microbatches - 1}")
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    if schedule.kind_counts[Kind.F] < stages * microbatches:  # before any table of that size is made
        forward = np.flatnonzero(schedule.kind == int(Kind.F))
        counts = np.bincount(schedule.stage[forward], minlength=stages)
        stage = int(np.argmax(counts < microbatches))
        present = distinct(schedule.microbatch[forward[schedule.stage[forward] == stage]])
        gap = _first_gap(present)
        lost = len(present) if gap is None else gap
        raise ScheduleError(
            f"{stage}F{lost} is missing: stage {stage} has {int(counts[stage])} forwards and there are {microbatches} microbatches{_first_mention(schedule, stage, lost)}"
        )
    for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R):
        table = schedule.rows_of(kind)
        if np.count_nonzero(table >= 0) == schedule.kind_counts[kind]:  # every row has a place of its own
            continue
        rows = np.flatnonzero(schedule.kind == int(kind))
        twice = rows[table[schedule.stage[rows], schedule.microbatch[rows]] != rows]
        if len(twice):
            first = int(twice[0])
            second = int(table[schedule.stage[first], schedule.microbatch[first]])
            _fail(schedule, second, f"{schedule.op(second)} is listed twice, first at {schedule.where(first)}; every op stands once")
    if schedule.has(Kind.R):
        recompute = schedule.rows_of(Kind.R)
        _no_such(schedule, (recompute >= 0) & (schedule.backward_rows < 0), recompute, "recomputes for a backward that is not listed")
    if not schedule.has_backward:
        return
    if schedule.has(Kind.I, Kind.W):
        full, half, weight = schedule.rows_of(Kind.B), schedule.rows_of(Kind.I), schedule.rows_of(Kind.W)
        _no_such(schedule, (full >= 0) & ((half >= 0) | (weight >= 0)), full, "is a full backward, and its halves I or W are listed too; list either")
        _no_such(schedule, (half >= 0) & (weight < 0), half, "has no W: a split backward is I and W")
        _no_such(schedule, (half < 0) & (weight >= 0), weight, "has no I: a split backward is I and W")
    there = schedule.backward_rows >= 0
    if there.all():
        return
    some, every = np.any(there, axis=1), np.all(there, axis=1)
    partial = some & ~every
    if partial.any():
        stage = int(np.argmax(partial))
        microbatch = int(np.argmin(there[stage]))
        row = int(schedule.rows_of(Kind.F)[stage, microbatch])
        _fail(
            schedule,
            row,
            f"{stage}B{microbatch} (or {stage}I{microbatch} and {stage}W{microbatch}) is missing: a stage with any backward has all of them",
        )
    for before, after in schedule.stage_edges:
        if some[before] and not some[after]:
            raise ScheduleError(f"stage {before} has a backward and its successor, stage {after}, has none; no gradient can reach stage {before}")


def _first_mention(schedule: Schedule, stage: int, microbatch: int) -> str:
    """Where the missing forward is missed, if some other op of it is listed."""
    rows = np.flatnonzero((schedule.stage == stage) & (schedule.microbatch == microbatch) & (schedule.kind <= int(Kind.R)))
    if not len(rows):
        return ""
    from pipesim.formats import excerpt

    row = int(rows[0])
    return f" (needed by {schedule.where(row)})\n{excerpt(schedule, row)}"


def _no_such(schedule: Schedule, bad: NDArray[np.bool_], rows: NDArray[np.int32], what: str) -> None:
    if bad.any():
        row = int(rows[bad].min())
        _fail(schedule, row, f"{schedule.op(row)} {what}")


def _check_devices(schedule: Schedule) -> None:
    """All ops of one (stage, microbatch) stand on one device: its activation is nowhere else."""
    forward = schedule.rows_of(Kind.F)
    home = schedule.device[forward]
    for kind in (Kind.B, Kind.I, Kind.W, Kind.R):
        if not schedule.has(kind):
            continue
        rows = schedule.rows_of(kind)
        elsewhere = (schedule.device[rows] != home) & (rows >= 0)
        if elsewhere.any():
            row = int(rows[elsewhere].min())
            first = int(forward[schedule.stage[row], schedule.microbatch[row]])
            _fail(
                schedule,
                row,
                f"the activation of {schedule.op(first)} is on device {int(schedule.device[first])}; {schedule.op(row)} must stand there too",
            )


def _check_order(schedule: Schedule) -> None:
    """Inside a device, every op stands after its inputs, and not in one pair with them."""
    source, target = dependency_edges(schedule, within_devices=True)
    if schedule.every_row_a_slot:
        wrong = source >= target
    else:
        wrong = schedule.row_slot[source] >= schedule.row_slot[target]
    if wrong.any():
        wrong &= schedule.device[source] == schedule.device[target]
    if wrong.any():
        first = int(np.flatnonzero(wrong)[np.argmin(target[wrong])])
        needed, row = int(source[first]), int(target[first])
        how = "shares a slot with" if schedule.row_slot[needed] == schedule.row_slot[row] else "before"
        _fail(schedule, row, f"{schedule.op(row)} {how} {schedule.op(needed)}, which it needs")


def _check_updates(schedule: Schedule) -> None:
    """U: once per update on every device that lists the stage; under flush one, after the last gradient."""
    rows = np.flatnonzero(schedule.kind == int(Kind.U)) if schedule.has(Kind.U) else np.zeros(0, np.int64)
    if not len(rows):
        if schedule.weights != "flush" and schedule.has_backward:
            raise ScheduleError(
                f"the weight policy {schedule.weights!r} is asynchronous, and no update is listed; list U ops, as 0U0 after the first backward of stage 0"
            )
        return
    counts: dict[int, tuple[int, int]] = {}
    for stage, devices in schedule.placement.items():
        for device in devices:
            mine = rows[(schedule.stage[rows] == stage) & (schedule.device[rows] == device)]
            numbers = schedule.microbatch[mine]
            wrong = np.flatnonzero(numbers != np.arange(len(mine)))
            if len(wrong):
                row = int(mine[wrong[0]])
                _fail(schedule, row, f"updates of a stage count 0, 1, 2, ... in order on every device; {stage}U{int(wrong[0])} belongs here")
            first_device, count = counts.setdefault(stage, (device, len(mine)))
            if count != len(mine):
                raise ScheduleError(
                    f"stage {stage} has {len(mine)} updates on device {device} and {count} on device {first_device}; its replicas update together, so both list as many"
                )
            if schedule.weights != "flush":
                continue
            if len(mine) > 1:
                _fail(
                    schedule,
                    int(mine[1]),
                    "a flush schedule is one step and has one update per stage; an asynchronous one wants its weight policy (weights=, --weight-policy)",
                )
            here = (schedule.device == device) & (schedule.stage == stage) & np.isin(schedule.kind, [int(Kind.B), int(Kind.W)])
            if len(mine) and here.any() and np.flatnonzero(here)[-1] > mine[0]:
                _fail(
                    schedule,
                    int(mine[0]),
                    f"the update stands before gradient {schedule.op(int(np.flatnonzero(here)[-1]))}; under flush it follows them all",
                )
    without = [stage for stage, (_, count) in counts.items() if not count]
    needing = set(schedule.stage[np.isin(schedule.kind, [int(Kind.B), int(Kind.W)])].tolist())
    for stage in without:
        if stage in needing:
            raise ScheduleError(f"other stages list updates and stage {stage} lists none; list {stage}U0, or leave all of them out")


def _check_reductions(schedule: Schedule) -> None:
    """REDUCE_GRAD: once per update on a device that lists the stage."""
    if not schedule.has(Kind.REDUCE_GRAD):
        return
    rows = np.flatnonzero(schedule.kind == int(Kind.REDUCE_GRAD))
    places: dict[tuple[int, int, int], int] = {}
    for row in rows.tolist():
        place = (int(schedule.device[row]), int(schedule.stage[row]), int(schedule.microbatch[row]))
        if place in places:
            _fail(schedule, row, f"{schedule.op(row)} is listed twice, first at {schedule.where(places[place])}; it stands once per update")
        places[place] = row


def _check_communication(schedule: Schedule) -> None:
    """If any SEND or RECV is listed, every edge between devices has both its ends, each once and in its place."""
    kinds = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
    if not schedule.has(*kinds):
        return
    ends = np.flatnonzero(np.isin(schedule.kind, [int(kind) for kind in kinds]))
    listed: dict[tuple[int, int, int], int] = {}
    for row in ends.tolist():
        key = (int(schedule.kind[row]), int(schedule.stage[row]), int(schedule.microbatch[row]))
        if key in listed:
            _fail(schedule, row, f"{schedule.op(row)} is listed twice, first at {schedule.where(listed[key])}")
        listed[key] = row
    needed: set[tuple[int, int, int]] = set()
    found = messages(schedule)
    rows = zip(found.source.tolist(), found.target.tolist(), found.gradient.tolist(), strict=True)
    for source, target, gradient in rows:
        for own, kind in ((source, Kind.SEND_B if gradient else Kind.SEND_F), (target, Kind.RECV_B if gradient else Kind.RECV_F)):
            key = (int(kind), int(schedule.stage[own]), int(schedule.microbatch[own]))
            needed.add(key)
            end = listed.get(key)
            text = f"{key[1]}{kind.name}{key[2]}"
            if end is None:
                _fail(
                    schedule,
                    own,
                    f"{text} is missing: {schedule.op(source)} -> {schedule.op(target)} crosses devices, and other SEND or RECV ops are listed",
                )
            if schedule.device[end] != schedule.device[own]:
                _fail(schedule, end, f"{text} belongs to device {int(schedule.device[own])}, where {schedule.op(own)} is")
            if (end < own) if own == source else (end > own):
                _fail(schedule, end, f"{text} stands {'before' if own == source else 'after'} {schedule.op(own)}")
    for key, row in listed.items():
        if key not in needed:
            _fail(schedule, row, f"{schedule.op(row)} has no counterpart: no edge between two devices needs it")


def _check_offloads(schedule: Schedule) -> None:
    """An OFFLOAD follows its F; its RELOAD follows it and stands before the backward."""
    places: dict[tuple[int, int], dict[Kind, int]] = {}
    for kind in (Kind.OFFLOAD, Kind.RELOAD):
        for row in np.flatnonzero(schedule.kind == int(kind)).tolist() if schedule.has(kind) else ():
            where = places.setdefault((int(schedule.stage[row]), int(schedule.microbatch[row])), {})
            if kind in where:
                _fail(schedule, row, f"{schedule.op(row)} is listed twice")
            where[kind] = row
    for (stage, microbatch), rows in places.items():
        if stage >= schedule.num_stages or microbatch >= schedule.num_microbatches:
            _fail(schedule, next(iter(rows.values())), "there is no such activation")
        for kind, other in ((Kind.OFFLOAD, Kind.RELOAD), (Kind.RELOAD, Kind.OFFLOAD)):
            if kind not in rows:
                _fail(schedule, rows[other], f"{stage}{kind.name}{microbatch} is missing: an activation goes out and comes back once")
        chain = [
            int(schedule.rows_of(Kind.F)[stage, microbatch]),
            rows[Kind.OFFLOAD],
            rows[Kind.RELOAD],
            int(schedule.backward_rows[stage, microbatch]),
        ]
        if any(int(schedule.device[row]) != int(schedule.device[chain[0]]) for row in rows.values()):
            _fail(schedule, rows[Kind.OFFLOAD], f"the activation of {stage}F{microbatch} is on device {int(schedule.device[chain[0]])}")
        if chain[3] < 0 or chain != sorted(chain):
            _fail(schedule, rows[Kind.OFFLOAD], f"the order must be {stage}F{microbatch}, OFFLOAD, RELOAD, backward")
        again = int(schedule.rows_of(Kind.R)[stage, microbatch])
        if rows[Kind.OFFLOAD] < again < rows[Kind.RELOAD]:
            _fail(schedule, again, "recomputes from an activation that is offloaded here")
    for device, partner in schedule.offload_to.items():
        if not 0 <= device < schedule.num_devices or (partner is not None and not 0 <= partner < schedule.num_devices) or device == partner:
            raise ScheduleError(
                f"device {device} offloads to {partner}; right is another of the devices 0..{schedule.num_devices - 1}, or None for the host"
            )
