"""How does a model learn to continue a sequence that it has read once, and which heads do it?

An induction head attends from a token to the one that followed it earlier: in "... A B ... A" from
the second A to B. The key at B has to know the token before B, which a head of an earlier layer has
to write there; so two layers can do it, and one cannot.

Letters: B texts, T tokens, C model width, H heads, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regard import Ablate, Block, MultiHeadAttention, edit, load
from regard.labs.interval import mean_interval, side_of, spell_interval
from regard.labs.lab import Lab, Results
from regard.labs.parts import Run
from regard.labs.sentences import mean_share
from regard.labs.small_training import generator_of, train
from regard.layers import make_norm
from regard.lens.batch_scores import score_batch
from regard.lens.edit.values import Edit
from regard.lens.lazy_weights import Array
from regard.lens.record import SCORES
from regard.positions import RotaryConfig
from regard.training.config import TrainConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = ("accuracy", "log_prob", "score")
LANGUAGE_MODEL = "embedded:lm"
OTHERS = 5  # how often a random set of other heads is drawn
EVERY = 10  # steps between two evaluations
EVALUATION = 1_000_000  # a step number that no training reaches


@dataclass(frozen=True, kw_only=True)
class Size:
    """The models, their texts, and how long they are trained."""

    vocab_size: int
    n_tokens: int
    dim: int
    n_heads: int
    n_texts: int
    lr: float
    steps: int
    seeds: int
    n_evaluated: int
    """Texts in an evaluation."""
    n_read: int
    """Texts that the language model reads."""
    half: int
    """Length of the segment that each of these texts repeats."""


TINY = Size(
    vocab_size=32,
    n_tokens=32,
    dim=64,
    n_heads=4,
    n_texts=24,
    lr=7e-3,
    steps=170,
    seeds=3,
    n_evaluated=32,
    n_read=12,
    half=24,
)
FULL = Size(
    vocab_size=64,
    n_tokens=128,
    dim=128,
    n_heads=8,
    n_texts=128,
    lr=3e-3,
    steps=400,
    seeds=6,
    n_evaluated=128,
    n_read=128,
    half=64,
)


class AttentionOnly(nn.Module):
    """Layers of attention without feed-forward: x + attention(norm(x)), then logits."""

    def __init__(self, size: Size, n_layers: int) -> None:
        super().__init__()
        dim, n_heads = size.dim, size.n_heads
        self.embed = nn.Embedding(size.vocab_size, dim)
        nn.init.normal_(self.embed.weight, std=dim**-0.5)
        rotary = RotaryConfig(head_dim=dim // n_heads)
        self.layers = nn.ModuleList(
            MultiHeadAttention(dim, n_heads, causal=True, rotary=rotary, bias=False)
            for _ in range(n_layers)
        )
        self.norms = nn.ModuleList(make_norm("rms", dim) for _ in range(n_layers + 1))
        self.head = nn.Linear(dim, size.vocab_size, bias=False)

    def forward(self, ids_bt: Tensor) -> Tensor:
        x_btc = self.embed(ids_bt)
        for norm, layer in zip(self.norms[:-1], self.layers, strict=True):
            x_btc = x_btc + layer(norm(x_btc))
        logits_btv: Tensor = self.head(self.norms[-1](x_btc))
        return logits_btv


@dataclass(frozen=True, eq=False)
class Texts:
    """Ids (B, T), next tokens (B, T), and which of the latter can be predicted (B, T)."""

    ids: Tensor
    targets: Tensor
    repeated: Tensor


def draw_texts(size: Size, seed: int, step: int, n_texts: int, device: torch.device) -> Texts:
    """Draw texts that repeat a random segment of distinct tokens.

    A segment is a quarter to a half of the text, of random length, so that no fixed distance helps.
    """
    T = size.n_tokens
    drawn = generator_of(seed, step, device=device)
    order_bv = torch.rand(n_texts, size.vocab_size, generator=drawn, device=device).argsort(1)
    length_b1 = torch.randint(T // 4, T // 2 + 1, (n_texts, 1), generator=drawn, device=device)
    return repeat_texts(order_bv, length_b1, T)


def repeat_texts(order_bv: Tensor, length_b1: Tensor, n_tokens: int) -> Texts:
    """Repeat the first `length_b1` tokens of each row up to n_tokens.

    A next token can be predicted from the first repeated token on.
    """
    at_t = torch.arange(n_tokens + 1, device=order_bv.device)
    ids = order_bv.gather(1, at_t % length_b1)
    return Texts(ids[:, :-1], ids[:, 1:], at_t[:-1] >= length_b1)


def loss_of(model: nn.Module, texts: Texts) -> Tensor:
    """The mean cross-entropy of the predictable next tokens, in nats."""
    loss_bt = cross_entropy(model(texts.ids).mT, texts.targets, reduction="none")
    return (loss_bt * texts.repeated).sum() / texts.repeated.sum()


@dataclass(frozen=True, eq=False)
class Seen:
    """An evaluation: the share of predictable tokens that the model ranks first, their mean
    log-probability, and head scores (`lens/head_scores.py`), name -> (L, H)."""

    accuracy: float
    log_prob: float
    scores: dict[str, Array]


def score_heads(
    model: nn.Module, run: Callable[[Tensor], object], ids_bt: Tensor
) -> dict[str, Array]:
    """The two head scores of an induction circuit, name -> (L, H), as means over the texts."""
    labels = [["a"] * ids_bt.shape[1]] * len(ids_bt)
    found = score_batch(model, run, ids_bt, labels)
    by_layer = [found[place].mean(0) for place in sorted(found, key=lambda place: place.layer)]
    scores_lhk = np.stack(by_layer)
    return {name: scores_lhk[:, :, SCORES.index(name)] for name in ("induction", "previous")}


def evaluate(model: nn.Module, texts: Texts) -> Seen:
    model.eval()
    said: list[Tensor] = []
    scores = score_heads(model, lambda ids_bt: said.append(model(ids_bt)), texts.ids)
    log_probs_btv = said[0].log_softmax(-1)
    right_n = (log_probs_btv.argmax(-1) == texts.targets)[texts.repeated]
    own_btv = log_probs_btv.gather(2, texts.targets[..., None])
    accuracy, log_prob = right_n.float().mean(), own_btv[texts.repeated].mean()
    return Seen(float(accuracy), float(log_prob), scores)


def train_one(seed: int, n_layers: int, size: Size, device: torch.device) -> dict[str, Any]:
    """Train one model, evaluating it on the way, and at the end with heads switched off."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AttentionOnly(size, n_layers).to(device)
    texts = draw_texts(size, seed, EVALUATION, size.n_evaluated, device)
    found: dict[str, Any] = {"seed": seed, "n_layers": n_layers, "steps": []}
    found |= {name: [] for name in METRICS}

    def look(step: int) -> None:
        if (step + 1) % EVERY:
            return
        seen = evaluate(model, texts)
        values = seen.accuracy, seen.log_prob, float(seen.scores["induction"][-1].max())
        for name, value in zip(METRICS, values, strict=True):
            found[name].append(value)
        found["steps"].append(step + 1)

    look(-1)
    config = TrainConfig(
        steps=size.steps, lr=size.lr, schedule="constant", warmup=20, weight_decay=0.0
    )

    def draw_batch(step: int) -> Texts:
        return draw_texts(size, seed, step, size.n_texts, device)

    train(model, draw_batch, loss_of, config, after=look)
    found["ablated"] = ablate(model, size, seed, device) if n_layers > 1 else {}
    return found


