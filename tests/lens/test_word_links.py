"""Words of a record, and the heads that link them."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from lens_words import SENTENCE, Hand, make_record
from torch import Tensor, nn

import regard
from regard.lens.record import Record
from regard.lens.watch import watch
from regard.lens.word_links import (
    Word,
    find_alignment,
    find_words,
    links_of_word,
    sum_words,
    survey,
    telling_of,
    words_of,
)
from regard.ops import attention


def test_tokens_become_the_words_they_spell() -> None:
    text = "Don't stop: naïve cats"
    spans = [(0, 3), (3, 5), (5, 10), (10, 11), (11, 14), (14, 17), (17, 22)]
    words = find_words(text, [text[a:z] for a, z in spans], spans)
    assert [word.text for word in words] == ["Don't", "stop", ":", "naïve", "cats"]
    assert [word.tokens for word in words] == [(0, 1), (2,), (3,), (4, 5), (6,)]
    assert [word.is_mark for word in words] == [False, False, True, False, False]


def test_of_scripts_without_spaces_each_token_is_a_word() -> None:
    text = "猫は座った。"
    spans = [(0, 1), (1, 2), (2, 3), (3, 5), (5, 6)]
    words = find_words(text, [*list("猫は座"), "った", "。"], spans)
    assert [word.text for word in words] == ["猫", "は", "座", "った", "。"]
    assert words[-1].is_mark and not words[0].is_mark


def test_a_token_that_covers_no_text_is_a_mark_of_its_own() -> None:
    words = find_words("a b", ["[CLS]", "a", " b", "[SEP]"], [(0, 0), (0, 1), (1, 3), (0, 0)])
    assert [(word.text, word.is_mark) for word in words] == [
        ("[CLS]", True),
        ("a", False),
        ("b", False),
        ("[SEP]", True),
    ]


def test_weights_of_words_are_means_of_sums() -> None:
    words = [Word("ab", (0, 1), False), Word("c", (2,), False)]
    weights = np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.6, 0.2]])
    expected = np.array([[(0.8 + 0.2) / 2, (0.2 + 0.8) / 2], [0.8, 0.2]])
    np.testing.assert_allclose(sum_words(weights, words, words), expected)


def test_telling_is_what_is_left_over_habit_worked_by_hand() -> None:
    """Query 2 looks at key 0 with 0.9; others give key 0 a mean of 0.4 there, distance 2 nobody."""
    weights = np.array([[1.0, 0.0, 0.0], [0.8, 0.2, 0.0], [0.9, 0.0, 0.1]])
    told = telling_of(weights, causal=True)
    assert told[2, 0] == pytest.approx(0.9 - max((1.0 + 0.8) / 2, 0.0))
    assert told[1, 0] == pytest.approx(0.8 - max((1.0 + 0.9) / 2, 0.0))
    assert told[0, 1] == -1.0, "a later word cannot be seen"
    open_to_all = telling_of(np.array([[0.0, 1.0], [0.0, 1.0]]), causal=False)
    assert open_to_all[0, 1] == pytest.approx(0.0), "everybody looks there"


def test_a_head_of_habit_tells_nothing_and_a_head_that_links_is_found() -> None:
    """Head 0 looks one back, head 1 at the first token, head 2 from "it" to "animal"."""
    record = make_record()
    own, _ = words_of(record)
    place = {word.text: number for number, word in enumerate(own)}
    best = next(survey(record).links)
    assert (best.query, best.key, best.head) == (place["it"], place["animal"], 2)
    assert best.telling > 0.5 > 0.1 > list(survey(record).links)[1].telling
    first = next(survey(record, place["animal"]).looked_at_by)
    assert first.query == place["it"] and first.head == 2
    assert next(survey(record, place["it"]).looks_at).key == place["animal"]


def plain_telling(weights: np.ndarray, causal: bool) -> np.ndarray:
    """The formula of the docstring, word by word."""
    Q, K = weights.shape
    told = np.full((Q, K), -1.0)
    for q in range(Q):
        for k in range(min(q + 1, K) if causal else K):
            others = [p for p in range(Q) if p != q]
            there = [weights[p, k] for p in others if not causal or k <= p]
            far = [
                weights[p, k + p - q]
                for p in others
                if 0 <= k + p - q < K and (not causal or k + p - q <= p)
            ]
            told[q, k] = weights[q, k] - max(sum(x) / max(len(x), 1) for x in (there, far))
    return told


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("Q", "K"), [(7, 7), (5, 3), (3, 5), (1, 1)])
def test_telling_is_the_formula_on_any_matrix(Q: int, K: int, causal: bool) -> None:
    weights = np.random.default_rng(11).random((Q, K))
    np.testing.assert_allclose(telling_of(weights, causal), plain_telling(weights, causal))


def test_looks_at_the_first_token_at_specials_and_at_itself_are_not_told() -> None:
    """One word each looks at the first token, at a special one, at itself, and one at another."""
    words = ["I", "think", "the", "naïve", "man", "[SEP]", "slept"]
    n = len(words)
    scores = torch.zeros(1, n, n)
    scores[0, 3, 0] = scores[0, 4, 5] = scores[0, 6, 6] = scores[0, 2, 1] = 9.0
    model = nn.Sequential(Hand(scores))
    with watch(model, keep="qk") as record:
        model(torch.zeros(1))
    text, at, spans = " ".join(words), 0, []
    for word in words:
        at = text.index(word, at)
        spans.append((at, at + len(word)))
    record.describe(text=text, tokens=words, spans=spans)
    own, _ = words_of(record)
    assert [word.is_mark for word in own] == [False] * 5 + [True, False]
    links = list(survey(record).links)
    assert (links[0].query, links[0].key) == (2, 1)
    assert not [link for link in links if link.key in (0, 5, link.query)]
    assert not [link for link in survey(record, 3).looks_at if link.key in (0, 3, 5)]
    assert not list(links_of_word(record, own, 0, looking=False)), "everyone looks at the first"


def test_each_map_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record()
    asked: list[tuple[int, int]] = []
    plain = Record.map

    def count(self: Record, place: int, head: int, *more: Any) -> Any:
        asked.append((place, head))
        return plain(self, place, head, *more)

    monkeypatch.setattr(Record, "map", count)
    found = survey(record, 7)
    assert list(found.links) and list(found.looks_at) and list(found.looked_at_by)
    assert asked == [(0, 0), (0, 1), (0, 2)]


def test_long_texts_are_asked_about_one_word_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record()
    own, _ = words_of(record)
    it = [word.text for word in own].index("it")
    first = next(links_of_word(record, own, it, looking=True))
    assert own[first.key].text == "animal" and first.head == 2
    monkeypatch.setattr("regard.lens.word_links.MOST_WORDS", 5)
    with pytest.raises(ValueError, match="too many to look for links"):
        survey(record)


@pytest.mark.parametrize("looking", [True, False])
def test_words_of_several_tokens_weigh_the_same_in_long_texts(looking: bool) -> None:
    """From the word's rows or columns alone, the weights that the whole map gives."""
    record = make_record()
    sizes, first = (2, 1, 3, 1, 2, 3), 0
    own = []
    for size in sizes:
        own.append(Word(f"w{first}", tuple(range(first, first + size)), is_mark=size == 1))
        first += size
    assert first == len(record.tokens)
    links = links_of_word(record, own, 4, looking=looking)
    found = {link.key if looking else link.query: link for link in links}
    assert set(found) == {2, 5}, "the word itself, the first one and marks are left out"
    whole = (record.places[0].n_queries, record.places[0].n_keys)
    each = [sum_words(record.map(0, head, size=whole), own, own) for head in range(3)]
    for other, link in found.items():
        at = (4, other) if looking else (other, 4)
        weights = [weights_qk[at] for weights_qk in each]
        assert link.weight == pytest.approx(max(weights), abs=1e-6)
        assert weights[link.head] == pytest.approx(max(weights), abs=1e-6)


