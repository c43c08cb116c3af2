"""The loops that are used where numba is loaded say what NumPy says, to the bit: of every schedule, and of what is wrong with one."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pipesim import Kind, Schedule, ScheduleError, UniformCosts, available, check, generate, jit, simulate
from pipesim.dataflow import messages
from pipesim.engine.compiled import structure

SIZES = ((1, 1), (3, 6), (4, 8))
NAMES = sorted({function: name for name, function in reversed(available().items())}.values())  # each once, without aliases
needs_numba = pytest.mark.skipif(not jit.installed(), reason="numba is not installed (pip install 'pipesim[fast]')")


@contextlib.contextmanager
def by_numpy() -> Iterator[None]:
    """As where numba is not loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "is_loaded", lambda: False)
        yield


@contextlib.contextmanager
def by_loops() -> Iterator[None]:
    """The loops, as plain Python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "is_loaded", lambda: True)
        patch.setattr(jit, "call", lambda function, *arguments: function(*arguments))
        yield


@contextlib.contextmanager
def by_numba() -> Iterator[None]:
    """The loops, compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "is_loaded", lambda: True)
        yield


WAYS = [by_loops, pytest.param(by_numba, marks=needs_numba)]


def plain(value: Any) -> Any:
    """Arrays as lists, tuples as lists, so that == compares every number."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def facts(schedule: Schedule) -> Any:
    """Everything that is said of a schedule in a loop."""
    found, fixed = messages(schedule), structure(schedule)
    tables = [schedule.rows_of(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)]
    numbers = schedule.num_stages, schedule.num_microbatches, schedule.kind_counts, schedule.every_row_a_slot
    return plain([*numbers, schedule.device_rows, schedule.placement, tables, found.source, found.target, fixed.first, fixed.indegree])


def figures(schedule: Schedule, steps: int, barrier: bool, seed: int, bandwidth: float | None) -> Any:
    """Figures of a run: durations and bytes from a few values, so that much happens at one time, or from anywhere."""
    rng = np.random.default_rng(seed)
    shape = (schedule.num_stages, schedule.num_microbatches)

    def some() -> Any:
        return rng.choice([0.0, 0.5, 1.0, 3.0], shape) if seed % 2 else rng.uniform(0, 2, shape)

    given = {name: some() for name in ("forward", "input_grad", "weight_grad", "activation")}
    costs = UniformCosts(
        **given,
        backward=given["input_grad"] + given["weight_grad"],
        message=some() if bandwidth else 0.0,
        weights=2.0,
        bandwidth=bandwidth,
        latency=float(rng.choice([0.0, 0.25])),
    )
    return plain(simulate(schedule, costs, steps=steps, barrier=barrier, engine="simpy").figures())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule(name: str, way: Callable[[], Any]) -> None:
    ran = 0
    for devices, microbatches in SIZES:
        with contextlib.suppress(ScheduleError):  # not every size is legal
            with by_numpy():
                text = str(generate(name, devices, microbatches))

            def again(text: str = text) -> Schedule:
                return Schedule.from_text(text).check().without_communication()

            answers = []
            for one in (by_numpy, way):
                with one():
                    answer = [facts(again())]
                    for seed, bandwidth in enumerate((None, 2.0, 2.0)):
                        steps = 2 if seed == 2 and again().weights == "flush" else 1
                        answer.append(figures(again(), steps, seed < 2, seed, bandwidth))
                    answers.append(answer)
            assert answers[0] == answers[1]
            ran += 1
    assert ran


@pytest.mark.parametrize("name", NAMES)
def test_sound_schedules_need_no_second_look(name: str) -> None:
    """Of those whose stages are a chain: else the loop could say no to everything, and nothing would show it."""
    for devices, microbatches in SIZES:
        with contextlib.suppress(ScheduleError), by_loops():
            schedule = generate(name, devices, microbatches)
            assert check._is_sound(schedule) == (schedule.graph is None)


def broken(schedule: Schedule, rng: random.Random) -> Schedule:
    """A schedule with one or two typing errors."""
    columns = [list(column) for column in zip(*(column.tolist() for column in schedule._columns), strict=True)]
    for _ in range(rng.choice((1, 1, 2))):
        row = rng.randrange(len(columns))
        what = rng.randrange(8)
        if what == 0:
            del columns[row]
        elif what == 1:
            columns.insert(rng.randrange(len(columns) + 1), list(columns[row]))
        elif what == 2:
            other = rng.randrange(len(columns))
            columns[row], columns[other] = columns[other], columns[row]
        elif what == 3:
            columns[row][0] = rng.randrange(schedule.num_devices)
        elif what == 4:
            columns[row][1] = rng.choice((0, 1, schedule.num_stages - 1, schedule.num_stages, 999_999_999))
        elif what == 5:
            columns[row][2] = rng.randrange(len(Kind))
        elif what == 6:
            columns[row][3] = rng.choice((-1, 0, 1, schedule.num_microbatches, 999_999_999))
        else:
            columns[row][4] = not columns[row][4]
        if not columns:
            break
    streams: list[list[list[Any]]] = [[] for _ in range(schedule.num_devices)]
    for device, *op in columns:
        streams[device].append(op)
    return Schedule.from_columns([tuple(np.array(stream).reshape(-1, 4).T) for stream in streams], weights=schedule.weights, graph=schedule.graph)


def verdict(schedule: Schedule) -> str:
    try:
        schedule.check()
    except ScheduleError as error:
        return str(error)
    return "right"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_wrong(name: str, way: Callable[[], Any]) -> None:
    """The same fault is found, in the same words, and nothing wrong is passed."""
    rng = random.Random(name)
    wrong = 0
    for devices, microbatches in SIZES[1:]:
        with contextlib.suppress(ScheduleError):
            with by_numpy():
                schedule = generate(name, devices, microbatches)
            for _ in range(12):
                seed = rng.random()
                said = []
                for one in (by_numpy, way):
                    with one():
                        said.append(verdict(broken(schedule, random.Random(seed))))
                assert said[0] == said[1]
                wrong += said[0] != "right"
    assert wrong > 5


FAULTS = {
    "a microbatch without number, and no other": [[(0, Kind.F, -1)]],
    "a W before its I": [[(0, Kind.F, 0), (0, Kind.W, 0), (0, Kind.I, 0)]],
    "a full backward and a half": [[(0, Kind.F, 0), (0, Kind.B, 0), (0, Kind.W, 0)]],
    "a recomputation after its backward": [[(0, Kind.F, 0), (0, Kind.B, 0), (0, Kind.R, 0)]],
    "a recomputation without backward": [[(0, Kind.F, 0), (0, Kind.R, 0)]],
    "gradients that come from nowhere": [[(0, Kind.F, 0), (0, Kind.B, 0)], [(1, Kind.F, 0)]],
    "a backward of some microbatches": [[(0, Kind.F, 0), (0, Kind.F, 1), (0, Kind.B, 1)]],
    "a pair of an op and what it needs": [[(0, Kind.F, 0, False), (0, Kind.B, 0, True)]],
    "three in one pair": [[(0, Kind.F, 0, False), (0, Kind.F, 1, True), (0, Kind.F, 2, True)]],
    "a pair over two devices": [[(0, Kind.F, 0, False)], [(1, Kind.F, 0, True)]],
    "an update of a stage without forwards": [[(0, Kind.F, 0), (1, Kind.U, 0)]],
    "a backward elsewhere": [[(0, Kind.F, 0)], [(0, Kind.B, 0)]],
    "no forward": [[(0, Kind.U, 0)]],
}


@pytest.mark.parametrize("way", [by_numpy, *WAYS])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str, way: Callable[[], Any]) -> None:
    with way(), pytest.raises(ScheduleError):
        Schedule.from_columns([tuple(np.array(stream, dtype=np.int64).T) for stream in FAULTS[fault]]).check()


@needs_numba
def test_columns_of_other_types_are_compiled_for() -> None:
    """Whoever comes first, with columns that may be written to or not, of one type or another, must not spoil it for the next."""
    from pipesim import loops

    for writeable in (False, True, False):
        for dtype in (np.float64, np.float32):
            times = np.array([0, 1, 2, 3], dtype), np.array([1, 3, 3, 7], dtype)
            for column in times:
                column.setflags(write=writeable)
            result = np.zeros(2)
            jit.call(loops.busy, *times, np.array([0, 2, 4]), result)
            assert result.tolist() == [3, 5]


def test_what_loops_read_is_contiguous_and_read_only() -> None:
    wide = np.arange(6.0).reshape(3, 2)
    (column,) = jit.columns(wide[:, 1])
    assert column.tolist() == [1, 3, 5]
    assert column.flags.c_contiguous
    assert not column.flags.writeable
    assert wide.flags.writeable
