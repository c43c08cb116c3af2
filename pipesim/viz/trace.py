"""Chrome trace JSON, for ui.perfetto.dev and chrome://tracing.

One process per device and one thread per lane. Everything is a complete event (``X``), because begins and ends at one
moment nest wrongly in viewers; two slices of one lane never overlap, because viewers move or cut those that do.

    device 0 (stage 0)     compute         |0F0|0F1|      |0B0|        flows s → t → f: producer → its receive slice → consumer
                           send forward        |0SEND_F0|
                           recv backward          |0RECV_B0|
                           collective                        |0REDUCE_GRAD|
                           memory          counters, one series per category
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from pipesim.errors import ScheduleError
from pipesim.files import whole_or_nothing
from pipesim.op import Kind
from pipesim.timeline import Timeline
from pipesim.viz.lanes import spread, transfers

__all__ = ["LARGE_FILE", "LARGE_TRACE", "write_trace"]

Floats = NDArray[np.float64]

LARGE_FILE = 100_000_000  # bytes of an uncompressed file, above which it should be a .json.gz
LARGE_TRACE = 500_000_000  # bytes of JSON, compressed or not, above which viewers fail

# Microseconds that one unit of time is shown as. Slots have no length; a millisecond is easy to read.
_MICROSECONDS = {"s": 1e6, "slot": 1e3}
_COMPUTE = 0  # the compute lane's tid
# Lanes of communication, and the kinds of their slices.
_LANES: dict[str, list[int]] = {
    "send forward": [Kind.SEND_F],
    "recv forward": [Kind.RECV_F],
    "send backward": [Kind.SEND_B],
    "recv backward": [Kind.RECV_B],
    "collective": [Kind.REDUCE_GRAD, Kind.UNSHARD],
    "offload": [Kind.OFFLOAD],
    "reload": [Kind.RELOAD],
}


def write_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Writes a run as Chrome trace JSON, event by event; nobody ever sees half a file.

    Times are microseconds since the first op, 1 slot shown as 1 ms, to the picosecond or to what a float64 of the run's
    times can tell. Ops that take no time have no slice, and ``otherData`` says how many these are.

    Args:
        timeline: The run.
        path: Where to; compressed if the name ends in ``.gz``.

    Raises:
        ScheduleError: A time is not finite.
        OSError: The file cannot be written.

    Warns:
        UserWarning: The file is larger than viewers like (more than :data:`LARGE_FILE` plain, :data:`LARGE_TRACE` in all).

    Examples:
        >>> import json, pathlib, tempfile
        >>> from pipesim import UniformCosts, generate, simulate
        >>> run = simulate(generate("1f1b", devices=4, microbatches=8), UniformCosts(forward=1, backward=2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_trace(run, pathlib.Path(folder, "run.json"))
        ...     events = json.loads(pathlib.Path(folder, "run.json").read_text())["traceEvents"]
        >>> next(event for event in events if event["ph"] == "X")
        {'ph': 'X', 'pid': 0, 'tid': 0, 'ts': 0, 'dur': 1000, 'name': '0F0', 'cat': 'F', 'args': {'stage': 0, 'microbatch': 0}}
    """
    path = Path(path)
    lines = _Writer(timeline).lines()
    size = 0
    with whole_or_nothing(path) as file:
        compressed = path.name.endswith(".gz")
        # no name and no time in the header: the same run is the same file
        out: IO[bytes] = gzip.GzipFile("", "wb", 6, file, mtime=0) if compressed else file  # type: ignore[assignment]
        while block := "".join(itertools.islice(lines, 10_000)):
            size += out.write(block.encode("ascii"))
        if compressed:
            out.close()
    if size > LARGE_TRACE:
        warnings.warn(
            f"{path} holds {size / 1e6:.0f} MB of JSON and viewers fail above about {LARGE_TRACE / 1e6:.0f} MB; export fewer microbatches",
            stacklevel=2,
        )
    elif size > LARGE_FILE and not compressed:
        warnings.warn(f"{path} has {size / 1e6:.0f} MB; viewers also read it compressed, so name it {path.name}.gz", stacklevel=2)


