"""Loops over the rows of a schedule and the slots of a run: plain Python over arrays, which :mod:`pipesim.jit` gives to numba.

    survey         what kinds, stages and microbatches there are
    place          which row holds which op
    sound          whether every op stands once, and after its inputs
    messages       the edges between two devices
    homes          which device lists which stage
    busy           time in slots, by device
    idle           idle time by cause
    peaks          the highest level on each device
    peaks_by_kind  the same where all ops of a kind are alike
    memory_peaks   the same of memory in which messages take room

A loop says in one pass what NumPy says in twenty calls, each of which costs more than a thousand ops do. One rule serves them
all: where numba is loaded they are used, whatever the size; elsewhere NumPy gives the same, to the bit. Two know the chain of
stages alone, sound and messages; where there is a stage graph, NumPy answers.

Columns of a schedule are read-only, results are not; numba compiles each loop once, for these types. Many take

    device, stage, kind, microbatch, joined   (rows,) each, of the schedule
    table_of, tables                          (kinds,) the table of each kind, -1 for none; (tables, stages, microbatches) rows
    bounds                                    (devices + 1,): the slots of device d are bounds[d]:bounds[d + 1]
"""
# ruff: noqa: D417  what many take is said once, above

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["busy", "homes", "idle", "memory_peaks", "messages", "peaks", "peaks_by_kind", "place", "sound", "survey"]

Ints = NDArray[np.int32]
Kinds = NDArray[np.int8]
Floats = NDArray[np.float64]

F, B, I, W, R, U = range(6)  # numba wants plain numbers; these are Kind's
REDUCE_GRAD, UNSHARD, RESHARD = 6, 11, 12


def survey(
    device: Ints, stage: Ints, kind: Kinds, microbatch: Ints, joined: NDArray[np.bool_], counts: NDArray[np.int64], bounds: NDArray[np.int64]
) -> tuple[int, int, bool]:
    """Counts the rows of each kind and device.

    Args:
        counts: (kinds,) zeros; filled.
        bounds: (devices + 1,) zeros; filled: the rows of device d are ``bounds[d]:bounds[d + 1]``.

    Returns:
        The highest stage, the highest microbatch that a forward or backward carries (-1 for none), and whether there are pairs.
    """
    highest, last, pairs = -1, -1, False
    for row in range(len(kind)):
        counts[kind[row]] += 1
        bounds[device[row] + 1] += 1
        highest = max(highest, stage[row])
        if kind[row] <= R:
            last = max(last, microbatch[row])
        if joined[row]:
            pairs = True
    for number in range(1, len(bounds)):
        bounds[number] += bounds[number - 1]
    return highest, last, pairs


def place(stage: Ints, kind: Kinds, microbatch: Ints, table_of: NDArray[np.int64], tables: NDArray[np.int32]) -> None:
    """Writes the number of each row where its stage and microbatch are; of an op that is listed twice, the last.

    Args:
        tables: (tables, stages, microbatches) -1 everywhere; filled.
    """
    for row in range(len(kind)):
        table = table_of[kind[row]]
        if table >= 0 and microbatch[row] >= 0:
            tables[table, stage[row], microbatch[row]] = row


def sound(
    device: Ints, stage: Ints, kind: Kinds, microbatch: Ints, joined: NDArray[np.bool_], table_of: NDArray[np.int64], tables: NDArray[np.int32]
) -> bool:
    """Whether F, B, I, W and R are right, and all pairs: each op once, where its activation is, after its inputs, none missing.

    The caller has seen that there are as many forwards as stages times microbatches. A no says nothing of where the fault is:
    :mod:`pipesim.check` looks for it.

    """
    stages, microbatches = tables.shape[1], tables.shape[2]
    full, half, weight, again = table_of[B], table_of[I], table_of[W], table_of[R]
    backwards = np.zeros(stages, np.int64)
    inputs = np.empty(2, np.int64)
    for row in range(len(kind)):
        what, s, i = kind[row], stage[row], microbatch[row]
        if joined[row] and (row == 0 or device[row - 1] != device[row] or what > U or kind[row - 1] > U or joined[row - 1]):
            return False
        if what > R:
            if i < 0 and what not in (REDUCE_GRAD, UNSHARD, RESHARD):
                return False
            continue
        if i < 0 or tables[table_of[what], s, i] != row:
            return False
        forward = tables[table_of[F], s, i]
        if device[forward] != device[row]:
            return False
        inputs[0] = forward if what != F else -1
        inputs[1] = -1
        if what == F:
            if s > 0:
                inputs[1] = tables[table_of[F], s - 1, i]
        elif what in (B, I):
            backwards[s] += 1
            if what == B and ((half >= 0 and tables[half, s, i] >= 0) or (weight >= 0 and tables[weight, s, i] >= 0)):
                return False
            if what == I and (weight < 0 or tables[weight, s, i] < 0):
                return False
            if s + 1 < stages:
                inputs[1] = -1 if full < 0 else tables[full, s + 1, i]
                if inputs[1] < 0 and half >= 0:
                    inputs[1] = tables[half, s + 1, i]
            if again >= 0 and (tables[again, s, i] > row or (joined[row] and tables[again, s, i] == row - 1)):
                return False
        elif what == W:
            if half < 0 or tables[half, s, i] < 0:
                return False
            inputs[1] = tables[half, s, i]
        elif (full < 0 or tables[full, s, i] < 0) and (half < 0 or tables[half, s, i] < 0):  # R
            return False
        for needed in inputs:
            if needed >= 0 and device[needed] == device[row] and (needed > row or (joined[row] and needed == row - 1)):
                return False
    for s in range(stages):  # noqa: SIM110  numba has no all()
        if backwards[s] != 0 and (backwards[s] != microbatches or (s + 1 < stages and backwards[s + 1] == 0)):
            return False
    return True


