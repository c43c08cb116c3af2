"""What one trace file says about the ops of a rank.

PyTorch's ``_PipelineScheduleRuntime`` labels every action: ``PP:0F0``, ``PP:1RECV_F0``, ``PP:(2F4;3B0)OVERLAP_F_B``. Its GPipe
for a single stage labels ``Forward 0`` and ``Backward 0``; its Schedule1F1B labels nothing.

A label on the CPU of a gloo run begins with the wait for the op's input, which ``gloo:recv`` shows::

    PP:1RECV_F0  |==|                      posts the receive
    gloo:recv        |=============|       from there to the moment at which the input was seen
    PP:1F0             |. . . . . .=====|  the op itself is the part after that

Where GPipe's slice also posts the send, the op ends when ``gloo:send`` begins.

On CUDA the CPU's label measures the launch of kernels; the GPU's (``gpu_user_annotation``) measures the op.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipesim.errors import ScheduleError
from pipesim.importing.chrome import Track, TrackId, read_trace
from pipesim.importing.own import own_ranks
from pipesim.importing.ranks import Found, Label, RankTrace, computes, disjoint, receives, refused
from pipesim.op import Kind, Op, Slot, parse_op

__all__ = ["read_ranks"]

_LABEL = "PP:"
_SINGLE_STAGE = re.compile(r"(Forward|Backward) ([0-9]{1,9})")
_STEP = re.compile(r"ProfilerStep#([0-9]{1,9})")
_OWN = re.compile(r"\(?[0-9]{1,9}[A-Z]")  # how the names of ops in pipesim's own traces begin
_RANK_IN_NAME = re.compile(r"rank\D{0,2}([0-9]{1,6})", re.IGNORECASE)
_MOST_RANKS = 100_000
_MOST_TENSORS = 1000  # of a message


def read_ranks(paths: Sequence[Path]) -> list[RankTrace]:
    """Reads files, one per rank, or one that pipesim wrote with all devices in it; sorted by rank.

    Raises:
        ScheduleError: A file is no trace, holds no ops, or two are of one rank.
        OSError: It cannot be read.
    """
    ranks: list[RankTrace] = []
    for place, path in enumerate(paths):
        trace = read_trace(path, _wanted)
        problems = [f"{path}, {problem}" for problem in trace.problems]
        other = trace.about.get("otherData")
        if isinstance(other, dict) and "ops_without_duration_left_out" in other:
            if len(paths) > 1:
                raise ScheduleError(f"{path} is a trace that pipesim wrote, with all devices in it; give it alone")
            return own_ranks(path, trace.tracks, other, problems)
        ranks.append(_read_rank(path, place, trace.tracks, trace.about, problems))
    _refuse_mixed(ranks)
    ranks.sort(key=lambda rank: rank.rank)
    for one, other_rank in itertools.pairwise(ranks):
        if one.rank == other_rank.rank:
            raise ScheduleError(f"{one.path} and {other_rank.path} are both of rank {one.rank}; give one file per rank")
    _place_single_stages(ranks)
    return ranks


def _wanted(name: str) -> bool:
    return name.startswith((_LABEL, "ProfilerStep#", "gloo:", "c10d::", "nccl:")) or bool(_SINGLE_STAGE.fullmatch(name) or _OWN.match(name))


# -- one rank of a Kineto trace ----------------------------------------------------------------------------------------


def _read_rank(path: Path, place: int, tracks: Mapping[TrackId, Track], about: Mapping[str, Any], problems: list[str]) -> RankTrace:
    rank, rank_from = _rank(path, place, about)
    host = about.get("host_name")
    result = RankTrace(path, rank, rank_from, _base(path, about), host if isinstance(host, str) else "", problems=problems)
    labels: dict[tuple[bool, TrackId], list[Label]] = {}  # (on the GPU, track) to slices, by start
    steps: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
    receipts: list[tuple[float, float]] = []
    postings: list[float] = []
    communicates = False
    named = any(name.startswith(_LABEL) for track in tracks.values() for name in track.names)
    for identity, track in tracks.items():
        columns = zip(track.names, track.start.tolist(), track.end.tolist(), track.index.tolist(), track.events, strict=True)
        for name, start, end, index, event in columns:
            gpu = event.get("cat") == "gpu_user_annotation"
            if (wrong := refused(start, end)) is not None:
                problems.append(f"{path}, event {index}: {wrong}")
                continue
            if name == "gloo:recv":
                receipts.append((start, end))
            elif name == "gloo:send":
                postings.append(start)
            elif name.startswith(("c10d::", "nccl:")):
                communicates = True
            elif step := _STEP.fullmatch(name):
                steps[gpu].append((start, int(step[1])))
            elif (slot := _slot(result, name, index, named)) is not None:
                labels.setdefault((gpu, identity), []).append(Label(slot, start, end, index))
    if not labels:
        _refuse_empty(result, communicates or bool(receipts))
    receipts.sort()
    postings.sort()
    for marks in steps.values():
        marks.sort()
    _take_compute(result, labels, steps, receipts)
    if not named:
        result.compute = [_cut_send(found, postings) for found in result.compute]
    _take_transfers(result, labels, receipts)
    backend = about.get("distributedInfo", {}).get("backend") if isinstance(about.get("distributedInfo"), dict) else None
    if not result.gpu and isinstance(backend, str) and "nccl" in backend:
        result.notes.append(f"{path.name} has no GPU annotations (profile with ProfilerActivity.CUDA): its times are those of launches")
    return result


def _refuse_empty(rank: RankTrace, communicates: bool) -> None:
    text = f"{rank.path} holds no ops: no annotation such as PP:0F0 (PyTorch's _PipelineScheduleRuntime) or Forward 0 (its ScheduleGPipe)"
    if communicates:
        text += "; it has sends and receives, and Schedule1F1B labels none of its ops: run its order as CSV in _PipelineScheduleRuntime instead"
    if rank.problems:
        text += "; malformed: " + "; ".join(rank.problems[:3])
    raise ScheduleError(text)


def _slot(rank: RankTrace, name: str, index: int, named: bool) -> Slot | None:
    """The op that a label names; its stage is -1 where the label says none."""
    if name.startswith(_LABEL):
        try:
            return parse_op(name[len(_LABEL) :])
        except ScheduleError as error:
            rank.problems.append(f"{rank.path}, event {index}: {error}")
            return None
    match = None if named else _SINGLE_STAGE.fullmatch(name)
    return Op(-1, Kind.F if match[1] == "Forward" else Kind.B, int(match[2])) if match else None


def _fullest(tracks: Sequence[list[Label]]) -> list[Label]:
    """The stream or thread with most of the slices, and of those that tie, that with most time."""
    return max(tracks, key=lambda labels: (len(labels), sum(label.end - label.start for label in labels)), default=[])


def _take_compute(
    rank: RankTrace,
    labels: Mapping[tuple[bool, TrackId], list[Label]],
    steps: Mapping[bool, list[tuple[float, int]]],
    receipts: Sequence[tuple[float, float]],
) -> None:
    chosen = {
        gpu: _fullest([[label for label in own if computes(label.slot)] for (on_gpu, _), own in labels.items() if on_gpu is gpu])
        for gpu in (True, False)
    }
    rank.gpu = bool(chosen[True])
    there = sum(computes(label.slot) for (gpu, _), own in labels.items() if gpu is rank.gpu for label in own)
    if there > len(chosen[rank.gpu]):
        what = "streams" if rank.gpu else "threads"
        rank.notes.append(f"{rank.path.name}: {there - len(chosen[rank.gpu])} labels of computation on other {what} left out")
    marks = steps[rank.gpu]
    rank.has_steps = bool(marks)
    rank.compute = disjoint(rank, chosen[rank.gpu], marks)
    if rank.gpu:
        _add_launched(rank, chosen[False], steps[False])
    else:
        _cut_waits(rank, labels, receipts)


def _add_launched(rank: RankTrace, launched: Sequence[Label], marks: Sequence[tuple[float, int]]) -> None:
    """Ops that ran no kernel have no slice on the GPU (PyTorch's I on its first stage): they take no time, where they were launched."""
    ran: dict[Slot, int] = {}
    for found in rank.compute:
        ran[found.slot] = ran.get(found.slot, 0) + 1
    iterations = max(ran.values(), default=0)
    missing = {label.slot for label in launched} - ran.keys()
    if not missing or any(count != iterations for count in ran.values()):
        return
    by_slot: dict[Slot, list[Found]] = {}
    for found in rank.compute:
        by_slot.setdefault(found.slot, []).append(found)
    seen: dict[Slot, int] = {}
    result: list[Found] = []
    for label in launched:
        number = seen[label.slot] = seen.get(label.slot, 0) + 1
        if label.slot in by_slot:
            if number > iterations:
                return  # the launches of another iteration: which belong together cannot be said
            result.append(by_slot[label.slot][number - 1])
        else:
            time = result[-1].end if result else rank.compute[0].start
            step = result[-1].step if result else rank.compute[0].step
            result.append(Found(label.slot, time, time, label.event, step, time))
    ordered = all(one.end <= two.start for one, two in itertools.pairwise(result))
    if ordered and sum(found.slot in by_slot for found in result) == len(rank.compute):
        rank.compute = result
        names = ", ".join(sorted(map(str, missing))[:4])
        rank.notes.append(
            f"{rank.path.name}: {len(missing)} ops ran nothing on the GPU ({names}{', ...' if len(missing) > 4 else ''}): they take no time"
        )


def _cut_waits(rank: RankTrace, labels: Mapping[tuple[bool, TrackId], list[Label]], receipts: Sequence[tuple[float, float]]) -> None:
    """An op begins when its input is seen, where gloo:recv shows that."""
    if not receipts:
        return
    posted = sorted(
        (label.start, label.end, label.slot) for own in labels.values() for label in own if isinstance(label.slot, Op) and receives(label.slot)
    )
    last: dict[Op, float] = {}  # op to when the input of its latest slice was seen
    waiting = 0
    result = []
    for found in rank.compute:
        while waiting < len(posted) and posted[waiting][0] < found.asked:
            start, end, recv = posted[waiting]
            for op in _consumers(recv):
                last[op] = max((seen for begin, seen in _posted_within(receipts, start, end)), default=float("-inf"))
            waiting += 1
        halves = (found.slot,) if isinstance(found.slot, Op) else found.slot
        came = max((last.pop(op, float("-inf")) for op in halves), default=float("-inf"))
        if not posted:  # PyTorch's GPipe receives inside the slice
            came = max((seen for _, seen in _posted_within(receipts, found.asked, found.end)), default=float("-inf"))
        result.append(found._replace(start=min(max(found.start, came), found.end)))
    rank.compute = result


def _cut_send(found: Found, postings: Sequence[float]) -> Found:
    """The op without the sending of its output."""
    place = bisect.bisect_left(postings, found.start)
    return found._replace(end=postings[place]) if place < len(postings) and postings[place] < found.end else found


def _consumers(recv: Op) -> tuple[Op, ...]:
    if recv.kind is Kind.RECV_F:
        return (Op(recv.stage, Kind.F, recv.microbatch),)
    return Op(recv.stage, Kind.B, recv.microbatch), Op(recv.stage, Kind.I, recv.microbatch)


def _posted_within(receipts: Sequence[tuple[float, float]], start: float, end: float) -> Sequence[tuple[float, float]]:
    """The receipts posted there, one for each tensor of a message; more than any message has are cut off."""
    first = bisect.bisect_left(receipts, (start, float("-inf")))
    return receipts[first : min(first + _MOST_TENSORS, bisect.bisect_right(receipts, (end, float("inf"))))]


def _take_transfers(rank: RankTrace, labels: Mapping[tuple[bool, TrackId], list[Label]], receipts: Sequence[tuple[float, float]]) -> None:
    for kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B):
        for gpu in (True, False):
            tracks = [
                [label for label in own if isinstance(label.slot, Op) and label.slot.kind is kind] for (on, _), own in labels.items() if on is gpu
            ]
            chosen = _fullest(tracks)
            if chosen and gpu is rank.gpu:
                for label in chosen:
                    assert isinstance(label.slot, Op)
                    rank.transfers.setdefault(label.slot, []).append((label.start, label.end))
                    if receives(label.slot):
                        shown = [seen for _, seen in _posted_within(receipts, label.start, label.end)]
                        if shown:
                            proof: tuple[float, float] | None = (float("inf"), max(shown))
                        else:  # a slice that ends when the message is there, unless gloo shows that such slices only post
                            proof = (label.start, label.end) if gpu or not receipts else None
                        rank.seen.setdefault(label.slot, []).append(proof)


