"""Why a run made no progress, in words."""

from __future__ import annotations

from collections.abc import Mapping

from pipesim.engine.program import Program
from pipesim.errors import DeadlockError

__all__ = ["explain"]


def explain(program: Program, position: Mapping[int, int]) -> DeadlockError:
    """Builds the error: the op that every device is stuck at, what it waits for, and the cycle.

    Args:
        program: What was run.
        position: Device to the slot (step x slots + slot) that it is at; past the last one when it has finished.
    """
    slots = program.schedule.num_slots
    total = slots * program.steps
    lines, waits_for = [], {}
    for device, at in sorted(position.items()):
        if at >= total:
            lines.append(f"  device {device} has finished")
            continue
        what, other = _waiting(program, position, device, at)
        lines.append(f"  device {device} {what}")
        waits_for[device] = other
    cycle = _cycle(waits_for)
    chain = " -> ".join(f"device {device}" for device in cycle)
    text = "\n".join(lines)
    return DeadlockError(f"the schedule cannot finish: {chain or 'no device'} wait for each other\n{text}")


def _waiting(program: Program, position: Mapping[int, int], device: int, at: int) -> tuple[str, int | None]:
    """What one device waits for, in words, and the device that it waits for."""
    schedule, slots = program.schedule, program.schedule.num_slots
    step, slot = divmod(at, slots)
    in_step = f" in step {step}" if program.steps > 1 else ""

    def done(other: int) -> bool:
        return position[int(schedule.slot_device[other])] > step * slots + other

    bounds = schedule.device_slots
    if (at % slots != 0 and not bounds[device] <= slot < bounds[device + 1]) or slot >= bounds[device + 1]:
        return f"has ended its step{in_step} and waits for the others", _first_behind(position, device, at)
    place = schedule.where(int(schedule.slot_row[slot])).removeprefix(f"device {device}, ")
    stuck = f"is stuck at {schedule.slot(slot)} ({place.split(', op')[0]}){in_step}"
    found = program.messages
    for message in (found.target_slot == slot).nonzero()[0].tolist():
        producer = int(found.source_slot[message])
        if not done(producer):
            row = int(found.source[message])
            other = int(schedule.device[row])
            return f"{stuck}: waits for the {found.label(message)}, from {schedule.op(row)} on device {other}", other
    for gradients, updates in program.reductions:
        missing = [gradient for gradient in gradients if not done(gradient)]
        if slot in updates and missing:
            other = int(schedule.slot_device[missing[0]])
            return f"{stuck}: waits for the gradient of {schedule.slot(missing[0])} on device {other}", other
    return f"{stuck}: waits for the other devices at the barrier", _first_behind(position, device, at)


def _first_behind(position: Mapping[int, int], device: int, at: int) -> int | None:
    """Some other device that has not come as far: in the same step, not at its update."""
    return next((other for other in position if other != device and position[other] != at), None)


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
