"""What keys add and what that did, against the formulas with every matrix made."""

from __future__ import annotations

from typing import Any

import lens_subjects
import numpy as np
import pytest
import torch
import transformers as hf
from tiny_checkpoints import CONFIGS
from torch import Tensor, nn

import regard
from regard.lens.contributions import find_projection
from regard.lens.watch import watch
from regard.models import Transformer, config_of


def draw(n: int) -> Tensor:
    return torch.randint(5, 37, (1, n), generator=torch.Generator().manual_seed(n))


def bert() -> Any:
    return lens_subjects.text_model(hf.BertConfig(**lens_subjects.BERT), hf.BertModel)


def eager(name: str) -> Any:
    model = bert() if name == "bert" else lens_subjects.SUBJECTS[name]()
    model.set_attn_implementation("eager")
    return model


def parts(model: Any, name: str, layer: int) -> tuple[nn.Module, nn.Module, int]:
    """What makes the values of a layer, what reads its heads, and where in it values begin."""
    if name == "llama":
        own = model.model.layers[layer].self_attn
        return own.v_proj, own.o_proj, 0
    if name == "gpt2":
        own = model.transformer.h[layer].attn
        return own.c_attn, own.c_proj, 2 * model.config.n_embd
    own = model.encoder.layer[layer].attention
    return own.self.value, own.output.dense, 0


