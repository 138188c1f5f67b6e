"""Rotary (RoPE) scaling: frequencies for texts longer than those a model was trained on.

Why: a checkpoint is only right with the scaling it was trained or tuned with. A scaling is applied
in full or refused with a reason, never ignored.

How: each is a frozen value, checked when it is made, with
- `scale(frequencies_r, base, length)`, the new frequencies; `length` broadcasts against (R,);
- `needs_length`, whether the length of the text matters; if not, `length` may be None;
- `rotates_kept_keys`, whether cached keys are rotated again as the text grows;
- `amplitude`, the factor on cos and sin; the scores are multiplied by its square.
`scaling_from_dict` reads the `rope_scaling` / `rope_parameters` of a Hugging Face config.

Left out: "proportional", "axial" and "mrope", and the second factor that DeepSeek puts on the
softmax scale (pass it to attention as `scale=`).

Letters: R pairs that rotate.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard._check import check_count, check_number


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The base of all scalings: defaults, and checks of the fields."""

    needs_length: ClassVar[bool] = False
    rotates_kept_keys: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse lengths that are not positive integers, and numbers that are not above 0."""
        for field in fields(self):
            name, value = f"{type(self).__name__}.{field.name}", getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if field.name.endswith("max_len"):
                check_count(name, value)
            elif field.type in (float, float | None):
                check_number(name, value)

    @property
    def amplitude(self) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Linear(Stretch):
    """Linear scaling, type "linear": all frequencies are divided by `factor`.

    Args:
        factor: How many times longer texts may be.
    """

    factor: float

    def scale(self, frequencies_r: Tensor, base: float, length: Tensor | None) -> Tensor:
        return frequencies_r / self.factor


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(Stretch):
    """Dynamic NTK scaling, type "dynamic": the base grows with the length of the text.

    The fastest pair keeps its frequency, the slowest is divided by the whole stretch, the others by
    a power between. The stretch depends on the length of this text alone. Keys in a cache stay as
    they were rotated in their own call, as in `transformers`. So a text that grows past
    `original_max_len` in a cache has other outputs than when it is read at once; read a long
    prompt in one call.

    Args:
        factor: How fast the stretch grows with the length.
        original_max_len: The length up to which nothing is scaled.
    """

    factor: float
    original_max_len: int
    needs_length: ClassVar[bool] = True

    def scale(self, frequencies_r: Tensor, base: float, length: Tensor | None) -> Tensor:
        assert length is not None
        excess = length.clamp(min=self.original_max_len) / self.original_max_len - 1
        last = frequencies_r.shape[-1] - 1
        share_r = _count_pairs(frequencies_r) / last
        return frequencies_r * (1 + self.factor * excess) ** -share_r


@dataclass(frozen=True, kw_only=True)
class YaRN(Stretch):
    """YaRN, type "yarn": slow pairs are divided by `factor`, fast ones kept, with a ramp between.

    Args:
        factor: How many times longer texts may be.
        original_max_len: The length of the texts of the training.
        beta_fast: A pair that rotates more often than this within original_max_len is fast.
        beta_slow: A pair that rotates less often than this is slow.
        attention_factor: What cos and sin are multiplied by; None: 0.1 ln(factor) + 1.
        mscale, mscale_all_dim: (DeepSeek) instead of attention_factor, both or none: the factor is
            (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1).
        truncate: Whether the ramp is widened to whole pairs.
    """

    factor: float
    original_max_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.truncate, bool):
            raise ValueError(f"YaRN.truncate is {self.truncate!r}; expected True or False")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError("YaRN.mscale and mscale_all_dim only work together; give both or none")
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"YaRN.beta_fast {self.beta_fast} is below beta_slow {self.beta_slow}; "
                "fast pairs rotate more often"
            )

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        growth = 0.1 * max(math.log(self.factor), 0.0)
        if self.mscale is None or self.mscale_all_dim is None:
            return 1 + growth
        return (1 + self.mscale * growth) / (1 + self.mscale_all_dim * growth)

    def scale(self, frequencies_r: Tensor, base: float, length: Tensor | None) -> Tensor:
        n_pairs = frequencies_r.shape[-1]
        first = self._find_pair(self.beta_fast, n_pairs, base)
        last = self._find_pair(self.beta_slow, n_pairs, base)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # The published code uses the width minus 1, not the pairs minus 1; checkpoints rely on it.
        first, last = max(first, 0), min(last, 2 * n_pairs - 1)
        if first == last:
            last += 0.001
        slow_r = ((_count_pairs(frequencies_r) - first) / (last - first)).clamp(0, 1)
        return frequencies_r * (1 - slow_r + slow_r / self.factor)

    def _find_pair(self, turns: float, n_pairs: int, base: float) -> float:
        """The index, maybe fractional, of the pair with this many turns in original_max_len."""
        wavelength = self.original_max_len / turns
        return n_pairs * math.log(wavelength / (2 * math.pi)) / math.log(base)


@dataclass(frozen=True, kw_only=True)
class Llama3(Stretch):
    """LLaMA 3.1's, type "llama3": slow pairs are divided by `factor`, fast ones kept.

    Args:
        factor: What the frequencies of slow pairs are divided by.
        low_freq_factor: A pair that rotates less often than this in original_max_len is slow.
        high_freq_factor: A pair that rotates more often than this is fast; between the two there is
            a smooth transition.
        original_max_len: The length of the texts of the training.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"Llama3.high_freq_factor {self.high_freq_factor} is not above "
                f"low_freq_factor {self.low_freq_factor}; fast pairs rotate more often"
            )

    def scale(self, frequencies_r: Tensor, base: float, length: Tensor | None) -> Tensor:
        turns_r = frequencies_r * (self.original_max_len / (2 * math.pi))
        passage = self.high_freq_factor - self.low_freq_factor
        fast_r = ((turns_r - self.low_freq_factor) / passage).clamp(0, 1)
        return frequencies_r * (fast_r + (1 - fast_r) / self.factor)


