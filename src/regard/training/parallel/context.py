"""Context parallelism: one sequence split over several processes into parts of equal length.

Why: the activations of a long text do not fit on one device.

How: every process runs the whole model on its part. Only attention needs the other parts: keys and
values are all-gathered (`Parts.join`, which a layer calls through its `shards`), and their
gradients are reduce-scattered to the part they came from. Under a causal mask a part drops the keys
after it, so that its last query sits on its last key, as conventions have it, and needs no
positions; any other mask or bias gets positions. `Documents` is widened to all keys once, at the
top of the model.

Left out: ring attention and splits that balance causal work over the processes; dense masks and
lengths, which refer to keys by their index in memory; encoder–decoders; caches.

Letters: B batch, T tokens of this part, S tokens of the text, G key heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from regard.layers.cache_slots import as_rows
from regard.layers.multihead import GatheredKeys, MultiHeadAttention, Places, Rule
from regard.models import Transformer
from regard.ops import Mask
from regard.ops.call import as_mask

# Torch 2.13 has new names for these two, and warns of the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@final
class Parts:
    """The parts of a sequence: which is ours, and how to reach the others (a `SequenceShards`)."""

    def __init__(self, group: dist.ProcessGroup, index: int, count: int) -> None:
        self._group, self._index, self._count = group, index, count
        self._line = torch.empty(0, dtype=torch.int64)

    def line(self, n_tokens: int, device: torch.device) -> Tensor:
        """Positions (T,) of our tokens when the parts follow each other in order.

        It is always the same object, so that `place` can tell it from positions that a caller gave,
        on every process alike.
        """
        if self._line.shape[0] != n_tokens or self._line.device != device:
            first = self._index * n_tokens
            self._line = torch.arange(first, first + n_tokens, device=device)
        return self._line

    def gather(self, x: Tensor, axis: int) -> Tensor:
        joined: Tensor = _Gather.apply(x, axis, self._group, self._count)  # type: ignore[no-untyped-call]
        return joined

    def place(self, layer: MultiHeadAttention, x_btc: Tensor, positions: Tensor | None) -> Places:
        """Positions and rotary phases of our tokens; gathers key positions that a caller gave."""
        n_own, device = x_btc.shape[1], x_btc.device
        line = self.line(n_own, device)
        in_line = positions is None or positions is line
        at = line if positions is None else positions.to(device)
        phases = None if layer.rotary is None else layer.rotary.phases(at)
        if in_line:
            return Places(None, phases)
        at_bt = as_rows(at, x_btc.shape[0], n_own)
        return Places(at_bt, phases, self.gather(at_bt, 1))

    def join(self, k_bgtd: Tensor, v_bgtd: Tensor, places: Places, rule: Rule) -> GatheredKeys:
        """Gather keys and values of all parts, without those that a causal mask hides."""
        n_own, device = k_bgtd.shape[2], k_bgtd.device
        k_bgsd, v_bgsd = self.gather(torch.stack((k_bgtd, v_bgtd)), 3)
        mask, bias = rule["mask"], rule["bias"]
        if places.keys is not None:
            return GatheredKeys(k_bgsd, v_bgsd, places.positions, places.keys)
        if mask is None and bias is None:
            return GatheredKeys(k_bgsd, v_bgsd, None, None)
        is_placed = all(rule is None or rule.unplaced() is None for rule in (mask, bias))
        if mask is not None and mask.looks_back and is_placed:
            end = (self._index + 1) * n_own
            return GatheredKeys(k_bgsd[:, :, :end], v_bgsd[:, :, :end], None, None)
        keys_s = torch.arange(k_bgsd.shape[2], device=device)
        return GatheredKeys(k_bgsd, v_bgsd, self.line(n_own, device), keys_s)

    def widen(self, mask: Mask) -> Mask:
        """Turn a mask over our own tokens into one from our queries to the keys of all parts."""
        if mask.positional:
            return mask
        if mask.parts():
            return mask.with_parts(self.widen)
        own = mask.with_own_queries()
        letters = [spelled.split() for spelled in own.axes.values()]
        if own.follows_keys and not any({"T", "S"} <= set(axes) for axes in letters):

            def widen_held(name: str, value: Any) -> Any:
                is_own = isinstance(value, Tensor) and own.letters(name)[-1] == "S"
                return self.gather(value, value.dim() - 1) if is_own else value

            return own.with_held(widen_held)
        raise ValueError(
            f"{type(mask).__name__} counts keys by their index in memory, and with the text cut "
            "over ranks most of them lie elsewhere; tell padding by positions (-1 is padding), "
            "documents by Documents(ids) of this rank's own tokens, or use data="
        )


class _Gather(torch.autograd.Function):
    """All-gather along an axis; the backward pass reduce-scatters (sums) the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, group: dist.ProcessGroup, count: int) -> Tensor:
        ctx.axis, ctx.group, ctx.count = axis, group, count
        own = x.movedim(axis, 0).contiguous()
        joined = own.new_empty((count * own.shape[0], *own.shape[1:]))
        all_gather(joined, own, group=group)
        return joined.movedim(0, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        joined = grads[0].movedim(ctx.axis, 0).contiguous()
        own = joined.new_empty((joined.shape[0] // ctx.count, *joined.shape[1:]))
        reduce_scatter(own, joined, group=ctx.group)
        return own.movedim(0, ctx.axis), None, None, None


def check_context(model: Transformer, count: int) -> None:
    if model.encoder is not None and model.decoder is not None:
        what = f"context={count}, but the model is an encoder–decoder, which has two texts"
        raise ValueError(f"{what}; its batches are cut by rows alone: use data= in its place")
    for name, layer in model.named_modules():
        rotary = layer.rotary if isinstance(layer, MultiHeadAttention) else None
        scaling = None if rotary is None else rotary.config.scaling
        if scaling is not None and scaling.needs_length:
            raise ValueError(
                f"context={count}, but the rotary positions of {name} change with the length of "
                f"the text ({type(scaling).__name__}), which a part of it does not tell; use data="
            )


def cut_text(model: Transformer, parts: Parts) -> None:
    """Make `model.run` accept this rank's part of a text, and attention gather the others."""
    whole: Callable[..., Tensor] = model.run

    def run(ids_bt: Tensor, **given: Any) -> Tensor:
        if given.get("cache") is not None:
            raise ValueError("a model whose text is cut over ranks has no cache, nor generates")
        if given.get("real") is not None:
            what = "real= counts a row's tokens, and here a row is cut over ranks"
            raise ValueError(f"{what}; give positions=, with -1 for padding")
        if given.get("positions") is None:
            given["positions"] = parts.line(ids_bt.shape[1], ids_bt.device)
        mask = as_mask(given.pop("mask", None))
        return whole(ids_bt, mask=None if mask is None else parts.widen(mask), **given)

    # Patched on the instance, so that `forward` goes through it as well as callers of `run`.
    model.run = run  # type: ignore[method-assign]
    for layer in model.modules():
        if isinstance(layer, MultiHeadAttention):
            layer.shards = parts
