"""The one Transformer: embedding, blocks, head.

Why: GPT-2, BERT, LLaMA and T5 are the same program with other settings; here it is written once.

How: `encode` reads a source text, `run` returns the last hidden states of a text, `head` turns
hidden states into logits, and calling the model does all of it. Padding is given as `real` (True
where a token is real) and becomes positions: the running count of a row's real tokens, and -1 for
padding, to which no query attends. So a row's output does not depend on where its padding is. Mask
and positions are computed here and only read below.

Left out: generation, which is a loop around `run` and `head`, and losses.

Letters: B batch, T tokens, S tokens of the source, C model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard._check import check_shapes, readable
from regard.layers import Decoder, DecoderCache, Encoder
from regard.layers.dropout import Dropout
from regard.layers.feedforward import make_activation
from regard.layers.matvec import linear
from regard.layers.norm import make_norm
from regard.models.config import ModelConfig, check_config
from regard.ops import Dense, Mask
from regard.positions import Learned, Sinusoidal
from regard.tokens import Tokenizer


@dataclass(frozen=True, eq=False)
class Memory:
    """An encoder's output for a source: vectors (B, S, C), and which of them are real (B, S).

    `hidden`: the hidden states before and after each layer, if they were asked for.
    """

    states: Tensor
    real: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None

    def reorder(self, index: Tensor) -> Memory:
        """A memory whose row b is this one's row index[b], with as many rows as index has."""
        real = None if self.real is None else self.real.index_select(0, index)
        return Memory(self.states.index_select(0, index), real)


@dataclass(frozen=True, eq=False)
class Output:
    """The result of a call: `logits` (B, T, V), `last` hidden states (B, T, C), and more.

    `logits` is None without a head, `pooled` (B, C) without a pooler, `memory` if the model is no
    encoder–decoder. `hidden` is n_layers + 1 tensors if it was asked for.
    """

    logits: Tensor | None
    last: Tensor
    memory: Memory | None = None
    pooled: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None


class Embedding(nn.Module):
    """Token ids (B, T) to vectors (B, T, C); `factory` is device and dtype, named as in torch."""

    def __init__(self, config: ModelConfig, tokens: nn.Embedding, **factory: Any) -> None:
        super().__init__()
        embed, dim = config.embed, config.dim
        self.scale = embed.scale
        self.tokens = tokens
        narrow = embed.dim is not None
        self.project = nn.Linear(config.embed_dim, dim, bias=False, **factory) if narrow else None
        self.positions: Learned | Sinusoidal | None = None
        if embed.positions == "sinusoidal":
            self.positions = Sinusoidal(dim, config.max_len, layout=embed.layout)
        elif embed.positions == "learned":
            assert config.max_len is not None
            self.positions = Learned(config.max_len, dim, embed.offset, **factory)
        n_types, eps = embed.n_token_types, embed.norm_eps
        self.token_types = nn.Embedding(n_types, dim, **factory) if n_types else None
        self.norm = make_norm("layer", dim, eps=eps, **factory) if embed.norm else None
        self.dropout = Dropout(embed.dropout)

    def forward(
        self, ids_bt: Tensor, positions: Tensor, token_types: Tensor | None = None
    ) -> Tensor:
        x_btc: Tensor = self.tokens(ids_bt)
        if self.scale != 1.0:
            x_btc = x_btc * torch.full((), self.scale, dtype=x_btc.dtype, device=x_btc.device)
        if self.project is not None:
            x_btc = self.project(x_btc)
        if self.token_types is not None:
            types_bt = torch.zeros_like(ids_bt) if token_types is None else token_types
            x_btc = x_btc + self.token_types(types_bt)
        elif token_types is not None:
            raise ValueError("token_types were given to a model that has none; leave them out")
        if self.positions is not None:
            # Padding has no position; it gets the vector of position 0, but is masked anyway.
            x_btc = self.positions.add(x_btc, positions.clamp(min=0))
        if self.norm is not None:
            x_btc = self.norm(x_btc)
        out_btc: Tensor = self.dropout(x_btc)
        return out_btc


