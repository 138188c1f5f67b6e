"""Weights stored as int8 with one scale per row: a quarter of the bytes of float32.

Why: the models inside the package must be small. A matrix loses little when each row has its own
scale: no number changes by more than half a step of its row, and a row's step is its largest
absolute value / 127.

How: config.json declares it under the key that other programs read for quantization, too:

    "quantization_config": {"kind": "regard-int8-rows", "version": 1}

A matrix NAME (any tensor with two axes) is stored as two tensors: NAME.int8, whole numbers from
-127 to 127 in the matrix's own shape, and NAME.scale, float32, one for each row; the matrix is
int8 · scale. Other tensors are stored as they are. `Int8Folder` presents such a folder as if it
were a plain one in float32, so that `load` applies the same checks as to every folder.

`transformers` refuses such a folder: under this key it needs a `quant_method`, and there is none.
A program that ignores the key finds no tensor under a matrix's name, so that int8 numbers are never
mistaken for weights. `save` of a loaded model writes plain weights, which `transformers` opens.

Left out: computing in 8 bits; loaded weights are float32, or the type asked for.

Letters: N rows, M columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from regard._files import spell, spell_path
from regard.models.hf_folder import BadCheckpoint, Folder, Stored

KEY = "quantization_config"
KIND = "regard-int8-rows"
VERSION = 1
NUMBERS, SCALE = ".int8", ".scale"
MOST = 127


def is_int8(config: Mapping[str, Any]) -> bool:
    """Whether this config.json declares weights in this format, in any version."""
    described = config.get(KEY)
    return isinstance(described, dict) and described.get("kind") == KIND


def pack_rows(matrix_nm: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers (N, M) and the scale of each row (N,), rounded to nearest; zeros stay zeros."""
    exact_nm = matrix_nm.detach().float()
    if not exact_nm.shape[1]:
        return exact_nm.to(torch.int8), exact_nm.new_zeros(exact_nm.shape[0])
    scale_n = exact_nm.abs().amax(1) / MOST
    # A row whose numbers are so small that its scale underflows to 0 becomes a row of zeros.
    steps_nm = exact_nm / torch.where(scale_n > 0, scale_n, 1.0)[:, None]
    # For numbers near the limits of float32 the division may round to above 127.
    return steps_nm.round().clamp(-MOST, MOST).to(torch.int8), scale_n


def pack_folder(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor.float()).all()):
            raise ValueError(
                f"{name} has numbers that are NaN, infinite, or too large for float32, which no "
                "row's scale can tell; the model is damaged, or its training had failed"
            )
        parts = {name: tensor}
        if tensor.ndim == 2:
            numbers_nm, scale_n = pack_rows(tensor)
            parts = {name + NUMBERS: numbers_nm, name + SCALE: scale_n}
        for part, stored in parts.items():
            if part in packed:
                raise ValueError(f"two tensors would be stored as {part}; save the model plainly")
            packed[part] = stored
    return {**config, "dtype": "float32", KEY: {"kind": KIND, "version": VERSION}}, packed


@final
class Int8Folder:
    """A folder in this format, with the interface of a plain `Folder` in float32."""

    def __init__(self, folder: Folder) -> None:
        """Check everything that can be checked without reading a weight."""
        self._folder = folder
        self.path = folder.path
        self.config = {key: value for key, value in folder.config.items() if key != KEY}
        described = folder.config[KEY]
        if described != {"kind": KIND, "version": VERSION}:
            raise BadCheckpoint(
                f"{spell_path(self.path)}: config.json has {spell(described)} as {KEY}; expected "
                f"version {VERSION} and nothing else. Load it with a newer regard, or get the "
                "model that was stored for this one"
            )
        self.stored: dict[str, Stored] = {}
        for name, found in folder.stored.items():
            if name.endswith(NUMBERS):
                plain = name.removesuffix(NUMBERS)
                self._check_pair(plain)
                self.stored[plain] = Stored(found.shape, torch.float32, found.file)
            elif name.endswith(SCALE) and name.removesuffix(SCALE) + NUMBERS in folder.stored:
                continue
            elif name + NUMBERS in folder.stored:
                self._refuse(f"has {spell(name)} twice, as it is and as whole numbers")
            else:
                self.stored[name] = found

    def read(self, name: str) -> Tensor:
        if name + NUMBERS not in self._folder.stored:
            return self._folder.read(name)
        numbers_nm = self._folder.read(name + NUMBERS)
        scale_n = self._folder.read(name + SCALE)
        if not bool((torch.isfinite(scale_n) & (scale_n >= 0)).all()):
            self._refuse(f"has scales of {spell(name)} that are negative, NaN or infinite")
        if bool((numbers_nm == -MOST - 1).any()):
            self._refuse(f"has a {-MOST - 1} in {spell(name)}, where numbers end at {-MOST}")
        if bool(numbers_nm[scale_n == 0].any()):
            self._refuse(f"has numbers in rows of {spell(name)} whose scale is 0")
        return numbers_nm * scale_n[:, None]

    def _check_pair(self, name: str) -> None:
        """Refuse a matrix whose int8 numbers or scales are missing or of wrong type or shape."""
        stored = self._folder.stored
        numbers, scale = stored[name + NUMBERS], stored.get(name + SCALE)
        if scale is None:
            self._refuse(f"has {spell(name + NUMBERS)} and no {spell(name + SCALE)}")
        both = f"in {spell(name + NUMBERS)} and {spell(name + SCALE)}"
        if (numbers.dtype, scale.dtype) != (torch.int8, torch.float32):
            self._refuse(f"has {numbers.dtype} and {scale.dtype} {both}; expected int8 and float32")
        if len(numbers.shape) != 2 or scale.shape != numbers.shape[:1]:
            shapes = f"{list(numbers.shape)} and {list(scale.shape)}"
            self._refuse(f"has the shapes {shapes} {both}; expected [N, M] and [N]")

    def _refuse(self, what: str) -> NoReturn:
        what = f"{spell_path(self.path)} {what}: the file is damaged"
        raise BadCheckpoint(f"{what}, or was not written by models.save_int8; get it again")
