"""Layer profiles in PipeDream's format, folded into stages."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import ProfileCosts, Schedule, ScheduleError, generate, simulate
from pipesim.costs import read_costs
from pipesim.costs.profile import balanced_cuts, parse_profile

LINE = "node{0} -- {1} -- forward_compute_time={2}, backward_compute_time={3}, activation_size={4}, parameter_size={5}"
# layer 1 feeds 2 and 4; 2 feeds 3; 3 feeds 4
SKIP = "\n".join(
    [
        LINE.format(4, "Add(a, b)", 4.0, 8.0, 40.0, 0.0),
        LINE.format(1, "Conv2d(3, 64, kernel_size=(3, 3))", 1.0, 2.0, 10.0, 100.0),
        LINE.format(2, "ReLU(inplace)", 2.0, 4.0, 20.0, 200.0),
        LINE.format(3, "Linear -- with dashes", 3.0, 6.0, 30.0, 300.0),
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        "\tnode3 -- node4",
        "\tnode1 -- node4",
    ]
)


def test_layers_are_sorted_so_that_every_edge_goes_forward() -> None:
    profile = parse_profile(SKIP)
    assert [layer.name for layer in profile.layers] == ["node1", "node2", "node3", "node4"]
    assert profile.layers[0].description == "Conv2d(3, 64, kernel_size=(3, 3))"
    assert profile.edges == ((0, 1), (0, 3), (1, 2), (2, 3))
    assert [layer.forward for layer in profile.layers] == [0.001, 0.002, 0.003, 0.004]  # milliseconds in the file


def test_what_crosses_a_cut_is_counted_once() -> None:
    """Before layer 2: only 1's output (to 2 and 4). Before 3: 1's, still wanted by 4, and 2's. Before 4: 1's and 3's."""
    assert parse_profile(SKIP).crossing.tolist() == [0, 10, 30, 40, 0]


def test_folded_into_stages() -> None:
    """Cuts before layers 2 and 4 (positions 1 and 3): stages of layers {1}, {2, 3}, {4}."""
    costs = ProfileCosts(parse_profile(SKIP), cuts=[1, 3], optimizer_bytes=2)
    schedule = generate("gpipe", devices=3, microbatches=1)
    assert costs.stage_bounds(3).tolist() == [0, 1, 3, 4]
    assert costs.durations(schedule).tolist() == pytest.approx([1e-3, 2e-3, 5e-3, 10e-3, 4e-3, 8e-3])
    assert costs.activation_bytes(schedule).kept.tolist() == [[10], [50], [40]]
    found = {category: values.tolist() for category, values in costs.stage_bytes(schedule).items()}
    assert found == {"weights": [100, 500, 0], "gradients": [100, 500, 0], "optimizer": [200, 1000, 0]}
    run = simulate(schedule, costs)
    sizes = {run.messages.label(number): float(size) for number, size in enumerate(run.footprint.message)}
    assert sizes == {
        "activation of microbatch 0, stage 0 to stage 1": 10,
        "activation of microbatch 0, stage 1 to stage 2": 40,
        "gradient of microbatch 0, stage 2 to stage 1": 40,
        "gradient of microbatch 0, stage 1 to stage 0": 10,
    }


def test_balanced_by_forward_and_backward_time() -> None:
    """Layers of 3, 6, 9, 12 ms: two stages are best as {3, 6, 9} and {12}."""
    assert ProfileCosts(parse_profile(SKIP)).stage_bounds(2).tolist() == [0, 3, 4]


def test_a_split_backward_needs_a_share() -> None:
    schedule = Schedule.from_text("0F0 0I0 0W0")
    profile = parse_profile(LINE.format(1, "Linear", 1.0, 8.0, 10.0, 100.0))
    with pytest.raises(ScheduleError, match="weight_grad_share"):
        ProfileCosts(profile).durations(schedule)
    assert ProfileCosts(profile, weight_grad_share=0.25).durations(schedule).tolist() == pytest.approx([1e-3, 6e-3, 2e-3])
    # a schedule that splits nothing needs none
    assert ProfileCosts(profile).durations(Schedule.from_text("0F0 0B0")).tolist() == pytest.approx([1e-3, 8e-3])


def test_listed_recomputation_keeps_what_enters_the_stage() -> None:
    """Stage 1 is layers 2 and 3, 50 bytes of outputs; 10 come in."""
    costs = ProfileCosts(parse_profile(SKIP), cuts=[1, 3])
    text = "0F0 0B0\n1F0 1R0 1B0\n2F0 2B0"
    schedule = Schedule.from_text(text).check()
    assert costs.durations(schedule).tolist() == pytest.approx([1e-3, 2e-3, 5e-3, 5e-3, 10e-3, 4e-3, 8e-3])
    found = costs.activation_bytes(schedule)
    assert (found.kept.tolist(), found.rebuilt.tolist()) == ([[10], [10], [40]], [[0], [40], [0]])


