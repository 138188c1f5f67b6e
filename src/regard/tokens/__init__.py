"""Tokenizers: text to ids and back, on the `tokenizers` package; imports no torch."""

from regard.tokens.stream import TextStream
from regard.tokens.tokenizer import Batch, Encoding, Spans, SpecialTokens, Tokenizer

__all__ = ["Batch", "Encoding", "Spans", "SpecialTokens", "TextStream", "Tokenizer"]
