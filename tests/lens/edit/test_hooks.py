"""Edits of Hugging Face's models and torch.nn's modules, judged by plain formulas and masks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers as hf
from lens_subjects import BERT, SUBJECTS, draw, question, text_model
from plain import plain
from torch import Tensor, nn
from transformers import AttentionInterface, masking_utils

import regard
import regard.hf
from regard import Ablate, Block, Patch
from regard.lens import shared_patch

NAMES = ("gpt2", "llama", "qwen3-window", "gemma2", "gpt_neox", "gpt_oss", "bert")
WRITERS = NAMES[:-1]
NO_SDPA = ("gemma2", "gpt_oss")
Hidden = Callable[[int, int, Tensor, Tensor], Tensor]


def judge(
    model: Any,
    hides: Hidden,
    off: tuple[int, int] | None = None,
    swap: dict[tuple[int, int], Tensor] | None = None,
) -> Any:
    """A copy that attends by the plain formula: some looks hidden, a head off, heads replaced."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
    ) -> tuple[Tensor, None]:
        (_, H, T, _), S = query.shape, key.shape[2]
        layer = order.index(module)
        i, j = torch.arange(T)[:, None] + S - T, torch.arange(S)
        seen = torch.stack([~hides(layer, head, i, j) for head in range(H)])
        if mask is not None:
            seen = seen & (mask[..., :S] if mask.dtype == torch.bool else mask[..., :S] > -1e30)
        sinks, scale = given.get("s_aux"), given.get("scaling")
        output, _ = plain(query, key, value, seen, None, scale, given.get("softcap"), sinks)
        if off is not None and layer == off[0]:
            output[:, off[1]] = 0.0
        for (at, head), source in (swap or {}).items():
            if at == layer:
                output[:, head] = source
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register("judge", attend)
    masking_utils.AttentionMaskInterface.register("judge", masking_utils.eager_mask)
    other = copy.deepcopy(model)
    # The modules that ask the interface for their function.
    order = [
        x for x in other.modules() if type(x).__name__.endswith(("Attention", "SelfAttention"))
    ]
    order = [x for x in order if type(x).__name__ != "BertAttention"]
    other.config._attn_implementation = "judge"
    return other


def answer(out: Any) -> Tensor:
    found: Tensor = out["logits"] if "logits" in out else out["last_hidden_state"]
    return found


def hides(layer: int, head: int, i: Tensor, j: Tensor) -> Tensor:
    """What EDITS forbid."""
    hidden = (i == 15) & ((j == 3) | (j == 12))
    return hidden | (i >= 9) & (j == 8) if layer == 1 and head in (0, 2) else hidden


EDITS = (
    Block(15, (3, 12)),
    Block(slice(9, None), 8, layers=1, heads=(0, 2)),
    Ablate(0, 1),
)


@pytest.mark.parametrize("name", NAMES)
def test_edits_are_the_formulas_in_every_implementation(name: str) -> None:
    model, given = SUBJECTS[name](), question(name).given
    kinds = ("eager", "regard") if name in NO_SDPA else ("eager", "sdpa", "regard")
    with torch.no_grad():
        want = answer(judge(model, hides, (0, 1))(**given))
        for kind in kinds:
            model.set_attn_implementation(kind)
            before = answer(model(**given))
            with regard.edit(model, *EDITS):
                got = answer(model(**given))
            with regard.edit(model):
                assert torch.equal(answer(model(**given)), before)
            assert torch.allclose(got, want, atol=3e-5 * float(want.abs().max()))
            assert not torch.allclose(before, want, atol=1e-3)
            assert torch.equal(answer(model(**given)), before)


