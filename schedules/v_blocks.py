"""Schedules of controllable memory: V-shaped building blocks, from a third of 1F1B's activations to all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.schedule import Schedule

from .v_reorder import FULL, SPLIT, Ops, repeat, tighten, to_schedule

__all__ = ["PERIOD", "half_block", "min_block", "v_1f1b", "v_half", "v_min", "v_zb", "with_weight_grads", "zb_block"]

Block = NDArray[np.int64]  # (kinds, devices) the slot in which each op of a microbatch starts

PERIOD = 6  # F, I and W of both chunks, one slot each


def v_min(devices: int, microbatches: int) -> Schedule:
    """Runs the V-shaped block with the shortest life times: a third of 1F1B's activations, two thirds of its bubble.

    ::

        device 0 | F0 .  .  f0 i0 w0 I0 W0 F1 .  .  f1 i1 w1 I1 W1 ...
        device 1 | .  F0 f0 .  .  i0 I0 w0 W0 F1 f1 .  .  i1 I1 ...

        p = 2, one microbatch at a time; upper case: stage r, lower case: stage 2p - 1 - r; F = I = W here

    The block: F of stage r on device r in slot r, of its other stage in 2p - 1 - r, I in 2p + d + r and 4p - 1 + d - r, with
    d = 2 where p is a multiple of 3, else 0; each W in the first free slot after its I; a new microbatch every 6 slots. No two ops of a
    device meet. Then warm-up and cool-down are reordered within the memory of the steady state.

    Peak: at most ⌊(p + 4)/3⌋ microbatches, twice as many chunk activations, whatever m. For F = I = W, p >= 3 and m >= p the largest span
    exceeds the busy time by 6p - 1 - 3k, k the peak in chunk activations: 11 slots of a chunk for p = 4, where 1F1B has 18.
    Where F, I and W differ, gaps come back in every period; ``v-half`` stands more. Any p, any m.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), V-Min.

    Args:
        devices: Devices p, two stages each.
        microbatches: Microbatches m.
    """
    return _split(min_block(devices), microbatches, 2 * ((devices + 4) // 3), "v-min")


def v_half(devices: int, microbatches: int) -> Schedule:
    """Runs the V-shaped block that holds half of 1F1B's activations, with half of its bubble.

    ::

        device 0 | F0 F1 F2 f0 i0 w0 f1 I0 i1 W0 w1 f2 F3 I1 ...
        device 1 | .  F0 f0 F1 f1 i0 I0 w0 i1 I1 f2 ...

        p = 2; upper case: stage r, lower case: stage 2p - 1 - r; F = I = W here

    The block: F of stage r on device r in slot 2r, of its other stage in 3p - 2 - r, I in 3p - 1 + d + 2r and 6p - 2 + d - r, with
    d = 3 where p is even, else 0; each W in the first free slot after its I; a new microbatch every 6 slots. Then warm-up and
    cool-down are reordered within the memory of the steady state.

    Peak: at most ⌊(p + 2)/2⌋ microbatches, twice as many chunk activations, whatever m. For F = I = W, p >= 3 and m >= p the largest span
    exceeds the busy time by 6p - 1 - 3k, k the peak in chunk activations: 5 slots of a chunk for p = 4, where 1F1B has 18. The
    steady state has no bubble if W + 2I >= 2F and W + 2F >= 2I. Any p, any m.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), V-Half.

    Args:
        devices: Devices p, two stages each.
        microbatches: Microbatches m.
    """
    return _split(half_block(devices), microbatches, 2 * ((devices + 2) // 2), "v-half")


def v_zb(devices: int, microbatches: int) -> Schedule:
    """Runs the V-shaped block that holds as much as 1F1B and leaves no device idle between its first and last op.

    ::

        device 0 | F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 ...
        device 1 | .  F0 f0 F1 f1 i0 F2 I0 i1 ...

        p = 2; upper case: stage r, lower case: stage 2p - 1 - r; F = I = W here

    The block: F of stage r on device r in slot 4r, of its other stage in 6p - 5 - 2r, I in 6p - 4 + 4r and 12p - 9 - 2r, each W two
    slots after its I; a new microbatch every 6 slots. Every device runs them in the order F f i I w W. Then warm-up and cool-down
    are reordered within the memory of the steady state.

    Peak: at most p microbatches, 2p chunk activations, whatever m. For F = I = W and m >= 2p - 1 no span holds a bubble, and the
    makespan is 6m + p - 1. The paper's and PyTorch's own order of the same kind is ``zb-v``. Any p, any m.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), V-ZB. The offsets are derived: 4 slots
    going down and 2 coming back keep all ops of a device at the same distances modulo 6.

    Args:
        devices: Devices p, two stages each.
        microbatches: Microbatches m.
    """
    return _split(zb_block(devices), microbatches, 2 * devices, "v-zb")


def v_1f1b(devices: int, microbatches: int) -> Schedule:
    """Runs 1F1B folded in a V, with full backwards: two thirds of 1F1B's activations.

    ::

        steady state of device      p - 1, p - 4, ..   | F f bb BB
                                    p - 2, p - 5, ..   | f bb F BB
                                    p - 3, p - 6, ..   | f F BB bb

        upper case: stage r, lower case: stage 2p - 1 - r; B = 2F here

    The block: F of stage r on device r in slot r, of its other stage in 2p - 1 - r, so the two come 2 slots closer with every device.
    The four slots that are left of 6 hold the two backwards, which follow their inputs as closely as that allows: the first
    backward in the first free slots after its input, but in the second free ones on every third device from the end. Then
    warm-up and cool-down are reordered within the memory of the steady state.

    Peak: at most ⌊2p/3⌋ + 1 microbatches, twice as many chunk activations, whatever m. For B = 2F the bubble is not larger than 1F1B's,
    6(p - 1) slots of a chunk: 15 for p = 4. Any p, any m.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), 1F1B-V. The offsets are derived.

    Args:
        devices: Devices p, two stages each.
        microbatches: Microbatches m.
    """
    streams = repeat(_full_block(devices), PERIOD, microbatches)
    return _tightened(streams, FULL, microbatches, 2 * (2 * devices // 3 + 1), (1, 1, 2, 2), "v-1f1b")


def min_block(devices: int, period: int = PERIOD) -> Block:
    """V-Min's block for an even period: every op of a microbatch follows its input at once.

    Slots of one device are even for F of chunk 0 and I of chunk 1, odd for the others, or the other way round. Within each of
    these two pairs they differ by 2p + d, which must be no multiple of the period.
    """
    device = np.arange(devices)
    shift = 2 if 2 * devices % period == 0 else 0
    first = 2 * devices + shift
    return with_weight_grads(np.array([device, 2 * devices - 1 - device, first + device, first + 2 * devices - 1 - device]), period)


def half_block(devices: int) -> Block:
    """V-Half's block: 2 slots from device to device going down."""
    device = np.arange(devices)
    first = 3 * devices - 1 + (3 if devices % 2 == 0 else 0)
    return with_weight_grads(np.array([2 * device, 3 * devices - 2 - device, first + 2 * device, first + 3 * devices - 1 - device]))