class Head(nn.Module):
    """Vectors (..., C) to logits over the vocabulary (..., V)."""

    def __init__(self, config: ModelConfig, tokens: nn.Embedding, **factory: Any) -> None:
        super().__init__()
        head, dim, embed_dim = config.head, config.dim, config.embed_dim
        self.scale, self.softcap = head.scale, head.softcap
        self.dense: nn.Linear | None = None
        self.norm: nn.Module | None = None
        if head.kind == "masked":
            self.dense = nn.Linear(dim, dim, **factory)
            self.activation = make_activation(head.activation)  # type: ignore[arg-type]
            self.norm = make_norm("layer", dim, eps=head.norm_eps, **factory)
        narrow = config.embed.dim is not None
        self.project = nn.Linear(dim, embed_dim, bias=False, **factory) if narrow else None
        self.weight = tokens.weight
        if not head.tied:
            self.weight = nn.Parameter(torch.empty(config.vocab_size, embed_dim, **factory))
            nn.init.normal_(self.weight, std=0.02)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size, **factory)) if head.bias else None

    def ready(self, x_btc: Tensor) -> Tensor:
        """Everything before the final product with the vocabulary's matrix."""
        if self.dense is not None and self.norm is not None:
            x_btc = self.norm(self.activation(self.dense(x_btc)))
        if self.project is not None:
            x_btc = self.project(x_btc)
        return x_btc if self.scale == 1.0 else x_btc * self.scale

    def forward(self, x_btc: Tensor) -> Tensor:
        logits_btv = linear(self.ready(x_btc), self.weight, self.bias)
        if self.softcap is not None:
            logits_btv = self.softcap * torch.tanh(logits_btv / self.softcap)
        return logits_btv


class Transformer(nn.Module):
    """A Transformer of any family: an encoder, a decoder, or both, as its config says.

    `regard.load` makes one with trained weights; `Transformer(config)` has random ones.

    Args:
        config: From `models.named_config`, or from `models.config_of` and a config.json.
        device, dtype: Of the parameters.

    Example:
        >>> config = regard.models.named_config("gpt2")
        >>> with torch.device("meta"):  # shapes without memory
        ...     model = regard.Transformer(config)
    """

    origin: Path | None
    """The folder or file the weights came from."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_config(config)
        self.config = config
        self.origin = None
        factory: Any = {"device": device, "dtype": dtype}
        tokens = nn.Embedding(config.vocab_size, config.embed_dim, **factory)
        nn.init.normal_(tokens.weight, std=0.02)
        self.encoder_embed: Embedding | None = None
        self.encoder: Encoder | None = None
        if config.encoder:
            self.encoder_embed = Embedding(config, tokens, **factory)
            self.encoder = Encoder(config.encoder, relative=config.relative, **factory)
        self.decoder_embed: Embedding | None = None
        self.decoder: Decoder | None = None
        if config.decoder:
            self.decoder_embed = Embedding(config, tokens, **factory)
            self.decoder = Decoder(config.decoder, relative=config.relative, **factory)
        dim, head = config.dim, config.head
        self.pooler = nn.Linear(dim, dim, **factory) if head.pooler else None
        self.head = Head(config, tokens, **factory) if head.kind != "none" else None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer in the weights' folder or GGUF file, or None."""
        if self.origin is None:
            return None
        if self.origin.suffix == ".gguf" and self.origin.is_file():
            from regard.models.gguf import GGUFFile

            return GGUFFile.open(self.origin).tokenizer
        try:
            return Tokenizer.load(self.origin)
        except FileNotFoundError:
            return None

    def forward(
        self,
        ids_bt: Tensor,
        *,
        real: Tensor | None = None,
        positions: Tensor | None = None,
        token_types: Tensor | None = None,
        source: Tensor | None = None,
        source_real: Tensor | None = None,
        memory: Memory | None = None,
        mask: Mask | Tensor | None = None,
        cache: DecoderCache | None = None,
        keep_hidden: bool = False,
    ) -> Output:
        """Logits, last hidden states and more for a batch of texts.

        Args:
            ids_bt: Token ids, (B, T); for an encoder–decoder those of the text being written.
            real: (B, T) bool, False at padding, on either side (transformers' attention_mask).
            positions: (T,) or (B, T), instead of counting the real tokens; negative is padding.
            token_types: (B, T), the segment of each token, for BERT-like models.
            source: (B, S), the token ids that an encoder–decoder reads. source_real: (B, S), as
                `real`. memory: what `encode` returned for them, in place of both.
            mask: Which tokens may look at which, beside the model's own mask.
            cache: From `make_cache`: the keys and values of the tokens before these.
            keep_hidden: Keep the hidden states before and after each layer.

        Returns:
            `Output`: logits (B, T, V), last (B, T, C), memory, pooled (B, C) and hidden.
        """
        if memory is None and self.encoder is not None and self.decoder is not None:
            if source is None:
                raise ValueError("an encoder–decoder needs source= ids, or memory= from encode()")
            memory = self.encode(source, source_real, keep_hidden=keep_hidden)
        states: list[Tensor] | None = [] if keep_hidden else None
        last_btc = self.run(
            ids_bt,
            real=real,
            positions=positions,
            token_types=token_types,
            memory=memory,
            mask=mask,
            cache=cache,
            states=states,
        )
        pooled = None if self.pooler is None else torch.tanh(self.pooler(last_btc[:, 0]))
        logits = None if self.head is None else self.head(last_btc)
        hidden = None if states is None else tuple(states)
        return Output(logits, last_btc, memory, pooled, hidden)

    def encode(
        self, source_bs: Tensor, real: Tensor | None = None, *, keep_hidden: bool = False
    ) -> Memory:
        """Run the encoder of an encoder–decoder; returns the memory for its decoder."""
        if self.encoder is None or self.encoder_embed is None or self.decoder is None:
            raise ValueError("encode is for encoder–decoder models; call this one, or run()")
        check_ids(source_bs, self.config.vocab_size)
        positions = find_positions(source_bs, real, None, None)
        states: list[Tensor] | None = [] if keep_hidden else None
        x_bsc = self.encoder_embed(source_bs, self._stand(source_bs, positions, None))
        x_bsc = self.encoder(x_bsc, positions=positions, states=states)
        return Memory(x_bsc, real, None if states is None else tuple(states))

    def run(
        self,
        ids_bt: Tensor,
        *,
        real: Tensor | None = None,
        positions: Tensor | None = None,
        token_types: Tensor | None = None,
        memory: Memory | None = None,
        mask: Mask | Tensor | None = None,
        cache: DecoderCache | None = None,
        states: list[Tensor] | None = None,
    ) -> Tensor:
        """The last hidden states (B, T, C); arguments as in `forward`, `states`: a list to fill."""
        check_ids(ids_bt, self.config.vocab_size)
        positions = find_positions(ids_bt, real, positions, cache)
        if self.decoder is None:
            assert self.encoder is not None and self.encoder_embed is not None
            if cache is not None or memory is not None:
                raise ValueError("an encoder reads a whole text at once: no cache, no memory")
            x_btc = self.encoder_embed(ids_bt, self._stand(ids_bt, positions, None), token_types)
            encoded: Tensor = self.encoder(x_btc, mask=mask, positions=positions, states=states)
            return encoded
        assert self.decoder_embed is not None
        x_btc = self.decoder_embed(ids_bt, self._stand(ids_bt, positions, cache), token_types)
        seen = memory_mask = None
        if memory is not None:
            seen = memory.states
            memory_mask = None if memory.real is None else Dense(memory.real[:, None, None, :])
        decoded: Tensor = self.decoder(
            x_btc,
            seen,
            mask=mask,
            positions=positions,
            memory_mask=memory_mask,
            cache=cache,
            states=states,
        )
        return decoded

    def make_cache(self, size: int | None = None) -> DecoderCache:
        """An empty KV cache: growing, or static with `size` slots per row, including padding.

        A layer with a window keeps no more than its window.
        """
        if self.decoder is None:
            raise ValueError("an encoder keeps nothing between calls; only decoders have a cache")
        return self.decoder.make_cache(size=size)

    def _stand(
        self, ids_bt: Tensor, positions: Tensor | None, cache: DecoderCache | None
    ) -> Tensor:
        if positions is not None:
            return positions
        if cache is None:
            return torch.arange(ids_bt.shape[1], device=ids_bt.device)
        return cache.next_positions(ids_bt.shape[1], ids_bt.device)


