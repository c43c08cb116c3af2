"""GraphPipe: stages that form a graph, and no chain."""

from __future__ import annotations

import re

from pipesim.errors import ScheduleError, require_count
from pipesim.schedule import Schedule

from .one_f_one_b import alternating

__all__ = ["graphpipe"]


def graphpipe(devices: int, microbatches: int, *, graph: str | None = None, branches: int = 2) -> Schedule:
    """Runs 1F1B over a graph of stages; how many forwards a stage starts with follows from all its successors.

    ::

        device 0 | F0 F1 .  B0 F2 B1 .  B2        stages 0 and 1 are branches,
        device 1 | F0 F1 .  B0 F2 B1 .  B2        stage 2 joins them: graph 0>2, 1>2
        device 2 | .  F0 B0 F1 B1 F2 B2 .         F = B here

    A forward waits for all predecessors, a backward for all successors. A stage without successors holds one microbatch, any
    other one more than the most of its successors: the number w of stages on the longest way from it to the end. So a
    stage holds min(w, m) activations, and with D the largest w (the depth) and equal stages the makespan is
    (m + D - 1)·(F + B). Four stages as a chain have D = 4; three branches and a join D = 2. A chain is 1F1B.

    Any p, any m; one stage per device.

    Source: Jeon et al. 2025 (GraphPipe), sections 2 and 6: the default, synchronous 1F1B with equal microbatches on all
    stages. How an operator graph is cut into stages is a planner's affair.

    Args:
        devices: Devices p, one stage each.
        microbatches: Microbatches m.
        graph: Edges between stages, such as ``0>1,0>2,1>3,2>3``. None for parallel branches that the last stage joins.
        branches: How many branches, where no graph is given; the stages but the last are dealt out in turn.

    Raises:
        ScheduleError: The graph is no list of edges, does not name every stage, or has a cycle.
    """
    edges = _branches(devices, require_count("branches", branches)) if graph is None else _edges(graph, devices)
    in_flight = _in_flight(devices, edges)
    streams = [(stage, *alternating(microbatches, min(in_flight[stage], microbatches))) for stage in range(devices)]
    return Schedule.from_columns(streams, name="graphpipe", graph=edges)


def _branches(devices: int, branches: int) -> list[tuple[int, int]]:
    """Stage s goes on at s + branches, and at the last stage where its branch ends."""
    return [(stage, min(stage + branches, devices - 1)) for stage in range(devices - 1)]


def _edges(graph: str, devices: int) -> list[tuple[int, int]]:
    edges = []
    for word in graph.replace(",", " ").split():
        match = re.fullmatch(r"([0-9]{1,9})>([0-9]{1,9})", word)
        if match is None:
            raise ScheduleError(f"{word!r} is not an edge of the stage graph; write graph as 0>1,0>2,1>3,2>3")
        edges.append((int(match[1]), int(match[2])))
    named = {stage for edge in edges for stage in edge}
    if named != set(range(devices)) and (named or devices > 1):
        raise ScheduleError(f"the graph {graph!r} names the stages {sorted(named)}; right is all of 0..{devices - 1}, one stage per device")
    return edges


def _in_flight(devices: int, edges: list[tuple[int, int]]) -> list[int]:
    """Per stage, the stages on the longest way to the end of the graph."""
    result = [1] * devices
    for _ in range(devices):
        before = list(result)
        for stage, successor in edges:
            result[stage] = max(result[stage], result[successor] + 1)
        if result == before:
            return result
    raise ScheduleError(f"the stage graph {', '.join(f'{a}>{b}' for a, b in edges)} has a cycle; an activation would wait for itself")
