"""The record: every part of a map exact, in memory and from a file, with numpy alone."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rounding import assert_within, bound_sum, bound_weights, widen
from safetensors.numpy import load_file
from torch import Tensor, nn

import regard
from regard.lens import bias_forms, stitch_calls
from regard.lens.head_effects import Effect
from regard.lens.record import Record
from regard.lens.schema import Description, Place
from regard.lens.token_labels import label
from regard.lens.viewers import VIEWERS
from regard.lens.watch import watch
from regard.ops import Causal, Map, Wants
from regard.tokens import Tokenizer

ROOT = Path(__file__).resolve().parents[2]


class Attends(nn.Module):
    """One call of attention, given whole."""

    def forward(self, q: Tensor, k: Tensor, **rule: Any) -> Tensor:
        return regard.attention(q, k, k, **rule)


def record_of(q: Tensor, k: Tensor, keep: str = "qk", **rule: Any) -> Record:
    model = Attends()
    with torch.no_grad(), watch(model, keep=keep) as record:
        model(q, k, **rule)
    return record


def draw(T: int, S: int, H: int = 3, G: int = 3, D: int = 5) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(T * S)
    return torch.randn(1, H, T, D, generator=made), torch.randn(1, G, S, D, generator=made)


def positions(n: int) -> Tensor:
    at = torch.arange(n) - 3
    return torch.where(at < 0, -1, at)


TABLE = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"mask": Causal()},
    "window": {"mask": Causal() & regard.Window(3, 0)},
    "two sides": {"mask": regard.Window(2, 4)},
    "lengths": {"mask": regard.Lengths(torch.tensor([9]))},
    "left": {"mask": regard.Lengths(torch.tensor([9]), side="left")},
    "documents": {"mask": regard.Documents(torch.tensor([0] * 4 + [1] * 5 + [0] * 4))},
    "prefix": {"mask": Causal() | regard.Prefix(5)},
    "placed": {"mask": Causal().at(positions(13), positions(13))},
    "dense": {"mask": torch.rand(1, 3, 13, 13, generator=torch.Generator().manual_seed(7)) > 0.3},
    "alibi": {"bias": regard.ALiBi(3), "mask": Causal()},
    "placed alibi": {
        "bias": regard.ALiBi(3).at(positions(13), positions(13)),
        "mask": Causal().at(positions(13), positions(13)),
    },
    "t5": {"bias": regard.RelativeTable(TABLE, max_distance=9)},
    "t5 causal": {"bias": regard.RelativeTable(TABLE, False, 17), "mask": Causal()},
    "dense bias": {"bias": torch.randn(3, 13, 13, generator=torch.Generator().manual_seed(8))},
    "column": {"bias": torch.randn(3, 1, 13, generator=torch.Generator().manual_seed(8))},
    "two biases": {
        "bias": regard.ALiBi(3) + regard.DenseBias(torch.linspace(-1, 1, 13)[None] ** 3)
    },
    "hiding bias": {
        "bias": torch.zeros(13, 13).masked_fill(torch.ones(13, 13).tril() == 0, torch.finfo().min)
    },
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 0.8, "mask": Causal()},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0])},
}


def observe_twice(q: Tensor, k: Tensor, wants: Wants, **rule: Any) -> tuple[Any, Any]:
    """What `observe` says about q and k, and about the same numbers in float64."""
    exact = regard.observe(q.double(), k.double(), None, wants=wants, **widen(rule))
    return regard.observe(q, k, None, wants=wants, **rule), exact


def bound_maps(q: Tensor, k: Tensor, **rule: Any) -> float:
    """How far a weight or a mean of weights may be off.

    A mean is off by no more than its weights, and by its own sum, whose terms are shares of 1: a
    sum of as many terms as there are rows, of as many as there are keys.
    """
    plain, exact = observe_twice(q, k, Wants(weights=True), **rule)
    sums = bound_sum(q.shape[2] + k.shape[2], exact.weights.max())
    return bound_weights(plain.weights, exact.weights) + sums


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_kept_exactly(name: str, tmp_path: Path) -> None:
    q, k = draw(13, 13)
    record = record_of(q, k, **RULES[name])
    plain, exact = observe_twice(q, k, Wants(weights=True), **RULES[name])
    assert exact.weights.dtype == torch.float64
    bound = bound_weights(plain.weights, exact.weights)
    record.save(tmp_path / "x.regard")
    for one in (record, Record.open(tmp_path / "x.regard")):
        assert one.places[0].exact_zoom
        for head in range(3):
            expected = exact.weights[0, head].numpy()
            assert_within(one.map(0, head), expected, bound)
            assert_within(one.rows(0, head, 7), expected[7], bound)
            assert_within(one.column(0, head, 5), expected[:, 5], bound)
            assert_within(one.weight(0, head, 11, 4), expected[11, 4], bound)
    assert record.places[0].causal == bool((np.triu(exact.weights[0].numpy(), 1) == 0).all())


@pytest.mark.parametrize("name", RULES)
def test_how_far_and_at_how_many_keys_queries_look_is_that_of_the_plain_formula(name: str) -> None:
    q, k = draw(13, 13)
    record = record_of(q, k, **RULES[name])
    plain, exact = observe_twice(q, k, Wants(weights=True), **RULES[name])
    weights_hts = exact.weights[0].numpy()
    gaps_ts = np.abs(np.arange(13)[:, None] - np.arange(13))
    # Each of 13 weights may be off, at most 12 away; twice, as the reach is made of two sums.
    bound = 2 * 12 * 13 * bound_weights(plain.weights, exact.weights)
    told = record.statistics(0)
    assert ("reach" in told) == (not record.places[0].causal)
    assert_within(told.get("reach", told["distance"]), (weights_hts * gaps_ts).sum(2), bound)
    assert record.visible(0).tolist() == (weights_hts > 0).sum(2).max(0).tolist()


def test_relative_biases_take_little_room() -> None:
    q, k = draw(13, 13)
    gap = -(torch.arange(13)[:, None] - torch.arange(13)).abs()
    record = record_of(q, k, bias=torch.tensor([0.5, 0.25, 0.125])[:, None, None] * gap)
    assert record._about.rules[0]["biases"] == [{"kind": "relative", "lowest": -12}]
    assert record._arrays.get(0, "bias0.table").shape == (3, 25)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_type_and_grouped_heads(dtype: torch.dtype, tmp_path: Path) -> None:
    q, k = (x.to(dtype) for x in draw(7, 11, H=6, G=2))
    record = record_of(q, k, mask=Causal())
    plain, exact = observe_twice(q, k, Wants(weights=True), mask=Causal())
    record.save(tmp_path / "x.regard")
    opened = Record.open(tmp_path / "x.regard")
    # Sums are made and kept in float32 whatever the type of q and k.
    bound = bound_weights(plain.weights, exact.weights, torch.float32)
    for head in range(6):
        assert_within(opened.map(0, head), exact.weights[0, head], bound)


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (7, 2), (13, 17), (29, 31)])
@pytest.mark.parametrize("window", [None, (0, 13, 0, 17), (3, 10, 2, 13), (5, 6, 0, 17)])
def test_maps_of_windows_are_exact_means(window: Any, size: tuple[int, int]) -> None:
    q, k = draw(13, 17)
    record = record_of(q, k, mask=Causal())
    t0, t1, s0, s1 = window or (0, 13, 0, 17)
    wanted = Map(height=size[0], width=size[1], queries=(t0, t1), keys=(s0, s1))
    _, exact = observe_twice(q, k, Wants(map=wanted), mask=Causal())
    bound = bound_maps(q, k, mask=Causal())
    for head in range(3):
        found = record.map(0, head, window, size)
        assert found.dtype == np.float32
        assert_within(found, exact.map[0, head], bound)


def average(weights: np.ndarray, window: Any, size: tuple[int, int]) -> np.ndarray:
    """The means of a window's cells: each weight repeated until cells have whole edges."""
    t0, t1, s0, s1 = window
    fine = weights[t0:t1, s0:s1].repeat(size[0], 0).repeat(size[1], 1)
    return fine.reshape(size[0], t1 - t0, size[1], s1 - s0).mean((1, 3))