def matrix(projection: Any) -> Tensor:
    """(C, H · E), whichever way round the layer has it."""
    return projection.weight.T if type(projection).__name__ == "Conv1D" else projection.weight


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("heads", [None, (2, 0)])
def test_norms_are_those_of_projected_values(name: str, heads: Any) -> None:
    model, ids, layer = eager(name), draw(13), 1
    values, projection, first = parts(model, name, layer)
    seen: list[Tensor] = []
    values.register_forward_hook(lambda module, args, out: seen.append(out[0, :, first:]))
    with torch.no_grad(), watch(model, keep=("qk", "values"), heads=heads) as record:
        model(ids)
    config = model.config
    n_heads = config.num_attention_heads
    n_kv = getattr(config, "num_key_value_heads", None) or n_heads
    v_sge = seen[0].double().reshape(13, n_kv, -1)
    weight_che = matrix(projection).double().reshape(-1, n_heads, v_sge.shape[2])
    found = record.value_norms(layer)
    assert found is not None
    for at, head in enumerate(heads or range(n_heads)):
        value_se = v_sge[:, head // (n_heads // n_kv)]
        want = (value_se @ weight_che[:, head].T).norm(dim=-1)
        assert found[at] == pytest.approx(want.detach().numpy(), rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_norms_are_the_same_whether_a_text_is_read_or_written(name: str) -> None:
    model, ids = eager(name), draw(7)
    with torch.no_grad(), watch(model, keep=("qk", "values")) as written:
        text = model.generate(ids, max_new_tokens=5, do_sample=False)
    with torch.no_grad(), watch(model, keep=("qk", "values")) as read:
        model(text[:, :-1])
    for place in range(len(read.places)):
        one, two = written.value_norms(place), read.value_norms(place)
        assert one is not None and two is not None
        assert one == pytest.approx(two, rel=1e-4)


def test_a_model_of_ours_has_the_norms_of_its_original() -> None:
    torch.manual_seed(3)
    model, ids = Transformer(config_of(CONFIGS["llama"])).eval(), draw(11)
    assert model.decoder is not None
    with torch.no_grad(), watch(model, keep=("qk", "values")) as record:
        model(ids)
    layer = model.get_submodule(record.places[2].name)
    caught: list[Tensor] = []
    layer.v_proj.register_forward_hook(lambda module, args, out: caught.append(out[0]))
    with torch.no_grad():
        model(ids)
    v_sge = caught[0].double().reshape(11, 2, 8)
    weight_che = layer.out_proj.weight.double().reshape(24, 4, 8)
    found = record.value_norms(2)
    assert found is not None
    want = torch.stack([(v_sge[:, h // 2] @ weight_che[:, h].T).norm(dim=-1) for h in range(4)])
    assert found == pytest.approx(want.detach().numpy(), rel=1e-5)


@pytest.mark.parametrize("kind", ["attention", "layer", "other widths"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_s_own_modules_have_norms_too(kind: str, batch_first: bool) -> None:
    torch.manual_seed(3)
    given: dict[str, Any] = {"batch_first": batch_first}
    if kind == "layer":
        model: Any = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, **given).eval()
        attention, x = model.self_attn, torch.randn(7, 1, 12)
        inputs: tuple[Tensor, ...] = (x,)
        value = x
    else:
        widths = {"kdim": 10, "vdim": 8} if kind == "other widths" else {}
        attention = model = nn.MultiheadAttention(12, 3, **widths, **given).eval()
        wide = [12, widths.get("kdim", 12), widths.get("vdim", 12)]
        inputs = tuple(torch.randn(7, 1, n) for n in wide)
        value = inputs[2]
    with torch.no_grad(), watch(model, keep=("qk", "values")) as record:
        model(*(x.transpose(0, 1) if batch_first else x for x in inputs))
    same = kind != "other widths"
    weight = attention.in_proj_weight[24:] if same else attention.v_proj_weight
    v_she = nn.functional.linear(value[:, 0], weight, attention.in_proj_bias[24:])
    v_she = v_she.double().reshape(7, 3, 4)
    out_che = attention.out_proj.weight.double().reshape(12, 3, 4)
    want = torch.stack([(v_she[:, h] @ out_che[:, h].T).norm(dim=-1) for h in range(3)])
    found = record.value_norms(0)
    assert found is not None
    assert found == pytest.approx(want.detach().numpy(), rel=1e-5)


def gradient_matrices(model: Any, ids: Tensor) -> list[Tensor]:
    """Attention × gradient of each layer, the whole matrix, of the loss that the record has."""
    out = model(ids, output_attentions=True)
    for weights in out.attentions:
        weights.retain_grad()
    score(out).backward()
    return [weights.detach() * weights.grad for weights in out.attentions]


def score(out: Any) -> Tensor:
    """One number of a model's answer, of which all the answer is a part."""
    last = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return (last[0, -1] * torch.linspace(-1, 1, last.shape[2])).sum()


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("attend", ["eager", "sdpa"])
def test_sums_of_attention_times_gradient(name: str, attend: str) -> None:
    model, ids = eager(name), draw(13)
    want = gradient_matrices(model, ids)
    model.set_attn_implementation(attend)
    with watch(model, keep=("qk", "gradients")) as record:
        score(model(ids)).backward()
    group = model.config.num_attention_heads // (
        getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
    )
    for place, product_bhts in enumerate(want):
        found = record.gradients(place)
        assert found is not None
        rows, columns = product_bhts[0].sum(-1).numpy(), product_bhts[0].sum(-2)
        shared = columns.unflatten(0, (-1, group)).mean(1).repeat_interleave(group, 0).numpy()
        size = float(np.abs(rows).max())
        assert found[0] == pytest.approx(rows, abs=1e-5 * size)
        assert found[1] == pytest.approx(shared, abs=1e-5 * size)
        assert size > 1e-4


def test_gradients_of_our_own_model() -> None:
    """Σ of all rows is Σ of all columns: both are the sum of the whole matrix."""
    torch.manual_seed(3)
    model, ids = Transformer(config_of(CONFIGS["gpt2"])).eval(), draw(11)
    with watch(model, keep=("qk", "gradients")) as record:
        score(model(ids)).backward()
    for place in range(len(record.places)):
        found = record.gradients(place)
        assert found is not None
        rows, columns = found
        assert np.abs(rows).max() > 1e-6
        assert rows.sum(1) == pytest.approx(columns.sum(1), abs=1e-5 * float(np.abs(rows).sum()))


def test_gradients_without_a_backward_pass_are_refused_in_words() -> None:
    model = Transformer(config_of(CONFIGS["gpt2"])).eval()
    with (
        pytest.raises(ValueError, match="call backward"),
        watch(model, keep=("qk", "gradients")),
    ):
        model(draw(11))


def test_a_model_without_a_projection_is_refused_in_words() -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return regard.attention(x, x, x)

    model = Bare()
    assert find_projection(model, "", 12) is None
    with pytest.raises(ValueError, match='keep has "values"'), watch(model, keep=("qk", "values")):
        model(torch.randn(1, 3, 5, 4))
