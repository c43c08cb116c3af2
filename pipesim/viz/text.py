"""Runs as plain text: the figures with their definitions, a comparison, and a picture in time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipesim.memory import CATEGORIES
from pipesim.metrics import DEFINITIONS, IDLE_CAUSES
from pipesim.op import Kind, Op
from pipesim.units import format_bytes, format_time
from pipesim.viz.axes import printable, size_axis, time_axis
from pipesim.viz.scene import Scene, scene

if TYPE_CHECKING:
    from pipesim.comparison import Comparison
    from pipesim.timeline import Timeline

__all__ = ["comparison", "counted", "gantt", "headline", "summary"]

_WIDTH = 120

_SCALARS = ("makespan", "iteration_time", "bubble_fraction", "bubble_overhead", "span_bubble_rate")


def summary(timeline: Timeline, links: int | None = 10) -> str:
    """The figures of a run for people, each with its definition; of its links the busiest.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> print(summary(simulate(generate("gpipe", 2, 2), UniformCosts(forward=1, backward=2))).splitlines()[0])
        gpipe: 2 devices, 2 stages, 2 microbatches, weights flush; simulated
    """
    figures = timeline.figures()
    unit = timeline.unit
    lines = [_headline(timeline)]
    if timeline.info:
        lines.append(", ".join(f"{key} {printable(value)}" for key, value in timeline.info.items()))
    lines.append("")
    lines += _table([[name, _value(name, figures[name], unit), DEFINITIONS[name]] for name in _SCALARS], left=(0, 2))
    lines += ["", *_time_table(timeline, figures), "", *_memory_table(timeline, figures)]
    table = _link_table(timeline, links)
    lines += ["", *table] if table else []
    notes = _replicas(timeline) + _weights(timeline, figures) + _overflows(timeline)
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _headline(timeline: Timeline) -> str:
    schedule = timeline.schedule
    counts = [
        counted(schedule.num_devices, "device"),
        counted(schedule.num_stages, "stage"),
        counted(schedule.num_microbatches, "microbatch"),
        f"weights {schedule.weights}",
    ]
    if timeline.steps > 1:
        counts.append(f"{timeline.steps} steps {'with' if timeline.barrier else 'without'} a barrier")
    return f"{printable(schedule.name)}: {', '.join(counts)}; {printable(timeline.source)}"


def counted(number: int, what: str) -> str:
    """The number and the word for that many.

    Examples:
        >>> counted(1, "device"), counted(8, "microbatch")
        ('1 device', '8 microbatches')
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('h') else 's'}"


def _value(name: str, value: Any, unit: str) -> str:
    """A figure for people; what differs between many devices is shortened to its extremes."""
    if value is None:
        return "undefined"
    if name in ("makespan", "iteration_time"):
        return format_time(value, unit) + ("" if unit == "s" else " slots")
    if not isinstance(value, list | tuple):
        return str(value) if name == "steps" else f"{value:.4f}"
    return _listed([format_bytes(number, unit) if name == "peak_memory" else f"{number:.4g}" for number in value], value)


def _listed(texts: list[str], values: Sequence[float], separator: str = ", ") -> str:
    """One text per device; once where all are the same, the extremes where there are many."""
    if len(set(texts)) == 1:
        return f"{texts[0]} each" if len(texts) > 1 else texts[0]
    return separator.join(texts) if len(texts) <= 8 else f"{texts[int(np.argmin(values))]} to {texts[int(np.argmax(values))]}"


def _time_table(timeline: Timeline, figures: dict[str, Any]) -> list[str]:
    """Busy and idle time per device, idle time by those causes that there are."""
    factor, name = time_axis(timeline.makespan, timeline.unit)
    dust = 1e-12 * timeline.makespan  # what sums of floats leave of a 0
    causes = [cause for cause in IDLE_CAUSES if any(abs(device[cause]) > dust for device in figures["idle_causes"])]
    rows = [[f"time in {name}", "busy", "idle", *causes]]
    for device, (busy, idle) in enumerate(zip(figures["busy"], figures["idle_causes"], strict=True)):
        values = [busy, sum(idle.values()), *(idle[cause] for cause in causes)]
        digits = 6 if timeline.unit == "slot" else 4
        rows.append([f"device {device}", *(f"{value * factor if abs(value) > dust else 0:.{digits}g}" for value in values)])
    return [*_table(rows), *_defined("busy", "idle_causes")]


