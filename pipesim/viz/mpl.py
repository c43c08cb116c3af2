"""Pictures for papers, with matplotlib: the only file that imports it.

Figures are made directly, without pyplot, so nothing pops up and no state is left behind; only :func:`pyplot_axes`, for
``Timeline.plot()`` in notebooks, makes one that pyplot knows. One collection per kind and shade, never one artist per op.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from pipesim.errors import ScheduleError
from pipesim.files import write_atomically
from pipesim.memory import MemoryCurve
from pipesim.op import Kind
from pipesim.sweep import Row
from pipesim.units import format_bytes
from pipesim.viz import lanes as _lanes
from pipesim.viz import palette
from pipesim.viz.axes import printable, size_axis, time_axis
from pipesim.viz.emphasis import OTHERS, apart, peak_text, strong
from pipesim.viz.fronts import fronts
from pipesim.viz.overlay import BAND_EDGES, overlaid
from pipesim.viz.points import fitting_labels, layers, outline, rectangles, steps
from pipesim.viz.scene import Scene, bins, scene
from pipesim.viz.text import headline

if TYPE_CHECKING:
    from pipesim.timeline import Timeline

__all__ = ["figure", "gantt", "memory", "overlay", "pareto", "pyplot_axes", "save", "save_overlay"]

Floats = NDArray[np.float64]

# Bars that get a label where it fits; bars from which on SVG and PDF hold an image of them; bars that are drawn one by one.
_LABELLED, _VECTOR, _SINGLE = 2_000, 10_000, 500_000

_FORMATS = ("png", "svg", "pdf")
_DPI = 150
_WIDTH = 11.0  # inches
_BAND = 0.1  # how much of the text's colour idle bands have
_FONT = 7.0  # points, of the labels in bars


def gantt(timeline: Timeline, ax: Axes | None = None, *, labels: bool = True, lanes: bool | None = None) -> Axes:
    """Draws a Gantt chart, device 0 on top, time counted from the first start.

    Args:
        timeline: The run.
        ax: Where to draw; None makes a figure of its own, ``gantt(...).figure``. It may be changed afterwards.
        labels: Whether bars carry the number of their microbatch, where it fits.
        lanes: Whether communication has lanes below compute; None for where it has times of its own. Not above 500,000 bars.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> axes = gantt(simulate(generate("gpipe", 2, 2), UniformCosts(forward=1, backward=2)))
        >>> axes.get_xlabel(), len(axes.collections)
        ('time (slots)', 3)
    """
    return _gantt(timeline, _bars(timeline, lanes), ax, labels)


def _bars(timeline: Timeline, lanes: bool | None) -> Scene:
    bars = scene(timeline, lanes=_lanes.shown(timeline, lanes))
    return bars if len(bars) <= _SINGLE else scene(timeline)


def _gantt(timeline: Timeline, bars: Scene, ax: Axes | None = None, labels: bool = True) -> Axes:
    title = f"{printable(timeline.schedule.name)}\n{headline(timeline)}"
    return _drawn(bars, ax, labels, [f"device {device}" for device in range(bars.num_devices)], title, [bars.compute_band])


def overlay(sim: Timeline, run: Timeline, ax: Axes | None = None, *, labels: bool = True) -> Axes:
    """Draws two runs on one axis of time, per device the simulated one above the measured one; dotted lines are their ends.

    Args:
        sim: What stands above.
        run: What stands below; of several steps that of median makespan.
        ax: Where to draw; None makes a figure of its own.
        labels: Whether bars carry the number of their microbatch, where it fits.

    Raises:
        ScheduleError: One is in seconds and the other in slots.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> schedule = generate("1f1b", 2, 4)
        >>> axes = overlay(*(simulate(schedule, UniformCosts(forward=forward, backward=2)) for forward in (1, 1.5)))
        >>> [label.get_text() for label in axes.get_yticklabels()]
        ['device 0  first', 'second', 'device 1  first', 'second']
    """
    both = overlaid(sim, run)
    ax = _drawn(both.bars, ax, labels, both.bands, both.title, BAND_EDGES)
    for one in both.runs:
        ax.axvline(one.makespan * time_axis(both.bars.span, one.unit)[0], color=mpl.rcParams["text.color"], linestyle=":", linewidth=0.8)
    return ax


def save_overlay(sim: Timeline, run: Timeline, path: str | os.PathLike[str]) -> None:
    """Writes :func:`overlay` as a picture; see :func:`save`."""
    drawn: Any = overlay(sim, run).figure
    save(drawn, path)


def _drawn(bars: Scene, ax: Axes | None, labels: bool, names: Sequence[str], title: str, edges: Sequence[tuple[float, float]]) -> Axes:
    """The bars, the names of their bands, and a legend of the kinds; the edges of bands repeat."""
    if ax is None:
        ax = Figure(figsize=(_WIDTH, _height(bars) + 1.2), layout="constrained").add_subplot()
    factor, unit = time_axis(bars.span, bars.unit)
    end = bars.span * factor or 1.0
    _bands(ax, bars.num_devices, end, edges)
    if len(bars) > _SINGLE:
        _image(ax, bars, end)
    else:
        _collections(ax, bars, factor)
    # an image sets limits of its own
    ax.set(xlim=_limits(end), ylim=(bars.num_devices, 0), xlabel=f"time ({unit}){bars.note}")
    if labels and len(bars) <= _LABELLED:
        _labels(ax, bars, factor)
    _devices(ax, names, sum(edges[0]) / 2 if bars.lanes else 0.5)
    _heading(ax, title)
    shades = range(min(bars.num_chunks, palette.SHADES))
    entries: dict[str, tuple[Patch, ...]] = {}
    for kind in bars.kinds:
        own = shades if kind <= Kind.U else range(1)
        entries[palette.label(kind)] = tuple(Patch(color=palette.color(kind, shade, bars.num_chunks)) for shade in own)
    if len(shades) > 1:
        entries["lighter: later stage of its device"] = (Patch(alpha=0),)
    _legend(ax, list(entries.values()), list(entries))
    return ax


def pyplot_axes(timeline: Timeline, lanes: bool | None = None) -> Axes:
    """Returns Axes of a new pyplot figure, of the size that a Gantt chart of this run wants."""
    from matplotlib import pyplot

    size = _WIDTH, _height(_bars(timeline, lanes)) + 1.2
    return pyplot.figure(figsize=size, layout="constrained").add_subplot()


def memory(timeline: Timeline, ax: Axes | None = None, device: int | None = None) -> Axes:
    """Draws what devices hold over time, and their capacity where it is limited.

    Of more than four devices the one with the highest peak, the first, the middle and the last are drawn strongly, each with its
    name and its peak beside it, and the others thin and grey.

    Args:
        timeline: The run.
        ax: Where to draw; None makes a figure of its own.
        device: One device, by category; None for the totals of all devices.

    Raises:
        ScheduleError: There is no such device.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> run = simulate(generate("1f1b", 4, 8), UniformCosts(forward=1, backward=2))
        >>> memory(run).get_ylabel(), memory(run, device=0).get_title(loc="left")
        ('memory (units)', 'device 0: peak_memory 4 units')
    """
    devices = range(timeline.schedule.num_devices) if device is None else [device]
    curves = [timeline.memory(number) for number in devices]
    if ax is None:
        ax = Figure(figsize=(_WIDTH, 3.2), layout="constrained").add_subplot()
    time, time_unit = time_axis(timeline.makespan, timeline.unit)
    top = max(curve.peak for curve in curves)
    capacities = np.unique(timeline.capacity[list(devices)])
    capacities = capacities[np.isfinite(capacities)]
    size, size_unit = size_axis(max([top, *capacities.tolist()]), timeline.unit)
    end = timeline.makespan * time
    ax.set(xlim=_limits(end or 1.0), ylim=(0, max(top, capacities.max(initial=0.0)) * size * 1.08 or 1.0))
    ax.set(xlabel=f"time ({time_unit})", ylabel=f"memory ({size_unit})")

    highest = curves[int(np.argmax([curve.peak for curve in curves]))].device
    handles = _totals(ax, timeline, curves, time, size) if device is None else _by_category(ax, timeline, curves[0], time, size)
    for limit in capacities.tolist():
        label = f"capacity {format_bytes(limit, timeline.unit)}"
        handles.append(ax.axhline(limit * size, linestyle="--", color=mpl.rcParams["text.color"], linewidth=1, label=label))
    _heading(ax, f"{'memory, most on ' if len(curves) > 1 else ''}device {highest}: peak_memory {peak_text(top, timeline.unit)}")
    if handles:
        _legend(ax, handles, [handle.get_label() for handle in handles])
    return ax


_memory_of = memory  # its name is that of an option below


def figure(timeline: Timeline, *, memory: bool = True, lanes: bool | None = None) -> Figure:
    """Draws the Gantt chart and, on the same time axis below, what every device holds.

    Args:
        timeline: The run.
        memory: Whether to draw what devices hold.
        lanes: As of :func:`gantt`.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> drawn = figure(simulate(generate("gpipe", 2, 2), UniformCosts(forward=1, backward=2)))
        >>> [axes.get_ylabel() for axes in drawn.axes]
        ['', 'memory (units)']
    """
    bars = _bars(timeline, lanes)
    heights = [_height(bars) + 1.2, 3.0][: 1 + memory]
    drawn = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    upper, *lower = drawn.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    _gantt(timeline, bars, upper)
    for ax in lower:
        ax.sharex(upper)
        _memory_of(timeline, ax)
    return drawn


def save(drawn: Timeline | Figure, path: str | os.PathLike[str]) -> None:
    """Writes a picture as PNG, SVG or PDF, by the ending of its name; the same run is the same file.

    Args:
        drawn: A run, drawn by :func:`figure`, or any figure, such as ``gantt(timeline).figure``.
        path: Where to. Nothing half-written is left there.

    Raises:
        ScheduleError: The name ends in something else.
        OSError: The file cannot be written.
    """
    form = Path(path).suffix.lower().removeprefix(".")
    if form not in _FORMATS:
        raise ScheduleError(f"{os.fspath(path)!r} names no format that pictures are written in; right is a name that ends in .png, .svg or .pdf")
    if not isinstance(drawn, Figure):
        drawn = figure(drawn)
    buffer = io.BytesIO()
    # Without dates and random ids files are reproducible; fonttype 42 because journals refuse Type 3 fonts.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    with mpl.rc_context({"svg.hashsalt": "pipesim", "pdf.fonttype": 42}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)  # a name in a script that the font lacks
        drawn.savefig(buffer, format=form, dpi=_DPI, metadata=metadata)
    write_atomically(path, buffer.getvalue())


def pareto(rows: Sequence[Row], ax: Axes | None = None, *, by: Sequence[str] = ()) -> Axes:
    """Draws throughput against peak memory: a dot per row of a sweep, and the Pareto front as steps with the names of its rows.

    Args:
        rows: From :func:`pipesim.run_sweep`; failures are left out.
        ax: Where to draw; None makes a figure of its own.
        by: Columns that are given and not chosen, as for :func:`pipesim.pareto_front`: a front for each of their values.

    Raises:
        ScheduleError: There is nothing to draw.

    Examples:
        >>> from pipesim import grid, run_sweep
        >>> axes = pareto(run_sweep(grid(["1f1b", "gpipe", "naive"], devices=4, microbatches=8)))
        >>> axes.get_ylabel(), [text.get_text() for text in axes.texts]
        ('throughput (microbatches / slot)', ['naive, p = 4, m = 8', '1f1b, p = 4, m = 8'])
    """
    shown, groups, labels = fronts(rows, by)
    if ax is None:
        ax = Figure(figsize=(8.0, 5.0), layout="constrained").add_subplot()
    ax.scatter([dot.x for dot in shown], [dot.y for dot in shown], s=8, color=mpl.rcParams["text.color"], alpha=0.25, linewidths=0)
    colors = mpl.colormaps["viridis"](np.linspace(0.0, 0.87, len(groups)))
    handles: list[Any] = []
    for (name, own), color in zip(groups.items(), colors, strict=True):
        points = [dot.x for dot in own], [dot.y for dot in own]
        handles += ax.step(*points, where="post", marker="o", markersize=4, linewidth=1, color=color, label=name)
        if len(groups) == 1 and len(own) <= 20:
            for number, dot in enumerate(own):
                below = number % 2  # neighbours would write over each other
                ax.annotate(dot.name, (dot.x, dot.y), xytext=(4, -10 if below else 4), textcoords="offset points", fontsize=_FONT)
    ax.set(xlabel=labels[0], ylabel=labels[1], xlim=(0, None), ylim=(0, None))
    ax.margins(0.1)
    _heading(ax, f"Pareto front of {len(shown)} configurations")
    if len(groups) > 1:
        chosen = [handles[i] for i in np.unique(np.linspace(0, len(handles) - 1, 8).astype(int))]
        _legend(ax, chosen, [handle.get_label() for handle in chosen])
    return ax


# -- parts -------------------------------------------------------------------------------------------------------------


def _totals(ax: Axes, timeline: Timeline, curves: Sequence[MemoryCurve], time: float, size: float) -> list[Any]:
    """A line per device, in their order, and names beside the strong ones; the highest lies above the others, over its faint area."""
    looks = strong(curves)
    for curve, look in zip(curves, looks, strict=True):
        x, y = steps(curve.times - timeline.first_start, curve.total)
        x, y = np.append(x * time, timeline.makespan * time), np.append(y, y[-1]) * size
        ax.plot(x, y, color=look.color, linewidth=look.width, zorder=2 + look.width / 10, label=f"device {curve.device}")
        if look.highest and len(curves) > 1:
            ax.fill_between(x, 0, y, color=look.color, alpha=0.1, linewidth=0, zorder=1)
    named = [(curve, look) for curve, look in zip(curves, looks, strict=True) if look.text]
    places = apart([curve.peak * size for curve, _ in named], ax.get_ylim()[1] * 11 / _points(ax)[1])
    for (curve, look), place in zip(named, places, strict=True):
        ax.scatter([(curve.peak_time - timeline.first_start) * time], [curve.peak * size], s=12, color=look.color, zorder=3)
        words: dict[str, Any] = {"color": look.color, "weight": "bold" if look.highest else "normal", "fontsize": 8, "va": "center"}
        ax.annotate(look.text, (1, place), (4, 0), ax.get_yaxis_transform(), "offset points", **words)
    others = len(curves) - len(named)
    return [Line2D([], [], color=OTHERS, label=f"{others} other device{'s' if others > 1 else ''}")] if others else []


def _by_category(ax: Axes, timeline: Timeline, curve: MemoryCurve, time: float, size: float) -> list[Any]:
    """Areas on each other."""
    x, areas = layers(curve)
    edges, handles = np.append(x - timeline.first_start, timeline.makespan) * time, []
    for category, low, high in areas:
        color = palette.MEMORY_COLORS[category]
        handles.append(ax.fill_between(edges, low * size, high * size, step="post", color=color, linewidth=0, label=category))
    ax.scatter([(curve.peak_time - timeline.first_start) * time], [curve.peak * size], s=10, color=mpl.rcParams["text.color"], zorder=3)
    return handles


def _height(bars: Scene) -> float:
    """Inches for the rows."""
    return float(np.clip((0.52 * _lanes.growth(bars) if bars.lanes else 0.32) * bars.num_devices, 0.8, 10.0))


def _points(ax: Axes) -> tuple[float, float]:
    """Width and height of the axes as they are now; the layout makes them larger rather than smaller."""
    box, dpi = ax.get_window_extent(), ax.figure.dpi
    return box.width / dpi * 72, box.height / dpi * 72


def _limits(end: float) -> tuple[float, float]:
    """A little more than the run, or the frame would hide an op of no length at its end."""
    return -0.004 * end, 1.004 * end


def _bands(ax: Axes, num_devices: int, end: float, edges: Sequence[tuple[float, float]]) -> None:
    """A faint band per device: where it shows, the device is idle. In the text's colour, so that dark styles work."""
    device, edge = np.arange(num_devices), np.array(edges)
    top, bottom = (device + edge[device % len(edge), side] for side in (0, 1))
    vertices = rectangles(np.zeros(num_devices), np.full(num_devices, end), top, bottom)
    ax.add_collection(PolyCollection(vertices, facecolors=mpl.rcParams["text.color"], alpha=_BAND, linewidths=0, zorder=0), autolim=False)


