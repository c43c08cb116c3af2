"""Exported schedules run unmodified in PyTorch's own pipeline runtime, on gloo, and give the gradients of one process.

PyTorch's runtime matches what two ranks send each other by order alone: a listing in which messages cross gives wrong gradients there.
On its first stage I does nothing and W runs the whole backward; at the end of the step the gradients are the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipesim import Kind, Pair, ScheduleError, available, crossings, generate, lower
from pipesim.schedule import Schedule

pytest.importorskip("torch")

WORKER = Path(__file__).with_name("pytorch_runtime_worker.py")

# Schedules that PyTorch's runtime cannot express, by their first names, with 2 and 4 devices.
LEFT_OUT = {
    2: {
        "gems": "replicas",
        "chimera": "replicas",
        "dualpipe": "replicas",
        "pipedream": "updates",
        "pipedream-2bw": "updates",
        "pipemare": "updates",
        "spectrain": "updates",
        "ampnet": "updates",
        "1f1b-recompute": "recompute",
        "gpipe-recompute": "recompute",
        "graphpipe": "stage graph",
        "pipad": "size",  # three devices, and forward only
    },
}
LEFT_OUT[4] = {**LEFT_OUT[2], "bpipe": "offload"}  # with two devices it has nothing to offload


def why_not(schedule: Schedule) -> str | None:
    """What PyTorch's runtime has no word for."""
    if schedule.graph is not None:
        return "stage graph"
    if schedule.replicas:
        return "replicas"
    for kind, what in ((Kind.U, "updates"), (Kind.R, "recompute"), (Kind.OFFLOAD, "offload")):
        if schedule.has(kind):
            return what
    if any(isinstance(slot, Pair) and not str(slot).endswith("OVERLAP_F_B") for stream in schedule.streams for slot in stream):
        return "pairs"
    return None


def expressible(processes: int) -> tuple[dict[str, Schedule], dict[str, str]]:
    """The registered schedules that PyTorch can run with so many processes, and why not the others."""
    found, left_out, seen = {}, {}, set()
    for name, generator in available().items():
        if generator in seen:
            continue
        seen.add(generator)
        try:
            schedule = generate(name, processes, 2 * processes)
        except ScheduleError:
            left_out[name] = "size"
            continue
        reason = why_not(schedule)
        if reason is None:
            found[name] = schedule
        else:
            left_out[name] = reason
    return found, left_out


def cases_of(schedules: dict[str, Schedule], folder: Path) -> list[dict[str, Any]]:
    """A CSV for each schedule: receives early, late (called "crossed" where messages cross), and the bare compute order."""
    cases = []
    for name, schedule in schedules.items():
        late = lower(schedule, "late")
        forms = {"early": lower(schedule), "compute": schedule, "crossed" if crossings(late) else "late": late}
        for form, listing in forms.items():
            path = folder / f"{name}-{form}.csv"
            listing.to_csv(path)
            cases.append(
                {
                    "name": path.stem,
                    "csv": str(path),
                    "format": "compute_only" if form == "compute" else "compute_comms",
                    "stages": schedule.num_stages,
                    "microbatches": schedule.num_microbatches,
                    "owners": [schedule.placement[stage][0] for stage in range(schedule.num_stages)],
                }
            )
    return cases


def launch(cases: list[dict[str, Any]], processes: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Runs the cases one after the other in one set of processes: name to the outcome on every rank that got so far."""
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = []
    try:
        for rank in range(processes):
            command = [sys.executable, "-W", "ignore", str(WORKER), str(folder), str(rank), str(processes)]
            with (folder / f"rank{rank}.log").open("w") as log:
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        deadline = time.monotonic() + 150
        for rank in ranks:
            rank.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # what is missing is told below
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    outcomes: dict[str, list[dict[str, Any]]] = {case["name"]: [] for case in cases}
    for rank in range(processes):
        results = folder / f"rank{rank}.jsonl"
        for line in results.read_text().splitlines() if results.exists() else ():
            outcome = json.loads(line)
            outcomes[outcome["name"]].append(outcome)
    return outcomes


def explain(folder: Path, outcomes: dict[str, list[dict[str, Any]]], processes: int) -> str:
    """The first case that not every rank finished, and the ends of the ranks' logs."""
    first = next((f"{name}: {found}" for name, found in outcomes.items() if len(found) < processes or any("failure" in one for one in found)), "")
    return first + "".join(f"\nrank {rank}: {(folder / f'rank{rank}.log').read_text()[-1500:]}" for rank in range(processes))


@pytest.mark.parametrize("processes", [2, 4])
def test_the_schedules_left_out_are_those_that_pytorch_cannot_express(processes: int) -> None:
    assert expressible(processes)[1] == LEFT_OUT[processes]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_exports_run_in_pytorch_with_the_gradients_of_one_process(processes: int, tmp_path: Path) -> None:
    schedules, _ = expressible(processes)
    assert len(schedules) > 20
    cases = cases_of(schedules, tmp_path)
    outcomes = launch(cases, processes, tmp_path)
    complete = all(len(found) == processes and all("error" in one for one in found) for found in outcomes.values())
    assert complete, explain(tmp_path, outcomes, processes)
    errors = {name: max(one["error"] for one in found) for name, found in outcomes.items()}
    crossed = {name for name in errors if name.endswith("-crossed")}
    # float64, and sums in another order
    assert {name: error for name, error in errors.items() if name not in crossed and not error < 1e-12} == {}
    # and a crossing is no formality: a stage takes another tensor for its own, and nothing says so but the gradients
    assert "zb-v-crossed" in crossed
    assert {name: errors[name] for name in crossed if errors[name] < 0.1} == {}
