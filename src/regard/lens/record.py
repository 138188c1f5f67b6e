"""A record: what was recorded of a model's attention, in memory and as one `.regard` file.

The format, version 1: a safetensors file (`format.py`) whose metadata holds one JSON description:
version, model, created, kept ("statistics" or "qk"), text, tokens (labels), spans (characters of
each token), places, and where known source_text and source_tokens (what cross-attention looks at),
trained_len (tokens the model was made for), window (tokens it read at a time, of a text read in
windows), vocabulary (names of token ids that may come next), notes (what was not recorded), effects
(edit: what was done; token, log_prob; whole: with all heads; query, key: of a look). A place, in
the order of calls, has name, layer, kind, sizes, heads, causal, exact_zoom, and a rule: scale,
softcap, key heads, biases, the cell of base. Its arrays are named `p.<name>`, p its number:
- (H, T, ...): entropy, peak, peak_key, distance, mass, top_weights, top_keys, reach (mean |i - j|,
  where that is not the distance); (H, S): received, seen_by; a map of cells;
- spots and counts by score and head (`head_scores.py`); (T,): ids, real (0 sees nothing, 1 padding,
  2 counts); steps: how many queries each of several calls had;
- if kept is "qk": q (H, T, D) and k (G, S, D) in the model's dtype (bfloat16 as its bits), lse, the
  runs of keys that rows see (first, pairs), biasN.*, and of large maps base, means of square cells;
- if asked for: value_norms (H, S), of values after the output projection; next_probs and next_ids
  (T, K), what may come next, and given (T,), how probable the token read there was (-1: unknown);
  gradient_rows (H, T) and gradient_columns (H, S), sums of attention × gradient; effect (N, H) and
  effect_layer (N,), changes of a log-probability, one for each of the description's effects.

Any part of a map is computed when it is asked for, exactly, with numpy alone (`lazy_weights.py`). A
record of statistics has its map at one resolution, and says so when more is asked for.

Letters: H heads, T queries, S keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, final

import numpy as np

from regard.lens import format as files
from regard.lens import rollout as rolling
from regard.lens.comparison import Comparison, compare
from regard.lens.head_effects import Effect, put_effect, read_effects
from regard.lens.head_means import mean_scores
from regard.lens.lazy_weights import Array, BadRecord, Kept, Window, shares
from regard.lens.next_tokens import NextTokens, read_next_tokens
from regard.lens.schema import (
    SPOTS,
    STATISTICS,
    CheckedArrays,
    Description,
    Place,
    check_index,
    find_ends,
    make_kept,
    read_description,
)
from regard.lens.token_labels import clean, clean_label, label, name_ids
from regard.lens.viewers import VIEWERS

__all__ = ["Comparison", "Place", "Record"]

SCORES = (*SPOTS, "separator", "local", "broad")


def _described(name: str) -> Any:
    """A property that reads a field of the record's description."""
    return property(lambda record: getattr(record._about, name))


