"""A rule taken apart and put together: objects in eager mode, text in compiled graphs alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from regard.ops import ALiBi, Causal, Lengths, Window, attention, blockwise_op
from regard.ops import pack as pack_module
from regard.ops.call import Rule
from regard.ops.pack import pack, parse, spell, unpack
from regard.ops.shape import Shape

SHAPE = Shape(2, 3, 5, 7)


def test_no_rule_is_spelled_or_parsed_in_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("text in eager mode")

    monkeypatch.setattr(blockwise_op, "spell", forbidden)
    monkeypatch.setattr(pack_module, "parse", forbidden)
    q = torch.randn(2, 3, 7, 4, requires_grad=True)
    mask = Causal() & Lengths(torch.tensor([7, 3]))
    for softcap in (None, 3.0):
        out = attention(q, q, q, mask=mask, bias=ALiBi(3), softcap=softcap, backend="blockwise")
        out.square().sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


def test_eight_threads_get_the_answer_of_one() -> None:
    q = torch.randn(2, 3, 7, 4)
    masks = [
        Causal() & Window(n % 5, n % 3) & Lengths(torch.tensor([7, 1 + n % 6])) for n in range(64)
    ]
    known = [attention(q, q, q, mask=mask, softcap=3.0) for mask in masks]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda mask: attention(q, q, q, mask=mask, softcap=3.0), masks * 4))
    for n, ours in enumerate(found):
        torch.testing.assert_close(ours, known[n % 64])


def test_eight_threads_parse_what_one_spelled() -> None:
    rules = [Rule(shape=SHAPE, mask=Causal() & Window(n, None), scale=0.5) for n in range(16)]
    rules += [Rule(shape=SHAPE, mask=~rules[n].mask, softcap=2.0) for n in range(16)]  # type: ignore[operator]
    packed = [pack(each) for each in rules]
    pack_module._FORMS.clear()
    with ThreadPoolExecutor(8) as pool:
        forms = list(pool.map(lambda p: parse(spell(p.form)), packed * 8))
    for n, form in enumerate(forms):
        assert form == packed[n % 32].form
        again = unpack(packed[n % 32]._replace(form=form), SHAPE)
        assert again.mask is not None and rules[n % 32].mask is not None
        assert torch.equal(again.mask.dense(SHAPE), rules[n % 32].mask.dense(SHAPE))
