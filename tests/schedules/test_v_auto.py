from __future__ import annotations

import doctest
import importlib

import pytest

from pipesim import Schedule, ScheduleError, Timeline, UniformCosts, simulate
from pipesim.schedules.v_auto import v_auto
from pipesim.schedules.v_blocks import v_half, v_min, v_zb
from pipesim.testing import check_generator


def run(schedule: Schedule, forward: float = 1, input_grad: float = 1, weight_grad: float = 1) -> Timeline:
    return simulate(schedule, UniformCosts(forward=forward, input_grad=input_grad, weight_grad=weight_grad))


def longest_span(timeline: Timeline) -> float:
    assert timeline.span_bubble_rate is not None
    return max(timeline.busy) / (1 - timeline.span_bubble_rate)


def frontier(p: int, k: int) -> int:
    """The bubble in a span that the authors' search expects for a peak of k chunk activations, F = I = W = 1."""
    return 3 * p - 1 - 3 * k + max(3 * p, p - 1 + 2 * (1 + (k + 1) // 2))


@pytest.mark.parametrize(("limit", "bubble"), {4: 11, 5: 8, 6: 5, 7: 3, 8: 0}.items())
def test_frontier_of_four_devices(limit, bubble):
    for microbatches in (8, 12, 17):
        timeline = run(v_auto(4, microbatches, memory_limit=limit).check())
        assert longest_span(timeline) <= 6 * microbatches + bubble + 1e-9
        assert max(timeline.peak_activations) <= limit


@pytest.mark.parametrize(("devices", "limit"), [(p, k) for p in (3, 5, 6, 8) for k in range(2 * ((p + 4) // 3), 2 * p + 1)])
def test_frontier_of_more_devices(devices, limit):
    timeline = run(v_auto(devices, 2 * devices, memory_limit=limit).check())
    assert longest_span(timeline) <= 6 * 2 * devices + frontier(devices, limit) + 1e-9
    assert max(timeline.peak_activations) <= limit


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5, 6, 8])
def test_every_limit_is_kept(devices):
    for microbatches in (1, 2, devices, 11):
        for limit in (*range(2, 6), 2 * devices + 1, 2 * devices + 9):
            timeline = run(v_auto(devices, microbatches, memory_limit=limit).check())
            assert timeline.schedule.num_microbatches == microbatches
            assert len(timeline.schedule) == 6 * devices * microbatches
            assert max(timeline.peak_activations) <= limit


def test_two_activations_are_one_microbatch_at_a_time():
    # p = 1, by hand: F F I I and both W, then the next
    assert run(v_auto(1, 4, memory_limit=2)).makespan == 24
    # p = 2: device 1 starts 2I0 at 5 (four F before it, 3I0 4-5). With 2I0, 1I0 and both their W out of the way, which make room, it can
    # run 1F1 and 2F1, so 2F1 ends at 5 + 6 = 11; then 3F1, 3I1, 2I1, 1I1, 0I1 and 0W1 follow each other: 17 at best
    timeline = run(v_auto(2, 2, memory_limit=2))
    assert timeline.peak_activations == [2, 2]
    assert timeline.makespan == 17


def test_by_default_nothing_is_idle_inside_a_span():
    for devices in range(1, 8):
        timeline = run(v_auto(devices, 2 * devices))
        assert longest_span(timeline) == pytest.approx(12 * devices)
        assert max(timeline.peak_activations) == 2 * devices


@pytest.mark.parametrize("durations", [(2, 3, 1), (1, 1, 0.5), (9.261, 9.043, 4.6685), (1, 0, 1), (0, 1, 1)])
def test_no_worse_than_the_named_blocks(durations):
    forward, input_grad, weight_grad = durations
    for named in (v_min, v_half, v_zb):
        other = run(named(4, 9), *durations)
        limit = max(other.peak_activations)
        timeline = run(v_auto(4, 9, memory_limit=limit, forward=forward, input_grad=input_grad, weight_grad=weight_grad), *durations)
        assert longest_span(timeline) <= longest_span(other) * (1 + 1e-12)
        assert max(timeline.peak_activations) <= limit


def test_more_memory_than_1f1b_buys_time_where_durations_differ():
    # F, I, W = 2, 3, 1: ZB-V, which holds 8 chunks, ends at 108 (case S13), so no span is longer
    spans = [longest_span(run(v_auto(4, 8, memory_limit=limit, forward=2, input_grad=3, weight_grad=1), 2, 3, 1)) for limit in (8, 12)]
    assert spans[1] < spans[0] <= 108


def test_durations_decide_the_order_not_their_unit():
    slots = v_auto(4, 6, memory_limit=6, forward=2, input_grad=3, weight_grad=1)
    assert v_auto(4, 6, memory_limit=6, forward=0.5, input_grad=0.75, weight_grad=0.25) == slots


@pytest.mark.parametrize("limit", [1, 0, -2, True, 4.5, "4"])
def test_limits_that_are_refused(limit):
    with pytest.raises(ScheduleError, match=r"memory_limit must be .*at least 2"):
        v_auto(4, 8, memory_limit=limit)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, "1"])
@pytest.mark.parametrize("name", ["forward", "input_grad", "weight_grad"])
def test_times_that_are_refused(name, value):
    with pytest.raises(ScheduleError, match=f"{name} must be a finite time of at least 0"):
        v_auto(4, 8, **{name: value})


def test_conformance():
    assert not check_generator(v_auto).refused
    assert not check_generator(v_auto, sizes=[(1, 3), (2, 5), (3, 9), (4, 2), (5, 6)], options={"memory_limit": 4}).refused


def test_examples():
    assert doctest.testmod(importlib.import_module("pipesim.schedules.v_auto")).failed == 0
