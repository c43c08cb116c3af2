"""Collectives of a run: which there are, who takes part, what they wait for and who waits for them.

device 0   ... 0B7 ........|-- 0REDUCE_GRAD --| 0U0    a reduction over replicas begins when every member has entered it,
device 3   .......... 0B6  |-- 0REDUCE_GRAD --| 0U0    and ends for all at once; no member's compute lane is held
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.cluster import Cluster
from pipesim.costs.model import CostModel
from pipesim.costs.uniform import UniformCosts
from pipesim.errors import LARGEST, ScheduleError, require_count
from pipesim.op import Kind
from pipesim.schedule import Schedule

__all__ = ["CollectiveTimes", "Collectives", "Node", "collective_times", "collectives"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class CollectiveTimes:
    """How long collectives take; see :class:`pipesim.costs.model.CollectiveCosts`.

    Attributes:
        reductions: (stages,)
        unshards: (stages,)
        tied: Groups of stages that share weights, and the time of each one's reduction.
        buckets: Pieces of a reduction that is not listed.
        every_microbatch: Whether such a reduction follows every backward.
    """

    reductions: Floats
    unshards: Floats
    tied: tuple[tuple[tuple[int, ...], float], ...] = ()
    buckets: int = 1
    every_microbatch: bool = False


def collective_times(costs: CostModel, schedule: Schedule, cluster: Cluster) -> CollectiveTimes | None:
    """Asks a cost model how long collectives take; None if it does not say, or none takes any time."""
    if type(costs) is UniformCosts and costs.has_no_collectives:  # known beforehand; a subclass may say something else
        return None
    who = f"the cost model {type(costs).__name__}"

    def times(name: str, count: int, of: str) -> Floats:
        ask: Any = getattr(costs, name, None)
        values = np.zeros(count) if ask is None else np.asarray(ask(schedule, cluster), dtype=np.float64)
        if values.shape != (count,) or not ((values >= 0) & (values <= LARGEST)).all():
            raise ScheduleError(f"{who} gives {name} of shape {values.shape}; right is ({count},) {of}, finite and at least 0")
        return values

    if not any(hasattr(costs, name) for name in ("reductions", "tied_reductions", "unshards")):
        return None
    reductions, unshards = times("reductions", schedule.num_stages, "for the stages"), times("unshards", schedule.num_stages, "for the stages")
    groups = [tuple(group) for group in costs.tied_stages(schedule)] if hasattr(costs, "tied_reductions") else []
    tied = times("tied_reductions", len(groups), "for the groups of tied stages")
    if not (reductions.any() or unshards.any() or tied.any()):
        return None
    shared = tuple((group, float(time)) for group, time in zip(groups, tied, strict=True) if time)
    buckets = require_count("buckets", getattr(costs, "buckets", 1))
    return CollectiveTimes(reductions, unshards, shared, buckets, bool(getattr(costs, "reduce_every_microbatch", False)))


class Node(NamedTuple):
    """One collective.

    Attributes:
        kind: REDUCE_GRAD or UNSHARD.
        stage: Whose weights; of tied ones the first stage.
        number: The update, or the microbatch where there is a reduction for each; -1 for none.
        time: How long it takes.
        members: The devices that take part.
        rows: Per member the row that lists it, -1 where it is implied.
        tied: The stages that share the weights, or none.
    """

    kind: Kind
    stage: int
    number: int
    time: float
    members: tuple[int, ...]
    rows: tuple[int, ...]
    tied: tuple[int, ...] = ()

    @property
    def listed(self) -> bool:
        """Whether the streams list it."""
        return self.rows[0] >= 0

    def __str__(self) -> str:
        if self.tied:
            return f"the reduction of the weights that stages {', '.join(map(str, self.tied))} share"
        return f"{self.stage}{self.kind.name}{self.number if self.number > 0 else ''}"


@dataclass
class Collectives:
    """The collectives of one step.

    Attributes:
        nodes: What there is.
        needs: Per node, member to what must happen on it before it has entered: 1, or of tied weights one for each gradient.
        during: Slot to (part of the slot, node) that is entered when that part of it has passed.
        after: Slot to nodes that are entered when it ends.
        following: Node to (tied node, device) that comes closer when it ends.
        listed: (row, node, device) of what is entered when the lane reaches a row.
        before: Slot to the nodes that it waits for.
        own: Device to (last slot that enters it, node) of the reductions that end its step.
    """

    nodes: list[Node] = field(default_factory=list)
    needs: list[dict[int, int]] = field(default_factory=list)
    during: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    after: dict[int, list[int]] = field(default_factory=dict)
    following: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    listed: list[tuple[int, int, int]] = field(default_factory=list)
    before: dict[int, list[int]] = field(default_factory=dict)
    own: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, node: Node) -> int:
        """Takes a node, which each member enters at once, and returns its number."""
        self.nodes.append(node)
        self.needs.append(dict.fromkeys(node.members, 1))
        return len(self.nodes) - 1

    def wait(self, slots: Sequence[int], node: int) -> None:
        """Lets slots wait for a node."""
        for slot in slots:
            self.before.setdefault(slot, []).append(node)


def collectives(schedule: Schedule, times: CollectiveTimes | None) -> Collectives:
    """Returns the collectives of a schedule: those that it lists, and those that follow from how long they take.

    A listed reduction that takes no time is there where it has several members, who meet.

    Raises:
        ScheduleError: A stage's reduction is listed on some of its devices and not on others, or after the update.
    """
    found = Collectives()
    if times is None and not schedule.has(Kind.REDUCE_GRAD):
        return found
    if times is None:
        times = CollectiveTimes(np.zeros(schedule.num_stages), np.zeros(schedule.num_stages))
    gradients = _Gradients(schedule)
    listed = set(schedule.stage[schedule.kind == int(Kind.REDUCE_GRAD)].tolist())
    of_stage: dict[tuple[int, int], list[int]] = {}  # (stage, update) -> nodes
    for stage in range(schedule.num_stages):
        if stage in listed:
            _add_listed(found, schedule, stage, float(times.reductions[stage]), gradients, of_stage)
        elif times.reductions[stage] > 0:
            _add_implied(found, stage, times, gradients, of_stage)
    for group, time in times.tied:
        _add_tied(found, group, time, gradients, of_stage)
    if times.unshards.any() and schedule.has(Kind.UNSHARD):
        _add_unshards(found, schedule, times.unshards)
    return found


class _Gradients:
    """Where the gradients and the updates of every stage stand."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.updated = schedule.has(Kind.U)
        self.slots: dict[tuple[int, int], NDArray[np.int64]] = {}  # (stage, device) -> slots of its last gradients, in order
        self.updates: dict[tuple[int, int], dict[int, int]] = {}  # (stage, device) -> number of the update to its slot
        weights = np.flatnonzero((schedule.kind == int(Kind.B)) | (schedule.kind == int(Kind.W)))
        for (stage, device), rows in _by_place(schedule, weights).items():
            self.slots[stage, device] = schedule.row_slot[rows]
        self.waiting: dict[tuple[int, int], list[int]] = {}  # (stage, update) -> its slots on all devices
        self.numbers: dict[int, list[int]] = {} if self.updated else {stage: [0] for stage in range(schedule.num_stages)}
        for (stage, device), rows in _by_place(schedule, np.flatnonzero(schedule.kind == int(Kind.U))).items():
            updates = self.updates[stage, device] = dict(zip(schedule.microbatch[rows].tolist(), schedule.row_slot[rows].tolist(), strict=True))
            self.numbers.setdefault(stage, sorted(updates))
            for number, slot in updates.items():
                self.waiting.setdefault((stage, number), []).append(slot)

    def devices(self, stage: int) -> list[int]:
        """Those that have gradients of a stage."""
        return [device for device in self.schedule.placement.get(stage, ()) if (stage, device) in self.slots]

    def of_update(self, stage: int, device: int, number: int) -> list[int]:
        """Slots of the gradients that an update on a device takes; all where none is listed.

        A replica without a gradient of its own gives what it had before, if any.
        """
        slots = self.slots[stage, device]
        if self.updated:
            updates = self.updates.get((stage, device), {})
            begin, end = np.searchsorted(slots, [updates.get(number - 1, -1), updates.get(number, -1)])
            slots = slots[min(begin, max(end - 1, 0)) : end]
        return [int(slot) for slot in slots]