def test_large_maps_come_from_the_base_and_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a base of cells of 4, at sizes that no cell divides, and rows that came later."""
    monkeypatch.setattr(stitch_calls, "DIRECT", 100)
    monkeypatch.setattr(stitch_calls, "BASE_CELLS", 32)
    q, k = draw(101, 103)
    record = record_of(q, k, mask=Causal())
    kept = record._weights(0)
    assert kept.base is not None and kept.base.cell == 4
    assert kept.base.means.shape == (3, 25, 25)
    _, exact = observe_twice(q, k, Wants(weights=True), mask=Causal())
    plain = record_of(q, k, mask=Causal())._weights(0)
    bound = bound_maps(q, k, mask=Causal())
    for window, size in (
        ((0, 100, 0, 100), (25, 25)),
        ((4, 84, 8, 88), (5, 10)),
        ((0, 96, 0, 96), (12, 8)),
        ((2, 98, 0, 96), (12, 8)),
        ((0, 96, 3, 99), (12, 8)),
        ((8, 100, 0, 100), (23, 1)),
        ((0, 101, 0, 103), (7, 3)),
        ((40, 101, 40, 103), (61, 9)),
    ):
        for head in range(3):
            want = average(exact.weights[0, head].numpy(), window, size)
            assert_within(record.map(0, head, window, size), want, bound)
            assert_within(plain._direct(head, window, size), want, bound)


def test_rows_behind_the_base_are_made_from_q_and_k(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stitch_calls, "DIRECT", 100)
    monkeypatch.setattr(stitch_calls, "BASE_CELLS", 16)
    q, k = draw(64, 64)
    model = Attends()
    with torch.no_grad(), watch(model, keep="qk") as record:
        model(q[:, :, :40], k[:, :, :40], mask=Causal())
        for n in range(40, 64):
            model(q[:, :, n : n + 1], k[:, :, : n + 1], mask=Causal())
    assert len(record.places) == 1 and record.places[0].n_queries == 64
    assert record._weights(0).base.means.shape == (3, 10, 10)  # type: ignore[union-attr]
    _, exact = observe_twice(q, k, Wants(map=(8, 4)), mask=Causal())
    assert_within(record.map(0, 1, size=(8, 4)), exact.map[0, 1], bound_maps(q, k, mask=Causal()))


def test_statistics_alone_answer_what_they_can() -> None:
    q, k = draw(201, 201)
    record = record_of(q, k, "statistics", mask=Causal())
    _, exact = observe_twice(q, k, Wants(map=(64, 32)), mask=Causal())
    assert not record.places[0].exact_zoom
    bound = bound_maps(q, k, mask=Causal())
    assert_within(record.map(0, 2, size=(64, 32)), exact.map[0, 2], bound)
    for ask in (
        lambda: record.map(0, 0, (0, 9, 0, 9), (3, 3)),
        lambda: record.map(0, 0, size=(5, 7)),
        lambda: record.rows(0, 0, 3),
        lambda: record.weight(0, 0, 3, 3),
    ):
        with pytest.raises(ValueError, match='keep="qk"'):
            ask()
    assert np.isnan(record.pairs([(3, 1)])).all()


@pytest.mark.parametrize("cells", [(64, 32), (37, 11), (201, 201), None])
def test_the_grid_is_that_of_the_picture_that_was_kept(cells: tuple[int, int] | None) -> None:
    q, k = draw(201, 201)
    model = Attends()
    with torch.no_grad(), watch(model, Wants(map=cells, entropy=True)) as record:
        model(q, k, mask=Causal())
    assert record.grid(0) == (cells or (128, 128))
    assert record.has_weights(0) == (cells == (201, 201))
    assert record.map(0, 1, size=record.grid(0)).shape == record.grid(0)
    exact = record_of(q, k, "qk")
    assert (exact.grid(0), exact.has_weights(0)) == ((201, 201), True)


@pytest.mark.parametrize(
    ("name", "stack"),
    [
        ("encoder.layers.0.attn", "encoder"),
        ("model.decoder.layers.3.encoder_attn", "decoder"),
        ("decoder.bert.encoder.layer.1.attention.self", "decoder"),
        ("text_encoder.block.2.SelfAttention", "encoder"),
        ("layers.5.attn", ""),
    ],
)
def test_the_name_of_a_place_tells_its_stack(name: str, stack: str) -> None:
    assert (
        Place(name=name, layer=0, kind="self", n_heads=1, n_queries=1, n_keys=1, causal=True).stack
        == stack
    )


def test_a_bias_too_large_to_keep_is_said(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(bias_forms, "MOST", 100)
    q, k = draw(13, 13)
    record = record_of(q, k, bias=torch.randn(3, 13, 13))
    assert not record.places[0].exact_zoom
    assert set(record.statistics(0)) >= {"entropy", "peak", "received"}
    with pytest.raises(ValueError, match="statistics only"):
        record.rows(0, 0, 3)


def test_comparison() -> None:
    q, k = draw(13, 13)
    one, two = record_of(q, k, mask=Causal()), record_of(q * 2, k, mask=Causal())
    found = one.compare(two)
    assert found.same_text
    assert np.allclose(found.heads["broad"], two.heads()["broad"] - one.heads()["broad"])
    gap = two.statistics(0)["entropy"] - one.statistics(0)["entropy"]
    assert np.allclose(found.statistics[0]["entropy"], gap, atol=1e-6)
    assert "peak_key" not in found.statistics[0]
    (place, head, most), *_ = found.largest("broad", 2)
    assert abs(most) == np.abs(found.heads["broad"]).max() and place == 0
    assert found.heads["broad"][place, head] == most
    longer = one.compare(record_of(*draw(17, 17), mask=Causal()))
    assert "entropy" not in longer.statistics[0] and not longer.same_text
    with pytest.raises(ValueError, match="head by head"):
        one.compare(record_of(*draw(13, 13, H=4, G=2)))


def handmade() -> Record:
    """A record of two tokens, written by hand."""
    told = Description(
        model="hand", created="2026-01-01T00:00:00Z", kept="qk", text="a b", tokens=["a", "b"]
    )
    told.spans = [(0, 1), (2, 3)]
    told.places = [
        Place(
            name="attn",
            layer=0,
            kind="self",
            n_heads=1,
            n_queries=2,
            n_keys=2,
            causal=True,
            heads=(0,),
        )
    ]
    told.rules = [{"scale": 1.0, "softcap": None, "key_heads": [0], "cell": 0, "biases": []}]
    log2 = np.float32(np.log(2.0))
    arrays = {
        "0.q": np.zeros((1, 2, 1), np.float32),
        "0.k": np.ones((1, 2, 1), np.float32),
        "0.lse": np.array([[0.0, log2]], np.float32),
        "0.first": np.array([0, 1, 2]),
        "0.pairs": np.array([[0, 1], [0, 2]], np.int32),
        "0.entropy": np.array([[0.0, log2]], np.float32),
    }
    return Record(told, arrays)


def test_a_map_of_single_weights_is_not_made_of_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product of queries and keys; two more, of whole matrices, would give the same."""
    record = record_of(*draw(7, 7))
    plain = np.stack([record.rows(0, 0, t) for t in range(7)])
    monkeypatch.setattr("regard.lens.lazy_weights.shares", lambda *_: pytest.fail("averaged"))
    np.testing.assert_allclose(record.map(0, 0), plain, rtol=1e-5)
    np.testing.assert_allclose(record.map(0, 0, (2, 5, 1, 4), (3, 3)), plain[2:5, 1:4], rtol=1e-5)


