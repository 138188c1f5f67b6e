"""Is learning from examples in a prompt gradient descent?

A prompt has examples (x_j, y_j) of a linear function and ends with an x whose y is to be predicted.
Consider linear regression with weights w, starting at w = 0, with the loss Σ (w · x_j - y_j)² / 2n.
One step of gradient descent with learning rate η gives

    w = η/n Σ y_j x_j,   so that   w · x = η/n Σ y_j (x_j · x).

The right side is attention without a softmax: the query is x, a key is x_j, a value is η/n y_j. So
one layer does the step if its matrices select, from a token (x, y), x for queries and keys and y
for values: this is the construction of von Oswald and others. Let a token have, in place of y, the
residual r = y - w · x, which is at first y itself, and 0 - w · x for the query token. Then the step
updates every residual alike, r ← r - η/n Σ r_j (x_j · x), and since the examples' residuals are now
those of the new w, a second such layer is a second step: k layers are k steps. Only examples are
keys; the query token is not one of them.

The dual form: one may compute the sum first, as an update of the weights, η/n Σ r_j x_jᵀ, and apply
it to x; or the products x_j · x first, as attention does. Both are one bilinear form.

Softmax approximates this: for small scores s its weights are (1 + s - mean of s)/n, so the
difference of two heads with scores εs and -εs, divided by 2ε, is linear attention up to the mean,
which is 0 if every example is present with its mirror image (-x, -y), and up to terms of ε².
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard import attention
from regard.labs.interval import mean_interval, spell_interval
from regard.labs.lab import Lab, Results
from regard.labs.parts import Run
from regard.labs.small_training import generator_of, train
from regard.layers import BlockConfig, Decoder
from regard.training.config import TrainConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEST, TUNING = 10_000_000, 20_000_000  # seeds that no training step uses
ALMOST_NONE = 1e-9  # the λ of least squares: about the smallest that float64 can solve with


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The sizes of a run. `n_dims`: those of x. Prompts have up to `n_examples`, with noisy y."""

    n_dims: int
    n_examples: int
    noise: float
    width: int
    depths: tuple[int, ...]
    gd_steps: tuple[int, ...]
    steps: int
    n_prompts: int  # a training step
    n_tests: int
    n_seeds: int


FULL = Plan(
    n_dims=8,
    n_examples=24,
    noise=0.5,
    width=128,
    depths=(1, 3),
    gd_steps=(1, 3, 12),
    steps=1600,
    n_prompts=1024,
    n_tests=2048,
    n_seeds=4,
)
TINY = Plan(
    n_dims=3,
    n_examples=9,
    noise=0.5,
    width=32,
    depths=(1, 2),
    gd_steps=(1, 2, 12),
    steps=200,
    n_prompts=64,
    n_tests=1024,
    n_seeds=3,
)


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Linear functions w (B, D), inputs x (B, T, D), and y (B, T) = w · x + noise."""

    w_bd: Tensor
    x_btd: Tensor
    y_bt: Tensor


def draw_prompts(plan: Plan, n_prompts: int, generator: torch.Generator) -> Prompts:
    """Draw x and w as independent normal numbers, with one x more than there are examples."""
    device = generator.device
    shape = (n_prompts, plan.n_examples + 1)
    w_bd = torch.randn(n_prompts, plan.n_dims, generator=generator, device=device)
    x_btd = torch.randn(*shape, plan.n_dims, generator=generator, device=device)
    noise_bt = torch.randn(shape, generator=generator, device=device)
    y_bt = (x_btd @ w_bd[..., None])[..., 0] + plan.noise * noise_bt
    return Prompts(w_bd=w_bd, x_btd=x_btd, y_bt=y_bt)


class Regressor(nn.Module):
    """A decoder that predicts y_t at each token t, whose input is x_t, x_t-1 and y_t-1.

    It has no positions, since the order of examples means nothing. At token t it knows t examples.
    """

    def __init__(self, plan: Plan, n_layers: int, device: torch.device) -> None:
        super().__init__()
        n_heads = max(1, plan.width // 32)
        block = BlockConfig(
            dim=plan.width, n_heads=n_heads, ffn_dim=4 * plan.width, activation="gelu"
        )
        self.read = nn.Linear(2 * plan.n_dims + 1, plan.width, device=device)
        self.decoder = Decoder(block, n_layers, device=device)
        self.answer = nn.Linear(plan.width, 1, device=device)

    def forward(self, prompts: Prompts) -> Tensor:
        before_bte = torch.cat([prompts.x_btd, prompts.y_bt[..., None]], -1)[:, :-1]
        before_bte = nn.functional.pad(before_bte, (0, 0, 1, 0))
        tokens = torch.cat([prompts.x_btd, before_bte], -1)
        answers: Tensor = self.answer(self.decoder(self.read(tokens)))[..., 0]
        return answers


def squared_error(model: nn.Module, prompts: Prompts) -> Tensor:
    loss: Tensor = (model(prompts) - prompts.y_bt).square().mean()
    return loss


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums over the first t examples: Σ x xᵀ (B, T, D, D), Σ x y (B, T, D), and t (T,)."""

    xx_btdd: Tensor
    xy_btd: Tensor
    count_t: Tensor


