"""Runs as text. Expected figures are closed forms; pictures are drawn by hand."""

from __future__ import annotations

import dataclasses
from textwrap import dedent

from pipesim import Cluster, Schedule, UniformCosts, compare, generate, simulate
from pipesim.metrics import DEFINITIONS
from pipesim.viz.text import comparison, gantt, summary

ONE_TWO = UniformCosts(forward=1, backward=2)


def picture(text: str) -> str:
    return dedent(text).strip("\n")


def test_picture_of_1f1b_with_equal_times() -> None:
    # Narayanan et al. 2021, figure 4 (top), for p = 2, m = 3 and F = B
    expected = """
        slots    | 0              5
        device 0 | F0 F1 .  B0 F2 B1 .  B2
        device 1 | .  F0 B0 F1 B1 F2 B2 .
    """
    assert gantt(simulate(generate("1f1b", 2, 3), UniformCosts(forward=1, backward=1))) == picture(expected)


def test_picture_of_gpipe_where_backward_takes_twice_as_long() -> None:
    expected = """
        slots    | 0              5              10
        device 0 | F0 F1 .  .  .  .  .  .  B0 B0 B1 B1
        device 1 | .  F0 F1 .  .  .  B0 B0 B1 B1 .  .
        device 2 | .  .  F0 F1 B0 B0 B1 B1 .  .  .  .
    """
    assert gantt(simulate(generate("gpipe", 3, 2), ONE_TWO)) == picture(expected)


def test_picture_of_pairs_and_several_stages_on_a_device() -> None:
    # stages 0 and 1 on one device; the second half of a pair stands under the first
    schedule = Schedule.from_text("0F0 1F0 0F1 (1F1;1B0)OVERLAP_F_B 0B0 1B1 0B1")
    expected = """
        slots    | 0                   5                   10
        device 0 | 0F0 1F0 0F1 1F1 1F1 0B0 0B0 1B1 1B1 0B1 0B1
                 |             1B0 1B0
    """
    assert gantt(simulate(schedule, UniformCosts(forward=1, backward=2, overlap=2))) == picture(expected)


def test_memory_says_what_has_no_size() -> None:
    schedule = generate("1f1b", 2, 4)
    without = "peak_memory is without activations, weights, gradients, optimizer: the costs give no bytes of them"
    assert without in summary(simulate(schedule, UniformCosts(forward=1, message=3, activation=0)))
    assert without.replace(" weights,", "") in summary(simulate(schedule, UniformCosts(weights=2, activation=0)))
    assert "is without" not in summary(simulate(schedule, ONE_TWO))


def test_picture_of_halves_of_a_slot() -> None:
    # F = 1, B = 1, a hop of half a slot: columns of half a slot show it exactly
    expected = """
        slots    | 0              2.5            5
        device 0 | F0 F0 .  .  .  .  .  .  B0 B0
        device 1 | .  .  .  F0 F0 B0 B0 .  .  .
    """
    run = simulate(generate("gpipe", 2, 1), UniformCosts(forward=1, backward=1, latency=0.5))
    assert gantt(run) == picture(expected.replace("            5\n", "\n"))


def test_picture_that_is_too_wide_is_cut_off_and_says_so() -> None:
    run = simulate(generate("1f1b", 4, 40), ONE_TWO)
    lines = gantt(run, width=60).splitlines()
    assert max(map(len, lines[:-1])) <= 60
    # makespan (m + p - 1)(F + B) = 129
    assert lines[-1] == "cut off at 12 of 129 slots; a larger width shows more"
    whole = gantt(run, width=None).splitlines()
    assert len(whole) == 5
    assert whole[1].split("|")[1].split()[-2:] == ["B39", "B39"]


def test_picture_of_measured_times_is_approximate_and_says_so() -> None:
    costs = UniformCosts(forward=18.522e-3, backward=27.423e-3, latency=0.601e-3, unit="s")
    lines = gantt(simulate(generate("1f1b", 2, 3), costs), width=100).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("ms ")
    assert lines[-1].startswith("a column is ")
    # order survives
    cells = [cell for cell in lines[1].split("|")[1].split() if cell != "."]
    assert list(dict.fromkeys(cells)) == ["F0", "F1", "B0", "F2", "B1", "B2"]


def test_picture_mentions_ops_of_no_length() -> None:
    assert gantt(simulate(generate("pipedream", 2, 2), ONE_TWO)).splitlines()[-1] == "4 ops of no length not shown"


