"""SEND and RECV in their order, and what a run may choose about them; C02, C10 and C14 of ../shared/cases.md."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from pipesim import (
    Cluster,
    Communication,
    DeadlockError,
    Link,
    Schedule,
    ScheduleError,
    Timeline,
    UniformCosts,
    available,
    generate,
    lower,
    simulate,
    simulate_many,
)

FB = UniformCosts(forward=1, backward=2)
HOP = UniformCosts(forward=1, backward=2, latency=0.25)
BLOCKING = Communication(sends="rendezvous", blocking=True)
RENDEZVOUS = Communication(sends="rendezvous", stream="device")


def slots(run: Timeline, device: int) -> list[tuple[float, float]]:
    bounds = run.schedule.device_slots
    own = slice(bounds[device], bounds[device + 1])
    return list(zip(run.start[0, own].tolist(), run.end[0, own].tolist(), strict=True))


# -- known answers -----------------------------------------------------------------------------------------------------------


def test_c02_blocking_sends() -> None:
    assert simulate(generate("1f1b", 2, 1), FB, communication=BLOCKING).makespan == 6
    assert simulate(generate("gpipe", 4, 8), FB, communication=BLOCKING).makespan == 33
    with pytest.raises(DeadlockError, match=r"0SEND_F1 .*\n.*1SEND_B0 ") as error:
        simulate(generate("1f1b", 2, 2), FB, communication=BLOCKING)
    # the pair as it is seen in a hang, and the way round
    assert "device 0 is stuck at 0SEND_F1 (position 3): waits for device 1 to post 1RECV_F1 (position 4)" in str(error.value)
    assert "device 1 is stuck at 1SEND_B0 (position 3): waits for device 0 to post 0RECV_B0 (position 4)" in str(error.value)
    with pytest.raises(DeadlockError):
        simulate(generate("1f1b", 4, 8), FB, communication=BLOCKING)


@pytest.mark.parametrize(("devices", "microbatches", "makespan"), [(2, 2, 9), (4, 8, 33)])
def test_c02_buffered_or_fused(devices: int, microbatches: int, makespan: float) -> None:
    schedule = generate("1f1b", devices, microbatches)
    assert simulate(schedule, FB).makespan == makespan
    assert simulate(lower(schedule), FB).makespan == makespan
    assert simulate(lower(schedule, "late"), FB).makespan == makespan
    # Megatron's fused send and receive; p=2, m=2 by hand: F1 of device 0 ends at 2, [SEND_F1 RECV_B0] meets [SEND_B0 RECV_F1] at 4,
    # B0 ends at 6; F1 and B1 of device 1 at 7; B1 at 9
    assert simulate(schedule, FB, communication=Communication(sends="rendezvous", blocking=True, batched=True)).makespan == makespan


def test_c02_a_held_lane_is_not_busy() -> None:
    run = simulate(generate("gpipe", 2, 4), HOP, communication=BLOCKING)
    assert run.busy == [12, 12]
    assert [sum(causes.values()) for causes in run.idle_causes()] == [5, 5]


@pytest.mark.parametrize(("devices", "microbatches", "overlapped", "blocking"), [(2, 4, 15.5, 17.0), (4, 8, 34.5, 41.5)])
def test_c10_exposed_communication(devices: int, microbatches: int, overlapped: float, blocking: float) -> None:
    schedule = generate("gpipe", devices, microbatches)
    assert simulate(schedule, HOP).makespan == overlapped
    assert simulate(schedule, HOP, communication=BLOCKING).makespan == blocking


def test_c14_shape_messages() -> None:
    # microseconds; the hop is 10, the transfer 100
    schedule = Schedule.from_text("\n".join(f"{stage}F0" for stage in range(4)))
    costs = UniformCosts(forward=1000, message=100, bandwidth=1, latency=10)
    assert simulate(schedule, costs).makespan == 4330
    assert simulate(schedule, costs, communication=Communication(shape_messages=True)).makespan == 4360


# -- order on streams --------------------------------------------------------------------------------------------------------

# device 1 posts the receive of microbatch 1 before it has sent microbatch 0 on (pytorch#188833)
EARLY = "0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F1 1SEND_F1\n2RECV_F0 2F0 2RECV_F1 2F1"
LATE = EARLY.replace("1RECV_F0 1RECV_F1 1F0 1SEND_F0", "1RECV_F0 1F0 1SEND_F0 1RECV_F1")
SLOW = UniformCosts(forward=[[1, 10], [1, 1], [5, 5]])


def test_head_of_line_stall() -> None:
    # microbatch 1 is at device 1 at 11. On one stream its RECV holds up 1SEND_F0, ready at 2: device 2 runs 11-16, 16-21.
    stalled = simulate(Schedule.from_text(EARLY), SLOW)
    assert slots(stalled, 2) == [(11, 16), (16, 21)]
    # with the receive behind the send, with a stream per peer or none: 2-7, 12-17
    for text, stream in ((LATE, "device"), (EARLY, "peer"), (EARLY, "free")):
        run = simulate(Schedule.from_text(text), SLOW, communication=Communication(stream=stream))  # type: ignore[arg-type]
        assert slots(run, 2) == [(2, 7), (12, 17)]
    # and what stood at the head is visible: 1RECV_F1 from 1 to 11, 1SEND_F0 at 11
    times = {str(stalled.traffic.op(k)): (stalled.traffic_start[0, k], stalled.traffic_end[0, k]) for k in range(len(stalled.traffic))}
    assert times["1RECV_F1"] == (1, 11)
    assert times["1SEND_F0"] == (11, 11)


def test_rendezvous_waits_for_the_receive() -> None:
    # messages take 2; stage 1 takes 3. Eager: they leave at 1 and 3, device 1 runs 3-6, 6-9. Else the second RECV is posted at 6: 8-11.
    costs = UniformCosts(forward=[1, 3], message=2, bandwidth=1)
    schedule = Schedule.from_text("0F0 0F1\n1F0 1F1")
    assert slots(simulate(schedule, costs), 1) == [(3, 6), (6, 9)]
    run = simulate(schedule, costs, communication=Communication(sends="rendezvous"))
    assert slots(run, 1) == [(3, 6), (8, 11)]
    assert (run.sent.tolist(), run.departed.tolist(), run.arrived.tolist()) == ([[1, 2]], [[1, 6]], [[3, 8]])


def test_blocking_eager_holds_both_lanes() -> None:
    # the hop takes 1. Device 0: 0-1, held to 2, 2-3, held to 4; device 1: 2-3, held to 4, 4-5
    run = simulate(Schedule.from_text("0F0 0F1\n1F0 1F1"), UniformCosts(forward=1, latency=1), communication=Communication(blocking=True))
    assert slots(run, 0) == [(0, 1), (2, 3)]
    assert slots(run, 1) == [(2, 3), (4, 5)]


def test_a_stream_serves_one_message_at_a_time() -> None:
    # 0F0 sends to two stages of a graph. Each link takes 2, free side by side; on one stream the second message leaves when the first has left.
    schedule = Schedule.from_text("0F0\n1F0\n2F0\n3F0", graph=[(0, 1), (0, 2), (1, 3), (2, 3)])
    costs = UniformCosts(forward=1, message=2, bandwidth=1)
    assert simulate(schedule, costs).start[0].tolist() == [0, 3, 3, 6]
    assert simulate(lower(schedule), costs).start[0].tolist() == [0, 3, 5, 8]
    assert simulate(lower(schedule), costs, communication=Communication(stream="peer")).start[0].tolist() == [0, 3, 3, 6]


def test_offloads_share_the_stream_of_the_device() -> None:
    # the RECV of microbatch 1 is at the head from 1 on, so OFFLOAD waits for it until 11, and the RELOAD's backward with it
    text = "0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1RECV_F1 1F0 1OFFLOAD0 1RELOAD0 1B0 1F1 1B1"
    costs = UniformCosts(forward=[[1, 10], [1, 1]], backward=1, activation=1)
    assert slots(simulate(Schedule.from_text(text), costs), 1)[1] == (11, 12)
    assert slots(simulate(Schedule.from_text(text), costs, communication=Communication(stream="peer")), 1)[1] == (2, 3)


def test_crossings_are_errors() -> None:
    crossing = Schedule.from_text("0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F1 1RECV_F0 1F0 1F1")
    for stream in ("device", "peer"):
        with pytest.raises(ScheduleError, match=r"cross.*0SEND_F0 \(position 1\) before 0SEND_F1.*1RECV_F1 \(position 0\).*1RECV_F0"):
            simulate(crossing, FB, communication=Communication(stream=stream))  # type: ignore[arg-type]
    assert simulate(crossing, FB, communication=Communication(stream="free")).makespan == 3
    # blocking, each waits for the other's first
    with pytest.raises(DeadlockError, match=r"0SEND_F0 \(position 1\): waits for device 1 to post 1RECV_F0"):
        simulate(crossing, FB, communication=Communication(stream="free", sends="rendezvous", blocking=True))


def test_deadlock_names_what_stands_behind_what() -> None:
    text = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    assert simulate(Schedule.from_text(text), FB).makespan == 9
    with pytest.raises(DeadlockError) as error:
        simulate(Schedule.from_text(text), FB, communication=RENDEZVOUS)
    lines = str(error.value).splitlines()
    assert lines[0] == "the schedule cannot finish: device 0 -> device 1 -> device 0 wait for each other"
    assert lines[1] == (
        "  device 0 is stuck at 0B0 (position 5): waits for 0RECV_B0 (position 4), which stands behind 0SEND_F1 (position 3), "
        "which waits for device 1 to post 1RECV_F1 (position 4)"
    )
    assert lines[3] == (
        "  the cycle: device 0: 0SEND_F1 (position 3) waits for device 1 to post 1RECV_F1 (position 4), which stands behind 1SEND_B0 (position 3), "
        "which waits for device 0 to post 0RECV_B0 (position 4), which stands behind 0SEND_F1 (position 3)"
    )


# -- for every schedule ------------------------------------------------------------------------------------------------------

SMALL = [(1, 4), (2, 1), (4, 2), (2, 3), (4, 4)]


def some(name: str) -> list[Schedule]:
    found = []
    for devices, microbatches in SMALL:
        try:
            found.append(generate(name, devices, microbatches))
        except ScheduleError:
            continue
    return found


def uneven(schedule: Schedule) -> UniformCosts:
    """Durations that differ for every op, some of them nothing, and links with a latency and a bandwidth."""
    rng = np.random.default_rng(len(schedule))
    table = (schedule.num_stages, schedule.num_microbatches)
    return UniformCosts(
        forward=rng.uniform(0.5, 2, table) * (rng.random(table) > 0.1), input_grad=rng.uniform(0.5, 2, table), weight_grad=rng.uniform(0.5, 2, table),
        message=rng.uniform(0, 3, table), bandwidth=4, latency=0.3, activation=1, optimizer=rng.uniform(0, 1, table[0]),
    )  # fmt: skip


@pytest.mark.parametrize("name", available())
def test_free_eager_listings_are_the_implicit_run(name: str) -> None:
    for schedule in some(name):
        costs, flush = uneven(schedule), schedule.weights == "flush"
        for barrier in (True, False):
            plain = simulate(schedule, costs, engine="simpy", steps=1 + flush, barrier=barrier)
            # the second has lanes, for an interference that never happens
            for receives, factors in product(("early", "late"), ({}, {"collective": 2})):
                how = Communication(stream="free", interference=factors)
                run = simulate(lower(schedule, receives), costs, steps=1 + flush, barrier=barrier, communication=how)  # type: ignore[arg-type]
                for column in ("start", "end", "sent", "departed", "arrived", "offload_start", "offload_end"):
                    assert np.array_equal(getattr(run, column), getattr(plain, column)), (schedule, receives, column)


@pytest.mark.parametrize("name", available())
def test_every_way_finishes_or_says_why(name: str) -> None:
    for schedule in some(name)[-1:]:
        costs = uneven(schedule)
        for stream, sends, blocking, batched, receives in product(
            ("free", "device", "peer"), ("eager", "rendezvous"), (False, True), (False, True), ("early", "late")
        ):
            how = Communication(sends=sends, blocking=blocking, stream=stream, batched=batched, receives=receives)  # type: ignore[arg-type]
            # with lanes that go by events, for an interference that never happens
            by_events = replace(how, interference={"collective": 2})
            try:
                run = simulate(schedule, costs, communication=how)
            except DeadlockError as error:
                with pytest.raises(DeadlockError) as again:
                    simulate(schedule, costs, communication=by_events)
                assert str(again.value) == str(error)  # noqa: PT017
                assert "wait for each other" in str(error)  # noqa: PT017
                assert "the cycle: " in str(error)  # noqa: PT017
            except ScheduleError as error:
                assert stream != "free"
                assert "messages cross" in str(error)  # noqa: PT017
            else:
                other = simulate(schedule, costs, communication=by_events)
                for column in ("end", "departed", "arrived", "traffic_start", "traffic_end"):
                    if column.startswith("traffic") and how.is_default:
                        continue  # messages that go by themselves are no traffic
                    assert np.array_equal(getattr(run, column), getattr(other, column)), (how, column)
                assert (run.traffic_end >= run.traffic_start).all()
                assert (run.arrived >= run.departed).all()
                target = run.messages.target_slot
                assert (run.start[:, target] >= run.arrived).all()
                assert np.allclose(run.makespan - np.array(run.busy), [sum(causes.values()) for causes in run.idle_causes()])


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved"])
def test_a_stream_keeps_its_order(name: str) -> None:
    # on one stream a device's SENDs and RECVs follow each other in the order of their rows, none before the one before it has ended
    schedule = lower(generate(name, 4, 8))
    run = simulate(schedule, uneven(schedule))
    for device in range(4):
        own = np.flatnonzero(run.traffic.device == device)
        own = own[np.argsort(run.traffic.row[own])]
        assert (run.traffic_start[0, own[1:]] >= run.traffic_end[0, own[:-1]]).all()


# -- interference ------------------------------------------------------------------------------------------------------------


def test_interference_by_hand() -> None:
    # Slots take 4, messages 2; compute is half as fast beside them. Device 0: 0-4, then the message leaves 4-6, in which 1 of 4 is done: 4-9.
    # Device 1 begins at 6; from 9 to 11 the second message comes in: 3 are done, then 1 takes 2: 6-11; 11-15.
    costs = UniformCosts(forward=4, message=2, bandwidth=1)
    run = simulate(Schedule.from_text("0F0 0F1\n1F0 1F1"), costs, communication=Communication(interference={"p2p": 2}))
    assert slots(run, 0) == [(0, 4), (4, 9)]
    assert slots(run, 1) == [(6, 11), (11, 15)]
    assert run.arrived.tolist() == [[6, 11]]


def test_of_several_kinds_the_largest_factor_counts() -> None:
    # device 0 alone with stage 0, UNSHARD of stage 1 from 4 to 8, the message from 4 to 6: 4x slower while both, 2x while the collective:
    # 0.5 of 4 by 6, 1 more by 8, 2.5 left: 10.5
    schedule = Schedule.from_text("0F0 2UNSHARD 0F1 2F0 2F1\n1F0 1F1")
    costs = UniformCosts(forward=4, message=[2, 0, 0], bandwidth=1, unshard=[0, 0, 4])
    how = Communication(interference={"p2p": 4, "collective": 2})
    assert slots(simulate(schedule, costs, communication=how), 0)[:2] == [(0, 4), (4, 10.5)]


def test_offloads_interfere() -> None:
    # F0 ends at 2, OFFLOAD takes the host's link from 2 to 4: half of F1's 2 is done by then; 2-5
    schedule = Schedule.from_text("0F0 0OFFLOAD0 0F1 0B1 0RELOAD0 0B0")
    cluster = Cluster(unit="slot", host=Link(0, 1), communication=Communication(interference={"offload": 2}))
    assert slots(simulate(schedule, UniformCosts(forward=2, activation=2), cluster=cluster), 0)[1] == (2, 5)


def test_latency_alone_does_not_interfere() -> None:
    how = Communication(interference={"p2p": 2})
    assert simulate(generate("1f1b", 4, 8), HOP, communication=how).makespan == simulate(generate("1f1b", 4, 8), HOP).makespan


# -- the rest ----------------------------------------------------------------------------------------------------------------


def test_the_cluster_says_how_and_the_call_overrides() -> None:
    cluster = Cluster(unit="slot", communication=BLOCKING)
    schedule = generate("gpipe", 2, 4)
    assert simulate(schedule, HOP, cluster=cluster).makespan == 17
    assert simulate(schedule, HOP, cluster=cluster, communication=Communication()).makespan == 15.5
    assert simulate_many(schedule, HOP, 1, cluster=cluster).makespan.tolist() == [17]


def test_plain_runs_have_no_traffic_and_the_schedule_stays_implicit() -> None:
    schedule = generate("1f1b", 2, 2)
    assert len(simulate(schedule, FB).traffic) == 0
    run = simulate(schedule, FB, communication=Communication(sends="rendezvous"))
    assert run.schedule == schedule
    assert len(run.traffic) == 2 * len(run.messages)
    assert (run.traffic.row == -1).all()
    listed = lower(schedule)
    assert simulate(listed, FB).schedule == listed
    assert [listed.op(row) for row in simulate(listed, FB).traffic.row.tolist()] == [
        simulate(listed, FB).traffic.op(number) for number in range(len(run.traffic))
    ]


def test_the_compiled_engine_says_that_it_does_not_cover_this() -> None:
    pytest.importorskip("numba")
    with pytest.raises(ScheduleError, match="listed SEND and RECV"):
        simulate(lower(generate("1f1b", 2, 2)), FB, engine="compiled")
    with pytest.raises(ScheduleError, match="communication other than eager"):
        simulate(generate("1f1b", 2, 2), FB, engine="compiled", communication=BLOCKING)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sends": "eagre"}, "sends must be one of eager, rendezvous, got 'eagre'; did you mean 'eager'"),
        ({"stream": "devices"}, "did you mean 'device'"),
        ({"receives": 3}, "receives must be one of early, late"),
        ({"blocking": 1}, "blocking must be true or false"),
        ({"interference": {"p2q": 2}}, "did you mean 'p2p'"),
        ({"interference": {"p2p": 0.5}}, "at least 1"),
        ({"interference": {"p2p": float("nan")}}, "at least 1"),
        ({"interference": 2}, "must map kinds"),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        Communication(**options)