def sum_examples(prompts: Prompts) -> Sums:
    """Compute the sums in float64 on the CPU; those at t leave out x_t and all after it."""
    x_btd, y_bt = prompts.x_btd.cpu().double(), prompts.y_bt.cpu().double()
    xx_btdd = (x_btd[..., :, None] * x_btd[..., None, :]).cumsum(1)
    xy_btd = (x_btd * y_bt[..., None]).cumsum(1)
    return Sums(
        xx_btdd=nn.functional.pad(xx_btdd[:, :-1], (0, 0, 0, 0, 1, 0)),
        xy_btd=nn.functional.pad(xy_btd[:, :-1], (0, 0, 1, 0)),
        count_t=torch.arange(x_btd.shape[1], dtype=torch.float64),
    )


def solve_ridge(sums: Sums, penalty: float) -> Tensor:
    """Ridge regression, w = (Σ x xᵀ + λ)⁻¹ Σ x y.

    With λ = noise² it is the posterior mean of w given the examples, the best predictor. As λ goes
    to 0 it becomes least squares, of minimum norm if there are too few examples.
    """
    penalties = penalty * torch.eye(sums.xy_btd.shape[-1], dtype=torch.float64)
    solved: Tensor = torch.linalg.solve(sums.xx_btdd + penalties, sums.xy_btd[..., None])
    return solved[..., 0]


def descend(sums: Sums, rate_t: Tensor | float, n_steps: int) -> Tensor:
    """w after gradient descent from 0 on Σ (w · x - y)² / 2t, with a learning rate for each t."""
    share_t1 = (rate_t / sums.count_t.clamp(min=1))[:, None]
    w_btd = torch.zeros_like(sums.xy_btd)
    for _ in range(n_steps):
        w_btd = w_btd + share_t1 * (sums.xy_btd - (sums.xx_btdd @ w_btd[..., None])[..., 0])
    return w_btd


def answers_of(w_btd: Tensor, prompts: Prompts) -> Tensor:
    return (w_btd * prompts.x_btd.cpu().double()).sum(-1)


def errors_of(answers_bt: Tensor, prompts: Prompts) -> Tensor:
    """Mean squared error at each t, against w · x without noise; always predicting 0 has 1."""
    truth_bt = answers_of(prompts.w_bd.cpu().double()[:, None], prompts)
    return (answers_bt - truth_bt).square().mean(0) / prompts.w_bd.shape[-1]


def tune_rates(plan: Plan, n_steps: int) -> list[float]:
    """Find the learning rate of gradient descent that is best for each t, on separate prompts."""
    # Many prompts: a rate at the edge of divergence diverges on few of them.
    prompts = draw_prompts(plan, 8 * plan.n_tests, generator_of(TUNING))
    sums = sum_examples(prompts)
    rates = torch.tensor([0.05 * 1.2**n for n in range(20)], dtype=torch.float64)
    errors = [errors_of(answers_of(descend(sums, r, n_steps), prompts), prompts) for r in rates]
    found: list[float] = rates[torch.stack(errors).argmin(0)].tolist()
    return found


