"""Which rows of a batch are recorded: one, several, or the windows and heads of one input."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from lens_subjects import SUBJECTS, draw, judge, text_model
from rounding import assert_within, bound_weights
from torch import Tensor, nn

from regard.hf import NAME
from regard.layers import MultiHeadAttention
from regard.lens import captured_call, look_at_calls, mask_runs, row_takes, stitch_calls
from regard.lens.mask_runs import find_runs
from regard.lens.record import Record
from regard.lens.stitch_calls import Take
from regard.lens.watch import watch
from regard.ops import Dense, Window


def test_several_rows_of_a_batch_in_one_record(tmp_path: Any) -> None:
    model, ids = SUBJECTS["llama"](), draw(3, 11)
    judged = judge(model, {"input_ids": ids})
    with torch.no_grad(), watch(model, keep="qk", row=[2, 0]) as record:
        model(input_ids=ids, use_cache=False)
    names = [place.name for place in record.places]
    assert names[:2] == ["model.layers.0.self_attn[2]", "model.layers.0.self_attn[0]"]
    assert len(names) == 2 * len(judged) == len(set(names))
    assert [place.layer for place in record.places] == [n // 2 for n in range(len(names))]
    for number in range(len(names)):
        row = (2, 0)[number % 2]
        plain, exact = (maps[row] for maps in judged[number // 2])
        found = np.stack([record.map(number, head) for head in range(len(plain))])
        assert_within(found, exact, bound_weights(plain, exact))
        assert record.ids(number).tolist() == ids[row].tolist()
    record.save(tmp_path / "x.regard")
    assert [place.name for place in Record.open(tmp_path / "x.regard").places] == names


def test_several_rows_are_written_on_each_in_its_own_place() -> None:
    model, ids = SUBJECTS["gpt2"](), draw(3, 7)
    with torch.no_grad(), watch(model, keep="qk", row=range(3)) as record:
        given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 5}
        written = model.generate(ids, **given)
    judged = judge(model, {"input_ids": written[:, :-1], "use_cache": False})
    assert len(record.places) == 3 * len(judged)
    for number in range(len(record.places)):
        plain, exact = (maps[number % 3] for maps in judged[number // 3])
        found = np.stack([record.map(number, head) for head in range(len(plain))])
        assert_within(found, exact, bound_weights(plain, exact))


def test_a_second_batch_of_texts_may_begin_in_a_cache_of_fixed_size() -> None:
    """Its first call has slots for keys that are yet to come, which are none of calls before it."""
    model, given = SUBJECTS["llama"](), {"do_sample": False, "max_new_tokens": 5}
    given |= {"cache_implementation": "static", "disable_compile": True}
    given["attention_mask"] = torch.ones(2, 7).long().index_fill_(1, torch.arange(2), 0)
    given["attention_mask"][1] = 1
    with torch.no_grad(), watch(model, keep="qk", row=1) as record:
        texts = [model.generate(draw(2, 7, seed), **given)[1:, :-1] for seed in (5, 9)]
    n_layers = len(record.places) // 2
    for text, first in zip(texts, (0, n_layers), strict=True):
        judged = judge(model, {"input_ids": text})
        assert len(judged) == n_layers
        for number, maps in enumerate(judged, first):
            plain, exact = (map_bhts[0] for map_bhts in maps)
            found = np.stack([record.map(number, head) for head in range(len(plain))])
            assert_within(found, exact, bound_weights(plain, exact))


def test_the_rows_of_a_batch_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each layer, and what is found of their mask is kept for all layers."""
    looks: list[Any] = []
    plain, n_rows = look_at_calls.look_at, 19

    def look(call: Any, asked: Any, spots: Any = None) -> Any:
        looks.append((spots, call.rule.mask))
        return plain(call, asked, spots)

    found: list[Any] = []
    monkeypatch.setattr(
        mask_runs, "find_runs", lambda rule: (found.append(rule), find_runs(rule))[1]
    )
    monkeypatch.setattr(look_at_calls, "look_at", look)
    model, ids = SUBJECTS["llama"](), draw(n_rows, 7)
    real = torch.arange(7) >= torch.arange(n_rows)[:, None] % 5
    given = {"input_ids": ids, "attention_mask": real.long(), "use_cache": False}
    with torch.no_grad(), watch(model, row=range(n_rows)) as record:
        model(**given)
    n_layers = len(record.places) // n_rows
    assert n_layers > 1 and len(looks) == n_layers
    assert len({id(spots) for spots, _ in looks}) == 1
    assert len({id(mask) for _, mask in looks}) == 1
    assert len(found) == n_rows
    # In any other order they are taken one by one; the numbers are the same, but for rounding.
    with torch.no_grad(), watch(model, row=range(n_rows)[::-1]) as alone:
        model(**given)
    assert len(looks) == n_layers * (1 + n_rows)
    places = {place.name: number for number, place in enumerate(alone.places)}
    assert sorted(places) == sorted(place.name for place in record.places)
    for number, place in enumerate(record.places):
        assert place == alone.places[places[place.name]]
        one, other = record.statistics(number), alone.statistics(places[place.name])
        assert one.keys() == other.keys()
        for name in one:
            # Sums of 7 or fewer weights and of their logarithms, each of which rounds.
            np.testing.assert_allclose(one[name], other[name], rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("keep", ["statistics", "qk", ["qk", "values"]])
def test_rows_measured_together_can_be_continued_each(keep: Any) -> None:
    model, ids = SUBJECTS["llama"](), draw(3, 7)
    real = torch.arange(7) >= torch.tensor([[0], [3], [1]])
    given = {"do_sample": False, "max_new_tokens": 4, "attention_mask": real.long()}
    records = []
    for rows in ([0, 1, 2], [2, 1, 0]):
        with torch.no_grad(), watch(model, row=rows, keep=keep) as record:
            model.generate(ids, **given)
        records.append(record)
    together, alone = records
    places = {place.name: number for number, place in enumerate(alone.places)}
    for number, place in enumerate(together.places):
        assert place == alone.places[places[place.name]] and place.n_queries == 10
        one, other = together.statistics(number), alone.statistics(places[place.name])
        for name in one:
            np.testing.assert_allclose(one[name], other[name], rtol=0, atol=4e-6, err_msg=name)


@pytest.mark.parametrize("name", ["bert", "t5", "gpt2", "gemma2"])
def test_some_heads_and_extras_of_rows_measured_together(name: str) -> None:
    """With the values, and the gradients of a loss, each row as when it is recorded alone."""
    model, ids = SUBJECTS[name](), draw(3, 7)
    given: dict[str, Any] = {"input_ids": ids}
    if name == "t5":
        given["decoder_input_ids"] = ids.flip(1)[:, :5]
    keep = ["qk", "values", "gradients"]

    def look(row: Any) -> Record:
        with watch(model, heads=[2, 0], row=row, keep=keep) as record:
            out = model(**given)
            out[0].float().square().sum().backward()
        model.zero_grad()
        return record

    together = look([0, 1, 2])
    places = {place.name: number for number, place in enumerate(together.places)}
    for row in range(3):
        alone = look(row)
        for number, place in enumerate(alone.places):
            at = places[place.name + f"[{row}]"]
            assert together.places[at].heads == (2, 0) == place.heads
            one, other = together.statistics(at), alone.statistics(number)
            assert one.keys() == other.keys()
            for what in one:
                # Some hundred operations of float32, each of which may round in another way.
                scale = max(float(np.abs(other[what]).max()), 1e-6)
                np.testing.assert_allclose(one[what], other[what], rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize("copied", [False, True])
def test_a_text_with_nan_is_left_out_alone(copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the results of a batch are copied together, and checked together first."""
    if copied:
        monkeypatch.setattr(row_takes, "is_large", lambda _: True)
    model, ids = SUBJECTS["llama"](), torch.arange(21).view(3, 7)
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = torch.nan  # of the second text
        with pytest.warns(RuntimeWarning, match="holds NaN"), watch(model, row=[0, 1, 2]) as record:
            model(ids, use_cache=False)
        with watch(model, row=2) as alone:
            model(ids, use_cache=False)
    names = {place.name for place in record.places}
    assert names == {f"{place.name}[{row}]" for place in alone.places for row in (0, 2)}


def test_texts_written_into_one_tensor_are_each_their_own() -> None:
    model, texts = SUBJECTS["llama"](), [draw(1, 7, seed) for seed in (1, 2)]
    texts[1][0, 3:6] = texts[1][0, :3]  # so that some query has a token that came before
    ids = texts[0].clone()
    with torch.no_grad(), watch(model) as record:
        model(ids, use_cache=False)
        ids.copy_(texts[1])
        model(ids, use_cache=False)
    n_layers = len(record.places) // 2
    for n, text in enumerate(texts):
        with torch.no_grad(), watch(model) as alone:
            model(text, use_cache=False)
        for layer in range(n_layers):
            place = n_layers * n + layer
            assert record.ids(place).tolist() == text[0].tolist()
            for name, scores in alone.heads().items():
                assert np.array_equal(record.heads()[name][place], scores[layer], equal_nan=True)


def test_the_numbers_of_heads_are_copied_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a copy waits for all that a GPU has to do."""
    plain, copied = torch.tensor, list[Any]()

    def copy(values: Any, *rest: Any, **how: Any) -> torch.Tensor:
        if "device" in how and len(values):
            copied.append(values)
        return plain(values, *rest, **how)

    monkeypatch.setattr(torch, "tensor", copy)
    captured_call.numbers_on.cache_clear()
    model, ids = SUBJECTS["llama"](), draw(3, 7)
    with torch.no_grad(), watch(model, heads=[2, 0], row=[0, 2]) as record:
        model(ids)
    assert len(record.places) > 2 and record.places[0].heads == (2, 0)
    assert copied == [(2, 0)]


def test_rollout_of_several_rows_is_of_one_of_them() -> None:
    sizes = {"embedding_size": 12, "hidden_size": 36, "num_hidden_layers": 3, "vocab_size": 83}
    config = hf.AlbertConfig(**sizes, num_attention_heads=4, intermediate_size=52)
    model, ids = text_model(config, hf.AlbertModel), draw(2, 11)
    with torch.no_grad():
        with watch(model, keep="qk", row=[0, 1]) as both:
            model(ids)
        with watch(model, keep="qk", row=1) as last:
            model(ids)
    # Products of 3 layers, of weights from sums of 9 and means over 4 heads, in other orders.
    np.testing.assert_allclose(both.rollout(), last.rollout(), rtol=3 * 16 * 2**-23, atol=0)
    assert both.places[3].name == f"{last.places[0].name}[1]@2"


def test_rows_that_mean_nothing_are_refused() -> None:
    model = SUBJECTS["bert"]()
    for wrong in ([], [0, 0], ["a"]):
        with pytest.raises(ValueError, match="row must be"), watch(model, row=wrong):
            pass
    with pytest.raises(ValueError, match="batch has 3 rows"), torch.no_grad(), watch(model):
        model(draw(3, 11))
    with (
        pytest.raises(ValueError, match="row=5 was asked for"),
        torch.no_grad(),
        watch(model, row=[0, 5]),
    ):
        model(draw(3, 11))


@pytest.mark.parametrize("name", ["Swin", "Swinv2"])
def test_windows_of_one_image_need_no_row(name: str) -> None:
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [2, 2]}
    config = getattr(hf, f"{name}Config")(**sizes, num_heads=[2, 3], window_size=4)
    model, image = getattr(hf, f"{name}Model")(config).eval(), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        with watch(model, keep="qk", row=0) as first:
            model(image)
        for call in (lambda: model(image), lambda: model(pixel_values=image)):
            with watch(model, keep="qk") as record:
                call()
            assert [place.name for place in record.places] == [p.name for p in first.places]
            for number in range(4):
                assert np.array_equal(record.map(number, 1), first.map(number, 1))
            assert "16 windows, and the record has the first" in record.notes[0]
        assert not first.notes
        with watch(model, layers=[0], row=range(16)) as every:
            model(image)
        assert len(every.places) == 16 and not every.notes
        with pytest.raises(ValueError, match="batch has 32 rows"), watch(model):
            model(torch.cat([image, image]))


class Positions(nn.Module):
    """Reads positions before it reads its input, which it is given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.pos, self.qkv = nn.Embedding(20, 12), nn.Linear(12, 36)

    def forward(self, *, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        x = x + self.pos(torch.arange(T)[None])
        q, k, v = self.qkv(x).view(B, T, 3, 3, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v)


def test_rows_of_a_batch_are_no_windows_whatever_is_read_first() -> None:
    """One row of positions made a batch one input in three windows."""
    model = Positions()
    with pytest.raises(ValueError, match="batch has 3 rows"), torch.no_grad(), watch(model):
        model(x=torch.randn(3, 7, 12))
    outer = nn.ModuleDict({"inner": model})
    outer.forward = lambda batch: model(x=batch["x"])  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="batch has 3 rows"), torch.no_grad(), watch(outer):
        outer({"x": torch.randn(3, 7, 12)})
    with torch.no_grad(), watch(outer) as record:
        outer({"x": torch.randn(1, 7, 12)})
    assert not record.notes


def test_windows_of_one_token_need_no_row() -> None:
    class Windows(Positions):
        def forward(self, *, x: Tensor) -> Tensor:
            return super().forward(x=x.view(4, 1, 12))

    with torch.no_grad(), watch(model := Windows()) as record:
        model(x=torch.randn(1, 4, 12))
    assert "4 windows" in record.notes[0] and record.places[0].n_queries == 1


class Towers(nn.Module):
    """Two texts, each by a tower of its own: of other rows and heads."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = MultiHeadAttention(12, 3), MultiHeadAttention(12, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.two(y)])


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"row": 1}, "one could not be recorded .*row=1 was asked for, and the batch has 1 rows"),
        ({"row": 0, "heads": (2, 5)}, "one could not be recorded .*heads=.2, 5. were asked for"),
        ({}, "two could not be recorded .*batch has 2 rows"),
    ],
)
def test_a_row_or_a_head_that_one_place_lacks_ends_no_forward(asked: Any, why: str) -> None:
    model, x, y = Towers(), torch.randn(1, 5, 12), torch.randn(2, 5, 12)
    with torch.no_grad():
        plain = model(x, y)
        with pytest.warns(RuntimeWarning, match=why) as told, watch(model, **asked) as record:
            assert torch.equal(model(x, y), plain)
    assert len(told) == 1 and len(record.places) == 1 == len(record.notes)


