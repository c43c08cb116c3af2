"""The weights of a stage, their versions, their gradients and their optimizer.

The weights of a stage lie in one flat tensor, of which its parameters are views, and so do its gradients: a sum over replicas and a step of
the optimizer are one operation each. All versions share the gradients: whatever version a backward ran with, its gradient goes into
the next update, as the schedule has it. The flat tensor has a version counter of its own, so autograd does not complain
where a policy wants the backward to see newer weights than its forward (``latest``, ``predict``); an older version that is still
needed (``stash``, ``vertical``, ``double_buffer``) stays as it is, and the update goes into a copy.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from pipesim.replay.settings import Settings

__all__ = ["Weights"]

_VERSIONED = ("stash", "vertical", "double_buffer")
_ALIGNED = 64  # numbers; an address that is no multiple of a cache line can change the rounding of a matrix product
_BETAS, _EPSILON = (0.9, 0.999), 1e-8  # Adam's, as torch has them


class Weights:
    """All versions of the weights of one stage on one device.

    Args:
        module: The stage.
        settings: Which optimizer.
        policy: The weight policy of the schedule.
        last_use: Version to the last update that a gradient made with it goes into: until then it is kept.

    Attributes:
        flat: Gradients of all weights.
        latest: The weights as the last update left them.
        version: How many updates have made them.
    """

    def __init__(self, module: nn.Module, settings: Settings, policy: str, last_use: dict[int, int]) -> None:
        self.policy = policy
        self.last_use = last_use
        self._settings = settings
        self._places: list[list[tuple[nn.Module, str]]] = []
        seen: dict[int, int] = {}
        parameters: list[nn.Parameter] = []
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                if id(parameter) not in seen:
                    seen[id(parameter)] = len(parameters)
                    parameters.append(parameter)
                    self._places.append([])
                self._places[seen[id(parameter)]].append((owner, name))
        self._bounds: list[tuple[int, torch.Size]] = []
        size = 0
        for parameter in parameters:
            self._bounds.append((size, parameter.shape))
            size += -(-parameter.numel() // _ALIGNED) * _ALIGNED
        like = parameters[0] if parameters else torch.zeros(0)
        self.flat = torch.zeros(size, dtype=like.dtype, device=like.device)
        self._gradients = self._views(self.flat)
        self.latest = torch.zeros_like(self.flat)
        for view, parameter in zip(self._views(self.latest), parameters, strict=True):
            view.copy_(parameter.data)
            parameter.data = view
        for parameter, gradient in zip(parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self.version = self.active = 0
        self.versions: dict[int, list[nn.Parameter]] = {0: parameters}
        self._steps = 0
        self._state: list[torch.Tensor] = []
        if settings.optimizer == "adam":
            self._state = [torch.zeros_like(self.flat), torch.zeros_like(self.flat)]
        elif settings.momentum:
            self._state = [torch.zeros_like(self.flat)]
        self._predicted = self._before = self.latest
        if policy == "predict":
            # the module computes with weights of its own, into which each op's prediction is written
            self.latest = self._predicted.clone()
            self._before = self._predicted.clone()

    @property
    def values(self) -> list[torch.Tensor]:
        """The weights as the last update left them, one by one."""
        return [view.clone() for view in self._views(self.latest)]

    @property
    def gradients(self) -> torch.Tensor:
        """Of all weights, in a row."""
        return torch.cat([view.reshape(-1) for view in self._gradients]) if self._gradients else torch.zeros(0)

    @property
    def storages(self) -> set[int]:
        """Addresses of what the module computes with, in all versions."""
        return {own[0].untyped_storage().data_ptr() for own in self.versions.values() if own}

    def begin(self) -> None:
        """A new iteration: versions count from 0 again, and the weights are the latest."""
        current = self.versions[self.version]
        self.use(self.version)
        self.versions = {0: current}
        self.version = self.active = 0

    def use(self, version: int) -> None:
        """Makes the module compute with a version; under ``flush``, ``latest`` and ``predict`` there is but one."""
        if self.policy not in _VERSIONED or version == self.active:
            return
        for places, parameter in zip(self._places, self.versions[version], strict=True):
            for owner, name in places:
                owner._parameters[name] = parameter
        self.active = version

    def predict(self, updates: int) -> None:
        """SpecTrain: the weights as *updates* more updates like the last one would leave them."""
        torch.sub(self.latest, self._before, out=self._predicted)
        self._predicted.mul_(updates).add_(self.latest)

    def update(self) -> None:
        """U: the optimizer's step, and gradients from zero."""
        if self.policy == "predict":
            self._before.copy_(self.latest)
        old = self.version
        current = self.versions[old]
        kept = {version: own for version, own in self.versions.items() if self.last_use.get(version, 0) > old}
        if old in kept and self.policy in _VERSIONED:
            # this version is used after the update, so the update goes into a copy
            self.latest = self.latest.clone()
            current = [nn.Parameter(view) for view in self._views(self.latest)]
            for parameter, gradient in zip(current, self._gradients, strict=True):
                parameter.grad = gradient
        elif self.active == old:
            self.active = old + 1
        self._step()
        self.flat.zero_()
        self.version = old + 1
        self.versions = {**kept, self.version: current} if self.policy in _VERSIONED else {self.version: current}

    def bytes(self) -> dict[str, int]:
        """Bytes by category, of one version."""
        return {"weights": self.latest.nbytes, "gradients": self.flat.nbytes, "optimizer": sum(one.nbytes for one in self._state)}

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        # .data: a version counter of their own
        return [flat[place : place + shape.numel()].view(shape).data for place, shape in self._bounds]

    def _step(self) -> None:
        """The formulas of torch.optim.SGD and Adam (torch.optim itself takes seconds to import a compiler that it does not use)."""
        rate = self._settings.learning_rate
        self._steps += 1
        if self._settings.optimizer == "adam":
            mean, square = self._state
            mean.lerp_(self.flat, 1 - _BETAS[0])
            square.mul_(_BETAS[1]).addcmul_(self.flat, self.flat, value=1 - _BETAS[1])
            corrections = [1 - beta**self._steps for beta in _BETAS]
            scale = (square.sqrt() / math.sqrt(corrections[1])).add_(_EPSILON)
            self.latest.addcdiv_(mean, scale, value=-rate / corrections[0])
            return
        direction = self.flat
        if self._state:
            # as torch.optim: the first step's momentum is the gradient itself, which zero times the momentum leaves it
            direction = self._state[0].mul_(self._settings.momentum).add_(self.flat)
        self.latest.add_(direction, alpha=-rate)
