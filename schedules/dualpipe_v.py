"""DualPipeV: DualPipe folded in half, so that there is one copy of the weights."""

from __future__ import annotations

import numpy as np

from pipesim.errors import ScheduleError
from pipesim.schedule import Schedule

from .dualpipe import folded_stream

__all__ = ["dualpipe_v"]


def dualpipe_v(devices: int, microbatches: int) -> Schedule:
    """Runs DualPipe on half the devices: stages r and 2p - 1 - r on device r, each microbatch down and back up the V.

    ::

        device 0 | F0 F1 F2 f0 i0 w0 f1 F3&b1    .  f2&B0    b2    .  f3&B1    b3    I2 W2 I3 W3
        device 1 | .  F0 f0 F1 f1 F2 b0    f2&B0    F3&b1    f3&B1    b2    B2    .  i3 I3 w3 W3

        upper case: stage r; lower case: stage 2p - 1 - r; F = I = W here

    The eight phases of :func:`~pipesim.schedules.dualpipe.dualpipe` with h = p, q = r and n = m, where "0" is the stage r and
    "1" the stage 2p - 1 - r. Of the first pair of device p - 1 the two ops follow each other.

    With equal stages, F = I >= W and FB the time of a pair, durations per chunk: device p - 1 idles (p - 1)·(FB + B - 3W), B = I + W.
    Peak 2p + 1 chunk activations on every device, whatever the durations: the PP + 1 of the DualPipe table, where PP is the
    number of stages. One copy of the weights, so replicas exchange no gradients.

    Legal sizes: any p, m >= 2p.

    Source: the DualPipe repository (DualPipeV, "cut in half"); PyTorch's ScheduleDualPipeV.

    Args:
        devices: Devices p, two stages each.
        microbatches: Microbatches m.

    Raises:
        ScheduleError: m < 2p.

    Examples:
        >>> print(*dualpipe_v(1, 2).streams[0])
        0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B 1B1 0I1 0W1
    """
    if microbatches < 2 * devices:
        raise ScheduleError(f"dualpipe-v wants at least twice as many microbatches as devices; got {devices} devices and {microbatches} microbatches")
    streams = []
    for device in range(devices):
        far, kind, microbatch, joined = folded_stream(device, devices, microbatches)
        streams.append((np.where(far, 2 * devices - 1 - device, device), kind, microbatch, joined))
    return Schedule.from_columns(streams, name="dualpipe-v")
