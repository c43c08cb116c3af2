"""The real F, B, I, W, R and U of one stage on one device, and the emulated ones.

Tensors that pass between stages of one device, or wait to be sent, lie in the device's mail under (gradient, from stage, to
stage, microbatch).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pipesim.op import Kind, Op
from pipesim.replay.models import Batch, StageModel, loss_of
from pipesim.replay.settings import ReplayModel
from pipesim.replay.split import Deferred, input_gradient
from pipesim.replay.weights import Weights
from pipesim.schedule import Schedule

__all__ = ["Mail", "Stage", "microbatch_shares"]

Mail = dict[tuple[bool, int, int, int], torch.Tensor]


@dataclass
class _Activation:
    """What a forward leaves for its backward."""

    given: torch.Tensor  # the stage's input
    root: torch.Tensor | None = None  # output or loss, with its graph
    leaf: torch.Tensor | None = None  # whose gradient I computes: the input, or what the first layer of a first stage makes of it
    first: torch.Tensor | None = None  # of a first stage with a split backward: the first layer's output, with its graph
    deferred: Deferred = field(default_factory=Deferred)
    boxes: list[_Box] = field(default_factory=list)


class _Box:
    """A tensor that autograd has saved, and that OFFLOAD may take away."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Stage:
    """One stage: its layers, its weights and what its microbatches have left.

    Args:
        model: What it is a part of.
        schedule: The compute schedule.
        number: Which stage.
        module: Its layers.
        weights: Their versions.
        batch: Inputs and targets.
        mail: The device's mail.
        data: Degree of data parallelism, by which losses are divided.
    """

    def __init__(
        self,
        model: ReplayModel,
        schedule: Schedule,
        number: int,
        module: StageModel,
        weights: Weights,
        batch: Batch | None,
        mail: Mail,
        data: int = 1,
    ) -> None:
        self.model, self.number, self.module, self.weights, self.batch, self.mail = model, number, module, weights, batch, mail
        edges = schedule.stage_edges
        backward = schedule.backward_rows
        trained = {stage for stage in range(schedule.num_stages) if (backward[stage] >= 0).any()}
        self.before = [before for before, after in edges if after == number]
        self.after = [after for before, after in edges if before == number]
        self.back_to = [stage for stage in self.before if stage in trained] if number in trained else []
        self.back_from = [stage for stage in self.after if stage in trained] if number in trained else []
        self.is_trained = number in trained
        self.split = (schedule.rows_of(Kind.I)[number] >= 0).tolist()
        self.recomputed = (schedule.rows_of(Kind.R)[number] >= 0).tolist()
        offloaded = schedule.microbatch[(schedule.kind == int(Kind.OFFLOAD)) & (schedule.stage == number)]
        self.offloaded = set(offloaded.tolist())
        self.share = microbatch_shares(schedule, data)
        staleness = schedule.staleness
        self.forward_version, self.backward_version = staleness.forward_version[number].tolist(), staleness.backward_version[number].tolist()
        self.forward_delay, self.backward_delay = staleness.forward_delay[number].tolist(), staleness.backward_delay[number].tolist()
        self.activations: dict[int, _Activation] = {}
        self.losses: dict[int, torch.Tensor] = {}

    def bound(self, op: Op) -> Callable[[], None]:
        """The function that does an op."""
        kinds = {Kind.F: self.forward, Kind.B: self.backward, Kind.I: self.input_grad, Kind.W: self.weight_grad, Kind.R: self.recompute}
        if op.kind is Kind.U:
            return self.weights.update
        function, microbatch = kinds[op.kind], op.microbatch or 0
        return lambda: function(microbatch)

    def forward(self, microbatch: int) -> None:
        """F: the output goes to the mail, what the backward needs is kept."""
        given = self._received(microbatch)
        activation = self.activations[microbatch] = _Activation(given)
        self._use(self.forward_version[microbatch], self.forward_delay[microbatch])
        if not self.is_trained or self.recomputed[microbatch]:
            with torch.no_grad():
                output = self.module(given)
                result = output if self.after else self._loss(output, microbatch)
            if not self.is_trained:
                del self.activations[microbatch]
        else:
            result = self._with_graph(activation, microbatch)
        if not self.after:
            self.losses[microbatch] = result.detach()
        sent = result.detach()
        for stage in self.after:
            self.mail[False, self.number, stage, microbatch] = sent

    def recompute(self, microbatch: int) -> None:
        """R: the forward again, from the stage's input."""
        self._use(self.forward_version[microbatch], self.forward_delay[microbatch])
        self._with_graph(self.activations[microbatch], microbatch)

    def backward(self, microbatch: int) -> None:
        """B: all gradients."""
        activation = self.activations.pop(microbatch)
        self._use(self.backward_version[microbatch], self.backward_delay[microbatch])
        root, gradient = activation.root, self._gradient(microbatch)
        if root is not None and root.requires_grad:
            torch.autograd.backward([root], None if gradient is None else [gradient])
        self._send_back(None if activation.leaf is None else activation.leaf.grad, activation.given, microbatch)

    def input_grad(self, microbatch: int) -> None:
        """I: the gradient of the input, and what W starts from."""
        activation = self.activations[microbatch]
        self._use(self.backward_version[microbatch], self.backward_delay[microbatch])
        root, gradient = activation.root, self._gradient(microbatch)
        activation.root = None
        if root is not None and root.requires_grad:
            result, activation.deferred = input_gradient(root, gradient, activation.leaf)
            if activation.first is not None:
                activation.leaf = result  # what the first layer's W starts from
            else:
                self._send_back(result, activation.given, microbatch)

    def weight_grad(self, microbatch: int) -> None:
        """W: the gradients of the weights."""
        activation = self.activations.pop(microbatch)
        self._use(self.backward_version[microbatch], self.backward_delay[microbatch])
        activation.deferred.weight_gradients()
        if activation.first is not None and activation.leaf is not None:
            torch.autograd.backward([activation.first], [activation.leaf])

    def offload(self, microbatch: int) -> None:
        """OFFLOAD: what the forward has kept goes to the host."""
        self._move(microbatch, to_host=True)

    def reload(self, microbatch: int) -> None:
        """RELOAD: it comes back."""
        self._move(microbatch, to_host=False)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _use(self, version: int, delay: int) -> None:
        if self.weights.policy == "predict":
            self.weights.predict(delay)
        else:
            self.weights.use(version)

    def _received(self, microbatch: int) -> torch.Tensor:
        """The stage's input: the batch, or the sum of what the stages before have made."""
        if not self.before:
            assert self.batch is not None
            return self.batch.inputs[microbatch]
        mail, number = self.mail, self.number
        given = mail.pop((False, self.before[0], number, microbatch))
        for stage in self.before[1:]:
            given = given + mail.pop((False, stage, number, microbatch))
        return given

    def _gradient(self, microbatch: int) -> torch.Tensor | None:
        """The gradient of the output: the sum of what the stages behind have sent; None for a loss."""
        gradient: torch.Tensor | None = None
        for stage in self.back_from:
            one = self.mail.pop((True, stage, self.number, microbatch))
            gradient = one if gradient is None else gradient + one
        return gradient

    def _send_back(self, gradient: torch.Tensor | None, given: torch.Tensor, microbatch: int) -> None:
        if self.back_to:
            sent = torch.zeros_like(given) if gradient is None else gradient
            for stage in self.back_to:
                self.mail[True, self.number, stage, microbatch] = sent

    def _with_graph(self, activation: _Activation, microbatch: int) -> torch.Tensor:
        """Runs the layers for a backward, and returns output or loss."""
        with _boxed(activation.boxes if microbatch in self.offloaded else None):
            x = activation.given
            layers = self.module.layers
            if self.back_to:
                x = activation.leaf = x.detach().requires_grad_()
                output = self.module(x)
            elif self.split[microbatch] and len(layers) > 1:
                # the input of a first stage needs no gradient, so I ends at what the first layer makes of it
                activation.first = layers[0](x)
                x = activation.leaf = activation.first.detach().requires_grad_()
                for layer in list(layers)[1:]:
                    x = layer(x)
                output = x
                if not activation.first.requires_grad:
                    activation.first = None
            else:
                output = self.module(x)
            activation.root = output if self.after else self._loss(output, microbatch)
        return activation.root

    def _loss(self, output: torch.Tensor, microbatch: int) -> torch.Tensor:
        assert self.batch is not None
        return loss_of(self.model, output, self.batch.targets[microbatch]) * self.share[microbatch]

    def _move(self, microbatch: int, to_host: bool) -> None:
        own = self.weights.storages
        moved: dict[tuple[Any, ...], torch.Tensor] = {}
        for box in self.activations[microbatch].boxes:
            tensor = box.tensor
            if tensor.untyped_storage().data_ptr() in own:
                continue
            key = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if key not in moved:
                if to_host:
                    moved[key] = tensor.to("cpu", copy=True)
                else:
                    moved[key] = tensor.to(self.activations[microbatch].given.device, copy=True)
            box.tensor = moved[key]


def _boxed(boxes: list[_Box] | None) -> Any:
    """Keeps what autograd saves in boxes, where it is to be offloaded."""
    if boxes is None:
        return torch.enable_grad()

    def pack(tensor: torch.Tensor) -> _Box:
        box = _Box(tensor)
        boxes.append(box)
        return box

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor)


def microbatch_shares(schedule: Schedule, data: int = 1) -> list[float]:
    """What a microbatch's loss counts in its update: one part of as many as go into it, so that gradients are means."""
    count = schedule.num_microbatches
    exits = [stage for stage in range(schedule.num_stages) if all(before != stage for before, _ in schedule.stage_edges)]
    update = schedule.staleness.update[exits[-1]].tolist()
    if update[0] < 0:
        return [1.0 / count] * count
    return [1.0 / (update.count(one) * data) for one in update]
