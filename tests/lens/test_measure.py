"""Sums of single weights are the same whatever number of pairs is looked at together."""

import pytest
import torch

from regard.lens import measure
from regard.lens.captured_call import Call
from regard.ops import Causal, Wants


def test_sums_over_named_keys_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    q, k = torch.randn(1, 4, 11, 5), torch.randn(1, 2, 11, 5)
    call = Call(name="x", q=q, k=k, mask=Causal())
    seen = measure.measure(call, Wants(lse=True, weights=True))
    assert seen.lse is not None and seen.weights is not None
    keys_nt = torch.stack([torch.arange(11) - 1, torch.full((11,), -1), torch.zeros(11).long()])
    named = measure.NamedKeys(keys_nt.int())
    weights_htt = seen.weights[0].double()
    rows = torch.arange(1, 11)
    want = torch.stack(
        [
            weights_htt[:, rows, rows - 1].sum(1),
            torch.zeros(4).double(),
            weights_htt[:, :, 0].sum(1),
        ]
    )
    for piece in (measure.PIECE, 1, 4 * 5 * 3):
        monkeypatch.setattr(measure, "PIECE", piece)
        found = measure.sum_weights(call, seen.lse[0], named)
        assert torch.allclose(found, want, rtol=0, atol=11 * 4 * torch.finfo(torch.float32).eps)
