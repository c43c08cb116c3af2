"""Clocks of ranks, aligned by cause and effect.

A message cannot be seen before it leaves. Let x(r) be what must be added to the clock of rank r. Each message from a to b gives

    x(a) - x(b) <= seen - departed          each on its own clock

Messages both ways bound the difference of two clocks from both sides, and those of which nobody waits long bound it tightly. Bounds
add up along chains of ranks: the tightest are shortest paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipesim.importing.ranks import RankTrace
from pipesim.units import format_time

__all__ = ["Clocks", "LocalClock", "about_clocks", "align"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Clocks:
    """What to add to the clock of each rank, and how sure that is.

    Attributes:
        shift: (ranks,) what to add; 0 for the first.
        low: (ranks,) the least that causality allows, -inf if nothing says.
        high: (ranks,) the most.
        contradiction: By how much messages contradict each other, as time; 0 if they do not.
    """

    shift: Floats
    low: Floats
    high: Floats
    contradiction: float

    @property
    def uncertainty(self) -> float:
        """Half of the widest interval; infinite if some clock is not bounded from both sides."""
        return float(((self.high - self.low) / 2).max(initial=0.0))


def align(bounds: Floats, trusted: bool = False) -> Clocks:
    """Chooses the middle of what causality allows.

    Args:
        bounds: (ranks, ranks) the least of seen - departed over the messages from a to b; infinite where there are none.
        trusted: Whether the clocks are one clock (ranks of one machine): they stay as they are where that is possible.

    Examples:
        >>> # the clock of rank 1 is 100 late; both ways messages are under way for at least 2
        >>> bounds = np.array([[np.inf, -98.0], [102.0, np.inf]])
        >>> clocks = align(bounds)
        >>> clocks.shift.tolist(), clocks.uncertainty
        ([0.0, 100.0], 2.0)
    """
    closed, contradiction = _closed(bounds)
    count = len(bounds)
    low, high = -closed[0], closed[:, 0]
    shift = np.zeros(count)
    for rank in range(1, count):
        # what the clocks that are chosen already leave; never empty, because the bounds are closed
        before = np.arange(rank)
        least = float((shift[before] - closed[before, rank]).max())
        most = float((shift[before] + closed[rank, before]).min())
        if trusted and least <= 0 <= most:
            shift[rank] = 0.0
        elif np.isfinite(least) and np.isfinite(most):
            shift[rank] = (least + most) / 2
        else:
            shift[rank] = min(max(0.0, least), most)
    return Clocks(shift, low, high, contradiction)


def _closed(bounds: Floats) -> tuple[Floats, float]:
    """Shortest paths, and by how much every bound was loosened so that no cycle contradicts itself."""
    loosened = 0.0
    for _ in range(3):
        paths = bounds + loosened
        np.fill_diagonal(paths, 0.0)
        for middle in range(len(paths)):
            np.minimum(paths, paths[:, middle, None] + paths[None, middle, :], out=paths)
        worst = float(np.diagonal(paths).min(initial=0.0))
        if worst >= 0:
            return paths, loosened
        # the most negative walk round has at least two messages; after this no simple cycle is negative
        loosened += -worst * (1 + 1e-9)
    return np.where(np.isfinite(bounds), 0.0, np.inf), loosened


class LocalClock:
    """Microseconds of a rank's file as the run's unit of time; the moment 0 is the first op of any rank, by the ranks' own clocks.

    Whole nanoseconds are subtracted as integers: a float64 at Unix time would lose the nanoseconds.
    """

    def __init__(self, ranks: Sequence[RankTrace]) -> None:
        own = ranks[0].own
        self.scale = 1e-3 if own is not None and "slot" in str(own.get("time")) else 1e-6
        self.first = [min((found.start for found in rank.compute), default=0.0) for rank in ranks]
        origin = [rank.base + round(first * 1000) for rank, first in zip(ranks, self.first, strict=True)]
        earliest = min((origin[place] for place, rank in enumerate(ranks) if rank.compute), default=0)
        self.offset = [(one - earliest) * 1e-9 if own is None else first * self.scale for one, first in zip(origin, self.first, strict=True)]

    def time(self, device: int, microseconds: float) -> float:
        """In the run's unit."""
        return (microseconds - self.first[device]) * self.scale + self.offset[device]


def about_clocks(ranks: Sequence[RankTrace], clocks: Clocks) -> list[str]:
    """What to say about them; nothing for one rank."""
    if len(ranks) == 1:
        return []
    worst = int(np.abs(clocks.shift).argmax())
    if abs(clocks.shift[worst]) < 1e-9:  # the clock's own resolution
        text = "clocks of the ranks left as they are"
    else:
        text = f"clocks of the ranks shifted by at most {format_time(float(clocks.shift[worst]), 's')} (rank {ranks[worst].rank})"
    if np.isfinite(clocks.uncertainty):
        text += f"; messages both ways allow +-{format_time(clocks.uncertainty, 's')}"
    else:
        text += "; messages do not bound them from both sides, so times between ranks may be off"
    if clocks.contradiction:
        text += f"; messages contradict each other by {format_time(clocks.contradiction, 's')}"
    return [text]
