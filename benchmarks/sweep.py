"""How many configurations a second does a sweep run, how many draws a second a Monte Carlo, and what do they add to the runs themselves?

    python benchmarks/sweep.py [CONFIGURATIONS]

10,000 configurations by default: 1F1B and GPipe, 4 and 8 devices, 8 to 40 microbatches, 500 latencies. Prints a table; nothing
is asserted. Where this process does all the work, its CPU seconds say more than the clock on a busy machine. The first row is
what no sweep can beat in one process: the same runs in a bare loop, with their figures.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import pipesim as ps


def timed(what: str, count: int, unit: str, work: Callable[[], object]) -> None:
    before, busy_before = time.perf_counter(), time.process_time()
    work()
    wall, busy = time.perf_counter() - before, time.process_time() - busy_before
    print(
        f"{what:<50} {count:>7} {wall:>8.2f} s {count / wall:>8,.0f} {unit}/s   this process {busy:>8.2f} s CPU {count / busy:>8,.0f} {unit}/s",
        flush=True,
    )


def bare(configurations: list[dict[str, object]]) -> None:
    schedules: dict[tuple[object, ...], ps.Schedule] = {}
    for c in configurations:
        key = c["schedule"], c["devices"], c["microbatches"]
        if key not in schedules:
            schedules[key] = ps.generate(*key)
        run = ps.simulate(schedules[key], ps.UniformCosts(forward=1, backward=2, latency=c["latency"]))
        for figure in ("makespan", "iteration_time", "bubble_fraction", "bubble_overhead", "span_bubble_rate", "peak_memory", "peak_activations"):
            getattr(run, figure)


def sweeps(count: int) -> None:
    latencies = np.linspace(0, 1, max(1, count // 20))
    configurations = ps.grid(["1f1b", "gpipe"], devices=[4, 8], microbatches=[8, 16, 24, 32, 40], forward=1, backward=2, latency=latencies)
    count, cores = len(configurations), os.cpu_count() or 1
    bare(configurations[:: max(1, count // 200)])  # the compiled engine is loaded now
    timed("bare loop, figures not kept", count, "runs", lambda: bare(configurations))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        timed("run_sweep, this process, in memory", count, "runs", lambda: ps.run_sweep(configurations))
        timed("run_sweep, this process, CSV", count, "runs", lambda: ps.run_sweep(configurations, out / "one.csv"))
        ps.run_sweep(configurations[:2000], jobs=-1)  # the workers are there now
        timed(f"run_sweep, {cores} processes, CSV", count, "runs", lambda: ps.run_sweep(configurations, out / "all.csv", jobs=-1))
        timed(f"run_sweep, {cores} processes, Parquet", count, "runs", lambda: ps.run_sweep(configurations, out / "all.parquet", jobs=-1))
        timed("run_sweep again, all rows there", count, "rows", lambda: ps.run_sweep(configurations, out / "all.csv", jobs=-1))


def draws(count: int) -> None:
    schedule, costs = ps.generate("1f1b", 8, 32), ps.UniformCosts(forward=1, backward=2, latency=0.1)
    timed("monte_carlo, log-normal, 1F1B p = 8, m = 32", count, "draws", lambda: ps.monte_carlo(schedule, costs, jitter=ps.LogNormal(0.1), n=count))


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    sweeps(number)
    draws(100)
    draws(number)
