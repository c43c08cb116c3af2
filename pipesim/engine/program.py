"""What an engine runs: a schedule with its numbers, as columns, the same for every engine."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.cluster import Cluster
from pipesim.columns import distinct
from pipesim.costs.model import constant, repeated
from pipesim.dataflow import Messages, first_updates, messages
from pipesim.engine.collecting import CollectiveTimes
from pipesim.engine.plan import Plan, make_plan
from pipesim.lowering import is_explicit
from pipesim.memory import Moves, moves
from pipesim.network import HOST, Route, slowest
from pipesim.op import Kind
from pipesim.remember import remembered
from pipesim.schedule import Schedule

__all__ = ["Program", "Times", "reductions", "transfer_slots"]

Floats = NDArray[np.float64]

# start, end: (steps, slots); sent, departed, arrived: (steps, transfers), the messages first, then the moves
Times = tuple[Floats, Floats, Floats, Floats, Floats]


@dataclass(frozen=True, eq=False)
class Program:
    """One run to be made.

    A transfer is what takes a link: first the messages, in their order, then the moves (OFFLOAD and RELOAD), in theirs.

    Attributes:
        schedule: Checked, with the updates that take time listed.
        durations: (slots,) on the device at hand.
        message_bytes: (messages,)
        cluster: Where the links are.
        steps: How often.
        wants_barrier: Whether devices wait for each other before updates, and between steps.
        move_bytes: (moves,)
        collectives: How long collectives take; None where none takes any time.
        labels: What to call rows of communication in messages, where not as the schedule does.
    """

    schedule: Schedule
    durations: Floats
    message_bytes: Floats
    cluster: Cluster
    steps: int
    wants_barrier: bool
    move_bytes: Floats = field(default_factory=lambda: np.zeros(0))
    collectives: CollectiveTimes | None = None
    labels: Mapping[int, str] = field(default_factory=dict)

    def with_durations(self, durations: Floats) -> Program:
        """Returns the same run with other durations; what does not depend on them is kept."""
        other = copy.copy(self)
        object.__setattr__(other, "durations", durations)
        return other

    @property
    def barrier(self) -> bool:
        """Whether there is a barrier: only synchronous schedules have one."""
        return self.wants_barrier and self.schedule.weights == "flush"

    @cached_property
    def beyond_plain(self) -> str | None:
        """What makes the run more than slots and messages that go by themselves, in words, or None."""
        if is_explicit(self.schedule):
            return "listed SEND and RECV ops"
        if not self.cluster.communication.is_default:
            return "communication other than eager and overlapped"
        if (self.collectives is not None or self.schedule.has(Kind.REDUCE_GRAD)) and self.plan.collectives.nodes:
            return "collectives"
        return None

    @property
    def by_themselves(self) -> bool:
        """Whether messages leave when their producers end, and nothing but their links comes in between."""
        return self.cluster.communication.is_default and (self.cluster.communication.stream == "free" or not is_explicit(self.schedule))

    @cached_property
    def plan(self) -> Plan:
        """What devices issue beside their slots, for a run that is more than plain."""
        return make_plan(self)

    @property
    def messages(self) -> Messages:
        """The messages, in the order in which their producers stand."""
        return messages(self.schedule)

    @property
    def moves(self) -> Moves:
        """The OFFLOAD and RELOAD ops, in row order."""
        return moves(self.schedule)

    @property
    def source_slot(self) -> NDArray[np.int64]:
        """(transfers,) slot at whose end the message is sent, or the lane reaches the move."""
        return transfer_slots(self.schedule)[0]

    @property
    def target_slot(self) -> NDArray[np.int64]:
        """(transfers,) slot that waits for it; -1 for an OFFLOAD. What a RELOAD brings is for the backward, or R before it."""
        return transfer_slots(self.schedule)[1]

    @property
    def transfer_device(self) -> NDArray[np.int32]:
        """(transfers,) the device that asks for the link: the sender of a message, the device that lists the move."""
        return _joined(self.messages.source_device, self.moves.device)

    @cached_property
    def transfer_rank(self) -> NDArray[np.int64]:
        """(transfers,) place in the order (device, position, half, destination stage) of the ops that ask."""
        found = self.messages
        row = np.concatenate([found.source, self.moves.row])
        rank = np.empty(len(row), np.int64)
        rank[np.lexsort((np.concatenate([self.schedule.stage[found.target], self.moves.stage]), row))] = np.arange(len(row))
        return rank

    @property
    def latency(self) -> Floats:
        """(transfers,) latency of each transfer's link."""
        return self._link_values[0]

    @property
    def transfer(self) -> Floats:
        """(transfers,) time for which each holds its link; 0 where only latency counts."""
        return self._link_values[1]

    @property
    def queued(self) -> NDArray[np.bool_]:
        """(transfers,) whether the link has a bandwidth, and so a queue."""
        return self._link_values[2]

    @property
    def link(self) -> NDArray[np.int64]:
        """(transfers,) number of the link: one per ordered pair of devices that is used, the host counted as one more device."""
        return _links(self.schedule)[0]

    @property
    def sizes(self) -> Floats:
        """(transfers,) bytes of each."""
        return _joined(self.message_bytes, self.move_bytes)

    @cached_property
    def routes(self) -> list[Route]:
        """(links,) what a transfer over each link crosses; see :attr:`link`."""
        return [self.cluster.route(*pair) for pair in self.pairs]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(links,) from which device to which each link goes; one of them may be ``HOST``."""
        host = self.schedule.num_devices
        return [(HOST if source == host else source, HOST if target == host else target) for source, target in _links(self.schedule)[1]]

    @cached_property
    def _route_values(self) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """The same where links are shared: how long a transfer takes if nobody else is on its way."""
        latency = np.array([(self.cluster.host if HOST in pair else self.cluster.link(*pair)).latency for pair in self.pairs])[self.link]
        load, capacity = np.array([slowest(route) for route in self.routes]).reshape(-1, 2)[self.link].T
        return latency, self.sizes * load / capacity, load > 0

    @cached_property
    def _link_values(self) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        count, host, size = len(self.source_slot), self.schedule.num_devices, self.sizes
        if self.cluster.network is not None:
            return self._route_values
        if not len(self.moves) and self.cluster.between is None and not self.cluster.links:  # all alike: views of one number
            link = self.cluster.inside
            latency, queued = repeated(link.latency, count), repeated(link.bandwidth is not None, count)
            if link.bandwidth is None:
                return latency, repeated(0.0, count), queued
            number = constant(size)
            return latency, size / link.bandwidth if number is None else repeated(number / link.bandwidth, count), queued
        number_of, pairs = _links(self.schedule)
        links = [self.cluster.host if host in pair else self.cluster.link(*pair) for pair in pairs]
        latency = np.array([link.latency for link in links])[number_of]
        bandwidth = np.array([np.inf if link.bandwidth is None else link.bandwidth for link in links])[number_of]
        return latency, size / bandwidth, np.isfinite(bandwidth)

    @property
    def used_devices(self) -> NDArray[np.int64]:
        """Devices that have any slot."""
        return self.schedule.used_devices

    @cached_property
    def barrier_slots(self) -> NDArray[np.int64]:
        """(devices,) the slot before which a device waits for all others: its first update; -1 where it waits at the end."""
        return first_updates(self.schedule) if self.barrier else np.full(self.schedule.num_devices, -1)

    @property
    def reductions(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Gradient reductions over replicas: (slots of the last gradients, slots of the updates that wait for them).

        One per stage with replicas and update. It takes no time of its own here, but an update of one replica waits for
        the gradients of all.
        """
        return reductions(self.schedule)


