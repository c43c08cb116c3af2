"""Links that transfers share, in the SimPy engine: first come first served, or by max-min fair shares.

A network takes any transfer: ``ask(transfer, route, size)``. It calls ``taken(transfer)`` when the route takes it, which is now,
and ``left(transfer, time)`` as soon as it knows when its last byte leaves, at the latest then. Everything that ends or arrives
at a time happens before a network chooses at that time; of those that ask at one time, the lowest ``order(transfer)`` is first.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

from pipesim.engine.clock import Clock, Event, EventPriority
from pipesim.network import Route, slowest

__all__ = ["FairNetwork", "FifoNetwork", "Left", "Order", "Taken"]

Taken = Callable[[Any], None]
Left = Callable[[Any, float], None]
Order = Callable[[Any], tuple[int, int, int]]

# after every other event of the same time, which SimPy schedules as 0 (urgent) or 1 (normal)
_LAST = EventPriority(2)
_NO_LIMIT = float("inf")


class Crossings(NamedTuple):
    """Routes over numbered resources.

    Attributes:
        capacity: Of every resource.
        routes: Per route its (resource, load).
        slowest: Per route the load and the capacity of its slowest resource; (0, 1) for a route that crosses nothing.
    """

    capacity: list[float]
    routes: list[tuple[tuple[int, float], ...]]
    slowest: list[tuple[float, float]]


def crossings(routes: Sequence[Route]) -> Crossings:
    """Numbers the resources, without those that can never hold anything up.

    A resource cannot if everything that crosses it also crosses another one that takes it at least as long.
    """
    users: dict[Any, dict[int, float]] = {}  # resource to route to the time that a byte takes
    for number, route in enumerate(routes):
        for resource, load in route:
            users.setdefault(resource, {})[number] = load / resource.capacity
    # the many ports of a wide device are alike; of those the last is enough, or the comparison would be quadratic
    last = {tuple(own.items()): resource for resource, own in users.items()}
    needed = {resource: own for resource, own in users.items() if last[tuple(own.items())] == resource}
    for resource, own in tuple(needed.items()):
        for other, _ in routes[next(iter(own))]:
            theirs = needed.get(other)
            if other != resource and theirs is not None and all(number in theirs and time <= theirs[number] for number, time in own.items()):
                del needed[resource]
                break
    order = {resource: number for number, resource in enumerate(needed)}
    numbered = [tuple((order[resource], load) for resource, load in route if resource in order) for route in routes]
    return Crossings([resource.capacity for resource in needed], numbered, [slowest(route) for route in routes])


class _Network(ABC):
    """What both have in common: they choose once for everything that happens at one time.

    Args:
        env: The time.
        routes: All that there are.
        taken: Is told of every transfer when it is taken.
        left: Is told when the last byte of a transfer leaves.
        order: Of a transfer among those that ask at one time; no two are equal.
        sorted_asks: Whether one event's asks come in this order, so that there is nothing to wait for where no other event is due.
    """

    def __init__(self, env: Clock, routes: Sequence[Route], taken: Taken, left: Left, order: Order, *, sorted_asks: bool = False) -> None:
        self.env, self.taken, self.left, self.order, self.sorted_asks = env, taken, left, order, sorted_asks
        self.capacity, self.routes, self.slowest = crossings(routes)
        self.asked: list[Any] = []
        self.choosing = False
        self.collectives: tuple[Taken, Left]  # whom to tell of collectives, where there are any

    def choose_last(self) -> None:
        """Lets :meth:`choose` be called when everything else at this time has happened."""
        if not self.choosing:
            self.choosing = True
            choice = Event(self.env)
            choice._ok, choice._value = True, None
            choice.callbacks.append(self.choose)
            self.env.schedule(choice, priority=_LAST)

    @abstractmethod
    def choose(self, _: Event | None = None) -> None:
        """Takes what has been asked for, where it can."""

    def in_order(self, entry: Any) -> tuple[int, int, int]:
        """Sorts what has been asked for; the transfer comes first in every entry."""
        return self.order(entry[0])


class FifoNetwork(_Network):
    """Each resource serves one transfer at a time.

    A transfer starts when all resources of its route are free and nobody who asked before it waits for one of them. It takes as
    long as the slowest of them; each is free again after the time that it takes by itself, so that a fast switch is not held by
    what comes out of a slow port.
    """

    def __init__(self, env: Clock, routes: Sequence[Route], taken: Taken, left: Left, order: Order, *, sorted_asks: bool = False) -> None:
        super().__init__(env, routes, taken, left, order, sorted_asks=sorted_asks)
        self.crossed = [tuple((resource, load, self.capacity[resource]) for resource, load in route) for route in self.routes]
        self.free = [0.0] * len(self.capacity)
        self.queues: list[deque[Any]] = [deque() for _ in self.capacity]
        self.waking = [False] * len(self.capacity)
        self.woken: list[int] = []

    def ask(self, transfer: Any, route: int, size: float, cap: float | None = None) -> None:
        """Takes a transfer, or queues it.

        Args:
            transfer: What to call it.
            route: Which of the routes.
            size: Bytes.
            cap: The most bytes per unit of time that it can make use of.
        """
        load, capacity = self.slowest[route]
        time = size * load / capacity
        entry = (transfer, self.crossed[route], size, time if cap is None else max(time, size / cap))
        if self.choosing or not self.sorted_asks or not self.env.nothing_else_now():
            self.asked.append(entry)
            self.choose_last()
        else:
            self._serve(entry, self.env.now)

    def choose(self, _: Event | None = None) -> None:
        """Serves the heads of queues that have become free, then those that have just asked."""
        self.choosing = False
        now, free, queues = self.env.now, self.free, self.queues
        for resource in self.woken:
            queue = queues[resource]
            if queue and free[resource] <= now:
                entry = queue[0]
                for other, _, _ in entry[1]:
                    if free[other] > now or queues[other][0] is not entry:
                        break
                else:
                    for other, _, _ in entry[1]:
                        queues[other].popleft()
                    self._start(entry, now)
        self.woken.clear()
        if self.asked:
            asked, self.asked = self.asked, []
            if len(asked) > 1:
                asked.sort(key=self.in_order)
            for entry in asked:
                self._serve(entry, now)

    def _serve(self, entry: Any, now: float) -> None:
        """Starts a transfer if it need not wait."""
        free, queues = self.free, self.queues
        for resource, _, _ in entry[1]:
            if free[resource] > now or queues[resource]:
                break
        else:
            self._start(entry, now)
            return
        for resource, _, _ in entry[1]:
            queues[resource].append(entry)
            if free[resource] > now and not self.waking[resource]:
                self._wake(resource, free[resource])

    def _start(self, entry: Any, now: float) -> None:
        transfer, resources, size, time = entry
        free, queues = self.free, self.queues
        for resource, load, capacity in resources:
            free[resource] = now + size * load / capacity
            if queues[resource]:
                self._wake(resource, free[resource])
        self.taken(transfer)
        self.left(transfer, now + time)

    def _wake(self, resource: int, time: float) -> None:
        """Whoever waits for a resource that is not free is woken when it is."""
        self.waking[resource] = True
        event = Event(self.env)
        event.callbacks.append(self._wakes)
        self.env.trigger_at(event, time)
        event._value = resource

    def _wakes(self, event: Event) -> None:
        resource: Any = event.value
        self.waking[resource] = False
        self.woken.append(resource)
        if self.choosing or not self.env.nothing_else_now():
            self.choose_last()
        else:
            self.choose()


class _Flow:
    """A transfer under way: what is left of it, and its rate since when."""

    __slots__ = ("cap", "crosses", "due", "left", "rate", "since", "transfer")

    def __init__(self, transfer: Any, crosses: tuple[tuple[int, float], ...], size: float, cap: float | None) -> None:
        self.transfer, self.crosses, self.left, self.cap = transfer, crosses, size, cap
        self.rate = self.since = self.due = 0.0


class FairNetwork(_Network):
    """Everybody is served at once, at max-min fair rates: nobody's rate could grow without that of one that is no faster.

    Rates are found by progressive filling: all grow together until a resource is full; what crosses it stays as it is, the
    others go on. They change when a flow starts or ends, and only those that are connected with it by resources.
    """

    def __init__(self, env: Clock, routes: Sequence[Route], taken: Taken, left: Left, order: Order, *, sorted_asks: bool = False) -> None:
        super().__init__(env, routes, taken, left, order, sorted_asks=sorted_asks)
        self.flows: list[dict[_Flow, float]] = [{} for _ in self.capacity]  # per resource, its flows and their loads
        self.changed: list[int] = []  # resources that flows have left
        self.ends: list[tuple[float, int, _Flow]] = []  # a heap; what has got another end since is there in vain
        self.number = count()
        self.alarm = _NO_LIMIT

    def ask(self, transfer: Any, route: int, size: float, cap: float | None = None) -> None:
        """Takes a transfer; see :meth:`FifoNetwork.ask`."""
        self.taken(transfer)
        if size == 0 or not self.routes[route]:
            self.left(transfer, self.env.now + (0.0 if cap is None else size / cap))
            return
        self.asked.append((transfer, _Flow(transfer, self.routes[route], size, cap)))
        self._choose_soon()

    def choose(self, _: Event | None = None) -> None:
        """Shares anew what is connected with what has come and gone."""
        self.choosing = False
        flows, asked, changed = self.flows, self.asked, self.changed
        if len(asked) > 1:
            asked.sort(key=self.in_order)
        for _, flow in asked:
            flow.since = self.env.now
            for resource, load in flow.crosses:
                flows[resource][flow] = load
                changed.append(resource)
        self.asked, self.changed = [], []
        self._share(changed)
        self._set_alarm()

    def _choose_soon(self) -> None:
        if self.choosing or not self.env.nothing_else_now():
            self.choose_last()
        else:
            self.choose()

    def _share(self, changed: list[int]) -> None:
        """Finds the rates of everything that is connected with some resources."""
        flows, capacity = self.flows, self.capacity
        reached: dict[_Flow, float] = {}  # to the rate that it could have if it shared nothing
        seen = dict.fromkeys(resource for resource in changed if flows[resource])
        stack = list(seen)
        while stack:
            for flow in flows[stack.pop()]:
                if flow not in reached:
                    most = _NO_LIMIT if flow.cap is None else flow.cap
                    for resource, load in flow.crosses:
                        if len(flows[resource]) == 1:
                            alone = capacity[resource] / load
                            if alone < most:
                                most = alone
                        elif resource not in seen:
                            seen[resource] = None
                            stack.append(resource)
                    reached[flow] = most
        shared = [resource for resource in seen if len(flows[resource]) > 1]
        if shared:
            self._fill(shared, reached)
        else:
            for flow, most in reached.items():
                self._set_rate(flow, most)

    def _fill(self, shared: list[int], unfixed: dict[_Flow, float]) -> None:
        """Progressive filling. The level of a resource, at which it is full, only rises as others are."""
        flows = self.flows
        room = {resource: self.capacity[resource] for resource in shared}
        weight = {resource: sum(flows[resource].values()) for resource in shared}
        heap: list[tuple[float, int, Any]] = [(room[resource] / weight[resource], resource, None) for resource in shared]
        heap += [(most, -1 - number, flow) for number, (flow, most) in enumerate(unfixed.items()) if most < _NO_LIMIT]
        heapq.heapify(heap)
        while unfixed:
            level, full, single = heapq.heappop(heap)
            if single is None:
                fixed = [flow for flow in flows[full] if flow in unfixed]
                if not fixed:
                    continue
                now = room[full] / weight[full]
                if now > level:
                    heapq.heappush(heap, (now, full, None))
                    continue
            elif single in unfixed:
                fixed = [single]
            else:
                continue
            if len(fixed) == len(unfixed):
                for flow in fixed:
                    self._set_rate(flow, level)
                return
            for flow in fixed:
                del unfixed[flow]
                for resource, load in flow.crosses:
                    if resource in room:
                        room[resource] -= load * level
                        weight[resource] -= load
                self._set_rate(flow, level)

    def _set_rate(self, flow: _Flow, rate: float) -> None:
        if rate == flow.rate:
            return
        now = self.env.now
        if flow.since < now:
            flow.left = max(flow.left - flow.rate * (now - flow.since), 0.0)
        flow.since, flow.rate = now, rate
        flow.due = now + flow.left / rate
        heapq.heappush(self.ends, (flow.due, next(self.number), flow))

    def _set_alarm(self) -> None:
        ends = self.ends
        while ends and ends[0][0] != ends[0][2].due:
            heapq.heappop(ends)
        if ends and ends[0][0] != self.alarm:
            self.alarm = ends[0][0]
            event = Event(self.env)
            event.callbacks.append(self._rings)
            self.env.trigger_at(event, self.alarm)

    def _rings(self, _event: Event) -> None:
        now, ends, ended = self.env.now, self.ends, []
        if now != self.alarm:
            return  # it was set anew
        while ends and ends[0][0] <= now:
            due, _, flow = heapq.heappop(ends)
            if due == flow.due:
                flow.due = -1.0
                ended.append(flow)
        for flow in ended:
            for resource, _ in flow.crosses:
                del self.flows[resource][flow]
                if self.flows[resource]:
                    self.changed.append(resource)
            self.left(flow.transfer, now)
        self.alarm = _NO_LIMIT
        if self.changed:
            self._choose_soon()
        elif not self.choosing:
            self._set_alarm()
