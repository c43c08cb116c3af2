from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import Kind, ScheduleError, UniformCosts, simulate
from pipesim.schedules.grouped_interleaved import grouped_interleaved
from pipesim.schedules.interleaved import interleaved_1f1b
from pipesim.schedules.one_f_one_b import one_f_one_b


def test_order_by_hand():
    # p = 3, v = 2, groups of 2, one group. Warm-up p - 1 - r + g: 4 (all there are), 3, 2; then a forward, a backward, a forward, ...
    assert str(grouped_interleaved(3, 2)).splitlines()[-3:] == [
        "device 0 | 0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1",
        "device 1 | 1F0 1F1 4F0 4F1 4B0 4B1 1B0 1B1",
        "device 2 | 2F0 2F1 5F0 5B0 5F1 5B1 2B0 2B1",
    ]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), p=st.integers(1, 8), v=st.integers(1, 4), rounds=st.integers(1, 5), forward=st.integers(1, 4), backward=st.integers(1, 4))
def test_closed_forms(data, p, v, rounds, forward, backward):
    g = data.draw(st.integers((p + 1) // 2, p), "g")
    m = rounds * g
    timeline = simulate(grouped_interleaved(p, m, chunks=v, group_size=g), UniformCosts(forward=forward, backward=backward))
    assert timeline.peak_activations == [min(m * v, p - r + (v - 1) * g) for r in range(p)]
    # Once a chunk, the first microbatch is on its way round for p hops while the device has g to do; and back. A steady state
    # without a gap needs as well that p hops fit into g periods.
    ideal = (m * v + p - 1 + (v - 1) * (p - g)) * (forward + backward)
    if g * (forward + backward) >= p * max(forward, backward):
        assert timeline.makespan == ideal
    else:
        assert timeline.makespan >= (m * v + p - 1) * (forward + backward)  # the bound of any unsplit backward on a chain


def test_memory_of_half_groups():
    # PipeOffload's point: less than the p = 8 activations of 1F1B. 2 chunks: (8 + 4)/2 = 6; 4 chunks: (8 + 3·4)/4 = 5.
    one = simulate(one_f_one_b(8, 16), UniformCosts()).peak_activation_share[0]
    two = simulate(grouped_interleaved(8, 16), UniformCosts()).peak_activation_share[0]
    four = simulate(grouped_interleaved(8, 16, chunks=4), UniformCosts()).peak_activation_share[0]
    assert (one, two, four) == (8, 6, 5)


def test_whole_groups_walk_as_interleaved():
    # the same forwards in the same order as interleaved 1F1B; only the warm-up is shorter
    mine, usual = grouped_interleaved(4, 8, group_size=4), interleaved_1f1b(4, 8)
    for device in range(4):
        for kind in (Kind.F, Kind.B):
            a, b = ((s.device == device) & (s.kind == kind) for s in (mine, usual))
            assert mine.stage[a].tolist() == usual.stage[b].tolist()
            assert mine.microbatch[a].tolist() == usual.microbatch[b].tolist()
    assert simulate(mine, UniformCosts()).makespan == simulate(usual, UniformCosts()).makespan == 57


def test_every_size():
    for p in range(1, 9):
        size = (p + 1) // 2
        for m in range(1, 25):
            if m > size and m % size:
                with pytest.raises(ScheduleError, match=f"right is a multiple of {size}"):
                    grouped_interleaved(p, m)
                continue
            schedule = grouped_interleaved(p, m).check()
            assert (schedule.num_stages, schedule.num_microbatches) == (2 * p, m)
            assert simulate(schedule, UniformCosts()).makespan >= m * 2 * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, r"group_size must be 2\.\.4"),
        ({"group_size": 5}, r"group_size must be 2\.\.4"),
        ({"group_size": 3}, "8 microbatches make no whole groups of 3"),
        ({"chunks": 0}, "chunks"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ScheduleError, match=message):
        grouped_interleaved(4, 8, **options)
