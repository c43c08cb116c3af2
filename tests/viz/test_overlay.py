"""Two runs in one picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from pipesim import Schedule, ScheduleError, Timeline, UniformCosts, generate, simulate
from pipesim.viz import interactive, mpl
from pipesim.viz.overlay import overlaid

PAIRS = Schedule.from_text("0F0 (0F1;0B0)OVERLAP_F_B 0B1")


def runs(schedule: Schedule, steps: int = 1) -> tuple[Timeline, Timeline]:
    slow = simulate(schedule, UniformCosts(forward=1.5, backward=2, unit="s"), steps=steps)
    return simulate(schedule, UniformCosts(forward=1, backward=2, unit="s")), replace(slow, source="measured")


def test_bands_of_a_device_lie_together_the_simulated_one_above() -> None:
    both = overlaid(*runs(generate("gpipe", 2, 1)))
    bars = both.bars
    assert both.bands == ["device 0  simulated", "measured", "device 1  simulated", "measured"]
    # bars 0..3 are the first run's, in the order of its scene: 0F0 0B0 1F0 1B0
    assert bars.device.tolist() == [0, 0, 2, 2, 1, 1, 3, 3]
    assert bars.start.tolist() == [0, 4, 1, 2, 0, 5, 1.5, 3]
    assert [round(float(value), 2) for value in bars.top] == [0.16, 0.16, 2.16, 2.16, 1.02, 1.02, 3.02, 3.02]
    assert [round(float(value), 2) for value in bars.bottom] == [0.98, 0.98, 2.98, 2.98, 1.84, 1.84, 3.84, 3.84]
    # 6 s and 7 s
    assert both.title == "gpipe\nabove: simulated, makespan 6 s · below: measured, 7 s · simulated / measured - 1 = -14.29 %"


def test_halves_of_pairs_meet_in_the_middle_of_their_band() -> None:
    bars = overlaid(*runs(PAIRS)).bars
    halves = [(round(float(bars.top[bar]), 2), round(float(bars.bottom[bar]), 2)) for bar in range(len(bars)) if bars.halved[bar]]
    assert halves == [(0.16, 0.5), (0.5, 0.98), (1.02, 1.5), (1.5, 1.84)]


def test_of_several_steps_the_median_one_is_drawn() -> None:
    both = overlaid(*runs(generate("gpipe", 2, 1), steps=3))
    assert len(both.bars) == 8
    assert "measured, 7 s (median of 3 steps)" in both.title


def test_other_numbers_of_devices_and_the_same_source() -> None:
    first, second = (simulate(generate("gpipe", devices, 2), UniformCosts()) for devices in (1, 3))
    both = overlaid(first, second)
    assert both.names == ("first", "second")
    assert both.bars.num_devices == 6


def test_slots_and_seconds_are_refused() -> None:
    with pytest.raises(ScheduleError, match="cannot be drawn on one axis"):
        overlaid(simulate(PAIRS, UniformCosts()), runs(PAIRS)[1])


def test_a_picture_has_both_ends_a_legend_and_names() -> None:
    ax = mpl.overlay(*runs(generate("1f1b", 2, 4)))
    assert isinstance(ax.figure, Figure)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["device 0  simulated", "measured", "device 1  simulated", "measured"]
    # simulated: (4 + 1) * 3 = 15; measured: (4 + 1) * 3.5 = 17.5
    ends = [line.get_xdata()[0] for line in ax.lines]
    assert ends == [15, 17.5]
    assert ax.get_xlabel() == "time (s)"
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["F forward", "B backward"]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_pictures_are_the_same_files_for_the_same_runs(ending: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        mpl.save_overlay(*runs(PAIRS), tmp_path / f"{name}.{ending}")
    assert (tmp_path / f"a.{ending}").read_bytes() == (tmp_path / f"b.{ending}").read_bytes()


def test_the_page_says_under_the_pointer_which_run_a_bar_is_of() -> None:
    shown = interactive.overlay(*runs(generate("gpipe", 2, 1)))
    texts = [text for trace in shown.data for text in trace.hovertext]
    assert sorted(text.partition("<br>")[0] for text in texts) == [
        "<b>0B0</b>, device 0, measured",
        "<b>0B0</b>, device 0, simulated",
        "<b>0F0</b>, device 0, measured",
        "<b>0F0</b>, device 0, simulated",
        "<b>1B0</b>, device 1, measured",
        "<b>1B0</b>, device 1, simulated",
        "<b>1F0</b>, device 1, measured",
        "<b>1F0</b>, device 1, simulated",
    ]
    (measured,) = [text for text in texts if text.startswith("<b>0B0</b>, device 0, measured")]
    assert "start 5 s, end 7 s, duration 2 s<br>waited 3.5 s for 1B0 of device 1" in measured


def test_a_page_of_many_ops_is_drawn_as_paths(tmp_path: Path) -> None:
    both = runs(generate("1f1b", 16, 128))
    shown = interactive.overlay(*both)
    assert len(both[0].columns["start"]) * 2 > interactive.BARS
    (heatmap,) = shown.data
    assert {text.partition(", ")[2].partition(",")[0] for row in heatmap.text for text in row if text} >= {"device 0", "device 15"}
    interactive.write_overlay(*both, tmp_path / "o.html", inline=False)
    assert "measured" in (tmp_path / "o.html").read_text()
