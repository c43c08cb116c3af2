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
from .hanayo import hanayo
from .naive import naive
from .one_f_one_b import eager_1f1b, one_f_one_b
from .pipad import pipad
from .pipedream import pipedream
from .pipedream_2bw import pipedream_2bw
from .pipemare import pipemare
from .recompute import gpipe_recompute, one_f_one_b_recompute
from .spectrain import spectrain

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
    # bidirectional and wave
    "gems": gems,
    "chimera": chimera,
    "hanayo": hanayo,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
    "dualpipev": dualpipe_v,
    "dualpipe_v": dualpipe_v,
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
