from __future__ import annotations

import pytest

from pipesim import Schedule, ScheduleError, Timeline, UniformCosts, simulate
from pipesim.op import Kind, Op
from pipesim.schedules.hanayo import hanayo


def run(schedule: Schedule, forward: float = 1, backward: float = 2) -> Timeline:
    return simulate(schedule.check(), UniformCosts(forward=forward, backward=backward))


def test_order_of_figure_3d():
    # Lower case is the way back: the second chunk of a device, stage 7 - device.
    figure = [
        "F0 F1 F2 F3 f0 b0 f1 b1 f2 b2 f3 b3 B0 B1 B2 B3",
        "F0 F1 F2 f0 F3 f1 b0 f2 b1 f3 b2 B0 b3 B1 B2 B3",
        "F0 F1 f0 F2 f1 F3 f2 b0 f3 b1 B0 b2 B1 b3 B2 B3",
        "F0 f0 F1 f1 F2 f2 F3 f3 b0 B0 b1 B1 b2 B2 b3 B3",
    ]
    expected = [
        [Op(7 - device if op[0].islower() else device, Kind[op[0].upper()], int(op[1])) for op in ops.split()] for device, ops in enumerate(figure)
    ]
    assert hanayo(4, 4).streams == expected


def test_figure_3d_takes_18_and_holds_two_and_a_half_to_four():
    # A device's whole share takes F = 1, B = 2, so a chunk half of that; the paper's M_a is a whole share.
    timeline = run(hanayo(4, 4), 0.5, 1)
    assert timeline.makespan == 18
    assert timeline.bubble_fraction == pytest.approx(1 / 3, abs=1e-12)
    assert timeline.peak_activation_share == [2.5, 3, 3.5, 4]


def test_snake_placement():
    # Case S20, the zig-zag of 12 stages over 4 devices, extended by the last leg that completes the second wave.
    assert hanayo(4, 1, waves=2).device_stages == ((0, 7, 8, 15), (1, 6, 9, 14), (2, 5, 10, 13), (3, 4, 11, 12))


def test_messages_cross_devices_everywhere_but_at_the_turns():
    # 2W(p - 1) crossings of each microbatch, forward and backward.
    for waves in (1, 2, 3):
        assert len(run(hanayo(4, 5, waves=waves)).messages) == 2 * 5 * 2 * waves * 3


@pytest.mark.parametrize(
    ("devices", "waves", "bubble"),
    [(4, 1, 0.3333), (4, 2, 0.2131), (8, 1, 0.3684), (8, 2, 0.2381), (4, 4, 0.1193)],
)
def test_greedy_list_scheduling(devices, waves, bubble):
    # Figures of an independent greedy list scheduling, m = p, B = 2F, backward first, then the deepest forward.
    timeline = run(hanayo(devices, devices, waves=waves, order="greedy"))
    assert timeline.bubble_fraction == pytest.approx(bubble, abs=5e-5)
    # and the order of the figure is no worse
    assert run(hanayo(devices, devices, waves=waves)).bubble_fraction <= timeline.bubble_fraction


def test_greedy_order_follows_its_durations():
    # p=2, m=3, F=1 by hand: device 0 runs 3F0 from 3 to 4, then 3B0. At 5 device 1 has run 1F0 2F0 1F1 2F1 and holds 1F2;
    # 2B0, which goes before it, is there by then if B = 0.5, and not if B = 2.
    for backward, following in ((0.5, "2B0"), (2, "1F2")):
        stream = hanayo(2, 3, order="greedy", forward=1, backward=backward).streams[1]
        assert [str(op) for op in stream[:5]] == ["1F0", "2F0", "1F1", "2F1", following]


@pytest.mark.parametrize("waves", [1, 2, 3])
def test_closed_forms(waves):
    for devices in range(1, 9):
        stages = 2 * waves * devices
        # One unit, by hand: the first microbatch goes S·F down; its backward S·B up, then p - 1 more, 2B apart, follow.
        for forward, backward in ((1, 1), (1, 2), (2, 3)):
            expected = stages * forward + (stages + 2 * devices - 2) * backward
            assert run(hanayo(devices, devices, waves=waves), forward, backward).makespan == expected
        # Slots without a gap between units: each unit takes the 2S slots of its work, the last 2(p - 1) more.
        for units in (2, 3):
            assert run(hanayo(devices, devices * units, waves=waves), 1, 1).makespan == 2 * stages * units + 2 * devices - 2


@pytest.mark.parametrize("waves", [1, 2])
def test_activations_of_the_paper(waves):
    # From ((2W - 1)p + 1)/(2W) to p whole shares, also for m > p.
    for devices in (2, 3, 4, 8):
        for microbatches in (devices, 3 * devices):
            share = run(hanayo(devices, microbatches, waves=waves)).peak_activation_share
            assert min(share) == ((2 * waves - 1) * devices + 1) / (2 * waves)
            assert max(share) == devices


@pytest.mark.parametrize("order", ["wave", "greedy"])
def test_every_size_is_complete_and_runs(order):
    for devices in range(1, 9):
        for microbatches in range(1, 25):
            for waves in (1, 2) if microbatches % 5 == 0 else (1,):
                schedule = hanayo(devices, microbatches, waves=waves, order=order).check()
                stages = 2 * devices * waves
                assert (schedule.num_devices, schedule.num_stages, schedule.num_microbatches) == (devices, stages, microbatches)
                assert len(schedule) == 2 * stages * microbatches
                assert not schedule.replicas
                run(schedule, 1, 3)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"waves": 0}, "waves must be at least 1, got 0"),
        ({"order": "snake"}, "'wave' or 'greedy', got 'snake'"),
        ({"order": "greedy", "backward": -1}, "time of B"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, text):
    with pytest.raises(ScheduleError, match=text) as caught:
        hanayo(4, 4, **options)
    assert "\n" not in str(caught.value)
