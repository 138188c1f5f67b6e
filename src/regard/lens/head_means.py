"""Means of head scores over queries that are not padding, computed from a record's arrays.

With numpy alone, since records are read where torch is not installed. `head_scores.py` has the
formulas and computes the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from regard.lens.lazy_weights import Array
from regard.lens.schema import SPOTS, Place
from regard.lens.token_labels import is_separator

MOST_ADDED = 1 << 22  # weights of a place up to which `reach` is computed from them


def mean_scores(
    place: Place,
    kept: Mapping[str, Array],
    weights: Callable[[int], Array] | None,
    labels: Sequence[str] | None,
) -> dict[str, Array]:
    """Score -> (H,). weights: computes all weights of a head; labels: of the keys; where known."""
    found: dict[str, Array] = {}
    if "spots" in kept:
        sums, counts = kept["spots"], kept["counts"]
        means = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
        found.update(zip(SPOTS, means, strict=True))
    # 0: sees nothing, 1: padding, 2: counts.
    real = np.asarray(kept["real"]) if "real" in kept else np.full(place.n_queries, 2)
    if "entropy" in kept and (real == 2).any():
        found["broad"] = np.asarray(kept["entropy"])[:, real == 2].mean(1)
    far_ht = reach(place, kept, weights) if (real == 2).any() else None
    if far_ht is not None:
        found["local"] = far_ht[:, real == 2].mean(1)
    if "received" in kept and labels is not None and len(labels) == place.n_keys:
        marks = np.array([is_separator(label) for label in labels])
        if marks.any() and real.any():
            received = np.asarray(kept["received"])
            found["separator"] = received[:, marks].sum(1) / (real > 0).sum()
    return found


def reach(
    place: Place, kept: Mapping[str, Array], weights: Callable[[int], Array] | None
) -> Array | None:
    """The mean of |i - j| of each row, (H, T); computed from few enough weights if not measured."""
    if "reach" in kept or "distance" not in kept or place.causal:
        return kept.get("reach", kept.get("distance"))
    T, S = place.n_queries, place.n_keys
    if weights is None or place.n_heads * T * S > MOST_ADDED:
        return None
    gaps_ts = np.abs(np.arange(T)[:, None] + S - T - np.arange(S))
    return np.stack([(weights(head) * gaps_ts).sum(1) for head in range(place.n_heads)])
