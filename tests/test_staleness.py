"""Which version of its weights every op uses: known without a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import Kind, Op, Schedule, ScheduleError, generate


def with_updates(name: str, p: int, m: int, every: int, weights: Any, **options: Any) -> Schedule:
    """The order of a flush schedule with an update after every *every*-th backward."""
    streams = []
    for stream in generate(name, p, m, **options).streams:
        row: list[Any] = []
        for op in stream:
            row.append(op)
            if op.kind is Kind.B and (op.microbatch + 1) % every == 0:
                row.append(Op(op.stage, Kind.U, op.microbatch // every))
        streams.append(row)
    return Schedule.from_streams(streams, weights=weights)


def test_flush_has_one_version_and_no_delay() -> None:
    staleness = generate("1f1b", 4, 8).staleness
    assert not staleness.forward_version.any()
    assert not staleness.forward_delay.any()
    assert set(staleness.num_versions.values()) == {1}


def test_pipedream_delays_and_versions() -> None:
    """PipeDream section 3.3: w(t+1) = w(t) - v·grad f(w_1^(t-n+1), ..., w_n^(t)), so the delays of n stages are n-1 ... 0."""
    p, m = 4, 12
    staleness = generate("pipedream", p, m).staleness
    for stage in range(p):
        # the first microbatches see the initial weights, so their delay grows to the steady one
        delays = [min(k, p - 1 - stage) for k in range(m)]
        assert staleness.forward_delay[stage].tolist() == delays
        assert staleness.backward_delay[stage].tolist() == delays  # the stashed version
        assert staleness.forward_version[stage].tolist() == [k - delay for k, delay in enumerate(delays)]
        assert staleness.update[stage].tolist() == list(range(m))
    assert [staleness.num_versions[stage, stage] for stage in range(p)] == [4, 3, 2, 1]


def test_S28_weight_versions() -> None:
    assert list(generate("pipedream", 4, 16).staleness.num_versions.values()) == [4, 3, 2, 1]
    assert list(with_updates("1f1b", 4, 16, 4, "double_buffer").staleness.num_versions.values()) == [2, 2, 2, 2]
    assert list(generate("1f1b", 4, 16).staleness.num_versions.values()) == [1, 1, 1, 1]


def test_few_microbatches_need_few_versions() -> None:
    """Never more versions than updates have been made, plus the first: with m microbatches in flight at most m at once."""
    assert list(generate("pipedream", 4, 1).staleness.num_versions.values()) == [1, 1, 1, 1]
    assert list(generate("pipedream", 4, 2).staleness.num_versions.values()) == [2, 2, 2, 1]


def test_2bw_uses_the_version_before_the_last() -> None:
    """PipeDream-2BW section 3.1: version max(floor((k-1)/m) - 1, 0) for microbatch k from 1 and m microbatches per update."""
    per_update, count = 4, 16
    staleness = with_updates("1f1b", 4, count, per_update, "double_buffer").staleness
    versions = [max((k - 1) // per_update - 1, 0) for k in range(1, count + 1)]
    for stage in range(4):
        assert staleness.forward_version[stage].tolist() == versions
        assert staleness.backward_version[stage].tolist() == versions
        # W(t+1) = W(t) - v·grad f(W(t-1)): the delay is exactly 1 from the second update on
        assert staleness.forward_delay[stage].tolist() == [0] * per_update + [1] * (count - per_update)


def test_2bw_refuses_fewer_microbatches_per_update_than_stages() -> None:
    """p=4, 2 per update: microbatch 4 starts on stage 0 before the first update is made there, and wants its weights."""
    with pytest.raises(ScheduleError, match=r"device 0, position \d+, op 0F\d: needs weights that are not there yet"):
        _ = with_updates("1f1b", 4, 8, 2, "double_buffer").staleness


def test_the_latest_weights_make_forward_and_backward_differ() -> None:
    """1F1B on one lane with one copy: the forward sees (p-1-s)/N updates less than its own, in whole updates; the backward none.

    N = 1, p = 3: delays of stage 0 are 0, 1, 2, 2, ...
    """
    staleness = with_updates("1f1b", 3, 6, 1, "latest").staleness
    assert staleness.forward_delay.tolist() == [[0, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1], [0] * 6]
    assert not staleness.backward_delay.any()
    assert set(staleness.num_versions.values()) == {1}


def test_pipemares_lockstep_delays() -> None:
    """PipeMare's stream: K = 2(p-1-i)+1 forwards, then pairs (F_k; B_{k-K}), U after every backward. The delay is (2(P-i)+1)/N.

    There i counts from 1 and N = 1, so that stage i of 0..p-1 has 2(p-1-i)+1 = K.
    """
    p, m = 4, 20
    streams = []
    for i in range(p):
        first = 2 * (p - 1 - i) + 1
        row: list[Any] = [f"{i}F{k}" for k in range(first)]
        for k in range(first, m):
            row += [f"({i}F{k};{i}B{k - first})OVERLAP_F_B", f"{i}U{k - first}"]
        for k in range(m - first, m):
            row += [f"{i}B{k}", f"{i}U{k}"]
        streams.append(row)
    staleness = Schedule.from_streams(streams, weights="latest").staleness
    for i in range(p):
        first = 2 * (p - 1 - i) + 1
        # both halves of a pair read the version at the pair's start
        assert staleness.forward_delay[i, first:].tolist() == [first] * (m - first)
        assert not staleness.backward_delay[i].any()


def test_prediction_keeps_two_copies() -> None:
    assert set(with_updates("1f1b", 3, 6, 1, "predict").staleness.num_versions.values()) == {2}


def test_replicas_update_once_per_round() -> None:
    """Two replicas of stage 0: microbatches b go to replica b mod 2, one update per two of them."""
    schedule = generate("pipedream", 3, 8, replicas=(2, 1))
    staleness = schedule.staleness
    assert staleness.update[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert staleness.update[1].tolist() == list(range(8))
    # K + 1 versions: (R - 1) // r_0 + 1 = 2 on each replica, 1 on the last stage
    assert staleness.num_versions == {(0, 0): 2, (1, 0): 2, (2, 1): 1}


def test_frozen_stages_have_one_version() -> None:
    staleness = Schedule.from_text("0F0 0F1 0F2\n1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2", weights="stash").staleness
    assert staleness.forward_version.tolist() == [[0, 0, 0], [0, 1, 2]]
    assert staleness.backward_version.tolist() == [[-1, -1, -1], [0, 1, 2]]
    assert staleness.num_versions == {(0, 0): 1, (1, 1): 1}


@settings(max_examples=60, deadline=None, database=None)
@given(p=st.integers(1, 5), m=st.integers(1, 12), every=st.integers(1, 4), policy=st.sampled_from("AB"))
def test_stashed_versions_are_counted_as_a_person_would(p: int, m: int, every: int, policy: str) -> None:
    """Walks each stream with a set of the versions in use: the newest, and those that a backward still has to see."""
    m -= m % every
    if not m:
        return
    schedule = with_updates("1f1b", p, m, every, "stash", policy=policy)
    for device, stream in enumerate(schedule.streams):
        newest, seen, most = 0, {}, 1
        for op in stream:
            if op.kind is Kind.F:
                seen[op.microbatch] = newest
            elif op.kind is Kind.B:
                assert schedule.staleness.backward_version[op.stage, op.microbatch] == seen.pop(op.microbatch)
            else:
                newest += 1
            most = max(most, len({newest, *seen.values()}))
        assert schedule.staleness.num_versions[device, device] == most
    assert np.array_equal(schedule.staleness.update, np.broadcast_to(np.arange(m) // every, (p, m)))
