"""Times of collectives: by hand, by a simulated ring, and against measured tables."""

from __future__ import annotations

import csv
import itertools
import tomllib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pipesim import Cluster, Device, Link, ScheduleError, generate
from pipesim.cluster import Node, Placement
from pipesim.collectives import ALGORITHMS, Algorithm, Collective, collective_time, gradient_buckets
from pipesim.curves import Curve, curve_presets, fit_curve, read_curve, write_curve
from pipesim.models import Parallelism, TransformerCosts, read_device, read_model
from pipesim.op import Kind
from pipesim.presets import FOLDER

Floats = NDArray[np.float64]
INSIDE, BETWEEN = Link(1.0, 100.0), Link(10.0, 20.0)
EVERY = [(kind, algorithm) for kind, names in ALGORITHMS.items() for algorithm in names]


# -- formulas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "algorithm", "time"),
    [
        # 8 members, 800 bytes, one node: 1 s a hop, 100 byte/s. 7 hops and 700 bytes; all-reduce twice
        ("all_reduce", "ring", 2 * (7 + 7)),
        ("reduce_scatter", "ring", 7 + 7),
        ("all_gather", "ring", 7 + 7),
        ("all_to_all", "ring", 7 + 7),
        ("broadcast", "ring", 7 + 8),
        # three levels; whole tensor up and down
        ("all_reduce", "tree", 2 * (3 + 8)),
        ("broadcast", "tree", 3 + 8),
        # halving: 400 + 200 + 100 bytes
        ("reduce_scatter", "tree", 3 + 7),
        ("all_gather", "tree", 3 + 7),
        # all members in one node: nothing goes across
        ("all_reduce", "hierarchical", 2 * (7 + 7)),
        ("all_reduce", "best", 2 * (3 + 8)),
        ("all_gather", "best", 3 + 7),
    ],
)
def test_one_node_by_hand(kind: Collective, algorithm: Algorithm, time: float) -> None:
    assert collective_time(kind, 8, 800, INSIDE, algorithm=algorithm) == pytest.approx(time, rel=1e-14)


@pytest.mark.parametrize(
    ("kind", "algorithm", "time"),
    [
        # 8 members, 800 bytes, 2 nodes of 4. A node's 4 ports have 80 byte/s together.
        # a chunk's 7 hops: 2 of 10 s between nodes, 5 of 1 s inside; 700 bytes over 100 byte/s inside, 80 byte/s between
        ("reduce_scatter", "ring", 25 + 700 / 80),
        ("all_gather", "ring", 25 + 700 / 80),
        ("all_reduce", "ring", 2 * (25 + 700 / 80)),
        # the chain has 6 hops inside and 1 between; all 800 bytes go over it
        ("broadcast", "ring", 16 + 800 / 80),
        # to 3 neighbours and to 4 strangers, 100 bytes each; 400 bytes over one port of 20 byte/s
        ("all_to_all", "ring", 3 + 40 + 400 / 20),
        # two levels inside, one between
        ("all_reduce", "tree", 2 * (2 + 10 + 800 / 80)),
        ("broadcast", "tree", 2 + 10 + 800 / 80),
        # 600 bytes inside in two steps, 100 over each port
        ("all_gather", "tree", 2 + 6 + 10 + 100 / 20),
        ("reduce_scatter", "tree", 2 + 6 + 10 + 100 / 20),
        # inside 3 hops and 600 bytes; between: a quarter of the tensor, 1 hop and half of it
        ("all_gather", "hierarchical", 3 + 6 + 10 + 100 / 20),
        ("all_reduce", "hierarchical", 2 * (3 + 6 + 10 + 100 / 20)),
        ("broadcast", "hierarchical", 3 + 6 + 10 + 200 / 20 + 3 + 6),
        # half of what everyone has goes to the other node, in one message
        ("all_to_all", "hierarchical", 3 + 6 + 10 + 400 / 20),
        ("all_reduce", "best", 2 * (2 + 10 + 800 / 80)),
        ("all_to_all", "best", 3 + 6 + 10 + 400 / 20),
    ],
)
def test_two_nodes_by_hand(kind: Collective, algorithm: Algorithm, time: float) -> None:
    assert collective_time(kind, 8, 800, INSIDE, BETWEEN, nodes=2, algorithm=algorithm) == pytest.approx(time, rel=1e-14)


