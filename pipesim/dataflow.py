"""What waits for what: the edges between ops, and the messages that those between two devices become.

    F(s, i)         <- F(q, i)  for every predecessor q of stage s
    B(s, i), I(s,i) <- F(s, i), and B(q, i) or I(q, i) for every successor q
    W(s, i)         <- I(s, i)
    R(s, i)         <- F(s, i); the backward of (s, i) <- R(s, i)

Everything here is columns; rows are rows of the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.op import Kind
from pipesim.schedule import Schedule, kept

__all__ = ["Messages", "dependency_edges", "first_updates", "messages"]

Rows = NDArray[np.int32]


def dependency_edges(schedule: Schedule) -> tuple[Rows, Rows]:
    r"""Returns (source rows, target rows) of every edge, those inside a device included.

    Examples:
        >>> schedule = Schedule.from_text("0F0 0B0\n1F0 1B0")
        >>> [f"{schedule.op(a)}->{schedule.op(b)}" for a, b in zip(*dependency_edges(schedule))]
        ['0F0->1F0', '1B0->0B0', '0F0->0B0', '1F0->1B0']
    """
    sources, targets = _stage_edges(schedule)
    backward = schedule.backward_rows
    forward, recompute = schedule.rows_of(Kind.F), schedule.rows_of(Kind.R)
    local = [(forward, backward), (schedule.rows_of(Kind.I), schedule.rows_of(Kind.W)), (forward, recompute), (recompute, backward)]
    for source, target in local:
        there = (source >= 0) & (target >= 0)
        if there.any():
            sources.append(source[there])
            targets.append(target[there])
    return _joined(sources), _joined(targets)


def _stage_edges(schedule: Schedule) -> tuple[list[Rows], list[Rows]]:
    """Edges along the stage graph: activations forwards, gradients backwards."""
    sources: list[Rows] = []
    targets: list[Rows] = []
    if not schedule.stage_edges:
        return sources, targets
    before, after = np.array(schedule.stage_edges, dtype=np.int64).T
    forward, backward = schedule.rows_of(Kind.F), schedule.backward_rows
    sources.append(_stages(forward, before))
    targets.append(_stages(forward, after))
    if schedule.has_backward:
        source, target = _stages(backward, after), _stages(backward, before)
        there = (source >= 0) & (target >= 0)  # frozen first stages have no backward
        sources.append(source if there.all() else source[there])
        targets.append(target if there.all() else target[there])
    return sources, targets


def _stages(table: Rows, stages: NDArray[np.int64]) -> Rows:
    """The rows of these stages, one after the other; without a copy where they are consecutive, as in a chain."""
    if len(stages) == stages[-1] - stages[0] + 1 and (np.diff(stages) == 1).all():
        return np.asarray(table[stages[0] : stages[-1] + 1]).reshape(-1)
    return np.asarray(table[stages]).reshape(-1)


def _joined(parts: list[Rows]) -> Rows:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class Messages:
    """The edges between two devices, in the order in which their producers stand: (device, position, half, destination stage).

    Attributes:
        schedule: Whose messages these are.
        source: (messages,) row of the producer.
        target: (messages,) row of the consumer.
    """

    schedule: Schedule
    source: Rows
    target: Rows

    def __len__(self) -> int:
        return len(self.source)

    @property
    def source_device(self) -> NDArray[np.int32]:
        """(messages,) device that sends."""
        return _devices(self.schedule)[0]

    @property
    def target_device(self) -> NDArray[np.int32]:
        """(messages,) device that receives."""
        return _devices(self.schedule)[1]

    @property
    def source_slot(self) -> NDArray[np.int64]:
        """(messages,) compute slot whose end sends it."""
        return _slots(self.schedule)[0]

    @property
    def target_slot(self) -> NDArray[np.int64]:
        """(messages,) compute slot that waits for it."""
        return _slots(self.schedule)[1]

    @cached_property
    def gradient(self) -> NDArray[np.bool_]:
        """(messages,) True for a gradient going back, False for an activation going forward."""
        return np.asarray(self.schedule.kind[self.source] != int(Kind.F))

    def label(self, number: int) -> str:
        """``activation of microbatch 3, stage 1 to stage 2``."""
        schedule = self.schedule
        source, target = schedule.op(int(self.source[number])), schedule.op(int(self.target[number]))
        what = "gradient" if self.gradient[number] else "activation"
        return f"{what} of microbatch {source.microbatch}, stage {source.stage} to stage {target.stage}"


def messages(schedule: Schedule) -> Messages:
    r"""Returns the messages of a checked schedule.

    Examples:
        >>> found = messages(Schedule.from_text("0F0 0B0\n1F0 1B0"))
        >>> [found.label(number) for number in range(len(found))]
        ['activation of microbatch 0, stage 0 to stage 1', 'gradient of microbatch 0, stage 1 to stage 0']
    """
    return Messages(schedule, *_rows(schedule))


# What a schedule's messages are is kept with it, and not in Messages, which holds the schedule.


@kept
def _rows(schedule: Schedule) -> tuple[Rows, Rows]:
    """Rows of producers and consumers."""
    sources, targets = _stage_edges(schedule)
    if len(sources) == 0:
        return _joined([]), _joined([])
    stages_before, stages_after = zip(*schedule.stage_edges, strict=True)
    if len({*stages_before}) == len({*stages_after}) == len(schedule.stage_edges):
        # at most one consumer per row, so the order is that of the rows
        consumer = np.full(len(schedule), -1, np.int32)
        for source, target in zip(sources, targets, strict=True):
            consumer[source] = target
        source = np.flatnonzero(consumer >= 0).astype(np.int32)
        target = consumer[source]
    else:
        source, target = _joined(sources), _joined(targets)
        # rows ascend by device, position and half; one producer with several successors goes by their stages
        order = np.lexsort((schedule.stage[target], source))
        source, target = source[order], target[order]
    between = schedule.device[source] != schedule.device[target]
    if not between.all():
        source, target = source[between], target[between]
    return _frozen(source, target)


@kept
def _devices(schedule: Schedule) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    source, target = _rows(schedule)
    return _frozen(schedule.device[source], schedule.device[target])


@kept
def _slots(schedule: Schedule) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    source, target = _rows(schedule)
    if schedule.every_row_a_slot:
        return _frozen(source.astype(np.int64), target.astype(np.int64))
    return _frozen(schedule.row_slot[source], schedule.row_slot[target])


def _frozen(first: NDArray[Any], second: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Both, not to be written to: many share them."""
    first.setflags(write=False)
    second.setflags(write=False)
    return first, second


@kept
def first_updates(schedule: Schedule) -> NDArray[np.int64]:
    """(devices,) the slot of each device's first U, or -1. Under flush with a barrier, all devices wait for each other there."""
    result = np.full(schedule.num_devices, -1)
    if not schedule.has(Kind.U):
        return result
    updates = np.flatnonzero(schedule.kind[schedule.slot_row] == int(Kind.U))
    devices, first = np.unique(schedule.slot_device[updates], return_index=True)
    result[devices] = updates[first]
    return result
