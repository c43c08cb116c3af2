"""Runs of others: Timelines from the traces that torch.profiler (Kineto) or pipesim itself wrote.

Nothing here needs torch, and nothing in a file is ever executed.
"""

from pipesim.importing.timelines import Imported, import_traces, read_traces

__all__ = ["Imported", "import_traces", "read_traces"]
