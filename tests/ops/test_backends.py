"""Which backend is asked first on a GPU, and the short way there, told without one."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.ops import (
    ALiBi,
    Causal,
    Dense,
    DenseBias,
    Documents,
    Lengths,
    Prefix,
    RelativeTable,
    Window,
    attention,
    backends,
    decode,
    explain,
    sdpa,
)
from regard.ops.call import make_call
from regard.ops.kernels import backend, flash_op

T = 300
RULES: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "sdpa"),
    "causal": ({"mask": Causal()}, "sdpa"),
    "window": ({"mask": Causal() & Window(99, None)}, "triton"),
    "padding": ({"mask": Lengths(torch.tensor([299]))}, "triton"),
    "documents": ({"mask": Causal() & Documents(torch.arange(T) // 99)}, "triton"),
    "prefix": ({"mask": Causal() | Prefix(9)}, "triton"),
    "ALiBi": ({"mask": Causal(), "bias": ALiBi(2)}, "triton"),
    "table": ({"bias": RelativeTable(torch.zeros(8, 2))}, "triton"),
    "softcap": ({"softcap": 3.0}, "triton"),
    "a matrix": ({"mask": Causal() & Dense(torch.ones(T, T, dtype=torch.bool))}, "sdpa"),
    "numbers": ({"bias": DenseBias(torch.zeros(T, T))}, "sdpa"),
    "not": ({"mask": ~Documents(torch.arange(T) // 99)}, "sdpa"),
}


@pytest.mark.parametrize("name", RULES)
def test_our_kernels_run_where_torchs_would_need_a_matrix(name: str) -> None:
    rule, chosen = RULES[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 2, T, 64, dtype=torch.bfloat16, device="cuda")
        assert explain(q, q, q, **rule).chosen == chosen
        # This was not measured.
        whole = torch.empty(1, 2, T, 64, device="cuda")
        assert explain(whole, whole, whole, **rule).chosen == (
            "triton" if name == "softcap" else "sdpa"
        )


def test_little_is_not_worth_a_kernel_that_has_to_be_compiled() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 2, 180, 64, dtype=torch.bfloat16, device="cuda")
        assert explain(q, q, q, mask=Window(99, 0)).chosen == "sdpa"
        q = torch.empty(1, 2, 182, 64, dtype=torch.bfloat16, device="cuda")
        assert explain(q, q, q, mask=Window(99, 0)).chosen == "triton"


class Ran(Exception):
    """Our kernels were asked to run."""


def pretend_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls on a CPU go the way of a GPU's, up to our kernels."""

    def run(call: Any, _: Any = None) -> None:
        raise Ran

    monkeypatch.setattr(backend, "refuse_tensors", lambda q, width: None)
    monkeypatch.setitem(backends.ORDER, "cpu", backends.ORDER["cuda"])
    monkeypatch.setattr(backends, "asked_first", backends.asked_first_on_gpu)
    monkeypatch.setattr(decode, "run", run)
    monkeypatch.setattr(flash_op, "run", run)


def is_taken(q: Tensor, k: Tensor, v: Tensor, **rule: Any) -> bool:
    """Whether the short way to our kernels takes a call."""
    given: Any = dict.fromkeys(("mask", "bias", "scale", "softcap", "sinks")) | rule
    try:
        return backends.attend_by_kernels(q, k, v, given) is not None
    except Ran:
        return True


SHORT = RULES | {
    "sinks": ({"mask": Causal(), "sinks": torch.zeros(2)}, ""),
    "causal, capped": ({"mask": Causal(), "softcap": 3.0, "scale": -0.5}, ""),
    "left padding": ({"mask": Lengths(torch.tensor([290]), side="left") & Causal()}, ""),
    "a table, padded": (
        {"mask": Lengths(torch.tensor([290])), "bias": RelativeTable(torch.zeros(8, 2))},
        "",
    ),
    "a mask that hides nothing": ({"mask": Window(T, T)}, ""),
    "the same, capped": ({"mask": Window(T, T), "softcap": 3.0}, ""),
    "a bool tensor": ({"mask": torch.ones(1, T) > 0}, ""),
    "a float tensor": ({"bias": torch.zeros(1, T)}, ""),
}


@pytest.mark.parametrize("name", SHORT)
def test_the_short_way_to_our_kernels_is_taken_where_the_long_one_leads_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_a_gpu(monkeypatch)
    rule, _ = SHORT[name]
    k = torch.zeros(1, 2, T, 64, dtype=torch.bfloat16)
    for n in (1, 16, 17, 90, T):
        if name in ("a matrix", "numbers") and n < T:
            continue
        for dtype, learned in itertools.product((torch.bfloat16, torch.float32), (False, True)):
            q, keys = k[:, :, :n].to(dtype).requires_grad_(learned), k.to(dtype)
            call = make_call(q, keys, keys, **rule)
            by_ours = backends.choose(call, "auto").name == "triton"
            assert is_taken(q, keys, keys, **rule) == by_ours, (n, dtype, learned)
            with pytest.raises(Ran) if by_ours else nullcontext():
                attention(q, keys, keys, **rule)


