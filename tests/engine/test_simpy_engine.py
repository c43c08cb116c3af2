"""Known answers of whole runs. F, B, p, m as in the literature; where a figure is worked out by hand, the comment says how."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import pipesim
from pipesim import Cluster, Device, Kind, Link, Schedule, ScheduleError, UniformCosts, generate

simulate = partial(pipesim.simulate, engine="simpy")

FB = UniformCosts(forward=1, backward=2)


def makespan(name: str, p: int, m: int, costs: UniformCosts = FB, **options: Any) -> float:
    return simulate(generate(name, p, m, **options), costs).makespan


# -- cases -----------------------------------------------------------------------------------------------------------------


def test_S01_gpipe_and_1f1b_take_the_same_time() -> None:
    # the bound (p-1)(F+B) + m(F+B) = 78 holds for every schedule with an unsplit backward; 71 would break a dependency
    for name in ("gpipe", "1f1b"):
        run = simulate(generate(name, 8, 32), UniformCosts(forward=1, backward=1))
        assert run.makespan == 78
        assert run.bubble_fraction == pytest.approx(14 / 78, abs=1e-12)


def test_S02_two_bubble_definitions_under_two_names() -> None:
    for name in ("gpipe", "1f1b"):
        for p, m, time, fraction, overhead in ((4, 8, 33, 3 / 11, 3 / 8), (8, 8, 45, 7 / 15, 7 / 8), (8, 16, 69, 7 / 23, 7 / 16)):
            run = simulate(generate(name, p, m), FB)
            assert run.makespan == time
            assert run.bubble_fraction == pytest.approx(fraction, abs=1e-12)
            assert run.bubble_overhead == pytest.approx(overhead, abs=1e-12)
            assert run.figures()["bubble_fraction"] != run.figures()["bubble_overhead"]


def test_S03_fewer_microbatches_than_stages() -> None:
    for p, m, time, peaks in ((8, 1, 24, [1] * 8), (4, 2, 15, [2, 2, 2, 1]), (4, 3, 18, [3, 3, 2, 1])):
        run = simulate(generate("1f1b", p, m), FB)
        assert run.makespan == time == (m + p - 1) * 3
        assert run.peak_activations == peaks == [min(m, p - s) for s in range(p)]
        for stream in run.schedule.streams:
            assert [op.kind for op in stream].count(Kind.F) == [op.kind for op in stream].count(Kind.B) == m


def test_S04_naive_model_parallelism() -> None:
    run = simulate(generate("naive", 4, 1), FB)
    assert run.makespan == 12
    assert run.busy == [3, 3, 3, 3]
    assert 1 - run.bubble_fraction == 0.25
    # exactly one device is busy at each instant: the intervals tile [0, 12]
    intervals = sorted(zip(run.start.ravel().tolist(), run.end.ravel().tolist(), strict=True))
    assert [start for start, _ in intervals] == [0.0] + [end for _, end in intervals[:-1]]
    assert intervals[-1][1] == 12
    assert makespan("naive", 4, 5) == 5 * 12


def test_S21_uneven_microbatch_sizes() -> None:
    for p, gpipe, one_f_one_b, wrong in ((2, 33, 31, 36), (3, 42, 40, 45)):
        table = np.array([[3.0, 3.0, 2.0]] * p)
        costs = UniformCosts(forward=table, backward=2 * table)
        assert makespan("gpipe", p, 3, costs) == gpipe
        assert makespan("1f1b", p, 3, costs) == one_f_one_b
        equal = np.full((p, 3), 3.0)
        assert makespan("gpipe", p, 3, UniformCosts(forward=equal, backward=2 * equal)) == wrong


def test_S23_more_microbatches_reduce_the_bubble_but_not_the_time() -> None:
    found = {}
    for m, time, fraction in ((4, 440, 0.636), (8, 360, 0.467), (16, 368, 0.304), (32, 468, 0.179)):
        run = simulate(generate("gpipe", 8, m), UniformCosts(forward=64 / m + 4, backward=64 / m + 4))
        assert run.makespan == time
        assert run.bubble_fraction == pytest.approx(fraction, abs=5e-4)
        found[m] = run.makespan
    assert min(found, key=found.__getitem__) == 8
    assert math.sqrt(7 * 64 / 4) == pytest.approx(10.6, abs=0.05)


def test_S25_one_slow_op_and_one_slow_device() -> None:
    slow_op = np.ones((4, 8))
    slow_op[1, 3] += 5
    for name, time in (("gpipe", 40.2), ("1f1b", 39.3)):
        assert makespan(name, 4, 8, UniformCosts(forward=slow_op, backward=2)) == 38
        by_costs = makespan(name, 4, 8, UniformCosts(forward=[1, 1, 1.3, 1], backward=[2, 2, 2.6, 2]))
        cluster = Cluster(devices={2: Device(speed=1 / 1.3)}, unit="slot")
        by_cluster = simulate(generate(name, 4, 8), FB, cluster=cluster).makespan
        assert by_costs == pytest.approx(time, rel=1e-12)
        assert by_cluster == pytest.approx(time, rel=1e-12)


def test_S27_forward_only_run() -> None:
    for name in ("gpipe", "naive"):
        schedule = generate(name, 4, 8, forward_only=True)
        run = simulate(schedule, FB)
        assert run.makespan == 11
        assert not schedule.has_backward
        assert not run.messages.gradient.any()
        assert len(run.messages) == 3 * 8
        assert makespan(name, 16, 16, UniformCosts(forward=1, latency=0.1), forward_only=True) == pytest.approx(32.5, rel=1e-12)


def test_S28_asynchronous_pipedream() -> None:
    run = simulate(generate("pipedream", 4, 16), FB)
    assert run.makespan == 57
    assert simulate(generate("1f1b", 4, 4), FB, steps=4).makespan == 84
    assert run.figures()["weight_versions"] == [4, 3, 2, 1]
    assert run.iteration_time == 3  # F + B between two updates of stage 0
    assert not run.barrier
    with pytest.raises(ScheduleError, match="one long run"):
        simulate(generate("pipedream", 4, 16), FB, steps=2)


def test_S30_recompute_policies() -> None:
    for policy, four, one in (("always", 44, 32), ("except_last", 43, 31), ("never", 33, 24)):
        costs = UniformCosts(forward=1, backward=2, recompute_policy=policy)
        assert makespan("gpipe", 4, 8, costs) == four
        assert makespan("gpipe", 1, 8, costs) == one
    table = np.ones((4, 8), bool)
    table[:, -1] = False
    assert makespan("gpipe", 4, 8, UniformCosts(forward=1, backward=2, recompute_policy=table)) == 43


def test_B01_one_device_is_legal() -> None:
    run = simulate(generate("1f1b", 1, 4), FB)
    assert (run.makespan, len(run.messages), run.bubble_fraction, run.bubble_overhead, run.span_bubble_rate) == (12, 0, 0, 0, 0)


@pytest.mark.slow
def test_B09_size() -> None:
    run = simulate(generate("1f1b", 64, 4096), FB)
    assert run.schedule.num_slots == 524_288
    assert run.makespan == (4096 + 63) * 3 == 12477


def test_C10_overlapped_messages() -> None:
    # GPipe exposes 2(p-1)c and no more
    assert makespan("gpipe", 2, 4, UniformCosts(forward=1, backward=2, latency=0.25)) == 15 + 2 * 0.25
    assert makespan("gpipe", 4, 8, UniformCosts(forward=1, backward=2, latency=0.25)) == 33 + 6 * 0.25


def test_D03_per_microbatch_or_once_per_step() -> None:
    """An update of 4 after each of 8 microbatches (no flush) or once: 32 against 4 in all."""
    costs = UniformCosts(forward=1, backward=2, optimizer=4)
    each, once = (simulate(generate(name, 1, 8), costs).busy[0] - 8 * 3 for name in ("pipedream", "1f1b"))
    assert (each, once) == (32, 4)


# -- the order and the pace ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hop", "a", "b"), [(1, 85, 63), (2, 113, 75)])
def test_policy_b_hides_the_time_of_a_hop(hop: float, a: float, b: float) -> None:
    """DAPPLE's policies at p=4, m=16, F=1, B=2, replayed independently; without a hop both take 57."""
    for policy, time in (("A", a), ("B", b)):
        assert makespan("1f1b", 4, 16, UniformCosts(forward=1, backward=2, latency=hop), policy=policy) == time
        assert makespan("1f1b", 4, 16, policy=policy) == 57


