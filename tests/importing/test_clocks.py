"""Alignment of clocks; the answers follow by hand from: what is seen was sent before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim.importing.clocks import align

INF = np.inf


def test_messages_both_ways_bound_a_clock() -> None:
    # x0 - x1 <= 5 and x1 - x0 <= 9, so x1 lies within -5 .. 9: the middle is 2, and half the width 7
    clocks = align(np.array([[INF, 5.0], [9.0, INF]]))
    assert clocks.shift.tolist() == [0, 2]
    assert (clocks.low[1], clocks.high[1], clocks.uncertainty, clocks.contradiction) == (-5, 9, 7, 0)


def test_one_clock_stays_as_it_is_where_that_is_possible() -> None:
    assert align(np.array([[INF, 5.0], [9.0, INF]]), trusted=True).shift.tolist() == [0, 0]
    # here x1 >= 3 is certain, whatever the host says
    assert align(np.array([[INF, -3.0], [9.0, INF]]), trusted=True).shift.tolist() == [0, 6]


def test_messages_one_way_only_bound_it_from_one_side() -> None:
    # x1 >= -5: 0 is possible. x1 >= 4: the least shift is 4.
    for bound, shift in ((5.0, 0), (-4.0, 4)):
        clocks = align(np.array([[INF, bound], [INF, INF]]))
        assert clocks.shift.tolist() == [0, shift]
        assert clocks.uncertainty == INF


def test_bounds_add_up_along_a_chain() -> None:
    # x1 within -1 .. 1, x2 - x1 within 98 .. 102: x2 within 97 .. 103 although ranks 0 and 2 never spoke
    bounds = np.full((3, 3), INF)
    bounds[0, 1], bounds[1, 0], bounds[1, 2], bounds[2, 1] = 1, 1, -98, 102
    clocks = align(bounds)
    assert clocks.shift.tolist() == [0, 0, 100]
    assert (clocks.low[2], clocks.high[2]) == (97, 103)


def test_a_contradiction_is_said_and_shared() -> None:
    # x1 >= 4 and x1 <= 2: bounds that are loosened by at least 1 each meet at 3
    clocks = align(np.array([[INF, -4.0], [2.0, INF]]))
    assert clocks.shift.tolist() == pytest.approx([0, 3])
    assert clocks.contradiction >= 1


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.randoms(use_true_random=False))
def test_true_clocks_are_found_within_the_uncertainty(ranks: int, random: object) -> None:
    rng = np.random.default_rng(random.getrandbits(32))  # type: ignore[attr-defined]
    true = np.append(0.0, rng.normal(0, 100, ranks - 1))
    bounds = np.full((ranks, ranks), INF)
    for a in range(ranks - 1):
        for one, two in ((a, a + 1), (a + 1, a)):
            # seen - departed on the ranks' own clocks, for a message under way for some positive time
            bounds[one, two] = (rng.uniform(0, 5, 20) - (true[two] - true[one])).min()
    clocks = align(bounds)
    assert not clocks.contradiction
    assert (clocks.low - 1e-9 <= true).all()
    assert (true <= clocks.high + 1e-9).all()
    for a in range(ranks):
        for b in range(ranks):
            assert clocks.shift[a] - clocks.shift[b] <= bounds[a, b] + 1e-9
