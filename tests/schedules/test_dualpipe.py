from __future__ import annotations

import pytest

from pipesim import Schedule, ScheduleError, UniformCosts, simulate
from pipesim.op import Kind
from pipesim.schedules.dualpipe import dualpipe


@pytest.mark.parametrize(("devices", "microbatches"), [(4, 8), (8, 16)])
def test_equal_to_the_recorded_order(shared_data, devices, microbatches):
    recorded = Schedule.from_csv(shared_data / "dualpipe" / f"DualPipe_p{devices}_m{microbatches}.csv")
    assert dualpipe(devices, microbatches) == recorded


@pytest.mark.parametrize(
    ("devices", "microbatches", "times", "makespan"),
    [
        (8, 20, (1, 1, 1, 3), 66),  # S15
        (8, 20, (2, 2, 1, 5), 115),  # S15
        (8, 20, (2, 3, 1, 6), 139),  # S15: F != I, so the formula, which gives 141, is only an upper value
        (4, 8, (1, 1, 1, 3), 26),  # S15
        (8, 16, (1, 1, 1, 3), 54),  # S17
        (8, 20, (1, 1, 1, 2.5), 59),  # the repository's table: bubble 4.5
        (8, 20, (1, 1, 1, 2), 52),  # the repository's table: bubble 3
    ],
)
def test_makespan(devices, microbatches, times, makespan):
    forward, input_grad, weight_grad, pair = times
    costs = UniformCosts(forward=forward, input_grad=input_grad, weight_grad=weight_grad, overlap=pair)
    assert simulate(dualpipe(devices, microbatches).check(), costs).makespan == makespan


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 6), (4, 8), (6, 14), (8, 20)])
def test_middle_devices_idle_by_the_formula(devices, microbatches):
    # (p/2 - 1)(FB + B - 3W), F = I >= W, with FB anything from the longer of the two to their sum.
    schedule = dualpipe(devices, microbatches).check()
    for forward, weight_grad, pair in ((1, 1, 2), (1, 1, 2.5), (1, 0.5, 2.5), (2, 1, 3), (2, 1, 5), (3, 2, 6), (3, 3, 9)):
        backward = forward + weight_grad
        timeline = simulate(schedule, UniformCosts(forward=forward, input_grad=forward, weight_grad=weight_grad, overlap=pair))
        idle = timeline.makespan - timeline.busy[devices // 2]
        assert idle == pytest.approx((devices / 2 - 1) * (pair + backward - 3 * weight_grad), abs=1e-9)


@pytest.mark.parametrize(("devices", "microbatches"), [(8, 20), (8, 16), (4, 8)])
@pytest.mark.parametrize("times", [(1, 1, 1, 3), (1, 5, 2, 4)])
def test_m04_peak_is_one_more_than_the_devices_whatever_the_durations(devices, microbatches, times):
    forward, input_grad, weight_grad, pair = times
    costs = UniformCosts(forward=forward, input_grad=input_grad, weight_grad=weight_grad, overlap=pair, weights=1)
    timeline = simulate(dualpipe(devices, microbatches).check(), costs)
    assert timeline.peak_activations == [devices + 1] * devices
    # Stages of size 1: two of them on each device, in all two replicas of the model.
    assert [timeline.memory(device).categories["weights"].max() for device in range(devices)] == [2] * devices
    assert timeline.schedule.replicas == {stage: tuple(sorted((stage, devices - 1 - stage))) for stage in range(devices)}


def test_every_legal_size_is_complete_and_runs_and_every_other_is_refused():
    for devices in range(1, 9):
        for microbatches in range(1, 25):
            if devices % 2 or microbatches % 2 or microbatches < 2 * devices:
                with pytest.raises(ScheduleError, match=f"got {devices} devices and {microbatches} microbatches") as caught:
                    dualpipe(devices, microbatches)
                assert "\n" not in str(caught.value)
                continue
            schedule = dualpipe(devices, microbatches).check()
            assert (schedule.num_devices, schedule.num_stages, schedule.num_microbatches) == (devices, devices, microbatches)
            assert int((schedule.kind == int(Kind.F)).sum()) == devices * microbatches
            simulate(schedule, UniformCosts(forward=1, input_grad=2, weight_grad=1, overlap=3))


@pytest.mark.parametrize(("devices", "microbatches"), [(8, 14), (8, 15), (3, 12)])
def test_s17_illegal_sizes(devices, microbatches):
    with pytest.raises(ScheduleError, match="even number of devices, and an even number of microbatches of at least twice as many"):
        dualpipe(devices, microbatches)