def zb_block(devices: int) -> Block:
    """V-ZB's block: 4 slots from device to device going down, 2 coming back."""
    down, back = 4 * np.arange(devices), 2 * np.arange(devices)[::-1]
    turn = down[-1] + 1
    loss = turn + back[0] + 1
    return with_weight_grads(np.array([down, turn + back, loss + down, loss + turn + back]))


def _full_block(devices: int) -> Block:
    """1F1B-V's block; see :func:`v_1f1b`."""
    down = np.arange(devices)
    back = 2 * devices - 1 - down
    first, second = np.zeros((2, devices), np.int64)
    slot = int(back[0]) + 1
    for device in range(devices):
        taken = {int(down[device]) % PERIOD, int(back[device]) % PERIOD}
        free = [slot % PERIOD for slot in range(int(back[device]), int(back[device]) + PERIOD) if slot % PERIOD not in taken]
        # the four free slots as two pairs, in the order in which they follow F of chunk 1
        places = [free[0], free[2]]
        if (devices - 1 - device) % 3 == 2:
            places.reverse()
        first[device] = slot = slot + (places[0] - slot) % PERIOD
        second[device] = places[1]
        slot += 2
    for device in reversed(range(devices)):
        second[device] = slot = slot + (int(second[device]) - slot) % PERIOD
        slot += 2
    return np.array([down, back, first, second])


def with_weight_grads(block: Block, period: int = PERIOD) -> Block:
    """Adds the W of chunks 1 and 0, each in a free slot after its I, so that they wait least together.

    Args:
        block: (4, ..., devices) slots of F of chunks 0 and 1, I of chunks 1 and 0, different modulo the period.
        period: Slots from one microbatch to the next.

    Returns:
        (6, ..., devices) the same with the two W.
    """
    # how long W of chunk 1 and W of chunk 0 would wait for each slot of the period
    wait = (np.arange(period).reshape(-1, *[1] * (block.ndim - 1)) - block[2:4, None] - 1) % period
    taken = (np.arange(period).reshape(-1, *[1] * (block.ndim - 1)) == block[:, None] % period).any(axis=0)
    wait = np.where(taken, 2 * period, wait)
    both = wait[0][:, None] + wait[1][None]
    both[np.arange(period), np.arange(period)] = 4 * period  # the same slot
    best = both.reshape(period * period, *block.shape[1:]).argmin(axis=0)
    chosen = np.stack([np.take_along_axis(wait[chunk], slot[None], axis=0)[0] for chunk, slot in enumerate(np.divmod(best, period))])
    return np.concatenate([block, block[2:4] + 1 + chosen])


def _split(block: Block, microbatches: int, limit: int, name: str) -> Schedule:
    return _tightened(repeat(block, PERIOD, microbatches), SPLIT, microbatches, limit, (1, 1, 1, 1, 1, 1), name)


def _tightened(streams: list[list[int]], ops: Ops, microbatches: int, limit: int, durations: tuple[int, ...], name: str) -> Schedule:
    _, streams = tighten(streams, ops, microbatches, limit, durations)
    return to_schedule(streams, ops, microbatches, name)
