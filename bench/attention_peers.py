"""What `attention_gpu.py` times: rules of attention in the words of regard and of its peers.

A `Rule` holds the arguments of `regard.attention`, and the same rule as functions of single indices
(sample, head, query, key), from which everything else is made: FlexAttention takes the functions as
they are, SDPA a dense mask rendered from them, and `formula`, which judges all of them, the scores
of a few rows in float32. So no contestant is judged by its own code.

What a peer can prepare once for a model (the block mask, the dense mask) is made with the
contestant, not in its calls.

Letters: B batch, H query heads, G key heads, T queries, S keys, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import regard

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

TOLERANCE = 0.03
"""How far a row may be from the formula, and a gradient from a peer's, as a share of its norm."""
EAGER_BYTES = 8 * 2**30
"""The largest T × S matrix that the eager formula is asked for."""
KERNELS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Sizes(NamedTuple):
    """The letters of a call."""

    B: int
    H: int
    G: int
    T: int
    S: int
    D: int

    def draw(self, device: str, sharp: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k, v; `sharp` makes the scores that many times as large."""
        make = partial(torch.randn, device=device, dtype=torch.bfloat16)
        q = make(self.B, self.H, self.T, self.D) * sharp
        return q, make(self.B, self.G, self.S, self.D), make(self.B, self.G, self.S, self.D)

    def __str__(self) -> str:
        heads = f"{self.H}" if self.H == self.G else f"{self.H} over {self.G}"
        return f"{self.B} × {self.T:,}, {heads} heads of {self.D}"


def plain_sizes(tiny: bool) -> list[Sizes]:
    """16,384 tokens in all in each row; last the grouped heads."""
    if tiny:
        return [Sizes(2, 4, 4, 48, 48, 16), Sizes(1, 4, 2, 96, 96, 16)]
    shapes = ((32, 512), (8, 2048), (1, 16384))
    rows = [Sizes(B, H, H, T, T, D) for H, D in ((32, 64), (16, 128)) for B, T in shapes]
    return rows + [Sizes(B, 32, 8, T, T, 128) for B, T in shapes[1:]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule: `ours` for regard; `sees` and `change` are FlexAttention's mask_mod and score_mod."""

    name: str
    ours: dict[str, Any]
    sees: Callable[..., Tensor] | None = None
    change: Callable[..., Tensor] | None = None
    sinks: Tensor | None = None
    by_sample: bool = False
    """Whether `sees` differs between the samples of a batch."""
    sharp: float = 1.0
    """How much larger the scores are drawn, for a rule that would not show otherwise."""
    unsaid: str = ""
    """Why a dense mask cannot say the rule."""


def see_past(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def plain_rules() -> list[Rule]:
    """Without a mask, and causal."""
    causal = Rule(name="causal", ours={"mask": regard.Causal()}, sees=see_past)
    return [Rule(name="plain", ours={}), causal]


def masking_rules(sizes: Sizes, device: str) -> list[Rule]:
    """Padding, a window, packed documents and a prefix."""
    T = sizes.T
    width = min(1024, T // 2)
    # From half full to full, which is 3/4 in the mean; a single sample is half full.
    lengths = torch.linspace(T // 2, T, sizes.B, device=device).long()
    ids = torch.arange(T, device=device) * 4 // T

    def see_real(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j < lengths[b]

    def see_near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < width)

    def see_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (ids[i] == ids[j])

    def see_prefix(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) | (j < T // 4)

    window = regard.Causal() & regard.Window(width - 1, 0)
    documents = regard.Causal() & regard.Documents(ids)
    return [
        Rule(
            name="padding",
            ours={"mask": regard.Lengths(lengths)},
            sees=see_real,
            by_sample=True,
        ),
        Rule(name=f"causal window {width:,}", ours={"mask": window}, sees=see_near),
        Rule(name="four documents, causal", ours={"mask": documents}, sees=see_document),
        Rule(
            name="prefix of a quarter, causal",
            ours={"mask": regard.Causal() | regard.Prefix(T // 4)},
            sees=see_prefix,
        ),
    ]


def scoring_rules(sizes: Sizes, device: str) -> list[Rule]:
    """ALiBi, softcap and sinks, all causal."""
    H = sizes.H
    slopes = 2.0 ** (-8.0 / H * torch.arange(1, H + 1, device=device))
    sinks = torch.randn(H, device=device)

    def forget(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j).abs()

    def cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 30.0 * torch.tanh(score / 30.0)

    causal = {"mask": regard.Causal()}
    return [
        Rule(
            name="ALiBi, causal",
            ours={**causal, "bias": regard.ALiBi(H)},
            sees=see_past,
            change=forget,
        ),
        Rule(
            name="softcap 30, causal",
            ours={**causal, "softcap": 30.0},
            sees=see_past,
            change=cap,
            sharp=8.0,
            unsaid="a mask is added to the scores and cannot cap them",
        ),
        Rule(
            name="sinks, causal",
            ours={**causal, "sinks": sinks},
            sees=see_past,
            sinks=sinks,
            unsaid="a mask is added to the scores and adds none to a row's sum",
        ),
    ]


def cache_rule(sizes: Sizes, device: str) -> Rule:
    """What one query sees of a static cache that is full: every slot, told by its position."""
    last = torch.full((sizes.B, 1), sizes.S - 1, device=device)
    slots = torch.arange(sizes.S, device=device).repeat(sizes.B, 1)
    return Rule(name="cache", ours={"mask": regard.Causal().at(last, slots)})


def indices(sizes: Sizes, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sample, head, query and key, as tensors that broadcast to (B, H, rows, S)."""
    b, h, j = (torch.arange(n, device=rows.device) for n in (sizes.B, sizes.H, sizes.S))
    return b[:, None, None, None], h[:, None, None], rows[:, None], j


def formula(q: Tensor, k: Tensor, v: Tensor, rule: Rule, rows: Tensor) -> Tensor:
    """The given rows of the output in float32, the scores of these rows whole."""
    (B, H, T, D), (G, S), n = q.shape, k.shape[1:3], rows.numel()
    grouped = q[:, :, rows].float().reshape(B, G, H // G * n, D)
    scores = (grouped @ k.float().mT / math.sqrt(D)).view(B, H, n, S)
    where = indices(Sizes(B, H, G, T, S, D), rows)
    if rule.change is not None:
        scores = rule.change(scores, *where)
    if rule.sees is not None:
        scores = scores.masked_fill(~rule.sees(*where), -math.inf)
    if rule.sinks is not None:
        scores = torch.cat((scores, rule.sinks[:, None, None].expand(B, H, n, 1)), -1)
    weights = torch.softmax(scores, -1)[..., :S]
    return (weights.reshape(B, G, H // G * n, S) @ v.float()).view(B, H, n, -1)


def check_near(found: Tensor, expected: Tensor, what: str) -> None:
    """Raise when a row of `found` is too far from the expected one."""
    expected = expected.float()
    size = expected.norm(dim=-1).clamp(min=1e-6)
    worst = ((found.float() - expected).norm(dim=-1) / size).max().item()
    if not worst <= TOLERANCE:
        raise RuntimeError(f"{what} is off by {worst:.3g} of its norm")


def refuse(reason: str) -> Attend:
    """A contestant that does not take part."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError(reason)

    return call


def make_regard(rule: Rule, **more: Any) -> Attend:
    """`regard.attention`."""
    return partial(regard.attention, **rule.ours, **more)


def make_sdpa(sizes: Sizes, rule: Rule) -> Attend:
    """SDPA with its flag; for rules without a mask, or causal."""
    return partial(
        F.scaled_dot_product_attention,
        is_causal=rule.sees is see_past,
        enable_gqa=sizes.H != sizes.G,
    )


def hold(kernel: SDPBackend, call: Attend) -> Attend:
    """SDPA held to one of its kernels."""

    def held(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            return call(q, k, v)

    return held


def render(sizes: Sizes, rule: Rule, device: str) -> Tensor:
    """Mask and bias as one bfloat16 tensor to be added: -inf where no look is allowed."""
    where = indices(sizes, torch.arange(sizes.T, device=device))
    values = torch.zeros((1, 1, 1, 1), device=device)
    if rule.change is not None:
        values = rule.change(values, *where)
    values = values.bfloat16()
    if rule.sees is not None:
        seen = rule.sees(*where)
        values = torch.where(seen[(None,) * (4 - seen.dim())], values, -math.inf)
    return values.expand(-1, -1, sizes.T, sizes.S)


def make_dense(sizes: Sizes, rule: Rule, device: str) -> Attend:
    """SDPA with the rule rendered."""
    if rule.unsaid:
        return refuse(rule.unsaid)
    return partial(F.scaled_dot_product_attention, attn_mask=render(sizes, rule, device))


def make_flex(sizes: Sizes, rule: Rule, device: str, compiled: bool) -> Attend:
    """FlexAttention with the rule's functions; a sink scales what the keys keep."""
    given: dict[str, Any] = {"enable_gqa": sizes.H != sizes.G, "score_mod": rule.change}
    if rule.sees is not None:
        n_samples = sizes.B if rule.by_sample else None
        given["block_mask"] = create_block_mask(
            rule.sees, n_samples, None, sizes.T, sizes.S, device=device
        )

    def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **more: Any) -> Tensor:
        output, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **more)
        kept = torch.sigmoid(aux.lse - sinks[:, None])
        scaled: Tensor = output * kept[..., None].to(output.dtype)
        return scaled

    run: Any = flex_attention
    if rule.sinks is not None:
        run, given["sinks"] = with_sinks, rule.sinks
    return partial(torch.compile(run, dynamic=False) if compiled else run, **given)


def make_eager(sizes: Sizes, rule: Rule, device: str) -> Attend:
    """The formula in bfloat16, its matrix whole."""
    if 2 * sizes.B * sizes.H * sizes.T * sizes.S > EAGER_BYTES:
        return refuse(f"left out where its matrix takes over {EAGER_BYTES // 2**30} GiB")
    added = None if rule.sees is None else render(sizes, rule, device)
    n_shared = sizes.H // sizes.G

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if n_shared > 1:
            k, v = k.repeat_interleave(n_shared, 1), v.repeat_interleave(n_shared, 1)
        scores = q @ k.mT / math.sqrt(sizes.D)
        return torch.softmax(scores if added is None else scores + added, -1) @ v

    return call
