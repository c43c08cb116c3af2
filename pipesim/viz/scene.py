"""A picture as data: the bars that every view draws, as columns.

Times count from the start of the first op. Device d takes the band from y = d to y = d + 1, and y grows downwards, so
device 0 is on top. A pair is two bars of half the height, its first half above. Communication has lanes of its own below::

    y = d    +---------+----+         top = d + 0.1                     with lanes    d + 0.06
             |         | F4 |         middle of a pair = d + 0.5
             |   B2    +----+
             |         | B0 |
             +---------+----+         bottom = d + 0.9                                d + 0.6
                    |=send=|
                  |==recv===|                                                         d + 0.94
    y = d+1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.dataflow import first_updates
from pipesim.op import Kind, Op
from pipesim.units import format_time
from pipesim.viz import lanes as _lanes
from pipesim.viz import palette

if TYPE_CHECKING:
    from pipesim.schedule import Schedule
    from pipesim.timeline import Timeline

__all__ = ["MARGIN", "Group", "Scene", "bins", "grid", "scene", "waits"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MARGIN = 0.1  # the free part of a device's band above and below its bars
_WITH_LANES = (0.06, 0.6, 0.64, 0.94)  # the same where there are lanes: compute from and to, lanes from and to


@dataclass(frozen=True)
class Group:
    """Bars that look the same: one artist, one path, one trace.

    Attributes:
        kind: What they do.
        shade: Their chunk, counted modulo :data:`palette.SHADES`.
        color: ``#rrggbb``.
        bars: (bars of the group,) their indices in the scene's columns.
    """

    kind: Kind
    shade: int
    color: str
    bars: Ints


@dataclass(frozen=True, eq=False)
class Scene:
    """The bars of a run: step after step, within a step device after device, within a device in stream order.

    Attributes:
        num_devices: Bands, also of devices that have no bar.
        num_chunks: The most stages that any device holds.
        origin: When the first op started; the times of the other columns count from there.
        span: The end of the last bar.
        unit: ``"s"`` or ``"slot"``.
        device: (bars,) its band.
        top: (bars,) upper edge, y growing downwards.
        bottom: (bars,) lower edge.
        start: (bars,) left edge.
        end: (bars,) right edge.
        kind: (bars,) values of :class:`Kind`.
        stage: (bars,)
        chunk: (bars,) the how-manieth of its device's stages, from 0.
        microbatch: (bars,) the number of the update for U.
        step: (bars,)
        slot: (bars,) compute slot of the schedule; the halves of a pair share one, and communication has -1.
        transfer: (bars,) which of :func:`pipesim.viz.lanes.transfers`; -1 for compute.
        lanes: Names of the lanes below compute, from above; none where they are not shown.
    """

    num_devices: int
    num_chunks: int
    origin: float
    span: float
    unit: str
    device: Ints
    top: Floats
    bottom: Floats
    start: Floats
    end: Floats
    kind: NDArray[np.int8]
    stage: Ints
    chunk: Ints
    microbatch: Ints
    step: Ints
    slot: Ints
    transfer: Ints
    lanes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number of bars."""
        return len(self.start)

    def op(self, bar: int) -> Op:
        """What a bar shows; half of a pair where it is one."""
        number = int(self.microbatch[bar])
        return Op(int(self.stage[bar]), Kind(int(self.kind[bar])), None if number < 0 else number)

    def label(self, bar: int) -> str:
        """What stands in a bar: the number of the microbatch, as in the papers' pictures, where the colour says the kind."""
        op = self.op(bar)
        if self.transfer[bar] >= 0:
            return f"stage {op.stage}" if op.kind in (Kind.REDUCE_GRAD, Kind.UNSHARD) else str(op.microbatch)
        if op.kind < Kind.U:
            return str(op.microbatch)
        return f"{op.kind.name}{'' if op.microbatch is None else op.microbatch}"

    @property
    def compute_band(self) -> tuple[float, float]:
        """The part of a device's band that its compute has."""
        return _WITH_LANES[:2] if self.lanes else (MARGIN, 1 - MARGIN)

    @property
    def note(self) -> str:
        """What an axis of time says about the lanes."""
        return f" · below each device: {', '.join(self.lanes)}" if self.lanes else ""

    @property
    def halved(self) -> NDArray[np.bool_]:
        """(bars,) whether it is half of a pair."""
        top, bottom = self.compute_band
        return np.asarray((self.slot >= 0) & (self.bottom - self.top < 0.75 * (bottom - top)))

    @property
    def groups(self) -> Iterator[Group]:
        """The bars by kind and shade, kinds in their own order."""
        code = _codes(self)
        order = np.argsort(code, kind="stable")
        values, first = np.unique(code[order], return_index=True)
        for value, bars in zip(values.tolist(), np.split(order, first[1:]), strict=True):
            kind, shade = divmod(value, palette.SHADES)
            yield Group(Kind(kind), shade, palette.color(Kind(kind), shade, self.num_chunks), bars)

    @property
    def kinds(self) -> list[Kind]:
        """The kinds that occur, in their own order: the legend."""
        return [Kind(int(kind)) for kind in np.unique(self.kind)]


