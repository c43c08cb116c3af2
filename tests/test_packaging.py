"""What an installed pipesim consists of, and that a second package's schedules come through the same door."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps", "--no-index"]

THIRD_PARTY = '''
from pipesim.schedule import Schedule

def tail_heavy(devices: int, microbatches: int, *, reverse: bool = False) -> Schedule:
    """Sends one microbatch after the other through all devices."""
    order = range(microbatches)[::-1] if reverse else range(microbatches)
    return Schedule.from_streams([[op for i in order for op in (f"{s}F{i}", f"{s}B{i}")] for s in range(devices)], name="tail-heavy")

SCHEDULES = {"Tail-Heavy": tail_heavy}
'''
SETUP = """
[metadata]
name = tail-heavy
version = 1
[options]
py_modules = tail_heavy
[options.entry_points]
pipesim.schedules =
    mine = tail_heavy:SCHEDULES
"""
PYPROJECT = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'


def _run(*command: object, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tracked files, as `pip install .` would make it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("pipesim", "schedules"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in (".py", ".toml", ".typed"):
                target = source / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    built = _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist", cwd=source)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (source / "dist").glob("*.whl")
    return path


def test_the_wheel_holds_every_module_and_every_preset(wheel: Path):
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder, installed in (("pipesim", "pipesim"), ("schedules", "pipesim/schedules")):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".toml", ".typed"):
                assert f"{installed}/{path.relative_to(ROOT / folder)}" in inside
    assert not any(name.startswith("schedules/") for name in inside)


def test_a_second_package_adds_a_schedule(wheel: Path, tmp_path: Path):
    """Installed from its wheel beside a real third-party package, away from the repository."""
    package, target = tmp_path / "package", tmp_path / "site"
    package.mkdir()
    (package / "tail_heavy.py").write_text(THIRD_PARTY)
    (package / "setup.cfg").write_text(SETUP)
    (package / "pyproject.toml").write_text(PYPROJECT)
    installed = _run(*PIP, "--target", target, wheel, package, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    # site first: this pipesim is the installed wheel, not the repository
    env = {**os.environ, "PYTHONPATH": str(target)}
    listed = _run(sys.executable, "-m", "pipesim", "list", cwd=tmp_path, env=env)
    assert "tail-heavy" in listed.stdout
    code = "import pipesim, sys; print(pipesim.__file__); print(pipesim.simulate(pipesim.generate('TAIL-heavy', 3, 2, reverse=True)).makespan)"
    ran = _run(sys.executable, "-c", code, cwd=tmp_path, env=env)
    assert ran.stdout.splitlines()[0].startswith(str(target)), ran.stderr
    # one microbatch at a time through three devices: 2 x 3 x (1 + 2)
    assert float(ran.stdout.splitlines()[1]) == 18


def test_a_file_of_ones_own(tmp_path: Path):
    (tmp_path / "mine.py").write_text(THIRD_PARTY)
    run = _run(sys.executable, "-m", "pipesim", "simulate", "mine.py:tail_heavy", "-p", 3, "-m", 2, "--reverse=true", "--json", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert '"makespan": 18.0' in run.stdout
    module = _run(
        sys.executable,
        "-m",
        "pipesim",
        "simulate",
        "mine:tail_heavy",
        "-p",
        3,
        "-m",
        2,
        "--json",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert '"makespan": 18.0' in module.stdout
