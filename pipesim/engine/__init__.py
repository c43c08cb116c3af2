"""Running a schedule: :func:`simulate`; many times at once: :func:`pipesim.engine.batch.simulate_many`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.cluster import Cluster, Link
from pipesim.communication import Communication
from pipesim.costs import CostModel, UniformCosts
from pipesim.costs.model import all_zero
from pipesim.engine.collecting import collective_times
from pipesim.engine.program import Program, Times
from pipesim.errors import LARGEST, ScheduleError, did_you_mean, require_count
from pipesim.memory import Footprint, moves
from pipesim.network import Links
from pipesim.op import Kind
from pipesim.schedule import Schedule
from pipesim.timeline import Timeline

__all__ = ["ENGINES", "Engine", "simulate"]

Engine = Literal["auto", "simpy", "compiled"]
ENGINES = ("auto", "simpy", "compiled")

# Under "auto", what one process leaves to SimPy in all its runs, in slots, before it takes the compiled engine: importing
# numba and loading compiled code takes about as long as SimPy takes for these.
PATIENCE = 150_000
_left_to_simpy = 0


def simulate(
    schedule: Schedule,
    costs: CostModel | None = None,
    *,
    cluster: Cluster | None = None,
    steps: int = 1,
    barrier: bool = True,
    engine: Engine = "auto",
    communication: Communication | None = None,
) -> Timeline:
    """Runs a schedule and returns its timeline.

    Every device works through its stream strictly in order; an op starts when the device is free and all its inputs have
    arrived. A message leaves when its producer ends, and ``arrival = (max(sent, link free) + bytes / bandwidth) + latency``.
    OFFLOAD and RELOAD are issued when the device reaches them and run beside its ops, in order, over the same links; so are SEND
    and RECV where the schedule lists them, and collectives where it lists them or the costs give them time.

    Args:
        schedule: What to run; it is checked first.
        costs: Durations and bytes; F = I = W = 1 slot by default.
        cluster: Speeds, capacities and links; by default free links, or those that the costs name.
        steps: How often to run a flush schedule.
        barrier: Whether all devices wait for each other before the optimizer, as frameworks do for the global norm.
        engine: ``"simpy"``, the reference; ``"compiled"``, a hundred times as fast, which needs numba (``pipesim[fast]``);
            ``"auto"`` takes the compiled one where it is installed, covers the run, and is loaded already or pays: once a
            process has more than 150,000 slots to run in all. Both give the same times, bit for bit.
        communication: How devices communicate; by default as the cluster says, which is eager and overlapped.

    Returns:
        The run, ``source="simulated"``. The same input gives the same run, bit for bit.

    Raises:
        ScheduleError: The input is wrong.
        DeadlockError: The schedule cannot finish; the text says which op every device is stuck at.

    Examples:
        >>> from pipesim import generate
        >>> simulate(generate("gpipe", devices=4, microbatches=8), UniformCosts(forward=1, backward=2)).makespan
        33.0
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"simulate wants a Schedule, got {schedule!r:.80}; generate(name, devices, microbatches) makes one")
    schedule.check()
    steps = require_count("steps", steps)
    costs = UniformCosts() if costs is None else costs
    cluster = linked_cluster(costs, cluster, schedule)
    if communication is not None:
        cluster = replace(cluster, communication=communication)
    refuse(schedule, steps)
    schedule, (durations,) = with_timed_updates(schedule, costs)
    durations = at_speed(durations, schedule, cluster)
    footprint = Footprint.of(schedule, costs)
    moved = moves(schedule)
    sizes = footprint.kept[moved.stage, moved.microbatch]
    program = Program(schedule, durations, footprint.message, cluster, steps, barrier, sizes, collective_times(costs, schedule, cluster))
    engine = choose(program, engine)
    traffic: dict[str, Any] = {}
    if program.beyond_plain is None:
        start, end, *travel = run(program, engine)
    else:
        from pipesim.engine.listed import run_listed

        (start, end, *travel), began, done = run_listed(program)
        traffic = {"traffic": program.plan.traffic, "traffic_start": began, "traffic_end": done, "blocking": cluster.communication.blocking}
    count = len(program.messages)
    sent, departed, arrived = (column[:, :count] for column in travel)
    _, offload_start, offload_end = (column[:, count:] for column in travel)
    info = {"engine": engine, "costs": getattr(costs, "name", type(costs).__name__), "cluster": cluster.name}
    capacity = cluster.capacities(schedule.num_devices)
    # an asynchronous run is one long run: its updates wait for no barrier
    return Timeline(
        schedule,
        *(start, end, sent, departed, arrived),
        footprint,
        capacity,
        costs.unit,
        program.barrier,
        "simulated",
        info,
        offload_start,
        offload_end,
        links=Links.of(cluster, program.pairs),
        **traffic,
    )


