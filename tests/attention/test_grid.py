"""Backend × feature × type: every cell equals the float64 reference, or refuses with its sentence.

Equal means: the error against the float64 reference is at most twice that of the plain formula
computed in the cell's type, both on the same inputs; forward, and backward to every input. A few
roundings of the largest number in play are allowed where the plain formula happens to be exact.
"""

from __future__ import annotations

import functools

import pytest
import torch
from plain import CASES, Case, dense_bias, dense_mask, plain
from torch import Tensor

from regard.attention import attention, blockwise, fused
from regard.attention.backends import BACKENDS

TYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ROUNDINGS = 4

REFUSALS = {
    "sdpa": {
        "softcap": "torch's fused kernels have no softcap",
        "everything": "torch's fused kernels have no softcap",
        "sinks": "torch's fused kernels have no sinks",
        "negative scale": "torch's CPU kernel is wrong for a scale that is not positive (-0.7)",
        "zero scale": "torch's CPU kernel is wrong for a scale that is not positive (0.0)",
        "alibi learned": "torch's fused kernels give no gradient to the bias",
        "relative table learned": "torch's fused kernels give no gradient to the bias",
        "dense bias learned": "torch's fused kernels give no gradient to the bias",
        "no batch": "torch's fused kernels are not asked for empty inputs",
        "no queries": "torch's fused kernels are not asked for empty inputs",
        "no keys": "torch's fused kernels are not asked for empty inputs",
    },
}
CELLS = [
    pytest.param(backend, name, kind, id=f"{backend}-{name}-{kind}".replace(" ", "_"))
    for backend in ("reference", "blockwise", "sdpa")
    for name in CASES
    for kind in TYPES
]


@functools.cache
def pairs(name: str) -> tuple[Tensor, Tensor]:
    """The mask and bias of a case, pair by pair."""
    made = CASES[name]()
    return dense_mask(made), dense_bias(made)


def by_formula(name: str, made: Case) -> Tensor:
    seen, bias = pairs(name)
    numbers = {key: made.call[key] for key in ("scale", "softcap", "sinks") if key in made.call}
    learned = made.call.get("bias")
    values = getattr(learned, "values", None)
    dense = values if isinstance(values, Tensor) and values.requires_grad else bias
    return plain(made.q, made.k, made.v, seen, dense, **numbers)[0]


def results(output: Tensor, made: Case) -> list[Tensor]:
    """The output, and the gradient of a fixed mixture of it to q, k, v and the sinks."""
    pull = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).sin().view_as(output)
    wanted = [made.q, made.k, made.v]
    if "sinks" in made.call:
        wanted.append(made.call["sinks"])
    grads = torch.autograd.grad((output.double() * pull).sum(), wanted, allow_unused=True)
    return [
        output,
        *(torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)),
    ]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and bands far smaller than the inputs, so that every cell crosses their edges."""
    monkeypatch.setattr(blockwise, "TILE_ENTRIES", 1)
    monkeypatch.setattr(blockwise, "SMALLEST", 8)
    monkeypatch.setattr(fused, "BAND", 8)
    monkeypatch.setattr(fused, "PIECE_COST", 0)


@pytest.mark.parametrize(("backend", "name", "kind"), CELLS)
def test_cell_equals_the_float64_reference_or_refuses_with_its_sentence(
    backend: str, name: str, kind: str
) -> None:
    made = CASES[name]().cast(TYPES[kind])
    sentence = REFUSALS.get(backend, {}).get(name)
    if sentence is not None:
        with pytest.raises(ValueError) as refused:
            attention(made.q, made.k, made.v, **made.call, backend=backend)
        assert f'backend "{backend}" refuses this call: {sentence};' in str(refused.value)
        return
    exact = made.cast(torch.float64)
    truth = results(attention(exact.q, exact.k, exact.v, **exact.call, backend="reference"), exact)
    ours = results(attention(made.q, made.k, made.v, **made.call, backend=backend), made)
    theirs = results(by_formula(name, made), made)
    eps = torch.finfo(TYPES[kind]).eps
    largest = max((x.abs().max() for x in truth if x.numel()), default=0.0)
    for part, t, o, p in zip(
        ("output", "dq", "dk", "dv", "sinks"), truth, ours, theirs, strict=False
    ):
        assert o.dtype == TYPES[kind]
        if not t.numel():
            assert o.shape == t.shape
            continue
        allowed = 2 * (p.double() - t).abs().max() + ROUNDINGS * eps * largest
        error = (o.double() - t).abs().max()
        assert error <= allowed, f"{part}: error {error:.3g}, allowed {allowed:.3g}"


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
