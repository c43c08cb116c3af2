"""A real trace: PyTorch's own runtime under torch.profiler, two processes over gloo, imported."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipesim import Schedule, ScheduleError, UniformCosts, compare, read_traces, simulate
from pipesim.importing import import_traces

pytestmark = [pytest.mark.slow, pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")]

SCHEDULE = "0F0,0F1,0F2,0F3,0I0,0W0,0B1,0B2,0B3\n1F0,1I0,1F1,1W0,1B1,1F2,1B2,1F3,1B3\n"

WORKER = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.profiler import ProfilerActivity, profile, schedule

rank, port, csv = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
dist.init_process_group("gloo", rank=rank, world_size=2)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU()) for _ in range(3)])
x = torch.randn(32, 128)
loss = torch.nn.functional.mse_loss
for what in ("csv", "gpipe", "1f1b"):
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    if what == "csv":
        run = _PipelineScheduleRuntime([stage], 4, loss_fn=loss)
        run._load_csv(csv, format="compute_only")
    else:
        run = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[what](stage, 4, loss_fn=loss)

    def step():
        run.step(x) if rank == 0 else run.step(target=torch.zeros_like(x))

    step()
    export = lambda profiler: profiler.export_chrome_trace(f"{what}/{rank}.pt.trace.json")
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=3), on_trace_ready=export) as profiler:
        for _ in range(4):
            step()
            profiler.step()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of traces for each way to run."""
    folder = tmp_path_factory.mktemp("traces")
    (folder / "worker.py").write_text(WORKER)
    (folder / "schedule.csv").write_text(SCHEDULE)
    for what in ("csv", "gpipe", "1f1b"):
        (folder / what).mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    commands = [[sys.executable, "worker.py", str(rank), str(port), "schedule.csv"] for rank in (0, 1)]
    processes = [subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors
    return folder


def test_pytorch_runtime(traces: Path) -> None:
    schedule = Schedule.from_csv(traces / "schedule.csv")
    found = import_traces(traces / "csv", schedule)
    run = found.timeline
    assert run.schedule == schedule
    assert read_traces(traces / "csv").schedule == schedule  # also without being told
    assert (run.source, run.unit, run.steps, run.barrier) == ("measured", "s", 3, True)
    assert run.info["ranks from"] == "distributedInfo"
    assert found.problems == ()
    # both ranks are of this machine: one clock, and messages agree with it
    assert found.clocks is not None
    assert not found.clocks.shift.any()
    assert not found.clocks.contradiction
    # cause before effect, everywhere and in every step
    messages = run.messages
    assert (run.sent <= run.departed).all()
    assert (run.departed <= run.arrived).all()
    assert (run.arrived <= run.start[:, messages.target_slot]).all()
    assert (run.end > run.start).all()
    # the wait for a message is none of the op's time: rank 1 begins its first forward after rank 0 has ended its own
    first = [next(slot for slot in range(run.schedule.num_slots) if str(run.schedule.slot(slot)) == op) for op in ("0F0", "1F0")]
    assert (run.start[:, first[1]] >= run.end[:, first[0]]).all()

    difference = compare(simulate(run.schedule, UniformCosts(forward=1e-3, backward=2e-3, unit="s")), run).difference
    assert difference is not None
    assert {errors.kind: errors.ops for errors in difference.kinds} == {"F": 8, "B": 6, "I": 1, "W": 1, "I+W": 1, "all": 17}
    assert difference.slower + difference.waited_longer + difference.rest == pytest.approx(difference.makespan[1] - difference.makespan[0], abs=1e-12)


def test_pytorch_gpipe(traces: Path) -> None:
    run = read_traces(traces / "gpipe")
    assert run.schedule == Schedule.from_text("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3")
    assert run.steps == 3


def test_pytorch_1f1b_has_no_labels(traces: Path) -> None:
    with pytest.raises(ScheduleError, match="Schedule1F1B labels none of its ops"):
        read_traces(traces / "1f1b")
