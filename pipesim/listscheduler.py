"""The list scheduler: from priorities, caps and durations to streams.

Some orders depend on durations (``zb-auto``, ``hanayo``, ``ampnet``, Chimera's doubled forward). They are decided as a run
would decide them: whenever a device is free, it starts the op with the smallest key among those whose inputs are there and
that the caps allow. It does not wait while it could start something, unless *hold_back* says so.

The inputs follow from the kinds and the stage graph, as in a run (:mod:`pipesim.dataflow`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.errors import ScheduleError, require_count
from pipesim.op import Kind, Op, Pair, Slot

__all__ = ["backward_first", "list_schedule"]

_KINDS = ((Kind.F,), (Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W))
_URGENCY = {Kind.B: 0, Kind.I: 0, Kind.F: 1, Kind.W: 2}


def backward_first(op: Op) -> tuple[int, int, int]:
    """The usual key: a backward before a forward before a weight gradient, then the oldest microbatch, then the deepest stage.

    Examples:
        >>> backward_first(Op(1, Kind.B, 5)) < backward_first(Op(0, Kind.F, 2)) < backward_first(Op(0, Kind.W, 0))
        True
    """
    return _URGENCY[op.kind], op.microbatch or 0, -op.stage


def list_schedule(
    placement: ArrayLike,
    microbatches: int,
    durations: Mapping[Kind, ArrayLike],
    *,
    priority: Callable[[Op], Any] = backward_first,
    latency: float = 0.0,
    max_in_flight: float | Sequence[float] | None = None,
    kept_for_weight_grad: float = 1.0,
    max_active: int | None = None,
    hold_back: Mapping[Kind, float] | None = None,
    pairs: Iterable[tuple[Op, Op]] = (),
    graph: Iterable[tuple[int, int]] | None = None,
) -> list[list[Slot]]:
    """Decides the order of every device's ops by running them.

    Args:
        placement: The device of each stage, (stages,), or of each stage and microbatch, (stages, microbatches), for
            replicas: Chimera's microbatches go down or up.
        microbatches: Microbatches m.
        durations: Kind to time: a number, (stages,) or (stages, microbatches). The kinds named are the ops there are:
            F alone, F and B, or F, I and W.
        priority: An op's key; the smallest goes first. Asked once an op. Equal keys go by (stage, kind, microbatch).
        latency: Time of a hop between two devices.
        max_in_flight: The most activations that a device holds, or a list per device; an F that would be one more waits.
            An activation is held from the start of F to the end of B, or of W.
        kept_for_weight_grad: The part of an activation that stays when I ends, the papers' M_W / M_B.
        max_active: The most microbatches that are under way at once, from the start of their first F to the end of their
            last B or I (of F, where there is no backward); a first F that would be one more waits.
        hold_back: Kind to the most time by which an op of this kind may delay an op with a smaller key that is on its way,
            which is when the producers of all its inputs have started. An op that would delay it longer waits. A kind that
            is not named never waits.
        pairs: Ops that share a slot, such as ``(Op(0, Kind.F, 0), Op(0, Kind.F, 1))``. The key and the kind of the first
            count; the slot takes the time of both.
        graph: Edges of the stage graph; None for the chain.

    Returns:
        One list of slots per device, as :meth:`pipesim.schedule.Schedule.from_streams` takes it.

    Raises:
        ScheduleError: An argument is wrong, or the caps let nothing start.

    Examples:
        >>> streams = list_schedule([0, 1], 3, {Kind.F: 1, Kind.B: 2}, max_in_flight=[2, 1])
        >>> for stream in streams:
        ...     print(*stream)
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    work = _Work(placement, require_count("microbatches", microbatches), durations, latency, pairs, graph)
    limits = _limits(max_in_flight, work.num_devices)
    if not 0 <= kept_for_weight_grad <= 1:
        raise ScheduleError(f"kept_for_weight_grad is a part of an activation, 0 to 1, got {kept_for_weight_grad!r}")
    max_active = microbatches if max_active is None else require_count("max_active", max_active)
    run = _Run(work, work.ranks(priority), limits, kept_for_weight_grad, max_active, hold_back or {})
    return [[work.slot(unit) for unit in order] for order in run.orders]


