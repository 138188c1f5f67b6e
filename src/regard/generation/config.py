"""Settings of generation: `GenerationConfig`, one frozen value, checked when it is made.

Why: a setting that the chosen decoding method never reads is a mistake of the caller, so it is
refused and not ignored.

How: two fields choose the method.
- `temperature` above 0: tokens are sampled; `top_k`, `top_p` and `min_p` narrow the choice.
- `num_beams` above 1: beam search; `length_penalty`, `early_stopping` and `num_return_sequences`
  belong to it.
- neither: greedy, the likeliest token each time. Temperature 0 is greedy too.

The names are the usual ones. Left out: sampling within beams, and the decoding settings in a
model's generation_config.json: only the caller chooses how a text is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from regard._check import check_count, check_number

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How a text is written: greedily, unless temperature or num_beams says otherwise.

    temperature above 0 draws tokens, num_beams above 1 searches; both together are refused, and so
    is a setting that the chosen way would not read.

    Args:
        max_new_tokens: Write at most so many; fewer where the model's max_len ends before.
        min_new_tokens: No stop token before so many. Stop strings are not held up by it.
        temperature: Above 0: logits are divided by it and tokens drawn. None or 0: greedy.
        top_k: Draw among the k likeliest tokens, and those as likely as the last of them.
        top_p: Draw among the likeliest tokens that together have this probability.
        min_p: Draw among tokens with at least this part of the likeliest one's probability.
        repetition_penalty: Above 1: tokens that the text has already, prompt included, become less
            likely.
        num_beams: The number of beams; 1 is no beam search.
        num_return_sequences: How many of the beams a row returns, best first.
        length_penalty: A beam's score is its log-probability / length ** length_penalty: above 0
            favours longer texts.
        early_stopping: When a row's search ends. True: with its num_beams-th finished beam. False:
            when the best running beam, at its length now, would not get among these. "never": when
            it would not at any length.
        stop: A string, or several, that end a row; they and what follows are not part of its text.
        stop_tokens: Token ids that end a row, besides the model's own.
        ignore_eos: Do not stop at the model's own end tokens.
        seed: Row r draws with seed + r alone, or with its own of a list. None: taken from torch's
            global generator.
        chunk: Prompts are read so many tokens at a time; at once where rotary positions depend on
            the length of the prompt.
        compiled: Compile the step that is repeated: slow at first, then fast. Not for beams.

    Example:
        >>> config = regard.GenerationConfig(max_new_tokens=20, temperature=0.8, top_p=0.9, seed=1)
        >>> text = regard.generate("embedded:lm", "Once upon a time", config=config)
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    stop: str | Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | Sequence[int] | None = None
    chunk: int = 2048
    compiled: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_beams", "num_return_sequences", "chunk"):
            check_count(name, getattr(self, name))
        check_number("repetition_penalty", self.repetition_penalty)
        check_number("length_penalty", self.length_penalty, above=float("-inf"))
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(
                f"early_stopping is {self.early_stopping!r}; expected True, False or 'never'"
            )
        if self.min_new_tokens != 0:
            check_count("min_new_tokens", self.min_new_tokens)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is more than "
                f"max_new_tokens={self.max_new_tokens}"
            )
        object.__setattr__(self, "stop", as_texts(self.stop))
        object.__setattr__(self, "stop_tokens", as_ids("stop_tokens", self.stop_tokens))
        self._check_sampling()
        self._check_beams()

    def _check_sampling(self) -> None:
        if self.temperature is not None and self.temperature != 0:
            check_number("temperature", self.temperature)
        if self.top_k is not None:
            check_count("top_k", self.top_k)
        for name, share in (("top_p", self.top_p), ("min_p", self.min_p)):
            check_number(name, 1 if share is None else share)
            if share is not None and share > 1:
                raise ValueError(f"{name} is {share!r}; expected a share above 0, at most 1")
        for name in ("top_k", "top_p", "min_p"):
            if getattr(self, name) is not None and not self.samples:
                raise ValueError(
                    f"{name} narrows a draw, but without a temperature above 0 nothing is drawn: "
                    "give temperature=1.0 too, or leave it out"
                )
        if isinstance(self.seed, Sequence) and not isinstance(self.seed, str):
            object.__setattr__(self, "seed", as_ids("seed", self.seed))
        elif self.seed is not None:
            as_ids("seed", (self.seed,))

    def _check_beams(self) -> None:
        if self.num_return_sequences > self.num_beams:
            raise ValueError(
                f"num_return_sequences={self.num_return_sequences} asks for more than "
                f"num_beams={self.num_beams} gives; for several draws, give the prompt several "
                "times"
            )
        wrong = None
        if self.num_beams == 1:
            if self.length_penalty != 1.0 or self.early_stopping is not False:
                wrong = "length_penalty and early_stopping choose among beams, and num_beams is 1"
        elif self.samples:
            wrong = f"num_beams={self.num_beams} searches and temperature={self.temperature} draws"
            wrong += ": give one of them"
        elif self.compiled:
            wrong = "beams change places at each step, which is not compiled: give one"
        elif self.stop:
            wrong = "stop strings are not looked for in beams: use stop_tokens, or num_beams=1"
        if wrong is not None:
            raise ValueError(wrong)

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled."""
        return self.temperature is not None and self.temperature > 0


def make_config(config: GenerationConfig | None, options: dict[str, Any]) -> GenerationConfig:
    if config is None:
        known = [field.name for field in fields(GenerationConfig)]
        for name in options:
            if name not in known:
                raise TypeError(f"no option is named {name!r}; there are {', '.join(known)}")
        return GenerationConfig(**options)
    if not isinstance(config, GenerationConfig):
        raise TypeError(f"config is a {type(config).__name__}; expected a GenerationConfig")
    if options:
        raise TypeError(
            f"give config= or single options ({', '.join(options)}), not both; "
            "dataclasses.replace(config, ...) makes another config"
        )
    return config


def as_texts(given: object) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"stop is {given!r:.99}; expected a string or a list of strings")
    if not all(texts):
        raise ValueError("stop has an empty string, which every text contains; take it out")
    return tuple(texts)


def as_ids(name: str, given: object) -> tuple[int, ...]:
    if not isinstance(given, Sequence) or not all(
        isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**63 for x in given
    ):
        raise ValueError(f"{name} is {given!r:.99}; expected whole numbers from 0 on")
    return tuple(given)
