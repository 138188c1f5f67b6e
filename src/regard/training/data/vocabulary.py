r"""Train a tokenizer on texts: BPE (plain, within scripts, within words), characters, WordPiece.

Why: a model of one's own text needs a tokenizer of that text, saved in the files that every other
model has.

How: the `tokenizers` package counts and merges. What is decided here is where merges must stop, and
that `decode(encode(text))` is exactly the text:

- "bpe": bytes, merged within what GPT-2's pattern takes for words. Every text can be encoded.
- "scripts": characters, merged within one script, so that a Japanese word is never merged with its
  particle. Rare characters are spelled in bytes. A text that starts with neither Han nor kana gets
  a space in front, which the decoder removes, so that "Tom" is the same token at the start of a
  text and within it.
- "words": bytes, merged between spaces only, for text that is tokenised already. Every text gets a
  space in front, which the decoder removes.
- "characters": one id for each. A character that was not in the texts is refused, not dropped.

One kind does not give the text back, since it reads as BERT does:

- "wordpiece": lower case, split at spaces and punctuation, and within a word into the longest known
  pieces, of which all but the first begin with ##. A word with an unknown character is one unknown
  token. Accents stay, since stripping them would change Japanese letters into others.

The same texts give the same vocabulary: ties are broken by the characters themselves. If there are
a `cls` and a `sep` token, every text is put between them.

Left out: Unicode normalisation elsewhere (it would change the text), unigram models.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Literal, get_args

from regard._check import check_choice
from regard.tokens import Tokenizer
from regard.tokens.files import ROLES, TOKENIZER, surround
from regard.training.data.reading import BadData, Notice

Kind = Literal["bpe", "scripts", "words", "characters", "wordpiece"]

N_BYTES = 256
# The longest run without white space that the trainer gets: each merge walks through a whole run,
# so that one line of 10 MB would keep it busy for hours.
LONGEST_RUN = 1_000
RARE = 2  # a character seen less often gets no token of its own ("scripts" spells it in bytes)

_RUN = re.compile(rf"\S{{{LONGEST_RUN + 1},}}")
# Han and kana with their long-vowel marks; at the start of a text (_STARTS) also their punctuation
# and full-width forms.
_SPACELESS = r"\p{Han}\p{Hiragana}\p{Katakana}\u30FC\uFF70"
_STARTS = rf"\A(?=[^{_SPACELESS}\u3000-\u303F\uFF00-\uFFEF])"
_LETTER = rf"(?:(?![{_SPACELESS}])[\p{{L}}\p{{M}}])"
_SCRIPTS = "|".join(
    (
        r"'(?:s|t|re|ve|m|ll|d)(?!\p{L})",
        r"\p{Han}+",
        r"\p{Hiragana}[\p{Hiragana}\u30FC]*",
        r"[\p{Katakana}\u30FC\uFF70]+",
        rf" ?{_LETTER}+",
        r" ?\p{N}",
        r" ?[^\s\p{L}\p{M}\p{N}]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_WORDS = r" ?[^\s]+|\s+(?!\S)|\s+"


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    kind: Kind = "bpe",
    special: Sequence[str] = ("<|endoftext|>",),
    eos: str | None = "<|endoftext|>",
    **roles: str | None,
) -> Tokenizer:
    """Train a tokenizer with at most `vocab_size` tokens on the texts, `special` tokens first.

    `eos` and `roles` (bos, pad, unk, sep, cls, mask) name some of `special`. The texts may be too
    short for so many tokens: see `vocabulary_notices`.
    """
    roles = {"eos": eos, **roles}
    _check(vocab_size, kind, special, roles)
    if isinstance(texts, str):
        raise TypeError("texts is one text, expected a list of them")
    kept = [text for text in texts if text]
    if not any(text.strip() for text in kept):
        raise BadData("a vocabulary was asked for, but the texts are empty; give some text")
    make: dict[str, Any] = {"characters": _characters, "scripts": _by_script, "bpe": _by_byte}
    make["words"] = partial(_by_byte, words=_WORDS)
    make["wordpiece"] = partial(_word_pieces, unk=roles.get("unk") or "")
    plan = make[kind](kept, vocab_size, special)
    cls, sep, mask = (roles.get(role) for role in ("cls", "sep", "mask"))
    if cls is not None and sep is not None:
        ends = {role: [name, special.index(name)] for role, name in (("cls", cls), ("sep", sep))}
        plan["post_processor"] = {"type": "BertProcessing", **ends}
    for entry in plan["added_tokens"]:
        # A word of BPE includes the space before it, so the mask token must take in that space.
        entry["lstrip"] = kind == "bpe" and entry["content"] == mask
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config["clean_up_tokenization_spaces"] = False
    config |= {f"{role}_token": token for role, token in roles.items() if token is not None}
    return Tokenizer.from_parts(json.dumps(plan, ensure_ascii=False), config)


def ending(tokenizer: Tokenizer, end: str) -> Tokenizer:
    """Return a copy of the tokenizer that appends the token `end` to every text."""
    plan = json.loads(tokenizer.texts[TOKENIZER])
    plan["post_processor"] = surround({}, {end: tokenizer.id(end)})
    texts = {**tokenizer.texts, TOKENIZER: json.dumps(plan, ensure_ascii=False)}
    return Tokenizer(texts, "the tokenizer of a translator")


def vocabulary_notices(tokenizer: Tokenizer, vocab_size: int) -> tuple[Notice, ...]:
    """A notice if a trained vocabulary is smaller than the one asked for."""
    size = tokenizer.vocab_size
    text = f"the vocabulary has {size:,} tokens, not the {vocab_size:,} asked for"
    notice = Notice(f"{text}: the texts support no more", size)
    return () if size >= vocab_size else (notice,)


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep `tokenizers` from starting threads: if its process is forked later, it warns and may
    hang. Its calls release the GIL, so threads of our own serve as well."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def backend_module() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        what = "training a tokenizer needs the tokenizers package"
        raise ImportError(f"{what}: pip install 'regard[train]'") from error
    return tokenizers


# ---- Checks


def _check(
    vocab_size: int, kind: str, special: Sequence[str], roles: dict[str, str | None]
) -> None:
    if isinstance(special, str):
        raise TypeError(f"special is one text, {special!r}; expected a list of token names")
    if type(vocab_size) is not int or vocab_size < 1:
        raise ValueError(f"vocab_size is {vocab_size!r}, expected a whole number of tokens")
    check_choice("kind", kind, get_args(Kind))
    for role in roles:
        check_choice("the role of a token", role, ROLES)
    if len(set(special)) != len(special) or not all(special):
        raise ValueError(f"special tokens are {list(special)}; expected distinct, non-empty texts")
    for role, token in roles.items():
        if token is not None and token not in special:
            what = f"{role} is {token!r}, which is not among the special tokens {list(special)}"
            raise ValueError(f"{what}; add it there, or pass {role}=None")
    if kind == "wordpiece":
        if roles.get("unk") is None:
            raise ValueError("kind='wordpiece' needs a token for unknown words; name it by unk=")
        if vocab_size < len(special) + 4:
            what = f"vocab_size is {vocab_size}, of which {len(special)} tokens are special"
            raise BadData(f"{what}; that leaves no room for characters; ask for more")
        return
    n_fixed = N_BYTES + len(special)
    what = f"vocab_size is {vocab_size}, but {N_BYTES} bytes and {len(special)} special tokens"
    if kind != "characters" and vocab_size < n_fixed:
        raise BadData(f"{what} need {n_fixed} already; ask for more, or for kind='characters'")
    if kind == "scripts" and vocab_size < n_fixed + 2:
        raise BadData(f"{what} leave no room for characters; ask for more")


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """Split the texts for the trainer so that no run without white space is too long for it."""
    for text in texts:
        last = 0
        for run in _RUN.finditer(text):
            yield text[last : run.start()]
            for at in range(run.start(), run.end(), LONGEST_RUN):
                yield text[at : min(at + LONGEST_RUN, run.end())]
            last = run.end()
        yield text[last:] if last else text


# ---- The kinds


def _train(
    backend: Any, texts: Iterable[str], kind: str = "BpeTrainer", **how: Any
) -> dict[str, Any]:
    make = getattr(backend_module().trainers, kind)
    trainer = make(show_progress=False, min_frequency=2, **how)
    with one_thread():
        backend.train_from_iterator(_pieces(texts), trainer)
    plan: dict[str, Any] = json.loads(backend.to_str())
    return plan


def _by_byte(
    texts: list[str], vocab_size: int, special: Sequence[str], words: str | None = None
) -> dict[str, Any]:
    """Byte-level BPE, merged within words of GPT-2's pattern or, if given, of the regex `words`."""
    hf = backend_module()
    before, after = hf.pre_tokenizers, hf.decoders
    backend = hf.Tokenizer(hf.models.BPE())
    backend.pre_tokenizer = before.ByteLevel(add_prefix_space=False, use_regex=words is None)
    backend.decoder = after.ByteLevel()
    if words is not None:
        backend.normalizer = hf.normalizers.Prepend(" ")
        cut = before.Split(hf.Regex(words), "isolated")
        backend.pre_tokenizer = before.Sequence([cut, backend.pre_tokenizer])
        backend.decoder = after.Sequence([backend.decoder, after.Strip(" ", 1, 0)])
    alphabet = sorted(before.ByteLevel.alphabet())
    how: dict[str, Any] = {"special_tokens": list(special), "initial_alphabet": alphabet}
    return _train(backend, texts, vocab_size=vocab_size, **how)


