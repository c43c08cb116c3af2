from __future__ import annotations

import numpy as np
import pytest

from pipesim import Schedule, ScheduleError, UniformCosts, simulate
from pipesim.schedules.pipedream import pipedream
from pipesim.testing import SIZES, check_generator

COSTS = UniformCosts(forward=1, backward=2, weights=10)
GRID = [(p, m) for p in range(1, 9) for m in range(1, 25)]


def versions(schedule: Schedule) -> list[int]:
    return [schedule.staleness.num_versions[device, stages[0]] for device, stages in enumerate(schedule.device_stages)]


def test_no_flush():
    # S28: one fill and one drain, (16 + 3)·3, where flushing every 4 would take 4·21 = 84; versions 4, 3, 2, 1.
    schedule = pipedream(4, 16)
    assert simulate(schedule, COSTS).makespan == 57
    assert versions(schedule) == [4, 3, 2, 1]


def test_memory_of_the_stash():
    # M09: version and activation per microbatch in flight, (p - s)·(10 + 1).
    assert simulate(pipedream(4, 16), COSTS).peak_memory == [44, 33, 22, 11]


@pytest.mark.parametrize("devices", range(1, 9))
def test_delay_is_p_minus_1_minus_s(devices):
    # PipeDream section 3.3: stage s (from 0) computes with weights n - 1 - s updates old, forward and backward alike.
    staleness = pipedream(devices, 24).staleness
    for stage in range(devices):
        steady = slice(devices, None)
        assert set(staleness.forward_delay[stage, steady]) == {devices - 1 - stage}
        assert np.array_equal(staleness.forward_version, staleness.backward_version)


@pytest.mark.parametrize("devices", range(1, 9))
def test_vertical_sync(devices):
    # Section 3.3: with vertical sync all stages use w^(t - n + 1). So every stage keeps n versions ([4, 4, 4, 4] at p = 4).
    schedule = pipedream(devices, 24, vertical_sync=True)
    staleness = schedule.staleness
    assert versions(schedule) == [devices] * devices
    assert (staleness.forward_delay[:, devices:] == devices - 1).all()
    assert (staleness.forward_version == staleness.forward_version[0]).all()
    assert np.array_equal(staleness.forward_version, staleness.backward_version)
    # the streams, and so the times, are the same
    assert simulate(schedule, COSTS).makespan == simulate(pipedream(devices, 24), COSTS).makespan


def test_vertical_sync_costs_memory_on_the_last_stages():
    # M09's sizes with 4 versions on every stage: 40 + (4 - s).
    assert simulate(pipedream(4, 16, vertical_sync=True), COSTS).peak_memory == [44, 43, 42, 41]


def test_vertical_sync_with_replicas_counts_microbatches():
    # Stage 0 has two replicas, so its version v has the gradients of 2v microbatches; for the others that is version 2v.
    staleness = pipedream(4, 16, replicas=(2, 1, 1), vertical_sync=True).staleness
    assert np.array_equal(staleness.forward_version[1], 2 * staleness.forward_version[0])
    assert np.array_equal(staleness.forward_version[2], 2 * staleness.forward_version[0])
    # The other way round: stage 1 updates once per two microbatches, so it has the last whole round, ⌊v/2⌋.
    staleness = pipedream(3, 16, replicas=(1, 2), vertical_sync=True).staleness
    assert np.array_equal(staleness.forward_version[1], staleness.forward_version[0] // 2)


def test_vertical_sync_must_have_the_weights():
    # 1F1 comes before 1U0, and device 0 gives microbatch 1 its version 1.
    text = "weights: vertical\n0F0 0B0 0U0 0F1 0B1 0U1\n1F0 1B0 1F1 1U0 1B1 1U1"
    with pytest.raises(ScheduleError, match=r"device 1, position 2, op 1F1: needs the weights that its first stage used"):
        Schedule.from_text(text).staleness  # noqa: B018


def test_vertical_sync_with_a_frozen_first_stage():
    # Stage 0 is not trained, so the version of stage 1 travels.
    text = "weights: vertical\n0F0 0F1\n1F0 1F1 1B0 1U0 1B1 1U1\n2F0 2B0 2U0 2F1 2B1 2U1"
    staleness = Schedule.from_text(text).staleness
    assert staleness.forward_version.tolist() == [[0, 0], [0, 0], [0, 0]]
    assert staleness.forward_delay.tolist() == [[0, 0], [0, 1], [0, 1]]


def test_replicas_take_microbatches_in_turn():
    # VGG-16's 15-1 configuration: warm-up 1 on stage 0's ranks and 0 on stage 1, as the public runtime computes it.
    schedule = pipedream(16, 60, replicas=(15, 1))
    assert [str(op) for op in schedule.streams[3][:4]] == ["0F3", "0F18", "0B3", "0U0"]
    assert [str(op) for op in schedule.streams[15][:3]] == ["1F0", "1B0", "1U0"]


def test_replicas_must_add_up():
    with pytest.raises(ScheduleError, match=r"replicas \[2, 1\] add up to 3 and there are 4 devices"):
        pipedream(4, 8, replicas=(2, 1))


@pytest.mark.parametrize("options", [{}, {"vertical_sync": True}])
def test_every_size(options):
    assert check_generator(pipedream, options=options).legal == SIZES
    for devices, microbatches in GRID:
        schedule = pipedream(devices, microbatches, **options)
        assert simulate(schedule, COSTS).makespan == 3 * (microbatches + devices - 1)
        # w microbatches are in flight. The first w all have version 0, and the following ones one more each, so a short run
        # has m - w + 1 versions in use at most, and the latest beside them.
        in_flight = [min(devices - (0 if options else s), microbatches) for s in range(devices)]
        assert versions(schedule) == [min(w, microbatches - w + 2) for w in in_flight]


@pytest.mark.parametrize("vertical_sync", [False, True])
def test_every_way_to_replicate(vertical_sync):
    for replicas in ((2, 2), (3, 1), (1, 3), (2, 1, 1), (1, 2, 1), (1, 1, 2)):
        for microbatches in (1, 2, 3, 5, 8, 13):
            schedule = pipedream(4, microbatches, replicas=replicas, vertical_sync=vertical_sync).check()
            assert (schedule.staleness.forward_delay >= 0).all()
            simulate(schedule, COSTS)