def test_textbook_formulas() -> None:
    link, size = Link(5e-6, 25e9), 1e8
    for n in (2, 4, 8, 64):
        levels = n.bit_length() - 1
        ring = 2 * (n - 1) * 5e-6 + 2 * (n - 1) / n * size / 25e9
        assert collective_time("all_reduce", n, size, link, algorithm="ring") == pytest.approx(ring, rel=1e-12)
        assert collective_time("reduce_scatter", n, size, link, algorithm="ring") == pytest.approx(ring / 2, rel=1e-12)
        assert collective_time("all_to_all", n, size, link, algorithm="ring") == pytest.approx(ring / 2, rel=1e-12)
        assert collective_time("all_reduce", n, size, link, algorithm="tree") == pytest.approx(2 * levels * 5e-6 + 2 * size / 25e9, rel=1e-12)


def _last_chunk(latencies: list[float], seconds: float, turns: int) -> float:
    """When the last chunk has made turns·(n - 1) hops of a ring, each chunk starting at another member, one at a time on a link."""
    n = len(latencies)
    free = [0.0] * n
    ready = [0.0] * n  # of the chunk that began at each member
    for step in range(turns * (n - 1)):
        for chunk in range(n):
            hop = (chunk + step) % n
            free[hop] = max(free[hop], ready[chunk]) + seconds
            ready[chunk] = free[hop] + latencies[hop]
    return max(ready)


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("per_node", [1, 3, 4])
def test_a_ring_across_nodes_pays_the_network_once_a_node(nodes: int, per_node: int) -> None:
    # simulated chunk by chunk, latency only; the network's hop is the last of each node
    n = nodes * per_node
    hops = ([1.0] * (per_node - 1) + [10.0 if nodes > 1 else 1.0]) * nodes
    links = (Link(1.0), Link(10.0))
    for kind, turns in (("reduce_scatter", 1), ("all_reduce", 2)):
        found = collective_time(kind, n, 1.0, *links, nodes=nodes, algorithm="ring")  # type: ignore[call-overload]
        assert found == (_last_chunk(hops, 0.0, turns) if n > 1 else 0)


def test_a_ring_of_equal_links_is_exact() -> None:
    assert collective_time("all_reduce", 6, 60.0, Link(2.0, 5.0), algorithm="ring") == pytest.approx(_last_chunk([2.0] * 6, 60 / 6 / 5, 2))


@pytest.mark.parametrize(("kind", "algorithm"), EVERY)
def test_properties(kind: Collective, algorithm: Algorithm) -> None:
    sizes = np.array([0.0, 1.0, 1e3, 1e6, 1e9])
    for n, k in itertools.product((1, 2, 3, 7, 8, 64), (1, 2, 3)):
        if k > n:
            continue
        times = collective_time(kind, n, sizes, INSIDE, BETWEEN, nodes=k, algorithm=algorithm)
        best = collective_time(kind, n, sizes, INSIDE, BETWEEN, nodes=k)
        assert times.shape == sizes.shape
        assert times[0] == 0  # nothing to send
        assert (np.diff(times) > 0).all() if n > 1 else not times.any()  # one alone has nobody to send to
        assert (best <= times).all()
        # a number gives what an array does, and other units scale
        assert collective_time(kind, n, 1e6, INSIDE, BETWEEN, nodes=k, algorithm=algorithm) == times[3]
        faster = collective_time(kind, n, sizes, Link(0.5, 200.0), Link(5.0, 40.0), nodes=k, algorithm=algorithm)
        assert faster == pytest.approx(times / 2)


def test_best_changes_with_the_size() -> None:
    # 8 members in one node: the tree has 8 hops less, and sends a quarter of S more
    small, large = (collective_time("all_reduce", 8, size, INSIDE) for size in (800.0, 8e6))
    assert small == 2 * (3 + 8)
    assert large == pytest.approx(14 + 1.75 * 8e6 / 100)


