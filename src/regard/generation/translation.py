"""`translate`: translation of texts by any encoder–decoder model.

Why: translation models differ in how they are given a direction, and are made for sentences, not
for texts.

How: a model that knows several directions says so in its config.json:

    "directions": {"ja": {"prefix": "<2ja>"}, "en": {"prefix": "<2en>"}}

The prefix is a special token of its tokenizer. A source is then prefix, tokens of the sentence, end
token, as in training; the tokenizer itself adds nothing. `to` names the target language; without
it, the text's script decides. Texts are split into sentences, which are translated in batches of
similar length and joined again. A sentence's translation does not depend on the others; nothing is
sampled.

A model without "directions" (Marian, T5) reads a whole text as its own tokenizer encodes it: the
text may contain the instruction what to do, so it is not split.

Left out: choosing a model, distinguishing languages that share a script, glossaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TypedDict, Unpack, final, overload

from regard._check import check_count
from regard.generation.config import GenerationConfig, make_config
from regard.generation.generate import write_texts
from regard.generation.prompts import Model, Task, check_model, need_tokenizer, open_model
from regard.generation.sentences import (
    Sentence,
    find_language,
    halve,
    has_letters,
    join_sentences,
    split_sentences,
)
from regard.models import BadCheckpoint, Transformer

BEAMS = 5
MOST_TOKENS = 256  # in a sentence; a longer one is split, as training had none that long
MOST_ROWS, BATCH_TOKENS = 32, 2048  # per batch: at most so many sentences, and so many tokens
BUCKET = 16

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Row:
    """One sentence: the index of its text, and the token ids that the model reads for it."""

    text: int
    sentence: Sentence
    ids: list[int]  # empty where there is nothing to translate


class Options(TypedDict, total=False):
    beams: int | None
    config: GenerationConfig | None
    split: bool | None
    progress: Progress | None


Texts = list[str] | tuple[str, ...]


@overload
def translate(
    model: Model, text: str, to: str | None = None, **options: Unpack[Options]
) -> str: ...


@overload
def translate(
    model: Model, text: Texts, to: str | None = None, **options: Unpack[Options]
) -> list[str]: ...


def translate(
    model: Model,
    text: str | Texts,
    to: str | None = None,
    *,
    beams: int | None = None,
    config: GenerationConfig | None = None,
    split: bool | None = None,
    progress: Progress | None = None,
) -> str | list[str]:
    """Translate a text, or each text of a list, by any encoder–decoder model.

    Args:
        model: What `regard.load` returned, or what it takes.
        text: A text, or a list of texts.
        to: The language to translate to, one of those that the model's config.json names under
            "directions". None: found from the letters of each text: Japanese ones are translated
            to English, Latin ones to Japanese.
        beams: The number of beams; 5 by default, 1 is greedy.
        config: A `GenerationConfig` instead of `beams`. By default a translation ends at about
            twice the number of tokens of its sentence.
        split: Whether the text is split into sentences, which are translated one by one. None:
            where the model names directions.
        progress: Called as progress(sentences done, all sentences).

    Returns:
        The translation; a list of them for a list.

    Raises:
        ValueError, TypeError: A model that is no encoder–decoder, a language that it does not have,
            a text without letters, or settings that do not go together.

    Example:
        >>> regard.translate("embedded:translate", "The cat sat on the mat.")
        '猫はマットに座った。'
    """
    model = open_model(model)
    check_asked(model, beams, config)
    many = isinstance(text, list | tuple)
    texts = list(text) if isinstance(text, list | tuple) else [text]
    targets = [choose(model, one, to, n if many else None) for n, one in enumerate(texts)]
    reader = Reader(model, bool(read_directions(model)) if split is None else split)
    rows = [row for n, one in enumerate(texts) for row in reader.read(n, one, targets[n])]
    written = write_rows(reader, rows, config, beams or BEAMS, progress)
    joined = []
    for n, group in groupby(zip(rows, written, strict=True), lambda pair: pair[0].text):
        own, parts = zip(*group, strict=True)
        joined.append(join_sentences(list(parts), [row.sentence.gap for row in own], targets[n]))
    return joined if many else joined[0]


def check_asked(model: Transformer, beams: int | None, config: GenerationConfig | None) -> None:
    """Refuse models that cannot translate, and settings that would be ignored."""
    check_model(model)
    if not model.config.encoder:
        raise ValueError(
            f"translate needs an encoder–decoder, and this {model.config.family} model continues "
            "texts: use generate"
        )
    check_count("beams", BEAMS if beams is None else beams)
    if config is None:
        return
    if beams is not None:
        raise TypeError("give beams= or config=, not both; config.num_beams are the beams")
    make_config(config, {})
    if config.num_return_sequences != 1:
        raise ValueError("num_return_sequences: one translation comes back for each text")
    if config.samples:
        raise ValueError("a temperature draws by chance; translate searches, generate draws")


def read_directions(model: Transformer) -> dict[str, str]:
    """Target language -> its special token, from "directions" in the model's config.json."""
    given = model.config.source.get("directions")
    if given is None:
        return {}
    good = isinstance(given, Mapping) and all(
        isinstance(one, Mapping) and isinstance(one.get("prefix"), str) for one in given.values()
    )
    if not good or not given:
        raise BadCheckpoint(
            f"config.json: directions is {given!r:.99}; expected an object that gives each "
            'language its prefix, such as {"ja": {"prefix": "<2ja>"}}'
        )
    return {name: one["prefix"] for name, one in given.items()}


