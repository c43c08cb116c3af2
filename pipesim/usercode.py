"""A user's own function, named ``module:function`` or ``file.py:function``: the only code of theirs that is executed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipesim.errors import ScheduleError, did_you_mean

__all__ = ["load_function"]


def load_function(module_name: str, function_name: str) -> Callable[..., Any]:
    """Imports a module, or runs a file that ends with ``.py``, and returns a function of it.

    Raises:
        ScheduleError: There is no such module, file or function, or loading it fails, whatever it raises.

    Examples:
        >>> load_function("math", "gcd")(4, 6)
        2
    """
    module = _file(Path(module_name)) if module_name.endswith(".py") else _module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ScheduleError(f"{module_name} has no function {function_name!r}{did_you_mean(function_name, functions)}")
    return function  # type: ignore[no-any-return]


def _module(name: str) -> Any:
    # as `python -m` does: the user's module lies in the current folder
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ScheduleError(f"{name}: there is no module {error.name!r}; for a file write path/to/file.py:function") from None
    except (Exception, SystemExit) as error:
        raise ScheduleError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error


def _file(path: Path) -> Any:
    if not path.is_file():
        raise ScheduleError(f"{path} is not a file")
    spec = importlib.util.spec_from_file_location(f"_pipesim_user_{path.stem}", path)
    assert spec is not None  # the suffix is .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ScheduleError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module
