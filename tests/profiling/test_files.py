"""A measurement as a file, and that file as costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipesim import ScheduleError, generate, simulate
from pipesim.costs import ProfileCosts, read_costs
from pipesim.costs.profile import parse_layers
from pipesim.profiling import LayerMeasurement, ModelMeasurement, graph_text, toml_text, write_profile

FOUND = ModelMeasurement(
    (
        LayerMeasurement("0", "Embedding", 1e-3, 2e-3, 0.0, 2.5e-3, 100, 10, 1000),
        LayerMeasurement("1", 'a "quoted" Block', 3e-3, 6e-3, 3.5e-3, 4e-3, 200, 350, 2000, peak=900),
        LayerMeasurement("2", "Linear", 2e-3, 4e-3, 2e-3, 2e-3, 50, 200, 500),
    ),
    "cpu",
    (8, 128),
    "int64",
    20,
    "2.13.0",
)
SMALL = '[[layers]]\nforward = 1.0\nbackward = 2.0\noutput = "8 B"\nactivation = "8 B"\nparameters = "16 B"\n'


def test_toml_carries_everything(tmp_path: Path) -> None:
    write_profile(FOUND, tmp_path / "profile.toml", "mine.py:build")
    costs = read_costs(tmp_path / "profile.toml")
    assert isinstance(costs, ProfileCosts)
    assert costs.name == "mine.py:build"
    for read, layer in zip(costs.profile.layers, FOUND.layers, strict=True):
        assert (read.description, read.parameters, read.output, read.activation) == (layer.kind, layer.parameters, layer.output, layer.activation)
        for name in ("forward", "backward", "input_grad", "weight_grad"):
            assert getattr(read, name) == pytest.approx(getattr(layer, name), rel=1e-5)


def test_stages_of_measured_halves(tmp_path: Path) -> None:
    """Cut before layer 1: stage 0 is {0}, stage 1 {1, 2}. I and W are what was measured, B is not their sum."""
    write_profile(FOUND, tmp_path / "profile.toml")
    costs = read_costs(tmp_path / "profile.toml", cuts=[1])
    split, whole = generate("zb-h1", 2, 1), generate("1f1b", 2, 1)
    times = {str(split.op(row)): seconds for row, seconds in enumerate(costs.durations(split))}
    assert times == pytest.approx({"0F0": 1e-3, "0I0": 0.0, "0W0": 2.5e-3, "1F0": 5e-3, "1I0": 5.5e-3, "1W0": 6e-3})
    times = {str(whole.op(row)): seconds for row, seconds in enumerate(costs.durations(whole))}
    assert times == pytest.approx({"0F0": 1e-3, "0B0": 2e-3, "1F0": 5e-3, "1B0": 10e-3})
    assert costs.message_bytes(split).tolist() == [100, 100]  # the embedding's output, and its gradient
    assert costs.activation_bytes(split).kept.tolist() == [[10], [550]]
    assert costs.stage_bytes(split)["weights"].tolist() == [1000, 2500]
    # a share that is asked for is taken of the whole backward
    shared = read_costs(tmp_path / "profile.toml", cuts=[1], weight_grad_share=0.25)
    times = {str(split.op(row)): seconds for row, seconds in enumerate(shared.durations(split))}
    assert times["1W0"] == pytest.approx(2.5e-3)


def test_a_profile_without_halves_still_wants_a_share() -> None:
    costs = ProfileCosts(parse_layers('unit = "ms"\n' + SMALL))
    assert simulate(generate("gpipe", 1, 1), costs).makespan == pytest.approx(3e-3)
    with pytest.raises(ScheduleError, match="weight_grad_share"):
        costs.durations(generate("zb-h1", 1, 1))


def test_pipedreams_format(tmp_path: Path) -> None:
    """The same layers as msr-fiddle/pipedream's profiler writes them."""
    write_profile(FOUND, tmp_path / "graph.txt")
    text = (tmp_path / "graph.txt").read_text()
    assert text == graph_text(FOUND)
    assert text.splitlines()[0] == (
        "node1 -- Embedding -- forward_compute_time=1.000000, backward_compute_time=2.000000, activation_size=100.0, parameter_size=1000.0"
    )
    assert text.splitlines()[-2:] == ["\tnode1 -- node2", "\tnode2 -- node3"]
    costs = read_costs(tmp_path / "graph.txt", cuts=[1])
    assert costs.durations(generate("1f1b", 2, 1)).tolist() == pytest.approx([1e-3, 2e-3, 5e-3, 10e-3])


def test_the_peak_is_in_the_file_where_it_was_measured() -> None:
    assert toml_text(FOUND).count("peak = ") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('unit = "ms"\nlayers = []', "layers: .*at least 1"),
        ('unit = "slot"\n' + SMALL, "unit"),
        ('unit = "ms"\n' + SMALL.replace('"8 B"', "8", 1), "layers.0.output = 8.* has no unit"),
        ('unit = "ms"\n' + SMALL + "weight = 2\n", "unknown key 'layers.0.weight'"),
        ('unit = "ms"\n' + SMALL.replace("2.0", "-2.0"), "layers.0.backward: .*greater than or equal to 0"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "profile.toml").write_text(text)
    with pytest.raises(ScheduleError, match=message):
        read_costs(tmp_path / "profile.toml")


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"ends with \.toml, or with \.txt"):
        write_profile(FOUND, tmp_path / "profile.json")


def test_the_file_of_the_docs(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent.parent / "docs" / "validation.md").read_text().partition("```toml\n")[2].partition("```")[0]
    (tmp_path / "profile.toml").write_text(text)
    costs = read_costs(tmp_path / "profile.toml")
    assert simulate(generate("zb-h1", 1, 1), costs).makespan == pytest.approx(4.5e-3)
