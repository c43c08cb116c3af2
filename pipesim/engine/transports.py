"""How messages travel in the SimPy engine: what a device's process sees is ``send(message)`` and ``receive(message)``.

Times are exact: they are what the formulas add up, in their order. A link keeps a queue and real events, but has one event
per message where nothing queues: its arrival, at the very time that the formula gives.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Any

import numpy as np

from pipesim.engine.clock import Clock, Event, EventPriority
from pipesim.engine.program import Program

__all__ = ["OffloadTransport", "QueueingTransport", "Transport"]


class Transport:
    """Messages that only take their link's latency, and do not queue.

    Attributes:
        arrivals: Message (step x messages + message) to the time at which it is there, where nobody has asked for it yet.
        awaited: Message to the event that its receiver waits for, where nobody knows yet when it will be there. Whoever
            comes first leaves a note in one of the two, the other takes it out: so only messages on their way are held, and
            only those that somebody waits for have an event.
    """

    def __init__(self, env: Clock, program: Program) -> None:
        self.env = env
        self.count = len(program.latency)
        self.latency: list[float] = program.latency.tolist()
        self.arrivals: dict[int, float] = {}
        self.awaited: dict[int, Event] = {}

    def send(self, message: int) -> None:
        """Takes a message whose producer has just ended."""
        self.arrive_at(message, self.env.now + self.latency[message % self.count])

    def receive(self, message: int) -> Event | None:
        """Returns what to wait for, or None if the message is there."""
        arrival = self.arrivals.pop(message, None)
        if arrival is None:
            event = self.awaited[message] = Event(self.env)
            return event
        if arrival <= self.env.now:
            return None
        event = Event(self.env)
        self.env.trigger_at(event, arrival)
        return event

    def arrive_at(self, message: int, time: float) -> None:
        """Lets a message be there at a time."""
        event = self.awaited.pop(message, None)
        if event is None:
            self.arrivals[message] = time
        else:
            self.env.trigger_at(event, time)


class QueueingTransport(Transport):
    """Links with a bandwidth: each serves one message at a time, first come first served."""

    def __init__(self, env: Clock, program: Program) -> None:
        super().__init__(env, program)
        self.transfer: list[float] = program.transfer.tolist()
        # None for a message whose link has no bandwidth
        links = [Link(self) for _ in range(int(program.link.max()) + 1)]
        self.links = [links[number] if queued else None for number, queued in zip(program.link.tolist(), program.queued.tolist(), strict=True)]
        self.departed: list[float] = [0.0] * (self.count * program.steps)

    def send(self, message: int) -> None:
        """Takes a message whose producer has just ended, and queues it on its link."""
        link = self.links[message % self.count]
        if link is None:
            self.departed[message] = self.env.now
            super().send(message)
        else:
            link.ask(message)


class Link:
    """One direction between two devices. Only its source device sends on it, so program order is arrival order."""

    __slots__ = ("env", "free", "queue", "transport")

    def __init__(self, transport: QueueingTransport) -> None:
        self.transport = transport
        self.env = transport.env
        self.free = 0.0  # when the message that it carries has left it
        self.queue: deque[int] = deque()

    def ask(self, message: int) -> None:
        """Takes a message, or queues it until those before it have left."""
        if self.env.now >= self.free and not self.queue:
            self._serve(message)
            return
        if not self.queue:
            self._wake_when_free()
        self.queue.append(message)

    def _serve(self, message: int) -> None:
        transport, now, number = self.transport, self.env.now, message % self.transport.count
        transport.departed[message] = now
        self.free = now + transport.transfer[number]
        transport.arrive_at(message, self.free + transport.latency[number])

    def _wake_when_free(self) -> None:
        wake = Event(self.env)
        wake.callbacks.append(self._freed)
        self.env.trigger_at(wake, self.free)

    def _freed(self, _: Event) -> None:
        self._serve(self.queue.popleft())
        if self.queue:
            self._wake_when_free()


class OffloadTransport(Transport):
    """Messages, and the OFFLOAD and RELOAD ops of the devices' communication lanes.

    A RELOAD takes a link from another device to its own, so two devices may ask for one link. It chooses when all else at
    that time has happened, by (time asked, device, position).
    """

    def __init__(self, env: Clock, program: Program) -> None:
        super().__init__(env, program)
        self.transfer: list[float] = program.transfer.tolist()
        self.device: list[int] = program.transfer_device.tolist()
        self.rank: list[int] = program.transfer_rank.tolist()
        links = [SharedLink(self, number) for number in range(int(program.link.max(initial=-1)) + 1)]
        self.links = [links[number] if queued else None for number, queued in zip(program.link.tolist(), program.queued.tolist(), strict=True)]
        lanes = {device: CommunicationLane(self) for device in np.unique(program.moves.device).tolist()}
        self.lanes = [None] * len(program.messages) + [lanes[device] for device in program.moves.device.tolist()]
        self.out = set((len(program.messages) + np.flatnonzero(program.moves.out)).tolist())
        self.departed: list[float] = [0.0] * (self.count * program.steps)

    def send(self, message: int) -> None:
        """Takes a message whose producer has just ended, or issues an OFFLOAD or RELOAD that the lane has just reached."""
        lane = self.lanes[message % self.count]
        if lane is None:
            self.ask(message)
        else:
            lane.issue(message)

    def ask(self, transfer: int) -> None:
        """Asks the transfer's link to take it."""
        link = self.links[transfer % self.count]
        if link is None:
            self.taken(transfer)
            self.left(transfer)
        else:
            link.ask(transfer)

    def taken(self, transfer: int) -> None:
        """Notes that a link has just taken a transfer."""
        self.departed[transfer] = self.env.now

    def left(self, transfer: int) -> None:
        """Lets a transfer whose last byte has just left its link be there after the link's latency."""
        number = transfer % self.count
        time, lane = self.env.now + self.latency[number], self.lanes[number]
        if lane is not None:
            ended = Event(self.env)
            ended.callbacks.append(lane.ended)
            self.env.trigger_at(ended, time)
        if number not in self.out:  # nobody waits for an OFFLOAD
            self.arrive_at(transfer, time)


