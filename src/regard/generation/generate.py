"""Text from a model: `generate`, `generate_batch`, and `generate_ids` for token ids.

Why: one simple call for text, one for ids; the same answer alone and in a batch.

How: a text is encoded, the ids are continued, and the new ids become text again. A decoder goes on
with the prompt and gives what is new; an encoder–decoder reads the prompt as its source and gives
all that it writes.

Nothing about the model is changed, also not when a call is interrupted; it must be in eval mode.

Left out: chat. `tokenizer.apply_chat` makes a prompt of messages; give it with `special=False`.

Letters: B rows, T new tokens, R texts that a row gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from regard.generation.beams import search_beams
from regard.generation.config import GenerationConfig, make_config
from regard.generation.decode_loop import DecodeLoop
from regard.generation.prompts import Ids, Model, Task, check_model, need_tokenizer, open_model
from regard.tokens import Tokenizer


@final
@dataclass(frozen=True, eq=False)
class Generated:
    """New tokens (B · R, T), without the prompt; R is `num_return_sequences`, best first.

    A stop token that ended a row is its last. What stands behind a row's length is padding.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    """How many tokens each row got."""
    reasons: tuple[str, ...]
    """Why each row ended: "stop" (a stop token or string) or "length"."""
    scores: tuple[float, ...] | None = None
    """Of beams: the sum of log-probabilities / length ** length_penalty."""

    def rows(self) -> list[list[int]]:
        """Each row's tokens, without padding."""
        return [row[:n] for row, n in zip(self.ids.tolist(), self.lengths, strict=True)]


def run_task(task: Task) -> tuple[Generated, list[str] | None]:
    """All of it; the texts too, where they were watched for stop strings."""
    if task.config.num_beams > 1:
        return search(task), None
    loop = DecodeLoop(task)
    try:
        while not loop.over:
            loop.advance()
    finally:
        loop.close()
    ids_bt, lengths, reasons = loop.result()
    texts = [loop.take_text(row) for row in range(len(lengths))] if loop.watches else None
    return Generated(ids_bt, tuple(lengths), tuple(reasons)), texts


def write_texts(task: Task) -> list[str]:
    found, texts = run_task(task)
    if texts is not None:
        return texts
    rows = [(task.watch(place), row) for place, row in enumerate(found.rows())]
    return ["".join([*map(watch.step, row), watch.finish()]) for watch, row in rows]


def search(task: Task) -> Generated:
    found = search_beams(task)
    ids, scores, lengths, _ = (torch.cat(parts, 1)[0] for parts in zip(*found, strict=True))
    sizes = tuple(lengths.tolist())
    reasons = []
    for row, n in zip(ids.tolist(), sizes, strict=True):
        reasons.append("stop" if n and row[n - 1] in task.stop_tokens else "length")
    return Generated(ids[:, : max(sizes)], sizes, tuple(reasons), tuple(scores.tolist()))


def generate_ids(
    model: Model,
    ids: Ids | None = None,
    *,
    real: Tensor | None = None,
    source: Ids | None = None,
    source_real: Tensor | None = None,
    config: GenerationConfig | None = None,
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> Generated:
    """Continue token ids; options are the fields of `GenerationConfig`.

    ids: (B, T) with `real` False at padding on whichever side, or lists of different lengths. Each
    row comes out as it would alone. An empty row starts from the model's bos token. An
    encoder–decoder reads `source`, and `ids`, where given, begin its text in place of its start
    token. Prompt and new tokens together are at most the model's max_len, where it has one: a row
    that gets there ends with "length", and a prompt without room for a token is refused. tokenizer:
    for stop strings, where the model has none of its own.
    """
    make = partial(Task.make, model, make_config(config, options), tokenizer)
    return run_task(make(ids=ids, real=real, source=source, source_real=source_real))[0]


def generate(
    model: Model,
    prompt: str,
    *,
    tokenizer: Tokenizer | None = None,
    special: bool = True,
    config: GenerationConfig | None = None,
    **options: Any,
) -> str:
    """The text that the model writes after the prompt, without the prompt.

    An encoder–decoder reads the prompt as its source. Text ends before a stop string or token.
    Options are the fields of `GenerationConfig`, such as max_new_tokens, temperature and stop.
    model: what `regard.load` gave, or what it takes. tokenizer: instead of the model's own.
    special: whether the tokenizer adds the tokens that the model expects around a text.

        generate(model, "The capital of France is", max_new_tokens=5)
    """
    if not isinstance(prompt, str):
        raise TypeError(
            f"prompt is a {type(prompt).__name__}, expected str; generate_batch takes several "
            "texts, generate_ids token ids"
        )
    given: dict[str, Any] = {"tokenizer": tokenizer, "special": special, "config": config}
    return generate_batch(model, [prompt], **given, **options)[0]


def generate_batch(
    model: Model,
    prompts: Sequence[str],
    *,
    tokenizer: Tokenizer | None = None,
    special: bool = True,
    config: GenerationConfig | None = None,
    **options: Any,
) -> list[str]:
    """What `generate` gives for each prompt, written at the same time."""
    if isinstance(prompts, str):
        raise TypeError("prompts is one text, expected a list of texts; generate takes one")
    chosen = make_config(config, options)
    if chosen.num_return_sequences != 1:
        raise ValueError(
            "num_return_sequences: one text comes back for each prompt; generate_ids gives more"
        )
    return write_texts(text_task(model, list(prompts), tokenizer, special, chosen))


def text_task(
    model: Model,
    prompts: list[str],
    tokenizer: Tokenizer | None,
    special: bool,
    config: GenerationConfig,
) -> Task:
    model = open_model(model)
    check_model(model)
    tokenizer = need_tokenizer(model, tokenizer)
    rows = [tokenizer.encode(text, special=special).ids for text in prompts]
    if model.config.encoder:
        return Task.make(model, config, tokenizer, source=rows)
    return Task.make(model, config, tokenizer, ids=rows)
