"""The grid on a CUDA device, FlexAttention compiled and trained there among the cells.

The same cells as on the CPU, with the device's own refusals, and the ways of running that only a
device shows: NaN kept apart without reading a value back, compiled graphs, large batches of heads.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import flash_cases
import pytest
import torch
from cells import ONE_QUERY, SDPA_REFUSALS, TYPES, check_cell, judge
from decode_cases import CASES as FEW
from decode_cases import gaps as few_gaps
from plain import CASES
from row_stats_cases import RECEIVED, SEEN, SINGLES, gaps, received_gaps, singles_gap
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.ops import (
    ALiBi,
    Causal,
    Documents,
    Lengths,
    Prefix,
    Wants,
    Window,
    attention,
    explain,
    observe,
    sdpa,
)
from regard.ops.blockwise import NOTHING, Ask
from regard.ops.call import make_call
from regard.ops.kernels import decode, flash, flash_backward, flash_hopper
from regard.ops.kernels.launch import PLANS
from regard.ops.kernels.rendered import render
from regard.ops.op import observe_call
from regard.ops.shape import Shape

pytestmark = pytest.mark.gpu

FLEX = [
    "plain",
    "causal",
    "window",
    "lengths",
    "documents",
    "joined",
    "given positions",
    "alibi causal",
    "relative table learned",
    "dense bias learned",
    "bias of -inf",
    "softcap",
    "sinks",
    "one group",
    "wide values",
    "more queries than keys",
    "everything",
]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa"])
def test_cell_on_the_device_equals_the_float64_reference_or_refuses(
    backend: str, name: str, kind: str
) -> None:
    sentence = SDPA_REFUSALS.get(name) if backend == "sdpa" else None
    check_cell(backend, name, kind, sentence, "cuda")


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FLEX)
def test_compiled_flex_equals_the_float64_reference_forward_and_backward(
    name: str, kind: str
) -> None:
    torch._dynamo.reset()
    check_cell("flex", name, kind, None, "cuda")


@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa", "flex"])
@pytest.mark.parametrize("mask", [None, Causal(), Window(9, 3)])
def test_a_nan_reaches_its_row_and_no_other_head_on_the_device(backend: str, mask: Any) -> None:
    torch._dynamo.reset()
    q, k, v = (torch.randn(2, 3, 131, 16, device="cuda") for _ in range(3))
    clean = attention(q, k, v, mask=mask, backend=backend)
    q[0, 0, 7], v[1, 1, 97], k[1, 2, 61] = math.nan, math.nan, math.nan
    ours = attention(q, k, v, mask=mask, backend=backend)
    known = attention(q, k, v, mask=mask, backend="reference")
    assert ours[known.isnan()].isnan().all()
    good = ~known.isnan()
    if backend not in ("reference", "blockwise"):
        good &= ~good.logical_not().any((2, 3), keepdim=True)
    torch.testing.assert_close(ours[good], clean[good])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("T", [1, 7, 131])
def test_no_plain_call_on_the_device_gives_a_number_for_a_nan(T: int, kind: str) -> None:
    for mask in (None, Causal()):
        for which in range(3):
            inputs = [torch.randn(1, 2, T, 64, device="cuda").to(TYPES[kind]) for _ in range(3)]
            inputs[which][0, 0, T // 2, 3] = math.nan
            out = attention(*inputs, mask=mask)
            rows = slice(T // 2, T // 2 + 1) if which == 0 or mask is not None else slice(None)
            assert not out[0, 0, rows].isfinite().all(-1).any()
            assert out[0, 1].isfinite().all()


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_a_sample_without_a_real_token_has_finite_gradients(kind: str) -> None:
    """Padding as a dense mask that is a view, the value width another than the key width."""
    q, k, v = (
        torch.randn(3, 4, 40, width, device="cuda", dtype=TYPES[kind], requires_grad=True)
        for width in (64, 64, 32)
    )
    seen = torch.arange(40, device="cuda") < torch.tensor([40, 0, 17], device="cuda")[:, None]
    out = attention(q, k, v, mask=seen[:, None, None, :].expand(3, 1, 40, 40))
    assert (out[1] == 0).all()
    for grad in torch.autograd.grad(out.square().sum(), (q, k, v)):
        assert grad.isfinite().all() and (grad[1] == 0).all()


def test_compiled_training_step_has_one_graph_and_equals_eager() -> None:
    torch._dynamo.reset()
    lengths = torch.tensor([61, 127], device="cuda")

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, mask=Causal() & Lengths(lengths), bias=ALiBi(6))

    found = []
    for call in (run, torch.compile(run, fullgraph=True)):
        torch.manual_seed(0)
        inputs = [torch.randn(2, h, 127, 16, device="cuda", requires_grad=True) for h in (6, 2, 2)]
        out = call(*inputs)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


CHOSEN = """
import torch, regard
q = torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
print(regard.attention(q, q, q, mask=regard.Causal()).grad_fn.name())
with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.FLASH_ATTENTION]):
    print(regard.attention(q, q, q, mask=regard.Causal()).grad_fn.name())
