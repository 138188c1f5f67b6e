"""H2O, SnapKV and TOVA: their scores are their formulas, on our cache and on a DynamicCache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoder_originals import llama
from family_subject import Subject, make_subject
from methods import FIRST, METHODS, POOLED, WINDOW, receiving
from torch import Tensor
from transformers import DynamicCache

import regard
import regard.hf

N, MORE, KEEP = 31, 3, 19


def formula(name: str, weights_hts: Tensor) -> Tensor:
    """Which keys each of two key heads keeps, (G, KEEP), query by query and key by key."""
    H = weights_hts.shape[0]
    chosen = []
    for g in range(2):
        own = weights_hts[g * H // 2 : (g + 1) * H // 2]
        if name == "H2O":
            score, last = own.sum((0, 1)), KEEP - KEEP // 2
        elif name == "SnapKV":
            votes, half = own[:, -WINDOW:].sum(1), POOLED // 2
            spans = [votes[:, max(s - half, 0) : s + half + 1] for s in range(N)]
            score, last = torch.stack([span.amax(1).sum() for span in spans]), WINDOW
        elif name == "TOVA":
            score, last = weights_hts[:, -1].mean(0), 0
        else:
            score, last = -torch.arange(N).float(), KEEP - FIRST
        kept = set(range(N - last, N))
        for s in score.argsort(descending=True).tolist():
            if len(kept) < KEEP:
                kept.add(s)
        chosen.append(sorted(kept))
    return torch.tensor(chosen)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    found = make_subject(llama(num_hidden_layers=2), tmp_path_factory.mktemp("llama"))
    found.original.set_attn_implementation("regard")
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", METHODS)
def test_the_right_keys_are_kept_in_both_caches_and_both_models_go_on_alike(
    name: str, subject: Subject
) -> None:
    ours, original = subject.ours, subject.original
    ids = torch.randint(4, 83, (1, N + MORE), generator=torch.Generator().manual_seed(7))
    own: Any = ours.make_cache()
    theirs = DynamicCache()
    method = METHODS[name]
    with (
        regard.observing(ours, regard.Wants(weights=True)) as seen,
        receiving(method.received) as a,
    ):
        ours(ids[:, :N], cache=own)
    with receiving(method.received) as b:
        original(ids[:, :N], past_key_values=theirs)
    before = [block.self_attn.keys for block in own.blocks]
    regard.evict(own, [method.score(layer, KEEP) for layer in a], KEEP)
    regard.evict(theirs, [method.score(layer, KEEP) for layer in b], KEEP)
    for layer, observation in enumerate(seen.values()):
        assert observation.weights is not None
        index = formula(name, observation.weights[0])
        kept = own.blocks[layer].self_attn.keys[0]
        for g in range(2):
            assert torch.equal(kept[g], before[layer][0, g, index[g]])
        torch.testing.assert_close(theirs.layers[layer].keys[0], kept, rtol=1e-4, atol=1e-5)
    at = torch.arange(N, N + MORE)[None]
    want = original(ids[:, N:], past_key_values=theirs, position_ids=at).logits
    got = ours(ids[:, N:], cache=own).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
