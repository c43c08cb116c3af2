"""What does the whole path cost, generate, check, simulate and every figure, from a thousand ops to ten million, in time and memory?

Run ``python benchmarks/whole_path.py`` (about two minutes and 4 GB; it needs numba). Counts and closed forms are asserted.

Each size runs in a process of its own: one for the time, medians of CPU seconds, in which freed memory stays with the process
(on a virtual machine that hands it back to its host, touching it anew may take longer than the work), and one that runs the
path once, whose peak is the memory.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from time import process_time

from pipesim import Schedule, Timeline, UniformCosts, generate, simulate

SIZES = ((8, 64), (16, 320), (32, 1600), (128, 4096), (128, 40_000))
LATENCY = UniformCosts(forward=1, backward=2, latency=0.25)
# messages that take room in memory and time on their links: the curves then depend on every message
BYTES = UniformCosts(forward=1, backward=2, message=1, bandwidth=10, latency=0.05)
COSTS = {"latency": LATENCY, "bytes": BYTES}
STAGES = ("generate", "check", "simulate", "figures")


def main() -> None:
    """A row per size."""
    for what in COSTS:
        print(f"1F1B, links with {what}: CPU time per stage, nanoseconds per op, peak RSS of one run in a fresh process")
        print(f"  {'p':>4}{'m':>7}{'ops':>10}" + "".join(f"{stage:>12}" for stage in (*STAGES, "whole")) + f"{'ns/op':>9}{'memory':>10}")
        per_op = {}
        for p, m in SIZES:
            answers = child("--time", what, p, m, MALLOC_TRIM_THRESHOLD_="100000000000", MALLOC_MMAP_MAX_="0")
            (peak,) = child("--memory", what, p, m)
            whole, ops = sum(answers), 2 * p * m
            per_op[ops] = whole / ops
            cells = "".join(f"{seconds * 1e3:9.2f} ms" for seconds in (*answers, whole))
            print(f"  {p:4}{m:7}{ops:10}{cells}{whole / ops * 1e9:9.0f}{peak:7.0f} MB", flush=True)
        print(f"  dearest op against cheapest (goal: at most 3): {max(per_op.values()) / min(per_op.values()):.1f}")


def child(*arguments: object, **environment: str) -> list[float]:
    """Runs this file with these arguments in a process of its own; returns the numbers that it prints."""
    command = [sys.executable, __file__, *map(str, arguments)]
    run = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
    return [float(number) for number in run.stdout.split()]


def whole_path(costs: UniformCosts, p: int, m: int) -> list[float]:
    """Runs the path once, and returns the seconds of its stages."""
    seconds = []

    def stage(function: Callable[[], object]) -> object:
        start = process_time()
        result = function()
        seconds.append(process_time() - start)
        return result

    from pipesim.registry import find

    schedule = stage(lambda: find("1f1b")(p, m))
    assert isinstance(schedule, Schedule)
    stage(schedule.check)
    run = stage(lambda: simulate(schedule, costs, engine="compiled"))
    assert isinstance(run, Timeline)
    figures = stage(run.figures)
    assert isinstance(figures, dict)
    assert len(schedule) == 2 * p * m
    assert figures["messages"] == 2 * (p - 1) * m
    assert all(abs(busy - 3 * m) < 1e-6 * m for busy in figures["busy"])
    assert figures["peak_activations"] == [min(m, p - device) for device in range(p)]
    assert all(sum(causes.values()) - (run.makespan - 3 * m) < 1e-6 * run.makespan for causes in figures["idle_causes"])
    return seconds


def time_one(costs: UniformCosts, p: int, m: int) -> None:
    """Medians of the stages, after a run that is not counted."""
    ops = 2 * p * m
    runs = [
        whole_path(costs, p, m) for _ in range(1 + (301 if ops < 10**4 else 51 if ops < 10**5 else 9 if ops < 10**6 else 7 if ops < 10**7 else 3))
    ]
    print(*(statistics.median(column) for column in zip(*runs[1:], strict=True)))


if __name__ == "__main__":
    if sys.argv[1:]:
        simulate(generate("1f1b", 2, 2), LATENCY, engine="compiled")  # loaded before anything is measured
        costs, size = COSTS[sys.argv[2]], (int(sys.argv[3]), int(sys.argv[4]))
        if sys.argv[1] == "--time":
            time_one(costs, *size)
        else:
            whole_path(costs, *size)
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000)  # Linux counts kB
    else:
        main()
