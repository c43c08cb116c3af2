"""Links that transfers share, first come first served and fair: by hand, against a slow independent answer, and in whole runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesim import Cluster, Link, Schedule, ScheduleError, Timeline, UniformCosts, generate, lower, simulate
from pipesim.communication import Communication
from pipesim.criticalpath import CriticalPaths
from pipesim.engine.clock import Clock, Event
from pipesim.engine.networks import FairNetwork, FifoNetwork
from pipesim.engine.sharing import crossings
from pipesim.hardware import Node
from pipesim.models import Parallelism, pipeline_cluster
from pipesim.models.devices import read_device
from pipesim.network import Placement, Resource, Route

Ask = tuple[float, int, float]  # time, route, size; a transfer is its place among the asks, and so is its turn


class Watched(FairNetwork):
    """Notes the rates of everything whenever they may have changed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.history: list[tuple[float, dict[int, float]]] = []

    def choose(self, event: Event | None = None) -> None:
        super().choose(event)
        self.history.append((self.env.now, {flow.transfer: flow.rate for flows in self.flows for flow in flows}))


def carry(make: Any, routes: Sequence[Route], asks: Sequence[Ask], caps: Sequence[float | None] = ()) -> tuple[list[tuple[float, float]], Any]:
    """Runs a network on its own: when each transfer was taken, and when its last byte left."""
    env = Clock()
    taken, left = [-1.0] * len(asks), [-1.0] * len(asks)

    def take(transfer: int) -> None:
        taken[transfer] = env.now

    network = make(env, routes, take, left.__setitem__, lambda transfer: transfer)
    for number, (time, route, size) in enumerate(asks):
        event = Event(env)
        cap = caps[number] if caps else None
        event.callbacks.append(lambda _, ask=(number, route, size, cap): network.ask(*ask))
        env.trigger_at(event, time)
    env.run()
    return list(zip(taken, left, strict=True)), network


A, B = Resource("a", 10.0), Resource("b", 20.0)
ONE, BOTH, OTHER = ((A, 1.0),), ((A, 1.0), (B, 1.0)), ((B, 1.0),)


def test_two_flows_of_unequal_size_on_one_link() -> None:
    """10 and 30 bytes over 10 a slot: 5 each until the small one is through at 2; the other has 20 left, and 10 a slot."""
    asks = [(0.0, 0, 10.0), (0.0, 0, 30.0)]
    assert carry(FairNetwork, [ONE], asks)[0] == [(0, 2), (0, 4)]
    assert carry(FifoNetwork, [ONE], asks)[0] == [(0, 1), (1, 4)]


def test_three_flows_over_two_links() -> None:
    """One flow over a and b, one over a alone, one over b alone.

    a is full first, with 5 each; b leaves 15 for the third. At 1 the second (5 bytes) is through. Then b is full, with 10
    each: the first has 5 of its 10 left, until 1.5; the third has moved 15 + 5 of 45, and needs 25 / 20 more: until 2.75.
    """
    asks = [(0.0, 0, 10.0), (0.0, 1, 5.0), (0.0, 2, 45.0)]
    assert carry(FairNetwork, [BOTH, ONE, OTHER], asks)[0] == [(0, 1.5), (0, 1), (0, 2.75)]
    # the first takes 1 (10 bytes at the 10 a slot of a), so that the second goes 1..1.5; b, which has 20 a slot, has done its
    # part after 0.5, and takes the third until 0.5 + 45 / 20
    assert carry(FifoNetwork, [BOTH, ONE, OTHER], asks)[0] == [(0, 1), (1, 1.5), (0.5, 2.75)]


