"""Activation checkpointing: blocks keep nothing for the backward pass but their input.

Why: activations of a long text need more memory than the weights.

How: while the context lasts, every block runs through torch's own checkpoint, which runs it again
in the backward pass, with the same dropout. The model's code and names stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch.utils.checkpoint import checkpoint

from regard.models import Transformer


@contextmanager
def checkpointed(model: Transformer) -> Iterator[None]:
    """Compute the insides of blocks again in the backward pass, while the block runs."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    blocks = [block for stack in stacks for block in stack.layers]
    try:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        yield
    finally:
        for block in blocks:
            vars(block).pop("forward", None)
