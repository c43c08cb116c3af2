"""Measured runs from a CSV file: a run a line, a column for each size and degree."""

from __future__ import annotations

import csv
import io
import itertools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from pipesim import registry
from pipesim.errors import ScheduleError, did_you_mean
from pipesim.files import read_limited
from pipesim.fit.predictor import Configuration, MeasuredRun
from pipesim.models import ModelSpec, Parallelism, read_model

__all__ = ["read_runs"]

# other people's names for the columns
_ALIASES = {
    "micro_batch": "microbatch",
    "micro_batch_size": "microbatch",
    "global_batch": "batch",
    "global_batch_size": "batch",
    "iteration_s": "seconds",
    "iteration_time": "seconds",
}
_TIMES = {"seconds": 1, "iteration_ms": 1000}  # column to parts of a second
_MODEL = {one.name: one for one in fields(ModelSpec) if one.name not in ("name", "source")}
_PARALLEL = {one.name: one for one in fields(Parallelism) if one.name != "layout"}
_ANNOTATIONS = {**typing.get_type_hints(ModelSpec), **typing.get_type_hints(Parallelism)}


def read_runs(source: str | Path, constants: Mapping[str, str] | None = None) -> list[MeasuredRun]:
    """Reads measured runs.

    Columns are ``model`` (a preset or a file), or sizes of :class:`ModelSpec` (layers, hidden, heads, vocabulary, sequence,
    ...); degrees and choices of :class:`Parallelism` (tensor, pipeline, data, microbatch, recompute, ...); ``batch``;
    ``schedule`` and that schedule's own options, such as ``chunks`` (1f1b by default, interleaved-1f1b with more than one
    chunk); ``seconds`` or ``iteration_ms``. ``gpus`` without ``data`` says
    how many pipelines there are, gpus / (tensor x pipeline); with it, it must be tensor x pipeline x data. The samples of a
    microbatch may also be called ``micro_batch`` or ``micro_batch_size``, and ``batch`` ``global_batch(_size)``. Other columns are kept for reports. Empty cells count as not given. Several
    values with ``|`` between them, such as ``1|2|4``, are choices: the prediction is the fastest that fits the memory.

    Args:
        source: The file.
        constants: Column to value, for what is the same in all runs.

    Raises:
        ScheduleError: A column that is needed is missing, or a cell holds what it cannot; file and line are named.
    """
    where = str(source)
    for column in constants or {}:
        if _name(column) not in _known_columns():
            raise ScheduleError(f"there is no column {column!r} to give for all runs{did_you_mean(column, _known_columns())}")
    rows = list(csv.DictReader(io.StringIO(read_limited(source)), restkey="", skipinitialspace=True))
    if not rows:
        raise ScheduleError(f"{where} has no run; it wants a line with the columns' names, and a line per run")
    runs = []
    for line, row in enumerate(rows, start=2):
        if "" in row:
            raise ScheduleError(f"{where}, line {line}: more cells than columns")
        cells = {_name(column): (cell or "").strip() for column, cell in row.items()}
        for column, value in (constants or {}).items():
            if cells.get(_name(column), "") not in ("", value):
                raise ScheduleError(f"{where}, line {line}: {column} is {cells[_name(column)]}, and it was given as {value} for all runs")
            cells[_name(column)] = value
        try:
            runs.append(_run({column: cell for column, cell in cells.items() if cell}, f"line {line}"))
        except ScheduleError as error:
            raise ScheduleError(f"{where}, line {line}: {error}") from None
    return runs


def _name(column: str) -> str:
    column = column.strip().lower()
    return _ALIASES.get(column, column)


