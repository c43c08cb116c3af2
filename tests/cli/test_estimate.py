"""``pipesim estimate``, as somebody types it."""

from __future__ import annotations

import json

import pytest

GPT3 = ("estimate", "gpt3-175b", "--gpus", 64, "--tensor", 8, "--pipeline", 8)
SELECTIVE = ("--recompute", "selective", "--sequence-parallel")


def test_which_schedule_fits_and_is_fastest(pipesim):
    run = pipesim(*GPT3, "--schedule", "1f1b,gpipe,v-min,1f1b-recompute")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == "GPT-3 175B, 174.6 billion parameters, on 64 x A100 SXM 80 GB"
    assert "batch 64 of 2048 tokens, 64 microbatches of 1" in lines[1]
    table = [line.split()[:2] for line in lines[4:8]]
    # 1f1b and gpipe take equally long, and 1f1b holds less
    assert [name for name, _ in table] == ["v-min", "1f1b-recompute", "1f1b", "gpipe"]
    assert [fits for _, fits in table] == ["barely", "yes", "no", "no"]
    assert "v-min is the fastest that fits." in lines
    assert "device 0, op 0F4 at" in run.stdout
    assert "What saves memory: --flash-attention, --recompute selective, --recompute full, --sequence-parallel." in run.stdout
    assert "docs/validation.md" in run.stdout
    # every figure of the table is defined
    for name in lines[3].split()[2:9]:
        assert f"\n  {name} " in run.stdout


@pytest.mark.slow
def test_all_schedules(pipesim):
    run = pipesim(*GPT3, "--schedule", "all", "--json", *SELECTIVE)
    assert run.returncode == 0, run.stderr
    names = [one["schedule"] for one in json.loads(run.stdout)["schedules"]]
    assert {"1f1b", "zb-v", "interleaved-1f1b", "dualpipe", "chimera"} <= set(names)
    assert not {"pipedream", "gnnpipe"} & set(names)
    assert len(names) == len(set(names))


def test_json(pipesim):
    run = pipesim(*GPT3, *SELECTIVE, "--schedule", "interleaved-1f1b,dualpipe-v", "--chunks", 3, "--batch", 8, "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (found["gpus"], found["tensor"], found["pipeline"], found["data"], found["microbatches"]) == (64, 8, 8, 1, 8)
    assert found["capacity"] == 80e9
    (one,) = found["schedules"]
    assert (one["stages"], one["layers"]) == (24, [4] * 24)
    assert sum(one["breakdown"].values()) == pytest.approx(one["iteration_time"])
    assert len(one["peak_memory"]) == 8
    assert 0 < one["mfu"] < one["hfu"] < 1
    assert list(found["refused"]) == ["dualpipe-v"]


def test_fit_is_a_status(pipesim):
    assert pipesim(*GPT3, "--fit", *SELECTIVE).returncode == 0
    run = pipesim(*GPT3, "--fit")
    assert run.returncode == 1
    assert "1f1b does not fit" in run.stderr
    assert pipesim(*GPT3, "--fit", "--capacity", "200 GB").returncode == 0


def test_options_reach_the_model(pipesim):
    base = (*GPT3, "--json", "--schedule", "1f1b")

    def one(*options: object) -> dict[str, object]:
        run = pipesim(*base, *options)
        assert run.returncode == 0, run.stderr
        return {**(found := json.loads(run.stdout)), **found["schedules"][0]}

    plain = one()
    assert one("--sequence", 1024)["tokens_per_second"] != plain["tokens_per_second"]
    full = one("--recompute", "full", "--recompute-layers", 2)
    assert full["hfu"] > full["mfu"]
    assert plain["hfu"] == plain["mfu"]
    assert max(one("--flash-attention")["peak_memory"]) < max(plain["peak_memory"])
    assert max(one("--offload-optimizer")["peak_memory"]) < max(plain["peak_memory"])
    assert one("--device", "h100")["iteration_time"] < plain["iteration_time"]
    assert one("--cluster", "ethernet-25g")["exposed"] > plain["exposed"]
    assert one("--micro-batch", 2, "--batch", 64)["microbatches"] == 32
    assert one("--layout", "11,12,12,12,12,12,12,13")["layers"] == [11, *[12] * 6, 13]
    assert one("--gpus", 256, "--distributed-optimizer")["data"] == 4
    weighed = one("--embedding-weight", 1, "--head-weight", 1)["layers"]
    # 98 layers' worth on 8 stages is 13 on the most loaded; the ends hold a layer less than that
    assert sum(weighed) == 96
    assert max(weighed[0] + 1, *weighed[1:7], weighed[7] + 1) == 13


def test_a_calibration_file(pipesim, tmp_path):
    (tmp_path / "mine.toml").write_text("[efficiency]\ngemm = 0.37\ngemm_size = 0\n")
    plain, half = (json.loads(pipesim(*GPT3, "--json", *more).stdout)["schedules"][0] for more in ((), ("--calibration", "mine.toml")))
    assert half["breakdown"]["computing"] > 1.6 * plain["breakdown"]["computing"]


def test_megatrons_layout_string(pipesim):
    # P08, on a model of 80 layers
    options = (
        "estimate",
        "llama2-70b",
        "--tensor",
        8,
        "--pipeline",
        8,
        "--schedule",
        "interleaved-1f1b",
        "--layout",
        "Et*2|(t*2|)*34,t*3|(t*2|)*3,tL",
    )
    found = json.loads(pipesim(*options, "--chunks", 5, "--json").stdout)["schedules"][0]
    assert found["layers"] == [2] * 35 + [3, 2, 2, 2, 1]
    run = pipesim(*options, "--chunks", 4)
    assert run.returncode == 1
    assert "has 40 stages and the schedule has 32 (8 devices x 4 chunks)" in run.stderr


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        ((), 2, "Missing argument 'MODEL'"),
        (("--chunks", 3, "gpt3-175b"), 2, "the first word is MODEL"),
        (("gpt3-175b", "gpt-22b"), 2, "unexpected extra argument 'gpt-22b'"),
        (("gpt3-175b", "--chunk", 3), 2, "No such option: --chunk"),
        (("gpt3-175b", "--distributed-optimizer", "--zero", 2), 2, "--zero says 2"),
        (("gpt3-17b",), 1, "did you mean 'gpt3-175b'"),
        (("gpt3-175b", "--device", "a100-80"), 1, "did you mean 'a100-80g'"),
        (("gpt3-175b", "--gpus", 60, "-t", 8, "-p", 8), 1, "no multiple of tensor x pipeline = 8 x 8 = 64"),
        (("gpt3-175b", "-t", 7), 1, "tensor = 7 does not divide heads = 96"),
        (("gpt3-175b", "--schedule", "1f2b"), 1, "did you mean '1f1b'"),
        (("gpt3-175b", "-p", 100), 1, "96 layers cannot be spread over 100 stages"),
        (("gpt3-175b", "-p", 8, "--layout", "1,2"), 1, "the layout has 2 stages"),
        (("gpt3-175b", "--capacity", 80), 1, "--capacity = 80 has no unit"),
        (("gpt3-175b", "--gpus", 24, "-t", 8, "--batch", 100), 1, "100 mod 3 = 1"),
    ],
)
def test_what_is_wrong_is_said(pipesim, words, status, text):
    run = pipesim("estimate", *words)
    assert run.returncode == status
    assert text in run.stderr
    assert "Traceback" not in run.stderr
