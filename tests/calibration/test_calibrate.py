"""Calibrations of runs whose truth is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import pipesim as ps
from pipesim.calibration import (
    Prediction,
    calibrate,
    calibration_report,
    gpipe_probe,
    predict,
    prediction_table,
    simulated,
    split_probe,
    too_busy,
)
from pipesim.errors import ScheduleError

from .conftest import BYTES, FOUR, HOST, LINK, TWO

UNSEEN = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")


@pytest.fixture(scope="module")
def found(all_runs):
    return calibrate(all_runs)


def test_without_noise_everything_is_recovered(found):
    for stages, table in ((2, TWO), (4, FOUR)):
        for name, times in table.times.items():
            assert found.costs.tables[stages].times[name] == pytest.approx(times, rel=1e-6), name
    assert vars(found.costs.host) == pytest.approx(vars(HOST), rel=1e-6)
    for link in found.links.values():
        assert (link.latency, link.bandwidth) == (pytest.approx(LINK[0], rel=1e-4), pytest.approx(LINK[1], rel=1e-6))
        assert link.probe_latency == pytest.approx(LINK[0], rel=1e-6)
    assert set(found.links) == {(0, 1), (1, 0)}
    for name, sizes in BYTES.items():
        assert found.costs.tables[2].bytes[name] == pytest.approx(sizes), name


@pytest.mark.parametrize("name", UNSEEN)
def test_unseen_schedules_are_predicted(found, truth, links, name):
    schedule = ps.generate(name, 2, 8)
    right = ps.simulate(schedule, truth, cluster=links)
    prediction = predict(found, schedule)
    assert prediction.predicted == pytest.approx(right.makespan, rel=1e-5)
    assert prediction.ops < prediction.predicted
    assert simulated(found, schedule).peak_activations == right.peak_activations


def test_with_noise_within_what_the_noise_allows(measured, messages):
    # 8 or 4 samples per iteration and 40 iterations: the median of their means has a standard error of 1.2533 noise / sqrt(4 * 40)
    noise, steps = 0.05, 40
    runs = [measured(make(2, 8), steps, noise, seed) for seed, make in enumerate((gpipe_probe, split_probe))]
    found = calibrate([*runs, messages()])
    tolerance = 4 * 1.2533 * noise / np.sqrt(4 * steps)
    for name, times in TWO.times.items():
        allowed = tolerance * (2 if name == "optimizer" else 1)  # one per iteration
        assert found.costs.tables[2].times[name] == pytest.approx(times, rel=allowed), name
    # gaps and messages have no noise of their own
    assert vars(found.costs.host) == pytest.approx(vars(HOST), rel=1e-6)
    # and the spread that is reported is the noise
    for one in found.spreads:
        if one.kind != "U":
            assert one.spread.deviation / one.spread.median == pytest.approx(noise, rel=0.35)


def test_error_and_spread_of_replays(found, measured):
    schedule = ps.generate("1f1b", 2, 8)
    right = predict(found, schedule).predicted
    replays = [measured(schedule, noise=0.02, seed=seed) for seed in range(4)]
    prediction = predict(found, schedule, replays)
    # 16 ops of 2 % on the path of about 0.3 s: half a per cent, and the median of runs of five iterations less
    assert prediction.predicted == right
    assert abs(prediction.error) < 0.02
    assert 0 < prediction.spread < 0.02
    assert (len(prediction.measured), prediction.iterations) == (4, 20)
    assert "4 x 5" in prediction_table([prediction])


@pytest.mark.parametrize(
    ("measured", "verdict", "within", "busy"),
    [
        # runs of 100 +- d ms have a spread of d %, and 2 d % is the limit if that is more than 10 %
        ((0.098, 0.100, 0.102), "yes", True, False),
        ((0.113, 0.115, 0.117), "NO", False, False),  # 13 % off, the limit is 10 %
        ((0.111, 0.120, 0.129), "NO", False, False),  # 17 % off; spread 7.5 %, limit 15 %
        ((0.105, 0.115, 0.125), "yes", True, False),  # 13 % off; spread 8.7 %, limit 17.4 %
        ((0.100, 0.130, 0.160), "cannot tell", None, True),  # 23 % off; spread 23 %, limit 46 %
        ((0.070, 0.100, 0.130), "yes", True, True),  # not off at all
        ((0.170, 0.200, 0.230), "NO", False, True),  # 50 % off; spread 15 %, limit 30 %
    ],
)
def test_a_busy_machine_cannot_tell(measured, verdict, within, busy):
    prediction = Prediction("1f1b", 0.100, 0.0, 0.0, measured=measured, iterations=15)
    assert (prediction.verdict, prediction.within) == (verdict, within)
    table = prediction_table([prediction])
    assert f" %  {verdict} " in table.splitlines()[1]
    assert ("cannot tell:" in table) == (verdict == "cannot tell")
    assert (too_busy([prediction]) is not None) == busy


def test_links_and_predictions_say_what_they_leave_out(found):
    assert "0 where these explain all of it" in calibration_report(found)
    assert "without waits" in prediction_table([predict(found, ps.generate("1f1b", 2, 8))])


def test_devices_that_wait_for_whoever_is_late_make_it_longer(measured, messages):
    noisy = calibrate([*(measured(make(2, 8), 20, 0.3, seed) for seed, make in enumerate((gpipe_probe, split_probe))), messages()])
    schedule = ps.generate("1f1b", 2, 8)
    prediction = predict(noisy, schedule, [measured(schedule, 40, 0.3, 7)])
    assert prediction.waits > 0
    assert abs(prediction.error) < abs((prediction.predicted - prediction.waits) / prediction.typical - 1)


def test_warm_up_is_left_out_and_said(measured, messages):
    run = measured(gpipe_probe(2, 8))
    slow = np.ones((run.steps, 1))
    slow[0] = 40.0
    start = run.start[:, :1]
    stretched = {name: start + (getattr(run, name) - start) * slow for name in ("start", "end", "sent", "departed", "arrived")}
    found = calibrate([replace(run, **stretched), messages()])
    assert found.costs.tables[2].times["forward"] == pytest.approx(TWO.times["forward"], rel=1e-6)
    assert any("the first 1 of 5" in note for note in found.notes)


def test_what_cannot_be_told_is_said(measured):
    found = calibrate([measured(gpipe_probe(2, 8), steps=2)])
    text = "\n".join(found.notes)
    for said in ("no run had I and W", "no message probe", "only 2 iterations", "only 2 U"):
        assert said in text
    assert "input_grad" not in found.costs.tables[2].times
    assert said in calibration_report(found)
    with pytest.raises(ScheduleError, match="nothing about zero-bubble schedules"):
        predict(found, ps.generate("zb-h1", 2, 8))


def test_other_numbers_of_stages(measured, messages):
    found = calibrate([measured(make(2, 8, 2)) for make in (gpipe_probe, split_probe)] + [messages()])
    # two of four stages: neighbours merged, (5 + 6) ms and (5.2 + 6.1) ms
    merged = found.costs.table(ps.generate("1f1b", 2, 8))
    assert merged.times["forward"] == pytest.approx((0.011, 0.0113), rel=1e-6)
    assert merged.bytes["message"] == (8e6, 0.0)
    with pytest.raises(ScheduleError, match="4 stages, and the schedule has 3"):
        found.costs.table(ps.generate("1f1b", 3, 8))


def test_interference_is_seen_where_there_is_any(measured, messages):
    # messages of 8 MB take 1.75 ms, a sixth of a forward; compute beside them is twice as slow: half of that time is lost
    runs = []
    for seed, make in enumerate((gpipe_probe, split_probe)):
        run = measured(make(2, 8), 20, 0.01, seed)
        schedule, found = run.schedule, run.messages
        end = run.end.copy()
        for device in (0, 1):
            own = (found.source_device == device) | (found.target_device == device)
            for slot in np.flatnonzero(schedule.slot_device == device).tolist():
                left = np.maximum(run.departed[:, own], run.start[:, slot, None])
                right = np.minimum(run.arrived[:, own], run.end[:, slot, None])
                end[:, slot] += np.clip(right - left, 0, None).sum(axis=1) / 2
        runs.append(replace(run, end=end))
    beside = calibrate([*runs, messages()]).interference
    assert beside.seen
    assert beside.factor == pytest.approx(2.0, rel=0.2)
    quiet = calibrate([measured(gpipe_probe(2, 8), 20, 0.01), messages()]).interference
    assert not quiet.seen


def test_refused(measured):
    run = measured(gpipe_probe(2, 8))
    with pytest.raises(ScheduleError, match="measured runs"):
        calibrate([replace(run, source="simulated")])
    with pytest.raises(ScheduleError, match="no run has ops"):
        calibrate([])
    with pytest.raises(ScheduleError, match="no replay of 1f1b"):
        predict(calibrate([run]), ps.generate("1f1b", 2, 8), [run])
