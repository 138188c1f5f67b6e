"""Tokenizers from GGUF files give the ids of the tokenizer that the file was made from."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_files import finish
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from regard.models import BadCheckpoint
from regard.models.gguf_header import read_gguf_header
from regard.models.gguf_tokens import SPLITS, make_tokenizer

TEXTS = [
    "The year 2024 had 366 days, didn't it?  And 1000000 more...",
    "  leading and trailing spaces   ",
    "Straße über naïve café\n\n\tdef f(x):\r\n        return x**2\n",
    "東京は日本の首都です。人口は１３９６万人。",
    "Привет, мир! Ещё раз: 12,5%",
    "مرحبا بالعالم ١٢٣ — שלום עולם",
    "नमस्ते दुनिया ½ ² Ⅷ",
    "emoji 👩‍👩‍👧‍👦 and 🏳️‍🌈 flags",
    "I'LL SAY we'Re HERE; it's o'clock'd",
    "a",
    "",
]
LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RULES: dict[str, Any] = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), LEVEL]),
    "qwen2": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), LEVEL]
    ),
}
"""As the `tokenizer.json` of GPT-2, SmolLM2, LLaMA 3 and Qwen2 have them."""


def train(rule: Any) -> Tokenizer:
    """A byte-level tokenizer in which numbers, spaces and words of the texts are merged."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = rule, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    made.train_from_iterator([text for text in TEXTS for _ in range(3)], trainer)
    return made


def read_back(path: Path, settle: Callable[[gguf.GGUFWriter], None], n_rows: int = 10_000) -> Any:
    """The tokenizer of a file with these keys, and one small tensor, since files must have one."""
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    settle(writer)
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    finish(writer)
    return make_tokenizer(read_gguf_header(path).metadata, n_rows)


def byte_level(original: Tokenizer, rule: str | None) -> Callable[[gguf.GGUFWriter], None]:
    import json

    model = json.loads(original.to_str())["model"]
    pieces = [original.id_to_token(n) for n in range(original.get_vocab_size())]

    def settle(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if rule is not None:
            writer.add_tokenizer_pre(rule)
        writer.add_token_list(pieces)
        writer.add_token_types([3, 3] + [1] * (len(pieces) - 2))
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_add_bos_token(False)

    return settle


@pytest.mark.parametrize("rule", RULES)
def test_byte_level_ids_are_those_of_the_original(tmp_path: Path, rule: str) -> None:
    """The vocabulary is trained under another rule, so that each split shows in the ids."""
    original = train(GPT2)
    original.pre_tokenizer = RULES[rule]
    original.model.ignore_merges = rule == "llama-bpe"
    tokenizer = read_back(tmp_path / "t.gguf", byte_level(original, rule))
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == original.encode(text).ids
        assert tokenizer.decode(ids) == text


def test_the_rules_differ_on_the_texts(tmp_path: Path) -> None:
    """So the test above can tell them apart."""
    original = train(GPT2)
    seen = set()
    for rule in ("gpt-2", "smollm", "llama-bpe", "qwen2", "default"):
        tokenizer = read_back(tmp_path / f"{rule}.gguf", byte_level(original, rule))
        seen.add(tuple(number for text in TEXTS for number in tokenizer.encode(text).ids))
    assert len(seen) == 5


@pytest.mark.parametrize("rule", SPLITS)
def test_every_rule_round_trips_every_text(tmp_path: Path, rule: str) -> None:
    tokenizer = read_back(tmp_path / "t.gguf", byte_level(train(GPT2), rule))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_file_without_a_rule_has_the_default_one(tmp_path: Path) -> None:
    original = train(GPT2)
    one = read_back(tmp_path / "1.gguf", byte_level(original, None))
    other = read_back(tmp_path / "2.gguf", byte_level(original, "default"))
    for text in TEXTS:
        assert one.encode(text).ids == other.encode(text).ids
    said = other.encode("$100200!?")
    assert said.text[slice(*said.offsets[0])] == "$"


def test_an_unknown_rule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"'kimi-k9'; expected a known rule .*default, gpt-2"):
        read_back(tmp_path / "t.gguf", byte_level(train(GPT2), "kimi-k9"))


def test_control_tokens_are_special_and_user_defined_ones_are_text(tmp_path: Path) -> None:
    original = train(GPT2)
    pieces = [original.id_to_token(n) for n in range(original.get_vocab_size())] + ["<think>"]
    given = byte_level(original, "gpt-2")

    def settle(writer: gguf.GGUFWriter) -> None:
        given(writer)
        keys = writer.kv_data[0]
        keys["tokenizer.ggml.tokens"].value = pieces
        keys["tokenizer.ggml.token_type"].value = [3, 3] + [1] * (len(pieces) - 3) + [4]
        keys["tokenizer.ggml.add_bos_token"].value = True
        writer.add_add_eos_token(True)
        writer.add_chat_template("{{ bos_token }}{{ messages[0]['content'] }}")

    tokenizer = read_back(tmp_path / "t.gguf", settle)
    think = len(pieces) - 1
    ids = tokenizer.encode("a<think>a").ids
    assert ids[0] == 0 and ids[-1] == 1 and ids[2] == think
    assert tokenizer.encode("a<think>a", special=False).ids == ids[1:-1]
    assert tokenizer.decode(ids) == "a<think>a"
    assert tokenizer.special.all == (0, 1)
    assert (tokenizer.special.bos, tokenizer.special.eos) == (0, 1)
    assert tokenizer.apply_chat([{"role": "user", "content": "hi"}]) == "<s>hi"


# ---- SentencePiece

