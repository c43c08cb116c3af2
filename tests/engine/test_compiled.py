"""The compiled engine: the same times as the reference, bit for bit, and how it is chosen, compiled and kept."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipesim
from pipesim import (
    Cluster,
    DeadlockError,
    Kind,
    Link,
    Op,
    Pair,
    Schedule,
    ScheduleError,
    Timeline,
    UniformCosts,
    available,
    engine,
    generate,
    simulate,
)
from pipesim.engine import compiled

needs_numba = pytest.mark.skipif(not compiled.installed(), reason="numba is not installed (pip install 'pipesim[fast]')")
QUICK = settings(max_examples=60, deadline=None, database=None)
COLUMNS = ("start", "end", "sent", "departed", "arrived", "offload_start", "offload_end")
FB = UniformCosts(forward=1, backward=2)


def both(schedule: Schedule, costs: UniformCosts, **options: Any) -> Timeline:
    """Runs a schedule on both engines, and compares every number of the two runs."""
    reference, run = (simulate(schedule, costs, engine=name, **options) for name in ("simpy", "compiled"))
    assert (reference.info["engine"], run.info["engine"]) == ("simpy", "compiled")
    for column in COLUMNS:
        assert np.array_equal(getattr(run, column), getattr(reference, column)), column
    return run


def some_costs(schedule: Schedule, seed: int, values: list[float] | None = None) -> UniformCosts:
    """Durations and sizes for every op, from a few *values*, so that there are ties, or from anywhere."""
    rng = np.random.default_rng(seed)
    table = (schedule.num_stages, schedule.num_microbatches)

    def some(shape: Any) -> Any:
        return rng.uniform(0, 3, shape) if values is None else rng.choice(values, shape)

    return UniformCosts(
        forward=some(table), backward=some(table), input_grad=some(table), weight_grad=some(table), message=some(table), activation=some(table),
        optimizer=some(table[0]),
    )  # fmt: skip


def some_cluster(devices: int, seed: int) -> Cluster:
    """Links that all differ: with and without latency, with and without bandwidth."""
    rng = random.Random(seed)

    def link() -> Link:
        return Link(rng.choice([0.0, 0.1, 1.0, rng.uniform(0, 2)]), rng.choice([None, 1.0, 2.0, rng.uniform(0.5, 9)]))

    return Cluster(unit="slot", host=link(), links={(a, b): link() for a in range(devices) for b in range(devices) if a != b})


# -- the same, bit for bit ---------------------------------------------------------------------------------------------------


@needs_numba
@pytest.mark.parametrize("name", sorted(available()))
def test_every_registered_schedule(name: str) -> None:
    ran = 0
    for devices, microbatches in ((4, 8), (3, 6), (2, 2), (1, 3)):
        with contextlib.suppress(ScheduleError):  # not every size is legal
            schedule = generate(name, devices, microbatches).without_communication()
            for values in (None, [0.0, 0.1, 0.2, 0.3]):
                for steps, barrier in ((1, True), (3, True), (3, False)) if schedule.weights == "flush" else ((1, True),):
                    seed = devices + steps
                    both(schedule, some_costs(schedule, seed, values), cluster=some_cluster(devices, seed), steps=steps, barrier=barrier)
                    ran += 1
    assert ran


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """Arguments of random_schedule."""
    shape: dict[str, Any] = {"seed": draw(st.integers(0, 10**6)), "devices": draw(st.integers(1, 5)), "microbatches": draw(st.integers(1, 6))}
    for option in ("dag", "replicas", "split", "recompute", "pairs", "forward_only", "updates"):
        shape[option] = draw(st.booleans())
    return shape


VALUES = st.sampled_from([None, [0.0, 1.0, 2.0], [0.0, 0.0, 1.0], [0.1, 0.2, 0.3, 0.7]])


@needs_numba
@QUICK
@given(case=cases(), values=VALUES, steps=st.integers(1, 3), barrier=st.booleans())
def test_random_schedules(case: Any, values: Any, steps: int, barrier: bool, random_schedule: Any) -> None:
    schedule = random_schedule(**case)
    both(schedule, some_costs(schedule, case["seed"], values), cluster=some_cluster(case["devices"], case["seed"]), steps=steps, barrier=barrier)


def with_moves(schedule: Schedule, seed: int) -> Schedule:
    """Some activations go out and come back between their F and their backward, to the host or to another device."""
    rng = random.Random(seed)
    streams = []
    for stream in schedule.streams:
        stream = list(stream)
        for op in [op for op in stream if op.kind is Kind.F and rng.random() < 0.6]:
            later = [
                k for k, other in enumerate(stream) if other[0] == op.stage and other[2] == op.microbatch and other.kind in (Kind.R, Kind.B, Kind.I)
            ]
            if later:
                out = rng.randint(stream.index(op) + 1, later[0])
                stream.insert(out, Op(op.stage, Kind.OFFLOAD, op.microbatch))
                stream.insert(rng.randint(out + 1, later[0] + 1), Op(op.stage, Kind.RELOAD, op.microbatch))
        streams.append(stream)
    devices = schedule.num_devices
    targets: dict[int, int | None] = {d: rng.choice([None, *(other for other in range(devices) if other != d)]) for d in range(devices)}
    return Schedule.from_streams(streams, graph=schedule.graph, offload_to=targets)


@needs_numba
@QUICK
@given(case=cases(), values=VALUES, steps=st.integers(1, 3), barrier=st.booleans())
def test_random_schedules_with_links_that_devices_share(case: Any, values: Any, steps: int, barrier: bool, random_schedule: Any) -> None:
    schedule = with_moves(random_schedule(**{**case, "pairs": False, "forward_only": False}), case["seed"])
    both(schedule, some_costs(schedule, case["seed"], values), cluster=some_cluster(case["devices"], case["seed"]), steps=steps, barrier=barrier)


@needs_numba
@QUICK
@given(case=cases(), steps=st.integers(1, 2), barrier=st.booleans())
def test_an_independent_longest_path(case: Any, steps: int, barrier: bool, random_schedule: Any, longest_path: Any) -> None:
    """Not only equal to the reference: both equal a calculation that knows neither."""
    schedule = random_schedule(**{**case, "pairs": False, "updates": False})
    costs, cluster = some_costs(schedule, case["seed"]), some_cluster(case["devices"], case["seed"])
    # updates that take time would be listed; these take none
    costs = UniformCosts(**{name: getattr(costs, name) for name in ("forward", "backward", "input_grad", "weight_grad", "message")})
    times = {Kind.F: costs.forward, Kind.R: costs.forward, Kind.B: costs.backward, Kind.I: costs.input_grad, Kind.W: costs.weight_grad}
    run = simulate(schedule, costs, cluster=cluster, steps=steps, barrier=barrier, engine="compiled")
    links = {pair: (link.latency, link.bandwidth) for pair, link in cluster.links.items()}
    expected = longest_path(
        schedule, lambda op: float(times[op.kind][op.stage, op.microbatch]), links, lambda s, i: float(costs.message[s, i]), steps, barrier
    )
    first = schedule.device_slots
    for (step, device, position), (start, end) in expected.ops.items():
        assert (run.start[step, first[device] + position], run.end[step, first[device] + position]) == (start, end)


@needs_numba
def test_queues_that_can_choose_at_one_time() -> None:
    """The lowest queue first, by (from, to); what it causes at that very time comes before the next choice.

    F = 2 on device 0, nothing on device 1, 1 on device 2; messages into device 1 have no bytes, into device 2 one, bandwidth 1.
    At 2 the activation of 0F0 asks for 0 -> 1 and 3RELOAD0 (device 2, issued after 4F0, 1..2) for 1 -> 2. Queue 0 -> 1 is
    first: the activation is there at 2, 1F0 runs 2..2, and its activation asks for 1 -> 2 at 2 too, from device 1, so before
    device 2's RELOAD: it takes 2..3, and the RELOAD 3..4 (one unit).
    """
    text = "offload: 2>1\n0F0\n1F0\n3F0 3OFFLOAD0 4F0 3RELOAD0 2F0 3B0"
    schedule = Schedule.from_text(text, graph=[(0, 1), (1, 2)])
    costs = UniformCosts(forward=[2, 0, 1, 1, 1], backward=1, message=[0, 1, 0, 0, 0], activation=1, bandwidth=1)
    run = both(schedule, costs)
    assert run.departed[0].tolist() == [2, 2]
    assert run.offload_start[0].tolist() == [1, 3]
    assert run.offload_end[0].tolist() == [2, 4]


@needs_numba
def test_closed_forms() -> None:
    # (m + p - 1)(F + B), and with a hop c: naive takes m (p (F + B) + 2 (p - 1) c)
    assert simulate(generate("1f1b", 32, 512), FB, engine="compiled").makespan == (512 + 31) * 3
    assert simulate(generate("naive", 4, 5), UniformCosts(forward=1, backward=2, latency=0.25), engine="compiled").makespan == 5 * (12 + 1.5)


@needs_numba
def test_a_schedule_without_messages_and_one_with_unused_devices() -> None:
    both(Schedule.from_text("0F0 0F1 0B0 0B1"), UniformCosts(forward=0.1, backward=0.2), steps=2)
    both(Schedule.from_streams([[], ["0F0", "0B0"], [], ["1F0", "1B0"]]), UniformCosts(latency=0.5, optimizer=1), steps=2)


# -- deadlocks -------------------------------------------------------------------------------------------------------------


def same_deadlock(schedule: Schedule, **options: Any) -> bool:
    """Whether the run deadlocks; then with the same text on both engines."""
    costs = UniformCosts(optimizer=options.pop("optimizer", 0))
    texts = []
    for name in ("simpy", "compiled"):
        try:
            simulate(schedule, costs, engine=name, **options)
        except DeadlockError as error:
            texts.append(str(error))
    assert len(set(texts)) <= 1
    assert len(texts) in (0, 2)
    return bool(texts)


@needs_numba
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize("optimizer", [0, 1])
@pytest.mark.parametrize(
    ("text", "graph"),
    [
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", None),
        # 0 has only forwards and finishes; 3 waits for 2
        ("0F0 0F1\n1F0 1B0 1F1 1B1\n2F0 2F1 2B0 2B1\n3F0 3F1 3B1 3B0", None),
        # two pipelines, of which one can finish
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n2F0 2B0 2F1 2B1\n3F0 3F1 3B0 3B1", [(0, 1), (2, 3)]),
        ("(0F0;3F0)PAIR\n1F0 2F0", [(0, 1), (2, 3)]),
        # with links that are shared
        ("offload: 0>1\n0F0 0OFFLOAD0 0RELOAD0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", None),
    ],
)
def test_known_deadlocks(text: str, graph: Any, optimizer: int, barrier: bool, steps: int) -> None:
    assert same_deadlock(Schedule.from_text(text, graph=graph), optimizer=optimizer, barrier=barrier, steps=steps)


@needs_numba
def test_a_deadlock_behind_the_barrier() -> None:
    """Two devices update, then each waits for what the other lists later. The third goes on, up to the next step's barrier."""
    schedule = Schedule.from_text("0F0 0B0 0U0 3F0 4F0\n1F0 1B0 1U0 5F0 2F0\n6F0", graph=[(4, 5), (2, 3)])
    for steps in (1, 2, 3):
        for barrier in (True, False):
            assert same_deadlock(schedule, optimizer=1, steps=steps, barrier=barrier)