@pytest.mark.parametrize("name", NAMES)
def test_heads_are_given_what_they_gave_for_another_text(name: str) -> None:
    model, given = SUBJECTS[name](), question(name).given
    other = {**given, "input_ids": draw(1, 19, 23)}
    kinds = ("eager", "regard") if name in NO_SDPA else ("eager", "sdpa", "regard")
    with torch.no_grad():
        for kind in kinds:
            model.set_attn_implementation(kind)
            with regard.head_outputs(model) as source:
                model(**other)
            second = list(source)[1]
            swap = {(1, head): source[second][:, head] for head in (0, 2)}
            want = answer(judge(model, lambda layer, head, i, j: i < j - 99, None, swap)(**given))
            with regard.edit(model, Patch(1, (0, 2), source=source)):
                got = answer(model(**given))
            assert torch.allclose(got, want, atol=3e-5 * float(want.abs().max()))
            assert not torch.allclose(answer(model(**given)), want, atol=1e-3)


WAYS = [
    *((name, "static", "regard") for name in WRITERS),
    *((name, "dynamic", "eager" if name in NO_SDPA else "sdpa") for name in WRITERS),
]


@pytest.mark.parametrize(("name", "cache", "kind"), WAYS)
def test_generation_is_edited_at_absolute_positions(name: str, cache: str, kind: str) -> None:
    model = SUBJECTS[name]()
    model.set_attn_implementation(kind)
    ids = draw(1, 11)
    edits = Block(slice(9, None), (2, 7)), Block(slice(13, 15), slice(0, None, 3), layers=1)

    def hides(layer: int, head: int, i: Tensor, j: Tensor) -> Tensor:
        hidden = (i >= 9) & ((j == 2) | (j == 7))
        return hidden | (i >= 13) & (i < 15) & (j % 3 == 0) if layer == 1 else hidden

    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True, "cache_implementation": cache}
    options |= {"attention_mask": torch.ones_like(ids), "disable_compile": True}
    with torch.no_grad():
        before = torch.stack(model.generate(ids, **options).logits, 1)
        with regard.edit(model, *edits, Ablate(0, 1)):
            written = model.generate(ids, **options)
        want = judge(model, hides, (0, 1))(written.sequences).logits[:, 10:-1]
        again = torch.stack(model.generate(ids, **options).logits, 1)
    got = torch.stack(written.logits, 1)
    assert torch.allclose(got, want, atol=3e-5 * float(want.abs().max()))
    assert torch.equal(again, before) and not torch.allclose(got[:, 0], before[:, 0], atol=1e-3)


def test_an_encoder_decoder_writes_edited() -> None:
    model, ids = SUBJECTS["bart"](), draw(2, 11)
    name = "model.decoder.layers.1.encoder_attn"
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        with regard.edit(model, Block(slice(2, None), slice(4, None), layers=name)):
            written = model.generate(ids, **options)
            whole = model(input_ids=ids, decoder_input_ids=written[:, :-1]).logits
        plainly = model.generate(ids, **options)
    assert torch.equal(whole.argmax(-1), written[:, 1:])
    assert plainly.tolist() != written.tolist()


def test_a_cache_that_is_given_tells_positions() -> None:
    model, ids = SUBJECTS["gpt2"](), draw(1, 9)
    cache = hf.DynamicCache(config=model.config)
    with torch.no_grad():
        first = model(ids[:, :5], past_key_values=cache).logits
        with regard.edit(model, Block(slice(6, None), 2)):
            parts = [model(part, past_key_values=cache).logits for part in ids[:, 5:].split(3, 1)]
        with regard.edit(model, Block(slice(6, None), 2)):
            whole = model(ids, use_cache=False).logits
    got = torch.cat([first, *parts], 1)
    assert torch.allclose(got, whole, atol=3e-5 * float(whole.abs().max()))


