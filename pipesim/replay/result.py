"""From what the ranks wrote down to a Timeline. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.costs import ActivationBytes, CostModel
from pipesim.dataflow import messages
from pipesim.engine import simulate
from pipesim.errors import ScheduleError
from pipesim.memory import Footprint, moves
from pipesim.replay.program import Code, Program, slots_of
from pipesim.replay.records import read_facts, read_times
from pipesim.replay.settings import Settings
from pipesim.schedule import Schedule
from pipesim.timeline import Timeline, load

__all__ = ["append", "assemble", "losses_of", "save"]

Floats = NDArray[np.float64]
_TIMES = ("start", "end", "sent", "departed", "arrived", "offload_start", "offload_end")
_MODES = {"run": "run", "solo": "solo", "emulate": "emulated"}


def assemble(program: Program, settings: Settings, folder: Path, costs: CostModel | None = None, partial: str | None = None) -> Timeline | None:
    """Makes the Timeline of a run, or returns None if no iteration is complete on every device.

    Args:
        program: What ran.
        settings: How.
        folder: Where the ranks wrote.
        costs: Where ops were emulated, what their durations and bytes came from.
        partial: Why the run ended early, if it did.
    """
    schedule = program.schedule
    devices = range(schedule.num_devices)
    facts = [read_facts(folder / f"rank{device}.facts") for device in devices]
    if any(one is None for one in facts):
        return None
    known: list[dict[str, Any]] = [one for one in facts if one is not None]
    tables = [_times(program, folder, device, known[device]) for device in devices]
    steps = min(len(table["start"]) for table in tables)
    if not steps:
        return None
    count = len(messages(schedule))
    moved = moves(schedule)
    shape = {"start": schedule.num_slots, "end": schedule.num_slots, "departed": count, "arrived": count}
    shape |= {"move_start": len(moved), "move_end": len(moved)}
    columns = {name: np.zeros((steps, width), np.int64) for name, width in shape.items()}
    for device, table in zip(devices, tables, strict=True):
        places = _places(program, device)
        for name, column in columns.items():
            column[:, places[name]] = table[name][:steps]
    zero = int(columns["start"][0].min())
    times: dict[str, Any] = {name: (column - zero) * 1e-9 for name, column in columns.items()}
    footprint = _footprint(schedule, known) if costs is None else Footprint.of(schedule, costs)
    info = _information(program, settings, known, partial, steps)
    info["configuration"] = settings.fingerprint(schedule, "" if costs is None else _said_costs(costs, schedule, footprint))
    capacity = np.full(schedule.num_devices, np.inf)
    barrier = settings.barrier and schedule.weights == "flush" and schedule.has_backward
    if settings.mode == "solo":
        return _composed(schedule, times, footprint, info, barrier)
    sent = times["end"][:, messages(schedule).source_slot]
    departed = np.maximum(times["departed"], sent)
    arrived = np.maximum(times["arrived"], departed)
    travel = {"sent": sent, "departed": departed, "arrived": arrived, "offload_start": times["move_start"], "offload_end": times["move_end"]}
    about: dict[str, Any] = {"footprint": footprint, "capacity": capacity, "unit": "s", "barrier": barrier, "source": "measured", "info": info}
    return Timeline(schedule=schedule, start=times["start"], end=times["end"], **travel, **about)


def _places(program: Program, device: int) -> dict[str, Any]:
    """Where a device's columns stand in the columns of all."""
    steps = program.devices[device]
    own = slots_of(program, device)
    sends = [transfer.number for step in steps for transfer in step.sends]
    receives = [transfer.number for step in steps for transfer in step.receives]
    moved = [step.slot for step in steps if step.code is Code.MOVE]
    return {"start": own, "end": own, "departed": sends, "arrived": receives, "move_start": moved, "move_end": moved}


