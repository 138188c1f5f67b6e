"""Vocabularies: every text comes back, borders hold, the same texts give the same tokens."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenmakers import TEXTS

import regard
from regard.tokens import Tokenizer
from regard.training.data.reading import BadData
from regard.training.data.vocabulary import train_tokenizer, vocabulary_notices

PAIRS = [
    "Tom has helped me many times. I don't know what's going on, Tom.",
    "トムは何度も私を助けてくれた。トムはマットの上に座った。",
    "The cat sat on the mat. Tom sat on the cat.",
    "猫はマットの上に座った。「猫だ」と彼は言った。猫は20匹いる。",
] * 3
ROLES = {"special": ("<pad>", "<s>", "</s>"), "bos": "<s>", "eos": "</s>", "pad": "<pad>"}
KINDS: dict[str, dict[str, Any]] = {
    "bpe": {},
    "scripts": {"kind": "scripts"},
    "words": {"kind": "words"},
}


def make(kind: str, size: int = 400) -> Tokenizer:
    return train_tokenizer(PAIRS, size, **KINDS[kind], **ROLES)


MADE = {kind: make(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEXTS)
def test_every_text_comes_back(kind: str, name: str) -> None:
    for text in (TEXTS[name], " " + TEXTS[name], "  ", "<0x41><0xE3>\u2581", "\u3000猫", "ー"):
        assert MADE[kind].decode(MADE[kind].encode(text).ids) == text


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=29))
def test_any_text_at_all_comes_back(kind: str, text: str) -> None:
    assert MADE[kind].decode(MADE[kind].encode(text).ids) == text
    stream = MADE[kind].decode_stream()
    steps = [stream.step(number) for number in MADE[kind].encode(text).ids]
    assert "".join(steps) + stream.finish() == text


def test_no_piece_crosses_from_one_script_to_another() -> None:
    def script(letter: str) -> str:
        for name, first, last in (
            ("kana", "\u3041", "\u309f"),
            ("katakana", "\u30a0", "\u30ff"),
            ("han", "\u4e00", "\u9fff"),
        ):
            if first <= letter <= last:
                return name
        return "letters" if letter.isalpha() else "digit" if letter.isdigit() else "signs"

    tokenizer = MADE["scripts"]
    learned = [tokenizer.token(number) for number in range(3 + 256, tokenizer.vocab_size)]
    long = [piece for piece in learned if len(piece.strip()) > 1]
    assert len(long) > 20 and any(script(piece[0]) == "kana" for piece in long)
    for piece in long:
        if piece not in ("'t", "'s"):
            assert len({script(letter) for letter in piece.strip()}) == 1, piece
    found = tokenizer.encode("猫はマットの上に座った。").tokens
    assert found[:2] == ["猫", "は"] and found[-1] == "。"


def test_a_word_is_the_same_token_at_the_start_and_within() -> None:
    for kind, token in (("scripts", " Tom"), ("words", "ĠTom")):
        found = MADE[kind].encode("Tom sat Tom").tokens
        assert found[0] == found[-1] == token, found
    assert MADE["scripts"].encode("猫だ").tokens[0] == "猫"


def test_words_are_cut_at_spaces_only() -> None:
    tokenizer = train_tokenizer(["ab&apos;s c. ab&apos;s c."] * 3, 400, kind="words")
    assert tokenizer.encode("ab&apos;s c.").tokens == ["Ġab&apos;s", "Ġc."]
    plain = train_tokenizer(["ab&apos;s c. ab&apos;s c."] * 3, 400)
    assert plain.encode("ab&apos;s c.").tokens != ["Ġab&apos;s", "Ġc."]


def test_rare_characters_are_spelled_in_bytes() -> None:
    found = MADE["scripts"].encode("龘").tokens
    assert found == ["<0xE9>", "<0xBE>", "<0x98>"]


def test_the_most_frequent_characters_get_the_room_there_is() -> None:
    often, seldom = "龍亀鶴", "".join(map(chr, range(0x5000, 0x5080)))
    made = train_tokenizer([seldom * 2, often * 9], 257 + 10, kind="scripts")
    learned = {made.token(number) for number in range(257, made.vocab_size)}
    # Half of the room is for characters: these three, the space, and of equals the first.
    assert {letter for letter in learned if len(letter) == 1} == {*often, " ", "\u5000"}


def test_characters_have_one_id_each_in_their_order() -> None:
    tokenizer = train_tokenizer(["ba\nc", "猫a"], 7, kind="characters", special=(), eos=None)
    assert tokenizer.vocab_size == 5
    assert tokenizer.encode("\nabc猫").ids == [0, 1, 2, 3, 4]
    assert tokenizer.decode([4, 0, 3]) == "猫\nc"
    with pytest.raises(ValueError, match="cannot encode"):
        tokenizer.encode("x")
    with_end = train_tokenizer(["ba\nc", "猫a"], 7, kind="characters")
    assert with_end.special.eos == 0 and with_end.encode("a").ids == [2]


def test_special_tokens_come_first_and_have_their_roles() -> None:
    for kind in KINDS:
        special = MADE[kind].special
        assert (special.pad, special.bos, special.eos) == (0, 1, 2)
        assert special.all == (0, 1, 2)
        assert MADE[kind].encode("a</s>").ids[-1] == 2


@pytest.mark.parametrize("kind", [*KINDS, "characters"])
def test_transformers_opens_what_is_saved_and_agrees(kind: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    if kind == "characters":
        ours = train_tokenizer(PAIRS, 400, kind="characters", **ROLES)
    else:
        ours = MADE[kind]
    ours.save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert len(theirs) == ours.vocab_size
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 0)
    for text in PAIRS[:4]:
        ids = theirs(text)["input_ids"]
        assert ids == ours.encode(text).ids
        assert theirs.decode(ids) == text
    again = Tokenizer.load(tmp_path)
    assert again.encode(PAIRS[1]).ids == ours.encode(PAIRS[1]).ids


TRAIN_AGAIN = """
import sys
from test_vocabulary import KINDS, make
for kind in KINDS:
    sys.stdout.write(make(kind).texts["tokenizer.json"])
