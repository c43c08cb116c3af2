"""What a picture of a Pareto front shows, as numbers and names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipesim.errors import ScheduleError
from pipesim.sweep import Row, pareto_front
from pipesim.viz.axes import printable, size_axis

__all__ = ["Dot", "Fronts", "fronts"]


class Dot(NamedTuple):
    """A configuration: its peak memory, its throughput, and its name."""

    x: float
    y: float
    name: str


class Fronts(NamedTuple):
    """All configurations, the fronts by the name of what they share, and the labels of both axes."""

    dots: list[Dot]
    fronts: dict[str, list[Dot]]
    labels: tuple[str, str]


def fronts(rows: Sequence[Row], by: Sequence[str]) -> Fronts:
    """Returns the dots of rows of a sweep; see :func:`pipesim.viz.mpl.pareto`."""
    front = pareto_front(rows, by)
    if not front:
        raise ScheduleError("no row has a throughput and a peak_memory, and fits: there is nothing to draw")
    unit = str(front[0]["unit"])
    shown = [row for row in rows if row.get("throughput") is not None and row.get("peak_memory") is not None]
    size, size_unit = size_axis(max(row["peak_memory"] for row in shown), unit)

    def dot(row: Row) -> Dot:
        sizes = [f"{letter} = {row[key]}" for letter, key in (("p", "devices"), ("m", "microbatches")) if row.get(key) is not None]
        return Dot(row["peak_memory"] * size, row["throughput"], printable(", ".join([str(row["schedule"]), *sizes])))

    groups: dict[str, list[Dot]] = {}
    for row in front:
        groups.setdefault(printable(", ".join(f"{name} {row[name]}" for name in by)), []).append(dot(row))
    return Fronts(
        [dot(row) for row in shown], groups, (f"peak_memory ({size_unit})", f"throughput (microbatches / {'s' if unit == 's' else 'slot'})")
    )