def _by_script(texts: list[str], vocab_size: int, special: Sequence[str]) -> dict[str, Any]:
    """BPE on characters within scripts, with byte tokens put into the vocabulary before them."""
    hf = backend_module()
    before, after = hf.pre_tokenizers, hf.decoders
    n_free = vocab_size - N_BYTES - len(special)
    counts = Counter(chain.from_iterable(texts))
    counts[" "] += RARE  # it may stand in front of every text
    alphabet = _alphabet(counts, n_free // 2)
    backend = hf.Tokenizer(hf.models.BPE())
    backend.normalizer = hf.normalizers.Replace(hf.Regex(_STARTS), " ")
    backend.pre_tokenizer = before.Split(hf.Regex(_SCRIPTS), "isolated")
    backend.decoder = after.Sequence([after.ByteFallback(), after.Fuse(), after.Strip(" ", 1, 0)])
    how: dict[str, Any] = {"initial_alphabet": alphabet, "limit_alphabet": len(alphabet)}
    plan = _train(backend, texts, vocab_size=n_free, **how)
    model = plan["model"]
    learned = sorted(model["vocab"], key=model["vocab"].__getitem__)
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(N_BYTES)), *learned]
    model["vocab"] = {name: at for at, name in enumerate(names)}
    if len(model["vocab"]) != len(names):
        raise BadData("a special token has the name of a byte or of a learned piece; rename it")
    model["byte_fallback"] = True
    plan["added_tokens"] = _added(special)
    return plan


