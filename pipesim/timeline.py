"""A run, simulated or measured: when every op started and ended, when every message left and came.

Every metric, plot, export and comparison takes a Timeline, whatever made it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim import memory as _memory
from pipesim import metrics
from pipesim.cluster import Unit
from pipesim.dataflow import Messages, messages
from pipesim.linkuse import LinkUse, link_utilisation
from pipesim.memory import Footprint, MemoryCurve, Moves, Overflow
from pipesim.network import Links
from pipesim.op import Kind
from pipesim.schedule import Schedule
from pipesim.timelinefile import TIMES, TRAFFIC_TIMES, read_run, write_run
from pipesim.traffic import Traffic
from pipesim.units import format_time

__all__ = ["Timeline", "load"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """Times of a run, as columns.

    Attributes:
        schedule: What ran.
        start: (steps, slots) start of every compute slot.
        end: (steps, slots) end.
        sent: (steps, messages) when each message was ready to leave: its producer's end.
        departed: (steps, messages) when its link took it.
        arrived: (steps, messages) when it was there.
        offload_start: (steps, moves) when the link of each OFFLOAD and RELOAD took it, in the order of :attr:`moves`.
        offload_end: (steps, moves) when it was there.
        footprint: The bytes that memory curves are made of.
        capacity: (devices,) bytes that each device has; infinite for no limit.
        unit: ``"s"`` or ``"slot"``.
        barrier: Whether steps end with all devices waiting for each other.
        source: ``"simulated"`` or ``"measured"``.
        info: What made it: engine, cost model, cluster.
        traffic: The ops of communication that have times of their own: SEND and RECV, and collectives.
        traffic_start: (steps, traffic) when each had its stream, or where it has none its link, for itself.
        traffic_end: (steps, traffic) when it was done.
        blocking: Whether a SEND or RECV held its device's compute lane.
        links: What messages and moves crossed, or None where that is not known.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> run = simulate(generate("1f1b", devices=4, microbatches=8), UniformCosts(forward=1, backward=2, latency=0.25))
        >>> run.makespan, run.peak_activations
        (37.0, [4, 3, 2, 1])
    """

    schedule: Schedule
    start: Floats
    end: Floats
    sent: Floats
    departed: Floats
    arrived: Floats
    footprint: Footprint
    capacity: Floats
    unit: Unit = "slot"
    barrier: bool = True
    source: str = "simulated"
    info: Mapping[str, str] = field(default_factory=dict)
    offload_start: Floats = field(default_factory=lambda: np.zeros((1, 0)))
    offload_end: Floats = field(default_factory=lambda: np.zeros((1, 0)))
    traffic: Traffic = None  # type: ignore[assignment]  # none of this schedule, by default
    traffic_start: Floats = field(default_factory=lambda: np.zeros((1, 0)))
    traffic_end: Floats = field(default_factory=lambda: np.zeros((1, 0)))
    blocking: bool = False
    links: Links | None = None

    def __post_init__(self) -> None:
        if self.traffic is None:
            object.__setattr__(self, "traffic", Traffic.none(self.schedule))  # type: ignore[unreachable]
        for name in (*TIMES, *TRAFFIC_TIMES):
            column = getattr(self, name)
            if column.dtype != np.float64:  # made by hand; compiled loops want one type
                column = column.astype(np.float64)
                object.__setattr__(self, name, column)
            column.setflags(write=False)

    # -- figures, each named after its definition (pipesim.metrics) -----------------------------------------------------

    @property
    def steps(self) -> int:
        """How often the schedule ran."""
        return len(self.start)

    @cached_property
    def first_start(self) -> float:
        """When the first slot or collective started."""
        first = float(self.start.min())
        return first if not len(self.traffic) else float(self.traffic_start[:, self.traffic.collective].min(initial=first))

    @cached_property
    def last_end(self) -> float:
        """When the last slot or collective ended."""
        last = float(self.end.max())
        return last if not len(self.traffic) else float(self.traffic_end[:, self.traffic.collective].max(initial=last))

    @property
    def makespan(self) -> float:
        """Last end - first start, compute and collectives."""
        return metrics.makespan(self)

    @property
    def iteration_time(self) -> float:
        """Steady-state time per step; per update for an asynchronous run."""
        return metrics.iteration_time(self)

    @property
    def busy(self) -> list[float]:
        """Per device, time in compute slots."""
        return [*metrics.busy(self).tolist()]

    @property
    def bubble_fraction(self) -> float:
        """1 - sum of busy / (devices x makespan)."""
        return metrics.bubble_fraction(self)

    @property
    def bubble_overhead(self) -> float:
        """(makespan - ideal) / ideal, ideal = the busiest device's busy time."""
        return metrics.bubble_overhead(self)

    @property
    def span_bubble_rate(self) -> float | None:
        """(largest span - ideal) / largest span; None for several steps."""
        return metrics.span_bubble_rate(self)

    @property
    def peak_memory(self) -> list[float]:
        """Per device, the most bytes (or units) held at once."""
        return [*_memory.peak_memory(self).tolist()]

    @property
    def knows_memory(self) -> bool:
        """Whether peak_memory says anything: a run that was measured or imported without a byte does not know it."""
        return (self.source != "measured" and "imported" not in self.info) or any(self.peak_memory)

    @property
    def peak_activations(self) -> list[int]:
        """Per device, the most stage activations alive at once, released when B or W ends."""
        return [*metrics.peak_activations(self.schedule).tolist()]

    @property
    def peak_activations_i(self) -> list[int]:
        """Per device, the same, released when I ends."""
        return [*metrics.peak_activations(self.schedule, released_by_input_grad=True).tolist()]

    @property
    def peak_activation_share(self) -> list[float]:
        """Per device, peak_activations divided by its stages: the papers' M_a."""
        stages = [max(1, len(owned)) for owned in self.schedule.device_stages]
        return [peak / count for peak, count in zip(self.peak_activations, stages, strict=True)]

    def idle_causes(self) -> list[dict[str, float]]:
        """Per device, idle time by cause; see :func:`pipesim.metrics.idle_causes`.

        Examples:
            >>> from pipesim import UniformCosts, generate, simulate
            >>> run = simulate(generate("gpipe", devices=2, microbatches=2), UniformCosts(forward=1, backward=2))
            >>> {cause: time for cause, time in run.idle_causes()[1].items() if time}
            {'warm-up': 1.0, 'drain': 2.0}
        """
        return metrics.idle_causes(self)

    def link_utilisation(self) -> list[LinkUse]:
        """What every link with a bandwidth, or every resource of a network, had to do, the busiest first.

        Collectives are not in it: their times are those of their own lanes.

        Examples:
            >>> from pipesim import UniformCosts, generate, simulate
            >>> run = simulate(generate("gpipe", devices=2, microbatches=4), UniformCosts(forward=1, backward=2, message=3, bandwidth=2))
            >>> first = run.link_utilisation()[0]
            >>> first.link, first.bytes, first.transfers, first.longest_wait, round(first.busy_share * run.makespan, 9)
            ('0 -> 1', 12.0, 4, 1.5, 6.0)
        """
        return link_utilisation(self)

    def memory(self, device: int) -> MemoryCurve:
        """What one device holds over time, by category."""
        return _memory.memory_curve(self, device)

    def overflows(self) -> list[Overflow]:
        """Per device that has too little memory, the first op that does not fit, in order of time."""
        found = (_memory.first_overflow(self, device) for device in np.isfinite(self.capacity).nonzero()[0].tolist())
        return sorted((overflow for overflow in found if overflow is not None), key=lambda o: (o.time, o.device))

    def figures(self) -> dict[str, Any]:
        """Every figure by its name, as ``--json`` prints them; a peak_memory of None is unknown."""
        overflow = [
            {"device": o.device, "op": None if o.op is None else str(o.op), "time": o.time, "needed": o.needed, "capacity": o.capacity}
            for o in self.overflows()
        ]
        peaks = _memory.peak_categories(self)
        result: dict[str, Any] = {
            "schedule": self.schedule.name,
            "devices": self.schedule.num_devices,
            "stages": self.schedule.num_stages,
            "microbatches": self.schedule.num_microbatches,
            "steps": self.steps,
            "barrier": self.barrier,
            "unit": self.unit,
            "source": self.source,
            "makespan": self.makespan,
            "iteration_time": self.iteration_time,
            "busy": self.busy,
            "bubble_fraction": self.bubble_fraction,
            "bubble_overhead": self.bubble_overhead,
            "span_bubble_rate": self.span_bubble_rate,
            "idle_causes": self.idle_causes(),
            "peak_memory": self.peak_memory if self.knows_memory else None,
            "peak_memory_by_category": [{name: value for name, value in peak.items() if value} for peak in peaks],
            "peak_activations": self.peak_activations,
            "peak_activations_i": self.peak_activations_i,
            "peak_activation_share": self.peak_activation_share,
            "messages": len(self.messages) * self.steps,
            "collectives": int(self.traffic.collective.sum()) * self.steps,
            "collective_time": [float(value) for value in metrics.collective_time(self)],
            "replicas": {str(stage): list(devices) for stage, devices in self.schedule.replicas.items()},
            "does_not_fit": overflow,
        }
        if self.schedule.weights != "flush" and self.schedule.has_backward:
            staleness = self.schedule.staleness
            result["weight_versions"] = [
                max((staleness.num_versions[device, stage] for stage in stages), default=0)
                for device, stages in enumerate(self.schedule.device_stages)
            ]
            result["update_delay"] = [int(delay) for delay in staleness.forward_delay.max(axis=1)]
        return result

    # -- columns ---------------------------------------------------------------------------------------------------

    @cached_property
    def messages(self) -> Messages:
        """The messages that sent, departed and arrived speak of."""
        return messages(self.schedule)

    @cached_property
    def moves(self) -> Moves:
        """The OFFLOAD and RELOAD ops that offload_start and offload_end speak of."""
        return _memory.moves(self.schedule)

    @cached_property
    def _activation_changes(self) -> tuple[Floats, Floats]:
        footprint = self.footprint
        return _memory.activation_levels(self.schedule, footprint.kept, footprint.freed_by_input_grad, footprint.rebuilt)

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """One row per op and step, as a dict of columns, which pandas, polars and plotly take as it is.

        Examples:
            >>> from pipesim import UniformCosts, generate, simulate
            >>> run = simulate(generate("gpipe", devices=1, microbatches=1), UniformCosts())
            >>> {name: column.tolist() for name, column in run.columns.items()}["end"]
            [1.0, 3.0]
        """
        schedule = self.schedule
        rows = np.flatnonzero(schedule.kind <= int(Kind.U))
        slot = schedule.row_slot[rows]
        names = np.array([kind.name for kind in Kind])
        one = {
            "device": schedule.device[rows],
            "stage": schedule.stage[rows],
            "kind": names[schedule.kind[rows]],
            "microbatch": schedule.microbatch[rows],
        }
        result: dict[str, NDArray[Any]] = {"step": np.repeat(np.arange(self.steps), len(rows))}
        result.update({name: np.tile(column, self.steps) for name, column in one.items()})
        result["start"], result["end"] = self.start[:, slot].ravel(), self.end[:, slot].ravel()
        return result

    def to_pandas(self) -> Any:
        """The columns as a pandas DataFrame (pandas must be installed)."""
        import pandas as pd

        return pd.DataFrame(self.columns)

    # -- showing ---------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return (
            f"<Timeline of {self.schedule.name!r}, {self.source}: makespan {format_time(self.makespan, self.unit)}, "
            f"bubble_fraction {self.bubble_fraction:.4f}, peak_activations {self.peak_activations}>"
        )

    def summary(self, *, links: int | None = 10) -> str:
        """The figures of the run, with the definition of each, as text; of its links those that were busiest, or all for None."""
        from pipesim.viz import text

        return text.summary(self, links)

    def _repr_svg_(self) -> str:
        from pipesim.viz import svg

        return svg.timeline_svg(self)

    def plot(self, ax: Any = None, **options: Any) -> Any:
        """Draws a Gantt chart with matplotlib and returns its Axes; see :func:`pipesim.viz.mpl.gantt`.

        Without *ax* the figure is pyplot's, so a notebook shows it and ``plt.show()`` would; nothing is shown from here.
        """
        from pipesim.viz import mpl

        return mpl.gantt(self, ax=mpl.pyplot_axes(self, options.get("lanes")) if ax is None else ax, **options)

    def plotly(self, **options: Any) -> Any:
        """Returns an interactive Gantt chart as a ``plotly.graph_objects.Figure``; see :mod:`pipesim.viz.interactive`."""
        from pipesim.viz import interactive

        return interactive.figure(self, **options)

    # -- saving ----------------------------------------------------------------------------------------------------

    def save(self, target: str | os.PathLike[str]) -> None:
        """Writes the run as JSON, compressed where the name ends in ``.gz``; :func:`load` reads it back.

        Raises:
            OSError: The file cannot be written. Nothing half-written is left.
        """
        write_run(self, target)


def load(source: str | os.PathLike[str]) -> Timeline:
    """Reads a run that :meth:`Timeline.save` wrote.

    Raises:
        ScheduleError: The file is no such run, or a column does not fit its schedule.
        OSError: It cannot be read.
    """
    return Timeline(**read_run(source))