class TwoStreams(nn.Module):
    """A second stream of queries looks at the keys of the first and its own, as ProphetNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        heads = x[:, None]
        both = torch.cat([heads, heads + 1], 2)
        one: Tensor = self.out(F.scaled_dot_product_attention(heads, heads, heads))
        return one + F.scaled_dot_product_attention(heads + 1, both, both)


def test_a_second_stream_of_queries_is_no_later_text() -> None:
    with torch.no_grad(), watch(model := nn.Sequential(TwoStreams())) as record:
        model(torch.randn(1, 5, 6))
    found = [(place.name, place.n_queries, place.n_keys) for place in record.places]
    assert found == [("0", 5, 5), ("0@2", 5, 10)]


class Merged(nn.Module):
    """Heads in the axis of the batch, and no word of how many."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.qkv, self.how = nn.Linear(12, 36), how

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, 3, 4).permute(2, 0, 3, 1, 4).flatten(1, 2)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        if self.how == "sdpa":
            return F.scaled_dot_product_attention(q, k, v)
        return torch.bmm(q, k.mT).mul(0.5).softmax(-1) @ v


@pytest.mark.parametrize("how", ["sdpa", "written out"])
def test_heads_in_the_axis_of_the_batch(how: str) -> None:
    model, x = Merged(how), torch.randn(1, 7, 12)
    with torch.no_grad(), watch(model, keep="qk") as record:
        model(x)
    assert [(place.n_heads, place.n_queries) for place in record.places] == [(3, 7)]
    with torch.no_grad():
        q, k, _ = model.split(x)
        plain = (q @ k.mT / 2).softmax(-1)
        exact = (q.double() @ k.double().mT / 2).softmax(-1)
    found = np.stack([record.map(0, head) for head in range(3)])
    assert_within(found, exact, bound_weights(plain, exact))
    with pytest.raises(ValueError, match="batch has 6 rows"), torch.no_grad(), watch(model):
        model(torch.randn(2, 7, 12))