class _Work:
    """What there is to do, as flat lists: op (kind k, stage s, microbatch i) has the number (k · stages + s) · microbatches + i.

    A unit is what a device starts: an op, or a pair, which has the number of its first op.
    """

    def __init__(
        self,
        placement: ArrayLike,
        microbatches: int,
        durations: Mapping[Kind, ArrayLike],
        latency: float,
        pairs: Iterable[tuple[Op, Op]],
        graph: Iterable[tuple[int, int]] | None,
    ) -> None:
        self.microbatches = microbatches
        self.kinds = next((kinds for kinds in _KINDS if set(kinds) == set(durations)), ())
        if not self.kinds:
            names = ", ".join(str(getattr(kind, "name", kind)) for kind in durations)
            raise ScheduleError(f"durations name the kinds {names or 'none'}; right is F, or F and B, or F, I and W")
        if not (np.isfinite(latency) and latency >= 0):
            raise ScheduleError(f"latency must be a finite time of at least 0, got {latency!r}")
        self.latency = float(latency)
        table = _placement(placement, microbatches)
        self.stages, self.num_devices = len(table), int(table.max()) + 1
        self.size = self.stages * microbatches  # ops of one kind
        self.device: list[int] = np.tile(table.ravel(), len(self.kinds)).tolist()
        self.duration: list[float] = np.concatenate([_times(kind, durations[kind], self.stages, microbatches) for kind in self.kinds]).tolist()
        before, after = _neighbours(self.stages, graph)
        self.first_stages, self.last_stages = [not stages for stages in before], sum(not stages for stages in after)
        self.consumers = self._consumers(before, after)
        self.unit = list(range(len(self.device)))
        self.second: dict[int, int] = {}
        self._join(pairs)
        self.inputs = self._inputs()

    def op(self, number: int) -> Op:
        rest, microbatch = divmod(number, self.microbatches)
        kind, stage = divmod(rest, self.stages)
        return Op(stage, self.kinds[kind], microbatch)

    def slot(self, unit: int) -> Slot:
        second = self.second.get(unit)
        return self.op(unit) if second is None else Pair(self.op(unit), self.op(second))

    def halves(self, unit: int) -> tuple[int, ...]:
        second = self.second.get(unit)
        return (unit,) if second is None else (unit, second)

    def ranks(self, priority: Callable[[Op], Any]) -> list[int]:
        """(ops,) the place of every op's key among all keys: ints compare faster than what users make."""
        kinds, stages, microbatches = range(len(self.kinds)), range(self.stages), range(self.microbatches)
        by_stage = [(k * self.stages + s) * self.microbatches + i for s in stages for k in kinds for i in microbatches]
        keys = [priority(self.op(number)) for number in range(len(self.device))]
        ranks = [0] * len(keys)
        for rank, number in enumerate(sorted(by_stage, key=keys.__getitem__)):
            ranks[number] = rank
        return ranks

    def _consumers(self, before: list[list[int]], after: list[list[int]]) -> list[list[int]]:
        """Per op, the ops that take its output."""
        result: list[list[int]] = []
        for kind in range(len(self.kinds)):
            for stage in range(self.stages):
                # the same kind along the stage graph, and the next kind on the same stage
                neighbours = after[stage] if kind == 0 else before[stage] if kind == 1 else []
                rows = [kind * self.size + other * self.microbatches for other in neighbours]
                if kind + 1 < len(self.kinds):
                    rows.append((kind + 1) * self.size + stage * self.microbatches)
                result.extend([row + microbatch for row in rows] for microbatch in range(self.microbatches))
        return result

    def _join(self, pairs: Iterable[tuple[Op, Op]]) -> None:
        for pair in pairs:
            first, second = (self._number(op) for op in pair)
            devices = self.device[first], self.device[second]
            if devices[0] != devices[1]:
                raise ScheduleError(f"{pair[0]} is on device {devices[0]} and {pair[1]} on device {devices[1]}; a pair shares a device")
            if first == second or any(number in self.second or self.unit[number] != number for number in (first, second)):
                raise ScheduleError(f"{pair[0]} or {pair[1]} is paired twice; an op belongs to one slot")
            self.second[first], self.unit[second] = second, first
            self.duration[first] += self.duration[second]

    def _number(self, op: Op) -> int:
        stage, kind, microbatch = op
        if kind not in self.kinds or microbatch is None or not (0 <= stage < self.stages and 0 <= microbatch < self.microbatches):
            raise ScheduleError(f"the pair's {op} is not among the ops of {self.stages} stages and {self.microbatches} microbatches")
        return self.kinds.index(kind) * self.size + stage * self.microbatches + microbatch

    def _inputs(self) -> list[int]:
        """Per unit, how many inputs it waits for."""
        inputs = [0] * len(self.device)
        for number, targets in enumerate(self.consumers):
            for target in targets:
                if self.second and self.unit[target] == self.unit[number]:
                    raise ScheduleError(f"{self.op(target)} needs {self.op(number)}, so they cannot share a slot")
                inputs[self.unit[target]] += 1
        return inputs


