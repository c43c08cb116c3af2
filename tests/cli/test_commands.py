"""Every command, as somebody types it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import click
import pytest

from pipesim.cli import cli

SMALL = ("--devices", 4, "--microbatches", 8, "--forward", 1, "--backward", 2)
BROKEN = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"  # device 0 wants a gradient before it sends what device 1 wants first


def test_help_names_every_command(shell):
    run = shell("--help")
    assert run.returncode == 0
    for name in ("list", "show", "simulate", "compare", "plot", "export", "check"):
        assert f"\n  {name} " in run.stdout


@pytest.mark.parametrize("command", cli.list_commands(click.Context(cli)))
def test_every_command_has_help(pipesim, command):
    run = pipesim(command, "--help")
    assert run.returncode == 0
    assert run.stdout.startswith("Usage: pipesim")


def test_list(pipesim):
    run = pipesim("list", "--json")
    schedules = {entry["name"]: entry for entry in json.loads(run.stdout)["schedules"]}
    assert "dapple" in schedules["1f1b"]["aliases"]
    assert "policy" in schedules["1f1b"]["options"]
    assert all(entry["about"] for entry in schedules.values())
    assert "1f1b" in pipesim("list").stdout


def test_the_installed_command_fails_cleanly(shell):
    run = shell("simulate", "1f2b", *SMALL)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("Error: there is no schedule '1f2b'")


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    command = f"'{sys.executable}' -m pipesim show 1f1b -p 8 -m 512 --width 100000 | head -n 1"
    run = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout == "name: 1f1b\n"
    assert run.stderr == ""


def test_simulate_prints_the_figures(pipesim):
    # (m + p - 1)(F + B) = 11 * 3, bubble 3 of 11, min(m, p - s) activations
    figures = json.loads(pipesim("simulate", "1f1b", *SMALL, "--json").stdout)
    assert figures["makespan"] == 33
    assert figures["bubble_fraction"] == pytest.approx(3 / 11)
    assert figures["bubble_overhead"] == pytest.approx(3 / 8)
    assert figures["peak_activations"] == [4, 3, 2, 1]


def test_simulate_for_people_says_which_definition_a_number_is(pipesim):
    text = pipesim("simulate", "1f1b", *SMALL).stdout
    for name in ("makespan", "bubble_fraction", "bubble_overhead", "span_bubble_rate", "peak_activations"):
        assert name in text
    assert "last end - first start" in text


def test_names_are_case_insensitive(pipesim):
    assert json.loads(pipesim("simulate", "GPipe", *SMALL, "--json").stdout)["makespan"] == 33


def test_options_of_the_schedule(pipesim):
    # policy B starts with 2(p - s) - 1 forwards and holds as many
    figures = json.loads(pipesim("simulate", "1f1b", *SMALL, "--policy", "b", "--json").stdout)
    assert figures["peak_activations"] == [7, 5, 3, 1]
    same = json.loads(pipesim("simulate", "--policy=B", "1f1b", *SMALL, "--json").stdout)
    assert same["makespan"] == figures["makespan"]


def test_forward_only(pipesim):
    # m + p - 1 forwards one after the other
    assert json.loads(pipesim("simulate", "gpipe", "--forward-only", *SMALL, "--json").stdout)["makespan"] == 11


def test_replicas_option_takes_a_list(pipesim):
    figures = json.loads(pipesim("simulate", "pipedream", "--devices", 3, "--microbatches", 4, "--replicas", "2,1", "--json").stdout)
    assert figures["replicas"] == {"0": [0, 1]}


def test_two_steps_and_no_barrier(pipesim):
    assert json.loads(pipesim("simulate", "1f1b", *SMALL, "--steps", 2, "--json").stdout)["makespan"] == 66
    assert json.loads(pipesim("simulate", "1f1b", *SMALL, "--steps", 2, "--no-barrier", "--json").stdout)["barrier"] is False


def test_asynchronous_runs_print_versions_and_delays(pipesim):
    figures = json.loads(pipesim("simulate", "pipedream", "--devices", 4, "--microbatches", 16, "--json").stdout)
    assert figures["weight_versions"] == [4, 3, 2, 1]
    assert figures["update_delay"] == [3, 2, 1, 0]


def test_physical_units(pipesim):
    # F 10 ms, B 20 ms, (8 + 3) * 30 ms, and no message bytes, so a hop costs the latency of 1 ms: GPipe exposes 2(p - 1)
    run = pipesim("simulate", "gpipe", "-p", 4, "-m", 8, "--unit", "ms", "--forward", 10, "--backward", 20, "--latency", "1 ms", "--json")
    assert json.loads(run.stdout)["makespan"] == pytest.approx(0.330 + 0.006)


def test_seconds_have_no_defaults(pipesim):
    run = pipesim("simulate", "gpipe", "-p", 4, "-m", 8, "--unit", "ms", "--forward", 10)
    assert run.returncode == 1
    assert "backward" in run.stderr


def test_bandwidth_has_a_unit(pipesim):
    run = pipesim(
        "simulate",
        "gpipe",
        "-p",
        2,
        "-m",
        1,
        "--unit",
        "s",
        "--forward",
        1,
        "--backward",
        1,
        "--message",
        "100 MB",
        "--bandwidth",
        "25 Gbit/s",
        "--json",
    )
    assert json.loads(run.stdout)["makespan"] == pytest.approx(4 + 2 * 0.032)  # 100 MB over 25 Gbit/s is 32 ms
    refused = pipesim("simulate", "gpipe", "-p", 2, "-m", 1, "--unit", "s", "--forward", 1, "--backward", 1, "--bandwidth", "25")
    assert refused.returncode == 1
    assert "unit" in refused.stderr


def test_capacity_is_reported_and_enforced_when_asked(pipesim):
    # case M11: the fourth forward of device 0 starts at t = 3, and nothing is released before t = 12
    reported = pipesim("simulate", "1f1b", *SMALL, "--capacity", 3.5, "--json")
    assert reported.returncode == 0
    first = json.loads(reported.stdout)["does_not_fit"]
    assert [(entry["device"], entry["op"], entry["time"]) for entry in first] == [(0, "0F3", 3.0)]
    enforced = pipesim("simulate", "1f1b", *SMALL, "--capacity", 3.5, "--fit", "--json")
    assert enforced.returncode == 1
    assert "0F3" in enforced.stderr
    assert pipesim("simulate", "1f1b", *SMALL, "--capacity", 4, "--fit").returncode == 0


def test_chunks_take_their_share_of_stage_times(pipesim):
    # the paper's figure for 1F1B, Table 5, first row
    figures = json.loads(pipesim("simulate", "1f1b", "--costs", "gpt-1.5b-a100", "-p", 8, "-m", 24, "--json").stdout)
    assert figures["span_bubble_rate"] == pytest.approx(0.2431, abs=5e-5)
    assert figures["unit"] == "s"


def test_profile_in_one_command(pipesim, shared_data):
    profile = shared_data / "pipedream" / "profiles" / "vgg16.txt"
    run = pipesim("simulate", "1f1b", "--costs", profile, "--devices", 4, "--microbatches", 8, "--cluster", "dgx-v100", "--json")
    figures = json.loads(run.stdout)
    # every device is busy 8 times its stage, and the four stages are the whole model: 8 x (the sum of all layers' times)
    total = sum(float(line.split(f"{key}=")[1].split(",")[0]) for line in profile.read_text().splitlines() if "forward_compute" in line and "-- Input" not in line
                for key in ("forward_compute_time", "backward_compute_time"))  # fmt: skip
    assert sum(figures["busy"]) == pytest.approx(8 * total / 1000)


def test_a_profile_is_no_schedule(pipesim, shared_data):
    run = pipesim("simulate", shared_data / "pipedream" / "profiles" / "vgg16.txt")
    assert run.returncode == 1
    assert "--costs" in run.stderr


def test_compare(pipesim):
    run = pipesim("compare", "gpipe", "1f1b", *SMALL, "--json")
    runs = json.loads(run.stdout)["runs"]
    assert [entry["makespan"] for entry in runs] == [33, 33]
    assert [entry["peak_activations"] for entry in runs] == [[8] * 4, [4, 3, 2, 1]]
    text = pipesim("compare", "gpipe", "1f1b", "--policy", "B", *SMALL).stdout
    assert "gpipe" in text
    assert "makespan" in text


def test_compare_all_names_those_that_do_not_allow_the_size(pipesim):
    run = pipesim("compare", "--all", "--devices", 3, "--microbatches", 7, "--json")
    data = json.loads(run.stdout)
    assert {"gpipe", "1f1b", "naive"} <= {entry["name"] for entry in data["runs"]}
    assert len(data["runs"]) + len(data["refused"]) == len(json.loads(pipesim("list", "--json").stdout)["schedules"])


def test_saved_runs_are_compared_and_plotted(pipesim, tmp_path):
    pipesim("simulate", "gpipe", *SMALL, "--save", "run-a.json.gz")
    pipesim("simulate", "1f1b", *SMALL, "--save", "run-b.json")
    assert json.loads(gzip.decompress((tmp_path / "run-a.json.gz").read_bytes()))["format"] == "pipesim-timeline"
    data = json.loads(pipesim("compare", "run-a.json.gz", "run-b.json", "--json").stdout)
    assert [entry["name"] for entry in data["runs"]] == ["gpipe", "1f1b"]
    assert pipesim("plot", "run-b.json", "-o", "again.svg").returncode == 0
    ET.parse(tmp_path / "again.svg")


def test_show_draws_the_order(pipesim):
    text = pipesim("show", "1f1b", "-p", 2, "-m", 2).stdout
    assert "device 0 | 0F0 0F1 0B0 0B1" in text
    assert "Source" in text  # the docstring says where it comes from


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("html", b"<")])
def test_plot(pipesim, tmp_path, suffix, magic):
    run = pipesim("plot", "1f1b", *SMALL, "--out", f"chart.{suffix}")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / f"chart.{suffix}").read_bytes().startswith(magic)


def test_plot_into_nowhere_leaves_nothing(pipesim, tmp_path):
    run = pipesim("plot", "1f1b", *SMALL, "--out", "missing/chart.png")
    assert run.returncode == 1
    assert "missing" in run.stderr
    assert "Traceback" not in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_export_every_format(pipesim, tmp_path):
    for name in ("s.csv", "s.txt", "t.json", "t.json.gz", "run.json.gz", "page.html"):
        assert pipesim("export", "1f1b", *SMALL, "-o", name).returncode == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    # what was written runs again, to the same figures
    for name in ("s.csv", "s.txt"):
        figures = json.loads(pipesim("simulate", name, "--forward", 1, "--backward", 2, "--json").stdout)
        assert figures["makespan"] == 33


def test_check(pipesim, tmp_path):
    (tmp_path / "good.csv").write_text("0F0,0B0\n1F0,1B0\n")
    assert pipesim("check", "good.csv").returncode == 0
    assert json.loads(pipesim("check", "good.csv", "--json").stdout)["ok"] is True
    (tmp_path / "broken.csv").write_text(BROKEN)
    for command in ("check", "simulate"):
        run = pipesim(command, "broken.csv")
        assert (run.returncode, run.stdout) == (1, "")
        assert "device 0 is stuck at 0B0" in run.stderr
        assert "device 1 is stuck at 1F1" in run.stderr


def test_placement_catches_a_typing_error(pipesim, tmp_path):
    (tmp_path / "typo.csv").write_text("0F0,0B0,0F1,1F1,1B1,0B1\n1F0,1B0\n")
    assert "replicas on devices 0, 1" in pipesim("check", "typo.csv").stdout
    run = pipesim("check", "typo.csv", "--placement", "loop")
    assert run.returncode == 1
    assert "position 3, op 1F1" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "needle"),
    [
        (("simulate", "1f1b", "-p", 4, "-m", 0), 1, "microbatches must be at least 1, got 0"),
        (("simulate", "1f1b", "-p", 4, "-m", -1), 1, "microbatches"),
        (("simulate", "1f1b", "-p", 0, "-m", 4), 1, "devices"),
        (("simulate", "1f1b", "-p", 4, "-m", "7.5"), 2, "7.5"),
        (("simulate", "1f1b", *SMALL, "--forward", "nan"), 1, "not finite"),
        (("simulate", "1f1b", *SMALL, "--forward", "inf"), 1, "not finite"),
        (("simulate", "1f1b", *SMALL, "--forward", "-1"), 1, "negative"),
        (("simulate", "1f1b", *SMALL, "--forward", "1,5"), 1, "2 values"),
        (("simulate", "1f1b", *SMALL, "--forward", "one"), 2, "not a number"),
        (("simulate", "1f2b", *SMALL), 1, "did you mean '1f1b'"),
        (("simulate", "1f1b", *SMALL, "--polcy", "B"), 2, "did you mean '--policy'"),
        (("simulate", "1f1b", *SMALL, "--policy", "C"), 2, "A or B"),
        (("simulate", "1f1b", "-m", 8), 2, "--devices"),
        (("simulate",), 2, "SCHEDULE"),
        (("simulate", "1f1b", "gpipe", *SMALL), 2, "gpipe"),
        (("simulat",), 2, "did you mean 'simulate'"),
        (("simulate", "nothere.csv"), 1, "nothere.csv"),
        (("simulate", "nothere.py:f", *SMALL), 1, "nothere.py"),
        (("simulate", "json:nothing", *SMALL), 1, "nothing"),
        (("simulate", "1f1b", *SMALL, "--cluster", "dgx-a10"), 1, "did you mean 'dgx-a100'"),
        (("simulate", "1f1b", *SMALL, "--cluster", "dgx-a100"), 1, "slots"),
        (("simulate", "1f1b", "-p", 8, "-m", 8, "--costs", "nothere"), 1, "nothere"),
        (("simulate", "1f1b", *SMALL, "--steps", 0), 1, "steps"),
        (("simulate", "pipedream", *SMALL, "--steps", 2), 1, "asynchronous"),
        (("compare", "1f1b", *SMALL), 2, "at least two"),
        (("plot", "1f1b", *SMALL, "-o", "x.bmp"), 1, ".png"),
        (("export", "1f1b", *SMALL, "-o", "x.xyz"), 1, "--format"),
    ],
)
def test_mistakes_get_one_message_and_no_traceback(pipesim, tmp_path, arguments, status, needle):
    run = pipesim(*arguments)
    assert run.returncode == status, run.stderr
    assert run.stdout == ""
    assert needle in run.stderr
    assert "Traceback" not in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_is_quick_because_it_imports_nothing_heavy(tmp_path: Path):
    import subprocess
    import sys

    code = "import sys, pipesim.cli; sys.argv = ['pipesim', '--help']\ntry: pipesim.cli.main()\nexcept SystemExit: pass\nprint(sorted(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout.splitlines()[-1]
    for module in ("numpy", "simpy", "matplotlib", "plotly", "torch", "pandas", "pydantic"):
        assert f"'{module}'" not in loaded


@pytest.mark.parametrize("option", [("--forward", 99), ("--capacity", 1), ("--no-barrier",), ("--legacy",)])
def test_an_option_that_would_change_nothing_is_refused(pipesim, option):
    pipesim("simulate", "1f1b", *SMALL, "--save", "run.json")
    run = pipesim("simulate", "run.json", *option)
    assert run.returncode == 2
    assert "would change nothing" in run.stderr
    assert pipesim("simulate", "1f1b", *SMALL, "--weight-policy", "stash").returncode == 2


def test_a_run_is_saved_under_a_name_that_can_be_read(pipesim, tmp_path):
    for name in ("run", ""):
        assert pipesim("simulate", "1f1b", *SMALL, "--save", name).returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_compare_all_of_an_impossible_size(pipesim):
    run = pipesim("compare", "--all", "-p", 4, "-m", 0)
    assert run.returncode == 1
    assert "microbatches must be at least 1" in run.stderr


def test_check_judges_the_order_of_listed_messages(pipesim, tmp_path):
    right = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    (tmp_path / "listed.csv").write_text(right)
    run = pipesim("check", "listed.csv")
    assert run.returncode == 0
    assert "--sends rendezvous" in run.stdout

    # on one stream the RECV waits for a gradient that cannot come before the SEND behind it
    (tmp_path / "listed.csv").write_text(right.replace("0SEND_F0,0RECV_B0", "0RECV_B0,0SEND_F0"))
    run = pipesim("check", "listed.csv")
    assert run.returncode == 1
    assert "0SEND_F0" in run.stderr
    assert "0RECV_B0" in run.stderr


@pytest.mark.parametrize("reductions", [("0REDUCE_GRAD", ""), ("0REDUCE_GRAD,1REDUCE_GRAD", "1REDUCE_GRAD,0REDUCE_GRAD")])
def test_check_refuses_reductions_that_wait_for_ever(pipesim, tmp_path, reductions):
    """Of two replicas one lists none, or both list two in opposite orders."""
    (tmp_path / "listed.csv").write_text(f"0F0,1F1,1B1,0B0,{reductions[0]}\n1F0,0F1,1B0,0B1,{reductions[1]}\n")
    run = pipesim("check", "listed.csv")
    assert run.returncode == 1
    assert "0REDUCE_GRAD" in run.stderr
