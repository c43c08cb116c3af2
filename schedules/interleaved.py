"""Interleaved 1F1B: several chunks per device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.errors import ScheduleError, require_count, require_size
from pipesim.op import Kind
from pipesim.schedule import Schedule

from .one_f_one_b import alternating

__all__ = ["interleaved_1f1b", "interleaved_1f1b_overlap", "interleaved_streams", "pytorch_group", "visits"]

Ints = NDArray[np.int64]


def interleaved_1f1b(
    devices: int,
    microbatches: int,
    *,
    chunks: int = 2,
    group_size: int | None = None,
    remainder: Literal["pytorch", "megatron"] = "pytorch",
    warmup: Sequence[int] | None = None,
    overlap_expert_comm: bool = False,
    forward_only: bool = False,
) -> Schedule:
    """Runs 1F1B over several chunks per device, which divides the bubble by their number; chunk c of device r is stage c·p + r.

    ::

        device 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3      p = 2, v = 2, m = 4
        device 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .        F = B

    The microbatches go in groups of g. Forwards walk chunk 0 of a group, chunk 1, ..., then the next group; backwards the same
    with the chunks reversed. Device r starts with min(m·v, 2(p - 1 - r) + (v - 1)·g) forwards, then one forward, one backward
    in turn, then drains. With one chunk this is ``1f1b``, whose warm-up is p - 1 - r: twice that would only hold more.

    With F and B the times of a chunk and p ≤ g: makespan (m·v + p - 1)·(F + B), so bubble (p - 1)·(F + B), 1/v of that of 1F1B;
    peak min(m·v, 2(p - 1 - r) + (v - 1)·g + 1) chunk activations on device r, p·(1 + (p - 1)/(p·v)) microbatches on device 0 at
    g = p; v times the messages of 1F1B.

    Sources: Narayanan et al. 2021 (Megatron-LM), section 2.2; Megatron-LM's schedule table; PyTorch's ScheduleInterleaved1F1B.

    Args:
        devices: Devices p.
        microbatches: Microbatches m. Which are legal is up to *remainder*.
        chunks: Chunks v per device.
        group_size: Microbatches g per group, Megatron's microbatch_group_size_per_vp_stage. It must be p ≤ g ≤ m, and m mod g
            0 (else the last group is smaller) or at least p. None: up to *remainder*.
        remainder: What to do where m is no multiple of p. ``pytorch``: m // p groups of equal size (one if m < p), which
            must divide m. ``megatron``: g = p, and the rule of *group_size*, so m < p is refused and so is p = 4, m = 10.
        warmup: Forwards before the first pair of a forward and a backward, per device, instead of the formula: not
            increasing from device to device, at least (v - 1)·g, at most m·v, and on device 0 at most two groups more than
            on the last device. Anything else can deadlock.
        overlap_expert_comm: One forward more in the warm-up, as Megatron has it to overlap the communication of experts.
        forward_only: Leave the backwards out, for an inference run.

    Raises:
        ScheduleError: m does not fit, or an option is wrong; the text says what is legal.
    """
    chunks = require_count("chunks", chunks)
    require_size(devices, microbatches, chunks)
    if remainder not in ("pytorch", "megatron"):
        raise ScheduleError(f"remainder must be 'pytorch' or 'megatron', got {remainder!r}")
    if chunks == 1:
        size = microbatches  # one walk through all of them, whatever the groups
    elif group_size is not None or remainder == "megatron":
        size = _megatron_group(devices, microbatches, group_size)
    else:
        size = pytorch_group(devices, microbatches)
    if warmup is not None:
        counts = _checked_warmup(warmup, devices, microbatches, chunks, size)
    else:
        counts = [(devices - 1 - r) * min(2, chunks) + (chunks - 1) * size for r in range(devices)]
    counts = [count + overlap_expert_comm for count in counts]
    streams = interleaved_streams(devices, microbatches, chunks, size, counts, forward_only)
    return Schedule.from_columns(streams, name="interleaved-1f1b")


def interleaved_1f1b_overlap(devices: int, microbatches: int, *, chunks: int = 2, group_size: int | None = None) -> Schedule:
    """Runs interleaved 1F1B with one forward more in the warm-up, as Megatron has it to overlap the communication of experts.

    The same as ``interleaved-1f1b`` with *overlap_expert_comm*; see there.

    Args:
        devices: Devices p.
        microbatches: Microbatches m.
        chunks: Chunks v per device.
        group_size: Microbatches per group.

    Raises:
        ScheduleError: m does not fit.
    """
    return interleaved_1f1b(devices, microbatches, chunks=chunks, group_size=group_size, overlap_expert_comm=True)


def interleaved_streams(
    devices: int, microbatches: int, chunks: int, group_size: int, warmup: Sequence[int], forward_only: bool = False
) -> list[tuple[ArrayLike, ...]]:
    """Columns (stage, kind, microbatch) per device of: *warmup* forwards, then F, B, F, B, ..., then the other backwards."""
    chunk, microbatch = visits(microbatches, chunks, group_size)
    if forward_only:
        return [(chunk * devices + r, int(Kind.F), microbatch) for r in range(devices)]
    chunk = np.stack([chunk, chunks - 1 - chunk])  # of forwards, of backwards
    streams: list[tuple[ArrayLike, ...]] = []
    for r in range(devices):
        kind, visit = alternating(microbatches * chunks, min(warmup[r] + 1, microbatches * chunks))
        streams.append((chunk[(kind == Kind.B).astype(np.int8), visit] * devices + r, kind, microbatch[visit]))
    return streams


def visits(microbatches: int, chunks: int, group_size: int) -> tuple[Ints, Ints]:
    """(chunk, microbatch) of every forward of a device, in order: per group, chunk by chunk, its microbatches.

    The last group takes what is left. A backward has the same microbatch, and chunk v - 1 - c.
    """
    microbatch = np.tile(np.arange(microbatches), (chunks, 1))
    chunk = np.repeat(np.arange(chunks), microbatches).reshape(chunks, microbatches)
    order = np.lexsort((microbatch.ravel(), chunk.ravel(), microbatch.ravel() // group_size))
    return chunk.ravel()[order], microbatch.ravel()[order]


def pytorch_group(devices: int, microbatches: int) -> int:
    """PyTorch's group size: max(1, m // p) groups of equal size."""
    groups = max(1, microbatches // devices)
    if microbatches % groups:
        legal = [m for m in range(devices, microbatches + devices + 1) if m % (m // devices) == 0]
        near = [max(m for m in legal if m < microbatches), min(m for m in legal if m > microbatches)]
        raise ScheduleError(
            f"{microbatches} microbatches on {devices} devices make {microbatches} // {devices} = {groups} groups, which must be equal; "
            f"the nearest legal numbers are {near[0]} and {near[1]} (or give a group size, or remainder='megatron')"
        )
    return microbatches // groups


def _megatron_group(devices: int, microbatches: int, group_size: int | None) -> int:
    """Megatron's rule: groups of p or more, the last one too."""
    size = devices if group_size is None else require_count("group_size", group_size)
    if not devices <= size <= microbatches or 0 < microbatches % size < devices:
        raise ScheduleError(
            f"groups of {size} of {microbatches} microbatches on {devices} devices leave {microbatches % size}; "
            f"Megatron's rule wants p <= group size <= m, and as the rest none or at least p = {devices}"
        )
    return size


def _checked_warmup(warmup: Sequence[int], devices: int, microbatches: int, chunks: int, group_size: int) -> list[int]:
    """Refuses what can deadlock.

    With fewer than (v - 1)·g, a backward stands before its own forward. Where the next device has more, each of the two waits for
    the other. A forward of the next chunk follows, by way of the last device, a backward that follows, by way of device 0,
    a forward w_0 - w_{p-1} - 2n - 1 places later, n microbatches in a group: that must not be itself or a later one.
    """
    counts = [require_count("warmup", count, 0) for count in warmup]
    least, most = (chunks - 1) * group_size, microbatches * chunks
    if len(counts) != devices or sorted(counts, reverse=True) != counts or not least <= counts[-1] <= counts[0] <= most:
        raise ScheduleError(f"warmup must be {devices} numbers, none larger than the one before it, from {least} to {most}, got {counts}")
    ahead = 2 * (microbatches % group_size or group_size)
    if min(counts[0], most - 1) > counts[-1] + ahead:
        raise ScheduleError(f"warmup {counts} can deadlock: device 0 may start at most {ahead} forwards more than device {devices - 1}")
    return counts
