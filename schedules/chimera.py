"""Chimera: two pipelines in opposite directions, whose bubbles fill each other."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipesim.errors import ScheduleError, require_count
from pipesim.op import Kind
from pipesim.schedule import Schedule

__all__ = ["chimera", "in_lockstep"]

Scheme = Literal["direct", "doubling", "halving"]


def chimera(devices: int, microbatches: int, *, pipes: int = 1, scheme: Scheme = "direct") -> Schedule:
    """Runs one half of the microbatches down the devices and the other half up, as 1F1B in either direction.

    ::

        device 0 | F0 .  F1 F2 B2 F3 B3 B0 .  B1       0, 1 go down: stage s on device s
        device 1 | .  F0 F2 F1 F3 B2 B0 B3 B1 .        2, 3 go up:   stage s on device D - 1 - s
        device 2 | .  F2 F0 F3 F1 B0 B2 B1 B3 .
        device 3 | F2 .  F3 F0 B0 F1 B1 B2 .  B3       F = B here; a run starts F1 of device 0 and F3 of device 3 at 1

    If every op took one slot, the forward of the k-th microbatch of a direction would run on stage s in slot 2k + s and its
    backward in slot 2k + 2D - 1 - s. No two ops then meet, and this is the order of each device's stream. A unit is D
    microbatches; the next unit stands 2D slots later and starts in the gaps that the one before leaves (the paper's
    direct concatenation). The last unit may be smaller; its microbatches are dealt to the directions in turn.

    With *pipes* f > 1 there are f pipelines per direction, the j-th shifted by j·D/f devices, with D/(2f) microbatches
    of a unit each: less bubble, more copies of the weights.

    ``doubling`` runs the forwards of two microbatches in one slot, which then takes as long as one backward if B = 2F (or with
    recomputation). A unit is 2D microbatches. Both activations are there from the start of the slot, both messages leave
    at its end, and the backwards are single.

    ``halving`` is the same stream for half-size microbatches: a forward of a whole microbatch is a pair of two halves, and the
    halves go back one by one. Give *microbatches* as the number of halves (even), the durations and bytes for a half.

    Formulas, N = m microbatches, D = p devices, for N a multiple of the unit:

    * direct, F = B: makespan (2N + D/f - 2)·F, bubble fraction (D - 2f)/(2fN + D - 2f).
    * direct, N = D, f = 1, B >= F: makespan D·F + (2D - 2)·B. For B = 2F and N > D the gaps do not fit, and the bubble is larger
      than the first formula says: D=4, N=8: 0.2.
    * doubling and halving, B = 2F: makespan 3NF + (D/f - 2)·2F.
    * peak activations: between D - D/(2f) + 1 and D, for f = 1 min(D/2 + 1 + d, D) on a device at distance d from its end; doubling
      and halving at most 2D, for f = 1 min(D + 3 + 2d, 2D).

    Two replicas of every stage, 2f with pipes, so 2f stages on each device, each of them a 1/D of the model: the papers' M_a is
    ``peak_activations`` here, not ``peak_activation_share``, which divides by the 2f.

    Legal sizes: D even, f a divisor of D/2, any N (for ``halving`` even).

    Source: Li and Hoefler 2021 (Chimera). The order of doubling and halving is derived: the slots above, with one slot for a
    pair and one for each backward, the second one slot after the first.

    Args:
        devices: Devices D.
        microbatches: Microbatches N, halves for ``halving``.
        pipes: Pipelines f per direction.
        scheme: What to do with more than D microbatches: ``direct``, ``doubling`` or ``halving``.

    Raises:
        ScheduleError: D is odd, f is no divisor of D/2, the scheme is unknown, or a half lacks its other half.

    Examples:
        >>> print(chimera(4, 4))
        name: chimera
        device 0 | 0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1
        device 1 | 1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1
        device 2 | 1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3
        device 3 | 0F2 0F3 3F0 3B0 3F1 3B1 0B2 0B3
        >>> print(chimera(2, 4, scheme="doubling").streams[0][0])
        (0F0;0F1)PAIR
    """
    if scheme not in get_args(Scheme):
        raise ScheduleError(f"scheme must be one of {', '.join(map(repr, get_args(Scheme)))}, got {scheme!r}")
    if devices % 2:
        raise ScheduleError(f"chimera wants an even number of devices, got {devices}")
    if (devices // 2) % require_count("pipes", pipes):
        legal = [count for count in range(1, devices // 2 + 1) if not (devices // 2) % count]
        raise ScheduleError(f"pipes must divide half the devices, so be one of {legal} for {devices} devices, got {pipes}")
    if scheme == "halving" and microbatches % 2:
        raise ScheduleError(f"halving counts half-size microbatches, two per microbatch, so their number must be even, got {microbatches}")
    # What fills a slot of a forward is a group: one microbatch, or two.
    size = 1 if scheme == "direct" else 2
    pipe, turn = _deal(-(-microbatches // size), devices, pipes)
    pipe, turn = (np.repeat(column, size)[:microbatches] for column in (pipe, turn))
    stage = np.arange(devices)[:, None]
    place = (stage + pipe // 2 * (devices // pipes)) % devices
    place = np.where(pipe % 2, devices - 1 - place, place)
    columns = in_lockstep(place, turn, half=np.arange(microbatches) % size)
    return Schedule.from_columns(columns, name="chimera" if scheme == "direct" else f"chimera-{scheme}")


def _deal(groups: int, devices: int, pipes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Deals groups to pipelines, a unit of *devices* groups after the other.

    Returns:
        (groups,) the pipeline, 2j down and 2j + 1 up for shift j; and (groups,) the slot in which the forward starts. Numbers
        within a unit ascend by pipeline, then by slot.
    """
    pipe: list[NDArray[np.int64]] = []
    slot: list[NDArray[np.int64]] = []
    for first in range(0, groups, devices):
        # the k-th group of the unit goes to pipeline k mod 2f: as even as can be where the unit is not full
        own = np.arange(min(devices, groups - first)) % (2 * pipes)
        pipe.append(np.sort(own))
        slot.append(2 * first + 2 * np.concatenate([np.arange(count) for count in np.bincount(own)]))
    return np.concatenate(pipe), np.concatenate(slot)


