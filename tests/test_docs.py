"""What the README and the docs show is true: commands run, files load, the first-minutes examples work."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import pipesim as ps
from pipesim.costs import read_costs

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FILES = (ROOT / "docs" / "files.md").read_text()


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_python_of_the_readme():
    for block in _blocks(README, "python"):
        exec(block, {})


@pytest.mark.parametrize("line", re.findall(r"^    \$ \.venv/bin/(pipesim .*)$", README, re.MULTILINE))
def test_commands_of_the_readme(line, tmp_path):
    command = [sys.executable, "-m", *shlex.split(line)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr


def test_cluster_file_of_the_docs():
    (text,) = [block for block in _blocks(FILES, "toml") if "[[links]]" in block]
    cluster = ps.Cluster.from_toml(text)
    # 200 Gbit/s are 25 GB/s
    assert cluster.link(7, 8).bandwidth == 25e9
    assert cluster.link(0, 1).bandwidth == 12e9
    assert cluster.speeds(4).tolist() == [1, 1, 0.77, 0.77]


def test_shared_links_of_the_docs():
    (text,) = [block for block in _blocks(FILES, "toml") if "sharing" in block]
    cluster = ps.Cluster.from_toml(text)
    # two pipelines, so that devices 7 and 8 are GPUs 14, 15 and 16, 17, on ports 3 and 0 of nodes 1 and 2
    assert [resource.name for resource, _ in cluster.route(7, 8)][-4:] == ["switch 1 down", "node 2 NIC 0 in", "node 2 PCIe 0", "node 2 bus"]
    assert cluster.speeds(9).tolist() == [1.0] * 8 + [0.4]


def test_clusters_of_the_docs(capsys):
    text = (ROOT / "docs" / "communication.md").read_text()
    (code,) = [block for block in _blocks(text, "python") if "describe" in block]
    exec(code, {})
    shown = "".join(f"    {line}\n" for line in capsys.readouterr().out.splitlines())
    assert shown in text


def test_cluster_with_a_command_in_the_docs(tmp_path):
    """By hand, in ms from 20.42: 16 each over the NIC, at 0, 10 and 20. Of the first 6 are left at 10 and 1 at 20, of the second 11 at 20;
    in thirds the first is through at 23, the second has 10 left, in halves until 43: it took 33, and alone it takes 16."""
    text = (ROOT / "docs" / "communication.md").read_text()
    (example,) = [block for block in _blocks(text, "toml") if "two nodes of four GPUs" in block]
    (line,) = re.findall(r"^    \$ pipesim (.* --cluster two-nodes\.toml)$", text, re.MULTILINE)
    (tmp_path / "two-nodes.toml").write_text(example)
    command = [sys.executable, "-m", "pipesim", *shlex.split(line)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    shown = re.search(r"It prints, among others,\n\n((?:    .*\n)+)", text)
    assert all(line.strip() in run.stdout for line in shown[1].splitlines())
    (nic,) = (words for words in map(str.split, run.stdout.splitlines()) if words[:5] == ["node", "0", "NIC", "0", "out"])
    assert nic[-3:] == ["0", "17", "ms"]


def test_stage_times_of_the_docs(tmp_path):
    (text,) = [block for block in _blocks(FILES, "toml") if "forward" in block]
    (tmp_path / "times.toml").write_text(text)
    run = ps.simulate(ps.generate("1f1b", 8, 8), read_costs(tmp_path / "times.toml"))
    assert run.unit == "s"


def test_generator_of_contributing(tmp_path):
    (text,) = _blocks((ROOT / "CONTRIBUTING.md").read_text(), "python")
    assert len([line for line in text.splitlines() if line.strip()]) <= 15
    (tmp_path / "my_schedule.py").write_text(text)
    run = ps.simulate(ps.generate(f"{tmp_path / 'my_schedule.py'}:one_at_a_time", 4, 8, reverse=True), ps.UniformCosts(forward=1, backward=2))
    # one microbatch at a time through four devices, but the next forward of device 0 need not wait for anything: it
    # stands after the backward on every device, so 8 x 4 x 3
    assert run.makespan == 96


def test_every_schedule_and_preset_that_the_docs_name_exists():
    for name in re.findall(r"`?--cluster`? also takes a preset: ([^.]*)\.", FILES)[0].split(", "):
        ps.Cluster.load(name)
