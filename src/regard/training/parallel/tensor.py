"""Tensor parallelism: each layer's heads and hidden units split over the ranks.

Why: to divide a layer's weights and matrix products among devices.

How: torch's `ColwiseParallel` and `RowwiseParallel`. The projections to q, k, v and to the hidden
width give each rank its own heads and hidden units; the outputs of the projections back are summed
by one all-reduce. Norms, embeddings and head are replicated on the tensor ranks, where they get the
same gradients.

Left out: parameters for each head (sinks, ALiBi slopes, T5's table) or shared by heads (norms of q
and k) are refused. Tensor ranks must draw the same dropout: seed by `Mesh.part`.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from regard.layers.feedforward import FeedForward
from regard.layers.multihead import MultiHeadAttention
from regard.models import Transformer


def check_tensor(model: Transformer, count: int) -> None:
    """Refuse models that `count` ranks cannot share, with the layer and the reason."""
    for name, layer in model.named_modules():
        reason = None
        if isinstance(layer, MultiHeadAttention):
            reason = refuse_attention(layer, count)
        elif isinstance(layer, FeedForward):
            reason = refuse_feed_forward(layer, count)
        elif getattr(layer, "relative_table", None) is not None:
            reason = "has a relative table (T5), a number for each head, which is not cut"
        if reason is not None:
            raise ValueError(f"tensor={count}, but {name} {reason}; use data= or context= instead")


def refuse_attention(layer: MultiHeadAttention, count: int) -> str | None:
    for word in ("n_heads", "n_kv_heads"):
        if getattr(layer, word) % count:
            return f"has {word}={getattr(layer, word)}, which {count} does not divide"
    if layer.sinks is not None:
        return "has sinks, a number for each head, which are not cut"
    if layer.alibi:
        return "has ALiBi, whose slopes are for all heads together"
    if layer.q_norm is not None:
        return "has a norm of q and k (qk_norm), which the heads of all ranks share"
    return None


def refuse_feed_forward(layer: FeedForward, count: int) -> str | None:
    hidden = layer.up_proj.out_features
    if hidden % count:
        return f"has ffn_dim={hidden}, which {count} does not divide"
    activation = layer.activation
    if isinstance(activation, nn.Module) and any(True for _ in activation.parameters()):
        return "has an activation that learns, which the hidden numbers of all ranks share"
    return None


def cut_layers(model: Transformer, mesh: DeviceMesh) -> None:
    for layer in model.modules():
        plan: dict[str, ParallelStyle] = {}
        if isinstance(layer, MultiHeadAttention):
            plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
            plan["out_proj"] = RowwiseParallel()
        elif isinstance(layer, FeedForward):
            plan = {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
            if layer.gate_proj is not None:
                plan["gate_proj"] = ColwiseParallel()
        if plan:
            parallelize_module(layer, mesh, plan)
