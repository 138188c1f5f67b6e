"""The text that tokens stand for, and where it is found; characters of several tokens."""

from __future__ import annotations

import pytest

from regard.view.pieces import LABEL_LENGTH, find_spans, make_pieces


def test_a_character_of_several_tokens_is_the_first_ones_and_they_are_numbered() -> None:
    pieces = make_pieces("a 吾b", [(0, 1), (1, 3), (2, 3), (2, 3), (3, 4)], 5)
    assert pieces is not None
    assert pieces.texts == [["", "a"], [" ", "吾"], ["", ""], ["", ""], ["", "b"]]
    assert pieces.joined == [2, 3]
    assert pieces.name(list("vwxyz")) == ["a", "吾 1/3", "吾 2/3", "吾 3/3", "b"]


def test_two_tokens_that_share_a_character_have_their_text_together() -> None:
    """The first ends in the first byte of é, the second begins with the other."""
    pieces = make_pieces("caféine", [(0, 4), (3, 7)], 2)
    assert pieces is not None
    assert pieces.texts == [["", "caféine"], ["", ""]] and pieces.joined == [1]


def test_a_token_without_text_keeps_its_label() -> None:
    pieces = make_pieces("猫", [(0, 0), (0, 1), (0, 0)], 3)
    assert pieces is not None
    assert pieces.joined == [] and pieces.name(["<s>", "x", "</s>"]) == ["<s>", "猫", "</s>"]


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 3), (1, 3)],  # two characters in common
        [(2, 3), (0, 1)],  # backwards
        [(0, 1), (0, 0), (0, 1)],  # the same character again, after another token
        [(0, 9)],
        [(-1, 1)],
    ],
)
def test_spans_of_no_text_are_not_believed(spans: list[tuple[int, int]]) -> None:
    assert make_pieces("abc", spans, len(spans)) is None


def test_a_long_text_of_one_token_is_cut() -> None:
    pieces = make_pieces("x" * 500, [(0, 500)], 1)
    assert pieces is not None and len(pieces.texts[0][1]) == LABEL_LENGTH


@pytest.mark.parametrize(
    ("text", "labels", "spans"),
    [
        ("The cat", ["<en>", "The", " cat", "</s>"], [(0, 0), (0, 3), (4, 7), (0, 0)]),
        ("The cat", ["\u2581The", "\u2581c", "at"], [(0, 3), (4, 5), (5, 7)]),
        ("吾輩", ["吾", "吾", "吾", "輩"], [(0, 1), (0, 1), (0, 1), (1, 2)]),
        ("吾吾", ["吾"] * 6, [(0, 1)] * 3 + [(1, 2)] * 3),
        ("a [x] b", ["a", "[x]", "b"], [(0, 1), (2, 5), (6, 7)]),
        ("吾吾", ["吾"] * 3, None),
        ("The cat", ["The", "dog"], None),
        ("", ["", " "], [(0, 0), (0, 0)]),
    ],
)
def test_tokens_are_found_in_their_text_one_after_the_other(
    text: str, labels: list[str], spans: list[tuple[int, int]] | None
) -> None:
    assert find_spans(text, labels) == spans
