"""`torch.export` of graphs whose batch depends on the data, and `make_fx` of tensors with data.

With every kind of rule, as torch's own attention takes them.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from regard.nn import MultiheadAttention, functional
from regard.ops import ALiBi, Causal, Lengths, Wants, Window, attention, observe


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"mask": Causal()},
        {"mask": Window(2, 1)},
        {"mask": torch.ones(7, 7).tril() > 0},
        {"mask": Causal(), "softcap": 5.0},
        {"bias": ALiBi(4)},
    ],
    ids=["plain", "causal", "window", "dense", "softcap", "alibi"],
)
def test_export_takes_a_batch_that_depends_on_the_data(rule: dict[str, Any]) -> None:
    class Kept(torch.nn.Module):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            x = x[keep.nonzero().squeeze(1)]
            return attention(x, x, x, **rule)

    x, some, all_of_it = (
        torch.randn(6, 4, 7, 8),
        torch.tensor([1, 0, 1, 1, 0, 1]),
        torch.ones(6),
    )
    exported = torch.export.export(Kept(), (x, some)).module()
    for keep in (some, all_of_it.long(), 1 - some):
        torch.testing.assert_close(exported(x, keep), Kept()(x, keep))


def test_torchs_names_export_with_a_batch_that_depends_on_the_data() -> None:
    mask = torch.ones(7, 7).tril() > 0

    class Kept(torch.nn.Module):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            x = x[keep.nonzero().squeeze(1)]
            lengths = torch.full((x.shape[0],), 5)
            first = functional.scaled_dot_product_attention(x, x, x, mask)
            return first + attention(x, x, x, mask=Lengths(lengths))

    x, keep = torch.randn(6, 4, 7, 8), torch.tensor([1, 0, 1, 1, 0, 1])
    exported = torch.export.export(Kept(), (x, keep)).module()
    torch.testing.assert_close(exported(x, keep), Kept()(x, keep))


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"mask": Causal()},
        {"mask": Causal() & Lengths(torch.tensor([3, 5]))},
        {"bias": ALiBi(4), "softcap": 3.0},
    ],
    ids=["plain", "causal", "padded", "alibi"],
)
def test_a_graph_of_tensors_that_have_data_serves_others(rule: dict[str, Any]) -> None:
    x, other = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    wants = Wants(entropy=True, peak=True, top=2)

    def look(x: Tensor) -> list[Tensor]:
        seen = observe(x, x, x, **rule, wants=wants)
        assert seen.entropy is not None and seen.peak is not None and seen.top is not None
        return [attention(x, x, x, **rule), seen.entropy, seen.peak.key, seen.top.key]

    torch.testing.assert_close(make_fx(look)(x)(other), look(other))
    # torch warns of its own graph.
    warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node", UserWarning)
    _, push = torch.func.linearize(lambda x: attention(x, x, x, **rule), x)
    pushed = torch.func.jvp(lambda x: attention(x, x, x, **rule), (x,), (other,))[1]
    torch.testing.assert_close(push(other), pushed)


def test_torchs_names_are_traced_with_tensors_that_have_data() -> None:
    layer, (x, other) = MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 2, 5, 8)
    padded = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    def run(x: Tensor) -> Tensor:
        out: Tensor = layer(x, x, x, key_padding_mask=padded, need_weights=False)[0]
        return out

    torch.testing.assert_close(make_fx(run)(x)(other), run(other))


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning"
)
def test_a_layer_with_gradients_is_traced_by_torch_jit() -> None:
    class Padded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, padded: Tensor) -> Tensor:
            out: Tensor = self.layer(x, x, x, key_padding_mask=padded)[0]
            return out

    whole, x, other = Padded(), *torch.randn(2, 2, 5, 8)
    padded = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    traced = torch.jit.trace(whole, (x, torch.zeros_like(padded)))
    out, same = traced(other, padded), whole(other, padded)
    torch.testing.assert_close(out, same)
    weights = list(whole.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), weights), torch.autograd.grad(same.sum(), weights)
    )
