"""What `flash_op.py` holds of itself without a kernel being run; the numbers are judged in
`test_flash_kernels.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from regard.ops import ALiBi, Causal, Wants, attention, observe
from regard.ops.blockwise import Ask
from regard.ops.call import make_call
from regard.ops.kernels import flash_op
from regard.ops.kernels.flash_backward import Grads
from regard.ops.kernels.rendered import Rendered, render


def test_what_is_rendered_is_tensors_first_and_the_operations_arguments_in_order() -> None:
    call = make_call(*torch.randn(3, 1, 2, 5, 4), mask=Causal(), bias=ALiBi(2))
    given = render(call)
    assert all(x is None or isinstance(x, Tensor) for x in given[: flash_op.TENSORS])
    assert not any(isinstance(x, Tensor) for x in given[flash_op.TENSORS :])
    assert [Rendered._fields[n] for n in flash_op.LEARNED] == list(Grads._fields)
    for name in ("flash", "flash_backward"):
        schema = getattr(torch.ops.regard, name).default._schema
        names = [argument.name for argument in schema.arguments]
        assert names[: len(Rendered._fields)] == list(Rendered._fields)


def test_transforms_but_vmap_and_forward_mode_derivatives_are_refused_in_words() -> None:
    q, k, v = torch.randn(3, 1, 1, 3, 4)
    said: list[str | None] = []

    def run(q: Tensor) -> Tensor:
        said.append(flash_op.refuse(make_call(q, k, v)))
        return q

    run(q)
    torch.func.vmap(run)(q[None])
    torch.func.grad(lambda q: run(q).sum())(q)
    with forward_ad.dual_level():
        run(forward_ad.make_dual(q, q))
    torch.func.vmap(lambda q: torch.func.grad(lambda q: run(q).sum())(q))(q[None])
    assert said[0] is said[1] is None
    assert said[2] == said[4] == "our kernels run inside no transform of torch.func but vmap"
    assert said[3] == "our kernels have no forward-mode derivative; reference has"


def test_inside_autocast_the_output_has_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.ops.kernels.backend.refuse_tensors", lambda q, width: None)
    wants = Wants(lse=True)
    for n_queries in (3, 19):
        with FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16):
            q, k = torch.empty(1, 2, n_queries, 4), torch.empty(1, 2, 23, 4)
            known = torch.nn.functional.scaled_dot_product_attention(q, k, k)
            output = attention(q, k, k, backend="triton")
            leaf = q.detach().requires_grad_()
            seen = observe(leaf, k, k, wants=wants, backend="triton")
            assert seen.output is not None and seen.lse is not None
            (grad,) = torch.autograd.grad(seen.lse.sum(), leaf)
        assert output.dtype == seen.output.dtype == known.dtype == torch.bfloat16
        assert seen.lse.dtype == grad.dtype == torch.float32


def test_the_operation_gives_what_is_asked_for_and_no_more() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 2, 19, 4)
        few = flash_op.attend(make_call(q, q, q), Ask(), None)
        all_of = flash_op.attend(make_call(q, q, q), Ask(True, True, True), torch.ones(1, 19))
    assert few.lse.shape == (1, 2, 19) and few.output.shape == q.shape
    unasked = ("entropy", "peak", "peak_key", "peak_logit", "distance", "mass", "row_max")
    assert not any(getattr(few, name).numel() for name in unasked)
    assert all(getattr(all_of, name).shape == (1, 2, 19) for name in unasked[:-1])
    assert all_of.peak_key.dtype == torch.int64 and all_of.peak.dtype == torch.float32
