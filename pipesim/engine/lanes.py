"""Communication lanes: SENDs and RECVs in their order, and with whom they meet.

What a device's process sees is a transport (:mod:`pipesim.engine.transports`): ``issue(item)`` when its lane reaches an item
of the plan, ``receive(message)`` before a slot that needs it, and ``ended(item)`` where it waits for what it has issued.

    lane of device 0   | SEND m0 | SEND m1 |......RECV m2....|      a lane is first in, first out: what has come to its head
    lane of device 1        | RECV m0 |...SEND m2 ...               holds it until it has ended, also while it waits
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from pipesim.engine.clock import Clock, Event
from pipesim.engine.networks import network
from pipesim.engine.pace import Pace
from pipesim.engine.plan import Plan
from pipesim.engine.program import Program
from pipesim.engine.transports import OffloadTransport

__all__ = ["LaneTransport"]


class LaneTransport(OffloadTransport):
    """Messages whose SENDs and RECVs are ops with a place of their own.

    Times of things are numbered step after step, as messages are: ``step x how many there are + number``.

    Attributes:
        start: End of a message to when it came to the head of its lane.
        end: End of a message to when it was done.
        posted: Per item whether it has come to the head of its lane.
        open: Group to how many of its ends are not done, while it is at the head of its lane.
        heads: Per lane the item at its head, -1 where there is none.
        queues: Per lane the items behind it.
    """

    def __init__(self, env: Clock, program: Program, plan: Plan, paces: dict[int, Pace]) -> None:
        super().__init__(env, program)
        communication = program.cluster.communication
        self.plan = plan
        self.messages = len(program.messages)
        self.ends = 2 * self.messages
        self.num_groups = len(plan.groups)
        self.items = self.num_groups + len(program.moves)
        self.meets = communication.sends == "rendezvous" or communication.batched
        self.late_send = self.meets or communication.blocking  # whether a SEND ends when its message is there
        self.shape = communication.shape_messages
        self.paces = paces
        self.start = [0.0] * (self.ends * program.steps)
        self.end = [0.0] * (self.ends * program.steps)
        self.arrival = [0.0] * (self.count * program.steps)
        self.there: set[int] = set()  # messages that have arrived before their RECV was posted
        self.taken_over: set[int] = set()  # messages whose RECV has ended, and whose slot has not asked yet
        self.begun: set[int] = set()
        self.posted = bytearray(self.items * program.steps)
        self.lane_of, self.group_of, self.groups = plan.lane_of, plan.group_of, plan.groups
        self.heads = [-1] * plan.lanes
        self.advancing = bytearray(plan.lanes)
        self.queues: list[deque[int]] = [deque() for _ in range(plan.lanes)]
        self.open: dict[int, int] = {}  # group to its ends that are not done
        self.waiting: dict[int, Event] = {}  # item to the event of a device that waits for it
        self.neighbours = _neighbours(plan, self.messages) if self.meets else []
        self.missing: dict[int, int] = {}  # group to its neighbours that are not there yet
        self.source = program.messages.source_device.tolist()
        self.target = program.messages.target_device.tolist()
        self.partner = np.where(program.moves.partner < 0, program.moves.device, program.moves.partner).tolist()
        self.takes_time = (program.transfer > 0).tolist()
        self.sizes: list[float] = program.sizes.tolist()
        self.route: list[int] = program.link.tolist()
        self.network = None if program.cluster.network is None else network(env, program, self.taken, self.left_at, self.order)

    # -- what a device does ----------------------------------------------------------------------------------------------

    def issue(self, item: int) -> None:
        """Takes a group or a move that a device's lane has just reached."""
        lane = self.lane_of[item % self.items]
        if lane < 0:
            self._post(item)
        else:
            self.queues[lane].append(item)
            if self.heads[lane] < 0:
                self._advance(lane)

    def receive(self, message: int) -> Event | None:
        """Returns what to wait for, or None if the RECV of a message has ended, or the RELOAD if it is one."""
        if message % self.count >= self.messages:
            return super().receive(message)
        if message in self.taken_over:
            self.taken_over.remove(message)
            return None
        event = self.awaited[message] = Event(self.env)
        return event

    def ended(self, item: int) -> Event | None:
        """Returns what to wait for, or None if a group that has been issued has ended."""
        if self.posted[item] and item not in self.open:
            return None
        event = self.waiting[item] = Event(self.env)
        return event

    # -- groups ----------------------------------------------------------------------------------------------------------

    def _post(self, item: int) -> None:
        step, number = divmod(item, self.items)
        if number >= self.num_groups:
            self.ask(step * self.count + self.messages + number - self.num_groups)
            return
        now, first = self.env.now, step * self.ends
        group = self.groups[number]
        for end in group:
            self.start[first + end] = now
        self.posted[item] = True
        self.open[item] = len(group)
        if self.meets:
            self._meet(step, number, item)
            return
        for end in group:
            if end < self.messages:
                self._begin(step * self.count + end)
            else:
                message = step * self.count + end - self.messages
                if message in self.there:
                    self.there.remove(message)
                    self._received(message)

    def _meet(self, step: int, number: int, item: int) -> None:
        """Lets a group come to those that it exchanges with; those for whom it was the last one start."""
        first = step * self.items
        self.missing[item] = 0
        starting = []
        for other in self.neighbours[number]:
            if self.posted[first + other]:
                self.missing[first + other] -= 1
                if not self.missing[first + other]:
                    starting.append(other)
            else:
                self.missing[item] += 1
        if not self.missing[item]:
            starting.append(number)
        for started in starting:
            for end in self.groups[started]:
                message = end % self.messages
                partner = self.group_of[message if end >= self.messages else message + self.messages]
                if self.missing.get(first + partner, 1) == 0 and step * self.count + message not in self.begun:
                    self._begin(step * self.count + message)

    def _begin(self, message: int) -> None:
        """Lets a message go, or its shape first."""
        if self.meets:
            self.begun.add(message)
        if self.shape:
            self.env.call_at(self.env.now + self.latency[message % self.count], self._shaped, message)
        else:
            self.ask(message)

    def _shaped(self, event: Event) -> None:
        message: Any = event.value
        self.ask(message)

    # -- transfers -------------------------------------------------------------------------------------------------------

    def ask(self, transfer: int) -> None:
        """Asks for the transfer's link, or for what its route shares with others."""
        number = transfer % self.count
        if self.network is not None:
            self.network.ask(transfer, self.route[number], self.sizes[number])
        else:
            super().ask(transfer)

    def order(self, transfer: int) -> tuple[int, int, int]:
        """(device, step, position): whose turn it is of those that ask a network at one time."""
        step, number = divmod(transfer, self.count)
        return self.device[number], step, self.rank[number]

    def left_at(self, transfer: int, time: float) -> None:
        """Goes on with a transfer whose last byte leaves at a time."""
        if time > self.env.now:
            self.env.call_at(time, self._left, transfer)
        else:
            self.left(transfer)

    def _left(self, event: Event) -> None:
        transfer: Any = event.value
        self.left(transfer)

    def taken(self, transfer: int) -> None:
        """Notes that a link has just taken a transfer."""
        super().taken(transfer)
        number = transfer % self.count
        if not self.paces or not self.takes_time[number]:
            return
        if number < self.messages:
            self.paces[self.source[number]].begin("p2p")
            self.env.call_at(self.env.now + self.latency[number], self._coming, number)
        else:
            for device in self._both(number):
                self.paces[device].begin("offload")

    def _coming(self, event: Event) -> None:
        """The first byte of a message is at the other end."""
        number: Any = event.value
        self.paces[self.target[number]].begin("p2p")

    def left(self, transfer: int) -> None:
        """Goes on with a transfer whose last byte has just left its link."""
        number = transfer % self.count
        if self.paces and self.takes_time[number]:
            for device in (self.source[number],) if number < self.messages else self._both(number):
                self.paces[device].end("p2p" if number < self.messages else "offload")
        if number >= self.messages:
            self._move_left(transfer, number)
            return
        if not self.late_send:
            self._done(transfer // self.count, number)
        self.env.call_at(self.env.now + self.latency[number], self._arrived, transfer)

    def _both(self, number: int) -> set[int]:
        move = number - self.messages
        return {self.device[number], self.partner[move]}

    def _move_left(self, transfer: int, number: int) -> None:
        arrival = self.arrival[transfer] = self.env.now + self.latency[number]
        step = transfer // self.count
        self.env.call_at(arrival, self._move_ended, step * self.items + self.num_groups + number - self.messages)
        if number not in self.out:
            self.arrive_at(transfer, arrival)

    def _move_ended(self, event: Event) -> None:
        item: Any = event.value
        self._next(item)

    def _arrived(self, event: Event) -> None:
        message: Any = event.value
        self.arrival[message] = self.env.now
        step, number = divmod(message, self.count)
        if self.paces and self.takes_time[number]:
            self.paces[self.target[number]].end("p2p")
        if self.late_send:
            self._done(step, number)
        if self.posted[step * self.items + self.group_of[number + self.messages]]:
            self._received(message)
        else:
            self.there.add(message)

    def _received(self, message: int) -> None:
        """Ends a RECV."""
        event = self.awaited.pop(message, None)
        if event is None:
            self.taken_over.add(message)
        else:
            self.env.happen(event)
        step, number = divmod(message, self.count)
        self._done(step, number + self.messages)

    def _done(self, step: int, end: int) -> None:
        """Ends one end of a message, and its group if it was the last."""
        self.end[step * self.ends + end] = self.env.now
        item = step * self.items + self.group_of[end]
        if self.open[item] > 1:
            self.open[item] -= 1
        else:
            del self.open[item]
            self._next(item)

    def _next(self, item: int) -> None:
        """Goes on with a lane whose head has ended."""
        event = self.waiting.pop(item, None)
        lane = self.lane_of[item % self.items]
        if lane >= 0:
            self.heads[lane] = -1
            self._advance(lane)
        if event is not None:
            self.env.happen(event)

    def _advance(self, lane: int) -> None:
        """Posts what is next on a lane, and goes on while that ends at once."""
        if self.advancing[lane]:
            return  # whoever does goes on
        self.advancing[lane] = True
        queue, heads = self.queues[lane], self.heads
        while queue and heads[lane] < 0:
            heads[lane] = queue.popleft()
            self._post(heads[lane])
        self.advancing[lane] = False


def _neighbours(plan: Plan, messages: int) -> list[tuple[int, ...]]:
    """Per group those that it exchanges messages with."""
    found = []
    for group in plan.groups:
        others = [plan.group_of[end + messages if end < messages else end - messages] for end in group]
        found.append(tuple(dict.fromkeys(others)))
    return found
