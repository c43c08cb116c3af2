"""The built-in schedules. Reached only through the entry point group ``pipesim.schedules``, as a third party's are."""

from __future__ import annotations

from collections.abc import Callable

from pipesim.schedule import Schedule

from .ampnet import ampnet
from .bpipe import bpipe
from .chimera import chimera
from .dualpipe import dualpipe
from .dualpipe_v import dualpipe_v
from .gems import gems
from .gnnpipe import gnnpipe
from .gpipe import gpipe
from .graphpipe import graphpipe
from .grouped_interleaved import grouped_interleaved
from .hanayo import hanayo
from .interleaved import interleaved_1f1b, interleaved_1f1b_overlap
from .interleaved_zb import interleaved_zb
from .looped_bfs import looped_bfs
from .naive import naive
from .one_f_one_b import eager_1f1b, one_f_one_b
from .pipad import pipad
from .pipedream import pipedream
from .pipedream_2bw import pipedream_2bw
from .pipemare import pipemare
from .recompute import gpipe_recompute, one_f_one_b_recompute
from .seq1f1b import seq1f1b
from .spectrain import spectrain
from .v_auto import v_auto
from .v_blocks import v_1f1b, v_half, v_min, v_zb
from .zb_auto import zb1p, zb2p, zb_auto
from .zb_h import zb_h1, zb_h2
from .zb_v import zb_v

__all__ = ["SCHEDULES"]

# A second name for the same function is an alias: `pipesim list` shows it beside the first.
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    # synchronous
    "naive": naive,
    "gpipe": gpipe,
    "afab": gpipe,
    "1f1b": one_f_one_b,
    "dapple": one_f_one_b,
    "pipedream-flush": one_f_one_b,
    "eager-1f1b": eager_1f1b,
    "1f1b_overlap": eager_1f1b,
    "interleaved-1f1b": interleaved_1f1b,
    "interleaved1f1b": interleaved_1f1b,
    "interleaved": interleaved_1f1b,
    "interleave": interleaved_1f1b,
    "1f1b-interleave": interleaved_1f1b,
    "1f1b_interleave": interleaved_1f1b,
    "vpp": interleaved_1f1b,
    "depth-first": interleaved_1f1b,
    "interleaved-1f1b-overlap": interleaved_1f1b_overlap,
    "1f1b_interleave_overlap": interleaved_1f1b_overlap,
    "looped-bfs": looped_bfs,
    "loopedbfs": looped_bfs,
    "breadth-first": looped_bfs,
    "seq1f1b": seq1f1b,
    "grouped-interleaved": grouped_interleaved,
    "group-interleaved": grouped_interleaved,
    # bidirectional and wave
    "gems": gems,
    "chimera": chimera,
    "hanayo": hanayo,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
    "dualpipev": dualpipe_v,
    "dualpipe_v": dualpipe_v,
    # zero bubble
    "zb-h1": zb_h1,
    "zbh1": zb_h1,
    "zb-h2": zb_h2,
    "zbh2": zb_h2,
    "zb-auto": zb_auto,
    "zb-1p": zb1p,
    "zb1p": zb1p,
    "zb-2p": zb2p,
    "zb2p": zb2p,
    "interleaved-zb": interleaved_zb,
    "interleavedzerobubble": interleaved_zb,
    "zb-v": zb_v,
    "zbv": zb_v,
    "zbvzerobubble": zb_v,
    # controllable memory
    "v-1f1b": v_1f1b,
    "v1f1b": v_1f1b,
    "1f1b-v": v_1f1b,
    "v-min": v_min,
    "v-half": v_half,
    "v-zb": v_zb,
    "v-auto": v_auto,
    # asynchronous
    "pipedream": pipedream,
    "pipedream-2bw": pipedream_2bw,
    "2bw": pipedream_2bw,
    "pipemare": pipemare,
    "spectrain": spectrain,
    "ampnet": ampnet,
    # memory balancing
    "bpipe": bpipe,
    "1f1b-recompute": one_f_one_b_recompute,
    "gpipe-recompute": gpipe_recompute,
    # other shapes
    "graphpipe": graphpipe,
    "gnnpipe": gnnpipe,
    "pipad": pipad,
}
