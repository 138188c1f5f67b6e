"""Blocks in threads, tasks and each other: every record whole and its own, and no bit changed."""

from __future__ import annotations

import asyncio
import copy
import pickle
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from lens_subjects import BERT, SUBJECTS, draw, text_model
from tiny_checkpoints import CONFIGS
from torch import Tensor, nn

from regard.layers import MultiHeadAttention
from regard.lens.record import Record
from regard.lens.watch import watch
from regard.models import Transformer, config_of
from regard.ops import call_hook

N_THREADS = 8


def ours(seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(config_of(CONFIGS["llama"])).eval()


def encoder(seed: int = 0) -> nn.TransformerEncoder:
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(20, 4, 37, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Tensor]]] = {
    "ours": (ours, lambda n: draw(1, n) % 37),
    "transformers": (lambda seed: SUBJECTS["llama"](), lambda n: draw(1, n)),
    "written out": (lambda seed: SUBJECTS["bloom"](), lambda n: draw(1, n)),
    "torch.nn": (encoder, lambda n: torch.randn(1, n, 20)),
}


def run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Any = model(x)
    found = out if isinstance(out, Tensor) else out.logits
    assert isinstance(found, Tensor)
    return found


def assert_same(record: Record, alone: Record) -> None:
    assert [place.name for place in record.places] == [place.name for place in alone.places]
    for number in range(len(alone.places)):
        mine, other = record.statistics(number), alone.statistics(number)
        assert all(np.array_equal(mine[name], other[name]) for name in other)


def record_alone(model: nn.Module, x: Tensor) -> tuple[Record, Tensor]:
    with watch(model) as record:
        out = run(model, x)
    return record, out


@pytest.mark.parametrize("kind", MODELS)
def test_eight_threads_have_a_whole_record_each(kind: str) -> None:
    make, ask = MODELS[kind]
    models = [make(n) for n in range(N_THREADS)]
    asked = [ask(5 + n) for n in range(N_THREADS)]
    alone = [record_alone(model, x) for model, x in zip(models, asked, strict=True)]
    barrier = threading.Barrier(N_THREADS)

    def work(n: int) -> None:
        for _ in range(3):
            barrier.wait(60)
            record, out = record_alone(models[n], asked[n])
            assert torch.equal(out, alone[n][1])
            assert_same(record, alone[n][0])

    with ThreadPoolExecutor(N_THREADS) as pool:
        list(pool.map(work, range(N_THREADS)))
    assert call_hook.active is None


@pytest.mark.parametrize("kind", MODELS)
def test_one_model_watched_by_eight_threads(kind: str) -> None:
    make, ask = MODELS[kind]
    model, asked = make(0), [ask(5 + n) for n in range(N_THREADS)]
    alone = [record_alone(model, x) for x in asked]

    def work(n: int) -> None:
        record, out = record_alone(model, asked[n])
        assert torch.equal(out, alone[n][1])
        assert_same(record, alone[n][0])

    with ThreadPoolExecutor(N_THREADS) as pool:
        list(pool.map(work, range(N_THREADS)))


@pytest.mark.parametrize("kind", MODELS)
def test_a_call_from_another_thread_is_not_recorded_and_unaffected(kind: str) -> None:
    make, ask = MODELS[kind]
    model, mine, other = make(0), ask(7), ask(11)
    want = run(model, other)
    with ThreadPoolExecutor(1) as pool, watch(model) as record:
        assert torch.equal(pool.submit(run, model, other).result(), want)
        run(model, mine)
        assert torch.equal(pool.submit(run, model, other).result(), want)
    assert_same(record, record_alone(model, mine)[0])


@pytest.mark.parametrize("kind", MODELS)
def test_a_thread_that_inherits_the_context_is_another_thread(kind: str) -> None:
    make, ask = MODELS[kind]
    model, mine, other = make(0), ask(7), ask(11)

    async def work() -> Record:
        with watch(model) as record:
            await asyncio.to_thread(run, model, other)
            run(model, mine)
        return record

    assert_same(asyncio.run(work()), record_alone(model, mine)[0])


