from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import Schedule, ScheduleError, UniformCosts, simulate
from pipesim.schedules.interleaved_zb import interleaved_zb
from pipesim.schedules.zb_h import zb_h1

EQUAL = UniformCosts(forward=1, input_grad=1, weight_grad=1)


@pytest.mark.parametrize("chunks", [2, 3])
def test_equal_to_pytorch(chunks):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="PyTorch is not installed")
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    sizes = [(1, 1), (1, 3), (2, 1), (2, 4), (2, 5), (3, 5), (4, 3), (4, 8), (4, 10), (5, 5), (7, 3), (8, 16)]
    for devices, microbatches in sizes:
        try:
            ranks = visualizer.get_schedule_ops(schedules.ScheduleInterleavedZeroBubble, devices, microbatches, chunks)
        except ValueError:
            with pytest.raises(ScheduleError):
                interleaved_zb(devices, microbatches, chunks=chunks)
            continue
        # PyTorch writes idle slots as None
        streams = [[str(action) for action in rank if action is not None] for rank in ranks]
        assert interleaved_zb(devices, microbatches, chunks=chunks) == Schedule.from_streams(streams)


def test_four_devices():
    # replayed independently: T = 51, 8 chunks on every rank
    timeline = simulate(interleaved_zb(4, 8).check(), EQUAL)
    assert timeline.makespan == 51
    assert timeline.peak_activations == [8, 8, 8, 8]


@settings(max_examples=80, deadline=None)
@given(
    p=st.integers(1, 6),
    extra=st.integers(0, 5),
    rounds=st.integers(1, 3),
    v=st.integers(1, 4),
    forward=st.integers(1, 5),
    input_grad=st.integers(1, 5),
    weight_grad=st.integers(1, 5),
)
def test_closed_forms(p, extra, rounds, v, forward, input_grad, weight_grad):
    # ZB-H1's bubble with the times of a chunk; W <= F as there. A group of g holds v - 1 chunks and p more.
    size = p + min(extra, p - 1)
    m = rounds * size if rounds * size // p == rounds else size
    weight_grad = min(weight_grad, forward)
    timeline = simulate(interleaved_zb(p, m, chunks=v), UniformCosts(forward=forward, input_grad=input_grad, weight_grad=weight_grad))
    bounds = timeline.schedule.device_slots
    span = max(timeline.end[0, high - 1] - timeline.start[0, low] for low, high in pairwise(bounds))
    assert span == m * v * (forward + input_grad + weight_grad) + (p - 1) * (forward + input_grad - weight_grad)
    group = m // max(1, m // p)
    assert timeline.peak_activations == [min(m * v, p + (v - 1) * group)] * p


def test_one_chunk_is_zb_h1():
    for p, m in ((1, 3), (4, 8), (4, 11), (4, 2)):
        assert interleaved_zb(p, m, chunks=1) == zb_h1(p, m)


def test_every_size():
    for p in range(1, 9):
        for m in range(1, 25):
            if m % max(1, m // p):  # PyTorch's rule
                with pytest.raises(ScheduleError, match="nearest legal numbers are"):
                    interleaved_zb(p, m)
                continue
            schedule = interleaved_zb(p, m).check()
            assert len(schedule) == 6 * m * p
            if m % 2:
                assert simulate(schedule, EQUAL).makespan >= 6 * m


@pytest.mark.parametrize(("microbatches", "options", "message"), [(11, {}, "nearest legal numbers are 10 and 12"), (8, {"chunks": 0}, "chunks")])
def test_refusals(microbatches, options, message):
    with pytest.raises(ScheduleError, match=message):
        interleaved_zb(4, microbatches, **options)
