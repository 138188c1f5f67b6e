"""From files to a task and a model to train on it.

Why: between a text file and the first step lie reading, a vocabulary, token ids and sizes, each of
which has something to say when it goes wrong.

How: files are read and their faults counted; a tokenizer is trained, given, or found in the run's
folder from before; ids go into memory-mapped files in that folder, which are used again while the
texts stay the same. The model is the recipe's, with the vocabulary's size and special tokens.

What is held out is a file of its own, or the end of the text (the last tenth of one long document,
else the last twentieth of all documents or pairs), never a part that is trained on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from regard.models import Transformer
from regard.models.families import config_of
from regard.tokens import Tokenizer
from regard.training.data.packing import PackedText
from regard.training.data.pairs import PairedText
from regard.training.data.reading import BadData, Notice, read_documents, read_pairs
from regard.training.data.store import (
    TokenFile,
    encode_documents,
    encode_pairs_side,
    write_tokens,
)
from regard.training.data.vocabulary import train_tokenizer, vocabulary_notices
from regard.training.guided_attention import LinkTable
from regard.training.init import start
from regard.training.recipes import Recipe
from regard.training.tasks import Guide, LanguageTask, MaskedTokens, Task, TranslationTask
from regard.training.word_alignment import Links, align_pairs

END, PAD, START, MASK = "<|endoftext|>", "<pad>", "<s>", "<mask>"
HELD_OUT = 0.05
LONG_DOCUMENT = 0.1
Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Prepared:
    """All that a run starts from."""

    model: Transformer
    task: Task
    tokenizer: Tokenizer


@dataclass(frozen=True, kw_only=True)
class Files:
    """What to read. `target`: where sources and targets are two files of lines."""

    data: Path
    target: Path | None = None
    valid: Path | None = None
    valid_target: Path | None = None
    tokenizer: Path | None = None
    languages: tuple[str, str] = ("source", "target")
    separator: str = END


def prepare(files: Files, recipe: Recipe, folder: Path, say: Say) -> Prepared:
    """Read, tokenise, and build; what there is to tell goes to `say`."""
    made = (prepare_pairs if recipe.task == "translate" else prepare_text)(
        files, recipe, folder, say
    )
    start(made.model, recipe.train.seed)
    return made


def prepare_text(files: Files, recipe: Recipe, folder: Path, say: Say) -> Prepared:
    """For language models, masked or not."""
    texts = read_texts(files.data, files.separator, say)
    if files.valid is not None:
        held = read_texts(files.valid, files.separator, say)
    else:
        texts, held = hold_out_text(texts)
    masked = recipe.task == "masked"
    special = (END, PAD, MASK) if masked else (END,)
    roles = {"pad": PAD} if masked else {}
    # Characters that only the held-out part has must still have ids.
    seen = texts if recipe.cutting != "characters" else [*texts, *held]
    tokenizer = find_tokenizer(files, recipe, folder, seen, special, roles, say)
    eos = tokenizer.special.eos
    single = len(texts) == 1 and len(held) <= 1
    stores = [
        encode_documents(some, tokenizer, folder / f"{name}.tokens", eos=None if single else eos)
        for name, some in (("train", texts), ("valid", held))
        if some
    ]
    say(f"{stores[0].n_tokens:,} tokens in {stores[0].n_documents:,} documents")

    def pack(tokens: TokenFile) -> PackedText:
        return PackedText(
            tokens,
            context=min(recipe.context, tokens.n_tokens - 1)
            if tokens is not stores[0]
            else recipe.context,
            rows=recipe.rows,
            seed=recipe.train.seed,
            documents=recipe.documents,
            shifted=not masked,
        )

    ids = {"eos_token_id": eos, "bos_token_id": eos}
    if masked:
        ids = {"pad_token_id": tokenizer.special.pad}
    model = build(recipe, tokenizer, ids)
    hide = None
    if masked:
        hide = MaskedTokens(
            one_id(tokenizer, MASK),
            tokenizer.vocab_size,
            tokenizer.special.all,
            recipe.train.seed,
        )
    task = LanguageTask(pack(stores[0]), pack(stores[1]) if len(stores) > 1 else None, hide)
    return Prepared(model, task, tokenizer)


def prepare_pairs(files: Files, recipe: Recipe, folder: Path, say: Say) -> Prepared:
    """For translation."""
    sources, targets = read_sides(files.data, files.target, say)
    if files.valid is not None:
        held = read_sides(files.valid, files.valid_target, say)
    else:
        (sources, targets), held = hold_out_pairs(sources, targets)
    names = [f"<2{name}>" for name in files.languages] if recipe.both_ways else []
    special = (PAD, START, END, *names)
    roles = {"pad": PAD, "bos": START}
    tokenizer = find_tokenizer(files, recipe, folder, [*sources, *targets], special, roles, say)
    prefixes = [one_id(tokenizer, name) for name in names]

    def encode(name: str, sides: tuple[list[str], list[str]]) -> tuple[TokenFile, TokenFile]:
        return encode_sides(folder, name, sides, tokenizer, prefixes)

    def pair(stores: tuple[TokenFile, TokenFile]) -> PairedText:
        return PairedText(
            *stores,
            max_tokens=recipe.max_tokens,
            bos=one_id(tokenizer, START),
            eos=one_id(tokenizer, END),
            pad=one_id(tokenizer, PAD),
            seed=recipe.train.seed,
            max_len=recipe.max_len,
        )

    paired = pair(encode("train", (sources, targets)))
    say(f"{paired.n_pairs:,} pairs, {paired.n_batches:,} batches an epoch")
    for notice in paired.notices:
        tell(notice, say)
    guide = None
    if recipe.train.guide and recipe.guide_heads:
        guide = make_guide(recipe, folder, (sources, targets), tokenizer, say)
    extra: dict[str, Any] = {}
    if recipe.both_ways:
        one, other = files.languages
        extra["directions"] = {name: {"prefix": f"<2{name}>"} for name in (other, one)}
    ids = {
        "pad_token_id": one_id(tokenizer, PAD),
        "bos_token_id": one_id(tokenizer, START),
        "eos_token_id": one_id(tokenizer, END),
        "decoder_start_token_id": one_id(tokenizer, START),
    }
    model = build(recipe, tokenizer, ids | extra)
    task = TranslationTask(paired, pair(encode("valid", held)), guide)
    return Prepared(model, task, tokenizer)


# ---- Parts


def build(recipe: Recipe, tokenizer: Tokenizer, extra: dict[str, Any]) -> Transformer:
    """The recipe's model for the tokenizer's vocabulary."""
    words = {**recipe.model, **extra, "vocab_size": tokenizer.vocab_size}
    model = Transformer(config_of(words))
    model.tokenizer = tokenizer
    limit = model.config.max_len
    longest = recipe.max_len if recipe.task == "translate" else recipe.context
    if limit is not None and longest > limit:
        raise ValueError(
            f"texts have up to {longest} tokens, but the model takes {limit}: lower context or "
            "max_len, or choose a model that takes more"
        )
    return model


def read_texts(path: Path, separator: str, say: Say) -> list[str]:
    """The documents of a file, its notices told."""
    found = read_documents(path, separator=separator)
    for notice in found.notices:
        tell(notice, say)
    return found.texts


def read_sides(path: Path, target: Path | None, say: Say) -> tuple[list[str], list[str]]:
    """The two sides of the pairs of a file, or of two."""
    found = read_pairs(path, target_path=target)
    for notice in found.notices:
        tell(notice, say)
    return found.sources, found.targets


def tell(notice: Notice, say: Say) -> None:
    """A fault of the data that does no harm, with its count."""
    say(notice.text)


def hold_out_text(texts: list[str]) -> tuple[list[str], list[str]]:
    """The end of the text, or of the documents, kept apart."""
    if len(texts) == 1:
        cut = int(len(texts[0]) * (1.0 - LONG_DOCUMENT))
        return [texts[0][:cut]], [texts[0][cut:]]
    n_held = max(1, round(len(texts) * HELD_OUT))
    return texts[:-n_held], texts[-n_held:]


def hold_out_pairs(
    sources: list[str], targets: list[str]
) -> tuple[tuple[list[str], list[str]], tuple[list[str], list[str]]]:
    """The last pairs, kept apart; a sentence that comes twice may still be on both sides."""
    if len(sources) < 2:
        raise BadData("one pair is left, and one is held out: give more, or a file for --valid")
    n_held = min(max(1, round(len(sources) * HELD_OUT)), 2000)
    cut = len(sources) - n_held
    return (sources[:cut], targets[:cut]), (sources[cut:], targets[cut:])


def find_tokenizer(
    files: Files,
    recipe: Recipe,
    folder: Path,
    texts: Sequence[str],
    special: Sequence[str],
    roles: dict[str, str],
    say: Say,
) -> Tokenizer:
    """The one given, the one of this run, or a new one made from the texts."""
    kept = folder / "tokenizer"
    if files.tokenizer is not None:
        return Tokenizer.load(files.tokenizer)
    if (kept / "tokenizer.json").is_file():
        return Tokenizer.load(kept)
    say(f"training a vocabulary of {recipe.vocab_size:,} tokens")
    made = train_tokenizer(
        texts,
        recipe.vocab_size,
        kind="bpe" if recipe.cutting == "scripts" else recipe.cutting,
        scripts=recipe.cutting == "scripts",
        special=special,
        eos=END,
        **roles,
    )
    for notice in vocabulary_notices(made, recipe.vocab_size):
        if recipe.cutting != "characters":
            tell(notice, say)
    # Several files, of which a kill must not leave some: they appear together.
    beside = kept.with_name(".tokenizer.partial")
    for stale in (beside, kept):
        shutil.rmtree(stale, ignore_errors=True)
    made.save(beside)
    os.replace(beside, kept)
    return made


def one_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token that training needs."""
    try:
        return tokenizer.id(token)
    except ValueError:
        raise ValueError(
            f"the tokenizer has no token {token!r}, which training needs here; let one be trained, "
            "or add the token"
        ) from None