def messages(
    device: Ints,
    stage: Ints,
    kind: Kinds,
    microbatch: Ints,
    table_of: NDArray[np.int64],
    tables: NDArray[np.int32],
    source: Ints,
    target: Ints,
) -> int:
    """Finds the edges of the chain that go from one device to another, in the order of the rows that they leave.

    Args:
        source: (rows,) filled with rows that send.
        target: (rows,) filled with rows that receive.

    Returns:
        How many there are.
    """
    count = 0
    for row in range(len(kind)):
        what, s, i = kind[row], stage[row], microbatch[row]
        waiting = -1
        if what == F:
            if s + 1 < tables.shape[1]:
                waiting = tables[table_of[F], s + 1, i]
        elif what in (B, I) and s > 0:
            if table_of[B] >= 0:
                waiting = tables[table_of[B], s - 1, i]
            if waiting < 0 and table_of[I] >= 0:
                waiting = tables[table_of[I], s - 1, i]
        if waiting >= 0 and device[waiting] != device[row]:
            source[count] = row
            target[count] = waiting
            count += 1
    return count


def homes(device: Ints, stage: Ints, listed: NDArray[np.bool_]) -> None:
    """Marks which device lists which stage.

    Args:
        listed: (stages, devices) False; filled.
    """
    for row in range(len(stage)):
        listed[stage[row], device[row]] = True


def busy(start: Floats, end: Floats, bounds: NDArray[np.int64], result: Floats) -> None:
    """Adds up the time that slots take on each device.

    Args:
        start: (slots,)
        end: (slots,)
        result: (devices,) zeros; filled.
    """
    for device in range(len(result)):
        for slot in range(bounds[device], bounds[device + 1]):
            result[device] += end[slot] - start[slot]


def peaks(start: Floats, end: Floats, bounds: NDArray[np.int64], result: Floats) -> None:
    """The highest level that each device reaches.

    Args:
        start: (slots,) what is added when a slot starts.
        end: (slots,) what is taken away when it ends.
        result: (devices,) zeros; filled.
    """
    for device in range(len(result)):
        level, highest = 0.0, 0.0
        for slot in range(bounds[device], bounds[device + 1]):
            level += start[slot] - end[slot]
            highest = max(highest, level + end[slot])
        result[device] = highest


def peaks_by_kind(kind: Kinds, up: Floats, down: Floats, bounds: NDArray[np.int64], result: Floats) -> None:
    """The same where what is added and taken away depends on the kind of an op alone, and every row is a slot.

    Args:
        up: (kinds,) what is added when a slot starts.
        down: (kinds,) what is taken away when it ends.
        result: (devices,) zeros; filled.
    """
    for device in range(len(result)):
        level, highest = 0.0, 0.0
        for slot in range(bounds[device], bounds[device + 1]):
            level += up[kind[slot]] - down[kind[slot]]
            highest = max(highest, level + down[kind[slot]])
        result[device] = highest


