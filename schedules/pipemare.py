"""PipeMare: asynchronous, one copy of the weights, nothing stashed."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ScheduleError, require_count
from pipesim.op import Kind
from pipesim.schedule import Schedule

from .one_f_one_b import alternating
from .pipedream import with_updates

__all__ = ["pipemare"]


def pipemare(devices: int, microbatches: int, *, lanes: Literal["paired", "single"] = "paired", updates_every: int = 1) -> Schedule:
    """Runs without a flush and without stashing: a backward uses the weights that there are, not those of its forward.

    ::

        device 0 | F0 F1 F2 F3B0 F4B1 ... B..      every column is one slot, F3B0 a forward and a backward at once
        device 1 | .  F0 F1B0 F2B1 F3B2 ... B..

    ``paired`` is the paper's pipeline, in which a stage runs a forward and a backward at the same time. Device i runs
    K = 2(p - 1 - i) + 1 forwards, then the pairs (F_k; B_{k-K}), then the last K backwards, with U after every N-th
    backward. Both halves of a pair read the weights at its start. In the steady state the mean delay is

        forward  (2(P - s) + 1) / N  updates,  stages s = 1..P,      backward  0

    and K + 1 activations are alive during a pair: 8, 6, 4, 2 at p = 4. There is no bubble but the fill and the drain. A
    pair takes F + B here unless the costs say what both at once take: with that time 1 and F = B = 1, makespan
    m + 2p - 1 for m >= 2p - 1, 2p - 1 slots of fill and drain.

    ``single`` is the same idea on one lane, in the order of 1F1B: K = p - i forwards first. Its forward delay is
    (P - s) / N, the backward's 0, and p - i activations are alive.

    Weights: 1 copy, one more (δ) with the paper's discrepancy correction, which the learning algorithm needs and the
    schedule does not show: step sizes α / τ^p annealed (T1), backward weights w - (τ_fwd - τ_bkwd)·δ (T2), synchronous
    first epochs (T3). Any p, any m; if N does not divide m, the last update takes what is left.

    Source: Yang et al. 2021 (PipeMare) for the delays; the streams are derived from them. (The paper's figure for PipeDream,
    τ_bkwd = τ_fwd, is of this model too; PipeDream's own delay, on one lane, is p - 1 - s updates on stage s = 0..p-1.)

    Args:
        devices: Devices p, one stage each.
        microbatches: Microbatches m in the whole run.
        lanes: ``paired`` or ``single``.
        updates_every: Microbatches per update, N.

    Raises:
        ScheduleError: The lanes are neither, or N is no number of at least 1.
    """
    if lanes not in ("paired", "single"):
        raise ScheduleError(f"lanes must be 'paired' or 'single', got {lanes!r}")
    every = require_count("updates_every", updates_every)
    streams = []
    for stage in range(devices):
        if lanes == "paired":
            columns = with_updates(*_paired(microbatches, min(2 * (devices - 1 - stage) + 1, microbatches), every))
        else:
            columns = with_updates(*alternating(microbatches, min(devices - stage, microbatches)), every)
        streams.append((stage, *columns))
    return Schedule.from_columns(streams, name="pipemare" if lanes == "paired" else "pipemare-single", weights="latest")


def _paired(microbatches: int, first: int, every: int) -> tuple[NDArray[np.int8], NDArray[np.int32], int, NDArray[np.bool_]]:
    """Columns of *first* forwards, pairs (F_k; B_{k-first}), and *first* backwards, as :func:`with_updates` takes them."""
    pairs = microbatches - first
    kind = np.concatenate([np.full(first, Kind.F), np.tile([Kind.F, Kind.B], pairs), np.full(first, Kind.B)]).astype(np.int8)
    k = np.arange(microbatches, dtype=np.int32)
    microbatch = np.concatenate([k[:first], np.stack([k[first:], k[:pairs]], axis=1).ravel(), k[pairs:]])
    joined = np.zeros(len(kind), bool)
    joined[first + 1 : first + 2 * pairs : 2] = True
    return kind, microbatch, every, joined
