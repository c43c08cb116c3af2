"""How much every link had to do: its share of the time, its bytes, and how long messages waited for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesim.columns import distinct
from pipesim.dataflow import messages
from pipesim.memory import moves
from pipesim.network import Links, utilisation

if TYPE_CHECKING:
    from pipesim.schedule import Schedule
    from pipesim.timeline import Timeline

__all__ = ["LinkUse", "link_utilisation", "route_count"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class LinkUse(NamedTuple):
    """What one link, or one resource of a network, had to do.

    Attributes:
        link: Its name, such as ``0 -> 1`` or ``node 1 NIC out``.
        capacity: Bytes (or units) per unit of time.
        busy_share: Part of the run's time in which something was crossing it.
        share: Bytes over what it could have carried in that time: less than *busy_share* where what crossed it was held up elsewhere.
        bytes: That crossed it.
        transfers: Messages, offloads and reloads that crossed it.
        longest_wait: The longest time that one of these messages was ready and not yet taken, wherever on its way the queue was.
        longest_delay: The longest time by which one of them came later than alone on its way: arrived - sent - latency - size over the
            slowest of its way. It has the wait in it, and what sharing cost after that; offloads count from when they were taken.
    """

    link: str
    capacity: float
    busy_share: float
    share: float
    bytes: float
    transfers: int
    longest_wait: float
    longest_delay: float


def link_utilisation(timeline: Timeline) -> list[LinkUse]:
    """See :meth:`pipesim.Timeline.link_utilisation`."""
    links = timeline.links
    if links is None or not len(links.names):
        return []
    moved = timeline.moves
    route = _routes(timeline.schedule)
    size = np.concatenate([timeline.footprint.message, timeline.footprint.kept[moved.stage, moved.microbatch]])
    offloads = (timeline.steps, len(moved))
    departed = np.concatenate([timeline.departed, np.broadcast_to(timeline.offload_start, offloads)], axis=1)
    arrived = np.concatenate([timeline.arrived, np.broadcast_to(timeline.offload_end, offloads)], axis=1)
    found = utilisation(links, route, size, departed, arrived, timeline.makespan)
    # (transfers,) the longest delay; less than the dust of shared rates is none
    ready = np.concatenate([timeline.sent, np.broadcast_to(timeline.offload_start, offloads)], axis=1)
    late = (arrived - ready).max(axis=0) - links.latency[route] - size * _slowness(links)[route]
    late[late < 1e-9 * timeline.makespan] = 0.0
    # (routes,) transfers, the longest wait and delay, then those of every resource that a route crosses
    counts = np.bincount(route, minlength=len(links.latency)) * timeline.steps
    waits, delays = np.zeros(len(links.latency)), np.zeros(len(links.latency))
    np.maximum.at(delays, route, late)
    np.maximum.at(waits, route[: len(timeline.messages)], (timeline.departed - timeline.sent).max(axis=0))
    crossing = np.repeat(np.arange(len(links.latency)), np.diff(links.first))
    number, longest, latest = np.zeros(len(links.names), np.int64), np.zeros(len(links.names)), np.zeros(len(links.names))
    np.add.at(number, links.resource, counts[crossing])
    np.maximum.at(longest, links.resource, waits[crossing])
    np.maximum.at(latest, links.resource, delays[crossing])
    columns = (found.capacity, found.busy_share, found.share, found.size, number, longest, latest)
    rows = [LinkUse(*row) for row in zip(links.names, *(column.tolist() for column in columns), strict=True)]
    # without the dust of float sums, which would shuffle what is alike
    return sorted(rows, key=lambda row: (-round(row.busy_share, 9), -round(row.share, 9), row.link))


def _slowness(links: Links) -> Floats:
    """(routes,) time per byte of each route that nobody else uses: that of its slowest resource."""
    result = np.zeros(len(links.latency))
    np.maximum.at(result, np.repeat(np.arange(len(result)), np.diff(links.first)), links.load / links.capacity[links.resource])
    return result


def route_count(schedule: Schedule) -> int:
    """How many ordered pairs of devices exchange something: as many routes as the links of a run must have."""
    return int(_routes(schedule).max(initial=-1)) + 1


def _routes(schedule: Schedule) -> Ints:
    """(transfers,) which of the links' routes each message takes, then each move: ordered pairs (from, to), the host after the last device."""
    sent, moved, host = messages(schedule), moves(schedule), schedule.num_devices
    partner = np.where(moved.partner < 0, host, moved.partner)
    source = np.concatenate([sent.source_device, np.where(moved.out, moved.device, partner)]).astype(np.int64)
    target = np.concatenate([sent.target_device, np.where(moved.out, partner, moved.device)]).astype(np.int64)
    code = source * (host + 1) + target
    return np.asarray(np.searchsorted(distinct(code), code))
