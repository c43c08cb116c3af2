"""How devices communicate: who waits for whom, in which order, and what it costs the compute beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from pipesim.errors import LARGEST, ScheduleError, did_you_mean

__all__ = ["TRAFFIC_KINDS", "Communication", "Receives", "Sends", "Stream"]

Sends = Literal["eager", "rendezvous"]
Stream = Literal["free", "device", "peer"]
Receives = Literal["early", "late"]

# what interference can be told apart by
TRAFFIC_KINDS = ("p2p", "collective", "offload")


@dataclass(frozen=True)
class Communication:
    """How devices communicate; the default is eager, overlapped with compute, and in nobody's way.

    Attributes:
        sends: ``eager``: a message leaves when it is ready. ``rendezvous``: only when its receive has been posted, too.
        blocking: Whether a SEND or RECV holds its device's compute lane until the message is there. A lane that is held is
            not busy.
        stream: In what order a device's SENDs and RECVs run: all on one first-in, first-out stream per ``device``, on one per
            ``peer`` of each device, or ``free``, each as soon as it can. None: ``device`` where SEND and RECV are listed,
            ``free`` where messages follow from the data flow.
        batched: Whether the SENDs and RECVs of a device between two slots are one group, which starts when the groups of all
            its peers are there, and ends when all its messages are there.
        receives: Where an implicit message's RECV stands if an order is needed: as ``early`` as its message can have been
            sent, or as ``late`` as the op that needs it.
        shape_messages: Whether a message that takes only the link's latency precedes every tensor, which is posted when that
            has arrived.
        interference: Kind of traffic (``p2p``, ``collective``, ``offload``) to the factor by which compute is slower on a
            device while such traffic is under way there; of several kinds the largest counts.

    Examples:
        >>> Communication(sends="rendezvous", interference={"p2p": 1.05}).is_default
        False
    """

    sends: Sends = "eager"
    blocking: bool = False
    stream: Stream | None = None
    batched: bool = False
    receives: Receives = "late"
    shape_messages: bool = False
    interference: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, known in (("sends", get_args(Sends)), ("stream", (*get_args(Stream), None)), ("receives", get_args(Receives))):
            value = getattr(self, name)
            if value not in known:
                words = [str(word) for word in known if word is not None]
                raise ScheduleError(f"{name} must be one of {', '.join(words)}, got {value!r}{did_you_mean(str(value), words)}")
        for name in ("blocking", "batched", "shape_messages"):
            if not isinstance(getattr(self, name), bool):
                raise ScheduleError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if not isinstance(self.interference, Mapping):
            raise ScheduleError(f"interference must map kinds of traffic to factors, got {self.interference!r:.80}")
        for kind, factor in self.interference.items():
            if kind not in TRAFFIC_KINDS:
                known_kinds = ", ".join(TRAFFIC_KINDS)
                raise ScheduleError(f"interference knows the traffic {known_kinds}, got {kind!r}{did_you_mean(str(kind), TRAFFIC_KINDS)}")
            if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= LARGEST:
                raise ScheduleError(f"interference of {kind} must be a finite factor of at least 1 (1.05 for 5 % slower), got {factor!r}")

    @property
    def is_default(self) -> bool:
        """Whether implicit messages go the plain way: eager, overlapped, each by itself."""
        return (
            self.sends == "eager"
            and not (self.blocking or self.batched or self.shape_messages)
            and self.stream in (None, "free")
            and all(factor == 1 for factor in self.interference.values())
        )
