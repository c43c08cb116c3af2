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

from pipesim import jit, loops
from pipesim.op import Kind
from pipesim.remember import remembered
from pipesim.schedule import Schedule

__all__ = ["Messages", "Moves", "dependency_edges", "first_updates", "messages", "moves"]

Rows = NDArray[np.int32]


def dependency_edges(schedule: Schedule, within_devices: bool = False) -> tuple[Rows, Rows]:
    r"""Returns (source rows, target rows) of every edge, those inside a device included.

    Args:
        schedule: A schedule that lists every forward.
        within_devices: Leaves out edges between stages that share no device.

    Examples:
        >>> schedule = Schedule.from_text("0F0 0B0\n1F0 1B0")
        >>> [f"{schedule.op(a)}->{schedule.op(b)}" for a, b in zip(*dependency_edges(schedule))]
        ['0F0->1F0', '1B0->0B0', '0F0->0B0', '1F0->1B0']
    """
    edges = schedule.stage_edges
    if within_devices:
        edges = tuple((a, b) for a, b in edges if not set(schedule.placement[a]).isdisjoint(schedule.placement[b]))
    pairs = _stage_edges(schedule, edges)
    backward = schedule.backward_rows
    forward, recompute = schedule.rows_of(Kind.F), schedule.rows_of(Kind.R)
    local = [(forward, backward)] if schedule.has_backward else []
    if schedule.has(Kind.I):
        local.append((schedule.rows_of(Kind.I), schedule.rows_of(Kind.W)))
    if schedule.has(Kind.R):
        local += [(forward, recompute), (recompute, backward)]
    pairs += [_listed(source.reshape(-1), target.reshape(-1)) for source, target in local]
    return _joined([source for source, _ in pairs]), _joined([target for _, target in pairs])


def _stage_edges(schedule: Schedule, edges: tuple[tuple[int, int], ...]) -> list[tuple[Rows, Rows]]:
    """(sources, targets) along edges of the stage graph: activations forwards, gradients backwards."""
    if not edges:
        return []
    before: Any
    after: Any
    if edges is schedule.stage_edges and schedule.graph is None:
        before, after = slice(0, -1), slice(1, None)  # a chain needs no copies
    else:
        before, after = np.array(edges, dtype=np.int64).T
    forward, backward = schedule.rows_of(Kind.F), schedule.backward_rows
    pairs = [(forward[before].reshape(-1), forward[after].reshape(-1))]
    if schedule.has_backward:
        pairs.append(_listed(backward[after].reshape(-1), backward[before].reshape(-1)))  # frozen first stages have no backward
    return pairs


def _listed(source: Rows, target: Rows) -> tuple[Rows, Rows]:
    """The edges of which both ends are listed."""
    there = (source >= 0) & (target >= 0)
    return (source, target) if there.all() else (source[there], target[there])


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


@remembered
def _rows(schedule: Schedule) -> tuple[Rows, Rows]:
    """Rows of producers and consumers."""
    if jit.is_loaded() and schedule.graph is None:
        source, target = np.empty(len(schedule), np.int32), np.empty(len(schedule), np.int32)
        columns = schedule.device, schedule.stage, schedule.kind, schedule.microbatch
        count = jit.call(loops.messages, *columns, *schedule.placed, source, target)
        return _frozen(source[:count], target[:count])
    edges = schedule.stage_edges
    pairs = _stage_edges(schedule, edges)
    if schedule.graph is None or len({a for a, _ in edges}) == len({b for _, b in edges}) == len(edges):
        # at most one consumer per row, so the order is that of the rows
        consumer = np.full(len(schedule), -1, np.int32)
        for source, target in pairs:
            consumer[source] = target
        source = np.flatnonzero(consumer >= 0).astype(np.int32)
        target = consumer[source]
    else:
        source, target = _joined([source for source, _ in pairs]), _joined([target for _, target in pairs])
        # rows ascend by device, position and half; one producer with several successors goes by their stages
        order = np.lexsort((schedule.stage[target], source))
        source, target = source[order], target[order]
    between = schedule.device[source] != schedule.device[target]
    if not between.all():
        source, target = source[between], target[between]
    return _frozen(source, target)


@remembered
def _devices(schedule: Schedule) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    source, target = _rows(schedule)
    return _frozen(schedule.device[source], schedule.device[target])


@remembered
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


@dataclass(frozen=True, eq=False)
class Moves:
    """The OFFLOAD and RELOAD ops of a schedule, in row order.

    Attributes:
        row: (moves,) their rows.
        device: (moves,) the device that lists them.
        partner: (moves,) the device that holds the activation meanwhile; -1 for the host.
        out: (moves,) True for an OFFLOAD.
        stage: (moves,) whose activation it is.
        microbatch: (moves,)
    """

    row: NDArray[np.int64]
    device: NDArray[np.int32]
    partner: NDArray[np.int64]
    out: NDArray[np.bool_]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.row)


_NO_ROWS, _NO_NUMBERS = np.zeros(0, np.int64), np.zeros(0, np.int32)
_NO_MOVES = Moves(_NO_ROWS, _NO_NUMBERS, _NO_ROWS, np.zeros(0, np.bool_), _NO_NUMBERS, _NO_NUMBERS)


@remembered
def moves(schedule: Schedule) -> Moves:
    """Returns the moves of a checked schedule.

    Examples:
        >>> found = moves(Schedule.from_text("0F0 0OFFLOAD0 0RELOAD0 0B0"))
        >>> found.out.tolist(), found.partner.tolist()
        ([True, False], [-1, -1])
    """
    if not schedule.has(Kind.OFFLOAD, Kind.RELOAD):
        return _NO_MOVES
    out = schedule.kind == int(Kind.OFFLOAD)
    row = np.flatnonzero(out | (schedule.kind == int(Kind.RELOAD)))
    targets = [schedule.offload_to.get(device) for device in range(schedule.num_devices)]
    partner = np.array([-1 if target is None else target for target in targets], dtype=np.int64)
    device = schedule.device[row]
    return Moves(row, device, partner[device], out[row], schedule.stage[row], schedule.microbatch[row])


@remembered
def first_updates(schedule: Schedule) -> NDArray[np.int64]:
    """(devices,) the slot of each device's first U, or -1. Under flush with a barrier, all devices wait for each other there."""
    result = np.full(schedule.num_devices, -1)
    if not schedule.has(Kind.U):
        return result
    updates = np.flatnonzero(schedule.kind[schedule.slot_row] == int(Kind.U))
    devices, first = np.unique(schedule.slot_device[updates], return_index=True)
    result[devices] = updates[first]
    return result
