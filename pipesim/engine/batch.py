"""One schedule under many vectors of durations at once: jitter, stragglers, sensitivity."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.cluster import Cluster, Unit
from pipesim.costs import CostModel, UniformCosts
from pipesim.engine import Engine, check_engine, choose, linked_cluster, refuse, run, with_timed_updates
from pipesim.engine.program import Program
from pipesim.errors import ScheduleError, require_count
from pipesim.memory import Footprint, moves
from pipesim.metrics import updates_between
from pipesim.schedule import Schedule

__all__ = ["Evaluations", "simulate_many"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Evaluations:
    """Figures of n runs of one step, as columns; definitions as in :mod:`pipesim.metrics`.

    Attributes:
        schedule: What ran, with the updates that take time.
        first_start: (n, devices) when the first slot of each device started; 0 for a device without slots.
        last_end: (n, devices) when its last slot ended.
        busy: (n, devices) its time in slots.
        iteration_time: (n,)
        unit: ``"s"`` or ``"slot"``.
        start: (n, slots) start of every slot, if asked for.
        end: (n, slots) its end.
    """

    schedule: Schedule
    first_start: Floats
    last_end: Floats
    busy: Floats
    iteration_time: Floats
    unit: Unit
    start: Floats | None = None
    end: Floats | None = None

    def __len__(self) -> int:
        return len(self.busy)

    @cached_property
    def makespan(self) -> Floats:
        """(n,) last end - first start."""
        used = self._used
        return np.asarray(self.last_end[:, used].max(axis=1) - self.first_start[:, used].min(axis=1))

    @cached_property
    def bubble_fraction(self) -> Floats:
        """(n,) 1 - sum of busy / (devices x makespan)."""
        total = self.schedule.num_devices * self.makespan
        return _ratios(total - self.busy.sum(axis=1), total)

    @cached_property
    def bubble_overhead(self) -> Floats:
        """(n,) (makespan - ideal) / ideal, ideal = the busiest device's busy time."""
        ideal = self.busy.max(axis=1)
        return _ratios(self.makespan - ideal, ideal)

    @cached_property
    def span_bubble_rate(self) -> Floats:
        """(n,) (largest span - ideal) / largest span, span = last end - first start on one device."""
        largest = (self.last_end - self.first_start).max(axis=1)
        return _ratios(largest - self.busy.max(axis=1), largest)

    @property
    def _used(self) -> NDArray[np.int64]:
        return np.flatnonzero(np.diff(self.schedule.device_slots))


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
    table = table / cluster.speeds(schedule.num_devices)[schedule.slot_device]
    footprint = Footprint.of(schedule, costs)
    moved = moves(schedule)
    program = Program(schedule, table[0], footprint.message, cluster, 1, barrier, footprint.kept[moved.stage, moved.microbatch])
    engine = choose(program, engine, len(table))
    updates = first_stage_updates(schedule)
    watched = updates[[0, -1]] if schedule.weights != "flush" and len(updates) > 1 else updates[:0]
    evaluate = _together if engine == "compiled" and not compiled.has_shared_queues(program) else partial(_one_by_one, engine=engine)
    shape = (len(table), schedule.num_devices)
    first_start, last_end, busy = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    starts, ends = (np.empty(table.shape if keep_times else (0, 0)) for _ in range(2))
    watched_end = np.empty((len(table), len(watched)))
    evaluate(program, table, watched, first_start, last_end, busy, watched_end, starts, ends)
    makespan = ...
    return Evaluations()


def _one_by_one(program: Program, table: Floats, watched, ..., engine: Engine) -> None:
    """Each run for itself."""
    bounds, used, device = program.schedule.device_slots, program.used_devices, program.schedule.slot_device
    for number, durations in enumerate(table):
        start, end = (column[0] for column in run(program.with_durations(durations), engine)[:2])
        first_start[number, used], last_end[number, used] = start[bounds[used]], end[bounds[used + 1] - 1]
        busy[number] = np.bincount(device, weights=end - start, minlength=busy.shape[1])
        watched_end[number] = end[watched]
        if len(starts):
            starts[number], ends[number] = start, end
