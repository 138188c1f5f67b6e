"""Keys and values kept between calls: cached equals uncached, for every kind of cache and rule."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import plain
from rounding import assert_within, bound_error, bound_weights
from torch import Tensor

from regard.layers import CrossCache, DecoderCache, KVCache, MultiHeadAttention
from regard.layers.cache import BlockCache
from regard.ops import Causal, Dense, Lengths, Prefix, RelativeTable, Wants
from regard.positions import LongRoPE, RotaryConfig

B, T, C, H, D, LEFT = 3, 13, 15, 5, 4, 3
ROTARY = RotaryConfig(head_dim=D)
PADDING = torch.tensor([0, 5, 2])

CACHES: dict[str, Callable[[], KVCache]] = {
    "growing": KVCache.growing,
    "fixed": lambda: KVCache.fixed(17),
    "windowed": lambda: KVCache.windowed(LEFT),
}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"rotary": ROTARY},
    "alibi": {"alibi": True},
    "grouped": {"n_kv_heads": 1, "rotary": ROTARY},
    "everything": {
        "n_kv_heads": 1,
        "rotary": ROTARY,
        "alibi": True,
        "softcap": 3.0,
        "sinks": True,
        "qk_norm": "rms",
    },
}
CHUNKS = [(13,), (1,) * 13, (5,) + (1,) * 8, (2, 7, 1, 3), (4, 9), (1, 12)]

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def make(dtype: torch.dtype = torch.float32, **options: Any) -> MultiHeadAttention:
    given = {"causal": True, "head_dim": D, **options}
    return MultiHeadAttention(C, H, **given, dtype=dtype).eval()


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(shape or (B, T, C)), dtype=dtype)


def run_uncached(
    layer: MultiHeadAttention, x: Tensor, *memory: Tensor, **given: Any
) -> tuple[Tensor, Tensor]:
    """The output of a call without a cache, and that of the same layer in float64."""
    exact = copy.deepcopy(layer).double()
    return layer(x, *memory, **given), exact(x.double(), *(m.double() for m in memory), **given)


def assert_same(out: Tensor, answers: tuple[Tensor, Tensor], part: Any = ()) -> None:
    """Cached is as near to float64 as uncached; the last sum is the output's, H · D terms."""
    full, exact = answers
    assert_within(out, exact[part], bound_error(full, exact, n_terms=H * D, dtype=full.dtype))


def padded_positions(side: str) -> Tensor:
    """(B, T) running from 0 in each row, -1 on the padding."""
    if side == "left":
        return (torch.arange(T) - PADDING[:, None]).clamp(min=-1)
    return torch.arange(T).expand(B, T).masked_fill(torch.arange(T) >= T - PADDING[:, None], -1)


def run_in_chunks(
    layer: Callable[..., Tensor],
    x: Tensor,
    cache: Any,
    chunks: tuple[int, ...],
    positions: Tensor | None = None,
) -> Tensor:
    outs, start = [], 0
    for n in chunks:
        at = None if positions is None else positions[..., start : start + n]
        outs.append(layer(x[:, start : start + n], positions=at, cache=cache))
        start += n
    return torch.cat(outs, 1)


# Cached equals uncached


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", CACHES)
def test_cached_equals_uncached_token_by_token_in_chunks_of_any_size(kind: str, rule: str) -> None:
    window = (LEFT, 0) if kind == "windowed" else None
    layer, x = make(**RULES[rule], window=window), draw()
    full = run_uncached(layer, x)
    for chunks in CHUNKS:
        assert_same(run_in_chunks(layer, x, CACHES[kind](), chunks), full)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", CACHES)