# After every other event of the same time, which SimPy schedules as 0 (urgent) or 1 (normal); of several links that can
# choose then, the lowest is first, so that a transfer of no time makes the same difference on every engine.
_LAST = 2


class SharedLink:
    """One direction between two devices, for which both may ask."""

    __slots__ = ("asked", "busy", "choosing", "priority", "transport")

    def __init__(self, transport: OffloadTransport, number: int) -> None:
        self.transport = transport
        self.priority = EventPriority(_LAST + number)
        self.busy = self.choosing = False
        self.asked: list[tuple[float, int, int, int, int]] = []

    def ask(self, transfer: int) -> None:
        """Queues a transfer by (time asked, device, step, position)."""
        transport = self.transport
        step, number = divmod(transfer, transport.count)
        heapq.heappush(self.asked, (transport.env.now, transport.device[number], step, transport.rank[number], transfer))
        self._choose_last()

    def _choose_last(self) -> None:
        if self.asked and not self.busy and not self.choosing:
            self.choosing = True
            choice = Event(self.transport.env)
            choice._ok, choice._value = True, None
            choice.callbacks.append(self._choose)
            self.transport.env.schedule(choice, priority=self.priority)

    def _choose(self, _: Event) -> None:
        self.busy, self.choosing = True, False
        transport = self.transport
        transfer = heapq.heappop(self.asked)[-1]
        transport.taken(transfer)
        transport.env.timeout(transport.transfer[transfer % transport.count], transfer).callbacks.append(self._left)

    def _left(self, event: Event) -> None:
        transfer: Any = event.value
        self.transport.left(transfer)
        self.busy = False
        self._choose_last()


class CommunicationLane:
    """The OFFLOAD and RELOAD ops of one device: one at a time, in the order of its stream."""

    __slots__ = ("busy", "queue", "transport")

    def __init__(self, transport: OffloadTransport) -> None:
        self.transport = transport
        self.busy = False
        self.queue: deque[int] = deque()

    def issue(self, move: int) -> None:
        """Starts a move when those before it have ended."""
        if self.busy:
            self.queue.append(move)
        else:
            self.busy = True
            self.transport.ask(move)

    def ended(self, _: Event) -> None:
        """Goes on to the next one."""
        if self.queue:
            self.transport.ask(self.queue.popleft())
        else:
            self.busy = False