def split_heads(scores: Array) -> tuple[list[int], list[int]]:
    """Split a layer's heads into those with at least half of the highest score, and the others."""
    doing = scores >= scores.max() / 2
    return np.nonzero(doing)[0].tolist(), np.nonzero(~doing)[0].tolist()


def ablate(model: nn.Module, size: Size, seed: int, device: torch.device) -> dict[str, Any]:
    """Measure accuracy without some heads, or without some edges, on texts of two equal halves."""
    half = size.n_tokens // 2
    drawn = generator_of(seed, EVALUATION + 1, device=device)
    shape = size.n_evaluated, size.vocab_size
    order_bv = torch.rand(shape, generator=drawn, device=device).argsort(1)
    texts = repeat_texts(order_bv, torch.full_like(order_bv[:, :1], half), 2 * half)

    def without(*edits: Edit) -> float:
        with edit(model, *edits):
            return evaluate(model, texts).accuracy

    seen = evaluate(model, texts)
    last = len(seen.scores["induction"]) - 1
    doing, others = split_heads(seen.scores["induction"][last])
    before, _ = split_heads(seen.scores["previous"][0])
    found = {
        "n_doing": len(doing),
        "nothing": seen.accuracy,
        "induction": without(Ablate(last, tuple(doing))),
        "one": float(np.mean([without(Ablate(last, head)) for head in doing])),
        "others": without(Ablate(last, tuple(others))) if others else None,
        "previous": without(Ablate(0, tuple(before))),
    }
    for name, after in (("look", 1), ("other look", 2)):
        found[name] = without(*forbid_looks(half, last, after))
    return found


