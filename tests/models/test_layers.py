"""FLOPs, bytes and activations of a layer, by hand and against the papers' formulas."""

from __future__ import annotations

import pytest

from pipesim import ScheduleError
from pipesim.models import ModelSpec, Parallelism, forward_flops, layer_activation, layer_work, parameters, read_model
from pipesim.models.layers import Gemm, embedding_activation, head_activation, head_work

TINY = ModelSpec(name="tiny", layers=1, hidden=8, heads=2, vocabulary=16, sequence=4)
# Korthikanti et al. 2022, Table 3
PAPER = [("gpt-22b", 4), ("gpt3-175b", 1), ("gpt-530b", 1), ("gpt-1t", 1)]


def test_one_layer_by_hand() -> None:
    # b = 1, s = 4, h = 8, a = 2 heads of 4; n = 4 tokens, nh = 32, as² = 32
    work = layer_work(TINY, Parallelism(), 1)
    # QKV 2·4·24·8, projection 2·4·8·8, up 2·4·32·8, down 2·4·8·32
    assert [gemm.flops for gemm in work.linear] == [1536, 512, 2048, 2048]
    # (n·k + k·n' + n·n') elements of 2 bytes
    assert [gemm.bytes(2) for gemm in work.linear] == [2 * (32 + 192 + 96), 2 * (32 + 64 + 32), 2 * (32 + 256 + 128), 2 * (128 + 256 + 32)]
    # scores: 2 heads · 4 · 4 · 4, twice (multiply, add), and the context the same
    assert work.attention == 2 * 2 * (2 * 4 * 4 * 4)
    assert work.attention_backward == 2 * work.attention
    # norms 2·(2 + 2), dropouts with residual 2·(2 + 2 + 1 + 2), context copied 2 + 2, GeLU 4·(2 + 2): 42 bytes per element of nh
    assert work.forward_bytes == 42 * 32
    # norms 2·(2 + 2 + 2), added to the residual 2·(2 + 2 + 2), dropouts 2·(2 + 1 + 2), context 2 + 2, GeLU 4·(2 + 2 + 2): 62
    assert work.backward_bytes == 62 * 32
    # softmax 2 + 2, dropout 2 + 2 + 1: 9 bytes per score; backward dropout 2 + 1 + 2, softmax 2 + 2 + 2: 11
    assert (work.attention_bytes, work.attention_bytes_backward) == (9 * 32, 11 * 32)
    # the products: written by QK' 2, read by AV 2; backward P read 2, dP written 2, dS read twice 4
    assert (work.score_bytes, work.score_bytes_backward) == (4 * 32, 8 * 32)
    assert (work.collectives, work.collectives_backward) == (0, 0)


def test_tensor_parallelism_splits_by_hand() -> None:
    # t = 2: QKV has 12 columns, projection 4 inputs, feed-forward 16 wide; 1 head; the residual stream is whole
    work = layer_work(TINY, Parallelism(tensor=2), 1)
    assert [(gemm.m, gemm.n, gemm.k) for gemm in work.linear] == [(4, 12, 8), (4, 8, 4), (4, 16, 8), (4, 8, 16)]
    assert work.attention == 256
    # 22 bytes of norms and dropouts stay, 20 of context and GeLU are halved
    assert work.forward_bytes == 32 * (22 + 20 / 2)
    assert layer_work(TINY, Parallelism(tensor=2, sequence_parallel=True), 1).forward_bytes == 32 * 42 / 2
    assert (work.collectives, work.collectives_backward) == (2, 2)


def test_output_layer_by_hand() -> None:
    work = head_work(TINY, Parallelism(), 1)
    assert work.linear == (Gemm(4, 16, 8),)
    assert work.linear[0].flops == 2 * 4 * 16 * 8  # 2bshV


@pytest.mark.parametrize(("name", "b"), PAPER)
@pytest.mark.parametrize("t", [1, 2, 8])
def test_activations_are_korthikantis_table_2(name: str, b: int, t: int) -> None:
    model = read_model(name)
    s, h, a = model.sequence, model.hidden, model.heads
    sbh, scores = s * b * h, 5 * a * s / h
    plain = layer_activation(model, Parallelism(tensor=t), b)
    sequence = layer_activation(model, Parallelism(tensor=t, sequence_parallel=True), b)
    assert plain.whole == pytest.approx(sbh * (10 + 24 / t + scores / t), rel=1e-15)
    assert sequence.whole == pytest.approx(sbh * (34 / t + scores / t), rel=1e-15)
    assert plain.whole - plain.attention == pytest.approx(sbh * (10 + 24 / t), rel=1e-15)  # selective
    assert sequence.whole - sequence.attention == pytest.approx(sbh * 34 / t, rel=1e-15)
    assert plain.input == 2 * sbh  # full


def test_w_needs_the_16_bit_gradient_of_the_logits() -> None:
    # b = 1, s = 4, h = 8, V = 16: the product's input sbh·2 and the gradient of its output sbV·2
    assert head_activation(TINY, Parallelism(), 1)[1] == 4 * 8 * 2 + 4 * TINY.vocabulary * 2


