"""Iteration times as a function of the efficiency, quickly enough to be fitted.

The time of an iteration is the longest of very many paths through the schedule, and each path is a sum of op durations and
messages. Those are linear in the inverse rates and the overheads (:data:`COORDINATES`), or, with a roofline, the larger of two
linear ones. So the time is the largest of very many linear functions of these coordinates. A :class:`Predictor` asks the
simulator for the one that is largest at a point; with a few of them a fit needs no simulation at every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim import registry
from pipesim.engine import simulate
from pipesim.errors import ScheduleError
from pipesim.estimates import _times_for_order
from pipesim.models import DeviceSpec, Efficiency, ModelSpec, Parallelism, TransformerCosts
from pipesim.op import Kind

__all__ = ["COORDINATES", "Configuration", "MeasuredRun", "Plane", "Predictor", "coordinates"]

Floats = NDArray[np.float64]

# what the time of a path is linear in, and the numbers of an efficiency that each depends on
COORDINATES = {
    "1/gemm": ("gemm",),
    "gemm_size/gemm": ("gemm", "gemm_size"),
    "1/(gemm attention)": ("gemm", "attention"),
    "1/memory": ("memory",),
    "layer_overhead": ("layer_overhead",),
    "op_overhead": ("op_overhead",),
    "step_overhead": ("step_overhead",),
    "1/inside": ("inside",),
    "1/between": ("between",),
    "1/gradient": ("gradient",),
    "1/pipeline": ("pipeline",),
}
_STEP = 1e-6  # of a coordinate, for slopes


def coordinates(efficiency: Efficiency) -> Floats:
    """(coordinates,) the point that an efficiency is.

    Examples:
        >>> dict(zip(COORDINATES, coordinates(Efficiency(gemm=0.5, attention=0.5)).tolist()))["1/(gemm attention)"]
        4.0
    """
    gemm = 1 / efficiency.gemm
    inverse = (1 / getattr(efficiency, name) for name in ("memory", "inside", "between", "gradient", "pipeline"))
    memory, *links = inverse
    overheads = (efficiency.layer_overhead, efficiency.op_overhead, efficiency.step_overhead)
    return np.array([gemm, efficiency.gemm_size * gemm, gemm / efficiency.attention, memory, *overheads, *links])


def _efficiency(point: Floats) -> Efficiency:
    """The inverse of :func:`coordinates`."""
    gemm, size, attention, memory, layer, op, step, inside, between, gradient, pipeline = point.tolist()
    return Efficiency(
        gemm=1 / gemm,
        gemm_size=size / gemm,
        attention=gemm / attention,
        memory=1 / memory,
        layer_overhead=layer,
        op_overhead=op,
        step_overhead=step,
        inside=1 / inside,
        between=1 / between,
        gradient=1 / gradient,
        pipeline=1 / pipeline,
    )


@dataclass(frozen=True)
class Configuration:
    """What ran: enough to simulate it.

    Attributes:
        model: The model.
        parallel: How it was spread.
        batch: Samples of one step over all pipelines; a multiple of microbatch x data.
        schedule: The schedule's name.
        options: Its own options, such as chunks.
    """

    model: ModelSpec
    parallel: Parallelism
    batch: int
    schedule: str = "1f1b"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        together = self.parallel.microbatch * self.parallel.data
        if self.batch % together:
            raise ScheduleError(f"batch = {self.batch} is no multiple of microbatch x data = {self.parallel.microbatch} x {self.parallel.data}")

    @property
    def microbatches(self) -> int:
        """Microbatches of one pipeline."""
        return self.batch // (self.parallel.microbatch * self.parallel.data)


@dataclass(frozen=True)
class MeasuredRun:
    """A measured iteration.

    Attributes:
        choices: What ran. Several where it is not known: the prediction is then the fastest that fits the memory.
        seconds: Measured time of one iteration.
        label: A name for reports.
        facts: Whatever is to be compared in reports, by name: columns of the file.
    """

    choices: tuple[Configuration, ...]
    seconds: float
    label: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.choices:
            raise ScheduleError(f"run {self.label!r} has no configuration")
        if not (np.isfinite(self.seconds) and self.seconds > 0):
            raise ScheduleError(f"run {self.label!r}: seconds must be a finite number above 0, got {self.seconds}")


class Plane(NamedTuple):
    """One of the linear functions whose largest is the time: ``constant + slopes · coordinates``."""

    constant: float
    slopes: Floats

    def __call__(self, efficiency: Efficiency) -> float:
        """Its value."""
        return self.constant + float(self.slopes @ coordinates(efficiency))


class Predictor:
    """Iteration time of one configuration.

    An order that depends on times (zb-auto, v-auto) is the one for the device's own efficiency, and stays.

    Args:
        configuration: What ran.
        device: Where.

    Raises:
        ScheduleError: The schedule has no flush or no backward, or cannot be made in this size.

    Examples:
        >>> from pipesim.models import Parallelism, read_device, read_model
        >>> device = read_device("a100-80g")
        >>> one = Predictor(Configuration(read_model("gpt-22b"), Parallelism(tensor=8, microbatch=4), batch=4), device)
        >>> faster = Efficiency(gemm=0.8)
        >>> plane = one.plane(Efficiency(), list(COORDINATES))
        >>> abs(plane(faster) / one.simulate(faster) - 1) < 1e-6
        True
    """

    def __init__(self, configuration: Configuration, device: DeviceSpec) -> None:
        self.configuration, self.device = configuration, device
        own = {**_times_for_order(self._costs(device.efficiency), registry.find(configuration.schedule)), **configuration.options}
        schedule = registry.generate(configuration.schedule, configuration.parallel.pipeline, configuration.microbatches, **own)
        if schedule.weights != "flush" or not schedule.has_backward or schedule.has(Kind.R):
            raise ScheduleError(f"{configuration.schedule} has no flush, no backward, or recomputation as an op; such runs cannot be fitted")
        self.schedule = schedule.with_updates()

    def simulate(self, efficiency: Efficiency) -> float:
        """Seconds of an iteration."""
        costs = self._costs(efficiency)
        return float(simulate(self.schedule, costs, cluster=costs.cluster()).iteration_time)

    @property
    def fits(self) -> bool:
        """Whether it fits the device's memory, whatever the efficiency."""
        costs = self._costs(self.device.efficiency)
        return not simulate(self.schedule, costs, cluster=costs.cluster()).overflows()

    def plane(self, efficiency: Efficiency, names: list[str]) -> Plane:
        """The linear function that is the time at an efficiency and beside it.

        Args:
            efficiency: The point.
            names: Coordinates that may change; the others stay what they are there.
        """
        point = coordinates(efficiency)
        time, slopes = self.simulate(efficiency), np.zeros(len(point))
        for number, name in enumerate(COORDINATES):
            if name in names:
                moved = point.copy()
                moved[number] += max(_STEP * point[number], _STEP * _SMALL.get(name, 1.0))
                slopes[number] = (self.simulate(_efficiency(moved)) - time) / (moved[number] - point[number])
        return Plane(time - float(slopes @ point), slopes)

    def _costs(self, efficiency: Efficiency) -> TransformerCosts:
        return TransformerCosts(self.configuration.model, replace(self.device, efficiency=efficiency), self.configuration.parallel)


# sizes of coordinates that may be 0
_SMALL = {"gemm_size/gemm": 100.0, "layer_overhead": 1e-4, "op_overhead": 1e-4, "step_overhead": 0.1}
