"""Watching a search records the text that wins: the weights of a forward of its tokens."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from lens_subjects import ENCODERS, SUBJECTS, TWO_SIDED, draw, judge
from rounding import assert_within, bound_weights
from tiny_checkpoints import CONFIGS
from torch import Tensor, nn

import regard
from regard.layers import observing
from regard.lens.record import Record
from regard.lens.watch import watch
from regard.models import Transformer, config_of
from regard.ops import Wants

WRITERS = [name for name in SUBJECTS if name not in ENCODERS]


def assert_weights(record: Record, judged: list[tuple[Tensor, Tensor]], row: int = 0) -> None:
    assert len(record.places) == len(judged), [place.name for place in record.places]
    for number, (plain, exact) in enumerate(judged):
        place = record.places[number]
        assert (place.n_heads, place.n_queries, place.n_keys) == exact.shape[1:]
        found = np.stack([record.map(number, head) for head in range(place.n_heads)])
        bound = bound_weights(plain[row], exact[row])
        assert_within(found, exact[row], bound, place.name)


@pytest.mark.parametrize("name", WRITERS)
def test_the_record_of_a_search_is_the_winners(name: str) -> None:
    model, ids = SUBJECTS[name](), draw(1, 11)
    given = {"attention_mask": torch.ones_like(ids), "num_beams": 4, "max_new_tokens": 7}
    with torch.no_grad():
        plain = model.generate(ids, do_sample=False, **given)
        with watch(model, keep="qk") as record:
            written = model.generate(ids, do_sample=False, **given)
    assert torch.equal(plain, written) and not record.notes
    own = {"input_ids": ids, "decoder_input_ids": written[:, :-1]}
    asked = own if name in TWO_SIDED else {"input_ids": written[:, :-1]}
    assert_weights(record, judge(model, {**asked, "use_cache": False}))


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_a_winner_that_ends_early_and_several_that_are_returned(name: str) -> None:
    model, ids = copy.deepcopy(SUBJECTS[name]()), draw(1, 11)
    given: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 9, "length_penalty": -3.0}
    given["min_new_tokens"] = 4
    given |= {"attention_mask": torch.ones_like(ids), "num_return_sequences": 3}
    free = model.generate(ids, do_sample=False, **given)
    width = 1 if name in TWO_SIDED else 11
    stop = int(free[0, width + 4])
    with torch.no_grad(), watch(model, keep="qk") as record:
        written = model.generate(ids, do_sample=False, eos_token_id=stop, **given)[:1]
    ends = (written[0, width:] == stop).nonzero()
    assert len(ends), "the winner was to end early"
    fed = written[:, : width + int(ends[0])]
    asked = {"input_ids": ids, "decoder_input_ids": fed} if width == 1 else {"input_ids": fed}
    assert_weights(record, judge(model, {**asked, "use_cache": False}))


@pytest.mark.filterwarnings("ignore:Passing `generation_config` together with")
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_drafts_of_an_assistant_that_were_taken_back_are_in_no_record(name: str) -> None:
    model, ids = SUBJECTS[name](), draw(1, 11)
    assistant = copy.deepcopy(model)
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        for tensor in assistant.parameters():
            tensor.add_(torch.randn_like(tensor), alpha=0.02)
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
        plain = model.generate(ids, do_sample=False, assistant_model=assistant, **given)
        assert 3 < len(calls) < 12  # drafts were taken, and taken back
        with watch(model, keep="qk") as record:
            written = model.generate(ids, do_sample=False, assistant_model=assistant, **given)
    assert torch.equal(plain, written) and not record.notes
    own = {"input_ids": ids, "decoder_input_ids": written[:, :-1]}
    asked = own if name in TWO_SIDED else {"input_ids": written[:, :-1]}
    assert_weights(record, judge(model, {**asked, "use_cache": False}))


@pytest.mark.parametrize("row", [0, 1])
def test_a_row_is_a_prompt_of_the_search(row: int) -> None:
    model, ids = SUBJECTS["llama"](), draw(2, 11)
    real = torch.ones_like(ids)
    real[1, :4] = 0
    given = {"attention_mask": real, "num_beams": 3, "max_new_tokens": 5}
    with torch.no_grad(), watch(model, keep="qk", row=row) as record:
        written = model.generate(ids, do_sample=False, **given)
    mask = torch.cat([real, torch.ones(2, 4).long()], 1)
    given = {"input_ids": written[:, :-1], "attention_mask": mask, "use_cache": False}
    n_first = 4 * row
    for number, (plain, exact) in enumerate(judge(model, given)):
        found = np.stack([record.map(number, head) for head in range(plain.shape[1])])
        bound = bound_weights(plain[row], exact[row])
        assert_within(found[:, n_first:], exact[row][:, n_first:], bound)


def ours(name: str) -> Transformer:
    torch.manual_seed(11)
    model = Transformer(config_of(CONFIGS[name])).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.mul_(1.7)
    return model


def observed(model: Transformer, ids: Tensor, **given: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Each place's weights in a forward of these tokens, in float32 and in float64."""
    found = []
    for each in (model, copy.deepcopy(model).double()):
        with torch.no_grad(), observing(each, Wants(weights=True)) as seen:
            each(ids, **given)
        found.append({name: seen[name].weights for name in seen})
    return {name: (found[0][name], found[1][name]) for name in found[0]}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["llama", "gemma2", "t5"])