@dataclass(frozen=True, kw_only=True)
class LongRoPE(Stretch):
    """LongRoPE, type "longrope" (once "su"): each pair has a divisor for short and for long texts.

    Keys in a cache are rotated again once the text is longer than `original_max_len`.

    Args:
        short_factor: A divisor for each pair, in texts of up to original_max_len.
        long_factor: The same for longer texts.
        original_max_len: The length of the texts of the training.
        factor, max_len: How many times longer texts may be, or their length; one of the two.
        attention_factor: What cos and sin are multiplied by, in short texts too; None:
            sqrt(1 + ln(factor) / ln(original_max_len)).
    """

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    original_max_len: int
    factor: float | None = None
    max_len: int | None = None
    attention_factor: float | None = None
    needs_length: ClassVar[bool] = True
    rotates_kept_keys: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("LongRoPE.original_max_len", self.original_max_len, above=1)
        for name in ("short_factor", "long_factor"):
            divisors = tuple(getattr(self, name))
            for divisor in divisors:
                check_number(f"a divisor in LongRoPE.{name}", divisor)
            object.__setattr__(self, name, divisors)  # a tuple, so that the value can be a key
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"LongRoPE.short_factor has {len(self.short_factor)} divisors, long_factor "
                f"{len(self.long_factor)}; expected one for each pair in both"
            )
        if self.factor is not None and self.max_len is not None:
            raise ValueError("LongRoPE.factor and max_len say the same thing; give one of them")
        if self.factor is None and self.max_len is None and self.attention_factor is None:
            raise ValueError("LongRoPE needs factor, max_len or attention_factor; give one of them")

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        factor = self.factor if self.max_len is None else self.max_len / self.original_max_len
        assert factor is not None
        growth = max(math.log(factor), 0.0)
        return math.sqrt(1 + growth / math.log(self.original_max_len))

    def scale(self, frequencies_r: Tensor, base: float, length: Tensor | None) -> Tensor:
        assert length is not None
        short_r = frequencies_r.new_tensor(self.short_factor)
        long_r = frequencies_r.new_tensor(self.long_factor)
        return frequencies_r / torch.where(length > self.original_max_len, long_r, short_r)


