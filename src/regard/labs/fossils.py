"""What came before attention: does it remember, how far, and at what cost?

The text: random letters, of which one of the first few is marked. The target is the marked letter.
Training is done in two ways: with the target at one distance from the mark only, and one model for
each distance, so that the gradient has to come all the way; or with the target at every token, near
and far, and one model for all distances.

An LSTM passes its state from each token to the next. The convolution is a causal stack of kernel 2
with dilations 1, 2, 4, ... (as in WaveNet), so each layer reaches twice as far as the one before.
Attention reaches any token in one step, at the cost of every pair of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import Transformer
from regard.labs.interval import mean_interval
from regard.labs.lab import Lab, Results
from regard.labs.parts import Run
from regard.labs.sentences import list_intervals, mean_share
from regard.labs.small_training import generator_of, train
from regard.labs.timing import median_time, resample, time_calls
from regard.layers import BlockConfig, make_norm
from regard.models.config import ModelConfig
from regard.training.config import TrainConfig
from regard.training.init import start

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("LSTM", "convolution", "attention")
PLACES = 16  # the mark is on one of this many first tokens
NOTHING = -100  # the target of tokens that are not counted
HELD = 0.9  # the share of right answers from which a distance counts as remembered


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a run; `widths` are those of KINDS, chosen for about equal parameters.

    `steps`: those of a model for one distance, and of a model for all distances.
    """

    letters: int
    widths: tuple[int, int, int]
    reach: int
    batch: int
    steps: tuple[int, int]
    lr: float
    seeds: int
    texts: int
    distances: tuple[int, ...]
    timed: tuple[int, ...]
    repeats: int


TINY = Size(
    letters=2,
    widths=(40, 30, 32),
    reach=128,
    batch=16,
    steps=(50, 60),
    lr=1e-2,
    seeds=3,
    texts=128,
    distances=(10, 50),
    timed=(64, 128, 256, 512),
    repeats=5,
)
FULL = Size(
    letters=4,
    widths=(116, 70, 96),
    reach=2048,
    batch=64,
    steps=(150, 200),
    lr=5e-3,
    seeds=3,
    texts=256,
    distances=(10, 50, 300, 2000),
    timed=tuple(2**n for n in range(8, 15)),
    repeats=5,
)


