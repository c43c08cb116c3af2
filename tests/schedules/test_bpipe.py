from __future__ import annotations

import numpy as np
import pytest

from pipesim import Cluster, Kind, Link, UniformCosts, simulate
from pipesim.schedules.bpipe import bpipe
from pipesim.schedules.one_f_one_b import one_f_one_b
from pipesim.testing import SIZES, check_generator

GRID = [(p, m) for p in range(1, 9) for m in range(1, 25)]


@pytest.mark.parametrize("devices", [4, 5, 6, 7, 8, 16])
def test_evictors_hold_half_and_acceptors_no_more(devices):
    # ⌈(p + 2)/2⌉ exactly on a device that has more in 1F1B, no more on the others, for any durations of equal stages.
    most = -(-(devices + 2) // 2)
    for microbatches in (devices, 2 * devices + 1, 4 * devices):
        for forward, backward in ((1, 2), (1, 1), (2, 1), (1, 3.5)):
            costs = UniformCosts(forward=forward, backward=backward)
            run = simulate(bpipe(devices, microbatches), costs)
            assert run.peak_memory[: devices // 2] == [min(devices - x, most) for x in range(devices // 2)]
            assert max(run.peak_memory) <= most
            # 1F1B's timing, slot by slot
            assert np.array_equal(run.start, simulate(one_f_one_b(devices, microbatches), costs).start)


def test_only_some_move():
    # Known for p = 8, m = 32: 12, 10, 6, 0 microbatches on stages 0..3.
    schedule = bpipe(8, 32)
    out = np.bincount(schedule.device[schedule.kind == Kind.OFFLOAD], minlength=8)
    assert out.tolist() == [12, 10, 6, 0, 0, 0, 0, 0]
    assert dict(schedule.offload_to) == {0: 7, 1: 6, 2: 5}


def test_the_stream_by_hand():
    # p = 4, at most 3: device 0 has F0 F1 F2, and F3 wants a place, so 2 goes. B2 wants it back when 3, 4, 5 are here: 5 goes.
    schedule = bpipe(4, 6)
    assert " ".join(map(str, schedule.streams[0])) == "0F0 0F1 0F2 0OFFLOAD2 0F3 0B0 0F4 0B1 0F5 0OFFLOAD5 0RELOAD2 0B2 0B3 0B4 0RELOAD5 0B5"
    assert schedule.streams[1:] == one_f_one_b(4, 6).streams[1:]
    assert dict(schedule.offload_to) == {0: 3}


def test_what_moves_takes_the_link_to_the_partner():
    # p = 4, F = 1, B = 2, link 0 <-> 3 with latency 0.5 and the others free. Device 3: F0 3-4, B0 4-6, and gradients come back 4
    # later: on device 0 B0 10-12, F4 12-13, B1 13-15, F5 15-16. OFFLOAD5 16-16.5, RELOAD2 16.5-17, so B2, whose gradient is
    # there at 16, starts at 17.
    slow = {(0, 3): Link(0.5), (3, 0): Link(0.5)}
    run = simulate(bpipe(4, 6), UniformCosts(forward=1, backward=2), cluster=Cluster(unit="slot", links=slow))
    found = {str(run.schedule.op(row)): (run.offload_start[0, i], run.offload_end[0, i]) for i, row in enumerate(run.moves.row.tolist())}
    assert found["0OFFLOAD5"] == (16, 16.5)
    assert found["0RELOAD2"] == (16.5, 17)
    backward = run.schedule.row_slot[run.schedule.rows_of(Kind.B)[0, 2]]
    assert run.start[0, backward] == 17


def test_host():
    schedule = bpipe(8, 16, host=True)
    assert dict(schedule.offload_to) == {0: None, 1: None, 2: None}
    run = simulate(schedule, UniformCosts(forward=1, backward=2))
    # the other devices hold what they hold in 1F1B, and no more
    assert run.peak_memory == [5, 5, 5, 5, 4, 3, 2, 1]


def test_every_size():
    assert check_generator(bpipe).legal == SIZES
    for devices, microbatches in GRID:
        run = simulate(bpipe(devices, microbatches), UniformCosts(forward=1, backward=2))
        assert max(run.peak_memory) <= -(-(devices + 2) // 2)
        assert run.makespan == 3 * (microbatches + devices - 1)
