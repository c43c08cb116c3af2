"""The compiled engine: the same runs as the SimPy engine, to the bit, a hundred times as fast. It needs numba (``pipesim[fast]``).

numba is imported in this file alone, and only when a run asks for it. Each loop is compiled at its first use on a machine
and then kept on disk, beside the package, or where that is read-only in the user's cache folder; ``NUMBA_CACHE_DIR`` names
another place.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pipesim.engine import contention, kernels
from pipesim.engine.deadlock import explain
from pipesim.engine.program import Program, Times
from pipesim.errors import ScheduleError

__all__ = ["columns", "compiled", "installed", "is_loaded", "refuse_uncovered", "run", "uncovered"]

_MOST = 2**31 - 1  # what int32 columns can number


def installed() -> bool:
    """Whether numba is there, without importing it."""
    return importlib.util.find_spec("numba") is not None


def uncovered(program: Program) -> str | None:
    """What of this run the compiled engine does not cover, in words, or None. This is the whole list.

    * Steps of 2³¹ slots or transfers and more, which its columns cannot number.
    """
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


# -- numba ---------------------------------------------------------------------------------------------------------------

_LOOPS = {function.__name__: function for function in (kernels.chain, kernels.many, contention.events)}


def is_loaded() -> bool:
    """Whether this process has a compiled loop, so that using it costs nothing more."""
    return _loop.cache_info().currsize > 0


def compiled(name: str, *arguments: Any) -> Any:
    """Calls a loop by its name; compiles it, or loads it from disk, the first time."""
    loop = _loop(name)
    if not loop.overloads:
        _compile(loop, arguments)
    return loop(*arguments)


@functools.cache
def _loop(name: str) -> Any:
    import numba

    function = _LOOPS[name]
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # numba has tried NUMBA_CACHE_DIR, the package's folder and the user's cache folder
        _say_once("pipesim finds no folder to keep compiled code in, so every process compiles it again; set NUMBA_CACHE_DIR to one")
        return numba.njit(function, **options)


def _compile(loop: Any, arguments: tuple[Any, ...]) -> None:
    """Compiles for these types of arguments; of several processes that come here together, one compiles and the others load."""
    import numba
    from numba.core import event

    class Notice(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            _say_once("pipesim compiles its fast engine, once per installation; this takes some seconds")

        def on_end(self, event: Any) -> None:
            pass

    types = tuple(numba.typeof(argument) for argument in arguments)
    with _one_process(loop.stats.cache_path), event.install_listener("numba:compile", Notice()):
        loop.compile(types)


@contextlib.contextmanager
def _one_process(folder: str | None) -> Iterator[None]:
    """Holds a lock file in the folder of the compiled code, where there is one and the system has such locks."""
    if folder is None or importlib.util.find_spec("fcntl") is None:
        yield
        return
    import fcntl

    with Path(folder, "pipesim.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- a run ---------------------------------------------------------------------------------------------------------------


def columns(program: Program) -> tuple[kernels.Columns, NDArray[np.int64]]:
    """Returns the run as the loops want it, and (edges,) the transfer that each edge is, -1 for one of a reduction."""
    schedule, used = program.schedule, program.used_devices
    real, meetings = schedule.num_slots, len(program.reductions)
    bounds = schedule.device_slots
    place = np.cumsum(np.diff(bounds) > 0) - 1  # device to its number among those that are used
    extra = real + np.arange(meetings)
    low, high = np.concatenate([bounds[used], extra]), np.concatenate([bounds[used + 1], extra + 1])
    gate = high.copy()
    gates = program.barrier_slots[used]
    gate[: len(used)] = np.where(gates >= 0, gates, high[: len(used)])
    owner = np.concatenate([place[schedule.slot_device], len(used) + np.arange(meetings)])
    source, target = program.source_slot, program.target_slot
    transfers = np.arange(len(source))
    into, out_of = _reduction_edges(program)
    moves = len(program.moves)
    if meetings or moves:  # messages alone are in order
        local = len(into) + len(out_of)
        source, target = np.concatenate([source, into[:, 0], out_of[:, 0]]), np.concatenate([target, into[:, 1], out_of[:, 1]])
        transfers = np.concatenate([transfers, np.full(local, -1)])
        order = np.argsort(source, kind="stable")
        source, target, transfers = source[order], target[order], transfers[order]
    queue = np.where(program.queued, program.link, -1)
    values = [queue, program.transfer, program.latency]
    if meetings or moves:
        nothing = (-1, 0.0, 0.0)  # of a reduction
        values = [np.append(column, value)[transfers] for column, value in zip(values, nothing, strict=True)]
    slots = real + meetings
    first = np.zeros(slots + 1, np.int64)
    np.cumsum(np.bincount(source, minlength=slots), out=first[1:])
    indegree = np.bincount(target[target >= 0], minlength=slots)
    return (
        kernels.Columns(
            *(_ints(low), _ints(gate), _ints(high)),
            len(used) if program.barrier else 0,
            *(_ints(owner), _ints(indegree), _ints(first), _ints(target)),
            *(_ints(values[0]), _floats(values[1]), _floats(values[2])),
            int(queue.max(initial=-1)) + 1,
        ),
        transfers,
    )


def _reduction_edges(program: Program) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(edges, 2) slots: from gradients to each reduction, from each reduction to its updates."""
    into: list[tuple[int, int]] = []
    out_of: list[tuple[int, int]] = []
    for number, (gradients, updates) in enumerate(program.reductions, program.schedule.num_slots):
        into.extend((slot, number) for slot in gradients)
        out_of.extend((number, slot) for slot in updates)
    return np.array(into, np.int64).reshape(-1, 2), np.array(out_of, np.int64).reshape(-1, 2)


