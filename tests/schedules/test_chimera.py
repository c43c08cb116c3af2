from __future__ import annotations

import pytest

from pipesim import Schedule, ScheduleError, Timeline, UniformCosts, simulate
from pipesim.op import Kind, Op, Pair
from pipesim.schedules.chimera import chimera

SCHEMES = ("direct", "doubling", "halving")


def run(schedule: Schedule, forward: float = 1, backward: float = 2) -> Timeline:
    return simulate(schedule.check(), UniformCosts(forward=forward, backward=backward))


def test_s19_order_of_the_paper_for_four_devices_and_four_microbatches():
    # Case S19: d and u say the direction; a microbatch going up has stage 3 on device 0.
    lists = [
        "Fd0 Fd1 Fu2 Bu2 Fu3 Bu3 Bd0 Bd1",
        "Fd0 Fu2 Fd1 Fu3 Bu2 Bd0 Bu3 Bd1",
        "Fu2 Fd0 Fu3 Fd1 Bd0 Bu2 Bd1 Bu3",
        "Fu2 Fu3 Fd0 Bd0 Fd1 Bd1 Bu2 Bu3",
    ]
    expected = [[Op(device if op[1] == "d" else 3 - device, Kind[op[0]], int(op[2])) for op in ops.split()] for device, ops in enumerate(lists)]
    assert chimera(4, 4).streams == expected


@pytest.mark.parametrize(("backward", "makespan"), [(1, 10), (2, 16)])
def test_s19_makespan_and_peaks(backward, makespan):
    timeline = run(chimera(4, 4), 1, backward)
    assert timeline.makespan == makespan
    assert timeline.peak_activations == [3, 4, 4, 3]


def test_s19_odd_number_of_microbatches_goes_three_down_two_up():
    schedule = chimera(4, 5).check()
    assert schedule.num_microbatches == 5
    down = schedule.device[schedule.rows_of(Kind.F)[0]] == 0
    assert (down.sum(), (~down).sum()) == (3, 2)


@pytest.mark.parametrize(
    ("devices", "microbatches", "same", "double"),
    # Bubble fractions with F = B and with B = 2F, known from the author's own order.
    [(4, 4, 0.2, 0.25), (8, 8, 0.2727, 0.3333), (4, 8, 2 / 18, 0.2), (4, 16, 2 / 34, 0.1724)],
)
def test_bubble_fractions(devices, microbatches, same, double):
    schedule = chimera(devices, microbatches)
    assert run(schedule, 1, 1).bubble_fraction == pytest.approx(same, abs=5e-5)
    assert run(schedule, 1, 2).bubble_fraction == pytest.approx(double, abs=5e-5)


@pytest.mark.parametrize("devices", [2, 4, 6, 8])
def test_one_unit_is_the_closed_form_for_any_durations(devices):
    # N = D: T = (2D - 2)B + D·F, which is the ratio (D² - 2D)B / ((2D² - 2D)B + D²F) of Hanayo's figure 2.
    for forward, backward in ((1, 1), (1, 2), (1, 3), (2, 3)):
        timeline = run(chimera(devices, devices), forward, backward)
        assert timeline.makespan == (2 * devices - 2) * backward + devices * forward
        d = devices
        assert timeline.bubble_fraction == pytest.approx((d * d - 2 * d) * backward / ((2 * d * d - 2 * d) * backward + d * d * forward), abs=1e-12)