def test_padding_on_the_left_does_not_move_positions() -> None:
    model, ids = SUBJECTS["llama"](), draw(1, 9)
    both = torch.cat([torch.cat([torch.zeros(1, 4).long(), ids], 1), draw(1, 13, 8)])
    real = torch.ones(2, 13, dtype=torch.int64)
    real[0, :4] = 0
    for edit in (Block(6, 2), Block(-3, 2), Ablate(1, 0, to="mean")):
        static = hf.StaticCache(config=model.config, max_cache_len=20)
        with torch.no_grad(), regard.edit(model, edit):
            want = model(ids).logits
            for cache in (None, static):
                got = model(both, attention_mask=real, past_key_values=cache).logits
                assert torch.allclose(got[:1, 4:], want, atol=3e-5 * float(want.abs().max()))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_padding_does_not_move_positions_where_generate_makes_the_whole_mask(name: str) -> None:
    """As for a cache of fixed size: positions were counted with the padding."""
    model, ids = SUBJECTS[name](), draw(2, 11)
    real = torch.ones_like(ids)
    real[1, :3] = 0
    how: dict[str, Any] = {"attention_mask": real, "do_sample": False, "max_new_tokens": 7}
    how |= {"output_logits": True, "return_dict_in_generate": True}
    static = {"cache_implementation": "static", "disable_compile": True}
    for edit in (Block(slice(5, None), (2, 4)), Block(slice(12, None), slice(9, 12))):
        with regard.edit(model, edit):
            want, got = (model.generate(ids, **how, **more) for more in ({}, static))
        assert got.sequences.tolist() == want.sequences.tolist()
        for a, b in zip(got.logits, want.logits, strict=True):
            assert torch.allclose(a, b, atol=3e-5 * float(b.abs().max()))


def test_padding_that_is_given_by_place_does_not_move_positions() -> None:
    model, ids = SUBJECTS["bert"](), draw(1, 9)
    padded = torch.cat([torch.zeros(1, 4).long(), ids], 1)
    real = (torch.arange(13) >= 4).long()[None]
    with torch.no_grad(), regard.edit(model, Block(6, 2)):
        got = model(padded, real).last_hidden_state
        want = model(padded, attention_mask=real).last_hidden_state
    assert torch.equal(got, want)


def test_a_model_inside_of_another_tells_positions_too() -> None:
    model, ids = SUBJECTS["llama"](), draw(1, 9)
    outer = nn.ModuleDict({"inner": model})
    cache = hf.StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad(), regard.edit(outer, Block(slice(6, None), 2)):
        parts = [model(part, past_key_values=cache).logits for part in ids.split((5, 3, 1), 1)]
        want = model(ids, use_cache=False).logits
    assert torch.allclose(torch.cat(parts, 1), want, atol=3e-5 * float(want.abs().max()))


def test_padding_of_a_source_does_not_move_what_is_written() -> None:
    model, given = SUBJECTS["bart"](), question("bart", "left").given
    name = "model.decoder.layers.0.self_attn"
    row = {word: x[1:2] for word, x in given.items() if word != "use_cache"}
    with torch.no_grad(), regard.edit(model, Block(7, (2, 5), layers=name)):
        got, want = model(**given).logits[1:2], model(**row).logits
    with torch.no_grad():
        before = model(**given).logits[1:2]
    assert torch.allclose(got, want, atol=3e-5 * float(want.abs().max()))
    assert torch.equal(got[:, :7], before[:, :7]) and not torch.equal(got[:, 7], before[:, 7])


def test_eager_weights_are_the_edited_ones() -> None:
    model, given = SUBJECTS["gpt2"](), question("gpt2").given
    model.set_attn_implementation("eager")
    with torch.no_grad(), regard.edit(model, Block(9, 4, layers=1, heads=2)):
        maps = model(**given, output_attentions=True).attentions
    assert maps[1][0, 2, 9, 4] == 0.0 and maps[1][0, 1, 9, 4] > 0.0
    assert abs(float(maps[1][0, 2, 9].sum()) - 1.0) < 1e-5


@pytest.mark.parametrize("kind", ["sdpa", "regard"])
def test_a_watched_record_is_of_the_edited_heads(kind: str) -> None:
    model, ids = SUBJECTS["llama"](), draw(1, 9)
    model.set_attn_implementation(kind)
    for outer in (True, False):
        blocks = regard.edit(model, Block(6, 2, 1, heads=1)), regard.watch(model, keep="qk")
        one, two = blocks if outer else blocks[::-1]
        with torch.no_grad(), one as first, two as second:
            model(ids, use_cache=False)
        record: Any = second if outer else first
        assert record.map(1, 1)[6, 2] == 0.0 and record.map(1, 0)[6, 2] > 0.0
        assert abs(record.map(1, 1)[6].sum() - 1.0) < 1e-5


