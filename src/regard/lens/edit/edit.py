"""Editing a model's attention: `with regard.edit(model, Block("it", "animal")): model(...)`.

Why: where a head looks does not say whether it matters. What the model predicts when a look is
forbidden, or a head is switched off, does.

How: edits are values (`values.py`). In the block the editor looks up the edits for every attention
call of the model (`editor.py`). The call runs unchanged; then rows in which a look is forbidden are
recomputed, and the outputs of heads are changed (`change.py`). So nothing of the size of the
attention matrix is built, at any length, and all that no edit concerns keeps its bits. Our own
models, those of Hugging Face's attention interface and torch.nn's modules can be edited
(`hooks.py`); for torch.nn's the fused path is switched off, which may change last bits.

A block edits what is called in its own thread and context (`contextvars`). Blocks may be nested;
the inner one is applied last. A record that is made in a block (`regard.watch`) shows the edited
heads.

Left out: compiled models, which bypass the hooks, and attention that a model writes out itself. A
module that is named as attention, runs, and is not reached is refused if an edit concerns it. With
activation checkpointing the backward pass recomputes layers with the edits open then: call it in
the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from regard.lens.edit.editor import Bound, Capture, Editor
from regard.lens.edit.hooks import hook_models
from regard.lens.edit.positions import read_text, with_numbers, words_in
from regard.lens.edit.values import Ablate, Block, Edit, HeadOutputs, Layers, Patch
from regard.ops.edit_hook import editing


@contextmanager
def edit(
    model: nn.Module, *edits: Edit, text: str | None = None, tokenizer: Any = None
) -> Iterator[None]:
    """Change what the attention heads of a model do while the block runs.

    It works in forward passes and in generation, at any length, for regard's models, those of
    Hugging Face's attention interface, and torch.nn's modules.

    Args:
        model: The module that is called in the block.
        edits: Any number of `Block` (some queries may not look at some keys), `Ablate` (heads are
            switched off) and `Patch` (heads give what they gave in another run). Blocks come first,
            whatever the order; then the heads are changed in the order given.
        text: The text that the model reads, needed where edits name words instead of positions.
            Each word that is named must stand in it exactly once.
        tokenizer: What splits the text into tokens; the model's own by default.

    Raises:
        TypeError, ValueError: An edit that cannot be, or a word that is not in the text, or is
            there several times. A layer, head or position that the model or its input does not
            have is refused in the first call that shows it, at the latest when the block ends.

    Example:
        >>> model = regard.load("embedded:lm")
        >>> text = "The animal didn't cross the street because it was too"
        >>> with regard.edit(model, regard.Block("it", "animal"), regard.Ablate(5, 6), text=text):
        ...     answer = regard.generate(model, text, max_new_tokens=5)
    """
    check_model(model)
    for each in edits:
        if not isinstance(each, Block | Ablate | Patch):
            raise TypeError(f"an edit is a Block, an Ablate or a Patch; got {each!r}")
    words = None
    if text is not None:
        known = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
        words = words_in(text, read_text(known, text))
    bound = [Bound(with_numbers(each, words)) for each in edits]
    if not bound:
        yield
        return
    with editing_model(model, bound) as editor:
        yield
    editor.check()


@contextmanager
def head_outputs(model: nn.Module, layers: Layers = None) -> Iterator[HeadOutputs]:
    """Keep what each head puts out in the block, before the output projection, for `Patch`.

    Args:
        model: The module that is called in the block.
        layers: Numbers, counted from 0 in the order in which they are called, or names of modules,
            or of modules around them. Default: all.

    Yields:
        `HeadOutputs`: a mapping from the module's dotted name to a tensor (B, H, T, E). A second
        text replaces the first; in generation the new tokens are appended.

    Example:
        >>> model = regard.load("embedded:lm")
        >>> with regard.head_outputs(model) as clean:
        ...     output = model(torch.tensor([[3, 1, 4, 1, 5]]))
        >>> patch = regard.Patch(0, 2, source=clean)  # head 2 of layer 0, as it was in this run
    """
    check_model(model)
    outputs = HeadOutputs()
    with editing_model(model, [Bound(Capture(outputs, layers))]) as editor:
        yield outputs
    editor.check()


@contextmanager
def editing_model(model: nn.Module, bound: Sequence[Bound]) -> Iterator[Editor]:
    """Run an editor for the duration of the block, without checks at its end."""
    editor = Editor(model, bound)
    with hook_models(model), editing(editor), editor.follow():
        yield editor


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; expected a torch.nn.Module, such as "
            "regard.load(...) gives"
        )
    for name, module in model.named_modules():
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if compiled or type(module).__name__ == "OptimizedModule":
            raise ValueError(
                f"{name or type(model).__name__} is compiled, and compiled code runs unseen; edit "
                "the model it was made from (model._orig_mod, or before model.compile())"
            )
