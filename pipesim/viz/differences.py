"""Why two runs differ, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipesim.units import format_bytes, format_time
from pipesim.viz.axes import printable

if TYPE_CHECKING:
    from pipesim.differences import Difference
    from pipesim.pathterms import Term

__all__ = ["difference"]

_BY = {"message": "for messages", "device": "between ops of a device", "all": "for all devices", "start": "before the first op"}


def difference(found: Difference) -> str:
    """The figures of both runs with their errors, the errors of ops, and what makes up the difference.

    Examples:
        >>> from pipesim import UniformCosts, compare, generate, simulate
        >>> schedule = generate("1f1b", 2, 2)
        >>> runs = [simulate(schedule, UniformCosts(forward=1, backward=2, latency=latency)) for latency in (0, 0.5)]
        >>> print(difference(compare(*runs, names=["near", "far"]).difference).partition("Why: ")[2])
        far takes 1 slots longer than near (9 slots). Along the critical path of far, 6 ops:
                     0  running
                    +1  waiting
        <BLANKLINE>
          most of it:
          1F0, device 1: waited 0.5 slots longer for 0F0's message (0 predicted, 0.5 actual)
          0B1, device 0: waited 0.5 slots longer for 1B1's message (0 predicted, 0.5 actual)
    """
    parts = [_head(found), _kinds(found)]
    if found.worst:
        parts.append(_worst(found))
    parts.append(_why(found))
    return "\n\n".join(parts + [f"  {note}" for note in found.notes])


def _head(found: Difference) -> str:
    steps = [
        f"{printable(name)}{f', the median of {count} steps' if count > 1 else ''}" for name, count in zip(found.names, found.steps, strict=True)
    ]
    unit = found.unit
    rows = [["", "predicted", "actual", "error"]]
    of_step = " of a step" if max(found.steps) > 1 else ""
    rows.append([f"makespan{of_step}", *(format_time(value, unit) for value in found.makespan), _percent(found.makespan_error)])
    rows.append(
        [
            f"bubble_fraction{of_step}",
            *(f"{value:.4f}" for value in found.bubble_fraction),
            f"{found.bubble_fraction[0] - found.bubble_fraction[1]:+.4f}",
        ]
    )
    for device, (predicted, actual) in enumerate(found.peak_memory or ()):
        error = predicted / actual - 1 if actual else None
        rows.append([f"peak_memory, device {device}", format_bytes(predicted, unit), format_bytes(actual, unit), _percent(error)])
    missing = "" if found.peak_memory is not None else "\n  peak_memory is not compared: a run does not say it"
    return f"predicted: {steps[0]}; actual: {steps[1]}; error = predicted / actual - 1 (of bubble_fraction: predicted - actual)\n\n{_aligned(rows)}{missing}"


def _kinds(found: Difference) -> str:
    rows = [["durations", "ops", "predicted", "actual", "error of sum", "mean error", "median", "p90"]]
    for errors in found.kinds:
        sums = (format_time(errors.predicted, found.unit), format_time(errors.actual, found.unit))
        sizes = (_percent(value, sign=False) for value in (errors.mean, errors.median, errors.p90))
        rows.append([errors.kind, str(errors.ops), *sums, _percent(errors.bias), *sizes])
    return f"{_aligned(rows)}\n  mean error, median, p90: of the errors of single ops, without their sign"


def _worst(found: Difference) -> str:
    rows = [["farthest apart", "device", "predicted", "actual", "error"]]
    for one in found.worst:
        times = (format_time(one.predicted, found.unit), format_time(one.actual, found.unit))
        rows.append([one.op, str(one.device), *times, _percent(one.error)])
    return _aligned(rows)


def _why(found: Difference) -> str:
    unit = found.unit
    dust = 1e-9 * max(found.makespan)  # of sums of floats
    change = found.makespan[1] - found.makespan[0]
    predicted, actual = (printable(name) for name in found.names)
    slots = " slots" if unit == "slot" else ""
    lines = [
        f"Why: {actual} takes {_longer(change, unit)} than {predicted} ({format_time(found.makespan[0], unit)}{slots}). "
        f"Along the critical path of {actual}, {len(found.path)} ops:"
    ]
    parts = [
        (found.slower, "running", found.slower_by_kind),
        (found.waited_longer, "waiting", {_BY[by]: value for by, value in found.waited_longer_by.items()}),
    ]
    for value, name, single in parts:
        shown = [f"{what} {_signed(part, unit)}" for what, part in sorted(single.items(), key=lambda item: -abs(item[1])) if abs(part) > dust]
        lines.append(f"  {_signed(value, unit):>12}  {name}" + (f" ({', '.join(shown)})" if len(shown) > 1 else ""))
    if abs(found.rest) > dust:
        lines.append(
            f"  {_signed(found.rest, unit):>12}  after the last op of that path, for which {actual if found.rest > 0 else predicted} goes on longer"
        )
    named = found.explaining
    if named:
        lines += ["", "  most of it:", *(f"  {_term(term, unit, dust)}" for term in named)]
    return "\n".join(lines)


def _term(term: Term, unit: str, dust: float) -> str:
    def times(predicted: float, actual: float) -> str:
        return f"{format_time(predicted, unit)} predicted, {format_time(actual, unit)} actual"

    parts = []
    if abs(term.slower) > dust:
        parts.append(f"ran {_longer(term.slower, unit)} ({times(term.predicted, term.actual)})")
    if abs(term.waited_longer) > dust:
        what = {"message": f"for {term.after}'s message", "device": f"after {term.after}", "all": f"for all devices ({term.after})"}.get(
            term.by, "at first"
        )
        parts.append(f"waited {_longer(term.waited_longer, unit)} {what} ({times(term.predicted_wait, term.actual_wait)})")
    return f"{term.op}, device {term.device}: {'; '.join(parts)}"


def _longer(value: float, unit: str) -> str:
    return f"{format_time(abs(value), unit)}{' slots' if unit == 'slot' else ''} {'longer' if value >= 0 else 'less'}"


def _signed(value: float, unit: str) -> str:
    return f"{'+' if value > 0 else ''}{format_time(value, unit)}"


def _percent(value: float | None, sign: bool = True) -> str:
    if value is None:
        return "undefined"
    return f"{value * 100:+.2f} %" if sign else f"{value * 100:.2f} %"


def _aligned(rows: list[list[str]]) -> str:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]).rstrip() for row in rows
    )
