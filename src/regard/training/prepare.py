"""From data files to a task, a tokenizer and a model with initial weights.

How: files are read and their faults counted; the tokenizer is given, found in the run's folder, or
trained; token ids go into memory-mapped files in that folder, which are reused while texts and
tokenizer stay the same. The model is the recipe's, with the vocabulary's size and special tokens.

Held-out data is a file of its own, or the end of the data (the last tenth of a single document,
else the last twentieth of the documents or pairs), which is then not trained on.

A masked model gets BERT's special tokens and reads each document between [CLS] and [SEP], or
between the tokens that a given tokenizer puts around a text. It has as many positions as the
context is long, unless the recipe says otherwise, since more would never be trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard._files import replace_folder
from regard.models import ModelConfig, Transformer
from regard.models.families import config_of
from regard.tokens import Tokenizer
from regard.training.data.packing import MaskedTokens, PackedText
from regard.training.data.pairs import PairedText
from regard.training.data.reading import BadData, Notice, read_documents, read_pairs
from regard.training.data.store import TokenFile, encode_texts, reuse_tokens, write_tokens
from regard.training.data.vocabulary import ending, train_tokenizer, vocabulary_notices
from regard.training.init import start, start_at_frequencies
from regard.training.recipes import COMMANDS, Recipe, TaskKind, names_tokens
from regard.training.tasks import LanguageTask, Task, TranslationTask, count_ids, count_tokens

END, PAD, START = "<|endoftext|>", "<pad>", "<s>"
GAPS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
HELD_OUT = 0.05
LONG_DOCUMENT = 0.1
TOLD = 0.01  # the share of unknown tokens from which on they are reported
Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Prepared:
    model: Transformer
    task: Task
    tokenizer: Tokenizer


@dataclass(frozen=True, kw_only=True)
class Files:
    """The input files. `target`: the targets' file, if sources and targets are two files."""

    data: Path
    target: Path | None = None
    valid: Path | None = None
    valid_target: Path | None = None
    tokenizer: Path | None = None
    languages: tuple[str, str] = ("source", "target")
    separator: str = END


def prepare(files: Files, recipe: Recipe, folder: Path, say: Say, fixed: bool = False) -> Prepared:
    """Read and tokenise the data and build the model; notices go to `say`.

    fixed: a run is resumed, so texts other than those it began with are refused.
    """
    build_task = prepare_pairs if recipe.task == "translate" else prepare_text
    prepared = build_task(files, recipe, folder, say, fixed)
    start(prepared.model, recipe.train.seed)
    task = prepared.task
    if isinstance(task, LanguageTask) and task.masked is not None:
        shares = count_tokens(task.text.tokens, task.masked.special)
        start_at_frequencies(prepared.model, shares)
    return prepared


def prepare_text(files: Files, recipe: Recipe, folder: Path, say: Say, fixed: bool) -> Prepared:
    texts = read_texts(files.data, files.separator, say)
    if files.valid is not None:
        held = read_texts(files.valid, files.separator, say)
    else:
        texts, held = hold_out_text(texts)
    say_shared(held, texts, "documents", say)
    masked = recipe.task == "masked"
    words: dict[str, Any] = {"special": (END,), "eos": END}
    if masked:
        words = {"special": tuple(GAPS.values()), "eos": None, **GAPS}
    # Characters that occur only in the held-out part need ids, too.
    corpus = texts if recipe.cutting != "characters" else [*texts, *held]
    tokenizer = find_tokenizer(files, recipe, folder, corpus, words, say)
    ends = find_ends(tokenizer, recipe, single=len(texts) == 1 and len(held) <= 1)
    how = {**ends._asdict(), "fixed": fixed}
    tokens = encode_texts(texts, tokenizer, folder / "train.tokens", **how)
    say(f"{tokens.n_tokens:,} tokens in {tokens.n_documents:,} documents")
    special, hide = tokenizer.special, None
    first = special.eos if special.bos is None else special.bos
    ids = {"eos_token_id": special.eos, "bos_token_id": first}
    if masked:
        assert special.mask is not None
        ids = {"pad_token_id": special.pad}
        hide = MaskedTokens(special.mask, tokenizer.vocab_size, special.all, recipe.train.seed)
        check_known(tokens, tokenizer, recipe, say)
    model = build(recipe, tokenizer, ids)
    text, valid = pack(tokens, recipe, ends), None
    if held:
        held_tokens = encode_texts(held, tokenizer, folder / "valid.tokens", **how)
        if count_asked(held_tokens, tokenizer, recipe):
            valid = pack(held_tokens, recipe, ends, shorten=True)
        else:
            say("no token of the held-out text can be asked for: there is no evaluation")
    return Prepared(model, LanguageTask(text, valid, hide), tokenizer)


