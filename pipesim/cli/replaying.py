"""``pipesim replay``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipesim.cli.options import Request, json_option, print_json, request_options, schedule_command

if TYPE_CHECKING:
    from pipesim.replay import Settings
    from pipesim.replay.settings import Mode
    from pipesim.timeline import Timeline

__all__ = ["replay_command"]


# What a simulation assumes and a replay finds out.
_SIMULATED = (
    *("latency", "bandwidth", "cluster", "capacity", "engine", "steps", "recompute"),
    *("sends", "blocking", "stream", "shape_messages", "interference"),
)


@schedule_command("replay")
@request_options
@click.option("--solo", is_flag=True, help="One device's stream after the other on one device, with stand-in messages.")
@click.option("--emulate", is_flag=True, help="Ops sleep for their duration (--forward 10 --unit ms ...); messages are real.")
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), help="gloo on CPUs, nccl on CUDA devices. Default: nccl where there is CUDA.")
@click.option("--model", default="mlp", help="mlp, transformer, or your layers: module:function, file.py:function. Default mlp.")
@click.option("--layers", type=int, help="Layers in all. Default: one per stage; name it where schedules are compared.")
@click.option("--hidden", type=int, default=128, help="Width of the model. Default 128.")
@click.option("--heads", type=int, default=4, help="Attention heads. Default 4.")
@click.option("--sequence", type=int, default=64, help="Tokens per sample. Default 64.")
@click.option("--vocabulary", type=int, default=512, help="Vocabulary. Default 512.")
@click.option("--microbatch-size", type=int, default=8, help="Samples per microbatch. Default 8.")
@click.option("--batch-shape", metavar="N,...", help="Own model: shape of a microbatch, the samples first, such as 8,1024.")
@click.option("--tokens", type=int, help="Own model: its input is token numbers below this.")
@click.option("--dtype", default="float32", help="Type of weights and activations. Default float32.")
@click.option("--iterations", "--repeat", type=int, default=5, help="Runs that are measured. Default 5.")
@click.option("--warm-up", type=int, default=2, help="Runs before, which are not. Default 2.")
@click.option("--data", type=int, default=1, help="Data-parallel degree: devices x data ranks. Default 1.")
@click.option("--adam", is_flag=True, help="Adam instead of SGD.")
@click.option("--threads", type=int, default=1, help="Threads per rank on a CPU. Default 1.")
@click.option("--timeout", type=float, default=60.0, help="Seconds without progress until all ranks are stopped. Default 60.")
@click.option("--profile", type=click.Path(file_okay=False), help="Folder for torch.profiler traces, one per rank, with labels such as PP:2F0.")
@click.option("--out", help="Save the run (run.json.gz); iterations are appended if the file is there.")
@json_option
def replay_command(words: tuple[str, ...], out: str | None, as_json: bool, **values: Any) -> None:
    """Run a schedule for real under torch.distributed, and measure every op.

    \b
    pipesim replay 1f1b --devices 2 --microbatches 8 --layers 8 --out run.json.gz
    pipesim replay zb-h1 --devices 4 --microbatches 8 --model transformer --solo
    pipesim replay 1f1b --devices 8 --microbatches 16 --emulate --forward 10 --backward 20 --unit ms
    torchrun --standalone --nproc-per-node 2 -m pipesim.replay 1f1b --devices 2 --microbatches 8 --out run.json.gz
    """  # noqa: D301  click wants the character
    from pipesim.metrics import iteration_times
    from pipesim.replay import ReplayError, Task, replay_all, save

    settings = _settings(values)
    request = Request(words, values)
    schedule = request.schedule(request.name)
    task = Task(schedule, settings, request.costs() if settings.mode == "emulate" else None)
    if out is not None and not Path(out).resolve().parent.is_dir():
        raise FileNotFoundError(2, "there is no such folder", out)
    if settings.profile is not None:
        Path(settings.profile).mkdir(parents=True, exist_ok=True)
    try:
        if settings.mode != "solo" and "TORCHELASTIC_RUN_ID" in os.environ:
            from pipesim.replay.torchrun import run_rank

            run = run_rank(task)
            if run is None:  # not rank 0, which tells
                return
        else:
            run = replay_all([task])[0]
    except ReplayError as error:
        if error.partial is not None and out is not None:
            save(error.partial, out)
            raise click.ClickException(f"{error}; what was measured is in {out}, marked as partial") from None
        raise click.ClickException(str(error)) from None
    if out is not None:
        run = save(run, out)
    if as_json:
        print_json({**run.figures(), "info": dict(run.info), "iteration_times": iteration_times(run).tolist()})
    else:
        click.echo("\n".join([*_about(run), "", run.summary()]))
    if out is not None:
        click.echo(f"wrote {out}", err=True)


def _settings(values: dict[str, Any]) -> Settings:
    from pipesim.replay import ReplayModel, Settings, default_backend

    context = click.get_current_context()
    for name in (*_SIMULATED, *(() if values["emulate"] else ("message",))):
        if name in values and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} is of a simulation; a replay has the real one")
    if values["solo"] and values["emulate"]:
        raise click.UsageError("--solo measures ops, --emulate sleeps instead of them; choose one")
    shape = values["batch_shape"]
    try:
        numbers = None if shape is None else tuple(int(part) for part in shape.split(","))
    except ValueError:
        raise click.UsageError(f"--batch-shape {shape!r} is no list of whole numbers, such as 8,1024") from None
    sizes = {name: values[name] for name in ("layers", "hidden", "heads", "sequence", "vocabulary", "tokens", "dtype")}
    model = ReplayModel(values["model"], microbatch=values["microbatch_size"], shape=numbers, **sizes)
    mode: Mode = "solo" if values["solo"] else "emulate" if values["emulate"] else "run"
    same = {name: values[name] for name in ("iterations", "warm_up", "data", "batched", "threads", "timeout", "profile")}
    same["receives"] = values["receives"] or "early"
    backend = values["backend"] or ("gloo" if mode == "emulate" else default_backend())
    return Settings(model, mode, backend, optimizer="adam" if values["adam"] else "sgd", barrier=not values["no_barrier"], **same)


def _about(run: Timeline) -> list[str]:
    """What the run is, for people."""
    from statistics import median

    from pipesim.metrics import iteration_times
    from pipesim.units import format_time

    times = iteration_times(run).tolist()
    info = run.info
    kinds = {
        "run": f"run, {info['backend']}",
        "solo": "solo, one device after the other",
        "emulated": f"emulated ops, messages over {info['backend']}",
    }
    lines = [f"measured: {kinds[info['mode']]}; {info['device']}; torch {info['torch']}"]
    spread = f"{format_time(min(times), 's')} to {format_time(max(times), 's')}"
    lines.append(f"{len(times)} iterations, median {format_time(median(times), 's')} ({spread})")
    lines += [f"{name}: {info[name]}" for name in ("composed", "notes", "partial", "losses") if name in info]
    return lines
