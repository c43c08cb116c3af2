"""Communication and collectives on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

SIZE = ("1f1b", "-p", 4, "-m", 8, "--forward", 1, "--backward", 2)


def figures(pipesim: Callable[..., Any], *arguments: object) -> dict[str, Any]:
    result = pipesim("simulate", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("time", "makespan"), [(4, 37), (8, 41)])
def test_a_reduction(pipesim: Callable[..., Any], time: float, makespan: float) -> None:
    """D01: exposed beyond the last backward at 33."""
    found = figures(pipesim, *SIZE, "--reduction", time)
    assert found["makespan"] == makespan
    assert [causes["gradient reduction"] for causes in found["idle_causes"]] == [time] * 4
    assert (found["collectives"], found["collective_time"]) == (4, [time] * 4)


def test_a_reduction_per_stage_and_in_buckets(pipesim: Callable[..., Any]) -> None:
    """Device 0 alone: its last backward is from 31 to 33; half of 8 begins at 32, the other half follows: 40."""
    found = figures(pipesim, *SIZE, "--reduction", "8,0,0,0", "--buckets", 2)
    assert found["makespan"] == 40
    assert found["collectives"] == 2


def test_tied_stages(pipesim: Callable[..., Any]) -> None:
    """D04: it begins when both have their gradients, at 33, and takes 1."""
    assert figures(pipesim, *SIZE, "--tied", "0+3", "--tied-reduction", 1)["makespan"] == 34


def test_a_reduction_for_every_microbatch(pipesim: Callable[..., Any]) -> None:
    """D03: 8 of them take 32 instead of 4."""
    assert figures(pipesim, *SIZE, "--reduction", 4, "--reduce-every-microbatch")["collective_time"] == [32] * 4


def test_weights_that_are_fetched(pipesim: Callable[..., Any], tmp_path: Any) -> None:
    (tmp_path / "fetch.csv").write_text("0UNSHARD,0F0,0B0\n")
    found = figures(pipesim, "fetch.csv", "--unshard", 2)
    assert found["makespan"] == 2 + 3
    assert found["idle_causes"][0]["warm-up"] == 2


def test_blocking(pipesim: Callable[..., Any]) -> None:
    """C10: p=4, m=8: 41.5, and 34.5 where messages travel beside compute."""
    size = ("gpipe", *SIZE[1:], "--latency", 0.25)
    assert figures(pipesim, *size)["makespan"] == 34.5
    assert figures(pipesim, *size, "--sends", "rendezvous", "--blocking")["makespan"] == 41.5


def test_a_deadlock_is_one_message(pipesim: Callable[..., Any]) -> None:
    """C02."""
    result = pipesim("simulate", *SIZE, "--sends", "rendezvous", "--blocking")
    assert result.returncode == 1
    assert "wait for each other" in result.stderr
    assert "Traceback" not in result.stderr


def test_shape_messages(pipesim: Callable[..., Any]) -> None:
    """C14: one forward, p=4, F=1 ms, hop 10 us, transfer 100 us: 4000 + 3 * 110, and 10 more a hop where the shape goes before."""
    size = ("forward.csv", "--unit", "us", "--forward", 1000, "--latency", 10, "--bandwidth", "1 GB/s", "--message", "100 kB")
    # a schedule of forwards only
    with open("forward.csv", "w") as file:
        file.write("0F0\n1F0\n2F0\n3F0\n")
    assert figures(pipesim, *size)["makespan"] == pytest.approx(4330e-6, rel=1e-12)
    assert figures(pipesim, *size, "--shape-messages")["makespan"] == pytest.approx(4360e-6, rel=1e-12)


def test_interference(pipesim: Callable[..., Any]) -> None:
    """Two forwards of 1 on device 0. The first message is on its way from 1 to 2; at half the speed the second takes 2, ending at 2.5.

    While it is under way, from 1 to 2, half of it is done; the other half takes 0.5. Its own message then arrives at 3.5, and device 1 ends at 4.5.
    """
    with open("two.csv", "w") as file:
        file.write("0F0,0F1\n1F0,1F1\n")
    slowed = figures(pipesim, "two.csv", "--message", 1, "--bandwidth", 1, "--interference", "p2p=2")
    assert slowed["busy"][0] == 2.5
    assert figures(pipesim, "two.csv", "--message", 1, "--bandwidth", 1)["busy"][0] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--interference", "p2p"), "write p2p=1.05,collective=1.2"),
        (("--interference", "p2p=1,p2p=2"), "is no factor of its own"),
        (("--sends", "never"), "'eager', 'rendezvous'"),
        (("--buckets", 0), "buckets"),
        (("--costs", "gpt-1.5b-a100", "--reduction", 1), "leave out --reduction"),
        (("--costs", "gpt-1.5b-a100", "--tied", "0+3"), "leave out --tied"),
        (("--reduction", "x"), "is not a number"),
    ],
)
def test_wrong_use(pipesim: Callable[..., Any], options: tuple[Any, ...], message: str) -> None:
    result = pipesim("simulate", "1f1b", "-p", 4, "-m", 8, *options)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--interference", "p2p=0.5"), "at least 1"),
        (("--interference", "tcp=2"), "tcp"),
        (("--tied", "0-3"), "tied must be groups"),
        (("--tied", "0+9", "--tied-reduction", 1), "tied names stage 9"),
        (("--tied-reduction", 1), "tied names no stages"),
    ],
)
def test_wrong_input(pipesim: Callable[..., Any], options: tuple[Any, ...], message: str) -> None:
    result = pipesim("simulate", "1f1b", "-p", 4, "-m", 8, *options)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_saved_run_has_its_communication_already(pipesim: Callable[..., Any]) -> None:
    assert pipesim("simulate", *SIZE, "--reduction", 4, "--save", "run.json.gz").returncode == 0
    assert figures(pipesim, "run.json.gz")["makespan"] == 37
    for options in (("--blocking",), ("--reduction", 4), ("--buckets", 2), ("--sends", "rendezvous")):
        result = pipesim("simulate", "run.json.gz", *options)
        assert result.returncode == 2
        assert f"{options[0]} would change nothing" in result.stderr


def test_links(pipesim: Callable[..., Any]) -> None:
    """16 messages of 3 over a link of 2 in 33 + 2 * 3 * 1.5 at least; six links, five hops there would be eleven with p=7."""
    size = ("gpipe", "-p", 7, "-m", 2, "--message", 3, "--bandwidth", 2)
    text = pipesim("simulate", *size).stdout
    assert "and 2 that were less busy (--links)" in text
    assert text.count(" -> ") == 10
    assert pipesim("simulate", *size, "--links").stdout.count(" -> ") == 12
    assert "link_utilisation" not in figures(pipesim, *size)
    links = figures(pipesim, *size, "--links")["link_utilisation"]
    assert {(link["link"], link["bytes"], link["transfers"], link["capacity"]) for link in links} == {
        (f"{a} -> {b}", 6.0, 2, 2.0) for a in range(7) for b in (a - 1, a + 1) if 0 <= b < 7
    }
    # F = 1, 1.5 on the wire: the second activation of device 0 is ready at 2 and taken at 2.5
    assert next(link["longest_wait"] for link in links if link["link"] == "0 -> 1") == 0.5


def test_lanes_of_a_picture(pipesim: Callable[..., Any]) -> None:
    for name in ("a.svg", "b.html"):
        for lanes, there in (((), True), (("--lanes",), True), (("--no-lanes",), False)):
            assert pipesim("plot", *SIZE, "--reduction", 4, "--out", name, *lanes).returncode == 0
            with open(name) as file:
                assert ("gradient reduction" in file.read() or name == "a.svg") == (there or name == "a.svg")
    pipesim("plot", *SIZE, "--latency", 0.5, "--lanes", "--out", "c.html")
    with open("c.html") as file:
        assert "receive gradient" in file.read()


def test_help_has_groups(pipesim: Callable[..., Any]) -> None:
    text = pipesim("simulate", "--help").stdout
    headings = ("The schedule:", "Times (", "Bytes (", "Links:", "Communication (", "Collectives:", "The run:", "Options:")
    places = [text.index(heading) for heading in headings]
    assert places == sorted(places)
    assert places[5] < text.index("--tied-reduction") < places[6]


def test_a_sweep_over_collectives(pipesim: Callable[..., Any]) -> None:
    result = pipesim("sweep", *SIZE, "--reduction", "0,4", "--buckets", "1,2", "--tied", "0+3", "--out", "rows.csv", "--json")
    assert result.returncode == 0
    found = json.loads(result.stdout)
    assert (found["rows"], found["failed"]) == (4, 0)
    # with two buckets half of 4 begins 1 before the end
    assert {(row["reduction"], row["buckets"], row["makespan"]) for row in found["pareto"]} == {(0, 1, 33), (0, 2, 33), (4, 1, 37), (4, 2, 36)}
