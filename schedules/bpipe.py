"""BPipe: 1F1B whose first devices lend memory from the last."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipesim.op import Kind
from pipesim.schedule import Schedule

from .one_f_one_b import alternating

__all__ = ["bpipe"]


def bpipe(devices: int, microbatches: int, *, host: bool = False) -> Schedule:
    """Runs 1F1B and moves activations from the first devices, which hold most, to the last, which hold least.

    ::

        device 0 | F0 F1 F2 >2 F3 .  .  B0 F4 B1 F5 >5 <2 B2 F6 ...      p = 4, at most 3 activations
        device 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 ...                  >2 offloads F2's, <2 brings it back

    Device x < p/2 (the evictor) pairs with p - 1 - x (the acceptor). 1F1B keeps (p - x) + (x + 1) = p + 1 activations in such
    a pair, so ⌈(p + 2)/2⌉ on each are enough. When an evictor holds that many and the next op needs one more place,
    it sends away the newest activation, right after its forward: the one that is needed last. An activation goes out
    and comes back at most once, right before its backward, which waits for it.

    With free links: 1F1B's timing, makespan (m + p - 1)·(F + B), and a peak of min(p - x, ⌈(p + 2)/2⌉) on device x < p/2 and no more
    than ⌈(p + 2)/2⌉ on the others. Slow links cost time and, while an activation is on its way, memory on both sides;
    put the pairs of devices on one node. Any p, any m; up to p = 3 nothing moves.

    Source: Kim et al. 2023 (BPipe); what moves when is derived from the bound. The gains vanish with flash attention (arXiv 2401.02088).

    Args:
        devices: Devices p, one stage each.
        microbatches: Microbatches m.
        host: Offload to the host's memory and not to a partner.
    """
    most = -(-(devices + 2) // 2)
    evictors = [device for device in range(devices // 2) if devices - device > most]
    plain = [(stage, *alternating(microbatches, min(devices - stage, microbatches))) for stage in range(devices)]
    streams = [_limited(*columns, most) if columns[0] in evictors else columns for columns in plain]
    offload_to = {device: None if host else devices - 1 - device for device in evictors}
    return Schedule.from_columns(streams, name="bpipe", offload_to=offload_to)


def _limited(stage: int, kinds: NDArray[np.int8], microbatches: NDArray[np.int32], most: int) -> tuple[int, NDArray[np.int8], NDArray[np.int32]]:
    """The columns with what must move so that no more than *most* activations are on the device."""
    kind: list[int] = []
    number: list[int] = []
    here, away = 0, set()
    for op, microbatch in zip(kinds.tolist(), microbatches.tolist(), strict=True):
        back = microbatch in away  # its backward: a forward is nowhere yet
        if here == most and (op == Kind.F or back):
            # the op before is a forward: after a backward there is room
            away.add(number[-1])
            kind.append(Kind.OFFLOAD)
            number.append(number[-1])
            here -= 1
        if back:
            away.remove(microbatch)
            kind.append(Kind.RELOAD)
            number.append(microbatch)
            here += 1
        kind.append(op)
        number.append(microbatch)
        here += 1 if op == Kind.F else -1
    return stage, np.array(kind, np.int8), np.array(number, np.int32)
