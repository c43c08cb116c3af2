"""Which of many memory curves a picture shows strongly: the eye can follow four, not thirty-two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipesim.memory import MemoryCurve
from pipesim.units import format_bytes

__all__ = ["OTHERS", "Look", "apart", "peak_text", "strong"]

# Okabe and Ito, as the bars: everyone can tell them apart, on white and on dark
_HIGHEST, _REST = "#d55e00", ("#0072b2", "#009e73", "#cc79a7")
OTHERS = "#808080"


class Look(NamedTuple):
    """How to draw the curve of a device.

    Attributes:
        color: ``#rrggbb``.
        width: Of its line, in points; larger ones lie above.
        text: What stands beside it; nothing beside those that are not shown strongly.
        highest: Whether it is the one with the highest peak.
    """

    color: str
    width: float
    text: str = ""
    highest: bool = False


def strong(curves: Sequence[MemoryCurve]) -> list[Look]:
    """Up to four devices are all shown strongly; of more the one with the highest peak, the first, the middle and the last.

    Examples:
        >>> from pipesim import generate, simulate
        >>> run = simulate(generate("1f1b", devices=8, microbatches=8))
        >>> [look.text for look in strong([run.memory(device) for device in range(8)])]
        ['device 0: 8 units', '', '', '', 'device 4: 4 units', '', '', 'device 7: 1 units']
    """
    count, highest = len(curves), int(np.argmax([curve.peak for curve in curves]))
    shown = range(count) if count <= 4 else {0, highest, count // 2, count - 1}
    rest, result = iter(_REST), []
    for number, curve in enumerate(curves):
        text = f"device {curve.device}: {peak_text(curve.peak, curve.unit)}"
        if number == highest:
            result.append(Look(_HIGHEST, 1.8, text, highest=True))
        else:
            result.append(Look(next(rest), 1.2, text) if number in shown else Look(OTHERS, 0.5))
    return result


def peak_text(value: float, unit: str) -> str:
    """Bytes, or units.

    Examples:
        >>> peak_text(2e9, "s"), peak_text(4, "slot")
        ('2 GB', '4 units')
    """
    return format_bytes(value, unit) + (" units" if unit == "slot" else "")


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """The heights, moved up as little as is needed for a gap between any two, so that texts beside them can be read; of alike ones the first is on top.

    Examples:
        >>> apart([8.0, 8.0, 3.0], 1.0)
        [9.0, 8.0, 3.0]
    """
    result, below = list(heights), -np.inf
    for number in sorted(range(len(heights)), key=lambda number: (heights[number], -number)):
        result[number] = below = max(heights[number], below + gap)
    return result
