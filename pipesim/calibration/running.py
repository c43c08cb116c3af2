"""Doing the runs of a calibration, and the replays that check its predictions, in turn."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pipesim.calibration.schedules import MESSAGES, SIZES, gpipe_probe, message_probe, split_probe
from pipesim.costs import CostModel
from pipesim.errors import ScheduleError, require_count
from pipesim.replay import ReplayError, Settings, Task, replay_all
from pipesim.schedule import Schedule
from pipesim.timeline import Timeline, load

__all__ = ["Done", "Plan", "run_plan"]

Say = Callable[[str], None]
_MESSAGE_ITERATIONS = 5


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        devices: Ranks.
        microbatches: Of the calibration's runs.
        chunks: Stages per device: the model is measured cut into ``devices x chunks`` stages, for each of them, because an op of half a
            stage takes more than half its time.
        settings: How it is replayed: model, mode, backend, iterations.
        costs: Where ops are emulated: what they take, for any number of stages.
        rounds: Every run is done so often, all of them in turn: what disturbs the machine for a while disturbs all alike.
        verify: Schedules to predict, which are replayed in the same rounds.
        sizes: Bytes of the message probe.
    """

    devices: int
    microbatches: int
    chunks: tuple[int, ...] = (1,)
    settings: Settings = field(default_factory=Settings)
    costs: CostModel | None = None
    rounds: int = 3
    verify: tuple[Schedule, ...] = ()
    sizes: tuple[int, ...] = SIZES

    def tasks(self) -> dict[str, Task]:
        """Label to what runs: the calibration's runs first, then those that check it."""
        require_count("rounds", self.rounds)
        settings, result = self.settings, {}
        for chunks in self.chunks:
            for make in (gpipe_probe, split_probe):
                schedule = make(self.devices, self.microbatches, chunks)
                result[schedule.name] = Task(schedule, settings, self.costs)
        if self.devices > 1 and settings.mode != "solo":
            schedule, costs = message_probe(self.devices, self.sizes)
            result[MESSAGES] = Task(schedule, replace(settings, mode="emulate", iterations=_MESSAGE_ITERATIONS), costs)
        for schedule in self.verify:
            label = f"verify-{re.sub(r'[^A-Za-z0-9.]+', '-', schedule.name)}-{schedule.num_devices}x{schedule.num_microbatches}"
            if label in result:
                raise ScheduleError(f"two schedules to predict are named {schedule.name}; give them different names")
            result[label] = Task(schedule, settings, self.costs)
        return result


@dataclass(frozen=True)
class Done:
    """Runs that were done or found.

    Attributes:
        calibration: Runs to calibrate from.
        verification: Per schedule of the plan's *verify*, its replays.
        notes: What was reused, and what failed.
    """

    calibration: tuple[Timeline, ...]
    verification: tuple[tuple[Timeline, ...], ...]
    notes: tuple[str, ...] = ()


def run_plan(plan: Plan, folder: str | Path, say: Say = lambda text: None) -> Done:
    """Does the runs of a plan that are not in the folder yet.

    Each round is a launch of its own: new processes, saved when it is done, so that an interrupted calibration goes on where it was. Of a
    round that failed, the runs that were complete before are saved too.

    Args:
        plan: What to run.
        folder: Where runs are kept, as ``gpipe-2.0.json.gz`` and so on; made if it is not there.
        say: Called with a line about what happens.

    Raises:
        ScheduleError: The plan cannot be, or a run in the folder is of another configuration.
        ReplayError: A rank failed. What was measured before is in the folder.
        OSError: The folder cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tasks = plan.tasks()
    prints = {label: _fingerprint(task) for label, task in tasks.items()}
    index = folder / "runs.json"
    known: dict[str, str] = json.loads(index.read_text()) if index.is_file() else {}
    found: dict[str, list[Timeline]] = {label: [] for label in tasks}
    notes: list[str] = []
    reused = 0
    for number in range(plan.rounds):
        missing = []
        for label in tasks:
            path = folder / f"{label}.{number}.json.gz"
            if not path.is_file() or known.get(path.name) is None:
                missing.append(label)
            elif known[path.name] != prints[label]:
                raise ScheduleError(f"{path} is of another configuration; keep these runs in another folder, or remove it")
            else:
                found[label].append(load(path))
                reused += 1
        if not missing:
            continue
        if number % 2:
            missing.reverse()  # so that being first, with cold caches, or last is nobody's lot alone
        say(f"round {number + 1} of {plan.rounds}: {', '.join(missing)}")
        failed: ReplayError | None = None
        try:
            runs = replay_all([tasks[label] for label in missing])
        except ReplayError as error:
            failed, runs = error, list(error.complete)
            if error.partial is not None:
                error.partial.save(folder / f"partial-{number}.json.gz")
        for label, run in zip(missing, runs, strict=failed is None):
            name = f"{label}.{number}.json.gz"
            run.save(folder / name)
            known[name] = prints[label]
            found[label].append(run)
        index.write_text(json.dumps(known, indent=1, sort_keys=True))
        if failed is not None:
            raise failed
    if reused:
        notes.append(f"{reused} of {len(tasks) * plan.rounds} runs were in {folder} already, and were reused")
        say(notes[-1])
    checks = len(plan.verify)
    labels = list(tasks)
    split = len(labels) - checks
    return Done(tuple(run for label in labels[:split] for run in found[label]), tuple(tuple(found[label]) for label in labels[split:]), tuple(notes))


def _fingerprint(task: Task) -> str:
    """The same for the same run, and for nothing else."""
    costs = ""
    if task.costs is not None:
        program = task.schedule.with_updates()
        columns: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = (task.costs.durations(program), task.costs.message_bytes(program))
        costs = hashlib.sha256(b"".join(np.ascontiguousarray(column).tobytes() for column in columns)).hexdigest()
    return f"{task.settings.fingerprint(task.schedule, costs)}-{task.settings.iterations}"
