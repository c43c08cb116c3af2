"""Sweeps: many configurations, in parallel, into a file that can be continued.

    configurations = grid(["1f1b", "gpipe"], devices=[4, 8], microbatches=[8, 16], forward=1, backward=2, latency=[0, 0.25])
    rows = run_sweep(configurations, "sweep.csv", jobs=-1)
    front = pareto_front(rows)

A configuration is a dict of plain values. Its id is a hash of them, and of the contents of the files that they name: so an
interrupted sweep knows what it has, whatever the order in which the rows came.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from numbers import Real
from typing import Any

from pipesim.configurations import Configuration, configuration_ids, grid, simulated
from pipesim.engine import ENGINES
from pipesim.engine.compiled import installed
from pipesim.errors import DeadlockError, ScheduleError, did_you_mean
from pipesim.parallel import in_parallel
from pipesim.resultsfile import Columns, open_rows

__all__ = ["RESULTS", "Configuration", "Row", "grid", "pareto_front", "run_sweep"]

Row = dict[str, Any]

RESULTS: dict[str, type] = {
    "makespan": float,
    "iteration_time": float,
    "throughput": float,
    "bubble_fraction": float,
    "bubble_overhead": float,
    "span_bubble_rate": float,
    "peak_memory": float,
    "peak_activations": int,
    "fits": bool,
    "error": str,
}

_OPS, _MOST = 20_000, 200  # of a batch: large enough to hide the cost of a task, small enough to lose little when killed


def _results(configuration: Configuration, engine: str, shared: dict[Any, Any]) -> Row:
    """The figures of one configuration; what goes wrong with it is a result, too."""
    try:
        run = simulated(configuration, engine, shared)
        makespan = run.makespan
        return {
            "makespan": makespan,
            "iteration_time": run.iteration_time,
            "throughput": run.schedule.num_microbatches * run.steps / makespan if makespan else None,
            "bubble_fraction": run.bubble_fraction,
            "bubble_overhead": run.bubble_overhead,
            "span_bubble_rate": run.span_bubble_rate,
            "peak_memory": max(run.peak_memory),
            "peak_activations": max(run.peak_activations),
            "fits": not run.overflows(),
        }
    except (Exception, SystemExit) as error:  # whatever a stranger's generator does
        known = isinstance(error, ScheduleError | DeadlockError)
        return {"error": _line(str(error) if known else f"{type(error).__name__}: {error}")}


def _line(text: str) -> str:
    """The text on one line, with nothing in it that a file could not hold."""
    text = " ".join(text.encode(errors="replace").decode().replace("\0", "?").split())
    return text if len(text) <= 500 else text[:497] + "..."


def run_sweep(
    configurations: Sequence[Configuration],
    out: str | os.PathLike[str] | None = None,
    *,
    jobs: int | None = None,
    engine: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Runs configurations in parallel, and returns a row for each, in their order.

    What a row holds is in ``docs/sweeps.md``. A configuration that fails has its ``error`` and no figures; the others go on.
    With *out*, rows are appended as they come, and what the file holds already is not run again: a sweep that was
    interrupted, however, is continued by the same call, and values may be added to its axes.

    Args:
        configurations: From :func:`grid`, or dicts of that kind.
        out: ``name.csv``, or ``name.parquet`` for a folder of parts; None to keep the rows in memory only.
        jobs: Processes, -1 for one per core; None for what ``joblib.parallel_config`` says, which is also how the
            sweep comes to run on Dask or Ray. By default all in this process.
        engine: As for :func:`pipesim.simulate`; the rows are the same.
        progress: Called with (rows that are there, rows in all), first when the file has been read.

    Raises:
        ScheduleError: *out* holds something else, or is in use by another sweep.
        OSError: *out* cannot be written.

    Examples:
        >>> rows = run_sweep(grid(["1f1b", "gpipe"], devices=4, microbatches=8, forward=1, backward=2))
        >>> [(row["schedule"], row["makespan"], row["peak_memory"]) for row in rows]
        [('1f1b', 33.0, 4.0), ('gpipe', 33.0, 8.0)]
    """
    _check_engine(engine)
    import_module("joblib")  # if it is missing, that is to be said before there is a file
    of_id = dict(zip(configuration_ids(configurations), configurations, strict=True))
    columns = _columns(of_id.values())
    results: dict[str, Row] = {}
    file = None if out is None else open_rows(out, columns, of_id)
    try:
        if file is not None:
            results = {key: {name: row[name] for name in RESULTS} for key, row in file.rows.items()}
        todo = {key: configuration for key, configuration in of_id.items() if key not in results}
        if progress is not None:
            progress(len(results), len(of_id))
        for found in _evaluated(todo, jobs, engine) if todo else ():
            results.update(found)
            if file is not None:
                file.append([_row(key, of_id[key], found[key], columns) for key in found])
            if progress is not None:
                progress(len(results), len(of_id))
    finally:
        if file is not None:
            file.close()
    return [_row(key, configuration, results[key], columns) for key, configuration in of_id.items()]