def choose(program: Program, engine: Engine, runs: int = 1) -> Engine:
    """Returns the engine that is to make *runs* such runs: what is asked for, never ``auto``."""
    global _left_to_simpy
    if engine not in ENGINES:
        raise ScheduleError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}{did_you_mean(str(engine), ENGINES)}")
    if engine == "simpy":
        return "simpy"
    from pipesim.engine import compiled

    if engine == "compiled":
        compiled.refuse_uncovered(program)
        return "compiled"
    if not compiled.is_loaded():
        _left_to_simpy += program.schedule.num_slots * program.steps * runs
        if _left_to_simpy <= PATIENCE or not compiled.installed():
            return "simpy"
    return "compiled" if compiled.uncovered(program) is None else "simpy"


def run(program: Program, engine: Engine) -> Times:
    """Runs a program on the engine that :func:`choose` returned."""
    if engine == "compiled":
        from pipesim.engine import compiled

        return compiled.run(program)
    if program.beyond_plain is not None:
        from pipesim.engine import listed

        return listed.run_listed(program).times
    from pipesim.engine import simpy_engine

    return simpy_engine.run(program)


def linked_cluster(costs: CostModel, cluster: Cluster | None, schedule: Schedule) -> Cluster:
    """The cluster, with the links that the costs name if it has none."""
    latency, bandwidth = getattr(costs, "latency", None), getattr(costs, "bandwidth", None)
    if cluster is None:
        return Cluster.uniform(latency or 0.0, bandwidth, unit=costs.unit)
    if cluster.unit != costs.unit:
        mine, theirs = ("seconds" if unit == "s" else "slots" for unit in (costs.unit, cluster.unit))
        raise ScheduleError(f"the costs are in {mine} and the cluster {cluster.name!r} is in {theirs}; give costs in {theirs}")
    has_links = cluster.inside != Cluster().inside or cluster.between is not None or cluster.links
    for name, value in (("latency", latency), ("bandwidth", bandwidth)):
        if value is not None and has_links:
            raise ScheduleError(f"both the costs and the cluster {cluster.name!r} give the {name} of links; leave one out")
    if not has_links and (latency is not None or bandwidth is not None):
        cluster = replace(cluster, inside=Link(latency or 0.0, bandwidth))
    cluster.check(schedule.num_devices)
    return cluster


def refuse(schedule: Schedule, steps: int) -> None:
    """Raises ScheduleError for what no engine runs."""
    if steps > 1 and schedule.weights != "flush":
        raise ScheduleError(
            f"an asynchronous schedule (weights {schedule.weights!r}) is one long run; generate more microbatches instead of steps = {steps}"
        )


def with_timed_updates(schedule: Schedule, costs: CostModel, runs: int = 1) -> tuple[Schedule, NDArray[np.float64]]:
    """Lists the updates that a flush schedule leaves out, if they take time. Others could only stretch spans to the barrier.

    Returns:
        The schedule, and (runs, slots) durations: the costs are asked *runs* times.
    """
    # of typed costs it is known beforehand, without a longer schedule (a subclass may give other durations)
    full = schedule if type(costs) is UniformCosts and all_zero(np.asarray(costs.optimizer)) else schedule.with_updates()
    drawn = [np.asarray(costs.durations(full)) for _ in range(runs)]
    durations = checked_durations(drawn[0][None] if runs == 1 else drawn, full, f"the cost model {type(costs).__name__}")
    if full is schedule:
        return schedule, durations
    update = full.kind[full.slot_row] == int(Kind.U)
    return (full, durations) if durations[:, update].any() else (schedule, durations[:, ~update])


def at_speed(durations: NDArray[np.float64], schedule: Schedule, cluster: Cluster) -> NDArray[np.float64]:
    """(..., slots) durations on the devices at hand."""
    if cluster.alike and cluster.device.speed == 1:
        return durations
    speeds = cluster.speeds(schedule.num_devices)
    return durations if (speeds == 1).all() else durations / speeds[schedule.slot_device]


def checked_durations(durations: ArrayLike, schedule: Schedule, who: str) -> NDArray[np.float64]:
    """(runs, slots) durations as float64, finite and at least 0, or ScheduleError."""
    table = np.asarray(durations, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] != schedule.num_slots or not (table.min(initial=0) >= 0 and table.max(initial=0) <= LARGEST):
        raise ScheduleError(f"{who} gives durations of shape {table.shape[1:]}; right is ({schedule.num_slots},), finite and at least 0")
    return table
