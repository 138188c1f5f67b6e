"""Strangers' `.regard` files: `regard view` refuses what is not good, and shows the rest unharmed.

The files are real ones, written by `Record.save`; some are changed afterwards, with checksums that
fit, as a stranger could.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from record_files import join, parts
from torch import Tensor, nn

from regard import cli
from regard.lens import format as files
from regard.lens.record import Record
from regard.lens.watch import watch
from regard.ops import Causal, attention
from regard.view import Server
from regard.view.manifest import make_manifest

SCRIPT = "<script>window[`ran`] = 1</script>"  # a module's name has no dots
HOSTILE = [
    "</title><script>window.ran = 1</script>",
    "</script><script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "\"'><svg onload=window.ran=1>",
    "\u202eevil\u202c\u2066",
    "a\u0000b\u0007\u001b[2J",
    "__proto__",
]
SOURCE = ["\ud83d", "\udc31", "\\ud83d\\u0000", "{{constructor}}", "x" * 4096, "", " \n", "🇯🇵"]
SOURCE += ["猫", "javascript:window.ran=1", "&lt;b&gt;"]
LINES = ["overview", "head", "text?token=3", "align?token=2"]


class Looks(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.mask = Causal() if causal else None

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return attention(q, k, k, mask=self.mask)


class Reads(nn.Module):
    """Self-attention of 7 tokens and their cross-attention to 11; one name is a script."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(SCRIPT, Looks(True))
        self.cross_attn = Looks(False)

    def forward(self, own: Tensor, source: Tensor) -> Tensor:
        return self.cross_attn(getattr(self, SCRIPT)(own, own), source)


def make_record(keep: str = "qk") -> Record:
    torch.manual_seed(5)
    model = Reads()
    with torch.no_grad(), watch(model, keep=keep) as record:
        model(torch.randn(1, 3, 7, 5), torch.randn(1, 3, 11, 5))
    return record.describe(tokens=list("abcdefg"), source_tokens=list("hijklmnopqr"))


