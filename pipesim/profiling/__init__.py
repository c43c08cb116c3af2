"""Measuring a torch model layer by layer: times of forward, input gradient and weight gradient, and bytes. Needs torch."""

from __future__ import annotations

from pipesim.profiling.files import graph_text, toml_text, write_profile
from pipesim.profiling.measuring import LayerMeasurement, ModelMeasurement, measure
from pipesim.profiling.sources import load_layers, make_batch

__all__ = ["LayerMeasurement", "ModelMeasurement", "graph_text", "load_layers", "make_batch", "measure", "toml_text", "write_profile"]
