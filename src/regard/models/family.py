"""A family: how one of Hugging Face's architectures maps to our Transformer and back.

Why: a new architecture should be one short file of data.

How: a `Family` has a function from `config.json` to our config, the links between its tensors and
ours, and its named sizes, each given as a `config.json`. `ConfigReader` reads the untrusted file.

Left out: anything that computes; a family is data about names and shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from regard.layers import BlockConfig
from regard.models.checked import MAX_INT, Values
from regard.models.config import HeadConfig, ModelConfig, SpecialTokens
from regard.models.header import BadCheckpoint
from regard.models.weight_map import Link, same
from regard.positions import DynamicNTK, RotaryConfig, scaling_from_dict
from regard.positions.rotary import Pairing

MAX_LAYERS = 10_000
HEADS = ("ForCausalLM", "ForMaskedLM", "ForPreTraining", "ForConditionalGeneration")
"""Endings of the names of classes that have a head with logits over the vocabulary."""

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_python": "gelu"}
ACTIVATIONS |= {"silu": "silu", "swish": "silu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}
ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh"}
"""Hugging Face's names for activations, and ours."""

Source = Mapping[str, Any]
"""What a `config.json` holds."""
Constant = Callable[[ModelConfig, tuple[int, ...]], Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture. Names in `links` are those of the class with a language-model head.

    `prefix` begins the names of the base model inside that class ("transformer."); files of the
    base model alone omit it. `ignored`: patterns (regular expressions, whole name without prefix)
    of tensors that files may have and the model does not need, such as masks kept as buffers.
    `copies`: patterns of names -> the name of the tensor that they repeat if it is tied.
    `constants`: patterns of tensors (without prefix) that files may have though we compute them ->
    a function that returns their values for a given shape, None if no values are right.
    `older_names`: endings of names -> their spelling in older files. `output_layer`: the name of an
    output layer that is tied if and only if a file has no own tensor for it, whatever the config
    says.
    """

    name: str
    config_from: Callable[[ConfigReader], ModelConfig]
    links: Callable[[ModelConfig], list[Link]]
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Constant] = field(default_factory=dict)
    older_names: Mapping[str, str] = field(default_factory=dict)
    output_layer: str | None = None
    sizes: Mapping[str, Source] = field(default_factory=dict)
    model_types: tuple[str, ...] | None = None

    @property
    def types(self) -> tuple[str, ...]:
        return (self.name,) if self.model_types is None else self.model_types


def usual_size(kind: str, cls: str, dim: int, n_layers: int, n_heads: int, **more: Any) -> Source:
    return {
        "model_type": kind,
        "architectures": [cls],
        "hidden_size": dim,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        **more,
    }


def link_head(config: ModelConfig, theirs: str = "lm_head") -> list[Link]:
    """The link of the output layer, if it is not tied to the embedding."""
    has_own = config.head.kind == "lm" and not config.head.tied
    return [same(f"{theirs}.weight", "head.weight")] if has_own else []


@final
class ConfigReader(Values):
    def model(self, family: str, **fields: Any) -> ModelConfig:
        """A `ModelConfig` of `fields`, with what nearly all families read alike as defaults."""
        if "head" not in fields:
            fields["head"] = HeadConfig(tied=self.flag("tie_word_embeddings", True))
        fields.setdefault("tokens", self.special_tokens())
        if "vocab_size" not in fields:
            fields["vocab_size"] = self.count("vocab_size")
        return ModelConfig(family=family, source=self.source, **fields)

    def layers(self, key: str, default: int | None = None) -> int:
        return self.count(key, default, MAX_LAYERS)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A JSON object; absent is empty."""
        value = self.source.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return value

    def activation(self, key: str, default: str) -> Any:
        return ACTIVATIONS[self.choice(key, ACTIVATIONS, default)]

    def token(self, key: str) -> int | None:
        """A token id; absent is None."""
        value = self.count(key, -1, least=-1)
        return None if value < 0 else value

    def tokens(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them; absent is none."""
        value = self.source.get(key)
        if value is None:
            return ()
        given = value if isinstance(value, list) else [value]
        if not all(type(x) is int and 0 <= x <= MAX_INT for x in given):
            raise self.wrong(key, value, "a token id or a list of them")
        return tuple(given)

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuse a setting that is not supported; absent counts as the first of the allowed."""
        value = self.source.get(key)
        if value is not None and not any(type(value) is type(x) and value == x for x in allowed):
            known = " or ".join(map(repr, allowed))
            raise self.wrong(key, value, f"{known}; other settings are not supported")

    def expect_class(self, *endings: str) -> None:
        """Refuse classes with unsupported heads, such as BertForSequenceClassification."""
        value = self.source.get("architectures")
        named = value[0] if isinstance(value, list) and value else None
        if isinstance(named, str) and "For" in named and not named.endswith(endings):
            expected = f"{' or '.join(endings)} at its end, or the bare model"
            raise self.wrong("architectures", named, f"{expected}; other heads are not supported")

    def suppressed(self) -> tuple[int, ...]:
        """Tokens that are never generated, from `bad_words_ids`: lists of one token each."""
        value = self.source.get("bad_words_ids")
        if value is None:
            return ()
        lone = isinstance(value, list) and all(isinstance(x, list) and len(x) == 1 for x in value)
        if not lone or not all(type(x[0]) is int and 0 <= x[0] <= MAX_INT for x in value):
            raise self.wrong("bad_words_ids", value, "lists of one token id each")
        return tuple(x[0] for x in value)

    def special_tokens(self, **more: Any) -> SpecialTokens:
        pad, bos, eos = self.token("pad_token_id"), self.token("bos_token_id"), "eos_token_id"
        return SpecialTokens(pad=pad, bos=bos, eos=self.tokens(eos), **more)

    def rotary(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        fraction: float = 1.0,
        pairing: Pairing = "halves",
        parameters: Mapping[str, Any] | None = None,
    ) -> RotaryConfig:
        """Rotary from `rope_parameters`, or, in older files, `rope_theta` and `rope_scaling`."""
        given = dict(self.mapping("rope_scaling"))
        given.update(self.mapping("rope_parameters") if parameters is None else parameters)
        reader = ConfigReader({**self.source, **given})
        base = reader.number("rope_theta", base)
        fraction = reader.number("partial_rotary_factor", fraction)
        if not 0 < fraction <= 1:
            key = "partial_rotary_factor (or rotary_pct)"
            raise self.wrong(key, fraction, "a number above 0, 1 at most")
        rotary_dim = int(head_dim * fraction)
        key = "original_max_position_embeddings"  # some files have it outside the dict
        original = self.count(key) if self.has(key) else None
        longest = self.source.get("max_position_embeddings")
        try:
            scaling = scaling_from_dict(given, max_len=longest, original_max_len=original)
        except (ValueError, TypeError) as wrong:
            raise BadCheckpoint(f"config.json: rotary scaling is not usable: {wrong}") from None
        return RotaryConfig(
            head_dim=head_dim,
            base=base,
            rotary_dim=None if rotary_dim == head_dim else rotary_dim,
            pairing=pairing,
            scaling=scaling,
        )

    def max_len(self, blocks: Sequence[BlockConfig], default: int = 2048) -> int | None:
        """`max_position_embeddings`; None if "dynamic" rotary scaling allows longer texts.

        In that case layers with a window may have another rotary: what they attend to is near,
        however long the text is.
        """
        given = self.count("max_position_embeddings", default)

        def grows(block: BlockConfig) -> bool:
            return block.rotary is not None and isinstance(block.rotary.scaling, DynamicNTK)

        fixed = [block for block in blocks if not grows(block)]
        endless = len(fixed) < len(blocks) and all(block.window is not None for block in fixed)
        return None if endless else given
