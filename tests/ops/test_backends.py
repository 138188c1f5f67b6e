"""Which backend is asked first on a GPU, told without one."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.ops import (
    ALiBi,
    Causal,
    Dense,
    DenseBias,
    Documents,
    Lengths,
    Prefix,
    RelativeTable,
    Window,
    explain,
)

T = 300
RULES: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "sdpa"),
    "causal": ({"mask": Causal()}, "sdpa"),
    "window": ({"mask": Causal() & Window(99, None)}, "triton"),
    "padding": ({"mask": Lengths(torch.tensor([299]))}, "triton"),
    "documents": ({"mask": Causal() & Documents(torch.arange(T) // 99)}, "triton"),
    "prefix": ({"mask": Causal() | Prefix(9)}, "triton"),
    "ALiBi": ({"mask": Causal(), "bias": ALiBi(2)}, "triton"),
    "table": ({"bias": RelativeTable(torch.zeros(8, 2))}, "triton"),
    "softcap": ({"softcap": 3.0}, "triton"),
    "a matrix": ({"mask": Causal() & Dense(torch.ones(T, T, dtype=torch.bool))}, "sdpa"),
    "numbers": ({"bias": DenseBias(torch.zeros(T, T))}, "sdpa"),
    "not": ({"mask": ~Documents(torch.arange(T) // 99)}, "sdpa"),
}


@pytest.mark.parametrize("name", RULES)
def test_our_kernels_run_where_torchs_would_need_a_matrix(name: str) -> None:
    rule, chosen = RULES[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 2, T, 64, dtype=torch.bfloat16, device="cuda")
        assert explain(q, q, q, **rule).chosen == chosen
        # This was not measured.
        whole = torch.empty(1, 2, T, 64, device="cuda")
        assert explain(whole, whole, whole, **rule).chosen == (
            "triton" if name == "softcap" else "sdpa"
        )


def test_little_is_not_worth_a_kernel_that_has_to_be_compiled() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 2, 180, 64, dtype=torch.bfloat16, device="cuda")
        assert explain(q, q, q, mask=Window(99, 0)).chosen == "sdpa"
        q = torch.empty(1, 2, 182, 64, dtype=torch.bfloat16, device="cuda")
        assert explain(q, q, q, mask=Window(99, 0)).chosen == "triton"
