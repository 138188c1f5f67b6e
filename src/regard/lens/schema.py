"""What is in a record, and how each part of it is checked before it is used.

A record is a description (plain JSON: `Description`, and a `Place` for each place) and arrays by
name; those of place p are `p.q`, `p.lse` and so on. `FORMS` defines the types, axes and range of
each array. They are the same for a record in memory and one from a file, and an array is checked
when it is first used.

Letters: H heads, G key heads, T queries, S keys, D head width; see `record.py` for the format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from regard.lens.format import NAMES, VERSION, File
from regard.lens.lazy_weights import Added, Array, BadRecord, Base, Kept, Relative, Runs, Whole

MAX_TOKENS = 1 << 24
MAX_TEXT = 1 << 26
MAX_LABEL = 4096
MAX_PLACES = 4096
MAX_HEADS = 4096
MOST_EFFECTS = 16
FLOATS = ("F32", "F64")
SPOTS = ("previous", "next", "same", "induction", "first")
"""The scores that are sums of single weights, in the order of the rows of `spots`."""
LATER = ("trained_len", "window", "vocabulary", "notes", "effects")
"""Fields that older records lack, and that are written only where they have a value."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """An attention layer of a recorded model, by its dotted name: a place where heads attend.

    `heads` are the numbers, in the model, of the recorded heads. `exact_zoom`: whether any part of
    the map can be computed; else there are only statistics and a coarse map of the whole.
    """

    name: str
    layer: int
    kind: str
    n_heads: int
    n_queries: int
    n_keys: int
    causal: bool
    heads: tuple[int, ...] = ()
    exact_zoom: bool = True

    @property
    def stack(self) -> str:
        """The stack by the dotted name: "decoder" (with its `encoder_attn`), "encoder" or ""."""
        name = self.name.lower()
        return next((stack for stack in ("decoder", "encoder") if stack in name), "")


@dataclass(kw_only=True)
class Description:
    """Everything in a record but its arrays; `rules` has, per place, what its weights depend on."""

    version: int = VERSION
    model: str = ""
    created: str = ""
    kept: str = "statistics"
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    spans: list[tuple[int, int]] | None = None
    source_text: str | None = None
    source_tokens: list[str] | None = None
    trained_len: int | None = None
    window: int | None = None
    vocabulary: dict[int, str] | None = None
    notes: list[str] = field(default_factory=list)
    effects: list[dict[str, Any]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    rules: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if name != "rules"}
        for name in LATER:
            if plain[name] is None or plain[name] == []:
                del plain[name]
        if self.vocabulary is not None:
            plain["vocabulary"] = [[number, name] for number, name in self.vocabulary.items()]
        plain["spans"] = None if self.spans is None else [list(span) for span in self.spans]
        plain["places"] = [
            {**vars(place), "heads": list(place.heads), "rule": rule}
            for place, rule in zip(self.places, self.rules, strict=True)
        ]
        return plain


def refuse(why: str) -> NoReturn:
    raise BadRecord(f"not a good record: {why}")


@dataclass(frozen=True)
class Is:
    """What a value of the description must be: a test for it, and the same in words."""

    fits: Callable[[Any], bool]
    words: str

    def or_none(self) -> Is:
        return Is(lambda x: x is None or self.fits(x), f"{self.words}, or null")


def text(longest: int) -> Is:
    return Is(lambda x: isinstance(x, str) and len(x) <= longest, f"a text of up to {longest:,}")


def whole(low: int, high: int) -> Is:
    return Is(lambda x: type(x) is int and low <= x <= high, f"a whole number, {low} to {high:,}")


def number(low: float) -> Is:
    return Is(lambda x: type(x) in (int, float) and low < x < 1e30, f"a number above {low:g}")


def one_of(*values: Any) -> Is:
    return Is(lambda x: (type(x), x) in [(type(v), v) for v in values], f"one of {values}")


def listed(each: Is, low: int, high: int) -> Is:
    def fits(x: Any) -> bool:
        return isinstance(x, list) and low <= len(x) <= high and all(map(each.fits, x))

    return Is(fits, f"a list of {low} to {high:,}, each {each.words}")


def check(value: Any, what: str, wanted: dict[str, Is]) -> None:
    if not isinstance(value, dict) or set(value) != set(wanted):
        refuse(f"{what} lacks something, or has more than belongs there")
    for name, each in wanted.items():
        if not each.fits(value[name]):
            refuse(f"{name} of {what} must be {each.words}")


def is_named(x: Any) -> bool:
    return isinstance(x, list) and len(x) == 2 and type(x[0]) is int and text(MAX_LABEL).fits(x[1])


ANY = Is(lambda x: True, "anything")
YES_NO = one_of(True, False)
HEADS = listed(whole(0, MAX_HEADS), 1, MAX_HEADS)
LABELS = listed(text(MAX_LABEL), 0, MAX_TOKENS)
DESCRIPTION = {
    "version": one_of(VERSION),
    "model": text(MAX_LABEL),
    "created": text(MAX_LABEL),
    "kept": one_of("statistics", "qk"),
    "text": text(MAX_TEXT),
    "tokens": LABELS,
    "spans": listed(listed(whole(0, MAX_TEXT), 2, 2), 0, MAX_TOKENS).or_none(),
    "source_text": text(MAX_TEXT).or_none(),
    "source_tokens": LABELS.or_none(),
    "trained_len": whole(1, 1 << 40).or_none(),
    "window": whole(1, MAX_TOKENS).or_none(),
    "vocabulary": listed(Is(is_named, "an id and its name"), 0, MAX_TOKENS).or_none(),
    "notes": listed(text(MAX_LABEL), 0, MAX_PLACES).or_none(),
    "effects": listed(ANY, 0, MOST_EFFECTS).or_none(),
    "places": listed(ANY, 1, MAX_PLACES),
}
PLACE = {
    "name": text(MAX_LABEL),
    "layer": whole(0, MAX_PLACES),
    "kind": one_of("self", "cross"),
    "n_heads": whole(1, MAX_HEADS),
    "n_queries": whole(1, MAX_TOKENS),
    "n_keys": whole(1, MAX_TOKENS),
    "causal": YES_NO,
    "heads": HEADS,
    "exact_zoom": YES_NO,
    "rule": ANY,
}
RULE = {
    "scale": number(-1e30),
    "softcap": number(0).or_none(),
    "key_heads": HEADS,
    "cell": whole(0, MAX_TOKENS),
    "biases": listed(ANY, 0, 8),
}
TOKENS = listed(whole(0, MAX_TOKENS), 1, MAX_TOKENS)
EFFECT = {
    "token": text(MAX_LABEL),
    "edit": text(MAX_LABEL),
    "log_prob": Is(lambda x: type(x) in (int, float) and -1e30 < x <= 0, "a number up to 0"),
    "whole": number(-1e30),
    "query": TOKENS.or_none(),
    "key": TOKENS.or_none(),
}
BIAS = {"kind": one_of("relative", "column", "whole"), "lowest": whole(-MAX_TOKENS, MAX_TOKENS)}


def read_description(about: dict[str, Any]) -> Description:
    about = {**dict.fromkeys(LATER), **about}
    check(about, "the description", DESCRIPTION)
    spans, n_characters = about["spans"], len(about["text"])
    if spans is not None:
        if len(spans) != len(about["tokens"]):
            refuse("spans must name the characters of every token")
        if not all(first <= last <= n_characters for first, last in spans):
            refuse("a span lies outside the text")
        spans = [(first, last) for first, last in spans]
    for entry in about["effects"] or []:
        check(entry, "an effect", EFFECT)
        ends = [entry[side] for side in ("query", "key") if entry[side] is not None]
        if len(ends) == 1 or any(max(end) >= len(about["tokens"]) for end in ends):
            refuse("the look that an effect is of has tokens that are not there")
    pairs = [read_place(entry, f"place {n}") for n, entry in enumerate(about["places"])]
    found: dict[str, list[Any]] = {
        "places": [place for place, _ in pairs],
        "rules": [rule for _, rule in pairs],
    }
    names = None if about["vocabulary"] is None else dict(about["vocabulary"])
    found |= {name: about[name] or [] for name in ("notes", "effects")}
    return Description(**{**about, **found, "spans": spans, "vocabulary": names})


def read_place(entry: Any, what: str) -> tuple[Place, dict[str, Any]]:
    check(entry, what, PLACE)
    rule, values = entry["rule"], {name: entry[name] for name in entry if name != "rule"}
    check(rule, f"the rule of {what}", RULE)
    for bias in rule["biases"]:
        check(bias, f"a bias of {what}", BIAS)
    if not len(entry["heads"]) == len(rule["key_heads"]) == entry["n_heads"]:
        refuse(f"{what} does not name its heads, or which key head each has")
    return Place(**{**values, "heads": tuple(entry["heads"])}), rule


class CheckedArrays:
    """The arrays of a record by place and name, each checked when it is first used."""

    def __init__(self, about: Description, arrays: Mapping[str, Array]) -> None:
        self._about, self._arrays = about, arrays
        self._good: dict[str, Array] = {}
        # Forms that were checked: those of other layers are mostly the same.
        self._forms: set[tuple[Any, ...]] = set()
        for full in arrays:
            number, _, name = full.partition(".")
            belongs = number.isdecimal() and number.isascii() and int(number) < len(about.places)
            if not belongs or plain_form(name) not in FORMS:
                refuse(f"it holds {full[:80]!r}, which belongs nowhere")
            self._check_form(full, int(number), name)

    def has(self, place: int, name: str) -> bool:
        return f"{place}.{name}" in self._good or f"{place}.{name}" in self._arrays

    def put(self, place: int, name: str, array: Array) -> None:
        """Add or replace an array."""
        self._check(array, place, name)
        self._good[f"{place}.{name}"] = array

    def get(self, place: int, name: str) -> Array:
        full = f"{place}.{name}"
        if full not in self._good:
            if full not in self._arrays:
                refuse(f"place {place} has no {name}")
            array = self._arrays[full]
            self._check(array, place, name)
            self._good[full] = array
        return self._good[full]

    def _check(self, array: Array, place: int, name: str) -> None:
        here = self._about.places[place]
        why = FORMS[plain_form(name)].fault(array, here.n_queries, here.n_keys)
        if why is not None:
            refuse(f"{name} of place {place} {why}")

    def all(self) -> dict[str, Array]:
        parts = {full: full.split(".", 1) for full in (*self._arrays, *self._good)}
        return {full: self.get(int(place), name) for full, (place, name) in parts.items()}

    def _check_form(self, full: str, number: int, name: str) -> None:
        if isinstance(self._arrays, File):
            kind, shape = self._arrays.form(full)
        else:
            array = self._arrays[full]
            kind, shape = NAMES[array.dtype.newbyteorder("<")], array.shape
        here = self._about.places[number]
        known = name, kind, *shape, here.n_heads, here.n_queries, here.n_keys
        if known in self._forms:
            return
        form = FORMS[plain_form(name)]
        if kind not in form.types:
            refuse(f"{name} of place {number} is {kind}; expected {' or '.join(form.types)}")
        if not form.fits(shape, here):
            refuse(f"{name} of place {number} has the shape {shape}; expected {form.axes}")
        self._forms.add(known)


def plain_form(name: str) -> str:
    """`bias3.table` as `bias.table`."""
    head, dot, tail = name.partition(".")
    return f"bias.{tail}" if dot and head[:4] == "bias" and head[4:].isdecimal() else name


@dataclass(frozen=True)
class Form:
    """An array's types, axes and range; `?` is 1 or H, `*` any size, `rows` T + 1 or H · T + 1."""

    types: tuple[str, ...]
    axes: str
    low: float | str = -math.inf
    high: float | str = math.inf
    infinite: bool = False

    def fits(self, shape: tuple[int, ...], place: Place) -> bool:
        H, T, S = place.n_heads, place.n_queries, place.n_keys
        sizes = {"H": (H,), "T": (T,), "S": (S,), "?": (1, H), "rows": (T + 1, H * T + 1)}
        axes = self.axes.split()
        return len(shape) == len(axes) and all(
            letter == "*" or size in (sizes[letter] if letter in sizes else (int(letter),))
            for size, letter in zip(shape, axes, strict=True)
        )

    def fault(self, array: Array, n_queries: int, n_keys: int) -> str | None:
        if not array.size:
            return None
        if array.dtype == np.uint16:  # the bits of bfloat16
            return "holds NaN or infinity" if ((array & 0x7F80) == 0x7F80).any() else None
        return self.fault_of(float(array.min()), float(array.max()), n_queries, n_keys)

    def fault_of(self, low: float, high: float, n_queries: int, n_keys: int) -> str | None:
        """What is wrong with the smallest and the largest number of an array, NaN if it has any."""
        if math.isnan(low) or high == math.inf or (low == -math.inf and not self.infinite):
            return "holds NaN or infinity"
        ends = {"S": n_keys, "T": n_queries, "S-1": n_keys - 1, "log S": math.log(n_keys) + 0.01}
        lowest = ends[self.low] if isinstance(self.low, str) else self.low
        highest = ends[self.high] if isinstance(self.high, str) else self.high
        if low < lowest or high > highest:
            return f"lies between {low:g} and {high:g}; expected {lowest:g} to {highest:g}"
        return None


