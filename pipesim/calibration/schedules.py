r"""What a calibration runs: GPipe, a probe with split backward, and messages of many sizes.

The probe, on two devices with one stage each and six microbatches (i and w are the halves of a split backward)::

    one microbatch at a time        then GPipe, every other backward split, its w one op late
    0 | F0         B0 F1          i1 w1 F2 F3 F4 F5                   B2 i3 B4 w3 i5 w5
    1 |    F0 B0         F1 i1 w1          F2 F3 F4 F5 B2 i3 B4 w3 i5 w5

The first two microbatches wait for every message in either direction, so that it can be seen how long a message takes from the end of
one op to the start of the next; the others show the ops as close together as in a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipesim.costs import UniformCosts
from pipesim.errors import ScheduleError, require_count
from pipesim.op import Kind, Op
from pipesim.schedule import Schedule

__all__ = ["MESSAGES", "SIZES", "gpipe_probe", "message_probe", "split_probe"]

MESSAGES = "message-probe"
SIZES = tuple(1024 * 4**k for k in range(7))  # bytes: 1 KiB to 4 MiB
_REPEATS = 3


def gpipe_probe(devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards; of chunk after chunk where a device has several, which stand as in a loop.

    Examples:
        >>> print(gpipe_probe(2, 2))
        name: gpipe-2
        device 0 | 0F0 0F1 0B0 0B1
        device 1 | 1F0 1F1 1B0 1B1
    """
    streams = []
    for owned in _looped(devices, chunks):
        ahead = [Op(stage, Kind.F, i) for stage in owned for i in range(microbatches)]
        back = [Op(stage, Kind.B, i) for stage in reversed(owned) for i in range(microbatches)]
        streams.append(ahead + back)
    return Schedule.from_streams(streams, name=f"gpipe-{devices * chunks}")


def split_probe(devices: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The probe with split backward; see the picture above.

    Raises:
        ScheduleError: There are fewer than four microbatches: two wait for messages, and of the others one is split.

    Examples:
        >>> print(split_probe(1, 4))
        name: split-probe-1
        device 0 | 0F0 0B0 0F1 0I1 0W1 0F2 0F3 0B2 0I3 0W3
    """
    if require_count("microbatches", microbatches) < 4:
        raise ScheduleError(f"the probe with split backward wants at least 4 microbatches, got {microbatches}")
    streams = []
    for owned in _looped(devices, chunks):
        stream: list[Op] = []
        for i in (0, 1):
            stream += [Op(stage, Kind.F, i) for stage in owned]
            for stage in reversed(owned):
                stream += [Op(stage, Kind.B, i)] if i == 0 else [Op(stage, Kind.I, i), Op(stage, Kind.W, i)]
        stream += [Op(stage, Kind.F, i) for stage in owned for i in range(2, microbatches)]
        for stage in reversed(owned):
            late: list[Op] = []
            for i in range(2, microbatches):
                halves = i % 2 == 1
                stream += [Op(stage, Kind.I if halves else Kind.B, i), *late]
                late = [Op(stage, Kind.W, i)] if halves else []
            stream += late
        streams.append(stream)
    return Schedule.from_streams(streams, name=f"split-probe-{devices * chunks}")


def message_probe(devices: int, sizes: Sequence[int] = SIZES) -> tuple[Schedule, UniformCosts]:
    """One message at a time through all devices, back to the first and the same way again, and what it is: ops take no time, messages have sizes.

    Every neighbour in the ring gets every size in both directions, three times. The first microbatch only wakes the links up.

    Args:
        devices: Two or more.
        sizes: Bytes.

    Examples:
        >>> schedule, costs = message_probe(2, [1024])
        >>> [str(op) for op in schedule.streams[0][:4]]
        ['0F0', '2F0', '2B0', '0B0']
        >>> costs.message.tolist()[0]
        [1024.0, 1024.0, 1024.0, 1024.0]
    """
    if devices < 2:
        raise ScheduleError("messages go between two devices; one has none to measure")
    of = [sizes[0], *(size for _ in range(_REPEATS) for size in sizes)]
    streams: list[list[Op]] = [[] for _ in range(devices)]
    for i in range(len(of)):
        for stage in range(devices + 1):
            streams[stage % devices].append(Op(stage, Kind.F, i))
        for stage in reversed(range(devices + 1)):
            streams[stage % devices].append(Op(stage, Kind.B, i))
    schedule = Schedule.from_streams(streams, name=MESSAGES)
    return schedule, UniformCosts(forward=0.0, backward=0.0, message=[[float(size) for size in of]] * (devices + 1), unit="s", name=MESSAGES)


def _looped(devices: int, chunks: int) -> list[list[int]]:
    """The stages of each device: chunk c of device r is stage c * devices + r."""
    devices, chunks = require_count("devices", devices), require_count("chunks", chunks)
    return [[chunk * devices + device for chunk in range(chunks)] for device in range(devices)]
