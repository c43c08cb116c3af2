"""Batch arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import ScheduleError
from pipesim.batch import microbatch_sizes


def test_B05_batch_arithmetic() -> None:
    assert microbatch_sizes(1024, 8, data_parallel=4) == [8] * 32
    with pytest.raises(ScheduleError, match="100 mod 24 = 4"):
        microbatch_sizes(100, 8, data_parallel=3)
    sizes = microbatch_sizes(10, 4)
    assert sizes == [4, 4, 2]
    with pytest.raises(IndexError):
        sizes[3]


@settings(deadline=None, database=None)
@given(st.integers(1, 500), st.integers(1, 50))
def test_no_sample_is_lost(batch: int, size: int) -> None:
    sizes = microbatch_sizes(batch, size)
    assert sum(sizes) == batch
    assert set(sizes[:-1]) <= {size}
    assert 1 <= sizes[-1] <= size


@pytest.mark.parametrize(("name", "value"), [("batch", 0), ("batch", 8.0), ("microbatch_size", -1), ("data_parallel", True), ("data_parallel", "2")])
def test_wrong_numbers_name_the_argument(name: str, value: object) -> None:
    with pytest.raises(ScheduleError, match=name):
        microbatch_sizes(**{"batch": 8, "microbatch_size": 2, name: value})  # type: ignore[arg-type]