class LSTM(nn.Module):
    """torch's LSTM, with forget gates that start open, as is usual for long memories."""

    def __init__(self, letters: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(2 * letters, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, letters)
        with torch.no_grad():
            given = dict(self.lstm.named_parameters())
            given["bias_hh_l0"].zero_()
            given["bias_ih_l0"].zero_()[width : 2 * width] = 1.0

    def forward(self, ids_bt: Tensor) -> Tensor:
        logits_btl: Tensor = self.head(self.lstm(self.embed(ids_bt))[0])
        return logits_btl


class Convolution(nn.Module):
    """Causal residual layers x + gelu(conv(norm(x))) of kernel 2, with dilations 1, 2, 4, ..."""

    def __init__(self, letters: int, width: int, reach: int) -> None:
        super().__init__()
        self.dilations = dilations_for(reach)
        self.embed = nn.Embedding(2 * letters, width)
        self.layers = nn.ModuleList(
            nn.Conv1d(width, width, 2, dilation=dilation) for dilation in self.dilations
        )
        self.norms = nn.ModuleList(make_norm("layer", width) for _ in self.dilations)
        self.last_norm = make_norm("layer", width)
        self.head = nn.Linear(width, letters)

    def forward(self, ids_bt: Tensor) -> Tensor:
        x_btc = self.embed(ids_bt)
        for dilation, layer, norm in zip(self.dilations, self.layers, self.norms, strict=True):
            earlier_bct = F.pad(norm(x_btc).mT, (dilation, 0))
            x_btc = x_btc + F.gelu(layer(earlier_bct)).mT
        logits_btl: Tensor = self.head(self.last_norm(x_btc))
        return logits_btl


class Attention(nn.Module):
    """A causal Transformer of one layer, without positions: it finds the mark by content."""

    def __init__(self, letters: int, width: int) -> None:
        super().__init__()
        block = BlockConfig(dim=width, n_heads=4, ffn_dim=4 * width, activation="gelu")
        config = ModelConfig(family="lab", vocab_size=2 * letters, max_len=None, decoder=(block,))
        self.letters, self.model = letters, Transformer(config)
        start(self.model, torch.initial_seed() % 2**31)

    def forward(self, ids_bt: Tensor) -> Tensor:
        logits_btv: Tensor = self.model(ids_bt).logits
        return logits_btv[..., : self.letters]


def dilations_for(reach: int) -> list[int]:
    """Dilations 1, 2, 4, ..., as many as a token needs to see `reach` tokens, itself included."""
    return [2**n for n in range(math.ceil(math.log2(reach)))]


def make_model(kind: str, size: Size, seed: int) -> nn.Module:
    width = size.widths[KINDS.index(kind)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "LSTM":
            return LSTM(size.letters, width)
        if kind == "convolution":
            return Convolution(size.letters, width, size.reach)
        return Attention(size.letters, width)


def count_steps(kind: str, distance: int, dilations: list[int]) -> int | None:
    """The shortest path between two tokens at this distance, in steps; None if there is none.

    Steps are cells of an LSTM, layers of the convolution that move a token (the residual passes by
    the others), or attention layers.
    """
    if kind == "LSTM":
        return distance
    if kind == "attention":
        return 1
    if distance > sum(dilations):
        return None
    return distance.bit_count()  # each dilation, a power of two, at most once


@dataclass(frozen=True, eq=False)
class Texts:
    """Tokens (B, T), the target at each (B, T), and the position of the mark (B, 1)."""

    ids: Tensor
    answers: Tensor
    places: Tensor


def draw_texts(n_texts: int, length: int, letters: int, drawn: torch.Generator) -> Texts:
    """Draw letters, and mark one of the first `PLACES`; marked letters are tokens of their own."""
    where: Any = {"generator": drawn, "device": drawn.device}
    ids = torch.randint(letters, (n_texts, length), **where)
    places = torch.randint(PLACES, (n_texts, 1), **where)
    at = torch.arange(length, device=drawn.device)
    answers = torch.where(at >= places, ids.gather(1, places), NOTHING)
    return Texts(torch.where(at == places, ids + letters, ids), answers, places)


def loss_of(model: nn.Module, texts: Texts, distance: int | None = None) -> Tensor:
    """The loss of the targets at this distance from the mark, or of all targets (None)."""
    logits_btl, answers = model(texts.ids), texts.answers
    if distance is not None:
        at = texts.places + distance
        answers = answers.gather(1, at)
        logits_btl = torch.take_along_dim(logits_btl, at[..., None], 1)
    return F.cross_entropy(logits_btl.flatten(0, 1), answers.flatten())


def learn_recall(
    kind: str, distance: int | None, seed: int, size: Size, device: torch.device
) -> list[float]:
    """Train a model for one distance, or for all (None), and measure its recall.

    Returns the shares of right answers at that distance, or at each of all distances.
    """
    model = make_model(kind, size, seed).to(device)
    lengths = [length for length in dilations_for(2 * size.reach) if length >= 2 * PLACES]
    if distance is not None:
        lengths = [distance + PLACES]

    def draw_batch(step: int) -> Texts:
        drawn = generator_of(seed, step, device=device)
        return draw_texts(size.batch, lengths[step % len(lengths)], size.letters, drawn)

    steps = size.steps[distance is None]
    config = TrainConfig(steps=steps, lr=size.lr, warmup=steps // 10, weight_decay=0.0)
    train(model, draw_batch, lambda model, texts: loss_of(model, texts, distance), config)
    asked = size.distances if distance is None else (distance,)
    drawn = generator_of(seed, steps + 1, device=device)
    texts = draw_texts(size.texts, asked[-1] + PLACES, size.letters, drawn)
    with torch.no_grad():
        answers = torch.cat([model(ids).argmax(-1) for ids in torch.split(texts.ids, 64)])
    right = (answers == texts.answers).double()
    return [float(right.gather(1, texts.places + d).mean()) for d in asked]


def time_steps(kind: str, length: int, size: Size, device: torch.device) -> list[float]:
    """Measure the seconds of forward and backward of one text, several times."""
    model = make_model(kind, size, 0).to(device)
    texts = draw_texts(1, length, size.letters, generator_of(length, device=device))

    def step() -> None:
        loss_of(model, texts).backward()  # type: ignore[no-untyped-call]

    return time_calls(step, device, size.repeats)


def measure(run: Run) -> dict[str, Any]:
    size = TINY if run.tiny else FULL
    dilations, seeds = dilations_for(size.reach), range(size.seeds)

    def learn(item: tuple[str, int | None, int]) -> list[float]:
        return learn_recall(*item, size, run.device)

    def time_one(item: tuple[str, int]) -> list[float]:
        return time_steps(*item, size, run.device)

    kinds = {}
    for kind in KINDS:
        alone = [
            [
                share
                for (share,) in run.map(f"{kind}, {d} tokens", learn, [(kind, d, n) for n in seeds])
            ]
            for d in size.distances
        ]
        together = run.map(f"{kind}, all distances", learn, [(kind, None, n) for n in seeds])
        kinds[kind] = {
            "parameters": sum(p.numel() for p in make_model(kind, size, 0).parameters()),
            "alone": alone,
            "together": [list(each) for each in zip(*together, strict=True)],
            "path": [count_steps(kind, d, dilations) for d in size.distances],
            "seconds": run.map(f"{kind}, times", time_one, [(kind, n) for n in size.timed]),
        }
    return {
        "seeds": size.seeds,
        "steps": list(size.steps),
        "guessing": 1 / size.letters,
        "distances": list(size.distances),
        "lengths": list(size.timed),
        "dilations": dilations,
        "kinds": kinds,
    }


def find_crossing(lengths: list[int], ours: np.ndarray, theirs: np.ndarray) -> float:
    """The length from which on `ours` is slower at all lengths, interpolated between two of them.

    Times are interpolated linearly in logarithms. Infinite if ours is not slower at the longest
    length; 0 if it is slower at every length.
    """
    ratios = np.log(ours) - np.log(theirs)
    if ratios[-1] <= 0:
        return math.inf
    crossing = 0.0
    for (near, far), (before, after) in zip(pairwise(lengths), pairwise(ratios), strict=True):
        if before <= 0 < after:
            crossing = near * (far / near) ** (-before / (after - before))
    return crossing


def spell_crossing(results: Results, other: str) -> str:
    """Say from which length on a step of attention is slower than the other's, with interval."""
    lengths, kinds = results["lengths"], results["kinds"]
    # (lengths, draws) of medians; the first column is that of the original calls.
    ours, theirs = (
        np.stack([medians_of(np.asarray(calls)) for calls in kinds[kind]["seconds"]])
        for kind in ("attention", other)
    )
    found = [find_crossing(lengths, ours[:, n], theirs[:, n]) for n in range(ours.shape[1])]
    crossing, (low, high) = found[0], np.quantile(found[1:], (0.025, 0.975), method="nearest")
    if math.isinf(low):
        longest = f"in the longest texts ({lengths[-1]:,} tokens)"
        return f"that of attention is not above that of the {other} {longest}"
    if high == 0:
        return f"that of attention is above that of the {other} from {lengths[0]:,} tokens on"
    outside = {0.0: f"under {lengths[0]:,}", math.inf: f"beyond {lengths[-1]:,}"}
    ends = [outside.get(float(end), f"{end:,.0f}") for end in (low, high)]
    at = outside.get(float(crossing), f"at {crossing:,.0f}")
    return (
        f"that of attention crosses that of the {other} {at} tokens "
        f"(95% interval {ends[0]} to {ends[1]})"
    )


def medians_of(calls: np.ndarray) -> np.ndarray:
    drawn: np.ndarray = np.concatenate([[np.median(calls)], np.median(resample(calls), -1)])
    return drawn


def find(results: Results) -> list[str]:
    kinds, farthest = results["kinds"], results["distances"][-1]
    counts = ", ".join(f"{kind} {kinds[kind]['parameters']:,}" for kind in KINDS)
    alone, together = (
        list_intervals({kind: mean_share(kinds[kind][way][-1]) for kind in KINDS}, ".2f")
        for way in ("alone", "together")
    )
    held = ", ".join(f"{kind} {spell_reach(results, kind)}" for kind in KINDS)
    ways = ", ".join(f"{kind} {spell_path(kinds[kind]['path'][-1])}" for kind in KINDS)
    seconds = {
        kind: median_time([1000 * each for each in kinds[kind]["seconds"][-1]]) for kind in KINDS
    }
    crossings = " and ".join(spell_crossing(results, other) for other in KINDS[:-1])
    return [
        f"With about as many parameters ({counts}), trained for {results['steps'][0]:,} steps to "
        f"recall a letter marked {farthest:,} tokens ago and asked nowhere else, models do so at a "
        f"share of (95% intervals over {results['seeds']} seeds): {alone}; guessing gives "
        f"{results['guessing']:.2g}. {spell_lead(results, 'alone')}",
        f"At least {HELD:.0%} are recalled so, on average: {held}.",
        f"Asked at every token, near and far, for {results['steps'][1]:,} steps, they recall from "
        f"{farthest:,} tokens away: {together}. {spell_lead(results, 'together')}",
        f"From {farthest:,} tokens away information takes so many steps: {ways}.",
        f"A training step of one text of {results['lengths'][-1]:,} tokens takes, in ms, with 95% "
        f"intervals of the medians: {list_intervals(seconds)}.",
        f"As texts grow, the time of a step: {crossings}.",
    ]


def spell_lead(results: Results, way: str) -> str:
    """Say whether attention recalls more than each of the others at the longest distance."""
    kinds, words = results["kinds"], []
    for other in KINDS[:-1]:
        pairs = zip(kinds["attention"][way][-1], kinds[other][way][-1], strict=True)
        lead = mean_interval([ours - theirs for ours, theirs in pairs])
        if lead["low"] > 0:
            words.append(f"more than the {other}")
        elif lead["high"] < 0:
            words.append(f"less than the {other}, against the prediction")
        else:
            words.append(f"not clearly more or less than the {other}")
    return f"Attention recalls {' and '.join(words)}."


def spell_reach(results: Results, kind: str) -> str:
    """Format the farthest distance up to which all distances count as remembered."""
    farthest = None
    for distance, shares in zip(results["distances"], results["kinds"][kind]["alone"], strict=True):
        if np.mean(shares) < HELD:
            break
        farthest = distance
    return "at no distance" if farthest is None else f"up to {farthest:,} tokens away"


def spell_path(steps: int | None) -> str:
    return "none, it is out of reach" if steps is None else f"{steps:,}"


def draw(results: Results, figure: Figure) -> None:
    """Draw recall and path by distance, and time by length."""
    from matplotlib.ticker import LogLocator

    distances, lengths = results["distances"], results["lengths"]
    recall, paths, times = figure.subplots(1, 3)
    for n, (kind, mark) in enumerate(zip(KINDS, ("s", "^", "o"), strict=True)):
        found, style = results["kinds"][kind], {"color": f"C{n}", "marker": mark, "label": kind}
        shares = [mean_share(each) for each in found["alone"]]
        recall.plot(distances, [x["mean"] for x in shares], **style)
        low, high = ([x[end] for x in shares] for end in ("low", "high"))
        recall.fill_between(distances, low, high, alpha=0.15, color=style["color"])
        near = [mean_share(each)["mean"] for each in found["together"]]
        recall.plot(distances, near, ":", **{**style, "label": f"{kind}, asked everywhere"})
        steps = [math.nan if path is None else path for path in found["path"]]
        paths.plot(distances, steps, **style)
        times.plot(lengths, [1000 * float(np.median(x)) for x in found["seconds"]], **style)
    recall.axhline(results["guessing"], color="k", linewidth=0.8, label="guessing")
    recall.set(title="recalled (share)", xlabel="distance (tokens)", ylim=(-0.03, 1.03))
    paths.set(title="steps on the way", xlabel="distance (tokens)", yscale="log")
    times.set(title="a training step (ms)", xlabel="length of the text (tokens)", yscale="log")
    for axes, ticks in ((recall, distances), (paths, distances), (times, lengths[::2])):
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
        axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axes.grid(alpha=0.3)
    for axes in (paths, times):
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.tick_params(axis="y", which="minor", left=False, labelleft=False)
    lines, names = recall.get_legend_handles_labels()
    how: Any = {"loc": "outside lower center", "ncols": 4, "columnspacing": 1.2, "frameon": False}
    figure.legend(lines, names, **how)


LAB = Lab(
    name="fossils",
    question="What does attention do better than an LSTM and a convolution, and what does it cost?",
    prediction="Attention reaches any token in one step, a dilated convolution in a number of "
    "steps that grows with the logarithm of the distance, an LSTM in one for each token between; "
    "so the LSTM forgets first and attention recalls at any distance. Attention computes every "
    "pair of tokens: at some length a step of it takes longer than that of the others.",
    method="Texts of random letters, of which one of the first 16 is marked; what is asked is the "
    "marked letter. An LSTM (torch.nn.LSTM, one layer, forget gates opened by a bias of 1), a "
    "stack of causal dilated convolutions (kernel 2, dilations 1, 2, 4, ... up to the longest "
    "text, residual, normed) and a one-layer causal Transformer without positions, with about "
    "equal parameters, are trained by AdamW for the same steps: for each distance a model that is "
    "asked there and nowhere else; and one model for all that is asked at every token of texts of "
    "all lengths in turn. The path is computed: the least number of steps that move information "
    "so far. Times are forward and backward of one text, medians; the crossing is read between "
    "two lengths, on straight lines in logarithms, its interval by resampling the calls.",
    measure=measure,
    find=find,
    draw=draw,
)
