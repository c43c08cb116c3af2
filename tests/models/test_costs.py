"""The cost model of a transformer: times, messages and bytes of stages."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipesim import CostModel, Kind, ScheduleError, generate, simulate
from pipesim.models import ModelSpec, Parallelism, TransformerCosts, layer_activation, parameters, read_device, read_model
from pipesim.models.layers import head_activation
from pipesim.models.links import Group, gradient_group, ring_time, tensor_group

A100 = read_device("a100-80g")
GPT3 = read_model("gpt3-175b")
SBH = 2048 * 12288


def costs(model: ModelSpec = GPT3, device: Any = A100, sizes: Any = None, **parallel: Any) -> TransformerCosts:
    return TransformerCosts(model, device, Parallelism(**{"tensor": 8, "pipeline": 8, **parallel}), microbatch_sizes=sizes)


def test_it_is_a_cost_model() -> None:
    assert isinstance(costs(), CostModel)


# -- times -------------------------------------------------------------------------------------------------------------


def test_a_stage_is_its_layers_and_ends() -> None:
    times = costs(layout=[11, 12, 12, 12, 12, 12, 12, 13]).stage_times(8)
    alone = costs(layout=[0, 13, 13, 14, 14, 14, 14, 14]).stage_times(8)
    layer = times.forward[1] / 12
    assert times.forward[1:7] == pytest.approx([12 * layer] * 6)
    assert times.forward[0] == pytest.approx(11 * layer + alone.forward[0])  # stage 0 of the other is the embedding alone
    assert times.forward[7] > 13 * layer


def test_backward_is_both_halves() -> None:
    times = costs(device=A100.with_efficiency(op_overhead=0.5)).stage_times(8)
    assert times.backward == pytest.approx(times.input_grad + times.weight_grad - 0.5)


def test_overheads_are_per_op_and_per_layer() -> None:
    plain = costs().stage_times(8)
    more = costs(device=A100.with_efficiency(op_overhead=0.5, layer_overhead=0.01)).stage_times(8)
    for kind in ("forward", "input_grad", "weight_grad"):
        assert getattr(more, kind) - getattr(plain, kind) == pytest.approx(0.5 + 12 * 0.01)


def test_measured_stages_of_the_zero_bubble_paper(shared_data: Path) -> None:
    # Table 9, profiled on A100 80 GB without tensor parallelism: stages of three layers. No parameter was fitted to them.
    with (shared_data / "papers" / "zb_table9_profiled_times.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["model"] in ("1.5B", "14.6B")]
    assert rows
    for row in rows:
        layers, samples = {"1.5B": (22, 6), "14.6B": (46, 1)}[row["model"]]
        sizes = {"hidden": int(row["hidden_h"]), "heads": int(row["attn_heads_a"]), "sequence": int(row["seq_s"])}
        model = ModelSpec(name=row["model"], layers=layers, vocabulary=51200, **sizes)
        p = int(row["p"])
        found = costs(model, tensor=1, pipeline=p, microbatch=samples, embedding_weight=1, head_weight=1).stage_times(p)
        for ours, theirs in ((found.forward, "T_F"), (found.input_grad, "T_B"), (found.weight_grad, "T_W")):
            assert ours[1] * 1e3 == pytest.approx(float(row[theirs]), rel=0.2)


def test_recomputation_adds_to_the_backward() -> None:
    schedule = generate("1f1b", 8, 8)
    plain = costs().durations(schedule)
    full = costs(recompute="full")
    times = full.stage_times(8)
    backward = schedule.kind == int(Kind.B)
    # every layer's forward, but neither the embedding nor the output layer
    assert times.recompute == pytest.approx([times.forward[1]] * 8)
    assert (full.durations(schedule) - plain)[backward] == pytest.approx(times.recompute[schedule.stage[backward]])
    assert np.array_equal(full.durations(schedule)[~backward], plain[~backward])
    selective = costs(recompute="selective").stage_times(8).recompute
    # 4bs²h of 24bsh² + 4bs²h: a 37th of the FLOPs, but at less than the rate of the linear layers
    assert (selective > times.recompute * 4 * 2048 / (24 * 12288 + 4 * 2048)).all()
    assert (selective < times.recompute / 5).all()


def test_a_listed_recomputation_is_an_op_and_not_added() -> None:
    schedule = generate("1f1b-recompute", 8, 8)
    plain, wished = costs(), costs(recompute="full")
    assert np.array_equal(plain.durations(schedule), wished.durations(schedule))
    recompute = schedule.kind == int(Kind.R)
    assert plain.durations(schedule)[recompute] == pytest.approx(plain.stage_times(8).forward[schedule.stage[recompute]])


def test_parts_add_up_to_durations() -> None:
    for name in ("1f1b", "zb-v", "dualpipe", "1f1b-recompute", "chimera"):
        schedule = generate(name, 8, 16).with_updates()
        model = costs(data=4, recompute="full", scatter_gather=True, device=A100.with_efficiency(step_overhead=0.1, op_overhead=0.01))
        assert np.sum(list(model.slot_parts(schedule).values()), axis=0) == pytest.approx(model.durations(schedule))


def test_smaller_last_microbatch() -> None:
    schedule = generate("1f1b", 8, 3)
    model = costs(sizes=[4, 4, 2], microbatch=4)
    durations = model.durations(schedule)
    forward = schedule.kind == int(Kind.F)
    times = [model.stage_times(8, samples).forward for samples in (4, 4, 2)]
    for stage, microbatch, seconds in zip(schedule.stage[forward], schedule.microbatch[forward], durations[forward], strict=True):
        assert seconds == times[microbatch][stage]
    with pytest.raises(ScheduleError, match="the batch makes 3 microbatches and the schedule has 4"):
        model.durations(generate("1f1b", 8, 4))


def test_tensor_parallel_collectives_by_formula() -> None:
    # per layer 2 all-reduces of 2bsh bytes in F and 2 in I; the embedding one in F, the output layer one in I
    found = costs().stage_times(8)
    one = ring_time("all_reduce", tensor_group(A100, Parallelism(tensor=8)), 2 * SBH)
    assert found.exposed[Kind.F] == pytest.approx([25 * one, *[24 * one] * 7])
    assert found.exposed[Kind.I] == pytest.approx([24 * one] * 7 + [25 * one])
    assert not found.exposed[Kind.W].any()
    assert not costs(tensor=1).stage_times(8).exposed[Kind.F].any()
    # sequence parallelism: all-gather and reduce-scatter of the same volume
    assert costs(sequence_parallel=True).stage_times(8).exposed[Kind.F] == pytest.approx(found.exposed[Kind.F])


# -- messages ----------------------------------------------------------------------------------------------------------


def test_C13_scatter_gather_over_tensor_parallel_ranks() -> None:
    model = ModelSpec(name="x", layers=8, hidden=4096, heads=32, vocabulary=51200, sequence=2048)
    schedule = generate("1f1b", 8, 8)
    whole, split = costs(model, tensor=4), costs(model, tensor=4, scatter_gather=True)
    assert set(whole.message_bytes(schedule)) == {16 * 2**20}
    assert set(split.message_bytes(schedule)) == {4 * 2**20}
    # and an all-gather of the same tensor on the receiver: of F not on stage 0, of B not on the last
    gather = ring_time("all_gather", tensor_group(A100, Parallelism(tensor=4)), 16 * 2**20)
    difference = split.stage_times(8).forward - whole.stage_times(8).forward
    assert difference == pytest.approx([0, *[gather] * 7], abs=1e-12)
    difference = split.stage_times(8).backward - whole.stage_times(8).backward
    assert difference == pytest.approx([*[gather] * 7, 0], abs=1e-12)
    # with sequence parallelism it lies split, and nothing is gathered
    sequence = costs(model, tensor=4, sequence_parallel=True)
    assert set(sequence.message_bytes(schedule)) == {4 * 2**20}


def test_nothing_is_gathered_where_two_stages_share_a_device() -> None:
    # in the V of ZB-V stages 7 and 8 stand on device 7
    schedule = generate("zb-v", 8, 16)
    both = costs(scatter_gather=True).durations(schedule) - costs().durations(schedule)
    forward = (schedule.kind == int(Kind.F)) & (schedule.stage > 0)
    assert (both[forward & (schedule.stage != 8)] > 0).all()
    assert not both[forward & (schedule.stage == 8)].any()


# -- the update --------------------------------------------------------------------------------------------------------


def test_gradient_reduction_by_formula() -> None:
    schedule = generate("1f1b", 8, 8)
    count = parameters(GPT3, 8)
    size = 12 * count.layer * 4
    peers = gradient_group(A100, Parallelism(tensor=8, data=4))
    assert peers.nodes == 4  # one ring per port
    assert peers.between is not None
    assert peers.between.bandwidth == pytest.approx(25e9 * A100.efficiency.gradient)
    plain, sharded = (costs(data=4, zero=zero).update_times(schedule)["gradient reduction"][1] for zero in (0, 1))
    assert plain == pytest.approx(ring_time("all_reduce", peers, size))
    # gradients of 4 bytes scattered, weights of 2 gathered
    assert sharded == pytest.approx(ring_time("reduce_scatter", peers, size) + ring_time("all_gather", peers, size / 2))
    assert costs(data=4, zero=3).update_times(schedule)["gradient reduction"][1] == 0
    assert costs(data=1).update_times(schedule)["gradient reduction"][1] == 0


def test_tied_embeddings_are_reduced_between_first_and_last() -> None:
    schedule = generate("1f1b", 8, 8)
    found = costs().update_times(schedule)["gradient reduction"]
    size = 51200 * 12288 / 8 * 4
    ends = Group(2, 1, costs().cluster().link(0, 7), None)
    assert found.tolist() == pytest.approx([ring_time("all_reduce", ends, size), *[0] * 6, found[0]])
    # ZB-V has both on device 0, Llama has no tied embeddings
    assert not costs().update_times(generate("zb-v", 8, 16))["gradient reduction"].any()
    assert not costs(read_model("llama2-70b")).update_times(schedule)["gradient reduction"].any()


def test_replicas_inside_a_pipeline_are_reduced_too() -> None:
    found = costs(read_model("llama2-70b")).update_times(generate("dualpipe", 8, 16))["gradient reduction"]
    count = parameters(read_model("llama2-70b"), 8)
    peers = gradient_group(A100, Parallelism(tensor=8), 2)
    assert found[1] == pytest.approx(ring_time("all_reduce", peers, 10 * count.layer * 4))


def test_optimizer_step_is_bound_by_memory() -> None:
    # Adam with master weights: gradient 4 read, weights 4 + 4, two moments 8 + 8, and 2 written: 30 bytes a parameter
    schedule, count = generate("1f1b", 8, 8), parameters(GPT3, 8)
    seconds = 12 * count.layer * 30 / (2039e9 * A100.efficiency.memory)
    assert costs().update_times(schedule)["optimizer"][1] == pytest.approx(seconds)
    assert costs(zero=1, data=4).update_times(schedule)["optimizer"][1] == pytest.approx(seconds / 4)
    # offloaded: gradients of 4 bytes go to the host, weights of 2 come back, at 24 GB/s
    assert costs(offload_optimizer=True).update_times(schedule)["optimizer"][1] == pytest.approx(12 * count.layer * 6 / 24e9)


def test_step_overhead_counts_once_on_a_device() -> None:
    device = A100.with_efficiency(step_overhead=1.0)
    for name, stages in (("1f1b", 8), ("zb-v", 16), ("interleaved-1f1b", 16)):
        schedule = generate(name, 8, 16)
        found = costs(device=device).update_times(schedule)["overhead"]
        assert [sum(found[stage] for stage in owned) for owned in schedule.device_stages] == [1.0] * 8
        assert len(found) == stages


def test_zero_2_and_3_run_beside_the_ops() -> None:
    parallel = {"data": 4, "tensor": 8}
    none, two, three = (costs(zero=zero, **parallel).stage_times(8) for zero in (0, 2, 3))
    peers = gradient_group(A100, Parallelism(**parallel))
    scatter, gather = (ring_time("all_gather", peers, 12 * parameters(GPT3, 8).layer * size) for size in (4, 2))
    assert scatter > none.weight_grad[1]  # at one sample a microbatch the network is slower than the GPU
    assert two.weight_grad[1] == pytest.approx(scatter)
    assert two.forward[1] == none.forward[1]
    assert three.forward[1] == pytest.approx(max(none.forward[1], gather))
    assert three.backward[1] == pytest.approx(scatter + gather)
    assert two.exposed[Kind.W][1] == pytest.approx(scatter - none.weight_grad[1])


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "per_parameter"),
    [
        ({}, 18),  # Megatron: 2 + 4 + 12
        ({"zero": 1, "data": 4}, 6 + 12 / 4),  # its distributed optimizer
        ({"gradient_bytes": 2}, 16),  # the ZeRO paper
        ({"gradient_bytes": 2, "zero": 1, "data": 4}, 2 + 2 + 12 / 4),
        ({"gradient_bytes": 2, "zero": 2, "data": 4}, 2 + 14 / 4),
        ({"gradient_bytes": 2, "zero": 3, "data": 4}, 16 / 4),
        ({"precision": "fp32"}, 16),  # 4 + 4 + 8
        ({"offload_optimizer": True}, 6),
    ],
)
def test_bytes_of_a_parameter(choice: dict[str, Any], per_parameter: float) -> None:
    found = costs(**choice).stage_bytes(generate("1f1b", 8, 8))
    assert sum(values[1] for values in found.values()) == pytest.approx(12 * parameters(GPT3, 8).layer * per_parameter)


def test_embedding_and_head_are_where_they_are() -> None:
    # M05's shape: first and last stage hold a vocabulary, in ZB-V device 0 holds both
    count = parameters(read_model("llama2-70b"), 8)
    for name, place in (("1f1b", {0: count.embedding, 7: count.head}), ("zb-v", {0: count.embedding + count.head})):
        schedule = generate(name, 8, 16)
        weights = costs(read_model("llama2-70b")).stage_bytes(schedule)["weights"]
        by_device = [sum(weights[stage] for stage in owned) for owned in schedule.device_stages]
        assert by_device == pytest.approx([2 * (10 * count.layer + place.get(device, 0.0)) for device in range(8)])


def test_tied_weights_count_once_on_a_device_that_has_both() -> None:
    count = parameters(GPT3, 8)
    both = costs().stage_bytes(generate("zb-v", 8, 16))["weights"]
    assert both[0] + both[15] == pytest.approx(2 * (12 * count.layer + count.embedding + count.head - count.tied))
    apart = costs().stage_bytes(generate("1f1b", 8, 8))["weights"]
    assert apart[7] == pytest.approx(2 * (12 * count.layer + count.head))
    assert costs().tied_stages(generate("1f1b", 8, 8)) == [(0, 7)]
    alone = costs(pipeline=1).stage_bytes(generate("1f1b", 1, 8))["weights"]
    assert alone.tolist() == pytest.approx([2 * count.total(96)])


def test_the_first_stage_holds_the_activations_of_all_layers() -> None:
    # Korthikanti et al., section 4.2.3: p microbatches of L/p layers each; and sbh/t of embedding dropout for each of the p
    model = costs(sequence_parallel=True)
    run = simulate(generate("1f1b", 8, 64), model, cluster=model.cluster())
    expected = SBH * 96 * (34 / 8 + 5 * 96 * 2048 / (12288 * 8)) + 8 * SBH / 8
    assert run.memory(0).peak_categories["activations"] == pytest.approx(expected)


def test_interleaving_multiplies_the_activations() -> None:
    # by 1 + (p - 1)/(p·v), the same section; without dropout, so that no mask of the embedding is counted
    model = costs(replace(GPT3, dropout=False))
    run = simulate(generate("interleaved-1f1b", 8, 64, chunks=3), model, cluster=model.cluster())
    layer = layer_activation(model.model, model.parallel, 1).whole
    assert run.memory(0).peak_categories["activations"] == pytest.approx(96 * layer * (1 + 7 / (8 * 3)))


def test_logits_are_on_the_last_stage() -> None:
    model = costs(read_model("llama3-8b"), tensor=1, pipeline=4, flash_attention=True)
    run = simulate(generate("1f1b", 4, 16), model, cluster=model.cluster())
    layer = layer_activation(model.model, model.parallel, 1).whole
    head = head_activation(model.model, model.parallel, 1)[0]
    assert head > 4 * 8192 * 128256  # 4.2 GB of fp32 logits
    assert run.memory(3).peak_categories["activations"] == pytest.approx(8 * layer + head)


def test_bytes_under_recomputation() -> None:
    schedule = generate("1f1b", 8, 8)
    layer = layer_activation(GPT3, Parallelism(tensor=8), 1)

    def found(stage: int, **choice: Any) -> list[float]:
        return [float(table[stage, 0]) for table in costs(**choice).activation_bytes(schedule)]

    assert found(1)[0] == pytest.approx(12 * layer.whole)
    assert found(1, recompute="selective")[::2] == pytest.approx([12 * (layer.whole - layer.attention), layer.attention])
    # every layer's input is kept, and one layer at a time is rebuilt beside its input
    assert found(1, recompute="full")[::2] == pytest.approx([12 * 2 * SBH, layer.whole - 2 * SBH])
    assert found(1, recompute="full", recompute_layers=5)[::2] == pytest.approx([3 * 2 * SBH, 5 * layer.whole - 2 * SBH])
    assert found(1, offload_activations=True)[::2] == pytest.approx([2 * SBH, 12 * layer.whole - 2 * SBH])
    # R listed: the stage's input, and all of it from R on
    listed = costs().activation_bytes(generate("1f1b-recompute", 8, 8))
    assert [float(listed.kept[1, 0]), float(listed.rebuilt[1, 0])] == pytest.approx([2 * SBH, 12 * layer.whole - 2 * SBH])


def test_a_split_backward_frees_all_but_what_w_needs() -> None:
    schedule = generate("zb-h1", 8, 16)
    layer = layer_activation(GPT3, Parallelism(tensor=8), 1)
    plain = costs().activation_bytes(schedule)
    assert plain.kept[1, 0] - plain.freed_by_input_grad[1, 0] == pytest.approx(12 * layer.weight_grad)
    # recomputed layers must all stay for W
    full = costs(recompute="full").activation_bytes(schedule)
    assert full.kept[1, 0] + full.rebuilt[1, 0] - full.freed_by_input_grad[1, 0] == pytest.approx(12 * layer.weight_grad)


def test_offloaded_activations_wait_for_the_host() -> None:
    layer = layer_activation(GPT3, Parallelism(tensor=8), 1)
    assert costs(offload_activations=True).stage_times(8).forward[1] == pytest.approx(12 * layer.whole / 24e9)


# -- what does not go --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "error"),
    [
        ({"tensor": 7}, "tensor = 7 does not divide heads = 96"),
        ({"tensor": 0}, "tensor must be at least 1"),
        ({"zero": 4}, "zero must be one of 0, 1, 2, 3"),
        ({"recompute": "some"}, "recompute must be one of"),
        ({"recompute_layers": 2}, "belongs to recompute='full'"),
        ({"offload_activations": True, "recompute": "full"}, "choose one of them"),
        ({"embedding_weight": -1}, "embedding_weight must be"),
        ({"sequence_parallel": True, "tensor": 96}, "does not divide the sequence of 2048"),
    ],
)
def test_wrong_choices(choice: dict[str, Any], error: str) -> None:
    with pytest.raises(ScheduleError, match=error):
        costs(**choice)


def test_schedules_that_are_not_its_own() -> None:
    with pytest.raises(ScheduleError, match="the schedule has 4 devices, and pipeline = 8"):
        costs().durations(generate("1f1b", 4, 8))
    with pytest.raises(ScheduleError, match="chain of stages"):
        costs(pipeline=4).durations(generate("graphpipe", 4, 8))
