"""The critical paths of many runs at once: on which devices the time of each makespan passes.

A path is followed from the op that ends last back to the start: each op began when the op before it on its device ended, or
when a transfer arrived, or when a barrier or a reduction was over. Times are compared for equality, since each start is the
largest of just these numbers. All draws take a step back together, so that a step costs some array operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.cluster import Cluster
from pipesim.costs import CostModel
from pipesim.engine import Engine, choose, run
from pipesim.engine.batch import simulate_many
from pipesim.engine.collecting import collective_times
from pipesim.engine.program import Program
from pipesim.memory import Footprint, moves
from pipesim.schedule import Schedule

__all__ = ["CriticalPaths"]

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CriticalPaths:
    """A schedule that is to be run many times.

    Attributes:
        schedule: Checked, with the updates that take time listed.
        costs: Bytes; links and durations are not asked for.
        cluster: Speeds and links.
        barrier: As for :func:`pipesim.simulate`.
        engine: As for :func:`pipesim.simulate`.
    """

    schedule: Schedule
    costs: CostModel
    cluster: Cluster
    barrier: bool = True
    engine: Engine = "auto"

    def run(self, durations: Floats) -> tuple[Floats, Floats]:
        """Runs under (n, slots) durations on devices of speed 1.

        Returns:
            (n,) makespans, and (n, devices) the time that the critical path of each run spends on each device.

        Raises:
            DeadlockError: The schedule cannot finish.
        """
        if self._program.beyond_plain is not None:
            return self._listed(durations)
        if self._shared:
            start, end, departed, arrived = self._one_by_one(durations)
        else:
            costs: Any = _WithoutLinks(self.costs)  # the cluster has them
            found = simulate_many(
                self.schedule, costs, durations=durations, cluster=self.cluster, barrier=self.barrier, keep_times=True, engine=self.engine
            )
            assert found.start is not None
            assert found.end is not None
            start, end = found.start, found.end
            departed = self._departures(end)
            arrived = (departed + self._program.transfer) + self._program.latency
        return end.max(axis=1) - start.min(axis=1), self._times(start, end, departed, arrived)

    @cached_property
    def used_links(self) -> list[tuple[int, int]]:
        """(from, to) of every link between devices that carries something."""
        program, moved = self._program, moves(self.schedule)
        here, there = moved.device[moved.partner >= 0], moved.partner[moved.partner >= 0]
        out = moved.out[moved.partner >= 0]
        source = np.concatenate([program.messages.source_device, np.where(out, here, there)])
        target = np.concatenate([program.messages.target_device, np.where(out, there, here)])
        return [(int(a), int(b)) for a, b in np.unique(np.stack([source, target], axis=1), axis=0)]

    @cached_property
    def _program(self) -> Program:
        schedule = self.schedule
        footprint, moved = Footprint.of(schedule, self.costs), moves(schedule)
        sizes = footprint.kept[moved.stage, moved.microbatch]
        collectives = collective_times(self.costs, schedule, self.cluster)
        return Program(schedule, np.zeros(schedule.num_slots), footprint.message, self.cluster, 1, self.barrier, sizes, collectives)

    def _one_by_one(self, durations: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """Where transfers of several devices share links, who goes first depends on time."""
        program = self._program
        engine = choose(program, self.engine, len(durations))
        speeds = self.cluster.speeds(self.schedule.num_devices)[self.schedule.slot_device]
        times = [run(program.with_durations(row / speeds), engine) for row in durations]
        start, end, _, departed, arrived = (np.concatenate(column) for column in zip(*times, strict=True))
        return start, end, departed, arrived

    def _listed(self, durations: Floats) -> tuple[Floats, Floats]:
        """Where communication has ops of its own; a path passes through what it waited for in them to the slot that ended before."""
        from pipesim.engine.listed import run_listed

        program = self._program
        choose(program, self.engine, len(durations))
        speeds = self.cluster.speeds(self.schedule.num_devices)[self.schedule.slot_device]
        runs = [run_listed(program.with_durations(row / speeds)) for row in durations]
        start, end, _, departed, arrived = (np.concatenate(column) for column in zip(*(one.times for one in runs), strict=True))
        own = program.plan.traffic.collective
        first = np.array([one.traffic_start[0, own].min(initial=np.inf) for one in runs])
        last = np.array([one.traffic_end[0, own].max(initial=-np.inf) for one in runs])
        makespan = np.maximum(end.max(axis=1), last) - np.minimum(start.min(axis=1), first)
        return makespan, self._times(start, end, departed, arrived)

    @property
    def _shared(self) -> bool:
        """Whether waiting for a link is the link's: one takes transfers of several devices, or communication has an order of its own."""
        return bool(len(self._program.moves)) or self.cluster.network is not None or self._program.beyond_plain is not None

    @cached_property
    def _before_on_link(self) -> Rows:
        """(transfers,) the message before it on its link, -1 for the first; a link has one sender, so they go in its order."""
        link = self._program.link
        order = np.argsort(link, kind="stable")
        before = np.full(len(link), -1)
        same = link[order[1:]] == link[order[:-1]]
        before[order[1:][same]] = order[:-1][same]
        return before

    def _departures(self, end: Floats) -> Floats:
        """(n, messages) when links took them: when they were sent, or when the message before had left the link."""
        program, before = self._program, self._before_on_link
        departed = end[:, program.source_slot]
        if not program.queued.any():
            return departed
        left = np.flatnonzero(program.queued & (before >= 0))
        # the second messages of all links together, then the third ones, ...
        place = _places(program.link)[left]
        for number in range(1, int(place.max(initial=0)) + 1):
            now = left[place == number]
            earlier = before[now]
            departed[:, now] = np.maximum(departed[:, now], departed[:, earlier] + program.transfer[earlier])
        return departed

    @cached_property
    def _incoming(self) -> Rows:
        """(slots, most) the transfers that each slot waits for, -1 for none."""
        target = self._program.target_slot
        waited_for = np.flatnonzero(target >= 0)
        place = _places(target)[waited_for]
        table = np.full((self.schedule.num_slots, int(place.max(initial=0)) + 1), -1)
        table[target[waited_for], place] = waited_for
        return table

    def _times(self, start: Floats, end: Floats, departed: Floats, arrived: Floats) -> Floats:
        """(n, devices) time of each critical path on each device."""
        program, device = self._program, self.schedule.slot_device
        first = np.zeros(self.schedule.num_slots, bool)
        first[self.schedule.device_slots[:-1][program.used_devices]] = True
        source, before = program.source_slot, self._before_on_link
        result = np.zeros((len(start), self.schedule.num_devices))
        origin = start.min(axis=1)
        draw, slot = np.arange(len(start)), end.argmax(axis=1)
        while len(draw):
            begun = start[draw, slot]
            result[draw, device[slot]] += end[draw, slot] - begun
            on_device = ~first[slot] & (end[draw, slot - 1] == begun)
            incoming = self._incoming[slot]
            came = (incoming >= 0) & (arrived[draw[:, None], incoming] == begun[:, None]) if arrived.size else incoming >= 0
            by_transfer = ~on_device & came.any(axis=1)
            back = slot - 1
            if by_transfer.any():
                own = draw[by_transfer]
                transfer = incoming[by_transfer, came[by_transfer].argmax(axis=1)]
                if not self._shared:  # else waiting for a link counts as the link's
                    while (waited := departed[own, transfer] > end[own, source[transfer]]).any():
                        transfer = np.where(waited, before[transfer], transfer)
                back[by_transfer] = source[transfer]
            unexplained = ~on_device & ~by_transfer
            back[unexplained] = -1
            for number in np.flatnonzero(unexplained & (begun > origin[draw])):
                back[number] = _ended_at(begun[number], start[draw[number]], end[draw[number]], program.beyond_plain is None)
            draw, slot = draw[back >= 0], back[back >= 0]
        return result


def _ended_at(time: float, start: Floats, end: Floats, exactly: bool) -> int:
    """The slot whose end let a barrier or a reduction go, where that takes no time; else the one that ended last before. -1 if there is none."""
    found = np.flatnonzero(((end == time) if exactly else (end <= time)) & (start < time))
    return int(found[np.argmax(end[found])]) if len(found) else -1


def _places(group: Rows) -> Rows:
    """Of every entry, how many before it are of the same group."""
    order = np.argsort(group, kind="stable")
    sorted_group = group[order]
    place = np.empty(len(group), np.int64)
    place[order] = np.arange(len(group)) - np.searchsorted(sorted_group, sorted_group)
    return place


class _WithoutLinks:
    """A cost model whose links have become the cluster's."""

    latency = bandwidth = None

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle looks for some before there are costs
            raise AttributeError(name)
        return getattr(self._costs, name)
