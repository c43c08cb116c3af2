"""Making schedules, and what is derived from them."""

from __future__ import annotations

import numpy as np
import pytest

from pipesim import Kind, Op, Pair, Schedule, ScheduleError, generate

# S19's order of Chimera, p=4, m=4: microbatches 0 and 1 go down, 2 and 3 go up, so every stage has two replicas
CHIMERA = """
device 0 | 0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1
device 1 | 1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1
device 2 | 1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3
device 3 | 0F2 0F3 3F0 3B0 3F1 3B1 0B2 0B3
"""


def test_counts_and_placement_follow_from_the_streams() -> None:
    schedule = Schedule.from_text(CHIMERA).check()
    assert (schedule.num_devices, schedule.num_stages, schedule.num_microbatches, len(schedule)) == (4, 4, 4, 32)
    assert schedule.placement == {0: (0, 3), 1: (1, 2), 2: (1, 2), 3: (0, 3)}
    assert schedule.replicas == schedule.placement
    assert schedule.device_stages == ((0, 3), (1, 2), (1, 2), (0, 3))


def test_a_pair_is_one_slot_of_two_rows() -> None:
    pair = Pair(Op(0, Kind.F, 1), Op(0, Kind.B, 0))
    schedule = Schedule.from_streams([["0F0", pair, (0, "B", 1)]])
    assert (len(schedule), schedule.num_slots) == (4, 3)
    assert schedule.slot_row.tolist() == [0, 1, 3]
    assert schedule.slot_second_row.tolist() == [-1, 2, -1]
    assert schedule.row_slot.tolist() == [0, 1, 1, 2]
    assert [schedule.slot(number) for number in range(3)] == [Op(0, Kind.F, 0), pair, Op(0, Kind.B, 1)]
    assert schedule.where(2) == "device 0, position 1, op 0B0"


def test_ops_that_do_not_compute_take_no_slot() -> None:
    schedule = Schedule.from_text("0UNSHARD 0F0 0B0 0REDUCE_GRAD")
    assert schedule.num_slots == 2
    assert schedule.row_slot.tolist() == [-1, 0, 1, 1]
    plain = schedule.check().without_communication()
    assert plain == Schedule.from_text("0F0 0B0")
    assert plain.without_communication() is plain


def test_tables_of_rows() -> None:
    schedule = Schedule.from_text("0F0 0F1 0R1 0B1 0I0 0W0\n1F1 1F0 1B1 1B0").check()
    assert schedule.rows_of(Kind.F).tolist() == [[0, 1], [7, 6]]
    assert schedule.rows_of(Kind.R).tolist() == [[-1, 2], [-1, -1]]
    assert schedule.backward_rows.tolist() == [[4, 3], [9, 8]]
    assert schedule.release_rows.tolist() == [[5, 3], [9, 8]]


def test_equality_sees_streams_graph_and_policy_and_not_the_name() -> None:
    text = "0F0 0B0\n1F0 1B0"
    schedule = Schedule.from_text(text)
    assert schedule == Schedule.from_text(text, name="other")
    assert schedule == Schedule.from_text(text, graph=[(0, 1)])  # the chain, written out
    assert schedule != Schedule.from_text(text, graph=[])
    assert schedule != Schedule.from_text(text, weights="latest")
    assert schedule != Schedule.from_text("0F0 0B0\n1F0 1B0\n", offload_to={0: 1})
    assert schedule != Schedule.from_streams([["0F0", "0B0"], ["1F0", "1B0"], []])
    assert schedule != Schedule.from_text("0F0 0I0\n1F0 1B0")
    assert (schedule == text) is False


