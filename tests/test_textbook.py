"""The textbook, checked: the numbers of the lectures, and the mistakes that circulate in them.

`by_hand` is multi-head attention as a lecture tells it, head by head and token by token, from the
weights of a layer. Both kinds of layers are asked: those of `regard.layers`, and those with torch's
names in `regard.nn`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.layers import (
    BlockConfig,
    DecoderBlock,
    Encoder,
    EncoderBlock,
    MultiHeadAttention,
)
from regard.ops import Causal, Dense, Wants, attention, observe
from regard.positions import Learned, RotaryConfig, Sinusoidal, sinusoidal

BACKENDS = ["reference", "blockwise", "sdpa"]
KINDS = pytest.mark.parametrize("kind", ["layers", "nn"])
WORDS = [[1.0, 0.5, 0.2, 0.1], [0.3, 1.0, 0.4, 0.2], [0.2, 0.3, 1.0, 0.5]]
WORD_WEIGHTS = [[0.3963, 0.3245, 0.2793], [0.3129, 0.3803, 0.3067], [0.2766, 0.3150, 0.4085]]


class Seen(NamedTuple):
    output: Tensor
    weights: Tensor


def make(kind: str, dim: int, n_heads: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Multi-head attention with every number drawn, biases too, (B, T, C) in both kinds."""
    made: dict[str, Any] = {"dtype": dtype}
    layer: nn.Module
    if kind == "layers":
        layer = MultiHeadAttention(dim, n_heads, **made)
    else:
        layer = regard.nn.MultiheadAttention(dim, n_heads, batch_first=True, **made)
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return layer


def call(layer: nn.Module, x: Tensor, memory: Tensor | None = None) -> Seen:
    """Output (B, T, C) and weights (B, H, T, S)."""
    if isinstance(layer, MultiHeadAttention):
        seen = layer.observe(x, memory, wants=Wants(weights=True))
        assert seen.output is not None and seen.weights is not None
        return Seen(seen.output, seen.weights)
    keys = x if memory is None else memory
    return Seen(*layer(x, keys, keys, average_attn_weights=False))


