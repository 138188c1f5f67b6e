"""Positions: numbers worked by hand, numbers of published models, and what must always hold."""

import copy
import math
from typing import Any

import pytest
import torch
from rounding import assert_within, bound_sum
from torch import Tensor

from regard.positions import (
    DynamicNTK,
    Learned,
    Linear,
    Llama3,
    LongRoPE,
    Rotary,
    RotaryConfig,
    Sinusoidal,
    YaRN,
    alibi_slopes,
    count_positions,
    scaling_from_dict,
    sinusoidal,
    t5_bucket,
)

B, H, T, D = 2, 3, 7, 10  # a head that turns whole is even; everything else is prime

SHORT, LONG = (1.0, 1.1, 1.2, 1.3, 1.4), (2.0, 3.0, 5.0, 7.0, 11.0)
# For R = 5 pairs and texts of T = 7 tokens, each with something to do.
SCALINGS = [
    None,
    Linear(factor=3.0),
    DynamicNTK(factor=2.0, original_max_len=5),
    YaRN(factor=4.0, original_max_len=211),
    Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=211),
    LongRoPE(short_factor=SHORT, long_factor=LONG, original_max_len=5, factor=3.0),
]
every_scaling = pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: type(s).__name__)
every_pairing = pytest.mark.parametrize("pairing", ["halves", "neighbours"])


def make_rotary(**fields: Any) -> Rotary:
    return Rotary(RotaryConfig(**{"head_dim": D, **fields}))


def read_frequencies(rotary: Rotary, length: int | None = None) -> Tensor:
    """The angles of position 1, from the phases alone."""
    cos, sin = rotary.phases(torch.tensor([1]), length=length)
    return torch.atan2(sin, cos)[0]


def close(left: Tensor, right: Any, atol: float = 1e-5) -> None:
    right = torch.as_tensor(right, dtype=left.dtype)
    torch.testing.assert_close(left, right, atol=atol, rtol=0)


def test_sinusoid_at_position_one_of_width_eight_is_the_textbook_row() -> None:
    row = [0.8415, 0.5403, 0.0998, 0.9950, 0.0100, 1.0000, 0.0010, 1.0000]
    close(sinusoidal(3, 8)[1], row, atol=6e-5)  # cos 0.01 is 0.99995000, the others are nearer
    assert sinusoidal(3, 8).dtype == torch.float32


def test_sinusoid_of_odd_width_ends_with_a_sine() -> None:
    # 10000^(-2/5) = 0.0251189, 10000^(-4/5) = 0.000630957
    row = [0.841471, 0.540302, 0.025116, 0.999685, 0.000631]
    close(sinusoidal(2, 5)[1], row, atol=1e-6)
    close(sinusoidal(2, 1), [[0.0], [math.sin(1.0)]], atol=1e-6)


@pytest.mark.parametrize(("dim", "order"), [(6, [0, 2, 4, 1, 3, 5]), (5, [0, 2, 4, 1, 3])])
def test_sinusoid_in_halves_has_the_sines_first(dim: int, order: list[int]) -> None:
    assert torch.equal(sinusoidal(7, dim, layout="halves"), sinusoidal(7, dim)[:, order])


def test_sinusoid_of_given_positions_is_the_tables_rows() -> None:
    positions = torch.tensor([[3, 0, 11], [5, 5, 2]])
    assert torch.equal(Sinusoidal(7)(positions), sinusoidal(13, 7)[positions])
    assert torch.equal(Sinusoidal(7)(positions[0]), sinusoidal(13, 7)[positions[0]])
    assert sinusoidal(0, 7).shape == (0, 7)


def test_sinusoid_and_rotary_are_exact_at_position_one_million_and_three() -> None:
    angles, far = [1_000_003 * 10000 ** (-2 * i / 6) for i in range(3)], torch.tensor([1_000_003])
    expected = [*map(math.sin, angles), *map(math.cos, angles)]
    close(Sinusoidal(6, layout="halves")(far)[0], expected, atol=1e-6)
    cos, sin = make_rotary(head_dim=6).phases(far)
    close(torch.cat((sin[0], cos[0])), expected, atol=1e-6)


def test_sinusoid_is_added_in_float32_and_rounded_once() -> None:
    x_btc, positions = torch.randn(B, T, 5).bfloat16(), torch.arange(T)
    module = Sinusoidal(5).bfloat16()
    expected = (x_btc.float() + sinusoidal(T, 5)).bfloat16()
    assert torch.equal(module.add(x_btc, positions), expected)
    assert module.add(x_btc.double(), positions).dtype == torch.float64