def _times(program: Program, folder: Path, device: int, facts: Mapping[str, Any]) -> dict[str, NDArray[np.int64]]:
    """A device's times on the clock of rank 0. Two measured offsets say how the clocks drift apart meanwhile."""
    table = read_times(folder, device, {name: len(place) for name, place in _places(program, device).items()})
    offsets = facts["offsets"]
    first, last = offsets[0], offsets[-1]
    if first[0] == last[0]:
        return {name: column - first[0] for name, column in table.items()}
    drift = (last[0] - first[0]) / max(1, last[2] - first[2])
    return {name: column - first[0] - np.rint((column - first[2]) * drift).astype(np.int64) for name, column in table.items()}


def _footprint(schedule: Schedule, facts: list[dict[str, Any]]) -> Footprint:
    tables = {name: np.zeros((schedule.num_stages, schedule.num_microbatches)) for name in ("kept", "freed", "rebuilt")}
    static = {category: np.zeros(schedule.num_devices) for category in ("weights", "gradients", "optimizer", "weight versions")}
    sizes = np.zeros(schedule.num_stages)
    for device, one in enumerate(facts):
        for name, table in tables.items():
            for stage, microbatch, size in one.get(name, ()):
                table[stage, microbatch] = size
        for stage, categories in one.get("static", {}).items():
            for category, size in categories.items():
                static[category][device] += size
            if schedule.weights != "flush" and schedule.has_backward:
                versions = schedule.staleness.num_versions[device, int(stage)]
                static["weight versions"][device] += (versions - 1) * categories["weights"]
        for stage, size in one.get("message_bytes", {}).items():
            sizes[int(stage)] = size
    found = messages(schedule)
    of = schedule.stage[np.where(found.gradient, found.target, found.source)]
    freed = np.minimum(tables["freed"], tables["kept"] + tables["rebuilt"])
    return Footprint(tables["kept"], freed, tables["rebuilt"], static, sizes[of])


class MeasuredCosts:
    """The durations of one iteration as a cost model, with messages that take no time."""

    unit: Any = "s"
    name = "measured"

    def __init__(self, durations: Floats, footprint: Footprint) -> None:
        self._durations, self._footprint = durations, footprint

    def durations(self, schedule: Schedule) -> Floats:
        """(slots,) as measured."""
        return self._durations

    def message_bytes(self, schedule: Schedule) -> Floats:
        """(messages,) as measured; there is no bandwidth, so they take no time."""
        return self._footprint.message

    def activation_bytes(self, schedule: Schedule) -> ActivationBytes:
        """As measured."""
        return ActivationBytes(self._footprint.kept, self._footprint.freed_by_input_grad, self._footprint.rebuilt)

    def stage_bytes(self, schedule: Schedule) -> Mapping[str, Floats]:
        """None: what a device holds all the time is measured per device, not per stage."""
        return {}

    def recompute(self, schedule: Schedule) -> Floats | None:
        """None: it is in the durations."""
        return None

    def tied_stages(self, schedule: Schedule) -> list[list[int]]:
        """None."""
        return []


def _composed(schedule: Schedule, times: dict[str, Any], footprint: Footprint, info: dict[str, str], barrier: bool) -> Timeline:
    """The Timeline of a solo replay: real durations, put together by simulating them with messages that take no time."""
    runs = []
    begin = 0.0
    for start, end in zip(times["start"], times["end"], strict=True):
        run = simulate(schedule, MeasuredCosts(end - start, footprint), barrier=barrier)
        assert run.schedule.num_slots == schedule.num_slots
        runs.append([getattr(run, name) + begin for name in _TIMES])
        begin += run.last_end
    columns: dict[str, Any] = {name: np.concatenate(parts) for name, parts in zip(_TIMES, zip(*runs, strict=True), strict=True)}
    info["composed"] = "start and end are a simulation of the measured durations; messages and copies take no time"
    about: dict[str, Any] = {"footprint": footprint, "unit": "s", "barrier": barrier, "source": "measured", "info": info}
    return Timeline(schedule=schedule, capacity=np.full(schedule.num_devices, np.inf), **columns, **about)


