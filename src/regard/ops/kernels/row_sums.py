"""What every kernel of the second pass needs beside the call: row sums, tiles and their order.

Letters: B batch, T queries, S keys, H query heads.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from regard.ops.kernels.arguments import Rule, TileLists
from regard.ops.kernels.rendered import Rendered, crop
from regard.ops.kernels.tile_lists import list_tiles
from regard.ops.kernels.tiles import Tiles
from regard.ops.shape import Tile


class RowSums(NamedTuple):
    """Maximum (in bits) and sum of each row, (B, H, T) without gaps: they make a score a weight."""

    maxima: Tensor
    sums: Tensor


def order_tiles(given: Rendered, rule: Rule, tiles: Tiles) -> TileLists | None:
    """Lists of tiles for walks along the keys, in order; None where rows have intervals instead."""
    if rule.words is None:
        return None
    return list_tiles(rule, given.shape, tiles[:2], False, given.q.device, in_order=True)


def crop_both(given: Rendered, sums: RowSums, tile: Tile) -> tuple[Rendered, RowSums]:
    """The call and its row sums for the queries and keys of a tile alone."""
    maxima, totals = (x[:, :, tile.t0 : tile.t1].contiguous() for x in sums)
    return crop(given, tile), RowSums(maxima, totals)
