"""torch.nn's attention and Transformer modules on ours: change `torch.nn` to `regard.nn`."""

from regard.nn import functional
from regard.nn.convert import Conversion, convert
from regard.nn.multihead import MultiheadAttention
from regard.nn.transformer import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__all__ = [
    "Conversion",
    "MultiheadAttention",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "convert",
    "functional",
]
