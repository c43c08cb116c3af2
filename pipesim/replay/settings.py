"""What a replay is asked to do, as data that travels to its processes. Needs no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from pipesim.errors import ScheduleError, did_you_mean, require_count
from pipesim.formats import csv_text, parse_csv
from pipesim.schedule import Schedule

__all__ = ["MODES", "Mode", "ReplayModel", "Settings", "schedule_data", "schedule_from", "stage_layers"]

Mode = Literal["run", "solo", "emulate"]
MODES = ("run", "solo", "emulate")
_OPTIMIZERS = ("sgd", "adam")
_BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True)
class ReplayModel:
    """A model that is cut evenly into the stages of a schedule.

    Attributes:
        kind: ``mlp``, ``transformer``, or the user's own: ``module:function`` or ``file.py:function`` that returns a list of layers.
        layers: Layers in all; None for one per stage. Name it where schedules with different numbers of stages are compared.
        hidden: Width.
        heads: Attention heads of the transformer.
        sequence: Its tokens per sample.
        vocabulary: Its vocabulary.
        microbatch: Samples in a microbatch.
        shape: Own model: shape of a microbatch, the samples first.
        tokens: Own model: the input is token numbers below this.
        dtype: Type of weights and activations.
        seed: Of weights and data.
    """

    kind: str = "mlp"
    layers: int | None = None
    hidden: int = 128
    heads: int = 4
    sequence: int = 64
    vocabulary: int = 512
    microbatch: int = 8
    shape: tuple[int, ...] | None = None
    tokens: int | None = None
    dtype: str = "float32"
    seed: int = 0

    def check(self) -> ReplayModel:
        """Raises ScheduleError for numbers that are no sizes, and an own model without its shape."""
        for name in ("hidden", "heads", "sequence", "vocabulary", "microbatch"):
            require_count(name, getattr(self, name))
        if self.layers is not None:
            require_count("layers", self.layers)
        if ":" not in self.kind and self.kind not in ("mlp", "transformer"):
            raise ScheduleError(
                f"model must be mlp, transformer, module:function or file.py:function, got {self.kind!r}{did_you_mean(self.kind, ['mlp', 'transformer'])}"
            )
        if ":" in self.kind and not self.shape:
            raise ScheduleError(f"the model {self.kind} wants the shape of a microbatch: --batch-shape 8,1024")
        if self.kind == "transformer" and self.hidden % self.heads:
            raise ScheduleError(f"hidden must be a multiple of heads, got hidden {self.hidden} and heads {self.heads}")
        return self


@dataclass(frozen=True)
class Settings:
    """How a schedule is replayed.

    Attributes:
        model: What runs.
        mode: ``run`` on real tensors, ``solo`` one device after the other, ``emulate`` sleeps for each op's duration.
        backend: ``gloo`` on CPUs, ``nccl`` on CUDA devices.
        iterations: How often the schedule runs and is measured.
        warm_up: Runs before, which are not.
        data: Degree of data parallelism.
        receives: Where receives stand that the schedule does not list.
        batched: Sends and receives that stand side by side are issued as one batch.
        optimizer: ``sgd`` or ``adam``.
        learning_rate: Its learning rate.
        momentum: Of sgd.
        barrier: All devices wait for each other before the update.
        threads: Threads per rank on a CPU.
        timeout: Seconds without progress after which the run is stopped.
        profile: A folder for torch.profiler traces, one per rank, or None.
        keep: Keep losses, gradients and weights for tests.
    """

    model: ReplayModel = field(default_factory=ReplayModel)
    mode: Mode = "run"
    backend: str = "gloo"
    iterations: int = 5
    warm_up: int = 2
    data: int = 1
    receives: Literal["early", "late"] = "early"
    batched: bool = False
    optimizer: str = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.0
    barrier: bool = True
    threads: int = 1
    timeout: float = 60.0
    profile: str | None = None
    keep: bool = False

    def check(self) -> Settings:
        """Raises ScheduleError for what cannot be."""
        self.model.check()
        for name, value, known in (
            ("mode", self.mode, MODES),
            ("backend", self.backend, _BACKENDS),
            ("optimizer", self.optimizer, _OPTIMIZERS),
            ("receives", self.receives, ("early", "late")),
        ):
            if value not in known:
                raise ScheduleError(f"{name} must be one of {', '.join(known)}, got {value!r}{did_you_mean(str(value), known)}")
        for name in ("iterations", "data", "threads"):
            require_count(name, getattr(self, name))
        require_count("warm_up", self.warm_up, 0)
        if not 0 < self.timeout < 1e6:
            raise ScheduleError(f"timeout must be a number of seconds above 0, got {self.timeout!r}")
        if self.mode != "run" and self.data > 1:
            raise ScheduleError(f"data parallelism (data = {self.data}) needs mode run; {self.mode} replays one pipeline")
        return self

    def fingerprint(self, schedule: Schedule, costs: str = "") -> str:
        """Twelve letters that are the same for repeats of the same run, and for nothing else."""
        about = dataclasses.asdict(self)
        for name in ("iterations", "warm_up", "timeout", "profile", "keep"):
            about.pop(name)
        text = json.dumps([about, schedule_data(schedule), costs], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Settings:
        """The inverse of ``dataclasses.asdict``, also through JSON."""
        model = dict(data["model"])
        if model["shape"] is not None:
            model["shape"] = tuple(model["shape"])
        return cls(**{**data, "model": ReplayModel(**model)})


def schedule_data(schedule: Schedule) -> dict[str, Any]:
    """A schedule as JSON takes it."""
    return {
        "name": schedule.name,
        "rows": csv_text(schedule),
        "graph": schedule.graph,
        "weights": schedule.weights,
        "offload_to": sorted((device, target) for device, target in schedule.offload_to.items()),
    }


def schedule_from(data: Mapping[str, Any]) -> Schedule:
    """The inverse of :func:`schedule_data`."""
    graph = None if data["graph"] is None else [(int(a), int(b)) for a, b in data["graph"]]
    offload = {int(device): target for device, target in data["offload_to"]}
    return parse_csv(data["rows"], "the job", name=data["name"], graph=graph, weights=data["weights"], offload_to=offload)


def stage_layers(count: int, stages: int) -> list[range]:
    """Cuts *count* layers evenly; where that does not go, the first stages have one more.

    Raises:
        ScheduleError: There are fewer layers than stages.

    Examples:
        >>> stage_layers(5, 2)
        [range(0, 3), range(3, 5)]
    """
    if count < stages:
        raise ScheduleError(f"the model has {count} layers and the schedule {stages} stages; a stage needs at least one: --layers {stages}")
    share, more = divmod(count, stages)
    bounds = [stage * share + min(stage, more) for stage in range(stages + 1)]
    return [range(low, high) for low, high in pairwise(bounds)]