def test_our_own_search_is_recorded_as_its_winner(name: str, seed: int) -> None:
    model, ids, given = ours(name), draw(1, 7, seed) % 37, {}
    options: dict[str, Any] = {"max_new_tokens": 6, "num_beams": 4}
    if name == "t5":
        given, options = {"source": ids}, {**options, "source": ids}
    asked = () if name == "t5" else (ids,)
    plain = regard.generate_ids(model, *asked, **options)
    with watch(model, keep="qk") as record:
        written = regard.generate_ids(model, *asked, **options)
    assert torch.equal(torch.as_tensor(plain.ids), torch.as_tensor(written.ids))
    tokens = torch.as_tensor(written.ids)[:1, : written.lengths[0] - 1]
    start = torch.tensor([[model.config.tokens.decoder_start or 0]]) if name == "t5" else ids
    text = torch.cat([start, tokens], 1)
    judged = observed(model, text, **given)
    assert {place.name for place in record.places} == set(judged)
    assert_weights(record, [judged[place.name] for place in record.places])
    assert record.ids(record.find("decoder.layers.0.self_attn")).tolist() == text[0].tolist()


def test_the_embedded_translator_is_recorded_as_what_it_wrote() -> None:
    model = regard.load("embedded:translate")
    with watch(model) as record:
        text = regard.translate(model, "The cat sat on the mat.")
    assert model.tokenizer is not None and len(record.places) == len(
        model.config.encoder
    ) + 2 * len(model.config.decoder)
    wrote = record.ids(record.find("decoder.layers.0.self_attn"))
    assert wrote is not None and model.tokenizer.decode(wrote[1:].tolist()).strip() == text.strip()


class Searching(nn.Module):
    """A search in somebody's own loop: rows change places between the steps."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @torch.no_grad()
    def run(self, ids: Tensor) -> None:
        out = self.model(ids, use_cache=True)
        cache = out.past_key_values
        for step in range(3):
            token = torch.full((len(ids), 1), 5 + step) + torch.arange(len(ids))[:, None]
            cache.reorder_cache(torch.tensor([1, 2, 0]))
            self.model(token, past_key_values=cache, use_cache=True)


def test_a_row_that_changes_places_is_left_out_in_words() -> None:
    model = Searching(SUBJECTS["llama"]())
    with (
        pytest.raises(ValueError, match="row 0 of the batch is no longer the text that it was"),
        watch(model, row=0),
    ):
        model.run(draw(3, 7))


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_row_is_followed_while_others_leave_the_batch(name: str, row: int) -> None:
    """Our generation goes on without rows that have ended."""
    model, ids = ours(name), draw(3, 7, 3) % 37
    options: dict[str, Any] = {"max_new_tokens": 9}
    if name == "t5":
        options["source"] = ids
    asked = () if name == "t5" else (ids,)
    free = regard.generate_ids(model, *asked, **options)
    stop = int(free.ids[(row + 1) % 3, 1])
    options["stop_tokens"] = (stop,)
    with watch(model, keep="qk", row=row) as record:
        written = regard.generate_ids(model, *asked, **options)
    assert len(set(written.lengths)) > 1, "rows were to end at different steps"
    fed = torch.as_tensor(written.ids)[row, : written.lengths[row] - 1]
    place = record.find("decoder.layers.0.self_attn")
    read = record.ids(place)
    assert read is not None
    n_prompt = 1 if name == "t5" else 7
    assert read[n_prompt : n_prompt + len(fed)].tolist() == fed.tolist()
    assert not any("@" in each.name for each in record.places) and not record.notes
