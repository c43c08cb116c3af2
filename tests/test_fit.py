"""Fitting efficiencies to measured iteration times."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipesim import ScheduleError
from pipesim.models import ModelSpec, Parallelism, read_device, read_efficiency, write_efficiency

pytest.importorskip("scipy")

from pipesim.fit import Configuration, Errors, Fit, MeasuredRun, Predictor, as_dict, by, fit, read_runs, shared, summary, warnings, worst
from pipesim.fit.predictor import COORDINATES, _efficiency, coordinates

A100 = read_device("a100-80g")
MODEL = ModelSpec(name="small", layers=8, hidden=1024, heads=16, vocabulary=1024, sequence=512)
TRUTH = A100.with_efficiency(gemm=0.6, gemm_size=0.0, attention=1.0, layer_overhead=1e-4, step_overhead=0.05)
START = A100.with_efficiency(gemm_size=0.0, attention=1.0)
FREE = ("gemm", "layer_overhead", "step_overhead")


def configurations() -> list[Configuration]:
    """Twelve ways to run it on 8 GPUs."""
    found = []
    for (pipeline, data), microbatch in itertools.product(((1, 8), (2, 4), (4, 2)), (1, 2, 4, 8)):
        found.append(Configuration(MODEL, Parallelism(pipeline=pipeline, data=data, microbatch=microbatch), 64))
    return found


@pytest.fixture(scope="module")
def runs() -> list[MeasuredRun]:
    """Runs of a machine whose efficiency is known."""
    return [MeasuredRun((one,), Predictor(one, TRUTH).simulate(TRUTH.efficiency), f"run {number}") for number, one in enumerate(configurations())]


@pytest.fixture(scope="module")
def found(runs: list[MeasuredRun]) -> Fit:
    return fit(runs, START, FREE)


# -- the prediction ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recompute", "passes"), [("none", 3), ("full", 4)])
def test_slopes_by_hand(recompute: str, passes: int) -> None:
    """One GPU, 8 layers, 5 microbatches: each layer's overhead counts in F, I and W, and once more where F is repeated; each of

    F and B has one op overhead, so 2 · 5; the step has one.
    """
    parallel = Parallelism(recompute=recompute)  # type: ignore[arg-type]
    plane = Predictor(Configuration(MODEL, parallel, 5), TRUTH).plane(TRUTH.efficiency, list(COORDINATES))
    slopes = dict(zip(COORDINATES, plane.slopes, strict=True))
    assert slopes["layer_overhead"] == pytest.approx(8 * 5 * passes, rel=1e-4)
    assert slopes["op_overhead"] == pytest.approx(2 * 5, rel=1e-4)
    assert slopes["step_overhead"] == pytest.approx(1, rel=1e-4)
    # no links: nothing depends on them
    assert [slopes[name] for name in ("1/inside", "1/between", "1/gradient", "1/pipeline")] == [0, 0, 0, 0]


def test_slope_of_a_pipelines_op_overhead() -> None:
    """1F1B, p = 4, m = 6: the last device is the slowest, so the longest path is p - 1 forwards down, its 2m ops, p - 1 backwards up."""
    one = Configuration(MODEL, Parallelism(pipeline=4), 6)
    plane = Predictor(one, TRUTH).plane(TRUTH.efficiency, ["op_overhead"])
    assert plane.slopes[list(COORDINATES).index("op_overhead")] == pytest.approx(2 * (6 + 3), rel=1e-3)


def test_the_time_is_the_largest_of_planes() -> None:
    """A plane touches the simulated time where it was taken and is nowhere above it; so the time is convex in the coordinates."""
    one = Predictor(Configuration(MODEL, Parallelism(tensor=2, pipeline=4), 6), TRUTH)
    points = [TRUTH.efficiency, replace(TRUTH.efficiency, gemm=0.9, memory=0.4), replace(TRUTH.efficiency, gemm=0.2, inside=0.3, pipeline=0.01)]
    times = [one.simulate(point) for point in points]
    for plane, point, time in zip([one.plane(point, list(COORDINATES)) for point in points], points, times, strict=True):
        assert plane(point) == pytest.approx(time, rel=1e-9)
        assert all(plane(other) <= value * (1 + 1e-6) for other, value in zip(points, times, strict=True))


def test_coordinates_and_back() -> None:
    back = _efficiency(coordinates(TRUTH.efficiency))
    for name in TRUTH.efficiency.__dataclass_fields__:
        assert getattr(back, name) == pytest.approx(getattr(TRUTH.efficiency, name), rel=1e-12), name


# -- fitting -----------------------------------------------------------------------------------------------------------------------


def test_finds_the_numbers_that_made_the_runs(found: Fit) -> None:
    for name in FREE:
        assert getattr(found.efficiency, name) == pytest.approx(getattr(TRUTH.efficiency, name), rel=1e-3), name
    assert np.abs(found.errors).max() < 1e-4
    assert (found.uncertainty < 0.01).all()


def test_one_run_that_is_off_does_not_pull_at_the_others(runs: list[MeasuredRun]) -> None:
    spoiled = [replace(runs[0], seconds=2 * runs[0].seconds), *runs[1:]]
    found = fit(spoiled, START, FREE)
    assert found.efficiency.gemm == pytest.approx(0.6, rel=0.01)
    assert found.errors[0] == pytest.approx(-0.5, abs=0.01)
    assert worst(found, 1) == [0]


def test_a_run_that_is_left_out_is_predicted_from_the_others(runs: list[MeasuredRun]) -> None:
    """The run that is twice as long as it should be is 50 % off in every fold, and no other run is."""
    spoiled = [replace(runs[0], seconds=2 * runs[0].seconds), *runs[1:]]
    errors = fit(spoiled, START, FREE).left_out(range(len(runs)))
    assert errors[0] == pytest.approx(-0.5, abs=1e-3)
    assert np.abs(errors[1:]).max() < 0.02


def test_folds_leave_every_run_out_once_a_shuffle(found: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    dealt: list[list[int]] = []
    monkeypatch.setattr(Fit, "left_out", lambda self, groups: dealt.append(list(groups)) or np.zeros(len(groups)))
    assert found.folds(5, 3).shape == (3, 12)
    assert all(sorted(groups) == sorted(number % 5 for number in range(12)) for groups in dealt)
    assert dealt[0] != dealt[1]


def test_predicts_runs_that_it_has_not_seen(found: Fit) -> None:
    other = Configuration(MODEL, Parallelism(tensor=2, pipeline=2, microbatch=2), 32)
    true = Predictor(other, TRUTH).simulate(TRUTH.efficiency)
    assert found.predict([MeasuredRun((other,), 1.0)])[0] == pytest.approx(true, rel=1e-4)


def test_of_choices_the_fastest_that_fits() -> None:
    """With 60 samples in one microbatch there is no launch overhead to speak of, but 8 layers of 60 · 512 · 1024 · (34 + 5 · 16 · 512/1024)

    bytes are 18.6 GB.
    """
    choices = tuple(Configuration(MODEL, Parallelism(microbatch=b), 60) for b in (1, 10, 60))
    slow_launches = TRUTH.with_efficiency(layer_overhead=1e-2)
    for memory, expected in ((80e9, 2), (10e9, 1)):
        device = replace(slow_launches, cluster=slow_launches.cluster.with_memory(memory), memory=memory)
        found = fit([MeasuredRun(choices, 3.0)], device, ["gemm"])
        assert found.chosen.tolist() == [expected]


def test_nothing_fits() -> None:
    choices = tuple(Configuration(MODEL, Parallelism(microbatch=b), 60) for b in (30, 60))
    device = replace(TRUTH, memory=1e9)
    with pytest.raises(ScheduleError, match="run 'x': none of the 2 choices fits the memory of A100"):
        fit([MeasuredRun(choices, 1.0, "x")], device, ["gemm"])


def test_a_number_that_the_runs_do_not_tell_stays_at_its_start(runs: list[MeasuredRun]) -> None:
    """Without tensor parallelism nothing is sent inside a node but gradients and messages; between nodes nothing at all."""
    found = fit(runs, START, ["between", *FREE])
    assert (found.free, found.untold) == (FREE, ("between",))
    assert found.efficiency.between == START.efficiency.between
    assert found.efficiency.gemm == pytest.approx(0.6, rel=1e-3)
    assert len(found.uncertainty) == 3
    assert "not fitted, as these runs do not tell it" in summary(found)
    assert as_dict(found)["untold"] == {"between": START.efficiency.between}
    assert warnings(found) == [f"these runs do not tell between: it is not fitted and stays {START.efficiency.between:.4g}"]


def test_of_two_numbers_that_only_tell_of_each_other_one_stays() -> None:
    """Two runs that differ in nothing: a longer step and slower GEMMs are the same to them. The later one stays."""
    one = Configuration(MODEL, Parallelism(), 8)
    run = MeasuredRun((one,), Predictor(one, TRUTH).simulate(TRUTH.efficiency))
    found = fit([run, run], START.with_efficiency(step_overhead=0.05, layer_overhead=1e-4), ["gemm", "step_overhead"])
    assert (found.free, found.untold) == (("gemm",), ("step_overhead",))
    assert found.efficiency.step_overhead == 0.05
    assert found.efficiency.gemm == pytest.approx(0.6, rel=1e-3)


def test_runs_that_tell_nothing(runs: list[MeasuredRun]) -> None:
    with pytest.raises(ScheduleError, match=r"the runs do not tell between \(.*\), so there is nothing to fit"):
        fit(runs, START, ["between"])
    with pytest.raises(ScheduleError, match="no number to fit"):
        fit(runs, START, [])


def test_few_runs_are_warned_of(runs: list[MeasuredRun], found: Fit) -> None:
    few = fit(runs[:8], START, FREE)
    assert warnings(few) == ["8 runs for 3 numbers, fewer than 3 for each: such a fit also follows noise; fit fewer (--free, --fix) or measure more"]
    assert f"warning: {warnings(few)[0]}" in summary(few)
    assert warnings(found) == []


def test_leave_one_out_is_done_once(found: Fit) -> None:
    errors = found.folds(12, 10)
    assert errors.shape == (1, 12)
    text = summary(found, errors, leave_one_out=True)
    assert "leave-one-out     mean" in text
    assert "shuffle" not in text


@pytest.mark.parametrize(
    ("free", "message"),
    [
        (["gem"], "has no 'gem'; did you mean 'gemm'"),
        (["gemm", "gemm"], "named twice"),
        ([f"{name}" for name in ("gemm", "memory", "inside")], "3 numbers .* cannot be fitted to 2 runs"),
    ],
)
def test_what_cannot_be_fitted(runs: list[MeasuredRun], free: list[str], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        fit(runs[:2], START, free)


def test_asynchronous_schedules_are_refused() -> None:
    with pytest.raises(ScheduleError, match="pipedream has no flush"):
        Predictor(Configuration(MODEL, Parallelism(pipeline=4), 8, "pipedream"), A100)


def test_a_calibration_is_read_back_number_for_number(found: Fit, tmp_path: Path) -> None:
    write_efficiency(found.efficiency, tmp_path / "mine.toml", "here")
    assert read_efficiency(tmp_path / "mine.toml") == found.efficiency


# -- the report --------------------------------------------------------------------------------------------------------------------


def test_errors_by_hand() -> None:
    """1, 2, 3, 4, 10 %: mean 4, median 3; the 90th percentile lies 0.6 of the way from 4 to 10."""
    assert Errors.of([0.01, -0.02, 0.03, -0.04, 0.1]) == Errors(5, 4.0, 3.0, 7.6, 10.0)


def test_by_pipeline_and_what_the_worst_share(runs: list[MeasuredRun]) -> None:
    """All four runs with p = 4 are 10 % off, so they are the worst four, and p = 4 (and d = 2) is what they share."""
    spoiled = [replace(run, seconds=run.seconds * (1.1 if run.choices[0].parallel.pipeline == 4 else 1.0)) for run in runs]
    found = fit(spoiled, TRUTH, ["gemm"])
    by_depth = by(found, "pipeline")
    assert [(depth, one.runs) for depth, one in by_depth.items()] == [(1, 4), (2, 4), (4, 4)]
    assert by_depth[4].mean > 5 * by_depth[1].mean
    assert {(one.column, one.value, one.among_worst, one.among_all) for one in shared(found, 4)} == {("pipeline", 4, 4, 4), ("data", 2, 4, 4)}


def test_every_error_has_the_number_of_parameters_beside_it(found: Fit) -> None:
    text = summary(found, found.folds(4, 2), {"pipeline": found.left_out([run.choices[0].parallel.pipeline for run in found.runs])})
    lines = [line for line in text.splitlines() if line.startswith(("fitted", "cross-validated", "left out"))]
    assert len(lines) == 3
    assert all("3 fitted parameters, 12 runs" in line for line in lines)
    report = as_dict(found, found.folds(4, 2))
    assert list(report["fitted"]) == list(FREE)
    assert len(report["rows"]) == 12


def test_columns_stand_below_each_other(runs: list[MeasuredRun]) -> None:
    mixed = [replace(run, choices=(replace(run.choices[0], schedule=name),)) for run, name in zip(runs[4:], ["gpipe", "1f1b"] * 4, strict=True)]
    lines = summary(fit(mixed, TRUTH, ["gemm"])).splitlines()
    start = lines.index("by schedule") + 1
    assert len({line.index("mean") for line in lines[start : start + 2]}) == 1
    assert len({line.index("worst") for line in lines[start : start + 2]}) == 1
    assert any("b microbatch, m microbatches" in line for line in lines)


def test_a_wrong_column(found: Fit) -> None:
    with pytest.raises(ScheduleError, match="no 'pipline'; did you mean 'pipeline'"):
        by(found, "pipline")


# -- files -------------------------------------------------------------------------------------------------------------------------

HEAD = "layers,hidden,heads,vocabulary,sequence,tensor,pipeline,data,micro_batch,global_batch,gpus,iteration_ms,note"
LINE = "8,1024,16,1024,512,2,4,1,2,16,8,1500,first"


def test_reads_runs(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEAD},schedule,chunks\n{LINE},,\n{LINE.replace('1500', '1400')},interleaved-1f1b,2\n")
    first, second = read_runs(path, {"recompute": "full", "gradient_bytes": "2"})
    (one,), (other,) = first.choices, second.choices
    assert (first.seconds, second.seconds) == (1.5, 1.4)
    assert one.parallel == Parallelism(tensor=2, pipeline=4, microbatch=2, recompute="full", gradient_bytes=2)
    assert (one.schedule, one.microbatches, one.options) == ("1f1b", 8, {})
    assert (other.schedule, other.options) == ("interleaved-1f1b", {"chunks": 2})
    assert first.facts["note"] == "first"


def test_gpus_say_how_many_pipelines(tmp_path: Path) -> None:
    """32 GPUs of which a pipeline takes 2 x 4 are 4 pipelines."""
    path = tmp_path / "runs.csv"
    path.write_text("model,tensor,pipeline,gpus,microbatch,batch,seconds\ngpt-22b,2,4,32,1,8,1.42\n")
    ((run,),) = (one.choices for one in read_runs(path))
    assert (run.parallel.data, run.microbatches) == (4, 2)
    path.write_text("model,tensor,pipeline,gpus,microbatch,batch,seconds\ngpt-22b,2,4,12,1,8,1.42\n")
    with pytest.raises(ScheduleError, match="line 2: gpus is 12, which is no multiple of tensor x pipeline = 2 x 4"):
        read_runs(path)


def test_reads_choices(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("model,tensor,microbatch,batch,seconds\ngpt-22b,8,1|2|4,4,1.42\n")
    (run,) = read_runs(path)
    assert [one.parallel.microbatch for one in run.choices] == [1, 2, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("1500", "0"), "line 2: iteration_ms is 0; right is a finite number above 0"),
        (("1500", "nan"), "line 2: iteration_ms is nan"),
        (("1500", "fast"), "line 2: iteration_ms is 'fast', which is no number"),
        (("iteration_ms", "weather"), "line 2: a run has one of the columns seconds and iteration_ms, this one has none"),
        (("vocabulary", "words"), "line 2: the model's vocabulary is missing"),
        (("global_batch", "size"), "line 2: batch is missing"),
        ((",16,8,1500", ",16,9,1500"), "line 2: gpus is 9, and tensor x pipeline x data is 2 x 4 x 1"),
        ((",2,16,8", ",3,16,8"), "line 2: batch = 16 is no multiple of microbatch x data = 3 x 1"),
        (("8,1024", "8.5,1024"), "line 2: layers is 8.5; right is a whole number"),
        ((",first", ",first,more"), "line 2: more cells than columns"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEAD}\n{LINE}\n".replace(*change))
    with pytest.raises(ScheduleError, match=f"runs.csv, {message}"):
        read_runs(path)


def test_choices_that_do_not_divide_the_batch_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("model,tensor,pipeline,chunks,microbatch,batch,seconds\ngpt-22b,8,2,1|2,4|3,8,1.42\n")
    (run,) = read_runs(path)
    assert [(one.schedule, one.parallel.microbatch) for one in run.choices] == [("1f1b", 4), ("interleaved-1f1b", 4)]
    path.write_text("model,microbatch,batch,seconds\ngpt-22b,3|5,8,1.42\n")
    with pytest.raises(ScheduleError, match="no multiple"):
        read_runs(path)


def test_an_option_that_the_schedule_has_not(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("model,tensor,pipeline,schedule,chunks,batch,seconds\ngpt-22b,8,2,1f1b,2,8,1.42\n")
    with pytest.raises(ScheduleError, match="line 2: 1f1b has no option chunks, and chunks is 2"):
        read_runs(path)


def test_a_constant_that_contradicts_a_column(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEAD}\n{LINE}\n")
    with pytest.raises(ScheduleError, match="line 2: tensor is 2, and it was given as 4 for all runs"):
        read_runs(path, {"tensor": "4"})
    with pytest.raises(ScheduleError, match="no column 'recompte' to give for all runs; did you mean 'recompute'"):
        read_runs(path, {"recompte": "full"})
    with pytest.raises(ScheduleError, match="recompute is 'some'; right is none or selective or full"):
        read_runs(path, {"recompute": "some"})


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(HEAD + "\n")
    with pytest.raises(ScheduleError, match="has no run"):
        read_runs(path)
