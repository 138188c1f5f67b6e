"""Our kernels of attention are compiled for a GPU, on a machine that need not have one.

Their launches are caught instead of run, so that the very arguments of the host's side are what
they are compiled for. What they compute is judged in `test_row_stats_kernels.py`,
`test_decode_kernel.py` and `test_gpu.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.ops import ALiBi, Causal, Lengths, Wants, Window
from regard.ops import decode as few
from regard.ops.call import make_call
from regard.ops.kernels import decode, row_stats
from regard.ops.kernels.inputs import find_bounds

triton: Any = importlib.import_module("triton")

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}
KERNELS = {
    "row_stats_kernels": ("_rows", "_largest", "_singles"),
    "pooling_kernels": ("_parts", "_grid", "_cells"),
}
CASES: dict[str, tuple[torch.dtype, int, dict[str, Any]]] = {
    "half": (torch.bfloat16, 64, {}),
    "whole": (torch.float32, 40, {"softcap": 3.0, "sinks": torch.zeros(4)}),
}


class Caught:
    """Stands for a kernel, and keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launched: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.launched = args, options

        return launch

    def compile(self) -> str:
        """The assembler's text for an H100 or H200."""
        assert self.launched is not None, "the kernel was not launched"
        args, options = self.launched
        options = dict(options)
        how = {"num_warps": options.pop("num_warps"), "enable_fp_fusion": True}
        how["num_stages"] = options.pop("num_stages", 3)
        names = [parameter.name for parameter in self.kernel.params]
        assert names == [*names[: len(args)], *sorted(options, key=names.index)]
        given = {name: type_of(x) for name, x in zip(names, args, strict=False)}
        source = triton.compiler.ASTSource(
            fn=self.kernel,
            signature=given | dict.fromkeys(options, "constexpr"),
            constexprs=options,
        )
        target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
        made = triton.compile(source, target=target, options=how)
        return str(made.asm["ptx"])


def type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    assert isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_for_a_gpu_as_they_are_launched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, width, more = CASES[name]
    caught = {}
    for room, kernels in KERNELS.items():
        module = importlib.import_module(f"regard.ops.kernels.{room}")
        for kernel in kernels:
            caught[kernel] = Caught(getattr(module, kernel))
            monkeypatch.setattr(module, kernel, caught[kernel])
    q, k = (torch.zeros(1, heads, 256, width, dtype=dtype) for heads in (4, 2))
    call = make_call(q, k, k, mask=Causal(), **more)
    for picture in ((8, 8), (7, 9)):
        wants = Wants(
            lse=True, entropy=True, peak=True, distance=True, received=True, top=5, map=picture
        )
        row_stats.by_kernels(replace(call, wants=wants), q[..., :0])
    bounds = find_bounds(call.rule, q.device)
    assert bounds is not None
    keys = torch.zeros(3, 256, dtype=torch.int32)
    row_stats.sum_singles(q, k, call.rule, bounds, torch.zeros(1, 4, 256), keys)
    for kernel in caught.values():
        assert ".target sm_90" in kernel.compile()


POSITIONS = torch.arange(1024)[None]
FEW: dict[str, tuple[int, torch.dtype, dict[str, Any], Wants]] = {
    "plain": (1, torch.bfloat16, {}, Wants()),
    "padded and asked": (
        1,
        torch.bfloat16,
        {"mask": Lengths(torch.tensor([900])), "sinks": torch.zeros(4)},
        Wants(lse=True, entropy=True, peak=True, distance=True, mass=POSITIONS[0] > 3),
    ),
    "placed, ALiBi": (
        1,
        torch.bfloat16,
        {
            "mask": Causal().at(POSITIONS[:, :1], POSITIONS),
            "bias": ALiBi(4).at(POSITIONS[:, :1], POSITIONS),
        },
        Wants(),
    ),
    "16 queries": (16, torch.bfloat16, {"mask": Causal() & Window(899, None)}, Wants(peak=True)),
    "rendered": (5, torch.bfloat16, {"mask": ~Window(1, 0), "softcap": 3.0}, Wants()),
    "in float32": (2, torch.float32, {"mask": Causal()}, Wants(entropy=True)),
}


@pytest.mark.parametrize("name", FEW)
def test_the_kernel_for_few_queries_compiles_as_it_is_launched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("regard.ops.kernels.decode_kernels")
    caught = {kernel: Caught(getattr(module, kernel)) for kernel in ("_parts", "_join")}
    for kernel, catch in caught.items():
        monkeypatch.setattr(module, kernel, catch)
    monkeypatch.setattr(decode, "TRIM", 1)
    T, dtype, rule, wants = FEW[name]
    q, k = torch.zeros(1, 4, T, 64, dtype=dtype), torch.zeros(1, 1, 1024, 64, dtype=dtype)
    for keys in (1024, 300) if name == "plain" else (1024,):
        call = make_call(q, k[:, :, :keys], k[:, :, :keys], **rule)
        caught["_join"].launched = None
        few.observe(replace(call, wants=wants))
        joined = caught["_join"].launched is not None
        assert joined == (keys > 512), "a short cache is left to one kernel"
        for kernel in ("_parts", "_join")[: 1 + joined]:
            assert ".target sm_90" in caught[kernel].compile()
