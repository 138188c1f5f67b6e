"""What those who read calls of other people's models must know of edits: who calls, and the mask.

A record that is made in a block of edits is of the attention as it is then, so whoever reads a call
asks here for its mask as edits leave it.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor, nn

from regard.lens.edit.positions import Standing
from regard.ops import Bias, Mask, edit_hook
from regard.ops.call import make_call
from regard.ops.edit_hook import Caller


def caller_of(module: nn.Module) -> Caller:
    """Who calls; whether it looks at another text, where the module says so."""
    cross = getattr(module, "is_cross_attention", None)
    return Caller(module, cross if isinstance(cross, bool) else None)


def torchs_caller(module: nn.Module, cross: bool, q: Tensor, k: Tensor, n_given: int) -> Caller:
    """One of torch.nn's modules, which reads texts at once; keys it has learned stand behind."""
    T, S = q.shape[2], k.shape[2]
    keys = np.where(np.arange(S) < n_given, np.arange(S), -1)[None]
    lengths = np.full((1, 1), T), np.full((1, 1), n_given)
    return Caller(module, cross, Standing(np.arange(T)[None], keys, *lengths))


def edited_mask(
    caller: Caller, q: Tensor, k: Tensor, mask: Mask | None, bias: Bias | None
) -> Mask | None:
    """The mask of a module's call as edits of this thread and context leave it."""
    if not edit_hook.n_open:
        return mask
    edited = edit_hook.edit_call(make_call(q, k, k, mask=mask, bias=bias), caller)
    return mask if edited is None else edited.call.rule.mask


def is_edited(module: nn.Module) -> bool:
    """Whether a module is of a model that is edited here."""
    return any(id(module) in getattr(editor, "names", ()) for editor in edit_hook.open_editors())
