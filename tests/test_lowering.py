"""Messages as SEND and RECV ops: where they stand, that PyTorch puts them there too, and listings that cross."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesim import DeadlockError, Kind, Op, Pair, Schedule, ScheduleError, available, crossings, generate, lower

SENDS, RECEIVES = (Kind.SEND_F, Kind.SEND_B), (Kind.RECV_F, Kind.RECV_B)
SIZES = ((1, 4), (2, 1), (2, 4), (3, 6), (4, 8), (4, 10), (8, 16))


def registered() -> list[tuple[str, int, int]]:
    """Every schedule once, by its first name, in every size that it has."""
    first = {generator: name for name, generator in reversed(available().items())}
    return [(name, *size) for name in first.values() for size in SIZES]


def made(name: str, devices: int, microbatches: int) -> Schedule:
    try:
        return generate(name, devices, microbatches)
    except ScheduleError as error:
        pytest.skip(str(error).splitlines()[0])


def grid(schedule: Schedule) -> list[str]:
    return [" ".join(str(slot) for slot in stream) for stream in schedule.streams]


# -- by hand -------------------------------------------------------------------------------------------------------------


def test_1f1b_by_hand() -> None:
    # rounds of the turns, device 0 first in each:
    #   0: 0F0, sent to device 1, which does 1F0    1: 0F1 is sent; 1B0 is sent back    2: 0B0; 1F1    3: 0B1 waits; 1B1    4: 0B1
    schedule = Schedule.from_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert grid(lower(schedule)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]
    assert grid(lower(schedule, "late")) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    ]


def test_a_split_backward_sends_after_its_input_half_and_a_v_sends_nothing_to_itself() -> None:
    schedule = Schedule.from_text("0F0 3F0 3I0 3W0 0I0 0W0\n1F0 2F0 2I0 1I0 2W0 1W0")
    assert grid(lower(schedule, "late")) == [
        "0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 3W0 0RECV_B0 0I0 0W0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 1I0 1SEND_B0 2W0 1W0",
    ]


def test_a_pair_receives_before_its_slot_and_sends_after_it() -> None:
    # device 1's slot runs a forward and a backward: both inputs are received before, both outputs sent after, the first half's first
    schedule = Schedule.from_text("0F0 0F1 0B0 0B1\n1F0 (1F1;1B0)OVERLAP_F_B 1B1\n2F0 2B0 2F1 2B1")
    for receives in ("early", "late"):
        stream = lower(schedule, receives).streams[1]
        slot = stream.index(Pair(Op(1, Kind.F, 1), Op(1, Kind.B, 0)))
        assert {str(op) for op in stream[:slot]} == {"1RECV_F0", "1F0", "1SEND_F0", "1RECV_F1", "1RECV_B0"}
        assert [str(op) for op in stream[slot + 1 : slot + 3]] == ["1SEND_F1", "1SEND_B0"]
    assert [str(op) for op in lower(schedule, "late").streams[1]][3:5] == ["1RECV_F1", "1RECV_B0"]


DIAMOND = [(0, 1), (0, 2), (1, 3), (2, 3)]


def test_a_stage_graph_sends_once_to_every_successor_and_receives_once_from_every_predecessor() -> None:
    # 0 -> 1, 2 -> 3, a device each; stage 2's device does something else first, so what stage 3 needs is there when 2F0 has run
    schedule = Schedule.from_text("0F0 0B0\n1F0 1B0\n2F0 2B0\n3F0 3B0", graph=DIAMOND)
    for receives in ("early", "late"):
        assert grid(lower(schedule, receives)) == [
            "0F0 0SEND_F0 0RECV_B0 0B0",
            "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
            "2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0",
            "3RECV_F0 3F0 3B0 3SEND_B0",
        ]


def test_a_join_receives_early_when_its_last_predecessor_has_sent() -> None:
    # stages 1 and 3 on device 1, 2 on device 2: 3F0 needs only 2's message from outside. Device 1 does 1F0 and 1F1 in rounds 0 and 1,
    # and device 2 sends 2F0 in round 0 after device 1's turn, so the RECV stands after 1F0 (it comes with 1RECV_F1's round).
    schedule = Schedule.from_text("0F0 0F1\n1F0 1F1 3F0 3F1\n2F0 2F1", graph=DIAMOND)
    assert grid(lower(schedule)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1",
        "1RECV_F0 1F0 3RECV_F0 1RECV_F1 1F1 3RECV_F1 3F0 3F1",
        "2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1",
    ]


def test_one_receive_of_two_messages_waits_for_the_last() -> None:
    # stage 3 takes from stages 1 and 2. Device 1 sends 1F0 in round 0; device 2 does 5F0 first and sends 2F0 in round 1;
    # device 3 does 4F0 in round 0, after the first of the two was sent and before the second
    schedule = Schedule.from_text("0F0\n1F0\n5F0 2F0\n4F0 3F0", graph=[*DIAMOND, (0, 4), (5, 2)])
    assert grid(lower(schedule)) == ["0F0 0SEND_F0", "1RECV_F0 1F0 1SEND_F0", "2RECV_F0 5F0 2F0 2SEND_F0", "4RECV_F0 4F0 3RECV_F0 3F0"]


def test_nothing_to_send() -> None:
    schedule = Schedule.from_text("0F0 1F0 1B0 0B0")
    assert lower(schedule) is schedule
    assert crossings(schedule) == []


def test_other_ops_stay_where_they_are() -> None:
    schedule = Schedule.from_text("0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD\n1F0 1R0 1B0")
    assert grid(lower(schedule, "late")) == [
        "0UNSHARD 0F0 0SEND_F0 0RESHARD 0UNSHARD 0RECV_B0 0B0 0REDUCE_GRAD 0RESHARD",
        "1RECV_F0 1F0 1R0 1B0 1SEND_B0",
    ]


def test_what_else_a_schedule_says_is_kept() -> None:
    schedule = generate("pipedream", devices=3, microbatches=6)
    lowered = lower(schedule)
    assert (lowered.weights, lowered.name) == ("stash", schedule.name)


# -- errors --------------------------------------------------------------------------------------------------------------


def test_errors() -> None:
    schedule = Schedule.from_text("0F0 0B0\n1F0 1B0")
    with pytest.raises(ScheduleError, match="receives must be early or late, got 'ealry'; did you mean 'early'"):
        lower(schedule, "ealry")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="lists SEND or RECV already"):
        lower(lower(schedule))
    with pytest.raises(ScheduleError, match="1F0 is missing"):
        lower(Schedule.from_text("0F0 0B0\n1B0"))


def test_early_receives_have_no_place_in_a_deadlock() -> None:
    # device 0 wants the gradient of microbatch 0 before it sends 0F1, and device 1 wants 0F1 before it makes that gradient
    schedule = Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(DeadlockError) as caught:
        lower(schedule)
    text = str(caught.value)
    assert "device 0 is stuck at 0B0 (position 1): waits for the gradient of microbatch 0, stage 1 to stage 0, from 1B0 on device 1" in text
    assert "device 1 is stuck at 1F1 (position 1): waits for the activation of microbatch 1, stage 0 to stage 1, from 0F1 on device 0" in text
    lower(schedule, "late").check()  # what can be listed; that it cannot finish is for a run to say


# -- every schedule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "devices", "microbatches"), registered())
def test_every_schedule_is_lowered_both_ways(name: str, devices: int, microbatches: int) -> None:
    schedule = made(name, devices, microbatches)
    for receives in ("early", "late"):
        lowered = lower(schedule, receives).check()
        assert lowered.without_communication() == schedule
        for stream in lowered.streams:
            for before, op in zip([None, *stream], stream, strict=False):
                if isinstance(op, Op) and op.kind in SENDS:  # right after its producer, or another SEND of the pair that is it
                    previous = stream[max(0, stream.index(op) - 1)] if before is None else before
                    assert isinstance(previous, Pair) or previous.kind in (*SENDS, Kind.F, Kind.B, Kind.I), (previous, op)
    if schedule.graph is None:
        assert crossings(lower(schedule)) == []


@pytest.mark.parametrize(("name", "devices", "microbatches"), registered())
def test_late_receives_stand_right_before_what_needs_them(name: str, devices: int, microbatches: int) -> None:
    schedule = made(name, devices, microbatches)
    for stream in lower(schedule, "late").streams:
        received: set[tuple[int, int | None]] = set()
        for slot in stream:
            if isinstance(slot, Op) and slot.kind in RECEIVES:
                received.add((slot.stage, slot.microbatch))
                continue
            halves = slot if isinstance(slot, Pair) else (slot,)
            assert received <= {(half.stage, half.microbatch) for half in halves}
            received.clear()


def test_a_full_listing_has_as_many_ops_as_counted_by_hand() -> None:
    # I02: two devices, four stages, four microbatches. Device 0 has stages 0 and 2, 16 F and B; it sends forward from both, and back from
    # stage 2: 3 x 4 messages; it receives as many. Device 1, with stages 1 and 3, the same by symmetry.
    for stream in lower(generate("interleaved", devices=2, microbatches=4)).streams:
        kinds = [op.kind for op in stream if isinstance(op, Op)]
        assert sum(kind in (Kind.F, Kind.B) for kind in kinds) == 16
        assert sum(kind in SENDS for kind in kinds) == 12
        assert sum(kind in RECEIVES for kind in kinds) == 12


# -- crossings -----------------------------------------------------------------------------------------------------------


def test_a_crossing_names_both_ends() -> None:
    schedule = Schedule.from_text("0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2\n1RECV_F0 1RECV_F2 1RECV_F1 1F0 1F1 1F2")
    (crossing,) = crossings(schedule)
    assert crossing.first_send == (Op(0, Kind.SEND_F, 1), 0, 3)
    assert crossing.second_send == (Op(0, Kind.SEND_F, 2), 0, 5)
    assert crossing.first_receive == (Op(1, Kind.RECV_F, 1), 1, 2)
    assert crossing.second_receive == (Op(1, Kind.RECV_F, 2), 1, 1)
    assert all(word in str(crossing) for word in ("device 0", "0SEND_F1 (position 3)", "device 1", "1RECV_F1 (position 2)"))


def test_late_receives_of_a_v_cross_where_a_gradient_overtakes_an_activation() -> None:
    # two devices in a V. Device 0 sends 0F0 0F1 0F2 3B0 3B1 3B2, which device 1 uses as 1F0 1F1 2B0 1F2 2B1 2B2; and device 1 sends
    # 2F0 2F1 1B0 2F2 1B1 1B2, which device 0 uses as 3F0 3F1 0B0 3F2 0B1 0B2
    schedule = Schedule.from_text("0F0 0F1 0F2 3F0 3B0 3F1 0B0 3B1 3F2 0B1 3B2 0B2\n1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2B1 1B1 2B2 1B2")
    assert crossings(lower(schedule)) == []
    (crossing,) = crossings(lower(schedule, "late"))
    assert (str(crossing.first_send.op), str(crossing.second_send.op)) == ("0SEND_F2", "3SEND_B0")


def test_messages_in_opposite_directions_do_not_cross() -> None:
    schedule = Schedule.from_text("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1")
    assert crossings(schedule) == []


def test_one_send_to_two_stages_of_one_device_crosses_nothing() -> None:
    schedule = Schedule.from_text("0F0\n1F0 2F0", graph=[(0, 1), (0, 2)])
    assert grid(lower(schedule, "late")) == ["0F0 0SEND_F0", "1RECV_F0 1F0 2RECV_F0 2F0"]
    assert crossings(lower(schedule, "late")) == []


# -- PyTorch -------------------------------------------------------------------------------------------------------------


def torch_schedules() -> Any:
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.pipelining import schedules
    return schedules


def lowered_by_torch(schedule: Schedule, everything: bool = False) -> tuple[list[str], list[str]]:
    """(the compute order, the same with SEND and RECV) as PyTorch has them; everything: with UNSHARD, RESHARD and REDUCE_GRAD too."""
    torch = torch_schedules()
    actions = {device: [torch._Action.from_str(str(slot)) for slot in stream] for device, stream in enumerate(schedule.streams)}
    if everything:
        actions = {
            device: torch._add_reduce_grad(torch._add_unshard_reshard(stream), schedule.num_microbatches) for device, stream in actions.items()
        }
    before = [" ".join(map(str, stream)) for stream in actions.values()]
    after = torch._add_send_recv(actions, lambda stage: schedule.placement[stage][0], schedule.num_stages)
    return before, [" ".join(map(str, after[device])) for device in range(schedule.num_devices)]


def expressible(schedule: Schedule) -> bool:
    pairs = any(isinstance(slot, Pair) and not str(slot).endswith("OVERLAP_F_B") for stream in schedule.streams for slot in stream)
    return not (pairs or schedule.replicas or schedule.graph or schedule.has(Kind.R, Kind.U, Kind.OFFLOAD, Kind.RELOAD))


@pytest.mark.parametrize(("name", "devices", "microbatches"), registered())
def test_early_receives_stand_where_pytorch_puts_them(name: str, devices: int, microbatches: int) -> None:
    schedule = made(name, devices, microbatches)
    if not expressible(schedule):
        pytest.skip("PyTorch has no word for something in it: replicas, a stage graph, R, U, OFFLOAD or other pairs")
    assert grid(lower(schedule)) == lowered_by_torch(schedule)[1]
    before, after = lowered_by_torch(schedule, everything=True)
    assert grid(lower(Schedule.from_text("\n".join(before)))) == after


@st.composite
def orders(draw: st.DrawFn) -> Schedule:
    """Any order of the ops of a chain that can finish: an op after another whose inputs are there, on devices drawn at random."""
    devices, stages, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    stages = max(stages, devices)
    home = [*range(devices), *(draw(st.integers(0, devices - 1)) for _ in range(stages - devices))]
    streams: list[list[str]] = [[] for _ in range(devices)]
    forwards, backwards = [0] * stages, [0] * stages  # how many microbatches have passed
    while sum(backwards) < stages * microbatches:
        legal = [("F", s) for s in range(stages) if forwards[s] < (microbatches if s == 0 else forwards[s - 1])]
        legal += [("B", s) for s in range(stages) if backwards[s] < (forwards[s] if s == stages - 1 else backwards[s + 1])]
        kind, stage = draw(st.sampled_from(legal))
        count = forwards if kind == "F" else backwards
        streams[home[stage]].append(f"{stage}{kind}{count[stage]}")
        count[stage] += 1
    return Schedule.from_streams(streams)


@given(orders())
@settings(max_examples=150, deadline=None)
def test_any_order_is_lowered_as_pytorch_does(schedule: Schedule) -> None:
    lowered = lower(schedule)
    assert grid(lowered) == lowered_by_torch(schedule)[1]
    assert lowered.check().without_communication() == schedule
    assert crossings(lowered) == []


def test_pytorchs_own_file_of_2024(shared_data: Path) -> None:
    listed = Schedule.from_csv(shared_data / "pytorch" / "zb1p_2rank_2stagep_comms.OLDVOCAB.csv", legacy=True)
    assert lower(listed.without_communication()) == listed


@pytest.mark.parametrize("name", ["torchtitan_custom_schedule", "dualpipev_4rank_10mb"])
def test_files_of_pytorch_and_torchtitan(name: str, shared_data: Path) -> None:
    schedule = Schedule.from_csv(shared_data / "pytorch" / f"{name}.csv")
    assert grid(lower(schedule)) == lowered_by_torch(schedule)[1]


def runtime_of(schedule: Schedule) -> Any:
    """PyTorch's runtime with stand-ins for its stages, which reads and writes files without a process group."""
    stages = [SimpleNamespace(num_stages=schedule.num_stages, group_size=schedule.num_devices, group_rank=0, has_backward=True)]
    return torch_schedules()._PipelineScheduleRuntime(stages, schedule.num_microbatches, loss_fn=None)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "dualpipe-v"])
