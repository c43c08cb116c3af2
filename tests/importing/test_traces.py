"""Importing hand-written traces; expected times are worked out in the comments. Cases I02, I04, I07, V16 of ../shared/cases.md."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipesim import Schedule, ScheduleError, Timeline, UniformCosts, generate, load, read_traces, simulate
from pipesim.importing import import_traces
from pipesim.viz.trace import write_trace


def x(name: str, ts: Any, dur: Any, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur} | more


def write(folder: Path, rank: int | None, events: Sequence[Any], name: str | None = None, **about: Any) -> Path:
    """One rank's file as Kineto writes it."""
    info = {} if rank is None else {"distributedInfo": {"backend": "gloo", "rank": rank, "world_size": 2}}
    path = folder / (name or f"trace_{rank}.json")
    text = json.dumps({"schemaVersion": 1, **info, "displayTimeUnit": "ms", "baseTimeNanoseconds": 0, **about, "traceEvents": events})
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


# Two stages, one microbatch; F takes 10 us, B 20 us, a message 5 us. SEND and RECV end when the message is there.
#   rank 0: F 0-10   SEND_F 10-15                       RECV_B 45-50  B 50-70
#   rank 1:          RECV_F 10-15  F 15-25  B 25-45  SEND_B 45-50
RANK0 = [x("PP:0F0", 0, 10), x("PP:0SEND_F0", 10, 5), x("PP:0RECV_B0", 45, 5), x("PP:0B0", 50, 20)]
RANK1 = [x("PP:1RECV_F0", 10, 5), x("PP:1F0", 15, 10), x("PP:1B0", 25, 20), x("PP:1SEND_B0", 45, 5)]


def later(events: Sequence[dict[str, Any]], by: float) -> list[dict[str, Any]]:
    return [event | {"ts": event["ts"] + by} for event in events]


def microseconds(run: Timeline) -> dict[str, tuple[float, float]]:
    """Op to (start, end) in the first step."""
    schedule = run.schedule
    return {
        str(schedule.slot(slot)): (round(float(run.start[0, slot]) * 1e6, 3), round(float(run.end[0, slot]) * 1e6, 3))
        for slot in range(schedule.num_slots)
    }


TRUE = {"0F0": (0, 10), "0B0": (50, 70), "1F0": (15, 25), "1B0": (25, 45)}


def test_two_ranks(tmp_path: Path) -> None:
    found = import_traces([write(tmp_path, 1, RANK1), write(tmp_path, 0, RANK0)])
    run = found.timeline
    assert microseconds(run) == TRUE
    assert (run.source, run.unit, run.steps, run.makespan) == ("measured", "s", 1, pytest.approx(70e-6))
    assert run.schedule == Schedule.from_text("0F0 0B0\n1F0 1B0")
    assert run.sent.tolist() == [pytest.approx([10e-6, 45e-6])]
    assert run.departed.tolist() == [pytest.approx([10e-6, 45e-6])]
    assert run.arrived.tolist() == [pytest.approx([15e-6, 50e-6])]
    assert found.problems == ()
    assert run.info["imported"] == "torch.profiler traces of 2 ranks"
    assert run.info["ranks from"] == "distributedInfo"
    assert run.info["times"] == "CPU annotations"


def test_the_run_can_be_saved_and_all_figures_asked(tmp_path: Path) -> None:
    run = read_traces([write(tmp_path, 0, RANK0), write(tmp_path, 1, RANK1)])
    run.save(tmp_path / "run.json.gz")
    again = load(tmp_path / "run.json.gz")
    assert again.figures() == run.figures()
    assert "imported torch.profiler traces" in again.summary()


def test_a_folder_of_compressed_files_by_rank_in_their_names(tmp_path: Path) -> None:
    events = {0: RANK0, 1: RANK1}
    for rank in (0, 1):
        write(tmp_path, None, events[rank], f"trace_rank{rank}.json.gz")
    (tmp_path / "notes.txt").write_text("no trace")
    run = read_traces(tmp_path)
    assert microseconds(run) == TRUE
    assert run.info["ranks from"] == "file name"


