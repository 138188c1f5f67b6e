"""Our kernels are compiled for a GPU, on a machine that need not have one.

Their launches are caught instead of run, so that the very arguments of the host's side are what
they are compiled for. What they compute is judged in `test_row_stats_kernels.py`,
`test_largest_kernels.py`, `test_flash_kernels.py`, `test_decode_kernel.py` and `test_gpu.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.ops import (
    ALiBi,
    Causal,
    Dense,
    DenseBias,
    Documents,
    Lengths,
    Received,
    RelativeTable,
    Wants,
    Window,
)
from regard.ops import decode as few
from regard.ops.blockwise import Ask
from regard.ops.call import Call, make_call
from regard.ops.kernels import decode, flash, flash_backward, row_stats
from regard.ops.kernels.flash_backward import Arriving, Grads, Saved
from regard.ops.kernels.launch import PLANS
from regard.ops.kernels.rendered import render

triton: Any = importlib.import_module("triton")

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.bool: "*i1",
}
KERNELS = {
    "flash_kernels": ("_forward",),
    "tile_lists_kernels": ("_list",),
    "largest_kernels": ("_largest",),
    "row_stats_kernels": ("_above", "_rows", "_singles"),
    "pooling_kernels": ("_by_keys", "_count", "_bands", "_cells"),
}
CASES: dict[str, tuple[torch.dtype, int, dict[str, Any]]] = {
    "half": (torch.bfloat16, 64, {"mask": Causal()}),
    "whole": (
        torch.float32,
        40,
        {
            "mask": Causal()
            & Lengths(torch.tensor([250]))
            & Documents(torch.arange(256) // 50)
            & Dense(torch.ones(4, 256, 256, dtype=torch.bool)),
            "bias": ALiBi(4).at(torch.arange(256), torch.arange(256))
            + RelativeTable(torch.zeros(8, 4))
            + DenseBias(torch.zeros(256, 256)),
            "softcap": 3.0,
            "sinks": torch.zeros(4),
        },
    ),
}
FLASH = {
    "flash_kernels": ("_forward",),
    "flash_backward_kernels": ("_delta", "_keys", "_queries", "_band", "_dense"),
    "tile_lists_kernels": ("_list",),
}
IDS = torch.arange(160) % 3
FLASH_CASES: dict[str, tuple[torch.dtype, int, dict[str, Any]]] = {
    "half, slopes": (torch.bfloat16, 64, {"mask": Causal(), "bias": ALiBi(4)}),
    "wide, documents": (torch.bfloat16, 128, {"mask": Causal() & Documents(IDS)}),
    "odd, biases, bits": (
        torch.float16,
        40,
        {
            "mask": Dense(torch.ones(160, 160, dtype=torch.bool)),
            "bias": DenseBias(torch.zeros(1, 160, 160)) + RelativeTable(torch.zeros(8, 4)),
            "sinks": torch.zeros(4),
            "softcap": 3.0,
            "dropout": 0.1,
            "seed": 1,
        },
    ),
    "whole": (torch.float32, 13, {"mask": Causal()}),
}


class Caught:
    """Stands for a kernel, and keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.launches.setdefault(f"{signature_of(args)} {options}", (args, options))

        return launch

    def compile(self, args: tuple[Any, ...], options: dict[str, Any]) -> str:
        """The assembler's text for an H100 or H200."""
        options = dict(options)
        known = ("num_warps", "num_stages", "enable_fp_fusion")
        how = {name: options.pop(name) for name in known if name in options}
        names = [parameter.name for parameter in self.kernel.params]
        assert sorted(names[len(args) :]) == sorted(options)
        given = dict(zip(names, signature_of(args), strict=False))
        fixed = constants_of(args) | {(names.index(name),): x for name, x in options.items()}
        source = triton.compiler.ASTSource(
            fn=self.kernel,
            signature=given | dict.fromkeys(options, "constexpr"),
            constexprs=fixed,
        )
        target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
        found = triton.compile(source, target=target, options=how | {"enable_fp_fusion": True})
        return str(found.asm["ptx"])


def signature_of(value: Any) -> Any:
    """The type of an argument as Triton writes it; of a named tuple, one of these."""
    if isinstance(value, tuple):
        types = [signature_of(x) for x in value]
        return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    if value is None:
        return "constexpr"
    assert isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


def constants_of(value: Any, path: tuple[int, ...] = ()) -> dict[tuple[int, ...], None]:
    """Where None stands, which a kernel is compiled for."""
    if value is None:
        return {path: None}
    if not isinstance(value, tuple):
        return {}
    return {
        at: x for n, part in enumerate(value) for at, x in constants_of(part, (*path, n)).items()
    }