def check_known(tokens: TokenFile, tokenizer: Tokenizer, recipe: Recipe, say: Say) -> None:
    """Report the number of unknown tokens, which are never targets; refuse a text of them alone."""
    unk = tokenizer.special.unk
    n_known = count_asked(tokens, tokenizer, recipe)
    n_unknown = 0 if unk is None else int(count_ids(tokens)[unk])
    of = f"{n_unknown:,} of {n_unknown + n_known:,}" if n_known else f"all {n_unknown:,}"
    what = f"{of} tokens of the text are {None if unk is None else tokenizer.token(unk)}"
    why = "which is never asked for: words with rare letters, or of over 100 letters"
    said = f"{what}, {why}; --set cutting=bpe has a token for everything"
    if not n_known:
        raise BadData(said)
    if n_unknown >= TOLD * (n_unknown + n_known):
        say(said)


def count_asked(tokens: TokenFile, tokenizer: Tokenizer, recipe: Recipe) -> int:
    """Count the tokens that may be targets: if masked, those not special; else all but the first.

    "The first" is that of each document if the recipe keeps documents apart, else of the text.
    """
    if recipe.task == "masked":
        return tokens.n_tokens - int(count_ids(tokens)[list(tokenizer.special.all)].sum())
    n_first = np.count_nonzero(np.diff(tokens.bounds)) if recipe.documents else 1
    return max(0, tokens.n_tokens - int(n_first))


class Ends(NamedTuple):
    """The token ids put before and after each document."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def find_ends(tokenizer: Tokenizer, recipe: Recipe, *, single: bool) -> Ends:
    """Find what stands around each document: [CLS] and [SEP] for a masked model.

    For a language model it is the end token, unless the text is a single document, and before each
    document the tokens that a given tokenizer puts before every text, and so before every prompt.
    """
    around = tokenizer.encode("").ids
    if recipe.task != "masked":
        eos = tokenizer.special.eos
        read = tokenizer.encode("a" if around else "")
        before = takewhile(lambda one: one[1], zip(read.ids, read.special_mask, strict=True))
        return Ends(tuple(n for n, _ in before), () if single or eos is None else (eos,))
    if tokenizer.special.mask is None or len(around) != 2:
        has = "names no mask token" if tokenizer.special.mask is None else ""
        has = has or f"puts {len(around)} tokens around a text, not one before it and one behind it"
        todo = "let one be trained, or give one such as BERT's or RoBERTa's"
        raise ValueError(f"the tokenizer {has}, which filling gaps needs: {todo}")
    return Ends((around[0],), (around[1],))


def pack(tokens: TokenFile, recipe: Recipe, ends: Ends, *, shorten: bool = False) -> PackedText:
    """Pack tokens into the recipe's windows; `shorten`: into windows no longer than the text."""
    masked = recipe.task == "masked"
    most = tokens.n_tokens - (0 if masked else 1)
    return PackedText(
        tokens,
        context=min(recipe.context, most) if shorten else recipe.context,
        rows=recipe.rows,
        seed=recipe.train.seed,
        documents=recipe.documents,
        shifted=not masked,
        frame=(ends.before[0], ends.after[0]) if masked else None,
    )


def prepare_pairs(files: Files, recipe: Recipe, folder: Path, say: Say, fixed: bool) -> Prepared:
    sides = read_sides(files.data, files.target, say)
    if files.valid is not None:
        held = read_sides(files.valid, files.valid_target, say)
    else:
        sides, held = hold_out_pairs(sides)
    say_shared([*zip(*held, strict=True)], zip(*sides, strict=True), "pairs", say)
    names = [f"<2{name}>" for name in files.languages] if recipe.both_ways else []
    words = {"special": (PAD, START, END, *names), "pad": PAD, "bos": START, "eos": END}
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
    if not recipe.both_ways:
        # Without directions, translating encodes with the model's tokenizer alone, so that must add
        # the end token, as in training.
        model.tokenizer = ending(tokenizer, END)
    return Prepared(model, TranslationTask(paired, pair("valid", held)), tokenizer)


