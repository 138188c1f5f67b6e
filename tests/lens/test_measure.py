"""Sums of single weights are the same whatever number of pairs is looked at together."""

from __future__ import annotations

from typing import Any

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
    named = measure.NamedKeys(keys_nt.int()[None])
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
        found = measure.sum_weights(call, seen.lse, named)[0]
        assert torch.allclose(found, want, rtol=0, atol=11 * 4 * torch.finfo(torch.float32).eps)


class Stream:
    """What stands for a stream of a GPU."""

    def __init__(self) -> None:
        self.waited: list[str] = []

    def record_event(self) -> str:
        return "copied"

    def wait_event(self, event: str) -> None:
        self.waited.append(event)


def test_named_keys_are_waited_for_on_other_streams_than_that_which_copied_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All blocks are given the same ones, as are those of other threads."""
    one, other = Stream(), Stream()
    now, kept, copies = [one], list[Any](), list[int]()

    def pin(x: torch.Tensor) -> torch.Tensor:
        copies.append(1)
        return x

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: kept.append(stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: now[0])
    named = measure.NamedKeys(torch.tensor([[[0, -1, 1]]], dtype=torch.int32))
    there = [named.on(torch.device("meta")) for now[0] in (one, other, one)]
    assert there[0].is_meta and len({id(x) for x in there}) == 1 == len(copies)
    assert (one.waited, other.waited) == ([], ["copied"])
    assert kept == [other]
    assert named.on(torch.device("cpu")) is named.keys_bnt, "where they are, as in a graph"


def test_what_keys_are_known_by_is_whole_on_whatever_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is kept for all: made on a GPU, it was read by other streams before it was there."""
    plain, made = torch.arange, list[torch.Tensor]()
    measure.mixing.cache_clear()

    def count(*n: int, **how: Any) -> torch.Tensor:
        made.append(plain(*n, **how))
        return made[-1]

    monkeypatch.setattr(torch, "arange", count)
    assert measure.mixing(3, 5, torch.device("meta")).is_meta
    assert made and not any(x.is_meta for x in made)
    measure.mixing.cache_clear()
