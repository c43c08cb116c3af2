"""Naive model parallelism: one microbatch at a time."""

from __future__ import annotations

import numpy as np

from pipesim.op import Kind
from pipesim.schedule import Schedule

__all__ = ["naive"]


def naive(devices: int, microbatches: int, *, forward_only: bool = False) -> Schedule:
    """Splits the model over devices and sends one microbatch at a time through all of them.

    ::

        device 0 | F0 .  .  B0 F1 .  .  B1
        device 1 | .  F0 B0 .  .  F1 B1 .

    The next forward of device 0 stands after the backward of the microbatch before, so exactly one device works at any
    time. A forward-only run pipelines all the same, because nothing goes back: it equals forward-only ``gpipe``.

    Makespan m·p·(F + B); bubble fraction 1 - 1/p; one activation alive per device. Any p, any m.

    Source: the "naive" baseline of Huang et al. 2019 (GPipe), figure 2b.

    Args:
        devices: Devices p, one stage each.
        microbatches: Microbatches m.
        forward_only: Leave the backwards out, for an inference run.
    """
    microbatch = np.arange(microbatches)
    if forward_only:
        return Schedule.from_columns([(stage, np.full(microbatches, Kind.F), microbatch) for stage in range(devices)], name="naive")
    kinds = np.tile([Kind.F, Kind.B], microbatches)
    return Schedule.from_columns([(stage, kinds, np.repeat(microbatch, 2)) for stage in range(devices)], name="naive")
