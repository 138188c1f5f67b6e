"""Watching a model: `with watch(model) as record: model(...)`.

Why: to see what heads look at in any model, without changing the model or what it computes.

How: hooks are set for the time of the block, and removed when it ends, also by an error. Our own
`attention` has a call hook; Hugging Face's attention interface hands out functions that record and
then call the very one they stand for; torch.nn's attention modules are asked for their inputs as
they are called; and a torch-function mode, which is on while modules of the model run, sees what
other modules give to torch's attention functions, or to a softmax of a product of queries and keys.
Hooks hand a `Call` to the `Recorder`, which puts it behind earlier calls of the same place
(`row_takes.py`). The model's own computation is the same in every bit, with and without.

A place is named by the module that attends, as `named_modules` has it. A module that is called
again for something else than the next tokens (layers that share weights, a second text) is a
further place, `name@2`. Layers that share weights are layers of their own, by number too; the same
layer of several rows is `name[row]`. Whether keys are of another text is known from where the
tensors come from (`tensor_origins.py`). A beam search is recorded as the text that wins.

Nothing that fails in recording ends the model's own call: the place is left out, told in a warning
when the block ends, and named in the record's `notes`; so is a place that has no such row or head
as was asked for. Layers that checkpointing runs again in the backward pass are recorded once.

Compiled models are recorded where they attend by `regard.attention` or by the attention interface
of `transformers`: in a block they run by graphs of their own (`hooks/compiled.py`).

Under tensor parallel each rank has its own heads, and the ranks join what they have seen when the
block ends: every rank gets the same record, of all heads (`head_shards.py`). So all of them must
watch, as all of them must run the model.

A block records what is called in its own thread and context (`contextvars`): two threads or tasks
may watch two models, or the same one, and each record is of its own block. A call of a watched
model from another thread is not recorded, and is not affected.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from torch import nn

from regard.lens.extras import EXTRAS
from regard.lens.hooks.beam_search import hook_beam_search
from regard.lens.hooks.compiled import hook_compiled
from regard.lens.hooks.regard import hook_regard
from regard.lens.hooks.torch_function import hook_torch_functions
from regard.lens.hooks.torch_nn import hook_torch_nn
from regard.lens.hooks.transformers import hook_transformers
from regard.lens.module_hooks import hooked_modules
from regard.lens.open_recorders import opened
from regard.lens.record import Record
from regard.lens.recorder import Progress, Recorder
from regard.lens.row_takes import Chosen
from regard.lens.schema import Description
from regard.ops import Wants

HOOKS = (
    *(hook_regard, hook_transformers, hook_torch_nn, hook_torch_functions),
    *(hook_beam_search, hook_compiled),
)
DEFAULT_WANTS = Wants(entropy=True, peak=True, distance=True, received=True, top=8)


@contextmanager
def watch(
    model: nn.Module,
    wants: Wants | None = None,
    *,
    layers: Collection[int | str] | int | None = None,
    heads: Sequence[int] | None = None,
    keep: str | Sequence[str] = "statistics",
    row: int | Sequence[int] | None = None,
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
    attention × gradient, where backward() runs in the block. row: which row of the batch, or which
    rows, each a place of its own; needed where there are several. Of one input that a model cuts
    into windows, each a row, the first is recorded unless others are named; in a beam search a row
    is a prompt. tokens: labels of the tokens; `record.describe` can give them later. progress:
    called as progress(place, n) when the n-th call of attention has been recorded.

    A place that cannot be recorded is left out, with a warning when the block ends, and named in
    `record.notes`; the model runs as without. A record in which nothing could be recorded is an
    error. Calls from other threads, and from tasks that were not made in the block, are not
    recorded and run as ever.
    """
    asked = {keep} if isinstance(keep, str) else set(keep)
    model = getattr(model, "_orig_mod", model)  # of one that torch.compile gave
    _check(model, wants, asked, heads)
    rows = _check_rows(row)
    kept = "qk" if "qk" in asked else "statistics"
    record = Record(Description(kept=kept), {})
    if tokens is not None:
        record.describe(tokens=tokens)
    named = (layers,) if isinstance(layers, (int, str)) else layers
    numbers = None if heads is None else tuple(heads)
    chosen = Chosen(wants or DEFAULT_WANTS, kept, rows, numbers, frozenset(asked))
    recorder = Recorder(model, chosen, named, progress)
    try:
        with closing(recorder.copier), hooks_to(recorder):
            yield record
        record._fill(*recorder.finish())
    finally:
        # What refers to itself would keep the answers on their device until it is searched for.
        recorder.takes.clear()
    left_out = recorder.left_out.notes()
    if left_out:
        warnings.warn("; ".join(left_out), RuntimeWarning, stacklevel=3)


@contextmanager
def hooks_to(recorder: Recorder) -> Iterator[None]:
    """All hooks, for the time of the block."""
    with ExitStack() as hooks:
        for hook in HOOKS:
            hooks.enter_context(hook(recorder))
        hooks.enter_context(opened(recorder))
        hooks.enter_context(recorder.follow())
        hooks.enter_context(hooked_modules())
        yield


def _check_rows(row: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if row is None:
        return None
    rows = (row,) if isinstance(row, int) else tuple(row)
    if not rows or len(set(rows)) < len(rows) or not all(isinstance(n, int) for n in rows):
        raise ValueError(f"row must be a row of the batch, or several, each once, got {row!r}")
    return rows


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
