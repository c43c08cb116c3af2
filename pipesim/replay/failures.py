"""What went wrong on a rank, in words."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["describe"]

_PEER = ("connection closed", "connection reset", "connect", "peer", "timed out", "timeout", "broken pipe", "socket", "gloo", "nccl", "remote")


def describe(error: BaseException) -> dict[str, Any]:
    """Text, time, and whether the rank only lost a peer that failed before.

    Examples:
        >>> describe(RuntimeError("Connection closed by peer [127.0.0.1]:1"))["lost_peer"]
        True
        >>> describe(ValueError("no such size"))["text"]
        'no such size'
    """
    lines = str(error).strip().splitlines() or [""]
    text = lines[0]
    name = type(error).__name__
    low = str(error).lower()
    lost = isinstance(error, RuntimeError) and any(word in low for word in _PEER)
    if name == "OutOfMemoryError" or isinstance(error, MemoryError) or "can't allocate memory" in low:
        text, lost = f"out of memory: {text}", False
    elif not isinstance(error, ValueError):
        text = f"{name}: {text}"
    return {"text": text, "time": time.time(), "lost_peer": lost}
