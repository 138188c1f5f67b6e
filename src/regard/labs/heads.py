"""One head against many, at equal parameters.

The projections of a layer are d × d matrices; H heads split their d columns into H parts of width
d / H, so the number of heads does not change the number of parameters. It changes how many
positions can be attended to separately: a head has one softmax, and its output is one weighted
mean.

The task: each position has a symbol and, for each relation, points to another position (as a verb
has its subject and its object). The symbols at these positions are the targets. One softmax over
all of them gives their mean, from which it is hard to tell which symbol belongs to which relation.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard import Ablate, MultiHeadAttention, edit
from regard.labs.interval import (
    mean_interval,
    paired_difference,
    share_interval,
    side_of,
    spell_interval,
)
from regard.labs.lab import Lab, Results
from regard.labs.parts import Run
from regard.labs.small_training import build_seeded, generator_of, train
from regard.training.config import TrainConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEST = 1 << 20  # a step number that no training reaches, for test batches
SPARED = 0.01  # heads can be spared as long as no more accuracy than this is lost
WINDOW = 10  # steps over which a loss is averaged


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The sizes of a run. The layer's width is `dim`, whatever the number of heads."""

    heads: tuple[int, ...]
    seeds: int
    dim: int
    relations: int
    length: int
    symbols: int
    batch: int
    test: int
    train: TrainConfig


TINY = Setting(
    heads=(1, 2, 8),
    seeds=3,
    dim=32,
    relations=2,
    length=8,
    symbols=8,
    batch=32,
    test=256,
    train=TrainConfig(steps=250, lr=1e-2, warmup=20, weight_decay=0.0),
)
FULL = Setting(
    heads=(1, 2, 4, 8, 16),
    seeds=5,
    dim=64,
    relations=4,
    length=16,
    symbols=16,
    batch=128,
    test=1024,
    train=TrainConfig(steps=800, lr=5e-3, warmup=40, weight_decay=0.0),
)


class Lookup(nn.Module):
    """One layer of attention, and a projection from its output to a symbol for each relation.

    The input at a position is a sum of learned embeddings: of the position, of its symbol, and of
    each position that it points to, with a table for each relation.
    """

    def __init__(self, setting: Setting, n_heads: int) -> None:
        super().__init__()
        n, dim = setting.length, setting.dim
        self.positions = nn.Parameter(torch.randn(n, dim) / 2)
        self.symbols = nn.Parameter(torch.randn(setting.symbols, dim) / 2)
        self.pointers = nn.Parameter(torch.randn(setting.relations * n, dim) / 2)
        self.attention = MultiHeadAttention(dim, n_heads)
        self.read = nn.Linear(dim, setting.relations * setting.symbols)
        self.register_buffer("first", torch.arange(setting.relations) * n)

    def forward(self, symbols_bn: Tensor, pointers_bnr: Tensor) -> Tensor:
        pointed_bnd = self.pointers[pointers_bnr + self.get_buffer("first")].sum(2)
        x_bnd = self.positions + self.symbols[symbols_bn] + pointed_bnd
        read_bnx: Tensor = self.read(self.attention(x_bnd))
        return read_bnx.view(*pointers_bnr.shape, len(self.symbols))


