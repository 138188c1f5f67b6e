"""Lists of the tiles of the matrix that are not empty, for each row (or column) of tiles.

Where a mask is not one interval per row, two numbers do not tell a kernel which tiles to visit. So
each tile is classified once as empty, mixed or full: by its rows' intervals, by the least and
greatest document of its rows and keys, and by its bits. A list begins with the full tiles of its
line, as runs of neighbours, each by its first tile and the one after its last, so that a kernel
knows the next tile of a run without a load. The mixed ones are stored one by one from the end of
the list backwards. Or (`in_order`) all are stored in order, as 2 n for a full tile n and 2 n + 1
for a mixed one. Lists are made on the device, and nothing is read back to the host.

Letters: B batch, T queries, S keys, H query heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from regard.ops.kernels.arguments import Rule, TileLists
from regard.ops.kernels.launch import Plans
from regard.ops.kernels.rendered import even
from regard.ops.shape import Shape


class ListForm(NamedTuple):
    """Sizes of lists: samples, heads, lines, numbers of a line; and the strides of `TileLists`."""

    samples: int
    heads: int
    n_lines: int
    n: int
    b: int
    h: int


def list_tiles(
    rule: Rule,
    shape: Shape,
    tile: tuple[int, int],
    by_keys: bool,
    device: torch.device,
    in_order: bool = False,
    plan: Plans | None = None,
) -> TileLists:
    """The lists of all lines: bands of queries, or of keys with `by_keys`; tile: rows and keys.

    plan: shared by all calls of this form.
    """
    from regard.ops.kernels import tile_lists_kernels

    form = form_lists(rule, shape, tile, by_keys)
    samples, heads, n_lines, n, _, _ = form
    tiles = torch.empty(samples, heads, n_lines, n, dtype=torch.int32, device=device)
    counts = torch.empty(2, samples, heads, n_lines, dtype=torch.int32, device=device)
    lists = TileLists(tiles, counts[0], counts[1], *form[3:])
    options = {"ROWS": tile[0], "KEYS": tile[1], "BY_KEYS": by_keys, "IN_ORDER": in_order}
    tile_lists_kernels.run_lists(rule, lists, shape, options, Plans() if plan is None else plan)
    return lists


def form_lists(rule: Rule, shape: Shape, tile: tuple[int, int], by_keys: bool) -> ListForm:
    """The sizes of the lists of all lines, as in `list_tiles`."""
    B, H, T, S = shape
    down, across = -(-T // tile[0]), -(-S // tile[1])
    n_lines, n = (even(size) for size in ((across, down) if by_keys else (down, across)))
    strides = [part.b for part in (rule.span, rule.interval, rule.words) if part is not None]
    if rule.ids is not None:
        strides += [rule.ids.queries_b, rule.ids.keys_b]
    samples = B if any(strides) else 1
    heads = H if rule.words is not None and rule.words.h else 1
    b, h = heads * n_lines if samples > 1 else 0, n_lines if heads > 1 else 0
    # At most every second tile is a run, of two numbers, and all others are mixed.
    return ListForm(samples, heads, n_lines, 2 * n, b, h)