def test_csv_goes_to_pytorch_and_comes_back(name: str, tmp_path: Path) -> None:
    schedule = generate(name, devices=4, microbatches=8)
    ours, theirs = tmp_path / "ours.csv", tmp_path / "theirs.csv"
    for receives in ("early", "late"):
        lowered = lower(schedule, receives)
        lowered.to_csv(ours)
        runtime = runtime_of(schedule)
        runtime._load_csv(str(ours), format="compute_comms")
        assert [" ".join(map(str, stream)) for stream in runtime.pipeline_order_with_comms.values()] == grid(lowered)
        runtime._dump_csv(str(theirs), format="compute_comms")
        assert Schedule.from_csv(theirs).check() == lowered
        assert theirs.read_bytes() == ours.read_bytes()
    # and the bare order, which PyTorch lowers itself: with UNSHARD, RESHARD and REDUCE_GRAD
    schedule.to_csv(ours)
    runtime = runtime_of(schedule)
    runtime._load_csv(str(ours), format="compute_only")
    runtime._dump_csv(str(theirs), format="compute_only")
    assert Schedule.from_csv(theirs) == schedule
    runtime._dump_csv(str(theirs), format="compute_comms")
    everything = Schedule.from_csv(theirs).check()
    assert everything.has(Kind.UNSHARD, Kind.REDUCE_GRAD)
    assert everything.without_communication() == schedule
