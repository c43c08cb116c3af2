"""Chrome trace JSON: cases V01-V05, V07 and V16 of ../shared/cases.md, and what viewers make of it."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import Cluster, Link, Schedule, ScheduleError, Timeline, UniformCosts, generate, read_costs, simulate
from pipesim.viz import trace
from pipesim.viz.trace import write_trace


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def written(run: Timeline, folder: Path, name: str = "run.json") -> dict[str, Any]:
    write_trace(run, folder / name)
    data = (folder / name).read_bytes()
    result: dict[str, Any] = json.loads(gzip.decompress(data) if name.endswith(".gz") else data, parse_constant=refuse)
    return result


def events(run: Timeline, folder: Path, phase: str) -> list[dict[str, Any]]:
    return [event for event in written(run, folder)["traceEvents"] if event["ph"] == phase]


def threads(data: dict[str, Any]) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in data["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}


def tracks(data: dict[str, Any]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """(pid, tid) to (ts, dur) of its slices."""
    result = defaultdict(list)
    for event in data["traceEvents"]:
        if event["ph"] == "X":
            result[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    return result


def misnested(slices: list[tuple[float, float]]) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Pairs that are neither disjoint nor nested, taking every number as the float that a reader gets."""
    open_slices: list[tuple[float, float]] = []
    for ts, dur in sorted(slices, key=lambda s: (s[0], -s[1])):
        while open_slices and open_slices[-1][0] + open_slices[-1][1] <= ts:
            open_slices.pop()
        if open_slices and ts + dur > open_slices[-1][0] + open_slices[-1][1]:
            yield open_slices[-1], (ts, dur)
        open_slices.append((ts, dur))


def assert_lanes_are_clean(data: dict[str, Any]) -> None:
    for track, slices in tracks(data).items():
        assert list(misnested(slices)) == [], track
        # viewers keep whole nanoseconds, cut off
        assert list(misnested([(int(ts * 1000), int(dur * 1000)) for ts, dur in slices])) == [], track


LATE = UniformCosts(forward=1, backward=2, latency=0.25)


# -- V01: no two slices of one thread overlap ------------------------------------------------------------------------------


def test_v01_compute_and_transfer_of_one_device_lie_on_two_threads(tmp_path: Path) -> None:
    # Device 1 computes in [200, 300] while a message is on its way to it in [280, 350].
    run = simulate(Schedule.from_text("0F0 0F1\n1F0 1F1"), UniformCosts(forward=1))
    times = {"start": [0, 180, 200, 350], "end": [100, 280, 300, 450], "sent": [100, 280], "departed": [100, 280], "arrived": [200, 350]}
    run = replace(run, **{name: np.array([values], float) for name, values in times.items()})
    data = written(run, tmp_path)
    own = {track: slices for track, slices in tracks(data).items() if track[0] == 1}
    (compute,) = [track for track, slices in own.items() if (200_000, 100_000) in slices]
    (transfer,) = [track for track, slices in own.items() if (280_000, 70_000) in slices]
    assert compute != transfer
    assert threads(data)[compute] == "compute"
    assert threads(data)[transfer] == "recv forward"
    assert_lanes_are_clean(data)


@pytest.mark.parametrize(
    "costs",
    [
        LATE,
        # five messages are on their way at once
        UniformCosts(forward=1, backward=2, latency=5.3),
        # they queue, and the tail of one overlaps the transfer of the next
        UniformCosts(forward=1, backward=2, latency=3, bandwidth=0.5, message=1),
        UniformCosts(forward=0.1, backward=0.2, latency=0.7),
    ],
)
@pytest.mark.parametrize("text", [None, "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n2F0 2F1 2B0 2B1"])
def test_v01_messages_that_overlap_are_spread(costs: UniformCosts, text: str | None, tmp_path: Path) -> None:
    # the second schedule is a DAG: device 2 hears from both others, at the same time
    graph = [(0, 2), (1, 2)]
    schedule = generate("1f1b", 4, 8) if text is None else Schedule.from_text(text, graph=graph)
    assert_lanes_are_clean(written(simulate(schedule, costs), tmp_path))


