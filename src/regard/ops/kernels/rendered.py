"""A call as our kernels read it: masks and biases as small tensors, positions and numbers.

A pair of query and key is seen where every part of the rendered mask allows it:
- `left`, `right`: how far back and ahead of itself a query sees (causal, windows);
- `first`, `past`: the keys first..past of each sample (padding);
- `lo`, `hi`: the keys lo..hi of each row (prefix language models, documents);
- `query_ids`, `key_ids`: both must be of one document; needed where `scattered`, as some document
  of the sample may not be one run of keys; in other samples lo..hi says the same;
- `words`: one bit a pair, 32 keys a word, for every other mask.
A bias is the sum of its rendered parts: `slopes` of the distance (ALiBi), between default positions
or given ones (`query_places`, `key_places`); a `band` of one number for each head and each j - i;
`dense` numbers. Gradients flow through these to the bias's own tensors by autograd.

Everything is a tensor or a number, so that autograd and compiled graphs can carry it.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width, E value width;
N numbers of a band, W words of a row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from regard.ops.bias import ALiBi, Bias, BiasAt, DenseBias, lowest_as_inf
from regard.ops.call import Call, Rule
from regard.ops.kernels.render_cache import rendered_once
from regard.ops.mask import And, Mask, Or, nearer
from regard.ops.masks import Causal, Documents, Lengths, Prefix, Window
from regard.ops.shape import Shape, Tile, cut
from regard.ops.unseen import covers

WORD = 32
"""Keys whose bits share a word."""
EVEN = 16
"""Rows of rendered tensors are a multiple of this apart, so kernels need no second variant."""
BAND_ENTRIES = 2**24
"""Pairs of query and key whose bits are packed at a time."""
LOWEST_ID = -(2**63)
LARGE_BIAS = 2**26
"""A bias of more numbers than this is not rendered as a matrix."""


FEW_NUMBERS = (Causal, Window, Lengths, Prefix, Documents)
"""Masks that need no more than a number for each query and each key."""


class Rendered(NamedTuple):
    """The tensors of a call, and then its numbers; None for what it does not have."""

    q: Tensor
    k: Tensor
    v: Tensor
    """Of width 0 where no output is wanted."""
    sinks: Tensor | None = None
    first: Tensor | None = None
    past: Tensor | None = None
    lo: Tensor | None = None
    hi: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    scattered: Tensor | None = None
    words: Tensor | None = None
    slopes: Tensor | None = None
    query_places: Tensor | None = None
    key_places: Tensor | None = None
    band: Tensor | None = None
    dense: Tensor | None = None
    seed: Tensor | None = None
    factor: float = 1.0
    cap: float | None = None
    dropout: float = 0.0
    covered: bool = True
    """Whether every key is seen by some query, so that no value has to be cleared."""
    joined: bool = True
    """Whether neighbouring queries together see one run of keys, with no unseen key inside."""
    left: int | None = None
    right: int | None = None
    hides: bool = False
    """Whether the bias may be -inf somewhere, and so hide a pair."""

    @property
    def shape(self) -> Shape:
        B, H, T, _ = self.q.shape
        return Shape(B, H, T, self.k.shape[2])


TENSORS = 18
"""Fields of `Rendered` that are tensors; they come first."""


class _Sight(NamedTuple):
    """The rendering of a mask so far."""

    window: tuple[int | None, int | None] = (None, None)
    span: tuple[Tensor, Tensor] | None = None
    rows: tuple[Tensor, Tensor] | None = None
    ids: tuple[Tensor, Tensor, Tensor] | None = None
    joined: bool = True
    rest: Mask | None = None


def render(call: Call) -> Rendered:
    """A call as kernels read it."""
    given = render_rule(call.q, call.k, call.rule, call.v)
    if call.sinks is None and call.dropout == 0.0:
        return given
    return given._replace(
        sinks=None if call.sinks is None else call.sinks.contiguous(),
        seed=call.seed if call.dropout > 0.0 else None,
        dropout=call.dropout,
    )


def render_rule(q: Tensor, k: Tensor, rule: Rule, v: Tensor | None = None) -> Rendered:
    """A rule as kernels read it, with queries, keys, and values if there are any."""
    shape, device = rule.shape, q.device
    sight = _Sight() if rule.mask is None else _see(rule.mask, shape, device, _Sight())
    first, past = sight.span or (None, None)
    lo, hi = sight.rows or (None, None)
    query_ids, key_ids, scattered = sight.ids or (None, None, None)
    given = Rendered(
        q,
        k,
        k[..., :0] if v is None else v,
        first=first,
        past=past,
        lo=lo,
        hi=hi,
        query_ids=query_ids,
        key_ids=key_ids,
        scattered=scattered,
        words=None if sight.rest is None else pack_words(sight.rest, shape, device),
        factor=rule.factor(q.shape[3]),
        cap=rule.softcap,
        covered=covers(rule),
        joined=sight.joined or (rule.mask is not None and rule.mask.from_first),
        left=sight.window[0],
        right=sight.window[1],
        hides=rule.bias_hides(),
    )
    return given if rule.bias is None else _add_bias(given, rule.bias, shape, device)


def _see(mask: Mask, shape: Shape, device: torch.device, sight: _Sight) -> _Sight:
    """Add a mask to a rendering, in the form that costs least."""
    window = mask.window_in(shape)
    if window is not None:
        left, right = map(nearer, sight.window, window)
        joined = sight.joined and mask.sees_itself
        return sight._replace(window=(left, right), joined=joined)
    if isinstance(mask, And):
        return _see(mask.other, shape, device, _see(mask.one, shape, device, sight))
    own = None
    if sight.ids is None or not isinstance(mask, Documents):
        own = rendered_once(mask, shape, device, lambda: _render_mask(mask, shape, device))
    if own is None:
        return sight._replace(rest=mask if sight.rest is None else sight.rest & mask)
    return sight._replace(
        span=_common(sight.span, own.span),
        rows=_common(sight.rows, own.rows),
        ids=own.ids or sight.ids,
        joined=sight.joined and own.joined,
    )


def _render_mask(mask: Mask, shape: Shape, device: torch.device) -> _Sight | None:
    """Render one mask as keys per sample or per row; None where that cannot express it."""
    span = mask.span(shape, device)
    if span is not None:
        return _Sight(span=span)
    if isinstance(mask, Documents):
        lo, hi, scattered = find_documents(mask, shape, device)
        return _Sight(
            rows=(_rows_of(lo), _rows_of(hi)),
            ids=(*mask.pair_ids(shape, device), scattered),
            joined=mask.sees_itself and shape.T == shape.S,
        )
    run = mask.interval(torch.arange(shape.offset, shape.S, device=device)[None], shape)
    if run is None:
        return None
    ends = (x.to(device).clamp(0, shape.S) for x in run)
    lo, hi = torch.broadcast_tensors(*ends)  # type: ignore[no-untyped-call]
    return _Sight(rows=(_rows_of(lo), _rows_of(hi)), joined=mask.sees_itself)


def find_documents(
    mask: Documents, shape: Shape, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """First and past-the-last key of each query's document, (B or 1, T), without a host transfer.

    Third, (B or 1,): True for samples whose ids do not ascend. These may have documents in several
    runs, and their queries get all keys, among which ids decide: as if all were one document.
    """
    queries, keys = mask.pair_ids(shape, device)
    samples = max(len(queries), len(keys))
    queries, keys = (x.expand(samples, x.shape[1]) for x in (queries, keys))
    # In cyclic order from the first id on, as padding may have a lower one.
    origin = keys[:, :1] ^ LOWEST_ID
    keys = keys - origin
    scattered = (keys[:, 1:] < keys[:, :-1]).any(1)
    keys = keys.masked_fill(scattered[:, None], 0)
    if mask.query_ids is None:
        queries = keys[:, shape.offset :].contiguous()
    else:
        queries = (queries - origin).masked_fill(scattered[:, None], 0)
    lo = torch.searchsorted(keys, queries, out_int32=True)
    hi = torch.searchsorted(keys, queries, right=True, out_int32=True)
    return lo, hi, scattered


def _common(
    one: tuple[Tensor, Tensor] | None, other: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor] | None:
    """The intersection of two intervals; None stands for all keys."""
    if one is None or other is None:
        return other if one is None else one
    return torch.maximum(one[0], other[0]), torch.minimum(one[1], other[1])


def _rows_of(values: Tensor) -> Tensor:
    """Whole numbers (B or 1, X) as int32, their rows a multiple of EVEN apart."""
    values = (values if values.dim() == 2 else values[None]).to(torch.int32)
    lack = even(values.shape[1]) - values.shape[1]
    return torch.nn.functional.pad(values, (0, lack)) if lack else values.contiguous()


def even(n: int) -> int:
    """The next multiple of EVEN."""
    return -(-n // EVEN) * EVEN


def pack_words(mask: Mask, shape: Shape, device: torch.device) -> Tensor:
    """The mask's bits, (B or 1, H or 1, T, W) int32; bits beyond the last key are 0."""
    _, _, T, S = shape
    step = T if torch.compiler.is_compiling() else max(BAND_ENTRIES // max(S, 1), 1)
    lack = -S % (WORD * EVEN)
    bit = torch.arange(WORD, device=device, dtype=torch.int32)
    parts = []
    for t0 in range(0, T, step):
        tile = Tile(t0, min(t0 + step, T), 0, S)
        seen = mask.block(shape, tile, device)
        seen = seen[(None,) * (4 - seen.dim())]
        seen = seen.expand(*seen.shape[:2], tile.t1 - tile.t0, S)
        bits = torch.nn.functional.pad(seen, (0, lack))
        bits = bits.view(*bits.shape[:-1], bits.shape[-1] // WORD, WORD)
        parts.append((bits.to(torch.int32) << bit).sum(-1, dtype=torch.int32))
    return torch.cat(parts, 2)


def _add_bias(given: Rendered, bias: Bias, shape: Shape, device: torch.device) -> Rendered:
    """Add every part of a bias to a rendering, in the form that costs least."""
    for leaf in bias.leaf_terms():
        if isinstance(leaf, ALiBi) and given.slopes is None:
            given = given._replace(slopes=leaf.slopes.to(device, torch.float32))
        elif isinstance(leaf, BiasAt) and isinstance(leaf.inner, ALiBi) and given.slopes is None:
            queries, keys = leaf.queries, leaf.keys
            if keys is None:
                keys = torch.arange(shape.S, device=device)
            given = given._replace(
                slopes=leaf.inner.slopes.to(device, torch.float32),
                query_places=_rows_of(queries.to(device)),
                key_places=_rows_of(keys.to(device)),
            )
        elif leaf.relative:
            band = band_of(leaf, shape, device)
            given = given._replace(band=band if given.band is None else given.band + band)
        else:
            numbers = _dense_of(leaf, shape, device)
            if given.dense is not None:
                one, other = (lowest_as_inf(x, torch.float32) for x in (given.dense, numbers))
                numbers = one + other
            given = given._replace(dense=numbers)
    return given


def is_given_whole(rule: Rule) -> bool:
    """Whether a mask or bias is given pair by pair, or would have to be rendered so."""
    biases = [] if rule.bias is None else rule.bias.leaf_terms()
    if any([isinstance(leaf, DenseBias) for leaf in biases]):
        return True
    masks = [] if rule.mask is None else [rule.mask]
    while masks:
        mask = masks.pop()
        if isinstance(mask, (And, Or)):
            masks += mask.parts()
        elif not isinstance(mask, FEW_NUMBERS):
            return True
    return False


def renders_whole(rule: Rule) -> bool:
    """Whether a bias that was not given as a matrix would become one, and a large one."""
    if rule.bias is None:
        return False
    whole = (
        not leaf.relative
        and not isinstance(leaf, DenseBias)
        and not (isinstance(leaf, BiasAt) and isinstance(leaf.inner, ALiBi))
        for leaf in rule.bias.leaf_terms()
    )
    return any(whole) and math.prod(rule.shape) > LARGE_BIAS


def band_of(bias: Bias, shape: Shape, device: torch.device) -> Tensor:
    """The numbers of a relative bias, (H, N) float32: that of t and s is at s - t + T - 1."""
    _, H, T, S = shape
    gaps = torch.arange(-(T - 1), S, device=device) - shape.offset
    numbers = bias.by_distance(gaps, H)
    return torch.nn.functional.pad(numbers.float(), (0, -numbers.shape[1] % EVEN)).contiguous()


def _dense_of(bias: Bias, shape: Shape, device: torch.device) -> Tensor:
    """A bias as a tensor of four axes, of which any may be 1: as given, or rendered."""
    values = bias.values if isinstance(bias, DenseBias) else bias.dense(shape, device)
    values = values.to(device)
    return values[(None,) * (4 - values.dim())]


def aligned_rows(given: Rendered) -> Rendered:
    """The call with q, k and v such that tiles are loaded as vectors; copied where need be."""
    return given._replace(q=aligned(given.q), k=aligned(given.k), v=aligned(given.v))


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it whose rows begin at multiples of 16 numbers, with zeros up to another."""
    if is_aligned(x):
        return x
    *lead, width = x.shape
    wide = x.new_empty((*lead, even(width)))
    wide[..., :width] = x
    wide[..., width:] = 0.0
    return wide


def is_aligned(x: Tensor) -> bool:
    """Whether tiles of x are loaded as vectors.

    Why: Triton 3.6 compiles products of tiles that it has to load number by number to code that
    reads wrong addresses. Products in float32 are compiled in another way.
    """
    width = x.shape[3]
    if x.dtype.itemsize != 2 or width == 0:
        return True
    steps = all(step % EVEN == 0 for step in x.stride()[:3])
    return width % EVEN == 0 and x.stride(3) == 1 and steps and x.data_ptr() % EVEN == 0


def crop(given: Rendered, tile: Tile) -> Rendered:
    """The call for the queries and keys of a tile alone, with the same scores."""
    shape, (t0, t1, s0, s1) = given.shape, tile
    if tile == (0, shape.T, 0, shape.S):
        return given
    rows, device = slice(t0, t1), given.q.device
    # By how much queries are further ahead than is the default at the size of the tile.
    ahead = (t0 + shape.offset - s0) - ((s1 - s0) - (t1 - t0))
    given = given._replace(
        q=given.q[:, :, rows],
        k=given.k[:, :, s0:s1],
        v=given.v[:, :, s0:s1],
        left=None if given.left is None else given.left - ahead,
        right=None if given.right is None else given.right + ahead,
    )
    if given.first is not None and given.past is not None:
        given = given._replace(first=given.first - s0, past=given.past - s0)
    if given.lo is not None and given.hi is not None:
        lo, hi = (_rows_of(ends[:, rows] - s0) for ends in (given.lo, given.hi))
        given = given._replace(lo=lo, hi=hi)
    if given.query_ids is not None and given.key_ids is not None:
        ids = given.query_ids[:, rows], given.key_ids[:, s0:s1]
        given = given._replace(query_ids=ids[0], key_ids=ids[1])
    if given.words is not None:
        given = given._replace(words=_crop_words(given.words[:, :, rows], s0, s1))
    if given.slopes is not None:
        queries, keys = given.query_places, given.key_places
        if queries is None or keys is None:
            queries = torch.arange(shape.T, device=device)[None] + shape.offset
            keys = torch.arange(shape.S, device=device)[None]
        given = given._replace(
            query_places=_rows_of(queries[:, rows]), key_places=_rows_of(keys[:, s0:s1])
        )
    if given.band is not None:
        first = s0 - t0 + shape.T - (t1 - t0)
        band = given.band[:, first : first + (t1 - t0) + (s1 - s0) - 1]
        given = given._replace(band=torch.nn.functional.pad(band, (0, -band.shape[1] % EVEN)))
    return given if given.dense is None else given._replace(dense=cut(given.dense, tile))


def _crop_words(words: Tensor, s0: int, s1: int) -> Tensor:
    """The bits of the keys s0..s1, moved so that the first is bit 0 of the first word."""
    first, shift = divmod(s0, WORD)
    n_words = -(-(s1 - s0) // (WORD * EVEN)) * EVEN
    words = words[..., first : first + n_words + 1]
    words = torch.nn.functional.pad(words, (0, n_words + 1 - words.shape[-1]))
    if shift == 0:
        return words[..., :-1].contiguous()
    low = (words >> shift) & ((1 << (WORD - shift)) - 1)
    return low[..., :-1] | (words[..., 1:] << (WORD - shift))
