"""Narayanan et al. 2021 (PTD-P), Table 1, and Korthikanti et al. 2022, Tables 2 and 5: models on machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from measured_runs.part import SIMPLE, Floats, Part, read
from pipesim.fit import Configuration, MeasuredRun, fit
from pipesim.models import ModelSpec, Parallelism, layer_activation


def papers_runs(folder: Path) -> list[MeasuredRun]:
    """Runs of both tables. fp16 gradients; messages are scattered and gathered, or split by sequence parallelism."""
    runs = []
    for row in read(folder / "papers" / "korthikanti_table5.csv"):
        sizes = {name: int(row[name]) for name in ("layers", "hidden", "heads")}
        model = ModelSpec(name=row["model"], vocabulary=51200, sequence=2048, **sizes)
        pipeline, chunks = int(row["pipeline"]), int(row["chunks"])
        parallel = Parallelism(
            tensor=8, pipeline=pipeline, data=int(row["gpus"]) // (8 * pipeline), microbatch=int(row["micro_batch"]), gradient_bytes=2
        )
        kinds = {
            "full_recompute": replace(parallel, recompute="full", scatter_gather=True),
            "selective_sequence_parallel": replace(parallel, recompute="selective", sequence_parallel=True),
        }
        for kind, one in kinds.items():
            choice = _interleaved(model, one, int(row["batch"]), chunks)
            runs.append(MeasuredRun((choice,), float(row[f"{kind}_s"]), f"{row['model']} {kind}", {"paper": "Korthikanti"}))
    for row in read(folder / "papers" / "megatron_ptdp_table1.csv"):
        sizes = {name: int(row[name]) for name in ("layers", "hidden", "heads")}
        model = ModelSpec(name=f"{row['params_billion']}B", vocabulary=51200, sequence=2048, **sizes)
        degrees = {name: int(row[name]) for name in ("tensor", "pipeline", "data")}
        batch = int(row["batch"])
        seconds = ptdp_flops(model, batch) / (int(row["gpus"]) * float(row["tflops_per_gpu"]) * 1e12)
        runs.append(MeasuredRun(tuple(_choices(model, degrees, batch)), seconds, model.name, {"paper": "PTD-P"}))
    return runs


def ptdp_flops(model: ModelSpec, batch: int) -> float:
    """FLOPs of an iteration with recomputation: PTD-P, equation 3."""
    s, h, layers, v = model.sequence, model.hidden, model.layers, model.vocabulary
    return 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))


def _choices(model: ModelSpec, degrees: dict[str, int], batch: int) -> list[Configuration]:
    """The paper does not say which microbatch and how many chunks: all that are possible."""
    found = []
    for microbatch in (1, 2, 4, 8, 16, 32):
        for chunks in range(1, model.layers // degrees["pipeline"] + 1):
            parallel = Parallelism(**degrees, microbatch=microbatch, recompute="full", scatter_gather=degrees["tensor"] > 1, gradient_bytes=2)
            fits = model.layers % (degrees["pipeline"] * chunks) == 0 and batch % (microbatch * degrees["data"]) == 0
            if fits and (chunks == 1 or (degrees["pipeline"] > 1 and batch // (microbatch * degrees["data"]) % degrees["pipeline"] == 0)):
                found.append(_interleaved(model, parallel, batch, chunks))
    return found


def _interleaved(model: ModelSpec, parallel: Parallelism, batch: int, chunks: int) -> Configuration:
    if chunks == 1:
        return Configuration(model, parallel, batch)
    return Configuration(model, parallel, batch, "interleaved-1f1b", {"chunks": chunks})


def papers(data: Path, also: Path | None = None) -> Part:
    runs = papers_runs(data)
    found = fit(runs, SIMPLE, ["gemm"])
    labels = [run.label for run in runs]
    part = Part(
        "PTD-P, Table 1 (hardware TFLOP/s), and Korthikanti et al., Table 5 (seconds)",
        {name: getattr(found.efficiency, name) for name in found.free},
        labels,
        _as_published(runs, found.errors),
    )
    groups = {"one run": labels, "model": [run.choices[0].model.name for run in runs]}
    part.left_out = {name: _as_published(runs, found.left_out(values)) for name, values in groups.items()}
    if also is not None:
        new = papers_runs(also)
        part.new = _as_published(new, found.predict(new) / [run.seconds for run in new] - 1)
    chosen = [run.choices[one] for run, one in zip(runs, found.chosen, strict=True)]
    own = [
        f"{run.label} b={one.parallel.microbatch} v={one.options.get('chunks', 1)}"
        for run, one in zip(runs, chosen, strict=True)
        if len(run.choices) > 1
    ]
    part.notes.append("microbatch b and chunks v that the model takes for PTD-P's: " + ", ".join(own))
    return part


def _as_published(runs: Sequence[MeasuredRun], errors: Floats) -> Floats:
    """PTD-P publishes a rate: its error is that of the inverse of the time."""
    return np.where([run.facts["paper"] == "PTD-P" for run in runs], 1 / (1 + errors) - 1, errors)


def activations() -> Part:
    """Bytes per layer against the paper's formulas, for its four models."""
    labels, errors = [], []
    for name, h, a, b in (("22B", 6144, 64, 4), ("175B", 12288, 96, 1), ("530B", 20480, 128, 1), ("1T", 25600, 160, 1)):
        s, t = 2048, 8
        model = ModelSpec(name=name, layers=1, hidden=h, heads=a, vocabulary=51200, sequence=s)
        plain, sequence = (layer_activation(model, Parallelism(tensor=t, sequence_parallel=on), b) for on in (False, True))
        table = {
            "tensor": (plain.whole, s * b * h * (10 + 24 / t + 5 * a * s / (h * t))),
            "tensor, sequence": (sequence.whole, s * b * h * (34 / t + 5 * a * s / (h * t))),
            "tensor, selective": (plain.whole - plain.attention, s * b * h * (10 + 24 / t)),
            "tensor, sequence, selective": (sequence.whole - sequence.attention, s * b * h * 34 / t),
            "full": (plain.input, 2 * s * b * h),
        }
        labels += [f"{name} {kind}" for kind in table]
        errors += [own / formula - 1 for own, formula in table.values()]
    return Part("Korthikanti et al., Table 2: bytes of a layer's activations, against the formulas", {}, labels, np.array(errors))
