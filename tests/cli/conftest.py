from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def pipesim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line in an empty folder, as a user's shell does, but within this process: a start takes longer than a run."""
    from pipesim.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main() changes it

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = ["pipesim", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        out, err = io.StringIO(), io.StringIO()
        status: object = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("default")
            try:
                main()
            except SystemExit as stop:
                status = stop.code
        return subprocess.CompletedProcess(command, int(status or 0), out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def shell(tmp_path: Path) -> Run:
    """Runs the installed command in a process of its own."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "pipesim"), *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    return run
