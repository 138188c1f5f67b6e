"""From inputs to heads and back, for `MultiheadAttention` and `multi_head_attention_forward`.

Inputs have torch.nn's layouts: (T, B, C), or (B, T, C) with `batch_first`, or (T, C) without a
batch. They are projected in their layout and then viewed as (B, H, T, D), so inputs are not copied;
the output has the layout of the inputs. If query, key and value are the same tensor, they are
projected in one product.

The output always comes from `attention`. Weights, when asked for, are computed in a second call
from the same q, k, mask and bias, so asking does not change the output in any bit.

Letters: B batch, T queries, S keys, H heads, D head width, C model width; X, Y are B, T in the
order of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.nn.errors import CallError, InputError, refuse_nested
from regard.nn.masks import Masks
from regard.ops import Wants, attention, observe
from regard.ops.dropout import draw_seed, keep_factor
from regard.ops.shape import Shape


class Inputs(NamedTuple):
    """Query, key and value, all with a batch axis, and the layout in which they were given."""

    query: Tensor
    key: Tensor
    value: Tensor
    batch_first: bool
    batched: bool

    def sizes(self, n_heads: int) -> Shape:
        (n, m), S = self.query.shape[:2], self.key.shape[1 if self.batch_first else 0]
        return Shape(n, n_heads, m, S) if self.batch_first else Shape(m, n_heads, n, S)

    def split(self, x_xyc: Tensor, n_heads: int) -> Tensor:
        """(X, Y, C) as (B, H, T, D), without a copy."""
        X, Y, C = x_xyc.shape
        x_xyhd = x_xyc.view(X, Y, n_heads, C // n_heads)
        return x_xyhd.transpose(1, 2) if self.batch_first else x_xyhd.permute(1, 2, 0, 3)

    def join(self, x_bhtd: Tensor) -> Tensor:
        """(B, H, T, D) as (X, Y, C)."""
        x_xyhd = x_bhtd.transpose(1, 2) if self.batch_first else x_bhtd.permute(2, 0, 1, 3)
        return x_xyhd.flatten(2)

    def give_back(
        self, output: Tensor, weights: Tensor | None, average: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Output and weights as torch returns them: without a batch axis if inputs had none."""
        if weights is not None and average:
            weights = weights.mean(1)
        if self.batched:
            return output, weights
        return output.squeeze(0), None if weights is None else weights.squeeze(0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Projection:
    """How inputs become queries, keys and values: one packed weight, (3C, C), or three separate.

    `pair` is the key and value that `add_bias_kv` adds, `zero` whether `add_zero_attn` adds one.
    """

    dim: int
    n_heads: int
    packed: Tensor | None
    apart: tuple[Tensor, Tensor, Tensor] | None
    bias: Tensor | None
    pair: tuple[Tensor, Tensor] | None
    zero: bool


def read_inputs(query: Tensor, key: Tensor, value: Tensor, batch_first: bool) -> Inputs:
    """Check the axes and add a missing batch axis; one tensor given twice stays one tensor."""
    refuse_nested(query, key, value)
    n_axes = query.dim()
    if n_axes not in (2, 3):
        raise InputError(f"query should be unbatched 2D or batched 3D tensor, got {n_axes}-D")
    if key.dim() != n_axes or value.dim() != n_axes:
        kind = "batched (3-D)" if n_axes == 3 else "unbatched (2-D)"
        raise InputError(
            f"for {kind} `query`, expected `key` and `value` to be {n_axes}-D "
            f"but found {key.dim()}-D and {value.dim()}-D tensors respectively"
        )
    if n_axes == 3:
        return Inputs(query, key, value, batch_first, True)
    q = query.unsqueeze(0)
    k = q if key is query else key.unsqueeze(0)
    v = k if value is key else q if value is query else value.unsqueeze(0)
    return Inputs(q, k, v, True, False)


def check_widths(inputs: Inputs, weights: Projection) -> None:
    (query, key, value), embed_dim = inputs[:3], weights.dim
    if query.shape[-1] != embed_dim:
        raise InputError(
            f"was expecting embedding dimension of {embed_dim}, but got {query.shape[-1]}"
        )
    n_alike = 3 if weights.apart is None else 2
    if key.shape[:n_alike] != value.shape[:n_alike]:
        raise InputError(
            f"key shape {tuple(key.shape)} does not match value shape {tuple(value.shape)}"
        )
    if weights.apart is None and key.shape[-1] != embed_dim:
        raise CallError(f"key and value must have width {embed_dim}, got {key.shape[-1]}")
    for name, x, weight in zip(inputs._fields, inputs[:3], weights.apart or (), strict=False):
        wanted = (embed_dim, x.shape[-1])
        if weight.shape != wanted:
            raise InputError(f"the weight of {name} must be {wanted}, got {tuple(weight.shape)}")
    axis_b = 0 if inputs.batch_first else 1
    n_queries, n_keys = query.shape[axis_b], key.shape[axis_b]
    if n_queries != n_keys:
        where = f"(batch_first={inputs.batch_first})"
        raise CallError(f"query has B={n_queries}, but key and value have B={n_keys} {where}")


def project(inputs: Inputs, weights: Projection) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values per head, (B, H, T, D) and (B, H, S, D)."""
    query, key, value = inputs[:3]
    parts = weights.packed.chunk(3) if weights.packed is not None else weights.apart
    assert parts is not None
    # torch's attention accepts a bias of another float type than its weight; linear does not.
    bias = None if weights.bias is None else weights.bias.to(parts[0].dtype)
    if weights.packed is None or key is not value:
        biases = bias.chunk(3) if bias is not None else (None, None, None)
        q, k, v = (F.linear(*part) for part in zip((query, key, value), parts, biases, strict=True))
    elif query is key:
        q, k, v = F.linear(query, weights.packed, bias).chunk(3, -1)
    else:
        C = query.shape[-1]
        q = F.linear(query, weights.packed[:C], None if bias is None else bias[:C])
        k, v = F.linear(key, weights.packed[C:], None if bias is None else bias[C:]).chunk(2, -1)
    q, k, v = (inputs.split(x, weights.n_heads) for x in (q, k, v))
    return q, k, v


def learned_pair(bias_k: Tensor | None, bias_v: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The key and value that `add_bias_kv` adds, both or neither."""
    if bias_k is None and bias_v is None:
        return None
    if bias_k is None or bias_v is None:
        lone, lacking = ("bias_k", "bias_v") if bias_v is None else ("bias_v", "bias_k")
        raise InputError(f"{lone} is set but {lacking} is None; set both or neither")
    return bias_k, bias_v


def extend(
    k_bhsd: Tensor, v_bhsd: Tensor, bias: tuple[Tensor, Tensor] | None, zero: bool
) -> tuple[Tensor, Tensor]:
    """Keys and values, with the learned pair and the zero pair appended if there are any."""
    B, H, _, D = k_bhsd.shape
    if bias is not None:
        k_bh1d, v_bh1d = (x.to(k_bhsd.dtype).view(1, H, 1, D).expand(B, H, 1, D) for x in bias)
        k_bhsd, v_bhsd = torch.cat((k_bhsd, k_bh1d), 2), torch.cat((v_bhsd, v_bh1d), 2)
    if zero:
        k_bhsd, v_bhsd = F.pad(k_bhsd, (0, 0, 0, 1)), F.pad(v_bhsd, (0, 0, 0, 1))
    return k_bhsd, v_bhsd


def attend(
    inputs: Inputs,
    weights: Projection,
    masks: Masks,
    dropout: float,
    need_weights: bool,
    static: tuple[Tensor | None, Tensor | None] = (None, None),
    by: Callable[..., Tensor] = attention,
) -> tuple[Tensor, Tensor | None]:
    """The output before `out_proj`, and the weights after dropout, (B, H, T, S), if needed.

    static: keys and values, (B·H, S, D), used instead of projected ones. by: the function that
    calls `attention`.
    """
    masks.check_axes(inputs.batched)
    check_widths(inputs, weights)
    shape = inputs.sizes(weights.n_heads)
    if static[0] is not None:
        shape = shape._replace(S=static[0].shape[1])
    masks.check_sizes(shape, inputs.batched)
    extra = (weights.pair is not None) + weights.zero
    mask, bias = masks.read(shape, extra)
    rule: dict[str, Any] = {"mask": mask, "bias": bias}
    q, k, v = project(inputs, weights)
    k = k if static[0] is None else read_static("key", static[0], shape, weights)
    v = v if static[1] is None else read_static("value", static[1], shape, weights)
    k, v = extend(k, v, weights.pair, weights.zero)
    seed = draw_seed(q.device) if dropout > 0.0 else None
    output = inputs.join(by(q, k, v, **rule, dropout=dropout, seed=seed))
    if not need_weights:
        return output, None
    seen = observe(q, k, None, **rule, wants=Wants(weights=True)).weights
    assert seen is not None
    if seed is not None:
        seen = seen * keep_factor(seed, dropout, Shape(*seen.shape), dtype=seen.dtype)
    return output, seen.to(q.dtype)


def read_static(name: str, static: Tensor, shape: Shape, weights: Projection) -> Tensor:
    if weights.pair is not None:
        raise InputError(f"bias cannot be added to static {name}.")
    B, H, _, S = shape
    wanted = (B * H, S, weights.dim // H)
    if static.shape != wanted:
        raise InputError(f"static {name} must be (B·H, S, D) = {wanted}, got {tuple(static.shape)}")
    return static.view(B, H, S, -1)
