from __future__ import annotations

import pytest

from pipesim import Pair, ScheduleError, UniformCosts, simulate
from pipesim.schedules.pipemare import pipemare
from pipesim.testing import SIZES, check_generator

GRID = [(p, m) for p in range(1, 9) for m in range(1, 25)]


@pytest.mark.parametrize("every", [1, 4, 8])
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_delays_are_the_papers(devices, every):
    # τ_fwd = (2(P - i) + 1)/N on stage i = 1..P, τ_bkwd = 0. One lane has (P - i)/N. Means over whole periods of N.
    steady = slice(32, 32 + 8 * every)
    for lanes, ahead in (("paired", lambda i: 2 * (devices - i) + 1), ("single", lambda i: devices - i)):
        staleness = pipemare(devices, 120, lanes=lanes, updates_every=every).staleness
        mean = staleness.forward_delay[:, steady].mean(axis=1)
        assert mean.tolist() == [ahead(i) / every for i in range(1, devices + 1)]
        assert (staleness.backward_delay == 0).all()
        assert set(staleness.num_versions.values()) == {1}


def test_the_paired_streams():
    # K = 2(p - 1 - i) + 1 forwards: 3 and 1.
    schedule = pipemare(2, 4, updates_every=2)
    assert [" ".join(map(str, stream)) for stream in schedule.streams] == [
        "0F0 0F1 0F2 (0F3;0B0)OVERLAP_F_B 0B1 0U0 0B2 0B3 0U1",
        "1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B 1U0 (1F3;1B2)OVERLAP_F_B 1B3 1U1",
    ]


def test_activations():
    # K, and K + 1 during a pair.
    assert simulate(pipemare(4, 16)).peak_activations == [8, 6, 4, 2]
    assert simulate(pipemare(4, 16, lanes="single")).peak_activations == [4, 3, 2, 1]


@pytest.mark.parametrize("devices", range(1, 9))
def test_lockstep_time(devices):
    # A slot of 1 for a forward, a backward or both: device 0 has its m forwards in slots 0..m-1, the last 2p - 1 backwards after them.
    microbatches = 2 * devices + 3
    run = simulate(pipemare(devices, microbatches), UniformCosts(forward=1, backward=1, overlap=1))
    assert run.makespan == microbatches + 2 * devices - 1


def test_no_microbatch_is_lost_in_the_fill():
    schedule = pipemare(4, 3)  # fewer than the fill of device 0
    assert not any(isinstance(slot, Pair) for slot in schedule.streams[0])
    assert sum(isinstance(slot, Pair) for slot in schedule.streams[3]) == 2


def test_wrong_options():
    with pytest.raises(ScheduleError, match="lanes must be 'paired' or 'single', got 'double'"):
        pipemare(4, 8, lanes="double")
    with pytest.raises(ScheduleError, match="updates_every must be at least 1, got 0"):
        pipemare(4, 8, updates_every=0)


@pytest.mark.parametrize("lanes", ["paired", "single"])
def test_every_size(lanes):
    assert check_generator(pipemare, options={"lanes": lanes, "updates_every": 3}).legal == SIZES
    for devices, microbatches in GRID:
        run = simulate(pipemare(devices, microbatches, lanes=lanes, updates_every=3))
        assert run.schedule.staleness.update.max() == -(-microbatches // 3) - 1
