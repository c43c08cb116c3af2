"""SpecTrain: asynchronous 1F1B with predicted weights."""

from __future__ import annotations

from pipesim.schedule import Schedule

from .one_f_one_b import alternating
from .pipedream import with_updates

__all__ = ["spectrain"]


def spectrain(devices: int, microbatches: int) -> Schedule:
    """Runs 1F1B without a flush, updates after every backward, and computes with weights predicted ahead.

    ::

        device 0 | F0 F1 .  B0 U0 F2 B1 U1 F3 B2 U2 ...      U takes no time here
        device 1 | .  F0 B0 U0 F1 B1 U1 F2 B2 U2 ...

    The streams are PipeDream's; the weights are not stashed. Before every F and B a stage predicts Ŵ = W - η·s·v from its
    latest weights W, with v the smoothed gradient and s the number of updates to look ahead; the true weights are put back
    before the update. The prediction makes up for the delay that the latest weights have: p - 1 - k updates at a forward
    of stage k (fewer in the fill), none at a backward. To let all stages compute with the weights of one moment, it looks
    ahead further, by ⌊k/2⌋ more: s = ⌊k/2⌋ + p - k - 1 at F, ⌊k/2⌋ at B.

    Makespan (m + p - 1)·(F + B) for equal stages; peak min(p - k, m) activations on device k; 2 copies of the weights (and
    v). Any p, any m.

    Source: Chen et al. 2018 (SpecTrain); the distances are those of fairscale's SpectrainSGDMomentum.

    Args:
        devices: Devices p, one stage each.
        microbatches: Microbatches m in the whole run.
    """
    streams = []
    for stage in range(devices):
        kind, microbatch, _ = with_updates(*alternating(microbatches, min(devices - stage, microbatches)))
        streams.append((stage, kind, microbatch))
    return Schedule.from_columns(streams, name="spectrain", weights="predict")
