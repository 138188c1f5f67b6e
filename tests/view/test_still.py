"""The picture for where nothing runs: a PNG that others read, with every head in its place."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import numpy as np
import view_fakes

from regard.view.still import CELL, GAP, still_html


def picture(record: view_fakes.FakeRecord) -> np.ndarray:
    """The shades as matplotlib's reader finds them: light is little."""
    import matplotlib.image

    found = re.search(r"base64,([^\"]+)", still_html([record]))
    assert found
    return np.asarray(matplotlib.image.imread(io.BytesIO(base64.b64decode(found.group(1)))))


def test_every_head_is_drawn_where_its_layer_and_number_say() -> None:
    record = view_fakes.decoder(layers=2, n_heads=3)
    grey = picture(record)[..., :3].sum(2)
    step = CELL + GAP
    assert grey.shape == (2 * step - GAP, 3 * step - GAP)
    gaps = [grey[:, CELL:step], grey[:, step + CELL : 2 * step], grey[CELL:step]]
    assert all((gap == grey.max()).all() for gap in gaps)
    assert (grey[:, [0, step, 2 * step]] < grey.max()).any(axis=0).all()  # of each its first key
    for place in range(2):
        for head in range(3):
            part = grey[place * step :, head * step :][:CELL, :CELL]
            weights = record.weights(place, head, 0, 12)
            at = (np.arange(12) * CELL) // 12 + 2
            seen = part[np.ix_(at, at)]
            t, s = np.unravel_index(weights.argmax(), weights.shape)
            assert seen[t, s] == seen.min()
            assert (seen[weights == 0] == seen.max()).all()


def test_a_long_record_and_one_of_statistics_have_a_picture_too() -> None:
    assert picture(view_fakes.ramp(4099)).shape[0] == 2 * (CELL + GAP) - GAP
    assert picture(view_fakes.coarse()).shape[0] == CELL


def test_words_of_strangers_are_only_text() -> None:
    record = view_fakes.decoder(["<script>x</script>", "\u202e"], layers=1, n_heads=1)
    told = still_html([record, record])
    assert "<script" not in told and "\u202e" not in told
    assert told.count("<img") == 2


def test_what_is_not_a_number_has_a_colour_of_its_own() -> None:
    """And does not change the shades of the others."""
    record = view_fakes.decoder(layers=2, n_heads=2)
    before = (picture(record)[..., :3] * 255).round()
    plain = record.map

    def broken(place: int, head: int, window: Any, size: Any) -> np.ndarray:
        cells = plain(place, head, window, size).copy()
        if (place, head) == (1, 0):
            cells[3, 2], cells[4, 0] = np.nan, np.inf
        return cells

    record.map = broken  # type: ignore[method-assign]
    after = (picture(record)[..., :3] * 255).round()
    strange = (after == (0xD0, 0x48, 0x9B)).all(-1)
    assert strange.any() and not (before == (0xD0, 0x48, 0x9B)).all(-1).any()
    assert (after[~strange] == before[~strange]).all()
    assert not strange[: CELL + GAP].any() and not strange[:, CELL + GAP :].any()
