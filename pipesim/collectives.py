"""Times of collectives: all-reduce, reduce-scatter, all-gather, all-to-all and broadcast by ring, tree and in two levels.

Letters: n members on k nodes, g = n/k of them in each; S bytes; α and β are latency and bandwidth of a link, *in* inside a
node and *out* between nodes. Every member has a port of its own to the network, so g rings or trees leave a node side by side,
and a node's traffic is shared by g ports.

A collective is one or more phases, one after another. A phase is a number of hops that one chunk makes in a row, each for its
latency, and a part of S that each member sends over its inside link, and over its port; chunks follow each other closely, so
the two flow at the same time and the slower one counts::

    phase = hops_in · α_in + hops_out · α_out + max(part_in · S / β_in, part_out · S / β_out)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from pipesim.cluster import Cluster, Link
from pipesim.curves import Curve
from pipesim.errors import LARGEST, ScheduleError, did_you_mean, require_count

__all__ = ["ALGORITHMS", "Algorithm", "Buckets", "Collective", "collective_time", "gradient_buckets"]

Floats = NDArray[np.float64]
Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]
Algorithm = Literal["best", "ring", "tree", "hierarchical"]

_MOST = 10**6  # buckets

# what each collective can be done by
ALGORITHMS: dict[Collective, tuple[Algorithm, ...]] = {
    "all_reduce": ("ring", "tree", "hierarchical"),
    "reduce_scatter": ("ring", "tree", "hierarchical"),
    "all_gather": ("ring", "tree", "hierarchical"),
    "all_to_all": ("ring", "hierarchical"),
    "broadcast": ("ring", "tree", "hierarchical"),
}


class Phase(NamedTuple):
    """Hops and traffic of one phase; see the module's text."""

    hops_in: int
    hops_out: int
    part_in: float
    part_out: float


class Buckets(NamedTuple):
    """A reduction in buckets that go one after another.

    Attributes:
        sizes: (buckets,) bytes of each; the last may be smaller.
        times: (buckets,) of each, in the cluster's unit.
    """

    sizes: Floats
    times: Floats


