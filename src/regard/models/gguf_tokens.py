"""Converts the tokenizer in a GGUF file to an equivalent `tokenizer.json`.

Why: ids must be those the model was trained on, and `regard.tokens` reads `tokenizer.json`.

How: the file has the pieces, their kinds, and one of two models:

- "gpt2", byte-level BPE: merges in order, and the name of the rule that splits text into words
  first (pre-tokenizer). llama.cpp has these rules in its source; those of models of our families
  are here. An unknown name is refused: a wrong rule gives wrong ids silently.
- "llama", SentencePiece's BPE: no merges, but a score for each piece. Two neighbours are merged to
  the piece with the best score, so every split of a piece in two is a merge, ranked by its score.

Control tokens are special; user-defined ones are matched whole in text, but count as text.

Left out: WordPiece, Unigram and RWKV vocabularies, and text normalisation by character maps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from regard._files import spell
from regard.models.gguf_header import Metadata
from regard.models.header import BadCheckpoint
from regard.tokens import Tokenizer, files

KEY = "tokenizer.ggml"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MAX_PIECE = 1_000  # characters; `find_merges` tries a split at each of them

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
ENDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = SHORT + ENDS % "{1,3}"
QWEN2 = SHORT + ENDS % ""
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "phi-2", "jina-en"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), (QWEN2,)),
    "tekken": (TEKKEN,),
}
"""Regular expressions by rule: each splits the pieces of the one before; what it does not match
stays whole."""
LLAMA3_LIKE = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
"""Rules of vocabularies in which a word that is a piece becomes that piece, whatever the merges
say, and whose models expect a bos token, unless the file says otherwise."""

ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
SENTENCEPIECE_IDS = {"unk": 0, "bos": 1, "eos": 2}
"""The format's default ids for "llama" vocabularies."""


def find_roles(metadata: Metadata, n_tokens: int) -> dict[str, int]:
    found: dict[str, int] = {}
    is_llama = metadata.word(f"{KEY}.model", "none") == "llama"
    for role, word in ROLES.items():
        key = f"{KEY}.{word}_token_id"
        number = metadata.token(key, n_tokens)
        if is_llama and not metadata.has(key) and SENTENCEPIECE_IDS.get(role, n_tokens) < n_tokens:
            number = SENTENCEPIECE_IDS[role]
        if number is not None:
            found[role] = number
    return found


def find_tokens(metadata: Metadata, n_tokens: int) -> dict[str, Any]:
    """The token ids of a `config.json`; eos includes the end-of-turn token of chat models."""
    roles = find_roles(metadata, n_tokens)
    ends = {roles.get("eos"): None, metadata.token(f"{KEY}.eot_token_id", n_tokens): None}
    known = [end for end in ends if end is not None]
    eos = known if len(known) > 1 else next(iter(known), None)
    return {"bos_token_id": roles.get("bos"), "eos_token_id": eos, "pad_token_id": roles.get("pad")}


