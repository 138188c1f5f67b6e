"""Hugging Face models on regard's attention: import this, and name "regard" as their attention.

    import regard.hf

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="regard")
    model.set_attn_implementation("regard")  # or later

Why: every architecture that takes its attention from `transformers`' interface then runs on our
operation and its backends. Masks are values, so a padded batch, a window or packed texts need no
mask matrix, forward and backward, and our kernels skip what is hidden.
How: importing registers two functions, for attention and for masks. The mask function is given
functions of two positions. Those of the library itself (causal, window, packed texts, padding) are
recognised by name, and become our masks. If there is any other, the library's own function for SDPA
builds the matrix, which is used as it is; so is a mask that a caller built. A model that computes
with its mask, instead of passing it on, gets the matrix too: `RuleMask` is a tensor whose matrix is
built when it is needed. A model that does not accept SDPA's masks, which are booleans, gets those
of eager attention, which are numbers to add.

Left out: attention weights as outputs, which `regard.watch` shows; padding as lengths under
`torch.compile`, where the mask is a matrix, since its values cannot be read.

Letters: B batch, T queries, S keys, H query heads, G key heads, D head width.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

try:
    from transformers import MODEL_MAPPING, AttentionInterface, masking_utils
except ImportError as missing:
    raise ImportError(
        "regard.hf is for models of the package transformers (5.0 or later), which could not be "
        f"imported ({missing}): pip install transformers"
    ) from missing

from regard.ops import Bias, Causal, Dense, DenseBias, Documents, Lengths, Mask, Window, attention

NAME = "regard"
Rule = Callable[..., Any]
FROM_START = Causal(align="start")
"""What "causal" means without a mask."""


class RuleMask(Tensor):
    """A mask (B, 1, T, S) of which only the rule is stored; computing with it builds the matrix.

    dtype: bool, True where a look is allowed, or floating point, numbers to add to scores.
    """

    rule: Mask | None
    make: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls,
        rule: Mask | None,
        shape: tuple[int, ...],
        device: Any,
        dtype: torch.dtype,
        make: Callable[[], Tensor],
    ) -> RuleMask:
        wrap: Any = Tensor._make_wrapper_subclass
        found: RuleMask = wrap(cls, shape, dtype=dtype, device=device)
        found.rule, found.make = rule, make
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = {name: _whole(value) for name, value in (kwargs or {}).items()}
        return function(*map(_whole, args), **named)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RuleMask({self.rule!r}, {tuple(self.shape)})"


def _whole(value: Any) -> Any:
    """Replace masks by their matrices, in lists of tensors too; leave anything else as it is."""
    if isinstance(value, RuleMask):
        return value.make()
    return type(value)(map(_whole, value)) if type(value) in (list, tuple) else value


def regard_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The attention function of the interface: (B, H, T, D), (B, G, S, D) in, (B, T, H, D) out."""
    chosen = None
    if more:
        refuse_options(module, more)
        chosen = more.get("indices")
    bias: Bias | None = None
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask: Mask | None = FROM_START if causal and query.shape[2] > 1 else None
    else:
        mask, bias = read_mask(attention_mask, key.shape[2])
    if chosen is not None:
        mask = hide_unchosen(mask, chosen, key.shape[2])
    if position_bias is not None:
        extra: Bias = DenseBias(position_bias[..., : key.shape[2]])
        bias = extra if bias is None else bias + extra
    output = attention(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=scaling,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.reshape(-1),
        dropout=dropout,
    )
    return output.transpose(1, 2).contiguous(), None


def refuse_options(module: nn.Module, given: dict[str, Any]) -> None:
    """Raise an error for options of the interface that are not supported."""
    if given.get("cu_seq_lens_q") is not None or given.get("cache") is not None:
        raise ValueError(
            'attn_implementation="regard" does not support packing by cu_seq_lens or paged caches '
            "yet; give a padded batch, or position_ids that start at 0 in each text"
        )
    if given.get("block_indices") is not None:
        raise ValueError(
            f"{type(module).__name__} chooses blocks of keys for each query, which "
            'attn_implementation="regard" does not support yet; use "sdpa" or "eager"'
        )


def read_mask(seen: Tensor | None, n_keys: int) -> tuple[Mask | None, Bias | None]:
    """The mask that a model passes on: our rule, or a matrix of booleans or numbers to add."""
    if seen is None:
        return None, None
    if isinstance(seen, RuleMask):
        return seen.rule, None
    seen = seen[..., :n_keys]
    return (Dense(seen), None) if seen.dtype == torch.bool else (None, DenseBias(seen))


def hide_unchosen(mask: Mask | None, indices_btn: Tensor, n_keys: int) -> Mask:
    """Restrict a mask to the keys that a model's indexer chose (DeepSeek's sparse attention).

    For eager attention and SDPA such a model adds them to the mask; others get them as an argument.
    """
    B, T, _ = indices_btn.shape
    chosen_bts = torch.zeros(B, T, n_keys, dtype=torch.bool, device=indices_btn.device)
    chosen = Dense(chosen_bts.scatter(-1, indices_btn.long(), True)[:, None])
    return chosen if mask is None else mask & chosen


