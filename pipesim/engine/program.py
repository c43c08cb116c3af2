"""What an engine runs: a schedule with its numbers, as columns, the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipesim.cluster import Cluster
from pipesim.dataflow import Messages, first_updates, messages
from pipesim.op import Kind
from pipesim.schedule import Schedule

__all__ = ["Program", "Times"]

Floats = NDArray[np.float64]

# start, end: (steps, slots); sent, departed, arrived: (steps, messages)
Times = tuple[Floats, Floats, Floats, Floats, Floats]


@dataclass(frozen=True, eq=False)
class Program:
    """One run to be made.

    Attributes:
        schedule: Checked, with the updates that take time listed.
        durations: (slots,) on the device at hand.
        message_bytes: (messages,)
        cluster: Where the links are.
        steps: How often.
        wants_barrier: Whether devices wait for each other before updates, and between steps.
    """

    schedule: Schedule
    durations: Floats
    message_bytes: Floats
    cluster: Cluster
    steps: int
    wants_barrier: bool

    @property
    def barrier(self) -> bool:
        """Whether there is a barrier: only synchronous schedules have one."""
        return self.wants_barrier and self.schedule.weights == "flush"

    @cached_property
    def messages(self) -> Messages:
        """The messages, in the order in which their producers stand."""
        return messages(self.schedule)

    @cached_property
    def latency(self) -> Floats:
        """(messages,) latency of each message's link."""
        return self._link_values[0]

    @cached_property
    def transfer(self) -> Floats:
        """(messages,) time for which each message holds its link; 0 where only latency counts."""
        return self._link_values[1]

    @cached_property
    def queued(self) -> NDArray[np.bool_]:
        """(messages,) whether the message's link has a bandwidth, and so a queue."""
        return self._link_values[2]

    @cached_property
    def link(self) -> NDArray[np.int64]:
        """(messages,) number of the link: one per ordered pair of devices that is used."""
        found = self.messages
        pair = found.source_device.astype(np.int64) * self.schedule.num_devices + found.target_device
        return np.asarray(np.unique(pair, return_inverse=True)[1].reshape(-1))

    @cached_property
    def _link_values(self) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        found = self.messages
        first = np.unique(self.link, return_index=True)[1]
        links = [self.cluster.link(int(found.source_device[i]), int(found.target_device[i])) for i in first]
        latency = np.array([link.latency for link in links])
        bandwidth = np.array([np.inf if link.bandwidth is None else link.bandwidth for link in links])
        if not links:
            return np.zeros(0), np.zeros(0), np.zeros(0, bool)
        return latency[self.link], self.message_bytes / bandwidth[self.link], np.isfinite(bandwidth[self.link])

    @cached_property
    def used_devices(self) -> NDArray[np.int64]:
        """Devices that have any slot."""
        return np.flatnonzero(np.diff(self.schedule.device_slots))

    @cached_property
    def barrier_slots(self) -> NDArray[np.int64]:
        """(devices,) the slot before which a device waits for all others: its first update; -1 where it waits at the end."""
        return first_updates(self.schedule) if self.barrier else np.full(self.schedule.num_devices, -1)

    @cached_property
    def reductions(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Gradient reductions over replicas: (slots of the last gradients, slots of the updates that wait for them).

        One per stage with replicas and update. It takes no time of its own here, but an update of one replica waits for
        the gradients of all.
        """
        schedule = self.schedule
        updates = np.flatnonzero(schedule.kind[schedule.slot_row] == int(Kind.U))
        if not len(updates) or not schedule.replicas:
            return []
        result: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        kind, stage = schedule.kind, schedule.stage
        gradient_rows = (kind == int(Kind.B)) | (kind == int(Kind.W))
        for replicated, devices in schedule.replicas.items():
            own = updates[stage[schedule.slot_row[updates]] == replicated]
            rows = np.flatnonzero(gradient_rows & (stage == replicated))
            last: dict[int, list[int]] = {}
            waiting: dict[int, list[int]] = {}
            for device in devices:
                mine = schedule.row_slot[rows[schedule.device[rows] == device]]
                for slot in own[schedule.slot_device[own] == device]:
                    number = int(schedule.microbatch[schedule.slot_row[slot]])
                    waiting.setdefault(number, []).append(int(slot))
                    before = mine[: np.searchsorted(mine, slot)]
                    if len(before):  # a replica without a gradient so far adds nothing to wait for
                        last.setdefault(number, []).append(int(before[-1]))
            result.extend((tuple(last.get(number, ())), tuple(slots)) for number, slots in waiting.items())
        return result
