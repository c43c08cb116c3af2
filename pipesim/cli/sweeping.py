"""``pipesim sweep`` and ``pipesim jitter``."""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import click

from pipesim import registry
from pipesim.cli.converting import _bandwidth, _capacity, _converted, _flag, _physical
from pipesim.cli.options import SIZES, TIMES, Request, json_option, print_json, schedule_command
from pipesim.costs import read_costs
from pipesim.engine import ENGINES
from pipesim.errors import ScheduleError
from pipesim.files import read_limited
from pipesim.sweep import RESULTS, Configuration, Row, grid, pareto_front, run_sweep
from pipesim.units import format_bytes, format_time
from pipesim.userfiles import parse_toml

__all__ = ["check_jobs", "progress_bar", "sweep_command"]

_COSTS = (*TIMES, "latency", "bandwidth", *SIZES, "recompute", "tied", "buckets", "costs", "cluster")  # what is given, and not chosen
_AXES = ("schedules", "devices", "microbatches", *_COSTS, "stages", "weight_grad_share", "optimizer_bytes", "capacity", "steps")
_COUNTS = ("devices", "microbatches", "stages", "steps", "buckets")
_HELP = {
    "schedules": "Names of schedules; may also be written without --schedules.",
    "devices": "Numbers of devices, such as 4,8.",
    "microbatches": "Numbers of microbatches, such as 8,16,32.",
    "forward": "Times of F, such as 1,1.2; so for the other times and sizes. A list per stage: in a --file.",
    "recompute": "never, always, except_last.",
    "tied": "Stages that share weights, such as 0+3.",
    "costs": "Cost files or presets.",
    "cluster": "Cluster files or presets.",
    "stages": "The times and bytes are of one of this many stages; others are scaled.",
    "capacity": "Memory of every device; what does not fit is marked, and not in the front.",
}
_TABLE = 40  # rows of the front that are printed


def _axis_options(command: Callable[..., Any]) -> Callable[..., Any]:
    short = {"devices": "-p", "microbatches": "-m"}
    for name in reversed(_AXES):
        command = click.option(_flag(name), *([short[name]] if name in short else []), metavar="LIST", help=_HELP.get(name))(command)
    return command


@schedule_command("sweep", "[SCHEDULE]...")
@_axis_options
@click.option("--file", help="A sweep file in TOML with the same names; what is on the command line goes before it.")
@click.option("--unit", type=click.Choice(["slot", "s", "ms", "us"]), help="Unit of the times above. Default slot.")
@click.option("--no-barrier", is_flag=True, help="Devices do not wait for each other before the optimizer.")
@click.option("--engine", type=click.Choice(ENGINES), default="auto", help="Which engine runs it.")
@click.option("--jobs", "-j", type=int, default=-1, help="Processes; -1, the default, is one per core.")
@click.option("--out", "-o", default="sweep.csv", help="Where rows go as they come, .csv or .parquet (a folder). Default sweep.csv.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Also draw all rows and the front, as .png, .svg or .pdf.")
@json_option
def sweep_command(words: tuple[str, ...], out: str, jobs: int, engine: str, plot: str | None, as_json: bool, **values: Any) -> None:
    """Run every combination of lists of values; the same command continues what was interrupted.

    \b
    pipesim sweep 1f1b gpipe --devices 4,8 --microbatches 8,16,32 --forward 1 --backward 2 --latency 0,0.25,1

    An option of schedules (--chunks 2,4) concerns those that have it. A combination that fails has its error in its row, and
    the others go on. Ends with the Pareto front of throughput against peak_memory, one for each set of costs and links.
    """  # noqa: D301  click wants the character
    check_jobs(jobs)
    if plot is not None:
        if Path(plot).suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ScheduleError(f"{plot}: a picture is written as .png, .svg or .pdf")
        from pipesim.viz import mpl  # before the sweep and not after it, in case that matplotlib is missing
    axes = _axes(words, values)
    configurations = grid(**axes)
    note = _sizes_note(configurations)
    if note:
        click.echo(note, err=True)
    with progress_bar("sweep") as (progress, counts):
        try:
            rows = run_sweep(configurations, out, jobs=jobs, engine=engine, progress=progress)
        except KeyboardInterrupt:
            if counts:
                click.echo(f"{counts[-1]} of {len(configurations)} rows are in {out}; the same command goes on from there", err=True)
            raise
    given = [name for name in ("recompute_policy", *_COSTS) if len({str(row[name]) for row in rows if name in row}) > 1]
    front = pareto_front(rows, by=given)
    failures = collections.Counter(row["error"] for row in rows if row["error"] is not None)
    failed = sum(failures.values())
    if plot is not None and front:
        axes_drawn: Any = mpl.pareto(rows, by=given)
        mpl.save(axes_drawn.figure, plot)
        click.echo(f"wrote {plot}", err=True)
    if as_json:
        errors = [{"error": error, "rows": count} for error, count in failures.most_common()]
        print_json({"out": out, "rows": len(rows), "failed": failed, "errors": errors, "pareto_by": given, "pareto": front})
    else:
        _print(rows, front, given, out, note)
    if failed:
        error, count = failures.most_common(1)[0]
        click.echo(f"{failed} of {len(rows)} failed, {count} of them with: {error}", err=True)
    if failed == len(rows):
        sys.exit(1)