def encode_sides(
    folder: Path,
    name: str,
    sides: tuple[list[str], list[str]],
    tokenizer: Tokenizer,
    prefixes: Sequence[int],
) -> tuple[TokenFile, TokenFile]:
    """Sources and targets as ids; with prefixes, each pair both ways, the way named in front."""

    def encode(side: int, prefix: Sequence[int], word: str) -> TokenFile:
        path = folder / f"{name}.{side}.{word}.tokens"
        return encode_pairs_side(sides[side], tokenizer, path, prefix)

    plain = encode(0, (), "plain"), encode(1, (), "plain")
    if not prefixes:
        return plain
    there, back = encode(0, prefixes[1:], "named"), encode(1, prefixes[:1], "named")
    return (
        joined(folder / f"{name}.sources.tokens", there, back),
        joined(folder / f"{name}.targets.tokens", plain[1], plain[0]),
    )


def joined(path: Path, one: TokenFile, other: TokenFile) -> TokenFile:
    """The rows of one file, then those of another."""
    fingerprint = f"{one.fingerprint}+{other.fingerprint}"
    if path.is_file():
        try:
            found = TokenFile.open(path)
        except BadData:
            found = None
        if found is not None and found.fingerprint == fingerprint:
            return found
    return write_tokens(
        path,
        chain(rows_of(one), rows_of(other)),
        vocab_size=one.vocab_size,
        fingerprint=fingerprint,
    )


def rows_of(tokens: TokenFile) -> Iterable[np.ndarray[Any, Any]]:
    """The ids of each document."""
    bounds = tokens.bounds
    return (tokens.ids[bounds[n] : bounds[n + 1]] for n in range(tokens.n_documents))


def make_guide(
    recipe: Recipe,
    folder: Path,
    sides: tuple[list[str], list[str]],
    tokenizer: Tokenizer,
    say: Say,
) -> Guide:
    """Links of the training pairs, for the heads that are told about them."""
    say("aligning words, for the guided heads")
    plain = encode_sides(folder, "train", sides, tokenizer, ())
    links: Links = align_pairs(*plain)
    n_pairs = plain[0].n_documents
    offset = 0
    if recipe.both_ways:
        links, offset = links.then(links.turned(), n_pairs), 1
        n_pairs *= 2
    say(f"{len(links):,} links in {n_pairs:,} pairs")
    table = LinkTable(links, n_pairs)
    return Guide(table, recipe.guide_layer, tuple(range(recipe.guide_heads)), offset)
