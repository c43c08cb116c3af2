"""PipeDream: asynchronous 1F1B with weight stashing and replicated stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipesim.errors import ScheduleError, require_count
from pipesim.op import Kind
from pipesim.schedule import Schedule

from .one_f_one_b import alternating

__all__ = ["pipedream"]


def pipedream(devices: int, microbatches: int, *, replicas: Sequence[int] | None = None) -> Schedule:
    """Runs 1F1B for ever, without a flush; every stage keeps one weight version per microbatch in flight.

    ::

        device 0 | F0 F1 .  B0 U0 F2 B1 U1 F3 B2 U2 ...      U, the update, takes no time here
        device 1 | .  F0 B0 U0 F1 B1 U1 F2 B2 U2 ...

    The paper's minibatch is our microbatch. A stage with r replicas (1F1B-RR) takes microbatches round robin, b on its
    replica b mod r, forward and backward alike; its replicas average their gradients, so it updates once per r
    microbatches. A rank starts with K = (R - 1 - r_0 - ... - r_{s-1}) // r_s forwards more than 1F1B needs, of R ranks, and
    then holds K + 1 microbatches and K + 1 weight versions: p - s on stage s of a straight pipeline.

    The bubble is only the fill and the drain: makespan (m + p - 1)·(F + B) for equal straight stages. Any p, any m.

    Source: Narayanan et al. 2019 (PipeDream), section 3.2 (NOAM, 1F1B-RR) and 3.3 (stashing; delay p - 1 - s updates).
    The rounding of K for replicated stages is that of the public runtime.

    Args:
        devices: Devices p, replicas included.
        microbatches: Microbatches m in the whole run.
        replicas: Devices per stage, such as (15, 1); they add up to *devices*. None for one each.

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
            own = np.arange(replica, microbatches, count)
            kind, position = alternating(len(own), min(ahead + 1, max(1, len(own))))
            number = own[position]
            # U after every backward, numbered by the round; a replica without a microbatch in the last round updates too
            backward = np.flatnonzero(kind == Kind.B)
            kind = np.insert(kind, backward + 1, Kind.U)
            number = np.insert(number, backward + 1, position[backward])
            if len(own) < updates:
                kind, number = np.append(kind, Kind.U), np.append(number, updates - 1)
            streams.append((stage, kind, number))
    return Schedule.from_columns(streams, name="pipedream", weights="stash")
