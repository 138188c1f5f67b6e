"""Tiny random masked models of Hugging Face's, in folders with tokenizers of a few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers as hf
from lens_subjects import BERT, text_model

from regard.tokens import Tokenizer
from regard.training.data.vocabulary import train_tokenizer

TEXTS = ["The cat sat on the mat.", "The dogs sat on the cats.", "A cat on a dog sings."] * 3
BERTS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ROBERTAS = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
FAMILIES = ("bert", "roberta")


def make_tokenizer(family: str) -> Tokenizer:
    kind: Any = "wordpiece" if family == "bert" else "bpe"
    roles = BERTS if family == "bert" else ROBERTAS
    size = 97 if family == "bert" else 293
    return train_tokenizer(TEXTS, size, kind=kind, special=tuple(roles.values()), eos=None, **roles)


def make_folder(family: str, folder: Path, head: bool = True) -> Any:
    """The original model, which lies in the folder too, with its tokenizer."""
    tokenizer = make_tokenizer(family)
    sizes = {**BERT, "vocab_size": tokenizer.vocab_size, "max_position_embeddings": 23}
    if family == "bert":
        config = hf.BertConfig(**sizes, pad_token_id=0)
        model = text_model(config, hf.BertForMaskedLM if head else hf.BertModel)
    else:
        config = hf.RobertaConfig(**sizes, pad_token_id=1)
        model = text_model(config, hf.RobertaForMaskedLM if head else hf.RobertaModel)
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return model
