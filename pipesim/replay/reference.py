"""The same model in one process and without a pipeline: what a replay must give.

A synchronous schedule is one backward of the whole model per microbatch; the gradients of a stage are added up in the order in which
the schedule makes them, so that even the rounding is the same. For an asynchronous one, every forward and backward takes the
weights of the version that the schedule says (:mod:`pipesim.staleness`), and everything is worked out from what it needs::

    weights(stage, v)     <- weights(stage, v - 1), gradient(stage, i) of every i that goes into update v - 1
    activation(stage, i)  <- activation(stage - 1, i), weights(stage, forward version)
    gradient(stage, i)    <- activation(stage, i), gradient(stage + 1, i), weights(stage, backward version)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from pipesim.op import Kind
from pipesim.replay.models import Batch, StageModel, build_stage, loss_of
from pipesim.replay.operations import microbatch_shares
from pipesim.replay.program import compute_schedule
from pipesim.replay.settings import Settings
from pipesim.schedule import Schedule

__all__ = ["Reference", "reference"]

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """What came out.

    Attributes:
        losses: Per iteration, "stage,microbatch" to the loss divided by how many share an update (data group 0).
        gradients: Per iteration, (stage, update) to the gradients of all weights, in a row.
        weights: Stage to its weights at the end.
    """

    losses: list[dict[str, float]]
    gradients: list[dict[tuple[int, int], torch.Tensor]]
    weights: dict[int, Tensors]


def reference(schedule: Schedule, settings: Settings) -> Reference:
    """Trains the model of *settings* in this process for as many iterations, warm-up and the one for bytes included.

    Args:
        schedule: The schedule, which says versions and orders.
        settings: Model, optimizer, iterations.

    Returns:
        Losses and gradients of the measured iterations, weights at the end.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)  # as the ranks have them: more threads round otherwise
    try:
        return _reference(compute_schedule(schedule), settings)
    finally:
        torch.set_num_threads(before)


def _reference(compute: Schedule, settings: Settings) -> Reference:
    cpu = torch.device("cpu")
    modules = [build_stage(settings.model, compute, stage, cpu) for stage in range(compute.num_stages)]
    batches = [Batch(settings.model, compute.num_microbatches, group, cpu) for group in range(settings.data)]
    one = _synchronous(compute, settings, modules, batches) if compute.weights == "flush" else _asynchronous(compute, settings, modules, batches[0])
    losses, gradients = [], []
    for number in range(settings.warm_up + 1 + settings.iterations):
        found = one()
        if number > settings.warm_up:
            losses.append(found[0])
            gradients.append(found[1])
    return Reference(losses, gradients, {stage: [p.detach() for p in module.parameters()] for stage, module in enumerate(modules)})


def _orders(schedule: Schedule, stage: int) -> list[list[int]]:
    """Per device of a stage, its microbatches in the order in which their weight gradients are made."""
    orders = []
    for device in schedule.placement[stage]:
        rows = (schedule.device == device) & (schedule.stage == stage) & ((schedule.kind == int(Kind.B)) | (schedule.kind == int(Kind.W)))
        orders.append(schedule.microbatch[rows].tolist())
    return orders


def _flat(tensors: Tensors) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.zeros(0)


def _added(parts: list[torch.Tensor], zero: torch.Tensor) -> torch.Tensor:
    total = zero.clone()
    for part in parts:
        total += part
    return total


def _synchronous(schedule: Schedule, settings: Settings, modules: list[StageModel], batches: list[Batch]) -> Any:
    """An iteration of a flush schedule, as a function."""
    stages = range(schedule.num_stages)
    before = {stage: [a for a, b in schedule.stage_edges if b == stage] for stage in stages}
    exits = [stage for stage in stages if all(a != stage for a, _ in schedule.stage_edges)]
    trained = [stage for stage in stages if (schedule.backward_rows[stage] >= 0).any()]
    share = microbatch_shares(schedule, settings.data)
    own = {stage: list(modules[stage].parameters()) for stage in trained}
    every = [parameter for stage in trained for parameter in own[stage]]
    optimizer: Any = None
    if every and settings.optimizer == "adam":
        optimizer = torch.optim.Adam(every, lr=settings.learning_rate)
    elif every:
        optimizer = torch.optim.SGD(every, lr=settings.learning_rate, momentum=settings.momentum)

    def microbatch(batch: Batch, number: int) -> tuple[dict[str, float], dict[int, torch.Tensor]]:
        outputs: dict[int, torch.Tensor] = {}
        while len(outputs) < len(stages):
            for stage in stages:
                if stage in outputs or any(a not in outputs for a in before[stage]):
                    continue
                x = outputs[before[stage][0]] if before[stage] else batch.inputs[number]
                for a in before[stage][1:]:
                    x = x + outputs[a]
                outputs[stage] = modules[stage](x)
        losses = {s: loss_of(settings.model, outputs[s], batch.targets[number]) * share[number] for s in exits}
        said = {f"{s},{number}": float(loss.detach()) for s, loss in losses.items()}
        if not trained:
            return said, {}
        found = torch.autograd.grad(list(losses.values()), every, allow_unused=True)
        table = {id(p): torch.zeros_like(p) if g is None else g for p, g in zip(every, found, strict=True)}
        return said, {stage: _flat([table[id(p)] for p in own[stage]]) for stage in trained}

    def iteration() -> tuple[dict[str, float], dict[tuple[int, int], torch.Tensor]]:
        losses: dict[str, float] = {}
        found = []
        for group, batch in enumerate(batches):
            results = [microbatch(batch, number) for number in range(schedule.num_microbatches)]
            found.append([gradients for _, gradients in results])
            if group == 0:
                losses = {key: value for said, _ in results for key, value in said.items()}
        totals = {}
        for stage in trained:
            zero = torch.zeros_like(found[0][0][stage])
            sums = [_added([table[i][stage] for i in order], zero) for table in found for order in _orders(schedule, stage)]
            total = totals[stage, 0] = _added(sums, zero)
            place = 0
            for parameter in own[stage]:
                parameter.grad = total[place : place + parameter.numel()].view_as(parameter)
                place += parameter.numel()
        if optimizer is not None:
            optimizer.step()
        return losses, totals

    return iteration


