"""Text to ids and back, and the characters of each token.

Why: models work on ids, people on text. Pictures of attention need the characters of each token,
and generation needs text as soon as it is certain.

How: the `tokenizers` package does the work on a `tokenizer.json`, as usual, so ids agree with those
that the model was trained on. Added here are safeguards. Nothing is cut: truncation and padding
settings in the file are switched off, and only kept for saving. Strings with lone surrogates and
unknown ids are refused. Offsets are characters of the given text. Special tokens and chat templates
are plain data, checked against the vocabulary. A stream returns text as soon as it is certain
(`stream.py`), a chat template runs in a sandbox (`chat.py`), and saving writes exactly the files
that were read (`files.py`).

All results are lists of plain numbers, without torch.

Left out: pairs of texts, training a tokenizer, adding tokens, and `clean_up_tokenization_spaces`,
which rewrites decoded text after the tokenizer's own decoder is done.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, final

from regard.tokens import chat, files
from regard.tokens.stream import HALF, TextStream, decoder_kinds, is_steady

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Ids of the special tokens; None where the tokenizer has none."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None
    sep: int | None = None
    cls: int | None = None
    mask: int | None = None
    all: tuple[int, ...] = ()
    """Every special id, named above or not, in ascending order; `decode` skips them by default."""


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """One text as tokens; all lists have one entry for each token."""

    text: str
    ids: list[int]
    tokens: list[str]
    """The pieces as the vocabulary stores them, for example "Ġworld" or "##ing"."""
    offsets: list[tuple[int, int]]
    """(start, end) of the token's characters in `text`. Tokens that share a character (hold some of
    its bytes) all have it; a token that the tokenizer added has none: (0, 0)."""
    special_mask: list[bool]
    """True for special tokens, added or written in the text by name; not for unknown words."""
    words: list[int | None]
    """The index of the token's word, as the tokenizer splits words; None for added tokens."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Several texts as rows of one length. `real` is False where a row is padded."""

    ids: list[list[int]]
    real: list[list[bool]]
    rows: list[Encoding]
    """The texts one by one, without padding."""


@dataclass(frozen=True, kw_only=True)
class Spans:
    """A text, and (start, end) of each token's characters in it."""

    text: str
    spans: list[tuple[int, int]]


