"""How much arithmetic a token takes, by hand, and what devices can do."""

from __future__ import annotations

import pytest
import torch
from tiny_runs import GPT2, LLAMA, ORIGINAL, VOCAB, make_model

from regard.training.mfu import PEAKS, count_flops, peak_flops


def test_a_llama_by_hand() -> None:
    # A layer: queries and output 12·12 each, key and value 12·4 each, three of 12·17; two norms.
    layer = 2 * 144 + 2 * 48 + 3 * 204 + 2 * 12
    assert count_flops(make_model(LLAMA)) == 6 * (2 * layer + 12 * VOCAB)


def test_an_output_layer_of_its_own_costs_no_more_than_a_shared_one() -> None:
    tied, untied = make_model(LLAMA), make_model(LLAMA, tie_word_embeddings=False)
    assert count_flops(tied) == count_flops(untied)


def test_tables_are_looked_up_for_nothing() -> None:
    assert count_flops(make_model(GPT2)) == count_flops(make_model(GPT2, n_positions=999))


def test_both_sides_of_a_translator_count() -> None:
    one, two = make_model(ORIGINAL), make_model(ORIGINAL, encoder_layers=2)
    assert count_flops(two) > count_flops(one)


def test_a_model_without_a_head_has_no_output_layer() -> None:
    model = make_model(LLAMA)
    with_head = count_flops(model)
    model.head = None
    assert count_flops(model) == with_head - 6 * 12 * VOCAB


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 9.89e14),
        ("NVIDIA A100-SXM4-80GB", 3.12e14),
        ("NVIDIA GeForce RTX 4090", 1.65e14),
        ("Some Other Card", None),
    ],
)
def test_a_device_is_known_by_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak
    assert peak_flops(torch.device("cpu")) is None


def test_no_name_is_part_of_another() -> None:
    assert not [(a, b) for a in PEAKS for b in PEAKS if a != b and a in b]
