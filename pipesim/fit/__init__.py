"""Efficiencies and link parameters from measured iteration times, and how far to trust them. Needs scipy: ``pipesim[fit]``."""

from __future__ import annotations

from pipesim.fit.fitting import FREE, Fit, fit
from pipesim.fit.predictor import Configuration, MeasuredRun, Predictor
from pipesim.fit.report import Errors, as_dict, by, facts, shared, summary, warnings, worst
from pipesim.fit.runs import read_runs

__all__ = [
    "FREE",
    "Configuration",
    "Errors",
    "Fit",
    "MeasuredRun",
    "Predictor",
    "as_dict",
    "by",
    "facts",
    "fit",
    "read_runs",
    "shared",
    "summary",
    "warnings",
    "worst",
]
