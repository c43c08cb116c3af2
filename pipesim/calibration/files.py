"""Calibrations as files: the costs with all figures, and beside them a cluster file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipesim.calibration.calibrated import Calibration, Interference, MeasuredLink, OpSpread
from pipesim.calibration.fitting import Spread
from pipesim.costs.calibrated import read_calibrated
from pipesim.files import read_limited, write_atomically
from pipesim.userfiles import StageCalibrationFile, parse_toml

__all__ = ["calibration_text", "cluster_path", "cluster_text", "load_calibration", "save_calibration"]

_SPREAD = {"count": "count", "typical": "typical", "median": "median", "deviation": "deviation", "low": "low", "high": "high"}


def cluster_path(path: str | Path) -> Path:
    """Where the cluster of a calibration is written.

    Examples:
        >>> cluster_path("calibration.toml").name
        'calibration-cluster.toml'
    """
    path = Path(path)
    return path.with_name(f"{path.stem}-cluster{path.suffix}")


def save_calibration(calibration: Calibration, path: str | Path) -> tuple[Path, Path]:
    """Writes a calibration, for ``--costs``, and its cluster, for ``--cluster``. Returns both paths.

    Raises:
        OSError: One cannot be written.
    """
    path, beside = Path(path), cluster_path(path)
    write_atomically(path, calibration_text(calibration))
    write_atomically(beside, cluster_text(calibration))
    return path, beside


def load_calibration(path: str | Path) -> Calibration:
    """Reads what :func:`save_calibration` wrote: equal to what was saved, to the last bit.

    Raises:
        ScheduleError: It is no calibration file.
        OSError: It cannot be read.
    """
    text = read_limited(Path(path))
    file = parse_toml(StageCalibrationFile, text, str(path))
    spreads = (OpSpread(one.stages, one.stage, one.kind, Spread(**{key: getattr(one, key) for key in _SPREAD})) for one in file.spreads)
    fields = ("latency", "bandwidth", "probe_latency", "hop", "sizes", "count", "error")
    links = {(one.from_, one.to): MeasuredLink(*(getattr(one, key) for key in fields)) for one in file.links}
    beside = None if file.interference is None else Interference(**file.interference.model_dump())
    jitter = {kind: tuple(values) for kind, values in file.jitter.items()}
    return Calibration(read_calibrated(text, str(path)), links, tuple(spreads), beside, jitter, file.source, tuple(file.notes))


def calibration_text(calibration: Calibration) -> str:
    """The text of a calibration file. Numbers are in seconds and bytes."""
    costs = calibration.costs
    lines = ["# What pipesim calibrate measured, in seconds and bytes. For --costs; its links are in the cluster file beside it, for --cluster."]
    lines += _pairs({"calibration": 1, "name": costs.name, "notes": list(calibration.notes)})
    lines += ["", "[source]", *_pairs(calibration.source)]
    lines += ["", "[host]", *_pairs(vars(costs.host))]
    for _, table in sorted(costs.tables.items()):
        columns = {name: list(values) for name, values in {**table.times, **table.bytes}.items()}
        lines += ["", "[[stages]]", *_pairs(columns)]
    for pair, link in sorted(calibration.links.items()):
        lines += ["", "[[links]]", *_pairs({"from": pair[0], "to": pair[1], **vars(link)})]
    for one in calibration.spreads:
        lines += ["", "[[spreads]]", *_pairs({"stages": one.stages, "stage": one.stage, "kind": one.kind, **vars(one.spread)})]
    if calibration.interference is not None:
        lines += ["", "[interference]", *_pairs(vars(calibration.interference))]
    if calibration.jitter:
        lines += ["", "[jitter]", *_pairs({kind: list(values) for kind, values in calibration.jitter.items()})]
    return "\n".join(lines) + "\n"


def cluster_text(calibration: Calibration) -> str:
    """The text of a cluster file with the links of a calibration."""
    cluster = calibration.cluster()
    lines = ["# Links that pipesim calibrate measured, for --cluster.", *_pairs({"name": cluster.name}), "", "[inside]", *_link(cluster.inside)]
    for pair, link in sorted(cluster.links.items()):
        lines += ["", "[[links]]", *_pairs({"from": pair[0], "to": pair[1]}), *_link(link)]
    factors = cluster.communication.interference
    if factors:
        lines += ["", "[communication.interference]", *_pairs(factors)]
    return "\n".join(lines) + "\n"


def _link(link: Any) -> list[str]:
    values = {"latency": f"{link.latency!r} s"}
    if link.bandwidth is not None:
        values["bandwidth"] = f"{link.bandwidth!r} B/s"
    return _pairs(values)


def _pairs(values: Mapping[str, Any]) -> list[str]:
    """TOML's strings, numbers and arrays of them are those of JSON, where they are finite; None is left out."""
    return [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
