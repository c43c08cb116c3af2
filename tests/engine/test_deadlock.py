"""A schedule that cannot finish is an error that names every device, what it waits for, and the circle."""

from __future__ import annotations

import contextlib
import random
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipesim
from pipesim import Communication, DeadlockError, Schedule, ScheduleError, UniformCosts, generate

simulate = partial(pipesim.simulate, engine="simpy")


def deadlock(schedule: Schedule, **options: Any) -> str:
    with pytest.raises(DeadlockError) as error:
        simulate(schedule, UniformCosts(optimizer=options.pop("optimizer", 0)), **options)
    return str(error.value)


def test_every_device_and_the_cycle_are_named() -> None:
    text = "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"
    assert deadlock(Schedule.from_text(text)).splitlines() == [
        "the schedule cannot finish: device 0 -> device 1 -> device 0 wait for each other",
        "  device 0 is stuck at 0B0 (position 1): waits for the gradient of microbatch 0, stage 1 to stage 0, from 1B0 on device 1",
        "  device 1 is stuck at 1F1 (position 1): waits for the activation of microbatch 1, stage 0 to stage 1, from 0F1 on device 0",
    ]


def test_devices_outside_the_cycle_are_named_too() -> None:
    """Device 0 has only forwards and finishes; 1 and 2 wait for each other; 3 waits for 2."""
    text = "0F0 0F1\n1F0 1B0 1F1 1B1\n2F0 2F1 2B0 2B1\n3F0 3F1 3B1 3B0"
    message = deadlock(Schedule.from_text(text), barrier=False)
    assert "device 1 -> device 2 -> device 1 wait for each other" in message
    assert "device 0 has finished" in message
    assert "device 3 is stuck at 3F1 (position 1)" in message


def test_a_circle_over_three_devices() -> None:
    """Each device lists first what needs the device before it, on a ring of three chains."""
    edges = [(0, 1), (2, 3), (4, 5)]
    message = deadlock(Schedule.from_text("1F0 2F0\n3F0 4F0\n5F0 0F0", graph=edges))
    assert "device 0 -> device 2 -> device 1 -> device 0 wait for each other" in message


def test_halves_of_a_pair_can_block_each_other() -> None:
    """Device 0's pair needs 1F0, which stands after what needs the pair's own output."""
    message = deadlock(Schedule.from_text("(0F0;3F0)PAIR\n1F0 2F0", graph=[(0, 1), (2, 3)]))
    assert "device 0 is stuck at (0F0;3F0)PAIR (position 0)" in message
    assert "device 1 is stuck at 1F0 (position 0)" in message


