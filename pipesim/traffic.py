"""The communication of a run as columns: SEND and RECV, and the collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim.op import Kind, Op

if TYPE_CHECKING:
    from pipesim.schedule import Schedule

__all__ = ["Traffic"]


@dataclass(frozen=True, eq=False)
class Traffic:
    """Every SEND, RECV and collective of one step of a run, in the order (device, place in its stream).

    A SEND to several devices, or a RECV from several, is there once for each. A collective is there once for every device
    that takes part, and once for every bucket of it. OFFLOAD and RELOAD are in :class:`pipesim.memory.Moves`.

    Attributes:
        schedule: Whose communication this is.
        kind: (ops,) int8, values of :class:`Kind`: SEND_F, RECV_F, SEND_B, RECV_B, REDUCE_GRAD, UNSHARD.
        device: (ops,) int32, where it runs.
        stage: (ops,) int32; of a reduction of tied weights the first of the tied stages.
        microbatch: (ops,) int32; of a collective the number of its update, or of its microbatch where there is one for each;
            -1 where it has none.
        peer: (ops,) int32, the device at the other end; -1 for a collective.
        size: (ops,) float64, bytes of a message; 0 for a collective.
        row: (ops,) int64, the row of the schedule that lists it; -1 where it follows from the schedule and is not listed.
        message: (ops,) int64, which of the schedule's messages; -1 for a collective.
    """

    schedule: Schedule
    kind: NDArray[np.int8]
    device: NDArray[np.int32]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    peer: NDArray[np.int32]
    size: NDArray[np.float64]
    row: NDArray[np.int64]
    message: NDArray[np.int64]

    @classmethod
    def none(cls, schedule: Schedule) -> Traffic:
        """Of a run that has no communication but its messages, which need nobody's permission."""
        numbers = np.zeros(0, np.int32)
        rows = np.zeros(0, np.int64)
        return cls(schedule, np.zeros(0, np.int8), numbers, numbers, numbers, numbers, np.zeros(0), rows, rows)

    def __len__(self) -> int:
        return len(self.kind)

    def op(self, number: int) -> Op:
        """The op as people read it."""
        microbatch = int(self.microbatch[number])
        return Op(int(self.stage[number]), Kind(int(self.kind[number])), None if microbatch < 0 else microbatch)

    @property
    def collective(self) -> NDArray[np.bool_]:
        """(ops,) whether it is a collective."""
        return np.asarray(self.peer < 0)
