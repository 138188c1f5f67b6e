"""How a model is trained, as one frozen value: `TrainConfig`.

Why: to repeat, resume and compare runs one needs all of their settings; so they are fields of one
dataclass, which is checked when it is built and saved beside the run. `with_settings` changes
fields as a command line words them ("lr=0.002"), and parses each value as the type of its field.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from regard._check import check_choice, check_count, check_number, check_probability
from regard.training.data.shuffle import check_seed

Schedule = Literal["cosine", "linear", "inverse_sqrt", "constant"]
OptimizerKind = Literal["adamw", "muon"]
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of one run. A step is `accumulate` batches and one update of the weights.

    `lr` is the highest learning rate; it is reached after `warmup` steps and falls as `schedule`
    says, to lr · end_share at the last step ("inverse_sqrt" falls as 1/√step, without an end).
    `r_drop`: None, or R-Drop's α, such as 5: each batch is read twice with different dropout, and
    the loss also measures how far the two outputs are apart (`loss.r_drop_loss`).
    `average`: None, or the decay of an exponential moving average of the weights (0.999), which is
    then what is evaluated and saved as the model. `patience`: stop after so many evaluations in a
    row without a better one. `minutes`: stop after so long, whatever the step. `precision`:
    "bfloat16" is autocast. `compiled`: use torch.compile; the first step waits for it, later steps
    are faster. `recompute`: activation checkpointing of the blocks (`checkpointing.py`).
    """

    steps: int
    lr: float = 1e-3
    schedule: Schedule = "cosine"
    warmup: int = 100
    end_share: float = 0.1
    optimizer: OptimizerKind = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    accumulate: int = 1
    smoothing: float = 0.0
    r_drop: float | None = None
    precision: Precision = "float32"
    compiled: bool = False
    recompute: bool = False
    average: float | None = None
    eval_every: int = 200
    save_every: int = 200
    keep: int = 2
    patience: int | None = None
    minutes: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate", "eval_every", "save_every", "keep"):
            check_count(name, getattr(self, name))
        for name in ("lr", "eps", "clip"):
            check_number(name, getattr(self, name), above=0)
        check_seed(self.seed)
        if type(self.warmup) is not int or self.warmup < 0:
            raise ValueError(f"warmup is {self.warmup!r}; expected a whole number, 0 or more")
        if not 0 <= self.weight_decay < math.inf:
            what = f"weight_decay is {self.weight_decay!r}"
            raise ValueError(f"{what}; expected a finite number, 0 or more")
        for name in ("beta1", "beta2", "smoothing", "end_share"):
            check_probability(name, getattr(self, name))
        for name, kept in (("beta1", "momentum"), ("beta2", "size"), ("average", "weights")):
            if getattr(self, name) == 1.0:
                what = f"averaged {kept} would stay what they were at the start"
                raise ValueError(f"{name} is 1.0; expected a share below 1: {what}")
        check_choice("schedule", self.schedule, get_args(Schedule))
        check_choice("optimizer", self.optimizer, get_args(OptimizerKind))
        check_choice("precision", self.precision, get_args(Precision))
        if self.r_drop is not None:
            check_number("r_drop", self.r_drop, above=0)
        if self.average is not None:
            check_probability("average", self.average)
        if self.patience is not None:
            check_count("patience", self.patience)
        if self.minutes is not None:
            check_number("minutes", self.minutes, above=0)
        if self.schedule == "inverse_sqrt" and self.warmup == 0:
            raise ValueError("the inverse_sqrt schedule falls from the end of its warmup: above 0")

    def with_settings(self, settings: Mapping[str, str]) -> TrainConfig:
        kinds = typing.get_type_hints(TrainConfig)
        return replace(self, **{name: read(name, word, kinds) for name, word in settings.items()})


def read(name: str, word: str, kinds: Mapping[str, Any]) -> Any:
    if name not in kinds:
        known = ", ".join(field.name for field in fields(TrainConfig))
        raise ValueError(f"no setting is named {name!r}; there are {known}")
    kind = kinds[name]
    if isinstance(kind, types.UnionType):
        if word.lower() == "none":
            return None
        kind = next(each for each in get_args(kind) if each is not type(None))
    readers: dict[Any, Any] = {
        bool: {"true": True, "false": False}.__getitem__,
        int: int,
        float: float,
    }
    wanted = {bool: "true or false", int: "a whole number", float: "a number"}
    try:
        return readers.get(kind, str)(word.lower() if kind is bool else word)
    except (ValueError, KeyError):
        raise ValueError(f"{name}={word!r}; expected {wanted[kind]}") from None


def split_settings(words: Iterable[str]) -> dict[str, str]:
    settings = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"--set {word!r}; expected key=value, for example lr=0.002")
        settings[name.strip()] = value.strip()
    return settings