def test_v01_measured_stage_times(tmp_path: Path) -> None:
    # The gaps between F 18.522 ms, I 18.086 ms, W 9.337 ms and 0.601 ms on the link are no whole floats.
    run = simulate(generate("1f1b", 8, 24), read_costs("gpt-1.5b-a100"))
    data = written(run, tmp_path)
    assert_lanes_are_clean(data)
    first = next(e for e in data["traceEvents"] if e["ph"] == "X")
    assert (first["name"], first["ts"], first["dur"]) == ("0F0", 0, 18522)


@settings(max_examples=40, deadline=None)
@given(
    forward=st.floats(1e-7, 3.0),
    backward=st.floats(1e-7, 3.0),
    latency=st.floats(0.0, 5.0),
    base=st.sampled_from([0.0, 1.0, 1672924880.617]),
    unit=st.sampled_from(["s", "slot"]),
)
def test_v01_holds_for_any_times(
    forward: float, backward: float, latency: float, base: float, unit: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = simulate(generate("1f1b", 3, 5), UniformCosts(forward=forward, backward=backward, latency=latency))
    names = ("start", "end", "sent", "departed", "arrived")
    run = replace(run, **{name: getattr(run, name) + base for name in names}, unit=unit)
    assert_lanes_are_clean(written(run, tmp_path_factory.mktemp("trace")))


def test_v01_whole_nanoseconds_stay_whole(tmp_path: Path) -> None:
    # 1.001 * 1000 is 1000.9999999999999 as floats, so a viewer that cuts off would move such starts by 1 ns into the op before
    run = simulate(Schedule.from_text(" ".join(f"0F{i}" for i in range(3000))), UniformCosts(forward=1001, activation=0))
    run = replace(run, start=run.start / 1e9, end=run.end / 1e9, unit="s")
    data = written(run, tmp_path)
    assert [int(ts * 1000) for ts, _ in tracks(data)[0, 0]] == [1001 * i for i in range(3000)]
    assert_lanes_are_clean(data)


# -- V02, V03, V16: numbers ------------------------------------------------------------------------------------------------


def two_ops(start: list[float], end: list[float]) -> Timeline:
    run = simulate(Schedule.from_text("0F0 0F1"), UniformCosts(forward=1, activation=0))
    return replace(run, unit="s", start=np.array([start]), end=np.array([end]))


def test_v02_times_are_exact_microseconds_without_exponent(tmp_path: Path) -> None:
    # an op of 10 ps, and one that starts 690 ms after it
    run = two_ops([0.0, 0.69], [1e-11, 0.69 + 1e-11])
    first, second = events(run, tmp_path, "X")
    assert second["ts"] - first["ts"] == 690000
    assert first["dur"] == 1e-5
    text = (tmp_path / "run.json").read_text()
    assert '"dur":0.00001,' in text
    assert not re.search(r"[0-9][eE][+-]?[0-9]", text)


def test_v02_times_count_from_the_first_op(tmp_path: Path) -> None:
    # 1672924880617000 us since 1970: there a float64 of seconds has steps of 0.24 us, so digits below are not of the run
    run = two_ops([1672924880.617, 1672924880.617 + 0.69], [1672924880.617 + 0.1, 1672924880.617 + 0.79])
    first, second = events(run, tmp_path, "X")
    assert (first["ts"], second["ts"], first["dur"], second["dur"]) == (0, 690000, 100000, 100000)
    assert all(isinstance(event["ts"], int) for event in (first, second))


def test_v03_a_transfer_without_duration_and_no_memory(tmp_path: Path) -> None:
    # 200 bytes over a link without bandwidth: bytes / time would be infinite. Nothing holds memory, so there is no counter.
    run = simulate(generate("1f1b", 2, 2), UniformCosts(message=0, activation=0))
    run = replace(run, footprint=replace(run.footprint, message=np.full(len(run.messages), 200.0), kept=np.full((2, 2), 0.0)))
    data = written(run, tmp_path)
    assert {e["cat"] for e in data["traceEvents"] if e["ph"] == "X"} == {"F", "B"}
    run = replace(run, footprint=replace(run.footprint, message=np.zeros(len(run.messages))))
    assert events(run, tmp_path, "C") == []


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_v03_sizes_that_are_no_numbers_are_left_out(bad: float, tmp_path: Path) -> None:
    run = simulate(generate("1f1b", 2, 2), LATE)
    run = replace(run, footprint=replace(run.footprint, message=np.full(len(run.messages), bad)))
    messages = [e for e in written(run, tmp_path)["traceEvents"] if e.get("cat") == "message" and e["ph"] == "X"]
    # 2 microbatches, forward and back, at both ends
    assert len(messages) == 8
    assert all(not {"bytes", "units"} & e["args"].keys() for e in messages)


def test_times_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="not finite"):
        write_trace(two_ops([0.0, 1.0], [1.0, np.inf]), tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("unit", "microseconds"), [("slot", 1e3), ("s", 1e6)])
