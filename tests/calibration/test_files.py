"""Calibrations as files."""

from __future__ import annotations

import pytest

import pipesim as ps
from pipesim.calibration import Interference, calibrate, cluster_path, load_calibration, save_calibration, simulated
from pipesim.costs import read_costs
from pipesim.errors import ScheduleError


@pytest.fixture(scope="module")
def found(all_runs):
    return calibrate(all_runs, "two ranks")


def test_reads_back_exactly(found, tmp_path):
    path, beside = save_calibration(found, tmp_path / "calibration.toml")
    assert beside == cluster_path(path)
    assert load_calibration(path) == found


def test_costs_and_cluster_give_the_same_simulation(found, tmp_path):
    path, beside = save_calibration(found, tmp_path / "calibration.toml")
    for name in ("1f1b", "interleaved-1f1b", "zb-h1"):
        schedule = ps.generate(name, 2, 8)
        run = ps.simulate(schedule, read_costs(path), cluster=ps.Cluster.load(beside))
        assert run.makespan == simulated(found, schedule).makespan


def test_interference_travels(found, tmp_path):
    from dataclasses import replace

    seen = replace(found, interference=Interference(1.2, 0.01, 100))
    path, beside = save_calibration(seen, tmp_path / "calibration.toml")
    assert load_calibration(path) == seen
    assert ps.Cluster.load(beside).communication.interference == {"p2p": 1.2}


def test_a_wrong_file_says_what_is_wrong(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("calibration = 1\n[[stages]]\nforward = [1.0, 2.0]\nbackward = [1.0]\n")
    with pytest.raises(ScheduleError, match="backward has 1 values, and forward 2"):
        read_costs(path)
    path.write_text("calibration = 1\n[[stages]]\nforwrad = [1.0]\n")
    with pytest.raises(ScheduleError, match="forwrad"):
        load_calibration(path)
