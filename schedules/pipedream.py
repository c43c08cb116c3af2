"""PipeDream: asynchronous 1F1B with weight stashing and replicated stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ScheduleError, require_count
from pipesim.op import Kind
from pipesim.schedule import Schedule

from .one_f_one_b import alternating

__all__ = ["pipedream", "with_updates"]


def pipedream(devices: int, microbatches: int, *, replicas: Sequence[int] | None = None, vertical_sync: bool = False) -> Schedule:
    """Runs 1F1B for ever, without a flush; every stage keeps one weight version per microbatch in flight.

    ::

        device 0 | F0 F1 .  B0 U0 F2 B1 U1 F3 B2 U2 ...      U, the update, takes no time here
        device 1 | .  F0 B0 U0 F1 B1 U1 F2 B2 U2 ...

    The paper's minibatch is our microbatch. A stage with r replicas (1F1B-RR) takes microbatches round robin, b on its
    replica b mod r, forward and backward alike; its replicas average their gradients, so it updates once per r
    microbatches. A rank starts with K = (R - 1 - r_0 - ... - r_{s-1}) // r_s forwards more than 1F1B needs, of R ranks, and
    then holds K + 1 microbatches and K + 1 weight versions: p - s on stage s of a straight pipeline.

    With vertical sync every stage uses, for one microbatch, the version that its first stage had. All delays are then
    p - 1 updates, and every stage of a straight pipeline holds p versions. The public runtime does not do it.

    The bubble is only the fill and the drain: makespan (m + p - 1)·(F + B) for equal straight stages. Any p, any m.

    Source: Narayanan et al. 2019 (PipeDream), section 3.2 (NOAM, 1F1B-RR) and 3.3 (stashing; delay p - 1 - s updates;
    vertical sync). The rounding of K for replicated stages is that of the public runtime.

    Args:
        devices: Devices p, replicas included.
        microbatches: Microbatches m in the whole run.
        replicas: Devices per stage, such as (15, 1); they add up to *devices*. None for one each.
        vertical_sync: Whether the version of the first stage travels with its microbatch.

    Raises:
        ScheduleError: The replicas do not add up.
    """
    counts = [1] * devices if replicas is None else [require_count("replicas", count) for count in replicas]
    if sum(counts) != devices:
        raise ScheduleError(f"replicas {counts} add up to {sum(counts)} and there are {devices} devices")
    streams = []
    for stage, count in enumerate(counts):
        ahead = (devices - 1 - sum(counts[:stage])) // count
        updates = -(-microbatches // count)
        for replica in range(count):
            own = np.arange(replica, microbatches, count, dtype=np.int32)
            kind, position = alternating(len(own), min(ahead + 1, max(1, len(own))))
            kind, number, _ = with_updates(kind, own[position])
            # a replica without a microbatch in the last round updates too
            if len(own) < updates:
                kind, number = np.append(kind, np.int8(Kind.U)), np.append(number, np.int32(updates - 1))
            streams.append((stage, kind, number))
    return Schedule.from_columns(streams, name="pipedream", weights="vertical" if vertical_sync else "stash")


def with_updates(
    kind: NDArray[np.int8], microbatch: NDArray[np.int32], every: int = 1, joined: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.int8], NDArray[np.int32], NDArray[np.bool_]]:
    """Columns with U after every *every*-th backward; the last takes what is left, so that no gradient is lost.

    Args:
        kind: (rows,) of one stage.
        microbatch: (rows,)
        every: Microbatches per update.
        joined: (rows,) where there are pairs; their backward is the second half.

    Returns:
        The columns kind, microbatch and joined.
    """
    backward = np.flatnonzero(kind == Kind.B)
    last = np.append(np.arange(every - 1, len(backward) - 1, every), len(backward) - 1) if len(backward) else np.zeros(0, np.int64)
    places = backward[last] + 1
    joined = np.zeros(len(kind), bool) if joined is None else joined
    return np.insert(kind, places, Kind.U), np.insert(microbatch, places, np.arange(len(places))), np.insert(joined, places, False)
