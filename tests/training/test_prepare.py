"""From files to a task and a model: what is held out, which tokenizer, what is used again."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.generation.translation import Reader
from regard.models import Transformer
from regard.tokens import Tokenizer
from regard.tokens.files import surround
from regard.training.config import TrainConfig
from regard.training.data.reading import BadData
from regard.training.data.store import TokenFile
from regard.training.data.vocabulary import train_tokenizer
from regard.training.init import start
from regard.training.loss import summed_loss
from regard.training.prepare import (
    Files,
    Prepared,
    Sides,
    hold_out_pairs,
    hold_out_text,
    prepare,
)
from regard.training.recipes import Recipe, llama, original, sized
from regard.training.tasks import LanguageTask, TranslationTask

TRAIN = TrainConfig(steps=3, seed=5)
LM = Recipe(task="lm", model=llama(12, 1, 3, 1, 17), train=TRAIN, vocab_size=300, context=8, rows=2)
MASKED = replace(
    LM,
    task="masked",
    cutting="wordpiece",
    model={
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "intermediate_size": 17,
        "type_vocab_size": 2,
    },
)
PAIRS = Recipe(
    task="translate",
    model=original(12, (1, 1), 2, 17),
    train=TRAIN,
    vocab_size=320,
    max_tokens=128,
    max_len=40,
)
DOCUMENTS = [f"Document {n} tells of {n * 7 % 11} cats and their {n % 5} mats." for n in range(40)]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def write_documents(folder: Path, texts: list[str] = DOCUMENTS) -> Path:
    return write(folder / "text.txt", "\n<|endoftext|>\n".join(texts))


def write_pairs(folder: Path, count: int = 50) -> Path:
    lines = [f"the cat {n} sat\tdie Katze {n} saß" for n in range(count)]
    return write(folder / "pairs.tsv", "\n".join(lines) + "\n")


def prepare_quietly(files: Files, recipe: Recipe, folder: Path) -> tuple[Prepared, list[str]]:
    said: list[str] = []
    return prepare(files, recipe, folder, said.append), said


def texts_of(tokens: TokenFile, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(row, skip_special=False) for row in rows_of(tokens)]


def rows_of(tokens: TokenFile) -> list[list[int]]:
    return [tokens.ids[a:b].tolist() for a, b in pairwise(tokens.bounds.tolist())]


# ---- Holding out


def test_what_is_held_out_and_learned_from_is_told(tmp_path: Path) -> None:
    data, pairs = write_documents(tmp_path), write_pairs(tmp_path)
    some = write(tmp_path / "some.tsv", "new\tneu\nthe cat 3 sat\tdie Katze 3 saß\n")
    for files, recipe, told in (
        (Files(data=data, valid=data), LM, "40 of 40 held-out documents are learned from too"),
        (Files(data=pairs, valid=some), PAIRS, "1 of 2 held-out pairs are learned from too"),
    ):
        _, said = prepare_quietly(files, recipe, tmp_path / recipe.task)
        assert sum(line.startswith(told) for line in said) == 1
        _, said = prepare_quietly(Files(data=files.data), recipe, tmp_path / f"{recipe.task} alone")
        assert not any("learned from too" in line for line in said)


def test_the_last_tenth_of_one_document_or_the_last_twentieth_of_many() -> None:
    text = "".join(map(str, range(100)))
    (kept,), (held,) = hold_out_text([text])
    assert kept + held == text and len(held) == 19
    many = [str(n) for n in range(60)]
    assert hold_out_text(many) == (many[:57], many[57:])
    assert hold_out_text(["a", "b"]) == (["a"], ["b"])


def test_the_last_pairs_up_to_2000_of_them() -> None:
    sources, targets = [f"s{n}" for n in range(60)], [f"t{n}" for n in range(60)]
    (kept_s, kept_t), (held_s, held_t) = hold_out_pairs(Sides(sources, targets))
    assert (kept_s, held_s) == (sources[:57], sources[57:])
    assert (kept_t, held_t) == (targets[:57], targets[57:])
    many = ["x"] * 100_000
    assert len(hold_out_pairs(Sides(many, many))[1].sources) == 2000
    with pytest.raises(BadData, match="one pair is left, and one is held out"):
        hold_out_pairs(Sides(["a"], ["b"]))


# ---- Text


def test_texts_become_ids_that_are_the_texts(tmp_path: Path) -> None:
    made, said = prepare_quietly(Files(data=write_documents(tmp_path)), LM, tmp_path / "run")
    task = made.task
    assert isinstance(task, LanguageTask) and task.valid is not None
    ended = [f"{text}<|endoftext|>" for text in DOCUMENTS]
    assert texts_of(task.text.tokens, made.tokenizer) == ended[:38]
    assert texts_of(task.valid.tokens, made.tokenizer) == ended[38:]
    assert "training a vocabulary of 300 tokens" in said
    assert any("tokens in 38 documents" in line for line in said)
    assert (task.text.context, task.text.rows, task.text.seed) == (8, 2, 5)
    assert made.model.config.vocab_size == made.tokenizer.vocab_size
    assert made.model.config.tokens.eos == (made.tokenizer.id("<|endoftext|>"),)
    assert made.model.tokenizer is made.tokenizer


def test_the_weights_come_from_the_seed(tmp_path: Path) -> None:
    files = Files(data=write_documents(tmp_path))
    made, _ = prepare_quietly(files, LM, tmp_path / "run")
    again = Transformer(made.model.config)
    start(again, 5)
    for (name, x), y in zip(made.model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(x, y), name


def test_a_file_that_is_held_out_is_the_held_out_one(tmp_path: Path) -> None:
    valid = write(tmp_path / "valid.txt", "Another text, of which nothing is learned. " * 3)
    files = Files(data=write_documents(tmp_path), valid=valid)
    made, _ = prepare_quietly(files, LM, tmp_path / "run")
    assert isinstance(made.task, LanguageTask) and made.task.valid is not None
    assert len(made.task.text.tokens.bounds) == 41
    (held,) = texts_of(made.task.valid.tokens, made.tokenizer)
    assert held.startswith("Another text") and held.endswith("<|endoftext|>")


def test_one_long_text_is_one_stream_without_ends(tmp_path: Path) -> None:
    text = "to be or not to be, that is the question. " * 20
    recipe = replace(LM, cutting="characters", documents=False)
    made, said = prepare_quietly(
        Files(data=write(tmp_path / "t.txt", text)), recipe, tmp_path / "r"
    )
    assert isinstance(made.task, LanguageTask) and made.task.valid is not None
    both = (*texts_of(made.task.text.tokens, made.tokenizer),)
    both += (*texts_of(made.task.valid.tokens, made.tokenizer),)
    assert "".join(both) == text
    assert not any("asked for" in line for line in said)  # characters are as many as there are


def test_a_character_that_only_the_held_out_part_has_has_an_id(tmp_path: Path) -> None:
    text = "abcdef " * 60 + "猫"
    recipe = replace(LM, cutting="characters")
    made, _ = prepare_quietly(Files(data=write(tmp_path / "t.txt", text)), recipe, tmp_path / "r")
    assert isinstance(made.task, LanguageTask) and made.task.valid is not None
    assert texts_of(made.task.valid.tokens, made.tokenizer)[0].endswith("猫")


def test_a_short_held_out_part_has_a_short_context(tmp_path: Path) -> None:
    valid = write(tmp_path / "valid.txt", "cats")
    files = Files(data=write_documents(tmp_path), valid=valid)
    made, _ = prepare_quietly(files, LM, tmp_path / "run")
    assert isinstance(made.task, LanguageTask) and made.task.valid is not None
    assert 1 <= made.task.valid.context < 8
    assert len(list(made.task.held_out())) > 0


def test_a_small_vocabulary_is_told(tmp_path: Path) -> None:
    recipe = replace(LM, vocab_size=5000)
    _, said = prepare_quietly(Files(data=write_documents(tmp_path)), recipe, tmp_path / "run")
    assert any("not the 5,000 asked for" in line for line in said)


def test_faults_of_the_data_are_told_with_their_count(tmp_path: Path) -> None:
    data = write_documents(tmp_path, [*DOCUMENTS, DOCUMENTS[0], DOCUMENTS[1]])
    _, said = prepare_quietly(Files(data=data), LM, tmp_path / "run")
    assert any(line.startswith("2 documents were there before") for line in said)


@pytest.mark.parametrize("cutting", ["wordpiece", "bpe", "characters"])
def test_gaps_have_berts_tokens_and_texts_lie_between_two_of_them(
    tmp_path: Path, cutting: Any
) -> None:
    files, recipe = Files(data=write_documents(tmp_path)), replace(MASKED, cutting=cutting)
    made, _ = prepare_quietly(files, recipe, tmp_path / "run")
    task, tokenizer = made.task, made.tokenizer
    names = [tokenizer.token(number) for number in range(5)]
    assert names == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    special = tokenizer.special
    assert (special.pad, special.unk, special.cls, special.sep, special.mask) == (0, 1, 2, 3, 4)
    assert isinstance(task, LanguageTask) and task.masked is not None and task.valid is not None
    assert (task.masked.mask_id, set(task.masked.special)) == (4, {0, 1, 2, 3, 4})
    assert task.masked.share == 0.15
    for row in rows_of(task.text.tokens):
        assert (row[0], row[-1]) == (2, 3) and not set(row[1:-1]) & {0, 2, 3, 4}
    for batch in (task.batch(0), *task.held_out()):
        assert (batch["ids"][:, 0] == 2).all() and (batch["ids"][:, -1] == 3).all()
    assert (task.batch(0)["ids"] == 4).any() and not task.text.shifted
    # What the model reads later is framed alike.
    assert tokenizer.encode(DOCUMENTS[0]).ids == rows_of(task.text.tokens)[0]


def test_a_text_of_unknown_words_alone_is_refused(tmp_path: Path) -> None:
    """As of a script without spaces: no token of it could ever be asked for."""
    files = Files(data=write(tmp_path / "text.txt", " ".join(["abcdefgh" * 13] * 200)))
    with pytest.raises(BadData, match=r"^all 180 .* \[UNK\], which .* --set cutting=bpe"):
        prepare_quietly(files, MASKED, tmp_path / "run")
    bytes_ = replace(MASKED, cutting="bpe", vocab_size=320)
    made, _ = prepare_quietly(files, bytes_, tmp_path / "bytes")
    assert (made.task.batch(0)["targets"] != -100).any()


def test_the_share_of_unknown_words_is_told(tmp_path: Path) -> None:
    known = write_documents(tmp_path)
    assert not any(
        "[UNK]" in line for line in prepare_quietly(Files(data=known), MASKED, tmp_path / "1")[1]
    )
    long = " ".join(["abcdefgh" * 13] * 5)
    mixed = write_documents(tmp_path, [f"{each} {long}" for each in DOCUMENTS])
    _, said = prepare_quietly(Files(data=mixed), MASKED, tmp_path / "2")
    (told,) = [line for line in said if "[UNK]" in line]
    assert told.startswith("190 of ") and "--set cutting=bpe" in told


def test_held_out_text_of_unknown_words_alone_is_told(tmp_path: Path) -> None:
    valid = write(tmp_path / "valid.txt", " ".join(["abcdefgh" * 13] * 20))
    _, said = prepare_quietly(
        Files(data=write_documents(tmp_path), valid=valid), MASKED, tmp_path / "run"
    )
    assert any("no token of the held-out text" in line for line in said)


def test_a_masked_model_has_positions_for_its_context_and_no_pooler(tmp_path: Path) -> None:
    files = Files(data=write_documents(tmp_path))
    made, _ = prepare_quietly(files, replace(MASKED, context=11), tmp_path / "run")
    config = made.model.config
    assert (config.max_len, config.tokens.pad, config.head.kind) == (11, 0, "masked")
    assert made.model.pooler is None
    more = {**MASKED.model, "max_position_embeddings": 23}
    made, _ = prepare_quietly(files, replace(MASKED, context=11, model=more), tmp_path / "run")
    assert made.model.config.max_len == 23
    with pytest.raises(ValueError, match="texts have up to 24 tokens, but the model takes 23"):
        prepare_quietly(files, replace(MASKED, context=24, model=more), tmp_path / "run")


def test_a_masked_model_begins_at_the_unigram_loss(tmp_path: Path) -> None:
    made, _ = prepare_quietly(Files(data=write_documents(tmp_path)), MASKED, tmp_path / "run")
    model, task = made.model.eval(), made.task
    assert model.head is not None and task.unigram is not None
    total, n_asked = 0.0, 0
    for batch in task.held_out():
        with torch.no_grad():
            loss = summed_loss(model.head, task.vectors(model, batch), batch["targets"])
        total += float(loss)
        n_asked += int((batch["targets"] != -100).sum())
    assert total / n_asked == pytest.approx(task.unigram, abs=0.3)
    assert task.unigram < math.log(made.tokenizer.vocab_size) - 0.5


def test_a_short_held_out_part_has_gaps_too(tmp_path: Path) -> None:
    valid = write(tmp_path / "valid.txt", "cats")
    files = Files(data=write_documents(tmp_path), valid=valid)
    made, _ = prepare_quietly(files, MASKED, tmp_path / "run")
    (batch,) = made.task.held_out()
    assert (batch["targets"] != -100).any() and made.task.unigram is not None


@pytest.mark.parametrize(
    ("recipe", "model", "said"),
    [
        (LM, MASKED, "'bert' is trained by `regard train mlm`, not by `regard train lm`"),
        (MASKED, LM, "'llama' is trained by `regard train lm`, not by `regard train mlm`"),
        (LM, PAIRS, "'original' is trained by `regard train translate`, not by"),
    ],
    ids=["bert", "llama", "original"],
)
def test_a_model_that_learns_from_other_data_is_refused(
    tmp_path: Path, recipe: Recipe, model: Recipe, said: str
) -> None:
    """An encoder that goes on with a text would see the next token."""
    files = Files(data=write_documents(tmp_path))
    with pytest.raises(ValueError, match=said):
        prepare_quietly(files, replace(recipe, model=model.model), tmp_path / "run")


# ---- Tokenizers


def test_the_runs_own_tokenizer_is_found_again(tmp_path: Path) -> None:
    files = Files(data=write_documents(tmp_path))
    first, _ = prepare_quietly(files, LM, tmp_path / "run")
    second, said = prepare_quietly(files, replace(LM, vocab_size=280), tmp_path / "run")
    assert second.tokenizer.texts == first.tokenizer.texts
    assert not any("training a vocabulary" in line for line in said)
    assert second.task.fingerprint == first.task.fingerprint


def test_a_tokenizer_that_is_given_is_taken(tmp_path: Path) -> None:
    other = Files(data=write(tmp_path / "other.txt", "quite other words, quite other merges " * 9))
    given, _ = prepare_quietly(other, LM, tmp_path / "other")
    given.tokenizer.save(tmp_path / "given")
    files = Files(data=write_documents(tmp_path), tokenizer=tmp_path / "given")
    made, _ = prepare_quietly(files, LM, tmp_path / "run")
    assert made.tokenizer.texts == given.tokenizer.texts
    with pytest.raises(ValueError, match="the tokenizer names no mask token, which filling gaps"):
        prepare_quietly(files, MASKED, tmp_path / "masked")


@pytest.mark.parametrize("count", [1, 40])
def test_a_language_model_reads_a_text_as_it_has_learned_to(tmp_path: Path, count: int) -> None:
    """LLaMA's tokenizer, say, puts a token before every text, and so before every prompt."""
    words = ["<s>", "</s>"]
    bare = train_tokenizer(DOCUMENTS, 300, special=words, bos="<s>", eos="</s>")
    plan = {**json.loads(bare.texts["tokenizer.json"]), "post_processor": surround({"<s>": 0}, {})}
    config = json.loads(bare.texts["tokenizer_config.json"])
    Tokenizer.from_parts(json.dumps(plan), config).save(tmp_path / "given")
    data = write_documents(tmp_path, DOCUMENTS[:count])
    files = Files(data=data, tokenizer=tmp_path / "given")
    made, _ = prepare_quietly(files, LM, tmp_path / "run")
    assert isinstance(made.task, LanguageTask) and made.model.tokenizer is not None
    (first, *_) = rows_of(made.task.text.tokens)
    whole = made.model.tokenizer.encode(DOCUMENTS[0]).ids
    assert whole[0] == 0 and first[:9] == whole[:9], "of one text the end is held out"
    assert count == 1 or first == [*whole, 1]
    assert (made.model.config.tokens.bos, made.model.config.tokens.eos) == (0, (1,))


