"""What ops cost: durations, message sizes, and the bytes that memory curves are made of."""

from __future__ import annotations

from pipesim.costs.files import cost_presets, read_costs
from pipesim.costs.model import ActivationBytes, CollectiveCosts, CostModel
from pipesim.costs.profile import ProfileCosts
from pipesim.costs.uniform import UniformCosts

__all__ = ["ActivationBytes", "CollectiveCosts", "CostModel", "ProfileCosts", "UniformCosts", "cost_presets", "read_costs"]
