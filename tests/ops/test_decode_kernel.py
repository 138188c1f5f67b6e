"""The kernel for few queries, run by Triton's interpreter on the CPU: equal to the reference.

Triton decides at import whether it interprets, so the kernel runs in a process of its own, which
writes the largest error of each case and what the plain formula's own rounding allows.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decode_cases import CASES
from interpreted import run_interpreted
from layouts import LAYOUTS

pytestmark = pytest.mark.slow

HIDING = (
    "window",
    "padding",
    "documents",
    "documents anywhere",
    "given whole",
    "not near",
    "placed window",
    "placed and padded",
    "queries placed",
)
"""Masks under which some key is seen by nobody."""
Report = dict[str, list[float]]


def run_cases() -> None:
    """Every case; printed as JSON."""
    import torch
    from decode_cases import gaps
    from interpreted import patch_bfloat16, patch_once

    from regard.ops import decode as few
    from regard.ops.kernels import decode
    from regard.ops.kernels.launch import PLANS

    patch_once()
    patch_bfloat16()
    torch.set_num_threads(1)
    report: Report = {}
    whole, cut = decode.tiles, {"keys": 16, "parts": 2}
    # Far smaller tiles than a GPU's, so that there are some to fold.
    decode.tiles = lambda *args: whole(*args)._replace(**cut)  # type: ignore[assignment]
    decode.TRIM = 20
    for number, name in enumerate(CASES):
        dtype = (torch.float32, torch.float16, torch.bfloat16)[number % 7 % 3]
        cut |= {"parts": (1, 2, 1, 3)[number % 4], "keys": (32, 16)[number % 2]}
        # All parts at once, or a few of them.
        decode.CHUNK = (64, 2)[number % 8 > 3]
        PLANS.clear()
        for what, pair in gaps(name, dtype, "cpu", few.observe).items():
            report[f"{name} {dtype}: {what}"] = [*pair]
    for parts, run in enumerate(
        (run_hidden, run_seen, run_unread, run_layouts, run_alone, run_graphs)
    ):
        cut |= {"parts": 1 + parts % 2, "keys": 32}
        PLANS.clear()
        report |= run()
    decode.tiles = whole
    PLANS.clear()
    report |= run_real_tiles()
    print(json.dumps(report))


def gap(one: Any, other: Any) -> float:
    """The largest distance; NaN only where just one of the two is."""
    assert one.shape == other.shape
    apart = (one - other).masked_fill((one == other) | (one.isnan() & other.isnan()), 0.0)
    return float(apart.abs().max())


def run_hidden() -> Report:
    """What is not finite where nobody looks changes nothing."""
    from decode_cases import MASKS, SIZES, make_inputs

    from regard.ops import decode as few
    from regard.ops.call import make_call
    from regard.ops.shape import Shape

    found: Report = {}
    for name in HIDING:
        for n in SIZES[0], SIZES[3]:
            (q, k, v), at = make_inputs(n)
            call = make_call(q, k, v, mask=MASKS[name](n, at))
            assert call.rule.mask is not None
            seen = call.rule.mask.dense(Shape(2, n.H, n.T, n.S)).expand(2, n.H, n.T, n.S)
            hidden = ~seen.any(2).view(2, n.G, -1, n.S).any(2)[..., None]
            if not hidden.any():
                continue
            clean = few.run(call)
            for bad, worse in ((math.nan, math.inf), (math.inf, math.nan)):
                dirty = few.run(
                    replace(call, k=k.masked_fill(hidden, bad), v=v.masked_fill(hidden, worse))
                )
                found[f"{name} hides {worse} at {n.T}"] = [gap(dirty, clean), 1e-6]
    assert {name.split(" hides")[0] for name in found} == set(HIDING)
    return found


def run_seen() -> Report:
    """What is not finite makes NaN of the rows that see it, and of no others, in all answers."""
    import torch
    from decode_cases import MASKS, SIZES, make_inputs

    from regard.ops import Wants
    from regard.ops import decode as few
    from regard.ops import observe as observe_it
    from regard.ops.call import make_call

    found: Report = {}
    n = SIZES[3]
    wants = Wants(lse=True, entropy=True, peak=True, distance=True)
    for name in ("causal", "placed", "given whole"):
        for which in range(3):
            for bad in (math.nan, math.inf):
                inputs, at = make_inputs(n)
                inputs[which][1, 0, -2, 1] = bad
                mask = MASKS[name](n, at)
                ours = few.observe(replace(make_call(*inputs, mask=mask), wants=wants))
                known = observe_it(*inputs, mask=mask, wants=wants, backend="reference")
                assert known.output is not None and known.output.isnan().any()
                assert ours.peak is not None and known.peak is not None
                wrong = (ours.output.isnan() != known.output.isnan()).sum()
                for what in ("lse", "entropy", "distance"):
                    wrong += (getattr(ours, what).isnan() != getattr(known, what).isnan()).sum()
                wrong += (ours.peak.weight.isnan() != known.peak.weight.isnan()).sum()
                wrong += (ours.peak.key != known.peak.key).sum()
                found[f"{name}: {bad} in {'qkv'[which]}"] = [float(wrong), 0.0]
                assert torch.isfinite(ours.output[0]).all()
    return found


def run_unread() -> Report:
    """Keys out of a window, or beyond a length, are not read at all: memory may end there."""
    import torch
    from decode_cases import SIZES, make_inputs

    from regard.ops import Causal, Lengths, Window
    from regard.ops import decode as few
    from regard.ops.call import make_call
    from regard.ops.kernels import decode

    n = SIZES[0]
    (q, k, v), _ = make_inputs(n)
    masks = {
        "window": (Causal() & Window(6, None), slice(n.S - 7, n.S)),
        "length": (Lengths(torch.tensor([9])), slice(0, 9)),
        "length left": (Lengths(torch.tensor([9]), side="left"), slice(n.S - 9, n.S)),
        "length beyond the last": (Lengths(torch.tensor([n.S])), slice(0, n.S)),
    }
    found: Report = {}
    for name, (mask, keys) in masks.items():
        k_bad, v_bad = torch.full_like(k, math.nan), torch.full_like(v, math.nan)
        k_bad[:, :, keys], v_bad[:, :, keys] = k[:, :, keys], v[:, :, keys]
        call = make_call(q, k_bad, v_bad, mask=mask)
        assert few.find_rule(call.rule, q.device).added is None
        plain = few.run(make_call(q, k[:, :, keys], v[:, :, keys]))
        found[f"{name} is all that is read"] = [gap(few.run(call), plain), 1e-6]
    # On a GPU nobody looks whether lengths are right; what lies outside is not touched.
    for counts in (n.S + 50, -3):
        rule = decode.KeyRule(counts=torch.tensor([counts]), side=2)
        ours = decode.attend((q, k, v), rule, (0.3, None)).output
        plain = few.run(make_call(q, k, v, scale=0.3)) if counts > 0 else torch.zeros_like(ours)
        found[f"a length of {counts}"] = [gap(ours, plain), 1e-6]
    return found


def run_layouts() -> Report:
    """Any strides, of every input and term."""
    import torch
    from decode_cases import SIZES, make_inputs
    from layouts import lay_out

    from regard.ops import ALiBi, Causal
    from regard.ops import decode as few
    from regard.ops.call import make_call

    found: Report = {}
    n = SIZES[1]._replace(H=3, G=1, S=17, D=6, E=6)
    inputs, at = make_inputs(n)
    slopes, sinks = torch.rand(2 * n.H)[::2], torch.randn(3 * n.H)[1::3]
    for layout in LAYOUTS:
        laid = [lay_out(x, layout) for x in inputs]
        queries = lay_out(at[0][:, None, :, None], "heads last")[:, 0, :, 0].int()
        keys = at[1].t().contiguous().t().to(torch.int16)
        rule = {"mask": Causal().at(queries, keys), "bias": ALiBi(slopes=slopes).at(queries, keys)}
        ours = few.run(make_call(*laid, **rule, sinks=sinks))
        straight = [x.contiguous() for x in laid]
        rule = {"mask": Causal().at(*at), "bias": ALiBi(slopes=slopes.contiguous()).at(*at)}
        plain = few.run(make_call(*straight, **rule, sinks=sinks.contiguous()))
        found[f"laid out: {layout}"] = [gap(ours, plain), 0.0]
    return found


def run_alone() -> Report:
    """Each answer alone is what it is among all, and the output is the same bits without any."""
    import torch
    from decode_cases import MASKS, SIZES, make_inputs

    from regard.ops import Wants
    from regard.ops import decode as few
    from regard.ops.call import make_call
    from regard.ops.kernels import decode
    from regard.ops.reference import score

    n = SIZES[3]
    inputs, at = make_inputs(n)
    mass = torch.arange(n.S) % 3 == 0
    flags: dict[str, Any] = {"lse": True, "entropy": True, "peak": True, "distance": True}
    flags["mass"] = mass
    found: Report = {}
    for name in ("causal", "placed window", "padding"):
        call = make_call(*inputs, mask=MASKS[name](n, at))
        every = few.observe(replace(call, wants=Wants(**flags)))
        blind = replace(call, v=call.v[..., :0], wants=Wants(**flags))
        unmixed = few.observe(blind)
        assert unmixed.output is not None and unmixed.output.shape[3] == 0
        assert every.output is not None and every.peak is not None and unmixed.peak is not None
        found[f"{name} watched"] = [gap(few.run(call), every.output), 0.0]
        found[f"{name} blind peak"] = [gap(unmixed.peak.weight, every.peak.weight), 0.0]
        for what, flag in flags.items():
            alone = few.observe(replace(call, wants=Wants(**{what: flag})))
            others = [getattr(alone, other) for other in flags if other != what]
            assert others == [None] * len(others)
            pair = [getattr(seen, what) for seen in (alone, every)]
            if what == "peak":
                assert torch.equal(pair[0].key, pair[1].key)
                pair = [peak.weight for peak in pair]
            found[f"{name} {what} alone"] = [gap(*pair), 0.0]
        rule = few.find_rule(call.rule, call.q.device)
        numbers = call.rule.factor(n.D), None
        stats = decode.attend((call.q, call.k, call.v), rule, numbers, asked=decode.PEAK).stats
        assert stats is not None
        highest = score(call.q, call.k, call.rule).amax(-1)
        assert torch.equal(stats[1].isinf(), highest.isinf())
        finite = highest.isfinite()
        found[f"{name} logit"] = [gap(stats[1][finite], highest[finite]), 1e-5]
    return found


def run_graphs() -> Report:
    """The operator in a compiled graph, and by torch's own checks of operators."""
    import torch
    from decode_cases import MASKS, SIZES, make_inputs

    from regard.ops import Wants
    from regard.ops import decode as few
    from regard.ops.call import make_call
    from regard.ops.kernels import decode

    n = SIZES[2]
    inputs, at = make_inputs(n)
    wants = Wants(lse=True, peak=True)
    found: Report = {}
    for name in ("padding", "placed window", "given whole"):
        mask = MASKS[name](n, at)

        def step(q: Any, k: Any, v: Any, mask: Any = mask) -> Any:
            seen = few.observe(replace(make_call(q, k, v, mask=mask), wants=wants))
            return seen.output, seen.lse, seen.peak

        eager = step(*inputs)
        graph = torch.compile(step, fullgraph=True, backend="aot_eager")(*inputs)
        assert torch.equal(graph[2].key, eager[2].key)
        assert graph[0].stride() == eager[0].stride()
        pairs = zip(graph[:2], eager[:2], strict=True)
        found[f"{name} in a graph"] = [max(gap(*pair) for pair in pairs), 0.0]
    keys = torch.arange(n.S)[None]
    terms = [torch.tensor([[1, 5, 9]]), keys, None, None, None, None, torch.zeros(n.H)]
    terms += [None, None]
    every = decode.LSE | decode.PEAK
    given = (*inputs, terms, [4, 0, 1, 0, every], [0.5, 0.0])
    passed = torch.library.opcheck(decode._decode_op, given, raise_exception=False)
    found["opcheck"] = [float(sum(said != "SUCCESS" for said in passed.values())), 0.0]
    return found


