"""Watched Hugging Face models: every number as eager attention has it, and no bit changed."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from lens_subjects import (
    BERT,
    DECODERS,
    ENCODERS,
    OTHERS,
    SUBJECTS,
    TWO_SIDED,
    attentions,
    draw,
    judge,
    question,
    text_model,
)
from rounding import assert_within, bound_weights
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import regard
from regard.lens.hooks.transformers import flash_mask, read_rule
from regard.lens.record import Record
from regard.lens.watch import watch
from regard.ops import Wants
from regard.ops.shape import Shape

_made: dict[str, Any] = {}


def make(name: str) -> Any:
    if name not in _made:
        _made[name] = SUBJECTS[name]()
    return _made[name]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def outputs(out: Any) -> list[Tensor]:
    return [v for k, v in out.items() if isinstance(v, Tensor) and v.is_floating_point()]


Judged = list[tuple[Tensor, Tensor]]
"""Eager attention's weights of each place, in float32 and in float64."""


def assert_record(record: Record, judged: Judged, row: int, real: list[np.ndarray]) -> None:
    """Maps, rows, statistics and top weights, in all queries that are real."""
    assert len(record.places) == len(judged), [place.name for place in record.places]
    for number, (place, maps, real_t) in enumerate(zip(record.places, judged, real, strict=True)):
        plain, want = (map_bhts[row].double().numpy() for map_bhts in maps)
        assert (place.n_heads, place.n_queries, place.n_keys) == want.shape
        bound = bound_weights(plain[:, real_t], want[:, real_t])
        assert_maps(record, number, want, real_t, bound)
        log = np.log(np.where(want > 0, want, 1.0))
        i = np.arange(place.n_queries)[:, None] + place.n_keys - place.n_queries
        j = np.arange(place.n_keys)
        expected = {
            "entropy": -(want * log).sum(-1),
            "peak": want.max(-1),
            "distance": (want * (i - j)).sum(-1),
        }
        found = record.statistics(number)
        for name, value in expected.items():
            # Sums of as many weights as there are keys, each times a number of about that size.
            slack = bound * (1 if name == "peak" else place.n_keys)
            assert_within(found[name][:, real_t], value[:, real_t], slack, name)
        top = -np.sort(-want, -1)[..., :8]
        k = top.shape[-1]
        assert_within(found["top_weights"][:, real_t, :k], top[:, real_t], bound)
        keys = found["top_keys"][..., :k].astype(np.int64)
        picked = np.where(keys < 0, 0.0, np.take_along_axis(want, np.maximum(keys, 0), -1))
        # Two keys may change places where their weights differ by less than both may be off.
        assert_within(picked[:, real_t], top[:, real_t], 2 * bound)


def assert_maps(
    record: Record, place: int, want: np.ndarray, real_t: np.ndarray, bound: float
) -> None:
    T, S = want.shape[1:]
    for head in range(want.shape[0]):
        whole = record.map(place, head, size=(T, S))
        assert_within(whole[real_t], want[head][real_t], bound)
        assert_within(record.rows(place, head, T - 1), whole[-1], bound)
        cells = record.map(place, head, (0, T, 0, S), (5, 3))
        down, across = np.kron(np.eye(5), np.ones(T)), np.kron(np.eye(3), np.ones(S))
        fine = np.kron(whole, np.ones((5, 3)))
        assert_within(cells, down @ fine @ across.T / (T * S), bound)


def real_rows(name: str, record: Record, asked: Any, row: int) -> list[np.ndarray]:
    found = []
    for place in record.places:
        source = asked.source_real is not None and place.name.find("encoder.") >= 0
        source = source and "decoder." not in place.name
        found.append((asked.source_real if source else asked.real)[row].numpy())
    return found


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_number_is_the_eager_one_and_no_bit_changes(name: str) -> None:
    model, asked = make(name), question(name)
    judged = judge(model, asked.given)
    with torch.no_grad():
        before = outputs(model(**asked.given))
        with watch(model, keep="qk", row=0) as record:
            after = outputs(model(**asked.given))
        with watch(model, row=0) as told:
            model(**asked.given)
    assert before and all(torch.equal(bits(a), bits(b)) for a, b in zip(before, after, strict=True))
    real = real_rows(name, record, asked, 0)
    assert_record(record, judged, 0, real)
    assert_record(told, judged, 0, real)
    for number, maps in enumerate(judged):
        plain, want = (map_bhts[0] for map_bhts in maps)
        bound = want.shape[1] * bound_weights(plain, want)  # a sum over the queries
        assert_within(record.received(number), want.sum(1), bound)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", [n for n in SUBJECTS if n != "vit"])
