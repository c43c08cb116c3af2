"""Sweeps: what is run, what is recorded, and that nothing is lost or done twice."""

from __future__ import annotations

import csv
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesim import ScheduleError, grid, pareto_front, run_sweep
from pipesim.cli import main
from pipesim.configurations import configuration_ids

# Schedules that misbehave for some sizes, and say in the file "calls" beside them that they were called.
STRANGER = '''
import os, signal
from pathlib import Path
from pipesim.schedule import Schedule

def strange(devices: int, microbatches: int, *, mode: str = "fine") -> Schedule:
    """One device after the other."""
    with open(Path(__file__).with_name("calls"), "a") as calls:
        calls.write(f"{microbatches} ")
    if microbatches % 2:
        if mode == "raise":
            raise IndexError("odd\\n numbers")
        if mode == "exit":
            raise SystemExit(3)
        if mode == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "deadlock":  # each device first wants what the other sends second
            return Schedule.from_streams([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])
    return Schedule.from_streams([[f"{s}F{i}" for i in range(microbatches)] for s in range(devices)], name="strange")
'''


@pytest.fixture
def stranger(tmp_path: Path) -> str:
    (tmp_path / "stranger.py").write_text(STRANGER)
    return f"{tmp_path / 'stranger.py'}:strange"


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().split()


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


# -- grid --------------------------------------------------------------------------------------------------------------


def test_an_axis_applies_to_the_schedules_that_have_it() -> None:
    found = grid(["1f1b", "interleaved-1f1b"], devices=[2, 4], microbatches=4, chunks=[2, 3], latency=[0, 1])
    assert [(c["schedule"], c["devices"], c["chunks"], c["latency"]) for c in found] == [
        ("1f1b", 2, None, 0), ("1f1b", 2, None, 1), ("1f1b", 4, None, 0), ("1f1b", 4, None, 1),
        ("interleaved-1f1b", 2, 2, 0), ("interleaved-1f1b", 2, 2, 1), ("interleaved-1f1b", 2, 3, 0), ("interleaved-1f1b", 2, 3, 1),
        ("interleaved-1f1b", 4, 2, 0), ("interleaved-1f1b", 4, 2, 1), ("interleaved-1f1b", 4, 3, 0), ("interleaved-1f1b", 4, 3, 1),
    ]  # fmt: skip


