"""``pipesim sweep`` and ``pipesim jitter``, as somebody types them, interrupts them and goes on."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipesim.cli import main

SMALL = ("--devices", 4, "--microbatches", 8, "--forward", 1, "--backward", 2)


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """The command line in this process, which is quicker: exit status and stderr."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["pipesim", *map(str, arguments)])
        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0), capsys.readouterr().err
        return 0, capsys.readouterr().err

    return run


# -- a sweep -----------------------------------------------------------------------------------------------------------


def test_every_combination_once(pipesim, tmp_path):
    run = pipesim(
        "sweep",
        "--schedules",
        "1f1b,interleaved-1f1b",
        "-p",
        "2,4",
        "-m",
        "8,16",
        "--chunks",
        "2,4",
        "--forward",
        1,
        "--backward",
        2,
        "--latency",
        "0,0.25",
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.startswith("note: without --stages, ")
    assert run.stderr.count("\n") == 1
    found = rows(tmp_path / "sweep.csv")
    # 1f1b 2 x 2 x 2 and with two chunks or four 2 x 2 x 2 x 2
    assert len(found) == 24
    assert len({row["id"] for row in found}) == 24
    times = {(row["devices"], row["microbatches"], row["chunks"], row["latency"]): float(row["makespan"]) for row in found}
    assert times["4", "8", "", "0.0"] == 33
    # per chunk F + B = 3: (m v + p - 1) * 3
    assert times["4", "8", "2", "0.0"] == (16 + 3) * 3
    assert "Pareto front for each latency" in run.stdout


def test_json(pipesim):
    data = json.loads(pipesim("sweep", "1f1b", "gpipe", "naive", *SMALL, "--json").stdout)
    assert (data["rows"], data["failed"], data["errors"]) == (3, 0, [])
    # naive: one microbatch at a time, 8 * 4 * 3, holding one activation; gpipe is as fast as 1f1b and holds 8 instead of 4
    assert [(row["schedule"], row["makespan"], row["peak_memory"]) for row in data["pareto"]] == [("naive", 96, 1), ("1f1b", 33, 4)]


def test_a_sweep_file_and_what_goes_before_it(pipesim, tmp_path):
    (tmp_path / "sweep.toml").write_text(
        'schedules = ["1f1b", "interleaved-1f1b"]\ndevices = 4\nmicrobatches = [8, 16]\nunit = "ms"\nforward = [10, [10, 10, 20, 10]]\nbackward = 20\n'
        'latency = ["500 us", 1]\nactivation = "1 GB"\n[options]\nchunks = [2]\nwarmup = [[10, 8, 6, 4]]\n'
    )
    run = pipesim("sweep", "--file", "sweep.toml", "--microbatches", 8)
    assert run.returncode == 0, run.stderr
    found = rows(tmp_path / "sweep.csv")
    # 1f1b 2 x 2; interleaved 2 x 2, of which a list of four stages does not fit its eight
    assert len(found) == 8
    assert {row["error"].partition(";")[0] for row in found} == {"", "forward has 4 values and the schedule has 8 stages"}
    assert "2 of 8 failed" in run.stderr
    (plain,) = [row for row in found if (row["schedule"], row["forward"], row["latency"]) == ("1f1b", "0.01", "0.001")]
    # 11 * 30 ms without hops; at least the 2(p - 1) hops that GPipe exposes too, and at most two per microbatch more
    assert 0.330 + 0.006 <= float(plain["makespan"]) <= 0.330 + 0.006 + 16 * 0.001
    assert float(plain["peak_memory"]) == 4e9


@pytest.mark.parametrize(
    ("words", "differ"),
    [
        (("1f1b", "gpipe", "-p", "4,8", "-m", 8), "rows with other devices are of other models (8 devices: 2 times the size of 4); --stages 8 keeps"),
        (
            ("1f1b", "interleaved-1f1b", "-p", 4, "-m", 8, "--chunks", 2),
            "rows with other chunks are of other models (2 chunks: 2 times the size of 1)",
        ),
        (("1f1b", "gpipe", "-p", 4, "-m", "8,16"), ""),
        (("1f1b", "gpipe", "-p", "4,8", "-m", 8, "--stages", 8), ""),
        (("1f1b", "gpipe", "-p", "4,8", "-m", 8, "--costs", "gpt-1.5b-a100"), ""),
    ],
)
def test_models_of_different_size_are_noted(pipesim, words, differ):
    run = pipesim("sweep", *words)
    assert run.returncode == 0, run.stderr
    assert differ in run.stderr
    assert differ in run.stdout
    assert ("note: " in run.stderr, "note: " in run.stdout) == (bool(differ), bool(differ))


def test_the_front_says_every_time_and_size_with_its_unit(pipesim, tmp_path):
    (tmp_path / "sweep.toml").write_text('schedules = "1f1b"\ndevices = 2\nmicrobatches = 4\nunit = "ms"\nbackward = 20\nforward = [10, [10, 20]]\n')
    run = pipesim("sweep", "--file", "sweep.toml", "--latency", "0.6,5 us", "--activation", "1 GB,2 GB", "--bandwidth", "25 GB/s,50 GB/s")
    assert run.returncode == 0, run.stderr
    cells = {tuple(line.split("  ")) for line in run.stdout.splitlines()}
    words = {word.strip() for line in cells for word in line}
    assert {"600 µs", "5 µs", "1 GB", "2 GB", "25 GB/s", "50 GB/s", "10 ms", "10 ms,20 ms"} <= words
    assert "0.0006" not in run.stdout
    run = pipesim("sweep", "1f1b", "-p", 2, "-m", 4, "--latency", "0,0.25", "--out", "slots.csv")
    assert [line.split()[0] for line in run.stdout.splitlines()[3:5]] == ["0.0", "0.25"]


def test_parquet_and_a_picture(pipesim, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    run = pipesim("sweep", "1f1b", "gpipe", *SMALL, "--latency", "0,1", "--out", "out.parquet", "--plot", "front.png")
    assert run.returncode == 0, run.stderr
    assert parquet.read_table(tmp_path / "out.parquet").num_rows == 4
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def test_failures_are_counted_and_if_all_fail_it_is_an_error(here):
    status, errors = here("sweep", "chimera", "1f1b", "-p", "3,4", "-m", 8)
    assert status == 0
    assert "1 of 4 failed" in errors
    status, errors = here("sweep", "chimera", "-p", 3, "-m", 8, "--out", "other.csv")
    assert status == 1
    assert "devices" in errors


@pytest.mark.parametrize(
    ("arguments", "code", "about"),
    [
        ((), 2, "Missing schedules"),
        (("1f1b", "-p", 4), 1, "wants microbatches"),
        (("1f2b", "-p", 4, "-m", 8), 1, "did you mean '1f1b'"),
        (("1f1b", "-p", "4,x", "-m", 8), 2, "'x' is not a whole number"),
        (("1f1b", "-p", "4,0", "-m", 8), 1, "at least 1"),
        (("1f1b", *SMALL, "--chunks", 2), 2, "No such option: --chunks"),
        (("interleaved-1f1b", *SMALL, "--warmup", "3,2,1,0"), 2, "is a list for one schedule"),
        (("1f1b", *SMALL, "--latency", "0,5 us"), 2, "needs physical times"),
        (("1f1b", *SMALL, "--latency", "0,,1"), 2, "--latency"),
        (("1f1b", *SMALL, "--policy", "A,C"), 2, "'C'"),
        (("1f1b", *SMALL, "--unit", "ms", "--bandwidth", "25"), 1, "unit"),
        (("1f1b", *SMALL, "--jobs", 0), 2, "--jobs"),
        (("1f1b", *SMALL, "--out", "x.xlsx"), 1, "x.xlsx"),
        (("1f1b", *SMALL, "--plot", "x.html"), 1, "x.html"),
        (("1f1b", "-p", 4, "-m", 8, "--costs", "gpt-1.5b-a100", "--unit", "ms"), 2, "leave out --unit"),
        (("--file", "missing.toml"), 1, "missing.toml"),
        (("--file", "broken.toml"), 1, "did you mean 'latency'"),
        (("--file", "typed.toml"), 1, "devices"),
    ],
)
def test_wrong_calls_say_one_thing_and_write_nothing(here, tmp_path, arguments, code, about):
    (tmp_path / "broken.toml").write_text('schedules = "1f1b"\ndevices = 4\nmicrobatches = 8\nlatncy = 1\n')
    (tmp_path / "typed.toml").write_text('schedules = "1f1b"\ndevices = {a = 1}\nmicrobatches = 8\n')
    status, errors = here("sweep", *arguments)
    assert status == code
    assert about in errors
    assert errors.count("Error:") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.toml", "typed.toml"]


def test_a_file_of_another_sweep_is_left_alone(here, tmp_path):
    assert here("sweep", "1f1b", *SMALL) == (0, "")
    before = (tmp_path / "sweep.csv").read_bytes()
    status, errors = here("sweep", "gpipe", *SMALL)
    assert status == 1
    assert "another sweep" in errors
    assert (tmp_path / "sweep.csv").read_bytes() == before


# -- interrupted -------------------------------------------------------------------------------------------------------

# 2 x 30 runs of 2048 ops, in batches of 9
LONG = ["sweep", "1f1b", "gpipe", "-p", "8", "-m", "128", "--latency", ",".join(f"{i / 100}" for i in range(30)), "--jobs", "2", "--engine", "simpy"]


def _started(folder: Path, until: int) -> subprocess.Popen[str]:
    """The long sweep, when its file has so many rows more."""
    out = folder / "sweep.csv"
    before = out.read_bytes().count(b"\n") if out.exists() else 1
    process = subprocess.Popen(
        [str(Path(sys.executable).parent / "pipesim"), *LONG],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not out.exists() or out.read_bytes().count(b"\n") < before + until:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return process


def _alive(session: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, *_, owner = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(owner) == session and state != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_killed_and_interrupted_it_goes_on_and_ends_with_the_same_rows(pipesim, tmp_path):
    killed = _started(tmp_path, until=5)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=30)
    after_kill = rows(tmp_path / "sweep.csv")
    assert 5 <= len(after_kill) < 60

    interrupted = _started(tmp_path, until=1)
    os.killpg(interrupted.pid, signal.SIGINT)  # as a terminal does: the workers get it, too
    _, errors = interrupted.communicate(timeout=30)
    assert interrupted.returncode == 130
    assert "of 60 rows are in sweep.csv; the same command goes on from there" in errors
    assert "Traceback" not in errors
    assert len(after_kill) < len(rows(tmp_path / "sweep.csv")) <= 60

    assert pipesim(*LONG).returncode == 0
    assert pipesim(*LONG, "--out", "whole.csv").returncode == 0
    assert (tmp_path / "sweep.csv").read_bytes().startswith((tmp_path / "whole.csv").read_bytes().partition(b"\n")[0])
    assert sorted((tmp_path / "sweep.csv").read_bytes().splitlines()) == sorted((tmp_path / "whole.csv").read_bytes().splitlines())

    # nobody is left: workers of a killed sweep end by themselves
    deadline = time.monotonic() + 30
    while _alive(killed.pid) or _alive(interrupted.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


# -- jitter ------------------------------------------------------------------------------------------------------------


def test_a_slow_device_is_critical(pipesim):
    # case S25: 39.3 for 1F1B with device 2 slower by 1.3
    data = json.loads(pipesim("jitter", "1f1b", *SMALL, "--slow-device", "2=1.3", "--json").stdout)
    assert data["makespan_mean"] == pytest.approx(39.3)
    assert data["criticality"] == [0, 0, 1, 0]


def test_jitter_is_what_python_says(pipesim):
    import pipesim as ps

    schedule, costs = ps.generate("1f1b", 4, 8), ps.UniformCosts(forward=1, backward=2, latency=0.5)
    expected = ps.monte_carlo(schedule, costs, jitter=ps.LogNormal(0.1), slow_links={(0, 1): 4}, n=50, seed=7)
    run = pipesim("jitter", "1f1b", *SMALL, "--latency", 0.5, "--lognormal", 0.1, "--slow-link", "0>1=4", "-n", 50, "--seed", 7, "--json")
    assert json.loads(run.stdout) == expected.as_dict()


def test_measured_durations_and_kinds(pipesim, tmp_path):
    (tmp_path / "measured.csv").write_text("F,18.2\nF,18.4\nB,36.5\nB,36.6\n\nB,36.7\n")
    run = pipesim("jitter", "1f1b", *SMALL, "--samples", "measured.csv", "-n", 20)
    assert run.returncode == 0, run.stderr
    assert "makespan, 0.95 quantile" in run.stdout
    (tmp_path / "plain.txt").write_text("1\n3\n")
    data = json.loads(
        pipesim("jitter", "naive", "-p", 1, "-m", 1, "--forward", 1, "--backward", 2, "--samples", "plain.txt", "-n", 40, "--json").stdout
    )
    # F 0.5 or 1.5, B 1 or 3
    assert set(data["makespan_quantiles"].values()) <= {1.5, 2.5, 3.5, 4.5}


@pytest.mark.parametrize(
    ("arguments", "code", "about"),
    [
        ((), 2, "nothing varies"),
        (("--normal", "x"), 2, "'x' is not a number"),
        (("--normal", "-1"), 1, "at least 0"),
        (("--normal", "Q=1"), 2, "'Q' is no kind"),
        (("--normal", "F=1,F=2"), 2, "twice"),
        (("--normal", "0.1", "--lognormal", "F=0.1"), 2, "say each kind once"),
        (("--normal", "F=0.1", "--lognormal", "F=0.1"), 2, "say each kind once"),
        (("--slow-device", "2"), 2, "write 2=1.3"),
        (("--slow-device", "9=2"), 1, "no device 9"),
        (("--slow-link", "0-1=2"), 2, "write '0>1=4'"),
        (("--slow-link", "0>3=2"), 1, "carries nothing"),
        (("--samples", "missing.txt"), 1, "missing.txt"),
        (("--samples", "bad.txt"), 1, "line 2"),
        (("--normal", "0.1", "--draws", "0"), 1, "n must be at least 1"),
        (("--normal", "0.1", "--steps", "2"), 2, "--steps"),
        (("--normal", "0.1", "--jobs", "-2"), 2, "--jobs"),
    ],
)
def test_wrong_jitter(here, tmp_path, arguments, code, about):
    (tmp_path / "bad.txt").write_text("1\nmany\n")
    status, errors = here("jitter", "1f1b", *SMALL, *arguments)
    assert status == code
    assert about in errors
