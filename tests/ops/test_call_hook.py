"""Hooks that say beforehand what they will ask about rows, without the GPU that answers at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.ops import Causal, Wants, attention, backends, observe
from regard.ops.blockwise import Ask
from regard.ops.call import Call, make_call
from regard.ops.call_hook import hooked
from regard.ops.kernels import flash, row_stats
from regard.ops.kernels.rendered import Rendered

Q = torch.randn(2, 3, 37, 5)


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happens, in order, where a kernel tells of rows beside the output."""
    order: list[Any] = []

    def forward(
        given: Rendered, ask: Ask, mass: Tensor | None, **more: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        order.append(ask)
        return given.v + 1.0, {"lse": torch.full((2, 3, 37), 4.0)}

    monkeypatch.setattr(flash, "forward", forward)
    monkeypatch.setattr(backends, "choose", lambda call, name: backends.BACKENDS["triton"])
    monkeypatch.setattr(backends.flash_hopper, "takes", lambda given, ask, mass: True)
    return order


def test_a_hook_is_told_of_rows_by_the_pass_that_gives_the_output(happened: list[Any]) -> None:
    with hooked(happened.append, asks=lambda call: Wants(entropy=True)):
        output = attention(Q, Q, Q, mask=Causal())
    assert torch.equal(output, Q + 1.0)
    ask, heard = happened
    assert ask == Ask(entropy=True)
    assert heard.rows is not None and (heard.rows["lse"] == 4.0).all()


def refuse_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError


def test_what_hooks_ask_about_rows_is_asked_at_once(happened: list[Any]) -> None:
    asks = [Wants(entropy=True, top=3), None, Wants(distance=True, top=5)]
    calls: list[Call] = []
    with (
        hooked(calls.append, asks=lambda call: asks[0]),
        hooked(calls.append, asks=lambda call: asks[1]),
        hooked(calls.append),
        hooked(calls.append, asks=lambda call: asks[2]),
    ):
        attention(Q, Q, Q)
        assert happened == [Ask(entropy=True, distance=True)]
        assert len(calls) == 4 and all(call.rows is not None for call in calls)


@pytest.mark.parametrize(
    "case", ["nothing asked", "no hook asks", "gradient", "another kernel", "no memory"]
)
def test_a_hook_hears_the_call_first_where_the_pass_does_not_tell(
    case: str, happened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output would have other bits, or nobody would use what is told."""
    if case == "another kernel":
        monkeypatch.setattr(
            backends.flash_hopper, "takes", lambda given, ask, mass: ask.entropy is False
        )
    if case == "no memory":
        monkeypatch.setattr(flash, "forward", refuse_memory)
    asks = {"nothing asked": lambda call: None, "no hook asks": None}
    q = Q.clone().requires_grad_(case == "gradient")
    call = make_call(q, Q, Q)
    with hooked(happened.append, asks=asks.get(case, lambda call: Wants(entropy=True))):
        assert backends.attend_and_tell(call) is None
    assert happened == []


def test_the_second_pass_takes_what_is_known_of_rows() -> None:
    """Nothing is launched, which would fail here; and what is not known is not taken for known."""
    names = ("lse", "maxima", "sums", "entropy", "distance")
    rows = {name: torch.rand(2, 3, 37) for name in names}
    wants = Wants(lse=True, entropy=True, distance=True)
    call = make_call(Q, Q, Q[..., :0])
    known = Call(q=call.q, k=call.k, v=call.v, rule=call.rule, wants=wants, rows=rows)
    seen = row_stats.by_kernels(known)
    for name in ("lse", "entropy", "distance"):
        assert torch.equal(getattr(seen, name), rows[name])
    assert row_stats._tells(rows, wants)
    assert not row_stats._tells(rows, Wants(peak=True))
    assert not row_stats._tells(rows, Wants(mass=torch.ones(37, dtype=torch.bool)))


def test_what_is_told_of_rows_belongs_to_its_call_alone() -> None:
    """A look that is asked for by itself is measured, whatever a hook was told."""
    heard: list[Call] = []
    with hooked(heard.append):
        attention(Q, Q, Q)
    assert heard[0].rows is None
    assert observe(Q, Q, None, wants=Wants(entropy=True)).entropy is not None