def _memory_table(timeline: Timeline, figures: dict[str, Any]) -> list[str]:
    """Peaks per device, the bytes of the peak by those categories that there are if there are several."""
    unit = timeline.unit
    by_category = figures["peak_memory_by_category"]
    categories = [category for category in CATEGORIES if any(category in peak for peak in by_category)]
    costless = [name for name in ("activations", "weights", "gradients", "optimizer") if name not in categories]
    if len(categories) == 1:
        categories = []
    names = ["peak_activations", "peak_activations_i", "peak_activation_share"]
    if not timeline.schedule.has(Kind.I):
        names.remove("peak_activations_i")
    if all(len(stages) <= 1 for stages in timeline.schedule.device_stages):
        names.remove("peak_activation_share")
    versions = ["weight_versions"] if "weight_versions" in figures else []
    rows = [["memory", "peak_memory", *categories, *names, *versions]]
    unknown = not timeline.knows_memory
    for device, peak in enumerate(timeline.peak_memory):
        sizes = [peak, *(by_category[device].get(category, 0.0) for category in categories)]
        counts = [f"{figures[name][device]:g}" for name in [*names, *versions]]
        rows.append([f"device {device}", *("unknown" if unknown else format_bytes(size, unit) for size in sizes), *counts])
    missing = (
        [f"  peak_memory is without {', '.join(costless)}: the costs give no bytes of them"] if "activations" in costless and not unknown else []
    )
    return [*_table(rows), *_defined("peak_memory"), *missing, *_defined(*names)]


def _link_table(timeline: Timeline, most: int | None) -> list[str]:
    """What links had to do, the busiest first and no more than *most* of them; nothing where none has a bandwidth."""
    rows = timeline.link_utilisation()
    if not rows:
        return []
    unit, shown = timeline.unit, rows[:most]
    slots = "" if unit == "s" else " slots"
    table = [["links", "busy_share", "bytes" if unit == "s" else "units", "transfers", "longest_wait", "longest_delay"]]
    for row in shown:
        times = [format_time(value, unit) + slots if value > 1e-12 * timeline.makespan else "0" for value in (row.longest_wait, row.longest_delay)]
        table.append([printable(row.link), f"{row.busy_share:.4f}", format_bytes(row.bytes, unit), str(row.transfers), *times])
    rest = [f"  and {len(rows) - len(shown)} that were less busy (--links)"] if len(rows) > len(shown) else []
    return [
        *_table(table),
        *rest,
        "  busy_share: part of the makespan in which something crosses it; longest_wait: of a message that is ready and not taken",
        "  longest_delay: the most that one came later than alone on its way, the wait included: arrived - sent - latency - size / slowest link",
        *(["  collectives are not counted here, but what they delay is"] if timeline.traffic.collective.any() else []),
    ]


def _replicas(timeline: Timeline) -> list[str]:
    return [f"stage {stage} has replicas on devices {', '.join(map(str, devices))}" for stage, devices in timeline.schedule.replicas.items()]


def _weights(timeline: Timeline, figures: dict[str, Any]) -> list[str]:
    if "update_delay" not in figures:
        return []
    delays = ", ".join(map(str, figures["update_delay"]))
    return [
        f"update_delay of stages 0..{timeline.schedule.num_stages - 1}: {delays}",
        "  the most updates between the weights that a forward saw and the update that its gradient goes into",
    ]


def _overflows(timeline: Timeline) -> list[str]:
    unit, lines = timeline.unit, []
    for found in timeline.overflows():
        what = "what it holds all the time" if found.op is None else f"{found.op}, at {format_time(found.time - timeline.first_start, unit)},"
        needed, capacity = format_bytes(found.needed, unit), format_bytes(found.capacity, unit)
        lines.append(f"DOES NOT FIT: device {found.device} has {capacity}, and {what} needs {needed}")
    return lines


def _defined(*names: str) -> list[str]:
    return [f"  {name}: {DEFINITIONS[name]}" for name in names]


