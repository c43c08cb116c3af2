"""Times and bytes of a chain of torch layers, on the device at hand.

Every layer is run by itself on its real input: F, then I and W as a schedule with a split backward runs them (the functions of
torch.distributed.pipelining, which keep the gradients between a layer's own ops, so that W repeats none of them), and in
another turn F and the full B. Gradients accumulate in ``.grad``, as they do in training. Repeats go round over all layers, so
that a disturbance of some seconds hits all of them alike. What is measured is the median of the repeats that follow the
warm-up, over all repeats of layers that are alike (the same module, parameters, input and output by their shapes); on
CUDA the times are the device's (events), so launches that it hides cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from pipesim.errors import ScheduleError, require_count
from pipesim.profiling.spread import KINDS, deviation, pool, warnings

if TYPE_CHECKING:
    import torch

__all__ = ["LayerMeasurement", "ModelMeasurement", "measure"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class LayerMeasurement:
    """One layer: seconds and bytes of a microbatch.

    Attributes:
        name: Its place in the chain.
        kind: Its class.
        forward: Seconds of F.
        backward: Seconds of B, the full backward.
        input_grad: Seconds of I; 0 where the input has no gradient (token numbers).
        weight_grad: Seconds of W; 0 where there are no weights.
        output: Bytes of its output.
        activation: Bytes that are kept for its backward and that no earlier layer has kept.
        parameters: Bytes of its parameters.
        peak: The most bytes that its forward and backward hold beyond what was there before; None on a CPU.
        spread: Of each of the four times the median absolute deviation of the repeats, in seconds.
        pooled: The layers, itself among them, over all of whose repeats the times are medians; empty for its own alone.
    """

    name: str
    kind: str
    forward: float
    backward: float
    input_grad: float
    weight_grad: float
    output: int
    activation: int
    parameters: int
    peak: int | None = None
    spread: Mapping[str, float] = field(default_factory=dict)
    pooled: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelMeasurement:
    """All layers, and what they were measured with.

    Attributes:
        layers: In their order.
        device: Name of the device.
        batch_shape: Shape of the input.
        dtype: Its type.
        repeats: How often each layer was run; the times are medians of that, times the layers that are pooled.
        torch: Version.
        warnings: What a reader should know before trusting the times.
    """

    layers: tuple[LayerMeasurement, ...]
    device: str
    batch_shape: tuple[int, ...]
    dtype: str
    repeats: int
    torch: str
    warnings: tuple[str, ...] = ()


def measure(
    layers: Sequence[torch.nn.Module],
    batch: torch.Tensor,
    *,
    device: str | None = None,
    repeats: int = 20,
    warm_up: int = 3,
    progress: Progress | None = None,
) -> ModelMeasurement:
    """Measures every layer of a chain.

    Args:
        layers: Modules, each of which takes what the one before returns: one tensor. Moved to *device*.
        batch: The first layer's input; a microbatch.
        device: Such as ``cuda``; by default the first CUDA device, or the CPU where there is none.
        repeats: Runs that count.
        warm_up: Runs before them that do not.
        progress: Called with how many runs of a layer have been done, and how many there are.

    Raises:
        ScheduleError: A layer takes or returns something else than one tensor, or fails; the device is not there.

    Examples:
        >>> import torch
        >>> found = measure([torch.nn.Linear(8, 4)], torch.zeros(2, 8), device="cpu", repeats=1, warm_up=1)
        >>> found.layers[0].output, found.layers[0].parameters
        (32, 144)
    """
    import torch

    repeats, warm_up = require_count("repeats", repeats), require_count("warm_up", warm_up, 0)
    if not layers:
        raise ScheduleError("there are no layers to measure")
    where = _device(device)
    own = [layer.to(where) for layer in layers]
    inputs = _inputs(own, batch.to(where))
    kept = _kept_bytes(own, inputs[0])
    turns: list[list[dict[str, float]]] = [[] for _ in own]
    for turn in range(warm_up + repeats):
        for number, (layer, value) in enumerate(zip(own, inputs, strict=True)):
            if progress is not None:
                progress(turn * len(own) + number, (warm_up + repeats) * len(own))
            with _explained(number, layer):
                one = _halves(layer, value) | _whole(layer, value)
            if turn >= warm_up:
                turns[number].append(one)
    for layer in own:
        layer.zero_grad(set_to_none=True)
    times = [{kind: [turn[kind] for turn in one] for kind in KINDS} for one in turns]
    keys = [_alike(layer, value, one[0]["output"]) for layer, value, one in zip(own, inputs, turns, strict=True)]
    shares, warned = pool(times, keys)
    found = []
    for number, (layer, together) in enumerate(zip(own, shares, strict=True)):
        repeated = {kind: [time for other in together for time in times[other][kind]] for kind in KINDS}
        found.append(
            LayerMeasurement(
                f"{number}",
                type(layer).__name__,
                **{kind: median(values) for kind, values in repeated.items()},
                output=int(turns[number][0]["output"]),
                activation=kept[number],
                parameters=sum(parameter.nbytes for parameter in layer.parameters()),
                peak=max(int(one["peak"]) for one in turns[number]) if where.type == "cuda" else None,
                spread={kind: deviation(values) for kind, values in repeated.items()},
                pooled=together if len(together) > 1 else (),
            )
        )
    warned = [*warnings(found, repeats), *warned]
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else where.type
    dtype = str(batch.dtype).removeprefix("torch.")
    return ModelMeasurement(tuple(found), name, tuple(batch.shape), dtype, repeats, torch.__version__, tuple(warned))


def _alike(layer: torch.nn.Module, value: torch.Tensor, output: float) -> Hashable:
    """What is equal for layers that compute the same, as far as shapes and the module's own text say."""
    parameters = tuple((name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in layer.named_parameters())
    return type(layer), repr(layer), parameters, tuple(value.shape), value.dtype, output


def _device(name: str | None) -> torch.device:
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ScheduleError(f"the device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda"):
        raise ScheduleError(f"the device {name!r} cannot be timed; right is cpu or cuda")
    return device


def _inputs(layers: Sequence[torch.nn.Module], batch: torch.Tensor) -> list[torch.Tensor]:
    """The input of every layer, and the check that they fit together."""
    import torch

    inputs = [batch]
    for number, layer in enumerate(layers):
        try:
            with torch.no_grad():
                output = layer(inputs[-1].clone())  # what works in place must not change it
        except Exception as error:  # whatever the user's layer raises is about that layer
            raise ScheduleError(f"layer {number}, {type(layer).__name__}, fails on an input of shape {tuple(inputs[-1].shape)}: {error}") from error
        if not isinstance(output, torch.Tensor):
            raise ScheduleError(
                f"layer {number}, {type(layer).__name__}, returns {type(output).__name__}; right is one tensor, the next layer's input"
            )
        inputs.append(output)
    return inputs[:-1]


def _kept_bytes(layers: Sequence[torch.nn.Module], batch: torch.Tensor) -> list[int]:
    """Bytes that each layer keeps for the backward: every storage once, for the first layer that keeps it; parameters not at all."""
    import torch

    seen = {parameter.untyped_storage().data_ptr() for layer in layers for parameter in (*layer.parameters(), *layer.buffers())}
    counts, alive = [0] * len(layers), []
    value = batch.detach().requires_grad_(batch.is_floating_point())
    for number, layer in enumerate(layers):

        def pack(tensor: torch.Tensor, number: int = number) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                counts[number] += storage.nbytes()
                alive.append(storage)  # else its address would be used again
            return tensor

        with _explained(number, layer), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            value = layer(value)
    return counts


@contextmanager
def _explained(name: object, layer: torch.nn.Module) -> Iterator[None]:
    """Whatever a layer raises, as an error about that layer."""
    try:
        yield
    except RuntimeError as error:
        hint = "; give inplace=False to what works in place" if "in-place" in str(error) else ""
        raise ScheduleError(f"layer {name}, {type(layer).__name__}, cannot be run for its backward: {error}{hint}") from error


def _whole(layer: torch.nn.Module, value: torch.Tensor) -> dict[str, float]:
    """Seconds of F and B, bytes of the output, and the peak on CUDA."""
    import torch

    given = value.detach().clone().requires_grad_(value.is_floating_point())
    before = 0
    if value.is_cuda:
        torch.cuda.reset_peak_memory_stats(value.device)
        before = torch.cuda.memory_allocated(value.device)
    output, forward = _timed(value, partial(layer, given))
    backward = _backward(output, torch.ones_like(output))
    peak = torch.cuda.max_memory_allocated(value.device) - before if value.is_cuda else 0
    return {"forward": forward, "backward": backward, "output": output.nbytes, "peak": peak}


def _halves(layer: torch.nn.Module, value: torch.Tensor) -> dict[str, float]:
    """Seconds of I and of W."""
    import torch
    from torch.distributed.pipelining import _backward as split

    weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    given = value.detach().clone().requires_grad_(value.is_floating_point())
    output = layer(given)
    gradient = torch.ones_like(output)
    if not given.requires_grad:  # token numbers: all of the backward is for the weights
        return {"input_grad": 0.0, "weight_grad": _backward(output, gradient)}
    if not weights:
        return {"input_grad": _backward(output, gradient), "weight_grad": 0.0}
    # it detaches the output in place, which a view does not allow; a copy's backward is nothing
    outputs = [output.clone()]
    (_, groups), first = _timed(value, partial(split.stage_backward_input, outputs, [gradient], [given], iter(weights)))
    return {"input_grad": first, "weight_grad": _timed(value, partial(split.stage_backward_weight, iter(weights), groups))[1]}


def _backward(output: torch.Tensor, gradient: torch.Tensor) -> float:
    """Seconds of a backward; 0 where nothing has a gradient."""
    import torch

    return _timed(output, partial(torch.autograd.backward, [output], [gradient]))[1] if output.requires_grad else 0.0


def _timed(like: torch.Tensor, run: Callable[[], Any]) -> tuple[Any, float]:
    """What *run* returns, and its seconds: the device's on CUDA, else the clock's."""
    import torch

    if not like.is_cuda:
        start = time.perf_counter()
        result = run()
        return result, time.perf_counter() - start
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize(like.device)
    begin.record()
    result = run()
    end.record()
    torch.cuda.synchronize(like.device)
    return result, begin.elapsed_time(end) * 1e-3
