"""What those who read calls of Hugging Face's models must know of edits: who calls, and the mask.

A record that is made in a block of edits is of the attention as it is then, so whoever reads a call
asks here for its mask as edits leave it.
"""

from __future__ import annotations

from torch import Tensor, nn

from regard.ops import Bias, Mask, edit_hook
from regard.ops.call import make_call


def caller_of(module: nn.Module) -> edit_hook.Caller:
    """Who calls; whether it looks at another text, where the module says so."""
    cross = getattr(module, "is_cross_attention", None)
    return edit_hook.Caller(module, cross if isinstance(cross, bool) else None)


def edited_mask(
    module: nn.Module, q: Tensor, k: Tensor, mask: Mask | None, bias: Bias | None
) -> Mask | None:
    """The mask of a module's call as edits of this thread and context leave it."""
    if not edit_hook.n_open:
        return mask
    edited = edit_hook.edit_call(make_call(q, k, k, mask=mask, bias=bias), caller_of(module))
    return mask if edited is None else edited.call.rule.mask