# ---- Parts


def build(recipe: Recipe, tokenizer: Tokenizer, extra: dict[str, Any]) -> Transformer:
    # None rather than left out: transformers would fill in the ids of its default vocabulary.
    unknown: dict[str, Any] = dict.fromkeys(filter(names_tokens, recipe.model))
    words = {**recipe.model, **unknown, **extra, "vocab_size": tokenizer.vocab_size}
    if recipe.task == "masked":
        words = {"max_position_embeddings": recipe.context, **words}
    config = config_of(words)
    check_kind(config, recipe)
    # No pooler: nothing here would train it.
    model = Transformer(replace(config, head=replace(config.head, pooler=False)))
    model.tokenizer = tokenizer
    limit = model.config.max_len
    longest = recipe.max_len if recipe.task == "translate" else recipe.context
    if limit is not None and longest > limit:
        what = f"texts have up to {longest} tokens, but the model takes {limit}"
        raise ValueError(f"{what}: lower context or max_len, or choose a model that takes more")
    return model


def check_kind(config: ModelConfig, recipe: Recipe) -> None:
    """Refuse a model of another kind than the task, such as a decoder for masked modelling."""
    kind: TaskKind = "lm" if config.decoder else "masked"
    kind = "translate" if config.decoder and config.encoder else kind
    if kind != recipe.task:
        what = f"a model of the kind {config.family!r} is trained by {COMMANDS[kind]}"
        raise ValueError(f"{what}, not by {COMMANDS[recipe.task]}; choose another one")


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


def say_shared(held: Sequence[Any], texts: Iterable[Any], units: str, say: Say) -> None:
    """Report held-out items that are also in the training data, which flatter the evaluation."""
    known = set(texts)
    if n_shared := sum(one in known for one in held):
        say(f"{n_shared:,} of {len(held):,} held-out {units} are learned from too, word for word")


def hold_out_text(texts: list[str]) -> tuple[list[str], list[str]]:
    if len(texts) == 1:
        cut = int(len(texts[0]) * (1.0 - LONG_DOCUMENT))
        return [texts[0][:cut]], [texts[0][cut:]]
    n_held = max(1, round(len(texts) * HELD_OUT))
    return texts[:-n_held], texts[-n_held:]


def hold_out_pairs(sides: Sides) -> tuple[Sides, Sides]:
    """Hold out the last pairs; of repeated pairs, copies may be in both parts."""
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
    """Load the given tokenizer or this run's own, else train one (`words`: its special tokens)."""
    kept = folder / "tokenizer"
    if files.tokenizer is not None:
        return Tokenizer.load(files.tokenizer)
    if (kept / "tokenizer.json").is_file():
        return Tokenizer.load(kept)
    say(f"training a vocabulary of {recipe.vocab_size:,} tokens")
    tokenizer = train_tokenizer(texts, recipe.vocab_size, kind=recipe.cutting, **words)
    if recipe.cutting != "characters":
        say_notices(vocabulary_notices(tokenizer, recipe.vocab_size), say)
    # Several files: written beside and renamed together, so that a kill cannot leave only some.
    with replace_folder(kept) as beside:
        tokenizer.save(beside)
    return tokenizer


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
    """Encode sources and targets; with prefixes (language tokens), each pair in both directions."""

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
    """The path of the ids of one side of the pairs: 0 the sources, 1 the targets."""
    return folder / f"{name}.{side}.{kind}.tokens"


def joined(path: Path, one: TokenFile, other: TokenFile) -> TokenFile:
    fingerprint = f"{one.fingerprint}+{other.fingerprint}"
    if (found := reuse_tokens(path, fingerprint)) is not None:
        return found
    spans = ((tokens.ids, pairwise(tokens.bounds.tolist())) for tokens in (one, other))
    rows = (ids[first:end] for ids, bounds in spans for first, end in bounds)
    return write_tokens(path, rows, vocab_size=one.vocab_size, fingerprint=fingerprint)