def test_both_backward_orders_of_gpipe_take_the_same_time() -> None:
    for order in ("forward", "reversed"):
        run = simulate(generate("gpipe", 3, 5, order=order), FB)
        assert run.makespan == (5 + 3 - 1) * 3
        assert run.peak_activations == [5, 5, 5]


def test_chimera_runs_with_two_replicas_of_every_stage() -> None:
    """S19's order: F=B=1 takes 10, F=1 and B=2 takes 16; peaks 3, 4, 4, 3."""
    text = "0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1\n1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1\n1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3\n0F2 0F3 3F0 3B0 3F1 3B1 0B2 0B3"
    for backward, time in ((1, 10), (2, 16)):
        run = simulate(Schedule.from_text(text), UniformCosts(forward=1, backward=backward))
        assert run.makespan == time
        assert run.peak_activations == [3, 4, 4, 3]


def test_a_pair_takes_the_sum_of_its_two_or_what_overlap_says() -> None:
    schedule = Schedule.from_text("0F0 (0F1;0B0)OVERLAP_F_B (0F2;0F3)PAIR 0B1 0B2 0B3")
    assert simulate(schedule, FB).makespan == 12
    assert simulate(schedule, UniformCosts(forward=1, backward=2, overlap=2.5)).makespan == 11.5  # the forwards' pair stays


