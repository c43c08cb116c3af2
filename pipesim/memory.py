"""Memory over time: what each device holds, by category.

An activation is allocated when its F starts and released when its B ends. With a split backward a declared part goes when
I ends and the rest when W ends. With recomputation F keeps only the stage's input, and the whole lives from the start of
the recomputation to the end of the backward.

The changes of one lane apply in stream order (allocate at a slot's start, release at its end), so that peaks do not
depend on zero durations; messages and offloads are merged in by time, releases before allocations. An offloaded activation
leaves its device when OFFLOAD ends and is held at the other end from OFFLOAD's start; for RELOAD it is the reverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim import jit, loops
from pipesim.costs.model import all_zero, constant, repeated
from pipesim.dataflow import Moves, messages, moves
from pipesim.errors import ScheduleError
from pipesim.op import Kind, Slot
from pipesim.remember import remembered

if TYPE_CHECKING:
    from pipesim.costs.model import CostModel
    from pipesim.schedule import Schedule
    from pipesim.timeline import Timeline

__all__ = [
    "CATEGORIES",
    "Footprint",
    "MemoryCurve",
    "Moves",
    "Overflow",
    "activation_levels",
    "first_overflow",
    "memory_curve",
    "moves",
    "peak_activation_bytes",
    "peak_categories",
    "peak_memory",
]

Floats = NDArray[np.float64]

_F, _B, _I, _W = int(Kind.F), int(Kind.B), int(Kind.I), int(Kind.W)  # NumPy reads a plain number several times as fast

CATEGORIES = ("weights", "gradients", "optimizer", "weight versions", "activations", "communication")


@dataclass(frozen=True, eq=False)
class Footprint:
    """The bytes that memory curves are made of; a saved Timeline carries them.

    Attributes:
        kept: (stages, microbatches) allocated when F starts.
        freed_by_input_grad: (stages, microbatches) the part that goes when I ends.
        rebuilt: (stages, microbatches) allocated when a recomputation starts.
        static: Category to (devices,) bytes that are there all the time.
        message: (messages,) bytes.
    """

    kept: Floats
    freed_by_input_grad: Floats
    rebuilt: Floats
    static: Mapping[str, Floats]
    message: Floats

    @classmethod
    def of(cls, schedule: Schedule, costs: CostModel) -> Footprint:
        """Asks a cost model for its bytes and places them on devices."""
        activation = costs.activation_bytes(schedule)
        static = {category: np.zeros(schedule.num_devices) for category in ("weights", "gradients", "optimizer", "weight versions")}
        stages = {category: np.asarray(values, dtype=np.float64) for category, values in costs.stage_bytes(schedule).items()}
        unknown = sorted(stages.keys() - static.keys())
        if unknown:
            raise ScheduleError(f"the cost model has bytes of {', '.join(unknown)}; the categories of a stage are weights, gradients, optimizer")
        for category, values in stages.items():
            if not all_zero(values):
                static[category][:] = [values[list(owned)].sum() if owned else 0.0 for owned in schedule.device_stages]
        if schedule.weights != "flush" and "weights" in stages and not all_zero(stages["weights"]):
            for (device, stage), versions in schedule.staleness.num_versions.items():
                static["weight versions"][device] += (versions - 1) * stages["weights"][stage]
        kept, freed, rebuilt = (np.asarray(values, dtype=np.float64) for values in activation)
        if constant(kept) is not None and constant(freed) is not None and constant(rebuilt) is not None:  # then there is no need for tables
            freed = repeated(min(freed.item(0), kept.item(0) + rebuilt.item(0)), *freed.shape)
        else:
            freed = np.minimum(freed, kept + rebuilt)
        return cls(kept, freed, rebuilt, static, np.asarray(costs.message_bytes(schedule), dtype=np.float64))


def activation_levels(schedule: Schedule, kept: Any, freed_by_input_grad: Any, rebuilt: Any) -> tuple[Floats, Floats]:
    """Returns (slots,) bytes allocated at each slot's start, and (slots,) bytes released at its end.

    Args:
        schedule: A checked schedule.
        kept: (stages, microbatches) or a scalar, as in :class:`Footprint`.
        freed_by_input_grad: The same.
        rebuilt: The same.
    """
    kept, freed, rebuilt = (np.asarray(values, dtype=np.float64) for values in (kept, freed_by_input_grad, rebuilt))
    by_kind = _levels_by_kind(schedule, kept, freed, rebuilt)
    if by_kind is not None:
        return by_kind[0][schedule.kind], by_kind[1][schedule.kind]
    shape = (schedule.num_stages, schedule.num_microbatches)
    kept, freed, rebuilt = (np.broadcast_to(values, shape) for values in (kept, freed, rebuilt))
    start, end = np.zeros(schedule.num_slots), np.zeros(schedule.num_slots)
    slot = schedule.row_slot
    forward, half, backward = schedule.rows_of(Kind.F), schedule.rows_of(Kind.I), schedule.backward_rows
    np.add.at(start, slot[forward], kept)
    split = half >= 0
    np.add.at(end, slot[schedule.release_rows], kept + rebuilt - np.where(split, freed, 0.0))
    if split.any() and freed.any():
        np.add.at(end, slot[half[split]], freed[split])
    if rebuilt.any():
        # the recomputation is an op of its own, or the first part of the backward
        listed = schedule.rows_of(Kind.R)
        begins = np.where(listed >= 0, listed, backward)
        there = begins >= 0
        np.add.at(start, slot[begins[there]], rebuilt[there])
    return start, end


def _levels_by_kind(schedule: Schedule, kept: Floats, freed: Floats, rebuilt: Floats) -> tuple[Floats, Floats] | None:
    """(kinds,) the same where all activations are alike, nothing is recomputed, and all or none have a backward; else None."""
    counts, whole, part = schedule.kind_counts, constant(kept), constant(freed)
    all_or_none = counts[Kind.B] + counts[Kind.I] in (0, counts[Kind.F])
    if not (schedule.every_row_a_slot and all_or_none) or whole is None or part is None or constant(rebuilt) != 0:
        return None
    start, end = np.zeros(len(Kind)), np.zeros(len(Kind))
    start[_F] = whole
    end[_B], end[_I], end[_W] = whole, part, whole - part
    if not schedule.has_backward:
        end[_F] = whole
    return start, end


def peak_activation_bytes(schedule: Schedule, kept: Any, freed_by_input_grad: Any, rebuilt: Any) -> Floats:
    """(devices,) the highest level of :func:`activation_levels` on each device."""
    if jit.is_loaded():
        by_kind = _levels_by_kind(schedule, *(np.asarray(values, dtype=np.float64) for values in (kept, freed_by_input_grad, rebuilt)))
        if by_kind is not None:
            result = np.zeros(schedule.num_devices)
            jit.call(loops.peaks_by_kind, schedule.kind, *by_kind, schedule.device_slots, result)
            return result
    return peak_levels(schedule, *activation_levels(schedule, kept, freed_by_input_grad, rebuilt))


def peak_levels(schedule: Schedule, start: Floats, end: Floats) -> Floats:
    """(devices,) the highest level that changes at slots' starts and ends reach, each device from 0."""
    result = np.zeros(schedule.num_devices)
    if jit.is_loaded():
        jit.call(loops.peaks, start, end, schedule.device_slots, result)
        return result
    counts = np.diff(schedule.device_slots)
    if len(counts) and (counts == counts[0]).all():
        change, down = (start - end).reshape(len(counts), -1), end.reshape(len(counts), -1)
        return np.asarray((np.cumsum(change, axis=1) + down).max(axis=1, initial=0.0))  # after each start
    for device in range(schedule.num_devices):
        slots = slice(schedule.device_slots[device], schedule.device_slots[device + 1])
        level = np.cumsum(start[slots] - end[slots]) + end[slots]
        result[device] = level.max(initial=0.0)
    return result


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """What one device holds over time: a step function, in bytes or units.

    Attributes:
        device: The device.
        times: (points,) ascending; the values of point k hold until point k + 1.
        categories: Category to (points,) bytes.
        unit: ``"s"`` (bytes) or ``"slot"`` (units).
    """

    device: int
    times: Floats
    categories: Mapping[str, Floats]
    unit: str

    @cached_property
    def total(self) -> Floats:
        """(points,) all categories together."""
        return np.asarray(reduce(np.add, self.categories.values()))

    @property
    def peak(self) -> float:
        """The highest total."""
        return float(self.total.max(initial=0.0))

    @property
    def peak_time(self) -> float:
        """When the highest total is first reached."""
        return float(self.times[int(np.argmax(self.total))])

    @property
    def peak_categories(self) -> dict[str, float]:
        """What the peak consists of."""
        at = int(np.argmax(self.total))
        return {category: float(values[at]) for category, values in self.categories.items()}

    def at(self, time: float) -> float:
        """The total at a time; 0 before the first point.

        Examples:
            >>> from pipesim import UniformCosts, generate, simulate
            >>> curve = simulate(generate("1f1b", 4, 8), UniformCosts(forward=1, backward=2)).memory(device=0)
            >>> curve.peak, curve.peak_time, curve.at(0.5)
            (4.0, 3.0, 1.0)
        """
        index = int(np.searchsorted(self.times, time, side="right")) - 1
        return float(self.total[index]) if index >= 0 else 0.0


