"""The built web bundle, and the HTML around it; every host has the same script and style.

A page for a file has all of it inline, under a content security policy that allows nothing else;
a page of the local server loads it from the server.

Left out: building. `web/build.mjs` does that, and tests check `web/dist` against its sources.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def script() -> str:
    return _read("regard.js")


@cache
def style() -> str:
    return _read("regard.css")


def _read(name: str) -> str:
    folder = resources.files("regard.view") / "web" / "dist"
    return (folder / name).read_text(encoding="utf-8")


def _allow(text: str) -> str:
    """The CSP source expression (a hash) that allows exactly this inline script or style."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def inline_json(value: Any) -> str:
    """Encode JSON for use inside a script element: without `<`, `>` or `&`.

    It is pure ASCII, so that line separators, bidi marks and lone surrogates in untrusted tokens
    reach the file only as escapes.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def whole_page(title: str, data: Any) -> str:
    """Build one HTML file with everything inline; its CSP forbids every access to the network."""
    policy = (
        f"default-src 'none'; script-src {_allow(script())}; style-src {_allow(style())}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style()}</style>\n</head>\n<body>\n"
        '<div id="regard" data-host="static"></div>\n'
        "<noscript>This page draws with JavaScript, which is switched off.</noscript>\n"
        f'<script type="application/json" id="regard-data">{inline_json(data)}</script>\n'
        f'<script type="module">{script()}</script>\n</body>\n</html>\n'
    )


def served_page() -> str:
    """Build the page of the local server, which loads script, style and data from its address."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<title>regard</title>\n"
        '<link rel="stylesheet" href="regard.css">\n</head>\n<body>\n'
        '<div id="regard" data-host="server"></div>\n'
        "<noscript>This page draws with JavaScript, which is switched off.</noscript>\n"
        '<script type="module" src="regard.js"></script>\n</body>\n</html>\n'
    )
