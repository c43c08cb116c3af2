"""From a building block to the streams of a whole run: repeat, squeeze, reorder warm-up and cool-down, squeeze.

The devices are folded in a V: device r holds stage r (chunk 0) and stage 2p - 1 - r (chunk 1), so both ends of the
pipeline are on device 0. A *building block* says in which slot each op of one microbatch starts; microbatch k does the
same k periods later. Where no two ops of a device fall on one slot modulo the period, this can go on without a bubble,
and holds as many activations as the life times in the block say, whatever the number of microbatches.

Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), for the four steps. How warm-up
and cool-down are reordered is derived here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from pipesim.op import Kind
from pipesim.schedule import Schedule

__all__ = ["FULL", "SPLIT", "Cost", "Ops", "Streams", "cost_of", "repeat", "tighten", "to_schedule"]

Streams = list[list[int]]  # per device, its ops in order; op number = kind * microbatches + microbatch, kind an index into Ops.kinds
Links = list[list[list[int]]]  # per device and kind, ops of the same microbatch: device * kinds + kind
Cost = tuple[float, float]  # largest span of a device (last end - first start), makespan


@dataclass(frozen=True)
class Ops:
    """The ops of one microbatch on one device.

    Attributes:
        kinds: (chunk, kind) of each: the forwards of chunks 0 and 1, the backwards (or I) of 1 and 0, the W of 1 and 0.
        change: What each does to the activations that the device holds.
    """

    kinds: tuple[tuple[int, Kind], ...]
    change: tuple[int, ...]

    def inputs(self, devices: int) -> Links:
        """What each op waits for: activations go down chunk 0 and back up chunk 1, then gradients down chunk 1 and back up chunk 0."""
        count, last = len(self.kinds), devices - 1
        table: Links = []
        for device in range(devices):
            up, own, down = (count * (device + step) for step in (-1, 0, 1))
            waits = [
                [up] if device else [],
                [down + 1 if device < last else own],  # on the last device the V turns
                [up + 2 if device else own + 1],  # on device 0 the loss turns activations into gradients
                [down + 3 if device < last else own + 2],
            ]
            table.append(waits + [[own + kind - 2] for kind in range(4, count)])
        return table

    def outputs(self, devices: int) -> Links:
        """What waits for each op, which is what it waits for when time runs backwards."""
        count = len(self.kinds)
        table: Links = [[[] for _ in self.kinds] for _ in range(devices)]
        for device, waits in enumerate(self.inputs(devices)):
            for kind, inputs in enumerate(waits):
                for before in inputs:
                    table[before // count][before % count].append(device * count + kind)
        return table


SPLIT = Ops(((0, Kind.F), (1, Kind.F), (1, Kind.I), (0, Kind.I), (1, Kind.W), (0, Kind.W)), (1, 1, 0, 0, -1, -1))
FULL = Ops(((0, Kind.F), (1, Kind.F), (1, Kind.B), (0, Kind.B)), (1, 1, -1, -1))


def repeat(block: NDArray[np.int64], period: int, microbatches: int) -> Streams:
    """The streams of a block that is repeated every *period* slots.

    Args:
        block: (kinds, devices) the slot in which each op of microbatch 0 starts.
        period: Slots from one microbatch to the next.
        microbatches: Microbatches m.
    """
    start = block.T[:, :, None] + period * np.arange(microbatches)
    streams: Streams = np.argsort(start.reshape(len(start), -1), axis=1, kind="stable").tolist()
    return streams


def to_schedule(streams: Streams, ops: Ops, microbatches: int, name: str) -> Schedule:
    """The streams as a schedule on the V placement."""
    chunk, kind = np.array([chunk for chunk, _ in ops.kinds]), np.array([int(kind) for _, kind in ops.kinds])
    devices = []
    for device, stream in enumerate(streams):
        index, microbatch = np.divmod(np.array(stream), microbatches)
        devices.append((np.where(chunk[index] == 0, device, 2 * len(streams) - 1 - device), kind[index], microbatch))
    return Schedule.from_columns(devices, name=name)


def tighten(
    streams: Streams, ops: Ops, microbatches: int, limit: int, durations: Sequence[float], *, passes: int | None = None
) -> tuple[Cost, Streams]:
    """Reorders warm-up and cool-down, so that less is left idle, and never holds more than *limit* activations.

    Squeezing the streams needs no change: a device starts its next op as soon as it can. What that leaves idle, one pass
    fills with later ops whose inputs are there (:func:`_fill`); this packs the warm-up. The next pass does the same from
    the other end, with time and data flow reversed; this packs the cool-down. And so on while it helps.

    Args:
        streams: Per device, its ops, in an order that runs and keeps the limit.
        ops: What they are.
        microbatches: Microbatches m.
        limit: Activations that a device may hold.
        durations: Time of each kind.
        passes: The most passes to make. None for no limit.

    Returns:
        The cost and the streams of the best order there was, the given one included.
    """
    inputs, outputs = ops.inputs(len(streams)), ops.outputs(len(streams))
    backwards = tuple(-change for change in ops.change)
    best = cost_of(streams, ops, microbatches, durations), streams
    current, done, stale = streams, 0, 0
    while done != passes and stale < 3:
        if done % 2:
            turned = _reversed(current, microbatches)
            current = _reversed(_fill(turned, outputs, inputs, microbatches, limit, durations, backwards), microbatches)
        else:
            current = _fill(current, inputs, outputs, microbatches, limit, durations, ops.change)
        cost = cost_of(current, ops, microbatches, durations)
        stale = stale + 1 if cost >= best[0] else 0
        if not stale:
            best = cost, current
        done += 1
    return best


def cost_of(streams: Streams, ops: Ops, microbatches: int, durations: Sequence[float]) -> Cost:
    """The largest span of a device and the makespan, when every op starts as soon as it can."""
    end = _run(streams, ops.inputs(len(streams)), microbatches, durations)
    size = len(durations) * microbatches
    last = [end[device * size + stream[-1]] for device, stream in enumerate(streams)]
    first = [end[device * size + stream[0]] - durations[stream[0] // microbatches] for device, stream in enumerate(streams)]
    return max(e - s for e, s in zip(last, first, strict=True)), max(last) - min(first)


def _reversed(streams: Streams, microbatches: int) -> Streams:
    """The streams from last to first, with microbatches counted from the last, so that they still ascend."""
    return [[op - 2 * (op % microbatches) + microbatches - 1 for op in reversed(stream)] for stream in streams]


def _places(links: Links, microbatches: int) -> list[list[tuple[int, int]]]:
    """For each device and kind, where a list of ends (device, kind, microbatch) has those of its two inputs.

    Microbatch k is k places further. A missing input stands behind the list, where the ends are always past.
    """
    nothing = len(links) * len(links[0]) * microbatches
    padded = [[[*(op * microbatches for op in ops), nothing, nothing] for ops in kinds] for kinds in links]
    return [[(ends[0], ends[1]) for ends in kinds] for kinds in padded]


def _run(streams: Streams, links: Links, microbatches: int, durations: Sequence[float]) -> list[float]:
    """The end of every op (device, kind, microbatch) when each starts as soon as its device is free and its inputs are there."""
    size = len(durations) * microbatches
    places = _places(links, microbatches)
    end = [-1.0] * (len(streams) * size) + [0.0] * microbatches
    free, position = [0.0] * len(streams), [0] * len(streams)
    unfinished = True
    while unfinished:
        unfinished = False
        for device, stream in enumerate(streams):
            clock, waits, base = free[device], places[device], device * size
            for index in range(position[device], size):
                op = stream[index]
                kind, microbatch = divmod(op, microbatches)
                a, b = waits[kind]
                one, other = end[a + microbatch], end[b + microbatch]
                if one < 0 or other < 0:
                    position[device], free[device], unfinished = index, clock, True
                    break
                clock = end[base + op] = max(clock, one, other) + durations[kind]
            else:
                position[device] = size
    return end


def _fill(
    streams: Streams, links: Links, opposite: Links, microbatches: int, limit: int, durations: Sequence[float], change: tuple[int, ...]
) -> Streams:
    """Runs the streams; a device whose next op is not there yet does the first later one that is ready and allowed.

    Allowed is what ends before the next op was due, so no op comes later than it did, and what keeps the memory limit: an
    op that takes an activation may go ahead if every level that it is moved across has room for one more. What is left of a
    stream thus keeps the limit in its order, its next op may always run, and nothing gets stuck.

    Two ops can be put off. One that gives an activation back, if it is not ready. And one that no other waits for (W), when
    nothing is left that takes an activation: then all others go first, and W fill what they leave idle.

    Args:
        streams: Per device, its ops.
        links: What each op waits for.
        opposite: What waits for each op.
        microbatches: Microbatches m.
        limit: Activations that a device may hold.
        durations: Time of each kind.
        change: What each kind does to the activations held.
    """
    kinds, size = len(durations), len(durations) * microbatches
    places = _places(links, microbatches)
    last = [not any(waiting[kind] for waiting in opposite) for kind in range(kinds)]
    due = _run(streams, links, microbatches, durations)
    tolerance, never = 1e-9 * max(durations), float("inf")
    end = [never] * (len(streams) * size) + [0.0] * microbatches
    index_of = []
    for stream in streams:
        indices = [0] * size
        for index, op in enumerate(stream):
            indices[op] = index
        index_of.append(indices)
    steps = [[change[op // microbatches] for op in stream] for stream in streams]
    done = [[False] * (size + 1) for _ in streams]
    following = [[0] * kinds for _ in streams]  # the next microbatch of each kind; within a kind they ascend
    front, level, free = [0] * len(streams), [0] * len(streams), [0.0] * len(streams)
    to_allocate = [sum(step > 0 for step in change) * microbatches] * len(streams)
    result: Streams = [[] for _ in streams]
    clock = [0.0]
    while clock:
        now = heappop(clock)
        soon = now + tolerance
        while clock and clock[0] <= soon:
            heappop(clock)
        for device, stream in enumerate(streams):
            index = front[device]
            if index == size or free[device] > soon:
                continue
            waits, finished, heads = places[device], done[device], following[device]
            op = stream[index]
            kind, microbatch = divmod(op, microbatches)
            a, b = waits[kind]
            ready = end[a + microbatch] <= soon and end[b + microbatch] <= soon
            put_off = last[kind] and not to_allocate[device]
            if put_off or not ready:
                until = never if put_off or change[kind] < 0 else due[device * size + op] - durations[kind] + tolerance
                chosen = size
                for other, head in enumerate(heads):
                    if head == microbatches or now + durations[other] > until or (put_off and last[other]):
                        continue
                    place = index_of[device][other * microbatches + head]
                    a, b = waits[other]
                    if (
                        place < chosen
                        and end[a + head] <= soon
                        and end[b + head] <= soon
                        and (change[other] <= 0 or _room(steps[device], finished, index, place, limit - level[device] - 1))
                    ):
                        chosen = place
                if chosen < size:
                    index, op = chosen, stream[chosen]
                    kind = op // microbatches
                elif not ready:
                    continue
            finished[index] = True
            while finished[front[device]]:
                front[device] += 1
            heads[kind] += 1
            level[device] += change[kind]
            to_allocate[device] -= change[kind] > 0
            free[device] = end[device * size + op] = now + durations[kind]
            heappush(clock, free[device])
            result[device].append(op)
    return result


def _room(steps: list[int], finished: list[bool], front: int, place: int, room: int) -> bool:
    """Whether an op that takes an activation may go from *place* to *front*, where *room* more would fit after it."""
    if room < 0:
        return False
    for index in range(front, place):
        if not finished[index]:
            room -= steps[index]
            if room < 0:
                return False
    return True