@needs_numba
@QUICK
@given(case=cases(), steps=st.integers(1, 3), barrier=st.booleans(), moved=st.booleans())
def test_shuffled_streams(case: Any, steps: int, barrier: bool, moved: bool, random_schedule: Any) -> None:
    rng = random.Random(case["seed"])
    schedule = random_schedule(**{**case, "forward_only": False})
    if moved and not any(isinstance(slot, Pair) for stream in schedule.streams for slot in stream):
        schedule = with_moves(schedule, case["seed"])
    for _ in range(10):
        streams = schedule.streams
        stream = rng.choice([stream for stream in streams if stream])
        a, b = rng.randrange(len(stream)), rng.randrange(len(stream))
        stream[a], stream[b] = stream[b], stream[a]
        with contextlib.suppress(ScheduleError):
            schedule = Schedule.from_streams(streams, graph=schedule.graph, offload_to=schedule.offload_to).check()
    same_deadlock(schedule, steps=steps, barrier=barrier)


# -- which engine ------------------------------------------------------------------------------------------------------------


def test_without_numba_there_is_simpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "installed", lambda: False)
    monkeypatch.setattr(compiled, "is_loaded", lambda: False)
    monkeypatch.setattr(engine, "PATIENCE", 0)
    schedule = generate("1f1b", 2, 2)
    assert simulate(schedule, FB).info["engine"] == "simpy"
    with pytest.raises(ScheduleError, match=re.escape("needs numba, which is not installed; pip install 'pipesim[fast]', or take engine='simpy'")):
        simulate(schedule, FB, engine="compiled")


