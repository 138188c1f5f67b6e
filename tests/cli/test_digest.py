"""The digest: how it counts, what it warns of, and what it costs."""

import io
import time

import pytest
import torch
from lens_words import Hand
from rich.console import Console
from torch import nn
from view_fakes import translator

import regard
from regard._look import see_translation
from regard.cli.digest import write_digest
from regard.lens.record import Record
from regard.lens.watch import watch
from regard.lens.word_links import MOST_WORDS, words_of
from regard.ops import Causal, attention


def digest_of(record: Record, word: str | None = None) -> str:
    page = io.StringIO()
    write_digest(record, Console(file=page), word)
    return page.getvalue()


def describe(record: Record, words: list[str]) -> Record:
    spans, at = [], 0
    for word in words:
        spans.append((at, at + len(word)))
        at += len(word) + 1
    return record.describe(text=" ".join(words), tokens=words, spans=spans)


def test_one_of_a_kind_is_not_plural() -> None:
    model = nn.Sequential(Hand(torch.zeros(1, 1, 1)))
    with watch(model, keep="qk") as record:
        model(torch.zeros(1))
    first = digest_of(describe(record, ["one"])).splitlines()[0]
    assert first == "Sequential: 1 token, 1 attention layer, 1 head"


def test_a_text_longer_than_the_model_was_trained_on_is_told() -> None:
    short, long = (regard.look("hello " * n, "embedded:lm") for n in (100, 260))
    assert "trained" not in digest_of(short)
    second = digest_of(long).splitlines()[1]
    assert (
        second.startswith(f"The text has {len(long.tokens):,} tokens") and "at most 512" in second
    )


def test_what_was_left_out_is_told_with_its_reason() -> None:
    model = nn.Sequential(Hand(torch.zeros(1, 1, 1)))
    with watch(model, keep="qk") as record:
        model(torch.zeros(1))
    record.notes.append("1 could not be recorded (ValueError: why); the model ran as without")
    assert digest_of(describe(record, ["one"])).splitlines()[1] == record.notes[0]


def test_what_came_after_the_same_token_is_said_from_how_many() -> None:
    digest = digest_of(regard.look("red dogs saw blue cats and " * 6, "embedded:lm"))
    [line] = [line for line in digest.splitlines() if "came after" in line]
    assert line.endswith("tokens)") and "(seen at 3" in line
    once = regard.look("The dog saw another red dog today", "embedded:lm")
    assert "came after" not in digest_of(once)


def test_heads_of_an_encoder_and_a_decoder_are_told_apart() -> None:
    digest = digest_of(translator())  # type: ignore[arg-type]
    heads = digest.split("weight there)\n")[1].split("\n\n")[0]
    assert {"encoder", "decoder"} <= set(heads.split())
    assert "in the firmest head, cross " in digest


def test_a_short_translation_of_a_long_text_is_told_by_one_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("regard.lens.findings.MOST_WORDS", 5)
    model = regard.load("embedded:translate")
    record = see_translation(model, "m", "The cat sat on the mat today.", "猫が座", None)
    own, source = words_of(record)
    assert len(own) <= 5 < len(source)
    digest = digest_of(record)
    assert '" looks at' in digest and "→" not in digest


class Layers(nn.Module):
    """30 layers of 9 heads over 3 key heads, as SmolLM2's, of random queries and keys."""

    def __init__(self, n_layers: int, T: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(T) for _ in range(n_layers))

    def forward(self) -> None:
        for layer in self.layers:
            layer()


class Layer(nn.Module):
    def __init__(self, T: int) -> None:
        super().__init__()
        self.T = T

    def forward(self) -> None:
        q, k = torch.randn(1, 9, self.T, 64), torch.randn(1, 3, self.T, 64)
        attention(q, k, k, mask=Causal())


@pytest.mark.parametrize("n_words", [MOST_WORDS, MOST_WORDS + 1])
def test_a_digest_is_cheap(n_words: int) -> None:
    """Of 54 heads and 400 words; what is bounded here is a tenth of what it took before."""
    torch.manual_seed(5)
    model = Layers(6, n_words)
    with watch(model, keep="qk") as record:
        model()
    describe(record, [f"w{n}" if n != 51 else "it" for n in range(n_words)])
    before = time.thread_time()
    digest = digest_of(record)
    assert time.thread_time() - before < 3.0
    assert ("most telling" in digest) == (n_words <= MOST_WORDS) and "is looked at by" in digest
