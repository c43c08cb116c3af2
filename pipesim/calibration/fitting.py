"""Robust figures of samples that hold outliers: typical durations, warm-up, and the line of a link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.errors import ScheduleError

__all__ = ["LinkFit", "Spread", "fit_link", "non_negative", "spread", "warm_up"]

Floats = NDArray[np.float64]
_NORMAL = 1.4826  # MAD to the standard deviation of a normal distribution


@dataclass(frozen=True)
class Spread:
    """Samples of one thing.

    Attributes:
        count: How many.
        typical: What a run usually sees: the median over runs of the mean within each. The sum of many ops follows the mean, which the
            interruptions of an operating system raise above the median; the median over runs drops those that a stranger disturbed.
        median: Of all.
        deviation: Median absolute deviation, scaled to the standard deviation of a normal distribution.
        low: 5 % are below.
        high: 5 % are above.
    """

    count: int
    typical: float
    median: float
    deviation: float
    low: float
    high: float


def spread(samples: Sequence[ArrayLike]) -> Spread:
    """Sums samples up, given run by run.

    Examples:
        >>> found = spread([[1.0, 1.0, 4.0], [1.0, 1.0, 4.0], [90.0, 1.0, 1.0]])
        >>> found.count, found.typical, found.median
        (9, 2.0, 1.0)
    """
    runs = [np.asarray(run, dtype=np.float64).ravel() for run in samples if np.size(run)]
    if not runs:
        raise ScheduleError("there are no samples to sum up")
    every = np.concatenate(runs)
    median = float(np.median(every))
    low, high = np.percentile(every, [5, 95]).tolist()
    typical = float(np.median([run.mean() for run in runs]))
    return Spread(len(every), typical, median, _NORMAL * float(np.median(np.abs(every - median))), low, high)


def warm_up(samples: ArrayLike) -> int:
    """How many samples at the start are still warm-up: those beyond five deviations, and 5 %, above the median of all.

    Examples:
        >>> warm_up([23376.6, 15149.3, 15153.5, 15154.5])
        1
        >>> warm_up([1.0, 1.1, 0.9])
        0
    """
    values = np.asarray(samples, dtype=np.float64)
    if len(values) < 3:
        return 0  # of two nobody can say which is the odd one
    median = np.median(values)
    limit = median + max(5 * _NORMAL * float(np.median(np.abs(values - median))), 0.05 * median)
    settled = np.flatnonzero(values <= limit)
    return int(settled[0])


@dataclass(frozen=True)
class LinkFit:
    """``time = latency + size / bandwidth``.

    Attributes:
        latency: Seconds.
        bandwidth: Bytes per second; None where size made no difference, or there was one size only.
        sizes: How many sizes there were.
        count: How many messages.
        error: The largest relative distance of the line from the time of a size.
        notes: What could not be told.
    """

    latency: float
    bandwidth: float | None
    sizes: int
    count: int
    error: float
    notes: tuple[str, ...] = ()

    def time(self, size: float) -> float:
        """Seconds that a message of this many bytes takes."""
        return self.latency + (0.0 if self.bandwidth is None else size / self.bandwidth)


def fit_link(sizes: ArrayLike, times: ArrayLike) -> LinkFit:
    """Fits a line to the quickest message of every size: what delays a message only adds to its time, now and then ten thousandfold.

    Args:
        sizes: (messages,) bytes.
        times: (messages,) seconds.

    Raises:
        ScheduleError: There are no messages.

    Examples:
        >>> link = fit_link([2**20, 16 * 2**20, 2**20], [120e-6, 1620e-6, 214477e-6])
        >>> round(link.latency * 1e6, 9), round(link.time(4 * 2**20) * 1e6, 9)
        (20.0, 420.0)
    """
    size, time = (np.asarray(values, dtype=np.float64) for values in (sizes, times))
    if not len(size):
        raise ScheduleError("a link cannot be fitted without messages")
    distinct, which = np.unique(size, return_inverse=True)
    quickest = np.full(len(distinct), np.inf)
    np.minimum.at(quickest, which, np.maximum(time, 1e-12))
    if len(distinct) == 1:
        note = f"all messages had one size ({distinct[0]:.0f} bytes), so latency and bandwidth cannot be told apart: right for that size only"
        return LinkFit(float(quickest[0]), None, 1, len(size), 0.0, (note,))
    # relative errors count: otherwise the largest size would say what the latency is
    latency, slope = non_negative(np.stack([np.ones(len(distinct)), distinct], axis=1) / quickest[:, None], np.ones(len(distinct)))
    off = float(np.abs((latency + slope * distinct) / quickest - 1).max())
    notes = [] if off <= 0.3 else [f"no line fits well: off by up to {off:.0%} at one of {len(distinct)} sizes"]
    if slope * distinct[-1] < 1e-3 * latency:
        notes.append("larger messages took no longer, so there is no bandwidth to see")
        slope = 0.0
    return LinkFit(float(latency), 1 / float(slope) if slope > 0 else None, len(distinct), len(size), off, tuple(notes))


def non_negative(columns: Floats, values: Floats) -> Floats:
    """Least squares with no coefficient below 0: the most negative is left out until there is none.

    Where columns depend on each other, the solution of least norm.

    Examples:
        >>> non_negative(np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([3.0, 1.0])).round(9).tolist()
        [2.0, 0.0]
    """
    kept = list(range(columns.shape[1]))
    result = np.zeros(columns.shape[1])
    while kept:
        scale = np.maximum(np.abs(columns[:, kept]).max(axis=0), 1e-300)
        found = np.linalg.lstsq(columns[:, kept] / scale, values, rcond=None)[0] / scale
        if found.min() >= 0:
            result[kept] = found
            break
        kept.pop(int(found.argmin()))
    return result