def _by_place(schedule: Schedule, rows: NDArray[np.int64]) -> dict[tuple[int, int], NDArray[np.int64]]:
    """(stage, device) to its rows, in order."""
    if not len(rows):
        return {}
    order = np.lexsort((rows, schedule.device[rows], schedule.stage[rows]))
    rows = rows[order]
    changes = np.flatnonzero((np.diff(schedule.stage[rows]) != 0) | (np.diff(schedule.device[rows]) != 0)) + 1
    return {(int(schedule.stage[part[0]]), int(schedule.device[part[0]])): part for part in np.split(rows, changes)}


OfStage = dict[tuple[int, int], list[int]]


def _add_implied(found: Collectives, stage: int, times: CollectiveTimes, gradients: _Gradients, of_stage: OfStage) -> None:
    """A reduction per update, after the last backward of each device; or one after every backward."""
    schedule, devices = gradients.schedule, gradients.devices(stage)
    for number in gradients.numbers.get(stage, ()):
        slots = {device: gradients.of_update(stage, device, number) for device in devices}
        rounds = max((len(own) for own in slots.values()), default=0) if times.every_microbatch else 1
        for k in range(rounds):
            at = {device: own[k] if times.every_microbatch else own[-1] for device, own in slots.items() if len(own) > k}
            if not at:
                continue
            shown = int(schedule.microbatch[schedule.slot_row[min(at.values())]]) if times.every_microbatch else number
            members = tuple(at)
            for bucket in range(times.buckets):
                time = float(times.reductions[stage]) / times.buckets
                node = found.add(Node(Kind.REDUCE_GRAD, stage, shown, time, members, (-1,) * len(members)))
                of_stage.setdefault((stage, number), []).append(node)
                found.wait(gradients.waiting.get((stage, number), ()), node)
                for device, slot in at.items():
                    found.own.setdefault(device, []).append((slot, node))
                    if bucket + 1 < times.buckets:
                        found.during.setdefault(slot, []).append(((bucket + 1) / times.buckets, node))
                    else:
                        found.after.setdefault(slot, []).append(node)


