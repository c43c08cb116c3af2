"""Works through one device's steps: ops, sends, receives, gradient sums, and when each of them was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pipesim.op import Kind
from pipesim.replay.measure import CpuClock, CudaClock, Footprints, sleep_until
from pipesim.replay.operations import Mail, Stage
from pipesim.replay.program import Code, Program, Step, Transfer

__all__ = ["Channel", "Executor", "Loopback"]

Key = tuple[bool, int, int, int]


class Channel:
    """Messages to and from other ranks.

    Args:
        groups: Ordered pair of devices to its process group; None for the default group, which then tells messages apart by tags.
        first_rank: Rank of device 0 of this pipeline.
        batched: Sends and receives of a step are issued as one batch.
    """

    def __init__(self, groups: dict[tuple[int, int], Any] | None, device: int, first_rank: int, batched: bool) -> None:
        self._groups, self._device, self._first, self._batched = groups, device, first_rank, batched
        self._ends: dict[tuple[int, bool], tuple[Any, int]] = {}

    def exchange(self, sends: list[tuple[Transfer, torch.Tensor]], receives: list[tuple[Transfer, torch.Tensor]]) -> tuple[list[Any], list[Any]]:
        """Starts all of them, and returns the work handles: per send, and per receive. Every handle must be waited for."""
        if not self._batched:
            # what isend and irecv call, without what they look up each time
            sent, received = [], []
            for transfer, tensor in sends:
                group, rank = self._end(transfer.peer, True)
                sent.append(group.send([tensor], rank, transfer.number))
            for transfer, tensor in receives:
                group, rank = self._end(transfer.peer, False)
                received.append(group.recv([tensor], rank, transfer.number))
            return sent, received
        ops = [dist.P2POp(dist.irecv, tensor, self._first + t.peer, self._group(t.peer, False), t.number) for t, tensor in receives]
        ops += [dist.P2POp(dist.isend, tensor, self._first + t.peer, self._group(t.peer, True), t.number) for t, tensor in sends]
        works = dist.batch_isend_irecv(ops)
        if len(works) == len(ops):  # one handle per op (gloo), or one for all of them (NCCL)
            return works[len(receives) :], works[: len(receives)]
        return works, [works] * len(receives)

    def _end(self, peer: int, sends: bool) -> tuple[Any, int]:
        """The process group that goes to or comes from a device, and the rank of that device in it."""
        found = self._ends.get((peer, sends))
        if found is None:
            group: Any = self._group(peer, sends) or dist.group.WORLD
            found = self._ends[peer, sends] = group, dist.get_group_rank(group, self._first + peer)
        return found

    def _group(self, peer: int, sends: bool) -> Any:
        if self._groups is None:
            return None
        return self._groups[(self._device, peer) if sends else (peer, self._device)]


class Loopback:
    """No other ranks: what is sent goes nowhere, and what is received is there at once, whatever it holds."""

    def exchange(self, sends: list[tuple[Transfer, torch.Tensor]], receives: list[tuple[Transfer, torch.Tensor]]) -> tuple[list[Any], list[Any]]:
        """Nothing to wait for."""
        for _, tensor in receives:
            if tensor.is_floating_point():
                tensor.fill_(0.01)
        return [], [()] * len(receives)


class Executor:
    """Runs a device's program, iteration by iteration.

    Args:
        program: The compiled schedule.
        device: Which device this is.
        stages: Its stages; empty where ops are emulated.
        mail: The device's mail.
        channel: How messages travel.
        clock: What times are taken from.
        buffer: Makes the tensor that a message is received into.
        reducers: Stage to what starts the sum of its gradients and returns the work handle, or None.
        barrier: Waits for all devices.
        sleeps: (slots,) ns that each slot takes where ops are emulated, else None.
        outgoing: Makes the tensor to send where ops are emulated.
        progress: Two numbers that say, to whoever watches, which iteration and which step this is.
    """

    def __init__(
        self,
        program: Program,
        device: int,
        *,
        stages: dict[int, Stage],
        mail: Mail,
        channel: Channel | Loopback,
        clock: CpuClock | CudaClock,
        buffer: Callable[[Transfer], torch.Tensor],
        reducers: dict[int, Callable[[], Any]],
        barrier: Callable[[], None],
        sleeps: list[int] | None = None,
        outgoing: Callable[[Transfer], torch.Tensor] | None = None,
        progress: NDArray[np.int64] | None = None,
    ) -> None:
        self.stages, self.mail, self.channel, self.clock, self.buffer = stages, mail, channel, clock, buffer
        self.reducers, self.barrier, self.outgoing = reducers, barrier, outgoing
        self.progress = np.zeros(2, np.int64) if progress is None else progress
        self.steps = program.devices[device]
        schedule = program.schedule
        self.first_slot = int(schedule.device_slots[device])
        self.slots = int(schedule.device_slots[device + 1]) - self.first_slot
        self.sends = [transfer.number for step in self.steps for transfer in step.sends]
        self.receives = [transfer.number for step in self.steps for transfer in step.receives]
        self.moves = [step.slot for step in self.steps if step.code is Code.MOVE]
        self.footprints: Footprints | None = None
        self._sleeps = sleeps
        self._calls = [self._bound(step) for step in self.steps]
        self._updates = [[op.stage for op in step.ops if op.kind is Kind.U] for step in self.steps]
        self._incoming: dict[int, tuple[Any, torch.Tensor, Key]] = {}
        self._outgoing: list[tuple[Any, list[torch.Tensor]]] = []
        self._reductions: dict[int, Any] = {}
        self._profiled = False

    def _bound(self, step: Step) -> list[Callable[[], None]]:
        """The functions that a step calls."""
        if step.code is Code.MOVE and self.stages:
            op = step.ops[0]
            stage, microbatch = self.stages[op.stage], op.microbatch or 0
            return [(lambda: stage.offload(microbatch)) if op.kind is Kind.OFFLOAD else (lambda: stage.reload(microbatch))]
        if step.code is not Code.COMPUTE:
            return []
        if self._sleeps is None:
            return [self.stages[op.stage].bound(op) for op in step.ops]
        duration = self._sleeps[step.slot]
        now = CpuClock.mark
        return [lambda: sleep_until(now() + duration)] if duration else []

    def iteration(self, number: int) -> dict[str, list[int]]:
        """Runs all steps once, and returns ns: start and end per slot, departed per send, arrived per receive, moves."""
        self.clock.begin()
        self._profiled = bool(getattr(torch.autograd, "_profiler_enabled", bool)())
        mark, progress = self.clock.mark, self.progress
        progress[0] = number
        start: list[Any] = []
        end: list[Any] = []
        departed: dict[int, Any] = {}
        arrived: dict[int, Any] = {}
        move_start: list[Any] = []
        move_end: list[Any] = []
        for place, step in enumerate(self.steps):
            progress[1] = place
            code = step.code
            if code is Code.COMPUTE:
                for message in step.waits:
                    self._wait_for(message)
                    arrived[message] = mark()
                for stage in self._updates[place]:
                    self._finish_reduction(stage)
                start.append(mark())
                if self.footprints is not None or self._profiled:
                    self._watched(step, self._calls[place])
                else:
                    for call in self._calls[place]:
                        call()
                end.append(mark())
            elif code is Code.TRANSFER:
                self._transfer(step, departed, mark)
            elif code is Code.REDUCE:
                stage = step.ops[0].stage
                if stage in self.reducers:
                    self._reductions[stage] = self.reducers[stage]()
            elif code is Code.BARRIER:
                self.barrier()
            else:
                move_start.append(mark())
                for call in self._calls[place]:
                    call()
                move_end.append(mark())
        progress[1] = len(self.steps)
        for work, _ in self._outgoing:
            _wait(work)
        self._outgoing.clear()
        resolve = self.clock.resolve
        return {
            "start": resolve(start),
            "end": resolve(end),
            "departed": resolve([departed.get(one) for one in self.sends]),
            "arrived": resolve([arrived.get(one) for one in self.receives]),
            "move_start": resolve(move_start),
            "move_end": resolve(move_end),
        }

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _transfer(self, step: Step, departed: dict[int, Any], mark: Callable[[], Any]) -> None:
        sends = [(transfer, self._taken(transfer)) for transfer in step.sends]
        for transfer in step.sends:
            departed[transfer.number] = mark()
        receives = [(transfer, self.buffer(transfer)) for transfer in step.receives]
        sent, received = self.channel.exchange(sends, receives)
        self._outgoing.append((sent, [tensor for _, tensor in sends]))  # both kept until the end: the handles, and what they send
        for (transfer, tensor), work in zip(receives, received, strict=True):
            self._incoming[transfer.number] = (work, tensor, (transfer.gradient, transfer.source, transfer.target, transfer.microbatch))

    def _taken(self, transfer: Transfer) -> torch.Tensor:
        if self.outgoing is not None:
            return self.outgoing(transfer)
        return self.mail.pop((transfer.gradient, transfer.source, transfer.target, transfer.microbatch)).contiguous()

    def _wait_for(self, message: int) -> None:
        work, tensor, key = self._incoming.pop(message)
        _wait(work)
        if self._sleeps is None:
            self.mail[key] = tensor

    def _finish_reduction(self, stage: int) -> None:
        work = self._reductions.pop(stage, None)
        if work is not None:
            work.wait()

    def _watched(self, step: Step, calls: list[Callable[[], None]]) -> None:
        """The same with labels for torch.profiler, or with bytes counted."""
        with torch.profiler.record_function(f"PP:{step.label}"):
            for op, call in zip(step.ops, calls, strict=False):
                if self.footprints is not None and self.stages:
                    with self.footprints.around(self.stages[op.stage], op.kind.name, op.microbatch or 0):
                        call()
                else:
                    call()


def _wait(work: Any) -> None:
    """Waits for a handle, or for all of several."""
    if isinstance(work, list | tuple):
        for one in work:
            one.wait()
    elif work is not None:
        work.wait()