def test_a_third_and_two_thirds() -> None:
    """Three flows on a link of 3, the last of them also on another of 3 with a fourth flow: 1, 1, 1 and 2."""
    first, second = Resource("first", 3.0), Resource("second", 3.0)
    routes: list[Route] = [((first, 1.0),), ((first, 1.0), (second, 1.0)), ((second, 1.0),)]
    asks = [(0.0, 0, 2.0), (0.0, 0, 2.0), (0.0, 1, 2.0), (0.0, 2, 4.0)]
    assert [left for _, left in carry(FairNetwork, routes, asks)[0]] == [2, 2, 2, 2]


def test_a_flow_that_comes_in_the_middle() -> None:
    """20 bytes at 10 a slot; at 1, when 10 are left, 10 more come: 5 a slot each, so both end at 3."""
    assert carry(FairNetwork, [ONE], [(0.0, 0, 20.0), (1.0, 0, 10.0)])[0] == [(0, 3), (1, 3)]


def test_loads_and_caps() -> None:
    """Over 12 a slot, a flow that crosses it twice and one that crosses it once go at 4: 2 x 4 + 4. With a cap of 2 on the
    former the latter has 8.
    """
    pipe = Resource("pipe", 12.0)
    routes: list[Route] = [((pipe, 2.0),), ((pipe, 1.0),)]
    assert carry(FairNetwork, routes, [(0.0, 0, 8.0), (0.0, 1, 8.0)])[0] == [(0, 2), (0, 2)]
    assert carry(FairNetwork, routes, [(0.0, 0, 4.0), (0.0, 1, 16.0)], [2.0, None])[0] == [(0, 2), (0, 2)]
    # first come first served, with a cap of 1 it takes 4; it is the pipe's turn for 4 x 2 / 12 of that
    assert carry(FifoNetwork, routes, [(0.0, 0, 4.0), (0.0, 1, 16.0)], [1.0, None])[0] == [(0, 4), (2 / 3, 2)]


def test_who_waits_keeps_others_waiting() -> None:
    """a is held until 4; who asks for a and b at 1 waits, and so does who asks for b alone at 2, though b is free."""
    a, b = Resource("a", 1.0), Resource("b", 1.0)
    routes: list[Route] = [((a, 1.0),), ((a, 1.0), (b, 1.0)), ((b, 1.0),)]
    assert carry(FifoNetwork, routes, [(0.0, 0, 4.0), (1.0, 1, 2.0), (2.0, 2, 1.0)])[0] == [(0, 4), (4, 6), (6, 7)]


def test_resources_that_are_alike_are_compared_once() -> None:
    """A route over 2000 ports of 10 and one of 5: the one is all that counts, and finding that is no work for each pair of ports."""

    class Counted(tuple[tuple[Resource, float], ...]):
        read = 0

        def __iter__(self) -> Iterator[tuple[Resource, float]]:
            for crossing in super().__iter__():
                Counted.read += 1
                yield crossing

    route = Counted([*((Resource(f"port {number}", 10.0), 1.0) for number in range(2000)), (Resource("uplink", 5.0), 1.0)])
    found = crossings([route])
    assert found.capacity == [5.0]
    assert found.routes == [((0, 1.0),)]
    assert Counted.read < 10 * len(route)


def test_nothing_takes_no_time_and_a_free_way_is_free() -> None:
    for make in (FifoNetwork, FairNetwork):
        assert carry(make, [ONE, ()], [(1.0, 0, 0.0), (2.0, 1, 5.0), (3.0, 0, 0.0), (3.0, 0, 0.0)])[0] == [(1, 1), (2, 2), (3, 3), (3, 3)]


# -- against slow, independent answers --------------------------------------------------------------------------------------

RESOURCES = [Resource(f"r{number}", capacity) for number, capacity in enumerate((1.0, 2.0, 3.0, 7.0))]
loads = st.dictionaries(st.sampled_from(RESOURCES), st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=3)
some_routes = st.lists(loads.map(lambda found: tuple(found.items())), min_size=1, max_size=5)
some_asks = st.lists(st.tuples(st.integers(0, 6).map(float), st.integers(0, 4), st.integers(1, 9).map(float)), min_size=1, max_size=10)