def test_padded_rows_give_what_they_give_alone(kind: str, rule: str, side: str) -> None:
    """Prompts of three lengths in one batch, then four steps in which each row counts on by itself.

    The padding holds NaN, in the keys and values that are kept too.
    """
    window = (LEFT, 0) if kind == "windowed" else None
    layer, x, steps = make(**RULES[rule], window=window), draw(), draw(B, 4, C)
    positions = padded_positions(side)
    real = positions >= 0
    x = x.masked_fill(~real[..., None], math.nan)
    for chunks in ((13,), (4, 9), (1,) * 13):
        cache = CACHES[kind]()
        prompt = run_in_chunks(layer, x, cache, chunks, positions)
        out = run_in_chunks(layer, steps, cache, (1, 1, 2))
        assert cache.length.tolist() == (T + 4 - PADDING).tolist()
        for b in range(B):
            alone = run_uncached(layer, torch.cat((x[b][real[b]], steps[b]))[None])
            assert_same(prompt[b][real[b]], alone, (0, slice(-4)))
            assert_same(out[b], alone, (0, slice(-4, None)))


@pytest.mark.parametrize("kind", CACHES)
def test_in_bfloat16_cached_is_as_near_to_float64_as_uncached(kind: str) -> None:
    layer = make(torch.bfloat16, **RULES["grouped"], window=(LEFT, 0))
    x = draw(dtype=torch.bfloat16)
    full, exact = run_uncached(layer, x)
    # Sums are made in float32, and what they come to is rounded once.
    bound = bound_error(full, exact, n_terms=1, dtype=torch.bfloat16)
    for chunks in CHUNKS:
        out = run_in_chunks(layer, x, CACHES[kind](), chunks)
        assert out.dtype == torch.bfloat16
        assert_within(out, exact, bound)


@pytest.mark.parametrize("kind", CACHES)
def test_keys_with_longrope_are_turned_anew_as_the_text_grows(kind: str) -> None:
    """After each step the output is that of an uncached call on the text so far, in each row."""
    divisors = {"short_factor": (1.0, 1.5), "long_factor": (3.0, 7.0)}
    scaling = LongRoPE(**divisors, original_max_len=5, factor=3.0)
    rotary = RotaryConfig(head_dim=D, scaling=scaling)
    layer, x = make(rotary=rotary, window=(LEFT, 0)), draw()
    positions = padded_positions("left")
    for at in (None, positions):
        cache = CACHES[kind]()
        out = layer(x[:, :6], positions=None if at is None else at[:, :6], cache=cache)
        for n in range(7, T + 1):
            out = layer(x[:, n - 1 : n], cache=cache)
            full = run_uncached(layer, x[:, :n], positions=None if at is None else at[:, :n])
            assert_same(out[:, -1], tuple(each.nan_to_num() for each in full), (slice(None), -1))


@pytest.mark.parametrize("kind", CACHES)
def test_a_relative_table_and_a_prefix_of_the_caller_span_the_cache(kind: str) -> None:
    window = (LEFT, 0) if kind == "windowed" else None
    layer, x = make(causal=False, window=window), draw()
    table = RelativeTable(torch.randn(8, H), bidirectional=False, max_distance=11)
    mask = Causal() | Prefix(2)

    def call(x: Tensor, **given: Any) -> Tensor:
        return layer(x, mask=mask, bias=table, **given)

    out = run_in_chunks(call, x, CACHES[kind](), (5, 1, 1, 2, 4))
    assert_same(out, run_uncached(layer, x, mask=mask, bias=table))


def test_a_dense_mask_over_all_kept_keys_works_with_a_growing_cache() -> None:
    layer, x = make(), draw()
    real = torch.rand(B, 1, 1, T) < 0.6
    full, cache = run_uncached(layer, x, mask=Dense(real)), KVCache.growing()
    for a, z in ((0, 6), (6, 7), (7, T)):
        out = layer(x[:, a:z], mask=real[..., :z], cache=cache)
        assert_same(out, full, (slice(None), slice(a, z)))
    lengths = Lengths(T - PADDING, side="left")
    out = layer(x, mask=lengths, cache=KVCache.growing())
    assert_same(out, run_uncached(layer, x, mask=lengths))


