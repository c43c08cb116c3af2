"""How fast is each engine by size, how far is the compiled one from a bare longest-path pass, and what do shared links and batches cost?

Run ``python benchmarks/engines.py`` (about two minutes; it needs numba). Times are CPU seconds, printed; counts, closed forms
and the equality of both engines are asserted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import process_time
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from simpy_engine import bare_simpy

from pipesim import Cluster, Kind, Op, Schedule, Timeline, UniformCosts, generate, jit, simulate, simulate_many
from pipesim.engine import compiled, kernels
from pipesim.engine.program import Program

HOP = UniformCosts(forward=1, backward=2, latency=0.25)
QUEUES = UniformCosts(forward=1, backward=2, message=1, bandwidth=10, latency=0.05)
COLUMNS = ("start", "end", "sent", "departed", "arrived", "offload_start", "offload_end")
REPEATS = 9


def main() -> None:
    """Answers the questions."""
    simulate(generate("1f1b", 2, 2), HOP, engine="compiled")  # compiled, or loaded, before anything is timed
    by_size((8, 64), (32, 512), (64, 2048), (128, 4096))
    against_a_longest_path_pass(128, 4096)
    shared_links()
    one_small_run(8, 32)
    many_runs(8, 32, 20_000)


def by_size(*sizes: tuple[int, int]) -> None:
    """Both engines, on links with a bandwidth, and a bare SimPy process that yields two timeouts per op."""
    print(f"simulate(), 1F1B, links with latency and bandwidth; medians of {REPEATS}, of SimPy 3")
    print(f"  {'p':>4}{'m':>6}{'ops':>10}{'bare SimPy':>16}{'SimPy':>16}{'compiled':>16}   compiled is faster")
    for p, m in sizes:
        schedule = generate("1f1b", p, m)
        ops = schedule.num_slots
        assert simulate(schedule, UniformCosts(forward=1, backward=2), engine="compiled").makespan == (m + p - 1) * 3
        equal(*(simulate(schedule, QUEUES, engine=engine) for engine in ("simpy", "compiled")))
        floor = timed(lambda ops=ops: bare_simpy(ops), 3)  # type: ignore[misc]
        reference = timed(lambda s=schedule: simulate(s, QUEUES, engine="simpy"), 3)  # type: ignore[misc]
        quick = timed(lambda s=schedule: simulate(s, QUEUES, engine="compiled"), REPEATS)  # type: ignore[misc]
        cells = "".join(f"{seconds / ops * 1e9:10.0f} ns/op" for seconds in (floor, reference, quick))
        print(f"  {p:4}{m:6}{ops:10}{cells}   {reference / quick:.0f} times")


def against_a_longest_path_pass(p: int, m: int) -> None:
    """Loop against loop: what no engine can beat is told the order in which ops end, and only adds and takes maxima."""
    schedule = generate("1f1b", p, m)
    ops = schedule.num_slots
    print(f"loops alone, 1F1B p={p} m={m}, {ops} ops; medians of {REPEATS} in turn")
    for what, costs in (("latency", HOP), ("latency and bandwidth", QUEUES)):
        program = Program(
            schedule, costs.durations(schedule), costs.message_bytes(schedule), Cluster.uniform(costs.latency or 0, costs.bandwidth), 1, True
        )
        columns = compiled.columns(program)
        run = simulate(schedule, costs, engine="compiled")
        before = np.arange(-1, ops - 1)
        before[schedule.device_slots[:-1]] = -1
        source = np.full(ops, -1)
        source[run.messages.target_slot] = run.messages.source_slot
        order = np.lexsort((run.start[0], run.end[0]))
        start, end, slots, devices = np.empty(ops), np.empty(ops), np.empty(ops, np.int32), np.empty(p, np.int32)
        departed = np.empty((1, len(run.messages)) if columns.queues else (0, 0))
        bare, loop = [], []
        for repeat in range(REPEATS + 1):
            zeros, ends = np.zeros((1, ops)), np.ones((1, ops))
            begin = process_time()
            longest_path(order, before, source, 0.25, program.durations, start, end)
            middle = process_time()
            jit.call(kernels.chain, columns, program.durations, zeros, ends, departed, slots, devices)
            if repeat:  # the first compiles
                bare.append(middle - begin)
                loop.append(process_time() - middle)
        assert np.array_equal(ends, run.end)
        if costs is HOP:
            assert np.array_equal(end, run.end[0])
        ratio = statistics.median(loop) / statistics.median(bare)
        print(f"  links with {what:<24}{statistics.median(bare) / ops * 1e9:6.1f} ns/op bare")
        print(f"  {'':<35}{statistics.median(loop) / ops * 1e9:6.1f} ns/op compiled, {ratio:.1f} times (goal: at most 3)")


@numba.njit  # type: ignore[untyped-decorator]
def longest_path(
    order: NDArray[np.int64], before: NDArray[np.int64], source: NDArray[np.int64], hop: float, durations: Any, start: Any, end: Any
) -> None:
    """Start = max(end of the op before on the device, end of the producer + hop), op by op in an order that is given."""
    for op in order:
        time = 0.0
        if before[op] >= 0:
            time = end[before[op]]
        if source[op] >= 0:
            time = max(time, end[source[op]] + hop)
        start[op] = time
        end[op] = time + durations[op]


def shared_links() -> None:
    """Links for which several devices ask: BPipe, and 1F1B of which every activation visits the next device and comes back."""
    print("simulate(), links that several devices share; medians of 5, of SimPy 3")
    costs = UniformCosts(forward=1, backward=2, message=1, activation=1, bandwidth=10, latency=0.05)
    for schedule in (generate("bpipe", 32, 512), visiting(32, 512)):
        equal(*(simulate(schedule, costs, engine=engine) for engine in ("simpy", "compiled")))
        reference = timed(lambda s=schedule: simulate(s, costs, engine="simpy"), 3)  # type: ignore[misc]
        quick = timed(lambda s=schedule: simulate(s, costs, engine="compiled"), 5)  # type: ignore[misc]
        ops, moves = schedule.num_slots, len(schedule) - schedule.num_slots
        print(f"  {schedule.name}, p=32 m=512, {ops} ops, {moves} moves")
        print(
            f"    {reference / ops * 1e9:8.0f} ns/op SimPy, {quick / ops * 1e9:6.0f} ns/op compiled, {reference / quick:.0f} times (goal: at least 20)"
        )


def visiting(p: int, m: int) -> Schedule:
    """1F1B; every activation is offloaded to the next device right after its F and reloaded right before its B."""
    streams: list[list[Op]] = []
    for stream in generate("1f1b", p, m).streams:
        streams.append([])
        for op in stream:
            assert isinstance(op, Op)
            there = [Op(op.stage, Kind.OFFLOAD, op.microbatch)], [Op(op.stage, Kind.RELOAD, op.microbatch)]
            streams[-1] += [op, *there[0]] if op.kind is Kind.F else [*there[1], op]
    schedule = Schedule.from_streams(streams, name="1f1b, activations visit the next device", offload_to={d: (d + 1) % p for d in range(p)})
    assert len(schedule) == 4 * p * m
    return schedule.check()


def one_small_run(p: int, m: int) -> None:
    """What a slider in a notebook waits for."""
    schedule = generate("1f1b", p, m)
    seconds = timed(lambda: simulate(schedule, HOP, engine="compiled"), 201)
    assert simulate(schedule, UniformCosts(forward=1, backward=2)).makespan == (m + p - 1) * 3
    print(f"simulate(), 1F1B p={p} m={m}, warm; median of 201\n  {seconds * 1e3:.2f} ms (goal: below 1)")


def many_runs(p: int, m: int, n: int) -> None:
    """One schedule under n vectors of durations, with every figure."""
    schedule = generate("1f1b", p, m)
    table = HOP.durations(schedule) * np.random.default_rng(0).uniform(0.9, 1.1, (n, schedule.num_slots))
    for costs, what in ((HOP, "latency"), (QUEUES, "latency and bandwidth")):
        found = simulate_many(schedule, costs, durations=table, engine="compiled")
        seconds = timed(lambda costs=costs: simulate_many(schedule, costs, durations=table, engine="compiled"), 5)  # type: ignore[misc]
        factors = simulate_many(schedule, durations=UniformCosts(forward=1, backward=2).durations(schedule) * np.array([[1.0], [2.0]]))
        assert factors.makespan.tolist() == [(m + p - 1) * 3, (m + p - 1) * 6]
        assert len(found.makespan) == n
        print(f"simulate_many(), 1F1B p={p} m={m}, links with {what}; median of 5\n  {n / seconds:,.0f} runs/s (goal: at least 50,000)")


def equal(first: Timeline, second: Timeline) -> None:
    """Both engines give the same, bit for bit."""
    for column in COLUMNS:
        assert np.array_equal(getattr(first, column), getattr(second, column)), column


def timed(function: Callable[[], object], repeats: int) -> float:
    """Median CPU seconds of a call."""
    times = []
    for _ in range(repeats):
        start = process_time()
        function()
        times.append(process_time() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