def _run(cells: Mapping[str, str], label: str) -> MeasuredRun:
    time = [name for name in _TIMES if name in cells]
    if len(time) != 1:
        raise ScheduleError(f"a run has one of the columns {' and '.join(_TIMES)}, this one has {' and '.join(time) or 'none'}")
    seconds = _converted(time[0], cells[time[0]], float) / _TIMES[time[0]]
    if not (math.isfinite(seconds) and seconds > 0):
        raise ScheduleError(f"{time[0]} is {cells[time[0]]}; right is a finite number above 0")
    several = {column: cell.split("|") for column, cell in cells.items() if "|" in cell}
    choices, refused = [], None
    for combination in itertools.product(*several.values()):
        try:
            choices.append(_configuration({**cells, **{column: cell.strip() for column, cell in zip(several, combination, strict=True)}}))
        except ScheduleError as error:  # not every microbatch divides the batch
            refused = error
    if refused is not None and not choices:
        raise refused
    facts = {column: _fact(cell) for column, cell in cells.items() if column not in _TIMES}
    return MeasuredRun(tuple(choices), seconds, label, facts)


def _configuration(cells: Mapping[str, str]) -> Configuration:
    sizes = {name: _converted(name, cells[name], _ANNOTATIONS[name]) for name in _MODEL if name in cells}
    if "model" in cells and "layers" not in cells:
        model = read_model(cells["model"])
        if sizes:
            raise ScheduleError(f"model is {cells['model']!r}, so leave out {', '.join(sizes)}")
    else:
        missing = [name for name, one in _MODEL.items() if one.default is MISSING and name not in sizes]
        if missing:
            raise ScheduleError(f"the model's {', '.join(missing)} is missing, as a column or a constant")
        model = ModelSpec(name=cells.get("model", "model"), **sizes)
    parallel = Parallelism(**{name: _converted(name, cells[name], _ANNOTATIONS[name]) for name in _PARALLEL if name in cells})
    if "gpus" in cells and "data" not in cells:
        gpus, each = _converted("gpus", cells["gpus"], int), parallel.tensor * parallel.pipeline
        if gpus < 1 or gpus % each:
            raise ScheduleError(f"gpus is {gpus}, which is no multiple of tensor x pipeline = {parallel.tensor} x {parallel.pipeline}")
        parallel = replace(parallel, data=gpus // each)
    elif "gpus" in cells and _converted("gpus", cells["gpus"], int) != parallel.gpus:
        raise ScheduleError(f"gpus is {cells['gpus']}, and tensor x pipeline x data is {parallel.tensor} x {parallel.pipeline} x {parallel.data}")
    if "batch" not in cells:
        raise ScheduleError("batch is missing")
    interleaved = cells.get("chunks", "1") != "1"
    schedule = cells.get("schedule", "interleaved-1f1b" if interleaved else "1f1b")
    known = registry.options_of(registry.find(schedule))
    options = {name: _converted(name, cells[name], one.annotation) for name, one in known.items() if name in cells and name not in _MODEL}
    for name in _options() & cells.keys() - known.keys():
        if (name, cells[name]) != ("chunks", "1"):
            raise ScheduleError(f"{schedule} has no option {name}, and {name} is {cells[name]}")
    return Configuration(model, parallel, _converted("batch", cells["batch"], int), schedule, options)


@cache
def _options() -> frozenset[str]:
    """The own options of all installed schedules that are no sizes of a model or its spreading."""
    return frozenset(name for one in registry.available().values() for name in registry.options_of(one)) - _MODEL.keys() - _PARALLEL.keys()


def _known_columns() -> set[str]:
    return {*_MODEL, *_PARALLEL, *_options(), *_TIMES, "model", "schedule", "batch", "gpus"}


def _converted(name: str, text: str, annotation: Any) -> Any:
    """A cell as what a field wants."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        annotation = next(one for one in typing.get_args(annotation) if one is not type(None))
    if typing.get_origin(annotation) is typing.Literal:
        legal = {str(one): one for one in typing.get_args(annotation)}
        if text not in legal:
            raise ScheduleError(f"{name} is {text!r}; right is {' or '.join(legal)}")
        return legal[text]
    if annotation is bool:
        truth = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if text.lower() not in truth:
            raise ScheduleError(f"{name} is {text!r}; right is true or false")
        return truth[text.lower()]
    try:
        number = float(text)
    except ValueError:
        if annotation in (int, float):
            raise ScheduleError(f"{name} is {text!r}, which is no number") from None
        return text
    if annotation is int:
        if not number.is_integer():
            raise ScheduleError(f"{name} is {text}; right is a whole number")
        return int(number)
    return number


def _fact(text: str) -> Any:
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number
