"""Interleaved 1F1B with a split backward."""

from __future__ import annotations

import numpy as np

from pipesim.errors import require_count
from pipesim.op import Kind
from pipesim.schedule import Schedule

from .interleaved import pytorch_group, visits

__all__ = ["interleaved_zb"]


def interleaved_zb(devices: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """Runs interleaved 1F1B with the weight gradients put off, as ZB-H1 does it to 1F1B; chunk c of device r is stage c·p + r.

    ::

        PICTURE

    Groups, and the chunks that forwards and backwards walk, are those of ``interleaved-1f1b``. Device r starts with
    p - 1 - r + (v - 1)·g forwards, half as steep as there; then round b: a forward if one is left, I_b, and W_{b-r} if there is one;
    then the other W. With one chunk this is ``zb-h1``.

    With chunk times F = I = W and p ≤ g: FORMULA

    Sources: Qi et al. 2024 (Zero Bubble Pipeline Parallelism) for the idea; the order is that of PyTorch's
    ScheduleInterleavedZeroBubble.

    Args:
        devices: Devices p.
        microbatches: Microbatches m. They make m // p groups of equal size g (one if m < p), which must divide m.
        chunks: Chunks v per device.

    Raises:
        ScheduleError: m does not fit, or the chunks are no number of at least 1.
    """
    chunks = require_count("chunks", chunks)
    size = microbatches if chunks == 1 else pytorch_group(devices, microbatches)
    chunk, microbatch = visits(microbatches, chunks, size)
    chunk, microbatch = np.concatenate([chunk, chunks - 1 - chunk, chunks - 1 - chunk]), np.tile(microbatch, 3)
    kind = np.repeat([Kind.F, Kind.I, Kind.W], microbatches * chunks)
    k = np.arange(microbatches * chunks)
    streams = []
    for r in range(devices):
        warmup = devices - 1 - r + (chunks - 1) * size
        # round b holds F_{warmup + b}, I_b, W_{b - r}; what comes before round 0 is warm-up
        order = np.argsort(np.concatenate([3 * (k - warmup), 3 * k + 1, 3 * (k + r) + 2]))
        streams.append((chunk[order] * devices + r, kind[order], microbatch[order]))
    return Schedule.from_columns(streams, name="interleaved-zb")
