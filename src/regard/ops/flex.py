"""The backend "flex": masks and biases become functions of compiled FlexAttention.

FlexAttention compiles a kernel for each kind of rule. The bias and the softcap become its
`score_mod`, the mask its `mask_mod`, and the bounds of tiles (`mask.py`: `tile_bounds`) its block
mask, so that empty tiles are skipped and no T × S tensor is built. Sinks are applied afterwards
from the logsumexp: a sink scales a row's output by the share of the weight that the keys keep.

The first call with a new kind of rule compiles, which takes seconds; later calls do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._check import is_empty
from regard.ops.call import Call, Rule
from regard.ops.mask import edges, tile_bounds
from regard.ops.sdpa import refuse_fused
from regard.ops.unseen import clear, covers, find_unseen

BLOCK = 128
WIDTH = 16
"""The narrowest heads its kernels accept; narrower ones are padded with zeros."""


def refuse(call: Call) -> str | None:
    """Why compiled FlexAttention does not run a call, on this device or anywhere."""
    reason, device = refuse_fused(call), call.q.device.type
    if reason is not None:
        return reason
    if call.dropout > 0.0:
        return "FlexAttention has no dropout"
    if call.transformed:
        return "FlexAttention does not run inside torch.func transforms"
    if call.q.dtype == torch.float64:
        return "FlexAttention computes scores in float32, which float64 does not allow"
    if is_empty(call.q, call.k, call.v):
        return "FlexAttention does not take empty inputs"
    if device not in ("cpu", "cuda"):
        return f"FlexAttention is not asked for on {device}"
    if device == "cuda":
        return None
    if call.needs_grad():
        return "FlexAttention has no backward pass on the CPU"
    if not runs_on_this_cpu():
        return "FlexAttention has no kernel for a CPU without AVX2"
    if call.sinks is not None:
        return "FlexAttention gives no logsumexp on the CPU, which sinks need"
    return None


def run(call: Call) -> Tensor:
    """Attention by compiled FlexAttention."""
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v, rule, sinks_h = call.q, call.k, call.v, call.rule, call.sinks
    if not torch.is_grad_enabled():
        # On a CPU it treats inputs that require a gradient as if one were computed now.
        q, k, v = q.detach(), k.detach(), v.detach()
    if not covers(rule):
        unseen = find_unseen(rule, q.device)
        k, v = clear(k, unseen), clear(v, unseen)
    width = v.shape[3]
    factor = rule.factor(q.shape[3])
    q, k, v = (F.pad(x, (0, max(WIDTH - x.shape[3], 0))) for x in (q, k, v))
    flex = _flex() if torch.compiler.is_compiling() else _compiled()
    given = {"return_aux": AuxRequest(lse=True)} if sinks_h is not None else {}
    result = flex(
        q,
        k,
        v,
        score_mod=score_function(rule),
        block_mask=None if rule.mask is None else block_mask(rule, q.device),
        scale=factor,
        enable_gqa=q.shape[1] != k.shape[1],
        **given,
    )
    if sinks_h is None:
        return result[..., :width]  # type: ignore[no-any-return]
    output, aux = result
    output = output[..., :width]
    kept = torch.sigmoid(aux.lse - sinks_h.to(aux.lse)[:, None])
    return output * kept[..., None].to(output.dtype)  # type: ignore[no-any-return]


def score_function(rule: Rule) -> Callable[..., Tensor] | None:
    """Softcap and bias as FlexAttention's `score_mod`; None when there is neither."""
    cap, bias, shape = rule.softcap, rule.bias, rule.shape
    if cap is None and bias is None:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, t: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if bias is not None:
            score = score + bias.add(b, h, t + shape.offset, j, shape, torch.float32)
        return score

    return score_mod


def block_mask(rule: Rule, device: torch.device) -> Any:
    """FlexAttention's block mask: from `tile_bounds`, or by its own search in a traced graph."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    mask, shape = rule.mask, rule.shape
    assert mask is not None
    if torch.compiler.is_compiling():
        return create_block_mask(mask.flex(shape), shape.B, shape.H, shape.T, shape.S, device)
    known = tile_bounds(mask, shape, edges(shape.T, BLOCK), edges(shape.S, BLOCK))
    partial = torch.from_numpy(known.maybe & ~known.surely)
    full = torch.from_numpy(known.maybe & known.surely)
    n_partial, where_partial = listed(partial, device)
    n_full, where_full = listed(full, device)
    return BlockMask.from_kv_blocks(
        n_partial,
        where_partial,
        n_full,
        where_full,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask.flex(shape),
        seq_lengths=(shape.T, shape.S),
    )


def listed(blocks: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are marked, and the blocks' indices, marked ones first."""
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[None, None].to(device), order.int()[None, None].to(device)


def runs_on_this_cpu() -> bool:
    """Whether its compiler has a kernel for this CPU, which needs vector instructions of x86."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(_flex(), dynamic=False)
