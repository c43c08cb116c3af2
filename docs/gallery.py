"""Builds the gallery: a page per schedule, and one table of all of them at the same size.

    python docs/gallery.py out/gallery          (or: make gallery)

Everything is generated from the code: the text picture and the docstring, a Gantt chart with memory curves, and the figures.
"""

from __future__ import annotations

import html
import inspect
import sys
from pathlib import Path
from typing import Any

from pipesim import Timeline, UniformCosts, available, generate, simulate
from pipesim.errors import ScheduleError
from pipesim.files import write_atomically
from pipesim.registry import Generator
from pipesim.viz import svg, text

DEVICES, MICROBATCHES = 4, 8
# pipad has its three devices, whatever the size of the others.
SIZES = {"pipad": (3, MICROBATCHES)}

STYLE = """
body { font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 92rem; padding: 0 1rem; line-height: 1.45; }
pre { overflow: auto; background: #8881; padding: .8rem; border-radius: 6px; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .25rem .45rem; border-bottom: 1px solid #8884; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; }
figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { body { background: #16181d; color: #e6e6e6; } a { color: #8ab4f8; } }
"""


def names() -> dict[Generator, list[str]]:
    """Every generator with its names, the first one first."""
    result: dict[Generator, list[str]] = {}
    for name, generator in available().items():
        result.setdefault(generator, []).append(name)
    return result


def page(title: str, body: str) -> str:
    """One HTML page, without anything from elsewhere."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><body>{body}</body></html>\n"
    )


def row(name: str, run: Timeline) -> list[str]:
    """The figures of one schedule in the table."""
    schedule = run.schedule
    static = run.footprint.static
    weights = static["weights"] + static["weight versions"]
    delay = run.figures().get("update_delay")
    rate = run.span_bubble_rate
    return [
        name,
        f"{run.makespan:g}",
        f"{run.bubble_fraction:.3f}",
        f"{run.bubble_overhead:.3f}",
        "" if rate is None else f"{rate:.3f}",
        " ".join(f"{run.memory(device).categories['activations'].max():g}" for device in range(schedule.num_devices)),
        " ".join(f"{value:g}" for value in weights),
        str(len(run.messages)),
        " ".join(map(str, delay)) if delay else "0",
    ]


HEADER = [
    "schedule",
    "makespan",
    "bubble_fraction",
    "bubble_overhead",
    "span_bubble_rate",
    "activation memory",
    "weights",
    "messages",
    "update delay",
]


def schedule_page(all_names: list[str], generator: Generator, run: Timeline) -> str:
    """The page of one schedule."""
    first, *others = all_names
    parts = [f'<p><a href="index.html">All schedules</a></p><h1>{html.escape(first)}</h1>']
    if others:
        parts.append(f"<p>Also: {html.escape(', '.join(others))}.</p>")
    parts.append(f"<pre>{html.escape(inspect.getdoc(generator) or '')}</pre>")
    parts.append(f"<h2>{run.schedule.num_devices} devices, {MICROBATCHES} microbatches, F = I = W = 1 per device</h2>")
    parts.append(f"<figure>{svg.timeline_svg(run)}</figure>")
    parts.append(f"<pre>{html.escape(text.gantt(run, width=400))}</pre><pre>{html.escape(str(run.schedule))}</pre>")
    parts.append(f"<h2>Memory</h2><figure>{memory_svg(run)}</figure>")
    parts.append(f"<pre>{html.escape(run.summary())}</pre>")
    return page(f"{first}: pipesim", "".join(parts))


def memory_svg(run: Timeline) -> str:
    """The memory curves, drawn by matplotlib, as inline SVG."""
    import io

    from matplotlib.figure import Figure

    from pipesim.viz import mpl

    figure = Figure(figsize=(11, 3), layout="constrained")
    mpl.memory(run, figure.subplots())
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    drawn = buffer.getvalue()
    return drawn[drawn.index("<svg") :]


def build(target: Path) -> list[str]:
    """Writes the gallery and returns what could not be drawn, with the reason."""
    target.mkdir(parents=True, exist_ok=True)
    table: list[list[str]] = []
    left_out = []
    for generator, all_names in names().items():
        name = all_names[0]
        devices, microbatches = SIZES.get(name, (DEVICES, MICROBATCHES))
        # The same model for all: F = I = W = 1 per device and microbatch, half of it in each of two chunks.
        costs = UniformCosts(forward=1, input_grad=1, weight_grad=1, weights=1, activation=1, stages=devices, microbatches=microbatches)
        try:
            run = simulate(generate(name, devices, microbatches), costs)
        except ScheduleError as error:
            left_out.append(f"{name}: {error}")
            continue
        write_atomically(target / f"{name}.html", schedule_page(all_names, generator, run))
        table.append(row(name, run))
    write_atomically(target / "index.html", index(table))
    return left_out


def index(table: list[list[str]]) -> str:
    """The page with the table of all schedules."""

    def cells(values: list[Any], tag: str) -> str:
        return "".join(f"<{tag}>{value}</{tag}>" for value in values)

    rows = [
        f'<tr><td><a href="{html.escape(values[0])}.html">{html.escape(values[0])}</a></td>{cells([html.escape(v) for v in values[1:]], "td")}</tr>'
        for values in table
    ]
    body = (
        f"<h1>Pipeline schedules</h1><p>All at {DEVICES} devices and {MICROBATCHES} microbatches with F = I = W = 1 per device and microbatch "
        f"(a chunk takes its share), free links. Activations and weights in units of one device's share of the model, per device.</p>"
        f'<div class="wide"><table><tr>{cells(HEADER, "th")}</tr>{"".join(rows)}</table></div>'
    )
    return page("Pipeline schedules: pipesim", body)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out/gallery")
    for reason in build(folder):
        print(f"left out {reason}", file=sys.stderr)
    print(f"wrote {folder / 'index.html'}")
