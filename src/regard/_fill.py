"""Predict the words for the gaps of a text, by a masked language model: `regard.fill`.

Why: the shortest question to BERT and its like, and the first to one that was just trained.

How: check that the model is one that fills gaps, and run it by `lens/fill.py`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from regard._look import load_named

if TYPE_CHECKING:
    from regard.lens.fill import Filled
    from regard.models import Transformer
    from regard.tokens import Tokenizer


def fill(
    model: str | os.PathLike[str] | Transformer,
    text: str,
    top: int = 5,
    *,
    tokenizer: Tokenizer | None = None,
) -> Filled:
    """The likeliest tokens for each [MASK] in a text, by a masked language model.

    Args:
        model: What `regard.load` returned, or what it takes: BERT, RoBERTa, or a model that
            `regard train mlm` trained.
        text: A text with one [MASK] or several, whatever the model's own mask token is called.
            Each is filled by itself, with the others left open.
        top: How many candidates for each.
        tokenizer: Instead of the model's own.

    Returns:
        `Filled`: for each gap its candidates, the likeliest first, with their probabilities.

    Raises:
        ValueError, TypeError: A model without a masked-word head, or a text without [MASK].

    Example:
        >>> filled = regard.fill("embedded:encoder", "The [MASK] sat on the mat.")
        >>> best = filled.gaps[0].candidates[0]
        >>> token, probability = best.token, best.probability
    """
    from regard._check import check_count
    from regard.lens.fill import check_eval, fill_gaps

    if not isinstance(text, str):
        raise TypeError(f"text is a {type(text).__name__}; expected str")
    if not text.strip():
        raise ValueError("the text is empty; give one with a gap: The [MASK] sat on the mat.")
    check_count("top", top)
    loaded, name = load_named(model, "of `transformers`, save it in a folder and give that")
    check_masked(loaded, name)
    check_eval(loaded)
    reader = loaded.tokenizer if tokenizer is None else tokenizer
    if reader is None or reader.special.mask is None:
        lack = "no tokenizer beside its weights" if reader is None else "a tokenizer without a mask"
        raise ValueError(f"{name} has {lack}, so it cannot read a gap; give tokenizer=")
    return fill_gaps(loaded, text, reader, top=top, max_len=loaded.config.max_len)


def check_masked(model: Transformer, name: str) -> None:
    """Refuse a model that fills no gaps, and say what it does instead."""
    config = model.config
    if config.head.kind == "masked":
        return
    is_a = "reads texts and has no layer that says words"
    todo = "give one that was saved with it, such as BertForMaskedLM"
    if config.decoder and config.encoder:
        is_a, todo = "translates", "`regard translate` is for it"
    elif config.decoder:
        is_a = "is a causal language model, which sees no word behind a gap"
        todo = "`regard generate` is for it"
    what = f"{name} ({config.family}) {is_a}, so it fills no gaps"
    raise ValueError(f"{what}: {todo}; `regard train mlm` trains one that does")
