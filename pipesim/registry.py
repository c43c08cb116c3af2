"""Schedules by name: what is installed, and what a user points at.

A name is found through the entry point group ``pipesim.schedules``, each entry a ``dict[str, callable]``; the built-in
schedules come through that same door. Everywhere a name is accepted, so are ``module:function``, ``file.py:function``
and the name of a file in CSV or text form.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pipesim.errors import ScheduleError, did_you_mean, require_count, require_size
from pipesim.schedule import Schedule
from pipesim.usercode import load_function

__all__ = ["Generator", "available", "find", "generate", "is_file", "options_of", "read_file"]

Generator = Callable[..., Schedule]

GROUP = "pipesim.schedules"


@cache
def available() -> Mapping[str, Generator]:
    """Returns every installed generator by its lower-case name, aliases included.

    Raises:
        ScheduleError: A package's entry is no dictionary of functions, or two packages use one name.

    Examples:
        >>> "1f1b" in available()
        True
    """
    found: dict[str, Generator] = {}
    owner: dict[str, str] = {}
    # the built-in pack first, then by name, so that the order of installation does not matter
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name != "builtin", entry.name, entry.value)):
        try:
            pack = entry.load()
        except (Exception, SystemExit) as error:  # one broken package must be named, whatever it does
            raise ScheduleError(f"the entry point {entry.name!r} ({entry.value}) in group {GROUP} cannot be loaded: {error!r}") from error
        if not isinstance(pack, Mapping) or not all(isinstance(name, str) and callable(function) for name, function in pack.items()):
            raise ScheduleError(f"the entry point {entry.name!r} ({entry.value}) in group {GROUP} must be a dict of name: function")
        for name, function in pack.items():
            key = name.lower()
            if key in found and found[key] is not function:
                raise ScheduleError(f"two packages name a schedule {key!r}: {owner[key]} and {entry.value}")
            found[key], owner[key] = function, entry.value
    return found


def is_file(name: str) -> bool:
    """Whether the name means a file that lists ops, and not a generator."""
    return Path(name).suffix.lower() in (".csv", ".txt") or (name.lower() not in available() and ":" not in name and Path(name).is_file())


def find(name: str) -> Generator:
    """Returns the generator that a name means.

    Args:
        name: An installed name in any case, ``module:function``, or ``file.py:function``.

    Raises:
        ScheduleError: There is none; the text suggests the nearest name.

    Examples:
        >>> find("GPipe").__name__
        'gpipe'
    """
    known = available()
    if name.lower() in known:
        return known[name.lower()]
    module_name, colon, function_name = name.rpartition(":")
    if not colon or not module_name:
        hint = did_you_mean(name, known)
        raise ScheduleError(
            f"there is no schedule {name!r}{hint or '; known: ' + ', '.join(known)} (also accepted: module:function, file.py:function, file.csv)"
        )
    return load_function(module_name, function_name)


def options_of(generator: Generator) -> dict[str, inspect.Parameter]:
    """The keyword options of a generator, which become options on the command line.

    Examples:
        >>> list(options_of(find("1f1b")))
        ['policy', 'max_in_flight']
    """
    try:
        signature = inspect.signature(generator, eval_str=True)
    except NameError:  # annotations whose names are imported for type checkers only
        signature = inspect.signature(generator)
    return {p.name: p for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def generate(name: str, devices: int, microbatches: int, **options: Any) -> Schedule:
    """Generates a schedule by name, checked.

    Args:
        name: An installed name (see ``pipesim list``), ``module:function`` or ``file.py:function``.
        devices: Number of devices.
        microbatches: Number of microbatches, in all.
        **options: The generator's own options.

    Raises:
        ScheduleError: The name, a size or an option is wrong, or what the generator returned is no legal schedule.

    Examples:
        >>> print(generate("1f1b", devices=2, microbatches=2))
        name: 1f1b
        device 0 | 0F0 0F1 0B0 0B1
        device 1 | 1F0 1B0 1F1 1B1
    """
    generator = find(name)
    devices, microbatches = require_count("devices", devices), require_count("microbatches", microbatches)
    require_size(devices, microbatches)
    known = options_of(generator)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(generator).parameters.values())
    for option in options:
        if option not in known and not takes_any:
            hint = did_you_mean(option, known) or (f"; its options are {', '.join(known)}" if known else "; it has no options")
            raise ScheduleError(f"schedule {name!r} has no option {option!r}{hint}")
    try:
        inspect.signature(generator).bind(devices, microbatches, **options)
    except TypeError as error:
        raise ScheduleError(
            f"{name} cannot be called with (devices, microbatches): {error}; a generator takes these two, and keyword options"
        ) from None
    try:
        schedule = generator(devices, microbatches, **options)
    except (ScheduleError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ScheduleError(f"{name} failed: {type(error).__name__}: {error} ({place.filename}:{place.lineno})") from error
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"{name} returned {type(schedule).__name__}; a generator returns a pipesim.Schedule")
    return schedule.check()


def read_file(path: str, **options: Any) -> Schedule:
    """Reads a schedule from a file: CSV if it ends so, else the text form.

    Args:
        path: The file.
        **options: As for :meth:`Schedule.from_csv`.

    Raises:
        ScheduleError: The file is no schedule.
        OSError: It cannot be read.
    """
    if Path(path).suffix.lower() == ".csv":
        return Schedule.from_csv(path, **options)
    from pipesim.files import read_limited

    text = read_limited(path)
    if "forward_compute_time=" in text:
        raise ScheduleError(f"{path} is a layer profile, not a schedule; name a schedule and give the profile as costs (--costs {path})")
    options.setdefault("name", Path(path).stem)
    return Schedule.from_text(text, where=path, **options)
