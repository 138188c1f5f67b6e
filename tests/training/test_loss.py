"""The loss that makes its gradient on the way: equal to torch's own, in parts and as a whole."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreted import run_interpreted
from rounding import assert_within, bound_error, bound_sum
from tiny_runs import BERT, GPT2, LLAMA, VOCAB, make_model
from torch import Tensor

from regard.models.transformer import Head
from regard.training import loss as module
from regard.training import loss_kernels
from regard.training.data.packing import NOTHING
from regard.training.loss import plain_loss, r_drop_loss, summed_loss

HEADS: dict[str, dict[str, Any]] = {
    "tied": GPT2,
    "untied": {**LLAMA, "tie_word_embeddings": False},
    "masked, with a bias": BERT,
    "scaled": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": VOCAB,
        "d_model": 12,
        "d_kv": 4,
        "d_ff": 17,
        "num_layers": 1,
        "num_heads": 3,
    },
    "softcapped": {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "intermediate_size": 17,
        "query_pre_attn_scalar": 4,
        "sliding_window": 8,
        "max_position_embeddings": 32,
        "final_logit_softcapping": 0.5,
    },
}


def make_head(name: str) -> Head:
    head = make_model(HEADS[name]).head
    assert head is not None
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return head


def make_batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x_btc = torch.randn(3, 7, 12, dtype=dtype, requires_grad=True)
    targets_bt = torch.randint(0, VOCAB, (3, 7))
    targets_bt[0, 2] = targets_bt[2, 6] = NOTHING
    return x_btc, targets_bt


def sum_exactly(logits_btv: Tensor, targets_bt: Tensor, smoothing: float) -> Tensor:
    """The sum over tokens in float64."""
    assert logits_btv.dtype == torch.float64
    return F.cross_entropy(
        logits_btv.flatten(0, 1),
        targets_bt.flatten(),
        ignore_index=NOTHING,
        reduction="sum",
        label_smoothing=smoothing,
    )


def gradients(head: Head, x_btc: Tensor, loss: Tensor) -> dict[str, Tensor]:
    """By everything that has one, after a product with something that is not 1."""
    wanted = {"x": x_btc, **dict(head.named_parameters())}
    found = torch.autograd.grad(loss * 0.7, list(wanted.values()))
    return dict(zip(wanted, found, strict=True))


def test_the_worked_example() -> None:
    """Scores (0, ln 2, ln 5) are shares 1/8, 2/8, 5/8 (softmax)."""
    head = make_head("tied")
    head.weight = torch.nn.Parameter(torch.tensor([0.0, math.log(2), math.log(5)])[:, None])
    x = torch.ones(1, 2, 1, requires_grad=True)
    targets = torch.tensor([[2, NOTHING]])
    loss = summed_loss(head, x, targets)
    assert loss.item() == pytest.approx(math.log(8 / 5))
    # By the scores: shares less 1 at the target; by x these times the weights.
    loss.backward()  # type: ignore[no-untyped-call]
    assert head.weight.grad is not None and x.grad is not None
    torch.testing.assert_close(head.weight.grad, torch.tensor([[1 / 8], [2 / 8], [-3 / 8]]))
    by_x = 2 / 8 * math.log(2) - 3 / 8 * math.log(5)
    torch.testing.assert_close(x.grad.flatten(), torch.tensor([by_x, 0.0]))
    # Smoothed by 0.3: 0.7 of the target, and 0.1 of each.
    smooth = summed_loss(head, x, targets, 0.3)
    worked = math.log(8) - 0.7 * math.log(5) - 0.1 * (math.log(2) + math.log(5))
    assert smooth.item() == pytest.approx(worked)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("at_once", [1, 5, 21])
@pytest.mark.parametrize("name", HEADS)
def test_it_is_the_plain_loss_with_its_gradients(
    name: str, at_once: int, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CPU_LOGITS", at_once * VOCAB)
    head = make_head(name)
    x, targets = make_batch()
    expected = plain_loss(head(x), targets, smoothing)
    found = summed_loss(head, x, targets, smoothing)
    wide_head, wide_x = copy.deepcopy(head).double(), x.detach().double().requires_grad_()
    exact = sum_exactly(wide_head(wide_x), targets, smoothing)
    # The last sum of the loss and of most gradients is over the tokens, that of x's over the words.
    assert_within(found, exact, bound_error(expected, exact, n_terms=targets.numel()))
    by_plain, by_ours = gradients(head, x, expected), gradients(head, x, found)
    by_exact = gradients(wide_head, wide_x, exact)
    assert set(by_plain) >= {"x", "weight"}
    for part, gradient in by_exact.items():
        n_terms = VOCAB if part == "x" else targets.numel()
        bound = bound_error(by_plain[part], gradient, n_terms)
        assert_within(by_ours[part], gradient, bound, part)
    assert not by_ours["x"][0, 2].any() and not by_ours["x"][2, 6].any()


def test_the_heads_are_those_that_matter() -> None:
    heads = {name: make_head(name) for name in HEADS}
    assert heads["masked, with a bias"].bias is not None
    assert heads["masked, with a bias"].dense is not None
    assert heads["softcapped"].softcap == 0.5
    assert heads["scaled"].scale != 1.0
    embed = make_model(HEADS["untied"])
    assert embed.head is not None and embed.decoder_embed is not None
    assert embed.head.weight is not embed.decoder_embed.tokens.weight


def spy_on_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many tokens logits are made, each time that some are."""
    sizes: list[int] = []
    real = module.logits_to_gradient

    def spy(scores: Tensor, *given: Any) -> Tensor:
        sizes.append(scores.shape[0])
        return real(scores, *given)

    monkeypatch.setattr(module, "logits_to_gradient", spy)
    return sizes


