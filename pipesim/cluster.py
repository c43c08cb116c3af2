"""The machine: devices with a speed, a width and a capacity, where they stand, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pipesim.communication import Communication
from pipesim.errors import ScheduleError, did_you_mean, require_count
from pipesim.files import read_limited
from pipesim.hardware import Device, Fabric, Link, Node
from pipesim.network import HOST, Network, Placement, Route, Sharing, private
from pipesim.presets import file_or_preset, preset_names
from pipesim.units import format_time

__all__ = ["Cluster", "Device", "Fabric", "Link", "Node", "Placement", "Unit", "cluster_presets"]

Unit = Literal["s", "slot"]


@dataclass(frozen=True)
class Cluster:
    """Devices in nodes; two devices of one node use the link *inside*, others the link *between*.

    Attributes:
        inside: Link between two devices of a node.
        between: Link between two nodes; None where all devices stand in one.
        host: Link between a device and the host's memory, one per device, each direction its own; for OFFLOAD and RELOAD.
        devices_per_node: How many devices a node holds, in device order; None for one node that holds all. Where there is a
            placement, or links are shared, it counts GPUs, which is the same unless a device stands for several.
        device: What every device is unless *devices* says otherwise.
        devices: Device number to what is different there.
        links: (from, to) to a link that differs from both rules, each direction its own.
        unit: ``"s"`` for a physical cluster, ``"slot"`` for abstract time.
        name: For summaries.
        communication: How devices communicate.
        sharing: What links have in common: ``none``, each ordered pair of devices has its own; ``fifo`` or ``fair``, transfers
            share what the nodes and the fabric have, first come first served or by max-min fair shares.
        node: What every node is unless *nodes* says otherwise.
        nodes: Node number to what is different there.
        fabric: Switches between the nodes; None for a network that is never the bottleneck.
        placement: Which GPUs each device stands for; None for Megatron's order and one pipeline.
        node_count: Nodes that there are; None for as many as are needed.

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
    communication: Communication = Communication()
    sharing: Sharing = "none"
    node: Node = Node()
    nodes: Mapping[int, Node] = field(default_factory=dict)
    fabric: Fabric | None = None
    placement: Placement | None = None
    node_count: int | None = None

    @staticmethod
    def uniform(latency: float = 0.0, bandwidth: float | None = None, *, unit: Unit = "slot", memory: float | None = None) -> Cluster:
        """A cluster whose links are all alike.

        Examples:
            >>> Cluster.uniform(latency=0.25).link(0, 3)
            Link(latency=0.25, bandwidth=None)
        """
        return _uniform(latency, bandwidth, unit, memory)

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
        path = file_or_preset(source, "cluster", "cluster")
        return cls.from_toml(read_limited(path), str(path))

    @classmethod
    def from_toml(cls, text: str, where: str = "cluster") -> Cluster:
        r"""Reads the text of a cluster file; see ``docs/files.md`` for every key.

        Examples:
            >>> Cluster.from_toml('[inside]\nlatency = "5 us"\nbandwidth = "25 GB/s"').inside
            Link(latency=5e-06, bandwidth=25000000000.0)
        """
        from pipesim.clusterfiles import at, read_cluster

        values, links = read_cluster(text, where)
        cluster = at(f"{where}: ", cls, **values)
        return at(f"{where}: ", lambda: replace(cluster, links={pair: differs(cluster.link(*pair)) for pair, differs in links.items()}))

    def with_memory(self, memory: float) -> Cluster:
        """Returns the cluster with this capacity on every device."""
        devices = {number: replace(device, memory=memory) for number, device in self.devices.items()}
        nodes = {number: replace(node, memory=None) for number, node in self.nodes.items()}
        return replace(self, device=replace(self.device, memory=memory), devices=devices, node=replace(self.node, memory=None), nodes=nodes)

    # -- where devices stand ---------------------------------------------------------------------------------------------

    @property
    def pipelines(self) -> int:
        """How many pipelines train side by side, as the placement says."""
        return 1 if self.placement is None else self.placement.data

    def width(self, device: int) -> int:
        """GPUs that a device stands for."""
        return self.devices.get(device, self.device).width

    def gpus(self, device: int) -> tuple[int, ...]:
        """The GPUs that a device stands for, pipeline by pipeline.

        Without a placement, and where no links are shared, a device takes one place, whatever its width.

        Examples:
            >>> Cluster(device=Device(width=2), placement=Placement(data=2)).gpus(1)
            (4, 5, 6, 7)
        """
        if self.placement is None and self.sharing == "none":
            return (device,)
        width, data = self.width(device), self.pipelines
        placement = self.placement or Placement()
        if placement.gpus is not None:
            if device >= len(placement.gpus):
                raise ScheduleError(f"cluster {self.name!r}: gpus places devices 0..{len(placement.gpus) - 1}, and there is a device {device}")
            found = placement.gpus[device]
            if len(found) != width * data:
                why = f"width {width} x data {data}"
                raise ScheduleError(f"cluster {self.name!r}: gpus gives device {device} {len(found)} GPUs, and it stands for {width * data} ({why})")
            return found
        if placement.order == "megatron":
            before = device * self.device.width + sum(other.width - self.device.width for number, other in self.devices.items() if number < device)
            return tuple(range(data * before, data * (before + width)))
        return tuple(gpu for replica in range(data) for gpu in self._dealt(device * data + replica, width))

    def _dealt(self, group: int, width: int) -> range:
        """Round robin: the GPUs of one device of one pipeline."""
        if self.node_count is None or self.devices_per_node is None:
            raise ScheduleError(f"cluster {self.name!r}: order = 'round-robin' deals devices to nodes; say node_count and devices_per_node")
        if any(device.width != width for device in self.devices.values()):
            raise ScheduleError(
                f"cluster {self.name!r}: order = 'round-robin' wants devices of one width; place others with gpus = [[0, 1], [8], ...]"
            )
        turn, node = divmod(group, self.node_count)
        if (turn + 1) * width > self.devices_per_node:
            raise ScheduleError(f"cluster {self.name!r}: {self.node_count} nodes of {self.devices_per_node} GPUs have no room for all devices")
        first = node * self.devices_per_node + turn * width
        return range(first, first + width)

    def gpu_pairs(self, source: int, target: int) -> list[tuple[int, int]]:
        """Who sends to whom: every GPU of the target hears from the GPU at the same place in the source, in every pipeline."""
        here, there = self.gpus(source), self.gpus(target)
        if len(here) == len(there):
            return list(zip(here, there, strict=True))
        wide, narrow = len(there) // self.pipelines, len(here) // self.pipelines
        return [(here[k // wide * narrow + k % wide * narrow // wide], gpu) for k, gpu in enumerate(there)]

    def peers(self, device: int, rank: int) -> tuple[int, ...]:
        """The GPUs that do the same as the *rank*-th of a device, one in each pipeline."""
        found = self.gpus(device)
        return found[rank :: len(found) // self.pipelines]

    def node_of(self, gpu: int) -> int:
        """The node in which a GPU stands."""
        return 0 if self.devices_per_node is None else gpu // self.devices_per_node

    # -- links -----------------------------------------------------------------------------------------------------------

    @cached_property
    def network(self) -> Network | None:
        """What transfers share; None where every ordered pair of devices has a link of its own."""
        return None if self.sharing == "none" else Network(self)

    def link(self, source: int, target: int) -> Link:
        """The link from one device to another. Where links are shared, it bounds what the two can send, and has the latency."""
        special = self.links.get((source, target))
        if special is not None:
            return special
        if self.between is None or self.devices_per_node is None:
            return self.inside
        if all(self.node_of(one) == self.node_of(other) for one, other in self.gpu_pairs(source, target)):
            return self.inside
        return self.between

    def route(self, source: int, target: int) -> Route:
        """What a transfer from one device to another crosses, one of which may be ``HOST``: shared resources, or its own link.

        Examples:
            >>> Cluster(inside=Link(5e-6, 240e9)).route(0, 1)
            ((Resource(name='0 -> 1', capacity=240000000000.0), 1.0),)
        """
        if self.network is not None:
            return self.network.route(source, target)
        bandwidth = (self.host if HOST in (source, target) else self.link(source, target)).bandwidth
        return () if bandwidth is None else ((private(source, target, bandwidth), 1.0),)

    def speeds(self, num_devices: int) -> NDArray[np.float64]:
        """(devices,) the speed of each device: that of the slowest of its GPUs."""
        if self.alike:
            return np.full(num_devices, self.device.speed)
        return np.array([self._least(d, self.devices.get(d, self.device).speed, lambda node: node.speed) for d in range(num_devices)])

    def capacities(self, num_devices: int) -> NDArray[np.float64]:
        """(devices,) the capacity of each device, infinite where there is no limit: that of the smallest of its GPUs."""
        if self.alike:
            return np.full(num_devices, math.inf if self.device.memory is None else self.device.memory)
        memories = [self._least(d, self.devices.get(d, self.device).memory, lambda node: node.memory) for d in range(num_devices)]
        return np.array([math.inf if memory is None else memory for memory in memories])

    @property
    def alike(self) -> bool:
        """Whether every device is what *device* says."""
        return not self.devices and not self._typed

    @property
    def _typed(self) -> bool:
        """Whether nodes say what their GPUs are."""
        return any(node.speed is not None or node.memory is not None for node in (self.node, *self.nodes.values()))

    def _least(self, device: int, usual: float | None, of_node: Callable[[Node], float | None]) -> float | None:
        found = []
        for number in {self.node_of(gpu) for gpu in self.gpus(device)} if self._typed else ():
            own = of_node(self.nodes.get(number, self.node))
            found.append(usual if own is None else own)
        return min((value for value in found if value is not None), default=None) if found else usual

    def describe(self, num_devices: int) -> str:
        """Says where every device stands, and what a hop to the next one crosses.

        Examples:
            >>> print(Cluster(Link(), Link(1e-5, 25e9), 8, sharing="fair", node=Node(nics=1), placement=Placement(gpus=((0,), (8,)))).describe(2))
            device 0: GPU 0, node 0
            device 1: GPU 8, node 1
            0 -> 1: 10 µs, node 0 NIC 0 out, node 1 NIC 0 in
            1 -> 0: 10 µs, node 1 NIC 0 out, node 0 NIC 0 in
        """
        lines = []
        for device in range(num_devices):
            gpus = self.gpus(device)
            nodes = sorted({self.node_of(gpu) for gpu in gpus})
            several = "" if len(gpus) == 1 else "s"
            lines.append(f"device {device}: GPU{several} {_ranges(gpus)}, node{'' if len(nodes) == 1 else 's'} {_ranges(nodes)}")
        hops = [pair for device in range(num_devices - 1) for pair in ((device, device + 1), (device + 1, device))]
        for source, target in hops:
            crossed = [resource.name + (f" x {load:g}" if load != 1 else "") for resource, load in self.route(source, target)]
            crossed[4:] = [f"and {len(crossed) - 4} more"] if len(crossed) > 4 else []
            latency = format_time(self.link(source, target).latency, self.unit)
            lines.append(f"{source} -> {target}: {', '.join([latency, *crossed])}")
        return "\n".join(lines)

    def __post_init__(self) -> None:
        if self.unit not in ("s", "slot"):
            raise ScheduleError(f"unit must be 's' or 'slot', got {self.unit!r}")
        if self.devices_per_node is not None:
            require_count("devices_per_node", self.devices_per_node)
        if (self.between is None) != (self.devices_per_node is None):
            raise ScheduleError("devices_per_node and between belong together; give both, or neither for one node")
        if self.sharing not in get_args(Sharing):
            known = get_args(Sharing)
            raise ScheduleError(f"sharing must be one of {', '.join(known)}, got {self.sharing!r}{did_you_mean(str(self.sharing), known)}")
        if self.node_count is not None and require_count("node_count", self.node_count) > 1 and self.devices_per_node is None:
            raise ScheduleError(f"node_count = {self.node_count} nodes need devices_per_node and between")
        if self.fabric is not None and self.devices_per_node is None:
            raise ScheduleError("a fabric joins nodes, and there is one; give devices_per_node and between")
        for number, node in ((None, self.node), *self.nodes.items()):
            where = "" if number is None else f"node {number}: "
            for name in ("nics", "pcie_switches"):
                if self.devices_per_node is not None and (getattr(node, name) or 1) > self.devices_per_node:
                    raise ScheduleError(f"{where}{name} = {getattr(node, name)} is more than its {self.devices_per_node} GPUs; each GPU uses one")
        if (
            self.nodes
            and self._typed
            and any((device.speed, device.memory) != (self.device.speed, self.device.memory) for device in self.devices.values())
        ):
            raise ScheduleError("both nodes and devices give speed or memory; where nodes say what their GPUs are, devices may say their width alone")

    def check(self, num_devices: int) -> None:
        """Verifies that exceptions name devices and nodes that there are, and that every device stands on GPUs that there are.

        Raises:
            ScheduleError: One does not.
        """
        total = None if self.node_count is None or self.devices_per_node is None else self.node_count * self.devices_per_node
        for number in self.nodes:
            if self.node_count is not None and number >= self.node_count:
                raise ScheduleError(f"cluster {self.name!r} says something about node {number}, and has nodes 0..{self.node_count - 1}")
        for device in range(num_devices if self.placement is not None or total is not None else 0):
            for gpu in self.gpus(device):
                if total is not None and gpu >= total:
                    nodes = f"{self.node_count} nodes of {self.devices_per_node} GPUs"
                    raise ScheduleError(f"cluster {self.name!r} has GPUs 0..{total - 1} ({nodes}), and device {device} stands on GPU {gpu}")
        for number in {*self.devices, *(device for pair in self.links for device in pair)}:
            if not 0 <= number < num_devices:
                raise ScheduleError(f"cluster {self.name!r} says something about device {number}, and the schedule has devices 0..{num_devices - 1}")


@lru_cache(maxsize=64)
def _uniform(latency: float, bandwidth: float | None, unit: Unit, memory: float | None) -> Cluster:
    return Cluster(inside=Link(latency, bandwidth), device=Device(memory=memory), unit=unit, name="uniform")


def _ranges(numbers: Sequence[int]) -> str:
    """0-3, 8: neighbours together."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def cluster_presets() -> list[str]:
    """Names of the clusters that ship with pipesim.

    Examples:
        >>> "dgx-h100" in cluster_presets()
        True
    """
    return preset_names("cluster")