def _asynchronous(schedule: Schedule, settings: Settings, modules: list[StageModel], batch: Batch) -> Any:
    """A run of an asynchronous schedule over a chain of stages, as a function; SGD by its formula."""
    last = schedule.num_stages - 1
    share = microbatch_shares(schedule)
    told = schedule.staleness
    predicted = schedule.weights == "predict"
    state: dict[int, tuple[Tensors, Tensors, Tensors]] = {}  # stage -> weights, weights before the last update, momentum
    for stage, module in enumerate(modules):
        now = [p.detach().clone() for p in module.parameters()]
        state[stage] = now, [p.clone() for p in now], [torch.zeros_like(p) for p in now]
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 50_000))

    def load(stage: int, values: Tensors) -> Tensors:
        parameters: Tensors = list(modules[stage].parameters())
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data.copy_(value)
        return parameters

    def iteration() -> tuple[dict[str, float], dict[tuple[int, int], torch.Tensor]]:
        losses: dict[str, float] = {}
        gradients: dict[tuple[int, int], torch.Tensor] = {}

        @cache
        def weights(stage: int, version: int) -> tuple[Tensors, Tensors, Tensors]:
            if version == 0:
                return state[stage]
            now, _, momentum = weights(stage, version - 1)
            sums = []
            for order in _orders(schedule, stage):
                mine = [gradient(stage, i)[1] for i in order if told.update[stage, i] == version - 1]
                sums.append(_added(mine, torch.zeros(sum(p.numel() for p in now))))
            total = gradients[stage, version - 1] = _added(sums, torch.zeros_like(sums[0]))
            place, after, velocity = 0, [], []
            for value, before in zip(now, momentum, strict=True):
                one = total[place : place + value.numel()].view_as(value)
                place += value.numel()
                speed = before * settings.momentum + one
                velocity.append(speed)
                after.append(value.add(speed, alpha=-settings.learning_rate))
            return after, now, velocity

        def seen(stage: int, version: int, delay: int) -> Tensors:
            now, before, _ = weights(stage, version)
            return [a + delay * (a - b) for a, b in zip(now, before, strict=True)] if predicted else now

        @cache
        def output(stage: int, i: int) -> torch.Tensor:
            values = seen(stage, int(told.forward_version[stage, i]), int(told.forward_delay[stage, i]))
            x = output(stage - 1, i) if stage else batch.inputs[i]
            load(stage, values)
            with torch.no_grad():
                result: torch.Tensor = modules[stage](x)
                if stage == last:
                    losses[f"{stage},{i}"] = float(loss_of(settings.model, result, batch.targets[i]) * share[i])
            return result

        @cache
        def gradient(stage: int, i: int) -> tuple[torch.Tensor | None, torch.Tensor]:
            """Of the input, and of the weights. What the forward has saved is of its own weights; the backward may see others."""
            forward = seen(stage, int(told.forward_version[stage, i]), int(told.forward_delay[stage, i]))
            backward = seen(stage, int(told.backward_version[stage, i]), int(told.backward_delay[stage, i]))
            x = output(stage - 1, i).requires_grad_(True) if stage else batch.inputs[i]
            arriving = gradient(stage + 1, i)[0] if stage < last else None
            parameters = load(stage, forward)
            result: torch.Tensor = modules[stage](x)
            if stage == last:
                result = loss_of(settings.model, result, batch.targets[i]) * share[i]
            load(stage, backward)
            wanted = [x, *parameters] if stage else parameters
            found = list(torch.autograd.grad([result], wanted, None if arriving is None else [arriving]))
            return (found.pop(0) if stage else None), _flat(found)

        for stage in range(last + 1):
            final = weights(stage, int(told.update[stage].max()) + 1)
            for i in range(schedule.num_microbatches):
                output(stage, i)
            state[stage] = final
        for stage in range(last + 1):
            load(stage, state[stage][0])
        return losses, gradients

    return iteration
