"""Long texts read in windows: each row as its own window has it, and what is summed over rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import make_model
from torch import nn

import regard
from regard import ALiBi, Causal
from regard._look import Said, Subject, see
from regard.lens.record import Record
from regard.lens.schema import SPOTS
from regard.lens.windows import plan_windows

N = 47  # tokens of the text, without special ones
CLOSE = 1e-5  # scores reach 50, and are rounded in float32 at other places in two formulas


class Slopes(nn.Module):
    """One layer of attention with ALiBi; looks both ways, or back."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.causal, self.words, self.qk = causal, nn.Embedding(37, 12), nn.Linear(12, 24)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        q, k = (
            x.unflatten(2, (3, 4)).transpose(1, 2) for x in self.qk(self.words(ids)).chunk(2, 2)
        )
        return regard.attention(q, k, k, mask=Causal() if self.causal else None, bias=ALiBi(3))


def make_subject(name: str) -> tuple[Subject, tuple[int, int]]:
    """A model, and how many special tokens stand before and after a text of it."""
    most, ends = {"bert": (13, (1, 1)), "gpt2": (13, (0, 0)), "gemma2": (11, (1, 0))}.get(
        name, (9, (1, 1))
    )
    slopes = name in ("slopes", "slopes back")
    model: Any = Slopes(name == "slopes back") if slopes else make_model(name)
    run = model if slopes else model.run
    return Subject(name, model, most, None, None, lambda text: say(ends), run), ends


def say(ends: tuple[int, int]) -> Said:
    drawn = torch.randint(5, 37, (N,), generator=torch.Generator().manual_seed(5)).tolist()
    text = [(2 * at, 2 * at + 1) for at in range(N)]
    ids = [1] * ends[0] + drawn + [2] * ends[1]
    labels = ["[CLS]"] * ends[0] + [f"w{at}" for at in range(N)] + ["[SEP]"] * ends[1]
    return Said(ids, labels, [(0, 0)] * ends[0] + text + [(0, 0)] * ends[1])


def weights_of(record: Record, place: int, head: int) -> np.ndarray:
    n = len(record.tokens)
    return record.map(place, head, (0, n, 0, n), (n, n))


NAMES = ("bert", "gpt2", "gemma2", "slopes", "slopes back")


@pytest.fixture(scope="module", params=NAMES)
def seen(request: pytest.FixtureRequest) -> tuple[str, Record]:
    subject, _ = make_subject(request.param)
    return request.param, see(subject, "x " * N, fit="window")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("most", [2, 3, 7, 10])
def test_windows_cover_a_text_and_every_row_is_taken_once(most: int, causal: bool) -> None:
    for n in range(1, 60):
        windows = plan_windows(n, most, causal)
        assert all(w.last - w.first <= most for w in windows)
        owned = [token for w in windows for token in range(w.own_first, w.own_last)]
        assert owned == list(range(n))
        assert all(w.first <= w.own_first < w.own_last <= w.last for w in windows)
        read = np.bincount([token for w in windows for token in range(w.first, w.last)])
        assert read.min() >= 1 and read.max() <= 2
        if n > most:  # every row has context on the side it looks to: a quarter or half a window
            least = most // 2 if causal else (most // 2) // 2
            assert all(w.own_first - w.first >= least for w in windows[1:])


def test_every_row_is_that_of_its_window(seen: tuple[str, Record]) -> None:
    """Read again window by window, here by hand, and compared by the tokens' names."""
    name, record = seen
    subject, ends = make_subject(name)
    said = say(ends)
    causal = record.places[0].causal
    checked = 0
    for window in plan_windows(N, subject.max_len - sum(ends), causal):
        inside = range(ends[0] + window.first, ends[0] + window.last)
        part = said.part([*range(ends[0]), *inside, *range(ends[0] + N, len(said.ids))])
        with torch.no_grad(), regard.watch(subject.module, keep="qk") as alone:
            subject.run(torch.tensor([part.ids]))
        own = [record.tokens.index(f"w{at}") for at in range(window.own_first, window.own_last)]
        rows = [part.labels.index(f"w{at}") for at in range(window.own_first, window.own_last)]
        columns = [record.tokens.index(label) if label[0] == "w" else None for label in part.labels]
        if ends[0]:
            columns[0] = own[0] - 1
        if ends[1]:
            columns[-1] = own[-1] + 1
        for place in range(len(record.places)):
            for head in range(record.places[place].n_heads):
                got = weights_of(record, place, head)[own]
                want = np.zeros_like(got)
                size = len(part.ids)
                want[:, columns] = alone.map(place, head, (0, size, 0, size), (size, size))[rows]
                np.testing.assert_allclose(got, want, rtol=0, atol=CLOSE)
                checked += 1
    assert checked > len(record.places)