def test_inputs_and_outputs_that_nobody_takes_are_left_out() -> None:
    text = "\n".join(
        [
            LINE.format(1, "Input0", 50.0, 0.0, 5.0, 0.0),
            LINE.format(2, "LSTM", 1.0, 2.0, "[10.0; 20.0; 30.0]", 7.0),
            LINE.format(3, "__getitem__(0)", 0.0, 0.0, 9.0, 0.0),
            LINE.format(4, "__getitem__(1)", 0.0, 0.0, 9.0, 0.0),
            LINE.format(5, "Linear", 1.0, 2.0, 3.0, 7.0) + " -- stage_id=2",
            "node1 -- node2", "node2 -- node3", "node2 -- node4", "node3 -- node5",
        ]
    )  # fmt: skip
    profile = parse_profile(text)
    assert [layer.name for layer in profile.layers] == ["node2", "node3", "node5"]
    assert profile.layers[0].activation == 60  # a list of sizes is their sum


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "describes no layer"),
        (LINE.format(1, "Input0", 1.0, 0.0, 1.0, 0.0), "inputs only"),
        ("hello", "line 1: 'hello' is neither"),
        ("node1 -- Linear -- forward_compute_time=1.0", "wants forward_compute_time, backward"),
        (LINE.format(1, "L", "-1.0", 2, 3, 4), "forward of node1 is '-1.0'"),
        (LINE.format(1, "L", 1, "nan", 3, 4), "backward of node1 is 'nan'"),
        (LINE.format(1, "L", 1, 2, "inf", 4), "activation of node1"),
        (LINE.format(1, "L", 1, 2, 3, "four"), "parameters of node1"),
        (LINE.format(1, "L", 1, 2, 3, 4) + "\n" + LINE.format(1, "L", 1, 2, 3, 4), "line 2: node1 is described twice"),
        (LINE.format(1, "L", 1, 2, 3, 4) + "\nnode1 -- node7", "line 2: no line describes node7"),
        (
            "\n".join([LINE.format(1, "L", 1, 2, 3, 4), LINE.format(2, "L", 1, 2, 3, 4), "node1 -- node2", "node2 -- node1"]),
            "circle among node1, node2",
        ),
    ],
)
def test_a_wrong_profile_is_explained(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=f"graph.*{re.escape(message)}"):
        parse_profile(text, "graph.txt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cuts": [2]}, "3 stages of 4 layers want 2 ascending cuts"),
        ({"cuts": [2, 2]}, "ascending"),
        ({"cuts": [3, 1]}, "ascending"),
        ({"cuts": [0, 2]}, "ascending"),
        ({"cuts": [2, 4]}, "ascending"),
        ({"weight_grad_share": 1.5}, "weight_grad_share"),
        ({"weight_grad_share": float("nan")}, "weight_grad_share"),
        ({"optimizer_bytes": -1}, "optimizer_bytes"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        ProfileCosts(parse_profile(SKIP), **options).stage_bounds(3)


def test_more_stages_than_layers() -> None:
    with pytest.raises(ScheduleError, match="4 layers cannot be cut into 5 stages"):
        ProfileCosts(parse_profile(SKIP)).durations(generate("gpipe", devices=5, microbatches=1))


def test_another_stage_graph_is_refused() -> None:
    schedule = Schedule.from_text("0F0\n1F0\n2F0", graph=[(0, 1), (0, 2)])
    with pytest.raises(ScheduleError, match="chain of stages"):
        simulate(schedule, ProfileCosts(parse_profile(SKIP)))


def test_P01_and_P02_balance_by_size() -> None:
    assert balanced_cuts([6, 5, 4, 3, 2, 1], 2) == [2]  # 11 | 10
    assert balanced_cuts([4, 1, 1, 1, 1], 2) == [1]  # 4 | 4


@settings(deadline=None, database=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 4))
def test_no_other_cut_is_better(times: list[int], parts: int) -> None:
    def largest(cuts: Any) -> int:
        return max(sum(times[a:b]) for a, b in itertools.pairwise([0, *cuts, len(times)]))

    if parts > len(times):
        with pytest.raises(ScheduleError):
            balanced_cuts(times, parts)
        return
    cuts = balanced_cuts(times, parts)
    assert largest(cuts) == min(largest(other) for other in itertools.combinations(range(1, len(times)), parts - 1))


# -- real profiles ---------------------------------------------------------------------------------------------------------------


def test_vgg16(shared_data: Path) -> None:
    """No time, parameter or output is lost in folding. The sums are taken from the file by another way."""
    path = shared_data / "pipedream" / "profiles" / "vgg16.txt"
    nodes = [line for line in path.read_text().splitlines() if " -- " in line and "compute_time" in line and " -- Input" not in line]
    total = {
        key: sum(float(re.search(rf"{key}=([0-9.]+)", line)[1]) for line in nodes)  # type: ignore[index]
        for key in ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
    }
    costs = read_costs(path)
    for stages in (1, 4, 8):
        run = simulate(generate("1f1b", stages, 8), costs)
        assert sum(run.busy) == pytest.approx(8 * (total["forward_compute_time"] + total["backward_compute_time"]) * 1e-3)
        assert sum(run.footprint.static["weights"]) == pytest.approx(total["parameter_size"])
        assert run.footprint.kept[:, 0].sum() == pytest.approx(total["activation_size"])
        assert run.makespan >= max(run.busy)


def test_every_profile_can_be_read_and_run(shared_data: Path) -> None:
    paths = sorted((shared_data / "pipedream" / "profiles").glob("*.txt"))
    assert len(paths) == 14
    for path in paths:
        costs = read_costs(path)
        run = simulate(generate("1f1b", 4, 4), costs)
        assert 0 < run.makespan < 100  # seconds
        assert (np.diff(costs.stage_bounds(4)) > 0).all()
