"""How much each head matters to what a model predicts: `regard.effect(model, text)`.

Why: a head that attends to a word may add nothing from it. How much less likely the model finds its
next token without the head, or without that look, measures it.

How: the log-probability of one token, of a continuation or of a masked word is computed once for
the unedited model, and once for each edit: each head switched off alone, or one look forbidden in
each head alone; all heads of each layer; and all heads at once. The variants are rows of one batch,
each row with its own edit (`edit/`), as many at a time as fit. An edit of a layer changes nothing
before that layer, so variants are in the order of layers, and the layers before the first edited
one of a batch compute a single row, which is then repeated.

Left out: encoder–decoders, and pairs of edits.

Letters: L layers, H heads, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.lens.edit.edit import check_model, editing_model
from regard.lens.edit.editor import Bound, Layer
from regard.lens.edit.positions import find_spans, holds, read_text, with_numbers, words_in
from regard.lens.edit.values import Ablate, Block, Edit, Where
from regard.lens.fill import check_eval, find_gaps, find_mask, read_logits, use_own_mask
from regard.lens.head_effects import Effect
from regard.lens.token_labels import name_ids
from regard.lens.word_links import SPACELESS

BATCH_TOKENS = {"cpu": 512, "cuda": 16384}
"""Tokens per batch of variants. Few on a CPU: layers before a batch's first edit are computed once,
for a single row, and small batches have more such layers."""


class Asked(NamedTuple):
    """Token ids of a text; the log-probabilities that count are of `targets` at `positions`."""

    ids: list[int]
    positions: list[int]
    targets: list[int]


@torch.no_grad()
def effect(
    model: nn.Module,
    text: str,
    on: str | None = None,
    *,
    edges: tuple[Where, Where] | None = None,
    to: str = "zero",
    tokenizer: Any = None,
) -> Effect:
    """How much each head matters: the change of a log-probability when the head is switched off.

    Args:
        model: A language model, or a masked model, in eval mode: regard's, one of Hugging Face's
            attention interface, or one of torch.nn's modules.
        text: What the model reads. For a masked model it has one [MASK].
        on: The continuation whose log-probability is measured, all of its tokens together; for a
            masked model the word at [MASK]. Default: the model's likeliest token. Between two words
            a space is added, but not in Japanese or Chinese.
        edges: (query, key), words or positions as in `Block`: instead of switching the head off,
            forbid this one look in it.
        to: What a head is switched off to, "zero" or "mean", as in `Ablate`.
        tokenizer: The model's own by default.

    Returns:
        An `Effect`, in nats: `heads` (L, H), `layers` (L,), and `whole` with all heads at once;
        below 0 where the edit makes the continuation less likely. print() shows the largest.

    Raises:
        TypeError, ValueError: A model in training mode, an encoder–decoder, or one whose attention
            cannot be edited; no tokenizer; words that are not in the text.

    Example:
        >>> model = regard.load("embedded:lm")
        >>> found = regard.effect(model, "The animal didn't cross the street because it was too")
        >>> layer, head, change = found.top(1)[0]  # the head that changes most
    """
    check_model(model)
    for name, given in (("text", text), ("on", "" if on is None else on)):
        if not isinstance(given, str):
            raise TypeError(f"{name} is a {type(given).__name__}; expected str")
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    check_eval(model)
    stacks = [getattr(model, name, None) for name in ("encoder", "decoder")]
    if None not in stacks or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is an encoder–decoder, and effect takes language models and "
            "masked models; `regard.edit` edits encoder–decoders too"
        )
    block = None if edges is None else make_block(edges)
    given, text = text, use_own_mask(tokenizer, text)
    asked = find_asked(model, text, on, tokenizer)
    sample: Block | Ablate = Ablate(to=to)
    done, ends = "switching off a head" if to == "zero" else "setting a head to its mean", None
    if block is not None:
        words = words_in(text, read_text(tokenizer, text))
        sample = with_numbers(block, words)
        done = f"forbidding {block.queries} → {block.keys} in a head"
        ends = find_tokens(sample.queries, asked), find_tokens(sample.keys, asked)
    with editing_model(model, []) as editor:
        base = read_log_probs(model, [asked.ids], asked)
    layers = list(editor.layers.values())
    check_layers(model, layers)
    variants = [(layer, head) for layer in layers for head in (None, *range(layer.n_heads))]
    edits = [with_heads(sample, layer.number, head) for layer, head in variants]
    whole, *changes = (
        log_prob - float(base[0])
        for log_prob in read_variants(model, asked, layers, [sample, *edits])
    )
    n_heads = max(layer.n_heads for layer in layers)
    table = np.full((len(layers), 1 + n_heads), np.nan)
    for (layer, head), change in zip(variants, changes, strict=True):
        table[layer.number, 0 if head is None else 1 + head] = change
    said = "".join(name_ids(tokenizer, asked.targets)[n] for n in asked.targets)
    return Effect(table[:, 1:], table[:, 0], whole, float(base[0]), said, done, given, ends)


def make_block(edges: tuple[Where, Where]) -> Block:
    if isinstance(edges, str) or len(edges) != 2:
        raise ValueError(f'edges must be a query and a key, ("it", "animal"), got {edges!r}')
    return Block(*edges)


def find_tokens(where: Where, asked: Asked) -> tuple[int, ...]:
    """The positions in the model's input that `where` names."""
    n = len(asked.ids)
    inside = holds(find_spans(where, np.full((1, 1), n)), np.arange(n)[None])[0]
    return tuple(np.flatnonzero(inside).tolist())