@dataclass(frozen=True)
class Overflow:
    """The first op that does not fit on a device.

    Attributes:
        device: The device.
        op: The op, or None where what is there all the time does not fit.
        time: When it starts.
        needed: Bytes in all at that moment.
        capacity: Bytes that there are.
    """

    device: int
    op: Slot | None
    time: float
    needed: float
    capacity: float


# Order of events at one time: messages and moves let go, then the lane in its own order, then messages and moves take.
_RELEASE, _LANE, _TAKE = 0, 1, 2


@dataclass(frozen=True, eq=False)
class _Events:
    """Changes on one device in the order in which they apply; slot is -1 for a message or a move."""

    times: Floats
    change: Floats
    activation: NDArray[np.bool_]
    slot: NDArray[np.int64]


def _events(timeline: Timeline, device: int) -> _Events:
    schedule, footprint = timeline.schedule, timeline.footprint
    slots = np.arange(schedule.device_slots[device], schedule.device_slots[device + 1])
    up, down = timeline._activation_changes
    # lane: start and end of each slot in turn, step after step
    times = np.stack([timeline.start[:, slots], timeline.end[:, slots]], axis=2).ravel()
    change = np.tile(np.stack([up[slots], -down[slots]], axis=1).ravel(), timeline.steps)
    if all_zero(footprint.message) and not timeline.offload_start.size:
        return _Events(times, change, np.full(len(times), True), np.tile(np.repeat(slots, 2), timeline.steps))
    # per moment: (times, change, is it an activation's, slot)
    parts: dict[int, list[tuple[Floats, Floats, bool, Any]]] = {_RELEASE: [], _LANE: [], _TAKE: []}
    parts[_LANE].append((times, change, True, np.tile(np.repeat(slots, 2), timeline.steps)))
    if footprint.message.any():
        sent_by, order, received_by = _messages_by_device(schedule)
        outgoing, incoming = slice(sent_by[device], sent_by[device + 1]), order[received_by[device] : received_by[device + 1]]
        consumed = timeline.start[:, timeline.messages.target_slot[incoming]]
        # the sender holds a message until it has arrived, the receiver from when the link takes it until the op that needs it starts
        for own, since, until in (
            (outgoing, timeline.sent[:, outgoing], timeline.arrived[:, outgoing]),
            (incoming, timeline.departed[:, incoming], consumed),
        ):
            held = until > since  # what is held for no time would be let go before it is taken
            size = np.broadcast_to(footprint.message[own], held.shape)[held]
            parts[_TAKE].append((since[held], size, False, -1))
            parts[_RELEASE].append((until[held], -size, False, -1))
    if timeline.offload_start.size:
        moved = timeline.moves
        # what this device lists goes with OFFLOAD and comes with RELOAD; at its partner it is the other way round
        comes = np.where(moved.out, moved.partner, moved.device) == device
        goes = np.where(moved.out, moved.device, moved.partner) == device
        for mine, when, sign, moment in ((comes, timeline.offload_start, 1.0, _TAKE), (goes, timeline.offload_end, -1.0, _RELEASE)):
            size = sign * np.tile(footprint.kept[moved.stage[mine], moved.microbatch[mine]], timeline.steps)
            parts[moment].append((when[:, mine].ravel(), size, True, -1))
    # in the order of moments, so that a stable sort by time alone leaves them in it; and it is quick on runs that are sorted
    every = [part for moment in (_RELEASE, _LANE, _TAKE) for part in parts[moment]]
    times, change = np.concatenate([part[0] for part in every]), np.concatenate([part[1] for part in every])
    activation = np.concatenate([np.full(len(part[0]), part[2]) for part in every])
    slot = np.concatenate([np.broadcast_to(part[3], part[0].shape) for part in every])
    order = np.argsort(times, kind="stable")
    return _Events(times[order], change[order], activation[order], slot[order])


