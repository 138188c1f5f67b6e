"""Sentences with gold word pairs: read as marked, and hard for whoever takes the nearest noun."""

from __future__ import annotations

import pytest

from regard.labs.word_pairs import RELATIONS, Sentence, read_sentence


def spell(sentence: Sentence, span: tuple[int, int]) -> str:
    return sentence.text[span[0] : span[1]]


def test_marks_become_characters_of_the_text_without_them() -> None:
    found = read_sentence("The ~cook's *fish in a ~pan ^is hot.")
    assert found.text == "The cook's fish in a pan is hot."
    assert (found.asked, found.gold) == ((25, 27), (11, 15))
    assert [spell(found, noun) for noun in found.nouns] == ["cook", "fish", "pan"]
    assert (spell(found, found.first), spell(found, found.nearest)) == ("cook", "pan")


@pytest.mark.parametrize(
    "marked", ["The *dog barks.", "The dog ^barks.", "^It saw the *dog.", "*A *dog ^barks."]
)
def test_a_sentence_that_is_marked_wrongly_is_refused(marked: str) -> None:
    with pytest.raises(ValueError, match="expected one \\^ before the word"):
        read_sentence(marked)


@pytest.mark.parametrize("relation", list(RELATIONS))
def test_the_nearest_noun_is_right_in_a_fifth_and_the_first_in_two(relation: str) -> None:
    """Of all sentences, of each half, and of every fourth, which the short run has."""
    sentences = list(RELATIONS[relation])
    for part in (sentences, sentences[::2], sentences[1::2], sentences[::4]):
        n = len(part)
        assert sum(one.gold == one.nearest for one in part) == n / 5
        assert sum(one.gold == one.first for one in part) == 2 * n / 5


def test_there_are_sixty_sentences_each_and_none_twice() -> None:
    texts = [one.text for sentences in RELATIONS.values() for one in sentences]
    assert [len(sentences) for sentences in RELATIONS.values()] == [60] * 3
    assert len(set(texts)) == len(texts)
    assert not [text for text in texts if set("~*^") & set(text) or not text.endswith(".")]


def test_words_are_asked_about_and_more_follows_them() -> None:
    asked = {
        name: {spell(one, one.asked) for one in sentences} for name, sentences in RELATIONS.items()
    }
    assert asked["pronoun"] == {"she", "he", "they"}
    assert len(asked["verb"]) > 45 and len(asked["adjective"]) > 45
    for sentences in RELATIONS.values():
        for one in sentences:
            assert one.nouns[-1] < one.asked and one.gold in one.nouns and len(one.nouns) > 1
            assert len(one.text) - one.asked[1] > 3, one.text
