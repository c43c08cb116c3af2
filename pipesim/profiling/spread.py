"""What repeats tell beside their median: how far they lie apart, which layers can share theirs, and what contradicts itself.

Spread is the median absolute deviation, which a few disturbed repeats do not move.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipesim.profiling.measuring import LayerMeasurement

__all__ = ["KINDS", "deviation", "numbers", "pool", "warnings"]

Times = Mapping[str, Sequence[float]]  # what was timed to the seconds of every repeat

KINDS = {"forward": "F", "backward": "B", "input_grad": "I", "weight_grad": "W"}
_WIDE = 0.1  # of a median: a spread that is worth a warning, and a difference between layers that are alike
_SURE = 3.0  # deviations; of 20 independent repeats the median is off by 0.4 of one
_FEWEST = 5  # repeats that have a spread at all
_SPLIT = 0.25  # more than B that I and W together take without a warning
_MATTERS = 0.02  # of all time: layers below that are not worth a warning


def deviation(values: Sequence[float]) -> float:
    """The median absolute deviation from the median.

    Examples:
        >>> deviation([1.0, 2.0, 3.0, 4.0, 100.0])
        1.0
    """
    middle = median(values)
    return median(abs(value - middle) for value in values)


def pool(times: Sequence[Times], alike: Sequence[Hashable]) -> tuple[list[tuple[int, ...]], list[str]]:
    """Which layers share their repeats: those that are alike, unless their medians say that they are not.

    Args:
        times: Of every layer, its repeats.
        alike: Of every layer, what must be equal.

    Returns:
        The layers that each layer shares its repeats with, itself among them, and a warning for layers that look alike and
        differ by a tenth and by three of their deviations.
    """
    groups: dict[Hashable, list[int]] = {}
    for number, key in enumerate(alike):
        groups.setdefault(key, []).append(number)
    shares: list[tuple[int, ...]] = [(number,) for number in range(len(times))]
    warned = []
    for group in groups.values():
        if len(group) < 2 or len(times[group[0]]["forward"]) < _FEWEST:
            continue
        found = [kind for kind in KINDS if _differ([times[number][kind] for number in group])]
        for number in group if not found else ():
            shares[number] = tuple(group)
        if found:
            middles = {number: median(times[number][found[0]]) for number in group}
            low, high = min(middles, key=lambda n: middles[n]), max(middles, key=lambda n: middles[n])
            warned.append(
                f"layers {numbers(group)} look alike, and {' and '.join(KINDS[kind] for kind in found)} differ by more than the spread allows "
                f"({KINDS[found[0]]}: {middles[low] * 1e3:.3g} ms of layer {low}, {middles[high] * 1e3:.3g} ms of layer {high}); their repeats are not "
                "pooled. Unless they do compute something different, the machine was disturbed: measure again"
            )
    return shares, warned


def _differ(layers: Sequence[Sequence[float]]) -> bool:
    middles, apart = [median(one) for one in layers], [deviation(one) for one in layers]
    middle, usual = median(middles), median(apart)
    return any(abs(m - middle) > max(_WIDE * middle, _SURE * max(own, usual)) for m, own in zip(middles, apart, strict=True))


def warnings(layers: Sequence[LayerMeasurement], repeats: int) -> list[str]:
    """What a reader should know before trusting the times."""
    found = []
    if repeats < _FEWEST:
        found.append(f"{repeats} repeats are too few to tell noise from a measurement, or to pool layers that are alike; 20 are usual")
    total = {kind: sum(getattr(layer, kind) for layer in layers) for kind in KINDS}
    wide: dict[str, list[int]] = {}
    largest = (0.0, "", 0)
    for number, layer in enumerate(layers):
        for kind, apart in layer.spread.items():
            time = getattr(layer, kind)
            if apart > _WIDE * time and time > _MATTERS * total[kind]:
                wide.setdefault(kind, []).append(number)
                largest = max(largest, (apart / time, kind, number))
    if wide:
        kinds = ", ".join(f"{KINDS[kind]} of layers {numbers(which)}" for kind, which in wide.items())
        share, kind, number = largest
        found.append(
            f"repeats spread by more than {_WIDE:.0%} of their median: {kinds}; most of all {KINDS[kind]} of layer {number}, by {share:.0%}. "
            "Something else keeps the machine busy; measure on an idle one, or with more --repeats"
        )
    slow = [number for number, layer in enumerate(layers) if layer.backward > _MATTERS * total["backward"] and _contradicts(layer)]
    if slow:
        found.append(
            f"B takes longer than I and W, which do the same work apart, by more than {_WIDE:.0%} and than the spread allows: layers {numbers(slow)}. "
            "One of them was disturbed; measure again"
        )
    whole, halves = total["backward"], total["input_grad"] + total["weight_grad"]
    if whole > (1 + _WIDE) * halves:
        found.append(
            f"B of all layers takes {whole * 1e3:.4g} ms and I + W, which do the same work apart, {halves * 1e3:.4g} ms: one of them was disturbed. "
            "Do not compare schedules with and without a split backward by this profile"
        )
    elif halves > (1 + _SPLIT) * whole:
        found.append(
            f"I + W of all layers take {halves * 1e3:.4g} ms and B {whole * 1e3:.4g} ms: a split that costs {halves / whole - 1:.0%}. Where layers are small "
            "it does; else it is noise. Zero-bubble schedules win or lose by it: measure again and see whether it stays"
        )
    return found


def _contradicts(layer: LayerMeasurement) -> bool:
    halves, apart = layer.input_grad + layer.weight_grad, sum(layer.spread.get(kind, 0.0) for kind in ("backward", "input_grad", "weight_grad"))
    return bool(layer.spread) and layer.backward - halves > max(_WIDE * halves, _SURE * apart)


def numbers(which: Sequence[int]) -> str:
    """Whole numbers in ascending order, runs of them as a range.

    Examples:
        >>> numbers([0, 2, 3, 4])
        '0, 2 to 4'
    """
    runs: list[list[int]] = []
    for number in which:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
