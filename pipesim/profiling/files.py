"""A measurement as a file that ``--costs`` reads."""

from __future__ import annotations

import json
from pathlib import Path

from pipesim.errors import ScheduleError
from pipesim.files import write_atomically
from pipesim.profiling.measuring import ModelMeasurement
from pipesim.profiling.spread import KINDS, numbers

__all__ = ["graph_text", "toml_text", "write_profile"]


def write_profile(found: ModelMeasurement, path: str | Path, name: str = "profile") -> None:
    """Writes a profile: TOML, or PipeDream's format where the name ends with ``.txt``.

    Args:
        found: What was measured.
        path: Where to.
        name: What was measured, for the file.

    Raises:
        ScheduleError: The ending is neither.
        OSError: The file cannot be written.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".toml", ".txt"):
        raise ScheduleError(f"{path}: a profile ends with .toml, or with .txt for PipeDream's format, which has no halves of the backward")
    write_atomically(path, toml_text(found, name) if suffix == ".toml" else graph_text(found))


def toml_text(found: ModelMeasurement, name: str = "profile") -> str:
    """The measurement in TOML, with everything in it; spread, pooling and warnings as comments."""
    shape = " x ".join(map(str, found.batch_shape))
    source = f"pipesim profile {name}, {found.dtype} batch of {shape} on {found.device}, torch {found.torch}, medians of {found.repeats}"
    lines = [f"# warning: {warning}" for warning in found.warnings]
    lines += [f"name = {_quoted(name)}", f"source = {_quoted(source)}", 'unit = "ms"']
    for layer in found.layers:
        lines += ["", "[[layers]]", f"name = {_quoted(layer.name)}", f"kind = {_quoted(layer.kind)}"]
        if layer.pooled:
            lines.append(f"# alike: {len(layer.pooled)} layers pooled ({numbers(layer.pooled)}), medians of {len(layer.pooled) * found.repeats}")
        for kind in KINDS:
            time, apart = getattr(layer, kind), layer.spread.get(kind)
            lines.append(f"{kind} = {time * 1e3:.6g}" + (f"  # ± {apart / time:.1%}" if apart is not None and time else ""))
        sizes = {kind: getattr(layer, kind) for kind in ("output", "activation", "parameters", "peak")}
        lines += [f'{kind} = "{size} B"' for kind, size in sizes.items() if size is not None]
    return "\n".join(lines) + "\n"


def graph_text(found: ModelMeasurement) -> str:
    """The measurement as PipeDream writes one: no halves of the backward, and an activation is the layer's output."""
    lines = [
        f"node{number} -- {layer.kind} -- forward_compute_time={layer.forward * 1e3:.6f}, backward_compute_time={layer.backward * 1e3:.6f}, "
        f"activation_size={layer.output:.1f}, parameter_size={layer.parameters:.1f}"
        for number, layer in enumerate(found.layers, start=1)
    ]
    lines += [f"\tnode{number} -- node{number + 1}" for number in range(1, len(found.layers))]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A basic TOML string."""
    return json.dumps(text, ensure_ascii=False)