def test_a_file_has_no_sizes_and_equal_values_no_second_row(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("0F0 0B0\n1F0 1B0\n")
    found = grid([str(tmp_path / "mine.txt"), "gpipe"], devices=[2, 4, 2], microbatches=[8, 8])
    assert [(Path(c["schedule"]).name, c["devices"]) for c in found] == [("mine.txt", None), ("gpipe", 2), ("gpipe", 4)]
    # F = I = W = 1 slot, so 4 for F0 and B0 of two stages of one microbatch: 1 + 1 + 2 + 2
    assert run_sweep(found)[0]["makespan"] == 6


@pytest.mark.parametrize(
    ("axes", "about"),
    [
        ({"chunk": 2}, "did you mean 'chunks'"),
        ({"devices": 0}, "devices must be at least 1, got 0"),
        ({"devices": [4, 2.5]}, "2.5"),
        ({"devices": True}, "True"),
        ({"forward": -1}, "negative"),
        ({"forward": [1, "a"]}, "'a'"),
        ({"latency": []}, "latency has no values"),
        ({"latency": math.nan}, "not finite"),
        ({"bandwidth": 0}, "above 0"),
        ({"recompute_policy": "sometimes"}, "sometimes"),
        ({"cluster": "dgx-a1000"}, "dgx-a100"),
        ({"cluster": "dgx-a100"}, "physical"),
        ({"costs": "nothing.toml"}, "nothing.toml"),
        ({"costs": "gpt-1.5b-a100", "forward": 1}, "leave out forward"),
        ({"weight_grad_share": 0.5}, "layer profile"),
        ({"steps": 0}, "steps"),
        ({"policy": object()}, "policy must hold"),
        ({"policy": "A\nB"}, "not one line"),
        ({"policy": "A\n"}, "not one line"),
        ({"capacity": "3 GB"}, "capacity must be a number"),
        ({"capacity": -1}, "memory"),
        ({"barrier": 1}, "True or False"),
        ({"cluster": 7}, "names"),
        ({"unit": "ms"}, "'ms'"),
        ({"latency": range(1000), "forward": range(1, 1002)}, "more than 1000000 configurations"),
    ],
)
def test_what_is_wrong_for_every_schedule_is_refused_before_anything_runs(axes: dict[str, Any], about: str) -> None:
    with pytest.raises(ScheduleError, match=about):
        grid(["1f1b", "interleaved-1f1b"], **{"devices": 4, "microbatches": 8, **axes})


def test_engines_and_jobs_that_there_are_not(tmp_path: Path) -> None:
    found = grid("1f1b", devices=4, microbatches=[2000, 4000])
    with pytest.raises(ScheduleError, match="did you mean 'simpy'"):
        run_sweep(found, tmp_path / "out.csv", engine="simpi")
    with pytest.raises(ScheduleError, match="jobs"):
        run_sweep(found, jobs=0)
    assert not (tmp_path / "out.csv").exists()


def test_missing_sizes_and_wrong_names() -> None:
    with pytest.raises(ScheduleError, match="wants microbatches"):
        grid("1f1b", devices=4)
    with pytest.raises(ScheduleError, match="did you mean 'gpipe'"):
        grid(["1f1b", "gpip"], devices=4, microbatches=8)
    with pytest.raises(ScheduleError, match="at least one name"):
        grid([])


def test_the_id_follows_the_contents_of_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("0F0 0B0\n")
    (before,) = configuration_ids(grid(str(file), forward=1))
    assert configuration_ids(grid(str(file), forward=1.0)) == [before]
    assert configuration_ids(grid(str(file), forward=2)) != [before]
    file.write_text("0F0 0F1 0B0 0B1\n")
    assert configuration_ids(grid(str(file), forward=1)) != [before]


# -- figures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_figures_are_the_closed_forms(name: str) -> None:
    # (m + p - 1)(F + B); activations: GPipe holds all m, 1F1B min(m, p); each of 3 units
    rows = run_sweep(grid(name, devices=[2, 4], microbatches=[4, 8], forward=1, backward=2, activation=3))
    assert len(rows) == 4
    for row in rows:
        p, m = row["devices"], row["microbatches"]
        assert row["makespan"] == (m + p - 1) * 3
        assert row["throughput"] == m / ((m + p - 1) * 3)
        assert row["bubble_fraction"] == pytest.approx((p - 1) / (m + p - 1))
        assert row["peak_activations"] == (m if name == "gpipe" else min(m, p))
        assert row["peak_memory"] == 3 * row["peak_activations"]
        assert row["error"] is None


def test_a_model_of_given_stages_and_microbatches_is_cut_in_pieces() -> None:
    """A schedule that cuts each microbatch in two runs the same work: pieces of half the time, on one device 8 x 3 in all."""
    whole, pieces = run_sweep(grid(["1f1b", "seq1f1b"], devices=1, microbatches=8, splits=2, forward=1, backward=2, stages=1))
    assert whole["makespan"] == pieces["makespan"] == 24


def test_steps_barrier_capacity_and_stages() -> None:
    # two steps take twice as long, in the same memory: 4 units on device 0, so 3.5 do not suffice
    one, two = run_sweep(grid("1f1b", devices=4, microbatches=8, forward=1, backward=2, steps=[1, 2], capacity=3.5))
    assert (one["makespan"], two["makespan"], one["throughput"], two["throughput"]) == (33, 66, 8 / 33, 8 / 33)
    assert (one["fits"], two["fits"]) == (False, False)
    # 4 stages' numbers on 8 devices: half of each, (8 + 7) * 1.5
    (row,) = run_sweep(grid("1f1b", devices=8, microbatches=8, forward=1, backward=2, stages=4))
    assert row["makespan"] == 22.5


def test_costs_and_clusters_by_name() -> None:
    # the preset's stage times are of one of 8 stages; 18.522 + 18.086 + 9.337 ms and a hop of 0.601 ms with GPipe's 2(p - 1) hops exposed
    (row,) = run_sweep(grid("gpipe", devices=8, microbatches=24, costs="gpt-1.5b-a100"))
    assert row["unit"] == "s"
    assert row["makespan"] == pytest.approx((31 * (18.522 + 18.086 + 9.337) + 14 * 0.601) * 1e-3)
    # no message bytes, so a hop is the preset's latency inside a node: 2(p - 1) of them, one microbatch
    slow, fast = run_sweep(grid("gpipe", devices=2, microbatches=1, forward=1, backward=1, unit="s", cluster=["ethernet-25g", "dgx-a100"]))
    assert slow["makespan"] > fast["makespan"] > 4


def test_orders_that_depend_on_costs_get_them() -> None:
    # hanayo's greedy order takes forward and backward as options; the default would be F = 1, B = 2
    found = grid("hanayo", devices=4, microbatches=8, order="greedy", forward=3, backward=1)
    from pipesim import UniformCosts, generate, simulate

    expected = simulate(generate("hanayo", 4, 8, order="greedy", forward=3.0, backward=1.0), UniformCosts(forward=3, backward=1))
    assert run_sweep(found)[0]["makespan"] == expected.makespan


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "about"),
    [("raise", "IndexError: odd numbers"), ("exit", "SystemExit: 3"), ("deadlock", "device 0")],
)
def test_a_failure_is_a_row_and_the_others_go_on(stranger: str, tmp_path: Path, mode: str, about: str) -> None:
    rows = run_sweep(grid(stranger, devices=2, microbatches=[1, 2, 3, 4], mode=mode, forward=1), tmp_path / "out.csv")
    # forwards only: m + p - 1
    assert [row["makespan"] for row in rows] == [None, 3, None, 5]
    assert about in rows[0]["error"]
    assert "\n" not in rows[0]["error"]
    again = run_sweep(grid(stranger, devices=2, microbatches=[1, 2, 3, 4], mode=mode, forward=1), tmp_path / "out.csv")
    assert again == rows
    assert len(calls(tmp_path)) == 4


