"""ZB-H1 and ZB-H2: 1F1B with a split backward, the weight gradients put off to where they fill the bubble."""

from __future__ import annotations

import numpy as np

from pipesim.op import Kind
from pipesim.schedule import Schedule

__all__ = ["zb_h1", "zb_h2"]


def zb_h1(devices: int, microbatches: int) -> Schedule:
    """Runs 1F1B with the backward split, so that the drain waits for input gradients only; the memory of 1F1B.

    ::

        device 0 | F0 F1 .  I0 W0 F2 I1 W1 F3 I2 W2 I3 W3      p = 2, m = 4, F = I = W;
        device 1 | .  F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3      the paper writes B for our I

    Device i starts with p - i forwards; then I_b, W_{b-i} if there is one, and a forward if one is left; then the other W.
    With equal stages, W ≤ F and m ≥ p: bubble inside the longest span of a device (p - 1)·(F + I - W), makespan m·(F + I + W) and
    that bubble, or (p - 1)·F if that is more. With m ≤ p and W ≤ min(F, I): makespan (m + p - 1)·(F + I) + W. Peak of device i
    (p - i)·M_B + i·M_W: p - i activations whose I is to come and i that wait for W. Any p, any m.

    Source: Qi et al. 2024 (Zero Bubble Pipeline Parallelism), section 2.2, figure 2 and table 2.

    Args:
        devices: Devices p, one stage each.
        microbatches: Microbatches m.
    """
    warmup = [devices - i for i in range(devices)]
    return _handcrafted("zb-h1", microbatches, warmup, list(range(devices)))


def zb_h2(devices: int, microbatches: int) -> Schedule:
    """Runs ZB-H1 with twice the forwards in flight, which leaves no bubble where F = I = W; twice the memory of 1F1B.

    ::

        device 0 | F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 .       p = 2, m = 4, F = I = W;
        device 1 | .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3      the paper writes B for our I

    Device i starts with 2(p - i) - 1 forwards; then I_b, W_{b-2i} if there is one, and a forward if one is left; then the other W.
    With equal stages, W ≤ F and m ≥ 2p - 1: bubble inside the longest span of a device (p - 1)·(F + I - 2W), if that is not
    negative; makespan m·(F + I + W) and that bubble, or (p - 1)·F if that is more, because the spans start one after the other.
    Peak of device i (2(p - i) - 1)·M_B + 2i·M_W. Any p, any m.

    Source: Qi et al. 2024 (Zero Bubble Pipeline Parallelism), section 2.3, figure 3 and table 2.

    Args:
        devices: Devices p, one stage each.
        microbatches: Microbatches m.
    """
    warmup = [2 * (devices - i) - 1 for i in range(devices)]
    return _handcrafted("zb-h2", microbatches, warmup, [2 * i for i in range(devices)])


def _handcrafted(name: str, microbatches: int, warmup: list[int], delay: list[int]) -> Schedule:
    """Round b of device i holds I_b, W_{b - delay}, F_{warmup + b}; what comes before round 0 is warm-up."""
    k = np.arange(microbatches)
    kind = np.repeat([Kind.I, Kind.W, Kind.F], microbatches)
    streams = []
    for stage, (first, late) in enumerate(zip(warmup, delay, strict=True)):
        order = np.argsort(np.concatenate([3 * k, 3 * (k + late) + 1, 3 * (k - first) + 2]))
        streams.append((stage, kind[order], np.tile(k, 3)[order]))
    return Schedule.from_columns(streams, name=name)
