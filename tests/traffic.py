"""Runs with traffic, put together by hand: their times are those that a test says, whatever an engine would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipesim import Kind, Timeline, UniformCosts, generate, simulate
from pipesim.traffic import Traffic

# (kind, device, stage, microbatch, peer, message, start, end)
Transfer = tuple[Kind, int, int, int, int, int, float, float]


def with_traffic(run: Timeline, ops: Sequence[Transfer], *, size: float = 0.0, rows: Sequence[int] | None = None, **changes: Any) -> Timeline:
    """The run with this traffic in its one step."""
    kind, device, stage, microbatch, peer, message, start, end = zip(*ops, strict=True)
    traffic = Traffic(
        run.schedule,
        np.array(kind, np.int8),
        *(np.array(column, np.int32) for column in (device, stage, microbatch, peer)),
        np.where(np.array(peer) < 0, 0.0, size),
        np.full(len(ops), -1) if rows is None else np.array(rows),
        np.array(message, np.int64),
    )
    return replace(run, traffic=traffic, traffic_start=np.array([start], float), traffic_end=np.array([end], float), **changes)


def reduced(time: float, optimizer: float = 0.0, barrier: bool = True) -> Timeline:
    """Case D01: 1F1B with p=4, m=8, F=1, B=2; a reduction on each device right after its last backward, which ends at 33 - 2d."""
    run = simulate(generate("1f1b", 4, 8), UniformCosts(forward=1, backward=2), barrier=barrier)
    last = [33.0, 31.0, 29.0, 27.0]
    return with_traffic(run, [(Kind.REDUCE_GRAD, d, d, -1, -1, -1, end, end + time) for d, end in enumerate(last)])
