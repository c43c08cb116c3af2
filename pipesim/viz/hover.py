"""What a reader sees under the pointer: an op, its times, and what it waited for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipesim.op import Kind
from pipesim.timeline import Timeline
from pipesim.units import format_bytes, format_time
from pipesim.viz.lanes import transfers
from pipesim.viz.scene import Scene, waits

__all__ = ["Hover"]


class Hover:
    """Texts of the bars of one run, or of several whose bars stand one after the other in a scene.

    Attributes:
        bars: The scene.
    """

    def __init__(self, bars: Scene, runs: Sequence[Timeline], names: Sequence[str] = ()) -> None:
        self.bars, self._halved = bars, bars.halved
        self._runs, self._names, self._waits = runs, names, [waits(run) for run in runs]
        # every row that computes is a bar, in every step
        counts = [run.steps * int((run.schedule.kind <= int(Kind.U)).sum()) for run in runs]
        self._ends = np.cumsum(counts)
        self._transfers = transfers(runs[0]) if bars.lanes else None

    def _run(self, bar: int) -> int:
        if self.bars.slot[bar] < 0:  # lanes are those of a single run
            return 0
        return int(np.searchsorted(self._ends, bar, side="right"))

    def device(self, bar: int) -> str:
        """``device 2``, and of which run."""
        band = int(self.bars.device[bar])
        return f"device {band // len(self._runs)}" + (f", {self._names[self._run(bar)]}" if self._names else "")

    def what(self, bar: int) -> str:
        """The op, the pair that it is half of, and the step where there are several."""
        bars, run = self.bars, self._runs[self._run(bar)]
        text = str(bars.op(bar))
        if self._halved[bar]:
            text += f" of {run.schedule.slot(int(bars.slot[bar]))}"
        return f"{text}, step {bars.step[bar]}" if run.steps > 1 else text

    def why(self, bar: int) -> str:
        """What it waited for; of communication, where it goes to or comes from, and how long it waited."""
        if self._transfers is not None and self.bars.slot[bar] < 0:
            return self._transfer(int(self.bars.transfer[bar]), int(self.bars.step[bar]))
        return self._waits[self._run(bar)](int(self.bars.slot[bar]), int(self.bars.step[bar]))

    def text(self, bar: int) -> str:
        """All of it, with Plotly's tags."""
        start, end = (float(column[bar]) for column in (self.bars.start, self.bars.end))
        times = (f"{what} {format_time(value, self.bars.unit)}" for what, value in (("start", start), ("end", end), ("duration", end - start)))
        return f"<b>{self.what(bar)}</b>, {self.device(bar)}<br>{', '.join(times)}<br>{self.why(bar)}"

    def _transfer(self, number: int, step: int) -> str:
        found, unit = self._transfers, self.bars.unit
        if found is None:
            return ""
        kind, peer, size, waited = (
            Kind(int(found.kind[number])),
            int(found.peer[number]),
            float(found.size[number]),
            float(found.waited[step, number]),
        )
        parts = []
        if kind not in (Kind.REDUCE_GRAD, Kind.UNSHARD):
            direction = "from" if kind in (Kind.RECV_F, Kind.RECV_B, Kind.RELOAD) else "to"
            parts.append(f"{direction} {'the host' if peer < 0 else f'device {peer}'}")
        if size:
            parts.append(format_bytes(size, unit) + ("" if unit == "s" else " units"))
        if waited > 1e-12 * self.bars.span:
            parts.append(f"ready {format_time(waited, unit)} before")
        return ", ".join(parts) or "collective"
