"""Fragments: who sends what to whom, in which order, without a schedule around it. For asking why a listing hangs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.cluster import Cluster
from pipesim.communication import Communication
from pipesim.dataflow import messages
from pipesim.engine.listed import run_listed
from pipesim.engine.program import Program
from pipesim.errors import LARGEST, ScheduleError, require_count
from pipesim.lowering import COMMUNICATION_KINDS
from pipesim.op import Kind, Op, Pair, parse_op
from pipesim.schedule import Schedule

__all__ = ["Compute", "Exchange", "Receive", "Send", "exchange"]

Floats = NDArray[np.float64]


class Send(NamedTuple):
    """A message to a device. The k-th with one tag is what the k-th receive there with that tag takes.

    Attributes:
        to: The device.
        tag: What to call it.
        size: Bytes.
    """

    to: int
    tag: str = "message"
    size: float = 0.0


class Receive(NamedTuple):
    """The other end.

    Attributes:
        source: The device that sends.
        tag: As the send has it.
        size: Bytes that it expects; None for what comes.
    """

    source: int
    tag: str = "message"
    size: float | None = None


class Compute(NamedTuple):
    """Something that takes time, and waits for the receives that stand before it.

    Attributes:
        name: What to call it.
        duration: In the cluster's unit.
    """

    name: str = "compute"
    duration: float = 1.0


Item = Send | Receive | Compute


@dataclass(frozen=True)
class Exchange:
    """When things began and were done.

    Attributes:
        start: Per device, per item of its stream.
        end: The same.
    """

    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]

    @property
    def makespan(self) -> float:
        """When the last item was done."""
        return max((time for times in self.end for time in times), default=0.0)


class _Item(NamedTuple):
    """An item of a stream, whichever way it was written.

    Attributes:
        kind: The kind that it has in the schedule that stands for the fragment.
        key: (from, to, tag) of a message, or (device, device, name) of compute.
        amount: Bytes, or a duration.
        label: What to call it.
        needs: Keys of the messages that compute waits for.
    """

    kind: Kind
    key: tuple[int, int, str]
    amount: float | None
    label: str
    needs: tuple[tuple[int, int, str], ...] = ()


def exchange(
    streams: str | Sequence[Sequence[Item]],
    *,
    cluster: Cluster | None = None,
    communication: Communication | None = None,
    duration: float = 1.0,
    size: float = 0.0,
) -> Exchange:
    r"""Runs a fragment: sends without producers, receives and compute, each device in its order.

    Args:
        streams: Per device what it does, or a listing in PyTorch's form, one line per device, as ``1RECV_F0 1F0 1SEND_F0``.
            There, what ``1SEND_F0`` sends is taken by ``2RECV_F0``, and ``2F0`` waits for that; it need not be a whole schedule.
        cluster: Where the links are; free ones by default.
        communication: How devices communicate; by default one first-in, first-out stream per device, and eager sends.
        duration: Of every compute op of a listing.
        size: Bytes of every message of a listing.

    Returns:
        When every item began and was done. A send or receive begins when it has its stream for itself.

    Raises:
        ScheduleError: A send or receive lacks its other end, the two disagree on the size, messages cross, or a number is none.
        DeadlockError: The devices wait for each other; the text names the sends and receives.

    Examples:
        >>> from pipesim import DeadlockError
        >>> both = [[Send(1, "x"), Receive(1, "y")], [Send(0, "y"), Receive(0, "x")]]
        >>> exchange(both).makespan
        0.0
        >>> try:
        ...     exchange(both, communication=Communication(sends="rendezvous"))
        ... except DeadlockError as error:
        ...     print(str(error).splitlines()[0])
        the schedule cannot finish: device 0 -> device 1 -> device 0 wait for each other
        >>> exchange("2SEND_F1 0RECV_B0 0B0\n3RECV_F1 1SEND_B0 3F1").makespan
        1.0
    """
    for option, given in (("duration", duration), ("size", size)):
        if not _is_amount(given):
            raise ScheduleError(f"{option} must be a finite number of at least 0, got {given!r:.80}")
    listed = _parsed(streams, duration, size) if isinstance(streams, str) else [_items(d, stream) for d, stream in enumerate(streams)]
    sizes = _sizes(listed)
    cluster = Cluster(unit="slot") if cluster is None else cluster
    return _run(listed, sizes, cluster if communication is None else replace(cluster, communication=communication))


def _items(device: int, stream: Sequence[Item]) -> list[_Item]:
    """A stream of sends, receives and compute."""
    found: list[_Item] = []
    before: list[tuple[int, int, str]] = []
    for position, item in enumerate(stream):
        place = f"device {device}, position {position}"
        amount = item.duration if isinstance(item, Compute) else getattr(item, "size", None)
        if not isinstance(item, Send | Receive | Compute) or not (amount is None or _is_amount(amount)):
            raise ScheduleError(f"{place}: {item!r:.80} is no Send, Receive or Compute with a finite size or duration of at least 0")
        other, name = (0, item.name) if isinstance(item, Compute) else (item.to if isinstance(item, Send) else item.source, item.tag)
        require_count(f"{place}: the device of {item!r:.80}", other, 0)
        if not isinstance(name, str):
            raise ScheduleError(f"{place}: {item!r:.80} has {name!r:.40} for a name; right is a text")
        if isinstance(item, Send):
            found.append(_Item(Kind.SEND_F, (device, item.to, item.tag), amount, f"send {item.tag} to device {item.to} (position {position})"))
        elif isinstance(item, Receive):
            before.append((item.source, device, item.tag))
            found.append(_Item(Kind.RECV_F, before[-1], amount, f"receive {item.tag} from device {item.source} (position {position})"))
        else:
            found.append(_Item(Kind.F, (device, device, item.name), amount, f"{item.name} (position {position})", tuple(before)))
            before = []
    return found


def _is_amount(value: Any) -> bool:
    """Whether it is a finite number of at least 0."""
    return isinstance(value, Real) and bool(0 <= value <= LARGEST)  # type: ignore[operator]  # numbers.Real promises no comparison with int


_STEP = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}


def _parsed(text: str, duration: float, size: float) -> list[list[_Item]]:
    """A listing in PyTorch's form."""
    lines = [re.sub(r"^\s*(device|rank)\s*\d+\s*[|:]", "", line) for line in text.strip().splitlines()]
    streams = [[parse_op(word) for word in re.split(r"[\s,]+", line.strip()) if word] for line in lines]
    homes: dict[tuple[int, Kind, int | None], int] = {}
    for device, stream in enumerate(streams):
        homes.update({(op.stage, op.kind, op.microbatch): device for op in stream if isinstance(op, Op)})
    found: list[list[_Item]] = []
    for device, stream in enumerate(streams):
        items: list[_Item] = []
        for position, slot in enumerate(stream):
            label = f"{slot} (position {position})"
            if isinstance(slot, Op) and slot.kind in COMMUNICATION_KINDS:
                sends = slot.kind in (Kind.SEND_F, Kind.SEND_B)
                kind = {Kind.SEND_F: Kind.RECV_F, Kind.RECV_F: Kind.SEND_F, Kind.SEND_B: Kind.RECV_B, Kind.RECV_B: Kind.SEND_B}[slot.kind]
                other = Op(slot.stage + _STEP[slot.kind], kind, slot.microbatch)
                if tuple(other) not in homes:
                    raise ScheduleError(f"device {device}, position {position}: {slot} has no other end; no device lists {other}")
                there = homes[other.stage, other.kind, other.microbatch]
                key = (device, there, str(slot)) if sends else (there, device, str(other))
                items.append(_Item(Kind.SEND_F if sends else Kind.RECV_F, key, size, label))
            else:
                halves = [slot.first, slot.second] if isinstance(slot, Pair) else [slot]
                needs = [need for op in halves for need in _needed(op, homes, device)]
                received = {item.key for item in items if item.kind is Kind.RECV_F}
                late = [key for key in needs if key not in received]
                if late:
                    raise ScheduleError(f"device {device}, position {position}: {slot} stands before the RECV of {late[0][2]}, which it needs")
                items.append(_Item(Kind.F, (device, device, str(slot)), duration, label, tuple(needs)))
        found.append(items)
    return found


