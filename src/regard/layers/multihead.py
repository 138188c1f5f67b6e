"""Multi-head attention as a layer: project, split into heads, rotate, attend, merge, project.

Why: the operation `regard.attention` has no weights; a layer has projections, knows the positions
of its tokens, and keeps a KV cache.

How: the four projections are separate modules, since checkpoints, sharding, adapters and
quantisation address them one by one. The layer's own mask and bias (causal, window, ALiBi) are
combined with those of the caller: masks with `&`, biases with `+`.

Positions: by default tokens have the positions 0, 1, 2, ... If positions are given, (T,) or (B, T),
they are used by rotary and by every mask and bias that depends on positions; a negative one is
padding, to which no query attends. With a cache the positions continue those in the cache. `place`
computes them once, for all layers of a stack.

A memory has no positions in common with x, so layers that are causal, windowed, rotary or ALiBi
refuse one.

Left out: a value width other than the key width.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, C model width,
M width of the memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeAlias, TypedDict

import torch
from torch import Tensor, nn

from regard._check import check_choice, check_count, check_probability, check_shapes
from regard.layers.cache import CrossCache, KVCache
from regard.layers.cache_slots import Step, as_rows, as_they_lie
from regard.layers.fused_linear import FusedLinear, run_fused
from regard.layers.matvec import project
from regard.layers.norm import Factory, Norm, NormKind, make_norm
from regard.layers.observing import Observable
from regard.ops import ALiBi, Bias, Causal, Mask, Observation, Wants, Window, observe
from regard.ops.backends import BACKENDS
from regard.ops.call import as_bias, as_mask, check_number
from regard.positions import Phases, Rotary, RotaryConfig
from regard.positions.rotary import rotate_pairs

Sides: TypeAlias = tuple[int | None, int | None]


@dataclass(frozen=True, kw_only=True)
class ProjectionBias:
    """q, k, v, out: Whether each of the projections has a bias."""

    q: bool = True
    k: bool = True
    v: bool = True
    out: bool = True


@dataclass(frozen=True, eq=False)
class Places:
    """The positions of the tokens of one call: computed once by `place`, for all layers of a stack.

    `positions` None: 0, 1, 2, ..., or what follows in the cache. `phases` are rotary's. `keys` are
    the positions of keys where they are not those of the queries (see `SequenceShards`). `step` is
    for the KV cache. `key_phases` are the phases of all cached keys, for scalings with
    `rotates_kept_keys`: there the cache stores keys unrotated, and each call rotates them.
    """

    positions: Tensor | None = None
    phases: Phases | None = None
    keys: Tensor | None = None
    step: Step | None = None
    key_phases: Phases | None = None


class GatheredKeys(NamedTuple):
    """Keys and values of a whole text, and positions of queries and keys (None: 0, 1, 2, ...)."""

    k: Tensor
    v: Tensor
    queries: Tensor | None
    keys: Tensor | None


class SequenceShards(Protocol):
    """Context parallelism: the other processes that hold parts of the text; set as `layer.shards`.

    With it x is one part of the text, and its queries attend to the keys of all parts. `place`
    replaces the layer's own `place`; `join` is called between its projections and its attention.
    """

    def place(self, layer: MultiHeadAttention, x_btc: Tensor, positions: Tensor | None) -> Places:
        """The positions of this part's tokens, and of the keys of all parts."""

    def join(self, k_bgtd: Tensor, v_bgtd: Tensor, places: Places, rule: Rule) -> GatheredKeys:
        """Gather the keys and values of all parts; gradients flow back to the part they are of."""


class Rule(TypedDict):
    """The arguments of `attention` and `observe` besides q, k and v."""

    mask: Mask | None
    bias: Bias | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None


