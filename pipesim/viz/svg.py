"""Pictures as SVG text, without any library: the rich repr of a run and of a schedule in Jupyter.

Every picture has a white background of its own, because Jupyter shows it as an image, which does not learn the colours of
a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import numpy as np

from pipesim.errors import DeadlockError, ScheduleError
from pipesim.op import Kind
from pipesim.viz import lanes as _lanes
from pipesim.viz import palette
from pipesim.viz.axes import printable, ticks, time_axis
from pipesim.viz.scene import MARGIN, Scene, bins, grid, scene
from pipesim.viz.text import headline

if TYPE_CHECKING:
    from pipesim.schedule import Schedule
    from pipesim.timeline import Timeline

__all__ = ["schedule_svg", "timeline_svg"]

# Bars that get a label where it fits, and bars that are drawn one by one; more of them are drawn as what fills most of a pixel.
_LABELLED, _SINGLE = 2_000, 20_000

_LEFT, _WIDTH, _RIGHT = 70, 880, 14  # pixels
_FONT = 11
_DIGIT = 0.62 * _FONT  # generous: what does not fit for certain is left out


def timeline_svg(timeline: Timeline, lanes: bool | None = None) -> str:
    """A Gantt chart of a run.

    Args:
        timeline: The run.
        lanes: Whether communication has lanes below each device's compute; None for where it has times of its own. Runs of
            more than 20,000 bars have none.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> picture = timeline_svg(simulate(generate("gpipe", 2, 2), UniformCosts(forward=1, backward=2)))
        >>> picture[:4], picture.count("<path"), "bubble_fraction 0.3333" in picture
        ('<svg', 2, True)
    """
    bars = scene(timeline, lanes=_lanes.shown(timeline, lanes))
    return _picture(bars if len(bars) <= _SINGLE else scene(timeline), timeline.schedule.name, headline(timeline))


def schedule_svg(schedule: Schedule) -> str:
    """The order of a schedule: in time, with F = I = W = 1 and B = 2, if it runs; else op after op.

    Examples:
        >>> from pipesim import Schedule
        >>> schedule_svg(Schedule.from_text("0F0 0B0")).count("<path")
        2
    """
    counts = f"{schedule.num_devices} devices, {schedule.num_stages} stages, {schedule.num_microbatches} microbatches, weights {schedule.weights}"
    if len(schedule) > _SINGLE:  # a repr must be quick
        return _picture(grid(schedule), schedule.name, f"{counts} · order of the ops, not in time", timed=False)
    # Upward and lazy: only this repr of a schedule runs anything.
    from pipesim.costs import UniformCosts
    from pipesim.engine import simulate

    try:
        run = simulate(schedule, UniformCosts(forward=1, backward=2, input_grad=1, weight_grad=1))
    except (ScheduleError, DeadlockError) as error:
        reason = str(error).split("\n")[0]
        reason = reason if len(reason) <= 100 else reason[:97] + "..."
        return _picture(grid(schedule), schedule.name, f"{counts} · order only: {reason}", timed=False)
    return _picture(scene(run), schedule.name, f"{counts} · drawn with F = I = W = 1 and B = 2")


def _picture(bars: Scene, name: str, subtitle: str, timed: bool = True) -> str:
    row = min(28.0, max(6.0, 640 / max(1, bars.num_devices))) * (1.7 * _lanes.growth(bars) if bars.lanes else 1)
    factor, unit = time_axis(bars.span, bars.unit)
    top = 66
    bottom = top + row * bars.num_devices
    height = math.ceil(bottom + 42)
    width = _LEFT + _WIDTH + _RIGHT
    scale = _WIDTH / bars.span if bars.span else 0.0
    title = printable(name)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'style="max-width:100%;height:auto" font-family="Helvetica,Arial,sans-serif" font-size="{_FONT}" fill="#222222">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="18" font-size="14" font-weight="bold">{escape(_cut(title, 100))}</text>',
        f'<text x="8" y="35">{escape(_cut(printable(subtitle), 150))}</text>',
        *_legend(bars),
        *_rows(bars, top, row),
        *_axis(
            ticks(bars.span * factor, 12 if timed else min(12, int(bars.span))),
            top,
            bottom,
            scale / factor,
            f"time ({unit}){bars.note}" if timed else "position on the device",
        ),
        *(_single(bars, top, row, scale) if len(bars) <= _SINGLE else _binned(bars, top, row)),
    ]
    if len(bars) <= _LABELLED:
        parts += _labels(bars, top, row, scale)
    return "\n".join([*parts, "</svg>\n"])


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _legend(bars: Scene) -> Iterator[str]:
    """A swatch per colour, in all its shades where devices hold several stages."""
    x = float(_LEFT)
    shades = min(bars.num_chunks, palette.SHADES)
    seen = set()
    for kind in bars.kinds:
        if palette.KIND_COLORS[kind] in seen:
            continue
        seen.add(palette.KIND_COLORS[kind])
        for shade in range(1 if bars.lanes and kind > Kind.U else shades):
            yield f'<rect x="{x:g}" y="46" width="11" height="11" fill="{palette.color(kind, shade, bars.num_chunks)}"/>'
            x += 11
        label = palette.label(kind)
        yield f'<text x="{x + 5:g}" y="55.5">{label}</text>'
        x += 22 + 6 * len(label)
    if shades > 1:
        yield f'<text x="{x:g}" y="55.5" fill="#666666">lighter: later stage of its device</text>'


def _rows(bars: Scene, top: float, row: float) -> Iterator[str]:
    """Bands in the colour of idle time, and the devices' names, as many as can be read."""
    every = math.ceil(13 / row)
    upper, lower = bars.compute_band
    for device in range(bars.num_devices):
        y = top + row * (device + upper)
        yield f'<rect x="{_LEFT}" y="{y:.2f}" width="{_WIDTH}" height="{row * (lower - upper):.2f}" fill="{palette.IDLE}"/>'
        if device % every == 0:
            middle = top + row * (device + (upper + lower) / 2) + 4
            yield f'<text x="{_LEFT - 6}" y="{middle:.2f}" text-anchor="end">device {device}</text>'


