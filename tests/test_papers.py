"""Figures that papers print, from the times that they print."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from pipesim import UniformCosts, generate, simulate


def span_bubble_rate(schedule: str, p: int, m: int, forward: float, input_grad: float, weight_grad: float, hop: float) -> str:
    costs = UniformCosts(forward=forward, input_grad=input_grad, weight_grad=weight_grad, latency=hop)
    return f"{simulate(generate(schedule, p, m), costs).span_bubble_rate:.4f}"


@pytest.mark.parametrize(
    ("p", "m", "times", "rate"),
    [
        # Qi et al. 2024 (arXiv 2401.10241): Table 9's F, B (our I), W and communication in ms, Table 5's bubble rate of 1F1B
        (8, 24, (18.522, 18.086, 9.337, 0.601), "0.2431"),
        (16, 128, (11.325, 11.308, 8.109, 0.378), "0.1251"),
    ],
)
def test_bubble_rate_of_1f1b_in_the_zero_bubble_paper(p: int, m: int, times: tuple[float, float, float, float], rate: str) -> None:
    assert span_bubble_rate("1f1b", p, m, *times) == rate


def test_every_bubble_rate_of_1f1b_in_the_zero_bubble_paper(shared_data: Path) -> None:
    """Table 5's column from Table 9's rows, to the four decimals that are printed."""
    tables = []
    for name in ("zb_table9_profiled_times", "zb_table5_bubble_rates"):
        with open(shared_data / "papers" / f"{name}.csv", newline="") as file:
            tables.append({(row["model"], row["p"], row["m"]): row for row in csv.DictReader(file)})
    times, rates = tables
    assert rates.keys() <= times.keys()
    assert len(rates) >= 4
    for key, row in rates.items():
        measured = [float(times[key][column]) for column in ("T_F", "T_B", "T_W", "T_comm")]
        assert span_bubble_rate("1f1b", int(key[1]), int(key[2]), *measured) == f"{float(row['1F1B']):.4f}", key


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (8, 32), (5, 7)])
def test_megatrons_bubble_overhead(p: int, m: int) -> None:
    """Narayanan et al. 2021 (PTD-P), section 2.2: t_pb / t_id = (p - 1) / m for GPipe and 1F1B, whatever F and B are."""
    for name in ("gpipe", "1f1b"):
        run = simulate(generate(name, p, m), UniformCosts(forward=3, backward=7))
        assert run.bubble_overhead == pytest.approx((p - 1) / m, rel=1e-12)


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (8, 32), (5, 7)])
def test_gpipes_bubble_fraction(p: int, m: int) -> None:
    """Huang et al. 2019, section 2.3: (K - 1) / (M + K - 1), so negligible (below a fifth) from M = 4K on."""
    run = simulate(generate("gpipe", p, m), UniformCosts(forward=1, backward=2))
    assert run.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), rel=1e-12)
    assert simulate(generate("gpipe", p, 4 * p), UniformCosts()).bubble_fraction < 0.2
