"""Rooflines, rings, and which links a group has."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from pipesim import Cluster, Link
from pipesim.models import DeviceSpec, Efficiency, ModelSpec, Parallelism, pipeline_cluster
from pipesim.models.layers import Gemm, Work, layer_work
from pipesim.models.links import Group, gradient_group, ring_time, tensor_group
from pipesim.models.times import gemm_time, work_times

# Round numbers: 100 FLOP/s, 10 byte/s; two GPUs a node
EFFICIENCY = Efficiency(gemm=0.5, gemm_size=0, attention=0.5, memory=1.0, inside=1.0, between=0.5, gradient=0.25, pipeline=1.0)
CLUSTER = Cluster(inside=Link(0.0, 100.0), between=Link(1.0, 8.0), devices_per_node=2)
DEVICE = DeviceSpec(
    name="slow", mixed_flops=100, fp32_flops=50, memory=1e9, memory_bandwidth=10, host_bandwidth=1, cluster=CLUSTER, efficiency=EFFICIENCY
)
MODEL = ModelSpec(name="tiny", layers=1, hidden=8, heads=2, vocabulary=16, sequence=4)


def test_a_product_takes_the_longer_of_flops_and_bytes() -> None:
    wide, thin = Gemm(100, 100, 100), Gemm(1, 100, 100)
    assert gemm_time(wide, DEVICE, Parallelism()) == max(2e6 / 50, 60000 / 10) == 40000
    # a product with one row reads all the weights for little: 20000 FLOPs take 400 s, (100 + 10000 + 100)·2 bytes 2040 s
    assert gemm_time(thin, DEVICE, Parallelism()) == 2040
    # a weight gradient is read and written in 4 bytes instead of written in 2: + 6·10000 bytes
    assert gemm_time(thin, DEVICE, Parallelism(), accumulate=True) == 8040
    assert gemm_time(wide, DEVICE, Parallelism(precision="fp32")) == 80000


def test_a_narrow_product_is_slower() -> None:
    # n = k = 100 and a size of 50: 1 + 50·(1/100 + 1/100) = 2
    device = DEVICE.with_efficiency(gemm_size=50)
    assert gemm_time(Gemm(100, 100, 100), device, Parallelism()) == 80000


def test_passes_by_hand() -> None:
    work = Work(
        linear=(Gemm(100, 100, 100),),
        attention=100,
        attention_backward=200,
        attention_bytes=10,
        attention_bytes_backward=20,
        forward_bytes=30,
        backward_bytes=40,
        collectives=2,
        collectives_backward=1,
    )
    times = work_times(work, DEVICE, MODEL, Parallelism(tensor=2), 1, overhead=7)
    # 40000 + 100/25 + 10/10 + 30/10 + 7
    assert times.forward == 40000 + 4 + 1 + 3 + 7
    assert times.input_grad == 40000 + 8 + 2 + 4 + 7
    assert times.weight_grad == 40000 + 7
    assert times.attention == 4 + 1
    # 4·8 elements of 2 bytes over two GPUs of a node at 100 byte/s: 2·(1/2)·64/100 each
    assert times.forward_collectives == pytest.approx(2 * 0.64)
    assert times.backward_collectives == pytest.approx(0.64)


def test_attention_products_take_the_longer_of_flops_and_bytes() -> None:
    # 100 FLOP at 25 a second take 4 s, 200 take 8; 90 and 60 bytes at 10 a second take 9 and 6; softmax's bytes come on top
    work = Work(attention=100, attention_backward=200, attention_bytes=10, attention_bytes_backward=20, score_bytes=90, score_bytes_backward=60)
    times = work_times(work, DEVICE, MODEL, Parallelism(), 1)
    assert (times.forward, times.input_grad) == (9 + 1, 8 + 2)


def test_flash_attention_skips_what_a_causal_mask_hides() -> None:
    work = layer_work(MODEL, Parallelism(flash_attention=True), 1)
    causal = work_times(work, DEVICE, MODEL, Parallelism(flash_attention=True), 1)
    both_ways = work_times(work, DEVICE, replace(MODEL, causal=False), Parallelism(flash_attention=True), 1)
    assert both_ways.attention == 2 * causal.attention


def test_a_measured_all_reduce(shared_data: Path) -> None:
    # nccl-tests on 8 A100, 1 GiB: the model's link figures are NCCL's own
    with (shared_data / "vtrain" / "a100_allreduce_8gpu.csv").open() as file:
        measured = {int(row["size(B)"]): float(row["time(ns)"]) * 1e-9 for row in csv.DictReader(file)}
    group = Group(8, 1, Cluster.load("dgx-a100").inside, None)
    assert ring_time("all_reduce", group, 2**30) == pytest.approx(measured[2**30], rel=0.05)


def test_a_group_inside_a_node_has_its_links() -> None:
    assert tensor_group(DEVICE, Parallelism(tensor=2)) == Group(2, 1, Link(0.0, 100.0), None)
    assert gradient_group(DEVICE, Parallelism(data=2)) == Group(2, 1, Link(0.0, 100.0), None)


def test_a_group_across_nodes_has_both_links() -> None:
    # 4 GPUs in 2 nodes; half of 8 byte/s is reached, and a quarter by gradients
    assert tensor_group(DEVICE, Parallelism(tensor=4)) == Group(4, 2, Link(0.0, 100.0), Link(1.0, 4.0))
    assert gradient_group(DEVICE, Parallelism(data=4)) == Group(4, 2, Link(0.0, 100.0), Link(1.0, 2.0))
    # with t = 2 the peers of a GPU stand in nodes of their own
    assert gradient_group(DEVICE, Parallelism(tensor=2, data=3)) == Group(3, 3, Link(0.0, 100.0), Link(1.0, 2.0))
    # in nodes of 8, peers that are 4 apart: two in each of 3 nodes; replicas count as peers
    node = replace(DEVICE, cluster=replace(CLUSTER, devices_per_node=8))
    assert gradient_group(node, Parallelism(tensor=4, data=3), 2)[:2] == (6, 3)
    # 3 apart, 0, 3 and 6 still stand in one node
    assert gradient_group(node, Parallelism(tensor=3, data=3))[:2] == (3, 1)


def test_a_ring_across_nodes_uses_the_ports_of_its_members_in_a_node() -> None:
    # all-gather of 400 bytes among 4 GPUs in 2 nodes: of a chunk's 3 hops 2 are between nodes, at 1 s; 3/4 of the
    # bytes leave a node over both of its ports of 4 byte/s
    assert ring_time("all_gather", tensor_group(DEVICE, Parallelism(tensor=4)), 400) == 2 * 1 + 300 / 8
    # data parallel over 2 nodes with t = 2: each of the two rings has one port of 2 byte/s, and one hop
    assert ring_time("all_gather", gradient_group(DEVICE, Parallelism(tensor=2, data=2)), 400) == 1 + 200 / 2
    # and with t = 1 one ring has both
    assert ring_time("all_gather", gradient_group(DEVICE, Parallelism(data=4)), 400) == 2 * 1 + 300 / 4
    # no faster than the links inside
    slow = replace(DEVICE, cluster=replace(CLUSTER, inside=Link(0.0, 3.0)))
    assert ring_time("all_gather", gradient_group(slow, Parallelism(data=4)), 400) == 2 * 1 + 300 / 3


def test_neighbouring_stages_are_tensor_times_data_apart() -> None:
    node = replace(DEVICE, cluster=replace(CLUSTER, devices_per_node=8))
    for tensor, data, together in ((1, 1, 8), (2, 1, 4), (2, 2, 2), (8, 1, 1), (4, 4, 1)):
        cluster = pipeline_cluster(node, Parallelism(tensor=tensor, data=data, pipeline=16))
        assert cluster.devices_per_node == together
        assert cluster.device.width == tensor
        assert cluster.link(together - 1, together).bandwidth == 8.0
    assert pipeline_cluster(DEVICE, Parallelism(), memory=5.0).device.memory == 5.0
