"""What a replay says when something breaks, and what it keeps."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pipesim import DeadlockError, Schedule, ScheduleError, UniformCosts, generate, load
from pipesim.replay import ReplayError, ReplayModel, Settings, Task, replay, replay_all

torch = pytest.importorskip("torch")

# A layer that works, until on rank 1 its forward has been called a number of times: then it does what it is told.
BROKEN = """
import os, signal, time
import torch

class Layer(torch.nn.Linear):
    calls = 0
    def forward(self, x):
        if os.environ.get("RANK") == "1" and x.requires_grad:
            Layer.calls += 1
            if Layer.calls == {calls}:
                {what}
        return super().forward(x)

def layers():
    return [Layer(4, 4), Layer(4, 4)]
"""


def broken(folder: Path, what: str, calls: int) -> ReplayModel:
    path = folder / "model.py"
    path.write_text(BROKEN.format(what=what, calls=calls))
    return ReplayModel(f"{path}:layers", shape=(2, 4))


# 1F1B with two microbatches: rank 1 calls its layer twice per iteration, in warm-up (0 here), in the one for bytes, then in those that
# are measured. Its 6th call with a graph is 1F1 of the second measured iteration, so one iteration is complete.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
        ('raise RuntimeError("the cat is on the keyboard")', "the cat is on the keyboard"),
        ("torch.empty(1 << 55)", "out of memory"),
    ],
)
def test_a_rank_that_dies_is_named_and_what_was_measured_is_kept(what: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ReplayError) as caught:
        replay(generate("1f1b", 2, 2), model=broken(tmp_path, what, 6), iterations=3, warm_up=0)
    assert "rank 1 (device 1, 1f1b, iteration 1, op 1F1)" in str(caught.value)
    assert said in str(caught.value)
    partial = caught.value.partial
    assert partial is not None
    assert partial.steps == 1
    assert said in partial.info["partial"]
    partial.save(tmp_path / "run.json.gz")
    assert load(tmp_path / "run.json.gz").info["partial"] == partial.info["partial"]


@pytest.mark.slow
def test_what_was_complete_before_a_failure_is_kept(tmp_path: Path) -> None:
    # as above; each task loads the model anew, so the first, of one iteration, calls it 4 times, and the second breaks as it would alone
    model = broken(tmp_path, 'raise RuntimeError("enough")', 6)
    first, second = (Task(generate(name, 2, 2), Settings(model, iterations=count, warm_up=0)) for name, count in (("1f1b", 1), ("gpipe", 3)))
    with pytest.raises(ReplayError, match="enough") as caught:
        replay_all([first, second])
    assert "gpipe, iteration 1" in str(caught.value)
    assert caught.value.partial is not None
    assert caught.value.partial.schedule.name == "gpipe"
    (kept,) = caught.value.complete
    assert (kept.schedule.name, kept.steps) == ("1f1b", 1)
    assert "partial" not in kept.info


@pytest.mark.slow
def test_ranks_that_are_stuck_are_stopped_and_each_says_where(tmp_path: Path) -> None:
    before = time.monotonic()
    with pytest.raises(ReplayError) as caught:
        replay(generate("1f1b", 2, 2), model=broken(tmp_path, "time.sleep(1000)", 4), iterations=3, warm_up=0, timeout=5.0)
    assert time.monotonic() - before < 500  # it does end
    lines = str(caught.value).splitlines()
    assert lines[0] == "no rank made progress for 5 s, so all were stopped"
    assert lines[2] == "  rank 1 (device 1, 1f1b, iteration 0, op 1F1)"
    assert caught.value.partial is None


def test_a_schedule_that_cannot_finish_is_refused_before_anything_starts() -> None:
    # each device wants first what the other does last
    schedule = Schedule.from_text("0F0 1F1 0F1 1F0\n2F1 3F0 2F0 3F1", graph=[(0, 2), (2, 1), (1, 3)])
    with pytest.raises(DeadlockError, match="device 0"):
        replay(schedule)


def test_a_listing_that_cannot_finish_is_refused_before_anything_starts() -> None:
    listing = "0F0 0SEND_F0 1F1 1SEND_F1 0F1 0SEND_F1 1F0 1SEND_F0\n2RECV_F1 2F1 2SEND_F1 3RECV_F0 3F0 2RECV_F0 2F0 2SEND_F0 3RECV_F1 3F1"
    listing = listing.replace("1F1 1SEND_F1", "1RECV_F1 1F1 1SEND_F1").replace("1F0 1SEND_F0", "1RECV_F0 1F0 1SEND_F0")
    with pytest.raises(DeadlockError, match="device 0"):
        replay(Schedule.from_text(listing, graph=[(0, 2), (2, 1), (1, 3)]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "emulate"}, "wants costs"),
        ({"mode": "emulate", "costs": UniformCosts()}, "in seconds"),
        ({"costs": UniformCosts()}, "leave out the costs"),
        ({"backend": "mpi"}, "backend must be one of gloo, nccl"),
        ({"mode": "solo", "data": 2}, "data parallelism"),
        ({"timeout": 0.0}, "timeout"),
        ({"model": ReplayModel("mpl")}, "did you mean 'mlp'"),
        ({"model": ReplayModel("transformer", hidden=10, heads=4)}, "multiple of heads"),
        ({"model": ReplayModel("a.py:b")}, "--batch-shape"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(options: dict[str, object], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        replay(generate("1f1b", 2, 2), **options)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_nccl_without_cuda_is_said() -> None:
    from pipesim.replay.worker import torch_device

    with pytest.raises(ScheduleError, match="needs CUDA devices, and this machine has none"):
        torch_device(Settings(backend="nccl"))


def test_too_few_layers_are_said() -> None:
    with pytest.raises(ScheduleError, match="has 2 layers and the schedule 4 stages"):
        replay(generate("interleaved-1f1b", 2, 2), model=ReplayModel(layers=2))


def test_a_world_of_another_size_is_said(tmp_path: Path) -> None:
    import numpy as np

    from pipesim.replay.worker import Rank

    task = Task(generate("1f1b", 4, 4), Settings())
    with pytest.raises(ScheduleError, match=r"needs 4 ranks, and the world has 2: --nproc-per-node 4"):
        Rank(task.data(task.program()), 0, 2, tmp_path, np.zeros(4, np.int64))
