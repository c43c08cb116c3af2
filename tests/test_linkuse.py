"""What links had to do. All numbers are worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipesim import Cluster, Communication, Link, Schedule, ScheduleError, Timeline, UniformCosts, generate, load, simulate
from pipesim.cluster import Node


def test_a_link_of_its_own_for_each_direction() -> None:
    """F=1, B=2, two microbatches of 3 units over a link of 2: 1.5 on the wire.

    Activations are ready at 1 and 2 and taken at 1 and 2.5; 1F0 2.5-3.5, 1F1 4-5, 1B0 5-7, 1B1 7-9; gradients 7-8.5 and 9-10.5;
    0B0 8.5-10.5, 0B1 10.5-12.5. Each direction is busy for 3 of 12.5.
    """
    run = simulate(Schedule.from_text("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"), UniformCosts(forward=1, backward=2, message=3, bandwidth=2))
    assert run.makespan == 12.5
    assert [tuple(row) for row in run.link_utilisation()] == [
        ("0 -> 1", 2.0, pytest.approx(3 / 12.5), pytest.approx(3 / 12.5), 6.0, 2, 0.5, 0.5),
        ("1 -> 0", 2.0, pytest.approx(3 / 12.5), pytest.approx(3 / 12.5), 6.0, 2, 0.0, 0.0),
    ]


def test_latency_is_not_carrying() -> None:
    """The hop of 10 is no work of the link, which carries 1 unit in 1."""
    run = simulate(Schedule.from_text("0F0\n1F0"), UniformCosts(message=1, bandwidth=1, latency=10))
    assert run.makespan == 13
    (row,) = run.link_utilisation()
    assert (row.link, row.busy_share, row.longest_wait, row.longest_delay) == ("0 -> 1", pytest.approx(1 / 13), 0, 0)


def test_without_a_bandwidth_there_is_nothing_to_say() -> None:
    run = simulate(generate("1f1b", 4, 8), UniformCosts(latency=1))
    assert run.link_utilisation() == []
    assert "busy_share" not in run.summary()


def test_offloads_use_the_hosts_link() -> None:
    """0F0 0-1; 4 units at 2 a slot: away 1-3, back 3-5; 0B0 5-7. Each direction is busy for 2 of 7."""
    schedule = Schedule.from_text("0F0 0OFFLOAD0 0RELOAD0 0B0")
    run = simulate(schedule, UniformCosts(forward=1, backward=2, activation=4), cluster=Cluster(host=Link(0.0, 2.0), unit="slot"))
    assert run.makespan == 7
    assert {(row.link, row.bytes, row.transfers, round(row.busy_share, 12)) for row in run.link_utilisation()} == {
        ("0 -> host", 4.0, 1, round(2 / 7, 12)),
        ("host -> 0", 4.0, 1, round(2 / 7, 12)),
    }


def shared(sharing: Any) -> Timeline:
    """Two stages on two nodes each, whose messages leave node 0 over one port: devices 0 and 1 are in node 0, 2 and 3 in node 1.

    Edges 0 -> 2 and 1 -> 3 of the stage graph, F=1 everywhere: two messages of 2 units are ready at 1; the port carries 1 a slot.
    """
    cluster = Cluster(
        inside=Link(0.0, 100.0), between=Link(0.0, 1.0), devices_per_node=2, node=Node(nics=1), sharing=sharing, unit="slot", name="two nodes"
    )
    schedule = Schedule.from_text("0F0\n1F0\n2F0\n3F0", graph=[(0, 2), (1, 3)])
    return simulate(schedule, UniformCosts(message=2), cluster=cluster)


def test_a_shared_port() -> None:
    """First come first served the second waits for 2 and arrives at 5; fair, both have half and arrive at 5; alone, at 3.

    Either way the later one is 2 late, which with fair sharing is no wait.
    """
    assert shared("none").makespan == 4
    for sharing, wait in (("fifo", 2.0), ("fair", 0.0)):
        run = shared(sharing)
        assert run.makespan == pytest.approx(6, rel=1e-9)
        rows = {row.link: row for row in run.link_utilisation()}
        port = rows["node 0 NIC 0 out"]
        assert (port.bytes, port.transfers) == (4.0, 2)
        assert port.busy_share == pytest.approx(4 / 6, rel=1e-9)
        assert port.share == pytest.approx(4 / 6, rel=1e-9)
        assert port.longest_wait == pytest.approx(wait, abs=1e-9)
        assert port.longest_delay == pytest.approx(2.0, rel=1e-9)


def test_a_delay_has_other_senders_in_it_and_no_latency() -> None:
    """10 and 30 bytes, fair over a port of 10 a slot, hop 1, both ready at 1: 5 each until 3, the other 20 at 10 until 5. Alone: 1 and 3.

    The first is there at 4 and not 3, the second at 6 and not 5: 1 late each, on the port; the private ways in carry one each.
    """
    cluster = Cluster(inside=Link(0.0, 100.0), between=Link(1.0, 10.0), devices_per_node=2, node=Node(nics=1), sharing="fair", unit="slot")
    schedule = Schedule.from_text("0F0\n1F0\n2F0\n3F0", graph=[(0, 2), (1, 3)])
    run = simulate(schedule, UniformCosts(message=[10, 30, 0, 0]), cluster=cluster)
    assert sorted(run.arrived[0].tolist()) == pytest.approx([4, 6])
    assert {row.link: row.longest_delay for row in run.link_utilisation()}["node 0 NIC 0 out"] == pytest.approx(1.0)


@pytest.mark.parametrize("options", [{}, {"steps": 2}, {"stream": "device"}, {"sends": "rendezvous"}, {"shape_messages": True}])
def test_on_links_of_their_own_the_delay_is_the_wait(options: dict[str, Any]) -> None:
    steps, words = options.get("steps", 1), {name: value for name, value in options.items() if name != "steps"}
    costs = UniformCosts(forward=1, backward=2, message=3, bandwidth=2, latency=0.25)
    rows = simulate(generate("1f1b", 4, 8), costs, steps=steps, communication=Communication(**words)).link_utilisation()
    assert any(row.longest_wait for row in rows)
    assert [row.longest_delay for row in rows] == pytest.approx([row.longest_wait for row in rows], abs=1e-9)


def test_steps_add_up() -> None:
    run = simulate(generate("gpipe", 2, 2), UniformCosts(message=1, bandwidth=1), steps=3)
    assert [(row.bytes, row.transfers) for row in run.link_utilisation()] == [(6.0, 6), (6.0, 6)]


# -- in files ------------------------------------------------------------------------------------------------------------------


def test_links_survive(tmp_path: Path) -> None:
    for run in (shared("fifo"), simulate(generate("1f1b", 4, 8), UniformCosts(message=3, bandwidth=2, latency=0.25))):
        run.save(tmp_path / "run.json")
        assert load(tmp_path / "run.json").link_utilisation() == run.link_utilisation() != []
    replace(shared("fifo"), links=None).save(tmp_path / "run.json")
    assert load(tmp_path / "run.json").link_utilisation() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("names", ["a"]),
        ("names", 3),
        ("capacity", [0.0] * 4),
        ("capacity", [-1.0] * 4),
        ("capacity", [float("nan")] * 4),
        ("latency", [0.0]),
        ("latency", [-1.0, 0.0]),
        ("first", [0, 1]),
        ("first", [1, 2, 4]),
        ("first", [0, 3, 2]),
        ("first", [0, 2, 10**9]),
        ("first", [0, 0.5, 4]),
        ("resource", [0, 1, 2, 99]),
        ("resource", [0, 1, 2, -1]),
        ("resource", [0, 1, 2]),
        ("load", [-1.0] * 4),
        ("load", ["x"] * 4),
        ("load", [1.0]),
    ],
)
def test_wrong_links_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    shared("fifo").save(tmp_path / "run.json")
    data = json.loads((tmp_path / "run.json").read_text())
    assert name in data["links"]
    data["links"][name] = value
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(ScheduleError, match=r"bad\.json"):
        load(tmp_path / "bad.json")