def test_padding_on_either_side(name: str, side: str) -> None:
    model, asked = make(name), question(name, side)
    judged = judge(model, asked.given)
    with torch.no_grad():
        before = outputs(model(**asked.given))
        for row in (1, 2):
            with watch(model, keep="qk", row=row) as record:
                after = outputs(model(**asked.given))
            for a, b in zip(before, after, strict=True):
                assert torch.equal(bits(a), bits(b))
            assert_record(record, judged, row, real_rows(name, record, asked, row))


@pytest.mark.parametrize("name", [n for n in SUBJECTS if n not in ENCODERS])
def test_generation_is_one_map_to_which_each_step_is_appended(name: str) -> None:
    model = copy.deepcopy(make(name))
    ids = draw(1, 11)
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 7}
    with torch.no_grad():
        plain = model.generate(ids, **given)
        with watch(model, keep="qk") as record:
            written = model.generate(ids, **given)
        with watch(model) as told:
            model.generate(ids, **given)
    assert torch.equal(plain, written)
    if name in TWO_SIDED:
        asked = {"input_ids": ids, "decoder_input_ids": written[:, :-1]}
    else:
        asked = {"input_ids": written[:, :-1]}
    judged = judge(model, {**asked, "use_cache": False})
    real = [np.ones(want.shape[2], bool) for _, want in judged]
    assert_record(record, judged, 0, real)
    assert_record(told, judged, 0, real)
    read = record.ids(len(record.places) - 1)
    last = asked["decoder_input_ids" if name in TWO_SIDED else "input_ids"][0]
    if record.places[-1].kind == "self":
        assert read is not None and read.tolist() == last.tolist()


CACHES = [("static", n) for n in ("llama", "mistral", "gemma3")]
CACHES += [(None, n) for n in ("llama", "mistral", "gemma3", "bloom")]  # type: ignore[list-item]


@pytest.mark.parametrize(("cache", "name"), CACHES)
def test_caches_of_every_kind(name: str, cache: str | None) -> None:
    model = copy.deepcopy(make(name))
    ids = draw(1, 11)
    given: dict[str, Any] = {"do_sample": False, "max_new_tokens": 7}
    given |= {"use_cache": False} if cache is None else {"cache_implementation": cache}
    if cache is not None:
        given["disable_compile"] = True
    with torch.no_grad(), watch(model, keep="qk") as record:
        written = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    judged = judge(model, {"input_ids": written[:, :-1], "use_cache": False})
    real = [np.ones(want.shape[2], bool) for _, want in judged]
    assert_record(record, judged, 0, real)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "bart"])
def test_sdpa_and_eager_give_the_same_record(name: str) -> None:
    model, asked = copy.deepcopy(make(name)), question(name)
    found = []
    for kind in ("sdpa", "eager"):
        model.set_attn_implementation(kind)
        with torch.no_grad(), watch(model, keep="qk") as record:
            model(**asked.given)
        assert model.config._attn_implementation == kind
        found.append(record)
    for number, maps in enumerate(judge(model, asked.given)):
        place = found[0].places[number]
        assert place == found[1].places[number]
        plain, want = (map_bhts[0] for map_bhts in maps)
        for record in found:
            weights = np.stack([record.map(number, head) for head in range(place.n_heads)])
            assert_within(weights, want, bound_weights(plain, want), place.name)


def test_no_mask_means_causal_where_it_does() -> None:
    """SDPA is given no mask for a causal text; the record must be causal all the same."""
    model = make("llama")
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad(), watch(model, keep="qk") as record:
        model(input_ids=draw(1, 11), use_cache=False)
    assert all(place.causal for place in record.places)
    assert np.triu(record.map(0, 0), 1).max() == 0
    with torch.no_grad(), watch(make("bert"), keep="qk") as record:
        make("bert")(input_ids=draw(1, 11))
    assert not any(place.causal for place in record.places)
    assert record.map(0, 0)[np.triu_indices(11, 1)].min() > 0


def attend_as_given(*args: Any, **kwargs: Any) -> Any:
    """As the library's guide to functions of one's own has it."""
    return sdpa_attention_forward(*args, **kwargs)


def attend_by_other_names(
    module: Any,
    query_states: Tensor,
    key_states: Tensor,
    value_states: Tensor,
    mask: Any,
    **more: Any,
) -> Any:
    return sdpa_attention_forward(module, query_states, key_states, value_states, mask, **more)


OWN = (
    attend_as_given,
    attend_by_other_names,
    functools.partial(attend_as_given, position_bias=None),
)