def test_no_bandwidth_is_no_limit() -> None:
    assert collective_time("all_reduce", 4, 1e9, Link(2.0), algorithm="ring") == 12.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "allreduce"}, "there is no collective 'allreduce'; did you mean 'all_reduce'"),
        ({"algorithm": "star"}, "all_reduce has no algorithm 'star'"),
        ({"kind": "all_to_all", "algorithm": "tree"}, "all_to_all has no algorithm 'tree'.*it has best, ring, hierarchical"),
        ({"nodes": 9}, "8 members cannot stand on 9 nodes"),
        ({"nodes": 2, "link_between": None}, "8 members on 2 nodes need link_between"),
        ({"members": 0}, "members must be at least 1"),
        ({"size": -1.0}, "size must be a finite number of bytes of at least 0"),
        ({"size": float("nan")}, "size must be a finite number"),
        ({"algorithm": "tree", "curve": Curve((2,), (1.0,), (1.0,), (0.0,))}, "with it, algorithm cannot be 'tree'"),
    ],
)
def test_wrong_arguments(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"kind": "all_reduce", "members": 8, "size": 1.0, "link_inside": INSIDE, "link_between": BETWEEN}
    with pytest.raises(ScheduleError, match=message):
        collective_time(**(arguments | change))  # type: ignore[call-overload]


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_buckets_by_hand() -> None:
    cluster = Cluster(inside=Link(0.0, 100.0), between=Link(1.0, 10.0), devices_per_node=2)
    # replicas on devices 0 and 1 of a node, ring of two: 2·(0 + 30/100) for each 60 bytes
    whole, halves = (gradient_buckets(cluster, [0, 1], 120.0, bucket=bucket) for bucket in (None, 60.0))
    assert whole.times.tolist() == pytest.approx([1.2])
    assert halves.times.tolist() == pytest.approx([0.6, 0.6])
    # across the nodes latency counts for every bucket: 2·(1 + 30/10)
    assert gradient_buckets(cluster, [0, 3], 120.0, bucket=60.0).times.tolist() == pytest.approx([8.0, 8.0])
    # two pipelines, in nodes of their own, with two replicas each in one node: a ring of 4 over 2 nodes, 2 ports of 10 byte/s
    four = gradient_buckets(cluster, [0, 1], 120.0, data=2, kind="reduce_scatter", algorithm="ring")
    assert four.times.tolist() == pytest.approx([2 * 1 + 90 / 20])
    # three chunks of 50 and one of 20
    assert gradient_buckets(cluster, [0, 1], 170.0, bucket=50.0).sizes.tolist() == [50.0, 50.0, 50.0, 20.0]
    assert gradient_buckets(cluster, [0], 170.0).times.tolist() == [0.0]
    assert gradient_buckets(cluster, [0, 1], 0.0, bucket=50.0).times.tolist() == [0.0]


def test_links_that_differ_slow_the_ring() -> None:
    cluster = Cluster(inside=Link(0.0, 100.0), links={(1, 2): Link(3.0, 50.0)})
    found = gradient_buckets(cluster, [0, 1, 2], 300.0, algorithm="ring")
    assert found.times.tolist() == [2 * (2 * 3.0 + 200 / 50)]
    # the ring 0 -> 3 -> 0 does not use that link
    assert gradient_buckets(cluster, [0, 3], 300.0, algorithm="ring").times.tolist() == [2 * 150 / 100]


def test_placement_says_where_the_peers_stand() -> None:
    # two pipelines in Megatron's order, devices of 2 GPUs: device 0 has GPUs 0, 1 and 2, 3, device 1 has 4, 5 and 6, 7
    base = {"inside": Link(1.0, 100.0), "between": Link(10.0, 20.0), "device": Device(width=2), "placement": Placement(data=2)}
    near = Cluster(**base, devices_per_node=4)  # type: ignore[arg-type]
    assert gradient_buckets(near, [0], 100.0).times.tolist() == [2 * (1 + 50 / 100)]
    # nodes of 2 GPUs: each peer in its own
    far = Cluster(**base, devices_per_node=2)  # type: ignore[arg-type]
    assert gradient_buckets(far, [0], 100.0).times.tolist() == [2 * (10 + 50 / 20)]
    # replicas on both devices, nodes of 4: a ring of GPUs 0, 2, 4, 6 over 2 nodes, with 2 ports each: 3 hops, 2 of the network
    ring = gradient_buckets(near, [0, 1], 100.0, kind="all_gather", algorithm="ring")
    assert ring.times.tolist() == [1 + 2 * 10 + 75 / 40]
    with pytest.raises(ScheduleError, match="data is 3, and the placement of cluster 'cluster' has 2 pipelines"):
        gradient_buckets(near, [0], 100.0, data=3)