def test_learned_positions_read_their_row_behind_the_offset() -> None:
    module = Learned(11, 3, offset=2)
    assert module.table.weight.shape == (13, 3)
    positions = torch.tensor([[0, 10], [4, 4]], dtype=torch.int32)
    assert torch.equal(module(positions), module.table.weight[positions.long() + 2])
    x_btc = torch.randn(2, 2, 3)
    assert torch.equal(module.add(x_btc, positions), x_btc + module(positions))


@pytest.mark.parametrize("position", [11, -1])
@pytest.mark.parametrize("module", [Learned(11, 3, offset=2), Sinusoidal(3, max_len=11)])
def test_a_position_out_of_range_is_refused_with_its_number(module: Any, position: int) -> None:
    with pytest.raises(ValueError, match=rf"position {position} is outside max_len 11"):
        module(torch.tensor([3, position, 5]))
    assert module(torch.tensor([10, 0])).shape == (2, 3)
    assert module(torch.tensor([], dtype=torch.long)).shape == (0, 3)


def test_learned_positions_are_not_looked_at_while_compiling_or_inside_vmap() -> None:
    module = Learned(11, 3, offset=2)
    positions = torch.tensor([[1, 10, 4], [0, 7, 7]])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(positions), module(positions))
    assert torch.equal(torch.func.vmap(module)(positions), module(positions))
    assert Learned(11, 3, device="meta")(positions.to("meta")).shape == (2, 3, 3)


def test_padding_on_either_side_leaves_the_positions_of_real_tokens() -> None:
    real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    positions = count_positions(real)
    assert positions[0].tolist() == [0, 0, 0, 1, 2]
    assert positions[real].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="bool"):
        count_positions(real.long())


@pytest.mark.parametrize(
    ("pairing", "turned"),
    [
        ("halves", [-1.984111, 1.590675, 2.462378, 4.179684]),  # (1, 3) by 1, (2, 4) by 0.1
        ("neighbours", [-1.142640, 1.922076, 2.585679, 4.279517]),  # (1, 2) by 1, (3, 4) by 0.1
    ],
)
def test_rotary_turns_four_numbers_as_worked_by_hand(pairing: str, turned: list[float]) -> None:
    rotary = make_rotary(head_dim=4, base=100.0, pairing=pairing)
    x_bhtd = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(1, 1, 1, 4)
    close(rotary.rotate(x_bhtd, torch.tensor([1]))[0, 0, 0], turned, atol=2e-6)


@every_pairing
@every_scaling
def test_the_product_of_query_and_key_knows_only_their_distance(scaling: Any, pairing: str) -> None:
    rotary = make_rotary(scaling=scaling, pairing=pairing)
    q_bhtd, k_bhtd = torch.randn(2, B, H, 1, D, dtype=torch.float64)

    def score(i: int, j: int) -> Tensor:
        q = rotary.rotate(q_bhtd, torch.tensor([i]), length=101)
        return (q * rotary.rotate(k_bhtd, torch.tensor([j]), length=101)).sum(-1)

    close(score(5, 2), score(97, 94))
    close(score(2, 5), score(94, 97))
    assert not torch.allclose(score(5, 2), score(5, 3), atol=1e-3)
    assert not torch.allclose(score(5, 2), score(2, 5), atol=1e-3)


@every_pairing
def test_rotary_keeps_every_length_and_leaves_position_zero(pairing: str) -> None:
    rotary, x_bhtd = make_rotary(pairing=pairing), torch.randn(B, H, T, D)
    turned = rotary.rotate(x_bhtd, torch.arange(T) * 31)
    close(turned.norm(dim=-1), x_bhtd.norm(dim=-1))
    assert torch.equal(turned[:, :, 0], x_bhtd[:, :, 0])
    assert not torch.allclose(turned[:, :, 1], x_bhtd[:, :, 1], atol=0.1)


def test_the_two_pairings_are_one_permutation_apart() -> None:
    x_bhtd, positions = torch.randn(B, H, T, 13), torch.arange(T)
    halves = make_rotary(head_dim=13, rotary_dim=6)
    neighbours = make_rotary(head_dim=13, rotary_dim=6, pairing="neighbours")
    order = [0, 3, 1, 4, 2, 5, *range(6, 13)]  # neighbours' place r holds halves' place order[r]
    expected = halves.rotate(x_bhtd, positions)[..., order]
    assert torch.equal(neighbours.rotate(x_bhtd[..., order], positions), expected)


