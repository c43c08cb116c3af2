"""Robust least squares over logarithms, and the same with runs left out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ScheduleError, did_you_mean, require_count
from pipesim.fit.predictor import COORDINATES, MeasuredRun, Plane, Predictor, coordinates
from pipesim.models import DeviceSpec, Efficiency

__all__ = ["FREE", "Fit", "fit"]

Floats = NDArray[np.float64]
Progress = Callable[[int, int], None]

# what is fitted by default
FREE = ("gemm", "layer_overhead", "between", "gradient", "step_overhead")
# where a fit starts from for numbers whose default is 0, which has no logarithm
_STARTS = {"gemm_size": 50.0, "layer_overhead": 2e-4, "op_overhead": 5e-4, "step_overhead": 0.3}
_RANGE = np.log(100.0)  # as many times larger or smaller than at the start a number may become
_STEP = 1e-4  # of a logarithm, for derivatives
_WIDER = (30.0, 10.0, 3.0, 1.0)  # times the scale
_AGREES = 1e-5  # planes and simulation, relative
_ROUNDS = 8
_UNTOLD = 1.0  # relative uncertainty from which on the runs do not tell a number
_CLOSE = 1.05  # choices within this factor of the fastest may yet become it


@dataclass(frozen=True, eq=False)
class Fit:
    """A fitted efficiency and what it says of every run.

    Attributes:
        runs: What was measured.
        device: The device with the fitted efficiency.
        free: Names of the numbers that were fitted and that the runs tell.
        seconds: (runs,) simulated iteration times.
        chosen: (runs,) which of a run's choices is the fastest that fits.
        uncertainty: (free,) standard error of each number, relative, from the spread of the residuals.
        scale: Relative error beyond which a run counts less.
        untold: Names of numbers that were to be fitted and that the runs do not tell (an uncertainty of 100 % or more, or
            no influence at all). They stay what the device says, and everything else is fitted without them.
    """

    runs: tuple[MeasuredRun, ...]
    device: DeviceSpec
    free: tuple[str, ...]
    seconds: Floats
    chosen: NDArray[np.int64]
    uncertainty: Floats
    scale: float
    _problem: _Problem
    untold: tuple[str, ...] = ()

    @property
    def efficiency(self) -> Efficiency:
        """The fitted efficiency."""
        return self.device.efficiency

    @property
    def measured(self) -> Floats:
        """(runs,) seconds."""
        return np.array([run.seconds for run in self.runs])

    @property
    def errors(self) -> Floats:
        """(runs,) predicted / measured - 1, of the runs that were fitted: an error that flatters."""
        return self.seconds / self.measured - 1

    def predict(self, runs: Sequence[MeasuredRun]) -> Floats:
        """(runs,) seconds of runs that were not fitted."""
        other = _Problem(runs, self.device, self.free, self.scale)
        return other.simulate(other.start)[0]

    def left_out(self, groups: Sequence[Hashable]) -> Floats:
        """Errors of every run by a fit without the runs of its group.

        Args:
            groups: Of each run, its group.

        Returns:
            (runs,) predicted / measured - 1.
        """
        if len(groups) != len(self.runs):
            raise ScheduleError(f"groups has {len(groups)} entries and there are {len(self.runs)} runs")
        names = list(dict.fromkeys(groups))
        if len(names) < 2:
            raise ScheduleError(f"all runs are of one group, {names[0]!r}; leaving it out leaves nothing to fit")
        number = np.array([names.index(one) for one in groups])
        errors = np.zeros(len(self.runs))
        for group in range(len(names)):
            out = np.flatnonzero(number == group)
            solution = self._problem.solve(np.flatnonzero(number != group))
            errors[out] = self._problem.simulate(solution, out)[0] / self.measured[out] - 1
        return errors

    def folds(self, folds: int = 10, shuffles: int = 10, seed: int = 0, progress: Progress | None = None) -> Floats:
        """Errors of every run by fits without a random part of the runs.

        Args:
            folds: Parts of almost equal size; as many as runs for leave-one-out.
            shuffles: How often the runs are dealt anew; leave-one-out is the same every time, so it is done once.
            seed: The same seed deals the same parts.
            progress: Called with how many shuffles have been done, and how many there are.

        Returns:
            (shuffles, runs) predicted / measured - 1.
        """
        folds, shuffles = require_count("folds", folds, 2), require_count("shuffles", shuffles)
        if folds > len(self.runs):
            raise ScheduleError(f"folds = {folds} is more than the {len(self.runs)} runs")
        shuffles = 1 if folds == len(self.runs) else shuffles
        random = np.random.default_rng(seed)
        result = []
        for number in range(shuffles):
            if progress is not None:
                progress(number, shuffles)
            order = random.permutation(len(self.runs))
            result.append(self.left_out((np.argsort(order) % folds).tolist()))
        return np.array(result)


def fit(runs: Sequence[MeasuredRun], device: DeviceSpec, free: Sequence[str] = FREE, *, scale: float = 0.01) -> Fit:
    """Fits numbers of the efficiency to measured iteration times.

    Logarithms of the numbers are moved until those of the times agree best, under a Cauchy loss: a run that is off by
    much more than *scale* (a slow node, a typing error) hardly pulls at the others. Iterations usually repeat within a
    hundredth, so that is the scale. A number that the runs do not tell stays at its start, and the others are fitted again.

    Args:
        runs: At least as many as numbers.
        device: Where they ran; its efficiency is the start, and all that is not free stays as it is.
        free: Names of numbers of :class:`pipesim.models.Efficiency`.
        scale: Relative error beyond which a run counts less.

    Raises:
        ScheduleError: A name is unknown, there are too few runs, one cannot be simulated, or the runs tell none of the numbers.
        ModuleNotFoundError: scipy is missing.

    Examples:
        >>> from pipesim.models import Parallelism, read_device, read_model
        >>> from pipesim.fit import Configuration
        >>> known = read_device("a100-80g").with_efficiency(gemm=0.6)
        >>> one = Configuration(read_model("gpt-22b"), Parallelism(tensor=8, microbatch=4), batch=4)
        >>> seconds = Predictor(one, known).simulate(known.efficiency)
        >>> round(fit([MeasuredRun((one,), seconds)], read_device("a100-80g"), ["gemm"]).efficiency.gemm, 4)
        0.6
    """
    problem = _Problem(runs, device, free, scale)
    solution = problem.settle()
    while (uncertainty := problem.uncertainty(solution)).max() >= _UNTOLD:
        # one at a time: of two numbers that only tell of each other the later goes, and the other may then be told
        problem = problem.without(int(np.flatnonzero(uncertainty == uncertainty.max())[-1]))
        solution = problem.settle()
    seconds, chosen = problem.simulate(solution)
    return Fit(
        tuple(runs),
        replace(device, efficiency=problem.efficiency(solution)),
        problem.free,
        seconds,
        chosen,
        uncertainty,
        scale,
        problem,
        tuple(name for name in free if name not in problem.free),
    )


class _Stacked(NamedTuple):
    """All planes, by run and choice, and where each choice and each run begins."""

    constants: Floats
    slopes: Floats
    choice: NDArray[np.int64]
    run: NDArray[np.int64]


class _Problem:
    """Runs and free numbers; points are logarithms of the numbers."""

    def __init__(self, runs: Sequence[MeasuredRun], device: DeviceSpec, free: Sequence[str], scale: float) -> None:
        known = [one.name for one in fields(Efficiency)]
        if not free:
            raise ScheduleError(f"there is no number to fit; an efficiency has {', '.join(known)}")
        for name in free:
            if name not in known:
                raise ScheduleError(f"an efficiency has no {name!r}{did_you_mean(name, known) or '; it has ' + ', '.join(known)}")
        if len(set(free)) < len(free):
            raise ScheduleError(f"a number is named twice among {', '.join(free)}")
        self.runs, self.free, self.scale = tuple(runs), tuple(free), scale
        self.base = device.efficiency
        self.start = np.log([getattr(self.base, name) or _STARTS.get(name, 1.0) for name in free])
        self._measured = np.log([run.seconds for run in runs])
        self._predictors = [_predictors(run, device) for run in runs]
        self._planes: list[list[list[Plane]]] = [[[] for _ in choices] for choices in self._predictors]

    def without(self, number: int) -> _Problem:
        """The same with one number fewer, which stays what it is in the base; planes are true everywhere, so they stay."""
        if len(self.free) == 1:
            raise ScheduleError(f"the runs do not tell {self.free[0]} (± 100 % or more), so there is nothing to fit; name other numbers with --free")
        other = copy.copy(self)
        other.free = self.free[:number] + self.free[number + 1 :]
        other.start = np.delete(self.start, number)
        return other

    def efficiency(self, point: Floats) -> Efficiency:
        return replace(self.base, **dict(zip(self.free, np.exp(point).tolist(), strict=True)))

    def residuals(self, point: Floats) -> Floats:
        """(runs,) logarithms of predicted / measured, on the planes."""
        planes = self._stacked
        times = planes.constants + planes.slopes @ coordinates(self.efficiency(point))
        fastest = np.minimum.reduceat(np.maximum.reduceat(times, planes.choice), planes.run)
        return np.asarray(np.log(fastest) - self._measured)

    def derivatives(self, point: Floats) -> Floats:
        """(runs, free) of the residuals."""
        here = self.residuals(point)
        return np.stack([(self.residuals(point + _STEP * unit) - here) / _STEP for unit in np.eye(len(point))], axis=1)

    def solve(self, rows: NDArray[np.int64]) -> Floats:
        """The best point for some of the runs.

        A Cauchy loss has local minima, so the scale comes down in steps, from one under which all runs count.
        """
        from scipy.optimize import least_squares

        if len(rows) < len(self.free):
            raise ScheduleError(f"{len(self.free)} numbers ({', '.join(self.free)}) cannot be fitted to {len(rows)} runs; name fewer with --free")
        point = self.start
        for wider in _WIDER:
            found = least_squares(
                lambda point: self.residuals(point)[rows],
                point,
                jac=lambda point: self.derivatives(point)[rows],
                bounds=(self.start - _RANGE, self.start + _RANGE),
                loss="cauchy",
                f_scale=self.scale * wider,
                xtol=1e-9,
                ftol=1e-9,
            )
            point = np.asarray(found.x)
        return point

    def settle(self) -> Floats:
        """The best point for all runs, with planes enough that they agree with the simulator there."""
        solution = self.start
        self._refine(solution)
        for _ in range(_ROUNDS):
            solution = self.solve(np.arange(len(self.runs)))
            seconds = self.simulate(solution)[0]
            if np.abs(self.residuals(solution) + self._measured - np.log(seconds)).max() < _AGREES:
                break
            self._refine(solution)
        return solution

    def _refine(self, point: Floats) -> None:
        """Adds planes for every choice that may be the fastest."""
        efficiency = self.efficiency(point)
        moving = [name for name, depends_on in COORDINATES.items() if not {*depends_on}.isdisjoint(self.free)]
        for run, choices in enumerate(self._predictors):
            for choice in self._candidates(run, efficiency):
                self._planes[run][choice].append(choices[choice].plane(efficiency, moving))
        flat = [planes for choices in self._planes for planes in choices]
        self._stacked = _Stacked(
            np.array([plane.constant for planes in flat for plane in planes]),
            np.array([plane.slopes for planes in flat for plane in planes]),
            np.cumsum([0, *map(len, flat[:-1])]),
            np.cumsum([0, *map(len, self._planes[:-1])]),
        )

    def _candidates(self, run: int, efficiency: Efficiency) -> list[int]:
        """The choices of a run that may be the fastest, as far as is known."""
        times = [max((plane(efficiency) for plane in planes), default=0.0) for planes in self._planes[run]]
        return [choice for choice, time in enumerate(times) if time <= _CLOSE * min(times)]

    def simulate(self, point: Floats, rows: NDArray[np.int64] | None = None) -> tuple[Floats, NDArray[np.int64]]:
        """Seconds of runs, simulated, and which choice was the fastest."""
        efficiency = self.efficiency(point)
        seconds, chosen = [], []
        for row in range(len(self.runs)) if rows is None else rows.tolist():
            found = {choice: self._predictors[row][choice].simulate(efficiency) for choice in self._candidates(row, efficiency)}
            chosen.append(min(found, key=lambda choice: found[choice]))
            seconds.append(found[chosen[-1]])
        return np.array(seconds), np.array(chosen)

    def uncertainty(self, point: Floats) -> Floats:
        """(free,) standard errors of the logarithms, under the Cauchy weights of the residuals."""
        residuals, slopes = self.residuals(point), self.derivatives(point)
        weights = 1 / (1 + (residuals / self.scale) ** 2)
        information = (slopes * weights[:, None]).T @ slopes
        freedom = max(weights.sum() - len(self.free), 1.0)
        spread = float((weights * residuals**2).sum() / freedom)
        values, vectors = np.linalg.eigh(information)
        told = values > 1e-12 * values.max()
        known = (vectors[:, told] ** 2 / values[told]).sum(axis=1)
        return np.asarray(np.where((vectors[:, ~told] ** 2 > 1e-12).any(axis=1), np.inf, np.sqrt(spread * known)))


def _predictors(run: MeasuredRun, device: DeviceSpec) -> list[Predictor]:
    """Of the choices of a run those that can be scheduled and fit; the only choice of a run need not fit, since it ran."""
    if len(run.choices) == 1:
        return [Predictor(run.choices[0], device)]
    found: list[Predictor] = []
    refused: Any = None
    for choice in run.choices:
        try:
            one = Predictor(choice, device)
        except ScheduleError as error:
            refused = error
            continue
        if one.fits:
            found.append(one)
    if not found:
        raise ScheduleError(f"run {run.label!r}: none of the {len(run.choices)} choices fits the memory of {device.name}") from refused
    return found
