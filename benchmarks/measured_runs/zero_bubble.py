"""Qi et al. 2024 (zero-bubble paper): throughput and memory of Table 4 from the stage times of Table 9."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from measured_runs.part import A100, Floats, Part, read
from pipesim import Schedule, UniformCosts, generate, simulate
from pipesim.errors import ScheduleError
from pipesim.models import ModelSpec, Parallelism, TransformerCosts


@dataclass(frozen=True)
class ZeroBubbleRow:
    """A row of Table 4 (Qi et al. 2024) with its row of Table 9: times in seconds per stage, sizes."""

    model: str
    schedule: str
    devices: int
    microbatches: int
    samples: int
    forward: float
    input_grad: float
    weight_grad: float
    hop: float
    hidden: int
    heads: int
    sequence: int
    throughput: float
    memory: float

    @property
    def seconds(self) -> float:
        """Measured: the paper's figure is samples per GPU and second."""
        return self.microbatches * self.samples / (self.devices * self.throughput)

    @property
    def label(self) -> str:
        return f"{self.model} m={self.microbatches} {self.schedule}"

    @property
    def layers_of_a_stage(self) -> int:
        """Of an inner stage: the first and the last have one less, so that the embedding and the output layer balance."""
        return round(float(self.model.rstrip("Bb")) * 1e9 / (12 * self.hidden**2) / self.devices)

    @property
    def chunks(self) -> int:
        """The paper's interleaved 1F1B has as many chunks as a stage has layers."""
        return self.layers_of_a_stage if self.schedule == "1F1B-I" else 1

    @property
    def spec(self) -> ModelSpec:
        sizes = {"layers": self.devices * self.layers_of_a_stage - 2, "hidden": self.hidden, "heads": self.heads, "sequence": self.sequence}
        return ModelSpec(name=self.model, vocabulary=50304, **sizes)

    @property
    def costs(self) -> TransformerCosts:
        """For the bytes."""
        stages = self.devices * self.chunks
        inner = self.layers_of_a_stage // self.chunks
        layout = [inner - 1, *[inner] * (stages - 2), inner - 1]
        return TransformerCosts(self.spec, A100, Parallelism(pipeline=self.devices, microbatch=self.samples, layout=layout))

    @property
    def order(self) -> Schedule:
        """The schedule. Orders that depend on times are found for the profiled ones, as the paper does."""
        if self.schedule == "1F1B":
            return generate("1f1b", self.devices, self.microbatches)
        if self.schedule == "1F1B-I":
            return generate("interleaved-1f1b", self.devices, self.microbatches, chunks=self.chunks)
        times = {"forward": self.forward, "input_grad": self.input_grad, "weight_grad": self.weight_grad, "latency": self.hop}
        name = {"ZB-1p": "zb1p", "ZB-2p": "zb2p"}[self.schedule]
        return generate(name, self.devices, self.microbatches, **times, weight_grad_memory=self.costs.weight_grad_memory())


_order = cache(lambda row: row.order)


def zero_bubble_rows(folder: Path) -> list[ZeroBubbleRow]:
    profiled = {(row["model"], row["p"], row["m"]): row for row in read(folder / "papers" / "zb_table9_profiled_times.csv")}
    rows = []
    for row in read(folder / "papers" / "zb_table4_measured.csv"):
        if (row["model"], row["p"], row["m"]) not in profiled:
            raise ScheduleError(f"{folder}: Table 9 has no times for {row['model']}, p = {row['p']}, m = {row['m']}, which Table 4 has")
        times = profiled[row["model"], row["p"], row["m"]]
        sizes = (int(row["p"]), int(row["m"]), int(row["micro_batch"]))
        seconds = (float(times[name]) * 1e-3 for name in ("T_F", "T_B", "T_W", "T_comm"))
        shape = (int(times[name]) for name in ("hidden_h", "attn_heads_a", "seq_s"))
        rows.append(
            ZeroBubbleRow(row["model"], row["schedule"], *sizes, *seconds, *shape, float(row["samples_per_gpu_per_s"]), float(row["memory_gb"]))
        )
    return rows