def forbid_looks(half: int, layer: int, after: int) -> list[Edit]:
    """Block each token of the second half from the key `after` behind its first occurrence."""
    return [Block(t, t - half + after, layer) for t in range(half, 2 * half)]


@torch.no_grad()
def measure_language_model(name: str, n_texts: int, half: int, device: torch.device) -> list[Any]:
    """Measure how much better a language model predicts repeated random tokens, with heads off."""
    model = load(name, device=device).eval()
    drawn = generator_of(n_texts, half, device=device)
    V, shape = model.config.vocab_size, (n_texts, half)
    order_bt = torch.randint(V, shape, generator=drawn, device=device)
    texts = repeat_texts(order_bt, torch.full_like(order_bt[:, :1], half), 2 * half - 1)

    def gains(heads: Sequence[Sequence[int]]) -> list[float]:
        with edit(model, *(Ablate(layer, head) for layer, head in heads)):
            logits_btv = model(texts.ids).logits
        logs_bt = logits_btv.log_softmax(-1).gather(2, texts.targets[..., None])[..., 0]
        # Both means are over the same targets: a segment without its first token.
        first, second = logs_bt[:, : half - 1].mean(1), logs_bt[:, half:].mean(1)
        return [float(x) for x in second - first]

    scores_lh = score_heads(model, model, texts.ids)["induction"]
    doing = np.argwhere(scores_lh >= scores_lh.max() / 2).tolist()
    found = [{"off": "nothing", "gains": gains([]), "scores": scores_lh.tolist()}]
    found.append({"off": "induction", "gains": gains(doing), "heads": doing})
    for seed in range(OTHERS):
        others = draw_others(doing, scores_lh.shape[1], np.random.default_rng(seed))
        found.append({"off": "others", "gains": gains(others), "heads": others})
    return found


def draw_others(
    heads: Sequence[Sequence[int]], n_heads: int, drawn: np.random.Generator
) -> list[list[int]]:
    """Draw as many other heads of the same layers, or fewer if a layer has no more."""
    found = []
    for layer in sorted({layer for layer, _ in heads}):
        own = [head for at, head in heads if at == layer]
        rest = [head for head in range(n_heads) if head not in own]
        picked = drawn.permutation(rest)[: len(own)].tolist()
        found += [[layer, head] for head in sorted(picked)]
    return found


def measure(run: Run) -> dict[str, Any]:
    size = TINY if run.tiny else FULL

    def one(item: tuple[int, int]) -> dict[str, Any]:
        return train_one(item[1], item[0], size, run.device)

    items = [(n_layers, seed) for n_layers in (2, 1) for seed in range(size.seeds)]
    trained = run.map("layers and seed", one, items)

    def read(name: str) -> list[Any]:
        return measure_language_model(name, size.n_read, size.half, run.device)

    model = run.map("a language model", read, [LANGUAGE_MODEL])[0]
    return {"n_heads": size.n_heads, "runs": trained, "language_model": model}


def way_of(trained: Results, metric: str) -> Array:
    """Rescale a metric at each evaluation so that its first value is 0 and its last is 1."""
    values = np.array(trained[metric])
    return np.asarray((values - values[0]) / (values[-1] - values[0]))


def step_of(trained: Results, metric: str, share: float) -> float:
    """The step (interpolated) at which the rescaled metric first reaches this share."""
    steps, way = trained["steps"], way_of(trained, metric)
    after = int((way >= share).argmax())
    return float(np.interp(share, way[after - 1 : after + 1], steps[after - 1 : after + 1]))


def find(results: Results) -> list[str]:
    two = [one for one in results["runs"] if one["n_layers"] == 2]
    one = [one for one in results["runs"] if one["n_layers"] == 1]
    jumped = [each for each in two if each["accuracy"][-1] >= 0.5]
    found = [find_layers(one, two, jumped)]
    if len(jumped) > 1:
        found += [find_jump(jumped), find_sharpness(jumped)]
        found += [find_heads(jumped, results["n_heads"]), find_looks(jumped)]
    return [*found, find_language_model(results["language_model"])]


