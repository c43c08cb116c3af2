"""Real runs on gloo, in one launch where they can be: what the Timeline of each says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import pipesim as ps
from pipesim import Kind, Schedule, ScheduleError, UniformCosts, generate
from pipesim.replay import ReplayModel, Settings, Task, append, replay_all, save
from pipesim.replay.records import read_facts
from pipesim.replay.result import losses_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

SMALL = ReplayModel(hidden=8, microbatch=2)


def in_order(run: ps.Timeline) -> None:
    """What every Timeline keeps: ops one after the other, messages after their producers and before their consumers."""
    schedule, found = run.schedule, run.messages
    same = schedule.slot_device[1:] == schedule.slot_device[:-1]
    assert (run.end >= run.start).all()
    assert (run.start[:, 1:] >= run.end[:, :-1])[:, same].all()
    assert (run.start[1:].min(axis=1) >= run.start[:-1].min(axis=1)).all()
    assert (run.sent == run.end[:, found.source_slot]).all()
    assert (run.departed >= run.sent).all()
    assert (run.arrived >= run.departed).all()
    assert (run.start[:, found.target_slot] >= run.arrived).all()


def test_what_a_measured_timeline_says(tmp_path: Path) -> None:
    costs = UniformCosts(forward=0.004, backward=0.006, message=1000, activation=7, unit="s")
    tasks = [
        Task(generate("1f1b", 2, 2), Settings(SMALL, iterations=3, warm_up=1, batched=True)),  # case R04: p = 2, m = 2, batched
        Task(generate("1f1b", 2, 2), Settings(SMALL, iterations=2, warm_up=1, barrier=False, receives="late")),
        Task(generate("zb-h1", 2, 4), Settings(mode="emulate", iterations=2, warm_up=0), costs),
        Task(generate("pipedream", 2, 4), Settings(mode="emulate", iterations=2, warm_up=0), costs),
        # the same again, with other costs
        Task(generate("zb-h1", 2, 4), Settings(mode="emulate", iterations=1, warm_up=0), replace(costs, forward=0.005)),
        Task(generate("zb-h1", 2, 4), Settings(mode="emulate", iterations=1, warm_up=0), replace(costs, activation=8)),
        Task(generate("zb-h1", 2, 4), Settings(mode="emulate", iterations=1, warm_up=0), costs),
    ]
    batched, late, emulated, asynchronous, *others, same = replay_all(tasks, tmp_path)
    assert append(emulated, same).steps == 3
    for other in others:
        with pytest.raises(ScheduleError, match="same schedule and configuration"):
            append(emulated, other)
    for run in (batched, late, emulated, asynchronous):
        in_order(run)
        assert run.source == "measured"
        assert run.unit == "s"
        run.save(tmp_path / "run.json.gz")
        again = ps.load(tmp_path / "run.json.gz")
        assert again.schedule == run.schedule
        assert (again.start == run.start).all()
        assert again.info == run.info
    assert [run.steps for run in (batched, late, emulated, asynchronous)] == [3, 2, 2, 2]
    assert [run.barrier for run in (batched, late, emulated, asynchronous)] == [True, False, True, False]
    assert batched.info["mode"] == "run"
    assert batched.info["backend"] == "gloo"
    assert batched.info["messages"] == "batched, receives early"
    assert late.info["messages"] == "single, receives late"
    assert emulated.info["mode"] == "emulated"
    assert emulated.info["model"] == "none"
    # two activations and two gradients went over, and each was received
    assert len(batched.messages) == 4
    assert (batched.arrived > 0).all()
    # whatever the way of the messages, the same losses
    assert batched.info["losses"].split(", ")[:2] == late.info["losses"].split(", ")
    # with the barrier no update begins before every device has come to it: before all other ops have ended
    update = batched.schedule.kind[batched.schedule.slot_row] == int(Kind.U)
    assert (batched.start[:, update].min(axis=1) >= batched.end[:, ~update].max(axis=1)).all()
    # a sleep never ends early
    for run in (emulated, asynchronous):
        assert (run.end - run.start >= costs.durations(run.schedule) - 1e-9).all()
        assert run.footprint.message[0] == 1000
        assert run.footprint.kept[0, 0] == 7


def test_solo(tmp_path: Path) -> None:
    def task(name: str, devices: int, microbatches: int, model: ReplayModel = SMALL, **options: int) -> Task:
        return Task(generate(name, devices, microbatches), Settings(model, "solo", **options))

    tasks = [
        task("1f1b", 2, 2, iterations=1, warm_up=0),
        task("zb-h1", 2, 4, iterations=3, warm_up=1),
        task("gpipe", 1, 2, iterations=2, warm_up=0),
        task("gpipe", 1, 2, iterations=3, warm_up=1),
        task("gpipe", 1, 2, ReplayModel(hidden=16), iterations=1, warm_up=0),
    ]
    runs = replay_all(tasks)
    bytes_are_those_of_the_tensors(runs[0])
    measured_durations_are_put_together(runs[1])
    repeats_are_appended_and_others_refused(*runs[2:], path=tmp_path / "run.json.gz")


# An MLP layer from 8 to 32 and back has 8*32, 32, 32*8 and 8 weights of 4 bytes; each of the four begins at a multiple of 64: 256 + 64 + 256 + 64 = 640. What its backward needs of a microbatch of two: input (2 x 8),
# the wide layer before and after the activation (2 x 32 each), output (2 x 8, kept until it is sent): 16 + 64 + 64 + 16 numbers.
def bytes_are_those_of_the_tensors(run: ps.Timeline) -> None:
    assert run.footprint.static["weights"].tolist() == [640 * 4] * 2
    assert run.footprint.static["gradients"].tolist() == [640 * 4] * 2
    assert run.footprint.static["optimizer"].tolist() == [0, 0]
    assert run.footprint.kept[0].tolist() == [160 * 4] * 2
    assert run.footprint.message.tolist() == [16 * 4] * 4


def measured_durations_are_put_together(run: ps.Timeline) -> None:
    in_order(run)
    assert run.info["mode"] == "solo"
    assert "simulation of the measured durations" in run.info["composed"]
    assert run.steps == 3
    assert (run.arrived == run.sent).all()
    assert (run.end > run.start).all()
    assert len(np.unique(run.end[0] - run.start[0])) > 4  # measured, not typed


def repeats_are_appended_and_others_refused(first: ps.Timeline, second: ps.Timeline, other: ps.Timeline, path: Path) -> None:
    save(first, path)
    both = save(second, path)
    assert both.steps == 5
    assert ps.load(path).steps == 5
    assert both.info["runs"] == "2"
    assert (both.end[:2] == first.end).all()
    assert np.allclose(both.end[2:] - both.start[2:], second.end - second.start)
    assert both.start[2].min() >= both.end[1].max()
    with pytest.raises(ScheduleError, match="same schedule and configuration"):
        append(first, other)


CONSTANT = """
import torch