def test_the_firmest_head_of_cross_attention_aligns() -> None:
    from regard._look import see_translation

    model = regard.load("embedded:translate")
    with torch.inference_mode():
        record = see_translation(
            model, "m", "The cat sat on the mat.", "猫はマットに座った。", None
        )
    found = find_alignment(record)
    assert found is not None
    own, source = words_of(record)
    pairs = {own[q].text: source[k].text for q, k, _ in found.pairs}
    assert pairs["猫"] == "cat" and pairs["マ"] == "mat" and pairs["座"] == "sat"
    assert record.places[found.place].kind == "cross"
    assert find_alignment(make_record()) is None


def test_the_sentence_has_the_words_it_has() -> None:
    own, source = words_of(make_record())
    assert [word.text for word in own] == [*SENTENCE.rstrip(".").split(), "."]
    assert own == source


def test_compiled_generation_is_refused_while_it_is_watched() -> None:
    from regard.lens.watch import watch

    model = regard.load("embedded:lm")
    with pytest.raises(ValueError, match="a compiled step cannot be watched"), watch(model):
        regard.generate_ids(model, [[3, 1, 4]], max_new_tokens=2, compiled=True)


def test_spans_that_read_the_text_too_often_are_not_believed_and_cost_nothing() -> None:
    """A stranger's spans may all be the whole text; the work would be their product."""
    text, n = "ab " * 100_000, 20_000
    before = time.process_time()
    words = find_words(text, ["t"] * n, [(0, len(text))] * n)
    assert [word.text for word in words] == ["t"] * n and all(word.is_mark for word in words)
    assert time.process_time() - before < 5.0
    bytes_of_one = find_words("猫", ["x", "y", "z"], [(0, 1)] * 3)
    assert [word.text for word in bytes_of_one] == ["猫"] * 3


def test_the_word_of_a_token_is_the_first_that_begins_or_goes_on_in_it() -> None:
    words = find_words("one two, 3", [*"abcde"], [(0, 3), (3, 5), (5, 7), (7, 8), (8, 10)])
    assert [(word.text, word.tokens) for word in words] == [
        ("one", (0,)),
        ("two", (1, 2)),
        (",", (3,)),
        ("3", (4,)),
    ]


class Crossed(nn.Module):
    """Cross-attention of 3 tokens to 5 that looks along the diagonal."""

    def forward(self, x: Tensor) -> Tensor:
        return attention(9.0 * torch.eye(3, 5)[None, None], torch.eye(5)[None, None], x, scale=1.0)


@pytest.mark.parametrize("n_source", [4, 5, 6])
def test_words_of_the_source_that_do_not_fit_align_nothing(n_source: int) -> None:
    model = nn.ModuleDict({"cross_attn": Crossed()})
    with watch(model, keep="qk") as record:
        model["cross_attn"](torch.zeros(1, 1, 5, 2))
    spans = [(0, 1), (2, 3), (4, 5)]
    record.describe(
        text="a b c", tokens=[*"abc"], spans=spans, source_tokens=[*"vwxyzq"[:n_source]]
    )
    found = find_alignment(record)
    assert (None if found is None else [pair[:2] for pair in found.pairs]) == (
        [(0, 0), (1, 1), (2, 2)] if n_source == 5 else None
    )