def attend_linearly(tokens_bte: Tensor, examples: int, rate: float) -> Tensor:
    """One layer on tokens (x, r): r - rate/n Σ r_j (x_j · x), over the first `examples` tokens.

    The construction's matrices written out: queries and keys select x, values select r.
    """
    width = tokens_bte.shape[-1]
    take_x = torch.eye(width, dtype=tokens_bte.dtype)
    take_x[-1, -1] = 0.0
    take_r = torch.eye(width, dtype=tokens_bte.dtype) - take_x
    q_bte, v_bte = tokens_bte @ take_x, tokens_bte[:, :examples] @ take_r
    k_bte = tokens_bte[:, :examples] @ take_x
    return tokens_bte - rate / examples * ((q_bte @ k_bte.mT) @ v_bte)


def update_weights(tokens_bte: Tensor, examples: int, rate: float) -> Tensor:
    """`attend_linearly` in its dual form: the update of the weights first, then applied to x."""
    x_btd, r_bt1 = tokens_bte[..., :-1], tokens_bte[..., -1:]
    change_bd1 = rate / examples * (x_btd[:, :examples].mT @ r_bt1[:, :examples])
    return torch.cat([x_btd, r_bt1 - x_btd @ change_bd1], -1)


def attend_by_softmax(tokens_bte: Tensor, examples: int, rate: float, small: float) -> Tensor:
    """`attend_linearly` by two heads of softmax attention over examples and mirror images."""
    x_btd, r_bt1 = tokens_bte[..., :-1], tokens_bte[..., -1:]
    k_bsd = torch.cat([x_btd[:, :examples], -x_btd[:, :examples]], 1)[:, None]
    v_bs1 = torch.cat([r_bt1[:, :examples], -r_bt1[:, :examples]], 1)[:, None]
    q_btd = x_btd[:, None]
    up, down = (attention(q, k_bsd, v_bs1, scale=small) for q in (q_btd, -q_btd))
    return torch.cat([x_btd, r_bt1 - rate / (2 * small) * (up - down)[:, 0]], -1)


def measure_construction(plan: Plan) -> dict[str, float]:
    """Measure the largest differences of layers and gradient descent steps, in float64."""
    prompts = draw_prompts(plan, plan.n_tests, generator_of(TEST))
    x_btd, y_bt = prompts.x_btd.double(), prompts.y_bt.double()
    examples, rate, small = plan.n_examples, 0.3, 1e-4
    start = torch.cat([x_btd, y_bt[..., None]], -1)
    start[:, -1, -1] = 0.0  # the query's y is not known
    sums = sum_examples(prompts)
    once, often = (descend(sums, rate, n)[:, -1] for n in (1, plan.gd_steps[-1]))
    expected, expected_often = ((w * x_btd[:, -1]).sum(-1) for w in (once, often))

    def off(tokens: Tensor, answers: Tensor) -> float:
        return float((-tokens[:, -1, -1] - answers).abs().max())

    stacked = start
    for _ in range(plan.gd_steps[-1]):
        stacked = attend_linearly(stacked, examples, rate)
    return {
        "layer": off(attend_linearly(start, examples, rate), expected),
        "dual": off(update_weights(start, examples, rate), expected),
        "layers": off(stacked, expected_often),
        "n_layers": plan.gd_steps[-1],
        "softmax": off(attend_by_softmax(start, examples, rate, small), expected),
        "small": small,
        "answer": float(expected.abs().mean()),
    }


def measure_seed(
    item: tuple[int, int], plan: Plan, rates: Sequence[list[float]], device: torch.device
) -> dict[str, Any]:
    """Train a Transformer; its errors and other methods', and distances, on the same prompts."""
    n_layers, seed = item
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = Regressor(plan, n_layers, torch.device("cpu")).to(device)
    config = TrainConfig(
        steps=plan.steps, lr=0.128 / plan.width, warmup=plan.steps // 10, weight_decay=0.0
    )

    def draw_step(step: int) -> Prompts:
        return draw_prompts(plan, plan.n_prompts, generator_of(seed, step, device=device))

    train(model, draw_step, squared_error, config)
    prompts = draw_prompts(plan, plan.n_tests, generator_of(TEST, seed, device=device))
    with torch.no_grad():
        own_bt = model(prompts).cpu().double()
    sums = sum_examples(prompts)
    answers = {
        "ridge": answers_of(solve_ridge(sums, plan.noise**2), prompts),
        "least squares": answers_of(solve_ridge(sums, ALMOST_NONE), prompts),
    }
    for n_steps, tuned in zip(plan.gd_steps, rates, strict=True):
        rate_t = torch.tensor(tuned, dtype=torch.float64)
        answers[name_descent(n_steps)] = answers_of(descend(sums, rate_t, n_steps), prompts)
    apart = {
        name: ((own_bt - each).square().mean(0) / plan.n_dims).tolist()
        for name, each in answers.items()
    }
    answers[name_transformer(n_layers)] = own_bt
    errors = {name: errors_of(each, prompts).tolist() for name, each in answers.items()}
    return {"n_layers": n_layers, "errors": errors, "apart": apart}


