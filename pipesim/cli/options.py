"""What the commands share: options that become a schedule, costs, a cluster and a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

import click

from pipesim import registry
from pipesim.cli.communicating import COLLECTIVES, MODES, collective_options, communication, communication_options
from pipesim.cli.converting import _bandwidth, _capacity, _converted, _edge, _flag, _physical, _placement
from pipesim.cli.grouping import GroupedCommand, grouped
from pipesim.cluster import Cluster
from pipesim.costs import CostModel, UniformCosts, cost_presets, read_costs
from pipesim.engine import ENGINES, simulate
from pipesim.errors import ScheduleError, did_you_mean
from pipesim.lowering import Receives, lower
from pipesim.schedule import WEIGHT_POLICIES, Schedule
from pipesim.timeline import Timeline, load

__all__ = ["Request", "is_run", "json_option", "print_json", "request_options", "schedule_command", "schedule_options"]

Command = TypeVar("Command", bound=Callable[..., Any])


def schedule_command(name: str, metavar: str = "SCHEDULE") -> Callable[[Callable[..., Any]], click.Command]:
    """A command that takes schedules, and options of those schedules.

    They are not known before the schedule's name is, so click hands every word that it does not know to :class:`Request`.
    """

    def decorate(function: Callable[..., Any]) -> click.Command:
        function = click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar=metavar)(function)
        return click.command(name, cls=GroupedCommand, context_settings={"ignore_unknown_options": True})(function)

    return decorate


class Numbers(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """A number, or a list with commas, one per stage: ``1`` or ``1,1,1.5,1``; of sizes and times with a unit, too."""

    name = "numbers"

    def __init__(self, dimension: str | None = None) -> None:
        self.dimension = dimension

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        parts = [self._one(part.strip(), param, ctx) for part in value.split(",")]
        return parts if len(parts) > 1 else parts[0]

    def _one(self, text: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return float(text)
        except ValueError:
            if self.dimension is not None and text:
                return text
            self.fail(f"{text!r} is not a number; write a number, or one per stage such as 1,1,1.5,1", param, ctx)


_COLLECTIVE_TIMES = ("reduction", "tied_reduction", "unshard")
TIMES = ("forward", "backward", "input_grad", "weight_grad", "optimizer", "overlap", *_COLLECTIVE_TIMES)
SIZES = ("message", "activation", "activation_freed_by_input_grad", "stage_input", "weights", "gradients", "optimizer_state")
_TIME_HELP = {
    "forward": "Time of F per stage (chunk). Default 1.",
    "backward": "Time of B, the full backward. Default: I + W.",
    "input_grad": "Time of I, the input-gradient half. Default 1, or half of B.",
    "weight_grad": "Time of W, the weight-gradient half. Default 1, or the rest of B.",
    "optimizer": "Time of an optimizer update. Default 0.",
    "overlap": "Time of a forward and a backward in one slot. Default: their sum.",
    "reduction": "Time of a gradient reduction, which runs beside compute and before U. Default 0.",
    "tied_reduction": "Time of the reduction that tied stages share. Default 0.",
    "unshard": "Time of an UNSHARD, where the schedule lists it. Default 0.",
}
_SIZE_HELP = {
    "message": "Bytes (or units) of a message between stages. Default 0.",
    "activation": "Bytes of one activation. Default 1 unit.",
    "activation_freed_by_input_grad": "The part of it that goes when I ends. Default 0.",
    "stage_input": "Bytes kept where the forward is recomputed. Default 0.",
    "weights": "Bytes of a stage's weights. Default 0.",
    "gradients": "Bytes of its gradients. Default 0.",
    "optimizer_state": "Bytes of its optimizer state. Default 0.",
}


# Options that mean something only for a schedule file, and only for a simulation.
_OF_FILES = ("legacy", "drop_communication", "placement", "graph", "weight_policy")
_OF_RUNS = (
    "recompute",
    "latency",
    "bandwidth",
    "stages",
    "costs",
    "cuts",
    "weight_grad_share",
    "optimizer_bytes",
    "cluster",
    "capacity",
    "no_barrier",
    "lower",
    *COLLECTIVES,
    *MODES,
)


def schedule_options(command: Command) -> Command:
    """Options that say how large a schedule is, or how its file is read."""
    size, file = "The schedule", "A schedule from a file"
    options = [
        grouped(size, "--devices", "-p", type=int, help="Devices p; a schedule file needs none."),
        grouped(size, "--microbatches", "-m", type=int, help="Microbatches m in all; a schedule file needs none."),
        grouped(file, "--legacy", is_flag=True, help="PyTorch's words of 2024 (B is the input half, BW the full backward)."),
        grouped(file, "--drop-communication", is_flag=True, help="Leave out listed SEND, RECV, UNSHARD, RESHARD, REDUCE_GRAD."),
        grouped(file, "--placement", help="Where stages are expected: loop, v, or a device per stage such as 0,1,1,0."),
        grouped(file, "--graph", help="Edges of the stage graph, such as '0>1,0>2,1>3,2>3'. Default: a chain."),
        grouped(file, "--weight-policy", type=click.Choice(WEIGHT_POLICIES), help="What happens to weights. Default flush."),
        grouped(
            size,
            "--lower",
            type=click.Choice(get_args(Receives)),
            help="List every message as SEND and RECV ops. RECVs early: as soon as it is sent, as PyTorch; late: right before its use.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def request_options(command: Command) -> Command:
    """Options that say what to run: schedule, costs, cluster, steps."""
    times, sizes, files, run, links = "Times (slots, or --unit)", "Bytes (or units)", "Costs from a file", "The run", "Links"
    options: list[Callable[[Any], Any]] = []
    options += [grouped(times, _flag(name), type=Numbers("time"), help=_TIME_HELP[name]) for name in TIMES if name not in _COLLECTIVE_TIMES]
    options += [
        grouped(times, "--recompute", type=click.Choice(["never", "always", "except_last"]), help="Add F to the backward of these microbatches."),
        grouped(times, "--unit", type=click.Choice(["slot", "s", "ms", "us"]), default="slot", help="Unit of the times."),
        grouped(
            times, "--stages", type=int, help="Times and bytes are of one of this many stages; chunks take their share. compare: as many as devices."
        ),
    ]
    options += [grouped(sizes, _flag(name), type=Numbers("bytes"), help=_SIZE_HELP[name]) for name in SIZES]
    options += [
        grouped(
            files,
            "--costs",
            help=f"Stage times (TOML), a layer profile (TOML of pipesim profile, or graph.txt), or one of {', '.join(cost_presets())}.",
        ),
        grouped(files, "--cuts", help="Profile: the layer that each stage but the first starts with, such as 5,12,30. Default: balanced."),
        grouped(files, "--weight-grad-share", type=float, help="Profile: the part of the backward that W takes where it is split."),
        grouped(files, "--optimizer-bytes", type=float, help="Profile: bytes of optimizer state per byte of parameters."),
        grouped(links, "--latency", type=Numbers("time"), help="Time of a hop between devices. Default 0."),
        grouped(links, "--bandwidth", help="Bytes (units) per unit of time of every link; 25 GB/s where times are physical."),
        grouped(links, "--cluster", help="Speeds, links, networks and capacities: a TOML file, or a preset such as dgx-a100."),
    ]
    options += communication_options()
    options += [grouped("Collectives", _flag(name), type=Numbers("time"), help=_TIME_HELP[name]) for name in _COLLECTIVE_TIMES]
    options += collective_options()
    options += [
        grouped(run, "--capacity", help="Memory of every device, to find the first op that does not fit."),
        grouped(run, "--steps", type=int, default=1, help="How often to run the schedule."),
        grouped(run, "--no-barrier", is_flag=True, help="Devices do not wait for each other before the optimizer."),
        grouped(run, "--engine", type=click.Choice(ENGINES), default="auto", help="Which engine runs it."),
    ]
    for option in reversed(options):
        command = option(command)
    return schedule_options(command)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")


def print_json(data: Any) -> None:
    """Prints one JSON object on stdout; the numbers are Python's, so NaN cannot slip in."""
    click.echo(json.dumps(data, allow_nan=False))


