"""``pipesim profile`` and ``pipesim fit``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipesim.models import ModelSpec, Parallelism, read_device, read_efficiency

Run = Callable[..., Any]

BUILD = """
import torch
def build():
    return torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 50))
"""


# -- profile -----------------------------------------------------------------------------------------------------------------------


def test_profile_then_simulate(pipesim: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(BUILD)
    run = pipesim("profile", "net.py:build", "--batch-shape", "4,8", "--tokens", 50, "--repeats", 2, "--warm-up", 1, "--device", "cpu")
    assert run.returncode == 0, run.stderr
    assert "4 layers on cpu, int64 batch of 4 x 8, medians of 2" in run.stdout
    assert "wrote profile.toml" in run.stderr
    assert "warning: 2 repeats are too few" in run.stderr
    assert "# warning: 2 repeats are too few" in (tmp_path / "profile.toml").read_text()
    for schedule in ("1f1b", "zb-h1"):  # the halves were measured, so no share is needed
        run = pipesim("simulate", schedule, "--devices", 2, "--microbatches", 4, "--costs", "profile.toml", "--json")
        assert run.returncode == 0, run.stderr
        assert json.loads(run.stdout)["makespan"] > 0


def test_profile_as_json_and_as_graph(pipesim: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(BUILD)
    run = pipesim(
        "profile",
        "net.py:build",
        "--batch-shape",
        "4,8",
        "--tokens",
        50,
        "--repeats",
        1,
        "--warm-up",
        0,
        "--out",
        "graph.txt",
        "--json",
        "--device",
        "cpu",
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert [layer["kind"] for layer in found["layers"]] == ["Embedding", "Linear", "ReLU", "Linear"]
    assert found["layers"][1]["parameters"] == 4 * (16 * 32 + 32)
    assert (tmp_path / "graph.txt").read_text().startswith("node1 -- Embedding -- forward_compute_time=")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("net.py:build",), 2, "Missing option '--batch-shape'"),
        (("net.py:build", "--batch-shape", "4,x"), 2, "no list of whole numbers"),
        (("net.py:bild", "--batch-shape", "4,8"), 1, "did you mean 'build'"),
        (("net.py:build", "--batch-shape", "4,8"), 1, "layer 0, Embedding, fails on an input"),
        (("net.py:build", "--batch-shape", "4,8", "--tokens", "50", "--out", "x.json"), 1, "ends with .toml"),
    ],
)
def test_profile_explains_mistakes(pipesim: Run, tmp_path: Path, arguments: tuple[str, ...], status: int, message: str) -> None:
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(BUILD)
    run = pipesim("profile", *arguments, "--repeats", 1, "--warm-up", 0)
    assert (run.returncode, message in run.stderr) == (status, True), run.stderr


# -- fit ---------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs of a machine whose GEMMs reach 0.6 of the peak and whose step has 0.05 s of overhead."""
    pytest.importorskip("scipy")
    from pipesim.fit import Configuration, Predictor

    truth = read_device("a100-80g").with_efficiency(gemm=0.6, gemm_size=0.0, attention=1.0, step_overhead=0.05)
    sizes = {"layers": 8, "hidden": 1024, "heads": 16, "vocabulary": 1024, "sequence": 512}
    lines = ["layers,hidden,heads,vocabulary,sequence,pipeline,data,micro_batch,batch,seconds,who"]
    for pipeline, data in ((1, 8), (2, 4), (4, 2)):
        for microbatch in (1, 2, 4):
            one = Configuration(
                ModelSpec(name="small", **sizes), Parallelism(pipeline=pipeline, data=data, microbatch=microbatch, recompute="full"), 64
            )
            seconds = Predictor(one, truth).simulate(truth.efficiency)
            lines.append(",".join(map(str, (*sizes.values(), pipeline, data, microbatch, 64, repr(seconds), "ab"[pipeline > 1]))))
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


FIXED = ("--set", "recompute=full", "--fix", "gemm_size=0", "--fix", "attention=1", "--free", "gemm,step_overhead")


