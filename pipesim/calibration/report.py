"""What a calibration found, and how its predictions did, as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pipesim.calibration.calibrated import Calibration, OpSpread
from pipesim.calibration.predicting import LIMIT, Prediction
from pipesim.units import format_bytes

__all__ = ["calibration_report", "prediction_table"]

_MANY = 4  # stages, from which on a table of them is no longer read


def calibration_report(calibration: Calibration) -> str:
    """Durations with their spread, host times, links with the quality of their fit, bytes, and what could not be told."""
    lines = [f"{key}: {value}" for key, value in calibration.source.items()]
    rows = [["stages", "stage", "op", "typical", "median", "deviation", "5 %", "95 %", "ops"]]
    for label, of in _grouped(calibration.spreads):
        figures = [[getattr(one.spread, name) for one in of] for name in ("typical", "median", "deviation", "low", "high")]
        count = sum(one.spread.count for one in of)
        rows.append([str(of[0].stages), label, of[0].kind, *(_time(statistics.median(values)) for values in figures), str(count)])
    lines += ["", *_table(rows)]
    lines.append("  typical: median over iterations of the mean within each; deviation: 1.48 x median absolute deviation")
    host = calibration.costs.host
    parts = f"{_time(host.op)} after an op, {_time(host.send)} more per message sent, {_time(host.receive)} more per message received"
    lines += ["", f"host: {parts}; {_time(host.barrier)} for the barrier before the update"]
    if calibration.links:
        rows = [["link", "latency", "bandwidth", "probe latency", "op to op", "sizes", "messages", "worst fit"]]
        for (source, target), link in sorted(calibration.links.items()):
            bandwidth = "no limit seen" if link.bandwidth is None else f"{format_bytes(link.bandwidth, 's')}/s"
            known = ["-" if value is None else _time(value) for value in (link.probe_latency, link.hop)]
            error = "-" if link.error is None else f"{link.error:.1%}"
            rows.append([f"{source} -> {target}", _time(link.latency), bandwidth, *known, str(link.sizes), str(link.count), error])
        lines += ["", *_table(rows)]
        lines.append("  op to op: from the end of an op to the start of the one that waits for its message, the host's time included;")
        lines.append("  latency: as simulated, what is left of op to op without the host's time after an op, per message sent and per message")
        lines.append("  received (above) and without size / bandwidth; 0 where these explain all of it, so the time is simulated, but as the host's;")
        lines.append("  probe latency: one message at a time, the quickest of each size; worst fit: line against a size")
    if calibration.interference is not None:
        beside = calibration.interference
        lines += [
            "",
            f"compute beside messages: x {beside.factor:.3f} +- {beside.uncertainty:.3f} ({'simulated' if beside.seen else 'not told apart from 1, so not simulated'})",
        ]
    rows = [["stages", "stage", "message", "activation", "freed by I", "weights", "gradients", "optimizer"]]
    names = ("message", "activation", "activation_freed_by_input_grad", "weights", "gradients", "optimizer_state")
    for stages, table in sorted(calibration.costs.tables.items()):
        for stage in range(stages):
            rows.append(
                [str(stages), str(stage), *("-" if name not in table.bytes else format_bytes(table.bytes[name][stage], "s") for name in names)]
            )
    lines += ["", *_table(rows)]
    if calibration.notes:
        lines += ["", "to know:", *(f"  {note}" for note in calibration.notes)]
    return "\n".join(lines)


def prediction_table(predictions: Sequence[Prediction]) -> str:
    """Predicted against measured iteration times.

    Examples:
        >>> print(prediction_table([Prediction("1f1b", 0.1, 0.002, 0.0005, 0.0005, (0.1, 0.102, 0.104), 15)]).splitlines()[1])
        1f1b      103.0 ms   100.0 ms  2.000 ms  500.0 µs    500.0 µs  102.0 ms  +1.0 %  2.0 %   10.0 %  yes     3 x 5
    """
    rows = [["schedule", "predicted", "ops", "+ host", "+ messages", "+ waits", "measured", "error", "spread", "limit", "within", "runs"]]
    for one in predictions:
        row = [one.name, _time(one.predicted), _time(one.ops), _time(one.host), _time(one.messages), _time(one.waits)]
        if one.typical is None or one.error is None:
            row += ["-"] * 6
        else:
            spread = "-" if one.spread is None else f"{100 * one.spread:.1f} %"
            runs = f"{len(one.measured)} x {one.iterations // len(one.measured)}"
            row += [_time(one.typical), f"{100 * one.error:+.1f} %", spread, f"{100 * one.limit:.1f} %", one.verdict or "-", runs]
        rows.append(row)
    lines = _table(rows)
    lines.append("  predicted: simulated from the calibration's runs of other schedules; ops: if ops took their typical time and nothing else;")
    lines.append("  host: time between ops; messages: latency and bandwidth; waits: ops vary, and devices wait for whoever is late;")
    lines.append("  pipesim simulate --costs ... --cluster ... with this calibration's files gives ops + host + messages, without waits")
    if any(one.measured for one in predictions):
        lines.append(
            "  measured: median of the runs' median iterations; error: predicted / measured - 1; spread: standard deviation from run to run;"
        )
        lines.append(f"  limit: the larger of {LIMIT:.0%} and twice the spread; runs: how many x iterations in each")
        if any(one.verdict == "cannot tell" for one in predictions):
            lines.append(f"  cannot tell: the error is above {LIMIT:.0%}, and within the limit only because the spread is above {LIMIT:.0%}, too")
    lines += [f"  {one.name}: {note}" for one in predictions for note in one.notes]
    return "\n".join(lines)


def _grouped(spreads: Sequence[OpSpread]) -> list[tuple[str, list[OpSpread]]]:
    """A row per stage and kind; of many stages a row per kind, with the median over its stages."""
    rows: dict[tuple[int, str, str], list[OpSpread]] = {}
    for one in spreads:
        stage = str(one.stage) if one.stages <= _MANY else f"0..{one.stages - 1}"
        rows.setdefault((one.stages, one.kind, stage), []).append(one)
    return [(stage, of) for (_, _, stage), of in rows.items()]


def _time(value: float) -> str:
    """Four digits, with the zeros: columns of them can be compared."""
    if value == 0:
        return "0"
    scale, name = next(((scale, name) for scale, name in ((1.0, "s"), (1e-3, "ms")) if abs(value) >= scale), (1e-6, "µs"))
    number = value / scale
    return f"{number:.{max(0, 4 - len(str(int(abs(number)))))}f} {name}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
