"""Cluster files: TOML in, what a Cluster is made of out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from pipesim.communication import Communication
from pipesim.errors import ScheduleError
from pipesim.hardware import Device, Fabric, Link, Node
from pipesim.network import Placement
from pipesim.units import parse_quantity
from pipesim.userfiles import ClusterFile, parse_toml

__all__ = ["at", "read_cluster"]

Made = TypeVar("Made")
Values = dict[str, Any]
Dimension = Literal["time", "bytes", "bandwidth"]


def read_cluster(text: str, where: str) -> tuple[Values, dict[tuple[int, int], Callable[[Link], Link]]]:
    """Reads the text of a cluster file.

    Returns:
        What Cluster wants to know; and per pair of devices whose link differs, what makes it out of the link that the rules
        give: what an entry leaves out stays as it is.

    Raises:
        ScheduleError: A key is unknown or a value is wrong; the text names *where*, key and value.
    """
    data: Values = parse_toml(ClusterFile, text, where).model_dump(by_alias=True, exclude_none=True)

    def link(values: Values, name: str, base: Link = Link()) -> Link:
        latency, bandwidth = (quantity(values, *key, f"{where}: {name}", base) for key in (("latency", "time"), ("bandwidth", "bandwidth")))
        return at(f"{where}: {name}.", Link, latency=latency, bandwidth=bandwidth)

    def device(values: Values, base: Device, name: str) -> Device:
        memory = quantity(values, "memory", "bytes", f"{where}: {name}", base)
        return at(f"{where}: {name}.", Device, speed=values.get("speed", base.speed), memory=memory, width=values.get("width", base.width))

    def node(values: Values, base: Node, name: str) -> Node:
        sizes: dict[str, Dimension] = {key: "bytes" if key == "memory" else "bandwidth" for key in values if key == "memory" or "bandwidth" in key}
        given = {key: value for key, value in values.items() if key != "numbers"}
        given |= {key: quantity(values, key, dimension, f"{where}: {name}", base) for key, dimension in sizes.items()}
        return at(f"{where}: {name}.", Node, **{field.name: given.get(field.name, getattr(base, field.name)) for field in fields(Node)})

    def exceptions(key: str, make: Callable[[Values, Made, str], Made], base: Made) -> dict[int, Made]:
        found: dict[int, Made] = {}
        for number, entry in enumerate(data.get(key, [])):
            different = make(entry, base, f"{key}[{number}]")
            for index in entry["numbers"]:
                if index in found:
                    raise ScheduleError(f"{where}: two [[{key}]] entries speak of {key[:-1]} {index}")
                found[index] = different
        return found

    base, base_node = device(data.get("device", {}), Device(), "device"), node(data.get("node", {}), Node(), "node")
    between = link(data["between"], "between") if "between" in data else None
    if (between is None) != ("devices_per_node" not in data):
        raise ScheduleError(f"{where}: devices_per_node and [between] belong together; give both, or neither for one node")
    parts = {"communication": Communication, "fabric": Fabric, "placement": Placement}
    made: Values = {key: at(f"{where}: {key}.", make, **data[key]) for key, make in parts.items() if key in data}
    if {"order", "gpus"} <= set(data.get("placement", {})):
        raise ScheduleError(f"{where}: placement.order and placement.gpus exclude each other; leave one out")
    made |= {key: data[key] for key in ("sharing", "devices_per_node", "node_count") if key in data}
    made |= {"devices": exceptions("devices", device, base), "nodes": exceptions("nodes", node, base_node)}
    made |= {key: link(data.get(key, {}), key) for key in ("inside", "host")}
    made |= {"between": between, "device": base, "node": base_node, "name": data.get("name", Path(where).stem)}
    links: dict[tuple[int, int], Callable[[Link], Link]] = {}
    for number, entry in enumerate(data.get("links", [])):
        pair = (entry["from"], entry["to"])
        if pair[0] == pair[1]:
            raise ScheduleError(f"{where}: links[{number}] goes from device {pair[0]} to itself; a link joins two devices")
        if pair in links:
            raise ScheduleError(f"{where}: two [[links]] entries speak of {pair[0]} -> {pair[1]}")
        links[pair] = functools.partial(link, entry, f"links[{number}]")
    return made, links


def at(place: str, make: Callable[..., Made], **values: Any) -> Made:
    """Makes something, and says of an error where it is."""
    try:
        return make(**values)
    except ScheduleError as error:
        raise ScheduleError(f"{place}{error}") from None


def quantity(values: Values, key: str, dimension: Dimension, place: str, base: Any) -> float | None:
    """A value with its unit, or what *base* has."""
    found: float | None = parse_quantity(values[key], dimension, f"{place}.{key}") if key in values else getattr(base, key)
    return found
