"""``pipesim plot`` and ``pipesim export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipesim.cli.options import Request, is_run, request_options, schedule_command
from pipesim.errors import ScheduleError
from pipesim.lowering import crossings
from pipesim.timeline import Timeline

__all__ = ["draw_overlay", "export_command", "plot_command"]

_PLOTS = (".png", ".svg", ".pdf", ".html")
_EXPORTS = {
    "trace": "Chrome trace JSON, for ui.perfetto.dev",
    "csv": "PyTorch's CSV",
    "text": "the text form",
    "run": "the whole run, to load again",
    "html": "an interactive page",
}


_lanes_option = click.option(
    "--lanes/--no-lanes", default=None, help="Picture, page: lanes of communication below each device. Default: where it has times of its own."
)


@schedule_command("plot", "SCHEDULE|RUN")
@request_options
@_lanes_option
@click.option("--no-memory", is_flag=True, help="Without the memory curves.")
@click.option("--overlay", is_flag=True, help="Two runs on one axis of time: pipesim plot sim.json.gz run.json.gz --overlay.")
@click.option("--out", "-o", type=click.Path(dir_okay=False), help="Where to, .png, .svg, .pdf or .html. Default: SCHEDULE.png.")
def plot_command(words: tuple[str, ...], lanes: bool | None, no_memory: bool, overlay: bool, out: str | None, **values: Any) -> None:
    """Draw a Gantt chart and, below it, memory over the same time axis; or two runs with --overlay."""
    request = Request(words, values)
    if overlay:
        if len(request.names) != 2:
            raise click.UsageError("--overlay wants two schedules or saved runs, such as sim.json.gz run.json.gz")
        first, second = request.names
        draw_overlay(request.run(first), request.run(second), Path(out or "overlay.png"))
        return
    name = request.name
    target = Path(out) if out else Path(f"{Path(name).name.partition(':')[0].partition('.')[0]}.png")
    _refuse_other_formats(target)
    run = request.run(name)
    if target.suffix.lower() == ".html":
        from pipesim.viz import interactive

        interactive.write_html(run, target, memory=not no_memory, lanes=lanes)
    else:
        from pipesim.viz import mpl

        mpl.save(mpl.figure(run, memory=not no_memory, lanes=lanes), target)
    click.echo(f"wrote {target}", err=True)


def draw_overlay(first: Timeline, second: Timeline, target: Path) -> None:
    """Writes two runs in one picture, the simulated one above."""
    _refuse_other_formats(target)
    upper, lower = (second, first) if first.source == "measured" and second.source != "measured" else (first, second)
    if target.suffix.lower() == ".html":
        from pipesim.viz import interactive

        interactive.write_overlay(upper, lower, target)
    else:
        from pipesim.viz import mpl

        mpl.save_overlay(upper, lower, target)
    click.echo(f"wrote {target}", err=True)


def _refuse_other_formats(target: Path) -> None:
    if target.suffix.lower() not in _PLOTS:
        raise ScheduleError(f"{target}: a picture is written as {', '.join(_PLOTS)}")


@schedule_command("export", "SCHEDULE|RUN")
@request_options
@_lanes_option
@click.option("--format", "form", type=click.Choice(list(_EXPORTS)), help="; ".join(f"{name}: {what}" for name, what in _EXPORTS.items()))
@click.option("--out", "-o", type=click.Path(dir_okay=False), required=True, help="Where to: .csv, .txt, .json, .json.gz or .html say the format.")
def export_command(words: tuple[str, ...], lanes: bool | None, form: str | None, out: str, **values: Any) -> None:
    """Write a schedule as CSV or text, or a run as a trace for Perfetto, as JSON or as a page.

    Without --format the name decides: .csv, .txt, .html; .json and .json.gz are traces, and run.json or run.json.gz a run.
    """
    target = Path(out)
    form = form or _format_of(target)
    request = Request(words, values)
    name = request.name
    if form in ("csv", "text"):
        # an order needs no run, so one that would deadlock can be written too
        schedule = request.run(name).schedule if is_run(name) else request.schedule(name).check()
        if form == "csv":
            schedule.to_csv(target)
            lost = [
                what
                for what, there in (
                    ("weight policy", schedule.weights != "flush"),
                    ("stage graph", schedule.graph),
                    ("offload targets", schedule.offload_to),
                )
                if there
            ]
            crossed = crossings(schedule)
            if crossed:
                click.echo(f"Warning: messages cross, which a first-in, first-out stream cannot carry: {crossed[0]}", err=True)
            if lost:
                click.echo(f"Warning: CSV has no word for the {' and the '.join(lost)}; the text form (.txt) keeps it", err=True)
        else:
            from pipesim.files import write_atomically

            write_atomically(target, str(schedule) + "\n")
        click.echo(f"wrote {target}", err=True)
        return
    run = request.run(name)
    if form == "run":
        run.save(target)
    elif form == "html":
        from pipesim.viz import interactive

        interactive.write_html(run, target, lanes=lanes)
    else:
        from pipesim.viz import trace

        trace.write_trace(run, target)
    click.echo(f"wrote {target}" + (" (open it at ui.perfetto.dev)" if form == "trace" else ""), err=True)


def _format_of(target: Path) -> str:
    name = target.name.lower()
    if name.endswith((".json", ".json.gz")):
        return "run" if name.startswith("run") else "trace"
    forms = {".csv": "csv", ".txt": "text", ".html": "html"}
    if target.suffix.lower() not in forms:
        raise ScheduleError(f"{target}: the name does not say the format; give --format {', '.join(_EXPORTS)}")
    return forms[target.suffix.lower()]
