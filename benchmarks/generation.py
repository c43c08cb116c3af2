"""How long do generating and checking a million ops take, and how long the imports that every command pays for?

Run ``python benchmarks/generation.py``. Times are printed; counts are asserted.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from time import perf_counter, process_time

from pipesim import Schedule
from pipesim.registry import find

REPEATS = 7


def main() -> None:
    """Answers both questions."""
    generation(p=128, m=4096)
    imports()


def generation(p: int, m: int) -> None:
    """Generates and checks 1F1B; a checked schedule is made anew each time, because it remembers that it was checked."""
    generate = find("1f1b")
    made, checked = [], []
    for _ in range(REPEATS):
        start = process_time()
        schedule = generate(p, m)
        middle = process_time()
        schedule.check()
        made.append(middle - start)
        checked.append(process_time() - middle)
        counts(schedule, p, m)
    total = statistics.median(a + b for a, b in zip(made, checked, strict=True))
    print(f"1F1B p={p} m={m}, {len(schedule)} ops; medians of {REPEATS}")
    row("generate", statistics.median(made))
    row("check", statistics.median(checked))
    row("both (goal: below 0.5 s)", total)


def counts(schedule: Schedule, p: int, m: int) -> None:
    """What must be there, whatever it takes."""
    assert len(schedule) == schedule.num_slots == 2 * p * m
    assert (schedule.num_devices, schedule.num_stages, schedule.num_microbatches) == (p, p, m)


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
