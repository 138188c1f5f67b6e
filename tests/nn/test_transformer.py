"""regard.nn's Transformer layers and stacks against torch's, and what they promise beyond.

Letters: B batch, T target length, S source length, H heads, C model width.
"""

import copy
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard.nn
from regard.layers.observing import observing
from regard.ops import Wants

B, T, S, H, C, HIDDEN = 3, 5, 7, 3, 15, 11
SIZES: dict[str, Any] = {"d_model": C, "nhead": H, "dim_feedforward": HIDDEN}
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")


def build(home: Any, kind: str, seed: int = 0, **options: Any) -> nn.Module:
    """An encoder or decoder layer, a stack of two, or the whole, from torch.nn or regard.nn."""
    torch.manual_seed(seed)
    options = {**SIZES, "dropout": 0.0, **options}
    made: nn.Module
    if kind == "Transformer":
        made = home.Transformer(num_encoder_layers=2, num_decoder_layers=2, **options)
    elif kind.endswith("Layer"):
        made = getattr(home, kind)(**options)
    else:
        layer = getattr(home, kind + "Layer")(**options)
        made = getattr(home, kind)(layer, 2, norm=nn.LayerNorm(C, dtype=options.get("dtype")))
    return made


KINDS = [
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerDecoder",
    "Transformer",
]


def draw_call(
    kind: str, options: dict[str, Any], masks: str, batched: bool
) -> tuple[list[Tensor], dict[str, Any]]:
    """Inputs and masks of a call; every query keeps something to see."""
    dtype = options.get("dtype", torch.float32)

    def x(length: int) -> Tensor:
        first = options.get("batch_first", False)
        shape = (length, C) if not batched else (B, length, C) if first else (length, B, C)
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    def mask(n: int, m: int) -> Tensor:
        hidden = torch.rand(n, m) < 0.4
        hidden[:, 0] = False
        floats = torch.randn(n, m, dtype=dtype).masked_fill(hidden, float("-inf"))
        return floats if masks == "float" else hidden

    def pad(n: int) -> Tensor:
        hidden = torch.arange(n) >= torch.tensor([[n], [2], [4]])
        hidden = hidden if batched else hidden[1]
        floats = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, float("-inf"))
        return floats if masks == "float" else hidden

    if masks == "none":
        return ([x(S)] if "Encoder" in kind else [x(T), x(S)]), {}
    if kind == "Transformer":
        call = {"src_mask": mask(S, S), "tgt_mask": mask(T, T), "memory_mask": mask(T, S)}
        call |= {"src_key_padding_mask": pad(S), "tgt_key_padding_mask": pad(T)}
        return [x(S), x(T)], call | {"memory_key_padding_mask": pad(S)}
    if "Encoder" in kind:
        name = "src_mask" if kind.endswith("Layer") else "mask"
        return [x(S)], {name: mask(S, S), "src_key_padding_mask": pad(S)}
    call = {"tgt_mask": mask(T, T), "memory_mask": mask(T, S)}
    call |= {"tgt_key_padding_mask": pad(T), "memory_key_padding_mask": pad(S)}
    return [x(T), x(S)], call


