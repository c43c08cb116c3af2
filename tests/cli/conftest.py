from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def pipesim(tmp_path: Path) -> Run:
    """Runs the installed command line in an empty folder, as a user's shell does."""

    def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "pipesim"), *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=env, check=False)

    return run
