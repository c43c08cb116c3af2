"""The script for GPU boxes, on CPUs with tiny sizes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="replays want pipesim[replay]")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_box.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("_gpu_box", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_dry_run(tmp_path):
    out = tmp_path / "box.json"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--only", "machine,solo-gpipe,solo-split,memory,nccl", "--out", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False)
    assert run.returncode == 0, run.stderr
    report = json.loads(out.read_text())
    status = {name: section["status"] for name, section in report["sections"].items()}
    assert status == {"machine": "ok", "solo-gpipe": "ok", "solo-split": "ok", "memory": "ok", "nccl": "skipped"}, run.stdout
    assert report["complete"]
    kinds = {one["kind"] for one in report["sections"]["solo-split"]["durations"]}
    assert kinds == {"F", "B", "I", "W", "U"}
    assert {row["schedule"] for row in report["sections"]["memory"]["peaks"]} == {"gpipe", "split"}


@pytest.mark.slow
def test_what_fails_and_what_hangs_is_kept_and_said(script, tmp_path, monkeypatch):
    folder = tmp_path / "runs"
    folder.mkdir()
    failed = script.child("nonsense", tmp_path / "box.json", folder, True, 60.0)
    assert failed["status"] == "failed"
    assert "nonsense" in failed["why"]
    hangs = tmp_path / "hangs.py"
    hangs.write_text("import time\nprint('here')\nimport sys; sys.stdout.flush()\ntime.sleep(600)\n")
    monkeypatch.setattr(script, "__file__", str(hangs))
    hung = script.child("machine", tmp_path / "box.json", folder, True, 10.0)
    assert (hung["status"], hung["why"]) == ("timed out", "here")
