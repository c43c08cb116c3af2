"""From a building block to the streams of a whole run: repeat, squeeze, reorder warm-up and cool-down, squeeze.

Devices are folded in a V: device r holds stages r (chunk 0) and 2p - 1 - r (chunk 1), so both ends of the pipeline are on
device 0. A *building block* says when each op of one microbatch runs on each device; microbatch k does the same k periods
later. Where no two ops of a device fall on one slot modulo the period, the steady state has no bubble, and the peak of
activations is what the life times in the block say, whatever the number of microbatches.

Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 3 (building blocks) and 4 (the steps above).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from pipesim.op import Kind
from pipesim.schedule import Schedule

__all__ = ["FULL", "SPLIT", "Ops", "peak", "repeat", "tighten", "to_schedule"]

LV = 2
Streams = list[list[int]]  # per device, ops in order; an op is kind * m + microbatch, a kind is an index into Ops.kinds
Links = list[list[list[int]]]  # per device and kind, other ops by device * kinds + kind
Cost = tuple[float, float]  # largest span of a device, makespan


@dataclass(frozen=True)
class Ops:
    """The ops of a microbatch on a device, and how they wait for each other.

    Attributes:
        kinds: (chunk, kind) of each, in the order in which a block lists them.
        allocate: The indices of those that take an activation.
        release: The indices of those that give one back.
    """

    kinds: tuple[tuple[int, Kind], ...]
    allocate: tuple[int, ...]
    release: tuple[int, ...]

    def inputs(self, devices: int) -> Links:
        """What each op waits for.

        Chunk 0 goes forward from device 0 to p - 1 and chunk 1 back to 0; gradients go the same way round again:
        chunk 1 from 0 to p - 1, chunk 0 back. The turns, where the device stays the same, link two chunks.
        """
        count, last = len(self.kinds), devices - 1
        table: Links = []
        for device in range(devices):
            up, own, down = (device + shift for shift in (-1, 0, 1))
            waits = [
                [(up, 0)] if device else [],
                [(down, 1) if device < last else (own, 0)],
                [(up, 2) if device else (own, 1)],
                [(down, 3) if device < last else (own, 2)],
                *([(own, kind - 2)] for kind in range(4, count)),
            ]
            table.append([[there * count + kind for there, kind in wait] for wait in waits])
        return table

    def outputs(self, devices: int) -> Links:
        """What waits for each op, which is what it waits for when time runs backwards."""
        count = len(self.kinds)
        result: Links = [[[] for _ in self.kinds] for _ in range(devices)]
        for device, waits in enumerate(self.inputs(devices)):
            for kind, wait in enumerate(waits):
                for before in wait:
                    result[before // count][before % count].append(device * count + kind)
        return result


SPLIT = Ops(((0, Kind.F), (1, Kind.F), (1, Kind.I), (0, Kind.I), (1, Kind.W), (0, Kind.W)), allocate=(0, 1), release=(4, 5))
FULL = Ops(((0, Kind.F), (1, Kind.F), (1, Kind.B), (0, Kind.B)), allocate=(0, 1), release=(2, 3))


def repeat(block: NDArray[np.int64], period: int, microbatches: int) -> Streams:
    """Streams of the block, repeated every *period* slots.

    Args:
        block: (kinds, devices) the slot in which each op of microbatch 0 starts; no two of a device agree modulo the period.
        period: Slots from one microbatch to the next.
        microbatches: Microbatches m.
    """
    kinds = len(block)
    start = (block.T[:, :, None] + period * np.arange(microbatches)).reshape(block.shape[1], kinds * microbatches)
    return [order.tolist() for order in np.argsort(start, axis=1, kind="stable")]


def peak(streams: Streams, ops: Ops, microbatches: int) -> int:
    """The most activations that a device holds at once."""
    change = np.zeros(len(ops.kinds), np.int64)
    change[list(ops.allocate)], change[list(ops.release)] = 1, -1
    return max(int(np.cumsum(change[np.array(stream) // microbatches]).max()) for stream in streams)


def to_schedule(streams: Streams, ops: Ops, microbatches: int, name: str) -> Schedule:
    """The streams as a schedule on the V placement."""
    last = 2 * len(streams) - 1
    chunk = np.array([chunk for chunk, _ in ops.kinds])
    kind = np.array([int(kind) for _, kind in ops.kinds])
    devices = []
    for device, stream in enumerate(streams):
        index, microbatch = np.divmod(np.array(stream), microbatches)
        devices.append((np.where(chunk[index] == 0, device, last - device), kind[index], microbatch))
    return Schedule.from_columns(devices, name=name)


def tighten(streams: Streams, ops: Ops, microbatches: int, limit: int, durations: Sequence[float]) -> tuple[Streams, Cost]:
    """Squeezes the streams, and reorders their warm-up and cool-down, without ever holding more than *limit* activations.

    Squeezing needs no change of the order: a device starts its next op as soon as it can. What it leaves idle, it fills
    with later ops whose inputs are there, as long as the rest of the stream stays within the limit. This packs the
    warm-up. The same seen from the end of the run, with time and data flow reversed, packs the cool-down. The two are
    repeated while they help; the best order found is returned, so it is never worse than the one that was given.

    Args:
        streams: Per device, ops in an order that can run.
        ops: What they are.
        microbatches: Microbatches m.
        limit: Activations that a device may hold; the given streams keep it.
        durations: Time of each kind.
    """
    inputs = ops.inputs(len(streams))
    outputs = ops.outputs(len(streams))
    best, end = streams, _run(streams, inputs, microbatches, durations)
    cost = _cost(streams, end, microbatches, durations)
    current = streams
    while True:
        found = cost
        current = _fill(current, inputs, microbatches, limit, durations, ops.allocate, ops.release, end)
        end = _run(current, inputs, microbatches, durations)
        best, cost = min((best, cost), (current, _cost(current, end, microbatches, durations)), key=lambda pair: pair[1])
        current = _mirrored(current, microbatches)
        end = _run(current, outputs, microbatches, durations)
        current = _mirrored(_fill(current, outputs, microbatches, limit, durations, ops.release, ops.allocate, end), microbatches)
        end = _run(current, inputs, microbatches, durations)
        best, cost = min((best, cost), (current, _cost(current, end, microbatches, durations)), key=lambda pair: pair[1])
        if cost == found:
            return best, cost


def _mirrored(streams: Streams, microbatches: int) -> Streams:
    """The streams from last to first, microbatches counted from the last, so that they ascend again."""
    return [[op - 2 * (op % microbatches) + microbatches - 1 for op in reversed(stream)] for stream in streams]


def _padded(links: Links, microbatches: int) -> list[list[tuple[int, int]]]:
    """Two places in a list of ends, which stand for the ops of microbatch 0; where there are fewer, a last place that is always there."""
    nothing = len(links) * len(links[0]) * microbatches
    return [[tuple([*(op * microbatches for op in ops), nothing, nothing][:2]) for ops in kinds] for kinds in links]


def _run(streams: Streams, links: Links, microbatches: int, durations: Sequence[float]) -> list[float]:
    """Runs the streams as they stand, and returns the end of every op: each starts when its device is free and its inputs are there."""
    devices, size = len(streams), len(durations) * microbatches
    places = _padded(links, microbatches)
    end = [-1.0] * (devices * size) + [0.0] * microbatches
    free, position = [0.0] * devices, [0] * devices
    unfinished = True
    while unfinished:
        unfinished = False
        for device, stream in enumerate(streams):
            clock, waits, base = free[device], places[device], device * size
            for index in range(position[device], size):
                op = stream[index]
                kind, microbatch = divmod(op, microbatches)
                a, b = waits[kind]
                first, second = end[a + microbatch], end[b + microbatch]
                if first < 0 or second < 0:
                    position[device], free[device], unfinished = index, clock, True
                    break
                clock = end[base + op] = max(clock, first, second) + durations[kind]
            else:
                position[device] = size
    return end


def _cost(streams: Streams, end: list[float], microbatches: int, durations: Sequence[float]) -> Cost:
    base = len(durations) * microbatches
    starts = [end[device * base + stream[0]] - durations[stream[0] // microbatches] for device, stream in enumerate(streams)]
    ends = [end[device * base + stream[-1]] for device, stream in enumerate(streams)]
    return max(e - s for e, s in zip(ends, starts, strict=True)), max(ends)


def _fill(
    streams: Streams,
    links: Links,
    microbatches: int,
    limit: int,
    durations: Sequence[float],
    allocate: tuple[int, ...],
    release: tuple[int, ...],
    planned: list[float],
) -> Streams:
    """Runs the streams, and fills idle slots with later ops that are ready, end before the next op is due, and keep the limit.

    The rest of a stream, in its order, always keeps the limit: an op that takes an activation goes ahead only if every
    level that it is moved across has room for one more. So the next op of a stream may always run, and nothing gets
    stuck. When nothing is left that takes an activation, the ops that other devices wait for go before those that only
    give one back.

    Args:
        planned: The end of every op when the streams run as they stand.
    """
    devices, kinds = len(streams), len(durations)
    size = kinds * microbatches
    places = _padded(links, microbatches)
    change = [(kind in allocate) - (kind in release) for kind in range(kinds)]
    leaves = () if LV == 0 or release != (4, 5) else release
    tolerance = 1e-9 * max(durations)
    never = float("inf")
    end = [never] * (devices * size) + [0.0] * microbatches
    position = []
    for stream in streams:
        where = [0] * size
        for index, op in enumerate(stream):
            where[op] = index
        position.append(where)
    done = [[False] * (size + 1) for _ in streams]
    result: Streams = [[] for _ in streams]
    front, level, free = [0] * devices, [0] * devices, [0.0] * devices
    following = [[0] * kinds for _ in streams]  # the next microbatch of each kind
    to_allocate = [len(allocate) * microbatches] * devices
    left = devices * size
    clock = [0.0]
    while left:
        now = heappop(clock)
        soon = now + tolerance
        while clock and clock[0] <= soon:
            heappop(clock)
        for device in range(devices):
            first = front[device]
            if free[device] > soon or first == size:
                continue
            stream, waits, finished, heads = streams[device], places[device], done[device], following[device]
            op = stream[first]
            kind, microbatch = divmod(op, microbatches)
            a, b = waits[kind]
            ready = end[a + microbatch] <= soon and end[b + microbatch] <= soon
            put_off = kind in leaves and not to_allocate[device]
            if ready and not put_off:
                chosen, index = op, first
            else:
                due = never if put_off or (LV==2 and change[kind] < 0) else planned[device * size + op] - durations[kind] + tolerance
                chosen, index = -1, size
                for other in range(kinds):
                    microbatch = heads[other]
                    if microbatch == microbatches or now + durations[other] > due or (put_off and other in leaves):
                        continue
                    place = position[device][other * microbatches + microbatch]
                    a, b = waits[other]
                    if place < index and end[a + microbatch] <= soon and end[b + microbatch] <= soon:
                        if change[other] <= 0 or _room(stream, finished, first, place, level[device], limit, change, microbatches):
                            chosen, index, kind = other * microbatches + microbatch, place, other
                if chosen < 0:
                    if not ready:
                        continue
                    chosen, index = op, first
            finished[index] = True
            while finished[first]:
                first += 1
            front[device] = first
            heads[kind] += 1
            level[device] += change[kind]
            if change[kind] > 0:
                to_allocate[device] -= 1
            free[device] = end[device * size + chosen] = now + durations[kind]
            heappush(clock, free[device])
            result[device].append(chosen)
            left -= 1
    return result


def _room(stream: list[int], finished: list[bool], front: int, index: int, level: int, limit: int, change: list[int], microbatches: int) -> bool:
    """Whether the op at *index* may go to *front*: the levels in between have room for one more."""
    level += 1
    if level > limit:
        return False
    for other in range(front, index):
        if not finished[other]:
            level += change[stream[other] // microbatches]
            if level > limit:
                return False
    return True
