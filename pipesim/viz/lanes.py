"""Communication as bars: what every device sends and receives, its collectives and its offloads, in lanes beside its compute."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.op import Kind, Op

if TYPE_CHECKING:
    from pipesim.timeline import Timeline
    from pipesim.viz.scene import Scene

__all__ = ["LANES", "Bars", "Transfers", "bars", "growth", "shown", "spread", "transfers"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# the lanes of a device in a picture, from above
LANES: dict[str, tuple[Kind, ...]] = {
    "send": (Kind.SEND_F, Kind.SEND_B),
    "receive": (Kind.RECV_F, Kind.RECV_B),
    "collective": (Kind.REDUCE_GRAD, Kind.UNSHARD),
    "offload": (Kind.OFFLOAD, Kind.RELOAD),
}
_LEVELS = 8  # of a lane in which transfers overlap; more of them cover each other, and the lane's name says so
_READABLE = 0.045  # part of a band of the usual height: a row of a lane that is thinner is hard to see


@dataclass(frozen=True, eq=False)
class Transfers:
    """Everything that took a communication lane. A message is there twice, at its sender and at its receiver.

    Attributes:
        kind: (transfers,) values of :class:`Kind`.
        device: (transfers,) whose lane.
        stage: (transfers,)
        microbatch: (transfers,) -1 for none.
        peer: (transfers,) the device at the other end; -1 for a collective, and for the host.
        size: (transfers,) bytes; 0 where they are not known.
        message: (transfers,) which message; -1 for what is none.
        begin: (steps, transfers)
        finish: (steps, transfers)
        waited: (steps, transfers) from when it was ready until it began, at least 0.
    """

    kind: NDArray[np.int8]
    device: Ints
    stage: Ints
    microbatch: Ints
    peer: Ints
    size: Floats
    message: Ints
    begin: Floats
    finish: Floats
    waited: Floats

    def __len__(self) -> int:
        return len(self.kind)

    def op(self, number: int) -> Op:
        """What it is, as people read it."""
        microbatch = int(self.microbatch[number])
        return Op(int(self.stage[number]), Kind(int(self.kind[number])), None if microbatch < 0 else microbatch)


def shown(timeline: Timeline, asked: bool | None = None) -> bool:
    """Whether to show lanes: what was asked for, else where there are collectives, or SEND and RECV with times of their own."""
    return len(timeline.traffic) > 0 if asked is None else asked


def transfers(timeline: Timeline) -> Transfers:
    """Returns what took a lane: messages (from SEND and RECV where these have times, else from link to arrival), collectives, offloads.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> found = transfers(simulate(generate("gpipe", 2, 1), UniformCosts(forward=1, backward=2, latency=0.5)))
        >>> [(str(found.op(i)), int(found.device[i]), found.begin[0, i].item(), found.finish[0, i].item()) for i in range(len(found))]
        [('0SEND_F0', 0, 1.0, 1.5), ('1SEND_B0', 1, 4.5, 5.0), ('1RECV_F0', 1, 1.0, 1.5), ('0RECV_B0', 0, 4.5, 5.0)]
    """
    parts = [_traffic(timeline), _moves(timeline)]
    if (timeline.traffic.peer < 0).all():  # messages have no other times than their own
        parts.insert(0, _messages(timeline))
    columns = [np.concatenate(column, axis=-1) for column in zip(*parts, strict=True)]
    return Transfers(*columns)


def _messages(timeline: Timeline) -> tuple[NDArray[Any], ...]:
    """Every message at its sender, then every one at its receiver, as columns of Transfers."""
    found, schedule = timeline.messages, timeline.schedule
    rows, number = np.concatenate([found.source, found.target]), np.tile(np.arange(len(found)), 2)
    sent = np.where(found.gradient, int(Kind.SEND_B), int(Kind.SEND_F))
    received = np.where(found.gradient, int(Kind.RECV_B), int(Kind.RECV_F))
    return (
        np.concatenate([sent, received]).astype(np.int8),
        np.concatenate([found.source_device, found.target_device]).astype(np.int64),
        schedule.stage[rows].astype(np.int64),
        schedule.microbatch[rows].astype(np.int64),
        np.concatenate([found.target_device, found.source_device]).astype(np.int64),
        np.tile(timeline.footprint.message, 2),
        number,
        timeline.departed[:, number],
        timeline.arrived[:, number],
        (timeline.departed - timeline.sent)[:, number],
    )


def _traffic(timeline: Timeline) -> tuple[NDArray[Any], ...]:
    traffic = timeline.traffic
    columns = (traffic.device, traffic.stage, traffic.microbatch, traffic.peer)
    begin = np.broadcast_to(timeline.traffic_start, (timeline.steps, len(traffic)))
    ready = begin.copy()
    own = np.flatnonzero(traffic.message >= 0)
    ready[:, own] = timeline.sent[:, traffic.message[own]]
    waited = np.maximum(begin - ready, 0.0)
    finish = np.broadcast_to(timeline.traffic_end, begin.shape)
    return (traffic.kind, *(column.astype(np.int64) for column in columns), traffic.size, traffic.message, begin, finish, waited)


def _moves(timeline: Timeline) -> tuple[NDArray[Any], ...]:
    moves = timeline.moves
    begin = np.broadcast_to(timeline.offload_start, (timeline.steps, len(moves)))
    return (
        np.where(moves.out, int(Kind.OFFLOAD), int(Kind.RELOAD)).astype(np.int8),
        *(column.astype(np.int64) for column in (moves.device, moves.stage, moves.microbatch, moves.partner)),
        timeline.footprint.kept[moves.stage, moves.microbatch],
        np.full(len(moves), -1),
        begin,
        np.broadcast_to(timeline.offload_end, begin.shape),
        np.zeros(begin.shape),
    )


@dataclass(frozen=True, eq=False)
class Bars:
    """The bars of communication of a picture.

    Attributes:
        lanes: Names of the lanes that there are, from above, for people: also what is squeezed, and what takes no time.
        columns: Columns of a Scene.
    """

    lanes: tuple[str, ...]
    columns: dict[str, NDArray[Any]]


def bars(timeline: Timeline, top: float, bottom: float) -> Bars | None:
    """Places what took a lane, and some time, between two heights of its device's band; None where there is nothing of the kind."""
    found = transfers(timeline)
    step, index = np.nonzero(found.finish > found.begin)
    if not len(index):
        return None
    origin = timeline.first_start
    begin, finish = found.begin[step, index], found.finish[step, index]
    lane_of = np.zeros(len(Kind), np.int64)
    for number, kinds in enumerate(LANES.values()):
        lane_of[list(kinds)] = number
    lane, device = lane_of[found.kind[index]], found.device[index]
    used = np.unique(lane)
    level, most = np.zeros(len(index), np.int64), np.ones(len(LANES), np.int64)
    for one in np.unique(lane * timeline.schedule.num_devices + device).tolist():
        own = np.flatnonzero(lane * timeline.schedule.num_devices + device == one)
        level[own] = spread(begin[own], finish[own])
        number = one // timeline.schedule.num_devices
        most[number] = max(most[number], int(level[own].max()) + 1)
    # a lane is as high as it has rows, and all rows of a picture are alike
    levels = np.minimum(most, _LEVELS)
    row = (bottom - top) / levels[used].sum()
    before = np.cumsum(levels[used]) - levels[used]
    tall = row * (1 - 0.1 / levels[lane]) if len(used) > 1 or levels.max() == 1 else np.full(len(lane), row)
    upper = device + top + row * before[np.searchsorted(used, lane)] + tall * (level % _LEVELS)
    columns: dict[str, NDArray[Any]] = {
        "device": device,
        "top": upper,
        "bottom": upper + tall,
        "start": begin - origin,
        "end": finish - origin,
        "kind": found.kind[index],
        "stage": found.stage[index],
        "chunk": np.zeros(len(index), np.int64),
        "microbatch": found.microbatch[index],
        "step": step,
        "slot": np.full(len(index), -1),
        "transfer": index,
    }
    # all that has a lane takes no time where it is missing
    idle = {list(LANES)[number] for number in lane_of[found.kind]} - {list(LANES)[number] for number in used}
    names = [_name(list(LANES)[number], int(most[number])) for number in used.tolist()]
    names[-1] += "".join(f" ({name}s take no time)" for name in LANES if name in idle)
    return Bars(tuple(names), columns)


