"""Attention rollout: how much the last states draw on each token, by way of all layers.

Rollout models a layer as half the mean of its heads and half the identity, with rows normalised to
1, and multiplies the layers. Here no layer's matrix is ever whole. What a few states draw on is one
row each; these rows are multiplied by each layer, from the last to the first, and of the layer a
strip of rows is computed at a time. So one state costs O(N) memory at any length, and all states
are computed in blocks of rows.

Letters: N tokens, R states asked about; n rows of a strip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from regard.lens.lazy_weights import Array
from regard.lens.schema import Place

Strip: TypeAlias = Callable[[int, int], Array]
"""The mean weights of a layer's heads in the given rows (first, past the last), (n, N) float64."""

Part: TypeAlias = Callable[[int, tuple[int, int, int, int]], Array]
"""The weights of a head in a window: first and past-the-last query, then key."""

BLOCK = 1 << 25
"""Numbers in a block of rows; while it is multiplied there are two such blocks."""
STRIP = 1 << 22
"""Weights of a layer that are computed at once."""


def find_stack(places: Sequence[Place]) -> list[int]:
    """The places that rollout goes through: self-attention of the last stack, if all fit."""
    own = [(n, place) for n, place in enumerate(places) if place.kind == "self"]
    stack = [n for n, place in own if _stem(place.name) == _stem(own[-1][1].name)]
    sizes = {size for n in stack for size in (places[n].n_queries, places[n].n_keys)}
    return stack if len(sizes) == 1 else []


def _stem(name: str) -> str:
    """A place's name without its numbers: the same for all layers of a stack."""
    return ".".join(part for part in name.split(".") if not part.isdecimal()).partition("@")[0]


def mean_strip(n_heads: int, n_keys: int, part: Part) -> Strip:
    """A function that computes the mean over heads of the rows it is asked for."""

    def strip(a: int, z: int) -> Array:
        total = np.zeros((z - a, n_keys))
        for head in range(n_heads):
            total += part(head, (a, z, 0, n_keys))
        return total / n_heads

    return strip


def token_numbers(tokens: int | Sequence[int], n_tokens: int) -> Array:
    """Token indices, of which negative ones count from the end, as an array of indices from 0."""
    numbers = np.atleast_1d(tokens)
    if not numbers.size or not np.issubdtype(numbers.dtype, np.integer):
        raise TypeError(f"tokens must be the number of a token, or several, got {tokens!r}")
    for number in numbers[(numbers < -n_tokens) | (numbers >= n_tokens)]:
        raise IndexError(f"token {number} is out of range; there are {n_tokens}")
    return np.asarray(numbers % n_tokens)


def roll_rows(states: Array, n_tokens: int, layers: Sequence[Strip]) -> Array:
    """What each of these last states draws on, (R, N); `layers` are ordered first to last."""
    drawn_rn = np.zeros((len(states), n_tokens))
    drawn_rn[np.arange(len(states)), states] = 1.0
    for strip in reversed(layers):
        drawn_rn = step_back(drawn_rn, strip)
    return drawn_rn


def roll_columns(tokens: Array, n_tokens: int, layers: Sequence[Strip]) -> Array:
    """How much each last state draws on these tokens, (N, R); `layers` from first to last."""
    drawn_nr = np.zeros((n_tokens, len(tokens)))
    drawn_nr[tokens, np.arange(len(tokens))] = 1.0
    for strip in layers:
        drawn_nr = step_on(drawn_nr, strip)
    return drawn_nr


def roll_all(n_tokens: int, layers: Sequence[Strip]) -> Array:
    """What every last state draws on, (N, N)."""
    found_nn = np.empty((n_tokens, n_tokens))
    height = max(BLOCK // n_tokens, 1)
    for a in range(0, n_tokens, height):
        z = min(a + height, n_tokens)
        found_nn[a:z] = roll_rows(np.arange(a, z), n_tokens, layers)
    return found_nn


def step_on(drawn_nr: Array, strip: Strip) -> Array:
    """From how much a layer's input states draw on the tokens, compute it for its output states."""
    n_tokens = len(drawn_nr)
    found_nr = np.empty_like(drawn_nr)
    height = max(STRIP // n_tokens, 1)
    for a in range(0, n_tokens, height):
        z = min(a + height, n_tokens)
        mean_nn = strip(a, z)
        found_nr[a:z] = (mean_nn @ drawn_nr + drawn_nr[a:z]) / (mean_nn.sum(1) + 1.0)[:, None]
    return found_nr


def step_back(drawn_rn: Array, strip: Strip) -> Array:
    """From what the last states draw on a layer's output, compute what they draw on its input."""
    n_tokens = drawn_rn.shape[1]
    found_rn = np.zeros_like(drawn_rn)
    height = max(STRIP // n_tokens, 1)
    used = np.flatnonzero(drawn_rn.any(0))
    for a in range(used[0], used[-1] + 1, height):
        z = min(a + height, used[-1] + 1)
        mean_nn = strip(a, z)
        # A row is (weights + itself) / 2, divided by its sum, (sum of weights + 1) / 2.
        part_rn = drawn_rn[:, a:z] / (mean_nn.sum(1) + 1.0)
        found_rn += part_rn @ mean_nn
        found_rn[:, a:z] += part_rn
    return found_rn
