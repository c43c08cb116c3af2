"""The two halves of a backward: the gradient of a stage's input first, those of its weights later.

The autograd graph of a stage, from its output back to its input and its weights::

    output ── A ──── B ──── C ──── input          nodes on the way to the input: A, B, C
              │             │
              w1            w2                    A and C have weights at their sides

I runs the way to the input alone, and a hook on A and C keeps the gradient that reaches each. W starts at A and at C with
what was kept and goes to their sides only, so it repeats nothing of I. Where a weight is at the side of two nodes (shared
weights), W is instead the backward of the whole stage again, for its weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["Deferred", "input_gradient"]

Tensors = dict[int, Any]


class Deferred:
    """What W still has to do."""

    def __init__(self) -> None:
        self.sides: list[tuple[Any, list[torch.Tensor], tuple[torch.Tensor | None, ...]]] = []
        self.whole: tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor]] | None = None

    def weight_gradients(self) -> None:
        """Adds the gradients of the weights to their ``.grad``; the W of a stage."""
        if self.whole is not None:
            root, gradient, weights = self.whole
            _accumulate(weights, torch.autograd.grad([root], weights, None if gradient is None else [gradient], allow_unused=True))
        for node, weights, kept in self.sides:
            edges, gradients = [], []
            for number, one in enumerate(kept):
                if one is not None:
                    edges.append(GradientEdge(node, number))
                    gradients.append(one)
            _accumulate(weights, torch.autograd.grad(edges, weights, gradients, allow_unused=True))
        self.sides, self.whole = [], None


def input_gradient(root: torch.Tensor, gradient: torch.Tensor | None, leaf: torch.Tensor | None) -> tuple[torch.Tensor | None, Deferred]:
    """The I of a stage.

    Args:
        root: The stage's output, or its loss.
        gradient: The gradient of the output; None for a loss.
        leaf: The stage's input; None where it needs no gradient: then there is nothing to do before W.

    Returns:
        The gradient of *leaf*, and what is left for W.
    """
    deferred = Deferred()
    if root.grad_fn is None:
        return None, deferred
    target = None if leaf is None else get_gradient_edge(leaf).node
    sides, shared, weights = _sides(root.grad_fn, target)
    if target is None or shared:
        deferred.whole = (root, gradient, weights)
        sides = []
    if leaf is None:
        return None, deferred
    kept: dict[int, tuple[torch.Tensor | None, ...]] = {}
    handles = [node.register_prehook(_keeper(kept, number)) for number, (node, _) in enumerate(sides)]
    try:
        (result,) = torch.autograd.grad([root], [leaf], None if gradient is None else [gradient], retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    deferred.sides = [(node, own, kept[number]) for number, (node, own) in enumerate(sides) if number in kept]
    return result, deferred


def _keeper(kept: dict[int, tuple[torch.Tensor | None, ...]], number: int) -> Any:
    def keep(gradients: tuple[torch.Tensor | None, ...]) -> None:
        kept[number] = gradients

    return keep


def _sides(root: Any, target: Any) -> tuple[list[tuple[Any, list[torch.Tensor]]], bool, list[torch.Tensor]]:
    """The nodes on the way to *target* that have weights at their sides, whether two share one, and all weights."""
    leads: dict[Any, bool] = {}  # node -> whether the target can be reached from it
    order: list[Any] = []
    stack: list[tuple[Any, bool]] = [(root, False)]
    weights: list[torch.Tensor] = []
    while stack:
        node, done = stack.pop()
        if done:
            leads[node] = any(leads[following] for following, _ in node.next_functions if following is not None)
            order.append(node)
            continue
        if node in leads:
            continue
        if node is target:
            leads[node] = True
            continue
        leads[node] = False
        variable = getattr(node, "variable", None)
        if variable is not None:
            weights.append(variable)
            continue
        stack.append((node, True))
        stack.extend((following, False) for following, _ in node.next_functions if following is not None and following not in leads)
    owner: dict[Any, Any] = {}
    sides: list[tuple[Any, list[torch.Tensor]]] = []
    shared = False
    for node in order:
        if not leads[node]:
            continue
        own: list[torch.Tensor] = []
        waiting = [following for following, _ in node.next_functions if following is not None and not leads[following]]
        while waiting:
            side = waiting.pop()
            if side in owner:
                shared = shared or owner[side] is not node
                continue
            owner[side] = node
            variable = getattr(side, "variable", None)
            if variable is not None:
                own.append(variable)
            waiting.extend(following for following, _ in side.next_functions if following is not None)
        if own:
            sides.append((node, own))
    return sides, shared, weights


def _accumulate(weights: list[torch.Tensor], gradients: tuple[torch.Tensor | None, ...]) -> None:
    """Adds gradients as autograd does, in place."""
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is None:
            continue
        if weight.grad is None:
            weight.grad = gradient
        else:
            weight.grad.add_(gradient)
