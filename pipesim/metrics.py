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

from pipesim.dataflow import first_updates, messages
from pipesim.memory import activation_levels, peak_levels
from pipesim.op import Kind
from pipesim.schedule import remembered

if TYPE_CHECKING:
    from pipesim.schedule import Schedule
    from pipesim.timeline import Timeline

__all__ = [
    "DEFINITIONS",
    "IDLE_CAUSES",
    "bubble_fraction",
    "bubble_overhead",
    "busy",
    "first_stage_updates",
    "idle_causes",
    "iteration_time",
    "makespan",
    "peak_activations",
    "span_bubble_rate",
]

Floats = NDArray[np.float64]

DEFINITIONS: dict[str, str] = {
    "makespan": "last end - first start",
    "iteration_time": "steady-state time per step (per update, for an asynchronous run)",
    "busy": "time in compute slots, per device",
    "bubble_fraction": "1 - sum of busy / (devices x makespan)",
    "bubble_overhead": "(makespan - ideal) / ideal, ideal = busy of the busiest device (Megatron's t_pb/t_id)",
    "span_bubble_rate": "(largest span - ideal) / largest span, span = last end - first start on one device (zero-bubble papers)",
    "idle_causes": "idle time of each device by cause; the causes add up to it",
    "peak_memory": "the most bytes (or units) that a device holds at once",
    "peak_activations": "the most stage activations alive at once, released when the backward (or W) ends; blind to recomputation and offloading",
    "peak_activations_i": "the same, released when I ends",
    "peak_activation_share": "peak_activations / stages on the device (the papers' M_a)",
}

IDLE_CAUSES = ("warm-up", "waiting for a peer", "waiting for the link", "gradient reduction", "barrier", "drain")


def makespan(timeline: Timeline) -> float:
    """Last end minus first start."""
    return float(timeline.last_end - timeline.first_start)


@remembered
def busy(timeline: Timeline) -> Floats:
    """(devices,) time in compute slots, all steps together."""
    time = timeline.end - timeline.start
    time = time[0] if timeline.steps == 1 else time.sum(axis=0)
    result = np.bincount(timeline.schedule.slot_device, weights=time, minlength=timeline.schedule.num_devices).astype(np.float64)
    result.setflags(write=False)  # it is shared
    return result


def _spans(timeline: Timeline, step: int) -> Floats:
    """(devices,) last end minus first start on each device, 0 where it has no slot."""
    bounds = timeline.schedule.device_slots
    used = np.flatnonzero(np.diff(bounds))
    spans = np.zeros(timeline.schedule.num_devices)
    spans[used] = timeline.end[step, bounds[used + 1] - 1] - timeline.start[step, bounds[used]]
    return spans


def iteration_time(timeline: Timeline) -> float:
    """Steady-state time per step.

    With the barrier the makespan of one step, without it the largest span of one device, both of the last step. For an
    asynchronous run the mean time between two updates of stage 0 (the makespan where there is but one).
    """
    if timeline.schedule.weights != "flush" and timeline.schedule.has(Kind.U):
        own = first_stage_updates(timeline.schedule)
        if len(own) > 1:
            return float((timeline.end[0, own[-1]] - timeline.end[0, own[0]]) / (len(own) - 1))
        return makespan(timeline)
    last = timeline.steps - 1
    if timeline.barrier:
        return float(timeline.end[last].max() - timeline.start[last].min())
    return float(_spans(timeline, last).max())


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
    return peak_levels(schedule, *activation_levels(schedule, 1.0, 0.0, 0.0)).round().astype(np.int64)


@remembered
def _peaks_with_input_grad(schedule: Schedule) -> NDArray[np.int64]:
    return peak_levels(schedule, *activation_levels(schedule, 1.0, 1.0, 0.0)).round().astype(np.int64)


