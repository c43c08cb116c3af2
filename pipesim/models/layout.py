"""Which layers each stage holds: evenly spread, a list, or Megatron's layout string."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ScheduleError, require_count

__all__ = ["Layout", "even_layout", "layout_of", "parse_layout"]

_MOST_STAGES = 100_000


@dataclass(frozen=True)
class Layout:
    """What each stage holds, in the order of the stages.

    Attributes:
        layers: Transformer layers per stage.
        embedding: The stage of the input embedding.
        head: The stage of the output layer and the loss.
        predictors: Multi-token-prediction blocks per stage; empty for none.

    Examples:
        >>> Layout((1, 2, 2, 3), 0, 3).sums(layer=10, embedding=5, head=6).tolist()
        [15.0, 20.0, 20.0, 36.0]
    """

    layers: tuple[int, ...]
    embedding: int
    head: int
    predictors: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.layers)

    def sums(self, layer: float, embedding: float = 0.0, head: float = 0.0) -> NDArray[np.float64]:
        """(stages,) a quantity of one layer, of the embedding and of the head, added up per stage."""
        result = np.array(self.layers, dtype=np.float64) * layer
        result[self.embedding] += embedding
        result[self.head] += head
        return result


def even_layout(layers: int, stages: int, *, embedding: float = 0.0, head: float = 0.0) -> Layout:
    """Spreads layers so that the most loaded stage has the least; a remainder goes to the earliest of the least loaded.

    Args:
        layers: Transformer layers.
        stages: Stages.
        embedding: What the embedding counts on the first stage, in layers.
        head: What the output layer counts on the last.

    Raises:
        ScheduleError: There are fewer layers than stages, so that one would be empty.

    Examples:
        >>> even_layout(30, 4).layers
        (8, 8, 7, 7)
        >>> even_layout(61, 4, embedding=1, head=1).layers
        (15, 16, 16, 14)
    """
    layers, stages = require_count("layers", layers), require_count("stages", stages)
    load = [0.0] * stages
    load[0] += embedding
    load[-1] += head
    if layers + (embedding > 0) + (head > 0) < stages:
        raise ScheduleError(f"{layers} layers cannot be spread over {stages} stages, each with at least one; take fewer stages or chunks")
    queue = [(value, stage) for stage, value in enumerate(load)]
    heapq.heapify(queue)
    count = [0] * stages
    for _ in range(layers):
        value, stage = heapq.heappop(queue)
        count[stage] += 1
        heapq.heappush(queue, (value + 1, stage))
    return Layout(tuple(count), 0, stages - 1)


def parse_layout(text: str) -> Layout:
    """Reads Megatron's layout string.

    ``E`` is the embedding, ``t`` a transformer layer, ``m`` a multi-token-prediction block, ``L`` the output layer with
    the loss, ``|`` ends a stage, ``x*n`` repeats a letter and ``(...)*n`` a group; commas are cosmetic. Stages are in
    the order in which a microbatch passes them.

    Raises:
        ScheduleError: A sign is unknown, brackets do not match, or E is not in the first stage or L not in the last.

    Examples:
        >>> layout = parse_layout("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL")
        >>> len(layout), sum(layout.layers), layout.layers[34:]
        (40, 80, (2, 3, 2, 2, 2, 1))
    """
    segments = _expanded(re.sub(r"[\s,]", "", text), text).split("|")
    unknown = sorted(set("".join(segments)) - set("EtmL"))
    if unknown:
        raise ScheduleError(f"layout {text!r:.80} has {unknown[0]!r}; its letters are E, t, m, L, with |, (...)*n, x*n and commas")
    for letter, place, what in (("E", 0, "first"), ("L", len(segments) - 1, "last")):
        at = [stage for stage, segment in enumerate(segments) for sign in segment if sign == letter]
        if at != [place]:
            raise ScheduleError(f"layout {text!r:.80} has {letter} in the stages {at}; right is once, in the {what} stage, {place}")
    empty = [stage for stage, segment in enumerate(segments) if not segment]
    if empty:
        raise ScheduleError(f"layout {text!r:.80} has nothing in stage {empty[0]}")
    predictors = tuple(segment.count("m") for segment in segments)
    return Layout(tuple(segment.count("t") for segment in segments), 0, len(segments) - 1, predictors if any(predictors) else ())


def _expanded(text: str, original: str) -> str:
    """The string with its repetitions written out, innermost group first."""
    pattern = re.compile(r"\(([^()]*)\)\*([0-9]+)|\(([^()]*)\)|([A-Za-z])\*([0-9]+)")
    while match := pattern.search(text):
        body = match[1] if match[1] is not None else match[3] if match[3] is not None else match[4]
        count = int((match[2] or match[5] or "1")[:9])
        if len(body) * count > _MOST_STAGES:
            raise ScheduleError(f"layout {original!r:.80} repeats {body!r:.20} {count} times; more than {_MOST_STAGES} signs are not read")
        text = text[: match.start()] + body * count + text[match.end() :]
    return text


def layout_of(
    wish: str | Sequence[int] | None, layers: int, stages: int, *, embedding: float = 0.0, head: float = 0.0, devices: int | None = None
) -> Layout:
    """The layout that a wish means for a number of stages.

    Args:
        wish: None for even, a list of layers per stage (0 in the first or last leaves the embedding or the head alone),
            or a layout string.
        layers: Transformer layers of the model.
        stages: Stages of the schedule.
        embedding: As for :func:`even_layout`.
        head: The same.
        devices: For the error's text.

    Raises:
        ScheduleError: It has another number of stages or of layers.

    Examples:
        >>> layout_of([1, 2, 2, 3], 8, 4).layers
        (1, 2, 2, 3)
    """
    if wish is None:
        return even_layout(layers, stages, embedding=embedding, head=head)
    if isinstance(wish, str):
        layout = parse_layout(wish)
        if layout.predictors:
            raise ScheduleError(f"layout {wish!r:.80} has {sum(layout.predictors)} multi-token-prediction blocks (m), and the model has none")
    else:
        counts = tuple(require_count("layers of a stage", count, 0) for count in wish)
        layout = Layout(counts, 0, len(counts) - 1)
    if len(layout) != stages:
        chunks = f" ({devices} devices x {stages // devices} chunks)" if devices and stages % devices == 0 else ""
        raise ScheduleError(f"the layout has {len(layout)} stages and the schedule has {stages}{chunks}")
    if sum(layout.layers) != layers:
        raise ScheduleError(f"the layout has {sum(layout.layers)} layers and the model has {layers}")
    return layout
