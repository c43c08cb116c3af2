"""What a cluster is made of: devices and links, nodes and the switches between them."""

from __future__ import annotations

from dataclasses import dataclass

from pipesim.errors import LARGEST, ScheduleError, did_you_mean, require_count

__all__ = ["DUPLEX", "Device", "Fabric", "Link", "Node"]

# what carries both directions at once, unless a node says otherwise; a bus has no directions
DUPLEX = ("nic", "port", "pcie")


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
class Node:
    """A node, as far as its GPUs share something. It counts where a cluster's links are shared.

    Attributes:
        nics: Network ports. GPU i of n uses port ``i * nics // n``; None for a port for each GPU.
        nic_bandwidth: Of a port, each direction; None for that of the cluster's link between nodes.
        port_bandwidth: What one GPU can send, and receive, inside its node in all (NVLink); None for that of the link inside.
        bus_bandwidth: Of one bus for all that GPUs of the node send or receive, in both directions together; None for no bus.
        pcie_switches: PCIe switches between GPUs and network ports or host. GPU i of n is at switch ``i * pcie_switches // n``.
        pcie_bandwidth: Of such a switch, each direction; None for no limit.
        half_duplex: Which of ``nic``, ``port`` and ``pcie`` carry both directions together.
        speed: Of the node's GPUs; None for that of the cluster's devices. It counts whether links are shared or not.
        memory: The same for their capacity, bytes.
    """

    nics: int | None = None
    nic_bandwidth: float | None = None
    port_bandwidth: float | None = None
    bus_bandwidth: float | None = None
    pcie_switches: int = 1
    pcie_bandwidth: float | None = None
    half_duplex: tuple[str, ...] = ()
    speed: float | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        for name in ("nics", "pcie_switches"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name))
        for name in ("nic_bandwidth", "port_bandwidth", "bus_bandwidth", "pcie_bandwidth", "speed"):
            value = getattr(self, name)
            if value is not None and not 1 / LARGEST <= value <= LARGEST:
                raise ScheduleError(f"{name} must be a finite number above 0, got {value}")
        if self.memory is not None and not 0 <= self.memory <= LARGEST:
            raise ScheduleError(f"memory must be a finite number of at least 0, got {self.memory}")
        for name in self.half_duplex:
            if name not in DUPLEX:
                raise ScheduleError(f"half_duplex knows {', '.join(DUPLEX)}, got {name!r}{did_you_mean(str(name), DUPLEX)}")


@dataclass(frozen=True)
class Fabric:
    """Leaf switches over the nodes, joined by a core that is never the bottleneck.

    Attributes:
        nodes_per_switch: Nodes under a leaf switch; their traffic among themselves uses no uplink.
        oversubscription: Bandwidth of all network ports under a leaf switch over that of its uplinks, each direction.
    """

    nodes_per_switch: int
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        require_count("nodes_per_switch", self.nodes_per_switch)
        if not 1 / LARGEST <= self.oversubscription <= LARGEST:
            raise ScheduleError(f"oversubscription must be a finite number above 0 (2 for 2:1), got {self.oversubscription}")
