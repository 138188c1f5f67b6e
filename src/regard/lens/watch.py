"""Watching a model: `with watch(model) as record: model(...)`.

Why: to see what heads attend to in any model, without changing the model or what it computes.

How: hooks are set for the duration of the block, and removed when it ends, even by an exception.
Our own `attention` has a call hook. Hugging Face's attention interface is patched to return
functions that record and then call the original. The `forward` of torch.nn's attention modules is
wrapped to read their inputs. And a torch-function mode, which is on while modules of the model run,
sees what other modules pass to torch's attention functions, or to a softmax of a product of queries
and keys. Hooks hand a `Call` to the `Recorder`, which appends it to earlier calls of the same place
(`row_takes.py`). The model's own computation is bit-identical with and without.

A place is named by the module that attends, as in `named_modules`. A module that is called again
for something else than the next tokens (layers that share weights, a second text) is a further
place, `name@2`. Layers that share weights are separate layers, with their own numbers; the same
layer of several rows is `name[row]`. Cross-attention is recognised by where the tensors come from
(`tensor_origins.py`). A beam search is recorded as the text that wins.

An error while recording never ends the model's own call: the place is left out, reported in a
warning when the block ends, and named in the record's `notes`; so is a place that lacks the
requested row or head. Layers that checkpointing recomputes in the backward pass are recorded once.

Compiled models are recorded if they attend by `regard.attention` or by the attention interface of
`transformers`: in a block they run by graphs of their own (`hooks/compiled.py`).

Under tensor parallel each rank has its own heads, and the ranks join what they recorded when the
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
    heads: int | Sequence[int] | None = None,
    keep: str | Sequence[str] = "statistics",
    row: int | Sequence[int] | None = None,
    tokens: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Iterator[Record]:
    """Record what the attention heads of any PyTorch model do while the block runs.

    The model may be regard's, of Hugging Face, of torch.nn, or any that calls torch's attention.
    Its outputs are the same as without, bit for bit.

    Args:
        model: The module that is called in the block.
        wants: What to measure of each row: lse, entropy, peak, distance, mass, received, top, map.
            Default: `DEFAULT_WANTS`, entropy, peak, distance, received and the 8 largest weights.
        layers: Which layers: numbers, counted from 0 in the order in which they are called (in each
            stack), or names of modules, or of modules around them. Default: all.
        heads: The number of a head, or several. Default: all.
        keep: "statistics": only what was measured, with a coarse map. "qk": queries and keys too,
            from which every single weight can be computed again, in memory for T × D numbers a
            head. Beside either, as in ("qk", "values"): "values" (norms of the value vectors, for
            value-weighted attention), "predictions" (a language model's likeliest next tokens),
            "gradients" (sums of attention × gradient, if backward() runs in the block).
        row: Which row of the batch, or several rows. Needed where the batch has more than one. In
            a beam search a row is a prompt; of an input that the model cuts into windows, each a
            row of its batch, the first is recorded by default.
        tokens: Labels of the tokens; `record.read(tokenizer)` or `record.describe` can give them
            later.
        progress: Called as progress(name, n) after the n-th call of attention was recorded.

    Yields:
        A `Record`. It is filled when the block ends, and can be asked from then on.

    Raises:
        TypeError, ValueError: Arguments that cannot be; and at the end of the block, if nothing
            could be recorded, with the reason.

    A layer that cannot be recorded is left out: the model runs on, a warning says so at the end of
    the block, and `record.notes` keeps the reason. Calls from other threads, or from tasks that
    were made outside the block, are not recorded.

    Example:
        >>> model = regard.load("embedded:lm")
        >>> ids = model.tokenizer.encode("The cat sat on the mat.").ids
        >>> with regard.watch(model, keep="qk") as record:
        ...     output = model(torch.tensor([ids]))
        >>> record.rows(place=0, head=0, query=3).shape == (len(ids),)  # what token 3 looks at
        True
        >>> record.read(model.tokenizer).save("cat.regard")  # opens with: regard view cat.regard
    """
    if not isinstance(keep, str | Collection):
        raise TypeError(f'keep is {keep!r}; expected "statistics", "qk", or several words')
    asked = {keep} if isinstance(keep, str) else set(keep)
    heads = [heads] if isinstance(heads, int) else heads
    model = getattr(model, "_orig_mod", model)  # unwrap what torch.compile returned
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
        # Reference cycles would keep the results on their device until the garbage collector runs.
        recorder.takes.clear()
    left_out = recorder.left_out.notes()
    if left_out:
        warnings.warn("; ".join(left_out), RuntimeWarning, stacklevel=3)


@contextmanager
def hooks_to(recorder: Recorder) -> Iterator[None]:
    """Install all hooks for the duration of the block."""
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
            "weights, above and rows cannot be kept in a record; keep queries and keys, from which "
            'the record computes any weight: watch(model, keep="qk")'
        )
    asked = None if wants is None else wants.receiving()
    if asked is not None and not asked.is_plain:
        raise ValueError(
            "a record keeps the plain sum that keys receive from all queries: received=True. Use "
            "`regard.observing` for a Received(...), with layers of regard"
        )
    unknown = sorted(keep - {"statistics", "qk", *EXTRAS})
    if unknown:
        known = '"statistics" or "qk"', ", ".join(f'"{name}"' for name in EXTRAS)
        raise ValueError(
            f"keep has {unknown[0]!r}; expected {known[0]}, or several, with any of {known[1]}"
        )
    if heads is not None and (not len(heads) or len(set(heads)) < len(heads)):
        raise ValueError(f"heads must name at least one head, each once, got {list(heads)}")
