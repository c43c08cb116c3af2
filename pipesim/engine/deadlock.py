"""Why a run made no progress, in words."""

from __future__ import annotations

from collections.abc import Mapping

from pipesim.engine.program import Program
from pipesim.errors import DeadlockError

__all__ = ["explain"]


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