def find_layers(one: list[Any], two: list[Any], jumped: list[Any]) -> str:
    also = [each for each in one if each["accuracy"][-1] >= 0.5]
    said = "does not learn it" if not also else f"learns it in {len(also)}, against the prediction"
    with_one, with_two = (mean_share([x["accuracy"][-1] for x in runs]) for runs in (one, two))
    return (
        f"{len(jumped)} of {len(two)} models with two layers learn to go on with a repeated "
        f"segment (at least half of its tokens right): {spell_interval(with_two)} of them at the "
        f"end. One layer, as long trained, {said}: {spell_interval(with_one)}, over {len(one)} "
        "seeds."
    )


def find_jump(jumped: list[Any]) -> str:
    steps = {name: [step_of(each, name, 0.5) for each in jumped] for name in METRICS}
    later = mean_interval(np.subtract(steps["score"], steps["accuracy"]).tolist())
    said = {1: "after it", 0: "not clearly before or after", -1: "before it"}[side_of(later)]
    ends = [mean_share([each["score"][at] for each in jumped]) for at in (0, -1)]
    return (
        f"Accuracy is half-way at step {spell_interval(mean_interval(steps['accuracy']))}, and the "
        f"best induction head's score, which goes from {spell_interval(ends[0])} to "
        f"{spell_interval(ends[1])}, {said}: {spell_interval(later, '+.3g')} steps later."
    )


def find_sharpness(jumped: list[Any]) -> str:
    widths = {
        name: [step_of(each, name, 0.9) - step_of(each, name, 0.1) for each in jumped]
        for name in ("accuracy", "log_prob")
    }
    wider = mean_interval(np.divide(widths["log_prob"], widths["accuracy"]).tolist())
    said = {
        1: "so that the jump is sharper in the sharp metric",
        0: "so that it is not clear which jump is sharper",
        -1: "so that the jump is sharper in the smooth metric, against the prediction",
    }[side_of(wider, 1)]
    begun = [
        float(np.interp(step_of(each, "accuracy", 0.1), each["steps"], way_of(each, "log_prob")))
        for each in jumped
    ]
    sharp, smooth = (mean_interval(widths[name]) for name in ("accuracy", "log_prob"))
    return (
        f"Accuracy goes from a tenth to nine tenths of its way in {spell_interval(sharp)} steps, "
        f"the log-probability of the same tokens in {spell_interval(smooth)}, "
        f"{spell_interval(wider)} times as many, {said}; when accuracy has made its first tenth, "
        f"log-probability has made {spell_interval(mean_interval(begun))} of its way."
    )


def find_heads(jumped: list[Any], n_heads: int) -> str:
    all_off, one_off, no_previous, whole = (
        mean_share([each["ablated"][name] for each in jumped])
        for name in ("induction", "one", "previous", "nothing")
    )
    counts = [each["ablated"]["n_doing"] for each in jumped]
    others = [each["ablated"]["others"] for each in jumped]
    known = [value for value in others if value is not None]
    rest = "there are no others in that layer"
    if known:
        rest = f"without the others of that layer, in {len(known)} models, {np.mean(known):.3g}"
    return (
        f"{np.mean(counts):.3g} of {n_heads} heads of the last layer are induction heads (at least "
        f"half of the largest score), on average. Without them accuracy is "
        f"{spell_interval(all_off)} in place of {spell_interval(whole)}, without one of them alone "
        f"{spell_interval(one_off)}; {rest}. Without the heads of the first layer that look at the "
        f"token before it is {spell_interval(no_previous)}."
    )


def find_looks(jumped: list[Any]) -> str:
    look, other = ([each["ablated"][name] for each in jumped] for name in ("look", "other look"))
    lost = mean_interval(np.subtract(other, look).tolist())
    half = mean_interval(np.subtract(look, np.divide(other, 2)).tolist())
    said = {
        1: f"that look {'is the cause' if half['high'] < 0 else 'matters more'}",
        0: "which of the two matters is not clear",
        -1: "that look is not the cause, against the prediction",
    }[side_of(lost)]
    return (
        f"With all heads on, but each token forbidden to look at what came after it before, one "
        f"key of all, in the last layer, accuracy is {spell_interval(mean_share(look))}; with the "
        f"key behind that one forbidden {spell_interval(mean_share(other))}: {said}."
    )


