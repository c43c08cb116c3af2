"""``pipesim calibrate``."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import pytest

import pipesim as ps

# what a calibration of two stages with split backward says, in short
TEXT = """calibration = 1
name = "hand-made"
[host]
op = 0.001
[[stages]]
forward = [0.1, 0.1]
backward = [0.2, 0.2]
"""


def test_predicts_with_a_calibration(pipesim, tmp_path):
    (tmp_path / "c.toml").write_text(TEXT)
    run = pipesim("calibrate", "c.toml", "--predict", "1f1b", "-p", 2, "-m", 4, "--json")
    assert run.returncode == 0, run.stderr
    (prediction,) = json.loads(run.stdout)["predictions"]
    # (m + p - 1)(F + B) = 5 x 0.3 s; on the critical path are 10 ops, each followed by 1 ms
    assert prediction["ops"] == pytest.approx(1.5)
    assert prediction["predicted"] == pytest.approx(1.5 + 0.010)
    assert prediction["error"] is None
    simulated = json.loads(pipesim("simulate", "1f1b", "-p", 2, "-m", 4, "--costs", "c.toml", "--json").stdout)
    assert simulated["makespan"] == pytest.approx(prediction["predicted"])


def test_a_saved_calibration_is_not_printed_again(pipesim, tmp_path):
    (tmp_path / "c.toml").write_text(TEXT)
    words = ("calibrate", "c.toml", "--predict", "1f1b", "-p", 2, "-m", 4)
    short, long, alone = (pipesim(*given).stdout for given in (words, (*words, "--report"), words[:2]))
    assert short.startswith("schedule ")
    assert long.endswith(short)
    assert "typical" in long
    assert long == f"{alone}\n{short}"


def test_what_a_calibration_has_comes_first_in_its_help(pipesim):
    text = pipesim("calibrate", "--help").stdout.partition("The calibration:")[2]
    assert text.index("--run ") < text.index("--predict ") < text.index("--devices") < text.index("--layers") < text.index("  --forward ")
    for other in ("--engine", "--capacity", "--cluster ", "--weight-policy", "--reduction", "--lower"):
        assert f"  {other}" not in text
    # what is left out of the help is refused as before, and not ignored
    assert "is of a simulation" in pipesim("calibrate", "--run", "-p", 2, "-m", 4, "--engine", "simpy").stderr
    assert "No such option" in pipesim("calibrate", "c.toml", "--weight-policy", "stash").stderr
    # replay's own help has its own groups
    assert "--run:" not in pipesim("replay", "--help").stdout


def test_a_busy_machine_is_said(pipesim, tmp_path, monkeypatch):
    # predicted 1.51 s; runs of 1.5, 2 and 2.5 s differ by 25 %
    from pipesim.cli import calibrating

    real = calibrating._predictions
    monkeypatch.setattr(calibrating, "_predictions", lambda *given: [replace(one, measured=(1.5, 2.0, 2.5)) for one in real(*given)])
    (tmp_path / "c.toml").write_text(TEXT)
    words = ("calibrate", "c.toml", "--predict", "1f1b", "-p", 2, "-m", 4)
    assert pipesim(*words).stdout.startswith("THE MACHINE WAS TOO BUSY: runs of one schedule differ (spread 25 %)")
    known = pipesim(*words, "--report").stdout.partition("to know:")[2]
    assert known.lstrip().startswith("THE MACHINE WAS TOO BUSY")
    data = json.loads(pipesim(*words, "--json").stdout)
    assert data["notes"][0].startswith("THE MACHINE WAS TOO BUSY")
    assert (data["predictions"][0]["within"], data["predictions"][0]["verdict"]) == (None, "cannot tell")


def test_split_backward_that_was_not_measured(pipesim, tmp_path):
    (tmp_path / "c.toml").write_text(TEXT)
    run = pipesim("calibrate", "c.toml", "--predict", "zb-h1", "-p", 2, "-m", 4)
    assert run.returncode == 1
    assert "nothing about zero-bubble schedules" in run.stderr


def test_simulated_runs_are_refused(pipesim):
    ps.simulate(ps.generate("gpipe", 2, 4), ps.UniformCosts(forward=1, backward=2)).save("run.json.gz")
    run = pipesim("calibrate", "run.json.gz")
    assert run.returncode == 1
    assert "measured runs" in run.stderr


@pytest.mark.parametrize(
    "words", [[], ["--run", "x.json.gz"], ["x.json.gz", "--verify"], ["--run", "-p", "2"], ["--run", "-p", "2", "-m", "4", "--stage-chunks", "two"]]
)
def test_usage(pipesim, words):
    assert pipesim("calibrate", *words).returncode == 2


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="replays want pipesim[replay]")
def test_runs_and_ends_with_a_table(pipesim, tmp_path):
    words = "--run -p 2 -m 4 --hidden 16 --microbatch-size 2 --iterations 3 --warm-up 1 --rounds 1 --predict 1f1b,zb-h1 --verify"
    run = pipesim("calibrate", *words.split())
    assert run.returncode == 0, run.stderr
    table = run.stdout[run.stdout.index("schedule ") :].splitlines()
    assert table[0].split()[:2] == ["schedule", "predicted"]
    assert [line.split()[0] for line in table[1:3]] == ["1f1b", "zb-h1"]
    files = {path.name for path in tmp_path.iterdir()}
    assert {"calibration.toml", "calibration-cluster.toml", "calibration-runs"} <= files
    # the saved runs say the same again
    kept = sorted((tmp_path / "calibration-runs").glob("*.json.gz"))
    saved = [path for path in kept if not path.name.startswith("verify")]
    other = [path for path in kept if path.name.startswith("verify-1f1b")]
    again = pipesim("calibrate", *saved, "--predict", ",".join(map(str, other)), "--out", "again.toml", "--json")
    assert again.returncode == 0, again.stderr
    (prediction,) = json.loads(again.stdout)["predictions"]
    assert len(prediction["measured"]) == 1
    first, second = ((tmp_path / name).read_text() for name in ("calibration.toml", "again.toml"))
    assert [line for line in first.splitlines() if line.startswith("forward")] == [line for line in second.splitlines() if line.startswith("forward")]
