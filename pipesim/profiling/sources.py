"""The user's model: ``module:function`` or ``file.py:function`` that returns its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipesim.errors import ScheduleError, did_you_mean
from pipesim.usercode import load_function

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
    function = load_function(module_name, function_name)
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