def test_layers_that_share_a_module_are_edited_each() -> None:
    sizes = {**BERT, "embedding_size": 20, "num_hidden_layers": 3}
    model, ids = text_model(hf.AlbertConfig(**sizes), hf.AlbertModel), draw(1, 9)
    with torch.no_grad():
        before = model(ids).last_hidden_state
        with regard.head_outputs(model) as outputs:
            model(ids)
        first, *others = outputs
        assert others == [f"{first}@2", f"{first}@3"]
        with regard.edit(model, Patch(source=outputs)):
            assert torch.equal(model(ids).last_hidden_state, before)
        with regard.edit(model, Ablate(2, 1)), regard.head_outputs(model) as edited:
            model(ids)
    assert torch.equal(edited[f"{first}@2"], outputs[f"{first}@2"])
    assert (edited[f"{first}@3"][:, 1] == 0).all() and (edited[f"{first}@2"][:, 1] != 0).any()


def test_cross_attention_is_edited_by_name_and_other_models_are_left() -> None:
    model, given = SUBJECTS["bart"](), question("bart").given
    name = "model.decoder.layers.1.encoder_attn"
    with torch.no_grad():
        before = model(**given).logits
        with regard.edit(model, Block(7, slice(None), layers=name)):
            got = model(**given).logits
        assert torch.equal(got[:, :7], before[:, :7]) and not torch.equal(got, before)
        with regard.head_outputs(model, layers=name) as outputs:
            model(**given)
        assert list(outputs) == [name]
        with regard.edit(model, Patch(name, source=outputs)):
            assert torch.equal(model(**given).logits, before)
        other = SUBJECTS["bart"]()
        with pytest.raises(ValueError, match="no attention"), regard.edit(other, Ablate(name)):
            assert torch.equal(model(**given).logits, before)


def test_what_writes_attention_out_is_refused() -> None:
    model = SUBJECTS["gptj"]()
    unedited = pytest.raises(ValueError, match="written out in its own code")
    with unedited, regard.edit(model, Ablate()):
        model(**question("gptj").given)


@pytest.mark.parametrize("kind", ["sdpa", "regard"])
def test_a_call_of_the_compiled_model_is_refused_at_once(kind: str) -> None:
    model, given = SUBJECTS["llama"](), question("llama").given
    model.set_attn_implementation(kind)
    other = torch.compile(nn.Linear(3, 3), backend="eager")
    fast = torch.compile(model, backend="eager")
    with torch.no_grad(), regard.edit(model, Ablate(0, 1)):
        with pytest.raises(ValueError, match="compiled code cannot be edited"):
            fast(**given)
        model(**given)
        other(torch.ones(3))


def test_what_generate_would_compile_is_edited_uncompiled() -> None:
    model, ids = SUBJECTS["llama"](), draw(1, 7)
    compiled = hf.CompileConfig(backend="eager", fullgraph=True, mode=None)
    compiled._compile_all_devices = True
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    options |= {"attention_mask": torch.ones_like(ids), "output_logits": True}
    options["return_dict_in_generate"] = True
    with torch.no_grad(), regard.edit(model, Ablate(0, 1), Block(slice(5, None), 2)):
        want = model.generate(ids, disable_compile=True, **options).logits
        got = model.generate(ids, compile_config=compiled, **options).logits
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_nothing_is_left_in_place_when_blocks_end_in_any_order() -> None:
    model, given = SUBJECTS["llama"](), question("llama").given
    interface = AttentionInterface.__dict__.get("get_interface")
    sdpa, forward = nn.functional.scaled_dot_product_attention, nn.MultiheadAttention.forward
    mixed = nn.ModuleList([model, nn.MultiheadAttention(4, 2)])
    one, two = regard.edit(mixed, Ablate(0, 1)), regard.edit(mixed, Ablate(1, 1))
    with torch.no_grad():
        before = model(**given).logits
        one.__enter__()
        first = model(**given).logits
        two.__enter__()
        both = model(**given).logits
        one.__exit__(None, None, None)
        second = model(**given).logits
        two.__exit__(None, None, None)
        assert torch.equal(model(**given).logits, before)
    assert len({float(x.abs().sum()) for x in (before, first, both, second)}) == 4
    assert AttentionInterface.__dict__.get("get_interface") is interface
    assert nn.functional.scaled_dot_product_attention is sdpa and not shared_patch._patches
    assert nn.MultiheadAttention.forward is forward