def test_a_cached_step_shows_the_last_row_of_the_whole_matrix() -> None:
    layer, x = make(rotary=ROTARY), draw()
    whole, exact = (
        each.observe(x.to(dtype), wants=Wants(weights=True)).weights
        for each, dtype in (
            (layer, torch.float32),
            (copy.deepcopy(layer).double(), torch.float64),
        )
    )
    cache = KVCache.growing()
    layer(x[:, :-1], cache=cache)
    step = layer.observe(x[:, -1:], cache=cache, wants=Wants(weights=True))
    assert step.weights.shape == (B, H, 1, T)
    assert_within(step.weights, exact[:, :, -1:], bound_weights(whole, exact))


def test_gradients_pass_through_a_growing_cache_and_are_refused_by_the_others() -> None:
    layer, x = make(torch.float64), draw(dtype=torch.float64)
    with torch.enable_grad():
        found = []
        for run in (layer, lambda x: run_in_chunks(layer, x, KVCache.growing(), (5, 1, 7))):
            loss = run(x).square().sum()
            found.append(torch.autograd.grad(loss, list(layer.parameters())))
        for whole, cached in zip(*found, strict=True):
            torch.testing.assert_close(cached, whole)
        for cache in (KVCache.fixed(17), KVCache.windowed(LEFT)):
            with pytest.raises(ValueError, match="carries no gradient"):
                make(window=(LEFT, 0))(x.float(), cache=cache)


# What a cache holds, by hand


def tokens(*numbers: float, rows: int = 1) -> Tensor:
    """Keys (rows, 1, T, 1) that are just these numbers."""
    return torch.tensor(numbers).view(1, 1, -1, 1).expand(rows, 1, -1, 1)


def test_a_growing_cache_keeps_all_in_order_of_arrival() -> None:
    cache = KVCache.growing()
    assert cache.length is None
    cache.update(tokens(1, 2), tokens(-1, -2))
    kept = cache.update(tokens(3), tokens(-3))
    assert kept.k.flatten().tolist() == [1, 2, 3] and kept.v.flatten().tolist() == [-1, -2, -3]
    assert kept.positions.tolist() == [[0, 1, 2]] and kept.in_line
    kept = cache.update(tokens(9, 4), tokens(-9, -4), torch.tensor([-1, 3]))
    assert kept.positions.tolist() == [[0, 1, 2, -1, 3]] and not kept.in_line
    assert cache.length.tolist() == [4]


def test_an_evicted_cache_holds_the_keys_of_each_head_and_counts_on() -> None:
    cache = KVCache.growing()
    k = torch.arange(2 * 3 * 7).view(2, 3, 7, 1).float()
    cache.update(k, -k)
    index = torch.tensor([[[0, 6], [1, 2], [3, 5]], [[4, 5], [0, 1], [2, 6]]])
    cache.evict(index)
    kept = cache.update(k[:, :, :1], k[:, :, :1])
    for b in range(2):
        for g in range(3):
            assert kept.k[b, g, :, 0].tolist() == [*k[b, g, index[b, g], 0].tolist(), k[b, g, 0]]
            assert kept.v[b, g, :2, 0].tolist() == (-k[b, g, index[b, g], 0]).tolist()
    assert kept.queries.tolist() == [[7]] and bool((kept.positions[:, :2] < 7).all())
    assert cache.slots.evicted and not kept.in_line
    with pytest.raises(ValueError, match="the cache is a fixed or windowed one"):
        KVCache.fixed(7).evict(index)
    with pytest.raises(ValueError, match="cannot be evicted from a fixed or windowed cache"):
        KVCache.fixed(7).slots.evict(2)
    cache.reset()
    assert not cache.slots.evicted and cache.update(k, k).in_line


