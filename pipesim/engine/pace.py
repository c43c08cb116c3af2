"""How fast a device computes while communication is under way on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipesim.engine.clock import Clock, Event

__all__ = ["Pace"]

Mark = Callable[[Event], None]


class Pace:
    """The compute lane of one device: its work takes longer by a factor while some kind of traffic is under way, exactly, piece by piece.

    Of several kinds the largest factor counts.
    """

    __slots__ = ("_duration", "_ends", "_marks", "_remaining", "_since", "_version", "_waiter", "active", "env", "factor", "factors")

    def __init__(self, env: Clock, factors: Mapping[str, float]) -> None:
        self.env = env
        self.factors = factors
        self.active = dict.fromkeys(factors, 0)
        self.factor = 1.0
        self._waiter: Event | None = None  # of the slot that runs
        self._duration = self._remaining = self._since = self._ends = 0.0
        self._marks: list[tuple[float, Mark]] = []
        self._version = 0

    def work(self, duration: float, marks: Sequence[tuple[float, Mark]] = ()) -> Event:
        """Begins a slot and returns its end; calls each mark when so much of the duration has been done."""
        waiter = self._waiter = Event(self.env)
        self._duration = self._remaining = duration
        self._marks = list(marks)
        self._go_on()
        return waiter

    def begin(self, kind: str) -> None:
        """More traffic of a kind is under way."""
        if kind in self.active:
            self.active[kind] += 1
            self._change()

    def end(self, kind: str) -> None:
        """Less is."""
        if kind in self.active:
            self.active[kind] -= 1
            self._change()

    def _change(self) -> None:
        factor = max((self.factors[kind] for kind, count in self.active.items() if count), default=1.0)
        if factor == self.factor:
            return
        if self._waiter is not None and self.env.now < self._ends:
            self._remaining -= (self.env.now - self._since) / self.factor
            self.factor = factor
            self._go_on()
        else:
            self.factor = factor

    def _go_on(self) -> None:
        """Says when what remains will be done if nothing changes any more."""
        self._since = self.env.now
        self._ends = self._since + max(self._remaining, 0.0) * self.factor
        self._version += 1
        done = self._duration - self._remaining
        for amount, mark in self._marks:
            self.env.call_at(self._since + max(amount - done, 0.0) * self.factor, self._reached, (self._version, amount, mark))
        self.env.call_at(self._ends, self._done, self._version)

    def _reached(self, event: Event) -> None:
        version, amount, mark = event.value  # type: ignore[misc]
        if version == self._version:
            self._marks.remove((amount, mark))
            mark(event)

    def _done(self, event: Event) -> None:
        if event.value == self._version and self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            waiter.succeed()
