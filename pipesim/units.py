"""Quantities with explicit units. "25 GB/s" and "25 Gbit/s" differ by eight, so a bare number is refused."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Literal

from pipesim.errors import ScheduleError

__all__ = ["format_bytes", "format_time", "parse_quantity"]

Dimension = Literal["time", "bytes", "bandwidth"]

# Exact numbers, so that "10 us" is the float nearest to 1e-05 and not 10 * 1e-6.
_MICRO = Fraction(1, 10**6)
_TIME = {"s": Fraction(1), "ms": Fraction(1, 1000), "us": _MICRO, "\u00b5s": _MICRO, "\u03bcs": _MICRO, "ns": Fraction(1, 10**9)}
_PREFIX = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_RIGHT = {"time": "'5 us' or '1.5 ms'", "bytes": "'80 GB' or '16 MiB'", "bandwidth": "'25 GB/s' or '200 Gbit/s'"}
_NUMBER = re.compile(r"\s*([0-9]{1,99}(?:\.[0-9]{0,99})?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z\u00b5\u03bc/]+)\s*")
_SIZE = re.compile(r"([kKMGT]i?)?(B|b|bit|byte|bytes|bits|bps)(/s|ps)?")


def parse_quantity(text: object, dimension: Dimension, what: str) -> float:
    """Returns a quantity in seconds, bytes, or bytes per second.

    Args:
        text: Such as ``"25 GB/s"``; B is bytes, b and bit are bits; k, M, G are powers of 1000, Ki, Mi, Gi of 1024.
        dimension: What is expected.
        what: The name of the field, for the error.

    Raises:
        ScheduleError: There is no unit, the wrong one, or no number.

    Examples:
        >>> parse_quantity("100 MB", "bytes", "size") / parse_quantity("25Gb", "bandwidth", "bandwidth")
        0.032
        >>> parse_quantity("100 MB", "bytes", "size") / parse_quantity("25 GB/s", "bandwidth", "bandwidth")
        0.004
        >>> parse_quantity(25, "bandwidth", "bandwidth")
        Traceback (most recent call last):
        pipesim.errors.ScheduleError: bandwidth = 25 has no unit; write it with one, such as '25 GB/s' or '200 Gbit/s'
    """
    if isinstance(text, int | float) or (isinstance(text, str) and re.fullmatch(r"\s*[0-9.eE+-]+\s*", text)):
        raise ScheduleError(f"{what} = {text} has no unit; write it with one, such as {_RIGHT[dimension]}")
    match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    scale = _scale(match[2], dimension) if match else None
    if match is None or scale is None or not math.isfinite(float(match[1]) * float(scale)):
        raise ScheduleError(f"{what} = {text!r:.80} is not a {dimension}; write it such as {_RIGHT[dimension]}")
    return float(Fraction(match[1]) * scale)


def _scale(unit: str, dimension: Dimension) -> Fraction | None:
    if dimension == "time":
        return _TIME.get(unit)
    match = _SIZE.fullmatch(unit)
    if match is None or (dimension == "bytes" and (match[3] or match[2] == "bps")):
        return None
    prefix = (match[1] or "").replace("K", "k") if not (match[1] or "").endswith("i") else (match[1] or "").replace("k", "K")
    bits = match[2] in ("b", "bit", "bits", "bps")
    return Fraction(_PREFIX[prefix], 8 if bits else 1)


def format_time(value: float, unit: str) -> str:
    """A time for people: seconds get a prefix, slots a plain number.

    Examples:
        >>> format_time(0.0185, "s"), format_time(33.0, "slot"), format_time(40.2, "slot")
        ('18.5 ms', '33', '40.2')
    """
    if unit != "s":
        return f"{value:.6g}"
    for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= scale or (value == 0 and name == "s"):
            return f"{value / scale:.4g} {name}"
    return f"{value / 1e-9:.4g} ns"


def format_bytes(value: float, unit: str) -> str:
    """A size for people: bytes in a physical model, else abstract units.

    Examples:
        >>> format_bytes(3.5e9, "s"), format_bytes(4, "slot")
        ('3.5 GB', '4')
    """
    if unit != "s":
        return f"{value:.6g}"
    for scale, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {name}"
    return f"{value:.4g} B"
