"""Text from a model: `generate`, `generate_batch`, and `generate_ids` for token ids.

Why: one simple call for text, one for ids; the same answer alone and in a batch.

How: a text is encoded, the ids are continued, and the new ids become text again. A decoder goes on
with the prompt and gives what is new; an encoder–decoder reads the prompt as its source and gives
all that it writes. `Task` gathers what every way of writing needs: checked prompts, the special
tokens, the rules, the stop tokens.

Nothing about the model is changed, also not when a call is interrupted; it must be in eval mode.

Left out: chat. `tokenizer.apply_chat` makes a prompt of messages; give it with `special=False`.

Letters: B rows, T new tokens, R texts that a row gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from regard.generation.beams import search_beams
from regard.generation.config import GenerationConfig, make_config
from regard.generation.decode_loop import Writing, filler
from regard.generation.prompts import Ids, Prompts, check_model, make_prompts
from regard.generation.sampling import Rules
from regard.generation.stopping import TextWatch, find_stop_tokens, find_tokens
from regard.models import SpecialTokens, Transformer
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


@dataclass(frozen=True, eq=False)
class Task:
    """All that is known before the first token."""

    model: Transformer
    config: GenerationConfig
    prompts: Prompts
    tokens: SpecialTokens
    rules: Rules
    stop_tokens: tuple[int, ...]
    tokenizer: Tokenizer | None

    @staticmethod
    def make(
        model: Transformer,
        config: GenerationConfig,
        tokenizer: Tokenizer | None,
        *,
        ids: Ids | None = None,
        real: Tensor | None = None,
        source: Ids | None = None,
        source_real: Tensor | None = None,
    ) -> Task:
        check_model(model)
        if tokenizer is None and config.stop:
            tokenizer = need_tokenizer(model, None)
        tokens = find_tokens(model)
        stops = find_stop_tokens(config, tokens, tokenizer)
        prompts = make_prompts(model, tokens, config.max_new_tokens, ids, real, source, source_real)
        device = prompts.ids_bt.device
        rules = Rules(config, tokens, stops, model.config.vocab_size, device)
        return Task(model, config, prompts, tokens, rules, stops, tokenizer)

    def watch(self, row: int) -> TextWatch:
        """What turns the tokens of a row into text."""
        assert self.tokenizer is not None
        prompt, stops = self.prompts.rows[row], tuple(self.config.stop)
        return TextWatch(self.tokenizer, prompt, stops, self.stop_tokens)

    def writing(self, watched: bool = False, streaming: bool = False) -> Writing:
        """The batch, to be written by greedy search or sampling; `watched`: as text, too."""
        watches = []
        if watched or self.config.stop:
            watches = [self.watch(row) for row in range(len(self.prompts.rows))]
        return Writing(
            self.model,
            self.prompts,
            self.config,
            self.rules,
            self.stop_tokens,
            watches=watches,
            streaming=streaming,
        )

    def run(self) -> tuple[Generated, list[str] | None]:
        """Write all of it; the texts too, where they were watched for stop strings."""
        if self.config.num_beams > 1:
            return self._search(), None
        writing = self.writing()
        try:
            while not writing.over:
                writing.advance()
        finally:
            writing.close()
        ids_bt, lengths, reasons = writing.result()
        texts = None
        if writing.watches:
            texts = [writing.take_text(row) for row in range(len(lengths))]
        return Generated(ids_bt, tuple(lengths), tuple(reasons)), texts

    def _search(self) -> Generated:
        found = search_beams(self.model, self.prompts, self.config, self.rules, self.stop_tokens)
        lengths = [n for beams in found for n in beams.lengths_ak[0].tolist()]
        every = [row for beams in found for row in beams.tokens_akt[0].tolist()]
        scores = [score for beams in found for score in beams.scores_ak[0].tolist()]
        pad, width = filler(self.rules, self.stop_tokens), max(lengths)
        rows = [row[:n] + [pad] * (width - n) for row, n in zip(every, lengths, strict=True)]
        reasons = [
            "stop" if n and row[n - 1] in self.stop_tokens else "length"
            for row, n in zip(every, lengths, strict=True)
        ]
        ids = torch.tensor(rows, dtype=torch.int64, device=self.prompts.ids_bt.device)
        return Generated(ids, tuple(lengths), tuple(reasons), tuple(scores))


def generate_ids(
    model: Transformer,
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
    task = Task.make(
        model,
        make_config(config, options),
        tokenizer,
        ids=ids,
        real=real,
        source=source,
        source_real=source_real,
    )
    return task.run()[0]


def generate(
    model: Transformer,
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
    tokenizer: instead of the model's own. special: whether the tokenizer adds the tokens that the
    model expects around a text.

        generate(model, "The capital of France is", max_new_tokens=5)
    """
    if not isinstance(prompt, str):
        raise TypeError(
            f"prompt is a {type(prompt).__name__}, expected str; generate_batch takes several "
            "texts, generate_ids token ids"
        )
    texts = generate_batch(
        model, [prompt], tokenizer=tokenizer, special=special, config=config, **options
    )
    return texts[0]


def generate_batch(
    model: Transformer,
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
    check_model(model)
    task = text_task(model, list(prompts), need_tokenizer(model, tokenizer), special, chosen)
    made, texts = task.run()
    if texts is None:
        texts = [decode_row(task, place, row) for place, row in enumerate(made.rows())]
    return texts


def text_task(
    model: Transformer,
    prompts: list[str],
    tokenizer: Tokenizer,
    special: bool,
    config: GenerationConfig,
) -> Task:
    """The task of texts: a decoder continues them, an encoder–decoder reads them."""
    rows = [tokenizer.encode(text, special=special).ids for text in prompts]
    if model.config.encoder:
        return Task.make(model, config, tokenizer, source=rows)
    return Task.make(model, config, tokenizer, ids=rows)


def decode_row(task: Task, place: int, row: list[int]) -> str:
    """The text of a row's new tokens, as a stream would give it."""
    watch = task.watch(place)
    return "".join([*map(watch.step, row), watch.finish()])


def need_tokenizer(model: Transformer, tokenizer: Tokenizer | None) -> Tokenizer:
    """The one given, or the model's own."""
    found = model.tokenizer if tokenizer is None else tokenizer
    if found is None:
        raise ValueError(
            "no tokenizer lies beside this model: give tokenizer=, or token ids to generate_ids "
            "(without stop strings)"
        )
    return found
