"""How fast a GPT-2 of 124 million parameters trains, against transformers in one run.

    python bench/train_gpu.py [--device cuda] [--rows 32] [--context 1024] [--dropout 0.1 0.0]
                              [--steps 20] [--rounds 3] [--precision bfloat16]
                              [--out bench/results/train_gpu.md]

Both begin with the same weights and read the same random tokens; both are compiled, run under
autocast where the precision is bfloat16, and step with torch's fused AdamW without clipping. Ours
is what `regard.training` runs: the compiled model, and the loss that makes its own gradient; with
--graphs the model is compiled to replay CUDA graphs. The two take turns; the median of the rounds
is told, after steps that warm up. The first losses of both are told too, so that one sees that they
compute the same (dropout draws differ). MFU counts 6 operations a weight and token and those of
causal attention, against the peak that the maker names.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from regard.models import FAMILIES, Transformer, config_of
from regard.training.loss import summed_loss
from regard.training.mfu import count_flops, peak_flops

Step = Callable[[], Tensor]
SOURCE = dict(FAMILIES["gpt2"].sizes["gpt2"])


def make_pair(dropout: float, device: str) -> tuple[Any, Transformer]:
    """transformers' model of random weights, and ours with the very same numbers."""
    torch.manual_seed(0)
    drops = {name: dropout for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    source = {**SOURCE, **drops}
    config = transformers.AutoConfig.for_model(**source, use_cache=False)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ours = Transformer(config_of(source), device="meta")
    named = {**theirs.state_dict()}
    for link in FAMILIES["gpt2"].links(ours.config):
        for name, tensor in zip(link.ours, link.read([named[n] for n in link.theirs]), strict=True):
            path, _, last = name.rpartition(".")
            setattr(ours.get_submodule(path), last, torch.nn.Parameter(tensor.clone().contiguous()))
    assert ours.head is not None and ours.decoder_embed is not None
    ours.head.weight = ours.decoder_embed.tokens.weight
    return theirs.to(device).train(), ours.to(device).train()


def make_ours(model: Transformer, ids: Tensor, options: argparse.Namespace) -> Step:
    """A step of ours."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model.run, mode="reduce-overhead" if options.graphs else None)
    given, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> Tensor:
        assert model.head is not None
        with autocast(options):
            loss = summed_loss(model.head, run(given), targets) / targets.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def make_theirs(model: Any, ids: Tensor, options: argparse.Namespace) -> Step:
    """A step of transformers'."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model)
    given, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step() -> Tensor:
        with autocast(options):
            # shift_labels: the targets as they are, so that both learn from the same tokens.
            loss = run(given, labels=targets, shift_labels=targets).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        made: Tensor = loss.detach()
        return made

    return step


def autocast(options: argparse.Namespace) -> Any:
    return torch.autocast(options.device, torch.bfloat16, enabled=options.precision == "bfloat16")


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(step: Step, options: argparse.Namespace) -> float:
    """Seconds a step."""
    wait(options.device)
    began = time.perf_counter()
    for _ in range(options.steps):
        step()
    wait(options.device)
    return (time.perf_counter() - began) / options.steps


def compare(dropout: float, options: argparse.Namespace) -> list[str]:
    """The rows of one setting."""
    theirs, ours = make_pair(dropout, options.device)
    torch.manual_seed(1)
    shape = options.rows, options.context + 1
    ids = torch.randint(0, SOURCE["vocab_size"], shape, device=options.device)
    flops = count_flops(ours) + 6.0 * 12 * 768 * options.context
    peak = peak_flops(torch.device(options.device))
    runs = {
        "regard": make_ours(ours, ids, options),
        "transformers": make_theirs(theirs, ids, options),
    }
    losses = {name: [float(step()) for _ in range(options.warm)] for name, step in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, step in runs.items():
            times[name].append(measure(step, options))
    n_tokens = options.rows * options.context
    rates = {name: n_tokens / statistics.median(some) for name, some in times.items()}
    lines = []
    for name, rate in rates.items():
        mfu = "–" if peak is None else f"{rate * flops / peak:.0%}"
        firsts = ", ".join(f"{loss:.4f}" for loss in losses[name][:3])
        lines.append(
            f"| {dropout} | {name} | {rate:,.0f} | {n_tokens / rate * 1e3:,.1f} | {mfu} | "
            f"{rate / rates['transformers']:.2f} | {firsts} |"
        )
        print(lines[-1], flush=True)
    del runs, ours, theirs
    torch._dynamo.reset()
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.1, 0.0])
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    where = platform.processor() or platform.machine()
    if options.device == "cuda":
        where = torch.cuda.get_device_name()
    told = ", ".join(f"{name} {value}" for name, value in vars(options).items() if name != "out")
    lines = [
        "# Training GPT-2, 124 million parameters",
        "",
        f"{datetime.date.today()}, {where}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, transformers {transformers.__version__}; "
        f"`python bench/train_gpu.py` with {told}",
        "",
        "| dropout | | tokens/s | ms a step | MFU | ratio | first losses |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    for dropout in options.dropout:
        lines += compare(dropout, options)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
