"""FLOPs, bytes moved, activations and parameters of one transformer layer, the embedding and the output layer.

Letters: b samples of a microbatch, s tokens, h hidden, a heads, f feed-forward width, V vocabulary, t GPUs that share a
layer; n = b·s tokens. Bytes of activations are for 2-byte elements and 1-byte dropout masks, as in Korthikanti et al.
2022 (arXiv 2205.05198), section 4; with 4-byte elements the elements double and the masks do not.

What one layer does, forward (x = 2nh bytes of the residual stream)::

    norm -> QKV -> [scores -> softmax -> dropout -> context] -> projection -> dropout, + residual
    norm -> up (and gate) -> GeLU (SwiGLU) -> down -> dropout, + residual

The brackets are the attention that selective recomputation computes again. It has no weights: all its backward is I.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipesim.models.parallelism import Parallelism
from pipesim.models.spec import ModelSpec

__all__ = [
    "Activation",
    "Gemm",
    "Parameters",
    "Work",
    "embedding_activation",
    "embedding_work",
    "forward_flops",
    "head_activation",
    "head_work",
    "layer_activation",
    "layer_work",
    "parameters",
]


class Gemm(NamedTuple):
    """*copies* products of an (m, k) with a (k, n) matrix.

    Attributes:
        m: Rows, the tokens.
        n: Columns, the outputs.
        k: What is summed over, the inputs.
        copies: How many, of equal size.
    """

    m: float
    n: float
    k: float
    copies: float = 1

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k * self.copies

    def bytes(self, element: int) -> float:
        """Bytes read and written once."""
        return (self.m * self.k + self.k * self.n + self.m * self.n) * self.copies * element


@dataclass(frozen=True)
class Work:
    """What one GPU does for one layer and one microbatch.

    Attributes:
        linear: Products with weights, forward. Each has one of the same FLOPs in I and one in W.
        attention: FLOPs of scores and context, forward.
        attention_backward: FLOPs of their backward; all of it is I.
        attention_bytes: Bytes that softmax and dropout of the scores move, forward.
        attention_bytes_backward: The same, backward.
        score_bytes: Bytes of scores that the products of the attention themselves write and read, forward.
        score_bytes_backward: The same, backward.
        forward_bytes: Bytes that everything else between the products moves (norms, GeLU, dropouts, residuals), forward.
        backward_bytes: The same, backward; all of it is I.
        collectives: All-reduces of n·h elements over the tensor-parallel GPUs, forward.
        collectives_backward: The same, backward; all in I.
    """

    linear: tuple[Gemm, ...] = ()
    attention: float = 0.0
    attention_backward: float = 0.0
    attention_bytes: float = 0.0
    attention_bytes_backward: float = 0.0
    score_bytes: float = 0.0
    score_bytes_backward: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    collectives: int = 0
    collectives_backward: int = 0


class Activation(NamedTuple):
    """Bytes of one microbatch's activation of a layer on one GPU.

    Attributes:
        whole: All that the backward needs.
        attention: The part of it between softmax and dropout, 5as²b/t, which selective recomputation does not keep.
        input: The layer's input, which full recomputation keeps.
        weight_grad: What W needs: the inputs and the output gradients of the linear layers (32sbh for GPT, zero-bubble
            paper, Table 1). The rest goes when I ends.
    """

    whole: float
    attention: float
    input: float
    weight_grad: float


def layer_work(model: ModelSpec, parallel: Parallelism, samples: float) -> Work:
    """What one GPU does for a transformer layer.

    Args:
        model: The model.
        parallel: How it is spread.
        samples: b, samples of the microbatch.

    Examples:
        >>> from pipesim.models.spec import read_model
        >>> work = layer_work(read_model("gpt3-175b"), Parallelism(), 1)
        >>> b, s, h = 1, 2048, 12288
        >>> sum(gemm.flops for gemm in work.linear) == 24 * b * s * h**2, work.attention == 4 * b * s**2 * h
        (True, True)
    """
    t, element, mask = parallel.tensor, parallel.element, 1 if model.dropout else 0
    tokens = samples * model.sequence
    stream = tokens * model.hidden / (t if parallel.sequence_parallel else 1)  # elements of norms, dropouts and residuals on this GPU
    query, kv = tokens * model.query_width / t, tokens * model.kv_width / min(t, model.groups)
    width = model.ffn_width / t
    routed = tokens * model.active_experts  # tokens that go through experts, each counted once per expert
    inner = routed * width
    per_expert = routed / model.experts
    linear = [
        Gemm(tokens, (query + 2 * kv) / tokens, model.hidden),
        Gemm(tokens, model.hidden, query / tokens),
        Gemm(per_expert, width * (2 if model.gated else 1), model.hidden, model.experts),
        Gemm(per_expert, model.hidden, width, model.experts),
    ]
    scores = samples * model.heads * model.sequence**2 / t
    score_flops = 4 * scores * model.head_width
    attention_bytes = attention_bytes_backward = score_bytes = score_bytes_backward = 0.0
    if not parallel.flash_attention:
        # softmax reads and writes, dropout reads and writes beside its mask; softmax's backward reads two and writes one
        attention_bytes = scores * ((2 + 2 * mask) * element + mask)
        attention_bytes_backward = scores * ((3 + 2 * mask) * element + mask)
        # one product writes the scores, one reads them; backward one writes their gradient, three read scores or gradient
        score_bytes, score_bytes_backward = scores * 2 * element, scores * 4 * element
    gates = 2 if model.gated else 1
    # norms read and write; dropout and residual read two and write one, beside the mask; context is made contiguous
    forward = stream * (2 * 2 * element + 2 * (3 * element + mask)) + query * 2 * element + inner * (gates + 1) * element
    # norms read two and write one, and add to the residual's gradient; dropouts; GeLU reads input and gradient
    backward = (
        stream * (2 * 3 * element + 2 * 3 * element + 2 * mask * (2 * element + mask)) + query * 2 * element + inner * (2 * gates + 1) * element
    )
    if not model.learned_positions:  # rotary: queries and keys are read and written
        forward += (query + kv) * 2 * element
        backward += (query + kv) * 2 * element
    if model.experts > 1:
        linear.append(Gemm(tokens, model.experts, model.hidden))
        moved = 2 * 2 * routed * model.hidden * element  # tokens go to their experts and come back
        forward += moved
        backward += moved
    return Work(
        tuple(linear),
        score_flops,
        score_flops * (2.5 if parallel.flash_attention else 2.0),
        attention_bytes,
        attention_bytes_backward,
        score_bytes,
        score_bytes_backward,
        forward,
        backward,
        *((2, 2) if t > 1 else (0, 0)),
    )


def embedding_work(model: ModelSpec, parallel: Parallelism, samples: float) -> Work:
    """What one GPU does for the input embedding: look up and add, an all-reduce, and dropout."""
    moved = samples * model.sequence * model.hidden * parallel.element
    return Work(forward_bytes=4 * moved, backward_bytes=4 * moved, collectives=int(parallel.tensor > 1))


def head_work(model: ModelSpec, parallel: Parallelism, samples: float) -> Work:
    """What one GPU does for the last norm, the output layer and the loss: 2bshV FLOPs, and the passes over fp32 logits."""
    tokens = samples * model.sequence
    logits = tokens * model.vocabulary / parallel.tensor
    # read and write as fp32, maximum, subtract, exp and sum; backward: gradient of the softmax, back to the element's size
    norm = tokens * model.hidden * parallel.element
    forward = logits * (parallel.element + 4 + 4 + 8 + 8) + 2 * norm
    backward = logits * (8 + 4 + parallel.element) + 3 * norm
    gemm = Gemm(tokens, model.vocabulary / parallel.tensor, model.hidden)
    return Work((gemm,), forward_bytes=forward, backward_bytes=backward, collectives_backward=int(parallel.tensor > 1))


def layer_activation(model: ModelSpec, parallel: Parallelism, samples: float) -> Activation:
    """Bytes that a layer keeps for its backward on one GPU, before any recomputation.

    For GPT it is Korthikanti et al.'s Table 2: ``sbh(10 + 24/t + 5as/ht)``, and ``sbh(34/t + 5as/ht)`` with sequence
    parallelism.

    Examples:
        >>> from pipesim.models.spec import read_model
        >>> model, (s, b, h, a, t) = read_model("gpt3-175b"), (2048, 1, 12288, 96, 8)
        >>> layer_activation(model, Parallelism(tensor=t), b).whole == s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
        True
    """
    t, element, mask = parallel.tensor, parallel.element, 1 if model.dropout else 0
    tokens = samples * model.sequence
    split = t if parallel.sequence_parallel else 1
    stream = tokens * model.hidden / split
    query, kv = tokens * model.query_width / t, tokens * model.kv_width / min(t, model.groups)
    routed = tokens * model.active_experts
    inner = routed * model.ffn_width / t
    into = routed * model.hidden / split  # what the feed-forward layer reads: the stream, once per active expert
    gates = 2 if model.gated else 1
    scores = 0.0 if parallel.flash_attention else samples * model.heads * model.sequence**2 / t * (element * (1 + mask) + mask)
    # inputs of both norms, of QKV, up and dropout masks; Q, K, V and the projection's input; around the activation function
    outside = stream * (3 * element + 2 * mask) + into * element
    if model.experts > 1:
        outside += into * element + tokens * model.experts * 4  # what experts give back, before it is weighted; router probabilities
    inside = (2 * query + 2 * kv) * element + inner * (gates + 1) * element
    # inputs and output gradients of QKV, projection, up (and gate), down
    weight_grad = (2 * stream + 2 * into + 2 * query + 2 * kv + inner * (gates + 1)) * element
    return Activation(outside + inside + scores, scores, stream * element, weight_grad)


def embedding_activation(model: ModelSpec, parallel: Parallelism, samples: float) -> float:
    """Bytes that the embedding keeps on one GPU: the mask of its dropout, sbh/t with sequence parallelism (Korthikanti et al., section 4.3)."""
    return samples * model.sequence * model.hidden / (parallel.tensor if parallel.sequence_parallel else 1) * (1 if model.dropout else 0)


def head_activation(model: ModelSpec, parallel: Parallelism, samples: float) -> tuple[float, float]:
    """Bytes that the output layer keeps on one GPU, and the part of them that W needs.

    The inputs of the last norm and of the product, and fp32 logits: 4sbh/t + 4sbV/t (Korthikanti et al., section 4.3). What
    W needs is the product's input and the gradient of the logits, which is as wide as an element: I has used the rest up.
    """
    tokens = samples * model.sequence
    one = tokens * model.hidden / (parallel.tensor if parallel.sequence_parallel else 1) * parallel.element
    logits = 4 * tokens * model.vocabulary / parallel.tensor
    return 2 * one + logits, one + logits / 4 * parallel.element


class Parameters(NamedTuple):
    """Parameters on one GPU.

    Attributes:
        layer: Of one transformer layer.
        embedding: Of the input embedding, positions included.
        head: Of the last norm and the output layer; with tied embeddings the weights of the output layer count here too.
        tied: The part of *head* that is a copy of the embedding.
    """

    layer: float
    embedding: float
    head: float
    tied: float

    def total(self, layers: int) -> float:
        """Parameters of the model that differ (on one GPU)."""
        return self.layer * layers + self.embedding + self.head - self.tied


def parameters(model: ModelSpec, tensor: int = 1) -> Parameters:
    """Parameters on each of *tensor* GPUs; for GPT 12h² + 13h a layer, V·h + s·h for the embedding.

    Examples:
        >>> from pipesim.models.spec import read_model
        >>> model = read_model("gpt3-175b")
        >>> round(parameters(model).total(model.layers) / 1e9, 1)
        174.6
    """
    h, t, bias = model.hidden, tensor, 1 if model.biases else 0
    query, kv, width = model.query_width / t, model.kv_width / min(t, model.groups), model.ffn_width / t
    gates = 2 if model.gated else 1
    norm = h * (2 if model.norm == "layernorm" else 1)
    attention = (h + bias) * (query + 2 * kv) + query * h + bias * h
    expert = (h + bias) * gates * width + width * h + bias * h
    router = h * model.experts if model.experts > 1 else 0
    vocabulary = model.vocabulary * h / t
    positions = model.sequence * h if model.learned_positions else 0
    return Parameters(
        attention + expert * model.experts + router + 2 * norm,
        vocabulary + positions,
        vocabulary + norm,
        vocabulary if model.tied_embeddings else 0.0,
    )


def forward_flops(model: ModelSpec) -> tuple[float, float, float]:
    """FLOPs of one sample's forward: (the linear layers of all layers, their attention, the output layer).

    Times three is the model FLOPs of training: 72BLsh²(1 + s/6h + V/12hL) for GPT (Korthikanti et al., equation 7).

    Examples:
        >>> from pipesim.models.spec import read_model
        >>> B, L, s, h, V = 1, 96, 2048, 12288, 51200
        >>> round(3 * sum(forward_flops(read_model("gpt3-175b"))) / (72 * B * L * s * h**2 * (1 + s / (6 * h) + V / (12 * h * L))), 12)
        1.0
    """
    alone = Parallelism()
    work = layer_work(model, alone, 1)
    # the router of a mixture of experts is not in the papers' formula, and is a part in ten thousand
    linear = sum(gemm.flops for gemm in work.linear)
    return model.layers * linear, model.layers * work.attention, sum(gemm.flops for gemm in head_work(model, alone, 1).linear)
