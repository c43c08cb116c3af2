"""Schedules by name: installed ones, a user's own, and what is wrong in a name or a size."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipesim import ScheduleError, available, generate, registry
from pipesim.registry import find, is_file, options_of, read_file

SIZES = {"devices": 4, "microbatches": 8}


def test_names_are_case_insensitive_and_have_aliases() -> None:
    assert find("GPipe") is find("gpipe") is find("afab")
    assert find("1F1B") is find("dapple") is find("pipedream-flush")
    assert generate("Eager-1F1B", **SIZES) == generate("1f1b", **SIZES, policy="B")
    assert all(name == name.lower() for name in available())


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ScheduleError, match="did you mean '1f1b'"):
        generate("1f2b", **SIZES)
    with pytest.raises(ScheduleError, match="module:function"):
        generate("", **SIZES)


def test_an_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(ScheduleError, match="did you mean 'policy'"):
        generate("1f1b", **SIZES, polcy="B")
    with pytest.raises(ScheduleError, match="no option"):
        generate("naive", **SIZES, policy="B")


@pytest.mark.parametrize("option", [{"policy": "C"}, {"max_in_flight": 0}, {"max_in_flight": True}])
def test_wrong_values_of_options(option: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError, match=next(iter(option))):
        generate("1f1b", **SIZES, **option)


def test_replicas_add_up_to_the_devices() -> None:
    with pytest.raises(ScheduleError, match=r"add up to 3 and there are 4"):
        generate("pipedream", **SIZES, replicas=(2, 1))
    with pytest.raises(ScheduleError, match="replicas"):
        generate("pipedream", **SIZES, replicas=(4, 0))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "naive", "pipedream"])
@pytest.mark.parametrize("value", [0, -1, 7.5, True, "8", None, np.float64(8), float("nan")])
@pytest.mark.parametrize("argument", ["devices", "microbatches"])
def test_B01_sizes_that_are_no_sizes(name: str, argument: str, value: Any) -> None:
    with pytest.raises(ScheduleError, match=argument):
        generate(name, **{**SIZES, argument: value})


def test_B01_numpy_integers_are_whole_numbers() -> None:
    assert generate("1f1b", np.int64(4), np.int32(8)) == generate("1f1b", 4, 8)


# -- a user's own ------------------------------------------------------------------------------------------------------------

SOURCE = '''
from __future__ import annotations
from typing import TYPE_CHECKING
from pipesim import Schedule
if TYPE_CHECKING:
    from collections.abc import Sequence

def mine(devices: int, microbatches: int, *, order: Sequence[int] | None = None) -> Schedule:
    """One device after the other."""
    return Schedule.from_streams([[op for i in range(microbatches) for op in (f"{s}F{i}", f"{s}B{i}")] for s in range(devices)])

def broken(devices, microbatches):
    return Schedule.from_streams([["0B0", "0F0"]])

def other(devices, microbatches):
    return "0F0"

def anything(devices, microbatches, **options):
    return mine(devices, microbatches)
'''


def test_a_function_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my schedules.py"
    path.write_text(SOURCE)
    assert generate(f"{path}:mine", **SIZES) == generate("naive", **SIZES)
    assert list(options_of(find(f"{path}:mine"))) == ["order"]  # its annotation cannot be evaluated at run time
    assert generate(f"{path}:anything", **SIZES, whatever=1) == generate("naive", **SIZES)
    with pytest.raises(ScheduleError, match="0B0 before 0F0"):
        generate(f"{path}:broken", **SIZES)
    with pytest.raises(ScheduleError, match="returned str"):
        generate(f"{path}:other", **SIZES)
    with pytest.raises(ScheduleError, match="did you mean 'mine'"):
        generate(f"{path}:mime", **SIZES)


def test_a_function_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pipesim_test_module.py").write_text(SOURCE)
    (tmp_path / "pipesim_test_broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    assert generate("pipesim_test_module:mine", **SIZES) == generate("naive", **SIZES)
    for name, message in (
        ("pipesim_test_nothing:mine", "no module 'pipesim_test_nothing'"),
        ("pipesim_test_broken:mine", "cannot be loaded: ZeroDivisionError"),
        (".relative:mine", "cannot be loaded"),
        (f"{tmp_path}/none.py:mine", "is not a file"),
        (":mine", "there is no schedule"),
    ):
        with pytest.raises(ScheduleError, match=message):
            generate(name, **SIZES)


def test_a_file_that_cannot_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("def mine(:")
    with pytest.raises(ScheduleError, match="cannot be loaded: SyntaxError"):
        find(f"{path}:mine")


def test_a_file_of_ops_is_read_by_its_form(tmp_path: Path) -> None:
    schedule = generate("1f1b", devices=2, microbatches=2)
    csv, text, plain = tmp_path / "a.csv", tmp_path / "b.txt", tmp_path / "schedule"
    schedule.to_csv(csv)
    text.write_text(str(schedule))
    plain.write_text(str(schedule))
    for path in (csv, text, plain):
        assert is_file(str(path))
        assert read_file(str(path)) == schedule
    assert not is_file("1f1b")
    assert not is_file("module:function")
    assert is_file("missing.csv")  # so that the error says that there is no such file
    with pytest.raises(FileNotFoundError):
        read_file("missing.csv")


# -- packages ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Installs entry points that come from one made-up module."""

    def install(source: str, *names: str) -> None:
        (tmp_path / "pipesim_test_pack.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "pipesim_test_pack", raising=False)
        added = [EntryPoint(name, f"pipesim_test_pack:{name}", registry.GROUP) for name in names]
        monkeypatch.setattr(registry, "entry_points", lambda group: [*installed, *added])
        available.cache_clear()

    installed = list(registry.entry_points(group=registry.GROUP))
    yield install
    available.cache_clear()


def test_a_pack_adds_names(packs: Any) -> None:
    packs("from pipesim.registry import find\nPACK = {'Mine': lambda devices, microbatches: find('gpipe')(devices, microbatches)}", "PACK")
    assert generate("mine", **SIZES) == generate("gpipe", **SIZES)
    assert next(iter(available())) == "naive"  # the built-in ones come first


def test_two_packs_may_not_use_one_name(packs: Any) -> None:
    packs("PACK = {'GPIPE': print}", "PACK")
    with pytest.raises(ScheduleError, match="two packages name a schedule 'gpipe': pipesim"):
        available()


@pytest.mark.parametrize(
    ("source", "message"), [("PACK = [1]", "must be a dict"), ("PACK = {'a': 1}", "must be a dict"), ("1 / 0", "cannot be loaded")]
)
def test_a_broken_pack_is_named(packs: Any, source: str, message: str) -> None:
    packs(source, "PACK")
    with pytest.raises(ScheduleError, match=f"'PACK' .*{message}"):
        available()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def f(d, m):\n    raise KeyError('x')", "failed: KeyError"),
        ("def f(d, m):\n    raise SystemExit(0)", "failed: SystemExit"),
        ("def f():\n    return 1", "cannot be called with"),
        ("def f(d, m, *, need):\n    return 1", "missing a required argument: 'need'"),
        ("raise SystemExit(0)", "cannot be loaded"),
    ],
)
def test_a_generator_that_fails_is_named(tmp_path, body, message):
    (tmp_path / "mine.py").write_text(body)
    with pytest.raises(ScheduleError, match=message):
        generate(f"{tmp_path / 'mine.py'}:f", 2, 2)
