"""The two errors that belong to this field; everything else is a built-in."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["LARGEST", "DeadlockError", "ScheduleError", "did_you_mean", "require_count", "require_size"]

# The largest time, size or rate that is taken: beyond any machine, and small enough that sums and products of what is
# taken stay finite, in float64 and on the axes of plots.
LARGEST = 1e30
_LARGEST_COUNT = 10**9
_LARGEST_CLUSTER = 10**5  # devices
_LARGEST_SIZE = 10**8  # stages x microbatches on all devices; ten million take about 4 GB to run


class ScheduleError(ValueError):
    """Something is wrong with the input, and it can be said without running anything."""


class DeadlockError(RuntimeError):
    """A run made no progress; the text names, per device, the op it is stuck at and what it waits for.

    It takes one text and nothing else, because SimPy rebuilds an exception from its ``args``.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` for the nearest known name, or an empty string.

    Examples:
        >>> did_you_mean("1f2b", ["gpipe", "1f1b"])
        "; did you mean '1f1b'?"
    """
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def require_count(name: str, value: object, minimum: int = 1) -> int:
    """Returns *value* if it is a whole number of at least *minimum*.

    Args:
        name: The argument's name, for the error.
        value: What the user gave. Booleans, floats and texts are refused: ``True`` microbatches is a slip.
        minimum: The smallest legal value.

    Raises:
        ScheduleError: It is no such number.

    Examples:
        >>> require_count("microbatches", 8)
        8
    """
    # numpy integers are whole numbers too, and have __index__; bool and float are the traps
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ScheduleError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    number = int(value.__index__())
    if number < minimum:
        raise ScheduleError(f"{name} must be at least {minimum}, got {number}")
    if number >= _LARGEST_COUNT:
        raise ScheduleError(
            f"{name} must be below {_LARGEST_COUNT}, got {number:.3g}" if number < 10**300 else f"{name} must be below {_LARGEST_COUNT}"
        )
    return number


def require_size(devices: int, microbatches: int, pieces: int = 1) -> None:
    """Refuses a schedule that no memory would hold, before anything is made.

    Args:
        devices: Devices.
        microbatches: Microbatches.
        pieces: Chunks per device, or pieces that each microbatch is cut into.

    Raises:
        ScheduleError: There would be more than 1e8 (stage, microbatch) pairs, or more than 1e5 devices.

    Examples:
        >>> require_size(128, 4096, 4)
    """
    if devices > _LARGEST_CLUSTER:
        raise ScheduleError(f"devices must be at most {_LARGEST_CLUSTER}, got {devices}")
    size = devices * microbatches * pieces
    if size > _LARGEST_SIZE:
        each = f" x {pieces}" if pieces > 1 else ""
        raise ScheduleError(f"{devices} devices x {microbatches} microbatches{each} is more than the {_LARGEST_SIZE:.0e} that fit into memory")
