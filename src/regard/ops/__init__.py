"""The attention operation: its definition, its fast backends, and what can be observed of it."""

from regard.ops.backends import Explanation
from regard.ops.bias import ALiBi, Bias, DenseBias, RelativeTable
from regard.ops.mask import Mask
from regard.ops.masks import Causal, Dense, Documents, Lengths, Prefix, Window
from regard.ops.op import attention, explain, observe
from regard.ops.wants import Map, Observation, Received, Wants

__all__ = [
    "ALiBi",
    "Bias",
    "Causal",
    "Dense",
    "DenseBias",
    "Documents",
    "Explanation",
    "Lengths",
    "Map",
    "Mask",
    "Observation",
    "Prefix",
    "Received",
    "RelativeTable",
    "Wants",
    "Window",
    "attention",
    "explain",
    "observe",
]
