"""What a page is told before it asks: labels, sides, pieces of text, scores."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import view_fakes

from regard.lens.head_effects import Effect
from regard.lens.next_tokens import NextTokens
from regard.view.assets import inline_json
from regard.view.manifest import LABEL_LENGTH, BadView, make_manifest
from regard.view.page import page_title


def told(record: Any) -> dict[str, Any]:
    return make_manifest([record], "static")["records"][0]


def test_pieces_put_the_text_together_again() -> None:
    text = "  Ein  Satz.\nNoch einer"
    record = view_fakes.decoder(["<s>", " Ein", " Satz", ".", "Noch", " einer"])
    record.text, record.spans = text, [(0, 0), (1, 5), (6, 11), (11, 12), (13, 17), (17, 23)]
    pieces = told(record)["pieces"]
    assert "".join(before + own for before, own in pieces) == text
    assert [own for _, own in pieces] == ["", "Ein", "Satz", ".", "Noch", "einer"]
    assert told(record)["tokens"] == ["<s>", "Ein", "Satz", ".", "Noch", "einer"]


@pytest.mark.parametrize("spans", [[(0, 3)], [(0, 3), (1, 2), (2, 5)], [(0, 3), (9, 99), (0, 1)]])
def test_spans_that_do_not_fit_are_not_believed(spans: list[tuple[int, int]]) -> None:
    record = view_fakes.decoder(["a", "b", "c"])
    record.spans = spans
    assert told(record)["pieces"] is None
    assert told(record)["tokens"] == ["a", "b", "c"]


def test_sides_of_an_encoder_decoder() -> None:
    places = told(view_fakes.translator())["places"]
    sides = [(place["queries"], place["keys"]) for place in places]
    source, target, cross = ("source", "source"), ("target", "target"), ("target", "source")
    assert sides == [source, source, target, cross, target, cross]


def test_a_place_of_another_length_has_positions_for_labels() -> None:
    record = view_fakes.decoder()
    record.places[0] = replace(record.places[0], n_keys=40)
    assert (told(record)["places"][0]["queries"], told(record)["places"][0]["keys"]) == (
        "target",
        "positions",
    )


def test_heads_keep_the_numbers_they_have_in_the_model() -> None:
    record = view_fakes.decoder(n_heads=3)
    record.places[0] = replace(record.places[0], heads=(1, 4, 7))
    assert told(record)["places"][0]["heads"] == [1, 4, 7]
    assert told(record)["places"][1]["heads"] == [0, 1, 2]


def test_the_grid_is_that_of_the_weights_or_of_the_picture() -> None:
    assert told(view_fakes.decoder())["places"][0]["grid"] == (12, 12)
    assert told(view_fakes.coarse())["places"][0]["grid"] == (128, 128)


def test_what_was_recorded_beside_weights_is_told_by_place_and_record() -> None:
    plain = told(view_fakes.decoder(layers=2, n_heads=3))
    assert (plain["next"], plain["steps"], plain["rollout"]) == (None, None, [0, 1])
    assert [place["values"] for place in plain["places"]] == [False, False]
    record = view_fakes.decoder(layers=2, n_heads=3)
    n = len(record.tokens)
    record.norms = [np.ones((3, n))] * 2
    record.ends = [4, 5, n - 1]
    ids = np.stack([np.arange(n), np.full(n, -1)], 1)
    record.predicted = NextTokens(np.ones((n, 2)), ids, np.ones(n), np.arange(n))
    record.vocabulary = {0: "x" * 500, 1: "one", 99: "not asked for"}
    full = told(record)
    assert full["steps"] == [4, 5, n - 1] and full["places"][1]["values"] is True
    names = full["next"]["vocabulary"]
    assert full["next"]["k"] == 2 and set(names) == {str(number) for number in range(n)}
    assert (names["0"], names["1"], names["2"]) == ("x" * 79 + "…", "one", "2")


def test_what_heads_are_worth_is_told_by_place_and_among_what_stands_out() -> None:
    record = view_fakes.decoder(layers=2, n_heads=3)
    assert make_manifest([record], "static")["records"][0]["effects"] == []
    heads = np.array([[0.1, -0.2, 0.3], [np.nan, -1.5, 0.5]])
    record.worth = [
        Effect(heads, heads[:, 1], -4.0, -0.5, " x" * 99, "doing so", edge=((3,), (1,)))
    ]
    told = make_manifest([record], "static")["records"][0]
    [found] = told["effects"]
    assert found["heads"] == [[0.1, -0.2, 0.3], [None, -1.5, 0.5]]
    assert (found["layers"], found["whole"], found["log_prob"]) == ([-0.2, -1.5], -4.0, -0.5)
    assert (found["query"], found["key"], found["edit"]) == ([3], [1], "doing so")
    assert len(found["token"]) == LABEL_LENGTH
    assert told["findings"][-1]["signed"] and not told["findings"][0]["signed"]
    assert told["findings"][-1]["lines"][0]["heads"][:2] == [[1, 1, -1.5], [1, 2, 0.5]]


def test_steps_and_predictions_of_other_tokens_than_the_labels_are_left_out() -> None:
    record = view_fakes.decoder()
    record.ends = [4, 5]
    record.predicted = NextTokens(np.ones((3, 2)), np.ones((3, 2)), np.ones(3), np.ones(3))
    assert (told(record)["steps"], told(record)["next"]) == (None, None)


def test_rollout_needs_every_weight_of_several_layers() -> None:
    assert told(view_fakes.coarse())["rollout"] == []
    assert told(view_fakes.decoder(layers=1))["rollout"] == []
    record = view_fakes.translator()
    assert told(record)["rollout"] == [2, 4]  # of the decoder alone
    record.places[2] = replace(record.places[2], exact_zoom=False)
    assert told(record)["rollout"] == []


def test_the_alignment_is_the_head_whose_words_look_most_firmly() -> None:
    record = view_fakes.translator()
    sharp_first = record.scores
    record.scores = lambda place, head, t, s: sharp_first(place, 3 - head, t, s)  # type: ignore
    firm = {
        (place, head): record.weights(place, head, 1, 9)[:, 1:7].max(1).mean()  # words, not marks
        for place in (3, 5)
        for head in range(4)
    }
    assert told(record)["alignment"] == max(firm, key=lambda each: firm[each]) == (5, 3)


def test_without_words_on_both_sides_or_with_too_many_there_is_no_alignment() -> None:
    assert told(view_fakes.decoder())["alignment"] is None
    nameless = view_fakes.translator()
    nameless.source_tokens = None
    assert told(nameless)["alignment"] is None
    short = view_fakes.translator()
    short.source_tokens = ["The", "cat"]
    assert told(short)["alignment"] is None
    astray = view_fakes.translator()
    astray.spans = [(90, 91)] * 10
    assert told(astray)["alignment"] is None
    long = view_fakes.translator()
    t, s = 4001, 4003
    long.tokens, long.source_tokens, long.text = ["a"] * t, ["b"] * s, "a " * t
    long.spans = [(2 * n, 2 * n + 1) for n in range(t)]
    long.places = [replace(long.places[3], n_queries=t, n_keys=s)]
    long.map = lambda *_: pytest.fail("that is work for minutes")  # type: ignore[method-assign]
    assert told(long)["alignment"] is None


def test_what_is_not_finite_becomes_null() -> None:
    record = view_fakes.decoder(layers=1, n_heads=2)
    record.heads = lambda: {"previous": np.array([[math.nan, math.inf]])}  # type: ignore
    assert told(record)["scores"] == {"previous": [[None, None]]}
    json.loads(inline_json(told(record)))


def test_a_long_token_is_cut_before_it_reaches_the_page() -> None:
    for known in (True, False):
        record = view_fakes.decoder(["a", "x" * 1_000_000])
        record.spans = record.spans if known else None
        assert len(told(record)["tokens"][1]) == LABEL_LENGTH
        assert len(inline_json(told(record))) < 20_000


def test_inlined_json_has_no_sign_that_html_reads() -> None:
    hostile = "</script><script>alert(1)</script><!-- & \u2028\u202e\ud800"
    text = inline_json({"token": hostile})
    assert not set("<>&") & set(text)
    assert text.isascii()
    assert json.loads(text)["token"] == hostile


def test_records_that_are_none_or_too_many_are_refused() -> None:
    record = view_fakes.decoder()
    for records in ([], [record] * 3):
        with pytest.raises(BadView, match="one record or compares two"):
            make_manifest(records, "static")
    record.places = []
    with pytest.raises(BadView, match="0 places"):
        told(record)
    with pytest.raises(BadView, match="0 tokens"):
        told(replace(view_fakes.decoder(), tokens=[]))


def test_a_page_has_the_words_of_the_digest_for_every_score() -> None:
    words = make_manifest([view_fakes.decoder()], "static")["words"]
    assert set(words) == set(view_fakes.SCORES)
    assert words["first"] == {"what": "the first token", "does": "looks at the first token"}


def test_places_are_labelled_with_their_stack() -> None:
    labels = [place["label"] for place in told(view_fakes.translator())["places"]]
    assert labels == ["encoder 0", "encoder 1", "decoder 0", "cross 0", "decoder 1", "cross 1"]
    assert [place["label"] for place in told(view_fakes.decoder())["places"]] == [*"0123"]


def test_a_text_too_long_for_its_model_is_noted() -> None:
    record = view_fakes.decoder()
    assert told(record)["notes"] == []
    record.trained_len, record.n_read = 7, 12
    [note] = told(record)["notes"]
    assert "12 tokens" in note and "at most 7" in note


def test_what_was_left_out_is_noted() -> None:
    record = view_fakes.decoder()
    record.notes = ["layer 3 could not be recorded (ValueError: why); the model ran as without"]
    assert told(record)["notes"] == record.notes


def test_a_path_is_no_title_of_a_page() -> None:
    record = view_fakes.decoder(model="/home/someone/models/bert", text="")
    assert page_title(record) == "bert · regard"  # type: ignore[arg-type]


def test_a_path_is_no_name_of_a_model() -> None:
    assert told(view_fakes.decoder(model="/home/someone/bert"))["model"] == "bert"


def test_a_score_from_too_few_tokens_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    record = view_fakes.decoder(layers=1, n_heads=2)
    assert all(value is not None for value in told(record)["scores"]["induction"][0])
    few = {name: np.full((1, 2), 1) for name in view_fakes.SCORES}
    monkeypatch.setattr(record, "counts", lambda: few)
    assert told(record)["scores"]["induction"] == [[None, None]]
    assert all(value is not None for value in told(record)["scores"]["previous"][0])
