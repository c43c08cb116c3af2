"""GEMS: two mirrored replicas of the model that take turns."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ScheduleError
from pipesim.op import Kind
from pipesim.schedule import Schedule

__all__ = ["gems"]


def gems(devices: int, microbatches: int, *, first: Literal["backward", "forward"] = "backward") -> Schedule:
    """Runs one microbatch at a time down the devices and the next one up, so that each follows on the heels of the other.

    ::

        device 0 | F0 .  .  .  .  B0 F1 B1 F2 .  .        even microbatches: stage s on device s
        device 1 | .  F0 .  .  B0 F1 .  .  B1 F2 .        odd microbatches:  stage s on device p - 1 - s
        device 2 | .  .  F0 B0 F1 .  .  .  .  B1 F2       F = B here

    The forward of microbatch k + 1 starts where that of k ended, on the device that holds the last stage of one replica
    and the first of the other, and at most two microbatches are under way. There the backward of k goes first, and the
    forward of k + 1 follows it up the pipeline; with ``first="forward"`` it runs ahead of it, which ends earlier and
    holds two activations on a device instead of one (p = m = 4, F = 1, B = 2: 31 instead of 39).

    With equal stages, backward first: makespan m·(p·B + F) + (p - 1)·F where B >= F, in general
    p·(F + B) + (m - 1)·max(p·B + F, p·F + B); peak one activation on every device. Two copies of the weights. Any p, any m;
    with an odd p the middle device holds one stage once.

    The papers' M_a is ``peak_activations`` here, not ``peak_activation_share``, which divides by the two stages of a device.

    Source: Jain et al. 2020 (GEMS).

    Args:
        devices: Devices p, two stages each.
        microbatches: Microbatches m, dealt to the two replicas in turn.
        first: Which goes first where the next microbatch starts: the ``backward`` of the one before, or the new ``forward``.

    Raises:
        ScheduleError: *first* is neither.

    Examples:
        >>> print(gems(2, 3))
        name: gems
        device 0 | 0F0 0B0 1F1 1B1 0F2 0B2
        device 1 | 1F0 1B0 0F1 0B1 1F2 1B2
    """
    if first not in ("backward", "forward"):
        raise ScheduleError(f"first must be 'backward' or 'forward', got {first!r}")
    streams = []
    for device in range(devices):
        if first == "backward":
            kind, microbatch = np.tile([Kind.F, Kind.B], microbatches), np.repeat(np.arange(microbatches), 2)
        else:
            kind, microbatch = _forward_first(microbatches, turns=device == 0)
        streams.append((np.where(microbatch % 2, devices - 1 - device, device), kind, microbatch))
    return Schedule.from_columns(streams, name="gems" if first == "backward" else "gems-forward-first")


def _forward_first(microbatches: int, turns: bool) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """Columns (kind, microbatch): two forwards, two backwards; the odd microbatch goes back at once on the device where it turns."""
    pairs = microbatches // 2
    order = np.array([0, 1, 1, 0] if turns else [0, 1, 0, 1])
    microbatch = (2 * np.arange(pairs)[:, None] + order).ravel()
    kind = np.tile([Kind.F, Kind.F, Kind.B, Kind.B], pairs)
    if microbatches % 2:
        kind, microbatch = np.append(kind, [Kind.F, Kind.B]), np.append(microbatch, [microbatches - 1] * 2)
    return kind, microbatch