def choose(model: Transformer, text: str, to: str | None, place: int | None) -> str | None:
    """The language to translate this text to; None if the model names no directions."""
    which = "the text" if place is None else f"text {place}"
    if not isinstance(text, str):
        raise TypeError(f"{which} is a {type(text).__name__}; expected str, or a list of str")
    if not has_letters(text):
        came = f"{which} has no letters ({text[:40]!a})" if text.strip() else f"{which} is empty"
        raise ValueError(f"{came}, so there is nothing to translate; give a sentence")
    known = list(read_directions(model))
    if to is not None:
        if not known:
            raise ValueError(
                f"to is {to!r}, but this model's config.json names no directions: it translates "
                "one way only, or reads in the text itself what to do; leave `to` out"
            )
        if to not in known:
            raise ValueError(f"to is {to!r}; this model translates to {' or '.join(known)}")
        return to
    if len(known) < 2:
        return known[0] if known else None
    found = find_language(text)
    others = [name for name in known if name != found]
    if found is None:
        raise ValueError(
            f"{which} is written in neither Japanese nor Latin letters ({text.strip()[:40]!a}), so "
            f"its language is not known; give to= one of {', '.join(known)}"
        )
    if len(others) != 1:
        raise ValueError(f"give the language to translate to: to= one of {', '.join(known)}")
    return others[0]


@final
class Reader:
    def __init__(self, model: Transformer, split: bool) -> None:
        self.model, self.split = model, split
        self.tokenizer = need_tokenizer(model, None)
        self.most = min(MOST_TOKENS, model.config.max_len or MOST_TOKENS)
        known = {self.tokenizer.token(at): at for at in self.tokenizer.special.all}
        self._prefixes: dict[str, int] = {}
        for name, prefix in read_directions(model).items():
            if prefix not in known:
                raise BadCheckpoint(
                    f"config.json: directions have the prefix {prefix[:60]!r}, which is no special "
                    "token of the tokenizer beside it; the two are not of one model"
                )
            if not model.config.tokens.eos:
                raise BadCheckpoint("config.json has directions and no eos_token_id to end sources")
            self._prefixes[name] = known[prefix]

    def read(self, place: int, text: str, to: str | None) -> list[Row]:
        """The sentences of a text, as rows; sentences that are too long are split."""
        waiting = split_sentences(text)[::-1] if self.split else [Sentence(text)]
        rows = []
        while waiting:
            sentence = waiting.pop()
            ids = self.encode(sentence.text, to) if has_letters(sentence.text) else []
            if self.split and len(ids) > self.most and len(sentence.text) > 1:
                waiting += reversed(halve(sentence))
            else:
                rows.append(Row(place, sentence, ids))
        return rows

    def encode(self, text: str, to: str | None) -> list[int]:
        """The token ids of a source, with the prefix and end token that the model expects."""
        if to is None:
            return self.tokenizer.encode(text).ids
        prefix, end = self._prefixes[to], self.model.config.tokens.eos[0]
        encoded = self.tokenizer.encode(text, special=False)
        # Special tokens written in the text are removed: they could change the direction.
        plain = zip(encoded.ids, encoded.special_mask, strict=True)
        return [prefix, *(at for at, special in plain if not special), end]


def write_rows(
    reader: Reader,
    rows: list[Row],
    config: GenerationConfig | None,
    beams: int,
    progress: Progress | None,
) -> list[str]:
    """The translation of each row; the text of a row without ids is returned unchanged."""
    written = [row.sentence.text for row in rows]
    done = sum(not row.ids for row in rows)
    for places in make_batches(rows):
        sources = [rows[at].ids for at in places]
        # From the bucket, not from the longest row, so that no sentence depends on the others.
        most = 2 * bucket_of(rows[places[0]]) + 24
        chosen = config or GenerationConfig(num_beams=beams, max_new_tokens=most)
        task = Task.make(reader.model, chosen, reader.tokenizer, source=sources)
        for at, text in zip(places, write_texts(task), strict=True):
            written[at] = text
        done += len(places)
        if progress is not None:
            progress(done, len(rows))
    return written


def bucket_of(row: Row) -> int:
    return -(-len(row.ids) // BUCKET) * BUCKET


def make_batches(rows: list[Row]) -> list[list[int]]:
    """Batches of row indices, of rows of similar length, shortest first; rows without ids: none."""
    buckets: dict[int, list[int]] = {}
    for at, row in enumerate(rows):
        if row.ids:
            buckets.setdefault(bucket_of(row), []).append(at)
    batches = []
    for width, places in sorted(buckets.items()):
        size = max(1, min(MOST_ROWS, BATCH_TOKENS // width))
        batches += [places[at : at + size] for at in range(0, len(places), size)]
    return batches
