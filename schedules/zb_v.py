"""ZB-V: no bubble with the memory of 1F1B, two chunks per device in the shape of a V."""

from __future__ import annotations

import numpy as np

from pipesim.op import Kind
from pipesim.schedule import Schedule

__all__ = ["zb_v"]


def zb_v(devices: int, microbatches: int) -> Schedule:
    """Runs two chunks per device, stages r and 2p - 1 - r on device r, so that the last stage stands beside the first.

    ::

        device 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 .
        device 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    Device r, in this order (c0 its lower stage, c1 its higher one): 2(p - r) - 1 times F(c0); r times F(c1), F(c0); p - r times F(c1),
    I(c1), W(c1); until the forwards of c1 are used up: F(c0) if one is left, I(c0), W(c0), F(c1), I(c1), W(c1); r times
    I(c0), I(c1); p - r times I(c0), W(c0); the other W of c1, then of c0.

    With F = I = W = 1 per chunk and m ≥ 2p - 1: no idle time between a device's first and last op, makespan 6m + p - 1, peak exactly 2p
    chunk activations on every device, which is 1F1B's p. With other durations bubbles return: (2, 3, 1) at p = 4, m = 8 takes
    108 and not 102. Twice the messages of 1F1B. The first and the last stage are both on device 0, and so are the embedding and the
    head. Any p, any m; with m < 2p - 1 it is the order for 2p - 1 microbatches without those that do not exist.

    Source: Qi et al. 2024 (Zero Bubble Pipeline Parallelism), section 6; the order is that of PyTorch's ScheduleZBVZeroBubble.

    Args:
        devices: Devices p.
        microbatches: Microbatches m.
    """
    p, full = devices, max(microbatches, 2 * devices - 1)
    f0, i0, w0, f1, i1, w1 = range(6)
    streams = []
    for r in range(p):
        left = full - (2 * p - 1 - r)  # forwards of c0 that the steady phase starts with
        rounds = full - p  # forwards of c1 then
        phases = [
            ([f0], 2 * (p - r) - 1),
            ([f1, f0], r),
            ([f1, i1, w1], p - r),
            ([f0, i0, w0, f1, i1, w1], left),
            ([i0, w0, f1, i1, w1], rounds - left),
            ([i0, i1], r),
            ([i0, w0], p - r),
            ([w1], r),
            ([w0], r),
        ]
        step = np.concatenate([np.tile(steps, times) for steps, times in phases])
        microbatch = np.empty(len(step), np.int32)
        for each in range(6):
            microbatch[step == each] = np.arange(full)
        step, microbatch = step[microbatch < microbatches], microbatch[microbatch < microbatches]
        stage = np.where(step < f1, r, 2 * p - 1 - r)
        streams.append((stage, np.array([Kind.F, Kind.I, Kind.W])[step % 3], microbatch))
    return Schedule.from_columns(streams, name="zb-v")