def check_layers(model: nn.Module, layers: Sequence[Layer]) -> None:
    """Refuse a model whose attention layers do not form exactly one stack that can be edited."""
    n_stacks = len({layer.stack for layer in layers})
    if n_stacks != 1:
        raise ValueError(
            f"{type(model).__name__} has {n_stacks} stacks of attention layers that can be edited; "
            "expected one, on regard's attention, Hugging Face's attention interface or torch.nn's "
            "modules"
        )


def with_heads(sample: Block | Ablate, layer: int, head: int | None) -> Edit:
    if isinstance(sample, Block):
        return Block(sample.queries, sample.keys, layer, head)
    return Ablate(layer, head, sample.to)


def find_asked(model: nn.Module, text: str, on: str | None, tokenizer: Any) -> Asked:
    """Tokenize the text, and find the positions and targets whose log-probabilities count."""
    ids, mask = read_text(tokenizer, text).ids, find_mask(tokenizer)
    if mask is not None:
        return find_masked(model, text, on, tokenizer, mask)
    if not ids:
        raise ValueError("the text has no tokens; give the words that the model shall read")
    if on is None:
        logits = read_logits(model, [ids], [len(ids) - 1])[0]
        return Asked(ids, [len(ids) - 1], [int(logits.argmax())])
    ends = text[-1:] + on[:1]  # between words, but not in a script without spaces
    joint = " " if len(ends) == 2 and ends.isalnum() and not SPACELESS.search(ends) else ""
    whole = read_text(tokenizer, text + joint + on)
    counted = [n for n, (_, end) in enumerate(whole.spans) if end > len(text) and n > 0]
    if not counted:
        raise ValueError(f"on is {on!r}, which adds no token to the text; give a continuation")
    return Asked(whole.ids, [n - 1 for n in counted], [whole.ids[n] for n in counted])


def check_gap(tokenizer: Any, text: str) -> None:
    """Refuse a text without exactly one masked word, if the tokenizer has a mask token."""
    mask = find_mask(tokenizer)
    if mask is None:
        return
    _, positions = find_gaps(tokenizer, use_own_mask(tokenizer, text))
    if len(positions) != 1:
        word = name_ids(tokenizer, [mask])[mask].strip()
        raise ValueError(
            f"the text has {len(positions)} masked words; expected one: put {word} where the "
            "word is asked for, or give a language model, which is asked for the next token"
        )


def find_masked(model: nn.Module, text: str, on: str | None, tokenizer: Any, mask: int) -> Asked:
    check_gap(tokenizer, text)
    ids, (at,) = find_gaps(tokenizer, text)
    word = name_ids(tokenizer, [mask])[mask].strip()
    if on is None:
        return Asked(ids, [at], [int(read_logits(model, [ids], [at])[0].argmax())])
    filled = read_text(tokenizer, text.replace(word, on.strip())).ids
    if len(filled) != len(ids):
        raise ValueError(f"on is {on!r}, which is {len(filled) - len(ids) + 1} tokens; expected 1")
    return Asked(ids, [at], [filled[at]])


def read_variants(
    model: nn.Module, asked: Asked, layers: Sequence[Layer], edits: Sequence[Edit]
) -> Iterator[float]:
    """Yield the log-probability under each edit, in batches; edits are in the order of layers."""
    device = next(model.parameters()).device.type
    n_rows = max(BATCH_TOKENS.get(device, 512) // len(asked.ids), 1)
    for start in range(0, len(edits), n_rows):
        part = edits[start : start + n_rows]
        bound = [Bound(edit, rows=(row,)) for row, edit in enumerate(part)]
        numbers = [edit.layers if isinstance(edit.layers, int) else 0 for edit in part]
        block = find_block(model, layers[min(numbers)].name)
        rows = [asked.ids] * (len(part) if block is None else 1)
        repeating = nullcontext() if block is None else repeat_rows(block, len(part))
        with editing_model(model, bound), repeating:
            log_probs = read_log_probs(model, rows, asked)
        yield from log_probs.tolist()


def find_block(model: nn.Module, name: str) -> nn.Module | None:
    """Find the block around an attention module: its name up to the last number."""
    parts = name.split(".")
    numbered = [n for n, part in enumerate(parts) if part.isdecimal()]
    return model.get_submodule(".".join(parts[: numbered[-1] + 1])) if numbered else None


@contextmanager
def repeat_rows(block: nn.Module, n: int) -> Iterator[None]:
    """Repeat the single row of a block's input n times; its other inputs broadcast over rows."""

    def repeat(module: nn.Module, args: Any, kwargs: Any) -> Any:
        name = "hidden_states"
        x_btc = args[0] if args else kwargs[name]
        wide = x_btc.expand(n, *x_btc.shape[1:]).contiguous()
        return ((wide, *args[1:]), kwargs) if args else (args, {**kwargs, name: wide})

    with block.register_forward_pre_hook(repeat, with_kwargs=True):
        yield


def read_log_probs(model: nn.Module, rows: list[list[int]], asked: Asked) -> Tensor:
    """The sum of the targets' log-probabilities, one per row, in float32."""
    logits_bnv = read_logits(model, rows, asked.positions)
    targets = torch.tensor(asked.targets, device=logits_bnv.device)
    log_probs_bnv = logits_bnv.float().log_softmax(-1)
    return log_probs_bnv.gather(2, targets[None, :, None].expand(len(logits_bnv), -1, 1)).sum(
        (1, 2)
    )