ONE = 1.001
QK = ("F32", "F16", "U16", "F64")
STATISTICS = {
    "entropy": Form(FLOATS, "H T", -0.01, "log S"),
    "peak": Form(FLOATS, "H T", 0, ONE),
    "peak_key": Form(("I32",), "H T", -1, "S-1"),
    "distance": Form(FLOATS, "H T", -MAX_TOKENS, MAX_TOKENS),
    "reach": Form(FLOATS, "H T", -0.01, MAX_TOKENS),
    "mass": Form(FLOATS, "H T", 0, ONE),
    "received": Form(FLOATS, "H S", 0, MAX_TOKENS),
    "seen_by": Form(FLOATS, "H S", 0, "T"),
    "top_weights": Form(FLOATS, "H T *", 0, ONE),
    "top_keys": Form(("I32",), "H T *", -1, "S-1"),
}
"""What was measured, by head and query or key."""
FORMS = {
    **STATISTICS,
    "q": Form(QK, "H T *"),
    "k": Form(QK, "* S *"),
    "lse": Form(FLOATS, "H T", infinite=True),
    "first": Form(("I64",), "rows", 0),
    "pairs": Form(("I32",), "* 2", 0, "S"),
    "bias.table": Form(FLOATS, "? *"),
    "bias.queries_at": Form(("I32",), "T"),
    "bias.keys_at": Form(("I32",), "S"),
    "bias.column": Form(FLOATS, "? S"),
    "bias.whole": Form(FLOATS, "? T S"),
    "base": Form(("F32",), "H * *", 0, ONE),
    "map": Form(("F32",), "H * *", 0, ONE),
    "real": Form(("U8",), "T", 0, 2),
    "spots": Form(("F64",), f"{len(SPOTS)} H", 0, MAX_TOKENS),
    "counts": Form(("I64",), f"{len(SPOTS)} H", 0, MAX_TOKENS),
    "ids": Form(("I64",), "T"),
    "value_norms": Form(("F32",), "H S", 0),
    "next_probs": Form(("F32",), "T *", 0, ONE),
    "next_ids": Form(("I32",), "T *", -1),
    "given": Form(("F32",), "T", -1, ONE),
    "gradient_rows": Form(("F32",), "H T"),
    "gradient_columns": Form(("F32",), "H S"),
    "steps": Form(("I32",), "*", 1, "T"),
    "effect": Form(("F64",), "* H"),
    "effect_layer": Form(("F64",), "*"),
}


