"""Which version of its weights every op uses: a property of the schedule, known without running it.

Version v of a stage is what its first v updates made. An op's version follows from where ``U`` stands in its device's
stream and from the weight policy:

=================  ==================================  ==========================  ===============
policy             forward uses                        backward uses               versions kept
=================  ==================================  ==========================  ===============
``flush``          the one there is                    the same                    1
``stash``          the latest                          what its forward used       as many as differ
``vertical``       what the first stage used for       what its forward used       as many as differ
                   this microbatch (PipeDream's
                   vertical sync)
``double_buffer``  the one before the update that      what its forward used       2
                   its gradient goes into (2BW)
``latest``         the latest                          the latest                  1
``predict``        the latest, extrapolated            the latest, extrapolated    2
=================  ==================================  ==========================  ===============

Sources: PipeDream (Narayanan et al. 2019) section 3.3; PipeDream-2BW (Narayanan et al. 2021) section 3.1; PipeMare
(Yang et al. 2021); SpecTrain (Chen et al. 2018).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ScheduleError
from pipesim.op import Kind

if TYPE_CHECKING:
    from pipesim.schedule import Schedule

__all__ = ["Staleness"]


class Staleness:
    r"""Weight versions of a schedule, as (stages, microbatches) int64 arrays; -1 where a stage has no backward.

    Attributes:
        forward_version: The version that each forward uses.
        backward_version: The version that each backward uses.
        update: The update (counted from 0) that each gradient goes into.

    Examples:
        >>> from pipesim import Schedule
        >>> text = "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2\n1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2"
        >>> staleness = Schedule.from_text(text, weights="stash").check().staleness
        >>> staleness.forward_version.tolist()
        [[0, 0, 1], [0, 1, 2]]
        >>> staleness.forward_delay.tolist()
        [[0, 1, 1], [0, 0, 0]]
        >>> staleness.num_versions
        {(0, 0): 2, (1, 1): 1}
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule.check()
        policy = schedule.weights
        forward, backward, release = schedule.rows_of(Kind.F), schedule.backward_rows, schedule.release_rows
        before = self._updates_before
        none = backward < 0
        if policy == "flush":
            self.forward_version = np.zeros(forward.shape, np.int64)
            self.backward_version = np.where(none, -1, 0)
            self.update = np.where(none, -1, 0)
            return
        self.update = np.where(none, -1, before[release])
        self.forward_version = before[forward]
        self.backward_version = np.where(none, -1, before[backward])
        if policy == "double_buffer":
            self.forward_version = np.maximum(self.update - 1, 0)
            early = (self.forward_version > before[forward]) & ~none
            if early.any():
                row = int(forward[early].min())
                raise ScheduleError(f"{schedule.where(row)}: needs weights that are not there yet; two versions do not suffice for this order")
        if policy == "vertical":
            self.forward_version = self._first_stage_versions()
        if policy in ("stash", "vertical", "double_buffer"):
            self.backward_version = np.where(none, -1, self.forward_version)

    @cached_property
    def _groups(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows sorted by (device, stage), and the group number of each sorted row."""
        schedule = self._schedule
        key = schedule.device.astype(np.int64) * schedule.num_stages + schedule.stage
        order = np.argsort(key, kind="stable")
        group = np.concatenate([[0], np.cumsum(np.diff(key[order]) != 0)])
        return order, group

    @cached_property
    def _updates_before(self) -> NDArray[np.int64]:
        """(rows,) updates of the row's stage that stand before it on its device."""
        order, group = self._groups
        is_update = (self._schedule.kind[order] == int(Kind.U)).astype(np.int64)
        count = np.cumsum(is_update) - is_update
        first = np.searchsorted(group, np.arange(group[-1] + 1))
        result = np.empty(len(order), np.int64)
        result[order] = count - count[first][group]
        return result

    def _first_stage_versions(self) -> NDArray[np.int64]:
        """The version of a microbatch at its first stage, as versions of every stage.

        Versions count a stage's own updates, and a stage with r replicas makes one for r microbatches. So what travels is
        the number of microbatches whose gradients are in the weights.
        """
        schedule, latest = self._schedule, self.forward_version
        trained = {int(stage) for stage in np.flatnonzero(self.update[:, 0] >= 0)}
        entries = sorted(trained - {after for before, after in schedule.stage_edges if before in trained})
        if not entries:
            return latest
        updates = np.sort(self.update, axis=1)
        included = np.array([np.searchsorted(updates[stage], latest[stage]) for stage in entries]).min(axis=0)
        after_all = updates[:, -1:] + 1
        result = np.take_along_axis(np.concatenate([updates, after_all], axis=1), np.broadcast_to(included, latest.shape), axis=1)
        result = np.where(self.update < 0, latest, result)  # frozen stages have one version
        early = result > latest
        if early.any():
            row = int(schedule.rows_of(Kind.F)[early].min())
            raise ScheduleError(f"{schedule.where(row)}: needs the weights that its first stage used, and they are not there yet")
        return result

    @property
    def forward_delay(self) -> NDArray[np.int64]:
        """Updates made between the weights that a forward saw and the update that its gradient goes into."""
        return np.where(self.update < 0, 0, self.update - self.forward_version)

    @property
    def backward_delay(self) -> NDArray[np.int64]:
        """The same for the weights that the backward saw."""
        return np.where(self.update < 0, 0, self.update - self.backward_version)

    @cached_property
    def num_versions(self) -> dict[tuple[int, int], int]:
        """(device, stage) to the number of weight versions kept there at once."""
        schedule = self._schedule
        fixed = {"flush": 1, "double_buffer": 2, "latest": 1, "predict": 2}
        pairs = [(device, stage) for device, stages in enumerate(schedule.device_stages) for stage in stages]
        if schedule.weights not in ("stash", "vertical"):
            return dict.fromkeys(pairs, fixed[schedule.weights])
        return {pair: self._stashed(*pair) for pair in pairs}

    def _stashed(self, device: int, stage: int) -> int:
        """The most versions alive at once.

        Version v lives from the update that made it until the next update and the last backward that uses it are both over.
        """
        schedule = self._schedule
        updates = np.flatnonzero((schedule.device == device) & (schedule.stage == stage) & (schedule.kind == int(Kind.U)))
        if not len(updates):
            return 1
        born = np.concatenate([[-1], updates])
        ends = np.concatenate([updates, [len(schedule)]])
        release = schedule.release_rows[stage]
        mine = schedule.device[schedule.rows_of(Kind.F)[stage]] == device
        np.maximum.at(ends, self.forward_version[stage][mine], release[mine])
        # at one place the end of a version comes before the birth of the next: the update is in place
        events = np.concatenate([np.stack([ends, np.full_like(ends, -1)]), np.stack([born, np.ones_like(born)])], axis=1)
        order = np.lexsort((events[1], events[0]))
        return int(np.cumsum(events[1][order]).max())
