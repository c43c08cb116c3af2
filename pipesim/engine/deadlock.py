"""Why a run made no progress, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipesim.engine.program import Program
from pipesim.errors import DeadlockError

if TYPE_CHECKING:
    from pipesim.engine.listed import Lanes, State

__all__ = ["explain", "explain_listed"]


def explain(program: Program, position: Mapping[int, int | None]) -> DeadlockError:
    """Builds the error: the op that every device is stuck at, what it waits for, and the cycle.

    Args:
        program: What was run.
        position: Device to the slot (step x slots + slot) that it is at; one past its last slot between two steps; None
            when it has finished.
    """
    lines, waits_for = [], {}
    for device, at in sorted(position.items()):
        if at is None:
            lines.append(f"  device {device} has finished")
            continue
        what, other = _waiting(program, position, device, at)
        lines.append(f"  device {device} {what}")
        waits_for[device] = other
    cycle = _cycle(waits_for)
    chain = " -> ".join(f"device {device}" for device in cycle)
    text = "\n".join(lines)
    return DeadlockError(f"the schedule cannot finish: {chain or 'no device'} wait for each other\n{text}")


def _waiting(program: Program, position: Mapping[int, int | None], device: int, at: int) -> tuple[str, int | None]:
    """What one device waits for, in words, and the device that it waits for."""
    schedule = program.schedule
    step, slot = _place(program, device, at)
    in_step = f" in step {step}" if program.steps > 1 else ""
    if slot == schedule.device_slots[device + 1]:
        stuck = f"has ended its step{in_step}"
    else:
        place = schedule.where(int(schedule.slot_row[slot])).removeprefix(f"device {device}, ")
        stuck = f"is stuck at {schedule.slot(slot)} ({place.split(', op')[0]}){in_step}"
    if _at_barrier(program, device, step, slot):
        for other, elsewhere in sorted(position.items()):
            if elsewhere is not None and not _has_come(program, other, *_place(program, other, elsewhere), step):
                return f"{stuck}: waits at the barrier for device {other}", other

    def done(other: int) -> bool:
        elsewhere = position[int(schedule.slot_device[other])]
        return elsewhere is None or elsewhere > step * schedule.num_slots + other

    for gradients, updates in program.reductions:
        missing = [gradient for gradient in gradients if not done(gradient)]
        if slot in updates and missing:
            other = int(schedule.slot_device[missing[0]])
            return f"{stuck}: waits for the gradient of {schedule.slot(missing[0])} on device {other}", other
    found = program.messages
    for message in (found.target_slot == slot).nonzero()[0].tolist():
        if not done(int(found.source_slot[message])):
            row = int(found.source[message])
            other = int(schedule.device[row])
            return f"{stuck}: waits for the {found.label(message)}, from {schedule.op(row)} on device {other}", other
    return stuck, None


def _place(program: Program, device: int, at: int) -> tuple[int, int]:
    """(step, slot) of a position; the slot is one past the device's last where it has ended its step."""
    low = int(program.schedule.device_slots[device])
    step, within = divmod(at - low, program.schedule.num_slots)
    return step, low + within


def _at_barrier(program: Program, device: int, step: int, slot: int) -> bool:
    gate = int(program.barrier_slots[device])
    return program.barrier and slot == (gate if gate >= 0 else program.schedule.device_slots[device + 1])


def _has_come(program: Program, device: int, step: int, slot: int, wanted: int) -> bool:
    """Whether a device that is at (step, slot) has come to the barrier of step *wanted*."""
    gate = int(program.barrier_slots[device])
    return step > wanted or (step == wanted and slot >= (gate if gate >= 0 else program.schedule.device_slots[device + 1]))


def _cycle(waits_for: Mapping[int, int | None]) -> list[int]:
    """Devices that wait for each other in a circle, as [a, b, ..., a]."""
    for start in waits_for:
        path: list[int] = []
        device: int | None = start
        while device is not None and device in waits_for and device not in path:
            path.append(device)
            device = waits_for[device]
        if device in path:
            return [*path[path.index(device) :], device]
    return []


