"""``pipesim jitter``."""

from __future__ import annotations

from typing import Any

import click

from pipesim.cli.converting import _number
from pipesim.cli.options import Request, json_option, print_json, request_options, schedule_command
from pipesim.cli.sweeping import check_jobs, progress_bar
from pipesim.errors import ScheduleError, did_you_mean
from pipesim.files import read_limited
from pipesim.jitter import Distribution, Empirical, LogNormal, Normal, monte_carlo
from pipesim.op import COMPUTE_KINDS

__all__ = ["jitter_command"]

_KINDS = [kind.name for kind in COMPUTE_KINDS]
_ALL = "every kind"


@schedule_command("jitter")
@request_options
@click.option("--normal", metavar="PART", help="Normal durations, truncated at 0; 0.1 is a deviation of 10 %. Or per kind: F=0.05,B=0.1.")
@click.option("--lognormal", metavar="PART", help="Log-normal durations, in the same way.")
@click.option("--samples", metavar="FILE", help="Measured durations: a number per line, or KIND,NUMBER such as F,18.4.")
@click.option("--slow-device", multiple=True, metavar="D=FACTOR", help="A device whose durations are longer, such as 2=1.3. May be repeated.")
@click.option("--slow-link", multiple=True, metavar="A>B=FACTOR", help="A link that takes longer, such as '0>1=4'. May be repeated.")
@click.option("--draws", "-n", type=int, default=1000, help="How many runs. Default 1000.")
@click.option("--seed", type=int, default=0, help="The same seed gives the same draws. Default 0.")
@click.option("--jobs", "-j", type=int, default=1, help="Processes that share the work; -1 is one per core. Default 1.")
@json_option
def jitter_command(words: tuple[str, ...], draws: int, seed: int, jobs: int, as_json: bool, **values: Any) -> None:
    """Run SCHEDULE many times, with durations that vary: quantiles of the makespan, and which device is critical.

    \b
    pipesim jitter 1f1b -p 4 -m 8 --forward 1 --backward 2 --lognormal 0.1 --slow-device 2=1.3

    Every duration is multiplied by a factor of its own with mean 1; measured durations are divided by their mean.
    """  # noqa: D301  click wants the character
    check_jobs(jobs)
    jitter = _jitter(values["normal"], values["lognormal"], values["samples"])
    slow_devices, slow_links = dict(map(_slow_device, values["slow_device"])), dict(map(_slow_link, values["slow_link"]))
    if jitter is None and not slow_devices and not slow_links:
        raise click.UsageError("nothing varies: give --normal, --lognormal, --samples, --slow-device or --slow-link")
    if values["steps"] != 1:
        raise click.UsageError("jitter is about one step; leave out --steps")
    request = Request(words, values)
    costs = request.costs()
    with progress_bar("draws") as (progress, _):
        found = monte_carlo(
            request.schedule(request.name),
            costs,
            jitter=jitter,
            slow_devices=slow_devices,
            slow_links=slow_links,
            n=draws,
            seed=seed,
            cluster=request.cluster(costs),
            barrier=not values["no_barrier"],
            engine=values["engine"],
            jobs=jobs,
            progress=progress,
        )
    if as_json:
        print_json(found.as_dict())
    else:
        click.echo(found.summary())


def _jitter(normal: str | None, lognormal: str | None, samples: str | None) -> Distribution | dict[str, Distribution] | None:
    """What the three options say together: one distribution for all kinds, or some for some kinds."""
    found: dict[str, Distribution] = {}
    for option, make, text in (("--normal", Normal, normal), ("--lognormal", LogNormal, lognormal)):
        if text is not None:
            for kind, value in _per_kind(option, text).items():
                _add(found, kind, make(value), option)
    if samples is not None:
        for kind, numbers in _read_samples(samples).items():
            _add(found, kind, Empirical(numbers), "--samples")
    if _ALL in found and len(found) > 1:
        raise click.UsageError(f"one distribution is for {_ALL}, and another for {next(kind for kind in found if kind != _ALL)}; say each kind once")
    return found.get(_ALL, found or None)


def _add(found: dict[str, Distribution], kind: str, distribution: Distribution, option: str) -> None:
    if kind in found:
        raise click.UsageError(f"{option}: there is a distribution for {kind} already; say each kind once")
    found[kind] = distribution


def _per_kind(option: str, text: str) -> dict[str, float]:
    result: dict[str, float] = {}
    for part in text.split(","):
        kind, equals, value = part.strip().rpartition("=")
        kind = _kind(kind.strip(), option) if equals else _ALL
        if kind in result:
            raise click.UsageError(f"{option} {text!r} speaks of {kind} twice")
        result[kind] = _part(value, option)
    return result


def _kind(text: str, where: str) -> str:
    if text.upper() not in _KINDS:
        raise click.UsageError(f"{where}: {text!r} is no kind of op{did_you_mean(text, _KINDS) or '; right is ' + ', '.join(_KINDS)}")
    return text.upper()


def _part(text: str, option: str) -> float:
    try:
        return float(_number(text.strip(), float))
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}") from None


def _slow_device(text: str) -> tuple[int, float]:
    device, equals, factor = text.partition("=")
    if not equals or not device.strip().isdecimal():
        raise click.UsageError(f"--slow-device {text!r} is not a device and a factor; write 2=1.3")
    return int(device), _part(factor, "--slow-device")


def _slow_link(text: str) -> tuple[tuple[int, int], float]:
    pair, equals, factor = text.partition("=")
    source, arrow, target = (part.strip() for part in pair.partition(">"))
    if not (equals and arrow and source.isdecimal() and target.isdecimal()):
        raise click.UsageError(f"--slow-link {text!r} is not a link and a factor; write '0>1=4'")
    return (int(source), int(target)), _part(factor, "--slow-link")


def _read_samples(path: str) -> dict[str, list[float]]:
    """Kind, or all kinds, to durations."""
    result: dict[str, list[float]] = {}
    for number, line in enumerate(read_limited(path).splitlines(), start=1):
        if not line.strip():
            continue
        kind, comma, value = line.rpartition(",")
        try:
            sample = float(value)
        except ValueError:
            raise ScheduleError(f"{path}, line {number}: {value.strip()!r:.40} is not a number; a line is a duration, or KIND,duration") from None
        kind = kind.strip().upper() if comma else _ALL
        if comma and kind not in _KINDS:
            raise ScheduleError(f"{path}, line {number}: {kind!r:.40} is no kind of op; right is {', '.join(_KINDS)}")
        result.setdefault(kind, []).append(sample)
    return result