def test_the_format_is_pinned_by_bytes(tmp_path: Path) -> None:
    """Whoever changes these bytes changes the format: raise the version, and keep reading this."""
    path = tmp_path / "hand.regard"
    handmade().save(path)
    data = path.read_bytes()
    assert hashlib.sha256(data).hexdigest() == PINNED
    assert set(load_file(path)) == {
        f"0.{x}" for x in ("q", "k", "lse", "first", "pairs", "entropy")
    }
    opened = Record.open(path)
    assert opened.map(0, 0).tolist() == [[1.0, 0.0], [pytest.approx(0.5), pytest.approx(0.5)]]
    assert (opened.text, opened.tokens, opened.spans) == ("a b", ["a", "b"], [(0, 1), (2, 3)])
    assert (opened.model, opened.version, opened.kept) == ("hand", 1, "qk")
    assert opened.effects() == []
    heads, edge = np.array([[-0.5]]), ((1,), (0,))
    found = Effect(heads, heads[0], -2.0, -0.25, " c", "forbidding b → a in a head", "a b", edge)
    handmade().add_effect(found).save(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == PINNED_EFFECT
    [again] = Record.open(path).effects()
    assert (again.heads.tolist(), again.layers.tolist(), again.whole) == ([[-0.5]], [-0.5], -2.0)
    assert again.edge == edge


PINNED_EFFECT = "c4e9a2006da39cf4b532a82c1bea6e09400ffd9d1bdb8859c03fdf826cd57d5d"
PINNED = "c765a302250ff5042ea775e39d4ee0543ed5bbbe5adc6aa4eb71d15e2a069330"


def test_words_of_any_kind_are_kept(tmp_path: Path) -> None:
    record = record_of(*draw(5, 5))
    words = ["猫", "🐈‍⬛", "<script>", '"quoted\\"', "\u202eright\ud800"]
    record.describe(text="猫 " + "x" * 100, tokens=words, source_tokens=["a"], model="m\n")
    record.save(tmp_path / "x.regard")
    opened = Record.open(tmp_path / "x.regard")
    assert opened.tokens == [*words[:4], "\u202eright?"]
    assert opened.source_tokens == ["a"] and opened.model == "m\n"


@pytest.mark.parametrize("length", [4096, 4097, 9973])
def test_a_label_too_long_for_a_file_is_cut_and_the_text_is_not(
    length: int, tmp_path: Path
) -> None:
    """As of a word without spaces, which some tokenizers call one unknown token."""
    record, word = record_of(*draw(3, 3)), "猫" * length
    labels, text = ["a", word, "b"], f"a{word}b"
    spans = [(0, 1), (1, length + 1), (length + 1, length + 2)]
    record.describe(text=text, tokens=labels, spans=spans, source_tokens=labels, model=word)
    record.save(tmp_path / "x.regard")
    shown = word if length == 4096 else "猫" * 4095 + "…"
    for one in (record, Record.open(tmp_path / "x.regard")):
        assert one.tokens == one.source_tokens == ["a", shown, "b"] and one.model == shown
        assert (one.text, one.spans) == (text, spans)


def test_what_could_not_be_opened_again_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "x.regard"
    record = handmade()
    record.tokens[1] = "x" * 4097  # past the door that cuts
    with pytest.raises(
        ValueError, match=r"tokens of the description .* each a text of up to 4,096"
    ):
        record.save(path)
    record = handmade().describe(text="a")
    with pytest.raises(ValueError, match=r"a span lies outside the text; record\.describe\("):
        record.save(path)
    assert list(tmp_path.iterdir()) == []
    handmade().save(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"x\.regard was not written"):
        record.save(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    record.describe(spans=[(0, 1), (1, 1)]).save(path)
    assert Record.open(path).text == "a"


def test_a_record_is_shown_by_the_viewers_that_were_entered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert set(VIEWERS) == {"plot", "write_page", "write_heads", "make_widget"}
    for name in VIEWERS:
        monkeypatch.setitem(VIEWERS, name, lambda *args, **more: (args, more))
    record = handmade()
    assert record.plot(1, dpi=3) == ((record, 1), {"dpi": 3})
    assert record.html("x", budget=5) == (("x", record), {"budget": 5})
    assert record.show(line="head") == ((record,), {"line": "head"})


class Letters:
    """A tokenizer as Hugging Face's are asked: token n is the n-th letter."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [chr(97 + n) for n in ids]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.convert_ids_to_tokens(ids))


def test_tokens_are_named_by_a_tokenizer() -> None:
    model = nn.Transformer(12, 2, 1, 1, 17, batch_first=True).eval()

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.model = nn.Embedding(26, 12), model

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            memory = self.model.encoder(self.words(source))
            out: Tensor = self.model.decoder(self.words(target), memory)
            return out

    reads = Reads()
    with torch.no_grad(), watch(reads) as record:
        reads(torch.tensor([[0, 1, 2, 3, 4]]), torch.tensor([[7, 8, 9]]))
    record.read(Letters())
    assert (record.text, record.tokens) == ("hij", ["h", "i", "j"])
    assert (record.source_text, record.source_tokens) == ("abcde", list("abcde"))
    with pytest.raises(TypeError, match="no tokenizer"):
        record.read(object())
    with pytest.raises(ValueError, match="no token ids were recorded"):
        record_of(*draw(5, 5)).read(Letters())


def test_what_is_no_number_or_no_record_is_refused_in_words() -> None:
    record = record_of(*draw(5, 5))
    words = r"place is .layer.; expected its number, from 0 to 0; record.find"
    with pytest.raises(TypeError, match=words):
        record.rows("layer", 0, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"query is 1.5; expected its number, from 0 to 4$"):
        record.rows(0, 0, 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="other is a str; expected a Record"):
        record.compare("x.regard")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"no such folder to write into: .*nowhere'$"):
        record.save("/nowhere/x.regard")


def test_the_number_of_one_head_will_do() -> None:
    q, k = draw(5, 5)
    layer = Attends()
    with watch(layer, heads=2, keep="qk") as record:
        layer(q, k)
    assert record.places[0].heads == (2,)


def test_our_tokenizer_names_characters() -> None:
    from tokenmakers import byte_level

    tokenizer = Tokenizer.from_parts(byte_level())
    ids = tokenizer.encode("猫 sat").ids
    said = label(tokenizer, ids)
    assert said.text == "猫 sat" and said.spans is not None
    assert len(said.tokens) == len(ids) and said.tokens[0] == "猫"


def test_a_model_that_gives_nan_leaves_nothing_to_record() -> None:
    with pytest.raises(ValueError, match="its entropy holds NaN or infinity, as where a model"):
        record_of(torch.full((1, 3, 5, 5), torch.nan), draw(5, 5)[1])


def test_numbers_out_of_range_are_refused() -> None:
    record = record_of(*draw(5, 7))
    for ask in (
        lambda: record.map(1, 0),
        lambda: record.map(0, 3),
        lambda: record.rows(0, 0, 5),
        lambda: record.column(0, 0, 7),
        lambda: record.statistics(-1),
    ):
        with pytest.raises(IndexError, match="out of range"):
            ask()
    for window, size in (((0, 6, 0, 7), (1, 1)), ((3, 3, 0, 7), (1, 1)), ((0, 5, 0, 7), (0, 1))):
        with pytest.raises(ValueError, match=r"window|size"):
            record.map(0, 0, window, size)


NO_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("torch is blocked", name="torch")
sys.meta_path.insert(0, Block())
from regard.lens import BadRecord, Record
record = Record.open(sys.argv[1])
print(record.map(0, 0, (0, 4, 0, 4), (2, 2)).sum(), record.heads()["broad"].shape)
record.rows(0, 0, 3); record.column(0, 0, 3); record.compare(record); record.rollout()
record.describe(text="x").save(sys.argv[1])
"""


def test_a_record_opens_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "x.regard"
    record_of(*draw(11, 11), mask=Causal(), bias=regard.ALiBi(3)).save(path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, str(path)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["(1,", "3)"]


def test_a_tile_of_sixteen_thousand_tokens_is_quick() -> None:
    """Of width 32, without a base: the largest window that is made from q and k, 2,048 a side."""
    rng = np.random.default_rng(0)
    N = 16_384
    told = Description(kept="qk")
    told.places = [
        Place(
            name="a",
            layer=0,
            kind="self",
            n_heads=1,
            n_queries=N,
            n_keys=N,
            causal=True,
            heads=(0,),
        )
    ]
    told.rules = [{"scale": 0.05, "softcap": None, "key_heads": [0], "cell": 0, "biases": []}]
    ends = np.stack([np.zeros(N), np.arange(N) + 1], 1).astype(np.int32)
    arrays = {
        "0.q": rng.standard_normal((1, N, 32), np.float32),
        "0.k": rng.standard_normal((1, N, 32), np.float32),
        "0.lse": np.full((1, N), 9.7, np.float32),
        "0.first": np.arange(N + 1),
        "0.pairs": ends,
    }
    record = Record(told, arrays)
    record.map(0, 0, (0, 256, 0, 256), (256, 256))
    seconds = []
    for t0 in (2048, 6144, 12_288):
        start = time.process_time()
        record.map(0, 0, (t0, t0 + 2048, 0, 2048), (256, 256))
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.3, f"{seconds} s"
