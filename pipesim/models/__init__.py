"""From a model and a GPU to durations and bytes: specifications, devices, parallelism, layouts, and the cost model made of them."""

from __future__ import annotations

from pipesim.models.costs import StageTimes, TransformerCosts
from pipesim.models.devices import DeviceSpec, Efficiency, device_presets, read_device, read_efficiency, write_efficiency
from pipesim.models.layers import forward_flops, layer_activation, layer_work, parameters
from pipesim.models.layout import Layout, even_layout, layout_of, parse_layout
from pipesim.models.links import pipeline_cluster
from pipesim.models.parallelism import Parallelism
from pipesim.models.spec import ModelSpec, model_presets, read_model

__all__ = [
    "DeviceSpec",
    "Efficiency",
    "Layout",
    "ModelSpec",
    "Parallelism",
    "StageTimes",
    "TransformerCosts",
    "device_presets",
    "even_layout",
    "forward_flops",
    "layer_activation",
    "layer_work",
    "layout_of",
    "model_presets",
    "parameters",
    "parse_layout",
    "pipeline_cluster",
    "read_device",
    "read_efficiency",
    "read_model",
    "write_efficiency",
]
