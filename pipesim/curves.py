"""Measured collectives: how the time of an all-reduce grows with its size, and the fit to a table of measurements.

On n GPUs of a node an all-reduce of S bytes takes::

    α(n) + S / β(n) + γ(n) · √S

The first two are a ring's hops and bytes. The root is what efficiency still gains with size: libraries cut messages into
pieces that grow with S but slower, so that the number of pieces, and with it what is lost between them, grows like a root.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import LARGEST, ScheduleError, require_count
from pipesim.files import read_limited, write_atomically
from pipesim.presets import file_or_preset, preset_names
from pipesim.units import parse_quantity

__all__ = ["Curve", "curve_presets", "fit_curve", "read_curve", "write_curve"]

Floats = NDArray[np.float64]
_ROUNDS = 500
_STILL = 1e-9  # relative change at which a fit has settled
_EXACT = 1e-4  # relative residual below which a row is met


@dataclass(frozen=True)
class Curve:
    """Times of an all-reduce inside a node, measured for some numbers of members.

    Between measured numbers of members, α goes straight along the ring's hops 2(n - 1), and 1/β and γ along its traffic 2(n - 1)/n;
    outside of them on along the line of the nearest two, but not below 0, and no smaller among more members. A single table
    is scaled in proportion to hops and traffic.

    Attributes:
        members: Numbers of members that were measured, rising.
        latency: α of each, seconds.
        per_byte: 1/β of each, seconds per byte of S.
        per_root: γ of each, seconds per root of a byte.
        name: For summaries.
        source: Who measured what.

    Raises:
        ScheduleError: The lists differ in length, members do not rise from 2 on, or a number is negative.

    Examples:
        >>> curve = Curve((2, 8), (20e-6, 60e-6), (5e-12, 8e-12), (0.0, 0.0))
        >>> round(curve.time(8, 1e9) * 1e3, 2), round(curve.coefficients(4)[1] * 1e12, 2)
        (8.06, 7.0)
    """

    members: tuple[int, ...]
    latency: tuple[float, ...]
    per_byte: tuple[float, ...]
    per_root: tuple[float, ...]
    name: str = "curve"
    source: str = ""

    def __post_init__(self) -> None:
        lists = (self.latency, self.per_byte, self.per_root)
        if not self.members or any(len(one) != len(self.members) for one in lists):
            raise ScheduleError(f"curve {self.name}: members, latency, per_byte and per_root must be as many, and at least one")
        for before, after in zip((1, *self.members[:-1]), self.members, strict=True):
            if require_count(f"curve {self.name}: members", after, 2) <= before:
                raise ScheduleError(f"curve {self.name}: members must rise, got {', '.join(map(str, self.members))}")
        for number in (number for one in lists for number in one):
            if not 0 <= number <= LARGEST:
                raise ScheduleError(f"curve {self.name}: coefficients must be finite numbers of at least 0, got {number}")

    def coefficients(self, members: int) -> tuple[float, float, float]:
        """α, 1/β and γ of an all-reduce among any number of members.

        Examples:
            >>> Curve((8,), (56e-6,), (7e-12,), (0.0,)).coefficients(2)  # 2 instead of 14 hops, 1 instead of 7/4 of the traffic
            (8e-06, 4e-12, 0.0)
        """
        n = require_count("members", members)
        if n == 1:
            return 0.0, 0.0, 0.0
        numbers = (*self.members, n)
        hops, traffic = [2.0 * (one - 1) for one in numbers], [2.0 * (one - 1) / one for one in numbers]
        return _along(hops, self.latency), _along(traffic, self.per_byte), _along(traffic, self.per_root)

    def time(self, members: int, size: float | Floats) -> float | Floats:
        """Seconds of an all-reduce of *size* bytes, of the shape of *size*; one member alone and nothing cost nothing."""
        alpha, beta, gamma = self.coefficients(members)
        sizes = np.asarray(size, dtype=np.float64)
        times = np.where(sizes > 0, alpha + beta * sizes + gamma * np.sqrt(sizes), 0.0)
        return times if isinstance(size, np.ndarray) else float(times)

    def moved(self, members: int, hops: int, traffic: Floats) -> Floats:
        """Seconds of a part of a collective among *members*: so many hops in a row, and so many bytes that each sends.

        An all-reduce is a ring's reduce-scatter and its all-gather, each of n - 1 hops and (n - 1)/n·S. So a hop takes
        α/2(n - 1), a byte n/2(n - 1)/β, and the root of a byte γ/2·√(n/(n - 1)): with them both passes add up to the curve.
        """
        if members == 1:
            return np.zeros_like(traffic)
        alpha, beta, gamma = self.coefficients(members)
        part = (members - 1) / members
        return np.asarray(hops * alpha / (2 * (members - 1)) + traffic * beta / (2 * part) + np.sqrt(traffic) * gamma / (2 * np.sqrt(part)))


def _along(places: list[float], table: tuple[float, ...]) -> float:
    """The value at the last of the places, from a table of values at the others."""
    *known, here = places
    if len(known) == 1:
        return table[0] * here / known[0]
    if known[0] <= here <= known[-1]:
        return float(np.interp(here, known, table))
    end, beside = (0, 1) if here < known[0] else (-1, -2)
    straight = table[end] + (table[end] - table[beside]) * (here - known[end]) / (known[end] - known[beside])
    return min(max(straight, 0.0), table[0]) if end == 0 else max(straight, table[-1])


def fit_curve(tables: Mapping[int, tuple[Floats, Floats]], name: str = "curve", source: str = "") -> Curve:
    """Fits a curve to measured all-reduces: three numbers to each table, of at least 0.

    The sum of relative errors is made small, not that of their squares, so that single rows far off (libraries change
    their protocol at some sizes) count little. A row counts 1/√S: tables are dense in large sizes, and what counts
    all sizes alike lies between rows alike and decades alike.

    Args:
        tables: Number of members to (sizes in bytes, seconds), each (rows,).
        name: For summaries.
        source: Who measured what.

    Raises:
        ScheduleError: A table has fewer than three rows, or a size or time that is not above 0.

    Examples:
        >>> sizes = np.geomspace(1e6, 1e9, 50)
        >>> curve = fit_curve({4: (sizes, 30e-6 + 7e-12 * sizes)})
        >>> [f"{number:.2e}" for number in curve.coefficients(4)]
        ['3.00e-05', '7.00e-12', '0.00e+00']
    """
    found = []
    for members, (sizes, times) in sorted(tables.items()):
        sizes, times = np.asarray(sizes, dtype=np.float64), np.asarray(times, dtype=np.float64)
        if sizes.shape != times.shape or sizes.ndim != 1 or len(sizes) < 3:
            raise ScheduleError(f"the table of {members} members must have at least 3 sizes and as many times, got {sizes.shape} and {times.shape}")
        if not ((sizes > 0) & (sizes <= LARGEST) & (times > 0) & (times <= LARGEST)).all():
            raise ScheduleError(f"the table of {members} members has a size or a time that is not a finite number above 0")
        found.append(_fit_table(sizes, times))
    latency, per_byte, per_root = zip(*found, strict=True)
    return Curve(tuple(sorted(tables)), latency, per_byte, per_root, name, source)


def _fit_table(sizes: Floats, times: Floats) -> tuple[float, float, float]:
    """α, 1/β, γ of one table, by least squares whose weights make them least absolute errors."""
    unit = float(sizes.max())  # so that columns are of one order
    columns = np.stack([np.ones_like(sizes), sizes / unit, np.sqrt(sizes / unit)], axis=1) / times[:, None]
    known = (sizes / unit) ** -0.25
    weights, best = known, np.zeros(3)
    for _ in range(_ROUNDS):
        before, best = best, _non_negative(columns * weights[:, None], weights)
        weights = known / np.sqrt(np.maximum(np.abs(columns @ best - 1), _EXACT))
        if np.abs(best - before).max() <= _STILL * best.max():
            break
    return float(best[0]), float(best[1] / unit), float(best[2] / np.sqrt(unit))


def _non_negative(matrix: Floats, target: Floats) -> Floats:
    """Least squares with coefficients of at least 0: the best of those that leave some columns out."""
    best, least = np.zeros(matrix.shape[1]), np.inf
    for count in range(1, matrix.shape[1] + 1):
        for kept in map(list, combinations(range(matrix.shape[1]), count)):
            part = np.linalg.lstsq(matrix[:, kept], target, rcond=None)[0]
            error = float(((matrix[:, kept] @ part - target) ** 2).sum())
            if (part >= 0).all() and error < least:
                best, least = np.zeros(matrix.shape[1]), error
                best[kept] = part
    return best


def curve_presets() -> list[str]:
    """Names of the curves that ship with pipesim.

    Examples:
        >>> curve_presets()
        ['a100', 'v100']
    """
    return preset_names("collectives")


def read_curve(source: str | Path) -> Curve:
    """Reads a curve from a TOML file, or a preset by its name.

    Raises:
        ScheduleError: There is no such file or preset, a key is unknown, or a quantity has no unit.

    Examples:
        >>> curve = read_curve("a100")
        >>> curve.members, round(2**30 / curve.time(8, 2**30) * 14 / 8 / 1e9)  # bus bandwidth, GB/s
        ((2, 4, 8), 229)
    """
    from pipesim.userfiles import CurveFile, parse_toml

    path = file_or_preset(source, "collectives", "collectives")
    file = parse_toml(CurveFile, read_limited(path), str(path))
    rows = [
        (
            table.members,
            parse_quantity(table.latency, "time", f"{path}: tables[{number}].latency"),
            1
            / _above_zero(parse_quantity(table.bandwidth, "bandwidth", f"{path}: tables[{number}].bandwidth"), f"{path}: tables[{number}].bandwidth"),
            parse_quantity(table.root, "time", f"{path}: tables[{number}].root"),
        )
        for number, table in enumerate(file.tables)
    ]
    members, latency, per_byte, per_root = zip(*sorted(rows), strict=True)
    return Curve(members, latency, per_byte, per_root, file.name or path.stem, file.source or "")


def write_curve(curve: Curve, path: str | Path) -> None:
    """Writes a curve that :func:`read_curve` reads back, to four digits.

    Raises:
        ScheduleError: A table has no bandwidth (its time does not grow with the size), which a file cannot say.
    """
    import json

    lines = [f"name = {json.dumps(curve.name)}", f"source = {json.dumps(curve.source, ensure_ascii=False)}"]
    for members, alpha, beta, gamma in zip(curve.members, curve.latency, curve.per_byte, curve.per_root, strict=True):
        if beta == 0:
            raise ScheduleError(f"curve {curve.name}: the time among {members} members does not grow with the size; a file cannot say that")
        figures = (f'latency = "{alpha * 1e6:.4g} us"', f'bandwidth = "{1e-9 / beta:.4g} GB/s"', f'root = "{gamma * 1e9:.4g} ns"')
        lines += ["", "[[tables]]", f"members = {members}", *figures]
    write_atomically(path, "\n".join(lines) + "\n")


def _above_zero(value: float, what: str) -> float:
    if value <= 0:
        raise ScheduleError(f"{what} must be above 0")
    return value
