"""Edits of our own models: the numbers of an explicit mask, in caches too, and no bit else."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import pytest
import torch
from lens_words import SENTENCE
from tiny_checkpoints import CONFIGS
from torch import Tensor, nn

import regard
from regard import Ablate, Block, Dense, KVCache, MultiHeadAttention, Patch, Wants
from regard.generation import generate_ids
from regard.models import Transformer, config_of
from regard.ops import edit_hook


def make(name: str = "llama", **more: Any) -> Transformer:
    torch.manual_seed(11)
    model = Transformer(config_of({**CONFIGS[name], **more})).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.mul_(1.7)
    return model


def draw(n: int, rows: int = 1) -> Tensor:
    return torch.randint(5, 37, (rows, n), generator=torch.Generator().manual_seed(n))


def allowed(n: int, *pairs: tuple[Any, Any]) -> Dense:
    seen = torch.ones(n, n, dtype=torch.bool)
    for queries, keys in pairs:
        grid = torch.zeros(n, n, dtype=torch.bool)
        grid[queries] = True
        grid_keys = torch.zeros(n, n, dtype=torch.bool)
        grid_keys[:, keys] = True
        seen &= ~(grid & grid_keys)
    return Dense(seen)


def logits(model: Transformer, ids: Tensor, *edits: Any, **given: Any) -> Tensor:
    with torch.no_grad(), regard.edit(model, *edits):
        found = model(ids, **given).logits
    assert found is not None
    return found


def by_steps(model: Transformer, cache: Any, ids: Tensor, first: int, *edits: Any) -> Tensor:
    """Logits of a text that is read in parts, the first so long and then token by token."""
    assert model.head is not None
    parts = [ids[:, :first], *ids[:, first:].split(1, 1)]
    with torch.no_grad(), regard.edit(model, *edits):
        found = [model.head(model.run(part, cache=cache)) for part in parts]
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", ["gpt_neox", "llama", "mistral", "bloom", "gemma2"])
def test_looks_are_forbidden_as_by_an_explicit_mask_in_every_cache(name: str) -> None:
    model, ids = make(name), draw(17)
    edits = Block(12, (3, 9)), Block(slice(-4, None), 1), Block(range(5, 8), range(2, 6, 3))
    mask = allowed(17, (12, [3, 9]), (slice(13, None), 1), (slice(5, 8), [2, 5]))
    want = logits(model, ids, mask=mask)
    got = logits(model, ids, *edits)
    assert torch.allclose(got, want, atol=2e-5)
    before = logits(model, ids)
    assert torch.equal(got[:, :5], before[:, :5]) and not torch.allclose(got, before, atol=1e-3)
    absolute = Block(12, (3, 9)), Block(slice(13, None), 1), Block(range(5, 8), range(2, 6, 3))
    for size in (None, 20):
        steps = by_steps(model, model.make_cache(size), ids, 13, *absolute)
        assert torch.allclose(steps, want, atol=2e-5)
    assert torch.equal(logits(model, ids), before)


def test_padding_on_the_left_does_not_move_positions() -> None:
    model, ids = make("llama"), draw(11)
    edit = Block(7, 2, layers=1, heads=3)
    want = logits(model, ids, edit)
    rows = torch.cat([torch.zeros(1, 4, dtype=torch.int64), ids], 1)
    real = torch.arange(15)[None] >= 4
    assert torch.allclose(logits(model, rows, edit, real=real)[:, 4:], want, atol=2e-5)
    both = torch.cat([rows, draw(15)])
    real = torch.cat([real, torch.ones_like(real)])
    assert torch.allclose(logits(model, both, edit, real=real)[:1, 4:], want, atol=2e-5)


def test_generation_is_edited_step_by_step() -> None:
    model, ids = make("llama"), draw(9)
    edit = Block(slice(6, None), (1, 4))
    with regard.edit(model, edit):
        written = generate_ids(model, ids.tolist(), max_new_tokens=8).rows()[0]
    plainly = generate_ids(model, ids.tolist(), max_new_tokens=8).rows()[0]
    assert written != plainly
    for n in range(8):
        text = torch.tensor([[*ids[0].tolist(), *written[:n]]])
        seen = allowed(text.shape[1], (slice(6, None), [1, 4]))
        assert int(logits(model, text, mask=seen)[0, -1].argmax()) == written[n]
    with pytest.raises(ValueError, match="this is a block of edit"), regard.edit(model, edit):
        generate_ids(model, ids.tolist(), max_new_tokens=2, compiled=True)


def test_an_encoder_decoder_is_edited_by_the_names_of_its_layers() -> None:
    model, ids, source = make("t5"), draw(7), draw(11)
    cross = "decoder.layers.0.cross_attn"
    names = [name for name, module in model.named_modules() if name == cross]
    assert names, [name for name, _ in model.named_modules()][:40]
    before = logits(model, ids, source=source)
    got = logits(model, ids, Block(5, 9, layers=cross), source=source)
    assert torch.equal(got[:, :5], before[:, :5]) and not torch.equal(got[:, 5:], before[:, 5:])
    with torch.no_grad():
        memory = model.encode(source)
        cache = model.make_cache()
        with regard.edit(model, Block(slice(5, None), 9, layers=cross)):
            steps = [model.run(ids[:, n : n + 1], memory=memory, cache=cache) for n in range(7)]
        whole = logits(model, ids, Block(slice(5, None), 9, layers=cross), source=source)
        assert model.head is not None
        assert torch.allclose(model.head(torch.cat(steps, 1)), whole, atol=2e-5)
    with pytest.raises(ValueError, match="reaches layers of several stacks"):
        logits(model, ids, Block(5, 3), source=source)


def test_heads_are_switched_off_before_the_output_projection() -> None:
    layer = MultiHeadAttention(12, 3, causal=True)
    x = torch.randn(2, 7, 12)
    heads = torch.cat([torch.ones(4), torch.zeros(4), torch.ones(4)])
    with regard.head_outputs(layer) as outputs:
        before = layer(x)
    joined = outputs[""].transpose(1, 2).flatten(2)
    assert torch.equal(layer.out_proj(joined), before)
    with regard.edit(layer, Ablate(heads=1)):
        assert torch.allclose(layer(x), layer.out_proj(joined * heads), atol=1e-6)
    mean = joined.mean(1, keepdim=True).expand_as(joined)
    with regard.edit(layer, Ablate(0, (0, 2), to="mean")):
        want = layer.out_proj(torch.where(heads.bool(), mean, joined))
        assert torch.allclose(layer(x), want, atol=1e-6)
    assert torch.equal(layer(x), before)


def test_the_mean_leaves_padding_out_and_is_refused_in_a_cache() -> None:
    model, ids = make("llama"), draw(9)
    edit = Ablate(1, (0, 2), to="mean")
    want = logits(model, ids, edit)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.int64), ids], 1)
    real = torch.arange(14)[None] >= 5
    assert torch.allclose(logits(model, padded, edit, real=real)[:, 5:], want, atol=2e-5)
    with pytest.raises(ValueError, match="continues a text from a KV cache"):
        by_steps(model, model.make_cache(), ids, 5, edit)
    zero = Ablate(1, (0, 2))
    steps = by_steps(model, model.make_cache(), ids, 5, zero)
    assert torch.allclose(steps, logits(model, ids, zero), atol=2e-5)


def test_heads_are_given_what_they_gave_in_another_run() -> None:
    model, ids, other = make("llama"), draw(9), draw(9) + 1
    with torch.no_grad(), regard.head_outputs(model) as outputs:
        model(other)
    last = len(outputs) - 1
    whole = logits(model, ids, Patch(source=outputs))
    one = logits(model, ids, Patch(last, 1, source=outputs))
    assert not torch.allclose(whole, one, atol=1e-3)
    patch = Patch(last, 1, source=outputs)
    with torch.no_grad(), regard.edit(model, patch), regard.head_outputs(model) as now:
        model(ids)
    name = list(outputs)[last]
    assert torch.equal(now[name][:, 1], outputs[name][:, 1])
    assert not torch.equal(now[name][:, 0], outputs[name][:, 0])
    only = logits(model, ids, Patch(0, source=outputs, positions=4))
    assert torch.equal(only[:, :4], logits(model, ids)[:, :4])
    assert not torch.equal(only[:, 4:], logits(model, ids)[:, 4:])
    steps = by_steps(model, model.make_cache(), ids, 5, Patch(0, source=outputs, positions=4))
    assert torch.allclose(steps, only, atol=2e-5)
    with pytest.raises(ValueError, match="the source has 9 tokens and this text 10"):
        logits(model, draw(10), Patch(source=outputs))
    with pytest.raises(ValueError, match="another model or another batch"):
        logits(model, draw(9, rows=2).expand(2, 9), Patch(source=captured(model, 3)))
    with pytest.raises(TypeError, match=r"expected what `with regard\.head_outputs"):
        Patch(0, source=torch.zeros(3))  # type: ignore[arg-type]


def captured(model: Transformer, rows: int) -> Any:
    with torch.no_grad(), regard.head_outputs(model) as outputs:
        model(draw(9, rows))
    return outputs


def test_words_are_found_in_the_text() -> None:
    model = regard.load("embedded:lm")
    assert model.tokenizer is not None
    said = model.tokenizer.encode(SENTENCE)
    ids = torch.tensor([said.ids])
    at = {SENTENCE[a:z].strip(): n for n, (a, z) in enumerate(said.offsets)}
    want = logits(model, ids, Block(at["it"], at["animal"], 3))
    with torch.no_grad(), regard.edit(model, Block("It", "animal", 3), text=SENTENCE):
        assert torch.equal(model(ids).logits, want)
    for word, why in (("dog", "no word of the text is 'dog'"), ("the", "stands 2 times")):
        with (
            pytest.raises(ValueError, match=why),
            regard.edit(model, Block("it", word), text=SENTENCE),
        ):
            pass
    with pytest.raises(ValueError, match="give text="), regard.edit(model, Block("it", 0)):
        pass
    with pytest.raises(ValueError, match="no tokenizer"), regard.edit(make(), text="it is"):
        pass


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (Block(17, 3), "position 17 does not exist: the text has 17 tokens, 0 to 16"),
        (Block(3, -18), "position -18 does not exist"),
        (Block(range(3, 19), 0), "position 18 does not exist"),
        (
            Block(slice(17, None), 0),
            "changed nothing: no text .* has tokens at its queries",
        ),
        (Ablate(7), r"has no layer 7; there are 0: decoder.layers.0.self_attn, 1"),
        (Ablate("decoder.layers.9"), "has no layer"),
        (Ablate(0, 99), "head 99 does not exist: decoder.layers.0.self_attn has heads 0 to"),
    ],
)
def test_what_does_not_exist_is_refused(edit: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        logits(make(), draw(17), edit)
    assert edit_hook.n_open == 0


def test_models_that_cannot_be_edited_are_refused() -> None:
    linear = nn.Linear(3, 3)
    unedited = pytest.raises(ValueError, match="no attention of Linear was edited")
    with unedited, regard.edit(linear, Ablate()):
        linear(torch.ones(3))
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"), regard.edit("gpt2"):  # type: ignore[arg-type]
        pass
    with pytest.raises(TypeError, match="a Block, an Ablate or a Patch"), regard.edit(linear, 3):  # type: ignore[arg-type]
        pass
    compiled = nn.Sequential(nn.Linear(3, 3))
    compiled.compile()
    with pytest.raises(ValueError, match="is compiled"), regard.edit(compiled, Ablate()):
        pass


def test_an_error_in_the_block_stays_the_error_and_the_model_as_it_was() -> None:
    layer, x = MultiHeadAttention(12, 3), torch.randn(1, 5, 12)
    before = layer(x)
    with pytest.raises(KeyError, match="mine"), regard.edit(layer, Ablate(9)):
        raise KeyError("mine")
    assert torch.equal(layer(x), before) and edit_hook.n_open == 0


def test_a_watched_record_is_of_the_edited_heads() -> None:
    model, ids = make("llama"), draw(9)
    for outer in (True, False):
        blocks = regard.edit(model, Block(6, 2, 1, heads=1)), regard.watch(model, keep="qk")
        one, two = blocks if outer else blocks[::-1]
        with torch.no_grad(), one as first, two as second:
            model(ids)
        record: Any = second if outer else first
        assert record.map(1, 1)[6, 2] == 0.0 and record.map(1, 0)[6, 2] > 0.0
        assert abs(record.map(1, 1)[6].sum() - 1.0) < 1e-5
    edit, observing = Block(6, 2, 1, heads=1), regard.observing(model, Wants(weights=True))
    with torch.no_grad(), regard.edit(model, edit), observing as seen:
        model(ids)
    weights = seen["decoder.layers.1.self_attn"].weights
    assert weights is not None and weights[0, 1, 6, 2] == 0.0


def test_inner_blocks_add_to_outer_ones() -> None:
    layer, x = MultiHeadAttention(12, 3), torch.randn(1, 5, 12)
    with regard.edit(layer, Block(3, 1), Block(3, 2)):
        want = layer(x)
    with regard.edit(layer, Block(3, 1)), regard.edit(layer, Block(3, 2)):
        assert torch.allclose(layer(x), want, atol=1e-6)


def test_a_block_is_of_its_own_thread_and_context() -> None:
    layer, x = MultiHeadAttention(12, 3), torch.randn(1, 5, 12)
    before = layer(x)
    found: list[Tensor] = []
    with regard.edit(layer, Ablate(0)):
        edited = layer(x)
        inherited = contextvars.copy_context()
        thread = threading.Thread(target=inherited.run, args=(lambda: found.append(layer(x)),))
        thread.start()
        thread.join()
    assert torch.equal(found[0], before) and not torch.equal(edited, before)

    async def switch_off(head: int) -> Tensor:
        with regard.edit(layer, Ablate(0, head)):
            await asyncio.sleep(0)
            return layer(x)

    async def several() -> list[Tensor]:
        return await asyncio.gather(*map(switch_off, range(3)))

    async def outlive() -> Tensor:
        async def later() -> Tensor:
            await ended.wait()
            return layer(x)

        ended = asyncio.Event()
        with regard.edit(layer, Ablate(0)):
            layer(x)
            task = asyncio.create_task(later())
        ended.set()
        return await task

    assert torch.equal(asyncio.run(outlive()), before)
    each = asyncio.run(several())
    for head, output in enumerate(each):
        with regard.edit(layer, Ablate(0, head)):
            assert torch.equal(layer(x), output)


def test_a_cache_of_one_layer_knows_positions() -> None:
    layer, x = MultiHeadAttention(12, 3, causal=True, window=(4, 0)), torch.randn(1, 9, 12)
    with torch.no_grad(), regard.edit(layer, Block(slice(6, None), (slice(3, 4), slice(5, 6)))):
        want = layer(x)
        for cache in (KVCache.growing(), KVCache.fixed(11), KVCache.windowed(4)):
            got = torch.cat([layer(part, cache=cache) for part in x.split((4, 1, 1, 2, 1), 1)], 1)
            assert torch.allclose(got, want, atol=1e-6)
