"""Calibrations that really run: two ranks over gloo. Nothing here is about how fast this machine is."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pipesim as ps
from pipesim.calibration import MESSAGES, Plan, calibrate, calibration_report, predict, prediction_table, run_plan
from pipesim.errors import ScheduleError

pytest.importorskip("torch", reason="replays want pipesim[replay]")

from pipesim.calibration import running
from pipesim.replay import ReplayError, ReplayModel, Settings

UNSEEN = ("1f1b", "interleaved-1f1b", "zb-h1")
SIZES = (1024, 65536, 1 << 20)


def small(chunks=(1, 2), **options):
    verify = tuple(ps.generate(name, 2, 4) for name in UNSEEN)
    model = ReplayModel(layers=4, hidden=16, microbatch=2)
    values = {"settings": Settings(model, iterations=4, warm_up=1), "rounds": 1, "verify": verify, "sizes": SIZES}
    return Plan(2, 4, chunks, **{**values, **options})


@pytest.mark.slow
def test_two_ranks_end_to_end(tmp_path):
    plan = small()
    said = []
    done = run_plan(plan, tmp_path, said.append)
    found = calibrate(done.calibration)
    assert sorted(found.costs.tables) == [2, 4]
    for stages, table in found.costs.tables.items():
        for name in ("forward", "backward", "input_grad", "weight_grad", "optimizer"):
            assert len(table.times[name]) == stages
            assert min(table.times[name]) > 0
    # 2 samples of 16 float32 each way; a stage of two layers of 16 x 64 and back, with biases, in float32;
    # a replay keeps weights in blocks of 64 numbers, so the bias of 16 takes 64
    assert found.costs.tables[2].bytes["message"] == (2 * 16 * 4, 0)
    assert found.costs.tables[2].bytes["weights"] == ((2 * (16 * 64 * 2 + 64 + 64)) * 4,) * 2
    assert set(found.links) == {(0, 1), (1, 0)}
    for link in found.links.values():
        assert link.sizes == len(SIZES)
        assert link.hop > 0
    assert found.costs.host.op > 0
    assert found.source["mode"] == "run"
    predictions = [predict(found, schedule, runs) for schedule, runs in zip(plan.verify, done.verification, strict=True)]
    table = prediction_table(predictions)
    for one in predictions:
        assert one.predicted > one.ops > 0
        assert one.error is not None
        assert one.name in table
    report = calibration_report(found)
    for part in ("typical", "host:", "op to op", "activation", "to know:"):
        assert part in report


@pytest.mark.slow
def test_goes_on_where_it_was(tmp_path):
    plan = small((1,), verify=())
    first = run_plan(plan, tmp_path)
    assert [run.schedule.name for run in first.calibration] == ["gpipe-2", "split-probe-2", MESSAGES]
    (tmp_path / "gpipe-2.0.json.gz").unlink()
    said = []
    again = run_plan(plan, tmp_path, said.append)
    assert said[0] == "round 1 of 1: gpipe-2"
    assert "2 of 3 runs were in" in said[1]
    for before, after in zip(first.calibration[1:], again.calibration[1:], strict=True):
        assert (before.start == after.start).all()
    with pytest.raises(ScheduleError, match="another configuration"):
        run_plan(small((1,), verify=(), sizes=(1024,)), tmp_path)


def test_runs_before_one_that_failed_are_kept(tmp_path, monkeypatch):
    plan = small((1,), verify=())
    asked = []

    def replayed(tasks):
        asked.append([task.schedule.name for task in tasks])
        runs = [replace(ps.simulate(task.schedule, ps.UniformCosts(forward=1, backward=2, unit="s")), source="measured") for task in tasks]
        if len(asked) == 1:
            raise ReplayError("rank 1 is gone", None, runs[:1])
        return runs

    monkeypatch.setattr(running, "replay_all", replayed)
    with pytest.raises(ReplayError, match="gone"):
        run_plan(plan, tmp_path)
    assert (tmp_path / "gpipe-2.0.json.gz").is_file()
    done = run_plan(plan, tmp_path)
    assert asked == [["gpipe-2", "split-probe-2", MESSAGES], ["split-probe-2", MESSAGES]]
    assert [run.schedule.name for run in done.calibration] == asked[0]


@pytest.mark.slow
def test_emulated_durations_and_their_order(tmp_path):
    # F of stage 1 sleeps twice as long as that of stage 0, B three times as long as its F
    costs = ps.UniformCosts(forward=[0.004, 0.008], backward=[0.012, 0.024], input_grad=0.005, weight_grad=0.010, message=1024, unit="s")
    plan = small((1,), settings=Settings(mode="emulate", iterations=3, warm_up=1), costs=costs, verify=(ps.generate("1f1b", 2, 8),))
    done = run_plan(plan, tmp_path)
    found = calibrate(done.calibration)
    times = found.costs.tables[2].times
    assert times["forward"][0] < times["forward"][1] < times["backward"][1]
    # a sleep is never shorter than it was asked to be
    for one in found.spreads:
        if one.kind in ("F", "B"):
            assert one.spread.low >= {"F": (0.004, 0.008), "B": (0.012, 0.024)}[one.kind][one.stage] - 1e-6
    assert found.source["mode"] == "emulated"
    prediction = predict(found, plan.verify[0], done.verification[0])
    # stage 1 works without a gap: (4 + 8 (8 + 24) + 12) ms at least
    assert prediction.ops >= 0.272 - 1e-6
    assert min(prediction.measured) >= 0.272 - 1e-6


def test_a_plan_says_what_it_runs():
    labels = list(small().tasks())
    assert labels[:5] == ["gpipe-2", "split-probe-2", "gpipe-4", "split-probe-4", MESSAGES]
    assert labels[5:] == ["verify-1f1b-2x4", "verify-interleaved-1f1b-2x4", "verify-zb-h1-2x4"]
    alone = Plan(1, 4, settings=Settings())
    assert list(alone.tasks()) == ["gpipe-1", "split-probe-1"]
