"""The zero-bubble papers' automatic schedules: an order found for given durations and a memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from pipesim.errors import ScheduleError, require_count
from pipesim.listscheduler import list_schedule
from pipesim.op import Kind, Op, Slot
from pipesim.schedule import Schedule

from .zb_h import zb_h1, zb_h2

__all__ = ["zb1p", "zb2p", "zb_auto"]

Streams = list[list[Slot]]


def zb_auto(
    devices: int,
    microbatches: int,
    *,
    forward: float | Sequence[float] = 1.0,
    input_grad: float | Sequence[float] = 1.0,
    weight_grad: float | Sequence[float] = 1.0,
    latency: float = 0.0,
    memory_limit: float | Sequence[float] | None = None,
    weight_grad_memory: float = 0.5,
) -> Schedule:
    """Searches for the order of F, I and W with the shortest span of a device, within a memory limit.

    ::

        device 0 | PICTURE

    A list scheduler runs the pipeline under a few dozen settings, and the best result is kept: the shortest longest span of a
    device (first start to last end), then the fewest activations, then the shortest makespan. The settings: how many forwards
    a device starts with; whether W comes as soon as there is nothing else to do, or as late as the memory allows; and by how
    much a forward, or a W, may delay an input gradient that is already on its way. ZB-H1 and ZB-H2 are among the candidates where
    they fit, so the result is never worse. The search ends early at a lower bound: no device can be busy less than its work,
    nor finish before the first forward has gone down to some later device, all forwards and input gradients (and the W that
    memory forces) have been done there, and the last gradient has come back.

    Memory is counted in activations of one microbatch on one device, M_B: F adds 1 at its start, the end of I takes away
    1 - M_W/M_B, the end of W the rest. The limit is kept at all times. With *weight_grad_memory* 1 this is the metric
    peak_activations. The ratio decides what 2p can buy, because the last device must put off about (p - 1)(F + I)/W of its W to be
    without a bubble. Any p, any m.

    Source: Qi et al. 2024 (Zero Bubble Pipeline Parallelism), section 3 and appendix G, for the problem, the memory rule and the
    limits p·M_B (ZB-1p) and 2p·M_B (ZB-2p). The search is not the paper's heuristic; on the times of its table 9 it finds the rates of
    table 5 or better.

    Args:
        devices: Devices p, one stage each.
        microbatches: Microbatches m.
        forward: Time of F, or one per stage.
        input_grad: Time of I, or one per stage.
        weight_grad: Time of W, or one per stage.
        latency: Time of a hop.
        memory_limit: The most activations M_B that a device may hold, or one limit per device; at least 1. None for p.
        weight_grad_memory: M_W/M_B, the part of an activation that stays for W: 0 to 1. In a Transformer layer
            32h/(34h + 5as): 0.37 to 0.43 in the paper's models, 0.94 with an attention that keeps no scores.

    Raises:
        ScheduleError: An option is out of its range.
    """
    times = {Kind.F: _per_stage("forward", forward, devices), Kind.I: _per_stage("input_grad", input_grad, devices)}
    times[Kind.W] = _per_stage("weight_grad", weight_grad, devices)
    limits = _limits(memory_limit, devices)
    if not 0 <= weight_grad_memory <= 1:
        raise ScheduleError(f"weight_grad_memory is the part of an activation that stays for W, 0 to 1, got {weight_grad_memory!r}")
    bound = _lower_bound(microbatches, times, latency, limits, weight_grad_memory)
    best: tuple[tuple[float, float, float], Streams] | None = None
    for streams in _candidates(microbatches, times, latency, limits, weight_grad_memory):
        spans, makespan = _replay(streams, microbatches, times, latency)
        figure = max(spans), max(_peaks(streams, 1.0)), makespan
        # spans that differ by the dust of float sums are equal
        if best is None or (figure[0] * (1 - 1e-12) <= best[0][0] and (figure[0] * (1 + 1e-12) < best[0][0] or figure[1:] < best[0][1:])):
            best = figure, streams
        if best[0][0] <= bound * (1 + 1e-12):
            break
    assert best is not None  # there is always a candidate
    return Schedule.from_streams(best[1], name="zb-auto")
