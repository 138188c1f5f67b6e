"""How fast text is generated, as ratios against transformers in one run, with the same weights.

    python bench/generate.py [--device cuda] [--model gpt2 llama-1b] [--batch 1 64] [--new 256]
                             [--dtype bfloat16] [--rounds 3] [--out bench/results/generate_gpu.md]

Each row generates greedily from prompts of random tokens, to the end, with no stop token. Tokens a
second count the whole call, the prompt's reading included; the median of the rounds is told, after
rounds that warm up. regard runs with `compiled=True`. transformers runs on a GPU with its static
cache, which it compiles itself, and on a CPU as it comes; both use the same threads.

"roofline" is the least time that reading every weight once a step can take, at the speed at which
this machine copies memory, as a share of the time a step took. "same tokens" is how many of the
tokens agree up to the first difference in each row: in bfloat16 near ties fall either way.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from regard.generation import Decoding, generate_ids
from regard.generation.engine import round_up
from regard.models import FAMILIES, Transformer, config_of, count_parameters

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": dict(FAMILIES["gpt2"].sizes["gpt2"]),
    "llama-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
}


def make_pair(name: str, dtype: torch.dtype, device: str) -> tuple[Any, Transformer]:
    """transformers' model of random weights, and ours with the very same tensors."""
    torch.manual_seed(0)
    source = {**SHAPES[name], "eos_token_id": None, "bos_token_id": 0, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(**source)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    theirs = theirs.to(device).eval()
    ours = Transformer(config_of(source), device="meta")
    given = theirs.state_dict()
    for link in FAMILIES[ours.config.family].links(ours.config):
        for name, tensor in zip(link.ours, link.read([given[x] for x in link.theirs]), strict=True):
            path, _, last = name.rpartition(".")
            setattr(ours.get_submodule(path), last, torch.nn.Parameter(tensor.contiguous()))
    assert ours.head is not None and ours.decoder_embed is not None
    ours.head.weight = ours.decoder_embed.tokens.weight
    return theirs, ours.eval()


def measure_copy(device: str) -> float:
    """Bytes a second that this machine reads and writes when it copies."""
    a = torch.empty(2**30 if device == "cuda" else 2**28, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)

    def copy() -> None:
        for _ in range(10):
            b.copy_(a)

    return 20 * a.numel() / clock(copy, 5, device)[0]


def clock(run: Callable[[], Any], rounds: int, device: str, warm: int = 2) -> tuple[float, Any]:
    """Median seconds of the rounds, and what the last one gave."""
    found, made = [], None
    for turn in range(-warm, rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        made = run()
        if device == "cuda":
            torch.cuda.synchronize()
        if turn >= 0:
            found.append(time.perf_counter() - start)
    return statistics.median(found), made


def agree(one: Tensor, other: Tensor) -> float:
    """How many tokens agree, up to the first difference in each row, as a share."""
    same = (one == other).to(torch.float64).cumprod(1)
    return float(same.mean())


def measure(name: str, batch: int, given: argparse.Namespace) -> dict[str, float]:
    """One row of the table."""
    device, n_new = given.device, given.new
    theirs, ours = make_pair(name, getattr(torch, given.dtype), device)
    ids = torch.randint(0, ours.config.vocab_size, (batch, given.prompt), device=device)

    def run_ours() -> Tensor:
        return generate_ids(ours, ids, max_new_tokens=n_new, compiled=True).ids

    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": n_new}
    options |= {"min_new_tokens": n_new, "pad_token_id": 0}
    if device == "cuda":
        options["cache_implementation"] = "static"

    def run_theirs() -> Tensor:
        with torch.inference_mode():
            return theirs.generate(ids, **options)[:, given.prompt :]  # type: ignore[no-any-return]

    if device == "cpu":
        # A CPU is slow enough to be warmed up by a few tokens; the graph is that of the rounds.
        max_len = round_up(given.prompt) + n_new - (round_up(9) - 9)
        decoding = Decoding(ours, max_len=max_len, compiled=True)
        with torch.inference_mode():
            decoding.step(decoding.read(ids[:, :9]).argmax(-1))
            theirs.generate(ids[:, :9], **{**options, "max_new_tokens": 2, "min_new_tokens": 2})
        decoding.close()
    rounds, warm = given.rounds, 0 if device == "cpu" else 2
    our_time, our_ids = clock(run_ours, rounds, device, warm)
    their_time, their_ids = clock(run_theirs, rounds, device, warm)
    print(f"{name} {batch}: {our_time:.3f} s, transformers {their_time:.3f} s", flush=True)
    torch.compiler.reset()
    return {
        "ours": batch * n_new / our_time,
        "theirs": batch * n_new / their_time,
        "bytes": count_parameters(ours.config) * ours.head.weight.itemsize,  # type: ignore[union-attr]
        "step": our_time / n_new,
        "their step": their_time / n_new,
        "same": agree(our_ids.cpu(), their_ids.cpu()),
    }


def write_table(rows: dict[tuple[str, int], dict[str, float]], given: argparse.Namespace) -> str:
    speed = measure_copy(given.device)
    machine = platform.processor() or platform.machine()
    if given.device == "cuda":
        machine = torch.cuda.get_device_name()
    command = f"python bench/generate.py --device {given.device} --dtype {given.dtype}"
    command += f" --model {' '.join(given.model)} --batch {' '.join(map(str, given.batch))}"
    command += f" --prompt {given.prompt} --new {given.new} --rounds {given.rounds}"
    lines = [
        f"# Generation on {'a GPU' if given.device == 'cuda' else 'a CPU'}",
        "",
        f"{datetime.date.today()}, {machine}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}. Copying: {speed / 1e9:,.0f} GB/s.",
        f"Prompt {given.prompt} tokens, {given.new} new ones, {given.dtype}. `{command}`",
        "",
        "| model, batch | regard tokens/s | transformers tokens/s | ratio | regard's share of the "
        "roofline | transformers' | same tokens |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (name, batch), row in rows.items():
        ideal = row["bytes"] / speed
        lines.append(
            f"| {name}, {batch} | {row['ours']:,.0f} | {row['theirs']:,.0f} "
            f"| {row['ours'] / row['theirs']:.2f} | {ideal / row['step']:.0%} "
            f"| {ideal / row['their step']:.0%} | {row['same']:.0%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    reader.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    reader.add_argument("--model", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    reader.add_argument("--batch", nargs="+", type=int, default=[1, 64])
    reader.add_argument("--prompt", type=int, default=128)
    reader.add_argument("--new", type=int, default=256)
    reader.add_argument("--dtype", default="bfloat16")
    reader.add_argument("--rounds", type=int, default=3)
    reader.add_argument("--out", type=Path, help="also write the table there")
    given = reader.parse_args()
    rows: dict[tuple[str, int], dict[str, float]] = {}
    for name in given.model:
        for batch in given.batch:
            rows[name, batch] = measure(name, batch, given)
            # Written after each row, so that a run cut short leaves what it found.
            if given.out is not None:
                given.out.write_text(write_table(rows, given), encoding="utf-8")
    print(write_table(rows, given))


if __name__ == "__main__":
    main()
