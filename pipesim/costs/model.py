"""The one interface that every cost model has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from pipesim.cluster import Cluster, Unit
from pipesim.op import Kind
from pipesim.schedule import Schedule

__all__ = ["ActivationBytes", "CollectiveCosts", "CostModel", "all_zero", "constant", "repeated", "slot_durations", "together"]

Floats = NDArray[np.float64]


class ActivationBytes(NamedTuple):
    """Bytes of one activation, each a (stages, microbatches) array.

    Attributes:
        kept: Allocated when F starts. Under recomputation this is only the stage's input.
        freed_by_input_grad: The part of the whole that goes when I ends, where the backward is split.
        rebuilt: Allocated when the recomputation starts, beside what was kept; 0 where nothing is recomputed.
    """

    kept: Floats
    freed_by_input_grad: Floats
    rebuilt: Floats


@runtime_checkable
class CostModel(Protocol):
    """What the engine and the memory curves ask; every answer is an array over the whole schedule."""

    @property
    def unit(self) -> Unit:
        """``"s"`` for seconds and bytes, ``"slot"`` for abstract time and units of memory."""
        ...

    def durations(self, schedule: Schedule) -> Floats:
        """(slots,) duration of every compute slot on a device of speed 1; a recomputation that is not listed is included."""
        ...

    def message_bytes(self, schedule: Schedule) -> Floats:
        """(messages,) bytes, in the order of ``pipesim.dataflow.messages``."""
        ...

    def activation_bytes(self, schedule: Schedule) -> ActivationBytes:
        """Bytes of every activation."""
        ...

    def stage_bytes(self, schedule: Schedule) -> Mapping[str, Floats]:
        """Category (``weights``, ``gradients``, ``optimizer``) to (stages,) bytes of one replica and one version."""
        ...

    def recompute(self, schedule: Schedule) -> Floats | None:
        """(stages, microbatches) time added to the backward, or None; never where R is listed."""
        ...

    def tied_stages(self, schedule: Schedule) -> Sequence[Sequence[int]]:
        """Groups of stages that share weights, such as first and last with tied embeddings."""
        ...


@runtime_checkable
class CollectiveCosts(Protocol):
    """What a cost model may say beside :class:`CostModel`: how long collectives take. One that does not say it has none."""

    @property
    def buckets(self) -> int:
        """Pieces of a reduction: piece k of n begins when (k + 1)/n of the stage's last backward on that device has passed, and takes 1/n."""
        ...

    @property
    def reduce_every_microbatch(self) -> bool:
        """Whether a stage's gradients are reduced after every microbatch, instead of once per update."""
        ...

    def reductions(self, schedule: Schedule, cluster: Cluster) -> Floats:
        """(stages,) time of one reduction of the stage's gradients, over data-parallel peers and replicas together; 0 for none."""
        ...

    def tied_reductions(self, schedule: Schedule, cluster: Cluster) -> Floats:
        """(groups,) time of the reduction of the gradients that a group of :meth:`CostModel.tied_stages` shares; 0 for none.

        It begins when all stages of the group have their gradients, each reduced. Groups whose devices hold all their stages have none.
        """
        ...

    def unshards(self, schedule: Schedule, cluster: Cluster) -> Floats:
        """(stages,) time of an UNSHARD, the all-gather of a stage's weights. RESHARD takes none."""
        ...


def together(schedule: Schedule, group: Sequence[int]) -> bool:
    """Whether every device that holds a stage of a group holds them all, so that their gradients meet without communication."""
    homes = [set(schedule.placement.get(stage, ())) for stage in group]
    return all(home == homes[0] for home in homes)


def constant(table: NDArray[Any]) -> float | None:
    """The number that a table made of one number repeats, or None: what a user typed is often one number for a million ops."""
    return float(table.flat[0]) if table.size == 1 or (table.size and not any(table.strides)) else None


def repeated(value: float | bool, *shape: int) -> NDArray[Any]:
    """A table that says one thing everywhere and takes the room of one; ``np.broadcast_to`` takes ten times as long.

    Examples:
        >>> repeated(2.0, 2, 3).tolist()
        [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """
    one = np.array([value])
    table: NDArray[Any] = np.ndarray(shape, one.dtype, one, 0, (0,) * len(shape))
    table.setflags(write=False)
    return table


def all_zero(table: NDArray[np.float64]) -> bool:
    """Whether a table holds nothing but 0; of one number repeated that is seen without looking at all of it."""
    number = constant(table)
    return not table.any() if number is None else number == 0


def slot_durations(schedule: Schedule, times: Mapping[Kind, Floats], recompute: Floats | None = None, overlap: Floats | None = None) -> Floats:
    """Spreads tables of times over the slots of a schedule; the arithmetic that cost models share.

    Args:
        schedule: A checked schedule.
        times: Kind to a (stages, microbatches) table, or what spreads to one; for ``U`` a (stages,) array.
        recompute: (stages, microbatches) time added to B or I, or None.
        overlap: (stages,) duration of a pair of a forward with a backward, by the forward's stage; None for the sum
            of its two, which is what every other pair takes.

    Returns:
        (slots,) durations.
    """
    by_kind, tables = [0.0] * len(Kind), []
    for kind, table in times.items():
        number = constant(table)
        if number is not None:
            by_kind[kind] = number
        elif schedule.has(kind):
            tables.append((kind, table))
    rows = np.array(by_kind)[schedule.kind]
    for kind, table in tables:
        own = np.flatnonzero(schedule.kind == int(kind))
        stage = schedule.stage[own]
        full = table if kind is Kind.U else np.broadcast_to(table, (schedule.num_stages, schedule.num_microbatches))
        rows[own] = full[stage] if kind is Kind.U else full[stage, schedule.microbatch[own]]
    if recompute is not None:
        backward = schedule.backward_rows
        there = backward >= 0
        rows[backward[there]] += np.broadcast_to(recompute, backward.shape)[there]
    if schedule.every_row_a_slot:
        return rows
    first, second = schedule.slot_row, schedule.slot_second_row
    durations = rows[first] + np.where(second >= 0, rows[second], 0.0)
    if overlap is not None:
        forward = schedule.kind[first] == int(Kind.F)
        mixed = (second >= 0) & forward & np.isin(schedule.kind[second], [int(Kind.B), int(Kind.I)])
        durations = np.where(mixed, overlap[schedule.stage[first]], durations)
    return durations
