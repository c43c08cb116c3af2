"""GNNPipe: layers of a graph neural network over devices, chunks of the graph as microbatches."""

from __future__ import annotations

from dataclasses import replace

from pipesim.schedule import Schedule

from .gpipe import gpipe

__all__ = ["gnnpipe"]


def gnnpipe(devices: int, microbatches: int) -> Schedule:
    """Runs GPipe over chunks of one graph, with the backwards in reverse order, because the chunks depend on each other.

    ::

        device 0 | F0 F1 F2 .  .  .  .  B2 B1 B0
        device 1 | .  F0 F1 F2 .  .  B2 B1 B0 .
        device 2 | .  .  F0 F1 F2 B2 B1 B0 .  .       F = B here

    Every device has some layers, for the whole graph. A vertex needs its neighbours in chunks that came before (new
    embeddings) and after (those of the last epoch), so chunk k follows chunk k - 1 on every device, and gradients come back
    from chunk k + 1 before chunk k can have all of its own: the reverse order. There is a flush every epoch.

    With equal chunks: makespan (m + p - 1)·(F + B), peak m activations on every device, plus one historical embedding
    per layer and vertex. Chunks of a graph are not equal: give their times as a table per stage and microbatch.
    Only embeddings at the cuts between devices are sent. Any p, any m.

    Source: Chen et al. 2023 (GNNPipe), abstract; the order is derived from the dependencies.

    Args:
        devices: Devices p, a group of layers each.
        microbatches: Chunks K of the graph.
    """
    return replace(gpipe(devices, microbatches, order="reversed"), name="gnnpipe")