def _axis(values: list[float], top: float, bottom: float, scale: float, label: str) -> Iterator[str]:
    for value in values:
        x = _LEFT + value * scale
        yield f'<line x1="{x:.2f}" y1="{top}" x2="{x:.2f}" y2="{bottom + 4:.2f}" stroke="#bbbbbb" stroke-width="0.6"/>'
        yield f'<text x="{x:.2f}" y="{bottom + 16:.2f}" text-anchor="middle">{value:g}</text>'
    yield f'<text x="{_LEFT + _WIDTH / 2}" y="{bottom + 33:.2f}" text-anchor="middle">{label}</text>'


def _single(bars: Scene, top: float, row: float, scale: float) -> Iterator[str]:
    """Every bar, one path per kind and shade."""
    x, width = _LEFT + bars.start * scale, (bars.end - bars.start) * scale
    y, height = top + bars.top * row, (bars.bottom - bars.top) * row
    for group in bars.groups:
        # The outline separates wide bars; in the bar's own colour it keeps a bar that is thinner than a pixel visible. Bars
        # of a kind that are that many need no help, and outlines would cover their neighbours.
        usual = float(np.median(width[group.bars]))
        dense = len(group.bars) > bars.num_devices * _WIDTH / 3
        stroke = palette.edge_color(group.color) if usual >= 5 else "none" if dense else group.color
        columns = (column[group.bars].tolist() for column in (x, y, width, height))
        path = "".join(f"M{a:.2f} {b:.2f}h{w:.2f}v{h:.2f}H{a:.2f}z" for a, b, w, h in zip(*columns, strict=True))
        yield f'<path fill="{group.color}" stroke="{stroke}" stroke-width="{0.6 if usual >= 1 else 1.5}" d="{path}"/>'


def _binned(bars: Scene, top: float, row: float) -> Iterator[str]:
    """What fills most of every half pixel: a thick dashed line per kind and shade, one path each."""
    count = 2 * _WIDTH
    table = bins(bars, count)
    halves, tall = (2, 0.5 - MARGIN) if (bars.bottom - bars.top < 0.5).any() else (1, 1 - 2 * MARGIN)
    paths: dict[int, list[str]] = {}
    for device in range(bars.num_devices):
        for half in range(halves):
            values = table[2 * device + half]
            borders = np.concatenate([[0], np.flatnonzero(np.diff(values)) + 1, [count]])
            begin, end, code = borders[:-1], borders[1:], values[borders[:-1]]
            y = top + row * (device + (0.5 if half else MARGIN) + tall / 2)
            for value in np.unique(code[code >= 0]).tolist():
                own = code == value
                gap = np.diff(begin[own], prepend=0) - np.concatenate([[0], (end - begin)[own][:-1]])
                dashes = "".join(f"m{skip} 0h{length}" for skip, length in zip(gap.tolist(), (end - begin)[own].tolist(), strict=True))
                paths.setdefault(value, []).append(f"M0 {y:.2f}{dashes}")
    yield f'<g transform="translate({_LEFT} 0) scale(0.5 1)" fill="none" stroke-width="{row * tall:.2f}">'
    for value, parts in sorted(paths.items()):
        kind, shade = divmod(value, palette.SHADES)
        yield f'<path stroke="{palette.color(Kind(kind), shade, bars.num_chunks)}" d="{"".join(parts)}"/>'
    yield "</g>"


def _labels(bars: Scene, top: float, row: float, scale: float) -> Iterator[str]:
    width, height = (bars.end - bars.start) * scale, (bars.bottom - bars.top) * row
    for group in bars.groups:
        texts = []
        for bar in group.bars.tolist():
            label = bars.label(bar)
            size = min(_FONT, height[bar] - 2)
            if size < 7 or len(label) * _DIGIT * size / _FONT + 3 > width[bar]:
                continue
            x = _LEFT + (bars.start[bar] + bars.end[bar]) / 2 * scale
            y = top + (bars.top[bar] + bars.bottom[bar]) / 2 * row + 0.36 * size
            small = "" if size == _FONT else f' font-size="{size:.1f}"'
            texts.append(f'<text x="{x:.2f}" y="{y:.2f}"{small}>{label}</text>')
        if texts:
            yield f'<g text-anchor="middle" fill="{palette.text_color(group.color)}">{"".join(texts)}</g>'
