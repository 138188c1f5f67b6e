"""Positions of calls and of edits: in line, in caches, from the end, and as edits say them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from regard.lens.edit.positions import across, find_spans, find_word, holds, in_line, read_text
from regard.lens.word_links import find_words

NONE = np.zeros((1, 1), np.int64)


def chosen(where: Any, n: int, later: int = 0) -> list[int]:
    positions = np.arange(n + later)[None]
    return np.flatnonzero(holds(find_spans(where, np.full((1, 1), n)), positions)[0]).tolist()


@pytest.mark.parametrize(
    ("where", "want"),
    [
        (3, [3]),
        (-1, [6]),
        (range(2, 7, 2), [2, 4, 6]),
        (range(-3, -1), [4, 5]),
        (slice(5, None), [5, 6, 7, 8]),
        (slice(None, -5), [0, 1]),
        (slice(-2, None), [5, 6, 7, 8]),
        (slice(1, 99, 3), [1, 4, 7]),
        (slice(None, 0), []),
        ((0, slice(6, 8), -3), [0, 4, 6, 7]),
    ],
)
def test_numbers_ranges_and_slices_mean_what_they_do_in_python(where: Any, want: list[int]) -> None:
    """A text of seven tokens, to which two are written later."""
    assert chosen(where, 7, later=2) == want


def test_padding_stands_nowhere_and_rows_count_from_their_own_end() -> None:
    padding = np.array([[0], [3]])
    standing = in_line(7, 7, 0, padding)
    found = holds(find_spans((-1, 0), standing.query_lengths), standing.queries)
    assert found.tolist() == [[n in (0, 6) for n in range(7)], [n in (3, 6) for n in range(7)]]
    with pytest.raises(ValueError, match="position 4 does not exist: the text has 4 tokens"):
        find_spans(4, standing.query_lengths)


@pytest.mark.parametrize(
    ("n_queries", "n_keys", "before", "queries", "keys"),
    [
        (5, 5, 0, (0, 5), (0, 5)),  # a prompt
        (1, 9, 8, (8, 9), (0, 9)),  # a growing cache
        (2, 16, 8, (8, 10), (0, 16)),  # a static one, with empty slots
        (1, 4, 8, (8, 9), (5, 9)),  # one that keeps a window
    ],
)
def test_calls_stand_in_every_cache(
    n_queries: int, n_keys: int, before: int, queries: tuple[int, int], keys: tuple[int, int]
) -> None:
    standing = in_line(n_queries, n_keys, before, NONE)
    assert standing.queries[0].tolist() == list(range(*queries))
    assert standing.keys[0].tolist() == list(range(*keys))
    assert standing.query_lengths[0, 0] == queries[1]
    assert standing.begins == (before == 0)


def test_another_text_has_its_own_length() -> None:
    standing = across(np.array([[4, 5]]), 9)
    assert standing.query_lengths[0, 0] == 6 and standing.key_lengths[0, 0] == 9
    assert standing.keys[0].tolist() == list(range(9)) and not standing.begins


def test_words_of_several_tokens_are_all_of_them() -> None:
    text = "The animals did not. The end"
    spans = [(0, 3), (3, 8), (8, 11), (11, 15), (15, 19), (19, 20), (20, 24), (24, 28)]
    words = find_words(text, [text[a:z] for a, z in spans], spans)
    assert find_word(words, "Animals") == (1, 2)
    with pytest.raises(ValueError, match="'the' stands 2 times in the text, at the tokens 0, 6"):
        find_word(words, "the")
    with pytest.raises(ValueError, match="no word of the text is 'dog'; expected one of The, anim"):
        find_word(words, "dog")


def test_a_tokenizer_that_does_not_tell_characters_is_refused() -> None:
    class Slow:
        is_fast = False

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [str(number) for number in ids]

    with pytest.raises(ValueError, match="Slow does not say which characters its tokens are"):
        read_text(Slow(), "it is")
