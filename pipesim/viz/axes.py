"""Axes and texts of pictures: units that fit, round numbers, names that a font can show."""

from __future__ import annotations

import math

__all__ = ["printable", "size_axis", "ticks", "time_axis"]


def time_axis(span: float, unit: str) -> tuple[float, str]:
    """The factor by which times are multiplied for an axis, and the name of the unit there.

    Examples:
        >>> time_axis(0.52, "s"), time_axis(33.0, "slot")
        ((1000.0, 'ms'), (1.0, 'slots'))
    """
    if unit != "s":
        return 1.0, "slots"
    return _scaled(span, ((1.0, "s"), (1e3, "ms"), (1e6, "µs")))


def size_axis(peak: float, unit: str) -> tuple[float, str]:
    """The same for memory, bytes in a physical model.

    Examples:
        >>> size_axis(3.5e9, "s"), size_axis(4, "slot")
        ((1e-09, 'GB'), (1.0, 'units'))
    """
    if unit != "s":
        return 1.0, "units"
    return _scaled(peak, ((1e-9, "GB"), (1e-6, "MB"), (1e-3, "kB"), (1.0, "B")))


def ticks(span: float, most: int) -> list[float]:
    """Round numbers from 0 to *span*, at most *most* + 1 of them.

    Examples:
        >>> ticks(33, 12)
        [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    """
    if span <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= span / most * (1 - 1e-9))
    return [float(f"{number * step:.12g}") for number in range(math.floor(span / step * (1 + 1e-9)) + 1)]


def printable(text: str) -> str:
    r"""The text with control characters, line breaks and other things that no font shows written as escapes.

    Names come from files. What is left is legal in XML too (after its own escaping).

    Examples:
        >>> printable("前向 F0\\n\\x01")
        '前向 F0\\n\\x01'
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _scaled(value: float, scales: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    """The first scale in which the value is at least 1, else the last."""
    return next((scale for scale in scales if value * scale[0] >= 1), scales[-1])