def in_lockstep(place: ArrayLike, start: ArrayLike, half: ArrayLike = 0) -> list[tuple[NDArray[np.int64], ...]]:
    """Orders ops by the slot in which they would run if each took one slot and nothing were in the way.

    The forward of a microbatch runs on stage s in slot start + s, its backward in slot start + half + 2S - 1 - s. Slots ascend
    along every dependency, so the order cannot deadlock, whatever the durations. Where two ops of a device meet, the forward
    goes first.

    Args:
        place: (stages, microbatches) or (stages, 1), the device of each stage; all devices have some.
        start: (microbatches,) the slot of the first forward.
        half: (microbatches,) 1 for the second half of a pair, whose forward shares the slot of the microbatch before.

    Returns:
        Per device the columns (stage, kind, microbatch, joined).
    """
    place, start = np.asarray(place), np.asarray(start)
    shape = (len(place), len(start))
    stage, half = np.arange(len(place))[:, None], np.broadcast_to(half, start.shape)
    slot = np.stack([start + stage, start + half + 2 * len(place) - 1 - stage]).ravel()
    kind = np.repeat([int(Kind.F), int(Kind.B)], shape[0] * shape[1])
    device, stage, microbatch, half = (np.tile(np.broadcast_to(column, shape).ravel(), 2) for column in (place, stage, np.arange(shape[1]), half))
    order = np.lexsort((half, kind, slot, device))
    columns = (stage[order], kind[order], microbatch[order], ((half == 1) & (kind == int(Kind.F)))[order])
    bounds = np.cumsum(np.bincount(device))[:-1]
    return list(zip(*(np.split(column, bounds) for column in columns), strict=True))