def run(module: nn.Module, inputs: list[Tensor], call: dict[str, Any]) -> list[Tensor]:
    """The output and every gradient of a sum in which each entry counts differently."""
    output = module(*inputs, **call)
    total = (output * torch.arange(output.numel(), dtype=output.dtype).cos().view_as(output)).sum()
    return [output, *torch.autograd.grad(total, [*inputs, *module.parameters()])]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_torchs(kind: str, norm_first: bool, bias: bool) -> None:
    dtypes = itertools.cycle([torch.float64, torch.float32, torch.float64])
    activations = itertools.cycle(["relu", F.gelu, "gelu", torch.tanh, F.relu])
    for masks, batch_first, batched in itertools.product(
        ["none", "bool", "float"], [False, True], [True, False]
    ):
        dtype = next(dtypes)
        options: dict[str, Any] = {"norm_first": norm_first, "bias": bias, "dtype": dtype}
        options |= {"batch_first": batch_first, "activation": next(activations)}
        inputs, call = draw_call(kind, options, masks, batched)
        for training in (True, False):
            theirs, ours = (
                run(build(home, kind, **options).train(training), inputs, call)
                for home in (nn, regard.nn)
            )
            atol = 5e-5 if dtype == torch.float32 else 1e-11
            torch.testing.assert_close(ours, theirs, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"bias": False, "norm_first": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_weights_and_each_loads_the_others(
    kind: str, options: dict[str, Any]
) -> None:
    theirs, ours = (build(home, kind, **options) for home in (nn, regard.nn))
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    ours_now, theirs_now = ours.state_dict(), theirs.state_dict()
    assert list(ours_now) == list(theirs_now)
    assert all(torch.equal(ours_now[name], theirs_now[name]) for name in ours_now)
    build(regard.nn, kind, seed=1, **options).load_state_dict(theirs_now, strict=True)
    build(nn, kind, seed=1, **options).load_state_dict(ours_now, strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_submodules_have_torchs_names_in_torchs_order(kind: str) -> None:
    theirs, ours = (build(home, kind) for home in (nn, regard.nn))
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]
    for name in ("num_layers", "d_model", "nhead", "batch_first", "norm_first", "activation"):
        assert getattr(ours, name, "none") == getattr(theirs, name, "none"), name
    for name in ("enable_nested_tensor", "mask_check"):
        assert getattr(ours, name, "none") == getattr(theirs, name, "none"), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_has_torchs_sizes_and_probabilities(kind: str) -> None:
    options: dict[str, Any] = {"dropout": 0.3, "layer_norm_eps": 1e-3, "bias": False}
    theirs, ours = (repr(build(home, kind, **options)) for home in (nn, regard.nn))
    assert ours == theirs


def test_a_block_of_the_textbook_has_the_textbooks_matrix_weights() -> None:
    block = regard.nn.TransformerEncoderLayer(512, 8, 2048, device="meta")
    matrices = sum(p.numel() for p in block.parameters() if p.dim() == 2)
    assert matrices == 4 * 512**2 + 2 * 512 * 2048


# Causal masks


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("hint", [None, True, False])
def test_the_causal_hint_of_a_stack_changes_nothing(hint: bool | None, kind: torch.dtype) -> None:
    mask = regard.nn.Transformer.generate_square_subsequent_mask(T)
    mask = mask < 0 if kind == torch.bool else mask
    theirs, ours = (build(home, "TransformerDecoder").double() for home in (nn, regard.nn))
    tgt, memory = (torch.randn(n, B, C, dtype=torch.float64) for n in (T, S))
    mask = mask if kind == torch.bool else mask.double()
    got = ours(tgt, memory, tgt_mask=mask, tgt_is_causal=hint)
    torch.testing.assert_close(got, theirs(tgt, memory, tgt_mask=mask))
    theirs, ours = (build(home, "TransformerEncoder").double() for home in (nn, regard.nn))
    got = ours(tgt, mask=mask, is_causal=hint)
    torch.testing.assert_close(got, theirs(tgt, mask=mask))


class Foreign(nn.Module):
    """A layer of the user's own, which keeps what it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.handed: list[dict[str, Any]] = []

    def forward(self, x: Tensor, *rest: Tensor, **call: Any) -> Tensor:
        self.handed.append(call)
        return x


def test_a_layer_of_ones_own_in_an_encoder_is_handed_what_torch_hands_it() -> None:
    causal = torch.ones(S, S, dtype=torch.bool).triu(1)
    other = torch.eye(S, dtype=torch.bool)
    pad = torch.arange(S) >= torch.tensor([[S], [2], [4]])
    handed = []
    for home in (nn, regard.nn):
        encoder = home.TransformerEncoder(home.TransformerEncoderLayer(**SIZES), 1)
        encoder.layers.append(Foreign())
        for call in (
            {"mask": causal},
            {"mask": other, "src_key_padding_mask": pad},
            {"mask": causal.float(), "is_causal": False},
            {},
        ):
            encoder(torch.randn(S, B, C), **call)
        handed.append(encoder.layers[1].handed)
    for theirs, ours in zip(*handed, strict=True):
        assert ours.keys() == theirs.keys() and ours["is_causal"] == theirs["is_causal"]
        for name in ("src_mask", "src_key_padding_mask"):
            torch.testing.assert_close(ours[name], theirs[name])


def test_the_causal_mask_is_torchs() -> None:
    ours, theirs = regard.nn.Transformer, nn.Transformer
    for options in ({}, {"dtype": torch.float64}, {"device": "cpu", "dtype": torch.bfloat16}):
        mask = ours.generate_square_subsequent_mask(S, **options)
        torch.testing.assert_close(mask, theirs.generate_square_subsequent_mask(S, **options))


# One path


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_gives_what_training_gives_bit_for_bit_without_dropout(kind: str) -> None:
    inputs, call = draw_call(kind, {"batch_first": True}, "bool", batched=True)
    module = build(regard.nn, kind, batch_first=True)
    trained = module(*inputs, **call)
    with torch.inference_mode():
        assert torch.equal(module.eval()(*inputs, **call), trained)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_on_every_submodule_fire_in_evaluation_as_in_training(kind: str) -> None:
    module = build(regard.nn, kind, activation=nn.GELU(), batch_first=True)
    inputs, _ = draw_call(kind, {"batch_first": True}, "none", batched=True)
    fired: list[str] = []
    for name, part in module.named_modules():
        if not isinstance(part, nn.ModuleList):
            part.register_forward_hook(lambda *_, name=name: fired.append(name))
    runs = []
    for training in (True, False):
        fired.clear()
        with torch.no_grad():
            module.train(training)(*inputs)
        runs.append(sorted(fired))
    assert runs[0] == runs[1]
    assert set(runs[0]) == {
        n for n, m in module.named_modules() if not isinstance(m, nn.ModuleList)
    }


def test_a_padded_batch_keeps_its_length_in_evaluation() -> None:
    encoder = build(regard.nn, "TransformerEncoder", nhead=5, batch_first=True).eval()
    pad = torch.arange(S).expand(B, S) >= 4
    with torch.no_grad():
        assert encoder(torch.randn(B, S, C), src_key_padding_mask=pad).shape == (B, S, C)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_sample_that_is_all_padding_stays_finite_and_leaves_the_others_alone(
    norm_first: bool, training: bool
) -> None:
    encoder = build(regard.nn, "TransformerEncoder", batch_first=True, norm_first=norm_first)
    x = torch.randn(B, S, C, requires_grad=True)
    pad = torch.zeros(B, S, dtype=torch.bool)
    pad[1] = True
    output = encoder.train(training)(x, src_key_padding_mask=pad)
    torch.testing.assert_close(output[[0, 2]], encoder(x)[[0, 2]])
    output.square().sum().backward()
    assert output.isfinite().all() and x.grad is not None and x.grad.isfinite().all()


def test_dropout_follows_the_seed_in_training_and_is_off_in_evaluation() -> None:
    module = build(regard.nn, "Transformer", dropout=0.3)
    src, tgt = torch.randn(S, B, C), torch.randn(T, B, C)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(module(src, tgt))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    whole = build(regard.nn, "Transformer", dropout=0.0)
    assert torch.equal(module.eval()(src, tgt), whole(src, tgt))


@pytest.mark.parametrize("kind", KINDS)
def test_empty_batches_run_forward_and_backward(kind: str) -> None:
    module = build(regard.nn, kind)
    inputs = [torch.randn(n, 0, C, requires_grad=True) for n in (S, T)]
    inputs = inputs[:1] if "Encoder" in kind else inputs
    output = module(*inputs)
    output.sum().backward()
    assert output.numel() == 0 and all(p.grad is not None for p in module.parameters())


def test_one_graph_runs_a_padded_causal_encoder() -> None:
    encoder = build(regard.nn, "TransformerEncoder", batch_first=True).eval()
    x = torch.randn(B, S, C)
    call = {"mask": torch.ones(S, S, dtype=torch.bool).triu(1)}
    call["src_key_padding_mask"] = torch.arange(S) >= torch.tensor([[S], [2], [4]])
    graph = torch.compile(encoder, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(x, **call), encoder(x, **call))


# Seeing


def test_every_layer_hands_out_attention_and_the_output_changes_in_no_bit() -> None:
    module = build(regard.nn, "Transformer", batch_first=True, dropout=0.2)
    src, tgt = torch.randn(B, S, C), torch.randn(B, T, C)
    torch.manual_seed(9)
    plain = module(src, tgt)
    with observing(module, Wants(weights=True)) as seen:
        torch.manual_seed(9)
        assert torch.equal(module(src, tgt), plain)
    shapes = {name: tuple(seen[name].weights.shape) for name in seen}
    assert shapes == {
        "encoder.layers.0.self_attn": (B, H, S, S),
        "encoder.layers.1.self_attn": (B, H, S, S),
        "decoder.layers.0.self_attn": (B, H, T, T),
        "decoder.layers.0.multihead_attn": (B, H, T, S),
        "decoder.layers.1.self_attn": (B, H, T, T),
        "decoder.layers.1.multihead_attn": (B, H, T, S),
    }
    for name in seen:
        torch.testing.assert_close(seen[name].weights.sum(-1), torch.ones(shapes[name][:-1]))


# Copies


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save", "stack"])
@pytest.mark.parametrize("kind", ["TransformerEncoderLayer", "TransformerDecoderLayer"])
def test_a_module_given_as_activation_survives(kind: str, way: str) -> None:
    layer = build(regard.nn, kind, activation=nn.PReLU(init=0.7))
    if way == "deepcopy":
        again = copy.deepcopy(layer)
    elif way == "pickle":
        again = pickle.loads(pickle.dumps(layer))
    elif way == "save":
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    else:
        again = getattr(regard.nn, kind.removesuffix("Layer"))(layer, 1).layers[0]
    assert isinstance(again.activation, nn.PReLU)
    inputs, call = draw_call(kind, {}, "bool", batched=True)
    assert torch.equal(again(*inputs, **call), layer(*inputs, **call))


@pytest.mark.parametrize("kind", ["TransformerEncoderLayer", "TransformerDecoderLayer"])
def test_a_layer_pickled_before_there_was_an_activation_gets_relu(kind: str) -> None:
    layer = build(regard.nn, kind)
    state = {name: value for name, value in vars(layer).items() if name != "activation"}
    again = type(layer).__new__(type(layer))
    again.__setstate__(state)
    assert again.activation is F.relu


def test_a_stack_copies_its_layer_and_shares_nothing_with_it() -> None:
    layer = build(regard.nn, "TransformerEncoderLayer")
    stack = regard.nn.TransformerEncoder(layer, 3)
    weights = [x.linear1.weight for x in (layer, *stack.layers)]
    assert len({w.data_ptr() for w in weights}) == 4
    assert all(torch.equal(w, weights[0]) for w in weights)


def test_a_subclass_that_overrides_a_part_is_used() -> None:
    class Silent(regard.nn.TransformerEncoderLayer):
        def _sa_block(self, x: Tensor, *masks: Any, **call: Any) -> Tensor:
            return torch.zeros_like(x)

    layer = Silent(**SIZES, dropout=0.0)
    x = torch.randn(S, B, C)
    wanted = layer.norm1(x)
    torch.testing.assert_close(layer(x), layer.norm2(wanted + layer._ff_block(wanted)))


def test_a_given_encoder_and_decoder_are_used() -> None:
    parts = Foreign(), Foreign()
    own = regard.nn.Transformer(C, H, custom_encoder=parts[0], custom_decoder=parts[1])
    tgt = torch.randn(T, B, C)
    assert own(torch.randn(S, B, C), tgt) is tgt
    assert len(parts[0].handed) == len(parts[1].handed) == 1
