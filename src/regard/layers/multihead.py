"""Multi-head attention as a layer: project, split into heads, place, attend, join, project.

Why: the operation in `attention` knows tensors and a rule; a layer has weights, and knows where its
tokens stand and what came before.

How: four plain projections. They are separate modules on purpose: grouped heads and a memory of
another width give them different shapes, each has a bias or not, and files, sharding, adapters and
quantisation all speak of them one by one. The layer's own rule (causal, window, ALiBi) joins what
the caller gives: masks with "and", biases by sum.

Positions: without any, tokens stand as they lie. Given ones, (T,) or (B, T), move every rule that
speaks of positions, and rotary; a negative position is padding, which nobody sees. With a cache
they go on by themselves. `place` works them out once, for all layers of a stack.

A memory has no positions in common with x: layers that are causal, windowed, rotary or ALiBi refuse
one. Masks and biases of the caller may speak of anything.

Left out: a value width other than the key width.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, C model width,
M width of the memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeAlias, TypedDict, get_args

import torch
from torch import Tensor, nn

from regard._check import check_probability, check_shapes
from regard.layers.cache import CrossCache, KVCache, as_rows
from regard.layers.fused_linear import SideBySide, run_side_by_side
from regard.layers.mask_positions import as_they_lie, place_bias, place_mask, unplaced
from regard.layers.matvec import project
from regard.layers.norm import Norm, NormKind, make_norm
from regard.layers.observing import Observable
from regard.ops import (
    ALiBi,
    Bias,
    Causal,
    Mask,
    Observation,
    Wants,
    Window,
    observe,
)
from regard.ops.backends import BACKENDS
from regard.ops.call import as_bias, as_mask, check_number
from regard.positions import Phases, Rotary, RotaryConfig
from regard.positions.frequencies import check_choice, check_count

Sides: TypeAlias = tuple[int | None, int | None]


@dataclass(frozen=True, kw_only=True)
class ProjectionBias:
    """Which projections have a bias."""

    q: bool = True
    k: bool = True
    v: bool = True
    out: bool = True


@dataclass(frozen=True, eq=False)
class Places:
    """Where the tokens of one call stand: made once by `place`, read by each layer of a stack.

    `positions` None: as they lie, or going on where the cache ends. `phases` are rotary's. `keys`
    are the keys' own positions, where they are not the queries' (see `Elsewhere`).
    """

    positions: Tensor | None = None
    phases: Phases | None = None
    keys: Tensor | None = None


class Whole(NamedTuple):
    """Keys and values of a whole text, and positions of queries and keys, None for as they lie."""

    k: Tensor
    v: Tensor
    queries: Tensor | None
    keys: Tensor | None


class Elsewhere(Protocol):
    """What other processes hold of a text that is cut over them; set from outside as `elsewhere`.

    With it x is one part of the text, and its queries see the keys of all parts. `place` answers
    for the layer's `place`; `join` comes between its projections and its attention.
    """

    def place(self, layer: MultiHeadAttention, x_btc: Tensor, positions: Tensor | None) -> Places:
        """Where the tokens of this part stand, and the keys of all parts."""

    def join(self, k_bgtd: Tensor, v_bgtd: Tensor, places: Places, rule: Rule) -> Whole:
        """All parts' keys and values; gradients go back to the part they came from."""


class Rule(TypedDict):
    """What `attention` and `observe` are given beside q, k and v."""

    mask: Mask | None
    bias: Bias | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None


class Ready(NamedTuple):
    """All that one call of attention needs."""

    q: Tensor
    k: Tensor
    v: Tensor
    rule: Rule


