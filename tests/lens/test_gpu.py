"""A model watched on a GPU tells what it tells on a CPU, and its answers stay the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from regard.attention import Wants
from regard.lens.record import Record
from regard.lens.watch import watch

pytestmark = pytest.mark.gpu

WANTS = Wants(entropy=True, peak=True, distance=True, received=True, top=3, map=(31, 29))


def make_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=31,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).eval()


def records(keep: str, n_new: int) -> tuple[Record, Record]:
    """One text read, and perhaps written on, on both."""
    model, made = make_model(), []
    ids = torch.randint(0, 31, (1, 137))
    for device in ("cpu", "cuda"):
        model.to(device)
        there = ids.to(device)

        def run(there: torch.Tensor = there) -> torch.Tensor:
            if n_new:
                found: torch.Tensor = model.generate(there, max_new_tokens=n_new, do_sample=False)
                return found
            return model(there).logits  # type: ignore[no-any-return]

        with torch.no_grad():
            unseen = run()
            with watch(model, WANTS, keep=keep) as record:
                seen = run()
        assert torch.equal(seen, unseen)
        made.append(record)
    return made[0], made[1]


@pytest.mark.parametrize("keep", ["statistics", "qk"])
@pytest.mark.parametrize("n_new", [0, 5])
def test_both_tell_the_same(keep: str, n_new: int) -> None:
    one, other = records(keep, n_new)
    assert one.places == other.places
    for place in range(len(one.places)):
        ours, theirs = one.statistics(place), other.statistics(place)
        assert ours.keys() == theirs.keys()
        for name in ours:
            if "key" not in name:
                np.testing.assert_allclose(ours[name], theirs[name], atol=2e-5, err_msg=name)
    for score, values in one.heads().items():
        np.testing.assert_allclose(values, other.heads()[score], atol=2e-5, err_msg=score)
