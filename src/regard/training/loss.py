"""Fused output layer and cross-entropy: the gradient is computed in the forward pass.

Why: logits over a vocabulary are the largest tensor of a training step, ten times any other, and
plain code reads and writes it five times.

How: one autograd function is the output layer and the loss. It computes the logits of some of the
tokens, overwrites them with the loss's gradient with respect to them, and at once uses that for the
gradients of the hidden states and of the weight; so logits are never kept. On a GPU the middle step
is one kernel. A vocabulary whose size does not suit the matrix units is padded with rows of zeros
that no token can choose. The loss of a token with target y, smoothing e and V logits s is

    logsumexp(s) - (1 - e) · s[y] - e · mean(s)

and that of a batch is the sum over its tokens; tokens with the target -100 are left out. If most
are left out, as in masked language modelling, a CPU drops them before the output layer; on a GPU
one would have to synchronise to know how many remain.

R-Drop (Liang et al. 2021) reads each token twice, with different dropout. From the two losses l and
m and the two distributions p and r, `r_drop_loss` computes

    (l + m) / 2 + α · (KL(p ‖ r) + KL(r ‖ p)) / 4

which is half of what the paper minimises, so that steps are as large as without R-Drop. It keeps
the logits.

Left out: second derivatives; a softcap of the logits, for which `plain_loss` is there.

Letters: N tokens, C model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard._check import check_shapes
from regard.models.transformer import Head
from regard.ops.kernels.backend import has_triton
from regard.ops.kernels.launch import on_device_of
from regard.training.data.packing import NOTHING

EVEN = 128  # half-precision matrix units are fast for a vocabulary of a multiple of this
CPU_LOGITS = 2**24  # computed at a time: enough for matrix products, too few to fill memory
GPU_LOGITS = 2**31  # computed at a time on a GPU, where only memory sets a bound
FEW = 0.5  # tokens without a target are dropped first if fewer than this share have one (CPU)


def plain_loss(logits_btv: Tensor, targets_bt: Tensor, smoothing: float = 0.0) -> Tensor:
    """Sum torch's own cross-entropy over tokens; `summed_loss` is tested against this."""
    return F.cross_entropy(
        logits_btv.flatten(0, -2).float(),
        targets_bt.flatten(),
        ignore_index=NOTHING,
        reduction="sum",
        label_smoothing=smoothing,
    )


def r_drop_loss(logits_btv: Tensor, targets_bt: Tensor, smoothing: float, alpha: float) -> Tensor:
    """Sum the R-Drop loss over targets (B, T); logits (2B, T, V) hold the two passes, stacked."""
    if logits_btv.shape[:2] != (2 * targets_bt.shape[0], targets_bt.shape[1]):
        what = f"logits are {tuple(logits_btv.shape)} and targets {tuple(targets_bt.shape)}"
        raise ValueError(f"{what}; expected logits (2B, T, V) of two passes for targets (B, T)")
    p_btv, r_btv = F.log_softmax(logits_btv.float(), -1).chunk(2)
    apart_bt = ((p_btv.exp() - r_btv.exp()) * (p_btv - r_btv)).sum(-1)
    apart = torch.where(targets_bt != NOTHING, apart_bt, 0.0).sum()
    losses = plain_loss(logits_btv, targets_bt.repeat(2, 1), smoothing)
    return losses / 2 + alpha / 4 * apart


def summed_loss(head: Head, x_btc: Tensor, targets_bt: Tensor, smoothing: float = 0.0) -> Tensor:
    """Sum the cross-entropy of `head`'s logits for the hidden states `x_btc` over tokens."""
    check_shapes({"x": (x_btc, "B T C"), "targets": (targets_bt, "B T")})
    if head.softcap is not None:
        return plain_loss(head(x_btc), targets_bt, smoothing)
    x_nc, targets_n = keep_asked(x_btc.flatten(0, 1), targets_bt.flatten())
    x_nc = head.ready(x_nc)
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    if torch.is_autocast_enabled(x_nc.device.type):
        dtype = torch.get_autocast_dtype(x_nc.device.type)
        x_nc, weight = x_nc.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(x_nc.device.type, enabled=False):
        n_real = weight.shape[0]
        lack = -n_real % EVEN
        if x_nc.is_cuda and x_nc.dtype != torch.float32 and lack:
            weight = F.pad(weight, (0, 0, 0, lack))
            bias = None if bias is None else F.pad(bias, (0, lack))
        # Found out here: inside a Function gradients are off and requires_grad says nothing.
        given = [x for x in (x_nc, weight, bias) if x is not None]
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        total: Tensor = _SummedLoss.apply(  # type: ignore[no-untyped-call]
            x_nc, weight, bias, targets_n, smoothing, n_real, learns
        )
    return total


