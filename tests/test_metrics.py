"""Figures, each by the definition that its name says. Expected values are worked out by hand or come from papers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipesim import Schedule, Timeline, UniformCosts, generate, simulate
from pipesim.metrics import DEFINITIONS, IDLE_CAUSES

FB = UniformCosts(forward=1, backward=2)

# ZB-H2 for p=3, m=6, F=I=W=1 in the order of the zero-bubble paper: no bubble inside any device's span
ZB_H2 = """
device 0 | 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
device 1 | 1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5
device 2 | 2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5
"""


def causes(run: Timeline, device: int) -> dict[str, float]:
    return {cause: time for cause, time in run.idle_causes()[device].items() if abs(time) > 1e-12}


def test_three_bubbles_side_by_side() -> None:
    """p=4, m=8, F=1, B=2: T=33, busy 24 everywhere; device 0 spans all of it.

    Fraction 9/33, overhead 9/24, span rate 9/33 (the largest span is the makespan here).
    """
    run = simulate(generate("1f1b", 4, 8), FB)
    assert (run.makespan, run.busy) == (33, [24] * 4)
    assert run.bubble_fraction == pytest.approx(9 / 33, abs=1e-12)
    assert run.bubble_overhead == pytest.approx(9 / 24, abs=1e-12)
    assert run.span_bubble_rate == pytest.approx(9 / 33, abs=1e-12)


def test_zb_h2_has_no_span_bubble_and_a_makespan_bubble() -> None:
    """Each device works 18 without a gap and starts s later: makespan 18 + 2, so the fraction is 2/20."""
    run = simulate(Schedule.from_text(ZB_H2), UniformCosts())
    assert run.makespan == 20
    assert run.span_bubble_rate == 0
    assert run.bubble_fraction == pytest.approx(2 / 20, abs=1e-12)
    assert run.bubble_overhead == pytest.approx(2 / 18, abs=1e-12)
    # the release at W keeps more alive than the release at I; the latter is the paper's 2(p - s) - 1
    assert run.peak_activations_i == [5, 3, 1]


def test_ideal_is_the_busiest_device() -> None:
    """F=1, B=2 on stage 0, twice that on stage 1; m=4: T = 1 + 4·6 + 2 = 27, busy 12 and 24."""
    run = simulate(generate("1f1b", 2, 4), UniformCosts(forward=[1, 2], backward=[2, 4]))
    assert (run.makespan, run.busy) == (27, [12, 24])
    assert run.bubble_overhead == pytest.approx(3 / 24, abs=1e-12)
    assert run.bubble_fraction == pytest.approx(1 - 36 / 54, abs=1e-12)
    assert run.span_bubble_rate == pytest.approx(3 / 27, abs=1e-12)


def test_a_device_without_ops_is_idle_all_the_time() -> None:
    run = simulate(Schedule.from_streams([["0F0", "0B0"], []]), FB)
    assert (run.makespan, run.busy) == (3, [3, 0])
    assert run.bubble_fraction == pytest.approx(0.5)
    assert run.span_bubble_rate == 0
    assert causes(run, 1) == {"drain": 3}
    assert run.peak_activations == [1, 0]
    assert run.peak_activation_share == [1, 0]


# -- idle causes ---------------------------------------------------------------------------------------------------------------


def test_causes_of_1f1b() -> None:
    """p=4, m=8, F=1, B=2: device d starts at d and has its last gradient at 33 - 2d; it works 24, and the rest is inside."""
    run = simulate(generate("1f1b", 4, 8), FB)
    assert causes(run, 0) == {"waiting for a peer": 9}
    assert causes(run, 1) == {"warm-up": 1, "waiting for a peer": 6, "drain": 2}
    assert causes(run, 2) == {"warm-up": 2, "waiting for a peer": 3, "drain": 4}
    assert causes(run, 3) == {"warm-up": 3, "drain": 6}
    twice = simulate(generate("1f1b", 4, 8), FB, steps=2)
    assert causes(twice, 3) == {"warm-up": 6, "drain": 12}
    assert causes(twice, 1) == {"warm-up": 2, "waiting for a peer": 12, "drain": 4}


def test_a_gap_is_split_where_the_producer_ends() -> None:
    """p=2, m=1, F=1, B=2, hop 0.5: device 0 waits from 1 to 5 for 1B0, which ends at 1.5 + 3 = 4.5; then the gradient takes 0.5."""
    run = simulate(generate("1f1b", 2, 1), UniformCosts(forward=1, backward=2, latency=0.5))
    assert run.makespan == 1 + 0.5 + 3 + 0.5 + 2
    assert causes(run, 0) == {"waiting for a peer": 3.5, "waiting for the link": 0.5}
    assert causes(run, 1) == {"warm-up": 1.5, "drain": 2.5}


def test_queueing_on_a_link_is_the_link() -> None:
    """F=1 on device 0; 3 bytes at 1 a slot: there at 4, 7, 10. Device 1 runs 4-5, 7-8, 10-11; its gaps of 2 are all the link's.

    The messages were ready at 2 and 3, before the gaps began.
    """
    run = simulate(Schedule.from_text("0F0 0F1 0F2\n1F0 1F1 1F2"), UniformCosts(message=3, bandwidth=1))
    assert causes(run, 1) == {"warm-up": 4, "waiting for the link": 4}
    assert causes(run, 0) == {"drain": 8}


def test_waiting_at_the_barrier_is_a_cause_of_its_own() -> None:
    """1F1B p=4, m=8 with an update of 1: device d has its last gradient at 33 - 2d and waits until 33."""
    run = simulate(generate("1f1b", 4, 8), UniformCosts(forward=1, backward=2, optimizer=1))
    assert causes(run, 3) == {"warm-up": 3, "barrier": 6}
    assert causes(run, 0) == {"waiting for a peer": 9}
    alone = simulate(generate("1f1b", 4, 8), UniformCosts(forward=1, backward=2, optimizer=1), barrier=False)
    assert causes(alone, 3) == {"warm-up": 3, "drain": 6}


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize("optimizer", [0, 0.5, [0, 1, 3, 0]])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "naive"])
def test_causes_add_up(name: str, optimizer: Any, barrier: bool, steps: int) -> None:
    costs = UniformCosts(forward=[1, 1.5, 1, 0.5], backward=2, optimizer=optimizer, message=1, bandwidth=2, latency=0.25)
    run = simulate(generate(name, 4, 6), costs, steps=steps, barrier=barrier)
    for found, busy in zip(run.idle_causes(), run.busy, strict=True):
        assert tuple(found) == IDLE_CAUSES
        assert min(found.values()) >= 0
        assert sum(found.values()) == pytest.approx(run.makespan - busy, rel=1e-12)


def test_causes_of_an_asynchronous_run_add_up() -> None:
    costs = UniformCosts(forward=1, backward=2, optimizer=0.5, message=1, bandwidth=1)
    for options in ({}, {"replicas": (2, 1, 1)}):
        run = simulate(generate("pipedream", 4, 9, **options), costs)
        for found, busy in zip(run.idle_causes(), run.busy, strict=True):
            assert sum(found.values()) == pytest.approx(run.makespan - busy, rel=1e-12)
            assert found["barrier"] == 0


# -- activations -----------------------------------------------------------------------------------------------------------------


def test_peaks_of_activations_follow_the_stream_and_not_the_clock() -> None:
    for p in range(1, 6):
        for m in range(1, 8):
            peaks = [min(m, p - s) for s in range(p)]
            for costs in (FB, UniformCosts(forward=0, backward=0), UniformCosts(forward=5, backward=0, latency=3)):
                assert simulate(generate("1f1b", p, m), costs).peak_activations == peaks
            assert simulate(generate("1f1b", p, m, policy="B")).peak_activations == [min(m, 2 * (p - s) - 1) for s in range(p)]


def test_a_split_backward_counts_by_both_rules() -> None:
    """Released at W, three are alive at 0F2; released at I, never more than the first two."""
    run = simulate(Schedule.from_text("0F0 0F1 0I0 0I1 0F2 0W0 0W1 0I2 0W2"))
    assert run.peak_activations == [3]
    assert run.peak_activations_i == [2]


def test_a_pair_allocates_at_its_start_and_releases_at_its_end() -> None:
    run = simulate(Schedule.from_text("0F0 (0F1;0B0)OVERLAP_F_B 0B1"))
    assert run.peak_activations == [2]


def test_shares_divide_by_the_stages_of_the_device() -> None:
    """V placement of 4 stages on 2 devices, one microbatch: 2 chunks alive, which is the whole of one microbatch's share."""
    run = simulate(Schedule.from_text("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"))
    assert run.peak_activations == [2, 2]
    assert run.peak_activation_share == [1, 1]


