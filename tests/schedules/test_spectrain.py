from __future__ import annotations

import pytest

from pipesim import UniformCosts, simulate
from pipesim.schedules.pipedream import pipedream
from pipesim.schedules.spectrain import spectrain
from pipesim.testing import SIZES, check_generator

GRID = [(p, m) for p in range(1, 9) for m in range(1, 25)]


@pytest.mark.parametrize("devices", range(1, 9))
def test_the_prediction_has_this_delay_to_make_up_for(devices):
    # s_fwd - s_bwd = N - k - 1 on rank k of N: what the latest weights lack at a forward. Backwards have the latest of all.
    staleness = spectrain(devices, 24).staleness
    for k in range(devices):
        assert set(staleness.forward_delay[k, devices:]) == {devices - k - 1}
    assert (staleness.backward_delay == 0).all()


def test_memory_is_two_copies_of_the_weights():
    run = simulate(spectrain(4, 16), UniformCosts(forward=1, backward=2, weights=10))
    assert run.peak_memory == [24, 23, 22, 21]
    assert run.makespan == 57


def test_streams_are_pipedreams():
    assert spectrain(4, 9).streams == pipedream(4, 9).streams


def test_every_size():
    assert check_generator(spectrain).legal == SIZES
    for devices, microbatches in GRID:
        run = simulate(spectrain(devices, microbatches), UniformCosts(forward=1, backward=2))
        assert run.makespan == 3 * (microbatches + devices - 1)
