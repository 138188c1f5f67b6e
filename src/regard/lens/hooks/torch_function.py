"""The hook on torch's functions: its attention functions, and softmaxes of products, by any caller.

Why: most models in the world call `scaled_dot_product_attention`, `flex_attention` or
`multi_head_attention_forward`, or write `softmax(q kᵀ / √d + bias)` out in their own code, as BLOOM
and GPT-J do. None of these offers a hook.

How: a torch-function mode sees every function of torch that the model calls, and calls it
unchanged. For attention that is written out it traces the scores: a product of two activations is
remembered with its queries and keys, and so are the factors, what is added, and what is masked,
until a softmax over the keys is computed. Then the scores are recomputed from the trace; if they
agree, that is the call, and if not, the scores themselves are recorded (`score_tracing.py`).
`flex_attention` is a plain function, and is patched, for the duration of the block, in the modules
in which the model's classes are defined.

torch.nn's fast paths are not taken under a mode, so `torch_nn.py` removes it there.

Left out: calls inside compiled code, and nested tensors.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.lens.captured_call import Call, whole_scores
from regard.lens.hooks.flex import flex_rule, flex_scores
from regard.lens.hooks.score_tracing import SOFTMAX, Heads, ScoreTrace
from regard.lens.hooks.torch_nn import read_heads
from regard.lens.open_recorders import recorders_of, run_recorded
from regard.lens.shared_patch import patched
from regard.ops import Causal, Dense, DenseBias, Mask

if TYPE_CHECKING:
    from regard.lens.recorder import Recorder

FLEX = "torch.nn.attention.flex_attention"
MHA = inspect.signature(F.multi_head_attention_forward)
SDPA = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        for name in ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    ]
    + [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in ("scale", "enable_gqa")
    ]
)
ATTENDING = SOFTMAX | {F.scaled_dot_product_attention, F.multi_head_attention_forward}


class AttentionMode(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder, self.origins = recorder, recorder.origins
        self.trace = ScoreTrace(recorder.origins)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        # The cheapest checks first: this runs for every torch function of a whole model.
        if recorder.handling or not recorder.is_open or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func not in ATTENDING or not recorder.record(lambda _: self.read(func, args, kwargs)):
            result = func(*args, **kwargs)
            try:
                self.origins.follow(func, args, result)
                if self.trace.concerns(func):
                    self.trace.follow(func, args, kwargs, result)
            except Exception as error:
                self.origins.is_whole = False
                recorder.leave_out(recorder.name_of() or "", error)
            return result
        recorder.handling += 1
        try:
            return func(*args, **kwargs)
        finally:
            recorder.handling -= 1

    def read(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Call | None:
        """The attention call that a function makes; None if none, or if it is our attention's."""
        recorder = self.recorder
        name, module = recorder.name_of() or "", recorder.stack[-1]
        if func is F.multi_head_attention_forward:
            return read_heads(recorder, name, MHA.bind(*args, **kwargs).arguments)
        if from_us():
            return None
        heads = Heads.of(module, recorder.inputs.n_inputs)
        if func is not F.scaled_dot_product_attention:
            call = self.trace.end(name, heads, args, kwargs)
            scores = args[0] if args else kwargs.get("input")
            axis = self.trace.other_axis(args, kwargs)
            if axis is not None:
                what = f"takes a softmax of products over axis {axis}, which is not the last"
                recorder.takes.remarks[f"{name} {what}; it is not recorded"] = None
            return call if call is None else self.with_doubt(call, heads, scores)
        given = SDPA.bind(*args, **kwargs).arguments
        query, key = given["query"], given["key"]
        call = read_sdpa(name, heads, **given)
        if call is None:
            return None
        call = replace(call, cross=recorder.origins.relate(query, key, *call.shape[2:]))
        return self.with_doubt(call, heads, query)

    def with_doubt(self, call: Call, heads: Heads, like: Any) -> Call:
        """The call, with a remark in the record if it is unclear which axis is that of heads."""
        doubt = heads.doubt(like.shape)
        if doubt is not None:
            self.recorder.takes.remarks[f"{call.name} {doubt}"] = None
        return call


@contextmanager
def hook_torch_functions(recorder: Recorder) -> Iterator[None]:
    """Create the mode; it is on while the model's modules run, so it does not affect other code."""
    recorder.mode = AttentionMode(recorder)
    with hook_flex(recorder):
        yield


@contextmanager
def hook_flex(recorder: Recorder) -> Iterator[None]:
    """Patch `flex_attention` with one that records, in all modules of the model's code."""
    function = getattr(sys.modules.get(FLEX), "flex_attention", None)
    if function is None:
        yield
        return
    function = getattr(function, "_records", function)
    homes = {type(module).__module__ for module in recorder.modules} | {FLEX}
    with ExitStack() as patches:
        for home in filter(None, map(sys.modules.get, homes)):
            for name, value in list(vars(home).items()):
                if value is function or getattr(value, "_records", None) is function:
                    patches.enter_context(patched(home, name, record_flex))
        yield


def record_flex(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @wraps(function)
    def record(*args: Any, **kwargs: Any) -> Any:
        recorders = recorders_of()
        if not recorders:
            return function(*args, **kwargs)

        def read(recorder: Recorder) -> Call:
            given = signature.bind(*args, **kwargs).arguments
            call = read_flex(recorder.name_of() or "", given)
            cross = recorder.origins.relate(given["query"], given["key"], *call.shape[2:])
            return replace(call, cross=cross)

        # The compiler traces it, so our mode must be off.
        with recorders[0].unseen():
            return run_recorded(recorders, read, function, *args, **kwargs)

    record._records = function  # type: ignore[attr-defined]
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
    heads: Heads,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    **more: Any,
) -> Call | None:
    """Convert a call of `scaled_dot_product_attention`; None if its shapes are not attention's."""
    if query.is_nested:
        raise ValueError("its queries are nested tensors; give it a padded batch")
    if min(query.dim(), key.dim()) < 2:
        return None
    if query.dim() == key.dim() == 5 and heads.come_first(query.shape):
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        if attn_mask is not None and attn_mask.dim() > 2:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())].transpose(-4, -3)
    if max(query.dim(), key.dim()) > 4:
        lead = (query[..., 0, 0, 0] + key[..., 0, 0, 0]).shape
        query, key = (x.expand(*lead, *x.shape[-3:]).flatten(0, -4) for x in (query, key))
        if attn_mask is not None and attn_mask.dim() > 4:
            attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:]).flatten(0, -4)
    q, k = (x[(None,) * (4 - x.dim())] for x in (query, key))
    n_heads = heads.count(query.shape[0])
    if query.dim() == 3 == key.dim():
        # One axis holds rows and heads; the module declares how many heads it has, else there is
        # one.
        q, k = (x.reshape(-1, n_heads, *x.shape[1:]) for x in (query, key))
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
        four = attn_mask.reshape(-1, n_heads, *attn_mask.shape[1:]) if joined else attn_mask
        if four.dtype == torch.bool:
            mask = Dense(four) if mask is None else mask & Dense(four)
        else:
            bias = DenseBias(four)
    scale = None if more.get("scale") is None else float(more["scale"])
    v = value if value.dim() == 4 and value.shape[:3] == k.shape[:3] else None
    return Call(name=name, q=q, k=k, v=v, mask=mask, bias=bias, scale=scale)


def from_us() -> bool:
    """Whether the function is called by our own attention, which has its own hook."""
    frame = sys._getframe(2)
    for _ in range(24):
        if frame.f_globals.get("__name__", "").startswith("regard.ops"):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
