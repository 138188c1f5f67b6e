"""ReLU, GELU and SwiGLU in the feed-forward layer, at equal parameters.

SwiGLU, down(silu(gate(x)) · up(x)), has three matrices where the others have two, so at equal
parameters its hidden width is 2/3 of theirs. Which is better is a question for a measurement:
none of them has a derivation.

The text: letters, each drawn from a distribution that depends on the two before it (a Markov chain
of order 2, as in Shannon's approximations to English, with a random table). Since the table is
known, so is the entropy, and a model's loss above it is what the model has not learned. Looking up
each pair of letters is work for the feed-forward layers, since attention only copies the letter
before.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from regard import Transformer
from regard.labs.interval import mean_interval, paired_difference, side_of, spell_interval
from regard.labs.lab import Lab, Results
from regard.labs.parts import Run
from regard.labs.small_training import build_seeded, generator_of, train
from regard.layers import BlockConfig
from regard.layers.feedforward import ActivationWord
from regard.models.config import HeadConfig, ModelConfig
from regard.positions import RotaryConfig
from regard.training.config import TrainConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPREAD = 2.5  # of the table's logits, before the softmax of each row
SETTLED = 200  # letters after which the start of a text no longer matters
UNTIMED = 10  # first steps, in which kernels are loaded and memory is allocated


class Kind(NamedTuple):
    activation: ActivationWord
    gated: bool


KINDS = {"ReLU": Kind("relu", False), "GELU": Kind("gelu", False), "SwiGLU": Kind("silu", True)}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The sizes of a run. `dim` is a multiple of 3, so that 8/3 of it is an integer."""

    letters: int
    seeds: int
    dim: int
    n_heads: int
    n_layers: int
    batch: int
    length: int
    test: int
    train: TrainConfig


TINY = Setting(
    letters=12,
    seeds=3,
    dim=48,
    n_heads=4,
    n_layers=1,
    batch=24,
    length=32,
    test=128,
    train=TrainConfig(steps=100, lr=1e-2, warmup=10),
)
FULL = Setting(
    letters=27,
    seeds=5,
    dim=96,
    n_heads=4,
    n_layers=2,
    batch=64,
    length=64,
    test=1024,
    train=TrainConfig(steps=800, lr=3e-3, warmup=80),
)


