"""Collectives over a ring, and which links the GPUs of a group have between them.

Ranks are laid out as Megatron lays them out: tensor parallelism innermost, then data, then pipeline. GPU number
``(stage · d + replica) · t + rank``, so a tensor-parallel group lies side by side, a data-parallel group is t apart, and
two neighbouring stages are t·d apart.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pipesim.cluster import Cluster, Device, Link
from pipesim.models.devices import DeviceSpec
from pipesim.models.parallelism import Parallelism

__all__ = ["all_gather_time", "all_reduce_time", "gradient_link", "pipeline_cluster", "tensor_link"]


def all_reduce_time(members: int, size: float, link: Link) -> float:
    """Seconds of a ring all-reduce: ``2(n − 1)·α + 2(n − 1)/n · S/β``.

    Args:
        members: n, GPUs in the ring.
        size: S, bytes on each of them.
        link: α and β of one hop.

    Examples:
        >>> round(all_reduce_time(8, 2**30, Link(0.0, 240e9)) * 1e3, 2)
        7.83
    """
    return 2 * all_gather_time(members, size, link)


def all_gather_time(members: int, size: float, link: Link) -> float:
    """Seconds of a ring all-gather (or reduce-scatter) of *size* bytes in all: ``(n − 1)·α + (n − 1)/n · S/β``."""
    return (members - 1) * link.time(size / members)


def _group_link(cluster: Cluster, members: int, stride: int, inside: float, between: float) -> Link:
    """One hop of the ring of GPUs that are *stride* apart.

    Inside a node it is the GPU's own link. Across nodes a ring of k members per node goes out and in once per node, and
    uses the network ports of k GPUs, because as many rings as fit share the node's ports.
    """
    node = cluster.devices_per_node
    if node is None or cluster.between is None or (members - 1) * stride < node:
        return _scaled(cluster.inside, inside)
    per_node = max(1, node // stride)
    wide = replace(cluster.between, bandwidth=None if cluster.between.bandwidth is None else cluster.between.bandwidth * per_node * between)
    slowest = min(_bandwidth(wide), _bandwidth(_scaled(cluster.inside, inside)) if per_node > 1 else math.inf)
    return replace(wide, bandwidth=None if math.isinf(slowest) else slowest)


def tensor_link(device: DeviceSpec, parallel: Parallelism) -> Link:
    """One hop of a tensor-parallel ring."""
    return _group_link(device.cluster, parallel.tensor, 1, device.efficiency.inside, device.efficiency.between)


def gradient_link(device: DeviceSpec, parallel: Parallelism, replicas: int = 1) -> Link:
    """One hop of the ring that reduces gradients: *data* pipelines, times the replicas of a stage inside one pipeline."""
    members = parallel.data * replicas
    return _group_link(device.cluster, members, parallel.tensor, device.efficiency.inside, device.efficiency.gradient)


def pipeline_cluster(device: DeviceSpec, parallel: Parallelism, *, memory: float | None = None) -> Cluster:
    """The cluster as one pipeline sees it: a device per stage group, which stands for *tensor* GPUs; links and memory of one GPU.

    Args:
        device: The GPU and its node.
        parallel: Degrees; they say which neighbouring stages share a node.
        memory: Bytes of each GPU; those of *device* by default.

    Examples:
        >>> from pipesim.models.devices import read_device
        >>> cluster = pipeline_cluster(read_device("a100-80g"), Parallelism(tensor=4, pipeline=4))
        >>> cluster.devices_per_node, cluster.link(0, 1).bandwidth > cluster.link(1, 2).bandwidth
        (2, True)
    """
    base, part = device.cluster, device.efficiency.pipeline
    per_node = None if base.devices_per_node is None else max(1, base.devices_per_node // (parallel.tensor * parallel.data))
    return Cluster(
        inside=_scaled(base.inside, part),
        between=None if base.between is None else _scaled(base.between, part),
        devices_per_node=per_node,
        device=Device(base.device.speed, device.memory if memory is None else memory, parallel.tensor),
        unit=base.unit,
        name=base.name,
        host=Link(base.host.latency, device.host_bandwidth),
    )


def _scaled(link: Link, part: float) -> Link:
    return link if link.bandwidth is None else replace(link, bandwidth=link.bandwidth * part)


def _bandwidth(link: Link) -> float:
    return math.inf if link.bandwidth is None else link.bandwidth
