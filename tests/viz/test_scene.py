"""The bars that every view draws, and their colours."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import numpy as np
import pytest

from pipesim import Cluster, Kind, Link, Schedule, Timeline, UniformCosts, generate, simulate
from pipesim.memory import CATEGORIES
from pipesim.viz import palette
from pipesim.viz.axes import printable, ticks, time_axis
from pipesim.viz.scene import bins, grid, scene, waits

ONE_TWO = UniformCosts(forward=1, backward=2)

# Device 0 holds stages 0 and 3, device 1 holds 1 and 2; one slot of device 0 is a pair.
FOLDED = """
device 0 | 0F0 3F0 0F1 (0F2;3B0)OVERLAP_F_B 3F1 0B0 3B1 3F2 3B2 0B1 0B2
device 1 | 1F0 2F0 1F1 2F1 2B0 1F2 1B0 2F2 2B1 1B1 2B2 1B2
"""


def folded() -> Timeline:
    return simulate(Schedule.from_text(FOLDED), UniformCosts(forward=1, backward=2, overlap=2.5))


def test_bars_of_gpipe_by_hand() -> None:
    # F = 1, B = 2:   device 0 | F0 F1 .  .  .  B0 B0 B1 B1
    #                 device 1 | .  F0 F1 B0 B0 B1 B1 .  .
    bars = scene(simulate(generate("gpipe", 2, 2), ONE_TWO))
    found = [(str(bars.op(i)), int(bars.device[i]), float(bars.start[i]), float(bars.end[i])) for i in range(len(bars))]
    assert found == [
        ("0F0", 0, 0, 1),
        ("0F1", 0, 1, 2),
        ("0B0", 0, 5, 7),
        ("0B1", 0, 7, 9),
        ("1F0", 1, 1, 2),
        ("1F1", 1, 2, 3),
        ("1B0", 1, 3, 5),
        ("1B1", 1, 5, 7),
    ]
    assert bars.span == 9
    assert bars.kinds == [Kind.F, Kind.B]


def test_devices_stand_from_top_to_bottom_in_the_order_of_their_numbers() -> None:
    # V05, p = 12: 0, 1, 2, ..., 10, 11 and not 0, 1, 10, 11, 2
    bars = scene(simulate(generate("1f1b", 12, 3), ONE_TWO))
    for device in range(12):
        own = bars.device == device
        assert own.sum() == 6
        assert bars.top[own].min() >= device
        assert bars.bottom[own].max() <= device + 1
        assert (bars.stage[own] == device).all()


def test_halves_of_a_pair_share_time_and_height() -> None:
    bars = scene(folded())
    names = [str(bars.op(i)) for i in range(len(bars))]
    first, second, single = names.index("0F2"), names.index("3B0"), names.index("0F1")
    assert (bars.start[first], bars.end[first]) == (bars.start[second], bars.end[second])
    assert bars.end[first] - bars.start[first] == 2.5
    assert bars.slot[first] == bars.slot[second]
    # the first half is above the second, and together they are as high as a bar
    assert bars.bottom[first] == bars.top[second]
    assert (bars.top[first], bars.bottom[second]) == (bars.top[single], bars.bottom[single])
    # every other bar has its full height
    full = bars.bottom[single] - bars.top[single]
    assert np.isclose(bars.bottom - bars.top, full).sum() == len(bars) - 2


def test_chunks_count_the_stages_of_a_device() -> None:
    bars = scene(folded())
    assert bars.num_chunks == 2
    assert {(int(d), int(s), int(c)) for d, s, c in zip(bars.device, bars.stage, bars.chunk, strict=True)} == {
        (0, 0, 0),
        (0, 3, 1),
        (1, 1, 0),
        (1, 2, 1),
    }
    shades = {(group.kind, group.shade): group.color for group in bars.groups}
    assert set(shades) == {(kind, shade) for kind in (Kind.F, Kind.B) for shade in (0, 1)}
    assert len(set(shades.values())) == 4


def test_groups_hold_every_bar_once() -> None:
    bars = scene(folded())
    members = np.concatenate([group.bars for group in bars.groups])
    assert sorted(members.tolist()) == list(range(len(bars)))


def test_steps_follow_each_other() -> None:
    # one step takes (m + p - 1)(F + B) + U = 5 · 3 + 1; the barrier keeps steps apart
    bars = scene(simulate(generate("gpipe", 2, 4), UniformCosts(forward=1, backward=2, optimizer=1), steps=3))
    assert [float(bars.start[bars.step == step].min()) for step in range(3)] == [0, 16, 32]
    assert bars.span == 48


def test_times_count_from_the_first_start() -> None:
    run = folded()
    times = {name: getattr(run, name) + 1e6 for name in ("start", "end", "sent", "departed", "arrived")}
    late = dataclasses.replace(run, **times)
    assert scene(late).start.tolist() == scene(run).start.tolist()
    assert scene(late).origin == 1e6
    assert [waits(late)(slot, 0) for slot in range(5)] == [waits(run)(slot, 0) for slot in range(5)]


def test_what_an_op_waited_for() -> None:
    # 2 devices, 1 microbatch, F = 1, B = 2, a hop of 0.25: 1F0 [1.25, 2.25], 1B0 [2.25, 4.25], 0B0 from 4.5
    why = waits(simulate(generate("gpipe", 2, 1), UniformCosts(forward=1, backward=2, latency=0.25)))
    assert why(0, 0) == "no wait: needs nothing from other devices"
    assert why(1, 0) == "waited 3.5 for 1B0 of device 1 (sent 4.25, arrived 4.5)"
    assert why(2, 0) == "waited 1.25 for 0F0 of device 0 (sent 1, arrived 1.25)"


def test_what_an_update_waited_for() -> None:
    # gpipe 2 x 1 with U: device 1 has done its backward at 4, device 0 at 6, and both update then; the next step begins at 7
    why = waits(simulate(generate("gpipe", 2, 1), UniformCosts(forward=1, backward=2, optimizer=1), steps=2))
    device_1_update = 5
    assert why(device_1_update, 0) == "waited 2 for all devices (barrier)"
    assert why(3, 1) == "waited 1 for 0F0 of device 0 (sent 8, arrived 8)"


def test_what_a_backward_waited_for_whose_activation_was_away() -> None:
    # one device, F = 1: F0 [0, 1], F1 [1, 2], B1 [2, 4]; the activation of 0 (2 units, 1 unit per slot) leaves at 1 and is
    # with the host at 3, and comes back from the end of B1, 4, to 6
    schedule = Schedule.from_text("0F0 0OFFLOAD0 0F1 0B1 0RELOAD0 0B0")
    cluster = Cluster(host=Link(bandwidth=1.0), unit="slot")
    why = waits(simulate(schedule, UniformCosts(forward=1, backward=2, activation=2), cluster=cluster))
    assert why(3, 0) == "waited 2 for 0RELOAD0 (there at 6)"


def test_bins_show_kinds_as_often_as_they_last() -> None:
    # 1F1B, p = 2, m = 1000, F = 1, B = 2: each device is busy for 3 m of 3 (m + p - 1); F and B last as 1 to 2
    run = simulate(generate("1f1b", 2, 1000), ONE_TWO)
    count = 400
    table = bins(scene(run), count)
    forward, backward = int(Kind.F) * palette.SHADES, int(Kind.B) * palette.SHADES
    for line in table:
        assert abs((line == forward).sum() - count * 1000 / 3003) <= 2
        assert abs((line == backward).sum() - count * 2000 / 3003) <= 2


def test_bins_are_the_bars_where_there_are_enough_of_them() -> None:
    run = folded()
    bars = scene(run)
    count = int(bars.span * 20)
    table = bins(bars, count)
    middle = (np.arange(count) + 0.5) / 20
    expected = np.full(table.shape, -1)
    for i in range(len(bars)):
        code = int(bars.kind[i]) * palette.SHADES + int(bars.chunk[i])
        inside = (middle > bars.start[i]) & (middle < bars.end[i])
        for half, edge in enumerate((0.3, 0.7)):  # a quarter into either half band
            if bars.top[i] < bars.device[i] + edge < bars.bottom[i]:
                expected[2 * bars.device[i] + half, inside] = code
    assert (table == expected).all()


def test_bins_keep_an_op_that_is_shorter_than_a_span() -> None:
    # stage 1 takes a billionth of stage 0's time
    run = simulate(generate("gpipe", 2, 1), UniformCosts(forward=[1, 1e-9], backward=[2, 0]))
    table = bins(scene(run), 100)
    assert (table[2] >= 0).sum() == 1


def test_grid_of_a_schedule_that_lists_communication() -> None:
    bars = grid(Schedule.from_text("0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0"))
    assert bars.start.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [bars.label(i) for i in range(4)] == ["0", "SEND_F0", "RECV_B0", "0"]
    assert grid(Schedule.from_text(FOLDED)).start[:5].tolist() == [0, 1, 2, 3, 3]


@pytest.mark.parametrize(
    ("span", "unit", "expected"),
    [(33, "slot", (1, "slots")), (2.5, "s", (1, "s")), (0.5, "s", (1e3, "ms")), (2e-4, "s", (1e6, "µs")), (2e-9, "s", (1e6, "µs"))],
)
def test_unit_of_the_time_axis(span: float, unit: str, expected: tuple[float, str]) -> None:
    assert time_axis(span, unit) == expected


@pytest.mark.parametrize("span", [1e-3, 0.7, 1, 33, 999, 1e6])
def test_ticks_are_few_round_and_inside(span: float) -> None:
    values = ticks(span, 12)
    assert 5 <= len(values) <= 13
    assert values[0] == 0
    assert span - (values[1] - values[0]) < values[-1] <= span
    assert float(f"{values[1]:.0e}") == values[1]


def test_names_from_files_become_printable() -> None:
    # V04, and a right-to-left override, which would reorder a line
    assert printable("F0\n\x01") == "F0\\n\\x01"
    assert printable('前向 B"0\\') == '前向 B"0\\'
    assert printable("a\u202eb\ud800") == "a\\u202eb\\ud800"


# -- colours -----------------------------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes 2009, "A Physiologically-based Model for Simulation of Color Vision Deficiency", severity 1.
VISION = {
    "all cones": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}


def linear(color: str) -> np.ndarray:
    value = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear sRGB, D65."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.maximum(to_xyz @ rgb, 0.0089 * np.array([0.9505, 1, 1.089])) / np.array([0.9505, 1, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_kinds_are_told_apart_whatever_cones_an_eye_has(vision: str) -> None:
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.U, Kind.SEND_F, Kind.SEND_B, Kind.REDUCE_GRAD, Kind.UNSHARD, Kind.OFFLOAD)
    seen = {kind: lab(np.clip(VISION[vision] @ linear(palette.color(kind)), 0, 1)) for kind in kinds}
    # a distance of about 2.3 is just noticeable; legends need several times that
    for one, other in combinations(kinds, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 12, f"{one.name} and {other.name}"


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio."""
    low, high = sorted(float(linear(color) @ [0.2126, 0.7152, 0.0722]) + 0.05 for color in (one, other))
    return high / low


