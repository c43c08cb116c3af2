"""Text and CSV both ways, and the files that others have made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import Kind, Op, Pair, Schedule, ScheduleError, UniformCosts, generate, simulate
from pipesim.formats import csv_text, parse_csv
from pipesim.op import COMPUTE_KINDS

QUICK = settings(max_examples=50, deadline=None, database=None)


@st.composite
def streams(draw: st.DrawFn) -> list[list[Any]]:
    """Any ops in any order, devices without ops too: round trips do not need a legal schedule."""
    small = st.integers(0, 30)
    op = st.builds(lambda s, k, i: Op(s, k, None if k in (Kind.UNSHARD, Kind.RESHARD) else i), small, st.sampled_from(Kind), small)
    compute = st.builds(Op, small, st.sampled_from(COMPUTE_KINDS), small)
    return draw(st.lists(st.lists(st.one_of(op, st.builds(Pair, compute, compute)), max_size=6), min_size=1, max_size=5))


@QUICK
@given(streams())
def test_csv_round_trips(rows: list[list[Any]]) -> None:
    schedule = Schedule.from_streams(rows)
    assert parse_csv(csv_text(schedule)) == schedule
    assert schedule.streams == rows


@QUICK
@given(streams(), st.sampled_from(["flush", "stash", "double_buffer", "latest", "predict"]), st.text(max_size=20), st.booleans())
def test_text_round_trips_whatever_the_name(rows: list[list[Any]], weights: Any, name: str, graph: bool) -> None:
    schedule = Schedule.from_streams(rows, name=name, weights=weights, graph=[(0, 1), (0, 2)] if graph else None, offload_to={0: 2, 1: None})
    again = Schedule.from_text(str(schedule))
    assert again == schedule
    assert str(again) == str(schedule)


@QUICK
@given(streams(), st.randoms(use_true_random=False))
def test_csv_oddities_that_are_accepted(rows: list[list[Any]], random: Any) -> None:
    """Spaces, empty cells (idle), trailing commas, CRLF and a byte-order mark change nothing."""
    schedule = Schedule.from_streams([[*row, Op(0, Kind.F, 0)] for row in rows])
    lines = []
    for row in schedule.streams:
        cells = []
        for slot in row:
            cells += [random.choice(["", " ", "\t"])] * random.randint(0, 2)
            cells.append(random.choice(["", " "]) + str(slot) + random.choice(["", "  "]))
        lines.append(",".join(cells) + "," * random.randint(0, 3))
    text = random.choice(["", "\ufeff"]) + random.choice(["\n", "\r\n"]).join(lines) + random.choice(["", "\n", "\r\n\r\n"])
    assert parse_csv(text) == schedule


def test_csv_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n1F0,1B0,\r\n")
    schedule = Schedule.from_csv(path)
    assert schedule == Schedule.from_text("0F0 0B0\n1F0 1B0")
    assert schedule.name == "two"
    schedule.to_csv(tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == b"0F0,0B0\r\n1F0,1B0\r\n"  # what csv.writer, and so PyTorch, writes


def test_I01_csv_schedules() -> None:
    schedule = parse_csv("0F0, 0F1 ,,0B0\n 1F0,1I0,1W0,")
    assert [[str(op) for op in stream] for stream in schedule.streams] == [["0F0", "0F1", "0B0"], ["1F0", "1I0", "1W0"]]
    with pytest.raises(ScheduleError, match="1F1 is missing"):
        schedule.check()
    for text, row, column in (("0F0,0X0", 1, 2), ("0F0\n,F0", 2, 2)):
        with pytest.raises(ScheduleError, match=f"row {row}, column {column}"):
            parse_csv(text)


@pytest.mark.parametrize("text", ['0F0,"0B0', '0F0,"0B0"x', "0F0;0B0", "0F0\x000B0", "0F0 0B0", "[0F0]"])
def test_csv_oddities_that_are_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        parse_csv(text)


def test_a_device_without_ops_keeps_its_row() -> None:
    for rows in ([[], ["0F0", "0B0"], []], [["0F0", "0B0"], [], ["1F0", "1B0"]]):
        schedule = Schedule.from_streams(rows)
        assert parse_csv(csv_text(schedule)).num_devices == 3
        assert Schedule.from_text(str(schedule)) == schedule


def test_text_takes_what_people_paste() -> None:
    expected = Schedule.from_streams([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    for text in (
        "0F0 0F1 .   .   0B0 .   0B1\n.   1F0 1B0 1F1 1B1",
        "\n  device 0 | 0F0 0F1 0B0 0B1\n\n  device 1 | 1F0 1B0 1F1 1B1\n",
        "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1",
        "0: 0F0 0F1 0B0 0B1\r\n1: 1F0 1B0 1F1 1B1\r\n",
    ):
        assert Schedule.from_text(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device 1 | 0F0", "device 0 comes next"),
        ("0F0 0X0", "line 1, word 2"),
        ("weights: none\n0F0", "weights must be one of"),
        ("graph: 0-1\n0F0", "not an edge"),
        ("graph: 0>host\n0F0", "not an edge"),
        ("offload: 0\n0F0", "not an edge"),
    ],
)
def test_text_errors_name_the_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_text(text)


def test_placement_turns_a_replica_into_an_error() -> None:
    text = "0F0,0B0\n1F0,1B0,0F1,0B1\n1F1,1B1"  # microbatch 1 of stage 0 on device 1: a replica, or a typing error
    assert parse_csv(text).check().replicas == {0: (0, 1), 1: (1, 2)}
    with pytest.raises(ScheduleError, match="stage 0 belongs to device 0, not to device 1"):
        parse_csv(text, placement={0: 0, 1: (1, 2)})


# -- files that others have made -----------------------------------------------------------------------------------------


def test_old_vocabulary_file_of_compute_ops(shared_data: Path) -> None:
    path = shared_data / "pytorch" / "zb1p_2rank_2stagep_compute.OLDVOCAB.csv"
    schedule = Schedule.from_csv(path, legacy=True).check()
    assert (schedule.num_devices, schedule.num_stages, schedule.num_microbatches) == (2, 4, 8)
    assert schedule.has(Kind.I, Kind.W)
    assert not schedule.has(Kind.B)
    # read in today's vocabulary every B would be a full backward beside its W: refused, and not taken for something else
    with pytest.raises(ScheduleError, match="full backward, and its halves"):
        Schedule.from_csv(path).check()


def test_old_vocabulary_file_with_communication(shared_data: Path) -> None:
    path = shared_data / "pytorch" / "zb1p_2rank_2stagep_comms.OLDVOCAB.csv"
    schedule = Schedule.from_csv(path, legacy=True).check()
    assert (schedule.num_devices, schedule.num_stages, schedule.num_microbatches) == (2, 4, 8)
    assert schedule.has(Kind.B)
    assert schedule.has(Kind.I)
    run = simulate(schedule.without_communication(), UniformCosts())
    assert sum(run.busy) == 4 * 8 * 3  # F, I and W of 1 each, B = I + W
    with pytest.raises(ScheduleError, match="legacy=True"):  # 0BW0, which PyTorch's own pattern would take for 0B
        Schedule.from_csv(path)


@pytest.mark.parametrize(
    "name",
    [
        "pytorch/torchtitan_custom_schedule",
        "pytorch/dualpipev_4rank_10mb",
        "dualpipe/DualPipeV_p4_m10",
        "dualpipe/DualPipe_p8_m16",
        "zero_bubble/ZBV_p4_m8",
    ],
)
def test_files_of_frameworks_are_read_checked_and_written_back(name: str, shared_data: Path, tmp_path: Path) -> None:
    path = shared_data / f"{name}.csv"
    schedule = Schedule.from_csv(path).check()
    schedule.to_csv(tmp_path / "again.csv")
    cells = [[cell.strip() for cell in line.split(",") if cell.strip()] for line in path.read_text().splitlines()]
    assert [line.split(",") for line in (tmp_path / "again.csv").read_text().splitlines()] == cells


def test_torchtitans_schedule_runs_on_its_loop_placement(shared_data: Path) -> None:
    """p=2, v=2, m=8 with split backwards: every device works 2·8·3 slots."""
    schedule = Schedule.from_csv(shared_data / "pytorch" / "torchtitan_custom_schedule.csv").check()
    assert schedule.check_placement({0: 0, 2: 0, 1: 1, 3: 1}) is schedule
    run = simulate(schedule, UniformCosts())
    assert run.busy == [48, 48]


def test_generated_schedules_round_trip_through_a_file(tmp_path: Path) -> None:
    for name in ("gpipe", "1f1b", "naive", "pipedream"):
        schedule = generate(name, devices=3, microbatches=5)
        schedule.to_csv(tmp_path / "s.csv")
        assert Schedule.from_csv(tmp_path / "s.csv", weights=schedule.weights) == schedule


def test_rows_end_where_csv_says_so():
    # CRLF text written once more in text mode; a form feed or a paragraph mark ends no row
    assert parse_csv("0F0,0B0\r\r\n1F0,1B0\r\r\n").num_devices == 2
    assert parse_csv("0F0,\x0c0B0\r1F0,1B0").num_devices == 2
