"""What it costs on a GPU to see all heads of a model, and how long a text can be.

    python bench/lens_gpu.py [--only model padded compiled regard long block] [--tokens 8192]
                             [--long 131072] [--rounds 5] [--no-eager] [--tiny]
                             [--out bench/results/lens_gpu.md]

The model of the first four tables is transformers' LLaMA of 1.24 billion random weights (16 layers,
32 query and 8 key heads, width 2,048), bfloat16, watched in place: entropy, peak, distance and
received attention of all 512 heads, and a map of 256 × 256 cells of each. "forward, watched" ends
when the model has answered and the statistics are computed, still on the GPU; "record in memory"
when the block has ended and the record holds them as arrays. Ratios are to the first row, in the
table of padded batches to the forward pass by the same attention.

- model: one text. "watched as it comes" is `watch(model)` without any wish, which tells the 8
  largest weights of each row too; last transformers' own eager attentions. The outputs with and
  without watching must be the same in every bit, here and wherever nothing is compiled.
- padded: 8 rows of half to a whole of 2,048 tokens, padded on the left, all rows in one record.
- compiled: `torch.compile(model)`, with and without watching. The entropies must be those of the
  model uncompiled, but for bfloat16's rounding, and dynamo must count no graph break.
- regard: the first table's text with attn_implementation="regard".

The other tables are of a long text: a LLaMA-shaped random model of ours, 8 layers and 16 heads of
width 64.

- long: watched, with entropy, peak, distance and received attention; then with queries and keys
  too, from which tiles are made: random zooms from the whole map down to single weights, by numpy
  on the CPU, as the viewer asks for them.
- block: the last query, or the last 512, may not look at the first half of the text
  (`regard.edit`). The last vector must change; in the first 2,048 tokens all vectors must be those
  of an explicit mask, but for bfloat16's rounding.

--tiny runs all of it with tiny models, also without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
import transformers
from torch import Tensor

import regard
import regard.hf
from regard import Block, Dense
from regard.lens.record import Record
from regard.models import Transformer, config_of
from regard.ops import Wants

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ONE_BILLION = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}
LONG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 4096,
    "vocab_size": 32768,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
}
WANTS = Wants(entropy=True, peak=True, distance=True, received=True, map=(256, 256))
LONG_WANTS = Wants(entropy=True, peak=True, distance=True, received=True)
GIB = 2**30
EPS = torch.finfo(torch.bfloat16).eps
TILE = 256

Row = tuple[str, float, float]
"""What was measured: a name, milliseconds, and GiB of the GPU beyond what was there."""


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measure(run: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """The median of milliseconds, and the largest memory beyond what was there, in GiB."""
    run()
    wait()
    before = 0
    if DEVICE == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    return statistics.median(times) * 1e3, (peak - before) / GIB


def measure_watched(
    model: Any, run: Callable[[], Any], rounds: int, what: str, **asked: Any
) -> list[Row]:
    """Two rows: until statistics are computed, and until the record holds them."""
    ends: list[float] = []

    def watched() -> None:
        began = time.perf_counter()
        with regard.watch(model, **asked):
            run()
            wait()
            ends.append(time.perf_counter() - began)

    whole, size = measure(watched, rounds)
    inside = statistics.median(ends[1:]) * 1e3
    return [(what, inside, size), (f"{what}, record in memory", whole, size)]


def look(model: Any, run: Callable[[], Any], **asked: Any) -> tuple[Record, Any]:
    """The record of one run, and what the run gave."""
    with regard.watch(model, **asked) as record:
        out = run()
    return record, out


def tell(rows: list[Row], unit: float = 1.0) -> list[str]:
    """Lines of a table: the time, how many times that of the first row, and the memory."""
    lines = []
    for name, ms, size in rows:
        ratio = f"{ms / rows[0][1]:.2f}"
        lines.append(f"| {name} | {ms / unit:,.{1 if unit == 1 else 2}f} | {ratio} | {size:.2f} |")
    return lines


def make_hugging(options: argparse.Namespace) -> Any:
    config = transformers.LlamaConfig(**{**ONE_BILLION, **(TINY if options.tiny else {})})
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = transformers.LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def draw_ids(model: Any, *shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(0, model.config.vocab_size, shape, device=DEVICE)


def read_one(model: Any, options: argparse.Namespace) -> Callable[..., Any]:
    """A forward pass over the first table's text."""
    ids = draw_ids(model, 1, options.tokens)
    return lambda **more: model(ids, logits_to_keep=1, use_cache=False, **more).logits