def shared(program: Program, transfers: NDArray[np.int64]) -> contention.Shared:
    """Returns what the loop over events wants besides."""
    messages, count = len(program.messages), len(transfers)
    is_transfer = transfers >= 0
    device = np.append(program.transfer_device, 0)[transfers].astype(np.int64)
    rank = np.append(program.transfer_rank, 0)[transfers]
    lanes, number = np.unique(program.moves.device, return_inverse=True)
    lane = np.where(transfers >= messages, np.append(number, -1)[np.maximum(transfers - messages, -1)], -1)
    moves = np.flatnonzero(lane >= 0)  # in the order of the streams
    bounds = np.searchsorted(lane[moves], np.arange(len(lanes) + 1))
    return contention.Shared(np.where(is_transfer, device * program.steps * count + rank, 0), _ints(lane), _ints(bounds), _ints(moves))


def has_shared_queues(program: Program) -> bool:
    """Whether several devices ask for one queue, or a device lists moves; else a queue goes by its sender's stream."""
    if len(program.moves):
        return True
    queued = program.queued
    if not queued.any():
        return False
    link, device = program.link[queued], program.transfer_device[queued]
    sender = np.zeros(int(link.max()) + 1, device.dtype)
    sender[link] = device
    return bool((sender[link] != device).any())


def run(program: Program) -> Times:
    """Runs a program to its end; the same times as :func:`pipesim.engine.simpy_engine.run`.

    Raises:
        DeadlockError: Some device cannot go on.
    """
    c, transfers = columns(program)
    slots, real, steps = len(c.owner), program.schedule.num_slots, program.steps
    durations = _floats(np.append(program.durations, np.zeros(slots - real)))
    start, end = np.zeros((steps, slots)), np.empty((steps, slots))
    at = np.empty(len(c.low), np.int32)
    departed = None
    if has_shared_queues(program):
        departed = np.empty((steps, len(transfers)))
        at_step = np.empty(len(c.low), np.int32)
        compiled("events", c, shared(program, transfers), durations, start, end, departed, at, at_step)
        if (at_step < steps).any():
            _explain(program, at, at_step)
    else:
        departed = np.empty((steps, len(transfers)) if c.queues else (0, 0))
        order = np.empty(slots, np.int32)
        finished, _ = compiled("chain", c, durations, start, end, departed, order, at)
        if finished < steps:
            _stuck(program, c, durations, at)
    if slots > real:
        start, end = start[:, :real].copy(), end[:, :real].copy()
    sent = end[:, program.source_slot]
    if not departed.size:
        departed = sent
    elif len(transfers) > len(program.source_slot) or len(program.moves):
        own = transfers >= 0
        by_transfer = np.empty_like(sent)
        by_transfer[:, transfers[own]] = departed[:, own]
        departed = by_transfer
    return start, end, sent, departed, (departed + program.transfer) + program.latency


def run_many(program: Program, durations: NDArray[np.float64], found: kernels.Figures) -> None:
    """Runs a program that has no shared queues under (runs, slots) durations.

    Raises:
        DeadlockError: Some device cannot go on; that does not depend on the durations.
    """
    c, _ = columns(program)
    slots = len(c.owner)
    order, at = np.empty(slots, np.int32), np.empty(len(c.low), np.int32)
    times = np.zeros((1, slots)), np.empty((1, slots)), np.empty((1, len(c.target)) if c.queues else (0, 0))
    first = _floats(np.append(durations[0], np.zeros(slots - durations.shape[1])))
    finished, before_barrier = compiled("chain", c, first, *times, order, at)
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
    compiled("many", c, order, before_barrier, _floats(durations), _ints(program.used_devices), found)


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
            compiled("chain", c._replace(gate=limit, high=limit, meeting=0), durations, *times, np.empty(slots, np.int32), here)
            at = np.where(goes_on, here, at)
        passed = not c.meeting
    _explain(program, at, step)


def _explain(program: Program, at: NDArray[np.int32], at_step: NDArray[np.int32]) -> NoReturn:
    positions: dict[int, int | None] = {}
    for device, slot, step in zip(program.used_devices.tolist(), at.tolist(), at_step.tolist(), strict=False):
        positions[device] = None if step == program.steps else step * program.schedule.num_slots + slot
    raise explain(program, positions)


def _ints(column: NDArray[Any]) -> NDArray[np.int32]:
    """A column as the loops are compiled for: contiguous, and not read-only, which would be another type."""
    return np.require(column, np.int32, ["C", "W"])


def _floats(column: NDArray[Any]) -> NDArray[np.float64]:
    return np.require(column, np.float64, ["C", "W"])
