"""What stands out: in which heads, between which words, and which word is asked about."""

import pytest
from lens_words import make_record
from view_fakes import translator

from regard.lens.findings import choose_word, find_sections, head_label
from regard.lens.word_links import Word, find_alignment


def test_heads_links_and_one_word_are_told_with_their_tokens() -> None:
    record = make_record()
    roles, telling, looks, looked = find_sections(record)
    assert {line.text: line.heads[0][1] for line in roles.lines} == {
        "the token before": 0,
        "the token itself": 2,
        "the first token": 1,
    }
    first = telling.lines[0]
    assert (first.text, first.query, first.key) == ("it → animal", 7, 1)
    assert first.heads == ((0, 2, pytest.approx(record.weight(0, 2, 7, 1), abs=1e-6)),)
    assert looks.title == '"it" looks at' and looks.lines[0].text == "animal"
    assert all(line.query == 7 for line in looks.lines)
    assert looked.title == '"it" is looked at by' and all(line.key == 7 for line in looked.lines)


def test_of_a_translation_each_word_is_told_with_its_source() -> None:
    record = translator()
    aligned = find_alignment(record)  # type: ignore[arg-type]
    assert aligned is not None
    _, section = find_sections(record)  # type: ignore[arg-type]
    name = head_label(record, aligned.place, aligned.head)  # type: ignore[arg-type]
    assert section.title.endswith(f"in the firmest head, {name}")
    pairs = [(line.query, line.key, line.heads[0][2]) for line in section.lines]
    assert pairs == list(aligned.pairs)


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("they said that he slept", "he"),
        ("we know that cats purr", "that"),
        ("that man and this dog", "this"),
        ("cats that saw him ran", "him"),
        ("that cat lost its way", "its"),
        ("men lost their dog and found it", "it"),
        ("two dogs ran home", "home"),
    ],
)
def test_a_pronoun_proper_is_asked_about_before_one_that_may_join(text: str, chosen: str) -> None:
    words = [Word(word, (n,), False) for n, word in enumerate(text.split())]
    found = choose_word(words, None)
    assert found is not None and words[found].text == chosen