@overload
def collective_time(
    kind: Collective,
    members: int,
    size: float,
    link_inside: Link,
    link_between: Link | None = ...,
    *,
    nodes: int = ...,
    algorithm: Algorithm = ...,
    curve: Curve | None = ...,
) -> float: ...
@overload
def collective_time(
    kind: Collective,
    members: int,
    size: Floats,
    link_inside: Link,
    link_between: Link | None = ...,
    *,
    nodes: int = ...,
    algorithm: Algorithm = ...,
    curve: Curve | None = ...,
) -> Floats: ...
def collective_time(
    kind: Collective,
    members: int,
    size: float | Floats,
    link_inside: Link,
    link_between: Link | None = None,
    *,
    nodes: int = 1,
    algorithm: Algorithm = "best",
    curve: Curve | None = None,
) -> float | Floats:
    """Time of a collective.

    Args:
        kind: What is done.
        members: n, how many take part; one alone has nothing to do.
        size: S, bytes: of the whole tensor, which in an all-reduce and a broadcast everyone has in full at the end, which before
            a reduce-scatter everyone has in full, and after an all-gather. In an all-to-all, what one member has for all,
            itself among them. A number, or an array; nothing costs nothing.
        link_inside: Of one member to a neighbour in its node.
        link_between: Of one member to another node; needed only when there are several nodes.
        nodes: k, how many nodes the members stand in, as evenly as they can.
        algorithm: One of :data:`ALGORITHMS` for the kind; ``"best"`` takes, for every size, the fastest of them.
        curve: Measured all-reduces inside a node, in the place of *link_inside*. What was measured is the library's own best,
            and is told as a ring's; so there is no tree with it.

    Returns:
        Seconds (or whatever unit the links are in), of the shape of *size*.

    Raises:
        ScheduleError: The kind or the algorithm is unknown, or a number is out of range.

    Examples:
        >>> link = Link(latency=5e-6, bandwidth=240e9)
        >>> round(collective_time("all_reduce", 8, 2**30, link, algorithm="ring") * 1e3, 3)
        7.899
    """
    ways = _ways(kind, members, nodes, algorithm, curve)
    sizes = np.asarray(size, dtype=np.float64)
    if not ((sizes >= 0) & (sizes <= LARGEST)).all():
        raise ScheduleError(f"size must be a finite number of bytes of at least 0, got {size}")
    if nodes > 1 and link_between is None:
        raise ScheduleError(f"{members} members on {nodes} nodes need link_between")
    if members == 1:
        times = np.zeros_like(sizes)
    else:
        inside = _Inside(link_inside, curve, -(-members // nodes))
        found = [sum((_phase_time(phase, sizes, inside, link_between or Link()) for phase in way), np.zeros_like(sizes)) for way in ways]
        times = np.where(sizes > 0, np.min(found, axis=0), 0.0)
    return times if isinstance(size, np.ndarray) else float(times)


def _ways(kind: Collective, members: int, nodes: int, algorithm: Algorithm, curve: Curve | None) -> list[list[Phase]]:
    """The phases by each algorithm that is to be tried."""
    n, k = require_count("members", members), require_count("nodes", nodes)
    if kind not in ALGORITHMS:
        raise ScheduleError(f"there is no collective {kind!r}{did_you_mean(str(kind), ALGORITHMS)}; there are {', '.join(ALGORITHMS)}")
    known = ALGORITHMS[kind]
    if algorithm != "best" and algorithm not in known:
        raise ScheduleError(f"{kind} has no algorithm {algorithm!r}{did_you_mean(str(algorithm), known)}; it has best, {', '.join(known)}")
    if curve is not None and algorithm == "tree":
        raise ScheduleError("a curve has been measured with the library's own choice and is told as a ring's; with it, algorithm cannot be 'tree'")
    if k > n:
        raise ScheduleError(f"{n} members cannot stand on {k} nodes; nodes must be at most {n}")
    tried = [name for name in known if name != "tree" or curve is None] if algorithm == "best" else [algorithm]
    return [_phases(kind, name, n, k) for name in tried]


def _phases(kind: Collective, algorithm: Algorithm, n: int, k: int) -> list[Phase]:
    """What an algorithm does."""
    most, ports = -(-n // k), n // k  # members of the fullest node, ports of the emptiest
    if algorithm == "ring":
        return _ring(kind, n, k, most, ports)
    if algorithm == "tree":
        return _tree(kind, most, k, ports)
    return _hierarchical(kind, most, k, ports)


def _ring(kind: Collective, n: int, k: int, most: int, ports: int) -> list[Phase]:
    """Around a ring that visits one node after another.

    A turn has n hops, k of them between nodes. In a reduce-scatter or all-gather a chunk of S/n makes n - 1 of them; the last one to
    arrive leaves out one inside a node, and so pays k hops of the network (n - 1 where every member has its own node). Everyone
    sends n - 1 chunks. All-reduce is one after the other: 2(n - 1)·α + 2(n - 1)/n·S/β on equal links (Patarasu and Yuan 2009).
    Broadcast passes S along the chain, in small pieces, all-to-all sends S/n straight to each of the others.
    """
    if kind == "all_to_all":
        return [Phase(most - 1, n - most, (most - 1) / n, (n - most) / n)]
    if kind == "broadcast":
        return [Phase(n - k, k - 1, float(n > k), (k > 1) / ports)]
    out = 0 if k == 1 else min(k, n - 1)
    turn = Phase(n - 1 - out, out, (n - 1) / n * (n > k), (n - 1) / n / ports * (k > 1))
    return [turn, turn] if kind == "all_reduce" else [turn]


def _tree(kind: Collective, most: int, k: int, ports: int) -> list[Phase]:
    """Up and down binary trees, the upper levels between nodes, the lower ones inside.

    Two trees, each of half the bytes; who has children in one is a leaf in the other, so that nobody sends more than S one way
    (Sanders, Speck and Träff 2009): log2(n)·α + S/β for a broadcast, twice that for an all-reduce.
    Reduce-scatter and all-gather are recursive halving and doubling, log2(n)·α + (n - 1)/n·S/β (Thakur et al. 2005, section 4), the
    network while the pieces are small.
    """
    levels_in, levels_out = math.ceil(math.log2(most)), math.ceil(math.log2(k))
    if kind in ("reduce_scatter", "all_gather"):
        return [Phase(levels_in, 0, (most - 1) / most, 0.0), Phase(0, levels_out, 0.0, (k - 1) / k / ports)]
    way = Phase(levels_in, levels_out, float(most > 1), (k > 1) / ports)
    return [way, way] if kind == "all_reduce" else [way]


def _hierarchical(kind: Collective, most: int, k: int, ports: int) -> list[Phase]:
    """Rings inside nodes, and between members of the same number in all nodes, one after the other.

    All-reduce: reduce-scatter inside, all-reduce of S/g between, all-gather inside. Broadcast: the root scatters inside, pieces go
    down the chain of nodes, all-gather inside. All-to-all: first inside, to whoever has the number that the data wants,
    then between nodes: k - 1 messages of S/k instead of n - g of S/n.
    """
    inside = Phase(most - 1, 0, (most - 1) / most, 0.0)
    across = Phase(0, k - 1, 0.0, (k - 1) / k / ports)
    match kind:
        case "all_reduce":
            return [inside, across, across, inside]
        case "broadcast":
            return [inside, Phase(0, k - 1, 0.0, (k > 1) / ports), inside]
        case "all_to_all":
            return [inside, Phase(0, k - 1, 0.0, (k - 1) / k)]
        case _:
            return [inside, across]


class _Inside(NamedTuple):
    """What moves inside a node of so many members."""

    link: Link
    curve: Curve | None
    members: int


def _phase_time(phase: Phase, sizes: Floats, inside: _Inside, between: Link) -> Floats:
    if inside.curve is not None:
        latency = inside.curve.moved(inside.members, phase.hops_in, np.zeros_like(sizes))
        near = inside.curve.moved(inside.members, 0, phase.part_in * sizes)
    else:
        latency = np.full_like(sizes, phase.hops_in * inside.link.latency)
        near = _sending(phase.part_in * sizes, inside.link)
    return latency + phase.hops_out * between.latency + np.maximum(near, _sending(phase.part_out * sizes, between))


def _sending(traffic: Floats, link: Link) -> Floats:
    return np.zeros_like(traffic) if link.bandwidth is None else traffic / link.bandwidth


def gradient_buckets(
    cluster: Cluster,
    devices: Sequence[int],
    size: float,
    *,
    data: int | None = None,
    bucket: float | None = None,
    kind: Collective = "all_reduce",
    algorithm: Algorithm = "best",
    curve: Curve | None = None,
) -> Buckets:
    """Times of the reduction of a stage's gradients over its replicas and its data-parallel peers.

    Where links are shared (``cluster.sharing``), the ring's most loaded resource sets the bandwidth: the network port that
    several GPUs of a node use, or the uplink of a switch. All GPUs of a device reduce their parts at once.

    Args:
        cluster: Where the pipeline runs.
        devices: That hold the stage in one pipeline: one, or its replicas (``schedule.placement[stage]``).
        size: Bytes of the stage's gradients on one GPU.
        data: Pipelines that are trained together; by default as many as the cluster's placement says. Without a placement,
            each has nodes of its own where there is a link between nodes, and all stand in the one node where there is none.
        bucket: Bytes of a bucket; None for one that holds all.
        kind: ``"reduce_scatter"`` or ``"all_gather"`` for optimizers that are split.
        algorithm: As of :func:`collective_time`.
        curve: As of :func:`collective_time`.

    Raises:
        ScheduleError: There are no devices, one is named twice, or a number is out of range.

    Examples:
        >>> cluster = Cluster(inside=Link(0.0, 100.0), between=Link(1.0, 10.0), devices_per_node=2)
        >>> found = gradient_buckets(cluster, [0], 100.0, data=2, bucket=40.0)
        >>> found.sizes.tolist(), found.times.tolist()
        ([40.0, 40.0, 20.0], [6.0, 6.0, 4.0])
    """
    if not devices or len(set(devices)) < len(devices):
        raise ScheduleError(f"devices must be one or more, each named once, got {list(devices)}")
    if bucket is not None and not bucket > 0:
        raise ScheduleError(f"bucket must be a number of bytes above 0, or None for one bucket, got {bucket}")
    if not 0 <= size <= LARGEST:
        raise ScheduleError(f"size must be a finite number of bytes of at least 0, got {size}")
    data = cluster.pipelines if data is None else require_count("data", data)
    if cluster.placement is not None and data != cluster.pipelines:
        raise ScheduleError(f"data is {data}, and the placement of cluster {cluster.name!r} has {cluster.pipelines} pipelines")
    step = size if bucket is None else min(bucket, size)
    if size > step * _MOST:
        raise ScheduleError(f"bucket = {bucket} makes more than a million buckets of {size} bytes")
    sizes = np.full(math.ceil(size / step) if step else 1, step, dtype=np.float64)
    sizes[-1] = size - sizes[:-1].sum()
    inside, between, nodes = _links_of(cluster, sorted(devices))
    if data > cluster.pipelines and cluster.between is not None:
        nodes, between = nodes * data, _slower(between, cluster.between)
    times = collective_time(kind, data * len(devices), sizes, inside, between, nodes=nodes, algorithm=algorithm, curve=curve)
    return Buckets(sizes, times)


def _links_of(cluster: Cluster, devices: Sequence[int]) -> tuple[Link, Link | None, int]:
    """What a ring through devices and their peers has inside a node and between nodes, and how many nodes it visits."""
    gpus = [gpu for device in devices for gpu in cluster.peers(device, 0)]
    nodes = len({cluster.node_of(gpu) for gpu in gpus})
    inside, between = cluster.inside, cluster.between if nodes > 1 else None
    for device, after in zip(devices, [*devices[1:], devices[0]], strict=True):
        special = cluster.links.get((device, after))
        if special is not None and cluster.node_of(cluster.gpus(device)[0]) == cluster.node_of(cluster.gpus(after)[0]):
            inside = _slower(inside, special)
        elif special is not None:
            between = _slower(between, special)
    if cluster.network is not None:
        # seconds per byte that a member sends; over the network its node's members share it
        slowest = max((load / resource.capacity for resource, load in cluster.network.ring(devices)), default=0.0)
        if slowest and between is None:
            inside = _slower(inside, Link(0.0, 1 / slowest))
        elif slowest:
            between = _slower(between, Link(0.0, nodes / (slowest * len(gpus))))
    return inside, between, nodes


def _slower(one: Link | None, other: Link) -> Link:
    """The larger latency and the smaller bandwidth."""
    if one is None:
        return other
    bandwidths = [link.bandwidth for link in (one, other) if link.bandwidth is not None]
    return Link(max(one.latency, other.latency), min(bandwidths, default=None))