def test_every_figure_of_a_report_has_a_definition() -> None:
    figures = simulate(generate("1f1b", 2, 2)).figures()
    assert set(DEFINITIONS) <= set(figures)


def test_iteration_time_of_a_measured_run_is_the_median_step() -> None:
    # one device, one op: steps of 3, 9 and 4; simulated the last counts, measured the median
    run = simulate(Schedule.from_text("0F0"), FB, steps=3)
    times = {"start": np.array([[0.0], [3.0], [12.0]]), "end": np.array([[3.0], [12.0], [16.0]])}
    assert replace(run, **times).iteration_time == 4
    assert replace(run, **times, source="measured").iteration_time == 4
    times["end"] = np.array([[3.0], [12.0], [22.0]])
    assert replace(run, **times).iteration_time == 10
    assert replace(run, **times, source="measured").iteration_time == 9


@pytest.mark.parametrize("updates", [1, 2])
def test_iteration_time_of_a_measured_asynchronous_run_is_the_median_run(updates: int) -> None:
    """Every step is a run of its own. Ops one after the other, each of 4, 1 and 2 in the three runs, the first of which was disturbed.

    From U to U are three ops: 12, 3 and 6. With one U, the whole run of three ops counts.
    """
    stream = [f"0{kind}{i}" for i in range(updates) for kind in "FBU"]
    run = simulate(Schedule.from_streams([stream], weights="stash"), FB)
    length = np.array([[4.0], [1.0], [2.0]])
    start = np.array([[0.0], [100.0], [200.0]]) + length * np.arange(3 * updates)
    assert replace(run, start=start, end=start + length, source="measured").iteration_time == 6
