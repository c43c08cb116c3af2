"""Sizes and numbers that no machine could hold are refused before anything is made."""

from __future__ import annotations

import pytest

import pipesim as ps
from pipesim.errors import require_size


@pytest.mark.parametrize(
    ("name", "devices", "microbatches", "options"),
    [
        ("1f1b", 4, 999_999_999, {}),
        ("1f1b", 4, 10**20, {}),
        ("1f1b", 10**5 + 1, 1, {}),
        ("interleaved-1f1b", 4, 8, {"chunks": 10**8}),
        ("looped-bfs", 4, 8, {"chunks": 10**8}),
        ("interleaved-zb", 4, 8, {"chunks": 10**8}),
        ("grouped-interleaved", 4, 8, {"chunks": 10**8}),
        ("seq1f1b", 4, 8, {"splits": 10**8}),
        ("hanayo", 4, 8, {"waves": 10**8}),
        ("pipemare", 4, 8, {"updates_every": 10**20}),
    ],
)
def test_too_large_a_schedule(name, devices, microbatches, options):
    with pytest.raises(ps.ScheduleError, match=r"fit into memory|must be below|at most"):
        ps.generate(name, devices, microbatches, **options)


def test_a_large_one_is_none():
    require_size(128, 4096, 100)


@pytest.mark.parametrize("field", ["forward", "backward", "latency", "activation", "weights", "message"])
def test_numbers_whose_sums_would_not_be_finite(field):
    with pytest.raises(ps.ScheduleError, match=f"{field} holds 1e\\+308"):
        ps.UniformCosts(**{field: 1e308})


@pytest.mark.parametrize("link", [{"latency": 1e308}, {"bandwidth": 1e-308}, {"bandwidth": 1e308}, {"bandwidth": 0}, {"latency": float("nan")}])
def test_links_of_no_machine(link):
    with pytest.raises(ps.ScheduleError, match=r"latency|bandwidth"):
        ps.Link(**link)
