"""The list scheduler: from priorities, caps and durations to streams.

Some orders depend on durations (``zb-auto``, ``hanayo``, ``ampnet``, Chimera's doubled forward). They are decided as a run
would decide them: whenever a device is free, it starts the op with the smallest key among those whose inputs are there and
that the caps allow. It never waits while it could start something, so a key is a preference, not a promise.

The inputs follow from the kinds and the stage graph, as in a run (:mod:`pipesim.dataflow`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.errors import ScheduleError, require_count
from pipesim.op import Kind, Op, Pair, Slot

__all__ = ["backward_first", "list_schedule"]

_KINDS = ((Kind.F,), (Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W))


def backward_first(op: Op) -> tuple[int, int, int]:
    """The usual key: a backward before a forward before a weight gradient, then the oldest microbatch, then the deepest stage.

    Examples:
        >>> backward_first(Op(1, Kind.B, 5)) < backward_first(Op(0, Kind.F, 2)) < backward_first(Op(0, Kind.W, 0))
        True
    """
    return _URGENCY[op.kind], op.microbatch or 0, -op.stage


_URGENCY = {Kind.B: 0, Kind.I: 0, Kind.F: 1, Kind.W: 2}


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
            last B or I; a first F that would be one more waits.
        pairs: Ops that share a slot, such as ``(Op(0, F, 0), Op(0, F, 1))``; the first one's key counts, the slot takes
            the sum of both.
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
    work = _Work(placement, microbatches, durations, priority, latency, pairs, graph)
    limits = _limits(max_in_flight, work.num_devices, kept_for_weight_grad)
    active = work.microbatches if max_active is None else require_count("max_active", max_active)
    orders = _run(work, limits, kept_for_weight_grad, active)
    return [[work.slot(unit) for unit in order] for order in orders]


class _Work:
    """What there is to do, as flat lists: op (kind k, stage s, microbatch i) has the number (k · stages + s) · microbatches + i.

    A unit is what a device starts: an op, or a pair, which has the number of its first op.
    """

    def __init__(
        self,
        placement: ArrayLike,
        microbatches: int,
        durations: Mapping[Kind, ArrayLike],
        priority: Callable[[Op], Any],
        latency: float,
        pairs: Iterable[tuple[Op, Op]],
        graph: Iterable[tuple[int, int]] | None,
    ) -> None:
        self.microbatches = require_count("microbatches", microbatches)
        self.kinds = next((kinds for kinds in _KINDS if set(kinds) == set(durations)), None) or _refuse_kinds(durations)
        table = _placement(placement, self.microbatches)
        self.stages, self.num_devices = len(table), int(table.max()) + 1
        if not (np.isfinite(latency) and latency >= 0):
            raise ScheduleError(f"latency must be a finite time of at least 0, got {latency!r}")
        self.latency = float(latency)
        self.device: list[int] = np.tile(table.ravel(), len(self.kinds)).tolist()
        times = [_times(kind, durations[kind], self.stages, self.microbatches) for kind in self.kinds]
        self.duration: list[float] = np.concatenate(times).tolist()
        self.predecessors, self.successors = _neighbours(self.stages, graph)
        self.unit = list(range(len(self.device)))
        self.second: dict[int, int] = {}
        self._join(pairs)
        self.inputs = self._count_inputs()
        # the key, then the op's own number, so that no two are equal
        self.key = [(priority(self.op(number)), *self._order(number)) for number in range(len(self.device))]

    def _order(self, number: int) -> tuple[int, int]:
        kind, rest = divmod(number, self.stages * self.microbatches)
        return rest // self.microbatches, kind * self.microbatches + rest % self.microbatches

    def op(self, number: int) -> Op:
        rest, microbatch = divmod(number, self.microbatches)
        kind, stage = divmod(rest, self.stages)
        return Op(stage, self.kinds[kind], microbatch)

    def number(self, op: Op) -> int:
        stage, kind, microbatch = op
        if kind not in self.kinds or microbatch is None or not (0 <= stage < self.stages and 0 <= microbatch < self.microbatches):
            raise ScheduleError(f"the pair's {op} is not among the ops: {self.stages} stages, {self.microbatches} microbatches")
        return (self.kinds.index(kind) * self.stages + stage) * self.microbatches + microbatch

    def slot(self, unit: int) -> Slot:
        second = self.second.get(unit)
        return self.op(unit) if second is None else Pair(self.op(unit), self.op(second))

    def halves(self, unit: int) -> tuple[int, ...]:
        second = self.second.get(unit)
        return (unit,) if second is None else (unit, second)

    def consumers(self, number: int) -> list[int]:
        """Ops that take this op's output."""
        size, microbatches = self.stages * self.microbatches, self.microbatches
        kind, rest = divmod(number, size)
        stage, microbatch = divmod(rest, microbatches)
        if kind == 0:
            found = [after * microbatches + microbatch for after in self.successors[stage]]
            return [*found, size + rest] if len(self.kinds) > 1 else found
        if kind == 1:
            found = [size + before * microbatches + microbatch for before in self.predecessors[stage]]
            return [*found, 2 * size + rest] if len(self.kinds) > 2 else found
        return []

    def _count_inputs(self) -> list[int]:
        inputs = [0] * len(self.device)
        for number in range(len(self.device)):
            for target in self.consumers(number):
                if self.unit[target] == self.unit[number]:
                    raise ScheduleError(f"{self.op(target)} needs {self.op(number)}, so they cannot share a slot")
                inputs[self.unit[target]] += 1
        return inputs

    def _join(self, pairs: Iterable[tuple[Op, Op]]) -> None:
        for pair in pairs:
            first, second = (self.number(op) for op in pair)
            if self.device[first] != self.device[second]:
                raise ScheduleError(
                    f"{pair[0]} is on device {self.device[first]} and {pair[1]} on device {self.device[second]}; a pair shares a device"
                )
            if first == second or any(number in self.second or self.unit[number] != number for number in (first, second)):
                raise ScheduleError(f"{pair[0]} or {pair[1]} is paired twice; an op belongs to one slot")
            self.second[first], self.unit[second] = second, first
            self.duration[first] += self.duration[second]


