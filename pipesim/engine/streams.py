"""First-in, first-out streams of single SENDs and RECVs over private links: when an op ends is known as soon as it can go.

    SEND  start = max(issued, stream free);   departed = start, left = departed + bytes / bandwidth, arrived = left + latency
    RECV  start = max(issued, stream free);   ends at max(start, arrived)

A stream holds one op at a time, so that no message waits for a link, and all follows from these sums without an event in
between. :class:`pipesim.engine.lanes.LaneTransport` does the same by events, for everything else too.
"""

from __future__ import annotations

from collections import deque

from pipesim.engine.clock import Clock, Event
from pipesim.engine.plan import Plan
from pipesim.engine.program import Program
from pipesim.engine.transports import Transport

__all__ = ["StreamTransport"]


class StreamTransport(Transport):
    """The attributes are those of :class:`pipesim.engine.lanes.LaneTransport`; every group is one end."""

    def __init__(self, env: Clock, program: Program, plan: Plan) -> None:
        super().__init__(env, program)
        communication = program.cluster.communication
        self.messages = self.count
        self.ends = 2 * self.messages
        self.items = self.num_groups = len(plan.groups)
        self.meets = communication.sends == "rendezvous"
        self.blocking = communication.blocking
        self.shape = communication.shape_messages
        self.transfer: list[float] = program.transfer.tolist()
        self.lane_of = plan.lane_of
        self.end_of = [group[0] for group in plan.groups]
        self.item_of = plan.group_of
        self.start = [0.0] * (self.ends * program.steps)
        self.end = [0.0] * (self.ends * program.steps)
        self.departed = [0.0] * (self.count * program.steps)
        self.arrival = [-1.0] * (self.count * program.steps)  # -1 where it is not known yet
        self.posted = bytearray(self.items * program.steps)
        self.heads = [-1] * plan.lanes  # what waits at the head of a lane, for it is not known how long
        self.free = [0.0] * plan.lanes  # when a lane is free, where nothing waits at its head
        self.queues: list[deque[int]] = [deque() for _ in range(plan.lanes)]
        self.issued: list[deque[float]] = [deque() for _ in range(plan.lanes)]
        self.ending: dict[int, float] = {}  # when items end that a device will ask for
        self.waiting: dict[int, Event] = {}
        self.missing: dict[int, int] = {}

    def issue(self, item: int) -> None:
        """Takes an op that its device has just reached."""
        lane = self.lane_of[item % self.items]
        self.queues[lane].append(item)
        self.issued[lane].append(self.env.now)
        if self.heads[lane] < 0:
            self._advance(lane)

    def ended(self, item: int) -> Event | None:
        """Returns what to wait for, or None if an op has ended."""
        time = self.ending.pop(item, None)
        if time is not None and time <= self.env.now:
            return None
        event = Event(self.env)
        if time is None:
            self.waiting[item] = event
        else:
            self.env.trigger_at(event, time)
        return event

    def _advance(self, lane: int) -> None:
        """Lets ops go until one has to wait; what they free on other lanes goes on, too."""
        go_on = [lane]
        while go_on:
            lane = go_on.pop()
            queue, issued, free = self.queues[lane], self.issued[lane], self.free[lane]
            while queue:
                item, begin = queue.popleft(), issued.popleft()
                if free > begin:
                    begin = free
                step, number = divmod(item, self.items)
                end = self.end_of[number]
                sends = end < self.messages
                message = step * self.count + (end if sends else end - self.messages)
                self.start[step * self.ends + end] = begin
                self.posted[item] = True
                if self.meets:
                    other = step * self.items + self.item_of[end + self.messages if sends else end - self.messages]
                    if not self.posted[other]:
                        self.heads[lane] = item
                        break
                    there = step * self.ends + self.end_of[other % self.items]
                    self._go(message, max(begin, self.start[there]))
                    free = self.arrival[message]
                    self._done(item, step * self.ends + end, free)
                    self._release(other, there, free, go_on)
                elif sends:
                    left = self._go(message, begin)
                    free = self.arrival[message] if self.blocking else left
                    self._done(item, step * self.ends + end, free)
                    other = step * self.items + self.item_of[end + self.messages]
                    if self.posted[other]:
                        there = step * self.ends + end + self.messages
                        self._release(other, there, max(self.start[there], self.arrival[message]), go_on)
                elif self.arrival[message] < 0:
                    self.heads[lane] = item
                    break
                else:
                    free = max(begin, self.arrival[message])
                    self._done(item, step * self.ends + end, free)
                if not sends:
                    self.arrive_at(message, free)
            self.free[lane] = free

    def _go(self, message: int, time: float) -> float:
        """Sends a message at a time, and returns when it has left."""
        number = message % self.count
        if self.shape:
            time = time + self.latency[number]
        self.departed[message] = time
        left = time + self.transfer[number]
        self.arrival[message] = left + self.latency[number]
        return left

    def _release(self, item: int, end: int, time: float, go_on: list[int]) -> None:
        """Ends the op that waits at the head of another lane."""
        lane = self.lane_of[item % self.items]
        self.heads[lane] = -1
        self.free[lane] = time
        self._done(item, end, time)
        step, own = divmod(end, self.ends)
        if own >= self.messages:
            self.arrive_at(step * self.count + own - self.messages, time)
        go_on.append(lane)

    def _done(self, item: int, end: int, time: float) -> None:
        self.end[end] = time
        if self.blocking:
            event = self.waiting.pop(item, None)
            if event is None:
                self.ending[item] = time
            else:
                self.env.trigger_at(event, time)
