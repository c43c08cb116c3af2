"""What one device does, step by step: a schedule with its messages listed, as the list that an executor works through.

Needs no torch. Messages have the numbers that ``pipesim.dataflow.messages`` gives them, on both ends.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from pipesim.dataflow import messages
from pipesim.errors import ScheduleError
from pipesim.lowering import Receives, crossings, is_explicit, lower
from pipesim.memory import moves
from pipesim.op import Kind, Op
from pipesim.schedule import Schedule

__all__ = ["Code", "Program", "Step", "Transfer", "compile_program", "compute_schedule"]


class Code(IntEnum):
    """What a step does."""

    COMPUTE = 0  # a slot: an op, or the two of a pair
    TRANSFER = 1  # sends and receives that stand side by side
    REDUCE = 2  # starts the sum of a stage's gradients over its replicas
    MOVE = 3  # an activation goes to the host, or comes back
    BARRIER = 4  # all devices wait for each other


class Transfer(NamedTuple):
    """One message, seen from one of its ends.

    Attributes:
        number: Its number, which is also its tag.
        peer: The device at the other end.
        source: The stage that made it.
        target: The stage that needs it.
        microbatch: Its microbatch.
        gradient: True for a gradient going back.
    """

    number: int
    peer: int
    source: int
    target: int
    microbatch: int
    gradient: bool


class Step(NamedTuple):
    """A step of a device.

    Attributes:
        code: What it does.
        label: What it is called: the text of its op.
        ops: Of a slot its one or two ops; of a REDUCE or MOVE its op.
        slot: The compute slot (of the whole schedule), or the number of the move; -1 for others.
        waits: Numbers of the messages that must have arrived.
        sends: What a TRANSFER sends.
        receives: What it receives.
    """

    code: Code
    label: str
    ops: tuple[Op, ...] = ()
    slot: int = -1
    waits: tuple[int, ...] = ()
    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()


class Program(NamedTuple):
    """The steps of every device.

    Attributes:
        schedule: The compute schedule, updates listed: what a Timeline of the run speaks of.
        listing: The schedule with its communication listed, in the order that is obeyed.
        devices: Per device its steps.
        ordered_pairs: (from device, to device) of all messages, sorted.
        notes: What was left out or done otherwise than listed.
    """

    schedule: Schedule
    listing: Schedule
    devices: tuple[tuple[Step, ...], ...]
    ordered_pairs: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]


def compute_schedule(schedule: Schedule) -> Schedule:
    r"""The schedule whose slots a replay measures: without communication, and with its updates.

    Examples:
        >>> print(compute_schedule(Schedule.from_text("0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0")))
        name: schedule
        device 0 | 0F0 0B0 0U0
        device 1 | 1F0 1B0 1U0
    """
    return schedule.check().without_communication().with_updates()


def compile_program(schedule: Schedule, receives: Receives = "early", *, data: int = 1, barrier: bool = True, in_order: bool = False) -> Program:
    r"""Compiles a schedule.

    Args:
        schedule: A legal schedule; if it lists SEND and RECV, they are obeyed.
        receives: Where receives stand if they are not listed, see :func:`pipesim.lowering.lower`; early ones are posted a slot earlier still.
        data: Degree of data parallelism; above 1 every stage's gradients are summed.
        barrier: Under flush, all devices wait for each other before their first update.
        in_order: Messages between two devices match in the order of issue (NCCL), so both ends must agree on it.

    Raises:
        ScheduleError: The schedule is not legal, or *in_order* and both ends of a pair disagree on the order.
        DeadlockError: It cannot finish.

    Examples:
        >>> program = compile_program(Schedule.from_text("0F0 0B0\n1F0 1B0"))
        >>> [step.label for step in program.devices[0]]
        ['0RECV_B0', '0F0', '0SEND_F0', '0B0', 'barrier', '0U0']
    """
    compute = compute_schedule(schedule)
    full = schedule.with_updates()
    listing = full if is_explicit(full) else lower(full, receives)
    ahead = receives == "early" and not is_explicit(full)
    if in_order and (crossed := crossings(listing)):
        raise ScheduleError(f"this backend matches messages in the order of issue: {crossed[0]}; list the receives in the order of the sends")
    tables = _Tables(compute)
    devices = []
    ignored: set[str] = set()
    for device in range(listing.num_devices):
        steps = _listed_steps(listing, compute, tables, device, ignored)
        if ahead:
            steps = _a_slot_ahead(steps)
        steps = _with_reductions(steps, compute, device, data)
        if barrier and compute.weights == "flush" and compute.has_backward:
            first = next((place for place, step in enumerate(steps) if step.code is Code.COMPUTE and step.ops[0].kind is Kind.U), len(steps))
            steps.insert(first, Step(Code.BARRIER, "barrier"))
        devices.append(tuple(steps))
    found = messages(compute)
    pairs = sorted(set(zip(found.source_device.tolist(), found.target_device.tolist(), strict=True)))
    notes = [f"{', '.join(sorted(ignored))} listed, and done as nothing"] if ignored else []
    if any(target is not None for target in compute.offload_to.values()):
        notes.append("activations are offloaded to the host, not to another device")
    return Program(compute, listing, tuple(devices), tuple(pairs), tuple(notes))


class _Tables:
    """Messages by the row that makes them and by the row that needs them."""

    def __init__(self, compute: Schedule) -> None:
        found = messages(compute)
        self.by_source: dict[tuple[bool, int, int], list[Transfer]] = {}
        self.by_target: dict[tuple[bool, int, int], list[Transfer]] = {}
        self.needs: dict[int, list[int]] = {}
        stage, microbatch = compute.stage, compute.microbatch
        columns = (found.source, found.target, found.source_device, found.target_device, found.gradient, found.target_slot)
        for number, (source, target, sender, receiver, gradient, slot) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            one = Transfer(number, receiver, int(stage[source]), int(stage[target]), int(microbatch[source]), gradient)
            self.by_source.setdefault((gradient, one.source, one.microbatch), []).append(one)
            self.by_target.setdefault((gradient, one.target, one.microbatch), []).append(one._replace(peer=sender))
            self.needs.setdefault(slot, []).append(number)
        moved = moves(compute)
        self.moves = {
            (bool(out), int(s), int(i)): number
            for number, (out, s, i) in enumerate(zip(moved.out.tolist(), moved.stage.tolist(), moved.microbatch.tolist(), strict=True))
        }


def _listed_steps(listing: Schedule, compute: Schedule, tables: _Tables, device: int, ignored: set[str]) -> list[Step]:
    """The steps that the listing has, side by side sends and receives as one."""
    steps: list[Step] = []
    slot = int(compute.device_slots[device])
    for item in listing.streams[device]:
        ops = (item,) if isinstance(item, Op) else tuple(item)
        first = ops[0]
        if first.kind <= Kind.U:
            steps.append(Step(Code.COMPUTE, str(item), ops, slot, tuple(tables.needs.get(slot, ()))))
            slot += 1
        elif first.kind in (Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B):
            key = (first.kind in (Kind.SEND_B, Kind.RECV_B), first.stage, first.microbatch or 0)
            sends = first.kind in (Kind.SEND_F, Kind.SEND_B)
            found = tuple((tables.by_source if sends else tables.by_target)[key])
            last = steps[-1] if steps and steps[-1].code is Code.TRANSFER else Step(Code.TRANSFER, "")
            merged = last._replace(
                label=f"{last.label} {item}".strip(), sends=last.sends + (found if sends else ()), receives=last.receives + (() if sends else found)
            )
            if last.label:
                steps.pop()
            steps.append(merged)
        elif first.kind is Kind.REDUCE_GRAD:
            steps.append(Step(Code.REDUCE, str(item), ops))
        elif first.kind in (Kind.OFFLOAD, Kind.RELOAD):
            move = tables.moves[first.kind is Kind.OFFLOAD, first.stage, first.microbatch or 0]
            steps.append(Step(Code.MOVE, str(item), ops, move))
        else:
            ignored.add(first.kind.name)
    return steps


def _a_slot_ahead(steps: list[Step]) -> list[Step]:
    """Posts receives a slot earlier, so that a message travels while the slot before its own runs.

    The lowering lists a RECV when its message is sent. That may be right before the op that needs it; and a message that is there,
    but whose receive is not, has not begun to travel.
    """
    result: list[Step] = []
    for step in steps:
        if step.code is not Code.TRANSFER or not step.receives:
            result.append(step)
            continue
        place = next((place for place in range(len(result) - 1, -1, -1) if result[place].code is Code.COMPUTE), 0)
        names = step.label.split()
        received = " ".join(name for name in names if "RECV" in name)
        if place and result[place - 1].code is Code.TRANSFER:
            before = result[place - 1]
            result[place - 1] = before._replace(label=f"{before.label} {received}", receives=before.receives + step.receives)
        else:
            result.insert(place, Step(Code.TRANSFER, received, receives=step.receives))
        if step.sends:
            result.append(step._replace(label=" ".join(name for name in names if "SEND" in name), receives=()))
    return result


def _with_reductions(steps: list[Step], compute: Schedule, device: int, data: int) -> list[Step]:
    """A REDUCE per update of a stage with replicas: where it is listed, else right after the update's last gradient."""
    listed = {step.ops[0].stage for step in steps if step.code is Code.REDUCE}
    shared = {stage for stage in compute.device_stages[device] if data > 1 or len(compute.placement[stage]) > 1}
    result: list[Step] = []
    after: dict[int, int] = {}  # stage -> where in the result its last gradient of the current update stands
    for step in steps:
        if step.code is Code.REDUCE and step.ops[0].stage not in shared:
            continue  # one replica: nothing to sum
        for op in step.ops:
            if step.code is Code.COMPUTE and op.kind is Kind.U and op.stage in shared - listed:
                place = after.get(op.stage, len(result))
                result.insert(place, Step(Code.REDUCE, f"{op.stage}REDUCE_GRAD{op.microbatch}", (Op(op.stage, Kind.REDUCE_GRAD, op.microbatch),)))
                after = {stage: where + (where >= place) for stage, where in after.items()}
                after.pop(op.stage, None)
        result.append(step)
        for op in step.ops:
            if step.code is Code.COMPUTE and op.kind in (Kind.B, Kind.W):
                after[op.stage] = len(result)
    return result


def slots_of(program: Program, device: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The compute slots of a device, in order."""
    bounds = program.schedule.device_slots
    return np.arange(int(bounds[device]), int(bounds[device + 1]))
