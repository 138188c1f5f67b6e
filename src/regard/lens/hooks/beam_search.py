"""The hook on beam search in `transformers`: the record is of the text that wins.

Why: a beam search decodes many texts in parallel, in rows that are reordered and dropped at every
step. No row of its steps is a text, and which text wins is known only at the end. The same holds
for assisted decoding, where an assistant drafts tokens, some of which the model rejects.

How: while `generate` searches, recorders pause. Then the model reads the best text of each prompt
once, all of its tokens but the last, as it would have been fed step by step, and that is recorded.
The search itself is bit-identical. Our own search does the same (`generation/beams.py`).

Left out: searches in other people's loops. A row that is no longer the same text is left out, and
the record says so.

Letters: B prompts, K beams, T tokens.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.lens.open_recorders import recorders_around
from regard.lens.shared_patch import patched

if TYPE_CHECKING:
    from regard.lens.recorder import Recorder

STEPWISE = {
    *("past_key_values", "use_cache", "cache_position", "position_ids", "labels"),
    "logits_to_keep",
}
"""Arguments that `generate` passes to a step, and that a reading of the whole text omits."""


@contextmanager
def hook_beam_search(recorder: Recorder) -> Iterator[None]:
    """Hook the search if `transformers` is loaded; otherwise no model can be one of its models."""
    mixin = getattr(sys.modules.get("transformers.generation.utils"), "GenerationMixin", None)
    with ExitStack() as patches:
        for name in ("_beam_search", "_assisted_decoding"):
            if hasattr(mixin, name):
                patches.enter_context(patched(mixin, name, record_best))
        yield


def record_best(search: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(search)

    @wraps(search)
    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        recorders = recorders_around(model)
        for recorder in recorders:
            recorder.paused += 1
        try:
            found = search(model, *args, **kwargs)
        finally:
            for recorder in recorders:
                recorder.paused -= 1
        if recorders:
            given = signature.bind(model, *args, **kwargs).arguments
            name, logits = (
                recorders[0].names[id(model)],
                any(r.extras.wants_logits for r in recorders),
            )
            recorders[0].attempt(name, read_best, model, given, found, logits)
        return found

    return run


@torch.no_grad()
def read_best(model: Any, given: dict[str, Any], found: Any, all_logits: bool) -> None:
    config, prompt = given["generation_config"], given["input_ids"]
    sequences = found if isinstance(found, Tensor) else found.sequences
    best_bt = sequences[:: config.num_return_sequences or 1]
    width, rows = prompt.shape[1], slice(None, None, config.num_beams or 1)
    fed_bt = fed(best_bt, width, config._eos_token_tensor)
    T = int(fed_bt.sum(1).max())
    ids_bt, fed_bt = best_bt[:, :T], fed_bt[:, :T]
    taken = inspect.signature(model.forward).parameters
    inputs = {
        name: pick(value, rows)
        for name, value in given.get("model_kwargs", {}).items()
        if name in taken and name not in STEPWISE
    }
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids_bt
    else:
        mask_bt = inputs.get("attention_mask")
        fed_bt = fed_bt.to(prompt.dtype if mask_bt is None else mask_bt.dtype)
        if mask_bt is not None:
            fed_bt = torch.cat([mask_bt[:, :width], fed_bt[:, width:]], 1)
        inputs |= {"input_ids": ids_bt, "attention_mask": fed_bt}
    if "logits_to_keep" in taken and not all_logits:
        inputs["logits_to_keep"] = 1
    model(**inputs, use_cache=False)


def fed(ids_bt: Tensor, width: int, stops: Tensor | None) -> Tensor:
    """Which tokens the model was fed to write the rest: all before the last or a stop token."""
    n_tokens = torch.full_like(ids_bt[:, 0], ids_bt.shape[1])
    if stops is not None:
        ends_bt = torch.isin(ids_bt[:, width:], stops)
        first_b = width + ends_bt.int().argmax(1) + 1
        n_tokens = torch.where(ends_bt.any(1), first_b, n_tokens)
    return torch.arange(ids_bt.shape[1], device=ids_bt.device) < n_tokens[:, None] - 1


def pick(value: Any, rows: slice) -> Any:
    """Select one row per prompt, in a tensor or in all tensors of a model's output."""
    if isinstance(value, Tensor):
        return value[rows] if value.dim() else value
    if hasattr(value, "items"):
        return type(value)(**{name: pick(each, rows) for name, each in value.items()})
    if isinstance(value, (tuple, list)):
        return type(value)(pick(each, rows) for each in value)
    return value
