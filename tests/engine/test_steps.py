"""Several steps, updates and barriers. Every figure is worked out by hand in the comment beside it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import pipesim
from pipesim import Schedule, UniformCosts, generate

simulate = partial(pipesim.simulate, engine="simpy")

FB = UniformCosts(forward=1, backward=2)


def test_two_steps_with_the_barrier() -> None:
    run = simulate(generate("1f1b", 4, 8), FB, steps=2)
    assert run.makespan == 66
    assert run.iteration_time == 33
    assert run.bubble_fraction == pytest.approx(3 / 11, abs=1e-12)
    assert run.span_bubble_rate is None  # the papers define it for one step
    assert np.array_equal(run.start[1], run.start[0] + 33)


def test_the_update_follows_the_barrier() -> None:
    """All last gradients are there at 33; every device updates from then on, the slowest for 5."""
    run = simulate(generate("1f1b", 4, 8), UniformCosts(forward=1, backward=2, optimizer=[1, 2, 5, 1]), steps=3)
    update = run.schedule.device_slots[1:] - 1
    assert run.start[0, update].tolist() == [33] * 4
    assert run.end[0, update].tolist() == [34, 35, 38, 34]
    # device 0 goes on at once: the next step starts at 34 and its pipeline fills behind device 2, which is ready at 38, and 34 + 2 < 38:
    # stage 2 begins at 38 and not at 36, so the step takes longer by 2
    assert run.start[1, run.schedule.device_slots[0]] == 34
    assert run.start[1, run.schedule.device_slots[2]] == 38


def test_without_the_barrier_a_device_goes_on_alone() -> None:
    """1F1B: device d has its last gradient at 33 - 2d and updates then."""
    run = simulate(generate("1f1b", 4, 8), UniformCosts(forward=1, backward=2, optimizer=1), barrier=False)
    update = run.schedule.device_slots[1:] - 1
    assert run.start[0, update].tolist() == [33, 31, 29, 27]
    assert run.makespan == 34
    assert run.iteration_time == 34  # the largest span, device 0's


def test_forward_only_steps_overlap_without_the_barrier() -> None:
    """p=4, m=8: a step takes 11. Without the barrier device 0 starts the second at 8, so both take 19, and each span is 8."""
    schedule = generate("gpipe", 4, 8, forward_only=True)
    alone, together = (simulate(schedule, FB, steps=2, barrier=barrier) for barrier in (False, True))
    assert (alone.makespan, alone.iteration_time) == (19, 8)
    assert (together.makespan, together.iteration_time) == (22, 11)


def test_a_link_stays_busy_from_one_step_to_the_next() -> None:
    """F=1 then 0; 3 bytes at 1 a slot. Two steps of one microbatch without barrier: sent 1, 2; taken 1, 4; there 4, 7."""
    run = simulate(Schedule.from_text("0F0\n1F0"), UniformCosts(forward=[1, 0], message=3, bandwidth=1), steps=2, barrier=False)
    assert run.departed[:, 0].tolist() == [1, 4]
    assert run.arrived[:, 0].tolist() == [4, 7]


def test_updates_that_take_no_time_are_left_out() -> None:
    schedule = generate("1f1b", 4, 8)
    assert simulate(schedule, FB).schedule is schedule
    assert len(simulate(schedule, UniformCosts(optimizer=1)).schedule) == len(schedule) + 4
    # and listing them changes nothing
    listed = simulate(schedule.with_updates(), FB, steps=2)
    assert (listed.makespan, listed.iteration_time, listed.bubble_fraction) == (66, 33, pytest.approx(3 / 11))


REPLICAS = "0F0 0B0 0U0\n0F1 0B1 0U0"


def test_replicas_update_when_all_their_gradients_are_there() -> None:
    """Microbatch 0 takes 1 + 2 on device 0, microbatch 1 takes 5 + 2 on device 1: both update at 7."""
    costs = UniformCosts(forward=np.array([[1.0, 5.0]]), backward=2, optimizer=1)
    for barrier, cause in ((False, "gradient reduction"), (True, "barrier")):
        run = simulate(Schedule.from_text(REPLICAS), costs, barrier=barrier)
        assert run.start[0, [2, 5]].tolist() == [7, 7]
        assert run.makespan == 8
        assert {name: time for name, time in run.idle_causes()[0].items() if time} == {cause: 4}


def test_round_robin_replicas_of_pipedream() -> None:
    """Stage 0 on devices 0 and 1, stage 1 on device 2; 4 microbatches, F=1, B=1, no hop. Device 2: F0 B0 F1 B1 ..., from 1 on.

    It is never idle from 1 to 9; the last gradient then goes through stage 0, so the run takes 10.
    """
    run = simulate(generate("pipedream", 3, 4, replicas=(2, 1)), UniformCosts(forward=1, backward=1))
    assert run.schedule.replicas == {0: (0, 1)}
    assert run.busy == [4, 4, 8]
    assert run.makespan == 10
