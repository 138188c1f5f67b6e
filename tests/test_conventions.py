"""docs/conventions.md is true: its drawings are what the code prints, and every convention is held.

A class here or in `test_conventions_scores.py` holds the convention that its first line names, with
answers written by hand; a heading without a class, or a class without a heading, is an error. Masks
are asked of every rendering: the dense tensor, FlexAttention's function, the weights on each
backend.
"""

from __future__ import annotations

import ast
import contextlib
import io
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.layers import MultiHeadAttention
from regard.ops import (
    ALiBi,
    Causal,
    Dense,
    DenseBias,
    Documents,
    Lengths,
    Mask,
    Prefix,
    Wants,
    Window,
    attention,
    observe,
)
from regard.ops.shape import Shape
from regard.positions import Rotary, RotaryConfig

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "conventions.md"
BACKENDS = ["reference", "blockwise", "sdpa"]
TILES = pytest.mark.parametrize("backend", ["reference", "blockwise"])


class Block(NamedTuple):
    heading: str
    language: str
    line: int
    text: str


def read_page(text: str) -> list[Block]:
    """The fenced blocks of the page, each with the heading it stands under."""
    blocks: list[Block] = []
    heading, language, start = "", "", 0
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("```"):
            if language:
                held = "".join(row + "\n" for row in lines[start:number])
                blocks.append(Block(heading, language, start + 1, held))
            language, start = ("" if language else line[3:].strip()), number + 1
        elif line.startswith("## ") and not language:
            heading = line.removeprefix("## ")
    return blocks


def run_page(blocks: list[Block]) -> dict[int, str]:
    """What each Python block prints, by its line; all share one namespace, as they read."""
    namespace: dict[str, Any] = {"__name__": "conventions"}
    printed = {}
    for block in blocks:
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as page:
                exec(compile("\n" * (block.line - 1) + block.text, str(PAGE), "exec"), namespace)
            printed[block.line] = page.getvalue()
    return printed


def wrong_drawings(blocks: list[Block], printed: dict[int, str]) -> list[str]:
    """Where a drawing is not what the code above it prints, or one of the two is missing."""
    wrong, waiting = [], ""
    for block in [*blocks, Block("the end", "python", 0, "")]:
        if block.language == "python":
            if waiting:
                wrong.append(f"before line {block.line}: printed and not drawn:\n{waiting}")
            waiting = printed.get(block.line, "")
        else:
            if block.text != waiting or not waiting:
                wrong.append(f"line {block.line}: drawn\n{block.text}but printed\n{waiting}")
            waiting = ""
    return wrong


@pytest.fixture(scope="module")
def page() -> tuple[list[Block], dict[int, str]]:
    blocks = read_page(PAGE.read_text(encoding="utf-8"))
    return blocks, run_page(blocks)


def test_every_drawing_is_what_the_code_above_it_prints(page: Any) -> None:
    blocks, printed = page
    assert sum(block.language == "text" for block in blocks) >= 20
    assert "\n".join(wrong_drawings(blocks, printed)) == ""


def test_a_drawing_that_is_wrong_in_one_place_is_noticed(page: Any) -> None:
    """Every drawing once with its last cell spoilt, once taken away, once drawn twice."""
    blocks, printed = page
    swap = {"■": "·", "·": "■"}
    for n, block in enumerate(blocks):
        if block.language != "text":
            continue
        cell = block.text.rstrip()[-1]
        spoilt = block.text.rstrip()[:-1] + swap.get(cell, "?") + "\n"
        for others in ([block._replace(text=spoilt)], [], [block, block]):
            assert len(wrong_drawings([*blocks[:n], *others, *blocks[n + 1 :]], printed)) == 1


def test_every_convention_is_drawn_and_held_by_a_test(page: Any) -> None:
    blocks, _ = page
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    told = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    held = [
        ast.get_docstring(node)
        for path in TESTS.glob("test_conventions*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test")
    ]
    assert sorted(told) == sorted(map(str, held))
    for convention in told:
        kinds = {block.language for block in blocks if block.heading == convention}
        assert kinds == {"python", "text"}, convention


