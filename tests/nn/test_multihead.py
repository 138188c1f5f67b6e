"""What regard.nn.MultiheadAttention promises beyond torch's: one path, visible weights, zeros.

Letters: B batch, T queries, S keys, H heads, D head width, C model width.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard.nn
from regard.layers.observing import observing
from regard.ops import Wants

B, T, S, H, D = 3, 5, 7, 3, 5
C = H * D
LATER = torch.ones(S, S, dtype=torch.bool).triu(1)


def make(**options: Any) -> regard.nn.MultiheadAttention:
    return regard.nn.MultiheadAttention(C, H, **{"batch_first": True, **options})


def draw(*lengths: int) -> list[Tensor]:
    return [torch.randn(B, length, C) for length in lengths]


# Weights


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
@pytest.mark.parametrize("mask", ["none", "bool", "float", "padding", "causal"])
def test_asking_for_weights_changes_no_bit_of_the_output(
    mask: str, extra: dict[str, bool], dropout: float
) -> None:
    module = make(dropout=dropout, **extra)
    (x,) = draw(S)
    masks: dict[str, dict[str, Any]] = {
        "none": {},
        "bool": {"attn_mask": torch.rand(S, S) < 0.5},
        "float": {"attn_mask": torch.randn(B * H, S, S)},
        "padding": {"key_padding_mask": torch.arange(S) >= torch.tensor([[3], [S], [0]])},
        "causal": {"attn_mask": LATER, "is_causal": True},
    }
    outputs = []
    for need_weights in (False, True):
        torch.manual_seed(7)
        outputs.append(module(x, x, x, need_weights=need_weights, **masks[mask])[0])
    assert torch.equal(*outputs)


def test_weights_in_training_are_those_that_made_the_output() -> None:
    module = make(dropout=0.5)
    q, k, v = draw(T, S, S)
    output, weights = module(q, k, v, average_attn_weights=False)
    values = F.linear(v, module.in_proj_weight[2 * C :], module.in_proj_bias[2 * C :])
    heads = weights @ values.view(B, S, H, D).transpose(1, 2)
    torch.testing.assert_close(output, module.out_proj(heads.transpose(1, 2).flatten(2)))
    assert (weights == 0).any()


def test_dropped_weights_are_softmax_weights_or_zero_scaled_up() -> None:
    module = make(dropout=0.25)
    q, k, v = draw(T, S, S)
    dropped = module(q, k, v, average_attn_weights=False)[1]
    whole = module.eval()(q, k, v, average_attn_weights=False)[1]
    torch.testing.assert_close(dropped, torch.where(dropped == 0, 0.0, whole / 0.75))


def test_the_share_of_dropped_weights_is_the_probability_and_rows_sum_to_one_on_average() -> None:
    module = make(dropout=0.25)
    x = torch.randn(37, 41, C)
    weights = module(x, x, x, average_attn_weights=False)[1]
    assert abs((weights == 0).float().mean() - 0.25) < 0.01
    assert abs(weights.sum(-1).mean() - 1.0) < 0.01
    assert weights.sum(-1).std() > 0.01


def test_gradients_through_dropout_are_those_of_the_weights_it_left() -> None:
    module = make(dropout=0.5)
    leaves = [x.double().requires_grad_() for x in draw(T, S, S)]
    module.double()
    output, dropped = module(*leaves, average_attn_weights=False)
    wanted = torch.autograd.grad(output.square().sum(), leaves)
    kept = torch.where(dropped == 0, 0.0, 2.0)
    whole = module.eval()(*leaves, average_attn_weights=False)[1]
    values = F.linear(leaves[2], module.in_proj_weight[2 * C :], module.in_proj_bias[2 * C :])
    heads = (whole * kept) @ values.view(B, S, H, D).transpose(1, 2)
    again = module.out_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(torch.autograd.grad(again.square().sum(), leaves), wanted)


def test_dropout_follows_the_seed_in_training_and_is_off_in_evaluation() -> None:
    module = make(dropout=0.5)
    (x,) = draw(S)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(module(x, x, x)[0])
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert torch.equal(module.eval()(x, x, x)[0], module(x, x, x)[0])


def test_evaluation_gives_what_training_gives_bit_for_bit_without_dropout() -> None:
    module = make()
    (x,) = draw(S)
    pad = torch.arange(S) >= torch.tensor([[3], [S], [1]])
    trained = module(x, x, x, key_padding_mask=pad)
    with torch.no_grad():
        got = module.eval()(x, x, x, key_padding_mask=pad)
    assert all(torch.equal(a, b) for a, b in zip(got, trained, strict=True))


def test_a_loss_on_the_weights_trains_the_projections() -> None:
    module = make().double()
    q, k, v = (x.double() for x in draw(T, S, S))

    def loss(weight: Tensor) -> Tensor:
        given = {**dict(module.named_parameters()), "in_proj_weight": weight}
        weights = torch.func.functional_call(module, given, (q, k, v))[1]
        return weights.square().sum()

    weight = module.in_proj_weight.detach().requires_grad_()
    assert torch.autograd.gradcheck(loss, weight, fast_mode=True)
    assert torch.autograd.grad(loss(weight), weight)[0].abs().sum() > 0


# Rows with nothing to see


@pytest.mark.parametrize("lowest", [float("-inf"), torch.finfo(torch.float32).min])
@pytest.mark.parametrize("need_weights", [False, True])
def test_a_row_with_nothing_to_see_gives_zeros_and_finite_gradients(
    need_weights: bool, lowest: float
) -> None:
    module = make(bias=False)
    x = torch.randn(B, S, C, requires_grad=True)
    mask = torch.zeros(S, S)
    mask[2] = lowest
    output, weights = module(x, x, x, attn_mask=mask, need_weights=need_weights)
    assert (output[:, 2] == 0).all() and (output[:, 1] != 0).any()
    if need_weights:
        assert (weights[:, 2] == 0).all() and (weights[:, 1] > 0).all()
    output.square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("training", [True, False])
def test_a_sample_that_is_all_padding_gives_zeros_and_leaves_the_others_alone(
    training: bool, kind: torch.dtype
) -> None:
    module = make(bias=False).train(training)
    (x,) = draw(S)
    pad = torch.zeros(B, S, dtype=torch.bool)
    pad[1] = True
    given = pad if kind == torch.bool else torch.zeros(B, S).masked_fill(pad, float("-inf"))
    output, weights = module(x, x, x, key_padding_mask=given)
    assert (output[1] == 0).all() and (weights[1] == 0).all()
    plain = module(x, x, x)
    torch.testing.assert_close(output[[0, 2]], plain[0][[0, 2]])
    torch.testing.assert_close(weights[[0, 2]], plain[1][[0, 2]])


def test_a_nan_in_a_padded_key_stays_unseen() -> None:
    module = make()
    q, k, v = draw(T, S, S)
    pad = torch.arange(S).expand(B, S) >= 4
    clean = module(q, k[:, :4], v[:, :4])
    k[:, 5], v[:, 6] = float("nan"), float("inf")
    output, weights = module(q, k, v, key_padding_mask=pad)
    torch.testing.assert_close(output, clean[0])
    torch.testing.assert_close(weights, F.pad(clean[1], (0, S - 4)))


# Masks


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.float64])
@pytest.mark.parametrize("need_weights", [False, True])
def test_the_causal_hint_changes_nothing_beside_the_causal_mask(
    need_weights: bool, kind: torch.dtype, extra: dict[str, bool]
) -> None:
    module = make(**extra)
    (x,) = draw(S)
    mask = LATER if kind == torch.bool else torch.zeros(S, S, dtype=kind)
    mask = mask if kind == torch.bool else mask.masked_fill(LATER, float("-inf"))
    plain = module(x, x, x, attn_mask=mask)
    hinted = module(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)
    torch.testing.assert_close(hinted[0], plain[0])
    if need_weights:
        torch.testing.assert_close(hinted[1], plain[1])
    theirs = nn.MultiheadAttention(C, H, batch_first=True, **extra)
    theirs.load_state_dict(module.state_dict())
    torch.testing.assert_close(plain, theirs(x, x, x, attn_mask=LATER))


@pytest.mark.parametrize("shape", [(T, S), (S, T)])
def test_a_causal_mask_that_is_not_square_counts_from_the_start(shape: tuple[int, int]) -> None:
    module = make()
    q, k = draw(*shape)
    later = torch.ones(shape, dtype=torch.bool).triu(1)
    weights = module(q, k, k, attn_mask=later, is_causal=True)[1]
    assert torch.equal(weights > 0, ~later.expand(B, *shape))


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_wrong_causal_hint_does_not_override_the_mask(need_weights: bool) -> None:
    module = make()
    (x,) = draw(S)
    seen = torch.eye(S, dtype=torch.bool)
    wanted = module(x, x, x, attn_mask=~seen)[0]
    got = module(x, x, x, attn_mask=~seen, is_causal=True, need_weights=need_weights)[0]
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_mask_of_the_wrong_shape_is_refused_even_beside_the_causal_hint(
    need_weights: bool,
) -> None:
    (x,) = draw(S)
    wrong = torch.ones(S - 1, S - 1, dtype=torch.bool).triu(1)
    with pytest.raises(RuntimeError, match=r"\(7, 7\) = \(T, S\) but got \(6, 6\)"):
        make()(x, x, x, attn_mask=wrong, is_causal=True, need_weights=need_weights)


def test_a_learned_float_mask_gets_its_gradient_also_beside_the_causal_hint() -> None:
    (x,) = draw(S)
    mask = torch.zeros(S, S).masked_fill(LATER, float("-inf")).requires_grad_()
    make()(x, x, x, attn_mask=mask, is_causal=True)[0].square().sum().backward()
    assert mask.grad is not None and mask.grad.tril(-1).abs().sum() > 0


def test_a_float32_mask_on_float64_inputs_is_exact() -> None:
    module = make().double()
    x = torch.randn(B, 31, C, dtype=torch.float64)
    mask = torch.randn(31, 31)
    wanted = module(x, x, x, attn_mask=mask.double())
    torch.testing.assert_close(module(x, x, x, attn_mask=mask), wanted, atol=1e-12, rtol=0)


def test_a_float_mask_of_zeros_and_ones_is_added_and_not_read_as_bool() -> None:
    module = make()
    (x,) = draw(S)
    weights = module(x, x, x, attn_mask=torch.eye(S))[1]
    assert (weights > 0).all()


def test_a_mask_of_another_float_type_works_under_autocast() -> None:
    module = make()
    (x,) = draw(S)
    mask = torch.zeros(S, S).masked_fill(LATER, float("-inf"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, weights = module(x, x, x, attn_mask=mask, key_padding_mask=torch.zeros(B, S))
    assert output.dtype == weights.dtype == torch.bfloat16
    wanted = module(x, x, x, attn_mask=mask)
    torch.testing.assert_close(output.float(), wanted[0], atol=2e-2, rtol=2e-2)


# Seeing


def test_observing_hands_out_attention_and_changes_no_bit() -> None:
    module = make(dropout=0.3)
    (x,) = draw(S)
    torch.manual_seed(3)
    plain = module(x, x, x, attn_mask=LATER)[0]
    with observing(module, Wants(weights=True, entropy=True)) as seen:
        torch.manual_seed(3)
        assert torch.equal(module(x, x, x, attn_mask=LATER)[0], plain)
    whole = module.eval()(x, x, x, attn_mask=LATER, average_attn_weights=False)[1]
    torch.testing.assert_close(seen[""].weights, whole)
    assert seen[""].entropy.shape == (B, H, S)


def test_observing_sees_the_added_keys_last() -> None:
    module = make(add_bias_kv=True, add_zero_attn=True)
    (x,) = draw(S)
    with observing(module, Wants(weights=True)) as seen:
        weights = module(x, x, x, attn_mask=LATER, average_attn_weights=False)[1]
    assert weights.shape == (B, H, S, S + 2) and (weights[..., S:] > 0).all()
    torch.testing.assert_close(seen[""].weights, weights)


@pytest.mark.parametrize("training", [True, False])
def test_a_hook_on_the_output_projection_fires(training: bool) -> None:
    module = make().train(training)
    fired = []
    module.out_proj.register_forward_hook(lambda *_: fired.append(True))
    with torch.no_grad():
        module(*draw(S) * 3)
    assert fired == [True]


# Odd inputs


@pytest.mark.parametrize("lengths", [(0, S), (T, 0), (1, 1)])
@pytest.mark.parametrize("batch", [0, 1, B])
def test_empty_inputs_and_single_tokens_run_forward_and_backward(
    batch: int, lengths: tuple[int, int]
) -> None:
    module = make(bias=False)
    q, k = (torch.randn(batch, n, C, requires_grad=True) for n in lengths)
    output, weights = module(q, k, k)
    assert output.shape == q.shape and weights.shape == (batch, *lengths)
    output.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()
    if lengths[1] == 0:
        assert (output == 0).all()


def test_strided_inputs_give_what_their_copies_give() -> None:
    module = make()
    wide = torch.randn(B, 2 * S, C + 3)
    view = wide[:, ::2, :C]
    copied = view.contiguous()
    torch.testing.assert_close(module(view, view, view), module(copied, copied, copied))


def test_the_output_can_be_viewed_in_both_layouts() -> None:
    for batch_first in (True, False):
        (x,) = draw(S)
        assert make(batch_first=batch_first)(x, x, x)[0].view(-1, C).shape == (B * S, C)


def test_one_graph_runs_attention_masks_and_weights() -> None:
    module = make()
    (x,) = draw(S)
    pad = torch.arange(S) >= torch.tensor([[3], [S], [1]])
    call = {"attn_mask": LATER, "key_padding_mask": pad, "is_causal": True}
    graph = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(x, x, x, **call), module(x, x, x, **call))


def test_transforms_see_a_plain_function() -> None:
    module = make().double()
    xs = torch.randn(2, B, S, C, dtype=torch.float64)
    pad = torch.arange(S) >= torch.tensor([[3], [S], [1]])

    def attend(x: Tensor) -> Tensor:
        return module(x, x, x, key_padding_mask=pad)[0]

    each = torch.stack([attend(x) for x in xs])
    torch.testing.assert_close(torch.func.vmap(attend)(xs), each)
    slope = torch.func.jvp(attend, (xs[0],), (xs[1],))[1]
    near = (attend(xs[0] + 1e-6 * xs[1]) - attend(xs[0] - 1e-6 * xs[1])) / 2e-6
    torch.testing.assert_close(slope, near, atol=1e-7, rtol=1e-6)
    exported = torch.export.export(module, (xs[0], xs[0], xs[0])).module()
    torch.testing.assert_close(exported(xs[1], xs[1], xs[1]), module(xs[1], xs[1], xs[1]))


# Copies


@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle"])
def test_a_copy_computes_the_same(way: str) -> None:
    module = make(add_bias_kv=True, kdim=11)
    copies = {"copy": copy.copy, "deepcopy": copy.deepcopy}
    again = copies.get(way, lambda m: pickle.loads(pickle.dumps(m)))(module)
    q, k, v = torch.randn(B, T, C), torch.randn(B, S, 11), torch.randn(B, S, C)
    assert torch.equal(again(q, k, v)[0], module(q, k, v)[0])
    assert again.wants is None


def test_a_module_pickled_before_a_field_existed_still_loads() -> None:
    module = make()
    state = {**module.__dict__}
    for name in ("_qkv_same_embed_dim",):
        del state[name]
    again = regard.nn.MultiheadAttention.__new__(regard.nn.MultiheadAttention)
    again.__setstate__(state)
    (x,) = draw(S)
    assert torch.equal(again(x, x, x)[0], module(x, x, x)[0])
