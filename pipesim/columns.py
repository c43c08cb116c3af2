"""From what a user gives to the columns of a schedule: every number a whole one and in its range."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.errors import ScheduleError
from pipesim.op import Kind, Pair, Slot, parse_op

__all__ = ["Columns", "columns_of", "distinct", "edges_of", "rows_of_stream"]

Columns = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int8], NDArray[np.int32], NDArray[np.bool_]]

_LAST_KIND = int(max(Kind))
_NOT_JOINED = np.asarray(False)
_LARGEST = 10**9 - 1  # nine digits, as in the text form; within int32


def columns_of(devices: Sequence[tuple[ArrayLike, ...]]) -> tuple[int, Columns]:
    """The number of devices, and (rows,) device, stage, kind, microbatch and joined; see :meth:`pipesim.Schedule.from_columns`."""
    columns: list[list[NDArray[Any]]] = []
    lengths: list[int] = []
    for number, rows in enumerate(devices):
        arrays = [np.asarray(column) for column in rows]
        sizes = {array.size for array in arrays if array.ndim}
        if len(sizes) > 1:
            each = [array.size for array in arrays] + [1] * (4 - len(arrays))
            raise ScheduleError(f"device {number}: stage, kind, microbatch and joined have lengths {each}; they must agree")
        columns.append(arrays)
        lengths.append(sizes.pop() if sizes else 1)
    stage = _column("stage", [arrays[0] for arrays in columns], lengths, np.int32, 0, _LARGEST)
    kind = _column("kind", [arrays[1] for arrays in columns], lengths, np.int8, 0, _LAST_KIND)
    microbatch = _column("microbatch", [arrays[2] for arrays in columns], lengths, np.int32, -1, _LARGEST)
    if all(len(arrays) == 3 for arrays in columns):
        joined = np.zeros(len(stage), np.bool_)
    else:
        joined = _column("joined", [arrays[3] if len(arrays) > 3 else _NOT_JOINED for arrays in columns], lengths, np.bool_, 0, 1)
    device = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return len(lengths), (device, stage, kind, microbatch, joined)


def rows_of_stream(stream: Iterable[Slot | str | tuple[int, Any, int | None]]) -> tuple[NDArray[np.int64], ...]:
    """(rows,) stage, kind, microbatch and joined of one device's ops."""
    rows: list[tuple[int, int, int, bool]] = []
    for item in stream:
        slot = parse_op(item) if isinstance(item, str) else item
        if isinstance(slot, Pair):
            rows.append(_row(slot.first, False))
            rows.append(_row(slot.second, True))
        else:
            rows.append(_row(slot, False))
    return tuple(np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def distinct(values: NDArray[Any]) -> NDArray[np.int64]:
    """Sorted distinct whole numbers of at least 0; never an array as long as the highest, which may be a typing error."""
    if int(values.max(initial=0)) > 4 * len(values) + 1000:
        return np.unique(values)
    return np.flatnonzero(np.bincount(values))


def _row(op: Any, joined: bool) -> tuple[int, int, int, bool]:
    try:
        stage, kind, microbatch = op
        kind = Kind[kind] if isinstance(kind, str) else Kind(kind)
        if isinstance(stage, bool) or isinstance(microbatch, bool):
            raise TypeError
        number = -1 if microbatch is None else int(microbatch.__index__())
        row = (int(stage.__index__()), int(kind), number, joined)
    except (TypeError, ValueError, KeyError, AttributeError):
        raise ScheduleError(f"{op!r} is not an op; an op is (stage, kind, microbatch), as in Op(2, Kind.F, 0), or a text such as '2F0'") from None
    if row[0] < 0 or (microbatch is not None and number < 0) or max(row[0], number) > _LARGEST:
        raise ScheduleError(f"{op!r} has a stage or microbatch outside 0..999999999")
    return row


def _column(name: str, parts: list[NDArray[Any]], lengths: list[int], dtype: type[np.generic], lowest: int, highest: int) -> NDArray[Any]:
    """Joins the parts of one column, of which a scalar fills its length; a float or a number out of range would be bent to fit."""
    if 0 in lengths:  # an empty list has no type worth minding
        parts = [part for part, length in zip(parts, lengths, strict=True) if length]
        lengths = [length for length in lengths if length]
    types = {part.dtype for part in parts}
    for given in types:
        if given.kind not in "iub":
            raise ScheduleError(f"{name} must hold whole numbers, got an array of {given}")
    arrays = sum(part.ndim for part in parts)
    if arrays == len(parts) and types == {np.dtype(dtype)}:
        column, bounds = np.concatenate(parts), [0]
    else:
        column, bounds = np.zeros(0, dtype), [0]
        bounds += [int(part) for part in parts if not part.ndim]
        bounds += [int(bound) for part in parts if part.ndim and not np.can_cast(part.dtype, dtype) for bound in (part.min(), part.max())]
        if parts and lowest <= min(bounds) <= max(bounds) <= highest:  # so everything fits
            if not arrays:
                return np.repeat(np.array(parts, dtype), lengths)
            column = np.concatenate(
                [part.astype(dtype) if part.ndim else np.full(length, part, dtype) for part, length in zip(parts, lengths, strict=True)]
            )
    if len(column):
        bounds += [int(column.min()), int(column.max())]
    if not lowest <= min(bounds) <= max(bounds) <= highest:
        raise ScheduleError(f"{name} must lie within {lowest}..{highest}, got values from {min(bounds)} to {max(bounds)}")
    return column


def edges_of(graph: Iterable[tuple[int, int]] | None) -> tuple[tuple[int, int], ...] | None:
    """The edges of a stage graph, sorted, each once; None for the chain."""
    return None if graph is None else tuple(sorted({(int(a), int(b)) for a, b in graph}))
