"""A run, simulated or measured: when every op started and ended, when every message left and came.

Every metric, plot, export and comparison takes a Timeline, whatever made it.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim import memory as _memory
from pipesim import metrics
from pipesim.cluster import Unit
from pipesim.dataflow import Messages, messages
from pipesim.errors import LARGEST, ScheduleError
from pipesim.files import read_limited, write_atomically
from pipesim.memory import Footprint, MemoryCurve, Moves, Overflow
from pipesim.op import Kind
from pipesim.schedule import Schedule
from pipesim.units import format_time

__all__ = ["Comparison", "Timeline", "compare", "load"]

Floats = NDArray[np.float64]

_FORMAT, _VERSION = "pipesim-timeline", 1
_MOST_OPS = 10**8  # a file says "all the same" in one number, so its size is no limit to what it unfolds to


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

    def __post_init__(self) -> None:
        for name in _TIMES:
            getattr(self, name).setflags(write=False)

    # -- figures, each named after its definition (pipesim.metrics) -----------------------------------------------------

    @property
    def steps(self) -> int:
        """How often the schedule ran."""
        return len(self.start)

    @cached_property
    def first_start(self) -> float:
        """When the first slot started."""
        return float(self.start.min())

    @cached_property
    def last_end(self) -> float:
        """When the last slot ended."""
        return float(self.end.max())

    @property
    def makespan(self) -> float:
        """Last end - first start."""
        return metrics.makespan(self)

    @property
    def iteration_time(self) -> float:
        """Steady-state time per step; per update for an asynchronous run."""
        return metrics.iteration_time(self)

    @property
    def busy(self) -> list[float]:
        """Per device, time in compute slots."""
        return [float(value) for value in metrics.busy(self)]

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
        return [float(value) for value in _memory.peak_memory(self)]

    @property
    def peak_activations(self) -> list[int]:
        """Per device, the most stage activations alive at once, released when B or W ends."""
        return [int(value) for value in metrics.peak_activations(self.schedule)]

    @property
    def peak_activations_i(self) -> list[int]:
        """Per device, the same, released when I ends."""
        return [int(value) for value in metrics.peak_activations(self.schedule, released_by_input_grad=True)]

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

    def memory(self, device: int) -> MemoryCurve:
        """What one device holds over time, by category."""
        return _memory.memory_curve(self, device)

    def overflows(self) -> list[Overflow]:
        """Per device that has too little memory, the first op that does not fit, in order of time."""
        found = (_memory.first_overflow(self, device) for device in range(self.schedule.num_devices))
        return sorted((overflow for overflow in found if overflow is not None), key=lambda o: (o.time, o.device))

    def figures(self) -> dict[str, Any]:
        """Every figure by its name, as ``--json`` prints them."""
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
            "peak_memory": self.peak_memory,
            "peak_memory_by_category": [{name: value for name, value in peak.items() if value} for peak in peaks],
            "peak_activations": self.peak_activations,
            "peak_activations_i": self.peak_activations_i,
            "peak_activation_share": self.peak_activation_share,
            "messages": len(self.messages) * self.steps,
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

    def summary(self) -> str:
        """The figures of the run, with the definition of each, as text."""
        from pipesim.viz import text

        return text.summary(self)

    def _repr_svg_(self) -> str:
        from pipesim.viz import svg

        return svg.timeline_svg(self)

    def plot(self, ax: Any = None, **options: Any) -> Any:
        """Draws a Gantt chart with matplotlib and returns its Axes; see :func:`pipesim.viz.mpl.gantt`.

        Without *ax* the figure is pyplot's, so a notebook shows it and ``plt.show()`` would; nothing is shown from here.
        """
        from pipesim.viz import mpl

        return mpl.gantt(self, ax=mpl.pyplot_axes(self) if ax is None else ax, **options)

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
        from pipesim.formats import csv_text

        schedule, footprint = self.schedule, self.footprint
        data = {
            "format": _FORMAT,
            "version": _VERSION,
            "schedule": {
                "name": schedule.name,
                "weights": schedule.weights,
                "graph": schedule.graph,
                "offload_to": [[device, target] for device, target in schedule.offload_to.items()],
                "rows": csv_text(schedule).splitlines(),
            },
            "unit": self.unit,
            "barrier": self.barrier,
            "source": self.source,
            "info": dict(self.info),
            "steps": self.steps,
            **{name: _packed(getattr(self, name)) for name in _TIMES},
            "footprint": {
                "kept": _packed(footprint.kept),
                "freed_by_input_grad": _packed(footprint.freed_by_input_grad),
                "rebuilt": _packed(footprint.rebuilt),
                "message": _packed(footprint.message),
                "static": {category: _packed(values) for category, values in footprint.static.items()},
            },
            "capacity": [None if math.isinf(value) else value for value in self.capacity.tolist()],
        }
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
        # mtime=0: the same run is the same file
        write_atomically(target, gzip.compress(text.encode(), mtime=0) if str(target).endswith(".gz") else text)


_TIMES = ("start", "end", "sent", "departed", "arrived", "offload_start", "offload_end")


def _packed(array: Floats) -> Any:
    """The numbers of an array in a row; one number where all are the same."""
    flat = np.ravel(array)
    return float(flat[0]) if len(flat) and (flat == flat[0]).all() else flat.tolist()


def load(source: str | os.PathLike[str]) -> Timeline:
    """Reads a run that :meth:`Timeline.save` wrote.

    Raises:
        ScheduleError: The file is no such run, or a column does not fit its schedule.
        OSError: It cannot be read.
    """
    path = Path(source)
    text = read_limited(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ScheduleError(f'{path} is not a run that pipesim saved (its "format" is not {_FORMAT!r})')
    if data.get("version") != _VERSION:
        raise ScheduleError(f"{path} has version {data.get('version')!r} of the format; this pipesim reads version {_VERSION}")
    try:
        return _unpacked(data, str(path))
    except ScheduleError as error:
        raise ScheduleError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ScheduleError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def _unpacked(data: Mapping[str, Any], where: str) -> Timeline:
    from pipesim.formats import parse_csv

    about = data["schedule"]
    graph = None if about["graph"] is None else [(int(a), int(b)) for a, b in about["graph"]]
    offload = {int(device): None if target is None else int(target) for device, target in about["offload_to"]}
    rows = "\n".join(str(row) for row in about["rows"])
    schedule = parse_csv(rows, f"{where}, schedule", name=str(about["name"]), graph=graph, weights=about["weights"], offload_to=offload)
    schedule.check()
    steps = data["steps"]
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 10**6:
        raise ScheduleError(f"{where}: steps is {steps!r}; right is a whole number of at least 1")
    if data["unit"] not in ("s", "slot") or not isinstance(data["barrier"], bool):
        raise ScheduleError(f"{where}: unit must be 's' or 'slot', and barrier true or false")

    def column(value: Any, shape: tuple[int, ...], name: str) -> Floats:
        try:
            array = np.asarray(value, dtype=np.float64)
        except (TypeError, ValueError):
            raise ScheduleError(f"{where}: {name} holds something that is no number") from None
        if array.ndim == 0:
            array = np.broadcast_to(array, shape).copy()
        if array.size != math.prod(shape):
            raise ScheduleError(f"{where}: {name} has {array.size} numbers and its schedule wants {math.prod(shape)}")
        if not (np.abs(array) <= LARGEST).all():  # false for NaN, too
            raise ScheduleError(f"{where}: {name} holds a number that is not finite, or above {LARGEST:g}")
        return array.reshape(shape)

    def sizes(value: Any, shape: tuple[int, ...], name: str) -> Floats:
        array = column(value, shape, name)
        if (array < 0).any():
            raise ScheduleError(f"{where}: {name} holds {array.min():g} bytes; right is at least 0")
        return array

    if steps * len(schedule) > _MOST_OPS:
        raise ScheduleError(f"{where}: {steps} steps of {len(schedule)} ops are more than the {_MOST_OPS} that pipesim reads")
    slots, edges, table = schedule.num_slots, len(messages(schedule)), (schedule.num_stages, schedule.num_microbatches)
    counts = dict.fromkeys(_TIMES, edges)
    counts["start"] = counts["end"] = slots
    counts["offload_start"] = counts["offload_end"] = len(_memory.moves(schedule))
    times = {name: column(data[name], (steps, counts[name]), name) for name in _TIMES}
    if (times["end"] < times["start"]).any() or (times["offload_end"] < times["offload_start"]).any():
        raise ScheduleError(f"{where}: an op ends before it starts")
    same_device = schedule.slot_device[1:] == schedule.slot_device[:-1]
    if (times["start"][:, 1:] < times["end"][:, :-1])[:, same_device].any():
        raise ScheduleError(f"{where}: an op starts before the one before it on its device ends")
    if (times["departed"] < times["sent"]).any() or (times["arrived"] < times["departed"]).any():
        raise ScheduleError(f"{where}: a message leaves before it is sent, or arrives before it leaves")
    stored = data["footprint"]
    kept, freed, rebuilt = (sizes(stored[name], table, name) for name in ("kept", "freed_by_input_grad", "rebuilt"))
    footprint = Footprint(
        kept,
        freed,
        rebuilt,
        {str(category): sizes(values, (schedule.num_devices,), str(category)) for category, values in stored["static"].items()},
        sizes(stored["message"], (edges,), "message"),
    )
    unknown = sorted(footprint.static.keys() - set(_memory.CATEGORIES))
    if unknown:
        raise ScheduleError(f"{where}: unknown category of memory {unknown[0]!r}; known: {', '.join(_memory.CATEGORIES)}")
    capacity = sizes([LARGEST if value is None else value for value in data["capacity"]], (schedule.num_devices,), "capacity")
    capacity[capacity == LARGEST] = math.inf
    info = {str(key): str(value) for key, value in data["info"].items()}
    return Timeline(
        schedule, **times, footprint=footprint, capacity=capacity, unit=data["unit"], barrier=data["barrier"], source=str(data["source"]), info=info
    )


@dataclass(frozen=True)
class Comparison:
    """Figures of several runs side by side; the first run is what the others are compared with.

    Attributes:
        names: One per run.
        rows: (name of the figure, one value per run).
        unit: Their unit of time.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Any, ...]], ...]
    unit: str

    def __str__(self) -> str:
        from pipesim.viz import text

        return text.comparison(self)

    def as_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {"unit": self.unit, "runs": [{"name": name, **{row: values[i] for row, values in self.rows}} for i, name in enumerate(self.names)]}


