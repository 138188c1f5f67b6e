"""Stop tokens and stop strings: where a generated text ends.

Why: a stop string may span several tokens, end within one, or share its beginning with ordinary
text. Streamed text cannot be taken back.

How: `find_tokens` returns the special tokens of a model, including those in the
`generation_config.json` beside its weights: chat models name their end-of-turn token only there.
`TextWatch` decodes one row: it returns text that is certain, whole characters only, and holds back
an ending that could be the beginning of a stop string. A row stops with the first token after which
its text contains a stop string, and its text ends just before that string.

Left out: bad words of more than one token, which `generation_config.json` may name.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import replace

from regard._files import read_json
from regard.generation.config import GenerationConfig
from regard.models import BadCheckpoint, SpecialTokens, Transformer
from regard.tokens import Tokenizer

BESIDE = "generation_config.json"
MAX_BYTES = 1 << 24
HALF = "\N{REPLACEMENT CHARACTER}"
N_BEFORE = 32  # tokens of the prompt that are decoded first, as context


def find_tokens(model: Transformer) -> SpecialTokens:
    """The model's special tokens, updated from the generation_config.json beside its weights.

    If that file exists, forced and suppressed tokens come from it alone; other tokens only if it
    names them.
    """
    tokens, size = model.config.tokens, model.config.vocab_size
    path = None if model.origin is None else model.origin / BESIDE
    if path is None or not os.path.lexists(path):  # for a broken link, reading below raises
        return known_tokens(tokens, size)
    beside = read_json(path, MAX_BYTES, BadCheckpoint)

    def ids(key: str) -> tuple[int, ...] | None:
        value = beside.get(key)
        if value is None:
            return None
        found = tuple(value) if isinstance(value, list) else (value,)
        for at in found:
            if not isinstance(at, int) or isinstance(at, bool) or at >= model.config.vocab_size:
                raise BadCheckpoint(
                    f"{path}: {key} is {value!r:.99}; expected token ids below "
                    f"{model.config.vocab_size}; correct the file, or remove it"
                )
        return tuple(at for at in found if at >= 0)

    def one(key: str, default: int | None) -> int | None:
        return (ids(key) or (default,))[0]

    # Only bad words of one token: one of several tokens could be refused only at its last token.
    words = beside.get("bad_words_ids") or []
    good = isinstance(words, list) and all(isinstance(word, list) for word in words)
    bad = tuple(word[0] for word in words if len(word) == 1) if good else ()
    if not good or not all(type(at) is int and at >= 0 for at in bad):
        raise BadCheckpoint(f"{path}: bad_words_ids is {words!r:.99}; expected lists of token ids")
    eos = ids("eos_token_id")
    told = replace(
        tokens,
        pad=one("pad_token_id", tokens.pad),
        bos=one("bos_token_id", tokens.bos),
        eos=tokens.eos if eos is None else eos,
        decoder_start=one("decoder_start_token_id", tokens.decoder_start),
        forced_bos=one("forced_bos_token_id", None),
        forced_eos=one("forced_eos_token_id", None),
        suppressed=(ids("suppress_tokens") or ()) + bad,
    )
    return known_tokens(told, size)


def known_tokens(tokens: SpecialTokens, size: int) -> SpecialTokens:
    """Drop ids outside the vocabulary: configs of small models often keep those of a large one."""
    for name in ("decoder_start", "forced_bos", "forced_eos"):
        at = getattr(tokens, name)
        if at is not None and at >= size:
            what = f"config.json: {name}_token_id is {at}; expected a token id below {size}"
            raise BadCheckpoint(f"{what}, since every text gets this token; correct the file")
    pad, bos = (None if at is None or at >= size else at for at in (tokens.pad, tokens.bos))
    return replace(tokens, pad=pad, bos=bos, eos=tuple(at for at in tokens.eos if at < size))


def find_stop_tokens(
    config: GenerationConfig, tokens: SpecialTokens, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Every token that ends a row; stop strings that name a special token stand for its id."""
    found = () if config.ignore_eos else tokens.eos
    found += tuple(config.stop_tokens)
    if tokenizer is not None:
        found += tuple(at for at in tokenizer.special.all if tokenizer.token(at) in config.stop)
    return tuple(dict.fromkeys(found))


class TextWatch:
    """Decodes one row token by token, and finds stop strings."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str], ends: Sequence[int]
    ) -> None:
        """prompt: the tokens before, whose text is not returned. ends: the stop tokens."""
        self.stopped = False  # whether a stop string was found
        self._stops = tuple(stops)
        self._ends = frozenset(ends)
        self._vocab_size = tokenizer.vocab_size
        self._stream = tokenizer.decode_stream()
        for token in prompt[-N_BEFORE:]:
            self._add(token)
        # Prompt text that the stream still holds back will come out first, and must be skipped.
        self._foreign = len(self._held())
        self._kept = ""  # text that is certain, but may be the beginning of a stop string

    def step(self, token: int) -> str:
        """Add a token and return the text that is now certain; "" for a stop token."""
        if token in self._ends:
            return ""
        self._kept += self._own(self._add(token))
        text = self._kept + self._held()[self._foreign :] if self._stops else ""
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._kept = True, ""
            return text[: min(found)]
        cut = len(self._kept) - self._n_begun()
        given, self._kept = self._kept[:cut], self._kept[cut:]
        return given

    def finish(self) -> str:
        """The text held back, at the end of the row; incomplete characters are dropped."""
        rest = self._own(self._stream.finish())
        return "" if self.stopped else self._kept + rest.rstrip(HALF)

    def _add(self, token: int) -> str:
        # A model's embedding may have more rows than its tokenizer has tokens; these have no text.
        return self._stream.step(token) if token < self._vocab_size else ""

    def _own(self, text: str) -> str:
        n = min(self._foreign, len(text))
        self._foreign -= n
        return text[n:]

    def _held(self) -> str:
        """The text that the stream holds back, as it would be if the stream ended now."""
        return copy.copy(self._stream).finish() if self._stream.waiting else ""

    def _n_begun(self) -> int:
        """How many characters at the end of `_kept` are the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        ends = (self._kept[-n:] for n in range(min(longest, len(self._kept)), 0, -1))
        return len(next((end for end in ends if any(s.startswith(end) for s in self._stops)), ""))
