"""GPUs: peak rates, memory and links from a catalogue, and what part of the peaks is reached."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from pipesim.cluster import Cluster
from pipesim.errors import ScheduleError
from pipesim.files import read_limited, write_atomically
from pipesim.models.spec import read_preset
from pipesim.presets import preset_names
from pipesim.units import parse_quantity

__all__ = ["DeviceSpec", "Efficiency", "device_presets", "read_device", "read_efficiency", "write_efficiency"]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What part of a peak is reached, and what is lost per op: all that can be fitted to measured runs.

    A product of an (m, k) with a (k, n) matrix takes the longer of its FLOPs at ``peak · gemm / (1 + gemm_size · (1/n + 1/k))``
    and its bytes at ``memory``; what lies between products takes its bytes at ``memory``.

    Attributes:
        gemm: Part of the peak FLOP rate that a product of endless n and k reaches.
        gemm_size: The size at which the loss through a small n (or k) equals the time of the endless one.
        attention: Rate of scores and context, as a part of *gemm* times the peak.
        memory: Part of the peak memory bandwidth.
        layer_overhead: Seconds per layer and pass (F, I, W, recomputation): launches that nothing hides.
        op_overhead: Seconds per op F, B, I or W of a stage.
        step_overhead: Seconds per iteration.
        inside: Part of the bandwidth inside a node that collectives reach.
        between: The same between nodes, for tensor parallelism.
        gradient: The same between nodes, for the gradient reduction.
        pipeline: Part of a link's bandwidth that messages between stages reach.

    Examples:
        >>> Efficiency().gemm_rate(1024, 1024) < Efficiency().gemm_rate(12288, 12288) < Efficiency().gemm
        True
    """

    gemm: float = 0.74
    gemm_size: float = 133.0
    attention: float = 0.5
    memory: float = 0.85
    layer_overhead: float = 0.0
    op_overhead: float = 0.0
    step_overhead: float = 0.0
    inside: float = 1.0
    between: float = 0.85
    gradient: float = 0.55
    pipeline: float = 0.8

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            least = "at least 0" if one.name.endswith(("overhead", "_size")) else "above 0"
            if not math.isfinite(value) or value < 0 or (least == "above 0" and value == 0):
                raise ScheduleError(f"efficiency: {one.name} must be a finite number {least}, got {value}")

    def gemm_rate(self, n: float, k: float) -> float:
        """The part of the peak that a product with n columns and k summands reaches."""
        return self.gemm / (1 + self.gemm_size * (1 / n + 1 / k))


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """A GPU, the node it stands in, and how much of its peaks is reached.

    Attributes:
        name: For summaries.
        mixed_flops: Peak FLOP/s of dense 16-bit products.
        fp32_flops: Peak FLOP/s of 32-bit products, on tensor cores (TF32) where there are any.
        memory: Bytes of HBM.
        memory_bandwidth: Bytes per second of HBM, peak.
        host_bandwidth: Bytes per second to the host's memory, one direction.
        cluster: Links of one GPU: inside a node, between nodes; ``devices_per_node`` counts GPUs.
        efficiency: What part of the peaks is reached.
        source: Where the figures are from.
    """

    name: str
    mixed_flops: float
    fp32_flops: float
    memory: float
    memory_bandwidth: float
    host_bandwidth: float
    cluster: Cluster
    efficiency: Efficiency = field(default_factory=Efficiency)
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("mixed_flops", "fp32_flops", "memory", "memory_bandwidth", "host_bandwidth"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ScheduleError(f"device {self.name}: {name} must be a finite number above 0, got {value}")

    def peak(self, precision: str) -> float:
        """Peak FLOP/s of products."""
        return self.mixed_flops if precision == "mixed" else self.fp32_flops

    def with_efficiency(self, efficiency: Efficiency | None = None, **changes: float) -> DeviceSpec:
        """Returns the device with another efficiency, or with some of its numbers changed.

        Examples:
            >>> read_device("a100-80g").with_efficiency(gemm=0.6).efficiency.gemm
            0.6
        """
        base = self.efficiency if efficiency is None else efficiency
        known = [one.name for one in fields(Efficiency)]
        for name in changes:
            if name not in known:
                raise ScheduleError(f"an efficiency has no {name!r}; it has {', '.join(known)}")
        return replace(self, efficiency=replace(base, **changes))


def device_presets() -> list[str]:
    """Names of the devices that ship with pipesim.

    Examples:
        >>> device_presets()
        ['a100-40g', 'a100-80g', 'b200', 'h100', 'h200', 'v100']
    """
    return preset_names("device")


def read_device(source: str | Path) -> DeviceSpec:
    """Reads a device from a TOML file, or a preset by its name.

    Raises:
        ScheduleError: There is no such file or preset, a key is unknown, or a quantity has no unit.

    Examples:
        >>> device = read_device("a100-80g")
        >>> device.mixed_flops, device.memory, device.cluster.devices_per_node
        (312000000000000.0, 80000000000.0, 8)
    """
    from pipesim.userfiles import DeviceFile

    data = read_preset(DeviceFile, source, "device")
    where = data["where"]
    efficiency = Efficiency(**data.get("efficiency", {}))
    memory, bandwidth, host = (
        parse_quantity(data[key], dimension, f"{where}: {key}")  # type: ignore[arg-type]
        for key, dimension in (("memory", "bytes"), ("memory_bandwidth", "bandwidth"), ("host_bandwidth", "bandwidth"))
    )
    return DeviceSpec(
        name=data.get("name", Path(where).stem),
        mixed_flops=data["mixed_tflops"] * 1e12,
        fp32_flops=data["fp32_tflops"] * 1e12,
        memory=memory,
        memory_bandwidth=bandwidth,
        host_bandwidth=host,
        cluster=Cluster.load(data["cluster"]),
        efficiency=efficiency,
        source=data.get("source", ""),
    )


def read_efficiency(path: str | Path) -> Efficiency:
    """Reads a calibration: a TOML file with a table ``[efficiency]``, as :func:`write_efficiency` writes it.

    Raises:
        ScheduleError: A key is unknown or a number is out of range.
        OSError: The file cannot be read.
    """
    from pipesim.userfiles import CalibrationFile, parse_toml

    file = parse_toml(CalibrationFile, read_limited(Path(path)), str(path))
    return Efficiency(**file.efficiency.model_dump(exclude_none=True))


def write_efficiency(efficiency: Efficiency, path: str | Path, source: str = "") -> None:
    """Writes a calibration that :func:`read_efficiency` reads back, number for number."""
    lines = [f"source = {_quoted(source)}", "", "[efficiency]", *(f"{name} = {float(value)!r}" for name, value in asdict(efficiency).items())]
    write_atomically(path, "\n".join(lines) + "\n")


def _quoted(text: str) -> str:
    """A basic TOML string."""
    import json

    return json.dumps(text, ensure_ascii=False)