def test_files_without_rank_count_in_their_order(tmp_path: Path) -> None:
    # a9 before a10: numbers in names are numbers
    write(tmp_path, None, RANK0, "a9.json")
    write(tmp_path, None, RANK1, "a10.json")
    run = read_traces(tmp_path)
    assert microseconds(run) == TRUE
    assert run.info["ranks from"] == "order of the files"


def test_files_of_which_only_some_say_their_rank_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="does not say its rank"):
        read_traces([write(tmp_path, 0, RANK0), write(tmp_path, None, RANK1, "b.json")])
    with pytest.raises(ScheduleError, match="both of rank 0"):
        read_traces([write(tmp_path, 0, RANK0), write(tmp_path, 0, RANK1, "b.json")])


# -- clocks --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["ms", "ns"])
def test_v16_times_are_microseconds_whatever_display_time_unit_says(unit: str, tmp_path: Path) -> None:
    run = read_traces([write(tmp_path, 0, RANK0, displayTimeUnit=unit), write(tmp_path, 1, RANK1, displayTimeUnit=unit)])
    assert microseconds(run) == TRUE


def test_base_times_are_added_without_losing_nanoseconds(tmp_path: Path) -> None:
    # rank 1 counts from 3000 s later: its ts are 3e9 us smaller. At 1.7e18 ns a float64 has steps of 256 ns.
    base = 1_700_000_000_123_456_789
    run = read_traces(
        [
            write(tmp_path, 0, later(RANK0, 3e9 + 7), baseTimeNanoseconds=base),
            write(tmp_path, 1, later(RANK1, 7), baseTimeNanoseconds=base + 3_000_000_000_000),
        ]
    )
    assert microseconds(run) == TRUE


@pytest.mark.parametrize("late", [0.0, 1000.0, -123_456_789.0])
def test_ranks_whose_clocks_differ_are_aligned_by_their_messages(late: float, tmp_path: Path) -> None:
    # Rank 1's clock is off by `late`. A RECV ends 5 us after its SEND begins, both ways: so the shift lies within -late +- 5 us, and
    # the middle is right here because both ways take the same time.
    found = import_traces([write(tmp_path, 0, RANK0), write(tmp_path, 1, later(RANK1, late))])
    assert microseconds(found.timeline) == TRUE
    assert found.clocks is not None
    assert found.clocks.shift.tolist() == pytest.approx([0, -late * 1e-6], abs=2e-9)
    assert found.clocks.uncertainty == pytest.approx(5e-6, abs=2e-9)
    assert "+-5 µs" in found.timeline.info["notes"]


def test_one_machine_has_one_clock(tmp_path: Path) -> None:
    # the way back takes 1 us only: the middle would shift rank 1 by 2 us, but both ranks say the same host
    quick = [*RANK0[:2], x("PP:0RECV_B0", 45, 1), x("PP:0B0", 46, 20)]
    shifted = read_traces([write(tmp_path, 0, quick), write(tmp_path, 1, RANK1)])
    assert microseconds(shifted)["1F0"] == (13, 23)
    same = read_traces([write(tmp_path, 0, quick, host_name="box"), write(tmp_path, 1, RANK1, host_name="box")])
    assert microseconds(same)["1F0"] == (15, 25)


def test_labels_that_only_post_a_receive_do_not_mislead(tmp_path: Path) -> None:
    # PyTorch on CPU posts the receive (RECV_F 0-1) and waits within the op: rank 1's F0 is asked for at 1 and ends at 25.
    # Then a RECV's end proves nothing, and neither does the op's start; its end does: F0 ends 15 us after 0F0, 0B0 25 us after 1B0.
    one = [x("PP:1RECV_F0", 0, 1), x("PP:1F0", 1, 24), x("PP:1B0", 25, 20), x("PP:1SEND_B0", 45, 1)]
    zero = [x("PP:0F0", 0, 10), x("PP:0SEND_F0", 10, 1), x("PP:0RECV_B0", 11, 1), x("PP:0B0", 12, 58)]
    found = import_traces([write(tmp_path, 0, zero, host_name="box"), write(tmp_path, 1, one, host_name="box")])
    assert found.clocks is not None
    assert not found.clocks.shift.any()
    assert not found.clocks.contradiction
    assert any("before they leave" in note for note in found.notes)