def test_a_fixed_cache_writes_the_next_slots_and_leaves_the_rest_empty() -> None:
    cache = KVCache.fixed(5)
    first = cache.update(tokens(1, 2), tokens(-1, -2))
    assert first.k.flatten().tolist() == [1, 2] and first.in_line
    kept = cache.update(tokens(3), tokens(-3))
    assert kept.positions.tolist() == [[0, 1, 2, -1, -1]]
    assert kept.k.flatten().tolist()[:3] == [1, 2, 3]
    assert kept.v.flatten().tolist()[:3] == [-1, -2, -3]
    pointer = kept.k.data_ptr()
    kept = cache.update(tokens(4, 5), tokens(-4, -5))
    assert kept.k.data_ptr() == pointer and kept.k.shape == (1, 1, 5, 1)


def test_a_windowed_cache_is_a_ring() -> None:
    """Three slots for a window of two keys back: the token at p lies in slot p mod 3."""
    cache = KVCache.windowed(2)
    cache.update(tokens(0, 1, 2, 3), tokens(0, -1, -2, -3))
    kept = cache.update(tokens(4), tokens(-4))
    assert kept.k.flatten().tolist() == [3, 4, 2] and kept.positions.tolist() == [[3, 4, 2]]
    kept = cache.update(tokens(5, 6), tokens(-5, -6))  # the ring as it was, then the new
    assert kept.k.flatten().tolist() == [3, 4, 2, 5, 6]
    assert kept.positions.tolist() == [[3, 4, 2, 5, 6]]
    kept = cache.update(tokens(7), tokens(-7))
    assert kept.k.flatten().tolist() == [6, 7, 5] and kept.v.flatten().tolist() == [-6, -7, -5]


def test_a_windowed_cache_never_holds_more_than_its_window() -> None:
    layer, cache = make(window=(LEFT, 0)), KVCache.windowed(LEFT)
    for n in (29, 1, 17, 1):
        layer(draw(B, n, C), cache=cache)
        k, v = cache._buffers
        assert k.shape[2] == v.shape[2] == LEFT + 2  # and one slot for what is dropped
        kept = cache.slots._keys[:, : LEFT + 1]
        last = int(cache.length) - 1
        assert sorted(kept[0].tolist()) == list(range(last - LEFT, last + 1))


def test_padding_never_pushes_a_token_out_of_a_window() -> None:
    cache = KVCache.windowed(2)
    at = torch.tensor([[0, 1, 2, -1, -1, -1], [-1, 0, -1, 1, 2, 3]])
    cache.update(tokens(*range(6), rows=2), tokens(*range(6), rows=2), at)
    kept = cache.update(tokens(7, rows=2), tokens(7, rows=2))
    assert kept.positions.tolist() == [[3, 1, 2], [3, 4, 2]]
    assert kept.k[:, 0, :, 0].tolist() == [[7, 1, 2], [5, 7, 4]]


def test_a_token_from_before_the_window_pushes_nothing_out() -> None:
    cache = KVCache.windowed(2)
    cache.update(tokens(0, 1, 2, 3, 4, 5), tokens(0, 1, 2, 3, 4, 5))
    kept = cache.update(tokens(9), tokens(9), torch.tensor([2]))
    assert kept.positions.tolist() == [[3, 4, 5]] and cache.length.tolist() == [6]
    assert kept.k.flatten().tolist() == [3, 4, 5]


def test_a_window_of_zero_keeps_the_newest_alone() -> None:
    layer, x = make(window=(0, 0)), draw()
    out = run_in_chunks(layer, x, KVCache.windowed(0), (3, 1, 9))
    assert_same(out, run_uncached(layer, x))


@pytest.mark.parametrize("kind", ["fixed", "windowed"])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_what_an_empty_slot_holds_never_leaks(kind: str, garbage: float) -> None:
    layer, x = make(window=(LEFT, 0), rotary=ROTARY), draw()
    cache = CACHES[kind]()
    layer(x[:, :2], cache=cache)
    empty = cache.slots._keys[0] < 0
    assert empty.any()
    for memory in cache._buffers:
        memory[:, :, empty] = garbage
    out = torch.cat((layer(x[:, 2:3], cache=cache), layer(x[:, 3:6], cache=cache)), 1)
    assert_same(out, run_uncached(layer, x[:, :6]), (slice(None), slice(2, None)))