class _Clock:
    """Times of a run on a decimal grid of microseconds, so that neighbours on a lane meet exactly.

    Attributes:
        ticks_per_unit: Steps of the grid in the run's unit of time.
        per_microsecond: Steps of the grid in a microsecond.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.base = timeline.first_start
        extent = max(abs(self.base), abs(timeline.last_end))
        if not all(
            np.isfinite(column).all()
            for column in (timeline.start, timeline.end, timeline.sent, timeline.departed, timeline.arrived, timeline.traffic_end)
        ):
            raise ScheduleError("the run holds a time that is not finite, which a trace cannot show")
        # A picosecond, or the digits that the times themselves have: at 1.7e9 s, the age of Unix, that is a microsecond.
        scale = _MICROSECONDS[timeline.unit]
        digits = -math.log10(float(np.spacing(extent)) * scale) if extent else 6.0
        self.per_microsecond = 10.0 ** min(6, max(0, math.floor(digits)))
        self.ticks_per_unit = scale * self.per_microsecond

    def ticks(self, times: Floats) -> Floats:
        """Whole steps of the grid since the first op."""
        return np.rint((times - self.base) * self.ticks_per_unit)

    def interval(self, begin: Floats, finish: Floats) -> tuple[list[str], list[str]]:
        """``ts`` and ``dur`` of slices, so that for every reader ``ts + dur`` is at most the ``ts`` of a slice that starts at *finish*.

        As decimal fractions the two are equal. But 0.1 + 0.2 > 0.3 as floats, and then ``dur`` is a float step less.
        """
        ts, end, dur = self._microseconds(begin), self._microseconds(finish), (finish - begin) / self.per_microsecond
        dur = np.where(ts + dur > end, dur - np.spacing(end), dur)
        return [_text(value) for value in ts.tolist()], [_text(value) for value in dur.tolist()]

    def texts(self, ticks: Floats) -> list[str]:
        """Microseconds as JSON."""
        return [_text(value) for value in self._microseconds(ticks).tolist()]

    def _microseconds(self, ticks: Floats) -> Floats:
        # Viewers keep whole nanoseconds. Where int(x * 1000) would lose one (1.001 * 1000 < 1001), x is a float step more.
        values, rate = ticks / self.per_microsecond, self.per_microsecond / 1000
        nanoseconds = np.floor(ticks / rate) if rate >= 1 else ticks * (1 / rate)
        return np.where(np.trunc(values * 1000) < nanoseconds, np.nextafter(values, np.inf), values)


def _text(value: float) -> str:
    """A number as JSON, never with an exponent.

    Examples:
        >>> _text(690000.0), _text(1e-05), _text(18522.5)
        ('690000', '0.00001', '18522.5')
    """
    text = repr(value)
    return np.format_float_positional(value, trim="-") if "e" in text else text.removesuffix(".0")


class _Writer:
    """The lines of one trace.

    Attributes:
        begin: (steps, slots) start of every slot in ticks.
        finish: (steps, slots) its end.
        sent: (steps, messages) when each message was ready to leave.
        transfers: What took a communication lane.
        flows: (steps, messages) whether producer and consumer have slices that an arrow can be bound to.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.schedule, self.messages = timeline, timeline.schedule, timeline.messages
        self.clock = _Clock(timeline)
        self.begin, self.finish = self.clock.ticks(timeline.start), self.clock.ticks(timeline.end)
        visible = self.finish > self.begin
        self.left_out = int(np.count_nonzero(~visible))
        self.sent = self.clock.ticks(timeline.sent)
        self.transfers = transfers(timeline)
        self.flows = visible[:, self.messages.source_slot] & visible[:, self.messages.target_slot]

    def lines(self) -> Iterator[str]:
        """The file, line by line."""
        about = {
            "schedule": self.schedule.name,
            "source": self.timeline.source,
            "time": "microseconds since the first op" + ("; 1 slot is shown as 1 ms" if self.timeline.unit == "slot" else ""),
            "steps": self.timeline.steps,
            "barrier": self.timeline.barrier,
            "ops_without_duration_left_out": self.left_out,
            # what pipesim import could not know from the ops
            **({"weights": self.schedule.weights} if self.schedule.weights != "flush" else {}),
            **({"graph": self.schedule.graph} if self.schedule.graph is not None else {}),
        }
        yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n'
        separator = ""
        for device in range(self.schedule.num_devices):
            for line in self._device(device):
                yield separator + line
                separator = ",\n"
        yield "\n]}\n"

    def _device(self, device: int) -> Iterator[str]:
        stages = self.schedule.device_stages[device]
        name = f"device {device}"
        if stages:
            name += f" (stage {', '.join(map(str, stages))})"
        yield f'{{"ph":"M","pid":{device},"name":"process_name","args":{{"name":"{name}"}}}}'
        yield f'{{"ph":"M","pid":{device},"name":"process_sort_index","args":{{"sort_index":{device}}}}}'
        yield from _thread(device, 0, "compute")
        yield from self._compute(device)
        # after all slices of this device, so that at one time stamp a slice comes before the arrow that is bound to it
        yield from self._arrow_ends(device)
        yield from self._links(device)
        yield from self._memory(device)

    def _compute(self, device: int) -> Iterator[str]:
        schedule = self.schedule
        slots = np.arange(schedule.device_slots[device], schedule.device_slots[device + 1])
        rows = schedule.slot_row[slots]
        pairs = (schedule.slot_second_row[slots] >= 0).tolist()
        ops = zip(schedule.stage[rows].tolist(), schedule.kind[rows].tolist(), schedule.microbatch[rows].tolist(), strict=True)
        texts = []
        for slot, pair, (stage, kind, microbatch) in zip(slots.tolist(), pairs, ops, strict=True):
            name = Kind(kind).name
            if pair:
                texts.append(f'"name":"{schedule.slot(slot)}","cat":"pair","args":{{"stage":{stage},"microbatch":{microbatch}')
            else:
                number = "update" if kind == int(Kind.U) else "microbatch"
                texts.append(f'"name":"{stage}{name}{microbatch}","cat":"{name}","args":{{"stage":{stage},"{number}":{microbatch}')
        for step in range(self.timeline.steps):
            ending = self._ending(step)
            begin, finish = self.begin[step, slots], self.finish[step, slots]
            columns = (texts, *self.clock.interval(begin, finish), (finish > begin).tolist())
            for text, ts, dur, visible in zip(*columns, strict=True):
                if visible:
                    yield f'{{"ph":"X","pid":{device},"tid":0,"ts":{ts},"dur":{dur},{text}{ending}'

    def _ending(self, step: int) -> str:
        """What closes the args of a slice."""
        return "}}" if self.timeline.steps == 1 else f',"step":{step}}}}}'

    def _arrow_ends(self, device: int) -> Iterator[str]:
        """Where arrows leave the producers and reach the consumers of a device."""
        found = self.messages
        nanosecond = self.clock.per_microsecond / 1000
        for step in range(self.timeline.steps):
            flows = self.flows[step]
            out = np.flatnonzero((found.source_device == device) & flows)
            begin, finish = self.begin[step, found.source_slot[out]], self.finish[step, found.source_slot[out]]
            # just before the producer's end: at the end itself viewers would bind it to the next slice
            leave = self.clock.texts(np.where(finish - begin > 2 * nanosecond, finish - max(1.0, nanosecond), begin))
            for message, ts in zip(out.tolist(), leave, strict=True):
                yield f'{{"ph":"s",{self._arrow(step, message)},"pid":{device},"tid":0,"ts":{ts}}}'
            into = np.flatnonzero((found.target_device == device) & flows)
            for message, ts in zip(into.tolist(), self.clock.texts(self.begin[step, found.target_slot[into]]), strict=True):
                yield f'{{"ph":"f","bp":"e",{self._arrow(step, message)},"pid":{device},"tid":0,"ts":{ts}}}'

    def _arrow(self, step: int, message: int) -> str:
        """The three fields by which the parts of an arrow find each other."""
        return f'"id":{step * len(self.messages) + message},"cat":"message","name":"message"'

    def _links(self, device: int) -> Iterator[str]:
        """What a device sends and receives, its collectives, and activations that are moved away and back: a lane for each kind."""
        found, tid = self.transfers, 1
        for name, kinds in _LANES.items():
            own = np.flatnonzero(np.isin(found.kind, kinds) & (found.device == device))
            columns = (found.peer[own].tolist(), found.size[own].tolist())
            texts = [self._about(number, name, peer, size) for number, peer, size in zip(own.tolist(), *columns, strict=True)]
            # an arrow passes through the slice of a message at its receiver
            arrows = found.message[own] if name.startswith("recv") else None
            begin, finish = self.clock.ticks(found.begin[:, own]), self.clock.ticks(found.finish[:, own])
            queued = np.rint(found.waited[:, own] * self.clock.ticks_per_unit)
            tid = yield from self._lane(device, tid, name, texts, begin, finish, queued, arrows)

    def _about(self, number: int, lane: str, peer: int, size: float) -> str:
        """Name, category and the beginning of the args of a slice."""
        op = self.transfers.op(number)
        if op.kind in (Kind.REDUCE_GRAD, Kind.UNSHARD):
            return f'"name":"{op}","cat":"collective","args":{{"stage":{op.stage}{self._size(size)}'
        if op.kind in (Kind.OFFLOAD, Kind.RELOAD):
            direction = "to" if op.kind is Kind.OFFLOAD else "from"
            return f'"name":"{op}","cat":"{lane}","args":{{"{direction}":"{_holder(peer)}"{self._size(size)}'
        direction = "from" if lane.startswith("recv") else "to"
        return f'"name":"{op}","cat":"message","args":{{"{direction}_device":{peer}{self._size(size)}'

    def _lane(
        self, device: int, tid: int, name: str, texts: list[str], begin: Floats, finish: Floats, queued: Floats, arrows: NDArray[np.int64] | None
    ) -> Generator[str, None, int]:
        """Slices of one kind on as many threads as they need; returns the first tid that is free after them.

        Args:
            device: The pid.
            tid: The first thread.
            name: Of the lane.
            texts: Name, category and args of each slice, the same in every step.
            begin: (steps, slices) ticks.
            finish: (steps, slices) ticks.
            queued: (steps, slices) ticks between what it waits for and *begin*.
            arrows: (slices,) the message whose arrow passes through each slice.
        """
        step, index = np.nonzero(finish > begin)
        begin, finish = begin[step, index], finish[step, index]
        lanes = spread(begin, finish)
        number = int(lanes.max(initial=-1)) + 1
        for lane in range(number):
            yield from _thread(device, tid + lane, name if lane == 0 else f"{name} {lane + 1}")
        columns = (step.tolist(), index.tolist(), (lanes + tid).tolist(), *self.clock.interval(begin, finish), self.clock.texts(queued[step, index]))
        # a receive that was posted before its message had a producer lets the arrow in when that ends
        through = begin if arrows is None else np.maximum(begin, np.minimum(self.sent[step, arrows[index]], finish - 1))
        for at, which, thread, ts, dur, wait, passes in zip(*columns, self.clock.texts(through), strict=True):
            place = f'"pid":{device},"tid":{thread},"ts":'
            waited = "" if wait == "0" else f',"queued_us":{wait}'
            yield f'{{"ph":"X",{place}{ts},"dur":{dur},{texts[which]}{waited}{self._ending(at)}'
            if arrows is not None and self.flows[at, arrows[which]]:
                yield f'{{"ph":"t",{self._arrow(at, int(arrows[which]))},{place}{passes}}}'
        return tid + number

    def _size(self, size: float) -> str:
        """The field of the args that says a size; nothing where there is none, or none that JSON could say."""
        return f',"{self.size_unit}":{_text(size)}' if size and math.isfinite(size) else ""

    @property
    def size_unit(self) -> str:
        """What sizes are in."""
        return "bytes" if self.timeline.unit == "s" else "units"

    def _memory(self, device: int) -> Iterator[str]:
        """One counter with a series per category; at each moment what holds from then on, and only where it changes."""
        with np.errstate(invalid="ignore"):  # sums of sizes that are not finite, which are left out below
            curve = self.timeline.memory(device)
        categories = {name: values for name, values in curve.categories.items() if values.any() and np.isfinite(values).all()}
        if not categories:
            return
        ticks, levels = self.clock.ticks(curve.times), np.stack(list(categories.values()))
        last = np.append(ticks[1:] != ticks[:-1], True)
        ticks, levels = ticks[last], levels[:, last]
        new = np.append(True, (levels[:, 1:] != levels[:, :-1]).any(axis=0))
        form = ",".join(f'"{name}":%s' for name in categories)
        series = [[_text(value) for value in values] for values in levels[:, new].tolist()]
        for ts, *values in zip(self.clock.texts(ticks[new]), *series, strict=True):
            yield f'{{"ph":"C","pid":{device},"tid":0,"ts":{ts},"name":"memory ({self.size_unit})","args":{{{form % tuple(values)}}}}}'


def _holder(device: int) -> str:
    """Where an activation is moved to."""
    return "host" if device < 0 else f"device {device}"


def _thread(device: int, tid: int, name: str) -> Iterator[str]:
    yield f'{{"ph":"M","pid":{device},"tid":{tid},"name":"thread_name","args":{{"name":"{name}"}}}}'
    yield f'{{"ph":"M","pid":{device},"tid":{tid},"name":"thread_sort_index","args":{{"sort_index":{tid}}}}}'
