"""Routing probes: forecasts of which experts the next layers will choose, and the tools that fit, judge and calibrate them."""
from __future__ import annotations

from .probe import GateSpec, RoutingProbe, quantise_union

__all__ = ["GateSpec", "RoutingProbe", "quantise_union"]