# -- where communication has ops of its own --------------------------------------------------------------------------------


def explain_listed(state: State, lanes: Lanes | None) -> DeadlockError:
    """Builds the error for a run with lanes: what every device is stuck at and why, and the ops that wait for each other.

    Args:
        state: Where every device is.
        lanes: The lanes of SEND and RECV, or None where messages go by themselves.
    """
    return _Explanation(state, lanes).error()


# What waits: ("device", number), ("end", number of one end of a message, counted over the steps) or ("collective", number).
Thing = tuple[str, int]


class _Explanation:
    """Follows what waits for what."""

    def __init__(self, state: State, lanes: Lanes | None) -> None:
        self.state, self.lanes, self.program = state, lanes, state.program
        self.plan = state.program.plan
        self.heads = [] if lanes is None else lanes.heads

    def error(self) -> DeadlockError:
        """The text: devices in a circle, a line per device, the circle op by op."""
        lines, waits_for = [], {}
        cycle: list[Thing] = []
        for device, at in sorted(self.state.position.items()):
            if at is None:
                lines.append(f"  device {device} has finished")
                continue
            text, waits_for[device] = self.line(device)
            lines.append(f"  {text}")
            cycle = cycle or self.turned(self.cycle(("device", device)))
        devices = " -> ".join(f"device {device}" for device in self.circle(cycle, waits_for))
        if cycle:
            lines.append(f"  the cycle: {self.told(cycle)}")
        if self.plan.implied and len(self.plan.rows):
            receives = self.program.cluster.communication.receives
            lines.append(f"  (positions are those of the schedule with its messages listed, receives {receives})")
        ways = self.ways() if any(what == "end" for what, _ in cycle) else []
        if ways:
            lines.append(f"  what may resolve it: {', '.join(ways)}")
        text = "\n".join(lines)
        return DeadlockError(f"the schedule cannot finish: {devices or 'no device'} wait for each other\n{text}")

    def circle(self, cycle: list[Thing], waits_for: Mapping[int, int | None]) -> list[int]:
        """The devices of a cycle as [a, b, ..., a], from the one with which the cycle begins."""
        devices = [self.home(thing) for thing in cycle]
        found = [device for number, device in enumerate(devices) if number == 0 or device != devices[number - 1]]
        if len(found) < 2:
            return _cycle(waits_for)
        return found if found[-1] == found[0] else [*found, found[0]]

    def line(self, device: int) -> tuple[str, int | None]:
        """What one device is stuck at, as far as it is its own affair, and the device that it waits for."""
        thing: Thing = ("device", device)
        text, link = self.stuck(device), ": "
        seen = {thing}
        while True:
            phrase, following = self.next(thing)
            text += f"{link}{phrase}" if phrase else ""
            if following is None or following in seen:
                return text, None
            if self.home(following) != device and following[0] != "collective":
                return text, self.home(following)
            seen.add(following)
            thing, link = following, ", which "

    def cycle(self, thing: Thing) -> list[Thing]:
        """The things that wait for each other, reached from one; empty if the way ends."""
        path: list[Thing] = []
        following: Thing | None = thing
        while following is not None and following not in path:
            path.append(following)
            following = self.next(following)[1]
        return [] if following is None else path[path.index(following) :]

    def turned(self, cycle: list[Thing]) -> list[Thing]:
        """The same cycle from an op that waits for another device on."""
        begin = next((number for number, thing in enumerate(cycle) if self.home(self.follower(cycle, number)) != self.home(thing)), 0)
        return cycle[begin:] + cycle[:begin]

    def told(self, cycle: list[Thing]) -> str:
        """A cycle in words."""
        text = f"device {self.home(cycle[0])}: {self.name(cycle[0])}"
        for number, thing in enumerate(cycle):
            text += f"{', which' if number else ''} {self.next(thing)[0]}"
        return text

    def ways(self) -> list[str]:
        """What to change about how devices communicate. An order that cannot run at all is helped by none of it, so it may only."""
        how = self.program.cluster.communication
        rendezvous, late = how.sends == "rendezvous", self.plan.implied and how.receives == "late"
        others = ["--receives early"] * late + ["--sends eager"] * rendezvous
        if how.batched:
            # a group waits for all its peers' groups, whatever its sends and receives would do alone
            more = rendezvous and (late or not self.plan.implied)
            return [f"no --batched{', with ' + ' or '.join(others) if more else ''}"]
        if not how.blocking and (how.stream or ("free" if self.plan.implied else "device")) != "free":
            others.append("--stream free")
        if not rendezvous:
            return [way for way in others if way != "--receives early"] + ["no --blocking"] * how.blocking
        return [*others, "--batched (neighbouring sends and receives as one group)"]

    @staticmethod
    def follower(cycle: list[Thing], number: int) -> Thing:
        """The next of a cycle."""
        return cycle[(number + 1) % len(cycle)]

    # -- names -----------------------------------------------------------------------------------------------------------

    def home(self, thing: Thing) -> int:
        """The device on which something waits; a collective's is the member that it waits for."""
        what, number = thing
        if what == "end":
            return int(self.plan.traffic.device[number % (2 * len(self.program.messages))])
        return number if what == "device" else self.missing(number)

    def name(self, thing: Thing) -> str:
        """An op with its place."""
        what, number = thing
        if what == "device":
            return self.stuck(number).removeprefix(f"device {number} ").removeprefix("is stuck at ")
        if what == "collective":
            return str(self.state.lanes.nodes[number % self.state.lanes.count])
        return self.at(int(self.plan.rows[number % (2 * len(self.program.messages))]))

    def at(self, row: int) -> str:
        """``2SEND_F1 (position 4)``."""
        if row in self.program.labels:
            return self.program.labels[row]
        place, op = self.plan.listed.where(row).split(", op ")
        return f"{op} ({place.split(', ')[1]})"

    def stuck(self, device: int) -> str:
        """``device 1 is stuck at 1F0 (position 3)``."""
        at = self.state.position[device]
        assert at is not None
        step, slot = _place(self.program, device, at)
        in_step = f" in step {step}" if self.program.steps > 1 else ""
        what, number = self.state.waits.get(device, ("", 0))
        if what == "item":
            assert self.lanes is not None
            end = self.plan.groups[number % self.lanes.items][0]
            return f"device {device} is stuck at {self.at(int(self.plan.rows[end]))}{in_step}"
        if slot == self.program.schedule.device_slots[device + 1]:
            return f"device {device} has ended its step{in_step}"
        row = int(self.plan.listed.slot_row[slot])
        if self.program.labels and row not in self.program.labels:
            return f"device {device} cannot go on"
        name = self.at(row).replace(str(self.plan.listed.op(row)), str(self.plan.listed.slot(slot)), 1)
        return f"device {device} is stuck at {name}{in_step}"

    # -- what waits for what ---------------------------------------------------------------------------------------------

    def next(self, thing: Thing) -> tuple[str, Thing | None]:
        """What something waits for, in words and as a thing."""
        what, number = thing
        if what == "device":
            return self.next_of_device(number)
        return self.next_of_collective(number) if what == "collective" else self.next_of_end(number)

    def next_of_device(self, device: int) -> tuple[str, Thing | None]:
        """Of a compute lane."""
        program, state = self.program, self.state
        what, number = state.waits.get(device, ("", 0))
        if what == "barrier":
            other = next((d for d, at in sorted(state.position.items()) if at is not None and state.waits.get(d) != ("barrier", number)), None)
            return f"waits at the barrier for device {other}", None if other is None else ("device", other)
        if what == "reduction":
            step, which = number
            for slot in program.reductions[which][0]:
                other = int(program.schedule.slot_device[slot])
                at = state.position[other]
                if at is not None and at <= step * program.schedule.num_slots + slot:
                    return f"waits for the gradient of {program.schedule.slot(slot)} on device {other}", ("device", other)
        if what == "collective":
            return f"waits for {self.name(('collective', number))}", ("collective", number)
        if what == "item":
            assert self.lanes is not None
            step, group = divmod(number, self.lanes.items)
            return self.next_of_end(step * self.lanes.ends + self.plan.groups[group][0])
        if what != "message":
            return "", None
        count = len(program.source_slot)
        step, message = divmod(number, count)
        if message >= len(program.messages):
            return "waits for its RELOAD", None
        if self.lanes is not None:
            end: Thing = ("end", step * self.lanes.ends + len(program.messages) + message)
            return f"waits for {self.name(end)}", end
        found = program.messages
        row, other = int(found.source[message]), int(found.source_device[message])
        return f"waits for the {found.label(message)}, from {program.schedule.op(row)} on device {other}", ("device", other)

    def next_of_end(self, number: int) -> tuple[str, Thing | None]:
        """Of a SEND or RECV: it has not been reached, or stands behind another, or waits for its other end."""
        lanes = self.lanes
        assert lanes is not None
        step, end = divmod(number, lanes.ends)
        item = step * lanes.items + self.plan.group_of[end]
        device = int(self.plan.traffic.device[end])
        if lanes.posted[item]:
            partner = self.partner(step, item, end)
            other = self.home(("end", partner))
            group = step * lanes.items + self.plan.group_of[partner % lanes.ends]
            verb = "to post" if lanes.meets else "to come to"
            if lanes.posted[group]:
                return f"waits for the group of {self.name(('end', partner))} on device {other}", ("end", partner)
            return f"waits for device {other} {verb} {self.name(('end', partner))}", ("end", partner)
        lane = self.plan.lane_of[item % lanes.items]
        if lane >= 0 and item in lanes.queues[lane]:
            head = self.heads[lane]
            ends = self.plan.groups[head % lanes.items] if head % lanes.items < lanes.num_groups else ()
            if not ends:
                return "stands behind an OFFLOAD or RELOAD", None
            ahead: Thing = ("end", head // lanes.items * lanes.ends + ends[0])
            return f"stands behind {self.name(ahead)}", ahead
        return f"device {device} has not reached, as it {self.stuck(device).removeprefix(f'device {device} ')}", ("device", device)

    def partner(self, step: int, item: int, end: int) -> int:
        """The end that holds a group up which has come to the head of its lane."""
        lanes = self.lanes
        assert lanes is not None
        ends = [end, *self.plan.groups[item % lanes.items]]
        others = [(one + lanes.messages) % lanes.ends for one in ends]
        absent = [other for other in others if not lanes.posted[step * lanes.items + self.plan.group_of[other]]]
        unmet = [other for other in others if lanes.missing.get(step * lanes.items + self.plan.group_of[other], 0)]
        return step * lanes.ends + (absent or unmet or others)[0]

    def missing(self, node: int) -> int:
        """A member that has not entered a collective, or that has another one to finish first."""
        lanes = self.state.lanes
        members = lanes.nodes[node % lanes.count].members
        absent = [device for device in members if lanes.needs[node][device] > 0]
        behind = [device for device in members if lanes.queues[device] and lanes.queues[device][0] != node]
        return (absent or behind or list(members))[0]

    def next_of_collective(self, number: int) -> tuple[str, Thing | None]:
        """Of a collective: some member has not entered it, or has another one before it."""
        lanes = self.state.lanes
        device = self.missing(number)
        if lanes.needs[number][device] > 0:
            return f"device {device} has not entered", ("device", device)
        if lanes.queues[device] and lanes.queues[device][0] != number:
            first: Thing = ("collective", lanes.queues[device][0])
            return f"stands behind {self.name(first)} on device {device}", first
        return "", None
