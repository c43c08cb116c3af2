from __future__ import annotations

import numpy as np
import pytest

from pipesim import Kind, ScheduleError, UniformCosts, simulate
from pipesim.schedules.pipedream_2bw import pipedream_2bw
from pipesim.testing import SIZES, check_generator

COSTS = UniformCosts(forward=1, backward=2, weights=10)
GRID = [(p, m) for p in range(1, 9) for m in range(1, 25)]


@pytest.mark.parametrize(("devices", "every"), [(1, 1), (4, 4), (4, 5), (3, 8), (8, 8)])
def test_versions_are_the_papers(devices, every):
    # Section 3.1: microbatch k (from 1) uses version max(⌊(k - 1)/m⌋ - 1, 0) on every stage, forward and backward alike.
    staleness = pipedream_2bw(devices, 40, updates_every=every).staleness
    k = np.arange(1, 41)
    expected = np.maximum((k - 1) // every - 1, 0)
    assert (staleness.forward_version == expected).all()
    assert (staleness.backward_version == expected).all()
    # W(t+1) = W(t) - ν·∇f(W(t-1)): a delay of one update, but for the first batch, for which there is one version only
    assert (staleness.forward_delay == np.where(k > every, 1, 0)).all()


def test_two_versions():
    # S28 and M09: versions 2 everywhere; two weights and p - s activations.
    schedule = pipedream_2bw(4, 16)
    assert set(schedule.staleness.num_versions.values()) == {2}
    run = simulate(schedule, COSTS)
    assert run.peak_memory == [24, 23, 22, 21]
    assert run.makespan == 57


def test_an_update_stands_after_every_nth_backward():
    schedule = pipedream_2bw(2, 7, updates_every=3)
    assert " ".join(map(str, schedule.streams[1])) == "1F0 1B0 1F1 1B1 1F2 1B2 1U0 1F3 1B3 1F4 1B4 1F5 1B5 1U1 1F6 1B6 1U2"


def test_fewer_microbatches_than_devices_per_update_are_refused():
    with pytest.raises(ScheduleError, match="updates_every is 3 and there are 4 devices; right is at least 4"):
        pipedream_2bw(4, 12, updates_every=3)


def test_every_size():
    assert check_generator(pipedream_2bw).legal == SIZES
    for devices, microbatches in GRID:
        schedule = pipedream_2bw(devices, microbatches)
        assert simulate(schedule, COSTS).makespan == 3 * (microbatches + devices - 1)
        # every gradient goes into an update
        assert np.count_nonzero(schedule.kind == Kind.U) == devices * -(-microbatches // devices)
        assert schedule.staleness.update.max() == -(-microbatches // devices) - 1
