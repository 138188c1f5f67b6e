"""A server for one browser on this machine, for records too large for a file; tiles on demand.

It listens on 127.0.0.1 only, on a port the system picks, and answers only paths that begin with a
random token made for this run. Other pages in the same browser must not reach it either: it refuses
a Host that is not this server's (DNS rebinding), an Origin or Sec-Fetch-Site from elsewhere, any
method but GET and HEAD, and any path but its own five. Nothing is read from disk by a name in the
path, so there is no path traversal. Responses may not be cached, framed or embedded.

Answers are raw little-endian float32 (see queries.py); the most recently used are cached, up to
about `CACHE_BYTES`. At most `AT_ONCE` are computed at a time, so that memory stays bounded.

Left out: TLS, several users, writing. This is not a public web server.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, final

from regard.lens.record import Record
from regard.view import assets
from regard.view.manifest import make_manifest
from regard.view.queries import TILE, answer

CACHE_BYTES = 256_000_000
AT_ONCE = 2
LONGEST_PATH = 300
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Refused(Exception):
    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status = status


@final
class Server:
    """Serves records until closed; `url` includes the token. It is a context manager.

    >>> with Server(record) as server:
    ...     print(server.url)
    """

    def __init__(self, record: Record, other: Record | None = None) -> None:
        records = [record] if other is None else [record, other]
        self._http = _Loopback(records)
        self.port = int(self._http.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}/{self._http.token}/"
        self._thread: threading.Thread | None = None

    def start(self) -> Server:
        """Serve in a background thread; return the server."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._http.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
            )
            self._thread.start()
        return self

    def close(self) -> None:
        if self._thread is not None:
            self._http.shutdown()
            self._thread.join()
            self._thread = None
        self._http.server_close()
        self._http.hang_up()

    def wait(self) -> None:
        """Block until the server is closed; Ctrl-C closes it."""
        try:
            while self._thread is not None and self._thread.is_alive():
                self._thread.join(0.5)
        except KeyboardInterrupt:
            self.close()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(record: Record, other: Record | None = None, *, open_browser: bool = True) -> Server:
    """Serve the page of a record to a browser on this machine; for records too large for a file.

    Args:
        record: What it shows.
        other: A second record, to compare with.
        open_browser: Whether to open the page.

    Returns:
        The running `Server`: `close()` it, or `wait()` until Ctrl-C.
    """
    server = Server(record, other).start()
    if open_browser:
        webbrowser.open(server.url)
    return server


class _Loopback(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, records: Sequence[Record]) -> None:
        self.token = secrets.token_urlsafe(24)
        self.manifest = assets.inline_json(make_manifest(records, "server")).encode("ascii")
        turns = threading.Semaphore(AT_ONCE)

        def make(question: str) -> bytes:
            with turns:
                return answer(records, question).astype("<f4").tobytes()

        # The largest answers are tiles and, for long texts, the top weights of every query.
        longest = max(max(p.n_queries, p.n_keys) for record in records for p in record.places)
        self.answer = lru_cache(max(1, CACHE_BYTES // (4 * max(TILE**2, 16 * longest))))(make)
        self._lines: set[Any] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._lines.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._lines.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """Close the connections that browsers keep alive; closing the server would not."""
        for line in list(self._lines):
            with contextlib.suppress(OSError):  # already ended by the other side
                line.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: browsers close connections halfway all the time."""


@final
class _Handler(BaseHTTPRequestHandler):
    server: _Loopback
    protocol_version = "HTTP/1.1"
    server_version = "regard"
    sys_version = ""
    timeout = 30
    # Headers and body are two writes; with Nagle's algorithm the second would wait for an ACK.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        try:
            self._check_sender()
            kind, body = self._find(self._inner_path())
        except Refused as refusal:
            self._send(refusal.status, "text/plain; charset=utf-8", str(refusal).encode())
        else:
            self._send(HTTPStatus.OK, kind, body)

    do_HEAD = do_GET

    def _check_sender(self) -> None:
        """Refuse requests that do not come from this server's own page, by this server's name."""
        port = self.server.server_address[1]
        names = {f"127.0.0.1:{port}", f"localhost:{port}"}
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].lower() not in names:
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, "this is not the name of this server")
        # "none": the user typed the address or opened a bookmark.
        own = {"Origin": {f"http://{hosts[0].lower()}"}, "Sec-Fetch-Site": {"same-origin", "none"}}
        for name, allowed in own.items():
            if not {value.lower() for value in self.headers.get_all(name) or []} <= allowed:
                raise Refused(HTTPStatus.FORBIDDEN, "requests from other pages are refused")

    def _inner_path(self) -> str:
        token, slash, rest = self.path.removeprefix("/").partition("/")
        if not (slash and secrets.compare_digest(token.encode(), self.server.token.encode())):
            raise Refused(HTTPStatus.NOT_FOUND, "nothing here; use the address that was printed")
        if len(rest) > LONGEST_PATH:
            raise Refused(HTTPStatus.REQUEST_URI_TOO_LONG, "no path here is that long")
        return rest

    def _find(self, path: str) -> tuple[str, bytes]:
        files: dict[str, tuple[str, Callable[[], str]]] = {
            "": ("text/html; charset=utf-8", assets.served_page),
            "regard.js": ("text/javascript; charset=utf-8", assets.script),
            "regard.css": ("text/css; charset=utf-8", assets.style),
        }
        if path in files:
            kind, read = files[path]
            return kind, read().encode()
        if path == "manifest":
            return "application/json", self.server.manifest
        if path.startswith("data/"):
            try:
                return "application/octet-stream", self.server.answer(path[5:])
            except (ValueError, IndexError) as problem:
                raise Refused(HTTPStatus.BAD_REQUEST, str(problem)) from problem
        raise Refused(HTTPStatus.NOT_FOUND, "nothing here")

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: paths include the token, and others may see the terminal."""
