"""A survey is the mean over all texts: however they are dealt out, and wherever it was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import survey_runs
import torch
from survey_runs import BLOCK, make_reader, make_texts, run

from regard.lens import survey
from regard.lens.batch_scores import score_batch
from regard.lens.head_table import HeadTable

PROGRAM = Path(survey_runs.__file__)


@pytest.fixture(autouse=True)
def every_round(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And one thread, as the programs have: two would add up in other parts, to other last bits."""
    monkeypatch.setattr(survey, "EVERY_S", 0.0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_same(one: HeadTable, other: HeadTable) -> None:
    for name in ("count", "mean", "squares"):
        assert np.array_equal(getattr(one.moments, name), getattr(other.moments, name)), name
    for name in ("heads", "n_texts", "n_empty", "n_truncated"):
        assert getattr(one, name) == getattr(other, name), name


def test_the_means_are_those_of_each_text_read_alone() -> None:
    texts, reader = make_texts(60), make_reader()
    each = []
    for text in texts:
        tokens = reader.encode(text)
        if tokens.ids:
            ids = torch.tensor([tokens.ids])
            found = score_batch(reader.module, reader.run, ids, [tokens.labels], [tokens.words])
            each.append(np.concatenate([scores[0] for scores in found.values()]))
    values = np.stack(each)
    table = run(texts)
    assert np.array_equal(table.counts, (~np.isnan(values)).sum(0))
    assert 0 < table.counts.min() < table.counts.max() == len(values)  # no sign, no words
    np.testing.assert_allclose(table.means, np.nanmean(values, 0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(table.stds, np.nanstd(values, 0, ddof=1), rtol=1e-4, atol=1e-6)
    assert (table.n_texts, table.n_empty, table.n_truncated) == (60, 2, 2)


def test_a_limit_and_a_stream_read_no_more_than_they_must() -> None:
    texts = make_texts(100)
    drawn = iter(texts)
    chosen = survey.Plan(block=BLOCK, batch=5, limit=37)
    assert_same(survey.survey_texts(make_reader(), drawn, chosen), run(texts[:37]))
    assert next(drawn) == texts[37]


class Text(str):
    """A text of which it can be known whether anyone still holds it."""


def test_texts_are_let_go_block_by_block() -> None:
    held: list[weakref.ref[Text]] = []
    most = 0

    def stream() -> Iterator[str]:
        nonlocal most
        for text in make_texts(12 * BLOCK):
            own = Text(text)
            held.append(weakref.ref(own))
            most = max(most, sum(each() is not None for each in held))
            yield own

    table = survey.survey_texts(make_reader(), stream(), survey.Plan(block=BLOCK, batch=5))
    assert table.n_texts == 12 * BLOCK and BLOCK <= most <= 2 * BLOCK + 1


def test_a_survey_that_was_killed_goes_on_to_the_same_result(tmp_path: Path) -> None:
    state = tmp_path / "state"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(PROGRAM), str(tmp_path / "heads.csv"), "300", "0.03"]
    with subprocess.Popen(command, env=environment) as process:
        while not state.exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.2)  # anywhere in a later block
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    texts = make_texts(300)
    with pytest.raises(ValueError, match=r"a survey that was stopped: resume it .*--resume"):
        run(texts, state=state)
    reported: list[int] = []
    plan = survey.Plan(block=BLOCK, batch=5, state=state, resume=True)
    resumed = survey.survey_texts(make_reader(), texts, plan, reported.append)
    assert min(reported) > BLOCK and max(reported) > 250  # some blocks were not read again
    assert_same(resumed, run(texts))


def test_another_model_or_other_texts_are_refused_in_words(tmp_path: Path) -> None:
    state, texts = tmp_path / "state", make_texts(3 * BLOCK + 5)
    run(texts, state=state)
    other = make_reader()
    with torch.no_grad():
        next(other.module.parameters()).mul_(1.001)
    plan = survey.Plan(block=BLOCK, batch=5, state=state, resume=True)
    with pytest.raises(ValueError, match="'tiny', and this is one of the same name with other w"):
        survey.survey_texts(other, texts, plan)
    with pytest.raises(ValueError, match="with the model 'tiny', and this is 'other'"):
        survey.survey_texts(make_reader("other"), texts, plan)
    with pytest.raises(ValueError, match="its first 48 texts are not the first of these texts"):
        run([*texts[:5], "changed", *texts[6:]], state=state, resume=True)
    with pytest.raises(ValueError, match="its block is 16, and here it is 8"):
        run(texts, state=state, resume=True, block=8)
    longer = [*texts, *make_texts(20)]
    assert_same(run(longer, state=state, resume=True), run(longer))


def test_texts_without_a_word_and_plans_without_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to survey: 3 texts, 3 of them empty"):
        run(["", "", ""])
    with pytest.raises(TypeError, match="texts is one str; expected several"):
        survey.survey_texts(make_reader(), "abc", survey.Plan())
    with pytest.raises(TypeError, match="a text is a int; expected str"):
        survey.survey_texts(make_reader(), [3], survey.Plan())  # type: ignore[list-item]
    with pytest.raises(ValueError, match="batch"):
        survey.Plan(batch=0)


@pytest.mark.slow
def test_four_processes_find_what_one_finds(tmp_path: Path) -> None:
    """The last round has fewer blocks than there are processes."""
    n_texts = 6 * BLOCK + 5
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    for n_processes in (1, 4):
        out = tmp_path / f"{n_processes}" / "heads.csv"
        out.parent.mkdir()
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command = [sys.executable, *launch, str(n_processes), str(PROGRAM)]
        subprocess.run([*command, str(out), str(n_texts), "0"], env=environment, check=True)
    tables = [(tmp_path / name / "heads.csv").read_bytes() for name in ("1", "4")]
    assert tables[0] == tables[1]
