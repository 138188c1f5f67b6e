"""PaLM: the three sizes of its paper; no weights were published, so names and config are our own.

Parallel sublayers after one norm, a single key head, SwiGLU, rotary, no biases anywhere, a tied
embedding, with logits divided by the square root of the width.
"""

from __future__ import annotations

from regard.layers import BlockConfig
from regard.models.config import HeadConfig, ModelConfig
from regard.models.family import ConfigReader, Family, Source
from regard.models.weight_map import Link, renamed, weight

LAYER = {"norm": "self_attn_norm"}
LAYER |= {f"attention.{name}_proj": f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")}
LAYER |= {f"ffn.{name}_proj": f"ffn.{name}_proj" for name in ("gate", "up", "down")}


def config_from(read: ConfigReader) -> ModelConfig:
    dim, head_dim = read.count("dim"), read.count("head_dim", 256)
    block = BlockConfig(
        dim=dim,
        n_heads=read.count("n_heads"),
        n_kv_heads=1,
        head_dim=head_dim,
        ffn_dim=read.count("ffn_dim", 4 * dim),
        order="parallel",
        shared_norm=True,
        norm_bias=False,
        activation="silu",
        gated=True,
        attention_bias=False,
        ffn_bias=False,
        rotary=read.rotary(head_dim),
    )
    return read.model(
        "palm",
        vocab_size=read.count("vocab_size", 256000),
        max_len=read.count("max_len", 2048),
        decoder=(block,) * read.layers("n_layers"),
        head=HeadConfig(tied=True, scale=dim**-0.5),
    )


def links(config: ModelConfig) -> list[Link]:
    found = [*weight("embed", "decoder_embed.tokens"), *weight("norm", "decoder.norm")]
    for n in range(len(config.decoder)):
        found += renamed(f"layers.{n}", f"decoder.layers.{n}", LAYER, has_bias=False)
    return found


def size(dim: int, n_layers: int, n_heads: int) -> Source:
    return {"model_type": "palm", "dim": dim, "n_layers": n_layers, "n_heads": n_heads}


FAMILY = Family(
    name="palm",
    config_from=config_from,
    links=links,
    sizes={
        "palm-8b": size(4096, 32, 16),
        "palm-62b": size(8192, 64, 32),
        "palm-540b": size(18432, 118, 48),
    },
)
