"""pipesim import, compare and plot --overlay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SIZE = ("--devices", 2, "--microbatches", 4)


def label(name: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": f"PP:{name}", "pid": 1, "tid": 1, "ts": ts, "dur": dur}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Two ranks: 0F0 0-10, 1F0 15-25, 1B0 25-45, 0B0 50-70 microseconds; one event is malformed."""
    folder = tmp_path / "traces"
    folder.mkdir()
    events = [
        [label("0F0", 0, 10), label("0SEND_F0", 10, 5), label("0RECV_B0", 45, 5), label("0B0", 50, 20)],
        [label("1RECV_F0", 10, 5), label("1F0", 15, 10), label("1B0", 25, 20), label("1SEND_B0", 45, 5), label("1W9", 99, -1)],
    ]
    for rank, own in enumerate(events):
        (folder / f"{rank}.json").write_text(json.dumps({"distributedInfo": {"rank": rank}, "traceEvents": own}))
    return folder


def test_import(pipesim, traces: Path, tmp_path: Path) -> None:
    found = pipesim("import", traces, "--out", "run.json.gz", "--json")
    assert found.returncode == 0, found.stderr
    data = json.loads(found.stdout)
    assert (data["source"], data["makespan"], data["clocks"]["uncertainty"]) == ("measured", pytest.approx(70e-6), pytest.approx(5e-6))
    assert len(data["malformed"]) == 1
    assert "Not imported: " in found.stderr
    assert "1.json, event 4: has dur -1" in found.stderr
    assert "Note: clocks of the ranks left as they are" in found.stderr
    text = pipesim("import", traces / "0.json", traces / "1.json", "--out", "again.json").stdout
    assert "makespan" in text
    assert json.loads(pipesim("simulate", "again.json", "--json").stdout)["makespan"] == pytest.approx(70e-6)


def test_import_with_a_schedule(pipesim, traces: Path, tmp_path: Path) -> None:
    (tmp_path / "right.csv").write_text("0F0,0B0\n1F0,1B0\n")
    (tmp_path / "wrong.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert pipesim("import", traces, "--schedule", "right.csv", "--out", "run.json").returncode == 0
    wrong = pipesim("import", traces, "--schedule", "wrong.csv", "--out", "wrong.json")
    assert wrong.returncode == 1
    assert "rank 0 lacks 0F1, 0B1" in wrong.stderr
    assert not (tmp_path / "wrong.json").exists()


def test_import_mistakes(pipesim, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("[]")
    assert pipesim("import", "t.json").returncode == 2
    assert pipesim("import", "t.json", "--out", "run.csv").returncode == 2
    assert pipesim("import", "--out", "run.json").returncode == 2
    for name in ("t.json", "none.json"):
        found = pipesim("import", name, "--out", "run.json")
        assert found.returncode == 1
        assert found.stderr.startswith("Error: ")


def test_our_own_trace_comes_back(pipesim) -> None:
    # F 1, B 2, a hop 0.5. Device 0: F0 0-1, F1 1-2, B0 5-7, F2 7-8, B1 8-10, F3 10-11, B2 12-14, B3 15-17.
    times = ("--unit", "ms", "--forward", 1, "--backward", 2, "--latency", 0.5)
    assert pipesim("export", "1f1b", *SIZE, *times, "--out", "trace.json.gz").returncode == 0
    assert pipesim("import", "trace.json.gz", "--out", "run.json.gz").returncode == 0
    assert json.loads(pipesim("simulate", "run.json.gz", "--json").stdout)["makespan"] == pytest.approx(17e-3, abs=1e-12)


def test_compare_says_why(pipesim, traces: Path) -> None:
    pipesim("import", traces, "--out", "run.json.gz")
    # predicted: F 10 us, B 18 us, no latency: 10 + 10 + 18 + 18 = 56 against 70. On the path 2 * 2 us of B and 2 * 5 us of messages.
    times = ("--unit", "us", "--forward", 10, "--backward", 18)
    assert pipesim("simulate", "gpipe", "-p", 2, "-m", 1, *times, "--save", "sim.json.gz").returncode == 0
    found = pipesim("compare", "sim.json.gz", "run.json.gz", "--json")
    why = json.loads(found.stdout)["difference"]
    assert (why["predicted"], why["actual"], why["makespan_error"]) == ("gpipe", "imported", pytest.approx(-0.2))
    explanation = why["explanation"]
    assert (explanation["slower"], explanation["waited_longer"]) == (pytest.approx(4e-6), pytest.approx(10e-6))
    assert explanation["makespan_difference"] == pytest.approx(14e-6)
    text = pipesim("compare", "sim.json.gz", "run.json.gz", "--plot", "overlay.png")
    assert "Why: imported takes 14 µs longer than gpipe (56 µs)" in text.stdout
    assert "wrote overlay.png" in text.stderr
    assert Path("overlay.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_one_name_are_told_apart_by_their_files(pipesim) -> None:
    for name, forward in (("a", 1), ("b", 2)):
        pipesim("simulate", "1f1b", *SIZE, "--forward", forward, "--save", f"{name}.json")
    assert [run["name"] for run in json.loads(pipesim("compare", "a.json", "b.json", "--json").stdout)["runs"]] == ["a", "b"]


def test_overlay(pipesim, tmp_path: Path) -> None:
    pipesim("simulate", "1f1b", *SIZE, "--save", "a.json")
    for target in ("o.png", "o.svg", "o.html"):
        found = pipesim("plot", "a.json", "1f1b", *SIZE, "--forward", 2, "--overlay", "--out", target)
        assert found.returncode == 0, found.stderr
        assert (tmp_path / target).stat().st_size > 1000
    assert pipesim("plot", "a.json", "--overlay").returncode == 2
    assert pipesim("plot", "a.json", "a.json", "--overlay", "--out", "o.gif").returncode == 1
    assert pipesim("compare", "a.json", "a.json", "a.json", "--plot", "o.png").returncode == 2
