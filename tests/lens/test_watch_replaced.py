"""Modules whose `forward` was replaced, as `accelerate` does for weights that lie elsewhere.

Its mechanism is imitated: the old forward is kept as an attribute, the new one brings the weights,
which are on the meta device until then, calls the old one, and takes them away again.
"""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lens_subjects import SUBJECTS, draw, question
from tiny_checkpoints import CONFIGS
from torch import Tensor, nn

import regard.hf
from regard import Ablate
from regard.lens import shared_patch
from regard.lens.record import Record
from regard.lens.watch import watch
from regard.models import Transformer, config_of


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(20, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attn(x, x, x, need_weights=False)[0]
        return out


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(20, 4, 37, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def logits(out: Any) -> Tensor:
    found = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    return out.last_hidden_state if found is None else found


X = torch.randn(1, 7, 20, generator=torch.Generator().manual_seed(3))
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "ours": (lambda: Transformer(config_of(CONFIGS["llama"])), lambda m: m(draw(1, 7) % 37)),
    "attention of torch": (Attends, lambda m: m(X)),
    "encoder of torch": (encoder, lambda m: m(X)),
    **{
        f"{name} by {kind}": (
            lambda n=name, k=kind: on(SUBJECTS[n](), k),
            lambda m, n=name: m(**question(n).given),
        )
        for name, kind in (
            *(("llama", "sdpa"), ("llama", "regard"), ("gpt2", "eager"), ("bert", "sdpa")),
            *(("t5", "sdpa"), ("bloom", None)),
        )
    },
}


def on(model: Any, kind: str | None) -> Any:
    if kind is not None:
        model.set_attn_implementation(kind)
    return model


def offload(module: nn.Module, whole: bool) -> None:
    """Replace a module's forward; its weights, or all below it, are there while it runs."""
    names = [name for name, _ in module.named_parameters(recurse=whole)]
    kept = {name: module.get_parameter(name).data for name in names}
    empty = {name: torch.empty_like(x, device="meta") for name, x in kept.items()}

    def put(weights: dict[str, Tensor]) -> None:
        for name, x in weights.items():
            home = module.get_submodule(name.rpartition(".")[0])
            home._parameters[name.rpartition(".")[2]] = nn.Parameter(x, requires_grad=False)

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        put(kept)
        try:
            return module._old_forward(*args, **kwargs)
        finally:
            put(empty)

    put(empty)
    module._old_forward = old = module.forward  # type: ignore[assignment]
    new = functools.update_wrapper(functools.partial(run, module), old)
    module.forward = new


def spread(model: nn.Module) -> nn.Module:
    """Every module with weights of its own has them elsewhere, and every other runs replaced."""
    whole = nn.MultiheadAttention, nn.TransformerEncoderLayer  # which use the weights below them
    inside = {id(x) for y in model.modules() if isinstance(y, whole) for x in y.modules() if x != y}
    for module in list(model.modules()):
        if id(module) not in inside:
            offload(module, isinstance(module, whole))
    return model


def see(model: nn.Module, call: Callable[[Any], Any]) -> tuple[Record, Tensor]:
    with torch.no_grad(), watch(model, keep="qk") as record:
        out = logits(call(model))
    assert not record.notes
    return record, out


@pytest.mark.parametrize("name", MODELS)
def test_weights_that_come_and_go_change_no_bit_and_no_weight_of_a_record(name: str) -> None:
    make, call = MODELS[name]
    torch.manual_seed(5)
    model = make().eval()
    want, plain = see(model, call)
    away = spread(copy.deepcopy(model))
    assert all(x.device.type == "meta" for x in away.parameters())
    with torch.no_grad():
        assert torch.equal(logits(call(away)), plain)
    found, out = see(away, call)
    assert torch.equal(out, plain)
    assert [place.name for place in found.places] == [place.name for place in want.places]
    for number, place in enumerate(want.places):
        for head in range(place.n_heads):
            assert np.array_equal(found.map(number, head), want.map(number, head))
    assert not shared_patch._patches


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("bloom by None",)])
def test_edits_reach_them(name: str) -> None:
    make, call = MODELS[name]
    torch.manual_seed(5)
    model = make().eval()
    away = spread(copy.deepcopy(model))
    layers = ("decoder.block.1.layer.0",) if "t5" in name else ("layers.1", "h.1", "layer.1")
    at = [n for n, _ in model.named_modules() if n.endswith((*layers, ".attn"))][:1] or "attn"
    with torch.no_grad():
        before = logits(call(away))
        outs = []
        for each in (model, away):
            with regard.edit(each, Ablate(at, 1)):
                outs.append(logits(call(each)))
        assert torch.equal(*outs) and not torch.equal(outs[0], before)
        assert torch.equal(logits(call(away)), before)


def replace_by_closure(module: Any) -> None:
    old = module.forward
    module.forward = lambda *args, **kwargs: old(*args, **kwargs)


@pytest.mark.parametrize("layer", [False, True])
def test_a_fused_path_behind_a_closure_keeps_its_bits_and_is_noted(layer: bool) -> None:
    model: Any = nn.Sequential(Attends(), encoder().layers[0]).eval()  # type: ignore[index]
    replace_by_closure(model[1] if layer else model[0].attn)
    with torch.no_grad():
        plain = model(X)
        with pytest.warns(RuntimeWarning, match="forward was replaced"), watch(model) as record:
            assert torch.equal(model(X), plain)
    assert [place.name for place in record.places] == (["0.attn"] if layer else ["1.self_attn"])
    # Where nothing is fused it is seen.
    model.train()
    for x in model.modules():
        if isinstance(x, nn.Dropout):
            x.p = 0.0
        elif isinstance(x, nn.MultiheadAttention):
            x.dropout = 0.0
    with torch.no_grad():
        plain = model(X)
        with watch(model) as record:
            assert torch.equal(model(X), plain)
    assert len(record.places) == 2


def test_a_held_forward_is_pickled_and_copied_as_it_was() -> None:
    model: Any = encoder().eval()
    for module in model.layers:
        module.kept = module.forward
    with torch.no_grad():
        want = model(X)
        with watch(model), regard.edit(model, Ablate(0, 1)):
            model(X)
            assert type(model.layers[1].kept) is shared_patch.StandIn
            twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in (model, *twins):
        kept = twin.layers[1].kept
        assert type(kept) is types.MethodType and kept.__self__ is twin.layers[1]
        with torch.no_grad():
            assert torch.equal(twin(X), want)
