"""How much faster than PyTorch's own tools is a schedule generated, checked and simulated?

Run ``python benchmarks/against_pytorch.py`` (half a minute; it needs torch >= 2.6 and numba). The same schedule in one process:
PyTorch generates it, adds its SEND and RECV ops and dry-runs it (``_simulate_comms_compute``, without durations); pipesim
generates, checks and simulates it, with durations and hops. That both list the same ops in the same order is asserted.
"""

from __future__ import annotations

import statistics
from time import process_time

from pipesim import Schedule, UniformCosts, generate, simulate

P, M, V = 32, 512, 4
REPEATS = 9
COSTS = UniformCosts(forward=1, backward=2, latency=0.25)


def main() -> None:
    """One table."""
    seconds, order = pytorch(P, M, V)
    simulate(generate("1f1b", 2, 2), COSTS, engine="compiled")  # loaded before anything is timed
    ours = [pipesim(P, M, V) for _ in range(REPEATS)]
    schedule = ours[-1][1]
    assert [[str(op) for op in stream] for stream in schedule.streams] == order
    print(f"interleaved 1F1B p={P} m={M} v={V}, {len(schedule)} ops; CPU seconds, PyTorch once, pipesim the median of {REPEATS}")
    for stage, time in seconds.items():
        print(f"  PyTorch, {stage:<33}{time:9.3f} s")
    print(f"  {'PyTorch in all':<42}{sum(seconds.values()):9.3f} s")
    median = statistics.median(time for time, _ in ours)
    print(f"  {'pipesim: generate, check, simulate':<42}{median:9.3f} s")
    print(f"  {'times as fast (goal: at least 200)':<42}{sum(seconds.values()) / median:9.0f}")


def pytorch(p: int, m: int, v: int) -> tuple[dict[str, float], list[list[str]]]:
    """Seconds of its three steps, and the ops that it lists."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    from torch.distributed.pipelining.schedules import _add_send_recv, _simulate_comms_compute

    start = process_time()
    ops = get_schedule_ops("Interleaved1F1B", p, m, v)
    compute = {rank: [op for op in stream if op is not None] for rank, stream in enumerate(ops)}
    generated = process_time()
    order = [[str(op) for op in stream] for stream in compute.values()]  # before the lowering takes the lists apart
    lower = process_time()
    lowered = _add_send_recv(compute, stage_to_rank=lambda stage: stage % p, num_stages=p * v)
    dry_run = process_time()
    steps = _simulate_comms_compute(lowered, stage_to_rank=lambda stage: stage % p, num_stages=p * v)
    end = process_time()
    expected = 2 * p * v * m + 2 * 2 * (p * v - 1) * m  # ops, and both ends of every message
    assert sum(map(len, order)) == 2 * p * v * m
    assert sum(map(len, lowered.values())) == expected
    assert sum(op is not None for stream in steps.values() for op in stream) == expected
    return {"generate": generated - start, "lower": dry_run - lower, "simulate": end - dry_run}, order


def pipesim(p: int, m: int, v: int) -> tuple[float, Schedule]:
    """Seconds of the same, from nothing to a timeline."""
    start = process_time()
    schedule = generate("interleaved-1f1b", p, m, chunks=v)
    run = simulate(schedule, COSTS, engine="compiled")
    seconds = process_time() - start
    assert schedule.num_slots == 2 * p * v * m
    assert len(run.messages) == 2 * (p * v - 1) * m
    return seconds, schedule


if __name__ == "__main__":
    main()
