"""One comparison with measured runs, and how it is shown."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.fit import Errors
from pipesim.models import read_device

Floats = NDArray[np.float64]
A100 = read_device("a100-80g")
# all products at one rate, whatever their shape
SIMPLE = A100.with_efficiency(gemm_size=0.0, attention=1.0)


@dataclass
class Part:
    """One table: what was measured, what is predicted, and what the prediction rests on."""

    title: str
    fitted: dict[str, float]
    labels: list[str]
    errors: Floats
    left_out: dict[str, Floats] = field(default_factory=dict)
    new: Floats | None = None
    notes: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        number = f"({len(self.fitted)} fitted parameter{'s' * (len(self.fitted) != 1)}, {len(self.labels)} rows)"
        lines = [
            f"== {self.title}",
            "   " + ", ".join(f"{name} {value:.4g}" for name, value in self.fitted.items()) if self.fitted else "   nothing fitted",
        ]
        lines += [f"   {'all rows':28s}{Errors.of(self.errors)}  {number}"]
        lines += [f"   {'left out: ' + name:28s}{Errors.of(errors)}  {number}" for name, errors in self.left_out.items()]
        if self.new is not None:
            lines.append(
                f"   {'rows never seen':28s}{Errors.of(self.new)}  ({len(self.fitted)} parameters, none fitted to these {len(self.new)} rows)"
            )
        return "\n".join(lines + ["   " + note for note in self.notes])

    def as_dict(self) -> dict[str, Any]:
        left_out = {name: Errors.of(errors)._asdict() for name, errors in self.left_out.items()}
        rows = dict(zip(self.labels, self.errors.tolist(), strict=True))
        new = None if self.new is None else Errors.of(self.new)._asdict()
        return {
            "title": self.title,
            "fitted": self.fitted,
            "errors": Errors.of(self.errors)._asdict(),
            "left_out": left_out,
            "new": new,
            "rows": rows,
            **self.more,
        }


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def plot(part: Part, path: Path) -> None:
    """Errors of all rows, and of those that were left out where each was left out once."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.17 * len(part.labels)))
    axes.barh(part.labels, 100 * part.errors, color="#4477aa", label=f"all rows fitted ({len(part.fitted)} parameters)")
    for (name, errors), sign in zip(part.left_out.items(), "ox", strict=False):
        if errors.ndim == 1:
            axes.plot(100 * errors, part.labels, sign, color="#cc6677", markersize=4, label=f"left out: {name}")
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(title=part.title, xlabel="predicted / measured - 1, %")
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
