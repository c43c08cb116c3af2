"""When messages left and came, as far as traces show it, and what that says about the clocks of ranks."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipesim.dataflow import Messages
from pipesim.importing.clocks import Clocks, LocalClock, align
from pipesim.importing.ranks import Found, RankTrace
from pipesim.op import Kind, Op
from pipesim.units import format_time

__all__ = ["Transfers", "align_ranks", "own_transfers"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Transfers:
    """What was seen of messages.

    Attributes:
        departed: (steps, messages) when each left; NaN where the trace does not show it.
        seen: (steps, messages) when its receiver saw that it was there; NaN likewise.
        asked: (steps, messages) since when its receiver waited, at the latest.
        exact: Whether what was seen is the arrival itself, and not the moment at which somebody looked.
    """

    departed: Floats
    seen: Floats
    asked: Floats
    exact: bool

    def columns(self, found: Messages, times: Mapping[str, Floats], notes: list[str]) -> tuple[Floats, Floats, Floats]:
        """``sent``, ``departed`` and ``arrived`` of a Timeline.

        A message that nobody waited for is seen only when it is used. It is taken to have travelled as long as those on its
        link that were waited for (their median); it did not travel longer than until it was used.
        """
        start, sent = times["start"][:, found.target_slot], times["end"][:, found.source_slot]
        departed = np.fmax(sent, self.departed)
        seen = np.fmin(self.seen, start)
        if not self.exact:
            waited = departed >= self.asked
            link = found.source_device.astype(np.int64) * (int(found.target_device.max(initial=0)) + 1) + found.target_device
            for one in np.unique(link):
                own = np.flatnonzero(link == one)
                travelled = (seen - departed)[:, own][waited[:, own]]
                usual = max(0.0, float(np.median(travelled))) if len(travelled) else 0.0
                seen[:, own] = np.where(waited[:, own], seen[:, own], np.minimum(seen[:, own], departed[:, own] + usual))
        early = departed - seen
        # half a microsecond: what rounding and the middle of an interval may leave
        if (early > 5e-7).any():
            notes.append(
                f"{int((early > 5e-7).sum())} messages are seen up to {format_time(float(early.max()), 's')} before they leave; taken as there at once"
            )
        return sent, departed, np.fmax(departed, seen)


def own_transfers(
    ranks: Sequence[RankTrace], found: Messages, times: Mapping[str, Floats], clock: LocalClock, steps: Sequence[tuple[int, int]]
) -> Transfers:
    """From pipesim's traces: exact, and a message that takes no time has no slice."""
    sent = times["end"][:, found.source_slot]
    departed, seen = sent.copy(), sent.copy()
    sends = _ends(found)
    for row, (step, _) in enumerate(steps):
        for number, (_, recv, source, target) in enumerate(sends):
            if (slice_ := ranks[target].received.get((recv, source, step))) is not None:
                departed[row, number], seen[row, number] = (clock.time(target, value) for value in slice_)
    return Transfers(departed, seen, seen, exact=True)


def _ends(found: Messages) -> list[tuple[Op, Op, int, int]]:
    """Per message its SEND, its RECV, and the devices."""
    schedule = found.schedule
    columns = (found.source, found.target, found.gradient, found.source_device, found.target_device)
    result = []
    for source, target, gradient, here, there in zip(*(column.tolist() for column in columns), strict=True):
        send, recv = (Kind.SEND_B, Kind.RECV_B) if gradient else (Kind.SEND_F, Kind.RECV_F)
        number = int(schedule.microbatch[source])
        result.append((Op(int(schedule.stage[source]), send, number), Op(int(schedule.stage[target]), recv, number), here, there))
    return result


def align_ranks(
    ranks: Sequence[RankTrace], found: Messages, times: Mapping[str, Floats], clock: LocalClock, rows: Sequence[Sequence[Sequence[Found]]]
) -> tuple[Transfers, Clocks]:
    """Finds SEND and RECV slices, aligns the clocks by them, and returns both on the common clock."""
    departed, seen, asked = _found(ranks, found, times, clock, rows)
    start, end, sent = times["start"][:, found.target_slot], times["end"][:, found.target_slot], times["end"][:, found.source_slot]
    left = np.fmax(departed, sent)
    # What proves that a message was there: the receive; else the start of the op that needs it; and where labels hold waits
    # that the trace does not show, so that these contradict each other, only the end of that op.
    proofs = ((left, np.where(np.isnan(seen), start, seen)), (left, start), (sent, end))
    same = ranks[0].host != "" and len({rank.host for rank in ranks}) == 1
    best: Clocks | None = None
    for begins, proven in proofs:
        bounds = np.full((len(ranks), len(ranks)), np.inf)
        if len(found):
            np.minimum.at(bounds, (found.source_device, found.target_device), (proven - begins).min(axis=0))
        clocks = align(bounds, trusted=same)
        if best is None or clocks.contradiction < best.contradiction:
            best = clocks
        if not best.contradiction:
            break
    assert best is not None
    departed = departed + best.shift[found.source_device]
    seen = seen + best.shift[found.target_device]
    asked = asked + best.shift[found.target_device]
    exact = bool(ranks) and all(rank.gpu for rank in ranks) and not np.isnan(seen).any()
    return Transfers(departed, np.where(np.isnan(seen), start + best.shift[found.target_device], seen), asked, exact), best


def _found(
    ranks: Sequence[RankTrace], found: Messages, times: Mapping[str, Floats], clock: LocalClock, rows: Sequence[Sequence[Sequence[Found]]]
) -> tuple[Floats, Floats, Floats]:
    """(steps, messages) when the SEND of each began, when its RECV saw it (NaN where there is no such slice), since when it was waited for."""
    schedule = found.schedule
    departed, seen = np.full((2, len(rows), len(found)), np.nan)
    asked = times["asked"][:, found.target_slot].copy()
    ends = _ends(found)
    place = np.arange(schedule.num_slots) - schedule.device_slots[:-1][schedule.slot_device]
    source, target = place[found.source_slot].tolist(), place[found.target_slot].tolist()
    for step, row in enumerate(rows):
        # a slice belongs to the step if it begins after the last op of the step before and before the first of the next
        after = [own[-1].end if own else float("inf") for own in rows[step - 1]] if step else [float("-inf")] * len(ranks)
        before = [own[0].asked if own else float("inf") for own in rows[step + 1]] if step + 1 < len(rows) else [float("inf")] * len(ranks)
        for number, (send, recv, here, there) in enumerate(ends):
            sends = ranks[here].transfers.get(send, [])
            producer = row[here][source[number]]
            first = bisect.bisect_left(sends, (producer.start, float("-inf")))
            if first < len(sends) and sends[first][0] < before[here]:
                departed[step, number] = clock.time(here, sends[first][0])
            receives = ranks[there].transfers.get(recv, [])
            consumer = row[there][target[number]]
            last = bisect.bisect_right(receives, (consumer.end, float("inf"))) - 1
            if last >= 0 and receives[last][0] >= after[there]:
                value = ranks[there].seen[recv][last]
                if value is not None:
                    seen[step, number] = clock.time(there, value[1])
                    asked[step, number] = min(asked[step, number], clock.time(there, value[0]))
    return departed, seen, asked