class MultiHeadAttention(Observable):
    """Self-attention of x, or cross-attention from x to a memory: (B, T, C) -> (B, T, C)."""

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
        """dim: C. n_heads: H. n_kv_heads: G (H unless given). head_dim: D (C / H unless given).

        kv_dim: width M of the memory, for cross-attention (C unless given).
        bias: of all projections, or `ProjectionBias` for each.
        rotary, alibi: positions. causal, window=(left, right): what a query may see, as `Window`.
        softcap, scale: as in `attention`. sinks: a learned score in each head's sum, 0 at first.
        qk_norm: a norm of each head's queries and keys over D, before rotary.
        dropout: of the weights, in training only. backend: "auto", or the only one allowed.
        """
        super().__init__()
        n_kv_heads, head_dim = check_heads(dim, n_heads, n_kv_heads, head_dim)
        check_count("kv_dim", kv_dim := dim if kv_dim is None else kv_dim)
        check_rotary(rotary, head_dim)
        check_scores(scale, softcap, backend)
        if isinstance(bias, bool):
            bias = ProjectionBias(q=bias, k=bias, v=bias, out=bias)
        self.dim, self.kv_dim, self.head_dim = dim, kv_dim, head_dim
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.causal, self.alibi, self.window = causal, alibi, check_window(window)
        self.scale, self.softcap = scale, softcap
        self.dropout = check_probability("dropout", dropout)
        self.backend = backend
        q_width, kv_width = n_heads * head_dim, n_kv_heads * head_dim
        self.q_proj = nn.Linear(dim, q_width, bias.q, device=device, dtype=dtype)
        self.k_proj = nn.Linear(kv_dim, kv_width, bias.k, device=device, dtype=dtype)
        self.v_proj = nn.Linear(kv_dim, kv_width, bias.v, device=device, dtype=dtype)
        self.out_proj = nn.Linear(q_width, dim, bias.out, device=device, dtype=dtype)
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if qk_norm is not None:
            check_choice("qk_norm", qk_norm, get_args(NormKind))
            self.q_norm, self.k_norm = (
                make_norm(qk_norm, head_dim, eps=qk_norm_eps, device=device, dtype=dtype)
                for _ in range(2)
            )
        self.rotary = None if rotary is None else Rotary(rotary)
        self.fused: SideBySide | None = None
        self.elsewhere: Elsewhere | None = None
        self.sinks: nn.Parameter | None = None
        if sinks:
            self.sinks = nn.Parameter(torch.empty(n_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def fuse(self) -> None:
        """Lay the projections of q, k and v side by side in memory; see `SideBySide`."""
        if self.kv_dim == self.dim:
            self.fused = SideBySide((self.q_proj, self.k_proj, self.v_proj))

    def reset_parameters(self) -> None:
        """Set what this module itself holds; the projections and norms reset themselves."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

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
        """Attend from x to itself (and to what `cache` keeps), or to memory (B, S, M).

        mask, bias: over (B, H, T, S), joined with the layer's own rule; S counts the kept keys too.
        positions: (T,) or (B, T), negative for padding, or what `place` made.
        cache: a `KVCache`; for a memory a `CrossCache`, with which memory may be left out later.
        """
        ready = self._prepare(x_btc, memory, mask, bias, positions, cache)
        return self._attend(ready)

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
        """What `forward` gives, as `output`, and what is wanted about the weights."""
        ready = self._prepare(x_btc, memory, mask, bias, positions, cache)
        output_btc = self._attend(ready)
        seen = observe(ready.q, ready.k, None, wants=wants, **ready.rule)
        return replace(seen, output=output_btc)

    def place(
        self, x_btc: Tensor, positions: Tensor | None = None, cache: KVCache | None = None
    ) -> Places:
        """Where the tokens of x stand, and rotary's phases there, for all layers like this one."""
        check_shapes({"x": (x_btc, "B T C")})
        n_new, device = x_btc.shape[1], x_btc.device
        if self.elsewhere is not None:
            return self.elsewhere.place(self, x_btc, positions)
        if positions is None:
            if self.rotary is None:
                return Places()
            at = torch.arange(n_new, device=device)
            at = at if cache is None else cache.next_positions(n_new, device)
            return Places(None, self.rotary.phases(at))
        at = as_rows(positions, x_btc.shape[0], n_new).to(device)
        phases = None if self.rotary is None else self.rotary.phases(at)
        return Places(None if cache is None and as_they_lie(at) else at, phases)

    def _prepare(
        self,
        x_btc: Tensor,
        memory: Tensor | None,
        mask: Mask | Tensor | None,
        bias: Bias | Tensor | None,
        positions: Tensor | Places | None,
        cache: KVCache | CrossCache | None,
    ) -> Ready:
        sizes = check_shapes({"x": (x_btc, "B T C")})
        if sizes["C"] != self.dim:
            raise ValueError(f"x has C={sizes['C']}, but the layer has dim={self.dim}")
        given_mask, given_bias = as_mask(mask), as_bias(bias)
        if memory is None and not isinstance(cache, CrossCache):
            return self._prepare_self(x_btc, given_mask, given_bias, positions, cache)
        if positions is not None or isinstance(cache, KVCache):
            raise ValueError(
                "attention to a memory takes no positions, and no cache but a CrossCache: "
                "positions and KVCache speak of x alone"
            )
        q_bhtd = self._heads(self.q_proj, self.q_norm, x_btc)
        k_bgsd, v_bgsd = self._remember(memory, cache)
        return Ready(q_bhtd, k_bgsd, v_bgsd, self._rule(given_mask, given_bias))

    def _prepare_self(
        self,
        x_btc: Tensor,
        mask: Mask | None,
        bias: Bias | None,
        positions: Tensor | Places | None,
        cache: KVCache | None,
    ) -> Ready:
        if self.kv_dim != self.dim:
            raise ValueError(
                f"the layer was made for a memory of width kv_dim={self.kv_dim} and x has "
                f"dim={self.dim}: pass memory="
            )
        if not isinstance(positions, Places):
            positions = self.place(x_btc, positions, cache)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        parts = run_side_by_side(self.fused, projections, x_btc)
        q_bhtd = self._split(parts[0], self.q_norm)
        k_bgtd = self._split(parts[1], self.k_norm)
        v_bgtd = self._split(parts[2], None)
        # Keys that turn anew as the text grows are kept as they were before turning. The newest
        # token is in every call, so the positions at hand tell how long the text is.
        late = cache is not None and self._rotates_kept_keys()
        if self.rotary is not None:
            if positions.phases is None:
                raise ValueError("positions were placed by a layer without rotary; this one has it")
            q_bhtd = self.rotary.rotate(q_bhtd, positions.phases)
            if not late:
                k_bgtd = self.rotary.rotate(k_bgtd, positions.phases)
        mask, bias = self._own_mask(mask), self._own_bias(bias)
        at, keys = positions.positions, positions.positions
        if cache is None:
            if self.elsewhere is not None:
                rule = self._rule(mask, bias)
                k_bgtd, v_bgtd, at, keys = self.elsewhere.join(k_bgtd, v_bgtd, positions, rule)
            if at is not None and keys is not None:
                mask, bias = place_mask(mask, at, keys), place_bias(bias, at, keys)
            return Ready(q_bhtd, k_bgtd, v_bgtd, self._rule(mask, bias))
        self._check_cache(cache, mask, bias)
        kept = cache.update(k_bgtd, v_bgtd, at)
        if not kept.in_line:
            mask = place_mask(mask, kept.queries, kept.positions)
            bias = place_bias(bias, kept.queries, kept.positions)
        k_bgsd = kept.k
        if late and self.rotary is not None:
            k_bgsd = self.rotary.rotate(k_bgsd, kept.positions)
        return Ready(q_bhtd, k_bgsd, kept.v, self._rule(mask, bias))

    def _attend(self, ready: Ready) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        heads_bhtd = self._attention(
            ready.q,
            ready.k,
            ready.v,
            **ready.rule,
            dropout=dropout,
            backend=self.backend,
        )
        return project(self.out_proj, heads_bhtd.transpose(1, 2).flatten(2))

    def _heads(self, proj: nn.Linear, norm: Norm | None, x_bsm: Tensor) -> Tensor:
        """(B, S, M) -> (B, H or G, S, D)."""
        return self._split(proj(x_bsm), norm)

    def _split(self, wide_bsx: Tensor, norm: Norm | None) -> Tensor:
        """What a projection gave, as heads."""
        n_heads = wide_bsx.shape[2] // self.head_dim
        heads_bshd = wide_bsx.view(*wide_bsx.shape[:2], n_heads, self.head_dim)
        if norm is not None:
            # Under autocast the norm keeps its wide type, and torch's RMSNorm wants x in it too.
            heads_bshd = norm(heads_bshd.to(norm.weight.dtype)).to(heads_bshd.dtype)
        return heads_bshd.transpose(1, 2)

    def _remember(self, memory: Tensor | None, cache: CrossCache | None) -> tuple[Tensor, Tensor]:
        """Keys and values of the memory, from the cache where it has them."""
        own = [name for name in ("causal", "alibi") if getattr(self, name)]
        own += [name for name in ("window", "rotary") if getattr(self, name) is not None]
        if own:
            raise ValueError(
                f"this layer has {', '.join(own)}, which speak of positions in one text, and was "
                "given a memory, which is another; use a layer without, and mask= or bias="
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
        k_bgsd = self._heads(self.k_proj, self.k_norm, memory)
        v_bgsd = self._heads(self.v_proj, None, memory)
        if cache is not None:
            cache.fill(k_bgsd, v_bgsd)
        return k_bgsd, v_bgsd

    def _rule(self, mask: Mask | None, bias: Bias | None) -> Rule:
        return Rule(mask=mask, bias=bias, scale=self.scale, softcap=self.softcap, sinks=self.sinks)

    def _own_mask(self, given: Mask | None) -> Mask | None:
        """Causal, window and the caller's mask, all of which must allow a look."""
        mask: Mask | None = Causal() if self.causal else None
        if self.window is not None:
            window = Window(*self.window)
            mask = window if mask is None else mask & window
        if given is None:
            return mask
        return given if mask is None else mask & given

    def _own_bias(self, given: Bias | None) -> Bias | None:
        """ALiBi plus the caller's bias; slopes are made here, so that no buffer can be lost."""
        if not self.alibi:
            return given
        alibi = ALiBi(self.n_heads)
        return alibi if given is None else alibi + given

    def _check_cache(self, cache: KVCache, mask: Mask | None, bias: Bias | None) -> None:
        """Refuse a cache that keeps less than the layer sees, or in another order than asked."""
        left = None if self.window is None else self.window[0]
        if cache.window is not None and (left is None or left > cache.window):
            raise ValueError(
                f"the cache keeps {cache.window} keys back, but the layer's window is "
                f"{self.window}; use KVCache.windowed(left) with the layer's own left side"
            )
        if cache.in_order:
            return
        lying = unplaced(mask) or unplaced(bias)
        if lying is not None:
            raise ValueError(
                f"{lying} speaks of keys as they lie in memory, and a {type(cache).__name__} lays "
                "them otherwise; tell padding by positions (-1 is padding), or use "
                "KVCache.growing()"
            )

    def _rotates_kept_keys(self) -> bool:
        scaling = None if self.rotary is None else self.rotary.config.scaling
        return scaling is not None and scaling.rotates_kept_keys

    def extra_repr(self) -> str:
        said = f"dim={self.dim}, n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}"
        said += f", head_dim={self.head_dim}"
        plain = {"causal": False, "window": None, "alibi": False, "dropout": 0.0}
        for name, value in plain.items():
            if getattr(self, name) != value:
                said += f", {name}={getattr(self, name)}"
        return said


def check_heads(
    dim: int, n_heads: int, n_kv_heads: int | None, head_dim: int | None
) -> tuple[int, int]:
    """The number of key heads and the head width, given or worked out, or why they cannot be."""
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


def check_rotary(rotary: RotaryConfig | None, head_dim: int) -> None:
    """Refuse a rotary config made for another head width."""
    if rotary is not None and rotary.head_dim != head_dim:
        raise ValueError(
            f"rotary was configured for head_dim={rotary.head_dim}, but the layer has "
            f"head_dim={head_dim}"
        )


def check_scores(scale: float | None, softcap: float | None, backend: str) -> None:
    """Refuse numbers that `attention` would refuse, when the layer is made."""
    if scale is not None:
        check_number("scale", scale)
    if softcap is not None:
        check_number("softcap", softcap, positive=True)
    check_choice("backend", backend, ("auto", *BACKENDS))


def check_window(window: Sides | None) -> Sides | None:
    """Two sides, each a number from 0 on or None."""
    if window is None:
        return None
    if not isinstance(window, tuple) or len(window) != 2:
        raise ValueError(
            f"window is {window!r}; expected (left, right): how many keys before and after its own "
            "a query may see, None for all"
        )
    Window(*window)
    return window
