"""Text and CSV forms of a schedule.

The text form is a grid that a person reads and pastes back. Lines before the first row may say what differs from the
defaults::

    name: gpipe
    weights: stash
    graph: 0>1 0>2 1>3 2>3
    offload: 0>3 1>host
    device 0 | 0F0 0F1 0B0 0B1
    device 1 | 1F0 1F1 1B0 1B1

``device 0 |`` may be left out; ``.`` is an idle place and means nothing, like an empty field in CSV.

The CSV form is PyTorch's (torch/distributed/pipelining): one line per device, fields separated by commas, empty = idle.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipesim.errors import ScheduleError
from pipesim.files import read_limited, write_atomically
from pipesim.op import Slot, parse_op
from pipesim.schedule import WEIGHT_POLICIES, Schedule

__all__ = ["csv_text", "excerpt", "parse_csv", "read_csv", "read_text", "write_csv", "write_text"]

_ROW = re.compile(r"(?:device|rank|stage)?\s*([0-9]{1,9})\s*[|:]\s*(.*)", re.IGNORECASE)
_HEADER = re.compile(r"(name|weights|graph|offload)\s*:\s*(.*)", re.IGNORECASE)


def read_csv(
    source: str | os.PathLike[str],
    *,
    legacy: bool = False,
    name: str | None = None,
    placement: Mapping[int, int | Sequence[int]] | None = None,
    graph: Iterable[tuple[int, int]] | None = None,
    weights: Any = "flush",
) -> Schedule:
    """Reads a CSV file in PyTorch's format.

    Spaces, empty cells, trailing commas, CRLF and a byte-order mark are accepted; every other oddity is an error.

    Args:
        source: The path of the file.
        legacy: Reads PyTorch's vocabulary of 2024 (``B`` is the input half, ``BW`` the full backward).
        name: What to call it; the file's name by default.
        placement: Where each stage is expected; an op elsewhere is then an error and not a replica.
        graph: Edges of the stage graph; None for the chain.
        weights: The weight policy.

    Raises:
        ScheduleError: A field is no op; the text names line and field, both counted from 1.
        OSError: The file cannot be read.
    """
    path = Path(source)
    text = read_limited(path)
    return parse_csv(text, str(path), legacy=legacy, name=name or path.stem, placement=placement, graph=graph, weights=weights)


def parse_csv(text: str, where: str = "schedule", *, legacy: bool = False, **options: Any) -> Schedule:
    r"""Reads CSV text; see :func:`read_csv`.

    Examples:
        >>> schedule = parse_csv("0F0, 0F1 ,,0B0\n 1F0,1I0,1W0,\n")
        >>> [len(stream) for stream in schedule.streams]
        [3, 3]
        >>> parse_csv("0F0,0X0")
        Traceback (most recent call last):
        pipesim.errors.ScheduleError: schedule, row 1, column 2: '0X0' is not an op; an op is stage, kind, microbatch, as in 2F0, 1B3, 0W1 or 1SEND_F2
    """
    streams: list[list[Slot]] = []
    # \r\r\n is what a CRLF text becomes when it is written in text mode; other marks, as of paragraphs, end no row
    lines = re.split(r"\r*\n|\r", text.removeprefix("\ufeff").rstrip())
    try:
        for number, fields in enumerate(csv.reader(lines, strict=True), start=1):
            streams.append(_parse_fields(fields, f"{where}, row {number}, column", legacy))
    except csv.Error as error:
        raise ScheduleError(f"{where}: not a CSV file ({error})") from None
    return Schedule.from_streams(streams, **options)


def _parse_fields(fields: Iterable[str], where: str, legacy: bool) -> list[Slot]:
    stream = []
    for column, text in enumerate(fields, start=1):
        if text.strip() in ("", "."):
            continue
        try:
            stream.append(parse_op(text, legacy))
        except ScheduleError as error:
            raise ScheduleError(f"{where} {column}: {error}") from None
    return stream


def write_csv(schedule: Schedule, target: str | os.PathLike[str]) -> None:
    """Writes PyTorch's CSV format, atomically. Updates (``U``) and what PyTorch has no word for are written as they are."""
    write_atomically(target, csv_text(schedule))


def csv_text(schedule: Schedule) -> str:
    r"""The CSV form as one string, with CRLF line ends, as Python's csv module and PyTorch write it.

    Examples:
        >>> csv_text(Schedule.from_text("0F0 0B0"))
        '0F0,0B0\r\n'
    """
    buffer = io.StringIO()
    # a device without ops is a row of one empty field, because empty lines at the end of a file are no rows
    csv.writer(buffer).writerows([str(slot) for slot in stream] or [""] for stream in schedule.streams)
    return buffer.getvalue()


