"""For hooks on foreign models: which module calls attention, and its mask as open edits leave it.

A record that is made inside a block of edits shows the edited attention. So hooks that read calls
of attention get the edited mask here.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from regard.lens.edit.positions import Standing
from regard.ops import Bias, Mask, edit_hook
from regard.ops.call import make_call
from regard.ops.edit_hook import Caller


def caller_of(module: nn.Module) -> Caller:
    """The module that calls attention, and whether it is cross-attention, if the module says so."""
    cross = getattr(module, "is_cross_attention", None)
    return Caller(module, cross if isinstance(cross, bool) else None)


def torchs_caller(module: nn.Module, cross: bool, q: Tensor, k: Tensor, n_given: int) -> Caller:
    """A module of torch.nn's as the caller: it reads whole texts; its learned keys come last."""
    T, S = q.shape[2], k.shape[2]
    keys = np.where(np.arange(S) < n_given, np.arange(S), -1)[None]
    lengths = np.full((1, 1), T), np.full((1, 1), n_given)
    return Caller(module, cross, Standing(np.arange(T)[None], keys, *lengths))


def edited_mask(
    caller: Caller, q: Tensor, k: Tensor, mask: Mask | None, bias: Bias | None
) -> Mask | None:
    """The mask of a module's call after the edits that are open in this thread and context."""
    if not edit_hook.n_open:
        return mask
    edited = edit_hook.edit_call(make_call(q, k, k, mask=mask, bias=bias), caller)
    return mask if edited is None else edited.call.rule.mask


def is_edited(module: nn.Module) -> bool:
    """Whether the module belongs to a model that is being edited in this thread and context."""
    return any(id(module) in getattr(editor, "names", ()) for editor in edit_hook.open_editors())