def make_kept(about: Description, arrays: CheckedArrays, place: int) -> Kept:
    here, rule = about.places[place], about.rules[place]
    q, k = arrays.get(place, "q"), arrays.get(place, "k")
    if q.dtype != k.dtype or q.shape[2] != k.shape[2]:
        refuse(f"q and k of place {place} do not fit together")
    if max(rule["key_heads"]) >= k.shape[0]:
        refuse(f"place {place} has {k.shape[0]} key heads, and names others")
    runs = None
    if arrays.has(place, "first"):
        first, pairs = arrays.get(place, "first"), arrays.get(place, "pairs")
        runs = Runs(first, pairs, here.n_queries)
        check_runs(first, pairs, place)
    base = None
    if rule["cell"] and arrays.has(place, "base"):
        means, cell = arrays.get(place, "base"), rule["cell"]
        if means.shape[1] * cell > here.n_queries or means.shape[2] * cell > here.n_keys:
            refuse(f"the base map of place {place} is larger than the place")
        base = Base(cell, means)
    return Kept(
        q_htd=q,
        k_gsd=k,
        lse_ht=arrays.get(place, "lse"),
        key_heads=tuple(rule["key_heads"]),
        scale=float(rule["scale"]),
        softcap=None if rule["softcap"] is None else float(rule["softcap"]),
        runs=runs,
        added=tuple(read_bias(arrays, place, n, bias) for n, bias in enumerate(rule["biases"])),
        base=base,
    )


