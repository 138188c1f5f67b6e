"""Tensor maps that are kept: a kernel is launched with what Triton's own launcher launches it with.

What stands for that launcher is made as Triton 3.6 makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from regard.ops.kernels import tensor_maps
from regard.ops.kernels.tensor_maps import keep_maps

BASE = 13
"""Arguments before those of the kernel."""
made: list[Any] = []


@pytest.fixture(autouse=True)
def that_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    made.clear()


def make_tensordesc_arg(one: Any, numbers: Any) -> list[Any]:
    made.append(one)
    return [("map", one.base.data_ptr(), numbers), *one.shape, *one.strides]


def put_around(launcher: Any, tensordesc_indices: Any, tensordesc_meta: Any) -> Any:
    def inner(*args: Any) -> Any:
        given, n = list(args[:BASE]), 0
        for i, x in enumerate(args[BASE:]):
            if i in tensordesc_indices:
                given += make_tensordesc_arg(x, tensordesc_meta[n])
                n += 1
            else:
                given.append(x)
        return launcher(*given)

    return inner


class Launcher:
    """Stands for Triton's."""

    launch_cooperative_grid, launch_pdl = False, True
    global_scratch_size = profile_scratch_size = 0

    def __init__(self, launch: Callable[..., Any]) -> None:
        self.launch = launch

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        how = self.launch_cooperative_grid, self.launch_pdl, None, None
        self.launch(x, y, z, stream, function, *how, *rest)


def describe(x: Tensor) -> Any:
    return SimpleNamespace(base=x, shape=x.shape, strides=x.stride())


def test_a_kernel_is_given_what_triton_gives_it_and_maps_are_made_once() -> None:
    handed: list[Any] = []
    run = Launcher(put_around(lambda *args: handed.append(args), {0, 1}, ["of q", "of k"]))
    kept = keep_maps(run)
    x, y = torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 7, 8)
    for q, k in ((x, y), (x, y), (y, x), (x.transpose(1, 2), y), (x[:, :, :3], y)):
        given = 9, 1, 1, 55, 66, (4, 1, 0), None, None, None, describe(q), describe(k), (3, None), 7
        for launch in (run, kept):
            launch(*given)
        assert handed[-1] == handed[-2]
    # Five pairs by Triton; of each place q and k, and two other layouts.
    assert len(made) == 2 * 5 + 4 + 2


def test_maps_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "MOST", 3)
    kept: Any = keep_maps(Launcher(put_around(lambda *args: None, {0}, ["of q"])))
    tensors = [torch.zeros(5) for _ in range(7)]
    for x in (*tensors, *tensors):
        kept(1, 1, 1, 0, 0, None, None, None, None, describe(x))
    (maps,) = [cell.cell_contents for cell in kept.__closure__ if type(cell.cell_contents) is dict]
    assert len(maps) <= 3 and len(made) == 14


def test_launchers_that_are_made_otherwise_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plain(*args: Any) -> None:
        raise AssertionError

    around = put_around(plain, {0}, ["of q"])
    with_scratch = Launcher(around)
    with_scratch.global_scratch_size = 128
    for run in (
        Launcher(plain),
        Launcher(print),
        Launcher(put_around(plain, {1}, ["of the second argument"])),
        Launcher(put_around(plain, {0}, [None])),
        with_scratch,
        plain,
    ):
        assert keep_maps(run) is run
    run = Launcher(around)
    assert keep_maps(run) is not run
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    assert keep_maps(run) is run
