from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import Schedule, ScheduleError, UniformCosts, simulate
from pipesim.schedules.gpipe import gpipe
from pipesim.schedules.looped_bfs import looped_bfs

FB = UniformCosts(forward=1, backward=2)


def test_equal_to_pytorch():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="PyTorch is not installed")
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    for devices, microbatches, chunks in [(1, 1, 2), (2, 3, 2), (4, 3, 2), (4, 8, 3), (5, 6, 2), (8, 8, 4)]:
        ranks = visualizer.get_schedule_ops(schedules.ScheduleLoopedBFS, devices, microbatches, chunks)
        streams = [[str(action) for action in rank if action is not None] for rank in ranks]
        assert looped_bfs(devices, microbatches, chunks=chunks, order="reversed") == Schedule.from_streams(streams)


def test_picture():
    # chunk by chunk; the author's code runs the backwards of a chunk in the forwards' order
    assert str(looped_bfs(2, 2)).splitlines()[-2:] == [
        "device 0 | 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "device 1 | 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    ]


@pytest.mark.parametrize(
    ("devices", "microbatches", "chunks", "bubble"),
    [(4, 8, 2, 9), (4, 3, 2, 12), (1, 3, 2, 0)],  # (p - 1)(F + B) where m >= p; with m = 3 < p = 4 it is 12
)
def test_bubble(devices, microbatches, chunks, bubble):
    for order in ("forward", "reversed"):
        timeline = simulate(looped_bfs(devices, microbatches, chunks=chunks, order=order).check(), FB)
        assert timeline.makespan == microbatches * chunks * 3 + bubble
        assert timeline.peak_activations == [microbatches * chunks] * devices


@settings(max_examples=60, deadline=None)
@given(p=st.integers(1, 6), m=st.integers(1, 8), v=st.integers(1, 3), forward=st.integers(1, 4), backward=st.integers(1, 4))
def test_makespan(p, m, v, forward, backward):
    # A chunk starts max(m, p) forwards after the chunk before: its microbatches are behind it, or the first has come round. The
    # last chunk takes m + p - 1. The same backwards.
    timeline = simulate(looped_bfs(p, m, chunks=v), UniformCosts(forward=forward, backward=backward))
    assert timeline.makespan == ((v - 1) * max(m, p) + m + p - 1) * (forward + backward)
    assert simulate(looped_bfs(p, m, chunks=v, forward_only=True), FB).makespan == (v - 1) * max(m, p) + m + p - 1


def test_one_chunk_is_gpipe():
    for order in ("forward", "reversed"):
        assert looped_bfs(3, 5, chunks=1, order=order) == gpipe(3, 5, order=order)


def test_every_size():
    for p in range(1, 9):
        for m in range(1, 25):
            schedule = looped_bfs(p, m).check()
            assert len(schedule) == 2 * m * 2 * p


@pytest.mark.parametrize(("options", "message"), [({"order": "backward"}, "order must be"), ({"chunks": 0}, "chunks")])
def test_refusals(options, message):
    with pytest.raises(ScheduleError, match=message):
        looped_bfs(4, 8, **options)
