"""What do shared links cost the SimPy engine, against links of their own?

Run ``python benchmarks/contention.py``. 1F1B, p=32, m=512, one GPU a node, so that a device's messages to both neighbours share
its network port, and with half duplex those that it gets from them, too. All in turn, so that all see the same machine; CPU
time; a ratio is the median of those of each turn. That nothing is faster than alone is asserted, and that messages do wait.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from time import process_time

import numpy as np

from pipesim import Cluster, Link, UniformCosts, generate, simulate
from pipesim.hardware import Node

REPEATS = 11
P, M = 32, 512
TIMES = (0.25, 0.6)  # of a message alone; F takes about 1, B 2. Half-duplex ports carry four messages in 3: a third, and 80 %


def main() -> None:
    """Prints the table."""
    schedule = generate("1f1b", P, M)
    rng = np.random.default_rng(1)
    forward, backward = (mean * rng.lognormal(sigma=0.1, size=(P, M)) for mean in (1.0, 2.0))
    costs = UniformCosts(forward=forward, backward=backward, message=1)
    print(f"1F1B p={P} m={M}, {schedule.num_slots} ops, {2 * (P - 1) * M} messages; medians of {REPEATS}, ratios to links of their own")
    for time in TIMES:
        own = Cluster(Link(0.05), Link(0.05, 1 / time), 1, unit="slot")
        half = replace(own, node=Node(half_duplex=("nic",)))
        clusters = {
            "links of their own": own,
            "fifo, full duplex": replace(own, sharing="fifo"),
            "fifo, half duplex": replace(half, sharing="fifo"),
            "fair, full duplex": replace(own, sharing="fair"),
            "fair, half duplex": replace(half, sharing="fair"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in clusters}
        held = dict.fromkeys(clusters, 0.0)
        for _ in range(REPEATS):
            for name, cluster in clusters.items():
                start = process_time()
                timeline = simulate(schedule, costs, cluster=cluster, engine="simpy")
                seconds[name].append(process_time() - start)
                assert len(timeline.messages) == 2 * (P - 1) * M, name
                waited = (timeline.arrived - timeline.sent) - (time + 0.05)
                assert (waited > -1e-9).all(), name
                held[name] = float((waited > 1e-9).mean())
        assert held["fifo, half duplex"] > 0.1, "hardly anybody met anybody"
        for name, found in seconds.items():
            ratio = statistics.median(one / base for one, base in zip(found, seconds["links of their own"], strict=True))
            median = statistics.median(found)
            each = f"{median:7.3f} s{median / schedule.num_slots * 1e6:8.2f} us/op{ratio:7.2f} times"
            print(f"  messages of {time:<6g}{name:<20}{each}   {held[name]:4.0%} of messages held up")


if __name__ == "__main__":
    main()
