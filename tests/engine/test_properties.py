"""What holds for every schedule, every duration and every link, and the same answer as an independent longest path."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipesim
from pipesim import Cluster, Kind, Link, Pair, Schedule, UniformCosts, load
from pipesim.dataflow import dependency_edges

simulate = partial(pipesim.simulate, engine="simpy")

FINISHED = settings(max_examples=60, deadline=None, database=None)


@st.composite
def cases(draw: Any, **always: bool) -> dict[str, Any]:
    """Arguments of random_schedule, with seeds for durations and links."""
    shape: dict[str, Any] = {"seed": draw(st.integers(0, 10**6)), "devices": draw(st.integers(1, 5)), "microbatches": draw(st.integers(1, 6))}
    for option in ("dag", "replicas", "split", "recompute", "pairs", "forward_only", "updates"):
        shape[option] = always.get(option, draw(st.booleans()))
    return shape


def costs_of(schedule: Schedule, seed: int) -> UniformCosts:
    """Durations that differ for every op, zero now and then; sizes of messages too."""
    rng = np.random.default_rng(seed)
    table = (schedule.num_stages, schedule.num_microbatches)

    def some() -> np.ndarray:
        values = rng.uniform(0.1, 3.0, table)
        return np.where(rng.random(table) < 0.15, 0.0, values)

    return UniformCosts(
        forward=some(), backward=some(), input_grad=some(), weight_grad=some(), message=rng.uniform(0, 5, table), activation=some(),
        optimizer=rng.uniform(0, 2, table[0]), weights=rng.uniform(0, 2, table[0]),
    )  # fmt: skip


def cluster_of(schedule: Schedule, seed: int) -> Cluster:
    """Links that all differ; some have no bandwidth, some no latency."""
    rng = random.Random(seed)
    p = schedule.num_devices
    pairs = [(a, b) for a in range(p) for b in range(p) if a != b]
    return Cluster(unit="slot", links={pair: Link(rng.choice([0.0, rng.uniform(0, 2)]), rng.choice([None, rng.uniform(0.5, 9)])) for pair in pairs})


def duration_of(costs: UniformCosts) -> Any:
    """Time of a slot, by the tables and by nothing of pipesim's own arithmetic."""
    field = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input_grad", Kind.W: "weight_grad", Kind.R: "forward"}

    def of(slot: Any) -> float:
        if isinstance(slot, Pair):
            return of(slot.first) + of(slot.second)
        if slot.kind is Kind.U:
            return float(costs.optimizer[slot.stage])
        return float(getattr(costs, field[slot.kind])[slot.stage, slot.microbatch])

    return of


def run_of(case: dict[str, Any], schedule: Schedule, **options: Any) -> Any:
    return simulate(schedule, costs_of(schedule, case["seed"]), cluster=cluster_of(schedule, case["seed"]), **options)


@FINISHED
@given(case=cases(), steps=st.integers(1, 3), barrier=st.booleans())
def test_times_equal_an_independent_longest_path_bit_for_bit(case: Any, steps: int, barrier: bool, random_schedule: Any, longest_path: Any) -> None:
    schedule = random_schedule(**case)
    costs, cluster = costs_of(schedule, case["seed"]), cluster_of(schedule, case["seed"])
    run = simulate(schedule, costs, cluster=cluster, steps=steps, barrier=barrier)
    links = {pair: (link.latency, link.bandwidth) for pair, link in cluster.links.items()}
    expected = longest_path(run.schedule, duration_of(costs), links, lambda s, i: float(costs.message[s, i]), steps, barrier)
    assert not expected.stuck
    slots = run.schedule.device_slots
    ops = {
        (step, device, slot - int(slots[device])): (run.start[step, slot], run.end[step, slot])
        for step in range(steps)
        for device in range(schedule.num_devices)
        for slot in range(int(slots[device]), int(slots[device + 1]))
    }
    assert ops == expected.ops
    found = run.messages
    sent = {}
    for number, (source, target) in enumerate(zip(found.source.tolist(), found.target.tolist(), strict=True)):
        producer, consumer = run.schedule.op(source), run.schedule.op(target)
        letter = "F" if producer.kind is Kind.F else "G"
        for step in range(steps):
            times = (run.sent[step, number], run.departed[step, number], run.arrived[step, number])
            sent[step, letter, producer.stage, consumer.stage, producer.microbatch] = times
    assert sent == expected.messages


