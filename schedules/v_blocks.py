"""Schedules of controllable memory: V-shaped building blocks, from a third of 1F1B's activations to all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.schedule import Schedule

from .v_reorder import FULL, SPLIT, repeat, tighten, to_schedule

__all__ = ["PERIOD", "half_block", "min_block", "v_1f1b", "v_half", "v_min", "v_zb", "with_weight_grads", "zb_block"]

Block = NDArray[np.int64]  # (kinds, devices) the slot in which each op of a microbatch starts

PERIOD = 6  # F, I and W of both chunks, one slot each


def v_min(devices: int, microbatches: int) -> Schedule:
    """Runs the V-shaped building block with the shortest life times: about a third of 1F1B's activations.

    ::

        device 0 | F . . . . f . . i w . . . I . . W      one microbatch, p = 3, F = I = W; the next comes 6 slots later;
        device 1 | . F . . f . . . . i . w I . W . .      upper case: stage r, lower case: stage 2p - 1 - r of device r
        device 2 | . . F f . . . . . . i I w W . . .

    The block: device r runs F of stage r in slot r and F of its other stage in 2p - 1 - r, their I in 4p - 1 + d - r and
    2p + d + r, with d = 2 where p is a multiple of 3, else 0. No two ops of a device meet modulo 6; each W is in a free slot
    soon after its I. The block is repeated, then warm-up and cool-down are reordered within the memory of the steady state.

    Peak: at most ⌊(p + 4)/3⌋ microbatches, twice as many chunk activations, whatever m. For F = I = W, p >= 3 and m >= p the longest span
    exceeds the busy time by 6p - 1 - 3k slots of a chunk, k the peak in chunk activations: 11 for p = 4, where 1F1B has 18.
    Where F, I and W differ, gaps come back in every period; ``v-half`` stands more. Any p, any m.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), V-Min.

    Args:
        devices: Devices p, two stages each.
        microbatches: Microbatches m.

    Examples:
        >>> print(v_min(2, 3))
        name: v-min
        device 0 | 0F0 0F1 3F0 3I0 0F2 3W0 3F1 0I0 3I1 0W0 3W1 0I1 3F2 3I2 0W1 3W2 0I2 0W2
        device 1 | 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2I1 1I1 2F2 2W1 1W1 2I2 1I2 2W2 1W2
    """
    return _split("v-min", min_block(devices), microbatches, 2 * ((devices + 4) // 3))


def v_half(devices: int, microbatches: int) -> Schedule:
    """Runs the V-shaped building block that holds half of 1F1B's activations, with about half of its bubble.

    ::

        device 0 | F . . . . . . f i w . . . . . . I W    one microbatch, p = 3, F = I = W; the next comes 6 slots later;
        device 1 | . . F . . . f . . . i . . w . I . W    upper case: stage r, lower case: stage 2p - 1 - r of device r
        device 2 | . . . . F f . . . . . . i w I W . .

    The block: device r runs F of stage r in slot 2r and F of its other stage in 3p - 2 - r, their I in 6p - 2 + d - r and
    3p - 1 + d + 2r, with d = 3 where p is even, else 0. No two ops of a device meet modulo 6; each W is in a free slot soon
    after its I. The block is repeated, then warm-up and cool-down are reordered within the memory of the steady state.

    Peak: at most ⌊(p + 2)/2⌋ microbatches, twice as many chunk activations, whatever m. For F = I = W, p >= 3 and m >= p the longest span
    exceeds the busy time by 6p - 1 - 3k slots of a chunk, k the peak in chunk activations: 5 for p = 4, where 1F1B has 18. The
    steady state needs no gap if W + 2I >= 2F and W + 2F >= 2I. Any p, any m.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), V-Half.

    Args:
        devices: Devices p, two stages each.
        microbatches: Microbatches m.

    Examples:
        >>> print(v_half(2, 3))
        name: v-half
        device 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
        device 1 | 1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    return _split("v-half", half_block(devices), microbatches, 2 * ((devices + 2) // 2))


def v_zb(devices: int, microbatches: int) -> Schedule:
    """Runs the V-shaped building block that holds as much as 1F1B and leaves no device idle between its first and last op.

    ::

        device 0 | F . . . . . . . . . . . . f i . w . . . . . . . . . . I . W      one microbatch, p = 3, F = I = W;
        device 1 | . . . . F . . . . . . f . . . . . . i . w . . . . I . W . .      the next comes 6 slots later
        device 2 | . . . . . . . . F f . . . . . . . . . . . . i I w W . . . .      upper case: stage r, lower: 2p - 1 - r

    The block: device r runs F of stage r in slot 4r and F of its other stage in 6p - 5 - 2r, their I in 12p - 9 - 2r and 6p - 4 + 4r,
    each W two slots after its I. Going down takes 4 slots a device and coming back 2, which are the same modulo 6 with
    opposite signs, so all devices repeat F f i I w W. Then warm-up and cool-down are reordered within the memory of the steady state.

    Peak: at most p microbatches, 2p chunk activations, whatever m. For F = I = W and m >= 2p - 1 no span holds a bubble, and the
    makespan is 6m + p - 1 slots of a chunk. The order of the same kind in the zero-bubble paper and in PyTorch is ``zb-v``.
    Any p, any m.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), V-ZB; these offsets are derived.

    Args:
        devices: Devices p, two stages each.
        microbatches: Microbatches m.

    Examples:
        >>> print(v_zb(2, 3))
        name: v-zb
        device 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
        device 1 | 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2
    """
    return _split("v-zb", zb_block(devices), microbatches, 2 * devices)


def v_1f1b(devices: int, microbatches: int) -> Schedule:
    """Runs 1F1B folded in a V, with full backwards: two thirds of 1F1B's activations.

    ::

        device 0 | F . . . . f . . . b - . . . . . . . . . . . . . . B -      one microbatch, p = 3, B = 2F;
        device 1 | . F . . f . . . . . . b - . . . . . . . B - . . . . .      the next comes 6 slots later
        device 2 | . . F f . . . . . . . . . . . . b - B - . . . . . . .      upper case: stage r, lower: 2p - 1 - r

    The block: device r runs F of stage r in slot r and F of its other stage in 2p - 1 - r. The four slots that they leave of 6 hold
    the two backwards, as two pairs. The backward of the other stage takes the first pair after its F, but the second pair on every
    third device (p - 3, p - 6, ...), which makes the way down and back shortest: from the end, devices repeat F f b B, f b F B, f F B b.
    Then warm-up and cool-down are reordered within the memory of the steady state.

    Peak: at most ⌊2p/3⌋ + 1 microbatches, twice as many chunk activations, whatever m. For B = 2F and m >= 2p the longest span exceeds
    the busy time by 5(p - 1) slots of a chunk for p = 4, 7, 10, 13, 16, and for other p <= 14 by at most 1F1B's 6(p - 1). Any p, any m.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), 1F1B-V; these offsets are derived.

    Args:
        devices: Devices p, two stages each.
        microbatches: Microbatches m.

    Examples:
        >>> print(v_1f1b(2, 3))
        name: v-1f1b
        device 0 | 0F0 0F1 0F2 3F0 3B0 3F1 3B1 0B0 3F2 3B2 0B1 0B2
        device 1 | 1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2B1 1B1 2B2 1B2
    """
    streams = repeat(_full_block(devices), PERIOD, microbatches)
    _, streams = tighten(streams, FULL, microbatches, 2 * (2 * devices // 3 + 1), (1, 1, 2, 2))
    return to_schedule(streams, FULL, microbatches, "v-1f1b")


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
    slot = np.arange(period).reshape(-1, *[1] * (block.ndim - 1))
    wait = (slot - block[2:4, None] - 1) % period  # (chunk 1 or 0, slot, ..., devices)
    wait[:, (slot == block[:, None] % period).any(axis=0)] = 2 * period
    together = wait[0][:, None] + wait[1][None]
    together[range(period), range(period)] = 4 * period  # not both in one slot
    chosen = together.reshape(period**2, *block.shape[1:]).argmin(axis=0)
    waits = [np.take_along_axis(wait[chunk], place[None], axis=0)[0] for chunk, place in enumerate(np.divmod(chosen, period))]
    return np.concatenate([block, block[2:4] + 1 + np.stack(waits)])


def _split(name: str, block: Block, microbatches: int, limit: int) -> Schedule:
    _, streams = tighten(repeat(block, PERIOD, microbatches), SPLIT, microbatches, limit, (1, 1, 1, 1, 1, 1))
    return to_schedule(streams, SPLIT, microbatches, name)
