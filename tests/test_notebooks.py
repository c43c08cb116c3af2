"""Every notebook runs from top to bottom, shows something, and is committed without outputs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NOTEBOOKS = sorted((HERE.parent / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def execute():
    spec = importlib.util.spec_from_file_location("_notebooks", HERE / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.execute


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_without_outputs(path):
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of jupyter's own making
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_shows_pictures(path, execute):
    notebook = execute(path)
    kinds = {kind for cell in notebook.cells for output in cell.get("outputs", ()) for kind in output.get("data", {})}
    assert {"image/svg+xml", "image/png"} <= kinds