def test_what_was_measured_is_let_go_when_the_block_ends() -> None:
    """At once, as it lies on a GPU where it was measured there; not when garbage is collected."""
    model = torch.nn.TransformerEncoderLayer(20, 4, 37, batch_first=True).eval()
    kept: list[weakref.ref[Any]] = []
    # Of tests before, whose errors may hold what they were raised in.
    others = {id(x): x for x in gc.get_objects() if type(x) is Take}
    gc.disable()
    try:
        with torch.no_grad(), watch(model) as record:
            model(torch.ones(1, 7, 20))
            found = [x for x in gc.get_objects() if type(x) is Take and id(x) not in others]
            kept = list(map(weakref.ref, found))
            assert len(kept) == 1
            del found
        assert kept[0]() is None
    finally:
        gc.enable()
    assert record.statistics(0)["entropy"].shape == (4, 7)


def test_a_large_mask_that_inference_mode_changes_in_place_is_read_again() -> None:
    """Torch counts no writes there; the passes of a model tell masks apart."""
    T = 300
    layer = MultiHeadAttention(8, 2)
    masks = [torch.ones(T, T, dtype=torch.bool).tril(), torch.eye(T, dtype=torch.bool)]
    with torch.inference_mode():
        x, mask = torch.randn(1, T, 8), torch.empty(T, T, dtype=torch.bool)
        with watch(layer, keep="qk") as record:
            for each in masks:
                layer(x, mask=Dense(mask.copy_(each)))
    for number, each in enumerate(masks):
        assert np.array_equal(record.map(number, 0) > 0, each.numpy())