class _Run:
    """One run; its result is in ``orders``: per device, its units in the order in which it started them."""

    def __init__(self, work: _Work, ranks: list[int], limits: list[float], kept: float, max_active: int, hold_back: Mapping[Kind, float]) -> None:
        self.work, self.ranks, self.limits, self.max_active = work, ranks, limits, max_active
        self.orders: list[list[int]] = [[] for _ in limits]
        self.level = [0.0] * len(limits)  # activations held
        self.released = [0.0, 1.0 - kept, kept] if len(work.kinds) == 3 else [0.0, 1.0] if len(work.kinds) == 2 else [1.0]
        self.hold_back = [hold_back.get(kind) for kind in work.kinds]
        self.looks_ahead = any(limit is not None for limit in self.hold_back)
        self.inputs, self.unknown, self.arrival = list(work.inputs), list(work.inputs), [0.0] * len(work.inputs)
        self.coming: list[dict[int, float]] = [{} for _ in limits]  # per device, units on their way: when they can start
        # Per device one heap of (rank, unit) for each reason that may hold an op back: its kind, and for first forwards max_active
        self.ready: list[list[list[tuple[int, int]]]] = [[[] for _ in range(len(work.kinds) + 1)] for _ in limits]
        self.forwards = [1] * work.size + [0] * (len(ranks) - work.size)
        for first, second in work.second.items():
            self.forwards[first] += self.forwards[second]
        self.active = 0
        self.entered = [False] * work.microbatches
        # ops that a microbatch under way still has to do before it has left: its backwards on first stages, or forwards on last ones
        self.to_leave = [sum(work.first_stages) if len(work.kinds) > 1 else work.last_stages] * work.microbatches
        self._run()

    def _run(self) -> None:
        work, device, duration, latency = self.work, self.work.device, self.work.duration, self.work.latency
        inputs, unit_of, consumers, second = self.inputs, work.unit, work.consumers, work.second
        free = [True] * len(self.limits)
        for unit, count in enumerate(inputs):
            if not count and unit_of[unit] == unit:
                self._offer(unit)
        events: list[tuple[float, int, int]] = []  # (time, 0: the unit has ended, 1: an input of it has arrived, unit)
        now, touched = 0.0, set(range(len(free)))
        while True:
            # what may have to wait is decided after what starts at once, because that tells what is on its way
            for patient in (False, True) if self.looks_ahead else (False,):
                for number in sorted(touched):
                    if free[number] and (chosen := self._choose(number, now, patient)) is not None:
                        free[number] = False
                        heapq.heappush(events, (now + duration[chosen], 0, chosen))
            if not events:
                break
            now, touched = events[0][0], set()
            while events and events[0][0] == now:  # all that happens now happens before any device chooses
                _, arrived, unit = heapq.heappop(events)
                if arrived:
                    targets = [unit]
                else:
                    free[device[unit]] = True
                    touched.add(device[unit])
                    if self._release(unit):
                        touched = set(range(len(free)))
                    targets = consumers[unit] if unit not in second else consumers[unit] + consumers[second[unit]]
                for target in targets:
                    target = unit_of[target]
                    if latency and not arrived and device[target] != device[unit]:
                        heapq.heappush(events, (now + latency, 1, target))
                        continue
                    inputs[target] -= 1
                    if not inputs[target]:
                        self._offer(target)
                        touched.add(device[target])
        if sum(map(len, self.orders)) < len(self.ranks) - len(second):
            self._refuse()

    def _offer(self, unit: int) -> None:
        """All inputs of the unit are there."""
        work, heap = self.work, unit // self.work.size
        if any(number < work.size and work.first_stages[number // work.microbatches] for number in work.halves(unit)):
            heap = len(work.kinds)
        heapq.heappush(self.ready[work.device[unit]][heap], (self.ranks[unit], unit))
        if self.looks_ahead:
            self.coming[work.device[unit]].pop(unit, None)

    def _choose(self, device: int, now: float, patient: bool) -> int | None:
        """Takes the unit that the device starts now, if any; if not *patient*, only one that need not be held back."""
        best = None
        for heap in self.ready[device]:
            if not heap or (best is not None and heap[0] > best[0]) or not self._allowed(device, heap[0][1]):
                continue
            if not (patient and self._held_back(device, heap[0][1], now)):
                best = heap
        if best is None or not (patient or self.hold_back[best[0][1] // self.work.size] is None):
            return None
        unit = heapq.heappop(best)[1]
        self.orders[device].append(unit)
        if self.forwards[unit]:
            self.level[device] += self.forwards[unit]
            if self.max_active < self.work.microbatches:
                for microbatch in self._entering(unit):
                    self.entered[microbatch] = True
                    self.active += 1
        if self.looks_ahead:
            self._announce(unit, now + self.work.duration[unit])
        return unit

    def _allowed(self, device: int, unit: int) -> bool:
        count = self.forwards[unit]
        if not count:
            return True
        if self.level[device] + count > self.limits[device]:
            return False
        return self.max_active >= self.work.microbatches or self.active + len(self._entering(unit)) <= self.max_active

    def _entering(self, unit: int) -> set[int]:
        """The microbatches that get under way with this unit."""
        work = self.work
        firsts = (number for number in work.halves(unit) if number < work.size and work.first_stages[number // work.microbatches])
        return {number % work.microbatches for number in firsts if not self.entered[number % work.microbatches]}

    def _held_back(self, device: int, unit: int, now: float) -> bool:
        tolerance = self.hold_back[unit // self.work.size]
        if tolerance is None:
            return False
        rank, end = self.ranks[unit], now + self.work.duration[unit]
        return any(
            self.ranks[other] < rank and end > (arrival + tolerance) * (1 + 1e-12) and self._allowed(device, other)
            for other, arrival in self.coming[device].items()
        )

    def _announce(self, unit: int, end: float) -> None:
        """The unit has started, so it is known when its consumers get this input."""
        work = self.work
        for number in work.halves(unit):
            for target in work.consumers[number]:
                target = work.unit[target]
                arrival = end if work.device[target] == work.device[unit] else end + work.latency
                self.arrival[target] = max(self.arrival[target], arrival)
                self.unknown[target] -= 1
                if not self.unknown[target]:
                    self.coming[work.device[target]][target] = self.arrival[target]

    def _release(self, unit: int) -> bool:
        """The unit has ended: frees what it held. True if a microbatch has left the pipeline."""
        work, left = self.work, False
        for number in work.halves(unit):
            kind, rest = divmod(number, work.size)
            self.level[work.device[unit]] -= self.released[kind]
            if self.max_active < work.microbatches and kind == min(1, len(work.kinds) - 1):
                leaves = work.first_stages[rest // work.microbatches] if kind else not work.consumers[number]
                microbatch = rest % work.microbatches
                if leaves:
                    self.to_leave[microbatch] -= 1
                    if not self.to_leave[microbatch]:
                        self.active -= 1
                        left = True
        return left

    def _refuse(self) -> None:
        stuck = [(device, min(heap[0] for heap in heaps if heap)[1]) for device, heaps in enumerate(self.ready) if any(heaps)]
        where = "; ".join(f"device {d} at {self.work.slot(unit)}, holding {self.level[d]:g} of {self.limits[d]:g}" for d, unit in stuck)
        caps = f", and at most {self.max_active} microbatches are under way" if self.max_active < self.work.microbatches else ""
        raise ScheduleError(f"nothing can start: {where or 'pairs or stages wait for each other'}{caps}; raise the cap or change the priority")


def _placement(placement: ArrayLike, microbatches: int) -> NDArray[np.int64]:
    table = np.asarray(placement)
    if table.dtype.kind not in "iu" or table.ndim not in (1, 2) or not table.size or table.min() < 0:
        raise ScheduleError(f"placement must be the device of each stage, such as [0, 1, 1, 0], got {placement!r:.80}")
    if table.ndim == 1:
        table = table[:, None]
    elif table.shape[1] != microbatches:
        raise ScheduleError(f"placement has shape {table.shape}; right is (stages,) or (stages, {microbatches}), the second being microbatches")
    return np.broadcast_to(table, (len(table), microbatches)).astype(np.int64)


def _times(kind: Kind, value: ArrayLike, stages: int, microbatches: int) -> NDArray[np.float64]:
    try:
        table = np.asarray(value, dtype=np.float64)
        table = np.broadcast_to(table[:, None] if table.ndim == 1 else table, (stages, microbatches))
    except (TypeError, ValueError):
        raise ScheduleError(f"the time of {kind.name} must be a number, one per stage ({stages}), or a table per stage and microbatch") from None
    if not (np.isfinite(table).all() and table.min() >= 0):
        raise ScheduleError(f"the time of {kind.name} must be finite and at least 0 everywhere, got {value!r:.80}")
    return table.ravel()


def _neighbours(stages: int, graph: Iterable[tuple[int, int]] | None) -> tuple[list[list[int]], list[list[int]]]:
    """Per stage, the stages before it and the stages after it."""
    before: list[list[int]] = [[] for _ in range(stages)]
    after: list[list[int]] = [[] for _ in range(stages)]
    for first, second in pairwise(range(stages)) if graph is None else sorted(set(graph)):
        if not (0 <= first < stages and 0 <= second < stages):
            raise ScheduleError(f"the stage graph has an edge {first} -> {second}, and stages are 0..{stages - 1}")
        before[second].append(first)
        after[first].append(second)
    return before, after


def _limits(value: float | Sequence[float] | None, devices: int) -> list[float]:
    if value is None:
        return [float("inf")] * devices
    limits = list(value) if isinstance(value, Sequence) else [value] * devices
    if len(limits) != devices:
        raise ScheduleError(f"max_in_flight has {len(limits)} values and there are {devices} devices; give one number, or one per device")
    if any(not limit >= 1 for limit in limits):
        raise ScheduleError(f"max_in_flight must be at least 1 on every device, got {limits}")
    return [limit + 1e-9 for limit in limits]  # parts of an activation do not add up exactly
