"""Starts the ranks of a replay on this machine, watches them, and stops them all when one fails. Needs no torch itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipesim.costs import CostModel
from pipesim.engine import simulate
from pipesim.errors import ScheduleError
from pipesim.lowering import is_explicit
from pipesim.replay.program import Program, compile_program
from pipesim.replay.records import SETTING_UP, open_progress, read_facts, write_facts
from pipesim.replay.result import assemble
from pipesim.replay.settings import ReplayModel, Settings, schedule_data, stage_layers
from pipesim.schedule import Schedule
from pipesim.timeline import Timeline

__all__ = ["ReplayError", "Task", "default_backend", "replay", "replay_all"]

_START = 120.0  # seconds that a rank may take to import torch, meet the others and build its stages, however short the timeout
_POLL = 0.05
_GRACE = 2.0  # seconds in which the others may say why they failed too


class ReplayError(RuntimeError):
    """A rank failed or made no progress.

    Attributes:
        partial: What was measured before, marked so (``info["partial"]``), or None if no iteration was complete.
        complete: Of several tasks, the runs of those before the one that failed.
    """

    def __init__(self, text: str, partial: Timeline | None = None, complete: Sequence[Timeline] = ()) -> None:
        super().__init__(text)
        self.partial = partial
        self.complete = tuple(complete)


@dataclass(frozen=True)
class Task:
    """A schedule to replay.

    Attributes:
        schedule: What runs.
        settings: How.
        costs: Where ops are emulated: what they take, in seconds.
    """

    schedule: Schedule
    settings: Settings
    costs: CostModel | None = None

    def program(self) -> Program:
        """The compiled schedule; see :func:`pipesim.replay.program.compile_program`.

        Raises:
            ScheduleError: Something is wrong with the schedule or the settings.
            DeadlockError: The schedule cannot finish.
        """
        settings = self.settings.check()
        if settings.model.layers is not None and settings.mode != "emulate" and ":" not in settings.model.kind:
            stage_layers(settings.model.layers, self.schedule.num_stages)
        in_order = settings.backend == "nccl" and settings.mode != "solo"
        program = compile_program(self.schedule, settings.receives, data=settings.data, barrier=settings.barrier, in_order=in_order)
        if is_explicit(self.schedule):
            # What was not listed by us is run dry before it can hang. Sends and receives wait for nobody here, so the ops decide.
            simulate(self.schedule.without_communication())
        if (settings.mode == "emulate") != (self.costs is not None):
            raise ScheduleError(
                "mode emulate wants costs: what every op takes"
                if self.costs is None
                else f"mode {settings.mode} measures what ops take; leave out the costs"
            )
        if self.costs is not None and self.costs.unit != "s":
            raise ScheduleError("an emulated op sleeps for its duration, so the costs must be in seconds: --unit ms")
        return program

    def data(self, program: Program) -> dict[str, Any]:
        """The task for the ranks."""
        result: dict[str, Any] = {"schedule": schedule_data(self.schedule), "settings": asdict(self.settings)}
        if self.costs is not None:
            result["sleeps"] = np.rint(np.asarray(self.costs.durations(program.schedule)) * 1e9).astype(int).tolist()
            result["message_bytes"] = np.rint(np.asarray(self.costs.message_bytes(program.schedule))).astype(int).tolist()
        return result


def default_backend() -> str:
    """``nccl`` where torch sees a CUDA device, else ``gloo``."""
    import torch

    return "nccl" if torch.cuda.is_available() else "gloo"


def replay(
    schedule: Schedule,
    *,
    model: ReplayModel | None = None,
    backend: str = "gloo",
    iterations: int = 5,
    warm_up: int = 2,
    mode: Literal["run", "solo", "emulate"] = "run",
    costs: CostModel | None = None,
    timeout: float = 60.0,
    data: int = 1,
    **options: Any,
) -> Timeline:
    """Runs a schedule for real, in processes of its own on this machine, and returns what was measured.

    Args:
        schedule: What runs; checked first, and refused if it cannot finish.
        model: What it computes; a small MLP by default.
        backend: ``gloo`` on CPUs, ``nccl`` with a CUDA device per rank.
        iterations: How often it runs and is measured: the steps of the Timeline.
        warm_up: Runs before, which are not.
        mode: ``run``; ``solo``, one device's stream after the other in one process; ``emulate``, ops sleep.
        costs: Mode emulate: what every op takes, in seconds.
        timeout: Seconds without progress after which all ranks are stopped.
        data: Degree of data parallelism; there are *devices x data* ranks.
        **options: Other fields of :class:`pipesim.replay.Settings`.

    Returns:
        The run, ``source="measured"``; ``info`` says how it was made.

    Raises:
        ScheduleError: The input is wrong.
        DeadlockError: The schedule cannot finish.
        ReplayError: A rank failed; ``partial`` holds the iterations that were complete.
    """
    settings = Settings(model or ReplayModel(), mode, backend, iterations, warm_up, data, timeout=timeout, **options)
    return replay_all([Task(schedule, settings, costs)])[0]


def replay_all(tasks: Sequence[Task], folder: Path | None = None) -> list[Timeline]:
    """Replays several schedules one after the other in the same processes, which start once.

    Args:
        tasks: Of the same number of ranks, backend and timeout.
        folder: Where the ranks write, a folder per task; by default one that goes at the end.

    Raises:
        ScheduleError: As for :func:`replay`, or the tasks do not fit together.
        DeadlockError: The same.
        ReplayError: A rank failed. The text says in which schedule, ``partial`` is of that one, and ``complete`` has the runs before it.
    """
    programs = [task.program() for task in tasks]
    worlds = {_world(task) for task in tasks}
    first = tasks[0].settings
    if len(worlds) > 1 or any((t.settings.backend, t.settings.timeout) != (first.backend, first.timeout) for t in tasks):
        raise ScheduleError("tasks of one launch want the same number of ranks, backend and timeout")
    with _folder(folder) as place:
        write_facts(place / "job.json", {"tasks": [task.data(program) for task, program in zip(tasks, programs, strict=True)]})
        for number in range(len(tasks)):
            (place / str(number)).mkdir()
        failure = _Ranks(place, worlds.pop(), first.threads, first.timeout, programs).watch()
        results: list[Timeline] = []
        for number, (task, program) in enumerate(zip(tasks, programs, strict=True)):
            failed = failure is not None and failure[0] <= number
            found = assemble(program, task.settings, place / str(number), task.costs, failure[1] if failure and failed else None)
            if failure is not None and failed:
                kept = f"; {found.steps} of {task.settings.iterations} iterations were complete" if found else ""
                raise ReplayError(f"{failure[1]}{kept}", found, results)
            assert found is not None
            results.append(found)
    return results


def _world(task: Task) -> int:
    return 1 if task.settings.mode == "solo" else task.schedule.num_devices * task.settings.data


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    made = Path(tempfile.mkdtemp(prefix="pipesim-replay-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


class _Ranks:
    """The processes of a launch."""

    def __init__(self, folder: Path, world: int, threads: int, timeout: float, programs: Sequence[Program]) -> None:
        self._folder, self._world, self._timeout, self._programs = folder, world, timeout, programs
        self._progress = [open_progress(folder, rank, create=True) for rank in range(world)]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                self._processes.append(self._start(rank, threads))
        except BaseException:
            self.stop()
            raise

    def _start(self, rank: int, threads: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self._world), "OMP_NUM_THREADS": str(threads)}
        # the ranks talk over the loopback interface alone, whatever this machine's name resolves to
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        environment |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback, "MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, "-m", "pipesim.replay", "--job", str(self._folder)]
        with open(self._folder / f"rank{rank}.log", "wb") as log:
            # its standard input ends when we do, however that is: then it goes too
            return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)

    def watch(self) -> tuple[int, str] | None:
        """Waits for all ranks. Returns None, or the task that failed and why, when all have been stopped."""
        before, since = -1, time.monotonic()
        try:
            while True:
                states = [process.poll() for process in self._processes]
                if all(state == 0 for state in states):
                    return None
                if any(state not in (None, 0) for state in states):
                    return self._failure()
                now = sum(int(part.sum()) for part in self._progress)
                if now != before:
                    before, since = now, time.monotonic()
                setting_up = any(part[0] == SETTING_UP for part in self._progress)
                patience = max(self._timeout, _START) if setting_up else self._timeout
                if time.monotonic() - since > patience:
                    return self._stuck(patience)
                time.sleep(_POLL)
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends whoever is still there."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def _failure(self) -> tuple[int, str]:
        """The rank that failed first: one that was killed, then one with a reason of its own, then those that lost a peer."""
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            time.sleep(_POLL)
        found: list[tuple[int, float, int, str]] = []
        for rank, process in enumerate(self._processes):
            state = process.poll()
            if state in (None, 0):
                continue
            error = read_facts(self._folder / f"rank{rank}.error")
            if error is not None:
                found.append((2 if error["lost_peer"] else 1, error["time"], rank, error["text"]))
            elif state is not None and state < 0:
                name = signal.Signals(-state).name if -state in list(signal.Signals) else f"signal {-state}"
                hint = " (out of memory?)" if name == "SIGKILL" else ""
                found.append((0, 0.0, rank, f"was ended by {name}{hint}"))
            else:
                found.append((0, 0.0, rank, f"exited with status {state}{self._last_words(rank)}"))
        _, _, rank, text = min(found)
        return self._task(rank), f"rank {rank} {self._where(rank)}: {text}"

    def _stuck(self, patience: float) -> tuple[int, str]:
        lines = [f"  rank {rank} {self._where(rank)}" for rank in range(self._world)]
        return min(map(self._task, range(self._world))), "\n".join([f"no rank made progress for {patience:g} s, so all were stopped", *lines])

    def _task(self, rank: int) -> int:
        return int(self._progress[rank][2])

    def _where(self, rank: int) -> str:
        """``(device 1, 1f1b, iteration 3, op 1B0)``."""
        iteration, place, task, beats = self._progress[rank].tolist()
        program = self._programs[task]
        device = rank % program.schedule.num_devices
        if iteration == SETTING_UP:
            return f"(device {device}, {program.schedule.name}, setting up)" if beats else f"(device {device}, starting)"
        if self._world == 1:  # solo: its devices take turns, beats apart
            return f"({program.schedule.name})" if program.schedule.num_devices > 1 else f"(device 0, {program.schedule.name})"
        steps = program.devices[device]
        when = "warm-up" if iteration < 0 else f"iteration {iteration}"
        what = f"op {steps[place].label}" if place < len(steps) else "at its end"
        return f"(device {device}, {program.schedule.name}, {when}, {what})"

    def _last_words(self, rank: int) -> str:
        lines = (self._folder / f"rank{rank}.log").read_text(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""