def scene(timeline: Timeline, lanes: bool = False) -> Scene:
    """Returns the bars of a run.

    Args:
        timeline: The run.
        lanes: Whether the bars of communication follow those of compute, as far as there is any that takes time.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> run = simulate(generate("gpipe", 2, 1), UniformCosts(forward=1, backward=2, latency=0.5))
        >>> bars = scene(run)
        >>> [(str(bars.op(i)), int(bars.device[i]), float(bars.start[i]), float(bars.end[i])) for i in range(len(bars))]
        [('0F0', 0, 0.0, 1.0), ('0B0', 0, 5.0, 7.0), ('1F0', 1, 1.5, 2.5), ('1B0', 1, 2.5, 4.5)]
        >>> with_lanes = scene(run, lanes=True)
        >>> with_lanes.lanes, [str(with_lanes.op(i)) for i in range(len(bars), len(with_lanes))]
        (('send', 'receive'), ['0SEND_F0', '1SEND_B0', '1RECV_F0', '0RECV_B0'])
    """
    schedule, steps, origin = timeline.schedule, timeline.steps, timeline.first_start
    rows = np.flatnonzero(schedule.kind <= int(Kind.U))
    slot = schedule.row_slot[rows]
    columns = {name: np.tile(column, steps) for name, column in _rows(schedule, rows).items()}
    columns["start"], columns["end"] = timeline.start[:, slot].ravel() - origin, timeline.end[:, slot].ravel() - origin
    columns["step"] = np.repeat(np.arange(steps), len(rows))
    columns["transfer"] = np.full(len(columns["step"]), -1)
    found = _lanes.bars(timeline, *_WITH_LANES[2:]) if lanes else None
    if found is not None:
        for name in ("top", "bottom"):
            fraction = (columns[name] - columns["device"] - MARGIN) / (1 - 2 * MARGIN)
            columns[name] = columns["device"] + _WITH_LANES[0] + fraction * (_WITH_LANES[1] - _WITH_LANES[0])
        columns = {name: np.concatenate([column, found.columns[name]]) for name, column in columns.items()}
    return Scene(
        num_devices=schedule.num_devices,
        num_chunks=int(columns["chunk"].max(initial=0)) + 1,
        origin=origin,
        span=max(timeline.makespan, float(columns["end"].max(initial=0.0))),
        unit=timeline.unit,
        lanes=() if found is None else found.lanes,
        **columns,
    )


def grid(schedule: Schedule) -> Scene:
    r"""Returns the order of a schedule as bars, each one long, without running it; communication is in it where it is listed.

    Examples:
        >>> from pipesim import Schedule
        >>> grid(Schedule.from_text("0F0 0SEND_F0\n1RECV_F0 1F0")).start.tolist()
        [0.0, 1.0, 0.0, 1.0]
    """
    count = np.cumsum(~schedule.joined)
    first = schedule.device_rows[:-1]
    before = np.where(first > 0, count[first - 1], 0) if len(count) else np.zeros(len(first), np.int64)
    start = (count - 1 - before[schedule.device]).astype(np.float64)
    columns = _rows(schedule, np.arange(len(schedule)))
    return Scene(
        num_devices=schedule.num_devices,
        num_chunks=int(columns["chunk"].max(initial=0)) + 1,
        origin=0.0,
        span=float(start.max(initial=0.0)) + 1,
        unit="slot",
        start=start,
        end=start + 1,
        step=np.zeros(len(schedule), np.int64),
        transfer=np.full(len(schedule), -1),
        **columns,
    )


