"""Models of transformers by attn_implementation="regard" beside "sdpa", in one process.

    python bench/hf_gpu.py [--only llama gpt2 bert mistral] [--rounds 10] [--tiny]
                           [--out bench/results/hf_gpu.md]

The models have random weights in bfloat16: LLaMA as wide as the one of 1.24 billion weights, with 8
of its 16 layers; GPT-2 of 124 million; BERT-base; and a Mistral of 8 layers, width 1,024, whose
queries see 512 keys. Queries and keys are drawn so large that scores spread by 2: new models look
everywhere alike, and a wrong rule would not show. Both contestants are one model with the same
weights, uncompiled, without dropout. A batch is 8 × 2,048 tokens, BERT's 16 × 512: whole, or rows
of half to a whole of it, padded on the left for decoders, which are given positions as generation
gives them, and on the right for BERT. A forward pass ends with the last hidden states; "forward +
backward", for LLaMA and BERT, goes from there to all weights. "generate" writes 64 tokens after 8
padded prompts of up to 1,024, as `generate` does unless told otherwise.

Nothing wrong is timed. The hidden states of two rows, at real tokens, and the gradients of all
weights are compared with those of eager attention in float32: they may be off by twice what eager
attention in bfloat16 is off by. The logits of generation are compared with SDPA's for as long as
both texts are the same. A contestant that fails gets a dash, and its reason stands below. How it is
timed stands in racing.py; ratios above 1 are in regard's favour.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from racing import REFUSALS, Bench, Run, begin, compare, end, head_of, options_of, race, write
from torch import Tensor

import regard.hf

PAIR = ("sdpa", "regard")
EPS = torch.finfo(torch.bfloat16).eps
NEAR = 8 * EPS
"""How far logits of two contestants may be from each other, as a share of their norm."""
Given = dict[str, Tensor]
Models = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, and what is timed of it."""

    title: str
    kind: str
    sizes: dict[str, Any]
    tiny: dict[str, Any]
    batch: tuple[int, int] = (8, 2048)
    side: str = "left"
    trains: bool = False
    generates: bool = False

    def make(self, tiny: bool, device: str) -> Any:
        """The model by SDPA."""
        sizes = {**self.sizes, **(self.tiny if tiny else {})}
        config = transformers.AutoConfig.for_model(self.kind, **sizes)
        lm = transformers.AutoModelForCausalLM if self.generates else transformers.AutoModel
        torch.manual_seed(0)
        with torch.device(device):
            model = lm.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        self.sharpen(model)
        return model.eval()

    @torch.no_grad()
    def sharpen(self, model: Any) -> None:
        """Weights of attention by which heads look somewhere, so that a wrong rule would show."""
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and ("attn" in name or "attention" in name):
                looks = any(part in name for part in ("q_proj", "k_proj", "query", "key", "c_attn"))
                width = weight.shape[0 if self.kind == "gpt2" else 1]
                # What heads add stays small, or all tokens would be alike after a few layers.
                weight.normal_(std=(1.4 if looks else 0.5) * width**-0.5)


