from __future__ import annotations

import csv
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import Kind, Schedule, ScheduleError, UniformCosts, simulate
from pipesim.memory import activation_levels, peak_levels
from pipesim.metrics import peak_activations
from pipesim.schedules.zb_auto import zb1p, zb2p, zb_auto
from pipesim.schedules.zb_h import zb_h1, zb_h2


def span(schedule, **times):
    timeline = simulate(schedule, UniformCosts(**times))
    bounds = schedule.device_slots
    return max(timeline.end[0, high - 1] - timeline.start[0, low] for low, high in pairwise(bounds))


def held(schedule, kept):
    """(devices,) the most activations at once, of which the part *kept* stays from the end of I to the end of W."""
    return peak_levels(schedule, *activation_levels(schedule, 1.0, 1.0 - kept, 0.0))


def table_rows(papers):
    times = csv.DictReader((papers / "zb_table9_profiled_times.csv").read_text().splitlines())
    rates = csv.DictReader((papers / "zb_table5_bubble_rates.csv").read_text().splitlines())
    for row, rate in zip(times, rates, strict=True):
        a, h, s = (int(row[key]) for key in ("attn_heads_a", "hidden_h", "seq_s"))
        kept = 32 * h / (34 * h + 5 * a * s)  # M_W/M_B of a Transformer layer, table 1
        profiled = {
            option: float(row[key])
            for option, key in zip(("forward", "input_grad", "weight_grad", "latency"), ("T_F", "T_B", "T_W", "T_comm"), strict=True)
        }
        yield int(row["p"]), int(row["m"]), profiled, kept, rate


def test_no_worse_than_table_5(shared_data):
    rows = list(table_rows(shared_data / "papers"))
    assert len(rows) == 6
    for p, m, times, kept, rate in rows:
        for name, generator, limit, parts in (("ZB-1p", zb1p, p, [kept]), ("ZB-2p", zb2p, 2 * p, [kept, 0.5])):
            for part in parts:
                schedule = generator(p, m, **times, weight_grad_memory=part).check()
                assert simulate(schedule, UniformCosts(**times)).span_bubble_rate <= float(rate[name]) + 0.0001
                assert held(schedule, part).max() <= limit + 1e-9


def test_what_a_whole_activation_until_w_costs(shared_data):
    # First row of table 9, limit 2p = 16 activations that stay whole until W. When the last device ends its last I, at most 15 others
    # may wait for W; before that it has run 24 F, 24 I and so 8 W at least, after 7 F and 7 hops, and then come 7 hops and 7 I, and one
    # W on device 0: no order has a shorter span on device 0.
    p, m, times, _, _ = next(table_rows(shared_data / "papers"))
    forward, input_grad, weight_grad, hop = times.values()
    least = 7 * (forward + input_grad + 2 * hop) + 24 * (forward + input_grad) + 8 * weight_grad + weight_grad
    assert span(zb2p(p, m, **times, weight_grad_memory=1), **times) == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize(("file", "limit"), [("ZB1P_limit_p_p4_m8.csv", 4), ("ZB2P_limit_2p-1_p4_m8.csv", 7), ("ZB2P_limit_2p_p4_m8.csv", 8)])
def test_no_worse_than_the_authors_order(shared_data, file, limit):
    theirs = Schedule.from_csv(shared_data / "zero_bubble" / file)
    mine = zb_auto(4, 8, memory_limit=limit)
    assert span(mine) <= span(theirs)
    assert peak_activations(mine, True).max() <= limit