def test_v16_values_are_microseconds_whatever_the_display_unit_says(unit: Any, microseconds: float, tmp_path: Path) -> None:
    run = replace(simulate(generate("1f1b", 4, 8), UniformCosts(forward=1, backward=2)), unit=unit)
    data = written(run, tmp_path)
    assert data["displayTimeUnit"] == "ms"
    assert max(e["ts"] + e["dur"] for e in data["traceEvents"] if e["ph"] == "X") == 33 * microseconds


# -- V04, V05: names and order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["F0\n\x01", "前向", 'B"0\\', "<script>alert(1)</script>", "\ud800"])
def test_v04_names_round_trip(name: str, tmp_path: Path) -> None:
    schedule = Schedule.from_text("0F0 0B0", name=name)
    assert written(simulate(schedule, UniformCosts()), tmp_path)["otherData"]["schedule"] == name


def test_v05_devices_are_processes_in_numeric_order(tmp_path: Path) -> None:
    metadata = events(simulate(generate("1f1b", 12, 12), UniformCosts()), tmp_path, "M")
    order = {e["pid"]: e["args"]["sort_index"] for e in metadata if e["name"] == "process_sort_index"}
    assert order == {device: device for device in range(12)}
    assert all(type(index) is int for index in order.values())
    names = {e["pid"]: e["args"]["name"] for e in metadata if e["name"] == "process_name"}
    assert names == {device: f"device {device} (stage {device})" for device in range(12)}


def test_a_device_names_all_its_stages_and_may_have_none(tmp_path: Path) -> None:
    schedule = Schedule.from_streams([["0F0", "2F0"], ["1F0"], []])
    names = [e["args"]["name"] for e in events(simulate(schedule, UniformCosts()), tmp_path, "M") if e["name"] == "process_name"]
    assert names == ["device 0 (stage 0, 2)", "device 1 (stage 1)", "device 2"]


def test_v01_threads_are_named_and_sorted(tmp_path: Path) -> None:
    data = written(simulate(generate("1f1b", 4, 8), LATE), tmp_path)
    lanes = {pid: [name for (p, _), name in sorted(threads(data).items()) if p == pid] for pid in range(4)}
    assert lanes == {
        0: ["compute", "send forward", "recv backward"],
        1: ["compute", "send forward", "recv forward", "send backward", "recv backward"],
        2: ["compute", "send forward", "recv forward", "send backward", "recv backward"],
        3: ["compute", "recv forward", "send backward"],
    }


# -- V07: size -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_v07_a_large_run(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_trace(simulate(generate("1f1b", 64, 2048), UniformCosts(forward=1, backward=2)), path)
    with open(path) as lines:
        count = sum('"ph":"X"' in line and '"tid":0,' in line for line in lines)
    # F and B of 64 stages and 2048 microbatches; less than 100 MB is less than 380 bytes for each
    assert count == 2 * 64 * 2048 == 262_144
    assert path.stat().st_size < 100_000_000


def test_v07_a_large_file_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulate(generate("1f1b", 4, 8), LATE)
    monkeypatch.setattr(trace, "LARGE_FILE", 1000)
    with pytest.warns(UserWarning, match=r"run\.json\.gz"):
        write_trace(run, tmp_path / "run.json")
    write_trace(run, tmp_path / "run.json.gz")  # compressed it is what was asked for
    monkeypatch.setattr(trace, "LARGE_TRACE", 2000)
    with pytest.warns(UserWarning, match="fewer microbatches"):
        write_trace(run, tmp_path / "run.json.gz")