def test_the_wait_for_a_message_is_not_time_of_the_op_where_gloo_shows_it(tmp_path: Path) -> None:
    # gloo:recv 0-15 was posted within RECV_F and ends when its message was seen, so F0 itself is 15-25; B likewise 50-70
    one = [x("PP:1RECV_F0", 0, 1), x("gloo:recv", 0.5, 14.5), x("PP:1F0", 1, 24), x("PP:1B0", 25, 20), x("PP:1SEND_B0", 45, 1)]
    zero = [x("PP:0F0", 0, 10), x("PP:0SEND_F0", 10, 1), x("PP:0RECV_B0", 11, 1), x("gloo:recv", 11.5, 38.5), x("PP:0B0", 12, 58)]
    run = read_traces([write(tmp_path, 0, zero, host_name="box"), write(tmp_path, 1, one, host_name="box")])
    assert microseconds(run) == TRUE
    assert run.arrived.tolist() == [pytest.approx([15e-6, 50e-6])]


# -- GPUs ----------------------------------------------------------------------------------------------------------------------


def gpu(name: str, ts: float, dur: float, stream: int = 7) -> dict[str, Any]:
    return x(name, ts, dur, cat="gpu_user_annotation", pid=0, tid=stream)


def test_gpu_annotations_are_preferred_and_the_busiest_stream_is_the_compute_stream(tmp_path: Path) -> None:
    # The CPU launches early; the GPU runs at the true times. F also shows on the stream of NCCL (20), for a microsecond.
    zero = [x("PP:0F0", -50, 3), x("PP:0SEND_F0", -47, 1), x("PP:0RECV_B0", -46, 1), x("PP:0B0", -45, 3)]
    one = [x("PP:1RECV_F0", -50, 1), x("PP:1F0", -49, 3), x("PP:1B0", -46, 3), x("PP:1SEND_B0", -43, 1)]
    zero += [gpu("PP:0F0", 0, 10), gpu("PP:0F0", 9, 1, 20), gpu("PP:0SEND_F0", 10, 5, 20), gpu("PP:0RECV_B0", 45, 5, 20), gpu("PP:0B0", 50, 20)]
    one += [gpu("PP:1RECV_F0", 10, 5, 20), gpu("PP:1F0", 15, 10), gpu("PP:1B0", 25, 20), gpu("PP:1SEND_B0", 45, 5, 20)]
    run = read_traces([write(tmp_path, 0, zero), write(tmp_path, 1, one)])
    assert microseconds(run) == TRUE
    assert run.info["times"] == "GPU annotations"
    assert run.arrived.tolist() == [pytest.approx([15e-6, 50e-6])]


def test_an_op_that_ran_nothing_on_the_gpu_takes_no_time(tmp_path: Path) -> None:
    # PyTorch's first stage: I does nothing and W runs the whole backward. On the GPU there is no 0I0.
    launched = [x("PP:0F0", 0, 1), x("PP:0I0", 1, 1), x("PP:0W0", 2, 1)]
    run = read_traces([write(tmp_path, 0, [*launched, gpu("PP:0F0", 10, 10), gpu("PP:0W0", 25, 20)])])
    assert microseconds(run) == {"0F0": (0, 10), "0I0": (10, 10), "0W0": (15, 35)}
    assert "ran nothing on the GPU (0I0)" in run.info["notes"]


def test_a_cuda_run_without_gpu_annotations_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, None, [x("PP:0F0", 0, 1), x("PP:0B0", 1, 1)], distributedInfo={"backend": "nccl", "rank": 0})
    assert "its times are those of launches" in read_traces(path).info["notes"]


# -- iterations ----------------------------------------------------------------------------------------------------------------


