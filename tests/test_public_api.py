"""The names that users may rely on, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pipesim

# A name is added here when it is added to the documentation, and never taken away without a note in the changelog.
PUBLIC = [
    "__version__",
    "Cluster",
    "Communication",
    "Compute",
    "CostModel",
    "DeadlockError",
    "Device",
    "DeviceSpec",
    "Empirical",
    "Estimate",
    "Kind",
    "Link",
    "LogNormal",
    "MemoryCurve",
    "ModelSpec",
    "MonteCarlo",
    "Normal",
    "Op",
    "Pair",
    "Parallelism",
    "ProfileCosts",
    "Receive",
    "Schedule",
    "ScheduleError",
    "Send",
    "Timeline",
    "TransformerCosts",
    "UniformCosts",
    "available",
    "compare",
    "crossings",
    "estimate",
    "exchange",
    "generate",
    "grid",
    "load",
    "lower",
    "monte_carlo",
    "pareto_front",
    "read_costs",
    "read_device",
    "read_model",
    "read_traces",
    "run_sweep",
    "simulate",
    "simulate_many",
]

HEAVY = ("torch", "matplotlib", "plotly", "simpy", "pandas", "numba")


def test_names_are_the_documented_ones() -> None:
    assert pipesim.__all__ == PUBLIC
    assert dir(pipesim) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_is_there_and_documented(name: str) -> None:
    value = getattr(pipesim, name)
    assert name == "__version__" or value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = pipesim.simulat  # type: ignore[attr-defined]


def imported(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has imported after running *code*."""
    text = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=60).stdout.split())


def test_importing_pipesim_imports_nothing_heavy() -> None:
    found = imported("import pipesim")
    assert "pipesim" in found
    assert found.isdisjoint(HEAVY)


def test_generating_and_checking_need_no_simulator() -> None:
    found = imported("import pipesim\npipesim.generate('1f1b', 4, 8)\npipesim.UniformCosts()\npipesim.Cluster()")
    assert found.isdisjoint(HEAVY)


def test_simulating_needs_simpy_and_nothing_else() -> None:
    found = imported("import pipesim\npipesim.simulate(pipesim.generate('1f1b', 4, 8)).figures()")
    assert found & set(HEAVY) == {"simpy"}