def test_columns_cannot_be_changed() -> None:
    stage = np.array([0, 0])
    schedule = Schedule.from_columns([(stage, [Kind.F, Kind.B], 0)])
    stage[0] = 7
    assert schedule.stage.tolist() == [0, 0]
    with pytest.raises(ValueError, match="read-only"):
        schedule.stage[0] = 7


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([0, 0], [0, 1, 1], 0), "lengths"),
        (([0.0, 0.5], [0, 1], 0), "whole numbers"),
        (([-1, 0], [0, 1], 0), "stage must lie within 0"),
        (([0, 0], [0, 300], 0), "kind must lie within 0..14"),
        (([0, 0], [0, 1], 2**40), "microbatch must lie within"),
        (([0, 0], [0, 1], -2), "microbatch must lie within"),
    ],
)
def test_columns_that_cannot_be_a_schedule(columns: tuple[object, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_columns([columns])


@pytest.mark.parametrize(
    "op", ["0X0", (0, "X", 0), (0, 99, 0), (-1, "F", 0), (0, "F", -1), (0, "F", 1.5), (True, "F", 0), (0, "F", True), (0, "F"), None, 3]
)
def test_streams_that_cannot_be_a_schedule(op: object) -> None:
    with pytest.raises(ScheduleError):
        Schedule.from_streams([["0F0", op]])


def test_unknown_weight_policy() -> None:
    with pytest.raises(ScheduleError, match="weights must be one of flush, stash"):
        Schedule.from_text("0F0 0B0", weights="none")


def test_updates_stand_at_the_end_in_the_order_of_the_last_gradients() -> None:
    """Device 0 ends stage 2 first, device 1 ends stage 1 first."""
    text = "0F0 2F0 2B0 0B0\n1F0 3F0 3I0 1I0 1W0 3W0"
    full = Schedule.from_text(text).check().with_updates()
    assert full == Schedule.from_text("0F0 2F0 2B0 0B0 2U0 0U0\n1F0 3F0 3I0 1I0 1W0 3W0 1U0 3U0")
    assert full.check().with_updates() is full
    forward_only = Schedule.from_text("0F0\n1F0").check()
    assert forward_only.with_updates() is forward_only


def test_repr_says_what_it_is() -> None:
    assert repr(generate("1f1b", 4, 8)) == "<Schedule '1f1b': 4 devices, 4 stages, 8 microbatches, 64 ops, weights flush>"


# -- cases ---------------------------------------------------------------------------------------------------------------

LOOP = {stage: stage % 4 for stage in range(12)}
# zig-zag: down the devices, up again, down again
ZIG_ZAG = {stage: stage % 8 if stage % 8 < 4 else 7 - stage % 8 for stage in range(12)}


def _one_microbatch(placement: dict[int, int]) -> Schedule:
    """All forwards of a device in the order of its stages, then the backwards in the reverse order."""
    devices = [[stage for stage, device in placement.items() if device == number] for number in range(4)]
    return Schedule.from_streams([[(s, "F", 0) for s in own] + [(s, "B", 0) for s in reversed(own)] for own in devices])


def test_S20_stage_to_device_map() -> None:
    for placement, owned in (
        (LOOP, ((0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11))),
        (ZIG_ZAG, ((0, 7, 8), (1, 6, 9), (2, 5, 10), (3, 4, 11))),
    ):
        schedule = _one_microbatch(placement).check()
        assert schedule.device_stages == owned
        assert schedule.check_placement(placement) is schedule
        assert sorted(stage for stages in schedule.device_stages for stage in stages) == list(range(12))
    with pytest.raises(ScheduleError, match="stage 4 belongs to device 3, not to device 0"):
        _one_microbatch(LOOP).check_placement(ZIG_ZAG)
    with pytest.raises(ScheduleError, match="no place for it"):
        _one_microbatch(LOOP).check_placement({stage: LOOP[stage] for stage in range(11)})
    # the device that reports the loss is the one of the last stage: with 8 stages device 3 in a loop, device 0 in a zig-zag
    assert _one_microbatch({stage: LOOP[stage] for stage in range(8)}).placement[7] == (3,)
    assert _one_microbatch({stage: ZIG_ZAG[stage] for stage in range(8)}).placement[7] == (0,)