def read_text(text: str, *, legacy: bool = False, where: str = "schedule", **options: Any) -> Schedule:
    r"""Reads the text form: the inverse of ``str(schedule)``.

    Args:
        text: The grid, with or without header lines.
        legacy: As for :func:`read_csv`.
        where: What to call the text in errors.
        **options: name, placement, graph, weights and offload_to of :meth:`Schedule.from_streams`; they win over headers.

    Raises:
        ScheduleError: A word is no op, a header is wrong, or devices are out of order.

    Examples:
        >>> schedule = read_text("weights: stash\ndevice 0 | 0F0 0B0 0U0")
        >>> read_text(str(schedule)) == schedule
        True
    """
    header: dict[str, Any] = {}
    streams: list[list[Slot]] = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), start=1):
        place = f"{where}, line {number}"
        if not line.strip():
            continue
        if match := _HEADER.fullmatch(line.strip()):
            key, value = _parse_header(match[1].lower(), match[2].strip(), place)
            header[key] = value
            continue
        if match := _ROW.fullmatch(line.strip()):
            if int(match[1]) != len(streams):
                raise ScheduleError(f"{place}: row of device {match[1]}, and device {len(streams)} comes next; rows stand in device order")
            line = match[2]
        streams.append(_parse_fields(line.split(), f"{place}, word", legacy))
    return Schedule.from_streams(streams, **{**header, **options})


def _parse_header(key: str, value: str, where: str) -> tuple[str, Any]:
    if key == "name":
        return "name", value
    if key == "weights":
        if value not in WEIGHT_POLICIES:
            raise ScheduleError(f"{where}: weights must be one of {', '.join(WEIGHT_POLICIES)}, got {value!r}")
        return "weights", value
    pairs = []
    for word in value.split():
        match = re.fullmatch(r"([0-9]{1,9})>([0-9]{1,9}|host)", word)
        if match is None or (key == "graph" and match[2] == "host"):
            raise ScheduleError(f"{where}: {word!r} is not an edge; write {key}: 0>1 1>2")
        pairs.append((int(match[1]), None if match[2] == "host" else int(match[2])))
    return ("graph", pairs) if key == "graph" else ("offload_to", dict(pairs))


def write_text(schedule: Schedule) -> str:
    """The text form, columns aligned; what ``str(schedule)`` prints."""
    lines = ["name: " + " ".join(schedule.name.split())]
    if schedule.weights != "flush":
        lines.append(f"weights: {schedule.weights}")
    if schedule.graph is not None:
        lines.append("graph: " + " ".join(f"{a}>{b}" for a, b in schedule.graph))
    if schedule.offload_to:
        lines.append("offload: " + " ".join(f"{a}>{'host' if b is None else b}" for a, b in schedule.offload_to.items()))
    return "\n".join(lines + _grid([[str(slot) for slot in stream] for stream in schedule.streams]))


def _grid(streams: Sequence[Sequence[str]], first: int = 0) -> list[str]:
    width = max((len(word) for stream in streams for word in stream if not word.startswith("(")), default=1)
    digits = len(str(first + len(streams) - 1))
    return [
        f"device {first + number:>{digits}} | " + " ".join(f"{word:<{width}}" for word in stream).rstrip() for number, stream in enumerate(streams)
    ]


def excerpt(schedule: Schedule, row: int, around: int = 7, devices: int = 5) -> str:
    """The part of the grid around one row, with that op marked ``>2B3<`` and the place named at the line's end.

    Args:
        schedule: Any schedule, a wrong one too.
        row: The row to mark.
        around: Ops shown to each side.
        devices: Devices shown in all.
    """
    marked = int(schedule.device[row])
    lowest = max(0, min(marked - devices // 2, schedule.num_devices - devices))
    shown = range(lowest, min(schedule.num_devices, lowest + devices))
    offset = row - int(schedule.device_rows[marked])
    start = max(0, offset - around)
    streams = []
    for device in shown:
        begin, end = (int(bound) for bound in schedule.device_rows[device : device + 2])
        rows = range(min(end, begin + start), min(end, begin + offset + around + 1))
        words = [f">{schedule.op(r)}<" if r == row else str(schedule.op(r)) for r in rows]
        streams.append((["..."] if start else []) + words + (["..."] if rows.stop < end else []))
    lines = _grid(streams, lowest)
    lines[marked - lowest] += "    <-- here"
    return "\n".join("  " + line for line in lines)