def _rows(schedule: Schedule, rows: Ints) -> dict[str, Any]:
    """The columns of a scene that rows of the schedule say, whatever the times are."""
    device, stage = schedule.device[rows].astype(np.int64), schedule.stage[rows].astype(np.int64)
    lower = schedule.joined[rows]
    upper = np.append(lower[1:], False)[: len(rows)]
    # (device, stage) in order; a stage's chunk is its place among those of its device
    places, place = np.unique(device * max(1, schedule.num_stages) + stage, return_inverse=True)
    owner = places // max(1, schedule.num_stages)
    chunk = (np.arange(len(places)) - np.searchsorted(owner, owner))[place.reshape(-1)]
    return {
        "device": device,
        "top": device + np.where(lower, 0.5, MARGIN),
        "bottom": device + np.where(upper, 0.5, 1 - MARGIN),
        "kind": schedule.kind[rows],
        "stage": stage,
        "chunk": chunk,
        "microbatch": schedule.microbatch[rows].astype(np.int64),
        "slot": schedule.row_slot[rows],
    }


def waits(timeline: Timeline) -> Callable[[int, int], str]:
    """Returns a function (slot, step) -> what that slot waited for, as text for people; times count from the first start.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> why = waits(simulate(generate("gpipe", 2, 2), UniformCosts(forward=1, backward=2, latency=0.25)))
        >>> for slot in (0, 2, 3):
        ...     print(why(slot, 0))
        no wait: needs nothing from other devices
        waited 3.5 for 1B0 of device 1 (sent 5.25, arrived 5.5)
        no wait: 1B1 of device 1 was there (sent 7.25, arrived 7.5)
    """
    schedule, messages, moves, origin = timeline.schedule, timeline.messages, timeline.moves, timeline.first_start
    last = _last_messages(timeline)
    gates = set(first_updates(schedule).tolist()) if timeline.barrier else set()
    back = np.flatnonzero(~moves.out)
    reloads = dict(zip(schedule.row_slot[schedule.backward_rows[moves.stage[back], moves.microbatch[back]]].tolist(), back.tolist(), strict=True))

    collective = np.flatnonzero(timeline.traffic.collective)
    own_collectives = [collective[timeline.traffic.device[collective] == device] for device in range(schedule.num_devices)]

    def time(value: float) -> str:
        return format_time(float(value) - origin, timeline.unit)

    def done(device: int, kind: Kind, step: int, after: float, until: float) -> str | None:
        """The last collective of this kind that ended on the device in a stretch of time."""
        ops = own_collectives[device]
        ends = timeline.traffic_end[step, ops]
        there = np.flatnonzero((timeline.traffic.kind[ops] == int(kind)) & (ends > after) & (ends <= until))
        if not len(there):
            return None
        last = there[np.argmax(ends[there])]
        return f"{timeline.traffic.op(int(ops[last]))} (done at {time(ends[last])})"

    def text(slot: int, step: int) -> str:
        device = int(schedule.slot_device[slot])
        start, message = float(timeline.start[step, slot]), int(last[step, slot])
        if slot > schedule.device_slots[device]:
            free = float(timeline.end[step, slot - 1])
        else:
            free = float(timeline.end[step - 1, schedule.device_slots[device + 1] - 1]) if step else origin
        waited = format_time(start - free, timeline.unit)
        came = float(timeline.arrived[step, message]) if message >= 0 else -math.inf
        if slot in reloads and (back := float(timeline.offload_end[step, reloads[slot]])) > max(free, came):
            return f"waited {waited} for {schedule.op(int(moves.row[reloads[slot]]))} (there at {time(back)})"
        update = schedule.kind[schedule.slot_row[slot]] == int(Kind.U)
        if len(collective) and start > free:
            found = done(device, Kind.REDUCE_GRAD if update else Kind.UNSHARD, step, max(free, came), start)
            if found is not None:
                return f"waited {waited} for {found}" + (", then for all devices (barrier)" if slot in gates else "")
        if timeline.blocking and start > max(free, came):
            return f"waited {waited} for the lane, which a message of its own held"
        if message >= 0:
            sender = f"{schedule.op(int(messages.source[message]))} of device {messages.source_device[message]}"
            times = f"sent {time(timeline.sent[step, message])}, arrived {time(came)}"
            return f"waited {waited} for {sender} ({times})" if came > free else f"no wait: {sender} was there ({times})"
        if start <= free:
            return "no wait: needs nothing from other devices"
        if slot in gates:
            return f"waited {waited} for all devices (barrier)"
        if update:
            return f"waited {waited} for the gradients of the other replicas"
        return f"waited {waited}"

    return text


