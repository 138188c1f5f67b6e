"""A model watched on a GPU tells what it tells on a CPU, and its answers stay the same."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from lens_subjects import SUBJECTS, question

from regard.lens import device_to_host
from regard.lens.record import Record
from regard.lens.watch import watch
from regard.ops import ALiBi, Causal, Documents, Lengths, Wants, Window, attention, op
from regard.ops.blockwise import Ask
from regard.ops.kernels import flash, flash_hopper
from regard.ops.kernels.rendered import Rendered

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


@pytest.mark.parametrize("large", [1, device_to_host.LARGE])
@pytest.mark.parametrize("keep", ["statistics", "qk"])
@pytest.mark.parametrize("n_new", [0, 5])
def test_both_tell_the_same(
    keep: str, n_new: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_to_host, "LARGE", large)
    one, other = records(keep, n_new)
    assert one.places == other.places
    for place, told in enumerate(one.places):
        ours, theirs = one.statistics(place), other.statistics(place)
        assert ours.keys() == theirs.keys()
        for name in ours:
            if "key" not in name:
                # Distances are as large as the text is long, and so are their rounding errors.
                scale = told.n_keys if name == "distance" else 1
                np.testing.assert_allclose(
                    ours[name] / scale, theirs[name] / scale, atol=2e-5, err_msg=name
                )
        if keep == "qk":
            for head in range(told.n_heads):
                np.testing.assert_allclose(
                    one.map(place, head, (0, 137, 0, 137), (137, 137)),
                    other.map(place, head, (0, 137, 0, 137), (137, 137)),
                    atol=2e-5,
                )
    for score, values in one.heads().items():
        scale = one.places[0].n_keys if score == "local" else 1
        np.testing.assert_allclose(
            values / scale, other.heads()[score] / scale, atol=2e-5, err_msg=score
        )


@pytest.mark.parametrize("backlog", [1, 2**27])
def test_a_copy_is_what_was_there(backlog: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_to_host, "PIECE", 2**16 + 1)
    monkeypatch.setattr(device_to_host, "BACKLOG", backlog)
    with closing(device_to_host.HostCopier()) as copier:
        values = {
            "bytes": torch.randint(0, 255, (3, 77777), device="cuda", dtype=torch.uint8),
            "halves": torch.randn(5, 7, device="cuda", dtype=torch.bfloat16),
            "floats": torch.randn(37, 64, 129, device="cuda")[:, :, 1:],
            "none": torch.randn(5, 0, 3, device="cuda"),
            "keys": torch.randint(0, 2**40, (4, 9), device="cuda").T,
        }
        known = {name: x.cpu() for name, x in values.items()}
        all_of_it = copier.copy(values)
        each = [copier.copy({name: x}) for name, x in values.items()]
        for x in values.values():
            x.zero_()
    for copy in (all_of_it, *each):
        for name, x in copy.result().items():
            assert torch.equal(x, known[name])
    assert all_of_it.result().keys() == known.keys()


class Attending(torch.nn.Module):
    """Nothing but one call of attention."""

    def __init__(self, **rule: Any) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return attention(q, k, k, **self.rule)


LONG_TEXT = 4099
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": Causal()},
    "window": {"mask": Window(300, 70)},
    "padding": {"mask": Causal() & Lengths(torch.tensor([3001]), side="left")},
    "documents": {"mask": Causal() & Documents(torch.arange(LONG_TEXT) // 700)},
    "softcap": {"mask": Causal(), "softcap": 3.0},
    "slopes": {"mask": Causal(), "bias": ALiBi(4)},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", RULES)
def test_rows_are_told_by_the_pass_that_gives_the_output(
    name: str, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then the output has the bits that it has unwatched, and the record the same numbers."""
    model = Attending(**RULES[name])
    q = torch.randn(1, 4, LONG_TEXT, width, device="cuda", dtype=dtype)
    k = torch.randn(1, 2, LONG_TEXT, width, device="cuda", dtype=dtype)
    run, passes = flash.forward, []

    def forward(given: Rendered, ask: Ask, *more: Any, **named: Any) -> Any:
        passes.append((given.v.shape[3] > 0, any(ask)))
        return run(given, ask, *more, **named)

    monkeypatch.setattr(flash, "forward", forward)
    monkeypatch.setattr(flash_hopper, "LONG", LONG_TEXT)
    monkeypatch.setattr(flash_hopper, "LARGE", 0)
    wants = replace(WANTS, map=(37, 41))
    with torch.no_grad():
        unseen = model(q, k)
        passes.clear()
        with watch(model, wants) as one:
            seen = model(q, k)
        assert torch.equal(seen, unseen)
        shares = not (name == "slopes" and width == 64)  # whose kernels differ
        # How far rows look to the left takes a look of its own, where they look to the right too.
        both_sides = [(False, True)] * (name in ("plain", "window"))
        if shares:
            assert passes == [(True, True), *both_sides]
        monkeypatch.setattr(op, "attend_and_tell", lambda call: None)
        with watch(model, wants) as other:
            model(q, k)
    ours, theirs = one.statistics(0), other.statistics(0)
    assert ours.keys() == theirs.keys()
    for what in ours:
        if "key" in what:
            assert (ours[what] != theirs[what]).mean() < 1e-3, what
        else:
            scale = LONG_TEXT if what in ("distance", "reach") else 1
            np.testing.assert_allclose(
                ours[what] / scale, theirs[what] / scale, rtol=1e-4, atol=2e-5, err_msg=what
            )


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("llama", "sdpa"), ("gemma2", "regard"), ("bert", "sdpa"), ("t5", "regard")],
)
def test_a_compiled_model_is_seen_as_the_model_is(name: str, implementation: str) -> None:
    """By one graph, as `fullgraph` holds; its logits stay what they are, but for rounding."""
    import regard.hf  # noqa: F401 - it gives models the implementation

    torch._dynamo.reset()
    model = SUBJECTS[name]().cuda()
    model.set_attn_implementation(implementation)
    asked = question(name, "right").given.items()
    given = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in asked}
    fast = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        with watch(model, WANTS, row=1) as want:
            model(**given)
        plain = fast(**given)[0]
        with watch(model, WANTS, row=1) as found:
            out = fast(**given)[0]
    torch.testing.assert_close(out, plain, rtol=2e-5, atol=2e-5)
    assert not found.notes and found.places == want.places
    for place in range(len(want.places)):
        one, two = found.statistics(place), want.statistics(place)
        assert one.keys() == two.keys()
        for what in two:
            if "key" not in what:
                scale = max(float(np.abs(two[what]).max()), 1.0)
                np.testing.assert_allclose(one[what], two[what], atol=4e-5 * scale, err_msg=what)