def is_run(name: str) -> bool:
    """Whether a name means a saved run."""
    return name.lower().endswith((".json", ".json.gz"))


@dataclass
class Request:
    """What the user asked for.

    Attributes:
        words: The words that click did not know: names of schedules, and schedules' own options.
        values: click's options.
    """

    words: Sequence[str]
    values: dict[str, Any]

    def __post_init__(self) -> None:
        self.names: list[str] = []
        self._own: dict[str, str | None] = {}
        flags = _installed_flags()
        words = list(self.words)
        while words:
            word = words.pop(0)
            if not word.startswith("-") or word == "-":
                self.names.append(word)
                continue
            key, equals, value = word.lstrip("-").partition("=")
            key = key.replace("-", "_")
            if not equals and key not in flags and words and not words[0].startswith("--"):
                equals, value = "=", words.pop(0)
            self._own[key] = value if equals else None
        self._check_options()

    @property
    def name(self) -> str:
        """The one schedule that was asked for."""
        if len(self.names) != 1:
            what = "Missing argument 'SCHEDULE'; pipesim list shows them" if not self.names else f"Got unexpected extra argument {self.names[1]!r}"
            raise click.UsageError(what)
        return self.names[0]

    def _check_options(self) -> None:
        """Raises a usage error for an option that none of the schedules has, before anything runs."""
        if not self._own:
            return
        generated = [name for name in self.names if not (registry.is_file(name) or is_run(name))]
        known = {key for name in generated for key in registry.options_of(registry.find(name))}
        for option in self._own:
            if option not in known:
                own = (
                    f"options of {', '.join(generated)}: {', '.join(sorted(map(_flag, known)))}"
                    if known
                    else "the schedule has no options of its own"
                )
                hint = did_you_mean(_flag(option), [*map(_flag, known), *map(_flag, self.values)])
                raise click.UsageError(f"No such option: {_flag(option)}{hint or '; ' + own}")

    # -- schedule ------------------------------------------------------------------------------------------------------

    def schedule(self, name: str) -> Schedule:
        """The schedule that a name or a file means."""
        if registry.is_file(name):
            try:
                return self._lowered(self._read(name).check())
            except ScheduleError as error:
                raise ScheduleError(str(error) if name in str(error) else f"{name}: {error}") from None
        self._refuse_given(name, "is no file", *_OF_FILES)
        generator = registry.find(name)
        sizes = {key: self.values[key] for key in ("devices", "microbatches")}
        for key, value in sizes.items():
            if value is None:
                raise click.UsageError(f"schedule {name!r} wants --{key}, such as --devices 4 --microbatches 8")
        return self._lowered(registry.generate(name, sizes["devices"], sizes["microbatches"], **self._own_options(name, generator)))

    def _lowered(self, schedule: Schedule) -> Schedule:
        return schedule if self.values["lower"] is None else lower(schedule, self.values["lower"])

    def _refuse_given(self, name: str, why: str, *options: str) -> None:
        """Raises a usage error for options that would change nothing. Of several schedules, some may want them."""
        given = [option for option in options if self.values.get(option) not in (None, False)]
        if given and len(self.names) == 1:
            raise click.UsageError(f"{name} {why}, so {', '.join(map(_flag, given))} would change nothing; leave it out")

    def _read(self, path: str) -> Schedule:
        values = self.values
        options: dict[str, Any] = {"legacy": values["legacy"]}
        if values["graph"] is not None:
            options["graph"] = [_edge(word) for word in values["graph"].replace(",", " ").split()]
        if values["weight_policy"] is not None:
            options["weights"] = values["weight_policy"]
        schedule = registry.read_file(path, **options)
        if values["placement"] is not None:
            schedule.check_placement(_placement(values["placement"], schedule))
        for key, actual in (("devices", schedule.num_devices), ("microbatches", schedule.num_microbatches)):
            if values[key] is not None and values[key] != actual:
                raise ScheduleError(f"{path} has {actual} {key}, and --{key} says {values[key]}; leave it out")
        return schedule.without_communication() if values["drop_communication"] else schedule

    def _own_options(self, name: str, generator: registry.Generator) -> dict[str, Any]:
        """The options of this schedule among the extra words, and the costs that its order depends on."""
        known = registry.options_of(generator)
        options = {key: self.values[key] for key in known if self.values.get(key) is not None}
        if "costs" in self.values:
            options.update({key: value for key, value in self._times_for_order().items() if key in known})
        for key, text in self._own.items():
            if key in known:
                options[key] = _converted(key, text, known[key].annotation)
        return options

    def _times_for_order(self) -> dict[str, Any]:
        """The times that an order may depend on (zb-auto, v-auto, hanayo, ampnet): the same that it is then run with."""
        costs = self.costs()
        if not isinstance(costs, UniformCosts):
            return {}
        return {name: value.tolist() for name, value in costs.stage_times().items()}

    # -- costs and cluster -----------------------------------------------------------------------------------------

    def costs(self) -> CostModel:
        """The costs: a file, or numbers."""
        values = self.values
        given = [name for name in (*TIMES, *SIZES, "latency", "bandwidth", "recompute", "stages", *COLLECTIVES) if values[name] not in (None, False)]
        profile = {name: values[name] for name in ("weight_grad_share", "optimizer_bytes") if values[name] is not None}
        if values["cuts"] is not None:
            profile["cuts"] = _converted("cuts", values["cuts"], Sequence[int])
        if values["costs"] is not None:
            if given:
                raise click.UsageError(f"--costs gives the costs already; leave out {', '.join(map(_flag, given))}")
            costs = read_costs(values["costs"], **profile)
            if isinstance(costs, UniformCosts) and costs.stages is not None:
                return replace(costs, microbatches=values["microbatches"])
            return costs
        if profile:
            raise click.UsageError(f"{', '.join(map(_flag, profile))} belongs to --costs with a layer profile")
        scale = {"slot": None, "s": 1.0, "ms": 1e-3, "us": 1e-6}[values["unit"]]
        options: dict[str, Any] = {}
        for name in (*TIMES, "latency"):
            if values[name] is not None:
                options[name] = _physical(values[name], scale, "time", name)
        for name in SIZES:
            if values[name] is not None:
                options[name] = _physical(values[name], None if scale is None else 1.0, "bytes", name)
        if values["bandwidth"] is not None:
            options["bandwidth"] = _bandwidth(values["bandwidth"], scale is not None)
        if values["recompute"] is not None:
            options["recompute_policy"] = values["recompute"]
        options.update({name: values[name] for name in COLLECTIVES if values[name] not in (None, False)})
        return UniformCosts(
            **options,
            stages=values["stages"],
            microbatches=values["microbatches"] if values["stages"] else None,
            unit="slot" if scale is None else "s",
        )

    def cluster(self, costs: CostModel) -> Cluster | None:
        """The cluster, if one is needed."""
        cluster = None if self.values["cluster"] is None else Cluster.load(self.values["cluster"])
        capacity, asked = self.values["capacity"], communication(self.values, cluster)
        if capacity is None and asked is None:
            return cluster
        if cluster is None:
            cluster = Cluster(unit=costs.unit, name="none")
        if asked is not None:
            cluster = replace(cluster, communication=asked)
        return cluster if capacity is None else cluster.with_memory(_capacity(capacity, costs.unit))

    # -- a run -----------------------------------------------------------------------------------------------------

    def run(self, name: str) -> Timeline:
        """The run that a name means: a saved one, or a simulation."""
        if is_run(name):
            self._refuse_given(name, "is a saved run, with its times and bytes", *TIMES, *SIZES, *_OF_FILES, *_OF_RUNS)
            return load(name)
        costs = self.costs()
        values = self.values
        return simulate(
            self.schedule(name), costs, cluster=self.cluster(costs), steps=values["steps"], barrier=not values["no_barrier"], engine=values["engine"]
        )


def _installed_flags() -> set[str]:
    """Options of installed schedules that take no value; others' are written --flag=true."""
    generators = set(registry.available().values())
    return {name for generator in generators for name, option in registry.options_of(generator).items() if option.annotation is bool}
