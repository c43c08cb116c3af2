"""What a calibration runs."""

from __future__ import annotations

import numpy as np
import pytest

import pipesim as ps
from pipesim.calibration import gpipe_probe, message_probe, split_probe
from pipesim.dataflow import messages
from pipesim.errors import ScheduleError


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("make", [gpipe_probe, split_probe])
def test_legal_and_finishes(make, devices, chunks):
    schedule = make(devices, 8, chunks).check()
    assert schedule.num_stages == devices * chunks
    assert ps.simulate(schedule).makespan > 0


@pytest.mark.parametrize("chunks", [1, 2])
def test_half_of_the_backwards_are_split(chunks):
    schedule = split_probe(2, 8, chunks)
    halves = schedule.rows_of(ps.Kind.I) >= 0
    assert halves.sum(axis=1).tolist() == [4] * schedule.num_stages


def test_gpipe_is_the_gpipe_that_ships():
    assert gpipe_probe(4, 8) == ps.generate("gpipe", 4, 8)


def test_the_first_two_microbatches_wait_for_every_message():
    # two devices, F = 1, B = I + W = 2, all messages waited for: one microbatch at a time takes 2 (1 + 2), the second starts when
    # device 0 has done its backward, at 6, and device 0 gets its gradient after I: 6 + 2 + 1 = 9
    run = ps.simulate(split_probe(2, 4), ps.UniformCosts(forward=1, backward=2))
    schedule = run.schedule
    row = schedule.rows_of(ps.Kind.I)[0, 1]
    assert run.start[0, schedule.row_slot[row]] == 9


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_every_neighbour_gets_every_size_in_both_directions(devices):
    sizes = [1024, 4096]
    schedule, costs = message_probe(devices, sizes)
    found, of = messages(schedule), costs.message_bytes(schedule)
    pairs = np.stack([found.source_device, found.target_device], axis=1)
    ring = {(a, (a + 1) % devices) for a in range(devices)}
    for pair in ring | {(b, a) for a, b in ring}:
        own = (pairs == pair).all(axis=1)
        assert set(of[own].tolist()) == set(sizes)
    assert {tuple(pair) for pair in pairs.tolist()} == ring | {(b, a) for a, b in ring}


def test_one_message_at_a_time():
    schedule, costs = message_probe(3, [100])
    run = ps.simulate(schedule, costs, cluster=ps.Cluster(inside=ps.Link(1.0, 100.0)))
    order = np.argsort(run.sent[0])
    assert (run.sent[0][order][1:] >= run.arrived[0][order][:-1]).all()


def test_refused():
    with pytest.raises(ScheduleError, match="at least 4"):
        split_probe(2, 3)
    with pytest.raises(ScheduleError, match="two devices"):
        message_probe(1)
