"""One operation of a schedule, written as PyTorch writes it.

2F0                     stage 2, forward of microbatch 0
1B3                     stage 1, full backward of microbatch 3
0I1  0W1                its halves: gradient of the input, gradient of the weights
0R2                     recompute of the forward, before a backward
0U3                     update 3 of the weights of stage 0
(2F4;3B0)OVERLAP_F_B    two ops that share one slot of the device
1SEND_F2  0REDUCE_GRAD  communication
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import NamedTuple

from pipesim.errors import ScheduleError

__all__ = ["COMPUTE_KINDS", "Kind", "Op", "Pair", "Slot", "parse_op"]


class Kind(IntEnum):
    """What an op does. Kinds up to ``U`` hold the device's compute lane, the others none of it."""

    F = 0  # forward
    B = 1  # full backward; the zero-bubble papers write B for what is I here
    I = 2  # the input-gradient half of the backward
    W = 3  # the weight-gradient half of the backward
    R = 4  # recompute
    U = 5  # optimizer update; its "microbatch" is the number of the update
    REDUCE_GRAD = 6
    SEND_F = 7
    RECV_F = 8
    SEND_B = 9
    RECV_B = 10
    UNSHARD = 11
    RESHARD = 12
    OFFLOAD = 13
    RELOAD = 14


COMPUTE_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.U)

# Kinds that belong to no microbatch; REDUCE_GRAD may carry the number of its update.
_WITHOUT_MICROBATCH = {Kind.UNSHARD, Kind.RESHARD}
_MICROBATCH_OPTIONAL = {Kind.REDUCE_GRAD}


class Op(NamedTuple):
    """One operation: (stage, kind, microbatch).

    Examples:
        >>> str(Op(2, Kind.F, 0))
        '2F0'
        >>> parse_op("0REDUCE_GRAD")
        Op(stage=0, kind=<Kind.REDUCE_GRAD: 6>, microbatch=None)
    """

    stage: int
    kind: Kind
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{'' if self.microbatch is None else self.microbatch}"


class Pair(NamedTuple):
    """Two compute ops that share one slot of a device: both start together, both outputs appear at its end.

    Examples:
        >>> str(Pair(Op(2, Kind.F, 4), Op(3, Kind.B, 0)))
        '(2F4;3B0)OVERLAP_F_B'
        >>> str(Pair(Op(0, Kind.F, 0), Op(0, Kind.F, 1)))
        '(0F0;0F1)PAIR'
    """

    first: Op
    second: Op

    def __str__(self) -> str:
        overlap = self.first.kind is Kind.F and self.second.kind is Kind.B
        return f"({self.first};{self.second}){'OVERLAP_F_B' if overlap else 'PAIR'}"


Slot = Op | Pair

# Longest names first, so that RECV_F is not read as R. Nine digits keep every number within int32.
_NAMES = "|".join(sorted((kind.name for kind in Kind), key=len, reverse=True))
_OP = re.compile(rf"([0-9]{{1,9}})({_NAMES})([0-9]{{0,9}})")
_PAIR = re.compile(r"\(([^();]*);([^();]*)\)(OVERLAP_F_B|PAIR)")
# The vocabulary of PyTorch's files before pytorch#138886: B was the input half, BW the full backward.
_LEGACY = re.compile(r"([0-9]{1,9})(BW|B)([0-9]{1,9})")


def parse_op(text: str, legacy: bool = False) -> Slot:
    """Reads one op or pair; the inverse of ``str``.

    Args:
        text: Such as ``2F0``; spaces are ignored.
        legacy: Reads PyTorch's vocabulary of 2024, in which ``B`` is the input half and ``BW`` the full backward.

    Raises:
        ScheduleError: The text is no op. The whole text must match: ``2F0xyz`` is an error.

    Examples:
        >>> parse_op("1B3")
        Op(stage=1, kind=<Kind.B: 1>, microbatch=3)
        >>> str(parse_op("0B3", legacy=True)), str(parse_op("0BW3", legacy=True))
        ('0I3', '0B3')
    """
    compact = re.sub(r"\s+", "", text)
    if pair := _PAIR.fullmatch(compact):
        first, second = _parse_single(pair[1], text, legacy), _parse_single(pair[2], text, legacy)
        if first.kind not in COMPUTE_KINDS or second.kind not in COMPUTE_KINDS:
            raise ScheduleError(f"{_shown(text)} pairs ops of which one does not compute; a pair holds two of F, B, I, W, R, U")
        if pair[3] == "OVERLAP_F_B" and (first.kind is not Kind.F or second.kind not in (Kind.B, Kind.I)):
            raise ScheduleError(f"{_shown(text)} must hold a forward, then a backward; other pairs are written (a;b)PAIR")
        return Pair(first, second)
    return _parse_single(compact, text, legacy)


def _parse_single(compact: str, text: str, legacy: bool) -> Op:
    if legacy and (old := _LEGACY.fullmatch(compact)):
        return Op(int(old[1]), Kind.B if old[2] == "BW" else Kind.I, int(old[3]))
    match = _OP.fullmatch(compact)
    if match is None:
        hint = " (the old vocabulary: read it with legacy=True, --legacy)" if _LEGACY.fullmatch(compact) else ""
        raise ScheduleError(f"{_shown(text)} is not an op{hint}; an op is stage, kind, microbatch, as in 2F0, 1B3, 0W1 or 1SEND_F2")
    kind = Kind[match[2]]
    if match[3] and kind in _WITHOUT_MICROBATCH:
        raise ScheduleError(f"{_shown(text)} has a microbatch, and {kind.name} belongs to none; write {match[1]}{kind.name}")
    if not match[3] and kind not in _WITHOUT_MICROBATCH | _MICROBATCH_OPTIONAL:
        raise ScheduleError(f"{_shown(text)} lacks its microbatch, as in {match[1]}{kind.name}0")
    return Op(int(match[1]), kind, int(match[3]) if match[3] else None)


def _shown(text: str) -> str:
    """The text for an error message: quoted, control characters escaped, never longer than a line."""
    return repr(text.strip() if len(text) <= 60 else text.strip()[:57] + "...")