def run_real_tiles() -> Report:
    """Tiles as a GPU has them: a short cache by one program, a longer one in parts."""
    import torch
    from decode_cases import judge_output
    from plain import plain

    from regard.ops import Causal, Window, attention
    from regard.ops import decode as few
    from regard.ops.call import make_call
    from regard.ops.kernels import decode

    found: Report = {}
    generator = torch.Generator().manual_seed(5)
    for S, T in ((201, 1), (701, 5)):
        q, k, v = (
            torch.randn(1, h, t, 64, generator=generator) for h, t in ((4, T), (1, S), (1, S))
        )
        n_parts = decode.tiles(1, 4 * T, S, (64, 64), 4).parts
        assert (n_parts == 1) == (S == 201)
        at = torch.arange(S - T, S)[None], torch.arange(S)[None]
        for mask in (None, Causal() & Window(100, None), Causal().at(*at)):
            ours = few.run(make_call(q, k, v, mask=mask))
            wide = [x.double() for x in (q, k, v)]
            truth = attention(*wide, mask=mask, backend="reference")
            call = make_call(q, k, v, mask=mask).rule
            seen = None if call.mask is None else call.mask.dense(call.shape)
            pair = judge_output(ours, plain(q, k, v, seen)[0], truth)
            found[f"{S} keys, {n_parts} parts, {mask}"] = [*pair]
    return found


@pytest.fixture(scope="module")
def report() -> Any:
    return run_interpreted(Path(__file__))


def test_few_queries_equal_the_reference_in_every_case(report: Report) -> None:
    wrong = {name: pair for name, pair in report.items() if not pair[0] <= pair[1]}
    assert not wrong, wrong
    assert len(report) > 7 * len(CASES) + len(LAYOUTS) + 2 * len(HIDING)


if __name__ == "__main__":
    run_cases()