def _name(lane: str, most: int) -> str:
    return lane if most <= _LEVELS else f"{lane} (up to {most} at once, in {_LEVELS} rows)"


def growth(bars: Scene) -> float:
    """How many times as high as usual the bands should be, so that every row of a lane can be seen; 1 up to six rows."""
    rows = (bars.bottom - bars.top)[bars.transfer >= 0]
    return float(np.clip(_READABLE / rows.min(initial=1.0), 1.0, 2.5))


def spread(begin: Floats, finish: Floats) -> Ints:
    """Lanes on which no two intervals overlap, as few as possible: messages overlap where they come from several devices, or by their latencies.

    Examples:
        >>> spread(np.array([0.0, 1.0, 2.0]), np.array([2.0, 3.0, 4.0])).tolist()
        [0, 1, 0]
    """
    lanes = np.zeros(len(begin), np.int64)
    order = np.argsort(begin, kind="stable")
    if (begin[order][1:] >= finish[order][:-1]).all():
        return lanes
    taken: list[tuple[float, int]] = []
    free: list[int] = []
    count = 0
    for index, start, end in zip(order.tolist(), begin[order].tolist(), finish[order].tolist(), strict=True):
        while taken and taken[0][0] <= start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, count = count, count + 1
        lanes[index] = lane
        heapq.heappush(taken, (end, lane))
    return lanes
