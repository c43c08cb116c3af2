"""Seconds of a layer's work on a device: a roofline whose rates depend on the shape, plus overheads."""

from __future__ import annotations

from typing import NamedTuple

from pipesim.models.devices import DeviceSpec
from pipesim.models.layers import Gemm, Work
from pipesim.models.links import ring_time, tensor_group
from pipesim.models.parallelism import Parallelism
from pipesim.models.spec import ModelSpec

__all__ = ["PassTimes", "gemm_time", "work_times"]


class PassTimes(NamedTuple):
    """Seconds of one layer (or the embedding, or the output layer) for one microbatch.

    Attributes:
        forward: F, computing.
        input_grad: I, computing.
        weight_grad: W; it has no collectives.
        attention: The forward of the attention alone, which selective recomputation repeats.
        forward_collectives: All-reduces of F over the tensor-parallel GPUs.
        backward_collectives: The same of I.
    """

    forward: float
    input_grad: float
    weight_grad: float
    attention: float
    forward_collectives: float
    backward_collectives: float


def gemm_time(gemm: Gemm, device: DeviceSpec, parallel: Parallelism, *, accumulate: bool = False) -> float:
    """Seconds of a product: the longer of its FLOPs and its bytes.

    Args:
        gemm: Its shape, as the forward has it; the products of I and W have the same two weight sides.
        device: Peaks and the parts of them that are reached.
        parallel: For the precision.
        accumulate: Whether it is a weight gradient, which is added to a gradient in memory.

    Examples:
        >>> from pipesim.models.devices import read_device
        >>> device = read_device("a100-80g").with_efficiency(gemm=1.0, gemm_size=0.0)
        >>> gemm_time(Gemm(2048, 4096, 4096), device, Parallelism()) == 2 * 2048 * 4096 * 4096 / 312e12
        True
    """
    efficiency = device.efficiency
    moved = gemm.bytes(parallel.element)
    if accumulate:
        moved += gemm.n * gemm.k * gemm.copies * (2 * (parallel.gradient_bytes if parallel.precision == "mixed" else 4) - parallel.element)
    computing = gemm.flops / (device.peak(parallel.precision) * efficiency.gemm_rate(gemm.n, gemm.k))
    return max(computing, moved / (device.memory_bandwidth * efficiency.memory))


def work_times(work: Work, device: DeviceSpec, model: ModelSpec, parallel: Parallelism, samples: float, *, overhead: float = 0.0) -> PassTimes:
    """Seconds of one layer's work.

    Args:
        work: From :func:`pipesim.models.layers.layer_work` and its like.
        device: The GPU.
        model: The model.
        parallel: How it is spread.
        samples: Samples of the microbatch.
        overhead: Seconds added to each of F, I and W.
    """
    efficiency = device.efficiency
    bandwidth = device.memory_bandwidth * efficiency.memory
    # a fused kernel skips the half of the scores that a causal mask hides; FLOPs are counted in full all the same
    seen = 0.5 if parallel.flash_attention and model.causal else 1.0
    attention_rate = device.peak(parallel.precision) * efficiency.gemm * efficiency.attention / seen
    attention = max(work.attention / attention_rate, work.score_bytes / bandwidth) + work.attention_bytes / bandwidth
    attention_backward = (
        max(work.attention_backward / attention_rate, work.score_bytes_backward / bandwidth) + work.attention_bytes_backward / bandwidth
    )
    linear = sum(gemm_time(gemm, device, parallel) for gemm in work.linear)
    collective = 0.0
    if work.collectives or work.collectives_backward:
        size = samples * model.sequence * model.hidden * parallel.element
        collective = ring_time("all_reduce", tensor_group(device, parallel), size)
    return PassTimes(
        linear + attention + work.forward_bytes / bandwidth + overhead,
        linear + attention_backward + work.backward_bytes / bandwidth + overhead,
        sum(gemm_time(gemm, device, parallel, accumulate=True) for gemm in work.linear) + overhead,
        attention,
        work.collectives * collective,
        work.collectives_backward * collective,
    )
