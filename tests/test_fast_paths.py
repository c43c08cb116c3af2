"""Shortcuts that are taken where all ops are alike give what the general way gives."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from pipesim import Kind, Schedule, ScheduleError, UniformCosts, available, generate, simulate
from pipesim.dataflow import messages
from pipesim.memory import peak_levels
from pipesim.metrics import peak_activations


def rounded(value: Any) -> Any:
    """Figures without the last bits, which depend on the order of sums."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 9) if isinstance(value, float) else value


@pytest.mark.parametrize("name", sorted(available()))
def test_one_number_is_the_same_as_a_table_of_it(name: str) -> None:
    numbers = {"forward": 1.0, "input_grad": 1.25, "weight_grad": 0.75, "activation": 3.0, "activation_freed_by_input_grad": 1.0, "weights": 2.0}
    ran = 0
    for devices, microbatches in ((4, 8), (3, 6), (2, 2)):
        with contextlib.suppress(ScheduleError):  # not every size is legal
            schedule = generate(name, devices, microbatches).without_communication()
            for message, bandwidth in ((0.0, None), (0.5, 2.0)):
                table = (schedule.num_stages, schedule.num_microbatches)
                tables = {field: np.full(table[:1] if field == "weights" else table, number) for field, number in numbers.items()}
                quick = simulate(schedule, UniformCosts(**numbers, message=message, bandwidth=bandwidth, latency=0.25))
                general = simulate(schedule, UniformCosts(**tables, message=np.full(table, message), bandwidth=bandwidth, latency=0.25))
                assert rounded(quick.figures()) == rounded(general.figures())
                for device in range(devices):
                    assert rounded(quick.memory(device).peak) == rounded(quick.peak_memory[device])
                ran += 1
    assert ran


@pytest.mark.parametrize("name", sorted(available()))
def test_peaks_and_messages_by_counting(name: str) -> None:
    """The most activations alive, and the messages, counted op by op."""
    with contextlib.suppress(ScheduleError):
        schedule = generate(name, 4, 8).without_communication()
        releasing = (Kind.B, Kind.W)
        for device, stream in enumerate(schedule.streams):
            level = peak = 0
            for slot in stream:
                ops = [slot.first, slot.second] if hasattr(slot, "first") else [slot]
                level += sum(op.kind is Kind.F for op in ops)
                peak = max(peak, level)
                level -= sum(op.kind in releasing for op in ops)
            assert peak_activations(schedule)[device] == peak
        home = {
            op: device for device, stream in enumerate(schedule.streams) for slot in stream for op in (slot if hasattr(slot, "first") else (slot,))
        }
        between = {
            (source, target)
            for a, b in schedule.stage_edges
            for i in range(schedule.num_microbatches)
            for source, target in (((a, "F", i), (b, "F", i)), ((b, "G", i), (a, "G", i)))
        }
        letter = {Kind.F: "F", Kind.B: "G", Kind.I: "G"}
        homes = {(op.stage, letter[op.kind], op.microbatch): device for op, device in home.items() if op.kind in letter}
        expected = {(s, t) for s, t in between if s in homes and t in homes and homes[s] != homes[t]}
        found = messages(schedule)
        listed = []
        for source, target in zip(found.source.tolist(), found.target.tolist(), strict=True):
            a, b = schedule.op(source), schedule.op(target)
            listed.append(((a.stage, letter[a.kind], a.microbatch), (b.stage, letter[b.kind], b.microbatch)))
        assert len(listed) == len(expected)
        assert set(listed) == expected
        # in the order (device, position, half, destination stage)
        assert sorted(range(len(listed)), key=lambda k: (found.source[k], schedule.stage[found.target[k]])) == list(range(len(listed)))


def test_devices_with_as_many_slots_and_with_others() -> None:
    """Up at starts, down at ends. Device 0: 1, 0, 2, 1 -> peak 2; device 1: 3 -> 3. Then device 1 without its last slot."""
    start, end = np.array([1.0, 2.0, 3.0, 0.0]), np.array([1.0, 1.0, 2.0, 1.0])
    assert peak_levels(Schedule.from_text("0F0 0F1\n1F0 1F1"), start, end).tolist() == [2, 3]
    assert peak_levels(Schedule.from_text("0F0 0F1\n1F0"), start[:3], end[:3]).tolist() == [2, 3]
    assert peak_levels(Schedule.from_streams([["0F0", "0F1"], [], ["1F0"]]), start[:3], end[:3]).tolist() == [2, 0, 3]
