"""The built web bundle and the HTML that carries it; the same script and style for every host.

Left out: building. `web/build.mjs` does that, and the tests hold `web/dist` to its sources.
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
    """The CSP word that lets exactly this inline text run."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def inline_json(value: Any) -> str:
    """JSON that can stand inside a script element: no `<`, `>` or `&` is left in it.

    All of it is ASCII, so that no line separator, bidi mark or half a surrogate pair of a
    stranger's token reaches the file as it is.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def whole_page(title: str, data: Any) -> str:
    """One HTML file with everything in it; its policy lets it reach nothing outside itself."""
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
    """The page of the local server: script, style and data come from the same address."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<title>regard</title>\n"
        '<link rel="stylesheet" href="regard.css">\n</head>\n<body>\n'
        '<div id="regard" data-host="server"></div>\n'
        "<noscript>This page draws with JavaScript, which is switched off.</noscript>\n"
        '<script type="module" src="regard.js"></script>\n</body>\n</html>\n'
    )
