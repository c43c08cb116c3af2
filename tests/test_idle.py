"""Idle time by cause, where communication has times of its own. All numbers are worked out by hand in the comments."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipesim import Kind, Schedule, Timeline, UniformCosts, generate, simulate
from pipesim.communication import Communication
from pipesim.idle import IDLE_CAUSES


@pytest.fixture(scope="module")
def by_hand() -> Any:
    spec = importlib.util.spec_from_file_location("_traffic", Path(__file__).parent / "traffic.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def causes(run: Timeline) -> list[dict[str, float]]:
    """What there is of each cause, after it has been seen that all add up."""
    for found, busy in zip(run.idle_causes(), run.busy, strict=True):
        assert tuple(found) == IDLE_CAUSES
        assert min(found.values()) >= -1e-12
        assert sum(found.values()) == pytest.approx(run.makespan - busy, rel=1e-12)
    return [{cause: time for cause, time in found.items() if time} for found in run.idle_causes()]


# -- gradient reductions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("time", "makespan"), [(4, 37), (8, 41)])
def test_a_reduction_after_the_last_backward(by_hand: Any, time: float, makespan: float) -> None:
    """D01: it ends at 33 - 2d + R, so device d drains for 2d after it; before, it waited for a peer 9 - 3d and warmed up d."""
    run = by_hand.reduced(time)
    assert run.makespan == run.iteration_time == makespan
    assert run.busy == [24] * 4
    assert causes(run) == [
        {"waiting for a peer": 9, "gradient reduction": time},
        {"warm-up": 1, "waiting for a peer": 6, "gradient reduction": time, "drain": 2},
        {"warm-up": 2, "waiting for a peer": 3, "gradient reduction": time, "drain": 4},
        {"warm-up": 3, "gradient reduction": time, "drain": 6},
    ]
    # idle 9 + R of 33 + R on every device
    assert run.bubble_fraction == pytest.approx((9 + time) / makespan, rel=1e-12)
    assert run.span_bubble_rate == pytest.approx(9 / 33, rel=1e-12)  # spans are of compute


def test_without_a_barrier_an_iteration_is_the_longest_span_with_its_reduction(by_hand: Any) -> None:
    """R=4: device d runs from d to 37 - 2d."""
    assert by_hand.reduced(4, barrier=False).iteration_time == 37


def updated(by_hand: Any, barrier: bool) -> Timeline:
    """Two devices. F=1, B=2: 0F0 0-1, 1F0 1-2, 1B0 2-4, 0B0 4-6. Reductions: device 0 6-7, device 1 4-9; U of 1 after them.

    With a barrier both U start at 9, else device 0's at 7.
    """
    run = simulate(Schedule.from_text("0F0 0B0 0U0\n1F0 1B0 1U0"), UniformCosts(forward=1, backward=2, optimizer=1), barrier=barrier)
    start, end = run.start.copy(), run.end.copy()
    start[0, [2, 5]] = [9 if barrier else 7, 9]
    end[0, [2, 5]] = start[0, [2, 5]] + 1
    ops = [(Kind.REDUCE_GRAD, 0, 0, 0, -1, -1, 6.0, 7.0), (Kind.REDUCE_GRAD, 1, 1, 0, -1, -1, 4.0, 9.0)]
    made: Timeline = by_hand.with_traffic(replace(run, start=start, end=end), ops)
    return made


def test_an_update_waits_for_its_reduction_first_and_then_at_the_barrier(by_hand: Any) -> None:
    assert causes(updated(by_hand, barrier=True)) == [
        {"waiting for a peer": 3, "gradient reduction": 1, "barrier": 2},
        {"warm-up": 1, "gradient reduction": 5},
    ]
    assert causes(updated(by_hand, barrier=False)) == [
        {"waiting for a peer": 3, "gradient reduction": 1, "drain": 2},
        {"warm-up": 1, "gradient reduction": 5},
    ]


@pytest.mark.parametrize(("begin", "reduction"), [(8, 4), (5, 4), (4, 3)])
def test_reductions_between_two_steps(by_hand: Any, begin: float, reduction: float) -> None:
    """A device works 0-3 and is reduced 3-5; its second step begins at 8, or at 5, or at 4 (it did not wait), and ends with 2 of reduction.

    So 3 to min(5, begin) are the first reduction's, and 2 the second's. Device 1 takes no time.
    """
    run = simulate(Schedule.from_text("0F0 0B0\n1F0 1B0"), UniformCosts(forward=[1, 0], backward=[2, 0]), steps=2)
    made = by_hand.with_traffic(run, [(Kind.REDUCE_GRAD, 0, 0, -1, -1, -1, 3.0, 5.0)])
    start = np.array([[0.0, 1.0, 1.0, 1.0], [begin, begin + 1, begin + 1, begin + 1]])
    sent = np.array([[1.0, 1.0], [begin + 1, begin + 1]])
    times = {"start": start, "end": start + np.array([1.0, 2.0, 0.0, 0.0]), "sent": sent, "departed": sent, "arrived": sent}
    made = replace(made, **times, traffic_start=np.array([[3.0], [begin + 3]]), traffic_end=np.array([[5.0], [begin + 5]]))
    found = made.idle_causes()[0]
    assert found["gradient reduction"] == reduction
    assert sum(found.values()) == pytest.approx(made.makespan - made.busy[0], rel=1e-12)


# -- weights -------------------------------------------------------------------------------------------------------------------


def test_waiting_for_weights(by_hand: Any) -> None:
    """0F0 0-1, weights of stage 1 fetched by device 0 from 0 to 3, so 1F0 runs 3-4 and has waited 2 for them.

    Device 1 does 2F0, from 4 to 5: its wait from the start is its warm-up.
    """
    run = simulate(Schedule.from_text("0F0 1UNSHARD 1F0\n2F0").without_communication(), UniformCosts())
    listed = Schedule.from_text("0F0 1UNSHARD 1F0\n2F0")
    run = replace(run, schedule=listed, start=np.array([[0.0, 3.0, 4.0]]), end=np.array([[1.0, 4.0, 5.0]]))
    made = by_hand.with_traffic(run, [(Kind.UNSHARD, 0, 1, -1, -1, -1, 0.0, 3.0)], rows=[1])
    assert causes(made) == [{"waiting for weights": 2, "drain": 1}, {"warm-up": 4}]


def test_a_fetch_before_the_first_op_begins_the_run(by_hand: Any) -> None:
    """The weights come from 0 to 2; 0F0 runs 2-3: a makespan of 3 with 2 of warm-up."""
    listed = Schedule.from_text("0UNSHARD 0F0")
    run = replace(simulate(listed.without_communication(), UniformCosts()), schedule=listed, start=np.array([[2.0]]), end=np.array([[3.0]]))
    made = by_hand.with_traffic(run, [(Kind.UNSHARD, 0, 0, -1, -1, -1, 0.0, 2.0)], rows=[0])
    assert (made.makespan, made.first_start) == (3, 0)
    assert causes(made) == [{"warm-up": 2}]


# -- blocking ------------------------------------------------------------------------------------------------------------------


def blocked(by_hand: Any) -> Timeline:
    """GPipe with p=2, m=1, F=1, B=2, hop 0.5, blocking: both lanes are held while a message is on its way.

    0F0 0-1; its message 1-1.5; 1F0 1.5-2.5, 1B0 2.5-4.5; the gradient 4.5-5; 0B0 5-7.
    """
    run = simulate(Schedule.from_text("0F0 0B0\n1F0 1B0"), UniformCosts(forward=1, backward=2, latency=0.5))
    ops = [
        (Kind.SEND_F, 0, 0, 0, 1, 0, 1.0, 1.5),
        (Kind.RECV_B, 0, 0, 0, 1, 1, 1.5, 5.0),
        (Kind.RECV_F, 1, 1, 0, 0, 0, 0.0, 1.5),
        (Kind.SEND_B, 1, 1, 0, 0, 1, 4.5, 5.0),
    ]
    return by_hand.with_traffic(run, ops, blocking=True)  # type: ignore[no-any-return]


def test_a_lane_that_is_held_is_idle_for_the_link(by_hand: Any) -> None:
    """Device 0 is held 1-1.5 and 4.5-5 and waits for device 1 between; device 1 is held 4.5-5 after its last op, then drains till 7."""
    run = blocked(by_hand)
    assert run.makespan == 7
    assert causes(run) == [
        {"waiting for the link": 1, "waiting for a peer": 3},
        {"warm-up": 1.5, "waiting for the link": 0.5, "drain": 2},
    ]
    # overlapped, the same times mean that device 0 does not wait for its own send, nor device 1 for its own
    assert causes(replace(run, blocking=False)) == [
        {"waiting for the link": 0.5, "waiting for a peer": 3.5},
        {"warm-up": 1.5, "drain": 2.5},
    ]


def test_a_rendezvous_is_a_wait_for_the_peer_and_its_transfer_the_link(by_hand: Any) -> None:
    """Device 0 sends at 1 to a device that is busy until 3 and takes 1 to carry: held 1-4, 2 of it for the peer, then 0F1 4-5."""
    schedule = Schedule.from_text("0F0 0F1\n2F0 1F0 2F1 1F1", graph=[(0, 1)])
    run = simulate(schedule, UniformCosts())
    start = np.array([[0.0, 4.0, 0.0, 4.0, 5.0, 7.0]])
    end = start + np.array([1.0, 1.0, 3.0, 1.0, 1.0, 1.0])
    sent = np.array([[1.0, 5.0]])
    run = replace(run, start=start, end=end, sent=sent, departed=np.array([[3.0, 6.0]]), arrived=np.array([[4.0, 7.0]]))
    made = by_hand.with_traffic(run, [(Kind.SEND_F, 0, 0, 0, 1, 0, 1.0, 4.0), (Kind.SEND_F, 0, 0, 1, 1, 1, 5.0, 7.0)], blocking=True)
    # device 0: 1-3 peer, 3-4 link; after its last op 6-7 is the link's, and the rest until 8 its drain
    assert causes(made)[0] == {"waiting for a peer": 2, "waiting for the link": 2, "drain": 2}
    # device 1: the first message was sent at 1, so 3-4 is the link's; the second at 5, so 6-7
    assert causes(made)[1] == {"waiting for the link": 2}


def test_blocking_in_the_engine() -> None:
    """C10: GPipe with p=2, m=4, F=1, B=2, 0.25 a hop, blocking rendezvous: 15 + 8 * 0.25 = 17.

    Device 0 is held 4 times to send and 4 times to receive, and waits for device 1 from 5 to 8. Device 1 starts at 1.25, is held for
    three more activations and four gradients, the last from 14.75 to 15, and drains for 2.
    """
    blocking = Communication(sends="rendezvous", blocking=True)
    run = simulate(generate("gpipe", 2, 4), UniformCosts(forward=1, backward=2, latency=0.25), communication=blocking)
    assert run.blocking
    assert run.makespan == 17
    assert causes(run) == [{"waiting for the link": 2, "waiting for a peer": 3}, {"warm-up": 1.25, "waiting for the link": 1.75, "drain": 2}]


def test_overlapped_in_the_engine() -> None:
    """The same, overlapped: 15 + 2 * 0.25. Device 0 waits from 4 to 7.25 for a gradient, that then takes 0.25; device 1 works without a gap."""
    run = simulate(generate("gpipe", 2, 4), UniformCosts(forward=1, backward=2, latency=0.25), communication=Communication(stream="peer"))
    assert run.makespan == 15.5
    assert causes(run) == [{"waiting for the link": 0.25, "waiting for a peer": 3.25}, {"warm-up": 1.25, "drain": 2.25}]


@pytest.mark.parametrize(("steps", "barrier"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("optimizer", [0, 0.5])
@pytest.mark.parametrize(
    ("name", "collective", "mode"),
    [
        ("1f1b", {"reduction": 3}, {}),
        ("chimera", {"reduction": 3}, {}),
        ("interleaved", {"reduction": 3, "buckets": 3}, {"stream": "device", "receives": "early"}),
        ("chimera", {"reduction": 0.5, "reduce_every_microbatch": True}, {"sends": "rendezvous"}),
        ("zb-v", {"reduction": 1, "tied": "0+3", "tied_reduction": 2}, {"interference": {"p2p": 1.5, "collective": 2}}),
        ("gpipe", {"tied": "0+3", "tied_reduction": 2}, {"blocking": True, "sends": "rendezvous"}),
        ("interleaved", {}, {"shape_messages": True, "blocking": True}),
        ("1f1b", {}, {"batched": True}),
    ],
)
def test_causes_add_up_whatever_the_communication(
    name: str, optimizer: float, barrier: bool, steps: int, collective: dict[str, Any], mode: dict[str, Any]
) -> None:
    costs = UniformCosts(forward=1, backward=2, optimizer=optimizer, message=1, bandwidth=2, latency=0.25, **collective)
    causes(simulate(generate(name, 4, 8), costs, steps=steps, barrier=barrier, communication=Communication(**mode)))
