"""1F1B and GPipe with the recomputation as an op of its own, which starts before the gradient is there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.op import Kind
from pipesim.schedule import Schedule

from .gpipe import gpipe
from .one_f_one_b import one_f_one_b

__all__ = ["gpipe_recompute", "one_f_one_b_recompute"]


def one_f_one_b_recompute(devices: int, microbatches: int) -> Schedule:
    """Runs 1F1B, keeps only the stage's input of a forward, and recomputes the rest (R) while the gradient is on its way.

    ::

        device 0 | F0 F1 R0 .  B0 F2 R1 B1 R2 .  B2
        device 1 | .  F0 R0 B0 F1 R1 B1 F2 R2 B2 .       F = B = R here

    R stands right before its backward and needs nothing from another device, so it runs in the gap before the gradient
    comes. As a part of the backward it would only start then, and the drain would cost F + B a hop and not B: with equal
    stages makespan m·(2F + B) + (p - 1)·(F + B) here, (m + p - 1)·(2F + B) there.

    Memory: min(p - i, m) stage inputs on device i, and one whole activation, from the start of its R to the end of its
    backward. Any p, any m.

    Source: the recomputation is that of Chen et al. 2016; R as an op of a schedule is in the public zero-bubble scheduler.

    Args:
        devices: Devices p, one stage each.
        microbatches: Microbatches m.
    """
    return _with_recomputation(one_f_one_b(devices, microbatches))


def gpipe_recompute(devices: int, microbatches: int) -> Schedule:
    """Runs GPipe with re-materialisation, R right before its backward, so that it fills the bubble; see ``1f1b-recompute``.

    ::

        device 0 | F0 F1 F2 R0 .  B0 R1 B1 R2 B2
        device 1 | .  F0 F1 F2 R0 B0 R1 B1 R2 B2 .       F = B = R here

    With equal stages: makespan m·(2F + B) + (p - 1)·(F + B). Memory: m stage inputs and one whole activation. Any p, any m.

    Source: Huang et al. 2019 (GPipe), section 2.3, which recomputes during the wait for the gradient too.

    Args:
        devices: Devices p, one stage each.
        microbatches: Microbatches m.
    """
    return _with_recomputation(gpipe(devices, microbatches))


def _with_recomputation(schedule: Schedule) -> Schedule:
    """Puts R before every B."""

    def columns(device: int) -> tuple[int, NDArray[np.int8], NDArray[np.int32]]:
        rows = slice(schedule.device_rows[device], schedule.device_rows[device + 1])
        kind, microbatch = schedule.kind[rows], schedule.microbatch[rows]
        backward = np.flatnonzero(kind == Kind.B)
        return device, np.insert(kind, backward, Kind.R), np.insert(microbatch, backward, microbatch[backward])

    return Schedule.from_columns([columns(device) for device in range(schedule.num_devices)], name=f"{schedule.name}-recompute")
