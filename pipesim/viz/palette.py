"""One colour per kind of op, in every view.

The hues of compute are Okabe and Ito's (2008, "Color Universal Design"), which people with any common colour blindness tell
apart; those of communication were searched for so that the same holds for all together, on white and on dark. A
pair has no colour of its own: each of its halves has that of its kind. Where a device holds several stages, the first
has the colour itself and later ones lighter shades of the same hue.
"""

from __future__ import annotations

from pipesim.op import Kind

__all__ = ["IDLE", "KIND_COLORS", "KIND_LABELS", "MEMORY_COLORS", "SHADES", "SHARED_LABELS", "color", "edge_color", "label", "text_color"]

SHADES = 4  # more stages on a device than that begin again with the first shade

# Sender and receiver of a message have one colour: they are told apart by their lanes.
_ACTIVATION, _GRADIENT, _MOVE = "#56b4e9", "#97a65b", "#666666"

KIND_COLORS: dict[Kind, str] = {
    Kind.F: "#0072b2",
    Kind.B: "#009e73",
    Kind.I: "#e69f00",
    Kind.W: "#cc79a7",
    Kind.R: "#f0e442",
    Kind.U: "#d55e00",
    Kind.REDUCE_GRAD: "#844cd9",
    Kind.SEND_F: _ACTIVATION,
    Kind.RECV_F: _ACTIVATION,
    Kind.SEND_B: _GRADIENT,
    Kind.RECV_B: _GRADIENT,
    Kind.UNSHARD: "#8c4331",
    Kind.RESHARD: "#8c4331",
    Kind.OFFLOAD: _MOVE,
    Kind.RELOAD: _MOVE,
}

# What a colour means in a legend, where several kinds share it.
SHARED_LABELS = {_ACTIVATION: "activation message", _GRADIENT: "gradient message", "#8c4331": "unshard, reshard", _MOVE: "offload, reload"}

KIND_LABELS: dict[Kind, str] = {
    Kind.F: "F forward",
    Kind.B: "B backward",
    Kind.I: "I input gradient",
    Kind.W: "W weight gradient",
    Kind.R: "R recompute",
    Kind.U: "U update",
    Kind.REDUCE_GRAD: "gradient reduction",
    Kind.SEND_F: "send activation",
    Kind.RECV_F: "receive activation",
    Kind.SEND_B: "send gradient",
    Kind.RECV_B: "receive gradient",
    Kind.UNSHARD: "unshard weights",
    Kind.RESHARD: "reshard weights",
    Kind.OFFLOAD: "offload activation",
    Kind.RELOAD: "reload activation",
}

# Keys are pipesim.memory.CATEGORIES. What is there all the time is grey to brown, so that what moves stands out.
MEMORY_COLORS: dict[str, str] = {
    "weights": "#5a5a5a",
    "gradients": "#8c8c8c",
    "optimizer": "#bdbdbd",
    "weight versions": "#d55e00",
    "activations": "#56b4e9",
    "communication": "#f0e442",
}

# The background of a device's row: where it shows, the device is idle.
IDLE = "#eeeeee"

# Share of white in the shades, by how many of them there are.
_WHITE = {1: (0.0,), 2: (0.0, 0.45), 3: (0.0, 0.35, 0.65), 4: (0.0, 0.28, 0.52, 0.74)}


def color(kind: Kind, chunk: int = 0, num_chunks: int = 1) -> str:
    """The colour of a bar, ``#rrggbb``.

    Args:
        kind: What the op does.
        chunk: The how-manieth of its device's stages it belongs to, from 0.
        num_chunks: The most stages that any device holds.

    Examples:
        >>> color(Kind.F), color(Kind.F, chunk=1, num_chunks=2)
        ('#0072b2', '#73b1d5')
    """
    return _mixed(KIND_COLORS[kind], 255, _WHITE[min(max(num_chunks, 1), SHADES)][chunk % min(max(num_chunks, 1), SHADES)])


def label(kind: Kind) -> str:
    """What the colour of a kind means, for a legend that has every colour once.

    Examples:
        >>> label(Kind.F), label(Kind.RECV_B)
        ('F forward', 'gradient message')
    """
    return SHARED_LABELS.get(KIND_COLORS[kind], KIND_LABELS[kind])


def edge_color(background: str) -> str:
    """A darker shade of the same hue, for the outline of a bar.

    Examples:
        >>> edge_color("#0072b2")
        '#004c77'
    """
    return _mixed(background, 0, 0.33)


def text_color(background: str) -> str:
    """Black or white, whichever contrasts more with the background.

    Examples:
        >>> text_color("#0072b2"), text_color("#f0e442")
        ('#ffffff', '#000000')
    """
    # WCAG 2: relative luminance, and the luminance at which black and white contrast equally, sqrt(1.05 · 0.05) - 0.05
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in (channel / 255 for channel in _channels(background))
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#ffffff"


def _channels(value: str) -> tuple[int, int, int]:
    return int(value[1:3], 16), int(value[3:5], 16), int(value[5:7], 16)


def _mixed(value: str, target: int, share: float) -> str:
    return "#" + "".join(f"{round(channel + (target - channel) * share):02x}" for channel in _channels(value))