def _needed(op: Op, homes: dict[tuple[int, Kind, int | None], int], device: int) -> list[tuple[int, int, str]]:
    """The message that an op of a listing waits for, if its RECV is listed."""
    kinds = {Kind.F: (Kind.RECV_F, Kind.SEND_F), Kind.B: (Kind.RECV_B, Kind.SEND_B), Kind.I: (Kind.RECV_B, Kind.SEND_B)}
    if op.kind not in kinds:
        return []
    receive, send = kinds[op.kind]
    if homes.get((op.stage, receive, op.microbatch)) != device:
        return []
    sender = Op(op.stage + _STEP[receive], send, op.microbatch)
    return [(homes[sender.stage, sender.kind, sender.microbatch], device, str(sender))] if tuple(sender) in homes else []


def _sizes(streams: list[list[_Item]]) -> dict[tuple[int, int, str, int], float]:
    """(from, to, tag, which of that tag) to bytes; both ends are there and agree."""
    ends: dict[Kind, dict[tuple[int, int, str], list[tuple[float | None, str]]]] = {Kind.SEND_F: defaultdict(list), Kind.RECV_F: defaultdict(list)}
    for device, stream in enumerate(streams):
        for item in stream:
            if item.kind is not Kind.F:
                ends[item.kind][item.key].append((item.amount, f"device {device}, {item.label}"))
    result = {}
    for key in ends[Kind.SEND_F].keys() | ends[Kind.RECV_F].keys():
        source, target, tag = key
        sends, receives = ends[Kind.SEND_F][key], ends[Kind.RECV_F][key]
        for device in (source, target):
            if not 0 <= device < len(streams) or source == target:
                raise ScheduleError(
                    f"{(sends + receives)[0][1]}: goes from device {source} to device {target}; the devices are 0..{len(streams) - 1}"
                )
        if len(sends) != len(receives):
            lone = (sends if len(sends) > len(receives) else receives)[min(len(sends), len(receives))]
            raise ScheduleError(
                f"{lone[1]} has no other end: device {source} sends {len(sends)} and device {target} receives {len(receives)} messages {tag!r}"
            )
        for number, ((sent, sender), (expected, receiver)) in enumerate(zip(sends, receives, strict=True)):
            if expected is not None and sent != expected:
                raise ScheduleError(
                    f"the message {tag!r} from device {source} to device {target} has {sent:.12g} bytes where it is sent and {expected:.12g} where it is "
                    f"received ({sender}; {receiver})"
                )
            result[*key, number] = float(sent or 0.0)
    return result


