"""``pipesim estimate``, as somebody types it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pipesim import available, load

GPT3 = ("estimate", "gpt3-175b", "--gpus", 64, "--tensor", 8, "--pipeline", 8)
SELECTIVE = ("--recompute", "selective", "--sequence-parallel")


def test_which_schedule_fits_and_is_fastest(pipesim):
    run = pipesim(*GPT3, "--schedule", "1f1b,gpipe,v-min,1f1b-recompute")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == "GPT-3 175B, 174.6 billion parameters, on 64 x A100 SXM 80 GB"
    assert "batch 64 of 2048 tokens, 64 microbatches of 1" in lines[1]
    table = [re.split(r" {2,}", line)[:2] for line in lines[4:8]]
    # 1f1b and gpipe take equally long, and 1f1b holds less
    assert [name for name, _ in table] == ["v-min (v=2)", "1f1b-recompute", "1f1b", "gpipe"]
    assert [fits for _, fits in table] == ["barely", "yes", "no", "no"]
    (verdict,) = (line for line in lines if line.startswith("v-min is the fastest that fits, barely: "))
    # what is spare of 80 GB, from the peak in the table
    peak = float(re.split(r" {2,}", lines[4])[8].removesuffix(" GB"))
    assert float(verdict.split()[7]) == pytest.approx(100 * (80 - peak) / 80, abs=0.06)
    assert "device 0, op 0F4 at" in run.stdout
    at = next(number for number, line in enumerate(lines) if "does not fit. What saves memory, and the fastest that fits with it (of 1f1b, " in line)
    ways = [re.split(r" {2,}", line.strip()) for line in lines[at + 1 : at + 5]]
    assert [way for way, *_ in ways] == [
        "--flash-attention",
        "--recompute selective",
        "--recompute full",
        "--recompute selective --sequence-parallel",
    ]
    # what a line says is what the command then says
    way, name, seconds, memory = ways[-1]
    then = pipesim(*GPT3, "--schedule", "1f1b,v-min,1f1b-recompute", *way.split()).stdout.splitlines()[4]
    cells = re.split(r" {2,}", then)
    assert [cells[0], cells[1], cells[2], cells[8]] == [name, "yes", seconds, memory]
    assert "docs/validation.md" in run.stdout
    # every figure of the table is defined
    for name in lines[3].split()[2:9]:
        assert f"\n  {name} " in run.stdout


@pytest.mark.slow
def test_all_schedules(pipesim):
    run = pipesim(*GPT3, "--schedule", "all", "--json", *SELECTIVE)
    assert run.returncode == 0, run.stderr
    names = [one["schedule"] for one in json.loads(run.stdout)["schedules"]]
    assert {"1f1b", "zb-v", "zb-1p", "interleaved-1f1b", "dualpipe", "chimera"} <= set(names)
    refused = json.loads(run.stdout)["refused"]
    assert {"pipedream", "gnnpipe", "zb-auto", "v-auto"} <= set(refused)
    assert "stale weights" in refused["pipedream"]
    # every schedule is in one of the two, and none in both
    assert not set(names) & set(refused)
    assert len(names) == len(set(names))
    assert len(names) + len(refused) == len(set(available().values()))


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


def test_how_much_to_believe_it(pipesim, tmp_path):
    def last(*options: object) -> str:
        run = pipesim(*GPT3, *SELECTIVE, *options)
        assert run.returncode == 0, run.stderr
        return run.stdout.partition("How much to believe it: ")[2]

    plain = last()
    # docs/models.md, "How much to believe it"
    belief = (Path(__file__).parents[2] / "docs" / "models.md").read_text().partition("## How much to believe it")[2].partition("## Models")[0]
    for figure in ("3.6 %", "6.6 %", "9 %"):
        assert figure in plain
        assert figure in belief
    assert "--op-overhead '0.7 ms'" in plain
    assert "no measured run" not in plain
    assert "Of H100 SXM 80 GB there are only peaks" in last("--device", "h100")
    (tmp_path / "mine.toml").write_text('source = "pipesim fit runs.csv: 65 runs; mean 5.6 %"\n[efficiency]\ngemm = 0.7\nop_overhead = 0.0007\n')
    fitted = last("--calibration", "mine.toml")
    assert fitted.startswith(
        "the constants are those of mine.toml (gemm, op_overhead; the others are the defaults): pipesim fit runs.csv: 65 runs; mean 5.6 %."
    )
    assert "A100" not in fitted
    assert "Every op costs 700 µs" in fitted
    (tmp_path / "bare.toml").write_text("[efficiency]\ngemm = 0.7\n")
    assert "has no line `source`" in last("--calibration", "bare.toml")


def test_overhead_per_op(pipesim, tmp_path):
    (tmp_path / "mine.toml").write_text("[efficiency]\nop_overhead = 0.0007\n")
    plain, option, file = (
        json.loads(pipesim(*GPT3, *SELECTIVE, "--json", *more).stdout)["schedules"][0]["breakdown"]["computing"]
        for more in ((), ("--op-overhead", "0.7 ms"), ("--calibration", "mine.toml"))
    )
    # 64 F and 64 B on each device
    assert option - plain == pytest.approx(128 * 0.0007)
    assert file == option


def test_save(pipesim):
    run = pipesim(*GPT3, *SELECTIVE, "--schedule", "zb-v", "--save", "zbv.json.gz", "--json")
    assert run.returncode == 0, run.stderr
    assert "saved zbv.json.gz" in run.stderr
    (one,) = json.loads(run.stdout)["schedules"]
    saved = load("zbv.json.gz")
    assert saved.makespan == one["iteration_time"]
    assert list(saved.peak_memory) == one["peak_memory"]


def test_help_shows_the_example_on_a_line_of_its_own(pipesim):
    lines = pipesim("estimate", "--help").stdout.splitlines()
    assert "  pipesim estimate gpt3-175b --gpus 64 --tensor 8 --pipeline 8 --schedule all" in lines


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
        (("gpt3-175b", "--op-overhead", 0.0007), 1, "--op-overhead = 0.0007 has no unit"),
        (("gpt3-175b", "--schedule", "1f1b,gpipe", "--save", "x.json"), 2, "--save is for the run of one schedule"),
        (("gpt3-175b", "--save", "x.csv"), 2, "ends in .json or .json.gz"),
        (("gpt3-175b", "--capacity", 80), 1, "--capacity = 80 has no unit"),
        (("gpt3-175b", "--gpus", 24, "-t", 8, "--batch", 100), 1, "100 mod 3 = 1"),
    ],
)
def test_what_is_wrong_is_said(pipesim, words, status, text):
    run = pipesim("estimate", *words)
    assert run.returncode == status
    assert text in run.stderr
    assert "Traceback" not in run.stderr
