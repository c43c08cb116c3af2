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

Streams = list[list[int]]  # per device, ops in order; an op is kind * m + microbatch, a kind is an index into Ops.kinds
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

    def inputs(self, devices: int) -> list[list[list[int]]]:
        """Per device and kind, what it waits for: device * kinds + kind.

        Chunk 0 goes forward from device 0 to p - 1 and chunk 1 back to 0; gradients go the same way round again:
        chunk 1 from 0 to p - 1, chunk 0 back. The turns, where the device stays the same, link two chunks.
        """
        count, last = len(self.kinds), devices - 1
        table = []
        for device in range(devices):
            up, down = (device - 1) * count, (device + 1) * count
            own = device * count
            waits = [
                [up] if device else [],
                [down + 1] if device < last else [own],
                [up + 2] if device else [own + 1],
                [down + 3] if device < last else [own + 2],
                *([own + kind - 2] for kind in range(4, count)),
            ]
            table.append(waits)
        return table


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
    outputs = _reversed_links(inputs)
    best, cost = streams, _cost(streams, inputs, microbatches, durations)
    current = streams
    while True:
        found = cost
        current = _fill(current, inputs, microbatches, limit, durations, ops.allocate, ops.release)
        best, cost = _better(best, cost, current, inputs, microbatches, durations)
        current = _mirrored(current, microbatches)
        current = _fill(current, outputs, microbatches, limit, durations, ops.release, ops.allocate)
        current = _mirrored(current, microbatches)
        best, cost = _better(best, cost, current, inputs, microbatches, durations)
        if cost == found:
            return best, cost


def _better(
    best: Streams, cost: Cost, other: Streams, inputs: list[list[list[int]]], microbatches: int, durations: Sequence[float]
) -> tuple[Streams, Cost]:
    other_cost = _cost(other, inputs, microbatches, durations)
    return (other, other_cost) if other_cost < cost else (best, cost)


def _reversed_links(inputs: list[list[list[int]]]) -> list[list[list[int]]]:
    """What each op waits for when time runs backwards: those that wait for it when time runs forwards."""
    count = len(inputs[0])
    result: list[list[list[int]]] = [[[] for _ in kinds] for kinds in inputs]
    for device, kinds in enumerate(inputs):
        for kind, waits in enumerate(kinds):
            for before in waits:
                result[before // count][before % count].append(device * count + kind)
    return result


def _mirrored(streams: Streams, microbatches: int) -> Streams:
    """The streams from last to first, microbatches counted from the last, so that they ascend again."""
    return [[op - 2 * (op % microbatches) + microbatches - 1 for op in reversed(stream)] for stream in streams]


def _run(streams: Streams, inputs: list[list[list[int]]], microbatches: int, durations: Sequence[float]) -> list[float]:
    """Runs the streams as they stand: each op starts when its device is free and its inputs are there."""
    devices, kinds = len(streams), len(durations)
    end: list[float] = [-1.0] * (devices * kinds * microbatches)
    free, first, position = [0.0] * devices, [-1.0] * devices, [0] * devices
    waiting = True
    while waiting:
        waiting = False
        for device in range(devices):
            stream, clock, waits = streams[device], free[device], inputs[device]
            base = device * kinds * microbatches
            for index in range(position[device], len(stream)):
                op = stream[index]
                kind, microbatch = divmod(op, microbatches)
                start = clock
                for before in waits[kind]:
                    there = end[before * microbatches + microbatch]
                    if there < 0:
                        break
                    if there > start:
                        start = there
                else:
                    if first[device] < 0:
                        first[device] = start
                    clock = end[base + op] = start + durations[kind]
                    continue
                position[device], waiting = index, True
                break
            else:
                position[device] = len(stream)
            free[device] = clock
    return end


def _cost(streams: Streams, inputs: list[list[list[int]]], microbatches: int, durations: Sequence[float]) -> Cost:
    end = _run(streams, inputs, microbatches, durations)
    size = len(durations) * microbatches
    spans = [end[d * size + s[-1]] - end[d * size + s[0]] + durations[s[0] // microbatches] for d, s in enumerate(streams)]
    return max(spans), max(end)


def _fill(
    streams: Streams,
    inputs: list[list[list[int]]],
    microbatches: int,
    limit: int,
    durations: Sequence[float],
    allocate: tuple[int, ...],
    release: tuple[int, ...],
) -> Streams:
    """Runs the streams, and fills idle slots with the first later op that is ready and keeps the limit.

    The rest of a stream, in its order, always keeps the limit: an op that takes an activation goes ahead only if every
    level that it is moved across has room for one more. So the next op of a stream may always run, and nothing gets
    stuck. When nothing is left that takes an activation, the ops that other devices wait for go before those that only
    give one back.
    """
    devices, kinds = len(streams), len(durations)
    size = kinds * microbatches
    change = [0] * kinds
    for kind in allocate:
        change[kind] = 1
    for kind in release:
        change[kind] = -1
    tolerance = 1e-9 * max(durations)
    planned = _run(streams, inputs, microbatches, durations)
    never = float("inf")
    end = [never] * (devices * size)
    position = [[0] * size for _ in streams]
    for device, stream in enumerate(streams):
        for index, op in enumerate(stream):
            position[device][op] = index
    done = [[False] * size for _ in streams]
    result: Streams = [[] for _ in streams]
    head, level, free = [0] * devices, [0] * devices, [0.0] * devices
    heads = [[0] * kinds for _ in streams]  # the next microbatch of each kind
    left_to_allocate = [len(allocate) * microbatches] * devices
    left = devices * size
    clock = [0.0]
    while left:
        now = heappop(clock) + tolerance
        while clock and clock[0] <= now:
            heappop(clock)
        for device in range(devices):
            if free[device] > now or head[device] == size:
                continue
            stream, finished = streams[device], done[device]
            front = head[device]
            chosen = -1
            best = (2, 0)
            for kind in range(kinds):
                microbatch = heads[device][kind]
                if microbatch == microbatches:
                    continue
                for before in inputs[device][kind]:
                    if end[before * microbatches + microbatch] > now:
                        break
                else:
                    op = kind * microbatches + microbatch
                    index = position[device][op]
                    rank = (int(change[kind] < 0 and not left_to_allocate[device]), index)
                    if index != front and rank[0] == 0 and now + durations[kind] > planned[device * size + stream[front]] - durations[stream[front] // microbatches] + 2 * tolerance and change[stream[front] // microbatches] >= (0 if left_to_allocate[device] else 0):
                        continue
                    if rank < best and (change[kind] <= 0 or index == front or _room(stream, finished, front, index, level[device], limit, change, microbatches)):
                        best, chosen = rank, op
            if chosen < 0:
                continue
            kind = chosen // microbatches
            finished[position[device][chosen]] = True
            while head[device] < size and finished[head[device]]:
                head[device] += 1
            heads[device][kind] += 1
            level[device] += change[kind]
            left_to_allocate[device] -= change[kind] > 0
            free[device] = end[device * size + chosen] = now - tolerance + durations[kind]
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