NARROW = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
}
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SUBJECTS = {
    "llama": Subject(
        title="LLaMA, 8 layers of 1.24 B's",
        kind="llama",
        sizes={
            "hidden_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 8192,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
            **SPECIAL,
        },
        tiny=NARROW,
        trains=True,
        generates=True,
    ),
    "gpt2": Subject(
        title="GPT-2, 124 M",
        kind="gpt2",
        sizes={"n_positions": 2048, **SPECIAL},
        tiny={"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512},
    ),
    "bert": Subject(
        title="BERT-base",
        kind="bert",
        sizes={},
        tiny={name: NARROW[name] for name in NARROW if name != "num_key_value_heads"},
        batch=(16, 512),
        side="right",
        trains=True,
    ),
    "mistral": Subject(
        title="Mistral, 8 layers, window of 512",
        kind="mistral",
        sizes={
            "hidden_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "intermediate_size": 4096,
            "vocab_size": 32768,
            "sliding_window": 512,
            **SPECIAL,
        },
        tiny={**NARROW, "sliding_window": 16},
    ),
}


def twin(model: Any, implementation: str) -> Any:
    """The model with the same weights in memory, by another attention."""
    shared = {id(weight): weight for weight in model.parameters()}
    other = copy.deepcopy(model, shared)
    other.set_attn_implementation(implementation)
    return other


def draw(model: Any, subject: Subject, batch: tuple[int, int], padded: bool) -> Given:
    """Random tokens, and where they are padded what tells it."""
    torch.manual_seed(1)
    (B, T), device = batch, model.device
    ids = torch.randint(1, model.config.vocab_size, (B, T), device=device)
    if not padded:
        return {"input_ids": ids}
    lengths = torch.linspace(T, T // 2, B, device=device).long()[:, None]
    at = torch.arange(T, device=device)
    real = at >= T - lengths if subject.side == "left" else at < lengths
    given = {"input_ids": ids.masked_fill(~real, 0), "attention_mask": real.long()}
    if subject.side == "left":
        given["position_ids"] = (real.cumsum(1) - 1).clamp(min=0)
    return given


def real_of(given: Given) -> Tensor:
    """Which tokens are real, (B, T)."""
    return given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()


def hidden(model: Any, given: Given) -> Tensor:
    """The last hidden states."""
    body = model.base_model
    more = {"use_cache": False} if body.config.model_type != "bert" else {}
    found: Tensor = body(**given, **more).last_hidden_state
    return found


def far(found: Tensor, expected: Tensor) -> float:
    """The largest distance of two vectors, as a share of the expected one's norm."""
    expected = expected.float()
    size = expected.norm(dim=-1).clamp(min=1e-6)
    return float(((found.float() - expected).norm(dim=-1) / size).max())


@torch.no_grad()
def check_hidden(model: Any, models: Models, given: Given) -> dict[str, str]:
    """What is wrong with the hidden states of contestants, by name; nothing for the right ones."""
    some = {name: tensor[[0, -1]] for name, tensor in given.items()}
    real = real_of(some)
    exact = hidden(copy.deepcopy(model).float(), some)[real]
    bound = 2 * far(hidden(model, some)[real], exact) + EPS
    wrong = {}
    for name, contestant in models.items():
        try:
            off = far(hidden(contestant, given)[[0, -1]][real], exact)
        except REFUSALS as error:
            wrong[name] = str(error).splitlines()[0]
            continue
        if not off <= bound:
            wrong[name] = f"its hidden states are off by {off:.3g} of their norm"
    return wrong


def train(model: Any, given: Given, grad: Tensor) -> None:
    """A forward and a backward pass."""
    hidden(model, given).backward(grad)
    model.zero_grad(set_to_none=True)


def gradients(model: Any, given: Given, grad: Tensor) -> list[Tensor | None]:
    """Of all weights that lead to the hidden states."""
    found = hidden(model, given)
    weights = list(model.base_model.parameters())
    return list(torch.autograd.grad(found, weights, grad.to(found.dtype), allow_unused=True))


def check_gradients(model: Any, models: Models, given: Given, grad: Tensor) -> dict[str, str]:
    """What is wrong with the gradients of contestants, judged as the hidden states are."""
    some = {name: tensor[[0, -1]] for name, tensor in given.items()}
    exact = gradients(copy.deepcopy(model).float(), some, grad[[0, -1]])
    sizes = [0.0 if one is None else float(one.norm()) for one in exact]

    def off(contestant: Any) -> list[float]:
        found = gradients(contestant, some, grad[[0, -1]])
        return [
            far(one.flatten(), want.flatten())
            for one, want, size in zip(found, exact, sizes, strict=True)
            # Small ones are rounding: a key's bias adds the same to all scores of a row.
            if one is not None and want is not None and size > 1e-2 * max(sizes)
        ]

    bounds = [2 * error + EPS for error in off(model)]
    wrong = {}
    for name, contestant in models.items():
        pairs = zip(off(contestant), bounds, strict=True)
        worst = max((error for error, bound in pairs if not error <= bound), default=None)
        if worst is not None:
            wrong[name] = f"a gradient is off by {worst:.3g} of its norm"
    return wrong


def write_tokens(model: Any, given: Given, n_new: int, **more: Any) -> Any:
    """Greedy generation."""
    known = {name: given[name] for name in ("input_ids", "attention_mask")}
    return model.generate(**known, max_new_tokens=n_new, do_sample=False, pad_token_id=0, **more)


def check_tokens(models: Models, given: Given, n_new: int) -> dict[str, str]:
    """What is wrong with regard's logits, of SDPA's, for as long as both wrote the same."""
    asked = {"return_dict_in_generate": True, "output_logits": True}
    one, two = (write_tokens(model, given, n_new, **asked) for model in models.values())
    T = given["input_ids"].shape[1]
    same = (one.sequences == two.sequences)[:, T:].long().cumprod(1).bool()
    before = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], 1)  # the step that differs too
    first, second = (torch.stack(x.logits, 1)[before] for x in (one, two))
    off = far(second, first)
    return {} if off <= NEAR else {"regard": f"its logits are off by {off:.3g} of their norm"}


