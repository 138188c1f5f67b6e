"""The weights that training starts from: how wide each is, and that a seed means the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_runs import BERT, GPT2, LLAMA, ORIGINAL, VOCAB

from regard.models import Transformer, config_of
from regard.positions import Learned
from regard.training.init import SPREAD, start, start_at_frequencies

WIDE = 96


def make(words: dict[str, object], seed: int = 1, **more: object) -> Transformer:
    model = Transformer(config_of({**words, **more}))
    start(model, seed)
    return model


def spread(model: Transformer, name: str) -> float:
    return float(dict(model.named_parameters())[name].detach().std())


def test_matrices_have_the_spread_of_gpt2_and_those_that_end_a_sublayer_less() -> None:
    model = make(GPT2, n_embd=WIDE, n_layer=8)
    assert spread(model, "decoder_embed.tokens.weight") == pytest.approx(SPREAD, rel=0.05)
    for name in ("self_attn.q_proj", "ffn.up_proj"):
        assert spread(model, f"decoder.layers.3.{name}.weight") == pytest.approx(SPREAD, rel=0.05)
    for name in ("self_attn.out_proj", "ffn.down_proj"):
        worked = SPREAD / 4.0  # √(2 · 8)
        assert spread(model, f"decoder.layers.3.{name}.weight") == pytest.approx(worked, rel=0.05)


def test_the_original_has_xaviers_matrices_and_a_table_of_one_over_the_root_of_dim() -> None:
    model = make(ORIGINAL, d_model=WIDE, encoder_ffn_dim=200, decoder_ffn_dim=200)
    assert spread(model, "encoder_embed.tokens.weight") == pytest.approx(WIDE**-0.5, rel=0.05)
    up = dict(model.named_parameters())["encoder.layers.0.ffn.up_proj.weight"].detach()
    bound = math.sqrt(6 / (WIDE + 200))
    assert up.abs().max() <= bound and up.abs().max() > 0.99 * bound
    assert float(up.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_a_masked_model_begins_with_sinusoids_half_as_wide_as_words() -> None:
    model = make(BERT, hidden_size=WIDE, max_position_embeddings=61)
    assert model.encoder_embed is not None and isinstance(model.encoder_embed.positions, Learned)
    table = model.encoder_embed.positions.table.weight.detach()
    assert float(table.square().mean().sqrt()) == pytest.approx(SPREAD / 2, rel=1e-5)
    # By hand: the first pair turns by one radian a position.
    width = math.sqrt(2) * SPREAD / 2
    for at in (0, 1, 60):
        pair = torch.tensor([width * math.sin(at), width * math.cos(at)])
        torch.testing.assert_close(table[at, :2], pair, rtol=1e-4, atol=1e-7)
    # One that goes on with a text has drawn ones, as GPT-2 has.
    assert spread(make(GPT2, n_embd=WIDE), "decoder_embed.positions.table.weight") > 0.9 * SPREAD


def test_the_output_bias_begins_as_the_logarithm_of_frequencies() -> None:
    model = make(BERT)
    assert model.head is not None
    shares = np.full(VOCAB, 0.5 / (VOCAB - 2))
    shares[0], shares[7] = 0.0, 0.5
    start_at_frequencies(model, shares)
    least = math.log(0.5 / (VOCAB - 2))
    want = torch.full((VOCAB,), least)
    want[7] = math.log(0.5)
    torch.testing.assert_close(model.head.bias.detach(), want)
    start_at_frequencies(make(LLAMA), shares)  # has no bias to begin with


@pytest.mark.parametrize("words", [GPT2, LLAMA, BERT, ORIGINAL])
def test_biases_are_zero_and_norms_are_one(words: dict[str, object]) -> None:
    model = make(words)
    n_norms = 0
    for name, p in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            n_norms += 1
            assert torch.equal(p, torch.ones_like(p)), name
        elif name.endswith("bias"):
            assert not p.any(), name
        else:
            assert p.dim() == 2 and float(p.detach().std()) > 0, name
    assert n_norms >= 2


@pytest.mark.parametrize("words", [GPT2, ORIGINAL])
def test_a_seed_means_the_same_weights_whatever_was_drawn_before(words: dict[str, object]) -> None:
    one = make(words)
    torch.manual_seed(77)
    torch.randn(5)
    state = torch.get_rng_state()
    same, other = make(words), make(words, seed=2)
    pairs = zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True)
    for (name, x), y, z in pairs:
        assert torch.equal(x, y), name
        assert x.dim() < 2 or not torch.equal(x, z), name
    fresh = Transformer(config_of(words))
    torch.set_rng_state(state)
    start(fresh, 1)
    assert torch.equal(torch.get_rng_state(), state)  # it draws from a generator of its own


def test_a_new_model_knows_nothing_and_says_so() -> None:
    """Its loss is that of an even guess."""
    for words in (GPT2, LLAMA):
        model = make(words).eval()
        ids = torch.randint(0, 53, (3, 16))
        logits = model(ids).logits
        assert logits is not None
        others = torch.randint(0, 53, (48,))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), others)
        assert loss.item() == pytest.approx(math.log(53), abs=0.1)
