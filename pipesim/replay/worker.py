"""What one rank does: joins the others, sets its stages up, warms up, measures."""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pipesim.errors import ScheduleError
from pipesim.replay.executor import Channel, Executor, Loopback
from pipesim.replay.measure import Footprints, clock_offset, make_clock
from pipesim.replay.models import Batch, build_stage
from pipesim.replay.operations import Mail, Stage
from pipesim.replay.program import Program, Transfer, compile_program
from pipesim.replay.records import Recorder, write_facts
from pipesim.replay.settings import Settings, schedule_from
from pipesim.replay.weights import Weights

__all__ = ["Rank", "join", "leave", "torch_device"]


def join(settings: Settings, rank: int, world: int, store: Path | None) -> None:
    """Meets the other ranks: through a file where the launcher made one, else as torchrun's environment says."""
    backend = "gloo" if settings.backend == "gloo" else "cpu:gloo,cuda:nccl"
    seconds = settings.timeout if store is None else settings.timeout + 60  # the launcher sees a rank that is stuck before this does
    if store is None:
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    else:
        made = dist.FileStore(str(store), world)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=made, rank=rank, world_size=world, timeout=timedelta(seconds=seconds))


def leave() -> None:
    """The end of all communication."""
    if dist.is_initialized():
        dist.destroy_process_group()


def torch_device(settings: Settings) -> torch.device:
    """This rank's device.

    Raises:
        ScheduleError: NCCL or the CUDA device is not there.
    """
    if settings.backend == "gloo":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ScheduleError("backend nccl needs CUDA devices, and this machine has none that torch can use; --backend gloo runs on CPUs")
    if settings.mode != "solo" and not dist.is_nccl_available():
        raise ScheduleError("this torch was built without NCCL; --backend gloo runs on CPUs")
    local, count = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))), torch.cuda.device_count()
    if local >= count:
        raise ScheduleError(f"there are {count} CUDA devices here and this is rank {local} of its machine; every rank needs its own (or --solo)")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