def find_positions(
    ids_bt: Tensor, real: Tensor | None, positions: Tensor | None, cache: DecoderCache | None
) -> Tensor | None:
    """Positions as given, or counted from `real`; None: consecutive, continuing the cache."""
    if real is None or positions is not None:
        if real is not None:
            raise ValueError("give real= or positions=, not both: negative positions are padding")
        return positions
    check_shapes({"ids": (ids_bt, "B T"), "real": (real, "B T")})
    if real.dtype != torch.bool:
        raise TypeError(f"real is {real.dtype}; expected bool, True where a token is real")
    if real.device.type == "cpu" and readable(real) and bool(real.all()):
        return None
    count_bt = real.cumsum(-1) - 1
    if cache is not None and cache.length is not None:
        count_bt = count_bt + cache.length.to(count_bt.device)[:, None]
    return torch.where(real, count_bt, -1)


def check_ids(ids_bt: Tensor, vocab_size: int) -> None:
    """Refuse wrong shapes and types, and, on a CPU where reading is cheap, ids out of range."""
    check_shapes({"ids": (ids_bt, "B T")})
    if ids_bt.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids are {ids_bt.dtype}; expected int64 token ids")
    if ids_bt.device.type != "cpu" or not readable(ids_bt) or not ids_bt.numel():
        return
    lowest, highest = (int(x) for x in torch.aminmax(ids_bt))
    if lowest < 0 or highest >= vocab_size:
        what = f"ids run from {lowest} to {highest}; expected 0 to {vocab_size - 1}"
        raise ValueError(f"{what}: the text was made for another vocabulary")
