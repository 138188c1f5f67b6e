"""One device and many give the same losses, gradient norms and weights; snapshots fit any layout.

The processes are started once (`mesh_ranks.py` says what they do), 4 and then 2 of them, on the
CPU with gloo. The bound is 1e-5 relative for losses and norms over five steps of AdamW in float32.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_ranks import CASES, RESUMING, SAVED, SAVING, Case, train
from tiny_checkpoints import make_model
from torch import Tensor, nn

from regard.models import Transformer
from regard.ops import Causal, Dense, Lengths
from regard.training.parallel import Layout, Mesh
from regard.training.parallel.context import Parts, check_context
from regard.training.parallel.mesh import TORCHRUN, cut_row
from regard.training.parallel.tensor import check_tensor

RANKS = Path(__file__).resolve().parent.parent / "mesh_ranks.py"


def start(folder: Path) -> str:
    """Run all cases in processes of their own; what they said, if one failed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error::FutureWarning", str(RANKS), str(folder)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if not ended.returncode:
        return ""
    logs = [log.read_text() for log in sorted(folder.glob("*.log"))]
    return "\n".join([ended.stdout, ended.stderr, *logs, "a rank failed, or all hang"])


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the outcomes of all cases, made once for all of pytest's workers."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "mesh"
    done = folder / "done"
    try:
        folder.mkdir()
    except FileExistsError:
        while not done.exists():
            time.sleep(0.1)
    else:
        (folder / "said").write_text(start(folder))
        done.touch()
    if said := (folder / "said").read_text():
        pytest.fail(said)
    return folder


def read(folder: Path, case: Case) -> dict[str, Any]:
    read: dict[str, Any] = torch.load(folder / f"{case.name}.pt", weights_only=True)
    return read


def compare(found: dict[str, Any], wanted: dict[str, Any], bound: float) -> None:
    for word in ("losses", "norms"):
        given, expected = torch.tensor(found[word]), torch.tensor(wanted[word])
        told = f"{word}: {{}}".format
        torch.testing.assert_close(given, expected, rtol=bound, atol=0, msg=told)
    assert list(found["state"]) == list(wanted["state"])
    # By the largest number of a kind (weights, exp_avg, ...): some gradients are 0 but for
    # rounding.
    kinds = {name: name.split("/")[2:] or ["model"] for name in wanted["state"]}
    largest = {kind: 0.0 for (kind,) in kinds.values()}
    for name, (kind,) in kinds.items():
        largest[kind] = max(largest[kind], float(wanted["state"][name].abs().max()))
    for name, tensor in wanted["state"].items():
        told = f"{name}: {{}}".format
        atol = 10 * bound * largest[kinds[name][0]]
        torch.testing.assert_close(found["state"][name], tensor, rtol=0, atol=atol, msg=told)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_many_devices_train_as_one(case: Case, outcomes: Path) -> None:
    alone = train(case, Mesh.alone())
    assert alone.norms[0] > 0.1, "the norm is clipped, or nothing is seen of clipping"
    compare(read(outcomes, case), vars(alone), case.bound)


def test_state_of_four_goes_on_alone(outcomes: Path) -> None:
    four = read(outcomes, SAVING)
    resumed = vars(train(SAVING, Mesh.alone(), four["saved"]))
    # What the four did afterwards is what one does from there.
    wanted = {word: four[word][SAVED:] for word in ("losses", "norms")}
    compare(resumed, {**four, **wanted}, SAVING.bound)


@pytest.mark.parametrize("case", RESUMING, ids=lambda case: case.name)
def test_state_of_four_goes_on_with_two_and_four(case: Case, outcomes: Path) -> None:
    uninterrupted = vars(train(case, Mesh.alone()))
    wanted = {word: uninterrupted[word][SAVED:] for word in ("losses", "norms")}
    compare(read(outcomes, case), {**uninterrupted, **wanted}, case.bound)


