"""Losses, gradients and weights of real two- and four-rank runs on gloo, against the same model in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipesim import ScheduleError, available, generate
from pipesim.replay import ReplayModel, Settings, Task, replay_all
from pipesim.replay.program import compute_schedule
from pipesim.schedule import Schedule

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow


def schedules(devices: int) -> list[Schedule]:
    """Every registered schedule once, with the first legal number of microbatches."""
    found: dict[object, Schedule] = {}
    for name, generator in available().items():
        for microbatches in (4, 8, 2, 1):
            if generator in found:
                break
            try:
                found[generator] = generate(name, devices, microbatches)
            except ScheduleError:
                continue
    return list(found.values())


def wrong(task: Task, folder: Path) -> list[str]:
    """How a run differs from its reference: bit for bit, or within rounding where three or more replicas are summed in the backend's order."""
    from pipesim.replay.records import read_facts
    from pipesim.replay.reference import reference
    from pipesim.replay.result import losses_of

    schedule = compute_schedule(task.schedule)
    expected = reference(task.schedule, task.settings)
    name = f"{schedule.name} on {schedule.num_devices}"
    summed = max(len(owners) for owners in schedule.placement.values()) * task.settings.data
    rounding = summed > 2 or schedule.graph is not None
    # the extrapolation is one expression in the reference and another, in place, in the replay
    rounding = rounding or schedule.weights == "predict"

    def differs(one: torch.Tensor, other: torch.Tensor) -> bool:
        if one.shape != other.shape:
            return True
        return not (torch.allclose(one, other, rtol=1e-4, atol=1e-7) if rounding else torch.equal(one, other))

    facts = [read_facts(folder / f"rank{device}.facts") for device in range(schedule.num_devices)]
    found = []
    losses = losses_of([one for one in facts if one is not None])
    if len(losses) != len(expected.losses) or any(a.keys() != b.keys() for a, b in zip(losses, expected.losses, strict=True)):
        return [f"{name}: losses are of other microbatches"]
    for step, (got, wanted) in enumerate(zip(losses, expected.losses, strict=True)):
        if any(differs(torch.tensor(got[key]), torch.tensor(wanted[key])) for key in wanted):
            found.append(f"{name}: losses of iteration {step} are {got}, right is {wanted}")
    for rank in range(schedule.num_devices * task.settings.data):
        tensors = torch.load(folder / f"rank{rank}.tensors", weights_only=True)
        for stage, weights in tensors["weights"].items():
            if any(differs(a, b) for a, b in zip(weights, expected.weights[stage], strict=True)):
                found.append(f"{name}: rank {rank} ends with other weights of stage {stage}")
        counts: dict[int, int] = {}
        every = []  # (stage, flat gradients) in order of updates, all iterations one after the other
        for one in tensors["gradients"]:
            every += list(one.items())
        for stage, gradients in every:
            number = counts.get(stage, 0)
            counts[stage] = number + 1
            updates = int(schedule.staleness.update[stage].max()) + 1
            step, update = divmod(number, updates)
            if differs(gradients, expected.gradients[step][stage, update]):
                found.append(f"{name}: rank {rank}, iteration {step}, update {update} of stage {stage} has other gradients")
        trained = {stage for stage in schedule.device_stages[rank % schedule.num_devices] if (schedule.backward_rows[stage] >= 0).any()}
        if set(counts) != trained:
            found.append(f"{name}: rank {rank} updated stages {sorted(counts)}, and has {sorted(trained)}")
    return found


@pytest.mark.parametrize("devices", [2, 4])
def test_every_schedule_gives_what_one_device_gives(devices: int, tmp_path: Path) -> None:
    kinds = {2: ReplayModel("transformer", hidden=16, heads=2, sequence=4, vocabulary=11, microbatch=2), 4: ReplayModel(hidden=8, microbatch=3)}
    tasks = []
    for number, schedule in enumerate(schedules(devices)):
        model = replace(kinds[devices], layers=2 * schedule.num_stages)
        momentum = 0.9 if schedule.weights == "predict" or number % 2 else 0.0
        optimizer = "adam" if schedule.weights == "flush" and number % 3 == 0 else "sgd"  # torch's own in the reference
        settings = Settings(
            model, iterations=4 // devices, warm_up=0, optimizer=optimizer, learning_rate=0.1, momentum=momentum, batched=number % 2 == 1, keep=True
        )
        tasks.append(Task(schedule, settings))
    assert len(tasks) > 25
    replay_all(tasks, tmp_path)
    found = [text for number, task in enumerate(tasks) for text in wrong(task, tmp_path / str(number))]
    assert not found, "\n".join(found)
