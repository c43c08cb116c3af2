"""Hanayo: a pipeline that goes to and fro over the devices in waves, with one copy of the weights."""

from __future__ import annotations

from typing import Literal

import numpy as np

from pipesim.errors import ScheduleError, require_count, require_size
from pipesim.listscheduler import list_schedule
from pipesim.op import Kind, Op
from pipesim.schedule import Schedule

from .chimera import in_lockstep

__all__ = ["hanayo"]


def hanayo(
    devices: int, microbatches: int, *, waves: int = 1, order: Literal["wave", "greedy"] = "wave", forward: float = 1.0, backward: float = 2.0
) -> Schedule:
    """Sends every microbatch down the devices and back up, *waves* times: Chimera without its second copy of the weights.

    ::

        device 0 | F0 .  F1 .  F2 .  F3 f0 b0 f1 b1 f2 b2 f3 b3 B0 .  B1 .  B2 .  B3       stages 0 and 7
        device 1 | .  F0 .  F1 .  F2 f0 F3 f1 b0 f2 b1 f3 b2 B0 b3 B1 .  B2 .  B3 .        stages 1 and 6
        device 2 | .  .  F0 .  F1 f0 F2 f1 F3 f2 b0 f3 b1 B0 b2 B1 b3 B2 .  B3 .  .        stages 2 and 5
        device 3 | .  .  .  F0 f0 F1 f1 F2 f2 F3 f3 b0 B0 b1 B1 b2 B2 b3 B3 .  .  .        stages 3 and 4

        one wave, F = B; lower case is the way back

    S = 2·W·p stages; stage s is on device s mod 2p if that is below p, else on 2p - 1 - s mod 2p. Where the way turns, nothing is
    sent.

    The order ``wave`` is Chimera's: if every op took one slot, the forward of microbatch k would run on stage s in slot 2k + s and
    its backward in slot 2k + 2S - 1 - s; no two ops meet, and the next p microbatches follow 2S slots later. For one wave
    this is the paper's figure 3d. The order ``greedy`` is what a list scheduler finds for the durations *forward* and
    *backward* of a chunk: whenever a device is free, it starts a backward if it can, else the forward of the
    deepest stage. Nothing bounds its activations, so for m > p it holds more of them.

    Formulas, durations per chunk, order ``wave``:

    * F = B, m a multiple of p: makespan (4Wm + 2p - 2)·F, bubble fraction (p - 1)/(2Wm + p - 1).
    * m = p: makespan S·min(F, B) + (S + 2p - 2)·max(F, B); so for B = 2F the bubble fraction is (2p - 2)/(3pW + 2p - 2). The
      paper's equation 1, (2p - 2)/(3pW + p - 1), is an estimate: 0.4 for p = 4 and W = 1, where its own figure 3d takes 1/3.
    * peak (2W - 1)·p + 1 + d chunk activations on device d for m >= p: from ((2W - 1)p + 1)/(2W) to p of the paper's M_a, which
      is ``peak_activation_share`` here.

    Any p, any m, any W.

    Source: Liu et al. 2023 (Hanayo), figure 3d and equation 1.

    Args:
        devices: Devices p.
        microbatches: Microbatches m.
        waves: Waves W: each goes down and back up once, so a device has 2·W chunks.
        order: ``wave`` or ``greedy``.
        forward: For ``greedy``: time of a forward of one chunk.
        backward: For ``greedy``: time of a backward of one chunk.

    Raises:
        ScheduleError: *waves* or *order* is not among these, or a time is negative or not finite.

    Examples:
        >>> print(hanayo(2, 2))
        name: hanayo
        device 0 | 0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
        device 1 | 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
    """
    if order not in ("wave", "greedy"):
        raise ScheduleError(f"order must be 'wave' or 'greedy', got {order!r}")
    waves = require_count("waves", waves)
    require_size(devices, microbatches, 2 * waves)
    stage = np.arange(2 * devices * waves)
    position = stage % (2 * devices)
    place = np.minimum(position, 2 * devices - 1 - position)
    if order == "greedy":
        streams = list_schedule(place, microbatches, {Kind.F: forward, Kind.B: backward}, priority=_deepest)
        return Schedule.from_streams(streams, name="hanayo-greedy")
    unit, number = np.divmod(np.arange(microbatches), devices)
    return Schedule.from_columns(in_lockstep(place[:, None], 2 * len(stage) * unit + 2 * number), name="hanayo")


def _deepest(op: Op) -> tuple[bool, int, int]:
    """A backward first, the oldest of them; then the forward of the deepest stage."""
    microbatch = op.microbatch or 0
    return (False, microbatch, -op.stage) if op.kind is Kind.B else (True, -op.stage, microbatch)
