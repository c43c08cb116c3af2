"""What a device is to do, step by step."""

from __future__ import annotations

import pytest

from pipesim import Schedule, ScheduleError, generate
from pipesim.lowering import lower
from pipesim.replay.program import Code, compile_program


def labels(schedule: Schedule, device: int, **options: object) -> list[str]:
    return [step.label for step in compile_program(schedule, **options).devices[device]]  # type: ignore[arg-type]


def test_the_sum_of_gradients_starts_after_the_last_gradient_and_not_at_the_update() -> None:
    # both stages live on both devices; on device 1 stage 1 has its last gradient early
    schedule = Schedule.from_text("0F0 0B0 1F1 1B1 0U0 1U0\n1F0 1B0 0F1 0B1 1U0 0U0", graph=[(0, 1)])
    found = [label for label in labels(schedule, 1, barrier=False) if "SEND" not in label and "RECV" not in label]
    assert found == ["1F0", "1B0", "1REDUCE_GRAD0", "0F1", "0B1", "0REDUCE_GRAD0", "1U0", "0U0"]


def test_receives_that_are_not_listed_are_posted_a_slot_ahead() -> None:
    schedule = Schedule.from_text("0F0 0F1 0F2\n1F0 1F1 1F2")
    assert labels(schedule, 1) == ["1RECV_F0 1RECV_F1", "1F0", "1RECV_F2", "1F1", "1F2"]
    assert labels(schedule, 1, receives="late") == ["1RECV_F0", "1F0", "1RECV_F1", "1F1", "1RECV_F2", "1F2"]
    assert labels(lower(schedule), 1) == ["1RECV_F0", "1F0", "1RECV_F1", "1F1", "1RECV_F2", "1F2"]  # what is listed is obeyed


def test_a_listed_reduction_stands_where_it_is_listed() -> None:
    schedule = Schedule.from_text("0F0 0B0 1F1 1B1 0REDUCE_GRAD 1REDUCE_GRAD\n1F0 1B0 0F1 0B1 0REDUCE_GRAD 1REDUCE_GRAD", graph=[(0, 1)])
    found = [step for step in compile_program(schedule, barrier=False).devices[0] if step.code is Code.REDUCE]
    assert [step.label for step in found] == ["0REDUCE_GRAD", "1REDUCE_GRAD"]


def test_one_replica_sums_nothing_and_data_parallel_ones_do() -> None:
    schedule = generate("1f1b", 2, 2)
    assert not any("REDUCE" in label for label in labels(schedule, 0))
    assert labels(schedule, 0, data=2)[-3:] == ["0REDUCE_GRAD0", "barrier", "0U0"]


# Case I02: a full listing for p = 2, 4 stages, m = 4 has 16 compute, 12 send and 12 receive ops per rank; UNSHARD, RESHARD and REDUCE_GRAD are
# kept at no cost or skipped with a note.
def test_full_listing_of_interleaved_1f1b() -> None:
    listing = lower(generate("interleaved-1f1b", 2, 4))
    rows = []
    for device, stream in enumerate(listing.streams):
        rows.append(f"{device}UNSHARD {' '.join(map(str, stream))} {device}RESHARD")
    program = compile_program(Schedule.from_text("\n".join(rows)))
    for steps in program.devices:
        assert sum(step.code is Code.COMPUTE and "U" not in step.label for step in steps) == 16
        assert sum(len(step.sends) for step in steps) == 12
        assert sum(len(step.receives) for step in steps) == 12
    assert program.notes == ("RESHARD, UNSHARD listed, and done as nothing",)


def test_both_ends_of_a_message_give_it_the_same_number() -> None:
    program = compile_program(generate("zb-v", 2, 4))
    sent = {t.number: (device, t.peer, t[2:]) for device, steps in enumerate(program.devices) for step in steps for t in step.sends}
    received = {t.number: (t.peer, device, t[2:]) for device, steps in enumerate(program.devices) for step in steps for t in step.receives}
    assert sent == received
    assert sorted(sent) == list(range(len(sent)))


def test_a_backend_that_matches_in_order_refuses_crossed_receives() -> None:
    crossed = Schedule.from_text("0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F1 1RECV_F0 1F0 1F1")
    assert compile_program(crossed).devices[1][0].label == "1RECV_F1 1RECV_F0"  # tags tell them apart
    with pytest.raises(ScheduleError, match=r"1RECV_F1 \(position 0\)"):
        compile_program(crossed, in_order=True)


# Case C03, the thread's second listing: under rendezvous both ranks would wait for each other; sends that wait for nobody finish. Made whole: each
# device sends, then posts its receive, and the other way round on the other device.
def test_sends_wait_for_nobody() -> None:
    program = compile_program(Schedule.from_text("0F0 0SEND_F0 2RECV_F0 2F0\n1RECV_F0 1F0 1SEND_F0"))
    assert [step.label for step in program.devices[0]] == ["0F0", "0SEND_F0 2RECV_F0", "2F0"]
