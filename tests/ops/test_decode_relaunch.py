"""Steps of generation that are launched again: with what they would be launched with anew.

Launches are caught on their way to what stands for a GPU (no_gpu.py), and not carried out.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from no_gpu import Driver
from relaunch_cases import KNOWN, B, D, G, Made, at, draw
from torch import Tensor
from torch.nn import Parameter

import regard
from regard.ops import (
    ALiBi,
    Causal,
    Dense,
    Documents,
    Lengths,
    Prefix,
    RelativeTable,
    Window,
    attention,
    decode_relaunch,
)
from regard.ops.call import make_call
from regard.ops.decode_relaunch import FIELDS, form_of
from regard.ops.kernels import backend, decode, decode_kernels
from regard.ops.kernels.launch import PLANS
from regard.ops.term import field_names

HOUSE = str(Path(regard.__file__).parent)

KERNELS = "_parts", "_join"


class Launched(NamedTuple):
    """Programs, and what a kernel is given: tensors as their addresses."""

    n_programs: int
    given: list[Any]


class Kernel(triton.JITFunction):  # type: ignore[misc,type-arg]
    """Stands for a kernel and for what Triton compiles of it; keeps what it is launched with."""

    metadata = SimpleNamespace(target=SimpleNamespace(backend="cuda"))
    function = packed_metadata = None

    def __init__(self, kernel: Any, launched: list[Launched]) -> None:
        self.arg_names, self.launched = kernel.arg_names, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            names = self.arg_names[len(args) :]
            self.run(
                *grid, 1, 1, None, None, None, None, None, None, *args, *map(options.get, names)
            )
            return self

        return launch

    def run(self, n: int, *args: Any) -> None:
        given = [x.data_ptr() if isinstance(x, Tensor) else x for x in args[8:]]
        self.launched.append(Launched(n, given))


@pytest.fixture(autouse=True)
def handed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    """What a GPU that is not there is handed."""
    found: list[Launched] = []
    for name in KERNELS:
        kernel = Kernel(getattr(decode_kernels, name), found)
        monkeypatch.setattr(decode_kernels, name, kernel)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)
    monkeypatch.setattr(backend, "refuse_tensors", lambda q, width: None)
    monkeypatch.setattr(decode_relaunch, "runs_here", attrgetter("is_cpu"))
    PLANS.clear()
    yield found
    PLANS.clear()


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call from now on, whether it was launched again."""
    found: list[bool] = []
    plain = decode_relaunch.attend_again

    def attend(form: Any) -> Tensor | None:
        output = plain(form)
        found.append(output is not None)
        return output

    monkeypatch.setattr(decode_relaunch, "attend_again", attend)
    return found