def catch(
    monkeypatch: pytest.MonkeyPatch, kernels: dict[str, tuple[str, ...]]
) -> dict[str, Caught]:
    """The kernels of these modules, by name, from now on caught."""
    caught = {}
    for module_name, names in kernels.items():
        module = importlib.import_module(f"regard.ops.kernels.{module_name}")
        for name in names:
            caught[name] = Caught(getattr(module, name))
            monkeypatch.setattr(module, name, caught[name])
    return caught


def look(call: Call) -> None:
    """Launch every kernel that looks at weights, once for each of its variants."""
    shape = call.rule.shape
    asked = {"entropy": True, "peak": True, "distance": True, "received": True, "above": 0.1}
    for picture in ((8, 8), (7, 9)):
        wants = Wants(**asked, top=5, map=picture, rows=[3], mass=torch.ones(shape.S) > 0)
        row_stats.by_kernels(replace(call, wants=wants), call.q)
    for question in (Received(by="max"), Received(by="mean", rows=torch.ones(shape.T))):
        row_stats.by_kernels(replace(call, wants=Wants(**asked | {"received": question})), call.q)
    keys = torch.zeros(shape.B, 3, shape.T, dtype=torch.int32)
    row_stats.sum_singles(call.q, call.k, call.rule, torch.zeros(shape[:3]), keys)


@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_for_a_gpu_as_they_are_launched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, width, rule = CASES[name]
    caught = catch(monkeypatch, KERNELS)
    # What a kernel would have counted is 1, so that the host asks for what follows.
    monkeypatch.setattr(torch, "empty", torch.ones)
    q, k = (torch.zeros(1, heads, 256, width, dtype=dtype) for heads in (4, 2))
    look(make_call(q, k, k, **rule))
    monkeypatch.undo()
    for kernel in caught.values():
        assert kernel.launches, kernel.kernel
        for launched in kernel.launches.values():
            assert ".target sm_90" in kernel.compile(*launched)


@pytest.mark.slow
@pytest.mark.parametrize("name", FLASH_CASES)
def test_attention_compiles_for_a_gpu_as_it_is_launched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, width, more = FLASH_CASES[name]
    caught = catch(monkeypatch, FLASH)
    q, k = (torch.zeros(1, heads, 160, width, dtype=dtype) for heads in (4, 2))
    given = render(make_call(q, k, k, **more))
    _, found = flash.forward(given, Ask(entropy=True, peak=True, distance=True), None)
    lse, learned = found["lse"], {"band": given.band, "dense": given.dense, "slopes": given.slopes}
    wanted = Grads(q=True, k=True, v=True, **{n: x is not None for n, x in learned.items()})
    flash_backward.backward(given, Saved(q, lse, lse), Arriving(q, lse, lse), wanted)
    launched = {name for name, kernel in caught.items() if kernel.launches}
    assert {"_forward", "_delta", "_keys", "_queries"} <= launched
    assert ("_band" in launched) == (given.band is not None)
    assert ("_dense" in launched) == (given.dense is not None)
    listed = any(x is not None for x in (given.lo, given.query_ids, given.words))
    assert ("_list" in launched) == listed
    for kernel in caught.values():
        for one in kernel.launches.values():
            assert ".target sm_90" in kernel.compile(*one)


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
    "documents": (3, torch.bfloat16, {"mask": Documents(torch.arange(1024) // 99)}, Wants()),
    "rendered": (5, torch.bfloat16, {"mask": ~Window(1, 0), "softcap": 3.0}, Wants()),
    "in float32": (2, torch.float32, {"mask": Causal()}, Wants(entropy=True)),
}


@pytest.mark.parametrize("name", FEW)
def test_the_kernel_for_few_queries_compiles_as_it_is_launched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    caught = catch(monkeypatch, {"decode_kernels": ("_parts", "_join")})
    monkeypatch.setattr(decode, "TRIM", 1)
    PLANS.clear()
    T, dtype, rule, wants = FEW[name]
    q, k = torch.zeros(1, 4, T, 64, dtype=dtype), torch.zeros(1, 1, 1024, 64, dtype=dtype)
    for keys in (1024, 300) if name == "plain" else (1024,):
        call = make_call(q, k[:, :, :keys], k[:, :, :keys], **rule)
        caught["_join"].launches.clear()
        few.observe(replace(call, wants=wants))
        assert bool(caught["_join"].launches) == (keys > 512), "a short cache is left to one kernel"
        for kernel in caught.values():
            for launched in kernel.launches.values():
                assert ".target sm_90" in kernel.compile(*launched)
