"""Measuring torch layers: what is counted by hand, and gradients against autograd's own. No time is asserted beyond its order."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from pipesim import ScheduleError
from pipesim.profiling import load_layers, make_batch, measure
from pipesim.profiling.measuring import _halves, _whole


class Residual(torch.nn.Module):
    """Two linear layers inside one layer, and a path around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, value: Any) -> Any:
        return value + self.second(torch.tanh(self.first(value)))


def chain() -> list[Any]:
    return [torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)]


def test_bytes_by_hand() -> None:
    """A batch of 2 in fp32. The first layer keeps its input, 2 · 8 · 4 bytes; ReLU its output, 2 · 16 · 4, which is also what the

    second linear layer keeps of its input, so that adds nothing.
    """
    found = measure(chain(), torch.randn(2, 8), device="cpu", repeats=1, warm_up=0)
    assert [layer.kind for layer in found.layers] == ["Linear", "ReLU", "Linear"]
    assert [layer.output for layer in found.layers] == [128, 128, 32]
    assert [layer.activation for layer in found.layers] == [64, 128, 0]
    assert [layer.parameters for layer in found.layers] == [4 * (8 * 16 + 16), 0, 4 * (16 * 4 + 4)]
    assert [layer.peak for layer in found.layers] == [None, None, None]  # only CUDA counts it
    assert (found.device, found.batch_shape, found.dtype, found.repeats) == ("cpu", (2, 8), "float32", 1)


def test_what_has_no_half() -> None:
    """Token numbers have no gradient, so an embedding's I takes no time; ReLU has no weights, so its W takes none."""
    layers = [torch.nn.Embedding(10, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)]
    embedding, relu, linear = measure(layers, make_batch([2, 3], tokens=10), device="cpu", repeats=2, warm_up=1).layers
    assert (embedding.input_grad, relu.weight_grad) == (0, 0)
    times = [embedding.weight_grad, relu.input_grad, linear.input_grad, linear.weight_grad]
    times += [time for layer in (embedding, relu, linear) for time in (layer.forward, layer.backward)]
    assert min(times) > 0
    assert embedding.activation == 2 * 3 * 8  # the numbers, 8 bytes each


@pytest.mark.parametrize("shape", [(2, 8), (2, 5, 8)])
def test_the_halves_are_the_whole_backward(shape: tuple[int, ...]) -> None:
    """I and then W leave the gradients that autograd leaves; with three dimensions a linear layer's output is a view."""
    for layer in (torch.nn.Linear(8, 4), Residual()):
        value = torch.randn(shape)
        _halves(layer, value)
        split = [parameter.grad.clone() for parameter in layer.parameters()]
        layer.zero_grad(set_to_none=True)
        _whole(layer, value)
        for one, parameter in zip(split, layer.parameters(), strict=True):
            torch.testing.assert_close(one, parameter.grad)


def test_gradients_are_gone_afterwards() -> None:
    layers = chain()
    measure(layers, torch.randn(2, 8), device="cpu", repeats=1, warm_up=0)
    assert all(parameter.grad is None for layer in layers for parameter in layer.parameters())


def test_warm_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that makes every op of the first two turns last 100 s and all others 1, 2, 3 s: the median is of the others."""
    durations = iter([100.0] * 8 + [1.0] * 4 + [3.0] * 4 + [2.0] * 4)
    monkeypatch.setattr("pipesim.profiling.measuring._timed", lambda like, run: (run(), next(durations)))
    (layer,) = measure([torch.nn.Linear(8, 4)], torch.randn(2, 8), device="cpu", repeats=3, warm_up=2).layers
    assert [layer.forward, layer.backward, layer.input_grad, layer.weight_grad] == [2, 2, 2, 2]


def test_progress() -> None:
    seen: list[tuple[int, int]] = []
    measure(chain(), torch.randn(2, 8), device="cpu", repeats=1, warm_up=0, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3)]


def test_it_can_be_json() -> None:
    found = measure(chain(), torch.randn(2, 8), device="cpu", repeats=1, warm_up=0)
    assert [layer["kind"] for layer in asdict(found)["layers"]] == ["Linear", "ReLU", "Linear"]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)], r"layer 1, Linear, fails on an input of shape \(2, 4\)"),
        ([torch.nn.LSTM(8, 4)], "layer 0, LSTM, returns tuple; right is one tensor"),
        ([torch.nn.ReLU(inplace=True)], "layer 0, ReLU, cannot be run for its backward.*give inplace=False"),
        ([], "no layers"),
    ],
)
def test_layers_that_cannot_be_measured(layers: list[Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=f"(?s){message}"):
        measure(layers, torch.randn(2, 8), device="cpu", repeats=1, warm_up=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu9"}, "device 'tpu9' cannot be used"),
        ({"device": "meta"}, "device 'meta' cannot be timed; right is cpu or cuda"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"warm_up": -1}, "warm_up must be at least 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        measure(chain(), torch.randn(2, 8), **options)


# -- where the layers come from ----------------------------------------------------------------------------------------------------

SOURCE = """
import torch
def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU())
def listed():
    return [torch.nn.Linear(8, 4)]
def nothing():
    return None
def broken():
    raise KeyError("oops")
"""


def test_loads_layers(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    assert [type(layer).__name__ for layer in load_layers(f"{tmp_path}/mine.py:build")] == ["Linear", "ReLU"]
    assert len(load_layers(f"{tmp_path}/mine.py:listed")) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.py:nothing", "returns NoneType; right is an nn.Sequential"),
        ("mine.py:broken", "fails: KeyError: 'oops'"),
        ("mine.py:bild", "has no function 'bild'; did you mean 'build'"),
        ("mine.py", "is no module:function"),
        ("yours.py:build", "yours.py is not a file"),
        ("no_such_module_here:build", "there is no module 'no_such_module_here'"),
        ("syntax.py:build", "cannot be loaded: SyntaxError"),
    ],
)
def test_a_wrong_source_is_explained(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "syntax.py").write_text("def build(:")
    with pytest.raises(ScheduleError, match=message):
        load_layers(name)


def test_batches() -> None:
    assert make_batch([2, 3]).shape == (2, 3)
    assert make_batch([2], "bfloat16").dtype == torch.bfloat16
    numbers = make_batch([100], tokens=3)
    assert int(numbers.min()) >= 0
    assert int(numbers.max()) < 3
    for shape, dtype, tokens, message in (
        ([], "float32", None, "shape"),
        ([0], "float32", None, "shape"),
        ([2], "int8", None, "floating"),
        ([2], "float32", 0, "tokens"),
    ):
        with pytest.raises(ScheduleError, match=message):
            make_batch(shape, dtype, tokens)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda() -> None:
    """Events and peak statistics: forward and backward hold at least the output and its gradient."""
    for layer in measure(chain(), torch.randn(512, 8), device="cuda", repeats=3, warm_up=1).layers:
        assert min(layer.forward, layer.backward, layer.input_grad) > 0
        assert layer.peak is not None
        assert layer.peak >= 2 * layer.output