def see_model(options: argparse.Namespace) -> list[str]:
    """One text through transformers' model."""
    model, rounds = make_hugging(options), options.rounds
    forward = read_one(model, options)
    assert torch.equal(forward(), look(model, forward, wants=WANTS)[1]), (
        "watching changed the output"
    )
    rows = [("forward", *measure(forward, rounds))]
    rows += measure_watched(model, forward, rounds, "forward, watched", wants=WANTS)
    rows += measure_watched(model, forward, rounds, "forward, watched as it comes")
    if not options.no_eager:
        model.set_attn_implementation("eager")
        asked = measure(lambda: forward(output_attentions=True), 2)
        rows.append(("forward, eager attentions", *asked))
    return tell(rows)


def see_padded(options: argparse.Namespace) -> list[str]:
    """A batch padded on the left, all of its rows in one record."""
    model, rounds = make_hugging(options), options.rounds
    B, T = 8, 96 if options.tiny else 2048
    lengths = torch.linspace(T // 2, T, B, device=DEVICE).long()
    real = torch.arange(T, device=DEVICE) >= T - lengths[:, None]
    ids = draw_ids(model, B, T).masked_fill(~real, 0)
    given = {"attention_mask": real.long(), "position_ids": (real.cumsum(1) - 1).clamp(min=0)}

    def forward() -> Tensor:
        logits: Tensor = model(ids, logits_to_keep=1, use_cache=False, **given).logits
        return logits

    rows = []
    asked = {"wants": WANTS, "row": list(range(B))}
    for name in ("sdpa", "regard"):
        model.set_attn_implementation(name)
        record, out = look(model, forward, **asked)
        assert torch.equal(forward(), out), f"watching changed the output of {name}"
        assert len(record.places) == B * model.config.num_hidden_layers, "not all rows are there"
        rows.append((f"{name}: forward", *measure(forward, rounds)))
        rows += measure_watched(model, forward, rounds, f"{name}: forward, watched", **asked)
    return tell(rows[:3]) + tell(rows[3:])


def see_compiled(options: argparse.Namespace) -> list[str]:
    """The compiled model, and how far its entropies are from those of the model uncompiled."""
    model, rounds = make_hugging(options), options.rounds
    want, _ = look(model, read_one(model, options), wants=WANTS)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fast: Any = torch.compile(model)
    ids = draw_ids(model, 1, options.tokens)

    def forward() -> Tensor:
        logits: Tensor = fast(ids, logits_to_keep=1, use_cache=False).logits
        return logits

    plain = forward()
    found, out = look(model, forward, wants=WANTS)
    breaks = dict(torch._dynamo.utils.counters["graph_break"])
    assert not breaks, f"dynamo broke the graph: {breaks}"
    assert len(found.places) == len(want.places) == model.config.num_hidden_layers
    mean = largest = 0.0
    for place in range(len(want.places)):
        one, two = (torch.from_numpy(x.statistics(place)["entropy"]) for x in (found, want))
        apart, scale = (one - two).abs(), float(two.abs().max())
        mean, largest = (
            max(mean, float(apart.mean()) / scale),
            max(largest, float(apart.max()) / scale),
        )
    # Of the entropy's own size: roundings of the scores, layer after layer, most of which cancel.
    assert mean <= EPS and largest <= 8 * EPS, f"entropies are apart: {mean}, {largest}"
    rows = [("forward, compiled", *measure(forward, rounds))]
    rows += measure_watched(model, forward, rounds, "forward, compiled, watched", wants=WANTS)
    same = "equal in every bit" if torch.equal(plain, out) else "not equal in every bit"
    return [
        *tell(rows),
        "",
        f"No graph break. The entropies are at most {largest:.2g} of the largest one away from "
        f"those of the model uncompiled, in the mean of the worst layer {mean:.2g}. The last "
        f"logits with and without watching are {same}.",
    ]


def see_regard(options: argparse.Namespace) -> list[str]:
    """attn_implementation="regard", beside the forward pass of SDPA."""
    model, rounds = make_hugging(options), options.rounds
    forward = read_one(model, options)
    rows = [("sdpa: forward", *measure(forward, rounds))]
    model.set_attn_implementation("regard")
    assert torch.equal(forward(), look(model, forward, wants=WANTS)[1]), (
        "watching changed the output"
    )
    rows.append(("regard: forward", *measure(forward, rounds)))
    rows += measure_watched(model, forward, rounds, "regard: forward, watched", wants=WANTS)
    return tell(rows)


def zoom(record: Record, rng: random.Random) -> dict[int, float]:
    """Seconds of the tiles from the whole map of one head down to single weights, by their side.

    Each tile is one of a grid, as the viewer has them, and a quarter as wide as the one before.
    """
    place = rng.randrange(len(record.places))
    told = record.places[place]
    head, t = rng.randrange(told.n_heads), rng.randrange(told.n_queries)
    s, size, times = rng.randrange(t + 1), told.n_queries, {}
    while size >= TILE:
        t0, s0 = t // size * size, s // size * size
        began = time.perf_counter()
        record.map(place, head, (t0, t0 + size, s0, s0 + size), (TILE, TILE))
        times[size] = time.perf_counter() - began
        size //= 4
    return times


def make_long(options: argparse.Namespace) -> tuple[Transformer, Tensor]:
    """The model of a long text, and the text."""
    torch.manual_seed(0)
    config: dict[str, Any] = {**LONG, **(TINY if options.tiny else {})}
    model = Transformer(config_of(config), device=DEVICE, dtype=torch.bfloat16).eval()
    for weight in model.parameters():
        weight.normal_(std=0.02) if weight.dim() > 1 else weight.fill_(1.0)
    ids = torch.randint(0, config["vocab_size"], (1, options.long), device=DEVICE)
    return model, ids


def see_long(options: argparse.Namespace) -> list[str]:
    """A long text: watched, with queries and keys or without; then tiles."""
    (model, ids), rounds = make_long(options), options.rounds

    def forward() -> Tensor:
        return model.run(ids)

    rows = [("forward", *measure(forward, rounds))]
    rows += measure_watched(model, forward, rounds, "forward, watched", wants=LONG_WANTS)
    asked = {"wants": LONG_WANTS, "keep": "qk"}
    rows += measure_watched(model, forward, 2, "forward, watched with queries and keys", **asked)
    record, _ = look(model, forward, **asked)
    rng = random.Random(0)
    zooms = [zoom(record, rng) for _ in range(options.zooms)]
    lines = tell(rows, unit=1e3)
    for size in zooms[0]:
        median = statistics.median(times[size] for times in zooms)
        name = f"tile of {size:,} × {size:,} weights, median of {options.zooms}"
        lines.append(f"| {name} | {median:,.3f} | | |")
    return lines


def check_blocked(model: Transformer, ids: Tensor, n_queries: int) -> None:
    """Looks that are forbidden by an edit give the vectors of an explicit mask."""
    T = ids.shape[1]
    seen = torch.ones(T, T, dtype=torch.bool, device=DEVICE)
    seen[-n_queries:, : T // 2] = False
    want, blind = model.run(ids, mask=Dense(seen)), model.run(ids)
    with regard.edit(model, Block(slice(T - n_queries, None), slice(0, T // 2))):
        got = model.run(ids)
    bound = 8 * EPS * float(want.abs().max())
    apart, changed = (float((got - x)[:, -n_queries:].abs().max()) for x in (want, blind))
    assert apart <= bound, f"the vectors are {apart} from those of a mask, more than {bound}"
    assert changed > 2 * apart, f"the edit changed {changed}, and a mask gives {apart} less or more"
    assert torch.equal(got[:, :-n_queries], blind[:, :-n_queries]), "earlier tokens have changed"


def see_blocked(options: argparse.Namespace) -> list[str]:
    """Looks forbidden in a long text."""
    (model, ids), rounds = make_long(options), options.rounds
    n = ids.shape[1]
    short = min(n // 2, 2048)
    many = short // 4
    for n_queries in (1, many):
        check_blocked(model, ids[:, :short], n_queries)
    plain = model.run(ids)[:, -1]
    rows = [("forward", *measure(lambda: model.run(ids), rounds))]
    for n_queries in (1, many):
        edit = Block(slice(n - n_queries, None), slice(0, n // 2))

        def forward(edit: Block = edit) -> Tensor:
            with regard.edit(model, edit):
                return model.run(ids)[:, -1]

        assert not torch.equal(forward(), plain), "the last vector is as without the edit"
        name = "forward, last query" if n_queries == 1 else f"forward, last {n_queries:,} queries"
        rows.append((f"{name} blocked", *measure(forward, rounds)))
    return tell(rows, unit=1e3)


TABLES: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "model": see_model,
    "padded": see_padded,
    "compiled": see_compiled,
    "regard": see_regard,
    "long": see_long,
    "block": see_blocked,
}


def head_of(name: str, options: argparse.Namespace) -> list[str]:
    """What stands above a table."""
    llama = "a tiny LLaMA" if options.tiny else "LLaMA of 1.24 billion weights"
    one = f"{llama} in transformers, {options.tokens:,} tokens, bfloat16, all heads"
    long = f"A model of ours, {options.long:,} tokens, bfloat16"
    text = {
        "model": one,
        "padded": f"{llama} in transformers, 8 rows padded on the left, half to whole, all heads",
        "compiled": f"{one}, compiled",
        "regard": f"{one}, by attention of ours",
        "long": f"{long}, all heads",
        "block": f"{long}, looks at the first half forbidden",
    }[name]
    unit = "seconds" if name in ("long", "block") else "ms"
    table = [f"| | {unit} | ratio | extra GiB |", "| --- | --- | --- | --- |"]
    return ["", f"{text[0].upper()}{text[1:]}:", "", *table]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=TABLES, nargs="+", default=list(TABLES))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--long", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--zooms", type=int, default=5)
    parser.add_argument("--no-eager", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="tiny models, also without a GPU")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if DEVICE != "cuda" and not options.tiny:
        parser.error("there is no GPU here; --tiny runs without one")
    if options.tiny:
        options.tokens, options.long = min(options.tokens, 128), min(options.long, 512)
        options.rounds = min(options.rounds, 2)
    told = ", ".join(f"{name} {value}" for name, value in vars(options).items() if name != "out")
    where = platform.processor() or platform.machine()
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else where
    lines = [
        "# Seeing on a GPU",
        "",
        f"{datetime.date.today()}, {where}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}; `python bench/lens_gpu.py` with {told}",
    ]
    print("\n".join(lines), flush=True)
    for name in options.only:
        began = time.perf_counter()
        head = head_of(name, options)
        print("\n".join(head), flush=True)
        found = TABLES[name](options)
        print("\n".join(found), f"{time.perf_counter() - began:.0f} s", sep="\n\n", flush=True)
        lines += head + found
        if options.out is not None:
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
        torch._dynamo.reset()
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
