"""PiPAD: preparation, transfer and computation of a dynamic graph's snapshots, overlapped on one GPU."""

from __future__ import annotations

from dataclasses import replace

from pipesim.errors import ScheduleError
from pipesim.schedule import Schedule

from .gpipe import gpipe

__all__ = ["pipad"]


def pipad(devices: int, microbatches: int) -> Schedule:
    """Runs three serial resources of one machine as a pipeline: CPU (0), PCIe (1), GPU (2).

    ::

        device 0 | F0 F1 F2 .  .        the CPU prepares snapshots: slicing, overlap extraction
        device 1 | .  F0 F1 F2 .        PCIe carries them
        device 2 | .  .  F0 F1 F2       the GPU trains on them, forward and backward

    There is no pipeline over GPUs. A microbatch is a partition of snapshots, which the GPU handles in parallel. There are
    no gradients between the three, so the run is forward only, and the time of the GPU's F is that of its forward
    and backward. Give one time per stage: with c, x and g, makespan c + x + g + (m - 1)·max(c, x, g).

    Three devices, any m.

    Source: Wang et al. 2023 (PiPAD), abstract.

    Args:
        devices: 3, the resources.
        microbatches: Partitions of snapshots.

    Raises:
        ScheduleError: There are not three devices.
    """
    if devices != 3:
        raise ScheduleError(f"pipad has three devices, which stand for CPU, PCIe and GPU; got {devices}")
    return replace(gpipe(devices, microbatches, forward_only=True), name="pipad")
