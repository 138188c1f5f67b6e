"""How does loss fall with parameters and tokens, and what is a budget best spent on?

The text is of a language whose entropy is known. A token is, at random, either drawn from a Zipf
distribution or determined by the last one, two or three tokens: a hash of these selects a token,
Zipf-distributed as well. So the number of contexts has no end, and their frequencies fall as a
power of their rank; each is worth learning, the frequent ones first. The probability of a token is
the sum over the ways in which it may have come, so the mean of its -log is the entropy, below which
no model's loss can be.

Each run is a training of its own, whose learning rate decays to its end at its own token count.
(Evaluations along one long training would still have high learning rates; this is where the laws of
Kaplan and Chinchilla differ.) Runs are independent, as the bootstrap assumes.

N counts the parameters of the blocks and of the last norm, without the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.labs.interval import spell_interval
from regard.labs.isoflop import isoflop
from regard.labs.lab import Lab, Results
from regard.labs.parts import Run
from regard.labs.scaling_fits import (
    FLOPS_PER_PARAMETER,
    ChinchillaFit,
    KaplanFit,
    fit_chinchilla,
    fit_kaplan,
)
from regard.labs.small_training import generator_of, train
from regard.layers import BlockConfig
from regard.models import ModelConfig, Transformer
from regard.models.config import EmbedConfig, count_parameters
from regard.positions import RotaryConfig
from regard.training.config import TrainConfig
from regard.training.init import start
from regard.training.loss import summed_loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PRIME = 2**31 - 1  # squares of numbers below it fit into int64
GRAIN = 2**16  # the range of hashes, which are mapped to tokens
EXPONENT = 1.2  # of Zipf's law: the token of rank r has a frequency proportional to r^-1.2
HELD_OUT = 10_000_000  # a seed that no run uses


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The sizes of a run: `orders` has the shares of tokens determined by the last 0, 1, ...

    A run with the first of `tokens` reads `n_rows` texts of `length` tokens a step; others √ more.
    Runs of more than `max_compute` FLOPs are left out.
    """

    vocab_size: int
    orders: tuple[float, ...]
    length: int
    n_rows: int
    n_layers: int
    widths: tuple[int, ...]
    tokens: tuple[int, ...]
    n_held_out: int  # a multiple of 8
    max_compute: float = math.inf
    least_models: int = 5


FULL = Plan(
    vocab_size=512,
    orders=(0.1, 0.3, 0.3, 0.3),
    length=64,
    n_rows=64,
    n_layers=2,
    widths=(64, 80, 96, 128, 160, 192, 240, 304, 384, 480, 608, 752, 928, 1120),
    tokens=tuple(2**n for n in range(19, 26)),
    n_held_out=4096,
    max_compute=1e15,
)
TINY = Plan(
    vocab_size=64,
    orders=(0.1, 0.45, 0.45),
    length=32,
    n_rows=4,
    n_layers=1,
    widths=(16, 24, 32, 48, 64),
    tokens=(6_144, 24_576, 98_304),
    n_held_out=512,
    least_models=4,
)


def zipf_tokens(vocab_size: int) -> Tensor:
    """Map GRAIN equally likely numbers to tokens, so that these follow Zipf's law."""
    shares = torch.arange(1, vocab_size + 1, dtype=torch.float64) ** -EXPONENT
    ends = (shares.cumsum(0) / shares.sum() * GRAIN).round().long()
    return torch.searchsorted(ends, torch.arange(GRAIN), right=True)


def hash_contexts(last_bk: Tensor) -> Tensor:
    """Hash the last token, the last two, ... the last K into numbers below GRAIN: (B, K)."""
    hashed_b, found = torch.zeros_like(last_bk[:, 0]), []
    for token_b in last_bk.unbind(1):
        hashed_b = square(hashed_b + token_b * 7_919 + 104_729)
        found.append(square(square(hashed_b + 32_452_843) + 86_028_121) % GRAIN)
    return torch.stack(found, 1)


def square(number: Tensor) -> Tensor:
    return number * number % PRIME