# -- what a file says about itself -------------------------------------------------------------------------------------


def _base(path: Path, about: Mapping[str, Any]) -> int:
    base = about.get("baseTimeNanoseconds", 0)
    if isinstance(base, bool) or not isinstance(base, int | float) or not abs(base) < 2**63 or base != int(base):
        raise ScheduleError(f"{path}: baseTimeNanoseconds is {str(base)[:60]!r}; right is a whole number of nanoseconds")
    return int(base)


def _rank(path: Path, place: int, about: Mapping[str, Any]) -> tuple[int, str]:
    info = about.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    if rank is not None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < _MOST_RANKS:
            raise ScheduleError(f"{path}: distributedInfo.rank is {str(rank)[:60]!r}; right is a whole number from 0 to {_MOST_RANKS - 1}")
        return rank, "distributedInfo"
    if match := _RANK_IN_NAME.search(path.name):
        return int(match[1]), "file name"
    return place, "order of the files"


def _refuse_mixed(ranks: Sequence[RankTrace]) -> None:
    """Raises where some files say their rank and others do not; where none does, their order is it."""
    silent = [rank for rank in ranks if rank.rank_from == "order of the files"]
    if silent and len(silent) < len(ranks):
        other = next(rank for rank in ranks if rank not in silent)
        raise ScheduleError(f"{silent[0].path} does not say its rank, and {other.path} does ({other.rank}); name it such as trace_rank0.json")


def _place_single_stages(ranks: Sequence[RankTrace]) -> None:
    """Labels without a stage are those of PyTorch's schedules with one stage per rank: the stage is the rank's place."""
    for place, rank in enumerate(ranks):
        if any(isinstance(found.slot, Op) and found.slot.stage < 0 for found in rank.compute):
            rank.compute = [found._replace(slot=found.slot._replace(stage=place)) for found in rank.compute if isinstance(found.slot, Op)]
            rank.notes.append(f"{rank.path.name}: labels without a stage (Forward 0): taken for stage {place}")
