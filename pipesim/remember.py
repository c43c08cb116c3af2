"""What is worked out once of something that cannot change, and kept with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

__all__ = ["remembered"]

Subject = TypeVar("Subject")
Answer = TypeVar("Answer")


def remembered(function: Callable[[Subject], Answer]) -> Callable[[Subject], Answer]:
    """Keeps the answer of a function with its only argument, which cannot change: what cached_property is for methods.

    Examples:
        >>> from pipesim import Schedule
        >>> @remembered
        ... def halves(schedule):
        ...     print("counting")
        ...     return len(schedule) // 2
        >>> schedule = Schedule.from_text("0F0 0B0")
        >>> halves(schedule), halves(schedule)
        counting
        (1, 1)
    """
    key = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def answer(subject: Subject) -> Answer:
        known = subject.__dict__
        if key not in known:
            known[key] = function(subject)
        return known[key]  # type: ignore[no-any-return]

    return answer
