"""Cost models from files: measured stage times in TOML, or a layer profile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pipesim.costs.calibrated import CalibratedCosts, read_calibrated
from pipesim.costs.profile import ProfileCosts, parse_layers, parse_profile
from pipesim.costs.uniform import UniformCosts
from pipesim.errors import ScheduleError
from pipesim.files import read_limited
from pipesim.presets import file_or_preset, preset_names
from pipesim.units import parse_quantity

__all__ = ["cost_presets", "read_costs"]


def cost_presets() -> list[str]:
    """Names of the stage times that ship with pipesim.

    Examples:
        >>> "gpt-1.5b-a100" in cost_presets()
        True
    """
    return preset_names("times")


def read_costs(source: str | Path, **options: Any) -> UniformCosts | ProfileCosts | CalibratedCosts:
    """Reads a cost model: a preset by name, stage times or a calibration in TOML, or a layer profile (TOML, or PipeDream's ``graph.txt``).

    Args:
        source: A path, or one of :func:`cost_presets`.
        **options: For a profile, the options of :class:`ProfileCosts`; stage times take none.

    Raises:
        ScheduleError: There is no such file or preset, or the file is neither.

    Examples:
        >>> read_costs("gpt-1.5b-a100").unit
        's'
    """
    path = file_or_preset(source, "times", "cost")
    text = read_limited(path)
    if path.suffix.lower() == ".toml":
        if re.search(r"^\s*(\[\[layers\]\]|layers\s*=)", text, re.MULTILINE):
            return ProfileCosts(parse_layers(text, str(path)), **options)
        if options:
            raise ScheduleError(f"{path} holds times of stages; {', '.join(options)} belongs to a layer profile")
        return read_calibrated(text, str(path)) if re.search(r"^\s*calibration\s*=", text, re.MULTILINE) else _stage_times(text, str(path))
    return ProfileCosts(parse_profile(text, str(path)), **options)


def _stage_times(text: str, where: str) -> UniformCosts:
    from pipesim.userfiles import StageTimesFile, parse_toml

    file = parse_toml(StageTimesFile, text, where)
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "slot": 1.0}[file.unit]

    def time(value: float | list[float] | None) -> Any:
        if value is None:
            return None
        return [number * scale for number in value] if isinstance(value, list) else value * scale

    times = ("forward", "backward", "input_grad", "weight_grad", "optimizer", "overlap", "reduction", "tied_reduction", "unshard", "latency")
    fields: dict[str, Any] = {name: time(getattr(file, name)) for name in times}
    fields.update({name: getattr(file, name) for name in ("tied", "buckets", "reduce_every_microbatch")})
    memory = file.memory.model_dump(exclude_none=True) if file.memory else {}
    if file.unit != "slot":
        memory = {name: _bytes(value, f"{where}: memory.{name}") for name, value in memory.items()}
    if "optimizer" in memory:
        memory["optimizer_state"] = memory.pop("optimizer")
    fields = {name: value for name, value in fields.items() if value is not None}
    return UniformCosts(**fields, **memory, stages=file.stages, unit="slot" if file.unit == "slot" else "s", name=file.name or Path(where).stem)


def _bytes(value: Any, what: str) -> Any:
    return [_bytes(one, what) for one in value] if isinstance(value, list) else parse_quantity(value, "bytes", what)