def _information(program: Program, settings: Settings, facts: list[dict[str, Any]], partial: str | None, steps: int) -> dict[str, str]:
    """What made the run, so that nobody takes it for something else."""
    model = settings.model
    sizes = {key: value for key, value in asdict(model).items() if value is not None and key != "kind"}
    mode = _MODES[settings.mode]
    info = {
        "mode": mode,
        "backend": "none" if settings.mode == "solo" else settings.backend,
        "device": "; ".join(dict.fromkeys(one["device_name"] for one in facts)),
        "torch": str(facts[0]["torch"]),
        "clock": str(facts[0]["clock"]),
        "model": "none" if mode == "emulated" else f"{model.kind}, " + ", ".join(f"{key} {value}" for key, value in sizes.items()),
        "messages": ("batched" if settings.batched else "single") + f", receives {settings.receives}",
        "arrivals": "when the receiver had them: no earlier than it asked for them",
        "optimizer": settings.optimizer,
        "data": str(settings.data),
        "warm_up": str(settings.warm_up),
        "iterations": str(steps),
        "host_cores": str(os.cpu_count()),
    }
    if any(abs(offset[0]) for one in facts for offset in one["offsets"]):
        info["clock_offsets_ns"] = ", ".join(str(one["offsets"][0][0]) for one in facts)
    if all("peak_memory" in one for one in facts):
        info["peak_memory"] = ", ".join(str(one["peak_memory"]) for one in facts)
    losses = losses_of(facts)
    if losses:
        info["losses"] = ", ".join(f"{sum(one.values()):.9g}" for one in losses[:steps])
    notes = list(dict.fromkeys(note for one in facts for note in one["notes"]))
    if notes:
        info["notes"] = "; ".join(notes)
    if partial is not None:
        info["partial"] = partial
    return info


def _said_costs(costs: CostModel, schedule: Schedule, footprint: Footprint) -> str:
    """All that a run takes from the costs: other sleeps or bytes make another configuration."""
    columns = [costs.durations(schedule), footprint.message, footprint.kept, footprint.freed_by_input_grad, footprint.rebuilt]
    columns += [footprint.static[category] for category in sorted(footprint.static)]
    return json.dumps([np.asarray(column).tolist() for column in columns])


def losses_of(facts: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Per iteration: "stage,microbatch" to the loss, already divided by how many share an update."""
    per_rank = [one.get("losses", []) for one in facts]
    count = min((len(losses) for losses in per_rank), default=0)
    return [{key: value for losses in per_rank for key, value in losses[number].items()} for number in range(count)]


def append(earlier: Timeline, later: Timeline) -> Timeline:
    """Puts the iterations of a repeat behind those that were measured before.

    Raises:
        ScheduleError: They are not of the same schedule and configuration.
    """
    for what in ("configuration", "mode", "device", "torch"):
        if earlier.info.get(what) != later.info.get(what):
            raise ScheduleError(
                f"repeats are appended to runs of the same schedule and configuration: {what} was {earlier.info.get(what)!r} and is {later.info.get(what)!r}; write to another file"
            )
    if earlier.schedule != later.schedule:
        raise ScheduleError("repeats are appended to runs of the same schedule; write to another file")
    shift = earlier.last_end - later.first_start
    columns: dict[str, Any] = {name: np.concatenate([getattr(earlier, name), getattr(later, name) + shift]) for name in _TIMES}
    info = {**earlier.info, **later.info}
    if "partial" in earlier.info:
        info["partial"] = earlier.info["partial"] + ("; " + later.info["partial"] if "partial" in later.info else "")
    info["iterations"] = str(len(columns["start"]))
    info["runs"] = str(int(earlier.info.get("runs", "1")) + 1)
    if "losses" in earlier.info and "losses" in later.info:
        info["losses"] = f"{earlier.info['losses']}, {later.info['losses']}"
    return replace(later, info=info, **columns)


def save(timeline: Timeline, path: str | Path) -> Timeline:
    """Saves a run; behind the iterations that the file has already. Returns what was saved."""
    if Path(path).exists():
        timeline = append(load(path), timeline)
    timeline.save(path)
    return timeline
