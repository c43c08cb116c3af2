"""The zero-bubble papers' automatic schedules: an order found for given durations and a memory limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pipesim.errors import LARGEST, ScheduleError
from pipesim.listscheduler import list_schedule
from pipesim.op import Kind, Op
from pipesim.schedule import Schedule

from .zb_h import zb_h1, zb_h2

__all__ = ["zb1p", "zb2p", "zb_auto"]

Streams = list[list[Any]]  # of Op; nothing here is a pair

# (forwards to fill the time until the first I, not twice those of 1F1B; W as late as the memory allows, not whenever there is
# nothing else; the most by which a W may delay an I or F that is on its way, None for no limit; and a forward an I), the delays as
# parts of W and F. On random pipelines no other setting of this kind found more.
_SETTINGS = (
    (False, False, None, 0.0),
    (False, False, None, 0.25),
    (False, False, None, 0.5),
    (False, False, None, 0.75),
    (False, False, 0.0, 0.0),
    (False, False, 0.0, 0.25),
    (False, True, 0.0, 0.0),
    (False, True, 0.03, 0.0),
    (True, False, None, 0.0),
    (True, True, 0.0, 0.0),
)


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

        device 0 | F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 .       p = 2, m = 4, F = I = W,
        device 1 | .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3      memory for 3 activations or more

    A list scheduler runs the pipeline under ten settings, and the best result is kept: the shortest longest span of a
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
    if not 0 <= latency < float("inf"):
        raise ScheduleError(f"latency must be a finite time of at least 0, got {latency!r}")
    if not 0 <= weight_grad_memory <= 1:
        raise ScheduleError(f"weight_grad_memory is the part of an activation that stays for W, 0 to 1, got {weight_grad_memory!r}")
    bound = _lower_bound(microbatches, times, latency, limits, weight_grad_memory)
    best: tuple[tuple[float, ...], Streams] | None = None
    for streams in _candidates(microbatches, times, latency, limits, weight_grad_memory):
        spans, makespan = _replay(streams, microbatches, times, latency)
        # rounded, so that spans that differ by the dust of float sums are equal
        figure = round(max(spans) / (bound or 1.0), 12), max(_peaks(streams, 1.0)), round(makespan / (bound or 1.0), 12)
        if best is None or figure < best[0]:
            best = figure, streams
        if best[0][0] <= 1.0:
            break
    assert best is not None  # the settings are not empty
    return Schedule.from_streams(best[1], name="zb-auto")


def zb1p(
    devices: int,
    microbatches: int,
    *,
    forward: float | Sequence[float] = 1.0,
    input_grad: float | Sequence[float] = 1.0,
    weight_grad: float | Sequence[float] = 1.0,
    latency: float = 0.0,
    weight_grad_memory: float = 0.5,
) -> Schedule:
    """Searches for the best order within the memory of 1F1B, p activations per device: ZB-1p; see ``zb-auto``.

    Args:
        devices: Devices p, one stage each.
        microbatches: Microbatches m.
        forward: Time of F, or one per stage.
        input_grad: Time of I, or one per stage.
        weight_grad: Time of W, or one per stage.
        latency: Time of a hop.
        weight_grad_memory: M_W/M_B, the part of an activation that stays for W: 0 to 1.

    Raises:
        ScheduleError: An option is out of its range.
    """
    return zb_auto(
        devices,
        microbatches,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        latency=latency,
        memory_limit=devices,
        weight_grad_memory=weight_grad_memory,
    )


def zb2p(
    devices: int,
    microbatches: int,
    *,
    forward: float | Sequence[float] = 1.0,
    input_grad: float | Sequence[float] = 1.0,
    weight_grad: float | Sequence[float] = 1.0,
    latency: float = 0.0,
    weight_grad_memory: float = 0.5,
) -> Schedule:
    """Searches for the best order within twice the memory of 1F1B, 2p activations per device: ZB-2p; see ``zb-auto``.

    Args:
        devices: Devices p, one stage each.
        microbatches: Microbatches m.
        forward: Time of F, or one per stage.
        input_grad: Time of I, or one per stage.
        weight_grad: Time of W, or one per stage.
        latency: Time of a hop.
        weight_grad_memory: M_W/M_B, the part of an activation that stays for W: 0 to 1.

    Raises:
        ScheduleError: An option is out of its range.
    """
    return zb_auto(
        devices,
        microbatches,
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        latency=latency,
        memory_limit=2 * devices,
        weight_grad_memory=weight_grad_memory,
    )


def _candidates(microbatches: int, times: dict[Kind, list[float]], latency: float, limits: list[float], kept: float) -> Iterator[Streams]:
    """Orders that keep the limits."""
    devices = len(limits)
    for handcrafted in (zb_h1, zb_h2):
        streams = handcrafted(devices, microbatches).streams
        if all(peak <= limit + 1e-9 for peak, limit in zip(_peaks(streams, kept), limits, strict=True)):
            yield streams
    # forwards before the first I: ZB-H2's, or as many as fill the time until it can come
    double = [2 * (devices - d) - 1 for d in range(devices)]
    filling = [1] * devices
    round_trip = 0.0
    for d in reversed(range(devices - 1)):
        round_trip += times[Kind.F][d + 1] + times[Kind.I][d + 1] + 2 * latency
        filling[d] += -int(-round_trip // times[Kind.F][d]) if times[Kind.F][d] else microbatches
    mean_forward, mean_weight = (sum(times[kind]) / devices for kind in (Kind.F, Kind.W))
    for fill, as_late, weight_delay, forward_delay in _SETTINGS:
        warmup = filling if fill else double
        hold_back = {Kind.F: forward_delay * mean_forward}
        if weight_delay is not None:
            hold_back[Kind.W] = weight_delay * mean_weight
        # W after everything else that is ready, or as many rounds late as the memory allows
        late = [2 * microbatches + 2 * devices] * devices
        if as_late and kept:
            late = [int((limit - first) / kept) for limit, first in zip(limits, warmup, strict=True)]

        def key(op: Op, warmup: list[int] = warmup, late: list[int] = late) -> tuple[int, int]:
            number = op.microbatch or 0
            if op.kind is Kind.I:
                return number, 0
            return (number - warmup[op.stage], 1) if op.kind is Kind.F else (number + late[op.stage], 2)

        yield list_schedule(
            range(devices),
            microbatches,
            times,
            priority=key,
            latency=latency,
            max_in_flight=limits,
            kept_for_weight_grad=kept,
            hold_back=hold_back,
        )


def _replay(streams: Streams, microbatches: int, times: dict[Kind, list[float]], latency: float) -> tuple[list[float], float]:
    """Runs the streams eagerly: (devices,) time from first start to last end, and the makespan."""
    devices = len(streams)
    ends: dict[Kind, list[list[float | None]]] = {kind: [[None] * microbatches for _ in streams] for kind in (Kind.F, Kind.I)}
    position, clock, first = [0] * devices, [0.0] * devices, [0.0] * devices
    waiting = list(range(devices))
    while waiting:
        d = waiting.pop()
        begun = position[d]
        for _, kind, number in streams[d][begun:]:
            start = clock[d]
            source = d - 1 if kind is Kind.F else d + 1 if kind is Kind.I else d
            if source != d and 0 <= source < devices:
                produced = ends[kind][source][number]
                if produced is None:
                    break
                start = max(start, produced + latency)
            if not position[d]:
                first[d] = start
            clock[d] = start + times[kind][d]
            if kind is not Kind.W:
                ends[kind][d][number] = clock[d]
            position[d] += 1
        if position[d] > begun:
            waiting.extend(other for other in (d - 1, d + 1) if 0 <= other < devices and position[other] < len(streams[other]))
    return [end - start for start, end in zip(first, clock, strict=True)], max(clock)


def _peaks(streams: Streams, kept: float) -> list[float]:
    """(devices,) the most activations at once; the rule of the memory limit."""
    change = {Kind.F: 1.0, Kind.I: kept - 1.0, Kind.W: -kept}
    peaks = []
    for stream in streams:
        level = peak = 0.0
        for _, kind, _ in stream:
            level += change[kind]
            peak = max(peak, level)
        peaks.append(peak)
    return peaks


def _lower_bound(microbatches: int, times: dict[Kind, list[float]], latency: float, limits: list[float], kept: float) -> float:
    """No longest span can be shorter: see the docstring of :func:`zb_auto`."""
    devices, (forward, input_grad, weight_grad) = len(limits), (times[kind] for kind in (Kind.F, Kind.I, Kind.W))
    bound = 0.0
    for d in range(devices):
        there_and_back = 0.0
        for e in range(d, devices):
            # before the last I of e, only so many W can be put off: each holds its part, and the last activation is whole
            put_off = int((limits[e] - 1) / kept + 1e-9) if kept else microbatches
            forced = max(0, microbatches - 1 - put_off)
            at_e = microbatches * (forward[e] + input_grad[e]) + forced * weight_grad[e]
            bound = max(bound, there_and_back + at_e + weight_grad[d])
            there_and_back += forward[e] + input_grad[e] + 2 * latency
        bound = max(bound, microbatches * (forward[d] + input_grad[d] + weight_grad[d]))
    return bound


def _per_stage(name: str, value: float | Sequence[float], devices: int) -> list[float]:
    try:
        values = np.asarray(value, dtype=np.float64)
        spread = np.broadcast_to(values, (devices,))
    except (TypeError, ValueError):
        raise ScheduleError(f"{name} must be one number, or {devices}, one per stage, got {value!r:.80}") from None
    if not ((values >= 0) & (values <= LARGEST)).all():
        raise ScheduleError(f"{name} must be at least 0 and at most {LARGEST:g}, got {value!r:.80}")
    return [float(number) for number in spread]


def _limits(value: float | Sequence[float] | None, devices: int) -> list[float]:
    limits = _per_stage("memory_limit", devices if value is None else value, devices)
    if min(limits) < 1:
        raise ScheduleError(f"memory_limit must be at least 1 activation on every device, got {value!r:.80}")
    return limits
