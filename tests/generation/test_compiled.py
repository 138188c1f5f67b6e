"""The compiled step: one graph for every decoder family, the same tokens, used again and again."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from tiny_checkpoints import make_model

from regard.generation import Decoding, generate_ids
from regard.generation import engine as decoding_module

ROWS = [[3, 5, 7], [11, 2, 13, 17, 19, 4, 8], [4]]
FAMILIES = ["gpt2", "llama", "llama-3", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"]
FAMILIES += ["gpt_neox", "gptj", "opt", "bloom", "palm", "gpt2-scaled", "bloom-normed"]


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Graphs are traced whole (a break would raise) and run as they are: code is not made."""
    torch.compiler.reset()
    quick = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(decoding_module.torch, "compile", quick)
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_every_family_is_one_graph_and_gives_the_same_tokens(
    traced_only: None, family: str
) -> None:
    model = make_model(family, torch.float64)
    room = (model.config.max_len or 99) - max(map(len, ROWS))
    options: dict[str, Any] = {"max_new_tokens": min(12, room), "ignore_eos": True}
    expected = generate_ids(model, ROWS, **options)
    for turn in range(2):  # the second batch finds the graph of the first
        made = generate_ids(model, ROWS, compiled=True, **options)
        assert made.rows() == expected.rows(), turn
    assert len(decoding_module.graphs_of(model)) == 1


def test_stop_tokens_limits_draws_and_penalties_are_as_without_compiling(
    traced_only: None,
) -> None:
    model = make_model("llama", torch.float64)
    first = generate_ids(model, ROWS, max_new_tokens=30, ignore_eos=True).rows()
    for options in (
        {"max_new_tokens": 30, "stop_tokens": [first[0][4], first[1][20]]},
        {"max_new_tokens": 9, "temperature": 1.0, "top_k": 20, "seed": 3},
        {"max_new_tokens": 9, "repetition_penalty": 1.4},
        {"max_new_tokens": 9, "min_new_tokens": 5, "stop_tokens": [first[2][1]]},
    ):
        given: dict[str, Any] = {"ignore_eos": True, **options}
        plain, made = (generate_ids(model, ROWS, compiled=c, **given) for c in (False, True))
        assert made.rows() == plain.rows() and made.reasons == plain.reasons, options


def test_two_batches_at_a_time_have_a_graph_each(traced_only: None) -> None:
    model = make_model("gpt2", torch.float64)
    ids = torch.tensor([[3, 5, 7]])
    with torch.inference_mode():
        one, other = (Decoding(model, max_len=20, compiled=True) for _ in range(2))
        alone = Decoding(model, max_len=20)
        one.read(ids)
        other.read(torch.tensor([[9, 1]]))
        alone.read(ids)
        for token in (4, 8, 15):
            given = torch.tensor([token])
            scores = one.step(given).clone()
            other.step(torch.tensor([2]))
            torch.testing.assert_close(scores, alone.step(given))
        assert len(decoding_module.graphs_of(model)) == 2
        one.close()
        other.close()


def test_a_graph_is_dropped_when_the_weights_have_moved(traced_only: None) -> None:
    model = make_model("llama")
    generate_ids(model, ROWS, max_new_tokens=3, compiled=True)
    model.double()
    expected = generate_ids(model, ROWS, max_new_tokens=5).rows()
    assert generate_ids(model, ROWS, max_new_tokens=5, compiled=True).rows() == expected


def test_many_shapes_are_compiled_and_the_oldest_graphs_are_let_go(traced_only: None) -> None:
    """More than the compiler takes of one piece of code, and more than are kept."""
    model = make_model("llama", torch.float64)
    for n_rows in range(1, 12):
        rows = [[3, 5, 7]] * n_rows
        made = generate_ids(model, rows, max_new_tokens=2, compiled=True)
        assert made.rows() == generate_ids(model, rows, max_new_tokens=2).rows()
    assert [graph.batch for graph in decoding_module.graphs_of(model)] == list(range(4, 12))


def test_a_model_with_graphs_can_be_copied_and_is_freed_with_them(traced_only: None) -> None:
    model = make_model("llama")
    expected = generate_ids(model, ROWS, max_new_tokens=4, compiled=True).rows()
    twin = copy.deepcopy(model)
    assert not decoding_module.graphs_of(twin)
    assert generate_ids(twin, ROWS, max_new_tokens=4, compiled=True).rows() == expected
    gone = weakref.ref(model)
    del model, twin
    torch.compiler.reset()
    gc.collect()
    assert gone() is None


def test_scores_that_are_not_finite_are_refused_in_words(traced_only: None) -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.decoder.norm.weight.fill_(torch.nan)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="NaN or infinite"):
        generate_ids(model, ROWS, max_new_tokens=3, compiled=True)


def test_an_encoder_decoder_is_refused_in_words() -> None:
    model = make_model("bart")
    with pytest.raises(ValueError, match="is for models without an encoder"):
        generate_ids(model, source=[[3, 4]], max_new_tokens=3, compiled=True)


@pytest.mark.slow
def test_code_made_by_the_compiler_gives_the_same_tokens() -> None:
    model = make_model("llama")
    expected = generate_ids(model, ROWS, max_new_tokens=20).rows()
    assert generate_ids(model, ROWS, max_new_tokens=20, compiled=True).rows() == expected
