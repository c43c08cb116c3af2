"""Spread, pooling and warnings on times that are given: every number by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from pipesim.costs.profile import parse_layers
from pipesim.profiling import LayerMeasurement, ModelMeasurement, graph_text, toml_text
from pipesim.profiling.spread import deviation, numbers, pool, warnings

EVEN = [1.0, 1.01, 0.99, 1.02, 0.98]  # median 1, deviations 0, 0.01, 0.01, 0.02, 0.02

SMALL = {"backward": 0.1, "input_grad": 0.05, "weight_grad": 0.05}


def times(forward: list[float]) -> dict[str, list[float]]:
    return {"forward": forward, "backward": EVEN, "input_grad": EVEN, "weight_grad": EVEN}


def layer(forward: float = 1.0, backward: float = 2.0, input_grad: float = 1.0, weight_grad: float = 1.0, **more: Any) -> LayerMeasurement:
    return LayerMeasurement("0", "Block", forward, backward, input_grad, weight_grad, 8, 8, 8, **more)


def test_deviation_by_hand() -> None:
    assert deviation(EVEN) == pytest.approx(0.01)
    assert deviation([3.0]) == 0


def test_alike_layers_are_pooled_and_others_are_not() -> None:
    assert pool([times(EVEN)] * 4, ["x", "y", "x", "x"]) == ([(0, 2, 3), (1,), (0, 2, 3), (0, 2, 3)], [])


def test_what_looks_alike_and_differs_is_warned_and_not_pooled() -> None:
    """Medians 1 and 2 with deviations of 0.01: neither noise nor the same work."""
    shares, (warning,) = pool([times(EVEN), times([2 * one for one in EVEN]), times(EVEN)], ["x"] * 3)
    assert shares == [(0,), (1,), (2,)]
    assert "layers 0 to 2 look alike, and F differ" in warning
    assert "1e+03 ms of layer 0, 2e+03 ms of layer 1" in warning


def test_half_of_the_layers_twice_as_slow_are_not_pooled() -> None:
    """As windows and full attention alternate: the median of all, 1.5, is like none of them."""
    shares, found = pool([times([(1 + number % 2) * one for one in EVEN]) for number in range(4)], ["x"] * 4)
    assert shares == [(0,), (1,), (2,), (3,)]
    assert len(found) == 1


@pytest.mark.parametrize(
    "forward",
    [
        [1.09 * one for one in EVEN],  # less than a tenth
        [1.2, 0.8, 1.6, 1.1, 1.3],  # median 1.2, deviations 0, 0.1, 0.1, 0.4, 0.4: 0.2 is within three of 0.1
    ],
)
def test_differences_within_the_spread_are_pooled(forward: list[float]) -> None:
    assert pool([times(EVEN), times(forward), times(EVEN)], ["x"] * 3) == ([(0, 1, 2)] * 3, [])


def test_few_repeats_have_no_spread() -> None:
    assert pool([times([1.0]), times([2.0])], ["x", "x"]) == ([(0,), (1,)], [])
    assert "4 repeats are too few" in warnings([layer()], 4)[0]


def test_nothing_to_warn_of() -> None:
    """A split that costs 24 %, and 9 % of spread."""
    assert warnings([layer(input_grad=1.24, weight_grad=1.24, spread={"forward": 0.09})], 20) == []


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        # the two measurements of one model that gave zb-h1 as 11 % faster and as 16 % slower
        ([layer(backward=0.503, input_grad=0.248, weight_grad=0.2)], "B of all layers takes 503 ms and I + W, which do the same work apart, 448 ms"),
        ([layer(backward=0.187, input_grad=0.128, weight_grad=0.12)], "I + W of all layers take 248 ms and B 187 ms: a split that costs 33%"),
        # 2.9 against 2.2, a spread of 0.1 + 0.05 + 0.05; in all 4.9 against 4.6
        (
            [layer(input_grad=1.2, weight_grad=1.2), layer(backward=2.9, input_grad=1.1, weight_grad=1.1, spread=SMALL)],
            "by more than 10% and than the spread allows: layers 1.",
        ),
        ([layer(), layer(spread={"forward": 0.2, "backward": 0.1})], "F of layers 1; most of all F of layer 1, by 20%"),
    ],
)
def test_warnings(layers: list[LayerMeasurement], words: str) -> None:
    (found,) = warnings(layers, 20)
    assert words in found


def test_a_layer_that_takes_no_time_to_speak_of_may_spread() -> None:
    assert warnings([layer(), layer(forward=0.01, spread={"forward": 0.01})], 20) == []


def test_a_file_with_all_of_it_is_read() -> None:
    """Spread, pooling and warnings are comments; PipeDream's format has none."""
    one = layer(input_grad=0.0, spread={"forward": 0.1, "backward": 0.3, "input_grad": 0.0, "weight_grad": 0.02}, pooled=(0, 1))
    found = ModelMeasurement((one, one), "cpu", (2, 8), "float32", 20, "2.13.0", ("noise, much of it",))
    text = toml_text(found)
    assert "# warning: noise, much of it\n" in text
    assert "# alike: 2 layers pooled (0, 1), medians of 40\n" in text
    assert "forward = 1000  # ± 10.0%\n" in text
    assert "input_grad = 0\n" in text
    assert parse_layers(text).layers[1].backward == pytest.approx(2.0)
    assert "noise" not in graph_text(found)


