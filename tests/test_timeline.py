"""Runs as data: saving, loading what may be damaged or hostile, comparing, columns."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipesim import Cluster, Kind, Schedule, ScheduleError, Timeline, UniformCosts, compare, generate, load, simulate

FB = UniformCosts(forward=1, backward=2)


@pytest.fixture
def run() -> Timeline:
    costs = UniformCosts(forward=[1, 1.5], backward=2, latency=0.25, weights=[3, 5], message=1)
    return simulate(generate("1f1b", 2, 3), costs, steps=2, cluster=Cluster.uniform(memory=8))


def same(a: Timeline, b: Timeline) -> bool:
    columns = all(np.array_equal(a.columns[name], b.columns[name]) for name in a.columns)
    return a.schedule == b.schedule and a.figures() == b.figures() and columns


# -- saving and loading --------------------------------------------------------------------------------------------------------


def test_a_saved_run_is_the_same_run(run: Timeline, tmp_path: Path) -> None:
    for name in ("run.json", "run.json.gz"):
        run.save(tmp_path / name)
        again = load(tmp_path / name)
        assert same(again, run)
        assert dict(again.info) == dict(run.info)
        assert again.capacity.tolist() == [8, 8]
        for device in range(2):
            assert again.memory(device).total.tolist() == run.memory(device).total.tolist()
    assert (tmp_path / "run.json.gz").read_bytes()[:2] == b"\x1f\x8b"


def test_the_same_run_is_the_same_file(run: Timeline, tmp_path: Path) -> None:
    run.save(tmp_path / "a.json.gz")
    run.save(tmp_path / "b.json.gz")
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_every_kind_of_schedule_survives(tmp_path: Path) -> None:
    diamond = Schedule.from_text("0F0 0B0\n1F0 1B0\n2F0 2B0\n3F0 3B0", graph=[(0, 1), (0, 2), (1, 3), (2, 3)], name="a, \"b\"\n'c' 前向")
    idle = Schedule.from_streams([[], ["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"], []])
    for schedule in (diamond, idle, generate("pipedream", 3, 5)):
        for costs in (FB, UniformCosts(forward=0, backward=0)):
            first = simulate(schedule, costs)
            first.save(tmp_path / "run.json")
            again = load(tmp_path / "run.json")
            assert same(first, again)
            assert again.schedule.name == schedule.name


def stored(run: Timeline, tmp_path: Path) -> dict[str, Any]:
    run.save(tmp_path / "run.json")
    return json.loads((tmp_path / "run.json").read_text())  # type: ignore[no-any-return]


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(data: dict[str, Any]) -> None:
        *way, last = path.split(".")
        for key in way:
            data = data[key]
        if value is KeyError:
            del data[last]
        else:
            data[last] = value

    return apply


@pytest.mark.parametrize(
    "field", ["format", "version", "schedule", "unit", "barrier", "source", "info", "steps", "start", "arrived", "footprint", "capacity"]
)
@pytest.mark.parametrize("value", [KeyError, None, [], {}, "x", -1, [[1], "x"], float("nan"), 10**400])
def test_wrong_fields_are_refused_or_harmless(run: Timeline, tmp_path: Path, field: str, value: Any) -> None:
    """Nothing but ScheduleError, and nothing that is not a run."""
    data = stored(run, tmp_path)
    change(field, value)(data)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    text_about_the_run = (field == "source" and value is not KeyError) or (field == "info" and value == {})
    if text_about_the_run:
        assert load(tmp_path / "bad.json").schedule == run.schedule
        return
    with pytest.raises(ScheduleError, match=r"bad\.json"):
        load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schedule.rows", "0F0,0B0"),
        ("schedule.rows", ["0F0,0X0", "1F0,1B0"]),
        ("schedule.rows", ["0F0,0B0"]),
        ("schedule.rows", [["0F0"], 3]),
        ("schedule.rows", []),
        ("schedule.rows", ["0F0,0F999999999", "1F0"]),
        ("schedule.graph", [[0, 1], [1, 0]]),
        ("schedule.graph", [[0, 1, 2]]),
        ("schedule.graph", [["a", "b"]]),
        ("schedule.graph", [[0, float("inf")]]),
        ("schedule.weights", "none"),
        ("schedule.weights", ["flush"]),
        ("schedule.offload_to", [[0, 99]]),
        ("schedule.offload_to", [[0]]),
        ("steps", 3),
        ("steps", True),
        ("steps", 2.0),
        ("steps", 10**6),
        ("start", [1.0, 2.0]),
        ("start", 1e9),  # every op would end before it starts
        ("footprint.kept", "many"),
        ("footprint.message", [1.0]),
        ("footprint.static", [1]),
        ("footprint.static", {"cheese": 1.0}),
        ("footprint.static.weights", [1.0, 2.0, 3.0]),
        ("capacity", [1.0]),
        ("capacity", [float("nan"), 1.0]),
        ("unit", "minutes"),
        ("barrier", 1),
    ],
)
def test_damage_deeper_in_the_file(run: Timeline, tmp_path: Path, path: str, value: Any) -> None:
    data = stored(run, tmp_path)
    change(path, value)(data)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(ScheduleError, match=r"bad\.json"):
        load(tmp_path / "bad.json")


@pytest.mark.parametrize(
    ("path", "value", "right"),
    [
        ("schedule", [], "an object"),
        ("schedule.rows", "0F0,0B0", "a list"),
        ("schedule.graph", 3, "a list"),
        ("footprint.static", [1], "an object"),
        ("capacity", 1.0, "a list"),
        ("info", None, "an object"),
        ("traffic", "none", "an object"),
    ],
)
def test_what_is_of_another_type_is_named(run: Timeline, tmp_path: Path, path: str, value: Any, right: str) -> None:
    data = stored(run, tmp_path)
    change(path, value)(data)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(ScheduleError) as caught:
        load(tmp_path / "bad.json")
    assert str(caught.value).endswith(f"is damaged: {path} is {value!r}; right is {right}")


def test_one_number_for_a_million_steps_of_a_large_schedule_is_not_unfolded(tmp_path: Path) -> None:
    data = stored(simulate(generate("gpipe", 4, 64), UniformCosts(forward=0, backward=0)), tmp_path)
    assert data["start"] == 0.0  # "all the same" is one number
    data["steps"] = 10**6
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(ScheduleError, match="more than the 100000000"):
        load(tmp_path / "bad.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"format": "other"}', "[" * 100_000, "1" * 10_000, "\x00", "NaN"])
def test_what_is_no_run_at_all(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=r"bad\.json"):
        load(path)


def test_a_truncated_file(run: Timeline, tmp_path: Path) -> None:
    run.save(tmp_path / "run.json.gz")
    whole = (tmp_path / "run.json.gz").read_bytes()
    path = tmp_path / "bad.json.gz"
    for size in (1, 2, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ScheduleError, match=r"bad\.json"):
            load(path)
    path.write_bytes(gzip.compress(gzip.decompress(whole)[:-5]))
    with pytest.raises(ScheduleError, match="not JSON"):
        load(path)


def test_a_run_of_a_later_version(run: Timeline, tmp_path: Path) -> None:
    data = stored(run, tmp_path)
    data["version"] = 99
    (tmp_path / "new.json").write_text(json.dumps(data))
    with pytest.raises(ScheduleError, match="has version 99"):
        load(tmp_path / "new.json")


# -- traffic -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_hand() -> Any:
    spec = importlib.util.spec_from_file_location("_traffic", Path(__file__).parent / "traffic.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_traffic_survives(by_hand: Any, tmp_path: Path) -> None:
    run = by_hand.reduced(4)
    run.save(tmp_path / "run.json.gz")
    again = load(tmp_path / "run.json.gz")
    assert same(again, run)
    assert again.makespan == 37
    for name in ("kind", "device", "stage", "microbatch", "peer", "size", "row", "message"):
        found, wanted = getattr(again.traffic, name), getattr(run.traffic, name)
        assert (found.tolist(), found.dtype) == (wanted.tolist(), wanted.dtype)
    assert again.traffic_start.tolist() == [[33, 31, 29, 27]]
    assert again.traffic_end.tolist() == [[37, 35, 33, 31]]
    assert not again.blocking


def test_traffic_of_a_lowered_schedule_survives(by_hand: Any, tmp_path: Path) -> None:
    """The run's schedule lists no SEND; the traffic's does, and says by which row."""
    run = simulate(Schedule.from_text("0F0\n1F0"), UniformCosts())
    made = by_hand.with_traffic(run, [(Kind.SEND_F, 0, 0, 0, 1, 0, 1.0, 2.0)], rows=[1], size=3.0, blocking=True)
    listing = Schedule.from_text("0F0 0SEND_F0\n1RECV_F0 1F0")
    made = replace(made, traffic=replace(made.traffic, schedule=listing))
    made.save(tmp_path / "run.json")
    again = load(tmp_path / "run.json")
    assert again.schedule == made.schedule
    assert again.traffic.schedule == listing
    assert again.traffic.size.tolist() == [3]
    assert again.blocking


def test_a_run_of_the_first_version_has_no_traffic(run: Timeline, tmp_path: Path) -> None:
    data = stored(run, tmp_path)
    data["version"] = 1
    del data["traffic"], data["blocking"]
    (tmp_path / "old.json").write_text(json.dumps(data))
    again = load(tmp_path / "old.json")
    assert same(again, run)
    assert len(again.traffic) == 0
    assert again.traffic_start.shape == (1, 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("traffic", KeyError, "damaged"),
        ("traffic", [], "damaged"),
        ("traffic", {}, "damaged"),
        ("traffic.kind", ["F"] * 4, "'F' is no kind of traffic"),
        ("traffic.kind", [6] * 4, "6 is no kind of traffic"),
        ("traffic.kind", [None] * 4, "None is no kind of traffic"),
        ("traffic.kind", ["REDUCE_GRAD"] * 3, "has 4 numbers and its schedule wants 3"),
        ("traffic.kind", ["SEND_F"] * 4, "has none"),
        ("traffic.peer", [0] * 4, "a collective of the traffic has a peer"),
        ("traffic.peer", [-2] * 4, "traffic peer holds what is no whole number from -1 to 3"),
        ("traffic.device", [0, 1, 2, 4], "traffic device holds what is no whole number from 0 to 3"),
        ("traffic.device", [0, 1, 2, 2.5], "no whole number"),
        ("traffic.device", 0.5, "no whole number"),
        ("traffic.stage", [0, 1, 2, float("nan")], "not finite"),
        ("traffic.stage", [0, 1, 2, "x"], "no number"),
        ("traffic.row", [64] * 4, "no whole number from -1 to 63"),
        ("traffic.message", [10**30] * 4, "no whole number"),
        ("traffic.size", [-1.0] * 4, "at least 0"),
        ("traffic.start", 40.0, "an op of the traffic ends before it starts"),
        ("traffic.end", [1e308] * 4, "above 1e"),
        ("traffic.end", [37.0], "has 1 numbers"),
        ("traffic.rows", ["0F0", "1F0"], "of another schedule"),
        ("traffic.rows", ["0X0"], "0X0"),
        ("blocking", 1, "true or false"),
        ("blocking", KeyError, "damaged"),
    ],
)
def test_wrong_traffic_is_refused(by_hand: Any, tmp_path: Path, path: str, value: Any, message: str) -> None:
    data = stored(by_hand.reduced(4), tmp_path)
    change(path, value)(data)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(ScheduleError, match=r"bad\.json") as caught:
        load(tmp_path / "bad.json")
    assert message in str(caught.value)


def test_traffic_that_says_the_same_a_billion_times_is_not_unfolded(by_hand: Any, tmp_path: Path) -> None:
    data = stored(by_hand.reduced(0), tmp_path)
    data["steps"] = 10**6  # fits the ops
    data["schedule"]["rows"] = ["0F0", "1F0", "2F0", "3F0"]
    data["traffic"]["kind"] = ["REDUCE_GRAD"] * 1000
    for name in ("start", "end", "sent", "departed", "arrived"):
        data[name] = 0.0
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(ScheduleError, match="1000000 steps of 1000 ops are more than"):
        load(tmp_path / "bad.json")


# -- columns -------------------------------------------------------------------------------------------------------------------


def test_columns_hold_one_row_per_op_and_step() -> None:
    run = simulate(Schedule.from_text("0F0 (0F1;0B0)OVERLAP_F_B 0B1"), FB, steps=2)
    columns = {name: column.tolist() for name, column in run.columns.items()}
    assert columns == {
        "step": [0] * 4 + [1] * 4,
        "device": [0] * 8,
        "stage": [0] * 8,
        "kind": ["F", "F", "B", "B"] * 2,
        "microbatch": [0, 1, 0, 1] * 2,
        "start": [0, 1, 1, 4, 6, 7, 7, 10],
        "end": [1, 4, 4, 6, 7, 10, 10, 12],
    }


def test_pandas_takes_them_as_they_are() -> None:
    pd = pytest.importorskip("pandas")
    frame = simulate(generate("1f1b", 4, 8), FB).to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert frame.groupby("device").size().tolist() == [16] * 4
    assert frame["end"].max() == 33


def test_times_cannot_be_changed(run: Timeline) -> None:
    with pytest.raises(ValueError, match="read-only"):
        run.start[0, 0] = 5


def test_figures_are_json(run: Timeline) -> None:
    figures = run.figures()
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert figures["messages"] == 2 * 2 * 3
    assert repr(run).startswith("<Timeline of '1f1b', simulated: makespan ")


# -- comparing -----------------------------------------------------------------------------------------------------------------


def test_comparison_is_side_by_side() -> None:
    gpipe, one = (simulate(generate(name, 4, 8), FB) for name in ("gpipe", "1f1b"))
    found = compare(gpipe, one, one)
    assert found.names == ("gpipe", "1f1b #1", "1f1b #2")
    rows = dict(found.rows)
    assert rows["makespan"] == (33, 33, 33)
    assert rows["makespan_ratio"] == (1, 1, 1)
    assert rows["peak_activations"] == ([8] * 4, [4, 3, 2, 1], [4, 3, 2, 1])
    assert found.as_dict()["runs"][1]["name"] == "1f1b #1"
    assert compare(gpipe, one, names=["a", "b"]).names == ("a", "b")


def test_what_cannot_be_compared() -> None:
    slots = simulate(generate("gpipe", 2, 2), FB)
    seconds = simulate(generate("gpipe", 2, 2), UniformCosts(forward=1, backward=2, unit="s"))
    for wrong, message in (((slots,), "at least two"), ((), "at least two"), ((slots, seconds), "seconds and another in slots")):
        with pytest.raises(ScheduleError, match=message):
            compare(*wrong)
    with pytest.raises(ScheduleError, match="1 names for 2 runs"):
        compare(slots, slots, names=["a"])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("start", 0.0, "starts before the one before it"),
        ("sent", 5.0, "leaves before it is sent"),
        ("end", 1e308, "above 1e"),
        ("capacity", [-1.0] * 2, "at least 0"),
    ],
)
def test_a_run_that_cannot_be(tmp_path: Path, field: str, value: Any, message: str) -> None:
    run = simulate(generate("1f1b", 2, 2), UniformCosts(latency=0.25))
    data = stored(run, tmp_path)
    change(field, value)(data)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(ScheduleError, match=message):
        load(tmp_path / "bad.json")