def test_activations_of_the_ends_are_korthikantis_section_4_3() -> None:
    model, t, b = read_model("gpt3-175b"), 8, 1
    s, h, vocabulary = model.sequence, model.hidden, model.vocabulary
    parallel = Parallelism(tensor=t, sequence_parallel=True)
    assert embedding_activation(model, parallel, b) == s * b * h / t
    assert head_activation(model, parallel, b)[0] == 4 * s * b * h / t * (1 + vocabulary / h)


@pytest.mark.parametrize(("name", "b"), PAPER)
def test_what_w_needs_is_the_zero_bubble_papers_table_1(name: str, b: int) -> None:
    model = read_model(name)
    assert layer_activation(model, Parallelism(), b).weight_grad == 32 * model.sequence * b * model.hidden


@pytest.mark.parametrize(("name", "b"), PAPER)
def test_f_i_and_w_are_the_zero_bubble_papers_table_1(name: str, b: int) -> None:
    # F = sbh(24h + 4s), I = sbh(24h + 8s), W = sbh·24h
    model = read_model(name)
    s, h = model.sequence, model.hidden
    work = layer_work(model, Parallelism(), b)
    linear = sum(gemm.flops for gemm in work.linear)
    assert linear + work.attention == s * b * h * (24 * h + 4 * s)
    assert linear + work.attention_backward == s * b * h * (24 * h + 8 * s)
    assert linear == s * b * h * 24 * h


@pytest.mark.parametrize("name", [name for name, _ in PAPER])
def test_model_flops_are_korthikantis_equation_7(name: str) -> None:
    model = read_model(name)
    layers, s, h, vocabulary = model.layers, model.sequence, model.hidden, model.vocabulary
    formula = 72 * layers * s * h**2 * (1 + s / (6 * h) + vocabulary / (12 * h * layers))
    assert 3 * sum(forward_flops(model)) == pytest.approx(formula, rel=1e-14)


def test_grouped_queries_and_a_gate_by_hand() -> None:
    # Llama 3 8B: h 4096, 32 query and 8 key heads of 128, SwiGLU of 14336, no biases, RMS norms
    model, n, h = read_model("llama3-8b"), 8192, 4096
    work = layer_work(model, Parallelism(), 1)
    assert [gemm.flops for gemm in work.linear] == [2 * n * h * (4096 + 2 * 1024), 2 * n * h * 4096, 2 * n * h * 2 * 14336, 2 * n * h * 14336]
    assert parameters(model).layer == h * 6144 + h * h + 3 * h * 14336 + 2 * h
    assert parameters(model).tied == 0
    # kept: norm inputs 2 + 2, QKV and up inputs 2 + 2, Q, context 2 + 2, K and V a quarter of 2 each, gate, up and their product 2 each
    flash = layer_activation(model, Parallelism(flash_attention=True), 1)
    assert flash.whole == n * (h * (4 * 2 + 2 * 2 + 2 * 2 / 4) + 3 * 2 * 14336)
    # without dropout a score is kept once, in 2 bytes
    assert layer_activation(model, Parallelism(), 1).attention == 2 * 32 * n**2


def test_tensor_parallelism_wider_than_the_key_heads_copies_them() -> None:
    # 8 key heads on 16 GPUs: each has one whole head
    model = read_model("llama3-70b")
    assert layer_work(model, Parallelism(tensor=16), 1).linear[0].n == 8192 / 16 + 2 * 128
    with pytest.raises(ScheduleError, match="neither divides kv_heads = 12"):
        Parallelism(tensor=8).check(ModelSpec(name="x", layers=1, hidden=96, heads=24, kv_heads=12, vocabulary=8, sequence=8))


def test_a_mixture_of_experts_holds_all_and_computes_two() -> None:
    # Mixtral: 8 experts of 3·4096·14336, 2 active: 46.7B parameters, 12.9B active (Jiang et al. 2024)
    model = read_model("mixtral-8x7b")
    attention, expert, router = 4096 * 4096 * 2 + 2 * 4096 * 1024, 3 * 4096 * 14336, 8 * 4096
    assert parameters(model).layer == attention + 8 * expert + router + 2 * 4096
    linear, _, head = forward_flops(model)
    assert linear == 2 * 4096 * 32 * (attention + 2 * expert + router)
    assert (linear + head) / (2 * 4096) == pytest.approx(12.9e9 - 32000 * 4096, rel=0.01)  # the input embedding multiplies nothing


def test_flash_attention_keeps_no_scores_and_computes_them_again() -> None:
    model = read_model("gpt3-175b")
    flash = Parallelism(tensor=8, flash_attention=True)
    assert layer_activation(model, flash, 1).whole == pytest.approx(2048 * 12288 * (10 + 24 / 8))
    work = layer_work(model, flash, 1)
    assert work.attention_bytes == 0
    assert work.attention_backward == 2.5 * work.attention  # five products instead of four


def test_full_precision_doubles_elements_but_not_masks() -> None:
    # 34 = 2 masks + 16 elements of 2; scores 5 = 1 + 2·2
    s, h, a = 4, 8, 2
    assert layer_activation(TINY, Parallelism(precision="fp32"), 1).whole == s * h * (2 + 16 * 4) + a * s * s * (1 + 2 * 4)
