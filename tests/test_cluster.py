"""Devices and links, and the files that describe them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipesim import Cluster, Device, Link, ScheduleError, UniformCosts, generate, simulate
from pipesim.cluster import cluster_presets
from pipesim.communication import Communication
from pipesim.hardware import Fabric, Node
from pipesim.network import Placement, time_alone

FILE = """
name = "two nodes"
devices_per_node = 2
[device]
memory = "80 GB"
[inside]
latency = "5 us"
bandwidth = "240 GB/s"
[between]
latency = "10 us"
bandwidth = "200 Gbit/s"
[[devices]]
numbers = [1, 3]
speed = 0.5
[[devices]]
numbers = [2]
memory = "40 GiB"
width = 4
[[links]]
from = 0
to = 3
latency = "1 ms"
"""

NODES = 'devices_per_node = 4\n[between]\nbandwidth = "1 GB/s"\n'


def test_a_file_says_everything() -> None:
    cluster = Cluster.from_toml(FILE)
    assert (cluster.name, cluster.unit) == ("two nodes", "s")
    assert cluster.link(0, 1) == Link(5e-6, 240e9)
    assert cluster.link(1, 2) == cluster.link(3, 0) == Link(10e-6, 25e9)
    assert cluster.link(0, 3) == Link(1e-3, 25e9)  # one direction; what it leaves out is the rule's
    assert cluster.speeds(4).tolist() == [1, 0.5, 1, 0.5]
    assert cluster.capacities(4).tolist() == [80e9, 80e9, 40 * 2**30, 80e9]
    assert cluster.devices[2] == Device(memory=40 * 2.0**30, width=4)
    cluster.check(4)
    with pytest.raises(ScheduleError, match="device 3"):
        cluster.check(3)


def test_without_a_limit_memory_is_infinite() -> None:
    assert Cluster().capacities(2).tolist() == [math.inf, math.inf]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[inside]\nlatency = 5', "inside.latency = 5 has no unit"),
        ('[inside]\nbandwidth = "25"', "inside.bandwidth = 25 has no unit"),
        ('[device]\nmemory = "80 GB/s"', "is not a bytes"),
        ('[insid]\nlatency = "5 us"', "unknown key 'insid'; did you mean 'inside'"),
        ('[inside]\nlatenci = "5 us"', "unknown key 'inside.latenci'; did you mean 'latency'"),
        ('[[links]]\nfrom = 0\nto = 1\nspeed = 3', "unknown key 'links.0.speed'"),
        ('[[links]]\nfrom = 0', "links.0.to"),
        ("[[devices]]\nnumbers = [0]\nspeed = 0", "devices.0.speed"),
        ("[[devices]]\nnumbers = [0]\nspeed = nan", "devices.0.speed"),
        ("[[devices]]\nnumbers = [-1]", "devices.0.numbers"),
        ("[[devices]]\nnumbers = [0.5]", "devices.0.numbers"),
        ("[[devices]]\nnumbers = [0, 1]\n[[devices]]\nnumbers = [1]", "two .* speak of device 1"),
        ("[[links]]\nfrom = 0\nto = 1\n[[links]]\nfrom = 0\nto = 1", "speak of 0 -> 1"),
        ("[device]\nwidth = 0", "device.width"),
        ("devices_per_node = 4", "belong together"),
        ("[between]\nlatency = \"5 us\"", "belong together"),
        ("devices_per_node = true", "devices_per_node"),
        ("name = 3", "name"),
        ('[inside]\nbandwidth = "0 GB/s"', "inside.bandwidth must be a finite number above 0"),
        ('[inside]\nbandwidth = "-5 GB/s"', "inside.bandwidth = '-5 GB/s' is not a bandwidth"),
        ('sharing = "fare"', "sharing must be one of none, fifo, fair, got 'fare'; did you mean 'fair'"),
        ("sharing = true", "sharing"),
        ("[node]\nnic = 1", "unknown key 'node.nic'; did you mean 'nics'"),
        ("[node]\nnics = 0", "node.nics"),
        ('[node]\nnic_bandwidth = "25 us"', "node.nic_bandwidth = '25 us' is not a bandwidth"),
        ("[node]\nnic_bandwidth = 25", "node.nic_bandwidth = 25 has no unit"),
        ('[node]\nnic_bandwidth = "0 B/s"', "node.nic_bandwidth must be a finite number above 0"),
        ('[node]\nhalf_duplex = ["switch"]', "node.half_duplex knows nic, port, pcie, got 'switch'"),
        (f"{NODES}[node]\nnics = 5", "nics = 5 is more than its 4 GPUs"),
        (f"{NODES}[[nodes]]\nnumbers = [1]\npcie_switches = 5", "node 1: pcie_switches = 5 is more than its 4 GPUs"),
        ("[[nodes]]\nnumbers = [0]\n[[nodes]]\nnumbers = [0]", "two .*nodes.* speak of node 0"),
        ('[[nodes]]\nnumbers = [0]\nmemory = "5 s"', r"nodes\[0\].memory = '5 s' is not a bytes"),
        (f"{NODES}[[nodes]]\nnumbers = [0]\nspeed = 2\n[[devices]]\nnumbers = [0]\nspeed = 2", "both nodes and devices give speed or memory"),
        ("[fabric]\noversubscription = 2", "fabric.nodes_per_switch is missing"),
        ("[fabric]\nnodes_per_switch = 2\noversubscription = 0", "fabric.oversubscription"),
        ("[fabric]\nnodes_per_switch = 2", "a fabric joins nodes"),
        ("node_count = 2", "need devices_per_node"),
        ('[placement]\norder = "megatrons"', "placement.order must be one of megatron, round-robin, got 'megatrons'; did you mean 'megatron'"),
        ('[placement]\norder = "megatron"\ngpus = [[0]]', "exclude each other"),
        ("[placement]\ngpus = [[0], [1, 0]]", "placement.gpus gives GPU 0 to devices 0 and 1"),
        ("[placement]\ngpus = [0, 1]", "placement.gpus"),
        ("[placement]\ngpus = [[-1]]", "placement.gpus"),
        ("[placement]\ndata = 0", "placement.data"),
        (f"{NODES}[placement]\ngpus = [[0]]\n[[links]]\nfrom = 0\nto = 1", "there is a device 1"),
        ('[communication]\nsends = "lazy"', "communication.sends must be one of eager, rendezvous, got 'lazy'"),
        ("[communication]\nblocking = 1", "communication.blocking"),
        ("= 3", "not TOML"),
        ("[a]\n[a]", "not TOML"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_explained(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=f"here.toml.*{message}"):
        Cluster.from_toml(text, "here.toml")


def test_a_file_on_disk_a_preset_and_neither(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE.replace('name = "two nodes"\n', ""))
    assert Cluster.load(path).name == "mine"
    for name in cluster_presets():
        cluster = Cluster.load(name)
        assert cluster.unit == "s"
        assert cluster.capacities(1)[0] < math.inf
    with pytest.raises(ScheduleError, match="did you mean 'dgx-h100'"):
        Cluster.load("dgx-h10")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(latency=-1), "latency"),
        (lambda: Link(latency=math.nan), "latency"),
        (lambda: Link(bandwidth=0), "bandwidth"),
        (lambda: Link(bandwidth=math.inf), "bandwidth"),
        (lambda: Device(speed=0), "speed"),
        (lambda: Device(speed=math.inf), "speed"),
        (lambda: Device(memory=-1), "memory"),
        (lambda: Device(width=0), "width"),
        (lambda: Cluster(unit="ms"), "unit"),  # type: ignore[arg-type]
        (lambda: Cluster(devices_per_node=0, between=Link()), "devices_per_node"),
        (lambda: Cluster(devices_per_node=8), "belong together"),
        (lambda: Cluster(between=Link()), "belong together"),
    ],
)
def test_values_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make()


def test_time_of_a_message() -> None:
    assert Link().time(1e9) == 0
    assert Link(2.0).time(1e9) == 2
    assert Link(2.0, 10.0).time(5) == 2.5


SHARED = """
sharing = "fair"
devices_per_node = 8
node_count = 4
[device]
memory = "80 GB"
[inside]
bandwidth = "240 GB/s"
[between]
bandwidth = "25 GB/s"
[node]
nics = 4
nic_bandwidth = "12.5 GB/s"
port_bandwidth = "200 GB/s"
bus_bandwidth = "500 GB/s"
pcie_switches = 2
pcie_bandwidth = "30 GB/s"
half_duplex = ["pcie"]
[[nodes]]
numbers = [2, 3]
speed = 0.4
memory = "32 GB"
nics = 1
[fabric]
nodes_per_switch = 2
oversubscription = 2
[placement]
order = "round-robin"
data = 2
[communication]
sends = "rendezvous"
interference = { p2p = 1.05 }
"""


def test_a_file_says_what_is_shared() -> None:
    cluster = Cluster.from_toml(SHARED)
    usual = Node(4, 12.5e9, 200e9, 500e9, 2, 30e9, ("pcie",))
    assert (cluster.sharing, cluster.node_count, cluster.node) == ("fair", 4, usual)
    # what an entry leaves out is as everywhere
    assert cluster.nodes == dict.fromkeys((2, 3), replace(usual, nics=1, speed=0.4, memory=32e9))
    assert cluster.fabric == Fabric(2, 2.0)
    assert cluster.placement == Placement("round-robin", 2)
    assert cluster.communication == Communication(sends="rendezvous", interference={"p2p": 1.05})
    assert Cluster.from_toml(FILE).communication == Communication()
    assert Cluster.from_toml("[placement]\ngpus = [[0, 2], [1, 3]]\ndata = 2").placement == Placement(data=2, gpus=((0, 2), (1, 3)))


def test_mixed_gpus() -> None:
    """Nodes 2 and 3 have GPUs of 0.4 and 32 GB; a device is as fast as the slowest of its GPUs in both pipelines."""
    cluster = Cluster.from_toml(SHARED)
    # dealt in turn: devices 0 and 2 (with their twins) on nodes 0 and 1, devices 1 and 3 on nodes 2 and 3
    assert cluster.speeds(4).tolist() == [1, 0.4, 1, 0.4]
    assert cluster.capacities(4).tolist() == [80e9, 32e9, 80e9, 32e9]
    assert cluster.with_memory(7.0).capacities(2).tolist() == [7, 7]
    # in Megatron's order with one pipeline eight devices on each node; the kinds of GPUs count where nothing is shared, too
    for sharing in ("none", "fifo"):
        other = replace(cluster, placement=None, sharing=sharing)
        assert other.speeds(17).tolist() == [1.0] * 16 + [0.4]
    # a device of GPUs of both kinds
    both = replace(cluster, placement=Placement(gpus=((0, 31),), data=2))
    assert (both.speeds(1).tolist(), both.capacities(1).tolist()) == ([0.4], [32e9])
    run = simulate(generate("gpipe", 4, 1), UniformCosts(forward=1, backward=1, unit="s"), cluster=Cluster.from_toml(SHARED.split("[comm")[0]))
    assert run.busy == [2, 5, 2, 5]


def test_presets_share_nothing_unless_asked() -> None:
    for name in cluster_presets():
        cluster = Cluster.load(name)
        assert (cluster.sharing, cluster.network, cluster.placement) == ("none", None, None)
        # alone on its way, a message takes the same time over what is shared: ports have the bandwidth of the links
        for pair in ((0, 1), (7, 8)):
            link = cluster.link(*pair)
            assert time_alone(replace(cluster, sharing="fifo").route(*pair), 1e9) == pytest.approx(1e9 / link.bandwidth)


def test_dapples_configurations() -> None:
    """Eight V100 a node behind one 25 Gbit/s port; one V100 a node, 25 and 10 Gbit/s (DAPPLE, table of configurations)."""
    for letter, gpus, bandwidth in (("a", 8, 25e9 / 8), ("b", 1, 25e9 / 8), ("c", 1, 10e9 / 8)):
        cluster = Cluster.load(f"dapple-{letter}")
        assert cluster.devices_per_node == gpus
        assert cluster.between == Link(50e-6, bandwidth)
        assert cluster.node.nics == 1
        assert cluster.device.memory == 16e9


def test_who_stands_where() -> None:
    text = replace(Cluster.load("dapple-a"), sharing="fair", device=Device(width=4), placement=Placement(data=2)).describe(2)
    assert text.splitlines() == [
        "device 0: GPUs 0-7, node 0",
        "device 1: GPUs 8-15, node 1",
        "0 -> 1: 50 µs, node 0 NIC 0 out x 8, node 1 NIC 0 in x 8",
        "1 -> 0: 50 µs, node 1 NIC 0 out x 8, node 0 NIC 0 in x 8",
    ]
    apart = replace(Cluster.load("dgx-a100"), placement=Placement(gpus=((0, 1, 8),), data=3)).describe(1)
    assert apart == "device 0: GPUs 0-1, 8, nodes 0-1"
