"""Records made by hand, with the methods that the view asks for: numpy only, and fully known.

Each head has one habit (previous token, first token, induction, …) written as a score of the pair
(query, key); weights are its softmax. What a record answers is computed per request, as the real
one does, so that a long record costs nothing until it is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from regard.lens.head_effects import Effect
from regard.lens.head_table import SURVEYED, Head, HeadTable, Moments
from regard.lens.next_tokens import NextTokens
from regard.lens.record import Place

HABITS = ("previous", "first", "induction", "local", "broad", "same", "separator", "next")
SCORES = ("previous", "next", "same", "induction", "first", "separator", "local", "broad")
SENTENCE = "The animal didn't cross the street because it was too tired ."
ENGLISH = SENTENCE.split()


def make_place(
    name: str, layer: int, kind: str, n_heads: int, n_queries: int, n_keys: int, causal: bool
) -> Place:
    return Place(
        name=name,
        layer=layer,
        kind=kind,
        n_heads=n_heads,
        n_queries=n_queries,
        n_keys=n_keys,
        causal=causal,
        heads=tuple(range(n_heads)),
    )


@dataclass
class FakeRecord:
    tokens: list[str] = field(default_factory=lambda: list(ENGLISH))
    text: str = ""
    spans: list[tuple[int, int]] | None = None
    source_tokens: list[str] | None = None
    source_text: str | None = None
    model: str = "fake"
    created: str = "2026-11-15T12:00:00Z"
    version: int = 1
    kept: str = "qk"
    places: list[Any] = field(default_factory=list)
    strength: float = 1.0
    trained_len: int | None = None
    notes: list[str] = field(default_factory=list)
    window: int | None = None
    n_read: int = 0
    vocabulary: dict[int, str] | None = None
    predicted: NextTokens | None = None
    ends: list[int] | None = None
    norms: list[np.ndarray] | None = None
    sums: list[tuple[np.ndarray, np.ndarray]] | None = None
    worth: list[Effect] = field(default_factory=list)

    def scores(self, place: int, head: int, t: np.ndarray, s: np.ndarray) -> np.ndarray:
        here = self.places[place]
        gap = (t + here.n_keys - here.n_queries) - s
        seed = place * 31 + head * 7
        noise = np.sin(t * 12.9898 + s * 78.233 + seed) * 1.1
        if here.kind == "cross":
            target = t * here.n_keys / here.n_queries
            out = noise * 0.5 - np.abs(s - target - (head % 3)) * (3.0 - head % 4 * 0.6)
        else:
            out = noise * 0.7 + self._habit(place, head, t, s, gap) * self.strength
        return np.where(gap < 0, -np.inf, out) if here.causal else out

    def _habit(
        self, place: int, head: int, t: np.ndarray, s: np.ndarray, gap: np.ndarray
    ) -> np.ndarray:
        habit = HABITS[(head + place * 3) % len(HABITS)]
        sharp = 5.0 if (place + head) % 3 else 2.6
        if habit == "previous":
            return np.where(gap == 1, sharp, 0.0)
        if habit == "next":
            return np.where(gap == -1, sharp, 0.0)
        if habit == "same":
            return np.where(gap == 0, sharp, 0.0)
        if habit == "first":
            return np.where(s == 0, sharp + 1, 0.0)
        if habit == "separator":
            return np.where(s % 11 == 10, sharp, 0.0)
        if habit == "induction":
            return np.where((gap % 7 == 6) & (gap > 0), sharp, 0.0)
        if habit == "local":
            return -np.abs(gap) * 0.35
        return np.zeros(np.broadcast(t, s).shape)

    def weights(self, place: int, head: int, t0: int, t1: int) -> np.ndarray:
        here = self.places[place]
        t = np.arange(t0, t1, dtype=np.float32)[:, None]
        s = np.arange(here.n_keys, dtype=np.float32)[None]
        scores = self.scores(place, head, t, s)
        scores -= scores.max(axis=1, keepdims=True)
        weights = np.exp(scores)
        return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)

    def map(
        self, place: int, head: int, window: tuple[int, int, int, int], size: tuple[int, int]
    ) -> np.ndarray:
        t0, t1, s0, s1 = window
        height, width = size
        if size == (t1 - t0, s1 - s0):
            return self.weights(place, head, t0, t1)[:, s0:s1]
        rows = [
            np.array_split(
                self.weights(place, head, int(part[0]), int(part[-1]) + 1)[:, s0:s1], width, axis=1
            )
            for part in np.array_split(np.arange(t0, t1), height)
        ]
        return np.array([[cell.mean() for cell in row] for row in rows], dtype=np.float32)

    def grid(self, place: int) -> tuple[int, int] | None:
        return self.places[place].n_queries, self.places[place].n_keys

    def has_weights(self, place: int) -> bool:
        return self.places[place].exact_zoom

    def rows(self, place: int, head: int, query: int) -> np.ndarray:
        return self.weights(place, head, query, query + 1)[0]

    def column(self, place: int, head: int, key: int) -> np.ndarray:
        return self.weights(place, head, 0, self.places[place].n_queries)[:, key]

    def weight(self, place: int, head: int, t: int, s: int) -> float:
        return float(self.rows(place, head, t)[s])

    def statistics(self, place: int) -> dict[str, np.ndarray]:
        here = self.places[place]
        whole = np.stack([self.weights(place, h, 0, here.n_queries) for h in range(here.n_heads)])
        return {"received": whole.sum(axis=1), "peak": whole.max(axis=2)}

    def next_tokens(self) -> NextTokens | None:
        return self.predicted

    def steps(self) -> np.ndarray | None:
        return None if self.ends is None else np.array(self.ends)

    def value_norms(self, place: int) -> np.ndarray | None:
        return None if self.norms is None else self.norms[place]

    def gradients(self, place: int) -> tuple[np.ndarray, np.ndarray] | None:
        return None if self.sums is None else self.sums[place]

    def effects(self) -> list[Effect]:
        return self.worth

    def rollout_places(self) -> list[int]:
        own = [n for n, place in enumerate(self.places) if place.kind == "self"]
        stack = [n for n in own if self.places[n].stack == self.places[own[-1]].stack]
        sizes = {(self.places[n].n_queries, self.places[n].n_keys) for n in stack}
        return stack if len(sizes) == 1 and len(set(*sizes)) == 1 else []

    def rollout(self, token: int | None = None) -> np.ndarray:
        """Layer after layer, each half the mean of its heads and half the token itself."""
        n = self.places[self.rollout_places()[0]].n_queries
        drawn = np.eye(n)
        for place in self.rollout_places():
            heads = range(self.places[place].n_heads)
            mean = np.mean([self.weights(place, head, 0, n) for head in heads], 0)
            layer = (mean + np.eye(n)) / 2
            drawn = layer / layer.sum(1, keepdims=True) @ drawn
        return drawn if token is None else drawn[token]

    def drawn_on(self, token: int) -> np.ndarray:
        return self.rollout()[:, token]

    def visible(self, place: int) -> np.ndarray:
        here = self.places[place]
        own = np.arange(here.n_queries) + here.n_keys - here.n_queries
        return own + 1 if here.causal else np.full(here.n_queries, here.n_keys)

    def counts(self) -> dict[str, np.ndarray]:
        return {name: np.full(values.shape, 99) for name, values in self.heads().items()}

    def heads(self) -> dict[str, np.ndarray]:
        shape = (len(self.places), max(place.n_heads for place in self.places))
        out = {name: np.full(shape, np.nan) for name in SCORES}
        for place, here in enumerate(self.places):
            for head in range(here.n_heads):
                habit = HABITS[(head + place * 3) % len(HABITS)]
                for name in SCORES:
                    low = 0.05 + 0.1 * abs(np.sin(place + 3 * head + len(name)))
                    high = (0.92 if (place + head) % 3 else 0.55) * self.strength
                    told = high if name == habit and here.kind == "self" else low
                    out[name][place, head] = told
        return out


def spread(tokens: list[str], joint: str = " ") -> tuple[str, list[tuple[int, int]]]:
    """The text of some words, and where in it each lies."""
    text, spans = "", []
    for token in tokens:
        start = len(text) + (len(joint) if text else 0)
        text = text + (joint if text else "") + token
        spans.append((start, start + len(token)))
    return text, spans


def decoder(
    tokens: list[str] | None = None, layers: int = 4, n_heads: int = 8, **fields: Any
) -> FakeRecord:
    """A language model's record: causal self-attention."""
    tokens = list(ENGLISH) if tokens is None else tokens
    text, spans = spread(tokens)
    places = [
        make_place(f"layers.{n}.attn", n, "self", n_heads, len(tokens), len(tokens), True)
        for n in range(layers)
    ]
    fields = {"text": text, "spans": spans, "model": "fake:lm", **fields}
    return FakeRecord(tokens=tokens, places=places, **fields)


