"""Calls that are launched again on a GPU: the reference's answer each time.

What they are launched with is judged without a GPU, in test_decode_relaunch.py and
test_flash_relaunch.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from relaunch_cases import KNOWN, MANY, B, draw
from torch import Tensor

from regard.ops import ALiBi, attention, decode_relaunch
from regard.ops.kernels import flash_backward_relaunch, flash_relaunch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("S", [37, 5003])
@pytest.mark.parametrize("name", KNOWN)
def test_a_step_that_is_launched_again_equals_the_reference(
    name: str, S: int, T: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[bool] = []
    plain = decode_relaunch.attend_again

    def attend(form: Any) -> Tensor | None:
        output = plain(form)
        again.append(output is not None)
        return output

    monkeypatch.setattr(decode_relaunch, "attend_again", attend)
    torch.manual_seed(0)
    for turn in range(3):
        q, k, v = (torch.randn_like(x, device="cuda") for x in draw(T, S))
        with torch.device("cuda"):
            rule = KNOWN[name](T, S)
        if type(rule.get("bias")) is ALiBi and not turn:
            # Slopes that are copied to the GPU; later ones are there.
            rule["bias"] = ALiBi(slopes=rule["bias"].slopes.detach().cpu())
        with torch.no_grad():
            ours = attention(q, k, v, **rule)
            wide = (x.double() for x in (q, k, v))
            truth = attention(*wide, **rule, backend="reference")
            theirs = attention(q, k, v, **rule, backend="reference")
        allowed = 2 * (theirs - truth).abs().max() + 2**-8 * truth.abs().max()
        assert (ours - truth).abs().max() <= allowed and ours.shape[0] == B
    assert again[-1]


@pytest.mark.parametrize("width", [48, 64, 128])
@pytest.mark.parametrize("name", MANY)
def test_a_layer_that_is_launched_again_equals_the_reference(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, and backward with a gradient whose memory is in another order from turn to turn."""
    forward, backward = Heard(flash_relaunch.attend_again), Heard(relaunched)
    monkeypatch.setattr(flash_relaunch, "attend_again", forward)
    monkeypatch.setattr(flash_backward_relaunch.Relaunch, "__call__", backward.as_method())
    H, G, T = 6, 2, 300
    with torch.device("cuda"):
        rule = MANY[name](B, H, T)
    torch.manual_seed(0)
    for turn in range(6):
        inputs = [
            torch.randn(B, T, n, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for n in (H, G, G)
        ]
        g = torch.randn(B, H, T, width, device="cuda", dtype=torch.bfloat16)
        g = g if turn % 2 else g.transpose(1, 2).contiguous().transpose(1, 2)
        ours = differentiate(inputs, g, rule)
        truth = differentiate([x.double() for x in inputs], g.double(), rule, "reference")
        theirs = differentiate(inputs, g, rule, "reference")
        for one, exact, plain in zip(ours, truth, theirs, strict=True):
            allowed = 2 * (plain - exact).abs().max() + 2**-7 * exact.abs().max()
            assert (one - exact).abs().max() <= allowed
        with torch.no_grad():
            alone = attention(*inputs, **rule)
        assert torch.equal(alone, ours[0])
    assert forward.found[-1]
    # For heads of other widths than Hopper's the backward is two kernels, and where both have
    # lists of tiles it is not launched again.
    is_listed = width == 48 and name in ("prefix", "documents", "documents of all samples")
    assert backward.found[-1:] == ([] if is_listed else [True])


relaunched = flash_backward_relaunch.Relaunch.__call__


class Heard:
    """A function, and whether each call of it found something."""

    def __init__(self, function: Any) -> None:
        self.function, self.found = function, list[bool]()

    def __call__(self, *args: Any) -> Any:
        answer = self.function(*args)
        self.found.append(answer is not None)
        return answer

    def as_method(self) -> Any:
        return lambda *args: self(*args)


def differentiate(
    inputs: list[Tensor], g: Tensor, rule: dict[str, Any], backend: str = "auto"
) -> list[Tensor]:
    """The output, and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = attention(*leaves, **rule, backend=backend)
    return [output.detach(), *torch.autograd.grad(output, leaves, g)]