def idle_causes(timeline: Timeline) -> list[dict[str, float]]:
    """Per device, idle time by cause; the causes of a device add up to makespan - busy.

    ``warm-up`` is before the device's first slot, ``drain`` after its last. Every other gap is split at the end of the
    producer of the message that came last: before it the device was waiting for a peer, after it for the link (queueing
    included). Waiting for the other replicas of a stage is ``gradient reduction``, waiting for all devices ``barrier``.
    With a barrier, warm-up and drain are counted in every step.
    """
    schedule, steps = timeline.schedule, timeline.steps
    warm_up, peer, link, reduction, barrier, drain = range(len(IDLE_CAUSES))
    totals = np.zeros((schedule.num_devices, len(IDLE_CAUSES)))
    produced = _last_inputs_produced(timeline)
    used = np.flatnonzero(np.diff(schedule.device_slots))
    first, last = schedule.device_slots[used], schedule.device_slots[used + 1] - 1
    gates = first_updates(schedule) if timeline.barrier else np.full(schedule.num_devices, -1)
    gated = np.flatnonzero(gates >= 0)
    # (slots,) what a wait is for, but for the link
    cause = np.full(schedule.num_slots, peer, np.int8)
    if schedule.has(Kind.U):
        cause[schedule.kind[schedule.slot_row] == int(Kind.U)] = reduction
    begins = first[cause[first] != reduction]
    cause[gates[gated]] = barrier
    place = schedule.slot_device * len(IDLE_CAUSES)
    previous_end = np.full(schedule.num_devices, timeline.first_start)
    for step in range(steps):
        start, end = timeline.start[step], timeline.end[step]
        before = np.empty_like(start)
        before[1:] = end[:-1]
        before[first] = previous_end[used]
        gap = start - before
        # the part of the gap after the last input was produced is the link's
        on_link = np.clip(start - np.maximum(produced[step], before), 0.0, gap)
        causes = cause
        if step == 0 or timeline.barrier:
            causes = cause.copy()
            causes[begins], on_link[begins] = warm_up, 0.0
        totals[:, link] += np.bincount(schedule.slot_device, on_link, schedule.num_devices)
        totals += np.bincount(place + causes, gap - on_link, totals.size).reshape(totals.shape)
        previous_end[used] = end[last]
        if timeline.barrier:
            # Devices without an update wait at the end of their stream, for the last one to come there: their drain.
            # In the last step this is the whole rest, below.
            ends = previous_end.copy()
            for device in gated.tolist():
                slot = int(gates[device])
                ends[device] = end[slot - 1] if slot > schedule.device_slots[device] else timeline.first_start
            if step + 1 < steps:
                alone = gates < 0
                totals[alone, drain] += float(ends.max()) - previous_end[alone]
                previous_end[alone] = float(ends.max())
    totals[:, drain] += timeline.last_end - previous_end
    return [dict(zip(IDLE_CAUSES, row.tolist(), strict=True)) for row in totals]


def _last_inputs_produced(timeline: Timeline) -> Floats:
    """(steps, slots) when the input that came last to each slot was produced; infinite for a slot without inputs from elsewhere.

    For a message that is the end of its producer. A RELOAD has none: waiting for it is all the link's.
    """
    found, moves, schedule = timeline.messages, timeline.moves, timeline.schedule
    result = np.full((timeline.steps, schedule.num_slots), np.inf)
    target = found.target_slot
    reload = np.flatnonzero(~moves.out)
    if _one_message_at_most(schedule) and not len(reload):
        result[:, target] = timeline.sent
        return result
    waiting = schedule.row_slot[schedule.backward_rows[moves.stage[reload], moves.microbatch[reload]]]
    for step in range(timeline.steps):
        came = np.full(schedule.num_slots, -np.inf)
        np.maximum.at(came, target, timeline.arrived[step])
        # of those that tie, the first is written last
        last = np.flatnonzero(timeline.arrived[step] == came[target])[::-1]
        result[step, target[last]] = timeline.sent[step, last]
        result[step, waiting[timeline.offload_end[step, reload] >= came[waiting]]] = -np.inf
    return result


@remembered
def _one_message_at_most(schedule: Schedule) -> bool:
    """Whether no slot waits for two messages."""
    return int(np.bincount(messages(schedule).target_slot).max(initial=0)) <= 1
