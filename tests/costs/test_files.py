"""Measured stage times in TOML, presets, and what is neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipesim import Cluster, Schedule, ScheduleError, UniformCosts, generate, simulate
from pipesim.costs import ProfileCosts, cost_presets, read_costs

FILE = """
name = "measured"
unit = "ms"
forward = [1.0, 2.0]
input_grad = 1.5
weight_grad = 0.5
optimizer = 10
latency = 0.25
[memory]
activation = "8 MB"
activation_freed_by_input_grad = "3 MB"
weights = ["1 GB", "2 GB"]
optimizer = "4 GB"
message = "2 MiB"
"""


def write(tmp_path: Path, text: str, name: str = "times.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_file_says_what_collectives_take(tmp_path: Path) -> None:
    text = 'unit = "ms"\nforward = 1\nreduction = [4, 2]\ntied = [[0, 1]]\ntied_reduction = 3\nunshard = 0.5\nbuckets = 2\nreduce_every_microbatch = true'
    costs = read_costs(write(tmp_path, text))
    assert isinstance(costs, UniformCosts)
    schedule, cluster = Schedule.from_text("0F0\n1F0"), Cluster()
    assert costs.reductions(schedule, cluster).tolist() == [4e-3, 2e-3]
    assert costs.tied_reductions(schedule, cluster).tolist() == [3e-3]
    assert costs.unshards(schedule, cluster).tolist() == [0.5e-3, 0.5e-3]
    assert (costs.buckets, costs.reduce_every_microbatch) == (2, True)


def test_a_file_says_times_and_bytes(tmp_path: Path) -> None:
    costs = read_costs(write(tmp_path, FILE))
    assert isinstance(costs, UniformCosts)
    assert (costs.unit, costs.name, costs.latency) == ("s", "measured", pytest.approx(0.25e-3))
    schedule = Schedule.from_text("0F0 0I0 0W0\n1F0 1B0")
    assert costs.durations(schedule).tolist() == pytest.approx([1e-3, 1.5e-3, 0.5e-3, 2e-3, 2e-3])
    assert costs.stage_bytes(schedule)["weights"].tolist() == [1e9, 2e9]
    assert costs.stage_bytes(schedule)["optimizer"].tolist() == [4e9, 4e9]
    assert costs.activation_bytes(schedule).kept.tolist() == [[8e6], [8e6]]
    assert costs.message_bytes(schedule).tolist() == [2 * 2**20] * 2


def test_slots_have_bare_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, 'unit = "slot"\nforward = 1\nbackward = 2\n[memory]\nactivation = 3')
    run = simulate(generate("1f1b", 4, 8), read_costs(path))
    assert (run.unit, run.makespan, run.peak_memory) == ("slot", 33, [12, 9, 6, 3])
    assert read_costs(path).name == "times"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("forward = 1", "unit"),
        ('unit = "minutes"\nforward = 1', "unit"),
        ('unit = "ms"\nbackward = 1', "forward"),
        ('unit = "ms"\nforward = -1', "forward"),
        ('unit = "ms"\nforward = nan', "forward"),
        ('unit = "ms"\nforward = "1"\nweigth_grad = 1', "did you mean 'weight_grad'"),
        ('unit = "ms"\nforward = 1\n[memory]\nactivation = 5', "activation = 5.* has no unit"),
        ('unit = "ms"\nforward = 1\n[memory]\nactivaton = "5 B"', "did you mean 'activation'"),
        ("unit = ", "not TOML"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=rf"times\.toml.*{message}"):
        read_costs(write(tmp_path, text))


def test_presets() -> None:
    assert cost_presets()
    for name in cost_presets():
        assert read_costs(name).unit == "s"
    with pytest.raises(ScheduleError, match=r"did you mean 'gpt-1\.5b-a100'"):
        read_costs("gpt-1.5b-a10")


def test_the_preset_of_the_zero_bubble_paper() -> None:
    """Table 9, 1.5B, p=8, m=24: F 18.522, B (our I) 18.086, W 9.337, communication 0.601 ms; Table 5: 1F1B 0.2431."""
    run = simulate(generate("1f1b", 8, 24), read_costs("gpt-1.5b-a100"))
    assert run.unit == "s"
    assert run.busy[0] == pytest.approx(24 * (18.522 + 18.086 + 9.337) * 1e-3)
    assert f"{run.span_bubble_rate:.4f}" == "0.2431"


def test_a_profile_is_told_by_its_form_and_takes_options(tmp_path: Path) -> None:
    line = "node{0} -- Linear -- forward_compute_time={0}.0, backward_compute_time=4.0, activation_size=8.0, parameter_size=16.0"
    path = write(tmp_path, "\n".join([line.format(1), line.format(2), "\tnode1 -- node2"]), "graph.txt")
    costs = read_costs(path, weight_grad_share=0.5)
    assert isinstance(costs, ProfileCosts)
    with pytest.raises(ScheduleError, match="weight_grad_share belongs to a layer profile"):
        read_costs(write(tmp_path, FILE), weight_grad_share=0.5)