def tune(model: Transformer, optimizers: list[torch.optim.Optimizer], steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = torch.randint(4, 37, (2, 7), generator=torch.Generator().manual_seed(step))
        loss = model(ids.to(next(model.parameters()).device)).logits.square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def make_both(model: nn.Module, fused: bool = False) -> list[torch.optim.Optimizer]:
    wide = [x for name, x in model.named_parameters() if "proj.weight" in name]
    rest = [x for name, x in model.named_parameters() if "proj.weight" not in name]
    return [torch.optim.Muon(wide), torch.optim.AdamW(rest, fused=fused)]


@pytest.mark.parametrize("fused", (False, True))
def test_alone_goes_on_bit_for_bit(fused: bool) -> None:
    go_on_bit_for_bit("cpu", fused)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", (False, True))
def test_a_gpu_goes_on_bit_for_bit(fused: bool) -> None:
    go_on_bit_for_bit("cuda", fused)


def go_on_bit_for_bit(device: str, fused: bool) -> None:
    mesh = Mesh.alone(device)
    model = mesh.prepare(make_model("gpt2"))
    optimizers = make_both(model, fused)
    tune(model, optimizers, range(3))
    state = mesh.state(model, optimizers)
    assert state is not None
    kept = {name: tensor.clone() for name, tensor in state.items()}
    uninterrupted = tune(model, optimizers, range(3, 6))
    other = mesh.prepare(make_model("gpt2"))
    places = [weight.data_ptr() for weight in other.parameters()]
    others = make_both(other, fused)
    mesh.restore(other, others, state)
    assert tune(other, others, range(3, 6)) == uninterrupted
    assert places == [weight.data_ptr() for weight in other.parameters()]
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    # Steps after it do not reach into a state that was taken, or given.
    assert all(torch.equal(state[name], kept[name]) for name in kept)


def test_alone_restores_over_other_steps() -> None:
    mesh, model = Mesh.alone(), make_model("gpt2")
    optimizers = make_both(model)
    fresh = mesh.state(model, optimizers)
    assert fresh is not None and not any(name.startswith("optim/") for name in fresh)
    first = tune(model, optimizers, range(3))
    mesh.restore(model, optimizers, fresh)
    assert tune(model, optimizers, range(3)) == first


def test_state_names_each_tensor_once_as_one_device_does() -> None:
    model = make_model("gpt2")
    optimizers = make_both(model)
    tune(model, optimizers, range(1))
    state = Mesh.alone().state(model, optimizers)
    assert state is not None
    weights = [name for name in state if name.startswith("model/")]
    assert weights == ["model/" + name for name, _ in model.named_parameters()]
    assert "model/decoder_embed.tokens.weight" in state and "model/head.weight" not in state
    assert "optim/decoder_embed.tokens.weight/exp_avg_sq" in state
    assert "optim/decoder.layers.0.ffn.up_proj.weight/momentum_buffer" in state
    assert float(state["optim/decoder.norm.weight/step"]) == 1
    assert all(type(tensor) is Tensor and tensor.device.type == "cpu" for tensor in state.values())


def test_wrapped_models_have_plain_names() -> None:
    model = make_model("gpt2")
    names = list(Mesh.alone().state(model) or ())
    wrapped = torch.compile(model, backend="eager")
    assert list(Mesh.alone().state(wrapped) or ()) == names


def test_a_state_of_another_model_is_refused() -> None:
    mesh, model = Mesh.alone(), make_model("gpt2")
    optimizers = make_both(model)
    tune(model, optimizers, range(1))
    state = mesh.state(model, optimizers)
    assert state is not None
    wider = make_model("gpt2", vocab_size=41)
    with pytest.raises(ValueError, match=r"tokens.weight has shape \(37, 20\).*is \(41, 20\)"):
        mesh.restore(wider, make_both(wider), state)
    deeper = make_model("gpt2", n_layer=4)
    with pytest.raises(ValueError, match="16 weights are missing"):
        mesh.restore(deeper, make_both(deeper), state)
    with pytest.raises(ValueError, match="no optimizer has"):
        mesh.restore(model, optimizers[:1], state)
    with pytest.raises(ValueError, match="make optimizers after prepare"):
        mesh.restore(model, make_both(deeper), state)
    mesh.restore(model, optimizers, {**state, "average/anything": torch.zeros(3)})


def test_alone_clips_as_torch_does() -> None:
    model, twin = make_model("gpt2"), make_model("gpt2")
    for each in (model, twin):
        each(torch.arange(5)[None]).logits.square().sum().backward()
    norm = Mesh.alone().clip(model, 0.5)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.5)) and norm > 0.5
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad, two.grad)


def test_launch_without_torchrun_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE.*torchrun --nproc-per-node 6"):
        Mesh.launch(Layout(data=3, tensor=2))


def test_layout_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"started 4 processes.* = 6;.*--nproc-per-node 6"):
        Mesh.launch(Layout(data=3, tensor=2))
    with pytest.raises(ValueError, match="tpu"):
        Mesh.launch(Layout(data=4), "tpu")
    with pytest.raises(ValueError, match="data"):
        Layout(data=0)


def test_one_process_of_torchrun_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with Mesh.launch(Layout()) as mesh:
        assert (mesh.rank, mesh.size, mesh.part, mesh.is_main) == (0, 1, 0, True)
        batch = {"ids": torch.arange(6).view(2, 3)}
        assert mesh.cut(batch)["ids"] is batch["ids"]
        assert mesh.total(torch.tensor(3.0)) == 3 and mesh.any(True) and not mesh.any(False)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gpt2", {}, "n_heads=5, which 2 does not divide"),
        ("llama", {"num_key_value_heads": 1}, "n_kv_heads=1, which 2 does not divide"),
        ("llama", {}, "ffn_dim=31, which 2 does not divide"),
        ("qwen3", {}, "qk_norm"),
        ("bloom", {"n_head": 4}, "ALiBi"),
        ("t5", {"num_heads": 4}, "relative table"),
    ],
)
def test_layers_that_cannot_be_shared_are_named(
    family: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        check_tensor(make_model(family, **changes), 2)


def test_sinks_and_learned_activations_are_not_shared() -> None:
    model = make_model("llama", intermediate_size=30)
    check_tensor(model, 2)
    model.decoder.layers[1].ffn.activation = nn.PReLU()
    with pytest.raises(ValueError, match=r"layers.1.ffn has an activation that learns"):
        check_tensor(model, 2)
    model = make_model("llama", intermediate_size=30)
    model.decoder.layers[2].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(ValueError, match=r"layers.2.self_attn has sinks"):
        check_tensor(model, 2)


def test_texts_that_cannot_be_cut_are_refused() -> None:
    check_context(make_model("llama"), 2)
    with pytest.raises(ValueError, match="encoder–decoder, which has two texts"):
        check_context(make_model("original"), 2)
    with pytest.raises(ValueError, match="change with the length"):
        check_context(make_model("llama-dynamic"), 2)
    with pytest.raises(ValueError, match=r"ids is \(4, 13\).*context=2"):
        cut_row("ids", torch.zeros(4, 13), 2)


def test_masks_of_keys_as_they_lie_are_refused_where_texts_are_cut() -> None:
    parts = Parts(None, 0, 2)  # type: ignore[arg-type]
    causal = Causal()
    assert parts.widen(causal) is causal
    for mask in (Dense(torch.ones(3, 3, dtype=torch.bool)), Lengths(torch.tensor([3]))):
        with pytest.raises(ValueError, match=f"{type(mask).__name__} counts keys by their index"):
            parts.widen(causal & mask)
