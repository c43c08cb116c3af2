"""Why two runs differ: errors of ops, and the difference of makespans taken apart along the critical path."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import Cluster, Schedule, ScheduleError, Timeline, UniformCosts, compare, generate, simulate
from pipesim.differences import Difference, typical_step

TWO = Schedule.from_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", name="two")


def run(schedule: Schedule = TWO, source: str = "simulated", **costs: Any) -> Timeline:
    return replace(simulate(schedule, UniformCosts(**{"forward": 1, "backward": 2, **costs})), source=source)


def difference(*runs: Timeline, names: tuple[str, str] = ("sim", "run")) -> Difference:
    found = compare(*runs, names=names).difference
    assert found is not None
    return found


def total(found: Difference) -> float:
    return found.slower + found.waited_longer + found.rest


def with_durations(timeline: Timeline, rng: np.random.Generator, latency: float) -> Timeline:
    """A feasible run of the same schedule in which every op takes another time: measured, so to say."""
    schedule = timeline.schedule
    duration = (timeline.end - timeline.start)[0] * rng.lognormal(0.1, 0.3, schedule.num_slots)
    messages = timeline.messages
    start, end = np.zeros(schedule.num_slots), np.zeros(schedule.num_slots)
    arrived = np.zeros(len(messages))
    # any order in which all of the simulated times ascend is one in which causes come before effects
    for slot in np.lexsort((np.arange(schedule.num_slots), timeline.end[0], timeline.start[0])).tolist():
        first = slot in schedule.device_slots
        arrivals = arrived[messages.target_slot == slot]
        start[slot] = max([0.0 if first else end[slot - 1], *arrivals.tolist()]) + rng.uniform(0, 0.05)
        end[slot] = start[slot] + duration[slot]
        own = messages.source_slot == slot
        arrived[own] = end[slot] + latency * rng.uniform(0.5, 2, own.sum())
    columns = {"start": start, "end": end, "sent": end[messages.source_slot], "departed": end[messages.source_slot], "arrived": arrived}
    return replace(timeline, source="measured", **{name: column[None] for name, column in columns.items()})


# -- by hand -------------------------------------------------------------------------------------------------------------------


def test_a_slower_op_on_the_critical_path_is_the_whole_difference() -> None:
    # predicted: 0F0 0-1, 1F0 1-2, 1B0 2-4, 0F1 1-2, 1F1 4-5, 1B1 5-7, 0B0 4-6, 0B1 7-9. In the actual run 1B0 takes 3 instead of 2:
    # everything after it is 1 later, and the path is 0F0 1F0 1B0 1F1 1B1 0B1.
    times = {"start": [[0, 1, 5, 8, 1, 2, 5, 6]], "end": [[1, 2, 7, 10, 2, 5, 6, 8]]}
    columns = {name: np.array(values, float) for name, values in times.items()}
    sim = run()
    assert sim.start.tolist() == [[0, 1, 4, 7, 1, 2, 4, 5]]
    sent = columns["end"][:, sim.messages.source_slot]
    actual = replace(sim, source="measured", sent=sent, departed=sent, arrived=sent, **columns)
    found = difference(sim, actual)
    assert found.makespan == (9, 10)
    assert found.makespan_error == pytest.approx(-0.1)
    assert [term.op for term in found.path] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]
    assert [term.by for term in found.path] == ["start", "message", "device", "device", "device", "message"]
    assert (found.slower, found.waited_longer, found.rest) == (1, 0, 0)
    assert found.slower_by_kind == {"F": 0, "B": 1}
    (only,) = found.explaining
    assert (only.op, only.device, only.predicted, only.actual, only.slower, only.after) == ("1B0", 1, 2, 3, 1, "1F0")
    # durations: of 4 backwards one is predicted 2/3 - 1 = -33 %; sums 8 against 9
    errors = {one.kind: one for one in found.kinds}
    backward = errors["B"]
    assert (backward.ops, backward.predicted, backward.actual) == (4, 8, 9)
    assert (backward.bias, backward.mean, backward.median) == (pytest.approx(-1 / 9), pytest.approx(1 / 12), 0)
    # of the sorted errors 0, 0, 0, 1/3 the place 0.9 * 3 = 2.7 is 0.7 of the way from the third to the fourth
    assert backward.p90 == pytest.approx(0.7 / 3)
    assert (errors["F"].mean, errors["all"].ops) == (0, 8)
    (worst,) = found.worst
    assert (worst.op, worst.device, worst.predicted, worst.actual) == ("1B0", 1, 2, 3)
    # busy 6 + 6 of 2 * 9, against 6 + 7 of 2 * 10
    assert found.bubble_fraction == (pytest.approx(1 / 3), pytest.approx(0.35))


def test_slower_links_are_waits() -> None:
    # messages take 0.5: the path passes the link twice, 0F0 -> 1F0 and 1B1 -> 0B1
    found = difference(run(), run(latency=0.5))
    assert found.makespan == (9, 10)
    assert (found.slower, found.waited_longer, found.rest) == (0, 1, 0)
    assert found.waited_longer_by == {"start": 0, "message": 1, "device": 0}
    assert [(term.op, term.after, term.waited_longer) for term in found.explaining] == [("1F0", "0F0", 0.5), ("0B1", "1B1", 0.5)]


def test_what_the_predicted_run_does_after_the_path_is_the_rest() -> None:
    # Device 1 has the last word in the actual run: its B of 2 takes 10 there. Predicted 0B0 ends at 6, 1B0 at 4: 2 after the path.
    schedule = Schedule.from_text("0F0 0B0\n1F0 1B0")
    sim = run(schedule)
    assert sim.end.tolist() == [[1, 6, 2, 4]]
    actual = replace(sim, source="measured", start=np.array([[0, 4, 1, 2.0]]), end=np.array([[1, 6, 2, 12.0]]))
    found = difference(sim, actual)
    assert [term.op for term in found.path] == ["0F0", "1F0", "1B0"]
    assert (found.makespan, found.slower, found.waited_longer, found.rest) == ((6, 12), 8, 0, -2)
    assert total(found) == 6


def test_medians_over_steps() -> None:
    # F takes 1, 1.5 and 9 in three steps: the median is 1.5, and the step of median makespan the second
    schedule = Schedule.from_text("0F0 0B0")
    start = np.array([[0, 1], [10, 11.5], [20, 29]], float)
    end = np.array([[1, 3], [11.5, 13.5], [29, 31]], float)
    empty = np.zeros((3, 0))
    actual = replace(run(schedule), source="measured", start=start, end=end, sent=empty, departed=empty, arrived=empty)
    assert typical_step(actual).start.tolist() == [[10, 11.5]]
    found = difference(run(schedule), actual)
    assert found.steps == (1, 3)
    assert found.makespan == (3, 3.5)
    errors = {one.kind: one for one in found.kinds}
    assert (errors["F"].actual, errors["B"].actual) == (1.5, 2)
    assert total(found) == 0.5
    assert "run, the median of 3 steps" in str(compare(run(schedule), actual, names=["sim", "run"]))


def several_steps(begins: list[float], forward: list[float]) -> Timeline:
    """A measured run of F and a B of 2 on one device, per step when it began and what F took."""
    begin, first = np.array(begins), np.array(forward)
    start, end = np.stack([begin, begin + first], axis=1), np.stack([begin + first, begin + first + 2], axis=1)
    empty = np.zeros((len(begin), 0))
    return replace(run(Schedule.from_text("0F0 0B0")), source="measured", start=start, end=end, sent=empty, departed=empty, arrived=empty)


def test_runs_with_different_numbers_of_steps_are_compared_per_step() -> None:
    # steps of 3, 3.5 and 11, far apart; all three together take 131. The simulated one takes 3, so 3.5 / 3.
    actual, sim = several_steps([0, 20, 120], [1, 1.5, 9]), run(Schedule.from_text("0F0 0B0"))
    assert actual.makespan == 131
    rows = dict(compare(sim, actual).rows)
    assert rows["steps"] == (1, 3)
    assert rows["makespan"] == rows["iteration_time"] == (3, 3.5)
    assert rows["iteration_time_ratio"] == (1, pytest.approx(3.5 / 3))
    assert rows["bubble_fraction"] == (0, 0)
    assert "makespan_ratio" not in rows
    assert difference(sim, actual).makespan == rows["makespan"]
    text = str(compare(sim, actual))
    assert "131" not in text
    assert "makespan of a step" in text
    assert "of the step of median makespan" in text


def test_as_many_steps_are_compared_as_a_whole() -> None:
    one, two = several_steps([0, 10], [1, 1]), several_steps([0, 23], [1, 1])
    rows = dict(compare(one, two).rows)
    assert rows["steps"] == (2, 2)
    assert (rows["makespan"], rows["makespan_ratio"]) == ((13, 26), (1, 2))
    assert "iteration_time_ratio" not in rows
    assert "steps" not in dict(compare(run(), run()).rows)


def test_a_step_is_as_long_as_its_collectives() -> None:
    # F 1 and B 2 take 3 in every step; reductions end 7, 1 and 4 after B: steps of 10, 4 and 7
    schedule = Schedule.from_text("0F0 0B0 0REDUCE_GRAD")
    base = simulate(schedule, UniformCosts(forward=1, backward=2, reduction=1))
    assert base.traffic.collective.all()
    assert len(base.traffic) == 1
    begins = np.array([[0.0], [20.0], [40.0]])
    after = base.end.max() + np.array([[7.0], [1.0], [4.0]])
    columns = {"start": begins + base.start, "end": begins + base.end}
    traffic = {"traffic_start": begins + base.end.max(), "traffic_end": begins + after}
    empty = {name: np.zeros((3, 0)) for name in ("sent", "departed", "arrived")}
    found = typical_step(replace(base, source="measured", **columns, **traffic, **empty))
    assert found.first_start == 40
    assert found.makespan == base.end.max() + 4


def test_of_an_even_number_of_steps_the_shorter_one_in_the_middle() -> None:
    assert typical_step(simulate(TWO, UniformCosts(), steps=2)).steps == 1


def test_the_measured_run_is_the_actual_one_whatever_the_order() -> None:
    actual = run(backward=3, source="measured")
    one, two = difference(run(), actual), difference(actual, run(), names=("run", "sim"))
    assert one.names == two.names == ("sim", "run")
    assert one.as_dict() == two.as_dict()


def test_memory_is_compared_where_both_runs_say_it() -> None:
    cost = UniformCosts(forward=1, backward=2, activation=3, weights=10)
    sim = simulate(TWO, cost)
    # 2 and 1 activations at once
    assert sim.peak_memory == [16, 13]
    measured = replace(sim, source="measured", info={"peak_memory": "20, 12"})
    assert difference(sim, measured).peak_memory == ((16, 20), (13, 12))
    unknown = replace(sim, source="measured", footprint=replace(sim.footprint, kept=sim.footprint.kept * 0, static={}))
    assert difference(sim, unknown).peak_memory is None
    assert "peak_memory is not compared" in str(compare(sim, unknown))
    assert dict(compare(sim, unknown).rows)["peak_memory"] == ([16, 13], None)
    assert str(compare(sim, unknown)).splitlines()[3].endswith("unknown")
    assert unknown.summary().count("unknown") == 2  # a line per device
    assert unknown.figures()["peak_memory"] is None
    # neither does a trace of a simulation
    assert dict(compare(sim, replace(unknown, source="simulated", info={"imported": "a trace that pipesim wrote"})).rows)["peak_memory"][1] is None
    # a simulation that was asked for no bytes has none
    assert dict(compare(sim, replace(unknown, source="simulated")).rows)["peak_memory"] == ([16, 13], [0, 0])
    assert difference(sim, replace(sim, source="measured", info={"peak_memory": "unknown"})).peak_memory == ((16, 16), (13, 13))


def test_i_and_w_of_pytorchs_first_stage_are_compared_together() -> None:
    # PyTorch: 0I takes nothing and 0W the whole backward of 2; predicted 1 and 1. Their sums agree; stage 1 is as everywhere.
    schedule = Schedule.from_text("0F0 0I0 0W0\n1F0 1I0 1W0")
    sim = simulate(schedule, UniformCosts(forward=1, input_grad=1, weight_grad=1))
    assert sim.start.tolist() == [[0, 3, 4, 1, 2, 3]]
    columns = {"start": np.array([[0, 3, 3, 1, 2, 3.0]]), "end": np.array([[1, 3, 5, 2, 3, 4.0]])}
    torch = replace(sim, source="measured", info={"imported": "torch.profiler traces of 2 ranks"}, **columns)
    errors = {one.kind: one for one in difference(sim, torch).kinds}
    assert {kind: (one.ops, one.predicted, one.actual, one.mean) for kind, one in errors.items()} == {
        "F": (2, 2, 2, 0),
        "I": (1, 1, 1, 0),
        "W": (1, 1, 1, 0),
        "I+W": (1, 2, 2, 0),
        "all": (5, 6, 6, 0),
    }
    assert not difference(sim, torch).worst
    other = {one.kind: one for one in difference(sim, replace(torch, info={})).kinds}
    assert (other["W"].mean, other["I"].ops) == (pytest.approx(0.25), 2)


def test_updates_that_only_one_run_has() -> None:
    # the actual run lists updates of 0.5, which wait for each other: the path ends with one
    actual = replace(simulate(TWO, UniformCosts(forward=1, backward=2, optimizer=0.5)), source="measured")
    found = difference(run(), actual)
    assert found.makespan == (9, 9.5)
    assert total(found) == pytest.approx(0.5)
    assert found.slower_by_kind["U"] == 0.5
    assert "U" not in {one.kind for one in found.kinds}


def test_pairs_and_other_devices() -> None:
    pair = Schedule.from_text("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    found = difference(run(pair), run(pair, overlap=4, source="measured"))
    assert {one.kind: (one.ops, one.predicted, one.actual) for one in found.kinds}["pair"] == (1, 3, 4)
    turned = Schedule.from_text("1F0 1B0 1F1 1B1\n0F0 0F1 0B0 0B1")
    assert difference(run(), run(turned, source="measured")).makespan == (9, 9)


def test_a_measured_run_in_another_order_says_so() -> None:
    other = Schedule.from_text("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1")
    found = difference(run(), run(other, source="measured"))
    assert found.notes == ("the devices did their ops in another order than predicted",)
    assert total(found) == found.makespan[1] - found.makespan[0]


# -- when there is none --------------------------------------------------------------------------------------------------------


def test_runs_of_different_ops_are_only_put_side_by_side() -> None:
    assert compare(run(), run(generate("1f1b", 2, 3), source="measured")).difference is None
    assert compare(run(), run(Schedule.from_text("0F0 0F1\n1F0 1F1"), source="measured")).difference is None
    assert "difference" not in compare(run(), run(generate("1f1b", 2, 3))).as_dict()


def test_two_simulated_schedules_are_no_prediction_of_each_other() -> None:
    gpipe, other = generate("gpipe", 2, 4), generate("1f1b", 2, 4)
    assert compare(run(gpipe), run(other)).difference is None
    assert compare(run(), run(), run()).difference is None


def test_slots_and_seconds_are_refused() -> None:
    with pytest.raises(ScheduleError, match="one run is in seconds and another in slots"):
        compare(run(), run(unit="s"))


# -- always --------------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved", "chimera", "dualpipe"]),
    st.integers(0, 2**32 - 1),
    st.floats(0, 0.5),
)
def test_the_parts_add_up(name: str, seed: int, latency: float) -> None:
    rng = np.random.default_rng(seed)
    sim = simulate(generate(name, 4, 8), UniformCosts(forward=1, backward=2, latency=0.1))
    actual = with_durations(sim, rng, latency)
    found = difference(sim, actual)
    assert total(found) == pytest.approx(actual.makespan - sim.makespan, abs=1e-9)
    # both lines of the picture add up on their own
    assert sum(term.actual + term.actual_wait for term in found.path) == pytest.approx(actual.makespan)
    # the path is one: each op is after the one before it, and no gap is longer than a start-up and a message
    assert all(one.op == two.after for one, two in zip(found.path, found.path[1:], strict=False))
    assert all(-1e-12 <= term.actual_wait <= 0.05 + 2 * latency + 1e-12 for term in found.path)
    json.loads(json.dumps(found.as_dict()), parse_constant=lambda text: pytest.fail(text))
    assert str(compare(sim, actual))


def test_a_run_with_itself() -> None:
    found = difference(run(), run(source="measured"))
    assert (found.makespan_error, found.slower, found.waited_longer, found.rest) == (0, 0, 0, 0)
    assert (found.explaining, found.worst) == ([], ())


def test_many_ops_quickly_enough_to_count() -> None:
    # 200,000 ops: what must not happen is a loop over pairs of ops
    schedule = generate("1f1b", 16, 6250)
    sim = simulate(schedule, UniformCosts(forward=1, backward=2), cluster=Cluster.uniform())
    found = difference(sim, replace(sim, source="measured"))
    assert found.kinds[-1].ops == 200_000
    assert len(found.path) == 16 * 2 + 2 * (6250 - 1)
