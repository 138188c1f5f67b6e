"""Layers side by side in memory: the same answers, the same parameters, dropped when they move."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from interpreted import run_interpreted
from torch import Tensor, nn

from regard.layers import FeedForward, MultiHeadAttention, fused_linear
from regard.layers.fused_linear import FusedLinear, run_fused, trusting


def make_layers(*biases: bool) -> list[nn.Linear]:
    sizes = (5, 3, 7)
    return [nn.Linear(11, n, bias) for n, bias in zip(sizes, biases, strict=True)]


def test_each_layer_answers_as_before_and_its_weight_is_a_part_of_the_whole() -> None:
    for biases in ((True, True, True), (False, False, False), (True, False, True)):
        layers = make_layers(*biases)
        x = torch.randn(2, 11)
        before = [layer(x) for layer in layers]
        joint = FusedLinear(layers)
        assert joint.holds()
        for layer, old, new in zip(layers, before, joint(x), strict=True):
            torch.testing.assert_close(new, old)
            torch.testing.assert_close(layer(x), old)
        start, stop = joint.weight.data_ptr(), joint.weight.data_ptr() + 4 * joint.weight.numel()
        assert all(start <= layer.weight.data_ptr() < stop for layer in layers)


def test_a_change_in_place_is_seen_and_a_replaced_weight_is_told() -> None:
    layers = make_layers(True, True, True)
    joint = FusedLinear(layers)
    x = torch.randn(2, 11)
    with torch.no_grad():
        layers[1].weight.mul_(2)
    torch.testing.assert_close(joint(x)[1], layers[1](x))
    layers[1].weight.data = layers[1].weight.clone()
    assert not joint.holds()


def test_fused_layers_give_the_same_with_and_without_gradients_moved_and_copied() -> None:
    x = torch.randn(2, 7, 12)
    attend = MultiHeadAttention(12, 6, n_kv_heads=2, causal=True)
    feed = FeedForward(12, 20, "silu", gated=True)
    for layer in (attend, feed):
        expected = layer(x)
        names = list(layer.state_dict())
        layer.fuse()
        with torch.no_grad():
            torch.testing.assert_close(layer(x), expected)
        torch.testing.assert_close(layer(x), expected)
        layer(x).sum().backward()
        assert all(p.grad is not None for p in layer.parameters())
        assert list(layer.state_dict()) == names
        twin = copy.deepcopy(layer)
        with torch.no_grad():
            torch.testing.assert_close(twin(x), expected)
            moved = layer.double()
            torch.testing.assert_close(moved(x.double()), expected.double(), atol=1e-5, rtol=0)


def test_a_compiled_layer_reads_its_own_weights_whatever_became_of_the_joint_memory() -> None:
    x, attend = torch.randn(2, 7, 12), MultiHeadAttention(12, 6, causal=True)
    attend.fuse()
    twin, saved = copy.deepcopy(attend), copy.deepcopy(attend.state_dict())
    assert twin.fused is None
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
        attend.load_state_dict({name: x * 2 for name, x in saved.items()}, assign=True)
        for layer in (twin, attend):
            torch._dynamo.reset()
            compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
            torch.testing.assert_close(compiled(x), layer(x))
        attend.fuse()
        torch._dynamo.reset()
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), attend(x))
        attend.load_state_dict(saved, assign=True)
        torch.testing.assert_close(compiled(x), attend(x))


def test_a_graph_reads_the_joint_memory_where_it_is_trusted() -> None:
    x, layers = torch.randn(2, 11), make_layers(True, True, True)
    joint, graphs = FusedLinear(layers), list[Any]()

    def run(x: Tensor) -> list[Tensor]:
        with trusting():
            return run_fused(joint, layers, x)

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        torch._dynamo.reset()
        found = torch.compile(run, backend=keep, fullgraph=True)(x)
        torch.testing.assert_close(found, run(x))
    called = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum("linear" in name for name in called) == 1 and not fused_linear.trusted


def run_cases() -> None:
    """The kernels for one row, by Triton's interpreter; errors printed as JSON."""
    import triton

    from regard.layers import matvec_kernels

    report = {}
    for dtype in (torch.float32, torch.float16):
        for n_out, n_in in ((7, 13), (8, 64), (33, 130)):
            for rows, columns in ((1, 64), (4, 32)):
                for biased in (False, True):
                    x, weight = torch.randn(n_in), torch.randn(2 * n_out, n_in) / n_in**0.5
                    bias = torch.randn(2 * n_out) if biased else None
                    x, weight = x.to(dtype), weight.to(dtype)
                    bias = None if bias is None else bias.to(dtype)
                    wide = nn.functional.linear(
                        x.double(), weight.double(), None if bias is None else bias.double()
                    )
                    for gated, expected in (
                        (False, wide[:n_out]),
                        (True, nn.functional.silu(wide[:n_out]) * wide[n_out:]),
                    ):
                        out = torch.empty(n_out, dtype=dtype)
                        plain = matvec_kernels._matvec.fn.fn
                        even = n_out % rows == 0 and n_in % columns == 0
                        plain[(triton.cdiv(n_out, rows),)](
                            x,
                            weight,
                            out if bias is None else bias,
                            out,
                            n_out,
                            n_in,
                            weight.stride(0),
                            BIAS=biased,
                            GATED=gated,
                            EVEN=even,
                            ROWS=rows,
                            COLUMNS=columns,
                        )
                        error = float((out.double() - expected).abs().max())
                        case = f"{gated} {dtype} {n_out}x{n_in} {rows} {columns} {biased}"
                        report[case] = [error, 40 * torch.finfo(dtype).eps]
    print(json.dumps(report))


def test_the_kernels_for_one_row_equal_the_layers_in_triton_s_interpreter() -> None:
    report = run_interpreted(Path(__file__))
    assert len(report) == 48
    assert not {case: pair for case, pair in report.items() if not pair[0] <= pair[1]}


if __name__ == "__main__":
    run_cases()
