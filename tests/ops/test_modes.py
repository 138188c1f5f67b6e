"""Ways of running: compiled, vectorised, differentiated twice or forward, strided.

Each is tried on the backends that take it, on a call that uses much of the rule; those that do not
take it refuse with a sentence. Autocast and types are in `test_types.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import CASES, B, H, T, draw
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from regard.ops import (
    ALiBi,
    Causal,
    DenseBias,
    Lengths,
    RelativeTable,
    Wants,
    Window,
    attention,
    backends,
    blockwise,
    explain,
    flash_cpu,
    observe,
)
from regard.ops.call import Rule
from regard.ops.dropout import keep_factor
from regard.ops.shape import Shape, Tile

BOTH = pytest.mark.parametrize("backend", ["reference", "blockwise"])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "TILE_ENTRIES", 1)
    monkeypatch.setattr(blockwise, "SMALLEST", 4)
    monkeypatch.setattr(flash_cpu, "BAND", 8)
    monkeypatch.setattr(flash_cpu, "PIECE_COST", 0)


def small(dtype: torch.dtype = torch.float64, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    made = draw(**{"b": 2, "h": 6, "g": 2, "t": 5, "s": 7, "d": 3, "e": 3, **sizes})
    return made.q.to(dtype), made.k.to(dtype), made.v.to(dtype)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


RULE: dict[str, Any] = {"mask": Causal() & Lengths(torch.tensor([6, 3])), "bias": ALiBi(6)}


class TestCompiled:
    """`torch.compile(fullgraph=True)`: a graph break would raise.

    Tracing and the graphs of forward and backward are what is ours to get right; the code that is
    generated from them is tried once, and elsewhere left out, since it takes seconds a graph.
    """

    @pytest.fixture(autouse=True)
    def fresh(self) -> None:
        torch._dynamo.reset()

    @pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa", "auto"])
    def test_compiled_equals_eager_forward_and_backward(self, backend: str) -> None:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, **RULE, backend=backend)

        one, other = leaves(*small(torch.float32)), leaves(*small(torch.float32))
        generate = "inductor" if backend == "auto" else "aot_eager"
        ours = torch.compile(run, fullgraph=True, backend=generate)(*one)
        ours.square().sum().backward()
        run(*other).square().sum().backward()
        torch.testing.assert_close(ours, run(*other))
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a.grad, b.grad)

    def test_compiled_blockwise_takes_every_feature_and_gives_learned_gradients(self) -> None:
        q, k, v = small(torch.float32)
        table, sinks = leaves(torch.randn(32, 6), torch.randn(6))

        def run(q: Tensor, table: Tensor, sinks: Tensor) -> Tensor:
            return attention(
                q,
                k,
                v,
                mask=Window(3, 1),
                bias=RelativeTable(table),
                softcap=2.0,
                sinks=sinks,
                dropout=0.2,
                seed=3,
                backend="blockwise",
            )

        ours = torch.compile(run, fullgraph=True, backend="aot_eager")(q, table, sinks)
        found = torch.autograd.grad(ours.square().sum(), (table, sinks))
        known = torch.autograd.grad(run(q, table, sinks).square().sum(), (table, sinks))
        torch.testing.assert_close(found, known)

    def test_compiled_code_takes_heads_that_lie_as_a_projection_left_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Generated code checks strides: those of the operators are the ones that were told."""
        monkeypatch.undo()
        made = [x.transpose(1, 2).contiguous() for x in small(torch.float32, t=64, s=64)]

        def run(*heads: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in heads)
            return attention(q, k, v, mask=Causal(), dropout=0.2, seed=3, backend="blockwise")

        one, other = leaves(*made), leaves(*made)
        ours, known = torch.compile(run, fullgraph=True)(*one), run(*other)
        torch.testing.assert_close(ours, known)
        for x in (ours, known):
            x.square().sum().backward()
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a.grad, b.grad)

    def test_compiled_graph_serves_other_lengths(self) -> None:
        run = torch.compile(
            lambda q, k, v: attention(q, k, v, mask=Causal(), softcap=3.0),
            fullgraph=True,
            dynamic=True,
            backend="aot_eager",
        )
        q, k, v = small(torch.float32, t=13, s=17)
        for t in (13, 5, 7):
            known = attention(q[:, :, :t], k, v, mask=Causal(), softcap=3.0)
            torch.testing.assert_close(run(q[:, :, :t], k, v), known)

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_one_compiled_graph_serves_all_lengths(
        self, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Asked in the order of a GPU too: whoever refuses must not tie the graph to one length."""
        monkeypatch.setitem(backends.ORDER, "cpu", backends.ORDER[device])
        counting = CompileCounter()  # type: ignore[no-untyped-call]

        def run(q: Tensor, lengths: Tensor) -> Tensor:
            return attention(q, q, q, mask=Causal() & Lengths(lengths))

        compiled = torch.compile(run, fullgraph=True, backend=counting, dynamic=True)
        for rows, n in ((3, 24), (5, 16), (7, 48)):
            q, lengths = torch.randn(rows, 2, n, 8), torch.arange(rows) + 2
            torch.testing.assert_close(compiled(q, lengths), run(q, lengths))
        assert counting.frame_count == 1

    def test_compiled_observe_equals_eager(self) -> None:
        wants = Wants(lse=True, entropy=True, peak=True, distance=True)
        q, k, v = small(torch.float32)

        def run(q: Tensor) -> tuple[Tensor, ...]:
            seen = observe(q, k, v, mask=Causal(), wants=wants)
            return seen.output, seen.lse, seen.entropy, seen.peak.key, seen.distance

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q), run(q))

    def test_a_rule_of_another_device_is_moved_inside_the_graph(self) -> None:
        rule = Causal() & Lengths(torch.tensor([6, 3])) & Window(3, 1).at(torch.arange(5))

        def run(x: Tensor) -> Tensor:
            made = Rule(shape=Shape(2, 6, 5, 7), mask=rule, bias=ALiBi(6) + DenseBias(x))
            return x * sum(t.device.type == "meta" for t in made.on(torch.device("meta")).tensors())

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(torch.ones(5, 7)), torch.full((5, 7), 4.0))

    def test_a_nan_reaches_its_row_and_no_other_head_when_compiled(self) -> None:
        q, k, v = small(torch.float32)
        q[0, 0, 1], v[0, 0, 5] = math.nan, math.nan
        known = attention(q, k, v, mask=Causal(), backend="reference")
        ours = torch.compile(
            lambda q, k, v: attention(q, k, v, mask=Causal()), fullgraph=True, backend="aot_eager"
        )(q, k, v)
        assert ours[known.isnan()].isnan().all()
        group = q.shape[1] // k.shape[1]
        torch.testing.assert_close(ours[:, group:], known[:, group:])
        torch.testing.assert_close(ours[1], known[1])
        assert known.isnan().any() and not known.isnan().all()


class TestTransformed:
    """`torch.func` and derivatives of derivatives."""

    @pytest.mark.parametrize("backend", ["reference", "blockwise", "auto"])
    def test_vmap_equals_a_loop(self, backend: str) -> None:
        q, k, v = (torch.stack([x, x.flip(2), -x]) for x in small())
        lengths = torch.tensor([[7, 0], [3, 4], [1, 7]])

        def run(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
            return attention(q, k, v, mask=Causal() & Lengths(n), bias=ALiBi(6), backend=backend)

        known = torch.stack([run(*x) for x in zip(q, k, v, lengths, strict=True)])
        torch.testing.assert_close(torch.func.vmap(run)(q, k, v, lengths), known)

    @pytest.mark.parametrize("backend", ["reference", "blockwise", "auto"])
    def test_gradients_of_each_sample_by_vmap_of_grad(self, backend: str) -> None:
        q, k, v = (torch.stack([x, x.flip(2)]) for x in small())

        def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, mask=Causal(), backend=backend).square().sum()

        found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
        for n in range(2):
            one = leaves(q[n], k[n], v[n])
            known = torch.autograd.grad(loss(*one), one)
            for a, b in zip(found, known, strict=True):
                torch.testing.assert_close(a[n], b)

    @BOTH
    def test_first_and_second_derivatives_of_every_input(self, backend: str) -> None:
        q, k, v = small(h=2, g=1, t=3, s=4, d=2, e=2, b=1)
        inputs = leaves(q, k, v, torch.randn(2).double(), torch.randn(3, 4).double())

        def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
            return attention(
                q, k, v, sinks=sinks, bias=bias, mask=Causal(), softcap=2.0, backend=backend
            )

        assert torch.autograd.gradcheck(run, inputs)
        assert torch.autograd.gradgradcheck(run, inputs)

    @pytest.mark.parametrize("name", ["relative table learned", "alibi learned", "everything"])
    def test_tiles_give_learned_biases_the_gradient_of_the_reference(self, name: str) -> None:
        found = []
        for backend in ("reference", "blockwise"):
            made = CASES[name]().cast(torch.float64)
            out = attention(made.q, made.k, made.v, **made.call, backend=backend)
            found.append(torch.autograd.grad(out.square().sum(), made.leaves()))
        torch.testing.assert_close(found[0], found[1])
        assert len(found[0]) > 3 and all(g.abs().sum() > 0 for g in found[0])

    @pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa"])
    def test_batched_gradients_are_those_taken_one_by_one(self, backend: str) -> None:
        inputs = leaves(*small())
        out = attention(*inputs, mask=Causal() & Lengths(torch.tensor([6, 3])), backend=backend)
        pulls = torch.randn(3, *out.shape, dtype=out.dtype)
        found = torch.autograd.grad(out, inputs, pulls, is_grads_batched=True, retain_graph=True)
        for n, pull in enumerate(pulls):
            known = torch.autograd.grad(out, inputs, pull, retain_graph=True)
            torch.testing.assert_close(tuple(g[n] for g in found), known)

    @pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
    def test_a_rule_that_was_written_to_since_gives_no_wrong_gradient(self, backend: str) -> None:
        inputs, counts = leaves(*small()), torch.tensor([6, 3])
        out = attention(*inputs, mask=Causal() & Lengths(counts), backend=backend)
        counts.fill_(7)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    def test_fused_kernels_train_with_a_rule_of_inference_mode(self) -> None:
        inputs = leaves(*small())
        with torch.inference_mode():
            counts = torch.tensor([6, 3])
        out = attention(*inputs, mask=Causal() & Lengths(counts), backend="sdpa")
        same = attention(*inputs, mask=Causal() & Lengths(counts.clone()), backend="reference")
        torch.testing.assert_close(
            torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(same.sum(), inputs)
        )

    def test_second_derivative_through_the_fused_kernel(self) -> None:
        q, k, v = leaves(*small(b=1, h=2, g=1, t=3, s=4, d=2, e=2))
        assert str(explain(q, k, v, mask=Causal())).startswith("sdpa       runs")
        assert torch.autograd.gradgradcheck(
            lambda q, k, v: attention(q, k, v, mask=Causal()), (q, k, v)
        )

    def test_forward_mode_derivative_is_the_reference(self) -> None:
        q, k, v = small()
        tangent = torch.randn_like(q)
        _, found = torch.func.jvp(lambda q: attention(q, k, v, mask=Causal()), (q,), (tangent,))
        step = 1e-6
        ends = [attention(q + s * tangent, k, v, mask=Causal()) for s in (step, -step)]
        torch.testing.assert_close(found, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-6)

    def test_hessian_runs_without_being_asked_for_a_backend(self) -> None:
        q, k, v = small(b=1, h=1, g=1, t=2, s=3, d=2, e=2)

        def loss(q: Tensor) -> Tensor:
            return attention(q, k, v).square().sum()

        known = torch.autograd.functional.hessian(loss, q)
        torch.testing.assert_close(torch.func.hessian(loss)(q), known)

    @pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
    def test_forward_mode_is_refused_in_words_where_there_is_none(self, backend: str) -> None:
        q, k, v = small()
        with pytest.raises(ValueError, match="it has no forward-mode derivative; reference has"):
            torch.func.jvp(lambda q: attention(q, k, v, backend=backend), (q,), (q,))

    def test_fused_kernels_refuse_transforms_in_words(self) -> None:
        q, k, v = small()
        with pytest.raises(ValueError, match=r"do not run inside torch\.func transforms"):
            torch.func.grad(lambda q: attention(q, k, v, backend="sdpa").sum())(q)


class TestDropout:
    """What is dropped is fixed by the seed, and the backward pass drops the same."""

    @BOTH
    def test_dropout_is_the_keep_factor_times_the_weights(self, backend: str) -> None:
        q, k, v = small()
        factor = keep_factor(torch.tensor(5), 0.3, Shape(2, 6, 5, 7), dtype=torch.float64)
        weights = observe(q, k, v, wants=Wants(weights=True)).weights
        known = (weights * factor) @ v.repeat_interleave(3, 1)
        ours = attention(q, k, v, dropout=0.3, seed=5, backend=backend)
        torch.testing.assert_close(ours, known)

    @BOTH
    def test_gradient_of_dropout_carries_the_same_factor(self, backend: str) -> None:
        inputs = leaves(*small(b=1, h=2, g=1, t=3, s=4, d=2, e=2))
        assert torch.autograd.gradcheck(
            lambda q, k, v: attention(q, k, v, dropout=0.4, seed=3, backend=backend), inputs
        )

    def test_kept_weights_grow_so_that_a_row_sums_to_one_on_average(self) -> None:
        factor = keep_factor(torch.tensor(1), 0.3, Shape(3, 5, 67, 71))
        assert factor.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
        n = factor.numel()
        assert abs(factor.mean() - 1.0) < 5 * math.sqrt(0.3 / 0.7 / n)

    def test_neighbouring_rows_keys_heads_and_seeds_are_dropped_independently(self) -> None:
        kept = keep_factor(torch.tensor(1), 0.5, Shape(2, 3, 97, 101)) > 0
        again = keep_factor(torch.tensor(2), 0.5, Shape(2, 3, 97, 101)) > 0
        n = kept.numel()
        for a, b in [
            (kept[:, :, 1:], kept[:, :, :-1]),
            (kept[..., 1:], kept[..., :-1]),
            (kept[:, 1:], kept[:, :-1]),
            (kept[1:], kept[:-1]),
            (kept, again),
        ]:
            assert abs((a == b).double().mean() - 0.5) < 5 * 0.5 / math.sqrt(n / 2)

    def test_a_tile_drops_what_the_whole_drops(self) -> None:
        shape, tile = Shape(2, 3, 11, 13), Tile(3, 7, 2, 9)
        whole = keep_factor(torch.tensor(9), 0.4, shape)
        assert torch.equal(keep_factor(torch.tensor(9), 0.4, shape, tile), whole[:, :, 3:7, 2:9])

    @pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
    @pytest.mark.parametrize("seed", [5, 2**31 - 2, 2**40 + 17])
    def test_words_of_32_bits_drop_what_words_of_64_do(
        self, seed: int, p: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        narrow = keep_factor(torch.tensor(seed), p, Shape(2, 3, 37, 41))
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert torch.equal(narrow, keep_factor(torch.tensor(seed), p, Shape(2, 3, 37, 41)))

    def test_without_a_seed_torchs_generator_decides(self) -> None:
        q, k, v = small()
        torch.manual_seed(3)
        one, other = attention(q, k, v, dropout=0.5), attention(q, k, v, dropout=0.5)
        torch.manual_seed(3)
        again = attention(q, k, v, dropout=0.5)
        assert torch.equal(one, again) and not torch.equal(one, other)

    def test_dropout_of_one_drops_everything(self) -> None:
        assert attention(*small(), dropout=1.0).abs().sum() == 0

    @pytest.mark.parametrize("backend", ["sdpa", "flex"])
    def test_kernels_that_draw_their_own_dropout_refuse_it(self, backend: str) -> None:
        with pytest.raises(ValueError, match="draws its own dropout"):
            attention(*small(torch.float32), dropout=0.1, seed=3, backend=backend)

    @pytest.mark.parametrize(
        ("backend", "reason"), [("sdpa", "dropout on CUDA alone"), ("flex", "has no dropout")]
    )
    def test_kernels_without_dropout_refuse_it(self, backend: str, reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            attention(*small(torch.float32), dropout=0.1, backend=backend)


class TestLayout:
    """Strides do not matter."""

    @pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa"])
    def test_views_of_a_packed_projection_give_what_copies_give(self, backend: str) -> None:
        packed = torch.randn(B, T, 3, H, 5, dtype=torch.float64, requires_grad=True)
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in (q, k, v)]
        ours = attention(q, k, v, mask=Causal(), backend=backend)
        torch.testing.assert_close(
            ours, attention(*copies, mask=Causal(), backend=backend), rtol=1e-12, atol=1e-12
        )
        ours.square().sum().backward()
        held = leaves(*copies)
        attention(*held, mask=Causal(), backend=backend).square().sum().backward()
        known = torch.stack([x.grad for x in held]).permute(1, 3, 0, 2, 4)
        torch.testing.assert_close(packed.grad, known)

    @pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa"])
    def test_expanded_and_reversed_views_are_read_right(self, backend: str) -> None:
        q, k, v = small()
        k_wide = k[:, :1].expand(-1, 2, -1, -1)
        known = attention(q, k_wide.clone(), v.flip(-1).clone(), backend=backend)
        torch.testing.assert_close(attention(q, k_wide, v.flip(-1), backend=backend), known)


class TestExplain:
    """The verdicts and the door."""

    def test_explain_prints_every_verdict_and_the_one_that_runs(self) -> None:
        q, k, v = small(torch.float32)
        said = str(explain(q, k, v, softcap=3.0)).splitlines()
        assert said[0] == "sdpa       refuses  torch's fused kernels have no softcap"
        assert said[1] == "blockwise  runs"
        assert said[2] == "reference  could"

    def test_an_unknown_backend_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match="auto, reference, blockwise, sdpa, flex"):
            attention(*small(), backend="fast")

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (
                {"q": torch.zeros(2, 6, 5)},
                r"q must have 4 axes \(B, H, T, D\), got shape \(2, 6, 5\)",
            ),
            ({"k": torch.zeros(2, 2, 7, 5)}, r"k .* has D=5, but q has D=3"),
            ({"v": torch.zeros(2, 2, 8, 3)}, r"v .* has S=8, but k has S=7"),
            ({"k": torch.zeros(2, 4, 7, 3)}, r"v .* has G=2, but k has G=4"),
            ({"q": torch.zeros(2, 5, 5, 3)}, "H=5 must be a multiple of the key heads G=2"),
            ({"scale": math.nan}, "scale must be a finite number"),
            ({"softcap": 0.0}, "softcap must be a finite number above 0"),
            ({"dropout": 1.5}, "dropout must lie between 0 and 1"),
            ({"sinks": torch.zeros(2)}, "sinks .* has H=2, but q has H=6"),
            (
                {"mask": torch.ones(4, 7, dtype=torch.bool)},
                r"mask must broadcast to .* \(2, 6, 5, 7\)",
            ),
            ({"bias": torch.zeros(5, 6)}, r"bias must broadcast to .* got shape \(5, 6\)"),
        ],
    )
    def test_bad_input_is_refused_at_the_door_in_letters(
        self, change: dict[str, Any], said: str
    ) -> None:
        q, k, v = small(torch.float32)
        with pytest.raises(ValueError, match=said):
            attention(**{"q": q, "k": k, "v": v, **change})

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"mask": torch.zeros(5, 7)}, "A float tensor added to the scores is a bias"),
            ({"bias": torch.ones(5, 7, dtype=torch.bool)}, "a bool tensor is a mask, not a bias"),
            ({"bias": Causal()}, "Causal is a mask: pass it as mask="),
            ({"mask": ALiBi(6)}, "ALiBi is a bias: pass it as bias="),
            ({"q": torch.zeros(2, 6, 5, 3).int()}, "q must be one of float64"),
            ({"scale": torch.tensor(1.0)}, "scale must be a number, got a tensor"),
            ({"scale": "1/8"}, "scale must be a number, got '1/8'"),
            ({"dropout": "0.1"}, "dropout must be a number from 0 to 1, got '0.1'"),
            ({"dropout": 0.5, "seed": 1.5}, "seed must be a whole number .* got 1.5"),
            ({"mask": "causal"}, "or a Mask such as Causal.*; got a str"),
            ({"mask": Causal}, "got the class Causal; make one of it, Causal"),
            ({"bias": ALiBi}, "got the class ALiBi; make one of it, ALiBi"),
        ],
    )
    def test_the_wrong_kind_of_thing_is_refused_and_named(
        self, change: dict[str, Any], said: str
    ) -> None:
        q, k, v = small(torch.float32)
        with pytest.raises(TypeError, match=said):
            attention(**{"q": q, "k": k, "v": v, **change})

    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    @pytest.mark.parametrize("call", [attention, explain])
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
    def test_nested_tensors_are_refused_in_words(
        self, layout: torch.layout, call: Callable[..., object]
    ) -> None:
        parts = [torch.randn(n, 6, 3) for n in (5, 7)]
        nested = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)
        plain = torch.randn(2, 6, 7, 3)
        for q, k in ((nested, nested), (nested, plain), (plain, nested)):
            with pytest.raises(TypeError, match=r"got a NestedTensor: pad with t\.to_padded"):
                call(q, k, k)


@pytest.mark.parametrize("backend", ["reference", "blockwise", "auto"])
def test_a_nan_row_passes_nan_to_its_own_query_and_to_no_other(backend: str) -> None:
    q, k, v = small()
    v[0, 0, 6] = math.nan
    q, k, v = leaves(q, k, v)
    attention(q, k, v, mask=Causal(), backend=backend).sum().backward()
    bad = torch.zeros(2, 6, 5, dtype=torch.bool)
    bad[0, :3, 4] = True
    assert q.grad is not None
    assert torch.equal(q.grad.isnan().all(-1), bad) and torch.equal(q.grad.isnan().any(-1), bad)


def test_shapes_are_told_on_the_meta_device() -> None:
    q, k, v = (x.to("meta") for x in small(torch.float32, e=4))
    assert attention(q, k, v, mask=Causal(), bias=ALiBi(6)).shape == (2, 6, 5, 4)


def test_a_dense_bias_that_learns_gets_a_gradient_of_its_own_shape() -> None:
    q, k, v = small()
    for shape in [(7,), (5, 1), (6, 1, 7), (2, 1, 5, 7), (1, 6, 1, 1)]:
        found = []
        for backend in ("reference", "blockwise"):
            values = torch.ones(shape, dtype=torch.float64, requires_grad=True)
            out = attention(q, k, v, bias=DenseBias(values), mask=Window(2, 1), backend=backend)
            found.append(torch.autograd.grad(out.square().sum(), values)[0])
        assert found[0].shape == shape
        torch.testing.assert_close(found[0], found[1])
