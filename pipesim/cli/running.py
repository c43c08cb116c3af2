"""``pipesim simulate`` and ``pipesim compare``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from pipesim import registry
from pipesim.cli.options import Request, is_run, json_option, print_json, request_options, schedule_command
from pipesim.comparison import compare
from pipesim.errors import DeadlockError, ScheduleError
from pipesim.timeline import Timeline

__all__ = ["compare_command", "simulate_command"]


@schedule_command("simulate")
@request_options
@click.option("--fit", is_flag=True, help="Exit with status 1 if some device's memory does not suffice.")
@click.option("--links", "with_links", is_flag=True, help="Show every link, not the ten busiest; with --json add link_utilisation.")
@click.option("--save", type=click.Path(dir_okay=False), help="Also save the run, as run.json or run.json.gz.")
@json_option
def simulate_command(words: tuple[str, ...], fit: bool, with_links: bool, save: str | None, as_json: bool, **values: Any) -> None:
    """Run SCHEDULE: a name (pipesim list), module:function, file.py:function, a CSV or a text file.

    A schedule's own options, which pipesim list shows, are given here too: pipesim simulate 1f1b --policy B ...
    """
    request = Request(words, values)
    if save is not None and not is_run(save):
        raise click.UsageError(f"--save {save!r}: the name of a run ends in .json or .json.gz")
    run = request.run(request.name)
    if save is not None:
        run.save(save)
        click.echo(f"saved {save}", err=True)
    if as_json:
        print_json(run.figures() | ({"link_utilisation": [row._asdict() for row in run.link_utilisation()]} if with_links else {}))
    else:
        click.echo(run.summary(links=None if with_links else 10))
    overflows = run.overflows()
    if fit and overflows:
        first = overflows[0]
        what = f"op {first.op}" if first.op is not None else "what is there all the time"
        click.echo(f"Error: device {first.device} has {first.capacity:g} and needs {first.needed:g} at {first.time:g}, for {what}", err=True)
        sys.exit(1)


@schedule_command("compare", "[SCHEDULE|RUN]...")
@click.option("--all", "every", is_flag=True, help="Every installed schedule; those that do not allow the size are named.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Also draw two runs on one axis of time, as .png, .svg, .pdf or .html.")
@request_options
@json_option
def compare_command(words: tuple[str, ...], every: bool, plot: str | None, as_json: bool, **values: Any) -> None:
    """Put several schedules, or runs that were saved (run.json.gz), side by side.

    Of a simulated and a measured run of the same ops it also says how far off each kind of op is, and what makes up the difference.
    """
    shared = values["stages"] is None and values["costs"] is None and _are_numbers(values)
    if shared:  # the same model for all: a schedule with two chunks per device has stages of half the size
        values["stages"] = values["devices"]
    request = Request(words, values)
    chosen = request.names
    if every:
        chosen += [name for name in _first_names() if name not in chosen]
    runs: list[tuple[str, Timeline]] = []
    refused: dict[str, str] = {}
    for name in _shown(chosen):
        try:
            runs.append((name, request.run(name)))
        except (ScheduleError, DeadlockError) as error:
            if not every:
                raise
            refused[name] = str(error).partition("\n")[0]
    if every and not runs:
        raise ScheduleError(next(iter(refused.values())))
    if len(runs) < 2:
        raise click.UsageError("compare wants at least two schedules or saved runs")
    if plot is not None and len(runs) != 2:
        raise click.UsageError(f"--plot draws two runs, and there are {len(runs)}")
    shown = [run.schedule.name if registry.is_file(name) or is_run(name) else name for name, run in runs]
    if len(set(shown)) < len(shown):
        # runs of one schedule are told apart by their files
        shown = [_stem(name) if is_run(name) else name for name, _ in runs]
    table = compare(*(run for _, run in runs), names=shown)
    if plot is not None:
        from pipesim.cli.drawing import draw_overlay

        draw_overlay(runs[0][1], runs[1][1], Path(plot))
    if as_json:
        print_json({**table.as_dict(), "refused": refused})
        return
    click.echo(str(table))
    if shared and values["stages"] is not None and len({run.schedule.num_stages for _, run in runs}) > 1:
        click.echo(f"The times are those of one of {values['stages']} stages; a chunk takes its share (--stages).")
    asynchronous = [name for name, run in runs if run.schedule.weights != "flush"]
    if asynchronous:
        click.echo(f"Asynchronous, so iteration_time is per update: {', '.join(asynchronous)}.")
    for name, reason in refused.items():
        click.echo(f"{name}: left out: {reason}")


def _stem(name: str) -> str:
    return Path(name).name.removesuffix(".gz").removesuffix(".json")


def _are_numbers(values: dict[str, Any]) -> bool:
    """Whether no cost is a list per stage, which cannot be shared out to other stages."""
    return not any(isinstance(value, list) for value in values.values())


def _first_names() -> list[str]:
    """Every schedule once, by its first name."""
    seen: dict[registry.Generator, str] = {}
    for name, generator in registry.available().items():
        seen.setdefault(generator, name)
    return list(seen.values())


def _shown(names: list[str]) -> Iterable[str]:
    """The names, with progress on a terminal where there are many."""
    if len(names) < 4 or not sys.stderr.isatty():
        return names
    from rich.console import Console
    from rich.progress import track

    return track(names, "simulating", console=Console(stderr=True), transient=True)
