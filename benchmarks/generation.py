"""How long do generating and checking take (goals: a million ops of 1F1B 0.5 s; p=32, m=512 interleaved v=4 0.1 s, zb-v 0.5 s), and imports?

Run ``python benchmarks/generation.py``. Times are printed; counts are asserted.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from time import perf_counter, process_time

from pipesim import Kind, Schedule
from pipesim.registry import find

REPEATS = 7


def main() -> None:
    """Answers both questions."""
    generation("1f1b", p=128, m=4096)
    generation("interleaved-1f1b", p=32, m=512, chunks=4)
    generation("zb-v", p=32, m=512)
    imports()


def generation(name: str, p: int, m: int, **options: int) -> None:
    """Generates and checks a schedule, made anew each time, because a checked one remembers that it was checked."""
    generate = find(name)
    made, checked = [], []
    for _ in range(REPEATS):
        start = process_time()
        schedule = generate(p, m, **options)
        middle = process_time()
        schedule.check()
        made.append(middle - start)
        checked.append(process_time() - middle)
        counts(schedule, p, m)
    total = statistics.median(a + b for a, b in zip(made, checked, strict=True))
    print(f"{name} p={p} m={m} {options or ''}, {len(schedule)} ops; medians of {REPEATS}")
    row("generate", statistics.median(made))
    row("check", statistics.median(checked))
    row("both", total)


def counts(schedule: Schedule, p: int, m: int) -> None:
    """What must be there, whatever it takes."""
    stages = schedule.num_stages
    ops = 2 if schedule.has(Kind.B) else 3  # F and B, or F, I and W
    assert len(schedule) == schedule.num_slots == ops * stages * m
    assert (schedule.num_devices, stages % p, schedule.num_microbatches) == (p, 0, m)


def imports() -> None:
    """Times whole processes, one kind after the other in turn; a process that imports nothing is what they all pay."""
    code = {"python -c pass": "pass", "import click": "import click", "import pipesim": "import pipesim"}
    commands = {name: [sys.executable, "-c", text] for name, text in code.items()}
    program = shutil.which("pipesim", path=str(sys.executable).rpartition("/")[0]) or shutil.which("pipesim")
    if program:
        commands["pipesim --help"] = [program, "--help"]
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(REPEATS):
        for name, command in commands.items():
            start = perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times[name].append(perf_counter() - start)
    print(f"whole processes, wall clock; medians of {REPEATS} (goal: pipesim --help takes about what Python and click need)")
    for name, values in times.items():
        row(name, statistics.median(values))


def row(name: str, seconds: float) -> None:
    """Prints one line of the table."""
    print(f"  {name:<42}{seconds:8.3f} s")


if __name__ == "__main__":
    main()
