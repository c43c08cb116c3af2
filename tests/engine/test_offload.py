"""OFFLOAD and RELOAD: when they run, over which links, and what they do to memory. Every time is worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipesim import Cluster, Kind, Link, Op, Schedule, Timeline, UniformCosts, load, simulate

ONE = "0F0 0OFFLOAD0 0F1 0B1 0RELOAD0 0B0"


def runs(run: Timeline) -> dict[str, tuple[float, float]]:
    """Op to (start, end), in the first step."""
    return {str(run.schedule.slot(slot)): (float(run.start[0, slot]), float(run.end[0, slot])) for slot in range(run.schedule.num_slots)}


def moved(run: Timeline) -> dict[str, tuple[float, float]]:
    """OFFLOAD or RELOAD to (start, end), in the first step."""
    rows = run.moves.row.tolist()
    return {str(run.schedule.op(row)): (float(run.offload_start[0, i]), float(run.offload_end[0, i])) for i, row in enumerate(rows)}


def test_free_links_cost_nothing() -> None:
    run = simulate(Schedule.from_text(ONE), UniformCosts(forward=1, backward=2))
    assert runs(run) == {"0F0": (0, 1), "0F1": (1, 2), "0B1": (2, 4), "0B0": (4, 6)}
    assert moved(run) == {"0OFFLOAD0": (1, 1), "0RELOAD0": (4, 4)}
    # F0 leaves before F1 starts: at most one is here
    assert run.peak_memory == [1.0]
    assert run.memory(0).at(1.5) == 1.0


def test_the_lane_goes_on_and_the_backward_waits() -> None:
    # The host link takes 1 unit / 0.5 = 2. OFFLOAD 1..3 beside F1 1..2 and B1 2..4; RELOAD is issued at 4, 4..6; B0 6..8.
    cluster = Cluster(unit="slot", host=Link(0.0, 0.5))
    run = simulate(Schedule.from_text(ONE), UniformCosts(forward=1, backward=2), cluster=cluster)
    assert runs(run) == {"0F0": (0, 1), "0F1": (1, 2), "0B1": (2, 4), "0B0": (6, 8)}
    assert moved(run) == {"0OFFLOAD0": (1, 3), "0RELOAD0": (4, 6)}
    # F0 0..3 and 4..8, F1 1..4
    curve = run.memory(0)
    assert [curve.at(time) for time in (0, 1, 2.5, 3, 3.5, 4, 5, 7.9, 8)] == [1, 2, 2, 1, 1, 1, 1, 1, 0]
    assert run.peak_memory == [2.0]


def test_moves_run_in_order_on_the_communication_lane() -> None:
    # Latency 3 alone, so the link has no queue, but the lane has: OFFLOAD0 1..4, OFFLOAD1 issued at 2 runs 4..7, then RELOAD1
    # (issued at 2 too) 7..10 and RELOAD0, issued after B1 10..12, 12..15.
    text = "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD1 0B1 0RELOAD0 0B0"
    run = simulate(Schedule.from_text(text), UniformCosts(forward=1, backward=2), cluster=Cluster(unit="slot", host=Link(3.0)))
    assert moved(run) == {"0OFFLOAD0": (1, 4), "0OFFLOAD1": (4, 7), "0RELOAD1": (7, 10), "0RELOAD0": (12, 15)}
    assert runs(run)["0B1"] == (10, 12)
    assert runs(run)["0B0"] == (15, 17)


def test_moves_queue_with_messages_on_a_shared_link() -> None:
    # Device 0 offloads 2 units to device 1, messages are 1 unit, bandwidth 1.
    # 0 -> 1: activation 0 asked 1, 1..2; OFFLOAD asked 1, after it in the stream, 2..4; activation 1 asked 2, 4..5.
    # 1 -> 0: RELOAD, issued at 2, starts when OFFLOAD has ended, 4..6; gradient 0 (B0 3..5) asked 5, 6..7; gradient 1 (B1 6..8) 8..9.
    schedule = Schedule.from_text("offload: 0>1\n0F0 0OFFLOAD0 0F1 0RELOAD0 0B0 0B1\n1F0 1B0 1F1 1B1")
    run = simulate(schedule, UniformCosts(forward=1, backward=2, message=1, activation=2, bandwidth=1))
    assert moved(run) == {"0OFFLOAD0": (2, 4), "0RELOAD0": (4, 6)}
    labels = {run.messages.label(i): (float(run.departed[0, i]), float(run.arrived[0, i])) for i in range(len(run.messages))}
    assert labels == {
        "activation of microbatch 0, stage 0 to stage 1": (1, 2),
        "activation of microbatch 1, stage 0 to stage 1": (4, 5),
        "gradient of microbatch 0, stage 1 to stage 0": (6, 7),
        "gradient of microbatch 1, stage 1 to stage 0": (8, 9),
    }
    assert runs(run) == {
        "0F0": (0, 1), "0F1": (1, 2), "0B0": (7, 9), "0B1": (9, 11), "1F0": (2, 3), "1B0": (3, 5), "1F1": (5, 6), "1B1": (6, 8),
    }  # fmt: skip


def test_a_tie_goes_to_the_lower_device() -> None:
    # As above with 3 units: OFFLOAD 2..5, so at 5 both RELOAD (device 0) and gradient 0 (device 1, B0 3..5) ask for 1 -> 0.
    schedule = Schedule.from_text("offload: 0>1\n0F0 0OFFLOAD0 0F1 0RELOAD0 0B0 0B1\n1F0 1B0 1F1 1B1")
    run = simulate(schedule, UniformCosts(forward=1, backward=2, message=1, activation=3, bandwidth=1))
    assert moved(run)["0RELOAD0"] == (5, 8)
    gradient = int(np.flatnonzero(run.messages.gradient)[0])
    assert (run.sent[0, gradient], run.departed[0, gradient], run.arrived[0, gradient]) == (5, 8, 9)
    # The mirror image: device 1 offloads to device 0, whose message goes first. Activation 0 has no bytes and comes at 1, so 1F0
    # runs 1..1.5 and OFFLOAD 1.5..2; at 2 both RELOAD and activation 1 (0F1 1..2) ask for 0 -> 1.
    schedule = Schedule.from_text("offload: 1>0\n0F0 0F1 0B0 0B1\n1F0 1OFFLOAD0 1RELOAD0 1B0 1F1 1B1")
    cluster = Cluster(unit="slot", links={(0, 1): Link(0, 1), (1, 0): Link(0, 2)})
    run = simulate(schedule, UniformCosts(forward=[1, 0.5], backward=1, message=[[0, 1]] * 2, activation=1), cluster=cluster)
    assert moved(run) == {"1OFFLOAD0": (1.5, 2), "1RELOAD0": (3, 4)}
    assert run.departed[0, 1] == 2


def test_memory_moves_to_the_partner() -> None:
    # Latency 1 each way. Device 1 is idle beside its own 1F0 1B0. OFFLOAD 1..2, RELOAD issued at 1, 2..3.
    schedule = Schedule.from_text("offload: 0>1\n0F0 0OFFLOAD0 0RELOAD0 0B0\n1F0 1B0")
    run = simulate(schedule, UniformCosts(forward=1, backward=2, activation=[10, 1], latency=1))
    assert moved(run) == {"0OFFLOAD0": (1, 2), "0RELOAD0": (2, 3)}
    evictor, acceptor = run.memory(0), run.memory(1)
    # at 2 the evictor lets go what OFFLOAD took and takes what RELOAD brings; the acceptor has it from 1 to 3
    assert [evictor.at(time) for time in (0, 1.5, 2.5, 7.9, 8)] == [10, 10, 10, 10, 0]
    assert [acceptor.at(time) for time in (0.5, 1, 1.5, 2, 2.9, 3, 4.9, 5)] == [0, 10, 10, 11, 11, 1, 1, 0]
    assert run.peak_memory == [10.0, 11.0]


def test_the_first_op_that_does_not_fit_sees_what_is_offloaded_here() -> None:
    schedule = Schedule.from_text("offload: 0>1\n0F0 0OFFLOAD0 0RELOAD0 0B0\n1F0 1B0")
    run = simulate(schedule, UniformCosts(forward=1, backward=2, activation=[10, 1], latency=1), cluster=Cluster(unit="slot").with_memory(10))
    [overflow] = run.overflows()
    assert (overflow.device, str(overflow.op), overflow.time, overflow.needed) == (1, "1F0", 2.0, 11.0)


def test_split_backward_recomputation_and_steps() -> None:
    # I waits for the RELOAD, W for I only. Host latency 1: OFFLOAD 1..2, RELOAD 2..3, I 3..4, W 4..5; the second step is the same, 5 later.
    schedule = Schedule.from_text("0F0 0OFFLOAD0 0RELOAD0 0I0 0W0")
    run = simulate(schedule, UniformCosts(), cluster=Cluster(unit="slot", host=Link(1.0)), steps=2)
    assert run.start.tolist() == [[0, 3, 4], [5, 8, 9]]
    assert run.offload_end.tolist() == [[2, 3], [7, 8]]
    assert run.peak_memory == [1.0]
    # R needs what was offloaded (the stage's input, 2 of 10), so it waits; the other 8 are there from R's start.
    schedule = Schedule.from_text("0F0 0OFFLOAD0 0RELOAD0 0R0 0B0")
    run = simulate(schedule, UniformCosts(forward=1, backward=2, activation=10, stage_input=2), cluster=Cluster(unit="slot", host=Link(1.0, 2.0)))
    # 2 bytes at 2 a slot: OFFLOAD 1..3, RELOAD 3..5 (1 on the link, 1 of latency), R 5..6, B 6..8
    assert moved(run) == {"0OFFLOAD0": (1, 3), "0RELOAD0": (3, 5)}
    assert runs(run) == {"0F0": (0, 1), "0R0": (5, 6), "0B0": (6, 8)}
    assert [run.memory(0).at(time) for time in (0, 2, 3, 4, 5, 7, 8)] == [2, 2, 2, 2, 10, 10, 0]


def test_a_saved_run_keeps_its_moves(tmp_path: Path) -> None:
    run = simulate(Schedule.from_text(ONE), UniformCosts(forward=1, backward=2), cluster=Cluster(unit="slot", host=Link(0.0, 0.5)))
    run.save(tmp_path / "run.json.gz")
    again = load(tmp_path / "run.json.gz")
    assert np.array_equal(again.offload_start, run.offload_start)
    assert np.array_equal(again.offload_end, run.offload_end)
    assert again.peak_memory == [2.0]


# -- against a clock that ticks ------------------------------------------------------------------------------------------


def with_moves(schedule: Schedule, rng: random.Random) -> Schedule:
    """Some activations go out and come back, somewhere between their F and their backward."""
    streams = []
    for stream in schedule.streams:
        stream = list(stream)
        for op in [op for op in stream if op.kind is Kind.F and rng.random() < 0.6]:
            low = stream.index(op) + 1
            backward = next((k for k in (Kind.B, Kind.I) if Op(op.stage, k, op.microbatch) in stream), None)
            if backward is None:
                continue
            high = stream.index(Op(op.stage, backward, op.microbatch))
            out = rng.randint(low, high)
            stream.insert(out, Op(op.stage, Kind.OFFLOAD, op.microbatch))
            stream.insert(rng.randint(out + 1, high + 1), Op(op.stage, Kind.RELOAD, op.microbatch))
        streams.append(stream)
    devices = schedule.num_devices
    targets: dict[int, int | None] = {d: rng.choice([None, *(other for other in range(devices) if other != d)]) for d in range(devices)}
    return Schedule.from_streams(streams, graph=schedule.graph, offload_to=targets)


def tick(
    schedule: Schedule, duration: dict[Op, int], size: dict[tuple[int, int], int], links: dict[tuple[Any, Any], tuple[int, int]]
) -> dict[Any, int]:
    """Runs a schedule by a clock of whole ticks: {op: end}. A link is (latency, ticks per unit); every transfer takes a tick at least.

    At every tick all that ends or arrives is dealt with until nothing changes; only then do links choose.
    """
    streams, edges = schedule.streams, schedule.stage_edges
    home = {op: d for d, stream in enumerate(streams) for op in stream}
    position = {op: (d, n) for d, stream in enumerate(streams) for n, op in enumerate(stream)}
    grad = {(op.stage, op.microbatch): op for op in home if op.kind in (Kind.B, Kind.I)}
    inputs: dict[Op, set[Any]] = {op: set() for op in home}
    outputs: dict[Op, list[tuple[Op, Op]]] = {op: [] for op in home}
    for op in home:
        ways = [(a, b) for a, b in edges if (a if op.kind is Kind.F else b) == op.stage]
        for a, b in ways if op.kind in (Kind.F, Kind.B, Kind.I) else []:
            target = Op(b, Kind.F, op.microbatch) if op.kind is Kind.F else grad.get((a, op.microbatch))
            if target is not None and home[target] != home[op]:
                outputs[op].append((op, target))
                inputs[target].add((op, target))
        if op.kind is Kind.RELOAD:
            inputs[grad[op.stage, op.microbatch]].add(op)
    done: dict[Any, int] = {}
    at, until = [0] * len(streams), [-1] * len(streams)
    lanes: list[list[Op]] = [[] for _ in streams]
    asked: dict[Any, list[tuple[Any, ...]]] = {pair: [] for pair in links}
    serving: dict[Any, tuple[int, Any] | None] = dict.fromkeys(links)
    on_the_way: list[tuple[int, Any]] = []

    def ask(what: Any, now: int) -> None:
        op = what if isinstance(what, Op) else what[0]
        if isinstance(what, Op):
            pair = (home[op], schedule.offload_to.get(home[op]))
            pair = pair if op.kind is Kind.OFFLOAD else pair[::-1]
        else:
            pair = (home[what[0]], home[what[1]])
        asked[pair].append((now, *position[op], -1 if isinstance(what, Op) else what[1].stage, what))

    for now in range(10**5):
        changed = True
        while changed:
            changed = False
            for pair, served in serving.items():
                if served is not None and served[0] == now:
                    on_the_way.append((now + links[pair][0], served[1]))
                    serving[pair] = None
                    changed = True
            for entry in [entry for entry in on_the_way if entry[0] == now]:
                on_the_way.remove(entry)
                done[entry[1]] = now
                changed = True
                if isinstance(entry[1], Op):
                    lane = lanes[home[entry[1]]]
                    lane.pop(0)
                    if lane:
                        ask(lane[0], now)
            for d, stream in enumerate(streams):
                while at[d] < len(stream):
                    op = stream[at[d]]
                    if op.kind in (Kind.OFFLOAD, Kind.RELOAD):
                        lanes[d].append(op)
                        if len(lanes[d]) == 1:
                            ask(op, now)
                    elif until[d] < 0:
                        if not inputs[op] <= done.keys():
                            break
                        until[d] = now + duration[op]
                        break
                    elif until[d] > now:
                        break
                    else:
                        done[op], until[d] = now, -1
                        for message in outputs[op]:
                            ask(message, now)
                    at[d] += 1
                    changed = True
        if all(at[d] == len(stream) for d, stream in enumerate(streams)):
            return done
        for pair, queue in asked.items():
            if serving[pair] is None and queue:
                queue.sort(key=lambda entry: entry[:-1])
                what = queue.pop(0)[-1]
                op = what if isinstance(what, Op) else what[0] if what[0].kind is Kind.F else what[1]
                serving[pair] = (now + links[pair][1] * size[op.stage, op.microbatch], what)
    raise AssertionError("the clock ran out")


@pytest.mark.parametrize("seed", range(60))
def test_equals_a_ticking_clock(seed: int, random_schedule: Callable[..., Schedule]) -> None:
    rng = random.Random(seed)
    base = random_schedule(seed, rng.randint(1, 4), rng.randint(1, 6), dag=rng.random() < 0.3, split=rng.random() < 0.5)
    schedule = with_moves(base, rng)
    ops = [op for stream in schedule.streams for op in stream]
    table = np.array([[rng.randint(1, 3) for _ in range(schedule.num_microbatches)] for _ in range(schedule.num_stages)])
    sizes = {(s, i): int(table[s, i]) for s in range(len(table)) for i in range(table.shape[1])}
    times = {kind: rng.randint(1, 3) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}
    ends = [*range(schedule.num_devices), None]
    per_device: Any = {(a, b): (rng.randint(0, 2), rng.randint(1, 3)) for a in ends for b in ends if a != b}
    host = (1, 2)
    per_device.update({pair: host for pair in per_device if None in pair})
    expected = tick(schedule, {op: times.get(op.kind, 0) for op in ops}, sizes, per_device)

    links = {pair: Link(latency, 1 / slowness) for pair, (latency, slowness) in per_device.items() if None not in pair}
    cluster = Cluster(unit="slot", links=links, host=Link(host[0], 1 / host[1]))
    costs = UniformCosts(
        forward=times[Kind.F], backward=times[Kind.B], input_grad=times[Kind.I], weight_grad=times[Kind.W], message=table, activation=table
    )
    run = simulate(schedule, costs, cluster=cluster)
    for slot in range(schedule.num_slots):
        assert run.end[0, slot] == pytest.approx(expected[schedule.slot(slot)], abs=1e-9)
    for index, row in enumerate(run.moves.row.tolist()):
        assert run.offload_end[0, index] == pytest.approx(expected[schedule.op(row)], abs=1e-9)