def _word_pieces(
    texts: list[str], vocab_size: int, special: Sequence[str], unk: str
) -> dict[str, Any]:
    """WordPiece as in BERT. The trainer would number letters within words in the order of a hash
    table and break ties by these numbers; so it gets all letters in order, as special tokens."""
    hf = backend_module()
    backend = hf.Tokenizer(hf.models.WordPiece(unk_token=unk))
    backend.normalizer = hf.normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    backend.pre_tokenizer = hf.pre_tokenizers.BertPreTokenizer()
    backend.decoder = hf.decoders.WordPiece()
    normalise, cut = backend.normalizer.normalize_str, backend.pre_tokenizer.pre_tokenize_str
    plain = [normalise(text) for text in texts]
    counts = Counter(letter for letter in chain.from_iterable(plain) if not letter.isspace())
    letters = _alphabet(counts, (vocab_size - len(special)) // 4)
    within = [f"##{letter}" for letter in letters if len(cut(normalise(f"a{letter}"))) == 1]
    how: dict[str, Any] = {"initial_alphabet": letters, "limit_alphabet": len(letters)}
    how["special_tokens"] = [*special, *letters, *within]
    plan = _train(backend, plain, "WordPieceTrainer", vocab_size=vocab_size, **how)
    plan["added_tokens"] = _added(special)
    return plan


def _alphabet(counts: Counter[str], limit: int) -> list[str]:
    """Choose the characters that get a token of their own: the most frequent, but no rare one."""
    often = [letter for letter, count in counts.items() if count >= RARE]
    often.sort(key=lambda letter: (-counts[letter], letter))
    return sorted(often[:limit])


def _characters(texts: list[str], vocab_size: int, special: Sequence[str]) -> dict[str, Any]:
    hf = backend_module()
    letters = set().union(*texts)
    names = [*special, *sorted(letters - set(special))]
    if len(names) > vocab_size:
        what = f"the texts have {len(letters)} characters, and {len(special)} tokens are special"
        todo = f"ask for {len(names)}, or for kind='bpe'"
        raise BadData(f"vocab_size is {vocab_size}, but {what}; {todo}")
    vocabulary = {name: at for at, name in enumerate(names)}
    # unk_token is not in the vocabulary, so the model refuses characters that it does not know.
    backend = hf.Tokenizer(hf.models.WordLevel(vocabulary, unk_token="<none>"))
    backend.pre_tokenizer = hf.pre_tokenizers.Split(hf.Regex(r"[\s\S]"), "isolated")
    backend.decoder = hf.decoders.Fuse()
    plan: dict[str, Any] = json.loads(backend.to_str())
    plan["added_tokens"] = _added(special)
    return plan


def _added(special: Sequence[str]) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    flags["special"] = True
    return [{"id": at, "content": name, **flags} for at, name in enumerate(special)]