OTHER: dict[str, Made] = {
    "a bool tensor": lambda T, S: {"mask": torch.ones(S) > 0},
    "numbers": lambda T, S: {"bias": torch.zeros(S)},
    "a table": lambda T, S: {"bias": RelativeTable(torch.zeros(8, 4)), "mask": Window(9, 0)},
    "not near": lambda T, S: {"mask": ~Window(1, 1)},
    "prefix": lambda T, S: {"mask": Causal() | Prefix(4)},
    "given whole, padded": lambda T, S: {
        "mask": Lengths(torch.full((B,), S - 3)) & Dense(torch.ones(S) > 0)
    },
    "documents that are converted": lambda T, S: {
        "mask": Documents(torch.arange(S, dtype=torch.int32) // 5)
    },
    "slopes with gaps": lambda T, S: {"bias": ALiBi(slopes=torch.ones(8)[::2])},
    "two slopes": lambda T, S: {"bias": ALiBi(4) + ALiBi(4)},
    "two lengths": lambda T, S: {"mask": Lengths(at(T, S)[0][:, 0]) & Lengths(at(T, S)[0][:, 0])},
    "views of one piece of memory": lambda T, S: {
        "mask": Documents((ids := torch.arange(S)), ids[:T]) & Lengths(ids[:1])
    },
}  # fmt: skip


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", KNOWN)
@torch.no_grad()
def test_what_is_launched_again_is_what_would_be_launched_anew(
    name: str,
    parts: int,
    handed: list[Launched],
    again: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = decode.tiles
    monkeypatch.setattr(decode, "tiles", lambda *args: plain(*args)._replace(parts=parts))
    for T in (1, 3):
        S = 37
        attention(*draw(T, S), **KNOWN[name](T, S))
        inputs, rule = draw(T, S), KNOWN[name](T, S)
        handed.clear()
        output = attention(*inputs, **rule)
        assert again == [False, True]
        assert output.shape == (B, 4, T, D) and output.transpose(1, 2).is_contiguous()
        ours = [*handed]
        PLANS.clear()
        handed.clear()
        attention(*inputs, **rule)
        assert again == [False, True, False]
        again.clear()
        assert len(ours) == len(handed) == (1 if parts == 1 else 2)
        where = {"out": output.data_ptr()} | ({"scratch": ours[-1].given[0]} if parts > 1 else {})
        for launched, expected, kernel in zip(ours, handed, KERNELS, strict=False):
            names = getattr(decode_kernels, kernel).arg_names
            assert launched.n_programs == expected.n_programs
            told = zip(names, launched.given, expected.given, strict=True)
            for argument, x, y in told:
                assert x == where.get(argument, y), argument


@torch.no_grad()
def test_a_step_that_is_launched_again_makes_few_calls(again: list[bool]) -> None:
    """`_tell` for each mask and bias, and for each that these hold; and 10 others."""
    for name, at_most in (("window", 12), ("a cache's", 13), ("slopes, placed", 15)):
        inputs, rule = draw(1, 37), KNOWN[name](1, 37)
        attention(*inputs, **rule)
        calls: Counter[str] = Counter()

        def count(frame: FrameType, event: str, _: Any, calls: Counter[str] = calls) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(HOUSE):
                calls[frame.f_code.co_name] += 1

        sys.setprofile(count)
        try:
            attention(*inputs, **rule)
        finally:
            sys.setprofile(None)
        assert again.pop() and calls.total() <= at_most, calls


@pytest.mark.parametrize("name", OTHER)
@torch.no_grad()
def test_what_is_rendered_or_copied_for_a_call_is_made_for_each(
    name: str, again: list[bool]
) -> None:
    inputs, rule = draw(1, 37), OTHER[name](1, 37)
    for _ in range(3):
        attention(*inputs, **rule)
    assert True not in again


def test_a_mask_that_hides_nothing_is_a_plain_call(again: list[bool]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn_like(x) for x in draw(1, 37))
    for learned in (False, True):
        q = q.requires_grad_(learned)
        again.clear()
        outputs = [attention(q, k, v, mask=Window(36, 0), scale=0.3) for _ in range(2)]
        assert again == [False, True]
        for output in outputs:
            assert output.requires_grad == learned
            assert torch.equal(output, attention(q, k, v, scale=0.3))
    again.clear()
    for _ in range(2):
        attention(q.detach(), k, v, mask=Window(36, 0), softcap=3.0)
    assert again == [False, True], "by our kernel, as the softcap is"


def test_a_call_that_lies_otherwise_has_another_form() -> None:
    def form(inputs: tuple[Tensor, Tensor, Tensor], **rule: Any) -> Any:
        given: Any = dict.fromkeys(("mask", "bias", "scale", "softcap", "sinks")) | rule
        found = form_of(*inputs, given)
        return None if found is None else found.name

    T, S = 2, 37
    q, k, v = draw(T, S)
    queries, keys = at(T, S)
    forms = [form(draw(T, S), mask=Causal().at(*at(T, S))) for _ in range(2)]
    assert forms[0] == forms[1]
    odd = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    wide = torch.zeros(B, G, S, 2 * D, dtype=q.dtype)[..., ::2]
    inputs = [(odd, k, v), (q, wide, v), (q, k, wide), (q[:, :2], k, v), (q, k[:, :, 1:], v)]
    inputs += [(q.float(), k, v), (q, k.float(), v), (q[:, :, :1], k, v), (q, k, v[..., :8])]
    inputs += [(q, k.to("meta"), v), (q.requires_grad_(), k, v)]
    forms += [form(each, mask=Causal().at(queries, keys)) for each in inputs]
    q = q.detach()
    masks = [Causal(), Window(3, 0), Window(4, 0), Window(None, 0), Causal().at(queries)]
    masks += [Causal().at(queries[0], keys), Causal().at(queries.int(), keys), Causal("start")]
    masks += [Lengths(keys[:, 0]), Lengths(keys[:, 0], side="left"), Lengths(keys[0, :1])]
    masks += [Causal() & Window(3, 0), Documents(keys), Documents(keys, queries)]
    forms += [form((q, k, v), mask=mask) for mask in masks]
    rules: list[dict[str, Any]] = [{}, {"scale": 0.5}, {"softcap": 0.5}, {"sinks": torch.zeros(4)}]
    rules += [{"bias": ALiBi(4)}, {"bias": ALiBi(4).at(queries, keys)}]
    forms += [form((q, k, v), **rule) for rule in rules]
    assert None not in forms
    assert len(set(forms)) == len(forms) - 1


@torch.no_grad()
def test_terms_that_share_positions_are_not_terms_that_have_their_own(again: list[bool]) -> None:
    """Only positions that are the same tensors are told to the kernel once for both."""
    inputs, (queries, keys), others = draw(1, 37), at(1, 37), at(1, 37)
    mask = Causal().at(queries, keys)
    attention(*inputs, mask=mask, bias=ALiBi(4).at(queries, keys))
    attention(*inputs, mask=mask, bias=ALiBi(4).at(*others))
    assert again == [False, False]
    attention(*inputs, mask=Causal().at(*others), bias=ALiBi(4).at(*others))
    assert again == [False, False, True]


def test_what_else_goes_on_sends_a_call_the_long_way(again: list[bool]) -> None:
    q, k, v = draw(1, 37)
    mask = Window(9, 0)
    for _ in range(2):
        attention(q, k, v, mask=mask)
    assert again == [False, True]
    given: Any = dict.fromkeys(("bias", "scale", "softcap", "sinks")) | {"mask": mask}
    assert form_of(q, k, v, given) is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert form_of(q, k, v, given) is None
    with torch.autograd.forward_ad.dual_level():
        assert form_of(q, k, v, given) is None
    inside = []
    torch.func.vmap(lambda x: inside.append(form_of(x, k, v, given)) or x)(q[None])
    assert inside == [None]
    for other in (Parameter(q), q[0], None):
        assert form_of(other, k, v, given) is None  # type: ignore[arg-type]
        assert form_of(q, k, other, given) is None or other is not None  # type: ignore[arg-type]
    assert form_of(q.expand(-1, -1, 17, -1), k, v, given) is None
    assert form_of(q, k, v, given | {"scale": torch.ones(())}) is None
    assert form_of(q, k, v, given | {"sinks": 3}) is None
    assert form_of(q, k, v, given | {"mask": 3}) is None


@torch.no_grad()
def test_a_step_on_another_gpu_than_the_current_one_is_not_launched_on_that(
    handed: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As layers of a model on several GPUs take their steps, while the first one is current."""
    numbers = {"cpu": 0, "meta": 1}
    current = [0]
    monkeypatch.setattr(Driver, "get_current_device", lambda _: current[0])
    monkeypatch.setattr(decode_relaunch, "runs_here", lambda _: True)
    forms = {}
    for device, current[0] in numbers.items():
        q, k, v = (x.to(device) for x in draw(1, 37))
        call = make_call(q, k, v, mask=Window(9, 0))
        given: Any = dict.fromkeys(("bias", "scale", "softcap", "sinks")) | {"mask": Window(9, 0)}
        form = forms[device] = form_of(q, k, v, given)
        assert form is not None
        decode_relaunch.attend_first(call, form)
    for device, number in numbers.items():
        for current[0] in numbers.values():
            handed.clear()
            output = decode_relaunch.attend_again(forms[device])
            assert (output is not None) == bool(handed) == (number == current[0])


def test_errors_come_after_a_call_that_had_none(again: list[bool]) -> None:
    q, k, v = draw(1, 37)
    for _ in range(2):
        attention(q, k, v, mask=Lengths(torch.full((B,), 9)))
    assert again == [False, True]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"mask": Lengths(torch.full((B + 1,), 9))}, r"lengths must be \(B,\) with B=3"),
        ({"mask": Causal().at(torch.ones(2, 1, dtype=torch.int64))}, "queries must be"),
        ({"mask": Window(3, 0), "sinks": torch.zeros(3)}, "sinks .* has H=3"),
        ({"mask": Window(3, 0), "scale": float("nan")}, "scale must be a finite number"),
        ({"bias": ALiBi(3)}, "ALiBi has 3 slopes, but q has H=4 heads"),
    ]
    for rule, words in wrong:
        for _ in range(2):
            with pytest.raises(ValueError, match=words):
                attention(q, k, v, **rule)


def test_a_form_tells_all_that_a_term_holds() -> None:
    for kind, fields in FIELDS.items():
        # The number of heads is None once slopes were made of it.
        assert set(field_names(kind)) - set(fields) <= {"n_heads"}
