"""Jitter and stragglers: durations that vary, slow devices and slow links, and what they do to the makespan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.cluster import Cluster, Link, Unit
from pipesim.costs import CostModel, UniformCosts
from pipesim.criticalpath import CriticalPaths
from pipesim.engine import Engine, linked_cluster, with_timed_updates
from pipesim.errors import ScheduleError, require_count
from pipesim.op import COMPUTE_KINDS, Kind
from pipesim.parallel import in_parallel
from pipesim.schedule import Schedule
from pipesim.units import format_time

__all__ = ["Distribution", "Empirical", "LogNormal", "MonteCarlo", "Normal", "monte_carlo"]

Floats = NDArray[np.float64]

QUANTILES = (0.05, 0.5, 0.95, 0.99)

# Draws are made in blocks that depend on the schedule alone, each with a generator of its own: so draw k is the same however
# many there are and however many processes share them.
_NUMBERS, _DRAWS = 1 << 20, 256


# -- distributions -----------------------------------------------------------------------------------------------------


@runtime_checkable
class Distribution(Protocol):
    """Factors by which durations are multiplied. Their mean should be 1, so that the costs stay the mean."""

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Independent factors of at least 0."""
        ...


@dataclass(frozen=True)
class Normal:
    """Normal factors with mean 1, truncated at 0: what falls below is drawn again.

    Attributes:
        deviation: Standard deviation before the truncation, as a part of the duration: 0.1 is 10 %. Above about 0.3 the
            truncation shifts the mean.

    Examples:
        >>> Normal(0.1).draw(np.random.default_rng(0), (3,)).round(3).tolist()
        [1.013, 0.987, 1.064]
    """

    deviation: float

    def __post_init__(self) -> None:
        _check_deviation(self.deviation)

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Independent factors."""
        factors = generator.normal(1.0, self.deviation, shape)
        while (below := factors < 0).any():
            factors[below] = generator.normal(1.0, self.deviation, int(below.sum()))
        return factors


@dataclass(frozen=True)
class LogNormal:
    """Log-normal factors with mean 1: never negative, with a longer tail above, as measured durations have.

    Attributes:
        deviation: Standard deviation as a part of the duration: 0.1 is 10 %.

    Examples:
        >>> LogNormal(0.1).draw(np.random.default_rng(0), (3,)).round(3).tolist()
        [1.008, 0.982, 1.061]
    """

    deviation: float

    def __post_init__(self) -> None:
        _check_deviation(self.deviation)

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Independent factors."""
        variance = math.log1p(self.deviation**2)
        return generator.lognormal(-variance / 2, math.sqrt(variance), shape)


