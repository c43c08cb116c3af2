"""Figures of a run. The name says the definition, and every report prints which definition a number is.

The literature has four "bubbles"; three are here, never mixed:

* ``bubble_fraction``: idle part of all devices' time from first start to last end (GPipe, Chimera, Hanayo).
* ``bubble_overhead``: idle time over ideal time, (p - 1)/m for 1F1B, may exceed 1 (Megatron's t_pb / t_id).
* ``span_bubble_rate``: idle part of the longest span of one device (the zero-bubble papers, section 5.3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim import jit, loops
from pipesim.idle import IDLE_CAUSES, idle_causes
from pipesim.memory import peak_activation_bytes
from pipesim.op import Kind
from pipesim.remember import remembered

if TYPE_CHECKING:
    from pipesim.schedule import Schedule
    from pipesim.timeline import Timeline

__all__ = [
    "DEFINITIONS",
    "IDLE_CAUSES",
    "bubble_fraction",
    "bubble_overhead",
    "busy",
    "collective_time",
    "first_stage_updates",
    "idle_causes",
    "iteration_time",
    "iteration_times",
    "makespan",
    "peak_activations",
    "span_bubble_rate",
]

Floats = NDArray[np.float64]

DEFINITIONS: dict[str, str] = {
    "makespan": "last end - first start, compute and collectives",
    "iteration_time": "steady-state time per step (per update, for an asynchronous run)",
    "busy": "time in compute slots, per device",
    "bubble_fraction": "1 - sum of busy / (devices x makespan)",
    "bubble_overhead": "(makespan - ideal) / ideal, ideal = busy of the busiest device (Megatron's t_pb/t_id)",
    "span_bubble_rate": "(largest span - ideal) / largest span, span = last end - first start on one device (zero-bubble papers)",
    "idle_causes": "idle time of each device by cause; the causes add up to it",
    "collective_time": "time in which a collective is under way on the device's own lane",
    "peak_memory": "the most bytes (or units) that a device holds at once",
    "peak_activations": "the most stage activations alive at once, released when the backward (or W) ends; blind to recomputation and offloading",
    "peak_activations_i": "the same, released when I ends",
    "peak_activation_share": "peak_activations / stages on the device (the papers' M_a)",
}


def makespan(timeline: Timeline) -> float:
    """Last end minus first start, compute and collectives."""
    return float(timeline.last_end - timeline.first_start)


@remembered
def busy(timeline: Timeline) -> Floats:
    """(devices,) time in compute slots, all steps together."""
    if jit.is_loaded() and timeline.steps == 1:
        result = np.zeros(timeline.schedule.num_devices)
        times = jit.columns(timeline.start[0], timeline.end[0])
        jit.call(loops.busy, *times, timeline.schedule.device_slots, result)
        result.setflags(write=False)  # it is shared
        return result
    time = timeline.end - timeline.start
    time = time[0] if timeline.steps == 1 else time.sum(axis=0)
    result = np.bincount(timeline.schedule.slot_device, weights=time, minlength=timeline.schedule.num_devices).astype(np.float64)
    result.setflags(write=False)  # it is shared
    return result


def _spans(timeline: Timeline, step: int) -> Floats:
    """(devices,) last end minus first start on each device, 0 where it has no slot."""
    bounds, used = timeline.schedule.device_slots, timeline.schedule.used_devices
    spans = np.zeros(timeline.schedule.num_devices)
    spans[used] = timeline.end[step, bounds[used + 1] - 1] - timeline.start[step, bounds[used]]
    return spans


def collective_time(timeline: Timeline) -> Floats:
    """(devices,) time in which a collective was under way on the device's own lane, all steps together."""
    own = np.flatnonzero(timeline.traffic.collective)
    time = (timeline.traffic_end - timeline.traffic_start)[:, own].sum(axis=0)
    return np.bincount(timeline.traffic.device[own], time, timeline.schedule.num_devices).astype(np.float64)


def iteration_time(timeline: Timeline) -> float:
    """Steady-state time per step.

    With the barrier the makespan of one step, without it the largest span of one device, compute and collectives: of the last
    step, and of a measured run the median over its steps. For an asynchronous run the mean time between two updates of stage 0 (the
    makespan where there is but one), the median over its steps, each of which is a run of its own.
    """
    if timeline.schedule.weights != "flush" and timeline.schedule.has(Kind.U):
        own = first_stage_updates(timeline.schedule)
        if len(own) > 1:
            return float(np.median(timeline.end[:, own[-1]] - timeline.end[:, own[0]]) / (len(own) - 1))
        return float(np.median(iteration_times(timeline)))
    if timeline.barrier and timeline.steps == 1:
        return makespan(timeline)
    times = iteration_times(timeline) if timeline.barrier else [_largest_span(timeline, step) for step in range(timeline.steps)]
    # of a measured run every step is as steady as the last, and some were disturbed
    return float(np.median(times) if timeline.source == "measured" else times[-1])


