"""Pictures with matplotlib: few artists, no op lost, the same run the same file."""

from __future__ import annotations

import dataclasses
import io
import itertools
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from pipesim import Cluster, Schedule, ScheduleError, Timeline, UniformCosts, generate, simulate

pytest.importorskip("matplotlib")

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.style import context

from pipesim.viz import mpl, palette

ONE_TWO = UniformCosts(forward=1, backward=2)
SECONDS = UniformCosts(forward=0.010, backward=0.020, activation=3e9, weights=2e9, message=1e8, latency=0.001, unit="s")


def pixels(figure: Figure) -> np.ndarray:
    """(height, width, 3) what is seen."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="rgba", dpi=100)
    width, height = (figure.get_size_inches() * 100).astype(int)
    return np.frombuffer(buffer.getvalue(), np.uint8).reshape(height, width, 4)[:, :, :3].astype(int)


def near(image: np.ndarray, color: str) -> np.ndarray:
    """Where the picture has the hue of a colour, mixed with at most as much of another."""
    wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)])
    share = ((255 - image) @ (255 - wanted)) / ((255 - wanted) @ (255 - wanted))  # on white, what part of it is the colour
    rest = np.abs(255 - image - share[:, :, None] * (255 - wanted)).max(axis=2)
    return (share > 0.3) & (rest < 20)


@pytest.fixture(scope="module")
def ten_thousand() -> Timeline:
    return simulate(generate("1f1b", 20, 250), ONE_TWO)


def test_few_artists_for_many_ops(ten_thousand: Timeline) -> None:
    # V09: at most devices x kinds + a constant
    assert ten_thousand.schedule.num_slots == 10_000
    axes = mpl.gantt(ten_thousand)
    assert len(axes.get_children()) <= 20 * 2 + 20
    bars = [found for found in axes.collections if isinstance(found, PolyCollection) and found.get_label() in palette.KIND_LABELS.values()]
    assert [(found.get_label(), len(found.get_paths())) for found in bars] == [("F forward", 5000), ("B backward", 5000)]


def test_devices_from_top_to_bottom() -> None:
    # V05, p = 12
    axes = mpl.gantt(simulate(generate("1f1b", 12, 3), ONE_TWO))
    axes.figure.draw_without_rendering()
    height = {label.get_text(): axes.transData.transform((0, tick))[1] for label, tick in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)}
    assert sorted(height, key=height.__getitem__, reverse=True) == [f"device {device}" for device in range(12)]
    # and the bars stand beside their names: device 11 starts last
    (forward,) = [found for found in axes.collections if found.get_label() == "F forward"]
    late = max((path.get_extents() for path in forward.get_paths()), key=lambda box: box.x0)
    assert 11 < late.y0 < late.y1 < 12


def test_places_of_bars() -> None:
    # gpipe 2 x 1: F0 at 0, on device 1 at 1; B0 at 2 on device 1, at 4 on device 0
    axes = mpl.gantt(simulate(generate("gpipe", 2, 1), ONE_TWO))
    boxes = {
        found.get_label(): [
            (float(path.vertices[:, 0].min()), float(path.vertices[:, 0].max()), int(path.vertices[:, 1].mean())) for path in found.get_paths()
        ]
        for found in axes.collections
    }
    assert boxes["F forward"] == [(0, 1, 0), (1, 2, 1)]
    assert boxes["B backward"] == [(4, 6, 0), (2, 4, 1)]
    assert axes.get_xlim() == pytest.approx((0, 6), abs=0.05)
    assert axes.get_ylim() == (2, 0)


@pytest.mark.parametrize("length", [0, 1e-6])
def test_an_op_thinner_than_a_pixel_is_seen(length: float) -> None:
    # 8 updates on 2 devices, each a millionth of a slot or nothing at all
    run = simulate(generate("pipedream", 2, 4), UniformCosts(forward=1, backward=2, optimizer=length))
    axes = mpl.gantt(run, labels=False)
    axes.legend_.remove()
    seen = near(pixels(axes.figure), palette.KIND_COLORS[5])
    for device in range(2):
        line = seen[int(seen.shape[0] - axes.transData.transform((0, device + 0.5))[1])]
        marks = np.flatnonzero(line[:-1] & ~line[1:])
        assert len(marks) == 4


def test_every_kind_of_a_dense_run_is_seen() -> None:
    # 2 000 F and B on a device of about 850 pixels: outlines of one must not cover the other
    axes = mpl.gantt(simulate(generate("1f1b", 1, 2000), UniformCosts(forward=1, backward=1)))
    axes.legend_.remove()
    image = pixels(axes.figure)
    x, y = axes.transData.transform([(1000, 0.5), (3000, 0.5)]).T.astype(int)
    strip = image[image.shape[0] - y[0], x[0] : x[1]].mean(axis=0)
    forward, backward = (np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) for color in ("#0072b2", "#009e73"))
    assert np.abs(strip - (forward + backward) / 2).max() < 25


def test_labels_where_they_fit_and_only_there() -> None:
    def labels(forward: float) -> list[str]:
        return [text.get_text() for text in mpl.gantt(simulate(generate("gpipe", 1, 8), UniformCosts(forward=forward, backward=1))).texts]

    numbers = [str(number) for number in range(8)]
    assert sorted(labels(1)) == sorted(numbers + numbers)
    assert sorted(labels(0.01)) == numbers  # only B
    run = simulate(generate("gpipe", 1, 8), ONE_TWO)
    assert not mpl.gantt(run, labels=False).texts


def test_labels_stay_inside_their_bars() -> None:
    axes = mpl.gantt(simulate(generate("1f1b", 6, 20), ONE_TWO))
    axes.figure.draw_without_rendering()
    assert axes.texts
    boxes = [
        path.get_extents(axes.transData)
        for found in axes.collections
        if found.get_label() in palette.KIND_LABELS.values()
        for path in found.get_paths()
    ]
    for text in axes.texts:
        extent = text.get_window_extent()
        assert any(box.x0 <= extent.x0 and extent.x1 <= box.x1 and box.y0 <= extent.y0 and extent.y1 <= box.y1 for box in boxes)


def test_axes_of_ones_own() -> None:
    figure = Figure()
    axes = figure.add_subplot()
    run = simulate(generate("gpipe", 2, 2), ONE_TWO)
    assert run.plot(ax=axes) is axes
    assert run.plot().figure is not figure


def test_shades_for_the_stages_of_a_device() -> None:
    axes = mpl.gantt(simulate(Schedule.from_text("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"), ONE_TWO))
    colors = {tuple(found.get_facecolor()[0]) for found in axes.collections if found.get_label() in palette.KIND_LABELS.values()}
    assert len(colors) == 4
    assert [text.get_text() for text in axes.legend_.get_texts()] == ["F forward", "B backward", "lighter: later stage of its device"]


def test_memory_of_all_devices() -> None:
    # 1F1B holds p - i activations on device i, and nothing at the end
    axes = mpl.memory(simulate(generate("1f1b", 4, 8), ONE_TWO))
    assert [float(line.get_ydata().max()) for line in axes.lines] == [4, 3, 2, 1]
    # device 0: F0..F3 at 0, 1, 2, 3, full until B4 ends at 24 (no F is left for its place)
    x, y = axes.lines[0].get_data()
    at = [float(y[np.flatnonzero(x <= time)[-1]]) for time in (0.5, 1.5, 2.5, 3.5, 15.5, 23.5, 24.5)]
    assert at == [1, 2, 3, 4, 4, 4, 3]
    # a place that is taken again at once is no dip
    assert set(np.unique(y[(x > 3) & (x < 24)])) == {4}
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("time (slots)", "memory (units)")


def test_of_many_devices_four_are_shown_and_named() -> None:
    """GPipe on 8 devices, all with the same peak but device 5: bytes of activations are those of a stage."""
    run = simulate(generate("gpipe", 8, 4), UniformCosts(forward=1, backward=2, activation=[1, 1, 1, 1, 1, 3, 1, 1]))
    axes = mpl.memory(run)
    named = {text.get_text(): text.get_color() for text in axes.texts}
    assert set(named) == {"device 0: 4 units", "device 4: 4 units", "device 5: 12 units", "device 7: 4 units"}
    assert axes.get_title(loc="left") == "memory, most on device 5: peak_memory 12 units"
    looks = {str(line.get_label()): (line.get_color(), line.get_linewidth(), line.get_zorder()) for line in axes.lines}
    assert list(looks) == [f"device {device}" for device in range(8)]
    for name, color in named.items():
        assert looks[name.partition(":")[0]][0] == color
    assert len(set(named.values())) == 4
    assert len({looks[f"device {device}"] for device in (1, 2, 3, 6)}) == 1
    assert looks["device 5"][1:] == max(look[1:] for look in looks.values())
    assert [text.get_text() for text in axes.legend_.get_texts()] == ["4 other devices"]


def test_names_of_alike_curves_do_not_cover_each_other() -> None:
    axes = mpl.memory(simulate(generate("gpipe", 8, 4), ONE_TWO))
    axes.figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 3  # the highest is the first
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_a_figure_without_memory() -> None:
    (axes,) = mpl.figure(simulate(generate("1f1b", 4, 8), ONE_TWO), memory=False).axes
    assert axes.get_xlabel() == "time (slots)"


def test_memory_of_one_device_by_category() -> None:
    axes = mpl.memory(simulate(generate("1f1b", 2, 4), SECONDS), device=0)
    names = [text.get_text() for text in axes.legend_.get_texts()]
    assert names == ["weights", "activations", "communication"]
    # 2 activations of 3 GB, 2 GB of weights; at most one message of 0.1 GB each way
    tops = [max(path.vertices[:, 1].max() for path in found.get_paths()) for found in axes.collections[:3]]
    assert tops[0] == pytest.approx(2)
    assert tops[1] == pytest.approx(8)
    assert 8 < tops[2] <= 8.2 + 1e-9
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("time (ms)", "memory (GB)")
    with pytest.raises(ScheduleError, match="no device 2"):
        mpl.memory(simulate(generate("1f1b", 2, 4), SECONDS), device=2)


def test_capacity_is_a_line() -> None:
    axes = mpl.memory(simulate(generate("gpipe", 2, 3), ONE_TWO, cluster=Cluster.uniform(memory=2)))
    assert [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"] == [2]
    assert "capacity 2" in [text.get_text() for text in axes.legend_.get_texts()]


def test_both_on_one_time_axis() -> None:
    figure = mpl.figure(simulate(generate("1f1b", 4, 8), SECONDS))
    upper, lower = figure.axes
    assert upper.get_xlabel() == lower.get_xlabel() == "time (ms)"
    upper.set_xlim(0, 100)
    assert lower.get_xlim() == (0, 100)
    figure.draw_without_rendering()
    assert upper.get_position().x0 == pytest.approx(lower.get_position().x0)
    assert upper.get_position().x1 == pytest.approx(lower.get_position().x1)


@pytest.mark.parametrize("form", ["png", "svg", "pdf"])
def test_the_same_run_is_the_same_file(tmp_path: Path, form: str) -> None:
    run = simulate(generate("1f1b", 3, 4), ONE_TWO)
    for name in ("a", "b"):
        mpl.save(run, tmp_path / f"{name}.{form}")
    data = (tmp_path / f"a.{form}").read_bytes()
    assert data == (tmp_path / f"b.{form}").read_bytes()
    assert data.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[form])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a.{form}", f"b.{form}"]


def test_large_svg_holds_an_image(tmp_path: Path) -> None:
    mpl.save(mpl.gantt(simulate(generate("1f1b", 8, 700), ONE_TWO)).figure, tmp_path / "a.svg")  # 11 200 bars
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert len(list(root.iter("{http://www.w3.org/2000/svg}image"))) == 1
    assert (tmp_path / "a.svg").stat().st_size < 1_000_000


def test_huge_runs_are_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpl, "_SINGLE", 1000)
    axes = mpl.gantt(simulate(generate("gpipe", 2, 300), ONE_TWO))
    assert len(axes.images) == 1
    assert not [found for found in axes.collections if found.get_label() in palette.KIND_LABELS.values()]
    assert axes.get_xlim() == pytest.approx((0, 903), abs=5)  # (m + p - 1)(F + B)
    assert axes.get_ylim() == (2, 0)
    image = pixels(axes.figure)
    # device 0: F until 300, idle until 303 + 0, B from 303; device 1: F 1 to 301, B 301 to 901
    for device, time, color in ((0, 150, "#0072b2"), (0, 600, "#009e73"), (1, 150, "#0072b2"), (1, 600, "#009e73")):
        x, y = axes.transData.transform((time, device + 0.5)).astype(int)
        assert near(image, color)[image.shape[0] - y, x]


def test_other_endings_are_refused(tmp_path: Path) -> None:
    run = simulate(generate("1f1b", 2, 2), ONE_TWO)
    with pytest.raises(ScheduleError, match=r"\.png, \.svg or \.pdf"):
        mpl.save(run, tmp_path / "a.jpg")
    with pytest.raises(OSError, match="nowhere"):
        mpl.save(run, tmp_path / "nowhere" / "a.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["F0\n\x01", "前向", 'B"0\\', "$x_1$ $", "<script>"])
def test_any_name_can_be_drawn(tmp_path: Path, name: str) -> None:
    # V04; a dollar sign would start a formula, and fonts lack some scripts
    run = simulate(dataclasses.replace(generate("1f1b", 2, 2), name=name), ONE_TWO)
    mpl.save(run, tmp_path / "a.svg")
    ElementTree.parse(tmp_path / "a.svg")


def test_dark_styles_are_followed() -> None:
    run = simulate(generate("1f1b", 4, 8), ONE_TWO)
    with context("dark_background"):
        image = pixels(mpl.figure(run))
    assert image[0, 0].tolist() == [0, 0, 0]
    assert (image.min(axis=2) > 200).any()  # text


def test_pyplot_is_left_alone(tmp_path: Path) -> None:
    code = (
        "import sys, pipesim as ps; from pipesim.viz import mpl; "
        f"mpl.save(ps.simulate(ps.generate('1f1b', 2, 2)), {str(tmp_path / 'a.png')!r}); print('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
