"""One HTML file that shows a survey offline: all heads and scores, sortable and as a heat map.

How: the table's numbers are one JSON object in the page, beside the bundle that all pages share.

Left out: texts, since a survey keeps none; `regard look` shows one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from regard._files import replace_file
from regard.lens.head_names import short_model_name
from regard.lens.head_table import HeadTable, label_layers
from regard.view.assets import whole_page
from regard.view.manifest import FORMAT, NAME_LENGTH, finite, tell_words
from regard.view.pieces import cut
from regard.view.queries import BadView

MOST_HEADS = 20_000


def make_heads(table: HeadTable) -> str:
    """Build the page as a string of HTML."""
    name = cut(short_model_name(table.model), NAME_LENGTH)
    title = f"Heads of {cut(name, 60)} over {table.n_texts:,} texts · regard"
    return whole_page(title.encode("utf-8", "replace").decode(), {**_tell(table), "model": name})


def write_heads(path: str | os.PathLike[str], table: HeadTable) -> Path:
    """Write the page to a file, atomically, and return its path."""
    text, out = make_heads(table), Path(os.fsdecode(path))
    with replace_file(out) as file:
        file.write(text.encode())
    return out


def _tell(table: HeadTable) -> dict[str, Any]:
    if len(table.heads) > MOST_HEADS:
        raise BadView(f"the table has {len(table.heads):,} heads; a page shows {MOST_HEADS:,}")
    means, stds, counts = table.means, table.stds, table.counts
    labels = label_layers(table.heads)
    return {
        "format": FORMAT,
        "kind": "heads",
        "texts": table.n_texts,
        "empty": table.n_empty,
        "truncated": table.n_truncated,
        "scores": list(table.scores),
        "words": tell_words(table.scores),
        "heads": [
            {
                "layer": cut(labels[n], NAME_LENGTH),
                "head": head.head,
                "mean": [finite(value) for value in means[n].tolist()],
                "std": [finite(value) for value in stds[n].tolist()],
                "texts": counts[n].tolist(),
            }
            for n, head in enumerate(table.heads)
        ],
    }