def _last_messages(timeline: Timeline) -> Ints:
    """(steps, slots) the message that arrived last of those that a slot waits for, or -1; the first of those that tie."""
    found = timeline.messages
    result = np.full((timeline.steps, timeline.schedule.num_slots), -1)
    for step in range(timeline.steps):
        # sorted so that the wanted message of each slot is written last
        order = np.lexsort((-np.arange(len(found)), timeline.arrived[step]))
        result[step, found.target_slot[order]] = order
    return result


def bins(bars: Scene, count: int) -> NDArray[np.int8]:
    """What to show in each of *count* equal spans of time, for pictures with more bars than pixels.

    Where several kinds, or a kind and idle time, share a span, they take turns from span to span, each as often as it
    lasts. An op shorter than a span is there all the same where nothing else is near.

    Returns:
        (2 · devices, count): two half bands per device, upper first. A value v >= 0 means kind ``v // SHADES`` in shade
        ``v % SHADES``; -1 means idle.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> bins(scene(simulate(generate("gpipe", 2, 1), UniformCosts(forward=1, backward=2))), 6)[::2].tolist()
        [[0, -1, -1, -1, 4, 4], [-1, 0, 4, 4, -1, -1]]
    """
    rows = 2 * bars.num_devices
    left, right = (column * (count / bars.span if bars.span else 0.0) for column in (bars.start, bars.end))
    first = np.minimum(left.astype(np.int64), count - 1)
    # the last span that a bar reaches; a bar that ends on a border does not reach beyond it
    last = np.clip(np.ceil(right - 1e-9).astype(np.int64) - 1, first, count - 1)
    halves = (bars.top < bars.device + 0.5, bars.bottom > bars.device + 0.5)
    code = _codes(bars)
    codes = np.unique(code)
    # (codes and idle, rows, spans) the part of each span
    cover = np.zeros((len(codes) + 1, rows * count))
    for part, value in zip(cover, codes.tolist(), strict=False):
        for half, inside in enumerate(halves):
            own = np.flatnonzero(inside & (code == value))
            row = (2 * bars.device[own] + half) * count
            a, b = row + first[own], row + last[own]
            # whole spans between the two ends of a bar, then the parts at its ends
            change = np.bincount(a + 1, minlength=part.size + 2) - np.bincount(np.maximum(b, a + 1), minlength=part.size + 2)
            part += np.cumsum(change)[: part.size]
            part += np.bincount(a, weights=np.minimum(right[own], first[own] + 1) - left[own], minlength=part.size)
            apart = a < b
            part += np.bincount(b[apart], weights=(right[own] - last[own])[apart], minlength=part.size)
    cover[cover < 1e-9] = 0
    cover[-1] = np.maximum(1 - cover.sum(axis=0), 1e-9)
    result = np.append(codes, -1)[_turns(cover.reshape(-1, rows, count))].astype(np.int8)

    shown = np.pad(result >= 0, ((0, 0), (1, 1)))
    near = shown[:, :-2] | shown[:, 1:-1] | shown[:, 2:]
    for half, inside in enumerate(halves):
        short = np.flatnonzero(inside & (right - left < 1))
        row = 2 * bars.device[short] + half
        unseen = ~near[row, first[short]] & ~near[row, last[short]]
        result[row[unseen], first[short[unseen]]] = code[short[unseen]]
    return result


def _turns(cover: Floats) -> Ints:
    """(rows, spans) which of those that share a span has the turn: the one that has been shown least for what it lasts."""
    owed = np.zeros(cover.shape[:2])
    rows = np.arange(cover.shape[1])
    result = np.empty(cover.shape[1:], np.int64)
    for span in range(cover.shape[2]):
        part = cover[:, :, span]
        owed += part
        turn = np.where(part > 0, owed, -np.inf).argmax(axis=0)
        owed[turn, rows] -= 1
        result[:, span] = turn
    return result


def _codes(bars: Scene) -> Ints:
    """(bars,) kind and shade in one number."""
    return bars.kind.astype(np.int64) * palette.SHADES + bars.chunk % palette.SHADES
