"""``pipesim estimate``."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import click

from pipesim import registry
from pipesim.cli.options import Request, is_run, json_option, print_json, schedule_command
from pipesim.cli.sweeping import progress_bar
from pipesim.cluster import Cluster
from pipesim.engine import ENGINES
from pipesim.errors import ScheduleError
from pipesim.estimates import DEFINITIONS, Estimate, contenders, memory_savers, rank, schedules_not_ranked, schedules_to_rank, with_less_memory
from pipesim.files import read_limited
from pipesim.models import (
    DeviceSpec,
    Efficiency,
    ModelSpec,
    Parallelism,
    device_presets,
    model_presets,
    parameters,
    read_device,
    read_efficiency,
    read_model,
)
from pipesim.units import format_bytes, format_time, parse_quantity
from pipesim.userfiles import CalibrationFile, parse_toml

__all__ = ["estimate_command"]

# options that Parallelism calls by the same name
_SAME = (
    "tensor",
    "pipeline",
    "sequence_parallel",
    "scatter_gather",
    "recompute",
    "recompute_layers",
    "flash_attention",
    "precision",
    "offload_optimizer",
    "offload_activations",
    "embedding_weight",
    "head_weight",
)
_MARGIN = 0.08  # of the capacity; with less to spare a run is said to fit barely


@schedule_command("estimate", "MODEL")
@click.option("--gpus", type=int, help="GPUs in all: tensor x pipeline x data. Default: those of one pipeline.")
@click.option("--device", default="a100-80g", help=f"The GPU: a TOML file, or one of {', '.join(device_presets())}. Default a100-80g.")
@click.option("--cluster", help="Links of a GPU inside and between nodes: a TOML file or a preset. Default: those of the device's usual node.")
@click.option("--tensor", "-t", type=int, default=1, help="GPUs that share each layer. Default 1.")
@click.option("--pipeline", "-p", type=int, default=1, help="Devices of a pipeline, each of --tensor GPUs. Default 1.")
@click.option(
    "--schedule",
    "-s",
    "schedules",
    default="1f1b",
    help="A schedule, several with commas, or all: it says which it leaves out, such as those without a flush. Default 1f1b.",
)
@click.option("--batch", type=int, help="Samples of a step, over all pipelines. Default: 8 microbatches for each device of a pipeline.")
@click.option("--micro-batch", type=int, default=1, help="Samples of a microbatch. Default 1.")
@click.option("--sequence", type=int, help="Tokens of a sample. Default: the model's.")
@click.option("--sequence-parallel", is_flag=True, help="Norms and dropouts are split over the --tensor GPUs too.")
@click.option("--scatter-gather", is_flag=True, help="Messages between stages are split over the --tensor GPUs.")
@click.option("--zero", type=click.IntRange(0, 3), default=0, help="Split over the pipelines: 1 optimizer state, 2 gradients too, 3 weights too.")
@click.option("--distributed-optimizer", is_flag=True, help="Megatron's name for --zero 1.")
@click.option("--recompute", type=click.Choice(["none", "selective", "full"]), default="none", help="What the backward computes again. Default none.")
@click.option("--recompute-layers", type=int, default=1, help="With --recompute full: keep the input of every k-th layer. Default 1.")
@click.option("--flash-attention", is_flag=True, help="Attention that never writes its scores.")
@click.option("--precision", type=click.Choice(["mixed", "fp32"]), default="mixed", help="Default mixed: 2 bytes, with 4-byte master weights.")
@click.option("--gradient-bytes", type=click.Choice(["2", "4"]), default="4", help="Bytes of a gradient under mixed precision. Default 4.")
@click.option("--offload-optimizer", is_flag=True, help="Optimizer state in the host's memory.")
@click.option("--offload-activations", is_flag=True, help="Activations in the host's memory between forward and backward.")
@click.option("--layout", help="Layers per stage: 11,12,12,13, or Megatron's layout string. Default: even.")
@click.option("--embedding-weight", type=float, default=0.0, help="What the embedding counts, in layers, in an even layout. Default 0.")
@click.option("--head-weight", type=float, default=0.0, help="The same for the output layer. Default 0.")
@click.option("--capacity", help="Memory of a GPU, such as '40 GB'. Default: the device's.")
@click.option("--calibration", help="A fitted efficiency, in TOML. Default: the device's.")
@click.option("--op-overhead", metavar="TIME", help="Fixed time of every op, such as '0.7 ms'. Default: the calibration's, or none.")
@click.option("--save", type=click.Path(dir_okay=False), help="Also save the run of a single schedule, as run.json or run.json.gz.")
@click.option("--fit", is_flag=True, help="Exit with status 1 if no schedule fits.")
@click.option("--engine", type=click.Choice(ENGINES), default="auto", help="Which engine runs it.")
@json_option
def estimate_command(words: tuple[str, ...], schedules: str, fit: bool, save: str | None, as_json: bool, **values: Any) -> None:
    """Estimate a training step of MODEL: time, throughput, MFU, bubble, communication, and whether it fits.

    \b
    pipesim estimate gpt3-175b --gpus 64 --tensor 8 --pipeline 8 --schedule all

    MODEL is a TOML file or a preset; of several schedules those that fit come first, then the fastest. A schedule's own options
    are given here too, such as --chunks 3. Without a MODEL, the presets are listed.
    """  # noqa: D301  click wants the character
    if not words:
        raise click.UsageError(f"Missing argument 'MODEL': a TOML file, or one of {', '.join(model_presets())}")
    if words[0].startswith("-"):
        raise click.UsageError(f"the first word is MODEL, and then options; {words[0]!r} came first, which is no option of estimate itself")
    every = schedules.strip().lower() == "all"
    names = schedules_to_rank() if every else [name.strip() for name in schedules.split(",")]
    if save is not None and (every or len(names) > 1):
        raise click.UsageError(f"--save is for the run of one schedule, and --schedule {schedules} means several")
    if save is not None and not is_run(save):
        raise click.UsageError(f"--save {save!r}: the name of a run ends in .json or .json.gz")
    request = Request([*names, *words[1:]], values)
    if len(request.names) > len(names):
        raise click.UsageError(f"Got unexpected extra argument {request.names[len(names)]!r}; schedules are named with --schedule")
    options = {name: request._own_options(name, registry.find(name)) for name in names if not registry.is_file(name)}
    model, device, parallel, memory = _read(words[0], values)
    with progress_bar("schedules") as (progress, _):
        found, refused = rank(
            model,
            device,
            parallel,
            names,
            batch=values["batch"],
            memory=memory,
            engine=values["engine"],
            options=options,
            flush_only=every,
            progress=progress,
        )
    if refused and not found:
        raise ScheduleError("\n".join(f"{name}: {reason}" for name, reason in refused.items()) if len(refused) > 1 else next(iter(refused.values())))
    if every:
        refused |= schedules_not_ranked()
    if save is not None:
        found[0].run.save(save)
        click.echo(f"saved {save}", err=True)
    capacity = device.memory if memory is None else memory
    if as_json:
        print_json(
            {
                **_facts(found[0]),
                "capacity": capacity,
                "schedules": [one.figures() for one in found],
                "refused": refused,
            }
        )
    else:
        faster = min(found, key=lambda one: one.iteration_time)
        ways = {} if faster.fits else with_less_memory(contenders(found), memory=memory, engine=values["engine"], options=options)
        click.echo(_text(found, refused, capacity, ways, _belief(device, values)))
    if fit and not found[0].fits:
        click.echo(f"Error: {'no schedule' if len(found) > 1 else found[0].name + ' does not'} fit{'s' if len(found) > 1 else ''}", err=True)
        sys.exit(1)


def _read(name: str, values: dict[str, Any]) -> tuple[ModelSpec, DeviceSpec, Parallelism, float | None]:
    """Model, device, parallelism and capacity that the options mean."""
    model = read_model(name)
    if values["sequence"] is not None:
        model = model.with_sequence(values["sequence"])
    device = read_device(values["device"])
    if values["cluster"] is not None:
        device = replace(device, cluster=Cluster.load(values["cluster"]))
    if values["calibration"] is not None:
        device = device.with_efficiency(read_efficiency(values["calibration"]))
    if values["op_overhead"] is not None:
        device = device.with_efficiency(op_overhead=parse_quantity(values["op_overhead"], "time", "--op-overhead"))
    if values["distributed_optimizer"] and values["zero"] > 1:
        raise click.UsageError(f"--distributed-optimizer is --zero 1, and --zero says {values['zero']}")
    layout: Any = values["layout"]
    if layout is not None and re.fullmatch(r"[0-9, ]+", layout):
        layout = [int(part) for part in layout.split(",") if part.strip()]
    choices = {field: values[field] for field in _SAME}
    choices |= {"microbatch": values["micro_batch"], "zero": max(values["zero"], int(values["distributed_optimizer"]))}
    choices |= {"gradient_bytes": int(values["gradient_bytes"]), "layout": None if layout == "even" else layout}
    parallel = Parallelism(**choices)
    if values["gpus"] is not None:
        each = parallel.tensor * parallel.pipeline
        if values["gpus"] < 1 or values["gpus"] % each:
            raise ScheduleError(f"--gpus {values['gpus']} is no multiple of tensor x pipeline = {parallel.tensor} x {parallel.pipeline} = {each}")
        parallel = replace(parallel, data=values["gpus"] // each)
    memory = None if values["capacity"] is None else parse_quantity(values["capacity"], "bytes", "--capacity")
    return model, device, parallel, memory


# -- showing -----------------------------------------------------------------------------------------------------------


def _facts(one: Estimate) -> dict[str, Any]:
    """What all the schedules have in common."""
    model, device, parallel = one.costs.model, one.costs.device, one.costs.parallel
    return {
        "model": model.name,
        "parameters": parameters(model).total(model.layers),
        "device": device.name,
        "gpus": parallel.gpus,
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
        "data": parallel.data,
        "batch": one.batch,
        "micro_batch": parallel.microbatch,
        "microbatches": one.run.schedule.num_microbatches,
        "sequence": model.sequence,
    }


def _text(found: Sequence[Estimate], refused: dict[str, str], capacity: float, ways: dict[str, Estimate | None], belief: Sequence[str]) -> str:
    facts, best = _facts(found[0]), found[0]
    lines = [
        f"{facts['model']}, {facts['parameters'] / 1e9:.4g} billion parameters, on {facts['gpus']} x {facts['device']}",
        f"tensor {facts['tensor']}, pipeline {facts['pipeline']}, data {facts['data']}; batch {facts['batch']} of {facts['sequence']} tokens, "
        f"{facts['microbatches']} microbatches of {facts['micro_batch']}; {_choices(best.costs.parallel)}",
        "",
        *_table(found, capacity),
        "",
    ]
    lines += [*_verdict(found, capacity, ways), ""]
    lines += [f"{best.name}, peak memory of a GPU by device (of {format_bytes(capacity, 's')}):", *_memory(best), ""]
    lines += [f"{best.name}, what a GPU does in {format_time(best.iteration_time, 's')} (mean of all devices):", *_breakdown(best), ""]
    width = max(map(len, DEFINITIONS))
    lines += [f"  {name.ljust(width)}  {text}" for name, text in DEFINITIONS.items()]
    lines += [f"  {'fits'.ljust(width)}  barely: with less than {100 * _MARGIN:.0f} % to spare, which is hardly a margin"]
    if any(one.run.schedule.weights != "flush" for one in found):
        lines += ["  * trains on stale weights, without a flush; iteration_time is that of the whole batch, with all its updates"]
    if any(_chunks(one) > 1 for one in found):
        lines += [f"  {'v'.ljust(width)}  stages of each device (--chunks, where the schedule has a choice); 1 where none is shown"]
    reasons: dict[str, list[str]] = {}
    for name, reason in refused.items():
        reasons.setdefault(reason, []).append(name)
    lines += ["", *belief]
    lines += [f"left out: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "\n".join(lines)


def _chunks(one: Estimate) -> int:
    """Into how many stages per device a schedule cuts the model."""
    return one.run.schedule.num_stages // one.run.schedule.num_devices


def _barely(one: Estimate, capacity: float) -> bool:
    return one.fits and max(one.run.peak_memory) > (1 - _MARGIN) * capacity


def _belief(device: DeviceSpec, values: dict[str, Any]) -> list[str]:
    """Where the constants are from, how far off they are known to be, and what that means for the table."""
    path, efficiency = values["calibration"], device.efficiency
    if path is not None:
        file = parse_toml(CalibrationFile, read_limited(path), path)
        given = file.efficiency.model_dump(exclude_none=True)
        rest = "" if len(given) == len(fields(Efficiency)) else f" ({', '.join(given)}; the others are the defaults)"
        source = (file.source or "").strip().rstrip(".")
        said = f": {source}." if source else ", which has no line `source` to say where they are from and how far off."
        lines = [f"How much to believe it: the constants are those of {path}{rest}{said}"]
    elif values["device"] not in device_presets() and replace(efficiency, op_overhead=0.0) != Efficiency():
        lines = [f"How much to believe it: the constants are those of {values['device']}{': ' + device.source if device.source else ''}."]
    else:
        lines = [
            "How much to believe it: the constants are fitted to nothing. On nine published runs of GPT on A100 they are 3.6 % off on average, 6.6 % at most;",
            "expect about 9 % on a cluster that nobody has measured, and bring that down with a few runs of your own (pipesim fit, --calibration).",
        ]
        if not device.name.lower().startswith("a100"):
            lines.append(f"Of {device.name} there are only peaks and the A100's efficiencies, and no measured run.")
    lines.append(
        "Schedules that differ by less than that error are not told apart. What is measured, and how far off: docs/models.md, docs/validation.md."
    )
    if efficiency.op_overhead:
        return [*lines, f"Every op costs {format_time(efficiency.op_overhead, 's')} beside its work (op_overhead)."]
    return [
        *lines,
        "Ops cost no fixed time here, which flatters schedules of many short ops (chunks, split backwards). 0.7 ms per op fits the zero-bubble paper's runs",
        "(docs/validation.md): --op-overhead '0.7 ms', or op_overhead = 0.0007 under [efficiency] in a calibration.",
    ]


def _verdict(found: Sequence[Estimate], capacity: float, ways: dict[str, Estimate | None]) -> list[str]:
    """Which is the fastest that fits, and what the ways to hold less would bring where faster ones do not fit."""
    best, fastest = found[0], min(found, key=lambda one: one.iteration_time)
    spare = 1 - max(best.run.peak_memory) / capacity
    barely = f", barely: {100 * spare:.1f} % of the memory is spare" if _barely(best, capacity) else ""
    lines = [f"{best.name} fits{barely}." if len(found) == 1 else f"{best.name} is the fastest that fits{barely}."] if best.fits else []
    if fastest.fits:
        return lines
    what = f"{fastest.name} would take {format_time(fastest.iteration_time, 's')}, but does not fit" if best.fits else "None fits"
    what = what if len(found) > 1 else best.name + " does not fit"
    savers = memory_savers(best.costs.parallel)
    if not savers:
        return [*lines, f"{what}."]
    if not ways:
        return [*lines, f"{what}. What saves memory: {', '.join(savers)}."]
    names = ", ".join(one.name for one in contenders(found))
    tried = f" (of {names})" if len(found) > 1 else ""
    lines.append(f"{what}. What saves memory, and the fastest that fits with it{tried}:")
    rows = [
        [way, "none fits", "", ""]
        if one is None
        else [way, one.name, format_time(one.iteration_time, "s"), format_bytes(max(one.run.peak_memory), "s") + ", barely" * _barely(one, capacity)]
        for way, one in ways.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [*lines, *("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)]


def _choices(parallel: Parallelism) -> str:
    words = [f"recompute {parallel.recompute}" + (f" every {parallel.recompute_layers} layers" if parallel.recompute_layers > 1 else "")]
    flags = ("sequence_parallel", "scatter_gather", "flash_attention", "offload_optimizer", "offload_activations")
    words += [flag.replace("_", " ") for flag in flags if getattr(parallel, flag)]
    words += [f"ZeRO {parallel.zero}"] if parallel.zero else []
    return ", ".join([*words, "fp32"] if parallel.precision == "fp32" else words)


def _table(found: Sequence[Estimate], capacity: float) -> list[str]:
    rows = [["schedule", "fits", "iteration_time", "tokens_per_second", "mfu", "hfu", "bubble", "exposed", "peak_memory", "does not fit first at"]]
    for one in found:
        overflows = one.run.overflows()
        where = ""
        if overflows:
            first = overflows[0]
            where = f"device {first.device}, " + ("before it starts" if first.op is None else f"op {first.op} at {format_time(first.time, 's')}")
        rows.append(
            [
                one.name + (f" (v={_chunks(one)})" if _chunks(one) > 1 else "") + ("" if one.run.schedule.weights == "flush" else " *"),
                "no" if overflows else "barely" if _barely(one, capacity) else "yes",
                format_time(one.iteration_time, "s"),
                f"{one.tokens_per_second:,.0f}",
                *(f"{100 * value:.1f} %" for value in (one.mfu, one.hfu, one.bubble, one.exposed)),
                format_bytes(max(one.run.peak_memory), "s"),
                where,
            ]
        )
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {0, 1, 9}
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width) for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _memory(one: Estimate) -> list[str]:
    """A row per device: its stages' layers, what the peak consists of, and the peak."""
    figures = one.run.figures()
    peaks, owned = figures["peak_memory_by_category"], one.run.schedule.device_stages
    layout = one.costs.layout(one.run.schedule.num_stages)
    categories = list(dict.fromkeys(category for peak in peaks for category in peak))
    rows = [["device", "layers", *categories, "peak"]]
    for device, (peak, stages) in enumerate(zip(peaks, owned, strict=True)):
        layers = " + ".join(str(layout.layers[stage]) for stage in stages)
        ends = [word for word, stage in (("embedding", layout.embedding), ("head", layout.head)) if stage in stages]
        sizes = [format_bytes(peak.get(category, 0.0), "s") for category in categories]
        rows.append([str(device), " + ".join([layers, *ends]), *sizes, format_bytes(sum(peak.values()), "s")])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) if place == 1 else cell.rjust(width) for place, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def _breakdown(one: Estimate) -> list[str]:
    parts = {part: seconds for part, seconds in one.breakdown.items() if seconds > 0}
    width = max(map(len, parts))
    return [f"  {part.ljust(width)}  {format_time(seconds, 's'):>9}  {100 * seconds / one.iteration_time:5.1f} %" for part, seconds in parts.items()]
