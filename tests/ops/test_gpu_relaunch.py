"""Steps of generation that are launched again on a GPU: the reference's answer each time.

What they are launched with is judged without a GPU, in test_decode_relaunch.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from relaunch_cases import KNOWN, B, draw
from torch import Tensor

from regard.ops import ALiBi, attention, decode_relaunch

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
