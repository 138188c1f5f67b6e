"""Pre-norm against post-norm, by depth.

Post-norm, x = norm(x + f(x)), divides the residual stream by √(1 + σ²) after each sublayer whose
output has σ² times the stream's variance; it divides the gradient on its way down as well, 2L times
in L layers. Pre-norm, x = x + f(norm(x)), has a path from the last layer to the first without any
norm.

The text: each letter is followed by one of four letters, equally likely, and all letters are
equally frequent. So a model that does not use the letter before reaches ln 32 = 3.466 nats and no
less, which is also where a new model starts; the best possible loss is ln 4 = 1.386.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from regard import Transformer
from regard.labs.interval import mean_interval, side_of, spell_interval
from regard.labs.lab import Lab, Results
from regard.labs.parts import Run
from regard.labs.small_training import build_seeded, generator_of, train
from regard.layers import BlockConfig
from regard.models.config import EmbedConfig, HeadConfig, ModelConfig
from regard.training.config import TrainConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Order = Literal["pre", "post"]
ORDERS: tuple[Order, ...] = get_args(Order)
COLOURS = {"pre": "C0", "post": "C1"}
LETTERS, FOLLOWERS = 32, 4
UNIFORM, ENTROPY = math.log(LETTERS), math.log(FOLLOWERS)
MARGIN = 0.1 * (UNIFORM - ENTROPY)  # a loss within this of the starting loss counts as stuck


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The sizes of a run. Models of `depths` are trained with `seeds`; at each depth in `gradients`
    the gradient of `starts` untrained models is measured."""

    depths: tuple[int, ...]
    gradients: tuple[int, ...]
    seeds: int
    starts: int
    dim: int
    n_heads: int
    batch: int
    length: int
    train: TrainConfig


TINY = Setting(
    depths=(2, 12),
    gradients=(2, 6, 12),
    seeds=3,
    starts=5,
    dim=32,
    n_heads=2,
    batch=16,
    length=16,
    train=TrainConfig(steps=24, lr=1.5e-2, warmup=8),
)
FULL = Setting(
    depths=(2, 6, 12, 24, 48),
    gradients=(2, 6, 12, 24, 48),
    seeds=3,
    starts=8,
    dim=64,
    n_heads=4,
    batch=64,
    length=32,
    train=TrainConfig(steps=60, lr=6e-3, warmup=20),
)


def make_texts(n: int, length: int, seed: int, device: torch.device) -> Tensor:
    """Draw (n, length + 1) letters of this seed's Markov chain.

    Given a random cyclic order of all letters, the letter a is followed by one of the four from the
    a-th place on; so each has four that may precede it, and all are equally frequent.
    """
    drawn = generator_of(seed, device=device)
    order = torch.randperm(LETTERS, generator=drawn, device=device)
    steps = torch.randint(FOLLOWERS, (length, n), generator=drawn, device=device)
    letters = [torch.randint(LETTERS, (n,), generator=drawn, device=device)]
    for step in steps:
        letters.append(order[(letters[-1] + step) % LETTERS])
    return torch.stack(letters, 1)


def make_model(setting: Setting, order: Order, depth: int) -> Transformer:
    """Make a decoder with the library's initial weights and embeddings of variance 1."""
    dim = setting.dim
    block = BlockConfig(dim=dim, n_heads=setting.n_heads, ffn_dim=4 * dim, order=order)
    embed = EmbedConfig(positions="sinusoidal", scale=dim**0.5)
    config = ModelConfig(
        family="lab",
        vocab_size=LETTERS,
        max_len=setting.length,
        decoder=(block,) * depth,
        embed=embed,
        head=HeadConfig(tied=False),
    )
    model = Transformer(config)
    assert model.decoder_embed is not None
    nn.init.normal_(model.decoder_embed.tokens.weight, std=dim**-0.5)
    return model


