"""`score` against the log-softmax of whole logits, one text at a time, and against transformers."""

import math
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import make_model
from transformers import AutoModelForCausalLM

import regard
from regard import Transformer
from regard.generation import Score

TEXTS = [
    "The cat sat on the mat.",
    "naïve café 猫 🙂",
    "A",
    "He went to the house of the king, and the king was glad. " * 3,
    ("The capital of France is", " Paris, as everyone knows."),
    ("", "It was"),
    ("Once upon a time ", "there was a dog."),
    ("The ani", "mal"),
]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return regard.load("embedded:lm")


def by_hand(model: Transformer, context: str, text: str) -> tuple[float, int, bool]:
    """In float64 from the logits of this text alone, token after token."""
    assert model.tokenizer is not None
    said = model.tokenizer.encode(context + text)
    bos = model.config.tokens.bos
    ids, offsets = list(said.ids), list(said.offsets)
    if not context and bos is not None and ids[0] != bos:
        ids, offsets = [bos, *ids], [(0, 0), *offsets]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    total, count, greedy = 0.0, 0, True
    for at in range(1, len(ids)):
        if offsets[at][1] > max(len(context), offsets[at][0]):
            row = logits[at - 1]
            total += float(row[ids[at]] - torch.logsumexp(row, 0))
            count += 1
            greedy = greedy and int(row.argmax()) == ids[at]
    return total, count, greedy


@pytest.mark.parametrize("batch_tokens", [1, 40, 4096])
def test_scores_are_those_of_whole_logits_alone_and_in_batches(
    model: Transformer, batch_tokens: int
) -> None:
    found = regard.score(model, TEXTS, batch_tokens=batch_tokens)
    for given, got in zip(TEXTS, found, strict=True):
        context, text = given if isinstance(given, tuple) else ("", given)
        total, count, greedy = by_hand(model, context, text)
        # Each log-probability is rounded in float32, from logits of some tens.
        assert got.log_prob == pytest.approx(total, abs=count * 1e-4)
        assert (got.n_tokens, got.n_bytes, got.greedy) == (count, len(text.encode()), greedy)


def test_a_greedy_continuation_is_called_so(model: Transformer) -> None:
    start = "The king went to the"
    more = regard.generate(model, start, max_new_tokens=3)
    assert regard.score(model, [(start, more)])[0].greedy
    assert not regard.score(model, [(start, " zzz")])[0].greedy


def test_the_parts_of_a_text_add_up_to_it(model: Transformer) -> None:
    """After one context, and where a token ends at the cut."""
    pairs = [("The king", " was old."), ("The king", " was"), ("The king was", " old.")]
    whole, first, rest = regard.score(model, pairs)
    assert whole.log_prob == pytest.approx(first.log_prob + rest.log_prob, abs=1e-3)
    assert whole.n_tokens == first.n_tokens + rest.n_tokens


def test_means_and_perplexity_follow_from_the_sum() -> None:
    told = Score(-6.0, 3, 12, False)
    assert (told.per_token, told.per_byte) == (-2.0, -0.5)
    assert told.perplexity == pytest.approx(math.exp(2))


def test_answers_of_a_real_layout_score_as_in_transformers(tmp_path: Path) -> None:
    """As tasks of two answers are scored with transformers by hand: one text at a time."""
    ours = make_model("llama", vocab_size=8192, max_position_embeddings=512)
    regard.save(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokenizer = regard.load("embedded:lm").tokenizer
    assert tokenizer is not None
    pairs = [
        ("To open a jar,", " turn the lid."),
        ("To open a jar,", " hit it with a spoon until it sings."),
        ("To keep bread soft", ", put it into a bag."),
    ]
    found = regard.score(ours, pairs, tokenizer=tokenizer)
    for (goal, answer), got in zip(pairs, found, strict=True):
        ids = tokenizer.encode(goal + answer).ids
        n = len(tokenizer.encode(goal).ids)
        with torch.no_grad():
            logs = theirs(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        want = sum(float(logs[at - 1, ids[at]]) for at in range(n, len(ids)))
        assert got.n_tokens == len(ids) - n
        assert got.log_prob == pytest.approx(want, abs=got.n_tokens * 1e-4)


def test_what_cannot_be_scored_is_refused_in_words(model: Transformer) -> None:
    with pytest.raises(TypeError, match="expected a list"):
        regard.score(model, "one text")
    with pytest.raises(TypeError, match="text 1 is"):
        regard.score(model, ["a text", ["not", "a", "pair"]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="text 0 is empty"):
        regard.score(model, [("context", "")])
    with pytest.raises(ValueError, match="batch_tokens is 0"):
        regard.score(model, ["a"], batch_tokens=0)
    with pytest.raises(ValueError, match="language models"):
        regard.score("embedded:translate", ["a text"])
    with pytest.raises(TypeError, match="expected a regard Transformer"):
        regard.score(torch.nn.Linear(2, 3), ["a"])  # type: ignore[arg-type]
    assert regard.score(model, []) == []


def test_models_are_taken_by_name_wherever_they_are_asked() -> None:
    model = regard.load("embedded:lm")
    asked = {"max_new_tokens": 4}
    want = regard.generate(model, "The king", **asked)
    assert regard.generate("embedded:lm", "The king", **asked) == want
    assert regard.generate_batch("embedded:lm", ["The king"], **asked) == [want]
    assert "".join(regard.stream("embedded:lm", "The king", **asked)) == want
    ids = regard.generate_ids("embedded:lm", [[5, 6]], **asked).rows()
    assert ids == regard.generate_ids(model, [[5, 6]], **asked).rows()
    text = "The cat sat on the mat."
    there = regard.load("embedded:translate")
    assert regard.translate("embedded:translate", text) == regard.translate(there, text)
