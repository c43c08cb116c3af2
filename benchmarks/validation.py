"""How far off is pipesim from runs that other people measured, and how many numbers were fitted to them?

Run ``python benchmarks/validation.py --data ../shared/data`` (or ``make validation``). It prints every error with the number of
fitted parameters beside it, and writes the rows (JSON) and error plots (PNG) to out/validation. ``--also FOLDER`` predicts tables of
the same names in another folder with what was fitted here: rows that the fit has never seen. docs/validation.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from measured_runs.papers import activations, papers
from measured_runs.part import SIMPLE, Part, plot
from measured_runs.vtrain import elsewhere, vtrain
from measured_runs.zero_bubble import zero_bubble

from pipesim.errors import ScheduleError
from pipesim.fit import Errors


def report(data: Path, also: Path | None = None) -> dict[str, Part]:
    """All parts by name."""
    throughput, memory = zero_bubble(data, also)
    models, campaign = papers(data, also), vtrain(data, also)
    transferred = Errors.of(elsewhere(data, SIMPLE.with_efficiency(None, **models.fitted).efficiency))
    campaign.notes.append(f"with what was fitted to PTD-P and Korthikanti et al. instead: {transferred}  (no parameter fitted to these rows)")
    return {
        "zero_bubble": throughput,
        "zero_bubble_memory": memory,
        "papers": models,
        "vtrain": campaign,
        "activations": activations(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, default=Path(__file__).parent.parent.parent / "shared" / "data", help="the folder with papers/ and vtrain/"
    )
    parser.add_argument("--also", type=Path, help="a folder with tables of the same names, to be predicted only")
    parser.add_argument("--out", type=Path, default=Path("out") / "validation", help="where rows and plots go")
    arguments = parser.parse_args()
    if not (arguments.data / "papers").is_dir():
        print(f"the folder of measured runs, {arguments.data}, is not there; give --data", file=sys.stderr)
        return
    try:
        parts = report(arguments.data, arguments.also)
    except ScheduleError as error:
        sys.exit(f"Error: {error}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        print(part.text() + "\n", flush=True)
        plot(part, arguments.out / f"{name}.png")
    (arguments.out / "validation.json").write_text(json.dumps({name: part.as_dict() for name, part in parts.items()}, indent=1) + "\n")
    print(f"rows and plots are in {arguments.out}")


if __name__ == "__main__":
    main()
