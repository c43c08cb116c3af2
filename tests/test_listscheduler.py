"""The list scheduler against a slow one, against figures from papers, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import Op, Pair, Schedule, ScheduleError, UniformCosts, simulate
from pipesim.listscheduler import backward_first, list_schedule
from pipesim.op import Kind
from pipesim.schedules.one_f_one_b import one_f_one_b

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W


def text(streams):
    return [" ".join(map(str, stream)) for stream in streams]


# -- by hand -------------------------------------------------------------------------------------------------------------


def test_a_cap_of_p_minus_s_and_backward_first_is_1f1b():
    for devices, microbatches in ((1, 3), (2, 5), (4, 8), (5, 3)):
        streams = list_schedule(range(devices), microbatches, {F: 1, B: 2}, max_in_flight=[devices - s for s in range(devices)])
        assert Schedule.from_streams(streams) == one_f_one_b(devices, microbatches)


def test_no_cap_runs_every_forward_that_is_there():
    # F = 1, B = 2. Device 1 has 1F0 at 1, prefers 1B0 at 2, which ends at 4; device 0 has run its three forwards by 3, then 0B0 at 4.
    assert text(list_schedule([0, 1], 3, {F: 1, B: 2})) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_latency_counts_between_devices_only():
    # Stage 1 and 2 share device 1. With a hop of 3: 1F0 at 4, 2F0 at 5, 2B0 at 6, 1B0 at 7; 1F1 is there at 5 and comes after the backwards.
    assert text(list_schedule([0, 1, 1], 2, {F: 1, B: 1}, latency=3))[1] == "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1"


def test_one_active_microbatch_is_naive():
    # The forward of the next microbatch waits for the backward of the one before on stage 0.
    assert text(list_schedule([0, 1], 2, {F: 1, B: 1}, max_active=1)) == ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"]


def test_one_active_microbatch_forward_only():
    # F0 leaves stage 1 at 2, so 0F1 starts there; a run of three microbatches takes 6 and not 4.
    streams = list_schedule([0, 1], 3, {F: 1}, max_active=1)
    assert text(streams) == ["0F0 0F1 0F2", "1F0 1F1 1F2"]


def test_active_microbatches_over_replicas():
    # Microbatch 0 enters on device 0, microbatch 1 on device 1; with one active at a time the second waits for 0B0, the end of the first.
    streams = list_schedule([[0, 1], [1, 0]], 2, {F: 1, B: 1}, max_active=1)
    assert text(streams) == ["0F0 0B0 1F1 1B1", "1F0 1B0 0F1 0B1"]


def test_weight_gradients_fill_gaps():
    # p = 2, all 1: device 0 has 0F0 at 0, 0F1 at 1, 0I0 at 3 (1F0 1..2, 1I0 2..3), 0W0 at 4 or 0I1: 1F1 3..4, 1I1 4..5, so 0W0 at 4.
    assert text(list_schedule([0, 1], 2, {F: 1, I: 1, W: 1})) == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]


def test_hold_back_waits_for_what_is_on_its_way():
    # 0F0 runs 0..1, 1F0 1..2, 0F1 1..2. At 2 device 1 starts 1I0, 2..3, so 0I0 is on its way and can start at 3; device 0 has
    # 0F2, of length 3, which would delay it to 5, by 2.
    durations = {F: [[1, 1, 3], [1, 1, 1]], I: 1, W: 1}

    def first_device(**options):
        return text(list_schedule([0, 1], 3, durations, **options))[0]

    assert first_device().startswith("0F0 0F1 0F2 0I0")
    assert first_device(hold_back={F: 2}).startswith("0F0 0F1 0F2 0I0")
    assert first_device(hold_back={F: 1.9}).startswith("0F0 0F1 0I0")
    assert first_device(hold_back={W: 0}).startswith("0F0 0F1 0F2 0I0")


def test_hold_back_does_not_wait_for_what_nobody_works_on():
    # 0F0 runs 0..3; at 3 device 1 has not finished 1F0, so nobody works on what 0I0 needs, and 0F1 starts though it delays 0I0 by 1.
    streams = list_schedule([0, 1], 2, {F: [3, 1], I: 1, W: 1}, hold_back={F: 0, W: 0})
    assert text(streams)[0] == "0F0 0F1 0I0 0W0 0I1 0W1"


def test_hold_back_ignores_what_the_cap_forbids():
    # Device 1 may hold one activation. At 3 it has run 1F0 and 1I0 (F = I = 1), and 1F1 is there, but only 1W0 makes room for it.
    streams = list_schedule([0, 1], 2, {F: 1, I: 1, W: 5}, max_in_flight=1, hold_back={W: 0})
    assert text(streams)[1] == "1F0 1I0 1W0 1F1 1I1 1W1"


def test_pairs_share_a_slot():
    pairs = [(Op(s, F, 0), Op(s, F, 1)) for s in range(2)]
    streams = list_schedule([0, 1], 2, {F: 1, B: 2}, pairs=pairs)
    assert streams[0][0] == Pair(Op(0, F, 0), Op(0, F, 1))
    assert text(streams) == ["(0F0;0F1)PAIR 0B0 0B1", "(1F0;1F1)PAIR 1B0 1B1"]
    # A pair takes the sum: 2 + 2 on the way down, then two B on device 1 and the last on device 0.
    assert simulate(Schedule.from_streams(streams).check(), UniformCosts(forward=1, backward=2)).makespan == 10


def test_a_pair_counts_twice_against_the_cap():
    pairs = [(Op(0, F, 2 * k), Op(0, F, 2 * k + 1)) for k in range(2)]
    streams = list_schedule([0], 4, {F: 1, B: 1}, pairs=pairs, max_in_flight=2, priority=lambda op: op.kind)
    assert text(streams) == ["(0F0;0F1)PAIR 0B0 0B1 (0F2;0F3)PAIR 0B2 0B3"]


def test_a_stage_graph():
    # Stages 0 and 1 both feed stage 2.
    streams = list_schedule([0, 1, 2], 1, {F: [1, 3, 1], B: 1}, graph=[(0, 2), (1, 2)])
    assert simulate(Schedule.from_streams(streams, graph=[(0, 2), (1, 2)]).check(), UniformCosts(forward=[1, 3, 1], backward=1)).makespan == 6


def test_ties_go_by_stage_kind_and_microbatch():
    streams = list_schedule([0, 0], 2, {F: 1, B: 1}, priority=lambda op: 0)
    # 0B0 is ready after 1B0 and before 1B1 is run, and its stage is smaller
    assert text(streams) == ["0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1"]


def test_durations_are_floats_too():
    # ten hops of 0.1 are not 1.0 in floats; the order is that of whole numbers all the same
    streams = list_schedule([0, 1], 3, {F: 0.1, B: 0.2})
    assert streams == list_schedule([0, 1], 3, {F: 1, B: 2})


# -- figures from elsewhere ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waves", "devices", "bubble"),
    # Greedy list scheduling of Hanayo's waves, backward first, then the deeper forward, replayed independently; F = T/2W, B = 2F.
    [(1, 4, 1 / 3), (2, 4, 0.2131), (1, 8, 0.3684), (2, 8, 0.2381), (4, 4, 0.1193)],
)
def test_hanayo_waves(waves, devices, bubble):
    place = [*range(devices), *reversed(range(devices))] * waves
    streams = list_schedule(place, devices, {F: 1, B: 2}, priority=lambda op: (0, op.microbatch) if op.kind is B else (1, -op.stage))
    timeline = simulate(Schedule.from_streams(streams).check(), UniformCosts(forward=1, backward=2))
    assert timeline.bubble_fraction == pytest.approx(bubble, abs=5e-5)


# -- against a slow one ----------------------------------------------------------------------------------------------------


def slowly(place, microbatches, durations, latency, priority, caps, kept):
    """The same rule, one unit of time after the other; durations are whole numbers of at least 1."""
    stages, kinds = len(place), list(durations)
    back = next((kind for kind in (B, I) if kind in kinds), None)
    devices = max(place) + 1
    ends, streams, free_at = {}, [[] for _ in range(devices)], [0] * devices
    held = [0.0] * devices
    todo = {(s, kind, i) for s in range(stages) for kind in kinds for i in range(microbatches)}

    def sources(op):
        s, kind, i = op
        if kind is F:
            return [(s - 1, F, i)] if s else []
        if kind is W:
            return [(s, I, i)]
        return [(s, F, i)] + ([(s + 1, back, i)] if s + 1 < stages else [])

    def there(op, now):
        return all(source in ends and ends[source] + (latency if place[source[0]] != place[op[0]] else 0) <= now for source in sources(op))

    now = 0
    while todo:
        for op, end in ends.items():
            if end == now:
                held[place[op[0]]] -= {F: 0 if back else 1, B: 1, I: 1 - kept, W: kept}[op[1]]
        for device in range(devices):
            if free_at[device] > now:
                continue
            ready = [op for op in todo if place[op[0]] == device and there(op, now) and (op[1] is not F or held[device] + 1 <= caps[device] + 1e-9)]
            if ready:
                op = min(ready, key=lambda op: (priority(Op(*op)), op[0], kinds.index(op[1]), op[2]))
                todo.remove(op)
                held[device] += op[1] is F
                streams[device].append(op)
                free_at[device] = ends[op] = now + durations[op[1]][op[0]]
        now += 1
        if now > 1000:
            return None
    return streams


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equal_to_the_slow_one(data):
    stages = data.draw(st.integers(1, 5), "stages")
    place = data.draw(st.lists(st.integers(0, 2), min_size=stages, max_size=stages), "place")
    place = [sorted(set(place)).index(device) for device in place]
    microbatches = data.draw(st.integers(1, 4), "microbatches")
    kinds = data.draw(st.sampled_from([(F,), (F, B), (F, I, W)]), "kinds")
    durations = {kind: data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages), kind.name) for kind in kinds}
    latency = data.draw(st.integers(0, 2), "latency")
    caps = data.draw(st.lists(st.sampled_from([1, 2, 3.5, 99]), min_size=max(place) + 1, max_size=max(place) + 1), "caps")
    kept = data.draw(st.sampled_from([0.0, 0.25, 1.0]), "kept")
    weights = data.draw(st.tuples(st.integers(-2, 2), st.integers(-2, 2), st.integers(0, 3)), "weights")

    def priority(op):
        return weights[0] * op.stage + weights[1] * op.microbatch + weights[2] * (op.kind is F)

    expected = slowly(place, microbatches, durations, latency, priority, caps, kept)
    options = {"priority": priority, "latency": latency, "max_in_flight": caps, "kept_for_weight_grad": kept}
    if expected is None:
        with pytest.raises(ScheduleError, match="nothing can start"):
            list_schedule(place, microbatches, durations, **options)
        return
    streams = list_schedule(place, microbatches, durations, **options)
    assert streams == expected
    Schedule.from_streams(streams).check()


# -- errors --------------------------------------------------------------------------------------------------------------


def test_a_cap_that_wedges_is_explained():
    # Stages 0 and 3 on device 0, room for one activation, and the next forward of stage 0 takes it before stage 3 can start.
    with pytest.raises(ScheduleError, match=r"nothing can start: device 0 at 1F0, holding 1 of 1"):
        list_schedule([0, 0], 2, {F: 1, B: 1}, max_in_flight=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": []}, "placement"),
        ({"placement": [0, -1]}, "placement"),
        ({"placement": [0.5, 1]}, "placement"),
        ({"placement": np.zeros((2, 3), int)}, r"shape \(2, 3\)"),
        ({"microbatches": 0}, "microbatches"),
        ({"durations": {}}, "kinds none"),
        ({"durations": {F: 1, W: 1}}, "kinds F, W"),
        ({"durations": {F: 1, B: [1, 2, 3]}}, "time of B"),
        ({"durations": {F: 1, B: -1}}, "time of B"),
        ({"durations": {F: float("nan"), B: 1}}, "time of F"),
        ({"latency": -1}, "latency"),
        ({"latency": float("inf")}, "latency"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"max_in_flight": [1, 2, 3]}, "3 values"),
        ({"kept_for_weight_grad": 2}, "kept_for_weight_grad"),
        ({"max_active": 0}, "max_active"),
        ({"graph": [(0, 5)]}, "0 -> 5"),
        ({"graph": [(0, 1), (1, 0)]}, "wait for each other"),
        ({"pairs": [(Op(0, F, 0), Op(1, F, 0))]}, "shares a device"),
        ({"pairs": [(Op(0, F, 0), Op(0, F, 0))]}, "paired twice"),
        ({"pairs": [(Op(0, F, 0), Op(0, F, 1)), (Op(0, F, 1), Op(0, B, 0))]}, "paired twice"),
        ({"pairs": [(Op(0, F, 0), Op(0, B, 0))]}, "cannot share a slot"),
        ({"pairs": [(Op(0, F, 0), Op(0, W, 1))]}, "0W1 is not among the ops"),
    ],
)
def test_errors(options, message):
    arguments = {"placement": [0, 1], "microbatches": 2, "durations": {F: 1, B: 2}} | options
    with pytest.raises(ScheduleError, match=message):
        list_schedule(arguments.pop("placement"), arguments.pop("microbatches"), arguments.pop("durations"), **arguments)


def test_the_usual_key():
    ops = [Op(0, W, 0), Op(1, F, 3), Op(0, F, 3), Op(0, F, 2), Op(0, B, 7)]
    assert sorted(ops, key=backward_first) == [Op(0, B, 7), Op(0, F, 2), Op(1, F, 3), Op(0, F, 3), Op(0, W, 0)]