@every_pairing
def test_partial_rotary_turns_only_its_first_numbers(pairing: str) -> None:
    x_bhtd, positions = torch.randn(B, H, T, 13), torch.arange(T)
    turned = make_rotary(head_dim=13, rotary_dim=6, pairing=pairing).rotate(x_bhtd, positions)
    small = make_rotary(head_dim=6, pairing=pairing).rotate(x_bhtd[..., :6], positions)
    assert torch.equal(turned[..., :6], small)
    assert torch.equal(turned[..., 6:], x_bhtd[..., 6:])


@every_scaling
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotary_phases_stay_float32_inside_autocast_and_casts(scaling: Any, dtype: Any) -> None:
    positions = torch.arange(T) + 4093
    expected = make_rotary(scaling=scaling).phases(positions)
    with torch.device("meta"):
        built_on_meta = make_rotary(scaling=scaling)
    for rotary in (
        make_rotary(scaling=scaling).to(dtype),
        built_on_meta.to_empty(device="cpu").to(dtype),
        copy.deepcopy(make_rotary(scaling=scaling)),
    ):
        with torch.autocast("cpu", dtype=dtype):
            phases = rotary.phases(positions)
        assert phases.cos.dtype == phases.sin.dtype == torch.float32
        assert torch.equal(phases.cos, expected.cos)
        assert torch.equal(phases.sin, expected.sin)
        assert rotary.state_dict() == {} and not list(rotary.buffers())