@pytest.mark.parametrize("function", OWN)
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_functions_that_somebody_registered_are_watched_and_edited(
    name: str, function: Any
) -> None:
    """Without a mask function of their own they are given no mask, and are causal by the module."""
    model, ids = copy.deepcopy(make(name)), draw(1, 11)
    judged = judge(model, {"input_ids": ids})
    edits = regard.Block(7, (2, 3)), regard.Ablate(1, 0)
    with torch.no_grad():
        with regard.edit(model, *edits):
            want = outputs(model(input_ids=ids))
        hf.AttentionInterface.register("somebodys", function)
        model.set_attn_implementation("somebodys")
        with watch(model, keep="qk") as record:
            model(input_ids=ids)
        with regard.edit(model, *edits):
            edited = outputs(model(input_ids=ids))
    assert_record(record, judged, 0, [np.ones(11, bool)] * len(judged))
    for one, two in zip(edited, want, strict=True):
        torch.testing.assert_close(one, two)
    assert ["given no mask" in note for note in record.notes] == [True] * (name == "llama")


def test_sinks_take_their_share() -> None:
    model = make("gpt_oss")
    with torch.no_grad(), watch(model, keep="qk") as record:
        model(input_ids=draw(1, 11), use_cache=False)
    assert record.map(0, 0).sum(1).max() < 0.999


def test_bfloat16_stays_bfloat16() -> None:
    """Kept as the model had it; its eager path rounds scores too, and so is only near."""
    model = copy.deepcopy(make("llama")).bfloat16()
    ids = draw(1, 11)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with watch(model, keep="qk") as record:
            after = model(input_ids=ids).logits
    assert torch.equal(before, after)
    want = attentions(model, {"input_ids": ids})[0][0].float().numpy()
    for head in range(want.shape[0]):
        assert np.abs(record.map(0, head) - want[head]).max() <= 3e-2
        assert np.abs(record.map(2, head).sum(1) - 1).max() <= 1e-5
    assert record._arrays.get(0, "q").dtype == np.uint16


@pytest.mark.parametrize("name", ["llama", "bloom", "gpt2"])
def test_autocast_and_inference_mode(name: str) -> None:
    model, ids = make(name), draw(1, 11)
    for mode in (
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode,
        torch.enable_grad,
    ):
        with mode():
            before = model(input_ids=ids).logits
            with watch(model, keep="qk") as record:
                after = model(input_ids=ids).logits
        assert torch.equal(before, after)
        assert np.abs(record.map(1, 1).sum(1) - 1).max() <= 1e-4


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("n_queries", [1, 5, 11])
@pytest.mark.parametrize("causal", [False, True])
def test_what_flash_attention_is_told(causal: bool, n_queries: int, window: int | None) -> None:
    """Its kernels need a GPU; what their arguments mean is worked out pair by pair."""
    real = torch.arange(11) >= torch.tensor([[0], [3]])
    mask = flash_mask(real, causal, window, n_queries, 11)
    assert mask is not None
    found = mask.dense(Shape(2, 1, n_queries, 11)).expand(2, 1, n_queries, 11)
    for b, t, s in np.ndindex(2, n_queries, 11):
        gap = t + 11 - n_queries - s
        want = bool(real[b, s]) and (gap >= 0 or not causal)
        want = want and (window is None or abs(gap) < window)
        assert bool(found[b, 0, t, s]) == want


def registered() -> dict[str, Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    return {
        "methods": dict(vars(AttentionInterface)),
        "functions": dict(ALL_ATTENTION_FUNCTIONS._global_mapping),
    }


def test_keys_that_a_kernel_chooses_are_refused_in_words() -> None:
    x = torch.zeros(1, 2, 3, 4)
    given = {"query": x, "key": x, "indices": torch.zeros(1, 3, 1)}
    with pytest.raises(ValueError, match="the indices of keys for each query"):
        read_rule(torch.nn.Identity(), "flash", given)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ["llama", "bloom", "t5"])
def test_nothing_is_left_behind(name: str, fails: bool) -> None:
    model, asked = make(name), question(name)
    hooks = torch.nn.modules.module
    inside = [dict(vars(module)) for module in model.modules()]
    before = (
        registered(),
        dict(hooks._global_forward_hooks),
        dict(hooks._global_forward_pre_hooks),
        model.config.to_dict(),
        torch.overrides._get_current_function_mode_stack(),
    )
    try:
        with torch.no_grad(), watch(model):
            model(**asked.given)
            if fails:
                raise ArithmeticError
    except ArithmeticError:
        assert fails
    after = (
        registered(),
        dict(hooks._global_forward_hooks),
        dict(hooks._global_forward_pre_hooks),
        model.config.to_dict(),
        torch.overrides._get_current_function_mode_stack(),
    )
    assert after == before
    assert [vars(module).keys() for module in model.modules()] == [x.keys() for x in inside]
    from regard.ops import call_hook

    assert call_hook.active is None


