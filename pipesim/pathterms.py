"""The critical path of a run beside another run of the same ops, op after op.

The difference of two makespans is taken apart along the critical path of the actual run, op after op. Each op on it began after
the one before it, on its own device or on the one that sent it a message::

    actual      start |wait| op |wait|  op  | ... |wait| op |                          sum = makespan
    predicted   start |wait| op |wait|  op  | ... |wait| op |rest, to the last end|    the same path; sum = makespan

Both lines add up, whatever the path is, so the differences of ops (slower), of waits (waited longer) and of the rest add up to
the difference of the makespans. A wait is from the end of the op before to the start of this one; it may be negative in
the predicted run, where that need not have been the op that was waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipesim.op import Kind
from pipesim.timeline import Timeline

__all__ = ["Term", "terms"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Term:
    """One op on the critical path of the actual run.

    Attributes:
        op: What ran.
        device: Where, in the actual run.
        kind: As in :class:`pipesim.differences.Errors`.
        after: The op before it on the path; empty for the first.
        by: ``message``, ``device`` (the op before it there), ``all`` (waited for other devices: barrier, reduction) or ``start``.
        actual: Its duration.
        predicted: Its duration in the other run; 0 if it is not there.
        actual_wait: From the end of the op before it (the first start of all) to its start.
        predicted_wait: The same in the other run.
    """

    op: str
    device: int
    kind: str
    after: str
    by: str
    actual: float
    predicted: float
    actual_wait: float
    predicted_wait: float

    @property
    def slower(self) -> float:
        """How much longer it ran."""
        return self.actual - self.predicted

    @property
    def waited_longer(self) -> float:
        """How much longer it waited."""
        return self.actual_wait - self.predicted_wait


def terms(actual: Timeline, predicted: Timeline, partner: Ints, kinds: Sequence[str]) -> tuple[list[Term], float]:
    """The terms along the critical path of a one-step run, in order of time, and the rest."""
    schedule = actual.schedule
    slots, why = _critical(actual)
    found = []
    before, last, last_predicted = "", actual.first_start, predicted.first_start
    for slot, by in zip(slots, why, strict=True):
        start, end = float(actual.start[0, slot]), float(actual.end[0, slot])
        other = int(partner[slot])
        # what the predicted run does not have takes no time there
        there = (float(predicted.start[0, other]), float(predicted.end[0, other])) if other >= 0 else (last_predicted, last_predicted)
        waits = start - last, there[0] - last_predicted
        name = str(schedule.slot(slot))
        found.append(Term(name, int(schedule.slot_device[slot]), kinds[slot], before, by, end - start, there[1] - there[0], *waits))
        before, last, last_predicted = name, end, there[1]
    return found, (actual.last_end - last) - (predicted.last_end - last_predicted)


def _critical(run: Timeline) -> tuple[list[int], list[str]]:
    """The slots of the critical path in order of time, and for what each waited last.

    Measured times hold small gaps, so nothing is compared for equality: of what a slot waited for, that which was ready last counts.
    """
    schedule, found = run.schedule, run.messages
    start, end, arrived = run.start[0], run.end[0], run.arrived[0]
    by_target = np.argsort(found.target_slot, kind="stable")
    bounds = np.searchsorted(found.target_slot[by_target], np.arange(schedule.num_slots + 1))
    begins = set(schedule.device_slots[:-1].tolist())
    kind = schedule.kind[schedule.slot_row]
    works = np.flatnonzero(kind != int(Kind.U))
    slot = int(end.argmax())
    slots, why = [slot], []
    for _ in range(schedule.num_slots):
        ready, before, by = -np.inf, -1, "start"
        if slot not in begins:
            ready, before, by = float(end[slot - 1]), slot - 1, "device"
        incoming = by_target[bounds[slot] : bounds[slot + 1]]
        if len(incoming):
            message = int(incoming[arrived[incoming].argmax()])
            if arrived[message] > ready:
                ready, before, by = float(arrived[message]), int(found.source_slot[message]), "message"
        if kind[slot] == int(Kind.U) and schedule.weights == "flush" and start[slot] > ready:
            others = works[(end[works] <= start[slot]) & (end[works] > ready)]
            if len(others):
                before, by = int(others[end[others].argmax()]), "all"
        why.append(by)
        if before < 0:
            break
        slot = before
        slots.append(slot)
    return slots[::-1], why[::-1]
