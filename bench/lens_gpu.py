"""What it costs on a GPU to see all heads of a model, and how long a text can be.

    python bench/lens_gpu.py [--tokens 8192] [--long 131072] [--rounds 5] [--no-eager]
                             [--out bench/results/lens_gpu.md]

The model of the first table is transformers' LLaMA of 1.24 billion random weights (16 layers, 32
query and 8 key heads, width 2,048), bfloat16, watched in place: entropy, peak, distance and
received attention of all 512 heads, and a map of 256 × 256 cells of each. "forward, watched" ends
when the model has answered and the statistics are computed, still on the GPU; "record in memory"
when the block has ended and the record holds them as arrays; "watched as it comes" is
`watch(model)` without any wish, which tells the 8 largest weights of each row too. Beside it the
same forward without watching, and with transformers' own eager attentions. The outputs with and
without watching must be the same in every bit.

The second table is a long text: a LLaMA-shaped random model of ours, 8 layers and 16 heads of width
64, recorded with queries and keys, from which tiles are then made: random zooms from the whole map
down to single weights, by numpy on the CPU, as the viewer asks for them.
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
import transformers

import regard
from regard.lens.record import Record
from regard.models import Transformer, config_of
from regard.ops import Wants

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
WANTS = Wants(entropy=True, peak=True, distance=True, received=True, map=(256, 256))
GIB = 2**30
TILE = 256


def measure(run: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """The median of milliseconds, and the largest memory beyond what was there, in GiB."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3, (torch.cuda.max_memory_allocated() - before) / GIB


def make_hugging() -> Any:
    config = transformers.LlamaConfig(**ONE_BILLION)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


@torch.no_grad()
def see_model(n_tokens: int, rounds: int, eager: bool) -> list[str]:
    """The rows of the first table."""
    model: Any = make_hugging()
    ids = torch.randint(0, ONE_BILLION["vocab_size"], (1, n_tokens), device="cuda")
    ends: list[float] = []

    def forward(**more: Any) -> Any:
        return model(ids, logits_to_keep=1, use_cache=False, **more)

    def watched(wants: Wants | None = WANTS) -> torch.Tensor:
        began = time.perf_counter()
        with regard.watch(model, wants):
            logits: torch.Tensor = forward().logits
            torch.cuda.synchronize()
            ends.append(time.perf_counter() - began)
        return logits

    same = torch.equal(forward().logits, watched())
    assert same, "watching changed the output"
    plain, plain_room = measure(forward, rounds)
    ends.clear()
    whole, room = measure(watched, rounds)
    inside = statistics.median(ends[1:]) * 1e3
    rows = [
        ("forward", plain, plain_room),
        ("forward, watched", inside, room),
        ("forward, watched, record in memory", whole, room),
        ("forward, watched as it comes", *measure(lambda: watched(None), rounds)),
    ]
    if eager:
        model.set_attn_implementation("eager")
        rows.append(
            ("forward, eager attentions", *measure(lambda: forward(output_attentions=True), 2))
        )
    lines = [f"| {name} | {ms:,.1f} | {ms / plain:.2f} | {size:.2f} |" for name, ms, size in rows]
    print("\n".join(lines), flush=True)
    return lines


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


@torch.no_grad()
def see_long(n_tokens: int, n_zooms: int) -> list[str]:
    """The rows of the second table."""
    torch.manual_seed(0)
    model = Transformer(config_of(LONG), device="cuda", dtype=torch.bfloat16).eval()
    for weight in model.parameters():
        weight.normal_(std=0.02) if weight.dim() > 1 else weight.fill_(1.0)
    ids = torch.randint(0, LONG["vocab_size"], (1, n_tokens), device="cuda")  # type: ignore[call-overload]
    model.run(ids[:, :128])
    plain, plain_room = measure(lambda: model.run(ids), 1)
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    wants = Wants(entropy=True, peak=True, distance=True, received=True)
    with regard.watch(model, wants, keep="qk") as record:
        model.run(ids)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    room = (torch.cuda.max_memory_allocated() - before) / GIB
    rng = random.Random(0)
    zooms = [zoom(record, rng) for _ in range(n_zooms)]
    lines = [
        f"| forward | {plain / 1e3:,.2f} | {plain_room:.2f} |",
        f"| forward, recorded with queries and keys | {seconds:,.2f} | {room:.2f} |",
    ]
    for size in zooms[0]:
        median = statistics.median(times[size] for times in zooms)
        lines.append(
            f"| tile of {size:,} × {size:,} weights, median of {n_zooms} | {median:,.3f} | |"
        )
    print("\n".join(lines), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--long", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--zooms", type=int, default=5)
    parser.add_argument("--no-eager", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    told = ", ".join(f"{name} {value}" for name, value in vars(options).items() if name != "out")
    lines = [
        "# Seeing on a GPU",
        "",
        f"{datetime.date.today()}, {torch.cuda.get_device_name()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}; `python bench/lens_gpu.py` with {told}",
        "",
        f"LLaMA of 1.24 billion weights in transformers, {options.tokens:,} tokens, bfloat16, all "
        "512 heads:",
        "",
        "| | ms | ratio | extra GiB |",
        "| --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    lines += see_model(options.tokens, options.rounds, not options.no_eager)
    gc.collect()
    torch.cuda.empty_cache()
    if options.long:
        head = [
            "",
            f"8 layers of 16 heads, {options.long:,} tokens, bfloat16:",
            "",
            "| | seconds | extra GiB of the GPU |",
            "| --- | --- | --- |",
        ]
        print("\n".join(head), flush=True)
        lines += head + see_long(options.long, options.zooms)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
