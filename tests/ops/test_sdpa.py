"""The short way of the plainest calls to torch's kernels, and what it leaves to the long one."""

from __future__ import annotations

import math

import torch

from regard.ops import Causal, Window, attention, sdpa


def test_the_short_way_leaves_to_the_long_one_what_it_cannot_know() -> None:
    q = torch.randn(1, 2, 5, 8)
    assert sdpa.attend_plain(q, q, q, Causal(), None) is not None
    assert sdpa.attend_plain(q, q, q, Causal(), 0.3) is not None
    for scale in (0.0, -1.0, math.inf, math.nan, 1):
        assert sdpa.attend_plain(q, q, q, None, scale) is None
    for k in (q.double(), q[..., :7], q[0], q[:, :, :0], q[:, :0], q.to("meta"), None):
        assert sdpa.attend_plain(q, k, k, None, None) is None  # type: ignore[arg-type]
    assert sdpa.attend_plain(q, q, q[..., :3], None, None) is None
    for mask in (Window(1, 0), Causal() & Window(1, 0), torch.ones(5, 5) > 0):
        assert sdpa.attend_plain(q, q, q, mask, None) is None
    assert sdpa.attend_plain(q[:, :, :2], q, q, Causal(), None) is None
    one = sdpa.attend_plain(q[:, :, -1:], q, q, Causal(), None)
    assert one is not None
    torch.testing.assert_close(one, attention(q, q, q, mask=Causal())[:, :, -1:])
    assert sdpa.attend_plain(q[:, :, :1], q, q, Causal(align="start"), None) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sdpa.attend_plain(q, q, q, None, None) is None
    seen = []
    torch.func.vmap(lambda x: seen.append(sdpa.attend_plain(x, x, x, None, None)) or x)(q[None])
    torch.func.jvp(lambda x: seen.append(sdpa.attend_plain(x, x, x, None, None)) or x, (q,), (q,))
    assert seen == [None, None]