def test_a_given_tokenizer_frames_texts_with_its_own_tokens(tmp_path: Path) -> None:
    data = write_documents(tmp_path)
    words = ["<s>", "<pad>", "</s>", "<mask>"]
    roles = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "mask": "<mask>"}
    bare = train_tokenizer(DOCUMENTS, 300, special=words, **roles)
    bare.save(tmp_path / "bare")
    with pytest.raises(ValueError, match="puts 0 tokens around a text, not one before it"):
        prepare_quietly(Files(data=data, tokenizer=tmp_path / "bare"), MASKED, tmp_path / "none")
    roberta = train_tokenizer(DOCUMENTS, 300, special=words, **roles, cls="<s>", sep="</s>")
    roberta.save(tmp_path / "given")
    files = Files(data=data, tokenizer=tmp_path / "given")
    made, _ = prepare_quietly(files, MASKED, tmp_path / "run")
    assert isinstance(made.task, LanguageTask) and made.task.masked is not None
    assert made.task.masked.mask_id == 3 and made.model.config.tokens.pad == 1
    assert (made.task.batch(0)["ids"][:, 0] == 0).all()


def test_a_tokenizer_that_was_saved_by_halves_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between its two files would leave one without an end token."""
    files = Files(data=write_documents(tmp_path))
    whole, _ = prepare_quietly(files, LM, tmp_path / "whole")

    def save_half(self: Tokenizer, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(self.texts["tokenizer.json"])
        raise KeyboardInterrupt

    monkeypatch.setattr(Tokenizer, "save", save_half)
    with pytest.raises(KeyboardInterrupt):
        prepare_quietly(files, LM, tmp_path / "run")
    monkeypatch.undo()
    made, _ = prepare_quietly(files, LM, tmp_path / "run")
    assert made.tokenizer.texts == whole.tokenizer.texts
    assert made.task.fingerprint == whole.task.fingerprint


def test_ids_are_used_again_while_the_texts_stay(tmp_path: Path) -> None:
    def stamps() -> dict[str, int]:
        return {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run").glob("*.tokens")}

    files = Files(data=write_documents(tmp_path))
    first, _ = prepare_quietly(files, LM, tmp_path / "run")
    before = stamps()
    assert len(before) == 2
    prepare_quietly(files, LM, tmp_path / "run")
    assert stamps() == before
    changed = [DOCUMENTS[0] + " And more.", *DOCUMENTS[1:]]
    second, _ = prepare_quietly(
        Files(data=write_documents(tmp_path, changed)), LM, tmp_path / "run"
    )
    after = stamps()
    assert after["train.tokens"] != before["train.tokens"]
    assert after["valid.tokens"] == before["valid.tokens"]
    assert second.task.fingerprint != first.task.fingerprint


# ---- Models of named sizes


@pytest.mark.parametrize(
    ("kind", "size", "words"),
    [
        (LM, "opt-125m", "hidden_size=12 ffn_dim=17 num_hidden_layers=1"),
        (LM, "bloom-560m", "hidden_size=16 n_layer=1 n_head=2"),
        (MASKED, "roberta-base", "hidden_size=12 intermediate_size=17 num_hidden_layers=1"),
        (PAIRS, "bart-large-cnn", "d_model=16 encoder_layers=1 decoder_layers=1"),
        (PAIRS, "opus-mt-en-de", "d_model=16 encoder_layers=1 decoder_layers=1"),
        (PAIRS, "t5-small", "d_model=12 d_ff=17 num_layers=1"),
    ],
)
def test_no_token_of_a_sizes_own_vocabulary_is_left(
    tmp_path: Path, kind: Recipe, size: str, words: str
) -> None:
    recipe = sized(kind, size)
    small: dict[str, Any] = {name: int(x) for name, x in (w.split("=") for w in words.split())}
    data = write_pairs(tmp_path) if kind is PAIRS else write_documents(tmp_path)
    recipe = replace(recipe, model={**recipe.model, **small})
    made, _ = prepare_quietly(Files(data=data), recipe, tmp_path / "run")
    special, tokens = made.tokenizer.special, made.model.config.tokens
    assert tokens.pad == special.pad and (tokens.bos, *tokens.eos) == (
        (None,) if kind is MASKED else (special.bos or special.eos, special.eos)
    )
    assert tokens.forced_bos is None and tokens.forced_eos is None and not tokens.suppressed
    assert tokens.decoder_start == (special.bos if kind is PAIRS else None)
    named = {n: x for n, x in made.model.config.source.items() if n.endswith("_token_id")}
    assert set(named.values()) <= {None, *special.all}
    assert made.model.config.source.get("bad_words_ids") is None


# ---- Pairs


def test_pairs_become_ids_that_are_the_pairs(tmp_path: Path) -> None:
    made, said = prepare_quietly(Files(data=write_pairs(tmp_path)), PAIRS, tmp_path / "run")
    task = made.task
    assert isinstance(task, TranslationTask) and task.valid is not None
    sources = texts_of(task.pairs.sources, made.tokenizer)
    targets = texts_of(task.pairs.targets, made.tokenizer)
    assert sources == [f"the cat {n} sat" for n in range(48)]
    assert targets == [f"die Katze {n} saß" for n in range(48)]
    assert texts_of(task.valid.targets, made.tokenizer) == [f"die Katze {n} saß" for n in (48, 49)]
    assert any(line.startswith("48 pairs, ") for line in said)
    tokens = made.model.config.tokens
    ids = {t: made.tokenizer.id(t) for t in ("<pad>", "<s>", "<|endoftext|>")}
    assert (tokens.pad, tokens.bos, tokens.eos) == (
        ids["<pad>"],
        ids["<s>"],
        (ids["<|endoftext|>"],),
    )
    assert tokens.decoder_start == ids["<s>"] == task.pairs.bos


@pytest.mark.parametrize("both_ways", [False, True])
def test_a_translator_reads_a_text_as_it_has_learned_to(tmp_path: Path, both_ways: bool) -> None:
    files = Files(data=write_pairs(tmp_path), languages=("en", "de"))
    recipe = replace(PAIRS, both_ways=both_ways)
    made, _ = prepare_quietly(files, recipe, tmp_path / "run")
    assert isinstance(made.task, TranslationTask)
    reader, said = Reader(made.model, split=False), {}
    for batch in made.task.pairs.in_order():
        for number, row, real in zip(batch.rows, batch.source, batch.source_real, strict=True):
            said[number] = row[real].tolist()
    to = "de" if both_ways else None
    assert all(said[n] == reader.encode(f"the cat {n} sat", to) for n in range(48))
    assert said[0][-1] == made.tokenizer.special.eos
    # Others, such as transformers, read with the tokenizer alone.
    assert made.model.tokenizer is not None
    alone = [*made.tokenizer.encode("the cat").ids, said[0][-1]]
    assert both_ways or made.model.tokenizer.encode("the cat").ids == alone


def test_two_files_of_lines_are_pairs_too(tmp_path: Path) -> None:
    one = write(tmp_path / "a.en", "".join(f"cat {n}\n" for n in range(30)))
    other = write(tmp_path / "a.de", "".join(f"Katze {n}\n" for n in range(30)))
    files = Files(data=one, target=other, valid=one, valid_target=other)
    made, _ = prepare_quietly(files, PAIRS, tmp_path / "run")
    assert isinstance(made.task, TranslationTask) and made.task.valid is not None
    assert made.task.pairs.n_pairs == made.task.valid.n_pairs == 30


def test_long_pairs_are_left_out_with_a_word(tmp_path: Path) -> None:
    data = write_pairs(tmp_path)
    data.write_text("a " * 60 + "\tb\n" + data.read_text(encoding="utf-8"), encoding="utf-8")
    _, said = prepare_quietly(Files(data=data), PAIRS, tmp_path / "run")
    assert any("1 pair was longer than 40 tokens and left out" in line for line in said)


def test_both_ways_are_learned_each_named_in_front(tmp_path: Path) -> None:
    recipe = replace(PAIRS, both_ways=True)
    files = Files(data=write_pairs(tmp_path), languages=("en", "de"))
    made, _ = prepare_quietly(files, recipe, tmp_path / "run")
    task, tokenizer = made.task, made.tokenizer
    assert isinstance(task, TranslationTask)
    sources, targets = rows_of(task.pairs.sources), rows_of(task.pairs.targets)
    assert len(sources) == len(targets) == 96
    to_de, to_en = tokenizer.id("<2de>"), tokenizer.id("<2en>")
    assert {row[0] for row in sources[:48]} == {to_de}
    assert {row[0] for row in sources[48:]} == {to_en}
    assert tokenizer.decode(sources[3][1:]) == "the cat 3 sat" == tokenizer.decode(targets[51])
    assert tokenizer.decode(targets[3]) == "die Katze 3 saß" == tokenizer.decode(sources[51][1:])
    told = made.model.config.source["directions"]
    assert told == {"de": {"prefix": "<2de>"}, "en": {"prefix": "<2en>"}}
    again, _ = prepare_quietly(files, recipe, tmp_path / "run")
    assert again.task.fingerprint == task.fingerprint


def test_files_are_json_that_others_read(tmp_path: Path) -> None:
    made, _ = prepare_quietly(Files(data=write_documents(tmp_path)), LM, tmp_path / "run")
    told: dict[str, Any] = json.loads((tmp_path / "run/tokenizer/tokenizer.json").read_text())
    assert len(told["model"]["vocab"]) <= made.tokenizer.vocab_size
