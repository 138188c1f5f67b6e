"""regard.nn.MultiheadAttention against torch's, over the whole constructor and every call form.

The same seed makes both modules; outputs, weights and all gradients must agree. Masks here leave
every query something to see, since torch's answer is NaN where there is nothing.
"""

import itertools
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard.nn

B, T, S, H, D = 3, 5, 7, 3, 5
C = H * D
WIDTHS: dict[str, dict[str, Any]] = {
    "one width": {},
    "other key width": {"kdim": 11},
    "other value width": {"vdim": 13},
    "two other widths": {"kdim": 11, "vdim": 13},
}


def pair(
    seed: int = 0, **options: Any
) -> tuple[nn.MultiheadAttention, regard.nn.MultiheadAttention]:
    """torch's module and ours, made from the same seed."""
    made = []
    for kind in (nn.MultiheadAttention, regard.nn.MultiheadAttention):
        torch.manual_seed(seed)
        made.append(kind(C, H, **options))
    return made[0], made[1]


def draw_inputs(
    options: dict[str, Any], sharing: str, batched: bool, dtype: torch.dtype
) -> list[Tensor]:
    """Leaves for query, key and value; one leaf is several of them where shared."""
    first = options.get("batch_first", False)

    def leaf(length: int, width: int) -> Tensor:
        shape = (
            (length, width) if not batched else (B, length, width) if first else (length, B, width)
        )
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    if sharing == "all":
        x = leaf(S, C)
        return [x, x, x]
    if sharing == "key is value":
        x = leaf(S, C)
        return [leaf(T, C), x, x]
    return [leaf(T, C), leaf(S, options.get("kdim", C)), leaf(S, options.get("vdim", C))]


def attn_masks(n_queries: int, batch: int, dtype: torch.dtype) -> Iterator[Tensor | None]:
    """None and the four forms; key 0 stays visible to every query."""
    yield None
    for shape in ((n_queries, S), (batch * H, n_queries, S)):
        hidden = torch.rand(shape) < 0.4
        hidden[..., 0] = False
        yield hidden
        yield torch.randn(shape, dtype=dtype).masked_fill(hidden, float("-inf"))


def padding_masks(batch: int, dtype: torch.dtype) -> Iterator[Tensor | None]:
    """None, padding at the end, padding anywhere, float padding; key 0 stays visible."""
    yield None
    yield torch.arange(S) >= torch.tensor([S, 2, 4])[:batch, None]
    hidden = torch.rand(batch, S) < 0.4
    hidden[:, 0] = False
    yield hidden
    yield torch.randn(batch, S, dtype=dtype).masked_fill(hidden, float("-inf"))


