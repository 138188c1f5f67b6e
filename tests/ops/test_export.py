"""`torch.export` of graphs whose batch depends on the data: with every kind of rule, as torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.nn import functional
from regard.ops import ALiBi, Causal, Lengths, Window, attention


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
