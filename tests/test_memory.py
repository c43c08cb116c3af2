"""Memory over time: what counts, from when to when, and what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipesim import Cluster, Kind, ProfileCosts, Schedule, ScheduleError, UniformCosts, generate, simulate
from pipesim.costs.profile import parse_profile
from pipesim.memory import CATEGORIES

FB = UniformCosts(forward=1, backward=2)


def double_buffered(p: int, m: int, per_update: int) -> Schedule:
    """PipeDream-2BW: the order of 1F1B without a flush, an update after every *per_update*-th backward."""
    streams = []
    for stream in generate("1f1b", p, m).streams:
        row: list[Any] = []
        for op in stream:
            row.append(op)
            if op.kind is Kind.B and (op.microbatch + 1) % per_update == 0:
                row.append((op.stage, "U", op.microbatch // per_update))
        streams.append(row)
    return Schedule.from_streams(streams, weights="double_buffer")


# -- cases -----------------------------------------------------------------------------------------------------------------


def test_M01_one_buffer_too_many() -> None:
    assert simulate(generate("1f1b", 4, 8), FB).peak_activations == [4, 3, 2, 1]
    assert simulate(generate("1f1b", 4, 8), FB).peak_memory == [4, 3, 2, 1]


def test_M02_first_gpu_uses_most_memory_although_stages_are_equal() -> None:
    costs = UniformCosts(forward=1, backward=2, weights=2 * 2**30, activation=2**30, unit="s")
    assert [peak / 2**30 for peak in simulate(generate("1f1b", 8, 16), costs).peak_memory] == [10, 9, 8, 7, 6, 5, 4, 3]
    assert [peak / 2**30 for peak in simulate(generate("gpipe", 8, 16), costs).peak_memory] == [18] * 8


def test_M03_interleaving_needs_more_activation_memory_than_1f1b() -> None:
    """Megatron's interleaved order for p=4, m=8, v=2, written out from its rule: warm-up 2(p-d-1) + (v-1)p, then F, B in turn."""
    p, m, v = 4, 8, 2
    forwards = [(chunk, mb) for group in range(0, m, p) for chunk in range(v) for mb in range(group, group + p)]
    streams = []
    for d in range(p):
        forward = [(chunk * p + d, "F", mb) for chunk, mb in forwards]
        backward = [((v - 1 - chunk) * p + d, "B", mb) for chunk, mb in forwards]
        warm_up = min(2 * (p - d - 1) + (v - 1) * p, m * v)
        row = forward[:warm_up]
        for k in range(m * v - warm_up):
            row += [forward[warm_up + k], backward[k]]
        streams.append(row + backward[m * v - warm_up :])
    run = simulate(Schedule.from_streams(streams), UniformCosts(forward=1, backward=2, activation=0.5))
    assert run.makespan == 57
    assert run.peak_activations == [11, 9, 7, 5]
    assert run.peak_activation_share == [5.5, 4.5, 3.5, 2.5]  # against 4 of 1F1B
    assert run.peak_memory == [5.5, 4.5, 3.5, 2.5]


def test_M06_averaging_parameters_over_stages_hides_the_worst_stage() -> None:
    """Layers 1, 2, 2, 3 of 10 parameters each, embedding 5 on the first stage, head 5 and norm 1 on the last."""
    sizes = [5, 10, 10, 10, 10, 10, 10, 10, 10, 5, 1]
    line = "node{0} -- Layer -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=0.0, parameter_size={1}.0"
    text = [line.format(number, size) for number, size in enumerate(sizes)] + [f"node{n} -- node{n + 1}" for n in range(len(sizes) - 1)]
    costs = ProfileCosts(parse_profile("\n".join(text)), cuts=[2, 4, 6])
    run = simulate(generate("gpipe", 4, 1), costs)
    weights = [run.memory(device).categories["weights"][0] for device in range(4)]
    assert weights == [15, 20, 20, 36]
    assert max(weights) == 36
    assert sum(weights) / 4 == 22.75
    assert [peak["weights"] for peak in run.figures()["peak_memory_by_category"]] == [15, 20, 20, 36]


