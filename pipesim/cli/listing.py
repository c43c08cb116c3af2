"""``pipesim list`` and ``pipesim show``."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import click
from rich.markup import escape

from pipesim import registry
from pipesim.cli.options import Request, is_run, json_option, print_json, request_options, schedule_command

__all__ = ["list_command", "show_command"]


def _about(generator: registry.Generator) -> str:
    """The first line of a generator's docstring."""
    return (inspect.getdoc(generator) or "").partition("\n")[0]


def _description(generator: registry.Generator) -> str:
    """A generator's docstring without its sections for programmers (Args, Raises) and the marks before pictures."""
    text = re.split(r"\n\n(?:Args|Raises|Returns|Examples):\n", inspect.getdoc(generator) or "")[0]
    return text.replace("\n::\n", "").replace("``", "")


@click.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the installed schedules, with their other names and their own options."""
    names: dict[registry.Generator, list[str]] = {}
    for name, generator in registry.available().items():
        names.setdefault(generator, []).append(name)
    rows = [(first, others, _about(generator), list(registry.options_of(generator))) for generator, (first, *others) in names.items()]
    if as_json:
        print_json({"schedules": [{"name": name, "aliases": others, "about": about, "options": options} for name, others, about, options in rows]})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("schedule", no_wrap=True)
    table.add_column("what it does; other names; its options")
    for name, others, about, options in rows:
        details = [f"also: {', '.join(others)}"] if others else []
        details += [f"options: {' '.join('--' + option.replace('_', '-') for option in options)}"] if options else []
        table.add_row(escape(name), escape(about.replace("``", "")) + (f"\n[dim]{escape('; '.join(details))}[/dim]" if details else ""))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)


@schedule_command("show")
@request_options
@click.option("--width", type=int, help="Widest picture, in characters. Default: the terminal's, at least 80.")
@json_option
def show_command(words: tuple[str, ...], width: int | None, as_json: bool, **values: Any) -> None:
    """Show a schedule's order, and its picture in time."""
    from pipesim.viz import text

    request = Request(words, values)
    name, run = request.name, request.run(request.name)
    schedule = run.schedule
    if as_json:
        data = {"name": schedule.name, "weights": schedule.weights, "streams": [[str(slot) for slot in stream] for stream in schedule.streams]}
        print_json({**data, "placement": {str(stage): list(devices) for stage, devices in schedule.placement.items()}})
        return
    click.echo(str(schedule))
    click.echo()
    if width is None:
        import shutil

        width = max(80, shutil.get_terminal_size().columns)
    click.echo(text.gantt(run, width=width))
    if not registry.is_file(name) and not is_run(name):
        click.echo()
        click.echo(_description(registry.find(name)))
