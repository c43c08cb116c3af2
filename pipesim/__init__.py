"""pipesim: how long a pipeline-parallel schedule takes, how much memory each device needs, and why a device is idle.

    >>> import pipesim as ps
    >>> schedule = ps.generate("1f1b", devices=4, microbatches=8)
    >>> run = ps.simulate(schedule, ps.UniformCosts(forward=1, backward=2))
    >>> run.makespan, round(run.bubble_fraction, 4), run.peak_activations
    (33.0, 0.2727, [4, 3, 2, 1])

Importing this package imports neither simpy nor matplotlib, plotly, pandas or torch: names below load when used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipesim.cluster import Cluster as Cluster
    from pipesim.cluster import Device as Device
    from pipesim.cluster import Link as Link
    from pipesim.communication import Communication as Communication
    from pipesim.comparison import compare as compare
    from pipesim.configurations import grid as grid
    from pipesim.costs import CostModel as CostModel
    from pipesim.costs import ProfileCosts as ProfileCosts
    from pipesim.costs import UniformCosts as UniformCosts
    from pipesim.costs import read_costs as read_costs
    from pipesim.engine import simulate as simulate
    from pipesim.engine.batch import simulate_many as simulate_many
    from pipesim.engine.exchange import Compute as Compute
    from pipesim.engine.exchange import Receive as Receive
    from pipesim.engine.exchange import Send as Send
    from pipesim.engine.exchange import exchange as exchange
    from pipesim.errors import DeadlockError as DeadlockError
    from pipesim.errors import ScheduleError as ScheduleError
    from pipesim.estimates import Estimate as Estimate
    from pipesim.estimates import estimate as estimate
    from pipesim.importing import read_traces as read_traces
    from pipesim.jitter import Empirical as Empirical
    from pipesim.jitter import LogNormal as LogNormal
    from pipesim.jitter import MonteCarlo as MonteCarlo
    from pipesim.jitter import Normal as Normal
    from pipesim.jitter import monte_carlo as monte_carlo
    from pipesim.lowering import crossings as crossings
    from pipesim.lowering import lower as lower
    from pipesim.memory import MemoryCurve as MemoryCurve
    from pipesim.models import DeviceSpec as DeviceSpec
    from pipesim.models import ModelSpec as ModelSpec
    from pipesim.models import Parallelism as Parallelism
    from pipesim.models import TransformerCosts as TransformerCosts
    from pipesim.models import read_device as read_device
    from pipesim.models import read_model as read_model
    from pipesim.op import Kind as Kind
    from pipesim.op import Op as Op
    from pipesim.op import Pair as Pair
    from pipesim.registry import available as available
    from pipesim.registry import generate as generate
    from pipesim.schedule import Schedule as Schedule
    from pipesim.sweep import pareto_front as pareto_front
    from pipesim.sweep import run_sweep as run_sweep
    from pipesim.timeline import Timeline as Timeline
    from pipesim.timeline import load as load

__version__ = "0.1.0"

_HOME = {
    "Cluster": "cluster",
    "Communication": "communication",
    "Compute": "engine.exchange",
    "CostModel": "costs",
    "DeadlockError": "errors",
    "Device": "cluster",
    "DeviceSpec": "models",
    "Empirical": "jitter",
    "Estimate": "estimates",
    "Kind": "op",
    "Link": "cluster",
    "LogNormal": "jitter",
    "MemoryCurve": "memory",
    "ModelSpec": "models",
    "MonteCarlo": "jitter",
    "Normal": "jitter",
    "Op": "op",
    "Pair": "op",
    "Parallelism": "models",
    "ProfileCosts": "costs",
    "Receive": "engine.exchange",
    "Schedule": "schedule",
    "ScheduleError": "errors",
    "Send": "engine.exchange",
    "Timeline": "timeline",
    "TransformerCosts": "models",
    "UniformCosts": "costs",
    "available": "registry",
    "compare": "comparison",
    "crossings": "lowering",
    "estimate": "estimates",
    "exchange": "engine.exchange",
    "generate": "registry",
    "grid": "configurations",
    "load": "timeline",
    "lower": "lowering",
    "monte_carlo": "jitter",
    "pareto_front": "sweep",
    "read_costs": "costs",
    "read_device": "models",
    "read_model": "models",
    "read_traces": "importing",
    "run_sweep": "sweep",
    "simulate": "engine",
    "simulate_many": "engine.batch",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pipesim' has no attribute {name!r}")
    value = getattr(import_module(f"pipesim.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
