"""A static picture of a record, for where no script runs: all heads at once, a row for each layer.

It is an indexed PNG, encoded here, since a notebook's output should not need a drawing library.

Left out: labels in the picture; a line of text beside it says what it shows.
"""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from regard.lens.record import Record
from regard.view.page import page_title
from regard.view.plots import TIDE, printable
from regard.view.queries import make_tile, whole_level

STILL = "regard-still"  # the CSS class of the picture, by which a live widget hides it
CELL, GAP = 64, 6  # pixels on a side of a head's map, and between two maps
NOT_FINITE = 255  # the palette index of cells that are not finite
MISSING = "#d0489b"  # their colour, the same as in the pages
Pixels = npt.NDArray[np.uint8]


def still_html(records: Sequence[Record]) -> str:
    """Build the picture of each record with a caption, as HTML without script or style."""
    parts = []
    for record in records:
        title = html.escape(printable(page_title(record), 90))
        heads = sum(place.n_heads for place in record.places)
        facts = f"{len(record.tokens)} tokens, {heads} heads; a row is a layer"
        source = base64.b64encode(_to_png(_draw_heads(record))).decode("ascii")
        picture = f'<img alt="Every head of {title}" src="data:image/png;base64,{source}">'
        parts.append(f"<p>{title}: {facts}. Run the cell to look closer.</p>{picture}")
    return f'<div class="{STILL}">{"".join(parts)}</div>'


def _draw_heads(record: Record) -> Pixels:
    """Draw shades from 0 to 254, on one scale for all heads; not finite cells are `NOT_FINITE`."""
    n_heads = max(place.n_heads for place in record.places)
    step = CELL + GAP
    sheet = np.zeros((len(record.places) * step - GAP, n_heads * step - GAP), np.float32)
    for number, place in enumerate(record.places):
        grid = record.grid(number)
        for head in range(place.n_heads if grid else 0):
            assert grid is not None
            levels = whole_level(grid[0], CELL), whole_level(grid[1], CELL)
            cells = make_tile(record, number, head, levels, (0, 0))
            rows, columns = (np.arange(CELL) * length // CELL for length in cells.shape)
            top, left = number * step, head * step
            sheet[top : top + CELL, left : left + CELL] = cells[rows][:, columns]
    # As in the pages: a square-root scale from 0 to the largest weight.
    finite = np.isfinite(sheet)
    most = max(float(sheet.max(where=finite, initial=0.0)), 1e-30)
    shades = np.sqrt(np.where(finite, sheet, 0.0) / most) * (NOT_FINITE - 1)
    return np.where(finite, shades.round(), NOT_FINITE).astype(np.uint8)


def _to_png(shades: Pixels) -> bytes:
    *ends, missing = (bytes.fromhex(colour[1:]) for colour in (*TIDE, MISSING))
    at = np.linspace(0, len(TIDE) - 1, NOT_FINITE)
    tide = [np.interp(at, range(len(TIDE)), channel) for channel in zip(*ends, strict=True)]
    colours = np.stack(tide, 1).round().astype(np.uint8).tobytes() + missing
    height, width = shades.shape
    lines = np.pad(shades, ((0, 0), (1, 0))).tobytes()  # a 0 before each line: no PNG filter
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", colours),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    )
    out = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        out += struct.pack(">I", len(data)) + kind + data
        out += struct.pack(">I", zlib.crc32(kind + data))
    return out
