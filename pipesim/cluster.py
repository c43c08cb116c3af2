"""The machine: devices with a speed, a width and a capacity, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import LARGEST, ScheduleError, did_you_mean, require_count
from pipesim.files import read_limited
from pipesim.units import parse_quantity

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["Cluster", "Device", "Link", "Unit", "cluster_presets"]

Unit = Literal["s", "slot"]
PRESETS = Path(__file__).parent / "presets"
_PREFIX = "cluster-"


@dataclass(frozen=True)
class Link:
    """One direction between two devices: ``arrival = (max(sent, link free) + bytes / bandwidth) + latency``.

    Attributes:
        latency: In the cluster's unit of time.
        bandwidth: Bytes per unit of time; None when only latency counts, and messages then do not queue.

    Examples:
        >>> round(Link(latency=20e-6, bandwidth=10 * 2**30).time(16 * 2**20), 9)
        0.0015825
    """

    latency: float = 0.0
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.latency <= LARGEST:
            raise ScheduleError(f"latency must be a finite number of at least 0, got {self.latency}")
        if self.bandwidth is not None and not 1 / LARGEST <= self.bandwidth <= LARGEST:
            raise ScheduleError(f"bandwidth must be a finite number above 0, or None for no limit, got {self.bandwidth}")

    def time(self, size: float) -> float:
        """Time of a message of *size* bytes on the free link."""
        return (0.0 if self.bandwidth is None else size / self.bandwidth) + self.latency


@dataclass(frozen=True)
class Device:
    """One device, or a group of GPUs that work on each op together.

    Attributes:
        speed: Durations are divided by it: 0.5 is half as fast.
        memory: Capacity in bytes (or units), or None for no limit. It never changes the timing.
        width: GPUs that this device stands for.
    """

    speed: float = 1.0
    memory: float | None = None
    width: int = 1

    def __post_init__(self) -> None:
        if not 1 / LARGEST <= self.speed <= LARGEST:
            raise ScheduleError(f"speed must be a finite number above 0, got {self.speed}")
        if self.memory is not None and not 0 <= self.memory <= LARGEST:
            raise ScheduleError(f"memory must be a finite number of at least 0, or None for no limit, got {self.memory}")
        if isinstance(self.width, bool) or self.width < 1:
            raise ScheduleError(f"width must be at least 1, got {self.width}")


@dataclass(frozen=True)
class Cluster:
    """Devices in nodes; two devices of one node use the link *inside*, others the link *between*.

    Attributes:
        inside: Link between two devices of a node.
        between: Link between two nodes; None where all devices stand in one.
        host: Link between a device and the host's memory, one per device, each direction its own; for OFFLOAD and RELOAD.
        devices_per_node: How many devices a node holds, in device order; None for one node that holds all.
        device: What every device is unless *devices* says otherwise.
        devices: Device number to what is different there.
        links: (from, to) to a link that differs from both rules, each direction its own.
        unit: ``"s"`` for a physical cluster, ``"slot"`` for abstract time.
        name: For summaries.

    Examples:
        >>> cluster = Cluster(inside=Link(5e-6, 240e9), between=Link(10e-6, 25e9), devices_per_node=8)
        >>> cluster.link(6, 7).bandwidth, cluster.link(7, 8).bandwidth
        (240000000000.0, 25000000000.0)
    """

    inside: Link = Link()
    between: Link | None = None
    devices_per_node: int | None = None
    device: Device = Device()
    devices: Mapping[int, Device] = field(default_factory=dict)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    unit: Unit = "s"
    name: str = "cluster"
    host: Link = Link()

    @classmethod
    def uniform(cls, latency: float = 0.0, bandwidth: float | None = None, *, unit: Unit = "slot", memory: float | None = None) -> Cluster:
        """A cluster whose links are all alike.

        Examples:
            >>> Cluster.uniform(latency=0.25).link(0, 3)
            Link(latency=0.25, bandwidth=None)
        """
        return cls(inside=Link(latency, bandwidth), device=Device(memory=memory), unit=unit, name="uniform")

    @classmethod
    def load(cls, source: str | Path) -> Cluster:
        """Reads a cluster file in TOML, or a preset by its name.

        Args:
            source: A path, or one of :func:`cluster_presets`.

        Raises:
            ScheduleError: A key is unknown, a value has no unit, or there is neither such a file nor such a preset.

        Examples:
            >>> Cluster.load("dgx-a100").device.memory
            80000000000.0
        """
        path = Path(source)
        preset = PRESETS / f"{_PREFIX}{str(source).lower()}.toml"
        if not path.is_file():
            if not preset.is_file():
                known = cluster_presets()
                raise ScheduleError(
                    f"there is no cluster file {str(source)!r}, and no preset of that name{did_you_mean(str(source), known)}; presets: {', '.join(known)}"
                )
            path = preset
        return cls.from_toml(read_limited(path), str(path))

    @classmethod
    def from_toml(cls, text: str, where: str = "cluster") -> Cluster:
        r"""Reads the text of a cluster file; see ``docs/files.md`` for every key.

        Examples:
            >>> Cluster.from_toml('[inside]\nlatency = "5 us"\nbandwidth = "25 GB/s"').inside
            Link(latency=5e-06, bandwidth=25000000000.0)
        """
        from pipesim.userfiles import ClusterFile, parse_toml

        return _from_file(parse_toml(ClusterFile, text, where), where)

    def with_memory(self, memory: float) -> Cluster:
        """Returns the cluster with this capacity on every device."""
        devices = {number: replace(device, memory=memory) for number, device in self.devices.items()}
        return replace(self, device=replace(self.device, memory=memory), devices=devices)

    def link(self, source: int, target: int) -> Link:
        """The link from one device to another."""
        special = self.links.get((source, target))
        if special is not None:
            return special
        if self.between is None or self.devices_per_node is None or source // self.devices_per_node == target // self.devices_per_node:
            return self.inside
        return self.between

    def speeds(self, num_devices: int) -> NDArray[np.float64]:
        """(devices,) the speed of each device."""
        return np.array([self.devices.get(d, self.device).speed for d in range(num_devices)])

    def capacities(self, num_devices: int) -> NDArray[np.float64]:
        """(devices,) the capacity of each device, infinite where there is no limit."""
        memories = [self.devices.get(d, self.device).memory for d in range(num_devices)]
        return np.array([math.inf if memory is None else memory for memory in memories])

    def __post_init__(self) -> None:
        if self.unit not in ("s", "slot"):
            raise ScheduleError(f"unit must be 's' or 'slot', got {self.unit!r}")
        if self.devices_per_node is not None:
            require_count("devices_per_node", self.devices_per_node)
        if (self.between is None) != (self.devices_per_node is None):
            raise ScheduleError("devices_per_node and between belong together; give both, or neither for one node")

    def check(self, num_devices: int) -> None:
        """Verifies that exceptions name devices that there are.

        Raises:
            ScheduleError: One does not.
        """
        for number in {*self.devices, *(device for pair in self.links for device in pair)}:
            if not 0 <= number < num_devices:
                raise ScheduleError(f"cluster {self.name!r} says something about device {number}, and the schedule has devices 0..{num_devices - 1}")


def cluster_presets() -> list[str]:
    """Names of the clusters that ship with pipesim.

    Examples:
        >>> "dgx-h100" in cluster_presets()
        True
    """
    return sorted(path.stem.removeprefix(_PREFIX) for path in PRESETS.glob(f"{_PREFIX}*.toml"))


def _from_file(file: BaseModel, where: str) -> Cluster:
    data: dict[str, Any] = file.model_dump(by_alias=True, exclude_none=True)

    def link(values: dict[str, Any], name: str, base: Link = Link()) -> Link:
        latency = parse_quantity(values["latency"], "time", f"{where}: {name}.latency") if "latency" in values else base.latency
        bandwidth = parse_quantity(values["bandwidth"], "bandwidth", f"{where}: {name}.bandwidth") if "bandwidth" in values else base.bandwidth
        return Link(latency, bandwidth)

    def device(values: dict[str, Any], base: Device, name: str) -> Device:
        memory = parse_quantity(values["memory"], "bytes", f"{where}: {name}.memory") if "memory" in values else base.memory
        return Device(values.get("speed", base.speed), memory, values.get("width", base.width))

    base = device(data.get("device", {}), Device(), "device")
    devices = {}
    for number, entry in enumerate(data.get("devices", [])):
        for index in entry["numbers"]:
            if index in devices:
                raise ScheduleError(f"{where}: two [[devices]] entries speak of device {index}")
            devices[index] = device(entry, base, f"devices[{number}]")
    between = link(data["between"], "between") if "between" in data else None
    if (between is None) != ("devices_per_node" not in data):
        raise ScheduleError(f"{where}: devices_per_node and [between] belong together; give both, or neither for one node")
    inside, host = link(data.get("inside", {}), "inside"), link(data.get("host", {}), "host")
    rule = Cluster(inside, between, data.get("devices_per_node"))
    links = {}
    for number, entry in enumerate(data.get("links", [])):
        pair = (entry["from"], entry["to"])
        if pair[0] == pair[1]:
            raise ScheduleError(f"{where}: links[{number}] goes from device {pair[0]} to itself; a link joins two devices")
        if pair in links:
            raise ScheduleError(f"{where}: two [[links]] entries speak of {pair[0]} -> {pair[1]}")
        # what an entry leaves out stays as the rule has it
        links[pair] = link(entry, f"links[{number}]", rule.link(*pair))
    return Cluster(inside, between, data.get("devices_per_node"), base, devices, links, "s", data.get("name", Path(where).stem), host)
