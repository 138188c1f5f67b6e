"""Streaming generation: `stream` for pieces of text, `stream_ids` for tokens.

Why: a reader need not wait for the end of a text, and may stop before it.

How: both are iterators over one row that is generated a token at a time, when the next piece is
requested. The pieces add up to what `generate` returns: whole characters, and never a part of a
stop string. `close` (or leaving a `with`, or garbage collection) ends the generation and frees its
memory. The stream also has token counts and times, for callers to show.

Left out: beams, which know their text only at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Generic, Self, TypeVar, final

from regard.generation.config import GenerationConfig, make_config
from regard.generation.decode_loop import DecodeLoop
from regard.generation.generate import text_task
from regard.generation.prompts import Model, Task
from regard.tokens import Tokenizer

Piece = TypeVar("Piece")


@final
class Stream(Iterator[Piece], Generic[Piece]):
    """An iterator over pieces of one text, with counts and times so far.

    `n_prompt` tokens were read first, of the prompt or the source; `ids` are the new ones so far.
    `prefill_seconds` is the time up to the first of them, `decode_seconds` the time of the others,
    without what the caller spends between two pieces. `reason` is why the text ended, "stop" or
    "length".
    """

    def __init__(
        self, task: Task, choose: Callable[[Iterator[tuple[int, str]]], Iterator[Piece]], text: bool
    ) -> None:
        """choose: turns the steps' (token, text) into pieces. text: whether to decode to text."""
        if task.config.num_beams > 1:
            raise ValueError("beams know their text only at the end: stream with num_beams=1")
        self.n_prompt = task.n_read
        self.ids: list[int] = []
        self.reason: str | None = None
        self.prefill_seconds = self.decode_seconds = 0.0
        self._steps = self._write(task, text)
        self._pieces = choose(self._steps)

    @property
    def n_new(self) -> int:
        return len(self.ids)

    def close(self) -> None:
        self._steps.close()

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self, task: Task, text: bool) -> Generator[tuple[int, str], None, None]:
        """Yield each token, and the text that became certain with it."""
        loop = DecodeLoop(task, watched=text, streaming=True)
        try:
            while not loop.over:
                start = time.perf_counter()
                token = int(loop.advance()[0])
                spent = time.perf_counter() - start
                if self.ids:
                    self.decode_seconds += spent
                else:
                    self.prefill_seconds = task.read_seconds + spent
                self.ids.append(token)
                if loop.over:
                    self.reason = loop.result()[2][0]
                yield token, loop.take_text(0)
        finally:
            loop.close()


def stream(
    model: Model,
    prompt: str,
    *,
    tokenizer: Tokenizer | None = None,
    special: bool = True,
    config: GenerationConfig | None = None,
    **options: Any,
) -> Stream[str]:
    """The text that `generate` returns, piece by piece, each as soon as it is certain.

    Args:
        model, prompt, tokenizer, special, config: As in `generate`, and so the options. Beams are
            refused: they know their text only at the end.

    Returns:
        A `Stream`, an iterator over strings that add up to the text. `close()` it, or leave its
        `with` block, to stop early.

    Example:
        >>> for piece in regard.stream("embedded:lm", "Once upon a time", max_new_tokens=5):
        ...     print(piece, end="", flush=True)  # doctest: +SKIP
    """
    if not isinstance(prompt, str):
        raise TypeError(f"prompt is a {type(prompt).__name__}, expected str: one text")
    chosen = make_config(config, options)
    task = text_task(model, [prompt], tokenizer, special, chosen)
    return Stream(task, lambda steps: (piece for _, piece in steps if piece), True)


def stream_ids(
    model: Model,
    ids: Sequence[int] | None = None,
    *,
    source: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    config: GenerationConfig | None = None,
    **options: Any,
) -> Stream[int]:
    """The tokens that `generate_ids` returns for this one row, one by one."""
    rows, sources = None if ids is None else [ids], None if source is None else [source]
    chosen = make_config(config, options)
    task = Task.make(model, chosen, tokenizer, ids=rows, source=sources)
    return Stream(task, lambda steps: (token for token, _ in steps), False)