def run(module: nn.Module, inputs: list[Tensor], **call: Any) -> list[Tensor | None]:
    """Output, weights and every gradient of a sum in which each entry counts differently."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched", UserWarning)
        output, weights = module(*inputs, **call)
    total = (output * torch.arange(output.numel(), dtype=output.dtype).cos().view_as(output)).sum()
    if weights is not None:
        seeds = torch.arange(weights.numel(), dtype=weights.dtype).sin()
        total = total + (weights * seeds.view_as(weights)).sum()
    leaves = list({id(x): x for x in inputs}.values()) + list(module.parameters())
    return [output, weights, *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("add_zero_attn", [False, True])
@pytest.mark.parametrize("add_bias_kv", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_weights_and_gradients_are_torchs_for_every_mask_form(
    bias: bool, add_bias_kv: bool, add_zero_attn: bool, widths: str
) -> None:
    # Every constructor meets every mask form, batched or not; what else a call may ask is drawn,
    # since all of it together is too much to multiply.
    draw = random.Random(f"{bias} {add_bias_kv} {add_zero_attn} {widths}")
    for batch_first, batched in itertools.product([False, True], [True, False]):
        dtype = draw.choice([torch.float32, torch.float64])
        options = {"bias": bias, "add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn}
        options |= WIDTHS[widths] | {"batch_first": batch_first, "dtype": dtype}
        theirs, ours = pair(**options)
        batch = B if batched else 1
        for attn_mask, padding in itertools.product(range(5), range(4)):
            sharing = "none" if WIDTHS[widths] else draw.choice(["all", "key is value", "none"])
            mask = list(attn_masks(S if sharing == "all" else T, batch, dtype))[attn_mask]
            pad = list(padding_masks(batch, dtype))[padding]
            call: dict[str, Any] = {
                "attn_mask": mask,
                "key_padding_mask": pad if batched or pad is None else pad[0],
                "need_weights": draw.random() < 0.7,
                "average_attn_weights": draw.random() < 0.5,
            }
            training = draw.random() < 0.5
            inputs = draw_inputs(options, sharing, batched, dtype)
            wanted = run(theirs.train(training), inputs, **call)
            got = run(ours.train(training), inputs, **call)
            assert (got[1] is None) == (not call["need_weights"])
            atol = 2e-5 if dtype == torch.float32 else 1e-12
            torch.testing.assert_close(got, wanted, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("add_bias_kv", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", WIDTHS)
def test_the_same_seed_gives_the_same_weights_and_leaves_the_same_state(
    widths: str, bias: bool, add_bias_kv: bool
) -> None:
    after = []
    for kind in (nn.MultiheadAttention, regard.nn.MultiheadAttention):
        torch.manual_seed(5)
        module = kind(C, H, bias=bias, add_bias_kv=add_bias_kv, **WIDTHS[widths])
        after.append((list(module.named_parameters()), torch.rand(3)))
    (theirs, their_next), (ours, our_next) = after
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))
    assert torch.equal(our_next, their_next)


@pytest.mark.parametrize("add_bias_kv", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", WIDTHS)
def test_each_loads_the_others_state_dict(widths: str, bias: bool, add_bias_kv: bool) -> None:
    options = {"bias": bias, "add_bias_kv": add_bias_kv} | WIDTHS[widths]
    theirs, ours = pair(seed=1, **options)[0], pair(seed=2, **options)[1]
    ours.load_state_dict(theirs.state_dict(), strict=True)
    fresh = pair(seed=3, **options)[0]
    fresh.load_state_dict(ours.state_dict(), strict=True)
    inputs = draw_inputs(options, "none", True, torch.float32)
    torch.testing.assert_close(ours(*inputs), theirs(*inputs))
    torch.testing.assert_close(fresh(*inputs), theirs(*inputs), atol=0, rtol=0)


def test_what_user_code_reads_off_a_module_is_there() -> None:
    theirs, ours = pair(dropout=0.1, kdim=11, vdim=13, add_zero_attn=True, batch_first=True)
    names = "embed_dim kdim vdim num_heads head_dim dropout batch_first add_zero_attn "
    names += "in_proj_weight bias_k bias_v _qkv_same_embed_dim training"
    for name in names.split():
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert isinstance(ours.out_proj, nn.Linear)


def test_parameters_are_made_in_the_type_and_place_asked_for() -> None:
    ours = regard.nn.MultiheadAttention(C, H, device="meta", dtype=torch.float64, add_bias_kv=True)
    kinds = {(p.dtype, p.device.type) for p in ours.parameters()}
    assert kinds == {(torch.float64, "meta")}


def test_evaluation_without_gradients_gives_what_torchs_slow_path_gives() -> None:
    """torch's fast path runs for two heads, not three; ours has no such path to differ."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(C - 1, 2, batch_first=True)
    ours = regard.nn.MultiheadAttention(C - 1, 2, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(B, S, C - 1)
    pad = torch.arange(S) >= torch.tensor([[S], [2], [4]])
    wanted = theirs(x, x, x, key_padding_mask=pad)
    with torch.inference_mode():
        got = ours.eval()(x, x, x, key_padding_mask=pad)
    torch.testing.assert_close(got, tuple(w.detach() for w in wanted))


@pytest.mark.parametrize("shape", [(32, 20, 512, 8), (2, 5, 64, 8)])
def test_the_textbooks_shapes(shape: tuple[int, int, int, int]) -> None:
    batch, length, width, heads = shape
    x = torch.randn(batch, length, width)
    module = regard.nn.MultiheadAttention(width, heads, batch_first=True)
    output, weights = module(x, x, x, average_attn_weights=False)
    assert output.shape == (batch, length, width)
    assert weights.shape == (batch, heads, length, length)
    torch.testing.assert_close(weights.sum(-1), torch.ones(batch, heads, length))


def test_768_wide_with_12_heads_has_heads_of_64() -> None:
    assert regard.nn.MultiheadAttention(768, 12, device="meta").head_dim == 64