def test_M09_weight_stashing() -> None:
    costs = UniformCosts(forward=1, backward=2, weights=10, activation=1)
    for schedule, peaks in (
        (generate("pipedream", 4, 16), [44, 33, 22, 11]),
        (double_buffered(4, 16, 4), [24, 23, 22, 21]),
        (generate("1f1b", 4, 16), [14, 13, 12, 11]),
    ):
        run = simulate(schedule, costs)
        assert run.peak_memory == peaks
        assert [run.memory(device).peak for device in range(4)] == peaks


def test_M11_report_the_first_op_that_does_not_fit() -> None:
    schedule = generate("1f1b", 4, 8)
    run = simulate(schedule, FB, cluster=Cluster.uniform(memory=3.5))
    (overflow,) = run.overflows()
    assert (overflow.device, str(overflow.op), overflow.time) == (0, "0F3", 3)
    assert (overflow.needed, overflow.capacity) == (4, 3.5)
    assert run.makespan == 33  # a capacity never changes the timing
    assert simulate(schedule, FB, cluster=Cluster.uniform(memory=4)).overflows() == []


# -- the rules -----------------------------------------------------------------------------------------------------------------


def curve(text: str, device: int = 0, **costs: Any) -> list[tuple[float, float]]:
    """(time, total) after everything that happens at that time."""
    found = simulate(Schedule.from_text(text), UniformCosts(**costs)).memory(device)
    return [(float(t), float(v)) for t, v, after in zip(found.times, found.total, [*found.times[1:], np.inf], strict=True) if t < after]


def test_an_activation_lives_from_the_start_of_f_to_the_end_of_b() -> None:
    assert curve("0F0 0B0", forward=1, backward=2, activation=5) == [(0, 5), (1, 5), (3, 0)]


def test_a_split_backward_releases_in_two_parts() -> None:
    """8 from 0; I ends at 2 and frees 3, W ends at 3 and frees the other 5."""
    assert curve("0F0 0I0 0W0", activation=8, activation_freed_by_input_grad=3) == [(0, 8), (1, 8), (2, 5), (3, 0)]
    # a full backward frees all of it at once
    assert curve("0F0 0B0", activation=8, activation_freed_by_input_grad=3) == [(0, 8), (1, 8), (3, 0)]


def test_recomputation_keeps_the_input_and_rebuilds_the_rest() -> None:
    """8 in all, of which 1 is the stage's input. R from 2 to 3, B from 3 to 5, then microbatch 1 without R from 5 to 7."""
    text = "0F0 0F1 0R0 0B0 0B1"
    sizes = {"forward": 1, "backward": 2, "activation": 8, "stage_input": 1}
    assert curve(text, **sizes) == [(0, 1), (1, 9), (2, 16), (3, 16), (5, 8), (7, 0)]
    # as a cost, the recomputation is the first part of the backward: 2 to 5, then 5 to 8
    assert curve("0F0 0F1 0B0 0B1", **sizes, recompute_policy="always") == [(0, 1), (1, 2), (2, 9), (5, 8), (8, 0)]


def test_recomputation_of_a_split_backward() -> None:
    """R from 1 to 2 rebuilds 7; I frees 3 at 3, W frees the other 5 at 4."""
    text = "0F0 0R0 0I0 0W0"
    assert curve(text, activation=8, stage_input=1, activation_freed_by_input_grad=3) == [(0, 1), (1, 8), (2, 8), (3, 5), (4, 0)]


def test_a_forward_only_run_holds_one_activation_at_a_time() -> None:
    assert curve("0F0 0F1 0F2", activation=2) == [(0, 2), (1, 2), (2, 2), (3, 0)]
    assert simulate(generate("gpipe", 3, 5, forward_only=True)).peak_activations == [1, 1, 1]


def test_peaks_do_not_depend_on_zero_durations() -> None:
    run = simulate(generate("1f1b", 4, 8), UniformCosts(forward=0, backward=0))
    assert run.peak_memory == [4, 3, 2, 1]
    assert [run.memory(device).peak for device in range(4)] == [4, 3, 2, 1]