def test_another_model_is_not_recorded() -> None:
    watched, other = make("llama"), make("mistral")
    with torch.no_grad(), watch(watched) as record:
        other(input_ids=draw(1, 13))
        watched(input_ids=draw(1, 11))
        other(input_ids=draw(1, 13))
    assert {place.n_queries for place in record.places} == {11}
    with pytest.raises(ValueError, match="no attention was seen"), watch(watched):
        other(input_ids=draw(1, 13))


def test_layers_heads_and_wants_are_chosen() -> None:
    model = make("llama")
    ids = draw(1, 11)
    plain, want = (maps[0] for maps in judge(model, {"input_ids": ids})[2])
    wants = Wants(entropy=True, map=(3, 3))
    with torch.no_grad(), watch(model, wants, layers=[0, 2], heads=[5, 1], keep="qk") as record:
        model(input_ids=ids)
    assert [place.layer for place in record.places] == [0, 2]
    assert record.places[1].heads == (5, 1)
    assert set(record.statistics(1)) == {"entropy"}
    for number, head in enumerate((5, 1)):
        assert_within(record.map(1, number), want[head], bound_weights(plain, want))
    with torch.no_grad(), watch(model, layers="model.layers.1") as record:
        model(input_ids=ids)
    assert [place.name for place in record.places] == ["model.layers.1.self_attn"]
    with pytest.raises(ValueError, match="none of the places"), watch(model, layers=[7]):
        model(input_ids=ids)
    with (
        pytest.raises(ValueError, match="it has 0 to 5"),
        torch.no_grad(),
        watch(model, heads=[6]),
    ):
        model(input_ids=ids)


def test_a_batch_needs_its_row_named() -> None:
    model = make("llama")
    with pytest.raises(ValueError, match="batch has 3 rows"), torch.no_grad(), watch(model):
        model(input_ids=draw(3, 11))


def test_shared_layers_are_places_of_their_own() -> None:
    config = hf.AlbertConfig(
        embedding_size=12,
        hidden_size=36,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=52,
        vocab_size=83,
    )
    model = text_model(config, hf.AlbertModel)
    ids = draw(1, 11)
    judged = judge(model, {"input_ids": ids})
    with torch.no_grad(), watch(model, keep="qk") as record:
        model(input_ids=ids)
    names = [place.name for place in record.places]
    assert len(set(names)) == 3 and names[1] == f"{names[0]}@2" and names[2] == f"{names[0]}@3"
    assert_record(record, judged, 0, [np.ones(11, bool)] * 3)
    assert [place.layer for place in record.places] == [0, 1, 2]
    for asked in (2, names[2], [names[2]]):
        with torch.no_grad(), watch(model, layers=asked, keep="qk") as one:
            model(input_ids=ids)
        assert [(place.layer, place.name) for place in one.places] == [(2, names[2])]
        assert np.array_equal(one.map(0, 1), record.map(2, 1))
    with pytest.raises(ValueError, match=f"2: {names[2]}"), watch(model, layers=[3]):
        model(input_ids=ids)


def test_layers_of_a_wrapped_model_are_counted_from_its_own_first() -> None:
    """As sentence-transformers wraps them: every name begins with 0."""
    model = torch.nn.Sequential(text_model(hf.BertConfig(**BERT), hf.BertModel))
    with torch.no_grad(), watch(model) as record:
        model(draw(1, 11))
    assert [place.layer for place in record.places] == [0, 1, 2]
    assert all(place.name.startswith("0.") for place in record.places)


def test_stacks_and_kinds_are_counted_apart() -> None:
    model = make("t5")
    with torch.no_grad(), watch(model) as record:
        model(**question("t5").given)
    found = [(place.stack, place.kind, place.layer) for place in record.places]
    assert found == [
        *(("encoder", "self", n) for n in range(3)),
        *(("decoder", kind, n) for n in range(2) for kind in ("self", "cross")),
    ]


def test_the_next_tokens_and_the_next_text_have_the_layers_of_the_first() -> None:
    model = make("llama")
    with torch.no_grad(), watch(model, layers=[1]) as record:
        model.generate(draw(1, 7), max_new_tokens=3, do_sample=False)
        model(input_ids=draw(1, 5, seed=9))
    assert [place.layer for place in record.places] == [1, 1]
    assert record.places[0].n_queries == 9 and record.places[1].name.endswith("@2")


def test_six_others_are_watched() -> None:
    assert len(OTHERS) >= 6 and not set(OTHERS) & set(DECODERS)