def time_row(title: str, runs: dict[str, Run], wrong: dict[str, str], bench: Bench) -> None:
    """Race the contestants that are right, and say a line of the table."""
    runs = {name: run for name, run in runs.items() if name not in wrong}
    times = race(runs, PAIR, bench)
    cells = []
    for name in PAIR:
        dash = bench.dash(f"{title}, {name}: {wrong[name]}") if name in wrong else ""
        cells.append(dash or f"{statistics.median(times[name]):.3g}")
    bench.say(f"| {title} | {' | '.join(cells)} | {compare(times, PAIR)[1]} |")


def time_passes(subject: Subject, model: Any, models: Models, bench: Bench) -> None:
    """Forward, and where it is asked for backward, of a whole and of a padded batch."""
    batch = (3, 64) if bench.options.tiny else subject.batch
    for padded in (False, True):
        given = draw(model, subject, batch, padded)
        size = f"{batch[0]} × {batch[1]:,}{', padded' if padded else ''}"
        wrong = check_hidden(model, models, given)
        runs: dict[str, Run] = {name: partial(hidden, m, given) for name, m in models.items()}
        with torch.no_grad():
            time_row(f"{subject.title}: forward, {size}", runs, wrong, bench)
        if not subject.trains:
            continue
        real = real_of(given)[..., None]
        grad = torch.randn(*batch, model.config.hidden_size, device=model.device) * real
        grad = grad.to(torch.bfloat16)
        wrong = wrong or check_gradients(model, models, given, grad)
        runs = {name: partial(train, m, given, grad) for name, m in models.items()}
        time_row(f"{subject.title}: forward + backward, {size}", runs, wrong, bench)


@torch.no_grad()
def time_generation(subject: Subject, model: Any, models: Models, bench: Bench) -> None:
    """64 tokens after padded prompts, in three rounds, since each takes half a second."""
    batch, n_new = ((3, 48), 4) if bench.options.tiny else ((8, 1024), 64)
    given = draw(model, subject, batch, True)
    wrong = check_hidden(model, models, given) or check_tokens(models, given, n_new)
    runs: dict[str, Run] = {
        name: partial(write_tokens, m, given, n_new) for name, m in models.items()
    }
    few = argparse.Namespace(**{**vars(bench.options), "rounds": 3})
    title = f"{subject.title}: generate {n_new}, {batch[0]} × {batch[1]:,}, padded"
    # The same report: what is said and dashed is kept in lists that both share.
    time_row(title, runs, wrong, replace(bench, options=few))


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--only", choices=SUBJECTS, nargs="+", default=list(SUBJECTS))
    bench = begin(parser, "transformers on regard's attention, on a GPU")
    bench.say(f"transformers {transformers.__version__}.", "", "ms a call.", "")
    bench.say(*head_of("", PAIR, "sdpa ÷ regard"))
    parts: list[Callable[..., None]] = [time_passes, time_generation]
    for name in bench.options.only:
        subject = SUBJECTS[name]
        sdpa = subject.make(bench.options.tiny, bench.device)
        models = {"sdpa": sdpa, "regard": twin(sdpa, regard.hf.NAME)}
        eager = twin(sdpa, "eager")
        for part in parts[: 1 + subject.generates]:
            part(subject, eager, models, bench)
        del sdpa, models, eager
        bench.free()
        write(bench)
    end(bench)


if __name__ == "__main__":
    main()