def loss_of(model: nn.Module, texts: Tensor) -> Tensor:
    logits = model(texts[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())


def gradient_by_layer(
    setting: Setting, order: Order, depth: int, seed: int, device: torch.device
) -> dict[str, Any]:
    """Measure the norm of the gradient of each layer's parameters, before any step."""
    model = build_seeded(lambda: make_model(setting, order, depth), seed, depth).to(device)
    loss_of(model, make_texts(setting.batch, setting.length, seed, device)).backward()  # type: ignore[no-untyped-call]
    assert model.decoder is not None
    norms = []
    for layer in model.decoder.layers:
        gradients = [p.grad for p in layer.parameters() if p.grad is not None]
        norms.append(torch.stack([gradient.norm() for gradient in gradients]).norm())
    found = torch.stack(norms).tolist()
    return {"order": order, "depth": depth, "seed": seed, "norms": found}


def train_one(
    setting: Setting, order: Order, depth: int, warmup: bool, seed: int, device: torch.device
) -> dict[str, Any]:
    """Train once; the test loss before and after (None if it is not finite)."""
    model = build_seeded(lambda: make_model(setting, order, depth), seed, depth).to(device)
    config = replace(setting.train, warmup=setting.train.warmup if warmup else 0)
    n = config.steps * setting.batch
    texts = make_texts(n + 4 * setting.batch, setting.length, seed, device)
    batches, test = texts[:n].view(config.steps, setting.batch, -1), texts[n:]

    @torch.no_grad()
    def test_loss() -> float:
        return float(loss_of(model, test))

    found = {"order": order, "depth": depth, "warmup": warmup, "seed": seed, "start": test_loss()}
    train(model, batches.__getitem__, loss_of, config)
    loss = test_loss()
    return found | {"loss": loss if math.isfinite(loss) else None}


def measure(run: Run) -> dict[str, Any]:
    setting = TINY if run.tiny else FULL
    device = run.device
    first = list(itertools.product(ORDERS, setting.gradients, range(setting.starts)))
    trained = [
        (order, depth, warmup, seed)
        for depth in setting.depths
        for order, warmup in ways()
        for seed in range(setting.seeds)
    ]
    return {
        "steps": setting.train.steps,
        "warmup": setting.train.warmup,
        "lr": setting.train.lr,
        "gradients": run.map(
            "gradients at the start",
            lambda item: gradient_by_layer(setting, *item, device=device),
            first,
        ),
        "trainings": run.map(
            "trainings", lambda item: train_one(setting, *item, device=device), trained
        ),
    }


def select(rows: Sequence[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Select the rows with these values, in the order of their seeds."""
    found = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return sorted(found, key=lambda row: row["seed"])


def numbers(rows: Sequence[dict[str, Any]], name: str) -> list[Any]:
    return sorted({row[name] for row in rows})


def fate(training: dict[str, Any]) -> str:
    """What became of a training: "learned", "stuck" at the starting loss, or "diverged"."""
    start, loss = training["start"], training["loss"]
    if loss is None or loss > start + MARGIN:
        return "diverged"
    return "learned" if loss < start - MARGIN else "stuck"


def spell_way(order: str, warmup: bool) -> str:
    return f"{order}-norm {'with' if warmup else 'without'} warm-up"


def find(results: Results) -> list[str]:
    return [
        tell_deepest(results["trainings"]),
        *tell_fates(results["trainings"]),
        tell_losses(results["trainings"]),
        *tell_gradients(results["gradients"]),
    ]


def log_interval(values: Sequence[float]) -> dict[str, float]:
    """Geometric mean and its interval."""
    found = mean_interval([math.log(value) for value in values])
    return {end: math.exp(found[end]) for end in ("mean", "low", "high")}


def tell_gradients(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Say how the gradient changes from the last layer to the first, and with depth."""
    shallow, *_, deep = numbers(rows, "depth")
    words = []
    for order in ORDERS:
        norms = [row["norms"] for row in select(rows, order=order, depth=deep)]
        ratio = log_interval([each[0] / each[-1] for each in norms])
        words.append(f"{spell_interval(ratio)} of the last layer's with {order}-norm")
        verb = {-1: "shrinks", 0: "does not clearly change", 1: "grows"}[side_of(ratio, 1)]
        against = ", against the prediction" if order == "post" and verb == "grows" else ""
        words[-1] += f", where it {verb} on its way down{against}"
    tops = {
        (order, depth): spell_interval(
            log_interval([row["norms"][-1] for row in select(rows, order=order, depth=depth)])
        )
        for order in ORDERS
        for depth in (shallow, deep)
    }
    return [
        f"At the start the norm of the gradient of the first of {deep} layers is "
        f"{', and '.join(words)}.",
        f"From {shallow} to {deep} layers the last layer's goes from {tops['pre', shallow]} to "
        f"{tops['pre', deep]} with pre-norm, from {tops['post', shallow]} to "
        f"{tops['post', deep]} with post-norm.",
    ]


def ways() -> list[tuple[Order, bool]]:
    """All four combinations of order and warm-up."""
    return [(order, warmup) for order in ORDERS for warmup in (False, True)]


def tell_losses(rows: Sequence[dict[str, Any]]) -> str:
    deep, words = numbers(rows, "depth")[-1], []
    for order, warmup in ways():
        losses = [row["loss"] for row in select(rows, order=order, depth=deep, warmup=warmup)]
        spelled = "not finite" if None in losses else spell_interval(mean_interval(losses))
        words.append(f"{spell_way(order, warmup)} {spelled}")
    start = mean(row["start"] for row in rows)
    return (
        f"Loss after training {deep} layers, from {start:.3g} at the start and with an entropy of "
        f"{ENTROPY:.3f}: {', '.join(words)}."
    )


def tell_fates(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Say which trainings failed, by order, warm-up and depth."""
    seeds, sentences = len(numbers(rows, "seed")), []
    for what, words in (("stuck", "stayed at the starting loss"), ("diverged", "diverged")):
        groups = []
        for order, warmup in ways():
            some = select(rows, order=order, warmup=warmup)
            failed = [row["depth"] for row in some if fate(row) == what]
            counts = [f"{failed.count(d)} with {d} layers" for d in sorted(set(failed))]
            if counts:
                groups.append(f"{spell_way(order, warmup)} {' and '.join(counts)}")
        told = f"Of {seeds} trainings each, {words}: {'; '.join(groups)}."
        sentences.append(told if groups else f"None {words}.")
    return sentences


def deepest(rows: Sequence[dict[str, Any]], order: str, warmup: bool) -> int:
    """The largest depth up to which every training learned; 0 if there is none."""
    found = 0
    for depth in numbers(rows, "depth"):
        some = select(rows, order=order, warmup=warmup, depth=depth)
        if any(fate(row) != "learned" for row in some):
            break
        found = depth
    return found


def tell_deepest(rows: Sequence[dict[str, Any]]) -> str:
    reach = {way: deepest(rows, *way) for way in ways()}
    cold, warm = reach["post", False], reach["post", True]
    helps = "deeper with a warm-up"
    if warm <= cold:
        helps = "no deeper with a warm-up, against the prediction"
    if cold == warm == numbers(rows, "depth")[-1]:
        helps = "nothing fails for a warm-up to help, against the prediction"
    return (
        f"With every seed pre-norm learns at all depths up to {reach['pre', False]} without "
        f"warm-up and {reach['pre', True]} with it, post-norm up to {cold} and {warm}: {helps}."
    )


def draw(results: Results, figure: Figure) -> None:
    left, middle, right = (figure.add_subplot(1, 3, n) for n in (1, 2, 3))
    rows = results["gradients"]
    depths = numbers(rows, "depth")
    for order in ORDERS:
        by_layer = [row["norms"] for row in select(rows, order=order, depth=depths[-1])]
        layers = list(range(1, depths[-1] + 1))
        draw_interval(left, layers, list(zip(*by_layer, strict=True)), order)
        last = [[row["norms"][-1] for row in select(rows, order=order, depth=d)] for d in depths]
        draw_interval(middle, depths, last, order)
    left.set(title=f"gradient in {depths[-1]} layers", xlabel="layer", ylabel="norm at the start")
    middle.set(title="gradient of the last layer", xlabel="layers", ylabel="norm at the start")
    draw_losses(results["trainings"], right)
    scale_depth(middle, depths)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    for axes in (left, middle):
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, loc="lower left")


def draw_interval(
    axes: Axes, at: Sequence[int], values: Sequence[Sequence[float]], order: str
) -> None:
    found = [log_interval(each) for each in values]
    axes.plot(at, [x["mean"] for x in found], ".-", color=COLOURS[order], label=f"{order}-norm")
    low, high = ([x[end] for x in found] for end in ("low", "high"))
    axes.fill_between(at, low, high, alpha=0.3, color=COLOURS[order])


def scale_depth(axes: Axes, depths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(depths, [str(depth) for depth in depths])


def draw_losses(rows: Sequence[dict[str, Any]], axes: Axes) -> None:
    depths = numbers(rows, "depth")
    for order, warmup in ways():
        colour, style = COLOURS[order], "-" if warmup else "--"
        some = [row for row in select(rows, order=order, warmup=warmup) if row["loss"] is not None]
        axes.plot([r["depth"] for r in some], [r["loss"] for r in some], ".", color=colour)
        there = numbers(some, "depth")
        means = [mean(row["loss"] for row in select(some, depth=depth)) for depth in there]
        axes.plot(there, means, style, color=colour)
    for level, words in ((UNIFORM, "start"), (ENTROPY, "entropy")):
        axes.axhline(level, color="k", ls=":")
        axes.text(depths[0], level - 0.02, words, va="top")
    axes.set_ylim(ENTROPY - 0.25, UNIFORM + 0.1)
    axes.set(title="after training", xlabel="layers", ylabel="loss (nats per letter)")
    for style, words in (("--", "without warm-up"), ("-", "with warm-up")):
        axes.plot([], [], style, color="k", label=words)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.9), fontsize="small")
    scale_depth(axes, depths)


LAB = Lab(
    name="norm",
    question="Norm before or after the sublayer: what does depth do to it?",
    prediction="Post-norm rescales the stream after every sublayer, so the gradient shrinks on its "
    "way down, that of the last layers stays large however deep the stack is, and deep stacks need "
    "a warm-up or fail even with it. Pre-norm leaves the residual path free; it trains at every "
    "depth, with or without warm-up.",
    method="Decoders of 2 to 48 layers with LayerNorm and ReLU, weights drawn as `torch.nn.Linear` "
    "draws them, on letters of which each is followed by one of four. First the norm of the "
    "gradient of all parameters of each layer, before any step. Then trainings with AdamW, "
    "gradients clipped to norm 1 and one learning rate for all, which falls by a cosine, after a "
    "linear warm-up over a third of the steps or without it. A training has stayed at the starting "
    "loss if on other text it is less than a tenth of the way to the entropy from there, and "
    "diverged if it is as far above, or not finite. Intervals are over seeds, for gradients of "
    "geometric means.",
    measure=measure,
    find=find,
    draw=draw,
)
