"""The models that a replay runs: layers, inputs, targets and losses, the same however the stages are placed.

Every layer is made from a seed of its own, so stage boundaries change nothing: one stage of four layers and four stages of
one hold the same weights.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from pipesim.profiling import load_layers, make_batch
from pipesim.replay.settings import ReplayModel, stage_layers
from pipesim.schedule import Schedule

__all__ = ["Batch", "StageModel", "build_stage", "loss_of"]


class Mlp(nn.Module):
    """A wide layer and back, as in a transformer's second half."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.wide = nn.Linear(hidden, 4 * hidden)
        self.back = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(functional.gelu(self.wide(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A transformer layer: causal attention and an MLP, normalised before, added after."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.second = nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        parts = self.query_key_value(self.first(x)).view(batch, sequence, 3, self.heads, hidden // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.mlp(self.second(x))  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """Token numbers to vectors, with learned positions."""

    def __init__(self, vocabulary: int, sequence: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Parameter(torch.randn(sequence, hidden) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) + self.positions  # type: ignore[no-any-return]


class Head(nn.Module):
    """Vectors to a score per word."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.scores = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.norm(x))  # type: ignore[no-any-return]


class StageModel(nn.Module):
    """The layers of one stage, in order."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer after the other."""
        for layer in self.layers:
            x = layer(x)
        return x


def build_stage(model: ReplayModel, schedule: Schedule, stage: int, device: torch.device) -> StageModel:
    """Builds the layers of one stage, and of an own model only keeps those.

    Args:
        model: Which model.
        schedule: Whose stages; entries (without predecessors) get the embedding, exits (without successors) the head.
        stage: Which stage.
        device: Where it lives.
    """
    stages, edges = schedule.num_stages, schedule.stage_edges
    dtype = _dtype(model)
    if ":" in model.kind:
        torch.manual_seed(model.seed)
        every = load_layers(model.kind)
        layers = [every[number] for number in stage_layers(len(every), stages)[stage]]
        return StageModel(layers).to(device=device, dtype=dtype)
    layers = []
    if model.kind == "transformer" and all(after != stage for _, after in edges):
        torch.manual_seed(model.seed + 1)
        layers.append(Embedding(model.vocabulary, model.sequence, model.hidden))
    for number in stage_layers(model.layers or stages, stages)[stage]:
        torch.manual_seed(model.seed + 1000 + number)
        layers.append(Block(model.hidden, model.heads) if model.kind == "transformer" else Mlp(model.hidden))
    if model.kind == "transformer" and all(before != stage for before, _ in edges):
        torch.manual_seed(model.seed + 2)
        layers.append(Head(model.hidden, model.vocabulary))
    return StageModel(layers).to(device=device, dtype=dtype)


class Batch:
    """Inputs and targets of every microbatch: the same in every iteration, others in every data-parallel group."""

    def __init__(self, model: ReplayModel, microbatches: int, group: int, device: torch.device) -> None:
        self.inputs: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []
        dtype = _dtype(model)
        for microbatch in range(microbatches):
            torch.manual_seed(model.seed + 1_000_003 * (1 + group) + microbatch)
            if model.kind == "transformer":
                shape = (model.microbatch, model.sequence)
                given, wanted = torch.randint(model.vocabulary, shape), torch.randint(model.vocabulary, shape)
            elif model.kind == "mlp":
                shape = (model.microbatch, model.hidden)
                given, wanted = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
            else:
                given = make_batch(model.shape or (1,), model.dtype, model.tokens)
                wanted = torch.zeros(())
            self.inputs.append(given.to(device))
            self.targets.append(wanted.to(device))


def loss_of(model: ReplayModel, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of a microbatch: cross entropy, squared error, or of an own model the mean square of its output."""
    if model.kind == "transformer":
        return functional.cross_entropy(_precise(output.flatten(0, 1)), target.flatten())
    if model.kind == "mlp":
        return functional.mse_loss(_precise(output), _precise(target))
    return _precise(output).square().mean()


def _precise(tensor: torch.Tensor) -> torch.Tensor:
    """At least float32: sums of many small numbers are not for half precision."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _dtype(model: ReplayModel) -> torch.dtype:
    return make_batch([1], model.dtype).dtype
