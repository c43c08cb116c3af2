"""Time as SimPy keeps it. The only file that imports SimPy."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import simpy
from simpy.events import NORMAL, Event, EventPriority

__all__ = ["Clock", "Event", "EventPriority"]


class Clock(simpy.Environment):
    """Time, which can also be told when something happens: now + (t - now) may differ from t in float64."""

    def __init__(self) -> None:
        super().__init__(0.0)  # SimPy's own 0 would make whole numbers of times

    def trigger_at(self, event: Event, time: float) -> None:
        """Lets an event happen at *time*, exactly."""
        event._ok = True
        event._value = None
        heapq.heappush(self._queue, (time, NORMAL, next(self._eid), event))

    def call_at(self, time: float, callback: Callable[[Event], None], value: Any) -> None:
        """Calls back at *time*, exactly, with an event that has this value."""
        event = Event(self)
        event._ok = True
        event._value = value
        event.callbacks = [callback]
        heapq.heappush(self._queue, (time, NORMAL, next(self._eid), event))

    def happen(self, event: Event) -> None:
        """Lets an event happen at once, and who waits for it go on, before anything else that is due now."""
        event._ok = True
        event._value = None
        callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]  # as SimPy marks what has been processed
        for callback in callbacks:
            callback(event)

    def nothing_else_now(self) -> bool:
        """Whether what is happening is the last that is due at this time so far."""
        return not self._queue or self._queue[0][0] > self._now