@given(some_routes, some_asks)
def test_fair_shares_are_max_min(routes: list[Route], asks: list[Ask]) -> None:
    """At all times: nothing above its capacity, and everybody is held up by something full on which nobody is faster.

    That is what max-min fair means, and that nothing is left unused that somebody could use.
    """
    asks = [(time, route % len(routes), size) for time, route, size in asks]
    found, network = carry(Watched, routes, asks)
    carried = [0.0] * len(asks)
    for (now, rates), (later, _) in zip(network.history, [*network.history[1:], (max(left for _, left in found), {})], strict=True):
        used = {resource: sum(dict(routes[asks[t][1]]).get(resource, 0.0) * rate for t, rate in rates.items()) for resource in RESOURCES}
        for resource in RESOURCES:
            assert used[resource] <= resource.capacity * (1 + 1e-9)
        for transfer, rate in rates.items():
            full = [resource for resource, _ in routes[asks[transfer][1]] if used[resource] >= resource.capacity * (1 - 1e-9)]
            fastest = [max(other for t, other in rates.items() if resource in dict(routes[asks[t][1]])) for resource in full]
            assert any(rate >= other * (1 - 1e-9) for other in fastest)
            # since when the last one that was through has gone, nothing changes until the next choice
            carried[transfer] += rate * (min(later, found[transfer][1]) - now)
    assert carried == pytest.approx([size for _, _, size in asks], rel=1e-9)
    assert [taken for taken, _ in found] == [time for time, _, _ in asks]


def first_come(routes: list[Route], asks: list[Ask]) -> list[tuple[float, float]]:
    """First come first served, by looking at everybody at every time at which something ends or is asked for."""
    waiting = sorted(range(len(asks)), key=lambda number: (asks[number][0], number))
    found: dict[int, tuple[float, float]] = {}
    free: dict[Resource, float] = {}
    now = 0.0
    while waiting:
        kept = {resource for resource, time in free.items() if time > now}
        for number in [number for number in waiting if asks[number][0] <= now]:
            route = dict(routes[asks[number][1]])
            if kept.isdisjoint(route):
                own = {resource: now + asks[number][2] * load / resource.capacity for resource, load in route.items()}
                free |= own
                found[number] = (now, max(own.values()))
                waiting.remove(number)
            kept |= set(route)
        now = min((time for time in [*free.values(), *(time for time, _, _ in asks)] if time > now), default=now)
    return [found[number] for number in range(len(asks))]


@given(some_routes, some_asks)
def test_first_come_first_served(routes: list[Route], asks: list[Ask]) -> None:
    asks = [(time, route % len(routes), size) for time, route, size in asks]
    found, _ = carry(FifoNetwork, routes, asks)
    assert np.array(found) == pytest.approx(np.array(first_come(routes, asks)), rel=1e-12)


@given(some_routes, st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=6))
def test_one_at_a_time_is_as_on_a_link_of_its_own(routes: list[Route], transfers: list[tuple[int, int]]) -> None:
    asks = [(1000.0 * number, route % len(routes), float(size)) for number, (route, size) in enumerate(transfers)]
    expected = [(time, time + max(size * load / resource.capacity for resource, load in routes[route])) for time, route, size in asks]
    assert carry(FifoNetwork, routes, asks)[0] == expected
    assert np.array(carry(FairNetwork, routes, asks)[0]) == pytest.approx(np.array(expected), rel=1e-12)


# -- whole runs -------------------------------------------------------------------------------------------------------------

# two stages on both devices, and a microbatch each way: both send at 1, in opposite directions
EACH_WAY = Schedule.from_text("0F0 1F1\n0F1 1F0")
NODES = Cluster(Link(), Link(0.0, 1.0), 1, unit="slot")


def arrivals(cluster: Cluster, schedule: Schedule = EACH_WAY, **costs: Any) -> list[float]:
    timeline = simulate(schedule, UniformCosts(**costs), cluster=cluster)
    return list(timeline.arrived[0])


