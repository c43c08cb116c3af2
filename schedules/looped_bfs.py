"""Breadth-first pipeline parallelism: all microbatches of a chunk, then the next chunk."""

from __future__ import annotations

from typing import Literal

import numpy as np

from pipesim.errors import ScheduleError, require_count, require_size
from pipesim.op import Kind
from pipesim.schedule import Schedule

__all__ = ["looped_bfs"]


def looped_bfs(
    devices: int, microbatches: int, *, chunks: int = 2, order: Literal["forward", "reversed"] = "forward", forward_only: bool = False
) -> Schedule:
    """Runs GPipe over several chunks per device: chunk by chunk, all microbatches; chunk c of device r is stage c·p + r.

    ::

        device 0 | 0F0 0F1 2F0 2F1 .   .   2B0 2B1 0B0 0B1      p = 2, v = 2, m = 2
        device 1 | .   1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 .        F = B

    Each device gathers a chunk's weights and reduces its gradients once a step, which suits fully sharded data parallelism.

    With F and B the times of a chunk: makespan ((v - 1)·max(m, p) + m + p - 1)·(F + B), which for m ≥ p is m·v + p - 1 times F + B,
    the bubble of ``interleaved-1f1b``; peak m·v chunk activations on every device. Any p, any m.

    Source: Lamy-Poirier 2023 (Breadth-First Pipeline Parallelism). The author's code (Fast-LLM) runs the backwards of a chunk in
    the forwards' order, PyTorch's ScheduleLoopedBFS reversed; makespan and peak are the same.

    Args:
        devices: Devices p.
        microbatches: Microbatches m.
        chunks: Chunks v per device.
        order: Order of a chunk's backwards: ``forward`` 0..m-1, or ``reversed`` m-1..0.
        forward_only: Leave the backwards out, for an inference run.

    Raises:
        ScheduleError: The order is neither, or the chunks are no number of at least 1.
    """
    chunks = require_count("chunks", chunks)
    require_size(devices, microbatches, chunks)
    if order not in ("forward", "reversed"):
        raise ScheduleError(f"order must be 'forward' or 'reversed', got {order!r}")
    chunk = np.repeat(np.arange(chunks), microbatches)
    microbatch = np.tile(np.arange(microbatches), chunks)
    kind = np.full(len(chunk), Kind.F)
    if not forward_only:
        again = np.tile(np.arange(microbatches)[:: 1 if order == "forward" else -1], chunks)
        chunk, microbatch = np.concatenate([chunk, chunk[::-1]]), np.concatenate([microbatch, again])
        kind = np.repeat([Kind.F, Kind.B], len(kind))
    return Schedule.from_columns([(chunk * devices + r, kind, microbatch) for r in range(devices)], name="looped-bfs")
