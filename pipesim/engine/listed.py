"""Runs in which communication has ops of its own: SEND and RECV on lanes, collectives, compute that traffic slows down.

The same processes as :mod:`pipesim.engine.simpy_engine` has, one per device, with more to do at each slot.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.engine.clock import Clock, Event
from pipesim.engine.collecting import waited_for
from pipesim.engine.collective_lanes import CollectiveLanes
from pipesim.engine.deadlock import explain_listed
from pipesim.engine.lanes import LaneTransport
from pipesim.engine.pace import Pace
from pipesim.engine.program import Program, Times
from pipesim.engine.simpy_engine import Meeting, grouped, make_transport, times_of
from pipesim.engine.streams import StreamTransport
from pipesim.engine.transports import Transport

__all__ = ["Listed", "State", "run_listed"]

Floats = NDArray[np.float64]
Lanes = LaneTransport | StreamTransport


class Listed(NamedTuple):
    """What such a run gives: the times of every run, and (steps, traffic) when each op of communication began and was done."""

    times: Times
    traffic_start: Floats
    traffic_end: Floats


class State:
    """Where the devices of one run are.

    Attributes:
        position: Device to the slot (step x slots + slot) that it is at; one past its last slot between two steps; None
            when it has finished.
        waits: Device to what it waits for: ("item", number), ("message", number), ("collective", number), ("barrier", step)
            or ("reduction", (step, number)). It is stale while the device computes.
        transport: How messages travel.
        lanes: The collectives.
    """

    def __init__(self, env: Clock, program: Program, transport: Transport, paces: dict[int, Pace]) -> None:
        self.env, self.program, self.transport, self.paces = env, program, transport, paces
        total = program.schedule.num_slots * program.steps
        self.start, self.end = [0.0] * total, [0.0] * total
        self.position: dict[int, int | None] = dict.fromkeys(program.used_devices.tolist(), 0)
        self.waits: dict[int, tuple[str, Any]] = {}
        self.lanes = CollectiveLanes(env, program, paces, getattr(transport, "network", None))
        self.barriers = [Meeting(env, len(self.position)) for _ in range(program.steps)] if program.barrier else None
        gates = {device: int(slot) for device, slot in enumerate(program.barrier_slots.tolist()) if slot >= 0}
        self.at_gate, self.at_end = waited_for(program.plan.collectives, gates)
        # reductions over replicas that take no time, where no collective stands for them
        self.before: dict[int, list[tuple[int, Meeting]]] = {}
        self.after: dict[int, list[Meeting]] = {}
        covered = program.plan.collectives.before
        for step in range(program.steps):
            offset = step * program.schedule.num_slots
            for number, (gradients, updates) in enumerate(program.reductions):
                if any(slot in covered for slot in updates):
                    continue
                meeting = Meeting(env, len(gradients))
                for slot in gradients:
                    self.after.setdefault(offset + slot, []).append(meeting)
                for slot in updates:
                    self.before.setdefault(offset + slot, []).append((number, meeting))


def run_listed(program: Program) -> Listed:
    """Runs a program to its end.

    Raises:
        ScheduleError: Its communication cannot run as it is listed.
        DeadlockError: Some device cannot go on.
    """
    env = Clock()
    plan, schedule = program.plan, program.schedule
    factors = {kind: factor for kind, factor in program.cluster.communication.interference.items() if factor > 1}
    paces = {device: Pace(env, factors) for device in range(schedule.num_devices)} if factors else {}
    lanes: Lanes | None = None
    if not program.by_themselves:
        lanes = StreamTransport(env, program, plan) if plan.simple else LaneTransport(env, program, plan, paces)
    transport = lanes or make_transport(env, program)
    state = State(env, program, transport, paces)
    nothing: list[tuple[int, ...]] = [()] * schedule.num_slots
    incoming = grouped(program.target_slot, schedule.num_slots)
    outgoing = grouped(program.source_slot, schedule.num_slots) if lanes is None else nothing
    durations = program.durations.tolist()
    for device in program.used_devices.tolist():
        bounds = schedule.device_slots[device : device + 2].tolist()
        work = [(slot, durations[slot], incoming[slot], outgoing[slot], plan.issues[slot]) for slot in range(*bounds)]
        env.process(_Device(device, state, lanes).life(work))
    env.run()
    if any(position is not None for position in state.position.values()):
        raise explain_listed(state, lanes)
    shape = (program.steps, schedule.num_slots)
    start, end = np.array(state.start).reshape(shape), np.array(state.end).reshape(shape)
    if lanes is None:
        times = times_of(program, transport, start, end)
    else:
        sent, departed = end[:, program.source_slot], np.array(lanes.departed).reshape(program.steps, -1)
        times = (start, end, sent, departed, np.array(lanes.arrival).reshape(program.steps, -1))
    return Listed(times, *_traffic_times(program, state, lanes, times))


def _traffic_times(program: Program, state: State, lanes: Lanes | None, times: Times) -> tuple[Floats, Floats]:
    plan, steps, count = program.plan, program.steps, len(program.messages)
    _, end, _, departed, arrived = times
    ends = len(plan.rows)
    if lanes is not None:
        began, done = (np.array(column).reshape(steps, ends) for column in (lanes.start, lanes.end))
        if not plan.lanes or program.cluster.communication.stream == "free":
            began = np.maximum(began, np.tile(departed[:, :count], 2))
    elif ends:  # a RECV is posted when the op before it ends, or with the step
        before = plan.slot_before[count:]
        posted = np.where(before >= 0, end[:, before], 0.0)
        began = np.maximum(np.concatenate([departed[:, :count], posted], axis=1), np.tile(departed[:, :count], 2))
        left = departed[:, :count] + program.transfer[:count] if program.cluster.network is None else arrived[:, :count] - program.latency[:count]
        done = np.concatenate([left, arrived[:, :count]], axis=1)
        done = np.maximum(done, began)
    else:
        began = done = np.zeros((steps, 0))
    members = [len(node.members) for node in plan.collectives.nodes]
    of_nodes = (np.array(column).reshape(steps, -1) for column in (state.lanes.began, state.lanes.over))
    first, last = (np.repeat(column, members, axis=1) for column in of_nodes)
    return np.concatenate([began, first], axis=1), np.concatenate([done, last], axis=1)


Work = tuple[int, float, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class _Device:
    """One device: what it does at each point of its stream."""

    def __init__(self, device: int, state: State, lanes: Lanes | None) -> None:
        self.device, self.state, self.lanes = device, state, lanes
        self.program, self.env = state.program, state.env
        self.plan = self.program.plan
        self.blocking = lanes is not None and self.program.cluster.communication.blocking
        self.groups, self.moving = len(self.plan.groups), len(self.program.moves)

    def life(self, work: list[Any]) -> Generator[Event, Any, None]:
        """Its stream, slot by slot, step by step."""
        program, state, env, device, pace = self.program, self.state, self.env, self.device, self.state.paces.get(self.device)
        position, waits, start, end = state.position, state.waits, state.start, state.end
        receive, send = state.transport.receive, state.transport.send
        gate, slots, count = int(program.barrier_slots[device]), program.schedule.num_slots, state.transport.count
        special = self._special_slots(gate)
        lanes = None if self.blocking or self.plan.collectives.listed else self.lanes
        items, issue = (lanes.items, lanes.issue) if lanes is not None else (0, None)
        during, after = self.plan.collectives.during, self.plan.collectives.after
        for step in range(program.steps):
            first_message, first_slot = step * count, step * slots
            position[device] = first_slot + work[0][0]
            yield from self._issue(step, self.plan.first_issues[device])
            for slot, duration, inputs, outputs, issues in work:
                at = position[device] = first_slot + slot
                if slot in special:
                    yield from self._before(step, slot, gate)
                for message in inputs:
                    arrival = receive(first_message + message)
                    if arrival is not None:
                        waits[device] = ("message", first_message + message)
                        yield arrival
                start[at] = env.now
                if slot in during:
                    yield from self._work_in_parts(step, duration, during[slot])
                else:
                    yield env.timeout(duration) if pace is None else pace.work(duration)
                end[at] = env.now
                for message in outputs:
                    send(first_message + message)
                if slot in special:
                    for node in after.get(slot, ()):
                        state.lanes.enter(step * state.lanes.count + node, device)
                    for meeting in state.after.get(at, ()):
                        meeting.arrive()
                if issues:
                    if issue is None:
                        yield from self._issue(step, issues)
                    else:
                        for item in issues:
                            issue(step * items + item)
            # a device without updates meets the others where they would stand, at the end of its stream
            position[device] = first_slot + int(program.schedule.device_slots[device + 1])
            yield from self._reduced(step, state.at_end.get(device, ()))
            if gate < 0 and state.barriers is not None:
                yield from self._meet(step)
        position[device] = None

    def _special_slots(self, gate: int) -> set[int]:
        found = self.plan.collectives
        slots = self.program.schedule.num_slots
        hooked = {at % slots for at in (*self.state.before, *self.state.after)}
        return {gate, *found.before, *found.after, *hooked} - {-1}

    def _before(self, step: int, slot: int, gate: int) -> Generator[Event, Any, None]:
        """Waits for what is no message."""
        if slot == gate:
            yield from self._reduced(step, self.state.at_gate.get(self.device, ()))
            yield from self._meet(step)
        for number, meeting in self.state.before.get(step * self.program.schedule.num_slots + slot, ()):
            if not meeting.everybody.processed:
                self.state.waits[self.device] = ("reduction", (step, number))
                yield meeting.everybody
        yield from self._reduced(step, self.plan.collectives.before.get(slot, ()))

    def _reduced(self, step: int, nodes: Any) -> Generator[Event, Any, None]:
        lanes = self.state.lanes
        for node in nodes:
            over = lanes.ended(step * lanes.count + node)
            if over is not None:
                self.state.waits[self.device] = ("collective", step * lanes.count + node)
                yield over

    def _meet(self, step: int) -> Generator[Event, Any, None]:
        meeting = self.state.barriers[step]  # type: ignore[index]  # asked only where there are barriers
        meeting.arrive()
        if not meeting.everybody.processed:
            self.state.waits[self.device] = ("barrier", step)
            yield meeting.everybody

    def _issue(self, step: int, items: tuple[int, ...]) -> Generator[Event, Any, None]:
        """Issues what stands here; where communication is blocking, a message's end is waited for."""
        for item in items:
            if item >= self.groups + self.moving:
                _, node, device = self.plan.collectives.listed[item - self.groups - self.moving]
                self.state.lanes.enter(step * self.state.lanes.count + node, device)
            elif self.lanes is not None:
                number = step * self.lanes.items + item
                self.lanes.issue(number)
                over = self.lanes.ended(number) if self.blocking and item < self.groups else None
                if over is not None:
                    self.state.waits[self.device] = ("item", number)
                    yield over

    def _enter(self, node: int, _: Event) -> None:
        self.state.lanes.enter(node, self.device)

    def _work_in_parts(self, step: int, duration: float, parts: list[tuple[float, int]]) -> Generator[Event, Any, None]:
        """A slot during which the first buckets of a reduction begin."""
        env, count, pace = self.env, self.state.lanes.count, self.state.paces.get(self.device)
        marks = [(duration * part, partial(self._enter, step * count + node)) for part, node in sorted(parts)]
        if pace is not None:
            yield pace.work(duration, marks)
            return
        for amount, enter in marks:
            env.call_at(env.now + amount, enter, None)
        yield env.timeout(duration)
