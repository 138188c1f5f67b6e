"""Drop-in replacements for torch.nn's attention and Transformer modules, on regard's attention."""

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
