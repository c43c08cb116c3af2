from __future__ import annotations

import numpy as np
import pytest

from pipesim import Kind, Schedule, ScheduleError, Timeline, UniformCosts, simulate
from pipesim.schedules.ampnet import ampnet
from pipesim.testing import SIZES, check_generator

GRID = [(p, m) for p in range(1, 9) for m in range(1, 25)]


def run(schedule: Schedule, forward: float = 1, backward: float = 2, latency: float = 0) -> Timeline:
    return simulate(schedule, UniformCosts(forward=forward, backward=backward, latency=latency))


def alive(timeline: Timeline) -> int:
    """Most instances between the start of their first F and the end of their last B."""
    schedule = timeline.schedule
    start = timeline.start[0, schedule.row_slot[schedule.rows_of(Kind.F)[0]]]
    end = timeline.end[0, schedule.row_slot[schedule.rows_of(Kind.B)[0]]]
    return max(np.count_nonzero((start <= time) & (time < end)) for time in start)


def test_by_hand():
    # F = 1, B = 2, two active. Device 0: F0 0-1, F1 1-2, waits for B0 (1F0 1-2, 1B0 2-4), B0 4-6, then F2 is let in: 6-7, and
    # B1 (1F1 4-5, 1B1 5-7) 7-9. Device 1 takes F1 at 4 because the lane was busy with B0 till then.
    schedule = ampnet(2, 3)
    assert [" ".join(map(str, stream)) for stream in schedule.streams] == [
        "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2",
        "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2",
    ]
    assert run(schedule).makespan == 12


def test_backwards_go_first():
    # Without a limit, F = 2, B = 2 on device 0 and F = 1, B = 1 on device 1: F0 0-2, F1 2-4 (B0, ready at 4, is then first) B0 4-6,
    # and so on in turn: B1 is ready at 6 (1F1 4-5, 1B1 5-6).
    schedule = ampnet(2, 4, max_active=4, forward=[2, 1], backward=[2, 1])
    assert " ".join(map(str, schedule.streams[0])) == "0F0 0F1 0B0 0U0 0B1 0U1 0F2 0F3 0B2 0U2 0B3 0U3"


@pytest.mark.parametrize("active", [1, 2, 3, 5])
def test_no_more_instances_than_allowed(active):
    for forward, backward, latency in ((1, 2, 0), (1, 1, 0.5), (2, 1, 0)):
        timeline = run(ampnet(4, 12, max_active=active, forward=forward, backward=backward, latency=latency), forward, backward, latency)
        assert alive(timeline) == active
        assert max(timeline.peak_activations) <= active


def test_one_active_instance_is_the_naive_schedule():
    assert run(ampnet(4, 5, max_active=1)).makespan == 5 * 4 * 3


def test_updates_are_local():
    schedule = ampnet(3, 8, min_update_frequency=3)
    for stream in schedule.streams:
        kinds = "".join(op.kind.name for op in stream if op.kind is not Kind.F)
        assert kinds == "BBBUBBBUBBU"
    assert set(schedule.staleness.num_versions.values()) == {1}
    assert (schedule.staleness.backward_delay == 0).all()


def test_equal_stages_are_kept_busy():
    # The last device can start after (p - 1)F, works m(F + B), and the last gradient has (p - 1)B to go: no run is shorter.
    for devices in (1, 2, 3, 4, 6):
        for backward in (1, 3):
            assert run(ampnet(devices, 12, backward=backward), 1, backward).makespan == (12 + devices - 1) * (1 + backward)


def test_wrong_options():
    with pytest.raises(ScheduleError, match="max_active must be at least 1, got 0"):
        ampnet(4, 8, max_active=0)
    with pytest.raises(ScheduleError, match="one per stage"):
        ampnet(4, 8, forward=[1, 2])


def test_every_size():
    assert check_generator(ampnet, options={"max_active": 3, "min_update_frequency": 2}).legal == SIZES
    for devices, microbatches in GRID:
        assert run(ampnet(devices, microbatches)).makespan == 3 * (microbatches + devices - 1)