def test_zero_durations_keep_the_order() -> None:
    run = simulate(generate("1f1b", 3, 4), UniformCosts(forward=0, backward=0))
    assert (run.makespan, run.bubble_fraction, run.bubble_overhead, run.span_bubble_rate) == (0, 0, 0, 0)
    assert run.peak_activations == [3, 2, 1]


# -- links -------------------------------------------------------------------------------------------------------------------

TWO = "0F0 0F1 0F2\n1F0 1F1 1F2"


def test_a_link_serves_one_message_at_a_time() -> None:
    """F=1 on device 0, nothing on device 1; 6 bytes at 2 a slot hold the link for 3, then 0.5 latency.

    Sent 1, 2, 3; taken 1, 4, 7; there 4.5, 7.5, 10.5.
    """
    run = simulate(Schedule.from_text(TWO), UniformCosts(forward=[1, 0], message=6, bandwidth=2, latency=0.5))
    assert run.sent[0].tolist() == [1, 2, 3]
    assert run.departed[0].tolist() == [1, 4, 7]
    assert run.arrived[0].tolist() == [4.5, 7.5, 10.5]
    assert run.makespan == 10.5


def test_with_latency_alone_messages_do_not_queue() -> None:
    run = simulate(Schedule.from_text(TWO), UniformCosts(forward=[1, 0], message=6, latency=3.5))
    assert run.arrived[0].tolist() == [4.5, 5.5, 6.5]


def test_each_direction_of_a_link_is_its_own() -> None:
    """Stage 0's activation and stage 2's, which lives on device 1 and sends back to 0, cross at the same time."""
    schedule = Schedule.from_text("0F0 3F0\n2F0 1F0", graph=[(0, 1), (2, 3)])
    run = simulate(schedule, UniformCosts(message=4, bandwidth=2))
    assert run.arrived[0].tolist() == [3, 3]


def test_times_are_added_in_the_order_of_the_formula() -> None:
    """(sent + bytes / bandwidth) + latency differs in the last bit from sent + (bytes / bandwidth + latency)."""
    sent, transfer, latency = 0.1, 0.7, 0.2
    assert (sent + transfer) + latency != sent + (transfer + latency)
    run = simulate(Schedule.from_text("0F0\n1F0"), UniformCosts(forward=[0.1, 0], message=0.7, bandwidth=1, latency=0.2))
    assert run.arrived[0, 0] == run.start[0, 1] == (sent + transfer) + latency


def test_links_of_nodes_differ_from_links_between_nodes() -> None:
    cluster = Cluster(inside=Link(1.0), between=Link(10.0), devices_per_node=2, unit="slot")
    run = simulate(generate("gpipe", 4, 1, forward_only=True), UniformCosts(forward=1), cluster=cluster)
    assert run.makespan == 4 + 1 + 10 + 1


def test_a_latency_given_twice_and_a_mix_of_units_are_refused() -> None:
    schedule = generate("gpipe", 2, 2)
    with pytest.raises(ScheduleError, match="both the costs and the cluster"):
        simulate(schedule, UniformCosts(latency=1), cluster=Cluster.uniform(latency=1))
    with pytest.raises(ScheduleError, match="slots and the cluster 'cluster' is in seconds"):
        simulate(schedule, UniformCosts(), cluster=Cluster())
    with pytest.raises(ScheduleError, match="device 7"):
        simulate(schedule, UniformCosts(), cluster=Cluster(devices={7: Device()}, unit="slot"))


@pytest.mark.parametrize("option", [{"steps": 0}, {"steps": True}, {"steps": 1.5}, {"engine": "simpi"}])
def test_wrong_options(option: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError, match=next(iter(option))):
        simulate(generate("gpipe", 2, 2), **option)


def test_wrong_answers_of_a_cost_model_are_refused() -> None:
    class Broken(UniformCosts):
        def durations(self, schedule: Schedule) -> Any:
            return super().durations(schedule)[1:]

    class Negative(UniformCosts):
        def durations(self, schedule: Schedule) -> Any:
            return super().durations(schedule) - 5

    for costs in (Broken(), Negative()):
        with pytest.raises(ScheduleError, match="gives durations"):
            simulate(generate("gpipe", 2, 2), costs)


def test_the_reference_of_these_tests_knows_the_known_answers(longest_path: Callable[..., Any]) -> None:
    """The independent calculation that the property tests compare with is itself held to published figures."""
    for policy, time in (("A", 113), ("B", 75)):
        schedule = generate("1f1b", 4, 16, policy=policy)
        links = {(a, b): (2.0, None) for a in range(4) for b in range(4)}
        found = longest_path(schedule, lambda op: 1.0 if op.kind is Kind.F else 2.0, links)
        assert max(end for _, end in found.ops.values()) == time
