"""What does the SimPy engine cost per op, how does it grow, and how much memory does a large run take?

Run ``python benchmarks/simpy_engine.py``. Times are printed; counts are asserted, so that a wrong answer is never a fast one.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from time import process_time

import simpy

from pipesim import Schedule, Timeline, UniformCosts, generate, simulate

REPEATS = 7
# every message takes 0.1 + 0.05 slots: links with a queue, and no hop that changes the order of 1F1B
LINKS = UniformCosts(forward=1, backward=2, message=1, bandwidth=10, latency=0.05)


def main() -> None:
    """Answers the three questions."""
    ratio_to_bare_simpy(p=32, m=512)
    growth((8, 64), (64, 2048))
    memory(p=64, m=2048)


def ratio_to_bare_simpy(p: int, m: int) -> None:
    """Compares a run with a bare process of two timeouts per op, in turn, so that both see the same machine."""
    schedule = generate("1f1b", p, m)
    ops = schedule.num_slots
    assert simulate(schedule, UniformCosts(forward=1, backward=2), engine="simpy").makespan == (m + p - 1) * 3
    engine, bare = [], []
    for _ in range(REPEATS):
        bare.append(timed(lambda: bare_simpy(ops)))
        engine.append(timed(lambda: run(schedule, p, m)))
    print(f"1F1B p={p} m={m} with links, {ops} ops, {2 * (p - 1) * m} messages; medians of {REPEATS}")
    row("bare SimPy, two timeouts per op", statistics.median(bare), ops)
    row("simulate", statistics.median(engine), ops)
    print(f"  {'ratio (goal: at most 4)':<42}{statistics.median(engine) / statistics.median(bare):8.2f}")


def growth(small: tuple[int, int], large: tuple[int, int]) -> None:
    """Compares the cost per op of a small and a large run."""
    cost = {}
    print(f"cost per op as the run grows; medians of {REPEATS} and {max(3, REPEATS // 2)}")
    for (p, m), repeats in ((small, REPEATS), (large, max(3, REPEATS // 2))):
        schedule = generate("1f1b", p, m)
        run(schedule, p, m)
        seconds = statistics.median(timed(lambda schedule=schedule, p=p, m=m: run(schedule, p, m)) for _ in range(repeats))  # type: ignore[misc]
        cost[p, m] = seconds / schedule.num_slots
        row(f"p={p} m={m}, {schedule.num_slots} ops", seconds, schedule.num_slots)
    print(f"  {'growth (goal: below 1.5)':<42}{cost[large] / cost[small]:8.2f}")


def memory(p: int, m: int) -> None:
    """Runs the large one in a process of its own, whose peak is then that run's."""
    command = [sys.executable, __file__, "--peak", str(p), str(m)]
    peak = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(f"memory of a process that runs p={p} m={m} once\n  {'peak RSS (goal: below 500 MB)':<42}{peak:8.0f} MB")


def run(schedule: Schedule, p: int, m: int) -> Timeline:
    """One run, its counts and its known answer asserted."""
    timeline = simulate(schedule, LINKS, engine="simpy")
    assert timeline.schedule.num_slots == 2 * p * m
    assert len(timeline.messages) == 2 * (p - 1) * m
    assert timeline.busy == [3.0 * m] * p
    # Without links (m + p - 1)(F + B). With hops of c the critical path goes down and up the pipeline, 2(p - 1) hops, once for
    # every p microbatches, and 2(p - 2) hops more in the drain: 28 c for p = 4, m = 16, the 85 - 57 of an independent replay.
    expected = (m + p - 1) * 3 + 0.15 * (2 * (p - 1) * m / p + 2 * (p - 2))
    assert abs(timeline.makespan - expected) < 1e-9 * expected, (timeline.makespan, expected)
    return timeline


def bare_simpy(ops: int) -> None:
    """A process that does nothing but yield two timeouts per op."""
    env = simpy.Environment()

    def process() -> object:
        for _ in range(ops):
            yield env.timeout(1)
            yield env.timeout(2)

    env.process(process())  # type: ignore[arg-type]
    env.run()
    assert env.now == 3 * ops


def timed(function: Callable[[], object]) -> float:
    """CPU seconds of one call: a run is one thread, and what else the machine does should not count."""
    start = process_time()
    function()
    return process_time() - start


def row(name: str, seconds: float, ops: int) -> None:
    """Prints one line of the table."""
    print(f"  {name:<42}{seconds:8.3f} s{seconds / ops * 1e6:10.2f} us/op")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        devices, microbatches = map(int, sys.argv[2:4])
        run(generate("1f1b", devices, microbatches), devices, microbatches)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000)  # Linux counts kB
    else:
        main()