def test_a_worker_that_dies_costs_one_row(stranger: str, tmp_path: Path) -> None:
    # large enough to be batches of their own, two of them under way when the worker dies
    rows = run_sweep(grid(stranger, devices=2, microbatches=[6000, 6001, 6002], mode="die", forward=1), tmp_path / "out.csv", jobs=2)
    assert [row["makespan"] for row in rows] == [6001, None, 6003]
    assert "died" in rows[1]["error"]


def test_sizes_that_a_schedule_refuses_are_its_rows(tmp_path: Path) -> None:
    rows = run_sweep(grid(["chimera", "gpipe"], devices=[3, 4], microbatches=4))
    assert [row["error"] is None for row in rows] == [False, True, True, True]
    assert "devices" in rows[0]["error"]


# -- the file ----------------------------------------------------------------------------------------------------------


def _small(stranger: str, last: int = 8) -> list[dict[str, Any]]:
    return grid(stranger, devices=2, microbatches=range(1, last), mode="fine, thanks", forward=0.1)


def test_rows_are_read_back_as_they_were(stranger: str, tmp_path: Path) -> None:
    for name in ("out.csv", "out.parquet"):
        rows = run_sweep(_small(stranger), tmp_path / name)
        assert run_sweep(_small(stranger), tmp_path / name) == rows == run_sweep(_small(stranger))
    assert len(calls(tmp_path)) == 4 * 7  # not for the files that were there


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_values_may_be_added_and_only_they_run(stranger: str, tmp_path: Path, name: str) -> None:
    run_sweep(_small(stranger, 4), tmp_path / name)
    seen: list[tuple[int, int]] = []
    rows = run_sweep(_small(stranger, 6), tmp_path / name, progress=lambda done, total: seen.append((done, total)))
    assert calls(tmp_path) == ["1", "2", "3", "4", "5"]
    assert [row["microbatches"] for row in rows] == [1, 2, 3, 4, 5]
    assert seen[0] == (3, 5)
    assert seen[-1] == (5, 5)


def test_a_file_cut_at_any_byte_is_completed(stranger: str, tmp_path: Path) -> None:
    """What a kill in the middle of a write leaves: the half line goes, its row is run again, and the file is as before."""
    whole = tmp_path / "whole.csv"
    run_sweep(_small(stranger, 4), whole)
    data = whole.read_bytes()
    for cut in [*range(0, len(data), 11), len(data) - 1]:
        part = tmp_path / "part.csv"
        part.write_bytes(data[:cut])
        run_sweep(_small(stranger, 4), part)
        assert part.read_bytes() == data, cut


