"""Layers of the Transformer: attention with weights and a KV cache, feed-forward, blocks, stacks.

`multihead.py` is attention as a layer, `cache.py` its KV cache, `observing.py` reads out its row
statistics and weights; `feedforward.py` and `norm.py` are the rest of a block; `block.py` and
`stack.py` put them together.
"""

from regard.layers.block import BlockConfig, DecoderBlock, EncoderBlock
from regard.layers.cache import BlockCache, CrossCache, DecoderCache, Kept, KVCache
from regard.layers.feedforward import FeedForward
from regard.layers.multihead import MultiHeadAttention, Places, ProjectionBias
from regard.layers.norm import make_norm
from regard.layers.observing import Observable, Seen, observing
from regard.layers.stack import Decoder, Encoder, RelativeConfig

__all__ = [
    "BlockCache",
    "BlockConfig",
    "CrossCache",
    "Decoder",
    "DecoderBlock",
    "DecoderCache",
    "Encoder",
    "EncoderBlock",
    "FeedForward",
    "KVCache",
    "Kept",
    "MultiHeadAttention",
    "Observable",
    "Places",
    "ProjectionBias",
    "RelativeConfig",
    "Seen",
    "make_norm",
    "observing",
]