def _check_engine(engine: str) -> None:
    """What is wrong with every run is no row's error."""
    if engine not in ENGINES:
        raise ScheduleError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}{did_you_mean(str(engine), ENGINES)}")
    if engine == "compiled" and not installed():
        raise ScheduleError("engine='compiled' needs numba, which is not installed; pip install 'pipesim[fast]', or take engine='simpy'")


def _columns(configurations: Collection[Configuration]) -> Columns:
    """Column to type: the id, what differs or was given, the results."""
    kinds: dict[str, set[type]] = {"schedule": set(), "devices": set(), "microbatches": set()}
    for configuration in configurations:
        for name, value in configuration.items():
            kinds.setdefault(name, set()).update([] if value is None else [type(value)])
    types = {name: _type(found) for name, found in kinds.items()}
    return {"id": str, **types, **RESULTS}


def _type(found: set[type]) -> type:
    """The type that holds all values of a column; a text where there are lists or a mixture."""
    if found == {int, float}:
        return float
    return found.pop() if len(found) == 1 and not found & {list, tuple} else str


def _row(key: str, configuration: Configuration, results: Row, columns: Columns) -> Row:
    values = {name: _cell(configuration.get(name), kind) for name, kind in columns.items()}
    return {**values, "id": key, **{name: results.get(name) for name in RESULTS}}


def _cell(value: Any, kind: type) -> Any:
    if value is None or isinstance(value, kind):
        return value
    return json.dumps(value) if kind is str else kind(value)


def _batches(todo: Mapping[str, Configuration]) -> Iterator[dict[str, Configuration]]:
    """Consecutive configurations, so that they share schedules: enough of them to hide what a task costs."""
    batch: dict[str, Configuration] = {}
    ops = 0
    for key, configuration in todo.items():
        sizes = [configuration.get(name) for name in ("devices", "microbatches", "chunks", "steps")]
        size = 2 * math.prod(value for value in sizes if isinstance(value, int))
        if batch and (ops + size > _OPS or len(batch) == _MOST):
            yield batch
            batch, ops = {}, 0
        batch[key] = configuration
        ops += size
    if batch:
        yield batch


def _evaluate(batch: Mapping[str, Configuration], engine: str) -> dict[str, Row]:
    """What a worker does."""
    shared: dict[Any, Any] = {}
    return {key: _results(configuration, engine, shared) for key, configuration in batch.items()}


def _evaluated(todo: Mapping[str, Configuration], jobs: int | None, engine: str) -> Iterator[dict[str, Row]]:
    """The results of batches, as they come."""
    left = {next(iter(batch)): batch for batch in _batches(todo)}
    if len(left) == 1:  # sooner done than others are started
        yield _evaluate(todo, engine)
        return
    from joblib import effective_n_jobs

    while left:
        try:
            for found in in_parallel(_evaluate, [(batch, engine) for batch in left.values()], jobs, ordered=False):
                del left[next(iter(found))]
                yield found
        except BrokenProcessPool:
            # A worker died, most likely killed for want of memory. Joblib had dispatched two batches per worker, the first
            # that are left: each configuration of them runs again, in a process of its own, to see whose fault it was.
            for first in list(left)[: 2 * effective_n_jobs(jobs)]:
                for key, configuration in left.pop(first).items():
                    yield _alone(key, configuration, engine)


def _alone(key: str, configuration: Configuration, engine: str) -> dict[str, Row]:
    from joblib import parallel_config

    try:
        with parallel_config(backend="loky"):
            (found,) = in_parallel(_evaluate, [({key: configuration}, engine)], jobs=2)
    except BrokenProcessPool:
        return {key: {"error": "the process that ran it died; it may have been killed for want of memory"}}
    return dict(found)


# -- choosing ----------------------------------------------------------------------------------------------------------


def pareto_front(rows: Sequence[Mapping[str, Any]], by: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Returns the rows that no other row beats: more throughput takes more memory. Ascending in both; equals are all there.

    Args:
        rows: With ``throughput`` and ``peak_memory``; those without (failures) and those that do not fit are left out.
        by: Columns that are given and not chosen, such as ``latency``: a front for each of their values, in the order in
            which they come.

    Examples:
        >>> rows = run_sweep(grid(["1f1b", "gpipe", "naive"], devices=4, microbatches=8))
        >>> [(row["schedule"], round(row["throughput"], 3), row["peak_memory"]) for row in pareto_front(rows)]
        [('naive', 0.083, 1.0), ('1f1b', 0.242, 4.0)]
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if all(isinstance(row.get(name), Real) and math.isfinite(row[name]) for name in ("throughput", "peak_memory")) and row.get("fits", True):
            groups.setdefault(tuple(str(row.get(name)) for name in by), []).append(dict(row))
    front: list[dict[str, Any]] = []
    for group in groups.values():
        group.sort(key=lambda row: (row["peak_memory"], -row["throughput"]))
        best = (math.nan, -math.inf)
        for row in group:
            point = row["peak_memory"], row["throughput"]
            if point == best or point[1] > best[1]:
                front.append(row)
                best = point
    return front