def draw_batch(setting: Setting, size: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the symbol of each position, and the position it points to under each relation."""
    n, where = setting.length, source.device
    symbols = torch.randint(setting.symbols, (size, n), generator=source, device=where)
    shape = size, n, setting.relations
    return symbols, torch.randint(n, shape, generator=source, device=where)


def look_up(symbols_bn: Tensor, pointers_bnr: Tensor) -> Tensor:
    """The targets: the symbol at each position that is pointed to."""
    return symbols_bn.gather(1, pointers_bnr.flatten(1)).view_as(pointers_bnr)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(*batch)
    return nn.functional.cross_entropy(logits.flatten(0, 2), look_up(*batch).flatten())


def mixed_accuracy(relations: int, symbols: int) -> float:
    """The best accuracy if the set of target symbols is known, but not their relations.

    The best guess is then the most frequent of these symbols, for all relations.
    """
    drawn = itertools.product(range(symbols), repeat=relations)
    most = [max(Counter(each).values()) for each in drawn]
    return mean(most) / relations


@torch.no_grad()
def accuracy_by_relation(
    model: nn.Module, batch: tuple[Tensor, Tensor], off: Sequence[int] = ()
) -> list[float]:
    """The accuracy under each relation, with some heads switched off."""
    edits = [Ablate(heads=list(off))] if off else []
    with edit(model, *edits):
        right = model(*batch).argmax(-1) == look_up(*batch)
    found: list[float] = right.double().mean((0, 1)).tolist()
    return found


def switch_off(n_heads: int, score: Callable[[Sequence[int]], list[float]]) -> dict[str, Any]:
    """Accuracy lost by switching off each head alone, and accuracy left without more and more.

    For the latter, heads are switched off in order, first those that alone cost least. `score`
    computes the accuracy by relation with the given heads off.
    """
    whole = score([])
    lost = [[a - b for a, b in zip(whole, score([h]), strict=True)] for h in range(n_heads)]
    order = sorted(range(n_heads), key=lambda head: sum(lost[head]))
    left = [mean(score(order[:n])) for n in range(n_heads + 1)]
    return {"accuracy": mean(whole), "lost": lost, "left": left}


def steps_to_half(losses: Sequence[float]) -> int | None:
    """The first step at which the mean of `WINDOW` losses is half the first loss, or None."""
    half = losses[0] / 2
    for step in range(WINDOW, len(losses) + 1):
        if mean(losses[step - WINDOW : step]) < half:
            return step
    return None


def measure_model(
    setting: Setting, n_heads: int, seed: int, device: torch.device
) -> dict[str, Any]:
    """Train one model, and measure what each of its heads is worth."""
    model = build_seeded(lambda: Lookup(setting, n_heads), seed).to(device)

    def draw(step: int) -> tuple[Tensor, Tensor]:
        return draw_batch(setting, setting.batch, generator_of(seed, step, device=device))

    losses = train(model, draw, loss_of, setting.train)
    test = draw_batch(setting, setting.test, generator_of(seed, TEST, device=device))
    parameters = sum(p.numel() for p in model.attention.parameters())
    found = switch_off(n_heads, lambda off: accuracy_by_relation(model, test, off))
    told = {"heads": n_heads, "seed": seed, "parameters": parameters}
    return {**told, "half": steps_to_half(losses), **found}


def measure(run: Run) -> dict[str, Any]:
    setting = TINY if run.tiny else FULL
    items = [(n, seed) for n in setting.heads for seed in range(setting.seeds)]
    models = run.map(
        "heads and seeds", lambda item: measure_model(setting, *item, run.device), items
    )
    return {
        "dim": setting.dim,
        "relations": setting.relations,
        "symbols": setting.symbols,
        "seeds": setting.seeds,
        "trials": setting.test * setting.length * setting.relations,
        "mixed": mixed_accuracy(setting.relations, setting.symbols),
        "models": models,
    }


def seeds_of(results: Results, n_heads: int) -> list[dict[str, Any]]:
    """The models with this number of heads, in the order of their seeds."""
    found = [model for model in results["models"] if model["heads"] == n_heads]
    return sorted(found, key=lambda model: model["seed"])


def heads_in(results: Results) -> list[int]:
    return sorted({model["heads"] for model in results["models"]})


def accuracies(results: Results, n_heads: int) -> list[float]:
    return [model["accuracy"] for model in seeds_of(results, n_heads)]


def accuracy_interval(results: Results, n_heads: int) -> dict[str, float]:
    """The mean accuracy over seeds; its interval includes that of all trials taken together."""
    shares = accuracies(results, n_heads)
    seeds, trials = mean_interval(shares), results["trials"] * len(shares)
    counted = share_interval(round(seeds["mean"] * trials), trials)
    low, high = min(seeds["low"], counted["low"]), max(seeds["high"], counted["high"])
    return seeds | {"low": max(low, 0.0), "high": min(high, 1.0)}


def guess(results: Results) -> float:
    return 1 / float(results["symbols"])


def worst_and_rest(model: dict[str, Any]) -> tuple[float, float]:
    """Accuracy lost without one head, averaged over heads: by the worst relation, by the others."""
    worst = [max(row) for row in model["lost"]]
    rest = [(sum(row) - max(row)) / (len(row) - 1) for row in model["lost"]]
    return mean(worst), mean(rest)


def spared(model: dict[str, Any]) -> int:
    """How many heads can be off, the least needed first, before more than `SPARED` is lost."""
    lost = [model["accuracy"] - each > SPARED for each in model["left"]]
    return lost.index(True) - 1 if True in lost else len(lost) - 1


def find(results: Results) -> list[str]:
    return [
        *tell_accuracy(results),
        tell_parameters(results),
        *tell_steps(results),
        tell_one_off(results),
        tell_many_off(results),
    ]


def tell_parameters(results: Results) -> str:
    counts = sorted({model["parameters"] for model in results["models"]})
    *first, last = heads_in(results)
    heads = f"{', '.join(map(str, first))} and {last}"
    if len(counts) == 1:
        return (
            f"A layer of width {results['dim']} has {counts[0]:,} parameters with {heads} heads "
            "alike: the heads share the d² of each projection."
        )
    return f"With {heads} heads the layer has from {counts[0]:,} to {counts[-1]:,} parameters."


def tell_accuracy(results: Results) -> list[str]:
    counts, relations = heads_in(results), results["relations"]
    first, enough, last = counts[0], nearest(counts, relations), counts[-1]
    sentences = [
        f"Under {relations} relations the accuracy of {spell_heads(first)} is "
        f"{spell_accuracy(results, first)}; a mean in which nothing tells whose symbol is whose "
        f"would give {results['mixed']:.1%} at best. That of {spell_heads(enough)} is "
        f"{spell_accuracy(results, enough)}, {compare(results, enough, first, against=-1)}.",
    ]
    if last != enough:
        sentences.append(
            f"That of {spell_heads(last)}, {results['dim'] // last} wide, is "
            f"{spell_accuracy(results, last)}, {compare(results, last, enough, against=1)}."
        )
    return sentences


def spell_accuracy(results: Results, n_heads: int) -> str:
    return spell_interval(accuracy_interval(results, n_heads), ".1%")


def compare(results: Results, n_heads: int, other: int, against: int) -> str:
    """Say whether one number of heads beats another; `against`: the side not predicted."""
    side = side_of(paired_difference(accuracies(results, other), accuracies(results, n_heads)))
    words = {1: "more than", 0: "not clearly different from", -1: "less than"}[side]
    ending = ", against the prediction" if side == against else ""
    return f"{words} that of {spell_heads(other)}{ending}"


def tell_steps(results: Results) -> list[str]:
    """Say how soon the loss is halved, for numbers of heads that halve it with every seed."""
    found = {n: [model["half"] for model in seeds_of(results, n)] for n in heads_in(results)}
    soon = {n: mean_interval(steps) for n, steps in found.items() if None not in steps}
    never = [spell_heads(n) for n in found if n not in soon]
    words = [f"{spell_heads(n)} {spell_interval(each, '.0f')}" for n, each in soon.items()]
    sentences = [f"Steps until the loss is halved: {', '.join(words)}."] if words else []
    if never:
        sentences.append(f"With some seed the loss was not halved: {', '.join(never)}.")
    return sentences


def tell_one_off(results: Results) -> str:
    """Say what one head is worth if there is one for each relation, or in the nearest case."""
    n = nearest(heads_in(results), results["relations"])
    pairs = [worst_and_rest(model) for model in seeds_of(results, n)]
    worst, rest = (mean_interval(each) for each in zip(*pairs, strict=True))
    return (
        f"Any one of {spell_heads(n)} switched off costs the relation that suffers most "
        f"{spell_points(worst)} points of accuracy, each of the others {spell_points(rest)}."
    )


def tell_many_off(results: Results) -> str:
    n = heads_in(results)[-1]
    found = mean_interval([float(spared(model)) for model in seeds_of(results, n)])
    return (
        f"Of {spell_heads(n)} {spell_interval(found, '.1f')} can be switched off, the least needed "
        f"first, before the accuracy falls by more than {SPARED * 100:.0f} point."
    )


def spell_points(found: dict[str, float]) -> str:
    """Format shares as percentage points."""
    return spell_interval({end: 100 * found[end] for end in ("mean", "low", "high")}, ".1f")


def nearest(counts: Sequence[int], wanted: int) -> int:
    return min(counts, key=lambda n: abs(n - wanted))


def spell_heads(n: int) -> str:
    return "1 head" if n == 1 else f"{n} heads"


def draw(results: Results, figure: Figure) -> None:
    counts = heads_in(results)
    left, middle, right = (figure.add_subplot(1, 3, n) for n in (1, 2, 3))
    draw_interval(left, counts, [accuracy_interval(results, n) for n in counts])
    for level, words in ((results["mixed"], "whose is not known"), (guess(results), "guessing")):
        left.axhline(level, color="k", ls=":")
        left.text(counts[-1], level - 0.01, words, ha="right", va="top")
    left.set(title="equal parameters", ylabel="accuracy", ylim=(0, 1.02))
    pairs = [[worst_and_rest(model) for model in seeds_of(results, n)] for n in counts]
    for at, label in ((0, "relation that suffers most"), (1, "each other relation")):
        found = [mean_interval([pair[at] for pair in each]) for each in pairs]
        draw_interval(middle, counts, found, label)
    middle.set(title="one head switched off", ylabel="accuracy lost", ylim=(-0.1, 1.3))
    middle.legend(frameon=False, loc="upper right")
    for n in counts:
        rows = [model["left"] for model in seeds_of(results, n)]
        means = [mean(column) for column in zip(*rows, strict=True)]
        right.plot([off / n for off in range(n + 1)], means, ".-", label=spell_heads(n))
    right.set(title="heads switched off in turn", ylabel="accuracy", ylim=(0, 1.02))
    right.set_xlabel("share of heads off")
    right.legend(edgecolor="none", loc="lower left", fontsize="small")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    for axes in (left, middle):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.set_xlabel("heads")


def draw_interval(
    axes: Axes, at: Sequence[int], found: Sequence[dict[str, float]], label: str | None = None
) -> None:
    line = axes.plot(at, [each["mean"] for each in found], "o-", label=label)[0]
    low, high = ([each[end] for each in found] for end in ("low", "high"))
    axes.fill_between(at, low, high, alpha=0.3, color=line.get_color())


LAB = Lab(
    name="heads",
    question="What do several heads see that one does not?",
    prediction="A head has one softmax and gives one mean. Whoever has to look at several "
    "positions for several reasons needs a head for each; with fewer the answers are mixed, and "
    "with more they get narrower and no better. The parameters are the same, since the heads share "
    "the d columns of each projection.",
    method="Each position of a sequence has a random symbol, and points to a random position under "
    "each relation; at each position the symbols there are asked for. One layer of attention, and "
    "one projection that reads the symbols from it, trained with AdamW on new sequences in each "
    "step, with different numbers of heads and all else the same; seeds set weights and sequences. "
    "Then heads are switched off on other sequences (`regard.edit` with `Ablate`): each alone, and "
    "one after another, first the one that alone costs least. Intervals are over seeds.",
    measure=measure,
    find=find,
    draw=draw,
)
