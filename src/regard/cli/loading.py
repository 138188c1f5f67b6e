"""The model that a command shall use, on the device that was named or the best there is.

Why: several commands start with it, and a small model must answer at once.

How: `load_model` loads one of ours; `load_subject`, for looking, also one of an architecture that
only `transformers` knows. `few_threads` lets a small model (`is_small`) do its work with one
thread: its steps are so short that several threads mostly wait for each other, and where other
programs keep the processor busy they wait a hundred times longer than the work takes. Who sets
OMP_NUM_THREADS has chosen already.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from regard._look import Subject, own_subject
from regard.cli.printing import make_printable, write_line
from regard.cli.progress import working

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from regard.models import Transformer

SMALL = 50_000_000  # parameters
DTYPES = ("float32", "bfloat16", "float16")


def load_model(
    name: str, notes: Console, *, dtype: str | None = None, device: str | None = None
) -> Transformer:
    import torch

    from regard.models import load
    from regard.models.embedded import is_embedded

    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype is {dtype!r}; expected {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    kind = None if dtype is None else getattr(torch, dtype)
    with loading(name, notes), few_threads(is_embedded(name)):
        return load(name, dtype=kind, device=pick_device(device))


def load_subject(name: str, notes: Console, *, device: str | None = None) -> Subject:
    """A model to be watched: ours, or one of `transformers`, which is noted."""
    from regard.lens.head_names import name_model
    from regard.models.families import UnknownFamily

    try:
        return own_subject(load_model(name, notes, device=device), name_model(name))
    except UnknownFamily as unknown:
        from regard.cli.hf_models import foreign_subject, tell_package

        with loading(name, notes):
            subject = foreign_subject(name, unknown, device=pick_device(device))
        write_line(notes, tell_package(subject))
        return subject


def loading(name: str, notes: Console) -> AbstractContextManager[object]:
    return working(notes, f"loading {make_printable(name, notes.encoding)}")


def pick_device(asked: str | None) -> str:
    """The device that was asked for; unasked a GPU where there is one."""
    import torch

    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def is_small(model: nn.Module) -> bool:
    """Whether the model is on the CPU, and its steps are short there."""
    parameters = list(model.parameters())
    n_numbers = sum(tensor.numel() for tensor in parameters)
    return n_numbers <= SMALL and parameters[0].device.type == "cpu"


@contextmanager
def few_threads(small: bool) -> Iterator[None]:
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
