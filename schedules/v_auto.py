"""The best V-shaped building block for a memory limit, down to the frontier of memory against bubble."""

from __future__ import annotations

import math
from itertools import permutations, product

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ScheduleError, require_count
from pipesim.schedule import Schedule

from .v_blocks import PERIOD, half_block, min_block, with_weight_grads, zb_block
from .v_reorder import SPLIT, Streams, cost_of, repeat, tighten, to_schedule

__all__ = ["v_auto"]

Blocks = NDArray[np.int64]  # (kinds, blocks, devices)

_UNIT = (1.0,) * len(SPLIT.kinds)
_STEPS = range(1, PERIOD)  # slots from device to device; PERIOD more is the same modulo PERIOD, and only longer
_SWITCHES = 8  # places tried for the switch between two steps
_SHORTLIST = 24  # blocks to work out on a sample of the microbatches
_FINALISTS = 3  # of these, to work out in full


def v_auto(
    devices: int,
    microbatches: int,
    *,
    memory_limit: int | None = None,
    forward: float = 1.0,
    input_grad: float = 1.0,
    weight_grad: float = 1.0,
) -> Schedule:
    """Searches for the V-shaped building block with the shortest span of a device, within a limit of chunk activations.

    ::

        memory_limit       4   5   6   7   8       p = 4, m >= 8, F = I = W = 1 per chunk:
        bubble in a span  11   8   5   3   0       1F1B holds 8 and has 18

    The family: going down the devices, F of chunk 0 advances by 1..5 slots from device to device, and I of chunk 1 too, by one
    number up to some device and another one after it; coming back, F of chunk 1 and I of chunk 0 follow at once. Where the pipeline
    turns, they wait for a free slot modulo 6. Both W fill what is left. Blocks in which two ops of a device meet modulo 6 are
    out. Those whose steady state comes closest to the limit are repeated and reordered as in ``v-half``, first roughly, the
    best of them to the end, with the durations given; the least (longest span, makespan) is returned. V-Min, V-Half and
    V-ZB are always among those worked out, where they keep the limit.

    With F = I = W and m >= 2p the bubble in the longest span, in slots of a chunk, is
    3p - 1 - 3k + max(3p, p - 1 + 2(1 + ⌊(k + 1)/2⌋)) for a limit of k chunk activations from V-Min's 2⌊(p + 4)/3⌋ to 2p, where it is 0 (for
    8 < p <= 12 at some k one slot more). Below that range the microbatches come further apart, and every one of them costs
    more; the least is 2, one microbatch at a time.

    Legal sizes: any p, any m, a limit of at least 2. The search takes about a second for p = 8, and grows with p².

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), for building blocks and the steps from
    one to a schedule. The frontier's formula is the one that the authors' code (zero-bubble's v_auto_schedule.py) expects.

    Args:
        devices: Devices p, two stages each.
        microbatches: Microbatches m.
        memory_limit: Chunk activations that a device may hold, released when W ends. None for 2p: as much as 1F1B.
        forward: Time of F of a chunk.
        input_grad: Time of I of a chunk.
        weight_grad: Time of W of a chunk.

    Raises:
        ScheduleError: The limit is below 2, or a time is no finite number of at least 0.

    Examples:
        >>> print(v_auto(2, 2, memory_limit=3))
        name: v-auto
        device 0 | 0F0 0F1 3F0 3I0 3W0 0I0 0W0 3F1 3I1 3W1 0I1 0W1
        device 1 | 1F0 2F0 1F1 2I0 1I0 2W0 2F1 1W0 2I1 1I1 2W1 1W1
    """
    limit = 2 * devices if memory_limit is None else require_count("memory_limit", memory_limit, minimum=2)
    times = [_time("forward", forward), _time("input_grad", input_grad), _time("weight_grad", weight_grad)]
    durations = [times[kind] for kind in (0, 0, 1, 1, 2, 2)]
    ideal = sum(durations) * microbatches
    named = _within(np.stack([min_block(devices), half_block(devices), zb_block(devices)], axis=1), limit, PERIOD)
    found = [_worked_out(block, PERIOD, microbatches, limit, durations) for block in _each(named)]
    if not any(cost[0] <= ideal * (1 + 1e-12) for cost, _ in found):  # else nothing can be better
        blocks, period = _shortlisted(devices, limit, microbatches, durations)
        found += [_worked_out(block, period, microbatches, limit, durations) for block in blocks]
    best = min(found, key=lambda found: found[0])
    return to_schedule(best[1], SPLIT, microbatches, "v-auto")


