"""The static page as a file: its budget, its policy, and that it needs no torch."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import view_fakes

from regard.lens.findings import find_sections
from regard.view import BadView, make_page, write_page
from regard.view.assets import inline_json
from regard.view.page import _most_telling, make_data
from regard.view.queries import answer

ROOT = Path(__file__).resolve().parents[2]


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="regard-data">(.*?)</script>', page)
    assert found
    return json.loads(found.group(1))


def unpack(text: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f4")


def unfold(text: str, width: int) -> np.ndarray:
    """A rounded part as rows of such a width, by what packing.py says of it."""
    if ":" not in text:
        return unpack(text).reshape(-1, width)
    levels, packed = text.split(":")
    data = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8)
    upper, lower = data.reshape(2, width, -1).astype(np.uint16)
    codes = (upper << 8 | lower).T
    if levels == "0":
        return np.ascontiguousarray(codes).view(np.float16).astype(np.float32)
    return codes / np.float32(levels)


def test_a_small_record_travels_whole_and_exact() -> None:
    record = view_fakes.decoder(layers=2, n_heads=3)
    parts = data_of(make_page(record))["parts"]
    for place in range(2):
        for head in range(3):
            whole = unpack(parts[f"whole/0/{place}/{head}"]).reshape(12, 12)
            np.testing.assert_array_equal(whole, record.weights(place, head, 0, 12))
            received = unpack(parts[f"received/0/{place}/{head}"])
            np.testing.assert_allclose(received, whole.sum(0), rtol=1e-6)


@pytest.mark.parametrize("budget", [16_000, 24_000, 120_000])
def test_the_budget_holds_and_the_most_telling_heads_come_first(budget: int) -> None:
    record = view_fakes.decoder([f"w{i}" for i in range(67)], layers=2, n_heads=4)
    page = make_page(record, budget=budget)
    bare = len(make_page(record, budget=8_000))
    parts = data_of(page)["parts"]
    inlined = sum(len(name) + len(text) for name, text in parts.items())
    assert inlined <= budget
    assert len(page) - bare <= budget
    wholes = [name for name in parts if name.startswith("whole/")]
    assert (0 < len(wholes) < 8) == (budget == 16_000)
    links = [line for section in find_sections(record)[1:] for line in section.lines]
    named = {f"whole/0/{place}/{head}" for line in links for place, head, _ in line.heads}
    assert not wholes or len(named & set(wholes)) == min(len(named), len(wholes))


def test_heads_that_rest_on_the_first_token_are_kept_whole_last() -> None:
    """Where nothing links words, those that look at the token before come before sinks."""
    record = view_fakes.decoder([f"w{i}" for i in range(67)], layers=1, n_heads=2)
    scores = {name: np.zeros((1, 2)) for name in record.heads()}
    scores["first"][0, 0], scores["previous"][0, 1] = 0.95, 0.3
    record.heads = lambda: scores  # type: ignore[method-assign]
    assert _most_telling([record], [[]])[0] == (0, 0, 1)  # type: ignore[list-item]


def test_what_did_not_fit_into_a_file_is_told(tmp_path: Path) -> None:
    record = view_fakes.decoder([f"w{i}" for i in range(67)], layers=2, n_heads=4)
    told: list[str] = []
    write_page(tmp_path / "all.html", record, tell=told.append)
    assert told == []
    write_page(tmp_path / "some.html", record, budget=16_000, tell=told.append)
    text = (tmp_path / "some.html").read_text(encoding="utf-8")
    n_whole = sum(name.startswith("whole/") for name in data_of(text)["parts"])
    assert 0 < n_whole < 8
    assert f"every weight of {n_whole} of 8 heads" in told[0] and "regard view" in told[0]
    assert told[0].endswith("weights in the file are rounded, each by at most 0.00049")


def test_no_budget_is_overrun_wherever_it_ends() -> None:
    """The size of a part is known only when it is packed; the last one must not spill over."""
    record = view_fakes.decoder([f"w{i}" for i in range(31)], layers=2, n_heads=3)
    for budget in range(6_000, 40_000, 1_300):
        data = make_data([record], "static", budget)
        del data["budget"]
        assert len(inline_json(data)) <= budget


def test_words_alone_beyond_the_budget_are_refused_with_what_to_do() -> None:
    with pytest.raises(BadView, match="regard view"):
        make_page(view_fakes.decoder([f"word{i}" for i in range(997)], layers=1), budget=2_000)


def test_heads_whose_matrix_does_not_fit_keep_their_largest_weights() -> None:
    record = view_fakes.decoder([f"w{i}" for i in range(211)], layers=1, n_heads=2)
    weights = np.stack([record.weights(0, h, 0, 211) for h in range(2)])
    keys = np.argsort(-weights, axis=2)[:, :, :3]
    tops = {"top_keys": keys, "top_weights": np.take_along_axis(weights, keys, 2)}
    record.statistics = lambda place: tops  # type: ignore[method-assign]
    parts = make_data([record], "static", 24_000)["parts"]
    assert not [name for name in parts if name.startswith("whole/")]
    got = unpack(parts["top/0/0/1"]).reshape(211, 6)
    np.testing.assert_array_equal(got[:, :3], tops["top_weights"][1])
    np.testing.assert_array_equal(got[:, 3:], keys[1])


def test_weights_that_fit_only_rounded_are_within_the_bound_that_is_told() -> None:
    record = view_fakes.decoder([f"w{i}" for i in range(67)], layers=2, n_heads=4)
    bounds = []
    for budget in (24_000, 30_000, 40_000, 70_000, 120_000):
        data = make_data([record], "static", budget)
        wholes = [name for name in data["parts"] if name.startswith("whole/")]
        assert len(wholes) == 8
        for name in wholes:
            place, head = map(int, name.split("/")[2:])
            error = np.abs(unfold(data["parts"][name], 67) - record.weights(place, head, 0, 67))
            assert error.max() <= data["bound"] + 1e-7
            assert error.max() > data["bound"] / 2 or not data["bound"]
        bounds.append(data["bound"])
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > 1e-4 and bounds[-1] == 0


def test_small_maps_of_a_file_are_within_a_thousandth_of_themselves() -> None:
    record = view_fakes.decoder([f"w{i}" for i in range(301)], layers=2, n_heads=4)
    data = make_data([record], "static", 80_000)
    maps = [name for name in data["parts"] if name.startswith("map/")]
    assert len(maps) == 8 and data["small"] < 200
    for name in maps:
        exact = answer([record], name)
        got = unfold(data["parts"][name], exact.shape[1])
        np.testing.assert_allclose(got, exact, rtol=2**-11, atol=2**-25)


def test_a_notebook_has_what_it_holds_exact() -> None:
    record = view_fakes.decoder([f"w{i}" for i in range(67)], layers=2, n_heads=4)
    data = make_data([record], "widget", 70_000)
    assert data["bound"] == 0 and not any(":" in part for part in data["parts"].values())


def test_the_policy_allows_this_script_and_nothing_else() -> None:
    page = make_page(view_fakes.decoder())
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy
    rules = dict(rule.strip().split(" ", 1) for rule in policy.group(1).split(";"))
    script = re.search(r'<script type="module">(.*)</script>\n</body>', page, re.DOTALL)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert script and style
    for rule, text in (("script-src", script.group(1)), ("style-src", style.group(1))):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'"
    assert "connect-src" not in rules
    assert "</script" not in script.group(1)


def test_the_title_is_escaped() -> None:
    record = view_fakes.decoder(text="</title><script>alert(1)</script>", spans=None)
    head = make_page(record).split("<style>")[0]
    assert "<script" not in head
    assert "&lt;/title&gt;" in head


def test_a_page_that_cannot_be_made_leaves_the_old_file(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    out.write_text("before")
    record = view_fakes.decoder()
    record.places = []
    with pytest.raises(BadView):
        write_page(out, record)
    assert out.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_what_a_record_did_not_keep_is_left_out_and_the_rest_stays() -> None:
    record = view_fakes.coarse(131)
    record.grid = lambda place: None  # type: ignore[method-assign]
    parts = data_of(make_page(record))["parts"]
    assert set(parts) == {"received/0/0/0", "received/0/0/1"}


WITHOUT_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "anywidget", "matplotlib", "IPython"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Block())
import view_fakes, regard.view
from regard.view import Server, make_page, write_page
record = view_fakes.decoder()
assert "whole/0/0/0" in make_page(record)
write_page(sys.argv[1], record)
with Server(record) as server:
    import urllib.request
    assert len(urllib.request.urlopen(server.url + "data/row/0/0/0/3").read()) == 48
for name in ("make_widget", "plot"):
    try:
        getattr(regard.view, name)(record)
    except ImportError as error:
        assert "pip install 'regard[view]'" in str(error), error
    else:
        raise SystemExit(f"{name} ran without its extra")
assert "torch" not in sys.modules
print("made")
"""


def test_pages_and_server_need_no_torch_and_no_extra(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "page.html")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.stdout == "made\n", done.stderr
    assert (tmp_path / "page.html").stat().st_size > 100_000
