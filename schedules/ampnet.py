"""AMPNet: message driven; the order is what a run of given durations makes of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipesim.errors import require_count
from pipesim.listscheduler import list_schedule
from pipesim.op import Kind, Op
from pipesim.schedule import Schedule

from .pipedream import with_updates

__all__ = ["ampnet"]


def ampnet(
    devices: int,
    microbatches: int,
    *,
    max_active: int | None = None,
    min_update_frequency: int = 1,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    latency: float = 0.0,
) -> Schedule:
    """Lets every device do whatever has arrived: a backward first, then the oldest instance; updates are local.

    ::

        device 0 | F0 F1 .  B0 U0 F2 B1 U1 F3 B2 U2 ...      at most 2 active; F = B, and U takes no time here
        device 1 | .  F0 B0 U0 F1 B1 U1 F2 B2 U2 ...

    The paper's workers take their order from the messages that come in, so it depends on durations. It is worked out here
    for those that are given, by the list scheduler, and recorded as streams. At most *max_active* instances (our
    microbatches) are in the pipeline at once, and so no more activations are alive on any device. A stage updates its
    weights after every *min_update_frequency*-th backward there, whatever the others do; there is one copy of the weights,
    and forward and backward use the latest. If the frequency does not divide m, the last update takes what is left.

    With equal stages, free links and at least p active: makespan (m + p - 1)·(F + B), no bubble but the fill and the drain.
    Any p, any m.

    Source: Gaunt et al. 2017 (AMPNet): backward first, max_active_keys, min_update_frequency.

    Args:
        devices: Devices p, one stage each.
        microbatches: Instances m in the whole run.
        max_active: The most instances in the pipeline, from the start of their first F to the end of their last B. None for p.
        min_update_frequency: Backwards of a stage per update.
        forward: Time of F, one or per stage.
        backward: Time of B, one or per stage.
        latency: Time of a hop.

    Raises:
        ScheduleError: A limit is below 1, or a time is no number of at least 0, or not one per stage.
    """
    every = require_count("min_update_frequency", min_update_frequency)
    active = devices if max_active is None else require_count("max_active", max_active)
    orders = list_schedule(np.arange(devices), microbatches, {Kind.F: forward, Kind.B: backward}, latency=latency, max_active=active)
    streams = []
    for stage, order in enumerate(orders):
        ops = [slot for slot in order if isinstance(slot, Op)]  # there are no pairs
        kind = np.array([op.kind for op in ops], dtype=np.int8)
        microbatch = np.array([op.microbatch for op in ops], dtype=np.int32)
        kind, microbatch, _ = with_updates(kind, microbatch, every)
        streams.append((stage, kind, microbatch))
    return Schedule.from_columns(streams, name="ampnet", weights="latest")
