"""GPT-NeoX and Pythia: partial rotary, parallel sublayers, q, k and v stored head by head."""

from __future__ import annotations

from typing import Any

from regard.layers import BlockConfig
from regard.models.config import EmbedConfig, HeadConfig, ModelConfig
from regard.models.family import ConfigReader, Family, Source, link_head, usual_size
from regard.models.weight_map import Link, both, interleaved, renamed, same

LAYER = {
    "input_layernorm": "self_attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "ffn.up_proj",
    "mlp.dense_4h_to_h": "ffn.down_proj",
}


def config_from(read: ConfigReader) -> ModelConfig:
    dim, n_heads = read.count("hidden_size"), read.count("num_attention_heads")
    dropout = read.number("hidden_dropout", 0.0)
    base, fraction = read.number("rotary_emb_base", 10000.0), read.number("rotary_pct", 0.25)
    for key, other, value in (
        ("rope_theta", "rotary_emb_base", base),
        ("partial_rotary_factor", "rotary_pct", fraction),
    ):
        # Some files have both settings twice; `transformers` reads only the older keys.
        inside = key in read.mapping("rope_parameters")
        if not inside and (given := read.number(key, value)) != value:
            raise read.wrong(key, given, f"{value:g} beside {other} {value:g}: which one is meant?")
    rotary = read.rotary(max(dim // n_heads, 1), base=base, fraction=fraction)
    block = BlockConfig(
        dim=dim,
        n_heads=n_heads,
        ffn_dim=read.count("intermediate_size"),
        order="parallel" if read.flag("use_parallel_residual", True) else "pre",
        norm_eps=read.number("layer_norm_eps", 1e-5),
        activation=read.activation("hidden_act", "gelu"),
        attention_bias=read.flag("attention_bias", True),
        rotary=rotary,
        dropout=dropout,
        attention_dropout=read.number("attention_dropout", 0.0),
    )
    return read.model(
        "gpt_neox",
        max_len=read.max_len((block,)),
        decoder=(block,) * read.layers("num_hidden_layers"),
        embed=EmbedConfig(dropout=dropout),
        head=HeadConfig(tied=read.flag("tie_word_embeddings", False)),
    )


def links(config: ModelConfig) -> list[Link]:
    found = [
        same("gpt_neox.embed_in.weight", "decoder_embed.tokens.weight"),
        *both("gpt_neox.final_layer_norm", "decoder.norm"),
        *link_head(config, "embed_out"),
    ]
    for n, block in enumerate(config.decoder):
        theirs, ours = f"gpt_neox.layers.{n}", f"decoder.layers.{n}"
        found += renamed(theirs, ours, LAYER)
        out = {"attention.dense": "self_attn.out_proj"}
        found += renamed(theirs, ours, out, bool(block.attention_bias))
        found += link_qkv(f"{theirs}.attention", ours, block.n_heads, bool(block.attention_bias))
    return found


def link_qkv(theirs: str, ours: str, n_heads: int, has_bias: bool) -> list[Link]:
    def link(part: str) -> Link:
        projections = [f"{ours}.self_attn.{letter}_proj.{part}" for letter in "qkv"]
        return interleaved(f"{theirs}.query_key_value.{part}", projections, n_heads)

    return [link(part) for part in ("weight", "bias")[: 1 + has_bias]]


def size(dim: int, n_layers: int, n_heads: int, vocab_size: int = 50304, **more: Any) -> Source:
    usual = {"vocab_size": vocab_size, "max_position_embeddings": 2048, "rotary_pct": 0.25}
    usual |= {"intermediate_size": 4 * dim, "bos_token_id": 0, "eos_token_id": 0, **more}
    return usual_size("gpt_neox", "GPTNeoXForCausalLM", dim, n_layers, n_heads, **usual)


FAMILY = Family(
    name="gpt_neox",
    config_from=config_from,
    links=links,
    prefix="gpt_neox.",
    ignored=(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    copies={r"embed_out\.weight": "gpt_neox.embed_in.weight"},
    sizes={
        "pythia-14m": size(128, 6, 4),
        "pythia-31m": size(256, 6, 8),
        "pythia-70m": size(512, 6, 8),
        "pythia-160m": size(768, 12, 12),
        "pythia-410m": size(1024, 24, 16),
        "pythia-1b": size(2048, 16, 8),
        "pythia-1.4b": size(2048, 24, 16),
        "pythia-2.8b": size(2560, 32, 32),
        "pythia-6.9b": size(4096, 32, 32, 50432),
        "pythia-12b": size(5120, 36, 40, 50688),
        "gpt-neox-20b": size(6144, 44, 64, 50432, hidden_act="gelu_fast"),
    },
)