def _table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Aligned columns, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if column in left else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def headline(timeline: Timeline) -> str:
    """The figures that stand over a picture of a run, in one line.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> headline(simulate(generate("1f1b", 4, 8), UniformCosts(forward=1, backward=2)))
        'makespan 33 slots · bubble_fraction 0.2727 · peak_activations 4, 3, 2, 1'
    """
    unit = timeline.unit
    text = " · ".join(f"{name} {_value(name, getattr(timeline, name), unit)}" for name in ("makespan", "bubble_fraction", "peak_activations"))
    peaks = timeline.peak_memory if unit == "s" else []
    if not any(peaks):
        return text
    return f"{text} · peak_memory {format_bytes(max(peaks), unit)} on device {int(np.argmax(peaks))}"


# -- comparison --------------------------------------------------------------------------------------------------------

_COMPARED = {
    "steps": "how often the schedule ran; makespan and bubbles are of all steps together",
    "makespan_ratio": "makespan / makespan of the first run",
    "iteration_time_ratio": "iteration_time / iteration_time of the first run",
}


def comparison(compared: Comparison) -> str:
    """A table of several runs, one row each, and the definitions of its figures.

    Examples:
        >>> from pipesim import UniformCosts, compare, generate, simulate
        >>> runs = [simulate(generate(name, 4, 8), UniformCosts(forward=1, backward=2)) for name in ("gpipe", "1f1b")]
        >>> for line in comparison(compare(*runs)).splitlines()[:4]:
        ...     print(line[:38])
                         makespan_  iteration_
               makespan      ratio        time
        gpipe  33 slots     1.0000    33 slots
        1f1b   33 slots     1.0000    33 slots
    """
    shown = {name: values for name, values in compared.rows if name != "peak_activation_share"}  # --json has it
    # one unit for the memory of all runs, so that a column of numbers can be compared at a glance
    factor, unit = size_axis(max((max(values or (), default=0.0) for values in shown["peak_memory"]), default=0.0), compared.unit)
    memory = ["unknown" if values is None else _listed([f"{value * factor:.3g}" for value in values], values, " ") for values in shown["peak_memory"]]
    heads = [_halves(name) if name != "peak_memory" else ("peak_memory", f"per device ({unit})") for name in shown]
    rows = [["", *(first for first, _ in heads)], ["", *(second for _, second in heads)]]
    for number, run in enumerate(compared.names):
        values = [memory[number] if name == "peak_memory" else _value(name, values[number], compared.unit) for name, values in shown.items()]
        rows.append([printable(run), *values])
    definitions = {**_COMPARED, **DEFINITIONS}
    if "iteration_time_ratio" in shown:
        definitions["steps"] = (
            "how often the schedule ran; makespan and bubbles are of the step of median makespan (the shorter of two in the middle)"
        )
        definitions["iteration_time"] += "; of a measured run the median over its steps"
    return "\n".join([*_table(rows), "", *(f"  {name}: {definitions[name]}" for name in shown if name in definitions)])


def _halves(name: str) -> tuple[str, str]:
    """The name on two lines, broken at the underscore nearest to its middle."""
    breaks = [place + 1 for place, char in enumerate(name) if char == "_"]
    if not breaks:
        return "", name
    middle = min(breaks, key=lambda place: abs(place - len(name) / 2))
    return name[:middle], name[middle:]


# -- a picture in time -------------------------------------------------------------------------------------------------