def keep_asked(x_nc: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
    """Drop tokens without a target, if these are the majority and x is on a CPU (no sync)."""
    if x_nc.is_cuda:
        return x_nc, targets_n
    asked_n = targets_n != NOTHING
    n_asked = int(asked_n.sum())
    if not 0 < n_asked < FEW * len(targets_n):
        return x_nc, targets_n
    return x_nc[asked_n], targets_n[asked_n]


class _SummedLoss(torch.autograd.Function):
    """Sum of the tokens' losses from x (N, C), weight (V, C) and bias (V,)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_nc: Tensor,
        weight_vc: Tensor,
        bias_v: Tensor | None,
        targets_n: Tensor,
        smoothing: float,
        n_real: int,
        learns: bool,
    ) -> Tensor:
        limit = GPU_LOGITS if x_nc.is_cuda else CPU_LOGITS
        n_at_once = max(1, min(x_nc.shape[0], limit // weight_vc.shape[0]))
        whole = n_at_once == x_nc.shape[0]
        total = x_nc.new_zeros((), dtype=torch.float32)
        grad_x = torch.empty_like(x_nc) if learns else None
        grad_weight = grad_bias = None
        for start in range(0, x_nc.shape[0], n_at_once):
            part_nc = x_nc[start : start + n_at_once]
            logits_nv = F.linear(part_nc, weight_vc, bias_v)
            losses_n = logits_to_gradient(
                logits_nv, targets_n[start : start + n_at_once], smoothing, n_real, learns
            )
            total += losses_n.sum()
            if grad_x is None:
                continue
            torch.mm(logits_nv, weight_vc, out=grad_x[start : start + n_at_once])
            if whole:
                grad_weight = logits_nv.t() @ part_nc
            else:
                if grad_weight is None:
                    grad_weight = torch.zeros_like(weight_vc, dtype=torch.float32)
                if logits_nv.dtype == torch.float32:
                    grad_weight.addmm_(logits_nv.t(), part_nc)
                else:
                    grad_weight += logits_nv.t() @ part_nc
            if bias_v is not None:
                sums_v = logits_nv.sum(0, dtype=torch.float32)
                grad_bias = sums_v if grad_bias is None else grad_bias + sums_v
            del logits_nv
        ctx.save_for_backward(grad_x, grad_weight, grad_bias)
        ctx.kinds = weight_vc.dtype, None if bias_v is None else bias_v.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, grad_bias = ctx.saved_tensors
        kind, bias_kind = ctx.kinds
        by_bias = None if grad_bias is None else (grad_bias * above).to(bias_kind)
        by_weight = (grad_weight * above.to(grad_weight.dtype)).to(kind)
        return grad_x * above.to(grad_x.dtype), by_weight, by_bias, None, None, None, None


def logits_to_gradient(
    logits_nv: Tensor, targets_n: Tensor, smoothing: float, n_real: int, learns: bool
) -> Tensor:
    """Compute each token's loss (N,), float32; with `learns`, overwrite logits by its gradient.

    The columns from n_real on are padding, not tokens: they do not enter the loss.
    """
    if logits_nv.is_cuda and has_triton():
        from regard.training import loss_kernels

        with on_device_of(logits_nv):
            return loss_kernels.run(logits_nv, targets_n, smoothing, n_real, learns)
    real_nv = logits_nv[:, :n_real]
    # Exponentials of half-precision numbers would be far off; float32 is changed in place.
    work_nv = real_nv if real_nv.dtype == torch.float32 else real_nv.float()
    counts_n = targets_n != NOTHING
    at_n = torch.where(counts_n, targets_n, 0)[:, None]
    lse_n = torch.logsumexp(work_nv, 1)
    losses_n = lse_n - (1.0 - smoothing) * work_nv.gather(1, at_n)[:, 0]
    if smoothing:
        losses_n = losses_n - smoothing * work_nv.mean(1)
    if learns:
        work_nv.sub_(lse_n[:, None]).exp_()
        if smoothing:
            work_nv.sub_(smoothing / n_real)
        work_nv.scatter_add_(1, at_n, torch.full_like(at_n, smoothing - 1.0, dtype=torch.float32))
        if not bool(counts_n.all()):
            work_nv.mul_(counts_n[:, None])
        if work_nv is not real_nv:
            real_nv.copy_(work_nv)
        logits_nv[:, n_real:] = 0.0
    return torch.where(counts_n, losses_n, 0.0)
