"""Backend × feature × type: each cell equals the float64 reference or refuses with its sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cells import SDPA_REFUSALS, TYPES, by_formula, check_cell, judge
from plain import CASES

from regard.ops import Wants, attention, blockwise, explain, flash_cpu, flex
from regard.ops.backends import BACKENDS

REFUSALS = {"sdpa": SDPA_REFUSALS}
FLEX_REFUSALS = {
    "sinks": "FlexAttention gives no logsumexp on the CPU, which sinks need",
    "everything": "FlexAttention gives no logsumexp on the CPU, which sinks need",
    "no batch": "FlexAttention does not take empty inputs",
    "no queries": "FlexAttention does not take empty inputs",
    "no keys": "FlexAttention does not take empty inputs",
}
CELLS = [
    pytest.param(backend, name, kind, id=f"{backend}-{name}-{kind}".replace(" ", "_"))
    for backend in ("reference", "blockwise", "sdpa")
    for name in CASES
    for kind in TYPES
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and bands far smaller than the inputs, so that every cell crosses their edges."""
    monkeypatch.setattr(blockwise, "TILE_ENTRIES", 1)
    monkeypatch.setattr(blockwise, "SMALLEST", 8)
    monkeypatch.setattr(flash_cpu, "BAND", 8)
    monkeypatch.setattr(flash_cpu, "PIECE_COST", 0)


@pytest.mark.parametrize(("backend", "name", "kind"), CELLS)
def test_cell_equals_the_float64_reference_or_refuses_with_its_sentence(
    backend: str, name: str, kind: str
) -> None:
    check_cell(backend, name, kind, REFUSALS.get(backend, {}).get(name), "cpu")


def check_flex(name: str, kind: str) -> None:
    """A cell of FlexAttention on the CPU, which has no backward pass there."""
    made = CASES[name]().cast(TYPES[kind])
    call = {"mask": made.call.get("mask"), "bias": made.call.get("bias")}
    call |= {key: made.call[key] for key in ("scale", "softcap", "sinks") if key in made.call}
    if made.q.requires_grad and kind != "float64":
        with pytest.raises(
            ValueError, match=r"FlexAttention has no backward pass on the CPU|empty"
        ):
            attention(made.q, made.k, made.v, **call, backend="flex")
    sentence = FLEX_REFUSALS.get(name)
    if kind == "float64":
        sentence = "FlexAttention computes scores in float32, which float64 does not allow"
    with torch.no_grad():
        if sentence is not None:
            with pytest.raises(ValueError) as refused:
                attention(made.q, made.k, made.v, **call, backend="flex")
            assert f'backend "flex" refuses this call: {sentence};' in str(refused.value)
            return
        ours = attention(made.q, made.k, made.v, **call, backend="flex")
        exact = made.cast(torch.float64)
        truth = attention(exact.q, exact.k, exact.v, **exact.call, backend="reference")
        judge([truth], [ours], [by_formula(name, made)])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", CASES)
def test_flex_functions_mean_what_the_reference_means(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same functions, run by FlexAttention's own plain path: compiling every cell takes minutes.
    monkeypatch.setattr(flex, "_compiled", flex._flex)
    monkeypatch.setattr(flex, "runs_on_this_cpu", lambda: True)
    check_flex(name, kind)


@pytest.mark.parametrize("name", ["joined", "alibi causal"])
def test_compiled_flex_equals_the_reference_or_is_refused(name: str) -> None:
    """Torch compiles it for no CPU without AVX2, and for no Mac."""
    from torch._inductor.kernel.flex.flex_cpu import check_cpu_supported

    torch._dynamo.reset()
    assert flex.runs_on_this_cpu() == check_cpu_supported()
    if flex.runs_on_this_cpu():
        check_flex(name, "float32")
        return
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(ValueError, match="FlexAttention has no kernel for a CPU without AVX2"):
        attention(q, q, q, backend="flex")


@pytest.mark.parametrize("name", [n for n in CASES if n != "no batch"])
def test_reference_is_the_formula_filled_in_pair_by_pair(name: str) -> None:
    made = CASES[name]().cast(torch.float64)
    torch.testing.assert_close(
        attention(made.q, made.k, made.v, **made.call, backend="reference"),
        by_formula(name, made),
        rtol=1e-12,
        atol=1e-12,
    )


def test_every_refusal_in_the_grid_is_one_of_a_known_backend_and_feature() -> None:
    assert set(REFUSALS) <= set(BACKENDS)
    assert all(name in CASES for rows in REFUSALS.values() for name in rows)


def test_a_backend_that_is_named_insists_on_doing_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = torch.randn(1, 2, 5, 4)
    unwilling = replace(BACKENDS["blockwise"], refuse=lambda call: "it will not")
    monkeypatch.setitem(BACKENDS, "blockwise", unwilling)
    with pytest.raises(ValueError, match="refuses this call: it will not"):
        attention(q, q, q, backend="blockwise")
    assert explain(q, q, q, wants=Wants(entropy=True)).chosen == "reference"