def _run(work: _Work, limits: list[float], kept: float, max_active: int) -> list[list[int]]:
    """Returns the units in the order in which each device starts them."""
    size, microbatches, latency = work.stages * work.microbatches, work.microbatches, work.latency
    device, duration, unit_of, inputs, key = work.device, work.duration, work.unit, list(work.inputs), work.key
    last = len(work.kinds) - 1
    orders: list[list[int]] = [[] for _ in limits]
    free, level = [True] * len(limits), [0.0] * len(limits)
    # Three heaps per device, by what may hold an op back: nothing; the device's cap; the device's cap and the pipeline's.
    ready: list[tuple[list[Any], list[Any], list[Any]]] = [([], [], []) for _ in limits]
    entries = {device[stage * microbatches + i] for stage in range(work.stages) if not work.predecessors[stage] for i in range(microbatches)}
    sources = [not before for before in work.predecessors]
    unfinished = [sum(sources)] * microbatches  # backwards of first stages that a microbatch still has to do
    entered: set[int] = set()
    active = 0

    forwards = [sum(number < size for number in work.halves(unit)) for unit in range(len(device))]
    entering = [
        [rest % microbatches for rest in work.halves(unit) if rest < size and sources[rest // microbatches]] if forwards[unit] else []
        for unit in range(len(device))
    ]

    def offer(unit: int) -> None:
        heap = ready[device[unit]][0 if not forwards[unit] else 2 if entering[unit] else 1]
        heapq.heappush(heap, (key[unit], unit))

    for unit in range(len(device)):
        if unit_of[unit] == unit and not inputs[unit]:
            offer(unit)
    events: list[tuple[float, int, int]] = []  # (time, 0 the unit has ended | 1 an input has arrived, unit)
    touched, now = set(range(len(limits))), 0.0
    while True:
        for d in sorted(touched):
            if not free[d]:
                continue
            heaps = ready[d]
            best = None
            for heap in heaps:
                if heap and (best is None or heap[0] < best[0]):
                    unit = heap[0][1]
                    if forwards[unit] and level[d] + forwards[unit] > limits[d]:
                        continue
                    if entering[unit] and active + len(set(entering[unit]) - entered) > max_active:
                        continue
                    best = heap
            if best is None:
                continue
            unit = heapq.heappop(best)[1]
            if forwards[unit]:
                level[d] += forwards[unit]
                for microbatch in entering[unit]:
                    if microbatch not in entered:
                        entered.add(microbatch)
                        active += 1
            free[d] = False
            orders[d].append(unit)
            heapq.heappush(events, (now + duration[unit], 0, unit))
        if not events:
            break
        now = events[0][0]
        touched = set()
        while events and events[0][0] == now:
            _, arrived, unit = heapq.heappop(events)
            d = device[unit]
            touched.add(d)
            if arrived:
                inputs[unit] -= 1
                if not inputs[unit]:
                    offer(unit)
                continue
            free[d] = True
            for number in work.halves(unit):
                kind = number // size
                if kind == 1 and last > 1:
                    level[d] -= 1.0 - kept
                elif kind == last:
                    level[d] -= kept if last > 1 else 1.0
                if kind == min(1, last) and sources[number % size // microbatches]:
                    microbatch = number % microbatches
                    unfinished[microbatch] -= 1
                    if not unfinished[microbatch]:
                        active -= 1
                        touched |= entries
                for target in work.consumers(number):
                    target = unit_of[target]
                    if device[target] != d and latency:
                        heapq.heappush(events, (now + latency, 1, target))
                        continue
                    inputs[target] -= 1
                    touched.add(device[target])
                    if not inputs[target]:
                        offer(target)
    _refuse_unfinished(work, orders, ready, limits, max_active)
    return orders


def _refuse_unfinished(
    work: _Work, orders: list[list[int]], ready: list[tuple[list[Any], list[Any], list[Any]]], limits: list[float], max_active: int
) -> None:
    if sum(map(len, orders)) == len(work.device) - len(work.second):
        return
    stuck = [(d, min(heap[0] for heap in heaps if heap)[1]) for d, heaps in enumerate(ready) if any(heaps)]
    where = ", ".join(f"device {d} at {work.slot(unit)} (holds at most {limits[d]:g})" for d, unit in stuck)
    raise ScheduleError(
        f"the caps let nothing start: {where or 'pairs wait for each other'}; at most {max_active} microbatches are under way; raise a cap or change the priority"
    )


def _refuse_kinds(durations: Mapping[Kind, ArrayLike]) -> tuple[Kind, ...]:
    names = ", ".join(str(getattr(kind, "name", kind)) for kind in durations)
    raise ScheduleError(f"durations name the kinds {names or 'none'}; right is F, or F and B, or F, I and W")


def _placement(placement: ArrayLike, microbatches: int) -> NDArray[np.int64]:
    table = np.asarray(placement)
    if table.dtype.kind not in "iu" or table.ndim not in (1, 2) or not table.size or table.min() < 0:
        raise ScheduleError(f"placement must be the device of each stage, such as [0, 1, 1, 0], got {placement!r:.80}")
    if table.ndim == 1:
        table = table[:, None]
    elif table.shape[1] != microbatches:
        raise ScheduleError(
            f"placement has shape {table.shape}; right is (stages,) or (stages, microbatches), and there are {microbatches} microbatches"
        )
    return np.broadcast_to(table, (len(table), microbatches)).astype(np.int64)


def _times(kind: Kind, value: ArrayLike, stages: int, microbatches: int) -> NDArray[np.float64]:
    try:
        table = np.asarray(value, dtype=np.float64)
        table = np.broadcast_to(table[:, None] if table.ndim == 1 else table, (stages, microbatches))
    except (TypeError, ValueError):
        raise ScheduleError(
            f"the time of {kind.name} must be a number, {stages} of them, one per stage, or a table per stage and microbatch"
        ) from None
    if not (np.isfinite(table).all() and table.min() >= 0):
        raise ScheduleError(f"the time of {kind.name} holds {table.min()}; right is a finite number of at least 0")
    return table.ravel()


def _neighbours(stages: int, graph: Iterable[tuple[int, int]] | None) -> tuple[list[list[int]], list[list[int]]]:
    edges = [(stage, stage + 1) for stage in range(stages - 1)] if graph is None else sorted(set(graph))
    predecessors: list[list[int]] = [[] for _ in range(stages)]
    successors: list[list[int]] = [[] for _ in range(stages)]
    for before, after in edges:
        if not (0 <= before < stages and 0 <= after < stages):
            raise ScheduleError(f"the stage graph has an edge {before} -> {after}, and stages are 0..{stages - 1}")
        predecessors[after].append(before)
        successors[before].append(after)
    return predecessors, successors


def _limits(value: float | Sequence[float] | None, devices: int, kept: float) -> list[float]:
    if not 0 <= kept <= 1:
        raise ScheduleError(f"kept_for_weight_grad is a part of an activation, 0 to 1, got {kept!r}")
    if value is None:
        return [float("inf")] * devices
    limits = list(value) if isinstance(value, Sequence) else [value] * devices
    if len(limits) != devices:
        raise ScheduleError(f"max_in_flight has {len(limits)} values and there are {devices} devices; give one number, or one per device")
    if any(not limit >= 1 for limit in limits):
        raise ScheduleError(f"max_in_flight must be at least 1 on every device, got {limits}")
    return [limit + 1e-9 for limit in limits]  # parts of an activation do not add up exactly
