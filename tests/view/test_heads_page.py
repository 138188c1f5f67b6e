"""The page of a survey as a file: every number in it, escaped, with nothing from elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import view_fakes

from regard.lens.head_names import SCORE_WORDS
from regard.lens.head_table import SURVEYED
from regard.view import heads_page, make_heads, write_heads
from regard.view.queries import BadView


def data_of(page: str) -> Any:
    found = re.search(r'id="regard-data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found.group(1))


def test_a_page_holds_every_number_and_null_where_there_is_none() -> None:
    table = view_fakes.surveyed(layers=3, n_heads=5)
    told = data_of(make_heads(table))
    assert told["scores"] == list(SURVEYED) and set(told["words"]) == set(SURVEYED)
    assert set(SURVEYED) <= set(SCORE_WORDS)
    assert (told["texts"], told["empty"], told["truncated"]) == (12, 1, 2)
    assert [(head["layer"], head["head"]) for head in told["heads"]] == [
        (str(layer), head) for layer in range(3) for head in range(5)
    ]
    for name, values in (("mean", table.means), ("std", table.stds), ("texts", table.counts)):
        shown = np.array([head[name] for head in told["heads"]], np.float64)
        np.testing.assert_allclose(shown, values, rtol=1e-6)
    assert told["heads"][1]["mean"][3] is None


def test_names_are_escaped_and_the_file_is_whole(tmp_path: Path) -> None:
    table = view_fakes.surveyed(model="</script><b>\ud800 \u2028")
    path = write_heads(tmp_path / "heads.html", table)
    page = path.read_text()
    assert page.count("</script>") == 2 and "<b>" not in page
    assert list(tmp_path.iterdir()) == [path]
    table.html(tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == page


def test_more_heads_than_a_page_shows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads_page, "MOST_HEADS", 9)
    with pytest.raises(BadView, match="has 10 heads; a page shows 9"):
        make_heads(view_fakes.surveyed(layers=2, n_heads=5))


def test_a_table_opens_and_becomes_a_page_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "heads.regard"
    view_fakes.surveyed().save(path)
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import regard\nfrom regard.lens.head_table import HeadTable\n"
        f"HeadTable.open({str(path)!r}).html({str(tmp_path / 'x.html')!r})"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert (tmp_path / "x.html").stat().st_size > 100_000
