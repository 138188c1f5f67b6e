"""How much a model still finds in its text, when its KV cache keeps a share of the keys.

    python retrieval.py --model smollm2.gguf --contexts 8

A text of generated English sentences says a number for each of eight cities, somewhere; then the
sentence about one of them is begun again. It is read but for its last token, the cache is evicted
to a share, and the number counts as found if every token of it is the model's first choice. So
nothing of the answer comes from the whole cache. Texts and numbers follow from --seed.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections import Counter
from contextlib import ExitStack

import torch
from methods import METHODS, receiving
from torch import Tensor
from torch.nn import functional

import regard
from regard.generation import evict
from regard.layers import DecoderCache
from regard.models import Transformer

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
N_CITIES = 8
CITIES = ["Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Dublin", "Oslo", "Lisbon"]
CITIES += ["Prague", "Warsaw", "Cairo", "Tokyo", "Delhi", "Sydney", "Boston", "Moscow", "Geneva"]
WHO = ["baker", "teacher", "farmer", "doctor", "sailor", "painter", "driver", "writer", "singer"]
DOES = ["carried", "found", "painted", "lost", "sold", "repaired", "washed", "borrowed", "hid"]
WHAT = ["lantern", "ladder", "basket", "violin", "blanket", "kettle", "mirror", "candle", "hammer"]
WHERE = ["near the bridge", "behind the church", "in the garden", "by the river", "on the hill"]
WHEN = ["in the morning", "after lunch", "before the storm", "late at night", "on a quiet day"]


def say(city: str) -> str:
    return f"The special magic number for {city} is"


def make_filler(drawn: random.Random) -> str:
    parts = [drawn.choice(words) for words in (WHO, DOES, WHAT, WHERE, WHEN)]
    return "The {} {} a {} {} {}.".format(*parts)


def make_context(
    drawn: random.Random, model: Transformer, n: int
) -> tuple[list[int], dict[str, str]]:
    """The tokens of a text, about n of them, and the number that it says for each city."""
    encode = model.tokenizer.encode
    numbers = {
        city: f"{drawn.randrange(10_000, 100_000)}" for city in drawn.sample(CITIES, N_CITIES)
    }
    needles = [f"{say(city)} {number}." for city, number in numbers.items()]
    sentences: list[str] = []
    size = len(encode(" ".join(needles)).ids)
    while True:
        sentence = make_filler(drawn)
        size += len(encode(" " + sentence).ids)
        if size > n:
            break
        sentences.append(sentence)
    for needle in needles:
        sentences.insert(drawn.randrange(len(sentences)), needle)
    return encode(" ".join(sentences)).ids, numbers


def find(model: Transformer, cache: DecoderCache, last: int, answer: list[int]) -> list[bool]:
    """Whether the model's first choice is the answer, token by token, in each row of the cache."""
    ids_bt = torch.tensor([[last, *answer[:-1]]]).expand(len(METHODS), -1)
    choices_bt = model(ids_bt, cache=cache).logits.argmax(-1)
    return (choices_bt == torch.tensor(answer)).all(1).tolist()


def ask(
    model: Transformer, before: DecoderCache, heavy: list[Tensor], city: str, number: str
) -> dict[tuple[str, float], bool]:
    """Whether the number is found, by method and share; heavy: received by keys of the context."""
    encode, cache = model.tokenizer.encode, copy.deepcopy(before)
    question = encode(f"\n\n{say(city)}").ids
    answer = encode(f"\n\n{say(city)} {number}").ids[len(question) :]
    with ExitStack() as blocks:
        received = {
            name: blocks.enter_context(receiving(method.received))
            for name, method in METHODS.items()
        }
        model.run(torch.tensor([question[:-1]]), cache=cache)
    n_new = len(question) - 1
    # Heavy hitters count what the queries of the context gave, too.
    received["H2O"] = [
        now + functional.pad(old, (0, n_new))
        for old, now in zip(heavy, received["H2O"], strict=True)
    ]
    n_keys = heavy[0].shape[2] + n_new
    found = {}
    for share in SHARES:
        keep, evicted = round(share * n_keys), copy.deepcopy(cache)
        evicted.reorder(torch.zeros(len(METHODS), dtype=torch.long))  # a row for each method
        if keep < n_keys:
            evict(evicted, score_layers(received, keep), keep)
        hits = find(model, evicted, question[-1], answer)
        found |= {(name, share): hit for name, hit in zip(METHODS, hits, strict=True)}
    return found


def score_layers(received: dict[str, list[Tensor]], keep: int) -> list[Tensor]:
    """The scores of each layer, with a row for each method."""
    return [
        torch.cat(
            [
                METHODS[name].score(layer, keep).expand_as(layer)
                for name, layer in zip(METHODS, layers, strict=True)
            ]
        )
        for layers in zip(*received.values(), strict=True)
    ]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder, a GGUF file or a hub name")
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    model, drawn, began = regard.load(given.model), random.Random(given.seed), time.monotonic()
    right: Counter[tuple[str, float]] = Counter()
    n_asked = 0
    for _ in range(given.contexts):
        # The question and its answer take about twenty tokens.
        ids, numbers = make_context(drawn, model, given.tokens - 20)
        cache = model.make_cache()
        with receiving(METHODS["H2O"].received) as heavy:
            model.run(torch.tensor([ids]), cache=cache)
        for city, number in numbers.items():
            right.update(
                key for key, good in ask(model, cache, heavy, city, number).items() if good
            )
            n_asked += 1
        took = time.monotonic() - began
        print(f"{n_asked} questions, {took:.0f} s: {right['H2O', 1.0]} found", flush=True)
    print(f"\n| kept | {' | '.join(METHODS)} |\n| ---: |{' ---: |' * len(METHODS)}")
    for share in SHARES:
        cells = [f"{right[name, share] / n_asked:.0%}" for name in METHODS]
        print(f"| {share:.1%} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