# -- what is in it ---------------------------------------------------------------------------------------------------------


def test_compute_slices_are_the_ops(tmp_path: Path) -> None:
    # 1F1B on two devices with two microbatches, F = 1, B = 2: device 0 F0 0-1, F1 1-2, B0 4-6, B1 7-9
    slices = events(simulate(generate("1f1b", 2, 2), UniformCosts(forward=1, backward=2)), tmp_path, "X")
    own = [(e["name"], e["ts"], e["dur"], e["args"]) for e in slices if (e["pid"], e["tid"]) == (0, 0)]
    assert own == [
        ("0F0", 0, 1000, {"stage": 0, "microbatch": 0}),
        ("0F1", 1000, 1000, {"stage": 0, "microbatch": 1}),
        ("0B0", 4000, 2000, {"stage": 0, "microbatch": 0}),
        ("0B1", 7000, 2000, {"stage": 0, "microbatch": 1}),
    ]


def test_a_pair_is_one_slice_and_an_update_has_its_number(tmp_path: Path) -> None:
    schedule = Schedule.from_text("0F0 (0F1;0B0)OVERLAP_F_B 0B1 0U0")
    slices = events(simulate(schedule, UniformCosts(forward=1, backward=2, optimizer=0.5)), tmp_path, "X")
    assert [(e["name"], e["cat"], e["dur"]) for e in slices] == [
        ("0F0", "F", 1000),
        ("(0F1;0B0)OVERLAP_F_B", "pair", 3000),
        ("0B1", "B", 2000),
        ("0U0", "U", 500),
    ]
    assert slices[-1]["args"] == {"stage": 0, "update": 0}


def test_messages_are_slices_at_both_ends(tmp_path: Path) -> None:
    # F0 of stage 0 ends at 1, its message of 4 units takes 4/2 = 2 on the link and 0.25 more; the second waits for the link
    costs = UniformCosts(forward=1, backward=2, latency=0.25, bandwidth=2, message=4)
    slices = events(simulate(generate("gpipe", 2, 2), costs), tmp_path, "X")
    found = {e["name"]: (e["pid"], e["ts"], e["dur"], e["args"]) for e in slices if "SEND_F" in e["name"] or "RECV_F" in e["name"]}
    assert found == {
        "0SEND_F0": (0, 1000, 2250, {"to_device": 1, "units": 4}),
        "1RECV_F0": (1, 1000, 2250, {"from_device": 0, "units": 4}),
        "0SEND_F1": (0, 3000, 2250, {"to_device": 1, "units": 4, "queued_us": 1000}),
        "1RECV_F1": (1, 3000, 2250, {"from_device": 0, "units": 4, "queued_us": 1000}),
    }


@pytest.mark.parametrize("costs", [UniformCosts(forward=1, backward=2), LATE])
def test_arrows_lead_from_producer_to_consumer(costs: UniformCosts, tmp_path: Path) -> None:
    data = written(simulate(generate("1f1b", 4, 8), costs), tmp_path)["traceEvents"]
    slices = [e for e in data if e["ph"] == "X"]
    parts: dict[int, dict[str, Any]] = defaultdict(dict)
    for position, event in enumerate(data):
        if event["ph"] in "stf":
            # a viewer binds it to the slice of its thread in which it lies; at equal times the slice must come first
            (inside,) = (e for e in slices if (e["pid"], e["tid"]) == (event["pid"], event["tid"]) and e["ts"] <= event["ts"] < e["ts"] + e["dur"])
            assert data.index(inside) < position
            assert type(event["id"]) is int
            parts[event["id"]][event["ph"]] = inside["name"]
            assert event["ph"] != "f" or event["bp"] == "e"
    # 3 hops × 8 microbatches × there and back
    assert len(parts) == 48
    assert all(part.keys() == ({"s", "t", "f"} if costs is LATE else {"s", "f"}) for part in parts.values())
    found = {(part["s"], part["f"]) for part in parts.values()}
    expected = {(f"{s}F{i}", f"{s + 1}F{i}") for s in range(3) for i in range(8)} | {(f"{s + 1}B{i}", f"{s}B{i}") for s in range(3) for i in range(8)}
    assert found == expected
    if costs is LATE:
        assert {part["t"] for part in parts.values()} == {f"{b[0]}RECV_{b[1:]}" for _, b in expected}


