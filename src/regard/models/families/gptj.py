"""GPT-J: rotary with neighbours as pairs, one norm for both sublayers, a head with a bias."""

from __future__ import annotations

from regard.layers import BlockConfig
from regard.models.config import EmbedConfig, HeadConfig, ModelConfig
from regard.models.families import gpt2
from regard.models.family import ConfigReader, Family, link_head
from regard.models.weight_map import Link, both, renamed, same, weight
from regard.positions import RotaryConfig

LAYER = {"ln_1": "self_attn_norm", "mlp.fc_in": "ffn.up_proj", "mlp.fc_out": "ffn.down_proj"}


def config_from(read: ConfigReader) -> ModelConfig:
    dim, n_heads = read.count("n_embd"), read.count("n_head")
    width, rotary_dim = max(dim // n_heads, 1), read.count("rotary_dim")
    rotary = RotaryConfig(head_dim=width, rotary_dim=rotary_dim, pairing="neighbours")
    block = BlockConfig(
        dim=dim,
        n_heads=n_heads,
        ffn_dim=read.count("n_inner", 4 * dim),
        order="parallel",
        shared_norm=True,
        norm_eps=read.number("layer_norm_epsilon", 1e-5),
        activation=read.activation("activation_function", "gelu_new"),
        attention_bias=False,
        rotary=rotary,
        dropout=read.number("resid_pdrop", 0.0),
        attention_dropout=read.number("attn_pdrop", 0.0),
    )
    return read.model(
        "gptj",
        max_len=read.count("n_positions", 2048),
        decoder=(block,) * read.layers("n_layer"),
        embed=EmbedConfig(dropout=read.number("embd_pdrop", 0.0)),
        head=HeadConfig(tied=read.flag("tie_word_embeddings", False), bias=True),
    )


def links(config: ModelConfig) -> list[Link]:
    found = [
        same("transformer.wte.weight", "decoder_embed.tokens.weight"),
        *both("transformer.ln_f", "decoder.norm"),
        *link_head(config),
    ]
    if config.head.kind != "none":
        found.append(same("lm_head.bias", "head.bias"))
    for n in range(len(config.decoder)):
        theirs, ours = f"transformer.h.{n}", f"decoder.layers.{n}"
        found += renamed(theirs, ours, LAYER)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found += weight(f"{theirs}.attn.{name}", f"{ours}.self_attn.{name}")
    return found


NAMED = {"model_type": "gptj", "architectures": ["GPTJForCausalLM"]}
SIZES = {"rotary_dim": 64, "n_positions": 2048, "vocab_size": 50400}
FAMILY = Family(
    name="gptj",
    config_from=config_from,
    links=links,
    prefix="transformer.",
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias|embed_positions)",),
    copies={r"lm_head\.weight": "transformer.wte.weight"},
    sizes={"gpt-j-6b": {**gpt2.size(4096, 28, 16), **NAMED, **SIZES}},
)
