"""Costs that a calibration measured: durations per stage and kind, and the host's time around every op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.cluster import Unit
from pipesim.costs.model import ActivationBytes, slot_durations
from pipesim.dataflow import first_updates as updates_per_device
from pipesim.dataflow import messages
from pipesim.errors import ScheduleError
from pipesim.lowering import is_explicit, lower
from pipesim.op import Kind
from pipesim.remember import remembered
from pipesim.schedule import Schedule

__all__ = ["CalibratedCosts", "HostTimes", "StageTable", "first_updates", "posted", "read_calibrated"]

Floats = NDArray[np.float64]

TIMES = {"forward": Kind.F, "backward": Kind.B, "input_grad": Kind.I, "weight_grad": Kind.W, "optimizer": Kind.U}
SIZES = ("message", "activation", "activation_freed_by_input_grad", "weights", "gradients", "optimizer_state")
_SPLIT = "the calibration runs had no split backward, so it says nothing about zero-bubble schedules"


@dataclass(frozen=True)
class HostTimes:
    """Seconds that a device's host takes beside the ops, in which its compute lane does nothing else.

    Attributes:
        op: From the end of an op to the start of the next, when nothing is waited for.
        send: More of it for every message that is sent in between.
        receive: More of it for every message whose receive is posted in between.
        barrier: From the last device's last backward to the first update.
    """

    op: float = 0.0
    send: float = 0.0
    receive: float = 0.0
    barrier: float = 0.0


@dataclass(frozen=True)
class StageTable:
    """What the stages of a model cut into so many stages take.

    Attributes:
        times: Names of :data:`TIMES` to a second per stage; a kind that no run had is left out.
        bytes: Names of :data:`SIZES` to bytes per stage.
    """

    times: Mapping[str, tuple[float, ...]]
    bytes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.times["forward"])

    def merged(self, stages: int) -> StageTable:
        """The table of a model cut into fewer stages, each made of neighbours of these.

        Times and bytes add up; a message is that of the last of the neighbours.

        Examples:
            >>> StageTable({"forward": (1.0, 2.0, 3.0, 4.0)}).merged(2).times["forward"]
            (3.0, 7.0)
        """
        share = self.stages // stages

        def summed(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(sum(values[k : k + share]) for k in range(0, len(values), share))

        sizes = {name: values[share - 1 :: share] if name == "message" else summed(values) for name, values in self.bytes.items()}
        return StageTable({name: summed(values) for name, values in self.times.items()}, sizes)


@dataclass(frozen=True)
class CalibratedCosts:
    """A cost model made of measured stages.

    A slot takes what its op took, and the host time that follows it: the device does nothing else meanwhile. The time of a message is
    the cluster's.

    Attributes:
        tables: Number of stages to what they take. A schedule with another number takes a finer table, neighbours merged.
        host: Host time around ops.
        name: For summaries.

    Examples:
        >>> from pipesim import generate
        >>> costs = CalibratedCosts({2: StageTable({"forward": (1.0, 2.0), "backward": (2.0, 4.0), "optimizer": (0.5, 0.5)})}, HostTimes(op=0.25))
        >>> costs.durations(generate("1f1b", 2, 1).with_updates()).tolist()
        [1.25, 2.25, 0.5, 2.25, 4.25, 0.5]
    """

    tables: Mapping[int, StageTable]
    host: HostTimes = HostTimes()
    name: str = "calibration"
    unit: Unit = "s"

    def table(self, schedule: Schedule) -> StageTable:
        """The table for a schedule's number of stages.

        Raises:
            ScheduleError: No run had as many stages, or a multiple of it.
        """
        stages = schedule.num_stages
        finer = sorted(count for count in self.tables if count % stages == 0)
        if not finer:
            known = ", ".join(map(str, sorted(self.tables)))
            raise ScheduleError(
                f"{self.name} is of runs with {known} stages, and the schedule has {stages}; calibrate with as many stages, or a multiple of them"
            )
        return self.tables[finer[0]] if finer[0] == stages else self.tables[finer[0]].merged(stages)

    def durations(self, schedule: Schedule) -> Floats:
        """(slots,) duration of every slot: op, and host time after it.

        Raises:
            ScheduleError: The schedule has a kind of op that no run had.
        """
        table = self.table(schedule)
        times: dict[Kind, Any] = {kind: np.zeros(schedule.num_stages) for kind in (Kind.U,)}
        for name, kind in TIMES.items():
            if name in table.times:
                times[kind] = np.array(table.times[name])
            elif schedule.has(kind) and kind is not Kind.U:
                why = _SPLIT if kind in (Kind.I, Kind.W) else f"the calibration runs had no {kind.name}"
                raise ScheduleError(f"{self.name}: {why}; calibrate with such a run, too")
        times = {kind: values if kind is Kind.U else values[:, None] for kind, values in times.items()}
        times[Kind.R] = times[Kind.F]
        return slot_durations(schedule, times) + self._host(schedule)

    def _host(self, schedule: Schedule) -> Floats:
        """(slots,) host time after each slot, none after a device's last; and the barrier before a device's first update."""
        host, ends = self.host, schedule.device_slots
        sends, receives = posted(schedule)
        result = host.op + host.send * sends + host.receive * receives
        result[ends[1:][ends[1:] > ends[:-1]] - 1] = 0.0
        result[first_updates(schedule)] += max(0.0, host.barrier - host.op)  # it is from the end of the op before, as the latter is
        return result

    def message_bytes(self, schedule: Schedule) -> Floats:
        """(messages,) bytes. A gradient is as large as the activation that it belongs to."""
        found = messages(schedule)
        owner = np.where(found.gradient, found.target, found.source)
        return self._bytes(schedule, "message")[schedule.stage[owner]]

    def activation_bytes(self, schedule: Schedule) -> ActivationBytes:
        """Bytes of every activation."""
        shape = (schedule.num_stages, schedule.num_microbatches)
        kept, freed = (np.broadcast_to(self._bytes(schedule, name)[:, None], shape) for name in ("activation", "activation_freed_by_input_grad"))
        return ActivationBytes(kept, freed, np.zeros(shape))

    def stage_bytes(self, schedule: Schedule) -> Mapping[str, Floats]:
        """Category to (stages,) bytes."""
        fields = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer_state"}
        return {category: self._bytes(schedule, name) for category, name in fields.items()}

    def recompute(self, schedule: Schedule) -> Floats | None:
        """None: only what is listed is recomputed."""
        return None

    def tied_stages(self, schedule: Schedule) -> Sequence[Sequence[int]]:
        """None."""
        return []

    def _bytes(self, schedule: Schedule, name: str) -> Floats:
        return np.array(self.table(schedule).bytes.get(name, (0.0,) * schedule.num_stages))


@remembered
def posted(schedule: Schedule) -> tuple[Floats, Floats]:
    r"""(slots,) SENDs, and RECVs, that are posted between a slot and the next on its device; RECVs that are not listed as early as can be.

    Examples:
        >>> [counts.tolist() for counts in posted(Schedule.from_text("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"))]
        [[1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]]
    """
    listing = schedule if is_explicit(schedule) else lower(schedule)
    opens = (listing.kind <= int(Kind.U)) & ~listing.joined
    slot = np.cumsum(opens) - 1
    there = slot >= schedule.device_slots[listing.device]  # what stands before a device's first slot follows none
    halves = ((Kind.SEND_F, Kind.SEND_B), (Kind.RECV_F, Kind.RECV_B))
    counts = [np.bincount(slot[there & np.isin(listing.kind, list(map(int, kinds)))], minlength=schedule.num_slots) for kinds in halves]
    return counts[0].astype(np.float64), counts[1].astype(np.float64)


@remembered
def first_updates(schedule: Schedule) -> NDArray[np.int64]:
    """The slots of the first update of each device, where all devices wait for each other before it and an op stands before it."""
    if schedule.weights != "flush" or not schedule.has_backward:
        return np.zeros(0, np.int64)
    first = updates_per_device(schedule)
    return first[first > schedule.device_slots[:-1]]


def read_calibrated(text: str, where: str) -> CalibratedCosts:
    """Reads the costs of a calibration file; its links are in the cluster file beside it.

    Raises:
        ScheduleError: It is no calibration file.
    """
    from pipesim.userfiles import StageCalibrationFile, parse_toml

    file = parse_toml(StageCalibrationFile, text, where)
    tables = {}
    for number, entry in enumerate(file.stages):
        values = entry.model_dump(exclude_none=True)
        for name, column in values.items():
            if len(column) != len(entry.forward):
                raise ScheduleError(
                    f"{where}: stages[{number}].{name} has {len(column)} values, and forward {len(entry.forward)}; right is one per stage"
                )
        table = StageTable(
            {name: tuple(values[name]) for name in TIMES if name in values}, {name: tuple(values[name]) for name in SIZES if name in values}
        )
        tables[table.stages] = table
    return CalibratedCosts(tables, HostTimes(**file.host.model_dump()), file.name or where)