@pytest.mark.parametrize("kind", MODELS)
def test_blocks_may_end_in_any_order(kind: str) -> None:
    make, ask = MODELS[kind]
    models, x = [make(n) for n in range(4)], ask(7)
    alone = [record_alone(model, x) for model in models]
    for seed in range(3):
        order = random.Random(seed).sample(range(4), 4)
        blocks = [ExitStack() for _ in models]
        records = [
            stack.enter_context(watch(model)) for stack, model in zip(blocks, models, strict=True)
        ]
        for n in order:
            assert torch.equal(run(models[n], x), alone[n][1])
            blocks[n].close()
        for record, (want, _) in zip(records, alone, strict=True):
            assert_same(record, want)
        assert call_hook.active is None
        assert torch.overrides._get_current_function_mode_stack() == []


@pytest.mark.parametrize("kind", MODELS)
def test_nested_blocks_see_the_same_and_change_no_bit(kind: str) -> None:
    make, ask = MODELS[kind]
    model, x = make(0), ask(7)
    alone, want = record_alone(model, x)
    with watch(model) as outer, watch(model) as inner:
        assert torch.equal(run(model, x), want)
    assert_same(inner, alone)
    assert_same(outer, alone)


@pytest.mark.parametrize("kind", MODELS)
def test_tasks_of_one_thread_have_their_own_blocks(kind: str) -> None:
    make, ask = MODELS[kind]
    model, asked = make(0), [ask(5 + n) for n in range(5)]
    alone = [record_alone(model, x) for x in asked]

    async def work(n: int) -> None:
        await asyncio.sleep(0.001 * (5 - n))
        with watch(model) as record:
            await asyncio.sleep(0.002 * n)
            assert torch.equal(run(model, asked[n]), alone[n][1])
            await asyncio.sleep(0.003 * (n % 2))
        assert_same(record, alone[n][0])

    async def bystander() -> None:
        for _ in range(5):
            assert torch.equal(run(model, asked[0]), alone[0][1])
            await asyncio.sleep(0.002)

    async def together() -> None:
        await asyncio.gather(*map(work, range(5)), bystander())

    asyncio.run(together())
    assert call_hook.active is None


def test_a_block_that_ends_elsewhere_leaves_nothing_that_records() -> None:
    model, x = ours(), draw(1, 7) % 37
    block = ExitStack()
    record = block.enter_context(watch(model))
    run(model, x)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(block.close).result()
    n_places = len(record.places)
    run(model, draw(1, 5) % 37)
    assert len(record.places) == n_places and call_hook.active is None
    assert_same(record, record_alone(model, x)[0])


@pytest.mark.parametrize("kind", MODELS)
def test_models_can_be_pickled_and_copied_in_a_block(kind: str) -> None:
    make, ask = MODELS[kind]
    model, x = make(0), ask(7)
    want = run(model, x)
    with watch(model):
        run(model, x)
        twins = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
        assert all(torch.equal(run(twin, x), want) for twin in twins)
    for twin in twins:
        assert torch.equal(run(twin, x), want)
        assert vars(twin).keys() == vars(model).keys()
        assert not any("forward" in vars(module) for module in twin.modules())


def test_an_interrupted_call_does_not_confuse_the_next() -> None:
    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.stop = MultiHeadAttention(12, 3), True

        def forward(self, x: Tensor) -> Tensor:
            if self.stop:
                raise KeyboardInterrupt
            out: Tensor = self.attn(x)
            return out

    model, x = Stops().eval(), torch.randn(1, 5, 12)
    with watch(model) as record:
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model.stop = False
        model(x)
    assert [place.name for place in record.places] == ["attn"]
    assert torch.overrides._get_current_function_mode_stack() == []


def test_another_model_keeps_its_fast_path_in_a_block() -> None:
    model, other = text_model(hf.BertConfig(**BERT), hf.BertModel), encoder()
    x = torch.randn(1, 7, 20)
    want = run(other, x)
    with watch(model):
        assert torch.equal(run(other, x), want)
        with torch.no_grad():
            model(draw(1, 5))
