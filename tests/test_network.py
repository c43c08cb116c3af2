"""Where devices stand, what the transfers between them share, and how much each of it was used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipesim import Cluster, Device, Link, ScheduleError, UniformCosts, generate, simulate
from pipesim.hardware import Fabric, Node
from pipesim.network import HOST, Links, Placement, Resource, Route, time_alone, utilisation

EIGHT = Cluster(Link(1.0, 100.0), Link(2.0, 10.0), 8, sharing="fair", host=Link(0.0, 20.0))


def named(route: Route) -> dict[str, float]:
    return {resource.name: load for resource, load in route}


def crossed(cluster: Cluster, source: int, target: int) -> dict[str, float]:
    return named(cluster.route(source, target))


# -- placement --------------------------------------------------------------------------------------------------------------


def test_megatrons_order() -> None:
    """Tensor fastest, then data, pipeline slowest: with t = 2, d = 2 device s is GPUs 4 s .. 4 s + 3, of the first pipeline 4 s, 4 s + 1.

    So on nodes of eight two devices share a node.
    """
    cluster = replace(EIGHT, device=Device(width=2), placement=Placement(data=2))
    assert [cluster.gpus(device) for device in range(3)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert cluster.peers(2, 1) == (9, 11)
    assert cluster.link(0, 1) == cluster.inside
    assert cluster.link(1, 2) == cluster.between
    # devices of other widths push those after them along
    mixed = replace(cluster, devices={1: Device(width=4)})
    assert [mixed.gpus(device) for device in range(3)] == [(0, 1, 2, 3), tuple(range(4, 12)), (12, 13, 14, 15)]


def test_round_robin() -> None:
    """Devices of both pipelines in turn: 0 and its twin on nodes 0 and 1, 1 and its twin the same, one place further."""
    cluster = replace(EIGHT, node_count=2, placement=Placement(order="round-robin", data=2))
    assert [cluster.gpus(device) for device in range(3)] == [(0, 8), (1, 9), (2, 10)]
    alone = replace(cluster, placement=Placement(order="round-robin"))
    assert [alone.gpus(device) for device in range(4)] == [(0,), (8,), (1,), (9,)]
    assert alone.link(0, 1) == alone.between
    assert alone.link(0, 2) == alone.inside


def test_placement_counts_without_sharing_too() -> None:
    cluster = replace(EIGHT, sharing="none", placement=Placement(gpus=((0,), (8,), (1,))))
    assert [cluster.link(0, device) for device in (1, 2)] == [cluster.between, cluster.inside]
    assert crossed(cluster, 0, 1) == {"0 -> 1": 1}


def test_without_placement_and_sharing_a_device_is_one_of_its_node() -> None:
    cluster = replace(EIGHT, sharing="none", device=Device(width=4))
    assert cluster.gpus(7) == (7,)
    assert cluster.link(7, 8) == cluster.between
    assert cluster.link(0, 7) == cluster.inside
    assert replace(cluster, sharing="fifo").gpus(7) == (28, 29, 30, 31)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"placement": Placement(gpus=((0,), (16,))), "node_count": 2}, r"GPUs 0..15 \(2 nodes of 8 GPUs\), and device 1 stands on GPU 16"),
        ({"node_count": 1, "device": Device(width=5)}, "GPUs 0..7 .*device 1 stands on GPU 8"),
        ({"placement": Placement(gpus=((0,),))}, "places devices 0..0, and there is a device 1"),
        ({"placement": Placement(gpus=((0, 1), (2,)), data=2)}, r"device 1 1 GPUs, and it stands for 2 \(width 1 x data 2\)"),
        ({"placement": Placement(order="round-robin")}, "say node_count"),
        ({"placement": Placement(order="round-robin"), "node_count": 2, "devices": {0: Device(width=2)}}, "one width"),
        ({"placement": Placement(order="round-robin"), "node_count": 1, "device": Device(width=8)}, "1 nodes of 8 GPUs have no room"),
        ({"node_count": 2, "nodes": {2: Node(nics=1)}}, "node 2, and has nodes 0..1"),
    ],
)
def test_a_device_that_has_no_place(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        replace(EIGHT, **values).check(2)


# -- routes -----------------------------------------------------------------------------------------------------------------


def test_inside_a_node_and_between_nodes() -> None:
    assert crossed(EIGHT, 0, 1) == {"GPU 0 port out": 1, "GPU 1 port in": 1}
    assert crossed(EIGHT, 7, 8) == {"node 0 NIC 7 out": 1, "node 1 NIC 0 in": 1}
    bus = replace(EIGHT, node=Node(bus_bandwidth=30.0))
    assert crossed(bus, 0, 1) == {"GPU 0 port out": 1, "GPU 1 port in": 1, "node 0 bus": 1}
    assert crossed(bus, 7, 8) == {"node 0 NIC 7 out": 1, "node 1 NIC 0 in": 1, "node 0 bus": 1, "node 1 bus": 1}
    half = replace(EIGHT, node=Node(half_duplex=("nic", "port")))
    assert crossed(half, 0, 1) == {"GPU 0 port": 1, "GPU 1 port": 1}
    assert crossed(half, 8, 7) == crossed(half, 7, 8) == {"node 0 NIC 7": 1, "node 1 NIC 0": 1}


@pytest.mark.parametrize(
    ("nics", "ports"), [(None, [0, 1, 2, 3, 4, 5, 6, 7]), (8, [0, 1, 2, 3, 4, 5, 6, 7]), (4, [0, 0, 1, 1, 2, 2, 3, 3]), (1, [0] * 8)]
)
def test_gpu_i_is_on_port_i_times_ports_over_gpus(nics: int | None, ports: list[int]) -> None:
    cluster = replace(EIGHT, node=Node(nics=nics))
    for gpu, port in enumerate(ports):
        assert crossed(cluster, gpu, 8) == {f"node 0 NIC {port} out": 1, "node 1 NIC 0 in": 1}


def test_pcie_switches_stand_before_ports_and_the_host() -> None:
    """Four switches for eight GPUs; what stays inside the node goes over NVLink and not over them."""
    cluster = replace(EIGHT, node=Node(nics=4, pcie_switches=4, pcie_bandwidth=12.0))
    assert crossed(cluster, 2, 9) == {"node 0 PCIe 1 up": 1, "node 0 NIC 1 out": 1, "node 1 NIC 0 in": 1, "node 1 PCIe 0 down": 1}
    assert crossed(cluster, 2, 3) == {"GPU 2 port out": 1, "GPU 3 port in": 1}
    assert crossed(cluster, 3, HOST) == {"node 0 PCIe 1 up": 1}
    assert crossed(cluster, HOST, 3) == {"node 0 PCIe 1 down": 1}
    # the link to the host itself holds it up where it is slower than the switch, or there is none
    slow = replace(cluster, host=Link(0.0, 5.0))
    assert crossed(slow, 3, HOST) == {"node 0 PCIe 1 up": 1, "3 -> host": 1}
    assert crossed(EIGHT, HOST, 3) == {"host -> 3": 1}
    assert crossed(replace(EIGHT, host=Link()), HOST, 3) == {}


def test_an_oversubscribed_fabric() -> None:
    """Two nodes a switch, eight ports of 10 each: uplinks of 160 / 4 = 40. Under one switch nothing goes up."""
    cluster = replace(EIGHT, fabric=Fabric(nodes_per_switch=2, oversubscription=4))
    assert crossed(cluster, 0, 8) == {"node 0 NIC 0 out": 1, "node 1 NIC 0 in": 1}
    assert crossed(cluster, 0, 16) == {"node 0 NIC 0 out": 1, "switch 0 up": 1, "switch 1 down": 1, "node 2 NIC 0 in": 1}
    assert {resource.capacity for resource, _ in cluster.route(0, 16) if resource.name.startswith("switch")} == {40.0}
    # a node with other ports counts as what it is: 8 x 10 + 2 x 30 = 140, a fourth of it
    other = replace(cluster, nodes={1: Node(nics=2, nic_bandwidth=30.0)})
    assert [resource.capacity for resource, _ in other.route(0, 16) if resource.name == "switch 0 up"] == [35.0]


def test_four_flows_over_an_uplink_by_hand() -> None:
    """Nodes of one GPU, two a switch, 2:1: uplinks of 10. GPipe's hop 1 -> 2 goes up alone and has all of it.

    With a second pipeline beside it, whose devices stand one node further, devices are nodes 0 1 | 2 3: every hop of 0 -> 1
    crosses the uplink twice, 4 bytes take 2 x 4 / 10.
    """
    one = Cluster(Link(), Link(0.0, 10.0), 1, sharing="fair", fabric=Fabric(2, 2.0), unit="slot")
    assert crossed(one, 1, 2)["switch 0 up"] == 1
    both = replace(one, placement=Placement(data=2))
    assert crossed(both, 0, 1)["switch 0 up"] == 2
    assert time_alone(both.route(0, 1), 4.0) == 0.8
    run = simulate(generate("gpipe", 2, 1), UniformCosts(forward=1, backward=1, message=4), cluster=both)
    assert run.makespan == pytest.approx(4 + 2 * 0.8)


def test_groups_of_gpus_send_at_the_same_time() -> None:
    """t = 4, d = 2 on nodes of eight with two ports: device 0 is node 0, device 1 node 1; four GPUs send over each port."""
    cluster = replace(EIGHT, device=Device(width=4), placement=Placement(data=2), node=Node(nics=2))
    ports = ["node 0 NIC 0 out", "node 0 NIC 1 out", "node 1 NIC 0 in", "node 1 NIC 1 in"]
    assert crossed(cluster, 0, 1) == dict.fromkeys(ports, 4)
    assert time_alone(cluster.route(0, 1), 5.0) == 2.0
    # from one GPU to a group of four, all of it to each; from four to one, once
    wide = replace(EIGHT, devices={1: Device(width=4)}, placement=Placement(gpus=((0,), (8, 9, 10, 11))))
    assert crossed(wide, 0, 1) == {"node 0 NIC 0 out": 4, **{f"node 1 NIC {port} in": 1 for port in range(4)}}
    assert crossed(wide, 1, 0) == {"node 1 NIC 0 out": 1, "node 0 NIC 0 in": 1}


def test_a_link_that_is_slower_than_what_it_shares() -> None:
    cluster = replace(EIGHT, links={(0, 8): Link(0.5, 4.0), (0, 9): Link(0.5, 1000.0)})
    assert crossed(cluster, 0, 8) == {"node 0 NIC 0 out": 1, "node 1 NIC 0 in": 1, "0 -> 8": 1}
    assert crossed(cluster, 0, 9) == {"node 0 NIC 0 out": 1, "node 1 NIC 1 in": 1}
    assert time_alone(cluster.route(0, 8), 8.0) == 2.0


def test_rings() -> None:
    """Two members in each of two nodes: two rings, each half the bytes, leave each node over both ports.

    0 1 | 8 9 with one more pipeline each: ring a is 0 1 8 9, ring b 1 0 9 8. Every GPU sends to its neighbour in the node
    in one of them, and to the other node in the other.
    """
    cluster = replace(EIGHT, placement=Placement(data=2, gpus=((0, 8), (1, 9))))
    assert cluster.network is not None
    found = named(cluster.network.ring([0, 1]))
    assert found == {
        **{f"GPU {gpu} port {way}": 0.5 for gpu in (0, 1, 8, 9) for way in ("in", "out")},
        **{f"node {node} NIC {port} {way}": 0.5 for node in (0, 1) for port in (0, 1) for way in ("in", "out")},
    }
    # a device and its peer alone: one hop there and one back
    assert named(cluster.network.ring([0])) == {f"node {node} NIC 0 {way}": 1 for node in (0, 1) for way in ("in", "out")}
    assert replace(cluster, placement=None).network.ring([3]) == ()  # type: ignore[union-attr]


# -- utilisation ------------------------------------------------------------------------------------------------------------


def test_utilisation_by_hand() -> None:
    """Two routes over a shared port of 10 and own ports of 20.

    20 bytes on the first 0..2 and again at 6..8 (two steps), 10 bytes on the second, at load 2, 1..3 and 7..9: the shared port
    is busy 0..3 and 6..9, 6 of 12, with 2 x (20 + 20) bytes of 120; the latency of 1 does not count.
    """
    shared, first, second = Resource("shared", 10.0), Resource("first", 20.0), Resource("second", 20.0)
    links = Links.of_routes([((shared, 1.0), (first, 1.0)), ((shared, 2.0), (second, 1.0))], [0.0, 1.0])
    found = utilisation(
        links, np.array([0, 1]), np.array([20.0, 10.0]), np.array([[0.0, 1.0], [6.0, 7.0]]), np.array([[2.0, 4.0], [8.0, 10.0]]), 12.0
    )
    assert found.names == ("shared", "first", "second")
    assert found.size.tolist() == [80, 40, 20]
    assert found.busy.tolist() == [6, 4, 4]
    assert found.busy_share == pytest.approx([1 / 2, 1 / 3, 1 / 3])
    assert found.share == pytest.approx([80 / 120, 40 / 240, 20 / 240])


@pytest.mark.parametrize("sharing", ["none", "fifo", "fair"])
def test_no_resource_of_a_run_is_above_its_capacity(sharing: Any) -> None:
    cluster = replace(EIGHT, sharing=sharing, devices_per_node=2, node=Node(nics=1), fabric=Fabric(1, 3.0), unit="slot")
    run = simulate(generate("chimera", 4, 8), UniformCosts(forward=1, message=7), cluster=cluster)
    pairs = sorted(set(zip(run.messages.source_device.tolist(), run.messages.target_device.tolist(), strict=True)))
    route = np.array([pairs.index(pair) for pair in zip(run.messages.source_device.tolist(), run.messages.target_device.tolist(), strict=True)])
    found = utilisation(Links.of(cluster, pairs), route, np.full(len(route), 7.0), run.departed, run.arrived, run.makespan)
    assert (found.share <= found.busy_share * (1 + 1e-9)).all()
    assert (found.busy_share <= 1).all()
    # every hop of 4 devices in a chain crosses one way out, and the middle hop leaves the node
    leaving = sum(7.0 for a, b in zip(run.messages.source_device, run.messages.target_device, strict=True) if a // 2 != b // 2 and a // 2 == 0)
    name = "0 -> 1" if sharing == "none" else "node 0 NIC 0 out"
    if sharing != "none":
        assert found.size[found.names.index(name)] == leaving


def test_time_of_nothing() -> None:
    assert time_alone((), 5.0) == 0
    assert utilisation(Links.of_routes([], []), np.zeros(0, int), np.zeros(0), np.zeros((1, 0)), np.zeros((1, 0)), 0.0).size.tolist() == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Node(nics=0), "nics must be at least 1"),
        (lambda: Node(nic_bandwidth=0), "nic_bandwidth must be a finite number above 0"),
        (lambda: Node(bus_bandwidth=-1), "bus_bandwidth"),
        (lambda: Node(memory=-1), "memory"),
        (lambda: Node(half_duplex=("nics",)), "'nics'; did you mean 'nic'"),
        (lambda: Fabric(0), "nodes_per_switch"),
        (lambda: Fabric(2, 0), "oversubscription must be a finite number above 0"),
        (lambda: Placement(order="pipeline"), "megatron, round-robin"),  # type: ignore[arg-type]
        (lambda: Placement(data=0), "data must be at least 1"),
        (lambda: Placement(gpus=((0,), (0,))), "GPU 0 to devices 0 and 1"),
        (lambda: Placement(gpus=((3, 3),)), "GPU 3 to device 0 twice"),
        (lambda: Cluster(sharing="fairly"), "sharing must be one of none, fifo, fair, got 'fairly'; did you mean 'fair'"),  # type: ignore[arg-type]
        (lambda: Cluster(node_count=2), "need devices_per_node"),
        (lambda: Cluster(fabric=Fabric(2)), "a fabric joins nodes"),
        (lambda: replace(EIGHT, node=Node(nics=9)), "nics = 9 is more than its 8 GPUs"),
        (lambda: replace(EIGHT, nodes={1: Node(pcie_switches=9)}), "node 1: pcie_switches = 9"),
    ],
)
def test_values_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make()
