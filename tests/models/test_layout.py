"""Layers per stage: remainders, lists, and Megatron's layout strings."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import ScheduleError
from pipesim.models import even_layout, layout_of, parse_layout
from pipesim.models.layout import Layout

MEGATRON = "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL"


@pytest.mark.parametrize(("layers", "stages", "sizes"), [(30, 4, [7, 7, 8, 8]), (7, 2, [3, 4]), (12, 5, [2, 2, 2, 3, 3]), (96, 8, [12] * 8)])
def test_P05_no_layer_is_lost_by_floor_division(layers: int, stages: int, sizes: list[int]) -> None:
    assert sorted(even_layout(layers, stages).layers) == sizes


def test_P06_the_remainder_goes_where_the_ends_are_not() -> None:
    layout = even_layout(61, 4, embedding=1, head=1)
    assert sum(layout.layers) == 61
    assert layout.sums(1, 1, 1).max() == 16
    assert layout_of([15, 15, 15, 16], 61, 4).sums(1, 1, 1).max() == 17


def test_M06_the_most_loaded_stage_is_the_last() -> None:
    assert layout_of([1, 2, 2, 3], 8, 4).sums(10, 5, 6).tolist() == [15, 20, 20, 36]


def test_zero_bubble_papers_layers() -> None:
    # first and last stage have one layer less than the others: 22 layers on 8 devices, 46 on 16
    assert even_layout(22, 8, embedding=1, head=1).layers == (2, 3, 3, 3, 3, 3, 3, 2)
    assert even_layout(46, 16, embedding=1, head=1).layers == (2, *[3] * 14, 2)


def test_P08_megatrons_layout_string() -> None:
    layout = parse_layout(MEGATRON)
    assert len(layout) == 40
    assert sum(layout.layers) == 80
    assert list(layout.layers) == [2] * 35 + [3, 2, 2, 2, 1]
    assert [sum(layout.layers[device::8]) for device in range(8)] == [10, 10, 10, 11, 10, 10, 10, 9]
    with pytest.raises(ScheduleError, match=r"has 40 stages and the schedule has 32 \(8 devices x 4 chunks\)"):
        layout_of(MEGATRON, 80, 32, devices=8)


def test_a_layout_with_prediction_blocks_and_a_head_alone() -> None:
    layout = parse_layout("Ettt|(tt|)*29,m|L")
    assert len(layout) == 32
    assert sum(layout.layers) == 3 + 2 * 29
    assert layout.predictors == (0,) * 30 + (1, 0)
    assert (layout.layers[31], layout.head) == (0, 31)
    with pytest.raises(ScheduleError, match="1 multi-token-prediction blocks"):
        layout_of("Ettt|(tt|)*29,m|L", 61, 32)


def test_embedding_and_head_as_stages_of_their_own() -> None:
    assert parse_layout("E|(tt|)*2L") == Layout((0, 2, 2, 0), 0, 3)
    assert layout_of([0, 2, 2, 0], 4, 4) == Layout((0, 2, 2, 0), 0, 3)


def test_nested_groups_and_spaces() -> None:
    assert parse_layout("E t | ((t|)*2 tt|)*2 L").layers == (1, 1, 1, 2, 1, 1, 2, 0)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Ettx|tL", "has 'x'"),
        ("ttt|tL", "E in the stages"),
        ("Et|Lt|t", "L in the stages"),
        ("EEt|tL", "E in the stages"),
        ("Et||tL", "nothing in stage 1"),
        ("(Et|*2tL", r"has '\('"),
        ("Et*|tL", r"has '\*'"),
        ("", "E in the stages"),
        ("Et*999999999999|L", "repeats"),
        ("(((t*999)*999)*999)*999", "repeats"),
    ],
)
def test_wrong_layout_strings(text: str, error: str) -> None:
    with pytest.raises(ScheduleError, match=error):
        parse_layout(text)


@pytest.mark.parametrize(
    ("wish", "layers", "stages", "error"),
    [
        ([4, 4], 9, 2, "has 8 layers and the model has 9"),
        ([4, 4], 8, 4, "has 2 stages and the schedule has 4"),
        ([4, -4], 0, 2, "at least 0"),
        (None, 3, 4, "cannot be spread over 4 stages"),
    ],
)
def test_layouts_that_do_not_fit(wish: object, layers: int, stages: int, error: str) -> None:
    with pytest.raises(ScheduleError, match=error):
        layout_of(wish, layers, stages)  # type: ignore[arg-type]


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3))
@settings(deadline=None)
def test_even_is_as_even_as_can_be(more: int, stages: int, embedding: int, head: int) -> None:
    layers = stages + more
    found = even_layout(layers, stages, embedding=embedding, head=head)
    assert sum(found.layers) == layers
    best = min(
        Layout(split, 0, stages - 1).sums(1, embedding, head).max()
        for split in itertools.product(range(layers + 1), repeat=stages)
        if sum(split) == layers
    )
    assert found.sums(1, embedding, head).max() == best