class AttentionInputs(NamedTuple):
    """The arguments of one call of `attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    rule: Rule


class MultiHeadAttention(Observable):
    """Multi-head attention as a layer: self-attention of x, or cross-attention to a memory.

    (B, T, C) -> (B, T, C). Parameters: `q_proj`, `k_proj`, `v_proj` and `out_proj` (nn.Linear).

    Example:
        >>> layer = regard.MultiHeadAttention(64, 8, n_kv_heads=2, causal=True)
        >>> layer(torch.randn(2, 11, 64)).shape
        torch.Size([2, 11, 64])
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        kv_dim: int | None = None,
        bias: bool | ProjectionBias = True,
        rotary: RotaryConfig | None = None,
        alibi: bool = False,
        window: Sides | None = None,
        causal: bool = False,
        softcap: float | None = None,
        scale: float | None = None,
        sinks: bool = False,
        qk_norm: NormKind | None = None,
        qk_norm_eps: float = 1e-6,
        dropout: float = 0.0,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Sizes first, then what the heads see, then what is done to their scores.

        Args:
            dim: The width C of x.
            n_heads: The number of query heads, H.
            n_kv_heads: The number of key heads, G, a divisor of H; H by default.
            head_dim: The width D of a head; C / H by default, and then H must divide C.
            kv_dim: The width M of the memory, for cross-attention; C by default.
            bias: Whether the projections have a bias; `ProjectionBias(...)` says it for each.
            rotary: Rotary positions, with head_dim=D. alibi: ALiBi's bias, with its own slopes.
            window: (left, right), as in `Window`. causal: Whether no query sees a later key.
            softcap, scale, backend: As in `attention`.
            sinks: Whether each head learns a sink, an (H,) parameter that begins at 0.
            qk_norm: A norm over each head's queries and keys, before rotary: "layer", "rms" or
                "rms_offset".
            qk_norm_eps: The eps of that norm.
            dropout: Of the weights, in training mode only.
            device, dtype: Of the parameters.
        """
        super().__init__()
        where: Factory = {"device": device, "dtype": dtype}
        n_kv_heads, head_dim = check_heads(dim, n_heads, n_kv_heads, head_dim)
        check_count("kv_dim", kv_dim := dim if kv_dim is None else kv_dim)
        check_rule(head_dim, rotary, window, scale, softcap, backend)
        if isinstance(bias, bool):
            bias = ProjectionBias(q=bias, k=bias, v=bias, out=bias)
        self.dim, self.kv_dim, self.head_dim = dim, kv_dim, head_dim
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.causal, self.alibi, self.window = causal, alibi, window
        self.scale, self.softcap, self.backend = scale, softcap, backend
        self.dropout = check_probability("dropout", dropout)
        self.q_proj = nn.Linear(dim, n_heads * head_dim, bias.q, **where)
        self.k_proj = nn.Linear(kv_dim, n_kv_heads * head_dim, bias.k, **where)
        self.v_proj = nn.Linear(kv_dim, n_kv_heads * head_dim, bias.v, **where)
        self.out_proj = nn.Linear(n_heads * head_dim, dim, bias.out, **where)
        self.q_norm, self.k_norm = (
            None if qk_norm is None else make_norm(qk_norm, head_dim, eps=qk_norm_eps, **where)
            for _ in range(2)
        )
        self.rotary = None if rotary is None else Rotary(rotary)
        self.sinks = nn.Parameter(torch.empty(n_heads, **where)) if sinks else None
        self.reset_parameters()
        self.own_mask = both(Causal() if causal else None, window and Window(*window))
        self.fused: FusedLinear | None = None
        self.shards: SequenceShards | None = None

    def reset_parameters(self) -> None:
        """Initialize the module's own parameters; projections and norms initialize their own."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def fuse(self) -> None:
        if self.kv_dim == self.dim:
            self.fused = FusedLinear((self.q_proj, self.k_proj, self.v_proj))

    def forward(
        self,
        x_btc: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | Places | None = None,
        cache: KVCache | CrossCache | None = None,
    ) -> Tensor:
        """(B, T, C): attention from x to itself and to what the cache holds, or to a memory.

        Args:
            x_btc: (B, T, C). memory: (B, S, M), for cross-attention.
            mask, bias: As in `attention`, over (B, H, T, S), beside the layer's own mask and bias;
                with a cache S counts the keys in it too.
            positions: (T,) or (B, T), where the tokens stand; negative is padding, which nobody
                sees. None: one after another, behind those in the cache. Or what `place` returned.
            cache: A `KVCache`; with a memory a `CrossCache`, and the memory only the first time.
        """
        return self._attend(self._prepare(x_btc, memory, mask, bias, positions, cache))

    def observe(
        self,
        x_btc: Tensor,
        memory: Tensor | None = None,
        *,
        wants: Wants,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | Places | None = None,
        cache: KVCache | CrossCache | None = None,
    ) -> Observation:
        """An `Observation`: what `forward` returns as `output`, and what `wants` asks for."""
        ready = self._prepare(x_btc, memory, mask, bias, positions, cache)
        output_btc = self._attend(ready)
        seen = observe(ready.q, ready.k, None, wants=wants, **ready.rule)
        return replace(seen, output=output_btc)

    def place(
        self, x_btc: Tensor, positions: Tensor | None = None, cache: KVCache | Step | None = None
    ) -> Places:
        """The positions of the tokens of x, and rotary's phases, for all layers like this one.

        cache: a KVCache, which this call advances by these tokens, or the `Step` of an advance.
        """
        if x_btc.dim() != 3:
            check_shapes({"x": (x_btc, "B T C")})
        batch, n_new, device, rotary = *x_btc.shape[:2], x_btc.device, self.rotary
        if self.shards is not None:
            return self.shards.place(self, x_btc, positions)
        if isinstance(cache, KVCache):
            cache = cache.slots.advance(batch, n_new, device, positions)
        if cache is not None:
            if rotary is None:
                return Places(step=cache)
            scaling = rotary.config.scaling
            late = scaling is not None and scaling.rotates_kept_keys
            key_phases = rotary.phases(cache.keys) if late else None
            return Places(None, rotary.phases(cache.queries), None, cache, key_phases)
        if positions is None:
            if rotary is None:
                return Places()
            return Places(None, rotary.phases(torch.arange(n_new, device=device)))
        at = as_rows(positions, batch, n_new).to(device)
        phases = None if rotary is None else rotary.phases(at)
        return Places(None if as_they_lie(at) else at, phases)

    def _prepare(
        self,
        x_btc: Tensor,
        memory: Tensor | None,
        mask: Mask | Tensor | None,
        bias: Bias | Tensor | None,
        positions: Tensor | Places | None,
        cache: KVCache | CrossCache | None,
    ) -> AttentionInputs:
        if not isinstance(x_btc, Tensor) or x_btc.dim() != 3 or x_btc.shape[2] != self.dim:
            sizes = check_shapes({"x": (x_btc, "B T C")})
            raise ValueError(f"x has C={sizes['C']}, but the layer has dim={self.dim}")
        mask = None if mask is None else as_mask(mask)
        bias = None if bias is None else as_bias(bias)
        if memory is None and not isinstance(cache, CrossCache):
            return self._prepare_self(x_btc, positions, cache, mask, bias)
        if positions is not None or isinstance(cache, KVCache):
            raise ValueError(
                "attention to a memory takes no positions= and no KVCache, which are for "
                "self-attention; to keep the memory's keys give a CrossCache"
            )
        q_bhtd = self._split(self.q_proj(x_btc), self.q_norm)
        k_bgsd, v_bgsd = self._remember(memory, cache)
        return AttentionInputs(q_bhtd, k_bgsd, v_bgsd, self._rule(mask, bias))

    def _prepare_self(
        self,
        x_btc: Tensor,
        places: Tensor | Places | None,
        cache: KVCache | None,
        mask: Mask | None,
        bias: Bias | None,
    ) -> AttentionInputs:
        if self.kv_dim != self.dim:
            raise ValueError(
                f"this layer is for cross-attention (kv_dim={self.kv_dim} is not dim={self.dim}): "
                "pass memory="
            )
        if cache is not None and not isinstance(cache, KVCache):
            raise TypeError(
                f"cache is a {type(cache).__name__}; expected a KVCache: make one with "
                "KVCache.growing(), .fixed(size) or .windowed(left)"
            )
        if not isinstance(places, Places):
            places = self.place(x_btc, places, cache)
        parts = run_fused(self.fused, (self.q_proj, self.k_proj, self.v_proj), x_btc)
        q_bhtd, k_bgtd = self._split(parts[0], self.q_norm), self._split(parts[1], self.k_norm)
        v_bgtd = self._split(parts[2], None)
        rotary = self.rotary
        if rotary is not None:
            if places.phases is None:
                raise ValueError(
                    "positions= came from place() of a layer without rotary; use this one's"
                )
            q_bhtd = rotate_pairs(q_bhtd, places.phases, rotary.config)
            if places.key_phases is None:
                k_bgtd = rotate_pairs(k_bgtd, places.phases, rotary.config)
        mask = both(self.own_mask, mask)
        if self.alibi:  # slopes are computed here, not kept in a buffer, which could be lost
            alibi = ALiBi(self.n_heads)
            bias = alibi if bias is None else alibi + bias
        if cache is None:
            at, keys = places.positions, places.positions
            if self.shards is not None:
                rule = self._rule(mask, bias)
                k_bgtd, v_bgtd, at, keys = self.shards.join(k_bgtd, v_bgtd, places, rule)
            if at is not None and keys is not None:
                mask, bias = place(mask, bias, at, keys)
            return AttentionInputs(q_bhtd, k_bgtd, v_bgtd, self._rule(mask, bias))
        if cache.window is not None or not cache.in_order or cache.slots.evicted:
            self._check_cache(cache, mask, bias)
        k_bgsd, v_bgsd, keys, at, in_line = cache.update(k_bgtd, v_bgtd, places.step)
        if not in_line:
            mask, bias = place(mask, bias, at, keys)
        if rotary is not None and places.key_phases is not None:
            k_bgsd = rotate_pairs(k_bgsd, places.key_phases, rotary.config)
        return AttentionInputs(q_bhtd, k_bgsd, v_bgsd, self._rule(mask, bias))

    def _attend(self, ready: AttentionInputs) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        heads_bhtd = self._attention(
            ready.q, ready.k, ready.v, **ready.rule, dropout=dropout, backend=self.backend
        )
        return project(self.out_proj, heads_bhtd.transpose(1, 2).flatten(2))

    def _split(self, wide_bsx: Tensor, norm: Norm | None) -> Tensor:
        B, S, X = wide_bsx.shape
        heads_bshd = wide_bsx.view(B, S, X // self.head_dim, self.head_dim)
        if norm is not None:
            # Under autocast the norm's weight stays wide, and torch's RMSNorm needs x in its type.
            heads_bshd = norm(heads_bshd.to(norm.weight.dtype)).to(heads_bshd.dtype)
        return heads_bshd.transpose(1, 2)

    def _remember(self, memory: Tensor | None, cache: CrossCache | None) -> tuple[Tensor, Tensor]:
        """Keys and values of the memory, from the cache if it is filled."""
        own = [name for name in ("causal", "alibi") if getattr(self, name)]
        own += [name for name in ("window", "rotary") if getattr(self, name) is not None]
        if own:
            raise ValueError(
                f"this layer has {', '.join(own)}, which need positions in one text, and a memory "
                "is another text; use a layer without, and give mask= or bias="
            )
        if cache is not None and cache.k is not None and cache.v is not None:
            if memory is not None and memory.shape[1] != cache.k.shape[2]:
                raise ValueError(
                    f"memory has S={memory.shape[1]}, but the cache was filled from one with "
                    f"S={cache.k.shape[2]}; reset() it for a new memory"
                )
            return cache.k, cache.v
        if memory is None:
            raise ValueError("the CrossCache is empty: pass memory= in the first call")
        sizes = check_shapes({"memory": (memory, "B S M")})
        if sizes["M"] != self.kv_dim:
            raise ValueError(f"memory has M={sizes['M']}, but the layer has kv_dim={self.kv_dim}")
        k_bgsd = self._split(self.k_proj(memory), self.k_norm)
        v_bgsd = self._split(self.v_proj(memory), None)
        if cache is not None:
            cache.fill(k_bgsd, v_bgsd)
        return k_bgsd, v_bgsd

    def _rule(self, mask: Mask | None, bias: Bias | None) -> Rule:
        return Rule(mask=mask, bias=bias, scale=self.scale, softcap=self.softcap, sinks=self.sinks)

    def _check_cache(self, cache: KVCache, mask: Mask | None, bias: Bias | None) -> None:
        left = None if self.window is None else self.window[0]
        if cache.window is not None and (left is None or left > cache.window):
            raise ValueError(
                f"the cache keeps {cache.window} keys back, but the layer's window is "
                f"{self.window}; use KVCache.windowed(left) with the layer's own left side"
            )
        scaling = None if self.rotary is None else self.rotary.config.scaling
        late = scaling is not None and scaling.rotates_kept_keys
        if cache.slots.evicted and (bias is not None or self.window is not None or late):
            raise ValueError(
                "keys were evicted from this cache, so the positions of the others are not known, "
                "but this layer's bias, window or rotary scaling needs them; evict only from "
                "models that have none of these"
            )
        if cache.in_order and not cache.slots.evicted:
            return
        for term in (mask, bias):
            lying = None if term is None else term.unplaced()
            if lying is not None:
                raise ValueError(
                    f"{lying} counts rows and keys by their index in memory, and this cache keeps "
                    "keys in another order; mark padding by positions= (-1), or use "
                    "KVCache.growing()"
                )

    def extra_repr(self) -> str:
        names = ["dim", "n_heads", "n_kv_heads", "head_dim"]
        names += [name for name in ("causal", "window", "alibi", "dropout") if getattr(self, name)]
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def place(
    mask: Mask | None, bias: Bias | None, queries: Tensor, keys: Tensor
) -> tuple[Mask, Bias | None]:
    """Mask and bias with explicit positions in all parts that use them; empty slots are masked."""
    if mask is not None and mask.positional:
        mask = mask.at(queries, keys)
    else:
        filled = Window(None, None).at(queries, keys)
        mask = filled if mask is None else mask.placed(queries, keys) & filled
    return mask, None if bias is None else bias.placed(queries, keys)


def both(one: Mask | None, other: Mask | None) -> Mask | None:
    if one is None or other is None:
        return one if other is None else other
    return one & other


def check_heads(
    dim: int, n_heads: int, n_kv_heads: int | None, head_dim: int | None
) -> tuple[int, int]:
    """Check the sizes, fill in the defaults, and return (n_kv_heads, head_dim)."""
    check_count("dim", dim)
    check_count("n_heads", n_heads)
    if head_dim is None:
        if dim % n_heads:
            raise ValueError(
                f"dim={dim} is not divisible by n_heads={n_heads}: take a number of heads that "
                "divides it, or give head_dim="
            )
        head_dim = dim // n_heads
    check_count("head_dim", head_dim)
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    check_count("n_kv_heads", n_kv_heads)
    if n_heads % n_kv_heads:
        raise ValueError(
            f"n_heads={n_heads} is not divisible by n_kv_heads={n_kv_heads}: each key head is "
            "shared by the same number of query heads"
        )
    return n_kv_heads, head_dim


def check_rule(
    head_dim: int,
    rotary: RotaryConfig | None,
    window: Sides | None,
    scale: float | None,
    softcap: float | None,
    backend: str,
) -> None:
    """Refuse, at construction, what `attention` would refuse at each call."""
    if rotary is not None and not isinstance(rotary, RotaryConfig):
        raise TypeError(f"rotary must be a RotaryConfig(head_dim={head_dim}), got {rotary!r}")
    if rotary is not None and rotary.head_dim != head_dim:
        raise ValueError(
            f"rotary was configured for head_dim={rotary.head_dim}, but the layer has "
            f"head_dim={head_dim}"
        )
    if scale is not None:
        check_number("scale", scale)
    if softcap is not None:
        check_number("softcap", softcap, positive=True)
    check_choice("backend", backend, ("auto", *BACKENDS))
    if window is not None and (not isinstance(window, tuple) or len(window) != 2):
        raise ValueError(
            f"window is {window!r}; expected (left, right): how many keys before and after its own "
            "a query may see, None for all"
        )
    if window is not None:
        Window(*window)