class Empirical:
    """Measured durations of one kind of op, in any unit: each as likely as the others, divided by their mean.

    Examples:
        >>> Empirical([18.2, 18.4, 18.3, 25.9]).factors.round(3).tolist()
        [0.901, 0.911, 0.906, 1.282]
    """

    def __init__(self, samples: ArrayLike) -> None:
        try:
            array = np.asarray(samples, dtype=np.float64)
        except (TypeError, ValueError):
            raise ScheduleError(f"samples must be numbers, got {samples!r:.80}") from None
        if array.ndim != 1 or not array.size:
            raise ScheduleError(f"samples must be a list of numbers, got an array of shape {array.shape}")
        bad = array[~(np.isfinite(array) & (array >= 0))]
        if bad.size or not array.any():
            raise ScheduleError(f"samples must be finite, at least 0 and not all 0, got {bad[0] if bad.size else 0}")
        self.factors: Floats = array / array.mean()

    def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Independent factors."""
        return generator.choice(self.factors, shape)

    def __repr__(self) -> str:
        return f"Empirical({len(self.factors)} samples)"


def _check_deviation(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating) or not (math.isfinite(value) and value >= 0):
        raise ScheduleError(f"deviation must be a finite number of at least 0, as a part of the duration (0.1 is 10 %), got {value!r:.80}")


# -- the result --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class MonteCarlo:
    """What n draws gave.

    The critical path of a draw is the chain of ops and transfers without a gap that ends with the last op: its length is
    the makespan. Where an op could start for two reasons at once, the chain follows its own device. In a pipeline the path
    touches nearly every device, so what counts is how much of it: a device is *critical* in a draw if no device holds
    more of the path's time. Slowing a device down by a small part x makes a draw longer by x times its share of the path.

    Attributes:
        schedule: Its name.
        makespan: (n,) makespan of each draw.
        critical_time: (n, devices) time of the critical path on each device; the rest of the makespan passes on links.
        undisturbed: The makespan without jitter, slow devices or slow links.
        unit: ``"s"`` or ``"slot"``.
        seed: What the draws were made from.
    """

    schedule: str
    makespan: Floats
    critical_time: Floats
    undisturbed: float
    unit: Unit
    seed: int

    def __len__(self) -> int:
        return len(self.makespan)

    def quantiles(self, levels: Sequence[float] = QUANTILES) -> dict[float, float]:
        """Level to the makespan that this part of the draws does not exceed, interpolated between draws.

        Raises:
            ScheduleError: A level is outside 0..1.
        """
        wrong = [level for level in levels if not 0 <= level <= 1]
        if wrong:
            raise ScheduleError(f"quantiles are for levels between 0 and 1, got {wrong[0]}")
        return dict(zip(map(float, levels), np.quantile(self.makespan, list(levels)).tolist(), strict=True))

    @cached_property
    def criticality(self) -> list[float]:
        """Per device, the probability that it is critical; devices that tie share the draw, so that they add up to 1."""
        most = self.critical_time.max(axis=1, keepdims=True)
        critical = self.critical_time >= most * (1 - 1e-9)
        return [float(value) for value in (critical / critical.sum(axis=1, keepdims=True)).mean(axis=0)]

    @cached_property
    def critical_share(self) -> list[float]:
        """Per device, the mean part of the critical path's time that passes on it."""
        return [float(value) for value in _parts(self.critical_time, self.makespan[:, None]).mean(axis=0)]

    @property
    def critical_link_share(self) -> float:
        """The mean part of it that passes on links."""
        share = float(_parts(self.makespan - self.critical_time.sum(axis=1), self.makespan).mean())
        return share if share > 1e-12 else 0.0  # the dust of float sums

    def as_dict(self) -> dict[str, Any]:
        """Every figure by its name, as ``--json`` prints them."""
        return {
            "schedule": self.schedule,
            "draws": len(self),
            "seed": self.seed,
            "unit": self.unit,
            "undisturbed_makespan": self.undisturbed,
            "makespan_mean": float(self.makespan.mean()),
            "makespan_deviation": float(self.makespan.std()),
            "makespan_quantiles": {f"{level:g}": value for level, value in self.quantiles().items()},
            "criticality": self.criticality,
            "critical_share": self.critical_share,
            "critical_link_share": self.critical_link_share,
        }

    def summary(self) -> str:
        """The figures for people."""
        unit = "" if self.unit == "s" else " slots"
        lines = [f"{self.schedule}: {len(self)} draws, seed {self.seed}", ""]
        figures = {"undisturbed": self.undisturbed, "mean": float(self.makespan.mean()), "deviation": float(self.makespan.std())}
        figures |= {f"{level:.4g} quantile": value for level, value in self.quantiles().items()}
        width = max(map(len, figures))
        for name, value in figures.items():
            more = "" if name in ("undisturbed", "deviation") or not self.undisturbed else f"   {value / self.undisturbed - 1:+.2%}"
            lines.append(f"makespan, {name:<{width}}  {format_time(value, self.unit)}{unit}{more}")
        lines += ["", f"{'':<10}{'criticality':>12}{'critical_share':>16}"]
        for device, (probability, share) in enumerate(zip(self.criticality, self.critical_share, strict=True)):
            lines.append(f"{f'device {device}':<10}{probability:>12.4f}{share:>16.4f}")
        lines += [f"{'links':<10}{'':>12}{self.critical_link_share:>16.4f}", ""]
        lines.append("  criticality: the probability that no device holds more of the critical path's time")
        lines.append("  critical_share: the mean part of the critical path's time that passes there")
        return "\n".join(lines)

    def __repr__(self) -> str:
        low, middle, high = self.quantiles((0.05, 0.5, 0.95)).values()
        return f"<MonteCarlo of {self.schedule!r}, {len(self)} draws: makespan {low:.6g} to {high:.6g}, median {middle:.6g}>"


