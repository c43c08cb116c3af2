from __future__ import annotations

import pytest

from pipesim import ScheduleError, UniformCosts, simulate
from pipesim.schedules.graphpipe import graphpipe
from pipesim.schedules.one_f_one_b import one_f_one_b
from pipesim.testing import SIZES, check_generator

GRID = [(p, m) for p in range(1, 9) for m in range(1, 25)]
COSTS = UniformCosts(forward=1, backward=2)


@pytest.mark.parametrize("devices", range(1, 9))
def test_a_chain_is_1f1b(devices):
    chain = ",".join(f"{s}>{s + 1}" for s in range(devices - 1))
    for microbatches in (1, 3, 8, 11):
        assert graphpipe(devices, microbatches, graph=chain) == one_f_one_b(devices, microbatches)


def test_depth_two_instead_of_four():
    # The paper's example: four stages hold 4 microbatches in a row, 2 where three of them are branches.
    run = simulate(graphpipe(4, 8, branches=3), COSTS)
    assert run.schedule.graph == ((0, 3), (1, 3), (2, 3))
    assert run.peak_activations == [2, 2, 2, 1]
    assert run.makespan == (8 + 2 - 1) * 3


def test_in_flight_follows_the_longest_way():
    # 0 > 1 > 2 > 4 and 0 > 3 > 4: stage 3 has one stage after it, stage 0 three on its longer way.
    run = simulate(graphpipe(5, 8, graph="0>1 1>2 2>4 0>3 3>4"), COSTS)
    assert run.peak_activations == [4, 3, 2, 2, 1]
    assert run.makespan == (8 + 4 - 1) * 3


def test_several_ends():
    # 0 > 1, 0 > 2 > 3: stages 1 and 3 end the graph and hold one each.
    run = simulate(graphpipe(4, 6, graph="0>1,0>2,2>3"), COSTS)
    assert run.peak_activations == [3, 1, 2, 1]


def test_branches_are_dealt_out():
    assert graphpipe(6, 1, branches=2).graph == ((0, 2), (1, 3), (2, 4), (3, 5), (4, 5))
    assert graphpipe(3, 1, branches=9).graph == ((0, 2), (1, 2))


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ("0>1,1>2", r"names the stages \[0, 1, 2\]; right is all of 0..3"),
        ("0>1,1-2,2>3", "'1-2' is not an edge"),
        ("0>1,1>2,2>0,2>3", "has a cycle"),
        ("0>1,1>2,2>3,3>4", r"right is all of 0..3"),
        ("", r"right is all of 0..3"),
    ],
)
def test_wrong_graphs(graph, message):
    with pytest.raises(ScheduleError, match=message):
        graphpipe(4, 8, graph=graph)
    with pytest.raises(ScheduleError, match="branches must be at least 1, got 0"):
        graphpipe(4, 8, branches=0)


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_every_size(branches):
    assert check_generator(graphpipe, options={"branches": branches}).legal == SIZES
    for devices, microbatches in GRID:
        depth = 1 + -(-(devices - 1) // branches)  # the longest branch, and the stage that joins them
        assert simulate(graphpipe(devices, microbatches, branches=branches), COSTS).makespan == (microbatches + depth - 1) * 3
