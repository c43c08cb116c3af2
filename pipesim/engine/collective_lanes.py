"""Collectives under way: who has entered which, and whose turn it is."""

from __future__ import annotations

from collections import deque
from typing import Any

from pipesim.engine.clock import Clock, Event, EventPriority
from pipesim.engine.networks import FairNetwork, FifoNetwork
from pipesim.engine.pace import Pace
from pipesim.engine.program import Program

__all__ = ["CollectiveLanes"]

# When everything else of that time has happened, links included.
_AFTER_ALL = EventPriority(2**31)


class CollectiveLanes:
    """The collectives of a run: each begins when every member has entered it and has nothing else of that kind under way.

    Those that streams list run on each device in the order in which they are listed. Implied ones go as they are ready.
    """

    def __init__(self, env: Clock, program: Program, paces: dict[int, Pace], shared: FifoNetwork | FairNetwork | None) -> None:
        self.env, self.paces, self.network, steps = env, paces, shared, program.steps
        self.first_route = 0 if shared is None else len(program.routes)
        if shared is not None:
            shared.collectives = (self._taken, self._left)
        found = program.plan.collectives
        self.nodes = found.nodes
        self.following = found.following
        self.count = len(self.nodes)
        self.needs = [dict(needs) for _ in range(steps) for needs in found.needs]
        self.missing = [len(node.members) for _ in range(steps) for node in self.nodes]
        self.began = [0.0] * (self.count * steps)
        self.over = [0.0] * (self.count * steps)
        self.done: set[int] = set()
        self.events: dict[int, Event] = {}
        self.busy: set[int] = set()
        self.queues: dict[int, deque[int]] = {device: deque() for node in self.nodes for device in node.members}  # of listed ones
        self.ready: list[int] = []
        self.choosing = False

    def enter(self, node: int, device: int) -> None:
        """Lets a device come one step closer to a node (step x nodes + node), most often into it."""
        needs = self.needs[node]
        needs[device] -= 1
        if needs[device]:
            return
        if self.nodes[node % self.count].listed:
            self.queues[device].append(node)
        self.missing[node] -= 1
        if not self.missing[node]:
            self.ready.append(node)
            self._choose_last()

    def ended(self, node: int) -> Event | None:
        """Returns what to wait for, or None if a node has ended."""
        if node in self.done:
            return None
        event = self.events.get(node)
        if event is None:
            event = self.events[node] = Event(self.env)
        return event

    def _choose_last(self) -> None:
        if not self.choosing and self.ready:
            self.choosing = True
            choice = Event(self.env)
            choice._ok, choice._value = True, None
            choice.callbacks.append(self._choose)
            self.env.schedule(choice, priority=_AFTER_ALL)

    def _choose(self, _: Event) -> None:
        self.choosing = False
        waiting = []
        for node in self.ready:
            about = self.nodes[node % self.count]
            free = not any(device in self.busy or (about.listed and self.queues[device][0] != node) for device in about.members)
            if free:
                self._begin(node)
            else:
                waiting.append(node)
        self.ready = waiting

    def _begin(self, node: int) -> None:
        about = self.nodes[node % self.count]
        self.began[node] = self.env.now
        self.busy.update(about.members)
        if self.paces and about.time:
            for device in about.members:
                self.paces[device].begin("collective")
        if self.network is None or not self.network.routes[self.first_route + node % self.count]:
            self.env.timeout(about.time, node).callbacks.append(self._end)
        else:  # as many bytes as take that time if nothing else is on the way
            load, capacity = self.network.slowest[self.first_route + node % self.count]
            self.network.ask(-1 - node, self.first_route + node % self.count, about.time * capacity / load)

    def _taken(self, node: int) -> None:
        self.began[node] = self.env.now

    def _left(self, node: int, time: float) -> None:
        end = Event(self.env)
        end.callbacks.append(self._end)
        self.env.trigger_at(end, time)
        end._value = node

    def _end(self, event: Event) -> None:
        node: Any = event.value
        step, number = divmod(node, self.count)
        about = self.nodes[number]
        self.over[node] = self.env.now
        self.done.add(node)
        self.busy.difference_update(about.members)
        for device in about.members:
            if about.listed:
                self.queues[device].popleft()
            if self.paces and about.time:
                self.paces[device].end("collective")
        waiting = self.events.pop(node, None)
        if waiting is not None:
            waiting.succeed()
        for other, device in self.following.get(number, ()):
            self.enter(step * self.count + other, device)
        self._choose_last()
