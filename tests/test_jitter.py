"""Jitter and stragglers against closed forms, hand calculations, and what a critical path means."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipesim as ps
from pipesim import Empirical, LogNormal, Normal, ScheduleError, UniformCosts, generate, monte_carlo
from pipesim.op import Kind

COSTS = UniformCosts(forward=1, backward=2)


def forwards(devices: int, microbatches: int) -> ps.Schedule:
    return generate("gpipe", devices, microbatches, forward_only=True)


# -- distributions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distribution", "mean", "deviation"),
    [
        (Normal(0.1), 1.0, 0.1),
        (LogNormal(0.1), 1.0, 0.1),
        (LogNormal(0.5), 1.0, 0.5),
        # a normal of mean 1 and deviation 1, cut off at 0: with a = -1, r = phi(a) / (1 - Phi(a)) = 0.2419707 / 0.8413447 = 0.2876,
        # mean 1 + r, variance 1 + a r - r^2
        (Normal(1.0), 1.2876, math.sqrt(1 - 0.2876 - 0.2876**2)),
        # 1, 1, 2 over their mean 4/3: deviation sqrt(2/9) / (4/3)
        (Empirical([10, 10, 20]), 1.0, math.sqrt(2 / 9) / (4 / 3)),
    ],
)
def test_moments(distribution: Any, mean: float, deviation: float) -> None:
    drawn = distribution.draw(np.random.default_rng(1), (400, 500))
    assert drawn.shape == (400, 500)
    assert drawn.min() >= 0
    # 200,000 draws: five standard errors of the mean; the deviation's is about as large for these
    assert drawn.mean() == pytest.approx(mean, abs=5 * deviation / math.sqrt(200_000))
    assert drawn.std() == pytest.approx(deviation, rel=0.03)


def test_the_median_of_log_normal_factors() -> None:
    # exp(mu) with mu = -ln(1 + d^2) / 2, so 1 / sqrt(1.25) for d = 0.5
    assert np.median(LogNormal(0.5).draw(np.random.default_rng(2), (100_000,))) == pytest.approx(1 / math.sqrt(1.25), rel=0.01)


def test_empirical_factors_are_the_samples() -> None:
    assert set(Empirical([3, 5]).draw(np.random.default_rng(0), (50,)).tolist()) == {0.75, 1.25}


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "0.1", None, True, [0.1]])
def test_wrong_deviations(value: Any) -> None:
    for make in (Normal, LogNormal):
        with pytest.raises(ScheduleError, match="deviation"):
            make(value)


@pytest.mark.parametrize("samples", [[], [[1, 2]], 3.0, [1, -1], [0, 0], [1, math.nan], ["a"], "12"])
def test_wrong_samples(samples: Any) -> None:
    with pytest.raises(ScheduleError, match="samples"):
        Empirical(samples)


# -- makespans ---------------------------------------------------------------------------------------------------------


def test_one_device_adds_its_ops_up() -> None:
    # m = 25 forwards of mean 2 and deviation 0.2 * 2: mean 50, deviation 0.4 * 5
    found = monte_carlo(forwards(1, 25), UniformCosts(forward=2), jitter=LogNormal(0.2), n=4000)
    assert found.undisturbed == 50
    assert found.makespan.mean() == pytest.approx(50, abs=5 * 2 / math.sqrt(4000))
    assert found.makespan.std() == pytest.approx(2, rel=0.06)
    assert found.criticality == [1.0]
    assert found.critical_share == pytest.approx([1.0])


def test_two_devices_by_enumeration() -> None:
    """F takes 0.5 or 1.5 on device 0, 1 or 3 on device 1, one after the other: four makespans of a quarter each.

    Device 0 holds more of the path only for 1.5 against 1.
    """
    found = monte_carlo(forwards(2, 1), UniformCosts(forward=[1, 2]), jitter=Empirical([1, 3]), n=6000, seed=3)
    values, counts = np.unique(found.makespan, return_counts=True)
    assert values.tolist() == [1.5, 2.5, 3.5, 4.5]
    noise = 5 * math.sqrt(0.25 * 0.75 / 6000)
    assert counts / 6000 == pytest.approx(0.25, abs=noise)
    assert found.criticality == pytest.approx([0.25, 0.75], abs=noise)
    assert found.quantiles([0.1, 0.4, 0.6, 0.9]) == {0.1: 1.5, 0.4: 2.5, 0.6: 3.5, 0.9: 4.5}


def test_devices_that_tie_share_the_draw() -> None:
    # F takes 1 on both: each is half of the path
    assert monte_carlo(forwards(2, 1)).criticality == [0.5, 0.5]


def test_the_larger_of_two_independent_chains() -> None:
    """Two replicas that never meet: the makespan is the larger of two exponential-like sums, here of two factors each way.

    Devices 0 and 1 run a stage of their own each: (0F0) and, of the second replica, (0F1). With factors 0.5 and 1.5 the larger
    is 1.5 in 3 of 4 draws. Where they tie, the chain that is followed is device 0's, so device 0 is critical in 3 of 4.
    """
    schedule = ps.Schedule.from_text("0F0\n0F1").check()
    found = monte_carlo(schedule, UniformCosts(forward=1), jitter=Empirical([1, 3]), n=6000)
    noise = 5 * math.sqrt(0.25 * 0.75 / 6000)
    assert (found.makespan == 1.5).mean() == pytest.approx(0.75, abs=noise)
    assert found.criticality == pytest.approx([0.75, 0.25], abs=noise)


def test_kinds_have_distributions_of_their_own() -> None:
    schedule = generate("gpipe", 1, 3)
    found = monte_carlo(schedule, COSTS, jitter={"B": Empirical([1, 3])}, n=50)
    # 3 forwards of 1, 3 backwards of 1 or 3
    assert set(found.makespan.tolist()) <= {6.0, 8.0, 10.0, 12.0}
    same = monte_carlo(schedule, COSTS, jitter={Kind.B: Empirical([1, 3])}, n=50)
    assert (same.makespan == found.makespan).all()
    assert monte_carlo(schedule, COSTS, jitter={"W": LogNormal(0.5)}, n=3).makespan.tolist() == [9.0, 9.0, 9.0]


# -- stragglers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "expected"), [("gpipe", 40.2), ("1f1b", 39.3)])
def test_S25_one_slow_device(name: str, expected: float) -> None:
    found = monte_carlo(generate(name, 4, 8), COSTS, slow_devices={2: 1.3})
    assert len(found) == 1  # without jitter one draw says it all
    assert found.undisturbed == 33
    assert found.makespan[0] == pytest.approx(expected)
    assert found.criticality == [0, 0, 1, 0]


def test_the_path_of_a_slow_device_by_hand() -> None:
    """1F1B on 2 devices, F = B = 1, device 1 three times as slow, hops of 0.5.

    device 0 | F0 F1 .............................. B0 .... B1      the path: 0F0 1, hop 0.5, 1F0 1B0 1F1 1B1 12, hop 0.5, 0B1 1
    device 1 | .    F0 B0 F1 B1                                     = 15
    """
    found = monte_carlo(generate("1f1b", 2, 2), UniformCosts(forward=1, backward=1, latency=0.5), slow_devices={1: 3})
    assert found.makespan.tolist() == [15.0]
    assert found.critical_time.tolist() == [[2.0, 12.0]]
    assert found.critical_link_share == pytest.approx(1 / 15)


def test_a_slow_link_by_hand() -> None:
    # one microbatch forwards through 3 devices: 3 ops of 1, hops of 1; the second hop takes 4
    found = monte_carlo(forwards(3, 1), UniformCosts(forward=1, latency=1), slow_links={(1, 2): 4})
    assert (found.undisturbed, found.makespan.tolist()) == (5, [8.0])
    assert found.critical_link_share == 5 / 8


def test_waiting_behind_another_message_is_the_links_time() -> None:
    """Two microbatches forwards, F = 1, 2 units at bandwidth 1 and latency 0.5; F of device 1 takes 1.

    sent 1, 2; on the link 1..3, 3..5; there at 3.5, 5.5: device 1 ends at 6.5. The path: 0F0 1, both transfers 4, latency 0.5, 1F1 1.
    With the link twice as slow: 1 + 8 + 1 + 1.
    """
    costs = UniformCosts(forward=1, message=2, latency=0.5, bandwidth=1)
    found = monte_carlo(forwards(2, 2), costs, slow_links={(0, 1): 2})
    assert (found.undisturbed, found.makespan.tolist()) == (6.5, [11.0])
    assert found.critical_time.tolist() == [[1.0, 1.0]]


def test_the_path_goes_through_a_barrier() -> None:
    """GPipe, 2 devices, 1 microbatch, F = B = 1, device 1 slow by 2, U = 1 (2 on device 1) after a barrier.

    0F0 0..1, 1F0 1..3, 1B0 3..5, 0B0 5..6, then both update: device 1 until 8. The path: 1, 2 + 2, 1, and U 2.
    """
    found = monte_carlo(generate("gpipe", 2, 1), UniformCosts(forward=1, backward=1, optimizer=1), slow_devices={1: 2})
    assert found.makespan.tolist() == [8.0]
    assert found.critical_time.tolist() == [[2.0, 6.0]]


def test_a_cluster_keeps_its_speeds() -> None:
    # device 1 at half its speed: F takes 2 there, and 2.6 when it is slow by 1.3
    cluster = ps.Cluster(devices={1: ps.Device(speed=0.5)}, unit="slot")
    found = monte_carlo(forwards(2, 3), UniformCosts(forward=1, latency=0.25), cluster=cluster, slow_devices={1: 1.3})
    assert found.undisturbed == 1 + 0.25 + 3 * 2
    assert found.makespan[0] == pytest.approx(1 + 0.25 + 3 * 2.6)


@pytest.mark.parametrize(
    ("options", "about"),
    [
        ({"slow_devices": {4: 2}}, "no device 4"),
        ({"slow_devices": {-1: 2}}, "at least 0"),
        ({"slow_devices": {0: 0}}, "above 0"),
        ({"slow_devices": {0: math.nan}}, "above 0"),
        ({"slow_devices": {0: "2"}}, "above 0"),
        ({"slow_links": {(0, 2): 2}}, "carries nothing"),
        ({"slow_links": {(0, 1): 2}}, "takes no time"),
        ({"slow_links": {0: 2}}, "from"),
        ({"jitter": 0.1}, "LogNormal"),
        ({"jitter": {"X": Normal(0.1)}}, "'X'"),
        ({"jitter": {"SEND_F": Normal(0.1)}}, "SEND_F"),
        ({"jitter": {"F": 0.1}}, "jitter of F"),
        ({"n": 0}, "n must be at least 1"),
        ({"n": 2.5}, "n must be"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_input(options: dict[str, Any], about: str) -> None:
    with pytest.raises(ScheduleError, match=about):
        monte_carlo(generate("1f1b", 4, 8), COSTS, **options)


def test_a_distribution_of_ones_own_is_checked() -> None:
    class Bad:
        def draw(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
            return -np.ones(shape)

    with pytest.raises(ScheduleError, match="at least 0"):
        monte_carlo(generate("1f1b", 2, 2), COSTS, jitter=Bad(), n=2)


# -- what a seed promises ----------------------------------------------------------------------------------------------


def test_the_same_seed_is_the_same_draws_however_they_are_shared() -> None:
    schedule = generate("1f1b", 4, 8)
    options: dict[str, Any] = {"jitter": Normal(0.2), "slow_devices": {1: 1.1}}
    one = monte_carlo(schedule, COSTS, n=600, seed=5, **options)
    for other in (monte_carlo(schedule, COSTS, n=600, seed=5, jobs=2, **options), monte_carlo(schedule, COSTS, n=700, seed=5, **options)):
        assert (other.makespan[:600] == one.makespan).all()
        assert (other.critical_time[:600] == one.critical_time).all()
    assert len(np.unique(one.makespan)) == 600  # blocks do not repeat one another
    assert (monte_carlo(schedule, COSTS, n=600, seed=6, **options).makespan != one.makespan).all()


def test_both_engines_give_the_same() -> None:
    pytest.importorskip("numba")
    schedule = generate("interleaved-1f1b", 4, 8)
    costs = UniformCosts(forward=1, backward=2, message=1, bandwidth=5, latency=0.1, optimizer=0.5)
    simpy, compiled = (monte_carlo(schedule, costs, jitter=LogNormal(0.3), n=20, engine=engine) for engine in ("simpy", "compiled"))
    assert (simpy.makespan == compiled.makespan).all()
    assert (simpy.critical_time == compiled.critical_time).all()


def test_the_schedule_and_the_costs_survive_being_sent(tmp_path: Any) -> None:
    from pipesim.criticalpath import CriticalPaths
    from pipesim.engine import linked_cluster

    schedule, costs = generate("1f1b", 2, 2), UniformCosts(forward=1, backward=2, latency=0.5)
    paths = CriticalPaths(schedule, costs, linked_cluster(costs, None, schedule))
    again = pickle.loads(pickle.dumps(paths))
    assert again.run(costs.durations(schedule)[None])[0] == paths.run(costs.durations(schedule)[None])[0]


# -- what a critical path is -------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b", "chimera", "dualpipe-v", "zb-h1", "pipedream", "bpipe"]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([None, 4.0]),
    st.sampled_from([0.0, 0.7]),
    st.integers(0, 10**6),
)
def test_slowing_a_device_costs_its_part_of_the_path(name: str, latency: float, bandwidth: float | None, optimizer: float, seed: int) -> None:
    """The derivative of the makespan by a device's slowness is its time on the critical path, if a path is what it should be.

    And with links that take no time the path has no gaps: its times on devices add up to the makespan.
    """
    schedule = generate(name, 4, 8)
    costs = UniformCosts(forward=1, input_grad=1, weight_grad=0.5, latency=latency, bandwidth=bandwidth, message=1, optimizer=optimizer)
    options: dict[str, Any] = {"jitter": LogNormal(0.2), "n": 3, "seed": seed}
    found = monte_carlo(schedule, costs, **options)
    total = found.critical_time.sum(axis=1)
    assert (total <= found.makespan * (1 + 1e-12)).all()
    if not latency and bandwidth is None:
        assert total == pytest.approx(found.makespan, rel=1e-12)
    small = 1e-7
    for device in range(4):
        slower = monte_carlo(schedule, costs, slow_devices={device: 1 + small}, **options)
        assert (slower.makespan - found.makespan) / small == pytest.approx(found.critical_time[:, device], abs=1e-5)


# -- reports -----------------------------------------------------------------------------------------------------------


def test_reports_say_what_the_figures_are() -> None:
    found = monte_carlo(generate("1f1b", 4, 8), COSTS, slow_devices={2: 1.3})
    figures = found.as_dict()
    assert figures["makespan_mean"] == pytest.approx(39.3)
    assert set(figures["makespan_quantiles"]) == {"0.05", "0.5", "0.95", "0.99"}
    text = found.summary()
    assert "39.3 slots   +19.09%" in text  # 39.3 / 33 - 1
    assert "criticality: the probability that" in text
    with pytest.raises(ScheduleError, match=r"1\.5"):
        found.quantiles([1.5])
