"""Predictions of schedules that the calibration did not see, beside what their replays took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipesim.calibration.calibrated import Calibration
from pipesim.calibration.fitting import warm_up
from pipesim.cluster import Cluster
from pipesim.engine import simulate
from pipesim.errors import ScheduleError
from pipesim.jitter import Empirical, monte_carlo
from pipesim.metrics import iteration_times
from pipesim.op import Kind
from pipesim.schedule import Schedule
from pipesim.timeline import Timeline

__all__ = ["LIMIT", "Prediction", "predict", "simulated", "too_busy"]

LIMIT = 0.10
_DRAWS = 500


@dataclass(frozen=True)
class Prediction:
    """The iteration time of one schedule.

    Attributes:
        name: Of the schedule.
        ops: Predicted seconds if ops took their time and nothing else did.
        host: More for the host's time between ops.
        messages: More for messages.
        waits: More because durations vary from op to op, and devices wait for whoever is late.
        measured: Per run, the median of its iteration times without warm-up; empty where it was not replayed.
        iterations: How many iterations they are of.
        notes: What to know about it.
    """

    name: str
    ops: float
    host: float
    messages: float
    waits: float = 0.0
    measured: tuple[float, ...] = ()
    iterations: int = 0
    notes: tuple[str, ...] = ()

    @property
    def predicted(self) -> float:
        """Seconds: ops, host, messages and waits."""
        return self.ops + self.host + self.messages + self.waits

    @property
    def typical(self) -> float | None:
        """Median of the runs, seconds."""
        return float(np.median(self.measured)) if self.measured else None

    @property
    def error(self) -> float | None:
        """Predicted / measured - 1."""
        return None if self.typical is None else self.predicted / self.typical - 1

    @property
    def spread(self) -> float | None:
        """Standard deviation of the runs, relative to their median; None for a single run."""
        return None if self.typical is None or len(self.measured) < 2 else float(np.std(self.measured, ddof=1)) / self.typical

    @property
    def limit(self) -> float:
        """The larger of 10 % and twice the spread."""
        return max(LIMIT, 2 * (self.spread or 0.0))

    @property
    def busy(self) -> bool:
        """Whether the machine was too busy to tell: runs of one schedule differ by more than 10 %."""
        return self.spread is not None and self.spread > LIMIT

    @property
    def within(self) -> bool | None:
        """Whether the error is within the limit; None without runs, and where only a busy machine's spread makes the limit that large."""
        if self.error is None or (self.busy and LIMIT < abs(self.error) <= self.limit):
            return None
        return abs(self.error) <= self.limit

    @property
    def verdict(self) -> str | None:
        """:attr:`within` in words: ``yes``, ``NO`` or ``cannot tell``; None without runs."""
        if self.error is None:
            return None
        return "cannot tell" if self.within is None else "yes" if self.within else "NO"

    def as_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        names = ("name", "predicted", "ops", "host", "messages", "waits", "typical", "error", "spread", "limit", "within", "verdict", "iterations")
        return {**{name: getattr(self, name) for name in names}, "measured": list(self.measured), "notes": list(self.notes)}


def simulated(calibration: Calibration, schedule: Schedule) -> Timeline:
    """Simulates a schedule with what was calibrated.

    Raises:
        ScheduleError: The calibration says nothing about one of its ops, or its number of stages.
    """
    return simulate(schedule, calibration.costs, cluster=calibration.cluster(schedule.num_devices))


def predict(calibration: Calibration, schedule: Schedule, replays: Sequence[Timeline] = ()) -> Prediction:
    r"""Predicts a schedule, and takes its replays to compare with; they have no part in the prediction.

    Args:
        calibration: Of runs of other schedules.
        schedule: Which.
        replays: Measured runs of it, each a run of its own.

    Raises:
        ScheduleError: The calibration does not cover it.

    Examples:
        >>> from pipesim.costs.calibrated import CalibratedCosts, HostTimes, StageTable
        >>> table = StageTable({"forward": (1.0, 1.0), "backward": (2.0, 2.0)})
        >>> found = predict(Calibration(CalibratedCosts({2: table}, HostTimes(op=0.125))), Schedule.from_text("0F0 0B0\n1F0 1B0"))
        >>> found.ops, found.predicted
        (6.0, 6.5)
    """
    notes = []
    if schedule.replicas:
        notes.append("the sums of gradients over replicas were not calibrated, and take no time here")
    bare = calibration.without_host()
    ops = simulate(schedule, bare.costs, cluster=Cluster(name="none")).makespan
    host = simulate(schedule, calibration.costs, cluster=Cluster(name="none")).makespan
    whole = simulated(calibration, schedule).makespan
    waits = _waits(calibration, schedule)
    times = []
    iterations = 0
    for run in replays:
        if run.schedule != schedule.with_updates() and run.schedule != schedule:
            raise ScheduleError(f"a replay of {run.schedule.name} is no replay of {schedule.name}")
        own = iteration_times(run)
        own = own[warm_up(own) :]
        times.append(float(np.median(own)))
        iterations += len(own)
    return Prediction(schedule.name, ops, host - ops, whole - host, waits, tuple(times), iterations, tuple(notes))


def too_busy(predictions: Sequence[Prediction]) -> str | None:
    """What to say where runs of one schedule differ too much from one to the next to compare a prediction with them; else None.

    Examples:
        >>> too_busy([Prediction("1f1b", 1.0, 0.0, 0.0, measured=(1.0, 1.5, 2.0))])
        'THE MACHINE WAS TOO BUSY: runs of one schedule differ (spread 33 %); do not rely on this calibration, repeat it on an idle machine'
        >>> too_busy([Prediction("1f1b", 1.0, 0.0, 0.0, measured=(1.0, 1.05, 1.1))])
    """
    spreads = [one.spread for one in predictions if one.busy and one.spread is not None]
    if not spreads:
        return None
    low, high = f"{100 * min(spreads):.0f}", f"{100 * max(spreads):.0f}"
    said = high if low == high else f"{low} to {high}"
    return f"THE MACHINE WAS TOO BUSY: runs of one schedule differ (spread {said} %); do not rely on this calibration, repeat it on an idle machine"


def _waits(calibration: Calibration, schedule: Schedule) -> float:
    """Seconds by which an iteration is longer, at the median, when durations vary as they did in the calibration's runs."""
    jitter = {kind: Empirical(values) for kind, values in calibration.jitter.items() if schedule.with_updates().has(Kind[kind])}
    if not jitter:
        return 0.0
    found = monte_carlo(schedule, calibration.costs, jitter=jitter, n=_DRAWS, cluster=calibration.cluster(schedule.num_devices))
    return float(np.median(found.makespan)) - found.undisturbed
