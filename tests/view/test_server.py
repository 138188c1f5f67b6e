"""The local server: loopback, a token, its own few paths, its own page only."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import view_fakes

from regard.view import Server
from regard.view.server import LONGEST_PATH


@pytest.fixture
def record() -> view_fakes.FakeRecord:
    return view_fakes.decoder(layers=2, n_heads=3)


@pytest.fixture
def server(record: view_fakes.FakeRecord) -> Iterator[Server]:
    with Server(record) as started:
        yield started


def ask(
    server: Server, path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> http.client.HTTPResponse:
    line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        line.request(method, path, headers=headers or {})
        reply = line.getresponse()
        reply.body = reply.read()  # type: ignore[attr-defined]
        return reply
    finally:
        line.close()


def inside(server: Server, path: str = "") -> str:
    return "/" + server.url.split("/", 3)[3] + path


def test_it_listens_on_loopback_alone(server: Server) -> None:
    assert server._http.server_address[0] == "127.0.0.1"
    assert server._http.socket.family == socket.AF_INET
    assert server._http.socket.getsockname()[0] == "127.0.0.1"


def test_two_runs_have_other_tokens_and_ports(record: Any, server: Server) -> None:
    with Server(record) as other:
        assert other.port != server.port
        assert inside(other) != inside(server)
        assert len(inside(other)) > 32
        assert ask(server, inside(other)).status == 404


def test_its_own_paths_answer(server: Server, record: view_fakes.FakeRecord) -> None:
    page = ask(server, inside(server))
    assert page.status == 200
    assert b"<script" in page.body  # type: ignore[attr-defined]
    for path, kind in (("regard.js", "text/javascript"), ("regard.css", "text/css")):
        reply = ask(server, inside(server, path))
        assert (reply.status, reply.headers.get_content_type()) == (200, kind)
    told = json.loads(ask(server, inside(server, "manifest")).body)  # type: ignore[attr-defined]
    assert told["records"][0]["tokens"] == record.tokens
    row = ask(server, inside(server, "data/row/0/1/2/7"))
    np.testing.assert_array_equal(
        np.frombuffer(row.body, "<f4"),  # type: ignore[attr-defined]
        record.rows(1, 2, 7),
    )


def test_no_page_has_an_inline_script(server: Server) -> None:
    """The policy has neither 'unsafe-inline' nor a hash, and the page needs neither."""
    page = ask(server, inside(server))
    policy = page.headers["Content-Security-Policy"]
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/manifest",
        "/regard.js",
        "/favicon.ico",
        "/{half}/",
        "/{token}x/",
        "/{token}",
        "/{token}/../manifest",
        "/{token}/..%2f..%2fetc/passwd",
        "/{token}/web/src/main.ts",
        "/{token}/manifest?x=1",
        "/{token}/manifest/",
        "/{token}//",
        "/{token}/regard.js%00",
    ],
)
def test_any_other_path_is_not_found(server: Server, path: str) -> None:
    token = inside(server).strip("/")
    reply = ask(server, path.format(token=token, half=token[:-1]))
    assert reply.status == 404
    assert token.encode() not in reply.body  # type: ignore[attr-defined]


def test_a_path_that_names_another_server_is_refused(server: Server) -> None:
    headers = {"Host": f"127.0.0.1:{server.port}"}
    assert ask(server, f"http://evil.example{inside(server)}", headers=headers).status == 404


@pytest.mark.parametrize("path", ["data/", "data/map/9", "data/row/0/0/0/99", "data/%2e%2e/x"])
def test_a_question_that_has_no_answer_is_refused_in_words(server: Server, path: str) -> None:
    reply = ask(server, inside(server, path))
    assert reply.status == 400
    assert reply.headers.get_content_type() == "text/plain"
    assert reply.body  # type: ignore[attr-defined]


def test_a_path_that_is_too_long_is_refused(server: Server) -> None:
    assert ask(server, inside(server, "data/" + "1/" * LONGEST_PATH)).status == 414


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "evil.example:{port}", "[::1]:{port}", ""]
)
def test_another_host_name_is_refused(server: Server, host: str) -> None:
    """DNS rebinding: a stranger's name that now points here."""
    reply = ask(server, inside(server), headers={"Host": host.format(port=server.port)})
    assert reply.status == 421


def test_two_host_names_are_refused(server: Server) -> None:
    good = f"Host: 127.0.0.1:{server.port}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as line:
        line.sendall(f"GET {inside(server)} HTTP/1.1\r\n{good}Host: evil\r\n\r\n".encode())
        assert line.recv(100).startswith(b"HTTP/1.1 421")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:{port}"])
def test_another_origin_is_refused(server: Server, origin: str) -> None:
    headers = {"Origin": origin.format(port=server.port)}
    assert ask(server, inside(server, "manifest"), headers=headers).status == 403


@pytest.mark.parametrize(
    ("site", "status"),
    [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)],
)
def test_only_its_own_page_may_fetch(server: Server, site: str, status: int) -> None:
    headers = {"Sec-Fetch-Site": site, "Origin": f"http://127.0.0.1:{server.port}"}
    assert ask(server, inside(server, "manifest"), headers=headers).status == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_other_methods_are_refused(server: Server, method: str) -> None:
    assert ask(server, inside(server), method).status == 501


def test_every_answer_forbids_embedding_and_keeping(server: Server) -> None:
    for path in (inside(server), inside(server, "data/nothing"), "/nothing"):
        headers = ask(server, path).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Access-Control-Allow-Origin"] is None


def test_head_has_no_body(server: Server) -> None:
    reply = ask(server, inside(server), "HEAD")
    assert (reply.status, reply.body) == (200, b"")  # type: ignore[attr-defined]


def test_an_answer_does_not_wait_for_its_headers_to_arrive(server: Server) -> None:
    line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        line.request("GET", inside(server, "data/weight/0/0/0/3/1"))
        assert len(line.getresponse().read()) == 4
        [held] = server._http._lines
        assert held.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    finally:
        line.close()


def test_nothing_is_logged(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    ask(server, inside(server))
    ask(server, "/nothing")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as line:
        line.sendall(b"not http at all\r\n\r\n")
        line.recv(100)
    assert capfd.readouterr() == ("", "")


def test_at_most_two_answers_are_made_at_once_and_each_is_made_once() -> None:
    record = view_fakes.decoder(layers=1, n_heads=6)
    lock, running, most, made = threading.Lock(), 0, 0, 0
    honest = record.rows

    def slow(place: int, head: int, query: int) -> np.ndarray:
        nonlocal running, most, made
        with lock:
            running += 1
            made += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return honest(place, head, query)

    record.rows = slow  # type: ignore[method-assign]
    with Server(record) as server:
        paths = [inside(server, f"data/row/0/0/{head}/3") for head in range(6)]
        threads = [threading.Thread(target=ask, args=(server, path)) for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ask(server, paths[0])
    assert (most, made) == (2, 6)


def test_a_closed_server_is_gone(record: Any) -> None:
    server = Server(record).start()
    server.close()
    with pytest.raises(OSError):
        ask(server, inside(server))


def test_a_closed_server_ends_connections_that_were_kept_open(record: Any) -> None:
    server = Server(record).start()
    line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    line.request("GET", inside(server, "manifest"))
    line.getresponse().read()
    server.close()
    with pytest.raises((OSError, http.client.HTTPException)):
        line.request("GET", inside(server, "manifest"))
        line.getresponse()
    line.close()
