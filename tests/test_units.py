"""Quantities: what has no unit, or the wrong one, is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import Link, ScheduleError
from pipesim.units import format_bytes, format_time, parse_quantity


def test_C12_gbit_taken_for_gbyte() -> None:
    size = parse_quantity("100 MB", "bytes", "size")
    for text, time in (("25Gb", 0.032), ("25GB", 0.004)):
        assert Link(bandwidth=parse_quantity(text, "bandwidth", "bandwidth")).time(size) == pytest.approx(time, rel=1e-15)
    link = Link(parse_quantity("20 us", "time", "latency"), parse_quantity("10 GiB/s", "bandwidth", "bandwidth"))
    assert link.time(parse_quantity("16 MiB", "bytes", "size")) == pytest.approx(1582.5e-6, rel=1e-15)
    for bare in (25, 25.0, "25", " 2.5e10 "):
        with pytest.raises(ScheduleError, match="has no unit"):
            parse_quantity(bare, "bandwidth", "bandwidth")


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("5 us", "time", 5e-6), ("5µs", "time", 5e-6), ("5μs", "time", 5e-6), ("1.5 ms", "time", 1.5e-3), ("10ns", "time", 1e-8), ("2 s", "time", 2.0),
        ("80 GB", "bytes", 80e9), ("80GiB", "bytes", 80 * 2.0**30), ("1 kB", "bytes", 1e3), ("1 KB", "bytes", 1e3), ("1 KiB", "bytes", 1024.0),
        ("8 bit", "bytes", 1.0), ("1.5e3 bytes", "bytes", 1500.0), ("7 B", "bytes", 7.0),
        ("25 GB/s", "bandwidth", 25e9), ("25 GBps", "bandwidth", 25e9), ("200 Gbit/s", "bandwidth", 25e9), ("200 Gbps", "bandwidth", 25e9),
        ("200 Gb/s", "bandwidth", 25e9), ("1 TiB/s", "bandwidth", 2.0**40),
    ],
)  # fmt: skip
def test_reads(text: str, dimension: Any, value: float) -> None:
    assert parse_quantity(text, dimension, "field") == value


@pytest.mark.parametrize(
    ("text", "dimension"),
    [
        ("5 us", "bytes"), ("5 GB", "time"), ("5 GB/s", "bytes"), ("5 Gbps", "bytes"), ("-5 us", "time"), ("nan s", "time"), ("inf s", "time"),
        ("1e999 s", "time"), ("5 minutes", "time"), ("5,5 us", "time"), ("", "time"), ("us", "time"), ("5 XB", "bytes"), ("5 GB GB", "bytes"),
        ("0." + "0" * 5000 + "1 s", "time"), ("1" * 5000 + " s", "time"), (None, "time"), ([5], "time"), ("٥ us", "time"),
    ],
)  # fmt: skip
def test_refuses_with_the_field_and_an_example(text: Any, dimension: Any) -> None:
    with pytest.raises(ScheduleError, match=r"link\.latency") as error:
        parse_quantity(text, dimension, "link.latency")
    assert "such as" in str(error.value)


@settings(deadline=None, database=None)
@given(st.integers(1, 10**6), st.sampled_from([("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)]))
def test_times_are_the_nearest_float(number: int, unit: tuple[str, int]) -> None:
    assert parse_quantity(f"{number} {unit[0]}", "time", "field") == number / unit[1]


def test_formats() -> None:
    assert [format_time(value, "s") for value in (0, 2.5, 0.0185, 5e-6, 3e-8)] == ["0 s", "2.5 s", "18.5 ms", "5 µs", "30 ns"]
    assert format_time(40.2, "slot") == "40.2"
    assert [format_bytes(value, "s") for value in (12, 3.5e9, 2e6, 1500)] == ["12 B", "3.5 GB", "2 MB", "1.5 kB"]
    assert format_bytes(4, "slot") == "4"
