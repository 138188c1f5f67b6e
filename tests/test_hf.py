"""Hugging Face models on our attention: every architecture of the lens tests, equal to eager."""

from __future__ import annotations

import copy
from typing import Any

import decoder_originals as decoders
import pytest
import torch
import transformers as hf
from lens_subjects import ENCODERS, SUBJECTS, TWO_SIDED, draw, judge, question, text_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import masking_utils

import regard
import regard.hf
from regard.hf import RuleMask, regard_mask, takes_bools
from regard.lens import look_at_calls
from regard.lens.hooks import transformers as hooks_of_transformers
from regard.ops import Causal, Dense, Lengths, Window
from regard.ops.call_hook import hooked

OWN_WAY = ("gptj", "bloom", "bloom-8-heads")
"""Those that do not take their attention from the interface; the library says so."""
NAMES = [name for name in SUBJECTS if name not in OWN_WAY]
CLOSE = 3e-5
"""Of the largest logit: float32 rounds at other places in two formulas, layer after layer."""


def pair(name: str) -> tuple[Any, Any]:
    """The same model on eager attention and on ours."""
    one, two = copy.deepcopy(model := SUBJECTS[name]()), model
    one.set_attn_implementation("eager")
    two.set_attn_implementation("regard")
    return one, two


def answer(model: Any, given: dict[str, Any]) -> Tensor:
    found = model(**given)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def compare(one: Tensor, two: Tensor) -> None:
    assert torch.isfinite(two).all()
    torch.testing.assert_close(two, one, rtol=0, atol=CLOSE * float(one.abs().max()))


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each call of attention was given as its mask."""
    seen: list[Any] = []
    read = regard.hf.read_mask
    monkeypatch.setattr(
        regard.hf, "read_mask", lambda mask, n: (seen.append(mask), read(mask, n))[1]
    )
    return seen


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_says_what_it_says_on_eager_attention(
    name: str, side: str | None, masks: list[Any]
) -> None:
    """And no mask is a matrix, also in padded batches."""
    one, two = pair(name)
    asked = question(name, side)
    with torch.no_grad():
        compare(answer(one, asked.given)[asked.real], answer(two, asked.given)[asked.real])
    assert masks and all(mask is None or isinstance(mask, RuleMask) for mask in masks)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_eager_attention(name: str, side: str) -> None:
    asked = question(name, side)
    grads = []
    for model in pair(name):
        answer(model, asked.given)[asked.real].square().mean().backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    largest = max(float(grad.abs().max()) for grad in grads[0].values())
    for name_of in grads[0]:
        torch.testing.assert_close(
            grads[1][name_of], grads[0][name_of], rtol=1e-3, atol=1e-4 * largest
        )


WRITING = [
    *((name, "dynamic") for name in NAMES if name not in ENCODERS),
    *((name, "static") for name in ("llama", "gemma2", "qwen3-window", "gpt_oss", "gpt2")),
]


@pytest.mark.parametrize(("name", "cache"), WRITING)
def test_texts_are_written_as_on_eager_attention(name: str, cache: str) -> None:
    """Padded rows, greedy, from a cache that grows and from one of a fixed size.

    What goes on from a text is padded on the left; what is written for a source, on the right.
    """
    two_sided = name in TWO_SIDED
    asked = question(name, "right" if two_sided else "left").given
    how = {"max_new_tokens": 7, "do_sample": False, "cache_implementation": cache}
    how |= {"disable_compile": True, "return_dict_in_generate": True, "output_logits": True}
    given = {key: asked[key] for key in ("input_ids", "attention_mask")}
    one, two = (model.generate(**given, **how) for model in pair(name))
    compare(torch.stack(one.logits[:1], 1), torch.stack(two.logits[:1], 1))
    assert one.sequences.tolist() == two.sequences.tolist()


class AddsItsMask(nn.Module):
    """Attention that computes with its mask, as that of a model does which knows no booleans."""

    is_causal = True

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        more = x.new_zeros(*mask.shape[:-1], 2).to(mask.dtype)  # two keys that all may see
        k = torch.cat([x, x[:, :, :2]], 2)
        return regard.hf.regard_attention(self, x, k, k, torch.cat([mask, more], -1))[0]


def test_models_that_take_no_booleans_get_numbers_to_add() -> None:
    """DeepSeek-V4 puts columns of numbers beside its mask: 0 for what may be seen."""
    config = hf.DeepseekV4Config()
    assert not takes_bools(type(config)) and takes_bools(hf.LlamaConfig)
    assert not takes_bools(hf.BigBirdPegasusConfig) and not takes_bools(int)
    real = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    x = torch.randn(2, 1, 5, 4)
    rules = {"mask_function": masking_utils.causal_mask_function, "attention_mask": real.bool()}
    mask = regard_mask(2, 5, 5, **rules, config=config, dtype=torch.float32)
    assert isinstance(mask, RuleMask) and mask.dtype == torch.float32
    seen = (torch.ones(5, 5).tril() * real[:, None, None]).bool()
    assert torch.equal(mask + 0 > -1, seen)
    got = AddsItsMask()(x, mask)
    k = torch.cat([x, x[:, :, :2]], 2)
    want = F.scaled_dot_product_attention(x, k, k, attn_mask=F.pad(seen, (0, 2), value=True))
    torch.testing.assert_close(got.transpose(1, 2), want)


def test_packed_texts_are_told_by_their_positions(masks: list[Any]) -> None:
    one, two = pair("llama")
    given = {"input_ids": draw(1, 19), "use_cache": False}
    given["position_ids"] = torch.cat([torch.arange(7), torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        compare(answer(one, given), answer(two, given))
    assert all("Documents" in repr(mask.rule) for mask in masks)


def test_a_mask_of_the_callers_own_is_taken_as_it_is() -> None:
    one, two = pair("llama")
    seen = torch.ones(1, 1, 19, 19).tril().bool()
    seen[..., 5:9] &= torch.eye(19).bool()[:, 5:9]
    given = {"input_ids": draw(1, 19), "use_cache": False}
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        want = answer(one, {**given, "attention_mask": added})
        compare(want, answer(two, {**given, "attention_mask": added}))
        compare(want, answer(two, {**given, "attention_mask": seen}))


RULES = {
    "causal": (masking_utils.causal_mask_function, Causal),
    "window": (masking_utils.sliding_window_causal_mask_function(4), Window),
    "all": (masking_utils.bidirectional_mask_function, None),
    "chunks": (masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 3])), Tensor),
    "own": (lambda b, h, q, kv: (kv <= q) & ((kv + q) % 3 > 0), Tensor),
}


@pytest.mark.parametrize("padding", [None, "right", "left", "holes"])
@pytest.mark.parametrize(("n_queries", "offset"), [(11, 0), (3, 8), (1, 10), (5, 0), (2, 3)])
@pytest.mark.parametrize("rule", RULES)
def test_every_mask_hides_what_the_librarys_own_hides(
    rule: str, n_queries: int, offset: int, padding: str | None
) -> None:
    real = torch.ones(2, 11, dtype=torch.bool)
    if padding in ("right", "holes"):
        real[1, 8:] = False
    if padding in ("left", "holes"):
        real[1, :2] = False
    if padding == "holes":
        real[1, 5] = False
    function, kind = RULES[rule]
    asked: dict[str, Any] = {
        "batch_size": 2,
        "q_length": n_queries,
        "kv_length": 11,
        "q_offset": offset,
        "mask_function": function,
        "attention_mask": None if padding is None else real,
    }
    want = masking_utils.sdpa_mask(**asked, allow_is_causal_skip=False)
    assert want is not None
    got = regard_mask(**asked)
    assert got is not None
    # Queries that stand elsewhere than at the end of the keys, or at their beginning if causal.
    odd = offset == 3 or (rule == "window" and (n_queries, offset) == (5, 0))
    matrix = kind is Tensor or (odd and rule != "all")
    assert isinstance(got, RuleMask) != matrix
    torch.testing.assert_close(got & True, want)  # as whoever computes with it sees it
    if isinstance(got, RuleMask):
        q, k = torch.randn(2, 1, n_queries, 4), torch.randn(2, 1, 11, 4)
        torch.testing.assert_close(
            regard.attention(q, k, k, mask=got.rule),
            regard.attention(q, k, k, mask=Dense(want)),
            rtol=0,
            atol=1e-5,
        )


def test_padding_on_one_side_is_lengths() -> None:
    real = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    for side, mask in (("right", real), ("left", real.flip(1))):
        got = regard_mask(2, 4, 4, mask_function=RULES["all"][0], attention_mask=mask)
        assert isinstance(got, RuleMask) and isinstance(got.rule, Lengths)
        assert got.rule.side == side and got.rule.lengths.tolist() == [4, 2]
    got = regard_mask(2, 4, 4, mask_function=RULES["all"][0], attention_mask=real.new_ones(2, 4))
    assert isinstance(got, RuleMask) and got.rule is None


def test_a_compiled_model_runs_as_one_graph() -> None:
    one, two = pair("llama")
    asked = question("llama", "right")
    fast = torch.compile(two, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        compare(answer(one, asked.given)[asked.real], answer(fast, asked.given)[asked.real])


@pytest.mark.parametrize("name", ["llama", "gemma2", "bert", "t5"])
def test_watching_sees_the_same_weights_and_changes_nothing(name: str) -> None:
    one, two = pair(name)
    asked = question(name)
    with torch.no_grad():
        plain = answer(two, asked.given)
        records = []
        for model in (one, two):
            with regard.watch(model, keep="qk") as record:
                seen = answer(model, asked.given)
            records.append(record)
    assert torch.equal(seen, plain)
    assert [place.name for place in records[0].places] == [p.name for p in records[1].places]
    for number, place in enumerate(records[0].places):
        size = place.n_queries, place.n_keys
        for head in range(place.n_heads):
            maps = [record.map(number, head, size=size) for record in records]
            assert abs(maps[0] - maps[1]).max() < 1e-4


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert", "bart", "t5"])
def test_watching_asks_about_the_call_that_the_operation_ran(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a layer, without reading its arguments anew; numbers are the eager formula's."""
    model, asked = pair(name)[1], question(name)
    judged = judge(model, asked.given)
    calls: list[Any] = []
    measured: list[Any] = []
    measure = look_at_calls.measure
    monkeypatch.setattr(hooks_of_transformers, "read_call", None)
    monkeypatch.setattr(
        look_at_calls, "measure", lambda *given: (measured.append(given), measure(*given))[1]
    )
    with (
        torch.no_grad(),
        hooked(calls.append),
        regard.watch(model, regard.Wants(entropy=True)) as r,
    ):
        model(**asked.given)
    assert len(r.places) == len(calls) == len(measured) == len(judged)
    for number, (plain, exact) in enumerate(judged):
        want, near = (-(p * p.clamp(min=1e-300).log()).sum(-1)[0] for p in (exact, plain.double()))
        bound = 2 * (near - want).abs().max() + 1e-5
        found = torch.from_numpy(r.statistics(number)["entropy"])
        assert (found - want).abs().max() <= bound, r.places[number].name