def test_an_op_that_comes_again_begins_an_iteration(tmp_path: Path) -> None:
    # the second is 1000 us later and 1 us slower in 1B0
    slower = [*RANK1[:2], x("PP:1B0", 25, 21), x("PP:1SEND_B0", 46, 4)]
    events = [*RANK0, *later(RANK0, 1000)], [*RANK1, *later(slower, 1000)]
    found = import_traces([write(tmp_path, rank, own, host_name="box") for rank, own in enumerate(events)])
    run = found.timeline
    assert run.steps == 2
    assert (run.start[1, 0] * 1e6, run.end[1, 3] * 1e6) == (pytest.approx(1000), pytest.approx(1046))
    assert run.arrived[1].tolist() == pytest.approx([1015e-6, 1050e-6])
    assert run.barrier  # no rank began the second before all had ended the first


def test_profiler_steps_tell_iterations_apart_even_if_the_first_is_cut_off(tmp_path: Path) -> None:
    # Rank 0 was caught in the middle of an iteration: without ProfilerStep its 0B0 would be taken for one of the next.
    zero = [x("ProfilerStep#3", -100, 95), RANK0[3] | {"ts": -90}, x("ProfilerStep#4", -1, 99), *RANK0]
    one = [x("ProfilerStep#3", -100, 95), *later(RANK1, -99), x("ProfilerStep#4", -1, 99), *RANK1]
    found = import_traces([write(tmp_path, 0, zero), write(tmp_path, 1, one)])
    assert microseconds(found.timeline) == TRUE
    assert any("1 of 2 iterations left out: ProfilerStep#3, rank 0 lacks 0F0" in note for note in found.notes)


def test_several_iterations_within_one_profiler_step(tmp_path: Path) -> None:
    # as with gradient accumulation over calls of schedule.step()
    step = x("ProfilerStep#1", -1, 5000)
    run = read_traces([write(tmp_path, rank, [step, *events, *later(events, 1000)]) for rank, events in enumerate((RANK0, RANK1))])
    assert run.steps == 2


def test_ranks_with_different_numbers_of_iterations(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"different numbers of iterations, \[2, 1\]"):
        read_traces([write(tmp_path, 0, [*RANK0, *later(RANK0, 1000)]), write(tmp_path, 1, RANK1)])


def test_copies_of_a_pipeline_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"ranks 0 and 1 both ran 0F0: they are copies \(data parallel\)"):
        read_traces([write(tmp_path, 0, RANK0), write(tmp_path, 1, RANK0)])


# -- the schedule --------------------------------------------------------------------------------------------------------------


def test_a_rank_whose_messages_go_to_a_stage_that_no_trace_has(tmp_path: Path) -> None:
    """Without the last rank what is left looks like a shorter pipeline."""
    with pytest.raises(ScheduleError, match=r"rank 0 has 0SEND_F0, and no trace has an op of stage 1.*all ranks of the pipeline"):
        read_traces(write(tmp_path, 0, RANK0))


def test_a_given_schedule_keeps_its_name_and_says_which_device_a_rank_is(tmp_path: Path) -> None:
    # ranks 0 and 1 stand for devices 1 and 0
    schedule = Schedule.from_text("1F0 1B0\n0F0 0B0", name="turned")
    run = read_traces([write(tmp_path, 0, RANK0), write(tmp_path, 1, RANK1)], schedule)
    assert run.schedule == schedule
    assert run.schedule.name == "turned"
    assert microseconds(run) == TRUE


def test_updates_of_a_given_schedule_are_left_out_where_the_trace_has_none(tmp_path: Path) -> None:
    schedule = Schedule.from_text("0F0 0B0 0U0\n1F0 1B0 1U0")
    run = read_traces([write(tmp_path, 0, RANK0), write(tmp_path, 1, RANK1)], schedule)
    assert microseconds(run) == TRUE
    assert "the schedule's U ops are not in the traces" in run.info["notes"]


