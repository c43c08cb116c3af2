"""The compiled engine: the same runs as the SimPy engine, to the bit, a hundred times as fast. It needs numba (``pipesim[fast]``).

Its loops are in :mod:`pipesim.engine.kernels` and :mod:`pipesim.engine.contention`; :mod:`pipesim.jit` compiles them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from pipesim.costs.model import constant
from pipesim.engine import contention, kernels
from pipesim.engine.deadlock import explain
from pipesim.engine.program import Program, Times, reductions, transfer_slots
from pipesim.errors import ScheduleError
from pipesim.jit import call, installed, is_loaded
from pipesim.memory import moves
from pipesim.op import Kind
from pipesim.remember import remembered
from pipesim.schedule import Schedule

__all__ = ["columns", "installed", "is_loaded", "refuse_uncovered", "run", "run_many", "structure", "uncovered"]

_MOST = 2**31 - 1  # what int32 columns can number


def uncovered(program: Program) -> str | None:
    """What of this run the compiled engine does not cover, in words, or None. This is the whole list.

    * Listed SEND and RECV ops, communication other than eager and overlapped (:class:`pipesim.communication.Communication`),
      and collectives that take time or meet (:attr:`Program.beyond_plain`).
    * Links that transfers share (a cluster's sharing).
    * Steps of 2³¹ slots or transfers and more, which its columns cannot number.
    """
    if program.beyond_plain is not None:
        return program.beyond_plain
    if program.cluster.network is not None:
        return f"links that transfers share (sharing = {program.cluster.sharing!r})"
    if max(program.schedule.num_slots, len(program.source_slot)) > _MOST:
        return f"a step of more than {_MOST} slots or transfers"
    return None


def refuse_uncovered(program: Program) -> None:
    """Raises ScheduleError, which says why, if the compiled engine cannot make this run."""
    if not installed():
        raise ScheduleError("engine='compiled' needs numba, which is not installed; pip install 'pipesim[fast]', or take engine='simpy'")
    reason = uncovered(program)
    if reason is not None:
        raise ScheduleError(f"engine='compiled' does not cover {reason}; take engine='simpy'")


# -- a run ---------------------------------------------------------------------------------------------------------------


def columns(program: Program) -> kernels.Columns:
    """Returns the run as the loops want it."""
    fixed = structure(program.schedule)
    gate = fixed.high
    if program.schedule.has(Kind.U) and program.barrier:
        gates = program.barrier_slots[program.used_devices]
        gate = gate.copy()
        gate[: len(gates)] = np.where(gates >= 0, gates, gate[: len(gates)])
    transfer, latency, queues = program.transfer, program.latency, 0
    queue: NDArray[Any] = _NONE
    queued = constant(program.queued)
    if queued or (queued is None and program.queued.any()):
        queue = program.link if queued else np.where(program.queued, program.link, -1)
        queues = int(queue.max()) + 1
    if fixed.transfer is not None:  # an edge of a reduction takes no time
        queue = np.append(queue, -1)[fixed.transfer] if queues else queue
        transfer, latency = (np.append(values, 0.0)[fixed.transfer] for values in (transfer, latency))
    lone_transfer, lone_latency = constant(transfer), constant(latency)
    return kernels.Columns(
        *(fixed.low, gate, fixed.high, len(program.used_devices) if program.barrier else 0),
        *(fixed.owner, fixed.indegree, fixed.first, fixed.target, _ints(queue)),
        _floats(transfer) if lone_transfer is None else np.array([lone_transfer]),
        _floats(latency) if lone_latency is None else np.array([lone_latency]),
        *(int(lone_transfer is None), int(lone_latency is None), queues),
    )


_NONE = np.full(1, -1, np.int32)


class Structure(NamedTuple):
    """What of the columns follows from the schedule alone; see :class:`pipesim.engine.kernels.Columns`.

    Attributes:
        transfer: (edges,) the transfer that each edge is, -1 for one of a reduction; None where edges are transfers.
    """

    low: NDArray[np.int32]
    high: NDArray[np.int32]
    owner: NDArray[np.int32]
    indegree: NDArray[np.int32]
    first: NDArray[np.int32]
    target: NDArray[np.int32]
    transfer: NDArray[np.int64] | None


@remembered
def structure(schedule: Schedule) -> Structure:
    """Returns the columns that follow from the schedule alone."""
    bounds, used = schedule.device_slots, schedule.used_devices
    low, high = bounds[used], bounds[used + 1]
    owner: NDArray[Any] = schedule.slot_device
    if len(used) < schedule.num_devices:
        owner = np.searchsorted(used, owner)
    source, target = transfer_slots(schedule)
    transfer = None
    meetings = len(reductions(schedule))
    slots = schedule.num_slots + meetings
    if meetings:
        extra = np.arange(schedule.num_slots, slots)
        low, high = np.concatenate([low, extra]), np.concatenate([high, extra + 1])
        owner = np.concatenate([owner, len(used) + np.arange(meetings)])
    if meetings or len(moves(schedule)):  # messages alone are in order
        into, out_of = _reduction_edges(schedule)
        transfer = np.concatenate([np.arange(len(source)), np.full(len(into) + len(out_of), -1)])
        source, target = np.concatenate([source, into[:, 0], out_of[:, 0]]), np.concatenate([target, into[:, 1], out_of[:, 1]])
        order = np.argsort(source, kind="stable")
        source, target, transfer = source[order], target[order], transfer[order]
    first, indegree = np.zeros(slots + 1, np.int32), np.zeros(slots, np.int32)
    if is_loaded():
        call(kernels.degrees, source, target, first, indegree)
    else:
        np.cumsum(np.bincount(source, minlength=slots), out=first[1:])
        indegree[:] = np.bincount(target[target >= 0], minlength=slots)
    return Structure(_ints(low), _ints(high), _ints(owner), indegree, first, _ints(target), transfer)


def _reduction_edges(schedule: Schedule) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(edges, 2) slots: from gradients to each reduction, from each reduction to its updates."""
    into: list[tuple[int, int]] = []
    out_of: list[tuple[int, int]] = []
    for number, (gradients, updates) in enumerate(reductions(schedule), schedule.num_slots):
        into.extend((slot, number) for slot in gradients)
        out_of.extend((number, slot) for slot in updates)
    return np.array(into, np.int64).reshape(-1, 2), np.array(out_of, np.int64).reshape(-1, 2)


def shared(program: Program) -> contention.Shared:
    """Returns what the loop over events wants besides."""
    transfer, messages = structure(program.schedule).transfer, len(program.messages)
    if transfer is None:
        transfer = np.arange(messages)
    device = np.append(program.transfer_device, 0)[transfer].astype(np.int64)
    rank = np.append(program.transfer_rank, 0)[transfer]
    lanes, number = np.unique(program.moves.device, return_inverse=True)
    lane = np.full(len(transfer), -1)
    edges = np.flatnonzero(transfer >= messages)  # the moves, in the order of the streams
    lane[edges] = number
    bounds = np.searchsorted(number, np.arange(len(lanes) + 1))
    return contention.Shared(device * (program.steps * len(transfer)) + rank, _ints(lane), _ints(bounds), _ints(edges))


def has_shared_queues(program: Program) -> bool:
    """Whether several devices ask for one queue, or a device lists moves; else a queue goes by its sender's stream."""
    if len(program.moves):
        return True
    queued = program.queued
    if not queued.any():
        return False
    link, device = program.link, program.transfer_device
    if not queued.all():
        link, device = link[queued], device[queued]
    sender = np.zeros(int(link.max()) + 1, device.dtype)
    sender[link] = device
    return bool((sender[link] != device).any())


def run(program: Program) -> Times:
    """Runs a program to its end; the same times as :func:`pipesim.engine.simpy_engine.run`.

    Raises:
        DeadlockError: Some device cannot go on.
    """
    c, transfer = columns(program), structure(program.schedule).transfer
    slots, real, steps = len(c.owner), program.schedule.num_slots, program.steps
    durations = _with_reductions(program.durations, slots)
    start, end = np.zeros((steps, slots)), np.empty((steps, slots))
    at = np.empty(len(c.low), np.int32)
    if has_shared_queues(program):
        departed = np.empty((steps, len(c.target)))
        at_step = np.empty(len(c.low), np.int32)
        call(contention.events, c, shared(program), durations, start, end, departed, at, at_step)
        if (at_step < steps).any():
            _explain(program, at, at_step)
    else:
        departed = np.empty((steps, len(c.target)) if c.queues else (0, 0))
        finished, _ = call(kernels.chain, c, durations, start, end, departed, np.empty(slots, np.int32), at)
        if finished < steps:
            _stuck(program, c, durations, at)
    if slots > real:
        start, end = start[:, :real].copy(), end[:, :real].copy()
    sent = end[:, program.source_slot]
    if not departed.size:
        departed = sent
    elif transfer is not None:
        by_edge, departed = departed, np.empty_like(sent)
        departed[:, transfer[transfer >= 0]] = by_edge[:, transfer >= 0]
    arrived = departed + program.transfer if c.queues else departed.copy()  # adding 0 changes nothing
    arrived += program.latency
    return start, end, sent, departed, arrived


def run_many(program: Program, durations: NDArray[np.float64], found: kernels.Figures) -> None:
    """Runs a program that has no shared queues under (runs, slots) durations.

    Raises:
        DeadlockError: Some device cannot go on; that does not depend on the durations.
    """
    c = columns(program)
    slots = len(c.owner)
    order, at = np.empty(slots, np.int32), np.empty(len(c.low), np.int32)
    times = np.zeros((1, slots)), np.empty((1, slots)), np.empty((1, len(c.target)) if c.queues else (0, 0))
    first = _with_reductions(durations[0], slots)
    finished, before_barrier = call(kernels.chain, c, first, *times, order, at)
    if not finished:
        _stuck(program, c, first, at)
    runs = len(durations)
    if runs < kernels.BLOCK:  # the loop takes no fewer
        more = kernels.Figures.empty(kernels.BLOCK, found.busy.shape[1], durations.shape[1], found.watched, bool(len(found.start)))
        run_many(program, durations[np.arange(kernels.BLOCK) % runs], more)
        for name in ("first_start", "last_end", "busy", "watched_end", "start", "end"):
            column = getattr(found, name)
            column[:] = getattr(more, name)[: len(column)]
        return
    call(kernels.many, c, order, before_barrier, _floats(durations), _ints(program.used_devices), found)


def _stuck(program: Program, c: kernels.Columns, durations: NDArray[np.float64], at: NDArray[np.int32]) -> NoReturn:
    """The loop has stopped in the first step; those who have finished it go on, as far as they can."""
    steps, slots = program.steps, len(c.owner)
    step = np.zeros_like(at)
    passed = bool((at >= c.gate)[: c.meeting].all())  # with no barrier too; in the next step somebody will be missing there
    while passed and (at == c.high).any() and step.max() < steps:
        goes_on = (at == c.high) & (step == step.max())
        if not goes_on.any():
            break
        step[goes_on] += 1
        if step.max() < steps:
            limit = np.where(goes_on, c.gate, c.low).astype(np.int32)
            here = np.empty_like(at)
            times = np.zeros((1, slots)), np.empty((1, slots)), np.empty((1, len(c.target)) if c.queues else (0, 0))
            call(kernels.chain, c._replace(gate=limit, high=limit, meeting=0), durations, *times, np.empty(slots, np.int32), here)
            at = np.where(goes_on, here, at)
        passed = not c.meeting
    _explain(program, at, step)


def _explain(program: Program, at: NDArray[np.int32], at_step: NDArray[np.int32]) -> NoReturn:
    positions: dict[int, int | None] = {}
    for device, slot, step in zip(program.used_devices.tolist(), at.tolist(), at_step.tolist(), strict=False):
        positions[device] = None if step == program.steps else step * program.schedule.num_slots + slot
    raise explain(program, positions)


def _with_reductions(durations: NDArray[np.float64], slots: int) -> NDArray[np.float64]:
    """(slots,) the durations, and 0 for every reduction."""
    return _floats(np.append(durations, np.zeros(slots - len(durations))) if slots > len(durations) else durations)


def _ints(column: NDArray[Any]) -> NDArray[np.int32]:
    """A column as the loops are compiled for: contiguous, and not read-only, which would be another type."""
    return _as(column, np.int32)


def _floats(column: NDArray[Any]) -> NDArray[np.float64]:
    return _as(column, np.float64)


def _as(column: NDArray[Any], dtype: type[Any]) -> NDArray[Any]:
    flags = column.flags
    return column if column.dtype == dtype and flags.c_contiguous and flags.writeable else np.array(column, dtype, order="C")
