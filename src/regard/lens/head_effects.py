"""How much heads matter, as a value (`Effect`), and how a record stores such values.

Why: where a head looks and whether that matters belong side by side, in the file and on the page.

How: an `Effect` is what `regard.effect` returns. A record's description has a list of them: what
was measured, and the change with all heads edited at once. For each place, arrays hold the change
of every recorded head, and of its layer. Only numpy is needed to read them; `effect.py` measures.

Letters: N effects, L layers, H heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from regard.lens.lazy_weights import Array
from regard.lens.schema import MOST_EFFECTS, CheckedArrays, Description, refuse
from regard.lens.token_labels import clean, clean_label


@dataclass(frozen=True, eq=False)
class Effect:
    """What `regard.effect` returns: changes of a log-probability, in nats.

    A change is below 0 where the edit makes the continuation less likely. print() shows the heads
    that change most; `record.add_effect(effect)` keeps it in a record, for the page.

    Args:
        heads: (L, H), each head edited alone; NaN for heads that a layer does not have.
        layers: (L,), all heads of one layer edited together.
        whole: All heads of all layers edited together.
        log_prob: The log-probability without any edit.
        token: What it is the log-probability of: the next token, a continuation, a masked word.
        edit: What was done to the heads, in words.
        text: What the model read.
        edge: Where a look was forbidden, the positions that look and those looked at; else None.
    """

    heads: Array
    layers: Array
    whole: float
    log_prob: float
    token: str
    edit: str
    text: str = ""
    edge: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def top(self, n: int = 5) -> list[tuple[int, int, float]]:
        """The n heads whose edit changes most, as (layer, head, change)."""
        # NaN, which marks a head that does not exist, sorts last.
        order = np.argsort(-np.abs(self.heads), axis=None, kind="stable")
        order = order[: min(n, np.count_nonzero(~np.isnan(self.heads)))]
        numbers = zip(*np.unravel_index(order, self.heads.shape), strict=True)
        return [(int(at[0]), int(at[1]), float(self.heads[at])) for at in numbers]

    @property
    def title(self) -> str:
        likely = f"log-probability {self.log_prob:.3f}, {math.exp(self.log_prob):.1%}"
        return f"What {self.edit} does to {self.token!r} ({likely})"

    def __str__(self) -> str:
        lines = [f"  {f'{layer}.{head}':<12} {change:+.3f}" for layer, head, change in self.top(8)]
        lines.append(f"  all heads    {self.whole:+.3f}")
        return "\n".join([f"{self.title}, by layer.head", *lines])


def put_effect(effect: Effect, about: Description, arrays: CheckedArrays) -> None:
    """Add an effect to a record; refuse one of another text, or of a model of another shape."""
    check_fits(effect, about)
    for number, place in enumerate(about.places):
        own = effect.heads[place.layer, list(place.heads)]
        now = {"effect": own[None], "effect_layer": effect.layers[place.layer][None]}
        for name, values in now.items():
            old = [arrays.get(number, name)] if arrays.has(number, name) else []
            arrays.put(number, name, np.concatenate([*old, values]).astype(np.float64))
    query, key = (None, None) if effect.edge is None else (list(side) for side in effect.edge)
    numbers = {"log_prob": float(effect.log_prob), "whole": float(effect.whole)}
    said = {"token": clean_label(effect.token), "edit": clean_label(effect.edit)}
    about.effects = [*about.effects, {**said, **numbers, "query": query, "key": key}]


def check_fits(effect: Effect, about: Description) -> None:
    if len(about.effects) >= MOST_EFFECTS:
        raise ValueError(
            f"the record has {len(about.effects)} effects, the most that a file can keep; keep the "
            "others in another record of the text"
        )
    if about.window is not None:
        raise ValueError("an effect cannot be added to a record of windows; record the text in one")
    said = clean(effect.text).strip()
    if about.text and said not in about.text:
        raise ValueError(
            f"the effect is of the text {said[:60]!r}, and the record of {about.text[:60]!r}; "
            "expected one of the text that was recorded"
        )
    layers = [place.layer for place in about.places]
    if len(set(layers)) < len(layers) or any(place.kind != "self" for place in about.places):
        raise ValueError(
            "the record has several texts or several stacks of layers; an effect can be added to a "
            "record of one text and one stack"
        )
    most = max(layers) + 1, max(max(place.heads) for place in about.places) + 1
    if effect.heads.shape[0] < most[0] or effect.heads.shape[1] < most[1]:
        what = f"{most[0]} layers of up to {most[1]} heads"
        raise ValueError(
            f"the record has {what}, and the effect is of {effect.heads.shape[0]} layers of up to "
            f"{effect.heads.shape[1]} heads; give one of the same model"
        )
    numbers = [effect.heads[place.layer, list(place.heads)] for place in about.places]
    numbers += [effect.layers, np.array([effect.whole, effect.log_prob])]
    if not all(np.isfinite(part).all() for part in numbers):
        raise ValueError("the effect is not finite, or lacks a head that was recorded")
    last = max((max(side) for side in effect.edge or ()), default=-1)
    if last >= len(about.tokens):
        raise ValueError(
            f"the effect's edge names token {last}, and the record has {len(about.tokens)} tokens; "
            "give one of the same text"
        )


def read_effects(about: Description, arrays: CheckedArrays) -> list[Effect]:
    """The effects of a record; heads and layers that were not recorded are NaN."""
    N, places = len(about.effects), about.places
    if not N:
        return []
    n_layers = max(place.layer for place in places) + 1
    heads_nlh = np.full((N, n_layers, max(max(p.heads) for p in places) + 1), np.nan)
    layers_nl = np.full((N, n_layers), np.nan)
    for number, place in enumerate(places):
        changes_nh, whole_n = (arrays.get(number, name) for name in ("effect", "effect_layer"))
        if len(changes_nh) != N or len(whole_n) != N:
            refuse(f"place {number} has the changes of {len(changes_nh)} effects, of {N}")
        heads_nlh[:, place.layer, list(place.heads)] = changes_nh
        layers_nl[:, place.layer] = whole_n
    found = []
    for n, entry in enumerate(about.effects):
        edge = None if entry["query"] is None else (tuple(entry["query"]), tuple(entry["key"]))
        said = {name: entry[name] for name in ("whole", "log_prob", "token", "edit")}
        found.append(Effect(heads_nlh[n], layers_nl[n], **said, text=about.text, edge=edge))
    return found
