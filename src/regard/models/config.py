"""The description of a model as one frozen value: `ModelConfig`.

Why: all families are one Transformer; they differ only in data.

How: a `BlockConfig` for each layer of the encoder and of the decoder (either may be absent), how
tokens become vectors (`EmbedConfig`), how vectors become logits over the vocabulary (`HeadConfig`),
and the special tokens. A family makes it from Hugging Face's `config.json`, which is kept in
`source`, so that a model can be saved as it was loaded.

Left out: how a model is trained, and how it generates.

Letters: C model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from regard._check import check_choice, check_count, check_number, check_probability
from regard.layers import BlockConfig, ProjectionBias, RelativeConfig
from regard.layers.multihead import check_heads

Positions = Literal["none", "learned", "sinusoidal"]
Layout = Literal["interleaved", "halves"]
HeadKind = Literal["none", "lm", "masked"]


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Ids of the special tokens; None where a model has none.

    `decoder_start` begins the text of an encoder–decoder. `forced_bos` is its first token after
    that, `forced_eos` its last if it reaches its length limit. `suppressed` are never generated.
    """

    pad: int | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()
    decoder_start: int | None = None
    forced_bos: int | None = None
    forced_eos: int | None = None
    suppressed: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """How token ids become vectors: norm(table · scale + positions + token types).

    `offset` is the number of unused rows at the start of the table of learned positions. `dim` is
    the embedding's width if it is not the model's: then a projection follows.
    """

    positions: Positions = "none"
    offset: int = 0
    layout: Layout = "interleaved"
    n_token_types: int = 0
    norm: bool = False
    norm_eps: float = 1e-5
    scale: float = 1.0
    dim: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_choice("positions", self.positions, get_args(Positions))
        check_choice("layout", self.layout, get_args(Layout))
        check_number("embed scale", self.scale)
        check_number("embed norm_eps", self.norm_eps)
        check_probability("embed dropout", self.dropout)
        if self.dim is not None:
            check_count("embed dim", self.dim)
        if self.n_token_types:
            check_count("n_token_types", self.n_token_types)


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """How the last hidden states become logits over the vocabulary.

    "lm" is one projection; "masked" has a dense layer, an activation and a norm before it (BERT);
    "none" gives no logits. `tied`: the projection is the embedding's table. Logits are multiplied
    by `scale`, then capped as c · tanh(x / c). `pooler`: tanh of a projection of the first token.
    """

    kind: HeadKind = "lm"
    tied: bool = True
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    activation: str = "gelu"
    norm_eps: float = 1e-12
    pooler: bool = False

    def __post_init__(self) -> None:
        check_choice("head", self.kind, get_args(HeadKind))
        check_number("head scale", self.scale)
        check_number("head norm_eps", self.norm_eps)
        if self.softcap is not None:
            check_number("head softcap", self.softcap, above=0)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One Transformer: an encoder, a decoder, or both.

    `max_len` None: texts of any length. Models whose rotary scaling grows with the text
    (`DynamicNTK`) have None; the length they were trained on is its `original_max_len`.
    """

    family: str
    vocab_size: int
    max_len: int | None
    encoder: tuple[BlockConfig, ...] = ()
    decoder: tuple[BlockConfig, ...] = ()
    embed: EmbedConfig = EmbedConfig()
    head: HeadConfig = HeadConfig()
    relative: RelativeConfig | None = None
    tokens: SpecialTokens = SpecialTokens()
    source: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_count("vocab_size", self.vocab_size)
        if self.max_len is not None:
            check_count("max_len", self.max_len)
        if not self.encoder and not self.decoder:
            raise ValueError("a model needs an encoder, a decoder, or both; both are empty")
        if self.embed.positions == "learned" and self.max_len is None:
            raise ValueError("learned positions need a max_len: how many there are")
        crossed = bool(self.decoder) and self.decoder[0].cross_attention
        if crossed != bool(self.encoder and self.decoder):
            what = "a decoder has cross_attention just when there is an encoder to look at"
            came = f"{len(self.encoder)} encoder layers, cross_attention={crossed}"
            raise ValueError(f"{what}: {came}")
        if self.encoder and self.decoder and self.encoder[0].dim != self.decoder[0].dim:
            dims = f"dim={self.encoder[0].dim} and dim={self.decoder[0].dim}"
            raise ValueError(f"encoder and decoder share their embedding, but have {dims}")

    @property
    def main(self) -> BlockConfig:
        """The first layer of the decoder, or of the encoder if there is no decoder."""
        return (self.decoder or self.encoder)[0]

    @property
    def dim(self) -> int:
        return self.main.dim

    @property
    def n_layers(self) -> int:
        return len(self.decoder or self.encoder)

    @property
    def embed_dim(self) -> int:
        return self.dim if self.embed.dim is None else self.embed.dim


def check_config(config: object) -> None:
    """Refuse a name, or anything else that is not a `ModelConfig`."""
    if not isinstance(config, ModelConfig):
        raise TypeError(
            f"config is a {type(config).__name__}; expected a ModelConfig, such as "
            'models.named_config("gpt2") gives; regard.load(...) gives a model with its weights'
        )


def count_parameters(config: ModelConfig) -> int:
    """How many parameters a model of this config has, without making it; tied ones count once.

    Args:
        config: `model.config`, or one from `models.named_config` or `models.config_of`.

    Example:
        >>> regard.count_parameters(regard.models.named_config("gpt2"))
        124439808
    """
    check_config(config)
    dim, embed, head = config.dim, config.embed, config.head
    total = config.vocab_size * config.embed_dim
    for blocks in (config.encoder, config.decoder):
        if not blocks:
            continue
        total += sum(map(count_block, blocks))
        total += 0 if blocks[0].order == "post" else count_norm(blocks[0])
        if embed.positions == "learned":
            assert config.max_len is not None
            total += (config.max_len + embed.offset) * dim
        total += embed.n_token_types * dim + (2 * dim if embed.norm else 0)
        total += 0 if embed.dim is None else embed.dim * dim
        if config.relative is not None:
            total += config.relative.n_buckets * blocks[0].n_heads
    if head.pooler:
        total += dim * dim + dim
    if head.kind == "none":
        return total
    total += (not head.tied) * config.vocab_size * config.embed_dim + head.bias * config.vocab_size
    total += 0 if embed.dim is None else embed.dim * dim
    return total + (dim * dim + 3 * dim if head.kind == "masked" else 0)


def count_block(block: BlockConfig) -> int:
    n_kv_heads, head_dim = check_heads(block.dim, block.n_heads, block.n_kv_heads, block.head_dim)
    q_width, kv_width = block.n_heads * head_dim, n_kv_heads * head_dim
    bias = block.attention_bias
    if isinstance(bias, bool):
        bias = ProjectionBias(q=bias, k=bias, v=bias, out=bias)

    def count_attention(kv_dim: int) -> int:
        weights = 2 * block.dim * q_width + 2 * kv_dim * kv_width
        biases = q_width * bias.q + kv_width * (bias.k + bias.v) + block.dim * bias.out
        norms = {None: 0, "layer": 4 * head_dim}.get(block.qk_norm, 2 * head_dim)
        return weights + biases + norms + (block.n_heads if block.sinks else 0)

    n_up = 2 if block.gated else 1
    total = count_attention(block.dim) + (n_up + 1) * block.dim * block.ffn_dim
    total += (n_up * block.ffn_dim + block.dim) if block.ffn_bias else 0
    n_norms = {"sandwich": 4, "parallel": 1 if block.shared_norm else 2}.get(block.order, 2)
    if block.cross_attention:
        total += count_attention(block.memory_dim or block.dim)
        n_norms += 1
    return total + n_norms * count_norm(block)


def count_norm(block: BlockConfig) -> int:
    has_bias = block.norm == "layer" and block.norm_bias is not False
    return 2 * block.dim if has_bias else block.dim
