"""Robust fits. Cases R01, R02 and R06 of ../shared/cases.md."""

from __future__ import annotations

import numpy as np
import pytest

from pipesim.calibration import fit_link, spread, warm_up
from pipesim.errors import ScheduleError

MIB = 2**20
FIRST_SEND = [214477, 14, 5, 3, 4, 5, 4, 4, 4, 4]  # R01, microseconds
ITERATIONS = [23376.6, 15149.3, 15153.5, 15154.5]  # R06, milliseconds


def test_first_send_is_ten_thousand_times_slower():
    found = spread([FIRST_SEND])
    assert found.median == 4.0
    assert found.typical == pytest.approx(21452.4)  # the mean says nothing, so the first exchange must go
    assert warm_up(FIRST_SEND) >= 1


def test_latency_and_bandwidth_of_two_sizes():
    # R02: 100 us/MiB, 20 us, 4 MiB in 420 us
    link = fit_link([MIB, 16 * MIB], [120e-6, 1620e-6])
    assert link.latency == pytest.approx(20e-6, rel=1e-9)
    assert link.bandwidth == pytest.approx(MIB / 100e-6, rel=1e-9)
    assert link.time(4 * MIB) == pytest.approx(420e-6, rel=1e-9)
    assert link.error < 1e-9
    assert not link.notes


def test_an_outlier_does_not_move_the_line():
    link = fit_link([MIB, 16 * MIB, MIB], [120e-6, 1620e-6, 214477e-6])
    assert link.time(4 * MIB) == pytest.approx(420e-6, rel=0.05)


def test_first_iterations_are_warm_up():
    assert warm_up(ITERATIONS) == 1
    assert np.mean(ITERATIONS[1:]) == pytest.approx(15152.433, abs=5e-4)
    assert np.mean(ITERATIONS) == pytest.approx(17208.475)
    assert spread([ITERATIONS]).median == 15154.0


@pytest.mark.parametrize("samples", [[5.0], [9.0, 1.0], [1.0, 1.0, 1.0], [1.0, 9.0, 1.0, 1.0]])
def test_nothing_to_discard(samples):
    """Two samples do not say which is odd, and an outlier in the middle is no warm-up."""
    assert warm_up(samples) == 0


def test_one_size_says_latency_and_bandwidth_cannot_be_told_apart():
    link = fit_link([MIB] * 3, [130e-6, 120e-6, 125e-6])
    assert link.time(MIB) == 120e-6
    assert link.bandwidth is None
    assert "cannot be told apart" in link.notes[0]


def test_no_bandwidth_is_seen_where_size_makes_no_difference():
    link = fit_link([1024, MIB], [10e-6, 10e-6])
    assert link.bandwidth is None
    assert link.latency == pytest.approx(10e-6)
    assert "no bandwidth" in link.notes[0]


def test_a_latency_is_never_negative():
    # through (1 MiB, 10 us) and (2 MiB, 30 us) goes a line that starts at -10 us
    link = fit_link([MIB, 2 * MIB], [10e-6, 30e-6])
    assert link.latency == 0
    assert link.error > 0.2


def test_a_bad_fit_is_said():
    # 1 us, 100 us, 1 us: no line comes within 30 %
    assert "no line fits" in fit_link([1024, 2048, 4096], [1e-6, 100e-6, 1e-6]).notes[0]


def test_no_messages():
    with pytest.raises(ScheduleError, match="without messages"):
        fit_link([], [])
    with pytest.raises(ScheduleError, match="no samples"):
        spread([])


def test_typical_follows_the_mean_of_undisturbed_runs():
    # three runs of two ops: means 2, 2 and 50; a stranger disturbed the last
    found = spread([[1.0, 3.0], [2.0, 2.0], [99.0, 1.0]])
    assert (found.count, found.typical) == (6, 2.0)