def name_descent(n_steps: int) -> str:
    return f"{n_steps} step{'s' * (n_steps > 1)} of gradient descent"


def name_transformer(n_layers: int) -> str:
    return f"Transformer of {n_layers} layer{'s' * (n_layers > 1)}"


def measure(run: Run) -> dict[str, Any]:
    return measure_plan(run, TINY if run.tiny else FULL)


def measure_plan(run: Run, plan: Plan) -> dict[str, Any]:
    exact = run.map("construction", lambda _: measure_construction(plan), [plan.n_dims])[0]
    rates = run.map("rates", lambda n_steps: tune_rates(plan, n_steps), plan.gd_steps)
    items = [(n_layers, seed) for n_layers in plan.depths for seed in range(plan.n_seeds)]

    def one(item: tuple[int, int]) -> dict[str, Any]:
        return measure_seed(item, plan, rates, run.device)

    return {
        "n_dims": plan.n_dims,
        "n_examples": plan.n_examples,
        "noise": plan.noise,
        "depths": plan.depths,
        "gd_steps": plan.gd_steps,
        "rates": rates,
        "construction": exact,
        "seeds": run.map("trainings", one, items),
    }


def geometric_interval(values: Sequence[float]) -> dict[str, float]:
    """Geometric mean and its interval, since errors are positive and vary by factors."""
    found = mean_interval([math.log(max(value, 1e-300)) for value in values])
    return {name: math.exp(found[name]) for name in ("mean", "low", "high")} | {"n": found["n"]}