def test_text_in_bars_has_contrast() -> None:
    for kind in Kind:
        for count in range(1, 9):
            for chunk in range(count):
                background = palette.color(kind, chunk, count)
                assert contrast(background, palette.text_color(background)) >= 4.5  # WCAG 2 level AA


def test_shades_of_four_stages_differ_and_keep_the_first() -> None:
    for kind in (Kind.F, Kind.B, Kind.I, Kind.W):
        for count in (2, 3, 4):
            shades = [palette.color(kind, chunk, count) for chunk in range(count)]
            assert shades[0] == palette.KIND_COLORS[kind]
            light = [lab(linear(shade))[0] for shade in shades]
            assert min(np.diff(light)) > 4


def test_both_ends_of_a_message_have_one_colour_and_lanes_show_on_white_and_on_dark() -> None:
    assert palette.color(Kind.SEND_F) == palette.color(Kind.RECV_F)
    assert palette.color(Kind.SEND_B) == palette.color(Kind.RECV_B)
    for kind in Kind:
        if kind > Kind.U:
            assert contrast(palette.color(kind), "#ffffff") > 2
            assert contrast(palette.color(kind), "#16181c") > 2


def test_every_kind_and_category_has_colour_and_name() -> None:
    assert set(palette.KIND_COLORS) == set(palette.KIND_LABELS) == set(Kind)
    assert set(palette.MEMORY_COLORS) == set(CATEGORIES)
