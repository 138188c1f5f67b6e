"""Watching a model: `with watch(model) as record: model(...)`.

Why: to see what heads look at in any model, without changing the model or what it computes.

How: four hooks are set for the time of the block, and removed when it ends, also by an error. Our
own `attention` has a call hook; Hugging Face's attention interface hands out functions that record
and then call the very one they stand for; torch.nn's attention modules are asked for their inputs
as they are called; and a torch-function mode sees what other modules give to torch's attention
functions, or to a softmax of a product of queries and keys. Hooks hand a `Call` to the `Recorder`,
which puts it behind earlier calls of the same place (`stitch_calls.py`). The model's own
computation is the same in every bit, with and without.

A place is named by the module that attends, as `named_modules` has it. A module that is called
again for something else than the next tokens (layers that share weights, a second text) is a
further place, `name@2`. Layers that share weights are layers of their own, by number too. Compiled
models run unseen, and are refused in words.

Left out: several rows of a batch in one record (watch once for each `row`), and watching one model
in several blocks at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from torch import nn

from regard.lens.extras import EXTRAS
from regard.lens.hooks.regard import hook_regard
from regard.lens.hooks.torch_function import hook_torch_functions
from regard.lens.hooks.torch_nn import hook_torch_nn
from regard.lens.hooks.transformers import hook_transformers
from regard.lens.record import Record
from regard.lens.recorder import Progress, Recorder
from regard.lens.schema import Description
from regard.ops import Wants

DEFAULT_WANTS = Wants(entropy=True, peak=True, distance=True, received=True, top=8)


@contextmanager
def watch(
    model: nn.Module,
    wants: Wants | None = None,
    *,
    layers: Collection[int | str] | int | None = None,
    heads: Sequence[int] | None = None,
    keep: str | Sequence[str] = "statistics",
    row: int | None = None,
    tokens: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Iterator[Record]:
    """Record what the attention of `model` does in the block; the record is ready when it ends.

    wants: what to measure (lse, entropy, peak, distance, mass, received, top, map); all but mass
    unless given. layers: numbers of layers, each stack's from 0 in the order in which they are
    called, or names of places or of modules around them; all unless given. heads: numbers of heads;
    all unless given. keep: "statistics", or "qk" to keep queries and keys too, from which every
    weight can be made again; or several, as ("qk", "values"): "values" are the lengths of what keys
    add, "predictions" what a language model says will come next, and "gradients" the sums of
    attention × gradient, where backward() runs in the block. row: which row of the batch; needed
    where there are several. tokens: labels of the tokens; `record.describe` can give them later.
    progress: called as progress(place, n) when the n-th call of attention has been recorded.
    """
    asked = {keep} if isinstance(keep, str) else set(keep)
    _check(model, wants, asked, heads)
    kept = "qk" if "qk" in asked else "statistics"
    record = Record(Description(kept=kept), {})
    if tokens is not None:
        record.describe(tokens=tokens)
    chosen = (layers,) if isinstance(layers, (int, str)) else layers
    recorder = Recorder(model, wants or DEFAULT_WANTS, chosen, heads, kept, row, sorted(asked))
    recorder.progress = progress
    with closing(recorder.copier), ExitStack() as hooks:
        hooks.enter_context(recorder.follow())
        for hook in (hook_regard, hook_transformers, hook_torch_nn, hook_torch_functions):
            hooks.enter_context(hook(recorder))
        yield record
    record._fill(*recorder.finish())


def _check(
    model: nn.Module, wants: Wants | None, keep: set[str], heads: Sequence[int] | None
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch takes a torch.nn.Module, got {type(model).__name__}")
    if wants is not None and not isinstance(wants, Wants):
        raise TypeError(f"wants must be a Wants(...), got {type(wants).__name__}")
    if wants is not None and (wants.weights or wants.above is not None or wants.rows is not None):
        raise ValueError(
            "weights, above and rows are not kept in a record; keep queries and keys, from which "
            'the record makes any of them: watch(model, keep="qk")'
        )
    asked = None if wants is None else wants.receiving()
    if asked is not None and not asked.is_plain:
        raise ValueError(
            "a record keeps what keys receive from all queries, as a sum: received=True; weighted, "
            "for some queries or as a mean or maximum, `regard.observing` tells it of our layers"
        )
    unknown = sorted(keep - {"statistics", "qk", *EXTRAS})
    if unknown:
        known = '"statistics" or "qk"', ", ".join(f'"{name}"' for name in EXTRAS)
        raise ValueError(f"keep must be {known[0]}, and beside it {known[1]}; got {unknown[0]!r}")
    if heads is not None and (not len(heads) or len(set(heads)) < len(heads)):
        raise ValueError(f"heads must name at least one head, each once, got {list(heads)}")
    for name, module in model.named_modules():
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if compiled or type(module).__name__ == "OptimizedModule":
            raise ValueError(
                f"{name or type(model).__name__} is compiled, and compiled code runs unseen; watch "
                "the model it was made from (model._orig_mod, or before model.compile())"
            )
