"""What does the replay's executor add to an op on a CPU, and what does a split backward cost beyond its arithmetic?

Run ``python benchmarks/replay_overhead.py`` (about a minute; it needs torch). Two ranks on gloo with emulated ops, so that neither waits for
the other: device 0 takes 2 ms for a forward and 3 ms for a backward, device 1 the other way round, and GPipe has long phases of
each. The gap between the end of an op and the start of the next one, whose message came long before, is what the executor takes: its own
loop, the post of a receive, the send, the wait. The median over all such gaps is printed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pipesim import Kind, UniformCosts, generate
from pipesim.replay import Settings, Task, replay_all
from pipesim.replay.models import Block, Mlp
from pipesim.replay.records import read_facts
from pipesim.replay.split import input_gradient

MICROBATCHES = 16


def main() -> None:
    """Answers the questions."""
    alone()
    with_messages()
    processor_time()
    halves("MLP 8 to 32 to 8", Mlp(8), torch.randn(2, 8))
    halves("transformer block, hidden 16", Block(16, 2), torch.randn(2, 4, 16))


def alone() -> None:
    """One device, no messages, ops that do nothing."""
    costs = UniformCosts(forward=0.0, backward=0.0, unit="s")
    (run,) = replay_all([Task(generate("gpipe", 1, 256), Settings(mode="emulate", iterations=5), costs)])
    gaps = (run.start[:, 1:] - run.end[:, :-1]).ravel()
    assert gaps.size == 5 * 512  # 256 forwards, 256 backwards, one update: 512 gaps a step
    print(f"one device, no messages: median {np.median(gaps) * 1e6:.1f} us between ops, 95 % below {np.quantile(gaps, 0.95) * 1e6:.1f} us")


def with_messages() -> None:
    """Two ranks, a message per op."""
    costs = UniformCosts(forward=[0.002, 0.003], backward=[0.003, 0.002], message=4096, unit="s")
    for batched in (False, True):
        settings = Settings(mode="emulate", iterations=10, batched=batched)
        (run,) = replay_all([Task(generate("gpipe", 2, MICROBATCHES), settings, costs)])
        schedule = run.schedule
        kind, device = schedule.kind[schedule.slot_row], schedule.slot_device
        following = np.flatnonzero((kind[1:] == kind[:-1]) & (device[1:] == device[:-1])) + 1
        for name, of in (("sends", (0, Kind.F)), ("receives", (1, Kind.F)), ("receives", (0, Kind.B)), ("sends", (1, Kind.B))):
            own = following[(device[following] == of[0]) & (kind[following] == int(of[1]))]
            assert len(own) == MICROBATCHES - 1
            gaps = (run.start[:, own] - run.end[:, own - 1]).ravel()
            print(
                f"device {of[0]}, {of[1].name}, {name} {'batched' if batched else 'single'}: median {np.median(gaps) * 1e6:.0f} us, "
                f"95 % below {np.quantile(gaps, 0.95) * 1e6:.0f} us"
            )


def processor_time() -> None:
    """The same in processor time of the rank's own thread, ops that take none, which counts nothing that others do."""
    costs = UniformCosts(forward=0.0, backward=0.0, message=4096, unit="s")
    task = Task(generate("1f1b", 2, 64), Settings(mode="emulate", iterations=10), costs)
    with tempfile.TemporaryDirectory() as folder:
        replay_all([task], Path(folder))
        for rank in range(2):
            facts = read_facts(Path(folder) / "0" / f"rank{rank}.facts")
            assert facts is not None
            each = facts["thread_seconds"] / (10 * 129)  # 64 forwards, 64 backwards, one update
            print(f"rank {rank}, 1F1B, a send and a receive per two ops: {each * 1e6:.0f} us of processor time per op")


def halves(what: str, module: torch.nn.Module, value: torch.Tensor) -> None:
    """I and W against B, where the arithmetic is next to nothing."""
    torch.set_num_threads(1)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        leaf = value.clone().requires_grad_()
        return leaf, module(leaf)

    def whole() -> float:
        _, output = forward()
        return timed(lambda: torch.autograd.backward([output], [torch.ones_like(output)]))

    def first_and_second() -> tuple[float, float]:
        leaf, output = forward()
        gradient = torch.ones_like(output)
        begin = time.perf_counter()
        _, deferred = input_gradient(output, gradient, leaf)
        middle = time.perf_counter()
        deferred.weight_gradients()
        return middle - begin, time.perf_counter() - middle

    for _ in range(20):
        whole()
        first_and_second()
    full = statistics.median(whole() for _ in range(200))
    parts = [first_and_second() for _ in range(200)]
    input_half, weight_half = (statistics.median(one) for one in zip(*parts, strict=True))
    print(f"{what}: B {full * 1e6:.0f} us, I {input_half * 1e6:.0f} us, W {weight_half * 1e6:.0f} us")


def timed(run: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
