"""Calls in compiled graphs have the same number only where their rules' tensors are equal."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.ops import Causal, Dense, attention
from regard.ops import rule_numbers as numbers
from regard.ops.call_hook import hooked

T = 7
Masks = Callable[[Tensor], "list[Tensor]"]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    torch._dynamo.reset()
    numbers._given.clear()
    yield
    torch._dynamo.reset()


def attend(x: Tensor, masks: list[Tensor]) -> Tensor:
    for mask in masks:
        rule: Any = {"mask": Dense(mask)} if mask.dtype == torch.bool else {"bias": mask}
        x = attention(x, x, x, **rule)
    return x


def numbered(masks: Masks, *given: Tensor, backend: str = "aot_eager", **how: Any) -> list[Any]:
    """The numbers of the calls under these masks of what is given, for each of the given."""
    found: list[Any] = []
    fast = torch.compile(
        lambda x, one: attend(x, masks(one)), backend=backend, fullgraph=True, **how
    )
    with hooked(lambda call: found.append(call.rule_number)):
        for one in given:
            fast(torch.randn(1, 3, one.shape[-1], 5), one)
    return found


def triangle(n: int = T) -> Tensor:
    return torch.ones(n, n).tril().bool()


def made_in_many_ways(x: Tensor) -> list[Tensor]:
    mask = x.flip(0).flip(1)
    T = x.shape[0]
    return [
        *(mask, mask[None, None], mask[None, None], mask[None].expand(3, -1, -1)[None]),
        *(mask.int()[None].bool(), mask.int()[None].bool(), mask.T, mask[:T, :T], mask.detach()),
    ]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
def test_what_is_made_in_the_same_way_has_one_number(mode: Any, backend: str) -> None:
    with mode():
        found = numbered(made_in_many_ways, triangle(), triangle().T, backend=backend)
    a, b, c, d, e, f, g, h, i = found[:9]
    assert a == h == i and b == c and e == f
    assert len({a, b, d, e, g}) == 5 and None not in found
    assert {one - a for one in found[:9]} == {one - found[9] for one in found[9:]}
    assert not {*found[:9]} & {*found[9:]}


def test_two_parts_of_one_tensor_have_two_numbers() -> None:
    """Also where they have the same shape, and where they are read from what is given."""
    whole = torch.rand(2, 1, 1, T, T) < 0.6
    a, b, c, d = numbered(lambda x: [x[0], x[1], x[0], x[1] & x[1]], whole)
    assert len({a, b, d}) == 3 and a == c
    assert numbered(lambda x: [x[1], x[0]], whole) == [b, a]


def test_random_masks_differ() -> None:
    found = numbered(lambda x: [torch.rand(T, T) < 0.9 for _ in range(2)], triangle(), triangle())
    assert len({*found}) == 4


def test_what_is_given_keeps_its_number_until_it_is_written_to() -> None:
    given, other = triangle(), triangle()
    a, b, c, d = numbered(lambda x: [x, x], given, other)
    assert a == b != c == d
    assert numbered(lambda x: [x], given, given) == [a, a]
    given[0, 1] = True
    [e] = numbered(lambda x: [x], given)
    assert e not in (a, c)


def test_what_is_given_is_not_kept() -> None:
    given = triangle()
    [a] = numbered(lambda x: [x], given)
    gone = weakref.ref(given)
    del given
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    # Another tensor may be where that one was.
    other = triangle()
    [((made, _), known)] = numbers._given.items()
    numbers._given[made, (id(other), other._version)] = known
    assert known[1] == a and numbered(lambda x: [x], other) != [a]


def test_only_some_numbers_are_remembered() -> None:
    masks = [triangle() for _ in range(numbers.MOST_GIVEN + 3)]
    found = numbered(lambda x: [x], *masks)
    assert len(numbers._given) == numbers.MOST_GIVEN
    assert numbered(lambda x: [x], masks[-1]) == found[-1:]
    assert numbered(lambda x: [x], masks[0]) != found[:1]


def test_small_masks_of_inference_mode_are_read() -> None:
    with torch.inference_mode():
        given = triangle()
        [a] = numbered(lambda x: [x], given)
        given[0, 1] = True
        assert numbered(lambda x: [x], given) != [a]


def test_a_mask_that_the_graph_writes_to_has_another_number() -> None:
    def run(q: Tensor, x: Tensor) -> Tensor:
        q = attend(q, [x])
        x[0, 2] = True
        return attend(q, [x, x])

    found: list[Any] = []
    fast, x = torch.compile(run, backend="aot_eager", fullgraph=True), triangle()
    with hooked(lambda call: found.append((call.rule_number, bool(call.rule.mask.seen[0, 2])))):
        fast(torch.randn(1, 3, T, 5), x)
        fast(torch.randn(1, 3, T, 5), x)
    (a, old), (b, new), (c, _), (d, _), (e, _), (f, _) = found
    assert (old, new) == (False, True)
    assert a != b == c and d not in (a, b) and e == f not in (a, b, d)


def test_lengths_may_be_open() -> None:
    found = numbered(made_in_many_ways, triangle(7), triangle(11), triangle(13), dynamic=True)
    for at in (0, 9, 18):
        a, b, c, d, e, f, g, _, i = found[at : at + 9]
        assert a == i and b == c and e == f and len({a, b, d, e, g}) == 5


def test_biases_have_numbers_and_rules_without_tensors_none() -> None:
    assert len({*numbered(lambda x: [x.sin(), x.cos()], torch.randn(T, T))}) == 2
    table = torch.randn(3, T, T, requires_grad=True)
    a, b, c, d = numbered(lambda x: [x, x[:1], x, x * 2], table)
    assert a == c and len({a, b, d}) == 3
    found: list[Any] = []
    fast = torch.compile(lambda q: attention(q, q, q, mask=Causal()), backend="aot_eager")
    with hooked(lambda call: found.append(call.rule_number)):
        fast(torch.randn(1, 3, T, 5))
    assert found == [None]


def test_where_nothing_is_traced_each_call_has_a_number_of_its_own() -> None:
    """Neither addresses nor versions tell masks apart there, in torch 2.11."""
    assert len({*numbered(made_in_many_ways, triangle(), backend="eager")}) == 9


def test_layers_that_are_computed_again_in_the_backward_pass() -> None:
    found: list[Any] = []

    def run(x: Tensor, given: Tensor) -> Tensor:
        mask = given.flip(0).flip(1)
        for _ in range(3):
            x = checkpoint(attend, x, [mask[None]], use_reentrant=False)
        return x

    fast = torch.compile(run, backend="aot_eager", fullgraph=True)
    x = torch.randn(1, 3, T, 5, requires_grad=True)
    with hooked(lambda call: found.append(call.rule_number)):
        fast(x, triangle()).sum().backward()
    assert len(found) >= 3 and None not in found and len({*found[:3]}) == 1
    plain = x.grad
    x.grad = None
    run(x, triangle()).sum().backward()
    assert plain is not None and x.grad is not None and torch.allclose(plain, x.grad)
