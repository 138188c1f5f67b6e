"""How the kernel for few queries is told a rule, how its work is cut, and what it refuses.

What it computes is judged in `test_decode_kernel.py`. The device here is one that torch only
pretends to have.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from regard.ops import (
    ALiBi,
    Causal,
    DenseBias,
    Documents,
    Lengths,
    Prefix,
    RelativeTable,
    Wants,
    Window,
    attention,
    explain,
    observe,
)
from regard.ops.call import make_call
from regard.ops.decode import find_rule
from regard.ops.kernels.decode import ALONE, MANY, OPEN, PROGRAMS, SCRATCH, KeyRule, tiles

B, H, T, S = 2, 4, 3, 11
AT = torch.tensor([[4, 5, 6]]), torch.arange(S)[None] - 2
COUNTS = torch.tensor([3, 9])


def find(**rule: Any) -> KeyRule:
    q, k = torch.zeros(B, H, T, 8), torch.zeros(B, H, S, 8)
    return find_rule(make_call(q, k, k, **rule).rule, q.device)


def test_windows_lengths_and_alibi_are_told_by_numbers_and_nothing_is_rendered() -> None:
    rule = find(mask=Causal() & Window(5, 2) & Lengths(COUNTS, side="left"), bias=ALiBi(H))
    assert (rule.left, rule.right, rule.placed, rule.side) == (5, 0, False, 2)
    assert rule.counts is COUNTS and rule.slopes is not None
    assert rule.query is rule.keys is rule.added is None
    assert find() == KeyRule()
    assert find(mask=Window(None, None) & Causal()).left == OPEN


def test_given_positions_are_told_once_for_mask_and_bias() -> None:
    mask = Causal().at(*AT) & Window(7, None).at(*AT) & Lengths(COUNTS)
    rule = find(mask=mask, bias=ALiBi(H).at(*AT))
    assert rule.query is AT[0] and rule.keys is AT[1] and rule.placed
    assert (rule.left, rule.right, rule.side) == (7, 0, 1)
    assert rule.slopes is not None and rule.added is None
    queries = find(mask=Window(2, 1).at(AT[0]))
    assert queries.query is AT[0] and queries.keys is None and not queries.placed


def test_positions_of_a_bias_alone_hide_nothing() -> None:
    rule = find(bias=ALiBi(H).at(*AT))
    assert rule.keys is AT[1] and not rule.placed and rule.left == rule.right == OPEN


def test_documents_are_given_by_their_ids() -> None:
    ids = torch.arange(S) // 4
    rule = find(mask=Causal() & Documents(ids))
    assert rule.added is None and rule.query_ids is not None and rule.key_ids is not None
    assert torch.equal(rule.key_ids[0], ids) and torch.equal(rule.query_ids[0], ids[-T:])
    again = find(mask=Documents(ids) & Documents(ids))
    assert again.added is not None and again.key_ids is not None


@pytest.mark.parametrize(
    "rule",
    [
        {"mask": ~Documents(torch.arange(S) // 4)},
        {"mask": Causal() | Prefix(2)},
        {"mask": ~Window(1, 1)},
        {"mask": Causal(align="start")},
        {"mask": torch.ones(T, S) > 0},
        {"mask": Lengths(COUNTS) & Lengths(COUNTS, side="left")},
        {"mask": Causal().at(*AT) & Window(1, 0)},
        {"bias": DenseBias(torch.zeros(T, S))},
        {"bias": RelativeTable(torch.zeros(32, H))},
        {"bias": ALiBi(H) + ALiBi(H)},
        {"mask": Causal(), "bias": ALiBi(H).at(*AT)},
        {"mask": Prefix(2).at(*AT)},
    ],
)
def test_what_the_kernel_has_no_form_for_is_rendered(rule: dict[str, Any]) -> None:
    added = find(**rule).added
    assert added is not None and added.shape[2:] == (T, S) and added.dtype == torch.float32


def test_what_is_known_and_what_is_rendered_are_the_whole_rule_together() -> None:
    dense = torch.linspace(-1, 1, S)
    mask = Causal() & ~Window(1, 1) & Lengths(COUNTS)
    rule = find(mask=mask, bias=DenseBias(dense) + ALiBi(H))
    assert rule.added is not None and rule.slopes is not None and rule.right == 0
    seen = (~Window(1, 1)).dense(make_call(*inputs()).rule.shape)
    rest = torch.where(seen, dense, -math.inf)
    assert torch.equal(rule.added, rest.expand_as(rule.added))


def inputs(device: str = "cpu", n_keys: int = S, n_queries: int = T) -> tuple[Tensor, ...]:
    sizes = (H, n_queries), (H, n_keys), (H, n_keys)
    return tuple(torch.zeros(B, *size, 8, device=device) for size in sizes)


@pytest.mark.parametrize("n_heads", [1, 8, 128, 512, 4096])
@pytest.mark.parametrize("n_keys", [1, 63, 384, 8192, 131072])
@pytest.mark.parametrize("item", [2, 4])
def test_work_is_cut_into_programs_that_fill_a_gpu_and_tiles_that_fit(
    n_heads: int, n_keys: int, item: int
) -> None:
    for n_rows, width in ((1, 64), (4, 128), (64, 256), (512, 80)):
        cut = tiles(n_heads, n_rows, n_keys, (width, width), item)
        padded = 2 * 2 ** (width - 1).bit_length()
        assert cut.stages * cut.keys * padded * item <= SCRATCH or cut.keys == 16
        assert cut.rows in (16, 32, 64) and cut.keys in (16, 32, 64, 128)
        blocks = -(-n_rows // cut.rows)
        assert n_heads * blocks * (cut.parts - 1) < max(PROGRAMS, MANY)
        if n_keys * padded * item <= ALONE:
            assert cut.parts == 1
        elif n_heads * blocks < PROGRAMS:
            wanted = min(-(-PROGRAMS // (n_heads * blocks)), -(-n_keys // 64))
            stretch = -(-n_keys // wanted // cut.keys) * cut.keys
            assert (cut.parts - 1) * stretch < n_keys <= cut.parts * stretch, "no part is empty"


def test_a_step_of_a_small_model_is_one_kernel() -> None:
    assert tiles(12, 1, 384, (64, 64), 2).parts == 1
    assert tiles(12, 1, 512, (64, 64), 2).parts == 1
    assert tiles(8, 4, 8192, (128, 128), 2).parts == 32


def test_few_queries_run_on_our_kernel_with_what_one_pass_tells() -> None:
    one_pass = Wants(lse=True, entropy=True, peak=True, distance=True, mass=torch.arange(9001) < 3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        few, many = inputs("cuda", 9001, 16), inputs("cuda", 9001, 17)
        assert explain(*few, mask=Causal()).chosen == "triton"
        assert explain(*few, wants=one_pass).chosen == "triton"
        assert explain(*few, wants=one_pass, bias=ALiBi(H)).chosen == "triton"
        assert explain(*many, mask=Causal()).verdicts["triton"] is None
        assert explain(*many, wants=one_pass).chosen == "triton"
        assert explain(*few, dropout=0.5, wants=one_pass).chosen == "triton"
        for asked in (None, one_pass, Wants(received=True)):
            reason = explain(*few, dropout=1.0, wants=asked).verdicts["triton"]
            assert reason == "our kernels cannot drop every weight"
        learned = [x.requires_grad_() for x in few]
        assert explain(*learned).verdicts["triton"] is None
        assert explain(*learned, wants=one_pass).chosen == "triton"
        twice = explain(*learned, wants=Wants(lse=True, top=3))
        assert twice.chosen == "blockwise"
        reason = "its second pass is not run where gradients are needed; blockwise is"
        assert twice.verdicts["triton"] == reason
        with pytest.raises(ValueError, match=f'backend "triton" refuses this call: {reason}'):
            observe(*learned, wants=Wants(received=True), backend="triton")
        with torch.no_grad():
            assert explain(*learned, wants=Wants(lse=True, top=3)).chosen == "triton"


def test_without_data_shapes_and_types_are_known() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = inputs("cuda", 9001)
        output = attention(q, k, v, mask=Causal(), backend="triton")
        seen = observe(q, k, v, wants=Wants(lse=True, peak=True), backend="triton")
    assert output.shape == q.shape and output.dtype == q.dtype
    assert seen.lse is not None and seen.peak is not None
    assert seen.lse.shape == seen.peak.key.shape == (B, H, T)
    assert seen.lse.dtype == torch.float32 and seen.peak.key.dtype == torch.int64