@every_pairing
def test_half_types_are_turned_in_float32_and_rounded_once(pairing: str) -> None:
    rotary, positions = make_rotary(rotary_dim=6, pairing=pairing), torch.arange(T) + 997
    for dtype in (torch.bfloat16, torch.float16):
        x_bhtd = torch.randn(B, H, T, D).to(dtype)
        expected = rotary.rotate(x_bhtd.float(), positions).to(dtype)
        assert torch.equal(rotary.rotate(x_bhtd, positions), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(rotary.rotate(x_bhtd, positions), expected)
            assert rotary.rotate(x_bhtd.double(), positions).dtype == torch.float64


@every_pairing
def test_rotary_gradients_are_exact_to_second_order(pairing: str) -> None:
    rotary = make_rotary(head_dim=5, rotary_dim=4, pairing=pairing)
    x_bhtd = torch.randn(1, 2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert rotary.rotate(x_bhtd, torch.arange(3)).dtype == torch.float64
    assert torch.autograd.gradcheck(lambda x: rotary.rotate(x, torch.arange(3)), x_bhtd)
    assert torch.autograd.gradgradcheck(lambda x: rotary.rotate(x, torch.arange(3)) ** 3, x_bhtd)


@every_scaling
def test_rotary_compiles_as_one_graph(scaling: Any) -> None:
    torch._dynamo.reset()
    rotary = make_rotary(scaling=scaling)
    compiled = torch.compile(rotary, fullgraph=True, backend="aot_eager")
    for n_tokens in (7, 11):
        x_bhtd = torch.randn(B, H, n_tokens, D, requires_grad=True)
        positions = torch.arange(n_tokens)
        for length in (None, n_tokens + 13):
            plain = rotary(x_bhtd, positions, length=length)
            close(compiled(x_bhtd, positions, length=length), plain)


@every_scaling
def test_rotary_under_vmap_and_grad_is_row_by_row(scaling: Any) -> None:
    rotary = make_rotary(scaling=scaling)
    x_nbhtd, positions = torch.randn(5, B, H, T, D), torch.randint(0, 23, (5, T))
    expected = torch.stack([rotary.rotate(x, p) for x, p in zip(x_nbhtd, positions, strict=True)])
    close(torch.func.vmap(rotary.rotate)(x_nbhtd, positions), expected)
    grad = torch.func.grad(lambda x: rotary.rotate(x, positions[0]).square().sum())(x_nbhtd[0])
    amplitude = 1.0 if scaling is None else scaling.amplitude
    close(grad, 2 * amplitude**2 * x_nbhtd[0])


def bound_turned(x: Tensor, scaling: Any) -> float:
    """How far two right turns may differ, whose sines and cosines were made in other shapes.

    These lie within one rounding of the truth each, and a turned number is two of them times two
    numbers of x: two terms, each a product.
    """
    amplitude = 1.0 if scaling is None else scaling.amplitude
    return bound_sum(2, 2 * amplitude * x.abs().max())


@every_scaling
def test_no_row_depends_on_another_row(scaling: Any) -> None:
    rotary = make_rotary(scaling=scaling)
    x_bhtd = torch.randn(3, H, T, D)
    positions = torch.stack((torch.arange(T) - 4, torch.arange(T), torch.arange(T) + 11))
    together = rotary.rotate(x_bhtd, positions)
    for b in range(3):
        alone = rotary.rotate(x_bhtd[b : b + 1], positions[b])
        assert_within(together[b : b + 1], alone, bound_turned(x_bhtd, scaling))
    shared = rotary.rotate(x_bhtd, positions[1:2].int())
    assert torch.equal(shared, rotary.rotate(x_bhtd, positions[1]))
    # Phases made once serve every layer.
    assert torch.equal(rotary(x_bhtd, rotary.phases(positions)), together)
    assert torch.equal(rotary(x_bhtd, rotary.phases(positions[1])), shared)


@every_scaling
def test_rotary_forgets_what_it_has_seen(scaling: Any) -> None:
    rotary, x_bhtd = make_rotary(scaling=scaling), torch.randn(B, H, T, D)
    short = rotary.rotate(x_bhtd, torch.arange(T))
    rotary.rotate(torch.randn(B, H, 31, D), torch.arange(31))
    assert torch.equal(rotary.rotate(x_bhtd, torch.arange(T)), short)
    # So one step of decoding is told the length of its text, as a number or one for each row.
    for length in (T, torch.tensor(T), torch.tensor([T, T])):
        step = rotary.rotate(x_bhtd[:, :, 3:4], torch.tensor([[3], [3]]), length=length)
        assert_within(step, short[:, :, 3:4], bound_turned(x_bhtd, scaling))


@every_scaling
@every_pairing
def test_rotary_takes_views_and_nothing_at_all(scaling: Any, pairing: str) -> None:
    rotary = make_rotary(scaling=scaling, pairing=pairing)
    view = torch.randn(B, T, H, D).transpose(1, 2)
    turned = rotary.rotate(view, torch.arange(T))
    assert torch.equal(turned, rotary.rotate(view.contiguous(), torch.arange(T)))
    assert rotary.rotate(torch.zeros(B, H, 0, D), torch.arange(0)).shape == (B, H, 0, D)
    nobody = torch.zeros(0, T, dtype=torch.long)
    assert rotary.rotate(torch.zeros(0, H, T, D), nobody).shape == (0, H, T, D)


ORIGINAL = "original_max_position_embeddings"
CONFIGS: list[dict[str, Any]] = [
    {"type": "default"},
    {"type": "linear", "factor": 3.0},
    {"type": "dynamic", "factor": 2.0},
    {"type": "yarn", "factor": 4.0, ORIGINAL: 211},
    {"type": "yarn", "factor": 4.0, ORIGINAL: 211, "truncate": False}
    | {"beta_fast": 23.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 0.3},
    {"type": "llama3", "factor": 8.0, ORIGINAL: 211}
    | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [2.0, 3.0, 5.0]}
    | {ORIGINAL: 17},
]
# What transformers 5.22 makes of q at position 41, then of k at position 29, of 43 tokens.
PUBLISHED = """
-0.17642  0.79883  1.40593 -2.05399 -0.78222  1.12843
 1.07987 -1.16285  2.04293  0.28961  0.52227 -0.62366
-1.55602 -0.50913  1.46991  1.35233 -0.99538  1.04373
 1.09066 -0.31697  2.01518 -0.24591  1.23472 -0.70819
-0.17642 -0.18093  1.47788 -2.05399 -1.10330  1.03241
 1.07987 -0.57816  2.01131  0.28961  1.13610 -0.71913
-0.20088  0.10460  1.68239 -2.33873 -1.26872  1.17607
 1.22958 -0.87134  2.29032  0.32975  1.16084 -0.81830
-0.18582 -0.24261  1.55621 -2.16334 -1.15229  1.08787
 1.13736 -0.57058  2.11856  0.30502  1.21535 -0.75693
-0.17642 -0.59307  1.48887 -2.05399 -0.94777  1.01650
 1.07987 -0.24102  2.00580  0.28961  1.25176 -0.73436
-2.48155 -0.62133  1.80871  0.41406 -1.21473  1.25252
-0.13732 -0.38683  2.45198 -1.35749  1.50681 -0.88471
"""


@pytest.mark.parametrize("n", range(len(CONFIGS)))
def test_rotary_turns_queries_and_keys_as_the_published_models_do(n: int) -> None:
    scaling = scaling_from_dict(CONFIGS[n], max_len=17 if CONFIGS[n]["type"] == "dynamic" else 68)
    rotary = make_rotary(head_dim=6, scaling=scaling)
    q_d = torch.tensor([0.5, -1.0, 1.5, 2.0, -0.5, 1.0])
    k_d = torch.tensor([-1.0, 0.25, 2.0, 0.5, 1.25, -0.75])
    q_bhtd = rotary.rotate(q_d.expand(1, 1, 43, 6), torch.arange(43))
    k_bhtd = rotary.rotate(k_d.expand(1, 1, 1, 6), torch.tensor([29]), length=43)
    expected = torch.tensor([float(number) for number in PUBLISHED.split()]).view(7, 2, 6)[n]
    close(torch.stack((q_bhtd[0, 0, 41], k_bhtd[0, 0, 0])), expected, atol=3e-5)


@pytest.mark.parametrize("read", CONFIGS, ids=lambda read: read["type"])
def test_a_config_is_read_alike_under_both_of_its_keys(read: dict[str, Any]) -> None:
    newer = {"rope_type" if key == "type" else key: value for key, value in read.items()}
    newer |= {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "attention_factor": None}
    assert scaling_from_dict(newer, max_len=68) == scaling_from_dict(read, max_len=68)
    assert (scaling_from_dict(read, max_len=68) is None) == (read["type"] == "default")


def test_lengths_that_a_config_leaves_out_come_from_beside_it() -> None:
    yarn = scaling_from_dict({"type": "yarn"}, max_len=68, original_max_len=17)
    assert yarn == YaRN(factor=4.0, original_max_len=17)
    pairs = {"short_factor": [1.0], "long_factor": [2.0]}
    su = scaling_from_dict({"type": "su", **pairs, ORIGINAL: 34}, max_len=68, original_max_len=17)
    assert su == LongRoPE(**pairs, original_max_len=17, factor=4.0)
    assert scaling_from_dict(None) is None and scaling_from_dict({}) is None
    tuned = {"type": "yarn", "factor": 16.0, ORIGINAL: 4096, "finetuned": True}
    assert scaling_from_dict(tuned) == YaRN(factor=16.0, original_max_len=4096)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        ({"type": "mrope"}, "'mrope' .* 'linear', 'dynamic', 'llama3', 'yarn', 'longrope'"),
        ({"type": "yarn", "rope_type": "llama3"}, "'llama3' and 'yarn'"),
        ({"factor": 2.0}, "'default' has unknown keys factor"),
        ({"full_attention": {}, "sliding_attention": {}}, "pass the dict of one kind"),
        ({"type": "default", "mrope_section": [2, 3]}, "unknown keys mrope_section"),
        ({"type": "dynamic", "factor": 2.0, "alpha": 9.0}, "unknown keys alpha; expected factor"),
        ({"type": "linear"}, "'linear' lacks factor"),
        ({"type": "dynamic", "factor": 2.0}, "'dynamic' lacks max_len"),
        ({"type": "yarn", "factor": 2.0}, f"'yarn' lacks {ORIGINAL}"),
    ],
)
def test_a_scaling_is_applied_or_refused_never_ignored(read: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        scaling_from_dict(read)


def test_scaled_frequencies_are_those_worked_by_hand() -> None:
    plain = torch.tensor([1.0, 0.0464159, 0.00215443])
    close(read_frequencies(make_rotary(head_dim=6)), plain, atol=1e-7)
    # Three times the original length and factor 2 stretch by 2 × 3 - 1 = 5: by 1, √5 and 5.
    ntk = make_rotary(head_dim=6, scaling=DynamicNTK(factor=2.0, original_max_len=11))
    close(read_frequencies(ntk, 33), plain / torch.tensor([1, 5**0.5, 5]), atol=1e-7)
    # 33.6, 1.559 and 0.07 turns in 211 tokens: fast, (1.559 - 1) / 3 = 0.18624 of the way, slow.
    llama3 = make_rotary(head_dim=6, scaling=SCALINGS[4])
    kept = torch.tensor([1, 0.1862430 + (1 - 0.1862430) / 8, 1 / 8])
    close(read_frequencies(llama3), plain * kept, atol=1e-7)


def test_the_ramp_of_yarn_is_that_worked_by_hand() -> None:
    # 32 turns at pair 0.02, one at 1.14; 2000 at 0.68, one at 3.15 (past the last); both below 0.
    ramps = {(211, 32): [0, 0.5, 1], (100_000, 2000): [0, 0.25, 0.5], (5, 32): [0, 1, 1]}
    for (original, fast), ramp in ramps.items():
        yarn = YaRN(factor=4.0, original_max_len=original, beta_fast=fast)
        expected = torch.tensor([1.0, 0.0464159, 0.00215443]) * (1 - torch.tensor(ramp) * 3 / 4)
        close(read_frequencies(make_rotary(head_dim=6, scaling=yarn)), expected, atol=1e-7)


def test_amplitudes_are_those_worked_by_hand() -> None:
    # 0.1 ln 4 + 1; (0.07 ln 4 + 1) / (0.03 ln 4 + 1); sqrt(1 + ln 4 / ln 16) = sqrt(1.5)
    assert YaRN(factor=4.0, original_max_len=211).amplitude == pytest.approx(1.1386294)
    both = YaRN(factor=4.0, original_max_len=211, mscale=0.7, mscale_all_dim=0.3)
    assert both.amplitude == pytest.approx(1.0532373)
    assert YaRN(factor=4.0, original_max_len=211, attention_factor=0.7).amplitude == 0.7
    pairs = {"short_factor": [1.0], "long_factor": [2.0], "original_max_len": 16}
    assert LongRoPE(**pairs, factor=4.0).amplitude == pytest.approx(1.5**0.5)
    assert LongRoPE(**pairs, max_len=64).amplitude == pytest.approx(1.5**0.5)
    assert LongRoPE(**pairs, attention_factor=1.3).amplitude == 1.3
    assert LongRoPE(**pairs, max_len=16).amplitude == 1.0
    cos, sin = make_rotary(scaling=YaRN(factor=4.0, original_max_len=211)).phases(torch.arange(T))
    close(cos**2 + sin**2, torch.full((T, 5), 1.1386294**2))


def test_texts_up_to_the_original_length_are_not_stretched() -> None:
    ntk = make_rotary(scaling=DynamicNTK(factor=2.0, original_max_len=11))
    plain = make_rotary().phases(torch.arange(T))
    for length, same in ((None, True), (11, True), (12, False)):
        assert torch.equal(ntk.phases(torch.arange(T), length=length).cos, plain.cos) == same
    long = make_rotary(scaling=SCALINGS[5])
    unscaled = read_frequencies(make_rotary())
    close(read_frequencies(long, 5), unscaled / torch.tensor(SHORT), atol=1e-6)
    close(read_frequencies(long, 6), unscaled / torch.tensor(LONG), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "fields", "words"),
    [
        (Sinusoidal, {"dim": 0}, "dim is 0"),
        (Sinusoidal, {"dim": 8, "layout": "mixed"}, "'interleaved', 'halves'"),
        (sinusoidal, {"length": -1, "dim": 8}, "length is -1"),
        (Learned, {"max_len": 0, "dim": 3}, "max_len is 0"),
        (RotaryConfig, {"head_dim": 7}, "rotary_dim is None with head_dim 7; expected an even"),
        (RotaryConfig, {"head_dim": 8, "rotary_dim": 5}, "rotary_dim is 5 with head_dim 8"),
        (RotaryConfig, {"head_dim": 8, "rotary_dim": 10}, "rotary_dim is 10 with head_dim 8"),
        (RotaryConfig, {"head_dim": 8, "pairing": "both"}, "'halves', 'neighbours'"),
        (RotaryConfig, {"head_dim": 2, "scaling": SCALINGS[2]}, "DynamicNTK needs two pairs"),
        (RotaryConfig, {"head_dim": 8, "scaling": SCALINGS[5]}, "5 divisors; .* 4 pairs"),
        (RotaryConfig, {"head_dim": 8, "scaling": CONFIGS[1]}, "a dict; .* scaling_from_dict"),
        (Linear, {"factor": 0.0}, "Linear.factor is 0.0"),
        (DynamicNTK, {"factor": 2.0, "original_max_len": 0}, "max_len is 0"),
        (YaRN, {"factor": math.nan, "original_max_len": 5}, "YaRN.factor is nan"),
        (YaRN, {"factor": 2.0, "original_max_len": 5, "beta_fast": 0.5}, "0.5 is below"),
        (YaRN, {"factor": 2.0, "original_max_len": 5, "mscale": 1.0}, "give both or none"),
        (Llama3, {**vars(SCALINGS[4]), "high_freq_factor": 1.0}, "is not above"),
        (LongRoPE, {**vars(SCALINGS[5]), "factor": None}, "give one of them"),
        (LongRoPE, {**vars(SCALINGS[5]), "max_len": 15}, "say the same thing"),
        (LongRoPE, {**vars(SCALINGS[5]), "long_factor": [1.0]}, "5 divisors, long_factor 1"),
    ],
)
def test_what_cannot_work_is_refused_when_made(make: Any, fields: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        make(**fields)


def test_wrong_shapes_and_types_are_refused_at_the_door() -> None:
    rotary, x_bhtd, at = make_rotary(scaling=SCALINGS[2]), torch.randn(B, H, T, D), torch.arange(T)
    narrow = make_rotary(head_dim=6).phases(at)
    refused: list[tuple[Any, Any, Any, type[Exception], str]] = [
        (x_bhtd, at.float(), None, TypeError, "whole"),
        (x_bhtd, at.expand(1, B, T), None, ValueError, r"expected \(T,\) or \(B, T\)"),
        (x_bhtd, at[:5], None, ValueError, "T=5, but x has T=7"),
        (x_bhtd, at.expand(3, T), None, ValueError, "B=3, but x has B=2"),
        (torch.randn(B, H, T, 11), at, None, ValueError, "D=11"),
        (x_bhtd[0], at, None, ValueError, "4 axes"),
        (x_bhtd.long(), at, None, TypeError, "int64"),
        (x_bhtd, narrow, None, ValueError, "R=3"),
        (x_bhtd, [phase.half() for phase in narrow], None, TypeError, "phases are torch.float16"),
        (x_bhtd, narrow, T, ValueError, "length came with phases"),
        (x_bhtd, at, torch.tensor([T, T]), ValueError, "length has shape"),
    ]
    for x, where, length, error, words in refused:
        with pytest.raises(error, match=words):
            rotary.rotate(x, where, length=length)


def test_alibi_slopes_start_at_two_to_the_minus_eight_over_n_and_interleave_beyond() -> None:
    for n_heads in (1, 2, 4, 8, 16):
        ratio = 2 ** (-8 / n_heads)
        close(alibi_slopes(n_heads), [ratio**n for n in range(1, n_heads + 1)], atol=1e-7)
    halves = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert alibi_slopes(8).tolist() == halves and alibi_slopes(8).dtype == torch.float32
    close(alibi_slopes(12), [*halves, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5], atol=1e-7)
    close(alibi_slopes(3), [2**-4, 2**-8, 2**-2], atol=1e-7)


def test_t5_buckets_are_those_worked_by_hand() -> None:
    # 16 a side: 8 exact ones, then 8 + floor(8 ln(n / 8) / ln 16), 15 at most.
    far = torch.tensor([1, 7, 8, 11, 12, 17, 23, 127, 128, 1009])
    both = [1, 7, 8, 8, 9, 10, 11, 15, 15, 15]
    assert t5_bucket(-far).tolist() == both
    assert t5_bucket(far).tolist() == [16 + bucket for bucket in both]
    # Only back: 16 exact ones, then 16 + floor(16 ln(n / 16) / ln 8), 31 at most; later keys 0.
    far = torch.tensor([1, 15, 16, 17, 20, 65, 127, 1009])
    assert t5_bucket(-far, bidirectional=False).tolist() == [1, 15, 16, 16, 17, 26, 31, 31]
    assert t5_bucket(far, bidirectional=False).tolist() == [0] * 8
    # 4 a side: 2 exact ones, then 2 + floor(2 ln(n / 2) / ln 5), 3 at most.
    near = t5_bucket(torch.arange(-7, 8), n_buckets=8, max_distance=10)
    assert near.tolist() == [3, 3, 3, 2, 2, 2, 1, 0, 5, 6, 6, 6, 7, 7, 7]
    assert near.dtype == torch.int64
