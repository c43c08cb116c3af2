"""What a rank writes down while it runs, in files that outlive it: times of whole iterations, progress, facts, an error.

Needs no torch. The files are memory maps, so a rank that is killed loses the iteration it was in and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.files import write_atomically

__all__ = ["COLUMNS", "SETTING_UP", "Recorder", "open_progress", "read_facts", "read_times", "write_facts"]

SETTING_UP = -3  # in place of the number of an iteration
COLUMNS = ("start", "end", "departed", "arrived", "move_start", "move_end")


def open_progress(folder: Path, rank: int, create: bool = False) -> NDArray[np.int64]:
    """(4,) int64: iteration (or SETTING_UP), step, task and beats of a rank; a beat is a sign of life outside of the steps."""
    path = folder / f"rank{rank}.progress"
    if create:
        np.array([SETTING_UP, 0, 0, 0]).tofile(path)
    return np.memmap(path, np.int64, "r+", shape=(4,))


class Recorder:
    """Times of a rank: (iterations, all columns side by side), after the number of iterations that are complete.

    Args:
        folder: Of the run.
        rank: Whose times.
        widths: Column to its length.
        iterations: How many at most.
    """

    def __init__(self, folder: Path, rank: int, widths: Mapping[str, int], iterations: int) -> None:
        self._widths = {name: int(widths[name]) for name in COLUMNS}
        width = sum(self._widths.values())
        path = folder / f"rank{rank}.times"
        np.zeros(1 + iterations * width, np.int64).tofile(path)
        self._data = np.memmap(path, np.int64, "r+", shape=(1 + iterations * width,))
        self._table = self._data[1:].reshape(iterations, width)

    def add(self, times: Mapping[str, list[int]]) -> None:
        """Writes an iteration."""
        number = int(self._data[0])
        self._table[number] = np.concatenate([np.asarray(times[name], np.int64) for name in COLUMNS])
        self._data[0] = number + 1


def read_times(folder: Path, rank: int, widths: Mapping[str, int]) -> dict[str, NDArray[np.int64]]:
    """Column to (complete iterations, length) ns."""
    try:
        data = np.fromfile(folder / f"rank{rank}.times", np.int64)
    except OSError:
        data = np.zeros(0, np.int64)
    count = int(data[0]) if len(data) else 0
    width = sum(int(widths[name]) for name in COLUMNS)
    table = data[1 : 1 + count * width].reshape(count, width)
    bounds = np.cumsum([0, *(int(widths[name]) for name in COLUMNS)])
    return {name: table[:, bounds[place] : bounds[place + 1]] for place, name in enumerate(COLUMNS)}


def write_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Writes facts as JSON, whole or not at all."""
    write_atomically(path, json.dumps(facts))


def read_facts(path: Path) -> dict[str, Any] | None:
    """What :func:`write_facts` wrote, or None."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
