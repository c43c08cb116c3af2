"""Which GPUs of a cluster form the groups of a parallel model, what links they have, and how long a ring among them takes.

Ranks are laid out as Megatron lays them out: tensor parallelism innermost, then data, then pipeline. GPU number
``(stage · d + replica) · t + rank``, so a tensor-parallel group lies side by side, a data-parallel group is t apart, and
two neighbouring stages are t·d apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from pipesim.cluster import Cluster, Device, Link, Placement
from pipesim.collectives import Collective, collective_time
from pipesim.errors import ScheduleError
from pipesim.models.devices import DeviceSpec
from pipesim.models.parallelism import Parallelism

__all__ = ["Group", "gradient_group", "pipeline_cluster", "ring_time", "tensor_group"]


class Group(NamedTuple):
    """GPUs that do a collective together.

    Attributes:
        members: n, how many.
        nodes: k, in how many nodes they stand.
        inside: Link of a GPU inside its node.
        between: Link of a GPU to another node, None where there is only one.
    """

    members: int
    nodes: int
    inside: Link
    between: Link | None


def ring_time(kind: Collective, group: Group, size: float) -> float:
    """Seconds of a collective by rings; see :func:`pipesim.collectives.collective_time`.

    Args:
        kind: Such as ``"all_reduce"``.
        group: Who takes part.
        size: S, bytes of the whole tensor.

    Examples:
        >>> round(ring_time("all_reduce", Group(8, 1, Link(0.0, 240e9), None), 2**30) * 1e3, 2)
        7.83
    """
    return collective_time(kind, group.members, size, group.inside, group.between, nodes=group.nodes, algorithm="ring")


def _group(cluster: Cluster, members: int, stride: int, inside: float, between: float) -> Group:
    """GPUs that are *stride* apart, the first of them the first of its node, with the part of both links that they reach."""
    node = cluster.devices_per_node
    if node is None or cluster.between is None or (members - 1) * stride < node:
        return Group(members, 1, _scaled(cluster.inside, inside), None)
    nodes = min(members, -(-members * stride // node))
    return Group(members, nodes, _scaled(cluster.inside, inside), _scaled(cluster.between, between))


def tensor_group(device: DeviceSpec, parallel: Parallelism) -> Group:
    """The GPUs that share a layer."""
    return _group(device.cluster, parallel.tensor, 1, device.efficiency.inside, device.efficiency.between)


def gradient_group(device: DeviceSpec, parallel: Parallelism, replicas: int = 1) -> Group:
    """The GPUs that reduce gradients together: *data* pipelines, times the replicas of a stage inside one pipeline."""
    return _group(device.cluster, parallel.data * replicas, parallel.tensor, device.efficiency.inside, device.efficiency.gradient)


def pipeline_cluster(device: DeviceSpec, parallel: Parallelism, *, memory: float | None = None) -> Cluster:
    """The cluster as one pipeline sees it: a device per stage group, which stands for *tensor* GPUs; links and memory of one GPU.

    Args:
        device: The GPU and its node.
        parallel: Degrees; they say which neighbouring stages share a node.
        memory: Bytes of each GPU; those of *device* by default.

    Raises:
        ScheduleError: The cluster places another number of pipelines.

    Examples:
        >>> from pipesim.models.devices import read_device
        >>> cluster = pipeline_cluster(read_device("a100-80g"), Parallelism(tensor=4, pipeline=4))
        >>> cluster.devices_per_node, cluster.link(0, 1).bandwidth > cluster.link(1, 2).bandwidth
        (2, True)
    """
    base, part = device.cluster, device.efficiency.pipeline
    inside, between = _scaled(base.inside, part), None if base.between is None else _scaled(base.between, part)
    host, one = (
        Link(base.host.latency, device.host_bandwidth),
        Device(base.device.speed, device.memory if memory is None else memory, parallel.tensor),
    )
    if base.sharing != "none" or base.placement is not None:  # GPUs have places of their own then
        if base.placement is not None and base.placement.data != parallel.data:
            raise ScheduleError(
                f"data = {parallel.data}, and the placement of cluster {base.name!r} has data = {base.placement.data}; give one for both"
            )
        placement = base.placement or Placement(data=parallel.data)
        return replace(base, inside=inside, between=between, host=host, device=one, placement=placement)
    per_node = None if base.devices_per_node is None else max(1, base.devices_per_node // (parallel.tensor * parallel.data))
    return Cluster(inside=inside, between=between, devices_per_node=per_node, device=one, unit=base.unit, name=base.name, host=host)


def _scaled(link: Link, part: float) -> Link:
    return link if link.bandwidth is None else replace(link, bandwidth=link.bandwidth * part)