@pytest.mark.parametrize("kind", CACHES)
def test_no_new_token_at_all_is_fine(kind: str) -> None:
    layer, x, cache = make(window=(LEFT, 0), rotary=ROTARY), draw(), CACHES[kind]()
    assert layer(x[:, :0], cache=cache).shape == (B, 0, C)
    out = run_in_chunks(layer, x, cache, (5, 0, 1, 0, 7))
    assert_same(out, run_uncached(layer, x))


# Beams, new texts, room


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", CACHES)
def test_reordered_rows_go_on_as_if_they_had_always_been_so(kind: str, padded: bool) -> None:
    """Beam search: rows are dropped, doubled, and grow in number."""
    layer, x, steps = make(window=(LEFT, 0), rotary=ROTARY, alibi=True), draw(), draw(5, 3, C)
    at = padded_positions("left") if padded else None
    for index in (torch.tensor([2, 2, 0]), torch.tensor([1, 0, 1, 2, 2]), torch.tensor([1])):
        cache, n = CACHES[kind](), len(index)
        layer(x, positions=at, cache=cache)
        cache.reorder(index)
        out = run_in_chunks(layer, steps[:n], cache, (1, 2))
        again = CACHES[kind]()
        layer(x[index], positions=None if at is None else at[index], cache=again)
        torch.testing.assert_close(out, run_in_chunks(layer, steps[:n], again, (1, 2)))


@pytest.mark.parametrize("kind", CACHES)
def test_after_a_reset_a_cache_is_as_new(kind: str) -> None:
    layer, x, cache = make(window=(LEFT, 0), rotary=ROTARY), draw(), CACHES[kind]()
    run_in_chunks(layer, x, cache, (6, 7), padded_positions("left"))
    cache.reset()
    assert cache.length is None
    out = run_in_chunks(layer, x, cache, (4, 1, 8))
    assert_same(out, run_uncached(layer, x))
    cache.reset()
    out = run_in_chunks(layer, x[:2], cache, (4, 9))  # fewer rows: other memory
    assert_same(out, run_uncached(layer, x[:2]))


def test_a_reset_keeps_the_memory() -> None:
    layer, x, cache = make(), draw(), KVCache.fixed(17)
    layer(x, cache=cache)
    pointer = cache._buffers[0].data_ptr()
    cache.reorder(torch.tensor([2, 0, 1]))
    cache.reset()
    layer(x, cache=cache)
    assert cache._buffers[0].data_ptr() == pointer


def test_overflow_of_a_fixed_cache_is_refused_in_words_and_harms_nothing() -> None:
    layer, x, cache = make(), draw(), KVCache.fixed(7)
    with pytest.raises(ValueError, match="size 7 has no room for 13 more tokens: it is empty"):
        layer(x, cache=cache)
    out = run_in_chunks(layer, x[:, :6], cache, (5, 1))
    with pytest.raises(ValueError, match="no room for 2 more tokens: 6 slots are taken; make it"):
        layer(x[:, 6:8], cache=cache)
    out = torch.cat((out, layer(x[:, 6:7], cache=cache)), 1)
    assert_same(out, run_uncached(layer, x[:, :7]))


def test_one_compiled_graph_serves_every_step_and_overflow_is_refused_in_words() -> None:
    layer, x = make(**RULES["grouped"]), draw()
    graphs: list[object] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=count)
    cache = KVCache.fixed(17)
    out = run_in_chunks(compiled, x, cache, (5,) + (1,) * 8)
    assert_same(out, run_uncached(layer, x))
    assert len(graphs) == 2  # the prompt, and the step
    run_in_chunks(compiled, draw(B, 4, C), cache, (1,) * 4)
    with pytest.raises(RuntimeError, match="size 17 has no room for 1 more tokens"):
        compiled(draw(B, 1, C), cache=cache)


