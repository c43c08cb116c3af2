"""How a model is spread over GPUs, and what is done to save memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipesim.errors import ScheduleError, require_count
from pipesim.models.spec import ModelSpec

__all__ = ["Parallelism", "Recompute"]

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Degrees of parallelism and the choices that cost or save memory.

    Attributes:
        tensor: t, GPUs that share each layer.
        pipeline: p, devices of one pipeline; each stands for *tensor* GPUs.
        data: d, pipelines that share the batch.
        microbatch: b, samples of one microbatch.
        sequence_parallel: Norms, dropouts and residuals split over the *tensor* GPUs too; all-reduces become
            reduce-scatter and all-gather of the same volume (Korthikanti et al. 2022, section 4.2.2).
        scatter_gather: Messages between stages split over the *tensor* GPUs and gathered by the receiver
            (PTD-P, section 4.1). With *sequence_parallel* they are split anyway, and need no gathering.
        zero: What is split over the *data* pipelines: 0 nothing, 1 optimizer state (Megatron's distributed optimizer),
            2 gradients too, which are then reduced after every backward, 3 weights too, gathered for every op.
        recompute: What the backward computes again: ``"none"``; ``"selective"``, the attention between softmax and
            dropout (Korthikanti et al., section 5); ``"full"``, every layer.
        recompute_layers: k; full recomputation keeps the input of every k-th layer.
        flash_attention: The scores are never written to memory; its backward computes them again.
        precision: ``"mixed"``, 2-byte weights and activations with 4-byte master weights, or ``"fp32"``.
        gradient_bytes: Bytes of a gradient under mixed precision: 4 as Megatron has it, 2 as in the ZeRO paper.
        offload_optimizer: Optimizer state in the host's memory; gradients go there and weights come back in every step.
        offload_activations: Activations in the host's memory between forward and backward.
        layout: Layers per stage: None for even, a list such as ``[11, 12, 12, 13]``, or Megatron's layout string.
        embedding_weight: What the embedding counts, in layers, when layers are spread evenly.
        head_weight: The same for the output layer with the loss.

    Raises:
        ScheduleError: A degree is not a whole number of at least 1, or a choice is unknown.

    Examples:
        >>> Parallelism(tensor=8, pipeline=8, data=2).gpus
        128
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    microbatch: int = 1
    sequence_parallel: bool = False
    scatter_gather: bool = False
    zero: int = 0
    recompute: Recompute = "none"
    recompute_layers: int = 1
    flash_attention: bool = False
    precision: Literal["mixed", "fp32"] = "mixed"
    gradient_bytes: Literal[2, 4] = 4
    offload_optimizer: bool = False
    offload_activations: bool = False
    layout: str | Sequence[int] | None = None
    embedding_weight: float = 0.0
    head_weight: float = 0.0

    def __post_init__(self) -> None:
        for field in ("tensor", "pipeline", "data", "microbatch", "recompute_layers"):
            require_count(field, getattr(self, field))
        choices = {"recompute": ("none", "selective", "full"), "zero": (0, 1, 2, 3), "precision": ("mixed", "fp32"), "gradient_bytes": (2, 4)}
        for field, legal in choices.items():
            if getattr(self, field) not in legal or isinstance(getattr(self, field), bool):
                raise ScheduleError(f"{field} must be one of {', '.join(map(str, legal))}, got {getattr(self, field)!r}")
        if self.recompute_layers > 1 and self.recompute != "full":
            raise ScheduleError(f"recompute_layers = {self.recompute_layers} belongs to recompute='full', and recompute is {self.recompute!r}")
        if self.offload_activations and self.recompute != "none":
            raise ScheduleError(f"offload_activations with recompute={self.recompute!r}: choose one of them")
        for field in ("embedding_weight", "head_weight"):
            if not 0 <= getattr(self, field) < 1e6:
                raise ScheduleError(f"{field} must be a number of layers of at least 0, got {getattr(self, field)}")

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.tensor * self.pipeline * self.data

    @property
    def element(self) -> int:
        """Bytes of a weight or an activation as it is computed with."""
        return 2 if self.precision == "mixed" else 4

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights per parameter on one GPU."""
        return self.element / (self.data if self.zero >= 3 else 1)

    @property
    def grad_bytes(self) -> float:
        """Bytes of gradients per parameter on one GPU."""
        whole = self.gradient_bytes if self.precision == "mixed" else 4
        return whole / (self.data if self.zero >= 2 else 1)

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of Adam's state (and master weights) per parameter on one GPU; 0 where it lies in the host's memory."""
        whole = 12 if self.precision == "mixed" else 8
        return 0.0 if self.offload_optimizer else whole / (self.data if self.zero >= 1 else 1)

    def check(self, model: ModelSpec) -> None:
        """Verifies that the model can be split so.

        Raises:
            ScheduleError: The heads or the feed-forward layer cannot be shared evenly.
        """
        for what, number in (("heads", model.heads), ("ffn", model.ffn_width)):
            if number % self.tensor:
                raise ScheduleError(f"tensor = {self.tensor} does not divide {what} = {number} of {model.name}")
        if model.groups % self.tensor and self.tensor % model.groups:
            raise ScheduleError(f"tensor = {self.tensor} neither divides kv_heads = {model.groups} of {model.name} nor is a multiple of it")
        if self.sequence_parallel and model.sequence % self.tensor:
            raise ScheduleError(f"sequence_parallel: tensor = {self.tensor} does not divide the sequence of {model.sequence} tokens")
