"""Interleaved 1F1B with a split backward."""

from __future__ import annotations

import numpy as np

from pipesim.errors import require_count, require_size
from pipesim.op import Kind
from pipesim.schedule import Schedule

from .interleaved import pytorch_group, visits

__all__ = ["interleaved_zb"]


def interleaved_zb(devices: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """Runs interleaved 1F1B with the weight gradients put off, as ZB-H1 does it to 1F1B; chunk c of device r is stage c·p + r.

    ::

        device 0 | 0F0 0F1 2F0 2F1 .   2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
        device 1 | .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3

    Groups, and the chunks that forwards and backwards walk, are those of ``interleaved-1f1b``. Device r starts with
    p - 1 - r + (v - 1)·g forwards, half as steep as there; then round b: a forward if one is left, I_b, and W_{b-r} if there is one;
    then the other W. With one chunk this is ``zb-h1``.

    With F, I, W the times of a chunk, W ≤ F and m ≥ p: bubble inside the longest span of a device (p - 1)·(F + I - W), if that is not
    negative, 1/v of that of ``zb-h1``; p = 4, v = 2, m = 8 and F = I = W = 1 take 51. Peak min(m·v, p + (v - 1)·g) chunk activations
    on every device, until W ends. With m < p the order is legal and the bubble larger.

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
    require_size(devices, microbatches, chunks)
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