class Source:
    """The language: the probabilities of each letter after each pair, and of the pairs."""

    def __init__(self, chances_abc: Tensor) -> None:
        """chances_abc: P(c | a, b), float64; every letter must be reachable from every pair."""
        self.chances = chances_abc
        n = len(chances_abc)
        pairs = torch.full((n, n), 1 / n**2, dtype=chances_abc.dtype)
        for _ in range(SETTLED):
            pairs = torch.einsum("ab,abc->bc", pairs, chances_abc)
        self.pairs = pairs

    @property
    def entropy(self) -> float:
        """The entropy rate: nats per letter, given all letters before it."""
        return float((self.pairs[..., None] * torch.special.entr(self.chances)).sum())

    def write(self, n: int, length: int, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw n texts of 2 + `length` letters, and -log p of the last `length` letters."""
        size, device = len(self.chances), drawn.device
        shape = length + 1, n
        lots = torch.rand(shape, generator=drawn, device=device, dtype=torch.float64)
        pairs, table = self.pairs.flatten().to(device), self.chances.flatten(0, 1).to(device)
        pair = pick(pairs.cumsum(-1), lots[0])
        letters, losses, sums = [pair // size, pair % size], [], table.cumsum(-1)
        for lot in lots[1:]:
            pair = letters[-2] * size + letters[-1]
            letters.append(pick(sums[pair], lot[:, None])[:, 0])
            losses.append(-table[pair, letters[-1]].log())
        return torch.stack(letters, 1), torch.stack(losses, 1).float()


def pick(sums: Tensor, lots: Tensor) -> Tensor:
    """Sample indices by inverse CDF: `sums` are cumulative probabilities, `lots` uniform draws."""
    return torch.searchsorted(sums, lots).clamp(max=sums.shape[-1] - 1)


@cache
def make_source(letters: int) -> Source:
    """Make the language of `letters` letters, the same in every run."""
    logits = torch.randn(letters, letters, letters, generator=generator_of(1948)).double()
    return Source((SPREAD * logits).softmax(-1))


def hidden_width(dim: int, gated: bool) -> int:
    """4 · dim, or 2/3 of that if there are three matrices instead of two."""
    return 8 * dim // 3 if gated else 4 * dim


def make_model(setting: Setting, kind: str) -> Transformer:
    dim, (activation, gated) = setting.dim, KINDS[kind]
    block = BlockConfig(
        dim=dim,
        n_heads=setting.n_heads,
        ffn_dim=hidden_width(dim, gated),
        activation=activation,
        gated=gated,
        ffn_bias=False,
        rotary=RotaryConfig(head_dim=dim // setting.n_heads),
    )
    config = ModelConfig(
        family="lab",
        vocab_size=setting.letters,
        max_len=None,
        decoder=(block,) * setting.n_layers,
        head=HeadConfig(tied=False),
    )
    return Transformer(config)


def loss_of(model: nn.Module, texts: Tensor) -> Tensor:
    """The loss of every letter but the first two, which have no pair before them."""
    logits = model(texts[:, :-1]).logits[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 2:].flatten())


def measure_model(setting: Setting, kind: str, seed: int, device: torch.device) -> dict[str, Any]:
    """Train once: the loss above the source's own on the same letters, and the time of a step."""
    model = build_seeded(lambda: make_model(setting, kind), seed).to(device)
    config = setting.train
    n, drawn = config.steps * setting.batch, generator_of(seed, device=device)
    texts, source_losses = make_source(setting.letters).write(
        n + setting.test, setting.length, drawn
    )
    batches = texts[:n].view(config.steps, setting.batch, -1)
    known = source_losses[:n].view(config.steps, -1).mean(1).tolist()
    begun = 0.0

    def after(step: int) -> None:
        nonlocal begun
        if step == min(UNTIMED, config.steps - 1) - 1:
            begun = now(device)

    losses = train(model, batches.__getitem__, loss_of, config, after)
    seconds = (now(device) - begun) / max(config.steps - UNTIMED, 1)
    with torch.no_grad():
        tested = float(loss_of(model, texts[n:]) - source_losses[n:].mean())
    return {
        "kind": kind,
        "seed": seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss": tested,
        "curve": bin_curve([a - b for a, b in zip(losses, known, strict=True)]),
        "milliseconds": 1000 * seconds,
    }


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def bin_curve(values: Sequence[float], ratio: float = 1.3) -> list[dict[str, float]]:
    """Means over spans of steps, each about `ratio` times as long as the one before."""
    found, first = [], 0
    while first < len(values):
        last = min(len(values), max(first + 1, math.ceil(first * ratio)))
        found.append({"step": (first + 1 + last) / 2, "loss": mean(values[first:last])})
        first = last
    return found


def measure(run: Run) -> dict[str, Any]:
    setting = TINY if run.tiny else FULL
    # Kinds vary fastest, so that a temporary slowdown of the machine affects all of them.
    items = [(kind, seed) for seed in range(setting.seeds) for kind in KINDS]
    models = run.map(
        "activations and seeds", lambda item: measure_model(setting, *item, run.device), items
    )
    return {
        "entropy": make_source(setting.letters).entropy,
        "dim": setting.dim,
        "steps": setting.train.steps,
        "seeds": setting.seeds,
        "models": models,
    }


def values_of(results: Results, kind: str, name: str) -> list[Any]:
    """The values of a kind of layer under a name, in the order of seeds."""
    rows = [row for row in results["models"] if row["kind"] == kind]
    return [row[name] for row in sorted(rows, key=lambda row: row["seed"])]


def over(results: Results, kind: str, name: str) -> dict[str, float]:
    return mean_interval(values_of(results, kind, name))


def find(results: Results) -> list[str]:
    return [
        tell_losses(results),
        tell_parameters(results),
        *(tell_pair(results, *pair) for pair in itertools.combinations(KINDS, 2)),
        tell_time(results),
    ]


def tell_parameters(results: Results) -> str:
    counts = sorted({row["parameters"] for row in results["models"]})
    wide, narrow = (hidden_width(results["dim"], gated) for gated in (False, True))
    widths = f"with hidden width {wide}, gated {narrow}"
    if len(counts) == 1:
        return f"All models have {counts[0]:,} parameters, {widths}."
    return f"The models have from {counts[0]:,} to {counts[-1]:,} parameters, {widths}."


def tell_losses(results: Results) -> str:
    words = [f"{kind} {spell_interval(over(results, kind, 'loss'))}" for kind in KINDS]
    return (
        f"After {results['steps']:,} steps the loss above the entropy of "
        f"{results['entropy']:.3f} nats per letter is: {', '.join(words)}."
    )


def tell_pair(results: Results, first: str, second: str) -> str:
    """Say whether the second kind is better than the first, as predicted, over the same seeds."""
    losses = (values_of(results, kind, "loss") for kind in (first, second))
    found = paired_difference(*losses)
    side = side_of(found)
    if side == 0:
        return (
            f"Between {second} and {first} there is no clear difference: "
            f"{spell_interval(found, '+.3g')}."
        )
    size = {end: abs(found[end]) for end in ("mean", "low", "high")}
    size["low"], size["high"] = sorted((size["low"], size["high"]))
    words = "less than" if side < 0 else "more than"
    ending = "" if side < 0 else ", against the prediction"
    return f"{second} loses {spell_interval(size)} {words} {first}{ending}."


def tell_time(results: Results) -> str:
    words = [f"{k} {spell_interval(over(results, k, 'milliseconds'))}" for k in KINDS]
    logs = [[math.log(x) for x in values_of(results, k, "milliseconds")] for k in KINDS]
    found = paired_difference(logs[0], logs[-1])
    ratio = {end: math.exp(found[end]) for end in ("mean", "low", "high")}
    first, *_, last = KINDS
    clear = {1: "longer", 0: "not clearly longer or shorter", -1: "shorter"}[side_of(found)]
    return (
        f"Milliseconds per training step: {', '.join(words)}; a step of {last} takes "
        f"{spell_interval(ratio)} of one of {first}, {clear}."
    )


def draw(results: Results, figure: Figure) -> None:
    left, middle, right = (figure.add_subplot(1, 3, n) for n in (1, 2, 3))
    for kind in KINDS:
        curves = values_of(results, kind, "curve")
        steps = [point["step"] for point in curves[0]]
        columns = zip(*([point["loss"] for point in curve] for curve in curves), strict=True)
        found = [mean_interval(column) for column in columns]
        line = left.plot(steps, [each["mean"] for each in found], label=kind)[0]
        low, high = ([each[end] for each in found] for end in ("low", "high"))
        left.fill_between(steps, low, high, alpha=0.3, color=line.get_color())
    left.set(title="while training", xlabel="step", ylabel="loss above entropy (nats)")
    left.set_xscale("log")
    left.legend(frameon=False)
    draw_seeds(results, "loss", middle)
    middle.set(title="after training", ylabel="loss above entropy (nats)")
    draw_seeds(results, "milliseconds", right)
    right.set(title="time of a step", ylabel="milliseconds")
    for axes in (left, middle, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)


def draw_seeds(results: Results, name: str, axes: Axes) -> None:
    """Draw each seed as a dot, with the mean and its interval beside."""
    for at, kind in enumerate(KINDS):
        values, found = values_of(results, kind, name), over(results, kind, name)
        axes.plot([at - 0.1] * len(values), values, ".", color=f"C{at}", alpha=0.5)
        half = found["high"] - found["mean"]
        axes.errorbar(at + 0.1, found["mean"], half, fmt="o", color=f"C{at}", capsize=4)
    axes.set_xticks(range(len(KINDS)), list(KINDS))
    axes.set_xlim(-0.5, len(KINDS) - 0.5)


LAB = Lab(
    name="activations",
    question="ReLU, GELU or SwiGLU in the feed-forward layer?",
    prediction="At equal parameters GELU is a little better than ReLU and SwiGLU better than both, "
    "though its hidden width is 2/3 of theirs. A step takes about the same time: the products of "
    "matrices are as large together, and the rest is small.",
    method="Decoders with pre-norm and rotary positions, feed-forward layers without biases, their "
    "hidden width 4 d, for SwiGLU 8 d / 3, trained with AdamW on letters that are drawn by the two "
    "letters before them. The table of chances, and so the entropy, is known; what counts is the "
    "loss minus that of the table itself on the same letters, none of which were trained on. All "
    "kinds have the same learning rate; each seed has its own text and weights, and differences "
    "are between models of the same seed. Intervals are over seeds. A step is timed with its "
    "batch, backward pass and update; the first ten are left out.",
    measure=measure,
    find=find,
    draw=draw,
)