def test_another_order_than_that_of_the_given_schedule(tmp_path: Path) -> None:
    events = [x("PP:0F0", 0, 1), x("PP:0F1", 1, 1), x("PP:0B0", 2, 1), x("PP:0B1", 3, 1)]
    with pytest.raises(ScheduleError, match="no iteration is complete: iteration 0, rank 0 has another order: 0F1 where 0B0 is expected"):
        read_traces(write(tmp_path, 0, events), Schedule.from_text("0F0 0B0 0F1 0B1"))


def test_i02_communication_and_its_tokens_are_no_ops_of_the_compute_lane(tmp_path: Path) -> None:
    zero = [x("PP:0UNSHARD", -3, 2), *RANK0, x("PP:0REDUCE_GRAD", 71, 2), x("PP:0RESHARD", 74, 2)]
    found = import_traces([write(tmp_path, 0, zero), write(tmp_path, 1, RANK1)])
    assert microseconds(found.timeline) == TRUE
    assert found.problems == ()


def test_pairs(tmp_path: Path) -> None:
    events = [x("PP:0F0", 0, 10), x("PP:(0F1;0B0)OVERLAP_F_B", 10, 30), x("PP:0B1", 40, 20)]
    assert microseconds(read_traces(write(tmp_path, 0, events))) == {"0F0": (0, 10), "(0F1;0B0)OVERLAP_F_B": (10, 40), "0B1": (40, 60)}


def test_gpipe_of_one_stage_per_rank_has_labels_of_its_own(tmp_path: Path) -> None:
    # its slices hold the receive (seen at 15) and the posting of the send (at 10 and 45)
    zero = [x("Forward 0", 0, 12), x("gloo:send", 10, 90), x("Backward 0", 20, 50), x("gloo:recv", 21, 29)]
    one = [x("Forward 0", 1, 24), x("gloo:recv", 2, 13), x("Backward 0", 25, 22), x("gloo:send", 45, 10)]
    run = read_traces([write(tmp_path, 0, zero, host_name="box"), write(tmp_path, 1, one, host_name="box")])
    assert microseconds(run) == TRUE
    assert "taken for stage 1" in run.info["notes"]


def test_schedule_1f1b_of_pytorch_labels_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [x("c10d::send", 0, 1, cat="cpu_op"), x("aten::mm", 0, 1, cat="cpu_op")])
    with pytest.raises(ScheduleError, match=r"holds no ops: no annotation such as PP:0F0.*Schedule1F1B labels none"):
        read_traces(path)


# -- what is malformed ---------------------------------------------------------------------------------------------------------


def test_i04_slices_that_overlap_are_reported_and_share_no_time(tmp_path: Path) -> None:
    # [0,100], [100,200], [200,300], [280,350], [360,400]: busy is the union, 390; their sum is 410; the gap is [350, 360]
    times = [(0, 100), (100, 100), (200, 100), (280, 70), (360, 40)]
    names = ["0F0", "0F1", "0F2", "0F3", "0F4"]
    found = import_traces(write(tmp_path, 0, [x(f"PP:{name}", *time) for name, time in zip(names, times, strict=True)]))
    run = found.timeline
    assert run.busy == [pytest.approx(390e-6)]
    assert microseconds(run)["0F3"] == (300, 350)
    (problem,) = found.problems
    assert "trace_0.json, event 3: 0F3 overlaps 0F2 (event 2)" in problem
    assert problem in run.info["malformed"]


def test_slices_inside_others_are_reported(tmp_path: Path) -> None:
    found = import_traces(write(tmp_path, 0, [x("PP:0F0", 0, 100), x("PP:0F0", 10, 20), x("PP:0F1", 30, 20), x("PP:0F2", 100, 5)]))
    assert microseconds(found.timeline) == {"0F0": (0, 100), "0F1": (100, 100), "0F2": (100, 105)}
    assert [problem.partition(", ")[2] for problem in found.problems] == [
        "event 1: 0F0 lies inside 0F0 (event 0); left out",
        "event 2: 0F1 lies inside 0F0 (event 0), which has the time that they share",
    ]