WORDS = ["ab", "abc", "bc", "▁a", "▁ab", "▁abc", "aa", "▁▁", "▁▁▁▁", "cab", "ca", "東京", "東"]
SCORED = ["<unk>", "<s>", "</s>"] + [f"<0x{n:02X}>" for n in range(256)]
SCORED += [*WORDS, "▁", "a", "b", "c", "京"]
SCORES = (
    [0.0] * 259 + [-float(n) for n in (9, 3, 5, 1, 8, 2, 7, 4, 6, 10, 4.5, 12, 0)] + [-99.0] * 5
)
KINDS = [2, 3, 3] + [6] * 256 + [1] * 18


def merge_by_score(text: str) -> list[int]:
    """SentencePiece's rule, step by step: the best-scored neighbours join, the leftmost of equals.
    Characters that are no piece become their bytes."""
    known = {piece: n for n, piece in enumerate(SCORED)}
    symbols = list(text.replace(" ", "▁"))
    while True:
        joined = [(a + b, n) for n, (a, b) in enumerate(itertools.pairwise(symbols))]
        best = min(
            ((-SCORES[known[piece]], n) for piece, n in joined if piece in known), default=None
        )
        if best is None:
            break
        symbols[best[1] : best[1] + 2] = ["".join(symbols[best[1] : best[1] + 2])]
    found = []
    for symbol in symbols:
        if symbol in known:
            found.append(known[symbol])
        else:
            found += [known[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


def sentencepiece(**more: Any) -> Callable[[gguf.GGUFWriter], None]:
    def settle(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(more.get("pieces", SCORED))
        writer.add_token_scores(more.get("scores", SCORES))
        writer.add_token_types(more.get("kinds", KINDS))
        if "prefix" in more:
            writer.add_add_space_prefix(more["prefix"])

    return settle


SPACED = ["abc cab  abca", "  ab", "aaaa bca    c", "東京 abc 大阪\n🙂", "cabcabcab", "zß"]
SPACED += ["".join(random.Random(n).choices("abc ", k=17)) + "." for n in range(60)]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_follow_the_scores(tmp_path: Path, prefix: bool) -> None:
    tokenizer = read_back(tmp_path / "t.gguf", sentencepiece(prefix=prefix))
    for text in SPACED:
        ids = tokenizer.encode(text).ids
        assert ids == [1, *merge_by_score(" " + text if prefix else text)]
        assert tokenizer.decode(ids) == text


def test_sentencepiece_ids_are_those_of_transformers(tmp_path: Path) -> None:
    """Its tokenizer leaves out the prefix of texts that start with a space; SentencePiece's own
    does not, so those are not compared."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    told = {"tokenizer_type": "llama", "tokens": SCORED, "scores": SCORES, "token_type": KINDS}
    theirs, _ = convert_gguf_tokenizer("llama", told)
    ours = read_back(tmp_path / "t.gguf", sentencepiece())
    for text in (text for text in SPACED if not text.startswith(" ")):
        want = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, special=False).ids == want


def test_sentencepiece_defaults_are_those_of_the_format(tmp_path: Path) -> None:
    special = read_back(tmp_path / "t.gguf", sentencepiece()).special
    assert (special.unk, special.bos, special.eos, special.pad) == (0, 1, 2, None)


def test_user_defined_pieces_stay_whole(tmp_path: Path) -> None:
    pieces = [*SCORED, "<h1>", "\n\n"]
    given = sentencepiece(
        pieces=pieces, scores=[*SCORES, 0.0, 0.0], kinds=[*KINDS, 4, 4], prefix=False
    )
    tokenizer = read_back(tmp_path / "t.gguf", given)
    n = len(SCORED)
    assert tokenizer.encode("abc<h1>ab\n\nc", special=False).ids == [260, n, 259, n + 1, n - 2]
    assert tokenizer.decode([260, n, 259, n + 1, n - 2]) == "abc<h1>ab\n\nc"


@pytest.mark.parametrize(
    "more, words",
    [
        ({"scores": SCORES[:-1]}, "expected a list of 277 numbers"),
        ({"scores": [*SCORES[:-1], float("nan")]}, "a finite score"),
        ({"kinds": KINDS[:-1]}, "expected a list of 277 numbers"),
        ({"pieces": [*SCORED[:-1], "a"]}, "277 pieces, 276 of them different"),
        ({"pieces": [*SCORED[:-1], "y" * 1001]}, "expected at most 1000"),
    ],
)
def test_damaged_vocabularies_are_refused(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(BadCheckpoint, match=words):
        read_back(tmp_path / "t.gguf", sentencepiece(**more))


def test_vocabularies_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="at most 276, as the embedding has rows"):
        read_back(tmp_path / "t.gguf", sentencepiece(), n_rows=276)
    with pytest.raises(BadCheckpoint, match="expected one of gpt2, llama"):
        read_back(tmp_path / "t.gguf", lambda writer: writer.add_tokenizer_model("bert"))


def test_damaged_merges_are_refused(tmp_path: Path) -> None:
    given = byte_level(train(GPT2), "gpt-2")

    def settle(writer: gguf.GGUFWriter) -> None:
        given(writer)
        writer.kv_data[0]["tokenizer.ggml.merges"].value[5] = "zzz qqq"

    with pytest.raises(BadCheckpoint, match="merges has 'zzz qqq'"):
        read_back(tmp_path / "t.gguf", settle)


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    assert read_back(tmp_path / "1.gguf", lambda writer: None) is None
    assert read_back(tmp_path / "2.gguf", lambda w: w.add_tokenizer_model("no_vocab")) is None
