"""Lowering: the messages that a schedule implies become SEND and RECV ops in its streams, and whether such a listing crosses.

The way back is :meth:`pipesim.schedule.Schedule.without_communication`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from pipesim.dataflow import Messages, messages
from pipesim.errors import DeadlockError, ScheduleError, did_you_mean
from pipesim.op import Kind, Op
from pipesim.schedule import Schedule

__all__ = ["COMMUNICATION_KINDS", "Crossing", "End", "Receives", "crossings", "is_explicit", "lower"]

Receives = Literal["early", "late"]

COMMUNICATION_KINDS = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)

Places = NDArray[np.int64]


def is_explicit(schedule: Schedule) -> bool:
    r"""Whether a schedule lists its messages, as SEND and RECV ops.

    Examples:
        >>> schedule = Schedule.from_text("0F0\n1F0")
        >>> is_explicit(schedule), is_explicit(lower(schedule))
        (False, True)
    """
    return schedule.has(*COMMUNICATION_KINDS)


def lower(schedule: Schedule, receives: Receives = "early") -> Schedule:
    r"""Lists every message between two devices as a SEND on one and a RECV on the other.

    A SEND stands right after the slot that makes what is sent: ``2SEND_F1`` is stage 2 sending its activation of microbatch 1
    on, ``2SEND_B1`` its gradient back. A RECV names the stage that receives, and stands:

    * ``early``: as soon as the message has been sent, which is PyTorch's lowering (``_add_send_recv``). Devices take turns
      in their order, each doing its next op if all its messages have been sent; a RECV stands after what its device has done
      by the turn in which its sender sends. Of 1F1B on two devices::

          round    | 0              1                      2    3            4
          device 0 | 0F0 0SEND_F0   0F1 0SEND_F1 0RECV_B0  0B0  0RECV_B1     0B1
          device 1 | 1RECV_F0 1F0   1RECV_F1 1B0 1SEND_B0  1F1  1B1 1SEND_B1

    * ``late``: right before the slot that needs the message.

    In a stage graph one SEND goes to every successor on another device, and one RECV takes from every predecessor on another device
    (early: from when the last of them has sent). A pair has its RECVs before it and its SENDs after it, those of its first half first.

    Order: with early receives, what one device sends to another is received in the order in which it is sent, so both ends of a
    first-in, first-out stream agree. Late receives stand in order of use, and cross where a device uses what a peer sends in
    another order (``zb-v`` and others with a V or several stages per device do). A RECV that takes from several predecessors
    can cross either way. :func:`crossings` finds these.

    Args:
        schedule: A legal schedule without SEND or RECV.
        receives: Where RECVs stand.

    Returns:
        The schedule with its communication listed; the same one, if nothing crosses devices.

    Raises:
        ScheduleError: The schedule is not legal, or lists SEND or RECV already.
        DeadlockError: Early only: the devices wait for each other, so there is no moment at which some op is sent.

    Examples:
        >>> schedule = Schedule.from_text("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1")
        >>> print(lower(schedule))
        name: schedule
        device 0 | 0F0      0SEND_F0 0F1      0SEND_F1 0RECV_B0 0B0      0RECV_B1 0B1
        device 1 | 1RECV_F0 1F0      1RECV_F1 1F1      1B0      1SEND_B0 1B1      1SEND_B1
        >>> lower(schedule, "late").without_communication() == schedule
        True
    """
    if receives not in get_args(Receives):
        raise ScheduleError(f"receives must be early or late, got {receives!r}{did_you_mean(str(receives), get_args(Receives))}")
    schedule.check()
    if is_explicit(schedule):
        raise ScheduleError("the schedule lists SEND or RECV already; without_communication() (--drop-communication) takes them out")
    found = messages(schedule)
    if not len(found):
        return schedule
    step = np.cumsum(~schedule.joined) - 1  # of each row, counted over all devices: an op of any kind, or a pair
    # Every row gets a place, (when, who, which), by which the rows of a device are sorted.
    sends = found.source[np.append(True, found.source[1:] != found.source[:-1])]  # in order already; one SEND for all successors
    if receives == "early":
        rounds = _rounds(schedule, found, step)
        when, who = rounds[step], schedule.device.astype(np.int64)
        arrival = (rounds[step[found.source]], who[found.source], np.arange(len(found)))
    else:
        when, who = step, np.ones(len(schedule), np.int64)
        arrival = (step[found.target], np.zeros(len(found), np.int64), found.target.astype(np.int64))
    second = schedule.joined.astype(np.int64)
    last = _last_of_each(found.target, arrival)
    receivers = found.target[last]
    kind = schedule.kind
    sent = np.where(kind[sends] == int(Kind.F), int(Kind.SEND_F), int(Kind.SEND_B))
    received = np.where(kind[receivers] == int(Kind.F), int(Kind.RECV_F), int(Kind.RECV_B))
    rows = np.concatenate([np.arange(len(schedule)), sends, receivers])
    place = (
        np.concatenate([second, second[sends] + 2, arrival[2][last]]),
        np.concatenate([who, who[sends], arrival[1][last]]),
        np.concatenate([when, when[sends], arrival[0][last]]),
        schedule.device[rows],
    )
    order = np.lexsort(place)
    columns = (
        schedule.stage[rows][order],
        np.concatenate([kind, sent, received])[order],
        schedule.microbatch[rows][order],
        np.concatenate([schedule.joined, np.zeros(len(rows) - len(schedule), bool)])[order],
    )
    bounds = np.searchsorted(schedule.device[rows][order], np.arange(schedule.num_devices + 1))
    devices = [tuple(column[low:high] for column in columns) for low, high in pairwise(bounds.tolist())]
    return Schedule.from_columns(devices, name=schedule.name, graph=schedule.graph, weights=schedule.weights, offload_to=schedule.offload_to)


def _last_of_each(target: NDArray[np.int32], arrival: tuple[Places, Places, Places]) -> Places:
    """The message of each target that arrives last: where stages join, one RECV takes several."""
    order = np.lexsort((arrival[2], arrival[1], arrival[0], target))
    ends = np.append(np.flatnonzero(np.diff(target[order])), len(order) - 1)
    last: Places = order[ends]
    return last


def _rounds(schedule: Schedule, found: Messages, step: Places) -> Places:
    """(steps,) the round in which each is done: devices take turns, each does its next step if all its messages have been sent.

    Every device goes on alone as far as it can, and is taken up again when what it waits for has its round: linear in time.
    """
    home = schedule.device[~schedule.joined].tolist()
    bounds = np.searchsorted(home, np.arange(schedule.num_devices + 1)).tolist()
    target = step[found.target]
    by_target = np.argsort(target, kind="stable")
    producers = step[found.source][by_target].tolist()
    first = np.searchsorted(target[by_target], np.arange(len(home) + 1)).tolist()
    rounds = [-1] * len(home)
    reached = bounds[:-1].copy()
    waiting: dict[int, list[int]] = {}  # step -> devices that wait for it
    ready = list(range(schedule.num_devices))
    while ready:
        device = ready.pop()
        current, end = reached[device], bounds[device + 1]
        last = rounds[current - 1] if current > bounds[device] else -1
        while current < end:
            last += 1
            for producer in producers[first[current] : first[current + 1]]:
                done = rounds[producer]
                if done < 0:
                    waiting.setdefault(producer, []).append(device)
                    break
                last = max(last, done + (home[producer] > device))  # a device with a higher number has its turn later
            else:
                rounds[current] = last
                if waiting:
                    ready += waiting.pop(current, ())
                current += 1
                continue
            break
        reached[device] = current
    if waiting:
        raise _stuck(schedule, found, step, reached, bounds, rounds)
    return np.array(rounds)


def _stuck(schedule: Schedule, found: Messages, step: Places, reached: list[int], bounds: list[int], rounds: list[int]) -> DeadlockError:
    """The error that names, per device, the op it is stuck at and what it waits for."""
    lines = []
    targets = step[found.target]
    for device, current in enumerate(reached):
        if current == bounds[device + 1]:
            lines.append(f"  device {device} has finished")
            continue
        number = next(number for number in np.flatnonzero(targets == current).tolist() if rounds[step[found.source[number]]] < 0)
        place, op = schedule.where(int(found.target[number])).removeprefix(f"device {device}, ").split(", op ")
        source = int(found.source[number])
        lines.append(
            f"  device {device} is stuck at {op} ({place}): waits for the {found.label(number)}, "
            f"from {schedule.op(source)} on device {int(schedule.device[source])}"
        )
    text = "\n".join(lines)
    return DeadlockError(f"the schedule cannot finish, so its receives have no place among the sends; devices wait for each other\n{text}")


class End(NamedTuple):
    """A SEND or RECV, and where it stands."""

    op: Op
    device: int
    position: int

    def __str__(self) -> str:
        return f"{self.op} (position {self.position})"


class Crossing(NamedTuple):
    """Two messages from one device to another that are sent in one order and received in the other."""

    first_send: End
    second_send: End
    first_receive: End  # of what was sent first; stands after second_receive
    second_receive: End

    def __str__(self) -> str:
        return (
            f"device {self.first_send.device} lists {self.first_send} before {self.second_send}, and "
            f"device {self.first_receive.device} lists {self.second_receive}, which takes the second, before {self.first_receive}"
        )


def crossings(schedule: Schedule) -> list[Crossing]:
    r"""Finds messages that would overtake each other on a first-in, first-out stream between two devices.

    A stream of that kind (NCCL's, between two devices and in one direction) matches the first SEND with the first RECV, whatever they are
    of: a crossing gives the wrong tensor, or a hang. Where messages have tags, or each has a stream of its own, it does no harm.

    Args:
        schedule: A legal schedule. One that lists no SEND or RECV has no crossing.

    Returns:
        Neighbours in the order of sending that are received the other way round, in the order of devices; an empty list
        exactly if both ends of every pair of devices agree on the order.

    Raises:
        ScheduleError: The schedule is not legal.

    Examples:
        >>> schedule = Schedule.from_text('''
        ...     0F0 0SEND_F0 0F1 0SEND_F1
        ...     1RECV_F1 1RECV_F0 1F0 1F1''')
        >>> print(crossings(schedule)[0])
        device 0 lists 0SEND_F0 (position 1) before 0SEND_F1 (position 3), and device 1 lists 1RECV_F1 (position 0), which takes the second, before 1RECV_F0 (position 1)
    """
    schedule.check()
    if not is_explicit(schedule):
        return []
    found = messages(schedule)
    send = np.where(found.gradient, _end_rows(schedule, Kind.SEND_B, found.source), _end_rows(schedule, Kind.SEND_F, found.source))
    receive = np.where(found.gradient, _end_rows(schedule, Kind.RECV_B, found.target), _end_rows(schedule, Kind.RECV_F, found.target))
    # one SEND may stand for messages to several stages of one device: they are in the order of their RECVs, whichever that is
    order = np.lexsort((receive, send, found.target_device, found.source_device))
    before, after = order[:-1], order[1:]
    together = (found.source_device[before] == found.source_device[after]) & (found.target_device[before] == found.target_device[after])
    crossed = np.flatnonzero(together & (receive[before] > receive[after]))
    if not len(crossed):
        return []
    position = np.cumsum(~schedule.joined) - 1
    position -= position[schedule.device_rows[:-1][schedule.device]]

    def end(row: int) -> End:
        return End(schedule.op(row), int(schedule.device[row]), int(position[row]))

    return [
        Crossing(*(end(int(row)) for row in (send[first], send[second], receive[first], receive[second])))
        for first, second in zip(before[crossed].tolist(), after[crossed].tolist(), strict=True)
    ]


def _end_rows(schedule: Schedule, kind: Kind, compute: NDArray[np.int32]) -> Places:
    """The row of the op of this kind that belongs to each compute row, or -1."""
    rows = np.flatnonzero(schedule.kind == int(kind))
    table = np.full((schedule.num_stages, schedule.num_microbatches), -1)
    table[schedule.stage[rows], schedule.microbatch[rows]] = rows
    return table[schedule.stage[compute], schedule.microbatch[compute]]
