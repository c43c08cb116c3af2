"""What measured runs say: durations of ops, gaps between them, times of messages.

Only what surely is what it is taken for counts. A gap between two ops of a device is host time if the second needs no message, or one that
was sent long before; a message's time is known if its receiver was already waiting when it was sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.calibration.fitting import warm_up
from pipesim.calibration.schedules import MESSAGES
from pipesim.costs.calibrated import first_updates, posted
from pipesim.errors import ScheduleError
from pipesim.metrics import iteration_times
from pipesim.op import Kind
from pipesim.schedule import Schedule
from pipesim.timeline import Timeline

__all__ = ["Gap", "Hop", "Samples", "collect"]

Floats = NDArray[np.float64]
Pair = tuple[int, int]


class Gap(NamedTuple):
    """What is posted between two ops of a device.

    Attributes:
        sends: Messages sent.
        receives: Receives posted.
    """

    sends: int
    receives: int


class Hop(NamedTuple):
    """A message that was waited for.

    Attributes:
        size: Bytes.
        time: Seconds from the end of the op that made it to the start of the one that waited for it.
        sends: Messages that are sent after the first of the two.
        receives: Receives that are posted after it.
    """

    size: float
    time: float
    sends: float
    receives: float


@dataclass
class Samples:
    """Samples of several runs, each a list with one array per iteration.

    Attributes:
        durations: (stages, stage, kind) to seconds of ops.
        gaps: To seconds between two ops when nothing was waited for.
        hops: (from, to) to columns of :class:`Hop`, a row per message.
        messages: (from, to) to (bytes, seconds) of the message probe: two arrays per iteration.
        barriers: Seconds from the last backward of all to a device's first update.
        overlaps: Per stage and kind of a run: durations and time beside messages, as parts of the usual duration, both minus their mean,
            and the latter as it is.
        tables: Number of stages to the bytes that its runs measured; see :mod:`pipesim.calibration.calibrated`.
        notes: What was left out, and why.
    """

    durations: dict[tuple[int, int, str], list[Floats]] = field(default_factory=lambda: defaultdict(list))
    gaps: dict[Gap, list[Floats]] = field(default_factory=lambda: defaultdict(list))
    hops: dict[Pair, list[Floats]] = field(default_factory=lambda: defaultdict(list))
    messages: dict[Pair, list[tuple[Floats, Floats]]] = field(default_factory=lambda: defaultdict(list))
    barriers: list[Floats] = field(default_factory=list)
    overlaps: list[tuple[Floats, Floats, Floats]] = field(default_factory=list)
    tables: dict[int, dict[str, list[Floats]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    notes: list[str] = field(default_factory=list)


def collect(runs: Sequence[Timeline]) -> Samples:
    """Takes samples of measured runs.

    Raises:
        ScheduleError: A run was not measured in seconds, or a solo run, whose waits are none, is all there is to take messages from.
    """
    found = Samples()
    for run in runs:
        if run.source != "measured" or run.unit != "s":
            raise ScheduleError(f"a calibration wants measured runs in seconds; {run.schedule.name} is {run.source}, in {run.unit}")
        kept = _kept(run, found)
        if run.schedule.name == MESSAGES:
            _message_times(run, kept, found)
            continue
        _durations(run, kept, found)
        if run.info.get("mode") != "solo":
            _between(run, kept, found)
        _bytes(run, found)
    return found


def _kept(run: Timeline, found: Samples) -> NDArray[np.int64]:
    """The iterations after warm-up."""
    drop = warm_up(iteration_times(run))
    name = run.schedule.name
    if drop:
        found.notes.append(f"{name}: the first {drop} of {run.steps} iterations left out as warm-up")
    if run.steps - drop < 3:
        found.notes.append(f"{name}: only {run.steps - drop} iterations, too few to tell what is typical")
    if "partial" in run.info:
        found.notes.append(f"{name}: the run ended early ({run.info['partial']})")
    return np.arange(drop, run.steps)


def _message_times(run: Timeline, kept: NDArray[np.int64], found: Samples) -> None:
    """One message at a time, so its receiver always waits. The first microbatch woke the links up."""
    messages = run.messages
    microbatch = run.schedule.microbatch[messages.source]
    pairs = sorted(set(zip(messages.source_device.tolist(), messages.target_device.tolist(), strict=True)))
    for pair in pairs:
        own = (messages.source_device == pair[0]) & (messages.target_device == pair[1]) & (microbatch > 0)
        for step in kept.tolist():
            found.messages[pair].append((run.footprint.message[own], run.arrived[step, own] - run.departed[step, own]))


def _durations(run: Timeline, kept: NDArray[np.int64], found: Samples) -> None:
    schedule = run.schedule
    stage, kind = schedule.stage[schedule.slot_row], schedule.kind[schedule.slot_row]
    single = schedule.slot_second_row < 0
    taken = run.end - run.start
    for number in range(schedule.num_stages):
        for one in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.U):
            own = single & (stage == number) & (kind == int(one))
            if own.any():
                found.durations[schedule.num_stages, number, one.name] += [taken[step, own] for step in kept.tolist()]


def _between(run: Timeline, kept: NDArray[np.int64], found: Samples) -> None:
    """Gaps, barriers, messages that were waited for, and what goes on beside them."""
    schedule, messages = run.schedule, run.messages
    if schedule.replicas or len(run.moves):
        found.notes.append(f"{schedule.name}: sums of gradients and offloads stand between its ops, so no gaps and messages are taken from it")
        return
    sends, receives = posted(schedule)
    update = schedule.kind[schedule.slot_row] == int(Kind.U)
    works, barred = np.flatnonzero(~update), set(first_updates(schedule).tolist() if run.barrier else ())
    into: dict[int, list[int]] = defaultdict(list)
    for message, slot in enumerate(messages.target_slot.tolist()):
        into[slot].append(message)
    follows = sorted(set(range(schedule.num_slots)) - set(schedule.device_slots.tolist()) - barred)
    maker, source, target = messages.source_slot.tolist(), messages.source_device.tolist(), messages.target_device.tolist()
    slowest = 0.0
    for step in kept.tolist():
        start, end = run.start[step], run.end[step]
        hops: dict[Pair, list[Hop]] = defaultdict(list)
        for slot in follows:
            waits = into.get(slot, [])
            if len(waits) == 1 and end[slot - 1] < end[made := maker[one := waits[0]]]:
                hop = Hop(float(run.footprint.message[one]), float(start[slot] - end[made]), float(sends[made]), float(receives[made]))
                hops[source[one], target[one]].append(hop)
                slowest = max(slowest, hop.time)
        for pair, of in hops.items():
            found.hops[pair].append(np.array(of))
        if barred:
            last = float(end[works].max())
            found.barriers.append(np.array([float(start[slot]) - last for slot in sorted(barred)]))
    for step in kept.tolist():
        start, end = run.start[step], run.end[step]
        gaps: dict[Gap, list[float]] = defaultdict(list)
        for slot in follows:
            # a message that was sent long before was there, so it was not waited for
            if all(slowest and end[slot - 1] > end[maker[one]] + 2 * slowest for one in into.get(slot, [])):
                gaps[Gap(int(sends[slot - 1]), int(receives[slot - 1]))].append(float(start[slot] - end[slot - 1]))
        for between, values in gaps.items():
            found.gaps[between].append(np.array(values))
    _overlaps(run, kept, found)


def _overlaps(run: Timeline, kept: NDArray[np.int64], found: Samples) -> None:
    """How much of each op had a message of its device under way, beside how long it took, both as parts of what its kind takes there."""
    if not found.hops or run.info.get("mode") == "emulated":
        return
    schedule, messages = run.schedule, run.messages
    usual = float(np.median(np.concatenate([hop[:, 1] for steps in found.hops.values() for hop in steps])))
    taken = run.end[kept] - run.start[kept]
    beside = np.zeros_like(taken)
    for device in range(schedule.num_devices):
        slots = slice(int(schedule.device_slots[device]), int(schedule.device_slots[device + 1]))
        own = (messages.source_device == device) | (messages.target_device == device)
        for number, step in enumerate(kept.tolist()):
            left = run.departed[step, own]
            right = np.minimum(run.arrived[step, own], left + usual)  # a message that nobody waited for came before it was asked for
            start, end = run.start[step, slots, None], run.end[step, slots, None]
            beside[number, slots] = np.clip(np.minimum(end, right) - np.maximum(start, left), 0.0, None).sum(axis=1)
    group = schedule.stage[schedule.slot_row].astype(np.int64) * len(Kind) + schedule.kind[schedule.slot_row]
    works = (schedule.kind[schedule.slot_row] != int(Kind.U)) & (schedule.slot_second_row < 0)
    for one in np.unique(group[works]):
        relative, part = (
            table[:, group == one].ravel() / max(float(np.median(taken[:, group == one])), 1e-12) for table in (taken, np.minimum(beside, taken))
        )
        plain = relative <= np.percentile(relative, 95)  # without what a stranger interrupted
        relative, part = relative[plain], part[plain]
        found.overlaps.append((relative - relative.mean(), part - part.mean(), part))


def _bytes(run: Timeline, found: Samples) -> None:
    """Bytes of activations, messages and what a device holds all the time, of which each of its stages is given an equal part."""
    schedule: Schedule = run.schedule
    table, footprint = found.tables[schedule.num_stages], run.footprint
    table["activation"].append(np.median(footprint.kept, axis=1))
    split = schedule.rows_of(Kind.I) >= 0
    if split.any():
        table["activation_freed_by_input_grad"].append(
            np.array([np.median(row[own]) if own.any() else 0.0 for row, own in zip(footprint.freed_by_input_grad, split, strict=True)])
        )
    messages = run.messages
    size = np.zeros(schedule.num_stages)
    size[schedule.stage[np.where(messages.gradient, messages.target, messages.source)]] = footprint.message
    table["message"].append(size)
    homes = [owners[0] for _, owners in sorted(schedule.placement.items())]
    share = np.array([len(schedule.device_stages[device]) for device in homes])
    for category, name in (("weights", "weights"), ("gradients", "gradients"), ("optimizer", "optimizer_state")):
        table[name].append(footprint.static.get(category, np.zeros(schedule.num_devices))[homes] / share)
