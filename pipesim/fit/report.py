"""What a fit is worth: errors by kind of run, the worst of them, and what those share."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.errors import ScheduleError, did_you_mean
from pipesim.fit.fitting import Fit

__all__ = ["Errors", "Shared", "as_dict", "by", "facts", "shared", "summary", "warnings", "worst"]


_ENOUGH = 3  # runs for each fitted number
_SHORT = {"t": "tensor", "p": "pipeline", "d": "data", "b": "microbatch", "m": "microbatches"}


class Errors(NamedTuple):
    """Absolute relative errors of some runs, in percent.

    Attributes:
        runs: How many.
        mean: Their mean.
        median: Their median.
        p90: Nine in ten are at most that.
        worst: The largest.

    Examples:
        >>> Errors.of([0.01, -0.03])
        Errors(runs=2, mean=2.0, median=2.0, p90=2.8, worst=3.0)
    """

    runs: int
    mean: float
    median: float
    p90: float
    worst: float

    @classmethod
    def of(cls, errors: ArrayLike) -> Errors:
        """Of relative errors, predicted / measured - 1."""
        sizes = np.abs(np.asarray(errors, dtype=np.float64).ravel()) * 100
        figures = (sizes.mean(), np.median(sizes), np.percentile(sizes, 90), sizes.max())
        return cls(len(sizes), *(round(float(figure), 3) for figure in figures))

    def __str__(self) -> str:
        return f"mean {self.mean:.2f} %, median {self.median:.2f} %, 90th percentile {self.p90:.1f} %, worst {self.worst:.1f} %"


class Shared(NamedTuple):
    """A value that the worst runs have more often than all.

    Attributes:
        column: What it is a value of.
        value: The value.
        among_worst: How many of the worst have it.
        among_all: How many of all runs.
    """

    column: str
    value: Any
    among_worst: int
    among_all: int


def facts(fit: Fit) -> list[dict[str, Any]]:
    """Of every run, what it was: columns of its file, and what was simulated."""
    result = []
    for run, chosen in zip(fit.runs, fit.chosen, strict=True):
        one = run.choices[chosen]
        parallel, model = one.parallel, one.model
        own = {"schedule": one.schedule, **one.options, "layers": model.layers, "hidden": model.hidden}
        own |= {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "data": parallel.data, "recompute": parallel.recompute}
        own |= {"microbatch": parallel.microbatch, "microbatches": one.microbatches, "batch": one.batch, "gpus": parallel.gpus}
        result.append({**run.facts, **own})
    return result


def by(fit: Fit, column: str, errors: NDArray[np.float64] | None = None) -> dict[Any, Errors]:
    """Errors of the runs by a column.

    Args:
        fit: The fit.
        column: Such as ``pipeline`` or ``schedule``.
        errors: (..., runs) relative errors; those of the fit by default.

    Raises:
        ScheduleError: There is no such column.
    """
    values = [one.get(column) for one in facts(fit)]
    if all(value is None for value in values):
        known = sorted({name for one in facts(fit) for name in one})
        raise ScheduleError(f"the runs have no {column!r}{did_you_mean(column, known) or '; they have ' + ', '.join(known)}")
    errors = fit.errors if errors is None else errors
    groups: dict[Hashable, list[int]] = {}
    for row, value in enumerate(values):
        groups.setdefault(value, []).append(row)
    ordered = sorted(groups.items(), key=lambda item: (isinstance(item[0], str), item[0] if item[0] is not None else -np.inf))
    return {value: Errors.of(errors[..., rows]) for value, rows in ordered}


def worst(fit: Fit, count: int = 10) -> list[int]:
    """The runs that are furthest off, the furthest first."""
    return [int(row) for row in np.argsort(-np.abs(fit.errors), kind="stable")[:count]]


def shared(fit: Fit, count: int = 10) -> list[Shared]:
    """What the worst runs share: values that at least half of them have, and half as often again as all runs do.

    Args:
        fit: The fit.
        count: How many runs are the worst.
    """
    rows, own = worst(fit, count), facts(fit)
    found = []
    for column in dict.fromkeys(name for one in own for name in one):
        values = [one.get(column) for one in own]
        for value in dict.fromkeys(values[row] for row in rows):
            among_worst, among_all = sum(values[row] == value for row in rows), values.count(value)
            if value is not None and 2 * among_worst >= len(rows) and among_worst * len(own) >= 1.5 * among_all * len(rows):
                found.append(Shared(column, value, among_worst, among_all))
    return found


def warnings(fit: Fit) -> list[str]:
    """What stands in the way of trusting the numbers: too few runs for them, and what the runs do not tell."""
    untold = [f"these runs do not tell {name}: it is not fitted and stays {getattr(fit.efficiency, name):.4g}" for name in fit.untold]
    return [*_few(fit), *untold]


def _few(fit: Fit) -> list[str]:
    runs, numbers = len(fit.runs), len(fit.free)
    if runs >= _ENOUGH * numbers:
        return []
    text = f"{runs} run{'s' if runs > 1 else ''} for {numbers} number{'s' if numbers > 1 else ''}, fewer than {_ENOUGH} for each"
    return [f"{text}: such a fit also follows noise; fit fewer (--free, --fix) or measure more"]


def as_dict(
    fit: Fit,
    folds: NDArray[np.float64] | None = None,
    left_out: Mapping[str, NDArray[np.float64]] | None = None,
    *,
    leave_one_out: bool = False,
) -> dict[str, Any]:
    """Everything as JSON has it; see :func:`summary`."""
    own = facts(fit)
    result: dict[str, Any] = {
        "runs": len(fit.runs),
        "fitted": {name: getattr(fit.efficiency, name) for name in fit.free},
        "uncertainty": {name: float(one) if np.isfinite(one) else None for name, one in zip(fit.free, fit.uncertainty, strict=True)},
        "untold": {name: getattr(fit.efficiency, name) for name in fit.untold},
        "warnings": warnings(fit),
        "errors": Errors.of(fit.errors)._asdict(),
        "by_pipeline": {str(value): one._asdict() for value, one in by(fit, "pipeline").items()},
        "by_schedule": {str(value): one._asdict() for value, one in by(fit, "schedule").items()},
        "worst": [{**_row(fit, row), "facts": own[row]} for row in worst(fit)],
        "worst_share": [one._asdict() for one in shared(fit)],
        "rows": [_row(fit, row) for row in range(len(fit.runs))],
    }
    if folds is not None:
        means = [Errors.of(one) for one in folds]
        result["cross_validated"] = {
            **Errors.of(folds)._asdict(),
            "shuffles": len(folds),
            "leave_one_out": leave_one_out,
            "mean_of_shuffles": [one.mean for one in means],
            "median_of_shuffles": [one.median for one in means],
        }
    if left_out:
        result["left_out"] = {name: Errors.of(errors)._asdict() for name, errors in left_out.items()}
    return result


def _row(fit: Fit, row: int) -> dict[str, Any]:
    run = fit.runs[row]
    return {"run": run.label, "measured": run.seconds, "predicted": float(fit.seconds[row]), "error": float(fit.errors[row])}


def summary(
    fit: Fit,
    folds: NDArray[np.float64] | None = None,
    left_out: Mapping[str, NDArray[np.float64]] | None = None,
    *,
    rows: bool = False,
    leave_one_out: bool = False,
) -> str:
    """The report for people. The number of fitted parameters stands beside every error.

    Args:
        fit: The fit.
        folds: (shuffles, runs) errors of :meth:`Fit.folds`.
        left_out: What was left out to the (runs,) errors of :meth:`Fit.left_out`.
        rows: Whether to list every run.
        leave_one_out: Whether *folds* has as many parts as there are runs.
    """
    number = f"{len(fit.free)} fitted parameter{'s' if len(fit.free) > 1 else ''}, {len(fit.runs)} runs"
    own = facts(fit)
    columns = {name for one in own for name in one}
    lines = [f"{number}, on {fit.device.name}", ""]
    for name, uncertainty in zip(fit.free, fit.uncertainty, strict=True):
        lines.append(f"{name:15s} {getattr(fit.efficiency, name):<10.4g} ± {100 * uncertainty:.0f} %")
    lines += [f"{name:15s} {getattr(fit.efficiency, name):<10.4g} not fitted, as these runs do not tell it (± 100 % or more)" for name in fit.untold]
    lines += [f"warning: {one}" for one in _few(fit)]
    lines += ["", f"fitted runs       {Errors.of(fit.errors)}  ({number})"]
    if folds is not None and leave_one_out:
        lines.append(f"leave-one-out     {Errors.of(folds)}  ({number})")
    elif folds is not None:
        mean, median = (np.array([getattr(Errors.of(one), name) for one in folds]) for name in ("mean", "median"))
        lines.append(
            f"cross-validated   mean {mean.mean():.2f} ± {mean.std():.2f} %, median {median.mean():.2f} ± {median.std():.2f} %, "
            f"over {len(folds)} shuffle{'s' if len(folds) > 1 else ''}  ({number})"
        )
    for name, errors in (left_out or {}).items():
        lines.append(f"left out: {name:8s}{Errors.of(errors)}  ({number})")
        lines += _aligned(by(fit, name, errors)) if name in columns else []
    for column in ("pipeline", "schedule"):
        lines += ["", f"by {column}", *_aligned(by(fit, column))]
    lines += ["", f"the worst ({', '.join(f'{short} {name}' for short, name in _SHORT.items())}; a microbatch is b samples)"]
    lines += [_text(fit, row, own[row]) for row in worst(fit)]
    same = shared(fit)
    lines += ["what they share: " + ("; ".join(f"{s.column} {s.value} ({s.among_worst} of these, {s.among_all} of all)" for s in same) or "nothing")]
    if rows:
        lines += ["", "every run", *(_text(fit, row, own[row]) for row in range(len(fit.runs)))]
    return "\n".join(lines)


def _aligned(groups: Mapping[Any, Errors]) -> list[str]:
    """A line a value, the figures below each other."""
    columns = ("mean", "median", "p90", "worst")
    names = ["mean", "median", "90th percentile", "worst"]
    rows = [
        [str(value), f"{one.runs} run{'s' if one.runs > 1 else ''}", *(f"{getattr(one, c):.2f} %" for c in columns)] for value, one in groups.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        value, runs, *figures = (
            cell.ljust(width) if not place else cell.rjust(width) for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append(f"    {value}  {runs}  " + ", ".join(f"{name} {figure}" for name, figure in zip(names, figures, strict=True)))
    return lines


def _text(fit: Fit, row: int, own: Mapping[str, Any]) -> str:
    run = fit.runs[row]
    what = " ".join(f"{short}{own[name]}" for short, name in _SHORT.items())
    return (
        f"    {100 * fit.errors[row]:+6.1f} %  predicted {fit.seconds[row]:.4g} s, measured {run.seconds:.4g} s  "
        f"{run.label}: {own['layers']} layers of {own['hidden']}, {what}, {own['schedule']}"
    )
