"""Every registered schedule passes the suite that third parties use."""

from __future__ import annotations

import numpy as np
import pytest

from pipesim.errors import ScheduleError
from pipesim.op import Kind
from pipesim.registry import available
from pipesim.schedule import Schedule
from pipesim.testing import SIZES, check_generator

# Sequence splits are microbatches of their own.
SPLITS = {"seq1f1b": 2}


def _first_names():
    names = {}
    for name, generator in available().items():
        names.setdefault(generator, name)
    return sorted(names.values())


# v-auto searches, at half a second a size; zb-1p is zb-auto by another name.
GRID = [(devices, microbatches) for devices in range(1, 9) for microbatches in range(1, 25)]
COARSE = {"v-auto", "zb-1p"}


@pytest.mark.slow
@pytest.mark.parametrize("name", _first_names())
def test_every_size_up_to_8_devices_and_24_microbatches(name):
    sizes = SIZES if name in COARSE else GRID
    assert check_generator(available()[name], sizes=sizes, splits=SPLITS.get(name, 1)).legal


def _good(devices: int, microbatches: int, *, short: bool = False) -> Schedule:
    """Runs forwards only."""
    return Schedule.from_columns([(stage, np.full(microbatches, Kind.F), np.arange(microbatches)) for stage in range(devices)])


def test_a_good_one_passes():
    assert check_generator(_good, sizes=[(1, 1), (3, 2)]).legal == ((1, 1), (3, 2))


def _drops_one(devices: int, microbatches: int) -> Schedule:
    """Forgets the last microbatch where there are more than four."""
    return _good(devices, min(4, microbatches))


def _undocumented(devices: int, microbatches: int) -> Schedule:
    return _good(devices, microbatches)


def _positional_option(devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Takes an option by position."""
    return _good(devices, microbatches)


def _unannotated(devices: int, microbatches: int, *, chunks=1) -> Schedule:
    """Has an option that the command line cannot read."""
    return _good(devices, microbatches)


def _deadlocks(devices: int, microbatches: int) -> Schedule:
    """Cannot finish on two devices."""
    return Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")


def _verbose(devices: int, microbatches: int) -> Schedule:
    """Refuses in two lines."""
    raise ScheduleError("no\nnever")


def _random(devices: int, microbatches: int) -> Schedule:
    """Is another one at every call."""
    _random.calls = getattr(_random, "calls", 0) + 1
    order = np.arange(microbatches)
    return Schedule.from_columns([(stage, np.full(microbatches, Kind.F), order if _random.calls % 2 else order[::-1]) for stage in range(devices)])


@pytest.mark.parametrize(
    ("generator", "needle"),
    [
        (_drops_one, "forwards per stage"),
        (_undocumented, "docstring"),
        (_positional_option, "must take"),
        (_unannotated, "annotation"),
        (_verbose, "one line"),
        (_random, "another schedule"),
        (lambda devices, microbatches: None, "docstring"),
    ],
)
def test_broken_ones_do_not(generator, needle):
    with pytest.raises(AssertionError, match=needle):
        check_generator(generator, sizes=[(2, 8)])


def test_a_deadlock_is_found():
    from pipesim.errors import DeadlockError

    with pytest.raises(DeadlockError):
        check_generator(_deadlocks, sizes=[(2, 2)])