def compare(*timelines: Timeline, names: Sequence[str] | None = None) -> Comparison:
    """Puts the figures of runs side by side.

    Args:
        *timelines: Two or more runs in the same unit.
        names: What to call them; by default their schedules' names, numbered where they repeat.

    Raises:
        ScheduleError: There is nothing to compare, or one run is in seconds and another in slots.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> runs = [simulate(generate(name, 4, 8), UniformCosts(forward=1, backward=2)) for name in ("gpipe", "1f1b")]
        >>> dict(compare(*runs).rows)["peak_activations"]
        ([8, 8, 8, 8], [4, 3, 2, 1])
    """
    if len(timelines) < 2:
        raise ScheduleError("compare wants at least two runs")
    units = {timeline.unit for timeline in timelines}
    if len(units) > 1:
        raise ScheduleError("one run is in seconds and another in slots; they cannot be compared")
    given = list(names) if names is not None else [timeline.schedule.name for timeline in timelines]
    if len(given) != len(timelines):
        raise ScheduleError(f"{len(given)} names for {len(timelines)} runs")
    unique = [name if given.count(name) == 1 else f"{name} #{given[: i + 1].count(name)}" for i, name in enumerate(given)]
    figures = (
        "makespan",
        "iteration_time",
        "bubble_fraction",
        "bubble_overhead",
        "span_bubble_rate",
        "peak_activations",
        "peak_activation_share",
        "peak_memory",
    )
    rows = [(figure, tuple(getattr(timeline, figure) for timeline in timelines)) for figure in figures]
    rows.insert(1, ("makespan_ratio", tuple(timeline.makespan / timelines[0].makespan if timelines[0].makespan else None for timeline in timelines)))
    return Comparison(tuple(unique), tuple(rows), units.pop())
