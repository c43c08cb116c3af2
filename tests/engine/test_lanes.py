"""Random schedules and links, every way to communicate: what must hold, and that both kinds of lanes give the same times."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipesim import Cluster, Communication, DeadlockError, Link, Schedule, ScheduleError, Timeline, UniformCosts, lower, simulate

TIMES = ("start", "end", "sent", "departed", "arrived")


def case(seed: int, random_schedule: Any) -> tuple[Schedule, dict[str, Any]]:
    """A schedule, and what to run it with."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    options = ("dag", "replicas", "split", "recompute", "pairs", "forward_only", "updates")
    schedule = random_schedule(seed, rng.randint(1, 4), rng.randint(1, 5), **{option: rng.random() < 0.4 for option in options})
    table, devices = (schedule.num_stages, schedule.num_microbatches), range(schedule.num_devices)

    def some() -> Any:
        return numbers.uniform(0, 2, table) * (numbers.random(table) > 0.2)

    costs = UniformCosts(
        forward=some(), backward=some(), input_grad=some(), weight_grad=some(), message=numbers.uniform(0, 3, table), optimizer=rng.choice([0, 0.5]),
        reduction=rng.choice([0, 1.5]), buckets=rng.choice([1, 3]), reduce_every_microbatch=rng.random() < 0.3,
    )  # fmt: skip
    links = {(a, b): Link(rng.choice([0.0, rng.uniform(0, 1)]), rng.choice([None, rng.uniform(0.5, 4)])) for a in devices for b in devices if a != b}
    steps = rng.choice([1, 2]) if schedule.weights == "flush" else 1
    return schedule, {"costs": costs, "cluster": Cluster(unit="slot", links=links), "steps": steps, "barrier": rng.random() < 0.5}


def by_events(communication: Communication) -> Communication:
    """The same, with lanes that go by events: for an interference that never happens."""
    return replace(communication, interference={"offload": 2})


@pytest.mark.parametrize("seed", range(30))
def test_free_eager_listings_are_the_implicit_run(seed: int, random_schedule: Any) -> None:
    schedule, how = case(seed, random_schedule)
    plain = simulate(schedule, **how, engine="simpy")
    collectives = plain.traffic_end[:, plain.traffic.collective]
    for receives in ("early", "late"):
        listed = lower(schedule, receives)  # type: ignore[arg-type]
        for communication in (Communication(stream="free"), by_events(Communication(stream="free"))):
            run = simulate(listed, **how, communication=communication)
            for column in TIMES:
                assert np.array_equal(getattr(run, column), getattr(plain, column)), column
            assert np.array_equal(run.traffic_end[:, run.traffic.collective].ravel(), collectives.ravel())


@pytest.mark.parametrize("seed", range(60))
def test_every_way(seed: int, random_schedule: Any) -> None:
    schedule, how = case(seed, random_schedule)
    rng = random.Random(seed)
    for receives in ("early", "late"):
        communication = Communication(
            sends=rng.choice(["eager", "rendezvous"]), blocking=rng.random() < 0.5, stream=rng.choice(["free", "device", "device", "peer", "peer"]),
            batched=rng.random() < 0.3, shape_messages=rng.random() < 0.3,
        )  # fmt: skip
        listed = lower(schedule, receives)  # type: ignore[arg-type]
        found = [outcome(listed, how, one) for one in (communication, by_events(communication))]
        if isinstance(found[0], str) or isinstance(found[1], str):
            assert found[0] == found[1]
            continue
        run, other = found
        for column in TIMES:
            assert np.array_equal(getattr(run, column), getattr(other, column)), column
        assert np.array_equal(run.traffic_end, other.traffic_end)
        assert np.array_equal(run.traffic_start, other.traffic_start)
        assert (run.traffic_end >= run.traffic_start).all()
        assert (run.departed >= run.sent).all()
        assert (run.start[:, run.messages.target_slot] >= run.arrived).all()
        assert np.allclose(run.makespan - np.array(run.busy), [sum(causes.values()) for causes in run.idle_causes()])


def outcome(schedule: Schedule, how: dict[str, Any], communication: Communication) -> Timeline | str:
    """The run, or why there is none."""
    try:
        return simulate(schedule, **how, communication=communication)
    except (DeadlockError, ScheduleError) as error:
        assert "the cycle: " in str(error) or "messages cross" in str(error)  # noqa: PT017
        return str(error)
