"""The result of a calibration: a cost model, a cluster, and how sure they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pipesim.calibration.fitting import LinkFit, Spread, fit_link, non_negative, spread
from pipesim.calibration.samples import Gap, Samples, collect
from pipesim.cluster import Cluster, Link
from pipesim.communication import Communication
from pipesim.costs.calibrated import SIZES, TIMES, CalibratedCosts, HostTimes, StageTable
from pipesim.errors import ScheduleError
from pipesim.timeline import Timeline

__all__ = ["Calibration", "Interference", "MeasuredLink", "OpSpread", "calibrate"]

Floats = NDArray[np.float64]
_FEW = 5  # samples of a kind of op
_SURE = 3.0  # standard errors
_QUANTILES = 40
_TOLD = 0.9  # slope of durations over time beside messages, with its error, from which on it is no figure


@dataclass(frozen=True)
class OpSpread:
    """The durations of one kind of op on one stage.

    Attributes:
        stages: In how many stages the model was cut.
        stage: Which of them.
        kind: ``F``, ``B``, ``I``, ``W`` or ``U``.
        spread: Their figures, seconds.
    """

    stages: int
    stage: int
    kind: str
    spread: Spread


@dataclass(frozen=True)
class MeasuredLink:
    """One direction between two devices.

    Attributes:
        latency: Seconds, as a simulation takes it: between ops that make and wait for a message, without the host's time.
        bandwidth: Bytes per second; None where only latency counts.
        probe_latency: Seconds of the smallest message of the probe, by its fit; None without a probe.
        hop: Typical seconds from the end of an op to the start of the one that waited for its message; None if no message was waited for.
        sizes: Sizes in the probe.
        count: Its messages.
        error: Largest relative distance of the probe's line from a size.
    """

    latency: float
    bandwidth: float | None
    probe_latency: float | None = None
    hop: float | None = None
    sizes: int = 0
    count: int = 0
    error: float | None = None


@dataclass(frozen=True)
class Interference:
    """How much slower compute is while messages are under way.

    Attributes:
        factor: 1.05 for 5 %.
        uncertainty: Its standard error.
        count: Ops.
    """

    factor: float
    uncertainty: float
    count: int

    @property
    def seen(self) -> bool:
        """Whether the samples tell: only then does a simulation take it."""
        return self.factor - 1 > max(_SURE * self.uncertainty, 0.01) and self.count >= 20


@dataclass(frozen=True)
class Calibration:
    """What measured runs say of a model on a machine.

    Attributes:
        costs: What ops take, and the host beside them.
        links: (from, to) to what was measured of it.
        spreads: Of the durations, per stage and kind.
        interference: Compute beside messages; None where no sample had both.
        jitter: Kind to quantiles of its durations, each divided by the mean of its stage in its iteration.
        source: What was run, and where.
        notes: What could not be told, or was left out.
    """

    costs: CalibratedCosts
    links: Mapping[tuple[int, int], MeasuredLink] = field(default_factory=dict)
    spreads: tuple[OpSpread, ...] = ()
    interference: Interference | None = None
    jitter: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    source: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def communication(self) -> Communication:
        """How devices communicate: in the way of compute only if that was seen."""
        seen = self.interference is not None and self.interference.seen
        return Communication(interference={"p2p": self.interference.factor}) if seen and self.interference is not None else Communication()

    def cluster(self, devices: int | None = None) -> Cluster:
        """The links as a cluster: those that were measured, and for others the median of these.

        Args:
            devices: Leaves out links of devices from this number on.
        """
        usual = self.usual_link
        links = {pair: Link(link.latency, link.bandwidth) for pair, link in sorted(self.links.items()) if devices is None or max(pair) < devices}
        return Cluster(inside=Link(usual.latency, usual.bandwidth), links=links, name=self.costs.name, communication=self.communication)

    @property
    def usual_link(self) -> MeasuredLink:
        """The median of the links; one that takes no time where none was measured."""
        if not self.links:
            return MeasuredLink(0.0, None)
        slopes = [0.0 if link.bandwidth is None else 1 / link.bandwidth for link in self.links.values()]
        slope = float(np.median(slopes))
        return MeasuredLink(float(np.median([link.latency for link in self.links.values()])), 1 / slope if slope else None)

    def without_host(self) -> Calibration:
        """The same without the host's time: ops and messages alone."""
        return replace(self, costs=replace(self.costs, host=HostTimes()))