def test_i07_malformed_events_are_reported_and_the_other_iteration_is_imported(tmp_path: Path) -> None:
    begin = {"ph": "B", "name": "PP:0B0", "pid": 1, "tid": 1, "ts": 150}
    bad = [x("PP:0F0", 100, -1), begin, {"ph": "E", "name": "PP:0F9", "pid": 1, "tid": 1, "ts": 160}]
    steps = [x("ProfilerStep#1", -1, 90), x("ProfilerStep#2", 95, 100)]
    found = import_traces(write(tmp_path, 0, [*steps, x("PP:0F0", 0, 10), x("PP:0B0", 10, 20), *bad]))
    assert microseconds(found.timeline) == {"0F0": (0, 10), "0B0": (10, 30)}
    assert found.timeline.steps == 1
    assert [problem.split(", ")[1] for problem in found.problems] == [
        "event 4: has dur -1; right is a finite number of at least 0",
        "event 5: begins 'PP:0B0' on pid 1",
        "event 6: ends 'PP:0F9'",
    ]


def test_an_iteration_that_lacks_an_op_for_a_malformed_event_is_refused_and_the_event_named(tmp_path: Path) -> None:
    one = [*RANK1[:2], RANK1[2] | {"dur": "long"}, RANK1[3]]
    with pytest.raises(ScheduleError, match=r"(?s)is no schedule:.*malformed, and so not imported: .*trace_1.json, event 2: has dur 'long'"):
        read_traces([write(tmp_path, 0, RANK0), write(tmp_path, 1, one)])


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e400", '"7"', "null", "true", "[1]", "1" * 400])
@pytest.mark.parametrize("field", ["ts", "dur"])
def test_numbers_that_are_none_are_malformed(field: str, value: str, tmp_path: Path) -> None:
    other = {"ts": "dur", "dur": "ts"}[field]
    path = tmp_path / "hostile.json"
    path.write_text(f'[{{"ph":"X","name":"PP:0F0","{other}":1,"{field}":{value}}}]')
    with pytest.raises(ScheduleError, match=f"event 0: has {field}"):
        read_traces(path)


@pytest.mark.parametrize("name", ["999999999F0", "0F999999999", "(0F0;0F1", "0Q0", "0" * 10_000 + "F0"])
def test_labels_of_nonsense(name: str, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError):
        read_traces(write(tmp_path, 0, [x(f"PP:{name}", 0, 10)]))


def test_times_that_no_clock_shows(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"event 1: lies at 1\.7e\+308 microseconds"):
        read_traces(write(tmp_path, 0, [x("PP:0F0", -1.7e308, 1), x("PP:0F1", 1.7e308, 1)]))


@pytest.mark.parametrize("nested", [True, False])
def test_many_slices_that_cover_each_other_end_soon(nested: bool, tmp_path: Path) -> None:
    # what must not happen is work that grows with the square
    events = [x(f"PP:0F{number}", number, 20_000 - number if nested else 1e6) for number in range(10_000)]
    events += [x("gloo:recv", number * 1e-3, 1e6) for number in range(10_000)]
    events += [x(f"PP:0RECV_F{number}", number * 1e-3, 1e6) for number in range(10_000)]
    found = import_traces(write(tmp_path, 0, events))
    assert len(found.problems) == 9_999
    assert "and 9989 more" in found.timeline.info["malformed"]


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"baseTimeNanoseconds": "noon"}, "baseTimeNanoseconds is 'noon'"),
        ({"baseTimeNanoseconds": float("nan")}, "baseTimeNanoseconds is 'nan'"),
        ({"baseTimeNanoseconds": 10**400}, "baseTimeNanoseconds is '1000"),
        ({"distributedInfo": {"rank": "zero"}}, "distributedInfo.rank is 'zero'"),
        ({"distributedInfo": {"rank": -1}}, "distributedInfo.rank is '-1'"),
        ({"distributedInfo": {"rank": 10**30}}, "distributedInfo.rank is '1000"),
        ({"otherData": {"ops_without_duration_left_out": 0, "graph": 7, "time": 5}}, "no op that takes time"),
    ],
)
def test_what_a_file_says_about_itself_may_be_nonsense(about: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=message):
        read_traces(write(tmp_path, None, [x("PP:0F0", 0, 10, tid=1)], "t.json", **about))


