"""``pipesim profile`` and ``pipesim fit``."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click

from pipesim.cli.options import json_option, print_json
from pipesim.cli.sweeping import progress_bar
from pipesim.cluster import Cluster
from pipesim.errors import ScheduleError
from pipesim.units import format_bytes, format_time

if TYPE_CHECKING:
    from pipesim.profiling import LayerMeasurement, ModelMeasurement

__all__ = ["fit_command", "profile_command"]

_QUIET = 10.0  # seconds without a word where there is no bar


@click.command("profile")
@click.argument("model", metavar="MODULE:FUNCTION")
@click.option(
    "--batch-shape",
    required=True,
    metavar="N,...",
    help="Shape of a microbatch, the samples first: 8,1024 for token numbers, 8,3,224,224 for images.",
)
@click.option("--tokens", type=int, help="The input is token numbers below this, for a model that begins with an embedding.")
@click.option("--dtype", default="float32", help="Type of the model and of an input that is no token numbers. Default float32.")
@click.option("--device", help="cpu, cuda, cuda:1. Default: the first CUDA device, or the CPU.")
@click.option("--repeats", type=int, default=20, help="Runs that the times are medians of. Default 20.")
@click.option("--warm-up", type=int, default=3, help="Runs before them. Default 3.")
@click.option("--out", default="profile.toml", help="profile.toml, or graph.txt for PipeDream's format. Default profile.toml.")
@json_option
def profile_command(
    model: str, batch_shape: str, tokens: int | None, dtype: str, device: str | None, repeats: int, warm_up: int, out: str, as_json: bool
) -> None:
    """Measure a torch model layer by layer, and write a profile that --costs reads.

    \b
    pipesim profile model.py:build --batch-shape 8,1024 --tokens 50257 --out profile.toml
    pipesim compare 1f1b zb-h1 --devices 4 --microbatches 16 --costs profile.toml

    FUNCTION takes no arguments and returns an nn.Sequential or a list of modules, each of which takes what the one before returns.
    Of every layer it measures the forward, the gradient of the input, that of the weights, and the bytes that it keeps.
    """  # noqa: D301  click wants the character
    from pipesim.profiling import load_layers, make_batch, measure, write_profile

    try:
        shape = [int(part) for part in batch_shape.split(",")]
    except ValueError:
        raise click.UsageError(f"--batch-shape {batch_shape!r} is no list of whole numbers, such as 8,1024") from None
    batch = make_batch(shape, dtype, tokens)
    layers = load_layers(model)
    if dtype != "float32":
        layers = [layer.to(make_batch([1], dtype).dtype) for layer in layers]
    with progress_bar("runs of a layer") as (progress, _):
        found = measure(layers, batch, device=device, repeats=repeats, warm_up=warm_up, progress=_lines(progress))
    write_profile(found, out, model)
    if as_json:
        print_json({**asdict(found), "out": out})
    else:
        click.echo("\n".join(_table(found)))
    for warning in found.warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(f"wrote {out}", err=True)


def _lines(progress: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """The same, and where there is no terminal to show a bar on, a line every ten seconds."""
    said = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal said
        progress(done, total)
        if not sys.stderr.isatty() and time.monotonic() - said >= _QUIET:
            said = time.monotonic()
            click.echo(f"{done} of {total} runs of a layer", err=True)

    return show


def _timed(layer: LayerMeasurement, kind: str) -> str:
    """A time and how far its repeats spread."""
    seconds, apart = getattr(layer, kind), layer.spread.get(kind)
    return format_time(seconds, "s") + (f" ± {apart / seconds:2.0%}" if apart is not None and seconds else "")


def _table(found: ModelMeasurement) -> list[str]:
    """Every layer for people."""
    from pipesim.profiling.spread import numbers

    times, sizes = ("forward", "backward", "input_grad", "weight_grad"), ("output", "activation", "parameters")
    rows = [["layer", "", *times, *sizes]]
    for layer in found.layers:
        seconds = [_timed(layer, name) for name in times]
        rows.append([layer.name, layer.kind, *seconds, *(format_bytes(getattr(layer, name), "s") for name in sizes)])
    total = {name: sum(getattr(layer, name) for layer in found.layers) for name in (*times, *sizes)}
    rows.append(["all", "", *(format_time(total[name], "s") for name in times), *(format_bytes(total[name], "s") for name in sizes)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head = (
        f"{len(found.layers)} layers on {found.device}, {found.dtype} batch of {' x '.join(map(str, found.batch_shape))}, medians of {found.repeats}"
    )
    groups: dict[tuple[int, ...], None] = dict.fromkeys(layer.pooled for layer in found.layers if len(layer.pooled) > 1)
    pooled = [f"alike: {len(group)} layers pooled ({numbers(group)}), medians of {len(group) * found.repeats}" for group in groups]
    return [
        f"{head}; ± is the median absolute deviation of the repeats",
        *pooled,
        "",
        *(
            "  ".join(
                cell.ljust(width) if place < 2 else cell.rjust(width) for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ),
    ]


@click.command("fit")
@click.argument("runs", metavar="RUNS.csv")
@click.option("--device", default="a100-80g", help="The GPU: a TOML file or a preset; its efficiency is the start. Default a100-80g.")
@click.option("--cluster", help="Links of a GPU inside and between nodes: a TOML file or a preset. Default: those of the device's usual node.")
@click.option("--calibration", help="An efficiency to start from, in TOML. Default: the device's.")
@click.option("--free", help="Numbers to fit, with commas. Default gemm,layer_overhead,between,gradient,step_overhead.")
@click.option(
    "--set", "constants", multiple=True, metavar="NAME=VALUE", help="A column that is the same in all runs, such as recompute=full. May be repeated."
)
@click.option("--fix", multiple=True, metavar="NAME=NUMBER", help="A number of the efficiency that stays so, such as attention=1. May be repeated.")
@click.option("--folds", type=int, default=10, help="Parts for cross-validation. Default 10, or as many as there are runs if that is less.")
@click.option("--shuffles", type=int, default=10, help="How often the runs are dealt into parts anew. Default 10.")
@click.option(
    "--leave-out", multiple=True, metavar="COLUMN", help="Also leave out all runs with one value of this column at a time. May be repeated."
)
@click.option("--predict", metavar="FILE.csv", help="Other runs, with the same columns: how far off the fit is there.")
@click.option("--scale", type=float, default=0.01, help="Relative error beyond which a run counts less. Default 0.01.")
@click.option("--rows", is_flag=True, help="List every run with its error.")
@click.option("--out", help="Where to write the calibration, in TOML: for --calibration here and in pipesim estimate.")
@json_option
def fit_command(
    runs: str,
    device: str,
    cluster: str | None,
    calibration: str | None,
    free: str | None,
    constants: tuple[str, ...],
    fix: tuple[str, ...],
    folds: int,
    shuffles: int,
    leave_out: tuple[str, ...],
    predict: str | None,
    scale: float,
    rows: bool,
    out: str | None,
    as_json: bool,
) -> None:
    """Fit efficiencies and link parameters to measured iteration times of transformers.

    \b
    pipesim fit runs.csv --set vocabulary=51200 --set recompute=full --out mine.toml
    pipesim estimate gpt3-175b --tensor 8 --pipeline 8 --calibration mine.toml

    Columns: the model's sizes (layers, hidden, heads, vocabulary, sequence) or model, a preset; tensor, pipeline, data (or gpus), microbatch
    (or micro_batch: its samples), batch (or global_batch); recompute, schedule, chunks and so on; seconds or iteration_ms. A cell such as 1|2|4 says that it is not known: the fastest that fits counts.
    """  # noqa: D301  click wants the character
    from pipesim.fit import FREE, Errors, as_dict, facts, fit, read_runs, summary, warnings
    from pipesim.models import read_device, read_efficiency, write_efficiency

    machine = read_device(device)
    if cluster is not None:
        machine = replace(machine, cluster=Cluster.load(cluster))
    if calibration is not None:
        machine = machine.with_efficiency(read_efficiency(calibration))
    machine = machine.with_efficiency(None, **{name: _number(name, value) for name, value in (_pair("--fix", one) for one in fix)})
    given = dict(_pair("--set", one) for one in constants)
    names = FREE if free is None else tuple(name.strip() for name in free.split(","))
    found = fit(read_runs(runs, given), machine, names, scale=scale)
    count = len(found.runs)
    folds = min(folds, count)
    crossed = None
    # the largest part leaves fewer runs than numbers: nothing to fit; a wrong number of folds is explained there
    if count > 1 and (folds < 2 or count - math.ceil(count / folds) >= len(found.free)):
        with progress_bar("shuffles") as (progress, _):
            crossed = found.folds(folds, shuffles, progress=progress)
    left_out = {}
    for column in leave_out:
        values = [one.get(column) for one in facts(found)]
        if all(value is None for value in values):
            raise ScheduleError(f"--leave-out {column}: no run has that column")
        left_out[column] = found.left_out(values)
    other = [] if predict is None else read_runs(predict, given)
    errors = found.predict(other) / [run.seconds for run in other] - 1 if other else None
    if as_json:
        report = as_dict(found, crossed, left_out, leave_one_out=folds == count)
        print_json(report if errors is None else {**report, "predicted": Errors.of(errors)._asdict(), "predicted_errors": errors.tolist()})
    else:
        click.echo(summary(found, crossed, left_out, rows=rows, leave_one_out=folds == count))
        if crossed is None:
            click.echo(f"\nnot cross-validated: {count} runs are too few to leave some out and fit {len(found.free)} numbers to the others")
        if errors is not None:
            click.echo(f"\n{predict}: {Errors.of(errors)}  ({len(found.free)} parameters, none of them fitted to these {len(other)} runs)")
    for warning in warnings(found) if as_json else ():  # the report has them
        click.echo(f"warning: {warning}", err=True)
    if out is not None:
        cross = "not cross-validated" if crossed is None else f"cross-validated mean {Errors.of(crossed).mean:.2f} %"
        source = (
            f"pipesim fit {runs}: {len(found.runs)} runs, {len(found.free)} parameters ({', '.join(found.free)}); {Errors.of(found.errors)}; {cross}"
        )
        source = "; ".join([source, *warnings(found)])
        write_efficiency(found.efficiency, out, source)
        click.echo(f"wrote {out}", err=True)


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise click.UsageError(f"{option} {text!r} is no NAME=VALUE")
    return name.strip(), value.strip()


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise click.UsageError(f"--fix {name}={text}: {text!r} is not a number") from None