def layers():
    made = [torch.nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(4)]
    for layer, value in zip(made, (0.5, 1.5, -1.25, 0.75)):
        torch.nn.init.constant_(layer.weight, value)
    return made
"""


# PipeMare's rule by hand: stage 0 is x -> b(a x), stage 1 is h -> d(c h), the loss of a microbatch is y * y, and every weight is one number. A backward
# takes the newest weights, and the values that its forward kept: with b' the newest b, dL/da = g b' x and dL/db = g (a x) with the a of the forward.
def test_latest_weights_by_hand(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(CONSTANT)
    model = ReplayModel(f"{tmp_path / 'model.py'}:layers", shape=(1, 1), dtype="float64", seed=3)
    text = "0F0 0F1 0B0 0U0 0B1 0U1\n1F0 1B0 1U0 1F1 1B1 1U1"
    schedule = Schedule.from_text(text, weights="latest").check()
    rate = 0.125
    settings = Settings(model, iterations=1, warm_up=0, learning_rate=rate, keep=True)
    replay_all([Task(schedule, settings)], tmp_path / "run")

    from pipesim.replay.models import Batch

    inputs = [float(x) for x in Batch(model, 2, 0, torch.device("cpu")).inputs]
    a, b, c, d = 0.5, 1.5, -1.25, 0.75
    losses = []
    for _ in range(2):  # the iteration in which bytes are counted, and the one that is measured
        kept = [(a * x, b * (a * x)) for x in inputs]  # both forwards of stage 0 stand before its first update
        back = []
        losses = []
        for _, h in kept:
            y = d * (c * h)
            losses.append(y * y)
            back.append(2 * y * d * c)
            c, d = c - rate * 2 * y * d * h, d - rate * 2 * y * (c * h)
        for x, (inner, _), g in zip(inputs, kept, back, strict=True):
            a, b = a - rate * g * b * x, b - rate * g * inner
    facts = [read_facts(tmp_path / "run" / "0" / f"rank{rank}.facts") for rank in range(2)]
    (told,) = losses_of([one for one in facts if one is not None])
    assert [told["1,0"], told["1,1"]] == pytest.approx(losses, rel=1e-5)
    found = []
    for rank in range(2):
        tensors = torch.load(tmp_path / "run" / "0" / f"rank{rank}.tensors", weights_only=True)
        found += [float(weight) for weights in tensors["weights"].values() for weight in weights]
    assert found == pytest.approx([a, b, c, d], rel=1e-9)


def test_data_parallel_groups_train_on_all_of_the_data(tmp_path: Path) -> None:
    from test_right import wrong

    task = Task(generate("chimera", 2, 2), Settings(SMALL, iterations=1, warm_up=0, data=2, keep=True))
    replay_all([task], tmp_path)
    assert wrong(task, tmp_path / "0") == []


def test_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    command += ["-m", "pipesim.replay", "1f1b", "--devices", "2", "--microbatches", "2", "--iterations", "2", "--hidden", "8"]
    done = subprocess.run([*command, "--out", "run.json.gz", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)  # rank 0 alone speaks
    assert said["source"] == "measured"
    assert said["steps"] == 2
    in_order(ps.load(tmp_path / "run.json.gz"))


def test_command_line(pipesim: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    options = ("--devices", 1, "--microbatches", 2, "--hidden", 8, "--solo", "--iterations", 2)
    done = pipesim("replay", "gpipe", *options, "--out", "run.json.gz")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("measured: solo, one device after the other; CPU")
    assert ps.load(tmp_path / "run.json.gz").steps == 2
    done = pipesim("replay", "gpipe", *options, "--latency", 1)
    assert done.returncode == 2
    assert "--latency is of a simulation" in done.stderr
    done = pipesim("replay", "gpipe", *options, "--emulate")
    assert done.returncode == 2
    done = pipesim("replay", "gpipe", *options, "--layers", 0)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: layers must be at least 1, got 0\n"
