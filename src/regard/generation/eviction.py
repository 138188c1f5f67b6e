"""Eviction: a KV cache keeps the keys with the highest scores, and drops the others.

Why: the cache of a long text can need more memory than the model, and most of its keys get little
attention. Scores say which, such as the weight that each key receives
(`Wants(received=Received(...))`); `examples/evict` has H2O, SnapKV and TOVA.

How: each layer and each key head keeps its own keys, the same number everywhere, in the order of
the text. The position of the next token does not change.

Left out: computing scores; windowed and fixed caches; and layers that depend on keys' positions.

Letters: B batch, H query heads, G key heads, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from regard._check import check_count
from regard.layers import DecoderCache
from regard.layers.cache import pick_keys


def evict(cache: Any, scores: Sequence[Tensor], keep: int) -> None:
    """Shrink a KV cache in place: each layer and key head keeps the keys with the highest scores.

    Later tokens have the positions that they would have had. (Hugging Face's models count them by
    the keys in the cache: give position_ids from then on.)

    Args:
        cache: A growing cache from `model.make_cache()`, or a DynamicCache of Hugging Face.
        scores: One tensor for each layer, (B, H, S), such as `Received` gives; the scores of query
            heads that share a key head are added up. (B, G, S): one for each key head. (B, 1, S):
            one for all.
        keep: How many keys are kept, in each key head the same number.

    Raises:
        ValueError: Scores that do not fit the cache, or a `keep` above the keys that it holds.
        TypeError: Another kind of cache.

    Example:
        >>> model = regard.load("embedded:lm")
        >>> cache = model.make_cache()
        >>> out = model(torch.tensor([[3, 1, 4, 1, 5]]), cache=cache)
        >>> regard.evict(cache, [torch.rand(1, 1, 5) for _ in model.config.decoder], keep=3)
    """
    check_count("keep", keep)
    ours = isinstance(cache, DecoderCache)
    kept = [block.self_attn.keys for block in cache.blocks] if ours else _foreign_keys(cache)
    if len(scores) != len(kept):
        raise ValueError(f"scores are of {len(scores)} layers, but the cache has {len(kept)}")
    indices = [choose_keys(*pair, keep) for pair in zip(scores, kept, strict=True)]
    if ours:
        for slots in cache.slots:
            slots.evict(keep)
        for block, index_bgk in zip(cache.blocks, indices, strict=True):
            block.self_attn.evict(index_bgk, slots=False)
        return
    for layer, index_bgk in zip(cache.layers, indices, strict=True):
        layer.keys = pick_keys(layer.keys, index_bgk)
        layer.values = pick_keys(layer.values, index_bgk)


def choose_keys(scores: Tensor, k_bgsd: Tensor, keep: int) -> Tensor:
    """Indices of the keys to keep, (B, G, keep), in text order; of equal scores the earlier key."""
    B, G, S = k_bgsd.shape[:3]
    n_heads = scores.shape[1] if scores.dim() == 3 else 0
    if scores.shape != (B, n_heads, S) or (n_heads != 1 and n_heads % G):
        raise ValueError(
            f"scores have the shape {tuple(scores.shape)}; expected (B, H, S) with B={B}, S={S} "
            f"and H 1 or a multiple of G={G}"
        )
    if keep > S:
        raise ValueError(f"keep is {keep}, but the cache holds {S} keys")
    by_head = scores.expand(B, G, S) if n_heads == 1 else scores.reshape(B, G, -1, S).sum(2)
    order: Tensor = by_head.argsort(dim=-1, descending=True, stable=True)
    return order[..., :keep].sort(-1)[0]


def _foreign_keys(cache: Any) -> list[Tensor]:
    layers = getattr(cache, "layers", None)
    sliding = [getattr(layer, "is_sliding", False) for layer in layers or ()]
    if not layers or any(sliding) or not all(hasattr(layer, "keys") for layer in layers):
        raise TypeError(
            f"cache is a {type(cache).__name__}; expected what model.make_cache() gives, or a "
            "DynamicCache of transformers with no sliding window"
        )
    return [layer.keys for layer in layers]
