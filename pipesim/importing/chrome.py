"""Reads slices from Chrome trace JSON that others wrote, and says what is wrong with it instead of repairing it.

Complete events (``X``) and begin/end pairs (``B``, ``E``) become slices of tracks; other events are passed over. A
malformed event is reported with its index in ``traceEvents``, and the rest is imported: no slice is stretched to the end
of the trace for an end that is missing.
"""

from __future__ import annotations

import bisect
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ScheduleError
from pipesim.files import read_limited

__all__ = ["MAX_OVERLAPS", "Problem", "Trace", "Track", "read_trace"]

Floats = NDArray[np.float64]

MAX_OVERLAPS = 10_000  # per track; a track with more is not one track
_READ_LIMIT = 1 << 29  # bytes of JSON; in memory it becomes about ten times as much

TrackId = tuple[int | str, int | str]


@dataclass(frozen=True)
class Problem:
    """Something in a trace that was not imported.

    Attributes:
        index: Place in ``traceEvents``, from 0.
        text: What is wrong.
    """

    index: int
    text: str

    def __str__(self) -> str:
        return f"event {self.index}: {self.text}"


@dataclass(frozen=True, eq=False)
class Track:
    """The slices of one (pid, tid), by start; of those that start together, the longest first.

    Attributes:
        names: (slices,)
        start: (slices,) microseconds.
        end: (slices,) microseconds.
        index: (slices,) place of each ``X`` or ``B`` in ``traceEvents``.
        events: (slices,) the event itself, the ``X`` or the ``B``.
    """

    names: tuple[str, ...]
    start: Floats
    end: Floats
    index: NDArray[np.int64]
    events: tuple[Mapping[str, Any], ...]

    @property
    def total(self) -> float:
        """Sum of the durations: time in which slices overlap or nest counts several times."""
        return float((self.end - self.start).sum())

    @property
    def busy(self) -> float:
        """Time in which at least one slice runs: their union."""
        begin, finish = self._union
        return float((finish - begin).sum())

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Where nothing runs, between the first start and the last end."""
        begin, finish = self._union
        return list(zip(finish[:-1].tolist(), begin[1:].tolist(), strict=True))

    @cached_property
    def _union(self) -> tuple[Floats, Floats]:
        """Starts and ends of the stretches in which something runs."""
        if not len(self.start):
            return self.start, self.end
        reach = np.maximum.accumulate(self.end)
        first = np.append(True, self.start[1:] > reach[:-1] + self._dust)
        return self.start[first], reach[np.append(first[1:], True)]

    @property
    def _dust(self) -> float:
        """What rounding start and duration may add up to: 0.1 + 0.2 > 0.3 is no overlap. Half a microsecond at Unix time."""
        return 2 * float(np.spacing(max(np.abs(self.start).max(initial=0.0), np.abs(self.end).max(initial=0.0))))

    @cached_property
    def overlaps(self) -> list[tuple[int, int]]:
        """Pairs of slices, by their ``index``, that overlap without one being inside the other; at most :data:`MAX_OVERLAPS`.

        Viewers move or cut such slices, and one lane of a device cannot run them.
        """
        result: list[tuple[int, int]] = []
        # Slices that still run, the first to end last. A slice overlaps those that end within it, and these stand together.
        running: list[tuple[float, int]] = []
        dust = self._dust
        for start, end, index in zip(self.start.tolist(), self.end.tolist(), self.index.tolist(), strict=True):
            while running and -running[-1][0] <= start + dust:
                running.pop()
            for _, other in running[_after(running, end - dust) :]:
                result.append((other, index) if other < index else (index, other))
                if len(result) == MAX_OVERLAPS:
                    return sorted(result)
            running.insert(_after(running, end), (-end, index))
        return sorted(result)


def _after(running: list[tuple[float, int]], end: float) -> int:
    """The place behind the slices that end at *end* or later."""
    return bisect.bisect_right(running, -end, key=lambda item: item[0])


@dataclass(frozen=True, eq=False)
class Trace:
    """What was read.

    Attributes:
        tracks: (pid, tid) to slices.
        problems: What was not imported, in the order of the file.
        about: What else the file says about itself, such as ``distributedInfo``; empty for a bare list of events.
    """

    tracks: Mapping[TrackId, Track]
    problems: tuple[Problem, ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        slices = sum(len(track.names) for track in self.tracks.values())
        lines = [f"{slices} slices on {len(self.tracks)} tracks, {len(self.problems)} malformed events"]
        lines += [f"  {problem}" for problem in self.problems[:10]]
        lines += [f"  and {len(self.problems) - 10} more"] if len(self.problems) > 10 else []
        for (pid, tid), track in self.tracks.items():
            text = f"pid {pid}, tid {tid}: busy {track.busy:.6g} us, sum of durations {track.total:.6g} us, {len(track.gaps)} gaps"
            if pairs := track.overlaps:
                count = f"at least {MAX_OVERLAPS}" if len(pairs) == MAX_OVERLAPS else str(len(pairs))
                text += f", {count} overlapping pairs (events {pairs[0][0]} and {pairs[0][1]})"
            lines.append(text)
        return "\n".join(lines)


def read_trace(source: str | os.PathLike[str], wanted: Callable[[str], bool] | None = None) -> Trace:
    """Reads the slices of a trace.

    Args:
        source: A file, compressed or not, or the JSON itself: a text that starts with ``{`` or ``[``.
        wanted: Names of the slices to read; of others nothing is kept and nothing reported. None for all.

    Returns:
        The slices per (pid, tid), and what was malformed. An event without pid or tid is on track 0, as in viewers.

    Raises:
        ScheduleError: It is no trace: no JSON, too large, or without a list of events.
        OSError: The file cannot be read.

    Examples:
        >>> times = [(0, 100), (100, 100), (200, 100), (280, 70), (360, 40)]
        >>> track = read_trace(json.dumps([{"ph": "X", "pid": 0, "tid": 0, "ts": ts, "dur": dur} for ts, dur in times])).tracks[0, 0]
        >>> track.busy, track.total, track.overlaps, track.gaps
        (390.0, 410.0, [(2, 3)], [(350.0, 360.0)])
    """
    inline = isinstance(source, str) and source.lstrip()[:1] in ("{", "[")
    where = "the trace" if inline else str(source)
    try:
        data = json.loads(source if inline else read_limited(source, _READ_LIMIT))  # type: ignore[arg-type]  # a path is never inline
    except ScheduleError:
        raise
    except (ValueError, RecursionError) as error:  # JSONDecodeError, and whole numbers of thousands of digits
        raise ScheduleError(f"{where} is not JSON: {error}") from None
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise ScheduleError(f'{where} is no Chrome trace: it must be a list of events, or an object whose "traceEvents" is one')
    about = {str(key): value for key, value in data.items() if key != "traceEvents"} if isinstance(data, dict) else {}
    return _Reader(wanted).read(events, about)


class _Reader:
    """Collects slices and problems."""

    def __init__(self, wanted: Callable[[str], bool] | None) -> None:
        self.wanted = wanted
        self.slices: dict[TrackId, list[tuple[float, float, int, str]]] = {}
        self.problems: list[Problem] = []
        self.marks: dict[TrackId, list[tuple[float, int, bool, str]]] = {}

    def read(self, events: Sequence[Any], about: Mapping[str, Any]) -> Trace:
        for index, event in enumerate(events):
            if not isinstance(event, dict):
                self._report(index, f"is {_shown(event)} and no event")
            elif event.get("ph") in ("X", "B", "E"):
                self._take(index, event)
            elif not isinstance(event.get("ph"), str):
                self._report(index, f"has phase {_shown(event.get('ph'))}; right is a text such as 'X'")
        for track, marks in self.marks.items():
            self._pair(track, marks)
        tracks = {track: _track(slices, events) for track, slices in self.slices.items()}
        return Trace(tracks, tuple(sorted(self.problems, key=lambda p: p.index)), about)

    def _wants(self, name: Any) -> bool:
        return self.wanted is None or not isinstance(name, str) or self.wanted(name)

    def _report(self, index: int, text: str) -> None:
        self.problems.append(Problem(index, text))

    def _take(self, index: int, event: Mapping[str, Any]) -> None:
        pid, tid, name = event.get("pid", 0), event.get("tid", 0), event.get("name", "")
        if event["ph"] == "X" and not self._wants(name):  # of begins and ends all are needed to see which belong together
            return None
        for what, value in (("pid", pid), ("tid", tid)):
            if isinstance(value, bool) or not isinstance(value, int | str):
                return self._report(index, f"has {what} {_shown(value)}; right is a whole number or a text")
        if not isinstance(name, str):
            return self._report(index, f"has name {_shown(name)}, which is no text")
        ts = _number(event.get("ts"))
        if ts is None:
            return self._report(index, f"has ts {_shown(event.get('ts'))}; right is a finite number")
        if event["ph"] != "X":
            self.marks.setdefault((pid, tid), []).append((ts, index, event["ph"] == "B", name))
            return None
        dur = _number(event.get("dur"))
        if dur is None or dur < 0 or not math.isfinite(ts + dur):
            return self._report(index, f"has dur {_shown(event.get('dur'))}; right is a finite number of at least 0")
        self.slices.setdefault((pid, tid), []).append((ts, ts + dur, index, name))
        return None

    def _pair(self, track: TrackId, marks: list[tuple[float, int, bool, str]]) -> None:
        """Ends close the innermost open begin of their name, or just the innermost where they have none."""
        opened: list[tuple[float, int, str]] = []
        by_name: dict[str, int] = {}  # how many of each name are open, so that an end without begin costs no search
        for ts, index, begins, name in sorted(marks, key=lambda mark: mark[0]):
            if begins:
                opened.append((ts, index, name))
                by_name[name] = by_name.get(name, 0) + 1
            elif not opened or (name and not by_name.get(name)):
                if not name or self._wants(name):
                    self._report(index, f"ends {_shown(name)}, which has not begun on {_place(track)}")
            else:
                while True:
                    start, begin, title = opened.pop()
                    by_name[title] -= 1
                    if not name or title == name:
                        break
                    if self._wants(title):
                        self._report(begin, f"begins {_shown(title)}, which is still open when what it stands in ends (event {index})")
                if self._wants(title):
                    self.slices.setdefault(track, []).append((start, ts, begin, title))
        for _, begin, title in opened:
            if self._wants(title):
                self._report(begin, f"begins {_shown(title)} on {_place(track)}, which never ends")


def _track(slices: list[tuple[float, float, int, str]], events: Sequence[Mapping[str, Any]]) -> Track:
    slices.sort(key=lambda s: (s[0], -s[1]))
    start, end, index, names = zip(*slices, strict=True)
    columns = np.array(start, dtype=np.float64), np.array(end, dtype=np.float64), np.array(index, dtype=np.int64)
    return Track(names, *columns, tuple(events[number] for number in index))


def _number(value: Any) -> float | None:
    """The value as a finite float, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def _place(track: TrackId) -> str:
    return f"pid {_shown(track[0])}, tid {_shown(track[1])}"


def _shown(value: Any) -> str:
    """A value for a report, on one line and never long."""
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) >= 10**60:
        return "a huge number"
    return repr(value[:60] if isinstance(value, str) else value)
