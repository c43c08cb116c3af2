"""One schedule under many vectors of durations at once: jitter, stragglers, sensitivity."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.cluster import Cluster, Unit
from pipesim.costs import CostModel, UniformCosts
from pipesim.engine import Engine, at_speed, checked_durations, choose, compiled, linked_cluster, refuse, run, with_timed_updates
from pipesim.engine.collecting import collective_times
from pipesim.engine.kernels import Figures
from pipesim.engine.program import Program
from pipesim.errors import ScheduleError, require_count
from pipesim.memory import Footprint, moves
from pipesim.metrics import first_stage_updates
from pipesim.schedule import Schedule

__all__ = ["Evaluations", "simulate_many"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Evaluations:
    """Figures of n runs of one step, as columns; definitions as in :mod:`pipesim.metrics`.

    Attributes:
        schedule: What ran, with the updates that take time.
        unit: ``"s"`` or ``"slot"``.
        makespan: (n,) last end - first start, compute and collectives.
        iteration_time: (n,) with the barrier the makespan, without it the largest span, compute and collectives; per update for an
            asynchronous run.
        bubble_fraction: (n,) 1 - sum of busy / (devices x makespan).
        bubble_overhead: (n,) (makespan - ideal) / ideal, ideal = the busiest device's busy time.
        span_bubble_rate: (n,) (largest span - ideal) / largest span, span = last end - first start on one device.
        busy: (n, devices) time in slots.
        first_start: (n, devices) start of each device's first slot; 0 for a device without slots.
        last_end: (n, devices) end of its last slot.
        start: (n, slots) start of every slot; (0, 0) unless asked for.
        end: (n, slots) its end; (0, 0) unless asked for.
    """

    schedule: Schedule
    unit: Unit
    makespan: Floats
    iteration_time: Floats
    bubble_fraction: Floats
    bubble_overhead: Floats
    span_bubble_rate: Floats
    busy: Floats
    first_start: Floats
    last_end: Floats
    start: Floats = field(repr=False)
    end: Floats = field(repr=False)

    def __len__(self) -> int:
        return len(self.busy)

    def __repr__(self) -> str:
        return f"<{len(self)} evaluations of {self.schedule.name!r}: makespan {self.makespan.min():.6g} to {self.makespan.max():.6g}>"


def simulate_many(
    schedule: Schedule,
    costs: CostModel | None = None,
    n: int | None = None,
    *,
    durations: ArrayLike | None = None,
    cluster: Cluster | None = None,
    barrier: bool = True,
    keep_times: bool = False,
    engine: Engine = "auto",
) -> Evaluations:
    """Runs one step of a schedule under n vectors of durations; the same times as n calls of ``simulate``, bit for bit.

    Args:
        schedule: What to run.
        costs: Bytes of messages, the unit, and durations where *durations* does not give them; F = I = W = 1 by default.
        n: How many runs; *costs* is asked for durations n times, so this is for a model that draws them.
        durations: (n, slots) durations on devices of speed 1. Updates that a flush schedule leaves out take no time then;
            to time them, list them with ``schedule.with_updates()``.
        cluster: Speeds and links, as for ``simulate``.
        barrier: As for ``simulate``.
        keep_times: Whether to return start and end of every slot.
        engine: As for ``simulate``; without numba every run is one of SimPy.

    Returns:
        The figures of all runs, as columns.

    Raises:
        ScheduleError: The input is wrong.
        DeadlockError: The schedule cannot finish.

    Examples:
        >>> import numpy as np
        >>> from pipesim import UniformCosts, generate, simulate_many
        >>> schedule = generate("1f1b", devices=4, microbatches=8)
        >>> slow = UniformCosts(forward=1, backward=2).durations(schedule) * np.array([[1], [1.5]])
        >>> simulate_many(schedule, durations=slow).makespan.tolist()
        [33.0, 49.5]
    """
    schedule.check()
    costs = UniformCosts() if costs is None else costs
    cluster = linked_cluster(costs, cluster, schedule)
    refuse(schedule, 1)
    if durations is None:
        schedule, table = with_timed_updates(schedule, costs, 1 if n is None else require_count("n", n))
    else:
        table = checked_durations(durations, schedule, "durations")
        if n not in (None, len(table)):
            raise ScheduleError(f"n is {n} and durations has {len(table)} rows; leave n out")
    if not len(table):
        raise ScheduleError("durations has no row; give one per run")
    table = at_speed(table, schedule, cluster)
    footprint = Footprint.of(schedule, costs)
    moved = moves(schedule)
    sizes = footprint.kept[moved.stage, moved.microbatch]
    program = Program(schedule, table[0], footprint.message, cluster, 1, barrier, sizes, collective_times(costs, schedule, cluster))
    engine = choose(program, engine, len(table))
    updates = first_stage_updates(schedule) if schedule.weights != "flush" else np.zeros(0, np.int64)
    watched = updates[[0, -1]].astype(np.int32) if len(updates) > 1 else np.zeros(0, np.int32)
    found = Figures.empty(len(table), schedule.num_devices, schedule.num_slots, watched, keep_times)
    if engine == "compiled" and not compiled.has_shared_queues(program):
        compiled.run_many(program, table, found)
        since, until = found.first_start, found.last_end
    else:
        since, until = _one_by_one(program, table, found, engine)
    return _evaluations(program, costs.unit, found, len(updates) - 1, since, until)


def _evaluations(program: Program, unit: Unit, found: Figures, intervals: int, since: Floats, until: Floats) -> Evaluations:
    """The figures that follow from the others, and from (n, devices) times between which each device or its collectives run."""
    schedule, used = program.schedule, program.used_devices
    makespan = until[:, used].max(axis=1) - since[:, used].min(axis=1)
    span, ideal = (found.last_end - found.first_start).max(axis=1), found.busy.max(axis=1)
    if intervals > 0:
        iteration_time = (found.watched_end[:, 1] - found.watched_end[:, 0]) / intervals
    else:
        iteration_time = makespan if program.barrier or intervals == 0 else (until - since).max(axis=1)
    total = schedule.num_devices * makespan
    return Evaluations(
        *(schedule, unit, makespan, iteration_time),
        *(_ratios(total - found.busy.sum(axis=1), total), _ratios(makespan - ideal, ideal), _ratios(span - ideal, span)),
        *(found.busy, found.first_start, found.last_end, found.start, found.end),
    )


def _ratios(part: Floats, whole: Floats) -> Floats:
    """The quotients; 0 where it is the dust of float sums, or nothing takes time."""
    there = np.abs(part) >= 1e-12 * whole
    return np.divide(part, whole, out=np.zeros_like(part), where=there & (whole > 0))


def _one_by_one(program: Program, table: Floats, found: Figures, engine: Engine) -> tuple[Floats, Floats]:
    """Each run for itself: on SimPy, or where the order of a queue depends on the durations.

    Returns:
        (n, devices) times between which each device or its collectives run.
    """
    from pipesim.engine.listed import run_listed

    traffic = None if program.beyond_plain is None else program.plan.traffic
    begins, ends = [], []
    bounds, used, device = program.schedule.device_slots, program.used_devices, program.schedule.slot_device
    for number, durations in enumerate(table):
        one = program.with_durations(durations)
        if traffic is None:
            times = run(one, engine)
        else:
            times, began, done = run_listed(one)
            begins.append(began[0, traffic.collective])
            ends.append(done[0, traffic.collective])
        start, end = times[0][0], times[1][0]
        found.first_start[number, used], found.last_end[number, used] = start[bounds[used]], end[bounds[used + 1] - 1]
        found.busy[number] = np.bincount(device, weights=end - start, minlength=len(bounds) - 1)
        found.watched_end[number] = end[found.watched]
        if len(found.start):
            found.start[number], found.end[number] = start, end
    if traffic is None:
        return found.first_start, found.last_end
    since, until = found.first_start.copy(), found.last_end.copy()
    own = traffic.device[traffic.collective]
    for number, (begin, finish) in enumerate(zip(begins, ends, strict=True)):
        np.minimum.at(since[number], own, begin)
        np.maximum.at(until[number], own, finish)
    return since, until