def test_shared_ports_are_shared_by_the_ring() -> None:
    # nodes of 4 GPUs with one network port; a device per GPU, replicas on 0, 1 and 4, 5: instead of two ports of 20 byte/s
    # the two rings have one: 3/4 of 400 bytes at 20 byte/s
    links = {"inside": Link(1.0, 100.0), "between": Link(10.0, 20.0), "devices_per_node": 4}
    own, shared = (Cluster(**links, sharing=sharing, node=Node(nics=1)) for sharing in ("none", "fair"))  # type: ignore[arg-type]
    devices, hops = [0, 1, 4, 5], 1 + 2 * 10
    assert gradient_buckets(own, devices, 400.0, kind="all_gather", algorithm="ring").times.tolist() == [hops + 300 / 40]
    assert gradient_buckets(shared, devices, 400.0, kind="all_gather", algorithm="ring").times.tolist() == [hops + 300 / 20]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": []}, "devices must be one or more"),
        ({"devices": [1, 1]}, "each named once"),
        ({"bucket": 0.0}, "bucket must be a number of bytes above 0"),
        ({"bucket": 1e-9}, "makes more than a million buckets"),
        ({"size": float("inf")}, "size must be a finite number"),
        ({"data": 0}, "data must be at least 1"),
    ],
)
def test_wrong_buckets(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        gradient_buckets(Cluster(), **({"devices": [0, 1], "size": 1.0} | arguments))  # type: ignore[arg-type]


def test_D03_every_microbatch_costs_m_times_once_a_step() -> None:
    # a network so slow that nothing else counts: zero=1 scatters 4-byte gradients once a step and gathers 2-byte weights,
    # zero=2 scatters after every backward, and gathers once
    m = 8
    schedule = generate("1f1b", 4, m)
    device = read_device("a100-80g")
    slow = Cluster(inside=Link(0.0, 1.0), between=Link(0.0, 1.0), devices_per_node=8)
    device = type(device)(**{**vars(device), "cluster": slow})
    once, each = (TransformerCosts(read_model("gpt-1.7b"), device, Parallelism(pipeline=4, data=2, zero=zero)) for zero in (1, 2))
    updates = [costs.update_times(schedule)["gradient reduction"][1] for costs in (once, each)]
    backward = each.durations(schedule)[(schedule.kind == int(Kind.B)) & (schedule.stage == 1)]
    # of the layers' 12h² + 13h parameters, half of 4 bytes each go to the peer at 1 byte/s
    h, layers = 2304, 24 / 4
    scatter = (12 * h**2 + 13 * h) * layers * 4 / 2
    assert updates[0] - updates[1] == pytest.approx(scatter, rel=1e-9)
    assert backward.tolist() == pytest.approx([scatter] * m, rel=1e-9)


# -- measured curves ---------------------------------------------------------------------------------------------------


def _table(folder: Path, name: str) -> tuple[Floats, Floats]:
    """Bytes and seconds (out of place) of a table, 1 MiB to 1 GiB."""
    with (folder / "vtrain" / f"{name}gpu.csv").open(newline="") as file:
        rows = [(float(row[0]), float(row[3]) * 1e-9) for row in list(csv.reader(file))[1:]]
    sizes, times = np.array(rows).T
    kept = (sizes >= 2**20) & (sizes <= 2**30)
    assert kept.sum() > 100
    return sizes[kept], times[kept]


def _percent(curve: Curve, members: int, table: tuple[Floats, Floats]) -> tuple[float, float]:
    """Mean and 95th percentile of the relative error, in percent."""
    error = 100 * np.abs(np.asarray(curve.time(members, table[0])) / table[1] - 1)
    return float(error.mean()), float(np.percentile(error, 95))


@pytest.mark.parametrize(("preset", "members"), [("a100", 2), ("a100", 4), ("a100", 8), ("v100", 8)])
def test_presets_against_the_tables(shared_data: Path, preset: str, members: int) -> None:
    mean, worst = _percent(read_curve(preset), members, _table(shared_data, f"{preset}_allreduce_{members}"))
    assert mean <= 1.5
    assert worst <= 5


@pytest.mark.parametrize("members", [2, 4, 8])
def test_rows_that_were_left_out(shared_data: Path, members: int) -> None:
    sizes, times = _table(shared_data, f"a100_allreduce_{members}")
    for kept, out in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        mean, worst = _percent(fit_curve({members: (sizes[kept], times[kept])}), members, (sizes[out], times[out]))
        assert mean <= 1.5
        assert worst <= 5


@pytest.mark.parametrize("members", [2, 4, 8])
def test_a_table_that_was_left_out(shared_data: Path, members: int) -> None:
    others = {n: _table(shared_data, f"a100_allreduce_{n}") for n in (2, 4, 8) if n != members}
    mean, worst = _percent(fit_curve(others), members, _table(shared_data, f"a100_allreduce_{members}"))
    assert mean <= 1.5
    assert worst <= 5


def test_presets_are_the_fits_that_they_say(shared_data: Path) -> None:
    for preset, numbers in (("a100", (2, 4, 8)), ("v100", (8,))):
        fitted, shipped = fit_curve({n: _table(shared_data, f"{preset}_allreduce_{n}") for n in numbers}), read_curve(preset)
        assert shipped.members == fitted.members
        for name in ("latency", "per_byte", "per_root"):
            assert getattr(shipped, name) == pytest.approx(getattr(fitted, name), rel=1e-3)


def test_presets_have_a_source() -> None:
    assert curve_presets()
    for name in curve_presets():
        data = tomllib.loads((FOLDER / f"collectives-{name}.toml").read_text())
        assert "vTrain" in data["source"]
        assert "benchmarks/collectives.py" in data["source"]


def test_a_fit_finds_what_was_put_in() -> None:
    sizes = np.linspace(2**20, 2**30, 300)
    times = 30e-6 + 7e-12 * sizes + 5e-9 * np.sqrt(sizes)
    times[5::17] *= 1.3  # single rows far off do not pull
    curve = fit_curve({4: (sizes, times)})
    assert curve.coefficients(4) == pytest.approx((30e-6, 7e-12, 5e-9), rel=1e-3)
    # what would be below 0 is 0
    assert fit_curve({4: (sizes, 7e-12 * sizes - 1e-7)}).latency == (0.0,)


def test_members_between_and_beyond_the_tables() -> None:
    curve = Curve((2, 8), (20e-6, 80e-6), (4e-12, 7e-12), (8e-9, 2e-9))
    # 4: 6 hops, a third of the way from 2 to 14; traffic 3/2, two thirds of the way from 1 to 7/4
    assert curve.coefficients(4) == pytest.approx((40e-6, 6e-12, 4e-9))
    # 16: 30 hops, traffic 15/8; γ does not fall on
    assert curve.coefficients(16) == pytest.approx((160e-6, 7.5e-12, 2e-9))
    assert Curve((4, 8), (10e-6, 80e-6), (6e-12, 7e-12), (0.0, 0.0)).coefficients(2) == pytest.approx((0.0, 4e-12, 0.0))
    assert curve.time(1, 1e9) == 0
    assert curve.time(2, 0.0) == 0
    times = np.array([curve.time(n, 1e9) for n in range(1, 100)])
    assert (np.diff(times) > 0).all()


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_curve_takes_the_place_of_the_links_inside(nodes: int) -> None:
    curve = Curve((4, 8), (40e-6, 80e-6), (6e-12, 7e-12), (8e-9, 9e-9))
    size = 2.0**28
    if nodes == 1:
        whole = curve.time(8, size)
        assert collective_time("all_reduce", 8, size, Link(), curve=curve) == pytest.approx(whole, rel=1e-12)
        # one of its two passes
        for kind in ("reduce_scatter", "all_gather", "all_to_all"):
            assert collective_time(kind, 8, size, Link(), curve=curve) == pytest.approx(whole / 2, rel=1e-12)
    else:
        # reduce-scatter and all-gather among 4, and 1/4 of the tensor between 2 nodes
        across = 2 * (10e-6 + size / 4 / 2 / 25e9)
        found = collective_time("all_reduce", 8, size, Link(), Link(10e-6, 25e9), nodes=2, algorithm="hierarchical", curve=curve)
        assert found == pytest.approx(curve.time(4, size) + across, rel=1e-12)
    # a curve without root is a link
    link, plain = Link(5e-6, 240e9), Curve((8,), (14 * 5e-6,), (1.75 / 240e9,), (0.0,))
    for kind in ALGORITHMS:
        expected = collective_time(kind, 8, size, link, Link(1e-5, 25e9), nodes=nodes, algorithm="ring")
        found = collective_time(kind, 8, size, Link(), Link(1e-5, 25e9), nodes=nodes, algorithm="ring", curve=plain)
        assert found == pytest.approx(expected, rel=1e-12)


def test_files_round_trip(tmp_path: Path) -> None:
    curve = Curve((2, 8), (20e-6, 80e-6), (4e-12, 8e-12), (8e-9, 0.0), "x", 'a "source"')
    write_curve(curve, tmp_path / "x.toml")
    found = read_curve(tmp_path / "x.toml")
    assert (found.members, found.name, found.source) == ((2, 8), "x", 'a "source"')
    for members in (2, 5, 8):
        assert found.coefficients(members) == pytest.approx(curve.coefficients(members), rel=1e-3)
    with pytest.raises(ScheduleError, match="does not grow with the size"):
        write_curve(Curve((2,), (1.0,), (0.0,), (0.0,)), tmp_path / "y.toml")


def test_the_order_of_tables_does_not_count(tmp_path: Path) -> None:
    entry = '[[tables]]\nmembers = {}\nlatency = "{} us"\nbandwidth = "100 GB/s"\nroot = "0 ns"\n'
    paths = [tmp_path / "one.toml", tmp_path / "other.toml"]
    paths[0].write_text(entry.format(2, 20) + entry.format(8, 30))
    paths[1].write_text(entry.format(8, 30) + entry.format(2, 20))
    one, other = map(read_curve, paths)
    assert (one.members, one.latency) == (other.members, other.latency)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "x"', "tables is missing"),
        ('tables = [{members = 1, latency = "1 us", bandwidth = "1 GB/s", root = "0 ns"}]', "members"),
        ('tables = [{members = 2, latency = 5, bandwidth = "1 GB/s", root = "0 ns"}]', r"tables\[0\].latency = 5 has no unit"),
        ('tables = [{members = 2, latency = "1 us", bandwidth = "0 GB/s", root = "0 ns"}]', "bandwidth must be above 0"),
        ('tables = [{members = 2, latency = "1 us", bandwith = "1 GB/s", root = "0 ns"}]', "unknown key.*did you mean 'bandwidth'"),
        ('[[tables]]\nmembers = 2\nlatency = "1 us"\nbandwidth = "1 GB/s"\nroot = "0 ns"\n' * 2, "members must rise"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "curve.toml"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=message):
        read_curve(path)


def test_wrong_curves() -> None:
    with pytest.raises(ScheduleError, match="no preset of that name; did you mean 'a100'"):
        read_curve("a10")
    with pytest.raises(ScheduleError, match="must be as many"):
        Curve((2, 4), (1.0,), (1.0,), (1.0,))
    with pytest.raises(ScheduleError, match="coefficients must be finite numbers of at least 0"):
        Curve((2,), (float("nan"),), (1.0,), (1.0,))
    with pytest.raises(ScheduleError, match="at least 3 sizes"):
        fit_curve({2: (np.ones(2), np.ones(2))})
    with pytest.raises(ScheduleError, match="not a finite number above 0"):
        fit_curve({2: (np.ones(3), np.zeros(3))})
