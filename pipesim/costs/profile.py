"""Costs from a measured layer profile, its layers folded into stages: PipeDream's ``graph.txt``, or TOML with more in it.

::

    node4 -- Conv2d(3, 64, ...) -- forward_compute_time=5.6, backward_compute_time=9.1, activation_size=822083584.0, parameter_size=7168.0
        node4 -- node5

Times are milliseconds per minibatch, sizes bytes. Inputs, and outputs that nobody takes, are left out. Format: msr-fiddle/pipedream, ``graph/graph.py``.

TOML, as ``pipesim profile`` writes it, is a chain of layers and also knows how the backward splits and what a layer keeps for it.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipesim.cluster import Unit
from pipesim.costs.model import ActivationBytes, slot_durations
from pipesim.dataflow import messages
from pipesim.errors import LARGEST, ScheduleError
from pipesim.op import Kind
from pipesim.schedule import Schedule
from pipesim.units import parse_quantity

__all__ = ["Layer", "Profile", "ProfileCosts", "balanced_cuts", "parse_layers", "parse_profile"]

Floats = NDArray[np.float64]

_EDGE = re.compile(r"(node[0-9]{1,9}) -- (node[0-9]{1,9})")
_NODE = re.compile(r"(node[0-9]{1,9}) -- (.*) -- (forward_compute_time=.*?)(?: -- stage_id=[0-9]+)?")
_FIELDS = re.compile(
    r"forward_compute_time=(?P<forward>[^,]+), backward_compute_time=(?P<backward>[^,]+), "
    r"activation_size=(?P<activation>\[[^\]]*\]|[^,]+), parameter_size=(?P<parameters>[^,]+)"
)


@dataclass(frozen=True)
class Layer:
    """One layer of a profile: seconds and bytes per minibatch.

    Attributes:
        name: In the file.
        description: What it is.
        forward: Seconds of the forward.
        backward: Seconds of the full backward.
        activation: Bytes kept for the backward; in PipeDream's format the output.
        parameters: Bytes of its parameters.
        output: Bytes that go to the next layers; None for *activation*.
        input_grad: Seconds of the gradient of its input alone, None where the profile does not say.
        weight_grad: The same of its weights.
    """

    name: str
    description: str
    forward: float
    backward: float
    activation: float
    parameters: float
    output: float | None = None
    input_grad: float | None = None
    weight_grad: float | None = None

    @property
    def sent(self) -> float:
        """Bytes that go to the next layers."""
        return self.activation if self.output is None else self.output


@dataclass(frozen=True, eq=False)
class Profile:
    """Layers in a topological order, and the edges between them as positions in it."""

    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...]
    name: str = "profile"

    @cached_property
    def crossing(self) -> Floats:
        """(layers + 1,) bytes that cross a cut before layer k: every output that a later layer still needs, counted once.

        An output that skips several stages is handed on from stage to stage, so it crosses each cut on its way.
        """
        crossing = np.zeros(len(self.layers) + 1)
        last_use: dict[int, int] = {}
        for source, target in self.edges:
            last_use[source] = max(last_use.get(source, 0), target)
        for source, target in last_use.items():
            crossing[source + 1 : target + 1] += self.layers[source].sent
        return crossing


def parse_profile(text: str, where: str = "profile") -> Profile:
    """Reads a layer profile.

    Args:
        text: The file's text.
        where: Its name, for errors.

    Raises:
        ScheduleError: A line is neither a node nor an edge, a number is negative or not finite, a node is unknown or
            named twice, or the edges go in a circle.

    Examples:
        >>> line = "node1 -- Linear -- forward_compute_time=2.0, backward_compute_time=4.0, activation_size=8.0, parameter_size=16.0"
        >>> parse_profile(line).layers[0].forward
        0.002
    """
    layers: dict[str, Layer] = {}
    edges: list[tuple[str, str, int]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        place, words = f"{where}, line {number}", line.strip()
        if not words:
            continue
        if edge := _EDGE.fullmatch(words):
            edges.append((edge[1], edge[2], number))
            continue
        node = _NODE.fullmatch(words)
        if node is None:
            raise ScheduleError(f"{place}: {words[:60]!r} is neither 'nodeN -- description -- forward_compute_time=...' nor 'nodeN -- nodeM'")
        if node[1] in layers:
            raise ScheduleError(f"{place}: {node[1]} is described twice")
        layers[node[1]] = _parse_layer(node[1], node[2], node[3], place)
    if not layers:
        raise ScheduleError(f"{where} describes no layer")
    for source, target, number in edges:
        for name in (source, target):
            if name not in layers:
                raise ScheduleError(f"{where}, line {number}: no line describes {name}")
    pairs = [(source, target) for source, target, _ in edges]
    used = {source for source, _ in pairs}
    # As PipeDream's optimizer does: an input's "time" is loading data, and an output that nobody takes is no layer.
    dropped = {
        name
        for name, layer in layers.items()
        if layer.description.startswith("Input") or (layer.description.startswith("__getitem__") and name not in used)
    }
    layers = {name: layer for name, layer in layers.items() if name not in dropped}
    if not layers:
        raise ScheduleError(f"{where} describes inputs only")
    return _sorted_profile(layers, [pair for pair in pairs if not dropped.intersection(pair)], where)


def parse_layers(text: str, where: str = "profile") -> Profile:
    r"""Reads a chain of layers in TOML, as ``pipesim profile`` writes it.

    Args:
        text: The file's text.
        where: Its name, for errors.

    Raises:
        ScheduleError: It is no such TOML; the text names the place.

    Examples:
        >>> sizes = 'output = "8 B", activation = "8 B", parameters = "16 B"'
        >>> times = "forward = 2.0, backward = 4.0, input_grad = 2.5, weight_grad = 2.0"
        >>> parse_layers(f'unit = "ms"\nlayers = [{{name = "0", kind = "Linear", {times}, {sizes}}}]').layers[0].weight_grad
        0.002
    """
    from pipesim.userfiles import LayerProfileFile, parse_toml

    file = parse_toml(LayerProfileFile, text, where)
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[file.unit]
    layers = []
    for number, layer in enumerate(file.layers):
        sizes = (parse_quantity(getattr(layer, name), "bytes", f"{where}: layers.{number}.{name}") for name in ("activation", "parameters", "output"))
        halves = (None if time is None else time * scale for time in (layer.input_grad, layer.weight_grad))
        name = layer.name or f"layer {number}"
        layers.append(Layer(name, layer.kind or name, layer.forward * scale, layer.backward * scale, *sizes, *halves))
    return Profile(tuple(layers), tuple(pairwise(range(len(layers)))), file.name or where)


def _parse_layer(name: str, description: str, fields: str, place: str) -> Layer:
    match = _FIELDS.fullmatch(fields)
    if match is None:
        raise ScheduleError(f"{place}: {name} wants forward_compute_time, backward_compute_time, activation_size and parameter_size, in this order")
    values = {}
    for field, text in match.groupdict().items():
        parts = text.strip("[]").split(";") if text.startswith("[") else [text]  # a list of sizes counts as their sum
        try:
            value = sum(float(part) for part in parts if part.strip())
        except ValueError:
            value = math.nan
        if not 0 <= value <= LARGEST:
            raise ScheduleError(f"{place}: {field} of {name} is {text!r}; right is a finite number of at least 0")
        values[field] = value
    return Layer(name, description, values["forward"] * 1e-3, values["backward"] * 1e-3, values["activation"], values["parameters"])


def _sorted_profile(layers: Mapping[str, Layer], edges: Sequence[tuple[str, str]], where: str) -> Profile:
    """Sorts layers so that every edge goes forward; ties by the number in the name, so that the order is always the same."""
    after: dict[str, list[str]] = {name: [] for name in layers}
    missing = dict.fromkeys(layers, 0)
    for source, target in dict.fromkeys(edges):
        after[source].append(target)
        missing[target] += 1
    ready = [(int(name[4:]), name) for name, count in missing.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(name)
        for target in after[name]:
            missing[target] -= 1
            if not missing[target]:
                heapq.heappush(ready, (int(target[4:]), target))
    if len(order) < len(layers):
        stuck = sorted((name for name, count in missing.items() if count), key=lambda name: int(name[4:]))
        raise ScheduleError(f"{where}: the edges go in a circle among {', '.join(stuck[:8])}")
    position = {name: index for index, name in enumerate(order)}
    pairs = sorted({(position[source], position[target]) for source, target in edges})
    return Profile(tuple(layers[name] for name in order), tuple(pairs), where)


def balanced_cuts(times: Sequence[float], parts: int) -> list[int]:
    """Cuts a row of layers into consecutive parts so that the largest sum is smallest.

    Args:
        times: Time of each layer.
        parts: Number of parts, none empty.

    Returns:
        The layer that each part but the first starts with: parts - 1 ascending numbers. Among the best answers, the one
        whose earlier parts are as small as possible.

    Raises:
        ScheduleError: There are fewer layers than parts.

    Examples:
        >>> balanced_cuts([6, 5, 4, 3, 2, 1], 2), balanced_cuts([4, 1, 1, 1, 1], 2)
        ([2], [1])
    """
    count = len(times)
    if not 1 <= parts <= count:
        raise ScheduleError(f"{count} layers cannot be cut into {parts} stages, each with at least one")
    total = np.concatenate([[0.0], np.cumsum(times)])
    # best[k]: the smallest largest sum of the first k layers in `part` parts; choice: where the last of them starts
    best = total.copy()
    best[0] = math.inf
    choices = []
    for part in range(2, parts + 1):
        largest = np.full(count + 1, math.inf)
        choice = np.zeros(count + 1, np.int64)
        for end in range(part, count + 1):
            candidates = np.maximum(best[part - 1 : end], total[end] - total[part - 1 : end])
            at = int(np.argmin(candidates))
            largest[end], choice[end] = candidates[at], at + part - 1
        best = largest
        choices.append(choice)
    cuts: list[int] = []
    end = count
    for choice in reversed(choices):
        end = int(choice[end])
        cuts.append(end)
    return cuts[::-1]


class ProfileCosts:
    r"""Durations and bytes of a measured model, its layers folded into as many stages as the schedule has.

    A stage's activation is what its layers keep (in PipeDream's format their outputs); the message to the next stage is
    every output that a later layer still needs. Weights are the layers' parameters, gradients as many bytes, optimizer
    state as asked. A profile of halves times I and W by them, and B by the full backward.

    Args:
        profile: From :func:`parse_profile` or ``read_costs``.
        cuts: The layer that each stage but the first starts with; None to balance by forward + backward time.
        weight_grad_share: The part of the backward that W takes where the schedule splits it. PipeDream's profiles do not
            say, so a split schedule without it is refused; where the halves were measured, it is left out.
        optimizer_bytes: Bytes of optimizer state per byte of parameters: 1 for momentum, 2 for Adam.

    Raises:
        ScheduleError: The cuts do not fit, or a share is outside 0..1.

    Examples:
        >>> from pipesim import generate
        >>> line = "node{} -- Linear -- forward_compute_time={}, backward_compute_time=4.0, activation_size=8.0, parameter_size=16.0"
        >>> profile = parse_profile("\n".join([line.format(1, 1.0), line.format(2, 2.0), "node1 -- node2"]))
        >>> ProfileCosts(profile).durations(generate("gpipe", devices=2, microbatches=1)).tolist()
        [0.001, 0.004, 0.002, 0.004]
    """

    unit: Unit = "s"

    def __init__(
        self, profile: Profile, *, cuts: Sequence[int] | None = None, weight_grad_share: float | None = None, optimizer_bytes: float = 0.0
    ) -> None:
        for name, value, limit in (("weight_grad_share", weight_grad_share, 1.0), ("optimizer_bytes", optimizer_bytes, math.inf)):
            if value is not None and not (math.isfinite(value) and 0 <= value <= limit):
                raise ScheduleError(f"{name} must be between 0 and {limit:g}, got {value}")
        self.profile = profile
        self.name = profile.name
        self._cuts = None if cuts is None else [int(cut) for cut in cuts]
        self._share = weight_grad_share
        self._optimizer_bytes = optimizer_bytes
        self._folded: dict[int, NDArray[np.int64]] = {}

    def stage_bounds(self, stages: int) -> NDArray[np.int64]:
        """(stages + 1,) bounds: stage s holds the layers ``bounds[s]:bounds[s + 1]`` in topological order."""
        if stages not in self._folded:
            layers = self.profile.layers
            cuts = self._cuts if self._cuts is not None else balanced_cuts([layer.forward + layer.backward for layer in layers], stages)
            bounds = [0, *cuts, len(layers)]
            if len(cuts) != stages - 1 or any(a >= b for a, b in pairwise(bounds)):
                raise ScheduleError(
                    f"cuts {cuts} make {len(cuts) + 1} stages; {stages} stages of {len(layers)} layers want {stages - 1} ascending cuts within 1..{len(layers) - 1}"
                )
            self._folded[stages] = np.array(bounds)
        return self._folded[stages]

    def _sums(self, schedule: Schedule, field: str) -> Floats:
        values = np.array([getattr(layer, field) for layer in self.profile.layers])
        return np.add.reduceat(values, self.stage_bounds(schedule.num_stages)[:-1])

    def durations(self, schedule: Schedule) -> Floats:
        """(slots,) seconds."""
        shape = (schedule.num_stages, schedule.num_microbatches)
        forward, backward = (np.broadcast_to(self._sums(schedule, field)[:, None], shape) for field in ("forward", "backward"))
        times = {Kind.F: forward, Kind.R: forward, Kind.B: backward}
        if self._share is None and self.measured_halves:
            halves = (np.broadcast_to(self._sums(schedule, field)[:, None], shape) for field in ("input_grad", "weight_grad"))
            return slot_durations(schedule, {**times, **dict(zip((Kind.I, Kind.W), halves, strict=True))})
        if self._share is None and schedule.has(Kind.I, Kind.W):
            raise ScheduleError(
                "the schedule splits the backward and the profile does not say how; give weight_grad_share (--weight-grad-share), such as 0.5"
            )
        share = self._share or 0.0
        return slot_durations(schedule, {**times, Kind.I: backward * (1 - share), Kind.W: backward * share})

    @property
    def measured_halves(self) -> bool:
        """Whether the profile has a time of I and of W for every layer."""
        return all(layer.input_grad is not None and layer.weight_grad is not None for layer in self.profile.layers)

    def message_bytes(self, schedule: Schedule) -> Floats:
        """(messages,) bytes that cross the cut between two stages."""
        if schedule.graph is not None and schedule.graph != tuple((s, s + 1) for s in range(schedule.num_stages - 1)):
            raise ScheduleError("a layer profile is folded into a chain of stages, and this schedule has another stage graph")
        found = messages(schedule)
        sender = np.where(found.gradient, found.target, found.source)
        cut = self.stage_bounds(schedule.num_stages)[schedule.stage[sender] + 1]
        return self.profile.crossing[cut]

    def activation_bytes(self, schedule: Schedule) -> ActivationBytes:
        """Bytes of every activation: what the stage's layers keep."""
        table = np.broadcast_to(self._sums(schedule, "activation")[:, None], (schedule.num_stages, schedule.num_microbatches))
        zero = np.zeros_like(table)
        recomputed = schedule.rows_of(Kind.R) >= 0
        if not recomputed.any():
            return ActivationBytes(table, zero, zero)
        entering = self.profile.crossing[self.stage_bounds(schedule.num_stages)[:-1]][:, None]
        kept = np.where(recomputed, np.minimum(entering, table), table)
        return ActivationBytes(kept, zero, table - kept)

    def stage_bytes(self, schedule: Schedule) -> Mapping[str, Floats]:
        """Category to (stages,) bytes."""
        weights = self._sums(schedule, "parameters")
        return {"weights": weights, "gradients": weights, "optimizer": weights * self._optimizer_bytes}

    def recompute(self, schedule: Schedule) -> None:
        """None: a profile recomputes only where R is listed."""

    def tied_stages(self, schedule: Schedule) -> Sequence[Sequence[int]]:
        """None are known."""
        return ()