def test_summary_of_1f1b() -> None:
    # p = 4, m = 8, F = 1, B = 2: makespan (m + p - 1) 3 = 33; busy 24; bubble 9/33, 9/24, and device 0 spans all of it
    lines = summary(simulate(generate("1f1b", 4, 8), ONE_TWO)).splitlines()
    assert lines[0] == "1f1b: 4 devices, 4 stages, 8 microbatches, weights flush; simulated"
    figures = {line.split("  ")[0]: line.split()[1] for line in lines if line.startswith(("makespan", "bubble", "span", "iteration"))}
    assert figures == {
        "makespan": "33",
        "iteration_time": "33",
        "bubble_fraction": "0.2727",
        "bubble_overhead": "0.3750",
        "span_bubble_rate": "0.2727",
    }
    for name in (*figures, "busy", "idle_causes", "peak_memory", "peak_activations"):
        assert any(DEFINITIONS[name] in line for line in lines)
    times = [line.split() for line in lines[lines.index("") :] if line.startswith("device")]
    # device i: warm-up i F, drain i B, the rest of 9 idle slots waiting for the peer
    assert times[:4] == [["device", str(i), "24", "9", *map(str, (i, 9 - 3 * i, 2 * i))] for i in range(4)]
    assert times[4:] == [["device", str(i), str(4 - i), str(4 - i)] for i in range(4)]


def test_summary_names_replicas() -> None:
    schedule = Schedule.from_text("0F0 0B0 1F1 1B1\n0F1 1F0 1B0 0B1")
    assert "stage 0 has replicas on devices 0, 1" in summary(simulate(schedule, ONE_TWO)).splitlines()


def test_summary_of_an_asynchronous_run() -> None:
    # PipeDream keeps p - i weight versions on stage i; its delay is p - 1 - i updates (section 3.3)
    text = summary(simulate(generate("pipedream", 4, 12), ONE_TWO))
    assert "update_delay of stages 0..3: 3, 2, 1, 0" in text
    table = text[text.index("memory ") :].splitlines()
    assert table[0].split()[-1] == "weight_versions"
    assert [line.split()[-1] for line in table[1:5]] == ["4", "3", "2", "1"]
    assert "update_delay" not in summary(simulate(generate("1f1b", 4, 12), ONE_TWO))


def test_summary_says_what_does_not_fit() -> None:
    # gpipe's device 0 holds 1, 2, 3, ... activations at 0, 1, 2: the third of 1 unit does not fit into 2
    cluster = Cluster.uniform(memory=2)
    text = summary(simulate(generate("gpipe", 2, 3), ONE_TWO, cluster=cluster))
    assert "DOES NOT FIT: device 0 has 2, and 0F2, at 2, needs 3" in text.splitlines()


def test_summary_of_a_physical_run_has_units() -> None:
    costs = UniformCosts(forward=0.010, backward=0.020, activation=3e9, weights=2e9, unit="s")
    text = summary(simulate(generate("1f1b", 2, 2), costs))
    assert "90 ms" in text  # (2 + 1) · 30 ms
    assert "time in ms" in text
    # device 0 holds two activations and its weights
    assert [" ".join(pair) for pair in _pairs(text[text.index("memory ") :].splitlines()[1].split()[2:8])] == ["8 GB", "2 GB", "6 GB"]


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    return list(zip(words[::2], words[1::2], strict=True))


def test_columns_are_aligned() -> None:
    lines = summary(simulate(generate("1f1b", 12, 8), ONE_TWO)).splitlines()
    table = [line for line in lines if line.startswith(("device", "time in"))][:13]
    assert len({len(line) for line in table}) == 1


def test_names_cannot_break_lines() -> None:
    schedule = dataclasses.replace(generate("1f1b", 2, 2), name="a\n\x1b[31mb")
    run = simulate(schedule, ONE_TWO)
    assert summary(run).splitlines()[0].startswith("a\\n\\x1b[31mb: 2 devices")
    assert "\x1b" not in comparison(compare(run, run))


def test_comparison() -> None:
    runs = [simulate(generate(name, 4, 8), ONE_TWO) for name in ("gpipe", "1f1b")]
    lines = comparison(compare(*runs)).splitlines()
    # the last column, whose unit is the table's, has a head of its own
    heads = [a + b for a, b in zip(lines[0].split()[:-1], lines[1].split()[1:-3], strict=True)]
    assert lines[1].split()[0] == "makespan"
    assert lines[0].split()[-1] == "peak_memory"
    assert lines[1].endswith("per device (units)")
    assert heads == [name for name, _ in compare(*runs).rows if name not in ("peak_memory", "peak_activation_share")][1:]
    # both take 33; gpipe holds all 8, 1F1B p - i
    assert lines[2].split()[:4] == ["gpipe", "33", "slots", "1.0000"]
    assert "8 each" in lines[2]
    assert "4, 3, 2, 1" in lines[3]
    assert DEFINITIONS["bubble_overhead"] in "\n".join(lines)


def test_comparison_shortens_long_lists() -> None:
    # 1F1B on 16 devices holds 16, 15, ..., 1
    runs = [simulate(generate("1f1b", 16, 32), ONE_TWO) for _ in range(2)]
    assert "1 to 16" in comparison(compare(*runs)).splitlines()[2]
