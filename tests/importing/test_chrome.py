"""Reading traces of others: cases I04 and I07 of ../shared/cases.md, and files that are no traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pipesim import ScheduleError, UniformCosts, generate, simulate
from pipesim.importing import chrome
from pipesim.importing.chrome import read_trace
from pipesim.viz.trace import write_trace


def x(ts: Any, dur: Any, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": 2, "name": "op", "ts": ts, "dur": dur} | more


def mark(phase: str, ts: Any, name: str = "op") -> dict[str, Any]:
    return {"ph": phase, "pid": 1, "tid": 2, "name": name, "ts": ts}


def spans(events: list[Any]) -> list[tuple[str, float, float]]:
    track = read_trace(json.dumps(events)).tracks[1, 2]
    return list(zip(track.names, track.start.tolist(), track.end.tolist(), strict=True))


def bad(events: list[Any]) -> list[int]:
    return [problem.index for problem in read_trace(json.dumps(events)).problems]


def test_i04_overlapping_slices() -> None:
    trace = read_trace(json.dumps([x(a, b - a) for a, b in [(0, 100), (100, 200), (200, 300), (280, 350), (360, 400)]]))
    track = trace.tracks[1, 2]
    assert track.busy == 390
    assert track.total == 410
    assert track.overlaps == [(2, 3)]
    assert track.gaps == [(350, 360)]
    assert trace.problems == ()
    assert "1 overlapping pairs (events 2 and 3)" in str(trace)


def test_i07_malformed_events() -> None:
    events = [x(0, 10), x(20, -1), mark("B", 30, "never ends"), mark("E", 29, "never began"), x(40, 5), mark("B", 50), mark("E", 60)]
    trace = read_trace(json.dumps(events))
    assert [problem.index for problem in trace.problems] == [1, 2, 3]
    assert "dur -1" in str(trace.problems[0])
    assert "'never ends'" in str(trace.problems[1])
    assert "'never began'" in str(trace.problems[2])
    # the rest is there, and the begin without end reaches nowhere
    assert spans(events) == [("op", 0, 10), ("op", 40, 45), ("op", 50, 60)]


def test_i07_ends_find_their_begins() -> None:
    # a holds b; c is still open when a ends
    events = [mark("B", 0, "a"), mark("B", 1, "b"), mark("E", 2, "b"), mark("B", 3, "c"), mark("E", 4, "a"), mark("E", 5, "c")]
    assert spans(events) == [("a", 0, 4), ("b", 1, 2)]
    assert bad(events) == [3, 5]
    # an end needs no name, and the order of the file is free
    assert spans([{"ph": "E", "pid": 1, "tid": 2, "ts": 9}, mark("B", 3)]) == [("op", 3, 9)]
    # other tracks do not count
    assert bad([mark("B", 0), mark("E", 1) | {"tid": 3}]) == [0, 1]


@pytest.mark.parametrize(
    "event",
    [
        x("soon", 1),
        x(None, 1),
        x(True, 1),
        x(0, None),
        x(0, "1"),
        x(float("nan"), 1),
        x(0, float("inf")),
        x(1e308, 1.7e308),
        x(10**400, 1),
        x(0, 1, pid=[1]),
        x(0, 1, tid=1.5),
        x(0, 1, name=7),
        {"ph": 5, "ts": 0},
        {"ts": 0, "dur": 1},
        "event",
        None,
        [],
    ],
)
def test_wrong_types_are_reported(event: Any) -> None:
    assert bad([x(0, 1), event, x(2, 1)]) == [1]
    assert spans([x(0, 1), event, x(2, 1)]) == [("op", 0, 1), ("op", 2, 3)]


def test_slices_inside_others_are_no_overlaps() -> None:
    track = read_trace(json.dumps([x(0, 100), x(0, 50), x(50, 50), x(60, 0), x(100, 10)])).tracks[1, 2]
    assert (track.overlaps, track.busy, track.total, track.gaps) == ([], 110, 210, [])


def test_every_overlapping_pair_is_found() -> None:
    # 0-10 overlaps 5-15 and 8-20; 5-15 overlaps 8-20; 9-9.5 lies in all; listed by place in the file
    assert read_trace(json.dumps([x(8, 12), x(0, 10), x(5, 10), x(9, 0.5)])).tracks[1, 2].overlaps == [(0, 1), (0, 2), (1, 2)]


def test_rounding_is_no_overlap() -> None:
    assert 0.1 + 0.2 > 0.3
    track = read_trace(json.dumps([x(0.1, 0.2), x(0.3, 0.5)])).tracks[1, 2]
    assert (track.overlaps, track.gaps) == ([], [])
    assert read_trace(json.dumps([x(0.1, 0.201), x(0.3, 0.5)])).tracks[1, 2].overlaps == [(0, 1)]


def test_hostile_traces_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # each overlaps all others: all pairs would be n²/2
    monkeypatch.setattr(chrome, "MAX_OVERLAPS", 100)
    trace = read_trace(json.dumps([x(i, 50_000) for i in range(50_000)]))
    assert len(trace.tracks[1, 2].overlaps) == 100
    assert "at least 100 overlapping" in str(trace)
    # ends that close nothing do not search all that is open
    events = [mark("B", i, "a") for i in range(50_000)] + [mark("E", 50_000 + i, "b") for i in range(50_000)]
    assert len(read_trace(json.dumps(events)).problems) == 100_000


def test_other_events_are_passed_over() -> None:
    events = [{"ph": "M", "name": "process_name"}, {"ph": "C", "ts": 0}, {"ph": "i", "ts": "x"}, {"ph": "s", "id": 1}, x(0, 1)]
    assert bad(events) == []
    # text for pid and tid, or none: viewers take 0
    trace = read_trace(json.dumps([x(0, 1, pid="rank 0", tid="stream"), {"ph": "X", "ts": 0, "dur": 1}]))
    assert set(trace.tracks) == {("rank 0", "stream"), (0, 0)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1, 2", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('[{"ph": "X", "ts": ' + "9" * 5000 + "}]", "not JSON"),
        ("{}", "no Chrome trace"),
        ('{"traceEvents": 3}', "no Chrome trace"),
    ],
)
def test_what_is_no_trace(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=message):
        read_trace(text)
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=message) as error:
        read_trace(path)
    assert str(path) in str(error.value)


def test_files_have_a_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome, "_READ_LIMIT", 1000)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps([x(i, 1) for i in range(1000)]).encode()))
    with pytest.raises(ScheduleError, match="more than"):
        read_trace(path)
    with pytest.raises(OSError, match="nothing"):
        read_trace(str(tmp_path / "nothing.json"))


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_reads_what_is_written(name: str, tmp_path: Path) -> None:
    write_trace(simulate(generate("1f1b", 4, 8), UniformCosts(forward=1, backward=2, latency=0.25)), tmp_path / name)
    trace = read_trace(tmp_path / name)
    assert trace.problems == ()
    assert all(track.overlaps == [] for track in trace.tracks.values())
    # 8 microbatches × (1 + 2) slots, 1 slot = 1000 us
    assert [trace.tracks[device, 0].busy for device in range(4)] == [24_000] * 4
