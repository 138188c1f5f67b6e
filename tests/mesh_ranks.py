"""Small trainings for several processes: what each does, and the program that one process runs.

`python mesh_ranks.py FOLDER` runs all cases, first those of 4 processes, then those of 2, each lot
in one go, since starting processes costs more than training. The main rank leaves losses, gradient
norms and the final state of each case in FOLDER; `tests/training/test_parallel.py` trains the same
on one device, and compares.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_checkpoints import make_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from regard.models import Transformer
from regard.ops import Documents
from regard.training.parallel import Layout, Mesh

STEPS, SAVED = 5, 3
S = 12
# 2 divides these heads and hidden widths, as it does few of the tiny configs' primes.
LLAMA = {"intermediate_size": 30, "num_hidden_layers": 2}
GPT2 = {"n_head": 4, "n_inner": 26, "n_layer": 2}
ORIGINAL = {"encoder_attention_heads": 4, "decoder_ffn_dim": 30, "encoder_layers": 2}
SHALLOW = {**LLAMA, "num_hidden_layers": 1}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training: `how` names what is out of the ordinary in it."""

    layout: dict[str, int]
    family: str = "llama"
    changes: dict[str, Any] = field(default_factory=lambda: LLAMA)
    how: str = "plain"
    rows: int = 4
    steps: int = STEPS
    bound: float = 1e-5
    """Of losses and gradient norms, relative; ten times it of the state, by its largest number."""

    @property
    def name(self) -> str:
        layout = "-".join(f"{word}{count}" for word, count in self.layout.items())
        return f"{self.family}-{self.how}-{layout}-{self.rows}rows"

    @property
    def n_processes(self) -> int:
        return Layout(**self.layout).size


FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "original": ORIGINAL}
LAYOUTS: list[dict[str, int]] = [
    {"data": 2},
    {"tensor": 2},
    {"context": 2},
    {"data": 4},
    {"data": 2, "tensor": 2},
    {"data": 2, "context": 2},
]
CASES = [
    Case(layout=layout, family=family, changes=changes)
    for layout in LAYOUTS
    for family, changes in FAMILIES.items()
    if not (family == "original" and ("context" in layout or layout == {"data": 4}))
] + [
    # Rules that speak of positions, over texts that are cut.
    Case(layout={"context": 2}, how="documents"),
    Case(layout={"context": 2}, how="borders"),
    Case(layout={"context": 2}, family="bert", changes={}, how="borders"),
    Case(layout={"context": 2}, how="padding"),
    Case(layout={"context": 2}, how="recomputed"),
    Case(layout={"context": 2}, family="mistral"),
    Case(layout={"context": 2}, family="bloom", changes={}),
    Case(layout={"context": 2}, family="bert", changes={}),
    Case(layout={"context": 2, "tensor": 2}, how="documents"),
    # Rows that do not come out even, and fewer rows than ranks.
    Case(layout={"data": 2}, rows=5),
    Case(layout={"data": 4}, family="original", changes=ORIGINAL, rows=3),
    # The ways a loop may go about it.
    Case(layout={"data": 2}, family="gpt2", changes=GPT2, how="run"),
    Case(layout={"data": 2}, family="original", changes=ORIGINAL, how="run"),
    Case(layout={"data": 2}, how="accumulated"),
    # Muon turns its matrices in bfloat16, where the order of sums shows.
    Case(layout={"data": 2}, changes=SHALLOW, how="muon", bound=2e-3),
    Case(layout={"data": 2, "tensor": 2}, changes=SHALLOW, how="muon", bound=2e-3, steps=2),
    Case(layout={"data": 2}, how="bfloat16", bound=3e-2),
]
# The first steps of this one are gone on from.
SAVING = Case(layout={"data": 2, "tensor": 2}, family="gpt2", changes=GPT2)
RESUMING = [
    Case(layout=layout, family="gpt2", changes=GPT2, how="resumed")
    for layout in LAYOUTS
    if layout not in ({"data": 4}, {"data": 2, "context": 2})
]


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, Tensor] | None = None
    saved: dict[str, Tensor] | None = None


def make_batch(case: Case, step: int) -> dict[str, Tensor]:
    """The global batch of a step, the same on every rank."""
    # From 50 on no hidden number lies so near a ReLU's bend that rounding decides on which side, as
    # one does from 0 on.
    drawn = torch.Generator().manual_seed(50 + step)
    ids = torch.randint(4, 37, (case.rows, S + 1), generator=drawn)
    batch = {"ids": ids[:, :-1], "targets": ids[:, 1:].clone()}
    # A rank with fewer tokens to predict than the others weighs less.
    batch["targets"][0, 2:7] = -100
    places = torch.arange(S).expand(case.rows, S)
    if case.how in ("documents", "borders"):
        # Borders within a part, on the border of parts, and none at all.
        starts = torch.tensor([[0, 5, 9], [0, 6, 6], [0, 0, 0], [0, 1, 7]])
        batch["documents"] = (places[:, :, None] >= starts[:, None]).sum(-1)
        if case.how == "documents":
            batch["positions"] = places - starts.gather(1, batch["documents"] - 1)
    if case.how == "padding":
        batch["positions"] = places - torch.tensor([[3], [0], [7], [1]])
        batch["positions"] = batch["positions"].clamp(min=-1)
        batch["targets"][batch["positions"] < 0] = -100
    if case.family == "original":
        batch["source"] = ids.flip(1)
        batch["source_real"] = torch.arange(S + 1) < torch.arange(5, 5 + case.rows)[:, None]
    return batch


