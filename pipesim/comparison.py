"""Runs against each other: figures side by side, and for two runs of the same ops why they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipesim.differences import Difference, difference, typical_step
from pipesim.errors import ScheduleError
from pipesim.timeline import Timeline

__all__ = ["Comparison", "compare"]

_TIMES = ("makespan", "bubble_fraction", "bubble_overhead", "span_bubble_rate")
_FIGURES = (
    "makespan",
    "iteration_time",
    "bubble_fraction",
    "bubble_overhead",
    "span_bubble_rate",
    "peak_activations",
    "peak_activation_share",
    "peak_memory",
)


@dataclass(frozen=True)
class Comparison:
    """Figures of several runs side by side; the first run is what the others are compared with.

    Runs with different numbers of steps are compared per step: there is an ``iteration_time_ratio`` instead of the ``makespan_ratio``,
    and makespan and bubbles of a run of several steps are those of its step of median makespan (:func:`pipesim.differences.typical_step`).

    Attributes:
        names: One per run.
        rows: (name of the figure, one value per run); ``steps`` is among them where a run has several. A peak_memory of None is unknown.
        unit: Their unit of time.
        difference: Why two runs differ, where they are of the same ops; else None.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Any, ...]], ...]
    unit: str
    difference: Difference | None = None

    def __str__(self) -> str:
        from pipesim.viz import differences, text

        return text.comparison(self) + ("" if self.difference is None else "\n\n" + differences.difference(self.difference))

    def as_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        runs = [{"name": name, **{row: values[i] for row, values in self.rows}} for i, name in enumerate(self.names)]
        result: dict[str, Any] = {"unit": self.unit, "runs": runs}
        return result if self.difference is None else {**result, "difference": self.difference.as_dict()}


def compare(*timelines: Timeline, names: Sequence[str] | None = None) -> Comparison:
    """Puts the figures of runs side by side; of two runs of the same ops it also says why they differ.

    The latter where one of the two is measured, or both have one schedule. See :class:`Difference`.

    Args:
        *timelines: Two or more runs in the same unit.
        names: What to call them; by default their schedules' names, numbered where they repeat.

    Raises:
        ScheduleError: There is nothing to compare, or one run is in seconds and another in slots.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> runs = [simulate(generate(name, 4, 8), UniformCosts(forward=1, backward=2)) for name in ("gpipe", "1f1b")]
        >>> dict(compare(*runs).rows)["peak_activations"]
        ([8, 8, 8, 8], [4, 3, 2, 1])
        >>> schedule = generate("1f1b", 2, 2)
        >>> fast, slow = (simulate(schedule, UniformCosts(forward=forward, backward=2)) for forward in (1, 1.5))
        >>> why = compare(fast, slow).difference
        >>> slow.makespan - fast.makespan, why.slower, why.waited_longer
        (1.5, 1.5, 0.0)
    """
    if len(timelines) < 2:
        raise ScheduleError("compare wants at least two runs")
    units = {timeline.unit for timeline in timelines}
    if len(units) > 1:
        raise ScheduleError("one run is in seconds and another in slots; they cannot be compared")
    given = list(names) if names is not None else [timeline.schedule.name for timeline in timelines]
    if len(given) != len(timelines):
        raise ScheduleError(f"{len(given)} names for {len(timelines)} runs")
    unique = [name if given.count(name) == 1 else f"{name} #{given[: i + 1].count(name)}" for i, name in enumerate(given)]
    why = difference(*timelines, names=(unique[0], unique[1])) if len(timelines) == 2 else None
    return Comparison(tuple(unique), tuple(_rows(timelines)), units.pop(), why)


def _rows(timelines: Sequence[Timeline]) -> list[tuple[str, tuple[Any, ...]]]:
    steps = tuple(timeline.steps for timeline in timelines)
    per_step = len(set(steps)) > 1
    timed = [typical_step(timeline) for timeline in timelines] if per_step else timelines
    found = {figure: tuple(getattr(one, figure) for one in (timed if figure in _TIMES else timelines)) for figure in _FIGURES}
    found["peak_memory"] = tuple(timeline.peak_memory if timeline.knows_memory else None for timeline in timelines)
    compared = "iteration_time" if per_step else "makespan"
    rows = list(found.items())
    first = found[compared][0]
    ratio = f"{compared}_ratio", tuple(value / first if first else None for value in found[compared])
    rows.insert(_FIGURES.index(compared) + 1, ratio)
    return rows if max(steps) == 1 else [("steps", steps), *rows]