@pytest.mark.parametrize("row", [0, 1, [0, 1]], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", NAME])
@pytest.mark.parametrize("padded", [0, 3])
def test_generation_from_padded_texts_in_a_cache_of_fixed_size(
    padded: int, attention: str, row: Any
) -> None:
    """Regard's masks count keys from the first or from the last; the empty slots are cut off."""
    model, ids = SUBJECTS["llama"](), draw(2, 7)
    model.set_attn_implementation(attention)
    real = torch.ones_like(ids)
    real[0, :padded] = 0
    given = {"max_new_tokens": 5, "do_sample": False, "attention_mask": real}
    records = []
    for cache in ({"cache_implementation": "static", "disable_compile": True}, {}):
        with torch.no_grad(), watch(model, row=row, keep="qk") as record:
            model.generate(ids, **given, **cache)
        records.append(record)
    fixed, growing = records
    assert fixed.places == growing.places
    for number, place in enumerate(fixed.places):
        assert (place.n_queries, place.n_keys) == (11, 11)
        for head in range(place.n_heads):
            one, other = fixed.map(number, head), growing.map(number, head)
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_a_cache_of_fixed_size_under_a_rule_of_any_form() -> None:
    """Rows that see several runs, and heads that see other keys."""
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 9, 4)
    seen = torch.rand(1, 2, 3, 9) < 0.5
    seen[..., 5:] = False
    seen[..., 0] = True
    # A window that shows everything, and counts from the last key.
    call = captured_call.Call(name="x", q=q, k=k, mask=Dense(seen) & Window(9, 9))
    assert not call.follows_keys
    fit = stitch_calls.first_keys(call, 5, find_runs(call.rule))
    assert fit.call.shape.S == 5 and isinstance(fit.call.mask, Dense)
    assert torch.equal(fit.call.mask.seen, seen[..., :5])