def test_communication_buffers() -> None:
    """F=1; 6 bytes at 2 a slot and 1 of latency: sent 1, taken 1, there 5. Activations are 0.

    The sender holds the message from 1 until it is there; the receiver from 1 until the op that needs it starts.
    """
    sizes = {"activation": 0, "message": 6, "bandwidth": 2, "latency": 1}
    text = "0F0 0F1\n1F0 1F1"
    # the second message: ready at 2, taken at 4, there at 8; it needs a buffer of its own
    assert curve(text, **sizes) == [(0, 0), (1, 6), (2, 12), (5, 6), (8, 0)]
    assert curve(text, 1, **sizes) == [(0, 0), (1, 6), (4, 12), (5, 6), (6, 6), (8, 0), (9, 0)]
    assert simulate(Schedule.from_text(text), UniformCosts(**sizes)).memory(1).peak_categories["communication"] == 12


def test_a_message_that_takes_no_time_needs_no_buffer() -> None:
    """Device 1 starts each of its ops the moment the message comes, so only the activations count.

    Were it let go before it is taken, the level would fall below 0 and hide what else is there.
    """
    run = simulate(Schedule.from_text("0F0 0F1\n1F0 1F1"), UniformCosts(forward=1, message=6, activation=1))
    for device in range(2):
        assert run.memory(device).total.tolist() == [0, *[1, 0] * 2]


def test_messages_release_before_others_are_taken() -> None:
    """One message arrives at 2 just when the next is sent: the sender never holds two."""
    sizes = {"forward": 1, "activation": 0, "message": 6, "bandwidth": 6}
    found = simulate(Schedule.from_text("0F0 0F1\n1F0 1F1"), UniformCosts(**sizes)).memory(0)
    assert found.peak == 6


def test_static_memory_has_categories() -> None:
    run = simulate(generate("1f1b", 2, 2), UniformCosts(weights=[1, 10], gradients=[2, 20], optimizer_state=[3, 30], activation=100))
    for device, scale in ((0, 1), (1, 10)):
        found = run.memory(device)
        assert tuple(found.categories) == CATEGORIES
        at_peak = {name: value for name, value in found.peak_categories.items() if value}
        assert at_peak == {"weights": scale, "gradients": 2 * scale, "optimizer": 3 * scale, "activations": (200, 100)[device]}
        assert found.total[-1] == 6 * scale


def test_curve_questions() -> None:
    found = simulate(generate("1f1b", 4, 8), FB).memory(device=0)
    assert (found.peak, found.peak_time) == (4, 3)
    assert [found.at(time) for time in (-1, 0, 0.5, 1, 3, 12, 33, 99)] == [0, 1, 1, 2, 4, 4, 0, 0]
    for device in (4, -1, True):
        with pytest.raises(ScheduleError, match=r"devices are 0\.\.3"):
            simulate(generate("1f1b", 4, 8), FB).memory(device=device)


def test_what_is_always_there_may_not_fit() -> None:
    run = simulate(generate("1f1b", 2, 2), UniformCosts(weights=[10, 1]), cluster=Cluster.uniform(memory=5))
    (overflow,) = run.overflows()
    assert (overflow.device, overflow.op, overflow.needed) == (0, None, 10)


def test_the_op_beside_a_message_that_does_not_fit_is_named() -> None:
    """Device 1 takes a message of 6 at 1 and needs it at 4, where 1F0 starts: that is the op that does not fit in 5."""
    cluster = Cluster.uniform(memory=5, bandwidth=2)
    run = simulate(Schedule.from_text("0F0\n1F0"), UniformCosts(message=6, activation=0), cluster=cluster)
    found = {overflow.device: (str(overflow.op), overflow.time) for overflow in run.overflows()}
    assert found == {0: ("0F0", 1), 1: ("1F0", 1)}


def test_a_cost_model_may_not_invent_categories() -> None:
    class Inventive(UniformCosts):
        def stage_bytes(self, schedule: Schedule) -> Any:
            return {**super().stage_bytes(schedule), "embedding": np.ones(schedule.num_stages)}

    with pytest.raises(ScheduleError, match="embedding"):
        simulate(generate("1f1b", 2, 2), Inventive())


def test_memory_of_several_steps_returns_to_its_baseline_each_time() -> None:
    run = simulate(generate("1f1b", 4, 8), UniformCosts(forward=1, backward=2, weights=7), steps=3)
    for device in range(4):
        found = run.memory(device)
        assert found.peak == 7 + 4 - device
        # device d is done with a step at 33 - 2d and starts the next d after 33
        assert [found.at(33 * step - 0.1) for step in (1, 2, 3)] == [8 if device == 0 else 7] * 3
        assert found.total[-1] == 7
