"""The feed-forward layer: its bends by hand, its gates, and the modules given to it."""

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor, nn

from regard.layers import FeedForward


def by_hand(activation: str, gated: bool = False) -> FeedForward:
    """x -> up (x, 1 - 2x), gate (2x, x), down 2a + 7b + 3."""
    made = FeedForward(1, 2, activation, gated=gated, dtype=torch.float64)  # type: ignore[arg-type]
    with torch.no_grad():
        made.up_proj.weight.copy_(torch.tensor([[1.0], [-2.0]]))
        made.up_proj.bias.copy_(torch.tensor([0.0, 1.0]))
        made.down_proj.weight.copy_(torch.tensor([[2.0, 7.0]]))
        made.down_proj.bias.fill_(3.0)
        if made.gate_proj is not None:
            made.gate_proj.weight.copy_(torch.tensor([[2.0], [1.0]]))
            made.gate_proj.bias.zero_()
    return made


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def gelu(x: float) -> float:
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def relu(x: float) -> float:
    return max(x, 0.0)


BENDS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}


@pytest.mark.parametrize("word", BENDS)
def test_each_bend_gives_the_answer_worked_by_hand(word: str) -> None:
    x, bend = 1.5, BENDS[word]
    out = by_hand(word)(torch.tensor([[[x]]], dtype=torch.float64))
    assert out.item() == pytest.approx(2 * bend(1.5) + 7 * bend(-2.0) + 3, rel=1e-12)


@pytest.mark.parametrize("word", ["silu", "gelu"])
def test_swiglu_and_geglu_bend_the_gate_and_multiply(word: str) -> None:
    x, bend = 1.5, BENDS[word]
    out = by_hand(word, gated=True)(torch.tensor([[[x]]], dtype=torch.float64))
    assert out.item() == pytest.approx(2 * bend(3.0) * 1.5 + 7 * bend(1.5) * -2.0 + 3, rel=1e-12)


def test_relu_feed_forward_of_3_is_9() -> None:
    """up (3, -5), bent (3, 0), down 2·3 + 7·0 + 3."""
    assert by_hand("relu")(torch.tensor([[[3.0]]], dtype=torch.float64)).item() == 9.0


def test_gradients_reach_the_gate() -> None:
    made = by_hand("silu", gated=True)
    x = torch.randn(3, 5, 1, dtype=torch.float64)
    assert torch.autograd.gradcheck(made, x.requires_grad_())
    made(x).sum().backward()
    assert made.gate_proj is not None and made.gate_proj.weight.grad.abs().sum() > 0


def test_without_bias_there_is_none() -> None:
    made = FeedForward(3, 5, gated=True, bias=False)
    assert list(made.state_dict()) == ["up_proj.weight", "gate_proj.weight", "down_proj.weight"]


def test_dropout_falls_on_the_hidden_numbers_in_training_only() -> None:
    made = FeedForward(3, 5, dropout=1.0, dtype=torch.float64)
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    assert torch.equal(made(x), made.down_proj.bias.expand_as(x))
    made.eval()
    assert torch.equal(made(x), made.down_proj(F.relu(made.up_proj(x))))


class Steep(nn.Module):
    """A bend with a parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.25))
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, self.slope * x) + self.shift


def test_a_module_as_activation_survives_copying_and_saving() -> None:
    made = FeedForward(3, 5, Steep())
    x = torch.randn(2, 7, 3)
    twin = copy.deepcopy(made)
    with torch.no_grad():
        made.activation.slope.fill_(-3.0)
    assert isinstance(twin.activation, Steep) and twin.activation.slope.item() == 0.25
    assert not torch.equal(made(x), twin(x))
    twin.load_state_dict(load(save(made.state_dict())))
    assert torch.equal(made(x), twin(x))
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(made(x), again(x))


def test_a_module_as_activation_is_trained_and_moved_with_the_layer() -> None:
    made = FeedForward(3, 5, Steep()).double()
    made(torch.randn(2, 7, 3, dtype=torch.float64)).sum().backward()
    assert made.activation.slope.grad.dtype == torch.float64


def test_a_function_is_taken_as_it_is() -> None:
    made = FeedForward(3, 5, torch.sin, dtype=torch.float64)
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    assert torch.equal(made(x), made.down_proj(torch.sin(made.up_proj(x))))
    assert torch.equal(copy.deepcopy(made)(x), made(x))


def test_an_unknown_bend_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="'swish'; expected one of 'relu', 'gelu'"):
        FeedForward(3, 5, "swish")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="activation is a int"):
        FeedForward(3, 5, 7)  # type: ignore[arg-type]
