"""Text from a model: `generate`, `generate_batch`, and `generate_ids` for token ids.

Why: one simple call for text, one for ids; a text is the same alone and in a batch.

How: a text is encoded, the ids are continued, and the new ids are decoded. A decoder continues the
prompt, and what is new is returned; an encoder–decoder reads the prompt as its source, and all that
it writes is returned.

The model is not changed, even if a call is interrupted; it must be in eval mode.

Left out: chat. `tokenizer.apply_chat` makes a prompt of messages; give it with `special=False`.

Letters: B rows, T new tokens, R texts per row.
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

    A stop token that ended a row is its last token. What follows a row's length is padding.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    """How many tokens each row got."""
    reasons: tuple[str, ...]
    """Why each row ended: "stop" (a stop token or string) or "length"."""
    scores: tuple[float, ...] | None = None
    """For beam search: the sum of log-probabilities / length ** length_penalty."""

    def rows(self) -> list[list[int]]:
        """Each row's tokens, without padding."""
        return [row[:n] for row, n in zip(self.ids.tolist(), self.lengths, strict=True)]


def run_task(task: Task) -> tuple[Generated, list[str] | None]:
    """Run the generation; also returns the texts, if they were decoded for stop strings."""
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
    """Continue token ids, row by row of a batch; each row comes out as it would alone.

    Args:
        model: What `regard.load` returned, or what it takes.
        ids: The prompts: lists of ids of any lengths, or (B, T) with `real`. An empty row starts
            from the model's bos token. For an encoder–decoder they begin the text that is written,
            in place of its start token, and may be left out.
        real: (B, T) bool, False at padding, on either side.
        source: What an encoder–decoder reads, in the form of ids. source_real: as `real`.
        config: A `GenerationConfig`; or give its fields as options (max_new_tokens=20, ...).
        tokenizer: For stop strings, where the model has no tokenizer.

    Returns:
        `Generated`: `ids` (B · num_return_sequences, T), the new tokens without the prompt;
        `lengths` and `reasons` ("stop" or "length") of each row; `rows()` as lists.

    Raises:
        ValueError, TypeError: Options that do not go together, ids outside the vocabulary, or a
            prompt as long as the model's max_len, which leaves nothing to write. (A row that
            reaches max_len while it is written ends with "length".)

    Example:
        >>> model = regard.load("embedded:lm")
        >>> made = regard.generate_ids(model, [[3, 1, 4], [1, 5]], max_new_tokens=8)
        >>> len(made.rows())
        2
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
    """The text that a model writes after the prompt, without the prompt; greedy by default.

    Args:
        model: What `regard.load` returned, or what it takes (a folder, a GGUF file, a name).
        prompt: The text to continue; an encoder–decoder reads it as its source.
        tokenizer: Instead of the model's own.
        special: Whether the tokenizer adds the special tokens that the model expects around a text.
            False for a prompt that has them, as `tokenizer.apply_chat` makes it.
        config: A `GenerationConfig`; or give its fields as options: max_new_tokens (128 by
            default), temperature, top_p, num_beams, stop, seed, ...

    Returns:
        The new text. It ends before a stop string or a stop token, or after max_new_tokens.

    Raises:
        TypeError, ValueError: Options that do not exist or do not go together, a model without a
            tokenizer, or a prompt longer than the model takes.

    Example:
        >>> text = regard.generate("embedded:lm", "Once upon a time", max_new_tokens=5)
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
    """What `generate` returns for each of several prompts, computed as one batch.

    Args:
        prompts: A list of texts, of any lengths.
        model, tokenizer, special, config: As in `generate`, and so the options.

    Returns:
        A list of texts, in the order of the prompts.

    Example:
        >>> texts = regard.generate_batch("embedded:lm", ["Once", "The cat"], max_new_tokens=5)
    """
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
