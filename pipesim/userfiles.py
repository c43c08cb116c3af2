"""The TOML files that users write, as pydantic models: unknown keys are errors, and every error names its place."""

from __future__ import annotations

import tomllib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

from pipesim.errors import ScheduleError, did_you_mean

__all__ = [
    "CalibrationFile",
    "ClusterFile",
    "CurveFile",
    "DeviceFile",
    "LayerProfileFile",
    "ModelFile",
    "StageCalibrationFile",
    "StageTimesFile",
    "parse_toml",
]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Index = Annotated[int, Field(ge=0, lt=10**6, strict=True)]
Count = Annotated[int, Field(ge=1, lt=10**6, strict=True)]
Quantity = str | int | float  # numbers are let through, so that the error can say which unit is missing
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PerStage = Number | list[Number]
Size = Number | str  # with its unit where times are physical, a bare number of units in slots
SizePerStage = Size | list[Size]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LinkEntry(_File):
    """A link: ``latency = "5 us"``, ``bandwidth = "25 GB/s"``."""

    latency: Quantity | None = None
    bandwidth: Quantity | None = None


class DirectedLinkEntry(LinkEntry):
    """One direction between two devices that differs from the rule."""

    from_: Annotated[Index, Field(alias="from")]
    to: Index


class DeviceEntry(_File):
    """A device: ``speed = 1.0``, ``memory = "80 GB"``, ``width = 1``."""

    speed: Positive | None = None
    memory: Quantity | None = None
    width: Count | None = None


class DevicesEntry(DeviceEntry):
    """What is different on some devices."""

    numbers: list[Index]


class NodeEntry(_File):
    """What GPUs of a node share: ``nics = 8``, ``nic_bandwidth = "25 GB/s"``; see ``pipesim.network.Node``."""

    nics: Count | None = None
    nic_bandwidth: Quantity | None = None
    port_bandwidth: Quantity | None = None
    bus_bandwidth: Quantity | None = None
    pcie_switches: Count | None = None
    pcie_bandwidth: Quantity | None = None
    half_duplex: tuple[str, ...] | None = None
    speed: Positive | None = None
    memory: Quantity | None = None


class NodesEntry(NodeEntry):
    """What is different on some nodes."""

    numbers: list[Index]


class FabricEntry(_File):
    """Leaf switches: ``nodes_per_switch = 4``, ``oversubscription = 2``."""

    nodes_per_switch: Count
    oversubscription: Positive | None = None


class PlacementEntry(_File):
    """Which GPUs the devices are."""

    order: str | None = None
    data: Count | None = None
    gpus: list[list[Index]] | None = None


class CommunicationEntry(_File):
    """How devices communicate; see ``pipesim.communication.Communication``."""

    sends: str | None = None
    blocking: StrictBool | None = None
    stream: str | None = None
    batched: StrictBool | None = None
    receives: str | None = None
    shape_messages: StrictBool | None = None
    interference: dict[str, float] | None = None


class ClusterFile(_File):
    """A cluster file."""

    name: str | None = None
    source: str | None = None
    sharing: str | None = None
    devices_per_node: Count | None = None
    node_count: Count | None = None
    placement: PlacementEntry | None = None
    node: NodeEntry | None = None
    nodes: list[NodesEntry] = []
    fabric: FabricEntry | None = None
    communication: CommunicationEntry | None = None
    device: DeviceEntry | None = None
    inside: LinkEntry | None = None
    between: LinkEntry | None = None
    host: LinkEntry | None = None
    devices: list[DevicesEntry] = []
    links: list[DirectedLinkEntry] = []


class CurveEntry(_File):
    """An all-reduce among so many members: ``latency = "32 us"``, ``bandwidth = "200 GB/s"``, and ``root = "5 ns"`` per root of a byte."""

    members: Annotated[int, Field(ge=2, lt=10**6, strict=True)]
    latency: Quantity
    bandwidth: Quantity
    root: Quantity


class CurveFile(_File):
    """Measured collectives."""

    name: str | None = None
    source: str | None = None
    tables: Annotated[list[CurveEntry], Field(min_length=1)]


class MemoryEntry(_File):
    """Bytes (or units, where the times are slots) per stage and microbatch, or per stage."""

    activation: SizePerStage | None = None
    activation_freed_by_input_grad: SizePerStage | None = None
    stage_input: SizePerStage | None = None
    weights: SizePerStage | None = None
    gradients: SizePerStage | None = None
    optimizer: SizePerStage | None = None
    message: Size | None = None


class StageTimesFile(_File):
    """A file of measured times per stage."""

    name: str | None = None
    source: str | None = None
    unit: Literal["s", "ms", "us", "slot"]
    stages: Count | None = None
    forward: PerStage
    backward: PerStage | None = None
    input_grad: PerStage | None = None
    weight_grad: PerStage | None = None
    optimizer: PerStage | None = None
    overlap: PerStage | None = None
    reduction: PerStage | None = None
    tied: list[list[int]] | None = None
    tied_reduction: Number | None = None
    unshard: PerStage | None = None
    buckets: Count | None = None
    reduce_every_microbatch: StrictBool | None = None
    latency: Number | None = None
    memory: MemoryEntry | None = None


class LayerEntry(_File):
    """A layer of a profile: times of a microbatch, and bytes."""

    name: str | None = None
    kind: str | None = None
    forward: Number
    backward: Number
    input_grad: Number | None = None
    weight_grad: Number | None = None
    output: Quantity
    activation: Quantity
    parameters: Quantity
    peak: Quantity | None = None