def draw(mask: Mask, T: int, S: int, B: int = 1) -> list[str]:
    """Which keys each query sees, a line for each sample and query; all renderings must agree."""
    shape = Shape(B, 1, T, S)
    q, k = torch.zeros(B, 1, T, 1), torch.zeros(B, 1, S, 1)
    v = torch.eye(S).expand(B, 1, S, S)
    index = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    claim = mask.flex(shape)
    singly = [bool(claim(*at)) for at in zip(*(x.flatten() for x in index), strict=True)]
    seen = {
        "dense": mask.dense(shape).expand(shape),
        "flex": torch.tensor(singly),
        **{name: attention(q, k, v, mask=mask, backend=name) > 0 for name in BACKENDS},
    }
    drawn = {name: as_marks(x.reshape(B * T, S)) for name, x in seen.items()}
    differing = {name: lines for name, lines in drawn.items() if lines != drawn["dense"]}
    assert not differing, f"dense is {drawn['dense']}, but {differing}"
    return drawn["dense"]


def as_marks(matrix: Tensor) -> list[str]:
    return ["".join("·■"[x] for x in row) for row in matrix.tolist()]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def pairs_of(pairing: Any, rotary_dim: int | None = None) -> list[str]:
    """Which numbers of a head each number turns into, at position 1."""
    rotary = Rotary(RotaryConfig(head_dim=6, rotary_dim=rotary_dim, pairing=pairing))
    turned = rotary.rotate(torch.eye(6).view(1, 1, 6, 6), torch.ones(6, dtype=torch.int64))
    return as_marks(turned[0, 0] != 0)


class TestLayout:
    """Layout: batch, heads, tokens, width"""

    @pytest.mark.parametrize("kind", ["layers", "nn"])
    def test_a_head_owns_neighbouring_numbers_of_every_token(self, kind: str) -> None:
        B, T, H, D = 2, 5, 3, 7
        x = normal(B, T, H * D)
        if kind == "layers":
            layer = MultiHeadAttention(H * D, H, dtype=torch.float64)
            weights = layer.observe(x, wants=Wants(weights=True)).weights
            q, k = layer.q_proj(x), layer.k_proj(x)
        else:
            torchs = regard.nn.MultiheadAttention(H * D, H, batch_first=True, dtype=torch.float64)
            _, weights = torchs(x, x, x, average_attn_weights=False)
            q, k, _ = nn.functional.linear(x, torchs.in_proj_weight, torchs.in_proj_bias).chunk(
                3, -1
            )
        assert weights.shape == (B, H, T, T)
        for h in range(H):
            own = slice(h * D, (h + 1) * D)
            scores = q[..., own] @ k[..., own].mT / math.sqrt(D)
            torch.testing.assert_close(weights[:, h], scores.softmax(-1))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_view_is_as_good_as_a_copy(self, backend: str) -> None:
        packed = normal(3, 7, 3, 5, 11)  # tokens first, queries, keys and values in one
        q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
        assert not q.is_contiguous()
        seen = attention(q, k, v, mask=Causal(), backend=backend)
        assert seen.shape == (3, 5, 7, 11)
        copied = (x.contiguous() for x in (q, k, v))
        torch.testing.assert_close(seen, attention(*copied, mask=Causal(), backend=backend))


