"""Two runs in one picture: per device two bands, the simulated run above the measured one, on one axis of time.

y = 2d     +--+--+  +---+      simulated, close to
y = 2d+1   +---+--+ +----+     what was measured; a gap
y = 2d+2   +--+ ...            to the next device
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipesim.differences import typical_step
from pipesim.errors import ScheduleError
from pipesim.timeline import Timeline
from pipesim.units import format_time
from pipesim.viz.axes import printable
from pipesim.viz.scene import Scene, scene

__all__ = ["BAND_EDGES", "Overlay", "overlaid"]

Floats = NDArray[np.float64]

# Edges of a bar in its band, of the upper and of the lower run: upper edge, middle (of a pair), lower edge.
_EDGES = ((0.16, 0.5, 0.98), (0.02, 0.5, 0.84))
BAND_EDGES = tuple((edge[0], edge[2]) for edge in _EDGES)


@dataclass(frozen=True, eq=False)
class Overlay:
    """Two runs, one step of each.

    Attributes:
        runs: The upper and the lower one.
        names: What they are called: ``simulated``, ``measured``.
        bars: Their bars; band 2d is device d of the upper run, band 2d + 1 of the lower.
        title: The schedule, both makespans and the error.
    """

    runs: tuple[Timeline, Timeline]
    names: tuple[str, str]
    bars: Scene
    title: str

    @cached_property
    def bands(self) -> list[str]:
        """The name of each band."""
        devices = self.bars.num_devices // 2
        return [text for device in range(devices) for text in (f"device {device}  {self.names[0]}", self.names[1])]


def overlaid(sim: Timeline, run: Timeline, names: tuple[str, str] | None = None) -> Overlay:
    """Puts two runs into one scene; of several steps the one of median makespan.

    Args:
        sim: What stands above.
        run: What stands below.
        names: What to call them; by default where they are from.

    Raises:
        ScheduleError: One is in seconds and the other in slots.

    Examples:
        >>> from pipesim import UniformCosts, generate, simulate
        >>> schedule = generate("gpipe", 2, 1)
        >>> both = overlaid(*(simulate(schedule, UniformCosts(forward=forward, backward=2)) for forward in (1, 1.5)))
        >>> both.bands, both.bars.num_devices, len(both.bars)
        (['device 0  first', 'second', 'device 1  first', 'second'], 4, 8)
        >>> both.title.splitlines()[1]
        'above: first, makespan 6 slots · below: second, 7 slots · first / second - 1 = -14.29 %'
    """
    if sim.unit != run.unit:
        raise ScheduleError("one run is in seconds and another in slots; they cannot be drawn on one axis")
    if names is None:
        names = (sim.source, run.source) if sim.source != run.source else ("first", "second")
    runs = typical_step(sim), typical_step(run)
    slots = " slots" if sim.unit == "slot" else ""
    spans = [format_time(one.makespan, one.unit) + slots for one in runs]
    counts = [f" (median of {one.steps} steps)" if one.steps > 1 else "" for one in (sim, run)]
    error = f" · {names[0]} / {names[1]} - 1 = {100 * (runs[0].makespan / runs[1].makespan - 1):+.2f} %" if runs[1].makespan else ""
    schedules = printable(" / ".join(dict.fromkeys(one.schedule.name for one in (sim, run))))
    title = f"{schedules}\nabove: {names[0]}, makespan {spans[0]}{counts[0]} · below: {names[1]}, {spans[1]}{counts[1]}{error}"
    return Overlay(runs, names, _merged(*map(scene, runs)), title)


def _merged(upper: Scene, lower: Scene) -> Scene:
    bands = [2 * bars.device + side for side, bars in enumerate((upper, lower))]
    edges = []
    for name in ("top", "bottom"):
        places = [
            band + np.interp(getattr(bars, name) - bars.device, (0.1, 0.5, 0.9), edge)
            for bars, band, edge in zip((upper, lower), bands, _EDGES, strict=True)
        ]
        edges.append(np.concatenate(places))
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(upper, name), getattr(lower, name)])
        for name in ("start", "end", "kind", "stage", "chunk", "microbatch", "step", "slot", "transfer")
    }
    return Scene(
        num_devices=2 * max(upper.num_devices, lower.num_devices),
        num_chunks=max(upper.num_chunks, lower.num_chunks),
        origin=0.0,
        span=max(upper.span, lower.span),
        unit=upper.unit,
        device=np.concatenate(bands),
        top=edges[0],
        bottom=edges[1],
        **columns,
    )