def make_hostile() -> Record:
    """Every word of it is an attempt at something."""
    text = " ".join(HOSTILE)
    starts = np.cumsum([0, *(len(word) + 1 for word in HOSTILE[:-1])]).tolist()
    spans = [(a, a + len(word)) for a, word in zip(starts, HOSTILE, strict=True)]
    return make_record().describe(
        text=text,
        tokens=HOSTILE,
        spans=spans,
        source_text=" ".join(SOURCE),
        source_tokens=SOURCE,
        model=HOSTILE[0],
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "x.regard"
    make_record().save(path)
    return path.read_bytes()


def run_view(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["view", *arguments])
    caught = capsys.readouterr()
    return int(left.value.code or 0), caught.out, caught.err


def with_number(data: bytes, name: str, value: float) -> bytes:
    """The file with one number of an array changed."""
    header, told, arrays = parts(data)
    first, last = header[name]["data_offsets"]
    array = np.frombuffer(arrays[first:last], files.TYPES[header[name]["dtype"]]).copy()
    array[len(array) // 2] = value
    return join(header, told, arrays[:first] + array.tobytes() + arrays[last:])


def with_shape(data: bytes, name: str, shape: list[int]) -> bytes:
    header, told, arrays = parts(data)
    assert header[name]["shape"] != shape
    header[name]["shape"] = shape
    return join(header, told, arrays)


def with_words(data: bytes, **words: Any) -> bytes:
    header, told, arrays = parts(data)
    return join(header, {**told, **words}, arrays)


FLOATS = ("q", "k", "lse", "entropy", "distance", "peak", "received", "seen_by", "top_weights")
BAD: dict[str, Callable[[bytes], bytes]] = {
    "half a character": lambda data: with_words(data, tokens=["\udc31"] * 7),
    **{
        f"{value} in {place}.{name}": lambda data, n=f"{place}.{name}", v=value: with_number(
            data, n, v
        )
        for name in FLOATS
        for place, value in ((0, np.nan), (1, np.inf))
    },
    "spots of NaN": lambda data: with_number(data, "0.spots", np.nan),
    "a key beyond": lambda data: with_number(data, "1.top_keys", 11),
    "rows before": lambda data: with_number(data, "0.first", -1),
    "runs beyond": lambda data: with_number(data, "0.pairs", 8),
    "a turned q": lambda data: with_shape(data, "0.q", [3, 5, 7]),
    "another number of heads": lambda data: with_shape(data, "1.lse", [7, 3]),
    "a token of 1 MB": lambda data: with_words(data, tokens=["x" * 1_000_000, *"bcdefg"]),
    "a script for a version": lambda data: with_words(data, version="<script>"),
    "a place too many": lambda data: with_words(data, places=parts(data)[1]["places"] * 2),
    "no tokens": lambda data: with_words(data, tokens=[]),
    "no words of the source": lambda data: with_words(data, source_tokens=[]),
    "cut in the header": lambda data: data[:1000],
    "cut in the arrays": lambda data: data[:-1],
    "nothing": lambda data: b"",
    "a bit turned": lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_not_good_is_refused_in_a_line_and_never_shown(
    name: str,
    good: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("regard.view.server.Server.wait", lambda self: pytest.fail("served"))
    path, page = tmp_path / "bad.regard", tmp_path / "bad.html"
    path.write_bytes(BAD[name](good))
    for more in ((), ("--html", str(page))):
        code, _, said = run_view(capsys, str(path), *more)
        assert (code, said.count("\n"), page.exists()) == (2, 1, False), said
        assert len(said) < 300 and said.removesuffix("\n").isprintable()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("budget", [1_000_000, 100_000])  # with small maps of all heads, without
@pytest.mark.parametrize("name", ["nan in 0.q", "inf in 1.received"])
def test_no_page_is_made_of_a_record_that_is_not_good(
    name: str, budget: int, good: bytes, tmp_path: Path
) -> None:
    """Also not from Python, where nobody has looked through the file before."""
    path = tmp_path / "bad.regard"
    path.write_bytes(BAD[name](good))
    with pytest.raises(ValueError, match="not a good record"):
        Record.open(path).html(tmp_path / "bad.html", budget=budget)
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_of_nan_is_refused_where_it_is_all_that_was_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "bad.regard", tmp_path / "bad.html"
    make_record("statistics").save(path)
    path.write_bytes(with_number(path.read_bytes(), "1.map", np.nan))
    code, _, said = run_view(capsys, str(path), "--html", str(page))
    assert (code, page.exists()) == (2, False) and "map of place 1 holds NaN" in said
    with pytest.raises(ValueError, match="map of place 1 holds NaN"):
        make_manifest([Record.open(path)], "static")


@pytest.mark.parametrize("n", [131, 701])
def test_a_record_of_statistics_is_viewed_with_what_it_kept(
    n: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no single weights to find links of words in, and its page needs none."""
    path, page = tmp_path / "x.regard", tmp_path / "x.html"
    model, words = Looks(True), [f"w{number}" for number in range(n)]
    starts = np.cumsum([0, *(len(word) + 1 for word in words[:-1])]).tolist()
    with torch.no_grad(), watch(model) as record:
        model(torch.randn(1, 3, n, 5), torch.randn(1, 3, n, 5))
    spans = [(a, a + len(word)) for a, word in zip(starts, words, strict=True)]
    record.describe(text=" ".join(words), tokens=words, spans=spans).save(path)
    code, digest, said = run_view(capsys, str(path), "--html", str(page))
    assert (code, page.exists()) == (0, True), said
    assert f"{n} tokens" in digest and "word to word" not in digest


def nothing_ran(page: Any) -> None:
    assert page.evaluate("() => window.ran") is None
    assert page.locator("#regard script, #regard img, #regard svg[onload]").count() == 0


def look_through(page: Any, address: str) -> None:
    """Every page of it: drawn, without an error, nothing run, nothing too long."""
    page.goto(address)
    for line in LINES:
        page.evaluate("line => { location.hash = line; }", f"#{line}")
        page.wait_for_selector(f".page.{line.partition('?')[0]}")
        page.wait_for_timeout(100)
        nothing_ran(page)
        assert page.locator(".message.error").count() == 0
        longest = page.evaluate(
            "() => Math.max(...document.body.innerText.split(/\\s/).map(w => w.length))"
        )
        assert longest < 500
    assert not set("\u202a\u202b\u202d\u202e\u2066\u2067") & set(page.inner_text(".main"))


def hostile_bytes(path: Path) -> bytes:
    make_hostile().save(path)
    return path.read_bytes()


ODD: dict[str, Callable[[bytes], bytes]] = {
    "as saved": lambda data: data,
    "a text of 1 MB": lambda data: with_words(
        data, text="x" * 1_000_000, spans=[[0, 1_000_000]] * 7, tokens=["x" * 4096] * 7
    ),
    "too few words": lambda data: with_words(data, tokens=["<b>"], spans=None),
    "too many words": lambda data: with_words(data, source_tokens=["<b>x"] * 13),
    "words of nothing": lambda data: with_words(data, source_tokens=None, source_text=None),
    "spans upside down": lambda data: with_words(data, spans=parts(data)[1]["spans"][::-1]),
}


@pytest.mark.parametrize("name", ODD)
def test_a_hostile_file_is_only_text_in_the_page_and_from_the_server(
    name: str, page: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, html = tmp_path / "odd.regard", tmp_path / "odd.html"
    path.write_bytes(ODD[name](hostile_bytes(path)))
    code, digest, said = run_view(capsys, str(path), "--html", str(html))
    assert code == 0, said
    assert not [sign for sign in digest if not sign.isprintable() and sign != "\n"]
    look_through(page, html.as_uri())
    with Server(Record.open(path)) as server:
        look_through(page, server.url)
        page.goto("about:blank")  # a page that still asks would complain of the server's end


def test_what_the_pointer_meets_in_a_hostile_file_is_only_text(page: Any, tmp_path: Path) -> None:
    path = tmp_path / "odd.regard"
    hostile_bytes(path)
    with Server(Record.open(path)) as server:
        page.goto(f"{server.url}#head?place=1&head=2")
        page.locator(".map canvas").focus()
        for key in ["ArrowUp"] * 7 + ["ArrowLeft"] * 11 + ["ArrowDown", "ArrowRight"] * 6:
            page.keyboard.press(key)
            nothing_ran(page)
        assert page.inner_text(".pair").startswith("__proto__6 looks at ")
        page.goto(f"{server.url}#head?place=0&head=0")
        page.wait_for_selector(".facts")
        assert page.inner_text(".facts") == SCRIPT
        nothing_ran(page)
        page.goto("about:blank")
