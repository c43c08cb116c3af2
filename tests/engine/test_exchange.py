"""Fragments of listings: C01, C03 and C08 of ../shared/cases.md."""

from __future__ import annotations

from typing import Any

import pytest

from pipesim import Cluster, Communication, Compute, DeadlockError, Link, Receive, ScheduleError, Send, exchange

BLOCKING = Communication(sends="rendezvous", blocking=True)
RENDEZVOUS = Communication(sends="rendezvous", stream="device")

BOTH_FIRST: list[list[Any]] = [[Send(1, "x"), Receive(1, "y")], [Send(0, "y"), Receive(0, "x")]]


def test_c01_both_send_first() -> None:
    for communication in (RENDEZVOUS, BLOCKING):
        with pytest.raises(DeadlockError, match=r"device (0|1) -> device (1|0) -> device \1") as error:
            exchange(BOTH_FIRST, communication=communication)
        cycle = next(line for line in str(error.value).splitlines() if line.startswith("  the cycle: "))
        assert "send x to device 1 (position 0)" in cycle
        assert "send y to device 0 (position 0)" in cycle
    assert exchange(BOTH_FIRST).makespan == 0
    assert exchange(BOTH_FIRST, communication=Communication(batched=True, sends="rendezvous")).makespan == 0
    # one rank the other way round
    assert exchange([BOTH_FIRST[0], BOTH_FIRST[1][::-1]], communication=RENDEZVOUS).makespan == 0


def test_c03_listings_that_hang() -> None:
    first = "0SEND_F1 2RECV_F0 2F0\n1SEND_F0 1RECV_F1 1F1"
    assert exchange(first).makespan == 1
    with pytest.raises(DeadlockError, match=r"0SEND_F1 \(position 0\).*1SEND_F0 \(position 0\)"):
        exchange(first, communication=RENDEZVOUS)
    assert exchange("0SEND_F1 2RECV_F0 2F0\n1RECV_F1 1SEND_F0 1F1", communication=RENDEZVOUS).makespan == 1
    # the second listing of the thread, receive first on rank 1
    with pytest.raises(DeadlockError, match=r"0SEND_F2 \(position 1\) waits for device 1 to post 1RECV_F2.*stands behind 3SEND_B0 \(position 1\)"):
        exchange("2SEND_F1 0SEND_F2 2RECV_B0\n3RECV_F1 3SEND_B0 1RECV_F2", communication=RENDEZVOUS)


def test_c08_sizes_that_differ() -> None:
    size = 2**20
    with pytest.raises(ScheduleError, match=r"'act' from device 0 to device 1 has 12582912 bytes where it is sent and 8388608 where it is received"):
        exchange([[Send(1, "act", 12 * size)], [Receive(0, "act", 8 * size)]])
    link = Cluster(unit="slot", inside=Link(1, 2 * size))
    assert exchange([[Send(1, "act", 12 * size)], [Receive(0, "act", 12 * size)]], cluster=link).makespan == 7
    assert exchange([[Send(1, "act", 12 * size)], [Receive(0, "act")]], cluster=link).makespan == 7


def test_fragments_with_compute() -> None:
    # compute waits for the receives before it: 2 + 1 (hop) + 3; the receive after it is posted when it ends
    streams: list[list[Any]] = [[Compute("f", 2), Send(1, "a"), Send(1, "b")], [Receive(0, "a"), Compute("g", 3), Receive(0, "b")]]
    found = exchange(streams, cluster=Cluster(unit="slot", inside=Link(1)))
    assert found.start == ((0, 2, 2), (0, 3, 6))
    assert found.end == ((2, 2, 2), (3, 6, 6))


@pytest.mark.parametrize(
    ("streams", "text"),
    [
        ([[Send(1, "x")], []], "send x to device 1 .position 0. has no other end"),
        ([[], [Receive(0, "x"), Receive(0, "x")]], "receives 2 messages 'x'"),
        ([[Send(5, "x")], []], "the devices are 0..1"),
        ([[Send(0, "x"), Receive(0, "x")], []], "from device 0 to device 0"),
        ([["x"], []], "is no Send, Receive or Compute"),
        ([[Compute("f", float("nan"))]], "is no Send, Receive or Compute"),
        ([[Send(1, "x", "5 MB")], [Receive(0, "x")]], "is no Send, Receive or Compute"),
        ([[Send(1, 3)], [Receive(0, 3)]], "3 for a name; right is a text"),
        ([[Send("1", "x")], [Receive(0, "x")]], "device 0, position 0: the device of .* must be a whole number"),
        ([[Send(1, "x")], [Receive(False, "x")]], "device 1, position 0: the device of .* must be a whole number"),
        ([[Send(1, "x"), Send(1, "y")], [Receive(0, "y"), Receive(0, "x")]], "messages cross .*send x.*send y.*receive y.*receive x"),
        ("0SEND_F2\n1F2", "no device lists 1RECV_F2"),
        ("0SEND_F2\n1F2 1RECV_F2", "1F2 stands before the RECV of 0SEND_F2"),
    ],
)
def test_fragments_that_are_wrong(streams: Any, text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        exchange(streams)


@pytest.mark.parametrize("option", [{"duration": float("nan")}, {"duration": "1"}, {"size": -1.0}])
def test_numbers_of_a_listing_that_are_none(option: Any) -> None:
    with pytest.raises(ScheduleError, match="must be a finite number of at least 0"):
        exchange("0F0", **option)
