from __future__ import annotations

import pytest

from pipesim import Kind, UniformCosts, simulate
from pipesim.schedules.gpipe import gpipe
from pipesim.schedules.one_f_one_b import one_f_one_b
from pipesim.schedules.recompute import gpipe_recompute, one_f_one_b_recompute
from pipesim.testing import SIZES, check_generator

GRID = [(p, m) for p in range(1, 9) for m in range(1, 25)]


@pytest.mark.parametrize("generator", [one_f_one_b_recompute, gpipe_recompute])
def test_every_size_and_its_time(generator):
    # The last device is busy for m(2F + B) after (p - 1)F, and the last gradient then has (p - 1)B to go: no run can be shorter,
    # and R, which needs nothing from another device, lengthens it nowhere else.
    assert check_generator(generator).legal == SIZES
    for devices, microbatches in GRID:
        run = simulate(generator(devices, microbatches), UniformCosts(forward=1, backward=2))
        assert run.makespan == microbatches * (2 * 1 + 2) + (devices - 1) * (1 + 2)
    for forward, backward in ((1, 1), (1, 3), (2, 3)):
        run = simulate(generator(4, 9), UniformCosts(forward=forward, backward=backward))
        assert run.makespan == 9 * (2 * forward + backward) + 3 * (forward + backward)


def test_listed_recomputation_fills_the_bubble():
    # S30's case: as a part of the backward it takes (m + p - 1)(2F + B) = 44; listed it starts before the gradient: 8·4 + 3·3 = 41.
    inside = UniformCosts(forward=1, backward=2, recompute_policy="always")
    assert simulate(gpipe(4, 8), inside).makespan == 44
    assert simulate(one_f_one_b(4, 8), inside).makespan == 44
    for generator in (one_f_one_b_recompute, gpipe_recompute):
        assert simulate(generator(4, 8), UniformCosts(forward=1, backward=2)).makespan == 41


def test_it_runs_while_the_gradient_is_on_its_way():
    # Device 0 of 1F1B, F = 1, B = 2: F0..F3 0-4, R0 4-5. Device 3: F0 3-4, R0 4-5, B0 5-7; back on device 0 at 7 + 2 + 2 = 11.
    run = simulate(one_f_one_b_recompute(4, 8), UniformCosts(forward=1, backward=2))
    slots = {op.kind: slot for slot, op in enumerate(run.schedule.streams[0]) if op.microbatch == 0}
    assert run.start[0, slots[Kind.R]] == 4
    assert run.start[0, slots[Kind.B]] == 11


def test_memory_is_inputs_and_one_activation():
    # Stage input 1 of 10: in flight min(p - i, m) inputs, and the other 9 of one activation from its R on.
    costs = UniformCosts(forward=1, backward=2, activation=10, stage_input=1)
    assert simulate(one_f_one_b_recompute(4, 8), costs).peak_memory == [13, 12, 11, 10]
    assert simulate(gpipe_recompute(4, 8), costs).peak_memory == [17] * 4