def torch_layers() -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 4, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


THREADED: dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor]]] = {
    "llama": (SUBJECTS["llama"], lambda model: model(draw(1, 9), use_cache=False).logits),
    "torch.nn": (torch_layers, lambda model: model(torch.ones(1, 7, 12).cumsum(1))),
}


@pytest.mark.parametrize("kind", THREADED)
def test_eight_threads_edit_one_model_each_in_its_own_way(kind: str) -> None:
    make, call = THREADED[kind]
    torch.manual_seed(5)
    model = make()

    def run(n: int) -> Tensor:
        with torch.no_grad(), regard.edit(model, Ablate(n % 2, n // 2), Block(5, n % 5)):
            together.wait(60)
            return call(model)

    with torch.no_grad():
        before = call(model)
    together = threading.Barrier(1)
    alone = [run(n) for n in range(8)]
    together = threading.Barrier(9)
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(run, n) for n in range(8)]
        together.wait(60)
        with torch.no_grad():
            assert torch.equal(call(model), before)
        assert all(torch.equal(one.result(), two) for one, two in zip(running, alone, strict=True))
    assert len({float(x.double().sum()) for x in (before, *alone)}) == 9


FORBIDDEN = Block((3, 5), 1), Block(4, slice(1, None)), Block(2, 0, heads=1)


def forbid(n_heads: int, n: int, rows: int) -> Tensor:
    """torch's mask, True where no look is allowed, of FORBIDDEN."""
    hidden = torch.zeros(rows, n_heads, n, n, dtype=torch.bool)
    hidden[:, :, [3, 5], 1] = True
    hidden[:, :, 4, 1:] = True
    hidden[:, 1, 2, 0] = True
    return hidden.flatten(0, 1)


@pytest.mark.parametrize("need", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_attention_is_as_with_its_own_mask(need: bool, batch_first: bool) -> None:
    layer = nn.MultiheadAttention(12, 3, batch_first=batch_first, add_bias_kv=True).eval()
    x = torch.randn(2, 7, 12) if batch_first else torch.randn(7, 2, 12)
    lengths = torch.tensor([7, 5])[:, None]
    padding = torch.where(torch.arange(7) < lengths, 0.0, -torch.inf)
    given: dict[str, Any] = {"key_padding_mask": padding, "need_weights": need}
    mask = torch.zeros(6, 7, 7).masked_fill(forbid(3, 7, 2), -torch.inf)
    with torch.no_grad():
        before, _ = layer(x, x, x, **given)
        want, weights = layer(x, x, x, attn_mask=mask, **given)
        with regard.edit(layer, *FORBIDDEN):
            got, got_weights = layer(x, x, x, **given)
        again, _ = layer(x, x, x, **given)
    assert torch.allclose(got, want, atol=1e-6) and not torch.allclose(before, want, atol=1e-4)
    assert torch.equal(again, before)
    assert (got_weights is None) == (not need)
    with torch.no_grad(), regard.edit(layer, Ablate(to="mean")):
        outs = layer(x, x, x, **given)[0]
    rows = outs if batch_first else outs.transpose(0, 1)
    assert torch.allclose(rows, rows[:, :1].expand_as(rows), atol=1e-6)
    with torch.no_grad(), regard.head_outputs(layer) as outputs:
        layer(x, x, x, **given)
    heads = outputs[""][1, :, :5].mean(1).flatten()  # of the five real tokens of the second row
    assert torch.allclose(rows[1, 0], layer.out_proj(heads), atol=1e-6)
    assert got_weights is None or torch.allclose(got_weights, weights, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("padded", [True, False])
def test_torchs_encoder_leaves_its_fast_path_for_edits(padded: bool) -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 7, 12)
    padding = torch.tensor([[False] * 7, [False] * 6 + [True]]) if padded else None
    with torch.no_grad():
        before = model(x, src_key_padding_mask=padding)
        want = model(x, mask=forbid(2, 7, 2), src_key_padding_mask=padding)
        with regard.edit(model, *FORBIDDEN):
            got = model(x, src_key_padding_mask=padding)
        with regard.edit(model):
            assert torch.equal(model(x, src_key_padding_mask=padding), before)
        assert torch.equal(model(x, src_key_padding_mask=padding), before)
    assert torch.allclose(got[:, :6], want[:, :6], atol=1e-5)
    assert not torch.allclose(before[:, :6], want[:, :6], atol=1e-4)


def test_torchs_transformer_is_edited_by_the_names_of_its_layers() -> None:
    model = nn.Transformer(12, 2, 2, 2, 16, batch_first=True).eval()
    source, target = torch.randn(1, 9, 12), torch.randn(1, 7, 12)
    hidden = torch.zeros(7, 9, dtype=torch.bool)
    hidden[4, 6] = True
    judge = copy.deepcopy(model)
    attend = judge.decoder.layers[1].multihead_attn.forward

    def masked(*args: Any, **given: Any) -> Any:
        return attend(*args, **{**given, "attn_mask": hidden})

    judge.decoder.layers[1].multihead_attn.forward = masked
    with torch.no_grad():
        want = judge(source, target)
        with regard.edit(model, Block(4, 6, layers="decoder.layers.1.multihead_attn")):
            assert torch.allclose(model(source, target), want, atol=1e-5)


@pytest.mark.parametrize("edit_first", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_a_watched_record_of_torchs_modules_is_of_the_edited_heads(
    whole: bool, edit_first: bool
) -> None:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(1, 7, 12)
    inner = nn.MultiheadAttention(12, 3, batch_first=True, add_bias_kv=True).eval()
    subject: nn.Module = model if whole else inner
    given = (x,) if whole else (x, x, x)
    blocks = regard.edit(subject, Block(5, -3, layers=0, heads=1)), regard.watch(subject, keep="qk")
    one, two = blocks if edit_first else blocks[::-1]
    with torch.no_grad(), one as first, two as second:
        subject(*given)
    record: Any = second if edit_first else first
    assert len(record.places) == (2 if whole else 1)
    assert record.map(0, 1)[5, 4] == 0.0 and record.map(0, 0)[5, 4] > 0.0
    assert abs(record.map(0, 1)[5].sum() - 1.0) < 1e-5


class OwnAttention(nn.Module):
    """Attention written out."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (
            regard.MultiHeadAttention(12, 3),
            OwnAttention(),
            regard.MultiHeadAttention(12, 3),
        )
        self.layers, self.tail = nn.ModuleList(layers), regard.MultiHeadAttention(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.tail):
            x = layer(x)
        return x


def test_what_is_reached_in_part_is_refused_where_an_edit_speaks_of_all() -> None:
    model, x = Mixed(), torch.randn(1, 5, 12)
    for layers in (None, 1, "layers", "layers.1"):
        why = "has no layer" if layers == "layers.1" else r"is for layers\.1 too|several stacks"
        with pytest.raises(ValueError, match=why), regard.edit(model, Ablate(layers, 1)):
            model(x)
    for layers in (("layers.0", "layers.2"), "tail"):
        with regard.edit(model, Ablate(layers, 1)):
            model(x)