def test_keys_that_an_indexer_chose_for_each_query_are_all_that_it_sees() -> None:
    """A model joins them to the mask of eager attention and SDPA, and tells others of them."""
    sizes = {**decoders.LLAMA, "num_key_value_heads": 6, "first_k_dense_replace": 3}
    sizes |= {"q_lora_rank": 22, "kv_lora_rank": 14, "qk_rope_head_dim": 6, "qk_nope_head_dim": 4}
    sizes |= {"v_head_dim": 5, "index_topk": 5, "index_n_heads": 2, "index_head_dim": 8}
    model: Any = text_model(hf.DeepseekV32Config(**sizes))
    theirs = copy.deepcopy(model)
    theirs.set_attn_implementation("eager")
    model.set_attn_implementation("regard")
    ids = draw(2, 19)
    real = torch.ones_like(ids)
    real[1, :4] = 0
    given = {"input_ids": ids, "attention_mask": real, "use_cache": False}
    with torch.no_grad():
        compare(answer(theirs, given)[real.bool()], answer(model, given)[real.bool()])
    how = {"max_new_tokens": 5, "do_sample": False}
    one, two = (m.generate(ids, attention_mask=real, **how) for m in (theirs, model))
    assert one.tolist() == two.tolist()


def test_a_window_of_nothing_is_a_mask_of_nothing() -> None:
    """As a config of Qwen2-MoE says of a model without windows, which was refused."""
    model: Any = text_model(
        hf.Qwen2MoeConfig(**decoders.LLAMA, num_experts=3, num_experts_per_tok=2)
    )
    theirs = copy.deepcopy(model)
    theirs.set_attn_implementation("eager")
    model.set_attn_implementation("regard")
    given = {"input_ids": draw(2, 19), "use_cache": False}
    with torch.no_grad():
        compare(answer(theirs, given), answer(model, given))
    none = regard_mask(1, 5, 7, 2, 0, masking_utils.sliding_window_causal_mask_function(0))
    assert isinstance(none, RuleMask) and none.rule is not None and not none.any()
    x = torch.randn(1, 2, 7, 4)
    assert not regard.attention(x[:, :, 2:], x, x, mask=none.rule).any()


def test_blocks_of_keys_that_are_chosen_are_refused_in_words() -> None:
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="chooses blocks of keys for each query"):
        regard.hf.regard_attention(nn.Identity(), x, x, x, None, block_indices=torch.zeros(1))


def test_paged_and_packed_calls_are_refused_in_words() -> None:
    two = pair("llama")[1]
    with pytest.raises(ValueError, match="does not support packing by cu_seq_lens"):
        two(input_ids=draw(1, 7), cu_seq_lens_q=torch.tensor([0, 7]), use_cache=False)


def test_models_are_loaded_with_it_by_name(tmp_path: Any) -> None:
    SUBJECTS["llama"]().save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="regard")
    assert loaded.config._attn_implementation == "regard"
    assert set(ENCODERS) | set(TWO_SIDED) <= set(SUBJECTS)