def iteration_times(timeline: Timeline) -> Floats:
    """(steps,) last end minus first start of each step, compute and collectives.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> iteration_times(simulate(generate("1f1b", 2, 2), UniformCosts(forward=1, backward=2), steps=2)).tolist()
        [9.0, 9.0]
    """
    collective = timeline.traffic.collective
    # without traffic there is one empty row for all steps
    first = np.minimum(timeline.start.min(axis=1), timeline.traffic_start[:, collective].min(axis=1, initial=np.inf))
    last = np.maximum(timeline.end.max(axis=1), timeline.traffic_end[:, collective].max(axis=1, initial=-np.inf))
    return np.asarray(last - first)


def _largest_span(timeline: Timeline, step: int) -> float:
    """The largest span of one device in a step, compute and collectives."""
    collective = timeline.traffic.collective
    # without traffic there is one empty row for all steps
    begin, finish = (times[step : step + 1, collective].ravel() for times in (timeline.traffic_start, timeline.traffic_end))
    if not len(begin):
        return float(_spans(timeline, step).max())
    bounds, used = timeline.schedule.device_slots, timeline.schedule.used_devices
    since, until = np.full(timeline.schedule.num_devices, np.inf), np.full(timeline.schedule.num_devices, -np.inf)
    since[used], until[used] = timeline.start[step, bounds[used]], timeline.end[step, bounds[used + 1] - 1]
    np.minimum.at(since, timeline.traffic.device[collective], begin)
    np.maximum.at(until, timeline.traffic.device[collective], finish)
    return float((until - since).max())


def first_stage_updates(schedule: Schedule) -> NDArray[np.int64]:
    """Slots of the updates of stage 0 on the first device that has any: what an asynchronous run's iterations are counted by."""
    slots = np.flatnonzero((schedule.kind[schedule.slot_row] == int(Kind.U)) & (schedule.stage[schedule.slot_row] == 0))
    return np.asarray(slots[schedule.slot_device[slots] == schedule.slot_device[slots[:1]]])


def bubble_fraction(timeline: Timeline) -> float:
    """1 - sum of busy / (devices · makespan); 0 where nothing takes time."""
    total = timeline.schedule.num_devices * makespan(timeline)
    return _ratio(total - float(busy(timeline).sum()), total)


def bubble_overhead(timeline: Timeline) -> float:
    """(makespan - ideal) / ideal, ideal = the busiest device's busy time."""
    ideal = float(busy(timeline).max())
    return _ratio(makespan(timeline) - ideal, ideal)


def span_bubble_rate(timeline: Timeline) -> float | None:
    """(largest span - ideal) / largest span; None for several steps, for which the papers do not define it."""
    if timeline.steps > 1:
        return None
    largest, ideal = float(_spans(timeline, 0).max()), float(busy(timeline).max())
    return _ratio(largest - ideal, largest)


def _ratio(part: float, whole: float) -> float:
    """The quotient, with the dust of float sums (a bubble of -1e-17) taken for the 0 that it is."""
    if whole <= 0:
        return 0.0
    return 0.0 if abs(part) < 1e-12 * whole else part / whole


def peak_activations(schedule: Schedule, released_by_input_grad: bool = False) -> NDArray[np.int64]:
    """(devices,) the most stage activations alive at once, each counted 1.

    Args:
        schedule: A checked schedule; no run is needed, the stream order says it.
        released_by_input_grad: Release when I ends instead of W.

    Examples:
        >>> from pipesim import generate
        >>> peak_activations(generate("1f1b", devices=4, microbatches=8)).tolist()
        [4, 3, 2, 1]
    """
    return _peaks_with_input_grad(schedule) if released_by_input_grad and schedule.has(Kind.I) else _peaks(schedule)


@remembered
def _peaks(schedule: Schedule) -> NDArray[np.int64]:
    return peak_activation_bytes(schedule, 1.0, 0.0, 0.0).round().astype(np.int64)


@remembered
def _peaks_with_input_grad(schedule: Schedule) -> NDArray[np.int64]:
    return peak_activation_bytes(schedule, 1.0, 1.0, 0.0).round().astype(np.int64)
