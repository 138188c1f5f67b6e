"""All families (architectures) that regard supports, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regard._files import spell
from regard.models.config import ModelConfig, count_parameters
from regard.models.families import (
    bart,
    bert,
    bloom,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt3,
    gpt_neox,
    gptj,
    llama,
    marian,
    mistral,
    opt,
    original,
    palm,
    qwen2,
    qwen3,
    roberta,
    t5,
)
from regard.models.family import HEADS, ConfigReader, Family
from regard.models.header import BadCheckpoint

MODULES = [gpt2, gpt3, llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3, gpt_neox, gptj, opt]
MODULES += [bloom, palm, bert, roberta, t5, bart, marian, original]
FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in MODULES}
MAX_PARAMETERS = 2**50  # a thousand times the largest model; more overflows torch's sizes
BY_MODEL_TYPE = {kind: family for family in FAMILIES.values() for kind in family.types}


class UnknownFamily(BadCheckpoint):
    """A config.json names an architecture that regard does not support."""


def find_family(source: Mapping[str, Any]) -> Family:
    kind = source.get("model_type")
    if not isinstance(kind, str) or kind not in BY_MODEL_TYPE:
        came = f"model_type {spell(kind)}, which regard does not know"
        came = "no model_type, which says what the architecture is" if kind is None else came
        refuse = UnknownFamily if isinstance(kind, str) else BadCheckpoint
        raise refuse(f"config.json has {came}. Known are {', '.join(sorted(BY_MODEL_TYPE))}")
    return BY_MODEL_TYPE[kind]


def config_of(source: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` for a config.json of Hugging Face.

    Args:
        source: That file's content; "model_type" names the architecture.

    Raises:
        BadCheckpoint: (a ValueError) An architecture or a setting that regard does not have.

    Example:
        >>> sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
        >>> sizes |= {"vocab_size": 97, "intermediate_size": 96}
        >>> config = regard.models.config_of({"model_type": "llama", **sizes})
    """
    if not isinstance(source, Mapping):
        came = f"source is a {type(source).__name__}; expected the dict of a config.json"
        raise TypeError(f'{came}; for a published size use models.named_config("gpt2")')
    family = find_family(source)
    if source.get("quantization_config") is not None:
        what = "config.json has a quantization_config: the weights are packed in a format of"
        raise BadCheckpoint(f"{what} another program. Load the unquantised model, or its GGUF file")
    try:
        config = family.config_from(ConfigReader(source))
    except BadCheckpoint:
        raise
    except (ValueError, TypeError, OverflowError) as wrong:
        raise BadCheckpoint(f"config.json makes no {family.name} model: {wrong}") from None
    ConfigReader(source).expect_class(*HEADS)
    if config.decoder:
        ConfigReader(source).expect("is_causal", True)
    n_parameters = count_parameters(config)
    if n_parameters > MAX_PARAMETERS:
        what = f"config.json makes a {family.name} model of {n_parameters:,} parameters; expected"
        raise BadCheckpoint(f"{what} at most {MAX_PARAMETERS:,}: one of its sizes is wrong")
    return config


def named_config(name: str) -> ModelConfig:
    """The `ModelConfig` of a published size.

    Args:
        name: "gpt2-medium", "bert-base-uncased", ...; another name raises a ValueError that lists
            all of them.
    """
    for family in FAMILIES.values():
        if name in family.sizes:
            return config_of(family.sizes[name])
    known = sorted(size for family in FAMILIES.values() for size in family.sizes)
    raise ValueError(f"no size is named {name!r}; there are {', '.join(known)}")
