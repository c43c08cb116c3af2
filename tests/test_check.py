"""What check() refuses, and that it says where."""

from __future__ import annotations

from typing import Any

import pytest

from pipesim import DeadlockError, Op, Pair, Schedule, ScheduleError, UniformCosts, generate, simulate
from pipesim.op import Kind


def refused(text: str, **options: Any) -> str:
    with pytest.raises(ScheduleError) as error:
        Schedule.from_text(text, **options).check()
    return str(error.value)


GOOD = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"


def test_a_good_schedule_is_returned() -> None:
    schedule = Schedule.from_text(GOOD)
    assert schedule.check() is schedule


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        # duplicate
        ("0F0 0F0 0B0", ("0F0 is listed twice", "device 0, position 0")),
        ("0F0 0B0\n1F0 1B0\n1F0", ("1F0 is listed twice", "device 1", "device 2")),
        ("0F0 0B0 0B0", ("0B0 is listed twice",)),
        # missing
        ("0F0 0F1 0B0 0B1\n1F0 1B0", ("1F1 is missing",)),
        ("0F0 0B0 0B1\n1F0 1B0 1F1 1B1", ("0F1 is missing", "needed by device 0, position 2, op 0B1")),
        ("0B0", ("0F0 is missing",)),
        ("0F0 0F1 0B0\n1F0 1B0 1F1 1B1", ("0B1 (or 0I1 and 0W1) is missing",)),
        ("0F0 0F2 0B0 0B2", ("microbatch 1 is missing",)),
        ("0F0 0B0\n2F0 2B0", ("stage 1 is missing",)),
        ("0F0 0B0\n1F0", ("stage 0 has a backward", "stage 1, has none")),
        ("0F0 0I0", ("0I0 has no W",)),
        ("0F0 0W0", ("0W0 has no I",)),
        ("0F0 0B0 0W0", ("halves I or W are listed too",)),
        ("0F0 0R0", ("0R0 recomputes for a backward that is not listed",)),
        ("0F0 0F1 0B0 0B1 0R2", ("0F2 is missing",)),
        ("0F0 0R0 0B0 0R0", ("0R0 is listed twice",)),
        # out of order
        ("0B0 0F0", ("0B0 before 0F0",)),
        ("0F0 0W0 0I0", ("0W0 before 0I0",)),
        ("0F0 0B0 0R0", ("0B0 before 0R0",)),
        ("0R0 0F0 0B0", ("0R0 before 0F0",)),
        ("1F0 0F0 1B0 0B0", ("1F0 before 0F0",)),
        ("0F0 1F0 0B0 1B0", ("0B0 before 1B0",)),
        # on another device
        ("0F0\n0B0", ("the activation of 0F0 is on device 0", "0B0 must stand there too")),
        ("0F0 0I0\n0W0", ("the activation of 0F0 is on device 0", "0W0")),
        ("0F0 0B0\n1F0 1B0 0R0", ("the activation of 0F0 is on device 0", "0R0")),
        # pairs
        ("(0F0;0B0)OVERLAP_F_B", ("0B0 shares a slot with 0F0",)),
        # updates
        ("0F0 0U0 0B0", ("the update stands before gradient 0B0",)),
        ("0F0 0B0 0U0 0U1", ("has one update per stage",)),
        ("0F0 0B0 0U1", ("updates of a stage count 0, 1, 2", "0U0 belongs here")),
        ("0F0 0B0 0U0\n1F0 1B0", ("stage 1 lists none",)),
        # no such stage or microbatch, without making a table of that size
        ("0F999999999", ("microbatch 0 is missing",)),
        ("0F0 0F999999999", ("microbatch 1 is missing",)),
        ("999999999F0", ("stage 0 is missing",)),
        ("0F0 999999999F0", ("stage 1 is missing",)),
        ("0REDUCE_GRAD 0F0 0B0 0REDUCE_GRAD", ("0REDUCE_GRAD is listed twice",)),
    ],
)
def test_refuses(text: str, parts: tuple[str, ...]) -> None:
    message = refused(text)
    for part in parts:
        assert part in message


