"""Activation checkpointing: of each block only the input is kept for the backward pass.

Why: the activations of a long text need more memory than the weights.

How: inside the context, every block's `forward` goes through `torch.utils.checkpoint`, which
recomputes it in the backward pass with the same dropout. The model's code and parameter names do
not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch.utils.checkpoint import checkpoint

from regard.models import Transformer


@contextmanager
def checkpointed(model: Transformer) -> Iterator[None]:
    """Recompute the activations inside the model's blocks in the backward pass."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    blocks = [block for stack in stacks for block in stack.layers]
    try:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        yield
    finally:
        for block in blocks:
            vars(block).pop("forward", None)
