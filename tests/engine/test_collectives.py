"""Collectives as nodes of a run; D01, D03 and D04 of ../shared/cases.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipesim import (
    Cluster,
    Communication,
    DeadlockError,
    Kind,
    Schedule,
    ScheduleError,
    Timeline,
    UniformCosts,
    generate,
    monte_carlo,
    simulate,
    simulate_many,
)

D = {"forward": 1, "backward": 2}


def collectives(run: Timeline, step: int = 0) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """(device, op) to its times."""
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for number in np.flatnonzero(run.traffic.collective).tolist():
        key = (int(run.traffic.device[number]), str(run.traffic.op(number)))
        found.setdefault(key, []).append((run.traffic_start[step, number], run.traffic_end[step, number]))
    return found


# -- gradient reductions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reduction", "exposed", "step"), [(4, [4, 2, 0, 0], 37), (8, [8, 6, 4, 2], 41)])
def test_d01_reduction_hides_in_the_last_bubble(reduction: float, exposed: list[float], step: float) -> None:
    run = simulate(generate("1f1b", 4, 8), UniformCosts(**D, reduction=reduction))
    ends = [run.end[0, bound - 1] for bound in run.schedule.device_slots[1:]]
    assert ends == [33, 31, 29, 27]
    assert list(collectives(run).values()) == [[(end, end + reduction)] for end in ends]
    assert [max(0, end + reduction - 33) for end in ends] == exposed
    assert run.makespan == step


def test_d03_every_microbatch_or_once() -> None:
    def total(every: bool) -> float:
        run = simulate(generate("1f1b", 4, 8), UniformCosts(**D, reduction=4, reduce_every_microbatch=every))
        own = run.traffic.device == 0
        return float((run.traffic_end - run.traffic_start)[0, own].sum())

    assert (total(True), total(False)) == (32, 4)


def test_every_microbatch_in_order_on_the_lane() -> None:
    # one device: F0 B0 F1 B1 end gradients at 3 and 6; reductions of 4 at 3-7 and, behind it, 7-11
    schedule = Schedule.from_text("0F0 0B0 0F1 0B1")
    run = simulate(schedule, UniformCosts(**D, reduction=4, reduce_every_microbatch=True))
    assert collectives(run) == {(0, "0REDUCE_GRAD0"): [(3, 7)], (0, "0REDUCE_GRAD1"): [(7, 11)]}
    assert run.makespan == 11


def test_buckets_begin_during_the_last_backward() -> None:
    # last backward of device 0: 7-9, of device 1: 5-7. Two buckets of 2 each begin at the middle and the end, one after the other
    run = simulate(generate("1f1b", 2, 2), UniformCosts(**D, reduction=4, buckets=2))
    assert collectives(run) == {(0, "0REDUCE_GRAD0"): [(8, 10), (10, 12)], (1, "1REDUCE_GRAD0"): [(6, 8), (8, 10)]}
    # 4 buckets of 0.25 each hide all but the last: 9 + 0.25
    assert simulate(generate("1f1b", 2, 2), UniformCosts(**D, reduction=1, buckets=4)).makespan == 9.25


def test_the_update_waits_for_its_reduction_and_the_barrier_for_all() -> None:
    # p=2, m=2: backwards end at 9 and 7, reductions of 4 at 13 and 11. With the barrier U at 13 on both, without it at 13 and 11.
    costs = UniformCosts(**D, reduction=4, optimizer=1)
    for barrier, starts in ((True, [13, 13]), (False, [13, 11])):
        run = simulate(generate("1f1b", 2, 2), costs, barrier=barrier)
        update = run.schedule.kind[run.schedule.slot_row] == int(Kind.U)
        assert run.start[0, update].tolist() == starts
        assert [sum(causes.values()) for causes in run.idle_causes()] == [run.makespan - busy for busy in run.busy]
        assert run.idle_causes()[0]["gradient reduction"] == 4


@pytest.mark.parametrize("barrier", [True, False])
def test_steps_end_when_their_reductions_have(barrier: bool) -> None:
    # updates that take no time stand at the end of a step all the same: device 0 begins its second step at 13, device 1 gets its input at 14
    run = simulate(generate("1f1b", 2, 2), UniformCosts(**D, reduction=4), steps=2, barrier=barrier)
    assert run.start[1, [0, 4]].tolist() == [13, 14]
    assert run.traffic_end.tolist() == [[13, 11], [26, 24]]
    assert run.makespan == 26


def test_a_reduction_over_replicas_begins_when_all_have_come() -> None:
    # one stage on two devices, data parallel: gradients at 3 and 5; 4 more for both
    schedule = Schedule.from_text("0F0 0B0\n0F1 0B1")
    costs = UniformCosts(forward=[[1, 3]], backward=2, reduction=4)
    assert collectives(simulate(schedule, costs)) == {(0, "0REDUCE_GRAD0"): [(5, 9)], (1, "0REDUCE_GRAD0"): [(5, 9)]}
    # in two buckets: entered at 2 and 4, and at 3 and 5
    half = UniformCosts(forward=[[1, 3]], backward=2, reduction=4, buckets=2)
    assert collectives(simulate(schedule, half))[0, "0REDUCE_GRAD0"] == [(4, 6), (6, 8)]


@pytest.mark.parametrize("name", ["chimera", "gems", "dualpipe"])
def test_bidirectional_schedules_meet(name: str) -> None:
    schedule = generate(name, 4, 8)
    run = simulate(schedule, UniformCosts(**D, reduction=1))
    plain = simulate(schedule, UniformCosts(**D))
    assert np.array_equal(run.end, plain.end)
    last: dict[tuple[int, int], float] = {}
    for stage, kind, slot in zip(schedule.stage, schedule.kind, schedule.row_slot, strict=True):
        if kind in (Kind.B, Kind.W):
            key = int(stage), int(schedule.slot_device[slot])
            last[key] = max(last.get(key, 0), plain.end[0, slot])
    for stage, devices in schedule.replicas.items():
        times = {times[0] for (_, op), times in collectives(run).items() if op == f"{stage}REDUCE_GRAD0"}
        assert len(times) == 1
        assert next(iter(times))[0] >= max(last[stage, device] for device in devices)


def test_asynchronous_updates_each_have_theirs() -> None:
    # one device, one stage: F 1, B 2, then U waits for a reduction of 4: every microbatch takes 7
    schedule = Schedule.from_text("0F0 0B0 0U0 0F1 0B1 0U1", weights="stash")
    run = simulate(schedule, UniformCosts(**D, reduction=4))
    assert run.start[0].tolist() == [0, 1, 7, 7, 8, 14]
    assert collectives(run) == {(0, "0REDUCE_GRAD0"): [(3, 7)], (0, "0REDUCE_GRAD1"): [(10, 14)]}


# -- listed ----------------------------------------------------------------------------------------------------------------


def test_listed_reductions_are_issued_where_they_stand() -> None:
    # stage 1's gradient is there at 6, its reduction listed behind 0B0 at 9: 9-13, then stage 0's
    schedule = Schedule.from_text("0F0 1F0 1B0 0B0 1REDUCE_GRAD 0REDUCE_GRAD")
    run = simulate(schedule, UniformCosts(forward=1, backward=[2, 4], reduction=4))
    assert collectives(run) == {(0, "1REDUCE_GRAD0"): [(8, 12)], (0, "0REDUCE_GRAD0"): [(12, 16)]}
    # one that is listed before others are due runs beside them
    early = Schedule.from_text("0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD")
    assert simulate(early, UniformCosts(forward=1, backward=[2, 4], reduction=4)).makespan == 14


def test_a_member_that_never_enters_is_reported() -> None:
    lacking = Schedule.from_text("0F0 0B0 0REDUCE_GRAD\n0F1 0B1")
    with pytest.raises(ScheduleError, match=r"0REDUCE_GRAD is listed on device 0 and not on device 1"):
        simulate(lacking, UniformCosts(**D))
    late = Schedule.from_text("0F0 0B0 0U0 0REDUCE_GRAD0")
    with pytest.raises(ScheduleError, match="stands after 0U0"):
        simulate(late, UniformCosts(**D, reduction=1))


@pytest.mark.parametrize("reduction", [0, 1])
def test_reductions_in_opposite_order_deadlock(reduction: float) -> None:
    # each waits in the one that it lists first, as NCCL would
    crossed = Schedule.from_text("0F0 1F0 1B0 0B0 0REDUCE_GRAD 1REDUCE_GRAD\n0F1 1F1 1B1 0B1 1REDUCE_GRAD 0REDUCE_GRAD")
    with pytest.raises(DeadlockError) as error:
        simulate(crossed, UniformCosts(**D, reduction=reduction))
    text = str(error.value)
    assert "device 0 -> device 1" in text
    assert (
        "1REDUCE_GRAD, which stands behind 0REDUCE_GRAD on device 0" in text or "0REDUCE_GRAD, which stands behind 1REDUCE_GRAD on device 1" in text
    )
    # implied ones go as they are ready
    simulate(crossed.without_communication(), UniformCosts(**D, reduction=1))


def test_a_member_that_cannot_come_is_named() -> None:
    # stage 0 has replicas on devices 0 and 1. Device 0 has ended; 1 and 2 hang, as one sends an activation and the other a gradient
    schedule = Schedule.from_text("""
        0F0 0SEND_F0 0RECV_B0 0B0
        0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2""")
    assert simulate(schedule, UniformCosts(**D, reduction=1)).makespan > 0
    with pytest.raises(DeadlockError) as error:
        simulate(schedule, UniformCosts(**D, reduction=1), communication=Communication(sends="rendezvous"))
    assert "device 0 has ended its step: waits for 0REDUCE_GRAD, which device 1 has not entered" in str(error.value)
    assert "0SEND_F2 (position 3) waits for device 2 to post 1RECV_F2" in str(error.value)


# -- tied weights and sharded ones ---------------------------------------------------------------------------------------------


def test_d04_tied_embedding() -> None:
    run = simulate(generate("1f1b", 4, 8), UniformCosts(**D, tied=[(0, 3)], tied_reduction=1))
    assert collectives(run) == {(0, "0REDUCE_GRAD0"): [(33, 34)], (3, "0REDUCE_GRAD0"): [(33, 34)]}
    assert run.makespan == 34
    v = generate("zb-v", 4, 8)
    assert len(simulate(v, UniformCosts(**D, tied=[(0, 7)], tied_reduction=1)).traffic) == 0
    assert simulate(v, UniformCosts(**D, tied=[(0, 7)], tied_reduction=1)).makespan == simulate(v, UniformCosts(**D)).makespan


def test_tied_weights_come_after_their_own_reductions() -> None:
    # as D01: the stages' reductions end at 37 and 31; then 1 more, and updates after it on both
    run = simulate(generate("1f1b", 4, 8), UniformCosts(**D, reduction=4, tied=[(0, 3)], tied_reduction=1, optimizer=1), barrier=False)
    assert collectives(run)[3, "0REDUCE_GRAD0"] == [(37, 38)]
    update = run.schedule.kind[run.schedule.slot_row] == int(Kind.U)
    assert run.start[0, update].tolist() == [38, 35, 33, 38]


def test_slots_wait_for_their_unshard() -> None:
    # UNSHARD takes 2: stage 0's from 0 to 2, stage 1's, listed with it, from 2 to 4 beside 0F0; backwards 5-7, and 0B0 after another UNSHARD 7-9
    schedule = Schedule.from_text("0UNSHARD 1UNSHARD 0F0 0RESHARD 1F0 1B0 0UNSHARD 0B0")
    run = simulate(schedule, UniformCosts(**D, unshard=2))
    assert run.start[0].tolist() == [2, 4, 5, 9]
    assert collectives(run) == {(0, "0UNSHARD"): [(0, 2), (7, 9)], (0, "1UNSHARD"): [(2, 4)]}
    # without a time it is nothing
    assert simulate(schedule, UniformCosts(**D)).start[0].tolist() == [0, 1, 2, 4]


# -- together with the rest ----------------------------------------------------------------------------------------------------


def test_collectives_slow_compute_down() -> None:
    # 0UNSHARD of a later stage runs from 0 to 2 beside F0 of 4, at half speed: 1 is done by 2, 3 more by 5
    schedule = Schedule.from_text("1UNSHARD 0F0 1F0")
    run = simulate(schedule, UniformCosts(forward=4, unshard=[0, 2]), communication=Communication(interference={"collective": 2}))
    assert run.end[0].tolist() == [5, 9]


def test_buckets_under_interference() -> None:
    # B from 1 to 3; the first bucket begins when half of it has passed, at 2, and takes 4: the other half takes 2 instead of 1, so B ends at 4
    run = simulate(
        Schedule.from_text("0F0 0B0"), UniformCosts(**D, reduction=8, buckets=2), communication=Communication(interference={"collective": 2})
    )
    assert run.end[0].tolist() == [1, 4]
    assert collectives(run) == {(0, "0REDUCE_GRAD0"): [(2, 6), (6, 10)]}


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v", "chimera", "pipedream"])
def test_messages_do_not_care_about_collectives(name: str) -> None:
    # without updates and barriers nothing waits for a reduction, with lanes or without
    schedule = generate(name, 4, 8)
    latency: dict[str, Any] = {"latency": 0.25, "message": 1, "bandwidth": 2}
    plain = simulate(schedule, UniformCosts(**D, **latency), engine="simpy")
    if schedule.weights == "flush":
        run = simulate(schedule, UniformCosts(**D, **latency, reduction=3))
        assert np.array_equal(run.end, plain.end)
        assert np.array_equal(run.arrived, plain.arrived)
    again = simulate(schedule, UniformCosts(**D, **latency, reduction=3), communication=Communication(receives="early"))
    lanes = simulate(schedule, UniformCosts(**D, **latency, reduction=3), communication=Communication(interference={"offload": 2}))
    assert np.array_equal(again.end, lanes.end)
    assert np.array_equal(collectives(again)[0, "0REDUCE_GRAD0"], collectives(lanes)[0, "0REDUCE_GRAD0"])


def test_many_runs_and_jitter_count_collectives() -> None:
    # D01 with R = 8: 41, and without the barrier the span of device 0
    schedule, costs = generate("1f1b", 4, 8), UniformCosts(**D, reduction=8)
    assert simulate_many(schedule, costs, 1).makespan.tolist() == [41]
    assert (
        simulate_many(schedule, costs, 1, barrier=False).iteration_time.tolist() == [simulate(schedule, costs, barrier=False).iteration_time] == [41]
    )
    assert monte_carlo(schedule, costs).makespan.tolist() == [41]
    assert monte_carlo(schedule, UniformCosts(**D, latency=0.25), cluster=None).undisturbed == 37
    held = Cluster(unit="slot", communication=Communication(sends="rendezvous", blocking=True))
    found = monte_carlo(generate("gpipe", 2, 4), UniformCosts(**D, latency=0.25), cluster=held, slow_devices={1: 1.0})
    assert found.undisturbed == 17  # C10


def test_the_compiled_engine_says_that_it_does_not_cover_this() -> None:
    pytest.importorskip("numba")
    with pytest.raises(ScheduleError, match="collectives"):
        simulate(generate("1f1b", 4, 8), UniformCosts(**D, reduction=4), engine="compiled")