def read_bias(arrays: CheckedArrays, place: int, number: int, bias: dict[str, Any]) -> Added:
    start = f"bias{number}"
    if bias["kind"] == "column":
        return Whole(arrays.get(place, f"{start}.column")[:, None])
    if bias["kind"] == "whole":
        return Whole(arrays.get(place, f"{start}.whole"))
    table = arrays.get(place, f"{start}.table")
    if not table.shape[1]:
        refuse(f"a bias of place {place} is empty")
    at = (arrays.get(place, f"{start}.{name}") for name in ("queries_at", "keys_at"))
    return Relative(table, bias["lowest"], *at)


def find_ends(steps: Array, n_queries: int) -> Array:
    """The last query of each step; raises if the steps do not add up to all queries."""
    ends = np.cumsum(steps)
    if not len(ends) or ends[-1] != n_queries:
        refuse("the steps of a place do not add up to its queries")
    return ends - 1


def check_runs(first: Array, pairs: Array, place: int) -> None:
    """Check that runs are in order, that none is empty, and that all belong to rows."""
    good = first[0] == 0 and first[-1] == len(pairs) and (np.diff(first) >= 0).all()
    if good:
        row = np.repeat(np.arange(len(first) - 1), np.diff(first))
        in_order = (pairs[1:, 0] > pairs[:-1, 1]) | (row[1:] > row[:-1])
        good = (pairs[:, 0] < pairs[:, 1]).all() and in_order.all()
    if not good:
        refuse(f"the runs of place {place} are not in order")


def check_index(what: str, value: int, count: int) -> None:
    """Refuse what is no index below `count`; `what` names it: a place, head, query or key."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        hint = "; record.find(name) gives it" if what == "place" else ""
        raise TypeError(f"{what} is {value!r}; expected its number, from 0 to {count - 1}{hint}")
    if not 0 <= value < count:
        raise IndexError(f"{what} {value} is out of range; there are {count}")
