"""The distance between the heads of two records: by hand, of pictures, and where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import view_fakes

from regard.view import distances
from regard.view.distances import rank_distances


def made_of(*heads: list[list[float]]) -> view_fakes.FakeRecord:
    """A record of one layer whose weights are given."""
    whole = np.array(heads, np.float32)
    record = view_fakes.decoder([f"w{n}" for n in range(whole.shape[1])], 1, len(heads))

    def cells(place: int, head: int, window: Any, size: Any) -> np.ndarray:
        part = whole[head, window[0] : window[1], window[2] : window[3]]
        return part.reshape(size[0], -1, size[1], part.shape[1] // size[1]).mean((1, 3))

    record.map = cells  # type: ignore[method-assign]
    return record


def test_a_distance_is_the_share_of_weight_that_lies_elsewhere() -> None:
    one = made_of([[1, 0], [0.5, 0.5]], [[1, 0], [0, 1]])
    two = made_of([[1, 0], [0.5, 0.5]], [[0, 1], [0.25, 0.75]])
    # Head 1: all of the first query's weight and a quarter of the second's.
    assert rank_distances(one, two) == [(0, 1, 0.625), (0, 0, 0.0)]


def test_of_very_many_weights_pictures_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    one = view_fakes.decoder([f"w{n}" for n in range(301)], 1, 2)
    two = view_fakes.decoder([f"w{n}" for n in range(301)], 1, 2, strength=0.5)
    exact = dict(((p, h), far) for p, h, far in rank_distances(one, two) or [])
    monkeypatch.setattr(distances, "MOST_WEIGHTS", 100)
    coarse = dict(((p, h), far) for p, h, far in rank_distances(one, two) or [])
    for head in range(2):
        gap = one.weights(0, head, 0, 301).astype(float) - two.weights(0, head, 0, 301)
        assert exact[0, head] == pytest.approx(np.abs(gap).sum(1).mean() / 2, rel=1e-5)
        padded = np.pad(gap, (0, 1)).reshape(151, 2, 151, 2).sum((1, 3))
        assert coarse[0, head] == pytest.approx(np.abs(padded).sum() / 2 / 301, rel=1e-4)
        assert 0 < coarse[0, head] < exact[0, head]


def test_a_record_of_statistics_has_a_distance_of_its_picture() -> None:
    assert [
        far for _, _, far in rank_distances(view_fakes.coarse(), view_fakes.coarse()) or []
    ] == [0, 0]


def test_heads_of_other_models_and_texts_have_no_distance() -> None:
    one = view_fakes.decoder()
    assert rank_distances(one, view_fakes.decoder(["a", "b"])) is None
    assert rank_distances(one, view_fakes.decoder(n_heads=3)) is None
    other = view_fakes.decoder()
    other.places = [replace(place, name=f"h.{place.layer}") for place in other.places]
    assert rank_distances(one, other) is None


def test_a_head_whose_weights_are_no_numbers_is_left_out() -> None:
    one = made_of([[1, 0], [0, 1]], [[1, 0], [0, 1]])
    two = made_of([[1, 0], [0, float("nan")]], [[1, 0], [0, 1]])
    assert rank_distances(one, two) == [(0, 1, 0.0)]
