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
from regard.training.data.vocabulary import Kind, train_tokenizer, vocabulary_notices

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


GAPS: dict[str, Any] = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"}
GAPS |= {"mask": "[MASK]"}
GAPS |= {"special": tuple(GAPS.values()), "eos": None}


def make_masked(kind: Kind = "wordpiece", size: int = 400) -> Tokenizer:
    return train_tokenizer(PAIRS, size, kind=kind, **GAPS)


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
from test_vocabulary import KINDS, make, make_masked
for made in (*map(make, KINDS), make_masked()):
    sys.stdout.write(made.texts["tokenizer.json"])
"""


def test_the_same_texts_give_the_same_vocabulary_in_another_process() -> None:
    made = (*map(make, KINDS), make_masked())
    here = "".join(tokenizer.texts["tokenizer.json"] for tokenizer in made)
    tests = Path(__file__).parent
    paths = [tests, tests.parent.parent, Path(regard.__file__).parents[1]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment |= {"PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN_AGAIN], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == here


# ---- WordPiece, and texts with gaps


def test_word_pieces_are_berts(tmp_path: Path) -> None:
    """Beside what `transformers` makes of the same vocabulary."""
    from transformers import BertTokenizer

    made = make_masked()
    vocabulary = {made.token(number): number for number in range(made.vocab_size)}
    theirs = BertTokenizer(vocab=vocabulary, do_lower_case=True, strip_accents=False)
    for text in (*PAIRS[:4], "Tomcat sat, UNHELPED!", "The [MASK] sat.", "  \n", "zebra 龘"):
        assert made.encode(text).ids == theirs(text)["input_ids"], text
    assert made.encode("The Cat sat.").tokens == ["[CLS]", "the", "cat", "sat", ".", "[SEP]"]
    assert made.encode("cats").tokens == ["[CLS]", "cat", "##s", "[SEP]"]
    assert made.decode(made.encode("The cats sat.").ids) == "the cats sat."
    # A word with a letter that the texts lack is unknown; others are not touched by it.
    assert made.encode("tom zap").tokens == ["[CLS]", "tom", "[UNK]", "[SEP]"]
    assert made.encode("猫だ").tokens[1:3] == ["猫", "だ"]  # without its accent it would be た


def test_word_pieces_have_letters_first_and_none_that_no_word_can_use() -> None:
    made = make_masked()
    tokens = [made.token(number) for number in range(made.vocab_size)]
    assert tokens[:5] == list(GAPS["special"]) and len(tokens) == len(set(tokens)) <= 400
    letters = [token for token in tokens[5:] if len(token) == 1]
    within = [token for token in tokens[5:] if len(token) == 3 and token.startswith("##")]
    assert tokens[5 : 5 + len(letters)] == sorted(letters)
    singles = {token[2:] for token in within}
    assert {"a", "の", "0"} <= singles <= set(letters)
    # Signs and Chinese characters are words of their own, so nothing is ever behind their ##.
    assert not {".", "'", "。", "猫"} & singles and {".", "猫"} <= set(letters)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "characters"])
def test_a_text_with_gaps_opens_in_transformers_with_the_same_ids(
    kind: Kind, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    ours = make_masked(kind)
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.mask_token, theirs.mask_token_id, theirs.cls_token_id) == ("[MASK]", 4, 2)
    for text in ("Tom sat on the [MASK].", "[MASK] sat", *PAIRS[:2]):
        ids = theirs(text)["input_ids"]
        assert ids == ours.encode(text).ids and (ids[0], ids[-1]) == (2, 3)
    two = theirs("Tom", "sat")
    assert two["input_ids"].count(2) == 1 and two["input_ids"].count(3) == 2


def test_a_gap_takes_the_space_before_it_where_words_have_theirs() -> None:
    """As in training, where a hidden token is hidden with its space."""
    bpe, letters = make_masked("bpe"), make_masked("characters")
    found = [bpe.token(number) for number in bpe.encode("The [MASK] sat").ids]
    assert found == ["[CLS]", "The", "[MASK]", "Ġsat", "[SEP]"]
    found = [letters.token(number) for number in letters.encode("a [MASK] t").ids]
    assert found == ["[CLS]", "a", " ", "[MASK]", " ", "t", "[SEP]"]


def test_a_vocabulary_too_small_for_its_alphabet_is_refused() -> None:
    with pytest.raises(BadData, match="256 bytes and 1 special tokens need 257 already"):
        train_tokenizer(PAIRS, 256)
    with pytest.raises(BadData, match="leave no room for characters"):
        train_tokenizer(PAIRS, 258, kind="scripts")
    with pytest.raises(BadData, match=r"vocab_size is 3, but the texts have 3 .*ask for 4"):
        train_tokenizer(["abc"], 3, kind="characters")
    with pytest.raises(BadData, match="vocab_size is 8, of which 5 tokens are special; that"):
        make_masked(size=8)
    assert make_masked(size=9).vocab_size == 7
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
        ({"end": "<pad>"}, "the role of a token is 'end'; expected one of 'bos'"),
        ({"kind": "wordpiece"}, "needs a token for unknown words; name it by unk="),
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