def write_text(plan: Plan, n_rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw texts (n_rows, length + 1), and -log p of each token, 0 for the first few."""
    device, n_last = generator.device, len(plan.orders) - 1
    zipf = zipf_tokens(plan.vocab_size).to(device)
    share_v = torch.bincount(zipf, minlength=plan.vocab_size) / GRAIN
    ways = torch.tensor(plan.orders, device=device)
    shape = (n_rows, plan.length + 1)
    ids = zipf[torch.randint(GRAIN, shape, generator=generator, device=device)]
    way = torch.searchsorted(ways.cumsum(0), torch.rand(shape, generator=generator, device=device))
    way = way.clamp(max=len(ways) - 1)  # the sum of shares may be rounded to below 1
    surprise = torch.zeros(shape, device=device)
    for t in range(n_last, shape[1]):
        named = zipf[hash_contexts(ids[:, t - n_last : t].flip(1))]
        could = torch.cat([ids[:, t : t + 1], named], 1)
        came = could.gather(1, way[:, t : t + 1])
        ids[:, t : t + 1] = came
        chance = ((named == came) * ways[1:]).sum(1) + ways[0] * share_v[came[:, 0]]
        surprise[:, t] = -chance.log()
    return ids, surprise


def make_model(plan: Plan, dim: int) -> tuple[ModelConfig, int]:
    """The config of a LLaMA-like decoder with a plain feed-forward layer, and its N."""
    head_dim = 16 if dim >= 64 else 8
    block = BlockConfig(
        dim=dim,
        n_heads=dim // head_dim,
        ffn_dim=4 * dim,
        norm="rms",
        activation="gelu",
        attention_bias=False,
        ffn_bias=False,
        rotary=RotaryConfig(head_dim=head_dim, base=100.0),
    )
    config = ModelConfig(
        family="lab",
        vocab_size=plan.vocab_size,
        max_len=plan.length,
        decoder=(block,) * plan.n_layers,
        # Gives initial embeddings a spread of 1/√dim, so all widths learn from the first step.
        embed=EmbedConfig(scale=math.sqrt(dim)),
    )
    return config, count_parameters(config) - plan.vocab_size * dim


def next_token_loss(model: nn.Module, ids: Tensor, n_last: int) -> Tensor:
    """The loss in nats per token, of tokens with at least n_last others before them."""
    assert isinstance(model, Transformer) and model.head is not None
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda and model.training):
        last_btc = model.run(ids[:, :-1])[:, n_last - 1 :]
        targets = ids[:, n_last:]
        return summed_loss(model.head, last_btc, targets) / targets.numel()


def measure_run(
    item: tuple[int, int], plan: Plan, held_out: Tensor, device: torch.device
) -> dict[str, float]:
    """Train once, for a width and a number of tokens, and measure the loss on held-out text."""
    dim, wanted = item
    config, n_params = make_model(plan, dim)
    model = Transformer(config, device=device)
    start(model, seed=wanted + dim)
    n_rows = round(plan.n_rows * math.sqrt(wanted / plan.tokens[0]))
    steps = max(1, round(wanted / (n_rows * plan.length)))
    ids, _ = write_text(plan, n_rows * steps, generator_of(*item, device=device))
    training = TrainConfig(steps=steps, lr=min(0.01, 0.5 / dim), warmup=max(1, steps // 4))
    loss = partial(next_token_loss, n_last=len(plan.orders) - 1)
    train(model, lambda step: ids[step * n_rows : (step + 1) * n_rows], loss, training)
    with torch.no_grad():
        parts = torch.stack([loss(model, part) for part in held_out.chunk(8)])
    n_tokens = steps * n_rows * plan.length
    return {"n_params": n_params, "n_tokens": n_tokens, "steps": steps, "loss": float(parts.mean())}


def measure(run: Run) -> dict[str, Any]:
    return measure_plan(run, TINY if run.tiny else FULL)


def measure_plan(run: Run, plan: Plan) -> dict[str, Any]:
    held_out, surprise = write_text(
        plan, plan.n_held_out, generator_of(HELD_OUT, device=run.device)
    )
    items = [
        (dim, tokens)
        for dim in plan.widths
        for tokens in plan.tokens
        if FLOPS_PER_PARAMETER * make_model(plan, dim)[1] * tokens <= plan.max_compute
    ]
    one = partial(measure_run, plan=plan, held_out=held_out, device=run.device)
    runs = run.map("runs", one, items)
    return {
        "entropy": float(surprise[:, len(plan.orders) - 1 :].mean()),
        "zipf": EXPONENT,
        "runs": runs,
        **analyse(runs, plan.least_models),
    }


def analyse(runs: Sequence[dict[str, float]], least_models: int) -> dict[str, Any]:
    """Fit both laws and IsoFLOP curves, and find the best use of some budgets."""
    n, d, loss = (
        np.array([run[name] for run in runs]) for name in ("n_params", "n_tokens", "loss")
    )
    chinchilla, kaplan = fit_chinchilla(n, d, loss), fit_kaplan(n, d, loss)
    # What a law is for: predict the fifth of the runs with the most compute from the others.
    by_compute, n_small = np.argsort(n * d), round(0.8 * len(runs))
    small, large = by_compute[:n_small], by_compute[n_small:]
    some = n[small], d[small], loss[small]
    curves = isoflop(n, d, loss, least_models=least_models)
    budgets = [curve["compute"] for curve in curves["curves"]]
    budgets.append(FLOPS_PER_PARAMETER * float((n * d).max()))
    fits = {}
    for name, fit, part in (
        ("chinchilla", chinchilla, fit_chinchilla(*some, bootstraps=1)),
        ("kaplan", kaplan, fit_kaplan(*some, bootstraps=1)),
    ):
        fits[name] = {
            "parameters": spell_fit(fit),
            "error": typical_error(fit.predict(n, d), loss),
            "error ahead": typical_error(part.predict(n[large], d[large]), loss[large]),
        }
    return {
        "fits": fits,
        "runs ahead": len(large),
        "isoflop": curves,
        "optimal": [spend(chinchilla, budget) for budget in budgets],
        "growth": number_of(chinchilla, growth_of),
    }


def growth_of(fit: ChinchillaFit) -> float:
    """The exponent a, if the best N grows as C^a."""
    return fit.beta / (fit.alpha + fit.beta)


def spell_fit(fit: ChinchillaFit | KaplanFit) -> dict[str, Any]:
    """The parameters with their intervals, in the format of other results."""
    return {
        name: {"mean": getattr(fit, name), "low": low, "high": high, "n": len(fit.resampled)}
        for name, (low, high) in fit.intervals.items()
    }


def typical_error(predicted: np.ndarray[Any, Any], loss: np.ndarray[Any, Any]) -> float:
    """The root mean square of the differences, relative to the loss."""
    return float(np.sqrt(np.mean((predicted / loss - 1) ** 2)))


def number_of(
    fit: ChinchillaFit, value: Callable[[ChinchillaFit], float]
) -> dict[str, float] | None:
    """A number computed from the fit, with its interval; None if the fit has none."""
    try:
        mean, (low, high) = value(fit), fit.interval(value)
    except ValueError:
        return None
    return {"mean": mean, "low": low, "high": high, "n": len(fit.resampled)}


def spend(fit: ChinchillaFit, compute: float) -> dict[str, Any]:
    """The best use of a budget, by the fit; None where the fit has no best size."""
    return {
        "compute": compute,
        "n_params": number_of(fit, lambda f: f.optimal(compute).n_params),
        "n_tokens": number_of(fit, lambda f: f.optimal(compute).n_tokens),
        "ratio": number_of(fit, lambda f: f.optimal(compute)[1] / f.optimal(compute)[0]),
    }


def find(results: Results) -> list[str]:
    runs, entropy = results["runs"], results["entropy"]
    sizes, tokens = ([run[name] for run in runs] for name in ("n_params", "n_tokens"))
    losses = [run["loss"] for run in runs]
    return [
        find_exponents(results),
        *find_budget(results),
        f"{len(runs)} runs of {len(set(sizes))} models, {spell_count(min(sizes))} to "
        f"{spell_count(max(sizes))} parameters without the table of tokens, on "
        f"{spell_count(min(tokens))} to {spell_count(max(tokens))} tokens, end at "
        f"{max(losses):.3f} to {min(losses):.3f} nats a token; the language's own entropy is "
        f"{entropy:.3f}.",
        find_floor(results),
        find_laws(results),
    ]


def find_exponents(results: Results) -> str:
    found = results["fits"]["chinchilla"]["parameters"]
    words = []
    for name, letter, expected in (
        ("alpha", "α", results["zipf"] - 1),
        ("beta", "β", (results["zipf"] - 1) / results["zipf"]),
    ):
        given = found[name]
        if given["low"] <= expected <= given["high"]:
            judged = f"which holds the predicted {expected:.2f}"
        else:
            judged = f"against the predicted {expected:.2f}"
        words.append(f"{letter} = {spell_interval(given)}, {judged}")
    return f"Fitted, L = E + A/N^α + B/D^β has {'; '.join(words)}."


def find_floor(results: Results) -> str:
    floor, entropy = results["fits"]["chinchilla"]["parameters"]["E"], results["entropy"]
    if floor["low"] <= entropy <= floor["high"]:
        judged = "and its interval holds the language's entropy"
    else:
        where = "above" if floor["low"] > entropy else "below"
        judged = f"which lies {where} the language's entropy"
    return (
        f"Its E, what no model and no text would take away, is {spell_interval(floor)}, {judged}."
    )


def find_laws(results: Results) -> str:
    fits = results["fits"]
    ours, other = fits["chinchilla"], fits["kaplan"]
    better = "less" if ours["error ahead"] < other["error ahead"] else "no less"
    alphas = (spell_interval(other["parameters"][name]) for name in ("alpha_N", "alpha_D"))
    return (
        "Kaplan's form, which has no E, finds α_N = {} and α_D = {}. ".format(*alphas)
        + f"Typical errors are {ours['error']:.2%} for Chinchilla's form and {other['error']:.2%} "
        f"for Kaplan's; fitted without the {results['runs ahead']} runs of the most compute, they "
        f"tell these to {ours['error ahead']:.2%} and {other['error ahead']:.2%}: Chinchilla's "
        f"errs {better} where it is needed."
    )


def find_budget(results: Results) -> list[str]:
    last, growth = results["optimal"][-1], results["growth"]
    if last["n_params"] is None or growth is None:
        return [
            "The runs name no best size: by the fit, or by most of its bootstrap samples, the loss "
            "does not fall with both size and tokens."
        ]
    even = growth["low"] <= 0.5 <= growth["high"]
    judged = "which holds" if even else "which does not hold"
    n_params = spell_best(results, last, "n_params", "parameters")
    n_tokens = spell_best(results, last, "n_tokens", "tokens")
    sentences = [
        f"By the fit {last['compute']:.2g} FLOPs are best spent on {n_params} and {n_tokens}, "
        f"{spell_interval(last['ratio'])} tokens a parameter; the best size grows as C^a with a = "
        f"{spell_interval(growth)}, {judged} the 0.5 of size and tokens growing alike."
    ]
    seen = results["isoflop"]["exponent"]
    if seen is None:
        return [*sentences, "IsoFLOP curves have too few minima to tell how these grow."]
    apart = seen["low"] > growth["high"] or seen["high"] < growth["low"]
    judged = "apart from" if apart else "not clearly apart from"
    return [
        *sentences,
        f"Without a law, the minima of IsoFLOP curves grow as C^a with a = {spell_interval(seen)}, "
        f"{judged} the fit's.",
    ]


def spell_best(results: Results, spent: Results, name: str, unit: str) -> str:
    """Format the best number, and say how far it is beyond all that were measured."""
    share = spent[name]["mean"] / max(run[name] for run in results["runs"])
    beyond = f" ({share:.2g} times the most of any run)" if share > 1 else ""
    return f"{spell_range(spent[name])} {unit}{beyond}"


def spell_count(number: float) -> str:
    """Format 98,624 as 98.6 thousand."""
    for size, word in (
        (1e12, " trillion"),
        (1e9, " billion"),
        (1e6, " million"),
        (1e3, " thousand"),
    ):
        if number >= size:
            return f"{number / size:.3g}{word}"
    return f"{number:.3g}"


def spell_range(found: dict[str, float]) -> str:
    mean, low, high = (spell_count(found[name]) for name in ("mean", "low", "high"))
    return f"{mean} (95% interval {low} to {high})"


def draw(results: Results, figure: Figure) -> None:
    left, middle, right = figure.subplots(1, 3)
    draw_runs(results, left)
    draw_isoflop(results, middle)
    draw_optimal(results, right)
    for axes in (left, middle, right):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter("")  # minor labels of a short axis would overlap
        axes.grid(alpha=0.3)


def fitted_loss(results: Results, n: Any, d: Any) -> Any:
    values = {
        name: each["mean"] for name, each in results["fits"]["chinchilla"]["parameters"].items()
    }
    return ChinchillaFit(**values, objective=0.0).predict(n, d)


def draw_runs(results: Results, axes: Axes) -> None:
    """Draw loss against tokens, with a colour for each size."""
    from matplotlib import colormaps

    sizes = sorted({run["n_params"] for run in results["runs"]})
    for at, size in enumerate(sizes):
        own = [run for run in results["runs"] if run["n_params"] == size]
        tokens = [run["n_tokens"] for run in own]
        colour = colormaps["viridis"](at / max(1, len(sizes) - 1))
        label = (
            spell_count(size) if at % max(1, len(sizes) // 4) == 0 or size == sizes[-1] else None
        )
        axes.plot(tokens, [run["loss"] for run in own], "o", color=colour, ms=3.5, label=label)
        line = np.geomspace(tokens[0], tokens[-1], 50)
        axes.plot(line, fitted_loss(results, size, line), "-", color=colour, lw=1)
    axes.axhline(results["entropy"], color="k", ls=":", lw=1, label="entropy")
    axes.set(title="runs, and E + A/N^α + B/D^β", xlabel="tokens", ylabel="loss (nats a token)")
    axes.legend(frameon=False, fontsize="small", title="parameters", title_fontsize="small")


def draw_isoflop(results: Results, axes: Axes) -> None:
    """Draw loss against size, with a colour for each budget."""
    from matplotlib import colormaps

    curves = results["isoflop"]["curves"]
    for at, curve in enumerate(curves):
        colour = colormaps["plasma"](0.85 * at / max(1, len(curves) - 1))
        sizes = np.array(curve["n_params"])
        axes.plot(sizes, curve["losses"], "o", color=colour, ms=3.5)
        said: dict[str, Any] = {"fontsize": "x-small", "color": colour, "ha": "right"}
        end = (sizes[-1], curve["losses"][-1])
        axes.annotate(f"{curve['compute']:.0e}", end, (-5, 0), textcoords="offset points", **said)
        line = np.geomspace(sizes[0], sizes[-1], 50)
        tokens = curve["compute"] / (FLOPS_PER_PARAMETER * line)
        axes.plot(line, fitted_loss(results, line, tokens), "-", color=colour, lw=1)
    axes.set(title="IsoFLOP curves (FLOPs)", xlabel="parameters", ylabel="loss (nats a token)")


def draw_optimal(results: Results, axes: Axes) -> None:
    """Draw the best size for a budget, by the fit and by the minima."""
    known = [each for each in results["optimal"] if each["n_params"] is not None]
    if known:
        budgets = [each["compute"] for each in known]
        mean, low, high = (
            [each["n_params"][name] for each in known] for name in ("mean", "low", "high")
        )
        line = axes.plot(budgets, mean, "-", label="by the fit")[0]
        axes.fill_between(budgets, low, high, alpha=0.25, color=line.get_color())
    seen = [curve for curve in results["isoflop"]["curves"] if curve["minimum"] is not None]
    if seen:
        middle = np.array([curve["minimum"]["mean"] for curve in seen])
        ends = np.array([[c["minimum"]["low"], c["minimum"]["high"]] for c in seen]).T
        off = np.clip([middle - ends[0], ends[1] - middle], 0, None)
        budgets = [curve["compute"] for curve in seen]
        axes.errorbar(budgets, middle, off, fmt="ko", ms=4, lw=1, label="IsoFLOP minima")
    axes.set_yscale("log")
    axes.set(title="best size for a budget", xlabel="FLOPs", ylabel="parameters")
    if known or seen:
        axes.legend(frameon=False)


LAB = Lab(
    name="scaling_laws",
    question="How does loss fall with parameters and tokens, and what is a budget best spent on?",
    prediction="Loss falls as a power of each towards a floor, E + A/N^α + B/D^β, and the floor is "
    "the entropy of the text. If what is to be learned comes as often as its rank^-s and the most "
    "frequent is learned first, α is s - 1 and β (s - 1)/s: 0.2 and 0.17 for the s = 1.2 of this "
    "text. A budget is best spent on size and tokens about alike.",
    method="Text of a language of known entropy: a token is drawn from Zipf's law, or is the "
    "one that a hash of the last one, two or three tokens names. Decoders of two layers and many "
    "widths, rotary positions, N without the table of tokens; for each token count a training of "
    "its own, AdamW with a quarter of warm-up, then a cosine, rates that fall as 1/width, batches "
    "that grow as the square root of tokens, no token twice, bfloat16 autocast on a GPU; loss on "
    "held-out text in float32. Fits: Huber loss of log L (δ = 0.001), many starts, intervals of "
    "200 bootstrap samples of runs. IsoFLOP curves: losses read between runs, a parabola in log N.",
    measure=measure,
    find=find,
    draw=draw,
)