def test_numbers() -> None:
    assert numbers([0, 1, 3, 4, 5, 9]) == "0, 1, 3 to 5, 9"


# -- measured ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], float]], None]:
    pytest.importorskip("torch")
    return lambda seconds: monkeypatch.setattr("pipesim.profiling.measuring._timed", lambda like, run: (run(), seconds()))


def test_blocks_on_a_noisy_clock_come_out_alike(clock: Callable[[Callable[[], float]], None]) -> None:
    """Every op takes 10 ms, a third of them three times as long: six blocks have one median of 120 repeats, that of most ops."""
    import torch

    from pipesim.profiling import measure

    noise = random.Random(1)
    clock(lambda: 0.01 * (3 if noise.random() < 1 / 3 else 1) * noise.uniform(0.98, 1.02))
    found = measure([torch.nn.Linear(8, 8) for _ in range(6)], torch.randn(2, 8), device="cpu", repeats=20, warm_up=0)
    assert {one.pooled for one in found.layers} == {(0, 1, 2, 3, 4, 5)}
    assert len({one.forward for one in found.layers}) == 1
    assert found.layers[0].forward == pytest.approx(0.01, rel=0.03)


def test_repeats_go_round_over_the_layers(clock: Callable[[Callable[[], float]], None]) -> None:
    """Four ops a layer and turn. All of the first of five turns are ten times as long: one repeat of every layer, so no median."""
    import torch

    from pipesim.profiling import measure

    ops = iter([10.0] * 12 + [1.0] * 48)
    clock(lambda: next(ops))
    layers = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 4), torch.nn.Linear(4, 4)]
    found = measure(layers, torch.randn(2, 8), device="cpu", repeats=5, warm_up=0)
    assert [(one.forward, one.backward, one.pooled) for one in found.layers] == [(1.0, 1.0, ())] * 3


def test_modules_that_differ_in_what_they_say_are_not_alike() -> None:
    """The same parameters and shapes, but another padding mode."""
    torch = pytest.importorskip("torch")
    from pipesim.profiling import measure

    layers = [torch.nn.Conv1d(4, 4, 3, padding=1, padding_mode=mode) for mode in ("zeros", "circular", "zeros")]
    keys = measure(layers, torch.randn(2, 4, 16), device="cpu", repeats=5, warm_up=0)
    assert keys.layers[1].pooled == ()
