"""A schedule: one ordered stream of ops per device, stored as columns.

Nothing is stored that the streams already say. Where a stage lives, how many microbatches there are and which stages
have replicas is derived from where the ops are listed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim import jit, loops
from pipesim.columns import columns_of, distinct, edges_of, rows_of_stream
from pipesim.errors import ScheduleError
from pipesim.op import Kind, Op, Pair, Slot

__all__ = ["WEIGHT_POLICIES", "Schedule", "WeightPolicy"]

WeightPolicy = Literal["flush", "stash", "vertical", "double_buffer", "latest", "predict"]
WEIGHT_POLICIES: tuple[str, ...] = get_args(WeightPolicy)

_LAST_COMPUTE, _LAST_KIND = int(Kind.U), int(max(Kind))
_TABLED = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)  # of which there is one per stage and microbatch, at most


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    r"""Streams of ops, one per device, with what they mean for weights and data flow.

    Make one with :meth:`from_streams`, :meth:`from_columns`, :meth:`from_text`, :meth:`from_csv` or
    ``pipesim.generate``. Rows are sorted by device and, within a device, by position in its stream.

    Attributes:
        name: What to call it.
        num_devices: Devices, of which some may have no ops.
        device: (rows,) int32, the device of each row, ascending.
        stage: (rows,) int32.
        kind: (rows,) int8, values of :class:`Kind`.
        microbatch: (rows,) int32; -1 where the kind has none; the number of the update for ``U``.
        joined: (rows,) bool, True where the row shares its slot with the row before (the second half of a pair).
        graph: Edges (from stage, to stage) of the stage graph, or None for the chain 0 → 1 → … .
        weights: The weight policy: ``flush`` is synchronous; ``stash`` keeps a version per microbatch in flight
            (PipeDream), ``vertical`` too, and all stages use the version of the first (its vertical sync), ``double_buffer``
            keeps two (2BW), ``latest`` one (PipeMare), ``predict`` two (SpecTrain).
        offload_to: The device to which a device offloads activations, or None for the host.

    Examples:
        >>> schedule = Schedule.from_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
        >>> schedule.num_devices, schedule.num_stages, schedule.num_microbatches
        (2, 2, 2)
        >>> schedule.check() is schedule
        True
    """

    name: str
    num_devices: int
    device: NDArray[np.int32]
    stage: NDArray[np.int32]
    kind: NDArray[np.int8]
    microbatch: NDArray[np.int32]
    joined: NDArray[np.bool_]
    graph: tuple[tuple[int, int], ...] | None = None
    weights: WeightPolicy = "flush"
    offload_to: Mapping[int, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for column in (self.device, self.stage, self.kind, self.microbatch, self.joined):
            column.setflags(write=False)
        if self.weights not in WEIGHT_POLICIES:
            raise ScheduleError(f"weights must be one of {', '.join(WEIGHT_POLICIES)}, got {self.weights!r}")

    # -- making one ------------------------------------------------------------------------------------------------

    @classmethod
    def from_columns(
        cls,
        devices: Sequence[tuple[ArrayLike, ...]],
        *,
        name: str = "schedule",
        graph: Iterable[tuple[int, int]] | None = None,
        weights: WeightPolicy = "flush",
        offload_to: Mapping[int, int | None] | None = None,
    ) -> Schedule:
        """Builds a schedule from arrays, which is how large ones stay cheap.

        Args:
            devices: Per device (stage, kind, microbatch) or (stage, kind, microbatch, joined): arrays of one length,
                or scalars, which stand for every row.
            name: What to call it.
            graph: Edges of the stage graph; None for the chain.
            weights: The weight policy.
            offload_to: Device to offload target.

        Raises:
            ScheduleError: The columns of a device differ in length, or hold something that is no whole number in range.

        Examples:
            >>> str(Schedule.from_columns([(0, [Kind.F, Kind.B], 0)])).splitlines()[-1]
            'device 0 | 0F0 0B0'
        """
        count, columns = columns_of(devices)
        return cls(name, count, *columns, edges_of(graph), weights, dict(offload_to or {}))

    @classmethod
    def from_streams(
        cls,
        streams: Iterable[Iterable[Slot | str | tuple[int, Any, int | None]]],
        *,
        name: str = "schedule",
        graph: Iterable[tuple[int, int]] | None = None,
        weights: WeightPolicy = "flush",
        offload_to: Mapping[int, int | None] | None = None,
        placement: Mapping[int, int | Sequence[int]] | None = None,
    ) -> Schedule:
        """Builds a schedule from one list of ops per device; an op is an :class:`Op`, a :class:`Pair` or a text.

        Args:
            streams: Per device, its ops in order.
            name: What to call it.
            graph: Edges of the stage graph; None for the chain.
            weights: The weight policy.
            offload_to: Device to offload target.
            placement: Where each stage is expected, stage to device(s). An op listed elsewhere is then an error;
                without it, it would be a replica of its stage.

        Raises:
            ScheduleError: A text is no op, or an op stands on a device that does not own its stage.

        Examples:
            >>> Schedule.from_streams([["0F0", "0B0"], ["1F0", "1B0"]], placement={0: 0, 1: 1}).num_stages
            2
        """
        devices = [rows_of_stream(stream) for stream in streams]
        schedule = cls.from_columns(devices, name=name, graph=graph, weights=weights, offload_to=offload_to)
        if placement is not None:
            schedule.check_placement(placement)
        return schedule

    @classmethod
    def from_text(cls, text: str, *, legacy: bool = False, **options: Any) -> Schedule:
        """Reads what ``str(schedule)`` writes; see :mod:`pipesim.formats` for the form and the options."""
        from pipesim import formats

        return formats.read_text(text, legacy=legacy, **options)

    @classmethod
    def from_csv(cls, source: str | os.PathLike[str], *, legacy: bool = False, **options: Any) -> Schedule:
        """Reads a file in PyTorch's CSV format, one row per device; see :mod:`pipesim.formats`."""
        from pipesim import formats

        return formats.read_csv(source, legacy=legacy, **options)

    def to_csv(self, target: str | os.PathLike[str]) -> None:
        """Writes PyTorch's CSV format, which its own runtime loads."""
        from pipesim import formats

        formats.write_csv(self, target)

    # -- looking at it ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of rows: ops, the halves of a pair counted each."""
        return len(self.stage)

    def __eq__(self, other: object) -> bool:
        """Equal streams, stage graph, weight policy and offload targets; the name does not count."""
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            self.num_devices == other.num_devices
            and (self.stage_edges, self.weights, dict(self.offload_to)) == (other.stage_edges, other.weights, dict(other.offload_to))
            and all(np.array_equal(a, b) for a, b in zip(self._columns, other._columns, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def _columns(self) -> tuple[NDArray[Any], ...]:
        return self.device, self.stage, self.kind, self.microbatch, self.joined

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name!r}: {self.num_devices} devices, {self.num_stages} stages, "
            f"{self.num_microbatches} microbatches, {len(self)} ops, weights {self.weights}>"
        )

    def __str__(self) -> str:
        from pipesim import formats

        return formats.write_text(self)

    def _repr_svg_(self) -> str:
        from pipesim.viz import svg  # the one kind of upward import there is: a rich repr

        return svg.schedule_svg(self)

    @property
    def streams(self) -> list[list[Slot]]:
        """The ops as people read them: per device, a list of :class:`Op` and :class:`Pair`."""
        result: list[list[Slot]] = [[] for _ in range(self.num_devices)]
        rows = zip(*(column.tolist() for column in self._columns), strict=True)
        for device, stage, kind, microbatch, joined in rows:
            op = Op(stage, Kind(kind), None if microbatch < 0 else microbatch)
            stream = result[device]
            if joined:
                stream[-1] = Pair(stream[-1], op)  # a pair never grows to three
            else:
                stream.append(op)
        return result

    def op(self, row: int) -> Op:
        """The op of one row, a half where the row belongs to a pair."""
        microbatch = int(self.microbatch[row])
        return Op(int(self.stage[row]), Kind(int(self.kind[row])), None if microbatch < 0 else microbatch)

    def slot(self, number: int) -> Slot:
        """The op or pair that slot *number* holds (numbered as :attr:`slot_row`)."""
        row = int(self.slot_row[number])
        if row + 1 < len(self) and self.joined[row + 1]:
            return Pair(self.op(row), self.op(row + 1))
        return self.op(row)

    def where(self, row: int) -> str:
        """``device 2, position 7, op 2B3`` for error messages; positions count from 0, a pair is one."""
        device = int(self.device[row])
        start = int(self.device_rows[device])
        position = int(np.count_nonzero(~self.joined[start : row + 1])) - 1
        return f"device {device}, position {position}, op {self.op(row)}"

    # -- derived columns -------------------------------------------------------------------------------------------

    @cached_property
    def num_stages(self) -> int:
        """Stages, counted from the highest stage that is listed or named by the stage graph."""
        named = max((max(edge) for edge in self.graph), default=-1) if self.graph else -1
        return max(self._survey[1], named) + 1

    @property
    def num_microbatches(self) -> int:
        """Microbatches in all, counted from the highest that a forward or backward carries."""
        return self._survey[2] + 1

    @cached_property
    def _survey(self) -> tuple[list[int], int, int, bool, NDArray[np.int64]]:
        """Rows per kind, the highest stage and microbatch (-1 for none), whether there are pairs, and the bounds of devices."""
        if jit.is_loaded():
            counts, bounds = np.zeros(_LAST_KIND + 1, np.int64), np.zeros(self.num_devices + 1, np.int64)
            highest, last, pairs = jit.call(loops.survey, *self._columns, counts, bounds)
            return counts.tolist(), int(highest), int(last), bool(pairs), bounds
        counts = np.bincount(self.kind, minlength=len(Kind))
        highest = np.where(self.kind <= int(Kind.R), self.microbatch, -1).max(initial=-1)
        bounds = np.searchsorted(self.device, np.arange(self.num_devices + 1, dtype=np.int32))  # int64 would copy the column
        return counts.tolist(), int(self.stage.max(initial=-1)), int(highest), bool(self.joined.any()), bounds

    @property
    def device_rows(self) -> NDArray[np.int64]:
        """(devices + 1,) bounds: the rows of device d are ``device_rows[d]:device_rows[d + 1]``."""
        return self._survey[4]

    @cached_property
    def every_row_a_slot(self) -> bool:
        """Whether there is nothing but compute ops and no pair, so that rows and slots have the same numbers."""
        return not self._survey[3] and not any(self.kind_counts[_LAST_COMPUTE + 1 :])

    @cached_property
    def slot_row(self) -> NDArray[np.int64]:
        """(slots,) the first row of every compute slot, in row order. A pair is one slot."""
        if self.every_row_a_slot:
            return np.arange(len(self))
        return np.flatnonzero((self.kind <= _LAST_COMPUTE) & ~self.joined)

    @cached_property
    def row_slot(self) -> NDArray[np.int64]:
        """(rows,) the compute slot of each row; for a row that does not compute, the slot before it (-1 if none)."""
        if self.every_row_a_slot:
            return self.slot_row
        return np.cumsum((self.kind <= _LAST_COMPUTE) & ~self.joined) - 1

    @property
    def num_slots(self) -> int:
        """Compute slots over all devices."""
        return len(self) if self.every_row_a_slot else len(self.slot_row)

    @cached_property
    def slot_device(self) -> NDArray[np.int32]:
        """(slots,) the device of each slot, ascending."""
        return self.device if self.every_row_a_slot else self.device[self.slot_row]

    @cached_property
    def device_slots(self) -> NDArray[np.int64]:
        """(devices + 1,) bounds: the slots of device d are ``device_slots[d]:device_slots[d + 1]``."""
        return self.device_rows if self.every_row_a_slot else np.searchsorted(self.slot_device, np.arange(self.num_devices + 1, dtype=np.int32))

    @cached_property
    def used_devices(self) -> NDArray[np.int64]:
        """Devices that have any slot."""
        return (self.device_slots[1:] > self.device_slots[:-1]).nonzero()[0]

    @cached_property
    def slot_second_row(self) -> NDArray[np.int64]:
        """(slots,) the row of the second half of a pair, or -1."""
        if self.every_row_a_slot:
            return np.broadcast_to(np.int64(-1), len(self))
        second = np.minimum(self.slot_row + 1, len(self) - 1)
        return np.where((self.slot_row + 1 < len(self)) & self.joined[second], second, -1)

    @cached_property
    def stage_edges(self) -> tuple[tuple[int, int], ...]:
        """Edges of the stage graph, sorted; the chain where none was given."""
        if self.graph is not None:
            return self.graph
        return tuple((stage, stage + 1) for stage in range(self.num_stages - 1))

    def rows_of(self, kind: Kind) -> NDArray[np.int32]:
        """(stages, microbatches) the row that holds this kind of op, or -1. For F, B, I, W and R."""
        return self._tables[kind]

    @cached_property
    def _tables(self) -> dict[Kind, NDArray[np.int32]]:
        table_of, tables = self.placed
        nothing = np.broadcast_to(np.int32(-1), tables.shape[1:])  # a view of one -1, for kinds that this schedule lacks
        return {kind: nothing if table_of[kind] < 0 else tables[table_of[kind]] for kind in _TABLED}

    @cached_property
    def placed(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Where each op is: (kinds,) which table is a kind's, -1 for none; and (tables, stages, microbatches) rows, -1 for none."""
        present = [int(kind) for kind in _TABLED if self.kind_counts[kind]]
        table_of = np.array([present.index(kind) if kind in present else -1 for kind in range(_LAST_KIND + 1)])
        tables = np.empty((len(present), self.num_stages, self.num_microbatches), np.int32)
        tables[...] = -1
        if jit.is_loaded():
            jit.call(loops.place, self.stage, self.kind, self.microbatch, table_of, tables)
            return table_of, tables
        for kind, table in zip(present, tables, strict=True):
            rows = np.flatnonzero(self.kind == kind)
            table[self.stage[rows], self.microbatch[rows]] = rows
        return table_of, tables

    @cached_property
    def backward_rows(self) -> NDArray[np.int32]:
        """(stages, microbatches) the row whose end yields the input gradient: B, or I where it is split; -1 if neither."""
        full, half = self.rows_of(Kind.B), self.rows_of(Kind.I)
        return np.where(full >= 0, full, half) if self.has(Kind.I) else full

    @cached_property
    def release_rows(self) -> NDArray[np.int32]:
        """(stages, microbatches) the row whose end frees the last of an activation: B or W, or F itself in a forward-only run."""
        full, half, forward = self.rows_of(Kind.B), self.rows_of(Kind.W), self.rows_of(Kind.F)
        if not self.has(Kind.W) and self.kind_counts[Kind.B] == full.size:
            return full
        return np.where(full >= 0, full, np.where(half >= 0, half, forward))

    @cached_property
    def placement(self) -> dict[int, tuple[int, ...]]:
        """Stage to the devices that list it, more than one where it has replicas."""
        devices = max(1, self.num_devices)
        if jit.is_loaded() and self.num_stages <= len(self) and self.num_stages * devices <= 4 * len(self) + 1000:
            listed = np.zeros((self.num_stages, devices), np.bool_)
            jit.call(loops.homes, self.device, self.stage, listed)
            pairs = listed.reshape(-1).nonzero()[0]
        else:
            pairs = distinct(self.stage.astype(np.int64) * devices + self.device)
        result: dict[int, tuple[int, ...]] = {}
        for pair in pairs.tolist():
            stage, device = divmod(pair, devices)
            result[stage] = (*result.get(stage, ()), device)
        return result

    @cached_property
    def device_stages(self) -> tuple[tuple[int, ...], ...]:
        """Per device, the stages that it lists."""
        result: list[list[int]] = [[] for _ in range(self.num_devices)]
        for stage, devices in self.placement.items():
            for device in devices:
                result[device].append(stage)
        return tuple(tuple(stages) for stages in result)

    @property
    def replicas(self) -> dict[int, tuple[int, ...]]:
        """The stages that have more than one weight replica, and on which devices."""
        return {stage: devices for stage, devices in self.placement.items() if len(devices) > 1}

    @property
    def has_backward(self) -> bool:
        """False for a forward-only (inference) schedule."""
        return self.has(Kind.B, Kind.I, Kind.W)

    def has(self, *kinds: Kind) -> bool:
        """Whether any of these kinds is listed."""
        counts = self.kind_counts
        for kind in kinds:  # noqa: SIM110  any() takes twice as long, and this is asked often
            if counts[kind]:
                return True
        return False

    @property
    def kind_counts(self) -> list[int]:
        """How many rows are of each kind, the value of a :class:`Kind` being its place."""
        return self._survey[0]

    # -- checking and changing -------------------------------------------------------------------------------------

    def check(self) -> Schedule:
        """Verifies what can be seen without running it, and returns the schedule.

        Raises:
            ScheduleError: An op is listed twice, missing, out of order or on the wrong device, a stage has an unknown
                predecessor, or the stage graph has a cycle. The text shows the place in the grid.
        """
        self._checked  # noqa: B018  cached: a schedule cannot change
        return self

    @cached_property
    def _checked(self) -> bool:
        from pipesim import check

        check.check_schedule(self)
        return True

    def check_placement(self, placement: Mapping[int, int | Sequence[int]]) -> Schedule:
        """Verifies that every op stands on a device that owns its stage.

        Args:
            placement: Stage to device, or to several devices for replicas.

        Raises:
            ScheduleError: An op stands elsewhere, or its stage has no place.
        """
        from pipesim import check

        check.check_placement(self, placement)
        return self

    def with_updates(self) -> Schedule:
        """Returns the schedule with its optimizer updates listed.

        Under ``flush`` they may be left out; they then stand at the end of each device's stream, one per stage, in the
        order of the stages' last gradients. A schedule that lists updates, or has no backward, is returned as it is.
        """
        if self.weights != "flush" or not self.has_backward or self.has(Kind.U):
            return self
        return self._with_updates

    @cached_property
    def _with_updates(self) -> Schedule:
        devices = []
        for device in range(self.num_devices):
            rows = slice(self.device_rows[device], self.device_rows[device + 1])
            stage, kind = self.stage[rows], self.kind[rows]
            gradients = stage[(kind == int(Kind.B)) | (kind == int(Kind.W))]
            # the order of last gradients is the order of first ones seen from the end
            reversed_stages, first = np.unique(gradients[::-1], return_index=True)
            stages = reversed_stages[np.argsort(first)[::-1]]
            count = len(stages)
            devices.append(
                (
                    np.concatenate([stage, stages]),
                    np.concatenate([kind, np.full(count, int(Kind.U), np.int8)]),
                    np.concatenate([self.microbatch[rows], np.zeros(count, np.int32)]),
                    np.concatenate([self.joined[rows], np.zeros(count, bool)]),
                )
            )
        return self._replaced(devices)

    def without_communication(self) -> Schedule:
        """Returns the schedule without SEND, RECV, UNSHARD, RESHARD and REDUCE_GRAD: the edges say what must be sent."""
        kinds = (Kind.REDUCE_GRAD, Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B, Kind.UNSHARD, Kind.RESHARD)
        keep = ~np.isin(self.kind, [int(kind) for kind in kinds])
        if keep.all():
            return self
        devices = []
        for device in range(self.num_devices):
            rows = np.flatnonzero(keep & (self.device == device))
            devices.append((self.stage[rows], self.kind[rows], self.microbatch[rows], self.joined[rows]))
        return self._replaced(devices)

    def _replaced(self, devices: Sequence[tuple[ArrayLike, ...]]) -> Schedule:
        return Schedule.from_columns(devices, name=self.name, graph=self.graph, weights=self.weights, offload_to=self.offload_to)

    # -- staleness -------------------------------------------------------------------------------------------------

    @cached_property
    def staleness(self) -> Any:
        """The weight version that every F and backward uses; see :class:`pipesim.staleness.Staleness`."""
        from pipesim import staleness

        return staleness.Staleness(self)
