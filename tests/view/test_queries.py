"""Questions and their answers: exact means at every level, ragged edges included; else refused."""

import numpy as np
import pytest
import view_fakes

from regard.lens.next_tokens import NextTokens
from regard.view.manifest import BadView
from regard.view.queries import TILE, answer, heads_meant, whole_level


def record_of(n: int) -> view_fakes.FakeRecord:
    return view_fakes.decoder([f"w{i}" for i in range(n)], layers=2, n_heads=3)


@pytest.mark.parametrize("level", [0, 1, 2, 4, 5, 9])
def test_a_tile_is_the_exact_mean_of_its_cells(level: int) -> None:
    n = 53
    record = record_of(n)
    whole = record.weights(1, 2, 0, n).astype(np.float64)
    cell = 1 << level
    cells = -(-n // cell)
    got = answer([record], f"map/0/1/2/{level}/{level}/0/0")
    assert got.shape == (cells, cells)
    for y in range(cells):
        for x in range(cells):
            part = whole[y * cell : (y + 1) * cell, x * cell : (x + 1) * cell]
            assert abs(got[y, x] - part.mean()) < 1e-7


def test_levels_of_the_two_sides_differ_and_tiles_go_on() -> None:
    n = TILE + 41
    record = record_of(n)
    whole = record.weights(0, 1, 0, n)
    got = answer([record], "map/0/0/1/0/3/1/0")
    assert got.shape == (41, -(-n // 8))
    np.testing.assert_allclose(got[3, 5], whole[TILE + 3, 40:48].mean(), rtol=1e-5)
    np.testing.assert_allclose(got[40, 37], whole[n - 1, 296:].mean(), rtol=1e-5)


def test_rows_columns_and_weights_are_those_of_the_matrix() -> None:
    record = record_of(17)
    whole = record.weights(1, 0, 0, 17)
    np.testing.assert_array_equal(answer([record], "row/0/1/0/11"), whole[11])
    np.testing.assert_array_equal(answer([record], "column/0/1/0/5"), whole[:, 5])
    np.testing.assert_allclose(answer([record], "weight/0/1/0/11/5"), [[whole[11, 5]]])
    np.testing.assert_allclose(answer([record], "received/0/1/0"), whole.sum(0), rtol=1e-6)


def test_layer_and_all_are_means_over_heads_of_one_kind() -> None:
    record = view_fakes.translator()
    assert heads_meant(record, 3, "layer") == [(3, h) for h in range(4)]
    assert heads_meant(record, 3, "all") == [(p, h) for p in (3, 5) for h in range(4)]
    assert heads_meant(record, 0, "all") == [(p, h) for p in (0, 1) for h in range(4)]
    rows = [record.rows(3, h, 2) for h in range(4)]
    np.testing.assert_allclose(answer([record], "row/0/3/layer/2"), np.mean(rows, 0), rtol=1e-6)


def test_what_is_asked_of_a_record_as_a_whole() -> None:
    record = record_of(17)
    whole = record.rollout()
    np.testing.assert_allclose(answer([record], "rollout/0/11"), whole[11], rtol=1e-6)
    np.testing.assert_allclose(answer([record], "drawn/0/5"), whole[:, 5], rtol=1e-6)
    probs, ids = np.full((17, 2), 0.25), np.arange(34).reshape(17, 2)
    came = np.append(np.arange(1, 17), -1)
    record.predicted = NextTokens(probs, ids, np.append(np.nan, probs[1:, 0]), came)
    np.testing.assert_array_equal(answer([record], "given/0"), record.predicted.given)
    got = answer([record], "next/0")
    np.testing.assert_array_equal(got, np.concatenate([probs, ids, came[:, None]], 1))


def test_sums_beside_weights_are_of_a_head_or_the_mean_of_several() -> None:
    record = record_of(17)
    drawn = np.random.default_rng(3)
    record.norms = [drawn.uniform(0, 2, (3, 17)) for _ in range(2)]
    record.sums = [(drawn.normal(size=(3, 17)), drawn.normal(size=(3, 17))) for _ in range(2)]
    np.testing.assert_allclose(answer([record], "norms/0/1/2"), record.norms[1][2], rtol=1e-6)
    for kind, which in (("gradient_rows", 0), ("gradient_columns", 1)):
        sums = [record.sums[place][which] for place in range(2)]
        np.testing.assert_allclose(answer([record], f"{kind}/0/1/2"), sums[1][2], rtol=1e-6)
        mean = np.mean(sums, (0, 1))
        np.testing.assert_allclose(answer([record], f"{kind}/0/0/all"), mean, rtol=1e-5)


def test_encoder_and_decoder_of_one_length_are_not_averaged() -> None:
    record = view_fakes.translator()
    record.places = [
        view_fakes.make_place("encoder.layers.0.attn", 0, "self", 2, 10, 10, False),
        view_fakes.make_place("decoder.layers.0.attn", 0, "self", 2, 10, 10, True),
    ]
    assert heads_meant(record, 0, "all") == [(0, 0), (0, 1)]


@pytest.mark.parametrize(
    "question",
    [
        "",
        "map",
        "map/0/0/0/0/0/0",
        "map/0/0/0/0/0/0/0/0",
        "map/1/0/0/0/0/0/0",
        "map/0/2/0/0/0/0/0",
        "map/0/0/3/0/0/0/0",
        "map/0/0/0/31/0/0/0",
        "map/0/0/0/0/0/1/0",
        "map/0/0/0/0/0/999999999/0",
        "map/0/0/-1/0/0/0/0",
        "map/0/0/0x1/0/0/0/0",
        "map/0/0/٣/0/0/0/0",
        "map/0/0/1e9/0/0/0/0",
        "row/0/0/0/17",
        "column/0/0/0/17",
        "weight/0/0/0/0/17",
        "weight/0/0/0/17/0",
        "top/0/0/layer",
        "../../etc/passwd",
        "row/0/0/all/9999999999",
        "rollout/0/17",
        "drawn/0/-1",
        "rollout/1/0",
        "norms/0/0/0",
        "gradient_rows/0/0/0",
        "given/0",
        "next/0",
        "next/0/0",
    ],
)
def test_a_question_out_of_range_is_refused(question: str) -> None:
    with pytest.raises(BadView):
        answer([record_of(17)], question)


def test_a_record_of_statistics_answers_from_its_only_picture() -> None:
    record = view_fakes.coarse()
    picture = record.map(0, 1, (0, 1000, 0, 1000), (128, 128))
    np.testing.assert_array_equal(answer([record], "map/0/0/1/0/0/0/0"), picture)
    half = answer([record], "map/0/0/1/1/1/0/0")
    np.testing.assert_allclose(half[3, 2], picture[6:8, 4:6].mean(), rtol=1e-6)
    with pytest.raises(ValueError, match="statistics only"):
        answer([record], "row/0/0/1/5")


@pytest.mark.parametrize(("length", "level"), [(1, 0), (64, 0), (65, 1), (128, 1), (4097, 7)])
def test_the_level_of_a_small_map(length: int, level: int) -> None:
    assert whole_level(length, 64) == level
