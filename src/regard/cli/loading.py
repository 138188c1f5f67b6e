"""The model that a command was told to use, on the device it was told or the best there is.

Why: several commands start with it, and a small model must answer at once.

How: `load_model` loads it. `few_threads` lets a small model (`is_small`) do its work with one: its
steps are so short that several threads mostly wait for each other, and where other programs keep
the processor busy they wait a hundred times longer than the work takes. Who sets OMP_NUM_THREADS
has chosen already.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from regard.cli.printing import make_printable

if TYPE_CHECKING:
    from rich.console import Console

    from regard.models import Transformer

SMALL = 50_000_000  # parameters
DTYPES = ("float32", "bfloat16", "float16")


def load_model(
    name: str, notes: Console, *, dtype: str | None = None, device: str | None = None
) -> Transformer:
    """Load the model; a terminal is told that it takes a moment."""
    import torch
    from rich.text import Text

    from regard.models import load
    from regard.models.embedded import is_embedded

    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype is {dtype!r}; expected {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    told = notes.status(Text(f"loading {make_printable(name, notes.encoding)}"))
    with told, few_threads(is_embedded(name)):
        return load(name, dtype=None if dtype is None else getattr(torch, dtype), device=where)


def is_small(model: Transformer) -> bool:
    """Whether the model is on the CPU, and its steps are short there."""
    parameters = list(model.parameters())
    n_numbers = sum(tensor.numel() for tensor in parameters)
    return n_numbers <= SMALL and parameters[0].device.type == "cpu"


@contextmanager
def few_threads(small: bool) -> Iterator[None]:
    """One thread while this runs, if the work is small."""
    import torch

    if not small or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    n_before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_before)
