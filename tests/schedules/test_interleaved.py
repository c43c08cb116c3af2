from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import Kind, Schedule, ScheduleError, UniformCosts, simulate
from pipesim.schedules.interleaved import interleaved_1f1b
from pipesim.schedules.one_f_one_b import one_f_one_b

FB = UniformCosts(forward=1, backward=2)


def warmups(schedule):
    """Forwards before the first pair of a forward and a backward; the forward of that pair stands before the first backward."""
    return [schedule.kind[schedule.device == device].tolist().index(Kind.B) - 1 for device in range(schedule.num_devices)]


@pytest.mark.parametrize(
    ("devices", "microbatches", "chunks", "makespan", "warmup", "peaks"),
    [
        (4, 8, 2, 57, [10, 8, 6, 4], [11, 9, 7, 5]),  # S05
        (2, 4, 2, 27, [4, 2], [5, 3]),  # S05
        (8, 16, 4, 213, [38, 36, 34, 32, 30, 28, 26, 24], [39, 37, 35, 33, 31, 29, 27, 25]),  # S05, M03
        (4, 10, 2, 69, [11, 9, 7, 5], [12, 10, 8, 6]),  # S08: two groups of 5
        (4, 3, 2, 30, [5, 5, 5, 3], [6, 6, 6, 4]),  # S08: one group of 3; the first two devices run all 6 forwards first
    ],
)
def test_cases(devices, microbatches, chunks, makespan, warmup, peaks):
    schedule = interleaved_1f1b(devices, microbatches, chunks=chunks).check()
    timeline = simulate(schedule, FB)
    assert timeline.makespan == makespan
    assert timeline.peak_activations == peaks
    assert warmups(schedule) == warmup
    assert all((schedule.kind[schedule.device == d] == Kind.F).sum() == microbatches * chunks for d in range(devices))


def test_placement():
    # S20: 12 stages on 4 devices, round and round
    assert interleaved_1f1b(4, 4, chunks=3).device_stages == ((0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11))


@pytest.mark.parametrize("remainder", ["pytorch", "megatron"])
@pytest.mark.parametrize(("devices", "microbatches"), [(4, 8), (4, 11), (4, 2), (1, 3), (8, 8)])
def test_one_chunk_is_1f1b(devices, microbatches, remainder):
    # S09; the doubled warm-up would hold [7, 5, 3, 1]
    assert interleaved_1f1b(devices, microbatches, chunks=1, remainder=remainder) == one_f_one_b(devices, microbatches)


def test_equal_to_megatron(shared_data):
    cases = json.loads((shared_data / "megatron" / "interleaved_orders.json").read_text())
    assert len(cases) >= 3
    for name, case in cases.items():
        p, v, m, g = (int(part[1:]) for part in name.split("_"))
        if case["rejected_by_megatron"]:
            with pytest.raises(ScheduleError):
                interleaved_1f1b(p, m, chunks=v, group_size=g)
            continue
        streams = []  # "F2.1": forward, microbatch 2, chunk 1
        for device, order in enumerate(case["orders"]):
            streams.append([f"{int(op.split('.')[1]) * p + device}{op[0]}{op[1:].split('.')[0]}" for op in order])
        schedule = interleaved_1f1b(p, m, chunks=v, group_size=g)
        assert schedule == Schedule.from_streams(streams)
        timeline = simulate(schedule, FB)
        assert timeline.makespan == case["makespan_F1_B2"]
        assert timeline.peak_activations == case["peak"]


def test_megatron_order_of_its_own_documentation():
    # PP 2, 5 microbatches, 2 chunks, groups of 3, rank 0: +c+1 is a forward, -(c+1) a backward of chunk c
    schedule = interleaved_1f1b(2, 5, chunks=2, group_size=3)
    rows = schedule.device == 0
    chunk = schedule.stage[rows] // 2 + 1
    signed = [int(c) if kind == Kind.F else -int(c) for c, kind in zip(chunk, schedule.kind[rows], strict=True)]
    assert signed == [1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1]


@pytest.mark.parametrize("chunks", [2, 3])
def test_equal_to_pytorch(chunks):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="PyTorch is not installed")
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    refused = 0
    for devices in (1, 2, 3, 5):
        for microbatches in range(1, 14):
            try:
                ranks = visualizer.get_schedule_ops(schedules.ScheduleInterleaved1F1B, devices, microbatches, chunks)
            except ValueError:
                refused += 1
                with pytest.raises(ScheduleError):
                    interleaved_1f1b(devices, microbatches, chunks=chunks)
                continue
            streams = [[str(action) for action in rank if action is not None] for rank in ranks]
            assert interleaved_1f1b(devices, microbatches, chunks=chunks) == Schedule.from_streams(streams)
    assert refused


