"""The input of a generation: `Task`, with prompts padded on the left, and the encoded source.

Why: callers have lists of different lengths, or tensors padded on either side; a decode step needs
every row to end in the same column.

How: padding is removed, the real tokens are checked, and the rows are padded on the left. Each row
has its own `limit`: how many tokens it may get before it reaches the model's max_len.

Letters: B rows, T tokens of the longest prompt, S of the longest source.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard._check import check_shapes
from regard.generation.config import GenerationConfig
from regard.generation.sampling import LogitsProcessor
from regard.generation.stopping import TextWatch, find_stop_tokens, find_tokens
from regard.models import Memory, ModelConfig, SpecialTokens, Transformer, load
from regard.tokens import Tokenizer

Ids = Tensor | Sequence[Sequence[int]]
Model = Transformer | str | os.PathLike[str]
"""A model, or an argument of `regard.load`: a folder, a GGUF file, a name."""


@dataclass(frozen=True, eq=False)
class Task:
    """All that is known before the first new token.

    `ids_bt` are the prompts, padded on the left, and `real_bt` is False at padding, None if there
    is none. `rows` are the tokens of each prompt, `limits` how many new ones each row may get.
    `memory` is the encoder's output for the sources. `n_read` counts the tokens to read: of the
    prompts, or of the sources if there are any; encoding these took `read_seconds`.
    """

    model: Transformer
    config: GenerationConfig
    tokenizer: Tokenizer | None
    processor: LogitsProcessor
    stop_tokens: tuple[int, ...]
    ids_bt: Tensor
    real_bt: Tensor | None
    rows: list[list[int]]
    limits: list[int]
    memory: Memory | None
    n_read: int
    read_seconds: float

    @staticmethod
    def make(
        model: Model,
        config: GenerationConfig,
        tokenizer: Tokenizer | None,
        *,
        ids: Ids | None = None,
        real: Tensor | None = None,
        source: Ids | None = None,
        source_real: Tensor | None = None,
    ) -> Task:
        """Check the arguments, pad the prompts, and encode the sources."""
        model = open_model(model)
        check_model(model)
        assert model.head is not None
        if tokenizer is None and config.stop:
            tokenizer = need_tokenizer(model, None)
        device, tokens = model.head.weight.device, find_tokens(model)
        stops = find_stop_tokens(config, tokens, tokenizer)
        start = time.perf_counter()
        rows = None if ids is None else as_rows("ids", ids, real, model.config)
        memory, n_read = None, 0
        if model.config.encoder:
            if source is None:
                raise ValueError("an encoder–decoder reads a source: give its token ids as source=")
            sources = as_rows("source", source, source_real, model.config)
            rows = [[] for _ in sources] if rows is None else rows
            if len(rows) != len(sources):
                raise ValueError(
                    f"ids has {len(rows)} rows and source {len(sources)}; give as many of each"
                )
            memory, n_read = read_source(model, sources, tokens.pad or 0), sum(map(len, sources))
        elif source is not None or source_real is not None:
            raise ValueError("source= is for encoder–decoder models; this one continues ids")
        spent = time.perf_counter() - start
        if rows is None:
            raise ValueError("give the ids of the prompts, a (B, T) tensor or a list of lists")
        rows = [row or [first_token(model.config, tokens)] for row in rows]
        limits = [find_limit(model.config, len(row), config.max_new_tokens) for row in rows]
        ids_bt, real_bt = pad_rows(rows, "left", tokens.pad or 0, device)
        processor = LogitsProcessor(config, tokens, stops, model.config.vocab_size, device)
        read = n_read or sum(map(len, rows)), spent
        return Task(
            model, config, tokenizer, processor, stops, ids_bt, real_bt, rows, limits, memory, *read
        )

    @functools.cached_property
    def pad(self) -> int:
        """The token after the end of a row: padding, else the first known stop token, else 0."""
        pad, known = self.processor.tokens.pad, range(self.processor.vocab_size)
        return pad if pad is not None else next((x for x in self.stop_tokens if x in known), 0)

    def watch(self, row: int) -> TextWatch:
        """A `TextWatch` that decodes the new tokens of a row."""
        assert self.tokenizer is not None
        return TextWatch(self.tokenizer, self.rows[row], self.config.stop, self.stop_tokens)

    def mark_seen(self) -> Tensor | None:
        """Which tokens each prompt contains, (B, V), padding aside; None if it is not needed."""
        if not self.processor.counts_seen:
            return None
        marked = torch.zeros(len(self.rows), self.processor.vocab_size, dtype=torch.bool)
        for place, row in enumerate(self.rows):
            marked[place, row] = True
        return marked.to(self.ids_bt.device)


def open_model(model: Model) -> Transformer:
    """The model itself; a path or name is loaded."""
    return load(model) if isinstance(model, str | os.PathLike) else model


def check_model(model: Transformer) -> None:
    """Refuse a model that cannot generate, or would do so with dropout."""
    if not isinstance(model, Transformer):
        raise TypeError(f"model is a {type(model).__name__}; expected a regard Transformer")
    if model.decoder is None or model.head is None:
        lack = "no decoder" if model.decoder is None else "no head, so no logits"
        raise ValueError(f"this {model.config.family} model has {lack}: it cannot write text")
    if model.training:
        raise ValueError(
            "the model is in training mode, where dropout would change the text: call "
            "model.eval() first, and model.train() to go on training"
        )


def need_tokenizer(model: Transformer, tokenizer: Tokenizer | None) -> Tokenizer:
    found = model.tokenizer if tokenizer is None else tokenizer
    if found is None:
        raise ValueError(
            "no tokenizer lies beside this model: give tokenizer=, or token ids to generate_ids "
            "(without stop strings)"
        )
    return found


def as_rows(name: str, ids: Ids, real: Tensor | None, config: ModelConfig) -> list[list[int]]:
    """The real tokens of each row, as lists, checked to be in the vocabulary."""
    if isinstance(ids, Tensor):
        check_shapes({name: (ids, "B T")})
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{name} are {ids.dtype}; expected int64 token ids")
        rows = ids.tolist()
        if real is not None:
            check_shapes({name: (ids, "B T"), f"real of {name}": (real, "B T")})
            if real.dtype != torch.bool:
                raise TypeError(f"real is {real.dtype}; expected bool, True at a real token")
            rows = [row[real_t].tolist() for row, real_t in zip(ids.cpu(), real.cpu(), strict=True)]
    else:
        if real is not None:
            raise ValueError(f"real is for a padded tensor; as lists, give {name} without padding")
        if isinstance(ids, str) or any(isinstance(row, int | str) for row in ids):
            raise TypeError(
                f"{name} must be a (B, T) tensor or a list of lists of ids: one row is [[3, 1, 4]]"
            )
        rows = [list(row) for row in ids]
    if not rows:
        raise ValueError(f"{name} has no rows; give at least one")
    for place, row in enumerate(rows):
        for at in row:
            if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < config.vocab_size:
                raise ValueError(
                    f"{name} has {at!r} in row {place}; expected token ids, 0 to "
                    f"{config.vocab_size - 1}: the text was made for another vocabulary"
                )
    return rows


def first_token(config: ModelConfig, tokens: SpecialTokens) -> int:
    """The token from which a text without a prompt starts."""
    if config.encoder and tokens.decoder_start is not None:
        return tokens.decoder_start
    if tokens.bos is None:
        what = "decoder_start or bos" if config.encoder else "bos"
        raise ValueError(
            f"a prompt is empty, and this model has no {what} token to start from; give at least "
            "one token"
        )
    return tokens.bos


def find_limit(config: ModelConfig, n_prompt: int, max_new: int) -> int:
    """How many new tokens a row may get: prompt and answer together fit into max_len."""
    if config.max_len is None:
        return max_new
    if n_prompt >= config.max_len:
        raise ValueError(
            f"a prompt has {n_prompt} tokens, and this model reads {config.max_len} in all, so "
            "there is no room for an answer; shorten the prompt"
        )
    return min(max_new, config.max_len - n_prompt)


def read_source(model: Transformer, rows: list[list[int]], pad: int) -> Memory:
    assert model.head is not None
    most = model.config.max_len
    for place, row in enumerate(rows):
        if not row:
            raise ValueError(f"source row {place} is empty; there is nothing to write about")
        if most is not None and len(row) > most:
            raise ValueError(
                f"source row {place} has {len(row)} tokens, and this model reads {most}; split "
                "the text into parts"
            )
    ids_bs, real_bs = pad_rows(rows, "right", pad, model.head.weight.device)
    with torch.inference_mode():
        return model.encode(ids_bs, real_bs)


def pad_rows(
    rows: list[list[int]], side: str, pad: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Pad rows to one length, (B, T), and return which tokens are real; None if all are."""
    ids_bt = pad_sequence([torch.tensor(row) for row in rows], True, pad, side)
    real = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    real_bt = pad_sequence(real, True, padding_side=side)
    return ids_bt.to(device), None if bool(real_bt.all()) else real_bt.to(device)
