"""Lanes of communication, in every view."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection

from pipesim import Cluster, Communication, Kind, Link, Schedule, Timeline, UniformCosts, generate, simulate
from pipesim.viz import interactive, mpl, palette, svg
from pipesim.viz.lanes import LANES, spread, transfers
from pipesim.viz.scene import scene, waits
from pipesim.viz.trace import write_trace


@pytest.fixture(scope="module")
def by_hand() -> Any:
    spec = importlib.util.spec_from_file_location("_traffic", Path(__file__).parent.parent / "traffic.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def queued() -> Timeline:
    """0F0 0-1, 0F1 1-2. Messages of 3 over a link of 2 and a hop of 0.5: taken at 1 and 2.5, there at 3 and 4.5."""
    return simulate(Schedule.from_text("0F0 0F1\n1F0 1F1"), UniformCosts(message=3, bandwidth=2, latency=0.5))


def test_a_message_is_at_both_ends_from_its_link_to_its_arrival() -> None:
    found = transfers(queued())
    rows = [
        (str(found.op(i)), int(found.device[i]), int(found.peer[i]), found.begin[0, i], found.finish[0, i], found.waited[0, i], found.size[i])
        for i in range(len(found))
    ]
    assert rows == [
        ("0SEND_F0", 0, 1, 1, 3, 0, 3),
        ("0SEND_F1", 0, 1, 2.5, 4.5, 0.5, 3),
        ("1RECV_F0", 1, 0, 1, 3, 0, 3),
        ("1RECV_F1", 1, 0, 2.5, 4.5, 0.5, 3),
    ]


def test_sends_and_receives_with_times_of_their_own_take_the_place_of_messages(by_hand: Any) -> None:
    """The receive was posted at 0 and had its stream until 3."""
    ops = [(Kind.SEND_F, 0, 0, 0, 1, 0, 1.0, 3.0), (Kind.RECV_F, 1, 1, 0, 0, 0, 0.0, 3.0), (Kind.REDUCE_GRAD, 1, 1, -1, -1, -1, 6.0, 8.0)]
    found = transfers(by_hand.with_traffic(queued(), ops))
    assert [(str(found.op(i)), found.begin[0, i], found.finish[0, i]) for i in range(len(found))] == [
        ("0SEND_F0", 1, 3),
        ("1RECV_F0", 0, 3),
        ("1REDUCE_GRAD", 6, 8),
    ]
    assert not found.waited.any()


def test_collectives_stand_beside_messages_that_have_only_their_own_times(by_hand: Any) -> None:
    run = by_hand.with_traffic(queued(), [(Kind.REDUCE_GRAD, 1, 1, -1, -1, -1, 6.0, 8.0)])
    assert np.bincount(transfers(run).kind, minlength=len(Kind))[[Kind.SEND_F, Kind.RECV_F, Kind.REDUCE_GRAD]].tolist() == [2, 2, 1]


def test_offloads_have_a_lane() -> None:
    schedule = Schedule.from_text("0F0 0OFFLOAD0 0RELOAD0 0B0")
    run = simulate(schedule, UniformCosts(), cluster=Cluster(host=Link(0.5), unit="slot"))
    bars = scene(run, lanes=True)
    assert bars.lanes == ("offload",)
    assert [str(bars.op(i)) for i in range(2, 4)] == ["0OFFLOAD0", "0RELOAD0"]


def test_bars_of_lanes_lie_below_compute_and_within_their_device() -> None:
    run = simulate(generate("zb-v", 4, 8), UniformCosts(latency=1.5, reduction=3, optimizer=1), steps=2)
    bars = scene(run, lanes=True)
    assert bars.lanes == ("send", "receive", "collective")
    lane = bars.transfer >= 0
    assert (bars.slot[lane] == -1).all()
    assert (bars.slot[~lane] >= 0).all()
    top, bottom = bars.top - bars.device, bars.bottom - bars.device
    assert bottom[~lane].max() == pytest.approx(bars.compute_band[1])
    assert bars.compute_band[1] < top[lane].min()
    assert bottom[lane].max() <= 1
    kind = bars.kind
    # from above: what is sent, what is received, what is collective
    of = {name: lane & np.isin(kind, [int(one) for one in kinds]) for name, kinds in LANES.items()}
    assert bottom[of["send"]].max() <= top[of["receive"]].min()
    assert bottom[of["receive"]].max() <= top[of["collective"]].min()
    # compute is what it is without lanes, but for its height
    plain = scene(run)
    for name in ("device", "start", "end", "kind", "stage", "chunk", "microbatch", "step", "slot"):
        assert getattr(bars, name)[~lane].tolist() == getattr(plain, name).tolist()
    assert plain.lanes == ()


def test_half_of_a_pair_is_known_with_lanes_and_without() -> None:
    run = simulate(Schedule.from_text("(0F0;0F1)PAIR 0B0 0B1\n1F0 1B0 1F1 1B1"), UniformCosts(latency=1))
    for lanes in (False, True):
        bars = scene(run, lanes=lanes)
        assert [str(bars.op(bar)) for bar in np.flatnonzero(bars.halved)] == ["0F0", "0F1"]


def fan(messages: int) -> Timeline:
    """As many activations of one device, all at once on the way to as many others, 10 each."""
    orders = "\n".join(["0F0", *(f"{stage}F0" for stage in range(1, messages + 1))])
    graph = [(0, stage) for stage in range(1, messages + 1)]
    return simulate(Schedule.from_text(orders, graph=graph), UniformCosts(latency=10))


@pytest.mark.parametrize(("messages", "rows"), [(2, 2), (5, 5), (8, 8), (12, 8)])
def test_every_message_at_once_has_a_row(messages: int, rows: int) -> None:
    bars = scene(fan(messages), lanes=True)
    sends = bars.kind == int(Kind.SEND_F)
    own = sorted(set(zip(bars.top[sends].tolist(), bars.bottom[sends].tolist(), strict=True)))
    assert len(own) == rows
    assert all(lower <= upper + 1e-9 for (_, lower), (upper, _) in itertools.pairwise(own))
    assert bars.lanes == (("send" if messages <= 8 else "send (up to 12 at once, in 8 rows)"), "receive")


def test_rows_are_high_enough_to_be_counted() -> None:
    """Two pixels at 150 dots per inch: 0.96 points."""
    axes = mpl.gantt(fan(8), lanes=True)
    axes.figure.draw_without_rendering()
    (sends,) = (found for found in axes.collections if found.get_label() == "send activation")
    assert min(path.get_extents(axes.transData).height for path in sends.get_paths()) * 72 / axes.figure.dpi > 0.96


def test_lanes_say_what_takes_no_time() -> None:
    """A message of no bytes leaves at once, and only the hop takes time: on streams a SEND is done then, the RECV when it is there."""
    run = simulate(generate("1f1b", 4, 8), UniformCosts(latency=0.3), communication=Communication(stream="device", receives="early"))
    assert scene(run, lanes=True).lanes == ("receive (sends take no time)",)


def test_what_takes_no_time_has_no_bar() -> None:
    assert scene(simulate(generate("1f1b", 2, 2), UniformCosts()), lanes=True).lanes == ()


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.001, 10)), max_size=60))
def test_lanes_never_overlap_and_are_as_few_as_can_be(intervals: list[tuple[float, float]]) -> None:
    begin = np.array([start for start, _ in intervals])
    finish = np.array([start + length for start, length in intervals])
    lanes = spread(begin, finish)
    for lane in set(lanes.tolist()):
        own = np.flatnonzero(lanes == lane)
        order = own[np.argsort(begin[own])]
        assert (begin[order][1:] >= finish[order][:-1]).all()
    most = max((int(((begin <= at) & (at < finish)).sum()) for at in begin), default=0)
    assert int(lanes.max(initial=-1)) + 1 == most


# -- pictures ------------------------------------------------------------------------------------------------------------------


def reduced() -> Timeline:
    return simulate(generate("1f1b", 4, 8), UniformCosts(forward=1, backward=2, latency=0.5, reduction=4))


def drawn_kinds(axes: Any) -> set[str]:
    return {str(found.get_label()) for found in axes.collections if isinstance(found, PolyCollection)} & set(palette.KIND_LABELS.values())


MESSAGES = {"send activation", "receive activation", "send gradient", "receive gradient"}


def test_a_gantt_chart_has_lanes_where_there_are_collectives_and_where_they_are_asked_for() -> None:
    compute = {"F forward", "B backward"}
    plain = simulate(generate("1f1b", 4, 8), UniformCosts(forward=1, backward=2, latency=0.5))
    assert drawn_kinds(mpl.gantt(plain)) == compute
    assert drawn_kinds(mpl.gantt(plain, lanes=True)) == compute | MESSAGES
    assert drawn_kinds(mpl.gantt(reduced())) == compute | MESSAGES | {"gradient reduction"}
    assert drawn_kinds(mpl.gantt(reduced(), lanes=False)) == compute
    legend = [text.get_text() for text in mpl.gantt(reduced()).get_legend().get_texts()]
    assert legend == ["F forward", "B backward", "gradient reduction", "activation message", "gradient message"]
    assert mpl.gantt(reduced()).get_xlabel() == "time (slots) · below each device: send, receive, collective"


def test_a_chart_with_lanes_is_taller() -> None:
    tall, low = (mpl.figure(reduced(), lanes=lanes).get_figheight() for lanes in (None, False))
    assert tall > low


def test_an_svg_has_them_too() -> None:
    with_lanes, without = svg.timeline_svg(reduced()), svg.timeline_svg(reduced(), lanes=False)
    assert palette.color(Kind.REDUCE_GRAD) in with_lanes
    assert palette.color(Kind.REDUCE_GRAD) not in without
    assert "below each device: send, receive, collective" in with_lanes
    # each message twice, in 8 microbatches over 3 hops each way, and 4 reductions
    bars = sum(path.count("M") for path in re.findall(r'<path [^>]*d="([^"]*)"', with_lanes))
    assert bars == 64 + 2 * 2 * 8 * 3 + 4


def test_hover_says_where_a_message_goes_and_how_long_it_waited() -> None:
    shown = interactive.figure(queued(), lanes=True)
    texts = {trace.name: list(trace.hovertext) for trace in shown.data if trace.hovertext is not None}
    assert texts["send activation"][1] == ("<b>0SEND_F1</b>, device 0<br>start 2.5, end 4.5, duration 2<br>to device 1, 3 units, ready 0.5 before")
    assert texts["receive activation"][0].endswith("<br>from device 0, 3 units")
    reductions = {trace.name: list(trace.hovertext) for trace in interactive.figure(reduced()).data if trace.hovertext is not None}
    assert reductions["gradient reduction"][0].startswith("<b>0REDUCE_GRAD0</b>, device 0<br>")


def test_a_page_of_paths_draws_lanes_and_points_at_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interactive, "BARS", 10)
    shown = interactive.figure(reduced())
    assert {shape.name for shape in shown.layout.shapes} == {"F forward", "B backward", "gradient reduction"} | MESSAGES
    (heatmap,) = (trace for trace in shown.data if trace.type == "heatmap")
    assert all("SEND" not in text and "REDUCE" not in text for text in np.unique(heatmap.text[heatmap.text != ""]))
    monkeypatch.setattr(interactive, "PATHS", 20)
    assert not interactive.figure(reduced()).layout.shapes


# -- traces --------------------------------------------------------------------------------------------------------------------


def events(run: Timeline, tmp_path: Path) -> list[dict[str, Any]]:
    write_trace(run, tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"communication": Communication(stream="device", receives="early")},
        {"communication": Communication(sends="rendezvous")},
        {"communication": Communication(batched=True), "steps": 2},
        {"communication": Communication(blocking=True, shape_messages=True)},
    ],
)
def test_a_trace_has_a_thread_for_every_lane_and_nothing_overlaps_on_it(options: dict[str, Any], tmp_path: Path) -> None:
    costs = UniformCosts(forward=1, backward=2, latency=0.4, message=1, bandwidth=2, reduction=3, buckets=2)
    run = simulate(generate("1f1b", 4, 8), costs, **options)
    found = events(run, tmp_path)
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in found if event["ph"] == "M" and event["name"] == "thread_name"}
    assert set(slices) <= set(names)
    for lane in slices.values():
        lane.sort()
        assert all(after[0] >= before[1] for before, after in itertools.pairwise(lane))
    for device in range(4):
        assert sum(end - start for start, end in slices[device, 0]) == pytest.approx(24e3 * run.steps)
        (collective,) = (place for place, name in names.items() if place[0] == device and name == "collective")
        assert sum(end - start for start, end in slices[collective]) == pytest.approx(3e3 * run.steps)
    # arrows go forward in time: out of a producer, through the receive, into the consumer
    arrows: dict[int, dict[str, float]] = defaultdict(dict)
    for event in found:
        if event["ph"] in "stf":
            arrows[event["id"]][event["ph"]] = event["ts"]
    assert len(arrows) == len(run.messages) * run.steps
    for arrow in arrows.values():
        assert arrow["s"] <= arrow.get("t", arrow["s"]) <= arrow["f"]  # a receive of what was there took no time, so it has no slice
    assert any("t" in arrow for arrow in arrows.values())


def test_a_collective_in_a_trace(tmp_path: Path) -> None:
    """D01: device 0 is done at 33, its reduction of 4 at 37."""
    run = simulate(generate("1f1b", 4, 8), UniformCosts(forward=1, backward=2, reduction=4))
    (own,) = (event for event in events(run, tmp_path) if event.get("cat") == "collective" and event["pid"] == 0)
    assert (own["ts"], own["dur"], own["name"], own["args"]) == (33e3, 4e3, "0REDUCE_GRAD0", {"stage": 0})


# -- what an op waited for -----------------------------------------------------------------------------------------------------


def test_what_an_op_waited_for() -> None:
    """One device with weights that take 2: 0F0 2-3, 0B0 3-5, its reduction 5-9, 0U0 9-10. It is alone, so there is no wait at the barrier."""
    schedule = Schedule.from_text("0UNSHARD 0F0 0B0 0U0")
    why = waits(simulate(schedule, UniformCosts(forward=1, backward=2, optimizer=1, unshard=2, reduction=4), barrier=False))
    assert [why(slot, 0) for slot in range(3)] == [
        "waited 2 for 0UNSHARD (done at 2)",
        "no wait: needs nothing from other devices",
        "waited 4 for 0REDUCE_GRAD0 (done at 9)",
    ]


def test_a_lane_that_was_held_says_so() -> None:
    """GPipe, p=2, m=2, hop 0.5: 0F0 0-1, held until 1.5, 0F1 1.5-2.5."""
    run = simulate(generate("gpipe", 2, 2), UniformCosts(latency=0.5), communication=Communication(blocking=True, sends="rendezvous"))
    assert waits(run)(1, 0) == "waited 0.5 for the lane, which a message of its own held"