@pytest.mark.parametrize("devices", [4, 8, 12])
def test_slot_count_bubble_of_concatenated_units_and_pipes(devices):
    # The generalised formula, F = B: (D - 2f) / (2fN + D - 2f).
    for pipes in (f for f in range(1, devices) if devices // 2 % f == 0):
        for units in (1, 2, 3):
            n = units * devices
            expected = (devices - 2 * pipes) / (2 * pipes * n + devices - 2 * pipes)
            assert run(chimera(devices, n, pipes=pipes), 1, 1).bubble_fraction == pytest.approx(expected, abs=1e-12)


def test_peaks_of_eight_devices():
    assert run(chimera(8, 8)).peak_activations == [5, 6, 7, 8, 8, 7, 6, 5]


@pytest.mark.parametrize(("microbatches", "makespan"), [(8, 28), (16, 54)])
def test_two_pipes_per_direction(microbatches, makespan):
    schedule = chimera(8, microbatches, pipes=2)
    timeline = run(schedule)
    assert timeline.makespan == makespan
    assert timeline.peak_activations == [7, 8, 8, 7, 7, 8, 8, 7]
    assert all(len(stages) == 4 for stages in schedule.device_stages)  # 2f weight copies


@pytest.mark.parametrize(("devices", "makespan"), [(4, 28), (8, 60)])
def test_doubling_of_one_unit(devices, makespan):
    assert run(chimera(devices, 2 * devices, scheme="doubling")).makespan == makespan


def test_doubling_pairs_neighbours_and_doubles_the_peak():
    schedule = chimera(4, 8, scheme="doubling")
    assert run(schedule).peak_activations == [7, 8, 8, 7]
    forwards = [slot for stream in schedule.streams for slot in stream if isinstance(slot, Pair)]
    assert len(forwards) == 4 * 4
    for pair in forwards:
        assert pair.first == Op(pair.first.stage, Kind.F, pair.first.microbatch)
        assert pair.second == Op(pair.first.stage, Kind.F, pair.first.microbatch + 1)


@pytest.mark.parametrize("devices", [2, 4, 6, 8])
def test_doubling_has_no_bubble_between_units(devices):
    # T = 3NF + (D - 2)·2F with B = 2F, for every number of units: only fill and drain are left.
    for units in (1, 2, 4):
        n = 2 * devices * units
        assert run(chimera(devices, n, scheme="doubling")).makespan == 3 * n + (devices - 2) * 2


def test_halving_is_doubling_in_half_size_units():
    # Four microbatches on four devices: as eight halves they take 14 instead of 16, half of what eight doubled ones take,
    # and the peak in whole microbatches does not exceed the 4 of the undivided schedule.
    halves = chimera(4, 8, scheme="halving")
    timeline = run(halves, 0.5, 1)
    assert timeline.makespan == 14
    assert max(timeline.peak_activations) / 2 == 4
    assert halves == chimera(4, 8, scheme="doubling")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_size_is_complete_and_runs(scheme):
    for devices in (2, 4, 6, 8):
        for pipes in (f for f in (1, 2, 3, 4) if devices // 2 % f == 0):
            for microbatches in range(1, 25):
                if scheme == "halving" and microbatches % 2:
                    continue
                schedule = chimera(devices, microbatches, pipes=pipes, scheme=scheme).check()
                assert (schedule.num_devices, schedule.num_stages, schedule.num_microbatches) == (devices, devices, microbatches)
                assert len(schedule) == 2 * devices * microbatches
                run(schedule, 1, 3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_microbatches_are_dealt_evenly(scheme):
    # Of 14 microbatches (7 pairs) no direction gets more than one group above the other.
    schedule = chimera(4, 14, scheme=scheme)
    down = int((schedule.device[schedule.rows_of(Kind.F)[0]] == 0).sum())
    assert down == (7 if scheme == "direct" else 8)


def test_activations_never_exceed_the_device_count():
    # D·M_a is the paper's bound for direct concatenation, however many microbatches there are.
    for microbatches in range(1, 40):
        assert max(run(chimera(6, microbatches)).peak_activations) <= 6


@pytest.mark.parametrize(
    ("devices", "microbatches", "options", "text"),
    [
        (3, 6, {}, "even number of devices, got 3"),
        (1, 4, {}, "even number of devices, got 1"),
        (8, 8, {"pipes": 3}, r"one of \[1, 2, 4\] for 8 devices, got 3"),
        (8, 8, {"pipes": 0}, "pipes must be at least 1, got 0"),
        (4, 7, {"scheme": "halving"}, "must be even, got 7"),
        (4, 8, {"scheme": "tripling"}, "got 'tripling'"),
    ],
)
def test_illegal_sizes_are_refused_in_one_line(devices, microbatches, options, text):
    with pytest.raises(ScheduleError, match=text) as caught:
        chimera(devices, microbatches, **options)
    assert "\n" not in str(caught.value)
