"""What was rendered of a mask is given again while nothing has changed, and never after that."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from regard.ops import Causal, Documents, Lengths, Mask, Prefix, Window
from regard.ops.call import make_call
from regard.ops.kernels import render_cache, rendered
from regard.ops.kernels.rendered import Rendered, render
from regard.ops.shape import Shape

TENSORS = ("first", "past", "lo", "hi", "query_ids", "key_ids", "scattered")


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of masks of which something is rendered, each time that it is."""
    found: list[str] = []
    plain = rendered._render_mask

    def count(mask: Mask, *rest: Any) -> Any:
        found.append(type(mask).__name__)
        return plain(mask, *rest)

    monkeypatch.setattr(rendered, "_render_mask", count)
    # Masks of other files may live as long as the tests do.
    monkeypatch.setattr(render_cache, "_kept", {})
    yield found
    gc.collect()
    assert not render_cache._kept, "something outlived its mask"


def see(mask: Mask, T: int = 7, q: Tensor | None = None) -> Rendered:
    q = torch.zeros(2, 1, T, 2) if q is None else q
    k = torch.zeros(2, 1, 7, 2)
    return render(make_call(q, k, k, mask=mask))


def same(one: Rendered, other: Rendered) -> bool:
    """Whether both have the very same tensors."""
    return all(getattr(one, name) is getattr(other, name) for name in TENSORS)


def equal(one: Rendered, other: Rendered) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in TENSORS]
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


IDS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 4, 4, 4, 4]])
MASKS: dict[str, Callable[[], Mask]] = {
    "documents": lambda: Documents(IDS.clone()),
    "documents of queries": lambda: Documents(IDS.clone(), IDS.clone()),
    "padding": lambda: Lengths(torch.tensor([5, 3])),
    "a prefix": lambda: Causal() | Prefix(3),
    "a prefix a sample": lambda: Causal() | Prefix(torch.tensor([2, 4])),
    "a window at positions": lambda: Window(1, 0).at(torch.arange(7)),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_second_layer_is_given_what_the_first_had_rendered(name: str, made: list[str]) -> None:
    mask = MASKS[name]()
    first = see(mask)
    assert same(see(mask), first) and len(made) == 1
    # A layer joins its own masks to the one of the model.
    joined = see(Causal() & mask)
    assert same(joined, first) and joined.right == 0 and len(made) == 1
    assert equal(see(MASKS[name]()), first) and len(made) == 2


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda ids: ids.add_(1),
    "one number": lambda ids: ids[0].fill_(9),
    "a view of it": lambda ids: ids.view(-1)[3:5].zero_(),
    "without gradients": lambda ids: torch.no_grad()(ids.copy_)(ids.flip(1)),
    "other memory": lambda ids: setattr(ids, "data", ids.flip(1)),
    "from elsewhere": lambda ids: ids.copy_(torch.arange(7)),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("side", [0, 1])
def test_after_a_write_a_mask_is_rendered_anew(name: str, side: int) -> None:
    tensors = [IDS.clone(), IDS.clone()]
    mask = Documents(*tensors)
    see(mask)
    WRITES[name](tensors[side])
    assert equal(see(mask), see(Documents(*(x.clone() for x in tensors))))


def test_writes_of_compiled_code_are_seen() -> None:
    ids = IDS.clone()
    mask = Documents(ids)
    before = see(mask)
    with torch.no_grad():
        torch.compile(lambda x: x.copy_(x.flip(1)), backend="aot_eager")(ids)
    assert not equal(see(mask), before) and equal(see(mask), see(Documents(ids.clone())))


def test_another_shape_is_rendered_by_itself(made: list[str]) -> None:
    mask = Documents(IDS.clone())
    long, short = see(mask), see(mask, T=3)
    assert short.query_ids is not None and short.query_ids.shape == (2, 3)
    assert equal(see(mask), long) and len(made) == 3


def test_what_goes_with_a_mask_is_not_kept_after_it() -> None:
    mask = Documents(IDS.clone())
    see(mask)
    assert len(render_cache._kept) == 1
    del mask
    gc.collect()
    assert not render_cache._kept


def test_inference_tensors_are_rendered_each_time(made: list[str]) -> None:
    """Torch does not count what is written to them."""
    with torch.inference_mode():
        mask = Documents(IDS.clone())
        first = see(mask)
        mask.ids.copy_(mask.ids.flip(1))
        assert not equal(see(mask), first) and len(made) == 2


def test_what_was_rendered_in_inference_mode_is_not_given_outside(made: list[str]) -> None:
    """It could not be saved for a backward pass."""
    mask = Documents(IDS.clone())
    with torch.inference_mode():
        inside = see(mask)
        assert same(see(mask), inside) and inside.lo is not None and inside.lo.is_inference()
    outside = see(mask)
    assert outside.lo is not None and not outside.lo.is_inference() and len(made) == 2


class Watching(TorchDispatchMode):
    """A mode that sees every operation and changes none."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_modes_see_the_whole_rendering_and_leave_nothing_behind() -> None:
    mask = Documents(IDS.clone())
    see(mask)
    with Watching() as watching:
        see(mask)
    assert any("searchsorted" in name for name in watching.seen)
    other = Documents(IDS.clone())
    with FakeTensorMode(allow_non_fake_inputs=True):
        see(other)
    assert type(see(other).lo) is Tensor and equal(see(other), see(mask))


def test_graphs_have_the_rendering_in_them() -> None:
    """So that they follow what is written to the ids, also when these were rendered before."""
    mask = Documents(IDS.clone())
    see(mask)

    def find(q: Tensor) -> Any:
        return see(mask, q=q).lo

    graph: Any = torch.compile(find, backend="aot_eager", fullgraph=True)
    q = torch.zeros(2, 1, 7, 2)
    assert torch.equal(graph(q), find(q))
    mask.ids.copy_(mask.ids.flip(1))
    assert torch.equal(graph(q), find(q))
    assert torch.equal(find(q), see(Documents(mask.ids.clone())).lo)


def test_inside_transforms_nothing_is_kept(made: list[str]) -> None:
    mask = Documents(IDS.clone())

    def find(q: Tensor) -> Tensor:
        see(mask, q=q)
        return q

    for _ in range(2):
        torch.func.vmap(find)(torch.zeros(3, 2, 1, 7, 2))
    assert len(made) == 2 and not render_cache._kept


def test_a_captured_stream_has_the_rendering_in_its_graph_and_others_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mask, shape, device = Documents(IDS.clone()), Shape(2, 1, 7, 7), torch.device("cuda", 0)
    capturing, stream = False, "one"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    calls: list[int] = []

    def find() -> int:
        render_cache.rendered_once(mask, shape, device, lambda: calls.append(1) or len(calls))
        return len(calls)

    assert [find(), find()] == [1, 1]
    capturing = True
    assert [find(), find()] == [2, 3]
    capturing, stream = False, "another"
    assert [find(), find()] == [4, 4]