def _add_listed(found: Collectives, schedule: Schedule, stage: int, time: float, gradients: _Gradients, of_stage: OfStage) -> None:
    """The reductions of a stage as its devices list them."""
    rows = np.flatnonzero((schedule.kind == int(Kind.REDUCE_GRAD)) & (schedule.stage == stage))
    listing: dict[int, dict[int, int]] = {}  # update -> device -> row
    for row in rows.tolist():
        listing.setdefault(max(0, int(schedule.microbatch[row])), {})[int(schedule.device[row])] = row
    for number, at in sorted(listing.items()):
        missing = sorted(set(gradients.devices(stage)) - at.keys())
        if missing:
            first = next(iter(at.values()))
            raise ScheduleError(
                f"{schedule.op(first)} is listed on device {', '.join(map(str, sorted(at)))} and not on device {', '.join(map(str, missing))}, which has "
                f"gradients of stage {stage}, too; the others would wait for it for ever, so every replica lists it ({schedule.where(first)})"
            )
        if not time and len(at) == 1:
            continue
        members = tuple(sorted(at))
        node = found.add(Node(Kind.REDUCE_GRAD, stage, number, time, members, tuple(at[device] for device in members)))
        of_stage.setdefault((stage, number), []).append(node)
        found.wait(gradients.waiting.get((stage, number), ()), node)
        for device, row in at.items():
            slot = int(schedule.row_slot[row])
            found.listed.append((row, node, device))
            found.own.setdefault(device, []).append((slot, node))
            update = gradients.updates.get((stage, device), {}).get(number)
            if update is not None and update <= slot:
                raise ScheduleError(f"{schedule.where(row)}: stands after {schedule.slot(update)}, the update that waits for it")


def _add_tied(found: Collectives, group: Sequence[int], time: float, gradients: _Gradients, of_stage: OfStage) -> None:
    """The reduction of weights that stages share: entered when a device's gradients of them are there, each reduced."""
    places = [(stage, device) for stage in group for device in gradients.devices(stage)]
    members = tuple(sorted({device for _, device in places}))
    for number in sorted(set.intersection(*(set(gradients.numbers.get(stage, ())) for stage in group))) if members else ():
        node = found.add(Node(Kind.REDUCE_GRAD, group[0], number, time, members, (-1,) * len(members), tuple(group)))
        needs = dict.fromkeys(members, 0)
        for stage, device in places:
            slots = gradients.of_update(stage, device, number)
            reduced = [other for other in of_stage.get((stage, number), ()) if device in found.nodes[other].members]
            for other in reduced:
                found.following.setdefault(other, []).append((node, device))
            if slots and not reduced:
                found.after.setdefault(slots[-1], []).append(node)
            needs[device] += len(reduced) or bool(slots)
            found.own.setdefault(device, []).append((max(slots, default=-1), node))
        taking_part = tuple(device for device in members if needs[device])
        found.nodes[node] = found.nodes[node]._replace(members=taking_part, rows=(-1,) * len(taking_part))
        found.needs[node] = {device: needs[device] for device in taking_part}
        for stage in group:
            found.wait(gradients.waiting.get((stage, number), ()), node)


def _add_unshards(found: Collectives, schedule: Schedule, times: Floats) -> None:
    """An UNSHARD is of one device and its data-parallel peers; the first slot of its stage after it waits for it."""
    computing = np.flatnonzero(schedule.kind < int(Kind.U))
    places = _by_place(schedule, computing)
    for row in np.flatnonzero(schedule.kind == int(Kind.UNSHARD)).tolist():
        stage, device = int(schedule.stage[row]), int(schedule.device[row])
        if not times[stage]:
            continue
        node = found.add(Node(Kind.UNSHARD, stage, -1, float(times[stage]), (device,), (row,)))
        found.listed.append((row, node, device))
        rows = places.get((stage, device), np.zeros(0, np.int64))
        found.wait(schedule.row_slot[rows[np.searchsorted(rows, row) :][:1]].tolist(), node)


def waited_for(found: Collectives, gates: Mapping[int, int]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Per device, the reductions that it waits for before its barrier, where that is before a slot, and at the end of a step."""
    at_gate = {device: [node for slot, node in own if slot < gates[device]] for device, own in found.own.items() if device in gates}
    return at_gate, {device: [node for _, node in own] for device, own in found.own.items()}
