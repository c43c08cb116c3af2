"""Costs that a user types."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pipesim import Cluster, CostModel, Pair, Schedule, ScheduleError, UniformCosts, generate
from pipesim.costs import CollectiveCosts
from pipesim.dataflow import messages

SPLIT = Schedule.from_text("0F0 0I0 0W0\n1F0 1B0")


def durations(schedule: Schedule = SPLIT, **options: Any) -> list[float]:
    return [float(value) for value in UniformCosts(**options).durations(schedule)]


def test_it_is_a_cost_model() -> None:
    assert isinstance(UniformCosts(), CostModel)


@pytest.mark.parametrize(
    ("given", "b", "i", "w"),
    [
        ({}, 2, 1, 1),  # design: I = W = 1, B = I + W
        ({"backward": 3}, 3, 1.5, 1.5),
        ({"input_grad": 4}, 5, 4, 1),
        ({"weight_grad": 4}, 5, 1, 4),
        ({"input_grad": 4, "weight_grad": 2}, 6, 4, 2),
        ({"backward": 5, "input_grad": 4}, 5, 4, 1),
        ({"backward": 5, "weight_grad": 2}, 5, 3, 2),
        ({"backward": 5, "input_grad": 4, "weight_grad": 3}, 5, 4, 3),  # measured halves take longer than the whole
    ],
)
def test_backward_times_that_are_left_out_follow(given: dict[str, float], b: float, i: float, w: float) -> None:
    assert durations(**given) == [1, i, w, 1, b]


def test_a_half_longer_than_the_whole_is_refused() -> None:
    for given, name in (({"backward": 2, "input_grad": 3}, "input_grad"), ({"backward": 2, "weight_grad": 3}, "weight_grad")):
        with pytest.raises(ScheduleError, match=f"{name} is longer than backward"):
            durations(**given)


def test_scalars_lists_and_tables() -> None:
    schedule = generate("gpipe", devices=2, microbatches=2)
    assert durations(schedule, forward=3, backward=4) == [3, 3, 4, 4, 3, 3, 4, 4]
    assert durations(schedule, forward=[3, 5], backward=4) == [3, 3, 4, 4, 5, 5, 4, 4]
    assert durations(schedule, forward=np.array([[1, 2], [3, 4]]), backward=[[5, 6], [7, 8]]) == [1, 2, 5, 6, 3, 4, 7, 8]


def test_updates_and_recomputation_have_their_times() -> None:
    schedule = Schedule.from_text("0F0 0R0 0B0 0U0\n1F0 1B0 1U0")
    assert durations(schedule, forward=[3, 4], backward=5, optimizer=[7, 8]) == [3, 3, 5, 7, 4, 5, 8]
    # R is listed for stage 0 only; as a cost the recomputation is added where it is not
    assert durations(schedule, forward=[3, 4], backward=5, recompute_policy="always") == [3, 3, 5, 0, 4, 9, 0]


def test_recomputation_is_added_to_the_input_half() -> None:
    assert durations(SPLIT, forward=3, input_grad=1, weight_grad=1, recompute_policy="always") == [3, 4, 1, 3, 5]


def test_a_pair_is_the_sum_of_its_two_unless_overlap_says_otherwise() -> None:
    schedule = Schedule.from_text("0F0 (0F1;0B0)OVERLAP_F_B (0F2;0F3)PAIR 0B1 0B2 0B3")
    assert all(isinstance(slot, Pair) for slot in schedule.streams[0][1:3])
    assert durations(schedule, forward=1, backward=2) == [1, 3, 2, 2, 2, 2]
    assert durations(schedule, forward=1, backward=2, overlap=2.5) == [1, 2.5, 2, 2, 2, 2]


def test_a_gradient_is_as_large_as_its_activation() -> None:
    schedule = generate("gpipe", devices=3, microbatches=1)
    found = messages(schedule)
    sizes = UniformCosts(message=[10, 20, 99]).message_bytes(schedule)
    assert {found.label(number): float(size) for number, size in enumerate(sizes)} == {
        "activation of microbatch 0, stage 0 to stage 1": 10,
        "activation of microbatch 0, stage 1 to stage 2": 20,
        "gradient of microbatch 0, stage 2 to stage 1": 20,
        "gradient of microbatch 0, stage 1 to stage 0": 10,
    }


def test_B02_heterogeneous_lists_of_the_wrong_length() -> None:
    schedule = generate("1f1b", devices=4, microbatches=8)
    for count in (3, 5, 8):
        for field in ("forward", "backward", "weights", "message", "activation", "optimizer"):
            costs = UniformCosts(**{field: [1] * count})
            with pytest.raises(ScheduleError, match=rf"{field} has {count} values and the schedule has 4 stages"):
                _ = costs.durations(schedule), costs.stage_bytes(schedule), costs.message_bytes(schedule), costs.activation_bytes(schedule)
    chunks = Schedule.from_text("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0")  # v = 2: four values are wanted, and p = 2 are given
    with pytest.raises(ScheduleError, match="forward has 2 values and the schedule has 4 stages"):
        UniformCosts(forward=[1, 1]).durations(chunks)
    with pytest.raises(ScheduleError, match=r"shape \(4, 7\) .* 4 stages and 8 microbatches"):
        UniformCosts(forward=np.ones((4, 7))).durations(schedule)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, -math.inf, "1,5", "1", True, [1, "x"], [1, -1], [], [[[1]]], 1j, b"1", {}, [True]])
def test_B03_durations_that_are_none(value: Any) -> None:
    for field in ("forward", "backward", "input_grad", "weight_grad", "optimizer", "activation", "weights", "latency"):
        with pytest.raises(ScheduleError, match=field):
            UniformCosts(**{field: value})


def test_B03_zero_is_legal() -> None:
    assert durations(forward=0, backward=0) == [0] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bandwidth": 0}, "bandwidth"),
        ({"latency": [1, 2]}, "latency must be one number"),
        ({"unit": "ms"}, "unit"),
        ({"recompute_policy": "sometimes"}, "recompute_policy"),
        ({"recompute_policy": ["always"] * 4}, "recompute_policy"),
        ({"recompute_policy": 1}, "recompute_policy"),
        ({"activation": 1, "stage_input": 2}, "stage_input is 2"),
        ({"activation": 1, "activation_freed_by_input_grad": 2}, "activation_freed_by_input_grad is 2"),
        ({"unit": "s"}, "forward is missing"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        UniformCosts(**options)


def test_per_stage_fields_take_no_table() -> None:
    with pytest.raises(ScheduleError, match="optimizer belongs to a stage"):
        UniformCosts(optimizer=np.ones((2, 1))).durations(SPLIT)


def test_numbers_of_other_types() -> None:
    assert durations(forward=np.float32(0.5), backward=np.int64(2)) == [0.5, 1, 1, 0.5, 2]


def test_stages_scale_to_chunks() -> None:
    """Numbers of one of two stages; with two chunks per device, four stages, each takes half. Messages do not shrink."""
    costs = UniformCosts(forward=4, backward=8, message=6, weights=10, activation=2, stages=2)
    chunks = Schedule.from_text("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0")
    assert costs.durations(chunks).tolist() == [2, 2, 4, 4, 2, 2, 4, 4]
    assert costs.stage_bytes(chunks)["weights"].tolist() == [5] * 4
    assert costs.activation_bytes(chunks).kept.tolist() == [[1.0]] * 4
    assert set(costs.message_bytes(chunks).tolist()) == {6}


def test_in_seconds_a_schedule_of_forwards_needs_no_backward() -> None:
    assert durations(Schedule.from_text("0F0 0F1\n1F0 1F1"), forward=[2, 3], unit="s") == [2, 2, 3, 3]
    assert durations(Schedule.from_text("0F0 0F1\n1F0 1F1"), forward=2, unit="s") == [2] * 4


# -- collectives -------------------------------------------------------------------------------------------------------

SLOTS = Cluster(unit="slot")


def test_it_says_what_collectives_cost() -> None:
    schedule = generate("1f1b", devices=4, microbatches=8)
    costs = UniformCosts(reduction=[1, 2, 3, 4], unshard=0.5, tied=[(0, 3)], tied_reduction=2, buckets=3)
    assert isinstance(costs, CollectiveCosts)
    assert costs.reductions(schedule, SLOTS).tolist() == [1, 2, 3, 4]
    assert costs.unshards(schedule, SLOTS).tolist() == [0.5] * 4
    assert costs.tied_reductions(schedule, SLOTS).tolist() == [2]
    assert (costs.buckets, costs.reduce_every_microbatch) == (3, False)


def test_by_default_no_collective_takes_time() -> None:
    schedule, costs = generate("1f1b", devices=4, microbatches=8), UniformCosts()
    assert not costs.reductions(schedule, SLOTS).any()
    assert not costs.unshards(schedule, SLOTS).any()
    assert costs.tied_reductions(schedule, SLOTS).tolist() == []


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("0F0 0B0 3F0 3B0\n1F0 1B0 2F0 2B0", 0),  # D04: first and last stage on one device
        ("0F0 3F0\n1F0\n2F0", 0),
        ("0F0\n1F0\n2F0\n3F0", 2),
        # Chimera: each of devices 0 and 3 holds a replica of both
        ("0F0 3F1\n1F0 2F1\n2F0 1F1\n3F0 0F1", 0),
        # a replica of the first stage stands alone
        ("0F0 3F0 3F1\n1F0 2F1\n2F0 1F1\n0F1", 2),
    ],
)
def test_tied_stages_of_the_same_devices_need_no_reduction(text: str, time: float) -> None:
    assert UniformCosts(tied="0+3", tied_reduction=2).tied_reductions(Schedule.from_text(text), SLOTS).tolist() == [time]


def test_a_chunk_takes_its_share_of_a_reduction_and_shared_weights_do_not_shrink() -> None:
    # numbers of one of 4 stages, in a schedule with 8: half the weights each; microbatches do not matter
    schedule = generate("interleaved", devices=4, microbatches=8)
    costs = UniformCosts(reduction=3, unshard=2, tied="0+7", tied_reduction=1, stages=4, microbatches=16)
    assert costs.reductions(schedule, SLOTS).tolist() == [1.5] * 8
    assert costs.unshards(schedule, SLOTS).tolist() == [1.0] * 8
    assert costs.tied_reductions(schedule, SLOTS).tolist() == [1.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reduction": -1}, "reduction holds -1.0, which is negative"),
        ({"unshard": math.nan}, "unshard holds nan, which is not finite"),
        ({"tied": "0+3", "tied_reduction": [1, 2]}, "tied_reduction must be one number"),
        ({"tied_reduction": 1}, "tied names no stages"),
        ({"tied": [(0, 3), (3, 5)]}, "no stage in two of them"),
        ({"tied": [(0,)]}, "groups of two or more stages"),
        ({"tied": "0-3"}, "tied must be groups of stages"),
        ({"tied": [0, 3]}, "tied must be groups of stages"),
        ({"tied": [(0, -3)]}, "a stage of tied must be at least 0, got -3"),
        ({"buckets": 0}, "buckets must be"),
        ({"buckets": 1.5}, "buckets must be"),
        ({"reduce_every_microbatch": 1}, "reduce_every_microbatch must be True or False"),
    ],
)
def test_wrong_costs_of_collectives_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        UniformCosts(**given)


def test_tied_stages_must_be_there() -> None:
    with pytest.raises(ScheduleError, match=r"tied names stage 7, and the schedule has stages 0\.\.1"):
        UniformCosts(tied="0+7").tied_stages(SPLIT)


def test_a_reduction_belongs_to_a_stage() -> None:
    with pytest.raises(ScheduleError, match="reduction belongs to a stage, not to a microbatch"):
        UniformCosts(reduction=[[1.0], [2.0]]).reductions(SPLIT, SLOTS)