class TestGroupedHeads:
    """Grouped heads: neighbours share a key head"""

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("G", [2, 3])
    def test_neighbouring_query_heads_share_a_key_head(self, backend: str, G: int) -> None:
        H = 6
        q, k, v = normal(2, H, 5, 3), normal(2, G, 7, 3), normal(2, G, 7, 3)
        seen = attention(q, k, v, backend=backend)
        for h in range(H):
            own = slice(h * G // H, h * G // H + 1)
            alone = attention(q[:, h : h + 1], k[:, own], v[:, own], backend="reference")
            torch.testing.assert_close(seen[:, h : h + 1], alone)


class TestMask:
    """Mask: True means this query may look at this key"""

    def test_true_means_may_look(self) -> None:
        seen = torch.tensor([[True, True, False], [False, True, True]])
        assert draw(Dense(seen), T=2, S=3) == ["■■·", "·■■"]

    def test_a_float_tensor_is_no_mask_and_a_bool_tensor_no_bias(self) -> None:
        q, k, v = normal(1, 1, 1, 3), normal(1, 1, 2, 3), normal(1, 1, 2, 3)
        with pytest.raises(TypeError, match=r"bool tensor .* bias=DenseBias"):
            attention(q, k, v, mask=torch.zeros(1, 2))
        with pytest.raises(TypeError, match=r"mask=Dense\(t\), True = may look"):
            attention(q, k, v, bias=torch.ones(1, 2, dtype=torch.bool))

    def test_modules_with_torchs_names_keep_torchs_polarity(self) -> None:
        x, hidden = torch.randn(1, 2, 3), torch.tensor([[False, True], [False, False]])
        attend = regard.nn.MultiheadAttention(3, 1, batch_first=True)
        assert as_marks(attend(x, x, x, attn_mask=hidden)[1][0] > 0) == ["■·", "■■"]
        v = torch.eye(2).view(1, 1, 2, 2)
        out = regard.nn.functional.scaled_dot_product_attention(
            x[None], x[None], v, attn_mask=~hidden
        )
        assert as_marks(out[0, 0] > 0) == ["■·", "■■"]


class TestCausal:
    """Causal: the last query sits on the last key"""

    def test_the_last_query_sits_on_the_last_key(self) -> None:
        assert draw(Causal(), T=3, S=5) == ["■■■··", "■■■■·", "■■■■■"]
        assert draw(Causal(), T=1, S=3) == ["■■■"]
        assert draw(Causal(), T=3, S=3) == ["■··", "■■·", "■■■"]

    def test_queries_before_the_first_key_see_nothing(self) -> None:
        assert draw(Causal(), T=5, S=3) == ["···", "···", "■··", "■■·", "■■■"]

    def test_align_start_puts_the_first_query_on_the_first_key_as_torch_does(self) -> None:
        assert draw(Causal(align="start"), T=3, S=5) == ["■····", "■■···", "■■■··"]
        assert draw(Causal(align="start"), T=5, S=3) == ["■··", "■■·", "■■■", "■■■", "■■■"]
        q, k, v = torch.randn(1, 1, 3, 7), torch.randn(1, 1, 5, 7), torch.randn(1, 1, 5, 7)
        torchs = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(attention(q, k, v, mask=Causal(align="start")), torchs)


class TestWindow:
    """Window: two sides, self not counted"""

    def test_a_window_has_two_sides_and_does_not_count_itself(self) -> None:
        assert draw(Window(2, 1), T=5, S=5) == ["■■···", "■■■··", "■■■■·", "·■■■■", "··■■■"]

    def test_window_zero_sees_only_itself(self) -> None:
        assert draw(Window(0, 0), T=3, S=3) == ["■··", "·■·", "··■"]

    def test_none_leaves_a_side_of_the_window_open(self) -> None:
        assert draw(Window(None, 1), T=3, S=5) == ["■■■■·", "■■■■■", "■■■■■"]
        assert draw(Window(1, None), T=3, S=5) == ["·■■■■", "··■■■", "···■■"]

    def test_a_window_follows_the_last_query_to_the_last_key(self) -> None:
        assert draw(Window(1, 0), T=2, S=5) == ["··■■·", "···■■"]


class TestPadding:
    """Padding: how many keys of each sample are real"""

    def test_padding_on_the_right_leaves_the_first_keys(self) -> None:
        mask = Lengths(torch.tensor([5, 3, 0]))
        assert draw(mask, T=1, S=5, B=3) == ["■■■■■", "■■■··", "·····"]

    def test_padding_on_the_left_leaves_the_last_keys(self) -> None:
        mask = Lengths(torch.tensor([5, 3, 0]), side="left")
        assert draw(mask, T=1, S=5, B=3) == ["■■■■■", "··■■■", "·····"]

    def test_padding_speaks_of_keys_and_not_of_queries(self) -> None:
        assert draw(Lengths(torch.tensor([1])), T=3, S=3) == ["■··", "■··", "■··"]


class TestDocuments:
    """Documents: texts packed into one row do not see each other"""

    def test_packed_texts_do_not_see_each_other(self) -> None:
        ids = torch.tensor([7, 7, 7, 2, 2])
        assert draw(Documents(ids), T=5, S=5) == ["■■■··", "■■■··", "■■■··", "···■■", "···■■"]
        causal = Causal() & Documents(ids)
        assert draw(causal, T=5, S=5) == ["■····", "■■···", "■■■··", "···■·", "···■■"]

    def test_a_query_has_the_id_of_the_key_it_sits_on(self) -> None:
        assert draw(Documents(torch.tensor([7, 2, 7])), T=2, S=3) == ["·■·", "■·■"]

    def test_query_ids_are_taken_as_given(self) -> None:
        mask = Documents(torch.tensor([7, 2, 7]), query_ids=torch.tensor([2, 7, 5, 2]))
        assert draw(mask, T=4, S=3) == ["·■·", "■·■", "···", "·■·"]


class TestPrefix:
    """Prefix: everyone sees the first n keys"""

    def test_everyone_sees_the_first_n_keys(self) -> None:
        assert draw(Prefix(2), T=3, S=5) == ["■■···", "■■···", "■■···"]
        joined = Causal() | Prefix(3)
        assert draw(joined, T=5, S=5) == ["■■■··", "■■■··", "■■■··", "■■■■·", "■■■■■"]

    def test_each_sample_may_have_its_own_prefix(self) -> None:
        assert draw(Prefix(torch.tensor([2, 0])), T=1, S=3, B=2) == ["■■·", "···"]


class TestJoins:
    """Joins: & both, | either, ~ not"""

    def test_masks_join_pair_by_pair(self) -> None:
        assert draw(Causal() & Window(1, 0), T=3, S=3) == ["■··", "■■·", "·■■"]
        assert draw(Window(0, 0) | Prefix(1), T=3, S=3) == ["■··", "■■·", "■·■"]
        assert draw(~Causal(), T=3, S=3) == ["·■■", "··■", "···"]

    def test_not_binds_before_and_and_and_before_or(self) -> None:
        mask = Causal() & Window(1, 0) | Prefix(1)
        assert draw(mask, T=5, S=5) == ["■····", "■■···", "■■■··", "■·■■·", "■··■■"]
        assert draw(~Causal() & Window(0, 1), T=3, S=3) == ["·■·", "··■", "···"]

    def test_pythons_words_for_joins_are_refused(self) -> None:
        with pytest.raises(TypeError, match=r"& \| ~"):
            Causal() and Window(1, 0)
        with pytest.raises(TypeError, match=r"& \| ~"):
            not Causal()


class TestNothingToSee:
    """Nothing to see: zeros"""

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_row_with_nothing_to_see_is_zeros_and_gives_no_gradient(self, backend: str) -> None:
        q, k, v = (normal(1, 1, 3, 5).requires_grad_() for _ in range(3))
        out = attention(q, k, v, mask=Causal() & ~Window(0, 0), backend=backend)
        assert (out[0, 0, 0] == 0).all() and (out[0, 0, 1:] != 0).all()
        out.sum().backward()
        for x in (q, k, v):
            assert x.grad is not None and x.grad.isfinite().all()
        assert q.grad is not None and (q.grad[0, 0, 0] == 0).all()

    @TILES
    def test_a_row_with_nothing_to_see_has_weights_0_and_log_sum_minus_infinity(
        self, backend: str
    ) -> None:
        q, k = normal(1, 1, 3, 5), normal(1, 1, 3, 5)
        wants = Wants(lse=True, entropy=True, rows=[0, 1])
        seen = observe(q, k, None, mask=Causal() & ~Window(0, 0), wants=wants, backend=backend)
        assert seen.lse is not None and seen.rows is not None and seen.entropy is not None
        assert seen.lse[0, 0, 0] == -math.inf and seen.entropy[0, 0, 0] == 0
        assert seen.rows[0, 0].tolist() == [[0, 0, 0], [1, 0, 0]]

    def test_nothing_to_see_is_zeros_under_torchs_names_too(self) -> None:
        x, hidden = torch.randn(1, 2, 3), torch.tensor([[True, True], [False, True]])
        attend = regard.nn.MultiheadAttention(3, 1, batch_first=True, bias=False)
        out, weights = attend(x, x, x, attn_mask=hidden)
        assert (out[0, 0] == 0).all() and (out[0, 1] != 0).all()
        assert weights[0].tolist() == [[0, 0], [1, 0]]


class TestGivenPositions:
    """Given positions: keys need not lie in the order of the text"""

    def test_a_rule_follows_the_positions_it_is_given(self) -> None:
        queries, keys = torch.tensor([3, 4]), torch.tensor([4, 0, 3, 1])
        assert draw(Causal().at(queries, keys), T=2, S=4) == ["·■■■", "■■■■"]
        assert draw(Window(1, 0).at(queries, keys), T=2, S=4) == ["··■·", "■·■·"]
        rows = torch.tensor([[0, 1], [3, 4]])
        assert draw(Causal().at(rows, keys), T=2, S=4, B=2) == ["·■··", "·■·■", "·■■■", "■■■■"]
        assert draw(Causal().at(queries), T=2, S=5) == ["■■■■·", "■■■■■"]

    def test_a_key_at_a_negative_position_is_seen_by_nobody(self) -> None:
        queries, keys = torch.tensor([3, 4]), torch.tensor([4, -1, 3, -7])
        assert draw(Causal().at(queries, keys), T=2, S=4) == ["··■·", "■·■·"]
        assert draw(Window(None, None).at(queries, keys), T=2, S=4) == ["■·■·", "■·■·"]

    def test_biases_follow_given_positions_too(self) -> None:
        queries, keys = torch.tensor([3, 4]), torch.tensor([4, 0, 3])
        bias = ALiBi(slopes=torch.tensor([0.5])).at(queries, keys)
        added = bias.dense(Shape(1, 1, 2, 3))
        assert added.expand(1, 1, 2, 3)[0, 0].tolist() == [[-0.5, -1.5, 0.0], [0.0, -2.0, -0.5]]

    @pytest.mark.parametrize(
        "rule",
        [
            Lengths(torch.tensor([1])),
            Documents(torch.tensor([0, 1])),
            Dense(torch.ones(2, 2, dtype=torch.bool)),
            DenseBias(torch.zeros(2, 2)),
        ],
        ids=lambda rule: type(rule).__name__,
    )
    def test_what_speaks_of_keys_as_they_lie_refuses_positions(self, rule: Any) -> None:
        with pytest.raises(ValueError, match="by their index in memory"):
            rule.at(torch.tensor([0, 1]), torch.tensor([0, 1]))


class TestRotary:
    """Rotary: the config says which numbers are rotated together"""

    def test_halves_pair_each_number_with_the_one_half_a_head_away(self) -> None:
        assert pairs_of("halves") == ["■··■··", "·■··■·", "··■··■"] * 2
        assert pairs_of("halves", 4)[:4] == ["■·■···", "·■·■··"] * 2

    def test_neighbours_pair_each_number_with_the_next(self) -> None:
        assert pairs_of("neighbours") == ["■■····"] * 2 + ["··■■··"] * 2 + ["····■■"] * 2
        assert pairs_of("neighbours", 4)[4:] == ["····■·", "·····■"]

    def test_the_pairing_changes_the_result_and_never_the_weights(self) -> None:
        x, made = normal(1, 5, 6), {}
        pairing: Any
        for pairing in ("halves", "neighbours"):
            torch.manual_seed(0)
            config = RotaryConfig(head_dim=6, pairing=pairing)
            layer = MultiHeadAttention(6, 1, rotary=config, dtype=torch.float64)
            before = {name: value.clone() for name, value in layer.state_dict().items()}
            made[pairing] = (layer(x), before)
            assert all(torch.equal(layer.state_dict()[name], old) for name, old in before.items())
        (one, its), (other, others) = made.values()
        assert its.keys() == others.keys()
        assert all(torch.equal(its[name], others[name]) for name in its)
        assert (one - other).abs().max() > 1e-3
