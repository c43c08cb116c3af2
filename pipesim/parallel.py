"""Work shared by processes, by way of joblib: on this machine, or on many with joblib's Dask and Ray backends."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pipesim.errors import ScheduleError

__all__ = ["in_parallel"]

_ROUND = 4  # tasks per process


def in_parallel(function: Callable[..., Any], tasks: Iterable[tuple[Any, ...]], jobs: int | None, ordered: bool = True) -> Iterator[Any]:
    """Calls a function with each tuple of arguments, and yields its results as they come.

    Args:
        function: A function of a module, so that it can be sent to other processes.
        tasks: Tuples of arguments.
        jobs: Processes, -1 for one per core; None for what ``joblib.parallel_config`` says, and without it this process.
        ordered: Whether results come in the order of the tasks.
    """
    from joblib import Parallel, delayed, effective_n_jobs

    if jobs == 0:
        raise ScheduleError("jobs must be a number of processes, or -1 for one per core, got 0")
    calls = (delayed(function)(*task) for task in tasks)
    options = {"n_jobs": jobs, "batch_size": 1, **_watching()}
    try:
        shared = Parallel(**options, return_as="generator" if ordered else "generator_unordered")
    except ValueError:
        # Some backends, multiprocessing's and Ray's among them, give results only when all are there: so they get a few at a time.
        with Parallel(**options) as shared:
            while some := list(itertools.islice(calls, _ROUND * effective_n_jobs(jobs))):
                yield from shared(some)
        return
    with _interrupts_ignored():  # by the workers, which start here and inherit it: Ctrl-C is for this process to handle
        results = shared(calls)
    yield from results


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _watching() -> dict[str, Any]:
    """Lets loky's workers, joblib's usual ones, watch this process: when it is killed, they would wait for ever."""
    from joblib.parallel import get_active_backend

    if type(get_active_backend()[0]).__name__ != "LokyBackend":
        return {}
    return {"initializer": _watch, "initargs": (os.getpid(),)}


def _watch(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # also a worker that was started later
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
