"""Costs that a user types: numbers, a number per stage, or a table per stage and microbatch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.cluster import Cluster, Unit
from pipesim.costs.model import ActivationBytes, constant, repeated, slot_durations, together
from pipesim.dataflow import messages
from pipesim.errors import LARGEST, ScheduleError, require_count
from pipesim.op import COMPUTE_KINDS, Kind
from pipesim.schedule import Schedule

__all__ = ["UniformCosts"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class UniformCosts:
    """Durations and bytes as numbers. Each may be a scalar, a list per stage, or a (stages, microbatches) table.

    Durations are per stage, so per chunk where a device holds several. Whichever of the three backward times is left
    out follows from the others: B = I + W; with B alone, I = W = B / 2; with none, I = W = 1. Seconds have no defaults:
    what the schedule needs must be given.

    Attributes:
        forward: Time of F; 1 by default.
        backward: Time of B, the full backward.
        input_grad: Time of I. Measured halves often take longer than the whole: give all three then.
        weight_grad: Time of W.
        optimizer: Time of U.
        overlap: Time of a pair of a forward with a backward; None for the sum of its two.
        recompute_policy: Which forwards are recomputed in their backward, as a cost: ``"never"``, ``"always"``,
            ``"except_last"`` (not for the last microbatch), or a (stages, microbatches) table of booleans.
            It adds F to the backward. Where R is listed, R costs F and this does not apply.
        latency: Time of a hop between devices, in the same unit; None where the cluster says it.
        bandwidth: Bytes per unit of time of every link; None where the cluster says it, or only latency counts.
        message: Bytes of one activation or gradient between stages, by the sender's stage.
        activation: Bytes of one activation; 1 by default in slots, else 0.
        activation_freed_by_input_grad: The part of it that goes when I ends.
        stage_input: Bytes kept from F where the forward is recomputed; part of *activation*.
        weights: Bytes of a stage's weights.
        gradients: Bytes of its gradients.
        optimizer_state: Bytes of its optimizer state.
        stages: The numbers above are of one of this many stages; in a schedule with twice as many (two chunks per
            device) each takes half. Messages and a hop do not shrink. None: the numbers are of the schedule's own stages.
        microbatches: The same for microbatches: the numbers are for one of this many, and in a schedule that cuts each in
            pieces (seq1f1b) a piece takes its share.
        tied: Groups of stages that share weights, such as ``[(0, 3)]``, or the text ``0+3``.
        reduction: Time of a gradient reduction of a stage, over data-parallel peers and replicas together.
        tied_reduction: Time of the reduction that a group of *tied* stages shares; none on devices that hold all of the group.
        unshard: Time of an UNSHARD, the all-gather of a stage's weights.
        buckets: Pieces that a reduction is cut in, which start during the stage's last backward; each takes its part of the time.
        reduce_every_microbatch: Whether gradients are reduced after every microbatch, not once per update.
        unit: ``"slot"`` for abstract time, ``"s"`` for seconds and bytes.

    Examples:
        >>> from pipesim import generate
        >>> schedule = generate("1f1b", devices=2, microbatches=2)
        >>> UniformCosts(forward=[1, 2], backward=3).durations(schedule).tolist()
        [1.0, 1.0, 3.0, 3.0, 2.0, 3.0, 2.0, 3.0]
    """

    forward: ArrayLike | None = None
    backward: ArrayLike | None = None
    input_grad: ArrayLike | None = None
    weight_grad: ArrayLike | None = None
    optimizer: ArrayLike = 0.0
    overlap: ArrayLike | None = None
    recompute_policy: Literal["never", "always", "except_last"] | ArrayLike = "never"
    latency: float | None = None
    bandwidth: float | None = None
    message: ArrayLike = 0.0
    activation: ArrayLike | None = None
    activation_freed_by_input_grad: ArrayLike = 0.0
    stage_input: ArrayLike = 0.0
    weights: ArrayLike = 0.0
    gradients: ArrayLike = 0.0
    optimizer_state: ArrayLike = 0.0
    stages: int | None = None
    microbatches: int | None = None
    tied: Sequence[Sequence[int]] | str = ()
    reduction: ArrayLike = 0.0
    tied_reduction: float = 0.0
    unshard: ArrayLike = 0.0
    buckets: int = 1
    reduce_every_microbatch: bool = False
    unit: Unit = "slot"
    name: str = "uniform"

    def __post_init__(self) -> None:
        if self.unit not in ("s", "slot"):
            raise ScheduleError(f"unit must be 's' or 'slot', got {self.unit!r}")
        for field in _TABLES:
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, _numbers(field, value))
        for field in ("latency", "bandwidth", "tied_reduction"):
            value = getattr(self, field)
            if value is not None and np.ndim(value):
                why = "it is of every group" if field == "tied_reduction" else "links that differ are a cluster's"
                raise ScheduleError(f"{field} must be one number, got {value!r}; {why}")
            if value is not None:
                object.__setattr__(self, field, float(_numbers(field, value)))
        for field in ("stages", "microbatches"):
            if getattr(self, field) is not None:
                require_count(field, getattr(self, field))
        object.__setattr__(self, "buckets", require_count("buckets", self.buckets))
        if not isinstance(self.reduce_every_microbatch, bool):
            raise ScheduleError(f"reduce_every_microbatch must be True or False, got {self.reduce_every_microbatch!r:.80}")
        object.__setattr__(self, "tied", _groups(self.tied))
        if self.tied_reduction and not self.tied:
            raise ScheduleError(f"tied_reduction is {self.tied_reduction:g}, and tied names no stages that share weights, such as [(0, 3)]")
        if self.bandwidth == 0:
            raise ScheduleError("bandwidth must be above 0; leave it out where only latency counts")
        if self.forward is None and self.unit == "slot":
            object.__setattr__(self, "forward", np.float64(1.0))
        if self.activation is None:
            object.__setattr__(self, "activation", np.float64(self.unit == "slot"))
        if self.forward is None:
            raise ScheduleError("forward is missing: in seconds there is no default")
        policy = self.recompute_policy
        if policy not in ("never", "always", "except_last") if isinstance(policy, str) else np.asarray(policy).dtype != bool:
            raise ScheduleError(f"recompute_policy must be 'never', 'always', 'except_last' or a table of booleans, got {policy!r:.80}")
        whole = np.asarray(self.activation)
        for field in ("activation_freed_by_input_grad", "stage_input"):
            part = np.asarray(getattr(self, field))
            if part.ndim == whole.ndim == 0 and part > whole:
                raise ScheduleError(f"{field} is {part}, which is more than activation, {whole}, that it is part of")

    # -- the interface -------------------------------------------------------------------------------------------------

    def durations(self, schedule: Schedule) -> Floats:
        """(slots,) duration of every slot."""
        if schedule.has_backward and self._by_kind is not None and schedule.every_row_a_slot and self._never_recomputed(schedule):
            return self._by_kind[schedule.kind]
        overlap = None if self.overlap is None else self._per_stage("overlap", schedule)
        return slot_durations(schedule, self._times(schedule), self.recompute(schedule), overlap)

    @cached_property
    def _by_kind(self) -> Floats | None:
        """(kinds that compute,) times, where one number says each for every op of every schedule that has a backward; else None."""
        given = (self.forward, self.backward, self.input_grad, self.weight_grad, self.optimizer)
        if self.stages or self.microbatches or self.overlap is not None or any(np.ndim(value) for value in given if value is not None):
            return None
        return slot_durations(_ONE_OF_EACH, self._times(_ONE_OF_EACH))

    def _times(self, schedule: Schedule) -> dict[Kind, Floats]:
        """Kind to what spreads to a (stages, microbatches) table; for U a (stages,) array."""
        forward = self._compact("forward", schedule)
        backward, input_grad, weight_grad = self._backward_times(schedule)
        return {
            Kind.F: forward,
            Kind.B: backward,
            Kind.I: input_grad,
            Kind.W: weight_grad,
            Kind.R: forward,
            Kind.U: self._per_stage("optimizer", schedule),
        }

    def message_bytes(self, schedule: Schedule) -> Floats:
        """(messages,) bytes. A gradient is as large as the activation that it belongs to."""
        found = messages(schedule)
        table = self._table("message", schedule)
        number = constant(table)
        if number is not None:
            return repeated(number, len(found))
        sender = np.where(found.gradient, found.target, found.source)
        return np.array(table[schedule.stage[sender], schedule.microbatch[sender]])

    def activation_bytes(self, schedule: Schedule) -> ActivationBytes:
        """Bytes of every activation, as (stages, microbatches) tables."""
        whole = self._table("activation", schedule)
        freed = self._table("activation_freed_by_input_grad", schedule)
        nothing = ActivationBytes(whole, freed, repeated(0.0, *whole.shape))
        if self._never_recomputed(schedule):
            return nothing
        recomputed = self._recomputed(schedule) | (schedule.rows_of(Kind.R) >= 0)
        if not recomputed.any():
            return nothing
        kept = np.where(recomputed, np.minimum(self._table("stage_input", schedule), whole), whole)
        return ActivationBytes(kept, freed, whole - kept)

    def stage_bytes(self, schedule: Schedule) -> Mapping[str, Floats]:
        """Category to (stages,) bytes."""
        fields = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer_state"}
        return {category: self._per_stage(field, schedule) for category, field in fields.items()}

    def recompute(self, schedule: Schedule) -> Floats | None:
        """(stages, microbatches) time added to the backward."""
        if self._never_recomputed(schedule):
            return None
        recomputed = self._recomputed(schedule) & (schedule.rows_of(Kind.R) < 0)
        if not recomputed.any():
            return None
        return np.where(recomputed, self._table("forward", schedule), 0.0)

    def tied_stages(self, schedule: Schedule) -> Sequence[Sequence[int]]:
        """Groups of stages that share weights.

        Raises:
            ScheduleError: One names a stage that the schedule has not.
        """
        groups = _groups(self.tied)
        for group in groups:
            if max(group) >= schedule.num_stages:
                raise ScheduleError(f"tied names stage {max(group)}, and the schedule has stages 0..{schedule.num_stages - 1}")
        return groups

    @cached_property
    def has_no_collectives(self) -> bool:
        """Whether no collective takes any time, whatever the schedule."""
        return not (self.tied or self.tied_reduction or np.any(self.reduction) or np.any(self.unshard))

    def reductions(self, schedule: Schedule, cluster: Cluster) -> Floats:
        """(stages,) time of a gradient reduction."""
        return self._per_stage("reduction", schedule)

    def tied_reductions(self, schedule: Schedule, cluster: Cluster) -> Floats:
        """(groups,) time of the reduction that tied stages share.

        Examples:
            >>> from pipesim import generate
            >>> costs = UniformCosts(tied=[(0, 7)], tied_reduction=1.0)
            >>> [costs.tied_reductions(generate(name, 4, 8), Cluster(unit="slot")).tolist() for name in ("interleaved", "zb-v")]
            [[1.0], [0.0]]
        """
        apart = [not together(schedule, group) for group in self.tied_stages(schedule)]
        return np.array(apart, dtype=np.float64) * self.tied_reduction

    def unshards(self, schedule: Schedule, cluster: Cluster) -> Floats:
        """(stages,) time of an UNSHARD."""
        return self._per_stage("unshard", schedule)

    def stage_times(self) -> dict[str, Floats]:
        """The times as they were given, what was left out filled in: forward, backward, input_grad, weight_grad, latency.

        Each is one number or one per stage; tables per microbatch are left out. For schedules whose order depends on times.

        Examples:
            >>> {name: float(time) for name, time in UniformCosts(backward=4).stage_times().items()}
            {'forward': 1.0, 'backward': 4.0, 'input_grad': 2.0, 'weight_grad': 2.0, 'latency': 0.0}
        """
        given = {name: None if getattr(self, name) is None else np.asarray(getattr(self, name)) for name in ("backward", "input_grad", "weight_grad")}
        whole, first, second = given.values()
        if whole is not None and first is None and second is None:
            first = second = whole / 2
        first = np.asarray(1.0 if whole is None or second is None else whole - second) if first is None else first
        second = np.asarray(1.0 if whole is None else whole - first) if second is None else second
        times = {
            "forward": np.asarray(self.forward),
            "backward": first + second if whole is None else whole,
            "input_grad": first,
            "weight_grad": second,
        }
        times["latency"] = np.asarray(self.latency or 0.0)
        return {name: time for name, time in times.items() if time.ndim < 2}

    # -- spreading numbers ---------------------------------------------------------------------------------------------

    def _backward_times(self, schedule: Schedule) -> tuple[Floats, Floats, Floats]:
        """Times of B, I and W that spread to (stages, microbatches); what was left out follows from the rest."""
        if not schedule.has_backward:
            nothing = np.zeros((1, 1))
            return nothing, nothing, nothing
        given = {name: None if getattr(self, name) is None else self._compact(name, schedule) for name in ("backward", "input_grad", "weight_grad")}
        whole, first, second = given.values()
        if whole is not None:
            if first is None and second is None:
                return whole, whole / 2, whole / 2
            first = self._rest(whole, second, "weight_grad") if first is None else first
            second = self._rest(whole, first, "input_grad") if second is None else second
            return whole, first, second
        if self.unit == "s" and (first is None or second is None):
            raise ScheduleError("the schedule has a backward, and in seconds there is no default: give backward, or input_grad and weight_grad")
        one = np.full((schedule.num_stages, schedule.num_microbatches), self._share("input_grad", schedule))
        first, second = one if first is None else first, one if second is None else second
        return first + second, first, second

    @staticmethod
    def _rest(whole: Floats, part: Floats | None, name: str) -> Floats:
        if part is None or np.any(part > whole):
            raise ScheduleError(f"{name} is longer than backward, so the other half would be negative; give all three times")
        return whole - part

    def _never_recomputed(self, schedule: Schedule) -> bool:
        return isinstance(self.recompute_policy, str) and self.recompute_policy == "never" and not schedule.has(Kind.R)

    def _recomputed(self, schedule: Schedule) -> NDArray[np.bool_]:
        shape = (schedule.num_stages, schedule.num_microbatches)
        if isinstance(self.recompute_policy, str):
            result = np.full(shape, self.recompute_policy != "never")
            if self.recompute_policy == "except_last":
                result[:, -1] = False
            return result & (schedule.backward_rows >= 0)
        return np.asarray(_spread("recompute_policy", np.asarray(self.recompute_policy), *shape), bool) & (schedule.backward_rows >= 0)

    def _scaled(self, field: str, schedule: Schedule) -> Floats:
        """The numbers as those of one stage and microbatch of this schedule."""
        value = np.asarray(getattr(self, field))
        share = self._share(field, schedule)
        if share != 1 and value.ndim:
            raise ScheduleError(
                f"{field} has {len(value)} values, of {self.stages or 'its'} stages and {self.microbatches or 'its'} microbatches, and the schedule has "
                f"{schedule.num_stages} and {schedule.num_microbatches}; give one number to scale"
            )
        return value if share == 1 else value * share

    def _share(self, field: str, schedule: Schedule) -> float:
        """What a stage and microbatch of this schedule is of those that the numbers speak of."""
        share = 1.0
        if self.stages is not None and field not in ("message", "stage_input"):  # boundaries do not shrink with stages
            share *= self.stages / schedule.num_stages
        if self.microbatches is not None and field not in ("weights", "gradients", "optimizer_state", "optimizer", "reduction", "unshard"):
            share *= self.microbatches / schedule.num_microbatches
        return share

    def _table(self, field: str, schedule: Schedule) -> Floats:
        compact, shape = self._compact(field, schedule), (schedule.num_stages, schedule.num_microbatches)
        return repeated(compact.item(), *shape) if compact.size == 1 else np.broadcast_to(compact, shape)

    def _compact(self, field: str, schedule: Schedule) -> Floats:
        return _compact(field, self._scaled(field, schedule), schedule.num_stages, schedule.num_microbatches)

    def _per_stage(self, field: str, schedule: Schedule) -> Floats:
        value = self._scaled(field, schedule)
        if value.ndim > 1:
            raise ScheduleError(f"{field} belongs to a stage, not to a microbatch; give a number or {schedule.num_stages} of them")
        if value.ndim == 0:
            return repeated(value.item(), schedule.num_stages)
        return np.asarray(_spread(field, value, schedule.num_stages, 1)[:, 0])


_ONE_OF_EACH = Schedule.from_columns([(0, [int(kind) for kind in COMPUTE_KINDS], 0)])  # slot k is of kind k

_TABLES = (
    "forward", "backward", "input_grad", "weight_grad", "optimizer", "overlap", "message", "activation",
    "activation_freed_by_input_grad", "stage_input", "weights", "gradients", "optimizer_state", "reduction", "unshard",
)  # fmt: skip


def _groups(value: Any) -> tuple[tuple[int, ...], ...]:
    """Groups of two or more stages, none of them twice; a text is read as the command line writes them."""
    try:
        if isinstance(value, str):
            value = [[int(stage) for stage in group.split("+")] for group in value.split(",")]
        groups = tuple(tuple(require_count("a stage of tied", stage, 0) for stage in group) for group in value)
    except (TypeError, ValueError) as error:
        if isinstance(error, ScheduleError):
            raise
        raise ScheduleError(f"tied must be groups of stages, such as [(0, 3)] or 0+3, got {value!r:.80}") from None
    stages = [stage for group in groups for stage in group]
    if any(len(group) < 2 for group in groups) or len(set(stages)) < len(stages):
        raise ScheduleError(f"tied must be groups of two or more stages, no stage in two of them, got {value!r:.80}")
    return groups


def _numbers(field: str, value: ArrayLike) -> Floats:
    """The value as float64, refused unless every number in it is finite and at least 0."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        array = np.asarray(value)
        if array.dtype == bool or array.dtype.kind not in "iuf":
            raise TypeError
        array = array.astype(np.float64)
    except (TypeError, ValueError):
        raise ScheduleError(f"{field} must be a number, a list per stage or a table per stage and microbatch, got {value!r:.80}") from None
    if array.ndim > 2 or array.size == 0:
        raise ScheduleError(f"{field} has shape {array.shape}; right is a number, (stages,) or (stages, microbatches)")
    bad = array[~((array >= 0) & (array <= LARGEST))]
    if bad.size:
        number = float(bad.flat[0])
        what = "is not finite" if not math.isfinite(number) else "is negative" if number < 0 else f"is above {LARGEST:g}"
        raise ScheduleError(f"{field} holds {number}, which {what}; right is a finite number of at least 0")
    return array


def _spread(field: str, value: NDArray[Any], stages: int, microbatches: int) -> NDArray[Any]:
    """A scalar, (stages,) or (stages, microbatches) as a view of shape (stages, microbatches)."""
    return np.broadcast_to(_compact(field, value, stages, microbatches), (stages, microbatches))


def _compact(field: str, value: NDArray[Any], stages: int, microbatches: int) -> NDArray[Any]:
    """The same as (1, 1), (stages, 1) or (stages, microbatches)."""
    if value.ndim == 1:
        if len(value) != stages:
            raise ScheduleError(f"{field} has {len(value)} values and the schedule has {stages} stages; give one number, or one per stage")
        return value[:, None]
    if value.ndim == 2 and value.shape != (stages, microbatches):
        raise ScheduleError(f"{field} has shape {value.shape} and the schedule has {stages} stages and {microbatches} microbatches")
    return value.reshape(1, 1) if value.ndim == 0 else value
