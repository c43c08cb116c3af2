"""DualPipe: two directions at once, forwards and backwards in one slot, weight gradients where there is room."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ScheduleError
from pipesim.op import Kind
from pipesim.schedule import Schedule

__all__ = ["dualpipe", "folded_stream"]


def dualpipe(devices: int, microbatches: int) -> Schedule:
    """Feeds the pipeline from both ends, and overlaps a forward of one direction with a backward of the other.

    ::

        device 0 | F0 F1 F2 F4 I4 W4 F5 F3&B5    .  F6&B0    B6    .  F7&B1    B7    I2 W2 I3 W3
        device 1 | .  F0 F4 F1 F5 F2 B4    F6&B0    F3&B5    F7&B1    B6    B2    .  I7 I3 W7 W3
        device 2 | .  F4 F0 F5 F1 F6 B0    F2&B4    F7&B1    F3&B5    B2    B6    .  I3 I7 W3 W7
        device 3 | F4 F5 F6 F0 I0 W0 F1 F7&B1    .  F2&B4    B2    .  F3&B5    B3    I6 W6 I7 W7

        microbatches 0..m/2 - 1: stage s on device s; m/2..m - 1: stage s on device p - 1 - s; F = I = W here

    Device r and its mirror p - 1 - r run the same stream with the directions exchanged. With q = min(r, p - 1 - r), h = p/2,
    n = m/2, "0" the direction whose first stage is nearer and "1" the other one:

    1. F0, 2(h - q - 1) times
    2. F0 F1, q + 1 times
    3. I1 W1 F1, h - q - 1 times
    4. (F0 B1) (F1 B0), n - p + q + 1 times, each bracket a pair that shares a slot; the very first one of the two middle
       devices is no pair, because its B1 needs what its F1 has just made
    5. B1 (F1 B0), h - q - 1 times
    6. B1 B0, q + 1 times, of which the last q + 1 ops are only I
    7. W I0, h - q - 1 times
    8. W, q + 1 times; weight gradients go in the order of their I

    With equal stages, F = I >= W and FB the time of a pair: the two middle devices idle (p/2 - 1)·(FB + B - 3W), B = I + W, so the
    makespan is m·(F + B) - (m - p - 1)·(F + B - FB) more than that. For I > F the formula is an upper value: F = 2, I = 3, W = 1,
    FB = 6, p = 8 idles 19, not 21. Peak p + 1 stage activations on every device, whatever the durations. Each device holds two
    stages, so there are two copies of the weights; a stage is 1/p of the model, so the papers' M_a is ``peak_activations``
    here, not ``peak_activation_share``, which divides by the two.

    Legal sizes: p even, m even, m >= 2p.

    Source: DeepSeek-AI 2024 (DeepSeek-V3), section 3.2.1, and the DualPipe repository, whose op order this is.

    Args:
        devices: Devices p.
        microbatches: Microbatches m, one half in each direction.

    Raises:
        ScheduleError: p or m is odd, or m < 2p.

    Examples:
        >>> print(*dualpipe(2, 4).streams[0])
        0F0 1F2 0F1 1B2 (1F3;0B0)OVERLAP_F_B 1B3 0I1 0W1
    """
    if devices % 2 or microbatches % 2 or microbatches < 2 * devices:
        raise ScheduleError(
            f"dualpipe wants an even number of devices, and an even number of microbatches of at least twice as many; "
            f"got {devices} devices and {microbatches} microbatches"
        )
    per_direction = microbatches // 2
    streams = []
    for device in range(devices):
        mirror = devices - 1 - device
        near = min(device, mirror)
        far_direction, kind, number, joined = folded_stream(near, devices // 2, per_direction)
        stage = np.where(far_direction, devices - 1 - near, near)
        upwards = far_direction == (device < mirror)
        streams.append((stage, kind, number + per_direction * upwards, joined))
    return Schedule.from_columns(streams, name="dualpipe")


def folded_stream(rank: int, ranks: int, microbatches: int) -> tuple[NDArray[np.bool_], NDArray[np.int8], NDArray[np.int64], NDArray[np.bool_]]:
    """The stream of one device of a pipeline that is folded in the middle, from the eight phases above.

    Args:
        rank: Distance of the device from the ends, 0..ranks - 1; *ranks* - 1 is next to the fold.
        ranks: Half the number of stages: the h above.
        microbatches: Per direction: the n above.

    Returns:
        Columns (far, kind, microbatch, joined): *far* is True for the direction "1", the microbatch counts per direction.
    """
    outer, inner, overlapped = ranks - rank - 1, rank + 1, microbatches - 2 * ranks + rank + 1
    f, b, i, w = Kind.F, Kind.B, Kind.I, Kind.W
    # (how often, (direction, kind, joined) ...); a W takes the direction and microbatch of its I below
    phases: list[tuple[int, list[tuple[int, Kind, bool]]]] = [
        (2 * outer, [(0, f, False)]),
        (inner, [(0, f, False), (1, f, False)]),
        (outer, [(1, i, False), (1, w, False), (1, f, False)]),
        (overlapped, [(0, f, False), (1, b, True), (1, f, False), (0, b, True)]),
        (outer, [(1, b, False), (1, f, False), (0, b, True)]),
        (inner, [(1, b, False), (0, b, False)]),
        (outer, [(0, w, False), (0, i, False)]),
        (inner, [(0, w, False)]),
    ]
    blocks = [np.tile(np.array(ops, dtype=np.int64), (times, 1)) for times, ops in phases]
    if outer == 0:
        blocks[3][1, 2] = False
    blocks[5][inner:, 1] = i
    direction, kind, joined = np.concatenate(blocks).T
    number = np.zeros(len(kind), np.int64)
    for kinds in ((f,), (b, i)):
        for way in (0, 1):
            own = np.flatnonzero(np.isin(kind, kinds) & (direction == way))
            number[own] = np.arange(len(own))
    weight, half = np.flatnonzero(kind == w), np.flatnonzero(kind == i)
    direction[weight], number[weight] = direction[half], number[half]
    return direction == 1, kind.astype(np.int8), number, joined == 1