def test_the_short_way_leaves_what_it_cannot_know_to_the_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = torch.zeros(1, 2, T, 64, dtype=torch.bfloat16)
    rule = {"mask": Window(9, 0)}
    assert not is_taken(q, q, q, **rule), "not on a CPU"
    pretend_a_gpu(monkeypatch)
    assert is_taken(q, q, q, **rule)
    for k in (q.float(), q[..., :7], q[0], q[:, :, :0], q[:, :0], q.to("meta"), None):
        assert not is_taken(q, k, k, **rule)  # type: ignore[arg-type]
        assert not is_taken(k, q, q, **rule)  # type: ignore[arg-type]
    assert not is_taken(q, q, q[..., :3], **rule)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_taken(q, q, q, **rule)
    seen: list[bool] = []
    torch.func.vmap(lambda x: seen.append(is_taken(x, x, x, **rule)) or x)(q[None])
    torch.func.jvp(lambda x: seen.append(is_taken(x, x, x, **rule)) or x, (q,), (q,))
    assert seen == [False, False]
    for wrong in ({"mask": Lengths(torch.ones(3, dtype=torch.int64))}, {"softcap": -1.0}):
        with pytest.raises(ValueError) as short:
            is_taken(q, q, q, **wrong)
        with pytest.raises(ValueError) as long:
            make_call(q, q, q, **wrong)
        assert str(short.value) == str(long.value)


def test_few_queries_over_a_cache_are_left_to_no_kernel_that_is_planned_for_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuDNN's is, where torch asks it first: a cache that grows never has the same length again."""
    pretend_a_gpu(monkeypatch)
    half = torch.zeros(1, 2, T, 64, dtype=torch.bfloat16)
    plain: tuple[dict[str, Any], ...] = ({}, {"mask": Causal()}, {"mask": Window(T, T)})

    def chosen(q: Tensor, k: Tensor, **rule: Any) -> str:
        name = backends.choose(make_call(q, k, k, **rule), "auto").name
        assert is_taken(q, k, k, **rule) == (name == "triton")
        if "mask" not in rule:
            assert (sdpa.attend_plain(q, k, k, None, None) is None) == (name == "triton")
        with pytest.raises(Ran) if name == "triton" else nullcontext():
            attention(q, k, k, **rule)
        return name

    for rule in plain:
        assert chosen(half[:, :, :1], half, **rule) == "sdpa", "no GPU that asks cuDNN first"
    monkeypatch.setattr(sdpa, "is_cudnn_first", lambda device: True)
    for rule in plain:
        assert chosen(half[:, :, :1], half, **rule) == "triton"
        assert chosen(half[:, :, :1].float(), half.float(), **rule) == "sdpa", "cuDNN takes halves"
        assert chosen(half[:, :, :1].clone().requires_grad_(), half, **rule) == "sdpa"
        assert chosen(half, half, **rule) == "sdpa", "many queries"
    assert chosen(half[:, :, :16], half) == "triton"
    assert chosen(half[:, :, :17], half) == "sdpa"
    assert chosen(half[:, :, :7], half[:, :, :7]) == "sdpa", "a text's own keys"
    told = str(explain(half[:, :, :1], half, half))
    assert "triton is asked first: cuDNN would plan its kernel anew" in told
    with torch.no_grad():
        assert chosen(half[:, :, :1].clone().requires_grad_(), half) == "triton"
    with FakeTensorMode():
        one, all_keys = (
            torch.empty(1, 2, n, 64, dtype=torch.bfloat16, device="cuda") for n in (1, T)
        )
        assert explain(one, all_keys, all_keys).chosen == "sdpa", "lengths of graphs stay"
    monkeypatch.setattr(sdpa, "may_reorder", lambda: False)
    assert chosen(half[:, :, :1], half) == "sdpa", "the user has switched cuDNN off"


@pytest.mark.parametrize("run", ["_run_by_kernels", "_observe_by_kernels"])
def test_kernels_are_launched_on_the_device_of_their_tensors(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As layers of a model on several GPUs are run, while the first one is current."""
    current = [0]

    class On:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: Any) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(backends.triton, "is_decoding", lambda _: True)
    monkeypatch.setattr(backends.triton, "is_one_pass", lambda _: True)
    for name in ("run", "observe"):
        monkeypatch.setattr(decode, name, lambda _: current[0])
    for index in (0, 1, 3):
        q = SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))
        assert getattr(backends, run)(SimpleNamespace(q=q)) == index
        assert current == [0]
