"""A rank that torchrun started: it meets the others as the environment says, and rank 0 gets what all have measured."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from pipesim.errors import ScheduleError
from pipesim.replay.failures import describe
from pipesim.replay.launch import ReplayError, Task
from pipesim.replay.records import open_progress
from pipesim.replay.result import assemble
from pipesim.replay.worker import Rank, join, leave, torch_device
from pipesim.timeline import Timeline

__all__ = ["run_rank"]


def run_rank(task: Task) -> Timeline | None:
    """Runs a task as one rank of torchrun's.

    Returns:
        On rank 0 the run, on the others None.

    Raises:
        ScheduleError: Something is wrong with the task, or the world has another size than the schedule needs.
        ReplayError: This rank failed; torchrun stops the others.
    """
    program = task.program()
    settings = task.settings
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(settings.threads)
    folder = Path(tempfile.mkdtemp(prefix="pipesim-replay-"))
    progress = open_progress(folder, rank, create=True)
    try:
        try:
            torch_device(settings)
            join(settings, rank, world, None)
            Rank(task.data(program), rank, world, folder, progress).run()
            _gather(folder, rank, world)
            leave()
        except ScheduleError:
            raise
        except Exception as error:  # whatever it is, in words
            iteration, place, _, _ = progress.tolist()
            steps = program.devices[rank % len(program.devices)]
            where = f"iteration {iteration}, op {steps[place].label}" if place < len(steps) else "at its end"
            partial = assemble(program, settings, folder, task.costs, describe(error)["text"]) if world == 1 else None
            raise ReplayError(f"rank {rank} (device {rank % len(program.devices)}, {where}): {describe(error)['text']}", partial) from error
        return assemble(program, settings, folder, task.costs) if rank == 0 else None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _gather(folder: Path, rank: int, world: int) -> None:
    """Rank 0 gets the files of all, which may be on other machines."""
    own = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".times", ".facts")}
    found: list[dict[str, bytes]] | None = [{} for _ in range(world)] if rank == 0 else None
    dist.gather_object(own, found)
    for files in found or ():
        for name, data in files.items():
            (folder / Path(name).name).write_bytes(data)
