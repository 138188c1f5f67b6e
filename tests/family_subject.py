"""Who is judged: a tiny random original of Hugging Face's and ours, and what both say to a batch.

`make_subject` builds the original from a `transformers` config with every parameter random, so that
no bias is 0 and no norm is 1, writes it with `save_pretrained` and opens it with `regard`'s `load`.
`ask_original` and `ask_ours` put a batch to either and give the answer under the same names.

Letters: B batch, T tokens, S tokens of the source, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.layers import observing
from regard.models import Transformer, load
from regard.ops import Wants


@dataclass(frozen=True, eq=False)
class Subject:
    """An original and ours.

    `position_offset`: added to the count of real tokens where the original takes position_ids.
    `padded_sides`: on which sides the original itself answers rightly with padding.
    `keeps_state`: its rotary depends on earlier calls and on the longest row, so that it is asked
    one row at a time. `rotates_kept_keys`: ours turns the keys of a cache anew as the text grows,
    and the original does not, so that it is asked without a cache. `fixed`: patterns of its
    parameters that are constants and no weights. `buffers`: patterns of its buffers that are
    weights.
    """

    original: Any
    ours: Transformer
    folder: Path
    position_offset: int = 0
    padded_sides: tuple[str, ...] = ("left", "right")
    keeps_state: bool = False
    rotates_kept_keys: bool = False
    fixed: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()

    @property
    def two_sided(self) -> bool:
        """Whether there is an encoder and a decoder."""
        return self.ours.encoder is not None and self.ours.decoder is not None

    @property
    def n_types(self) -> int:
        return self.ours.config.embed.n_token_types


@dataclass(eq=False)
class Answer:
    """What a model says about one batch, from either side, under the same names."""

    logits: Tensor | None
    hidden: list[Tensor]
    maps: dict[str, Tensor]
    pooled: Tensor | None = None
    source_hidden: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Batch:
    """What a model is asked; `real` is None without padding. The source is an encoder–decoder's."""

    ids: Tensor
    real: Tensor | None = None
    types: Tensor | None = None
    source: Tensor | None = None
    source_real: Tensor | None = None


@dataclass(frozen=True)
class Draw:
    """How random weights are drawn: wide enough that a generated text does not repeat itself.

    `factors`: patterns of names, and what their numbers are multiplied by.
    """

    seed: int = 97
    matrices: float = 1.5
    table: float = 1.5
    vectors: float = 0.3
    factors: Mapping[str, float] = field(default_factory=dict)


def make_subject(
    config: Any, folder: Path, cls: Any = None, *, draw: Draw | None = None, **more: Any
) -> Subject:
    """The original of this config, of the class `cls` (a causal language model unless given)."""
    torch.manual_seed(71)
    config._attn_implementation = "eager"
    if cls is None:
        from transformers import AutoModelForCausalLM

        original = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    else:
        original = cls(config)
    original = original.float().eval()
    randomise(original, draw or Draw(), more.get("fixed", ()), more.get("buffers", ()))
    generation = getattr(original, "generation_config", None)
    if generation is not None:
        # Every text goes on to its full length, so that 64 tokens are compared.
        generation.eos_token_id = generation.forced_eos_token_id = None
        generation.pad_token_id = 0
    original.save_pretrained(folder, safe_serialization=True)
    return Subject(original, load(folder, dtype=torch.float32), folder, **more)


@torch.no_grad()
def randomise(
    model: Any, draw: Draw, fixed: tuple[str, ...] = (), buffers: tuple[str, ...] = ()
) -> None:
    """Move every parameter, and those buffers, away from what it would be by default."""
    drawn, table = torch.Generator().manual_seed(draw.seed), model.get_input_embeddings().weight
    for name, tensor in list_weights(model, fixed, buffers):
        noise = torch.randn(tensor.shape, generator=drawn)
        if tensor.dim() < 2:  # biases leave 0, norms leave 1 (or 0, where they are offsets)
            tensor.add_(draw.vectors * noise)
        else:
            width = draw.table if tensor is table else draw.matrices
            tensor.copy_(noise * (width / tensor.shape[-1] ** 0.5))
        for pattern, factor in draw.factors.items():
            tensor.mul_(factor if re.search(pattern, name) else 1.0)
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie(recompute_mapping=False)


def fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def list_weights(
    model: nn.Module, fixed: tuple[str, ...] = (), buffers: tuple[str, ...] = ()
) -> list[tuple[str, Tensor]]:
    """What a model has learned: its parameters without `fixed`, and its `buffers`."""
    found = [pair for pair in model.named_parameters() if not fits(pair[0], fixed)]
    return found + [pair for pair in model.named_buffers() if fits(pair[0], buffers)]


def draw_ids(subject: Subject, n_rows: int, n_tokens: int, seed: int = 5) -> Tensor:
    """Random tokens; the lowest few are left out, since families give them meanings."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(5, subject.ours.config.vocab_size, (n_rows, n_tokens), generator=drawn)


def draw_batch(subject: Subject, n_rows: int = 2, n_tokens: int = 23) -> Batch:
    """A batch without padding."""
    ids = draw_ids(subject, n_rows, n_tokens)
    types = draw_ids(subject, n_rows, n_tokens, 7) % subject.n_types if subject.n_types else None
    source = draw_ids(subject, n_rows, n_tokens - 6, 9) if subject.two_sided else None
    return Batch(ids, types=types, source=source)


@torch.no_grad()
def ask_original(subject: Subject, batch: Batch, original: Any = None) -> Answer:
    """The original's answer; asked of a copy, so that nothing stays from call to call."""
    original = copy.deepcopy(subject.original) if original is None else original
    takes = inspect.signature(original.forward).parameters
    given: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True}
    if subject.two_sided:
        given.update(input_ids=batch.source, decoder_input_ids=batch.ids, use_cache=False)
        if batch.source_real is not None:
            given["attention_mask"] = batch.source_real.long()
        if batch.real is not None:
            given["decoder_attention_mask"] = batch.real.long()
    else:
        given["input_ids"] = batch.ids
        if batch.real is not None:
            given["attention_mask"] = batch.real.long()
            if "position_ids" in takes:
                count = (batch.real.cumsum(-1) - 1).clamp(min=0) + subject.position_offset
                given["position_ids"] = count
    if batch.types is not None:
        given["token_type_ids"] = batch.types
    out = original(**given)
    logits = out.get("logits", out.get("prediction_logits"))
    maps = {}
    if subject.two_sided:
        for name, found in (
            ("encoder.layers.{}.self_attn", out.encoder_attentions),
            ("decoder.layers.{}.self_attn", out.decoder_attentions),
            ("decoder.layers.{}.cross_attn", out.cross_attentions),
        ):
            maps.update({name.format(n): map_bhts for n, map_bhts in enumerate(found)})
        hidden, source_hidden = list(out.decoder_hidden_states), list(out.encoder_hidden_states)
        return Answer(logits, hidden, maps, None, source_hidden)
    side = "encoder" if subject.ours.decoder is None else "decoder"
    for n, map_bhts in enumerate(out.attentions):
        maps[f"{side}.layers.{n}.self_attn"] = map_bhts
    return Answer(logits, list(out.hidden_states), maps, out.get("pooler_output"))


@torch.no_grad()
def ask_ours(subject: Subject, batch: Batch, ours: Transformer | None = None) -> Answer:
    """Our answer."""
    ours = subject.ours if ours is None else ours
    with observing(ours, Wants(weights=True)) as seen:
        out = ours(
            batch.ids,
            real=batch.real,
            token_types=batch.types,
            source=batch.source,
            source_real=batch.source_real,
            keep_hidden=True,
        )
    assert out.hidden is not None
    answer = Answer(out.logits, list(out.hidden), {}, out.pooled)
    if ours.head is not None and ours.head.project is not None:
        # OPT's last state is told behind the projection to the width of its table.
        answer.hidden[-1] = ours.head.project(answer.hidden[-1])
    for name, seen_there in seen.items():
        assert seen_there.weights is not None
        answer.maps[name] = seen_there.weights
    if out.memory is not None:
        assert out.memory.hidden is not None
        answer.source_hidden = list(out.memory.hidden)
    return answer
