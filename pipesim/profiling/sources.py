"""The user's model: ``module:function`` or ``file.py:function`` that returns its layers."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipesim.errors import ScheduleError, did_you_mean

if TYPE_CHECKING:
    import torch

__all__ = ["load_layers", "make_batch"]


def load_layers(name: str) -> list[torch.nn.Module]:
    """Calls a function and returns the layers that it builds.

    Args:
        name: ``module:function`` or ``path/to/file.py:function``. It takes no arguments and returns an ``nn.Sequential``
            or a list of modules.

    Raises:
        ScheduleError: There is no such module or function, or it returns something else.
    """
    import torch

    module_name, colon, function_name = name.rpartition(":")
    if not colon or not module_name:
        raise ScheduleError(f"{name!r} is no module:function; write package.module:function or path/to/file.py:function")
    module = _module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ScheduleError(f"{module_name} has no function {function_name!r}{did_you_mean(function_name, functions)}")
    try:
        built = function()
    except Exception as error:  # whatever the user's function raises is about that function
        raise ScheduleError(f"{name} fails: {type(error).__name__}: {error}") from error
    layers = list(built) if isinstance(built, torch.nn.Sequential | torch.nn.ModuleList | Sequence) else []
    if not layers or not all(isinstance(layer, torch.nn.Module) for layer in layers):
        raise ScheduleError(f"{name} returns {type(built).__name__}; right is an nn.Sequential, or a list of modules, with at least one layer")
    return layers


def make_batch(shape: Sequence[int], dtype: str = "float32", tokens: int | None = None) -> torch.Tensor:
    """An input to measure with: random numbers, or token numbers below *tokens*.

    Args:
        shape: Its shape, the samples first.
        dtype: Such as ``bfloat16``.
        tokens: Vocabulary; None for numbers of *dtype*.

    Raises:
        ScheduleError: The shape or the type is none.

    Examples:
        >>> make_batch([2, 3], tokens=7).dtype
        torch.int64
    """
    import torch

    if not shape or min(shape) < 1:
        raise ScheduleError(f"the batch's shape must be whole numbers of at least 1, got {tuple(shape)}")
    if tokens is not None:
        if tokens < 1:
            raise ScheduleError(f"tokens must be at least 1, got {tokens}")
        return torch.randint(tokens, tuple(shape))
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ScheduleError(f"dtype {dtype!r} is no floating-point type of torch{did_you_mean(dtype, ['float32', 'bfloat16', 'float16', 'float64'])}")
    return torch.randn(tuple(shape)).to(kind)


def _module(name: str) -> Any:
    if not name.endswith(".py"):
        # as `python -m` does: the user's module lies in the current folder
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ScheduleError(f"{name}: there is no module {error.name!r}; for a file write path/to/file.py:function") from None
        except Exception as error:
            raise ScheduleError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    path = Path(name)
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
