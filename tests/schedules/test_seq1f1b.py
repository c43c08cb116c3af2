from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import Kind, ScheduleError, UniformCosts, simulate
from pipesim.schedules.one_f_one_b import one_f_one_b
from pipesim.schedules.seq1f1b import seq1f1b


def test_order_by_hand():
    # p = 2, 2 sequences of 2 pieces (0, 1 and 2, 3). Device 1 starts with p - 2 - r + k = 1 forward: the backward of a sequence begins
    # with its last piece, which is the second forward. Device 0 starts with one more.
    assert str(seq1f1b(2, 2)).splitlines()[-2:] == [
        "device 0 | 0F0 0F1 0F2 0B1 0F3 0B0 0B3 0B2",
        "device 1 | 1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2",
    ]


@settings(max_examples=80, deadline=None)
@given(p=st.integers(1, 6), m=st.integers(1, 8), k=st.integers(1, 5), forward=st.integers(1, 4), backward=st.integers(1, 4))
def test_closed_forms_and_order_of_pieces(p, m, k, forward, backward):
    schedule = seq1f1b(p, m, splits=k).check()
    timeline = simulate(schedule, UniformCosts(forward=forward, backward=backward))
    # 1F1B over m·k microbatches of 1/k; k - 1 more of them in flight, because the first backward is that of the k-th piece
    assert timeline.makespan == (m * k + p - 1) * (forward + backward)
    assert timeline.peak_activations == [min(p - 1 - r + k, m * k) for r in range(p)]
    for device in range(p):
        rows = schedule.device == device
        kind, piece = schedule.kind[rows], schedule.microbatch[rows]
        forwards, backwards = piece[kind == Kind.F].tolist(), piece[kind == Kind.B].tolist()
        assert forwards == list(range(m * k))  # causal: every piece after those before it
        assert backwards == [i * k + s for i in range(m) for s in reversed(range(k))]
        place = {(int(a), int(b)): n for n, (a, b) in enumerate(zip(kind, piece, strict=True))}
        for i in range(m):  # the first backward of a sequence after its last forward
            assert place[Kind.B, i * k + k - 1] > place[Kind.F, i * k + k - 1]


def test_one_split_is_1f1b():
    for p, m in ((1, 1), (4, 8), (4, 2), (3, 7)):
        assert seq1f1b(p, m, splits=1) == one_f_one_b(p, m)


def test_every_size():
    for p in range(1, 9):
        for m in range(1, 25):
            schedule = seq1f1b(p, m).check()
            assert (schedule.num_stages, schedule.num_microbatches, len(schedule)) == (p, 2 * m, 4 * m * p)


def test_refusal():
    with pytest.raises(ScheduleError, match="splits must be at least 1"):
        seq1f1b(4, 8, splits=0)
