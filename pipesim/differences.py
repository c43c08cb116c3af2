"""Why two runs of the same ops differ.

The durations of ops are compared by kind, and the difference of the makespans is taken apart along the critical path of the actual
run (:mod:`pipesim.pathterms`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.metrics import iteration_times
from pipesim.op import Kind
from pipesim.pathterms import Term, terms
from pipesim.schedule import Schedule
from pipesim.timeline import Timeline

__all__ = ["Difference", "Errors", "OpError", "difference", "typical_step"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_WORST = 10  # ops that are named


def typical_step(timeline: Timeline) -> Timeline:
    """The step of median makespan (compute and collectives) as a run of its own; of an even number of steps the shorter of the two in the middle.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> run = simulate(generate("1f1b", 2, 2), UniformCosts(forward=1, backward=2), steps=3)
        >>> typical_step(run).steps, typical_step(run).makespan, run.makespan
        (1, 9.0, 27.0)
    """
    if timeline.steps == 1:
        return timeline
    step = _typical(timeline)
    every = ((one.name, getattr(timeline, one.name)) for one in fields(timeline))
    columns: dict[str, Any] = {
        name: value[step : step + 1] for name, value in every if isinstance(value, np.ndarray) and value.ndim == 2 and len(value) == timeline.steps
    }
    return replace(timeline, **columns)


def _typical(timeline: Timeline) -> int:
    spans = iteration_times(timeline)
    return int(np.argsort(spans, kind="stable")[(len(spans) - 1) // 2])


# -- two runs of the same ops ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """How far off the durations of some ops are; an error is predicted / actual - 1.

    Attributes:
        kind: ``F``, ``B``, ...; ``pair``; ``I+W`` where only their sum can be compared.
        ops: How many.
        predicted: Sum of their predicted durations.
        actual: Sum of their actual durations, each the median over the steps.
        mean: Mean of the errors without their sign, over ops that take time; None if there are none.
        median: Their median.
        p90: The value that 90 % of them do not exceed.
    """

    kind: str
    ops: int
    predicted: float
    actual: float
    mean: float | None
    median: float | None
    p90: float | None

    @property
    def bias(self) -> float | None:
        """The error of the sums: of one sign where all ops are too long or too short."""
        return _error(self.predicted, self.actual)


@dataclass(frozen=True)
class OpError:
    """One op's duration, in both runs."""

    op: str
    device: int
    predicted: float
    actual: float

    @property
    def error(self) -> float | None:
        """Predicted / actual - 1."""
        return _error(self.predicted, self.actual)


@dataclass(frozen=True)
class Difference:
    """Why two runs of the same ops differ. One is taken for a prediction of the other: the one that was not measured, else the first.

    Figures are those of the step of median makespan (:func:`typical_step`), durations of ops medians over all steps.

    Attributes:
        names: Of the predicted run, and of the actual one.
        unit: Of time.
        steps: How many steps each has.
        makespan: Predicted, actual.
        bubble_fraction: Predicted, actual.
        peak_memory: Per device (predicted, actual); None where one run does not say it.
        kinds: Errors of durations by kind, and of all ops.
        worst: The ops of which predicted and actual duration are farthest apart, in time.
        path: The critical path of the actual run, from its start to its end.
        rest: For how long the actual run goes on after the last op of the path (collectives may), minus the same of the predicted run.
        notes: What to know about the comparison.
    """

    names: tuple[str, str]
    unit: str
    steps: tuple[int, int]
    makespan: tuple[float, float]
    bubble_fraction: tuple[float, float]
    peak_memory: tuple[tuple[float, float], ...] | None
    kinds: tuple[Errors, ...]
    worst: tuple[OpError, ...]
    path: tuple[Term, ...]
    rest: float
    notes: tuple[str, ...] = ()

    @property
    def makespan_error(self) -> float | None:
        """Predicted / actual - 1."""
        return _error(*self.makespan)

    @cached_property
    def slower(self) -> float:
        """How much longer the ops on the path ran."""
        return sum(term.slower for term in self.path)

    @cached_property
    def waited_longer(self) -> float:
        """How much longer the ops on the path waited."""
        return sum(term.waited_longer for term in self.path)

    @cached_property
    def slower_by_kind(self) -> dict[str, float]:
        """The same as :attr:`slower`, by kind of op."""
        return _sums((term.kind, term.slower) for term in self.path)

    @cached_property
    def waited_longer_by(self) -> dict[str, float]:
        """The same as :attr:`waited_longer`, by what was waited for."""
        return _sums((term.by, term.waited_longer) for term in self.path)

    @cached_property
    def explaining(self) -> list[Term]:
        """The ops on the path that differ most, running and waiting together."""
        order = sorted(self.path, key=lambda term: -max(abs(term.slower), abs(term.waited_longer)))
        dust = 1e-9 * max(self.makespan)  # of sums of floats
        return [term for term in order[:_WORST] if max(abs(term.slower), abs(term.waited_longer)) > dust]

    def as_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        named = self.explaining
        return {
            "predicted": self.names[0],
            "actual": self.names[1],
            "steps": list(self.steps),
            "makespan": list(self.makespan),
            "makespan_error": self.makespan_error,
            "bubble_fraction": list(self.bubble_fraction),
            "peak_memory": None
            if self.peak_memory is None
            else [{"device": device, "predicted": a, "actual": b, "error": _error(a, b)} for device, (a, b) in enumerate(self.peak_memory)],
            "kinds": [{**vars(errors), "bias": errors.bias} for errors in self.kinds],
            "worst_ops": [{**vars(one), "error": one.error} for one in self.worst],
            "explanation": {
                "makespan_difference": self.makespan[1] - self.makespan[0],
                "slower": self.slower,
                "waited_longer": self.waited_longer,
                "rest": self.rest,
                "slower_by_kind": self.slower_by_kind,
                "waited_longer_by": self.waited_longer_by,
                "path_ops": len(self.path),
                "ops": [{**vars(term), "slower": term.slower, "waited_longer": term.waited_longer} for term in named],
            },
            "notes": list(self.notes),
        }


