from __future__ import annotations

import numpy as np

from pipesim import Kind, UniformCosts, simulate
from pipesim.schedules.gnnpipe import gnnpipe
from pipesim.testing import SIZES, check_generator

GRID = [(p, m) for p in range(1, 9) for m in range(1, 25)]


def test_chunks_depend_on_each_other():
    # On every device chunk k runs forward after k - 1 and backward before it.
    schedule = gnnpipe(3, 5)
    assert (np.diff(schedule.rows_of(Kind.F), axis=1) > 0).all()
    assert (np.diff(schedule.rows_of(Kind.B), axis=1) < 0).all()
    assert schedule.name == "gnnpipe"


def test_chunks_of_different_size():
    # p = 2, F = 1, 3 on both devices, B the same. Device 0: F0 0-1, F1 1-4; device 1: F0 1-2, F1 4-7, B1 7-10, B0 10-11;
    # device 0: B1 10-13, B0 13-14.
    run = simulate(gnnpipe(2, 2), UniformCosts(forward=[[1, 3], [1, 3]], backward=[[1, 3], [1, 3]]))
    assert run.makespan == 14
    assert run.peak_activations == [2, 2]


def test_every_size():
    assert check_generator(gnnpipe).legal == SIZES
    for devices, microbatches in GRID:
        run = simulate(gnnpipe(devices, microbatches), UniformCosts(forward=1, backward=2))
        assert run.makespan == 3 * (microbatches + devices - 1)
        assert run.peak_activations == [microbatches] * devices
