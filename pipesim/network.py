"""What transfers share on their way: network ports, switches and buses; and where devices stand.

A resource has a capacity in bytes per unit of time. A route is what a transfer crosses: pairs of a resource and a load, which
says how many times the transfer's bytes cross it. A load is above 1 where GPUs send at the same time over one resource: those
of one device (tensor parallelism), and those of pipelines that train side by side in lockstep (data parallelism).

::

    GPU --port--> node --> GPU                                              inside a node (and over its bus, if it has one)
    GPU --bus--> --PCIe--> --NIC--> switch ==> switch --NIC--> --PCIe--> --bus--> GPU           between two nodes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ScheduleError, did_you_mean, require_count

if TYPE_CHECKING:
    from pipesim.cluster import Cluster
    from pipesim.hardware import Node

__all__ = ["HOST", "Links", "Network", "Placement", "Resource", "Route", "Sharing", "Utilisation", "slowest", "time_alone", "utilisation"]

Sharing = Literal["none", "fifo", "fair"]
Order = Literal["megatron", "round-robin"]
Floats = NDArray[np.float64]

HOST = -1  # where a route needs a device: the host's memory


class Resource(NamedTuple):
    """What transfers share: its name, and its capacity in bytes per unit of time."""

    name: str
    capacity: float


Route = tuple[tuple[Resource, float], ...]


@dataclass(frozen=True)
class Placement:
    """Which GPUs each device of the pipeline stands for: *width* of each of *data* pipelines that train side by side.

    Attributes:
        order: ``megatron``: GPUs are counted with the GPUs of a device fastest (tensor), then the pipelines (data), then the
            devices (pipeline). ``round-robin``: the devices of all pipelines, in that order, are dealt to the nodes in turn.
        data: Pipelines. One is simulated, the others do the same at the same time.
        gpus: Instead of an order: per device its GPUs, pipeline by pipeline. GPU i of node k is number k · GPUs per node + i.

    Examples:
        >>> Placement(gpus=((0,), (8,))).order
        'megatron'
    """

    order: Order = "megatron"
    data: int = 1
    gpus: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            known = get_args(Order)
            raise ScheduleError(f"order must be one of {', '.join(known)}, got {self.order!r}{did_you_mean(str(self.order), known)}")
        require_count("data", self.data)
        if self.gpus is not None:
            object.__setattr__(self, "gpus", tuple(tuple(require_count("a GPU", gpu, 0) for gpu in device) for device in self.gpus))
            self._check_gpus()

    def _check_gpus(self) -> None:
        owner: dict[int, int] = {}
        for device, own in enumerate(self.gpus or ()):
            for gpu in own:
                if gpu in owner:
                    twice = f"device {device} twice" if owner[gpu] == device else f"devices {owner[gpu]} and {device}"
                    raise ScheduleError(f"gpus gives GPU {gpu} to {twice}; each GPU stands for one device, once")
                owner[gpu] = device


class Network:
    """What the transfers of a cluster share, and the route of each.

    Attributes:
        discipline: ``fifo``: a resource serves one transfer at a time, first come first served. ``fair``: all at once, by
            max-min fair shares.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.discipline: Sharing = cluster.sharing

    def route(self, source: int, target: int) -> Route:
        """What a transfer from one device to another crosses; one of the two may be :data:`HOST`.

        Every GPU of the target gets the bytes, from the GPU of the source at the same place among its own.
        """
        device = max(source, target)
        loads: Counter[Resource] = Counter()
        if HOST in (source, target):
            link = self.cluster.host
            for gpu in self.cluster.gpus(device):
                loads.update(self._to_host(gpu, out=target == HOST))
        else:
            link = self.cluster.link(source, target)
            for pair in self.cluster.gpu_pairs(source, target):
                loads.update(self._hops(*pair))
        # a link that is slower than all that it shares is a bottleneck of its own
        if link.bandwidth is not None and all(link.bandwidth < resource.capacity / load for resource, load in loads.items()):
            loads[private(source, target, link.bandwidth)] = 1
        return tuple((resource, float(load)) for resource, load in loads.items())

    def ring(self, devices: Sequence[int]) -> Route:
        """What a ring over devices and their peers in all pipelines crosses, per byte that each member sends to the next.

        Where g members stand in every node, g rings side by side carry a g-th each, so that all their network ports are used.
        """
        widths = {len(self.cluster.gpus(device)) // self.cluster.pipelines for device in devices}
        loads: dict[Resource, float] = {}
        for rank in range(min(widths)):
            members = sorted(gpu for device in devices for gpu in self.cluster.peers(device, rank))
            nodes: dict[int, list[int]] = {}
            for gpu in members:
                nodes.setdefault(self.cluster.node_of(gpu), []).append(gpu)
            rings = min(len(own) for own in nodes.values())
            for first in range(rings):
                ring = [gpu for own in nodes.values() for gpu in (*own[first:], *own[:first])]
                for gpu, after in zip(ring, [*ring[1:], ring[0]], strict=True):
                    for resource in self._hops(gpu, after) if gpu != after else ():
                        loads[resource] = loads.get(resource, 0.0) + 1 / rings
        return tuple(loads.items())

    def _hops(self, source: int, target: int) -> list[Resource]:
        """From GPU to GPU."""
        home, there = self.cluster.node_of(source), self.cluster.node_of(target)
        if home == there:
            found = [self._port(source, "out"), self._port(target, "in"), self._bus(home)]
        else:
            found = [self._bus(home), self._pcie(source, "up"), self._nic(source, "out"), *self._uplinks(home, there)]
            found += [self._nic(target, "in"), self._pcie(target, "down"), self._bus(there)]
        return [resource for resource in found if resource is not None]

    def _to_host(self, gpu: int, *, out: bool) -> list[Resource]:
        found = [self._bus(self.cluster.node_of(gpu)), self._pcie(gpu, "up" if out else "down")]
        return [resource for resource in found if resource is not None]

    def _node(self, number: int) -> Node:
        return self.cluster.nodes.get(number, self.cluster.node)

    def _way(self, node: int, what: str, way: str) -> str:
        return "" if what in self._node(node).half_duplex else f" {way}"

    def _port(self, gpu: int, way: str) -> Resource | None:
        node = self.cluster.node_of(gpu)
        bandwidth = self._node(node).port_bandwidth or self.cluster.inside.bandwidth
        return None if bandwidth is None else Resource(f"GPU {gpu} port{self._way(node, 'port', way)}", bandwidth)

    def _bus(self, node: int) -> Resource | None:
        bandwidth = self._node(node).bus_bandwidth
        return None if bandwidth is None else Resource(f"node {node} bus", bandwidth)

    def _pcie(self, gpu: int, way: str) -> Resource | None:
        node = self.cluster.node_of(gpu)
        shared = self._node(node)
        if shared.pcie_bandwidth is None:
            return None
        return Resource(f"node {node} PCIe {self._place(gpu, shared.pcie_switches)}{self._way(node, 'pcie', way)}", shared.pcie_bandwidth)

    def _nic(self, gpu: int, way: str) -> Resource | None:
        node = self.cluster.node_of(gpu)
        shared, bandwidth = self._node(node), self._nic_bandwidth(node)
        if bandwidth is None:
            return None
        return Resource(f"node {node} NIC {self._place(gpu, shared.nics)}{self._way(node, 'nic', way)}", bandwidth)

    def _nic_bandwidth(self, node: int) -> float | None:
        between = self.cluster.between
        return self._node(node).nic_bandwidth or (None if between is None else between.bandwidth)

    def _place(self, gpu: int, number: int | None) -> int:
        """Which of *number* alike things of its node a GPU uses."""
        gpus = self.cluster.devices_per_node
        if gpus is None:
            return 0
        return gpu % gpus if number is None else gpu % gpus * number // gpus

    def _uplinks(self, home: int, there: int) -> list[Resource | None]:
        fabric = self.cluster.fabric
        if fabric is None or home // fabric.nodes_per_switch == there // fabric.nodes_per_switch:
            return []
        return [self._uplink(home // fabric.nodes_per_switch, "up"), self._uplink(there // fabric.nodes_per_switch, "down")]

    def _uplink(self, switch: int, way: str) -> Resource | None:
        fabric, gpus = self.cluster.fabric, self.cluster.devices_per_node
        assert fabric is not None  # only they have uplinks
        total = 0.0
        for node in range(switch * fabric.nodes_per_switch, (switch + 1) * fabric.nodes_per_switch):
            total += (self._nic_bandwidth(node) or np.inf) * (self._node(node).nics or gpus or 1)
        return None if np.isinf(total) else Resource(f"switch {switch} {way}", total / fabric.oversubscription)


def private(source: int, target: int, bandwidth: float) -> Resource:
    """The link that two devices (or a device and the host) have to themselves, in one direction."""
    names = ["host" if device == HOST else str(device) for device in (source, target)]
    return Resource(f"{names[0]} -> {names[1]}", bandwidth)


def time_alone(route: Route, size: float) -> float:
    """Time of *size* bytes over a route that nobody else uses: that of its slowest resource.

    Examples:
        >>> time_alone(((Resource("a", 10.0), 1.0), (Resource("b", 16.0), 2.0)), 40.0)
        5.0
    """
    load, capacity = slowest(route)
    return size * load / capacity


def slowest(route: Route) -> tuple[float, float]:
    """Load and capacity of what holds a route up; (0, 1) for a route that crosses nothing."""
    return min(((load, resource.capacity) for resource, load in route), key=lambda pair: pair[1] / pair[0], default=(0.0, 1.0))


@dataclass(frozen=True, eq=False)
class Links:
    """The routes of a run, as columns: what its utilisation needs, and small, because it is per pair of devices.

    Attributes:
        names: Of the resources.
        capacity: (resources,) bytes per unit of time.
        latency: (routes,)
        first: (routes + 1,) bounds: route k crosses ``resource[first[k]:first[k + 1]]``.
        resource: (crossings,) numbers of resources.
        load: (crossings,) how many times the bytes cross it.
    """

    names: tuple[str, ...]
    capacity: Floats
    latency: Floats
    first: NDArray[np.int64]
    resource: NDArray[np.int64]
    load: Floats

    @classmethod
    def of(cls, cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> Links:
        """The routes between pairs of devices (from, to), one of which may be :data:`HOST`; each is a route, in this order."""
        routes = [cluster.route(*pair) for pair in pairs]
        latency = [(cluster.host if HOST in pair else cluster.link(*pair)).latency for pair in pairs]
        return cls.of_routes(routes, latency)

    @classmethod
    def of_routes(cls, routes: Sequence[Route], latency: Sequence[float]) -> Links:
        """The same of routes, such as those of collectives."""
        number: dict[Resource, int] = {}
        crossings = [(number.setdefault(resource, len(number)), load) for route in routes for resource, load in route]
        return cls(
            tuple(resource.name for resource in number),
            np.array([resource.capacity for resource in number], dtype=np.float64),
            np.array(latency, dtype=np.float64),
            np.cumsum([0, *map(len, routes)]),
            np.array([which for which, _ in crossings], dtype=np.int64),
            np.array([load for _, load in crossings], dtype=np.float64),
        )


class Utilisation(NamedTuple):
    """How much every resource had to do.

    Attributes:
        names: Of the resources.
        capacity: (resources,) bytes per unit of time.
        size: (resources,) bytes that crossed it.
        busy: (resources,) time in which something was crossing it.
        busy_share: (resources,) *busy* over the time of the run.
        share: (resources,) bytes over what it could have carried in the time of the run.
    """

    names: tuple[str, ...]
    capacity: Floats
    size: Floats
    busy: Floats
    busy_share: Floats
    share: Floats


def utilisation(links: Links, route: NDArray[np.int64], size: Floats, departed: Floats, arrived: Floats, span: float) -> Utilisation:
    """Utilisation of every resource.

    Args:
        links: The routes.
        route: (transfers,) which route each transfer takes.
        size: (transfers,) bytes.
        departed: (steps, transfers) when its link, or its route, took it.
        arrived: (steps, transfers) when it was there, the latency included.
        span: Time of the run: its makespan.

    Examples:
        >>> links = Links.of_routes([((Resource("wire", 10.0), 1.0),)], [0.5])
        >>> found = utilisation(links, np.array([0, 0]), np.array([20.0, 10.0]), np.array([[0.0, 4.0]]), np.array([[2.5, 5.5]]), 6.0)
        >>> found.size.tolist(), found.busy.tolist(), found.share.tolist()
        ([30.0], [3.0], [0.5])
    """
    count = np.diff(links.first)[route]
    # every transfer once for each resource that it crosses
    transfer = np.repeat(np.arange(len(route)), count)
    crossing = np.arange(len(transfer)) - np.repeat(np.cumsum(count) - count, count) + links.first[route][transfer]
    resource, steps = links.resource[crossing], departed.shape[0]
    carried = np.bincount(resource, size[transfer] * links.load[crossing], len(links.names)) * steps
    left = arrived - links.latency[route]
    busy = np.zeros(len(links.names))
    order = np.argsort(resource, kind="stable")
    bounds = np.searchsorted(resource[order], np.arange(len(links.names) + 1))
    for number in range(len(links.names)):
        own = transfer[order[bounds[number] : bounds[number + 1]]]
        busy[number] = _covered(departed[:, own].ravel(), left[:, own].ravel())
    over = np.divide(1.0, span) if span > 0 else 0.0
    return Utilisation(links.names, links.capacity, carried, busy, busy * over, carried / links.capacity * over)


def _covered(begin: Floats, end: Floats) -> float:
    """Length of the union of intervals."""
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    gaps = np.maximum(begin[1:] - end[:-1], 0.0)
    return float(end[-1] - begin[0] - gaps.sum()) if len(begin) else 0.0