def _error(predicted: float, actual: float) -> float | None:
    return predicted / actual - 1 if actual else None


def _sums(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    result: dict[str, float] = {}
    for name, value in pairs:
        result[name] = result.get(name, 0.0) + value
    return result


def difference(first: Timeline, second: Timeline, names: tuple[str, str]) -> Difference | None:
    """Returns why two runs differ, if they are of the same ops, and one is measured or both have one schedule; else None.

    Args:
        first: A run.
        second: Another, in the same unit.
        names: What to call them.
    """
    swapped = first.source == "measured" and second.source != "measured"
    predicted, actual = (second, first) if swapped else (first, second)
    partner = _partners(actual.schedule, predicted.schedule)
    if partner is None:
        return None
    known = partner >= 0
    same_order = bool((np.diff(partner[known]) > 0).all())
    if "measured" not in (first.source, second.source) and not same_order:
        return None  # two schedules: why they differ is not a matter of durations
    durations = np.zeros(len(partner)), np.median(actual.end - actual.start, axis=0)
    durations[0][known] = np.median(predicted.end - predicted.start, axis=0)[partner[known]]
    names_of_slots = _kind_names(actual.schedule)
    kinds, group, durations, notes = _groups(actual, known, durations)
    steps = typical_step(predicted), typical_step(actual)
    path, rest = terms(steps[1], steps[0], partner, names_of_slots)
    peaks = _peaks(predicted), _peaks(actual)
    comparable = len(peaks[0]) == len(peaks[1]) and any(peaks[0]) and any(peaks[1])
    return Difference(
        names=(names[1], names[0]) if swapped else names,
        unit=actual.unit,
        steps=(predicted.steps, actual.steps),
        makespan=(steps[0].makespan, steps[1].makespan),
        bubble_fraction=(steps[0].bubble_fraction, steps[1].bubble_fraction),
        peak_memory=tuple(zip(*peaks, strict=True)) if comparable else None,
        kinds=tuple(_errors(kinds, group, *durations)),
        worst=tuple(_worst(actual.schedule, group, *durations)),
        path=tuple(path),
        rest=rest,
        notes=(*notes, *(() if same_order else ("the devices did their ops in another order than predicted",))),
    )


def _peaks(timeline: Timeline) -> list[float]:
    """Per device: what the allocator says, where the run was measured and its info has that, else what its curves say."""
    try:
        said = [float(text) for text in timeline.info["peak_memory"].split(",")]
    except (KeyError, ValueError):
        return timeline.peak_memory
    return said if len(said) == timeline.schedule.num_devices and np.isfinite(said).all() else timeline.peak_memory


def _partners(actual: Schedule, predicted: Schedule) -> Ints | None:
    """(slots of *actual*,) the slot of *predicted* that holds the same ops, -1 for an update that is not there; None if others differ."""
    keys = [
        _keys(schedule, max(actual.num_microbatches, predicted.num_microbatches, actual.num_slots, predicted.num_slots))
        for schedule in (actual, predicted)
    ]
    result = np.full(actual.num_slots, -1)
    for updates in (False, True):
        places = [np.flatnonzero((schedule.kind[schedule.slot_row] == int(Kind.U)) == updates) for schedule in (actual, predicted)]
        orders = [place[np.lexsort(key[:, place])] for place, key in zip(places, keys, strict=True)]
        if len(orders[0]) == len(orders[1]) and (keys[0][:, orders[0]] == keys[1][:, orders[1]]).all():
            result[orders[0]] = orders[1]
        elif not updates:
            return None
    return result


def _keys(schedule: Schedule, microbatches: int) -> Ints:
    """(2, slots) what identifies the ops of a slot, the halves of a pair in either order."""
    code = (schedule.stage.astype(np.int64) * len(Kind) + schedule.kind) * (microbatches + 1) + schedule.microbatch
    first, second = code[schedule.slot_row], np.where(schedule.slot_second_row >= 0, code[schedule.slot_second_row], -1)
    return np.stack([np.minimum(first, second), np.maximum(first, second)])


def _kind_names(schedule: Schedule) -> list[str]:
    """Per slot its kind, ``pair`` for a pair."""
    first, second = schedule.kind[schedule.slot_row].tolist(), schedule.slot_second_row.tolist()
    return ["pair" if other >= 0 else Kind(kind).name for kind, other in zip(first, second, strict=True)]


def _groups(actual: Timeline, known: NDArray[np.bool_], durations: tuple[Floats, Floats]) -> tuple[list[str], Ints, tuple[Floats, Floats], list[str]]:
    """Names of kinds, the kind of each slot (-1: not compared), durations, and what to say about them."""
    schedule = actual.schedule
    kinds = [*(kind.name for kind in Kind), "pair", "I+W"]
    group = schedule.kind[schedule.slot_row].astype(np.int64)
    group[schedule.slot_second_row >= 0] = kinds.index("pair")
    group = np.where(known, group, -1)
    notes = []
    if actual.info.get("imported", "").startswith("torch.profiler") and schedule.has(Kind.I):
        # PyTorch's first stage needs no input gradient: its I does nothing, and its W runs the whole backward
        first = sorted(set(range(schedule.num_stages)) - {after for _, after in schedule.stage_edges})
        halves = schedule.rows_of(Kind.I)[first].ravel(), schedule.rows_of(Kind.W)[first].ravel()
        there = (halves[0] >= 0) & (halves[1] >= 0)
        i, w = (schedule.row_slot[rows[there]] for rows in halves)
        single = (group[i] == int(Kind.I)) & (group[w] == int(Kind.W))
        i, w = i[single], w[single]
        if len(i):
            durations = durations[0].copy(), durations[1].copy()
            for column in durations:
                column[w] += column[i]
            group[i], group[w] = -1, kinds.index("I+W")
            notes.append("PyTorch runs the whole backward of the first stage in its W, so I and W are compared there together")
    return kinds, group, durations, notes


def _errors(kinds: Sequence[str], group: Ints, predicted: Floats, actual: Floats) -> list[Errors]:
    result = []
    present = [number for number in np.unique(group).tolist() if number >= 0]
    for name, own in [*((kinds[number], group == number) for number in present), ("all", group >= 0)]:
        timed = own & (actual > 0)
        off = np.abs(predicted[timed] / actual[timed] - 1)
        figures = (float(off.mean()), float(np.median(off)), float(np.percentile(off, 90))) if len(off) else (None, None, None)
        result.append(Errors(name, int(own.sum()), float(predicted[own].sum()), float(actual[own].sum()), *figures))
    return result


def _worst(schedule: Schedule, group: Ints, predicted: Floats, actual: Floats) -> list[OpError]:
    off = np.where(group >= 0, np.abs(predicted - actual), 0.0)
    order = np.argsort(-off, kind="stable")[:_WORST]
    both = len(Kind) + 1  # I+W
    return [
        OpError(
            f"{schedule.slot(slot)} and its I" if group[slot] == both else str(schedule.slot(slot)),
            int(schedule.slot_device[slot]),
            float(predicted[slot]),
            float(actual[slot]),
        )
        for slot in order.tolist()
        if off[slot] > 0
    ]