"""


@pytest.mark.parametrize("last", ["0", "1"])
def test_hopper_gets_cudnn_whatever_torchs_own_order_is(last: str) -> None:
    if torch.cuda.get_device_capability() not in sdpa.CUDNN_FIRST:
        pytest.skip("torch's own order is measured to be right on this GPU")
    done = subprocess.run(
        [sys.executable, "-c", CHOSEN],
        capture_output=True,
        text=True,
        env={**os.environ, "TORCH_CUDNN_SDPA_DEPRIORITIZED": last},
        check=True,
    )
    ours, insisted = done.stdout.split()
    assert "Cudnn" in ours and "Flash" in insisted


def test_more_heads_than_65535_are_right() -> None:
    q, k, v = (torch.randn(70001, 1, 5, 8, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ours = attention(q, k, v, mask=Causal())
    known = attention(q[-3:], k[-3:], v[-3:], mask=Causal(), backend="reference")
    torch.testing.assert_close(ours[-3:], known, rtol=2e-2, atol=2e-2)


def test_observe_of_131072_tokens_stays_small_on_the_device() -> None:
    q, k, v = (torch.randn(1, 1, 131072, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    wants = Wants(lse=True, entropy=True, peak=True, distance=True, received=True, map=(256, 256))
    seen = observe(q, k, v, mask=Causal(), wants=wants)
    grown = (torch.cuda.max_memory_allocated() - before) / 2**20
    assert grown < 400, f"{grown:.0f} MiB"
    assert seen.received is not None and seen.map is not None
    torch.testing.assert_close(seen.received.total.sum().item(), 131072.0, rtol=1e-3, atol=0)


def test_explain_on_the_device_prefers_the_fused_kernels() -> None:
    q = torch.randn(1, 2, 50, 8, device="cuda")
    assert "sdpa       runs" in str(explain(q, q, q, mask=Causal()))
    assert explain(q, q, q, softcap=2.0).chosen == "triton"
    few = q[:, :, :5]
    assert "sdpa       runs" in str(explain(few, few, few, mask=Causal()))
    assert explain(few, few, few, softcap=2.0).chosen == "triton"


@pytest.mark.parametrize("name", ONE_QUERY)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_our_kernel_for_one_query_equals_the_reference(name: str, kind: str) -> None:
    """The last query of every case that has a meaning for it alone."""
    made = CASES[name]().cast(TYPES[kind], "cuda")
    q, k, v = made.q[:, :, -1:].detach(), made.k.detach(), made.v.detach()
    call = {key: x.detach() if isinstance(x, torch.Tensor) else x for key, x in made.call.items()}
    with torch.no_grad():
        wide = (x.double() for x in (q, k, v))
        truth = attention(*wide, **call, backend="reference")
        ours = attention(q, k, v, **call, backend="triton")
        theirs = attention(q, k, v, **call, backend="reference")
    judge([truth], [ours], [theirs])


def test_one_query_over_many_keys_is_cut_into_parts_and_joined() -> None:
    q, k, v = (torch.randn(2, n, s, 40, device="cuda") for n, s in ((6, 1), (2, 5003), (2, 5003)))
    wide = attention(q.double(), k.double(), v.double(), backend="reference")
    torch.testing.assert_close(
        attention(q, k, v, backend="triton").double(), wide, atol=1e-5, rtol=0
    )
    mask = Causal().at(torch.tensor([5002]), torch.arange(5003))
    assert explain(q, k, v, mask=mask).chosen == "triton"
    assert explain(q, k, v, mask=Causal()).chosen == "sdpa", "no mask has to be rendered"


@pytest.mark.parametrize("name", FEW)
def test_few_queries_equal_the_reference_and_tell_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types, and whether keys are cut into parts, change from case to case."""
    number = [*FEW].index(name)
    kind = ("float32", "bfloat16", "float16")[number % 7 % 3]
    if number % 2:
        monkeypatch.setattr(decode, "ALONE", 0)
        monkeypatch.setattr(decode, "STRETCH", 16)
    found = few_gaps(name, TYPES[kind], "cuda", observe_by_triton)
    wrong = {what: pair for what, pair in found.items() if not pair[0] <= pair[1]}
    assert not wrong, wrong


