"""Runs whose truth is known: simulated, and dressed up as measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

import pipesim as ps
from pipesim.calibration import gpipe_probe, message_probe, split_probe
from pipesim.costs.calibrated import CalibratedCosts, HostTimes, StageTable, first_updates

BYTES = {
    "message": (8e6, 0.0),
    "activation": (3e6, 5e6),
    "activation_freed_by_input_grad": (1e6, 2e6),
    "weights": (7e6, 9e6),
    "gradients": (7e6, 9e6),
    "optimizer_state": (1e6, 2e6),
}
TWO = StageTable(
    {
        "forward": (0.010, 0.012),
        "backward": (0.021, 0.023),
        "input_grad": (0.011, 0.013),
        "weight_grad": (0.0125, 0.0115),
        "optimizer": (0.002, 0.003),
    },
    BYTES,
)
FOUR = StageTable(
    {
        "forward": (0.005, 0.006, 0.0052, 0.0061),
        "backward": (0.011, 0.012, 0.0105, 0.0115),
        "input_grad": (0.006, 0.0065, 0.0055, 0.007),
        "weight_grad": (0.006, 0.0062, 0.0058, 0.0064),
        "optimizer": (0.001, 0.001, 0.0015, 0.0015),
    },
    {"message": (8e6, 8e6, 8e6, 0.0)},
)
HOST = HostTimes(op=50e-6, send=80e-6, receive=30e-6, barrier=400e-6)
LINK = (150e-6, 5e9)  # seconds, bytes per second


@dataclass(frozen=True)
class Truth(CalibratedCosts):
    """The true costs, and noise on every op of the next run."""

    noise: float = 0.0
    seed: int = 0

    def durations(self, schedule):
        exact = super().durations(schedule)
        if not self.noise:
            return exact
        ops = exact - self._host(schedule)
        factor = np.random.default_rng(self.seed).normal(1.0, self.noise, len(ops)).clip(0.05)
        return exact + ops * (factor - 1)


@pytest.fixture(scope="session")
def truth():
    return Truth({2: TWO, 4: FOUR}, HOST)


@pytest.fixture(scope="session")
def links():
    return ps.Cluster(inside=ps.Link(*LINK))


@pytest.fixture(scope="session")
def measured(truth, links):
    """Makes a measured run of a schedule: (schedule, steps, noise, seed) -> Timeline."""

    def make(schedule, steps=5, noise=0.0, seed=0, links=links):
        runs = [ps.simulate(schedule, replace(truth, noise=noise, seed=1000 * seed + step), cluster=links) for step in range(steps)]
        schedule = runs[0].schedule
        host = truth._host(schedule)
        begin, columns = 0.0, []
        for run in runs:
            # a device shows the op alone: not what its host does after it, nor the barrier that it waited for before an update
            waited = np.zeros(schedule.num_slots)
            waited[first_updates(schedule)] = HOST.barrier - HOST.op
            after = host - waited
            end = run.end - after
            sent = end[:, run.messages.source_slot]
            columns.append([run.start + waited + begin, end + begin, sent + begin, run.departed + begin, run.arrived + begin])
            begin += run.makespan + 0.01
        start, end, sent, departed, arrived = (np.concatenate(parts) for parts in zip(*columns, strict=True))
        return replace(runs[0], start=start, end=end, sent=sent, departed=departed, arrived=arrived, source="measured", info={"mode": "run"})

    return make


@pytest.fixture(scope="session")
def messages(links):
    """The run of a message probe on links that are known."""

    def make(devices=2, links=links, steps=3):
        schedule, costs = message_probe(devices)
        run = ps.simulate(schedule, costs, cluster=links, steps=steps)
        return replace(run, source="measured", info={"mode": "emulated"})

    return make


@pytest.fixture(scope="session")
def all_runs(measured, messages):
    """What a calibration of two devices runs, with one and two chunks, without noise."""
    probes = [make(2, 8, chunks) for chunks in (1, 2) for make in (gpipe_probe, split_probe)]
    return [*(measured(probe) for probe in probes), messages()]
