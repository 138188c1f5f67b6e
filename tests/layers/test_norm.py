"""Torch's norms by a word."""

import pytest
import torch
from torch import nn

from regard.layers import make_norm


def test_layer_norm_of_1_2_3_is_minus_and_plus_the_root_of_three_halves() -> None:
    out = make_norm("layer", 3, eps=1e-12)(torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(out, torch.tensor([-1.2247449, 0.0, 1.2247449]))


def test_rms_norm_of_1_7_divides_by_5_and_keeps_the_mean() -> None:
    out = make_norm("rms", 2, eps=1e-12)(torch.tensor([1.0, 7.0]))
    torch.testing.assert_close(out, torch.tensor([0.2, 1.4]))


def test_eps_is_added_under_the_root() -> None:
    x = torch.tensor([1.0, 7.0])  # mean square 25, variance 9
    torch.testing.assert_close(make_norm("rms", 2, eps=11.0)(x), x / 6)
    torch.testing.assert_close(make_norm("layer", 2, eps=7.0)(x), torch.tensor([-0.75, 0.75]))


def test_norms_are_torchs_own_and_have_the_parameters_asked_for() -> None:
    assert type(make_norm("layer", 5)) is nn.LayerNorm
    assert type(make_norm("rms", 5)) is nn.RMSNorm
    assert list(make_norm("layer", 5).state_dict()) == ["weight", "bias"]
    assert list(make_norm("layer", 5, bias=False).state_dict()) == ["weight"]
    assert list(make_norm("rms", 5).state_dict()) == ["weight"]
    made = make_norm("rms", 5, device="meta", dtype=torch.bfloat16)
    assert made.weight.is_meta and made.weight.dtype == torch.bfloat16


def test_what_cannot_be_made_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="'batch'; expected one of 'layer', 'rms'"):
        make_norm("batch", 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="RMSNorm has no bias"):
        make_norm("rms", 5, bias=True)
    with pytest.raises(ValueError, match="eps is 0"):
        make_norm("layer", 5, eps=0.0)