class LayerProfileFile(_File):
    """A chain of measured layers."""

    name: str | None = None
    source: str | None = None
    unit: Literal["s", "ms", "us"]
    layers: Annotated[list[LayerEntry], Field(min_length=1)]


class ModelFile(_File):
    """A transformer."""

    name: str | None = None
    source: str | None = None
    layers: Count
    hidden: Count
    heads: Count
    vocabulary: Count
    sequence: Count
    kv_heads: Count | None = None
    head_dim: Count | None = None
    ffn: Count | None = None
    gated: bool | None = None
    tied_embeddings: bool | None = None
    learned_positions: bool | None = None
    biases: bool | None = None
    norm: Literal["layernorm", "rmsnorm"] | None = None
    dropout: bool | None = None
    causal: bool | None = None
    experts: Count | None = None
    active_experts: Count | None = None


class EfficiencyEntry(_File):
    """What part of a device's peaks is reached; see ``pipesim.models.Efficiency``."""

    gemm: Positive | None = None
    gemm_size: Number | None = None
    attention: Positive | None = None
    memory: Positive | None = None
    layer_overhead: Number | None = None
    op_overhead: Number | None = None
    step_overhead: Number | None = None
    inside: Positive | None = None
    between: Positive | None = None
    gradient: Positive | None = None
    pipeline: Positive | None = None


class DeviceFile(_File):
    """A GPU: ``mixed_tflops = 312``, ``memory = "80 GB"``, and the cluster (a file or a preset) whose links it has."""

    name: str | None = None
    source: str | None = None
    mixed_tflops: Positive
    fp32_tflops: Positive
    memory: Quantity
    memory_bandwidth: Quantity
    host_bandwidth: Quantity
    cluster: str
    efficiency: EfficiencyEntry | None = None


class CalibrationFile(_File):
    """A fitted efficiency."""

    source: str | None = None
    efficiency: EfficiencyEntry


class HostEntry(_File):
    """Seconds of host time; see ``pipesim.costs.calibrated.HostTimes``."""

    op: Number = 0.0
    send: Number = 0.0
    receive: Number = 0.0
    barrier: Number = 0.0


class StagesEntry(_File):
    """Seconds and bytes of a model cut into so many stages, each one per stage."""

    forward: Annotated[list[Number], Field(min_length=1)]
    backward: list[Number] | None = None
    input_grad: list[Number] | None = None
    weight_grad: list[Number] | None = None
    optimizer: list[Number] | None = None
    message: list[Number] | None = None
    activation: list[Number] | None = None
    activation_freed_by_input_grad: list[Number] | None = None
    weights: list[Number] | None = None
    gradients: list[Number] | None = None
    optimizer_state: list[Number] | None = None


class SpreadEntry(_File):
    """How the durations of one kind of op on one stage spread."""

    stages: Count
    stage: Index
    kind: str
    count: Count
    typical: Number
    median: Number
    deviation: Number
    low: Number
    high: Number


class MeasuredLinkEntry(_File):
    """One direction between two devices, in seconds and bytes."""

    from_: Annotated[Index, Field(alias="from")]
    to: Index
    latency: Number
    bandwidth: Positive | None = None
    probe_latency: Number | None = None
    hop: Number | None = None
    sizes: Annotated[int, Field(ge=0)] = 0
    count: Annotated[int, Field(ge=0)] = 0
    error: Number | None = None


class InterferenceEntry(_File):
    """By which factor compute is slower while messages are under way, and how sure that is."""

    factor: Annotated[float, Field(allow_inf_nan=False)]
    uncertainty: Number
    count: Count


class StageCalibrationFile(_File):
    """What ``pipesim calibrate`` measured."""

    calibration: Literal[1]
    name: str | None = None
    source: dict[str, str] = {}
    notes: list[str] = []
    host: HostEntry = HostEntry()
    stages: Annotated[list[StagesEntry], Field(min_length=1)]
    spreads: list[SpreadEntry] = []
    links: list[MeasuredLinkEntry] = []
    interference: InterferenceEntry | None = None
    jitter: dict[str, Annotated[list[Number], Field(min_length=1)]] = {}


Model = TypeVar("Model", bound=BaseModel)


def parse_toml(model: type[Model], text: str, where: str) -> Model:
    """Parses TOML into a model.

    Raises:
        ScheduleError: It is no TOML, a key is unknown (the nearest known one is suggested), or a value has the wrong type.
    """
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is one; so is an integer of 5,000 digits
        raise ScheduleError(f"{where} is not TOML: {error}") from None
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # a misspelt key explains a missing one, so it is named first
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        location = _in_data(data, first["loc"])
        place = ".".join(map(str, location))
        if first["type"] == "extra_forbidden":
            known = _fields_at(model, location[:-1])
            raise ScheduleError(f"{where}: unknown key {place!r}{did_you_mean(str(location[-1]), known) or '; known: ' + ', '.join(known)}") from None
        if first["type"] == "missing":
            raise ScheduleError(f"{where}: {place} is missing") from None
        raise ScheduleError(f"{where}: {place}: {first['msg']}, got {first.get('input')!r:.80}") from None


def _in_data(data: Any, location: tuple[Any, ...]) -> tuple[Any, ...]:
    """The part of pydantic's location that is keys of the file; the rest names alternatives of a type."""
    kept: list[Any] = []
    for part in location:
        if isinstance(data, dict) and (part in data or part == location[-1]):
            kept.append(part)
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            kept.append(part)
            data = data[part]
    return tuple(kept)


def _fields_at(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """The keys that are legal in the table at *path*."""
    current: Any = model
    for part in path:
        if isinstance(part, int):
            continue
        annotation = current.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        current = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return [info.alias or name for name, info in current.model_fields.items()]
