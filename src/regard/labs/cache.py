"""What does the KV cache save, and what does it cost?

The arithmetic, for L layers of width C with H heads and G key heads of width D, at n tokens:
without a cache the n-th token costs a forward pass over all n tokens: 2 FLOPs for each weight and
token, and 4 D for each query head and each of the n (n + 1) / 2 causal pairs of tokens. With a
cache it costs one token's worth of weights and n pairs. The cache keeps 2 · L · G · D · n numbers
for each text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard import Transformer, count_parameters, generate_ids
from regard.labs.interval import median_interval, side_of, spell_interval
from regard.labs.lab import Lab, Results
from regard.labs.parts import Run
from regard.labs.small_training import generator_of
from regard.layers import BlockConfig, DecoderCache
from regard.models import ModelConfig
from regard.positions import RotaryConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

N_HEADS = 8
VOCAB = 1024


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is measured: the models' shape, the lengths, and the number of repeats."""

    n_layers: int
    head_dim: int
    lengths: tuple[int, ...]
    repeats: int
    n_written: int
    """Tokens of the text that is generated whole, with and without a cache."""
    batch: int
    """Texts in the batch for grouped heads, so many that their caches outweigh the weights."""
    batch_len: int

    @property
    def dim(self) -> int:
        return N_HEADS * self.head_dim


TINY = Size(
    n_layers=2,
    head_dim=16,
    lengths=(4, 8, 16, 32, 64, 128, 256, 512),
    repeats=21,
    n_written=64,
    batch=16,
    batch_len=512,
)
FULL = Size(
    n_layers=8,
    head_dim=128,
    lengths=tuple(2**n for n in range(2, 15)),
    repeats=21,
    n_written=512,
    batch=32,
    batch_len=8192,
)


