"""Many runs at once: each equal to its own ``simulate``, bit for bit, with and without numba."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import Cluster, DeadlockError, Device, Kind, Link, Schedule, ScheduleError, UniformCosts, generate, simulate, simulate_many
from pipesim.engine import compiled

QUICK = settings(max_examples=40, deadline=None, database=None)
ENGINES = ["simpy", pytest.param("compiled", marks=pytest.mark.skipif(not compiled.installed(), reason="numba is not installed"))]
FIGURES = ("makespan", "iteration_time", "bubble_fraction", "bubble_overhead", "span_bubble_rate")


class Given(UniformCosts):
    """Costs with these durations. Schedules here list their updates, or have none."""

    table: Any = None

    def durations(self, schedule: Schedule) -> Any:
        return self.table


def one(schedule: Schedule, row: Any, costs: UniformCosts, **options: Any) -> Any:
    """A run of its own on the reference engine."""
    costs = Given(latency=costs.latency, bandwidth=costs.bandwidth, message=costs.message)
    object.__setattr__(costs, "table", row)
    return simulate(schedule, costs, engine="simpy", **options)


def compare(schedule: Schedule, table: Any, costs: UniformCosts, engine: Any, **options: Any) -> None:
    many = simulate_many(schedule, costs, durations=table, keep_times=True, engine=engine, **options)
    assert len(many) == len(table)
    for number, row in enumerate(table):
        run = one(many.schedule, row, costs, **options)
        assert np.array_equal(many.start[number], run.start[0])
        assert np.array_equal(many.end[number], run.end[0])
        for figure in FIGURES:
            assert getattr(many, figure)[number] == pytest.approx(getattr(run, figure), rel=1e-12, abs=1e-12), figure
        assert many.makespan[number] == run.makespan
        assert many.busy[number].tolist() == run.busy


def some(schedule: Schedule, n: int, seed: int, values: Any = None) -> Any:
    rng = np.random.default_rng(seed)
    return rng.uniform(0, 3, (n, schedule.num_slots)) if values is None else rng.choice(values, (n, schedule.num_slots))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("n", [1, 7, 8, 9, 19])
def test_every_run_is_that_of_simulate(n: int, engine: Any) -> None:
    schedule = generate("1f1b", 4, 6).with_updates()
    for costs in (UniformCosts(), UniformCosts(latency=0.1), UniformCosts(latency=0.1, bandwidth=2, message=0.7)):
        for barrier in (True, False):
            compare(schedule, some(schedule, n, n), costs, engine, barrier=barrier)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["pipedream", "chimera", "dualpipe-v", "bpipe", "interleaved-1f1b", "graphpipe"])
def test_schedules_of_every_sort(name: str, engine: Any) -> None:
    """Asynchronous with replicas, bidirectional, with pairs, with shared links, with chunks, a DAG."""
    schedule = generate(name, 4, 8).with_updates()
    compare(schedule, some(schedule, 9, 1, [0.0, 0.1, 0.2, 1.0]), UniformCosts(latency=0.1, bandwidth=2, message=0.7), engine)


@pytest.mark.skipif(not compiled.installed(), reason="numba is not installed")
@QUICK
@given(
    seed=st.integers(0, 10**6), devices=st.integers(1, 5), microbatches=st.integers(1, 5), barrier=st.booleans(),
    values=st.sampled_from([None, [0.0, 1.0, 2.0]]), shape=st.fixed_dictionaries({name: st.booleans() for name in ("dag", "replicas", "split", "pairs")}),
)  # fmt: skip
def test_random_schedules(seed: int, devices: int, microbatches: int, barrier: bool, values: Any, shape: Any, random_schedule: Any) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(seed, devices, microbatches, updates=rng.random() < 0.5, **shape).with_updates()
    costs = UniformCosts(latency=rng.choice([None, 0.1]), bandwidth=rng.choice([None, 2.0]), message=0.3)
    compare(schedule, some(schedule, rng.randint(1, 10), seed, values), costs, "compiled", barrier=barrier)


@pytest.mark.parametrize("engine", ENGINES)
def test_closed_forms(engine: Any) -> None:
    """1F1B with F = f, B = 2f takes 3f (m + p - 1), whatever f; of it 3f m are busy."""
    schedule = generate("1f1b", 4, 8)
    factor = np.array([1.0, 1.5, 0.25])
    many = simulate_many(schedule, durations=factor[:, None] * UniformCosts(forward=1, backward=2).durations(schedule), engine=engine)
    assert many.makespan.tolist() == (33 * factor).tolist()
    assert many.busy.tolist() == [[24 * f] * 4 for f in factor]
    assert many.bubble_fraction == pytest.approx([3 / 11] * 3)
    assert many.bubble_overhead == pytest.approx([3 / 8] * 3)
    # device d starts at d f and ends 2 f d before the end
    assert many.first_start.tolist() == [[f * d for d in range(4)] for f in factor]
    assert many.last_end.tolist() == [[f * (33 - 2 * d) for d in range(4)] for f in factor]
    assert many.start.shape == many.end.shape == (0, 0)
    assert repr(many) == "<3 evaluations of '1f1b': makespan 8.25 to 49.5>"


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_takes_time(engine: Any) -> None:
    schedule = generate("gpipe", 2, 2)
    many = simulate_many(schedule, durations=np.zeros((3, schedule.num_slots)), engine=engine)
    for figure in FIGURES:
        assert getattr(many, figure).tolist() == [0, 0, 0]


@pytest.mark.parametrize("engine", ENGINES)
def test_costs_that_draw(engine: Any) -> None:
    class Drawing(UniformCosts):
        """1, 2, 3, ... times what it would be."""

        times = 0

        def durations(self, schedule: Schedule) -> Any:
            Drawing.times += 1
            return super().durations(schedule) * Drawing.times

    many = simulate_many(generate("1f1b", 2, 3), Drawing(forward=1, backward=2, optimizer=0.5), 4, engine=engine)
    # (m + p - 1)(F + B) + U
    assert many.makespan.tolist() == [12.5, 25, 37.5, 50]
    assert many.schedule.has(Kind.U)


@pytest.mark.parametrize("engine", ENGINES)
def test_clusters(engine: Any) -> None:
    """A device of half the speed, and links between nodes of two: forwards only, 2 + 1 + 4 (the slow one) + 10 + 2 + 1 + 2."""
    cluster = Cluster(unit="slot", inside=Link(1.0), between=Link(10.0), devices_per_node=2, devices={1: Device(speed=0.5)})
    schedule = generate("gpipe", 4, 1, forward_only=True)
    many = simulate_many(schedule, durations=[[2.0] * 4] * 2, cluster=cluster, engine=engine)
    assert many.makespan.tolist() == [22, 22]


@pytest.mark.parametrize("engine", ENGINES)
def test_deadlocks(engine: Any) -> None:
    schedule = Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(DeadlockError, match="device 0 -> device 1 -> device 0 wait for each other"):
        simulate_many(schedule, durations=np.ones((3, 8)), engine=engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"durations": np.ones((2, 7))}, r"durations gives durations of shape \(7,\); right is \(8,\), finite and at least 0"),
        ({"durations": np.ones(8)}, "right is"),
        ({"durations": np.full((2, 8), np.nan)}, "finite"),
        ({"durations": -np.ones((2, 8))}, "at least 0"),
        ({"durations": np.ones((0, 8))}, "no row"),
        ({"durations": np.ones((2, 8)), "n": 3}, "n is 3 and durations has 2 rows"),
        ({"n": 0}, "n"),
        ({"n": 2, "engine": "simpi"}, "engine must be one of"),
    ],
)
def test_wrong_input(options: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate_many(generate("1f1b", 2, 2), **options)
