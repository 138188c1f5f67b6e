"""From a text to a record of what every head of a model does with it.

Why: two lines in a notebook should show a picture. `regard look` and `regard translate --look` are
the same steps in a terminal.

How: a `Subject` is a model that can read a text, ours or not: `own_subject` makes one of ours, the
command line makes one of `transformers`'. `see` runs it on the text once under `watch`, and keeps
queries and keys, so that every weight can be computed later; for a language model also its
predictions of next tokens, unless a text is so long that the logits would be too large. An
encoder–decoder first writes its translation, and `see_translation` then watches it read the text
and write the translation. `look` does this for a name or a model; commands show progress bars
around the reading. `survey` runs a model on many texts, of which only the means of all heads'
scores are kept (`lens/survey.py`).

Left out: models that are not regard's, which `regard.watch` can watch in the caller's own code.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn

    from regard.lens.edit.values import Where
    from regard.lens.head_table import HeadTable
    from regard.lens.record import Record
    from regard.lens.recorder import Progress
    from regard.lens.survey import Plan
    from regard.models import Transformer

Fit: TypeAlias = Literal["refuse", "truncate", "window"]
"""What to do with a text that is longer than the model accepts."""
KEEP = ("qk", "predictions")
MOST_LOGITS = 1 << 29
"""Tokens times vocabulary up to which logits are computed: two gigabytes in float32."""
Showing: TypeAlias = "Callable[[int, int | None], AbstractContextManager[Progress | None]]"
"""Called with the number of tokens to read, and of attention calls if known; gives a context to
read in, which yields a progress for `watch`."""


def look(
    text: str,
    model: str | os.PathLike[str] | Transformer | None = None,
    *,
    to: str | None = None,
    truncate: bool = False,
    window: bool = False,
    values: bool = False,
    effect: bool = False,
    edges: tuple[Where, Where] | None = None,
) -> Record:
    """Have a model read a text, and record what every head does; `.show()` it in a notebook.

    Args:
        text: The text; one that is longer than the model can take is refused.
        model: What `regard.load` returned, or what it takes. Default: `embedded:encoder`, or where
            it cannot read the text `embedded:lm`, with a warning that says why. An encoder–decoder
            is watched while it reads the text and writes its translation.
        to: The language of that translation, for a model that knows several.
        truncate: Read only the beginning of a text that is too long.
        window: Read all of it, in windows that overlap by half. A token sees its own window.
        values: Keep norms of the value vectors too, for value-weighted attention; not in windows.
        effect: Measure what switching off each head changes (`regard.effect`), and keep it.
        edges: (query, key): measure what forbidding this look in each head changes.

    Returns:
        A `Record` of queries and keys, from which every weight can be computed: `show()` in a
        notebook, `html(path)`, `plot(path)`, `save(path)`, `heads()`, `rows(place, head, query)`.

    Raises:
        TypeError, ValueError: An empty text, a model that cannot read it, options that clash.

    Example:
        >>> record = regard.look("The animal didn't cross the street because it was too tired.")
    """
    if not isinstance(text, str):
        raise TypeError(f"text is a {type(text).__name__}; expected str")
    if not text.strip():
        raise ValueError("the text is empty; give the words that the model shall read")
    fit = choose_fit(truncate, window)
    if model is None:
        asks_next = effect or edges is not None
        model = choose_inside(text, fit, asks_next, partial(warnings.warn, stacklevel=3))
    loaded, name = load_named(model)
    keep = (*KEEP, "values") if values else KEEP
    if loaded.config.encoder and loaded.config.decoder:
        from regard.generation import translate

        alone = {"truncate": truncate, "window": window, "effect": effect, "edges": edges}
        for what in (option for option, asked in alone.items() if asked):
            raise ValueError(f"{what} cannot be used with {name}, an encoder–decoder; leave it out")
        translation = translate(loaded, text, to)
        return see_translation(loaded, name, text, translation, to, keep=keep)
    if to is not None:
        raise ValueError(f"to is {to!r}, but {name} does not translate; leave `to` out")
    subject = replace(own_subject(loaded, name), keep=keep)
    note = subject.note_unknown(subject.read(text, fit))
    if note is not None:
        warnings.warn(note, stacklevel=2)
    if effect or edges is not None:
        check_effect(subject, text, fit, edges)
    return add_effects(subject, see(subject, text, fit=fit), effect, edges)


def choose_inside(text: str, fit: Fit, asks_next: bool, say: Callable[[str], None]) -> str:
    """Choose the model inside the package for a text; `say` gets the reason if not the encoder."""
    from regard.models.embedded import choose_reader

    name, why = choose_reader(text, in_parts=fit != "refuse", asks_next=asks_next)
    if why is not None:
        say(why)
    return name


def check_effect(subject: Subject, text: str, fit: Fit, edges: tuple[Where, Where] | None) -> None:
    """Refuse, before the model reads, effects that could not be measured."""
    from regard.lens.edit.positions import with_numbers
    from regard.lens.effect import check_gap, make_block
    from regard.lens.word_links import find_words

    tokenizer = subject.tokenizer or getattr(subject.module, "tokenizer", None)
    if tokenizer is None:
        raise ValueError(
            f"{subject.name} has no head that predicts tokens, so no effect can be measured: leave "
            "effect and edges out"
        )
    if fit == "window":
        raise ValueError("effects cannot be measured in windows; leave out effect, or window")
    if edges is not None:
        said = subject.read(text, fit)
        words = find_words(text, said.labels, said.spans or [(0, 0)] * len(said.ids))
        with_numbers(make_block(edges), words)
    check_gap(tokenizer, text)


def add_effects(
    subject: Subject, record: Record, heads: bool, edges: tuple[Where, Where] | None
) -> Record:
    """Measure how much heads matter to the next token, or to a masked word, and add it to a record.

    heads: with each head switched off; edges: with this look forbidden in each.
    """
    from regard.lens.effect import effect

    for asked in (*((None,) if heads else ()), *((edges,) if edges is not None else ())):
        found = effect(subject.module, record.text, edges=asked, tokenizer=subject.tokenizer)
        record.add_effect(found)
    return record


def load_named(
    model: str | os.PathLike[str] | Transformer,
    others: str = "others are watched where they are: with regard.watch(model) as record: ...",
) -> tuple[Transformer, str]:
    """Load a model, with the name to show; `others`: advice for the error if it is not ours."""
    from regard.lens.head_names import name_model
    from regard.models import Transformer, load

    if isinstance(model, Transformer):
        return model, model.origin.name if model.origin else type(model).__name__
    if isinstance(model, str | os.PathLike):
        return load(model), name_model(os.fsdecode(model))
    raise TypeError(
        f"model is a {type(model).__name__}; expected a name, a path, or what regard.load "
        f"gives; {others}"
    )


def survey(
    model: str | os.PathLike[str] | Transformer,
    texts: str | os.PathLike[str] | Iterable[str],
    *,
    key: str = "text",
    out: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    batch: int = 32,
    block: int = 256,
    resume: bool = False,
) -> HeadTable:
    """What every head of a model does over many texts: the mean and spread of each head's scores.

    The scores are those of `Record.heads`, and `links`, how much a head links words. Every text
    counts once. Under torchrun the processes share the work, with the same result.

    Args:
        model: What `regard.load` returned, or what it takes; no encoder–decoder.
        texts: Any iterable of texts, or the path of a file: .jsonl, or a text in each line. Texts
            that are too long are truncated, empty ones only counted.
        key: Under which key a line of .jsonl has its text.
        out: Where the table is written: a .csv, .json, .parquet or .regard file.
        limit: Read so many texts at most. Default: all of them.
        batch: How many texts of the same number of tokens are read at once.
        block: After how many texts the sums are saved.
        resume: Go on with a survey that was stopped, from the state that it left beside `out`.

    Returns:
        A `HeadTable`: `top(score)`, `save(path)`, `html(path)`.

    Example:
        >>> table = regard.survey("embedded:lm", ["The cat sat on the mat.", "It was tired."])
        >>> layer_and_head = table.top("previous")[0]
    """
    from regard.lens.survey import Plan

    if resume and out is None:
        raise ValueError("resume=True goes on with the state beside `out`: give out too")
    plan = Plan(limit=limit, batch=batch, block=block, resume=resume)
    return survey_subject(own_subject(*load_named(model)), texts, plan, key=key, out=out)


def survey_subject(
    subject: Subject,
    texts: str | os.PathLike[str] | Iterable[str],
    plan: Plan,
    *,
    key: str = "text",
    out: str | os.PathLike[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> HeadTable:
    """`survey` of any `Subject`; progress is called with the number of texts read so far."""
    from regard.lens.corpus import read_texts
    from regard.lens.head_table import check_table_path
    from regard.lens.survey import Reader, Tokens, is_main, survey_texts
    from regard.lens.word_links import find_words

    path = None if out is None else Path(out)
    if path is not None:
        check_table_path(path)
    most = subject.limit()

    def encode(text: str) -> Tokens:
        said = subject.encode(text) if text.strip() else Said([], [], None)
        truncated = most is not None and len(said.ids) > most
        said = said.first(most) if truncated and most is not None else said
        words = [] if said.spans is None else find_words(text, said.labels, said.spans)
        return Tokens(said.ids, said.labels, truncated, words)

    reader = Reader(subject.name, subject.module, encode, subject.run)
    several = read_texts(Path(texts), key) if isinstance(texts, str | os.PathLike) else texts
    state = None if path is None else path.with_name(f"{path.name}.state")
    table = survey_texts(reader, several, replace(plan, state=state), progress)
    if path is not None and state is not None and is_main():
        table.save(path)
        state.unlink(missing_ok=True)
    return table


def choose_fit(truncate: bool, window: bool) -> Fit:
    """Choose what to do with a text that is too long; refuse two answers."""
    if truncate and window:
        raise ValueError("truncate reads the beginning of a text, window all of it; give one")
    return "truncate" if truncate else "window" if window else "refuse"


@dataclass(frozen=True)
class Said:
    """A tokenized text: ids, labels, and the characters of each token, if known."""

    ids: list[int]
    labels: list[str]
    spans: list[tuple[int, int]] | None

    def first(self, n: int) -> Said:
        """Cut to n tokens, but keep those at the end that stand for no text, as [SEP] does."""
        tail = min(self.specials()[1], n)
        return self.part([*range(n - tail), *range(len(self.ids) - tail, len(self.ids))])

    def specials(self) -> tuple[int, int]:
        """How many special tokens, which stand for no text, come first, and last."""
        if self.spans is None:
            return 0, 0
        real = [at for at, (first, last) in enumerate(self.spans) if last > first]
        return (real[0], len(self.ids) - 1 - real[-1]) if real else (len(self.ids), 0)

    def part(self, numbers: Sequence[int]) -> Said:
        own = None if self.spans is None else [self.spans[at] for at in numbers]
        return Said([self.ids[at] for at in numbers], [self.labels[at] for at in numbers], own)

    def covered(self, text: str) -> str:
        """The part of the text that its tokens cover."""
        return text if self.spans is None else text[: max(end for _, end in self.spans)]


@dataclass(frozen=True, eq=False)
class Subject:
    """What is needed to watch a model read; `run` runs it on ids (1, T), and its result is ignored.

    `say` is `run` with logits, for a language model; `tokenizer` names its predictions.
    """

    name: str
    module: nn.Module
    max_len: int | None
    n_layers: int | None
    n_heads: int | None
    encode: Callable[[str], Said]
    run: Callable[[Tensor], object]
    say: Callable[[Tensor], object] | None = None
    vocab_size: int = 0
    tokenizer: Any = None
    keep: tuple[str, ...] = KEEP
    unknown: int | None = None
    """The token that stands for every word that the model does not know."""

    def limit(self) -> int | None:
        """The most tokens that it accepts, or the most of its training if less; None if unknown."""
        from regard.lens.recorder import find_trained_len

        known = (self.max_len, find_trained_len(getattr(self.module, "config", None)))
        return min((n for n in known if n is not None), default=None)

    def read(self, text: str, fit: Fit = "refuse") -> Said:
        said = self.encode(text)
        if not said.ids:
            raise ValueError(
                f"the tokenizer of {self.name} makes no token of this text of {len(text):,} "
                "characters, so there is nothing to look at; give one with words in it"
            )
        most = self.limit()
        if fit == "truncate" and most is not None and len(said.ids) > most:
            said = said.first(most)
        if self.max_len is not None and len(said.ids) > self.max_len and fit != "window":
            what = f"the text has {len(said.ids):,} tokens, but {self.name} takes {self.max_len:,}"
            how = "truncate it, or read it in windows"
            raise ValueError(f"{what}; give a shorter one, {how} (truncate, window)")
        return said

    def note_unknown(self, said: Said) -> str | None:
        """A note if the text has words that the model does not know, else None."""
        n = 0 if self.unknown is None else said.ids.count(self.unknown)
        if n == 0:
            return None
        counted = f"{n:,} of {len(said.ids):,} tokens"
        return f"{self.name} does not know {counted}: they are all one to it"


def own_subject(model: Transformer, name: str) -> Subject:
    """A subject from one of our models, which must have a tokenizer and a single stack."""
    config, tokenizer = model.config, model.tokenizer
    if tokenizer is None:
        raise ValueError(f"{name} has no tokenizer beside its weights, so it cannot read a text")
    if config.encoder and config.decoder:
        what = f"{name} is an encoder–decoder, which reads one text and writes another"
        raise ValueError(f"{what}: use `regard translate --look`")

    def encode(text: str) -> Said:
        said = tokenizer.encode(text)
        return Said(said.ids, name_tokens(text, said.tokens, said.offsets), said.offsets)

    blocks = (*config.encoder, *config.decoder)
    n_heads = max(block.n_heads for block in blocks)
    special = tokenizer.special
    # A tokenizer that can encode every text may name bos or eos as its unknown token.
    unknown = None if special.unk in (special.bos, special.eos) else special.unk
    subject = Subject(
        name, model, config.max_len, len(blocks), n_heads, encode, model.run, unknown=unknown
    )
    if config.head.kind != "lm" or not config.decoder:
        return subject
    return replace(subject, say=model, vocab_size=config.vocab_size, tokenizer=tokenizer)


def name_tokens(text: str, pieces: list[str], spans: list[tuple[int, int]]) -> list[str]:
    """Label each token by its characters in the text, or by its piece if it has none."""
    return [
        piece if end <= start else text[start:end]
        for piece, (start, end) in zip(pieces, spans, strict=True)
    ]


def see(
    subject: Subject, text: str, progress: Showing | None = None, fit: Fit = "refuse"
) -> Record:
    """Record the heads of a model while it reads a text, or if truncated, its beginning."""
    read = subject.read(text, fit)
    most = subject.limit()
    if fit == "window" and most is not None and len(read.ids) > most:
        return _see_windows(subject, text, read, most, progress)
    text = read.covered(text) if fit == "truncate" else text
    few = len(read.ids) * subject.vocab_size <= MOST_LOGITS
    run = subject.say if subject.say is not None and few else subject.run
    sizes = len(read.ids), subject.n_layers
    with _watching(subject.module, *sizes, progress, subject.keep) as (record, batch):
        run(batch(read.ids))
    record.describe(text=text, tokens=read.labels, spans=read.spans, model=subject.name)
    return record.name_candidates(subject.tokenizer)


def _see_windows(
    subject: Subject, text: str, read: Said, most: int, progress: Showing | None
) -> Record:
    """Record a long text in windows of at most `most` tokens, special ones included."""
    from regard.lens.windows import join_windows, lay_out, plan_windows

    if "values" in subject.keep:
        raise ValueError("values cannot be kept in windows; leave out values, or window")
    if read.spans is None:
        raise ValueError(
            f"the tokenizer of {subject.name} does not say which characters its tokens are, so "
            "its special tokens are not known, and the text cannot be read in windows"
        )
    before, after = read.specials()
    n_tokens = len(read.ids)
    n_text, capacity = n_tokens - before - after, most - before - after
    if capacity < 2:
        raise ValueError(f"{subject.name} takes {most} tokens, too few to read a text in windows")
    ends = [*range(before)], [*range(n_tokens - after, n_tokens)]
    windows = plan_windows(n_text, capacity, causal=False)
    n_places = None if subject.n_layers is None else len(windows) * subject.n_layers
    records: list[Record] = []
    with nullcontext() if progress is None else progress(n_tokens, n_places) as tell:
        for first, last, *_ in windows:
            said = read.part([*ends[0], *range(before + first, before + last), *ends[1]])
            done = sum(len(record.places) for record in records)
            own = None if tell is None else _shift(tell, done)
            with _watched(subject.module, own, ("qk",)) as window:
                record, batch = window
                subject.run(batch(said.ids))
            records.append(record)
        if all(place.causal for place in records[0].places):
            windows = plan_windows(n_text, capacity, causal=True)
        layout = lay_out(windows, before, after)
        joined = join_windows(records, layout)
    shown = read.part(layout.order)
    return joined.describe(text=text, tokens=shown.labels, spans=shown.spans, model=subject.name)


def _shift(tell: Progress, done: int) -> Progress:
    """Progress that continues the count of earlier windows."""
    return lambda place, n: tell(place, done + n)


def see_translation(
    model: Transformer,
    name: str,
    text: str,
    translation: str,
    to: str | None,
    progress: Showing | None = None,
    keep: tuple[str, ...] = KEEP,
) -> Record:
    """Record the heads while a model reads a text and writes its translation."""
    from regard.generation.translation import Reader, choose

    reader = Reader(model, split=False)
    source = reader.encode(text, choose(model, text, to, None))
    tokenizer, start = reader.tokenizer, model.config.tokens.decoder_start
    if start is None:
        raise ValueError(f"{name} names no token to start with (decoder_start_token_id)")
    target = tokenizer.encode(translation, special=False)
    n_tokens = len(source) + len(target.ids)
    n_places = len(model.config.encoder) + 2 * len(model.config.decoder)
    with _watching(model, n_tokens, n_places, progress, keep) as (record, batch):
        model(batch([start, *target.ids]), source=batch(source))
    record.describe(
        text=translation,
        tokens=[tokenizer.token(start), *(translation[a:z] for a, z in target.offsets)],
        spans=[(0, 0), *target.offsets],
        source_text=text,
        source_tokens=[tokenizer.decode([at], skip_special=False) for at in source],
        model=name,
    )
    return record.name_candidates(tokenizer)


@contextmanager
def _watching(
    module: nn.Module,
    n_tokens: int,
    n_places: int | None,
    progress: Showing | None,
    keep: tuple[str, ...],
) -> Iterator[tuple[Record, Callable[[list[int]], Tensor]]]:
    """`_watched`, with a progress display around it."""
    around = nullcontext() if progress is None else progress(n_tokens, n_places)
    with around as tell, _watched(module, tell, keep) as watched:
        yield watched


@contextmanager
def _watched(
    module: nn.Module, tell: Progress | None, keep: tuple[str, ...]
) -> Iterator[tuple[Record, Callable[[list[int]], Tensor]]]:
    """Yield the record being made, and a function that makes ids into a batch of one."""
    import torch

    from regard.lens.watch import watch

    device = next(module.parameters()).device
    with torch.no_grad(), watch(module, keep=keep, progress=tell) as record:
        yield record, lambda ids: torch.tensor([ids], device=device)
