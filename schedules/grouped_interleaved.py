"""Grouped interleaved 1F1B: groups smaller than the pipeline, for less activation memory."""

from __future__ import annotations

from pipesim.errors import ScheduleError, require_count, require_size
from pipesim.schedule import Schedule

from .interleaved import interleaved_streams

__all__ = ["grouped_interleaved"]


def grouped_interleaved(devices: int, microbatches: int, *, chunks: int = 2, group_size: int | None = None) -> Schedule:
    """Runs interleaved 1F1B in groups of g < p microbatches with the shortest warm-up: less memory for some bubble.

    ::

        device 0 | 0F0 .   2F0 0F1 .   2B0 2F1 0B0 0F2 2B1 2F2 0B1 0F3 2B2 2F3 0B2 .   2B3 .   0B3      p = 2, v = 2, g = 1
        device 1 | .   1F0 .   3F0 3B0 1F1 1B0 3F1 3B1 1F2 1B1 3F2 3B2 1F3 1B2 3F3 3B3 .   1B3 .        F = B

    The order is that of ``interleaved-1f1b``, with a warm-up of p - 1 - r + (v - 1)·g forwards on device r (at most m·v), half
    as steep as Megatron's. Why g can be smaller than p: a forward needs p hops from one chunk of a device to the next and has
    g periods of F + B for them, so p·F ≤ g·(F + B), and p·B ≤ g·(F + B) for the backward. So g ≥ p/2 for F = B, and g ≥ 2p/3 for
    B = 2F. Smaller groups are legal down to p/2, and stall once a group.

    With F and B the times of a chunk, g·(F + B) ≥ p·max(F, B), and m a multiple of g: bubble (p - 1)·(F + B) + (v - 1)·(p - g)·(F + B);
    peak min(m·v, p - r + (v - 1)·g) chunk activations on device r: with v = 2 and g = p/2, 3/4 of 1F1B's memory on device 0,
    and towards 1/2 with more chunks. Hops are not hidden: each costs time in every period.

    Source: Wan et al. 2025 (PipeOffload) for the idea and the range ⌈p/2⌉..p of g. The order and the formulas above are
    derived here from those two figures, not read from the paper's code: a schedule of that name elsewhere may order a
    drain differently.

    Args:
        devices: Devices p.
        microbatches: Microbatches m, a multiple of g, or fewer than g (then they are one group).
        chunks: Chunks v per device.
        group_size: Microbatches g per group, ⌈p/2⌉..p; None for ⌈p/2⌉.

    Raises:
        ScheduleError: An option is out of its range, or m is no multiple of g.
    """
    chunks = require_count("chunks", chunks)
    require_size(devices, microbatches, chunks)
    least = (devices + 1) // 2
    size = least if group_size is None else require_count("group_size", group_size)
    if not least <= size <= devices:
        raise ScheduleError(f"group_size must be {least}..{devices} (half the devices, rounded up, to all of them), got {size}")
    if microbatches > size and microbatches % size:
        raise ScheduleError(f"{microbatches} microbatches make no whole groups of {size}; right is a multiple of {size}, or fewer than that")
    size = min(size, microbatches)
    warmup = [devices - 1 - r + (chunks - 1) * size for r in range(devices)]
    return Schedule.from_columns(interleaved_streams(devices, microbatches, chunks, size, warmup), name="grouped-interleaved")