def _collections(ax: Axes, bars: Scene, factor: float) -> None:
    """One collection per kind and shade."""
    width, _ = _points(ax)
    length = (bars.end - bars.start) * (width / bars.span if bars.span else 0.0)
    for group in bars.groups:
        own = group.bars
        color, line = outline(group, float(np.median(length[own])), bars.num_devices * width / 72 * _DPI / 3)
        corners = rectangles(bars.start[own] * factor, bars.end[own] * factor, bars.top[own], bars.bottom[own])
        look: dict[str, Any] = {"facecolors": group.color, "edgecolors": color, "linewidths": line, "rasterized": len(bars) > _VECTOR}
        ax.add_collection(PolyCollection(corners, label=palette.KIND_LABELS[group.kind], **look), autolim=False)


def _image(ax: Axes, bars: Scene, end: float) -> None:
    """An image with several columns per pixel."""
    table = bins(bars, 4_000)
    # Opaque, with the colours of idle bands and of the margins at the end: smoothing would mix transparent black into the bars.
    background, text = to_rgba_array([ax.get_facecolor(), mpl.rcParams["text.color"]])
    idle, margin = -2, -1
    colors = np.ones((len(Kind) * palette.SHADES + 2, 4))
    colors[[idle, margin]] = (1 - _BAND) * background + _BAND * text, background
    for code in np.unique(table[table >= 0]).tolist():
        colors[code] = to_rgba_array(palette.color(Kind(code // palette.SHADES), code % palette.SHADES, bars.num_chunks))[0]
    # ten lines per device, of which the first and the last are its margins
    lines = np.repeat(np.where(table < 0, idle, table), 5, axis=0)
    lines[0::10] = lines[9::10] = margin
    colors[:, 3] = 1
    ax.imshow((colors[lines] * 255).astype(np.uint8), extent=(0, end, bars.num_devices, 0), aspect="auto", zorder=1)


def _labels(ax: Axes, bars: Scene, factor: float) -> None:
    width, height = _points(ax)
    for text, x, y, size, color in fitting_labels(bars, width / (bars.span or np.inf), height / max(1, bars.num_devices), _FONT):
        ax.text(x * factor, y, text, ha="center", va="center", fontsize=size, color=color, clip_on=True)


def _devices(ax: Axes, names: Sequence[str], middle: float) -> None:
    """The devices' names, as many as can be read."""
    row = _points(ax)[1] / max(1, len(names))
    shown = np.arange(0, len(names), max(1, int(np.ceil(9 / row))))
    ax.set_yticks(shown + middle, [names[band] for band in shown.tolist()], fontsize=8)
    ax.tick_params(axis="y", length=0)


def _heading(ax: Axes, text: str) -> None:
    ax.set_title(text, loc="left", fontsize=9, pad=20, parse_math=False)  # between it and the axes stands the legend


def _legend(ax: Axes, handles: list[Any], names: list[Any]) -> None:
    """Outside, above the axes."""
    place: dict[str, Any] = {"bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "ncols": max(1, len(handles)), "frameon": False}
    together = {tuple: HandlerTuple(ndivide=None, pad=0)}
    ax.legend(handles, names, loc="lower left", handler_map=together, fontsize=8, handlelength=1.4, columnspacing=1.4, **place)
