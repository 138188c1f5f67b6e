"""What torch.nn refuses, regard.nn refuses with the same type of error, and says what to do.

Letters: B batch, T queries, S keys, H heads, C model width.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard.nn

B, T, S, H, C = 3, 5, 7, 3, 15
KINDS = "MultiheadAttention TransformerEncoderLayer TransformerDecoderLayer TransformerEncoder "
KINDS += "TransformerDecoder Transformer"


def r(*shape: int) -> Tensor:
    return torch.randn(shape)


def no(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


def attend(home: Any, *inputs: Tensor, made: dict[str, Any] | None = None, **call: Any) -> None:
    home.MultiheadAttention(C, H, **(made or {}))(*inputs, **call)


def seq2seq(home: Any, src: Tensor, tgt: Tensor, **call: Any) -> None:
    home.Transformer(C, H, 1, 1, 11)(src, tgt, **call)


def layer(home: Any, name: str, *inputs: Tensor, **call: Any) -> None:
    getattr(home, name)(C, H, 11, **call.pop("made", {}))(*inputs, **call)


Q, K = r(T, B, C), r(S, B, C)
WRONG: dict[str, Callable[[Any], None]] = {
    # The constructor
    "no width": lambda home: home.MultiheadAttention(0, 1),
    "no heads": lambda home: home.MultiheadAttention(C, 0),
    "heads that do not divide the width": lambda home: home.MultiheadAttention(C, 4),
    "an unknown activation": lambda home: layer(
        home, "TransformerEncoderLayer", Q, made={"activation": "abc"}
    ),
    "an unknown activation in a decoder": lambda home: home.TransformerDecoderLayer(
        C, H, activation="abc"
    ),
    "a Transformer whose heads do not divide": lambda home: home.Transformer(C, 4, 1, 1),
    "dropout over 1": lambda home: home.TransformerEncoderLayer(C, H, dropout=1.5),
    # Axes of the inputs
    "a query of four axes": lambda home: attend(home, r(2, T, B, C), K, K),
    "a query of one axis": lambda home: attend(home, r(C), r(C), r(C)),
    "a batched query with an unbatched key": lambda home: attend(home, Q, r(S, C), K),
    "a batched query with an unbatched value": lambda home: attend(home, Q, K, r(S, C)),
    "an unbatched query with a batched key": lambda home: attend(home, r(T, C), K, r(S, C)),
    "an unbatched query with a batched value": lambda home: attend(home, r(T, C), r(S, C), K),
    # Sizes of the inputs
    "a query of another width": lambda home: attend(home, r(T, B, C + 1), K, K),
    "a key and value of another width": lambda home: attend(
        home, Q, r(S, B, C + 1), r(S, B, C + 1)
    ),
    "a key of another width": lambda home: attend(home, Q, r(S, B, C + 1), K),
    "a key of another length than the value": lambda home: attend(home, Q, r(S + 1, B, C), K),
    "a key that is not kdim wide": lambda home: attend(home, Q, K, K, made={"kdim": 11}),
    "a key as long as no value, with kdim": lambda home: attend(
        home, Q, r(S + 1, B, 11), K, made={"kdim": 11}
    ),
    "another batch size of key and value": lambda home: attend(
        home, Q, r(S, B + 1, C), r(S, B + 1, C)
    ),
    "batch first without saying so": lambda home: attend(home, r(B, T, C), r(B, S, C), r(B, S, C)),
    # Masks
    "integers for attn_mask": lambda home: attend(home, Q, K, K, attn_mask=no(T, S).long()),
    "integers for padding": lambda home: attend(home, Q, K, K, key_padding_mask=no(B, S).byte()),
    "an attn_mask of one axis": lambda home: attend(home, Q, K, K, attn_mask=no(S)),
    "an attn_mask of four axes": lambda home: attend(home, Q, K, K, attn_mask=no(B, H, T, S)),
    "an attn_mask too wide": lambda home: attend(home, Q, K, K, attn_mask=no(T, S + 1)),
    "an attn_mask turned round": lambda home: attend(home, Q, K, K, attn_mask=no(S, T)),
    "an attn_mask for B, not B times H": lambda home: attend(home, Q, K, K, attn_mask=no(B, T, S)),
    "an unbatched attn_mask for the wrong heads": lambda home: attend(
        home, r(T, C), r(S, C), r(S, C), attn_mask=no(H + 1, T, S)
    ),
    "an unbatched attn_mask too wide": lambda home: attend(
        home, r(T, C), r(S, C), r(S, C), attn_mask=no(T, S + 1)
    ),
    "padding of one axis": lambda home: attend(home, Q, K, K, key_padding_mask=no(S)),
    "padding too long": lambda home: attend(home, Q, K, K, key_padding_mask=no(B, S + 1)),
    "padding turned round": lambda home: attend(home, Q, K, K, key_padding_mask=no(S, B)),
    "padding of two axes without a batch": lambda home: attend(
        home, r(T, C), r(S, C), r(S, C), key_padding_mask=no(1, S)
    ),
    "padding too long without a batch": lambda home: attend(
        home, r(T, C), r(S, C), r(S, C), key_padding_mask=no(S + 1)
    ),
    "a causal hint without a mask": lambda home: attend(home, Q, Q, Q, is_causal=True),
    # Layers and stacks
    "integers for a layer's padding": lambda home: layer(
        home, "TransformerEncoderLayer", Q, src_key_padding_mask=no(B, T).byte()
    ),
    "a layer's mask too wide": lambda home: layer(
        home, "TransformerEncoderLayer", Q, src_mask=no(T, T + 1)
    ),
    "a layer's causal hint without a mask": lambda home: layer(
        home, "TransformerEncoderLayer", Q, is_causal=True
    ),
    "a memory mask turned round": lambda home: layer(
        home, "TransformerDecoderLayer", Q, K, memory_mask=no(S, T)
    ),
    "memory padding of the target's length": lambda home: layer(
        home, "TransformerDecoderLayer", Q, K, memory_key_padding_mask=no(B, T)
    ),
    "source and target of two batch sizes": lambda home: seq2seq(home, K, r(T, B + 1, C)),
    "a source of another width": lambda home: seq2seq(home, r(S, B, C + 1), Q),
    "a target of another width": lambda home: seq2seq(home, K, r(T, B, C + 1)),
    "a source mask too wide": lambda home: seq2seq(home, K, Q, src_mask=no(S + 1, S + 1)),
    "a target mask too wide": lambda home: seq2seq(home, K, Q, tgt_mask=no(T + 1, T + 1)),
    "source padding of the wrong batch": lambda home: seq2seq(
        home, K, Q, src_key_padding_mask=no(B + 1, S)
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_a_wrong_call_raises_what_torch_raises(wrong: str) -> None:
    with pytest.raises(Exception) as theirs:
        WRONG[wrong](nn)
    with pytest.raises(theirs.type) as ours:
        WRONG[wrong](regard.nn)
    # An error of ours must not pass for the other of torch's two: a test may tell them apart.
    other = {AssertionError: RuntimeError, RuntimeError: AssertionError}.get(theirs.type)
    assert other is None or not isinstance(ours.value, other)
    assert isinstance(ours.value, ValueError)


def test_heads_that_do_not_divide_the_width_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"embed_dim=15 and num_heads=4"):
        regard.nn.MultiheadAttention(15, 4)


def test_source_and_target_of_two_batch_sizes_are_refused_with_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"src \(7, 3, 15\) and tgt \(5, 4, 15\)"):
        seq2seq(regard.nn, K, r(T, B + 1, C))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_in_words(training: bool) -> None:
    nested = torch.nested.nested_tensor([r(2, C), r(3, C)])
    kinds = regard.nn
    encoder = kinds.TransformerEncoderLayer(C, H, 11, batch_first=True, norm_first=True)
    decoder = kinds.TransformerDecoderLayer(C, H, 11, batch_first=True, norm_first=True)
    x = r(2, T, C)
    calls: list[tuple[nn.Module, tuple[Tensor, ...]]] = [
        (kinds.MultiheadAttention(C, H, batch_first=True), (nested, nested, nested)),
        (encoder, (nested,)),
        (kinds.TransformerEncoder(encoder, 1), (nested,)),
        (decoder, (nested, x)),
        (decoder, (x, nested)),
        (kinds.TransformerDecoder(decoder, 1), (x, nested)),
        (kinds.Transformer(C, H, 1, 1, 11, batch_first=True), (nested, x)),
    ]
    for module, inputs in calls:
        with torch.no_grad(), pytest.raises(AssertionError, match="to_padded_tensor"):
            module.train(training)(*inputs)
    with pytest.raises(ValueError, match="to_padded_tensor"):
        kinds.functional.scaled_dot_product_attention(nested, nested, nested)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is (deprecated|not supported)")
def test_torchscript_is_refused_in_words_also_inside_a_model() -> None:
    layer = regard.nn.TransformerEncoderLayer(C, H, 11)
    decoder = regard.nn.TransformerDecoderLayer(C, H, 11)
    modules: list[nn.Module] = [
        layer.self_attn,
        layer,
        decoder,
        regard.nn.TransformerEncoder(layer, 1),
        regard.nn.TransformerDecoder(decoder, 1),
        regard.nn.Transformer(C, H, 1, 1, 11),
        nn.Sequential(nn.Linear(C, C), layer),
    ]
    for module in modules:
        with pytest.raises(NotImplementedError, match=r"use torch\.compile"):
            torch.jit.script(module)


def test_every_class_has_torchs_signature() -> None:
    import inspect

    for name in KINDS.split():
        for method in ("__init__", "forward"):
            theirs, ours = (
                [
                    (p.name, p.kind, p.default)
                    for p in inspect.signature(
                        getattr(getattr(home, name), method)
                    ).parameters.values()
                ]
                for home in (nn, regard.nn)
            )
            assert ours == theirs, f"{name}.{method}"
    theirs, ours = (
        [(p.name, p.default) for p in inspect.signature(home).parameters.values()]
        for home in (
            nn.functional.multi_head_attention_forward,
            regard.nn.functional.multi_head_attention_forward,
        )
    )
    assert ours == theirs