def _run(streams: list[list[_Item]], sizes: dict[tuple[int, int, str, int], float], cluster: Cluster) -> Exchange:
    """Runs it as a schedule in which every message has two stages of its own, each with an op that takes no time.

    The op that a message comes from stands at the begin of its device's stream; the one that it goes to stands where compute
    first needs it, or at the end.
    """
    stages = {key: 2 * number for number, key in enumerate(sorted(sizes))}
    graph = [(stage, stage + 1) for stage in stages.values()]
    computing = 2 * len(stages)
    columns, times, labels, rows = [], [], {}, 0
    places: list[list[tuple[str, int]]] = []  # per item, what it is and where: ("slot", number) or ("end", number)
    slots = 0
    for stream in streams:
        count: dict[tuple[Kind, tuple[int, int, str]], int] = defaultdict(int)
        numbered = []
        for item in stream:
            which = count[item.kind, item.key]
            count[item.kind, item.key] += 1
            numbered.append((item, stages.get((*item.key, which), -1)))
        listed: list[tuple[int, Kind, float]] = [(stage, Kind.F, 0.0) for item, stage in numbered if item.kind is Kind.SEND_F]
        own: list[tuple[str, int]] = []
        open_ends: dict[tuple[int, int, str], list[int]] = defaultdict(list)
        for item, stage in numbered:
            if item.kind is Kind.F:
                listed += [(end, Kind.F, 0.0) for need in item.needs for end in open_ends.pop(need, [])]
                own.append(("slot", slots + sum(kind is Kind.F for _, kind, _ in listed)))
                listed.append((computing, Kind.F, item.amount or 0.0))
                computing += 1
            else:
                own.append(("end", stage if item.kind is Kind.SEND_F else stage + 1))
                listed.append((stage, Kind.SEND_F, 0.0) if item.kind is Kind.SEND_F else (stage + 1, Kind.RECV_F, 0.0))
                if item.kind is Kind.RECV_F:
                    open_ends[item.key].append(stage + 1)
            labels[rows + len(listed) - 1] = item.label
        listed += [(end, Kind.F, 0.0) for ends in open_ends.values() for end in ends]
        slots += sum(kind is Kind.F for _, kind, _ in listed)
        rows += len(listed)
        columns.append(([stage for stage, _, _ in listed], [int(kind) for _, kind, _ in listed], 0))
        times += [time for _, kind, time in listed if kind is Kind.F]
        places.append(own)
    if not slots:
        return Exchange(((),) * len(streams), ((),) * len(streams))
    schedule = Schedule.from_columns(columns, name="exchange", graph=graph).check()
    durations = np.array(times) / cluster.speeds(schedule.num_devices)[schedule.slot_device]
    size_of = {stage: sizes[key] for key, stage in stages.items()}
    return _result(schedule, durations, size_of, cluster, labels, places)


def _result(
    schedule: Schedule,
    durations: Floats,
    size_of: dict[int, float],
    cluster: Cluster,
    labels: dict[int, str],
    places: list[list[tuple[str, int]]],
) -> Exchange:
    found = messages(schedule)
    of_message = schedule.stage[found.source].tolist()
    program = Program(schedule, durations, np.array([size_of[stage] for stage in of_message]), cluster, 1, False, labels=labels)
    (start, end, *_), began, done = run_listed(program)
    where = {stage: number for number, stage in enumerate(of_message)} | {
        stage + 1: number + len(of_message) for number, stage in enumerate(of_message)
    }

    def of(slots: Any, ends: Any) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(float(slots[0, n] if what == "slot" else ends[0, where[n]]) for what, n in own) for own in places)

    return Exchange(of(start, began), of(end, done))
