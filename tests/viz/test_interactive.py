"""The interactive view: cases V04, V05, V10, V11 and V12 of ../shared/cases.md, and what the pointer shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipesim import Schedule, ScheduleError, Timeline, UniformCosts, generate, read_costs, simulate
from pipesim.viz import palette

go = pytest.importorskip("plotly.graph_objects")

from pipesim.viz import interactive, points  # noqa: E402  it needs plotly
from pipesim.viz.interactive import figure, write_html  # noqa: E402


def run(name: str = "1f1b", devices: int = 4, microbatches: int = 8, steps: int = 1, **costs: Any) -> Timeline:
    return simulate(generate(name, devices, microbatches), UniformCosts(**({"forward": 1, "backward": 2} | costs)), steps=steps)


def bars(shown: Any) -> list[Any]:
    return [trace for trace in shown.data if trace.type == "bar"]


def lines(shown: Any) -> list[Any]:
    return [trace for trace in shown.data if trace.type == "scatter" and trace.yaxis == "y2"]


# -- bars ------------------------------------------------------------------------------------------------------------------


def test_v10_the_axis_is_linear_and_bars_have_bases_and_lengths() -> None:
    # two F on one device, 1 and 2 long: bars [0, 1] and [1, 3]
    shown = figure(simulate(Schedule.from_text("0F0 0F1"), UniformCosts(forward=[[1, 2]])))
    (trace,) = bars(shown)
    assert shown.layout.xaxis.type == "linear"
    assert list(trace.base) == [0, 1]
    assert list(trace.x) == [1, 2]
    assert trace.orientation == "h"
    assert tuple(shown.layout.xaxis.range) == (0, 3)


def test_v11_traces_per_kind_and_one_width() -> None:
    shown = figure(run())
    assert [trace.name for trace in bars(shown)] == ["F forward", "B backward"]
    assert shown.layout.barmode == "overlay"
    assert {trace.width for trace in bars(shown)} == {0.8}
    assert sum(len(trace.x) for trace in bars(shown)) == 64


def test_v11_many_ops_are_paths() -> None:
    # p=8, m=750, F and B: 12000 bars make browsers unusable
    shown = figure(run(devices=8, microbatches=750))
    assert bars(shown) == []
    assert [trace.type for trace in shown.data if trace.yaxis != "y2"] == ["heatmap"]
    shapes = {shape.name: shape for shape in shown.layout.shapes}
    assert shapes.keys() == {"F forward", "B backward"}
    assert all(shape.path.count("M") == 6000 and shape.showlegend for shape in shapes.values())
    # B takes more time and is drawn first, so that it does not cover F; the legend keeps the order of kinds
    assert [shape.name for shape in shown.layout.shapes] == ["B backward", "F forward"]
    assert shapes["F forward"].legendrank < shapes["B backward"].legendrank
    assert shapes["F forward"].path.startswith("M0,0.1H1V0.9H0Z")


@pytest.mark.parametrize("text", ["0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2", "0F0 0F1 (0F2;0B1)OVERLAP_F_B 0B0 0B2"])
def test_halves_of_a_pair_have_half_the_height(text: str) -> None:
    forward, backward = bars(figure(simulate(Schedule.from_text(text), UniformCosts(forward=1, backward=2))))
    assert list(forward.width) == pytest.approx([0.8, 0.8, 0.4])
    # the first half lies above
    assert list(forward.y) == pytest.approx([0.5, 0.5, 0.3])
    assert sorted(backward.y) == pytest.approx([0.5, 0.5, 0.7])
    assert "<b>0F2 of (0F2;" in forward.hovertext[2]


def test_text_in_bars_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(bars(figure(run()))[0].text)[:4] == ["0", "1", "2", "3"]
    monkeypatch.setattr(interactive, "TEXTS", 63)
    assert all(trace.text is None for trace in bars(figure(run())))


def test_stages_of_one_device_have_shades() -> None:
    shown = figure(simulate(Schedule.from_text("0F0 1F0 1B0 0B0"), UniformCosts()))
    names = {trace.name: trace.marker.color for trace in bars(shown)}
    assert list(names) == ["F forward, chunk 0", "F forward, chunk 1", "B backward, chunk 0", "B backward, chunk 1"]
    assert len(set(names.values())) == 4
    assert names["F forward, chunk 0"] == palette.KIND_COLORS[palette.Kind.F]


# -- axes ------------------------------------------------------------------------------------------------------------------


def test_v05_device_0_on_top_and_numeric_order() -> None:
    layout = figure(run(devices=12, microbatches=12)).layout
    assert list(layout.yaxis.ticktext) == [f"device {number}" for number in range(12)]
    assert list(layout.yaxis.tickvals) == [number + 0.5 for number in range(12)]
    low, high = layout.yaxis.range
    assert low > high  # y grows downwards


def test_many_devices_are_not_all_named() -> None:
    ticks = figure(run("naive", devices=200, microbatches=1)).layout.yaxis.ticktext
    assert len(ticks) <= 64
    assert ticks[:2] == ("device 0", "device 4")


def test_units_of_the_axes() -> None:
    assert figure(run()).layout.xaxis.title.text == "time (slots)"
    assert figure(run()).layout.yaxis2.title.text == "memory (units)"
    # F 18.522 ms: one F and B of four microbatches on one device take (18.522 + 18.086 + 9.337) · 4 = 183.78 ms
    costs = read_costs("gpt-1.5b-a100")
    shown = figure(simulate(generate("1f1b", 8, 1), costs))
    assert shown.layout.xaxis.title.text == "time (ms)"
    assert bars(shown)[0].x[0] == pytest.approx(18.522)
    assert shown.layout.yaxis2.title.text == "memory (GB)"


def test_several_steps_stand_behind_each_other() -> None:
    shown = figure(run(steps=2))
    assert len(bars(shown)[0].x) == 64
    assert shown.layout.xaxis.range[1] == 66
    assert "step 1" in bars(shown)[0].hovertext[-1]


def test_it_reads_on_white_and_on_dark() -> None:
    layout = figure(run()).layout
    assert layout.paper_bgcolor == "rgba(0,0,0,0)"
    channels = {int(layout.font.color[i : i + 2], 16) for i in (1, 3, 5)}
    assert channels <= set(range(0x60, 0xA0))


# -- under the pointer -----------------------------------------------------------------------------------------------------


def test_the_pointer_shows_the_op_and_what_it_waited_for() -> None:
    # 1F1B, two devices and microbatches, latency 0.25: F0 of device 0 ends at 1, F0 of device 1 is 1.25-2.25, its B0 2.25-4.25,
    # so B0 of device 0 is 4.5-6.5 and waits from F1's end at 2
    forward, backward = bars(figure(run(devices=2, microbatches=2, latency=0.25)))
    assert forward.hoverinfo == "text"
    text = backward.hovertext[0]
    assert text.startswith("<b>0B0</b>, device 0<br>start 4.5, end 6.5, duration 2<br>waited 2.5 for 1B0 of device 1")


def cell(shown: Any, device: int, time: float) -> tuple[str, list[float]]:
    (trace,) = (trace for trace in shown.data if trace.type == "heatmap")
    column = int((time - (trace.x0 - trace.dx / 2)) / trace.dx)
    row = int((device + 0.5 - (trace.y0 - trace.dy / 2)) / trace.dy)
    assert np.isfinite(trace.z[row][column]) == (trace.text[row][column] != "")
    return trace.text[row][column], [float(value) for value in trace.customdata[row][column]]


def test_the_pointer_finds_ops_among_many() -> None:
    # Device 0 of 1F1B, p=8: F7 is 7-8, B0 starts when it has come back: 8 F down, 7·2 up = 22; then F and B take turns.
    shown = figure(run(devices=8, microbatches=750))
    assert cell(shown, 0, 7.5) == ("0F7, device 0", [7, 8, 1])
    assert cell(shown, 0, 23) == ("0B0, device 0, waited 14 for 1B0 of device 1", [22, 24, 2])
    assert cell(shown, 0, 24.5) == ("0F8, device 0", [24, 25, 1])
    assert cell(shown, 0, 15)[0] == ""
    assert cell(shown, 7, 7.5)[0] == "7F0, device 7, waited 7 for 6F0 of device 6"


def test_no_op_vanishes_from_under_the_pointer(monkeypatch: pytest.MonkeyPatch) -> None:
    # F on device 1 takes a ten-millionth of the run, with pauses before and after it
    monkeypatch.setattr(interactive, "BARS", 3)
    shown = figure(simulate(Schedule.from_text("0F0 0F1\n1F0 1F1"), UniformCosts(forward=[1000, 1e-4])))
    (trace,) = (trace for trace in shown.data if trace.type == "heatmap")
    assert {text.split(",")[0] for text in trace.text[1]} == {"", "1F0", "1F1"}


def test_pairs_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interactive, "BARS", 3)
    shown = figure(simulate(Schedule.from_text("0F0 (0F1;0B0)OVERLAP_F_B 0B1"), UniformCosts(forward=1, backward=2)))
    (trace,) = (trace for trace in shown.data if trace.type == "heatmap")
    # the pair lies in 1-4; its halves are two rows
    assert (trace.dy, len(trace.text)) == (0.5, 2)
    column = int(2.5 / trace.dx)
    assert [row[column].split(" ")[0] for row in trace.text] == ["0F1", "0B0"]
    assert [row[int(0.5 / trace.dx)] for row in trace.text] == ["0F0, device 0"] * 2


def test_above_the_last_limit_only_a_heatmap_is_drawn_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interactive, "BARS", 10)
    monkeypatch.setattr(interactive, "PATHS", 20)
    shown = figure(run())
    assert shown.layout.shapes == ()
    (trace,) = (trace for trace in shown.data if trace.type == "heatmap")
    assert trace.opacity is None
    assert "64 ops" in shown.layout.annotations[0].text
    # the colours of F (number 0) and B (1): device 0 starts with F and ends with B
    colors = dict(trace.colorscale)
    assert (trace.z[0][0], trace.z[0][-1]) == (0, 1)
    assert (colors[0.0], colors[1.0]) == (palette.KIND_COLORS[palette.Kind.F], palette.KIND_COLORS[palette.Kind.B])
    assert [t.name for t in shown.data if t.type == "scatter" and t.yaxis != "y2"] == ["F forward", "B backward"]


# -- memory ----------------------------------------------------------------------------------------------------------------


def test_m01_memory_curves_share_the_axis_of_time() -> None:
    shown = figure(run())
    assert [trace.name for trace in lines(shown)] == ["device 0", "device 1", "device 2", "device 3"]
    assert [max(trace.y) for trace in lines(shown)] == [4, 3, 2, 1]
    assert all(trace.xaxis in (None, "x") and trace.line.shape == "hv" for trace in lines(shown))
    assert shown.layout.yaxis.domain[0] > shown.layout.yaxis2.domain[1]
    # the four backwards of device 0 without a forward behind them end at 24, 27, 30, 33
    first = lines(shown)[0]
    assert list(first.x) == [0, 1, 2, 3, 24, 27, 30, 33, 33]
    assert list(first.y) == [1, 2, 3, 4, 3, 2, 1, 0, 0]


def test_of_many_curves_four_are_named() -> None:
    curves = lines(figure(run(devices=8, microbatches=8)))
    shown = [curve.name for curve in curves if curve.showlegend]
    assert shown == ["device 0", "5 other devices", "device 4", "device 7"]
    assert {curve.line.color for curve in curves if curve.legendgroup == "others"} == {"#808080"}
    # the pointer names all of them
    assert [curve.hovertemplate.partition("</b>")[0] for curve in curves] == [f"<b>device {device}" for device in range(8)]


def test_no_curves_where_nothing_is_held_or_wanted() -> None:
    assert lines(figure(run(activation=0))) == []
    shown = figure(run(), memory=False)
    assert lines(shown) == []
    assert tuple(shown.layout.yaxis.domain) == (0, 1)


def test_long_curves_keep_their_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "_MEMORY_POINTS", 4 * 50)
    # GPipe holds all 200 microbatches of every stage when the last forward starts
    curves = lines(figure(run("gpipe", microbatches=200)))
    assert [max(curve.y) for curve in curves] == [200] * 4
    assert [curve.y[-1] for curve in curves] == [0] * 4
    assert all(len(curve.x) <= 55 for curve in curves)
    assert all((np.diff(np.asarray(curve.x)) >= 0).all() for curve in curves)


# -- pages -----------------------------------------------------------------------------------------------------------------


def page(timelines: Any, folder: Path, **options: Any) -> str:
    write_html(timelines, folder / "run.html", **options)
    return (folder / "run.html").read_text()


def two_bars() -> Timeline:
    return simulate(generate("gpipe", 1, 1), UniformCosts(forward=1, backward=2))


def test_v12_size_of_a_page(tmp_path: Path) -> None:
    # about 4.8 MB with the library in the page, about 8 kB with a link to it
    assert 4e6 < len(page(two_bars(), tmp_path)) < 6e6
    linked = page(two_bars(), tmp_path, inline=False)
    assert len(linked) < 10_000
    assert len(re.findall(r"<script[^>]* src=", linked)) == 1


def test_v12_a_report_holds_the_library_once(tmp_path: Path) -> None:
    text = page([two_bars()] * 10, tmp_path)
    assert len(text) < 6e6
    assert text.count("Plotly.newPlot(") - page(two_bars(), tmp_path).count("Plotly.newPlot(") == 9
    assert len(set(re.findall(r'id="(timeline-\d+)"', text))) == 10
    assert len(re.findall(r"<script[^>]* src=", text)) == 0
    assert len(re.findall(r"<script[^>]* src=", page([two_bars()] * 10, tmp_path, inline=False))) == 1


def test_no_upload_button_and_no_logo(tmp_path: Path) -> None:
    text = page([two_bars(), two_bars()], tmp_path, inline=False)
    assert text.count('"showSendToCloud": false') == text.count('"displaylogo": false') == 2


@pytest.mark.parametrize("name", ["F0\n\x01", "前向", 'B"0\\', "</script><script>alert(1)</script>", "<a href='http://x'>x</a>"])
def test_v04_names_are_escaped(name: str, tmp_path: Path) -> None:
    schedule = Schedule.from_text("0F0 0B0", name=name)
    text = page(simulate(schedule, UniformCosts()), tmp_path, inline=False)
    assert "<script>alert" not in text
    assert "<a href" not in text
    assert "\x01" not in text
    title = json.loads(re.search(r'"text":("\\u003cb(?:[^"\\]|\\.)*")', text)[1])  # type: ignore[index]
    shown = {"F0\n\x01": r"F0\n\x01", "前向": "前向", 'B"0\\': 'B"0\\'}
    assert title.startswith(f"<b>{shown.get(name, name.replace('&', '&amp;').replace('<', '&lt;').replace('>', '&gt;'))}</b>, 1 device,")


def test_the_same_run_is_the_same_page(tmp_path: Path) -> None:
    assert page(run(), tmp_path, inline=False) == page(run(), tmp_path, inline=False)


def test_nothing_to_write_and_nowhere_to_write_it(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="no run"):
        write_html([], tmp_path / "run.html")
    with pytest.raises(OSError, match="nowhere"):
        write_html(two_bars(), tmp_path / "nowhere" / "run.html", inline=False)
    assert list(tmp_path.iterdir()) == []


def test_the_timeline_has_it_as_a_method_and_imports_plotly_only_then() -> None:
    assert isinstance(run().plotly(memory=False), go.Figure)
    code = "import sys, pipesim as ps; r = ps.simulate(ps.generate('gpipe', 1, 1)); assert 'plotly' not in sys.modules; r.plotly(); assert 'plotly' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
