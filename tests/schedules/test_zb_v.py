from __future__ import annotations

import pytest

from pipesim import Kind, Schedule, ScheduleError, UniformCosts, simulate
from pipesim.schedules.zb_v import zb_v

EQUAL = UniformCosts(forward=1, input_grad=1, weight_grad=1)


def test_equal_to_pytorch():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="PyTorch is not installed")
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    for devices, microbatches in [(1, 1), (1, 4), (2, 1), (2, 5), (3, 2), (3, 7), (4, 4), (4, 8), (5, 13), (8, 3), (8, 16)]:
        ranks = visualizer.get_schedule_ops(schedules.ScheduleZBVZeroBubble, devices, microbatches, 2)
        streams = [[str(action) for action in rank if action is not None] for rank in ranks]
        assert zb_v(devices, microbatches) == Schedule.from_streams(streams)


@pytest.mark.parametrize(("file", "devices", "microbatches"), [("ZBV_p2_m4.csv", 2, 4), ("ZBV_p4_m8.csv", 4, 8)])
def test_as_good_as_the_authors_order(shared_data, file, devices, microbatches):
    theirs, mine = Schedule.from_csv(shared_data / "zero_bubble" / file), zb_v(devices, microbatches)
    ours, other = simulate(mine, EQUAL), simulate(theirs.check(), EQUAL)
    assert ours.makespan == other.makespan == 6 * microbatches + devices - 1
    assert ours.span_bubble_rate == other.span_bubble_rate == 0
    assert max(ours.peak_activations) == max(other.peak_activations) == 2 * devices
    # The forwards and input gradients of a chunk run in the same order. Their search puts a W into the first free slot, so in the
    # drain W stands later than in the paper's written-out order, and the two chunks' I lie closer together.
    for device in range(devices):
        for kind in (Kind.F, Kind.I, Kind.W):
            for stage in mine.device_stages[device]:
                a, b = ((s.stage == stage) & (s.kind == kind) for s in (mine, theirs))
                assert mine.microbatch[a].tolist() == theirs.microbatch[b].tolist()
        rows, other_rows = mine.device == device, theirs.device == device
        steady = 3 * 2 * microbatches - 3 * (2 * devices - 1)  # the last 2p - 1 microbatches of a chunk drain
        for column, same in ((mine.stage, theirs.stage), (mine.kind, theirs.kind), (mine.microbatch, theirs.microbatch)):
            assert column[rows][:steady].tolist() == same[other_rows][:steady].tolist()


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("more", [0, 1, 4])
def test_no_bubble(devices, more):
    # S13: F = I = W, m >= 2p - 1: no idle time inside a span, the bound 6m + p - 1, and 2p chunks on every device
    microbatches = 2 * devices - 1 + more
    timeline = simulate(zb_v(devices, microbatches).check(), EQUAL)
    assert timeline.makespan == 6 * microbatches + devices - 1
    assert timeline.span_bubble_rate == 0
    assert timeline.peak_activations == [2 * devices] * devices


def test_bubbles_return_with_other_times():
    # S13
    assert simulate(zb_v(4, 8), UniformCosts(forward=2, input_grad=3, weight_grad=1)).makespan == 108


def test_first_lines_of_the_recipe():
    # S13, p = 4, device 2: 3 F(c0); 2 times F(c1), F(c0); 2 times F(c1), I(c1), W(c1)
    stream = " ".join(map(str, zb_v(4, 8).streams[2]))
    assert stream.startswith("2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5I0 5W0 5F3 5I1 5W1 2F5 2I0 2W0")


def test_placement():
    # a V: the last stage beside the first. With the loop placement the same streams are refused.
    schedule = zb_v(4, 8)
    assert schedule.device_stages == ((0, 7), (1, 6), (2, 5), (3, 4))
    with pytest.raises(ScheduleError, match="stage 4 belongs to device 0, not to device 3"):
        schedule.check_placement({stage: stage % 4 for stage in range(8)})


def test_static_memory_is_on_device_0():
    # M05: p = 8, 1 per microbatch and device (0.5 a chunk), layers 1 a chunk, embedding 3 on the first stage, head 3 on the last
    weights = [1.0] * 16
    weights[0] += 3
    weights[15] += 3
    timeline = simulate(zb_v(8, 16), UniformCosts(activation=0.5, weights=weights))
    assert timeline.peak_memory[0] == 8 + 2 + 3 + 3


def test_every_size():
    for p in range(1, 9):
        for m in range(1, 25):
            schedule = zb_v(p, m).check()
            assert len(schedule) == 6 * m * p
            if m % 3 == 1:
                assert simulate(schedule, EQUAL).makespan >= 6 * m + p - 1
