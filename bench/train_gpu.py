"""How fast a GPT-2 of 124 million parameters trains, against transformers in one run.

    python bench/train_gpu.py [--rule plain alibi-documents] [--device cuda] [--rows 32]
                              [--context 1024] [--dropout 0.1 0.0] [--steps 20] [--rounds 3]
                              [--precision bfloat16] [--tiny] [--out bench/results/train_gpu.md]

Both begin with the same weights and read the same random tokens; both are compiled, run under
autocast where the precision is bfloat16, and step with torch's fused AdamW without clipping. Ours
is what `regard.training` runs: the compiled model, and the loss that makes its own gradient; with
--graphs the model is compiled to replay CUDA graphs. The two take turns; the median of the rounds
is told, after steps that warm up. The first losses of both are told too, so that one sees that they
compute the same (dropout draws differ). MFU counts 6 operations a weight and token and those of
attention to the keys that are seen, against the peak that the maker names.

With the rule "alibi-documents" ours has ALiBi in the place of learned positions, and its rows are
packed: documents of 200 tokens in the mean lie end to end, each token sees its own document alone,
and the last token of a document has no target. "alibi-documents-positions" also gives positions
that begin anew with each document, as the batches of `regard.training` do. transformers' model
stays the plain causal one, so the losses differ. --tiny has two layers of width 64.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from regard.models import FAMILIES, ModelConfig, Transformer, config_of
from regard.ops import Documents
from regard.training.data.packing import NOTHING
from regard.training.loss import summed_loss
from regard.training.mfu import count_flops, peak_flops

Step = Callable[[], Tensor]
SOURCE = dict(FAMILIES["gpt2"].sizes["gpt2"])
TINY = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}
TINY |= {"bos_token_id": 511, "eos_token_id": 511}
RULES = ("plain", "alibi-documents", "alibi-documents-positions")
DOCUMENT = 200
"""Tokens of a document in the mean."""


@dataclass(frozen=True)
class Batch:
    """What a step reads (B, T); documents and positions None where rows are not packed."""

    ids: Tensor
    targets: Tensor
    documents: Tensor | None = None
    positions: Tensor | None = None


def draw_batch(rule: str, options: argparse.Namespace) -> Batch:
    """Random tokens, and for packed rows where their documents begin."""
    torch.manual_seed(1)
    B, T = options.rows, options.context
    text = torch.randint(0, source_of(options)["vocab_size"], (B, T + 1), device=options.device)
    ids, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    if rule == "plain":
        return Batch(ids, targets)
    begins = torch.rand(B, T + 1, device=options.device) < 1 / DOCUMENT
    at = torch.arange(T, device=options.device).expand(B, T)
    first = torch.where(begins[:, :-1], at, 0).cummax(1).values
    return Batch(
        ids,
        targets.masked_fill(begins[:, 1:], NOTHING),
        begins[:, :-1].cumsum(1),
        at - first if rule.endswith("positions") else None,
    )


def count_seen(batch: Batch) -> float:
    """How many keys a query sees in the mean."""
    B, T = batch.ids.shape
    if batch.documents is None:
        return (T + 1) / 2
    numbers = batch.documents + T * torch.arange(B, device=batch.ids.device)[:, None]
    lengths = torch.unique(numbers, return_counts=True)[1].double()
    return float((lengths * (lengths + 1) / 2).sum()) / (B * T)


def source_of(options: argparse.Namespace) -> dict[str, Any]:
    return {**SOURCE, **TINY} if options.tiny else SOURCE


def config_for(rule: str, source: dict[str, Any]) -> ModelConfig:
    config = config_of(source)
    if rule == "plain":
        return config
    blocks = tuple(replace(block, alibi=True) for block in config.decoder)
    return replace(config, decoder=blocks, embed=replace(config.embed, positions="none"))


def make_pair(rule: str, dropout: float, options: argparse.Namespace) -> tuple[Any, Transformer]:
    """transformers' model of random weights, and ours with the very same numbers."""
    torch.manual_seed(0)
    drops = {name: dropout for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    source = {**source_of(options), **drops}
    config = transformers.AutoConfig.for_model(**source, use_cache=False)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ours = Transformer(config_for(rule, source), device="meta")
    named, known = {**theirs.state_dict()}, set(ours.state_dict())
    for link in FAMILIES["gpt2"].links(ours.config):
        if not known.issuperset(link.ours):
            continue  # a table of positions, where ours has ALiBi
        for name, tensor in zip(link.ours, link.read([named[n] for n in link.theirs]), strict=True):
            path, _, last = name.rpartition(".")
            setattr(ours.get_submodule(path), last, torch.nn.Parameter(tensor.clone().contiguous()))
    assert ours.head is not None and ours.decoder_embed is not None
    ours.head.weight = ours.decoder_embed.tokens.weight
    return theirs.to(options.device).train(), ours.to(options.device).train()


def make_ours(model: Transformer, batch: Batch, options: argparse.Namespace) -> Step:
    """A step of ours."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    n_targets = int((batch.targets != NOTHING).sum())

    def vectors(ids: Tensor, documents: Tensor | None, positions: Tensor | None) -> Tensor:
        mask = None if documents is None else Documents(documents)
        return model.run(ids, positions=positions, mask=mask)

    mode = "reduce-overhead" if options.graphs else None
    run = torch.compile(vectors, mode=mode, fullgraph=True)

    def step() -> Tensor:
        assert model.head is not None
        with autocast(options):
            found = run(batch.ids, batch.documents, batch.positions)
            loss = summed_loss(model.head, found, batch.targets) / n_targets
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def make_theirs(model: Any, batch: Batch, options: argparse.Namespace) -> Step:
    """A step of transformers'."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model)

    def step() -> Tensor:
        with autocast(options):
            # shift_labels: the targets as they are, so that both learn from the same tokens.
            loss = run(batch.ids, labels=batch.targets, shift_labels=batch.targets).loss
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


def compare(rule: str, dropout: float, options: argparse.Namespace) -> list[str]:
    """The rows of one setting."""
    theirs, ours = make_pair(rule, dropout, options)
    batch, config = draw_batch(rule, options), ours.config
    plain = draw_batch("plain", options)
    peak = peak_flops(torch.device(options.device))
    runs = {
        "regard": make_ours(ours, batch, options),
        "transformers": make_theirs(theirs, plain, options),
    }
    flops = {
        name: count_flops(ours) + 12.0 * config.n_layers * config.dim * count_seen(each)
        for name, each in (("regard", batch), ("transformers", plain))
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
        mfu = "–" if peak is None else f"{rate * flops[name] / peak:.0%}"
        firsts = ", ".join(f"{loss:.4f}" for loss in losses[name][:3])
        lines.append(
            f"| {rule} | {dropout} | {name} | {rate:,.0f} | {n_tokens / rate * 1e3:,.1f} | {mfu} | "
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
    parser.add_argument("--rule", choices=RULES, nargs="+", default=["plain"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.1, 0.0])
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try it on a CPU")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    where = platform.processor() or platform.machine()
    if options.device == "cuda":
        where = torch.cuda.get_device_name()
    told = ", ".join(f"{name} {value}" for name, value in vars(options).items() if name != "out")
    lines = [
        "# Training GPT-2, " + ("tiny" if options.tiny else "124 million parameters"),
        "",
        f"{datetime.date.today()}, {where}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, transformers {transformers.__version__}; "
        f"`python bench/train_gpu.py` with {told}",
        "",
        "| rule | dropout | | tokens/s | ms a step | MFU | ratio | first losses |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    for rule, dropout in itertools.product(options.rule, options.dropout):
        lines += compare(rule, dropout, options)
        if options.out is not None:
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
