"""Model folders for tests, made by hand or by safetensors itself, never by the code under test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG = {"model_type": "tiny", "n_layer": 3, "scale": 0.5, "names": ["ä", "b"]}


def make_tensors(seed: int = 7) -> dict[str, Tensor]:
    """Several types and shapes, among them an empty tensor and a single number."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "wte.weight": torch.randn(11, 5, generator=generator),
        "h.0.bias": torch.randn(7, generator=generator).bfloat16(),
        "h.0.half": torch.randn(3, 5, generator=generator).half(),
        "h.0.ids": torch.randint(0, 99, (13,), generator=generator),
        "h.0.mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }


def make_single(root: Path) -> Path:
    root.mkdir()
    save_file(make_tensors(), root / "model.safetensors", metadata={"format": "pt"})
    (root / "config.json").write_text(json.dumps(CONFIG))
    return root


def make_sharded(root: Path) -> Path:
    root.mkdir()
    tensors = make_tensors()
    names = list(tensors)
    weight_map = {}
    for number, part in enumerate((names[:2], names[2:5], names[5:]), start=1):
        file = f"model-{number:05d}-of-00003.safetensors"
        save_file({name: tensors[name] for name in part}, root / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    (root / "config.json").write_text(json.dumps(CONFIG))
    return root


def entry(start: int, end: int, shape: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write_raw(path: Path, header: Mapping[str, Any] | bytes, data: bytes) -> None:
    """A safetensors file with exactly this header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name
