"""An independent answer to "when does every op run": a longest path worked out by hand, without SimPy and without columns."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from pipesim import Kind, Op, Pair, Schedule

Key = tuple[int, str, int]  # (stage, letter, microbatch); letter "F" for a forward, "G" for whatever yields the input gradient


@dataclass
class LongestPath:
    """The times that the rules give: {(step, device, position in the stream): (start, end)}, and those of messages."""

    ops: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)
    # (step, letter, producer's stage, consumer's stage, microbatch): (sent, departed, arrived)
    messages: dict[tuple[int, str, int, int, int], tuple[float, float, float]] = field(default_factory=dict)
    stuck: dict[int, str] = field(default_factory=dict)


def _ops_of(slot: Any) -> list[Any]:
    return [slot.first, slot.second] if isinstance(slot, Pair) else [slot]


def longest_path(
    schedule: Schedule,
    duration: Callable[[Any], float],
    links: Mapping[tuple[int, int], tuple[float, float | None]],
    size: Callable[[int, int], float] = lambda stage, microbatch: 0.0,
    steps: int = 1,
    barrier: bool = False,
) -> LongestPath:
    """Works through the streams, one device at a time, for as long as any device can go on.

    Args:
        schedule: What to run. Updates must be listed if they take time.
        duration: Time of a slot (an op or a pair).
        links: (from, to) to (latency, bandwidth or None).
        size: Bytes of the activation that leaves (stage, microbatch), and of the gradient that comes back for it.
        steps: How often.
        barrier: Whether all devices wait for each other before their first U, or at the end where there is none.
    """
    streams = schedule.streams
    edges = set(schedule.stage_edges)
    successors = {s: sorted(b for a, b in edges if a == s) for s in range(schedule.num_stages)}
    predecessors = {s: sorted(a for a, b in edges if b == s) for s in range(schedule.num_stages)}
    home: dict[Key, int] = {}
    for device, stream in enumerate(streams):
        for slot in stream:
            for op in _ops_of(slot):
                letter = {Kind.F: "F", Kind.B: "G", Kind.I: "G"}.get(op.kind)
                if letter:
                    home[op.stage, letter, op.microbatch] = device

    def wanted(op: Any) -> list[Key]:
        if op.kind is Kind.F:
            return [(q, "F", op.microbatch) for q in predecessors[op.stage]]
        if op.kind in (Kind.B, Kind.I):
            return [(q, "G", op.microbatch) for q in successors[op.stage] if (q, "G", op.microbatch) in home]
        return []  # W, R and U need what stands before them on their own device

    def produced(op: Any) -> list[tuple[str, int, int]]:
        """Messages that the end of an op sends: (letter, consumer's stage, microbatch), by destination stage."""
        if op.kind is Kind.F:
            return [("F", q, op.microbatch) for q in successors[op.stage]]
        if op.kind in (Kind.B, Kind.I):
            return [("G", q, op.microbatch) for q in predecessors[op.stage] if (q, "G", op.microbatch) in home]
        return []

    result = LongestPath()
    here: dict[tuple[int, Key], float] = {}  # end of every op that others want
    there: dict[tuple[int, Key, int], float] = {}  # its arrival at a consumer's stage on another device
    link_free: dict[tuple[int, int], float] = dict.fromkeys(links, 0.0)
    free = [0.0] * len(streams)
    work = [[(step, position, slot) for step in range(steps) for position, slot in enumerate(stream)] for stream in streams]
    at = [0] * len(streams)
    used = [device for device, stream in enumerate(streams) if stream]
    # where a device waits for the others: before its first U of a step, or after its last slot
    gate = [next((k for k, slot in enumerate(s) if not isinstance(slot, Pair) and slot.kind is Kind.U), len(s)) for s in streams]
    come: dict[int, dict[int, float]] = {step: {} for step in range(steps)}

    # an update of one replica waits for the gradients that every replica lists before that update
    gradients: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for device, stream in enumerate(streams):
        latest: dict[int, int] = {}
        for position, slot in enumerate(stream):
            for op in _ops_of(slot):
                if op.kind in (Kind.B, Kind.W):
                    latest[op.stage] = position
                if op.kind is Kind.U and op.stage in latest:
                    gradients.setdefault((op.stage, op.microbatch), []).append((device, latest[op.stage]))

    def ready(step: int, device: int, slot: Any) -> float | None:
        """When all inputs are there, or None if it cannot be said yet."""
        time = 0.0
        for op in _ops_of(slot):
            for place in gradients.get((op.stage, op.microbatch), []) if op.kind is Kind.U else []:
                if (step, *place) not in result.ops:
                    return None
                time = max(time, result.ops[step, *place][1])
            for key in wanted(op):
                arrival = here.get((step, key)) if home[key] == device else there.get((step, key, op.stage))
                if arrival is None:
                    return None
                time = max(time, arrival)
        return time

    progress = True
    while progress:
        progress = False
        for device in used:
            while at[device] < len(work[device]):
                step, position, slot = work[device][at[device]]
                if barrier:
                    # the gate after the last slot of a step stands before the first slot of the next
                    waiting_step = step if gate[device] == position else step - 1 if position == 0 and gate[device] == len(streams[device]) else -1
                    if waiting_step >= 0:
                        come[waiting_step].setdefault(device, free[device])
                        if len(come[waiting_step]) < len(used):
                            break
                        free[device] = max(free[device], *come[waiting_step].values())
                arrived = ready(step, device, slot)
                if arrived is None:
                    result.stuck[device] = str(slot)
                    break
                result.stuck.pop(device, None)
                start = max(free[device], arrived)
                end = start + duration(slot)
                result.ops[step, device, position] = (start, end)
                free[device] = end
                for op in _ops_of(slot):
                    for letter, target, microbatch in produced(op):
                        key = (op.stage, letter, microbatch)
                        here[step, key] = end
                        receiver = home[target, letter, microbatch]
                        if receiver == device:
                            continue
                        latency, bandwidth = links[device, receiver]
                        if bandwidth is None:
                            departed, arrival = end, end + latency
                        else:
                            departed = max(end, link_free[device, receiver])
                            link_free[device, receiver] = departed + size(op.stage if letter == "F" else target, microbatch) / bandwidth
                            arrival = link_free[device, receiver] + latency
                        there[step, key, target] = arrival
                        result.messages[step, letter, op.stage, target, microbatch] = (end, departed, arrival)
                at[device] += 1
                progress = True
                if barrier and position + 1 == len(streams[device]) and gate[device] == position + 1:
                    come[step][device] = end
    return result


def random_schedule(
    seed: int,
    devices: int,
    microbatches: int,
    *,
    stages: int | None = None,
    dag: bool = False,
    replicas: bool = False,
    split: bool = False,
    recompute: bool = False,
    pairs: bool = False,
    forward_only: bool = False,
    updates: bool = False,
) -> Schedule:
    """Lists ops in an order in which they can run, chosen at random, so that the streams cannot deadlock.

    Args:
        seed: Of the choices.
        devices: Devices, of which some may get no ops.
        microbatches: Microbatches.
        stages: Stages; some number by default.
        dag: Stages form a DAG and not a chain.
        replicas: Some stages run on two devices.
        split: Some backwards are I and W.
        recompute: Some forwards are recomputed by an R.
        pairs: Some ops of a device share a slot.
        forward_only: No backward.
        updates: Every stage lists its U, after everything else on the device.
    """
    rng = random.Random(seed)
    stages = rng.randint(1, 2 * devices) if stages is None else stages
    graph = sorted({(rng.randrange(b), b) for b in range(1, stages) for _ in range(rng.randint(0, 2))}) if dag else None
    edges = [(s, s + 1) for s in range(stages - 1)] if graph is None else graph
    owners = [rng.sample(range(devices), 2 if replicas and devices > 1 and rng.random() < 0.5 else 1) for _ in range(stages)]
    needs: dict[Op, set[Op]] = {}
    home: dict[Op, int] = {}
    halved = {(s, i): split and rng.random() < 0.5 for s in range(stages) for i in range(microbatches)}

    def gradient(s: int, i: int) -> Op:
        return Op(s, Kind.I if halved[s, i] else Kind.B, i)

    for s in range(stages):
        for i in range(microbatches):
            own = {Op(s, Kind.F, i): {Op(q, Kind.F, i) for q, t in edges if t == s}}
            if not forward_only:
                own[gradient(s, i)] = {Op(s, Kind.F, i)} | {gradient(t, i) for q, t in edges if q == s}
                if halved[s, i]:
                    own[Op(s, Kind.W, i)] = {gradient(s, i)}
                if recompute and rng.random() < 0.5:
                    own[Op(s, Kind.R, i)] = {Op(s, Kind.F, i)}
                    own[gradient(s, i)].add(Op(s, Kind.R, i))
            needs.update(own)
            home.update(dict.fromkeys(own, owners[s][i % len(owners[s])]))
    streams: list[list[Any]] = [[] for _ in range(devices)]
    done: set[Op] = set()
    while len(done) < len(needs):
        ready = sorted(op for op, wanted in needs.items() if op not in done and wanted <= done)
        first = rng.choice(ready)
        others = [op for op in ready if op != first and home[op] == home[first]]
        if pairs and others and rng.random() < 0.5:
            second = rng.choice(others)
            streams[home[first]].append(Pair(first, second))
            done.add(second)
        else:
            streams[home[first]].append(first)
        done.add(first)
    if updates and not forward_only:
        for device, stream in enumerate(streams):
            mine = sorted({op.stage for op, place in home.items() if place == device})
            stream.extend(Op(s, Kind.U, 0) for s in mine)
    return Schedule.from_streams(streams, name=f"random {seed}", graph=graph)


@pytest.fixture(name="random_schedule", scope="session")
def _random_schedule() -> Callable[..., Schedule]:
    return random_schedule


@pytest.fixture(name="longest_path", scope="session")
def _longest_path() -> Callable[..., LongestPath]:
    return longest_path
