"""1F1B: DAPPLE, PipeDream-Flush, Megatron's non-interleaved schedule."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ScheduleError, require_count
from pipesim.op import Kind
from pipesim.schedule import Schedule

__all__ = ["alternating", "eager_1f1b", "one_f_one_b"]

_F, _B = int(Kind.F), int(Kind.B)  # NumPy reads a plain number three times as fast


def one_f_one_b(devices: int, microbatches: int, *, policy: Literal["A", "B"] = "A", max_in_flight: int | None = None) -> Schedule:
    """Runs a few forwards to fill the pipeline, then one forward, one backward in turn, then drains.

    ::

        device 0 | F0 F1 .  B0 F2 B1 .  B2
        device 1 | .  F0 B0 F1 B1 F2 B2 .       F = B here

    Device i starts with K forwards: policy A K = p - i, policy B K = 2(p - i) - 1, at most m and at most
    *max_in_flight*; then B, F, B, F, ... With equal stages and free communication: makespan (m + p - 1)·(F + B), the same
    bubble as GPipe; peak min(K, m) activations on device i. Policy B holds more and hides the time of a hop:
    p=4, m=16, F=1, B=2 and a hop of 1 takes 85 with A, 63 with B. Any p, any m; m < p is legal.

    Sources: Fan et al. 2021 (DAPPLE), section 5.3 for both policies; Narayanan et al. 2021 (PipeDream-2BW, "flush");
    PyTorch's Schedule1F1B and Megatron-LM run policy A; Alpa calls policy B overlap-friendly.

    Args:
        devices: Devices p, one stage each.
        microbatches: Microbatches m.
        policy: ``A`` or ``B``.
        max_in_flight: The D of the paper: the most microbatches that a device may hold. None for no limit.

    Raises:
        ScheduleError: The policy is neither, or the limit is no number of at least 1.
    """
    if policy not in ("A", "B", "a", "b"):
        raise ScheduleError(f"policy must be 'A' or 'B', got {policy!r}")
    limit = microbatches if max_in_flight is None else min(microbatches, require_count("max_in_flight", max_in_flight))
    streams = []
    for stage in range(devices):
        first = devices - stage if policy in ("A", "a") else 2 * (devices - stage) - 1
        kind, microbatch = alternating(microbatches, min(first, limit))
        streams.append((stage, kind, microbatch))
    return Schedule.from_columns(streams, name="1f1b" if policy in ("A", "a") else "1f1b-B")


def eager_1f1b(devices: int, microbatches: int, *, max_in_flight: int | None = None) -> Schedule:
    """Runs 1F1B with policy B of DAPPLE: more forwards in flight, so that hops are hidden; see ``1f1b``.

    Args:
        devices: Devices p, one stage each.
        microbatches: Microbatches m.
        max_in_flight: The most microbatches that a device may hold. None for no limit.

    Raises:
        ScheduleError: The limit is no number of at least 1.
    """
    return one_f_one_b(devices, microbatches, policy="B", max_in_flight=max_in_flight)


def alternating(microbatches: int, first: int) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
    """Columns (kind, microbatch) of: *first* forwards, then B, F, B, F, ... until both are used up.

    ::

        0 .. first       first .. 2m - first in turn       2m - first .. 2m       positions, m microbatches
        F0 F1 F2 ...     B0 F(first) B1 F(first + 1) ...   ... B(m - 2) B(m - 1)
    """
    first = min(first, microbatches)
    last = 2 * microbatches - first
    k = np.arange(microbatches, dtype=np.int32)
    kind, microbatch = np.empty(2 * microbatches, np.int8), np.empty(2 * microbatches, np.int32)
    kind[...] = _B
    kind[:first] = kind[first + 1 : last : 2] = _F
    microbatch[:first], microbatch[first + 1 : last : 2] = k[:first], k[first:]
    microbatch[first:last:2], microbatch[last:] = k[: microbatches - first], k[microbatches - first :]
    return kind, microbatch
