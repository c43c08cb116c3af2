"""Interactive timelines with Plotly: a figure for notebooks, and HTML pages that need nothing else. The only file that imports Plotly.

Browsers draw one element per bar, which is slow from some thousands on, so there are three ways to draw the same scene:

* up to :data:`BARS` bars: bars, one trace per kind;
* up to :data:`PATHS`: one path per kind, and under the pointer an invisible heatmap that knows which op is where;
* above: only a heatmap, of what fills most of each short span of time, and a note that says so.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from pipesim.errors import ScheduleError
from pipesim.files import write_atomically
from pipesim.memory import MemoryCurve
from pipesim.op import Kind
from pipesim.timeline import Timeline
from pipesim.viz import lanes as _lanes
from pipesim.viz import palette
from pipesim.viz.axes import printable, size_axis, time_axis
from pipesim.viz.emphasis import strong
from pipesim.viz.hover import Hover
from pipesim.viz.overlay import overlaid
from pipesim.viz.points import bar_in_cell, memory_curves
from pipesim.viz.scene import Group, Scene, bins, scene
from pipesim.viz.text import counted, headline

__all__ = ["BARS", "CONFIG", "PATHS", "TEXTS", "figure", "overlay", "write_html", "write_overlay"]

Floats = NDArray[np.float64]

TEXTS = 2_000  # bars, above which their texts are left out
BARS = 5_000  # bars, above which paths are drawn instead
PATHS = 500_000  # bars, above which only a heatmap is drawn
_COLUMNS = 2_800  # of a heatmap: about the pixels of a screen
_CELLS = 120_000  # of a heatmap, at most
_FEW = 250  # bars of one look on a device, of which the outlines do not cover each other

# No button that uploads the user's data to a cloud, which Plotly 7 shows by default.
CONFIG: dict[str, Any] = {"showSendToCloud": False, "displaylogo": False, "responsive": True}

# Grey on no background reads on white pages and on dark ones.
_INK, _GRID, _IDLE = "#777777", "rgba(128,128,128,0.25)", "rgba(128,128,128,0.12)"


def figure(timeline: Timeline, *, title: str | None = None, memory: bool = True, lanes: bool | None = None) -> go.Figure:
    """Returns the Gantt chart of a run, device 0 on top, with the memory curves below on the same axis of time.

    Args:
        timeline: The run.
        title: What stands above it; by default the schedule, its size and its figures.
        memory: Whether to show the memory curves (where anything is held at all).
        lanes: Whether communication has lanes below each device's compute; None for where it has times of its own. Runs of more
            than :data:`PATHS` bars have none.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> shown = figure(simulate(generate("1f1b", devices=4, microbatches=8), UniformCosts(forward=1, backward=2)))
        >>> [trace.name for trace in shown.data][:3], shown.layout.xaxis.title.text
        (['F forward', 'B backward', 'device 0'], 'time (slots)')
    """
    bars = scene(timeline, lanes=_lanes.shown(timeline, lanes))
    bars = bars if len(bars) <= PATHS else scene(timeline)
    scale, unit = time_axis(bars.span, bars.unit)
    result = go.Figure()
    if len(bars) <= BARS:
        _add_bars(result, Hover(bars, [timeline]), scale)
    else:
        # what the pointer finds is compute
        _add_heatmap(result, Hover(scene(timeline) if bars.lanes else bars, [timeline]), scale, bars)
    curves = memory_curves(timeline) if memory else []
    names = [f"device {device}" for device in range(bars.num_devices)]
    _lay_out(result, bars, names, scale, unit, _title(timeline) if title is None else title, with_memory=bool(curves))
    if curves:
        _add_memory(result, timeline, curves, scale, unit)
    return result


def overlay(sim: Timeline, run: Timeline) -> go.Figure:
    """Returns both runs on one axis of time, per device the simulated one above the measured one.

    Args:
        sim: What stands above.
        run: What stands below; of several steps that of median makespan.

    Raises:
        ScheduleError: One is in seconds and the other in slots.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> schedule = generate("1f1b", 2, 4)
        >>> shown = overlay(*(simulate(schedule, UniformCosts(forward=forward, backward=2)) for forward in (1, 1.5)))
        >>> list(shown.layout.yaxis.ticktext)
        ['device 0  first', 'second', 'device 1  first', 'second']
    """
    both = overlaid(sim, run)
    bars, hover = both.bars, Hover(both.bars, both.runs, both.names)
    scale, unit = time_axis(bars.span, bars.unit)
    result = go.Figure()
    (_add_bars if len(bars) <= BARS else _add_heatmap)(result, hover, scale)
    first, _, rest = html.escape(both.title, quote=False).partition("\n")
    _lay_out(result, bars, both.bands, scale, unit, f"<b>{first}</b><br>{rest}", with_memory=False)
    result.update_layout(margin={"l": 140, "t": 80}, xaxis={"range": [0, bars.span * scale * 1.004 or 1]})
    for one in both.runs:
        result.add_vline(x=one.makespan * scale, line={"color": _INK, "width": 1, "dash": "dot"})
    return result


def write_html(
    timelines: Timeline | Sequence[Timeline], path: str | os.PathLike[str], *, inline: bool = True, memory: bool = True, lanes: bool | None = None
) -> None:
    """Writes one page with the charts of one or several runs.

    Args:
        timelines: A run, or several, one below the other.
        path: Where to.
        inline: Whether plotly.js (4.8 MB) is part of the page, once. Without it the page is small and needs the network.
        memory: Whether to show the memory curves.
        lanes: As of :func:`figure`.

    Raises:
        ScheduleError: There is no run to show.
        OSError: The file cannot be written. Nothing half-written is left.

    Examples:
        >>> import pathlib, tempfile
        >>> from pipesim import UniformCosts, generate, simulate
        >>> run = simulate(generate("gpipe", devices=1, microbatches=1), UniformCosts())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_html(run, pathlib.Path(folder, "run.html"), inline=False)
        ...     pathlib.Path(folder, "run.html").stat().st_size < 10_000
        True
    """
    runs = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    if not runs:
        raise ScheduleError("there is no run to write; give one Timeline or several")
    names = dict.fromkeys(run.schedule.name for run in runs)
    _write_page((figure(run, memory=memory, lanes=lanes) for run in runs), ", ".join(names), path, inline)


def write_overlay(sim: Timeline, run: Timeline, path: str | os.PathLike[str], *, inline: bool = True) -> None:
    """Writes one page with :func:`overlay`; see :func:`write_html`."""
    names = dict.fromkeys((sim.schedule.name, run.schedule.name))
    _write_page([overlay(sim, run)], ", ".join(names), path, inline)


def _write_page(figures: Iterable[go.Figure], title: str, path: str | os.PathLike[str], inline: bool) -> None:
    parts = []
    library: bool | str = True if inline else "cdn"
    for number, shown in enumerate(figures):
        # a fixed id: the same run is the same file
        parts.append(shown.to_html(CONFIG, include_plotlyjs=library, full_html=False, validate=False, div_id=f"timeline-{number}"))
        library = False
    write_atomically(path, _PAGE.format(title=html.escape(printable(title)), body="\n".join(parts)))


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0.5rem; background: #ffffff; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #16181c; }} }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def _title(timeline: Timeline) -> str:
    """Plotly reads a few tags, so what a user named is escaped."""
    schedule = timeline.schedule
    counts = ((schedule.num_devices, "device"), (schedule.num_microbatches, "microbatch"), (timeline.steps, "step"))
    size = [counted(*count) for count in counts]
    name = html.escape(printable(schedule.name), quote=False)
    return f"<b>{name}</b>, {', '.join(size if timeline.steps > 1 else size[:2])} · {headline(timeline)}"


# -- ops ---------------------------------------------------------------------------------------------------------------


def _group_name(group: Group, bars: Scene) -> str:
    name = palette.KIND_LABELS[group.kind]
    if bars.num_chunks == 1 or group.kind > Kind.U:
        return name
    return f"{name}, chunk {group.shade}" + (f", {group.shade + palette.SHADES}, …" if bars.num_chunks > palette.SHADES else "")


def _add_bars(target: go.Figure, hover: Hover, scale: float) -> None:
    bars = hover.bars
    height = np.round(bars.bottom - bars.top, 6)  # without the dust of 7.9 - 7.1
    for group in bars.groups:
        own = group.bars
        heights = height[own]
        target.add_bar(
            orientation="h",
            base=bars.start[own] * scale,
            x=(bars.end[own] - bars.start[own]) * scale,
            y=(bars.top[own] + bars.bottom[own]) / 2,
            width=float(heights[0]) if (heights == heights[0]).all() else heights,
            name=_group_name(group, bars),
            marker={"color": group.color, "line": {"color": palette.edge_color(group.color), "width": 0.5}},
            hovertext=[hover.text(bar) for bar in own.tolist()],
            hoverinfo="text",
            text=[bars.label(bar) for bar in own.tolist()] if len(bars) <= TEXTS else None,
            textposition="inside" if len(bars) <= TEXTS else "none",
            insidetextanchor="middle",
            textangle=0,
            insidetextfont={"color": palette.text_color(group.color)},
        )


def _add_heatmap(target: go.Figure, hover: Hover, scale: float, drawn_bars: Scene | None = None) -> None:
    """What many bars are: paths under an invisible heatmap, or a visible one. What is drawn may be more than what can be pointed at."""
    bars = hover.bars
    every = bars if drawn_bars is None else drawn_bars
    halves = 2 if bars.halved.any() else 1
    rows = bars.num_devices * halves
    columns = max(1, min(_COLUMNS, _CELLS // rows))
    bar = bar_in_cell(bars, halves, columns)
    there = bar >= 0
    data = np.zeros((rows, columns, 3), np.float32)
    data[there] = np.stack([bars.start, bars.end, bars.end - bars.start], axis=1)[bar[there]] * scale
    z, drawn = np.where(there, np.float32(0), np.float32(np.nan)), {"opacity": 0}
    if len(bars) > PATHS:
        z, drawn = _binned(target, bars, halves, columns)
    else:
        shapes = [_path(group, every, scale) | {"legendrank": rank} for rank, group in enumerate(every.groups, 1)]
        # Where bars are thinner than a pixel, what is drawn later covers what is below: the kind that takes least time comes last.
        time = [float((every.end - every.start)[group.bars].sum()) for group in every.groups]
        target.update_layout(shapes=[shapes[number] for number in np.argsort(time)[::-1]])
    unit = time_axis(bars.span, bars.unit)[1]
    width = bars.span * scale / columns
    target.add_heatmap(
        z=z,
        x0=width / 2,
        dx=width,
        y0=0.5 / halves,
        dy=1 / halves,
        text=_texts(hover, bar),
        customdata=data,
        hovertemplate=f"<b>%{{text}}</b><br>start %{{customdata[0]:.6~g}}, end %{{customdata[1]:.6~g}}, duration %{{customdata[2]:.6~g}} {unit}<extra></extra>",
        hoverongaps=False,
        showscale=False,
        **drawn,
    )


def _path(group: Group, bars: Scene, scale: float) -> dict[str, Any]:
    """All bars of a group as one shape: a browser draws it at once, and the legend switches it."""
    own = group.bars
    columns = (bars.start[own] * scale, bars.end[own] * scale, bars.top[own], bars.bottom[own])
    edges = zip(*(column.tolist() for column in columns), strict=True)
    pieces = [f"M{left:.8g},{top:.8g}H{right:.8g}V{bottom:.8g}H{left:.8g}Z" for left, right, top, bottom in edges]
    # The outline keeps visible what is thinner than a pixel. Where there are many it must let the neighbours through.
    edge = palette.edge_color(group.color)
    red, green, blue = (int(edge[place : place + 2], 16) for place in (1, 3, 5))
    opacity = 1 if len(own) < _FEW * bars.num_devices else 0.35
    return {
        "type": "path",
        "path": "".join(pieces),
        "fillcolor": group.color,
        "line": {"color": f"rgba({red},{green},{blue},{opacity})", "width": 0.5},
        "name": _group_name(group, bars),
        "showlegend": True,
        "layer": "below",
    }


def _texts(hover: Hover, bar: NDArray[np.int64]) -> NDArray[np.object_]:
    """(rows, columns) the op of each cell and, where it waited, for what. Short and without tags, for they make most of the page."""
    bars = hover.bars
    shown, cell = np.unique(bar, return_inverse=True)
    follows = np.append(False, (bars.device[1:] == bars.device[:-1]) & (bars.start[1:] <= bars.end[:-1]))
    texts = np.full(len(shown), "", dtype=object)
    for number, index in enumerate(shown.tolist()):
        if index >= 0:
            texts[number] = f"{hover.what(index)}, {hover.device(index)}"
            wait = "" if follows[index] else hover.why(index)
            if wait.startswith("waited"):
                texts[number] += ", " + wait.partition(" (sent")[0]
    return texts[cell.reshape(bar.shape)]


def _binned(target: go.Figure, bars: Scene, halves: int, columns: int) -> tuple[NDArray[np.float32], dict[str, Any]]:
    """What fills most of each cell, as colours."""
    codes = bins(bars, columns)[:: 3 - halves].astype(np.float32)
    groups = list(bars.groups)
    present = [int(group.kind) * palette.SHADES + group.shade for group in groups]
    z = np.full(codes.shape, np.nan, np.float32)
    for number, code in enumerate(present):
        z[codes == code] = number
    steps = len(groups)
    colors = [(edge / steps, group.color) for number, group in enumerate(groups) for edge in (number, number + 1)]
    for group in groups:
        target.add_scatter(
            x=[None], y=[None], mode="markers", marker={"symbol": "square", "size": 12, "color": group.color}, name=_group_name(group, bars)
        )
    note = f"{len(bars):,} ops: each of {columns:,} columns shows what fills most of it. Single ops: export a trace and open it in ui.perfetto.dev."
    target.add_annotation(text=note, xref="paper", yref="paper", x=0, y=1, xanchor="left", yanchor="bottom", showarrow=False)
    return z, {"colorscale": colors, "zmin": -0.5, "zmax": steps - 0.5, "ygap": 2}


# -- memory ------------------------------------------------------------------------------------------------------------


def _add_memory(target: go.Figure, timeline: Timeline, curves: Sequence[MemoryCurve], scale: float, unit: str) -> None:
    peak = max(curve.peak for curve in curves)
    factor, size = size_axis(peak, timeline.unit)
    held = [name for name in curves[0].categories if any(curve.categories[name].any() for curve in curves)]
    lines = "".join(f"<br>%{{customdata[{number}]:.4~g}} {name}" for number, name in enumerate(held))
    looks = strong(curves)
    others = [curve.device for curve, look in zip(curves, looks, strict=True) if not look.text]
    for curve, look in zip(curves, looks, strict=True):
        times = np.append(curve.times - timeline.first_start, timeline.makespan)
        total, parts = curve.total * factor, np.stack([curve.categories[name] for name in held], axis=1) * factor
        target.add_scatter(
            x=times * scale,
            y=np.append(total, total[-1]),
            customdata=np.concatenate([parts, parts[-1:]]).astype(np.float32),
            mode="lines",
            line={"shape": "hv", "width": max(1.0, 1.2 * look.width), "color": look.color},
            zorder=int(10 * look.width),
            name=f"device {curve.device}" if look.text else f"{len(others)} other device{'s' if len(others) > 1 else ''}",
            legendgroup="" if look.text else "others",
            legendrank=1000 if look.text else 1001,
            showlegend=bool(look.text) or curve.device == others[0],
            legend="legend2",
            yaxis="y2",
            hovertemplate=f"<b>device {curve.device}</b> at %{{x:.6~g}} {unit}: %{{y:.4~g}} {size}{lines}<extra></extra>",
        )
    target.layout.yaxis2.update(title=f"memory ({size})", range=[0, peak * factor * 1.05])


# -- layout ------------------------------------------------------------------------------------------------------------


def _lay_out(target: go.Figure, bars: Scene, names: Sequence[str], scale: float, unit: str, title: str, with_memory: bool) -> None:
    devices = bars.num_devices
    chart = devices * min(44.0, max(14.0, 480 / devices)) * (1.5 * _lanes.growth(bars) if bars.lanes else 1)
    gap, memory = (40, 180) if with_memory else (0, 0)
    inner = chart + gap + memory
    bottom = 1 - chart / inner
    every = -(-devices // 64)  # at most 64 names
    shown = np.arange(0, devices, every)
    line = {"gridcolor": _GRID, "linecolor": _GRID, "zeroline": False, "ticks": ""}
    target.update_layout(
        template="none",
        title={"text": title, "x": 0.01, "xanchor": "left", "font": {"size": 15}},
        font={"color": _INK},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor=_IDLE,
        height=inner + 110,
        margin={"l": 80, "r": 20, "t": 60, "b": 50},
        barmode="overlay",
        hovermode="closest",
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": _GRID, "activecolor": _INK},
        uniformtext={"minsize": 8, "mode": "hide"},
        legend={"y": 1, "yanchor": "top"},
        xaxis={
            "type": "linear",
            "title": f"time ({unit})",
            "range": [0, bars.span * scale or 1],
            "anchor": "y2" if with_memory else "y",
            **line,
        },
        yaxis={
            "domain": [bottom, 1],
            "range": [devices, 0],
            "tickvals": shown + (sum(bars.compute_band) / 2 if bars.lanes else 0.5),
            "ticktext": [names[device] for device in shown.tolist()],
            "showgrid": False,
            "fixedrange": True,
            **line,
        },
    )
    if with_memory:
        share = memory / inner
        target.update_layout(
            yaxis2={"domain": [0, share], "anchor": "x", "fixedrange": True, **line},
            legend2={"y": share, "yanchor": "top"},
        )
