"""Words of the command line as the values that they mean."""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Sequence
from typing import Any

import click

from pipesim.schedule import Schedule
from pipesim.units import parse_quantity


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _converted(key: str, text: str | None, annotation: Any) -> Any:
    """A word as the type that a generator's signature asks for."""
    kinds = typing.get_args(annotation) if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union else (annotation,)
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if bool in kinds:
        if text not in (None, "true", "false"):
            raise click.UsageError(f"{_flag(key)} takes no value")
        return text != "false"
    if text is None:
        raise click.UsageError(f"{_flag(key)} wants a value")
    choices = [choice for kind in kinds if typing.get_origin(kind) is typing.Literal for choice in typing.get_args(kind)]
    for choice in choices:
        if text.lower() == str(choice).lower():
            return choice
    lists = [kind for kind in kinds if typing.get_origin(kind) in (collections.abc.Sequence, list, tuple)]
    scalar = next((kind for kind in (int, float) if kind in kinds), None)
    try:
        if lists and ("," in text or scalar is None):
            element = typing.get_args(lists[0])[0]
            return [_number(part, float if float in (element, *typing.get_args(element)) else int) for part in text.split(",")]
        if scalar is not None:
            return _number(text, float if float in kinds else int)
    except ValueError as error:
        raise click.UsageError(f"{_flag(key)}: {error}") from None
    if str in kinds or not choices:
        return text
    raise click.UsageError(f"{_flag(key)} is {text!r}; right is {' or '.join(map(str, choices))}")


def _number(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is not {'a whole number' if kind is int else 'a number'}") from None


def _physical(value: Any, scale: float | None, dimension: Any, name: str) -> Any:
    """Numbers in the chosen unit; texts such as "5 us" or "16 MiB" only where times are physical."""
    if isinstance(value, list):
        return [_physical(one, scale, dimension, name) for one in value]
    if isinstance(value, str):
        if not value[0].isdigit():
            raise click.UsageError(f"{_flag(name)} {value!r} is not a number; write a number, or one per stage such as 1,1,1.5,1")
        if scale is None:
            raise click.UsageError(f"{_flag(name)} {value!r}: a unit needs physical times; add --unit s, ms or us")
        return parse_quantity(value, dimension, _flag(name))
    return value if scale is None else value * scale


def _bandwidth(text: str, physical: bool) -> float:
    if physical:
        return parse_quantity(text, "bandwidth", "--bandwidth")
    try:
        return float(text)
    except ValueError:
        raise click.UsageError(f"--bandwidth {text!r}: in slots it is a number of units per slot; for 25 GB/s add --unit s, ms or us") from None


def _capacity(text: str, unit: str) -> float:
    if unit == "s":
        return parse_quantity(text, "bytes", "--capacity")
    try:
        return float(text)
    except ValueError:
        raise click.UsageError(f"--capacity {text!r}: with times in slots it is a number of units") from None


def _edge(word: str) -> tuple[int, int]:
    before, arrow, after = word.partition(">")
    if not arrow or not before.isdecimal() or not after.isdecimal():
        raise click.UsageError(f"--graph: {word!r} is not an edge; write 0>1,0>2")
    return int(before), int(after)


def _placement(text: str, schedule: Schedule) -> dict[int, int]:
    devices, stages = schedule.num_devices, schedule.num_stages
    if text == "loop":
        return {stage: stage % devices for stage in range(stages)}
    if text == "v":
        # down and up again: 0 1 2 3 3 2 1 0 0 1 ...
        return {stage: (stage % devices if stage // devices % 2 == 0 else devices - 1 - stage % devices) for stage in range(stages)}
    return dict(enumerate(_converted("placement", text, Sequence[int])))