def test_statistics_are_those_of_the_weights(seen: tuple[str, Record]) -> None:
    _, record = seen
    n = len(record.tokens)
    for place in range(len(record.places)):
        told = record.statistics(place)
        for head in range(record.places[place].n_heads):
            weights = weights_of(record, place, head).astype(np.float64)
            np.testing.assert_allclose(
                told["received"][head], weights.sum(0), atol=len(weights) * CLOSE
            )
            np.testing.assert_array_equal(weights.sum(0) > 0, told["seen_by"][head] > 0)
            entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(1)
            np.testing.assert_allclose(told["entropy"][head], entropy, atol=5 * CLOSE)
            peak = weights[np.arange(n), told["peak_key"][head]]
            np.testing.assert_allclose(peak, weights.max(1), atol=CLOSE)
            top = np.take_along_axis(weights, np.maximum(told["top_keys"][head], 0), 1)
            np.testing.assert_allclose(
                np.where(told["top_keys"][head] < 0, 0, top), told["top_weights"][head], atol=CLOSE
            )
        np.testing.assert_array_equal(
            record.visible(place), [(weights_of(record, place, 0)[t] > 0).sum() for t in range(n)]
        )


def test_scores_of_heads_are_means_over_all_rows() -> None:
    """Of a model without special tokens, whose tokens stand beside each other in the record."""
    record = see(make_subject("gpt2")[0], "x " * N, fit="window")
    own, scores = np.arange(N), record.heads()
    for place in range(len(record.places)):
        for head in range(record.places[place].n_heads):
            weights = weights_of(record, place, head)
            want = {"same": weights[own, own].mean(), "previous": weights[own[1:], own[:-1]].mean()}
            for name, value in want.items():
                assert scores[name][place, head] == pytest.approx(value, abs=CLOSE)


def test_the_first_token_is_that_of_the_window() -> None:
    subject, _ = make_subject("bert")
    record = see(subject, "x " * N, fit="window")
    marks = [at for at, label in enumerate(record.tokens) if label == "[CLS]"]
    assert len(marks) == len(plan_windows(N, 11, causal=False)) > 2
    for place in range(len(record.places)):
        for head in range(record.places[place].n_heads):
            weights = weights_of(record, place, head)
            others = [at for at in range(len(record.tokens)) if at not in marks]
            assert record.heads()["first"][place, head] == pytest.approx(
                weights[np.ix_(others, marks)].sum(1).mean(), abs=CLOSE
            )
    counts = record.counts()
    assert counts["same"][0, 0] == len(record.tokens)
    assert set(counts) == set(SPOTS)


def test_a_saved_record_of_windows_opens_as_it_was(tmp_path: Path) -> None:
    subject, _ = make_subject("bert")
    record = see(subject, "x " * N, fit="window")
    record.save(tmp_path / "w.regard")
    again = Record.open(tmp_path / "w.regard").check()
    assert again.window == 13 and again.tokens == record.tokens and again.spans == record.spans
    np.testing.assert_array_equal(weights_of(again, 1, 2), weights_of(record, 1, 2))


def test_a_text_that_fits_is_read_as_it_is() -> None:
    record = regard.look("The cat sat on the mat.", window=True)
    assert record.window is None
    np.testing.assert_array_equal(
        record.map(3, 2), regard.look("The cat sat on the mat.").map(3, 2)
    )


def test_what_cannot_be_read_in_windows_is_refused() -> None:
    text = "The cat sat on the mat and saw the dog. " * 60
    with pytest.raises(ValueError, match="give one"):
        regard.look(text, truncate=True, window=True)
    with pytest.raises(ValueError, match=r"window cannot be used with .*, an encoder–decoder"):
        regard.look(text, "embedded:translate", window=True)
    with pytest.raises(ValueError, match="values cannot be kept in windows"):
        regard.look(text, window=True, values=True)
    subject, _ = make_subject("gpt2")
    model = subject.module
    blind = Subject(
        "m", model, 13, None, None, lambda _: Said([5] * 20, ["x"] * 20, None), model.run
    )
    with pytest.raises(ValueError, match="does not say which characters"):
        see(blind, "x", fit="window")
    short = Subject("m", model, 3, None, None, lambda _: say((1, 1)), model.run)
    with pytest.raises(ValueError, match="too few"):
        see(short, "x", fit="window")