def test_parts_are_really_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = spy_on_sizes(monkeypatch)
    monkeypatch.setattr(module, "CPU_LOGITS", 5 * VOCAB + 3)
    summed_loss(make_head("tied"), *make_batch())
    assert sizes == [5, 5, 5, 5, 1]


@pytest.mark.parametrize("name", ["masked, with a bias", "softcapped"])
def test_where_few_tokens_are_asked_for_the_loss_is_the_plain_one(name: str) -> None:
    head = make_head(name)
    x, targets = make_batch()
    few = torch.full_like(targets, NOTHING)
    few[0, 1], few[1, 4], few[2, 0] = 3, 0, VOCAB - 1
    expected, found = plain_loss(head(x), few, 0.3), summed_loss(head, x, few, 0.3)
    wide_head, wide_x = copy.deepcopy(head).double(), x.detach().double().requires_grad_()
    exact = sum_exactly(wide_head(wide_x), few, 0.3)
    assert_within(found, exact, bound_error(expected, exact, n_terms=few.numel()))
    by_plain, by_ours = gradients(head, x, expected), gradients(head, x, found)
    for part, gradient in gradients(wide_head, wide_x, exact).items():
        n_terms = VOCAB if part == "x" else few.numel()
        assert_within(by_ours[part], gradient, bound_error(by_plain[part], gradient, n_terms), part)
    assert by_ours["x"][0, 1].any() and not by_ours["x"][0, 0].any()


def test_where_few_tokens_are_asked_for_no_other_gets_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = spy_on_sizes(monkeypatch)
    x, targets = make_batch()
    few = torch.full_like(targets, NOTHING)
    few[0, 1], few[2, 0] = 3, 5
    summed_loss(make_head("tied"), x, few)
    summed_loss(make_head("tied"), x, targets)
    summed_loss(make_head("tied"), x, torch.full_like(targets, NOTHING))
    assert sizes == [2, 21, 21]


