"""A cache that keeps some keys answers as if the others were hidden, in our models and others'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_checkpoints import make_model
from torch import Tensor

from regard.generation import evict
from regard.generation.eviction import choose_keys
from regard.models import Transformer
from regard.ops import Dense

PROMPT, MORE, KEEP = 11, 3, 5


def draw(n: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(n))


def make_ids(B: int) -> Tensor:
    drawn = torch.Generator().manual_seed(3)
    return torch.randint(4, 37, (B, PROMPT + MORE), generator=drawn)


def answer(model: Transformer, ids_bt: Tensor, **given: Any) -> Tensor:
    logits = model(ids_bt, **given).logits
    assert logits is not None
    return logits


@torch.no_grad()
@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("gpt2", {"n_positions": 17})])
def test_what_was_evicted_is_as_if_hidden_and_the_text_goes_on_where_it_was(
    family: str, changes: dict[str, int]
) -> None:
    """One token, then two: all layers and heads keep the same keys, others in each row."""
    model, ids, scores_bs = make_model(family, **changes), make_ids(2), draw(5, 2, PROMPT)
    cache = model.make_cache()
    n_layers = len(cache.blocks)
    answer(model, ids[:, :PROMPT], cache=cache)
    evict(cache, [scores_bs[:, None]] * n_layers, KEEP)
    assert cache.length is not None and cache.length.tolist() == [PROMPT]
    got = [answer(model, ids[:, PROMPT : PROMPT + 1], cache=cache)]
    got.append(answer(model, ids[:, PROMPT + 1 :], cache=cache))
    seen = torch.ones(2, 1, PROMPT + MORE, PROMPT + MORE, dtype=torch.bool)
    least = scores_bs.topk(KEEP, -1).values[:, -1:]
    seen[:, 0, PROMPT:, :PROMPT] = (scores_bs >= least)[:, None]
    want = answer(model, ids, mask=Dense(seen))[:, PROMPT:]
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-5)
    whole = answer(model, ids)[:, PROMPT:]
    assert not torch.allclose(want, whole, atol=1e-2)


@torch.no_grad()
def test_each_key_head_keeps_what_its_query_heads_score_highest_in_all() -> None:
    model, ids = make_model("llama"), make_ids(2)[:, :PROMPT]
    cache = model.make_cache()
    answer(model, ids, cache=cache)
    before = [block.self_attn.keys.clone() for block in cache.blocks]
    G = before[0].shape[1]
    H = model.config.decoder[0].n_heads
    assert H > G > 1
    scores = [draw(layer, 2, H, PROMPT) for layer in range(len(before))]
    evict(cache, scores, KEEP)
    for block, old, scores_bhs in zip(cache.blocks, before, scores, strict=True):
        for b in range(2):
            for g in range(G):
                own = scores_bhs[b, g * H // G : (g + 1) * H // G].sum(0)
                index = own.topk(KEEP).indices.sort().values
                assert torch.equal(block.self_attn.keys[b, g], old[b, g, index])
    cache.reset()
    torch.testing.assert_close(answer(model, ids, cache=cache), answer(model, ids))


def test_of_equal_scores_the_earlier_keys_are_kept() -> None:
    k = torch.zeros(1, 2, 7, 3)
    chosen = choose_keys(torch.tensor([[[0.0, 1.0, 1.0, 0.0, 1.0, 2.0, 1.0]]]), k, 3)
    assert chosen.tolist() == [[[1, 2, 5], [1, 2, 5]]]


@torch.no_grad()
def test_what_cannot_be_evicted_is_refused_in_words() -> None:
    model, ids = make_model("llama"), make_ids(1)[:, :PROMPT]
    cache, n_layers = model.make_cache(), len(model.config.decoder)
    ones = [torch.ones(1, 1, PROMPT)] * n_layers
    with pytest.raises(ValueError, match="the cache is empty"):
        evict(cache, ones, KEEP)
    answer(model, ids, cache=cache)
    with pytest.raises(ValueError, match=f"scores are of 1 layers, but the cache has {n_layers}"):
        evict(cache, ones[:1], KEEP)
    with pytest.raises(ValueError, match=r"shape \(1, 1, 9\); expected \(B, H, S\) with B=1, S=11"):
        evict(cache, [torch.ones(1, 1, 9)] * n_layers, KEEP)
    with pytest.raises(ValueError, match="keep is 12, but the cache holds 11 keys"):
        evict(cache, ones, 12)
    with pytest.raises(TypeError, match="cache is a dict; expected what"):
        evict({}, ones, KEEP)
    static = model.make_cache(size=20)
    answer(model, ids, cache=static)
    with pytest.raises(ValueError, match="the cache is a fixed or windowed one"):
        evict(static, ones, KEEP)
    padded = model.make_cache()
    answer(model, ids, cache=padded, positions=torch.arange(PROMPT) - 2)
    with pytest.raises(ValueError, match="the cache holds padding"):
        evict(padded, ones, KEEP)


@torch.no_grad()
def test_a_layer_that_asks_where_a_key_stood_refuses_an_evicted_cache() -> None:
    model, ids = make_model("bloom"), make_ids(1)
    cache = model.make_cache()
    answer(model, ids[:, :PROMPT], cache=cache)
    evict(cache, [torch.ones(1, 1, PROMPT)] * len(cache.blocks), KEEP)
    with pytest.raises(ValueError, match="keys were evicted from this cache"):
        answer(model, ids[:, PROMPT:], cache=cache)