@final
class Record:
    """What was recorded of a model's attention, by `regard.watch`, `regard.look` or `Record.open`.

    `places` are the attention layers in the order of their calls; `place` in the methods below is
    an index into it, `head` the index of a head that was recorded there, both from 0. `tokens` are
    labels of the tokens. Arrays are numpy's. The page of it: `show()`, `html(path)`, `plot(path)`.
    """

    text: str = _described("text")
    tokens: list[str] = _described("tokens")
    spans: list[tuple[int, int]] | None = _described("spans")
    source_text: str | None = _described("source_text")
    source_tokens: list[str] | None = _described("source_tokens")
    model: str = _described("model")
    created: str = _described("created")
    version: int = _described("version")
    kept: str = _described("kept")
    trained_len: int | None = _described("trained_len")
    window: int | None = _described("window")
    vocabulary: dict[int, str] | None = _described("vocabulary")
    places: list[Place] = _described("places")
    notes: list[str] = _described("notes")  # what could not be recorded, and why

    def __init__(self, about: Description, arrays: Mapping[str, Array]) -> None:
        self._about = about
        self._checked = CheckedArrays(about, arrays) if about.places else None
        self._weights_of: dict[int, Kept] = {}

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Record:
        """Read a .regard file. A damaged one raises `BadRecord`, which says what is wrong."""
        about, arrays = files.read(path)
        return Record(read_description(about), arrays)

    def check(self) -> Record:
        """Read and check every array now, not at its first use; `BadRecord` if one is wrong."""
        self._arrays.all()
        self.next_tokens()
        self.steps()
        self.effects()
        for number, place in enumerate(self.places):
            if place.exact_zoom:
                self.weight(number, 0, 0, 0)
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one .regard file, atomically. ValueError: it could not be opened again."""
        arrays, about = self._arrays.all(), self._about.to_json()
        try:
            read_description(about)
        except BadRecord as wrong:
            raise ValueError(
                f"{os.fspath(path)} was not written, as it could not be opened again: {wrong}; "
                "record.describe(text=..., tokens=..., spans=...) says anew what was read"
            ) from None
        files.write(path, about, arrays)

    @property
    def _arrays(self) -> CheckedArrays:
        if self._checked is None:
            raise RuntimeError("the record is empty until the `with watch(...)` block has ended")
        return self._checked

    def _fill(self, seen: Description, arrays: Mapping[str, Array]) -> None:
        """Store what was recorded, when the block ends; earlier descriptions of it are kept."""
        about = self._about
        about.places, about.rules, about.kept = seen.places, seen.rules, seen.kept
        about.model, about.created = about.model or seen.model, seen.created
        about.trained_len, about.notes = seen.trained_len, list(map(clean_label, seen.notes))
        longest = max(place.n_queries for place in seen.places)
        about.tokens = about.tokens or seen.tokens or [str(n) for n in range(longest)]
        self._checked = CheckedArrays(about, arrays)

    def describe(
        self,
        *,
        text: str | None = None,
        tokens: Sequence[str] | None = None,
        spans: Sequence[tuple[int, int]] | None = None,
        source_text: str | None = None,
        source_tokens: Sequence[str] | None = None,
        model: str | None = None,
        vocabulary: Mapping[int, str] | None = None,
    ) -> Record:
        """Give the text and the labels to show, in the `watch` block or after it.

        tokens: a label for each token; labels and the model's name are cut to 4,096 characters.
        spans: the characters (first, past the last) of each token in the text. source_text and
        source_tokens: what cross-attention looks at. vocabulary: names of ids in `next_tokens`.
        """
        about = self._about
        for name, given in (("tokens", tokens), ("source_tokens", source_tokens)):
            if isinstance(given, str):
                raise TypeError(f"{name} is one text; expected a list with a label for each token")
        about.text = about.text if text is None else clean(text)
        about.tokens = about.tokens if tokens is None else [clean_label(label) for label in tokens]
        about.spans = about.spans if spans is None else [(int(a), int(z)) for a, z in spans]
        about.source_text = about.source_text if source_text is None else clean(source_text)
        if source_tokens is not None:
            about.source_tokens = [clean_label(label) for label in source_tokens]
        about.model = about.model if model is None else clean_label(model)
        if vocabulary is not None:
            about.vocabulary = {int(n): clean_label(name) for n, name in vocabulary.items()}
        return self

    def read(self, tokenizer: Any) -> Record:
        """Label the tokens that the model read, by its tokenizer: regard's, or Hugging Face's.

        The text is taken from the queries of the last place, the source of cross-attention from
        its keys. ValueError: no token ids were recorded.
        """
        own = self._ids_of(self.places[-1].n_queries, range(len(self.places) - 1, -1, -1))
        if own is None:
            raise ValueError(
                "no token ids were recorded; give the labels by record.describe(tokens=...)"
            )
        labels = label(tokenizer, own.tolist())
        self.describe(text=labels.text, tokens=labels.tokens, spans=labels.spans)
        self.name_candidates(tokenizer)
        cross = next((place for place in self.places if place.kind == "cross"), None)
        source = None if cross is None else self._ids_of(cross.n_keys, range(len(self.places)))
        if source is not None:
            labels = label(tokenizer, source.tolist())
            self.describe(source_text=labels.text, source_tokens=labels.tokens)
        return self

    def name_candidates(self, tokenizer: Any) -> Record:
        """Name the likeliest next tokens, if `watch(keep="predictions")` recorded them."""
        found = self.next_tokens()
        if found is not None:
            self.describe(vocabulary=name_ids(tokenizer, np.unique(found.ids[found.ids >= 0])))
        return self

    def _ids_of(self, n_queries: int, places: Iterable[int]) -> Array | None:
        for number in places:
            here = self.places[number]
            if here.kind == "self" and here.n_queries == n_queries:
                return self.ids(number)
        return None

    def find(self, name: str) -> int:
        """The number of the place with this dotted name."""
        names = [place.name for place in self.places]
        if name not in names:
            raise KeyError(f"no place is named {name!r}; there are {names}")
        return names.index(name)

    def ids(self, place: int = 0) -> Array | None:
        """The token ids of a place's queries, (T,); None where the model read none."""
        return self._kept(place, "ids")

    def statistics(self, place: int) -> dict[str, Array]:
        """What was measured at a place, by name: arrays (H, T, ...), `received` (H, S)."""
        self._check_place(place)
        arrays = self._arrays
        return {name: arrays.get(place, name) for name in STATISTICS if arrays.has(place, name)}

    def received(self, place: int) -> Array:
        """The sum of the weights that each key gets from all queries, (H, S)."""
        self._check_place(place)
        return self._arrays.get(place, "received")

    def value_norms(self, place: int) -> Array | None:
        """The length of each key's value after the output projection, (H, S), where it was kept.

        Times a weight it is what the key adds to the query: ‖weight · f(x)‖ (Kobayashi et al.).
        """
        return self._kept(place, "value_norms")

    def gradients(self, place: int) -> tuple[Array, Array] | None:
        """The sums of attention × gradient by query (H, T) and by key (H, S), where kept.

        Heads that share a key head all have the mean of their column sums.
        """
        rows, columns = (self._kept(place, f"gradient_{name}") for name in ("rows", "columns"))
        return None if rows is None or columns is None else (rows, columns)

    def next_tokens(self) -> NextTokens | None:
        """A language model's likeliest next tokens after each token; None if they were not kept."""
        place = self._last_with("next_ids")
        return None if place is None else read_next_tokens(partial(self._arrays.get, place))

    def steps(self) -> Array | None:
        """Of a generation, the index of the last token that each call read; None otherwise."""
        place = self._last_with("steps")
        if place is None:
            return None
        return find_ends(self._arrays.get(place, "steps"), self.places[place].n_queries)

    def effects(self) -> list[Effect]:
        """The effects that `add_effect` was given: how much each head matters."""
        return read_effects(self._about, self._arrays)

    def add_effect(self, effect: Effect) -> Record:
        """Keep what `regard.effect` returned for this model and text, in the file and the page."""
        put_effect(effect, self._about, self._arrays)
        return self

    def _last_with(self, name: str) -> int | None:
        own = (n for n, place in enumerate(self.places) if place.kind == "self")
        return max((n for n in own if self._arrays.has(n, name)), default=None)

    def _kept(self, place: int, name: str) -> Array | None:
        self._check_place(place)
        return self._arrays.get(place, name) if self._arrays.has(place, name) else None

    def visible(self, place: int) -> Array:
        """How many keys each query sees, (T,), in the head that sees most."""
        here = self._check_place(place)
        T, S = here.n_queries, here.n_keys
        runs = self._weights(place).runs if here.exact_zoom else None
        if runs is not None:
            return np.asarray(np.max([runs.counts(h) for h in range(here.n_heads)], axis=0))
        return np.clip(np.arange(T) + S - T + 1, 0, S) if here.causal else np.full(T, S)

    def heads(self) -> dict[str, Array]:
        """What each head does: {score: array (places, heads)}, NaN where there is no such score.

        Means over all queries but padding. previous, next, same, first: the weight on the token
        before, after, itself, the first. induction: on the token after an earlier occurrence of
        the query's. separator: on tokens without letters or digits. local: the distance
        Σ |i - j| w, in tokens. broad: the entropy, in nats. Formulas: `lens/head_scores.py`.
        """
        found = {name: self._no_numbers() for name in SCORES}
        for number, place in enumerate(self.places):
            for name, values in self._heads_of(number).items():
                found[name][number, : place.n_heads] = values
        return found

    def counts(self) -> dict[str, Array]:
        """How many queries each mean of single weights in `heads` is over; same shapes."""
        found = {name: np.zeros(self._no_numbers().shape, np.int64) for name in SPOTS}
        for number, place in enumerate(self.places):
            if self._arrays.has(number, "counts"):
                for name, values in zip(SPOTS, self._arrays.get(number, "counts"), strict=True):
                    found[name][number, : place.n_heads] = values
        return found

    @property
    def n_read(self) -> int:
        """How many tokens the model read in the longest of its texts; 0 where it read none."""
        places = enumerate(self.places)
        read = [place.n_queries for n, place in places if self._arrays.has(n, "ids")]
        return max(read, default=0)

    def _no_numbers(self) -> Array:
        """An array of NaN, (places, heads); it stays NaN where a place has no such head."""
        return np.full((len(self.places), max(place.n_heads for place in self.places)), np.nan)

    def _heads_of(self, place: int) -> dict[str, Array]:
        arrays, here = self._arrays, self.places[place]
        names = (*STATISTICS, "spots", "counts", "real")
        kept = {name: arrays.get(place, name) for name in names if arrays.has(place, name)}
        labels = self.tokens if here.kind == "self" else self.source_tokens
        window = (0, here.n_queries, 0, here.n_keys)
        weights = partial(self._all_of, place, window=window) if self.has_weights(place) else None
        return mean_scores(here, kept, weights, labels)

    def pairs(self, relations: Sequence[tuple[int, int]]) -> Array:
        """The mean weight over pairs (query, key), such as (pronoun, antecedent): (places, heads).

        Places that do not have these tokens, or whose weights were not kept, are NaN.
        """
        if not relations:
            raise ValueError("relations must name at least one pair (query, key)")
        found = self._no_numbers()
        for number, here in enumerate(self.places):
            fits = all(0 <= t < here.n_queries and 0 <= s < here.n_keys for t, s in relations)
            if fits and self.has_weights(number):
                for head in range(here.n_heads):
                    weights = [self.weight(number, head, t, s) for t, s in relations]
                    found[number, head] = float(np.mean(weights))
        return found

    def grid(self, place: int) -> tuple[int, int] | None:
        """The resolution of the map: (T, S), or that of a coarse one; None if none was kept."""
        here = self._check_place(place)
        if here.exact_zoom:
            return here.n_queries, here.n_keys
        if not self._arrays.has(place, "map"):
            return None
        _, height, width = self._arrays.get(place, "map").shape
        return height, width

    def has_weights(self, place: int) -> bool:
        """Whether single weights are known there, and not only a coarse map."""
        here = self.places[place]
        return self.grid(place) == (here.n_queries, here.n_keys)

    def map(
        self,
        place: int,
        head: int,
        window: Window | None = None,
        size: tuple[int, int] | None = None,
    ) -> Array:
        """A head's map, (size[0], size[1]): each cell is the exact mean of the weights in it.

        window: (t0, t1, s0, s1), first and past the last query and key; the whole map by default.
        size: by default one cell for each weight, but at most 512 × 512. Windows of up to some
        million weights are fast, and so are all whose cells are multiples of those of `base`.
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
        """The weights of one query on all keys, (S,)."""
        here = self._check_place(place, head)
        check_index("query", query, here.n_queries)
        return np.asarray(self._all_of(place, head, (query, query + 1, 0, here.n_keys))[0])

    def column(self, place: int, head: int, key: int) -> Array:
        """The weights of all queries on one key, (T,)."""
        here = self._check_place(place, head)
        check_index("key", key, here.n_keys)
        return np.asarray(self._all_of(place, head, (0, here.n_queries, key, key + 1))[:, 0])

    def _all_of(self, place: int, head: int, window: Window) -> Array:
        if self.places[place].exact_zoom:
            return self._weights(place).part(head, window)
        t0, t1, s0, s1 = window
        return self._pictured(place, head, window, (t1 - t0, s1 - s0))

    def weight(self, place: int, head: int, t: int, s: int) -> float:
        """The weight of query t on key s."""
        return float(self.map(place, head, (t, t + 1, s, s + 1), (1, 1))[0, 0])

    def rollout(self, tokens: int | Sequence[int] | None = None) -> Array:
        """Attention rollout (Abnar and Zuidema 2020): what each last state draws on, (N, N).

        A layer is half the mean of its heads and half the identity, its rows normalised to 1; the
        layers of self-attention in the last stack are multiplied. tokens: one token, for (N,), or
        several, for (len, N), negative from the end; these need memory for a few rows only.
        """
        n, layers = self._rollout_layers()
        if tokens is None:
            return rolling.roll_all(n, layers)
        found = rolling.roll_rows(rolling.token_numbers(tokens, n), n, layers)
        return found if np.ndim(tokens) else np.asarray(found[0])

    def drawn_on(self, token: int) -> Array:
        """A column of the rollout: how much each last state draws on one token, (N,)."""
        n, layers = self._rollout_layers()
        return np.asarray(rolling.roll_columns(rolling.token_numbers(token, n), n, layers)[:, 0])

    def _rollout_layers(self) -> tuple[int, list[rolling.Strip]]:
        stack = self.rollout_places()
        if not stack:
            raise ValueError("rollout needs self-attention with as many queries as keys throughout")
        return self.places[stack[0]].n_queries, [self._strip_of(place) for place in stack]

    def rollout_places(self) -> list[int]:
        """The places that rollout goes through: self-attention of the last stack, if all fit."""
        return rolling.find_stack(self.places)

    def _strip_of(self, place: int) -> rolling.Strip:
        """A function that computes rows of a place's weights, averaged over its heads."""
        heads, n = range(self.places[place].n_heads), self.places[place].n_keys
        if not self.has_weights(place):  # a map that is finer than the weights determines them too
            maps = (self.map(place, head, size=(n, n)).astype(np.float64) for head in heads)
            whole = np.asarray(sum(maps)) / len(heads)
            return lambda a, z: whole[a:z]
        self._all_of(place, 0, (0, 1, 0, 1))  # a damaged place raises here, before any work
        return rolling.mean_strip(len(heads), n, partial(self._all_of, place))

    def compare(self, other: Record) -> Comparison:
        """The other record minus this one, head by head; both must have the same places."""
        return compare(self, other)

    def plot(self, *args: Any, **kwargs: Any) -> Any:
        """A figure as .png, .svg or .pdf; the arguments are those of `regard.view.plot`."""
        return VIEWERS["plot"](self, *args, **kwargs)

    def html(self, path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Write a page that opens offline; arguments as in `regard.view.write_page`."""
        return VIEWERS["write_page"](path, self, **kwargs)

    def show(self, **kwargs: Any) -> Any:
        """Show the page in a notebook; arguments as in `regard.view.make_widget`."""
        return VIEWERS["make_widget"](self, **kwargs)

    def _check_place(self, place: int, head: int = 0) -> Place:
        assert self._arrays is not None
        check_index("place", place, len(self.places))
        check_index("head", head, self.places[place].n_heads)
        return self.places[place]

    def _weights(self, place: int) -> Kept:
        if place not in self._weights_of:
            self._weights_of[place] = make_kept(self._about, self._arrays, place)
        return self._weights_of[place]

    def _pictured(self, place: int, head: int, window: Window, size: tuple[int, int]) -> Array:
        here, grid = self.places[place], self.grid(place)
        t0, t1, s0, s1 = window
        if self.has_weights(place):
            whole = self._arrays.get(place, "map")
            _, down = shares(size[0], (t0, t1), (t0, t1))
            _, across = shares(size[1], (s0, s1), (s0, s1))
            return np.asarray(down @ (whole[head, t0:t1, s0:s1] @ across.T), np.float32)
        why = f"{here.name} kept statistics only"
        if grid is not None and window == (0, here.n_queries, 0, here.n_keys):
            if not grid[0] % size[0] and not grid[1] % size[1]:
                picture = np.asarray(self._arrays.get(place, "map")[head])
                cells = picture.reshape(size[0], -1, size[1], grid[1] // size[1])
                return np.asarray(cells.mean((1, 3)), np.float32)
            why += f", with a map of {grid[0]} × {grid[1]} cells"
        raise ValueError(
            f'{why}; record with watch(model, keep="qk") to see every part of the map and weights'
        )

    def __repr__(self) -> str:
        if self._checked is None:
            return "Record(in the making)"
        return f"Record({self.model!r}, {len(self.tokens)} tokens, {len(self.places)} places)"
