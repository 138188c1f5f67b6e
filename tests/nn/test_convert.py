"""`convert` swaps torch.nn's attention inside any model and changes nothing else.

Letters: B batch, T target length, S source length, H heads, C model width.
"""

import copy
import pickle
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import regard
import regard.nn
from regard.layers.observing import observing
from regard.nn.convert import OURS, convert
from regard.ops import Wants

B, T, S, H, C = 3, 5, 7, 3, 15
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")


class Model(nn.Module):
    """A bit of everything: a whole Transformer, a bare attention, a container."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(C, C)
        self.body = nn.Transformer(C, H, 1, 1, 11, dropout=0.0, activation="gelu", batch_first=True)
        self.tail = nn.ModuleDict(
            {"look": nn.MultiheadAttention(C, H, batch_first=True, kdim=C - 2)}
        )

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        x = self.body(self.embed(src), tgt, tgt_mask=mask)
        return self.tail["look"](x, src[..., 2:], src)[0]


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(B, S, C), torch.randn(B, T, C)


def test_convert_tells_what_it_swapped() -> None:
    model = Model()
    done = convert(model)
    assert done.model is model and done.skipped == {}
    assert done.swapped == {
        "body": "Transformer",
        "body.encoder": "TransformerEncoder",
        "body.encoder.layers.0": "TransformerEncoderLayer",
        "body.encoder.layers.0.self_attn": "MultiheadAttention",
        "body.decoder": "TransformerDecoder",
        "body.decoder.layers.0": "TransformerDecoderLayer",
        "body.decoder.layers.0.self_attn": "MultiheadAttention",
        "body.decoder.layers.0.multihead_attn": "MultiheadAttention",
        "tail.look": "MultiheadAttention",
    }
    assert not any(type(m) in OURS for m in model.modules())
    assert "swapped  tail.look: MultiheadAttention" in str(done)


@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_stay_equal(training: bool) -> None:
    model = Model().double().train(training)
    given = [x.double() for x in inputs()]
    leaves = list(model.parameters())
    wanted = model(*given)
    gradients = torch.autograd.grad(wanted.square().sum(), leaves)
    convert(model)
    got = model(*given)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(torch.autograd.grad(got.square().sum(), leaves), gradients)


def test_parameters_and_buffers_are_the_same_objects_in_the_same_state() -> None:
    model = Model().double().eval()
    model.body.encoder.layers[0].self_attn.in_proj_weight.requires_grad_(False)
    model.body.decoder.train()
    before = [(n, id(p), p.requires_grad, p.dtype) for n, p in model.named_parameters()]
    flags = [(n, m.training) for n, m in model.named_modules()]
    keys = list(model.state_dict())
    convert(model)
    assert before == [(n, id(p), p.requires_grad, p.dtype) for n, p in model.named_parameters()]
    assert flags == [(n, m.training) for n, m in model.named_modules()]
    assert keys == list(model.state_dict())


def test_an_optimiser_made_before_still_steps_the_model() -> None:
    model = Model()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    convert(model)
    before = model.tail["look"].v_proj_weight.clone()
    model(*inputs()).square().sum().backward()
    optimiser.step()
    assert not torch.equal(model.tail["look"].v_proj_weight, before)


def test_tied_weights_stay_tied() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(C, H), nn.MultiheadAttention(C, H)])
    model[1].in_proj_weight = model[0].in_proj_weight
    convert(model)
    assert model[1].in_proj_weight is model[0].in_proj_weight


def test_hooks_are_kept_and_fire() -> None:
    model = Model()
    fired = []
    look, layer = model.tail["look"], model.body.encoder.layers[0]
    look.register_forward_hook(lambda *_: fired.append("after"))
    look.register_forward_pre_hook(lambda *_: fired.append("before"))
    layer.linear1.register_forward_hook(lambda *_: fired.append("inside"))
    convert(model)
    with torch.no_grad():
        model.eval()(*inputs())
    assert fired == ["inside", "before", "after"]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_a_model_that_is_itself_such_a_module_is_swapped_in_place(kind: type[nn.Module]) -> None:
    made: nn.Module
    if kind is nn.MultiheadAttention or kind.__name__.endswith("Layer"):
        made = kind(C, H)
    elif kind is nn.Transformer:
        made = kind(C, H, 1, 1, 11)
    else:
        made = kind(getattr(nn, kind.__name__ + "Layer")(C, H, 11), 2)
    done = convert(made)
    assert done.model is made and type(made) is OURS[kind]
    assert done.swapped[""] == kind.__name__


def test_a_module_used_twice_is_swapped_once_and_stays_one() -> None:
    shared = nn.MultiheadAttention(C, H)
    model = nn.ModuleDict({"first": shared, "second": shared})
    assert convert(model).swapped == {"first": "MultiheadAttention"}
    assert model["second"] is model["first"] is shared


def test_a_second_conversion_finds_nothing_left() -> None:
    model = Model()
    convert(model)
    again = convert(model)
    assert again.swapped == again.skipped == {}
    assert "nothing" in str(again)


def test_a_converted_model_can_be_copied_pickled_and_loaded_into_torchs() -> None:
    model = Model()
    state = copy.deepcopy(model.state_dict())
    convert(model)
    given = inputs()
    wanted = model(*given)
    assert torch.equal(copy.deepcopy(model)(*given), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(model))(*given), wanted)
    Model().load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(state, strict=True)


def test_a_converted_model_can_be_observed() -> None:
    model = convert(Model()).model
    with observing(model, Wants(weights=True)) as seen:
        model(*inputs())
    assert seen["body.decoder.layers.0.multihead_attn"].weights.shape == (B, H, T, S)
    assert seen["tail.look"].weights.shape == (B, H, T, S)


def test_a_padded_sample_that_was_nan_becomes_finite() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 11, batch_first=True), 2)
    x, pad = torch.randn(B, S, 12), torch.zeros(B, S, dtype=torch.bool)
    pad[1] = True
    with torch.no_grad():
        assert convert(encoder).model.eval()(x, src_key_padding_mask=pad).isfinite().all()


# What is left alone


class Loud(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return output * 2, weights


class Renamed(nn.TransformerEncoderLayer):
    def __init__(self, width: int) -> None:
        super().__init__(width, 2, 11, dropout=0.0, batch_first=True)


class OwnForward(nn.TransformerEncoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) + 1


class OwnPart(nn.TransformerEncoderLayer):
    def _ff_block(self, x: Tensor) -> Tensor:
        return super()._ff_block(x) * 3


class OwnStack(nn.TransformerEncoder):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) - 1


def test_a_subclass_with_its_own_forward_is_left_alone_and_told() -> None:
    model = nn.ModuleDict({"loud": Loud(C, H), "plain": nn.MultiheadAttention(C, H)})
    done = convert(model)
    assert type(model["loud"]) is Loud and done.swapped == {"plain": "MultiheadAttention"}
    assert done.skipped["loud"] == (
        "Loud is a subclass of torch.nn.MultiheadAttention with its own forward"
    )
    assert "skipped  loud" in str(done)


def test_a_subclass_with_only_a_constructor_of_its_own_is_swapped() -> None:
    model = Renamed(12)
    x = torch.randn(B, S, 12)
    wanted = model(x)
    assert convert(model).swapped[""] == "TransformerEncoderLayer"
    torch.testing.assert_close(model(x), wanted)


@pytest.mark.parametrize("kind", [OwnForward, OwnPart])
def test_attention_inside_a_layer_left_alone_is_swapped_and_used_in_evaluation(
    kind: type[nn.TransformerEncoderLayer],
) -> None:
    layer = kind(12, 2, 11, dropout=0.0, batch_first=True).eval()
    x = torch.randn(B, S, 12)
    wanted = layer.train()(x)
    done = convert(layer)
    assert done.swapped == {"self_attn": "MultiheadAttention"} and list(done.skipped) == [""]
    with torch.no_grad(), observing(layer, Wants(weights=True)) as seen:
        torch.testing.assert_close(layer.eval()(x), wanted)
    assert seen["self_attn"].weights.shape == (B, 2, S, S)


def test_a_stack_left_alone_runs_its_swapped_layers_on_padded_batches() -> None:
    inner = nn.TransformerEncoderLayer(12, 2, 11, dropout=0.0, batch_first=True)
    stack = OwnStack(inner, 2)
    x = torch.randn(B, S, 12)
    pad = torch.arange(S) >= torch.tensor([[S], [2], [4]])
    wanted = stack(x, src_key_padding_mask=pad)
    done = convert(stack)
    assert list(done.skipped) == [""] and "layers.1" in done.swapped
    with torch.no_grad():
        got = stack.eval()(x, src_key_padding_mask=pad)
    torch.testing.assert_close(got[~pad], wanted[~pad])


def test_a_replaced_forward_is_left_alone_and_told() -> None:
    module = nn.MultiheadAttention(C, H)
    module.forward = types.MethodType(lambda self, x: x, module)  # type: ignore[method-assign]
    done = convert(module)
    assert type(module) is nn.MultiheadAttention and "forward was replaced" in done.skipped[""]
    assert module(1) == 1


def test_a_parametrized_weight_is_left_alone_and_told() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(C, H), nn.MultiheadAttention(C, H)])
    parametrizations.orthogonal(model[0], "in_proj_weight")
    parametrizations.weight_norm(model[1].out_proj)
    x = torch.randn(S, B, C)
    wanted = [layer(x, x, x)[0] for layer in model]
    done = convert(model)
    assert "in_proj_weight is parametrized" in done.skipped["0"]
    assert done.swapped == {"1": "MultiheadAttention"}
    torch.testing.assert_close([layer(x, x, x)[0] for layer in model], wanted)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got dict"):
        convert({})  # type: ignore[arg-type]


def test_convert_is_a_public_name() -> None:
    assert regard.convert is regard.nn.convert is convert