Scaling = Linear | DynamicNTK | YaRN | Llama3 | LongRoPE


def _count_pairs(frequencies_r: Tensor) -> Tensor:
    """0, 1, 2, ... in the type and on the device of the frequencies."""
    n_pairs = frequencies_r.shape[-1]
    return torch.arange(n_pairs, dtype=frequencies_r.dtype, device=frequencies_r.device)


# Hugging Face's types: the class of each, its required keys, its optional keys.
_ORIGINAL = "original_max_position_embeddings"
_YARN = f"factor {_ORIGINAL} beta_fast beta_slow attention_factor mscale mscale_all_dim truncate"
_TYPES: dict[str, tuple[Callable[..., Scaling | None], str, str]] = {
    "default": (lambda: None, "", ""),
    "linear": (Linear, "factor", ""),
    "dynamic": (DynamicNTK, "factor", ""),
    "llama3": (Llama3, "factor low_freq_factor high_freq_factor", _ORIGINAL),
    "yarn": (YaRN, "", f"{_YARN} finetuned"),
    "longrope": (LongRoPE, "short_factor long_factor", f"factor {_ORIGINAL} attention_factor"),
}


def scaling_from_dict(
    rope_scaling: Mapping[str, Any] | None,
    *,
    max_len: int | None = None,
    original_max_len: int | None = None,
) -> Scaling | None:
    """The scaling that a Hugging Face config means by `rope_scaling` or `rope_parameters`.

    Args:
        rope_scaling: That dict. None, and the type "default", give None. rope_theta and
            partial_rotary_factor in it are ignored: they are base and rotary_dim of `RotaryConfig`.
        max_len: The config's max_position_embeddings.
        original_max_len: The config's original_max_position_embeddings, if it is beside the dict
            and not in it, as in Phi-3.

    Raises:
        ValueError: A type or a key that is not known, or one that is missing.
    """
    given = {key: value for key, value in (rope_scaling or {}).items() if value is not None}
    given.pop("rope_theta", None)
    given.pop("partial_rotary_factor", None)
    kinds = {given.pop(key) for key in ("rope_type", "type") if key in given} or {"default"}
    kinds = {"longrope" if kind == "su" else kind for kind in kinds}  # Phi-3's first name for it
    if kinds - set(_TYPES) or len(kinds) > 1:
        raise ValueError(
            f"rotary scaling of type {' and '.join(sorted(map(repr, kinds)))} is not known; "
            f"expected one of {', '.join(map(repr, _TYPES))}: without the right one every position "
            "would be wrong"
        )
    kind = str(kinds.pop())
    needed, allowed = (set(keys.split()) for keys in _TYPES[kind][1:])
    unknown = sorted(set(given) - needed - allowed)
    if unknown:
        raise ValueError(
            f"rotary scaling {kind!r} has unknown keys {', '.join(unknown)}; expected "
            f"{', '.join(sorted(needed | allowed)) or 'none'}. If they name kinds of layers, pass "
            "the dict of one kind"
        )
    missing = sorted(needed - set(given))
    if missing:
        raise ValueError(f"rotary scaling {kind!r} lacks {', '.join(missing)}; add it to the dict")
    # "finetuned" describes the training; "yarn" is computed in the same way with and without it.
    given.pop("finetuned", None)
    in_dict = given.pop(_ORIGINAL, None)
    if kind == "dynamic":  # here the model's own length is the original one
        given["original_max_len"] = _need(kind, "max_len", max_len)
    elif kind not in ("linear", "default"):
        original = _need(kind, _ORIGINAL, original_max_len or in_dict or max_len)
        given["original_max_len"] = original
        if kind != "llama3" and "factor" not in given:
            given["factor"] = _need(kind, "factor or max_len", max_len) / original
    return _TYPES[kind][0](**given)


def _need(kind: str, name: str, value: Any) -> Any:
    if value is None:
        raise ValueError(f"rotary scaling {kind!r} lacks {name}; add it, or pass max_len=")
    return value
