"""Seq1F1B: 1F1B over pieces of a sequence."""

from __future__ import annotations

import numpy as np

from pipesim.errors import require_count, require_size
from pipesim.op import Kind
from pipesim.schedule import Schedule

from .one_f_one_b import alternating

__all__ = ["seq1f1b"]


def seq1f1b(devices: int, microbatches: int, *, splits: int = 2) -> Schedule:
    """Runs 1F1B over sequences that are cut into k pieces, so that the pipeline fills and drains in pieces.

    ::

        device 0 | F0 F1 F2 .  B1 F3 B0 F4 B3 F5 B2 .  B5 B4      p = 2, m = 3, k = 2: F0 and F1 are the
        device 1 | .  F0 F1 B1 F2 B0 F3 B3 F4 B2 F5 B5 B4 .       two pieces of the first sequence; F = B

    Piece s of sequence i is listed as microbatch i·k + s, so the schedule has m·k microbatches, and durations are those of
    a piece. Attention is causal: the forward of a piece needs the keys and values of the pieces before it, and its backward the
    gradients that the pieces after it left there. So forwards run in the order of the pieces, and the backwards of a
    sequence in reverse. No edge says so and none is needed, because the device lists the pieces in that order.

    Device r starts with min(p - 2 - r + k, m·k) forwards, then one forward, one backward in turn, then drains. For pieces of one
    size: makespan (m·k + p - 1)·(F + B), so 1/k of the bubble of 1F1B; peak min(p - 1 - r + k, m·k) pieces, which is
    (p - 1 - r)/k + 1 microbatches. In truth a later piece attends to more; give durations per microbatch for that. Any p, any m.

    Source: Sun et al. 2024 (Seq1F1B). The warm-up is that of the zero-bubble authors' scheduler.

    Args:
        devices: Devices p, one stage each.
        microbatches: Sequences m.
        splits: Pieces k per sequence; 1 is ``1f1b``.

    Raises:
        ScheduleError: The splits are no number of at least 1.
    """
    splits = require_count("splits", splits)
    require_size(devices, microbatches, splits)
    pieces = np.arange(microbatches * splits)
    backwards = pieces.reshape(microbatches, splits)[:, ::-1].ravel()
    streams = []
    for stage in range(devices):
        kind, number = alternating(len(pieces), min(devices - 1 - stage + splits, len(pieces)))
        streams.append((stage, kind, np.where(kind == Kind.B, backwards[number], number)))
    return Schedule.from_columns(streams, name="seq1f1b")