def gantt(timeline: Timeline, width: int | None = _WIDTH) -> str:
    """A picture in time, as the papers draw it: one row per device, one column per unit of time, ``.`` for idle.

    Where a device holds several stages, ops are written in full (``2F0``), else without the stage. The second half of a
    pair stands under the first. Where times are multiples of no common unit, a column shows what runs at its middle.

    Args:
        timeline: The run.
        width: The most characters of a line; what does not fit is cut off, and a note says so. None for no limit.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> print(gantt(simulate(generate("gpipe", 2, 2), UniformCosts(forward=1, backward=2))))
        slots    | 0              5
        device 0 | F0 F1 .  .  .  B0 B0 B1 B1
        device 1 | .  F0 F1 B0 B0 B1 B1 .  .
    """
    bars = scene(timeline)
    several = bars.num_chunks > 1
    name = f"device {max(0, bars.num_devices - 1)}"
    # every op is as wide as the widest can be
    highest = Op(int(bars.stage.max(initial=0)), Kind.F, int(bars.microbatch.max(initial=0)))
    cell = len(str(highest)) + 1 - (0 if several else len(str(highest.stage)))
    room = 10**9 if width is None else max(1, (width - len(name) - 3 + 1) // cell)
    column, exact = _column(bars, room)
    needed = max(1, math.ceil(bars.span / column - 1e-6)) if column else 1
    shown = min(needed, room)
    rows = [_ruler(bars, column, shown, cell, len(name))]
    for device in range(bars.num_devices):
        own = np.flatnonzero((bars.device == device) & (bars.start < shown * column))
        upper, lower = (own[half[own]] for half in (bars.top < bars.device + 0.5, bars.bottom > bars.device + 0.5))
        cells = [_cells(bars, half, column, shown, several) for half in (upper, lower)]
        first = ("".join(text.ljust(cell) for text in cells[0])).rstrip()
        rows.append(f"{f'device {device}'.ljust(len(name))} | {first}")
        if len(np.intersect1d(upper, lower)) < len(own):  # there are pairs
            second = "".join((b if b != a else "").ljust(cell) for a, b in zip(*cells, strict=True)).rstrip()
            rows.append(f"{''.ljust(len(name))} | {second}")
    return "\n".join([*rows, *_remarks(bars, column, exact, shown, needed)])


def _column(bars: Scene, room: int) -> tuple[float, bool]:
    """The time that a column stands for, and whether all times are multiples of it."""
    durations = bars.end - bars.start
    durations = durations[durations > 1e-9 * bars.span]
    if not len(durations):
        return 0.0, True
    shortest, median = float(durations.min()), float(np.median(durations))
    times = np.unique(np.concatenate([bars.start, bars.end]))
    for parts in (1, 2, 3, 4):
        unit = shortest / parts
        if np.abs(times / unit - np.rint(times / unit)).max() < 1e-6:
            if parts == 1 or bars.span / unit <= room:
                return unit, True
            break
    # all of it if that leaves an op a column, else as much as fits; a round number, so that the ruler can be read
    wanted = min(bars.span / room, median) if room < 10**9 else median
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(step * power for step in (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12.5) if step * power >= wanted * (1 - 1e-9)), False


def _cells(bars: Scene, own: NDArray[np.int64], column: float, count: int, several: bool) -> list[str]:
    result = ["."] * count
    own = own[bars.end[own] > bars.start[own]]
    # columns whose middle the op covers; where times are exact, that is every column of the op
    first = np.ceil(bars.start[own] / column - 0.5 - 1e-6).astype(np.int64)
    last = np.minimum(np.ceil(bars.end[own] / column - 0.5 - 1e-6).astype(np.int64), count)
    for bar, begin, finish in zip(own.tolist(), first.tolist(), last.tolist(), strict=True):
        op = bars.op(bar)
        text = str(op) if several else str(op)[len(str(op.stage)) :]
        result[begin:finish] = [text] * (finish - begin)
    return result


def _ruler(bars: Scene, column: float, shown: int, cell: int, width: int) -> str:
    """The time at every fifth column, where it does not run into the one before."""
    factor, name = time_axis(bars.span, bars.unit)
    line = ""
    for number in range(0, shown, 5):
        if len(line) <= number * cell:
            line = line.ljust(number * cell) + f"{number * column * factor:.6g} "
    return f"{name.ljust(width)} | {line.rstrip()}"


def _remarks(bars: Scene, column: float, exact: bool, shown: int, needed: int) -> list[str]:
    factor, name = time_axis(bars.span, bars.unit)
    notes = []
    if not exact:
        notes.append(f"a column is {column * factor:.6g} {name} and shows what runs at its middle")
    if shown < needed:
        notes.append(f"cut off at {shown * column * factor:.6g} of {bars.span * factor:.6g} {name}; a larger width shows more")
    none = int(np.count_nonzero(bars.end <= bars.start))
    if none:
        notes.append(f"{counted(none, 'op')} of no length not shown")
    return notes