@pytest.mark.parametrize("about", [{"distributedInfo": [1]}, {"distributedInfo": {"backend": 5}}, {"host_name": {}}, {"otherData": "text"}])
def test_what_is_not_needed_is_passed_over(about: dict[str, Any], tmp_path: Path) -> None:
    assert microseconds(read_traces(write(tmp_path, None, [x("PP:0F0", 0, 10)], "t.json", **about))) == {"0F0": (0, 10)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[" * 100_000,
        '{"traceEvents": 5}',
        "7",
        '{"traceEvents": []}',
        "[null, 5, {}, []]",
        '[{"ph": "X", "name": "PP:0Q0", "ts": 1, "dur": 1}]',
    ],
)
def test_files_that_are_no_traces(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ScheduleError):
        read_traces(path)


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"holds no \.json"):
        read_traces(tmp_path)
    with pytest.raises(ScheduleError, match="there is no trace"):
        read_traces([])
    with pytest.raises(FileNotFoundError):
        read_traces(tmp_path / "none.json")


# -- pipesim's own traces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["slot", "s"])
@pytest.mark.parametrize(
    ("name", "steps"), [("1f1b", 1), ("1f1b", 3), ("zb-h1", 1), ("interleaved", 2), ("chimera", 1), ("dualpipe", 1), ("pipedream-2bw", 1)]
)
def test_our_own_traces_come_back(name: str, steps: int, unit: str, tmp_path: Path) -> None:
    size = 1.0 if unit == "slot" else 1e-3
    costs = UniformCosts(
        forward=size,
        backward=2 * size,
        optimizer=size / 2,
        latency=0.37 * size,
        message=1,
        bandwidth=3 / size,
        unit=unit,  # type: ignore[arg-type]
    )
    run = simulate(generate(name, 4, 16), costs, steps=steps)
    write_trace(run, tmp_path / "trace.json.gz")
    again = read_traces(tmp_path / "trace.json.gz")
    assert again.schedule == run.schedule
    assert (again.schedule.name, again.unit, again.source, again.steps, again.barrier) == (run.schedule.name, unit, "simulated", steps, run.barrier)
    for column in ("start", "end", "sent", "departed", "arrived"):
        # a trace holds picoseconds; a slot is shown as a millisecond
        error = np.abs(getattr(again, column) - (getattr(run, column) - run.first_start)).max()
        assert error <= (1e-9 if unit == "slot" else 1e-12), column


def test_our_own_trace_of_a_graph(tmp_path: Path) -> None:
    # stage 2 waits for 0 and 1: two messages come to one op
    graph = [(0, 2), (1, 2)]
    run = simulate(Schedule.from_text("0F0 0B0\n1F0 1B0\n2F0 2B0", graph=graph), UniformCosts(forward=[1, 3, 1], backward=2, latency=0.5))
    write_trace(run, tmp_path / "trace.json")
    again = read_traces(tmp_path / "trace.json")
    assert again.schedule == run.schedule
    assert np.abs(again.arrived - run.arrived).max() < 1e-9


def test_ops_that_take_no_time_come_back_where_the_schedule_is_given(tmp_path: Path) -> None:
    run = simulate(generate("1f1b", 2, 3), UniformCosts(forward=[0, 1], backward=2))
    write_trace(run, tmp_path / "trace.json")
    with pytest.raises(ScheduleError, match="is no schedule"):
        read_traces(tmp_path / "trace.json")
    again = read_traces(tmp_path / "trace.json", run.schedule)
    assert again.busy == run.busy
    assert again.makespan == run.makespan


def test_our_own_trace_is_given_alone(tmp_path: Path) -> None:
    run = simulate(generate("1f1b", 2, 2), UniformCosts())
    write_trace(run, tmp_path / "a.json")
    with pytest.raises(ScheduleError, match="give it alone"):
        read_traces([tmp_path / "a.json", write(tmp_path, 0, RANK0)])
