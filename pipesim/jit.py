"""The door to numba (``pipesim[fast]``), which is imported in this file alone, and only when a run asks for it.

A loop is a plain function over arrays. Each is compiled at its first use on a machine, for the types of its first arguments,
and then kept on disk, beside the package, or where that is read-only in the user's cache folder; ``NUMBA_CACHE_DIR`` names
another place. The engine's loops are in :mod:`pipesim.engine.kernels`, those of everything below it in :mod:`pipesim.loops`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["call", "columns", "installed", "is_loaded"]


def installed() -> bool:
    """Whether numba is there, without importing it."""
    return is_loaded() or importlib.util.find_spec("numba") is not None


def is_loaded() -> bool:
    """Whether this process has a compiled loop, so that numba costs nothing more than the loading of the next one."""
    return bool(_loops)


def columns(*arrays: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """The arrays as loops want what they only read: contiguous and read-only. Another type would be compiled for, for seconds."""
    result = []
    for array in arrays:
        column = np.ascontiguousarray(array)
        if column.flags.writeable:
            column = column.view()
            column.flags.writeable = False
        result.append(column)
    return tuple(result)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the compiled form of a loop; compiles it, or loads it from disk, the first time."""
    loop = _loops.get(function)
    return (_load(function, arguments) if loop is None else loop)(*arguments)


_loops: dict[Callable[..., Any], Any] = {}


def _load(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Compiles for these types of arguments; of several processes that come here together, one compiles and the others load."""
    import numba
    from numba.core import event

    class Notice(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            _say_once("pipesim compiles its fast engine, once per installation; this takes some seconds")

        def on_end(self, event: Any) -> None:
            pass

    options = {"nogil": True, "error_model": "numpy"}
    try:
        loop = numba.njit(function, cache=True, **options)
    except RuntimeError:  # numba has tried NUMBA_CACHE_DIR, the package's folder and the user's cache folder
        _say_once("pipesim finds no folder to keep compiled code in, so every process compiles it again; set NUMBA_CACHE_DIR to one")
        loop = numba.njit(function, **options)
    types = tuple(numba.typeof(argument) for argument in arguments)
    with _one_process(loop.stats.cache_path), event.install_listener("numba:compile", Notice()):
        loop.compile(types)
    _loops[function] = loop
    return loop


@contextlib.contextmanager
def _one_process(folder: str | None) -> Iterator[None]:
    """Holds a lock file in the folder of the compiled code, where there is one and the system has such locks."""
    if folder is None or importlib.util.find_spec("fcntl") is None:
        yield
        return
    import fcntl

    with Path(folder, "pipesim.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
