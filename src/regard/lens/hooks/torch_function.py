"""The hook on torch: its attention functions, and softmaxes of products, wherever they are called.

Why: most models in the world call `scaled_dot_product_attention`, `flex_attention` or
`multi_head_attention_forward`, or write `softmax(q kᵀ / √d + bias)` out in their own code, as BLOOM
and GPT-J do. None of them offers a hook.

How: a torch-function mode sees every function of torch that the model calls, and calls it as it
came. For code that writes attention out it follows the scores: a product of two activations is
remembered with its queries and keys, and so are the numbers that it is scaled by, what is added,
and what is filled in, until a softmax over the keys is taken. Then some rows are made again from
what was remembered; if they agree, that is the call, and if not, the scores themselves are kept
(`score_tracing.py`). `flex_attention` is a plain function, and is replaced, for the time of the
block, in the modules where the model's classes were written.

torch.nn's fast paths are not taken under a mode, so `torch_nn.py` takes it away there.

Left out: calls inside compiled code, attention over more than four axes.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.lens.captured_call import Call, whole_scores
from regard.lens.hooks.flex import flex_rule, flex_scores
from regard.lens.hooks.score_tracing import SOFTMAX, ScoreTrace, heads_of
from regard.lens.hooks.torch_nn import read_heads
from regard.ops import Causal, Dense, DenseBias, Mask

if TYPE_CHECKING:
    from regard.lens.recorder import Recorder

FLEX = "torch.nn.attention.flex_attention"
MHA = inspect.signature(F.multi_head_attention_forward)
ATTENDING = SOFTMAX | {F.scaled_dot_product_attention, F.multi_head_attention_forward}


class AttentionMode(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder, self.trace = recorder, ScoreTrace()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        # In this order, and attention last: it is asked about every function of a whole model.
        if recorder.busy or torch.compiler.is_compiling() or not recorder.stack():
            return func(*args, **kwargs)
        call = self.read(func, args, kwargs) if func in ATTENDING else None
        if call is None:
            result = func(*args, **kwargs)
            self.trace.follow(func, args, kwargs, result)
            return result
        return recorder.run(call, func, *args, **kwargs)

    def read(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Call | None:
        """The call of attention that a function is, if it is one and not our own."""
        name, module = self.recorder.name_of() or "", self.recorder.stack()[-1]
        if func is F.multi_head_attention_forward:
            return read_heads(name, MHA.bind(*args, **kwargs).arguments)
        if from_us():
            return None
        if func is F.scaled_dot_product_attention:
            heads = heads_of(module, args[0].shape[0]) if args else 1
            return read_sdpa(name, heads, *args, **kwargs)
        return self.trace.end(name, module, args, kwargs)


@contextmanager
def hook_torch_functions(recorder: Recorder) -> Iterator[None]:
    recorder.mode = AttentionMode(recorder)
    try:
        with hook_flex(recorder), recorder.mode:
            yield
    finally:
        recorder.mode = None


@contextmanager
def hook_flex(recorder: Recorder) -> Iterator[None]:
    """Replace `flex_attention` by one that records, wherever the model's code names it."""
    function = getattr(sys.modules.get(FLEX), "flex_attention", None)
    if function is None:
        yield
        return
    hooked = record_flex(recorder, function)
    homes = {type(module).__module__ for module in recorder.model.modules()} | {FLEX}
    changed: list[tuple[Any, str]] = []
    try:
        for home in filter(None, map(sys.modules.get, homes)):
            for name, value in list(vars(home).items()):
                if value is function:
                    setattr(home, name, hooked)
                    changed.append((home, name))
        yield
    finally:
        for home, name in changed:
            setattr(home, name, function)


def record_flex(recorder: Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or recorder.busy or not recorder.stack():
            return function(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        # Traced by the compiler, and so without our mode.
        with recorder.alone(), recorder.unseen():
            call = read_flex(recorder.name_of() or "", given)
        with recorder.unseen():
            return recorder.run(call, function, *args, **kwargs)

    return record


def read_flex(name: str, given: dict[str, Any]) -> Call:
    q, k = given["query"].detach(), given["key"].detach()
    scale = given.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    block_mask, score_mod = given.get("block_mask"), given.get("score_mod")
    mask = None if block_mask is None else flex_rule(block_mask.mask_mod, q, k)
    if score_mod is None:
        return Call(name=name, q=q, k=k, mask=mask, scale=scale)
    with torch.no_grad():
        scores = flex_scores(score_mod, q, k, scale)
    return whole_scores(name, scores, mask)


def read_sdpa(
    name: str,
    heads: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Call | None:
    """What a call of `scaled_dot_product_attention` means; None where it is none of attention's."""
    if query.is_nested or min(query.dim(), key.dim()) < 2 or query.dim() > 4:
        return None
    q, k = (x[(None,) * (4 - x.dim())] for x in (query, key))
    if query.dim() == 3 == key.dim():
        # Rows and heads in one axis, of which the module says how many heads it has, or one.
        q, k = (x.reshape(-1, heads, *x.shape[1:]) for x in (query, key))
    rows = max(q.shape[0], k.shape[0])
    q, k = q.expand(rows, *q.shape[1:]), k.expand(rows, *k.shape[1:])
    if not more.get("enable_gqa", False) and k.shape[1] == 1 != q.shape[1]:
        k = k.expand(rows, q.shape[1], *k.shape[2:])
    mask: Mask | None = Causal(align="start") if is_causal else None
    bias: DenseBias | None = None
    variant = getattr(attn_mask, "variant", None)
    if variant is not None:
        mask = Causal(align="start" if variant.name == "UPPER_LEFT" else "end")
    elif attn_mask is not None:
        joined = query.dim() == 3 == attn_mask.dim() and attn_mask.shape[0] > 1
        four = attn_mask.reshape(-1, heads, *attn_mask.shape[1:]) if joined else attn_mask
        if four.dtype == torch.bool:
            mask = Dense(four) if mask is None else mask & Dense(four)
        else:
            bias = DenseBias(four)
    scale = None if more.get("scale") is None else float(more["scale"])
    v = value if value.dim() == 4 and value.shape[:3] == k.shape[:3] else None
    return Call(name=name, q=q, k=k, v=v, mask=mask, bias=bias, scale=scale)


def from_us() -> bool:
    """Whether the function is called by our own attention, which has a hook of its own."""
    frame = sys._getframe(2)
    for _ in range(24):
        if frame.f_globals.get("__name__", "").startswith("regard.ops"):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