def test_half_and_full_duplex() -> None:
    """2 bytes each way over 1 a slot. Full duplex: there at 3. Half: at 3 and 5 in turn, lower device first; or both at 5."""
    half = replace(NODES, node=Node(half_duplex=("nic",)))
    for sharing in ("none", "fifo", "fair"):
        assert arrivals(replace(NODES, sharing=sharing), message=2) == [3, 3]
    assert arrivals(half, message=2) == [3, 3]  # nothing is shared unless asked for
    assert arrivals(replace(half, sharing="fifo"), message=2) == [3, 5]
    assert arrivals(replace(half, sharing="fair"), message=2) == [5, 5]


def test_half_duplex_with_unequal_sizes_and_a_latency() -> None:
    """1 byte one way, 3 the other: 1/2 a slot each until the small one is through at 3, then 1; the latency comes after."""
    half = replace(NODES, between=Link(0.25, 1.0), node=Node(half_duplex=("nic",)))
    sizes = np.array([[1.0, 3.0], [0.0, 0.0]])
    assert arrivals(replace(half, sharing="fair"), message=sizes) == [3.25, 5.25]
    assert arrivals(replace(half, sharing="fifo"), message=sizes) == [2.25, 5.25]


def test_pipelines_that_train_side_by_side_share_the_port() -> None:
    """Two pipelines over nodes of two GPUs with one port: a message crosses it twice, 10 bytes over 10 a slot take 2."""
    cluster = Cluster.from_toml(
        """
        sharing = "fair"
        devices_per_node = 2
        [inside]
        [between]
        bandwidth = "10 B/s"
        [node]
        nics = 1
        [placement]
        data = 2
        """
    )
    schedule = Schedule.from_text("0F0\n1F0")
    for sharing, expected in (("none", 2.0), ("fifo", 3.0), ("fair", 3.0)):
        timeline = simulate(schedule, UniformCosts(forward=1, backward=1, message=10, unit="s"), cluster=replace(cluster, sharing=sharing))
        assert timeline.arrived.tolist() == [[expected]]


def test_a_reload_shares_the_port_with_messages() -> None:
    """The activation (4 bytes) goes from device 0 to 1 from 1 on, beside the message (4 bytes), over one port of 1 a slot."""
    schedule = Schedule.from_text("offload: 0>1\n0F0 0OFFLOAD0 0RELOAD0 0B0\n1F0 1B0")
    costs = UniformCosts(forward=1, backward=1, message=4, activation=4)
    # message first, 1..5, offload 5..9; F1 5..6, B1 6..7; the reload, issued at once, goes 9..13, and the gradient 7..11 the
    # other way, where it was first; the reload goes 11..15
    fifo = simulate(schedule, costs, cluster=replace(NODES, sharing="fifo"))
    assert fifo.arrived.tolist() == [[5, 11]]
    assert (fifo.offload_start.tolist(), fifo.offload_end.tolist()) == ([[5, 11]], [[9, 15]])
    # both at 1/2 a slot, 1..9; then F1 9..10, B1 10..11, the reload from 9: alone until 11, when 2 are left, and the gradient
    # comes: 1/2 each until 15, when 2 of the gradient are left, until 17
    fair = simulate(schedule, costs, cluster=replace(NODES, sharing="fair"))
    assert fair.arrived.tolist() == [[9, 17]]
    assert (fair.offload_start.tolist(), fair.offload_end.tolist()) == ([[1, 9]], [[9, 15]])


