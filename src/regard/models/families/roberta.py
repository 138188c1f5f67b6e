"""RoBERTa and XLM-RoBERTa: BERT with other names, and positions that begin after the padding token.

Position 0 is row pad + 1 of the table, so a table of 514 rows with padding token 1 allows texts of
up to 512 tokens.
"""

from __future__ import annotations

from regard.models.config import ModelConfig
from regard.models.families import bert
from regard.models.family import ConfigReader, Family, Source
from regard.models.weight_map import Link, both, same


def config_from(read: ConfigReader) -> ModelConfig:
    read.expect_class("RobertaForMaskedLM", "XLMRobertaForMaskedLM")
    pad = read.token("pad_token_id")
    offset = 1 + (1 if pad is None else pad)
    rows = read.count("max_position_embeddings", 514)
    if rows <= offset:
        expected = f"more, since positions begin after the padding token {offset - 1}"
        raise read.wrong("max_position_embeddings", rows, expected)
    # The head's activation is always gelu, whatever that of the layers.
    return bert.make_config("roberta", read, offset, head_activation="gelu")


def links(config: ModelConfig) -> list[Link]:
    found = bert.make_links(config, "roberta.")
    if config.head.kind == "masked":
        found += both("lm_head.dense", "head.dense")
        found += both("lm_head.layer_norm", "head.norm")
        found.append(same("lm_head.bias", "head.bias"))
    return found


def size(kind: str, dim: int, n_layers: int, n_heads: int, vocab_size: int) -> Source:
    cls = {"roberta": "RobertaForMaskedLM", "xlm-roberta": "XLMRobertaForMaskedLM"}[kind]
    named = {"model_type": kind, "architectures": [cls], "max_position_embeddings": 514}
    tokens = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    usual = {**bert.size(dim, n_layers, n_heads, vocab_size), **named, **tokens}
    return {**usual, "type_vocab_size": 1, "layer_norm_eps": 1e-5}


FAMILY = Family(
    name="roberta",
    model_types=("roberta", "xlm-roberta"),
    config_from=config_from,
    links=links,
    prefix="roberta.",
    ignored=(r"embeddings\.position_ids",),
    copies={
        r"lm_head\.decoder\.weight": "roberta.embeddings.word_embeddings.weight",
        r"lm_head\.decoder\.bias": "lm_head.bias",
    },
    older_names=bert.OLDER_NAMES,
    sizes={
        "distilroberta-base": size("roberta", 768, 6, 12, 50265),
        "roberta-base": size("roberta", 768, 12, 12, 50265),
        "roberta-large": size("roberta", 1024, 24, 16, 50265),
        "xlm-roberta-base": size("xlm-roberta", 768, 12, 12, 250002),
        "xlm-roberta-large": size("xlm-roberta", 1024, 24, 16, 250002),
    },
)
