"""How far off are fitted all-reduce curves from measured tables?

Run ``python benchmarks/collectives.py --data ../shared/data``. It prints the errors of every table with the number of fitted
numbers beside them: in the sample, of rows and of whole tables that were left out, of the in-place column (a second run
of every row, never fitted), and by size. ``--also FOLDER`` judges tables of the same names in another folder by the presets that
ship. ``--write FOLDER`` fits anew and writes ``collectives-*.toml``: that is how the presets of the package were made.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipesim.curves import Curve, fit_curve, read_curve, write_curve

Floats = NDArray[np.float64]
Table = tuple[Floats, Floats, Floats]  # (rows,) bytes, seconds, seconds in place
MIB = 2.0**20
DECADES = ((1, 16), (16, 128), (128, 1024))
SOURCE = """nccl-tests all-reduce, {} in one node, {} GPUs, 1 MiB to 1 GiB (VIA-Research/vTrain, MIT); three numbers to each table, \
fitted to all of its rows (python benchmarks/collectives.py --data FOLDER --write FOLDER)"""


def read_tables(folder: Path) -> dict[str, dict[int, Table]]:
    """GPU to number of members to the table."""
    found: dict[str, dict[int, Table]] = {}
    for path in sorted(folder.glob("*_allreduce_*gpu.csv")):
        match = re.fullmatch(r"(\w+)_allreduce_(\d+)gpu", path.stem)
        if match is None:
            continue
        with path.open(newline="") as file:
            rows = list(csv.reader(file))
        # the header names two columns alike: out of place, then in place
        first, second = (column for column, name in enumerate(rows[0]) if name == "time(ns)")
        numbers = np.array([[float(row[0]), float(row[first]), float(row[second])] for row in rows[1:]])
        inside = (numbers[:, 0] >= MIB) & (numbers[:, 0] <= 1024 * MIB)
        numbers = numbers[inside]
        found.setdefault(match[1], {})[int(match[2])] = (numbers[:, 0], numbers[:, 1] * 1e-9, numbers[:, 2] * 1e-9)
    return found


def errors(curve: Curve, members: int, sizes: Floats, times: Floats) -> Floats:
    """(rows,) predicted / measured - 1."""
    return np.asarray(curve.time(members, sizes) / times - 1)


def fitted(tables: dict[int, Table], rows: slice = slice(None), name: str = "") -> Curve:
    """The curve of some rows of each table."""
    return fit_curve({members: (sizes[rows], times[rows]) for members, (sizes, times, _) in tables.items()}, name)


def judged(tables: dict[int, Table]) -> Iterator[tuple[int, str, int, Floats]]:
    """(members, what was judged, how many numbers were fitted for it, errors)."""
    whole, even, odd = fitted(tables), fitted(tables, slice(0, None, 2)), fitted(tables, slice(1, None, 2))
    for members, (sizes, times, in_place) in tables.items():
        yield members, "in the sample", 3, errors(whole, members, sizes, times)
        halves = [errors(one, members, sizes[rows], times[rows]) for one, rows in ((even, slice(1, None, 2)), (odd, slice(0, None, 2)))]
        yield members, "left out: every other row", 3, np.concatenate(halves)
        lower, upper = sizes <= 512 * MIB, sizes > 512 * MIB
        below = fit_curve({members: (sizes[lower], times[lower])})
        yield members, "left out: above 512 MiB", 3, errors(below, members, sizes[upper], times[upper])
        yield members, "the in-place column", 3, errors(whole, members, sizes, in_place)
        for low, high in DECADES:
            part = (sizes >= low * MIB) & (sizes <= high * MIB)
            yield members, f"in the sample, {low} to {high} MiB", 3, errors(whole, members, sizes[part], times[part])
        once_an_octave = np.unique(np.searchsorted(sizes, MIB * 2 ** np.arange(0, 10.01, 0.25)).clip(0, len(sizes) - 1))
        yield members, "in the sample, 4 sizes per doubling", 3, errors(whole, members, sizes[once_an_octave], times[once_an_octave])
        others = {number: table for number, table in tables.items() if number != members}
        if others:
            what = f"left out: this table ({' and '.join(map(str, others))} fitted)"
            yield members, what, 3 * len(others), errors(fitted(others), members, sizes, times)


def line(gpu: str, members: int, what: str, numbers: int, found: Floats) -> str:
    size = 100 * np.abs(found)
    figures = (
        f"mean {size.mean():5.2f} %, median {np.median(size):5.2f} %, 95th percentile {np.percentile(size, 95):5.2f} %, worst {size.max():5.1f} %"
    )
    return f"{gpu} x {members}  {what:<42} {figures}, bias {100 * found.mean():+5.2f} %  ({numbers} numbers fitted, {len(found)} rows)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).parent.parent.parent / "shared" / "data", help="the folder with vtrain/")
    parser.add_argument("--also", type=Path, help="a folder with other tables, to be judged by the presets")
    parser.add_argument("--write", type=Path, help="a folder for collectives-*.toml")
    arguments = parser.parse_args()
    tables = read_tables(arguments.data / "vtrain")
    if not tables:
        print(f"there are no tables NAME_allreduce_Ngpu.csv in {arguments.data / 'vtrain'}; give --data", file=sys.stderr)
        return
    for gpu, own in tables.items():
        for members, what, numbers, found in judged(own):
            print(line(gpu, members, what, numbers, found))
        if arguments.write is not None:
            source = SOURCE.format(gpu.upper(), " and ".join(map(str, own)))
            curve = fitted(own, name=gpu.upper())
            write_curve(
                Curve(curve.members, curve.latency, curve.per_byte, curve.per_root, curve.name, source), arguments.write / f"collectives-{gpu}.toml"
            )
    for gpu, own in read_tables(arguments.also).items() if arguments.also is not None else ():
        for members, (sizes, times, _) in own.items():
            print(line(gpu, members, f"{arguments.also}, by the preset", 0, errors(read_curve(gpu), members, sizes, times)))


if __name__ == "__main__":
    main()
