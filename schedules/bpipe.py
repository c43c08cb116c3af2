"""BPipe: 1F1B whose first devices lend memory from the last."""

from __future__ import annotations

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
    streams = [_stream(stage, devices, microbatches, most) for stage in range(devices)]
    evictors = [device for device in range(devices // 2) if devices - device > most]
    offload_to = {device: None if host else devices - 1 - device for device in evictors}
    return Schedule.from_columns(streams, name="bpipe", offload_to=offload_to)


def _stream(stage: int, devices: int, microbatches: int, most: int) -> tuple[int, list[int], list[int]]:
    """1F1B on one stage with at most *most* activations on the device, as columns."""
    kinds, numbers = (column.tolist() for column in alternating(microbatches, min(devices - stage, microbatches)))
    kind: list[int] = []
    number: list[int] = []
    here, away = 0, set()
    for op, microbatch in zip(kinds, numbers, strict=True):
        back = op == Kind.B and microbatch in away
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
    return stage, kind, number