def test_a_gradient_reduction_shares_the_ports_with_messages() -> None:
    """Two pipelines of two stages, one GPU a node: devices 0 and 1 stand on nodes 0, 1 and 2, 3. 1 byte a slot per port.

    B of stage 1 is 2..3 with F = B = 1 and a message of no size (stage 0: F 0..1, B 3..4). The last B of stage 1 ends at 3;
    its reduction takes 4 alone. Then the gradient of 2 bytes goes out of the same ports at the same time.
    """
    cluster = replace(NODES, placement=Placement(data=2))
    schedule = Schedule.from_text("0F0 0B0 0U0\n1F0 1B0 1U0")
    sizes = np.array([[2.0], [0.0]])
    # F0 0..1, message 1..3, F1 3..4, B1 4..5; gradient of 2 bytes beside the reduction of stage 1, both over the out ports
    costs = UniformCosts(forward=1, backward=1, message=sizes, reduction=[0.0, 4.0])
    alone = simulate(schedule, costs, cluster=cluster)
    assert alone.arrived.tolist() == [[3, 7]]
    assert alone.makespan == 9.0  # the reduction 5..9
    fair = simulate(schedule, costs, cluster=replace(cluster, sharing="fair"))
    # 1/2 each: the gradient 5..9; the reduction has 2 left then, until 11
    assert fair.arrived.tolist() == [[3, 9]]
    assert fair.makespan == pytest.approx(11, rel=1e-12)
    assert fair.traffic_end.max() == pytest.approx(11, rel=1e-12)
    # first come first served: both ask at 5, messages before collectives: 5..7, then 7..11
    fifo = simulate(schedule, costs, cluster=replace(cluster, sharing="fifo"))
    assert fifo.arrived.tolist() == [[3, 7]]
    assert fifo.traffic_start.max() == 7
    assert fifo.makespan == pytest.approx(11, rel=1e-12)


@pytest.mark.parametrize("sharing", ["fifo", "fair"])
@pytest.mark.parametrize("name", ["1f1b", "chimera", "zb-v"])
def test_the_same_twice_and_conserving(name: str, sharing: Any) -> None:
    """Every port carries no more than it can, and results are the same again."""
    schedule = generate(name, 4, 8)
    cluster = replace(NODES, sharing=sharing, node=Node(half_duplex=("nic",)), between=Link(0.125, 2.0))
    costs = UniformCosts(forward=1, message=1, unit="slot", **({"backward": 2} if name != "zb-v" else {}))
    first, second = (simulate(schedule, costs, cluster=cluster) for _ in range(2))
    for column in ("start", "end", "departed", "arrived"):
        assert np.array_equal(getattr(first, column), getattr(second, column))
    assert_ports_hold(first, cluster)


def assert_ports_hold(timeline: Timeline, cluster: Cluster) -> None:
    """In every window between two changes, what can have moved through a port is at most what it can carry."""
    found = timeline.messages
    size, left = np.ones(len(found)), timeline.arrived[0] - 0.125
    for device in range(timeline.schedule.num_devices):
        own = (found.source_device == device) | (found.target_device == device)
        begin, end = timeline.departed[0][own], left[own]
        for after in begin:
            for before in end[end > after]:
                inside = size[own][(begin >= after) & (end <= before)].sum()
                assert inside <= 2.0 * (before - after) * (1 + 1e-9) + 1e-9


def test_two_devices_are_as_with_links_of_their_own() -> None:
    """Nobody meets where each direction has one pair of devices, so first come first served is the same to the bit."""
    rng = np.random.default_rng(3)
    # ops take longer than messages, so that no two are on their way in one direction
    costs = UniformCosts(forward=rng.uniform(0.5, 1, (2, 16)), backward=rng.uniform(0.5, 1, (2, 16)), message=1)
    runs = [
        simulate(generate("1f1b", 2, 16), costs, cluster=replace(NODES, between=Link(0.1, 3.0), sharing=sharing), engine="simpy")
        for sharing in ("none", "fifo", "fair")
    ]
    for column in ("start", "end", "departed", "arrived"):
        assert np.array_equal(getattr(runs[0], column), getattr(runs[1], column))
        if column != "departed":  # a fair network takes everybody at once
            assert getattr(runs[2], column) == pytest.approx(getattr(runs[0], column), rel=1e-9)


