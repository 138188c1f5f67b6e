"""Dropout inside and outside a compiled graph."""

import pytest
import torch

from regard.layers import BlockConfig, Decoder
from regard.layers.dropout import Dropout, keep_factor

SEEDS = (3**37, 5**25, 7**21)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_share_that_is_dropped_is_p_and_the_mean_stays(p: float, seed: int) -> None:
    factor = keep_factor(torch.tensor(seed), p, torch.empty(307, 1009))
    bound = 5 * (p * (1 - p) / factor.numel()) ** 0.5
    assert abs(float((factor == 0).float().mean()) - p) < bound
    assert set(factor.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}


def test_draws_of_neighbours_rows_and_seeds_have_nothing_in_common() -> None:
    """Correlations of 2^18 fair coins stay within five standard deviations of 0."""
    like = torch.empty(512, 512)
    one, other = ((keep_factor(torch.tensor(s), 0.5, like) > 0).float() * 2 - 1 for s in SEEDS[:2])
    bound = 5 / like.numel() ** 0.5
    pairs = [(one[:, 1:], one[:, :-1]), (one[1:], one[:-1]), (one, other), (one[1:], other[:-1])]
    assert all(abs(float((a * b).mean())) < bound for a, b in pairs)


def test_two_seeds_do_not_give_the_same_draws_in_another_order() -> None:
    """The second seed's first half differs from the first one's in two bits."""
    one, other = (123456789 << 32) | 12345, (987654321 << 32) | (12345 ^ 5)
    draws = [keep_factor(torch.tensor(s), 0.5, torch.empty(4096)) > 0 for s in (one, other)]
    swapped = draws[0][torch.arange(4096) ^ 5]
    assert 0.4 < float((swapped == draws[1]).float().mean()) < 0.6


def test_compiled_gradients_fall_on_what_was_kept() -> None:
    layer = Dropout(0.3)
    run = torch.compile(lambda x: layer(x) * 2.0, fullgraph=True)
    torch.manual_seed(0)
    x = torch.ones(53, 59, requires_grad=True)
    first, second = run(x), run(x)
    first.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, first.detach())
    assert not torch.equal(first, second)
    assert 0.2 < float((first == 0).float().mean()) < 0.4


def test_outside_a_graph_it_is_torchs_own() -> None:
    x = torch.ones(31, 37)
    torch.manual_seed(3)
    ours = Dropout(0.4)(x)
    torch.manual_seed(3)
    assert torch.equal(ours, torch.nn.Dropout(0.4)(x))
    assert Dropout(0.4).eval()(x) is x


def test_blocks_drop_in_training_alone() -> None:
    config = BlockConfig(dim=12, n_heads=3, ffn_dim=20, dropout=0.5, ffn_dropout=0.5)
    stack = Decoder(config, 2)
    x = torch.randn(2, 5, 12)
    assert not torch.equal(stack(x), stack(x))
    stack.eval()
    assert torch.equal(stack(x), stack(x))