def test_fit_finds_what_made_the_runs_and_writes_it(pipesim: Run, runs: Path, tmp_path: Path) -> None:
    run = pipesim("fit", "runs.csv", *FIXED, "--shuffles", 2, "--folds", 3, "--leave-out", "who", "--out", "mine.toml", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["fitted"] == pytest.approx({"gemm": 0.6, "step_overhead": 0.05}, rel=1e-3)
    assert found["errors"]["worst"] < 0.01
    assert found["cross_validated"]["shuffles"] == 2
    assert set(found["by_pipeline"]) == {"1", "2", "4"}
    assert set(found["left_out"]) == {"who"}
    efficiency = read_efficiency(tmp_path / "mine.toml")
    assert (efficiency.gemm, efficiency.attention) == (found["fitted"]["gemm"], 1.0)
    # and estimate takes it
    options = ("--tensor", 8, "--pipeline", 8, "--json")
    times = [
        json.loads(pipesim("estimate", "gpt3-175b", *options, *more).stdout)["schedules"][0]["iteration_time"]
        for more in ((), ("--calibration", "mine.toml"))
    ]
    assert times[0] != times[1]


def test_fit_prints_a_report(pipesim: Run, runs: Path) -> None:
    run = pipesim("fit", "runs.csv", *FIXED, "--shuffles", 1, "--folds", 3, "--rows", "--predict", "runs.csv")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("(2 fitted parameters, 9 runs)") == 2
    for words in ("by pipeline", "by schedule", "the worst", "what they share", "every run", "none of them fitted to these 9 runs"):
        assert words in run.stdout


def test_fit_writes_no_number_that_the_runs_do_not_tell(pipesim: Run, runs: Path, tmp_path: Path) -> None:
    """Nothing crosses nodes. Nine runs left out one at a time are the same however they are dealt."""
    fixed = (*FIXED[:-1], "gemm,step_overhead,between")
    run = pipesim("fit", "runs.csv", *fixed, "--folds", 9, "--out", "mine.toml")
    assert run.returncode == 0, run.stderr
    assert "leave-one-out" in run.stdout
    assert read_efficiency(tmp_path / "mine.toml").between == read_device("a100-80g").efficiency.between
    assert "these runs do not tell between" in (tmp_path / "mine.toml").read_text()
    run = pipesim("fit", "runs.csv", *fixed, "--folds", 9, "--json")
    assert json.loads(run.stdout)["cross_validated"]["shuffles"] == 1
    assert "warning: these runs do not tell between" in run.stderr


def test_too_few_runs_to_leave_some_out(pipesim: Run, runs: Path) -> None:
    runs.write_text("\n".join(runs.read_text().splitlines()[:3]) + "\n")
    run = pipesim("fit", "runs.csv", *FIXED)
    assert run.returncode == 0, run.stderr
    assert "2 runs for 2 numbers, fewer than 3 for each" in run.stdout
    assert "not cross-validated: 2 runs are too few" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("nowhere.csv",), 1, "nowhere.csv"),
        (("runs.csv", "--free", "gem"), 1, "did you mean 'gemm'"),
        (("runs.csv", "--set", "recompute"), 2, "no NAME=VALUE"),
        (("runs.csv", "--set", "recompte=full"), 1, "did you mean 'recompute'"),
        (("runs.csv", "--fix", "gemm=fast"), 2, "'fast' is not a number"),
        (("runs.csv", "--fix", "gemms=1"), 1, "an efficiency has no 'gemms'"),
        (("runs.csv", "--leave-out", "weather", "--free", "gemm"), 1, "no run has that column"),
        (("runs.csv", "--folds", "1", "--free", "gemm"), 1, "folds must be at least 2"),
    ],
)
def test_fit_explains_mistakes(pipesim: Run, runs: Path, arguments: tuple[str, ...], status: int, message: str) -> None:
    run = pipesim("fit", *arguments)
    assert (run.returncode, message in run.stderr) == (status, True), run.stderr
