"""How long does v-auto search, what does each limit cost, and how long do the fixed building blocks take?

Run ``python benchmarks/v_auto.py``. Times are printed; peaks and bubbles are asserted, so that a wrong answer is never a fast one.
The search of sail-sg's zero-bubble repository took 9.7 s for p = 8, m = 32 on two cores of the same kind.
"""

from __future__ import annotations

from time import process_time

from pipesim import Schedule, UniformCosts, generate, simulate

UNIT = UniformCosts(forward=1, input_grad=1, weight_grad=1)
REPEATS = 3


def main() -> None:
    """Answers the three questions."""
    search(p=8, m=32)
    blocks((8, 64), (32, 512))


def search(p: int, m: int) -> None:
    """Searches at every limit from V-Min's memory to V-ZB's."""
    print(f"v-auto p={p} m={m}: limit in chunk activations, bubble in the longest span in slots, seconds (best of {REPEATS})")
    for limit in range(2 * ((p + 4) // 3), 2 * p + 1):
        schedule, seconds = timed("v-auto", p, m, memory_limit=limit)
        run = simulate(schedule, UNIT)
        assert max(run.peak_activations) <= limit
        assert run.span_bubble_rate is not None
        bubble = round(6 * m / (1 - run.span_bubble_rate) - 6 * m)
        # what zero-bubble's own search expects
        assert bubble <= 3 * p - 1 - 3 * limit + max(3 * p, p - 1 + 2 * (1 + (limit + 1) // 2))
        print(f"  {limit:3d} {bubble:4d} {seconds:8.2f}")


def blocks(*sizes: tuple[int, int]) -> None:
    """Generates the fixed blocks."""
    for p, m in sizes:
        print(f"p={p} m={m}: seconds (best of {REPEATS})")
        for name, ops in (("v-min", 6), ("v-half", 6), ("v-zb", 6), ("v-1f1b", 4)):
            schedule, seconds = timed(name, p, m)
            assert len(schedule) == ops * p * m
            print(f"  {name:7s} {seconds:7.2f}")


def timed(name: str, p: int, m: int, **options: int) -> tuple[Schedule, float]:
    """Generates, and returns the schedule and the least time that it took."""
    times = []
    for _ in range(REPEATS):
        start = process_time()
        schedule = generate(name, p, m, **options)
        times.append(process_time() - start)
    return schedule, min(times)


if __name__ == "__main__":
    main()