@settings(max_examples=40, deadline=None)
@given(data=st.data(), p=st.integers(1, 5), m=st.integers(1, 10))
def test_limits_are_kept(data, p, m):
    number = st.integers(1, 20).map(lambda n: n / 10)
    per_stage = st.lists(number, min_size=p, max_size=p)
    times = {name: data.draw(st.one_of(number, per_stage), name) for name in ("forward", "input_grad", "weight_grad")}
    latency = data.draw(st.sampled_from([0, 0.1, 1.0]), "latency")
    limit = data.draw(st.one_of(st.integers(1, 12), st.lists(st.sampled_from([1, 1.5, 2, 4, 9]), min_size=p, max_size=p)), "limit")
    kept = data.draw(st.sampled_from([0, 0.37, 0.5, 1]), "kept")
    schedule = zb_auto(p, m, **times, latency=latency, memory_limit=limit, weight_grad_memory=kept).check()
    assert len(schedule) == 3 * p * m
    assert (held(schedule, kept) <= np.array(limit) + 1e-9).all()
    if kept == 1:
        assert (peak_activations(schedule) <= np.array(limit)).all()
    # never worse than the handcrafted orders where they fit, nor better than a device's own work
    costs = {**times, "latency": latency}
    for handcrafted in (zb_h1(p, m), zb_h2(p, m)):
        if (held(handcrafted, kept) <= np.array(limit) + 1e-9).all():
            assert span(schedule, **costs) <= span(handcrafted, **costs) * (1 + 1e-9)
    work = sum(np.broadcast_to(times[name], p) for name in times) * m
    assert span(schedule, **costs) >= work.max() * (1 - 1e-9)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6])
def test_no_bubble_with_twice_the_memory(devices):
    # ZB paper: F = I = W and 2p - 1 activations leave no bubble
    schedule = zb_auto(devices, 3 * devices, memory_limit=2 * devices - 1)
    assert span(schedule) == 9 * devices
    # and p activations leave ZB-H1's, (p - 1)(F + I - W)
    assert span(zb1p(devices, 3 * devices)) == 9 * devices + devices - 1


def test_one_activation_is_naive():
    # room for one activation: the next F of a device comes after W of the one before
    schedule = zb_auto(2, 3, memory_limit=1)
    assert str(schedule).splitlines()[-2:] == ["device 0 | 0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2", "device 1 | 1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2"]


def test_durations_decide():
    # A stage twice as slow: nothing can be shorter than its work, and with memory enough the search gets there.
    times = {"forward": [1, 2, 1], "input_grad": [1, 2, 1], "weight_grad": [1, 2, 1]}
    assert span(zb_auto(3, 12, **times), **times) == 12 * 6
    # I takes three times F: ZB-H2 keeps a bubble of (p - 1)(F + I - 2W), and more forwards in flight take it away
    times = {"forward": 1, "input_grad": 3, "weight_grad": 1}
    assert span(zb_h2(4, 24), **times) == 24 * 5 + 3 * 2
    assert span(zb_auto(4, 24, **times, memory_limit=13), **times) == 24 * 5


def test_aliases():
    options = {"forward": 2, "input_grad": 3, "weight_grad": 1, "latency": 0.5}
    assert zb1p(4, 9, **options) == zb_auto(4, 9, **options) == zb_auto(4, 9, **options, memory_limit=4)
    assert zb2p(4, 9, **options) == zb_auto(4, 9, **options, memory_limit=8)


def test_times_of_a_cost_model():
    # a cost model hands out arrays
    times = UniformCosts(forward=2, input_grad=[1, 2, 3], weight_grad=0.5)
    options = {"forward": times.forward, "input_grad": times.input_grad, "weight_grad": times.weight_grad}
    assert zb_auto(3, 6, **options) == zb_auto(3, 6, forward=2, input_grad=[1, 2, 3], weight_grad=0.5)


def test_same_result_twice():
    assert zb_auto(4, 12, forward=1.1, latency=0.1) == zb_auto(4, 12, forward=1.1, latency=0.1)


def test_every_size():
    for p in range(1, 9):
        for m in (1, 2, 3, 5, 7, 8, 9, 13, 24):
            schedule = zb_auto(p, m).check()
            assert [(schedule.kind == kind).sum() for kind in (Kind.F, Kind.I, Kind.W)] == [p * m] * 3
            assert span(schedule) >= 3 * m


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": -1}, "forward must be at least 0"),
        ({"input_grad": float("nan")}, "input_grad must be at least 0"),
        ({"weight_grad": [1, 2]}, "weight_grad must be one number, or 4, one per stage"),
        ({"latency": -1}, "latency"),
        ({"memory_limit": 0.5}, "memory_limit must be at least 1"),
        ({"memory_limit": [4, 4, 4]}, "memory_limit must be one number, or 4"),
        ({"weight_grad_memory": 1.5}, "weight_grad_memory"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ScheduleError, match=message):
        zb_auto(4, 8, **options)