def memory_peaks(
    times: tuple[Floats, Floats, Floats, Floats, Floats],
    up: Floats,
    down: Floats,
    size: Floats,
    sizes: int,
    bounds: NDArray[np.int64],
    target: NDArray[np.int64],
    sent_by: NDArray[np.int64],
    by_receiver: NDArray[np.int64],
    received_by: NDArray[np.int64],
    level: Floats,
    total: Floats,
) -> None:
    """The highest total on each device where messages take room, and what it consists of; see :func:`pipesim.memory.memory_curve`.

    Args:
        times: Start and end, (steps, slots) each; sent, departed and arrived, (steps, messages) each.
        up: (slots,) bytes of activations allocated at each slot's start.
        down: (slots,) bytes released at its end.
        size: (messages,) bytes of each message; (1,) if all are alike.
        sizes: 1 if there is a number per message, 0 if all are alike.
        target: (messages,) slot that waits for each.
        sent_by: (devices + 1,) bounds of the messages that each device sends.
        by_receiver: (messages,) their numbers, sorted by receiver.
        received_by: (devices + 1,) bounds in that.
        level: (devices, categories) what is there all the time, activations and communication last; then what the peak consists of.
        total: (devices,) filled with the peaks.
    """
    start, end, sent, departed, arrived = times
    steps = start.shape[0]
    for device in range(len(total)):
        outgoing, incoming = sent_by[device + 1] - sent_by[device], received_by[device + 1] - received_by[device]
        room = 2 * steps * (outgoing + incoming)
        time, change, other_time, other_change = np.empty(room), np.empty(room), np.empty(room), np.empty(room)
        count = 0
        for take in range(2):  # all releases, then all takes, so that a sort that is stable leaves them so
            for step in range(steps):
                for message in range(sent_by[device], sent_by[device + 1]):  # held from when it is sent until it is there
                    if arrived[step, message] > sent[step, message]:
                        time[count] = sent[step, message] if take else arrived[step, message]
                        change[count] = size[message * sizes] if take else -size[message * sizes]
                        count += 1
            for step in range(steps):
                for place in range(received_by[device], received_by[device + 1]):  # from when the link takes it until it is used
                    message = by_receiver[place]
                    used = start[step, target[message]]
                    if used > departed[step, message]:
                        time[count] = departed[step, message] if take else used
                        change[count] = size[message * sizes] if take else -size[message * sizes]
                        count += 1
        runs = 2
        while runs > 1:  # merges neighbouring ascending runs, of which there are few: a link is first come, first served
            runs, low = 0, 0
            while low < count:
                middle = low + 1
                while middle < count and time[middle - 1] <= time[middle]:
                    middle += 1
                high = min(middle + 1, count)
                while high < count and time[high - 1] <= time[high]:
                    high += 1
                left, right = low, middle
                for place in range(low, high):
                    if left < middle and (right >= high or time[left] <= time[right]):
                        other_time[place], other_change[place] = time[left], change[left]
                        left += 1
                    else:
                        other_time[place], other_change[place] = time[right], change[right]
                        right += 1
                low = high
                runs += 1
            time, other_time = other_time, time
            change, other_change = other_change, change
        first, last = bounds[device], bounds[device + 1]
        largest = 0.0
        for slot in range(first, last):
            largest = max(largest, up[slot], down[slot])
        for place in range(count):
            largest = max(largest, change[place])
        dust = 1e-12 * largest * max(1, 2 * steps * (last - first) + count)
        always = level[device, 0]
        for category in range(1, level.shape[1] - 2):
            always += level[device, category]
        activations, communication = 0.0, 0.0
        base, base_communication = level[device, level.shape[1] - 2], level[device, level.shape[1] - 1]
        highest = always + base + base_communication
        place, moment, moments = 0, 0, 2 * steps * (last - first)  # start and end of each slot in turn, step after step
        while place < count or moment < moments:
            slot, step, ends, now = first, 0, False, np.inf
            if moment < moments:
                step = moment // (2 * (last - first))
                slot, ends = first + moment % (2 * (last - first)) // 2, moment % 2 == 1
                now = end[step, slot] if ends else start[step, slot]
            if place < count and (time[place] < now or (time[place] == now and change[place] <= 0)):
                communication += change[place]
                place += 1
            else:
                activations += -down[slot] if ends else up[slot]
                moment += 1
            held = base + (0.0 if abs(activations) < dust else activations)
            buffers = base_communication + (0.0 if abs(communication) < dust else communication)
            if always + held + buffers > highest:
                highest = always + held + buffers
                level[device, level.shape[1] - 2], level[device, level.shape[1] - 1] = held, buffers
        total[device] = highest


def idle(
    start: Floats,
    end: Floats,
    sent: Floats,
    arrived: Floats,
    target: NDArray[np.int64],
    bounds: NDArray[np.int64],
    first_start: float,
    last_end: float,
    columns: NDArray[np.int64],
    totals: Floats,
) -> None:
    """Idle time by cause, in a run of one step without updates; see :func:`pipesim.metrics.idle_causes`.

    Args:
        start: (slots,)
        end: (slots,)
        sent: (messages,)
        arrived: (messages,)
        target: (messages,) slot that waits for each.
        first_start: When the first slot started.
        last_end: When the last slot ended.
        columns: Where warm-up, waiting for a peer, waiting for the link and drain go.
        totals: (devices, causes) zeros; filled.
    """
    warm_up, peer, link, drain = columns
    came, produced = np.full(len(start), -np.inf), np.full(len(start), np.inf)
    for message in range(len(target)):
        if arrived[message] > came[target[message]]:  # of those that tie, the first
            came[target[message]], produced[target[message]] = arrived[message], sent[message]
    for device in range(len(bounds) - 1):
        before = first_start
        for slot in range(bounds[device], bounds[device + 1]):
            gap = start[slot] - before
            if slot == bounds[device]:
                totals[device, warm_up] += gap
            else:
                # the part of the gap after the last input was produced is the link's
                on_link = min(max(start[slot] - max(produced[slot], before), 0.0), gap)
                totals[device, link] += on_link
                totals[device, peer] += gap - on_link
            before = end[slot]
        totals[device, drain] += last_end - before
