"""Marian: OPUS-MT's translation models; BART's layers with sinusoids, no norm of the embedding.

Decoding begins with the padding token, which is never generated. Left out: models with separate
vocabularies for the two languages; here encoder and decoder share one table.
"""

from __future__ import annotations

from torch import Tensor

from regard.models.config import EmbedConfig, HeadConfig, ModelConfig
from regard.models.families import bart
from regard.models.family import ConfigReader, Family, Source
from regard.positions import sinusoidal


def config_from(read: ConfigReader) -> ModelConfig:
    # If False, the encoder and the decoder have separate tables.
    read.expect("share_encoder_decoder_embeddings", True)
    read.expect("tie_word_embeddings", True)
    read.expect("normalize_before", False)
    read.expect("normalize_embedding", False)
    read.expect("add_final_layer_norm", False)
    read.expect("static_position_embeddings", True)
    read.expect("decoder_vocab_size", read.count("vocab_size"))
    return read.model(
        "marian",
        max_len=read.count("max_position_embeddings", 512),
        encoder=bart.make_blocks(read, "encoder", order="post"),
        decoder=bart.make_blocks(read, "decoder", order="post"),
        embed=EmbedConfig(
            positions="sinusoidal",
            layout="halves",
            scale=bart.embed_scale(read),
            dropout=read.number("dropout", 0.1),
        ),
        head=HeadConfig(bias=True),
        tokens=bart.special_tokens(read, read.token("pad_token_id")),
    )


def position_table(config: ModelConfig, shape: tuple[int, ...]) -> Tensor | None:
    """The table of sinusoids, which some files store as a tensor."""
    if shape != (config.max_len, config.dim):
        return None
    return sinusoidal(shape[0], shape[1], layout="halves")


def size(vocab_size: int) -> Source:
    named = {"model_type": "marian", "architectures": ["MarianMTModel"], "scale_embedding": True}
    usual = {"max_position_embeddings": 512, "activation_function": "swish"}
    pad, ends = vocab_size - 1, {"eos_token_id": 0, "forced_eos_token_id": 0}
    starts = {"pad_token_id": pad, "decoder_start_token_id": pad, "bad_words_ids": [[pad]]}
    return {**bart.shape(512, 6, 8, 2048, vocab_size), **named, **usual, **ends, **starts}


FAMILY = Family(
    name="marian",
    config_from=config_from,
    links=bart.make_links,
    prefix="model.",
    copies=bart.COPIES,
    constants={r"(encoder|decoder)\.embed_positions\.weight": position_table},
    sizes={
        "opus-mt-en-de": size(58101),
        "opus-mt-de-en": size(58101),
        "opus-mt-en-fr": size(59514),
        "opus-mt-fr-en": size(59514),
    },
)
