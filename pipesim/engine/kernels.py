"""The loops of the compiled engine: plain Python over arrays, which :mod:`pipesim.jit` gives to numba.

    chain    one run whose queues have one sender each: a queue's order is then that of the sender's stream, so ops may be
             taken in any order in which inputs come first; it goes depth first, each device for as long as it can go on
    many     the same for many vectors of durations at once; the order of the ops is the same for all
    degrees  how many edges leave each slot, and come in
    events   one run whose queues several devices share: who is first depends on time, so it goes in the order of time

The sums are those of the meaning, in its order: start = max(...), end = start + duration, and
arrival = (max(sent, link free) + transfer) + latency.

numba compiles each function once, for one signature; none calls another.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK", "Columns", "Figures", "chain", "degrees", "many"]

BLOCK = 8  # runs that `many` takes at once: a cache line of float64

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


class Columns(NamedTuple):
    """A run as the loops see it. An edge goes from the slot at whose end it leaves to the slot that waits for it.

    Devices without slots are left out. Each gradient reduction is one more device, after the others, with one slot of no
    duration, gradients -> reduction -> updates; the loops know nothing of it.

    Attributes:
        low: (devices,) first slot of each device.
        gate: (devices,) slot before which it waits at the barrier; *high* where it waits at its end, or there is none.
        high: (devices,) one past its last slot.
        meeting: Devices that meet at the barrier, the first ones; 0 for no barrier.
        owner: (slots,) device.
        indegree: (slots,) edges that come in.
        first: (slots + 1,) bounds: the edges that leave slot i are ``first[i]:first[i + 1]``.
        target: (edges,) slot that waits; -1 for none.
        queue: (edges,) number of the queue, or -1 where only latency counts; (1,) where there is no queue.
        transfer: (edges,) time for which it holds its queue; (1,) if all are alike.
        latency: (edges,); (1,) if all are alike.
        transfers: 1 if *transfer* has a number per edge, 0 if all are alike; what to multiply an edge with.
        latencies: The same of *latency*.
        queues: Number of queues.
    """

    low: Ints
    gate: Ints
    high: Ints
    meeting: int
    owner: Ints
    indegree: Ints
    first: Ints
    target: Ints
    queue: Ints
    transfer: Floats
    latency: Floats
    transfers: int
    latencies: int
    queues: int


class Figures(NamedTuple):
    """What becomes of many runs of one step: a row per run.

    Attributes:
        first_start: (runs, devices) start of each device's first slot.
        last_end: (runs, devices) end of its last slot.
        busy: (runs, devices) its time in slots.
        watched: (watched,) slots whose ends are wanted.
        watched_end: (runs, watched) their ends.
        start: (runs, slots) start of every slot, or (0, 0) if that is not wanted.
        end: The same with ends.
    """

    first_start: Floats
    last_end: Floats
    busy: Floats
    watched: Ints
    watched_end: Floats
    start: Floats
    end: Floats

    @classmethod
    def empty(cls, runs: int, devices: int, slots: int, watched: Ints, keep_times: bool) -> Figures:
        """Room for so many runs."""
        times = (runs, slots) if keep_times else (0, 0)
        first_start, last_end, busy = (np.zeros((runs, devices)) for _ in range(3))
        return cls(first_start, last_end, busy, watched, np.empty((runs, len(watched))), np.empty(times), np.empty(times))


def degrees(source: NDArray[np.int64], target: NDArray[np.int64], first: Ints, indegree: Ints) -> None:
    """Counts the edges of each slot.

    Args:
        source: (edges,) ascending.
        target: (edges,) -1 for none.
        first: (slots + 1,) zeros; filled with bounds: the edges that leave slot i are ``first[i]:first[i + 1]``.
        indegree: (slots,) zeros; filled with edges that come in.
    """
    for edge in range(len(source)):
        first[source[edge] + 1] += 1
        if target[edge] >= 0:
            indegree[target[edge]] += 1
    for slot in range(len(indegree)):
        first[slot + 1] += first[slot]


def chain(c: Columns, durations: Floats, start: Floats, end: Floats, departed: Floats, order: Ints, at: Ints) -> tuple[int, int]:
    """Runs all steps, one after the other: nothing in a step waits for a later one.

    Args:
        c: The run; no edge without target.
        durations: (slots,)
        start: (steps, slots) zeros; filled.
        end: (steps, slots) filled.
        departed: (steps, edges) filled; (0, 0) where nothing queues.
        order: (slots,) filled with the slots as they were taken; those before the barrier come first.
        at: (devices,) filled with the slot at which each device is in the end.

    Returns:
        Steps finished; slots taken before the barrier.
    """
    devices = len(c.low)
    free = np.zeros(devices)
    queue_free = np.zeros(c.queues)
    stack = np.empty(devices, np.int32)
    stacked = np.zeros(devices, np.bool_)
    queued = departed.shape[0] > 0
    before_barrier = 0
    for step in range(start.shape[0]):
        missing = c.indegree.copy()
        ready, ended = start[step], end[step]  # until a slot starts, its start is when the last of the inputs so far came
        taken = 0
        for device in range(devices):
            at[device] = c.low[device]
        for phase in range(2):  # up to the barrier, and after it
            if phase == 1:
                before_barrier = taken
                come = 0.0
                for device in range(c.meeting):
                    if at[device] != c.gate[device]:
                        return step, before_barrier
                    come = max(come, free[device])
                for device in range(c.meeting):
                    free[device] = come
            limit = c.high if phase else c.gate
            top = 0
            for device in range(devices - 1, -1, -1):
                if at[device] < limit[device]:
                    stack[top] = device
                    stacked[device] = True
                    top += 1
            while top:
                top -= 1
                device = stack[top]
                stacked[device] = False
                slot, now = at[device], free[device]
                while slot < limit[device] and missing[slot] == 0:
                    now = max(now, ready[slot])
                    ready[slot] = now
                    now += durations[slot]
                    ended[slot] = now
                    order[taken] = slot
                    taken += 1
                    for edge in range(c.first[slot], c.first[slot + 1]):
                        arrival = now
                        if queued:
                            queue = c.queue[edge]
                            if queue >= 0:
                                arrival = max(arrival, queue_free[queue])
                                departed[step, edge] = arrival
                                arrival += c.transfer[edge * c.transfers]
                                queue_free[queue] = arrival
                            else:
                                departed[step, edge] = arrival
                        arrival += c.latency[edge * c.latencies]
                        waiting = c.target[edge]
                        ready[waiting] = max(ready[waiting], arrival)
                        missing[waiting] -= 1
                        if missing[waiting] == 0:
                            other = c.owner[waiting]
                            if at[other] == waiting and not stacked[other]:
                                stack[top] = other
                                stacked[other] = True
                                top += 1
                    slot += 1
                at[device], free[device] = slot, now
        for device in range(devices):
            if at[device] != c.high[device]:
                return step, before_barrier
    return start.shape[0], before_barrier


def many(c: Columns, order: Ints, before_barrier: int, durations: Floats, device: Ints, found: Figures) -> None:
    """Runs one step for many vectors of durations, BLOCK at a time.

    Args:
        c: The run, as for *chain*.
        order: (slots,) as *chain* fills it.
        before_barrier: How many of them are.
        durations: (runs, slots but for reductions), at least BLOCK runs.
        device: (devices but for reductions,) column of each in *found*.
        found: Filled.
    """
    runs, real = durations.shape
    devices, slots = len(c.low), len(order)
    # a row of BLOCK runs per slot, device and queue
    ready, time = np.empty((slots, BLOCK)), np.zeros((slots, BLOCK))
    free, work, queue_free = np.empty((devices, BLOCK)), np.empty((devices, BLOCK)), np.empty((c.queues, BLOCK))
    now, come = np.empty(BLOCK), np.empty(BLOCK)
    for block in range((runs + BLOCK - 1) // BLOCK):
        base = min(block * BLOCK, runs - BLOCK)  # the last block may do some runs again
        for run in range(BLOCK):
            for slot in range(real):
                time[slot, run] = durations[base + run, slot]
        ready[:] = 0.0
        free[:] = 0.0
        work[:] = 0.0
        queue_free[:] = 0.0
        for place in range(slots):
            if c.meeting and place == before_barrier:
                come[:] = 0.0
                for other in range(c.meeting):
                    for run in range(BLOCK):
                        come[run] = max(come[run], free[other, run])
                for other in range(c.meeting):
                    if c.gate[other] < c.high[other]:
                        free[other] = come
            slot = order[place]
            own = c.owner[slot]
            for run in range(BLOCK):
                begun = max(free[own, run], ready[slot, run])
                ready[slot, run] = begun
                now[run] = begun + time[slot, run]
                free[own, run] = now[run]
                work[own, run] += now[run] - begun
            for edge in range(c.first[slot], c.first[slot + 1]):
                waiting, queue = c.target[edge], c.queue[edge] if c.queues else -1
                if queue >= 0:
                    for run in range(BLOCK):
                        queue_free[queue, run] = max(now[run], queue_free[queue, run]) + c.transfer[edge * c.transfers]
                        ready[waiting, run] = max(ready[waiting, run], queue_free[queue, run] + c.latency[edge * c.latencies])
                else:
                    for run in range(BLOCK):
                        ready[waiting, run] = max(ready[waiting, run], now[run] + c.latency[edge * c.latencies])
        for run in range(BLOCK):
            for own in range(len(device)):
                found.first_start[base + run, device[own]] = ready[c.low[own], run]
                found.last_end[base + run, device[own]] = free[own, run]
                found.busy[base + run, device[own]] = work[own, run]
            for which in range(len(found.watched)):
                slot = found.watched[which]
                found.watched_end[base + run, which] = ready[slot, run] + time[slot, run]
            if found.start.shape[0]:
                for slot in range(real):
                    found.start[base + run, slot] = ready[slot, run]
                    found.end[base + run, slot] = ready[slot, run] + time[slot, run]
