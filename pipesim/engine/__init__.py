"""Running a schedule: :func:`simulate`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from pipesim.cluster import Cluster, Link
from pipesim.costs import CostModel, UniformCosts
from pipesim.engine.program import Program
from pipesim.errors import ScheduleError, did_you_mean, require_count
from pipesim.memory import Footprint, moves
from pipesim.op import Kind
from pipesim.schedule import Schedule
from pipesim.timeline import Timeline

__all__ = ["ENGINES", "simulate"]

ENGINES = ("auto", "simpy")


def simulate(
    schedule: Schedule,
    costs: CostModel | None = None,
    *,
    cluster: Cluster | None = None,
    steps: int = 1,
    barrier: bool = True,
    engine: Literal["auto", "simpy"] = "auto",
) -> Timeline:
    """Runs a schedule and returns its timeline.

    Every device works through its stream strictly in order; an op starts when the device is free and all its inputs have
    arrived. A message leaves when its producer ends, and ``arrival = (max(sent, link free) + bytes / bandwidth) + latency``.
    OFFLOAD and RELOAD are issued when the device reaches them and run beside its ops, in order, over the same links.

    Args:
        schedule: What to run; it is checked first.
        costs: Durations and bytes; F = I = W = 1 slot by default.
        cluster: Speeds, capacities and links; by default free links, or those that the costs name.
        steps: How often to run a flush schedule.
        barrier: Whether all devices wait for each other before the optimizer, as frameworks do for the global norm.
        engine: ``"simpy"``, or ``"auto"`` for the fastest that covers the run.

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
    if engine not in ENGINES:
        raise ScheduleError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}{did_you_mean(str(engine), ENGINES)}")
    schedule.check()
    steps = require_count("steps", steps)
    costs = UniformCosts() if costs is None else costs
    cluster = _cluster(costs, cluster, schedule)
    _refuse(schedule, steps)
    schedule, durations = _with_timed_updates(schedule, costs)
    durations = durations / cluster.speeds(schedule.num_devices)[schedule.slot_device]
    footprint = Footprint.of(schedule, costs)
    moved = moves(schedule)
    program = Program(schedule, durations, footprint.message, cluster, steps, barrier, footprint.kept[moved.stage, moved.microbatch])

    from pipesim.engine import simpy_engine

    start, end, *travel = simpy_engine.run(program)
    count = len(program.messages)
    sent, departed, arrived = (column[:, :count] for column in travel)
    _, offload_start, offload_end = (column[:, count:] for column in travel)
    info = {"engine": "simpy", "costs": getattr(costs, "name", type(costs).__name__), "cluster": cluster.name}
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
    )


def _cluster(costs: CostModel, cluster: Cluster | None, schedule: Schedule) -> Cluster:
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


def _refuse(schedule: Schedule, steps: int) -> None:
    if steps > 1 and schedule.weights != "flush":
        raise ScheduleError(
            f"an asynchronous schedule (weights {schedule.weights!r}) is one long run; generate more microbatches instead of steps = {steps}"
        )
    listed = [kind.name for kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B) if schedule.has(kind)]
    if listed:
        raise ScheduleError(
            f"the schedule lists {', '.join(listed)}; messages follow from the data flow here, so run schedule.without_communication() (--drop-communication)"
        )


def _with_timed_updates(schedule: Schedule, costs: CostModel) -> tuple[Schedule, np.ndarray]:
    """Lists the updates that a flush schedule leaves out, if they take time. Others could only stretch spans to the barrier."""
    full = schedule.with_updates()
    durations = np.asarray(costs.durations(full), dtype=np.float64)
    if durations.shape != (full.num_slots,) or not all(map(math.isfinite, (durations.min(), durations.max()))) or durations.min() < 0:
        raise ScheduleError(
            f"the cost model {type(costs).__name__} gives durations of shape {durations.shape}; right is ({full.num_slots},), finite and at least 0"
        )
    if full is schedule:
        return schedule, durations
    update = full.kind[full.slot_row] == int(Kind.U)
    if durations[update].any():
        return full, durations
    return schedule, durations[~update]
