"""What the devices of a run issue beside their slots, as an engine wants it: SENDs and RECVs in groups, on lanes, and collectives.

An *end* is one end of a message: of n messages, end k is the SEND of message k, and end n + k its RECV. (A SEND to two devices
has two ends.) A *group* is what runs together on a lane: one end, or with batched communication all that a device lists
between two slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.dataflow import messages
from pipesim.engine.collecting import Collectives, collectives
from pipesim.errors import ScheduleError
from pipesim.lowering import COMMUNICATION_KINDS, crossings, is_explicit, lower
from pipesim.memory import moves
from pipesim.op import Kind
from pipesim.schedule import Schedule
from pipesim.traffic import Traffic

if TYPE_CHECKING:
    from pipesim.engine.program import Program

__all__ = ["Plan", "make_plan"]

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Plan:
    """What is issued, and when.

    Items are numbered: first the groups, then the moves, then what is listed of collectives. Where messages go by themselves,
    as :attr:`Program.by_themselves` says, the groups and moves are not issued; without SEND and RECV there are none then.

    Attributes:
        listed: The schedule with its messages listed.
        implied: Whether that listing is made up, because the schedule has none.
        rows: (ends,) the row of *listed* that each end is.
        groups: Per group its ends.
        group_of: Per end its group.
        lane_of: Per group and per move its lane, -1 where it runs as soon as it can.
        lanes: How many lanes there are.
        simple: Whether every SEND and RECV is on a lane, by itself, with a link that nothing else takes.
        slot_before: (ends,) the slot of its device after which each end stands; -1 before the first.
        issues: Per slot the items that the lane reaches when it ends.
        first_issues: Per device the items before its first slot.
        collectives: The collectives.
        traffic: All of it as columns, the ends of messages, then the members of collectives.
    """

    listed: Schedule
    implied: bool
    rows: Numbers
    groups: list[tuple[int, ...]]
    group_of: list[int]
    lane_of: list[int]
    lanes: int
    simple: bool
    slot_before: Numbers
    issues: list[tuple[int, ...]]
    first_issues: list[tuple[int, ...]]
    collectives: Collectives
    traffic: Traffic


def make_plan(program: Program) -> Plan:
    """Lists what a program communicates, in the order in which its devices come to it.

    Raises:
        ScheduleError: Messages cross on a first-in, first-out stream, or a collective lacks a member.
        DeadlockError: The schedule cannot finish, so that early receives have no place.
    """
    schedule, communication = program.schedule, program.cluster.communication
    explicit = is_explicit(schedule)
    if not explicit and communication.is_default:
        return _without_messages(program)
    listed = schedule if explicit else lower(schedule, communication.receives)
    stream = communication.stream or ("device" if explicit else "free")
    if stream != "free":
        _refuse_crossings(listed, explicit, program.labels)
    found, moved = messages(listed), moves(listed)
    send = np.where(found.gradient, _rows_of(listed, Kind.SEND_B, found.source), _rows_of(listed, Kind.SEND_F, found.source))
    receive = np.where(found.gradient, _rows_of(listed, Kind.RECV_B, found.target), _rows_of(listed, Kind.RECV_F, found.target))
    rows = np.concatenate([send, receive])
    device = listed.device[rows].astype(np.int64)
    peer = np.concatenate([found.target_device, found.source_device]).astype(np.int64)
    slot = _slot_before(listed, rows)
    # a SEND to several devices goes by their stages, a RECV from several, too
    order = np.lexsort((np.concatenate([listed.stage[found.target], listed.stage[found.source]]), rows))
    if communication.batched:
        keys = [device, slot, peer] if stream == "peer" else [device, slot]
        group_of = _numbered(np.stack(keys, axis=1)[order], order)
    else:
        group_of = np.empty(len(rows), np.int64)
        group_of[order] = np.arange(len(rows))
    count = int(group_of.max(initial=-1)) + 1
    groups: list[list[int]] = [[] for _ in range(count)]
    for end in order.tolist():
        groups[group_of[end]].append(end)
    heads = np.array([group[0] for group in groups], np.int64)
    if stream == "free":
        lane_of, lanes = np.full(count + len(moved), -1), 0
    elif stream == "device":  # OFFLOAD and RELOAD are on it, too
        lane_of, lanes = np.concatenate([device[heads], moved.device]), schedule.num_devices
    else:
        used, lane = np.unique(device[heads] * schedule.num_devices + peer[heads], return_inverse=True)
        lane_of, lanes = np.concatenate([lane.reshape(-1), np.full(len(moved), -1)]), len(used)
    if stream != "device" and len(moved):
        used, lane = np.unique(moved.device, return_inverse=True)
        lane_of[count:], lanes = lanes + lane.reshape(-1), lanes + len(used)
    together = collectives(schedule, program.collectives)
    entries = np.array([row for row, _, _ in together.listed], np.int64)
    if not explicit:  # the listing has the same rows, and SEND and RECV between them
        entries = np.flatnonzero(~np.isin(listed.kind, [int(kind) for kind in COMMUNICATION_KINDS]))[entries]
    item_rows = np.concatenate([rows[heads], moved.row, entries])
    issues, first = _issues(listed, item_rows)
    traffic = _traffic(program, listed, rows, peer, together, explicit)
    tuples = [tuple(group) for group in groups]
    undisturbed = not len(moved) and program.cluster.network is None and all(factor == 1 for factor in communication.interference.values())
    simple = stream != "free" and not communication.batched and undisturbed
    return Plan(listed, not explicit, rows, tuples, group_of.tolist(), lane_of.tolist(), lanes, simple, slot, issues, first, together, traffic)


def _without_messages(program: Program) -> Plan:
    """The plan where messages go by themselves, and collectives are all there is."""
    schedule, nothing = program.schedule, np.zeros(0, np.int64)
    together = collectives(schedule, program.collectives)
    issues, first = _issues(schedule, np.array([row for row, _, _ in together.listed], np.int64))
    return Plan(
        schedule, True, nothing, [], [], [], 0, False, nothing, issues, first, together, _traffic(program, schedule, nothing, nothing, together, True)
    )


def _refuse_crossings(listed: Schedule, explicit: bool, labels: Mapping[int, str]) -> None:
    crossed = crossings(listed)
    if crossed and labels:
        names = [f"device {end.device}: {labels[int(listed.device_rows[end.device]) + end.position]}" for end in crossed[0]]
        raise ScheduleError(
            f"messages cross on a first-in, first-out stream: they are sent as {names[0]}, {names[1]}, and received as {names[3]}, {names[2]}"
        )
    if crossed:
        way_out = "list the RECVs in the order of the SENDs" if explicit else "take receives='early', which keeps the order of sending"
        raise ScheduleError(f"messages cross on a first-in, first-out stream: {crossed[0]}; {way_out}, or take stream='free'")


def _rows_of(schedule: Schedule, kind: Kind, compute: NDArray[Any]) -> Numbers:
    """The row of the op of this kind that belongs to each compute row, or -1."""
    rows = np.flatnonzero(schedule.kind == int(kind))
    table = np.full((schedule.num_stages, schedule.num_microbatches), -1)
    table[schedule.stage[rows], schedule.microbatch[rows]] = rows
    return np.asarray(table[schedule.stage[compute], schedule.microbatch[compute]])


def _slot_before(schedule: Schedule, rows: Numbers) -> Numbers:
    """The slot of the same device after which each row stands; -1 where there is none."""
    slot = schedule.row_slot[rows]
    return np.where(slot < schedule.device_slots[schedule.device[rows]], -1, slot)


def _numbered(keys: Numbers, order: Numbers) -> Numbers:
    """Per element the number of its key, keys numbered in order of appearance; element ``order[i]`` has ``keys[i]``."""
    _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    result = np.empty(len(order), np.int64)
    result[order] = number[inverse.reshape(-1)]
    return result


def _issues(listed: Schedule, rows: Numbers) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Per slot the items that stand after it, and per device those before its first slot, in order of their rows."""
    issues: list[tuple[int, ...]] = [()] * listed.num_slots
    first: list[tuple[int, ...]] = [()] * listed.num_devices
    order = np.argsort(rows, kind="stable")
    slots, devices = _slot_before(listed, rows)[order].tolist(), listed.device[rows[order]].tolist()
    for item, slot, device in zip(order.tolist(), slots, devices, strict=True):
        if slot >= 0:
            issues[slot] = (*issues[slot], item)
        else:
            first[device] = (*first[device], item)
    return issues, first


def _traffic(program: Program, listed: Schedule, rows: Numbers, peer: Numbers, together: Collectives, explicit: bool) -> Traffic:
    members = [(node, device, row) for node in together.nodes for device, row in zip(node.members, node.rows, strict=True)]
    number = np.arange(len(rows) // 2)

    def joined(of_messages: NDArray[Any], of_members: list[int], dtype: type[np.generic]) -> NDArray[Any]:
        return np.concatenate([of_messages, of_members]).astype(dtype)

    return Traffic(
        program.schedule,
        joined(listed.kind[rows], [int(node.kind) for node, _, _ in members], np.int8),
        joined(listed.device[rows], [device for _, device, _ in members], np.int32),
        joined(listed.stage[rows], [node.stage for node, _, _ in members], np.int32),
        joined(listed.microbatch[rows], [node.number for node, _, _ in members], np.int32),
        joined(peer, [-1] * len(members), np.int32),
        joined(np.tile(program.message_bytes, 2)[: len(rows)], [0] * len(members), np.float64),
        joined(rows if explicit else np.full(len(rows), -1), [row for _, _, row in members], np.int64),
        joined(np.concatenate([number, number]), [-1] * len(members), np.int64),
    )