def over_seeds(results: Results, name: str, at: int, of: str | None = None) -> dict[str, float]:
    """A method's error with `at` examples, or its ratio to `of`'s error on the same prompts."""
    rows = [row["errors"] for row in results["seeds"] if name in row["errors"]]
    if name not in {name_transformer(n) for n in results["depths"]}:
        rows = rows[: len(results["seeds"]) // len(results["depths"])]  # prompts depend on the seed
    return geometric_interval([row[name][at] / (row[of][at] if of else 1.0) for row in rows])


def apart_at(results: Results, n_layers: int, at: int) -> dict[str, dict[str, float]]:
    """How far a Transformer's predictions are from each method's, nearest first."""
    rows = [row["apart"] for row in results["seeds"] if row["n_layers"] == n_layers]
    found = {name: geometric_interval([row[name][at] for row in rows]) for name in rows[0]}
    return dict(sorted(found.items(), key=lambda each: each[1]["mean"]))


def find(results: Results) -> list[str]:
    few, many = told_lengths(results)
    deepest = results["depths"][-1]
    sentences = [
        find_construction(results["construction"]),
        find_order(results, few),
        find_order(results, many),
        *(find_nearest(results, n_layers, many) for n_layers in results["depths"]),
    ]
    for other in ("ridge", name_descent(deepest)):
        if other in results["seeds"][0]["errors"]:
            sentences.append(find_ratio(results, deepest, other, many))
    return sentences


def told_lengths(results: Results) -> tuple[int, int]:
    """The numbers of examples to report: fewer than there are unknowns, and twice as many."""
    return max(1, results["n_dims"] // 2), min(2 * results["n_dims"], results["n_examples"])


def find_construction(exact: Results) -> str:
    return (
        "A layer of linear attention with constructed weights gives the answers of one step of "
        f"gradient descent to {exact['layer']:.1g}, its dual form to {exact['dual']:.1g}, and "
        f"{exact['n_layers']} layers those of {exact['n_layers']} steps to {exact['layers']:.1g} "
        f"(float64; answers are {exact['answer']:.2g} on average). Two heads of softmax attention "
        f"with scores times {exact['small']:g} come within {exact['softmax']:.1g}."
    )


def find_order(results: Results, at: int) -> str:
    names = list(dict.fromkeys(name for row in results["seeds"] for name in row["errors"]))
    found = {name: over_seeds(results, name, at) for name in names}
    order = sorted(names, key=lambda name: found[name]["mean"])
    words = "; ".join(f"{name} {spell_interval(found[name])}" for name in order)
    return (
        f"With {at} example{'s' * (at > 1)} of {results['n_dims']} unknowns the squared errors, "
        f"where always saying 0 has 1, are from the least on: {words}."
    )


def find_nearest(results: Results, n_layers: int, at: int) -> str:
    (first, near), (second, far), *_ = apart_at(results, n_layers, at).items()
    clear = "" if near["high"] < far["low"] else ", not clearly nearer"
    return (
        f"The {name_transformer(n_layers)} then answers most nearly like {first}: mean squared "
        f"difference {spell_interval(near)}{clear}, beside {spell_interval(far)} from {second}."
    )


def find_ratio(results: Results, n_layers: int, other: str, at: int) -> str:
    ratio = over_seeds(results, name_transformer(n_layers), at, of=other)
    judged = "not clearly apart"
    if ratio["low"] > 1 or ratio["high"] < 1:
        judged = "clearly more" if ratio["mean"] > 1 else "clearly less"
    return (
        f"The error of the {name_transformer(n_layers)} is {spell_interval(ratio)} times that of "
        f"{other}: {judged}."
    )


def draw(results: Results, figure: Figure) -> None:
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(name for row in results["seeds"] for name in row["errors"]))
    learned = [name_transformer(n_layers) for n_layers in results["depths"]]
    counts = list(range(1, results["n_examples"] + 1))
    colours = {name: f"C{at}" for at, name in enumerate(sorted(names, key=learned.__contains__))}
    for name in names:
        found = [over_seeds(results, name, at) for at in counts]
        style = "o-" if name in learned else "--"
        plot_means(left, counts, found, style, colours[name], name)
    deepest = results["depths"][-1]
    for name in (name for name in names if name not in learned):
        found = [apart_at(results, deepest, at)[name] for at in counts]
        plot_means(right, counts, found, "--", colours[name], name)
    left.set(title="from the truth", ylabel="squared error (always saying 0: 1)")
    right.set(title=f"from the {learned[-1]}", ylabel="mean squared difference of answers")
    for axes in (left, right):
        axes.set_yscale("log")
        axes.set_xlabel("examples in the prompt")
        axes.set_ylim(top=3)
        axes.axvline(results["n_dims"], color="k", ls=":", lw=1)
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", frameon=False)


def plot_means(
    axes: Axes,
    counts: Sequence[int],
    found: Sequence[dict[str, float]],
    style: str,
    colour: str,
    label: str,
) -> None:
    axes.plot(counts, [x["mean"] for x in found], style, color=colour, label=label, ms=3, lw=1.2)
    low, high = ([x[name] for x in found] for name in ("low", "high"))
    axes.fill_between(counts, low, high, color=colour, alpha=0.2, lw=0)


LAB = Lab(
    name="in_context",
    question="Is learning from examples in a prompt gradient descent?",
    prediction="One layer of linear attention can be one step of gradient descent exactly, and k "
    "layers k steps. A Transformer that was trained on such prompts has feed-forward layers and "
    "softmax besides: it should do at least as well as so many steps, and come near to ridge "
    "regression with λ = noise², which no method beats on average.",
    method="Prompts of examples (x, w · x + noise), x and w of independent normal numbers, another "
    "w for each. The construction is compared with gradient descent on the same prompts in "
    "float64. Decoders of one and more layers without positions are trained by AdamW on fresh "
    "prompts; a token holds x and the example before it, and the answer is read at every token. "
    "Beside them, on the same prompts: least squares (the shortest solution), ridge, and gradient "
    "descent from 0 with the rate that does best for so many examples on other prompts. Errors are "
    "against w · x without noise; geometric means over seeds, each a training and test prompts of "
    "its own.",
    measure=measure,
    find=find,
    draw=draw,
)
