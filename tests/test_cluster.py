"""Devices and links, and the files that describe them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pipesim import Cluster, Device, Link, ScheduleError
from pipesim.cluster import cluster_presets

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
