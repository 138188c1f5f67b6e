"""From files to a task and a model to train on it.

How: files are read and their faults counted; a tokenizer is trained, given, or found in the run's
folder from before; ids go into memory-mapped files in that folder, which are used again while the
texts stay the same. The model is the recipe's, with the vocabulary's size and special tokens.

What is held out is a file of its own, or the end of the text (the last tenth of one long document,
else the last twentieth of all documents or pairs), never a part that is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from regard._files import replace_folder
from regard.models import Transformer
from regard.models.families import config_of
from regard.tokens import Tokenizer
from regard.training.data.packing import MaskedTokens, PackedText
from regard.training.data.pairs import PairedText
from regard.training.data.reading import BadData, Notice, read_documents, read_pairs
from regard.training.data.store import TokenFile, encode_texts, reuse_tokens, write_tokens
from regard.training.data.vocabulary import train_tokenizer, vocabulary_notices
from regard.training.init import start
from regard.training.recipes import Recipe
from regard.training.tasks import LanguageTask, Task, TranslationTask

END, PAD, START, MASK = "<|endoftext|>", "<pad>", "<s>", "<mask>"
HELD_OUT = 0.05
LONG_DOCUMENT = 0.1
Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Prepared:
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


def prepare(files: Files, recipe: Recipe, folder: Path, say: Say, fixed: bool = False) -> Prepared:
    """Read, tokenise, and build; what there is to tell goes to `say`.

    fixed: a run goes on here, so other texts than those it has read are refused.
    """
    build_task = prepare_pairs if recipe.task == "translate" else prepare_text
    prepared = build_task(files, recipe, folder, say, fixed)
    start(prepared.model, recipe.train.seed)
    return prepared


def prepare_text(files: Files, recipe: Recipe, folder: Path, say: Say, fixed: bool) -> Prepared:
    texts = read_texts(files.data, files.separator, say)
    if files.valid is not None:
        held = read_texts(files.valid, files.separator, say)
    else:
        texts, held = hold_out_text(texts)
    masked = recipe.task == "masked"
    # Characters that only the held-out part has must still have ids.
    corpus = texts if recipe.cutting != "characters" else [*texts, *held]
    words = {"special": (END, PAD, MASK), "pad": PAD} if masked else {"special": (END,)}
    tokenizer = find_tokenizer(files, recipe, folder, corpus, words, say)
    eos = tokenizer.special.eos
    after = end_of_text(tokenizer, single=len(texts) == 1 and len(held) <= 1)
    tokens = encode_texts(texts, tokenizer, folder / "train.tokens", after=after, fixed=fixed)
    say(f"{tokens.n_tokens:,} tokens in {tokens.n_documents:,} documents")
    ids, hide = {"eos_token_id": eos, "bos_token_id": eos}, None
    if masked:
        ids = {"pad_token_id": tokenizer.special.pad}
        size, special = tokenizer.vocab_size, tokenizer.special.all
        hide = MaskedTokens(one_id(tokenizer, MASK), size, special, recipe.train.seed)
    model = build(recipe, tokenizer, ids)
    text, valid = pack(tokens, recipe), None
    if held:
        path = folder / "valid.tokens"
        held_tokens = encode_texts(held, tokenizer, path, after=after, fixed=fixed)
        valid = pack(held_tokens, recipe, shorten=True)
    return Prepared(model, LanguageTask(text, valid, hide), tokenizer)


def pack(tokens: TokenFile, recipe: Recipe, *, shorten: bool = False) -> PackedText:
    """Windows as the recipe has them; with `shorten`, no longer than a short text."""
    return PackedText(
        tokens,
        context=min(recipe.context, tokens.n_tokens - 1) if shorten else recipe.context,
        rows=recipe.rows,
        seed=recipe.train.seed,
        documents=recipe.documents,
        shifted=recipe.task != "masked",
    )


def prepare_pairs(files: Files, recipe: Recipe, folder: Path, say: Say, fixed: bool) -> Prepared:
    sides = read_sides(files.data, files.target, say)
    if files.valid is not None:
        held = read_sides(files.valid, files.valid_target, say)
    else:
        sides, held = hold_out_pairs(sides)
    names = [f"<2{name}>" for name in files.languages] if recipe.both_ways else []
    words = {"special": (PAD, START, END, *names), "pad": PAD, "bos": START}
    texts = [*sides.sources, *sides.targets]
    tokenizer = find_tokenizer(files, recipe, folder, texts, words, say)
    prefixes = [one_id(tokenizer, name) for name in names]
    roles = {"bos": START, "eos": END, "pad": PAD}
    ids = {role: one_id(tokenizer, token) for role, token in roles.items()}

    def pair(name: str, sides: Sides) -> PairedText:
        sources, targets = encode_sides(folder, name, sides, tokenizer, prefixes, fixed)
        limits = {"max_tokens": recipe.max_tokens, "max_len": recipe.max_len}
        return PairedText(sources, targets, **limits, **ids, seed=recipe.train.seed)

    paired = pair("train", sides)
    say(f"{paired.n_pairs:,} pairs, {paired.n_batches:,} batches an epoch")
    say_notices(paired.notices, say)
    extra: dict[str, Any] = {f"{role}_token_id": number for role, number in ids.items()}
    extra["decoder_start_token_id"] = ids["bos"]
    if recipe.both_ways:
        one, other = files.languages
        extra["directions"] = {name: {"prefix": f"<2{name}>"} for name in (other, one)}
    model = build(recipe, tokenizer, extra)
    return Prepared(model, TranslationTask(paired, pair("valid", held)), tokenizer)


# ---- Parts


def build(recipe: Recipe, tokenizer: Tokenizer, extra: dict[str, Any]) -> Transformer:
    words = {**recipe.model, **extra, "vocab_size": tokenizer.vocab_size}
    model = Transformer(config_of(words))
    model.tokenizer = tokenizer
    limit = model.config.max_len
    longest = recipe.max_len if recipe.task == "translate" else recipe.context
    if limit is not None and longest > limit:
        what = f"texts have up to {longest} tokens, but the model takes {limit}"
        raise ValueError(f"{what}: lower context or max_len, or choose a model that takes more")
    return model


class Sides(NamedTuple):
    sources: list[str]
    targets: list[str]


def read_texts(path: Path, separator: str, say: Say) -> list[str]:
    found = read_documents(path, separator=separator)
    say_notices(found.notices, say)
    return found.texts


def read_sides(path: Path, target: Path | None, say: Say) -> Sides:
    found = read_pairs(path, target_path=target)
    say_notices(found.notices, say)
    return Sides(found.sources, found.targets)


def say_notices(notices: Iterable[Notice], say: Say) -> None:
    for notice in notices:
        say(notice.text)


def hold_out_text(texts: list[str]) -> tuple[list[str], list[str]]:
    if len(texts) == 1:
        cut = int(len(texts[0]) * (1.0 - LONG_DOCUMENT))
        return [texts[0][:cut]], [texts[0][cut:]]
    n_held = max(1, round(len(texts) * HELD_OUT))
    return texts[:-n_held], texts[-n_held:]


def hold_out_pairs(sides: Sides) -> tuple[Sides, Sides]:
    """The last pairs, kept apart; a sentence that comes twice may still be on both sides."""
    n_pairs = len(sides.sources)
    if n_pairs < 2:
        raise BadData("one pair is left, and one is held out: give more, or a file for --valid")
    cut = n_pairs - min(max(1, round(n_pairs * HELD_OUT)), 2000)
    return Sides(*(side[:cut] for side in sides)), Sides(*(side[cut:] for side in sides))


def find_tokenizer(
    files: Files,
    recipe: Recipe,
    folder: Path,
    texts: Sequence[str],
    words: Mapping[str, Any],
    say: Say,
) -> Tokenizer:
    """The one given, the one of this run, or a new one made from the texts with these words."""
    kept = folder / "tokenizer"
    if files.tokenizer is not None:
        return Tokenizer.load(files.tokenizer)
    if (kept / "tokenizer.json").is_file():
        return Tokenizer.load(kept)
    say(f"training a vocabulary of {recipe.vocab_size:,} tokens")
    tokenizer = train_tokenizer(texts, recipe.vocab_size, kind=recipe.cutting, eos=END, **words)
    if recipe.cutting != "characters":
        say_notices(vocabulary_notices(tokenizer, recipe.vocab_size), say)
    # Several files, of which a kill must not leave some: they appear together.
    with replace_folder(kept) as beside:
        tokenizer.save(beside)
    return tokenizer


def end_of_text(tokenizer: Tokenizer, *, single: bool) -> tuple[int, ...]:
    """What stands behind each document; nothing, if there is a single one."""
    eos = tokenizer.special.eos
    return () if single or eos is None else (eos,)


def one_id(tokenizer: Tokenizer, token: str) -> int:
    try:
        return tokenizer.id(token)
    except ValueError:
        what = f"the tokenizer has no token {token!r}, which training needs here"
        raise ValueError(f"{what}; let one be trained, or add the token") from None


def encode_sides(
    folder: Path,
    name: str,
    sides: Sides,
    tokenizer: Tokenizer,
    prefixes: Sequence[int],
    fixed: bool,
) -> tuple[TokenFile, TokenFile]:
    """Sources and targets as ids; with prefixes, each pair both ways, the language in front."""

    def encode(side: int, prefix: Sequence[int] = ()) -> TokenFile:
        path = side_file(folder, name, side, "named" if prefix else "plain")
        return encode_texts(sides[side], tokenizer, path, before=prefix, fixed=fixed)

    sources, targets = encode(0), encode(1)
    if not prefixes:
        return sources, targets
    there, back = encode(0, prefixes[1:]), encode(1, prefixes[:1])
    return (
        joined(folder / f"{name}.sources.tokens", there, back),
        joined(folder / f"{name}.targets.tokens", targets, sources),
    )


def side_file(folder: Path, name: str, side: int, kind: str = "plain") -> Path:
    """Where one side of the pairs lies as ids: 0 the sources, 1 the targets."""
    return folder / f"{name}.{side}.{kind}.tokens"


def joined(path: Path, one: TokenFile, other: TokenFile) -> TokenFile:
    fingerprint = f"{one.fingerprint}+{other.fingerprint}"
    if (found := reuse_tokens(path, fingerprint)) is not None:
        return found
    spans = ((tokens.ids, pairwise(tokens.bounds.tolist())) for tokens in (one, other))
    rows = (ids[first:end] for ids, bounds in spans for first, end in bounds)
    return write_tokens(path, rows, vocab_size=one.vocab_size, fingerprint=fingerprint)
