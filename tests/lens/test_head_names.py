"""What layers, heads and models are called, and what is said of them."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from lens_words import Hand, make_record
from record_files import join, parts
from torch import Tensor, nn
from view_fakes import decoder, translator

import regard
from regard.lens.head_names import (
    LEAST_EVIDENCE,
    SCORE_WORDS,
    known_scores,
    label_places,
    length_note,
    name_model,
    short_model_name,
)
from regard.lens.head_table import SURVEYED
from regard.lens.record import Record
from regard.lens.watch import watch
from regard.ops import Causal, attention


def test_every_score_has_words_and_no_two_the_same() -> None:
    assert set(SCORE_WORDS) == set(SURVEYED)
    assert len({each.what for each in SCORE_WORDS.values()}) == len(SURVEYED)
    assert len({each.does for each in SCORE_WORDS.values()}) == len(SURVEYED)


def test_layers_are_told_with_their_stack_where_there_are_several() -> None:
    assert label_places(decoder(layers=3)) == ["0", "1", "2"]
    labels = ["encoder 0", "encoder 1", "decoder 0", "cross 0", "decoder 1", "cross 1"]
    assert label_places(translator()) == labels


def test_a_record_without_words_of_the_source_tells_its_stacks_too() -> None:
    model = regard.load("embedded:translate")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), watch(model) as record:
        model(ids, source=torch.tensor([[8, 9, 10, 11, 12]]))
    assert label_places(record) == [
        *(f"encoder {n}" for n in range(4)),
        *(f"{kind} {n}" for n in range(3) for kind in ("decoder", "cross")),
    ]


def test_places_that_would_be_called_alike_have_their_names() -> None:
    record = decoder(layers=2)
    record.places = [record.places[0], record.places[0], record.places[1]]
    assert label_places(record) == ["layers.0.attn", "layers.0.attn", "1"]


class Words(nn.Module):
    """A model that reads tokens, and attends to all before alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 4)
        self.config = type("Config", (), {"max_position_embeddings": 7})()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)[:, None]
        return attention(x, x, x, mask=Causal())


def see(ids: list[int]) -> Record:
    model = Words()
    with torch.no_grad(), watch(model) as record:
        model(torch.tensor([ids]))
    return record


def test_induction_is_said_from_enough_tokens_only() -> None:
    few = see([1, 2, 3, 1, 4])
    assert few.counts()["induction"].tolist() == [[1]]
    assert np.isfinite(few.heads()["induction"]).all()
    assert np.isnan(known_scores(few)["induction"]).all()
    cycle = [1, 2, 3] * 5
    enough = see(cycle[: 3 + LEAST_EVIDENCE])
    assert enough.counts()["induction"].tolist() == [[LEAST_EVIDENCE]]
    assert np.isfinite(known_scores(enough)["induction"]).all()
    assert np.isnan(known_scores(see(cycle[: 2 + LEAST_EVIDENCE]))["induction"]).all()


def test_a_text_longer_than_the_model_was_made_for_is_told(tmp_path: Path) -> None:
    assert length_note(see([1] * 7)) is None
    long = see([1] * 8)
    note = length_note(long)
    assert note is not None and "8 tokens" in note and "at most 7" in note
    long.save(tmp_path / "long.regard")
    assert length_note(Record.open(tmp_path / "long.regard")) == note


def test_the_embedded_model_is_told_beyond_its_512_tokens() -> None:
    model = regard.load("embedded:lm")
    for n, told in ((512, False), (513, True)):
        with torch.no_grad(), watch(model, layers=0) as record:
            model(torch.full((1, n), 5))
        assert (length_note(record) is not None) == told


def test_records_from_before_open_and_say_nothing_of_lengths(tmp_path: Path) -> None:
    path = tmp_path / "x.regard"
    see([1] * 8).save(path)
    header, about, arrays = parts(path.read_bytes())
    assert about.pop("trained_len") == 7
    path.write_bytes(join(header, about, arrays))
    old = Record.open(path).check()
    assert old.trained_len is None and length_note(old) is None
    make_record().save(path)
    assert "trained_len" not in parts(path.read_bytes())[1]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("/home/someone/models/bert-base-uncased", "bert-base-uncased"),
        ("/home/someone/models/bert-base-uncased/", "bert-base-uncased"),
        ("./smollm2.gguf", "smollm2.gguf"),
        (r"C:\Users\x\bert", "bert"),
        ("/root/.cache/huggingface/hub/models--org--name/snapshots/0123abc", "org/name"),
        ("org/name", "org/name"),
        ("embedded:lm", "embedded:lm"),
        ("LlamaForCausalLM", "LlamaForCausalLM"),
        ("/", "/"),
    ],
)
def test_a_model_is_called_by_its_folder(name: str, short: str) -> None:
    assert short_model_name(name) == short


def test_a_relative_path_that_is_there_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert name_model("some/folder") == "some/folder"
    (tmp_path / "some" / "folder").mkdir(parents=True)
    assert name_model("some/folder") == "folder"
    assert name_model(".") == tmp_path.name


def test_a_watched_model_of_a_local_folder_is_called_by_it() -> None:
    model = nn.Sequential(Hand(torch.zeros(1, 3, 3)))
    model.config = type("Config", (), {"_name_or_path": "/home/someone/albert"})()
    with watch(model) as record:
        model(torch.zeros(1))
    assert record.model == "albert" and not re.search("someone", repr(record))