def projections(layer: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of the queries, keys, values and of the way out."""
    if isinstance(layer, MultiHeadAttention):
        parts = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
        return [(part.weight, part.bias) for part in parts]
    assert isinstance(layer, regard.nn.MultiheadAttention)
    assert layer.in_proj_weight is not None and layer.in_proj_bias is not None
    ways_in = zip(layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), strict=True)
    return [*ways_in, (layer.out_proj.weight, layer.out_proj.bias)]


def by_hand(layer: nn.Module, n_heads: int, x: Tensor, memory: Tensor | None = None) -> Seen:
    """Each head reads its own run of numbers, and each token looks at every token."""
    memory = x if memory is None else memory
    q, k, v, out = projections(layer)
    queries, keys, values = x @ q[0].T + q[1], memory @ k[0].T + k[1], memory @ v[0].T + v[1]
    width = x.shape[-1] // n_heads
    heads, weights = [], []
    for h in range(n_heads):
        own = slice(h * width, (h + 1) * width)
        rows = []
        for t in range(x.shape[1]):
            scores = (queries[:, t, None, own] * keys[:, :, own]).sum(-1) / math.sqrt(width)
            rows.append(scores.exp() / scores.exp().sum(-1, keepdim=True))
        weights.append(torch.stack(rows, 1))
        heads.append(weights[-1] @ values[..., own])
    return Seen(torch.cat(heads, -1) @ out[0].T + out[1], torch.stack(weights, 1))


def check_by_hand(layer: nn.Module, n_heads: int, x: Tensor, memory: Tensor | None = None) -> Seen:
    seen = call(layer, x, memory)
    expected = by_hand(layer, n_heads, x, memory)
    torch.testing.assert_close(seen.output, expected.output)
    torch.testing.assert_close(seen.weights, expected.weights)
    return seen


def plain_words(kind: str, n_heads: int) -> nn.Module:
    """A layer of width 4 that projects nothing: Q = K = V = x, and heads are put side by side."""
    layer = make(kind, 4, n_heads, torch.float32)
    with torch.no_grad():
        for weight, bias in projections(layer):
            weight.copy_(torch.eye(4))
            bias.zero_()
    return layer


class TestNumbers:
    """The sizes and sums of the lectures."""

    @KINDS
    def test_32_texts_of_20_tokens_and_width_512_in_8_heads(self, kind: str) -> None:
        layer, x = make(kind, 512, 8, torch.float32), torch.randn(32, 20, 512)
        with torch.no_grad():
            seen = call(layer, x)
            assert seen.weights.shape == (32, 8, 20, 20)
            assert seen.output.shape == (32, 20, 512)
            expected = by_hand(layer, 8, x[:2])
        torch.testing.assert_close(seen.weights[:2], expected.weights)
        torch.testing.assert_close(seen.output[:2], expected.output, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(seen.weights.sum(-1), torch.ones(32, 8, 20))

    @KINDS
    def test_2_texts_of_5_tokens_and_width_64_in_8_heads(self, kind: str) -> None:
        seen = check_by_hand(make(kind, 64, 8), 8, torch.randn(2, 5, 64, dtype=torch.float64))
        assert (seen.output.shape, seen.weights.shape) == ((2, 5, 64), (2, 8, 5, 5))

    @KINDS
    def test_width_768_in_12_heads_is_64_a_head(self, kind: str) -> None:
        layer = make(kind, 768, 12)
        assert layer.head_dim == 64
        check_by_hand(layer, 12, torch.randn(1, 3, 768, dtype=torch.float64))

    @pytest.mark.parametrize(
        "build",
        [
            MultiHeadAttention,
            regard.nn.MultiheadAttention,
            lambda dim, n_heads: EncoderBlock(BlockConfig(dim=dim, n_heads=n_heads, ffn_dim=7)),
            regard.nn.TransformerEncoderLayer,
            regard.nn.TransformerDecoderLayer,
        ],
        ids=["layers", "nn", "layers block", "nn encoder layer", "nn decoder layer"],
    )
    def test_a_width_that_the_heads_do_not_divide_is_a_value_error_that_says_both(
        self, build: Callable[[int, int], nn.Module]
    ) -> None:
        with pytest.raises(ValueError, match="divisible") as caught:
            build(100, 7)
        assert "=100" in str(caught.value) and "=7" in str(caught.value)

    @pytest.mark.parametrize(
        ("block", "attentions"),
        [
            (lambda: EncoderBlock(BlockConfig(dim=512, n_heads=8, ffn_dim=2048)), 1),
            (lambda: DecoderBlock(BlockConfig(dim=512, n_heads=8, ffn_dim=2048)), 1),
            (lambda: regard.nn.TransformerEncoderLayer(512, 8, 2048), 1),
            (lambda: regard.nn.TransformerDecoderLayer(512, 8, 2048), 2),
        ],
        ids=["encoder block", "decoder block", "nn encoder layer", "nn decoder layer"],
    )
    def test_a_block_has_4_times_512_squared_and_2_times_512_times_2048_matrix_weights(
        self, block: Callable[[], nn.Module], attentions: int
    ) -> None:
        """4 · 512² for each attention (torch's decoder layer has two), the rest feeds forward."""
        made = block()
        counted = sum(p.numel() for p in made.parameters() if p.dim() == 2)
        assert counted == attentions * 4 * 512**2 + 2 * 512 * 2048
        assert attentions == 2 or counted == 3_145_728
        fed = [p.numel() for p in made.parameters() if sorted(p.shape) == [512, 2048]]
        assert fed == [512 * 2048] * 2


class TestSeedsOfError:
    """What circulates and is wrong, done right."""

    @KINDS
    def test_heads_attend_over_tokens_and_not_over_heads(self, kind: str) -> None:
        """The axes are (B, H, T, D): each head is a matrix of tokens by tokens."""
        B, T, H, D = 2, 5, 3, 7
        layer, x = make(kind, H * D, H), torch.randn(B, T, H * D, dtype=torch.float64)
        seen = check_by_hand(layer, H, x)
        assert seen.weights.shape == (B, H, T, T)

        moved = x.clone()
        moved[0, 4] += 1.0
        changed = (call(layer, moved).output - seen.output).abs().amax(-1)
        assert (changed[0] > 1e-6).all(), "each token of the text looks at the one that changed"
        assert (changed[1] == 0).all(), "no other text does"

    def test_tokens_first_means_the_same_as_batch_first(self) -> None:
        """torch's default is (T, B, C); `view(T, B, H, D).transpose(0, 1)` would be the mistake."""
        B, T, H, D = 2, 5, 3, 7
        layer, x = make("nn", H * D, H), torch.randn(B, T, H * D, dtype=torch.float64)
        expected = by_hand(layer, H, x)
        turned = regard.nn.MultiheadAttention(H * D, H, dtype=torch.float64)
        turned.load_state_dict(layer.state_dict())
        x_tbc = x.transpose(0, 1)
        output, weights = turned(x_tbc, x_tbc, x_tbc, average_attn_weights=False)
        torch.testing.assert_close(output.transpose(0, 1), expected.output)
        torch.testing.assert_close(weights, expected.weights)

    @KINDS
    @pytest.mark.parametrize("S", [3, 11])
    def test_cross_attention_takes_keys_of_another_length(self, kind: str, S: int) -> None:
        B, T, H, D = 2, 5, 3, 7
        layer = make(kind, H * D, H)
        x, memory = (torch.randn(B, n, H * D, dtype=torch.float64) for n in (T, S))
        seen = check_by_hand(layer, H, x, memory)
        assert (seen.output.shape, seen.weights.shape) == ((B, T, H * D), (B, H, T, S))

    @pytest.mark.parametrize("how", ["mask", "bias"])
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_softmax_of_1_2_minus_infinity_3(self, backend: str, how: str) -> None:
        expected = torch.tensor([0.0900, 0.2447, 0.0, 0.6652])
        q, k = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 2.0, 5.0, 3.0]).view(1, 1, 4, 1)
        v = torch.eye(4).view(1, 1, 4, 4)
        seen = torch.tensor([True, True, False, True])
        added = torch.zeros(4).masked_fill(~seen, -math.inf)
        rule: dict[str, Any] = {"mask": Dense(seen)} if how == "mask" else {"bias": added}
        weights = attention(q, k, v, **rule, backend=backend)[0, 0, 0]
        torch.testing.assert_close(weights, expected, atol=5e-5, rtol=0)
        assert weights[2] == 0
        torchs = regard.nn.functional.scaled_dot_product_attention
        given = torchs(q, k, v, attn_mask=(seen if how == "mask" else added)[None])[0, 0, 0]
        torch.testing.assert_close(given, expected, atol=5e-5, rtol=0)

    def test_sinusoidal_positions_of_width_8_at_position_1(self) -> None:
        expected = [0.8415, 0.5403, 0.0998, 0.9950, 0.0100, 1.0000, 0.0010, 1.0000]
        # cos 0.01 is 0.99995 to six digits, so four digits are half a unit off at most.
        for row in (sinusoidal(2, 8)[1], Sinusoidal(8)(torch.tensor([1]))[0]):
            assert row.tolist() == pytest.approx(expected, abs=5.1e-5)
        assert sinusoidal(2, 8)[0].tolist() == [0, 1] * 4

    @pytest.mark.parametrize("kind", ["layers", "nn", "layers stack", "nn stack"])
    def test_without_positions_outputs_move_with_their_tokens(self, kind: str) -> None:
        """Permutation equivariance. Invariant, with outputs that stay, they are not."""
        model: Any
        if kind == "layers stack":
            model = Encoder(BlockConfig(dim=21, n_heads=3, ffn_dim=11), 2, dtype=torch.float64)
        elif kind == "nn stack":
            layer = regard.nn.TransformerEncoderLayer(21, 3, 11, batch_first=True).double()
            model = regard.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        else:
            attend = make(kind, 21, 3)
            model = lambda x: call(attend, x).output  # noqa: E731
        x, order = torch.randn(2, 5, 21, dtype=torch.float64), torch.tensor([3, 0, 4, 1, 2])
        stayed, moved = model(x), model(x[:, order])
        torch.testing.assert_close(moved, stayed[:, order])
        assert (moved - stayed).abs().max() > 1e-2

    @pytest.mark.parametrize("told", ["sinusoidal", "rotary", "alibi", "causal"])
    def test_positions_break_the_symmetry(self, told: str) -> None:
        """With any way of telling the order, shuffled tokens give other answers."""
        options: dict[str, dict[str, Any]] = {
            "sinusoidal": {},
            "rotary": {"rotary": RotaryConfig(head_dim=6)},
            "alibi": {"alibi": True},
            "causal": {"causal": True},
        }
        layer = MultiHeadAttention(18, 3, dtype=torch.float64, **options[told])
        x, order = torch.randn(2, 5, 18, dtype=torch.float64), torch.tensor([3, 0, 4, 1, 2])
        place = Sinusoidal(18) if told == "sinusoidal" else None

        def attend(x: Tensor) -> Tensor:
            out: Tensor = layer(x if place is None else place.add(x, torch.arange(5)))
            return out

        assert (attend(x[:, order]) - attend(x)[:, order]).abs().max() > 1e-3

    @KINDS
    def test_more_heads_do_not_mean_fewer_parameters(self, kind: str) -> None:
        """All heads together own d² weights in each of the four projections, and d biases."""
        counts = {n: sum(p.numel() for p in make(kind, 24, n).parameters()) for n in (1, 2, 3, 8)}
        assert set(counts.values()) == {4 * 24**2 + 4 * 24}

    def test_learned_positions_are_parameters_and_sinusoidal_ones_are_not(self) -> None:
        """GPT-2, GPT-3 and BERT learn theirs; the first Transformer has sinusoids.

        Which model has which is the business of the models; here the two are told apart.
        """
        learned, fixed, at = Learned(7, 5), Sinusoidal(5), torch.tensor([3])
        assert [tuple(p.shape) for p in learned.parameters()] == [(7, 5)]
        assert list(fixed.parameters()) == [] and fixed.state_dict() == {}
        learned(at).sum().backward()
        (grad,) = (p.grad for p in learned.parameters())
        assert grad is not None
        assert grad.tolist() == [[float(row == 3)] * 5 for row in range(7)]
        with pytest.raises(ValueError, match="max_len 7"):
            learned(torch.tensor([7]))
        assert fixed(torch.tensor([1_000_003])).isfinite().all()

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_the_three_words_look_at_each_other_as_worked_by_hand(self, backend: str) -> None:
        x = torch.tensor(WORDS)[None, None]
        weights = observe(x, x, x, wants=Wants(weights=True)).weights
        assert weights is not None
        torch.testing.assert_close(weights[0, 0], torch.tensor(WORD_WEIGHTS), atol=5e-5, rtol=0)
        out = attention(x, x, x, backend=backend)[0, 0]
        by_word = torch.tensor(WORD_WEIGHTS) @ torch.tensor(WORDS)
        torch.testing.assert_close(out, by_word, atol=2e-4, rtol=0)

    @KINDS
    def test_the_three_words_in_a_layer_that_projects_nothing(self, kind: str) -> None:
        x = torch.tensor(WORDS)[None]
        one = call(plain_words(kind, 1), x)
        torch.testing.assert_close(one.weights[0, 0], torch.tensor(WORD_WEIGHTS), atol=5e-5, rtol=0)
        by_word = torch.tensor(WORD_WEIGHTS) @ torch.tensor(WORDS)
        torch.testing.assert_close(one.output[0], by_word, atol=2e-4, rtol=0)
        two = call(plain_words(kind, 2), x)
        first_rows = torch.tensor([[0.4431, 0.3224, 0.2345], [0.3137, 0.3250, 0.3613]])
        torch.testing.assert_close(two.weights[0, :, 0], first_rows, atol=5e-5, rtol=0)

    def test_the_three_words_read_left_to_right(self) -> None:
        x = torch.tensor(WORDS)[None, None]
        weights = observe(x, x, None, mask=Causal(), wants=Wants(weights=True)).weights
        assert weights is not None
        assert weights[0, 0, 0].tolist() == [1, 0, 0]
        second = [w / sum(WORD_WEIGHTS[1][:2]) for w in WORD_WEIGHTS[1][:2]]
        assert weights[0, 0, 1].tolist() == pytest.approx([*second, 0.0], abs=1e-4)
