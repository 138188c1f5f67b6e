"""A record: what was seen in a model, in memory and as one `.regard` file.

The format, version 1, in ten lines. A file is a safetensors file (see `format.py`) whose metadata
holds one JSON description: version, model, created, kept ("statistics" or "qk"), text, tokens (the
labels), spans (characters of each token), source_text and source_tokens (what cross-attention looks
at), and places in the order in which they were called: name, layer, kind, sizes, heads, causal,
exact_zoom, and a rule: scale, softcap, the key head of each head, biases, and the cell of `base`.
Arrays of place p are named `p.<name>`. By head and query: entropy, peak, peak_key, distance, mass,
top_weights, top_keys; by head and key: received, seen_by; by score and head: spots, counts (see
`heads`); by query: ids, real (0 sees nothing, 1 padding, 2 counts); and map. Where kept is "qk": q
(H,T,D) and k (G,S,D) in the model's type (bfloat16 as its bits), lse, the runs of keys that rows
see (first, pairs), biasN.*, and where maps are large base, exact means of square cells.

Any part of a map is made when asked for, exactly (`kept.py` says how), with numpy alone. A record
of statistics has its map at one resolution only, and says so when more is asked.

Letters: H heads, T queries, S keys.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from regard.lens import format as files
from regard.lens.lazy_weights import Array, BadRecord, Kept, Window, shares
from regard.lens.schema import (
    MAX_LABEL,
    SPOTS,
    STATISTICS,
    Description,
    Place,
    Shelf,
    make_kept,
    read_description,
)
from regard.lens.token_labels import label

__all__ = ["Comparison", "Place", "Record"]

SCORES = (*SPOTS, "separator", "local", "broad")
ROLLOUT_TOKENS = 2048
_VIEW = "regard.view"


@final
class Record:
    """What was seen. `watch` makes one, `Record.open` reads one; numbers count from 0.

    `place` is a number in `places`, `head` one of the heads that were recorded there.
    """

    def __init__(self, told: Description, arrays: Mapping[str, Array]) -> None:
        self._told = told
        self._shelf: Shelf | None = Shelf(told, arrays) if told.places else None
        self._kept: dict[int, Kept] = {}

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Record:
        """Read a file; `BadRecord` says what is wrong with it."""
        told, arrays = files.read(path)
        return Record(read_description(told), arrays)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file, whole or not at all; what `open` would refuse is not written."""
        for place in range(len(self.places)):
            for name in self._arrays.names(place):
                self._arrays.get(place, name)
        told = self._told.to_json()
        try:
            read_description(told)
        except BadRecord as wrong:
            raise ValueError(
                f"{os.fspath(path)} was not written, as it could not be opened again: {wrong}; "
                "record.describe(text=..., tokens=..., spans=...) says anew what was read"
            ) from None
        files.write(path, told, self._arrays.all())

    @property
    def _arrays(self) -> Shelf:
        if self._shelf is None:
            raise RuntimeError(
                "the record is still being made: it can be asked when the `with watch(...)` block "
                "has ended"
            )
        return self._shelf

    def _fill(self, told: Description, arrays: Mapping[str, Array]) -> None:
        """Take what was seen, at the end of a block; what was described before stays."""
        self._told.places, self._told.rules, self._told.kept = told.places, told.rules, told.kept
        self._told.model = self._told.model or told.model
        self._told.created = told.created
        longest = max(place.n_queries for place in told.places)
        if not self._told.tokens:
            self._told.tokens = told.tokens or [str(n) for n in range(longest)]
        if self._told.source_tokens is None:
            self._told.source_tokens = told.source_tokens
        self._shelf = Shelf(self._told, arrays)

    def describe(
        self,
        *,
        text: str | None = None,
        tokens: Sequence[str] | None = None,
        spans: Sequence[tuple[int, int]] | None = None,
        source_text: str | None = None,
        source_tokens: Sequence[str] | None = None,
        model: str | None = None,
    ) -> Record:
        """Say what was read: the words to show. Each can be given in the block or after it.

        Tokens and the model have names of at most 4,096 characters; a longer one is cut, and ends
        in "…". The text and the spans have all of it.
        """
        told = self._told
        told.text = told.text if text is None else clean(text)
        told.tokens = told.tokens if tokens is None else [clean_label(token) for token in tokens]
        told.spans = told.spans if spans is None else [(int(a), int(z)) for a, z in spans]
        told.source_text = told.source_text if source_text is None else clean(source_text)
        if source_tokens is not None:
            told.source_tokens = [clean_label(token) for token in source_tokens]
        told.model = told.model if model is None else clean_label(model)
        return self

    def read(self, tokenizer: Any) -> Record:
        """Name the tokens that the model read, by its tokenizer: ours, or Hugging Face's.

        The text is what the queries of the last place are; the source, for cross-attention, what
        its keys are.
        """
        last = self.places[-1]
        source = next((p for p in self.places if p.kind == "cross"), None)
        own = self._ids_of(last.n_queries, backwards=True)
        if own is None:
            raise ValueError(
                "the model was not seen reading tokens; record.describe(tokens=...) names them"
            )
        said = label(tokenizer, own.tolist())
        self.describe(text=said.text, tokens=said.tokens, spans=said.spans)
        found = None if source is None else self._ids_of(source.n_keys, backwards=False)
        if found is not None:
            said = label(tokenizer, found.tolist())
            self.describe(source_text=said.text, source_tokens=said.tokens)
        return self

    def _ids_of(self, n_queries: int, backwards: bool) -> Array | None:
        """The tokens of the first or last self-attention over so many."""
        places = list(enumerate(self.places))
        for number, place in reversed(places) if backwards else places:
            if place.kind == "self" and place.n_queries == n_queries:
                return self.ids(number)
        return None

    @property
    def text(self) -> str:
        return self._told.text

    @property
    def tokens(self) -> list[str]:
        """The labels of the tokens; their numbers where none were given."""
        return self._told.tokens

    @property
    def spans(self) -> list[tuple[int, int]] | None:
        return self._told.spans

    @property
    def source_text(self) -> str | None:
        return self._told.source_text

    @property
    def source_tokens(self) -> list[str] | None:
        return self._told.source_tokens

    @property
    def model(self) -> str:
        return self._told.model

    @property
    def created(self) -> str:
        return self._told.created

    @property
    def version(self) -> int:
        return self._told.version

    @property
    def kept(self) -> str:
        """ "statistics" or "qk"."""
        return self._told.kept

    @property
    def places(self) -> list[Place]:
        return self._told.places

    def find(self, name: str) -> int:
        """The number of the place with this dotted name."""
        for number, place in enumerate(self.places):
            if place.name == name:
                return number
        raise KeyError(f"no place is named {name!r}; there are {[p.name for p in self.places]}")

    def ids(self, place: int = 0) -> Array | None:
        """The token ids of a place's queries, where the model read any."""
        self._check_place(place)
        return self._arrays.get(place, "ids") if self._arrays.has(place, "ids") else None

    def statistics(self, place: int) -> dict[str, Array]:
        """What was measured at a place, by name; by head and query, received by head and key."""
        self._check_place(place)
        shelf = self._arrays
        return {name: shelf.get(place, name) for name in STATISTICS if shelf.has(place, name)}

    def received(self, place: int) -> Array:
        """What each key gets from all queries together, (H, S)."""
        self._check_place(place)
        return self._arrays.get(place, "received")

    def heads(self) -> dict[str, Array]:
        """What heads do: score -> (places, heads), NaN where a place has no such head or score.

        Means over the queries that are no padding; `lens/head_scores.py` has the formulas.
        previous, next, same, induction and first are weights on one key; separator is the weight
        on all tokens without letters or digits; local is the mean distance |Σ (i-j) w| in tokens;
        broad is the mean entropy in nats.
        """
        wide = max(place.n_heads for place in self.places)
        found = {name: np.full((len(self.places), wide), np.nan) for name in SCORES}
        for number, place in enumerate(self.places):
            for name, values in self._heads_of(number).items():
                found[name][number, : place.n_heads] = values
        return found

    def _heads_of(self, place: int) -> dict[str, Array]:
        shelf, here = self._arrays, self.places[place]
        found: dict[str, Array] = {}
        if shelf.has(place, "spots"):
            sums, counts = shelf.get(place, "spots"), shelf.get(place, "counts")
            with np.errstate(all="ignore"):
                means = np.where(counts > 0, sums / counts, np.nan)
            found.update(zip(SPOTS, means, strict=True))
        real, sees = np.ones(here.n_queries, np.bool_), np.ones(here.n_queries, np.bool_)
        if shelf.has(place, "real"):
            kinds = np.asarray(shelf.get(place, "real"))
            real, sees = kinds == 2, kinds > 0
        if shelf.has(place, "distance") and real.any():
            found["local"] = np.abs(shelf.get(place, "distance"))[:, real].mean(1)
        if shelf.has(place, "entropy") and real.any():
            found["broad"] = np.asarray(shelf.get(place, "entropy"))[:, real].mean(1)
        labels = self.tokens if here.kind == "self" else self.source_tokens
        if shelf.has(place, "received") and labels is not None and len(labels) == here.n_keys:
            marks = np.array([is_separator(label) for label in labels])
            if marks.any() and sees.any():
                received = np.asarray(shelf.get(place, "received"))
                found["separator"] = received[:, marks].sum(1) / sees.sum()
        return found

    def pairs(self, relations: Sequence[tuple[int, int]]) -> Array:
        """The mean weight over pairs (query, key), such as (pronoun, antecedent): (places, heads).

        Places that do not have these tokens, or whose weights were not kept, are NaN.
        """
        if not relations:
            raise ValueError("relations must name at least one pair (query, key)")
        wide = max(place.n_heads for place in self.places)
        found = np.full((len(self.places), wide), np.nan)
        for number, here in enumerate(self.places):
            fits = all(0 <= t < here.n_queries and 0 <= s < here.n_keys for t, s in relations)
            if fits and (here.exact_zoom or self._whole(number) is not None):
                for head in range(here.n_heads):
                    weights = [self.weight(number, head, t, s) for t, s in relations]
                    found[number, head] = float(np.mean(weights))
        return found

    def map(
        self,
        place: int,
        head: int,
        window: Window | None = None,
        size: tuple[int, int] | None = None,
    ) -> Array:
        """The exact mean weight of each of size[0] × size[1] equal cells of a window.

        window: (t0, t1, s0, s1), first and past the last; the whole map unless given. size: one
        cell a weight unless given, at most 512 on a side. Quick are windows of up to some million
        weights, and all windows whose cells lie on the grid of `base`: multiples of its cell size.
        """
        here = self._check_place(place, head)
        window = (0, here.n_queries, 0, here.n_keys) if window is None else window
        t0, t1, s0, s1 = window
        if not (0 <= t0 < t1 <= here.n_queries and 0 <= s0 < s1 <= here.n_keys):
            raise ValueError(
                f"the window {window} must not be empty and must lie inside T={here.n_queries} "
                f"queries and S={here.n_keys} keys"
            )
        size = (min(t1 - t0, 512), min(s1 - s0, 512)) if size is None else size
        if not (1 <= size[0] <= 8192 and 1 <= size[1] <= 8192):
            raise ValueError(f"size must be from 1 × 1 to 8192 × 8192 cells, got {size}")
        if here.exact_zoom:
            return self._weights(place).map(head, window, size)
        return self._pictured(place, head, window, size)

    def rows(self, place: int, head: int, query: int) -> Array:
        """What one query looks at, (S,)."""
        here = self._check_place(place, head)
        check_index("query", query, here.n_queries)
        if here.exact_zoom:
            return self._weights(place).row(head, query)
        window = (query, query + 1, 0, here.n_keys)
        return np.asarray(self._pictured(place, head, window, (1, here.n_keys))[0])

    def column(self, place: int, head: int, key: int) -> Array:
        """Who looks at one key, (T,)."""
        here = self._check_place(place, head)
        check_index("key", key, here.n_keys)
        if here.exact_zoom:
            return self._weights(place).column(head, key)
        window = (0, here.n_queries, key, key + 1)
        return np.asarray(self._pictured(place, head, window, (here.n_queries, 1))[:, 0])

    def weight(self, place: int, head: int, t: int, s: int) -> float:
        """How much query t looks at key s."""
        return float(self.map(place, head, (t, t + 1, s, s + 1), (1, 1))[0, 0])

    def rollout(self) -> Array:
        """Attention rollout, (N, N): how much each last state draws on each token, by way of all
        layers. A layer is half the mean of its heads and half itself, rows made to sum to 1; the
        layers are multiplied. Self-attention of one stack, of at most 2,048 tokens.
        """
        stack = self._stack()
        n = self.places[stack[0]].n_queries
        if n > ROLLOUT_TOKENS:
            raise ValueError(
                f"rollout multiplies whole matrices, and these are {n:,} × {n:,}; it is for texts "
                f"of up to {ROLLOUT_TOKENS:,} tokens"
            )
        total = np.eye(n)
        for place in stack:
            heads = range(self.places[place].n_heads)
            mean = sum(self.map(place, h, size=(n, n)).astype(np.float64) for h in heads)
            layer = 0.5 * (np.asarray(mean) / len(heads) + np.eye(n))
            total = (layer / layer.sum(1, keepdims=True)) @ total
        return np.asarray(total)

    def _stack(self) -> list[int]:
        """The self-attention places of the last stack: a decoder's, if there is one."""
        own = [n for n, place in enumerate(self.places) if place.kind == "self"]
        last = [n for n in own if _stem(self.places[n].name) == _stem(self.places[own[-1]].name)]
        sizes = {(self.places[n].n_queries, self.places[n].n_keys) for n in last}
        if len(sizes) != 1 or len(set(sizes.pop())) != 1:
            raise ValueError("rollout needs self-attention with as many queries as keys throughout")
        return last

    def compare(self, other: Record) -> Comparison:
        """The other record less this one, head by head; both must have the same places."""
        here = [(place.kind, place.n_heads) for place in self.places]
        there = [(place.kind, place.n_heads) for place in other.places]
        if here != there:
            raise ValueError(
                f"records are compared head by head, and these have {len(here)} and {len(there)} "
                "places, or other kinds or numbers of heads in them"
            )
        mine, theirs = self.heads(), other.heads()
        scores = {name: theirs[name] - mine[name] for name in mine}
        statistics: list[dict[str, Array]] = []
        for place in range(len(here)):
            one, two = self.statistics(place), other.statistics(place)
            statistics.append(
                {
                    name: np.asarray(two[name], np.float64) - np.asarray(one[name], np.float64)
                    for name in one
                    if name in two and one[name].shape == two[name].shape and "key" not in name
                }
            )
        return Comparison(scores, statistics, self.tokens == other.tokens)

    def plot(self, *args: Any, **kwargs: Any) -> Any:
        """A picture for paper, by `regard.view.plots`."""
        return _view("plot")(self, *args, **kwargs)

    def html(self, path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Write a page that opens offline, by `regard.view.write_page`."""
        return _view("write_page")(path, self, **kwargs)

    def show(self, **kwargs: Any) -> Any:
        """The picture in a notebook, by `regard.view.make_widget`."""
        return _view("make_widget")(self, **kwargs)

    def _check_place(self, place: int, head: int = 0) -> Place:
        assert self._arrays is not None
        check_index("place", place, len(self.places))
        check_index("head", head, self.places[place].n_heads)
        return self.places[place]

    def _weights(self, place: int) -> Kept:
        if place not in self._kept:
            self._kept[place] = make_kept(self._told, self._arrays, place)
        return self._kept[place]

    def _whole(self, place: int) -> Array | None:
        """The whole map, where a record of statistics has it weight by weight."""
        here = self.places[place]
        if not self._arrays.has(place, "map"):
            return None
        stored = self._arrays.get(place, "map")
        return stored if stored.shape[1:] == (here.n_queries, here.n_keys) else None

    def _pictured(self, place: int, head: int, window: Window, size: tuple[int, int]) -> Array:
        """The answer of a place whose weights cannot be made again."""
        here, whole = self.places[place], self._whole(place)
        t0, t1, s0, s1 = window
        if whole is not None:
            _, down = shares(size[0], (t0, t1), (t0, t1))
            _, across = shares(size[1], (s0, s1), (s0, s1))
            return np.asarray(down @ (whole[head, t0:t1, s0:s1] @ across.T), np.float32)
        why = f"{here.name} kept statistics only"
        if self._arrays.has(place, "map") and window == (0, here.n_queries, 0, here.n_keys):
            stored = np.asarray(self._arrays.get(place, "map")[head])
            (down, rest), (across, left) = (
                divmod(x, y) for x, y in zip(stored.shape, size, strict=True)
            )
            if down and across and not rest and not left:
                cells = stored.reshape(size[0], down, size[1], across)
                return np.asarray(cells.mean((1, 3)), np.float32)
            why += f", with a map of {stored.shape[0]} × {stored.shape[1]} cells"
        raise ValueError(
            f'{why}; record with watch(model, keep="qk") to see every part of the map and weights'
        )

    def __repr__(self) -> str:
        if self._shelf is None:
            return "Record(in the making)"
        return f"Record({self.model!r}, {len(self.tokens)} tokens, {len(self.places)} places)"


@dataclass(frozen=True, eq=False)
class Comparison:
    """What differs between two records: the second less the first.

    `heads`: score -> (places, heads). `statistics`: for each place, by name, where the sizes agree
    (none when the texts have other lengths). `same_text`: whether the tokens are the same.
    """

    heads: dict[str, Array]
    statistics: list[dict[str, Array]]
    same_text: bool

    def largest(self, score: str, n: int = 10) -> list[tuple[int, int, float]]:
        """The n heads that differ most in a score: (place, head, difference)."""
        gaps = self.heads[score]
        order = np.argsort(-np.nan_to_num(np.abs(gaps), nan=-1.0), axis=None, kind="stable")
        found = [tuple(np.unravel_index(at, gaps.shape)) for at in order[:n]]
        return [(int(p), int(h), float(gaps[p, h])) for p, h in found if np.isfinite(gaps[p, h])]


def is_separator(label: str) -> bool:
    """Whether a token is punctuation, white space, or a special one such as [SEP] or </s>."""
    word = label.removeprefix("##").strip("\u2581\u0120\u010a \n\t")
    special = len(word) > 2 and (word[0], word[-1]) in (("<", ">"), ("[", "]"))
    return special or not any(character.isalnum() for character in word)


def clean(text: str) -> str:
    """A text that can be written to a file: halves of characters become question marks."""
    return text.encode("utf-8", "replace").decode()


def clean_label(text: str) -> str:
    """The same of a name to show, which is cut where a file would not take it."""
    whole = clean(text)
    return whole if len(whole) <= MAX_LABEL else whole[: MAX_LABEL - 1] + "…"


def check_index(what: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise IndexError(f"{what} {value} is out of range; there are {count}")


def _stem(name: str) -> str:
    """A place's name without its numbers: the same for all layers of a stack."""
    return ".".join(part for part in name.split(".") if not part.isdecimal()).partition("@")[0]


def _view(name: str) -> Any:
    """A function of the view, which is loaded only here; the lens works without it."""
    return getattr(importlib.import_module(_VIEW), name)
