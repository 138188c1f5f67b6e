"""Dynamic-NTK rotary scaling: texts go on past the length that the model was trained on.

The judge is a fresh copy of the original for each text: its rotary remembers the longest one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from decoder_originals import dynamic, gemma3, longrope, mistral, neox, turned
from family_judge import Draw, assert_near, make_subject
from tiny_checkpoints import make_model
from torch import Tensor

from regard.generation import Decoding, generate_ids
from regard.generation import engine as decoding_module
from regard.models import Transformer, config_of

LIMIT, N_NEW = 17, 13
LENGTHS = (7, 13, 23)
OPTIONS: dict[str, Any] = {"max_new_tokens": N_NEW, "ignore_eos": True}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
NEAR = {"rope_type": "default", "rope_theta": 70.0}

ORIGINALS: dict[str, Callable[[], Any]] = {
    "llama": dynamic,
    "mistral": lambda: mistral(max_position_embeddings=LIMIT, rope_parameters=DYNAMIC),
    "gpt_neox": lambda: neox(
        max_position_embeddings=LIMIT, rope_parameters={**DYNAMIC, "partial_rotary_factor": 0.5}
    ),
    "gemma3": lambda: gemma3(
        max_position_embeddings=LIMIT,
        rope_parameters={"full_attention": DYNAMIC, "sliding_attention": NEAR},
    ),
}


@dataclass(frozen=True, eq=False)
class Case:
    """An original and ours; prompts, what the original writes after each, and its logits (T, V)."""

    original: Any
    ours: Transformer
    rows: list[list[int]]
    tokens: list[list[int]]
    logits: list[Tensor]


@pytest.fixture(scope="module", params=ORIGINALS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    draw = Draw(seed=98, matrices=1.5, table=0.4, vectors=0.1)
    subject = make_subject(ORIGINALS[request.param](), folder, draw=draw)
    rows = draw_rows(subject.ours)
    written = [write_original(subject.original, row) for row in rows]
    tokens = [row for row, _ in written]
    assert len({token for row in tokens for token in row}) > 4
    return Case(subject.original, subject.ours, rows, tokens, [logits for _, logits in written])


def draw_rows(model: Transformer) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(5)
    top = model.config.vocab_size
    return [torch.randint(5, top, (n,), generator=drawn).tolist() for n in LENGTHS]


def write_original(original: Any, row: list[int], **more: Any) -> tuple[list[int], Tensor]:
    """What a fresh original writes with a cache, and its logits at each step."""
    ids = torch.tensor([row])
    out = copy.deepcopy(original).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=N_NEW,
        output_logits=True,
        return_dict_in_generate=True,
        **more,
    )
    return out.sequences[0, len(row) :].tolist(), torch.cat(out.logits)


def test_each_row_is_what_transformers_writes(case: Case) -> None:
    """In a padded batch and alone; a prompt in chunks is read as in one piece."""
    assert generate_ids(case.ours, case.rows, **OPTIONS).rows() == case.tokens
    assert generate_ids(case.ours, case.rows, chunk=5, **OPTIONS).rows() == case.tokens
    assert generate_ids(case.ours, case.rows[:1], **OPTIONS).rows() == case.tokens[:1]


@pytest.mark.parametrize("case", ["llama"], indirect=True)
def test_beams_are_those_of_transformers(case: Case) -> None:
    theirs = [write_original(case.original, row, num_beams=3)[0] for row in case.rows]
    assert generate_ids(case.ours, case.rows, num_beams=3, **OPTIONS).rows() == theirs


def test_each_step_has_the_logits_of_transformers(case: Case) -> None:
    for row, tokens, logits_tv in zip(case.rows, case.tokens, case.logits, strict=True):
        with torch.inference_mode():
            decoding = Decoding(case.ours, max_len=len(row) + N_NEW)
            steps = [decoding.read(torch.tensor([row]))]
            steps += [decoding.step(torch.tensor([token])) for token in tokens[:-1]]
        assert_near("logits", torch.cat(steps), logits_tv)


def test_a_long_text_read_at_once_has_the_logits_of_transformers(case: Case) -> None:
    """And gives them again after a longer one, which the original would not."""
    drawn = torch.Generator().manual_seed(7)
    ids = torch.randint(5, case.ours.config.vocab_size, (2, 61), generator=drawn)
    with torch.no_grad():
        first = case.ours(ids[:, :29]).logits
        assert_near("logits", first, copy.deepcopy(case.original)(ids[:, :29]).logits)
        longer = case.ours(ids).logits
        assert_near("logits", longer, copy.deepcopy(case.original)(ids).logits)
        assert torch.equal(case.ours(ids[:, :29]).logits, first)
        original = copy.deepcopy(case.original)
        original(ids)
        assert not torch.allclose(original(ids[:, :29]).logits, first, atol=1e-3)


def test_padding_changes_no_row_past_the_limit(case: Case) -> None:
    rows = [torch.tensor(row) for row in case.rows]
    for side in ("left", "right"):
        ids, real = torch.full((len(rows), 29), 3), torch.zeros(len(rows), 29, dtype=torch.bool)
        for n, row in enumerate(rows):
            where = slice(29 - len(row), None) if side == "left" else slice(len(row))
            ids[n, where], real[n, where] = row, True
        with torch.no_grad():
            logits = case.ours(ids, real=real).logits
            for n, row in enumerate(rows):
                alone = copy.deepcopy(case.original)(row[None]).logits[0]
                assert_near(f"{side}-padded logits", logits[n][real[n]], alone)


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are traced whole (a break would raise) and run as they are: code is not made."""
    torch.compiler.reset()
    quick = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(decoding_module.torch, "compile", quick)
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("case", ["llama", "mistral"], indirect=True)
def test_the_compiled_step_is_one_graph_and_writes_the_same(traced_only: None, case: Case) -> None:
    model = copy.deepcopy(case.ours)
    for turn in range(2):
        made = generate_ids(model, case.rows, compiled=True, **OPTIONS)
        assert made.rows() == case.tokens, turn
    assert len(decoding_module.graphs_of(model)) == 1


def test_nothing_stays_from_a_longer_text(case: Case) -> None:
    for n in (0, 2, 0, 1):
        assert generate_ids(case.ours, [case.rows[n]], **OPTIONS).rows() == [case.tokens[n]]


def test_a_prompt_in_chunks_is_read_as_in_one_piece_with_longrope_too() -> None:
    model = make_model("llama-long")
    ids = torch.tensor([[3, 5, 7, 11, 13] * 7])
    with torch.inference_mode():
        whole, parts = (Decoding(model, max_len=40).read(ids, chunk=n) for n in (35, 5))
    torch.testing.assert_close(parts, whole)


SCALED: dict[str, Callable[[], Any]] = {
    "linear": lambda: turned("linear", factor=3.0),
    "yarn": lambda: turned("yarn", factor=4.0, original_max_position_embeddings=23),
    "llama3": lambda: turned(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=31,
    ),
    "longrope": longrope,
    "local": lambda: gemma3(
        rope_parameters={"full_attention": NEAR, "sliding_attention": DYNAMIC},
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_every_other_scaling_keeps_its_limit(name: str) -> None:
    model = Transformer(config_of(SCALED[name]().to_dict())).eval()
    assert model.config.max_len == 101
    made = generate_ids(model, [[3] * 97, [3] * 91], **OPTIONS)
    assert made.lengths == (4, 10) and made.reasons == ("length", "length")
    with pytest.raises(ValueError, match="101 tokens, and this model reads 101 in all"):
        generate_ids(model, [[3] * 101])