def test_the_step_is_named() -> None:
    message = deadlock(Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"), steps=3)
    assert "(position 1) in step 0" in message


def test_devices_at_the_barrier_wait_for_those_that_are_stuck() -> None:
    """Devices 0 and 1 are a pipeline of their own and come to the barrier; 2 and 3 never do."""
    text = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n2F0 2B0 2F1 2B1\n3F0 3F1 3B0 3B1"
    schedule = Schedule.from_text(text, graph=[(0, 1), (2, 3)])
    message = deadlock(schedule, optimizer=1)
    assert "device 2 -> device 3 -> device 2 wait for each other" in message
    for device in (0, 1):
        assert f"device {device} is stuck at {device}U0 (position 4): waits at the barrier for device 2" in message
    message = deadlock(schedule, steps=2)  # no update takes time: they meet at the end of the step
    assert "device 2 -> device 3 -> device 2 wait for each other" in message
    for device in (0, 1):
        assert f"device {device} has ended its step in step 0: waits at the barrier for device 2" in message


def test_an_update_in_the_middle_blocks_at_the_barrier_and_nowhere_else() -> None:
    """Device 0 updates stage 0 before it sends what device 1 needs in order to come to the barrier."""
    schedule = Schedule.from_text("0F0 0B0 0U0 1F0 1B0 1U0\n2F0 2B0 2U0", graph=[(1, 2)])
    message = deadlock(schedule, optimizer=1)
    assert "device 0 -> device 1 -> device 0" in message
    assert "device 0 is stuck at 0U0 (position 2): waits at the barrier for device 1" in message
    # F = 1, B = 2: 0F 0B 0U 1F until 5, 2F 2B until 8, 1B until 10, 1U
    assert simulate(schedule, UniformCosts(optimizer=1), barrier=False).makespan == 11


def test_an_update_that_waits_for_another_replicas_gradient() -> None:
    """Stage 0 has a replica on each device. Its update on device 0 waits for 0B1, which stands after 2F0, which waits for 1F0."""
    schedule = Schedule.from_text("0F0 0B0 0U0 1F0 1F1\n2F0 2F1 0F1 0B1 0U0", graph=[(1, 2)])
    message = deadlock(schedule, optimizer=1, barrier=False)
    assert "device 0 is stuck at 0U0 (position 2): waits for the gradient of 0B1 on device 1" in message
    assert "device 1 is stuck at 2F0 (position 0): waits for the activation of microbatch 0, stage 1 to stage 2, from 1F0 on device 0" in message


@pytest.mark.parametrize("stream", ["device", "peer", "free"])
def test_a_cycle_of_messages_starts_where_the_headline_does_and_ends_with_what_may_resolve_it(stream: Any) -> None:
    how = Communication(sends="rendezvous", stream=stream, blocking=stream == "free")
    for schedule in (generate("1f1b", 4, 8), generate("zb-h1", 4, 8)):
        lines = deadlock(schedule, communication=how).splitlines()
        first, cycle = re.match(r".*finish: (device \d+) -> ", lines[0]), re.match(r"  the cycle: (device \d+): ", lines[-3])
        assert first is not None
        assert cycle is not None
        assert first[1] == cycle[1]
        ways = lines[-1].removeprefix("  what may resolve it: ").split(", ")
        free = [] if how.blocking else ["--stream free"]
        assert ways == ["--receives early", "--sends eager", *free, "--batched (neighbouring sends and receives as one group)"]
        # the first two do, for schedules that can finish; batching helps 1F1B, whose neighbours exchange in the steady phase
        simulate(schedule, UniformCosts(), communication=replace(how, receives="early"))
        simulate(schedule, UniformCosts(), communication=replace(how, sends="eager"))
    if not how.blocking:
        simulate(schedule, UniformCosts(), communication=replace(how, stream="free"))
    simulate(generate("1f1b", 4, 8), UniformCosts(), communication=replace(how, batched=True))


def test_what_may_resolve_a_batch_is_to_do_without() -> None:
    how = Communication(sends="rendezvous", batched=True)
    message = deadlock(generate("zb-v", 4, 8), communication=how)
    assert message.endswith("\n  what may resolve it: no --batched, with --receives early or --sends eager")
    for change in ({"receives": "early"}, {"sends": "eager"}):
        simulate(generate("zb-v", 4, 8), UniformCosts(), communication=replace(how, batched=False, **change))  # type: ignore[arg-type]


def test_nothing_about_communication_resolves_an_order_that_cannot_run() -> None:
    assert "may resolve" not in deadlock(Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"))


@settings(max_examples=80, deadline=None, database=None)
@given(seed=st.integers(0, 10**6), devices=st.integers(2, 4), microbatches=st.integers(1, 4), steps=st.integers(1, 2))
def test_deadlocks_are_found_exactly_where_an_independent_run_gets_stuck(
    seed: int, devices: int, microbatches: int, steps: int, random_schedule: Any, longest_path: Any
) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(seed, devices, microbatches, dag=rng.random() < 0.5, replicas=rng.random() < 0.3, pairs=rng.random() < 0.3)
    for _ in range(10):  # exchange ops of one device as long as the check passes; about a fifth then cannot finish
        streams = schedule.streams
        stream = rng.choice([stream for stream in streams if stream])
        a, b = rng.randrange(len(stream)), rng.randrange(len(stream))
        stream[a], stream[b] = stream[b], stream[a]
        with contextlib.suppress(ScheduleError):
            schedule = Schedule.from_streams(streams, graph=schedule.graph).check()
    links = {(a, b): (0.0, None) for a in range(devices) for b in range(devices)}
    expected = longest_path(schedule, lambda slot: 1.0, links, steps=steps)
    if not expected.stuck:
        assert simulate(schedule, UniformCosts(), steps=steps, barrier=False).steps == steps
        return
    message = deadlock(schedule, steps=steps, barrier=False)
    stuck = {int(d): op for d, op in re.findall(r"device (\d+) is stuck at (\S+) \(", message)}
    assert stuck == expected.stuck
    cycle = re.findall(r"device (\d+)", message.splitlines()[0])
    assert len(cycle) > 2
    assert cycle[0] == cycle[-1]
    assert set(map(int, cycle)) <= set(stuck)
