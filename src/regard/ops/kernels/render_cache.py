"""A cache of rendered masks, each kept as long as its mask: the layers of a model share one.

Why: documents and prefixes become tensors by a dozen small kernels, which take longer to launch
than a layer's attention takes to run.

How: a mask is a value, and its rendering follows from its tensors and the shape. Torch counts the
writes to a tensor (`_version`), so a rendering is reused while the counts are the same. It is
dropped with the mask. It was written on one stream, and is reused on that stream only.

Left out, and rendered each time: calls in graphs that are traced or captured, which must contain
the rendering; transforms and modes, whose tensors are not plain; inference tensors, whose writes
are not counted. Writes that torch does not know of, by a custom kernel or by replaying a CUDA
graph, go unnoticed here, as they do in autograd: after one, create a new mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from regard._torch import is_intercepted, is_transforming
from regard.ops.mask import Mask
from regard.ops.shape import Shape

T = TypeVar("T")


class _Kept(NamedTuple):
    mask: ReferenceType[Mask]
    state: tuple[Any, ...]
    rendered: Any


_kept: dict[int, _Kept] = {}
"""The last rendering of each mask, by the id of the mask."""


def rendered_once(mask: Mask, shape: Shape, device: torch.device, render: Callable[[], T]) -> T:
    """The kept rendering for this mask, shape and device, or what `render` returns if changed."""
    state = _state_of(mask, shape, device)
    if state is None:
        return render()
    known = _kept.get(id(mask))
    if known is None or known.mask() is not mask or known.state != state:
        owner = ref(mask, partial(_forget, id(mask)))
        known = _kept[id(mask)] = _Kept(owner, state, render())
    found: T = known.rendered
    return found


def _forget(number: int, _: Any) -> None:
    _kept.pop(number, None)


def _state_of(mask: Mask, shape: Shape, device: torch.device) -> tuple[Any, ...] | None:
    """Everything that a rendering depends on beside the mask; None where it must not be kept."""
    if torch.compiler.is_compiling() or is_intercepted() or is_transforming():
        return None
    stream = None
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(device)
    tensors = mask.tensors()
    if any([type(t) is not Tensor or t.is_inference() for t in tensors]):
        return None
    writes = [(t._version, t.data_ptr()) for t in tensors]
    # A rendering made in inference mode cannot be saved for a backward pass.
    return shape, device, stream, torch.is_inference_mode_enabled(), writes