def test_the_grid_is_shown_with_the_place_marked() -> None:
    message = refused("0F0 0F1 0B0 0B1\n1F0 1B1 1F1 1B0")
    assert message.splitlines() == [
        "device 1, position 1, op 1B1: 1B1 before 1F1, which it needs",
        "  device 0 | 0F0   0F1   0B0   0B1",
        "  device 1 | 1F0   >1B1< 1F1   1B0    <-- here",
    ]


def test_only_the_neighbourhood_of_a_large_grid_is_shown() -> None:
    streams = generate("1f1b", devices=40, microbatches=300).streams
    streams[20][100], streams[20][101] = streams[20][101], streams[20][100]
    streams[20][300] = streams[20][100]
    with pytest.raises(ScheduleError) as error:
        Schedule.from_streams(streams).check()
    lines = str(error.value).splitlines()
    assert len(lines) == 6
    assert max(map(len, lines)) < 200
    assert "<-- here" in lines[3]


def test_frozen_first_stages_need_no_backward() -> None:
    schedule = Schedule.from_text("0F0 0F1\n1F0 1B0 1F1 1B1").check()
    assert simulate(schedule, UniformCosts(forward=1, backward=2)).makespan == 1 + 2 * 3


def test_asynchronous_schedules_list_their_updates() -> None:
    assert "no update is listed" in refused(GOOD, weights="stash")
    assert "as many" in refused("0F0 0B0 0U0 0F1 0B1 0U1\n1F0 1B0 1U0 1U1\n1F1 1B1 1U0", weights="stash")


def test_a_pair_of_columns_must_be_two_compute_ops() -> None:
    for columns in (
        (0, [Kind.F, Kind.B], 0, [True, False]),  # nothing before it
        ([0, 0, 0], [Kind.F, Kind.F, Kind.F], [0, 1, 2], [False, True, True]),  # three
        (0, [Kind.UNSHARD, Kind.F], [-1, 0], [False, True]),
    ):
        with pytest.raises(ScheduleError, match="a pair is two compute ops"):
            Schedule.from_columns([columns]).check()
    with pytest.raises(ScheduleError, match="lacks its microbatch"):
        Schedule.from_columns([(0, [Kind.F, Kind.B], [0, -1])]).check()


# -- stage graph -----------------------------------------------------------------------------------------------------------

DIAMOND = [(0, 1), (0, 2), (1, 3), (2, 3)]


def test_a_graph_may_be_any_dag() -> None:
    text = "0F0 0B0\n1F0 1B0\n2F0 2B0\n3F0 3B0"
    run = simulate(Schedule.from_text(text, graph=DIAMOND), UniformCosts(forward=[1, 2, 5, 1], backward=[1, 1, 1, 1]))
    assert run.makespan == 1 + 5 + 1 + 1 + 1 + 1  # through the longer branch


def test_a_graph_names_stages_that_there_are() -> None:
    assert "0 -> 4, and no op of stage 4" in refused(GOOD, graph=[(0, 1), (0, 4)])


def test_B11_dependency_cycle_given_by_a_user_graph() -> None:
    text = "0F0\n1F0\n2F0"
    message = refused(text, graph=[(0, 1), (1, 2), (2, 0)])
    assert "cycle: 0 -> 1 -> 2 -> 0" in message
    assert "cycle: 1 -> 1" in refused(text, graph=[(0, 1), (1, 1)])
    with pytest.raises(ScheduleError, match="cycle"):
        simulate(Schedule.from_text(text, graph=[(0, 1), (1, 2), (2, 0)]))


@pytest.mark.parametrize("streams", [[], [[]], [[], []], [["0UNSHARD"]], [["0U0"]], [["0REDUCE_GRAD"]]])
def test_B11_a_run_of_0_ops_is_refused(streams: list[list[str]]) -> None:
    with pytest.raises(ScheduleError, match=r"lists no (op|forward) at all"):
        simulate(Schedule.from_streams(streams))


# -- cases -----------------------------------------------------------------------------------------------------------------