def zero_bubble_seconds(row: ZeroBubbleRow, overhead: float = 0.0, slowdown: float = 1.0, *, update: bool = True) -> float:
    """Seconds of an iteration.

    Args:
        row: What ran.
        overhead: Seconds per op that the profile of kernels does not hold: launching it and its messages, and the host's
            waiting for them.
        slowdown: How much longer kernels take in the run than alone, beside NCCL's and under sustained load.
        update: Whether to count the optimizer.

    Two more terms are known and not fitted: Adam moves 30 bytes per parameter at 85 % of the HBM's rate; and ZB's
    post-validation lets every device go on alone, where the others wait for the global gradient norm.
    """
    forward, input_grad, weight_grad = (time * slowdown / row.chunks for time in (row.forward, row.input_grad, row.weight_grad))
    costs = UniformCosts(
        forward=forward + overhead,
        input_grad=input_grad + overhead,
        weight_grad=weight_grad + overhead,
        backward=input_grad + weight_grad + overhead,
        optimizer=12 * row.hidden**2 * row.layers_of_a_stage * 30 / (A100.memory_bandwidth * 0.85) / row.chunks if update else 0.0,
        latency=row.hop,
        unit="s",
    )
    return float(simulate(_order(row), costs, barrier=not row.schedule.startswith("ZB")).iteration_time)


def zero_bubble(data: Path, also: Path | None = None) -> tuple[Part, Part]:
    rows = zero_bubble_rows(data)
    measured = np.log([row.seconds for row in rows])

    def solve(chosen: Sequence[int]) -> Floats:
        def residuals(point: Floats) -> Floats:
            return np.log([zero_bubble_seconds(rows[row], point[0] * 1e-3, point[1]) for row in chosen]) - measured[list(chosen)]

        return np.asarray(least_squares(residuals, [0.5, 1.0], bounds=([0, 0.5], [10, 2]), diff_step=1e-4).x)

    def errors(these: Sequence[ZeroBubbleRow], point: Floats) -> Floats:
        """Of the throughput."""
        return np.array([row.seconds / zero_bubble_seconds(row, point[0] * 1e-3, point[1]) - 1 for row in these])

    point = solve(range(len(rows)))
    left_out = {}
    for name in ("model", "schedule"):
        left_out[name] = np.zeros(len(rows))
        for value in dict.fromkeys(getattr(row, name) for row in rows):
            out = [number for number, row in enumerate(rows) if getattr(row, name) == value]
            left_out[name][out] = errors([rows[row] for row in out], solve([row for row in range(len(rows)) if row not in out]))
    pure = np.array([zero_bubble_seconds(row, update=False) / row.seconds for row in rows])
    new = None if also is None else zero_bubble_rows(also)
    part = Part(
        "zero-bubble paper, Table 4: throughput",
        {"overhead per op (ms)": point[0], "slowdown": point[1]},
        [row.label for row in rows],
        errors(rows, point),
        left_out,
    )
    part.new = None if new is None else errors(new, point)
    part.notes.append(f"the pure schedule takes {100 * (1 - pure.mean()):.1f} % less time than was measured")
    return part, zero_bubble_memory(rows, new)


def zero_bubble_memory(rows: Sequence[ZeroBubbleRow], new: Sequence[ZeroBubbleRow] | None = None) -> Part:
    """The peak over all devices, in GB of 10⁹ bytes: activations by the paper's formula, logits, and 18 bytes a parameter."""

    def errors(these: Sequence[ZeroBubbleRow]) -> Floats:
        return np.array([max(simulate(_order(row), row.costs).peak_memory) / 1e9 / row.memory - 1 for row in these])

    return Part("zero-bubble paper, Table 4: peak memory", {}, [row.label for row in rows], errors(rows), new=None if new is None else errors(new))