def translator() -> FakeRecord:
    """An encoder–decoder's record, English to Japanese: three kinds of places."""
    source = ["<en>", "The", "cat", "sat", "on", "the", "mat", ".", "</s>"]
    target = ["<s>", "猫", "は", "マット", "の", "上", "に", "座っ", "た", "。"]
    t, s = len(target), len(source)
    places = [make_place(f"encoder.layers.{n}.attn", n, "self", 4, s, s, False) for n in range(2)]
    for n in range(2):
        places.append(make_place(f"decoder.layers.{n}.self_attn", n, "self", 4, t, t, True))
        places.append(make_place(f"decoder.layers.{n}.cross_attn", n, "cross", 4, t, s, False))
    text, spans = spread(target, "")
    return FakeRecord(
        tokens=target,
        text=text,
        spans=spans,
        source_tokens=source,
        source_text=" ".join(source),
        model="fake:translate",
        places=places,
    )


def coarse(n: int = 1000) -> FakeRecord:
    """A record of statistics: one picture of 128 × 128 cells, no single weights."""
    made = decoder([f"w{i}" for i in range(n)], layers=1, n_heads=2)
    made.places = [replace(place, exact_zoom=False) for place in made.places]
    pictures = [made.map(0, head, (0, n, 0, n), (128, 128)) for head in range(2)]

    def picture(
        place: int, head: int, window: tuple[int, int, int, int], size: tuple[int, int]
    ) -> np.ndarray:
        if window != (0, n, 0, n) or size != (128, 128):
            raise ValueError("kept statistics only")
        return pictures[head]

    def refuse(*_: int) -> np.ndarray:
        raise ValueError("kept statistics only")

    made.statistics = lambda place: {"received": np.ones((2, n))}  # type: ignore[method-assign]
    made.grid = lambda place: (128, 128)  # type: ignore[method-assign]
    made.map, made.rows, made.column = picture, refuse, refuse  # type: ignore[method-assign]
    return made