def _time(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not (math.isfinite(value) and value >= 0):
        raise ScheduleError(f"{name} must be a finite time of at least 0, got {value!r}")
    return float(value)


def _worked_out(block: NDArray[np.int64], period: int, microbatches: int, limit: int, durations: list[float]) -> tuple[tuple[float, float], Streams]:
    """The block as streams, with the better of two orders: made for these durations, or for equal ones."""
    streams = repeat(block, period, microbatches)
    best = tighten(streams, SPLIT, microbatches, limit, durations)
    if len(set(durations)) > 1:
        _, even = tighten(streams, SPLIT, microbatches, limit, _UNIT)
        best = min(best, (cost_of(even, SPLIT, microbatches, durations), even), key=lambda found: found[0])
    return best


def _shortlisted(devices: int, limit: int, microbatches: int, durations: list[float]) -> tuple[list[NDArray[np.int64]], int]:
    """The most promising blocks, and their period: by one pass on a sample of the microbatches, then by all passes."""
    blocks, period = _candidates(devices, limit)
    sample = min(microbatches, devices + 4)
    rough = [tighten(repeat(block, period, sample), SPLIT, sample, limit, durations, passes=1)[0] for block in _each(blocks)]
    blocks = blocks[:, sorted(range(len(rough)), key=rough.__getitem__)[:_SHORTLIST]]
    worked = [tighten(repeat(block, period, sample), SPLIT, sample, limit, durations)[0] for block in _each(blocks)]
    return _each(blocks[:, sorted(range(len(worked)), key=worked.__getitem__)[:_FINALISTS]]), period


def _candidates(devices: int, limit: int) -> tuple[Blocks, int]:
    """Blocks that come close to the limit, and their period.

    If no block of the family keeps it, V-Min's block with the shortest longer period that does. A period of 4p + 6 slots
    leaves one microbatch at a time, which holds 2.
    """
    blocks = _within(_family(devices), limit, PERIOD)
    period = PERIOD
    while not blocks.shape[1]:
        period += 2
        blocks = _within(min_block(devices, period)[:, None], limit, period)
    peaks = _peaks(blocks, period)
    return blocks[:, peaks >= np.unique(peaks)[-2:][0]], period


def _family(devices: int) -> Blocks:
    """All blocks of the family of :func:`v_auto`, whatever they hold."""
    device = np.arange(devices)
    gap = np.arange(devices - 1)
    switches = np.unique(np.linspace(1, devices - 1, _SWITCHES).round().astype(int)) if devices > 1 else [0]
    going = {tuple(np.where(gap < switch, one, other)) for one, other, switch in product(_STEPS, _STEPS, switches)}
    down = device * np.array(_STEPS)[:, None]
    down_again = np.array([[0, *np.cumsum(steps)] for steps in sorted(going)])
    down, down_again = np.repeat(down, len(down_again), axis=0)[:, None], np.tile(down_again, (len(down), 1))[:, None]
    # slots modulo the period, on device 0, of F of chunk 1, I of chunk 1, I of chunk 0; F of chunk 0 is in slot 0
    turn, loss, turn_again = np.array(list(permutations(_STEPS, 3)))[None, :, :, None].transpose(2, 0, 1, 3)
    back = _at(down[..., -1:] + devices, turn) - device
    forth = _at(back[..., :1] + 1, loss) + down_again
    back_again = _at(forth[..., -1:] + devices, turn_again) - device
    blocks = np.stack(np.broadcast_arrays(down, back, forth, back_again)).reshape(4, -1, devices)
    residues = np.sort(blocks % PERIOD, axis=0)
    return with_weight_grads(blocks[:, (np.diff(residues, axis=0) > 0).all(axis=(0, 2))])


def _at(earliest: NDArray[np.int64], residue: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first slot from *earliest* on that is *residue* modulo the period."""
    wait: NDArray[np.int64] = (residue - earliest) % PERIOD
    return earliest + wait


def _each(blocks: Blocks) -> list[NDArray[np.int64]]:
    return [blocks[:, number] for number in range(blocks.shape[1])]


def _within(blocks: Blocks, limit: int, period: int) -> Blocks:
    return blocks[:, _peaks(blocks, period) <= limit]


def _peaks(blocks: Blocks, period: int) -> NDArray[np.int64]:
    """(blocks,) the most chunk activations that a device holds in the steady state."""
    slot = np.arange(period).reshape(-1, 1, 1)
    held: NDArray[np.int64] = np.zeros((period, *blocks.shape[1:]), np.int64)
    for chunk in (0, 1):  # as many as have started F up to this slot, without those that have ended W before it
        held += (slot - blocks[chunk]) // period - (slot - blocks[5 - chunk] - 1) // period
    return np.asarray(held.max(axis=(0, 2)))
