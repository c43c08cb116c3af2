"""Ops as text: what PyTorch writes is read back exactly, and nothing else is read at all."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import Kind, Op, Pair, ScheduleError
from pipesim.op import COMPUTE_KINDS, parse_op

WITHOUT_MICROBATCH = (Kind.UNSHARD, Kind.RESHARD)
NUMBERS = st.integers(0, 10**9 - 1)


@st.composite
def ops(draw: st.DrawFn, kinds: tuple[Kind, ...] = tuple(Kind)) -> Op:
    kind = draw(st.sampled_from(kinds))
    microbatch = None if kind in WITHOUT_MICROBATCH else draw(NUMBERS)
    return Op(draw(NUMBERS), kind, microbatch)


@settings(deadline=None, database=None)
@given(ops())
def test_op_round_trips(op: Op) -> None:
    assert parse_op(str(op)) == op


@settings(deadline=None, database=None)
@given(ops(COMPUTE_KINDS), ops(COMPUTE_KINDS))
def test_pair_round_trips(first: Op, second: Op) -> None:
    pair = Pair(first, second)
    assert parse_op(str(pair)) == pair


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("2F0", Op(2, Kind.F, 0)),
        (" 1 F 3 ", Op(1, Kind.F, 3)),
        ("12B345", Op(12, Kind.B, 345)),
        ("0I1", Op(0, Kind.I, 1)),
        ("0W1", Op(0, Kind.W, 1)),
        ("0R2", Op(0, Kind.R, 2)),
        ("0U3", Op(0, Kind.U, 3)),
        ("1SEND_F2", Op(1, Kind.SEND_F, 2)),
        ("2RECV_B2", Op(2, Kind.RECV_B, 2)),
        ("0UNSHARD", Op(0, Kind.UNSHARD, None)),
        ("0REDUCE_GRAD", Op(0, Kind.REDUCE_GRAD, None)),
        ("0REDUCE_GRAD1", Op(0, Kind.REDUCE_GRAD, 1)),
        ("0OFFLOAD4", Op(0, Kind.OFFLOAD, 4)),
        # PyTorch writes pairs so, and DualPipe pairs a forward with the input half too
        ("(4F4;3B0)OVERLAP_F_B", Pair(Op(4, Kind.F, 4), Op(3, Kind.B, 0))),
        ("(4F4; 3I0) OVERLAP_F_B", Pair(Op(4, Kind.F, 4), Op(3, Kind.I, 0))),
        ("(0F0;0F1)PAIR", Pair(Op(0, Kind.F, 0), Op(0, Kind.F, 1))),
    ],
)
def test_reads(text: str, op: object) -> None:
    assert parse_op(text) == op


@pytest.mark.parametrize(
    "text",
    [
        "", "0X0", "F0", "0F", "2F0xyz", "x2F0", "-1F0", "0F-1", "0F1.0", "0f0", "0FF0", "0UNSHARD1", "0SEND_F", "1e3F0", "٣F0", "0F²",
        "0F1000000000000", "(0F0;0B0)", "(0F0;0B0)OVERLAP", "(0B0;0F0)OVERLAP_F_B", "(0F0;1F0)OVERLAP_F_B", "(0F0)PAIR", "((0F0;0F1)PAIR;0F2)PAIR",
        "(0F0;0SEND_F0)PAIR", "0F0;0B0", "0BW0", "None",
    ],
)  # fmt: skip
def test_refuses_everything_else_in_one_line(text: str) -> None:
    with pytest.raises(ScheduleError) as error:
        parse_op(text)
    assert "\n" not in str(error.value)


def test_error_shows_control_characters_escaped_and_long_texts_cut() -> None:
    with pytest.raises(ScheduleError) as error:
        parse_op("\x1b[31m" + "x" * 10_000)
    assert "\x1b" not in str(error.value)
    assert len(str(error.value)) < 300


def test_old_vocabulary_is_read_only_when_asked_for() -> None:
    # pytorch#138886: B was the input half, BW the full backward
    assert parse_op("0B3", legacy=True) == Op(0, Kind.I, 3)
    assert parse_op("0BW3", legacy=True) == Op(0, Kind.B, 3)
    assert parse_op("0W3", legacy=True) == Op(0, Kind.W, 3)
    assert parse_op("(0F1;1BW0)OVERLAP_F_B", legacy=True) == Pair(Op(0, Kind.F, 1), Op(1, Kind.B, 0))
    with pytest.raises(ScheduleError, match="legacy"):
        parse_op("0BW3")


def test_ops_and_errors_survive_pickling() -> None:
    pair = Pair(Op(0, Kind.F, 1), Op(1, Kind.B, 0))
    assert pickle.loads(pickle.dumps(pair)) == pair
    assert str(pickle.loads(pickle.dumps(ScheduleError("text")))) == "text"
