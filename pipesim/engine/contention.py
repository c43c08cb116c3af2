"""The loop of the compiled engine for queues that several devices share; see :mod:`pipesim.engine.kernels`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.engine.kernels import Columns

__all__ = ["Shared", "events"]

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


class Shared(NamedTuple):
    """What *events* wants to know besides.

    Attributes:
        key: (edges,) of those that ask at one time, a queue serves the lowest key + step x edges first.
        lane: (edges,) communication lane on which the edge is a move; -1 for a message.
        lane_first: (lanes + 1,) bounds: the moves of a lane are ``lane_edge[lane_first[lane]:lane_first[lane + 1]]``, in order.
        lane_edge: (moves,) their edges.
    """

    key: NDArray[np.int64]
    lane: Ints
    lane_first: Ints
    lane_edge: Ints


def events(c: Columns, s: Shared, durations: Floats, start: Floats, end: Floats, departed: Floats, at: Ints, at_step: Ints) -> None:
    """Runs all steps in the order of time.

    A clock is an end that is due: at most one per device (of its slot), per queue (of its transfer) and per communication lane
    (of its move). When nothing is due any more at a time, the lowest queue that is idle and asked serves; whatever that
    makes happen at the same time comes before the next choice.

    Args:
        c: The run.
        s: What is shared.
        durations: (slots,)
        start: (steps, slots) zeros; filled.
        end: (steps, slots) filled.
        departed: (steps, edges) filled.
        at: (devices,) filled with the slot at which each device is in the end.
        at_step: (devices,) and in which step; *steps* where it has finished.
    """
    steps, edges = start.shape[0], len(c.target)
    devices, queues, lanes = len(c.low), c.queues, len(s.lane_first) - 1
    free = np.zeros(devices)
    missing = np.empty((steps, len(c.owner)), np.int32)
    missing[:] = c.indegree
    come = np.zeros(steps, np.int64)
    running, passed = np.zeros(devices, np.bool_), np.zeros(devices, np.bool_)  # passed: it has come to the barrier of its step
    stack, stacked, top = np.empty(devices, np.int32), np.zeros(devices, np.bool_), 0
    # a transfer is step x edges + edge; those that ask for a queue are linked in the order in which it will serve them
    head, tail, serving = np.full(queues, -1, np.int64), np.full(queues, -1, np.int64), np.full(queues, -1, np.int64)
    behind, ahead, asked = np.empty(steps * edges, np.int64), np.empty(steps * edges, np.int64), np.empty(steps * edges)
    choosing, choices = np.zeros(queues, np.bool_), 0
    issued, served = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
    # the clocks, a heap by time, and those that one event sets
    heap_time, heap_clock, size = np.empty(devices + queues + lanes), np.empty(devices + queues + lanes, np.int64), 0
    due_time, due_clock = np.empty(devices + lanes + 1), np.empty(devices + lanes + 1, np.int64)
    widest = 1
    for slot in range(len(c.owner)):
        widest = max(widest, c.first[slot + 1] - c.first[slot])
    asking, leaving = np.empty(widest, np.int64), np.empty(widest, np.int64)
    now, running_at_all = 0.0, False
    for device in range(devices - 1, -1, -1):
        at[device], at_step[device] = c.low[device], 0
        stack[top] = device
        stacked[device] = True
        top += 1
    while True:
        due = asks = leaves = 0
        if not running_at_all:
            running_at_all = True  # [5] starts everybody
        elif size and (heap_time[0] <= now or not choices):
            # [1] the earliest clock runs out
            now, clock = heap_time[0], heap_clock[0]
            size -= 1
            time, other, hole = heap_time[size], heap_clock[size], 0
            while 2 * hole + 1 < size:
                child = 2 * hole + 1
                if child + 1 < size and heap_time[child + 1] < heap_time[child]:
                    child += 1
                if heap_time[child] >= time:
                    break
                heap_time[hole], heap_clock[hole] = heap_time[child], heap_clock[child]
                hole = child
            heap_time[hole], heap_clock[hole] = time, other
            if clock < devices:
                step, slot = at_step[clock], at[clock]
                end[step, slot] = free[clock] = now
                running[clock] = False
                at[clock] += 1
                for edge in range(c.first[slot], c.first[slot + 1]):
                    lane = s.lane[edge]
                    if lane >= 0:
                        issued[lane] += 1
                    if lane < 0 or issued[lane] == served[lane] + 1:  # a move waits for those before it
                        asking[asks] = step * edges + edge
                        asks += 1
                stack[top] = clock
                stacked[clock] = True
                top += 1
            elif clock < devices + queues:
                queue = clock - devices
                leaving[0], leaves = serving[queue], 1
                serving[queue] = -1
                if head[queue] >= 0:
                    choosing[queue] = True
                    choices += 1
            else:
                lane = clock - devices - queues
                served[lane] += 1
                if served[lane] < issued[lane]:
                    count = s.lane_first[lane + 1] - s.lane_first[lane]
                    edge = s.lane_edge[s.lane_first[lane] + served[lane] % count]
                    asking[0], asks = served[lane] // count * edges + edge, 1
        elif choices:
            # [2] nothing else happens now: a queue chooses
            queue = 0
            while not choosing[queue]:
                queue += 1
            choosing[queue] = False
            choices -= 1
            moving = head[queue]
            serving[queue] = moving
            head[queue] = behind[moving]
            if head[queue] < 0:
                tail[queue] = -1
            else:
                ahead[head[queue]] = -1
            departed[moving // edges, moving % edges] = now
            due_time[0], due_clock[0], due = now + c.transfer[moving % edges * c.transfers], devices + queue, 1
        else:
            break
        # [3] transfers ask for their queues; those without one are on their way at once
        for which in range(asks):
            moving = asking[which]
            step, edge = moving // edges, moving % edges
            queue = c.queue[edge] if queues else -1
            if queue < 0:
                departed[step, edge] = now
                leaving[leaves] = moving
                leaves += 1
                continue
            asked[moving] = now
            before = tail[queue]
            while before >= 0 and asked[before] == now and s.key[before % edges] + before // edges * edges > s.key[edge] + step * edges:
                before = ahead[before]
            after = head[queue] if before < 0 else behind[before]
            ahead[moving], behind[moving] = before, after
            if before < 0:
                head[queue] = moving
            else:
                behind[before] = moving
            if after < 0:
                tail[queue] = moving
            else:
                ahead[after] = moving
            if serving[queue] < 0 and not choosing[queue]:
                choosing[queue] = True
                choices += 1
        # [4] transfers that have left their queue come after the latency
        for which in range(leaves):
            moving = leaving[which]
            step, edge = moving // edges, moving % edges
            arrival = (departed[step, edge] + c.transfer[edge * c.transfers]) + c.latency[edge * c.latencies]
            if s.lane[edge] >= 0:
                due_time[due], due_clock[due] = arrival, devices + queues + s.lane[edge]
                due += 1
            slot = c.target[edge]
            if slot >= 0:
                start[step, slot] = max(start[step, slot], arrival)
                missing[step, slot] -= 1
                device = c.owner[slot]
                if missing[step, slot] == 0 and at[device] == slot and at_step[device] == step and not stacked[device]:
                    stack[top] = device
                    stacked[device] = True
                    top += 1
        # [5] devices go on where they can
        while top:
            top -= 1
            device = stack[top]
            stacked[device] = False
            step, slot = at_step[device], at[device]
            if running[device] or step == steps:
                continue
            if device < c.meeting and slot == c.gate[device]:
                if not passed[device]:
                    passed[device] = True
                    come[step] += 1
                    if come[step] == c.meeting:
                        for other in range(c.meeting):
                            free[other] = now
                            if other != device and not stacked[other]:
                                stack[top] = other
                                stacked[other] = True
                                top += 1
                if come[step] < c.meeting:
                    continue
            if slot == c.high[device]:
                at_step[device] += 1
                passed[device] = False
                if at_step[device] < steps:
                    at[device] = c.low[device]
                    stack[top] = device
                    stacked[device] = True
                    top += 1
            elif missing[step, slot] == 0:
                start[step, slot] = max(start[step, slot], free[device])
                running[device] = True
                due_time[due], due_clock[due] = start[step, slot] + durations[slot], device
                due += 1
        # [6] the clocks that were set
        for which in range(due):
            time, hole = due_time[which], size
            size += 1
            while hole and heap_time[(hole - 1) // 2] > time:
                heap_time[hole], heap_clock[hole] = heap_time[(hole - 1) // 2], heap_clock[(hole - 1) // 2]
                hole = (hole - 1) // 2
            heap_time[hole], heap_clock[hole] = time, due_clock[which]
