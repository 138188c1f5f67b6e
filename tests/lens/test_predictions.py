"""What a language model says will come next, in a record: as the softmax of its logits has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lens_subjects
import numpy as np
import pytest
import torch
from tiny_checkpoints import CONFIGS
from torch import Tensor

import regard
from regard.lens.predictions import CANDIDATES
from regard.lens.record import Record
from regard.lens.watch import watch
from regard.models import Transformer, config_of

KEEP = ("qk", "predictions")


def own_model(name: str = "llama") -> Transformer:
    torch.manual_seed(11)
    model = Transformer(config_of(CONFIGS[name])).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.mul_(1.7)
    return model


def draw(n: int) -> Tensor:
    return torch.randint(5, 37, (1, n), generator=torch.Generator().manual_seed(n))


def assert_said(record: Record, logits_tv: Tensor, ids_t: Tensor, first: int = 0) -> None:
    """From token `first` on, what is kept is the softmax of these logits in float64."""
    found = record.next_tokens()
    assert found is not None
    chances = logits_tv.double().softmax(-1).numpy()
    order = -np.sort(-chances, 1)[:, :CANDIDATES]
    assert found.probs[first:] == pytest.approx(order, abs=1e-6)
    assert np.take_along_axis(chances, found.ids[first:].astype(int), 1) == pytest.approx(
        order, abs=1e-6
    )
    came = ids_t[first + 1 :].numpy()
    assert found.came.tolist() == [*ids_t[1:].tolist(), -1]
    given = chances[np.arange(len(came)), came]
    assert found.given[first + 1 : first + 1 + len(came)] == pytest.approx(given, abs=1e-6)
    assert np.isnan(found.given[: first + 1]).all()
    assert (found.ids[:first] == -1).all()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a_model_of_ours_that_reads(name: str) -> None:
    model, ids = own_model(name), draw(11)
    with torch.no_grad(), watch(model, keep=KEEP) as record:
        logits = model(ids).logits
    assert_said(record, logits[0], ids[0])


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a_model_of_transformers_that_reads(name: str) -> None:
    model, ids = lens_subjects.SUBJECTS[name](), draw(11)
    with torch.no_grad(), watch(model, keep=KEEP) as record:
        logits = model(ids).logits
    assert_said(record, logits[0], ids[0])


@pytest.mark.parametrize("cached", [True, False])
def test_a_generation_of_transformers_that_draws(cached: bool) -> None:
    """A drawn token need not be among the likeliest: its probability is known all the same."""
    model, ids = lens_subjects.SUBJECTS["llama"](), draw(7)
    torch.manual_seed(3)
    with torch.no_grad(), watch(model, keep=KEEP) as record:
        written = model.generate(ids, max_new_tokens=6, do_sample=True, use_cache=cached)
    read = written[:, :-1]
    with torch.no_grad():
        logits = model(read).logits[0, 6:]
    assert_said(record, logits, read[0], first=6)
    steps = record.steps()
    assert steps is not None and steps.tolist() == [6, 7, 8, 9, 10, 11]


def test_a_generation_of_ours() -> None:
    model, ids = own_model(), draw(7)
    with torch.no_grad(), watch(model, keep=KEEP) as record:
        written = regard.generate_ids(model, ids, max_new_tokens=5)
    read = torch.cat([ids[0], written.ids[0]])[:-1]
    with torch.no_grad():
        logits = model(read[None]).logits[0, 6:]
    assert_said(record, logits, read, first=6)
    steps = record.steps()
    assert steps is not None and steps.tolist() == [6, 7, 8, 9, 10]


def test_one_row_of_a_batch() -> None:
    model = own_model()
    ids = torch.cat([draw(9), draw(9).flip(1)])
    with torch.no_grad(), watch(model, keep=KEEP, row=1) as record:
        logits = model(ids).logits
    assert_said(record, logits[1], ids[1])


def test_several_rows_of_a_batch_each_have_their_own() -> None:
    model, ids = own_model(), torch.cat([draw(9), draw(9).flip(1)])
    with torch.no_grad(), watch(model, keep=KEEP, row=[0, 1]) as record:
        logits = model(ids).logits
    for row in range(2):
        number = record.find(f"decoder.layers.2.self_attn[{row}]")
        assert record.ids(number).tolist() == ids[row].tolist()
        best = logits[row].double().softmax(-1).topk(CANDIDATES).values.numpy()
        assert record._arrays.get(number, "next_probs") == pytest.approx(best, abs=1e-6)


def test_a_row_that_is_written_on_while_others_leave_the_batch() -> None:
    generator = torch.Generator().manual_seed(4)
    model, ids = own_model(), torch.randint(5, 37, (3, 7), generator=generator)
    with watch(model, keep=KEEP, row=2) as record:
        written = regard.generate_ids(model, ids, max_new_tokens=9)
    assert written.lengths[1] < written.lengths[2] - 1, "a row was to end before the last"
    read = torch.cat([ids[2], torch.as_tensor(written.ids)[2, : written.lengths[2] - 1]])
    with torch.no_grad():
        logits = model(read[None]).logits[0, 6:]
    assert not record.notes
    assert_said(record, logits, read, first=6)


@pytest.mark.parametrize("whose", ["ours", "transformers"])
def test_a_beam_search_has_those_of_the_text_that_won(whose: str) -> None:
    model: Any = own_model() if whose == "ours" else lens_subjects.SUBJECTS["llama"]()
    ids, options = draw(7), {"max_new_tokens": 5, "num_beams": 3}
    with torch.no_grad(), watch(model, keep=KEEP) as record:
        if whose == "ours":
            found = torch.as_tensor(regard.generate_ids(model, ids, **options).ids)
            read = torch.cat([ids[0], found[0]])[:-1]
        else:
            read = model.generate(ids, do_sample=False, **options)[0, :-1]
    with torch.no_grad():
        logits = model(read[None]).logits[0]
    # Where ours reads a text, it asks for the last logits alone.
    first = 10 if whose == "ours" else 0
    assert_said(record, logits[first:], read, first=first)


def test_a_masked_model_says_nothing_of_the_next_token() -> None:
    model: Any = lens_subjects.text_model(
        lens_subjects.hf.BertConfig(**lens_subjects.BERT), lens_subjects.hf.BertForMaskedLM
    )
    with torch.no_grad(), watch(model, keep=KEEP) as record:
        model(draw(9))
    assert record.next_tokens() is None


def test_states_as_wide_as_a_table_of_positions_are_no_logits() -> None:
    hf = lens_subjects.hf
    sizes = {"n_embd": 20, "n_positions": 20, "n_layer": 2, "n_head": 5, "vocab_size": 37}
    model: Any = lens_subjects.text_model(hf.GPT2Config(**sizes), hf.GPT2Model)
    with torch.no_grad(), watch(model, keep=KEEP) as record:
        model(draw(9))
    assert record.next_tokens() is None


def test_what_was_not_asked_for_is_not_kept() -> None:
    model, ids = own_model(), draw(9)
    with torch.no_grad(), watch(model, keep="qk") as record:
        model(ids)
    assert record.next_tokens() is None and record.steps() is None
    assert record.value_norms(0) is None and record.gradients(0) is None


def test_watching_changes_no_bit() -> None:
    model, ids = own_model(), draw(9)
    with torch.no_grad():
        before = model(ids).logits
        with watch(model, keep=(*KEEP, "values")):
            after = model(ids).logits
    assert torch.equal(before, after)


def test_a_file_keeps_predictions_and_the_names_of_candidates(tmp_path: Path) -> None:
    model, ids = own_model(), draw(9)
    with torch.no_grad(), watch(model, keep=KEEP) as record:
        model(ids)
    found = record.next_tokens()
    assert found is not None
    record.describe(vocabulary={int(n): f"word {n}" for n in np.unique(found.ids)})
    record.save(tmp_path / "said.regard")
    again = Record.open(tmp_path / "said.regard").check()
    assert again.vocabulary == record.vocabulary
    read = again.next_tokens()
    assert read is not None
    for name in ("probs", "ids", "given", "came"):
        np.testing.assert_array_equal(getattr(read, name), getattr(found, name))


def test_a_tokenizer_names_the_candidates() -> None:
    model = regard.load("embedded:lm")
    tokenizer = model.tokenizer
    assert tokenizer is not None
    ids = torch.tensor([tokenizer.encode("Once upon a time there was").ids])
    with torch.no_grad(), watch(model, keep=KEEP) as record:
        logits = model(ids).logits
    record.read(tokenizer)
    found = record.next_tokens()
    assert found is not None and record.vocabulary is not None
    best = int(logits[0, -1].argmax())
    assert found.ids[-1, 0] == best
    assert record.vocabulary[best] == tokenizer.decode([best], skip_special=False)


@pytest.mark.parametrize("keep", [("qk", "logits"), "everything"])
def test_what_cannot_be_kept_is_refused_in_words(keep: Any) -> None:
    with pytest.raises(ValueError, match=r"keep has .*; expected"), watch(own_model(), keep=keep):
        pass
