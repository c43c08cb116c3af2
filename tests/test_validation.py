"""The goals of the comparison with runs that other people measured; benchmarks/validation.py is what reports them.

Expected errors are upper bounds, set beforehand. Data: Qi et al. 2024 (arXiv 2401.10241), Narayanan et al. 2021 (2104.04473),
Korthikanti et al. 2022 (2205.05198), and the campaign published with vTrain (VIA-Research/vTrain).
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy")

from pipesim.fit import Predictor

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def module(name: str) -> Any:
    """A module of benchmarks/measured_runs."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    return importlib.import_module(f"measured_runs.{name}")


def mean(errors: Any) -> float:
    """Mean absolute error in percent."""
    return float(100 * np.abs(errors).mean())


@pytest.mark.slow
def test_zero_bubble_table_4(shared_data: Path) -> None:
    throughput, memory = module("zero_bubble").zero_bubble(shared_data)
    assert len(throughput.fitted) <= 2
    assert mean(throughput.errors) <= 1.2
    assert set(throughput.left_out) == {"model", "schedule"}
    # left out they are no longer fitted; a tuned model would fall apart here
    assert mean(throughput.left_out["model"]) <= 1.5
    assert mean(throughput.left_out["schedule"]) <= 1.5
    assert not memory.fitted
    assert len(memory.errors) == len(throughput.errors) >= 24
    # within 8 %, but for one row: the logits that the last device of 1.5B holds under ZB-2p with 64 microbatches are counted 9 % too high
    assert np.sum(100 * np.abs(memory.errors) > 8) <= 1
    assert 100 * np.abs(memory.errors).max() <= 9


def test_zero_bubble_without_what_is_missing(shared_data: Path) -> None:
    """The bare schedule takes 8.7 % less time than was measured: what the two parameters stand for is real."""
    zero_bubble = module("zero_bubble")
    rows = zero_bubble.zero_bubble_rows(shared_data)
    bare = np.mean([zero_bubble.zero_bubble_seconds(row, update=False) / row.seconds for row in rows])
    assert bare == pytest.approx(1 - 0.087, abs=5e-4)


def test_sizes_of_the_zero_bubble_models(shared_data: Path) -> None:
    """The data's README: 1.5B has 22 layers and 14.6B 46, the first and the last stage one less than the others."""
    for row in module("zero_bubble").zero_bubble_rows(shared_data):
        if row.model in ("1.5B", "14.6B"):
            assert row.spec.layers == {"1.5B": 22, "14.6B": 46}[row.model]
            assert row.layers_of_a_stage == 3


def test_ptdp_and_korthikanti(shared_data: Path) -> None:
    part = module("papers").papers(shared_data)
    assert len(part.fitted) <= 2
    assert len(part.errors) >= 9
    assert mean(part.errors) <= 3.5
    assert mean(part.left_out["one run"]) <= 3.5
    assert 0.5 < part.fitted["gemm"] < 0.9  # a part of the peak that GEMMs on A100 do reach


def test_what_is_said_of_the_defaults(shared_data: Path) -> None:
    """docs/models.md and ``pipesim estimate`` say that times are 3.6 % off on average and 6.6 % at most, with nothing fitted."""
    device, errors = module("part").A100, []
    for run in module("papers").papers_runs(shared_data):
        ways = [Predictor(choice, device) for choice in run.choices]
        errors.append(min(one.simulate(device.efficiency) for one in ways if len(ways) == 1 or one.fits) / run.seconds - 1)
    assert len(errors) == 9
    assert mean(errors) == pytest.approx(3.6, abs=0.05)
    assert 100 * np.abs(errors).max() == pytest.approx(6.6, abs=0.05)


def test_flops_of_ptdp(shared_data: Path) -> None:
    """Equation 3 by hand for 1.7B: 96 · 512 · 2048 · 24 · 2304² · (1 + 2048/13824 + 51200/(16 · 24 · 2304)) = 1.54668e16."""
    runs = module("papers").papers_runs(shared_data)
    (small,) = [run for run in runs if run.label == "1.7B"]
    assert small.seconds == pytest.approx(1.54668e16 / (32 * 137e12), rel=1e-5)


@pytest.mark.slow
def test_vtrains_campaign(shared_data: Path) -> None:
    part = module("vtrain").vtrain(shared_data)
    assert len(part.fitted) <= 10
    assert len(part.errors) >= 65
    assert 100 * np.median(np.abs(part.errors)) <= 2.5
    assert len(part.more["ten_fold_mean"]) >= 10
    assert np.mean(part.more["ten_fold_mean"]) <= 6
    assert np.mean(part.more["ten_fold_median"]) < 3  # not the goal, but far above it the fit would be a tuned one
    assert mean(part.left_out["model size"]) < 14.73  # vTrain's own figure
    text = part.text()
    assert all(word in text for word in ("90th percentile", "the worst ten", "what they share", "left out 175B"))


def test_activations_are_korthikantis_formulas() -> None:
    part = module("papers").activations()
    assert len(part.errors) == 20
    assert np.abs(part.errors).max() < 1e-12


@pytest.mark.slow
def test_rows_that_were_kept_back(shared_data: Path, tmp_path: Path) -> None:
    """--also predicts rows with what was fitted to others: here the other half of PTD-P's and Korthikanti's runs."""
    for name in ("korthikanti_table5.csv", "megatron_ptdp_table1.csv"):
        head, *rows = (shared_data / "papers" / name).read_text().splitlines()
        for half in range(2):
            (tmp_path / str(half) / "papers").mkdir(parents=True, exist_ok=True)
            (tmp_path / str(half) / "papers" / name).write_text("\n".join([head, *rows[half::2]]) + "\n")
    part = module("papers").papers(tmp_path / "0", tmp_path / "1")
    assert part.new is not None
    assert len(part.errors) + len(part.new) == len(module("papers").papers_runs(shared_data))
    assert mean(part.new) <= 6
    assert "rows never seen" in part.text()


def test_without_the_data_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "validation.py", "--data", tmp_path / "nowhere"]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0
    assert "is not there; give --data" in run.stderr