def observe_by_triton(call: Any) -> Any:
    return observe_call(call, call.wants, "triton")


@pytest.mark.parametrize("T", [1, 2, 5, 16])
@pytest.mark.parametrize("R", [1, 3, 4, 8])
def test_few_queries_over_a_long_cache(T: int, R: int) -> None:
    """Real widths and tiles, with a window, padding, a cache's positions, and ALiBi."""
    B, G, S, D = 2, 2, 5003, 128
    q, k, v = (
        torch.randn(B, h, t, D, device="cuda", dtype=torch.bfloat16)
        for h, t in ((R * G, T), (G, S), (G, S))
    )
    counts = torch.tensor([S, 701], device="cuda")
    keys = torch.randperm(S + 9, device="cuda")[None, :S] - 9
    at = torch.arange(3001, 3001 + T, device="cuda")[None], keys
    wants = Wants(lse=True, entropy=True, peak=True)
    rules: list[dict[str, Any]] = [
        {},
        {"mask": Causal()},
        {"mask": Causal() & Window(1000, None)},
        {"mask": Causal() & Lengths(counts)},
        {"mask": Causal() & Lengths(counts, side="left"), "bias": ALiBi(R * G)},
        {"mask": (Causal() & Window(600, None)).at(*at)},
        {"mask": Causal().at(*at), "bias": ALiBi(R * G).at(*at)},
    ]
    for rule in rules:
        ours = observe(q, k, v, **rule, wants=wants, backend="triton")
        wide = [x.double() for x in (q, k, v)]
        truth = observe(*wide, **rule, wants=wants, backend="reference")
        plain = observe(q, k, v, **rule, wants=wants, backend="reference")
        assert ours.output is not None and truth.output is not None and plain.output is not None
        judge([truth.output], [ours.output], [plain.output])
        torch.testing.assert_close(ours.lse, truth.lse, rtol=1e-5, atol=1e-4, check_dtype=False)
        torch.testing.assert_close(
            ours.entropy, truth.entropy, rtol=1e-4, atol=1e-4, check_dtype=False
        )
        assert ours.peak is not None and truth.peak is not None
        torch.testing.assert_close(
            ours.peak.weight, truth.peak.weight, rtol=1e-4, atol=1e-6, check_dtype=False
        )
        assert torch.equal(ours.output, attention(q, k, v, **rule, backend="triton"))


def test_few_queries_are_replayed_from_a_cuda_graph_and_compiled() -> None:
    """Nothing is read back: lengths and positions that change afterwards are followed."""
    torch._dynamo.reset()
    q, k, v = (torch.randn(2, n, s, 64, device="cuda") for n, s in ((6, 3), (2, 901), (2, 901)))
    counts = torch.tensor([901, 17], device="cuda")
    queries, keys = torch.tensor([[4, 5, 6]], device="cuda"), torch.arange(901, device="cuda")[None]

    def step() -> torch.Tensor:
        return attention(q, k, v, mask=Lengths(counts) & Window(40, 0).at(queries, keys))

    compiled = torch.compile(step, fullgraph=True)
    compiled(), step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for first, count in ((4, 17), (500, 700)):
        queries.copy_(torch.arange(first, first + 3, device="cuda")[None])
        counts.fill_(count)
        graph.replay()
        known = attention(
            q.double(), k.double(), v.double(),
            mask=Lengths(counts) & Window(40, 0).at(queries, keys), backend="reference",
        )  # fmt: skip
        torch.testing.assert_close(out.double(), known, atol=1e-5, rtol=0)
        torch.testing.assert_close(compiled().double(), known, atol=1e-5, rtol=0)


