"""What a batch starts from: prompts in rows of one length, and the memory of a source.

Why: callers have lists of different lengths, or tensors padded on either side; a model that writes
wants every row to end at the same place, and every row must come out as if it were alone.

How: rows are taken apart into their real tokens, checked, and padded on the left. Each row has its
own `limit`: how many tokens it may still get before the model's length ends.

Letters: B rows, T tokens of the longest prompt, S of the longest source.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._check import check_shapes
from regard.models import Memory, ModelConfig, SpecialTokens, Transformer

Ids = Tensor | Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts (B, T), padded on the left; `real_bt` is None where nothing is padded."""

    ids_bt: Tensor
    real_bt: Tensor | None
    rows: list[list[int]]
    """The tokens of each prompt."""
    limits: list[int]
    """How many tokens each row may get."""
    memory: Memory | None
    """What the encoder made of the source."""
    n_read: int
    """How many tokens there are to read: of the prompts, or of the sources where there are any."""
    read_seconds: float
    """How long the sources took to read."""


def make_prompts(
    model: Transformer,
    tokens: SpecialTokens,
    max_new: int,
    ids: Ids | None,
    real: Tensor | None,
    source: Ids | None,
    source_real: Tensor | None,
) -> Prompts:
    """Everything that is told about the prompts, checked; the source is read here."""
    config = model.config
    check_model(model)
    assert model.head is not None
    device = model.head.weight.device
    memory, n_read, start = None, 0, time.perf_counter()
    rows = None if ids is None else as_rows("ids", ids, real, config)
    if config.encoder:
        if source is None:
            raise ValueError("an encoder–decoder writes about a source: give source= token ids")
        sources = as_rows("source", source, source_real, config)
        if rows is None:
            rows = [[] for _ in sources]
        if len(rows) != len(sources):
            raise ValueError(f"there are {len(rows)} rows of ids and {len(sources)} of source")
        memory = read_source(model, sources, device)
        n_read = sum(map(len, sources))
    elif source is not None or source_real is not None:
        raise ValueError("source= is for encoder–decoder models; this one continues ids")
    spent = time.perf_counter() - start
    if rows is None:
        raise ValueError("give the ids of the prompts, a (B, T) tensor or a list of lists")
    rows = [row or [first_token(config, tokens)] for row in rows]
    limits = [find_limit(config.max_len, len(row), max_new) for row in rows]
    ids_bt, real_bt = pad_rows(rows, "left", tokens.pad or 0, device)
    n_read = n_read or sum(map(len, rows))
    return Prompts(ids_bt, real_bt, rows, limits, memory, n_read, spent)


def check_model(model: Transformer) -> None:
    """Refuse a model that cannot write, or would write with dropout."""
    if not isinstance(model, Transformer):
        raise TypeError(f"model is a {type(model).__name__}; expected a regard Transformer")
    if model.decoder is None or model.head is None:
        lack = "no decoder" if model.decoder is None else "no head, so no scores for tokens"
        raise ValueError(f"this {model.config.family} model has {lack}: it cannot write text")
    if model.training:
        raise ValueError(
            "the model is in training mode, where dropout would change the text: call "
            "model.eval() first, and model.train() to go on training"
        )


def as_rows(name: str, ids: Ids, real: Tensor | None, config: ModelConfig) -> list[list[int]]:
    """The real tokens of each row, as plain lists, every one a token of the vocabulary."""
    if isinstance(ids, Tensor):
        check_shapes({name: (ids, "B T")})
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{name} are {ids.dtype}; expected int64 token ids")
        rows = ids.tolist()
        if real is not None:
            check_shapes({name: (ids, "B T"), f"real of {name}": (real, "B T")})
            if real.dtype != torch.bool:
                raise TypeError(f"real is {real.dtype}; expected bool, True at a real token")
            rows = [
                [at for at, there in zip(row, kept, strict=True) if there]
                for row, kept in zip(rows, real.tolist(), strict=True)
            ]
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
    """What a text without a prompt starts from."""
    if config.encoder and tokens.decoder_start is not None:
        return tokens.decoder_start
    if tokens.bos is None:
        what = "decoder_start or bos" if config.encoder else "bos"
        raise ValueError(
            f"a prompt is empty, and this model has no {what} token to start from; give at least "
            "one token"
        )
    return tokens.bos


def find_limit(max_len: int | None, n_prompt: int, max_new: int) -> int:
    """How many tokens a row may get: prompt and answer together are as long as the model reads."""
    if max_len is None:
        return max_new
    if n_prompt >= max_len:
        raise ValueError(
            f"a prompt has {n_prompt} tokens, and this model reads {max_len} in all, so there is "
            "no room for an answer; shorten the prompt"
        )
    return min(max_new, max_len - n_prompt)


def read_source(model: Transformer, rows: list[list[int]], device: torch.device) -> Memory:
    """The memory of the sources."""
    most = model.config.max_len
    for place, row in enumerate(rows):
        if not row:
            raise ValueError(f"source row {place} is empty; there is nothing to write about")
        if most is not None and len(row) > most:
            raise ValueError(
                f"source row {place} has {len(row)} tokens, and this model reads {most}; split "
                "the text into parts"
            )
    ids_bs, real_bs = pad_rows(rows, "right", model.config.tokens.pad or 0, device)
    with torch.inference_mode():
        return model.encode(ids_bs, real_bs)


def pad_rows(
    rows: list[list[int]], side: str, pad: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Rows (B, T) of one length, and which tokens are real; None if all are."""
    width = max(map(len, rows))
    gaps = [width - len(row) for row in rows]
    if side == "left":
        ids = [[pad] * gap + row for gap, row in zip(gaps, rows, strict=True)]
        real = [[False] * gap + [True] * (width - gap) for gap in gaps]
    else:
        ids = [row + [pad] * gap for gap, row in zip(gaps, rows, strict=True)]
        real = [[True] * (width - gap) + [False] * gap for gap in gaps]
    ids_bt = torch.tensor(ids, device=device)
    return ids_bt, torch.tensor(real, device=device) if any(gaps) else None