@FINISHED
@given(case=cases(), steps=st.integers(1, 3), barrier=st.booleans())
def test_order_on_devices_and_inputs_before_ops(case: Any, steps: int, barrier: bool, random_schedule: Any) -> None:
    schedule = random_schedule(**case)
    run = run_of(case, schedule, steps=steps, barrier=barrier)
    ran = run.schedule
    for device in range(ran.num_devices):
        low, high = ran.device_slots[device], ran.device_slots[device + 1]
        start, end = run.start[:, low:high].ravel(), run.end[:, low:high].ravel()
        assert (start[1:] >= end[:-1]).all()
    source, target = (ran.row_slot[rows] for rows in dependency_edges(ran))
    assert (run.end[:, source] <= run.start[:, target]).all()
    found = run.messages
    assert (run.sent == run.end[:, found.source_slot]).all()
    assert (run.sent <= run.departed).all()
    assert (run.departed <= run.arrived).all()
    assert (run.arrived <= run.start[:, found.target_slot]).all()


@FINISHED
@given(case=cases(), steps=st.integers(1, 2), barrier=st.booleans())
def test_bounds_of_the_makespan(case: Any, steps: int, barrier: bool, random_schedule: Any) -> None:
    schedule = random_schedule(**case)
    costs = costs_of(schedule, case["seed"])
    run = run_of(case, schedule, steps=steps, barrier=barrier)
    # the longest chain of ops, devices set aside: ops sorted by their start stand after what they need
    ran, duration = run.schedule, duration_of(costs)
    source, target = (ran.row_slot[rows] for rows in dependency_edges(ran))
    finish = [duration(ran.slot(slot)) for slot in range(ran.num_slots)]
    own = list(finish)
    for slot in np.lexsort((run.end[0], run.start[0])).tolist():
        before = [finish[int(s)] for s, t in zip(source, target, strict=True) if t == slot and s != slot]
        finish[slot] = own[slot] + max(before, default=0.0)
    assert run.makespan >= max(finish) - 1e-9
    assert run.makespan >= max(run.busy) - 1e-9
    assert sum(run.busy) == pytest.approx(steps * sum(own))
    assert 0 <= run.bubble_fraction <= 1


@FINISHED
@given(case=cases(), extra=st.floats(0, 5), place=st.floats(0, 1, exclude_max=True))
def test_S25_one_slower_op_costs_at_most_what_was_added(case: Any, extra: float, place: float, random_schedule: Any) -> None:
    schedule = random_schedule(**case)
    costs = costs_of(schedule, case["seed"])

    class Slower(UniformCosts):
        def durations(self, schedule: Schedule) -> Any:
            found = costs.durations(schedule)
            found[int(place * len(found))] += extra
            return found

    slower = Slower(message=costs.message)
    before, after = (simulate(schedule, model, cluster=cluster_of(schedule, case["seed"])).makespan for model in (costs, slower))
    assert -1e-9 <= after - before <= extra + 1e-9


@FINISHED
@given(case=cases(), steps=st.integers(1, 3), barrier=st.booleans())
def test_memory_is_back_at_its_baseline_and_both_peaks_agree(case: Any, steps: int, barrier: bool, random_schedule: Any) -> None:
    run = run_of(case, random_schedule(**case), steps=steps, barrier=barrier)
    for device in range(run.schedule.num_devices):
        curve = run.memory(device)
        assert (np.diff(curve.times) >= 0).all()
        assert curve.total.min() >= curve.categories["weights"][0] - 1e-9
        for category in ("activations", "communication"):
            assert curve.categories[category][-1] == pytest.approx(0, abs=1e-9)
        assert curve.peak == pytest.approx(run.peak_memory[device], rel=1e-12)


@FINISHED
@given(case=cases(), steps=st.integers(1, 3), barrier=st.booleans())
def test_idle_causes_add_up_to_the_idle_time(case: Any, steps: int, barrier: bool, random_schedule: Any) -> None:
    run = run_of(case, random_schedule(**case), steps=steps, barrier=barrier)
    for causes, busy in zip(run.idle_causes(), run.busy, strict=True):
        assert min(causes.values()) >= -1e-9
        assert sum(causes.values()) == pytest.approx(run.makespan - busy, abs=1e-9)


@FINISHED
@given(case=cases(), steps=st.integers(1, 2))
def test_the_same_input_gives_the_same_run_and_survives_a_file(case: Any, steps: int, random_schedule: Any, tmp_path_factory: Any) -> None:
    first, second = (run_of(case, random_schedule(**case), steps=steps) for _ in range(2))
    path = tmp_path_factory.mktemp("runs") / "run.json.gz"
    first.save(path)
    third = load(path)
    for other in (second, third):
        assert other.schedule == first.schedule
        assert other.figures() == first.figures()
        for column in ("start", "end", "sent", "departed", "arrived"):
            assert np.array_equal(getattr(first, column), getattr(other, column)), column