def test_m01_memory_counters(tmp_path: Path) -> None:
    counters = events(simulate(generate("1f1b", 4, 8), UniformCosts(forward=1, backward=2, weights=10)), tmp_path, "C")
    peaks = [max(e["args"]["activations"] for e in counters if e["pid"] == device) for device in range(4)]
    assert peaks == [4, 3, 2, 1]
    assert all(e["args"].keys() == {"weights", "activations"} and e["args"]["weights"] == 10 for e in counters)
    # device 0: F0..F3 at 0..3; the four backwards without a forward behind them end at 24, 27, 30, 33
    own = [(e["ts"], e["args"]["activations"]) for e in counters if e["pid"] == 0]
    assert own == [(0, 1), (1000, 2), (2000, 3), (3000, 4), (24000, 3), (27000, 2), (30000, 1), (33000, 0)]


def test_several_steps(tmp_path: Path) -> None:
    data = written(simulate(generate("1f1b", 4, 8), LATE, steps=3), tmp_path)
    compute = [e for e in data["traceEvents"] if e["ph"] == "X" and e["tid"] == 0]
    assert Counter(e["args"]["step"] for e in compute) == {0: 64, 1: 64, 2: 64}
    assert len({e["id"] for e in data["traceEvents"] if e["ph"] == "s"}) == 3 * 48
    assert data["otherData"]["steps"] == 3
    assert_lanes_are_clean(data)


def test_ops_that_take_no_time_have_no_slice(tmp_path: Path) -> None:
    data = written(simulate(generate("1f1b", 4, 8), UniformCosts(forward=0, backward=2)), tmp_path)
    assert Counter(e["cat"] for e in data["traceEvents"] if e["ph"] == "X") == {"B": 32}
    assert data["otherData"]["ops_without_duration_left_out"] == 32
    # an arrow needs a slice at both ends, so only gradients have one
    assert sum(e["ph"] == "s" for e in data["traceEvents"]) == 24


def test_offload_and_reload(tmp_path: Path) -> None:
    # The host link takes 1 unit / 0.5 = 2: OFFLOAD 1..3 beside F1 and B1, RELOAD 4..6.
    cluster = Cluster(unit="slot", host=Link(0.0, 0.5))
    run = simulate(Schedule.from_text("0F0 0OFFLOAD0 0F1 0B1 0RELOAD0 0B0"), UniformCosts(forward=1, backward=2), cluster=cluster)
    data = written(run, tmp_path)
    found = {e["name"]: (e["ts"], e["dur"], e["args"], threads(data)[0, e["tid"]]) for e in data["traceEvents"] if e["ph"] == "X" and e["tid"]}
    assert found == {
        "0OFFLOAD0": (1000, 2000, {"to": "host", "units": 1}, "offload"),
        "0RELOAD0": (4000, 2000, {"from": "host", "units": 1}, "reload"),
    }


# -- the file --------------------------------------------------------------------------------------------------------------


def test_the_same_run_is_the_same_file(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_trace(simulate(generate("1f1b", 4, 8), LATE), tmp_path / folder / "run.json.gz")
    assert (tmp_path / "a/run.json.gz").read_bytes() == (tmp_path / "b/run.json.gz").read_bytes()
    assert written(simulate(generate("1f1b", 4, 8), LATE), tmp_path, "run.json.gz") == written(simulate(generate("1f1b", 4, 8), LATE), tmp_path)


def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(writer: Any, device: int) -> Iterator[str]:
        yield "{}"
        raise KeyboardInterrupt

    (tmp_path / "run.json").write_text("before")
    monkeypatch.setattr("pipesim.viz.trace._Writer._memory", fail)
    with pytest.raises(KeyboardInterrupt):
        write_trace(simulate(generate("1f1b", 4, 8), LATE), tmp_path / "run.json")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert (tmp_path / "run.json").read_text() == "before"
    with pytest.raises(OSError, match="nowhere"):
        write_trace(simulate(generate("1f1b", 4, 8), LATE), tmp_path / "nowhere" / "run.json")
