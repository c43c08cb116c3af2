"""The campaign behind vTrain (Bang et al. 2024): 65 iteration times of Megatron-DeepSpeed on A100 nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from measured_runs.part import SIMPLE, Floats, Part
from pipesim.cluster import Cluster
from pipesim.fit import Errors, Fit, Predictor, facts, fit, read_runs, shared, worst
from pipesim.models import Efficiency

NODES = replace(SIMPLE, name="A100 80 GB", cluster=Cluster.load(Path(__file__).parent / "a100-800gbit.toml"))
FREE = ("gemm", "memory", "layer_overhead", "between", "gradient", "step_overhead")
FEW = ("gemm", "layer_overhead", "step_overhead")
CONSTANTS = {"vocabulary": "50257", "recompute": "full", "gradient_bytes": "2", "scatter_gather": "true"}


def vtrain(data: Path, also: Path | None = None, *, folds: int = 10, shuffles: int = 10) -> Part:
    name = Path("vtrain") / "a100_multi_node_iteration_times.csv"
    found = fit(read_runs(data / name, CONSTANTS), NODES, FREE)
    crossed = found.folds(folds, shuffles)
    own = facts(found)
    labels = [f"{one['params_billion']}B t{one['tensor']} p{one['pipeline']} d{one['data']} b{one['microbatch']}" for one in own]
    part = Part(
        "vTrain's campaign: iteration time of 65 runs on A100 nodes",
        {name: getattr(found.efficiency, name) for name in found.free},
        labels,
        found.errors,
    )
    part.left_out = {f"{folds} folds x {shuffles}": crossed, "model size": found.left_out([one["params_billion"] for one in own])}
    if also is not None:
        new = read_runs(also / name, CONSTANTS)
        part.new = found.predict(new) / [run.seconds for run in new] - 1
    means, medians = (np.array([getattr(Errors.of(one), figure) for one in crossed]) for figure in ("mean", "median"))
    part.notes.append(
        f"ten-fold mean {means.mean():.2f} ± {means.std():.2f} %, median {medians.mean():.2f} ± {medians.std():.2f} % over {shuffles} shuffles; vTrain published 14.73 %"
    )
    part.notes += [
        f"left out {value}B: {Errors.of(part.left_out['model size'][[one['params_billion'] == value for one in own]])}"
        for value in dict.fromkeys(one["params_billion"] for one in own)
    ]
    part.notes += few(found)
    part.notes.append("the worst ten: " + ", ".join(f"{labels[row]} {100 * found.errors[row]:+.0f} %" for row in worst(found)))
    part.notes.append(
        "what they share: " + ", ".join(f"{one.column} {one.value} ({one.among_worst} of 10, {one.among_all} of {len(own)})" for one in shared(found))
    )
    part.more = {"ten_fold_mean": means.tolist(), "ten_fold_median": medians.tolist(), "uncertainty": found.uncertainty.tolist()}
    return part


def few(found: Fit, draws: int = 10) -> list[str]:
    """How well a few runs predict the others: what to expect from measuring a few on a cluster of one's own."""
    small = fit(found.runs, NODES, FEW)
    random = np.random.default_rng(0)
    notes = []
    for count in (6, 20):
        errors = []
        for _ in range(draws):
            measured = np.isin(np.arange(len(found.runs)), random.permutation(len(found.runs))[:count])
            errors.append(small.left_out(measured.tolist())[~measured])
        mean, median = (np.mean([getattr(Errors.of(one), figure) for one in errors]) for figure in ("mean", "median"))
        notes.append(f"fitted to {count} random runs ({len(FEW)} parameters), the others: mean {mean:.1f} %, median {median:.1f} %, {draws} draws")
    return notes


def elsewhere(data: Path, efficiency: Efficiency) -> Floats:
    """Errors of the runs with an efficiency that was fitted to other runs."""
    runs = read_runs(data / "vtrain" / "a100_multi_node_iteration_times.csv", CONSTANTS)
    return np.array([Predictor(run.choices[0], NODES).simulate(efficiency) / run.seconds - 1 for run in runs])