class Ramp(FakeRecord):
    """Weights in closed form: query t looks at key s ≤ t by 2 (s + 1) / ((t + 1) (t + 2)), head 1
    at itself by half of it all. Any cell's mean costs its edges, whatever the length."""

    def row_part(self, head: int, t: np.ndarray, end: np.ndarray) -> np.ndarray:
        """The sum of weights of each query on the keys before each end."""
        seen = np.clip(end, 0, t + 1)
        share = seen * (seen + 1) / ((t + 1) * (t + 2))
        return share if head == 0 else share / 2 + (end > t) / 2

    def map(
        self, place: int, head: int, window: tuple[int, int, int, int], size: tuple[int, int]
    ) -> np.ndarray:
        t0, t1, s0, s1 = window
        t = np.arange(t0, t1, dtype=np.float64)[:, None]
        ends = np.linspace(s0, s1, size[1] + 1).round()[None]
        sums = np.diff(self.row_part(head, t, ends), axis=1) / np.diff(ends, axis=1)
        cells = [part.mean(0) for part in np.array_split(sums, size[0])]
        return np.array(cells, dtype=np.float32)

    def rows(self, place: int, head: int, query: int) -> np.ndarray:
        n = self.places[place].n_keys
        return self.map(place, head, (query, query + 1, 0, n), (1, n))[0]

    def column(self, place: int, head: int, key: int) -> np.ndarray:
        n = self.places[place].n_queries
        return self.map(place, head, (0, n, key, key + 1), (n, 1))[:, 0]

    def statistics(self, place: int) -> dict[str, np.ndarray]:
        return {}


def ramp(n: int) -> Ramp:
    """A long record that answers at once."""
    plain = decoder([f"w{i}" for i in range(n)], layers=2, n_heads=2)
    return Ramp(**vars(plain))


def surveyed(layers: int = 2, n_heads: int = 3, model: str = "fake:lm") -> HeadTable:
    """What a survey of 11 texts found; of head 1 none had the score of induction."""
    values = np.random.default_rng(3).uniform(0, 1, (11, layers * n_heads, len(SURVEYED)))
    values[:, 1, 3] = np.nan
    heads = [Head(f"layers.{n}.attn", n, head) for n in range(layers) for head in range(n_heads)]
    return HeadTable(model, heads, Moments.of(values), 12, 1, 2)