def make_model(
    size: Size, n_kv_heads: int, device: torch.device, dtype: torch.dtype
) -> Transformer:
    """Make a LLaMA-like decoder with random weights."""
    block = BlockConfig(
        dim=size.dim,
        n_heads=N_HEADS,
        n_kv_heads=n_kv_heads,
        ffn_dim=4 * size.dim,
        norm="rms",
        activation="gelu",
        attention_bias=False,
        ffn_bias=False,
        rotary=RotaryConfig(head_dim=size.head_dim),
    )
    decoder = (block,) * size.n_layers
    config = ModelConfig(family="llama", vocab_size=VOCAB, max_len=None, decoder=decoder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Transformer(config).to(device, dtype).eval()


def count_flops(config: ModelConfig, n_new: int, n_seen: int) -> int:
    """FLOPs of the next token's logits, reading n_new tokens with n_seen - n_new in the cache."""
    block = config.main
    weights = count_parameters(config) - config.vocab_size * config.dim
    norms = (2 * config.n_layers + 1) * config.dim
    pairs = n_new * (2 * n_seen - n_new + 1) // 2
    attended = 4 * block.n_heads * (config.dim // block.n_heads) * config.n_layers * pairs
    return 2 * n_new * (weights - norms) + attended + 2 * config.vocab_size * config.dim


def count_cache_bytes(config: ModelConfig, n_tokens: int, bytes_each: int) -> int:
    """Bytes of one text's cache: 2 · layers · kv_heads · head_dim · tokens · bytes."""
    block = config.main
    n_kv_heads = block.n_kv_heads or block.n_heads
    return 2 * config.n_layers * n_kv_heads * (config.dim // block.n_heads) * n_tokens * bytes_each


def choose_next(model: Transformer, ids_bt: Tensor, cache: DecoderCache | None = None) -> Tensor:
    """The likeliest next token (B, 1) after these tokens and those in the cache."""
    assert model.head is not None
    last_btc = model.run(ids_bt, cache=cache)
    found: Tensor = model.head(last_btc[:, -1:]).argmax(-1)
    return found


def fill_cache(model: Transformer, ids_bt: Tensor) -> DecoderCache:
    """Fill a cache with these tokens, the last in a step of its own, as in generation."""
    cache = model.make_cache()
    n = ids_bt.shape[1]
    for part in torch.split(ids_bt[:, : max(n - 1, 1)], 2048, 1):
        model.run(part, cache=cache)
    if n > 1:
        model.run(ids_bt[:, -1:], cache=cache)
    return cache


@dataclass(frozen=True)
class Cost:
    """Seconds of a call, and on a GPU its peak memory in bytes, beyond what was allocated."""

    seconds: float
    peak: int | None


def cost_of(call: Callable[[], object], device: torch.device) -> Cost:
    on_gpu = device.type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    begun = time.perf_counter()
    call()
    if on_gpu:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begun
    return Cost(seconds, torch.cuda.max_memory_allocated(device) - before if on_gpu else None)


def draw_ids(n_rows: int, n_tokens: int, device: torch.device) -> Tensor:
    drawn = generator_of(n_tokens, n_rows)
    return torch.randint(VOCAB, (n_rows, n_tokens), generator=drawn).to(device)


@torch.inference_mode()
def measure_length(n: int, size: Size, model: Transformer) -> dict[str, Any]:
    """Measure the n-th token of a text: by reading all n tokens, or one with a cache of n - 1."""
    weight = next(model.parameters())
    device, bytes_each = weight.device, weight.element_size()
    ids_bt = draw_ids(1, n, device)
    plain, cached, held = [], [], 0
    for turn in range(size.repeats + 1):
        again = cost_of(lambda: choose_next(model, ids_bt), device)
        cache = fill_cache(model, ids_bt[:, :-1])
        step = cost_of(lambda: choose_next(model, ids_bt[:, -1:], cache), device)  # noqa: B023
        held = cache.nbytes
        if turn:  # the first is the warm-up
            plain.append(again)
            cached.append(step)
    return {
        "n": n,
        "plain": median_interval([cost.seconds for cost in plain]),
        "cached": median_interval([cost.seconds for cost in cached]),
        "ratio": median_interval(
            [one.seconds / other.seconds for one, other in zip(plain, cached, strict=True)]
        ),
        "flops plain": count_flops(model.config, n, n),
        "flops cached": count_flops(model.config, 1, n),
        "bytes": count_cache_bytes(model.config, n, bytes_each),
        "held": held,
        "peak plain": plain[-1].peak,
        "peak cached": cached[-1].peak,
    }


def write_plainly(model: Transformer, first_bt: Tensor, n: int) -> Tensor:
    """Generate n tokens after the first, each by a forward pass over all tokens before it."""
    ids_bt = torch.cat((first_bt, first_bt.new_zeros(1, n)), 1)
    for at in range(1, n + 1):
        ids_bt[:, at : at + 1] = choose_next(model, ids_bt[:, :at])
    return ids_bt[:, 1:]


@torch.inference_mode()
def measure_writing(size: Size, device: torch.device) -> dict[str, Any]:
    """Measure generating a whole text, in float32, so that both ways have nearly equal logits."""
    model = make_model(size, N_HEADS, device, torch.float32)
    first_bt, n = draw_ids(1, 1, device), size.n_written
    written: dict[str, Tensor] = {}

    def plainly() -> None:
        written["plain"] = write_plainly(model, first_bt, n)

    def with_cache() -> None:
        written["cached"] = generate_ids(model, first_bt, max_new_tokens=n, ignore_eos=True).ids

    ratios, plain, cached = [], [], []
    for turn in range(7):
        times = cost_of(plainly, device).seconds, cost_of(with_cache, device).seconds
        if turn:
            plain.append(times[0])
            cached.append(times[1])
            ratios.append(times[0] / times[1])
    same = (written["plain"] == written["cached"]).long().cumprod(1).sum()
    return {
        "n": n,
        "same": int(same),
        "plain": median_interval(plain),
        "cached": median_interval(cached),
        "ratio": median_interval(ratios),
    }


@torch.inference_mode()
def measure_groups(size: Size, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Measure a batch's step with 8, 4, 2 and 1 key heads, in turns to give all the same noise."""
    counts = (8, 4, 2, 1)
    models = [make_model(size, n_kv_heads, device, dtype) for n_kv_heads in counts]
    ids_bt = draw_ids(size.batch, size.batch_len, device)
    caches = [fill_cache(model, ids_bt) for model in models]
    token_b1 = ids_bt[:, :1]
    seconds: list[list[float]] = [[] for _ in counts]
    for turn in range(size.repeats + 2):
        for n, (model, cache) in enumerate(zip(models, caches, strict=True)):
            took = cost_of(lambda: choose_next(model, token_b1, cache), device)  # noqa: B023
            if turn > 1:
                seconds[n].append(took.seconds)
    bytes_each = next(models[0].parameters()).element_size()
    found = []
    for n, n_kv_heads in enumerate(counts):
        one_text = count_cache_bytes(models[n].config, size.batch_len, bytes_each)
        share = [one / full for one, full in zip(seconds[n], seconds[0], strict=True)]
        found.append(
            {
                "n_kv_heads": n_kv_heads,
                "bytes": size.batch * one_text,
                "held": caches[n].nbytes,
                "seconds": median_interval(seconds[n]),
                "share": median_interval(share),
                "weights": sum(p.nbytes for p in models[n].parameters()),
            }
        )
    return found


def measure(run: Run) -> dict[str, Any]:
    size = TINY if run.tiny else FULL
    dtype = torch.bfloat16 if run.device.type == "cuda" else torch.float32
    model = make_model(size, N_HEADS, run.device, dtype)
    lengths = run.map("lengths", lambda n: measure_length(n, size, model), size.lengths)
    writing = run.map("writing", lambda n: measure_writing(size, run.device), [size.n_written])
    batches = [(size.batch, size.batch_len)]
    groups = run.map("grouped heads", lambda _: measure_groups(size, run.device, dtype), batches)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "shape": {"n_layers": size.n_layers, "head_dim": size.head_dim, "dim": size.dim},
        "lengths": lengths,
        "writing": writing[0],
        "batch": size.batch,
        "batch_len": size.batch_len,
        "groups": groups[0],
    }


def spell_bytes(n: float) -> str:
    for name in ("bytes", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.3g} {name}"
        n /= 1024
    return f"{n:,.3g} GiB"


def spell_flops(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"


def spell_ms(found: dict[str, float]) -> str:
    return spell_interval({name: 1e3 * found[name] for name in ("median", "low", "high")}) + " ms"


SPEED = {1: "faster", 0: "no clear difference", -1: "slower"}


def find_crossing(lengths: list[dict[str, Any]]) -> str:
    """Find the length from which on the cache is faster at all lengths measured."""
    wins = [side_of(row["ratio"], 1) > 0 for row in lengths]
    first = len(wins)
    while first and wins[first - 1]:
        first -= 1
    if first == len(wins):
        n = lengths[-1]["n"]
        return f"The cache is not clearly faster at the longest length measured, {n:,} tokens."
    n = f"{lengths[first]['n']:,}"
    if first == 0:
        return f"A token is written faster with the cache from the shortest length on, {n} tokens."
    before, ratio = lengths[first - 1]["n"], lengths[first - 1]["ratio"]
    return (
        f"A token is written faster with the cache from {n} tokens on; at {before:,} the time "
        f"without it is {spell_interval(ratio)} of that with it: {SPEED[side_of(ratio, 1)]}."
    )


def spell_growth(lengths: list[dict[str, Any]]) -> str:
    """Compare how a cached step's time grows with length with how its FLOPs grow."""
    first, last = lengths[0], lengths[-1]
    flops = last["flops cached"] / first["flops cached"]
    time = last["cached"]["median"] / first["cached"]["median"]
    launched = time - 1 < (flops - 1) / 2
    return (
        f"From {first['n']:,} to {last['n']:,} tokens such a step grows to {flops:.3g} times the "
        f"FLOPs and {time:.3g} times the time"
        + (": most of its time goes into starting operations." if launched else ".")
    )


def find(results: Results) -> list[str]:
    last, writing, groups = results["lengths"][-1], results["writing"], results["groups"]
    n, arithmetic = last["n"], last["flops plain"] / last["flops cached"]
    rates = [last[f"flops {way}"] / last[way]["median"] for way in ("plain", "cached")]
    less = "less" if last["ratio"]["median"] < arithmetic else "no less"
    one = groups[-1]
    said = SPEED[-side_of(one["share"], 1)]
    spare = last["held"] / last["bytes"]
    return [
        f"At {n:,} tokens the next one takes {spell_ms(last['plain'])} without the cache and "
        f"{spell_ms(last['cached'])} with it: {spell_interval(last['ratio'])} times as long. By "
        f"FLOPs it would be {arithmetic:,.0f} times: the time tells {less}, as the pass over all "
        f"does {spell_flops(rates[0])} and the step beside the cache {spell_flops(rates[1])}. "
        f"{spell_growth(results['lengths'])}",
        find_crossing(results["lengths"]),
        f"The cache of one text of {n:,} tokens is {spell_bytes(last['bytes'])} by the formula; "
        f"the one that grew while it was filled holds {spell_bytes(last['held'])}, "
        f"{spare:.2f} times that, with room for tokens to come.",
        f"{writing['n']:,} tokens from the first to the last take "
        f"{spell_interval(writing['ratio'])} times as long without the cache; the first "
        f"{writing['same']:,} of {writing['n']:,} tokens are the same both ways.",
        f"With {one['n_kv_heads']} key head for {groups[0]['n_kv_heads']} query heads, "
        f"{results['batch']} texts of {results['batch_len']:,} tokens need "
        f"{spell_bytes(one['bytes'])} of cache in place of {spell_bytes(groups[0]['bytes'])}, "
        f"{groups[0]['bytes'] / one['bytes']:.3g} times less (measured: "
        f"{groups[0]['held'] / one['held']:.3g}), beside weights of "
        f"{spell_bytes(one['weights'])}; a step takes {spell_interval(one['share'])} of its time "
        f"with {groups[0]['n_kv_heads']} key heads, {spell_ms(groups[0]['seconds'])}: {said}.",
    ]


def draw(results: Results, figure: Figure) -> None:
    draw_times(results, figure.add_subplot(1, 3, 1))
    draw_bytes(results, figure.add_subplot(1, 3, 2))
    draw_groups(results, figure.add_subplot(1, 3, 3))


def draw_times(results: Results, axes: Any) -> None:
    rows = results["lengths"]
    lengths, last = [row["n"] for row in rows], rows[-1]
    rate = last["plain"]["median"] / last["flops plain"]
    for name, label in (("plain", "all read again"), ("cached", "with the cache")):
        line = axes.plot(lengths, [1e3 * row[name]["median"] for row in rows], "o-", label=label)[0]
        low, high = ([1e3 * row[name][end] for row in rows] for end in ("low", "high"))
        axes.fill_between(lengths, low, high, alpha=0.3, color=line.get_color())
    flops = [1e3 * rate * row["flops plain"] for row in rows]
    axes.plot(lengths, flops, "k:", label="by FLOPs, all read again")
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", title="time of the n-th token", xlabel="tokens n", ylabel="ms")
    axes.set_ylim(top=1e2 * axes.get_ylim()[1])  # for the legend
    axes.legend(frameon=False, loc="upper left")
    axes.grid(alpha=0.3)


def draw_bytes(results: Results, axes: Any) -> None:
    rows = results["lengths"]
    lengths = [row["n"] for row in rows]
    mib = 1 / 2**20
    axes.plot(lengths, [mib * row["held"] for row in rows], "o", color="C1", label="cache held")
    axes.plot(lengths, [mib * row["bytes"] for row in rows], "k:", label="2·L·G·D·n·bytes")
    if rows[0]["peak plain"] is not None:
        for name, label in (("plain", "all read again"), ("cached", "a step beside the cache")):
            peaks = [mib * row[f"peak {name}"] for row in rows]
            axes.plot(lengths, peaks, ".-", color="C0" if name == "plain" else "C2", label=label)
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", title="memory of one text", xlabel="tokens n", ylabel="MiB")
    axes.set_ylim(top=1e3 * axes.get_ylim()[1])  # for the legend
    axes.legend(frameon=False, loc="upper left")
    axes.grid(alpha=0.3)


def draw_groups(results: Results, axes: Any) -> None:
    rows = results["groups"]
    at = range(len(rows))
    middles = [1e3 * row["seconds"]["median"] for row in rows]
    low, high = ([1e3 * row["seconds"][end] for row in rows] for end in ("low", "high"))
    spread = [
        [middle - x for middle, x in zip(middles, low, strict=True)],
        [x - middle for middle, x in zip(middles, high, strict=True)],
    ]
    axes.bar(at, middles, yerr=spread, color="C1", alpha=0.7, capsize=3)
    labels = [f"{row['n_kv_heads']}\n{spell_bytes(row['bytes'])}" for row in rows]
    axes.set_xticks(list(at), labels)
    axes.set(
        title=f"a step of {results['batch']} × {results['batch_len']:,} tokens",
        xlabel="key heads, and the cache",
        ylabel="ms",
    )
    axes.grid(alpha=0.3, axis="y")


LAB = Lab(
    name="cache",
    question="What does the KV cache save, and what does it cost?",
    prediction="Without a cache the n-th token costs a pass over all n tokens, with it a pass over "
    "one, so that the cache wins from the first tokens on and by about n times; it costs 2 · "
    "layers · kv_heads · head_dim · tokens · bytes of memory. One key head for eight query heads "
    "makes the cache eight times smaller, and a step that waits for the cache as much faster.",
    method="A decoder of 8 heads with random weights, float32 on a CPU, bfloat16 on a GPU. At each "
    "length n the next token is chosen by a pass over all n tokens, and by one token beside a "
    "cache of n - 1, in turns; medians over repeats, with intervals by order statistics. One text "
    "is written from its first token on, both ways, in float32. Then a batch with 8, 4, 2 and 1 "
    "key heads: the time of a step, and the bytes that its cache holds.",
    measure=measure,
    find=find,
    draw=draw,
)