def find_language_model(rows: list[Any]) -> str:
    whole = mean_interval(rows[0]["gains"])
    if whole["low"] <= 0:
        return (
            f"{LANGUAGE_MODEL} gains nothing clear on random tokens that it reads again: "
            f"{spell_interval(whole)} nats a token."
        )
    off = rows[1]["gains"]
    others = np.mean([row["gains"] for row in rows[2:]], axis=0)
    more = mean_interval((others - np.array(off)).tolist())
    said = {1: "less", 0: "not clearly less", -1: "more, against the prediction"}[side_of(more)]
    heads = ", ".join(f"{layer}.{head}" for layer, head in rows[1]["heads"])
    return (
        f"A real language model, {LANGUAGE_MODEL}, finds random tokens likelier by "
        f"{spell_interval(whole)} nats when it reads them again; without its heads {heads} (layer "
        f"and head, counted from 0; at least half of the largest induction score) by "
        f"{spell_interval(mean_interval(off))}, {said} than without as many others of the same "
        f"layers, {spell_interval(mean_interval(others.tolist()))}."
    )


def draw(results: Results, figure: Figure) -> None:
    sharp, smooth, bars = (figure.add_subplot(1, 3, n + 1) for n in range(3))
    for each in results["runs"]:
        n_layers = each["n_layers"]
        label = {2: "two layers", 1: "one layer"}[n_layers] if each["seed"] == 0 else None
        for axes, name in ((sharp, "accuracy"), (smooth, "log_prob")):
            axes.plot(each["steps"], each[name], f"C{2 - n_layers}", alpha=0.7, label=label)
        if n_layers == 2:
            label = "induction score" if each["seed"] == 0 else None
            sharp.plot(each["steps"], each["score"], ":", color="C2", label=label)
    sharp.set(title="accuracy on repeated tokens", xlabel="step", ylim=(-0.02, 1.02))
    smooth.set(title="their log-probability", xlabel="step", ylabel="nats")
    handles, names = sharp.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=3, frameon=False)
    draw_ablations(results, bars)
    for axes in (sharp, smooth, bars):
        axes.grid(alpha=0.3)


def draw_ablations(results: Results, axes: Any) -> None:
    labels = {
        "nothing": "nothing",
        "induction": "induction heads",
        "one": "one of them",
        "previous": "token-before heads",
        "look": "the induction look",
        "other look": "the look beside it",
    }
    trained = [each["ablated"] for each in results["runs"] if each["n_layers"] == 2]
    for at, name in enumerate(labels):
        values = [each[name] for each in trained]
        colour = "C3" if name in ("induction", "previous", "look") else "C0"
        axes.barh(at, float(np.mean(values)), color=colour, alpha=0.6)
        axes.plot(values, [at] * len(values), "k.", markersize=4)
    axes.set_yticks(range(len(labels)), labels.values())
    axes.invert_yaxis()
    axes.set(title="accuracy without …", xlim=(0, 1.02))


LAB = Lab(
    name="induction",
    question="How does a model learn to go on with what it has read once, and which heads do it?",
    prediction="Suddenly: after a plateau a head of the second layer begins to look at what came "
    "after the same token before, and accuracy jumps. One layer cannot do it. Without that head "
    "the ability is gone. Measured by log-probability the same change is less sudden.",
    method="Models of attention alone, with one and with two layers, rotary positions, trained on "
    "texts in which different random tokens come again and again in the same order, after a "
    "distance that is drawn for each text; the loss is of the repeated tokens. On new texts, "
    "every 10 steps: accuracy, mean log-probability, and the largest induction score of a head in "
    "the last layer (the mean weight on the token after the last earlier one of the same kind). "
    "Then, on texts of two equal halves, heads with at least half of the largest score in their "
    "layer are set to zero; and, with all heads on, the one look from each token to what came "
    "after it before is forbidden. Intervals are over seeds. Last, embedded:lm reads random tokens "
    "twice, with its own induction heads set to zero, and with other heads of the same layers, "
    "drawn 5 times; intervals are over texts.",
    measure=measure,
    find=find,
    draw=draw,
)