def test_the_order_in_a_file_makes_no_difference() -> None:
    head = 'sharing = "fair"\ndevices_per_node = 1\n[inside]\n[between]\nbandwidth = "2 B/s"\n'
    entries = [
        '[[links]]\nfrom = 0\nto = 1\nbandwidth = "1 B/s"\n',
        '[[links]]\nfrom = 2\nto = 1\nbandwidth = "1.5 B/s"\n',
        '[[nodes]]\nnumbers = [3]\nnic_bandwidth = "0.75 B/s"\n',
        '[[nodes]]\nnumbers = [2, 0]\nhalf_duplex = ["nic"]\n',
        '[fabric]\noversubscription = 1.5\nnodes_per_switch = 2\n',
    ]  # fmt: skip
    costs = UniformCosts(forward=0.7, backward=1.1, message=1, unit="s")
    for sharing in ("fifo", "fair"):
        runs = [
            simulate(generate("chimera", 4, 8), costs, cluster=Cluster.from_toml(head.replace("fair", sharing) + "".join(text)))
            for text in (entries, entries[::-1], [*entries[2:], *entries[:2]])
        ]
        for run in runs[1:]:
            assert np.array_equal(run.arrived, runs[0].arrived)
            assert np.array_equal(run.end, runs[0].end)


def test_the_compiled_engine_says_that_it_does_not_share() -> None:
    pytest.importorskip("numba")
    with pytest.raises(ScheduleError, match=r"sharing = 'fair'.*engine='simpy'"):
        simulate(EACH_WAY, UniformCosts(message=1), cluster=replace(NODES, sharing="fair"), engine="compiled")


def test_the_critical_path_crosses_shared_links() -> None:
    """As above, half duplex, first come first served: device 1 works 0..1, its message waits and is there at 5, device 0 works 5..6."""
    cluster = replace(NODES, sharing="fifo", node=Node(half_duplex=("nic",)))
    makespan, on_device = CriticalPaths(EACH_WAY, UniformCosts(message=2), cluster).run(np.ones((2, 4)))
    assert makespan.tolist() == [6, 6]
    assert on_device.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("sharing", ["fifo", "fair"])
@pytest.mark.parametrize("receives", ["early", "late"])
def test_listed_messages_share_links_as_implicit_ones_do(sharing: Any, receives: Any) -> None:
    """Where every SEND and RECV goes as soon as it can, listing them changes nothing."""
    schedule = generate("1f1b", 4, 8)
    cluster = replace(NODES, sharing=sharing, node=Node(half_duplex=("nic",)), between=Link(0.125, 2.0))
    costs = UniformCosts(forward=1, backward=2, message=1)
    listed = simulate(lower(schedule, receives), costs, cluster=replace(cluster, communication=Communication(stream="free")))
    implicit = simulate(schedule, costs, cluster=cluster)
    assert listed.arrived == pytest.approx(implicit.arrived, rel=1e-9)
    assert listed.makespan == pytest.approx(implicit.makespan, rel=1e-9)


def test_a_models_pipeline_shares_what_its_cluster_shares() -> None:
    """t = 4, d = 2: a device is a node of eight GPUs with four ports, so that two GPUs send over each."""
    spec = read_device("a100-80g")
    spec = replace(spec, cluster=replace(spec.cluster, sharing="fair", node=Node(nics=4)))
    cluster = pipeline_cluster(spec, Parallelism(tensor=4, data=2, pipeline=4))
    assert cluster.gpus(1) == tuple(range(8, 16))
    assert [load for resource, load in cluster.route(0, 1) if resource.name == "node 0 NIC 3 out"] == [2]
    placed = replace(spec, cluster=replace(spec.cluster, placement=Placement(data=4)))
    with pytest.raises(ScheduleError, match="data = 2, and the placement of cluster 'DGX A100, 80 GB' has data = 4"):
        pipeline_cluster(placed, Parallelism(data=2))
