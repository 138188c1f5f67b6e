"""The guided term is its formula, and guiding leaves no trace in model, outputs and evaluation."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from guided_attention import AlignedTask, Guide, LinkTable, guide_loss, guided
from rounding import assert_within, bound_weights
from tiny_runs import ORIGINAL, PLAIN, Outcome, differing, make_model, pair_task
from torch import Tensor, nn
from word_alignment import Links, Rows, align_pairs

from regard.layers import BlockConfig, observing
from regard.models.config import ModelConfig
from regard.models.transformer import Transformer
from regard.ops import DenseBias, Wants

LINKS = Links(np.array([0, 0, 0, 2]), np.array([1, 0, 2, 0]), np.array([0, 2, 2, 1]))


def test_targets_are_uniform_over_links_behind_the_start_token() -> None:
    target = LinkTable(LINKS, 3).batch([2, 0, 1, 0], S=5, T=4)
    expected = torch.zeros(4, 4, 5)
    expected[0, 2, 0] = 1
    for row in (1, 3):
        expected[row, 1, 1] = 1
        expected[row, 3, [0, 2]] = 0.5
    assert torch.equal(target, expected)
    behind = LinkTable(LINKS, 3).batch([0], S=6, T=5, shift=2, offset=1)
    assert torch.equal(behind[0, 1:, 1:], expected[1])


def test_links_outside_the_batch_are_refused() -> None:
    table = LinkTable(LINKS, 3)
    for change in ({"T": 3}, {"S": 2}, {"shift": 2}, {"offset": 3}):
        with pytest.raises(ValueError, match="pair 0 has links beyond"):
            table.batch([1, 0], **({"S": 5, "T": 4} | change))
    with pytest.raises(ValueError, match="table has 0 to 2"):
        table.batch([3], 5, 4)
    with pytest.raises(ValueError, match="n_pairs is 2"):
        LinkTable(LINKS, 2)


def test_guide_loss_worked_by_hand() -> None:
    """Two heads, one source token masked; the second position has no link."""
    weights = torch.tensor([[[0.5, 0.5, 0.0], [0.1, 0.9, 0.0], [0.2, 0.8, 0.0]]])
    other = torch.tensor([[[0.1, 0.9, 0.0], [0.3, 0.7, 0.0], [1.0, 0.0, 0.0]]])
    both = torch.stack([weights, other], 1).requires_grad_()
    target = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.5, 0.0]]])
    expected = -(math.log(0.3) + 0.5 * math.log(0.6) + 0.5 * math.log(0.4)) / 2
    loss = guide_loss(both, target)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    (grad,) = torch.autograd.grad(loss, both)
    # The first position's: half of 1/0.3, of which each head has half.
    torch.testing.assert_close(grad[0, :, 0, 0], -torch.tensor([5 / 6, 5 / 6]))
    assert grad.isfinite().all()
    assert guide_loss(both, target, torch.tensor(8)).item() == pytest.approx(expected / 4)
    nothing = guide_loss(both, torch.zeros_like(target))
    assert nothing.item() == 0.0 and nothing.requires_grad
    masked = torch.tensor([[[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    far = guide_loss(both, masked)
    assert 80 < far.item() < math.inf
    assert torch.autograd.grad(far, both)[0].isfinite().all()


C, H = 10, 5


def translator(n_layers: int = 2, **changes: Any) -> Transformer:
    torch.manual_seed(7)
    config = {"dim": C, "n_heads": H, "head_dim": 3, "ffn_dim": 13, **changes}
    return Transformer(
        ModelConfig(
            family="test",
            vocab_size=17,
            max_len=None,
            encoder=(BlockConfig(**config),) * n_layers,
            decoder=(BlockConfig(cross_attention=True, **config),) * n_layers,
        )
    )


def some_batch() -> dict[str, Tensor]:
    torch.manual_seed(11)
    real = torch.arange(7) < torch.tensor([7, 4, 5])[:, None]
    return {
        "ids_bt": torch.randint(17, (3, 11)),
        "source": torch.randint(17, (3, 7)),
        "source_real": real,
    }


RULES = [
    {},
    {"n_kv_heads": 1, "softcap": 1.3},
    {"sinks": True, "scale": 2.0},
    {"qk_norm": "rms"},
]


@pytest.mark.parametrize("rule", RULES)
def test_caught_weights_are_those_that_the_layer_used(rule: dict[str, Any]) -> None:
    model = translator(**rule)
    cross = model.decoder.layers[1].cross_attn
    if cross.sinks is not None:
        nn.init.normal_(cross.sinks)
    wide = copy.deepcopy(model).double()
    with guided(model, 1, (4, 1)) as heads:
        model(**some_batch())
    with observing(model, Wants(weights=True)) as seen:
        model(**some_batch())
    with observing(wide, Wants(weights=True)) as seen_wide:
        wide(**some_batch())
    name = "decoder.layers.1.cross_attn"
    plain, exact = (each[name].weights[:, [4, 1]] for each in (seen, seen_wide))
    assert_within(heads.weights(), exact, bound_weights(plain, exact))
    assert (heads.weights()[1, :, :, 4:] == 0).all()


def test_a_bias_of_each_head_and_a_row_that_sees_nothing() -> None:
    model = translator()
    cross = model.decoder.layers[0].cross_attn
    x, memory = torch.randn(3, 11, C), torch.randn(3, 7, C)
    added, mask = torch.randn(H, 11, 7), torch.rand(3, H, 11, 7) < 0.7
    mask[1, 3, 2], added[3, 4] = False, -math.inf
    with guided(model, 0, (3, 0)) as heads:
        cross(x, memory, mask=mask, bias=DenseBias(added))
        weights = heads.weights()
    found = []
    for layer, dtype in ((cross, torch.float32), (copy.deepcopy(cross).double(), torch.float64)):
        inputs, bias = (x.to(dtype), memory.to(dtype)), DenseBias(added.to(dtype))
        seen = layer.observe(*inputs, wants=Wants(weights=True), mask=mask, bias=bias)
        found.append(seen.weights[:, [3, 0]])
    plain, exact = found
    assert_within(weights, exact, bound_weights(plain, exact))
    assert (weights[1, 0, 2] == 0).all() and (weights[:, 0, 4] == 0).all()
    grads = torch.autograd.grad(weights.square().sum(), list(cross.q_proj.parameters()))
    assert all(grad.isfinite().all() for grad in grads)


def test_outputs_are_bit_identical_and_nothing_is_left_behind() -> None:
    model = translator(dropout=0.3, attention_dropout=0.2)
    before = [dict(vars(layer)) for layer in model.modules()]
    answers = []
    for with_guide in (False, True):
        torch.manual_seed(5)
        if with_guide:
            with guided(model, 0, (1,)), guided(model, 1, (2,)):
                out = model(**some_batch()).logits
        else:
            out = model(**some_batch()).logits
        answers.append((out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))
    with pytest.raises(KeyError), guided(model, 0, (1,)):
        raise KeyError
    assert [set(vars(layer)) for layer in model.modules()] == [set(each) for each in before]


def test_gradients_reach_queries_keys_and_the_encoder_in_float32_under_autocast() -> None:
    model, target = translator(), torch.zeros(3, 11, 7)
    target[:, 5, 2] = 1
    with guided(model, 1, (0, 3)) as heads, torch.autocast("cpu", torch.bfloat16):
        model(**some_batch())
        loss = guide_loss(heads.weights(), target)
    assert loss.dtype == torch.float32
    loss.backward()
    cross = model.decoder.layers[1].cross_attn
    for weight in (cross.q_proj.weight, cross.k_proj.weight):
        per_head = weight.grad.view(H, 3, C).abs().sum((1, 2))
        assert (per_head > 0).tolist() == [True, False, False, True, False]
    assert cross.v_proj.weight.grad is None
    assert model.encoder.layers[0].ffn.down_proj.weight.grad.abs().sum() > 0


def test_a_compiled_model_is_caught_too_without_compiling_every_time() -> None:
    model = translator(n_layers=1).eval()
    graphs: list[int] = []

    def count(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(1)
        return graph.forward

    compiled = torch.compile(model, backend=count, fullgraph=True)
    target = torch.zeros(3, 11, 7)
    target[:, 5, 2] = 1
    grads = []
    for which in (model, compiled, compiled, compiled):
        with guided(which, 0, (0, 3)) as heads:
            which(**some_batch())
            loss = guide_loss(heads.weights(), target)
        grads.append(torch.autograd.grad(loss, model.decoder.layers[0].cross_attn.q_proj.weight))
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0])
    assert len(graphs) == 1


def test_what_cannot_be_guided_is_refused() -> None:
    model = translator()
    for heads in ((), (0, 0), (H,), (-1,)):
        with pytest.raises(ValueError, match="each once"), guided(model, 0, heads):
            pass
    with pytest.raises(ValueError, match="no decoder layer 2"), guided(model, 2, (0,)):
        pass
    with pytest.raises(TypeError, match=r"no decoder\.layers"), guided(nn.Linear(3, 3), 0, (0,)):
        pass
    with guided(model, 0, (0,)) as heads, pytest.raises(RuntimeError, match="has not run"):
        heads.weights()
    with guided(model, 0, (0,)) as heads:
        with torch.no_grad():
            model(**some_batch())
            assert not heads.weights().requires_grad
        with pytest.raises(RuntimeError, match="without gradients"):
            heads.weights()


def test_guiding_alone_teaches_a_head_to_align() -> None:
    """Links found by statistics, then nothing but the guided term: the heads learn the cipher."""
    random = np.random.default_rng(5)
    rows = [random.permutation(np.arange(2, 17))[:6].tolist() for _ in range(128)]
    coded = [[(word * 4) % 15 + 2 for word in reversed(row)] for row in rows]
    table = LinkTable(align_pairs(Rows.of(rows), Rows.of(coded)), 128)
    target = table.batch(range(128), S=6, T=7)
    assert target.sum() > 0.9 * 128 * 6
    model = translator(dim=20, head_dim=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    source, written = torch.tensor(rows), torch.tensor([[1, *row] for row in coded])
    losses = []
    for _ in range(60):
        with guided(model, 1, (1, 3)) as heads:
            model(written, source=source)
            loss = guide_loss(heads.weights(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    right = heads.weights().mean(1).argmax(-1) == target.argmax(-1)
    assert losses[0] > 1.5
    assert right[target.any(-1)].float().mean() > 0.95


# ---- The term in a run


def aligned(folder: Path, weight: float = 1.0, offset: int = 0) -> AlignedTask:
    task = pair_task(folder)
    links = align_pairs(task.pairs.sources, task.pairs.targets)
    table = LinkTable(links, task.pairs.sources.n_documents)
    return AlignedTask(task, Guide(table, 0, (0,), weight, offset))


def test_links_go_with_their_pairs(tmp_path: Path) -> None:
    """Targets are made token by token, so most links must lie on the diagonal, one step on."""
    batch = aligned(tmp_path).batch(1)
    links = batch["links"]
    assert links.shape == (*batch["target_in"].shape, batch["source"].shape[1])
    b, t, s = links.nonzero(as_tuple=True)
    assert len(b) > 5 and (t == s + 1).float().mean() > 0.8
    b, t, s = aligned(tmp_path, offset=1).batch(1)["links"].nonzero(as_tuple=True)
    assert (t == s).float().mean() > 0.8


def test_the_term_is_the_loss_of_the_guided_heads(tmp_path: Path) -> None:
    task, model = aligned(tmp_path, weight=0.5), make_model(ORIGINAL).eval()
    batch = task.batch(0)
    plain = task.vectors(model, batch)
    with task.auxiliary_loss(model, batch) as term:
        assert torch.equal(plain, task.vectors(model, batch))
    with guided(model, 0, (0,)) as heads:
        task.vectors(model, batch)
        expected = 0.5 * guide_loss(heads.weights(), batch["links"])
    assert torch.equal(term.loss(), expected) and expected > 0
    cross = model.decoder.layers[0].cross_attn
    (gradient,) = torch.autograd.grad(term.loss(), [cross.q_proj.weight])
    # Of two heads only the first is guided; nothing is left in the model.
    assert gradient[:6].any() and not gradient[6:].any()
    assert cross.wants is None


def test_the_term_is_part_of_the_loss_and_teaches_but_not_of_the_evaluation(tmp_path: Path) -> None:
    config = replace(PLAIN, steps=30, lr=2e-2)
    task = aligned(tmp_path / "data")
    assert all("links" not in batch for batch in task.held_out())
    plain = Outcome("translate", tmp_path / "0", config, task=task.task)
    told = Outcome("translate", tmp_path / "1", config, task=task)
    assert told.ear.losses[0] > plain.ear.losses[0] + 1.0
    terms, batch = [], task.batch(0)
    for run in (plain, told):
        with task.auxiliary_loss(run.model, batch) as term:
            task.vectors(run.model, batch)
        terms.append(float(term.loss().detach()))
    assert terms[1] < 0.8 * terms[0]
    # Evaluation is the plain loss, so that runs can be compared.
    assert told.ear.evaluations[-1].loss < told.ear.losses[-1]


def test_a_guided_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    task, config = aligned(tmp_path / "data", 0.5), replace(PLAIN, eval_every=3, accumulate=2)
    whole = Outcome("translate", tmp_path / "whole", config, task=task)
    first = Outcome("translate", tmp_path / "parts", config, task=task, stop_at=3)
    second = Outcome("translate", tmp_path / "parts", config, task=task, resume=True)
    assert first.ear.figures + second.ear.figures == whole.ear.figures
    assert differing(second.snapshot, whole.snapshot) == []
