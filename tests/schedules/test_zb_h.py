from __future__ import annotations

import csv
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import Kind, Schedule, UniformCosts, simulate
from pipesim.metrics import peak_activations
from pipesim.schedules.zb_h import zb_h1, zb_h2


def costs(forward, input_grad, weight_grad, latency=None):
    return UniformCosts(forward=forward, input_grad=input_grad, weight_grad=weight_grad, latency=latency)


def longest_span(timeline):
    bounds = timeline.schedule.device_slots
    return max(timeline.end[0, high - 1] - timeline.start[0, low] for low, high in pairwise(bounds))


def test_h1_equal_to_the_authors_order(shared_data):
    # Their heuristic, with the memory of 1F1B and F = I = W, finds the handcrafted schedule.
    assert zb_h1(4, 8) == Schedule.from_csv(shared_data / "zero_bubble" / "ZB1P_limit_p_p4_m8.csv")


def test_h2_as_good_as_the_authors_order(shared_data):
    # With room for 2p - 1 activations their heuristic runs the last forwards before the first W, one round earlier than the
    # handcrafted schedule does. F and I stand in the same order; waiting for W they hold one more on devices 1 to 3.
    theirs, mine = Schedule.from_csv(shared_data / "zero_bubble" / "ZB2P_limit_2p-1_p4_m8.csv"), zb_h2(4, 8)
    for device in range(4):
        a, b = ([str(op) for op in schedule.streams[device] if op.kind is not Kind.W] for schedule in (mine, theirs))
        assert a == b
    ours, other = (simulate(schedule, costs(1, 1, 1)) for schedule in (mine, theirs.check()))
    assert ours.makespan == other.makespan == 27
    assert ours.span_bubble_rate == other.span_bubble_rate == 0
    assert peak_activations(mine, True).tolist() == peak_activations(theirs, True).tolist()
    assert (ours.peak_activations, other.peak_activations) == ([7, 7, 7, 7], [7, 8, 8, 8])


def test_bubble_rates_of_table_5(shared_data):
    papers = shared_data / "papers"
    times = list(csv.DictReader((papers / "zb_table9_profiled_times.csv").read_text().splitlines()))
    rates = list(csv.DictReader((papers / "zb_table5_bubble_rates.csv").read_text().splitlines()))
    assert len(times) == len(rates) == 6
    for row, rate in zip(times, rates, strict=True):
        p, m = int(row["p"]), int(row["m"])
        assert (rate["model"], int(rate["p"]), int(rate["m"])) == (row["model"], p, m)
        profiled = costs(*(float(row[key]) for key in ("T_F", "T_B", "T_W", "T_comm")))
        for name, generator in (("ZB-H1", zb_h1), ("ZB-H2", zb_h2)):
            assert f"{simulate(generator(p, m), profiled).span_bubble_rate:.4f}" == rate[name]


@pytest.mark.parametrize(
    ("devices", "microbatches", "times", "makespan"),
    [(4, 8, (3, 4, 2), 87), (8, 16, (3, 4, 2), 179), (4, 8, (1, 1, 1), 27), (4, 8, (2, 2, 1), 49)],  # S11
)
def test_h1_cases(devices, microbatches, times, makespan):
    timeline = simulate(zb_h1(devices, microbatches).check(), costs(*times))
    assert timeline.makespan == makespan
    # device s idles (p - 1 - s)(F + I - W) inside its span, the last one not at all
    bounds = timeline.schedule.device_slots
    idle = [timeline.end[0, high - 1] - timeline.start[0, low] for low, high in pairwise(bounds)]
    step = times[0] + times[1] - times[2]
    assert [span - microbatches * sum(times) for span in idle] == [(devices - 1 - s) * step for s in range(devices)]


@settings(max_examples=100, deadline=None)
@given(
    p=st.integers(1, 7),
    more=st.integers(0, 8),
    forward=st.integers(1, 5),
    input_grad=st.integers(1, 5),
    weight_grad=st.integers(1, 5),
    half=st.sampled_from([1, 2]),
)
def test_closed_forms(p, more, forward, input_grad, weight_grad, half):
    # ZB paper, table 2 and section 2.3: (p - 1)(F + I - W) for H1, (p - 1)(F + I - 2W) for H2. It needs W <= F: in the drain of the warm-up a
    # longer W delays the input gradients of the devices before.
    weight_grad = min(weight_grad, forward, (forward + input_grad) // half)
    generator, m = (zb_h1, p + more) if half == 1 else (zb_h2, 2 * p - 1 + more)
    schedule = generator(p, m).check()
    work = m * (forward + input_grad + weight_grad)
    bubble = (p - 1) * (forward + input_grad - half * weight_grad)
    timeline = simulate(schedule, costs(forward, input_grad, weight_grad))
    assert longest_span(timeline) == work + bubble
    # device 0 ends after its bubble; the last device starts after p - 1 forwards and has none
    assert timeline.makespan == work + max(bubble, (p - 1) * forward)
    # F to I: p - i, or 2(p - i) - 1, counted from 0; then i, or 2i, wait for W
    waiting = [i * half for i in range(p)]
    before = [half * (p - i) - (half - 1) for i in range(p)]
    assert peak_activations(schedule, released_by_input_grad=True).tolist() == before
    assert peak_activations(schedule).tolist() == [a + b for a, b in zip(before, waiting, strict=True)]


def test_a_long_weight_gradient_breaks_the_closed_form():
    # F = I = 1, W = 2, p = 2: the formula says no bubble. Device 0 has W0 at 4..6 while 0I1 could run at 5, and ends one later.
    assert longest_span(simulate(zb_h1(2, 4), costs(1, 1, 2))) == 4 * 4 + 1


@settings(max_examples=60, deadline=None)
@given(p=st.integers(1, 7), data=st.data(), forward=st.integers(1, 5), input_grad=st.integers(1, 5), weight_grad=st.integers(1, 5))
def test_few_microbatches(p, data, forward, input_grad, weight_grad):
    # ZB paper, appendix H, m <= p: (m + p - 1)(F + I) + W
    m = data.draw(st.integers(1, p), "m")
    weight_grad = min(weight_grad, forward, input_grad)
    assert simulate(zb_h1(p, m), costs(forward, input_grad, weight_grad)).makespan == (m + p - 1) * (forward + input_grad) + weight_grad


def test_h2_has_no_bubble_where_all_times_are_equal():
    timeline = simulate(zb_h2(4, 8), costs(1, 1, 1))
    assert timeline.span_bubble_rate == 0
    assert peak_activations(timeline.schedule, released_by_input_grad=True).tolist() == [7, 5, 3, 1]
    # but the spans start one after the other: three forwards before device 3, so the makespan is 8·3 + 3
    assert timeline.makespan == 27


def test_every_size():
    for generator in (zb_h1, zb_h2):
        for p in range(1, 9):
            for m in range(1, 25):
                schedule = generator(p, m).check()
                assert len(schedule) == 3 * m * p
                if m % 3 == 1:
                    assert simulate(schedule, costs(1, 1, 1)).makespan >= 3 * m + p - 1