def calibrate(runs: Sequence[Timeline], name: str = "calibration") -> Calibration:
    """Fits durations, host times, links and bytes to measured runs.

    Every number is of the runs given; none is fitted to make a simulated iteration time agree with a measured one.

    Args:
        runs: Measured: such as those of :func:`pipesim.calibration.run_plan`.
        name: What to call the result.

    Raises:
        ScheduleError: There is no run with ops, or one was not measured in seconds.
    """
    found = collect(runs)
    if not found.durations:
        raise ScheduleError("no run has ops that take time; calibrate wants at least one run of the model, such as gpipe")
    notes = list(found.notes)
    tables, spreads = _tables(found, notes)
    host = _host(found, notes)
    links = _links(found, host, notes)
    interference = _interference(found, notes)
    costs = CalibratedCosts(tables, host, name)
    result = Calibration(costs, links, spreads, interference, _jitter(found), _source(runs), tuple(dict.fromkeys(notes)))
    if interference is not None and interference.seen:  # what was measured beside messages is what it would be without, and slower
        base = _without_messages(found, interference)
        tables = {
            stages: replace(table, times={key: tuple(base * t for t in times) for key, times in table.times.items()})
            for stages, table in tables.items()
        }
        result = replace(result, costs=replace(costs, tables=tables))
    return result


def _tables(found: Samples, notes: list[str]) -> tuple[dict[int, StageTable], tuple[OpSpread, ...]]:
    spreads: list[OpSpread] = []
    tables: dict[int, StageTable] = {}
    for stages in sorted({count for count, _, _ in found.durations}):
        times: dict[str, tuple[float, ...]] = {}
        for name, kind in TIMES.items():
            of = [found.durations.get((stages, stage, kind.name)) for stage in range(stages)]
            missing = [stage for stage, samples in enumerate(of) if not samples]
            if missing:
                if len(missing) < stages:
                    notes.append(f"with {stages} stages, {kind.name} was measured on some only: none on stages {', '.join(map(str, missing))}")
                continue
            sums = [spread(samples) for samples in of if samples]
            spreads += [OpSpread(stages, stage, kind.name, one) for stage, one in enumerate(sums)]
            times[name] = tuple(one.typical for one in sums)
            fewest = min(one.count for one in sums)
            if fewest < _FEW:
                notes.append(f"with {stages} stages, only {fewest} {kind.name} per stage were measured, too few to tell how they spread")
        if "forward" not in times:
            raise ScheduleError(f"the runs with {stages} stages have no F on every stage, so nothing can be said of them")
        if "input_grad" not in times or "weight_grad" not in times:
            notes.append(f"with {stages} stages, no run had I and W: nothing is known about zero-bubble schedules")
        sizes = {name: tuple(np.median(found.tables[stages][name], axis=0).tolist()) for name in SIZES if found.tables[stages].get(name)}
        tables[stages] = StageTable(times, sizes)
    return tables, tuple(spreads)


def _jitter(found: Samples) -> dict[str, tuple[float, ...]]:
    """How durations vary within an iteration."""
    parts: dict[str, list[Floats]] = {}
    for (_, _, kind), runs in found.durations.items():
        parts.setdefault(kind, []).extend(run / run.mean() for run in runs if len(run) > 1 and run.mean() > 0)
    levels = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    return {kind: tuple(np.quantile(np.concatenate(runs), levels).tolist()) for kind, runs in parts.items() if runs}


def _host(found: Samples, notes: list[str]) -> HostTimes:
    """Time between ops, by what stands between them: a base, and more for messages sent and received."""
    barrier = max(0.0, spread(found.barriers).typical) if found.barriers else 0.0
    classes: list[Gap] = list(found.gaps)
    if not classes:
        notes.append("no op followed another without waiting for a message, so nothing is known of the host's time between ops")
        return HostTimes(barrier=barrier)
    figures = [spread(found.gaps[one]) for one in classes]
    columns = np.array([[1.0, one.sends, one.receives] for one in classes])
    weight = np.sqrt([one.count for one in figures])
    op, send, receive = non_negative(columns * weight[:, None], np.array([one.typical for one in figures]) * weight).tolist()
    for name, column in (("sends", columns[:, 1]), ("receives", columns[:, 2])):
        if not column.any():
            notes.append(f"no gap between ops {name} a message without waiting, so the host's time for that is taken for 0")
    return HostTimes(op, send, receive, barrier)


