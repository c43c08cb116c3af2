from __future__ import annotations

import numpy as np
import pytest

from pipesim import ScheduleError, Timeline, UniformCosts, simulate
from pipesim.op import Kind
from pipesim.schedules.gems import gems


def run(devices: int, microbatches: int, first: str = "backward", forward: float = 1, backward: float = 2) -> Timeline:
    return simulate(gems(devices, microbatches, first=first).check(), UniformCosts(forward=forward, backward=backward))


def test_replicas_are_mirrored_and_take_turns():
    schedule = gems(4, 4)
    assert schedule.replicas == {stage: tuple(sorted((stage, 3 - stage))) for stage in range(4)}
    for microbatch in range(4):
        rows = schedule.rows_of(Kind.F)[:, microbatch]
        assert schedule.device[rows].tolist() == ([3, 2, 1, 0] if microbatch % 2 else [0, 1, 2, 3])


@pytest.mark.parametrize("devices", range(1, 9))
def test_makespan_is_the_closed_form(devices):
    # B >= F: a microbatch's backward takes p·B down the devices, the forward of the next follows it one F behind:
    # T = m(pB + F) + (p - 1)F.
    for microbatches in (1, 2, 3, 4, 7, 8):
        for forward, backward in ((1, 2), (1, 1), (1.5, 2)):
            makespan = run(devices, microbatches, "backward", forward, backward).makespan
            assert makespan == microbatches * (devices * backward + forward) + (devices - 1) * forward


def test_forwards_longer_than_backwards():
    # p=3, m=2, F=2, B=1 by hand: F0 ends at 6, B0 on devices 2, 1, 0 at 7, 8, 9; F1 on them 7-9, 9-11, 11-13; B1 back 13-16.
    assert run(3, 2, "backward", 2, 1).makespan == 16


def test_at_most_one_microbatch_is_alive_on_a_device_and_two_in_all():
    timeline = run(5, 9)
    assert timeline.peak_activations == [1] * 5
    # Alive: from the first start of its forwards to the last end of its backwards.
    schedule = timeline.schedule
    start = timeline.start[0, schedule.row_slot[schedule.rows_of(Kind.F)[0]]]
    end = timeline.end[0, schedule.row_slot[schedule.rows_of(Kind.B)[0]]]
    assert max(np.count_nonzero((start <= time) & (time < end)) for time in start) == 2


def test_forward_first_is_another_schedule():
    # The known pair of answers for p = m = 4, F = 1, B = 2.
    assert run(4, 4).makespan == 39
    assert run(4, 4, "forward").makespan == 31
    assert run(4, 4, "forward").peak_activations == [2] * 4


def test_middle_device_of_an_odd_pipeline_holds_one_stage_once():
    assert gems(3, 2).device_stages == ((0, 2), (1,), (0, 2))


@pytest.mark.parametrize("first", ["backward", "forward"])
def test_every_size_is_complete_and_runs(first):
    for devices in range(1, 9):
        for microbatches in range(1, 25):
            schedule = gems(devices, microbatches, first=first).check()
            assert (schedule.num_devices, schedule.num_stages, schedule.num_microbatches) == (devices, devices, microbatches)
            assert len(schedule) == 2 * devices * microbatches
            simulate(schedule, UniformCosts(forward=1, backward=2))


def test_wrong_option_is_refused():
    with pytest.raises(ScheduleError, match="'backward' or 'forward', got 'both'"):
        gems(4, 4, first="both")
