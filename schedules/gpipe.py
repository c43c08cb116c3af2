"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from typing import Literal

import numpy as np

from pipesim.errors import ScheduleError
from pipesim.op import Kind
from pipesim.schedule import Schedule

__all__ = ["gpipe"]


def gpipe(devices: int, microbatches: int, *, order: Literal["forward", "reversed"] = "forward", forward_only: bool = False) -> Schedule:
    """Runs all forwards, then all backwards.

    ::

        device 0 | F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        device 1 | .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .      F = B here

    With equal stages: makespan (m + p - 1)·(F + B); bubble fraction (p - 1)/(m + p - 1); peak m activations on every
    device. Any p, any m.

    Source: Huang et al. 2019 (GPipe), section 2.3. PyTorch runs the backwards in the forwards' order, DAPPLE (figure
    3a) and Alpa draw them reversed; makespan and peak are the same.

    Args:
        devices: Devices p, one stage each.
        microbatches: Microbatches m.
        order: Order of the backwards: ``forward`` 0..m-1, or ``reversed`` m-1..0.
        forward_only: Leave the backwards out, for an inference run: makespan (m + p - 1)·F.

    Raises:
        ScheduleError: The order is neither.
    """
    if order not in ("forward", "reversed"):
        raise ScheduleError(f"order must be 'forward' or 'reversed', got {order!r}")
    forwards = np.arange(microbatches)
    backwards = forwards if order == "forward" else forwards[::-1]
    if forward_only:
        backwards = backwards[:0]
    kind = np.repeat([Kind.F, Kind.B], [len(forwards), len(backwards)])
    microbatch = np.concatenate([forwards, backwards])
    return Schedule.from_columns([(stage, kind, microbatch) for stage in range(devices)], name="gpipe")
