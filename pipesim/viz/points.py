"""Numbers that pictures draw: corners of bars and steps, curves with no more points than can be seen, bars under a pointer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.memory import CATEGORIES, MemoryCurve
from pipesim.timeline import Timeline
from pipesim.viz import palette
from pipesim.viz.scene import Group, Scene

__all__ = ["bar_in_cell", "distinct", "fitting_labels", "layers", "memory_curves", "outline", "rectangles", "steps", "thinned"]

Floats = NDArray[np.float64]

_MEMORY_POINTS = 60_000  # of all memory curves together


def rectangles(left: Floats, right: Floats, top: Floats, bottom: Floats) -> Any:  # matplotlib's types know no arrays here
    """(bars, 4, 2) corners."""
    return np.stack([np.stack([left, left, right, right], axis=1), np.stack([top, bottom, bottom, top], axis=1)], axis=2)


def distinct(times: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """The times without repetition, and the index of the last point at each."""
    last = np.flatnonzero(np.append(np.diff(times) > 0, True))
    return times[last], last


def steps(times: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Corners of a step curve. Where it falls and rises within one moment no dip is drawn; a peak of a moment is."""
    x, last = distinct(times)
    first = np.concatenate([[0], last[:-1] + 1])
    after = values[last]
    before = np.concatenate([[after[0]], after[:-1]])
    return np.repeat(x, 3), np.stack([before, np.maximum(np.maximum.reduceat(values, first), np.maximum(before, after)), after], axis=1).ravel()


def bar_in_cell(bars: Scene, halves: int, columns: int) -> NDArray[np.int64]:
    """(rows, columns) the bar at the middle of each cell, else one that starts in it, else -1."""
    result = np.full(bars.num_devices * halves * columns, -1)
    per_column = columns / bars.span if bars.span else 0.0
    left, right = bars.start * per_column, bars.end * per_column
    # middles of cells are k + 0.5; those in [left, right) belong to the bar
    first, last = np.ceil(left - 0.5).astype(np.int64), np.ceil(right - 0.5).astype(np.int64)
    count = np.clip(last, 0, columns) - first
    for half in range(halves):
        middle = bars.device + (half + 0.5) / halves
        own = np.flatnonzero((bars.top < middle) & (middle < bars.bottom))
        row = (bars.device[own] * halves + half) * columns
        result[row + np.minimum(left[own].astype(np.int64), columns - 1)] = own
        # cells row + first, row + first + 1, … of every bar
        offset = np.arange(count[own].sum()) - np.repeat(np.cumsum(count[own]) - count[own], count[own])
        result[np.repeat(row + first[own], count[own]) + offset] = np.repeat(own, count[own])
    return result.reshape(-1, columns)


def outline(group: Group, usual: float, many: float) -> tuple[str, float]:
    """Colour and width in points of a bar's outline; *usual* is how long bars are in points, *many* how many cover each other.

    It separates wide bars; in the bar's own colour it keeps a bar that is thinner than a pixel visible. Bars of a kind that are
    that many need no help, and outlines would cover their neighbours.
    """
    if usual >= 4:
        return palette.edge_color(group.color), 0.4
    return group.color, 0.0 if len(group.bars) > many else 0.5 if usual >= 0.5 else 1.0


def fitting_labels(bars: Scene, per_time: float, per_band: float, font: float) -> Iterator[tuple[str, float, float, float, str]]:
    """Text, middle in time and in bands, size and colour of the labels that fit into their bars; lengths in points, digits as wide as matplotlib's."""
    room, tall = (bars.end - bars.start) * per_time, (bars.bottom - bars.top) * per_band
    for group in bars.groups:
        color = palette.text_color(group.color)
        for bar in group.bars[(tall[group.bars] >= 7) & (room[group.bars] >= font)].tolist():
            label, size = bars.label(bar), min(font, tall[bar] - 1)
            if len(label) * 0.66 * size + 1.5 <= room[bar]:  # digits are 0.64 wide
                yield label, (bars.start[bar] + bars.end[bar]) / 2, (bars.top[bar] + bars.bottom[bar]) / 2, size, color


def layers(curve: MemoryCurve) -> tuple[Floats, list[tuple[str, Floats, Floats]]]:
    """Times, and per category that is ever held its lower and upper edge from each of them on; the last once more, for the end."""
    x, last = distinct(curve.times)
    held = [name for name in CATEGORIES if curve.categories[name][last].any()]
    edges = np.cumsum([np.zeros(len(last) + 1), *(curve.categories[name][np.append(last, last[-1])] for name in held)], axis=0)
    return x, [(name, edges[number], edges[number + 1]) for number, name in enumerate(held)]


def memory_curves(timeline: Timeline) -> list[MemoryCurve]:
    """One curve per device with no more points than a picture can show; nothing where nothing is ever held."""
    devices = timeline.schedule.num_devices
    curves = [thinned(timeline.memory(device), _MEMORY_POINTS // devices) for device in range(devices)]
    return curves if any(curve.peak for curve in curves) else []


def thinned(curve: MemoryCurve, points: int) -> MemoryCurve:
    """The points where something changes; where these are too many, the highest and the last of each short span of time."""
    levels = np.stack(list(curve.categories.values()))
    # the last of the changes at one moment, whose times may differ by the dust of float sums
    last = np.append(np.diff(curve.times) > 1e-9 * (curve.times[-1] - curve.times[0]), True)
    keep = np.flatnonzero(last)
    keep = keep[np.append(True, (levels[:, keep[1:]] != levels[:, keep[:-1]]).any(axis=0))]
    if len(keep) > points:
        times, total = curve.times[keep], curve.total[keep]
        span = np.floor((times - times[0]) / (times[-1] - times[0]) * max(1, points // 2)).astype(np.int64)
        ends = np.append(np.flatnonzero(np.diff(span)), len(span) - 1)
        highest = np.lexsort((total, span))[ends]
        keep = keep[np.union1d(highest, ends)]
    return MemoryCurve(curve.device, curve.times[keep], {name: values[keep] for name, values in curve.categories.items()}, curve.unit)
