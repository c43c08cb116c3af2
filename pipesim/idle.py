"""Why devices are idle: every gap of every compute lane, by its cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim import jit, loops
from pipesim.dataflow import first_updates, messages
from pipesim.op import Kind
from pipesim.remember import remembered

if TYPE_CHECKING:
    from pipesim.schedule import Schedule
    from pipesim.timeline import Timeline

__all__ = ["IDLE_CAUSES", "idle_causes"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

IDLE_CAUSES = ("warm-up", "waiting for a peer", "waiting for the link", "waiting for weights", "gradient reduction", "barrier", "drain")
_WARM_UP, _PEER, _LINK, _WEIGHTS, _REDUCTION, _BARRIER, _DRAIN = range(len(IDLE_CAUSES))


def idle_causes(timeline: Timeline) -> list[dict[str, float]]:
    """Per device, idle time by cause; the causes of a device add up to makespan - busy.

    ``warm-up`` is before the device's first slot, ``drain`` after its last. Every other gap is split at the end of the
    producer of the message that came last: before it the device was waiting for a peer, after it for the link (queueing
    included). Where blocking communication held the lane, what the link needed is the link's, and waiting for the other end a peer's.
    A gap that ends with an UNSHARD was ``waiting for weights``.

    Waiting for a stage's gradients, its own or its replicas', before an update or after the last slot, is ``gradient reduction``;
    what is left before an update, waiting for all devices, is the ``barrier``. With a barrier, warm-up and drain are counted
    in every step.
    """
    schedule, steps = timeline.schedule, timeline.steps
    totals = np.zeros((schedule.num_devices, len(IDLE_CAUSES)))
    if jit.is_loaded() and steps == 1 and not (schedule.has(Kind.U) or len(timeline.moves) or len(timeline.traffic)):
        times = jit.columns(timeline.start[0], timeline.end[0], timeline.sent[0], timeline.arrived[0])
        about = timeline.messages.target_slot, schedule.device_slots, timeline.first_start, timeline.last_end
        jit.call(loops.idle, *times, *about, np.array([_WARM_UP, _PEER, _LINK, _DRAIN]), totals)
        return [dict(zip(IDLE_CAUSES, row, strict=True)) for row in totals.tolist()]
    produced = _last_inputs_produced(timeline)
    used = np.flatnonzero(np.diff(schedule.device_slots))
    first, last = schedule.device_slots[used], schedule.device_slots[used + 1] - 1
    gates = first_updates(schedule) if timeline.barrier else np.full(schedule.num_devices, -1)
    gated = np.flatnonzero(gates >= 0)
    # (slots,) what a wait is for, but for the link
    cause = np.full(schedule.num_slots, _PEER, np.int8)
    updates = np.zeros(0, np.int64)
    if schedule.has(Kind.U):
        updates = np.flatnonzero(schedule.kind[schedule.slot_row] == int(Kind.U))
        cause[updates] = _REDUCTION
    begins = first[cause[first] != _REDUCTION]
    cause[gates[gated]] = _BARRIER
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
        fresh = step == 0 or timeline.barrier
        if fresh or len(timeline.traffic):
            causes = cause.copy()
        held_after = _of_traffic(timeline, step, before, start, on_link, causes)
        if fresh:
            causes[begins], on_link[begins] = _WARM_UP, 0.0
        if len(updates) and len(timeline.traffic):
            # the gradients first, then the barrier
            reduced = _reduced_until(timeline, step, updates, start, before)
            waited = np.minimum(reduced - before[updates], (gap - on_link)[updates])
            totals[:, _REDUCTION] += np.bincount(schedule.slot_device[updates], waited, schedule.num_devices)
            gap[updates] -= waited
        totals[:, _LINK] += np.bincount(schedule.slot_device, on_link, schedule.num_devices)
        totals += np.bincount(place + causes, gap - on_link, totals.size).reshape(totals.shape)
        previous_end[used] = end[last]
        following = np.full(schedule.num_devices, timeline.last_end)  # when each device goes on
        if step + 1 < steps:
            following[used] = timeline.start[step + 1][first]
        if held_after is not None:
            totals[:, _LINK] += held_after
            previous_end += held_after
        reduced_at = _last_reductions(timeline, step)
        if reduced_at is not None:
            # after its last slot a device waits for its own reductions first
            until = np.clip(reduced_at, previous_end, np.maximum(following, previous_end))
            totals[:, _REDUCTION] += until - previous_end
            previous_end = until
        if timeline.barrier:
            # Devices without an update wait at the end of their stream, for the last one to come there: their drain.
            # In the last step this is the whole rest, below.
            ends = previous_end.copy()
            for device in gated.tolist():
                slot = int(gates[device])
                ends[device] = end[slot - 1] if slot > schedule.device_slots[device] else timeline.first_start
                if reduced_at is not None:
                    ends[device] = max(ends[device], min(reduced_at[device], start[slot]))
            if step + 1 < steps:
                alone = gates < 0
                meeting = np.maximum(np.minimum(float(ends.max()), following), previous_end)
                totals[alone, _DRAIN] += (meeting - previous_end)[alone]
                previous_end[alone] = meeting[alone]
    totals[:, _DRAIN] += timeline.last_end - previous_end
    return [dict(zip(IDLE_CAUSES, row, strict=True)) for row in totals.tolist()]


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


# -- traffic -----------------------------------------------------------------------------------------------------------


def _of_traffic(timeline: Timeline, step: int, before: Floats, start: Floats, on_link: Floats, causes: NDArray[np.int8]) -> Floats | None:
    """Writes what traffic explains into *on_link* and *causes*; returns (devices,) how long lanes were held after their last slot."""
    schedule, traffic = timeline.schedule, timeline.traffic
    held_after = None
    if timeline.blocking:
        on_link[:], held_after = _held(timeline, step, before, start)
    fetched = np.flatnonzero(traffic.kind == int(Kind.UNSHARD))
    if len(fetched):
        slot = _first_slots(timeline, fetched)
        fetched, slot = fetched[slot >= 0], slot[slot >= 0]
        came = np.full(schedule.num_slots, -np.inf)
        np.maximum.at(came, timeline.messages.target_slot, timeline.arrived[step])
        there = timeline.traffic_end[step, fetched]
        late = slot[(there > before[slot]) & (there > came[slot])]
        causes[late], on_link[late] = _WEIGHTS, 0.0
    return held_after


def _held(timeline: Timeline, step: int, before: Floats, start: Floats) -> tuple[Floats, Floats]:
    """(slots,) the part of the gap before each slot, and (devices,) of what follows the last slot, in which a message held the lane.

    A sender's lane is held from when the link takes the message, a receiver's from when there is a message to be taken: before that
    they wait for each other.
    """
    schedule, found = timeline.schedule, timeline.messages
    device = np.concatenate([found.source_device, found.target_device]).astype(np.int64)
    begin = np.concatenate([timeline.departed[step], timeline.sent[step]])
    end = np.tile(timeline.arrived[step], 2)
    # the slot that follows on each end; gap number: that slot, or behind all slots the device's last gap
    gap = np.empty(len(device), np.int64)
    left, right = np.empty(len(device)), np.empty(len(device))
    bounds = schedule.device_slots
    for one in range(schedule.num_devices):
        low, high = int(bounds[one]), int(bounds[one + 1])
        own = np.flatnonzero(device == one)
        if low == high:
            continue
        place = low + np.searchsorted(start[low:high], end[own])
        inside = place < high
        gap[own] = np.where(inside, place, schedule.num_slots + one)
        slot = np.minimum(place, high - 1)
        left[own] = np.where(inside, before[slot], timeline.end[step, high - 1])
        right[own] = np.where(inside, start[slot], np.inf)
    begin, end = np.maximum(begin, left), np.minimum(end, right)
    # the union of the intervals of a gap: sorted by begin, each adds what reaches beyond those before it
    order = np.lexsort((begin, gap))
    gap, begin, end = gap[order], begin[order], end[order]
    reach = np.full(schedule.num_slots + schedule.num_devices, -np.inf)
    total = np.zeros(len(reach))
    for number, since, until in zip(gap.tolist(), begin.tolist(), end.tolist(), strict=True):
        if until > max(since, reach[number]):
            total[number] += until - max(since, reach[number])
            reach[number] = until
    return total[: schedule.num_slots], total[schedule.num_slots :]


def _first_slots(timeline: Timeline, ops: Ints) -> Ints:
    """The first slot after each op of the traffic on its device that belongs to its stage; -1 where there is none, or the op is not listed."""
    traffic = timeline.traffic
    schedule = traffic.schedule
    rows = np.flatnonzero(schedule.kind <= int(Kind.U))

    def key(device: NDArray[np.int32], stage: NDArray[np.int32], row: Ints) -> Ints:
        return (device.astype(np.int64) * schedule.num_stages + stage) * (len(schedule) + 1) + row

    keys = key(schedule.device[rows], schedule.stage[rows], rows)
    order = np.argsort(keys)
    wanted = key(traffic.device[ops], traffic.stage[ops], traffic.row[ops])
    place = np.searchsorted(keys[order], wanted)
    row = rows[order[np.minimum(place, len(rows) - 1)]]
    same = (schedule.device[row] == traffic.device[ops]) & (schedule.stage[row] == traffic.stage[ops])
    return np.where((place < len(rows)) & (traffic.row[ops] >= 0) & same, schedule.row_slot[row], -1)


def _reduced_until(timeline: Timeline, step: int, updates: Ints, start: Floats, before: Floats) -> Floats:
    """(updates,) when the last reduction of the device ended that did so in the gap before each update; else when the gap began."""
    schedule, traffic = timeline.schedule, timeline.traffic
    result = before[updates].copy()
    own = np.flatnonzero(traffic.kind == int(Kind.REDUCE_GRAD))
    device = schedule.slot_device[updates]
    for one in np.unique(traffic.device[own]).tolist():
        ends = np.sort(timeline.traffic_end[step, own[traffic.device[own] == one]])
        mine = np.flatnonzero(device == one)
        place = np.searchsorted(ends, start[updates[mine]], side="right")
        last = np.where(place > 0, ends[np.maximum(place, 1) - 1], -np.inf)
        result[mine] = np.maximum(result[mine], last)
    return result


def _last_reductions(timeline: Timeline, step: int) -> Floats | None:
    """(devices,) when the device's last reduction ended; minus infinity where it has none."""
    traffic = timeline.traffic
    own = np.flatnonzero(traffic.kind == int(Kind.REDUCE_GRAD))
    if not len(own):
        return None
    result = np.full(timeline.schedule.num_devices, -np.inf)
    np.maximum.at(result, traffic.device[own], timeline.traffic_end[step, own])
    return result
