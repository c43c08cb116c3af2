"""The conformance suite for schedule generators, for the built-in ones and for yours.

from pipesim.testing import check_generator

def test_my_schedule():
    check_generator(my_schedule)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipesim.costs import UniformCosts
from pipesim.engine import simulate
from pipesim.errors import ScheduleError
from pipesim.op import Kind
from pipesim.registry import Generator, options_of
from pipesim.schedule import Schedule

__all__ = ["SIZES", "Conformance", "check_generator"]

# small, odd, prime, m < p, m = p, m no multiple of p, and large ones
SIZES: tuple[tuple[int, int], ...] = (
    (1, 1), (1, 5), (2, 1), (2, 2), (2, 3), (2, 8), (3, 2), (3, 7), (4, 1), (4, 3), (4, 4), (4, 6), (4, 8), (4, 11),
    (5, 10), (6, 12), (7, 14), (8, 3), (8, 8), (8, 16), (8, 20), (8, 24),
)  # fmt: skip


@dataclass(frozen=True)
class Conformance:
    """What a generator did with each size.

    Attributes:
        legal: Sizes (devices, microbatches) that gave a right schedule.
        refused: Size to the reason, for those that the generator does not allow.
    """

    legal: tuple[tuple[int, int], ...]
    refused: Mapping[tuple[int, int], str]


def check_generator(
    generator: Generator, *, sizes: Iterable[tuple[int, int]] = SIZES, options: Mapping[str, Any] | None = None, splits: int = 1
) -> Conformance:
    """Verifies that a generator keeps the rules that everything else relies on.

    For every size it either raises ScheduleError in one line, or returns a schedule that

    * has that many devices, and every stage runs forward exactly as many microbatches as were asked for;
    * passes ``check()``, has the same ops when made again, and survives a trip through text and CSV;
    * finishes, with equal and with uneven durations, no sooner than its busiest device allows.

    The generator is also looked at: options are keyword-only and annotated, and there is a docstring.

    Args:
        generator: ``(devices, microbatches, *, options) -> Schedule``.
        sizes: (devices, microbatches) to try.
        options: Options to pass on.
        splits: Pieces that each microbatch is cut into, each an index of its own (sequence splits).

    Returns:
        Which sizes were legal.

    Raises:
        AssertionError: A rule is broken; the text says which, and for which size.

    Examples:
        >>> from pipesim.registry import find
        >>> check_generator(find("gpipe"), sizes=[(1, 1), (4, 8)]).legal
        ((1, 1), (4, 8))
    """
    name = getattr(generator, "__name__", repr(generator))
    _require((inspect.getdoc(generator) or "").strip() != "", f"{name} has no docstring; its first line is what `pipesim list` shows")
    positional = [p for p in inspect.signature(generator).parameters.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    _require([p.name for p in positional] == ["devices", "microbatches"], f"{name} must take (devices, microbatches, *, options)")
    for option in options_of(generator).values():
        _require(
            option.annotation is not inspect.Parameter.empty, f"option {option.name} of {name} has no annotation, so the command line cannot read it"
        )
        _require(option.default is not inspect.Parameter.empty, f"option {option.name} of {name} has no default")
    legal: list[tuple[int, int]] = []
    refused: dict[tuple[int, int], str] = {}
    for devices, microbatches in sizes:
        where = f"{name}({devices}, {microbatches})"
        try:
            schedule = generator(devices, microbatches, **(options or {}))
        except ScheduleError as error:
            _require("\n" not in str(error) and str(error) != "", f"{where} refuses in other than one line: {error}")
            refused[devices, microbatches] = str(error)
            continue
        _require(isinstance(schedule, Schedule), f"{where} returned {type(schedule).__name__}, not a Schedule")
        again = generator(devices, microbatches, **(options or {}))
        _require(schedule == again, f"{where} gives another schedule when called again")
        check_schedule(schedule, devices, microbatches * splits, where)
        legal.append((devices, microbatches))
    _require(len(legal) > 0, f"{name} refused every size; the first: {next(iter(refused.values()), 'there was none')}")
    return Conformance(tuple(legal), refused)


def check_schedule(schedule: Schedule, devices: int, microbatches: int, where: str) -> None:
    """Verifies one schedule; see :func:`check_generator`."""
    _require(schedule.num_devices == devices, f"{where} has {schedule.num_devices} devices")
    try:
        schedule.check()
    except ScheduleError as error:
        raise AssertionError(f"{where}: {error}") from error
    forwards = np.bincount(schedule.stage[schedule.kind == int(Kind.F)], minlength=schedule.num_stages)
    _require(bool((forwards == microbatches).all()), f"{where} runs {forwards.tolist()} forwards per stage, and {microbatches} were asked for")
    _require(Schedule.from_text(str(schedule)) == schedule, f"{where} does not survive a trip through text")
    uneven = 1.0 + np.arange(schedule.num_stages) % 3 / 2
    for costs in (UniformCosts(), UniformCosts(forward=uneven, input_grad=uneven[::-1], weight_grad=0.5, latency=0.25)):
        run = simulate(schedule.without_communication(), costs)  # a DeadlockError says more than we could
        busiest = max(run.busy)
        _require(run.makespan >= busiest - 1e-9 * busiest, f"{where} ends at {run.makespan}, before its busiest device can, {busiest}")
        level = run.memory(0).categories["activations"][-1]
        _require(abs(level) < 1e-9, f"{where} leaves {level} activations on device 0")


def _require(right: bool, message: str) -> None:
    if not right:
        raise AssertionError(message)