def make_optimizers(case: Case, mesh: Mesh, model: nn.Module) -> list[torch.optim.Optimizer]:
    def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": group} for group in mesh.groups(parameters)]
        # With a large eps, since some gradients are 0 but for rounding (keys' biases), and without
        # it AdamW would make whole steps of that.
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, fused=case.family == "gpt2")

    if case.how != "muon":
        return [adamw(list(model.parameters()))]
    wide = [x for name, x in model.named_parameters() if "proj" in name]
    rest = [x for name, x in model.named_parameters() if "proj" not in name]
    return [torch.optim.Muon(wide, lr=1e-2), adamw(rest)]


def find_logits(case: Case, model: Transformer, own: dict[str, Tensor]) -> Tensor:
    given: dict[str, Any] = {}
    if "documents" in own:
        given["mask"] = Documents(own["documents"])
    for word in ("positions", "source", "source_real"):
        if word in own:
            given[word] = own[word]
    if case.how == "run":
        assert model.head is not None
        if "source" in given:
            given["memory"] = model.encode(given.pop("source"), given.pop("source_real"))
        return model.head(model.run(own["ids"], **given))
    logits = model(own["ids"], **given).logits
    assert logits is not None
    return logits


def train(
    case: Case,
    mesh: Mesh,
    begin: dict[str, Tensor] | None = None,
) -> Outcome:
    """Train as a loop would: the sum of this rank's losses, by the tokens of the global batch.

    With a state to begin from, only the steps after it.
    """
    model = make_model(case.family, **case.changes).train()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        elif isinstance(getattr(layer, "dropout", None), float):
            layer.dropout = 0.0  # type: ignore[assignment]
    if mesh.rank or begin is not None:
        # Only the main rank's weights count, or those that are restored.
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.1
    mesh.prepare(model, torch.bfloat16 if case.how == "bfloat16" and mesh.size > 1 else None)
    if case.how == "recomputed":
        for block in model.decoder.layers:
            block.forward = lambda *a, f=block.forward, **k: checkpoint(
                f, *a, use_reentrant=False, **k
            )
    optimizers = make_optimizers(case, mesh, model)
    if begin is not None:
        mesh.restore(model, optimizers, begin)
    outcome = Outcome()
    for step in range(case.steps) if begin is None else range(SAVED, case.steps):
        batch = make_batch(case, step)
        n_tokens = (batch["targets"] != -100).sum()
        pieces = [batch]
        if case.how == "accumulated":
            pieces = [{k: v[i : i + 2] for k, v in batch.items()} for i in (0, 2)]
        total = torch.zeros(())
        for piece in pieces:
            own = mesh.cut(piece)
            logits = find_logits(case, model, own)
            loss = F.cross_entropy(logits.flatten(0, 1), own["targets"].flatten(), reduction="sum")
            (loss / n_tokens).backward()
            total += loss.detach() / n_tokens
        outcome.norms.append(float(mesh.clip(model, 0.1)))
        outcome.losses.append(float(mesh.total(total)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if case == SAVING and step == SAVED - 1:
            outcome.saved = mesh.state(model, optimizers)
    with torch.no_grad():
        # An evaluation leaves FSDP2's outermost weights gathered; the state must not mind.
        find_logits(case, model, mesh.cut(make_batch(case, 0)))
    outcome.state = mesh.state(model, optimizers)
    return outcome


def run_all(folder: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    for case in CASES + RESUMING:
        if case.n_processes != size:
            continue
        mesh = Mesh.launch(Layout(**case.layout))
        begin = None
        if case in RESUMING:
            begin = torch.load(folder / f"{SAVING.name}.pt", weights_only=True)["saved"]
        began = time.monotonic()
        outcome = train(case, mesh, begin)
        print(f"{time.monotonic() - began:.2f} s for {case.name}", flush=True)
        assert mesh.any(mesh.rank == size - 1) and not mesh.any(False)
        assert (outcome.state is None) == (not mesh.is_main)
        if mesh.is_main:
            torch.save(vars(outcome), folder / f"{case.name}.pt")
        mesh.close()
    dist.destroy_process_group()


def be_rank(rank: int, size: int, port: int, folder: Path, run: Callable[[Path], None]) -> None:
    """One process, as torchrun would start it."""
    log = os.open(folder / f"rank{rank}of{size}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in told.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    try:
        run(folder)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # At once, without waiting for ranks that wait for this one.
        os._exit(1)


def start(size: int, folder: Path, run: Callable[[Path], None] = run_all) -> bool:
    """Run all cases of that many processes; whether all came through."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port = opened.getsockname()[1]
    # Forked, so that torch is loaded once for all.
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=be_rank, args=(rank, size, port, folder, run)) for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + 300
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
        if any(rank.exitcode for rank in ranks):
            break
        time.sleep(0.05)
    well = not any(rank.exitcode or rank.is_alive() for rank in ranks)
    print(f"{size} ranks ended with {[rank.exitcode for rank in ranks]}", flush=True)
    for rank in ranks:
        rank.kill()
    return well


if __name__ == "__main__":
    root = Path(sys.argv[1])
    sys.exit(0 if start(4, root) and start(2, root) else 1)