def check_jobs(jobs: int) -> None:
    """Refuses a number of processes that there cannot be."""
    if jobs == 0 or jobs < -1:
        raise click.UsageError(f"--jobs is {jobs}; right is a number of processes, or -1 for one per core")


@contextmanager
def progress_bar(what: str) -> Iterator[tuple[Callable[[int, int], None], list[int]]]:
    """A bar on a terminal, nothing elsewhere; and a list of how many have been done."""
    counts: list[int] = []
    if not sys.stderr.isatty():
        yield (lambda done, total: counts.append(done)), counts
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)

        def show(done: int, total: int) -> None:
            counts.append(done)
            bar.update(task, completed=done, total=total)

        yield show, counts


# -- axes --------------------------------------------------------------------------------------------------------------


def _axes(words: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """What the command line and the sweep file say, as grid takes it."""
    file = {} if values["file"] is None else _read(values["file"])
    listed = file.get("schedules", []) if values["schedules"] is None else _parts(values["schedules"])
    request = Request([*_listed(listed), *words], dict(values))
    if not request.names:
        raise click.UsageError("Missing schedules: name some, such as pipesim sweep 1f1b gpipe; pipesim list shows them")
    said = {name: file.get(name) if values[name] is None else _parts(values[name]) for name in _AXES[1:]}
    given: dict[str, list[Any]] = {name: _listed(value) for name, value in said.items() if value is not None}
    scale = {"slot": None, "s": 1.0, "ms": 1e-3, "us": 1e-6}[values["unit"] or file.get("unit", "slot")]
    if "costs" in given and scale is not None:
        raise click.UsageError("--costs gives the unit already; leave out --unit")
    physical = scale is not None or any(read_costs(name).unit == "s" for name in given.get("costs", []) if "capacity" in given)
    axes: dict[str, Any] = {name: [_converted_value(name, one, scale, physical) for one in listed] for name, listed in given.items()}
    if "recompute" in axes:
        axes["recompute_policy"] = axes.pop("recompute")
    if scale is not None:
        axes["unit"] = "s"
    if values["no_barrier"] or file.get("barrier") is False:
        axes["barrier"] = False
    options = file.get("options", {}) | {name: _option_values(name, text, request.names) for name, text in request._own.items()}
    return {"schedules": request.names, **options, **axes}


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _converted_value(name: str, value: Any, scale: float | None, physical: bool) -> Any:
    """One value of an axis: a text from the command line, or what TOML made of it; a list is per stage."""
    if name in ("recompute", "tied", "costs", "cluster"):
        return str(value)
    if name == "bandwidth":
        return _bandwidth(str(value), scale is not None)
    if name == "capacity":
        return _capacity(str(value), "s" if physical else "slot")
    if name in _COUNTS:
        return _converted(name, value, int) if isinstance(value, str) else value
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            if not value or name not in (*TIMES, *SIZES, "latency"):
                raise click.UsageError(f"{_flag(name)}: {value!r} is not a number") from None
    if name in SIZES:
        return _physical(value, None if scale is None else 1.0, "bytes", name)
    return _physical(value, scale, "time", name) if name in (*TIMES, "latency") else value


def _option_values(name: str, text: str | None, schedules: Sequence[str]) -> list[Any]:
    """The values of a schedule's own option."""
    generators = [registry.find(schedule) for schedule in schedules if not registry.is_file(schedule)]
    annotation = next(options[name].annotation for options in map(registry.options_of, generators) if name in options)
    found = [_converted(name, part, annotation) for part in ([None] if text is None else _parts(text))]
    if any(isinstance(one, list) for one in found):
        raise click.UsageError(f"{_flag(name)} is a list for one schedule; for a sweep write lists of lists in a --file, under [options]")
    return found


def _read(path: str) -> dict[str, Any]:
    """A sweep file: the names of the command line, each with a value or a list of values, and [options] of schedules."""
    from pydantic import ConfigDict, create_model

    value = bool | int | float | str
    axis = value | list[value | list[int | float | str]]
    fields: dict[str, Any] = dict.fromkeys(_AXES, (axis | None, None))
    fields |= {"unit": (Literal["slot", "s", "ms", "us"], "slot"), "barrier": (bool, True), "options": (dict[str, axis], {})}
    model = create_model("SweepFile", __config__=ConfigDict(extra="forbid", strict=True), **fields)
    result: dict[str, Any] = parse_toml(model, read_limited(path), path).model_dump(exclude_none=True)
    return result


# -- showing -----------------------------------------------------------------------------------------------------------


def _sizes_note(configurations: Sequence[Configuration]) -> str:
    """That rows are of models of different sizes; empty where they are not, or where nobody can tell."""
    if any(name in one for one in configurations for name in ("stages", "costs")):
        return ""
    axes = {"devices": sorted({one["devices"] for one in configurations if isinstance(one.get("devices"), int)})}
    axes["chunks"] = sorted({one.get("chunks") or 1 for one in configurations}) if any("chunks" in one for one in configurations) else []
    differ = [name for name, values in axes.items() if len(values) > 1]
    if not differ:
        return ""
    low, *_, high = axes[differ[0]]
    return (
        f"note: without --stages, times and bytes are those of one stage, however many there are: rows with other {_and(differ)} are of other "
        f"models ({high} {differ[0]}: {high / low:.3g} times the size of {low}); --stages {max(axes['devices'] or [high])} keeps the model the same"
    )


def _cell(name: str, value: Any, unit: str) -> str:
    """One value of a column that was chosen or given, with the units of the results."""
    if isinstance(value, str) and name in (*TIMES, *SIZES, "latency", "bandwidth"):
        try:
            value = json.loads(value)  # a column with lists in it holds texts
        except ValueError:
            return str(value)
    if value is None:
        return ""
    if isinstance(value, list):
        return ",".join(_cell(name, one, unit) for one in value)
    if unit != "s" or isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name in (*TIMES, "latency"):
        return format_time(value, unit)
    sizes = {"capacity": "", "bandwidth": "/s", **dict.fromkeys(SIZES, "")}
    return format_bytes(value, unit) + sizes[name] if name in sizes else str(value)


def _print(rows: Sequence[Row], front: Sequence[Row], given: Sequence[str], out: str, note: str) -> None:
    """The front as a table, with the columns in which rows differ."""
    click.echo(f"{len(rows)} rows are in {out}")
    if not front:
        return
    choices = [name for name in rows[0] if name not in (*RESULTS, "id", *given) and len({str(row[name]) for row in rows}) > 1]
    columns = [*given, "schedule", *(name for name in choices if name != "schedule")]
    unit = str(front[0]["unit"])
    table = [[*columns, "throughput", "peak_memory", "makespan", "bubble_fraction"]]
    for row in front[:_TABLE]:
        figures = [
            f"{row['throughput']:.6g}",
            format_bytes(row["peak_memory"], unit),
            format_time(row["makespan"], unit),
            f"{row['bubble_fraction']:.4f}",
        ]
        table.append([*(_cell(name, row[name], unit) for name in columns), *figures])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    click.echo()
    for line in table:
        cells = [cell.ljust(width) if name == "schedule" else cell.rjust(width) for name, cell, width in zip(table[0], line, widths, strict=True)]
        click.echo("  ".join(cells).rstrip())
    if len(front) > _TABLE:
        click.echo(f"... and {len(front) - _TABLE} more (--json, --plot)")
    click.echo()
    click.echo(f"  Pareto front{f' for each {_and(given)}' if given else ''}: no other row has more throughput in as little memory")
    click.echo(f"  throughput: microbatches / makespan, per {'second' if unit == 's' else 'slot'}; peak_memory: of the device that holds most")
    if note:
        click.echo(f"  {note}")


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
