"""Calibrating the cost model from measured runs, and predicting runs that were not made. See ``docs/calibration.md``."""

from __future__ import annotations

from pipesim.calibration.calibrated import Calibration, Interference, MeasuredLink, OpSpread, calibrate
from pipesim.calibration.files import cluster_path, load_calibration, save_calibration
from pipesim.calibration.fitting import LinkFit, Spread, fit_link, spread, warm_up
from pipesim.calibration.predicting import Prediction, predict, simulated, too_busy
from pipesim.calibration.report import calibration_report, prediction_table
from pipesim.calibration.running import Done, Plan, run_plan
from pipesim.calibration.samples import collect
from pipesim.calibration.schedules import MESSAGES, gpipe_probe, message_probe, split_probe

__all__ = [
    "MESSAGES",
    "Calibration",
    "Done",
    "Interference",
    "LinkFit",
    "MeasuredLink",
    "OpSpread",
    "Plan",
    "Prediction",
    "Spread",
    "calibrate",
    "calibration_report",
    "cluster_path",
    "collect",
    "fit_link",
    "gpipe_probe",
    "load_calibration",
    "message_probe",
    "predict",
    "prediction_table",
    "run_plan",
    "save_calibration",
    "simulated",
    "split_probe",
    "spread",
    "too_busy",
    "warm_up",
]