def regard_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Rule = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **more: Any,
) -> Tensor | None:
    """The mask function for `transformers`: a `RuleMask` if the rule is known, else the matrix."""
    config = more.get("config")
    bools = config is None or takes_bools(type(config))

    def make() -> Tensor:
        whole = (masking_utils.sdpa_mask if bools else masking_utils.eager_mask)(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            device=device,
            **{**more, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )
        assert whole is not None
        return whole

    rules: list[Mask] = []
    if torch.compiler.is_compiling() or type(q_offset) is not int or type(kv_offset) is not int:
        return make()
    placed = Placed(q_length, kv_length, q_offset, kv_offset)
    for leaf in leaves_of(mask_function):
        found = placed.read(leaf)
        if found is None:
            return make()
        rules += found
    if attention_mask is not None:
        rules += placed.read_padding(attention_mask)
    rule = functools.reduce(operator.and_, rules) if rules else None
    dtype = torch.bool if bools else more.get("dtype", torch.float32)
    return RuleMask(rule, (batch_size, 1, q_length, kv_length), device, dtype, make)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def takes_bools(config_class: Any) -> bool:
    """Whether models of a config accept boolean masks, as SDPA does; False if that is unknown."""
    return _takes_bools(config_class)


@functools.lru_cache(maxsize=64)
def _takes_bools(config_class: Any) -> bool:
    found = MODEL_MAPPING.get(config_class, None)
    models = found if isinstance(found, tuple) else (found,)
    return all(getattr(model, "_supports_sdpa", False) is True for model in models)


def leaves_of(rule: Rule) -> list[Rule]:
    """The functions of a rule, all of which must allow a look."""
    if _name_of(rule) != "and_masks.and_mask":
        return [rule]
    return [leaf for part in _kept_by(rule, "mask_functions") for leaf in leaves_of(part)]


@dataclass(frozen=True)
class Placed:
    """The queries and keys of a call, and their positions in the text."""

    n_queries: int
    n_keys: int
    q_offset: int
    kv_offset: int

    def read(self, rule: Rule) -> list[Mask] | None:
        """The masks that a function of the library stands for; None if it is not recognised."""
        name = _name_of(rule)
        if rule is masking_utils.causal_mask_function:
            return self.look_back(None)
        if rule is masking_utils.bidirectional_mask_function:
            return []
        if name == "sliding_window_overlay.inner_mask":  # always beside the causal function
            window = int(_kept_by(rule, "sliding_window"))
            # A config without windows may say 0 (Qwen2-MoE): a mask of nothing, which no layer
            # uses.
            return self.look_back(window - 1) if window > 0 else [Causal(), ~Causal()]
        if name == "packed_sequence_mask_function.inner_mask":
            ids = _kept_by(rule, "packed_sequence_mask")
            whole = self.q_offset == self.kv_offset == 0 and ids.shape[1] == self.n_keys
            return [Documents(ids)] if whole and self.n_queries == self.n_keys else None
        return None

    def look_back(self, left: int | None) -> list[Mask] | None:
        """Masks for no later key, and at most `left` earlier ones."""
        ahead = self.q_offset - self.kv_offset  # keys before the first query
        if ahead == self.n_keys - self.n_queries:
            return [Causal() if left is None else Window(left, 0)]
        if left is None and ahead == 0:
            return [Causal(align="start")]
        return None

    def read_padding(self, real: Tensor) -> list[Mask]:
        """Padding as `Lengths` if it is on one side, else `Dense`; unnamed keys count as padding.

        Its values are read once per forward pass, which synchronizes with the device.
        """
        end = self.kv_offset + self.n_keys
        lack = end - real.shape[1]
        real = functional.pad(real.bool(), (0, lack)) if lack > 0 else real.bool()
        real = real[:, self.kv_offset : end]
        # On the host, as a GPU would be launched a dozen kernels to tell.
        seen = real.cpu().numpy()
        steps = (seen[:, 1:] != seen[:, :-1]).sum(1)
        if seen.all():
            return []
        if (steps <= seen[:, 0]).all():
            return [Lengths(real.sum(1))]
        if (steps <= seen[:, -1]).all():
            return [Lengths(real.sum(1), side="left")]
        return [Dense(real[:, None, None])]


def _name_of(rule: Rule) -> str:
    """The name of a function of the library, without the `<locals>` of inner functions; else ""."""
    own = getattr(rule, "__module__", None) == masking_utils.__name__
    return rule.__qualname__.replace("<locals>.", "") if own else ""


def _kept_by(rule: Rule, name: str) -> Any:
    """A variable that an inner function captured from the function around it."""
    return inspect.getclosurevars(rule).nonlocals[name]


AttentionInterface.register(NAME, regard_attention)
masking_utils.AttentionMaskInterface.register(NAME, regard_mask)