def test_B04_duplicate_missing_out_of_order_foreign_and_self_dependency() -> None:
    # the example of the case: p=2, m=1, d0=[F0,B0], d1=[B0,F0]
    message = refused("0F0 0B0\n1B0 1F0")
    assert "device 1, position 0, op 1B0: 1B0 before 1F0" in message
    assert "0F0 is listed twice" in refused("0F0 0B0 0F0")
    assert "0F0 is missing" in refused("0B0")
    assert "0B0 must stand there too" in refused("0F0\n1F0 1B0 0B0")
    with pytest.raises(ScheduleError, match="1F0 shares a slot with 0F0"):
        Schedule.from_streams([[Pair(Op(1, Kind.F, 0), Op(0, Kind.F, 0))]]).check()


def test_S08_a_dropped_remainder_is_refused() -> None:
    """p=2, v=2, m=3 as a generator that works in rounds of p lists it: microbatch 2 gets no second chunk."""
    text = "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 0F2 0B2\n1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 1F2 1B2"
    message = refused(text)
    assert "2F2 is missing: stage 2 has 2 forwards and there are 3 microbatches" in message


SENDS = "0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0"


def test_explicit_communication_has_both_ends() -> None:
    schedule = Schedule.from_text(SENDS).check()
    assert simulate(schedule.without_communication(), UniformCosts(forward=1, backward=2)).makespan == 6
    for word in ("0SEND_F0", "1RECV_F0", "1SEND_B0", "0RECV_B0"):
        assert f"{word} is missing" in refused(SENDS.replace(word, "."))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0SEND_F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0", "0SEND_F0 is listed twice"),
        ("0SEND_F0 0F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0", "0SEND_F0 stands before 0F0"),
        ("0F0 0SEND_F0 0B0 0RECV_B0\n1RECV_F0 1F0 1B0 1SEND_B0", "0RECV_B0 stands after 0B0"),
        ("0F0 0RECV_B0 0B0\n0SEND_F0 1RECV_F0 1F0 1B0 1SEND_B0", "0SEND_F0 belongs to device 0"),
        ("0F0 0SEND_F0 1F0 1B0 0B0", "no counterpart"),
    ],
)
def test_explicit_communication_stands_in_its_place(text: str, message: str) -> None:
    assert message in refused(text)


def test_C08_a_receive_without_its_send_is_an_error_and_never_a_hang() -> None:
    """A SEND and its RECV carry no size here: both ends belong to one edge, and the cost model gives that edge one size.

    So sizes cannot disagree; what can is which message an end speaks of, and that names the op, its edge and the device.
    """
    message = refused("0F0 0F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1")
    assert "device 0, position 1, op 0F1: 0SEND_F1 is missing: 0F1 -> 1F1 crosses devices" in message


OFFLOADS = "0F0 0OFFLOAD0 0F1 0RELOAD0 0B0 0B1\n1F0 1B0 1F1 1B1"


def test_offloads_go_out_and_come_back_once() -> None:
    Schedule.from_text(OFFLOADS, offload_to={0: 1}).check()
    Schedule.from_text(OFFLOADS, offload_to={0: None}).check()
    assert "0RELOAD0 is missing" in refused(OFFLOADS.replace("0RELOAD0", "."))
    assert "0OFFLOAD0 is missing" in refused(OFFLOADS.replace("0OFFLOAD0", "."))
    assert "0OFFLOAD0 is listed twice" in refused(OFFLOADS.replace("0F1", "0OFFLOAD0 0F1"))
    assert "the order must be" in refused("0F0 0RELOAD0 0OFFLOAD0 0B0")
    assert "the order must be" in refused("0F0 0OFFLOAD0 0B0 0RELOAD0")
    assert "the order must be" in refused("0F0 0OFFLOAD0 0RELOAD0")  # no backward to come back for
    assert "there is no such activation" in refused("0F0 0B0 0OFFLOAD1 0RELOAD1")
    assert "on device 0" in refused("0F0 0B0\n1F0 0OFFLOAD0 0RELOAD0 1B0")
    for target in ({0: 2}, {0: 0}, {5: 0}):
        assert "another of the devices 0..1" in refused(OFFLOADS, offload_to=target)


def test_what_only_a_run_can_see_passes_the_check() -> None:
    schedule = Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1").check()
    with pytest.raises(DeadlockError):
        simulate(schedule)