@pytest.mark.parametrize("kind", CACHES)
def test_what_does_not_fit_the_kept_keys_is_refused_in_words(kind: str) -> None:
    layer, x, cache = make(window=(LEFT, 0)), draw(), CACHES[kind]()
    layer(x, cache=cache)
    with pytest.raises(ValueError, match=r"k \(B, G, T, D\) has B=2, but kept k has B=3"):
        layer(x[:2, :1], cache=cache)
    with pytest.raises(TypeError, match=r"k is torch\.float64 on cpu, but the cache holds"):
        layer.double()(x[:, :1].double(), cache=cache)
    with pytest.raises(ValueError, match="expected a whole number"):
        KVCache.fixed(0)
    with pytest.raises(ValueError, match="left is -1"):
        KVCache.windowed(-1)


# Memory


def test_cross_attention_computes_the_memory_once() -> None:
    layer = MultiHeadAttention(C, H, head_dim=D, kv_dim=11).eval()
    x, memory, cache = draw(), draw(B, 7, 11), CrossCache()
    calls: list[int] = []
    full = run_uncached(layer, x, memory, mask=Lengths(torch.tensor([7, 3, 5])))
    layer.k_proj.register_forward_hook(lambda *_: calls.append(1))
    out = [layer(x[:, :4], memory, mask=Lengths(torch.tensor([7, 3, 5])), cache=cache)]
    for t in range(4, T):  # with the memory or without
        given = memory if t % 2 else None
        mask = Lengths(torch.tensor([7, 3, 5]))
        out.append(layer(x[:, t : t + 1], given, mask=mask, cache=cache))
    assert_same(torch.cat(out, 1), full)
    assert len(calls) == 1 and cache.filled
    with pytest.raises(ValueError, match=r"memory has S=6, but the cache was filled .* S=7"):
        layer(x, memory[:, 1:], cache=cache)


def test_a_kept_memory_is_reordered_and_reset() -> None:
    layer = MultiHeadAttention(C, H, head_dim=D).eval()
    x, memory, cache = draw(), draw(B, 7, C), CrossCache()
    layer(x, memory, cache=cache)
    index = torch.tensor([1, 1, 0])
    cache.reorder(index)
    torch.testing.assert_close(layer(x, cache=cache), layer(x, memory[index]))
    cache.reset()
    other = draw(B, 5, C)
    torch.testing.assert_close(layer(x, other, cache=cache), layer(x, other))


def test_the_cache_of_a_stack_reorders_and_resets_all_its_parts() -> None:
    cache = DecoderCache(BlockCache(KVCache.growing(), CrossCache()) for _ in range(2))
    for block in cache.blocks:
        block.self_attn.update(draw(B, 1, 4, D), draw(B, 1, 4, D))
        block.cross_attn.fill(draw(B, 1, 7, D), draw(B, 1, 7, D))
    assert cache.length.tolist() == [4]
    before = [block.cross_attn.k for block in cache.blocks]
    cache.reorder(torch.tensor([2, 0]))
    for block, k in zip(cache.blocks, before, strict=True):
        assert torch.equal(block.cross_attn.k, k[[2, 0]])
        assert block.self_attn.update(draw(2, 1, 1, D), draw(2, 1, 1, D)).k.shape == (2, 1, 5, D)
    cache.reset()
    assert cache.length is None and not any(b.cross_attn.filled for b in cache.blocks)
    assert BlockCache(KVCache.growing()).cross_attn is None


