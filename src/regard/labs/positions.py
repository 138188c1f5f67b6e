"""What do positional encodings do, and which of them extrapolate past the trained length?

The text: each letter repeats the one two before it or, one time in ten, is any letter; so a model
that knows the order reaches `floor_loss` and no less. Once in a text a number replaces a letter,
and at every query token the target is that number, however long ago it came. So letters test order
nearby, and numbers test retrieval by content from afar.

A rotary scaling is applied at test time, to weights that were trained without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import Transformer
from regard.labs.interval import mean_interval, share_interval, side_of, spell_interval
from regard.labs.lab import Lab, Results
from regard.labs.parts import Run
from regard.labs.sentences import list_intervals, mean_share, spell_change
from regard.labs.small_training import generator_of, train
from regard.layers import BlockConfig, RelativeConfig
from regard.models.config import EmbedConfig, ModelConfig
from regard.positions import DynamicNTK, Linear, RotaryConfig, Scaling, YaRN
from regard.training.config import TrainConfig
from regard.training.init import start

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("no positions", "learned", "sinusoidal", "rotary", "ALiBi", "T5")
SCALINGS = ("linear", "NTK", "YaRN")
LAG = 2
REPEATED = 0.9  # how often a letter is the one `LAG` before it; else any letter
ASKED = 0.2  # the share of query tokens
NOTHING = -100  # the target of tokens that are not counted
TIMES = 10  # the longest texts, as a multiple of the trained length
GOING_ON = 0.1  # the most nats per letter that the loss may rise by to count as extrapolating
PREDICTED = ("ALiBi", "T5")  # the kinds predicted to extrapolate
BINS = 5  # of distances, when retrieval is reported by distance


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a run; `symbols` is the number of letters, and also that of numbers."""

    length: int
    multiples: tuple[int, ...]
    symbols: int
    dim: int
    batch: int
    steps: int
    lr: float
    texts: int
    seeds: int = 3


TINY = Size(
    length=24, multiples=(1, 3, TIMES), symbols=8, dim=32, batch=16, steps=70, lr=2e-2, texts=64
)
FULL = Size(
    length=128,
    multiples=(1, 2, 4, 7, TIMES),
    symbols=16,
    dim=64,
    batch=128,
    steps=500,
    lr=8e-3,
    texts=256,
)


@dataclass(frozen=True, eq=False)
class Texts:
    """Tokens (B, T), the target at each (B, T), and the position of the number (B,)."""

    ids: Tensor
    answers: Tensor
    places: Tensor


def draw_texts(n_texts: int, length: int, symbols: int, drawn: torch.Generator) -> Texts:
    """Draw texts of letters (ids 0 .. symbols - 1), numbers (as many) and query tokens (one id).

    The last token is a query token. A letter's target is the next letter; it counts if that letter
    and the one that it may repeat are visible, not replaced.
    """
    where: Any = {"generator": drawn, "device": drawn.device}
    at = torch.arange(length, device=drawn.device)
    fresh = torch.rand(n_texts, length, **where) >= REPEATED
    fresh |= at < LAG
    # Each position copies the last freshly drawn letter among positions equal to it modulo LAG.
    source = F.pad(torch.where(fresh, at, -1), (0, -length % LAG), value=-1)
    source = source.view(n_texts, -1, LAG).cummax(1).values.view(n_texts, -1)[:, :length]
    letters = torch.randint(symbols, (n_texts, length), **where).gather(1, source)
    asks = torch.rand(n_texts, length, **where) < ASKED
    asks |= at == length - 1
    places = torch.randint(length - 1, (n_texts, 1), **where)
    numbers = torch.randint(symbols, 2 * symbols, (n_texts, 1), **where)
    ids = torch.where(asks, 2 * symbols, letters)
    ids = torch.where(at == places, numbers, ids)
    is_letter = ids < symbols
    counted = is_letter.roll(-1, 1) & is_letter.roll(LAG - 1, 1)
    counted &= (at >= LAG - 1) & (at < length - 1)
    answers = torch.where(counted, letters.roll(-1, 1), NOTHING)
    told = torch.where(at > places, numbers, NOTHING)
    answers = torch.where(ids == 2 * symbols, told, answers)
    return Texts(ids, answers, places[:, 0])


def floor_loss(symbols: int) -> float:
    """The loss per letter, in nats, of a model that knows the letter that may be repeated."""
    other = (1 - REPEATED) / symbols
    same = REPEATED + other
    return -same * math.log(same) - (symbols - 1) * other * math.log(other)