@remembered
def _messages_by_device(schedule: Schedule) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(devices + 1,) bounds by sender; (messages,) the messages by receiver, and (devices + 1,) bounds of that."""
    found, devices = messages(schedule), np.arange(schedule.num_devices + 1)
    order = np.argsort(found.target_device, kind="stable")
    return np.searchsorted(found.source_device, devices), order, np.searchsorted(found.target_device[order], devices)


def memory_curve(timeline: Timeline, device: int) -> MemoryCurve:
    """The curve of one device; see :meth:`Timeline.memory`."""
    if isinstance(device, bool) or not 0 <= device < timeline.schedule.num_devices:
        raise ScheduleError(f"there is no device {device!r}; devices are 0..{timeline.schedule.num_devices - 1}")
    events = _events(timeline, device)
    first = timeline.first_start
    times = np.concatenate([[first], events.times])
    categories = {}
    for category in CATEGORIES:
        static = timeline.footprint.static.get(category)
        base = 0.0 if static is None else float(static[device])
        own = {"activations": events.activation, "communication": ~events.activation}.get(category)
        if own is None or not own.any():
            categories[category] = np.full(len(times), base)
        else:
            level = np.concatenate([[0.0], np.cumsum(np.where(own, events.change, 0.0))])
            categories[category] = base + _without_dust(level, events.change)
    return MemoryCurve(device, times, categories, timeline.unit)


def _without_dust(level: Floats, change: Floats) -> Floats:
    """Sums of floats leave dust such as 1e-17 where a level is back at 0; nothing real is that small beside its largest change."""
    scale = np.abs(change).max(initial=0.0)
    return np.where(np.abs(level) < 1e-12 * scale * max(1, len(change)), 0.0, level)


def peak_memory(timeline: Timeline) -> Floats:
    """(devices,) the highest total on each device."""
    return _peaks(timeline)[0]


def peak_categories(timeline: Timeline) -> list[dict[str, float]]:
    """Per device, what the highest total consists of, by category."""
    return [dict(zip(CATEGORIES, row, strict=True)) for row in _peaks(timeline)[1].tolist()]


@remembered
def _peaks(timeline: Timeline) -> tuple[Floats, Floats]:
    """(devices,) the highest totals, and (devices, categories) what they consist of."""
    schedule, footprint = timeline.schedule, timeline.footprint
    size, messages_take_room = constant(footprint.message), not all_zero(footprint.message)
    if messages_take_room and jit.is_loaded() and not timeline.offload_start.size:
        totals, table = np.zeros(schedule.num_devices), _always(timeline)
        times = jit.columns(timeline.start, timeline.end, timeline.sent, timeline.departed, timeline.arrived)
        messages_of = schedule.device_slots, timeline.messages.target_slot, *_messages_by_device(schedule)
        (sizes,) = jit.columns(footprint.message if size is None else np.full(1, size))
        jit.call(loops.memory_peaks, times, *timeline._activation_changes, sizes, int(size is None), *messages_of, table, totals)
        return totals, table
    if messages_take_room or timeline.offload_start.size:
        totals, table = np.zeros(schedule.num_devices), np.zeros((schedule.num_devices, len(CATEGORIES)))
        for device in range(schedule.num_devices):  # one curve at a time: all of them may be gigabytes
            curve = memory_curve(timeline, device)
            totals[device], table[device] = curve.peak, list(curve.peak_categories.values())
        return totals, table
    # then nothing depends on time, and the stream order alone says it
    level = peak_activation_bytes(schedule, footprint.kept, footprint.freed_by_input_grad, footprint.rebuilt)
    table = _always(timeline)
    table[:, CATEGORIES.index("activations")] += level
    return table.sum(axis=1), table


def _always(timeline: Timeline) -> Floats:
    """(devices, categories) what is there all the time."""
    table = np.zeros((timeline.schedule.num_devices, len(CATEGORIES)))
    for category, values in timeline.footprint.static.items():
        table[:, CATEGORIES.index(category)] = values
    return table


def first_overflow(timeline: Timeline, device: int) -> Overflow | None:
    """The first op that does not fit on a device, or None; see :meth:`Timeline.overflows`."""
    capacity = float(timeline.capacity[device])
    if not np.isfinite(capacity) or peak_memory(timeline)[device] <= capacity:
        return None
    curve = memory_curve(timeline, device)
    over = np.flatnonzero(curve.total > capacity * (1 + 1e-12))
    if not len(over):
        return None
    point = int(over[0])
    if point == 0:
        return Overflow(device, None, timeline.first_start, float(curve.total[0]), capacity)
    events = _events(timeline, device)
    slot = int(events.slot[point - 1])
    # a message or a move has no slot on this device's lane: the op beside it is the one that starts next
    if slot < 0:
        later = np.flatnonzero(events.slot[point - 1 :] >= 0)
        slot = int(events.slot[point - 1 + later[0]]) if len(later) else int(timeline.schedule.device_slots[device + 1]) - 1
    return Overflow(device, timeline.schedule.slot(slot), float(curve.times[point]), float(curve.total[point]), capacity)