def test_documents_rendered_before_are_rendered_again_in_a_cuda_graph_and_after_a_write() -> None:
    """One mask for all: eager calls find what was rendered, and a graph has it in itself."""
    q, k, v = torch.randn(3, 2, 4, 300, 64, device="cuda", dtype=torch.bfloat16).unbind()
    ids = torch.arange(300, device="cuda").expand(2, 300) // 70
    mask = Causal() & Documents(ids.contiguous())

    def step() -> torch.Tensor:
        return attention(q, k, v, mask=mask, backend="triton")

    first = step()
    assert torch.equal(step(), first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for size in (40, 130):
        mask.other.ids.copy_(torch.arange(300, device="cuda") // size)
        graph.replay()
        exact = [x.double() for x in (q, k, v)]
        known = attention(*exact, mask=mask, backend="reference")
        for ours in (out, step()):
            torch.testing.assert_close(ours.double(), known, atol=0.03, rtol=0)


def test_what_is_not_finite_in_unseen_slots_of_a_cache_never_leaks() -> None:
    q, k, v = (torch.randn(2, n, s, 128, device="cuda") for n, s in ((8, 5), (2, 3001), (2, 3001)))
    keys = torch.randperm(3001, device="cuda")[None] - 100
    mask = (Causal() & Window(900, None)).at(torch.arange(1500, 1505, device="cuda")[None], keys)
    unseen = ((keys < 600) | (keys > 1504))[0, :, None]
    clean = attention(q, k, v, mask=mask, backend="triton")
    for bad in (math.nan, math.inf):
        dirty = (x.masked_fill(unseen, bad) for x in (k, v))
        ours = attention(q, *dirty, mask=mask, backend="triton")
        torch.testing.assert_close(ours, clean, atol=1e-6, rtol=0)


def test_a_cache_of_more_than_two_billion_numbers_is_read_to_its_end() -> None:
    S = 2**24 + 77
    k = torch.zeros(1, 1, S, 128, device="cuda", dtype=torch.bfloat16)
    k[:, :, -100:] = torch.randn(1, 1, 100, 128, device="cuda")
    q = torch.randn(1, 4, 2, 128, device="cuda", dtype=torch.bfloat16)
    mask = Causal() & Window(63, None)
    ours = attention(q, k, k, mask=mask, backend="triton")
    end = k[:, :, -100:]
    known = attention(q, end, end, mask=mask, backend="reference")
    torch.testing.assert_close(ours, known, atol=2e-2, rtol=2e-2)


def test_more_rows_than_a_grid_has_in_y_are_decoded() -> None:
    q, k = (torch.randn(70001, 1, n, 16, device="cuda", dtype=torch.bfloat16) for n in (2, 5))
    ours = attention(q, k, k, mask=Causal(), backend="triton")
    known = attention(q[-3:], k[-3:], k[-3:], mask=Causal(), backend="reference")
    torch.testing.assert_close(ours[-3:], known, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", SEEN)
def test_our_kernels_tell_of_weights_what_the_reference_tells(name: str, kind: str) -> None:
    wrong = {
        what: pair
        for what, pair in gaps(name, TYPES[kind], "cuda", "triton").items()
        if not pair[0] <= pair[1]
    }
    assert not wrong, wrong


@pytest.mark.parametrize("name", RECEIVED)
def test_keys_receive_by_our_kernels_what_the_reference_tells(name: str) -> None:
    found = received_gaps(name, "cuda", "triton")
    wrong = {what: pair for what, pair in found.items() if not pair[0] <= pair[1]}
    assert found and not wrong, wrong


@pytest.mark.parametrize("name", SINGLES)
def test_sums_of_single_weights_are_those_of_the_matrix(name: str) -> None:
    gap, allowed = singles_gap(name, "cuda")
    assert gap <= allowed


def test_what_is_asked_about_weights_runs_on_our_kernels() -> None:
    q = torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16)
    wants = Wants(entropy=True, map=(8, 8))
    assert explain(q, q, q, mask=Causal(), wants=wants).chosen == "triton"
    assert explain(q, q, q, bias=torch.zeros(300, device="cuda"), wants=wants).chosen == "triton"
    few = q[:, :, :30]
    told = explain(few, few, few, wants=wants)
    assert told.chosen == "blockwise", "nothing to compile for"
    assert next(iter(told.verdicts)) == "blockwise"
    assert "blockwise is asked first: under 65,536" in str(told)
    assert observe(few, few, few, wants=wants, backend="triton").output is not None
    seen = observe(q, q, q, mask=Causal(), wants=wants)
    assert seen.output is not None
    wide = attention(q.double(), q.double(), q.double(), mask=Causal(), backend="reference")
    torch.testing.assert_close(seen.output.double(), wide, atol=2e-2, rtol=0)


def test_rows_that_look_at_nan_are_nan_by_our_kernels_and_no_others() -> None:
    q = torch.randn(1, 1, 70, 8, device="cuda")
    q[0, 0, 40] = math.nan
    wants = Wants(lse=True, entropy=True, peak=True, distance=True, received=True, map=(70, 70))
    seen = observe(q, q.nan_to_num(0.0), None, mask=Causal(), wants=wants, backend="triton")
    assert seen.lse is not None and seen.map is not None and seen.received is not None
    assert seen.lse.isnan().nonzero()[:, 2].tolist() == [40]
    assert seen.map[0, 0].isnan().nonzero().tolist() == [[40, j] for j in range(41)]
    assert seen.received.total.isnan().nonzero()[:, 2].tolist() == list(range(41))
    assert seen.peak is not None and int(seen.peak.key[0, 0, 40]) == -1


def test_a_batch_of_more_programs_than_a_grid_has_rows() -> None:
    """65,537 heads, each of one tile."""
    q = torch.randn(65537, 1, 3, 16, device="cuda", dtype=torch.bfloat16)
    seen = observe(q, q, None, wants=Wants(entropy=True, received=True), backend="triton")
    wide = observe(q[-3:].float(), q[-3:].float(), None, wants=Wants(entropy=True))
    assert seen.entropy is not None and wide.entropy is not None and seen.received is not None
    torch.testing.assert_close(seen.entropy[-3:], wide.entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        seen.received.total.sum(-1), torch.full((65537, 1), 3.0, device="cuda"), atol=1e-5, rtol=0
    )


FLASH = [(name, "float32") for name in flash_cases.CASES] + [
    (name, kind) for name in flash_cases.HALF for kind in ("bfloat16", "float16")
]


@pytest.mark.parametrize(("name", "kind"), FLASH)
def test_attention_by_our_kernels_is_the_references_forward_and_backward(
    name: str, kind: str
) -> None:
    found = flash_cases.gaps(name, TYPES[kind], "cuda")
    assert not {what: pair for what, pair in found.items() if not pair[0] <= pair[1]}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", flash_cases.UNSEEN)
def test_what_nobody_sees_does_not_reach_our_kernels_gradients(name: str, sinks: bool) -> None:
    assert flash_cases.count_leaks(name, "cuda", sinks) == 0


def test_our_kernels_take_any_strides_and_second_derivatives_and_repeat_their_bits() -> None:
    found = flash_cases.view_gaps("cuda") | flash_cases.twice_gaps("cuda")
    assert not {what: pair for what, pair in found.items() if not pair[0] <= pair[1]}
    assert flash_cases.count_other_bits("cuda") == 0


@pytest.mark.parametrize("name", flash_cases.OBSERVED)
def test_what_one_pass_tells_carries_gradients_where_the_references_does(name: str) -> None:
    found = flash_cases.observed_gaps(name, "cuda")
    assert not {what: pair for what, pair in found.items() if not pair[0] <= pair[1]}
    assert flash_cases.refused_gradients("cuda") == 0


def test_explain_names_the_kernel_that_torch_is_told_to_take() -> None:
    q = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
    for kind, name in (
        (SDPBackend.MATH, "math"),
        (SDPBackend.EFFICIENT_ATTENTION, "efficient"),
        (SDPBackend.FLASH_ATTENTION, sdpa.flash_version()),
    ):
        with sdpa_kernel(kind):
            told = explain(q, q, q, mask=Causal())
        assert told.kernel == f"torch's {name} kernel, in torch's order"
        assert f"sdpa       runs     {told.kernel}" in str(told)


HOPPER: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": Causal()},
    "causal from the start": {"mask": Causal(align="start")},
    "window": {"mask": Window(200, 40)},
    "padding": {"mask": Lengths(torch.tensor([700, 333]))},
    "padding on the left": {"mask": Lengths(torch.tensor([0, 1]), side="left") & Causal()},
    "prefix": {"mask": Causal() | Prefix(100)},
    "slopes": {"mask": Causal(), "bias": ALiBi(4)},
    "softcap": {"mask": Causal(), "softcap": 5.0, "scale": 0.7},
    "negative scale": {"scale": -0.3},
    "sinks": {"mask": Lengths(torch.tensor([333, 0])), "sinks": torch.linspace(-1.0, 1.0, 4)},
    "documents": {"mask": Causal() & Documents(torch.arange(700) // 190)},
    "documents both ways": {"mask": Documents((torch.arange(700) // 300 + 1) % 3)},
    "documents, of one sample anywhere": {
        "mask": Causal() & Documents(torch.stack([torch.arange(700) // 90, torch.arange(700) % 3]))
    },
    "documents and padding": {
        "mask": Documents(torch.arange(700) // 190) & Lengths(torch.tensor([700, 333]))
    },
}
"""What the forward for Hopper is tried on, 2 samples of 4 heads over 2."""


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize(("width", "is_asked"), [(64, False), (64, True), (128, True)])
@pytest.mark.parametrize("name", HOPPER)
def test_the_forward_for_hopper_tells_what_the_plain_kernel_tells(
    name: str, width: int, is_asked: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU is no Hopper")
    ask, dtype = Ask(True, True, True) if is_asked else NOTHING, TYPES[kind]
    rule = {key: x.to("cuda") if hasattr(x, "to") else x for key, x in HOPPER[name].items()}
    if not is_asked and "bias" in rule:
        rule.pop("bias")  # The plain kernel is faster there, and takes it.
    sizes = ((700, 700),) if "documents" in name else ((700, 700), (257, 700), (131, 129))
    for T, S in sizes:
        torch.manual_seed(T)
        q, k, v = (
            torch.randn(2, n, 2, m, width).to("cuda", dtype) for n, m in ((T, 2), (S, 1), (S, 1))
        )
        q, k, v = (
            x.reshape(2, -1, x.shape[2] * x.shape[3], width).transpose(1, 2) for x in (q, k, v)
        )
        if "padding" in name or name == "sinks":
            seen = rule["mask"].dense(Shape(2, 4, T, S), "cuda").expand(2, 1, T, S).any(2)
            k, v = (x.masked_fill(~seen[..., None], math.nan) for x in (k, v))
        given = render(make_call(q, k, v, **rule))
        mass = (torch.arange(S, device="cuda")[None] % 3 == 0).float() if is_asked else None
        found = {}
        for is_taken in (True, False):
            monkeypatch.setattr(flash_hopper, "takes", lambda *_, yes=is_taken: yes)
            PLANS.clear()
            output, rows = flash.forward(given, ask, mass)
            found[is_taken] = {"output": output, **rows}
        monkeypatch.undo()
        PLANS.clear()
        assert flash_hopper.takes(given, ask, mass)
        for what, theirs in found[False].items():
            ours, theirs = found[True][what].double(), theirs.double()
            assert torch.equal(ours.isinf(), theirs.isinf()), what
            shown = ~theirs.isinf()
            off = (ours - theirs)[shown].abs().max()
            size = theirs[shown].abs().max()
            if what == "key":
                # Equal scores may differ in their last bit, by the order of their terms.
                assert ((ours != theirs).double().mean() <= 0.01).item(), name
                continue
            # Each rounds once to its type, and sums up some hundred numbers in its own order.
            eps = torch.finfo(dtype if what == "output" else torch.float32).eps
            assert off <= (2 if what == "output" else 64) * eps * max(size, 1.0), (what, off, size)


def test_a_graph_of_our_kernels_has_no_breaks_and_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Two kernels for a backward repeat their bits, one does not.
    monkeypatch.setattr(flash_backward, "_is_fused", lambda *_: False)
    ids = torch.arange(512, device="cuda") // 100
    rules: dict[str, dict[str, Any]] = {
        "documents": {"mask": Causal() & Documents(ids)},
        "slopes": {"mask": Causal(), "bias": ALiBi(4)},
    }
    for name, rule in rules.items():
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
            for _ in range(3)
        )

        def run(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Any = rule
        ) -> torch.Tensor:
            return attention(q, k, v, backend="triton", **rule)

        out = run(q, k, v)
        compiled = torch.compile(run, fullgraph=True)(q, k, v)
        assert torch.equal(out, compiled), name
        grads, others = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, compiled))
        assert all(map(torch.equal, grads, others)), name
