"""What docs/models.md shows is true: its Python runs, its files load, its defaults are the defaults."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from pipesim.models import Efficiency, read_device, read_model

TEXT = (Path(__file__).parent.parent.parent / "docs" / "models.md").read_text()


def test_python_runs() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(block, {})
    import matplotlib.pyplot as plt

    plt.close("all")


def test_files_load(tmp_path: Path) -> None:
    model, device = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "model.toml").write_text(model)
    (tmp_path / "device.toml").write_text(device)
    assert read_model(tmp_path / "model.toml").active_experts == 2
    assert read_device(tmp_path / "device.toml").efficiency == Efficiency()


def test_defaults_of_the_table() -> None:
    stated: dict[str, float] = {}
    for names, values in re.findall(r"^\| (`[^|]*`) \| ([0-9., ]+) \|", TEXT, re.MULTILINE):
        fields, numbers = re.findall(r"`([a-z_]+)`", names), [float(value) for value in values.split(",")]
        stated.update(zip(fields, numbers * (len(fields) if len(numbers) == 1 else 1), strict=False))
    assert stated == asdict(Efficiency())
