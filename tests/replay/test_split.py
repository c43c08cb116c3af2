"""The two halves of a backward: the same gradients bit for bit, and nothing done twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from pipesim.replay.models import Block, Mlp  # noqa: E402
from pipesim.replay.split import input_gradient  # noqa: E402


class Counting(TorchDispatchMode):  # type: ignore[misc,unused-ignore]
    """Counts the matrix products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if name.startswith(("aten.mm", "aten.addmm", "aten.bmm")):
            self.products["product"] += 1
        return function(*args, **(kwargs or {}))


class Shared(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """One matrix used twice on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.once = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.once(torch.tanh(self.once(x)))  # type: ignore[no-any-return]


class Aside(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """Weights that meet the input late: a learned vector, scaled by another, is added at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(6, 6)
        self.vector = torch.nn.Parameter(torch.randn(6))
        self.scale = torch.nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) + torch.tanh(self.vector * self.scale)  # type: ignore[no-any-return]


MODULES = {
    "linear": lambda: torch.nn.Linear(6, 6),
    "chain": lambda: torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3))),
    "mlp": lambda: Mlp(6),
    "block": lambda: Block(6, 2),
    "convolution": lambda: torch.nn.Sequential(
        torch.nn.Unflatten(1, (2, 3)), torch.nn.Conv1d(2, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten()
    ),
    "shared": Shared,
    "aside": Aside,
    "identity": torch.nn.Identity,
}


def both(name: str) -> tuple[Any, Any, Any, Any]:
    """Gradients of the full backward and of the halves: of the input, and of all weights."""
    torch.manual_seed(0)
    module = MODULES[name]()
    x = torch.randn((2, 5, 6) if name == "block" else (5, 6), requires_grad=True)
    output = module(x)
    arriving = torch.randn_like(output)
    if output.grad_fn is None:  # the identity
        output = output.view_as(output)
    wanted = [x, *module.parameters()]
    whole = torch.autograd.grad([output], wanted, [arriving], retain_graph=True)
    result, deferred = input_gradient(output, arriving, x)
    before = [p.grad for p in module.parameters()]
    deferred.weight_gradients()
    return whole, result, before, [p.grad for p in module.parameters()]


@pytest.mark.parametrize("name", MODULES)
def test_halves_give_the_gradients_of_the_whole_bit_for_bit(name: str) -> None:
    whole, result, before, weights = both(name)
    assert torch.equal(result, whole[0])
    assert all(one is None for one in before)  # I has left the weights alone
    assert len(weights) == len(whole) - 1
    assert all(torch.equal(a, b) for a, b in zip(weights, whole[1:], strict=True))


# A linear layer's backward has two products, one for its input and one for its weights; its bias is a sum. A block has four linear layers,
# so 8 products beside those of the attention, which all belong to I.
@pytest.mark.parametrize(("name", "linear"), [("linear", 1), ("chain", 3), ("mlp", 2), ("block", 4)])
def test_the_weights_half_repeats_nothing(name: str, linear: int) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    x = torch.randn((2, 5, 6) if name == "block" else (5, 6), requires_grad=True)
    counts = []
    for split in (False, True):
        output = module(x)
        if not split:
            with Counting() as counting:
                torch.autograd.grad([output], [x, *module.parameters()], [torch.ones_like(output)])
            counts.append(counting.products["product"])
            continue
        with Counting() as first:
            _, deferred = input_gradient(output, torch.ones_like(output), x)
        with Counting() as second:
            deferred.weight_gradients()
        assert second.products["product"] == linear
        counts.append(first.products["product"] + second.products["product"])
    assert counts[1] == counts[0]


def test_without_an_input_that_needs_a_gradient_all_is_left_to_the_weights_half() -> None:
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 3)
    output = module(torch.ones(2, 3)).square().mean()
    whole = torch.autograd.grad(output, list(module.parameters()), retain_graph=True)
    with Counting() as counting:
        result, deferred = input_gradient(output, None, None)
    assert result is None
    assert counting.products["product"] == 0
    deferred.weight_gradients()
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), whole, strict=True))