def test_grouped_rows_of_a_ring_equal_the_formula() -> None:
    """The ring with two rows at other positions, against the plain formula on what it must hold."""
    cache = KVCache.windowed(2)
    k, v = (
        torch.randn(2, 1, 6, D, dtype=torch.float64),
        torch.randn(2, 1, 6, 2, dtype=torch.float64),
    )
    at = torch.stack((torch.arange(6), torch.arange(6) - 2)).clamp(min=-1)
    for t in range(6):
        kept = cache.update(k[:, :, t : t + 1], v[:, :, t : t + 1], at[:, t : t + 1])
    q = torch.randn(2, 3, 1, D, dtype=torch.float64)
    out, _ = plain(q, kept.k, kept.v, seen=(kept.positions >= 0)[:, None, None])
    expected, _ = plain(q, k[:, :, 3:], v[:, :, 3:])
    torch.testing.assert_close(out, expected)


# Room to spare in a growing cache


def test_a_growing_cache_outgrows_its_room_and_earlier_answers_stay() -> None:
    cache, x = KVCache.growing(), torch.randn(2, 3, 401, 5)
    answers = [cache.update(x[:, :, t : t + 1], -x[:, :, t : t + 1]) for t in range(401)]
    for t in (0, 1, 64, 65, 200, 400):
        assert torch.equal(answers[t].k, x[:, :, : t + 1])
        assert torch.equal(answers[t].v, -x[:, :, : t + 1])


def test_a_growing_cache_reorders_its_rows_and_grows_on() -> None:
    cache, x = KVCache.growing(), torch.randn(3, 2, 9, 5)
    cache.update(x[:, :, :4], x[:, :, :4])
    cache.update(x[:, :, 4:5], x[:, :, 4:5])
    index = torch.tensor([2, 0, 2, 1])
    cache.reorder(index)
    kept = cache.update(x[index, :, 5:], x[index, :, 5:])
    assert torch.equal(kept.k, x[index]) and torch.equal(kept.v, x[index])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_filled_and_reordered_in_inference_mode_goes_on_outside(
    kind: str, padded: bool
) -> None:
    layer, x, cache = make(window=(LEFT, 0), rotary=ROTARY), draw(), CACHES[kind]()
    index = torch.tensor([2, 0, 1, 2])
    at = padded_positions("left") if padded else None
    whole, exact = run_uncached(layer, x[index], positions=None if at is None else at[index])
    for _ in range(2):  # a second time after a reset
        with torch.inference_mode():
            first = None if at is None else at[:, :7]
            run_in_chunks(layer, x[:, :7], cache, (5, 1, 1), first)
            cache.reorder(index)
        rest = None if at is None else at[index, 7:]
        out = run_in_chunks(layer, x[index, 7:], cache, (1, 3, 2), rest)
        assert_same(out, (whole[:, 7:], exact[:, 7:]))
        cache.reset()


def test_a_growing_cache_in_a_compiled_layer_takes_one_graph_for_all_later_steps() -> None:
    layer, x = make(**RULES["grouped"]), draw()
    graphs: list[object] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=count)
    out = run_in_chunks(compiled, x, KVCache.growing(), (5,) + (1,) * 8)
    assert_same(out, run_uncached(layer, x))
    assert len(graphs) <= 3  # the prompt, the first step, and one whose length is left open


def test_bytes_are_those_of_keys_and_values_with_what_is_kept_free() -> None:
    layer = make(n_kv_heads=1)
    growing, fixed, empty = KVCache.growing(), KVCache.fixed(17), KVCache.growing()
    for cache in (growing, fixed):
        layer(draw(B, T, C), cache=cache)
    each = 2 * B * 1 * D * 4  # keys and values of one token, in float32
    assert (growing.nbytes, fixed.nbytes, empty.nbytes) == (T * each, 17 * each, 0)
    layer(draw(B, 1, C), cache=growing)
    assert growing.nbytes == (T + 1 + 64) * each  # grown by half, and by 64 at least
    cross = CrossCache()
    assert cross.nbytes == 0
    cross.fill(draw(B, 1, 7, D), draw(B, 1, 7, D))
    stack = DecoderCache([BlockCache(growing, cross), BlockCache(fixed)])
    assert stack.nbytes == (T + 1 + 64 + 7 + 17) * each
