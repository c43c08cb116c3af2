"""PipeDream-2BW: asynchronous 1F1B with two weight versions."""

from __future__ import annotations

from pipesim.errors import ScheduleError, require_count
from pipesim.schedule import Schedule

from .one_f_one_b import alternating
from .pipedream import with_updates

__all__ = ["pipedream_2bw"]


def pipedream_2bw(devices: int, microbatches: int, *, updates_every: int | None = None) -> Schedule:
    """Runs 1F1B without a flush, adds up the gradients of N microbatches per update, and keeps two weight versions.

    ::

        device 0 | F0 F1 .  B0 F2 B1 U0 F3 B2 F4 B3 U1 F5 ...      N = 2; U takes no time here
        device 1 | .  F0 B0 F1 B1 U0 F2 B2 F3 B3 U1 F4 ...

    The microbatches that an update takes in all use the version before the one that it changes, forwards and backwards
    alike: microbatch k (from 0) uses version max(⌊k / N⌋ - 1, 0), so W(t+1) = W(t) - ν·∇f(W(t-1)). The delay is one
    update on every stage, except in the first N microbatches, where it is none.

    Makespan (m + p - 1)·(F + B) for equal stages; peak min(p - i, m) activations on device i; 2 weight versions.
    Any p, any m; N >= p, because a forward in flight over two updates would need a third version. If N does not divide m,
    the last update takes what is left.

    Source: Narayanan et al. 2021 (PipeDream-2BW), section 3.1. Its m is N here: m is the length of the run.

    Args:
        devices: Devices p, one stage each.
        microbatches: Microbatches m in the whole run.
        updates_every: Microbatches per update, N. None for p.

    Raises:
        ScheduleError: N is below p.
    """
    every = devices if updates_every is None else require_count("updates_every", updates_every)
    if every < devices:
        raise ScheduleError(
            f"updates_every is {every} and there are {devices} devices; right is at least {devices} microbatches per update, or two weight versions would not suffice"
        )
    streams = []
    for stage in range(devices):
        kind, microbatch, _ = with_updates(*alternating(microbatches, min(devices - stage, microbatches)), every)
        streams.append((stage, kind, microbatch))
    return Schedule.from_columns(streams, name="pipedream-2bw", weights="double_buffer")
