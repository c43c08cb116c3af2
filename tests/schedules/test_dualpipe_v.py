from __future__ import annotations

import pytest

from pipesim import Schedule, ScheduleError, UniformCosts, simulate
from pipesim.op import Kind
from pipesim.schedules.dualpipe_v import dualpipe_v


@pytest.mark.parametrize(
    ("file", "devices", "microbatches"),
    [
        ("dualpipe/DualPipeV_p2_m4.csv", 2, 4),
        ("dualpipe/DualPipeV_p4_m8.csv", 4, 8),
        ("dualpipe/DualPipeV_p4_m10.csv", 4, 10),
        ("pytorch/dualpipev_4rank_10mb.csv", 4, 10),
    ],
)
def test_equal_to_recorded_orders(shared_data, file, devices, microbatches):
    assert dualpipe_v(devices, microbatches) == Schedule.from_csv(shared_data / file)


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 2), (1, 5), (2, 9), (3, 6), (4, 11), (5, 13), (8, 16), (8, 24)])
def test_equal_to_pytorch(devices, microbatches):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="PyTorch is not installed")
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    ranks = visualizer.get_schedule_ops(schedules.ScheduleDualPipeV, devices, microbatches, 2)
    streams = [[str(action) for action in rank if action is not None] for rank in ranks]
    assert dualpipe_v(devices, microbatches) == Schedule.from_streams(streams)


def test_makespan_of_four_devices():
    # 10 microbatches of 2 chunks, 3 each, and the bubble (p - 1)(FB + B - 3W) = 3·(3 + 2 - 3).
    timeline = simulate(dualpipe_v(4, 10).check(), UniformCosts())
    assert timeline.makespan == 60 + 6


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 2), (2, 5), (3, 6), (4, 11), (5, 10)])
def test_last_device_idles_by_the_formula(devices, microbatches):
    # (p - 1)(FB + B - 3W), F = I >= W: DualPipe's formula with PP = 2p stages.
    schedule = dualpipe_v(devices, microbatches).check()
    for forward, weight_grad, pair in ((1, 1, 2), (1, 1, 2.5), (1, 0.5, 2.5), (2, 1, 3), (2, 1, 5), (3, 2, 6), (3, 3, 9)):
        backward = forward + weight_grad
        timeline = simulate(schedule, UniformCosts(forward=forward, input_grad=forward, weight_grad=weight_grad, overlap=pair))
        idle = timeline.makespan - timeline.busy[-1]
        assert idle == pytest.approx((devices - 1) * (pair + backward - 3 * weight_grad), abs=1e-9)


@pytest.mark.parametrize("times", [(1, 1, 1, 3), (1, 5, 2, 4)])
def test_m04_one_replica_and_one_activation_more_than_the_stages(times):
    forward, input_grad, weight_grad, pair = times
    costs = UniformCosts(forward=forward, input_grad=input_grad, weight_grad=weight_grad, overlap=pair, weights=1)
    timeline = simulate(dualpipe_v(4, 8).check(), costs)
    assert timeline.peak_activations == [9] * 4
    assert [timeline.memory(device).categories["weights"].max() for device in range(4)] == [2] * 4
    assert not timeline.schedule.replicas
    assert timeline.schedule.device_stages == ((0, 7), (1, 6), (2, 5), (3, 4))


def test_every_legal_size_is_complete_and_runs_and_every_other_is_refused():
    for devices in range(1, 9):
        for microbatches in range(1, 25):
            if microbatches < 2 * devices:
                with pytest.raises(ScheduleError, match="at least twice as many microbatches as devices") as caught:
                    dualpipe_v(devices, microbatches)
                assert "\n" not in str(caught.value)
                continue
            schedule = dualpipe_v(devices, microbatches).check()
            assert (schedule.num_devices, schedule.num_stages, schedule.num_microbatches) == (devices, 2 * devices, microbatches)
            assert int((schedule.kind == int(Kind.F)).sum()) == 2 * devices * microbatches
            simulate(schedule, UniformCosts(forward=1, input_grad=2, weight_grad=1, overlap=3))
