"""Models and devices: presets against published figures, and files that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipesim import ScheduleError
from pipesim.models import (
    Efficiency,
    ModelSpec,
    device_presets,
    model_presets,
    parameters,
    read_device,
    read_efficiency,
    read_model,
    write_efficiency,
)

SMALL = {"name": "x", "layers": 2, "hidden": 8, "heads": 2, "vocabulary": 16, "sequence": 4}


@pytest.mark.parametrize(
    ("name", "billion"),
    [
        # PTD-P (Narayanan et al. 2021), Table 1
        ("gpt-1.7b", 1.7),
        ("gpt-3.6b", 3.6),
        ("gpt-7.5b", 7.5),
        ("gpt-18.4b", 18.4),
        ("gpt-39.1b", 39.1),
        ("gpt-76.1b", 76.1),
        ("gpt-145.6b", 145.6),
        ("gpt-310b", 310.1),
        ("gpt-530b", 529.6),
        ("gpt-1t", 1008.0),
        # openai/gpt-2: 1,557,611,200
        ("gpt2-1.5b", 1.558),
        # config.json and model cards of meta-llama: 6,738,415,616, 13,015,864,320, 68,976,648,192, 8,030,261,248, 70,553,706,496
        ("llama2-7b", 6.738),
        ("llama2-13b", 13.016),
        ("llama2-70b", 68.977),
        ("llama3-8b", 8.030),
        ("llama3-70b", 70.554),
        # Jiang et al. 2024: 46.7B
        ("mixtral-8x7b", 46.7),
    ],
)
def test_parameters_of_the_presets_are_the_published_ones(name: str, billion: float) -> None:
    model = read_model(name)
    digits = len(str(billion).partition(".")[2])
    assert round(parameters(model).total(model.layers) / 1e9, digits) == billion


def test_llama_3_405b_and_gpt_3() -> None:
    # "405B" and "175B": 12Lh²(1 + 13/12h + (V + s)/12Lh) = 174.6e9 for GPT-3 (Korthikanti et al. 2022, equation 8)
    assert 404e9 < parameters(read_model("llama3-405b")).total(126) < 407e9
    layers, h, vocabulary, s = 96, 12288, 51200, 2048
    formula = 12 * layers * h**2 * (1 + 13 / (12 * h) + (vocabulary + s) / (12 * layers * h))
    assert parameters(read_model("gpt3-175b")).total(96) == pytest.approx(formula + 2 * h, rel=1e-12)  # the last norm is not in the formula


def test_bert_large_has_334_million_without_its_heads() -> None:
    # 24(12·1024² + 13·1024) + 30522·1024 + 512·1024 + 2·1024
    assert parameters(read_model("bert-large")).total(24) == 24 * (12 * 1024**2 + 13 * 1024) + (30522 + 512 + 2) * 1024


def test_every_preset_has_a_source() -> None:
    assert len(model_presets()) >= 20
    for name in model_presets():
        assert read_model(name).source
    for name in device_presets():
        assert read_device(name).source


def test_peaks_are_dense_ones() -> None:
    # NVIDIA's data sheets; 624, 1979 and 4500 are figures with sparsity
    peaks = {name: read_device(name).mixed_flops / 1e12 for name in device_presets()}
    assert peaks == {"v100": 125, "a100-40g": 312, "a100-80g": 312, "h100": 989.4, "h200": 989.4, "b200": 2250}
    assert [read_device(name).memory / 1e9 for name in ("v100", "a100-40g", "a100-80g", "h100", "h200", "b200")] == [32, 40, 80, 80, 141, 180]
    assert [read_device(name).memory_bandwidth / 1e9 for name in ("v100", "a100-40g", "a100-80g", "h100", "h200", "b200")] == [
        900,
        1555,
        2039,
        3350,
        4800,
        8000,
    ]
    assert {name: read_device(name).cluster.inside.bandwidth for name in ("a100-80g", "b200")} == {"a100-80g": 240e9, "b200": 722e9}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layers": 0}, "layers must be at least 1"),
        ({"hidden": 9}, "hidden = 9 is no multiple of heads = 2"),
        ({"kv_heads": 3}, "heads = 2 is no multiple of kv_heads = 3"),
        ({"experts": 2, "active_experts": 3}, "3 active experts of 2"),
        ({"norm": "batchnorm"}, "norm must be"),
        ({"layers": True}, "whole number"),
    ],
)
def test_sizes_that_do_not_fit_together(change: dict[str, object], text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        ModelSpec(**{**SMALL, **change})  # type: ignore[arg-type]


def test_a_model_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("layers = 2\nhidden = 8\nheads = 4\nkv_heads = 2\nvocabulary = 16\nsequence = 4\ngated = true\nffn = 12\n")
    model = read_model(path)
    assert (model.name, model.kv_width, model.ffn_width, model.gated) == ("mine", 4, 12, True)
    path.write_text("layers = 2\nhiden = 8\nheads = 4\nvocabulary = 16\nsequence = 4\n")
    with pytest.raises(ScheduleError, match="hiden"):
        read_model(path)
    with pytest.raises(ScheduleError, match="did you mean 'gpt3-175b'"):
        read_model("gpt3-175")


def test_a_device_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = (
        'mixed_tflops = 100\nfp32_tflops = 50\nmemory = "10 GB"\nmemory_bandwidth = "1000 GB/s"\nhost_bandwidth = "10 GB/s"\ncluster = "dgx-a100"\n'
    )
    path.write_text(text + "[efficiency]\ngemm = 0.5\n")
    device = read_device(path)
    assert (device.mixed_flops, device.memory, device.efficiency.gemm, device.efficiency.memory) == (1e14, 1e10, 0.5, Efficiency().memory)
    path.write_text(text.replace('"10 GB"', "10"))
    with pytest.raises(ScheduleError, match="memory = 10 has no unit"):
        read_device(path)
    path.write_text(text + "[efficiency]\ngem = 0.5\n")
    with pytest.raises(ScheduleError, match="gem"):
        read_device(path)


def test_an_efficiency_is_saved_and_reloaded_number_for_number(tmp_path: Path) -> None:
    efficiency = Efficiency(gemm=1 / 3, layer_overhead=1e-7, step_overhead=0.1 + 0.2)
    write_efficiency(efficiency, tmp_path / "fit.toml", source='fitted to "these" rows\nand those')
    assert read_efficiency(tmp_path / "fit.toml") == efficiency
    with pytest.raises(ScheduleError, match="gemm must be a finite number above 0"):
        Efficiency(gemm=0)
    with pytest.raises(ScheduleError, match="an efficiency has no 'gem'"):
        read_device("h100").with_efficiency(gem=0.5)
