"""The attention operation: what it means, how it is made fast, what may be seen of it."""

from regard.attention.backends import Explanation
from regard.attention.bias import ALiBi, Bias, DenseBias, RelativeTable
from regard.attention.mask import Mask
from regard.attention.op import attention, explain, observe
from regard.attention.patterns import Causal, Dense, Documents, Lengths, Prefix, Window
from regard.attention.wants import Map, Observation, Wants

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
    "RelativeTable",
    "Wants",
    "Window",
    "attention",
    "explain",
    "observe",
]