def make_config(
    kind: str, size: Size, scaling: Scaling | None = None, *, causal: bool = True, n_layers: int = 2
) -> ModelConfig:
    """The config of a Transformer that differs from the others only by its positions."""
    n_heads = 4
    rotary = RotaryConfig(head_dim=size.dim // n_heads, scaling=scaling)
    block = BlockConfig(
        dim=size.dim,
        n_heads=n_heads,
        ffn_dim=2 * size.dim,
        activation="gelu",
        rotary=rotary if kind == "rotary" else None,
        alibi=kind == "ALiBi",
    )
    embed = EmbedConfig()
    if kind == "learned":
        embed = EmbedConfig(positions="learned")
    elif kind == "sinusoidal":  # as in the original Transformer: embeddings scaled to the sinusoid
        embed = EmbedConfig(positions="sinusoidal", scale=size.dim**0.5)
    blocks = (block,) * n_layers
    return ModelConfig(
        family="lab",
        vocab_size=2 * size.symbols + 1,
        max_len=size.length if kind == "learned" else None,
        encoder=() if causal else blocks,
        decoder=blocks if causal else (),
        embed=embed,
        relative=RelativeConfig(n_buckets=16, max_distance=size.length // 2)
        if kind == "T5"
        else None,
    )


def make_scaling(name: str, factor: float, length: int) -> Scaling:
    """Make a rotary scaling for texts `factor` times as long as in training."""
    if name == "linear":
        return Linear(factor=factor)
    if name == "NTK":  # it finds the factor from the length of the text
        return DynamicNTK(factor=1.0, original_max_len=length)
    return YaRN(factor=factor, original_max_len=length)


def loss_of(model: nn.Module, texts: Texts) -> Tensor:
    return F.cross_entropy(model(texts.ids).logits.flatten(0, 1), texts.answers.flatten())


def train_model(kind: str, seed: int, size: Size, device: torch.device) -> Transformer:
    model = Transformer(make_config(kind, size), device=device)
    start(model, seed)

    def draw_batch(step: int) -> Texts:
        drawn = generator_of(seed, step, device=device)
        return draw_texts(size.batch, size.length, size.symbols, drawn)

    warmup = size.steps // 10
    config = TrainConfig(steps=size.steps, lr=size.lr, warmup=warmup, weight_decay=0.0)
    train(model, draw_batch, loss_of, config)
    return model


def scaled_model(trained: Transformer, size: Size, scaling: Scaling) -> Transformer:
    """Copy a trained model, with a scaling of its rotary positions."""
    device = next(trained.parameters()).device
    model = Transformer(make_config("rotary", size, scaling), device=device)
    model.load_state_dict(trained.state_dict())
    return model.eval()


@dataclass(frozen=True, eq=False)
class Answers:
    """For each text: losses (B, T), which count as letters' (B, T), and the retrieval at its end.

    `right`: whether the number is predicted at the last token; `distances`: how far back it is.
    """

    losses: Tensor
    counted: Tensor
    right: Tensor
    distances: Tensor

    def mean_loss(self, begin: int, end: int) -> float:
        """The mean loss of letters at positions begin to end - 1."""
        counted = self.counted[:, begin:end]
        return float(self.losses[:, begin:end][counted].double().mean())


@torch.no_grad()
def ask_texts(model: nn.Module, seed: int, length: int, size: Size) -> Answers:
    """Run the model on texts of this length, which are the same for all models of a seed."""
    device = next(model.parameters()).device
    drawn = generator_of(seed, length, size.steps + 1, device=device)
    texts = draw_texts(size.texts, length, size.symbols, drawn)
    logits = torch.cat([model(ids).logits for ids in torch.split(texts.ids, 64)])
    losses = F.cross_entropy(logits.mT, texts.answers, reduction="none")
    is_letter = (texts.answers != NOTHING) & (texts.answers < size.symbols)
    right = logits[:, -1].argmax(-1) == texts.answers[:, -1]
    return Answers(losses.cpu(), is_letter.cpu(), right.cpu(), (length - 1 - texts.places).cpu())


def by_distance(answers: Answers, length: int) -> list[list[int]]:
    """[right, total] retrieved numbers for each bin of distances, from near to far."""
    bins = (answers.distances * BINS // length).clamp(max=BINS - 1)
    return [[int(answers.right[bins == n].sum()), int((bins == n).sum())] for n in range(BINS)]


def examine_model(model: Transformer, seed: int, size: Size, scaling: str | None) -> dict[str, Any]:
    """Measure losses and retrieval at the trained length and beyond; None past the table's end."""
    found: dict[str, Any] = {"retrieval": [], "far": None, "by distance": None}
    width, max_len = size.length // 2, model.config.max_len
    for times in size.multiples:
        length = times * size.length
        if max_len is not None and length > max_len:
            found["retrieval"].append(None)
            found["refusal"] = read_refusal(model, length)
            continue
        tested = model
        if scaling is not None:
            tested = scaled_model(model, size, make_scaling(scaling, times, size.length))
        answers = ask_texts(tested, seed, length, size)
        found["retrieval"].append(float(answers.right.double().mean()))
        if times == 1:
            found["trained"] = answers.mean_loss(0, length)
        if times == TIMES:
            found["far"] = answers.mean_loss(length - size.length, length)
            found["by distance"] = by_distance(answers, length)
        ends = range(width, length + 1, width)
        found["by position"] = [answers.mean_loss(end - width, end) for end in ends]
    return found


def read_refusal(model: Transformer, length: int) -> str:
    """The library's error message for a text longer than the table of positions."""
    device = next(model.parameters()).device
    try:
        model(torch.zeros(1, length, dtype=torch.int64, device=device))
    except ValueError as error:
        return str(error)
    raise AssertionError("a model with a table of positions went past its end")


@torch.no_grad()
def probe_positions(model: Transformer, seed: int, size: Size) -> dict[str, float]:
    """R² of a linear probe for the position, on the embeddings and on the last hidden states.

    It is fitted on one half of the texts and evaluated on the other.
    """
    device = next(model.parameters()).device
    drawn = generator_of(seed, size.steps + 2, device=device)
    texts = draw_texts(size.texts, size.length, size.symbols, drawn)
    hidden = model(texts.ids, keep_hidden=True).hidden
    found = {}
    half = size.texts // 2
    at = torch.arange(size.length, dtype=torch.float64).repeat(half, 1).flatten()[:, None]
    for name, states in (("embeddings", hidden[0]), ("last vectors", hidden[-1])):
        rows = F.pad(states.double().cpu(), (0, 1), value=1.0)
        known, asked = rows[:half].flatten(0, 1), rows[half : 2 * half].flatten(0, 1)
        weights = torch.linalg.lstsq(known, at, driver="gelsd").solution
        error = (asked @ weights - at).square().mean() / at.var(correction=0)
        found[name] = float(1 - error)
    return found


@torch.no_grad()
def measure_moved(kind: str, size: Size, causal: bool = False) -> float:
    """How far a layer is from permutation equivariance, relative to the largest output.

    0: permuting the tokens permutes the outputs.
    """
    model = Transformer(make_config(kind, size, causal=causal, n_layers=1), dtype=torch.float64)
    drawn = generator_of(7)
    for parameter in model.parameters():
        spread = parameter.shape[-1] ** -0.5
        parameter.copy_(torch.randn(parameter.shape, generator=drawn) * spread)
    ids = draw_texts(1, size.length, size.symbols, drawn).ids
    order = torch.randperm(size.length, generator=drawn)
    moved, plain = model(ids[:, order]).last, model(ids).last[:, order]
    return float((moved - plain).abs().max() / plain.abs().max())


def measure(run: Run) -> dict[str, Any]:
    size = TINY if run.tiny else FULL

    def one(item: tuple[str, int]) -> dict[str, Any]:
        kind, seed = item
        model = train_model(kind, seed, size, run.device)
        found = {kind: examine_model(model, seed, size, None)}
        if kind == "rotary":
            for scaling in SCALINGS:
                found[f"rotary, {scaling}"] = examine_model(model, seed, size, scaling)
        probe = probe_positions(model, seed, size) if kind == "no positions" else None
        return {"tests": found, "probe": probe}

    def moved(item: tuple[str, bool]) -> float:
        return measure_moved(item[0], size, item[1])

    layers = [(kind, False) for kind in KINDS] + [("no positions", True)]
    names = [*KINDS, "no positions but a causal mask"]
    items = [(kind, seed) for seed in range(size.seeds) for kind in KINDS]
    moves = dict(zip(names, run.map("permuted tokens", moved, layers), strict=True))
    parts = run.map("trained models", one, items)
    tests: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        for name, found in part["tests"].items():
            tests.setdefault(name, []).append(found)
    probes = [part["probe"] for part in parts if part["probe"] is not None]
    return {
        "length": size.length,
        "lengths": [times * size.length for times in size.multiples],
        "seeds": size.seeds,
        "floor": floor_loss(size.symbols),
        "symbols": size.symbols,
        "moved": moves,
        "probe": {name: [probe[name] for probe in probes] for name in probes[0]},
        "refusal": tests["learned"][0]["refusal"],
        "tests": tests,
    }


def each_seed(results: Results, name: str, what: str) -> list[Any]:
    return [found[what] for found in results["tests"][name]]


def differences(results: Results, name: str, what: str, other: str, base: str) -> dict[str, float]:
    """Difference of `what` of one model and `base` of another, paired by seed, with interval."""
    pairs = zip(each_seed(results, name, what), each_seed(results, other, base), strict=True)
    return mean_interval([one - less for one, less in pairs])


def find(results: Results) -> list[str]:
    return [*find_lengths(results), *find_scalings(results), *find_order(results)]


def find_order(results: Results) -> list[str]:
    """Say what a layer knows of order, without positions and with them."""
    moved = results["moved"]
    told = ", ".join(f"{name} {value:.1g}" for name, value in moved.items())
    blind = [name for name, value in moved.items() if value < 1e-6]
    against = "" if blind == ["no positions"] else ", against the prediction"
    floor, uniform = results["floor"], math.log(results["symbols"])
    lost = mean_interval(each_seed(results, "no positions", "trained"))
    probe = {name: mean_interval(values) for name, values in results["probe"].items()}
    pairs = zip(results["probe"]["last vectors"], results["probe"]["embeddings"], strict=True)
    gain = mean_interval([last - first for last, first in pairs])
    if gain["low"] > 0 and probe["last vectors"]["low"] > 0:
        verdict = "so the causal mask alone tells it something of where a token stands"
    else:
        verdict = "so that it knows where a token stands is not clear"
    return [
        f"When a layer's tokens are permuted, its outputs miss moving with them by, in parts of "
        f"the largest output: {told}. Blind to order, that is below 1e-6: "
        f"{', '.join(blind) or 'not one of them'}{against}.",
        f"A causal model without positions loses {spell_interval(lost)} nats a letter at the "
        f"trained length, where {floor:.3g} is the least possible and {uniform:.3g} is knowing "
        f"nothing; the position as a linear function of its last vectors has an R² of "
        f"{spell_interval(probe['last vectors'])}, of its embeddings "
        f"{spell_interval(probe['embeddings'])}, {verdict}.",
    ]


def find_lengths(results: Results) -> list[str]:
    """Say how losses and retrieval change from the trained length to the longest."""
    length, longest = results["length"], results["lengths"][-1]
    trained = {kind: mean_interval(each_seed(results, kind, "trained")) for kind in KINDS}
    far = {
        kind: differences(results, kind, "far", kind, "trained")
        for kind in KINDS
        if each_seed(results, kind, "far")[0] is not None
    }
    changes = "; ".join(f"{kind} {spell_change(each)}" for kind, each in far.items())
    sides = {kind: side_of(each, GOING_ON) for kind, each in far.items()}
    going_on, unclear = ([kind for kind in far if sides[kind] == side] for side in (-1, 0))
    as_predicted = all(side in (0, -1 if kind in PREDICTED else 1) for kind, side in sides.items())
    against = "" if as_predicted else ", which is not as predicted"
    against += f"; not clear with: {', '.join(unclear)}" if unclear else ""
    ended = [kind for kind in KINDS if kind not in far]
    told = {kind: each_seed(results, kind, "retrieval") for kind in far}
    shares = {kind: mean_share([seed[-1] for seed in seeds]) for kind, seeds in told.items()}
    gains = {kind: mean_interval([n[-1] - n[0] for n in seeds]) for kind, seeds in told.items()}
    worse = [kind for kind, gain in gains.items() if gain["high"] < 0]
    return [
        f"Trained on {length} tokens, a model goes on to {longest:,}, where a letter of the last "
        f"{length} costs less than {GOING_ON} nats more, with: "
        f"{', '.join(going_on) or 'not one of them'}{against}. There the loss of {changes}. "
        f"{' and '.join(ended).capitalize()} has no position there ({results['refusal']}).",
        f"At the trained length a letter costs, in nats, with 95% intervals over "
        f"{results['seeds']} seeds: {list_intervals(trained)}.",
        f"A number somewhere in {longest:,} tokens is told right at a share of: "
        f"{list_intervals(shares, '.2f')}; guessing gives {1 / results['symbols']:.2g}. Clearly "
        f"less than at the trained length: {', '.join(worse) or 'not one of them'}.",
    ]


def find_scalings(results: Results) -> list[str]:
    """Say what each scaling of rotary positions does at the longest texts."""
    longest, sentences = results["lengths"][-1], []
    for scaling in SCALINGS:
        name = f"rotary, {scaling}"
        loss = differences(results, name, "far", "rotary", "far")
        shares, plain = (
            [each[-1] for each in each_seed(results, which, "retrieval")]
            for which in (name, "rotary")
        )
        gain = mean_interval([one - less for one, less in zip(shares, plain, strict=True)])
        rest = differences(results, name, "far", name, "trained")
        sentences.append(
            f"With {scaling} scaling at {longest:,} tokens the loss of rotary {spell_change(loss)} "
            f"and its retrieval {spell_change(gain, '.2f')}; against the trained length the loss "
            f"{spell_change(rest)}."
        )
    return sentences


def draw(results: Results, figure: Figure) -> None:
    """Draw loss by position, and retrieval by length and by distance, for each kind."""
    length, lengths = results["length"], results["lengths"]
    losses, shares, distances = figure.subplots(1, 3)
    for name, tests in results["tests"].items():
        style: dict[str, Any] = {"color": f"C{KINDS.index(name.split(',')[0])}", "label": name}
        style["linestyle"] = dict(zip(SCALINGS, ("-.", ":", "--"), strict=True)).get(
            name.removeprefix("rotary, "), "-"
        )
        lost = over_seeds(tests, "by position")
        at = [0.5 * (n + 0.5) for n in range(len(lost))]
        losses.plot(at, [mean_interval(values)["mean"] for values in lost], **style)
        told = [values for values in over_seeds(tests, "retrieval") if values[0] is not None]
        shares.plot(lengths[: len(told)], [mean_share(x)["mean"] for x in told], ".", **style)
        if tests[0]["by distance"] is not None:
            counts = [
                [sum(x) for x in zip(*n, strict=True)] for n in over_seeds(tests, "by distance")
            ]
            at = [(n + 0.5) * lengths[-1] / BINS for n in range(BINS)]
            distances.plot(at, [share_interval(*x)["mean"] for x in counts], ".", **style)
    losses.axhline(results["floor"], color="k", linewidth=0.8, label="least possible")
    losses.axvline(1, color="k", alpha=0.3)
    losses.set(title="loss of a letter (nats)", xlabel=f"position / trained length ({length})")
    shares.set(title="numbers told right", xlabel="length of the text (tokens)", xscale="log")
    shares.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=30)
    shares.minorticks_off()
    distances.set(title=f"… in {lengths[-1]:,} tokens", xlabel="how long ago (tokens)")
    for axes in (losses, shares, distances):
        axes.grid(alpha=0.3)
    shares.set_ylim(-0.03, 1.03)
    distances.set_ylim(-0.03, 1.03)
    lines, names = losses.get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=5, frameon=False)


def over_seeds(tests: list[dict[str, Any]], what: str) -> list[Any]:
    """Combine the seeds' values, entry by entry."""
    return list(zip(*(found[what] for found in tests), strict=True))


LAB = Lab(
    name="positions",
    question="What do positions do, and which of them go on past the trained lengths?",
    prediction="Without positions attention is blind to order: outputs move with their tokens. "
    "Learned positions end with their table. Sinusoidal and rotary ones have values everywhere, "
    "but a model has seen few of them and fails at distances it was not trained on; scaling "
    "rotary brings these back into what was trained. ALiBi and T5's buckets know distance alone "
    "and go on.",
    method="Two-layer causal Transformers that differ by their positions alone, trained on texts "
    "of one length and tested on texts up to 10 times as long. Each letter of a text repeats "
    "that two places before it with probability 0.9; once in a text stands a number, and at "
    "asking signs, a fifth of all tokens, this number is the answer. Counted are the letters' "
    "loss by position, and whether the number is told at the last token, by the text's length "
    "and by how long ago it came. Rotary scalings (linear; dynamic NTK with factor 1; YaRN) are "
    "put on at test time, with the factor length / trained length. T5 has 16 buckets up to half "
    "the trained length. Order: one layer with random weights, in float64, its tokens permuted. "
    "What a causal model without positions knows: a linear fit of the position, by least squares "
    "on half of the texts, tested on the others.",
    measure=measure,
    find=find,
    draw=draw,
)