def _parts(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


# -- drawing -----------------------------------------------------------------------------------------------------------


def monte_carlo(
    schedule: Schedule,
    costs: CostModel | None = None,
    *,
    jitter: Distribution | Mapping[str, Distribution] | None = None,
    slow_devices: Mapping[int, float] | None = None,
    slow_links: Mapping[tuple[int, int], float] | None = None,
    n: int = 1000,
    seed: int = 0,
    cluster: Cluster | None = None,
    barrier: bool = True,
    engine: Engine = "auto",
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> MonteCarlo:
    """Runs one step of a schedule n times, each with durations of its own.

    Args:
        schedule: What to run.
        costs: The mean durations, and bytes; F = I = W = 1 slot by default.
        jitter: What every duration is multiplied by, each slot of each draw for itself: one distribution, or one per kind
            (``{"F": Normal(0.05), "B": LogNormal(0.1)}``; a pair goes by its first half). None for no jitter: one draw then
            says it all.
        slow_devices: Device to a factor on all its durations.
        slow_links: (from, to) to a factor on the time of its messages, latency included.
        n: Draws.
        seed: The same seed gives the same draws, whatever *jobs* is, and more draws begin with the same ones.
        cluster: Speeds and links, as for :func:`pipesim.simulate`.
        barrier: As for :func:`pipesim.simulate`.
        engine: As for :func:`pipesim.simulate`.
        jobs: Processes that share the work, by way of joblib; -1 for one per core. By default all in this process.
        progress: Called with (draws made, draws in all).

    Raises:
        ScheduleError: The input is wrong, or a slow link carries nothing.
        DeadlockError: The schedule cannot finish.

    Examples:
        >>> from pipesim import UniformCosts, generate
        >>> schedule, costs = generate("1f1b", devices=4, microbatches=8), UniformCosts(forward=1, backward=2)
        >>> round(float(monte_carlo(schedule, costs, slow_devices={2: 1.3}).makespan[0]), 6)
        39.3
        >>> found = monte_carlo(schedule, costs, jitter=LogNormal(0.1), n=200)
        >>> found.undisturbed < found.quantiles()[0.5] < found.quantiles()[0.95]
        True
    """
    n, seed = require_count("n", n), require_count("seed", seed, 0)
    costs = UniformCosts() if costs is None else costs
    schedule.check()
    cluster = linked_cluster(costs, cluster, schedule)
    schedule, durations = with_timed_updates(schedule, costs)
    paths = CriticalPaths(schedule, costs, cluster, barrier, engine)
    undisturbed = float(paths.run(durations)[0][0])
    factors = _device_factors(slow_devices or {}, schedule)
    if slow_links:
        paths = CriticalPaths(schedule, costs, _with_slow_links(cluster, slow_links, paths), barrier, engine)
    by_kind = _by_kind(jitter, schedule)
    if not by_kind:
        n = 1
    block = max(1, min(_DRAWS, _NUMBERS // schedule.num_slots))
    counts = [min(block, n - first) for first in range(0, n, block)]
    tasks = [(paths, durations[0] * factors, by_kind, (seed, number), block, count) for number, count in enumerate(counts)]
    makespan, critical_time = np.empty(n), np.empty((n, schedule.num_devices))
    done = 0
    for found in (_draw(*task) for task in tasks) if jobs in (None, 1) else in_parallel(_draw, tasks, jobs):
        rows = slice(done, done + len(found[0]))
        makespan[rows], critical_time[rows] = found
        done = rows.stop
        if progress is not None:
            progress(done, n)
    return MonteCarlo(schedule.name, makespan, critical_time, undisturbed, costs.unit, seed)


def _draw(
    paths: CriticalPaths, durations: Floats, by_kind: Sequence[tuple[NDArray[np.int64], Distribution]], seed: Sequence[int], block: int, count: int
) -> tuple[Floats, Floats]:
    """Makespans and times on the critical path of a block of draws, of which the first *count* are wanted."""
    generator = np.random.default_rng(seed)
    table = np.tile(durations, (count, 1))
    for slots, distribution in by_kind:
        drawn = np.asarray(distribution.draw(generator, (block, len(slots))), dtype=np.float64)
        if drawn.shape != (block, len(slots)) or not (np.isfinite(drawn).all() and drawn.min(initial=0) >= 0):
            raise ScheduleError(f"{distribution!r:.80} must draw {(block, len(slots))} finite factors of at least 0")
        table[:, slots] *= drawn[:count]
    return paths.run(table)


def _by_kind(jitter: Any, schedule: Schedule) -> list[tuple[NDArray[np.int64], Distribution]]:
    """Slots, and the distribution of their factors."""
    if jitter is None:
        return []
    kinds = schedule.kind[schedule.slot_row]
    if isinstance(jitter, Distribution):
        return [(np.arange(schedule.num_slots), jitter)]
    if not isinstance(jitter, Mapping):
        raise ScheduleError(
            f"jitter must be a distribution such as LogNormal(0.1), or one per kind such as {{'F': LogNormal(0.1)}}, got {jitter!r:.80}"
        )
    legal = {kind.name: kind for kind in COMPUTE_KINDS}
    result = []
    for name, distribution in jitter.items():
        kind = legal.get(name.name if isinstance(name, Kind) else name)
        if kind is None:
            raise ScheduleError(f"jitter names the kind {name!r:.80}; right is {', '.join(legal)}")
        if not isinstance(distribution, Distribution):
            raise ScheduleError(f"jitter of {kind.name} must be a distribution such as LogNormal(0.1), got {distribution!r:.80}")
        result.append((kind, distribution))
    # in the order of the kinds, so that the order in the dict does not matter
    result.sort(key=lambda entry: entry[0])
    return [(np.flatnonzero(kinds == int(kind)), distribution) for kind, distribution in result]


def _device_factors(slow: Mapping[int, float], schedule: Schedule) -> Floats:
    """(slots,) factors of slow devices."""
    devices = np.ones(schedule.num_devices)
    for device, factor in slow.items():
        if require_count("a slow device", device, 0) >= schedule.num_devices:
            raise ScheduleError(f"there is no device {device} to be slow; devices are 0..{schedule.num_devices - 1}")
        devices[device] = _factor(factor, f"device {device}")
    return devices[schedule.slot_device]


def _with_slow_links(cluster: Cluster, slow: Mapping[tuple[int, int], float], paths: CriticalPaths) -> Cluster:
    links: dict[tuple[int, int], Link] = {}
    for pair, factor in slow.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ScheduleError(f"slow_links goes from (from, to) to a factor, got {pair!r:.80}")
        what = f"link {pair[0]} -> {pair[1]}"
        if pair not in paths.used_links:
            used = ", ".join(f"{a} -> {b}" for a, b in paths.used_links)
            raise ScheduleError(f"{what} carries nothing in this schedule, so that it cannot be slow; these do: {used:.300}")
        link, factor = cluster.link(*pair), _factor(factor, what)
        if not link.latency and link.bandwidth is None:
            raise ScheduleError(f"{what} takes no time, so that a factor changes nothing; give links a latency or a bandwidth")
        links[pair] = Link(link.latency * factor, None if link.bandwidth is None else link.bandwidth / factor)
    return replace(cluster, links={**cluster.links, **links})


def _factor(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating) or not (math.isfinite(value) and value > 0):
        raise ScheduleError(f"the factor of {what} must be a finite number above 0, got {value!r:.80}")
    return float(value)
