"""``pipesim calibrate``."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipesim import registry
from pipesim.cli.grouping import grouped
from pipesim.cli.options import Request, is_run, print_json, request_options, schedule_command
from pipesim.cli.replaying import _SIMULATED, _settings, replay_command
from pipesim.costs import CostModel, UniformCosts
from pipesim.errors import ScheduleError, did_you_mean

if TYPE_CHECKING:
    from pipesim.calibration import Calibration, Prediction
    from pipesim.schedule import Schedule
    from pipesim.timeline import Timeline

__all__ = ["calibrate_command"]

# what a run of a calibration may say of itself, as pipesim replay has it
_OF_REPLAYS = (
    "solo", "emulate", "backend", "model", "layers", "hidden", "heads", "sequence", "vocabulary", "microbatch_size", "batch_shape", "tokens",
    "dtype", "iterations", "warm_up", "receives", "batched", "adam", "threads", "timeout",
)  # fmt: skip


# schedules are predicted as their files, or they are generated: options that read a file differently do not reach them
_OF_FILES = ("legacy", "drop_communication", "placement", "graph", "weight_policy", "lower")
_OWN = "The calibration"


@schedule_command("calibrate", metavar="[RUN.json.gz | calibration.toml]...")
@grouped(_OWN, "--run", "runs", is_flag=True, help="Do the calibration's runs: GPipe, a probe with split backward, a probe of messages.")
@grouped(_OWN, "--predict", metavar="NAMES", help="Schedules to predict, with commas: 1f1b,zb-h1, files, or saved runs to compare with.")
@grouped(_OWN, "--verify", is_flag=True, help="With --run: replay the predicted schedules too, in turn with the calibration's runs.")
@grouped(_OWN, "--report", is_flag=True, help="With --predict from a calibration.toml: print the calibration too, not only the predictions.")
@grouped(_OWN, "--rounds", type=int, default=3, help="How often each run is done, all in turn, in new processes. Default 3.")
@grouped(
    _OWN, "--stage-chunks", metavar="N,...", default="1", help="Stages per device to measure, such as 1,2; what --predict needs is added. Default 1."
)
@grouped(_OWN, "--folder", default="calibration-runs", help="Where runs are kept; those that are there are reused. Default calibration-runs.")
@grouped(_OWN, "--out", default="calibration.toml", help="Where the result goes; its links go to NAME-cluster.toml. Default calibration.toml.")
@grouped(_OWN, "--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@request_options
def calibrate_command(words: tuple[str, ...], runs: bool, report: bool, out: str, as_json: bool, **values: Any) -> None:
    """Measure what ops, messages and the host take, and predict schedules that were not run.

    \b
    pipesim calibrate --run -p 2 -m 8 --layers 8 --hidden 256 --predict 1f1b,interleaved-1f1b,zb-h1 --verify
    pipesim calibrate calibration.toml --predict zb-v -p 2 -m 16
    pipesim calibrate gpipe.json.gz split.json.gz messages.json.gz --predict other.json.gz
    pipesim simulate 1f1b -p 2 -m 8 --costs calibration.toml --cluster calibration-cluster.toml
    """  # noqa: D301  click wants the character
    from pipesim.calibration import calibrate, calibration_report, load_calibration, prediction_table, save_calibration, too_busy
    from pipesim.replay import ReplayError
    from pipesim.timeline import load

    for word in words:  # schedules to predict have no options of their own here
        option = word.partition("=")[0]
        if option.startswith("-"):
            known = [name for param in calibrate_command.params if not getattr(param, "hidden", False) for name in param.opts]
            raise click.UsageError(f"No such option: {option}{did_you_mean(option, known)}")
    request = Request(words, values)
    if runs == bool(request.names):
        raise click.UsageError("give --run to do a calibration's runs, or saved runs to calibrate from (or a calibration .toml to predict with)")
    if values["verify"] and not (runs and values["predict"]):
        raise click.UsageError("--verify replays what --predict names, in turn with the calibration's runs: it wants --run and --predict")
    if not Path(out).resolve().parent.is_dir():
        raise FileNotFoundError(2, "there is no such folder", out)
    saved = not runs and request.names[0].endswith(".toml")
    notes: tuple[str, ...] = ()
    replays: list[tuple[Timeline, ...]]
    if runs:
        schedules, replays = _predicted(values)
        try:
            calibration, done, notes = _run(request, values, schedules, Path(out).stem)
        except ReplayError as error:
            raise click.ClickException(f"{error}; what was complete is in {values['folder']}, and is reused next time") from None
        replays = [(*given, *own) for given, own in zip(replays, done or [()] * len(replays), strict=True)]
    elif saved:
        if len(request.names) > 1:
            raise click.UsageError("one calibration at a time")
        calibration = load_calibration(request.names[0])
        schedules, replays = _predicted(values)
    else:
        calibration = calibrate([load(name) for name in request.names], Path(out).stem)
        schedules, replays = _predicted(values)
    paths = () if saved else save_calibration(calibration, out)
    predictions = _predictions(calibration, schedules, replays)
    busy = too_busy(predictions)
    if busy is not None:  # whoever uses the calibration later must know, too
        calibration = replace(calibration, notes=(busy, *calibration.notes))
        paths = () if saved else save_calibration(calibration, out)
    if as_json:
        print_json(_data(calibration, predictions, notes))
    else:
        told = report or not saved or not predictions
        parts = [calibration_report(calibration)] if told else [] if busy is None else [busy]
        parts += ["\n".join(notes)] if notes else []
        click.echo("\n\n".join([*parts, *([prediction_table(predictions)] if predictions else [])]))
    for path in paths:
        click.echo(f"wrote {path}", err=True)


def _arranged(command: click.Command) -> None:
    """Adds the options of a replay that a calibration has too, and leaves out of the help, or of the command, what means nothing here."""
    replayed, emulated = "--run: the model and its replays", "--run --emulate: what ops take (times in --unit), and bytes"
    known = {param.name for param in command.params}
    added = [copy(param) for param in replay_command.params if param.name in _OF_REPLAYS and param.name not in known]
    for param in added:
        param.group = replayed  # type: ignore[attr-defined]
    command.params = [*added, *(param for param in command.params if param.name not in _OF_FILES)]
    for param in command.params:
        group = getattr(param, "group", "")
        if group.startswith(("Times", "Bytes", "Costs")):
            param.group = emulated  # type: ignore[attr-defined]
        elif group.startswith(("The run", "Communication")):
            param.group = replayed  # type: ignore[attr-defined]
        if isinstance(param, click.Option) and (param.name in _SIMULATED or group == "Collectives"):
            param.hidden = True
    order = [_OWN, "The schedule", replayed, emulated]
    command.params.sort(key=lambda param: order.index(found) if (found := getattr(param, "group", "")) in order else len(order))


_arranged(calibrate_command)


def _predicted(values: dict[str, Any]) -> tuple[list[Schedule], list[tuple[Timeline, ...]]]:
    """What is to be predicted, and the runs of it that were given."""
    from pipesim.timeline import load

    schedules: list[Schedule] = []
    given: list[tuple[Timeline, ...]] = []
    for name in (values["predict"] or "").split(","):
        name = name.strip()
        if not name:
            continue
        if is_run(name):
            run = load(name)
            schedules.append(run.schedule)
            given.append((run,))
            continue
        if registry.is_file(name):
            schedules.append(registry.read_file(name).check())
        else:
            schedules.append(registry.generate(name, *_sizes(values)))
        given.append(())
    return schedules, given


def _sizes(values: dict[str, Any]) -> tuple[int, int]:
    devices, microbatches = values["devices"], values["microbatches"]
    if devices is None or microbatches is None:
        raise click.UsageError("say the size: --devices 2 --microbatches 8")
    return devices, microbatches


def _run(
    request: Request, values: dict[str, Any], schedules: list[Schedule], name: str
) -> tuple[Calibration, tuple[tuple[Timeline, ...], ...], tuple[str, ...]]:
    """Does the runs, and calibrates from them."""
    from math import lcm

    from pipesim.calibration import Plan, calibrate, run_plan

    devices, microbatches = _sizes(values)
    chunks = _chunks(values["stage_chunks"], schedules, devices)
    settings = _settings({**values, "data": 1, "profile": None})
    if settings.model.layers is None and ":" not in settings.model.kind:
        # the same model, however many stages it is cut into
        settings = replace(settings, model=replace(settings.model, layers=devices * lcm(*chunks)))
    costs: CostModel | None = None
    if settings.mode == "emulate":
        costs = request.costs()
        if isinstance(costs, UniformCosts) and costs.stages is None:
            costs = replace(costs, stages=devices)
    verify = tuple(schedules) if values["verify"] else ()
    plan = Plan(devices, microbatches, chunks, settings, costs, values["rounds"], verify)
    done = run_plan(plan, values["folder"], lambda text: click.echo(text, err=True))
    return calibrate(done.calibration, name), done.verification, done.notes


def _chunks(text: str, schedules: list[Schedule], devices: int) -> tuple[int, ...]:
    try:
        found = {int(part) for part in text.split(",")}
    except ValueError:
        raise click.UsageError(f"--stage-chunks {text!r} is no list of whole numbers, such as 1,2") from None
    for schedule in schedules:
        if schedule.num_devices != devices or schedule.num_stages % devices:
            raise ScheduleError(
                f"{schedule.name} has {schedule.num_stages} stages on {schedule.num_devices} devices; the calibration's runs are of {devices} devices with "
                "as many stages, or a multiple of them"
            )
        found.add(schedule.num_stages // devices)
    return tuple(sorted(found))


def _predictions(calibration: Calibration, schedules: list[Schedule], replays: list[tuple[Timeline, ...]]) -> list[Prediction]:
    from pipesim.calibration import predict

    return [predict(calibration, schedule, runs) for schedule, runs in zip(schedules, replays, strict=True)]


def _data(calibration: Calibration, predictions: list[Prediction], notes: tuple[str, ...]) -> dict[str, Any]:
    """As ``--json`` prints it."""
    costs = calibration.costs
    beside = calibration.interference
    return {
        "source": dict(calibration.source),
        "stages": {str(count): {"seconds": dict(table.times), "bytes": dict(table.bytes)} for count, table in sorted(costs.tables.items())},
        "spreads": [{"stages": one.stages, "stage": one.stage, "kind": one.kind, **vars(one.spread)} for one in calibration.spreads],
        "host": dict(vars(costs.host)),
        "links": [{"from": pair[0], "to": pair[1], **vars(link)} for pair, link in sorted(calibration.links.items())],
        "interference": None if beside is None else {**vars(beside), "simulated": beside.seen},
        "notes": [*calibration.notes, *notes],
        "predictions": [one.as_dict() for one in predictions],
    }
