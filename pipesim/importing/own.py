"""The ranks of a Chrome trace that pipesim wrote (:mod:`pipesim.viz.trace`): a process is a device, thread 0 its compute lane."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipesim.errors import ScheduleError
from pipesim.importing.chrome import Track, TrackId
from pipesim.importing.ranks import Label, RankTrace, computes, disjoint, receives, refused
from pipesim.op import Op, parse_op

__all__ = ["own_ranks"]

_MOST_RANKS = 100_000


def own_ranks(path: Path, tracks: Mapping[TrackId, Track], other: Mapping[str, Any], problems: list[str]) -> list[RankTrace]:
    """One rank per process of the trace."""
    by_device: dict[int, RankTrace] = {}
    for (pid, tid), track in tracks.items():
        if not isinstance(pid, int) or not 0 <= pid < _MOST_RANKS:
            problems.append(f"{path}: pid {str(pid)[:60]!r} is no device")
            continue
        rank = by_device.setdefault(pid, RankTrace(path, pid, "pipesim's trace", own=other, has_steps=True))
        labels, steps = [], {}
        for name, start, end, index, event in zip(
            track.names, track.start.tolist(), track.end.tolist(), track.index.tolist(), track.events, strict=True
        ):
            try:
                slot = parse_op(name)
            except ScheduleError as error:
                problems.append(f"{path}, event {index}: {error}")
                continue
            if (wrong := refused(start, end)) is not None:
                problems.append(f"{path}, event {index}: {wrong}")
                continue
            details = event.get("args")
            details = details if isinstance(details, dict) else {}
            step = details.get("step", 0)
            if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**6:
                problems.append(f"{path}, event {index}: step is {str(step)[:60]!r}; right is a whole number of at least 0")
                continue
            if tid == 0 and computes(slot):
                labels.append(Label(slot, start, end, index))
                steps[index] = step
            elif isinstance(slot, Op) and receives(slot):
                peer = details.get("from_device")
                # a stage with several predecessors receives one message from each
                rank.received[slot, peer if isinstance(peer, int) else -1, step] = (start, end)
        if tid == 0:
            rank.compute = [found._replace(step=steps[found.event]) for found in disjoint(rank, labels, [])]
    devices = max(by_device, default=-1) + 1
    ranks = [by_device.get(device) or RankTrace(path, device, "pipesim's trace", own=other, has_steps=True) for device in range(devices)]
    if not any(rank.compute for rank in ranks):
        raise ScheduleError(f"{path} holds no op that takes time" + ("; malformed: " + "; ".join(problems[:3]) if problems else ""))
    ranks[0].problems[:0] = problems
    return ranks