def _links(found: Samples, host: HostTimes, notes: list[str]) -> dict[tuple[int, int], MeasuredLink]:
    links = {}
    nets: dict[tuple[int, int], float] = {}
    fits: dict[tuple[int, int], LinkFit] = {}
    for pair, parts in found.messages.items():
        fits[pair] = fit_link(np.concatenate([size for size, _ in parts]), np.concatenate([time for _, time in parts]))
        notes += [f"link {pair[0]} -> {pair[1]}: {note}" for note in fits[pair].notes]
    if found.hops and not fits:
        notes.append("no message probe: messages had the sizes of the model only, so latency and bandwidth cannot be told apart")
    for pair, steps in found.hops.items():
        slope = 0.0 if pair not in fits or fits[pair].bandwidth is None else 1 / (fits[pair].bandwidth or 1.0)
        nets[pair] = spread([hop[:, 1] - host.op - host.send * hop[:, 2] - host.receive * hop[:, 3] - hop[:, 0] * slope for hop in steps]).typical
    for pair in sorted({*fits, *nets}):
        fit, waited = fits.get(pair), found.hops.get(pair)
        if pair in nets:
            latency = nets[pair]
        else:
            latency = max(0.0, fits[pair].latency - host.send)
            notes.append(f"link {pair[0]} -> {pair[1]}: no op waited for one of its messages, so its latency is that of the probe alone")
        hop = None if not waited else spread([one[:, 1] for one in waited]).typical
        figures = (None, None, 0, 0, None) if fit is None else (fit.bandwidth, fit.latency, fit.sizes, fit.count, fit.error)
        bandwidth, probe, sizes, count, error = figures
        links[pair] = MeasuredLink(max(0.0, latency), bandwidth, probe, hop, sizes or 0, count or 0, error)
    if not links:
        notes.append("no run had messages that were waited for: nothing is known about links")
    return links


def _interference(found: Samples, notes: list[str]) -> Interference | None:
    """Compute that is slower by a factor k beside messages takes (1 - 1/k) of the time beside them longer: the slope of one over the other."""
    if not found.overlaps:
        return None
    longer, beside = (np.concatenate([columns[k] for columns in found.overlaps]) for k in (0, 1))
    square = float((beside**2).sum())
    if len(beside) < 3 or square < 1e-9:
        notes.append("all ops of a kind had as much of a message beside them, so its effect on compute cannot be told")
        return None
    slope = float((beside * longer).sum() / square)
    error = float(np.sqrt(((longer - slope * beside) ** 2).sum() / (len(longer) - 2) / square))
    if abs(slope) + error >= _TOLD:
        notes.append("durations vary more than messages beside them can explain, so the effect of messages on compute cannot be told")
        return None
    result = Interference(1 / (1 - slope), error / (1 - slope) ** 2, len(longer))
    if not result.seen:
        notes.append(f"compute beside messages: x {result.factor:.3f} +- {result.uncertainty:.3f}, not told apart from 1, so taken for 1")
    return result


def _without_messages(found: Samples, interference: Interference) -> float:
    """What a typical op would take without messages, as part of what it took."""
    part = float(np.concatenate([columns[2] for columns in found.overlaps]).mean())
    return 1 - part * (1 - 1 / interference.factor)


def _source(runs: Sequence[Timeline]) -> dict[str, str]:
    """What was run, and where."""
    result = {"runs": ", ".join(dict.fromkeys(run.schedule.name for run in runs))}
    for key in ("mode", "backend", "device", "torch", "model", "optimizer", "messages"):
        values = _distinct(run.info.get(key, "") for run in runs if run.schedule.name != "message-probe")
        if values:
            result[key] = "; ".join(values)
    return result


def _distinct(values: Iterable[str]) -> list[str]:
    return [value for value in dict.fromkeys(values) if value]