@pytest.mark.parametrize(
    ("content", "about"),
    [
        ("my notes", "holds no results of a sweep"),
        ("id,schedule\n", "other columns"),
        ("my,notes\n1,2\n", "other columns"),
        ("HEADERffff,1,2\n", "line 2 has 3 values"),
        ("HEADER0123456789abcdef,x,2,1,fine,0.1,slot,1.0,1.0,1.0,0.0,0.0,0.0,1.0,1,True,\n", "another sweep, such as schedule x"),
        ("HEADERID,x,2,1,fine,0.1,slot,1.0,1.0,1.0,0.0,0.0,0.0,1.0,1,perhaps,\n", "line 2 is damaged"),
        ("HEADERID,x,2,1,fine,0.1,slot,1.0,1.0,one,0.0,0.0,0.0,1.0,1,True,\n", "line 2 is damaged"),
        ("HEADER\xff\n", "damaged or no CSV"),
        ('HEADER"a\n', "damaged or no CSV"),
        ("HEADER\0\0\0\n", "line 2"),
    ],
)
def test_other_files_are_refused_and_left_as_they_are(stranger: str, tmp_path: Path, content: str, about: str) -> None:
    run_sweep(_small(stranger, 2), tmp_path / "good.csv")
    header, row = (tmp_path / "good.csv").read_text().splitlines()
    data = content.replace("HEADER", header + "\n").replace("ID", row.partition(",")[0]).encode("latin-1")
    (tmp_path / "other.csv").write_bytes(data)
    with pytest.raises(ScheduleError, match=about):
        run_sweep(_small(stranger, 2), tmp_path / "other.csv")
    assert (tmp_path / "other.csv").read_bytes() == data


def test_other_things_than_files_are_refused(stranger: str, tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "file.parquet").write_text("x")
    for name in ("folder.csv", "pipe.csv", "file.parquet", "out.xlsx"):
        with pytest.raises(ScheduleError, match=name):
            run_sweep(_small(stranger, 2), tmp_path / name)
    with pytest.raises(FileNotFoundError):
        run_sweep(_small(stranger, 2), tmp_path / "nowhere" / "out.csv")


def test_two_sweeps_do_not_write_one_file(stranger: str, tmp_path: Path) -> None:
    from pipesim.resultsfile import open_rows

    for name in ("out.csv", "out.parquet"):
        file = open_rows(tmp_path / name, {"id": str}, ())
        code = f"from pipesim.resultsfile import open_rows; open_rows({str(tmp_path / name)!r}, {{'id': str}}, ())"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert "another sweep is writing" in other.stderr
        file.close()
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0


