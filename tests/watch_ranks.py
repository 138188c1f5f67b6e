"""Watching and editing models that two processes share: what each rank does and leaves in a folder.

`python watch_ranks.py FOLDER [slow]` runs all cases, or the slow ones, of transformers. Each rank
saves its records and outputs; `tests/lens/test_head_shards.py` does the same on one device, and
compares. Starting processes costs more than running them, so all of it is one program.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mesh_ranks import GPT2, LLAMA, start
from tiny_checkpoints import make_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import regard
from regard import Ablate, Block, Patch
from regard.lens.stitch_calls import Take
from regard.training.parallel import Layout, Mesh

KEEP = ("qk", "values")
FAILING = "decoder.layers.1.self_attn"
EDITS = {
    "ablate 0": [Ablate(0, 0)],
    "ablate 3": [Ablate(0, 3)],
    "ablate 1 2": [Ablate(1, (1, 2), to="mean")],
    "block": [Block(5, (1, 2), heads=2), Block(slice(6, None), 0, layers=1, heads=(0, 3))],
}
IDS = torch.randint(5, 37, (1, 9), generator=torch.Generator().manual_seed(1))
X = torch.randn(1, 7, 20, generator=torch.Generator().manual_seed(2))


class Spread(nn.Module):
    """Attention over tensors that say themselves that they are spread over ranks, by heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.q, self.k, self.v, self.out = (nn.Linear(20, 20) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(1, -1, 4, 5).transpose(1, 2) for f in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(heads.transpose(1, 2).reshape(1, -1, 20))
        return out


def encoder() -> nn.Module:
    torch.manual_seed(6)
    layer = nn.TransformerEncoderLayer(20, 4, 37, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def llama(kind: str = "sdpa") -> Any:
    import transformers as hf
    from lens_subjects import text_model

    importlib.import_module("regard.hf")  # registers its attention
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 30, "vocab_size": 83}
    config = hf.LlamaConfig(**sizes, max_position_embeddings=64, tie_word_embeddings=False)
    model = text_model(config)
    model.set_attn_implementation(kind)
    return model


def write(model: Any) -> Tensor:
    out: Tensor = model.generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, do_sample=False
    )
    return out


Case = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, DeviceMesh], Any]]


def by_mesh(**layout: int) -> Callable[[Any, DeviceMesh], Any]:
    return lambda model, _: Mesh.launch(Layout(**layout)).prepare(model).eval()


def by_fsdp(model: Any, mesh: DeviceMesh) -> Any:
    for part in (*(x for x in model.modules() if "Layer" in type(x).__name__), model):
        if not isinstance(part, nn.LayerNorm):
            fully_shard(part, mesh=mesh)
    return model


def by_tensor(model: Any, mesh: DeviceMesh) -> Any:
    rules = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {**rules, "self_attn.o_proj": RowwiseParallel()})
    return model


def by_both(model: Any, _: DeviceMesh) -> Any:
    """Tensor parallel, and FSDP2 over an axis of one rank."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    by_tensor(model, mesh["tensor"])
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh["data"])
    return model


def spread_tensors(model: Any, mesh: DeviceMesh) -> Any:
    whole = {name: ColwiseParallel(use_local_output=False) for name in "qkv"}
    return parallelize_module(model, mesh, {**whole, "out": RowwiseParallel()})


def logits(model: Any) -> Tensor:
    out: Tensor = model(IDS).logits
    return out


OURS: dict[str, Case] = {
    "llama tensor": (lambda: make_model("llama", **LLAMA).eval(), logits, by_mesh(tensor=2)),
    "gpt2 tensor": (lambda: make_model("gpt2", **GPT2).eval(), logits, by_mesh(tensor=2)),
    "llama data": (lambda: make_model("llama", **LLAMA).eval(), logits, by_mesh(data=2)),
    "torch.nn data": (encoder, lambda model: model(X), by_fsdp),
}
SLOW: dict[str, Case] = {
    # The first call of SDPA on such tensors takes torch seconds.
    "spread": (Spread, lambda model: model(X), spread_tensors),
    "sdpa tensor": (llama, logits, by_tensor),
    "regard tensor": (lambda: llama("regard"), logits, by_tensor),
    "eager tensor": (lambda: llama("eager"), logits, by_tensor),
    "both": (llama, logits, by_both),
    "data": (llama, logits, by_fsdp),
    "writing tensor": (llama, write, by_tensor),
}
CASES = OURS | SLOW


@torch.no_grad()
def run_case(case: Case, model: Any, folder: Path, name: str) -> dict[str, Any]:
    """Records of a model go into the folder; the rest is outputs."""
    call, found = case[1], {}
    found["plain"] = call(model)
    keep: Any = "qk" if name in ("spread", "torch.nn data") else KEEP
    for word, heads in (("all", None), ("some", (1, 3))):
        with regard.watch(model, keep=keep, heads=heads) as record:
            found[word] = call(model)
        record.save(folder / f"{name} {word}.regard")
    if name in ("spread", "torch.nn data", "writing tensor"):
        return found
    for word, edits in EDITS.items():
        with regard.edit(model, *edits):
            found[word] = call(model)
    with regard.head_outputs(model) as outputs:
        model(IDS.flip(1))
    with regard.edit(model, Patch(1, (0, 3), source=outputs)):
        found["patch"] = call(model)
    try:
        with regard.edit(model, Ablate(0, 4)):
            call(model)
    except ValueError as refused:
        found["refused"] = str(refused)
    return found


def fail_here(model: Any, rank: int) -> list[str]:
    """One place cannot be recorded on the second rank: it is left out on both."""
    add = Take.add

    def fails(take: Take, *given: Any) -> None:
        if take.name == FAILING and rank == 1:
            raise IndexError("of no use")
        add(take, *given)

    Take.add = fails  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings(record=True), torch.no_grad(), regard.watch(model) as record:
            warnings.simplefilter("always")
            model(IDS)
    finally:
        Take.add = add  # type: ignore[method-assign]
    return [str([place.name for place in record.places]), *record.notes]


def run_ranks(folder: Path, cases: dict[str, Case]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    home = folder / f"rank {rank}"
    home.mkdir()
    for name, case in cases.items():
        model = case[2](case[0](), mesh)
        found = run_case(case, model, home, name)
        if name == "llama tensor":
            found["failed"] = fail_here(model, rank)
        plain = {k: x + 0 if isinstance(x, Tensor) else x for k, x in found.items()}
        torch.save(plain, home / f"{name}.pt")
    dist.destroy_process_group()


def run_ours(folder: Path) -> None:
    run_ranks(folder, OURS)


def run_slow(folder: Path) -> None:
    run_ranks(folder, SLOW)


if __name__ == "__main__":
    slow = sys.argv[2:] == ["slow"]
    if slow:
        llama()  # loaded once for both
    sys.exit(0 if start(2, Path(sys.argv[1]), run_slow if slow else run_ours) else 1)
