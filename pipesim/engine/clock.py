"""Time as SimPy keeps it. The only file that imports SimPy."""

from __future__ import annotations

import heapq

import simpy
from simpy.events import NORMAL, Event, EventPriority

__all__ = ["Clock", "Event", "EventPriority"]


class Clock(simpy.Environment):
    """Time, which can also be told when something happens: now + (t - now) may differ from t in float64."""

    def trigger_at(self, event: Event, time: float) -> None:
        """Lets an event happen at *time*, exactly."""
        event._ok = True
        event._value = None
        heapq.heappush(self._queue, (time, NORMAL, next(self._eid), event))
