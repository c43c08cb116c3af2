"""Times and bytes of a rank's ops, and the clocks of ranks brought together."""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipesim.replay.operations import Stage

__all__ = ["CpuClock", "CudaClock", "Footprints", "clock_offset", "make_clock", "sleep_until"]

_ROUNDS = 30
_SPIN = 300_000  # ns before a deadline from which a sleeper spins; a wake-up is that late at times


class CpuClock:
    """The monotonic clock. A CPU op is over when its call returns."""

    name = "time.monotonic_ns"
    mark = staticmethod(time.monotonic_ns)

    def begin(self) -> None:
        """Nothing to do."""

    def resolve(self, marks: list[Any]) -> list[int]:
        """Marks as nanoseconds of the monotonic clock; 0 for those that were not made."""
        return [0 if mark is None else mark for mark in marks]


class CudaClock:
    """CUDA events on the current stream, as nanoseconds of the host's monotonic clock."""

    name = "CUDA events"

    def __init__(self) -> None:
        self._base: Any = None
        self._host = 0

    def begin(self) -> None:
        """Ties the device's time to the host's: once per iteration, because an event's float32 milliseconds lose precision."""
        event: Any = torch.cuda.Event
        torch.cuda.synchronize()
        self._base = event(enable_timing=True)
        self._base.record()
        self._base.synchronize()
        self._host = time.monotonic_ns()

    def mark(self) -> Any:
        """An event at this place of the current stream."""
        event: Any = torch.cuda.Event
        one = event(enable_timing=True)
        one.record()
        return one

    def resolve(self, marks: list[Any]) -> list[int]:
        """Waits for the device, and returns nanoseconds; 0 for marks that were not made."""
        torch.cuda.synchronize()
        return [0 if mark is None else self._host + round(self._base.elapsed_time(mark) * 1e6) for mark in marks]


def make_clock(device: torch.device) -> CpuClock | CudaClock:
    """The clock that fits a device."""
    return CudaClock() if device.type == "cuda" else CpuClock()


def sleep_until(deadline: int) -> None:
    """Returns at *deadline* (ns, monotonic): sleeps most of the way and spins the rest."""
    left = deadline - time.monotonic_ns()
    if left > _SPIN:
        time.sleep((left - _SPIN) * 1e-9)
    while time.monotonic_ns() < deadline:
        pass


def clock_offset(rank: int, world: int) -> tuple[int, int, int]:
    """This rank's clock minus rank 0's, in ns, its uncertainty, and when (own clock) it was measured.

    Ping-pong with rank 0; the round trip that took least is the one in which least went wrong. Ranks of one machine that has not been
    restarted share the kernel's clock, so there the offset is 0 and is not measured.
    """
    machine = f"{socket.gethostname()} {_boot_id()}"
    machines: list[str] = [""] * world
    dist.all_gather_object(machines, machine)
    offset, uncertainty = 0, 0
    buffer = torch.zeros(1, dtype=torch.int64)
    for other in range(1, world):
        if machines[other] == machines[0]:
            continue
        if rank == 0:
            for _ in range(_ROUNDS):
                dist.recv(buffer, other)
                buffer[0] = time.monotonic_ns()
                dist.send(buffer, other)
        elif rank == other:
            best = 1 << 62
            for _ in range(_ROUNDS):
                sent = time.monotonic_ns()
                dist.send(buffer, 0)
                dist.recv(buffer, 0)
                back = time.monotonic_ns()
                if back - sent < best:
                    best = back - sent
                    offset = (sent + back) // 2 - int(buffer[0])
            uncertainty = best // 2
    return offset, uncertainty, time.monotonic_ns()


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""


class Footprints:
    """Bytes that one iteration's activations take, per stage and microbatch.

    On CUDA the allocator says them. On a CPU every tensor that autograd saves is counted while it is alive, each storage once,
    with the stage's input and without its weights. That costs time, so it is done in an iteration of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.kept: dict[tuple[int, int], int] = {}
        self.freed: dict[tuple[int, int], int] = {}
        self.rebuilt: dict[tuple[int, int], int] = {}

    @contextmanager
    def around(self, stage: Stage, kind: str, microbatch: int) -> Iterator[None]:
        """Measures what an op adds or frees."""
        key = (stage.number, microbatch)
        before = self._level(stage, microbatch)
        with self._counting(stage, microbatch):
            yield
        change = self._level(stage, microbatch) - before
        if kind == "F":
            self.kept[key] = max(0, change)
        elif kind == "R":
            self.rebuilt[key] = max(0, change)
        elif kind == "I":
            self.freed[key] = max(0, -change)

    def _level(self, stage: Stage, microbatch: int) -> int:
        if self._cuda:
            return int(torch.cuda.memory_allocated())
        live = _live.get((stage.number, microbatch))
        found: dict[int, int] = {} if live is None else live.storages()
        activation = stage.activations.get(microbatch)
        if activation is not None:
            for tensor in (activation.given, activation.leaf, activation.first, activation.root):
                if tensor is not None:
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        for address in stage.weights.storages:
            found.pop(address, None)
        return sum(found.values())

    def _counting(self, stage: Stage, microbatch: int) -> Any:
        if self._cuda or microbatch in stage.offloaded:
            return torch.enable_grad()
        live = _live.setdefault((stage.number, microbatch), _Live())
        return torch.autograd.graph.saved_tensors_hooks(live.pack, _unpack)


class _Saved:
    """A tensor that autograd has saved; it goes when autograd lets it go."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Live:
    """The saved tensors of one activation that are still alive."""

    def __init__(self) -> None:
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved.add(saved)
        return saved

    def storages(self) -> dict[int, int]:
        return {saved.tensor.untyped_storage().data_ptr(): saved.tensor.untyped_storage().nbytes() for saved in self._saved}


def _unpack(saved: _Saved) -> torch.Tensor:
    return saved.tensor


_live: dict[tuple[int, int], _Live] = {}