"""


def test_the_same_texts_give_the_same_vocabulary_in_another_process() -> None:
    here = "".join(make(kind).texts["tokenizer.json"] for kind in KINDS)
    tests = Path(__file__).parent
    paths = [tests, tests.parent.parent, Path(regard.__file__).parents[1]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment |= {"PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN_AGAIN], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == here


def test_a_vocabulary_too_small_for_its_alphabet_is_refused() -> None:
    with pytest.raises(BadData, match="256 bytes and 1 special tokens need 257 already"):
        train_tokenizer(PAIRS, 256)
    with pytest.raises(BadData, match="leave no room for characters"):
        train_tokenizer(PAIRS, 258, kind="scripts")
    with pytest.raises(BadData, match=r"vocab_size is 3, but the texts have 3 .*ask for 4"):
        train_tokenizer(["abc"], 3, kind="characters")
    assert train_tokenizer(PAIRS, 257).vocab_size == 257


def test_a_vocabulary_larger_than_the_texts_support_is_told() -> None:
    tokenizer = train_tokenizer(PAIRS, 5003)
    assert tokenizer.vocab_size < 5003
    (notice,) = vocabulary_notices(tokenizer, 5003)
    assert notice.count == tokenizer.vocab_size and "not the 5,003 asked for" in notice.text
    assert vocabulary_notices(MADE["bpe"], 386) == ()


def test_texts_without_text_are_refused() -> None:
    for texts in ([], [""], [" \n"]):
        with pytest.raises(BadData, match="the texts are empty"):
            train_tokenizer(texts, 400)
    with pytest.raises(TypeError, match="one text"):
        train_tokenizer("abc", 400)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"kind": "bytes"}, "kind is 'bytes'"),
        ({"special": ()}, "eos is '<|endoftext|>', which is not among"),
        ({"special": ("a", "a"), "eos": "a"}, "distinct"),
        ({"pad": "<pad>"}, "pad is '<pad>', which is not among"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError) as caught:
        train_tokenizer(PAIRS, **{"vocab_size": 400, **options})
    assert fault in str(caught.value)


def test_a_line_of_10_mb_without_a_space_does_not_stall_the_trainer() -> None:
    start = time.process_time()
    made = train_tokenizer([*PAIRS, "ab" * 5_000_000], 300)
    assert time.process_time() - start < 20
    assert made.decode(made.encode("abab").ids) == "abab"
