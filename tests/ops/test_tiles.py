"""The table of tiles: what every kernel needs of it, on every device."""

import pytest
import torch

from regard.ops.call import make_call
from regard.ops.kernels import tiles
from regard.ops.kernels.rendered import Rendered, render

SMALL_GPU = 99 * 1024
"""Bytes of shared memory that a program of a small GPU may have."""


def rendered(width: int, dtype: torch.dtype = torch.bfloat16) -> Rendered:
    q = torch.zeros(1, 1, 3, width, dtype=dtype)
    return render(make_call(q, q, q))


def test_a_special_case_that_a_table_leaves_out_is_its_kernel() -> None:
    device = torch.device("cuda")
    safe = {"forward": tiles.SAFE["forward"]}
    assert tiles.tiles_of("forward asked", rendered(64)) == tiles.HOPPER["forward asked"][0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "table_of", lambda _: safe)
        assert tiles.tiles_of("forward asked", rendered(64)) == tiles.SAFE["forward"][0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "capability_of", lambda _: (9, 0))
        assert tiles.table_of(device) is tiles.HOPPER
        patch.setattr(tiles, "capability_of", lambda _: (8, 6))
        assert tiles.table_of(device) is tiles.SAFE


@pytest.mark.parametrize(
    ("width", "column"), [(16, 0), (64, 0), (65, 1), (128, 1), (129, 2), (256, 2)]
)
def test_heads_take_the_tiles_of_the_next_width(width: int, column: int) -> None:
    assert tiles.tiles_of("pool", rendered(width)) == tiles.HOPPER["pool"][column]
    whole = tiles.tiles_of("pool", rendered(width, torch.float32))
    assert whole == tiles.WHOLE["pool"][column]


def test_a_device_that_was_not_measured_is_told() -> None:
    assert tiles.describe_tiles((9, 0)) == "our kernels have tiles measured on sm_90"
    assert tiles.describe_tiles((8, 6)).startswith(
        "our kernels were measured on sm_90, not on sm_86"
    )


@pytest.mark.parametrize("table", [tiles.HOPPER, tiles.SAFE, tiles.WHOLE])
def test_every_table_has_every_kernel_in_tiles_that_lists_and_words_can_have(
    table: tiles.Table,
) -> None:
    # The kernel that is written for Hopper runs nowhere else.
    kernels = {name.split()[0] for name in tiles.HOPPER} - {"hopper"}
    assert kernels <= set(table)
    for row in table.values():
        for one in row:
            # A word of a mask's bits is 32 keys, and a tile of rows' numbers has no mask up to 128.
            assert one.keys % 32 == 0
            assert 128 % one.rows == 0


@pytest.mark.parametrize("kernel", ["forward", "keys", "queries", "pool", "search"])
def test_safe_tiles_fit_a_small_gpu(kernel: str) -> None:
    for width, one in zip(tiles.WIDTHS, tiles.SAFE[kernel], strict=True):
        own, walked = (one.keys, one.rows) if kernel in ("keys", "pool") else (one.rows, one.keys)
        # Two tensors that stay, and as many that are on their way.
        assert 2 * (own + walked * one.stages) * width * 2 <= SMALL_GPU
