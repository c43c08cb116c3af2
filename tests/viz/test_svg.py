"""SVG of our own: valid, small, and with every op in it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from pipesim import Schedule, UniformCosts, generate, simulate
from pipesim.viz import palette
from pipesim.viz.svg import schedule_svg, timeline_svg

ONE_TWO = UniformCosts(forward=1, backward=2)
SVG = "{http://www.w3.org/2000/svg}"
NASTY = ["F0\n\x01", "前向", 'B"0\\', "<script>alert(1)</script> & ]]>", "\ud800\ufffe"]  # V04, and what XML forbids


def drawn(text: str) -> ElementTree.Element:
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def test_one_path_per_kind_holds_all_its_bars() -> None:
    root = drawn(timeline_svg(simulate(generate("1f1b", 4, 8), ONE_TWO)))
    paths = {path.get("fill"): path.get("d", "") for path in root.iter(f"{SVG}path")}
    assert {color: path.count("M") for color, path in paths.items()} == {"#0072b2": 32, "#009e73": 32}


def test_places_and_lengths_are_those_of_the_run() -> None:
    # gpipe 2 x 1, F = 1, B = 2:  device 0 | F .  .  .  B B    of 6 slots, 880 pixels from x = 70
    #                             device 1 | .  F B  B  .  .
    root = drawn(timeline_svg(simulate(generate("gpipe", 2, 1), ONE_TWO)))
    bars = []
    for path in root.iter(f"{SVG}path"):
        bars += [tuple(map(float, found)) for found in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v", path.get("d", ""))]
    slots = [(round((x - 70) / (880 / 6), 2), round(width / (880 / 6), 2)) for x, _, width in bars]
    assert slots == [(0, 1), (1, 1), (4, 2), (2, 2)]
    y = [y for _, y, _ in bars]
    assert y[0] == y[2] < y[1] == y[3]


def test_devices_from_top_to_bottom() -> None:
    # V05, p = 12
    root = drawn(timeline_svg(simulate(generate("1f1b", 12, 3), ONE_TWO)))
    names = [(float(element.get("y", 0)), element.text) for element in root.iter(f"{SVG}text") if str(element.text).startswith("device ")]
    assert [name for _, name in sorted(names)] == [f"device {device}" for device in range(12)]


def test_title_axis_and_legend() -> None:
    found = texts(drawn(timeline_svg(simulate(generate("1f1b", 4, 8), ONE_TWO))))
    # 1F1B: makespan (m + p - 1)(F + B) = 33, bubble (p - 1)/(m + p - 1) = 3/11, device i holds p - i
    assert "makespan 33 slots · bubble_fraction 0.2727 · peak_activations 4, 3, 2, 1" in found
    assert {"1f1b", "time (slots)", "F forward", "B backward", "0", "30"} <= set(found)
    seconds = simulate(generate("1f1b", 2, 2), UniformCosts(forward=0.001, backward=0.002, unit="s"))
    assert "time (ms)" in texts(drawn(timeline_svg(seconds)))


def test_labels_where_they_fit_and_only_there() -> None:
    # F is a hundredth of B: 8 B of some 50 pixels can carry a number, F of half a pixel cannot
    root = drawn(timeline_svg(simulate(generate("gpipe", 1, 16), UniformCosts(forward=0.01, backward=1))))
    labels = [element for group in root.iter(f"{SVG}g") if group.get("text-anchor") == "middle" for element in group]
    assert [label.text for label in labels] == [str(number) for number in range(16)]
    wide = drawn(timeline_svg(simulate(generate("gpipe", 1, 900), ONE_TWO)))
    assert not [group for group in wide.iter(f"{SVG}g") if group.get("text-anchor") == "middle"]


def test_an_op_thinner_than_a_pixel_has_an_outline_in_its_colour() -> None:
    # pipedream's updates take no time here
    root = drawn(timeline_svg(simulate(generate("pipedream", 2, 4), ONE_TWO)))
    (update,) = [path for path in root.iter(f"{SVG}path") if path.get("fill") == "#d55e00"]
    assert update.get("d", "").count("M") == 8
    assert update.get("stroke") == "#d55e00"
    assert float(update.get("stroke-width", 0)) >= 1


def test_a_pair_is_two_bars_of_half_the_height() -> None:
    schedule = Schedule.from_text("0F0 0F1 1F0 (1F1;1B0)OVERLAP_F_B 0B0 1B1 0B1")
    root = drawn(timeline_svg(simulate(schedule, ONE_TWO)))
    heights = [float(height) for path in root.iter(f"{SVG}path") for height in re.findall(r"v([\d.]+)", path.get("d", ""))]
    full = max(heights)
    assert sorted(np.round(np.array(heights) / full, 2).tolist()) == [0.5, 0.5, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("name", NASTY)
def test_names_cannot_break_out(name: str) -> None:
    schedule = Schedule.from_text("0F0 0B0\n1F0 1B0", name=name)
    for picture in (timeline_svg(simulate(schedule, ONE_TWO)), schedule_svg(schedule)):
        root = drawn(picture.encode("utf-8").decode("utf-8"))
        assert not [element for element in root.iter() if "script" in element.tag]
        title = root.find(f"{SVG}title")
        assert title is not None
        assert title.text in texts(root)


def test_long_runs_are_drawn_as_pixels() -> None:
    root = drawn(text := timeline_svg(simulate(generate("1f1b", 32, 400), ONE_TWO)))  # 25 600 bars
    assert len(text) < 1_000_000
    paths = {path.get("stroke"): path.get("d", "") for path in root.iter(f"{SVG}path")}
    assert set(paths) == {"#0072b2", "#009e73"}
    # per device F lasts 400 and B 800 of (400 + 31) · 3 slots; a pixel has two columns
    length = {color: sum(map(int, re.findall(r"h(\d+)", path))) for color, path in paths.items()}
    for color, slots in (("#0072b2", 400), ("#009e73", 800)):
        assert length[color] / 32 == pytest.approx(1760 * slots / 1293, rel=0.01)
    # dashes never reach beyond the axis
    for path in paths.values():
        for line in path.split("M")[1:]:
            assert sum(map(int, re.findall(r"[mh](\d+)", line))) <= 1760


def test_repr_of_a_schedule_shows_it_in_time() -> None:
    found = texts(drawn(generate("1f1b", 4, 8)._repr_svg_()))
    assert "time (slots)" in found
    assert any("drawn with F = I = W = 1 and B = 2" in text for text in found)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0 0F1 0B0 0B1\n1F1 1B1 1F0 1B0\n2F0 2B0 2F1 2B1", "order only"),  # device 1 wants 1 first, device 2 wants 0 first
        ("0F0 0SEND_F0 0RECV_B0 0B0\n1F0 1RECV_F0 1B0 1SEND_B0", "activation message"),  # device 1 uses what it receives later
        ("0F0 0B0\n1F0", "order only"),  # not even complete
    ],
)
def test_a_schedule_that_cannot_run_is_shown_all_the_same(text: str, reason: str) -> None:
    schedule = Schedule.from_text(text)
    root = drawn(schedule._repr_svg_())
    found = texts(root)
    assert any(reason in text for text in found)
    assert "position on the device" in found
    assert sum(path.get("d", "").count("M") for path in root.iter(f"{SVG}path")) == len(schedule)


def test_a_large_schedule_is_not_run_for_its_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("pipesim.engine.simulate", refuse)
    assert "position on the device" in texts(drawn(generate("gpipe", 8, 2000)._repr_svg_()))


def test_it_brings_its_own_background() -> None:
    # Jupyter shows it as an image, which does not learn the colours of a dark page
    root = drawn(timeline_svg(simulate(generate("gpipe", 2, 2), ONE_TWO)))
    first = next(root.iter(f"{SVG}rect"))
    assert (first.get("width"), first.get("height"), first.get("fill")) == (root.get("width"), root.get("height"), "#ffffff")


def test_stages_of_a_device_have_shades_of_their_own() -> None:
    root = drawn(timeline_svg(simulate(Schedule.from_text("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"), ONE_TWO)))
    assert len({path.get("fill") for path in root.iter(f"{SVG}path")}) == 4
    assert "lighter: later stage of its device" in texts(root)
    assert palette.KIND_COLORS[0] in {path.get("fill") for path in root.iter(f"{SVG}path")}
