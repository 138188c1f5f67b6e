"""What a masked language model predicts for the gaps of a text: `regard.fill(model, text)`.

Why: BERT and its like predict a word from the words on both sides of it.

How: [MASK] in a text is replaced by the model's own mask token. The model reads the text once, and
the softmax over the vocabulary at each gap gives its candidates. Each gap is filled on its own,
with the others left open: the likeliest words of two gaps need not fit together. `regard.effect`
uses the same functions for a masked word.

Left out: words of several tokens, filling one gap after another, several texts at once.

Letters: B rows, T tokens, N positions, V vocabulary.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.lens.edit.positions import read_text
from regard.lens.token_labels import name_ids

GAP = "[MASK]"


@dataclass(frozen=True)
class Candidate:
    """A candidate token for a gap: its text (with a leading space, if any), probability and id."""

    token: str
    probability: float
    id: int

    @property
    def label(self) -> str:
        """The token as shown: without spaces around it; if it is only spaces, its Python repr."""
        return self.token.strip() or repr(self.token)


@dataclass(frozen=True)
class Gap:
    """A gap: its token position, and the candidates for it, the likeliest first."""

    position: int
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Filled:
    """A text with gaps, as it was given, and the candidates for each gap, in order."""

    text: str
    gaps: tuple[Gap, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """A note for texts with several gaps; none for a single gap."""
        if len(self.gaps) < 2:
            return ()
        return ("Each gap is filled by itself: candidates of two gaps need not go together.",)

    def __str__(self) -> str:
        lines = [self.text, *self.notes]
        for number, gap in enumerate(self.gaps, start=1):
            lines += [f"gap {number}"] if len(self.gaps) > 1 else []
            lines += [f"  {one.probability:.3f} {one.label}" for one in gap.candidates]
        return "\n".join(lines)


class Gapped(NamedTuple):
    """Token ids of a text, and the positions of its gaps among them."""

    ids: list[int]
    positions: list[int]


@torch.no_grad()
def fill_gaps(
    model: nn.Module, text: str, tokenizer: Any, *, top: int, max_len: int | None = None
) -> Filled:
    """The `top` likeliest tokens for each gap; a text of more than `max_len` tokens is refused."""
    ids, positions = find_gaps(tokenizer, use_own_mask(tokenizer, text))
    if not positions:
        raise ValueError(
            f"the text has no gap; put {GAP} where a word is asked for: The {GAP} sat on the mat."
        )
    if max_len is not None and len(ids) > max_len:
        raise ValueError(
            f"the text has {len(ids):,} tokens, and the model takes {max_len:,}; give the part "
            "around the gap"
        )
    probs_nv = read_logits(model, [ids], positions)[0].float().softmax(-1)
    best = probs_nv.topk(min(top, probs_nv.shape[1]), dim=-1)
    rows = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    names = name_ids(tokenizer, {number for numbers, _ in rows for number in numbers})
    gaps = (
        Gap(at, tuple(Candidate(names[n], p, n) for n, p in zip(*row, strict=True)))
        for at, row in zip(positions, rows, strict=True)
    )
    return Filled(text, tuple(gaps))


def check_eval(model: nn.Module) -> None:
    if model.training:
        raise ValueError(
            "the model is in training mode, in which dropout changes what it predicts: "
            "call model.eval() first"
        )


def find_mask(tokenizer: Any) -> int | None:
    """The id of the mask token of a tokenizer, ours or Hugging Face's; None if it has none."""
    if hasattr(tokenizer, "special"):
        own: int | None = tokenizer.special.mask
        return own
    found: int | None = getattr(tokenizer, "mask_token_id", None)
    return found


def use_own_mask(tokenizer: Any, text: str) -> str:
    """The text with [MASK] replaced by this tokenizer's own mask token."""
    mask = find_mask(tokenizer)
    return text if mask is None else text.replace(GAP, name_ids(tokenizer, [mask])[mask].strip())


def find_gaps(tokenizer: Any, text: str) -> Gapped:
    ids, mask = read_text(tokenizer, text).ids, find_mask(tokenizer)
    return Gapped(ids, [at for at, number in enumerate(ids) if number == mask])


def read_logits(model: nn.Module, rows: list[list[int]], positions: list[int]) -> Tensor:
    """Logits (B, N, V) at the given positions; only these are computed if the model allows it."""
    ids_bt = torch.tensor(rows, device=next(model.parameters()).device)
    head, run = getattr(model, "head", None), getattr(model, "run", None)
    if isinstance(head, nn.Module) and run is not None:
        logits: Tensor = head(run(ids_bt)[:, positions])
        return logits
    known = inspect.signature(model.forward).parameters
    first = min(positions) if "logits_to_keep" in known else 0
    more = {"logits_to_keep": ids_bt.shape[1] - first} if first else {}
    found = getattr(model(ids_bt, **more), "logits", None)
    if not isinstance(found, Tensor) or found.dim() != 3:
        raise ValueError(
            f"{type(model).__name__} returns no logits (B, T, V); give a language model, or a "
            "masked model with its head"
        )
    return found[:, [position - first for position in positions]]