def make_tokenizer(metadata: Metadata, n_rows: int) -> Tokenizer | None:
    """The tokenizer of the file, for an embedding with `n_rows` rows; None if there is none."""
    kind = metadata.word(f"{KEY}.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    metadata.choice(f"{KEY}.model", ("gpt2", "llama"), "none")
    pieces = metadata.words(f"{KEY}.tokens")
    vocab = {piece: number for number, piece in enumerate(pieces)}
    if len(vocab) != len(pieces) or not 0 < len(pieces) <= n_rows:
        raise BadCheckpoint(
            f"{metadata.where}: {KEY}.tokens has {len(pieces)} pieces, {len(vocab)} of them "
            f"different; expected all different, and at most {n_rows}, as the embedding has rows"
        )
    kinds = [NORMAL] * len(pieces)
    if metadata.has(f"{KEY}.token_type"):
        kinds = metadata.numbers(f"{KEY}.token_type", len(pieces))
    roles = find_roles(metadata, len(pieces))
    make = make_byte_level if kind == "gpt2" else make_sentencepiece
    tokenizer = {"version": "1.0", **make(metadata, pieces, vocab, roles)}
    plain = {"single_word": False, "lstrip": False, "rstrip": False}
    tokenizer["added_tokens"] = [
        {
            "id": number,
            "content": piece,
            "special": what != USER_DEFINED,
            "normalized": "\u2581" in piece and what == USER_DEFINED,
            **plain,
        }
        for number, (piece, what) in enumerate(zip(pieces, kinds, strict=True))
        if (what in (CONTROL, USER_DEFINED) or number in roles.values()) and piece
    ]
    config: dict[str, Any] = {f"{role}_token": pieces[number] for role, number in roles.items()}
    if metadata.has("tokenizer.chat_template"):
        config["chat_template"] = metadata.word("tokenizer.chat_template")
    try:
        return Tokenizer.from_parts(json.dumps(tokenizer, ensure_ascii=False), config)
    except ValueError as wrong:
        raise BadCheckpoint(f"{metadata.where}: its tokenizer is not usable: {wrong}") from wrong


def make_byte_level(
    metadata: Metadata, pieces: list[str], vocab: dict[str, int], roles: Mapping[str, int]
) -> dict[str, Any]:
    rule = metadata.word(f"{KEY}.pre", "default")
    if rule not in SPLITS:
        expected = f"a known rule for splitting text ({', '.join(SPLITS)})"
        another = "load the model from its Hugging Face folder instead"
        raise metadata.wrong(f"{KEY}.pre", rule, f"{expected}; {another}")
    merges = []
    for merge in metadata.words(f"{KEY}.merges"):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            what = f"{metadata.where}: {KEY}.merges has {spell(merge)}; expected two pieces of"
            raise BadCheckpoint(f"{what} the vocabulary with a space between, which make a third")
        merges.append([left, right])
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in SPLITS[rule]
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    # The space is added before the text is split, and only the rule splits (no ByteLevel regex).
    spaced = metadata.flag(f"{KEY}.add_space_prefix", False)
    before = [{"type": "Prepend", "prepend": " "}] if spaced else []
    bytes_only = {**level, "use_regex": False}
    whole = {"ignore_merges": rule in LLAMA3_LIKE}
    return {
        "normalizer": {"type": "Sequence", "normalizers": before} if before else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytes_only]},
        "post_processor": put_around(metadata, pieces, roles, rule in LLAMA3_LIKE),
        "decoder": bytes_only,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, **whole},
    }


def make_sentencepiece(
    metadata: Metadata, pieces: list[str], vocab: dict[str, int], roles: Mapping[str, int]
) -> dict[str, Any]:
    if metadata.has(f"{KEY}.precompiled_charsmap"):
        what = f"{metadata.where} normalises text by a map of characters, which is not supported"
        raise BadCheckpoint(f"{what}; load the model from its Hugging Face folder instead")
    scores = metadata.numbers(f"{KEY}.scores", len(pieces))
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    ]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if metadata.flag(f"{KEY}.add_space_prefix", True):
        steps.insert(0, {"type": "Prepend", "prepend": "\u2581"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": put_around(metadata, pieces, roles, True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": find_merges(metadata.where, vocab, scores),
            "unk_token": pieces[roles["unk"]] if "unk" in roles else None,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def find_merges(where: str, vocab: Mapping[str, int], scores: list[float]) -> list[list[str]]:
    """Every split of a piece into two pieces, best score first; ties by the order of pieces."""
    found: list[tuple[float, int, list[str]]] = []
    for piece, number in vocab.items():
        score = scores[number]
        if not math.isfinite(score) or len(piece) > MAX_PIECE:
            what = f"{where}: piece {spell(piece)} has {len(piece)} characters and score {score}"
            raise BadCheckpoint(f"{what}; expected at most {MAX_PIECE}, and a finite score")
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[number], number, [left, right]))
    found.sort(key=lambda merge: merge[:2])
    return [pair for _, _, pair in found]


def put_around(
    metadata: Metadata, pieces: list[str], roles: Mapping[str, int], with_bos: bool
) -> dict[str, Any] | None:
    first = metadata.flag(f"{KEY}.add_bos_token", with_bos) and "bos" in roles
    last = metadata.flag(f"{KEY}.add_eos_token", False) and "eos" in roles
    if not first and not last:
        return None
    before = {pieces[roles["bos"]]: roles["bos"]} if first else {}
    return files.surround(before, {pieces[roles["eos"]]: roles["eos"]} if last else {})