@pytest.mark.parametrize("at_once", [5, 21])
def test_nothing_asked_is_a_loss_of_zero_and_moves_nothing(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CPU_LOGITS", at_once * VOCAB)
    head = make_head("masked, with a bias")
    x, targets = make_batch()
    loss = summed_loss(head, x, torch.full_like(targets, NOTHING), 0.1)
    assert loss.item() == 0.0
    assert not any(gradient.any() for gradient in gradients(head, x, loss).values())


def test_scores_that_would_overflow_do_not() -> None:
    head = make_head("tied")
    with torch.no_grad():
        head.weight.mul_(1e4)
    x, targets = make_batch()
    found = summed_loss(head, x, targets)
    assert found.isfinite()
    torch.testing.assert_close(found, plain_loss(head(x), targets))


def test_evaluation_makes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost twice what the loss does."""
    asked: list[bool] = []
    real = module.logits_to_gradient

    def spy(*given: Any) -> Tensor:
        asked.append(given[-1])
        return real(*given)

    monkeypatch.setattr(module, "logits_to_gradient", spy)
    head = make_head("tied")
    x, targets = make_batch()
    learning = summed_loss(head, x, targets)
    with torch.no_grad():
        silent = summed_loss(head, x, targets)
    fixed = summed_loss(head.requires_grad_(False), x.detach(), targets)
    assert asked == [True, False, False]
    assert learning.requires_grad and not silent.requires_grad and not fixed.requires_grad
    assert learning.item() == silent.item() == fixed.item()


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    head = make_head("tied")
    x, targets = make_batch()
    (by_x,) = torch.autograd.grad(plain_loss(head(x), targets), x)
    head.requires_grad_(False)
    loss = summed_loss(head, x, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    assert head.weight.grad is None and x.grad is not None
    torch.testing.assert_close(x.grad, by_x)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact).abs().max())


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("at_once", [16, 128])
def test_half_precision_is_within_twice_the_error_of_the_plain_formula(
    at_once: int, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both under autocast to bfloat16, both against float64."""
    V, C, N = 211, 32, 128
    monkeypatch.setattr(module, "CPU_LOGITS", at_once * V)
    words = {**LLAMA, "vocab_size": V, "hidden_size": 32, "num_attention_heads": 4}
    head = make_model(words).head
    assert head is not None
    with torch.no_grad():
        head.weight.copy_(torch.randn(V, C) * 0.3)
    x = torch.randn(2, N // 2, C, requires_grad=True)
    targets = torch.randint(0, V, (2, N // 2))
    targets[0, 3] = NOTHING
    exact_x = x.detach().double().requires_grad_()
    exact_w = head.weight.detach().double().requires_grad_()
    exact = sum_exactly(exact_x @ exact_w.t(), targets, smoothing)
    by_x, by_w = torch.autograd.grad(exact, (exact_x, exact_w))
    errors = []
    for kind in (plain_loss, summed_loss):
        with torch.autocast("cpu", torch.bfloat16):
            loss = (
                plain_loss(head(x), targets, smoothing)
                if kind is plain_loss
                else summed_loss(head, x, targets, smoothing)
            )
        assert loss.dtype == torch.float32
        found_x, found_w = torch.autograd.grad(loss, (x, head.weight))
        assert found_x.dtype == found_w.dtype == torch.float32
        errors.append((error(loss, exact.detach()), error(found_x, by_x), error(found_w, by_w)))
    plain, ours = errors
    assert plain[1] > 0 and plain[2] > 0
    # Errors of N tokens, each up to eps of its scores, may cancel in the plain sum by luck; at
    # random they come to √N of one.
    scores = float((exact_x @ exact_w.t()).detach().abs().max())
    assert ours[0] <= 2 * plain[0] + bound_sum(1, math.sqrt(N) * scores, torch.bfloat16)
    assert ours[1] <= 2 * plain[1]
    assert ours[2] <= 2 * plain[2]


def test_the_worked_example_of_r_drop() -> None:
    """Passes of shares (1/2, 1/2) and (1/4, 3/4): each KL pair is (1/2 - 1/4) ln 3 in all."""
    logits = torch.tensor([[[0.0, 0.0], [5.0, 2.0]], [[0.0, math.log(3)], [1.0, 7.0]]])
    targets = torch.tensor([[1, NOTHING]])  # the second token is not asked for
    losses = (math.log(2) + math.log(4 / 3)) / 2
    for alpha in (0.5, 6.0):
        found = r_drop_loss(logits, targets, 0.0, alpha)
        assert found.item() == pytest.approx(losses + alpha / 4 * math.log(3) / 4)
    smooth = r_drop_loss(logits, targets, 0.4, 6.0)
    # 0.8 of the target and 0.2 of the other.
    of_two = 0.8 * math.log(4 / 3) + 0.2 * math.log(4)
    assert smooth.item() == pytest.approx((math.log(2) + of_two) / 2 + 6 / 4 * math.log(3) / 4)


def test_r_drop_of_two_passes_that_agree_is_the_plain_loss_with_its_gradients() -> None:
    head, (x, targets) = make_head("tied"), make_batch()
    plain = plain_loss(head(x), targets, 0.1)
    twice = r_drop_loss(head(torch.cat((x, x))), targets, 0.1, 5.0)
    assert twice.item() == pytest.approx(plain.item(), rel=bound_sum(targets.numel(), 1))
    by_plain, by_twice = gradients(head, x, plain), gradients(head, x, twice)
    for part, gradient in by_plain.items():
        # Two halves are added, of sums over the tokens or the words.
        bound = bound_sum(2 * max(VOCAB, targets.numel()), float(gradient.abs().max()))
        assert_within(by_twice[part], gradient, bound, part)


def test_r_drop_wants_two_rows_of_logits_for_each_of_targets() -> None:
    with pytest.raises(ValueError, match="two passes"):
        r_drop_loss(torch.zeros(3, 7, VOCAB), torch.zeros(3, 7, dtype=torch.long), 0.0, 5.0)


def test_shapes_are_told_in_letters() -> None:
    head = make_head("tied")
    x, targets = make_batch()
    with pytest.raises(ValueError, match="T"):
        summed_loss(head, x, targets[:, :-1])


def test_the_kernel_gives_what_plain_torch_gives() -> None:
    """By Triton's interpreter; the script also holds what must be untouched or exactly zero."""
    found = run_interpreted(Path(__file__).with_name("interpreted_loss.py"))
    assert len(found) == 3
    for kernel, plain, scores in found:
        assert kernel <= 2 * plain + bound_sum(1, scores)  # a loss is a score less a logsumexp


def test_the_kernel_is_launched_on_the_gpu_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `regard train --device cuda:1`, while the first one is current."""
    entered: list[int] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        entered.append(device.index)
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(module, "has_triton", lambda: True)
    monkeypatch.setattr(loss_kernels, "run", lambda *_: [*entered])
    for number, there in ((0, []), (1, [1])):
        logits: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", number))
        assert module.logits_to_gradient(logits, torch.zeros(3), 0.0, 7, True) == there


@pytest.mark.gpu
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_on_a_gpu_it_is_within_twice_the_error_of_the_plain_formula(smoothing: float) -> None:
    """With an odd vocabulary, which is widened for half precision."""
    V, C, N = 1009, 64, 300
    words = {**LLAMA, "vocab_size": V, "hidden_size": C, "num_attention_heads": 4}
    head = make_model(words).cuda().head
    assert head is not None
    with torch.no_grad():
        head.weight.normal_(std=0.3)
    x = torch.randn(2, N // 2, C, device="cuda", requires_grad=True)
    targets = torch.randint(0, V, (2, N // 2), device="cuda")
    targets[1, 5] = NOTHING
    wide_x, wide_w = (t.detach().double().requires_grad_() for t in (x, head.weight))
    logits = (wide_x @ wide_w.t()).flatten(0, 1)
    exact = F.cross_entropy(logits, targets.flatten(), reduction="sum", label_smoothing=smoothing)
    by_x, by_w = torch.autograd.grad(exact, (wide_x, wide_w))
    for dtype in (torch.float32, torch.bfloat16):
        errors = []
        for ours in (False, True):
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = (
                    summed_loss(head, x, targets, smoothing)
                    if ours
                    else plain_loss(head(x), targets, smoothing)
                )
            found_x, found_w = torch.autograd.grad(loss, (x, head.weight))
            errors.append((error(found_x, by_x), error(found_w, by_w)))
            assert error(loss, exact.detach()) <= 2e-3 * float(exact.detach())
        floor = 1e-6
        assert errors[1][0] <= 2 * errors[0][0] + floor
        assert errors[1][1] <= 2 * errors[0][1] + floor