@needs_numba
def test_what_it_does_not_cover_is_an_error_and_auto_takes_simpy(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = generate("1f1b", 2, 2)
    monkeypatch.setattr(engine, "PATIENCE", 0)
    assert simulate(schedule, FB).info["engine"] == "compiled"
    monkeypatch.setattr(compiled, "_MOST", 7)
    assert simulate(schedule, FB).info["engine"] == "simpy"
    with pytest.raises(ScheduleError, match="does not cover a step of more than 7 slots or transfers; take engine='simpy'"):
        simulate(schedule, FB, engine="compiled")


@needs_numba
def test_auto_waits_until_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """1F1B with p = 2, m = 5 has 20 slots: two runs fit into a patience of 40, the third does not, nor do three steps."""
    schedule = generate("1f1b", 2, 5)
    monkeypatch.setattr(engine, "PATIENCE", 40)
    monkeypatch.setattr(compiled, "is_loaded", lambda: False)
    for steps, taken in (([1, 1, 1], ["simpy", "simpy", "compiled"]), ([3], ["compiled"])):
        monkeypatch.setattr(engine, "_left_to_simpy", 0)
        assert [simulate(schedule, FB, steps=count).info["engine"] for count in steps] == taken
    monkeypatch.setattr(engine, "_left_to_simpy", 0)
    monkeypatch.setattr(compiled, "is_loaded", lambda: True)
    assert simulate(schedule, FB).info["engine"] == "compiled"


# -- compiling once ----------------------------------------------------------------------------------------------------------

COMPILES = "pipesim compiles its fast engine, once per installation"
RUN = """
import pipesim, sys
schedule = pipesim.Schedule.from_text("0F0 0B0\\n1F0 1B0")
assert "numba" not in sys.modules
assert pipesim.simulate(schedule, engine="simpy").makespan == 6
assert "numba" not in sys.modules
print(pipesim.simulate(schedule, engine="compiled").makespan, pipesim.__file__)
"""


@pytest.fixture
def installation(tmp_path: Path) -> Callable[..., list[subprocess.CompletedProcess[str]]]:
    """Runs a few lines in processes of an installation of its own, whose folder of compiled code cannot be made."""
    package = tmp_path / "site" / "pipesim"
    source = Path(pipesim.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "engine" / "__pycache__").write_text("a file where numba wants a folder: read-only permissions do not stop root")

    def run(home: Path, count: int = 1, **variables: str) -> list[subprocess.CompletedProcess[str]]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "XDG_"))}
        env = {**kept, "PYTHONPATH": str(package.parent), "HOME": str(home), **variables}
        started = [
            subprocess.Popen([sys.executable, "-c", RUN], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        done = []
        for process in started:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            assert out == f"6.0 {package / '__init__.py'}\n"
            done.append(subprocess.CompletedProcess(process.args, 0, out, err))
        return done

    return run


@needs_numba
@pytest.mark.slow
def test_compiled_code_is_kept_where_the_package_is_read_only(installation: Any, tmp_path: Path) -> None:
    """Of two processes that come first at once one compiles, and none that come later."""
    home = tmp_path / "home"
    home.mkdir()
    first = [run.stderr for run in installation(home, count=2)]
    assert sorted(text.count(COMPILES) for text in first) == [0, 1]
    assert [run.stderr for run in installation(home)] == [""]
    # elsewhere by the user's wish
    place = tmp_path / "place"
    assert installation(home, NUMBA_CACHE_DIR=str(place))[0].stderr.count(COMPILES) == 1
    assert list(place.rglob("*.nbc"))


@needs_numba
@pytest.mark.slow
def test_compiled_code_that_can_be_kept_nowhere(installation: Any, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("no folder")
    said = installation(tmp_path / "home")[0].stderr
    assert "finds no folder to keep compiled code in, so every process compiles it again; set NUMBA_CACHE_DIR to one" in said
    assert COMPILES in said
