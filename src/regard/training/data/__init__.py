"""Data for training: files to texts, texts to ids on disk, ids to batches from seed and step."""

from regard.training.data.packing import NOTHING, PackedText, TextBatch, mask_tokens
from regard.training.data.pairs import PairBatch, PairedText
from regard.training.data.reading import (
    BadData,
    Documents,
    Notice,
    Pairs,
    read_documents,
    read_pairs,
)
from regard.training.data.store import (
    TokenFile,
    encode_documents,
    encode_pairs_side,
    write_tokens,
)
from regard.training.data.vocabulary import train_tokenizer, vocabulary_notices

__all__ = [
    "NOTHING",
    "BadData",
    "Documents",
    "Notice",
    "PackedText",
    "PairBatch",
    "PairedText",
    "Pairs",
    "TextBatch",
    "TokenFile",
    "encode_documents",
    "encode_pairs_side",
    "mask_tokens",
    "read_documents",
    "read_pairs",
    "train_tokenizer",
    "vocabulary_notices",
    "write_tokens",
]