def test_parquet_is_a_folder_of_parts_that_reads_as_one_table(stranger: str, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "out.parquet"
    rows = run_sweep(_small(stranger, 4), out)
    (out / ".part-000001.parquet.x7").write_text("half a par")  # what a kill leaves
    rows = run_sweep(_small(stranger, 6), out)
    table = parquet.read_table(out)
    assert sorted(table.column("microbatches").to_pylist()) == [1, 2, 3, 4, 5]
    assert sorted(table.column("id").to_pylist()) == sorted(row["id"] for row in rows)
    assert [path.name for path in sorted(out.iterdir())] == [".lock", "part-000000.parquet", "part-000001.parquet"]
    with pytest.raises(ScheduleError, match="another sweep, such as"):
        run_sweep(_small(stranger, 2), out)
    with pytest.raises(ScheduleError, match="other columns"):
        run_sweep(grid(stranger, devices=2, microbatches=1), out)
    (out / "part-000002.parquet").write_text("half")
    with pytest.raises(ScheduleError, match="damaged or no Parquet"):
        run_sweep(_small(stranger, 6), out)


def test_lists_and_mixtures_are_texts_in_the_file(tmp_path: Path) -> None:
    rows = run_sweep(grid("gpipe", devices=2, microbatches=2, forward=[1, [1, 2]], backward=2), tmp_path / "out.csv")
    assert [row["forward"] for row in rows] == ["1.0", "[1.0, 2.0]"]
    with open(tmp_path / "out.csv", newline="") as file:
        assert [row["forward"] for row in csv.DictReader(file)] == ["1.0", "[1.0, 2.0]"]


# -- many processes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipesim.sweep._OPS", 2000)


def _several() -> list[dict[str, Any]]:
    return grid(["1f1b", "gpipe", "chimera"], devices=[3, 4], microbatches=[64, 128, 256], forward=1, backward=2, latency=[0, 0.3])


@pytest.mark.usefixtures("small_batches")
def test_the_rows_do_not_depend_on_how_many_share_them(tmp_path: Path) -> None:
    alone = run_sweep(_several(), tmp_path / "one.csv")
    assert run_sweep(_several(), tmp_path / "two.csv", jobs=2) == alone
    assert sorted(lines(tmp_path / "two.csv")) == sorted(lines(tmp_path / "one.csv"))


@pytest.mark.usefixtures("small_batches")
def test_dask_runs_a_sweep_unchanged(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    joblib = pytest.importorskip("joblib")
    options = {"processes": False, "n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster), joblib.parallel_config(backend="dask"):
        rows = run_sweep(_several(), tmp_path / "dask.csv")
    assert rows == run_sweep(_several())
    assert len(lines(tmp_path / "dask.csv")) == len(rows) + 1


@pytest.mark.usefixtures("small_batches")
def test_a_backend_that_gives_no_results_before_all_are_there(tmp_path: Path) -> None:
    """As Ray's, which needs a cluster: ``register_ray(); with joblib.parallel_config(backend="ray"): run_sweep(...)``."""
    joblib = pytest.importorskip("joblib")
    from joblib._parallel_backends import ThreadingBackend

    class Plain(ThreadingBackend):  # type: ignore[misc]
        supports_return_generator = False

    joblib.register_parallel_backend("plain", Plain)
    seen: list[int] = []
    with joblib.parallel_config(backend="plain", n_jobs=1):
        rows = run_sweep(_several(), tmp_path / "plain.csv", jobs=2, progress=lambda done, total: seen.append(done))
    assert rows == run_sweep(_several())
    assert len(seen) > 1 + 8  # batches; they went in rounds of eight


# -- the front ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.sampled_from("ab")), max_size=12))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int, str]]) -> None:
    rows = [{"throughput": t, "peak_memory": m, "link": link, "number": i} for i, (t, m, link) in enumerate(points)]

    def beaten(row: dict[str, Any], others: list[dict[str, Any]]) -> bool:
        def better(o: dict[str, Any]) -> bool:
            as_good = o["throughput"] >= row["throughput"] and o["peak_memory"] <= row["peak_memory"]
            return as_good and (o["throughput"], o["peak_memory"]) != (row["throughput"], row["peak_memory"])

        return any(better(o) for o in others)

    assert {row["number"] for row in pareto_front(rows)} == {row["number"] for row in rows if not beaten(row, rows)}
    per_link = {row["number"] for row in rows if not beaten(row, [o for o in rows if o["link"] == row["link"]])}
    assert {row["number"] for row in pareto_front(rows, by=["link"])} == per_link


def test_the_front_leaves_out_what_failed_or_does_not_fit() -> None:
    pandas = pytest.importorskip("pandas")
    rows = run_sweep(grid(["chimera", "1f1b", "gpipe"], devices=[3, 4], microbatches=8, forward=1, backward=2, capacity=3.5))
    front = pareto_front(rows)
    assert [(row["schedule"], row["devices"]) for row in front] == [("1f1b", 3)]
    # as pandas reads it from the file: NaN, numpy's truth values
    assert [row["id"] for row in pareto_front(pandas.DataFrame(rows).to_dict("records"))] == [front[0]["id"]]
    assert pareto_front([]) == []


# -- the docs ----------------------------------------------------------------------------------------------------------

DOCS = (Path(__file__).parent.parent / "docs" / "sweeps.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS, re.DOTALL)


@pytest.mark.parametrize("number", range(3))
def test_python_of_the_docs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.chdir(tmp_path)
    exec(_blocks("python")[number], {})


@pytest.mark.parametrize("line", [*re.findall(r"^    (pipesim .*)$", DOCS, re.MULTILINE), "pipesim sweep --file sweep.toml"])
def test_commands_of_the_docs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sweep.toml").write_text(_blocks("toml")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", line.split())
    main()  # exits only where something is wrong