class Rank:
    """A rank of one run.

    Args:
        run: The run, as the launcher wrote it: schedule, settings, ns per slot and bytes per message where ops are emulated.
        rank: Its number.
        world: How many there are.
        folder: Where it writes.
        progress: See :func:`pipesim.replay.records.open_progress`.
    """

    def __init__(self, run: Mapping[str, Any], rank: int, world: int, folder: Path, progress: NDArray[np.int64]) -> None:
        self.settings = Settings.from_data(run["settings"])
        self.sleeps: list[int] | None = run.get("sleeps")
        self.message_bytes: list[int] = run.get("message_bytes") or []
        settings = self.settings
        nccl = settings.backend == "nccl" and settings.mode != "solo"
        self.program: Program = compile_program(
            schedule_from(run["schedule"]), settings.receives, data=settings.data, barrier=settings.barrier, in_order=nccl
        )
        self.schedule = self.program.schedule
        self.rank, self.world, self.folder, self.progress = rank, world, folder, progress
        devices = self.schedule.num_devices
        self.solo = settings.mode == "solo"
        if not self.solo and world != devices * settings.data:
            times = f" x data {settings.data}" if settings.data > 1 else ""
            raise ScheduleError(
                f"the schedule has {devices} devices{times}, so it needs {devices * settings.data} ranks, and the world has {world}: --nproc-per-node {devices * settings.data}"
            )
        self.group, self.own = (0, 0) if self.solo else divmod(rank, devices)
        self.device = torch_device(settings)
        self.shapes: dict[int, tuple[torch.Size, torch.dtype]] = {}
        self.stages: dict[int, Stage] = {}
        self.losses: list[dict[str, float]] = []
        self.kept: list[dict[int, torch.Tensor]] = []

    # -- a run ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs and measures everything."""
        if self.solo:
            self._find_shapes()
            for device in range(self.schedule.num_devices):
                self.own = device
                self._measure(device, Loopback())
            return
        offset = clock_offset(self.rank, self.world)
        reducers = self._reduction_groups()
        groups = self._pair_groups()
        self._warm_pairs(groups)
        self._measure(self.rank, Channel(groups, self.own, self.group * self.schedule.num_devices, self.settings.batched), reducers, offset)

    def _measure(
        self, name: int, channel: Channel | Loopback, groups: dict[int, Any] | None = None, offset: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        """Sets one device up, and runs warm-up and iterations."""
        settings = self.settings
        executor = self._executor(channel, groups or {})
        self.beat()
        for _ in range(settings.warm_up):
            self._iteration(executor, -1)
        facts: dict[str, Any] = {
            "offsets": [offset],
            "device_name": _device_name(self.device),
            "torch": torch.__version__,
            "clock": executor.clock.name,
            "notes": list(self.program.notes),
        }
        if self.stages:
            facts.update(self._footprints(executor))
        widths = {"start": executor.slots, "end": executor.slots, "departed": len(executor.sends), "arrived": len(executor.receives)}
        widths |= {"move_start": len(executor.moves), "move_end": len(executor.moves)}
        write_facts(self.folder / f"rank{name}.facts", facts)
        recorder = Recorder(self.folder, name, widths, settings.iterations)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.losses, self.kept = [], []
        gc.collect()
        gc.freeze()
        gc.disable()
        before = time.thread_time()
        try:
            with self._profiler(name):
                for number in range(settings.iterations):
                    recorder.add(self._iteration(executor, number))
        finally:
            gc.enable()
            gc.unfreeze()
        facts["thread_seconds"] = time.thread_time() - before
        if self.device.type == "cuda":
            facts["peak_memory"] = int(torch.cuda.max_memory_allocated())
        if not self.solo:
            facts["offsets"].append(clock_offset(self.rank, self.world))
        facts["losses"] = self.losses
        write_facts(self.folder / f"rank{name}.facts", facts)
        if settings.keep:
            weights = {number: stage.weights.values for number, stage in self.stages.items()}
            torch.save({"weights": weights, "gradients": self.kept}, self.folder / f"rank{name}.tensors")
        self.stages = {}

    def _iteration(self, executor: Executor, number: int) -> dict[str, list[int]]:
        for stage in self.stages.values():
            stage.weights.begin()
        if self.schedule.weights != "flush" and not self.solo:
            dist.barrier()  # each is a run of its own
        found = executor.iteration(number)
        if number >= 0 and self.stages:
            self.losses.append({f"{s},{i}": float(loss) for s, stage in self.stages.items() for i, loss in stage.losses.items()})
        return found

    def beat(self) -> None:
        """A sign of life."""
        self.progress[3] += 1

    # -- setting up ----------------------------------------------------------------------------------------------------

    def _executor(self, channel: Channel | Loopback, groups: dict[int, Any]) -> Executor:
        emulated = self.sleeps is not None
        mail: Mail = {}
        if not emulated:
            self._build_stages(mail)
            if not self.shapes:
                self._exchange_shapes()
        reducers = {stage: self._reducer(stage, group) for stage, group in groups.items() if stage in self.schedule.device_stages[self.own]}
        token = torch.zeros(1, device=self.device)
        buffer = self._emulated_tensor if emulated else self._buffer
        return Executor(
            self.program,
            self.own,
            stages=self.stages,
            mail=mail,
            channel=channel,
            clock=make_clock(self.device),
            # on a CPU every message has its buffer, used again in each iteration; on CUDA the allocator's pool is as quick, and its peak is the truth
            buffer=buffer if self.device.type == "cuda" else cache(buffer),
            reducers=reducers,
            barrier=(lambda: None) if self.solo else (lambda: _barrier(token)),
            sleeps=self.sleeps,
            outgoing=cache(self._emulated_tensor) if emulated else None,
            progress=self.progress,
        )

    def _build_stages(self, mail: Mail) -> None:
        settings, schedule = self.settings, self.schedule
        ends = {s for s in range(schedule.num_stages) if all(a != s for a, _ in schedule.stage_edges) or all(b != s for _, b in schedule.stage_edges)}
        owned = schedule.device_stages[self.own]
        batch = Batch(settings.model, schedule.num_microbatches, self.group, self.device) if ends & set(owned) else None
        for number in owned:
            module = build_stage(settings.model, schedule, number, self.device)
            weights = Weights(module, settings, schedule.weights, _last_uses(schedule, self.own, number))
            self.stages[number] = Stage(settings.model, schedule, number, module, weights, batch, mail, settings.data)
            self.beat()
        if settings.keep:
            for stage in self.stages.values():
                self._keep_gradients(stage)

    def _keep_gradients(self, stage: Stage) -> None:
        """Every update's gradients are copied before they are used, for tests."""
        update = stage.weights.update

        def kept() -> None:
            self.kept.append({stage.number: stage.weights.gradients})
            update()

        stage.weights.update = kept  # type: ignore[method-assign]

    def _exchange_shapes(self) -> None:
        """Every rank learns the shape of every stage's output: each is run once, after those before it."""
        for number in _in_order(self.schedule):
            owner = self.schedule.placement[number][0]
            found: list[Any] = [self._output_of(self.stages[number]) if self.rank == owner else None]
            dist.broadcast_object_list(found, owner)
            self.shapes[number] = found[0]

    def _find_shapes(self) -> None:
        """The same in one process, a stage at a time."""
        for number in _in_order(self.schedule):
            settings = self.settings
            module = build_stage(settings.model, self.schedule, number, self.device)
            batch = Batch(settings.model, 1, 0, self.device)
            stage = Stage(settings.model, self.schedule, number, module, Weights(module, settings, "flush", {}), batch, {})
            self.shapes[number] = self._output_of(stage)

    def _output_of(self, stage: Stage) -> tuple[torch.Size, torch.dtype]:
        with torch.no_grad():
            if stage.before:
                shape, dtype = self.shapes[stage.before[0]]
                output = stage.module(torch.zeros(shape, dtype=dtype, device=self.device))
            else:
                assert stage.batch is not None
                output = stage.module(stage.batch.inputs[0])
        return output.shape, output.dtype

    def _buffer(self, transfer: Transfer) -> torch.Tensor:
        shape, dtype = self.shapes[transfer.target if transfer.gradient else transfer.source]
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _emulated_tensor(self, transfer: Transfer) -> torch.Tensor:
        size = max(1, self.message_bytes[transfer.number]) if self.message_bytes else 1
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _reduction_groups(self) -> dict[int, Any]:
        """A group per stage with replicas, so that sums of different stages cannot be mixed up, whatever their order on each device."""
        devices, data = self.schedule.num_devices, self.settings.data
        groups = {}
        for stage, owners in sorted(self.schedule.placement.items()):
            if len(owners) * data > 1:
                groups[stage] = dist.new_group([group * devices + device for group in range(data) for device in owners])
        return groups

    def _reducer(self, stage: int, group: Any) -> Callable[[], Any]:
        flat = self.stages[stage].weights.flat if self.stages else torch.zeros(1, device=self.device)
        if not flat.numel():
            return lambda: None
        return lambda: dist.all_reduce(flat, group=group, async_op=True)

    def _pair_groups(self) -> dict[tuple[int, int], Any] | None:
        """Under NCCL a group per direction of each pair: on one stream a receive that waits would hold up a send that must go."""
        if self.settings.backend != "nccl":
            return None
        groups: dict[tuple[int, int], Any] = {}
        for first in range(0, self.world, self.schedule.num_devices):
            for a, b in self.program.ordered_pairs:
                made = dist.new_group([first + a, first + b])
                if first == self.group * self.schedule.num_devices:
                    groups[a, b] = made
        return groups

    def _warm_pairs(self, groups: dict[tuple[int, int], Any] | None) -> None:
        """A first exchange of every pair in each direction that the schedule uses: it sets connections up, and is thousands of times slower."""
        first = self.group * self.schedule.num_devices
        token = torch.zeros(1, device=self.device)
        for a, b in self.program.ordered_pairs:
            if self.own in (a, b):
                group = None if groups is None else groups[a, b]
                for _ in range(2):
                    if self.own == a:
                        dist.send(token, first + b, group)
                    else:
                        dist.recv(token, first + a, group)
            self.beat()

    # -- measuring -----------------------------------------------------------------------------------------------------

    def _footprints(self, executor: Executor) -> dict[str, Any]:
        """An iteration of its own in which bytes are counted."""
        executor.footprints = found = Footprints(self.device)
        self._iteration(executor, -2)
        executor.footprints = None
        for stage in self.stages.values():
            stage.activations.clear()
        tables = {"kept": found.kept, "freed": found.freed, "rebuilt": found.rebuilt}
        result: dict[str, Any] = {name: [[s, i, size] for (s, i), size in table.items()] for name, table in tables.items()}
        result["static"] = {str(number): stage.weights.bytes() for number, stage in self.stages.items()}
        result["message_bytes"] = {str(s): torch.Size(shape).numel() * dtype.itemsize for s, (shape, dtype) in self.shapes.items()}
        return result

    def _profiler(self, name: int) -> Any:
        if self.settings.profile is None:
            return nullcontext()
        path = str(Path(self.settings.profile) / f"rank{name}.json")
        return torch.profiler.profile(on_trace_ready=lambda profiler: profiler.export_chrome_trace(path))


def _barrier(token: torch.Tensor) -> None:
    dist.all_reduce(token)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"


def _in_order(schedule: Any) -> list[int]:
    """Stages, each after those before it."""
    before: dict[int, set[int]] = {stage: set() for stage in range(schedule.num_stages)}
    for a, b in schedule.stage_edges:
        before[b].add(a)
    order: list[int] = []
    while len(order) < len(before):
        order += [stage for stage in before if stage not in order and before[stage] <= set(order)]
    return order


def _last_uses(schedule: Any, device: int, stage: int) -> dict[int, int]:
    """Version to the last update that a gradient made with it goes into, of the microbatches of one device."""
    from pipesim.op import Kind

    staleness = schedule.staleness
    mine = schedule.device[schedule.rows_of(Kind.F)[stage]] == device
    result: dict[int, int] = {}
    for version, update in zip(staleness.forward_version[stage][mine].tolist(), staleness.update[stage][mine].tolist(), strict=True):
        result[version] = max(result.get(version, 0), update)
    return result
