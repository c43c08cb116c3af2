"""What do the memory curves of a million ops cost?

Run ``python benchmarks/memory_curve.py``. Times are CPU seconds, printed; peaks and levels are asserted.
"""

from __future__ import annotations

import statistics
from time import process_time

from pipesim import Timeline, UniformCosts, generate, simulate

P, M = 128, 4096
REPEATS = 5


def main() -> None:
    """One table."""
    schedule = generate("1f1b", P, M)
    print(f"1F1B p={P} m={M}, {len(schedule)} ops: every device's curve, and the peaks alone; medians of {REPEATS}")
    for what, costs in (
        ("activations", UniformCosts(forward=1, backward=2, latency=0.25)),
        ("activations and message buffers", UniformCosts(forward=1, backward=2, message=1, bandwidth=10, latency=0.05)),
    ):
        curves, peaks = [], []
        for _ in range(REPEATS):
            run = simulate(schedule, costs, engine="compiled")
            start = process_time()
            points = all_curves(run)
            curves.append(process_time() - start)
            run = simulate(schedule, costs, engine="compiled")
            start = process_time()
            peak = run.peak_memory
            peaks.append(process_time() - start)
            # a device holds at least its activations, one unit each, and no more than those and a message per activation and way
            assert all(min(M, P - d) <= peak[d] <= 5 * min(M, P - d) for d in range(P))
        ops = len(schedule)
        print(f"  {what}, {points} points")
        for name, seconds in (("curves", statistics.median(curves)), ("peaks", statistics.median(peaks))):
            print(f"    {name:<10}{seconds:8.3f} s{seconds / ops * 1e9:8.0f} ns/op")


def all_curves(run: Timeline) -> int:
    """Makes the curve of every device; returns how many points they have."""
    points = 0
    for device in range(P):
        curve = run.memory(device)
        assert curve.peak >= min(M, P - device)
        assert abs(curve.total[-1]) < 1e-6  # everything is let go in the end
        points += len(curve.times)
    return points


if __name__ == "__main__":
    main()
