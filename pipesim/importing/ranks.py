"""The ops that a trace shows of one rank, whoever wrote it."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pipesim.op import COMPUTE_KINDS, Kind, Op, Pair, Slot

__all__ = ["Found", "Label", "RankTrace", "computes", "disjoint", "receives", "refused"]

_LATEST = 1e18  # microseconds that a clock may show, either way
_NANOSECOND = 1.5e-3  # microseconds by which slices that Kineto rounds to nanoseconds may overlap


class Label(NamedTuple):
    """A slice whose name is an op, as it stands in the file; times are microseconds."""

    slot: Slot
    start: float
    end: float
    event: int


class Found(NamedTuple):
    """One slice that is an op.

    Attributes:
        slot: The op or pair.
        start: Microseconds on the clock of its file; without the wait for its input, where the trace shows that.
        end: Microseconds.
        event: Place in ``traceEvents``.
        step: The iteration that the trace itself says; -1 where it says none.
        asked: When the slice began, wait included.
    """

    slot: Slot
    start: float
    end: float
    event: int
    step: int
    asked: float


@dataclass(eq=False)
class RankTrace:
    """The ops of one rank.

    Attributes:
        path: The file.
        rank: Its number.
        rank_from: Who says so.
        base: Nanoseconds since 1970 at which the file's clock is 0; 0 where it does not say.
        host: The machine, or an empty text.
        compute: Slices of the compute lane, by start, none overlapping.
        transfers: SEND and RECV to (start, end) of its slices, by start.
        seen: RECV to (since when it was waited for, infinite if only the op itself waits; when it was seen), for each slice of
            ``transfers``; None where the trace does not show it.
        received: In pipesim's own traces: (RECV, device that sent, step) to when the message left and when it was there.
        has_steps: Whether the trace says the iterations (``ProfilerStep``).
        gpu: Whether the times are the GPU's.
        own: otherData of a trace that pipesim wrote; None for others.
        problems: What was malformed, with file and index.
        notes: What else a reader should know.
    """

    path: Path
    rank: int
    rank_from: str
    base: int = 0
    host: str = ""
    compute: list[Found] = field(default_factory=list)
    transfers: dict[Op, list[tuple[float, float]]] = field(default_factory=dict)
    seen: dict[Op, list[tuple[float, float] | None]] = field(default_factory=dict)
    received: dict[tuple[Op, int, int], tuple[float, float]] = field(default_factory=dict)
    has_steps: bool = False
    gpu: bool = False
    own: Mapping[str, Any] | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def refused(start: float, end: float) -> str | None:
    """What is wrong with times that no clock shows."""
    return None if max(abs(start), abs(end)) <= _LATEST else f"lies at {start:g} microseconds, {_LATEST / 3.15e13:.0f} years and more away"


def computes(slot: Slot) -> bool:
    """Whether it holds the compute lane."""
    return isinstance(slot, Pair) or slot.kind in COMPUTE_KINDS


def receives(op: Op) -> bool:
    """Whether it is a RECV."""
    return op.kind in (Kind.RECV_F, Kind.RECV_B)


def disjoint(rank: RankTrace, labels: Sequence[Label], marks: Sequence[tuple[float, int]]) -> list[Found]:
    """The slices, of which time that two share is the first one's; what overlaps is reported."""
    result: list[Found] = []
    dust = _NANOSECOND + 2 * max((abs(label.end) for label in labels), default=0.0) * 2.3e-16
    reach, holder = float("-inf"), None
    for label in labels:
        start, end = label.start, label.end
        if holder is not None and start < reach:
            if start < reach - dust:
                nested = end <= reach
                same = nested and label.slot == holder.slot
                rank.problems.append(
                    f"{rank.path}, event {label.event}: {label.slot} {'lies inside' if nested else 'overlaps'} {holder.slot} (event {holder.event})"
                    + ("; left out" if same else ", which has the time that they share")
                )
                if same:
                    continue
            start, end = reach, max(end, reach)
        place = bisect.bisect_right(marks, label.start, key=lambda mark: mark[0]) - 1
        result.append(Found(label.slot, start, end, label.event, marks[place][1] if place >= 0 else -1, label.start))
        if end >= reach:
            reach, holder = end, label
    return result
