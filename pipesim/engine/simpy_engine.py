"""The reference engine: one SimPy process per device over a transport.

A device is ``for slot: receive ...; timeout; send ...``. It yields only where it must wait. How messages travel is the
transport's affair: it has ``send(message)`` and ``receive(message) -> Event | None``, and that is where blocking,
rendezvous or shared links fit in (:mod:`pipesim.engine.transports`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.engine.clock import Clock, Event
from pipesim.engine.deadlock import explain
from pipesim.engine.networks import NetworkTransport
from pipesim.engine.program import Program, Times
from pipesim.engine.transports import OffloadTransport, QueueingTransport, Transport

__all__ = ["Meeting", "grouped", "make_transport", "run", "times_of"]


class Meeting:
    """Something that begins when everybody has come: a barrier, or a gradient reduction over replicas."""

    __slots__ = ("everybody", "missing")

    def __init__(self, env: Clock, missing: int) -> None:
        self.missing = missing
        self.everybody = env.event()
        if not missing:
            self.everybody.succeed()

    def arrive(self) -> None:
        """One more has come."""
        self.missing -= 1
        if not self.missing:
            self.everybody.succeed()


def run(program: Program) -> Times:
    """Runs a program to its end.

    Raises:
        DeadlockError: Some device cannot go on.
    """
    env = Clock()
    transport = make_transport(env, program)
    total = program.schedule.num_slots * program.steps
    state = _State(env, program, start=[0.0] * total, end=[0.0] * total)
    incoming = grouped(program.target_slot, program.schedule.num_slots)
    outgoing = grouped(program.source_slot, program.schedule.num_slots)
    durations = program.durations.tolist()
    for device in program.used_devices.tolist():
        bounds = program.schedule.device_slots[device : device + 2].tolist()
        work = [(slot, durations[slot], incoming[slot], outgoing[slot]) for slot in range(*bounds)]
        env.process(_device(device, work, transport, state))
    env.run()
    # SimPy's run() returns silently when nothing is scheduled any more, so unfinished devices are looked for here. The
    # error is raised outside of processes, because SimPy re-raises a process's exception as type(e)(*e.args).
    if any(position is not None for position in state.position.values()):
        raise explain(program, state.position)
    shape = (program.steps, program.schedule.num_slots)
    start, end = np.array(state.start).reshape(shape), np.array(state.end).reshape(shape)
    return times_of(program, transport, start, end)


def make_transport(env: Clock, program: Program) -> Transport:
    """The transport of messages that go by themselves."""
    if program.cluster.network is not None:
        return NetworkTransport(env, program)
    return (OffloadTransport if len(program.moves) else QueueingTransport if program.queued.any() else Transport)(env, program)


def times_of(program: Program, transport: Transport, start: NDArray[np.float64], end: NDArray[np.float64]) -> Times:
    """What a run gives, from the (steps, slots) times of its slots."""
    sent = end[:, program.source_slot]
    departed = np.array(transport.departed).reshape(program.steps, -1) if isinstance(transport, QueueingTransport | OffloadTransport) else sent
    # the same sums, in the same order, as the events made them
    left = np.array(transport.ends).reshape(program.steps, -1) if isinstance(transport, NetworkTransport) else departed + program.transfer
    arrived = left + program.latency
    return start, end, sent, departed, arrived


class _State:
    """What the devices of one run share.

    Attributes:
        start: Start of every slot, step after step.
        end: End of every slot.
        position: Device to the slot (step x slots + slot) that it is at; one past its last slot between two steps; None
            when it has finished.
        barriers: One meeting per step, or None.
        before: Slot (step x slots + slot) to the meetings that it waits for.
        after: The same, to the meetings that it comes to when it ends.
    """

    def __init__(self, env: Clock, program: Program, start: list[float], end: list[float]) -> None:
        self.env, self.program, self.start, self.end = env, program, start, end
        self.position: dict[int, int | None] = dict.fromkeys(program.used_devices.tolist(), 0)
        self.barriers = [Meeting(env, len(self.position)) for _ in range(program.steps)] if program.barrier else None
        self.before: dict[int, list[Meeting]] = {}
        self.after: dict[int, list[Meeting]] = {}
        for step in range(program.steps):
            offset = step * program.schedule.num_slots
            for gradients, updates in program.reductions:
                meeting = Meeting(env, len(gradients))
                for slot in gradients:
                    self.after.setdefault(offset + slot, []).append(meeting)
                for slot in updates:
                    self.before.setdefault(offset + slot, []).append(meeting)


def _device(
    device: int,
    work: Sequence[tuple[int, float, Sequence[int], Sequence[int]]],
    transport: Transport,
    state: _State,
) -> Generator[Event, Any, None]:
    """The life of one device: its stream, slot by slot, step by step."""
    env, program, position, start, end = state.env, state.program, state.position, state.start, state.end
    receive, send, timeout = transport.receive, transport.send, env.timeout
    before, after = state.before, state.after
    hooked = bool(before)
    gate, slots = int(program.barrier_slots[device]), program.schedule.num_slots
    for step in range(program.steps):
        first_message, first_slot = step * transport.count, step * slots
        for slot, duration, inputs, outputs in work:
            at = first_slot + slot
            position[device] = at
            if slot == gate:
                yield from _meet(state.barriers[step])  # type: ignore[index]  # there is a gate only where there are barriers
            if hooked:
                for meeting in before.get(at, ()):
                    if not meeting.everybody.processed:
                        yield meeting.everybody
            for message in inputs:
                arrival = receive(first_message + message)
                if arrival is not None:
                    yield arrival
            start[at] = env.now
            yield timeout(duration)
            end[at] = env.now
            for message in outputs:
                send(first_message + message)
            if hooked:
                for meeting in after.get(at, ()):
                    meeting.arrive()
        # a device without updates meets the others where they would stand, at the end of its stream
        position[device] = first_slot + int(program.schedule.device_slots[device + 1])
        if gate < 0 and state.barriers is not None:
            yield from _meet(state.barriers[step])
    position[device] = None


def _meet(meeting: Meeting) -> Generator[Event, Any, None]:
    meeting.arrive()
    if not meeting.everybody.processed:
        yield meeting.everybody


def grouped(slot_of_message: NDArray[np.int64], slots: int) -> list[Sequence[int]]:
    """Per slot, its messages in ascending order."""
    groups: list[Sequence[int]] = [()] * slots
    for message, slot in enumerate(slot_of_message.tolist()):
        if slot >= 0:
            groups[slot] = (*groups[slot], message)
    return groups