@final
class Tokenizer:
    """A tokenizer as a model ships it: `model.tokenizer`, `Tokenizer.load`, `Tokenizer.from_parts`.

    `special` has the ids of the special tokens, None for those that it does not have. Truncation
    and padding settings in `tokenizer.json` are switched off, so that a long text gives all of its
    tokens; `save` writes them again, as they were.

    Example:
        >>> tokenizer = regard.load("embedded:lm").tokenizer
        >>> said = tokenizer.encode("Two birds")
        >>> tokenizer.decode(said.ids), said.offsets[-1]
        ('Two birds', (3, 9))
    """

    special: SpecialTokens
    chat_templates: Mapping[str, str]
    """Name -> Jinja text; the usual one is "default"."""

    def __init__(self, texts: Mapping[str, str], origin: str) -> None:
        """`texts`: file name -> content, as `load` reads them; `origin` is named in errors."""
        described = files.parse(texts, files.TOKENIZER, origin)
        named = files.special_tokens(texts, origin)
        self._texts = dict(texts)
        self._origin = origin
        self.chat_templates = MappingProxyType(files.chat_templates(texts, origin))
        with _plain_errors(f"{origin}: {files.TOKENIZER} is damaged", files.ANOTHER_COPY):
            text = files.apply_config(texts, described, origin)
            backend: tokenizers.Tokenizer = _backend_module().Tokenizer.from_str(text)
            backend.no_truncation()
            backend.no_padding()
            if files.parse(texts, files.CONFIG, origin).get("split_special_tokens") is True:
                backend.encode_special_tokens = True
        self._backend = backend
        self._add_missing(files.added_tokens(texts, origin))
        self._ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self._pieces = {number: piece for piece, number in self._ids.items()}
        self._check_vocabulary(described)
        self.special = self._mark_special(named)
        self._skipped = frozenset(self.special.all)
        # The decoder as the backend parsed it, which is lenient about what the file says.
        decoder: Any = backend.decoder
        self._kinds = decoder_kinds(json.loads(decoder.__getstate__()) if decoder else None)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Tokenizer:
        """From a Hugging Face folder, or from a `tokenizer.json` alone (which names no special
        tokens and has no chat template).

        A folder with GPT-2's `vocab.json` and `merges.txt` only is read too. FileNotFoundError:
        there is no tokenizer; ValueError: there is one, and it is damaged or not of our kind.
        """
        _backend_module()
        return Tokenizer(files.read_texts(Path(path)), str(path))

    @staticmethod
    def from_parts(tokenizer_json: str, config: Mapping[str, Any] | None = None) -> Tokenizer:
        """From the text of a `tokenizer.json`, and what a `tokenizer_config.json` would hold."""
        if not isinstance(tokenizer_json, str):
            kind = type(tokenizer_json).__name__
            raise TypeError(f"tokenizer_json is a {kind}, expected the text of a tokenizer.json")
        texts = {files.TOKENIZER: tokenizer_json}
        if config is not None:
            texts[files.CONFIG] = json.dumps(dict(config), ensure_ascii=False, indent=2)
        return Tokenizer(texts, "from_parts")

    @property
    def texts(self) -> Mapping[str, str]:
        """File name -> content, as `save` writes them."""
        return MappingProxyType(self._texts)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the files that this tokenizer was made from, unchanged."""
        files.write_texts(Path(folder), self._texts)

    def encode(self, text: str, *, special: bool = True) -> Encoding:
        """The tokens of a text; `special` adds the special tokens that the model expects around it.

        The names of special tokens in the text itself are read as these tokens either way.
        """
        return self._encode_all([text], special)[0]

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        special: bool = True,
        side: Literal["left", "right"] = "right",
    ) -> Batch:
        """Several texts, padded to the longest on the given side: left for generation.

        Padding is `special.pad`, or 0 if there is none; `real` is False at padding.
        """
        if isinstance(texts, str):
            raise TypeError("texts is one text, expected a list of texts; use encode for one")
        if side not in ("left", "right"):
            raise ValueError(f"side is {side!r}, expected 'left' or 'right'")
        rows = self._encode_all(list(texts), special)
        width = max((len(row.ids) for row in rows), default=0)
        filler = self.special.pad or 0
        ids, real = [], []
        for row in rows:
            gap = width - len(row.ids)
            before, after = (gap, 0) if side == "left" else (0, gap)
            ids.append([filler] * before + row.ids + [filler] * after)
            real.append([False] * before + [True] * len(row.ids) + [False] * after)
        return Batch(ids=ids, real=real, rows=rows)

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special: bool = True) -> str:
        """The text of ids, by the tokenizer's own decoder; invalid UTF-8 becomes U+FFFD."""
        return self._decode(self._known(ids), skip_special)

    def decode_stream(self, *, skip_special: bool = True) -> TextStream:
        """Decode ids one by one: `.step(id)` returns the text that became certain, never half a
        character, and `.finish()` the rest. Together they are what `decode` returns."""

        def piece(number: int) -> str:
            known = self._known([number])[0]
            return "" if skip_special and known in self._skipped else self._pieces[known]

        return TextStream(lambda ids: self._decode(ids, False), piece, self._kinds)

    def spans(
        self, tokens: Encoding | Iterable[SupportsIndex], *, skip_special: bool = False
    ) -> Spans:
        """The characters of each token: in the encoded text, or in the text that ids decode to.

        Tokens that hold parts of one character all have that character. With `skip_special`, ids of
        special tokens have no characters. Every character of decoded text belongs to some token.
        """
        if isinstance(tokens, Encoding):
            return Spans(text=tokens.text, spans=list(tokens.offsets))
        if not is_steady(self._kinds):
            raise ValueError(
                f"{self._origin}: the decoder ({', '.join(self._kinds)}) rewrites text across "
                "tokens, so ids do not tell which characters are whose; give an Encoding"
            )
        stream = self.decode_stream(skip_special=skip_special)
        text, spans = "", []
        run: list[int] = []  # byte tokens in a row, whose characters are known only at its end
        for index, number in enumerate(self._known(tokens)):
            text += stream.step(number)
            if skip_special and number in self._skipped:
                spans.append((len(text), len(text)))
                continue
            if run and not stream.in_run:
                _share(spans, run, text[: stream.start])
                run = []
            if stream.in_run:
                run.append(index)
                spans.append((len(text), len(text)))
            else:
                spans.append((stream.start, len(text) + stream.waiting))
        text += stream.finish()
        if run:
            _share(spans, run, text)
        return Spans(text=text, spans=spans)

    def token(self, number: int) -> str:
        """The piece with this id, as the vocabulary stores it."""
        return self._pieces[self._known([number])[0]]

    def id(self, token: str) -> int:
        """The id of a piece, written as the vocabulary stores it."""
        if token not in self._ids:
            what = f"{token!r} is not a token of this vocabulary of {len(self._ids)}"
            raise ValueError(f"{what}; encode gives the tokens of a text")
        return self._ids[token]

    @property
    def vocab_size(self) -> int:
        """The largest id + 1, including added tokens; an embedding needs at least so many rows."""
        return max(self._pieces, default=-1) + 1

    @property
    def chat_template(self) -> str | None:
        """The template that `apply_chat` uses by default."""
        return self.chat_templates.get("default")

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        template: str = "default",
        **names: Any,
    ) -> str:
        """The prompt that the model's chat template makes of messages ("role", "content").

        Encode it with `special=False`: templates write the special tokens themselves. Further
        `names` (such as `tools`) are passed to the template. It runs in a sandbox (`chat.py`).
        """
        if template not in self.chat_templates:
            there = ", ".join(sorted(self.chat_templates)) or "none"
            what = f"{self._origin}: no chat template {template!r} (there: {there});"
            raise ValueError(f"{what} write the prompt as text yourself, or name one that is there")
        roles = {role: getattr(self.special, role) for role in files.ROLES}
        known = {f"{role}_token": self._pieces[at] for role, at in roles.items() if at is not None}
        given = {**known, "add_generation_prompt": add_generation_prompt, **names}
        return chat.render(self.chat_templates[template], messages, given)

    def __repr__(self) -> str:
        return f"Tokenizer({self._origin!r}, vocab_size={self.vocab_size})"

    def _encode_all(self, texts: list[str], special: bool) -> list[Encoding]:
        for text in texts:
            _check_text(text)
        todo = "the tokenizer has no token for this text, or its file is damaged"
        with _plain_errors(f"{self._origin}: cannot encode", todo):
            if len(texts) == 1:  # a batch starts threads, which do not survive a later fork
                found = [self._backend.encode(texts[0], add_special_tokens=special)]
            else:
                found = self._backend.encode_batch(texts, add_special_tokens=special)
        return [self._to_encoding(text, given) for text, given in zip(texts, found, strict=True)]

    def _to_encoding(self, text: str, given: tokenizers.Encoding) -> Encoding:
        ids, tokens, offsets = given.ids, given.tokens, given.offsets
        rows = zip(given.special_tokens_mask, ids, tokens, offsets, strict=True)
        mask = [
            bool(added) or (number in self._skipped and text[start:end].strip() == token)
            for added, number, token, (start, end) in rows
        ]
        found: Any = {"ids": ids, "tokens": tokens, "offsets": offsets, "words": given.word_ids}
        return Encoding(text=text, special_mask=mask, **found)

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        if skip_special:
            ids = [number for number in ids if number not in self._skipped]
        if not ids:
            return ""  # some decoders fail on an empty list
        with _plain_errors(f"{self._origin}: the decoder fails on these ids", files.ANOTHER_COPY):
            return self._backend.decode(ids, skip_special_tokens=False)

    def _known(self, ids: Iterable[SupportsIndex]) -> list[int]:
        if isinstance(ids, (str, bytes)):
            raise TypeError(f"ids is {ids!r:.99}, expected integers; encode turns text into ids")
        numbers = [operator.index(number) for number in ids]
        for number in numbers:
            if number not in self._pieces:
                raise ValueError(
                    f"id {number} is no token: this vocabulary has {len(self._pieces)} tokens with "
                    f"ids below {self.vocab_size}; is it another model's tokenizer?"
                )
        return numbers

    def _check_vocabulary(self, described: Mapping[str, Any]) -> None:
        """Refuse renumbered added tokens and shared ids, both of which the backend accepts."""
        where = f"{self._origin}: {files.TOKENIZER}"
        if len(self._pieces) != len(self._ids):
            twice, at = next(item for item in self._ids.items() if self._pieces[item[1]] != item[0])
            what = f"{where} gives {twice!r} and {self._pieces[at]!r} the same id {at}"
            raise ValueError(f"{what}; {files.ANOTHER_COPY}")
        for entry in described.get("added_tokens") or ():
            wanted, got = entry["id"], self._ids.get(entry["content"])
            if wanted != got:
                what = f"{where} adds {entry['content']!r} as id {wanted}, but the vocabulary"
                raise ValueError(f"{what} in the same file makes it {got}; {files.ANOTHER_COPY}")

    def _add_missing(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Add tokens that only files beside `tokenizer.json` define; its own stay as they are."""
        there = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        new = {entry["content"]: entry for entry in reversed(told) if entry["content"] not in there}
        entries = [entry for entry in told if new.get(entry["content"]) is entry]
        make = _backend_module().AddedToken
        words = [{key: x for key, x in entry.items() if key != "id"} for entry in entries]
        self._backend.add_tokens([make(entry.pop("content"), **entry) for entry in words])
        for entry in entries:
            got = self._backend.token_to_id(entry["content"])
            if entry.get("id", got) != got:
                what = f"{self._origin}: the id of {entry['content']!r} is told as {entry['id']}"
                more = f"but the vocabulary of {files.TOKENIZER} makes it {got}"
                raise ValueError(f"{what}, {more}; {files.ANOTHER_COPY}")

    def _mark_special(self, named: Mapping[str, Mapping[str, Any]]) -> SpecialTokens:
        """Make tokens with a role special even if `tokenizer.json` does not; collect all ids."""
        before = self._backend.get_added_tokens_decoder()
        ids: dict[str, int] = {}
        for role, entry in named.items():
            content = entry["content"]
            if content not in self._ids:
                raise ValueError(
                    f"{self._origin}: {role}_token is {content!r}, which is not in the vocabulary "
                    f"of {files.TOKENIZER}; name a token that is there, or take the entry out"
                )
            ids[role] = self._ids[content]
            there = before.get(ids[role])
            if there is None or not there.special:
                how = {key: bool(entry.get(key, False)) for key in ("lstrip", "rstrip")}
                token = _backend_module().AddedToken(content, normalized=False, special=True, **how)
                self._backend.add_special_tokens([token])
        after = self._backend.get_added_tokens_decoder()
        return SpecialTokens(**ids, all=tuple(sorted(at for at, t in after.items() if t.special)))


def _share(spans: list[tuple[int, int]], run: list[int], text: str) -> None:
    first = spans[run[0]][0]
    letters = text[first:]
    owners = [first + at for at, letter in enumerate(letters) for _ in letter.encode("utf-8")]
    if letters == HALF * len(run):  # invalid UTF-8: then every byte became a U+FFFD of its own
        owners = [first + at for at in range(len(run))]
    for order, index in enumerate(run):
        # A decoder that strips can leave fewer bytes than tokens; then each token has all of them.
        exact = len(owners) == len(run)
        at = owners[order] if exact else first
        spans[index] = (at, at + 1 if exact else len(text))


def _backend_module() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        what = "reading a tokenizer needs the tokenizers package"
        raise ImportError(f"{what}: pip install 'regard[tokens]'") from error
    return tokenizers


@contextmanager
def _plain_errors(what: str, todo: str) -> Iterator[None]:
    """Turn the backend's bare `Exception`s and panics into a ValueError."""
    try:
        yield
    except ImportError:
        raise
    except BaseException as error:
        # A panic in the backend's Rust code is no Exception, and its class has no importable name.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {error}; {todo}") from error


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"text is a {type(text).__name__}, expected str; decode bytes first")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text has a lone surrogate {text[error.start]!a} at character {error.start}: half of "
            "a UTF-16 pair, no character; was it decoded with errors='surrogateescape'?"
        ) from error