@settings(max_examples=60, deadline=None)
@given(
    p=st.integers(1, 6), rounds=st.integers(1, 4), extra=st.integers(0, 3), v=st.integers(2, 4), forward=st.integers(1, 4), backward=st.integers(1, 4)
)
def test_closed_forms(p, rounds, extra, v, forward, backward):
    # Narayanan et al. 2021: bubble (p - 1)(F + B), F and B of a chunk; the peak is one more than the warm-up
    m, g = rounds * (p + extra), p + extra
    timeline = simulate(interleaved_1f1b(p, m, chunks=v, group_size=g), UniformCosts(forward=forward, backward=backward))
    assert timeline.makespan == (m * v + p - 1) * (forward + backward)
    assert timeline.peak_activations == [min(m * v, 2 * (p - 1 - r) + (v - 1) * g + 1) for r in range(p)]


def test_expert_overlap_holds_one_more():
    plain, more = (simulate(interleaved_1f1b(4, 8, overlap_expert_comm=flag), FB) for flag in (False, True))
    assert more.peak_activations == [peak + 1 for peak in plain.peak_activations] == [12, 10, 8, 6]
    assert warmups(more.schedule) == [11, 9, 7, 5]


def test_own_warmup():
    # with one chunk, DAPPLE's policy B: 2(p - r) - 1 forwards before the first backward, the last of them in the pair
    assert interleaved_1f1b(4, 8, chunks=1, warmup=[6, 4, 2, 0]) == one_f_one_b(4, 8, policy="B")
    # everything first: the peak is all chunks
    assert simulate(interleaved_1f1b(2, 4, warmup=[8, 8]), FB).peak_activations == [8, 8]


@settings(max_examples=80, deadline=None)
@given(data=st.data(), p=st.integers(1, 5), m=st.integers(1, 12), v=st.integers(1, 4))
def test_no_accepted_warmup_deadlocks(data, p, m, v):
    warmup = sorted(data.draw(st.lists(st.integers(0, m * v), min_size=p, max_size=p)), reverse=True)
    try:
        schedule = interleaved_1f1b(p, m, chunks=v, warmup=warmup)
    except ScheduleError:
        return
    assert simulate(schedule.check(), FB).makespan >= m * v * 3


def test_forward_only():
    schedule = interleaved_1f1b(2, 4, forward_only=True).check()
    assert str(schedule).splitlines()[-2:] == [
        "device 0 | 0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3",
        "device 1 | 1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3",
    ]
    assert simulate(schedule, FB).makespan == 4 * 2 + 1


@pytest.mark.parametrize("remainder", ["pytorch", "megatron"])
def test_every_size(remainder):
    for p in range(1, 9):
        for m in range(1, 25):
            # the rules as the frameworks state them
            if m % max(1, m // p) if remainder == "pytorch" else m % p:
                with pytest.raises(ScheduleError, match=r"nearest legal numbers are|Megatron's rule wants"):
                    interleaved_1f1b(p, m, remainder=remainder)
                continue
            schedule = interleaved_1f1b(p, m, remainder=remainder).check()
            assert (schedule.num_stages, schedule.num_microbatches) == (2 * p, m)
            assert simulate(schedule, FB).makespan >= m * 2 * 3


@pytest.mark.parametrize(
    ("devices", "microbatches", "options", "message"),
    [
        (4, 11, {}, r"11 microbatches on 4 devices .* nearest legal numbers are 10 and 12"),
        (4, 10, {"remainder": "megatron"}, "groups of 4 of 10 microbatches on 4 devices leave 2"),
        (4, 3, {"remainder": "megatron"}, "p <= group size <= m"),
        (4, 8, {"group_size": 3}, "p <= group size <= m"),
        (4, 8, {"group_size": 9}, "p <= group size <= m"),
        (4, 11, {"group_size": 9}, "leave 2"),
        (4, 8, {"remainder": "torch"}, "remainder must be"),
        (4, 8, {"chunks": 0}, "chunks"),
        (4, 8, {"chunks": 1.5}, "chunks"),
        (4, 8, {"warmup": [10, 8, 6]}, "warmup must be 4 numbers"),
        (4, 8, {"warmup": [10, 8, 6, 3]}, "from 4 to 16"),
        (4, 8, {"warmup": [10, 11, 6, 4]}, "none larger than the one before"),
        (4, 8, {"warmup": [17, 8, 6, 4]}, "from 4 to 16"),
        (4, 8, {"warmup": [13, 8, 6, 4]}, "at most 8 forwards more"),
    ],
)
def test_refusals(devices, microbatches, options, message):
    with pytest.raises(ScheduleError, match=message):
        interleaved_1f1b(devices, microbatches, **options)