# What follows from the schedule alone is kept with it, for the next run.


def _joined(of_messages: NDArray[Any], of_moves: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([of_messages, of_moves]) if len(of_moves) else of_messages


@remembered
def transfer_slots(schedule: Schedule) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(transfers,) slots from which and to which."""
    found, moved = messages(schedule), moves(schedule)
    if not len(moved):
        return found.source_slot, found.target_slot
    recompute = schedule.rows_of(Kind.R)[moved.stage, moved.microbatch]
    consumer = np.where(recompute > moved.row, recompute, schedule.backward_rows[moved.stage, moved.microbatch])
    source = np.concatenate([found.source_slot, schedule.row_slot[moved.row]])
    return source, np.concatenate([found.target_slot, np.where(moved.out, -1, schedule.row_slot[consumer])])


@remembered
def _links(schedule: Schedule) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
    """(transfers,) number of the link; and per link the devices from which and to which, the host after the last device."""
    found, moved, host = messages(schedule), moves(schedule), schedule.num_devices
    partner = np.where(moved.partner < 0, host, moved.partner)
    source = _joined(found.source_device, np.where(moved.out, moved.device, partner))
    target = _joined(found.target_device, np.where(moved.out, partner, moved.device))
    code = source.astype(np.int64) * (host + 1) + target
    used = distinct(code)
    number = np.searchsorted(used, code) if int(code.max(initial=0)) > 4 * len(code) + 1000 else np.cumsum(np.bincount(code) > 0)[code] - 1
    return number, [divmod(pair, host + 1) for pair in used.tolist()]


@remembered
def reductions(schedule: Schedule) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """See :attr:`Program.reductions`."""
    if not schedule.has(Kind.U) or not schedule.replicas:
        return []
    updates = np.flatnonzero(schedule.kind[schedule.slot_row] == int(Kind.U))
    result: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    kind, stage = schedule.kind, schedule.stage
    gradient_rows = np.flatnonzero((kind == int(Kind.B)) | (kind == int(Kind.W)))
    gradient_rows = gradient_rows[np.argsort(stage[gradient_rows], kind="stable")]
    bounds = np.searchsorted(stage[gradient_rows], np.arange(schedule.num_stages + 1))
    for replicated, devices in schedule.replicas.items():
        own = updates[stage[schedule.slot_row[updates]] == replicated]
        rows = gradient_rows[bounds[replicated] : bounds[replicated + 1]]
        last: dict[int, list[int]] = {}
        waiting: dict[int, list[int]] = {}
        for device in devices:
            mine = schedule.row_slot[rows[schedule.device[rows] == device]]
            for slot in own[schedule.slot_device[own] == device]:
                number = int(schedule.microbatch[schedule.slot_row[slot]])
                waiting.setdefault(number, []).append(int(slot))
                before = mine[: np.searchsorted(mine, slot)]
                if len(before):  # a replica without a gradient so far adds nothing to wait for
                    last.setdefault(number, []).append(int(before[-1]))
        result.extend((tuple(last.get(number, ())), tuple(slots)) for number, slots in waiting.items())
    return result
