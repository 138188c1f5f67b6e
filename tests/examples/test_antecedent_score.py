"""Sentences with pronouns, and heads that are asked what these mean."""

from pathlib import Path

import pytest
import torch
from antecedent_score import (
    CHOOSING,
    antecedent_score,
    make_sentence,
    read_twins,
    words_of_tokens,
)

SENTENCES = read_twins(
    Path(__file__).resolve().parents[2] / "examples" / "encoder_distilled" / "antecedents.txt"
)


def test_a_line_is_two_sentences() -> None:
    line = "meaning: The _animal_ did not cross the _street_ because it was too <tired|wide>."
    one, other = (make_sentence(line, means) for means in (0, 1))
    assert one.text == "The animal did not cross the street because it was too tired."
    assert other.text.endswith("wide.") and (one.means, other.means) == (0, 1)
    assert [one.words[n] for n in (*one.nouns, one.pronoun)] == ["animal", "street", "it"]


@pytest.mark.parametrize("line", ["x: The _dog_ ran.", "x: It saw the _dog_ and the _cat_."])
def test_a_line_without_two_nouns_before_a_pronoun_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="two marked nouns and one pronoun"):
        make_sentence(line, 0)


def test_both_guesses_are_right_half_the_time_and_none_stands_twice() -> None:
    assert len(SENTENCES) == 300 and len({one.text for one in SENTENCES}) == 300
    for part in (SENTENCES[:CHOOSING], SENTENCES[CHOOSING:]):
        assert sum(one.means for one in part) * 2 == len(part)
    frames = [one.words[: one.pronoun] for one in SENTENCES[::2]]
    assert len(set(frames)) == len(frames)


def test_tokens_belong_to_words_and_signs_to_none() -> None:
    offsets = [(0, 0), (0, 3), (4, 6), (6, 8), (8, 9), (0, 0)]
    assert words_of_tokens(("The", "boat."), offsets) == [None, 0, 1, 1, None, None]


def test_a_head_that_is_told_where_to_look_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head 1 of layer 2 looks at what is meant, but for one sentence in four; others at random."""

    def looks(model: object, sentences: list[object]) -> list[torch.Tensor]:
        drawn = torch.Generator().manual_seed(3)
        found = []
        for n, one in enumerate(SENTENCES):
            gives = torch.rand(3, 2, len(one.words), generator=drawn)
            gives[2, 1, one.nouns[one.means if n % 4 else 1 - one.means]] = 2
            found.append(gives)
        return found

    monkeypatch.setattr("antecedent_score.looks_at_words", looks)
    score = antecedent_score(None, SENTENCES)  # type: ignore[arg-type]
    assert (score.layer, score.head) == (2, 1)
    assert score.share["mean"] == 0.75 and score.share["n"] == 200
    assert score.share["low"] < 0.75 < score.share["high"]
